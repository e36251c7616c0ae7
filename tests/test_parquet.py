"""data/prepare.py --parquet: what is kept, the same bytes however it was stopped, and refusals."""

import functools
import json
import os
import subprocess
import sys
import tracemalloc
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import prepare
from helpers import ROOT
from test_prepare import ODD, make_texts, prepared, read_documents, run, snapshot, write_jsonl, written

VAL_BYTES = 6000
SHARD_TOKENS = 3000


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
    """Three train files and val's, with repeats, empty documents and train documents that val has too."""
    train, val = texts
    folder = tmp_path_factory.mktemp("parquet") / "shards"
    write_parquet(folder / "s0.parquet", [*train[:90], None, "", train[3], val[1]], compression="zstd")
    write_parquet(folder / "s1.parquet", train[90:91] + train[:90], rows=7, kind=pa.large_string())
    write_parquet(folder / "s2.parquet", [val[0], *train[91:], *train[200:]], rows=1000)
    write_parquet(folder / "s3.parquet", [val[0], None, val[0], *val[1:]])
    return folder


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """(its files, manifest, out) of a preparation that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole")
    files = prepare.find_parquet([folder])
    request = prepare.Request("toy", ["shards"], files[:-1], 512, VAL_BYTES, files[-1:], keeps_order=True)
    manifest = prepare.build(request, out, shard_tokens=SHARD_TOKENS, processes=1)
    return snapshot(out), manifest, out


@pytest.fixture
def command(folder, tmp_path, monkeypatch):
    """The same as words of the command line."""
    monkeypatch.setattr(prepare, "build", functools.partial(prepare.build, shard_tokens=SHARD_TOKENS))
    return ["--name", "toy", "--vocab-size", 512, "--val-bytes", VAL_BYTES, "--processes", 1,
            "--out", tmp_path, "--parquet", folder]


# --- what is kept ----------------------------------------------------------------------------------------

def test_what_is_kept(whole, texts):
    files, manifest, out = whole
    train, val = texts
    n = np.searchsorted(np.cumsum([len(text.encode()) for text in [val[0], *val]]), VAL_BYTES, "right") - 1
    kept = {"train": train, "val": val[:n]}
    assert 3 < n < 50
    for split, documents in kept.items():
        assert read_documents(out, "toy", split) == documents
        assert manifest[f"{split}_docs"] == len(documents)
        assert manifest[f"{split}_bytes"] == sum(len(text.encode()) for text in documents)
        shards = [file for file in manifest["files"] if file["split"] == split]
        assert [file["path"] for file in shards] == [f"toy_{split}_{i:06d}.bin" for i in range(len(shards))]
        for file in shards:
            tokens = np.frombuffer(files[f"datasets/toy/{file['path']}"], "<u2", offset=1024)
            assert tokens[0] == 1 and len(tokens) == file["tokens"] <= SHARD_TOKENS
    assert len(manifest["files"]) > 10 and json.loads(files["datasets/toy/manifest.json"]) == manifest


def test_val_from_elsewhere(folder, texts, tmp_path):
    """--val takes a file, also one among those of --parquet."""
    prepared(tmp_path, "--parquet", folder, "--val", folder / "s0.parquet")
    assert read_documents(tmp_path / "out", "toy", "val") == [*texts[0][:90], texts[1][1]]
    train = read_documents(tmp_path / "out", "toy", "train")
    assert train == [texts[0][90], texts[1][0], *texts[0][91:], *texts[1][2:]]


def test_rows_are_read_in_batches(tmp_path, monkeypatch):
    """One row group of 8 MB is not held as Python strings."""
    path = write_parquet(tmp_path / "a.parquet", ["x" * 1000 + str(i) for i in range(8000)], rows=10_000)
    monkeypatch.setattr(prepare, "PARQUET_ROWS", 10)
    tracemalloc.start()
    count = sum(1 for _ in prepare.documents(prepare.Input(path, "parquet"), Counter()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 8000 and peak < 1_500_000


# --- what disturbs it -------------------------------------------------------------------------------------

def test_several_processes_after_a_run_that_was_killed(whole, command, tmp_path):
    """The same bytes, whatever that one left."""
    written(tmp_path / "datasets/.toy.partial/toy_train_000099.bin", "half")
    run(*command, "--processes", 2)
    assert snapshot(tmp_path) == whole[0]


# --- processes -------------------------------------------------------------------------------------------

def test_workers_end_with_their_parent():
    job = "import time; print('up', flush=True); time.sleep(1e6)"
    code = f"from data import prepare; next(prepare.parallel_map(exec, [({job!r},)] * 9, 2))"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE,
                               text=True)
    assert sorted(process.stdout.read(6)) == sorted("up\n" * 2)     # of both, in any order
    process.kill()
    process.communicate(timeout=300)             # to the end of the pipe that the workers hold open


def test_few_jobs_are_taken_in_advance():
    taken = []
    jobs = (taken.append(i) or (str(i),) for i in range(40))
    results = prepare.parallel_map(prepare.document_hash, jobs, 2)
    assert next(results) == prepare.document_hash("0") and len(taken) == 5
    assert [next(results) for _ in range(20)] == [prepare.document_hash(str(i)) for i in range(1, 21)]
    assert len(taken) == 25
    results.close()
    with pytest.raises(OSError, match="--processes"):
        list(prepare.parallel_map(os._exit, [(1,)], 2))


# --- refusals --------------------------------------------------------------------------------------------

def test_refused_files(tmp_path):
    good = write_parquet(tmp_path / "good.parquet", make_texts(30))
    data = good.read_bytes()
    for name, content in dict(same=data, cut=data[:-100], hole=data[:600] + bytes(2000) + data[2600:],
                              text=b"no parquet", empty=b"").items():
        (tmp_path / f"{name}.parquet").write_bytes(content)
    for name, column, values in [("other", "txt", ["a"]), ("number", "text", [1, 2]),
                                 ("bytes", "text", [b"\xff\xfe"]), ("list", "text", [["a"], ["b"]])]:
        pq.write_table(pa.table({column: values}), tmp_path / f"{name}.parquet")
    (tmp_path / "none").mkdir()
    for words, names in [("no column `text`", ("other", "number", "bytes", "list")),
                         ("damaged", ("cut", "hole", "text", "empty"))]:
        for path in (tmp_path / f"{name}.parquet" for name in names):
            for paths in (path, good), (good, path):
                said, _ = prepared(tmp_path, "--parquet", *paths, expect=2)
                assert words in said and path.name in said
    for words, *paths in [("nowhere", good, tmp_path / "nowhere"), ("no parquet file", tmp_path / "none"),
                          ("for train", good), ("for train", good, tmp_path / "same.parquet")]:
        assert words in prepared(tmp_path, "--parquet", *paths, expect=2)[0]
    assert not snapshot(tmp_path / "out")


def test_refused_requests(folder, command, tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", make_texts(9))
    for words, *options in [("too little", "--val-bytes", 3), ("largest possible", "--vocab-size", 60000)]:
        assert words in run(*command, *options, expect=2)
    assert "--parquet only" in run("--text", path, "--val", path, "--val-bytes", 9, "--name", "toy", expect=2)
