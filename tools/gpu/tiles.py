"""Which tiles of flex attention compile without spilling: python tools/gpu/tiles.py [--gpu h100 b200 5090]

For the head sizes of queries and keys given by --heads (96 with values of 128, as speedrun_plus has them,
and 64 with 64, as tiny has). It compiles forward and backward on static.c's stand-in for a GPU by the
trainer's own functions, one process a card, and needs the interpreter of `./run.sh static`
(.venv-static/bin/python). torch's own choice comes first. blocks: how many an SM can hold by registers,
shared memory and threads. It launches nothing, so which of these is fastest only a card can say: gpu-report
times parts.py's TILES beside torch's choice."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
if __name__ == "__main__":  # our modules are those of this checkout, whatever else the path holds
    sys.path[:] = [str(ROOT), *[folder for folder in sys.path if folder != str(HERE)]]
from tools.gpu import static as static_gpu  # noqa: E402
from tools.run.cards import CARDS, Card  # noqa: E402

ROWS = 49_152  # tokens of a row in speedrun_plus's third stage
VALUES = {96: 128}  # the width of values where it is not that of keys
FORWARD = [dict(BLOCK_M=m, BLOCK_N=n) for m, n in ((64, 64), (128, 32), (128, 64), (128, 128))]
# Four numbers as torch pairs them: BLOCK_M1, BLOCK_N1, BLOCK_M2, BLOCK_N2
BACKWARD = [dict(BLOCK_M1=m, BLOCK_N1=n, BLOCK_M2=n, BLOCK_N2=m) for m, n in ((32, 64), (64, 64), (64, 128))]
LAUNCHES = [dict(num_warps=warps, num_stages=stages) for warps, stages in itertools.product((4, 8), (2, 3))]


def blocks_of(card: Card, threads: int, shared: int, registers: int) -> int:
    """How many blocks an SM holds. Registers are handed out to a warp in units of 256."""
    warps = threads // 32
    by_registers = 65_536 // (-(-32 * registers // 256) * 256 * warps)
    by_shared = (card.shared + 1024) // (shared + 1024)  # a block takes 1 KB more than it asks for
    return min(by_registers, by_shared, card.threads // threads)


def options_of(backward: bool) -> Iterator[dict[str, Any]]:
    """FLEX_OPTIONS to try, torch's own choice first."""
    yield {}
    prefix = "bwd_" if backward else "fwd_"
    for tile, launch in itertools.product(BACKWARD if backward else FORWARD, LAUNCHES):
        yield {prefix + name: value for name, value in (tile | launch).items()}


def compile_all(card: Card, heads: list[int]) -> None:
    """In a process with the stand-in in place: prints a line for each way."""
    import torch

    trainer = static_gpu.load_trainer(ROOT / "train_gpt.py")
    recorder = static_gpu.Recorder()
    device = torch.device("cuda")
    documents = torch.zeros((1, ROWS), dtype=torch.int64, device=device)

    def attend(q: Any, k: Any, v: Any, window: Any) -> Any:
        mask = trainer.gpu_window_mask(window, ROWS, documents, device)
        return trainer.gpu_attention(q, k, v, mask)

    for head, backward in itertools.product(heads, (False, True)):
        widths = (head, head, VALUES.get(head, head))
        inputs = []
        for width in widths:
            x = torch.empty((1, 6, ROWS, width), dtype=torch.bfloat16, device=device)
            inputs.append(x.requires_grad_(backward))
        inputs.append(trainer.gpu_window(1408, ROWS, device, True))
        for options in options_of(backward):
            torch._dynamo.reset()
            trainer.FLEX_OPTIONS = options
            fast = torch.compile(attend, dynamic=False, fullgraph=True)

            def run() -> None:
                y = fast(*inputs)
                if backward:
                    y.sum().backward()

            words = " ".join([f"{name.split('_', 1)[1]} {value}" for name, value in options.items()])
            side = "backward" if backward else "forward"
            what = f"{head:3} {side:8} {words or 'torch:'}"
            try:
                _, lines, _ = recorder.of(run)
            except Exception as error:  # tiles that do not fit
                print(f"{what}: refused, {str(error).strip().splitlines()[0][:90]}", flush=True)
                continue
            kind = "flex_attention_backward" if backward else "flex_attention"
            for line in lines:
                if line[0] == "triton" and kind in line[1] and "tem_" in line[1]:
                    threads, shared, registers, stack = [int(word) for word in line[3:7]]
                    blocks = blocks_of(card, threads, shared, registers)
                    print(f"{what}: grid {line[2]}, {threads} threads, {shared:,} bytes shared, {registers} "
                          f"registers, {stack} spilled, {blocks} blocks", flush=True)  # fmt: skip
                elif line[0] == "refused":
                    print(f"{what}: {line[1]}", flush=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", nargs="+", default=["h100", "b200", "5090"], choices=CARDS)
    parser.add_argument("--heads", nargs="+", type=int, default=[96, 64])
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # in a child
    args = parser.parse_args(argv)
    if args.one:
        compile_all(CARDS[args.gpu[0]], args.heads)
        return 0
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        library = static_gpu.build(folder)
        for gpu in args.gpu:
            print(f"\n== {gpu}", flush=True)
            env = static_gpu.environment(library, CARDS[gpu], 1, tempfile.mkdtemp(dir=folder))
            words = [sys.executable, __file__, "--one", "--gpu", gpu, "--heads", *map(str, args.heads)]
            code |= subprocess.run(words, env=env).returncode
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
