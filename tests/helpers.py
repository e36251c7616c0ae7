"""What several test files need: token shards, a tiny dataset, the trainer as a subprocess, toy
settings, a terminal."""

import fcntl
import hashlib
import importlib.util
import io
import json
import math
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece as spm
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "train_gpt.py"
OURS = {"PYTHONPATH": str(ROOT)}  # for `python -m tools...` in another folder
sys.path.insert(0, str(ROOT))

import fork_server  # noqa: E402
import train_gpt  # noqa: E402
from toy_text import library_documents  # noqa: E402


def sources(*folders):
    """Our Python files in these folders; in records/, the scripts of records apart."""
    found = [path for folder in folders for path in (ROOT / folder).glob("**/*.py")]
    return sorted(path for path in found if "track_" not in str(path.relative_to(ROOT)))


# A CPU run of a second or two on `tiny_data`, as environment variables.
TOY = dict(
    COMPILE="0", DEVICE="cpu", DTYPE="float32", DATA_PATH="data/datasets/toy", DATA_FINGERPRINT="",
    NUM_LAYERS="2", MODEL_DIM="32", NUM_HEADS="2", TRAIN_SEQ_LEN="64", TRAIN_BATCH_TOKENS="1024",
    VAL_TOKENS="4096", MAX_WALLCLOCK_SECONDS="0", ITERATIONS="20", WARMUP_STEPS="0",
    TRAIN_LOG_EVERY="10", BIGRAM_ROWS="1024", COUNT_BITS="12", COUNT_ORDERS="2", COUNT_WORDS="3",
    COPY_ORDERS="1,3",
    WINDOW_PATTERN="L", WINDOW_SCHEDULE="0", BIGRAM_EVERY="1", BATCH_SCHEDULE="1")


def with_boards():
    """The recipes of a track. Tables of tests have a row for each; others come and go."""
    from records.verify.folders import NEWEST_TRACKS, track_of
    return [preset for preset in train_gpt.RECIPES if track_of(preset) in NEWEST_TRACKS]


def slow(*values, id=None):
    """A case that `./run.sh test` leaves out."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def slow_but(few, cases):
    """All cases; `./run.sh test` runs the few."""
    return [case if case in few else slow(case) for case in cases]


def write_shard(path, tokens, magic=20240520, version=1, count=None):
    """A .bin shard; magic, version and count can be made to lie. Returns its manifest entry, less split."""
    path = Path(path)
    tokens = np.asarray(tokens, "<u2")
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw := header.tobytes() + tokens.tobytes())
    return {"path": path.name, "tokens": len(tokens), "sha256": hashlib.sha256(raw).hexdigest()}


class TemporaryPath(type(Path())):
    """Its file goes when it does."""


def shard_file(tokens):
    """A Shard; its file goes when its path does."""
    file = tempfile.NamedTemporaryFile(suffix=".bin")
    write_shard(file.name, tokens)
    path = TemporaryPath(file.name)
    path.file = file
    return train_gpt.Shard(path, len(tokens))


def train_tokenizer(texts, vocab_size=512, **options):
    """SentencePiece BPE model as bytes: lossless and with byte fallback unless options say otherwise."""
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, **dict(
        model_type="bpe", vocab_size=vocab_size, byte_fallback=True, unk_id=0, bos_id=1, eos_id=2, pad_id=-1,
        normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, max_sentence_length=1 << 14, num_threads=1,
        minloglevel=3) | options)
    return model.getvalue()


def write_dataset(root, name, model, train_shards, val_tokens, val_bytes, lossless=True):
    """data/datasets/<name> and data/tokenizers/<name>.model under root, as data/prepare.py lays them out."""
    folder = Path(root, "data", "datasets", name)
    tokenizer = Path(root, "data", "tokenizers", f"{name}.model")
    tokenizer.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.write_bytes(model)
    files = [write_shard(folder / f"{name}_val_000000.bin", val_tokens) | {"split": "val"}]
    for i, tokens in enumerate(train_shards):
        groups = [16] * math.ceil(np.count_nonzero(tokens == 1) / 16)       # so that many ranks have some
        files.append(write_shard(folder / f"{name}_train_{i:06d}.bin", tokens)
                     | {"split": "train", "row_groups": groups})
    manifest = {
        "version": 1, "name": name, "source": ["test"],
        "tokenizer": {"path": f"../../tokenizers/{name}.model", "sha256": hashlib.sha256(model).hexdigest(),
                      "vocab_size": spm.SentencePieceProcessor(model_proto=model).vocab_size(), "bos_id": 1,
                      "lossless": lossless},
        "files": files, "val_bytes": val_bytes, "text_fingerprint": "toy"}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return folder


def tokens_of(sp, documents):
    """The tokens of all documents, each after its BOS."""
    return np.concatenate([[1, *ids] for ids in sp.encode(list(documents))])


def write_toy_data(root):
    """The dataset `toy`: code, vocabulary 512, 120,000 train tokens in three shards and 10k val tokens."""
    documents = list(library_documents(400_000))
    model = train_tokenizer(documents[:60])
    sp = spm.SentencePieceProcessor(model_proto=model)
    val = documents[:10]
    rest = documents[20:]
    train = tokens_of(sp, rest)[:120_000]
    assert len(train) == 120_000
    write_dataset(root, "toy", model, np.split(train, [44_001, 80_002]), tokens_of(sp, val),
                  sum(len(text.encode()) for text in val))


# Ways to damage the toy dataset, in the current folder
DATA = Path("data/datasets/toy")
MODEL = Path("data/tokenizers/toy.model")
MANIFEST = DATA / "manifest.json"
VAL, TRAIN, LATER = (DATA / f"toy_{name}.bin" for name in ("val_000000", "train_000000", "train_000001"))


def edit_manifest(**changes):
    """Lay changes over manifest.json; a function gets the old value."""
    manifest = json.loads(MANIFEST.read_text())
    for key, value in changes.items():
        manifest[key] = value(manifest[key]) if callable(value) else value
    MANIFEST.write_text(json.dumps(manifest))


def patch(path, place, content):
    raw = bytearray(path.read_bytes())
    raw[place:place + len(content)] = content
    path.write_bytes(raw)


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def rewrite_tokens(path, tokens):
    """Another shard at path, and a manifest that agrees."""
    entry = write_shard(path, tokens)
    edit_manifest(files=lambda files: [f | entry if f["path"] == entry["path"] else f for f in files])


def set_tokenizer(**changes):
    edit_manifest(tokenizer=lambda about: about | changes)


def other_tokenizer(model):
    MODEL.write_bytes(model)
    set_tokenizer(sha256=hashlib.sha256(model).hexdigest())


def toy_of(preset, **settings):
    """TOY for another preset, without what that lacks, with settings laid over it."""
    own = {f.name for f in train_gpt.fields(train_gpt.RECIPES[preset])}
    toy = TOY | dict(NUM_KV_HEADS="0", VOCAB_SIZE="512", TOKENIZER_PATH="", SEQ_SCHEDULE="1", PRESET=preset,
                     ARTIFACT_BYTES_LIMIT="0")
    return {name: text for name, text in toy.items() if name.lower() in own} | settings


def toy_environment(**settings):
    """TOY with settings laid over it, by lower or upper case name, as an environment of the trainer."""
    return TOY | {name.upper(): train_gpt.show(value) for name, value in settings.items()}


def toy_config(root, preset="", **settings):
    """Config of TOY on the dataset under root; settings by field name."""
    env = toy_of(preset) if preset else TOY
    cfg = train_gpt.load_config(env | {"DATA_PATH": str(Path(root, TOY["DATA_PATH"]))})
    cfg = train_gpt.replace(cfg, **settings)
    cfg.check()
    return cfg


def init_parameters(model, seed):
    """Fills a model with its init."""
    values = train_gpt.init_parameters(model, seed)
    if hasattr(model.cfg, "adjust_init"):
        values = model.cfg.adjust_init(values)
    for name, p in model.named_parameters():
        p.data.copy_(values[name])


def add_gradients(optimizer, gradients, micro_steps=1):
    """{name: gradient}, as one of so many micro-steps of a step would add them."""
    names = [name for bank in optimizer.banks for name in bank.names]
    loss = sum((p * gradients[name]).sum() for p, name in zip(optimizer.params, names))
    optimizer.backward(loss, micro_steps)


def planted(folder, old="", new=""):
    """The path of a train_gpt.py with one change, in a folder."""
    source = SCRIPT.read_text(encoding="utf-8")
    assert not old or source.count(old) == 1, old
    path = Path(folder, "train_gpt.py")
    path.write_text(source.replace(old, new) if old else source, encoding="utf-8")
    return path


def load_module(path, name):
    """A file as a module of that name."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fake_team(rank=0, world_size=1):
    """What Loader and evaluate ask of a Team, without ranks that talk to each other."""
    return SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"), dtype=torch.float32,
                           on_gpu=False, wait=lambda: None)


def fake_run(cfg, model=None, data=None, team=None, log=lambda *_, **event: None, folder=Path(), **given):
    """A Run of what a test needs of it."""
    return train_gpt.Run(cfg, cfg, team or fake_team(), log, data, None, "", folder, model=model, **given)


def calibrated(cfg, model, data, team, log=print):
    """The hessians that cfg.calibrate() finds in a run of that model."""
    return cfg.calibrate(fake_run(cfg, model, data, team, log))


def run_cli(cwd, *args, ranks=0, env=None, timeout=300, script=SCRIPT, module="", python=""):
    """The script, or a module of ours, in a subprocess, its environment clean; under torchrun if ranks > 0
    -> code, out, err. python: sys.executable for an interpreter of its own, else a fork, which is much
    faster."""
    python = python or fork_server.start()
    clean = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ} | {"OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    program = [str(script)]
    if module:
        program = ["-m", module]
        clean |= OURS
    done = subprocess.run([python, *launcher, *program, *args], cwd=cwd, env=clean | (env or {}),
                          capture_output=True, text=True, timeout=timeout, errors="replace")
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)


def on_terminal(command, cwd, columns=100, env=None):
    """(exit code, lines that stay, every state of the line that is rewritten) on a terminal."""
    own = {name: text for name, text in os.environ.items() if name != "COLUMNS"} | OURS     # xdist sets it
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execvpe(command[0], command, own | (env or {}))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    out = b""
    while True:
        try:
            out += os.read(terminal, 65536)
        except OSError:     # it has ended
            break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", out.decode(errors="replace")).replace("\r\n", "\n")
    rows = [row.split("\r") for row in text.split("\n")]
    return code, [row[-1].rstrip() for row in rows], [text for row in rows for text in row[:-1]]


def free_port():
    """Of this machine, which nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def wait_until(condition, seconds=120):
    """Returns once condition() holds; fails if that takes longer."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"it did not happen within {seconds} s"
        time.sleep(0.02)


def look(folder):
    """What a run left in its folder: log (less the source), its last line, losses {step: train_loss},
    val_losses, result, and the bytes of weights and artifact; None: there is no such file."""
    folder = Path(folder)
    read = {path.name: path.read_bytes() for path in folder.glob("*")
            if not path.name.startswith("checkpoint")}
    log = read.get("train.log", b"").decode(errors="replace").rpartition("=" * 100 + "\n")[2]
    losses, val_losses = ({int(step): float(loss) for step, loss in re.findall(
        rf"^step:(\d+)/\d+ {name}:(\S+)", log, re.M)} for name in ("train_loss", "val_loss\\w*"))
    return SimpleNamespace(
        folder=folder, run_id=folder.name, log=log, last=(log.strip().splitlines() or [""])[-1],
        losses=losses, val_losses=val_losses, result=json.loads(read.get("result.json", "null")),
        weights=read.get("final_model.pt"), artifact=read.get("final_model.int8.ptz"))
