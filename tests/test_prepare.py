"""data/prepare.py: documents, split, tokenizer, shards, manifest and refusals, on small made-up corpora."""

import gzip
import hashlib
import json
import lzma
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import prepare
import pytest
import sentencepiece as spm

SCRIPT = Path(prepare.__file__).resolve()

ODD = ["", " ", "  a  b ", "\n", "\r\n\r\nx\r\n", "\ttab\t\t", "nul\0nul", "\ufffd",
       "\u2581", "a\u2581b\u2581\u2581 c", "<s>", "</s><unk>", "<0x0A><0xE2>",
       "\U0001F600\u200d\U0001F680", "e\u0301\u0323", "\ue000\uf8ff\U00100000", "\ufeffbom",
       "\u2585 \u2047 \u3000\u00a0", "\u2028\x0b\x0c\x85", "\ufffe\uffff", "x" * 5000, " " * 999]
ALPHABETS = [" \n\t\r", "ab \u2581", "<s>0xA/ ", "\0\x01\x7f\x80", "\u00e9e\u0301\u0327",
             "\U0001F468\u200d\u2764\ufe0f", "\ud7ff\ue000\uffff\U0010ffff", "\ufffd\u2581\ue2e2",
             "def x(self):\n    "]


def make_texts(number, seed=0):
    rng = random.Random(seed)
    words = ["def", "return", "value", "the", "of", "self.x", "=", "()", "import", "naïve", "日本", "\u2581"]
    words += ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(400)]
    lines = [[" ".join(rng.choices(words, k=rng.randint(3, 12))) for _ in range(rng.randint(2, 30))]
             for _ in range(number)]
    return ["\n    ".join(text) for text in lines]


def write_jsonl(path, texts, opener=open):
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text, "id": 1}) + "\n" for text in texts)
    return path


def run(*args, expect=0):
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == expect, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if expect:
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stdout + done.stderr


def build(out, paths, name="toy", val=None, shard_tokens=prepare.SHARD_TOKENS, **options):
    request = prepare.Request(name, sorted(Path(path).name for path in paths), prepare.find_files(paths),
                              **{"vocab_size": 512, **options}, val_files=val and prepare.find_files([val]))
    return prepare.build(request, out, shard_tokens=shard_tokens)


def snapshot(root):
    files = (path for path in Path(root).rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def read_documents(out, name, split):
    """Texts of a split, decoded from its shards."""
    folder = out / "datasets" / name
    manifest = json.loads((folder / "manifest.json").read_text())
    sp = spm.SentencePieceProcessor(model_file=str(folder / manifest["tokenizer"]["path"]))
    shards = [np.fromfile(folder / file["path"], "<u2", offset=1024) for file in manifest["files"]
              if file["split"] == split]
    tokens = np.concatenate(shards)
    starts = np.flatnonzero(tokens == 1)
    assert starts[0] == 0
    return [sp.decode(part[1:].tolist()) for part in np.split(tokens, starts[1:])]


@pytest.fixture(scope="module")
def texts():
    return make_texts(300)


@pytest.fixture(scope="module")
def toy(tmp_path_factory, texts):
    """(out, manifest, texts) of a dataset built from jsonl with duplicates and an empty document."""
    root = tmp_path_factory.mktemp("toy")
    path = write_jsonl(root / "toy.jsonl", texts + texts[:5] + [""])
    return root / "out", build(root / "out", [path], val_bytes=5000), texts


@pytest.fixture(scope="module")
def sp(toy):
    return spm.SentencePieceProcessor(model_file=str(toy[0] / "tokenizers" / "toy.model"))


def test_encode_is_lossless(sp):
    rng = random.Random(1)
    samples = ODD + ["".join(ODD)]
    for _ in range(2000):
        samples.append("".join(rng.choices("".join(rng.sample(ALPHABETS, 2)), k=rng.randint(1, 60))))
        codes = (rng.randrange(0x110000) for _ in range(20))
        samples.append("".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000))
    for text in samples:
        ids = prepare.encode(sp, text)
        assert sp.decode(ids) == text
        assert isinstance(ids, list) and not {0, 1, 2} & set(ids)


def test_reserved_strings_in_training_text():
    texts = ["<0x0A><s> </s>\n<unk> \u2585\0\u2581 x\n" * 20] * 20 + make_texts(50)
    sp = spm.SentencePieceProcessor(model_proto=prepare.train_tokenizer(texts, 400))
    for text in ODD + texts[:1]:
        assert sp.decode(prepare.encode(sp, text)) == text
    assert not {0, 1, 2} & set(prepare.encode(sp, texts[0]))


def test_tokenizer_model(sp):
    assert (sp.vocab_size(), sp.unk_id(), sp.bos_id(), sp.eos_id(), sp.pad_id()) == (512, 0, 1, 2, -1)
    assert sum(sp.is_byte(i) for i in range(512)) == 256
    assert any("\n" in sp.id_to_piece(i) for i in range(512))


def test_more_characters_than_vocabulary():
    rng = random.Random(0)
    words = ["".join(chr(0x4E00 + rng.randrange(99)) for _ in range(4)) for _ in range(300)]
    rare = [chr(0x5000 + i) for i in range(3000)]
    texts = ["".join(rng.choices(words, k=300) + rng.sample(rare, 300)) for _ in range(50)]
    sp = spm.SentencePieceProcessor(model_proto=prepare.train_tokenizer(texts, 400))
    assert max(len(sp.id_to_piece(i)) for i in range(259, 400)) > 1
    assert sp.decode(prepare.encode(sp, texts[0])) == texts[0]


def test_split_and_manifest(toy):
    out, manifest, texts = toy
    folder = out / "datasets" / "toy"
    assert manifest == json.loads((folder / "manifest.json").read_text())
    assert list(manifest) == ["version", "name", "source", "tokenizer", "files", "train_bytes", "val_bytes",
                              "train_docs", "val_docs", "text_fingerprint", "document_hashes"]
    assert manifest["source"] == ["toy.jsonl"] and str(out) not in json.dumps(manifest)

    by_hash = sorted(texts, key=prepare.document_hash)
    val, size = [], 0
    while size < 5000:
        val.append(by_hash[len(val)])
        size += len(val[-1].encode())
    assert read_documents(out, "toy", "val") == val
    assert read_documents(out, "toy", "train") == by_hash[len(val):]
    assert manifest["val_bytes"] == size and manifest["val_docs"] == len(val)
    assert manifest["train_bytes"] == sum(len(text.encode()) for text in by_hash[len(val):])
    assert manifest["train_docs"] == 300 - len(val)

    assert manifest["tokenizer"] == {
        "path": "../../tokenizers/toy.model", "vocab_size": 512, "bos_id": 1, "lossless": True,
        "sha256": hashlib.sha256((out / "tokenizers" / "toy.model").read_bytes()).hexdigest()}
    for file in manifest["files"]:
        data = (folder / file["path"]).read_bytes()
        header = np.frombuffer(data[:1024], "<i4")
        assert header[:3].tolist() == [20240520, 1, file["tokens"]] and not header[3:].any()
        assert len(data) == 1024 + 2 * file["tokens"]
        assert hashlib.sha256(data).hexdigest() == file["sha256"]
    assert [(file["path"], file["split"]) for file in manifest["files"]] == [
        ("toy_val_000000.bin", "val"), ("toy_train_000000.bin", "train")]

    side = np.fromfile(folder / "document_hashes.bin", "<u8")
    parts = side[:len(val)], side[len(val):]
    assert manifest["document_hashes"] == {"path": "document_hashes.bin", "val": len(val),
                                           "train": 300 - len(val)}
    assert parts[0].tolist() == [prepare.document_hash(text) for text in val]
    assert all((np.diff(part) > 0).all() for part in parts)
    recomputed = hashlib.sha256(b"val" + parts[0].tobytes() + b"train" + parts[1].tobytes()).hexdigest()
    assert manifest["text_fingerprint"] == recomputed
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["manifest.json", "document_hashes.bin"] + [file["path"] for file in manifest["files"]])


def test_document_hash():
    expected = hashlib.blake2b("é".encode(), digest_size=8).digest()
    assert prepare.document_hash("é").to_bytes(8, "little") == expected


def test_same_bytes_whatever_the_order(tmp_path, toy):
    out, _, texts = toy
    (tmp_path / "b").mkdir()
    shuffled = random.Random(2).sample(texts, len(texts))
    path = write_jsonl(tmp_path / "b" / "toy.jsonl", shuffled + shuffled[:9])
    run("--text", path, "--name", "toy", "--vocab-size", 512, "--val-bytes", 5000, "--out", tmp_path / "out")
    assert snapshot(tmp_path / "out") == snapshot(out)


def test_another_vocabulary_is_the_same_text(tmp_path, toy):
    path = write_jsonl(tmp_path / "toy.jsonl", toy[2])
    other = build(tmp_path / "out", [path], vocab_size=400, val_bytes=5000)
    assert other["text_fingerprint"] == toy[1]["text_fingerprint"]
    assert other["files"] != toy[1]["files"]


def test_val_path(tmp_path, texts):
    val = write_jsonl(tmp_path / "held.jsonl", texts[:20] + make_texts(5, seed=9))
    manifest = build(tmp_path / "out", [write_jsonl(tmp_path / "t.jsonl", texts)], val=val)
    assert set(read_documents(tmp_path / "out", "toy", "val")) == set(texts[:20] + make_texts(5, seed=9))
    assert set(read_documents(tmp_path / "out", "toy", "train")) == set(texts[20:])
    assert (manifest["val_docs"], manifest["train_docs"]) == (25, 280)


def test_val_is_at_most_a_tenth(tmp_path, texts, capsys):
    manifest = build(tmp_path / "out", [write_jsonl(tmp_path / "t.jsonl", texts)])
    assert "val is cut" in capsys.readouterr().out
    longest = max(len(text.encode()) for text in texts)
    assert manifest["val_bytes"] < (manifest["val_bytes"] + manifest["train_bytes"]) / 10 + longest


@pytest.mark.parametrize("suffix, opener", [("", open), (".gz", gzip.open), (".xz", lzma.open)])
def test_jsonl_compressions(tmp_path, suffix, opener):
    path = write_jsonl(tmp_path / f"t.jsonl{suffix}", make_texts(3) + ["\ud800x\udfff", "\U0001F600"], opener)
    counts = Counter()
    assert list(prepare.documents(prepare.find_files([path]), counts)) == (
        make_texts(3) + ["\ufffdx\ufffd", "\U0001F600"])
    assert counts["surrogates"] == 2


def test_text_file_is_cut_at_blank_lines(tmp_path):
    path = tmp_path / "t.txt"
    paragraphs = ["".join(f"line {i} {j} é\r\n" for j in range(40)) for i in range(3000)]
    path.write_bytes("\r\n".join(paragraphs).encode())
    pieces = list(prepare.documents([(path, "text")], Counter()))
    assert "".join(pieces).encode() == path.read_bytes() and len(pieces) > 50
    assert all(piece.endswith("\r\n\r\n") and 16384 <= len(piece.encode()) < 18000 for piece in pieces[:-1])
    for content in ("line\n" * 20000, "日本" * 30000, "x" * 100_000):
        path.write_text(content)
        pieces = list(prepare.documents([(path, "text")], Counter()))
        assert "".join(pieces) == content and max(len(piece.encode()) for piece in pieces) <= 32768


def test_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_text("x = 1\n")
    (tmp_path / "b.md").write_bytes("é\r\n".encode())
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\0")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "whole.txt").write_text("line\n\n" * 100_000)
    (tmp_path / "long.txt").write_text("line\n\n" * 200_000)
    counts = Counter()
    found = list(prepare.documents(prepare.find_files([tmp_path]), counts))
    assert {"x = 1\n", "é\r\n", "line\n\n" * 100_000} <= set(found) and counts["binary"] == 1
    assert len(found) == 3 + 19 and sum(map(len, found)) == 6 * 300_000 + 6 + 3


def test_shards_are_capped_and_begin_with_bos(tmp_path, toy, texts):
    write_jsonl(tmp_path / "toy.jsonl", texts)
    manifest = build(tmp_path / "out", [tmp_path / "toy.jsonl"], val_bytes=5000, shard_tokens=3000)
    train = [file for file in manifest["files"] if file["split"] == "train"]
    assert len(train) > 5 and all(0 < file["tokens"] <= 3000 for file in manifest["files"])
    assert [file["path"] for file in train] == [f"toy_train_{i:06d}.bin" for i in range(len(train))]
    for file in train:
        assert np.fromfile(tmp_path / "out" / "datasets" / "toy" / file["path"], "<u2", offset=1024)[0] == 1
    assert read_documents(tmp_path / "out", "toy", "train") == read_documents(toy[0], "toy", "train")


def test_document_longer_than_a_shard(tmp_path):
    arrays = [np.arange(n, dtype=np.uint16) for n in (3, 10, 3, 4, 1, 4)]
    entries = prepare.write_shards(tmp_path, "n", "train", arrays, shard_tokens=4)
    assert [file["tokens"] for file in entries] == [3, 4, 4, 2, 3, 4, 1, 4]
    joined = np.concatenate([np.fromfile(tmp_path / file["path"], "<u2", offset=1024) for file in entries])
    assert (joined == np.concatenate(arrays)).all()


REFUSED = {
    "missing path": ("nowhere.txt", None, "nowhere.txt"),
    "not json": ("a.jsonl", b'{"text": "x"}\n{"text": \n', "line 2"),
    "no text": ("a.jsonl", b'{"text": "x"}\n\n{"txt": "x"}\n', "line 3"),
    "text is a number": ("a.jsonl", b'{"text": 1}\n', "line 1"),
    "a list": ("a.jsonl", b'["text"]\n', "line 1"),
    "jsonl not utf-8": ("a.jsonl", b'{"text": "\xff"}\n', "line 1"),
    "deep": ("a.jsonl", b"[" * 100_000, "line 1"),
    "empty file": ("a.txt", b"", "no text"),
    "empty documents": ("a.jsonl", b'{"text": ""}\n', "no text"),
    "zstd": ("a.jsonl.zst", b"x", "unknown compression .zst"),
    "gzipped text": ("a.txt.gz", b"x", "unknown compression .gz"),
    "not gzip": ("a.jsonl.gz", b"plain", "a.jsonl.gz"),
    "cut xz": ("a.jsonl.xz", lzma.compress(b'{"text": "abc"}\n' * 99)[:-30], "a.jsonl.xz"),
    "not utf-8": ("a.txt", b"one\ntwo \xff\n", "line 2"),
    "one document": ("a.txt", b"alone", "nothing for train"),
    "same document": ("a.jsonl", b'{"text": "x"}\n' * 5, "nothing for train"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_input(tmp_path, case):
    name, content, message = REFUSED[case]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert message in run("--text", tmp_path / name, "--name", "toy", "--out", tmp_path / "out", expect=2)
    assert not snapshot(tmp_path / "out")


def test_refused_requests(tmp_path, texts):
    path = write_jsonl(tmp_path / "t.jsonl", texts)
    common = "--text", path, "--out", tmp_path / "out", "--name"
    assert "65536" in run(*common, "toy", "--vocab-size", 65537, expect=2)
    assert "smallest" in run(*common, "toy", "--vocab-size", 100, expect=2)
    assert "--name" in run(*common, "../toy", expect=2)
    assert "--name" in run("--text", path, expect=2)
    assert "--val-bytes" in run(*common, "toy", "--val-bytes", 0, expect=2)
    assert "nothing for train" in run(*common, "toy", "--val", path, expect=2)
    said = run(*common, "toy", "--vocab-size", 60000, expect=2)
    largest = int(said.split()[-1])
    assert not snapshot(tmp_path / "out")
    run(*common, "toy", "--vocab-size", largest)


def test_second_run(tmp_path, texts):
    path = write_jsonl(tmp_path / "t.jsonl", texts)
    command = ["--text", path, "--name", "toy", "--vocab-size", 400, "--out", tmp_path / "out"]
    run(*command)
    manifest = tmp_path / "out" / "datasets" / "toy" / "manifest.json"
    before, written = snapshot(tmp_path / "out"), manifest.stat().st_mtime_ns
    assert "already" in run(*command) and manifest.stat().st_mtime_ns == written
    assert "--force" in run(*command, "--vocab-size", 401, expect=2)
    write_jsonl(path, texts + ["more"])
    assert "--force" in run(*command, expect=2)
    assert snapshot(tmp_path / "out") == before
    run(*command, "--vocab-size", 401, "--force")
    assert json.loads(manifest.read_text())["tokenizer"]["vocab_size"] == 401
    (tmp_path / "out" / "tokenizers" / "toy.model").unlink()
    run(*command, "--vocab-size", 401)
    assert len(read_documents(tmp_path / "out", "toy", "train")) > 200


@pytest.mark.parametrize("stage", ["train_tokenizer", "encode_corpus", "write_shards", "text_fingerprint"])
@pytest.mark.parametrize("error, said", [(OSError(28, "No space left"), "disk is full"),
                                         (KeyboardInterrupt(), "interrupted")])
def test_failure_leaves_nothing(tmp_path, texts, monkeypatch, capsys, stage, error, said):
    path = write_jsonl(tmp_path / "t.jsonl", texts)

    def fail(*args, **kwargs):
        raise error
    monkeypatch.setattr(prepare, stage, fail)
    command = ["--text", str(path), "--name", "toy", "--vocab-size", "400", "--out", str(tmp_path / "out")]
    assert prepare.main(command) == 1
    assert said in capsys.readouterr().err
    assert not snapshot(tmp_path / "out")


def test_killed_run_leaves_no_dataset(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", make_texts(6000))
    command = ["--text", str(path), "--name", "toy", "--vocab-size", "400", "--out", str(tmp_path / "out")]
    process = subprocess.Popen([sys.executable, str(SCRIPT), *command], stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    partial = tmp_path / "out" / "datasets" / ".toy.partial"
    while not (partial / "tokenizer.model").exists() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert partial.exists() and not (partial / "manifest.json").exists()
    assert not (tmp_path / "out" / "datasets" / "toy").exists()
    assert not list((tmp_path / "out" / "tokenizers").glob("*"))
    run(*command)
    assert not partial.exists() and (tmp_path / "out" / "datasets" / "toy" / "manifest.json").exists()


def test_import_has_no_side_effects(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); sys.argv += ['--bogus']; import prepare"
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr, list(tmp_path.iterdir())) == (0, "", "", [])


# --- embedded corpus -----------------------------------------------------------------------------------

@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """A distribution `madeup` 1.5 whose RECORD lists some of the files that lie in its folder."""
    licence = "# Copyright 2001 Somebody\n#\n# Redistribution is permitted.\n\n"
    content = {
        "madeup/__init__.py": "patched", "madeup/a.py": licence + "# About a.\nx = 1\r\n",
        "madeup/sub/__init__.py": "s = 1\n", "madeup/same.py": "s = 1\n",
        "madeup/conversion.py": "kept = 1\n",
        "madeup/version.py": "v = 1", "madeup/sub/_version.py": "v = 1", "madeup/__config__.py": "c",
        "madeup/_distributor_init.py": "d", "madeup/_distributor_init_local.py": "d",
        "madeup/made.py": "# GENERATED BY a tool, DO NOT EDIT\nx = 2\n", "madeup/empty.py": "",
        "madeup/data.txt": "t", "tool.py": "outside = 1", "madeup/unlisted.py": "u = 1",
    }
    for name, text in content.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    info = tmp_path / "site" / "madeup-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: madeup\nVersion: 1.5\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in content if "unlisted" not in name))
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path


def test_embedded_files(made_up):
    files, source = prepare.embedded_files(["madeup"])
    assert source == ["madeup==1.5"]
    found = list(prepare.documents(files, Counter()))
    assert found == ["# About a.\nx = 1\n", "kept = 1\n", "s = 1\n", "s = 1\n"]
    with pytest.raises(prepare.DataError, match="nowhere-to-be-found"):
        prepare.embedded_files(["nowhere-to-be-found"])


def test_embedded_says_another_game(made_up, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "PACKAGES", ("madeup",))
    monkeypatch.setattr(prepare.embedded_files, "__defaults__", (("madeup",),))
    pins = made_up / "requirements.txt"
    monkeypatch.setattr(prepare, "REQUIREMENTS", pins)
    for pinned, said in ("1.5", False), ("1.4", True):
        pins.write_text(f"torch>=2\nmadeup=={pinned}\n")
        assert prepare.main(["--out", str(made_up / "out"), "--vocab-size", "60000"]) == 2
        assert ("another game" in capsys.readouterr().out) == said


@pytest.mark.parametrize("text, cleaned", [
    ("# Copyright X\nx = 1\n", "x = 1\n"),
    ("#!/usr/bin/env python\n# (c) and license\n\n# kept\nx = 1\n", "# kept\nx = 1\n"),
    ("# One.\n\n# Copyright X\n\n# NO WARRANTY\n\n\"\"\"Doc.\"\"\"\n", "\"\"\"Doc.\"\"\"\n"),
    ("# plain comment\n\nx = 1  # license\n", "# plain comment\n\nx = 1  # license\n"),
    ("\"\"\"Copyright in a docstring stays.\"\"\"\n", "\"\"\"Copyright in a docstring stays.\"\"\"\n"),
    ("x = 1\r\ny = 2\r", "x = 1\ny = 2\n"),
    ("# Generated by a build\nx = 1\n", ""),
    ("# only a licence\n", ""),
    ("", ""),
])
def test_clean_source(text, cleaned):
    assert prepare.clean_source(text) == cleaned
