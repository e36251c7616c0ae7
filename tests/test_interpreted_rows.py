"""Our own kernels on a few rows of tensors as large as a run's, by Triton's interpreter.

49,152 x 50,304 logits are more than 2^31. Here only the rows that are looked at exist, at the addresses that
they would have, so an offset in 32 bits or a byte beyond these rows is an error. loss_kernel must give what
row_losses() gives, transpose_kernel the transpose. `./run.sh test -m static` runs this, since a CUDA build of
torch has Triton.
"""

import itertools

import pytest
import torch

from helpers import load_module, planted

pytestmark = pytest.mark.static
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
BITS = {torch.float8_e5m2: torch.uint8, torch.bfloat16: torch.int16}
FILLING = 77  # the bits of what must not be written
# what is written in the script, in its place, words on what is wrong
FAULTS = {
    "nothing": ("", "", ""),
    "rows of the loss in 32 bits": (
        "row = tl.program_id(0).to(tl.int64)\n", "row = tl.program_id(0)\n", "row 42,691 of 50,304"),
    "rows of the transpose in 32 bits": (
        "row = tl.program_id(0).to(tl.int64) * ROWS", "row = tl.program_id(0) * ROWS", "tile (767, "),
    "columns of the transpose in 32 bits": (
        "column = tl.program_id(1).to(tl.int64) * COLUMNS", "column = tl.program_id(1) * COLUMNS", ", 392)"),
    "a sum over the tail": (
        "total += tl.where(i < V, tl.exp2(most * part - most), 0.0)",
        "total += tl.where(i < V, tl.exp2(most * part - most), 1e-3)", "of 50,304"),
    "a gradient stored beyond the tail": (
        "error_slope.to(grad.dtype.element_ty), mask=i < V)", "error_slope.to(grad.dtype.element_ty))",
        "of 50,304"),
    "targets that are none": (
        "weight = tl.load(weights + k, mask=target >= 0, other=0.0)",
        "weight = tl.load(weights + k, mask=k < K, other=0.0)", "targets"),
    "targets that are equal": (
        "tl.where(target[:, None] == target[None, :], weight[None, :], 0.0)",
        "tl.where(k[:, None] == k[None, :], weight[None, :], 0.0)", "3 targets"),
}  # fmt: skip


def rows_to_look_at(V):
    """The first ones, those around 2^31 logits and the last ones."""
    crossing = 2**31 // V
    return [1, N - 2] + ([crossing, crossing + 1] if crossing < N - 3 else [])


def check_row(trainer, interpreter, V, cap, dtype, many, row, missing):
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
    factor = 57344.0 / 2 if dtype == torch.float8_e5m2 else 1 / N  # so that fp8's range is used
    losses, want = trainer.row_losses(logits[1:2], targets[1:2], weights, cap, factor, dtype)
    grad = torch.full((ROWS, V), FILLING, dtype=BITS[dtype]).view(dtype)
    if dtype == logits.dtype:
        grad = logits  # in place, as kernel_losses() has it
    untouched = grad.view(BITS[dtype])[[0, 2]].clone()
    got = torch.full((ROWS,), -1.0)
    limit, shift, width = cap
    values = dict(logits=logits, targets=targets, weights=weights, losses=got, grad=grad, V=V, K=many,
                  top=2 * limit, shift=shift, scale=2 / (width or limit), factor=factor,
                  BLOCK=min(trainer.LOSS_BLOCK, 1 << (V - 1).bit_length()))  # fmt: skip
    first = row - 1
    before = dict(logits=first * V, targets=first * many, losses=first, grad=first * V)
    interpreter.run_programs(trainer.loss_kernel.fn, values, (N, 1, 1), [(row, 0, 0)], before)
    assert torch.equal(grad.view(BITS[dtype])[[0, 2]], untouched) and got[[0, 2]].tolist() == [-1, -1]
    torch.testing.assert_close(got[1], losses[0], rtol=1e-5, atol=1e-5)
    want = want.float()
    assert (grad[1].float() - want[0]).norm() <= 1e-3 * want.norm()


def check_tile(trainer, interpreter, rows, V, tile):
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
    counts = (-(-rows // 64), -(-V // 128), 1)
    interpreter.run_programs(trainer.transpose_kernel.fn, values, counts, [(*tile, 0)], before)
    assert torch.equal(out, want)


def cases():
    """(what is looked at, the check, its arguments) each."""
    for V, cap, dtype, many in LOSSES:
        for row, missing in itertools.product(rows_to_look_at(V), (False, True)):
            yield f"row {row:,} of {V:,}, {many} targets", check_row, (V, cap, dtype, many, row, missing)
    for rows, V in ((N, 50_304), (N - 5, 50_257)):
        last = (rows - 1) // 64, (V - 1) // 128
        for tile in itertools.product((0, last[0]), (0, last[1])):
            yield f"tile {tile} of {rows:,} x {V:,}", check_tile, (rows, V, tile)


@pytest.mark.parametrize("name", FAULTS)
def test_rows_beyond_two_to_the_31(name, tmp_path):
    """Each row and tile is right, and what is planted is found where it lies."""
    from tools.gpu import interpret_kernels
    old, new, words = FAULTS[name]
    trainer = load_module(planted(tmp_path, old, new), f"train_gpt_rows_{len(name)}")
    interpreter = interpret_kernels.Interpreter()
    wrong = []
    for what, check, arguments in cases():
        try:
            check(trainer, interpreter, *arguments)
        except (AssertionError, IndexError):
            wrong.append(what)
    assert bool(wrong) == bool(old) and (not old or any(words in what for what in wrong)), wrong
