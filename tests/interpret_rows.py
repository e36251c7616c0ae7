"""Our own kernels on a few rows of tensors as large as a run's, by Triton's interpreter:

    .venv-static/bin/python tests/interpret_rows.py

49,152 x 50,304 logits are more than 2^31. Here only the rows that are looked at exist, at the addresses
which they would have, so an offset in 32 bits or a byte beyond these rows is an error. loss_kernel must give
what the readable row_losses() gives, transpose_kernel the transpose. Exit code 1 where one doesn't.
"""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import train_gpt  # noqa: E402
from tools.gpu import interpret_kernels  # noqa: E402

N = 49_152  # tokens of a rank in the speedrun's last stage
ROWS = 3  # that exist; the one in the middle is computed
PLAIN = (15.0, 0.0, 0.0)
ASYMMETRIC = (11.5, 5.0, 15.0)  # speedrun_plus: cap, shift and width of softcap()
# vocabularies: speedrun's ends within a block of 2,048, gpt2's with one; golf's is less than one
LOSSES = [
    (50_304, PLAIN, torch.float8_e5m2, 1),
    (50_304, PLAIN, torch.bfloat16, 1),
    (50_304, ASYMMETRIC, torch.float8_e5m2, 3),
    (50_257, PLAIN, torch.bfloat16, 1),
    (32_768, PLAIN, torch.float8_e5m2, 1),
    (8192, (30.0, 0.0, 0.0), torch.bfloat16, 1),
    (1024, (30.0, 0.0, 0.0), torch.bfloat16, 2),
]
FACTOR = 1 / N
BITS = {torch.float8_e5m2: torch.uint8, torch.bfloat16: torch.int16}
FILLING = 77  # the bits of what must not be written
interpreter = interpret_kernels.Interpreter()


def rows_to_look_at(V: int) -> list[int]:
    """The first ones, those around 2^31 logits and the last ones."""
    found = [1, N - 2]
    crossing = 2**31 // V
    if crossing < N - 3:
        found += [crossing, crossing + 1]
    return found


def say(good: bool, *words: object) -> bool:
    print("equal" if good else "DIFFERENT", *words, flush=True)
    return good


def loss_row(V: int, cap: tuple[float, float, float], dtype: torch.dtype, many: int, row: int,
             missing: bool) -> bool:  # fmt: skip
    """One row by the kernel and by row_losses(). missing: its last target is none."""
    draw = torch.Generator().manual_seed(row)
    logits = (12 * torch.randn(ROWS, V, generator=draw)).bfloat16()
    targets = torch.randint(V, (ROWS, many), generator=draw)
    targets[1, 0] = V - 1  # in the block that is masked
    if missing:
        targets[1, -1] = -1
    elif many > 2:
        targets[1, 2] = targets[1, 1]
    weights = torch.tensor([1.0, 0.5, 0.25])[:many]
    factor = FACTOR
    if dtype == torch.float8_e5m2:
        factor = 57344.0 / 2  # so that its range is used, as by head_scales()
    losses, want = train_gpt.row_losses(logits[1:2], targets[1:2], weights, cap, factor, dtype)
    grad = torch.full((ROWS, V), FILLING, dtype=BITS[dtype]).view(dtype)
    if dtype == logits.dtype:
        grad = logits  # in place, as kernel_losses() has it
    untouched = grad.view(BITS[dtype])[[0, 2]].clone()
    got = torch.full((ROWS,), -1.0)
    limit, shift, width = cap
    values = dict(logits=logits, targets=targets, weights=weights, losses=got, grad=grad, V=V, K=many,
                  top=2 * limit, shift=shift, scale=2 / (width or limit), factor=factor,
                  BLOCK=min(train_gpt.LOSS_BLOCK, 1 << (V - 1).bit_length()))  # fmt: skip
    first = row - 1
    before = dict(logits=first * V, targets=first * many, losses=first, grad=first * V)
    what = f"row {row:,} of {N:,} x {V:,} logits, {str(dtype)[6:]}, {many} targets"
    try:
        interpreter.run_programs(train_gpt.loss_kernel.fn, values, (N, 1, 1), [(row, 0, 0)], before)
    except Exception as problem:
        return say(False, what, problem)
    off = float((grad[1].float() - want[0].float()).norm() / want.float().norm().clamp(min=1e-30))
    loss_off = abs(float(got[1] - losses[0])) / max(1.0, abs(float(losses[0])))
    if not torch.equal(grad.view(BITS[dtype])[[0, 2]], untouched) or got[[0, 2]].tolist() != [-1, -1]:
        return say(False, what, "other rows were written")
    return say(off < 1e-3 and loss_off < 1e-5, what, f"loss off by {loss_off:.1e}, gradient {off:.1e}")


def transposed_tile(rows: int, V: int, tile: tuple[int, int]) -> bool:
    """A program of transpose_kernel, on a matrix (rows, V)."""
    low = tile[0] * 64
    left = tile[1] * 128
    height = min(64, rows - low)
    width = min(128, V - left)
    draw = torch.Generator().manual_seed(left)
    source = torch.randint(256, (height, V), dtype=torch.uint8, generator=draw)
    out = torch.full((width, rows), FILLING, dtype=torch.uint8)
    want = out.clone()
    want[:, low:low + height] = source[:, left:left + width].T
    values = dict(source=source.view(torch.float8_e5m2), out=out.view(torch.float8_e5m2), N=rows, V=V,
                  ROWS=64, COLUMNS=128)  # fmt: skip
    before = dict(source=low * V, out=left * rows)
    what = f"tile {tile} of {rows:,} x {V:,} numbers, transposed"
    counts = (-(-rows // 64), -(-V // 128), 1)
    try:
        interpreter.run_programs(train_gpt.transpose_kernel.fn, values, counts, [(*tile, 0)], before)
    except Exception as problem:
        return say(False, what, problem)
    return say(torch.equal(out, want), what)


def main() -> int:
    good = []
    for V, cap, dtype, many in LOSSES:
        for row in rows_to_look_at(V):
            good += [loss_row(V, cap, dtype, many, row, missing) for missing in (False, True)]
    for rows, V in ((N, 50_304), (N - 5, 50_257)):
        last = (rows - 1) // 64, (V - 1) // 128
        good += [transposed_tile(rows, V, tile) for tile in itertools.product((0, last[0]), (0, last[1]))]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
