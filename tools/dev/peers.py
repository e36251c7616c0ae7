"""How well others compress a text: compressors and plainer GPTs beside `tiny`, in one table, on this machine.

    ./run.sh bench --peers                                  the embedded corpus, 120 s for each that trains
    ./run.sh bench --peers --text mine --seeds 3            data/datasets/mine, or a folder; three seeds
    ./run.sh bench --peers --only ppmd,tiny --json mine.json
    ./run.sh bench --peers --tune                           first tries some settings of each that has any
    ./run.sh bench --peers MAX_WALLCLOCK_SECONDS=60 DEVICE=cpu

Bits per byte of the val text. All that train get the same seconds of training, cores, tokens and val text;
NAME=value sets a constant in each of them that has it, constants of the environment do not count. Compressors
run on one core; the primed ones know the training text, as the GPTs do. With --tune, PPMd's order and the
settings of the GPTs are chosen on a slice of the train documents, which the trials do not train on. Rows go
to a JSON file as they come, and what is there is not measured again: the same command goes on after a kill.
"""
import argparse
import hashlib
import json
import lzma
import multiprocessing
import os
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from data import prepare
import train_gpt
from records.judge.trials import last_line
from tools.dev.bench import check_names, names_in, names_of
from train_gpt import Refused, require

ROOT = Path(__file__).resolve().parents[2]

# Constants that cannot be given: each run has its own, and all are scored on the whole val text.
FIXED = ("PRESET", "SEED", "DATA_PATH", "VAL_TOKENS", "RUN_ID", "RESUME", "EVAL_FROM")
FIRST_SEED = 1337
SLICE_BYTES = 500_000  # of the train documents that trials are scored on; at most a tenth of them
MOST_TRAIN_TOKENS = 400_000_000  # of a text that primes compressors, which hold it in memory
XZ_DICTIONARY = 3 << 29  # bytes, the most that xz has
PPMD_MEGABYTES = 1900
ZPAQ_METHOD = "511"  # its strongest, in blocks of 2 GiB


# ---------- peers
class Peer(NamedTuple):
    """What has a row in the table. A compressor has no preset."""
    what: str
    preset: str = ""
    settings: dict[str, str] = {}
    # what --tune tries: each is laid over settings; the first is what runs without --tune. It was the best on
    # Python source, or within 0.001 of it (docs/log.md, "peers, tuned").
    tries: tuple[dict[str, str], ...] = ({},)
    # {constant in steps: its part of the run}. Since the clock ends the run, a shorter run, of a tenth of its
    # seconds, tells beforehand how many steps there will be.
    parts: dict[str, float] = {}
    shuffled: bool = False  # reads its rows in random order: for a recipe that reads the text as it stands


def multiples(factors: tuple[float, ...], **rates: float) -> tuple[dict[str, str], ...]:
    """All rates times each factor."""
    tries = []
    for factor in factors:
        tries.append({name: f"{factor * rate:g}" for name, rate in rates.items()})
    return tuple(tries)


# tiny's vocabulary, width and heads, but four layers and rows of 256 tokens: the size at which these recipes
# had been measured before there was tiny. These score their weights as trained, tiny those of its artifact.
SMALL = dict(NUM_LAYERS="4", MODEL_DIM="128", NUM_HEADS="2", TRAIN_SEQ_LEN="256", TRAIN_BATCH_TOKENS="2048",
             VAL_LOSS_EVERY="0", VAL_BATCH_SIZE="65536", VAL_TOKENS="0", WARMUP_STEPS="2", SCORE_ARTIFACT="0",
             ARTIFACT_BYTES_LIMIT="0", TOKENIZER_PATH="", VAL_PART="0")

# SCALAR_LR=0 leaves the scales of the residual stream at 1, as if there were none.
PLAIN = SMALL | dict(MEMORY="0", BIGRAM_INIT="0", BIGRAM_ROWS="0", KEY_OFFSET="0", VALUE_EMBED_LAYERS="0",
                     UNET_SKIPS="0", LOGIT_SOFTCAP="0", MLP_MULT="4", WINDOW_PATTERN="L", WINDOW_SCHEDULE="0",
                     BATCH_SCHEDULE="1", SCALAR_LR="0")
PLAIN_TRIES = multiples((0.5, 0.25, 1), MATRIX_LR=0.03, EMBED_LR=0.3, HEAD_LR=0.008)
TINY_TRIES = multiples((1, 0.5, 2), MATRIX_LR=0.03, EMBED_LR=0.3, HEAD_LR=0.008, SCALAR_LR=0.04)

# Multiples of the record's rates, that of the embedding times (128 / 512)**-0.5, by the rule of --proxy; the
# momentum of the track's first baseline; last the record's momentum of 0.99, which is for longer runs.
GOLF_RATES = multiples((2, 1), MATRIX_LR=0.02, TIED_EMBED_LR=0.06, SCALAR_LR=0.02)
MOMENTUM = dict(MUON_MOMENTUM="0.95", MUON_MOMENTUM_WARMUP_START="0.85")
GOLF_TRIES = (GOLF_RATES[0] | MOMENTUM, GOLF_RATES[1] | MOMENTUM, GOLF_RATES[1])
GOLF_PARTS = dict(WARMDOWN_ITERS=3000 / 8394, MUON_MOMENTUM_WARMUP_STEPS=1500 / 8394)

# The rates of the dial's reference model, those of Adam's tables times (128 / 768)**-0.5. The dial divides
# all of them by 16 for a batch of 2,048 tokens, and this times 10 to 16 was best: so 0.6 and 1 here. Decay is
# the reference model's, too, which takes 1,524 steps. Windows and value embeddings are those of depth 4.
GPT2 = SMALL | dict(DEPTH="0", WINDOW_PATTERN="SSSL", WINDOW_SCHEDULE="0", VALUE_EMBED_LAYERS="0,1,0,2",
                    PACKING="rows", SHUFFLE="1", CORE="0", FP8="off", ITERATIONS="100000",
                    TARGET_PARAM_DATA_RATIO="0", WEIGHT_DECAY="10")
GPT2_TRIES = multiples((0.6, 1, 1.6), MATRIX_LR=0.02, EMBED_LR=0.735, HEAD_LR=0.0098, SCALAR_LR=0.5)

PEERS = {
    "xz": Peer("xz -9e, the val text alone"),
    "xz-primed": Peer("xz -9e, train and val text less the train text, one dictionary for both"),
    "ppmd": Peer("PPMd (pyppmd), primed with the train text; each val document alone",
                 tries=tuple([dict(ORDER=order) for order in ("24", "16", "12", "8")])),
    "zpaq": Peer(f"zpaq -method {ZPAQ_METHOD}, train and val text less the train text"),
    "plain": Peer("a plain GPT as nanoGPT's, but with Muon (there is no Adam for matrices), RoPE, RMSNorm, "
                  "QK norm, ReLU^2; 4 layers of 128", "tiny", PLAIN, PLAIN_TRIES),
    "golf": Peer("golf's recipe (parameter-golf 2026-03-19), 4 layers of 128, rows shuffled", "golf",
                 SMALL | dict(NUM_KV_HEADS="1", ITERATIONS="100000"), GOLF_TRIES, GOLF_PARTS, shuffled=True),
    "gpt2": Peer("gpt2's recipe (nanochat), 4 layers of 128", "gpt2", GPT2, GPT2_TRIES),
    "memory-0": Peer("tiny without its memory, MEMORY=0", "tiny", dict(MEMORY="0", VAL_PART="0"), TINY_TRIES),
    "tiny": Peer("tiny as ./run.sh trains it: 2 layers of 128, with its memory",
                 "tiny", dict(VAL_PART="0"), TINY_TRIES),
}


# ---------- text
class Text:
    """A dataset, its documents as bytes, and two copies of it that are made where they are needed."""
    def __init__(self, path: Path, scratch: Path) -> None:
        cfg = train_gpt.load_config({"DATA_PATH": str(path), "EVAL_CONTEXT": "2"})
        self.path = path
        self.scratch = scratch
        self.data = train_gpt.open_data(cfg, lambda *_: None)
        require(self.data.tokenizer and self.data.val_bytes,
                f"{path} has no SentencePiece tokenizer, so its text is not known")
        about = json.dumps(self.data.about, sort_keys=True)
        self.key = f"{path.name} {hashlib.sha256(about.encode()).hexdigest()[:12]}"

    def pieces(self, tokens: np.ndarray) -> list[np.ndarray]:
        """The tokens of each document. tokens (n,)."""
        pieces = np.split(tokens, np.flatnonzero(tokens == self.data.bos))
        return [piece for piece in pieces if len(piece)]

    def documents(self, tokens: np.ndarray) -> list[bytes]:
        """The text of each document. tokens (n,)."""
        return [self.data.tokenizer.decode(piece.tolist()).encode() for piece in self.pieces(tokens)]

    @cached_property
    def val(self) -> list[bytes]:
        documents = self.documents(self.data.val)
        decoded = sum(map(len, documents))
        require(decoded == self.data.val_bytes, f"the val tokens of {self.path.name} decode to {decoded} "
                f"bytes, but its val text has {self.data.val_bytes}")
        return documents

    @cached_property
    def train_tokens(self) -> np.ndarray:
        shards = [np.array(train_gpt.open_shard(shard.path)) for shard in self.data.train]
        tokens = sum(map(len, shards))
        require(tokens <= MOST_TRAIN_TOKENS, f"{tokens} train tokens are more than {MOST_TRAIN_TOKENS}")
        return np.concatenate(shards)

    @cached_property
    def train(self) -> list[bytes]:
        return self.documents(self.train_tokens)

    @cached_property
    def trial(self) -> "Text":
        """The train documents without some that are drawn by chance, which are its val split."""
        most = min(SLICE_BYTES, sum(map(len, self.train)) // 10)
        order = list(range(len(self.train)))
        random.Random(0).shuffle(order)
        held: set[int] = set()
        size = 0
        for number in order:
            if size + len(self.train[number]) <= most:
                held.add(number)
                size += len(self.train[number])
        require(held, f"{self.path.name} has too few train documents to hold some out for trials")
        pieces = self.pieces(self.train_tokens)
        val = np.concatenate([pieces[i] for i in sorted(held)])
        kept = np.concatenate([piece for i, piece in enumerate(pieces) if i not in held])
        return self.copy("trial", kept, val, size)

    def shuffled(self, T: int) -> "Text":
        """With its train tokens in random order, T at a time. The last target of each such row is wrong."""
        rows = self.train_tokens[:len(self.train_tokens) // T * T].reshape(-1, T)
        order = np.random.default_rng(0).permutation(len(rows))
        return self.copy(f"shuffled_{T}", rows[order].reshape(-1), self.data.val, self.data.val_bytes)

    def copy(self, name: str, train: np.ndarray, val: np.ndarray, val_bytes: int) -> "Text":
        """Another dataset of the same tokenizer."""
        folder = self.scratch / f"{self.path.name}_{name}"
        if not folder.exists():
            folder.mkdir()
            about = json.loads((self.path / "manifest.json").read_text(encoding="utf-8"))["tokenizer"]
            about = about | dict(path=str((self.path / about["path"]).resolve()))
            files = []
            for split, tokens in dict(train=train, val=val).items():
                files += prepare.write_shards(folder, name, split, [tokens])
            manifest = dict(version=1, name=name, tokenizer=about, files=files, val_bytes=val_bytes)
            (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        return Text(folder, self.scratch)


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


def ppmd_sizes(order: int, primer: bytes, documents: list[bytes]) -> list[int]:
    """The bytes that each document adds to those of the primer. Each is coded from the state after the
    primer, which pyppmd cannot copy, so it is coded in a fork."""
    try:
        import pyppmd
    except ImportError:
        raise Refused("not installed: pip install -r requirements.txt") from None
    encoder = pyppmd.Ppmd7Encoder(order, PPMD_MEGABYTES * 10**6)
    encoder.encode(primer)

    def rest(document: bytes) -> int:
        """What the encoder still writes: the document and the end of the code."""
        return len(encoder.encode(document)) + len(encoder.flush())

    end = in_fork(lambda: rest(b""))
    return [in_fork(partial(rest, document)) - end for document in documents]


def zpaq_bytes(content: bytes, scratch: Path) -> int:
    """The size of an archive that holds it as one file."""
    require(shutil.which("zpaq"), "not installed")
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        Path(folder, "text").write_bytes(content)
        command = ["zpaq", "add", "text.zpaq", "text", "-method", ZPAQ_METHOD, "-threads", "1"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        require(done.returncode == 0, f"zpaq failed: {last_line(done, ('stderr', 'stdout'))}")
        return Path(folder, "text.zpaq").stat().st_size


def compressed(name: str, primer: bytes, documents: list[bytes], tried: dict[str, str],
               scratch: Path) -> int:
    """The bytes that a compressor makes of the val text; if primed, those beyond the train text's."""
    val = b"".join(documents)
    if name == "xz":
        return xz_bytes(val)
    if name == "ppmd":
        return sum(ppmd_sizes(int(tried["ORDER"]), primer, documents))
    function = xz_bytes if name == "xz-primed" else partial(zpaq_bytes, scratch=scratch)
    return function(primer + val) - function(primer)


# ---------- trainers
def train(name: str, settings: dict[str, str]) -> dict[str, Any]:
    """A run's result.json. Constants of the environment do not count. Raises Refused."""
    run_id = f"peer_{name}_{settings['SEED']}_{time.strftime('%Y%m%d_%H%M%S')}_{os.getpid()}"
    environment = {key: text for key, text in os.environ.items() if key not in names_of(train_gpt)}
    environment |= settings | dict(RUN_ID=run_id)
    done = subprocess.run([sys.executable, str(ROOT / "train_gpt.py")], env=environment,
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    require(done.returncode == 0, f"exit code {done.returncode}: {last_line(done)}")
    return json.loads(Path("logs", run_id, "result.json").read_text(encoding="utf-8"))


# ---------- rows
class Bench:
    """Measures what is not in the file of rows yet. words: the constants that all get."""
    def __init__(self, text: Text, path: Path, words: dict[str, str], tune: bool) -> None:
        self.text = text
        self.path = path
        self.words = dict(MAX_WALLCLOCK_SECONDS="120") | words
        self.tune = tune
        place: Any = SimpleNamespace(on_gpu=torch.cuda.is_available(), world_size=1)  # what is asked for
        self.machine = f"{train_gpt.hardware(place)}, torch {torch.__version__}"
        self.script = hashlib.sha256((ROOT / "train_gpt.py").read_bytes()).hexdigest()[:12]
        self.kept: list[dict[str, Any]] = []
        if path.exists():
            self.kept = json.loads(path.read_text(encoding="utf-8"))["rows"]

    def settings(self, peer: Peer, seed: int, text: Text, tried: dict[str, str]) -> dict[str, str]:
        """A run's constants, but for what follows from its number of steps."""
        known = names_in(train_gpt.RECIPES[peer.preset])
        words = {name: word for name, word in self.words.items() if name in known}
        settings = dict(PRESET=peer.preset, SEED=str(seed), DATA_FINGERPRINT="",
                        VOCAB_SIZE=str(text.data.vocab_size))
        settings |= peer.settings | tried | words
        if peer.shuffled:
            text = text.shuffled(int(settings["TRAIN_SEQ_LEN"]))
        return settings | dict(DATA_PATH=str(text.path.resolve()))

    def steps(self, name: str, settings: dict[str, str]) -> int:
        """The steps that a run will have, from a run of a tenth of its seconds."""
        seconds = float(settings["MAX_WALLCLOCK_SECONDS"])
        if not seconds:
            return int(settings["ITERATIONS"])
        result = train(f"{name}_pace", settings | dict(MAX_WALLCLOCK_SECONDS=f"{seconds / 10:g}"))
        return min(10 * result["steps"], int(settings["ITERATIONS"]))

    def run(self, name: str, seed: int, text: Text, tried: dict[str, str]) -> dict[str, Any]:
        """The row of a peer, less its key: what it scores, by training or by compressing once."""
        peer = PEERS[name]
        if not peer.preset:
            primer = b"".join(text.train)
            documents = text.val
            began = time.perf_counter()
            size = compressed(name, primer, documents, tried, text.scratch)
            return dict(bpb=8 * size / text.data.val_bytes, seconds=time.perf_counter() - began, bytes=size)
        settings = self.settings(peer, seed, text, tried)
        if peer.parts:
            steps = self.steps(name, settings)
            for constant, part in peer.parts.items():
                settings[constant] = self.words.get(constant, str(max(1, round(part * steps))))
        result = train(name, settings)
        require(result["val_bpb"], "it has no val_bpb")
        return dict(bpb=result["val_bpb"], seconds=result["train_time_ms"] / 1e3, steps=result["steps"],
                    settings=settings, run_id=result["run_id"])

    def row(self, name: str, seed: int, tried: dict[str, str], trial: bool = False) -> dict[str, Any]:
        """The row of a peer, from the file or by a run; on the trials' text if this is one."""
        peer = PEERS[name]
        key = dict(text=self.text.key, machine=self.machine, peer=name, trial=trial, tried=tried)
        if peer.preset:
            key |= dict(seed=seed, settings=peer.settings, words=self.words, script=self.script)
        row = next((row for row in self.kept if row["key"] == key), None)
        if row is None:
            row = dict(key=key) | self.run(name, seed, self.text.trial if trial else self.text, tried)
            self.kept.append(row)
            text = json.dumps(dict(rows=self.kept), indent=1) + "\n"
            self.path.parent.mkdir(parents=True, exist_ok=True)
            train_gpt.write_atomically(self.path, lambda file: file.write(text.encode()))
        what = f"{'trial of ' if trial else ''}{name}, seed {seed}, {joined(tried)}"
        print(f"{what}: {row['bpb']:.4f}, {row['seconds']:.1f} s", flush=True)
        return row

    def rows(self, name: str, seeds: int) -> list[dict[str, Any]]:
        """A row for each seed; one of a compressor."""
        tries = PEERS[name].tries
        chosen = tries[0]
        if self.tune and len(tries) > 1:
            scores = [self.row(name, FIRST_SEED, tried, trial=True)["bpb"] for tried in tries]
            chosen = tries[scores.index(min(scores))]
        return [self.row(name, FIRST_SEED + i, chosen) for i in range(seeds if PEERS[name].preset else 1)]


# ---------- the table
def joined(settings: dict[str, str]) -> str:
    return " ".join([f"{name}={text}" for name, text in settings.items()])


def cells(name: str, rows: list[dict[str, Any]] | str) -> list[str]:
    """A peer's row of the table. rows: one per seed, or why there are none."""
    what = PEERS[name].what
    if isinstance(rows, str):
        return [name, rows, "", what]
    scores = [row["bpb"] for row in rows]
    score = f"{statistics.mean(scores):.4f}"
    if len(scores) > 1:
        score += f" ± {statistics.stdev(scores):.4f} ({len(scores)})"
    if PEERS[name].preset:
        what += f"; {statistics.mean([row['steps'] for row in rows]):.0f} steps"
    if rows[0]["key"]["tried"]:
        what += f"; {joined(rows[0]['key']['tried'])}"
    return [name, score, f"{statistics.mean([row['seconds'] for row in rows]):.0f}", what]


def table(found: dict[str, list[dict[str, Any]] | str]) -> list[str]:
    """Lines, in Markdown. found: {peer: its rows, or why it has none}."""
    lines = ["| peer | bits per byte | seconds | what it is |", "|---|---|---:|---|"]
    for name, rows in found.items():
        lines.append(f"| {' | '.join(cells(name, rows))} |")
    return lines


# ---------- main
def chosen_peers(only: list[str]) -> list[str]:
    """The peers that --only names, in the table's order; all if it names none. Raises Refused."""
    names = [name for text in only for name in text.split(",") if name]
    for name in names:
        require(name in PEERS, f"{name} is none of {', '.join(PEERS)}")
    return [name for name in PEERS if name in names or not names]


def constants(words: list[str]) -> dict[str, str]:
    """{NAME: value}. Raises Refused for what is no constant, or not to be given."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        require(equals, f"{word} is no NAME=value")
        require(name not in FIXED, f"{name} is set for each peer")
        found[name] = value
    check_names(found)
    return found


def measure(args: argparse.Namespace, words: list[str], scratch: Path) -> None:
    """Prints as it goes, then the table. Raises Refused."""
    names = chosen_peers(args.only)
    given = constants(args.settings)
    require(args.seeds > 0, f"--seeds {args.seeds}: at least 1")
    path = Path("data/datasets", args.text)
    text = Text(path if path.exists() else Path(args.text), scratch)
    bench = Bench(text, args.json or Path("logs/peers", f"{text.path.name}.json"), given, args.tune)
    about = text.data.about
    print(f"command: {shlex.join(['./run.sh', 'bench', '--peers', *words])}\nmachine: {bench.machine}")
    print(f"text: {text.path.name}, {about['train_tokens']:,} train and {about['val_tokens']:,} val tokens, "
          f"{text.data.val_bytes:,} val bytes", f"rows: {bench.path}", sep="\n", flush=True)
    found: dict[str, list[dict[str, Any]] | str] = {}
    for name in names:
        try:
            found[name] = bench.rows(name, args.seeds)
        except (Refused, MemoryError) as error:
            found[name] = str(error) or "out of memory"
            print(f"{name}: {found[name]}", flush=True)
    print("", *table(found), sep="\n")


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench --peers", description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="NAME=value")
    parser.add_argument("--text", default="embedded", help="a name under data/datasets, or a folder")
    parser.add_argument("--seeds", type=int, default=1, help="of each that trains, from 1337 on")
    parser.add_argument("--only", action="append", default=[], help=", ".join(PEERS))
    parser.add_argument("--tune", action="store_true", help="first tries settings on train documents")
    parser.add_argument("--json", type=Path, help="the rows so far; logs/peers/<text>.json")
    args = parser.parse_intermixed_args(words)
    try:
        with tempfile.TemporaryDirectory(prefix="peers_") as scratch:
            measure(args, words, Path(scratch))
    except Refused as error:
        print(f"bench --peers: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the run in progress, too
    sys.exit(main(sys.argv[1:]))
