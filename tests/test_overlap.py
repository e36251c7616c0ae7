"""What is given twice is read once, and what is val is no train, however both were cut into documents."""
import gzip
import json
import os
import random
import threading
import unicodedata

from data import prepare
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import overlap
from test_prepare import both_splits, prepared, read_documents, written

SHINGLE = 60        # letters without blanks, looked up at every place


def lines_of_words(size, seed):
    """Lines that do not repeat, some with a blank line after them."""
    words = random.Random(0)
    words = ["".join(words.choices("abcdefghijklmnopé", k=words.randint(2, 9))) for _ in range(2000)]
    draw = random.Random(seed)
    lines = []
    while size > 0:
        lines.append(" ".join(draw.choices(words, k=12)) + ".\n" + "\n" * (draw.random() < 0.2))
        size -= len(lines[-1])
    return "".join(lines)


TEXTS = [lines_of_words(20_000, seed) for seed in range(9)]


@pytest.fixture
def corpus(tmp_path):
    """A folder of nine texts."""
    for number, text in enumerate(TEXTS):
        written(tmp_path / f"corpus/{number}.txt", text)
    return tmp_path / "corpus"


def shingles(texts):
    found = set()
    for text in texts:
        dense = "".join(text.split())
        found.update([dense[i:i + SHINGLE] for i in range(len(dense) - SHINGLE + 1)])
    return found


def leaked(tmp_path):
    """(share of val's shingles that train has, by looking each one up; train's shingles)"""
    val = shingles(read_documents(tmp_path / "out", "toy", "val"))
    train = shingles(read_documents(tmp_path / "out", "toy", "train"))
    return len(val & train) / len(val), train


# --- given twice -----------------------------------------------------------------------------------------
def linked_file(corpus):
    os.symlink(corpus / "3.txt", corpus.parent / "link.txt")
    return [corpus.parent / "link.txt", corpus]


def hard_link(corpus):
    os.link(corpus / "3.txt", corpus.parent / "other name.txt")
    return [corpus, corpus.parent / "other name.txt"]


def linked_folder(corpus):
    os.symlink(corpus, corpus.parent / "link")
    return [corpus.parent / "link", corpus, corpus.parent / "link" / "4.txt"]


def a_copy(corpus):
    return [written(corpus.parent / "copy of 6.txt", TEXTS[6]), corpus]


TWICE = {  # words of the command line, files and folders that are read once only
    "a folder and its files": (lambda corpus: [corpus, *sorted(corpus.iterdir())], 9),
    "its files and the folder": (lambda corpus: [*sorted(corpus.iterdir()), corpus, corpus], 10),
    "a link": (linked_file, 1), "a hard link": (hard_link, 1), "a linked folder": (linked_folder, 10),
    "a copy": (a_copy, 1)}


@pytest.mark.parametrize("case", TWICE)
def test_what_is_given_twice_is_read_once(tmp_path, corpus, case):
    alone = prepared(tmp_path, "--text", corpus)[1]
    words, repeated = TWICE[case]
    said, manifest = prepared(tmp_path, "--text", *words(corpus))
    assert manifest["text_fingerprint"] == alone["text_fingerprint"] and manifest["files"] == alone["files"]
    assert manifest["train_bytes"] + manifest["val_bytes"] == sum(len(text.encode()) for text in TEXTS)
    found = manifest["dropped"]["repeated_inputs"]
    assert found == repeated and f"{found} inputs equal to others" in said


def test_a_pipe_that_is_given_twice(tmp_path):
    """It can be read once only."""
    os.mkfifo(tmp_path / "pipe")
    threading.Thread(target=lambda: written(tmp_path / "pipe", "".join(TEXTS)), daemon=True).start()
    manifest = prepared(tmp_path, "--text", tmp_path / "pipe", tmp_path / "pipe")[1]
    assert manifest["train_bytes"] + manifest["val_bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert manifest["source"] == ["pipe"]


# --- val ---------------------------------------------------------------------------------------------------
def rows(text):
    """Its paragraphs as lines of JSON."""
    return "".join(json.dumps({"text": part}) + "\n" for part in text.split("\n\n"))


def wrapped(text):
    """The same words in lines of other lengths."""
    words = text.split()
    return "\n".join(" ".join(words[i:i + 7]) for i in range(0, len(words), 7))


VAL = TEXTS[3]
SHARED = {  # {file in the folder of text: content}
    "the file itself": {}, "a copy": {"9.txt": VAL}, "compressed": {"9.txt.gz": gzip.compress(VAL.encode())},
    "rows": {"9.jsonl": rows(VAL)}, "behind a heading": {"9.txt": "A heading\n\n" + VAL},
    "in a long text": {"9.txt": lines_of_words(900_000, 20) + VAL + lines_of_words(200_000, 21)},
    "lines that CR LF ends": {"9.txt": VAL.replace("\n", "\r\n")},
    "other lines": {"9.txt": wrapped(VAL)}, "one line": {"9.txt": " ".join(VAL.split())},
    "a part": {"9.txt": TEXTS[4][:7000] + VAL[7000:14_000] + TEXTS[5][:7000]},
    "in pieces": {f"{9 + i}.txt": VAL[2000 * i:][:2000] for i in range(11)},
    "three times": {"9.txt": VAL + VAL[:-99], "10.jsonl": rows(VAL)}}


@pytest.mark.parametrize("case", SHARED)
def test_text_of_val_is_no_train(tmp_path, corpus, case):
    """A file that --val names lies in the folder of the text, and its text again in this form."""
    for name, content in SHARED[case].items():
        written(corpus / name, content)
    said, manifest = prepared(tmp_path, "--text", corpus, "--val", corpus / "3.txt")
    assert "".join(sorted(read_documents(tmp_path / "out", "toy", "val"), key=VAL.index)) == VAL
    share, train = leaked(tmp_path)
    assert share < 0.002
    dropped = manifest["dropped"]
    assert dropped["repeated_inputs"] == 1 + (case == "a copy")
    assert ("left out of train because" in said) == (dropped["val_bytes_in_train"] > 0)
    # nothing else is left out: what train has besides is all there
    assert shingles([text for number, text in enumerate(TEXTS) if number != 3]) <= train
    if case == "in a long text":
        end = lines_of_words(200_000, 21)[500:]
        missing = shingles([end]) - train
        assert len(missing) < 0.01 * len(end)      # those across the ends of documents


def two_forms(folder):
    """All of it in one file, and each text in one of its own."""
    return [written(folder / "all.txt", "".join(TEXTS)), folder / "corpus"]


def half_of_each(folder):
    half = [text[:len(text) // 2] for text in TEXTS]
    return [folder / "corpus", written(folder / "halves.txt", "".join(half))]


@pytest.mark.parametrize("words", [two_forms, half_of_each])
def test_text_that_is_cut_in_two_ways(tmp_path, corpus, words):
    """Val is chosen among documents of both."""
    manifest = prepared(tmp_path, "--text", *words(tmp_path))[1]
    assert leaked(tmp_path)[0] < 0.002 and manifest["dropped"]["val_bytes_in_train"] > 10_000
    found = {line for text in both_splits(tmp_path / "out") for line in text.splitlines()}
    lines = [line for text in TEXTS for line in text.splitlines()]
    assert sum(line not in found for line in lines) < 0.02 * len(lines)        # it is in one or the other


def test_val_alone_leaves_nothing_for_train(tmp_path, corpus):
    """By another name, or in other lines."""
    os.symlink(corpus / "3.txt", tmp_path / "val.txt")
    for text in corpus / "3.txt", written(tmp_path / "x.txt", wrapped(VAL)):
        said, _ = prepared(tmp_path, "--text", text, "--val", tmp_path / "val.txt", expect=2)
        assert "all of the text is val's as well" in said


def test_short_rows_of_val_in_a_text(tmp_path):
    """Rows of some 80 letters, whose text stands in a file among others."""
    lines = [line for line in lines_of_words(450_000, 9).split("\n") if len(line) > 75][:3000]
    val = written(tmp_path / "val.jsonl", rows("\n\n".join(lines[::10])))
    text = written(tmp_path / "t.txt", "\n".join(lines))
    prepared(tmp_path, "--text", text, "--val", val)
    train = "\n".join(read_documents(tmp_path / "out", "toy", "train"))
    assert sum(line in train for line in lines[::10]) < 0.05 * 300        # the shortest ones
    assert sum(line in train for line in lines[1::10]) > 290        # but for a short rest between two


def test_text_of_val_is_no_train_in_parquet(tmp_path):
    """Rows that hold what other rows of val hold in pieces, or a part of it; with two processes."""
    paragraphs = [[part for part in text.split("\n\n") if part] for text in TEXTS]
    for number, parts in enumerate(paragraphs[:6]):
        rows = ["\n\n".join(parts[i:i + 9]) for i in range(0, len(parts), 9)]
        if number == 2:
            rows[1] += "\n" + " ".join(TEXTS[8][2000:4000].split("\n"))
        if number == 4:
            rows.insert(2, TEXTS[8][5000:14_000])
        pq.write_table(pa.table({"text": rows}), tmp_path / f"{number}.parquet", row_group_size=5)
    pq.write_table(pa.table({"text": paragraphs[8]}), tmp_path / "val.parquet")
    said, manifest = prepared(tmp_path, "--parquet", *[tmp_path / f"{number}.parquet" for number in range(6)],
                              "--val", tmp_path / "val.parquet", "--processes", 2)
    share, train = leaked(tmp_path)
    dropped = manifest["dropped"]["val_bytes_in_train"]
    assert 10_500 < dropped < 12_500 and share < 0.002
    assert f"{dropped:,} bytes left out of train" in said
    assert shingles([part for parts in paragraphs[:6] for part in parts]) <= train


# --- what is no overlap ------------------------------------------------------------------------------------
HEADER = "# Copyright 2026 The authors of this.\n# Licensed as it is, with no warranty, to everybody.\n\n"


def test_what_documents_share_by_nature_stays(tmp_path):
    """A header, a table of zeros, a line of dashes, a file of one letter."""
    texts = [HEADER + "-" * 300 + "\n" + "0.0, " * 400 + "\n" + text[:3000] for text in TEXTS]
    texts += [letter * 5000 for letter in "ab"] + ["x\n" * 4000, "x\n" * 5000, " " * 3000, "\n" * 3000]
    for number, text in enumerate(texts):
        written(tmp_path / f"in/{number}.txt", text)
    for val in 0, 9, 11, 12, 13, 14:
        manifest = prepared(tmp_path, "--text", tmp_path / "in", "--val", tmp_path / f"in/{val}.txt")[1]
        assert manifest["dropped"]["val_bytes_in_train"] == 0
        assert manifest["train_docs"] == len(texts) - 1


def test_what_many_documents_begin_with_stays(tmp_path):
    """A prompt of 900 letters before each of some dialogues."""
    prompt = TEXTS[7][:900]
    texts = [prompt + lines_of_words(700, 50 + number) for number in range(200)]
    path = written(tmp_path / "x.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    manifest = prepared(tmp_path, "--text", path)[1]
    assert manifest["dropped"]["val_bytes_in_train"] == 0 and manifest["train_docs"] > 150
    again = written(tmp_path / "again.txt", "\n\n".join(texts))
    prepared(tmp_path, "--text", path, again)
    own = [text[900:] for text in read_documents(tmp_path / "out", "toy", "val") if text.startswith(prompt)]
    train = leaked(tmp_path)[1]
    assert len(own) > 9 and len(shingles(own) & train) < 0.05 * len(shingles(own))      # at some ends


def test_the_embedded_corpus_stays_as_it_is(tmp_path, monkeypatch):
    """Records stand on it, though documents of it share text; as somebody's own that would not stay."""
    for number in range(20):
        written(tmp_path / f"in/{number}.py", f"x = {number}\n" + TEXTS[0])
    files = [prepare.Input(path, "python") for path in sorted((tmp_path / "in").iterdir())]
    monkeypatch.setattr(prepare, "embedded_files", lambda: (files, []))
    assert "toy: 20 documents" in prepared(tmp_path)[0]
    assert "all of the text is val's as well" in prepared(tmp_path, "--text", tmp_path / "in", expect=2)[0]


# --- runs --------------------------------------------------------------------------------------------------
def test_what_is_left_has_whole_characters_and_lines():
    val = overlap.ValText.of([unicodedata.normalize("NFD", text[:4000]) for text in TEXTS[:3]])
    for cut in range(1900, 1940):
        text = "日本語" * 300 + "\n" + unicodedata.normalize("NFD", TEXTS[1])[500:cut] + "é" * 700
        raw = text.encode()
        (left,) = val.left_of([text])
        parts = [raw[start:stop].decode() for start, stop in left]
        assert parts[0] == "日本語" * 300 + "\n" and set(parts[-1][60:]) == {"é"} and len(parts) == 2
    assert list(val.left_of(["nothing of it " * 99, "", TEXTS[8]])) == [None] * 3
    assert list(overlap.ValText.of([]).left_of([TEXTS[0]])) == [None]
