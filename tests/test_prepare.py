"""data/prepare.py: documents, split, tokenizer, shards, manifest and refusals, on small toy corpora."""

import contextlib
import hashlib
import io
import json
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import sentencepiece as spm

import train_gpt
from data import inputs, prepare
from helpers import ROOT, train_tokenizer

ODD = ["", " ", "  a  b ", "\n", "\r\n\r\nx\r\n", "\ttab\t\t", "nul\0nul", "\ufffd", "\u2581",
       "a\u2581b\u2581\u2581 c", "<s>", "</s><unk>", "<0x0A><0xE2>", "\U0001F600\u200d\U0001F680",
       "e\u0301\u0323", "\ue000\uf8ff\U00100000", "\ufeffbom", "\u2585 \u2047 \u3000\u00a0",
       "\u2028\x0b\x0c\x85", "\ufffe\uffff", "x" * 5000, " " * 999]
ALPHABETS = [" \n\t\r", "ab \u2581", "<s>0xA/ ", "\0\x01\x7f\x80", "e\u00e9\u0301\u0327", "def x:\n ",
             "\U0001F468\u200d\u2764\ufe0f", "\ud7ff\ue000\uffff\U0010ffff", "\ufffd\u2581\ue2e2"]


# --- also for other files -------------------------------------------------------------

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


def run(*words, expect=0):
    """prepare.py's main with these words -> all that it printed; a refusal or a failure is one line."""
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = prepare.main([str(word) for word in words])
    sentences = [line for line in err.getvalue().splitlines() if line.startswith("prepare: ")]
    assert code == expect and len(sentences) == (1 if expect else 0), err.getvalue()
    return out.getvalue() + err.getvalue()


def written(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def prepared(folder, *words, expect=0, vocab_size=400):
    """(what it printed, manifest) of prepare.py, which writes to folder/out."""
    said = run("--name", "toy", "--vocab-size", vocab_size, "--processes", 1, "--force",
               "--out", folder / "out", *words, expect=expect)
    path = folder / "out/datasets/toy/manifest.json"
    return said, json.loads(path.read_text()) if path.exists() else None


def snapshot(root):
    files = (path for path in Path(root).rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def read_documents(out, name, split):
    """Texts of a split, decoded from its shards."""
    folder = out / "datasets" / name
    manifest = json.loads((folder / "manifest.json").read_text())
    sp = spm.SentencePieceProcessor(model_file=str(folder / manifest["tokenizer"]["path"]))
    tokens = np.concatenate([np.fromfile(folder / file["path"], "<u2", offset=1024)
                             for file in manifest["files"] if file["split"] == split])
    starts = np.flatnonzero(tokens == 1)
    assert starts[0] == 0
    return [sp.decode(part[1:].tolist()) for part in np.split(tokens, starts[1:])]


def both_splits(out):
    return [text for split in ("val", "train") for text in read_documents(out, "toy", split)]


# --- tokenizer, split, shards, manifest ------------------------------------------------------------------

@pytest.fixture(scope="module")
def texts():
    return make_texts(300)


@pytest.fixture(scope="module")
def toy(tmp_path_factory, texts):
    """(out, manifest) of a dataset built from jsonl with duplicates and an empty document."""
    root = tmp_path_factory.mktemp("toy")
    path = write_jsonl(root / "toy.jsonl", texts + texts[:5] + [""])
    request = prepare.Request("toy", ["toy.jsonl"], prepare.find_files([path]), 512, 5000)
    return root / "out", prepare.build(request, root / "out")


def test_tokenizer_is_lossless(toy):
    sp = spm.SentencePieceProcessor(model_file=str(toy[0] / "tokenizers" / "toy.model"))
    assert (sp.vocab_size(), sp.unk_id(), sp.bos_id(), sp.eos_id(), sp.pad_id()) == (512, 0, 1, 2, -1)
    assert sum(sp.is_byte(i) for i in range(512)) == 256
    assert any("\n" in sp.id_to_piece(i) for i in range(512))
    rng = random.Random(1)
    samples = ODD + ["".join(ODD)]
    for _ in range(800):
        samples.append("".join(rng.choices("".join(rng.sample(ALPHABETS, 2)), k=rng.randint(1, 60))))
        codes = (rng.randrange(0x110000) for _ in range(20))
        samples.append("".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000))
    for text in samples:
        ids = prepare.encode(sp, text)
        assert sp.decode(ids) == text and not {0, 1, 2} & set(ids)


def document_hash(text):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def test_split_and_manifest(toy, texts):
    out, manifest = toy
    folder = out / "datasets" / "toy"
    model = (out / "tokenizers" / "toy.model").read_bytes()
    by_hash = sorted(texts, key=document_hash)
    n = int(np.searchsorted(np.cumsum([len(text.encode()) for text in by_hash]), 5000)) + 1
    parts = by_hash[:n], by_hash[n:]
    assert (read_documents(out, "toy", "val"), read_documents(out, "toy", "train")) == parts
    val, train = (np.array([document_hash(text) for text in part], "<u8").tobytes() for part in parts)
    assert (folder / "document_hashes.bin").read_bytes() == val + train
    val_bytes, train_bytes = (sum(len(text.encode()) for text in part) for part in parts)
    files = manifest["files"]
    expected = {
        "version": 1, "name": "toy", "source": ["toy.jsonl"],
        "tokenizer": {"path": "../../tokenizers/toy.model", "sha256": hashlib.sha256(model).hexdigest(),
                      "vocab_size": 512, "bos_id": 1, "lossless": True},
        "files": files, "train_bytes": train_bytes, "val_bytes": val_bytes, "train_docs": 300 - n,
        "val_docs": n, "text_fingerprint": hashlib.sha256(b"val" + val + b"train" + train).hexdigest(),
        "document_hashes": {"path": "document_hashes.bin", "val": n, "train": 300 - n},
        "dropped": {"repeated_inputs": 0, "duplicate_documents": 5, "val_bytes_in_train": 0}}
    assert manifest == expected == json.loads((folder / "manifest.json").read_text())
    assert list(manifest) == list(expected)
    assert [(file["path"], file["split"]) for file in files] == [
        ("toy_val_000000.bin", "val"), ("toy_train_000000.bin", "train")]
    for file in files:
        data = (folder / file["path"]).read_bytes()
        header = np.frombuffer(data[:1024], "<i4")
        assert header[:3].tolist() == [20240520, 1, file["tokens"]] and not header[3:].any()
        assert len(data) == 1024 + 2 * file["tokens"] and hashlib.sha256(data).hexdigest() == file["sha256"]
    assert {path.name for path in folder.iterdir()} == {
        "manifest.json", "document_hashes.bin", *(file["path"] for file in files)}


def test_what_the_result_depends_on(tmp_path, toy, texts):
    """Not on the order of documents; the text fingerprint not on the vocabulary either."""
    shuffled = random.Random(2).sample(texts, len(texts))
    path = write_jsonl(tmp_path / "toy.jsonl", shuffled + shuffled[:9])
    for vocab_size in 400, 512:
        _, other = prepared(tmp_path, "--text", path, "--val-bytes", 5000, vocab_size=vocab_size)
        assert other["text_fingerprint"] == toy[1]["text_fingerprint"]
        same = [other[part] == toy[1][part] for part in ("files", "tokenizer")]
        assert same == [vocab_size == 512] * 2


@pytest.mark.parametrize("sizes, val_bytes, val", [
    ([100] * 40, 350, [0, 1, 2, 3]),            # the first ones that have val_bytes,
    ([100] * 40, 9999, [0, 1, 2, 3]),           # a tenth of the text at most
    ([70_000] + [6000] * 40, 9000, [1, 2]),     # a long document goes to train,
    ([70_000] * 40, 9000, [0]),                 # unless most of them are long
    ([100, 100], 5000, [0])])                   # train keeps one
def test_size_of_val(sizes, val_bytes, val):
    assert np.flatnonzero(prepare.choose_val(np.array(sizes), val_bytes)[0]).tolist() == val


def test_shards_begin_with_a_document_unless_it_is_longer_than_a_shard(tmp_path):
    arrays = [np.arange(n, dtype=np.uint16) for n in (3, 10, 3, 4, 1, 4)]
    entries = prepare.write_shards(tmp_path, "n", "train", arrays, shard_tokens=4)
    assert [file["tokens"] for file in entries] == [3, 4, 4, 2, 3, 4, 1, 4]
    assert [file["path"] for file in entries] == [f"n_train_{i:06d}.bin" for i in range(8)]
    joined = np.concatenate([np.fromfile(tmp_path / file["path"], "<u2", offset=1024) for file in entries])
    assert (joined == np.concatenate(arrays)).all()


# --- readers ---------------------------------------------------------------------------------------------

def read(path):
    return [text for file in prepare.find_files([path]) for text in prepare.documents(file, Counter())]


def test_lone_surrogates_are_replaced(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", ["\ud800x\udfff\udfff", "\U0001F600", "\ufeffx", "\udc00\ud800"])
    assert read(path) == ["\ufffdx\ufffd\ufffd", "\U0001F600", "\ufeffx", "\ufffd\ufffd"]


def test_text_file_is_cut_at_blank_lines(tmp_path):
    path = tmp_path / "t.txt"
    paragraphs = ["".join(f"line {i} {j} é\r\n" for j in range(40)) for i in range(3000)]
    path.write_bytes("\r\n".join(paragraphs).encode())
    pieces = read(path)
    assert "".join(pieces).encode() == path.read_bytes() and len(pieces) > 50
    assert all(piece.endswith("\r\n\r\n") and 16384 <= len(piece.encode()) < 18000 for piece in pieces[:-1])
    for content in ("line\n" * 20000, "日本" * 30000, "x" * 100_000):
        path.write_text(content)
        pieces = read(path)
        assert "".join(pieces) == content and max(len(piece.encode()) for piece in pieces) <= 32768


def test_folder(tmp_path, capsys):
    texts = {"sub/a.py": "x = 1\n", "b.md": "é\r\n", "empty.txt": "", "whole.txt": "line\n\n" * 100_000}
    for name, text in (texts | {"long.txt": "line\n\n" * 200_000}).items():
        written(tmp_path / name, text)
    written(tmp_path / "c.bin", b"\xff\xfe\0")
    found = read(tmp_path)
    assert set(filter(None, texts.values())) <= set(found)
    assert len(found) == 3 + 19 and sum(map(len, found)) == 6 + 3 + 6 * 300_000
    assert "left out: c.bin: no text" in capsys.readouterr().out


# --- refusals, second runs, failures ---------------------------------------------------------------------

def test_refused_requests(tmp_path, texts):
    path = write_jsonl(tmp_path / "t.jsonl", texts)
    command = "--text", path, "--out", tmp_path / "out", "--name"
    assert "--name" in run(*command[:-1], expect=2)
    assert "go with --text or --parquet" in run("--keep-marks", "--out", tmp_path / "out", expect=2)
    for words, *options in [("--name", "../toy"), ("65536", "toy", "--vocab-size", 65537),
                            ("smallest", "toy", "--vocab-size", 100), ("for train", "toy", "--val", path),
                            ("--val-bytes", "toy", "--val-bytes", 0)]:
        assert words in run(*command, *options, expect=2)
    said = run(*command, "toy", "--vocab-size", 60000, expect=2)
    assert not snapshot(tmp_path / "out")
    run(*command, "toy", "--vocab-size", said.split()[-1])      # the largest possible one


def test_second_run(tmp_path, texts):
    path = write_jsonl(tmp_path / "t.jsonl", texts)
    command = ["--text", path, "--name", "toy", "--vocab-size", 400, "--out", tmp_path / "out"]
    run(*command)
    before = snapshot(tmp_path / "out")
    assert "already" in run(*command)
    assert "--force" in run(*command, "--vocab-size", 401, expect=2)
    write_jsonl(path, texts + ["more"])
    assert "--force" in run(*command, expect=2)
    assert snapshot(tmp_path / "out") == before
    run(*command, "--vocab-size", 401, "--force")
    model = tmp_path / "out/tokenizers/toy.model"
    assert spm.SentencePieceProcessor(model_file=str(model)).vocab_size() == 401
    made = model.read_bytes()
    for spoil in (model.unlink, lambda: model.write_bytes(b"a tokenizer of another text")):
        spoil()
        run(*command, "--vocab-size", 401)      # what is not whole is made again
        assert model.read_bytes() == made


@pytest.mark.parametrize("changed", [lambda texts: texts[:-1], lambda texts: texts[1:] + texts[:1],
                                     lambda texts: texts + ["more"]], ids=["fewer", "moved", "more"])
def test_input_that_changes_between_passes(tmp_path, texts, monkeypatch, changed):
    path = write_jsonl(tmp_path / "t.jsonl", texts)
    original = prepare.train_tokenizer

    def rewrite(*args):
        write_jsonl(path, changed(texts))
        return original(*args)
    monkeypatch.setattr(prepare, "train_tokenizer", rewrite)
    command = "--text", path, "--name", "toy", "--vocab-size", 400, "--out", tmp_path / "out"
    assert "the input changed" in run(*command, expect=2) and not snapshot(tmp_path / "out")


# --- embedded corpus -------------------------------------------------------------------------------------

def test_the_embedded_corpus_is_frozen():
    """With the pinned packages its text is the one that records stand on."""
    with pytest.raises(prepare.DataError, match="nowhere-to-be-found"):
        prepare.embedded_files(["nowhere-to-be-found"])
    files, source = prepare.embedded_files()
    if not set(source) <= set((ROOT / "requirements.txt").read_text().split()):
        pytest.skip("other versions of the packages are installed")
    corpus = prepare.Corpus(prepare.Request("embedded", source, files, frozen=True), 1)
    fingerprint = prepare.text_fingerprint(*corpus.split_hashes())
    assert fingerprint == train_gpt.load_config({}).data_fingerprint and fingerprint.startswith("dac98310")


@pytest.mark.parametrize("text, cleaned", [
    ("# Copyright X\nx = 1\n", "x = 1\n"),
    ("#!/usr/bin/env python\n# (c) and license\n\n# kept\nx = 1\n", "# kept\nx = 1\n"),
    ("# One.\n\n# Copyright X\n\n# NO WARRANTY\n\n\"\"\"Doc.\"\"\"\n", "\"\"\"Doc.\"\"\"\n"),
    ("# plain comment\n\nx = 1  # license\n", "# plain comment\n\nx = 1  # license\n"),
    ("\"\"\"Copyright in a docstring stays.\"\"\"\n", "\"\"\"Copyright in a docstring stays.\"\"\"\n"),
    ("x = 1\r\ny = 2\r", "x = 1\ny = 2\n"),
    ("# Generated by a build\nx = 1\n", ""), ("# only a licence\n", ""), ("", "")])
def test_clean_source(text, cleaned):
    assert prepare.clean_source(text) == cleaned


# --- text that a tokenizer might change ------------------------------------------------------------------

def chinese(number, spaces, size=400, seed=5):
    """Documents of 1,500 different characters; a space follows about so many of 100 sentences."""
    rng = random.Random(seed)
    characters = [chr(0x4E00 + i) for i in range(1500)]
    weights = [1 / (i + 5) for i in range(1500)]
    texts = []
    for _ in range(number):
        parts = []
        for _ in range(size // 100):
            parts.append("".join(rng.choices(characters, weights, k=100)) + "。")
            if 100 * rng.random() < spaces:
                parts.append(" ")
        texts.append("".join(parts))
    return texts


TABS = ["".join(f"\tif{i}:\n\t\tx={i * j}\n" for j in range(9)) for i in range(300)]
RARE_SPACES = {     # documents, vocabulary
    "a few": (chinese(300, 3), 1024),
    "one in 100,000": (chinese(300, 0.1), 1024),
    "none": (chinese(300, 0), 1024),
    "in one document": ([*chinese(300, 0), "一 二  三" * 40], 1024),
    "in one short document of code": ([*TABS, "x = 1\n" * 3], 400),
    "more characters than the vocabulary has": (chinese(300, 3), 300),
    "none, the least vocabulary": ([*chinese(100, 0), "a b  c" * 20], 260),
    "often, a small vocabulary": (make_texts(60), 262),
    "U+2581 as well": ([*chinese(200, 1), "\u2581 \u2581\u2581  \u2581" * 30], 700)}


@pytest.mark.parametrize("case", RARE_SPACES)
def test_every_document_decodes_to_itself(tmp_path, case):
    """Also where spaces are rarer than the characters that get no piece."""
    texts, vocab_size = RARE_SPACES[case]
    prepared(tmp_path, "--text", write_jsonl(tmp_path / "t.jsonl", texts), vocab_size=vocab_size)
    assert sorted(both_splits(tmp_path / "out")) == sorted({*texts})
    sp = spm.SentencePieceProcessor(model_file=str(tmp_path / "out/tokenizers/toy.model"))
    assert sp.decode(sp.encode("a b  c ")) == "a b  c "         # as a prompt is encoded


@pytest.mark.parametrize("options", [
    dict(normalization_rule_name="nfkc"), dict(add_dummy_prefix=True, remove_extra_whitespaces=True),
    dict(byte_fallback=False, vocab_size=300)], ids=["nfkc", "blanks", "no bytes"])
def test_a_train_document_that_would_change_is_refused(tmp_path, monkeypatch, options):
    """Whatever its hash, though SentencePiece may lose no letter of val."""
    plain = [text.replace("\u2581", "") for text in make_texts(200)]
    odd = next(text for i in range(999) if document_hash(text := f"\u2163  \uff21 \ufb01 odd {i}") % 64)
    model = train_tokenizer(plain, **{"vocab_size": 400} | options)
    monkeypatch.setattr(prepare, "train_tokenizer", lambda *_: model)
    path = write_jsonl(tmp_path / "t.jsonl", [*plain, odd])
    said, manifest = prepared(tmp_path, "--text", path, "--val", write_jsonl(tmp_path / "v.jsonl", plain[:9]),
                              expect=2)
    assert "would change the document that begins with" in said and not manifest


SMALL_TEXTS = {
    "English": ["".join(random.Random(i).choices("etaoin shrdlu\n", k=900)) for i in range(60)],
    "one space between letters": [" ".join("etaoinshrdlu") + str(i) for i in range(60)],
    "one letter": ["e" * i for i in range(1, 60)],
    "spaces": [" " * i for i in range(1, 60)],
    "characters": ["".join(map(chr, range(0x4E00 + 60 * i, 0x4E00 + 61 * i))) for i in range(1, 60)],
    "nothing that has a piece": ["\0" * i + "\u2581" * (i % 7) for i in range(1, 60)]}


@pytest.mark.parametrize("case", SMALL_TEXTS)
def test_every_vocabulary_between_the_least_and_the_largest(tmp_path, case):
    """What a refusal names as the least and the largest possible size is possible."""
    words = "--text", write_jsonl(tmp_path / "t.jsonl", SMALL_TEXTS[case])
    for size in -1, 0, 259:
        said, _ = prepared(tmp_path, *words, vocab_size=size, expect=2)
        assert said.strip().endswith("smallest possible size is 260")
    said, _ = prepared(tmp_path, *words, vocab_size=60_000, expect=2)
    largest = int(re.search(r"largest possible size is (\d+)", said)[1])
    assert largest >= 260
    for size in {260, min(261, largest), (260 + largest) // 2, largest}:
        prepared(tmp_path, *words, vocab_size=size)
        assert sorted(both_splits(tmp_path / "out")) == sorted(SMALL_TEXTS[case])
    assert "largest possible" in prepared(tmp_path, *words, vocab_size=largest + 1, expect=2)[0]


def test_messages_of_the_trainer_of_tokenizers_are_not_passed_on(tmp_path, texts, monkeypatch, capfd):
    def fail(**options):
        raise RuntimeError("INTERNAL: src/trainer_interface.cc(1) [x] ")
    monkeypatch.setattr(spm.SentencePieceTrainer, "train", fail)
    path = write_jsonl(tmp_path / "t.jsonl", texts)
    said = run("--text", path, "--name", "toy", "--vocab-size", 400, "--out", tmp_path, expect=2)
    assert "no tokenizer can be trained" in said and "INTERNAL" not in said + "".join(capfd.readouterr())


# --- two at once, and one after another that was killed ---------------------------------------------------

def test_the_second_of_two_is_refused(tmp_path, texts):
    """It changes nothing of what the first one has; when that is gone, the same command begins again."""
    words = "--text", write_jsonl(tmp_path / "t.jsonl", texts)
    prepared(tmp_path, *words)
    alone = snapshot(tmp_path / "out")
    partial = tmp_path / "out/datasets/.toy.partial"
    written(partial / "toy_train_000007.bin", "half")
    with inputs.locked(partial):            # as another process has it
        assert "another process is preparing this dataset" in prepared(tmp_path, *words, expect=2)[0]
        assert (partial / "toy_train_000007.bin").read_text() == "half"
    prepared(tmp_path, *words)
    assert snapshot(tmp_path / "out") == alone
