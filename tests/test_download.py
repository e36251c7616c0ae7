"""data/download.py against a small imitation of the Hugging Face hub on 127.0.0.1."""
import hashlib
import importlib.util
import io
import json
import os
import random
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import sentencepiece

SCRIPT = Path(__file__).resolve().parent.parent / "data" / "download.py"
REPO, ROOT = "willdepueoai/parameter-golf", "datasets/datasets/fineweb10B_sp1024"
TOKENIZER = "datasets/tokenizers/fineweb_1024_bpe.model"
TRAIN = [f"{ROOT}/fineweb_train_{i:06d}.bin" for i in range(4)]
VAL = [f"{ROOT}/fineweb_val_{i:06d}.bin" for i in range(2)]
BUNDLE = "eval_bundle.zip"
DATASET = Path("data/datasets/fineweb10B_sp1024")
MANIFEST = DATASET / "manifest.json"


def load_script():
    spec = importlib.util.spec_from_file_location("download", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shard(tokens, magic=20240520, version=1, count=None):
    header = struct.pack("<3i", magic, version, len(tokens) if count is None else count)
    return header.ljust(1024, b"\0") + np.asarray(tokens, "<u2").tobytes()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", headers=()):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        hub.authorized.append("Authorization" in self.headers)
        if path == f"/{BUNDLE}" and BUNDLE in hub.files:
            hub.requests.append((BUNDLE, self.headers.get("Range")))
            return self.content(hub.fault(BUNDLE), hub.files[BUNDLE])
        if path == f"/api/datasets/{hub.repo}":
            return self.listing(hub)
        stem = f"/datasets/{hub.repo}/resolve/{hub.revision}/"
        name = path.removeprefix(stem).removeprefix("/cdn/")
        if name not in hub.files or name == path:
            return self.answer(404, b"", [("X-Error-Code", "EntryNotFound")])
        if path.startswith(stem):                # like the hub: the bytes come from another place
            return self.answer(302, headers=[("Location", f"/cdn/{name}"), ("X-Repo-Commit", hub.revision)])
        hub.requests.append((name, self.headers.get("Range")))
        self.content(hub.fault(name), hub.files[name])

    def listing(self, hub):
        hub.requests.append(("listing", None))
        fault = hub.fault("listing")
        if isinstance(fault, int):
            return self.answer(fault)
        if fault == "stall":
            return hub.released.wait(20)
        if fault == "html":
            return self.answer(200, b"<html>not a hub</html>", [("Content-Type", "text/html")])
        if fault == "alien":
            return self.answer(200, b"[1, 2]", [("Content-Type", "application/json")])
        siblings = []
        for name, data in hub.files.items():
            item = {"rfilename": name, "size": len(data),
                    "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}
            if name.endswith((".bin", ".parquet")):
                sha256 = hashlib.sha256(data).hexdigest()
                item["lfs"] = {"size": len(data), "sha256": sha256, "pointerSize": 134}
            siblings.append(item)
        body = {"id": hub.repo, "sha": hub.revision, "siblings": siblings}
        self.answer(200, json.dumps(body).encode(), [("Content-Type", "application/json")])

    def content(self, fault, data):
        if isinstance(fault, int):
            return self.answer(fault, b"", [("Retry-After", "0")])
        start, wanted = 0, self.headers.get("Range")
        if fault == "corrupt":
            data = data[:-1] + bytes([data[-1] ^ 1])
        if fault == "long":
            data += b"x" * 200_000
        if wanted and "norange" not in self.server.hub.traits:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
        total, data = len(data), data[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        whole = len(data) if fault != "short" else len(data) // 2
        self.send_header("Content-Length", str(whole))
        self.end_headers()
        if fault in ("cut", "stall"):
            whole //= 2
        self.wfile.write(data[:whole])
        self.wfile.flush()
        if fault == "stall":
            self.server.hub.released.wait(20)
        self.close_connection = True


class Hub:
    """The repository `files`; faults[name] lists the faults of the next requests, [fault, "*"] lasts."""

    def __init__(self, files, repo=REPO):
        self.repo, self.files, self.revision, self.faults, self.requests = repo, dict(files), "a" * 40, {}, []
        self.traits, self.released, self.authorized = set(), threading.Event(), []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.hub, self.server.daemon_threads = self, True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def fault(self, name):
        queue = self.faults.get(name, [])
        if queue and queue[-1] == "*":
            return queue[0]
        return queue.pop(0) if queue else None

    def fetched(self):
        """Names of the file requests since the last call, in order."""
        names = [name for name, _ in self.requests if name != "listing"]
        self.requests.clear()
        return names

    def close(self):
        self.released.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="session")
def repository():
    """(files, sp): four train shards, two val shards that cut a document (and a character) in two."""
    rng = random.Random(5)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(1, 7))) for _ in range(300)]
    words += ["é", "日本", "\n", "  "]
    texts = [" ".join(rng.choices(words, k=rng.randint(1, 120))) for _ in range(120)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=400, model_type="bpe",
        byte_fallback=True, character_coverage=0.99, num_threads=1, minloglevel=2)
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    tokens = [token for text in texts + ["𝄞 and so on"] + texts[:9] for token in [1] + sp.encode(text)]
    cut = tokens.index(sp.piece_to_id("<0xF0>")) + 2         # between the four bytes of the clef
    files = {name: shard([1] + rng.choices(range(3, 400), k=3000 + i)) for i, name in enumerate(TRAIN)}
    files |= {VAL[0]: shard(tokens[:cut]), VAL[1]: shard(tokens[cut:]), TOKENIZER: model.getvalue(),
              "datasets/manifest.json": b"{}", "README.md": b"x",
              "datasets/datasets/fineweb10B_sp2048/fineweb_train_000000.bin": shard([1, 2])}
    return files, sp


@pytest.fixture
def hub(repository):
    hub = Hub(repository[0])
    yield hub
    hub.close()


def environment(endpoint, folder):
    env = {name: value for name, value in os.environ.items()
           if not name.startswith("HF_") and not name.lower().endswith("_proxy")}
    return env | {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hf"), "NO_PROXY": "127.0.0.1"}


@pytest.fixture
def call(hub, tmp_path):
    """call(*arguments) runs the script in tmp_path; the result carries the last line of stderr."""
    def call(*arguments, endpoint=hub.endpoint, source="sp1024", timeout="1", tries="3", **env):
        command = [sys.executable, str(SCRIPT), source, "--retry-delay", "0.01", "--timeout", timeout,
                   "--tries", tries, *arguments]
        result = subprocess.run(command, cwd=tmp_path, env=environment(endpoint, tmp_path) | env, text=True,
                                capture_output=True, timeout=50)
        assert "Traceback" not in result.stderr
        result.sentence = (result.stderr.splitlines() or [""])[-1]
        if result.returncode:
            assert result.sentence.startswith("error: ") and result.stdout == ""
            assert str(tmp_path) not in result.stderr and "127.0.0.1" not in result.stderr
        return result
    return call


def check_manifest(folder, files, sp, train, revision="a" * 40):
    """The manifest holds exactly what an independent look at the repository gives, and so do the files."""
    val = b"".join(files[name][1024:] for name in VAL)
    documents = []
    for token in np.frombuffer(val, "<u2").tolist():
        if token == 1 or not documents:
            documents.append([])
        documents[-1] += [token] * (token != 1)
    sha = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    expected = {
        "version": 1, "name": "fineweb10B_sp1024", "source": REPO, "revision": revision,
        "tokenizer": {"path": "../../tokenizers/fineweb_1024_bpe.model", "sha256": sha[TOKENIZER],
                      "vocab_size": 400, "bos_id": 1, "lossless": False},
        "files": [{"path": Path(name).name, "split": "train" if name in TRAIN else "val",
                   "tokens": (len(files[name]) - 1024) // 2, "sha256": sha[name]}
                  for name in TRAIN[:train] + VAL],
        "train_bytes": None, "val_bytes": sum(len(sp.decode(ids).encode()) for ids in documents),
        "train_docs": None, "val_docs": len(documents), "text_fingerprint": None, "document_hashes": None}
    text = (folder / MANIFEST).read_text()
    assert json.loads(text) == expected
    assert list(json.loads(text)) == list(expected) and text == json.dumps(expected, indent=1) + "\n"
    for name in TRAIN[:train] + VAL:
        assert (folder / DATASET / Path(name).name).read_bytes() == files[name]
    assert (folder / "data/tokenizers/fineweb_1024_bpe.model").read_bytes() == files[TOKENIZER]
    assert not list(folder.rglob("*.part"))


def test_download_again_and_extend(hub, call, repository, tmp_path):
    files, sp = repository
    result = call("-n", "2")
    assert result.returncode == 0 and result.stderr == "" and len(result.stdout.splitlines()) == 1
    assert sorted(hub.fetched()) == sorted([TOKENIZER, *TRAIN[:2], *VAL])
    check_manifest(tmp_path, files, sp, 2)
    before = (tmp_path / MANIFEST).read_bytes()

    assert call("-n", "2").returncode == 0
    assert hub.fetched() == [] and (tmp_path / MANIFEST).read_bytes() == before

    assert call("-n", "3").returncode == 0
    assert hub.fetched() == [TRAIN[2]]
    check_manifest(tmp_path, files, sp, 3)

    assert call("-n", "0").returncode == 0
    assert hub.fetched() == [TRAIN[3]]
    check_manifest(tmp_path, files, sp, 4)

    assert call("-n", "1").returncode == 0       # the manifest describes what was asked for, files stay
    assert hub.fetched() == [] and (tmp_path / DATASET / "fineweb_train_000003.bin").exists()
    check_manifest(tmp_path, files, sp, 1)


@pytest.mark.parametrize("fault", ["stall", "cut", "short", "long", "corrupt", 503, 429, 416])
@pytest.mark.parametrize("name", [TRAIN[0], TOKENIZER], ids=["shard", "tokenizer"])
def test_a_fault_that_passes(hub, call, repository, tmp_path, name, fault):
    hub.faults[name] = [fault]
    result = call("-n", "1")
    assert result.returncode == 0 and f"{name}: " in result.stderr and "try 2 of 3" in result.stderr
    ranges = [wanted for requested, wanted in hub.requests if requested == name]
    resumed = f"bytes={len(hub.files[name]) // 2}-" if fault in ("stall", "cut", "short") else None
    assert ranges == [None, resumed]
    check_manifest(tmp_path, *repository, 1)


@pytest.mark.parametrize("fault, reason", [
    ("stall", "no data for 0.4 s"), ("cut", "closed connection"), ("short", "bytes came"),
    ("corrupt", "its sha256 differs"), (503, "the hub answered 503"), (429, "the hub answered 429")])
def test_a_fault_that_stays(hub, call, repository, tmp_path, fault, reason):
    hub.faults[TRAIN[1]] = [fault, "*"]
    result = call("-n", "2", timeout="0.4")
    assert result.returncode == 1 and reason in result.sentence and TRAIN[1] in result.sentence
    assert "3 tries" in result.sentence and hub.fetched().count(TRAIN[1]) == 3
    assert not (tmp_path / MANIFEST).exists() and not (tmp_path / DATASET / Path(TRAIN[1]).name).exists()

    hub.faults.clear()
    assert call("-n", "2").returncode == 0
    assert hub.fetched() == [TRAIN[1], *VAL]     # what was complete is not fetched again
    check_manifest(tmp_path, *repository, 2)


@pytest.mark.parametrize("status", [404, 401, 403, 400])
@pytest.mark.parametrize("name", ["listing", VAL[1]])
def test_a_refusal_is_final(hub, call, tmp_path, name, status):
    hub.faults[name] = [status, "*"]
    result = call("-n", "1")
    assert result.returncode == 1 and str(status) in result.sentence and len(result.stderr.splitlines()) == 1
    assert (REPO if name == "listing" else name) in result.sentence
    assert [requested for requested, _ in hub.requests].count(name) == 1
    assert not (tmp_path / MANIFEST).exists()


@pytest.mark.parametrize("fault", ["stall", 503])
def test_listing_is_retried(hub, call, tmp_path, fault):
    hub.faults["listing"] = [fault]
    assert call("-n", "1").returncode == 0
    hub.faults["listing"] = [fault, "*"]
    result = call("-n", "1", timeout="0.3")
    assert result.returncode == 1 and REPO in result.sentence and "HF_ENDPOINT" in result.sentence
    assert (tmp_path / MANIFEST).exists()        # still true


@pytest.mark.parametrize("fault", ["html", "alien"])
def test_not_a_hub(hub, call, fault):
    hub.faults["listing"] = [fault]
    result = call()
    assert result.returncode == 1 and "does not answer like a Hugging Face hub" in result.sentence


def test_no_network(call):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))            # bound, not listening: connections are refused
        result = call(endpoint=f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert result.returncode == 1 and "refused" in result.sentence
    assert "the Hugging Face hub (or the server that HF_ENDPOINT names)" in result.sentence
    assert call(HF_HUB_OFFLINE="1").sentence.endswith("cannot be reached while HF_HUB_OFFLINE is set")


def test_resume_in_the_next_run(hub, call, repository, tmp_path):
    half = len(hub.files[TRAIN[1]]) // 2
    hub.faults[TRAIN[1]] = ["cut"]
    assert call("-n", "2", tries="1").returncode == 1
    assert (tmp_path / DATASET / (Path(TRAIN[1]).name + ".part")).stat().st_size == half
    hub.requests.clear()
    assert call("-n", "2").returncode == 0
    assert hub.requests[1:] == [(TRAIN[1], f"bytes={half}-"), (VAL[0], None), (VAL[1], None)]
    check_manifest(tmp_path, *repository, 2)


def test_server_without_ranges(hub, call, repository, tmp_path):
    hub.traits.add("norange")
    hub.faults[TRAIN[0]] = ["cut", "cut"]
    assert call("-n", "1").returncode == 0
    check_manifest(tmp_path, *repository, 1)


@pytest.mark.parametrize("left", [b"", b"x" * 40, b"x" * 100_000, "whole"])
def test_leftover_part(hub, call, repository, tmp_path, left):
    (tmp_path / DATASET).mkdir(parents=True)
    part = tmp_path / DATASET / (Path(TRAIN[0]).name + ".part")
    part.write_bytes(hub.files[TRAIN[0]] if left == "whole" else left)
    assert call("-n", "1").returncode == 0
    assert hub.fetched().count(TRAIN[0]) == {b"": 1, b"x" * 40: 2, b"x" * 100_000: 1, "whole": 0}[left]
    check_manifest(tmp_path, *repository, 1)


def test_interrupt(hub, call, repository, tmp_path):
    hub.faults[VAL[0]] = ["stall"]
    process = subprocess.Popen([sys.executable, str(SCRIPT), "sp1024", "-n", "1"], cwd=tmp_path, text=True,
                               env=environment(hub.endpoint, tmp_path), stderr=subprocess.PIPE,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    part = tmp_path / DATASET / (Path(VAL[0]).name + ".part")
    deadline = time.monotonic() + 30
    while not (part.exists() and (VAL[0], None) in hub.requests) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=90)[1]
    assert process.returncode == 1 and len(stderr.splitlines()) == 1
    assert stderr.startswith("error: interrupted; the same command continues")
    assert not (tmp_path / MANIFEST).exists()
    hub.requests.clear()
    assert call("-n", "1").returncode == 0
    assert [name for name, _ in hub.requests[1:]] == VAL and hub.requests[1][1]
    check_manifest(tmp_path, *repository, 1)


def test_damage_on_disk(hub, call, repository, tmp_path):
    assert call("-n", "2").returncode == 0
    hub.fetched()
    path = tmp_path / DATASET / Path(TRAIN[1]).name
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (tmp_path / DATASET / Path(VAL[1]).name).unlink()
    hub.faults[TRAIN[1]] = [404]
    assert call("-n", "2").returncode == 1
    assert not (tmp_path / MANIFEST).exists()    # it would have claimed a file that is gone
    result = call("-n", "2")
    assert result.returncode == 0 and hub.fetched() == [TRAIN[1], TRAIN[1], VAL[1]]
    check_manifest(tmp_path, *repository, 2)


def test_extension_that_fails_keeps_the_manifest(hub, call, repository, tmp_path):
    assert call("-n", "1").returncode == 0
    hub.faults[TRAIN[2]] = [404]
    assert call("-n", "3").returncode == 1
    check_manifest(tmp_path, *repository, 1)


def test_new_revision(hub, call, repository, tmp_path):
    assert call("-n", "1").returncode == 0
    hub.fetched()
    hub.revision = "b" * 40
    hub.files[VAL[0]] = shard([399, 398, 1])     # begins inside a document
    result = call("-n", "1")
    assert result.returncode == 0 and hub.fetched() == [VAL[0]] and "bytes instead of" in result.stderr
    check_manifest(tmp_path, hub.files, repository[1], 1, revision="b" * 40)


@pytest.mark.parametrize("data, reason", [
    (shard([1, 5], magic=7), "magic 7"), (shard([1, 5], version=2), "version 2"),
    (shard([1, 5], count=3), "3 tokens"), (b"short", "no token shard")])
def test_published_file_is_no_shard(hub, call, tmp_path, data, reason):
    hub.files[TRAIN[0]] = data
    result = call("-n", "1")
    assert result.returncode == 1 and Path(TRAIN[0]).name in result.sentence and reason in result.sentence
    assert hub.fetched() == [TOKENIZER, TRAIN[0]] and not (tmp_path / MANIFEST).exists()


def test_published_repository_is_unfit(hub, call):
    hub.files[VAL[1]] = shard([1, 400])
    assert "token 400, the tokenizer has 400 pieces" in call("-n", "1").sentence
    hub.files[TOKENIZER] = b"no model"
    assert call("-n", "1").sentence.endswith("is no SentencePiece model")
    for name in VAL:
        del hub.files[name]
    result = call("-n", "1")
    assert result.returncode == 1 and "lists no" in result.sentence and "fineweb_val_" in result.sentence


@pytest.mark.parametrize("arguments, options, words", [
    ([], {"source": "sp1204"}, "did you mean sp1024"), ([], {"source": "climbmx"}, "did you mean climbmix"),
    ([], {"source": "zzz"}, "known: sp1024, gpt2, fineweb-edu, climbmix, core"),
    (["-n", "5"], {}, "lists only 4 train shards"), (["-n", "-1"], {}, "-n"), (["-n", "x"], {}, "'x'"),
    (["--shards", "3"], {}, "--shards"), ([], {"timeout": "nan"}, "--timeout"),
    ([], {"tries": "0"}, "--tries"),
    ([], {"endpoint": "localhost"}, "http"), ([], {"endpoint": "http://[::1"}, "HF_ENDPOINT"),
    (["--out", "file"], {}, "cannot write to file")])
def test_refused(hub, call, tmp_path, arguments, options, words):
    (tmp_path / "file").write_text("in the way")
    result = call("-n", "1", *arguments, **options)
    assert result.returncode == 2 and words in result.sentence
    assert hub.fetched() == [] and not (tmp_path / "data").exists()


def test_disk_too_small(hub, tmp_path, monkeypatch, capsys):
    download = load_script()
    monkeypatch.chdir(tmp_path)
    for name, value in environment(hub.endpoint, tmp_path).items():
        monkeypatch.setenv(name, value)
    free = [download.DISK_MARGIN + 10_000]
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free[0]}))
    assert download.main(["sp1024", "-n", "2"]) == 2
    sentence = capsys.readouterr().err.strip()
    assert len(sentence.splitlines()) == 1 and sentence.count("GB") == 3 and hub.fetched() == []
    need = sum(len(hub.files[name]) for name in [TOKENIZER, *TRAIN[:2], *VAL])
    free[0] = download.DISK_MARGIN + need - 1
    assert download.main(["sp1024", "-n", "2"]) == 2
    free[0] += 1
    assert download.main(["sp1024", "-n", "2"]) == 0
    free[0] = 0                                  # nothing to fetch, nothing to refuse
    assert download.main(["sp1024", "-n", "2"]) == 0
    (tmp_path / DATASET / Path(TRAIN[1]).name).unlink()
    assert download.main(["sp1024", "-n", "2"]) == 2
    assert (tmp_path / DATASET / Path(TRAIN[0]).name).exists()


def test_gpt2_tokens_come_without_a_tokenizer(call, tmp_path):
    """Shards at the top of the repository; the manifest knows vocabulary, BOS and number of documents."""
    rng = random.Random(3)
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, 12))]
    tokens = {name: [50256, *rng.choices(range(50256), k=400), 50256, 7] for name in names}
    files = {name: shard(ids) for name, ids in tokens.items()} | {"README.md": b"x"}
    hub = Hub(files, "kjj0/fineweb10B-gpt2")
    try:
        result = call(endpoint=hub.endpoint, source="gpt2")
        assert result.returncode == 0 and result.stderr == "" and "403 val tokens, " in result.stdout
        assert sorted(hub.fetched()) == sorted(names[:10])       # nine train shards suffice
        folder = tmp_path / "data/datasets/fineweb10B_gpt2"
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["tokenizer"] == {"vocab_size": 50257, "bos_id": 50256, "lossless": False}
        assert (manifest["val_bytes"], manifest["val_docs"]) == (None, 2)
        assert [file["path"] for file in manifest["files"]] == [*names[1:10], names[0]]
        import train_gpt
        env = {"DATA_PATH": str(folder), "DATA_FINGERPRINT": "", "TRAIN_SEQ_LEN": "256"}
        data = train_gpt.open_data(train_gpt.load_config(env))
        assert (data.vocab_size, data.bos, data.val_bytes, data.tokenizer) == (50257, 50256, None, None)
        (folder / "manifest.json").unlink()                     # as others leave them: the BOS is GPT-2's
        cfg = train_gpt.load_config(env | {"VOCAB_SIZE": "50304"})
        assert train_gpt.open_data(cfg).bos == 50256
        hub.files["fineweb_val_000000.bin"] = shard([50256, 50257])
        (folder / "fineweb_val_000000.bin").unlink()
        assert "the val shards hold token 50257" in call(endpoint=hub.endpoint, source="gpt2").sentence
    finally:
        hub.close()


@pytest.mark.parametrize("batch", [1, 7, 1 << 20])
def test_decoded_bytes(repository, monkeypatch, batch):
    download, sp = load_script(), repository[1]
    monkeypatch.setattr(download, "DECODE_TOKENS", batch)
    rng = random.Random(batch)
    byte = [sp.piece_to_id(f"<0x{value:02X}>") for value in "日é".encode()]
    for tokens in ([], [1], [1, 1, 1], sp.encode("no beginning"), sp.encode("x") + [1, 1, byte[0], 1, *byte],
                   [1, *sp.encode("  two  spaces"), 1, *byte, 1], rng.choices(range(400), k=3000)):
        documents = "".join(chr(token) for token in tokens).split("\x01")
        expected = sum(len(sp.decode([ord(c) for c in document]).encode()) for document in documents)
        assert download.decoded_bytes(sp, np.array(tokens, np.uint16), 1) == expected


def test_import_does_nothing():
    code = f"import runpy, sys; runpy.run_path({str(SCRIPT)!r}); print(sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0 and "huggingface_hub" not in result.stdout and "numpy" not in result.stdout


# --- text in parquet files, which prepare.py tokenizes ----------------------------------------------------

@pytest.fixture
def climbmix(tmp_path, monkeypatch, capsys):
    """(call, hub, texts by shard): call(*arguments) is main() with a vocabulary of 400 and one process."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rng, texts, files = random.Random(7), {}, {"README.md": b"x", "shard_9.parquet": b"x"}
    words = ["".join(rng.choices("abcdefghijk", k=rng.randint(1, 7))) for _ in range(500)]
    for name in (f"shard_{i:05d}.parquet" for i in range(5)):
        texts[name] = [" ".join(rng.choices(words, k=rng.randint(9, 90))) for _ in range(60)]
        sink = io.BytesIO()
        pq.write_table(pa.table({"text": texts[name]}), sink, row_group_size=16)
        files[name] = sink.getvalue()
    hub, download = Hub(files, "karpathy/climbmix-400b-shuffle"), load_script()
    assert download.SOURCES["climbmix"][:3] == (hub.repo, "climbmix", 220)
    assert download.SOURCES["fineweb-edu"][:3] == ("karpathy/fineweb-edu-100b-shuffle", "fineweb_edu", 220)
    assert {download.SOURCES[name].vocab_size for name in ("climbmix", "fineweb-edu")} == {32768}
    smaller = download.SOURCES["climbmix"]._replace(vocab_size=400)
    monkeypatch.setitem(download.SOURCES, "climbmix", smaller)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.chdir(tmp_path)
    for name, value in environment(hub.endpoint, tmp_path).items():
        monkeypatch.setenv(name, value)

    def call(*arguments, expect=0):
        code = download.main(["climbmix", "--retry-delay", "0.01", "--timeout", "1", *arguments])
        out, err = capsys.readouterr()
        assert code == expect, err
        return err if expect else out
    call.module = download
    yield call, hub, texts
    hub.close()


def test_parquet_becomes_a_dataset(climbmix, tmp_path):
    call, hub, texts = climbmix
    names = sorted(texts)
    said = call("-n", "2")
    assert hub.fetched() == [*names[:2], names[4]] and "3 files verified, 3 of them downloaded" in said
    folder = tmp_path / "data/datasets/climbmix"
    for name in (*names[:2], names[4]):
        assert (tmp_path / "data/parquet/climbmix" / name).read_bytes() == hub.files[name]
    from test_prepare import read_documents
    assert read_documents(tmp_path / "data", "climbmix", "val") == texts[names[4]]
    assert read_documents(tmp_path / "data", "climbmix", "train") == texts[names[0]] + texts[names[1]]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["source"] == [hub.repo, "2 train shards"] and manifest["name"] == "climbmix"
    import train_gpt
    env = {"DATA_PATH": str(folder), "DATA_FINGERPRINT": "", "TRAIN_SEQ_LEN": "256"}
    data = train_gpt.open_data(train_gpt.load_config(env))
    assert (data.vocab_size, data.bos) == (400, 1)
    assert data.val_bytes == sum(len(text.encode()) for text in texts[names[4]])

    before = (folder / "manifest.json").stat().st_mtime_ns
    assert "nothing to do" in call("-n", "2") and hub.fetched() == []
    sentence = call("-n", "0", expect=2)
    assert "2 train shards" in sentence and "--force" in sentence and hub.fetched() == []
    assert (folder / "manifest.json").stat().st_mtime_ns == before
    call("-n", "0", "--force")
    assert hub.fetched() == names[2:4]
    assert len(read_documents(tmp_path / "data", "climbmix", "train")) == 240
    assert "lists only 4 train shards" in call("-n", "5", expect=2)


def test_parquet_download_resumes(climbmix, tmp_path):
    call, hub, texts = climbmix
    name = "shard_00001.parquet"
    hub.faults[name] = ["cut"]
    assert name in call("-n", "2", "--tries", "1", expect=1)
    assert not (tmp_path / "data/datasets").exists()
    hub.requests.clear()
    call("-n", "2")
    assert hub.requests[1:] == [(name, f"bytes={len(hub.files[name]) // 2}-"), ("shard_00004.parquet", None)]
    path = tmp_path / "data/parquet/climbmix" / name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    hub.fetched()
    call("-n", "2")
    assert hub.fetched() == [name] and path.read_bytes() == hub.files[name]


def test_published_parquet_is_unfit(climbmix, tmp_path):
    call, hub, texts = climbmix
    hub.files["shard_00000.parquet"] = b"PAR1 no parquet"
    sentence = call("-n", "2", expect=2)
    assert "shard_00000.parquet is a damaged parquet file" in sentence and len(sentence.splitlines()) == 1
    assert not (tmp_path / "data/datasets/climbmix").exists()
    for name in texts:
        del hub.files[name]
    assert "lists no shard_*.parquet" in call(expect=1)


def test_disk_has_room_for_text_and_tokens(climbmix, tmp_path, monkeypatch):
    call, hub, texts = climbmix
    download, sizes = call.module, [len(hub.files[f"shard_{i:05d}.parquet"]) for i in (0, 4)]
    free = [download.DISK_MARGIN + sum(sizes) + int(download.TOKENS_PER_PARQUET * sum(sizes)) - 1]
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free[0]}))
    assert "free disk space" in call("-n", "1", expect=2) and hub.fetched() == []
    free[0] += 1
    call("-n", "1")
    free[0] = 0                                  # all is there
    call("-n", "1")


# --- the tasks of CORE ------------------------------------------------------------------------------------

CORE = {
    "core.yaml": "icl_tasks:\n- label: copa\n  dataset_uri: a/copa.jsonl\n  num_fewshot: [0]\n"
                 "- label: squad\n  dataset_uri: b/squad.jsonl\n"
                 "- label: again\n  dataset_uri: a/copa.jsonl\n",
    "eval_meta_data.csv": 'Eval Task,Random baseline,Description\n'
                          'copa,50,"x, y"\nsquad,0,\nagain,50,\nmmlu,,\n',
    "eval_data/a/copa.jsonl": '{"query": "x"}\n' * 700,
    "eval_data/b/squad.jsonl": '{"context": "é"}\n{"context": "z"}',
}


def bundle(members, top="eval_bundle/", store=False):
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED if store else zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__MACOSX/._core.yaml", b"x")
        archive.writestr(top, b"")
        for name, text in members.items():
            archive.writestr(name if isinstance(name, zipfile.ZipInfo) else top + name, text)
    return sink.getvalue()


@pytest.fixture
def core(hub, call, tmp_path):
    """core(*arguments) fetches hub.files[BUNDLE]."""
    hub.files[BUNDLE] = bundle(CORE)

    def core(*arguments, **options):
        options = {"CORE_BUNDLE_URL": f"{hub.endpoint}/{BUNDLE}"} | options
        return call(*arguments, source="core", **options)
    return core


def check_core(hub, folder, members=CORE):
    place = folder / "data/core_bundle"
    found = {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*")
             if path.is_file()}
    assert found == {name: text.encode() for name, text in members.items()} | {BUNDLE: hub.files[BUNDLE]}
    assert [path.name for path in (folder / "data").iterdir()] == ["core_bundle"]


def test_core_bundle(hub, core, tmp_path):
    digest = hashlib.sha256(hub.files[BUNDLE]).hexdigest()
    result = core(HF_TOKEN="hf_secret")
    assert result.returncode == 0 and result.stdout.splitlines() == [
        "copa: 700 examples", "squad: 2 examples", "again: 700 examples",
        f"core_bundle: 3 tasks, 1,402 examples, downloaded now, sha256 of the zip {digest}"]
    assert hub.authorized == [False]             # the hub's token is for the hub
    check_core(hub, tmp_path)
    hub.fetched()
    assert "there already, whole" in core().stdout and hub.fetched() == []
    path = tmp_path / "data/core_bundle/eval_data/b/squad.jsonl"
    for damage in (lambda: path.write_text('{"context": "y"}\n'), path.unlink):
        damage()
        assert core().returncode == 0 and hub.fetched() == []          # from the zip
        check_core(hub, tmp_path)
    (tmp_path / "data/core_bundle" / BUNDLE).write_bytes(b"x")
    (tmp_path / "data/core_bundle/core.yaml").unlink()
    assert core().returncode == 0 and hub.fetched() == [BUNDLE]
    check_core(hub, tmp_path)


@pytest.mark.parametrize("fault", ["stall", "cut", "short", "long", 503])
def test_core_fault_that_passes(hub, core, tmp_path, fault):
    hub.faults[BUNDLE] = [fault]
    result = core(timeout="0.5")
    assert result.returncode == 0 and "the CORE bundle: " in result.stderr and "try 2 of 3" in result.stderr
    half = f"bytes={len(hub.files[BUNDLE]) // 2}-" if fault in ("stall", "cut") else None
    assert [wanted for _, wanted in hub.requests] == [None, half]
    check_core(hub, tmp_path)


def test_core_resumes_in_the_next_run(hub, core, tmp_path):
    hub.faults[BUNDLE] = ["cut"]
    assert core(tries="1").returncode == 1
    assert not (tmp_path / "data/core_bundle").exists()
    hub.requests.clear()
    assert core().returncode == 0
    assert hub.requests == [(BUNDLE, f"bytes={len(hub.files[BUNDLE]) // 2}-")]
    check_core(hub, tmp_path)


def test_core_is_not_to_be_had(hub, core, tmp_path):
    hub.faults[BUNDLE] = [404]
    result = core()
    assert result.returncode == 1 and "404" in result.sentence and len(hub.requests) == 1
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        result = core(CORE_BUNDLE_URL=f"http://127.0.0.1:{unused.getsockname()[1]}/x.zip")
    assert result.returncode == 1 and "refused" in result.sentence and "CORE_BUNDLE_URL" in result.sentence
    assert core(CORE_BUNDLE_URL="ftp://x/y.zip").returncode == 2
    hub.files[BUNDLE] = b"<html>not a zip</html>"
    assert "the zip is damaged" in core().sentence
    stored = bundle(CORE, store=True)
    hub.files[BUNDLE] = stored.replace(b'{"query": "x"}', b'{"query": "y"}', 1)
    result = core()
    assert result.returncode == 1 and "CRC" in result.sentence
    assert not (tmp_path / "data/core_bundle").exists()


def link(name):
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


@pytest.mark.parametrize("name", ["eval_bundle/../../escaped", "/escaped", "eval_bundle/a/..\\escaped",
                                  "../escaped", "c:/escaped", link("eval_bundle/eval_data/escaped")],
                         ids=["up", "absolute", "backslash", "beside", "drive", "link"])
def test_core_member_that_escapes(hub, core, tmp_path, name):
    info = name if isinstance(name, zipfile.ZipInfo) else zipfile.ZipInfo(name)
    hub.files[BUNDLE] = bundle(CORE | {info: "/"})
    result = core()
    assert result.returncode == 1 and "escaped" in result.sentence and len(hub.requests) == 1
    assert not list(tmp_path.rglob("escaped")) and not (tmp_path / "data/core_bundle").exists()


@pytest.mark.parametrize("name, text, words", [
    ("core.yaml", None, "core.yaml"), ("core.yaml", "icl_tasks: []", "lists no tasks"),
    ("core.yaml", "a: [", "core.yaml"), ("core.yaml", "- x", "core.yaml"),
    ("core.yaml", CORE["core.yaml"].replace("a/copa", "../../x"), "core.yaml"),
    ("eval_meta_data.csv", None, "eval_meta_data.csv"), ("eval_meta_data.csv", "a,b\n1,2\n", "csv"),
    ("eval_meta_data.csv", CORE["eval_meta_data.csv"].replace("squad,0", "squid,0"), "baseline` of squad"),
    ("eval_meta_data.csv", CORE["eval_meta_data.csv"].replace("squad,0", "squad,"), "eval_meta_data.csv"),
    ("eval_data/b/squad.jsonl", None, "lacks eval_data/b/squad.jsonl of squad"),
    ("eval_data/b/squad.jsonl", "", "eval_data/b/squad.jsonl of the CORE bundle is empty"),
    ("eval_data/a/copa.jsonl", "{}\n{}\n{\n", "eval_data/a/copa.jsonl of the CORE bundle: line 3")])
def test_core_bundle_that_lacks_something(hub, core, tmp_path, name, text, words):
    assert core().returncode == 0
    (tmp_path / "data/core_bundle/core.yaml").unlink()
    (tmp_path / "data/core_bundle" / BUNDLE).write_bytes(b"x")
    members = (CORE | {name: text}).items()
    hub.files[BUNDLE] = bundle({key: value for key, value in members if value is not None})
    result = core()
    assert result.returncode == 1 and words in result.sentence
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["core_bundle"]
    assert not (tmp_path / "data/core_bundle/core.yaml").exists()       # as it was


def test_core_killed_while_unpacking(hub, core, tmp_path):
    code = ("import download, os, signal, sys\n"
            "download.check_bundle = lambda folder: os.kill(os.getpid(), signal.SIGKILL)\n"
            "download.main(['core', '--out', sys.argv[1]])")
    env = environment(hub.endpoint, tmp_path) | {"CORE_BUNDLE_URL": f"{hub.endpoint}/{BUNDLE}"}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "data")], cwd=SCRIPT.parent, env=env)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "data/.core_bundle.partial/core.yaml").exists()
    assert not (tmp_path / "data/core_bundle").exists()
    (tmp_path / "data/.core_bundle.partial/eval_data/a/stray.jsonl").write_text("{}")
    assert core().returncode == 0
    check_core(hub, tmp_path)


def test_core_bundle_of_somebody_else(hub, core, tmp_path):
    (tmp_path / "data/core_bundle").mkdir(parents=True)
    (tmp_path / "data/core_bundle/core.yaml").write_text("mine")
    result = core()
    assert result.returncode == 2 and "data/core_bundle" in result.sentence and hub.requests == []
    assert (tmp_path / "data/core_bundle/core.yaml").read_text() == "mine"
