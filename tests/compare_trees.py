"""Do two checkouts of this repository train bit-identically? Runs both beside each other and compares.

    python tests/compare_trees.py BEFORE AFTER                                  all cases, on 1 and on 2 ranks
    python tests/compare_trees.py BEFORE AFTER --presets golf,gpt2 --ranks 1 --steps 20
    python tests/compare_trees.py BEFORE AFTER --after-env MATRIX_LR=0.031      must report differences

BEFORE and AFTER are folders with a train_gpt.py. Every case is a preset at toy size on the CPU: fp32, not
compiled, one thread per rank, the same data for both trees. Compared are, as exact numbers: train_loss of
every step and val_loss (from checkpoint.pt), the tensors of final_model.pt and of the artifact, and the
scores, steps and tokens of result.json. Prints a line per case and number of ranks; exit 1 if anything
differs. --after-env gives the second tree one more override: a difference that the script has to find.
"""
import argparse
import io
import json
import lzma
import os
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import torch

from helpers import write_toy_data


# ------------------------------------------------------------ parameters that AFTER stores in another way
def renamed(new):
    """For RENAMED: the same tensor under another name."""
    return lambda tensor: {new: tensor}


def split_rows(*names):
    """For RENAMED: row i of the tensor is the parameter names[i]."""
    return lambda tensor: dict(zip(names, tensor, strict=True))


# {end of a name in BEFORE: function of its tensor -> {end of a name in AFTER: tensor}}, as in
# "embed": renamed("token_embed")  or  "residual_mix": split_rows("stream_mix", "embed_mix")
RENAMED = {}

# ------------------------------------------------------------ cases: presets at toy size
# Every case but golf_record has documents, two or more windows and batch sizes, value embeddings, bigrams,
# gates of attention and smear. What a case does not name stays as the preset has it.
COMMON = dict(
    COMPILE="0", DEVICE="cpu", DTYPE="float32", FP8="off", CORE="0", RUN_ID="run", SAMPLE_TOKENS="0",
    DATA_PATH="data/datasets/toy", DATA_FINGERPRINT="", TOKENIZER_PATH="data/tokenizers/toy.model",
    VOCAB_SIZE="512", MAX_WALLCLOCK_SECONDS="0", WARMUP_STEPS="2", TRAIN_LOG_EVERY="1",
    MUON_MOMENTUM_WARMUP_STEPS="20", ARTIFACT_KEEP="3000")  # of toy tensors int8: the large ones

CASES = {
    # two layers, u-net skips, key offset; larger LR with the batch; int8 and zlib
    "tiny": dict(
        PRESET="tiny", TRAIN_SEQ_LEN="128", TRAIN_BATCH_TOKENS="512", MAX_DOC_LEN="96", MODEL_DIM="64",
        WINDOW_SCHEDULE="32,64", BATCH_SCHEDULE="1,2", BIGRAM_ROWS="1024",
        ATTN_GATE_DIM="8", SMEAR_DIM="8", EVAL_STRIDE="96", ARTIFACT_STEP="0"),
    # GQA, u-net skips, gradient clipping; rounded artifact, lzma; golf's three protocols
    "golf": dict(
        PRESET="golf", TRAIN_SEQ_LEN="128", TRAIN_BATCH_TOKENS="256", MAX_DOC_LEN="96", NUM_LAYERS="4",
        VALUE_EMBED_LAYERS="1,0,0,2", MODEL_DIM="64", WINDOW_PATTERN="SL", WINDOW_SCHEDULE="64,0",
        BATCH_SCHEDULE="1,2", BIGRAM_ROWS="1024", ATTN_GATE_DIM="8", SMEAR_DIM="8", GRAD_CLIP_NORM="0.1",
        WARMDOWN_ITERS="20", ARTIFACT_STEP="0.2", EVAL_SLIDING="96", EVAL_TTT="4096"),
    # the public record: tied embeddings, plain causal attention, no documents; int8 and zlib
    "golf_record": dict(
        PRESET="golf", TRAIN_SEQ_LEN="128", TRAIN_BATCH_TOKENS="256", NUM_LAYERS="5", MODEL_DIM="64",
        TIE_EMBEDDINGS="1", TIED_EMBED_LR="0.03", LOGIT_SOFTCAP="30", KEY_OFFSET="0", BIGRAM_ROWS="0",
        VALUE_EMBED_LAYERS="0", WARMDOWN_ITERS="20", VAL_TOKENS="4096", ARTIFACT_STEP="0",
        EVAL_SLIDING="0", EVAL_TTT="0"),
    # twelve layers with one skip, backout, YaRN, Adam every second step, four stages and the extension
    "speedrun": dict(
        PRESET="speedrun", VOCAB_SIZE="528", TRAIN_SEQ_LEN="256", TRAIN_BATCH_TOKENS="512",
        MAX_DOC_LEN="128", MAX_EPOCHS="0", VAL_TOKENS="4096", MODEL_DIM="48", NUM_HEADS="3",
        BIGRAM_ROWS="1024", WINDOW_SCHEDULE="24,56,88,104", WINDOW_BLOCK="8", EVAL_WINDOW="160",
        EXTENSION_ITERATIONS="4", MUON_MOMENTUM_COOLDOWN_STEPS="6", ARTIFACT_STEP="0.2"),
    # windows, LR and decay by the depth dial, less wide than it says; grad accumulation
    "gpt2": dict(
        PRESET="gpt2", DEPTH="4", MODEL_DIM="64", TRAIN_SEQ_LEN="128", TRAIN_BATCH_TOKENS="512",
        DEVICE_BATCH_SIZE="1", MAX_DOC_LEN="96", WINDOW_SCHEDULE="64,128", BATCH_SCHEDULE="1,2",
        BIGRAM_ROWS="1024", ATTN_GATE_DIM="8", SMEAR_DIM="8", VAL_TOKENS="4096", ARTIFACT_STEP="0")}


def settings_of(case, steps):
    """The environment of a run of that case, with so many steps, its extension among them."""
    settings = COMMON | CASES[case]
    iterations = steps - int(settings.get("EXTENSION_ITERATIONS", 0))
    return settings | dict(ITERATIONS=str(iterations), SAVE_EVERY=str(steps), VAL_LOSS_EVERY=str(steps // 2))


# ------------------------------------------------------------ one run
def start_run(tree, folder, data, ranks, settings):
    """Starts train_gpt.py of that tree in a new working folder -> the process; its output goes to a file."""
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


def unpack(path):
    """What torch.save wrote: final_model.pt and checkpoints, or, compressed by zlib or lzma, artifacts."""
    raw = path.read_bytes()
    if raw[:2] != b"PK":
        raw = zlib.decompress(raw) if raw[:1] == b"x" else lzma.decompress(raw)
    return torch.load(io.BytesIO(raw), "cpu", weights_only=True)


def read_run(folder):
    """{kind: {name: exact number or tensor}} of what a finished run left behind."""
    run = folder / "logs" / "run"
    result = json.loads((run / "result.json").read_text())
    curves = unpack(run / "checkpoint.pt")["progress"]["curves"]
    train = {f"step {step}": loss for step, _, loss in curves["train"]}
    val = {f"step {step}": loss for step, _, loss in curves["val"]}
    val[f"step {result['steps']}"] = result["trained"]["val_loss"]  # comes after the last checkpoint
    scores = {name: value for name, value in result.items() if name.startswith("val_")}
    for name in ("trained", "artifact", "eval", "steps", "tokens", "stop_reason"):
        scores[name] = result[name]
    artifact, = run.glob("final_model.*.ptz")
    return {"train_loss": train, "val_loss": val, "tensor": unpack(run / "final_model.pt")["tensors"],
            "artifact tensor": unpack(artifact)["tensors"], "result": scores}


# ------------------------------------------------------------ comparing
def after_names(tensors):
    """Tensors of BEFORE by the names that AFTER has for them."""
    found = {}
    for name, tensor in tensors.items():
        # of a quantized tensor the artifact has NAME.int8 and NAME.scale
        stem = name.removesuffix(".int8").removesuffix(".scale")
        suffix = name[len(stem):]
        start, parts = "", {stem: tensor}
        for end, convert in RENAMED.items():
            if stem == end or stem.endswith("." + end):
                start, parts = stem.removesuffix(end), convert(tensor)
        for new, part in parts.items():
            found[start + new + suffix] = part
    return found


def tensor_difference(old, new):
    """A few words on where two tensors differ, or None if they are the same bits."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return f"{old.dtype} {tuple(old.shape)} before, {new.dtype} {tuple(new.shape)} after"
    if torch.equal(old, new):
        return None
    places = (old != new).nonzero().tolist()
    first = tuple(places[0])
    return (f"{old[first].item()!r} before, {new[first].item()!r} after at {list(first)}, the first of "
            f"{len(places)} of {old.numel()} numbers")


def first_difference(before, after):
    """The first difference between two runs as one sentence, or None."""
    for kind, old_values in before.items():
        new_values = after[kind]
        if "tensor" in kind:
            old_values = after_names(old_values)
        for name in old_values | new_values:
            if name not in new_values:
                return f"{kind} {name} is only before"
            if name not in old_values:
                return f"{kind} {name} is only after"
            old, new = old_values[name], new_values[name]
            if "tensor" in kind:
                difference = tensor_difference(old, new)
            else:
                difference = None if old == new else f"{old!r} before, {new!r} after"
            if difference:
                return f"{kind} {name}: {difference}"
    return None


def compare(case, ranks, args, root):
    """Runs both trees at the same time -> (whether they agree, what to print about it)."""
    settings, data = settings_of(case, args.steps), root / "data"
    folders = [root / f"{case}_{ranks}_{which}" for which in ("before", "after")]
    processes = [start_run(args.before, folders[0], data, ranks, settings),
                 start_run(args.after, folders[1], data, ranks, settings | dict(args.after_env))]
    try:
        codes = [process.wait(timeout=args.timeout) for process in processes]
    except subprocess.TimeoutExpired:
        return False, f"no end after {args.timeout} s"
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait()
    for folder, code in zip(folders, codes):
        if code:
            lines = (folder / "output.txt").read_text(errors="replace").splitlines()
            why = [line for line in lines if line.startswith("train_gpt: ")] or lines[-15:]
            return False, "\n    ".join([f"{folder.name} ended with exit code {code}", *why])
    before, after = map(read_run, folders)
    steps = [f"step {step}" for step in range(1, args.steps + 1)]
    if list(before["train_loss"]) != steps:
        return False, f"before has {len(before['train_loss'])} train losses instead of {args.steps}"
    if difference := first_difference(before, after):
        return False, f"DIFFERENT: {difference}"
    names = ("train losses", "val losses", "tensors", "artifact tensors", "results")
    counts = [f"{len(values)} {name}" for name, values in zip(names, before.values())]
    return True, ", ".join(counts) + ": identical"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("before", type=lambda text: Path(text).resolve())
    parser.add_argument("after", type=lambda text: Path(text).resolve())
    parser.add_argument("--presets", default=",".join(CASES), help="cases, by default all: %(default)s")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks")
    parser.add_argument("--steps", type=int, default=50, help="an even number, 12 or more")
    parser.add_argument("--timeout", type=int, default=600, help="seconds that a pair of runs may take")
    parser.add_argument("--after-env", metavar="NAME=value", action="append", default=[],
                        type=lambda text: text.split("=", 1), help="an override for AFTER alone")
    args = parser.parse_args()
    cases, ranks = args.presets.split(","), [int(text) for text in args.ranks.split(",")]
    if unknown := [case for case in cases if case not in CASES]:
        parser.error(f"{unknown[0]} is none of {', '.join(CASES)}")
    if args.steps < 12 or args.steps % 2:
        parser.error("--steps must be even and at least 12")
    agree = []
    with tempfile.TemporaryDirectory() as root:
        write_toy_data(root)
        for case in cases:
            for n in ranks:
                same, text = compare(case, n, args, Path(root))
                agree.append(same)
                print(f"{case} {n} {'rank' if n == 1 else 'ranks'}: {text}", flush=True)
    print(f"{sum(agree)} of {len(agree)} are identical")
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
