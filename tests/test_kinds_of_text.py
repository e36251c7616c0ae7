"""Plain text as people have it: marks between its documents, other encodings, very little of it; and machines
with few processors or without semaphores."""
import gzip
import json
import lzma
import os
import random
import re
from collections import Counter

import numpy as np

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import inputs, prepare
from test_overlap import lines_of_words
from test_prepare import both_splits, make_texts, prepared, run, written

STORIES = [lines_of_words(200 + 37 * i % 700, 1000 + i).rstrip("\n") + "\n" for i in range(300)]


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
    said, _ = prepared(tmp_path, "--text", place)
    found = [text.replace("\r\n", "\n").strip("\n") for text in both_splits(tmp_path / "out")]
    assert sorted(filter(None, found)) == sorted(story.strip("\n") for story in STORIES)
    marks = 2 * len(STORIES) if case == "doubled" else len(STORIES)
    counted = int(re.search(r"(\d+) marks such as <\|endoftext\|> left out", said)[1])
    assert marks - 2 <= counted <= marks        # a join has fewer


@pytest.mark.parametrize("case", ["a line", "rows with a mark each", "</s>"])
def test_marks_can_be_kept(tmp_path, case):
    name, content = JOINED[case]
    said, _ = prepared(tmp_path, "--text", written(tmp_path / name, content), "--keep-marks")
    kept = "".join(both_splits(tmp_path / "out"))
    assert "marks such as" not in said
    assert kept.count("</s>" if case == "</s>" else "<|endoftext|>") >= len(STORIES) - 1


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


# --- other encodings ---------------------------------------------------------------------------------------
LETTERS = {"latin-1": "éèüñß", "cp1252": "é“”—€", "cp1251": "жщыяю", "koi8-r": "жщыяю",
           "gb18030": "中文字符的", "shift_jis": "日本語のテ"}


def text_in(encoding):
    """Lines whose letters the encoding has."""
    return lines_of_words(30_000, 7).translate(str.maketrans("abcdeé", LETTERS[encoding] + "x"))


@pytest.mark.parametrize("encoding", ["latin-1", "koi8-r", "shift_jis"])
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
    said, _ = prepared(tmp_path, "--text", folder)
    assert "left out: b0.txt, b1.txt, b2.txt and 3 more: text that is not UTF-8 (6 files)" in said
    assert "--encoding latin-1 reads it" in said and "`iconv -f LATIN1 -t UTF-8 b0.txt > NEW`" in said
    said, manifest = prepared(tmp_path, "--text", folder, "--encoding", encoding)
    assert "not UTF-8" not in said and "left out: photo.jpg: no text" in said
    found = [line for text in both_splits(tmp_path / "out") for line in text.split("\n")]
    assert {*lines, "日本語 é", "plain", "packed"} <= {*found}

    alone = written(tmp_path / "alone.txt", text_in(encoding).encode(encoding))
    said, _ = prepared(tmp_path, "--text", alone, expect=2)
    assert "alone.txt is not whole UTF-8" in said and "iconv -f LATIN1 -t UTF-8 alone.txt" in said
    prepared(tmp_path, "--text", alone, "--encoding", encoding)
    assert sorted("".join(both_splits(tmp_path / "out"))) == sorted(text_in(encoding))


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "rows"])
def test_rows_in_another_encoding(tmp_path, name):
    texts = [text.replace("ab", "é") + "é" for text in make_texts(60)]
    texts = [text.encode("latin-1", "ignore").decode("latin-1") for text in texts]
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    content = {"x.json": "[" + ",".join(rows) + "]", "x.csv": "text\n" + "".join(
        '"' + text.replace('"', '""') + '"\n' for text in texts)}.get(name, "\n".join(rows))
    path = written(tmp_path / name, content.encode("latin-1"))
    said, _ = prepared(tmp_path, "--text", path, expect=2)
    assert "not whole UTF-8" in said and "--encoding latin-1" in said
    prepared(tmp_path, "--text", path, "--encoding", "latin-1")
    assert sorted(both_splits(tmp_path / "out")) == sorted({*texts})


def test_what_is_no_encoding_and_what_does_not_fit(tmp_path):
    path = written(tmp_path / "x.txt", b"a \xff\xff b\n" * 999)
    for name in ("klingon", "base64", "\udcff"):
        said, _ = prepared(tmp_path, "--text", path, "--encoding", name, expect=2)
        assert "--encoding" in said and "latin-1" in said
    said, _ = prepared(tmp_path, "--text", path, "--encoding", "shift_jis", expect=2)
    assert "is not whole SHIFT_JIS" in said


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
@pytest.mark.parametrize("size", [2560, 24_000, 300_000])
def test_about_a_tenth_of_a_small_text_is_val(tmp_path, size, form):
    """And no other number is said."""
    text = lines_of_words(size, 3).encode()[:size].decode(errors="ignore")
    if form == "without lines":
        text = text.replace("\n", " ")
    path = written(tmp_path / "in/x.txt", text)
    if form == "a folder":
        path = tmp_path / "in"
        third = -(-len(text) // 3)
        for number, name in enumerate(("x.txt", "y.txt", "z.txt")):
            written(path / name, text[number * third:][:third])
    said, manifest = prepared(tmp_path, "--text", path, vocab_size=264)
    val = manifest["val_bytes"]
    total = val + manifest["train_bytes"]
    assert 0.05 < val / total <= 0.15 and total > 0.99 * len(text.encode())
    assert f"val is {val:,} of {total:,} bytes ({val / total:.0%})" in said and "warning" not in said
    assert "cut into documents of about 600 bytes" in said or size != 24_000


# --- machines ----------------------------------------------------------------------------------------------
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
    assert inputs.usable_cpus(tmp_path) == 64
    written(tmp_path / "proc/self/cgroup", groups)
    for name, content in files.items():
        written(tmp_path / "sys/fs/cgroup" / name, content)
    assert inputs.usable_cpus(tmp_path) == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    assert inputs.usable_cpus(tmp_path) == 1


def test_workers_are_as_many_as_may_be_used(tmp_path, monkeypatch):
    """Not the machine's processors."""
    monkeypatch.setattr(inputs, "usable_cpus", lambda: 3)
    monkeypatch.setattr(prepare, "MUCH_TEXT", 0)
    request = prepare.Request("toy", [], [prepare.Input(written(tmp_path / "a.txt", "text"), "text")])
    assert prepare.processes_for(request) == 3
    monkeypatch.setattr(prepare, "MUCH_TEXT", 9)
    assert prepare.processes_for(request) == 1


def test_a_system_without_semaphores(tmp_path, monkeypatch):
    """As AWS Lambda, some containers and sandboxes."""
    def fail(*_):
        raise ImportError("This platform lacks a functioning sem_open implementation")

    monkeypatch.setattr(prepare, "ProcessPoolExecutor", fail)
    for number in range(2):
        pq.write_table(pa.table({"text": make_texts(4, seed=number)}), tmp_path / f"{number}.parquet")
    said = run("--parquet", tmp_path, "--processes", 2, "--name", "toy", "--out", tmp_path / "out", expect=2)
    assert "no semaphores" in said and "--processes 1" in said
