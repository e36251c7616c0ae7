"""Do two checkouts of this repository train bit-identically? Runs both side by side and compares.

    python -m tools.dev.compare_trees BEFORE AFTER                              all presets, on 1 and 2 ranks
    python -m tools.dev.compare_trees BEFORE AFTER --presets golf,gpt2 --ranks 1 --steps 20
    python -m tools.dev.compare_trees BEFORE AFTER --presets golf_plus --env EVAL_SLIDING=32

BEFORE and AFTER are folders with a train_gpt.py. There is one case per preset: the preset itself at toy
size, on dummy tokens, on the CPU, fp32, not compiled, one thread per rank. Compared exactly are the
train_loss of every step and every val_loss (both from events.jsonl), the tensors of final_model.pt, and the
scores, steps and tokens of result.json, among them the score of the artifact as read back, if the recipe has
one. An artifact's bytes may differ, since the container may: then the line says so.

One line per case and number of ranks; exit 1 if anything differs.

Neither train_gpt.py is imported. What the tool relies on: the names of constants in CASES; in result.json
steps, tokens, trained, artifact, eval, stop_reason and val_*; in events.jsonl kind, step, train_loss and
val_loss; in final_model.pt a dictionary with the entry tensors.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# ------------------------------------------------------------ cases: each preset at toy size
# Constants that every recipe has, or that are at their off-value here. Older trees made samples.
COMMON = dict(
    RUN_ID="run", DEVICE="cpu", DTYPE="float32", COMPILE="0", FP8="off", CORE="0", SAMPLE_TOKENS="0",
    DATA_PATH="data/datasets/toy", DATA_FINGERPRINT="", TOKENIZER_PATH="", VOCAB_SIZE="512", VAL_TOKENS="0",
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


def settings_of(case: str, steps: int) -> dict[str, str]:
    """The environment of a run of this case with so many steps, those of its extension among them."""
    settings = COMMON | CASES[case]
    iterations = steps - int(settings.get("EXTENSION_ITERATIONS", "0"))
    settings |= dict(PRESET=case, ITERATIONS=str(iterations))
    settings |= dict(SAVE_EVERY=str(steps), VAL_LOSS_EVERY=str(steps // 2))
    return settings


# ------------------------------------------------------------ dummy data
BOS = 1
BYTES_PER_TOKEN = 3  # as the manifest states it, so that there is a val_bpb


def dummy_documents(total: int, seed: int) -> list[list[int]]:
    """Documents of 20 to 299 tokens, about `total` in all. Each token has four successors, of which the first
    is the likeliest, so that there is something to learn and n-grams come back."""
    successors = np.random.default_rng(0).integers(2, 512, (512, 4)).tolist()  # the same for any seed
    draw = np.random.default_rng(seed)
    documents = []
    while total > 0:
        length = int(draw.integers(20, 300))
        choices = np.minimum(draw.geometric(0.6, length - 1), 4) - 1
        document = [BOS]
        token = int(draw.integers(2, 512))
        for choice in choices.tolist():
            document.append(token)
            token = successors[token][choice]
        documents.append(document)
        total -= length
    return documents


def write_data(root: Path) -> None:
    """data/datasets/toy under root: three train shards of 100,000 tokens, one val shard of 3,000."""
    folder = root / "data/datasets/toy"
    folder.mkdir(parents=True)
    files = []
    for seed, (split, total) in enumerate([("val", 3_000)] + 3 * [("train", 100_000)]):
        documents = dummy_documents(total, seed)
        tokens = np.concatenate(documents).astype("<u2")
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, len(tokens)
        path = folder / f"toy_{split}_{seed:06d}.bin"
        path.write_bytes(header.tobytes() + tokens.tobytes())
        # the groups of documents that packing=best_fit deals to the ranks
        groups = [16] * -(-len(documents) // 16)
        files.append(dict(path=path.name, split=split, tokens=len(tokens), row_groups=groups))
    val_bytes = BYTES_PER_TOKEN * int(str(files[0]["tokens"]))
    manifest = dict(version=1, name="toy", tokenizer=dict(vocab_size=512, bos_id=BOS, lossless=False),
                    files=files, val_bytes=val_bytes, text_fingerprint="toy")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    # the bytes of each token, as GPT-2's file of its vocabulary has them, for losses on prefixes of tokens
    letters = "abcdefghijklmnop"
    pairs = [a + b for a in letters for b in letters]
    tokens = [*letters, *pairs, *[pair[0] + pair for pair in pairs]]
    (root / "data/tokenizers").mkdir()
    vocabulary = {token: number for number, token in enumerate(tokens[:511])} | {"<|endoftext|>": 511}
    (root / "data/tokenizers/gpt2_vocab.json").write_text(json.dumps(vocabulary))


# ------------------------------------------------------------ one run
def start_run(tree: Path, folder: Path, data: Path, ranks: int,
              settings: dict[str, str]) -> subprocess.Popen:
    """Starts train_gpt.py of that tree in a new working folder; its output goes to output.txt there."""
    folder.mkdir()
    (folder / "data").symlink_to(data)
    launcher = []
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    env |= dict(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1") | settings
    with open(folder / "output.txt", "wb") as output:
        return subprocess.Popen([sys.executable, *launcher, str(tree / "train_gpt.py")], cwd=folder, env=env,
                                stdout=output, stderr=subprocess.STDOUT)


def wait_for(processes: list[subprocess.Popen]) -> list[int]:
    """Their exit codes. Raises TimeoutExpired; then none is left running."""
    end = time.perf_counter() + TIMEOUT
    try:
        return [process.wait(timeout=max(0.0, end - time.perf_counter())) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait()


class Finished(NamedTuple):
    """What a run left behind: {name: exact number, tensor or other value} each."""
    train_losses: dict[str, float]
    val_losses: dict[str, float]
    tensors: dict[str, Tensor]
    results: dict[str, Any]
    artifact: bytes  # b"" if the recipe has none


def read_run(folder: Path) -> Finished:
    """What the run in this working folder left behind."""
    run = folder / "logs/run"
    result = json.loads((run / "result.json").read_text())
    train_losses = {}
    val_losses = {}
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "train":
            train_losses[f"step {event['step']}"] = event["train_loss"]
        elif event["kind"] == "val":
            val_losses[f"step {event['step']}"] = event["val_loss"]
    wanted = ("trained", "artifact", "eval", "steps", "tokens", "stop_reason")
    results = {name: value for name, value in result.items() if name in wanted or name.startswith("val_")}
    results["eval"] = {name: value for name, value in result["eval"].items() if name != "eval_window"}
    tensors = torch.load(run / "final_model.pt", "cpu", weights_only=True)["tensors"]
    artifact = b"".join([path.read_bytes() for path in run.glob("final_model.*.ptz")])
    return Finished(train_losses, val_losses, tensors, results, artifact)


# ------------------------------------------------------------ comparing
def bits(tensor: Tensor) -> Tensor:
    """The tensor as whole numbers, so that 0 and -0 differ and nan equals itself."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().flatten().view(kinds[tensor.element_size()])


def tensor_difference(old: Tensor, new: Tensor) -> str:
    """A few words on where two tensors differ; "" if they are the same bits."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return f"{old.dtype} {tuple(old.shape)} before, {new.dtype} {tuple(new.shape)} after"
    places = (bits(old) != bits(new)).nonzero().flatten().tolist()
    if not places:
        return ""
    first = places[0]
    where = [int(i) for i in np.unravel_index(first, old.shape)]
    return (f"{old.flatten()[first].item()!r} before, {new.flatten()[first].item()!r} after at {where}, the "
            f"first of {len(places)} of {old.numel()} numbers")


def value_difference(old: Any, new: Any) -> str:
    if isinstance(old, Tensor):
        return tensor_difference(old, new)
    return "" if old == new else f"{old!r} before, {new!r} after"


def first_difference(before: Finished, after: Finished) -> str:
    """The first difference between two runs as one sentence, or ""."""
    kinds: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("train_loss", before.train_losses, after.train_losses),
        ("val_loss", before.val_losses, after.val_losses),
        ("tensor", before.tensors, after.tensors),
        ("result", before.results, after.results)]
    for kind, old_values, new_values in kinds:
        for name in old_values | new_values:
            if name not in new_values:
                return f"{kind} {name} is only before"
            if name not in old_values:
                return f"{kind} {name} is only after"
            difference = value_difference(old_values[name], new_values[name])
            if difference:
                return f"{kind} {name}: {difference}"
    return ""


def counted(before: Finished, after: Finished) -> str:
    """How much of two runs is the same."""
    parts = [f"{len(before.train_losses)} train losses", f"{len(before.val_losses)} val losses",
             f"{len(before.tensors)} tensors", f"{len(before.results)} results"]
    if before.artifact:
        same = before.artifact == after.artifact
        parts.append(f"artifact of {len(before.artifact)} bytes" if same else "but not the artifact's bytes")
    return ", ".join(parts)


TIMEOUT = 600  # seconds that a pair of runs may take
IDENTICAL = "identical"
DIFFERENT = "DIFFERENT"
FAILED = "FAILED"


def compare(args: argparse.Namespace, root: Path, case: str, ranks: int) -> tuple[str, str]:
    """Runs both trees at the same time -> (IDENTICAL, DIFFERENT or FAILED, details)."""
    settings = settings_of(case, args.steps) | dict(args.env)
    folders = [root / f"{case}_{ranks}_before", root / f"{case}_{ranks}_after"]
    processes = [start_run(args.before, folders[0], root / "data", ranks, settings),
                 start_run(args.after, folders[1], root / "data", ranks, settings)]
    try:
        codes = wait_for(processes)
    except subprocess.TimeoutExpired:
        return FAILED, f"no end after {TIMEOUT} s"
    for folder, code in zip(folders, codes):
        if code:
            lines = (folder / "output.txt").read_text(errors="replace").splitlines()
            why = [line for line in lines if line.startswith("train_gpt: ")] or lines[-15:]
            return FAILED, "\n    ".join([f"{folder.name} ended with exit code {code}", *why])
    before = read_run(folders[0])
    after = read_run(folders[1])
    if list(before.train_losses) != [f"step {step}" for step in range(1, args.steps + 1)]:
        return FAILED, f"BEFORE has {len(before.train_losses)} train losses instead of {args.steps}"
    difference = first_difference(before, after)
    if difference:
        return DIFFERENT, difference
    return IDENTICAL, counted(before, after)


# ------------------------------------------------------------ command line
def assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=value")
    return name, value


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Refuses unknown presets, a number of steps that misses some stage, and folders without a trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("before", type=lambda text: Path(text).resolve())
    parser.add_argument("after", type=lambda text: Path(text).resolve())
    parser.add_argument("--presets", default=",".join(CASES), help="by default all: %(default)s")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, by default %(default)s")
    parser.add_argument("--steps", type=int, default=50, help="an even number, 12 or more")
    parser.add_argument("--env", metavar="NAME=value", action="append", default=[], type=assignment,
                        help="an override for both trees")
    args = parser.parse_args(argv)
    args.presets = args.presets.split(",")
    args.ranks = [int(text) for text in args.ranks.split(",")]
    for preset in args.presets:
        if preset not in CASES:
            parser.error(f"{preset} is none of {', '.join(CASES)}")
    if args.steps < 12 or args.steps % 2:
        parser.error("--steps must be even and at least 12")
    for tree in (args.before, args.after):
        if not (tree / "train_gpt.py").is_file():
            parser.error(f"there is no train_gpt.py in {tree.name}")
    return args


def main(argv: list[str]) -> int:
    args = parse_arguments(argv)
    began = time.perf_counter()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_data(root)
        for preset in args.presets:
            for ranks in args.ranks:
                since = time.perf_counter()
                outcome, details = compare(args, root, preset, ranks)
                outcomes.append(outcome)
                seconds = time.perf_counter() - since
                label = f"{preset} {ranks} {'rank' if ranks == 1 else 'ranks'}"
                print(f"{label}: {outcome}: {details} ({seconds:.1f} s)", flush=True)
    print(f"{outcomes.count(IDENTICAL)} of {len(outcomes)} are identical")
    print(f"{time.perf_counter() - began:.0f} s")
    return int({*outcomes} != {IDENTICAL})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
