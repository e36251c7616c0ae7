"""data/download.py against a small imitation of the Hugging Face hub on 127.0.0.1."""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import huggingface_hub
from huggingface_hub.utils import disable_progress_bars
from data import inputs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sentencepiece

import train_gpt
from data import download
from helpers import train_tokenizer
from test_prepare import make_texts, read_documents

CHECKOUT = Path(download.__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "data.download", "sp1024"]
REPO = "willdepueoai/parameter-golf"
ROOT = "datasets/datasets/fineweb10B_sp1024"
TOKENIZER = "datasets/tokenizers/fineweb_1024_bpe.model"
TRAIN = [f"{ROOT}/fineweb_train_{i:06d}.bin" for i in range(4)]
VAL = [f"{ROOT}/fineweb_val_{i:06d}.bin" for i in range(2)]
BUNDLE = "eval_bundle.zip"
DATASET = Path("data/datasets/fineweb10B_sp1024")
MANIFEST = DATASET / "manifest.json"


def shard(tokens, magic=20240520, version=1, count=None):
    header = struct.pack("<3i", magic, version, len(tokens) if count is None else count)
    return header.ljust(1024, b"\0") + np.asarray(tokens, "<u2").tobytes()


# --- the hub ---------------------------------------------------------------------------------------------

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", length=None, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def do_GET(self):
        hub = self.server.hub
        path = unquote(urlsplit(self.path).path)
        hub.authorized.append("Authorization" in self.headers)
        resolve = f"/datasets/{hub.repo}/resolve/{hub.revision}/"
        name = path.removeprefix(resolve).removeprefix("/cdn/").lstrip("/")
        if path == f"/api/datasets/{hub.repo}":
            name = "listing"
        elif name not in hub.files:
            return self.answer(404, X_Error_Code="EntryNotFound")
        elif path.startswith(resolve):           # like the hub: the bytes come from another place
            return self.answer(302, Location=f"/cdn/{name}", X_Repo_Commit=hub.revision)
        hub.requests.append((name, self.headers.get("Range")))
        faults = hub.faults.get(name, [])
        fault = (faults[0] if faults[-1] == "*" else faults.pop(0)) if faults else None
        if isinstance(fault, int):
            self.answer(fault, Retry_After="0")
        elif name == "listing":
            self.answer(200, fault or hub.listing(), Content_Type="application/json")
        else:
            self.content(hub, fault, hub.files[name])

    def content(self, hub, fault, data):
        start = 0
        total = len(data)
        headers = {"Connection": "close"}
        if fault == "corrupt":
            data = data[:-1] + bytes([data[-1] ^ 1])
        if fault == "long":
            data += b"x" * 200_000
        if "Range" in self.headers and hub.ranges:
            start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
            headers["Content-Range"] = f"bytes {start}-{total - 1}/{total}"
        data = data[start:]
        half = data[:len(data) // 2] if fault in ("cut", "short", "stall") else data
        self.answer(206 if start else 200, half, len(half if fault == "short" else data), **headers)
        if fault == "stall":
            hub.stalled.set()
            hub.closed.wait()


class Hub:
    """The repository `files`; faults[name] lists the faults of the next requests, [fault, "*"] lasts."""

    def __init__(self, files, repo=REPO):
        self.repo = repo
        self.files = dict(files)
        self.revision = "a" * 40
        self.ranges = True
        self.faults = {}
        self.requests = []
        self.authorized = []
        self.stalled = threading.Event()
        self.closed = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.hub = self
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def listing(self):
        siblings = []
        for name, data in self.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            siblings.append({"rfilename": name, "size": len(data), "blobId": blob})
            if name.endswith((".bin", ".parquet")):
                sha256 = hashlib.sha256(data).hexdigest()
                siblings[-1]["lfs"] = {"size": len(data), "sha256": sha256, "pointerSize": 134}
        return json.dumps({"id": self.repo, "sha": self.revision, "siblings": siblings}).encode()

    def fetched(self):
        """Names of the file requests since the last call, in order."""
        names = [name for name, _ in self.requests if name != "listing"]
        self.requests.clear()
        return names

    def close(self):
        self.closed.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="session")
def repository():
    """(files, sp): four train shards, two val shards that cut a document (and a character) in two."""
    rng = random.Random(5)
    texts = make_texts(120, seed=5)
    model = train_tokenizer(texts, 400, character_coverage=0.99, add_dummy_prefix=True,
                            normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True)
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokens = [token for text in texts + ["𝄞 and so on"] + texts[:9] for token in [1] + sp.encode(text)]
    cut = tokens.index(sp.piece_to_id("<0xF0>")) + 2         # between the four bytes of the clef
    files = {name: shard([1] + rng.choices(range(3, 400), k=3000 + i)) for i, name in enumerate(TRAIN)}
    files |= {VAL[0]: shard(tokens[:cut]), VAL[1]: shard(tokens[cut:]), TOKENIZER: model,
              "datasets/manifest.json": b"{}", "README.md": b"x",
              "datasets/datasets/fineweb10B_sp2048/fineweb_train_000000.bin": shard([1, 2])}
    return files, sp


@pytest.fixture
def new_hub():
    with contextlib.ExitStack() as stack:
        def new_hub(*arguments):
            hub = Hub(*arguments)
            stack.callback(hub.close)
            return hub
        yield new_hub


@pytest.fixture
def hub(new_hub, repository):
    return new_hub(repository[0])


@pytest.fixture
def call(hub, tmp_path, monkeypatch, capsys):
    """call(*words) is main() in tmp_path; the answer carries the last line of stderr as its sentence."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("HF_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    disable_progress_bars()
    huggingface_hub.close_session()

    def call(*words, source="sp1024", code=0, **env):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        try:
            found = download.main([str(word) for word in (source, *words)])
        except SystemExit as error:             # of argparse
            found = error.code
        out, err = capsys.readouterr()
        assert found == code, err
        sentence = (err.splitlines() or [""])[-1]
        if code:
            assert "error: " in sentence
            assert "127.0.0.1" not in sentence and str(tmp_path) not in sentence
        return SimpleNamespace(out=out, err=err, sentence=sentence)
    return call


# --- two at once -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("source, place", [
    ("sp1024", "datasets/fineweb10B_sp1024"), ("gpt2", "datasets/fineweb10B_gpt2"),
    ("climbmix", "parquet/climbmix"), ("core", ".core_bundle.partial"), ("gpt2-vocab", "tokenizers")])
def test_the_second_of_two_downloads_is_refused(hub, call, tmp_path, source, place):
    """Before it touches what the first one has so far."""
    folder = tmp_path / "data" / place
    folder.mkdir(parents=True)
    (folder / "x.part").write_text("half")
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)          # as a process has it that downloads there
    try:
        said = call(source=source, code=2).sentence
        assert said == (f"error: another process is downloading {source} to data: the same command works "
                        "when that has ended")
        assert (folder / "x.part").read_text() == "half" and not hub.requests
    finally:
        os.close(handle)


# --- token shards ----------------------------------------------------------------------------------------

def check_manifest(folder, files, sp, train, revision="a" * 40):
    """The manifest holds exactly what an independent look at the repository gives, and so do the files."""
    documents = []
    for token in np.frombuffer(b"".join(files[name][1024:] for name in VAL), "<u2").tolist():
        if token == 1 or not documents:
            documents.append([])
        documents[-1] += [token] * (token != 1)
    names = TRAIN[:train] + VAL
    sha = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    expected = {
        "version": 1, "name": "fineweb10B_sp1024", "source": REPO, "revision": revision,
        "tokenizer": {"path": "../../tokenizers/fineweb_1024_bpe.model", "sha256": sha[TOKENIZER],
                      "vocab_size": 400, "bos_id": 1, "lossless": False},
        "files": [{"path": Path(name).name, "split": "train" if name in TRAIN else "val",
                   "tokens": (len(files[name]) - 1024) // 2, "sha256": sha[name]} for name in names],
        "train_bytes": None, "val_bytes": sum(len(sp.decode(ids).encode()) for ids in documents),
        "train_docs": None, "val_docs": len(documents), "text_fingerprint": None, "document_hashes": None}
    assert (folder / MANIFEST).read_text() == json.dumps(expected, indent=1) + "\n"
    for name in names:
        assert (folder / DATASET / Path(name).name).read_bytes() == files[name]
    assert (folder / "data/tokenizers/fineweb_1024_bpe.model").read_bytes() == files[TOKENIZER]


def test_download_again_and_extend(hub, call, repository, tmp_path):
    hub.faults[TOKENIZER] = ["corrupt"]         # which git's digest tells, as it is no LFS file
    answer = call("-n", 2)
    assert answer.err == "" and "5 files verified, 5 of them downloaded now" in answer.out
    assert sorted(hub.fetched()) == sorted([TOKENIZER, TOKENIZER, *TRAIN[:2], *VAL])
    check_manifest(tmp_path, *repository, 2)
    for n, shards, fetched in [(2, 2, []), (3, 3, [TRAIN[2]]), (0, 4, [TRAIN[3]]), (1, 1, [])]:
        call("-n", n)
        assert hub.fetched() == fetched
        check_manifest(tmp_path, *repository, shards)
    assert (tmp_path / DATASET / "fineweb_train_000003.bin").exists()       # -n 1 removes nothing
    hub.revision = "b" * 40
    hub.files[VAL[0]] = shard([399, 398, 1])     # begins inside a document
    call("-n", 1)
    assert hub.fetched() == [VAL[0]]
    check_manifest(tmp_path, hub.files, repository[1], 1, revision="b" * 40)


FAULTS = [404, 401, 403, "cut", "short", "long", "corrupt", 503, 429]


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_hub(hub, call, repository, tmp_path, fault, ranges):
    """Once, most are tried again; one that lasts is a sentence. Whole files are kept, a damaged one is
    fetched again, and a manifest never lists what is not there."""
    damaged = tmp_path / DATASET / Path(VAL[0]).name
    hub.ranges = ranges
    hub.faults[VAL[0]] = [fault]
    call("-n", 1, code=int(fault in (401, 403, 404)))
    call("-n", 1)
    check_manifest(tmp_path, *repository, 1)
    damaged.write_bytes(damaged.read_bytes()[:-2] + b"xx")
    hub.faults[VAL[0]] = [fault, "*"]
    call("-n", 1, code=1)
    assert not damaged.exists() and not (tmp_path / MANIFEST).exists()
    hub.faults.clear()
    hub.fetched()
    call("-n", 1)
    assert hub.fetched() == [VAL[0]]
    check_manifest(tmp_path, *repository, 1)


@pytest.mark.parametrize("faults, words", [
    ([503, "*"], "HF_ENDPOINT"), ([404], "404"), ([401], "HF_TOKEN"),
    ([b"<html>no hub</html>"], "Hugging Face hub"), ([b"[1, 2]"], "Hugging Face hub")])
def test_listing_fails(hub, call, faults, words):
    hub.faults["listing"] = faults
    answer = call("-n", 1, code=1)
    assert REPO in answer.sentence and words in answer.sentence and answer.out == ""
    if faults == [404]:
        hub.faults["listing"] = [503]           # once
        call("-n", 1)


def test_nobody_answers(call, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))            # bound, not listening: connections are refused
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert "HF_ENDPOINT" in call(HF_ENDPOINT=nowhere, code=1).sentence
        assert "network" in call(source="core", CORE_BUNDLE_URL=f"{nowhere}/x.zip", code=1).sentence
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in call(code=1).sentence


@pytest.mark.parametrize("left, requests", [(b"", 1), (b"x" * 40, 2), (b"x" * 100_000, 1), ("whole", 0)])
def test_leftover_part(hub, call, repository, tmp_path, left, requests):
    part = tmp_path / DATASET / (Path(TRAIN[0]).name + ".part")
    part.parent.mkdir(parents=True)
    part.write_bytes(hub.files[TRAIN[0]] if left == "whole" else left)
    call("-n", 1)
    assert hub.fetched().count(TRAIN[0]) == requests
    check_manifest(tmp_path, *repository, 1)


def test_interrupt(hub, call, repository, tmp_path):
    hub.faults[VAL[0]] = ["stall"]
    process = subprocess.Popen([*COMMAND, "-n", "1", "--out", tmp_path / "data"], cwd=CHECKOUT,
                               env=os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                               stderr=subprocess.PIPE, text=True)
    assert hub.stalled.wait(300)
    process.send_signal(signal.SIGINT)
    stderr = process.communicate()[1]
    assert process.returncode == 1 and stderr.startswith("error: interrupted")
    assert len(stderr.splitlines()) == 1 and not (tmp_path / MANIFEST).exists()
    hub.fetched()
    call("-n", 1)
    assert hub.fetched() == VAL
    check_manifest(tmp_path, *repository, 1)


@pytest.mark.parametrize("changes, words", [
    ({TRAIN[0]: shard([1, 5], magic=7)}, "train_000000.bin is damaged"),
    ({TRAIN[0]: shard([1, 5], count=3)}, "train_000000.bin is damaged"),
    ({VAL[1]: b"short"}, "val_000001.bin is damaged"), ({VAL[1]: shard([1, 400])}, "token 400"),
    ({VAL[1]: shard([1, 5, 0, 7, 0])}, "2 tokens of the val shards stand for text that the tokenizer"),
    ({TOKENIZER: b"no model"}, TOKENIZER), ({TOKENIZER: None}, TOKENIZER),
    (dict.fromkeys(TRAIN), "fineweb_train_"), (dict.fromkeys(VAL), "fineweb_val_")])
def test_published_files_are_unfit(hub, call, tmp_path, changes, words):
    files = hub.files | changes
    hub.files = {name: data for name, data in files.items() if data is not None}
    assert words in call("-n", 1, code=1).sentence
    fetched = hub.fetched()
    assert len(fetched) == len(set(fetched)) and not (tmp_path / MANIFEST).exists()


@pytest.mark.parametrize("words, options, said", [
    ([], {"source": "zzz"}, "sp1024, sp8192, gpt2, fineweb-edu, climbmix, gpt2-vocab, core"),
    (["-n", 5], {}, "lists only 4 train shards"), (["-n", -1], {}, "-n"), (["-n", "x"], {}, "'x'"),
    (["--shards", 3], {}, "--shards"),
    ([], {"HF_ENDPOINT": "localhost"}, "HF_ENDPOINT"), ([], {"HF_ENDPOINT": "http://[::1"}, "HF_ENDPOINT"),
    ([], {"source": "core", "CORE_BUNDLE_URL": "ftp://x/y.zip"}, "CORE_BUNDLE_URL"),
    ([], {"source": "gpt2-vocab", "GPT2_VOCAB_URL": "ftp://x/y.json"}, "GPT2_VOCAB_URL"),
    (["--out", "file"], {}, "cannot write to file")])
def test_refused(hub, call, tmp_path, words, options, said):
    (tmp_path / "file").write_text("in the way")
    assert said in call("-n", 1, *words, **options, code=2).sentence
    assert hub.fetched() == [] and not (tmp_path / "data").exists()


def test_an_endpoint_that_is_none():
    """huggingface_hub would end with a traceback when it is imported."""
    done = subprocess.run(COMMAND, cwd=CHECKOUT, capture_output=True, text=True,
                          env=os.environ | {"HF_ENDPOINT": "http://[::1"})
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: HF_ENDPOINT")


def test_gpt2s_vocabulary(hub, call, tmp_path, monkeypatch):
    """Fetched once, again where it is damaged; other bytes than GPT-2's are refused."""
    data = json.dumps({"!": 0, "a": 1}).encode()
    name = "encoder.json"
    path = tmp_path / "data/tokenizers/gpt2_vocab.json"
    hub.files[name] = data
    monkeypatch.setenv("GPT2_VOCAB_URL", f"{hub.endpoint}/{name}")
    assert "not those that were published" in call(source="gpt2-vocab", code=1).sentence
    assert not [*path.parent.glob("*")]
    monkeypatch.setattr(download, "GPT2_VOCAB_SHA256", hashlib.sha256(data).hexdigest())
    hub.faults[name] = ["corrupt"]
    assert "downloaded now" in call(source="gpt2-vocab").out and path.read_bytes() == data
    before = len(hub.requests)
    assert "there already" in call(source="gpt2-vocab").out and len(hub.requests) == before
    path.write_bytes(data[:-1])
    assert "downloaded now" in call(source="gpt2-vocab").out
    assert train_gpt.gpt2_texts(str(path)) == [b"!", b"a"]


def test_gpt2_tokens_come_without_a_tokenizer(new_hub, call, tmp_path):
    """Shards at the top of the repository; the manifest knows vocabulary, BOS and number of documents."""
    rng = random.Random(3)
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, 12))]
    files = {name: shard([50256, *rng.choices(range(50256), k=400), 50256, 7]) for name in names}
    hub = new_hub(files | {"README.md": b"x"}, "kjj0/fineweb10B-gpt2")
    call(source="gpt2", HF_ENDPOINT=hub.endpoint)
    assert sorted(hub.fetched()) == sorted(names[:10])       # nine train shards suffice
    folder = tmp_path / "data/datasets/fineweb10B_gpt2"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["tokenizer"] == {"vocab_size": 50257, "bos_id": 50256, "lossless": False}
    assert (manifest["val_bytes"], manifest["val_docs"]) == (None, 2)
    assert [file["path"] for file in manifest["files"]] == [*names[1:10], names[0]]


# --- text in parquet files, which prepare.py tokenizes ---------------------------------------------------

@pytest.fixture
def climbmix(new_hub, call, monkeypatch):
    """(call, hub, texts by shard), with a vocabulary of 400 and one process."""
    texts = {}
    files = {"README.md": b"x", "shard_9.parquet": b"x"}
    for i in range(5):
        name = f"shard_{i:05d}.parquet"
        texts[name] = make_texts(60, seed=10 + i)
        pq.write_table(pa.table({"text": texts[name]}), sink := io.BytesIO(), row_group_size=16)
        files[name] = sink.getvalue()
    hub = new_hub(files, "karpathy/climbmix-400b-shuffle")
    source = download.SOURCES["climbmix"]
    assert (source.default_shards, source.vocab_size) == (220, 32768)
    monkeypatch.setitem(download.SOURCES, "climbmix", source._replace(vocab_size=400))
    monkeypatch.setattr(inputs, "usable_cpus", lambda: 1)
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    return lambda *words, **options: call(*words, source="climbmix", **options), hub, texts


def test_parquet_becomes_a_dataset(climbmix, tmp_path):
    call, hub, texts = climbmix
    names = sorted(texts)
    call("-n", 2)
    assert hub.fetched() == [*names[:2], names[4]]
    for name in (*names[:2], names[4]):
        assert (tmp_path / "data/parquet/climbmix" / name).read_bytes() == hub.files[name]
    assert read_documents(tmp_path / "data", "climbmix", "val") == texts[names[4]]
    assert read_documents(tmp_path / "data", "climbmix", "train") == texts[names[0]] + texts[names[1]]
    path = tmp_path / "data/datasets/climbmix/manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["source"] == [hub.repo, "2 train shards"] and manifest["name"] == "climbmix"
    assert manifest["val_bytes"] == sum(len(text.encode()) for text in texts[names[4]])

    assert "nothing to do" in call("-n", 2).out and hub.fetched() == []
    sentence = call("-n", 0, code=2).sentence
    assert "2 train shards" in sentence and "--force" in sentence and hub.fetched() == []
    call("-n", 0, "--force")
    assert hub.fetched() == names[2:4]
    assert len(read_documents(tmp_path / "data", "climbmix", "train")) == 240
    assert "lists only 4 train shards" in call("-n", 5, code=2).sentence


def test_published_parquet_is_unfit(climbmix, tmp_path):
    call, hub, _ = climbmix
    hub.files["shard_00000.parquet"] = b"PAR1 no parquet"
    sentence = call("-n", 2, code=2).sentence
    assert "shard_00000.parquet" in sentence and "damaged" in sentence
    assert not (tmp_path / "data/datasets/climbmix").exists()


@pytest.mark.parametrize("source", ["sp1024", "climbmix"])
def test_disk_has_room_for_files_and_tokens(climbmix, hub, call, monkeypatch, source):
    names = [TOKENIZER, *TRAIN[:2], *VAL]
    factor = 1
    if source == "climbmix":
        call, hub, _ = climbmix
        names = [f"shard_{i:05d}.parquet" for i in (0, 1, 4)]
        factor += download.TOKENS_PER_PARQUET
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    need = int(factor * sum(len(hub.files[name]) for name in names)) + download.DISK_MARGIN
    for size, code in (need - 1, 2), (need, 0), (0, 0):      # in the end there is nothing to fetch
        monkeypatch.setattr(download.shutil, "disk_usage", lambda path: SimpleNamespace(free=size))
        answer = call("-n", 2, code=code)
        assert (len(hub.fetched()) > 0) == (size == need) and ("disk space" in answer.sentence) == (code == 2)


# --- folders elsewhere -----------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["datasets", "tokenizers", "datasets/fineweb10B_sp1024", ""])
def test_folders_of_a_download_may_be_links(hub, call, tmp_path, name):
    """The tokenizer is found from where the shards lie. A link to nowhere is told before the download."""
    target = tmp_path / "another/disk/far/down"
    link = tmp_path / "data" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(target, link.parent))
    said = call("-n", 1, code=2).sentence
    assert "is a link to " in said and "not there" in said and hub.fetched() == [] and not target.exists()
    target.mkdir(parents=True)
    call("-n", 1)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    tokenizer = tmp_path / DATASET / manifest["tokenizer"]["path"]
    assert hashlib.sha256(tokenizer.read_bytes()).hexdigest() == manifest["tokenizer"]["sha256"]
    assert link.is_symlink() and any(target.iterdir())
    hub.fetched()
    call("-n", 1)
    assert hub.fetched() == []


@pytest.mark.parametrize("name", ["datasets", "tokenizers", "datasets/climbmix", "tokenizers/climbmix.model"])
def test_text_is_not_downloaded_for_a_dataset_that_cannot_be_put_in_place(climbmix, tmp_path, name):
    call, hub, _ = climbmix
    place = tmp_path / "data" / name
    place.parent.mkdir(parents=True)
    if name.endswith(".model"):
        place.mkdir()
    else:
        place.symlink_to("../../nowhere/at/all")
    sentence = call("-n", 2, code=2).sentence
    assert "is a folder" in sentence or "nowhere/at/all" in sentence and "not there" in sentence
    assert hub.fetched() == [] and not (tmp_path / "nowhere").exists()


# --- the tasks of CORE -----------------------------------------------------------------------------------

CORE = {
    "core.yaml": "icl_tasks:\n- label: copa\n  dataset_uri: a/copa.jsonl\n  num_fewshot: [0]\n"
                 "- label: squad\n  dataset_uri: b/squad.jsonl\n"
                 "- label: again\n  dataset_uri: a/copa.jsonl\n",
    "eval_meta_data.csv": 'Eval Task,Random baseline,Description\n'
                          'copa,50,"x, y"\nsquad,0,\nagain,50,\nmmlu,,\n',
    "eval_data/a/copa.jsonl": '{"query": "x"}\n' * 700,
    "eval_data/b/squad.jsonl": '{"context": "é"}\n{"context": "z"}',
}


def bundle(members, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(sink := io.BytesIO(), "w", compression) as archive:
        archive.writestr("__MACOSX/._core.yaml", b"x")
        archive.writestr("eval_bundle/", b"")
        for name, text in members.items():
            if text is not None:
                archive.writestr(f"eval_bundle/{name}" if isinstance(name, str) else name, text)
    return sink.getvalue()


@pytest.fixture
def core(hub, call, monkeypatch):
    """core(*words) fetches hub.files[BUNDLE]."""
    hub.files[BUNDLE] = bundle(CORE)
    monkeypatch.setenv("CORE_BUNDLE_URL", f"{hub.endpoint}/{BUNDLE}")
    return lambda *words, **options: call(*words, source="core", **options)


def check_core(folder):
    place = folder / "data/core_bundle"
    found = {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*")
             if path.is_file()}
    assert found == {name: text.encode() for name, text in CORE.items()}
    assert [path.name for path in (folder / "data").iterdir()] == ["core_bundle"]


def test_core_bundle_behind_a_link(hub, core, tmp_path):
    """Is written where that leads; refused before the download where it is nowhere."""
    (tmp_path / "data").mkdir()
    (tmp_path / "another/disk").mkdir(parents=True)
    place = tmp_path / "data/core_bundle"
    place.symlink_to(tmp_path / "another/disk/tasks")
    core()
    assert place.is_symlink() and os.listdir(tmp_path / "another/disk") == ["tasks"]
    check_core(tmp_path)
    hub.fetched()
    place.unlink()
    place.symlink_to("../nowhere/at/all")
    assert "a folder that is not there: ../nowhere/at/all" in core(code=2).sentence
    assert hub.fetched() == [] and not (tmp_path / "nowhere").exists()


def test_core_bundle(hub, core, tmp_path):
    place = tmp_path / "data/core_bundle"
    place.mkdir(parents=True)
    (place / "core.yaml").write_text("made by somebody else")
    assert "data/core_bundle" in core(code=2).sentence and hub.requests == []
    assert (place / "core.yaml").read_text() == "made by somebody else"
    shutil.rmtree(place)
    stray = tmp_path / "data/.core_bundle.partial/eval_bundle/eval_data/a/stray.jsonl"
    stray.parent.mkdir(parents=True)        # what a download that was killed had unpacked
    stray.touch()
    out = core(HF_TOKEN="hf_secret").out
    assert hub.authorized == [False]             # the hub's token is for the hub
    assert hashlib.sha256(hub.files[BUNDLE]).hexdigest() in out
    check_core(tmp_path)
    hub.fetched()
    assert "there already" in core().out and hub.fetched() == []


def test_core_is_not_to_be_had(hub, core, tmp_path):
    hub.faults[BUNDLE] = [404]
    assert "404" in core(code=1).sentence and len(hub.requests) == 1
    wrong = bundle(CORE, zipfile.ZIP_STORED).replace(b'{"query": "x"}', b'{"query": "y"}', 1)
    for data, words in ((b"<html>not a zip</html>", "is damaged"), (wrong, "CRC"),
                        (bundle(CORE | {"core.yaml": None}), "no core.yaml")):
        hub.files[BUNDLE] = data
        assert words in core(code=1).sentence
        assert not [*(tmp_path / "data").iterdir()]
