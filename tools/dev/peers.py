"""How well others compress a text: compressors and plainer GPTs beside `tiny`, in one table, on this machine.

    ./run.sh bench --peers                                  the embedded corpus, 120 s for each that trains
    ./run.sh bench --peers --text mine --seeds 3            data/datasets/mine, or a folder; three seeds
    ./run.sh bench --peers --only ppmd,tiny
    MAX_WALLCLOCK_SECONDS=60 DEVICE=cpu ./run.sh bench --peers

Bits per byte of the val text. All that train get the same seconds of training, cores, tokens and val text;
each peer's own constants count before those of the environment. Compressors run on one core; the primed ones
know the training text, as the GPTs do. PPMd's order and the learning rates of the GPTs were chosen on
training documents of the embedded corpus (docs/log.md, "peers, tuned").
"""
import argparse
import json
import lzma
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyppmd

import train_gpt
from records.judge.trials import last_line
from train_gpt import Data, Refused, require

ROOT = Path(__file__).resolve().parents[2]

FIRST_SEED = 1337
XZ_DICTIONARY = 3 << 29  # bytes, the most that xz has
PPMD_ORDER = 24
PPMD_MEGABYTES = 1900


# ---------- peers
class Peer(NamedTuple):
    """What has a row in the table. A compressor has no preset."""
    what: str
    preset: str = ""
    settings: dict[str, str] = {}

# tiny's vocabulary, width and heads, but four layers and rows of 256 tokens: the size at which these recipes
# had been measured before there was tiny. These score their weights as trained, tiny those of its artifact.
SMALL = dict(NUM_LAYERS="4", MODEL_DIM="128", NUM_HEADS="2", TRAIN_SEQ_LEN="256", TRAIN_BATCH_TOKENS="2048",
             VAL_LOSS_EVERY="0", VAL_BATCH_SIZE="65536", VAL_TOKENS="0", WARMUP_STEPS="2", SCORE_ARTIFACT="0",
             ARTIFACT_BYTES_LIMIT="0", TOKENIZER_PATH="", VAL_PART="0")

# Half of tiny's rates. SCALAR_LR=0 leaves the scales of the residual stream at 1, as if there were none.
PLAIN = SMALL | dict(MEMORY="0", BIGRAM_INIT="0", BIGRAM_ROWS="0", KEY_OFFSET="0", VALUE_EMBED_LAYERS="0",
                     UNET_SKIPS="0", LOGIT_SOFTCAP="0", MLP_MULT="4", WINDOW_PATTERN="L", WINDOW_SCHEDULE="0",
                     BATCH_SCHEDULE="1", SCALAR_LR="0", MATRIX_LR="0.015", EMBED_LR="0.15", HEAD_LR="0.004")

# 0.6 of the rates of the dial's reference model, those of Adam's tables times (128 / 768)**-0.5. Decay is the
# reference model's, too, which takes 1,524 steps. Windows and value embeddings are those of depth 4.
GPT2 = SMALL | dict(DEPTH="0", WINDOW_PATTERN="SSSL", WINDOW_SCHEDULE="0", VALUE_EMBED_LAYERS="0,1,0,2",
                    PACKING="rows", SHUFFLE="1", CORE="0", FP8="off", ITERATIONS="100000",
                    TARGET_PARAM_DATA_RATIO="0", WEIGHT_DECAY="10", MATRIX_LR="0.012", EMBED_LR="0.441",
                    HEAD_LR="0.00588", SCALAR_LR="0.3")

PEERS = {
    "xz": Peer("xz -9e, the val text alone"),
    "xz-primed": Peer("xz -9e, train and val text less the train text, one dictionary for both"),
    "ppmd": Peer(f"PPMd (pyppmd) of order {PPMD_ORDER}, primed with the train text; each val document alone"),
    "plain": Peer("a plain GPT as nanoGPT's, but with Muon (there is no Adam for matrices), RoPE, RMSNorm, "
                  "QK norm, ReLU^2; 4 layers of 128", "tiny", PLAIN),
    "gpt2": Peer("gpt2's recipe (nanochat), 4 layers of 128", "gpt2", GPT2),
    "memory-0": Peer("tiny without its memory, MEMORY=0", "tiny", dict(MEMORY="0", VAL_PART="0")),
    "tiny": Peer("tiny as ./run.sh trains it: 2 layers of 128, with its memory", "tiny", dict(VAL_PART="0")),
}


# ---------- text
def open_text(path: Path) -> Data:
    """A dataset whose text is known. Raises Refused."""
    cfg = train_gpt.load_config(dict(DATA_PATH=str(path), EVAL_CONTEXT="2"))
    data = train_gpt.open_data(cfg, lambda *_: None)
    require(data.tokenizer and data.val_bytes,
            f"{path} has no SentencePiece tokenizer, so its text is not known")
    return data


def documents(data: Data, tokens: np.ndarray) -> list[bytes]:
    """The text of each document. tokens (n,)."""
    pieces = np.split(tokens, np.flatnonzero(tokens == data.bos))
    return [data.tokenizer.decode(piece.tolist()).encode() for piece in pieces if len(piece)]


# ---------- compressors
def xz_bytes(content: bytes) -> int:
    """As xz -9e writes it, but with a dictionary that holds all of it."""
    size = min(max(len(content), 64 << 20), XZ_DICTIONARY)
    chain = [dict(id=lzma.FILTER_LZMA2, preset=9 | lzma.PRESET_EXTREME, dict_size=size)]
    return len(lzma.compress(content, lzma.FORMAT_XZ, filters=chain))


def in_fork(function: Callable[[], int]) -> int:
    """function() in a fork of this process, which keeps its state."""
    fork = multiprocessing.get_context("fork")
    answer, question = fork.Pipe(duplex=False)
    child = fork.Process(target=lambda: question.send(function()))
    child.start()
    child.join()
    code = child.exitcode
    require(code == 0, f"a fork of the compressor ended with {code}: is there enough memory?")
    return answer.recv()


def ppmd_sizes(primer: bytes, documents: list[bytes]) -> list[int]:
    """The bytes that each document adds to those of the primer. Each is coded from the state after the
    primer, which pyppmd cannot copy, so it is coded in a fork."""
    encoder = pyppmd.Ppmd7Encoder(PPMD_ORDER, PPMD_MEGABYTES * 10**6)
    encoder.encode(primer)

    def rest(document: bytes) -> int:
        """What the encoder still writes: the document and the end of the code."""
        return len(encoder.encode(document)) + len(encoder.flush())

    end = in_fork(lambda: rest(b""))
    return [in_fork(partial(rest, document)) - end for document in documents]


def compressed(name: str, data: Data) -> int:
    """The bytes that a compressor makes of the val text; if primed, those beyond the train text's."""
    val = documents(data, data.val)
    content = b"".join(val)
    require(len(content) == data.val_bytes,
            f"the val tokens decode to {len(content)} bytes, but their text has {data.val_bytes}")
    if name == "xz":
        return xz_bytes(content)
    shards = [train_gpt.open_shard(shard.path) for shard in data.train]
    primer = b"".join(documents(data, np.concatenate(shards)))
    if name == "ppmd":
        return sum(ppmd_sizes(primer, val))
    return xz_bytes(primer + content) - xz_bytes(primer)


# ---------- trainers
def trained(name: str, seed: int, path: Path, data: Data) -> dict[str, Any]:
    """The result.json of a run on the whole text. Raises Refused."""
    peer = PEERS[name]
    settings = dict(MAX_WALLCLOCK_SECONDS="120", VOCAB_SIZE=str(data.vocab_size)) | os.environ
    settings |= dict(PRESET=peer.preset, SEED=str(seed), DATA_PATH=str(path), DATA_FINGERPRINT="",
                     VAL_TOKENS="0", RESUME="", EVAL_FROM="",
                     RUN_ID=f"peer_{name}_{seed}_{time.strftime('%Y%m%d_%H%M%S')}_{os.getpid()}")
    done = subprocess.run([sys.executable, str(ROOT / "train_gpt.py")], env=settings | peer.settings,
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    require(done.returncode == 0, f"exit code {done.returncode}: {last_line(done)}")
    return json.loads(Path("logs", settings["RUN_ID"], "result.json").read_text(encoding="utf-8"))


# ---------- the table
def row(name: str, path: Path, data: Data, seeds: int) -> str:
    """A peer's row of the table, in Markdown; of several seeds mean, spread and count."""
    peer = PEERS[name]
    began = time.perf_counter()
    try:
        if peer.preset:
            results = [trained(name, FIRST_SEED + i, path, data) for i in range(seeds)]
            scores = [result["val_bpb"] for result in results]
            seconds = statistics.mean([result["train_time_ms"] for result in results]) / 1e3
            what = f"{peer.what}; {statistics.mean([result['steps'] for result in results]):.0f} steps"
        else:
            scores = [8 * compressed(name, data) / data.val_bytes]
            seconds = time.perf_counter() - began
            what = peer.what
    except (Refused, MemoryError) as error:
        return f"| {name} | {str(error) or 'out of memory'} | | {peer.what} |"
    score = f"{statistics.mean(scores):.4f}"
    if len(scores) > 1:
        score += f" ± {statistics.stdev(scores):.4f} ({len(scores)})"
    return f"| {name} | {score} | {seconds:.0f} | {what} |"


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench --peers", description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", default="embedded", help="a name under data/datasets, or a folder")
    parser.add_argument("--seeds", type=int, default=1, help="of each that trains, from 1337 on")
    parser.add_argument("--only", default=",".join(PEERS), help="by default all: %(default)s")
    args = parser.parse_args(words)
    try:
        names = args.only.split(",")
        for name in names:
            require(name in PEERS, f"{name} is none of {', '.join(PEERS)}")
        require(args.seeds > 0, f"--seeds {args.seeds}: at least 1")
        path = Path("data/datasets", args.text)
        path = path if path.exists() else Path(args.text)
        data = open_text(path)
    except Refused as error:
        print(f"bench --peers: {error}", file=sys.stderr)
        return 2
    print(f"{path}: {data.val_bytes:,} val bytes\n")
    print("| peer | bits per byte | seconds | what it is |\n|---|---|---:|---|", flush=True)
    for name in names:
        print(row(name, path, data, args.seeds), flush=True)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the run in progress, too
    sys.exit(main(sys.argv[1:]))
