"""Plain text as people have it: marks between its documents, other encodings, very little of it; and machines
with few processors or without semaphores."""
import gzip
import json
import lzma
import multiprocessing.synchronize
import os
import random
from collections import Counter
from concurrent.futures import process
from pathlib import Path

import numpy as np

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import inputs, prepare
from test_overlap import lines_of_words, written
from test_prepare import make_texts, read_documents, run, snapshot

STORIES = [lines_of_words(200 + 37 * i % 700, 1000 + i).rstrip("\n") + "\n" for i in range(300)]


def prepared(tmp_path, *paths, expect=0, vocab_size=400, more=()):
    """(what it printed, manifest) of prepare.py"""
    said = run("--text", *paths, "--name", "toy", "--vocab-size", vocab_size, "--out", tmp_path / "out",
               "--force", *more, expect=expect)
    path = tmp_path / "out/datasets/toy/manifest.json"
    return said, json.loads(path.read_text()) if path.exists() else None


def both_splits(tmp_path):
    return [text for split in ("val", "train") for text in read_documents(tmp_path / "out", "toy", split)]


# --- marks of a text's end -------------------------------------------------------------------------------
JOINED = {  # how the stories are put together: name, bytes
    "a line": ("x.txt", "<|endoftext|>\n".join(STORIES)),
    "a line after each": ("x.txt", "".join(story + "<|endoftext|>\n" for story in STORIES)),
    "as TinyStories has it": ("x.txt", "\n".join(story + "<|endoftext|>\n" for story in STORIES)),
    "at the end of a line": ("x.txt", "\n".join(story[:-1] + "<|endoftext|>" for story in STORIES)),
    "within lines": ("x.txt", "<|endoftext|>".join(STORIES)),
    "crlf": ("x.txt", "\r\n<|endoftext|>\r\n".join(STORIES)),
    "of Llama": ("x.txt", "<|end_of_text|>\n".join(STORIES)), "</s>": ("x.txt", "</s>\n".join(STORIES)),
    "<eos>": ("x.txt", " <eos> \n\n".join(STORIES)), "[EOS]": ("x.txt", "[EOS]\n".join(STORIES)),
    "doubled": ("x.txt", "<|endoftext|>\n<|endoftext|>\n \n".join(STORIES)),
    "in a folder": ("in/x.txt", "<|endoftext|>\n".join(STORIES)),
    "a long file in a folder": ("in/x.txt", "<|endoftext|>\n".join(STORIES) + "\n" * (1 << 20)),
    "gz": ("x.txt.gz", gzip.compress("</s>\n".join(STORIES).encode())),
    "utf-16": ("x.txt", "<|endoftext|>\n".join(STORIES).encode("utf-16")),
    "rows with a mark each": ("x.jsonl", "".join(json.dumps({"text": story + "<|endoftext|>"}) + "\n"
                                                 for story in STORIES)),
    "rows of nothing else": ("x.jsonl", "".join(json.dumps({"text": text}) + "\n" for story in STORIES
                                                for text in (story, "<|endoftext|>"))),
    "one row": ("x.json", json.dumps([{"text": "</s>\n".join(STORIES)}]))}


@pytest.mark.parametrize("case", JOINED)
def test_marks_end_documents(tmp_path, case):
    """Each story is a document, and nothing of the mark is in it. A line says so."""
    name, content = JOINED[case]
    path = written(tmp_path / name, content)
    place = path.parent if "/" in name else path
    said, _ = prepared(tmp_path, place)
    found = [text.replace("\r\n", "\n").strip("\n") for text in both_splits(tmp_path)]
    assert sorted(filter(None, found)) == sorted(story.strip("\n") for story in STORIES)
    marks = 2 * len(STORIES) if case == "doubled" else len(STORIES)
    before, _, _ = said.partition(" marks of a text's end, such as <|endoftext|>, end documents")
    counted = int(before.split("\n")[-1])
    assert marks - 2 <= counted <= marks        # a join has fewer


@pytest.mark.parametrize("case", ["a line", "within lines", "one row", "rows with a mark each", "</s>"])
def test_marks_can_be_kept(tmp_path, case):
    name, content = JOINED[case]
    said, manifest = prepared(tmp_path, written(tmp_path / name, content), expect=2 * (case == "one row"),
                              more=["--keep-marks"])
    if case == "one row":
        assert "the input is one document" in said
        return
    assert "marks of" not in said
    kept = "".join(sorted(both_splits(tmp_path)))
    assert kept.count("</s>" if case == "</s>" else "<|endoftext|>") >= len(STORIES) - 1


def test_marks_in_parquet(tmp_path):
    for number in range(2):
        texts = ["</s>\n".join(STORIES[150 * number:][i:i + 5]) for i in range(0, 150, 5)]
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{number}.parquet")
    command = ["--parquet", tmp_path / "0.parquet", tmp_path / "1.parquet", "--name", "toy",
               "--vocab-size", 400, "--processes", 1, "--force", "--out", tmp_path / "out"]
    assert "240 marks of a text's end" in run(*command)
    assert sorted(both_splits(tmp_path)) == sorted(STORIES)
    assert "marks of" not in run(*command, "--keep-marks")
    assert len(both_splits(tmp_path)) == 60


NO_MARKS = ['EOT = "<|endoftext|>"', "the token `<|endoftext|>` ends", "'<|end_of_text|>'", "<s>x</s>",
            "</s> is", "a </s>", "<eos>x", "x [EOS]", "<|endoftext|", "<|im_end|>", "</S>", "<pad>",
            "</s><unk>"]


@pytest.mark.parametrize("text", NO_MARKS)
def test_what_is_no_mark(text):
    """In quotes, or `</s>` in a line with something else, as in HTML."""
    raw = f"before\n{text}\nafter".encode()
    assert prepare.MARK.search(raw) is None
    counts = Counter()
    assert list(prepare.split_at_marks(raw.decode(), counts)) == [raw.decode()] and not counts


def test_a_story_is_cut_only_where_it_is_long(tmp_path):
    """Marks at every place beside the limits of a piece and of what is read at a time."""
    for size in (*range(16_370, 16_400), *range(32_690, 32_800, 3), 1 << 20, (1 << 20) + 7):
        first = "x" * (size - 1) + "\n"
        path = written(tmp_path / "x.txt", first + "<|endoftext|>\n\nsecond\n<|endoftext|>\n" + "third\n" * 9)
        texts = list(prepare.documents(prepare.find_files([path])[0], Counter()))
        assert texts[-2:] == ["second\n", "third\n" * 9] and "".join(texts[:-2]) == first
        assert len(texts) == 3 or size > 32_768
    path = written(tmp_path / "x.txt", "<|endoftext|>\n" * 5 + "a\n" + "<|endoftext|>\n" * 80_000 + "b \xff")
    assert list(prepare.documents(prepare.find_files([path])[0], Counter())) == ["a\n", "b \xff"]
    path.write_bytes(b"a\n<|endoftext|>\n\n</s>\nb \xff")
    with pytest.raises(prepare.DataError, match="line 5 is not UTF-8"):
        list(prepare.documents(prepare.find_files([path])[0], Counter()))


# --- other encodings ---------------------------------------------------------------------------------------
LETTERS = {"latin-1": "éèüñß", "cp1252": "é“”—€", "cp1251": "жщыяю", "koi8-r": "жщыяю",
           "gb18030": "中文字符的", "shift_jis": "日本語のテ"}


def text_in(encoding):
    """Lines whose letters the encoding has."""
    return lines_of_words(30_000, 7).translate(str.maketrans("abcdeé", LETTERS[encoding] + "x"))


@pytest.mark.parametrize("encoding", LETTERS)
def test_other_encodings_are_named_and_can_be_read(tmp_path, encoding):
    """In a folder and alone, plain and packed; UTF-8 beside them is read as such, a photograph not at all."""
    lines = [line for line in text_in(encoding).split("\n") if line]
    folder = tmp_path / "in"
    for number in range(5):
        written(folder / f"b{number}.txt", "\n".join(lines[number::5]).encode(encoding))
    written(folder / "c.txt.gz", gzip.compress(b"plain\n" + "日本語 é\n".encode()))
    for number in range(30):
        written(folder / f"d{number}.md", lines_of_words(2000, 30 + number))
    written(folder / "e.txt.xz", lzma.compress(("packed\n" + lines[0]).encode(encoding)))
    written(folder / "photo.jpg", bytes(range(256)) * 99)
    said, _ = prepared(tmp_path, folder)
    assert "left out: b0.txt, b1.txt, b2.txt and 3 more: text that is not UTF-8 (6 files)" in said
    assert "--encoding latin-1 reads it" in said and "`iconv -f LATIN1 -t UTF-8 b0.txt > NEW`" in said
    assert "1 binary files skipped" in said
    said, manifest = prepared(tmp_path, folder, more=["--encoding", encoding])
    assert "not UTF-8" not in said and "1 binary files skipped" in said
    found = [line for text in both_splits(tmp_path) for line in text.split("\n")]
    assert {*lines, "日本語 é", "plain", "packed"} <= {*found}
    val = read_documents(tmp_path / "out", "toy", "val")
    assert manifest["val_bytes"] == sum(len(text.encode()) for text in val)

    alone = written(tmp_path / "alone.txt", text_in(encoding).encode(encoding))
    said, _ = prepared(tmp_path, alone, expect=2)
    assert "alone.txt: line 1 is not UTF-8" in said and "iconv -f LATIN1 -t UTF-8 alone.txt" in said
    prepared(tmp_path, alone, more=["--encoding", encoding])
    assert sorted("".join(both_splits(tmp_path))) == sorted(text_in(encoding))


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "rows"])
def test_rows_in_another_encoding(tmp_path, name):
    texts = [text.replace("ab", "é") + "é" for text in make_texts(60)]
    texts = [text.encode("latin-1", "ignore").decode("latin-1") for text in texts]
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    content = {"x.json": "[" + ",".join(rows) + "]", "x.csv": "text\n" + "".join(
        '"' + text.replace('"', '""') + '"\n' for text in texts)}.get(name, "\n".join(rows))
    path = written(tmp_path / name, content.encode("latin-1"))
    said, _ = prepared(tmp_path, path, expect=2)
    assert "not UTF-8" in said and "--encoding latin-1" in said
    prepared(tmp_path, path, more=["--encoding", "latin-1"])
    assert sorted(both_splits(tmp_path)) == sorted({*texts})


def test_what_is_no_encoding_and_what_does_not_fit(tmp_path):
    path = written(tmp_path / "x.txt", b"a \xff\xff b\n" * 999)
    for name in ("klingon", "base64", "rot13", "\udcff"):
        said, _ = prepared(tmp_path, path, expect=2, more=["--encoding", name])
        assert "--encoding" in said and "latin-1" in said
    said, _ = prepared(tmp_path, path, expect=2, more=["--encoding", "shift_jis"])
    assert "is not whole SHIFT_JIS" in said
    assert "goes with --text" in run("--encoding", "latin-1", "--out", tmp_path / "out", expect=2)
    assert "go with --text or --parquet" in run("--keep-marks", "--out", tmp_path / "out", expect=2)
    said, _ = prepared(tmp_path, path, expect=2, more=["--encoding", "utf-8"])
    assert "line 1 is not UTF-8" in said


NO_TEXT = {"zeros": bytes(9999), "all bytes": bytes(range(256)) * 40,
           "noise": random.Random(0).randbytes(9999),
           "numbers": np.random.default_rng(0).normal(size=2000).tobytes(), "a short one": b"\xff\xfe\0",
           "packed": lzma.compress(random.Random(0).randbytes(999), format=lzma.FORMAT_ALONE)}


@pytest.mark.parametrize("case", NO_TEXT)
def test_what_is_no_text_in_any_encoding(tmp_path, case):
    assert not inputs.may_be_text(written(tmp_path / "x", NO_TEXT[case]))


def test_damaged_utf_16_is_text(tmp_path):
    assert inputs.may_be_text(written(tmp_path / "x", ("line é\n" * 99).encode("utf-16") + b"\n"))


# --- little text -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", ["a file", "a folder", "without lines"])
@pytest.mark.parametrize("size", [2560, 5000, 24_000, 80_000, 300_000])
def test_about_a_tenth_of_a_small_text_is_val(tmp_path, size, form):
    """And no other number is said."""
    text = lines_of_words(size, 3).encode()[:size].decode(errors="ignore")
    if form == "without lines":
        text = text.replace("\n", " ")
    path = written(tmp_path / "in/x.txt", text)
    if form == "a folder":
        path = tmp_path / "in"
        third = -(-len(text) // 3)
        for number in range(3):
            written(path / ("x.txt", "y.txt", "z.txt")[number], text[number * third:][:third])
    said, manifest = prepared(tmp_path, path, vocab_size=264)
    total = manifest["val_bytes"] + manifest["train_bytes"]
    assert 0.05 < manifest["val_bytes"] / total <= 0.15 and total > 0.99 * len(text.encode())
    share = f"{manifest['val_bytes'] / total:.0%}"
    assert f"val is {manifest['val_bytes']:,} of {total:,} bytes ({share})" in said and "warning" not in said
    assert f"val: {manifest['val_docs']} documents, {manifest['val_bytes']:,} bytes" in said
    if size == 24_000:
        assert "cut into documents of about 600 bytes" in said


def test_a_small_val_of_a_larger_text(tmp_path):
    path = written(tmp_path / "x.txt", lines_of_words(200_000, 3))
    said, manifest = prepared(tmp_path, path, more=["--val-bytes", 2000])
    assert 2000 <= manifest["val_bytes"] <= 3000 and "about 500 bytes" in said
    said, manifest = prepared(tmp_path, path, more=["--val-bytes", 20_000])
    assert 20_000 <= manifest["val_bytes"] <= 30_000


ROW = json.dumps({"text": "a row of text"}) + "\n"
TOO_LITTLE = [  # name, content, words
    ("x.txt", "alone", ["5 bytes of text are too few", "2,560 are enough"]),
    ("x.txt", "a line\n" * 300, ["2,100 bytes of text are too few", "2,560 are enough"]),
    ("x.jsonl", ROW, ["the input is one document, of 13 bytes", "val needs one of its own"]),
    ("x.jsonl", ROW * 50, ["the input is one document, of 13 bytes"]),
    ("x.json", '[{"text": "one"}]', ["one document, of 3 bytes"]),
    ("x.csv", "text\none\n", ["one document, of 3 bytes"]), ("x.txt", "", ["there is no text"])]


@pytest.mark.parametrize("name, content, words", TOO_LITTLE)
def test_too_little_text_is_refused_in_words_about_that(tmp_path, name, content, words):
    said, manifest = prepared(tmp_path, written(tmp_path / name, content), expect=2, vocab_size=260)
    assert manifest is None and all(part in said for part in words), said
    assert "tenth of the corpus" not in said


@pytest.mark.parametrize("number", [2, 3, 5])
def test_few_rows_are_warned_about_with_numbers_that_hold(tmp_path, number):
    rows = "".join(json.dumps({"text": lines_of_words(4000, i)}) + "\n" for i in range(number))
    said, manifest = prepared(tmp_path, written(tmp_path / "x.jsonl", rows))
    total = manifest["val_bytes"] + manifest["train_bytes"]
    assert manifest["val_docs"] == 1
    val = manifest["val_bytes"]
    assert f"warning: val is {val:,} of {total:,} bytes ({val / total:.0%})" in said or number == 5


# --- machines ----------------------------------------------------------------------------------------------
def cgroups(root, groups, **files):
    """A system's root whose process is in these groups, with these files of limits."""
    written(root / "proc/self/cgroup", groups)
    for name, content in files.items():
        written(root / "sys/fs/cgroup" / name.replace("__", "/"), content)
    return root


LIMITS = {  # /proc/self/cgroup, files of limits, processors of 64
    "none": ("0::/\n", {}, 64),
    "version 2": ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
    "version 2, no limit": ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
    "version 2, a part": ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
    "version 2, less than one": ("0::/\n", {"cpu.max": "20000 100000\n"}, 1),
    "version 2, a level above": ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
    "version 2, not shown in a container": ("0::/../../x\n", {"cpu.max": "400000 100000"}, 4),
    "damaged": ("x\n0::/\n4:cpu\n", {"cpu.max": "???"}, 64)}


@pytest.mark.parametrize("case", LIMITS)
def test_processors_that_cgroups_allow(tmp_path, case, monkeypatch):
    groups, files, expected = LIMITS[case]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert inputs.usable_cpus(cgroups(tmp_path, groups, **files)) == expected
    assert inputs.usable_cpus(tmp_path / "nothing there") == 64
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    assert inputs.usable_cpus(tmp_path) == 1


def test_workers_and_threads_are_as_many_as_may_be_used(tmp_path, monkeypatch):
    """Not the machine's processors."""
    monkeypatch.setattr(os, "cpu_count", lambda: 99)
    monkeypatch.setattr(inputs, "usable_cpus", lambda: 3)
    monkeypatch.setattr(prepare, "MUCH_TEXT", 0)
    request = prepare.Request("toy", [], [prepare.Input(written(tmp_path / "a.txt", "text"), "text")])
    assert prepare.processes_for(request) == 3
    monkeypatch.setattr(prepare, "MUCH_TEXT", 9)
    assert prepare.processes_for(request) == 1


def no_semaphores(*_, **__):
    raise OSError(38, "Function not implemented")


def no_module(*_, **__):
    raise ImportError("This platform lacks a functioning sem_open implementation")


def too_few(*_, **__):
    raise NotImplementedError("system provides too few semaphores (5 available, 256 necessary)")


@pytest.mark.parametrize("place, name, failing", [
    (multiprocessing.synchronize.SemLock, "__init__", no_semaphores),
    (multiprocessing.synchronize.SemLock, "__init__", no_module),
    (process, "_check_system_limits", too_few), (process, "_check_system_limits", no_module)])
def test_a_system_without_semaphores(tmp_path, monkeypatch, place, name, failing):
    """As AWS Lambda, some containers and sandboxes: one process, which a line says; the same dataset."""
    for number in range(2):
        pq.write_table(pa.table({"text": make_texts(40, seed=number)}), tmp_path / f"{number}.parquet")
    command = ["--parquet", tmp_path / "0.parquet", tmp_path / "1.parquet", "--name", "toy",
               "--vocab-size", 400]
    run(*command, "--processes", 1, "--out", tmp_path / "one")
    with monkeypatch.context() as context:
        context.setattr(place, name, failing)
        said = run(*command, "--processes", 2, "--out", tmp_path / "none")
    assert said.count("working in one process, since this system has no semaphores") > 0
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "none")


def test_the_manifest_has_the_bytes_of_the_text(tmp_path):
    """Whatever the tokenizer has pieces for: no token is unknown, and decoding gives the text."""
    texts = [text + "".join(chr(0x4E00 + (37 * i * j) % 9000) for j in range(9)) for i, text in
             enumerate(make_texts(90))] + ["\0\x01\x7f", "\U0010ffff\ue000", "\u2581\u2581"]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    _, manifest = prepared(tmp_path, written(tmp_path / "x.jsonl", lines), vocab_size=300)
    val = read_documents(tmp_path / "out", "toy", "val")
    assert manifest["val_bytes"] == sum(len(text.encode()) for text in val)
    assert manifest["tokenizer"]["lossless"] is True
    assert sorted(val + read_documents(tmp_path / "out", "toy", "train")) == sorted(texts)
    tokens = np.fromfile(Path(tmp_path, "out/datasets/toy/toy_val_000000.bin"), "<u2", offset=1024)
    assert not (tokens == 0).any()
