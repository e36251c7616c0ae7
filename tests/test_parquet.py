"""data/prepare.py --parquet: what is kept, the same bytes however it was stopped, and refusals."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import prepare
import pytest
import sentencepiece as spm

from helpers import ROOT
from test_prepare import ODD, make_texts, read_documents, run, snapshot, write_jsonl

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

VAL_BYTES, SHARD_TOKENS = 6000, 3000


def write_parquet(path, texts, rows=16, kind=pa.string(), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": range(len(texts)), "text": pa.array(texts, kind), "url": ["u"] * len(texts)})
    pq.write_table(table, path, row_group_size=rows, **options)
    return path


@pytest.fixture(scope="module")
def texts():
    """(train documents as they are kept, the documents of val's file)"""
    return [*make_texts(240, seed=3), *filter(None, ODD)], make_texts(60, seed=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, texts):
    """Three train files and val's, with repeats, empty documents and what val holds too."""
    train, val = texts
    folder = tmp_path_factory.mktemp("parquet") / "shards"
    write_parquet(folder / "s0.parquet", [*train[:90], None, "", train[3], val[1]], compression="zstd")
    write_parquet(folder / "s1.parquet", train[90:91] + train[:90], rows=7, kind=pa.large_string())
    write_parquet(folder / "s2.parquet", [val[0], *train[91:], *train[200:]], rows=1000)
    write_parquet(folder / "s3.parquet", [val[0], None, val[0], *val[1:]])
    return folder


def request(folder, vocab_size=512, val_bytes=VAL_BYTES):
    files = prepare.find_parquet([folder])
    return prepare.Request("toy", ["shards"], files[:-1], vocab_size, val_bytes, files[-1:])


def build(folder, out, **options):
    options = {"shard_tokens": SHARD_TOKENS, "processes": 1} | options
    return prepare.build_parquet(request(folder), out, **options)


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """(out, manifest) of a preparation that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole")
    return out, build(folder, out)


def test_what_is_kept(whole, folder, texts, tmp_path, capsys):
    out, manifest = whole
    train, val = texts
    sizes = np.cumsum([len(text.encode()) for text in [val[0], *val]])
    val = val[:np.searchsorted(sizes, VAL_BYTES, "right") - 1]
    assert 3 < len(val) < 50 and read_documents(out, "toy", "val") == val
    assert read_documents(out, "toy", "train") == train
    assert (manifest["train_docs"], manifest["val_docs"]) == (len(train), len(val))
    assert manifest["val_bytes"] == sum(len(text.encode()) for text in val) <= VAL_BYTES
    assert manifest["train_bytes"] == sum(len(text.encode()) for text in train)
    assert manifest == json.loads((out / "datasets" / "toy" / "manifest.json").read_text())
    shards = [file for file in manifest["files"] if file["split"] == "train"]
    assert len(shards) > 10 and all(file["tokens"] <= SHARD_TOKENS for file in shards)
    assert sorted(path.name for path in (out / "datasets").rglob("*")) == sorted(
        ["toy", "manifest.json", "document_hashes.bin", *(file["path"] for file in manifest["files"])])

    # the same text and split by --text: the same tokenizer, fingerprint and side file
    paths = [write_jsonl(tmp_path / "t.jsonl", train)], write_jsonl(tmp_path / "v.jsonl", val)
    other = prepare.Request("toy", ["shards"], prepare.find_files(paths[0]), 512, 1,
                            prepare.find_files(paths[1:]))
    other = prepare.build(other, tmp_path / "out")
    assert {key for key in manifest if manifest[key] != other[key]} == {"files"}
    side = "datasets/toy/document_hashes.bin"
    assert (out / side).read_bytes() == (tmp_path / "out" / side).read_bytes()


def test_tokens_are_those_of_encode(whole, texts):
    sp = spm.SentencePieceProcessor(model_file=str(whole[0] / "tokenizers" / "toy.model"))
    encoder = prepare.WordEncoder(sp)
    for text in [*texts[0], *ODD, "".join(ODD), *texts[1]]:
        for _ in range(2):                       # from SentencePiece, then from memory
            tokens = encoder.document(text, True)
            assert tokens.dtype == "<u2" and tokens.tolist() == [1, *prepare.encode(sp, text)]
    assert len(encoder) > 100 and all(len(word) < 40 for word in encoder)


def test_a_tokenizer_whose_pieces_join_words(monkeypatch):
    class Joined:
        def vocab_size(self):
            return 1

        def id_to_piece(self, i):
            return "of\u2581the"

        def encode(self, text):
            return [len(text)]

    assert prepare.WordEncoder(Joined()).document("out of\nthe way", False).tolist() == [1, 14]


def test_the_number_of_processes_does_not_matter(whole, folder, tmp_path):
    command = ["--parquet", folder, "--name", "toy", "--vocab-size", 512, "--val-bytes", VAL_BYTES]
    said = run(*command, "--processes", 3, "--out", tmp_path / "three")
    manifest = build(folder, tmp_path / "one", shard_tokens=prepare.SHARD_TOKENS)
    assert snapshot(tmp_path / "three") == snapshot(tmp_path / "one")
    assert len(manifest["files"]) == 2
    assert f"{manifest['train_docs'] + manifest['val_docs']} documents, " in said
    assert read_documents(tmp_path / "one", "toy", "train") == read_documents(whole[0], "toy", "train")


def test_a_second_run(whole, folder, tmp_path, capsys):
    build(folder, tmp_path)
    capsys.readouterr()
    (tmp_path / "datasets" / "toy" / "progress.json").touch()          # killed at the very end
    assert build(folder, tmp_path) is None and "already" in capsys.readouterr().out
    other = request(folder, vocab_size=400)
    with pytest.raises(prepare.DataError, match="--force"):
        prepare.build_parquet(other, tmp_path, processes=1)
    assert snapshot(tmp_path) == snapshot(whole[0])
    assert prepare.build_parquet(other, tmp_path, force=True, processes=1)["tokenizer"]["vocab_size"] == 400
    next((tmp_path / "datasets" / "toy").glob("*train*")).unlink()
    assert prepare.build_parquet(other, tmp_path, processes=1)


def test_val_from_elsewhere(folder, texts, tmp_path):
    """--val takes a file, also one among those of --parquet."""
    assert prepare.main(["--parquet", str(folder), "--val", str(folder / "s0.parquet"), "--name", "toy",
                         "--vocab-size", "400", "--processes", "1", "--out", str(tmp_path)]) == 0
    assert read_documents(tmp_path, "toy", "val") == [*texts[0][:90], texts[1][1]]
    train = read_documents(tmp_path, "toy", "train")
    assert train == [texts[0][90], texts[1][0], *texts[0][91:], *texts[1][2:]]


KILLED = """
import os, signal, prepare
calls, name = [], {name!r}
module, name = (os, name[3:]) if name.startswith("os.") else (prepare, name)
original = getattr(module, name)

def killing(*args, **kwargs):
    calls.append(1)
    if len(calls) == {number}:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)

if __name__ == "__main__":
    setattr(module, name, killing)
    files = prepare.find_parquet([{folder!r}])
    request = prepare.Request("toy", ["shards"], files[:-1], 512, {val_bytes}, files[-1:])
    prepare.build_parquet(request, {out!r}, shard_tokens={shard_tokens}, processes={processes})
"""


# The replaces are: one for each state of progress, then the tokenizer's, then the folder's.
@pytest.mark.parametrize("name, number, kept, processes", [
    ("train_tokenizer", 1, 0, 1), ("write_progress", 1, 0, 1), ("write_progress", 2, 0, 1),
    ("file_sha256", 5, 4, 1), ("write_progress", 9, 7, 2), ("write_manifest", 1, "all", 1),
    ("install", 1, "all", 1), ("os.replace", -1, "all", 1), ("os.replace", 0, "all", 1)])
def test_killed_and_run_again(whole, folder, tmp_path, capsys, name, number, kept, processes):
    shards = len(whole[1]["files"])
    number = number if number > 0 else shards + 3 + number
    code = KILLED.format(name=name, number=number, folder=str(folder), out=str(tmp_path),
                         val_bytes=VAL_BYTES, shard_tokens=SHARD_TOKENS, processes=processes)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "data", capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "datasets" / "toy").exists()
    capsys.readouterr()
    build(folder, tmp_path)
    said = capsys.readouterr().out
    assert (f"kept: {shards if kept == 'all' else kept}\n" in said) == (kept != 0), said
    assert snapshot(tmp_path) == snapshot(whole[0])


def test_workers_end_with_their_parent(tmp_path):
    code = ("import prepare, os, time\n"
            "if __name__ == '__main__':\n"
            "    for pid in prepare.spread(prepare.os.getpid, [()] * 9, 2):\n"
            "        print(pid, flush=True)\n"
            "    jobs = prepare.spread(prepare.time.sleep, [(60,)] * 9, 2)\n"
            "    next(jobs)\n")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT / "data", stdout=subprocess.PIPE,
                               text=True)
    children = {int(process.stdout.readline()) for _ in range(9)}
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 20
    while any(map(is_running, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert children and not any(map(is_running, children))


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = ROOT.__class__("/proc", str(pid), "stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


class FullDisk:
    """In place of `open` in prepare: shards take so many bytes altogether, and then there is no room."""

    def __init__(self, room):
        self.room = room

    def __call__(self, path, mode="r", **options):
        file = open(path, mode, **options)
        if mode == "wb" and str(path).endswith(".bin"):
            write = file.write
            file = Wrapped(file, lambda data: (self.take(len(data)), write(data)))
        return file

    def take(self, size):
        self.room -= size
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")


class Wrapped:
    def __init__(self, file, write):
        self.file, self.write = file, write

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 9_000, 41_000])
def test_disk_full_and_run_again(whole, folder, tmp_path, monkeypatch, capsys, room):
    monkeypatch.setattr(prepare, "open", FullDisk(room), raising=False)
    words = ["--parquet", str(folder), "--name", "toy", "--vocab-size", "512", "--val-bytes", str(VAL_BYTES),
             "--processes", "1", "--out", str(tmp_path)]
    original = prepare.build_parquet
    monkeypatch.setattr(prepare, "build_parquet", lambda *args, **options: original(
        *args, **options, shard_tokens=SHARD_TOKENS))
    assert prepare.main(words) == 1
    sentence = capsys.readouterr().err.strip()
    assert "disk is full" in sentence and "same command continues" in sentence and "\n" not in sentence
    assert not (tmp_path / "datasets" / "toy").exists()
    partial = tmp_path / "datasets" / ".toy.partial"
    listed = json.loads((partial / "progress.json").read_text())["shards"]
    assert len(listed) == {0: 0, 9_000: 1, 41_000: 6}[room]
    before = {entry["path"]: (partial / entry["path"]).stat().st_mtime_ns for entry in listed}
    monkeypatch.delattr(prepare, "open")
    assert prepare.main(words) == 0
    assert snapshot(tmp_path) == snapshot(whole[0])
    dataset = tmp_path / "datasets" / "toy"
    assert before == {name: (dataset / name).stat().st_mtime_ns for name in before}


def stopped(folder, out, monkeypatch):
    """A preparation that stopped after six shards -> its folder."""
    monkeypatch.setattr(prepare, "open", FullDisk(41_000), raising=False)
    with pytest.raises(prepare.Stopped):
        build(folder, out)
    monkeypatch.delattr(prepare, "open")
    return out / "datasets" / ".toy.partial"


@pytest.mark.parametrize("name, kept", [
    ("toy_train_000002.bin", 3), ("toy_val_000000.bin", 0), ("tokenizer.model", 0), ("progress.json", 0)])
@pytest.mark.parametrize("damage", ["flip", "cut", "lost"])
def test_nothing_damaged_is_kept(whole, folder, tmp_path, monkeypatch, capsys, name, kept, damage):
    path = stopped(folder, tmp_path, monkeypatch) / name
    data = path.read_bytes()
    path.write_bytes({"flip": data[:-1] + bytes([data[-1] ^ 1]), "cut": data[:-2], "lost": b""}[damage])
    if damage == "lost":
        path.unlink()
    capsys.readouterr()
    build(folder, tmp_path)
    assert (f"kept: {kept}\n" in capsys.readouterr().out) == (kept != 0)
    assert snapshot(tmp_path) == snapshot(whole[0])


def test_other_text_starts_again(folder, texts, tmp_path, monkeypatch, capsys):
    stopped(folder, tmp_path / "a", monkeypatch)
    other = tmp_path / "other"
    for path in folder.iterdir():
        other.mkdir(exist_ok=True)
        (other / path.name).write_bytes(path.read_bytes())
    write_parquet(other / "s1.parquet", make_texts(20, seed=8))
    build(other, tmp_path / "a")
    build(other, tmp_path / "b")
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")


def test_input_that_changes_between_passes(folder, tmp_path, monkeypatch):
    changing = tmp_path / "shards"
    for name in ("s0", "s3"):
        write_parquet(changing / f"{name}.parquet", make_texts(20, seed=len(name + name[1:]) + int(name[1])))
    original = prepare.train_tokenizer

    def rewrite(*args):
        write_parquet(changing / "s0.parquet", make_texts(20, seed=99))
        return original(*args)
    monkeypatch.setattr(prepare, "train_tokenizer", rewrite)
    with pytest.raises(prepare.DataError, match="the input changed"):
        build(changing, tmp_path / "out")
    assert not (tmp_path / "out" / "datasets" / "toy").exists()


def test_documents_longer_than_a_shard(tmp_path, monkeypatch):
    """Stopped at every shard, among them those that end inside a document."""
    texts = [text * 3 for text in make_texts(40, seed=5)]
    for i in range(2):
        write_parquet(tmp_path / "in" / f"s{i}.parquet", texts[i * 30:][:30])
    build(tmp_path / "in", tmp_path / "whole", shard_tokens=400)
    original, left = prepare.write_progress, [0]

    def stopping(*args):
        original(*args)
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(prepare, "write_progress", stopping)
    for number in (4, 5, 6, 7, 0):
        left[0] = number
        if number:
            with pytest.raises(prepare.Stopped):
                build(tmp_path / "in", tmp_path / "out", shard_tokens=400)
    left[0] = -1
    build(tmp_path / "in", tmp_path / "out", shard_tokens=400)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


def test_other_ways_to_stop(folder, tmp_path, monkeypatch, capsys):
    words = ["--parquet", str(folder), "--name", "toy", "--vocab-size", "512", "--out", str(tmp_path)]
    for error, said in (KeyboardInterrupt(), "interrupted"), (BrokenProcessPool(), "lack of memory"):
        def fail(*args):
            raise error
        monkeypatch.setattr(prepare, "spread", fail)
        assert prepare.main(words) == 1
        sentence = capsys.readouterr().err.strip()
        assert said in sentence and "same command continues" in sentence and "\n" not in sentence


def test_two_at_once(folder, tmp_path):
    partial = tmp_path / "datasets" / ".toy.partial"
    partial.mkdir(parents=True)
    with prepare.only_one(partial), pytest.raises(prepare.DataError, match="another process"):
        build(folder, tmp_path)
    assert build(folder, tmp_path)


def test_few_jobs_are_taken_in_advance():
    taken = []
    jobs = (taken.append(i) or (str(i),) for i in range(40))
    results = prepare.spread(prepare.document_hash, jobs, 2)
    assert next(results) == prepare.document_hash("0") and len(taken) == 5
    assert [next(results) for _ in range(20)] == [prepare.document_hash(str(i)) for i in range(1, 21)]
    assert len(taken) == 25
    results.close()
    with pytest.raises(BrokenProcessPool):
        list(prepare.spread(os._exit, [(1,)], 2))


def test_rows_are_read_in_batches(tmp_path, monkeypatch):
    """One row group of 8 MB is not held as Python strings."""
    path = write_parquet(tmp_path / "a.parquet", ["x" * 1000 + str(i) for i in range(8000)], rows=10_000)
    monkeypatch.setattr(prepare, "PARQUET_ROWS", 10)
    import tracemalloc
    tracemalloc.start()
    count = sum(1 for _ in prepare.documents([(path, "parquet")], prepare.Counter()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 8000 and peak < 1_500_000


@pytest.fixture
def refused(tmp_path, capsys):
    """refused(sentence's words, *arguments): exit 2, one sentence, nothing written."""
    def refused(words, *arguments):
        command = ["--processes", 1, "--out", tmp_path / "out", *arguments]
        assert prepare.main(list(map(str, command))) == 2
        sentence = capsys.readouterr().err.strip()
        assert all(word in sentence for word in words) and "\n" not in sentence, sentence
        assert not snapshot(tmp_path / "out")
    return refused


def test_refused_files(tmp_path, refused):
    good = write_parquet(tmp_path / "good.parquet", make_texts(30))
    pq.write_table(pa.table({"txt": ["a"]}), tmp_path / "other.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "number.parquet")
    pq.write_table(pa.table({"text": [b"\xff\xfe"]}), tmp_path / "bytes.parquet")
    pq.write_table(pa.table({"text": [["a"], ["b"]]}), tmp_path / "list.parquet")
    data = good.read_bytes()
    (tmp_path / "same.parquet").write_bytes(data)
    (tmp_path / "cut.parquet").write_bytes(data[:-100])
    (tmp_path / "hole.parquet").write_bytes(data[:600] + bytes(2000) + data[2600:])
    (tmp_path / "text.parquet").write_text("no parquet")
    (tmp_path / "empty.parquet").write_bytes(b"")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "a.txt").write_text("x")
    cases = [(name, ["has no column `text`"]) for name in ("other", "number", "bytes", "list")]
    cases += [(name, ["damaged"]) for name in ("cut", "hole", "text", "empty")]
    for name, words in cases:
        for paths in ([f"{name}.parquet", "good.parquet"], ["good.parquet", f"{name}.parquet"]):
            refused([f"{name}.parquet", *words], "--name", "toy", "--parquet",
                    *(tmp_path / path for path in paths))
    command = "--name", "toy", "--vocab-size", "400", "--parquet", good
    refused(["nowhere", "no such file"], *command, tmp_path / "nowhere")
    refused(["none", "no *.parquet"], *command, tmp_path / "none")
    refused(["none for train"], *command)
    refused(["no document for train"], *command, tmp_path / "same.parquet")
    run(*command[:-1], tmp_path / "cut.parquet", good, "--processes", 2, "--out", tmp_path, expect=2)


def test_refused_requests(folder, tmp_path, refused):
    command = "--parquet", folder
    refused(["--name"], *command)
    refused(["--val-bytes 3 is too little"], *command, "--name", "toy", "--val-bytes", 3)
    refused(["largest possible"], *command, "--name", "toy", "--vocab-size", 60000)
    refused(["negative"], *command, "--name", "toy", "--processes", -1)
    path = write_jsonl(tmp_path / "t.jsonl", make_texts(9))
    refused(["--parquet only"], "--text", path, "--val", path, "--val-bytes", 9, "--name", "toy")
    assert not list((tmp_path / "out").rglob(".*"))


def test_without_pyarrow(folder, tmp_path, monkeypatch, capsys):
    code = "import sys; sys.modules['pyarrow'] = None; import prepare; print('pyarrow.lib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "data", capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert prepare.main(["--parquet", str(folder), "--name", "toy", "--out", str(tmp_path)]) == 2
    assert "package pyarrow is missing" in capsys.readouterr().err
