"""Do two checkouts of this repository train bit-identically? Runs both side by side and compares.

    python -m tools.dev.compare_trees BEFORE AFTER                              all presets, on 1 and 2 ranks
    python -m tools.dev.compare_trees BEFORE AFTER --presets golf gpt2 --ranks 1 --steps 20
    python -m tools.dev.compare_trees BEFORE AFTER --presets golf_plus --env EVAL_SLIDING=32

BEFORE and AFTER are folders with a train_gpt.py. There is one case per preset: the preset itself at toy
size, on dummy tokens, on the CPU, fp32, not compiled, one thread per rank. Compared bit by bit are the
train_loss of every step and every val_loss (both from events.jsonl), the tensors of final_model.pt, and the
scores, steps and tokens of result.json, among them the score of the artifact as read back, if the recipe has
one. An artifact's bytes may differ.

One line per case and number of ranks; exit 1 if anything differs.

What the tool relies on: the names of constants in CASES; in result.json
steps, tokens, trained, artifact, eval, stop_reason and val_*; in events.jsonl kind, step, train_loss and
val_loss; in final_model.pt a dictionary with the entry tensors.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tools.dev.bench import random_data

# ------------------------------------------------------------ cases: each preset at toy size
# Constants that every recipe has, or that are at their off-value here.
COMMON = dict(
    RUN_ID="run", DEVICE="cpu", DTYPE="float32", COMPILE="0", FP8="off", VOCAB_SIZE="512",
    MAX_WALLCLOCK_SECONDS="0", WARMUP_STEPS="2", TRAIN_LOG_EVERY="1", MUON_MOMENTUM_WARMUP_STEPS="20")

# What is scaled down. Everything else is as the preset has it, and no case turns on what its preset lacks.
CASES = {
    # the batch doubles halfway; n-gram counts and copies, bigrams, key offset; int8 with zlib
    "tiny": dict(
        MODEL_DIM="64", TRAIN_SEQ_LEN="128", TRAIN_BATCH_TOKENS="512", WINDOW_SCHEDULE="48",
        BIGRAM_ROWS="1024", COUNT_BITS="12", ARTIFACT_KEEP="3000"),
    # GQA, U-Net skips, tied embedding, warmdown in steps; int8 with zlib
    "golf": dict(
        MODEL_DIM="64", NUM_LAYERS="5", NUM_HEADS="4", NUM_KV_HEADS="2", TRAIN_SEQ_LEN="128",
        TRAIN_BATCH_TOKENS="512", WARMDOWN_ITERS="20", ARTIFACT_KEEP="3000"),
    # loops from halfway on, EMA, GPTQ, sliding evaluation; brotli
    "golf_plus": dict(
        MODEL_DIM="48", NUM_HEADS="4", NUM_KV_HEADS="2", TRAIN_SEQ_LEN="64", TRAIN_BATCH_TOKENS="256",
        EMA_DECAY="0.9", GPTQ_BATCHES="4", EVAL_SLIDING="48", ARTIFACT_KEEP="2000"),
    # four stages of batch, row length and window, the last of them the extension; Adam every second step
    "speedrun": dict(
        MODEL_DIM="48", NUM_HEADS="3", TRAIN_SEQ_LEN="64", TRAIN_BATCH_TOKENS="128", MAX_DOC_LEN="96",
        WINDOW_SCHEDULE="16,32,48,64", WINDOW_BLOCK="8", EVAL_WINDOW="96", EVAL_CONTEXT="512",
        EXTENSION_ITERATIONS="4", MUON_MOMENTUM_COOLDOWN_STEPS="6"),
    # also document lengths, losses on several targets and prefixes by stage; the embedding is untied; fp8
    # with delayed scales
    "speedrun_plus": dict(
        MODEL_DIM="64", NUM_HEADS="4", TRAIN_SEQ_LEN="64", TRAIN_BATCH_TOKENS="128", MAX_DOC_LEN="96",
        DOC_SCHEDULE="48,96,96,96", WINDOW_SCHEDULE="16,32,48,64", WINDOW_BLOCK="8", EVAL_WINDOW="96",
        EVAL_CONTEXT="512", BIGRAM_ROWS="2560", EXTENSION_ITERATIONS="4", MUON_MOMENTUM_COOLDOWN_STEPS="6",
        QK_DIM="8", DC_WINDOW="14", MUDD_DIM="16", MUDD_GATE_DIM="16", FP8="all"),
    # windows, rates and decay by the depth dial, narrower than it says; grad accumulation on 1 rank
    "gpt2": dict(
        DEPTH="4", MODEL_DIM="64", TRAIN_SEQ_LEN="128", TRAIN_BATCH_TOKENS="512", DEVICE_BATCH_SIZE="2"),
    # also warmup of the LR, smear, backout, momentum that falls in the warmdown; all products in fp8
    "gpt2_plus": dict(
        DEPTH="4", MODEL_DIM="64", TRAIN_SEQ_LEN="128", TRAIN_BATCH_TOKENS="512", DEVICE_BATCH_SIZE="2",
        LR_WARMUP_STEPS="5", FP8="all")}


SIZES = SimpleNamespace(vocab_size=512, eval_context=3_000)  # of the dataset that all runs read


def settings_of(case: str, steps: int) -> dict[str, str]:
    """The environment of a run of this case with so many steps, those of its extension among them."""
    settings = COMMON | CASES[case]
    iterations = steps - int(settings.get("EXTENSION_ITERATIONS", "0"))
    settings |= dict(PRESET=case, ITERATIONS=str(iterations))
    settings |= dict(SAVE_EVERY=str(steps), VAL_LOSS_EVERY=str(steps // 2))
    return settings


# ------------------------------------------------------------ one run
def run_tree(ranks: int, settings: dict[str, str], tree: Path, folder: Path) -> str:
    """Runs train_gpt.py of that tree in a new working folder -> why it failed, or ""."""
    folder.mkdir()
    launcher = []
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    env |= dict(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1") | settings
    command = [sys.executable, *launcher, str(tree.resolve() / "train_gpt.py")]
    done = subprocess.run(command, cwd=folder, env=env, text=True, errors="replace",
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = done.stdout.splitlines()
    why = [line for line in lines if line.startswith("train_gpt: ")] or lines[-15:]
    return "\n    ".join([f"{folder.name} ended with {done.returncode}", *why]) if done.returncode else ""


RESULTS = ("trained", "artifact", "eval", "steps", "tokens", "stop_reason")


def read_run(folder: Path) -> dict[str, Any]:
    """{name: number, tensor or other value} of what the run in this working folder left behind."""
    run = folder / "logs/run"
    found = {}
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] in ("train", "val"):
            name = f"{event['kind']}_loss"
            found[f"{name} of step {event['step']}"] = event[name]
    for name, tensor in torch.load(run / "final_model.pt", "cpu", weights_only=True)["tensors"].items():
        found[f"tensor {name}"] = tensor
    for name, value in json.loads((run / "result.json").read_text()).items():
        if name in RESULTS or name.startswith("val_"):
            found[f"result {name}"] = value
    return found


# ------------------------------------------------------------ comparing
def bits(tensor: Tensor) -> Tensor:
    """The bytes of each number (N, itemsize), so that 0 and -0 differ and nan equals itself."""
    return tensor.contiguous().view(-1, 1).view(torch.uint8)


def difference(old: Any, new: Any) -> str:
    """A few words on where two values differ; "" if they are the same bits."""
    if not isinstance(old, Tensor):
        return "" if old == new else f"{old!r} before, {new!r} after"
    if old.shape != new.shape or old.dtype != new.dtype:
        return f"{old.dtype} {tuple(old.shape)} before, {new.dtype} {tuple(new.shape)} after"
    places = (bits(old) != bits(new)).any(1).nonzero().flatten().tolist()
    if not places:
        return ""
    first = places[0]
    where = [int(i) for i in np.unravel_index(first, old.shape)]
    return (f"{old.flatten()[first].item()!r} before, {new.flatten()[first].item()!r} after at {where}, the "
            f"first of {len(places)} of {old.numel()} numbers")


def first_difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The first difference between two runs as one sentence, or ""."""
    for name in before | after:
        if name not in before or name not in after:
            return f"{name} is only {'before' if name in before else 'after'}"
        words = difference(before[name], after[name])
        if words:
            return f"{name}: {words}"
    return ""


def compare(args: argparse.Namespace, root: Path, case: str, ranks: int) -> tuple[bool, str]:
    """Runs both trees at the same time -> (are they identical?, details)."""
    settings = settings_of(case, args.steps) | random_data(root / "data", SIZES, 300_000, longest=300)
    settings |= dict([word.split("=", 1) for word in args.env])
    folders = [root / f"{case}_{ranks}_before", root / f"{case}_{ranks}_after"]
    with ThreadPoolExecutor() as pool:
        run = partial(run_tree, ranks, settings)
        failures = [*filter(None, pool.map(run, args.trees, folders))]
    if failures:
        return False, "FAILED: " + failures[0]
    before, after = [read_run(folder) for folder in folders]
    if f"train_loss of step {args.steps}" not in before:
        return False, f"FAILED: BEFORE has not logged step {args.steps}"
    words = first_difference(before, after)
    if words:
        return False, f"DIFFERENT: {words}"
    kinds = Counter([name.split()[0] for name in before])
    counts = ", ".join([f"{count} x {kind}" for kind, count in kinds.items()])
    return True, f"identical: {counts}"


# ------------------------------------------------------------ command line
def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Refuses unknown presets, a number of steps that misses some stage, and folders without a trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trees", nargs=2, type=Path, metavar="FOLDER", help="BEFORE and AFTER")
    parser.add_argument("--presets", nargs="+", choices=CASES, default=[*CASES], help="by default all")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="by default %(default)s")
    parser.add_argument("--steps", type=int, default=50, help="an even number, 12 or more")
    parser.add_argument("--env", metavar="NAME=value", nargs="+", default=[], help="overrides for both trees")
    args = parser.parse_args(argv)
    if args.steps < 12 or args.steps % 2:
        parser.error("--steps must be even and at least 12")
    for word in args.env:
        if "=" not in word:
            parser.error(f"--env {word}: must be NAME=value")
    for tree in args.trees:
        if not (tree / "train_gpt.py").is_file():
            parser.error(f"there is no train_gpt.py in {tree}")
    return args


def main(argv: list[str]) -> int:
    args = parse_arguments(argv)
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for preset in args.presets:
            for ranks in args.ranks:
                identical, details = compare(args, root, preset, ranks)
                outcomes.append(identical)
                print(f"{preset} {ranks} {'rank' if ranks == 1 else 'ranks'}: {details}", flush=True)
    print(f"{sum(outcomes)} of {len(outcomes)} are identical")
    return int(not all(outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
