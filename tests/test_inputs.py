"""data/inputs.py and what data/prepare.py makes of it: the same documents in every form and encoding, val as
a sample, and no open() of input that goes around."""
import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fork_server
from data import inputs, prepare
from helpers import sources
from records.judge import logs
from test_prepare import make_texts, prepared, read, snapshot, written

TEXTS = make_texts(300)
MARKED = {"utf-8": codecs.BOM_UTF8, "utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE,
          "utf-32-le": codecs.BOM_UTF32_LE, "utf-32-be": codecs.BOM_UTF32_BE}
ENCODINGS = [*MARKED, "utf-8 unmarked", "utf-16-le unmarked", "utf-16-be unmarked", "utf-32-le unmarked",
             "utf-32-be unmarked"]


def encoded(text, encoding):
    """Text as bytes, behind the encoding's mark unless it is `unmarked`."""
    name, _, unmarked = encoding.partition(" ")
    return (b"" if unmarked else MARKED[name]) + text.encode(name)


def lines_of(texts):
    return "".join(json.dumps({"id": 7, "text": text}) + "\n" for text in texts)


def write_table(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": pa.array(texts, pa.string()), "n": range(len(texts))}), path)
    return path


# --- one set of documents in every form ------------------------------------------------------------------
def parts(texts=TEXTS):
    return texts[::3], texts[1::3], texts[2::3]


def joined_with_marks(folder):
    """As `cat` makes it of files that each begin with a mark."""
    return written(folder / "x.jsonl", b"".join(encoded(lines_of(part), "utf-8") for part in parts()))


def folder_of(suffix, pack=lambda raw: raw):
    def write(folder):
        for i, part in enumerate(parts()):
            written(folder / f"deep/{i}" / f"part{suffix}", pack(lines_of(part).encode()))
        return folder
    return write


def folder_of_tables(folder):
    for i, part in enumerate(parts()):
        write_table(folder / f"{i}.parquet", part)
    return folder


def folder_of_texts(folder):
    """With every encoding, and suffixes of text and of none."""
    for i, text in enumerate(TEXTS):
        name = f"{i % 7}/{i}{('.txt', '.md', '', '.TXT', '.py')[i % 5]}"
        written(folder / name, encoded(text, ENCODINGS[i % 6 if text.isascii() else i % 5]))
    return folder


def linked(folder):
    """Two thirds lie elsewhere, one as in the hub's cache; links lead back, up and to the same place."""
    for name, part in zip(("in/0.jsonl", "out/1.jsonl", "blobs/4f5e"), parts()):
        written(folder / name, lines_of(part))
    os.symlink("../blobs/4f5e", folder / "out/2.jsonl")
    os.symlink(folder / "out", folder / "in/a")
    os.symlink(folder / "out", folder / "in/b")
    os.symlink(folder / "in", folder / "out/loop")
    os.symlink(folder / "in/0.jsonl", folder / "in/again.jsonl")
    os.symlink("itself", folder / "in/itself")
    return folder / "in"


def table_of(texts, delimiter=",", ends="\r\n"):
    """As spreadsheets write it: quotes where they are needed, line ends within texts as they are."""
    lines = io.StringIO(newline="")
    rows = csv.writer(lines, delimiter=delimiter, lineterminator=ends)
    rows.writerow(["id", "text", "note"])
    rows.writerows([[i, text, f'a "note"{delimiter} {i}'] for i, text in enumerate(texts)])
    return lines.getvalue()


def folder_of_csv(folder):
    for i, part in enumerate(parts()):
        written(folder / f"{i}/{'abc'[i]}.{('csv', 'TSV', 'csv')[i]}", table_of(part, ",\t;"[i]))
    return folder


def desktop_folder(folder):
    """Files of several forms, an empty one, and what desktops, archives, editors, git and Spark leave beside
    them."""
    folder_of(".jsonl")(folder)
    written(folder / "deep/0/part.jsonl", "")
    write_table(folder / "deep/f.parquet", parts()[0][:50])
    written(folder / "deep/e.NDJSON.xz", lzma.compress(lines_of(parts()[0][50:]).encode()))
    names = ["Thumbs.db", "desktop.ini", "Desktop.ini", "Icon\r", "__MACOSX/deep/0/part.jsonl",
             "._part.jsonl", "deep/0/part.jsonl:Zone.Identifier", "deep/1/part.jsonl~", "~$part.docx",
             "_SUCCESS", ".DS_Store", "_metadata", "_committed_123", "$RECYCLE.BIN/x.txt",
             "@eaDir/part.jsonl", "CACHEDIR.TAG", ".git/config",
             ".cache/x.parquet", "__pycache__/x.txt"]
    for name in names:
        written(folder / name, "[ZoneTransfer]\nZoneId=3\n")
    return folder


def pipe_of(pack=lambda raw: raw):
    """A pipe that can be read once only."""
    def write(folder):
        os.mkfifo(folder / "pipe")
        content = pack(lines_of(TEXTS).encode())
        threading.Thread(target=lambda: (folder / "pipe").write_bytes(content), daemon=True).start()
        return folder / "pipe"
    return write


def as_file(name, content):
    return lambda folder: written(folder / name, content)


ROWS = [{"text": text} for text in TEXTS]
LONG_NUMBERS = lines_of(TEXTS).replace('{"id": 7', '{"id": -' + "7" * 5000)
FORMS = {
    **{f"jsonl {encoding}": as_file("x.jsonl", encoded(lines_of(TEXTS), encoding)) for encoding in ENCODINGS},
    "joined, with marks": joined_with_marks,
    "crlf": as_file("x.jsonl", lines_of(TEXTS).replace("\n", "\r\n")),
    "cr": as_file("x.jsonl", lines_of(TEXTS).replace("\n", "\r")),
    "blank lines": as_file("x.jsonl", "\n \r\n" + lines_of(TEXTS).replace("\n", "\n\t\n")),
    "not escaped": as_file("x.jsonl", "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n"
                                              for text in TEXTS)),
    "null and empty rows": as_file("x.jsonl", '{"text": null}\n{"text": ""}\n' + lines_of(TEXTS)),
    "upper case": as_file("X.JSONL", lines_of(TEXTS)),
    "ndjson": as_file("x.ndjson", lines_of(TEXTS)),
    "no suffix": as_file("train", lines_of(TEXTS)),
    "gz": as_file("x.jsonl.gz", gzip.compress(lines_of(TEXTS).encode())),
    "gz of two members": as_file("x.jsonl.gz", b"".join(gzip.compress(lines_of(part).encode())
                                                        for part in (TEXTS[:90], TEXTS[90:]))),
    "gz by its bytes": as_file("x.jsonl", gzip.compress(lines_of(TEXTS).encode())),
    "gz of utf-16": as_file("x.jsonl.gz", gzip.compress(encoded(lines_of(TEXTS), "utf-16-be"))),
    "xz": as_file("x.jsonl.xz", lzma.compress(lines_of(TEXTS).encode())),
    "json": as_file("x.json", json.dumps(ROWS)),
    "json, marked": as_file("x.json", encoded(json.dumps(ROWS, indent=1), "utf-16-le")),
    "json of lines": as_file("x.json", lines_of(TEXTS)),
    "json, packed": as_file("x.json.gz", gzip.compress(json.dumps(ROWS).encode())),
    "parquet": lambda folder: write_table(folder / "x.parquet", [None, *TEXTS, ""]),
    "parquet by its bytes": lambda folder: write_table(folder / "x", TEXTS),
    "folder of jsonl": folder_of(".jsonl"), "folder of jsonl.gz": folder_of(".jsonl.gz", gzip.compress),
    "folder of json": folder_of(".json"), "folder of parquet": folder_of_tables,
    "folder of no suffix": folder_of(""),
    "folder of texts": folder_of_texts, "linked": linked,
    "csv": as_file("x.csv", table_of(TEXTS)), "csv, lf": as_file("x.csv", table_of(TEXTS, ends="\n")),
    "csv, marked": as_file("x.csv", encoded(table_of(TEXTS), "utf-8")),
    "csv of utf-16": as_file("x.csv", encoded(table_of(TEXTS), "utf-16-le")),
    "csv of semicolons": as_file("X.CSV", table_of(TEXTS, ";")),
    "csv of a column": as_file("x.csv", "text\n" + "".join(f'"{text}"\n' for text in TEXTS)),
    "csv with empty rows": as_file("x.csv", table_of([*TEXTS[:9], "", *TEXTS[9:]]) + "\r\n"),
    "csv.gz": as_file("x.csv.gz", gzip.compress(table_of(TEXTS).encode())),
    "tsv": as_file("x.tsv", table_of(TEXTS, "\t")), "folder of csv": folder_of_csv,
    "long integers": as_file("x.jsonl", LONG_NUMBERS),
    "long integers in a list": as_file("x.json", "[" + ",".join(LONG_NUMBERS.splitlines()) + "]"),
    "long integers, no suffix": as_file("x", LONG_NUMBERS),
    "desktop's files": desktop_folder,
    "pipe": pipe_of(), "pipe of gz": pipe_of(gzip.compress),
    "pipe of utf-16": pipe_of(lambda raw: encoded(raw.decode(), "utf-16-le"))}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_documents_of_the_plain_file(tmp_path, form):
    path = FORMS[form](tmp_path)
    assert sorted(read(path)) == sorted(TEXTS)


@pytest.mark.parametrize("encoding, pack", [*((encoding, None) for encoding in ENCODINGS[:6]),
                                            ("utf-16-le", gzip.compress), ("utf-8", lzma.compress)])
def test_a_text_file_is_cut_alike_in_every_encoding(tmp_path, encoding, pack):
    text = "\n\n".join(TEXTS)
    plain = read(written(tmp_path / "plain.txt", text))
    raw = encoded(text, encoding)
    name = {None: "x.txt", gzip.compress: "x.txt.gz", lzma.compress: "x.txt.xz"}[pack]
    assert read(written(tmp_path / name, pack(raw) if pack else raw)) == plain
    assert "".join(plain).find("\ufeff") == -1 and len("".join(plain)) == len(text)


def test_what_is_no_text_in_another_encoding():
    """Tables of small numbers have NULs too."""
    for kind in ("<u2", ">u2", "<u4", ">u4", "<f8"):
        assert inputs.encoding_of(np.arange(1000).astype(kind).tobytes()) == ("utf-8", 0)
        assert inputs.encoding_of(np.zeros(1000, kind).tobytes()) == ("utf-8", 0)
    assert inputs.encoding_of("nul\0nul, a\0b".encode() * 20) == ("utf-8", 0)


# --- what is counted, named or refused -------------------------------------------------------------------
def test_rows_without_text_are_counted_in_every_form(tmp_path):
    rows = [None, "", *TEXTS, None]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in rows)
    forms = [written(tmp_path / "x.jsonl", lines), write_table(tmp_path / "x.parquet", rows),
             written(tmp_path / "x.json", json.dumps([{"text": text} for text in rows]))]
    for path in forms:
        assert "3 empty or null texts skipped" in prepared(tmp_path, "--text", path)[0]


def test_what_is_left_out_is_named(tmp_path):
    """Links to nowhere, pipes and archives in a folder; files of other forms beside parquet."""
    folder = tmp_path / "in"
    folder_of(".jsonl")(folder)
    os.symlink(tmp_path / "nowhere", folder / "broken.jsonl")
    os.mkfifo(folder / "pipe.jsonl")
    written(folder / "x.zip", b"PK\x03\x04" + bytes(60))
    written(folder / "y.tar.gz", gzip.compress(b"a tar of texts"))
    said, manifest = prepared(tmp_path, "--text", folder)
    assert "left out: broken.jsonl, pipe.jsonl, x.zip and 1 more: no text, archives or links" in said
    assert manifest["val_docs"] + manifest["train_docs"] == 300
    folder_of_tables(folder / "tables")
    said, _ = prepared(tmp_path, "--parquet", folder, "--val-bytes", 9000)
    assert "left out: part.jsonl, part.jsonl, part.jsonl: not parquet" in said


def test_a_csv_without_text_in_a_folder_is_text(tmp_path):
    """As .json that holds something else."""
    written(tmp_path / "in/a.csv", "date,price\n1,2\n")
    written(tmp_path / "in/b.txt", "b")
    assert sorted(read(tmp_path / "in")) == ["b", "date,price\n1,2\n"]


def test_the_column_of_a_csv_is_what_it_was(tmp_path):
    """Line ends, quotes, blanks and long texts within cells."""
    texts = ['a "b" c', "x\r\ny\n\nz", "  ,;\t  ", "\u2581", '"', "x" * 500_000, "e\u0301\U0001F600"]
    for delimiter in ",\t;":
        assert read(written(tmp_path / "x.csv", table_of(texts, delimiter))) == texts


def test_logs_beside_the_desktops_files(tmp_path):
    """The walk is also that of records/."""
    for name in ("a.log", "b.txt", "b.txt:Zone.Identifier", "__MACOSX/a.log", "._a.log", "a.log~"):
        written(tmp_path / name, "x")
    assert [path.name for path in logs.find_logs(tmp_path)] == ["a.log", "b.txt"]


def test_text_that_looks_like_rows_is_said(tmp_path):
    for text, said in (lines_of(TEXTS), True), ("\n".join(TEXTS), False):
        path = written(tmp_path / "x.txt", text)
        assert ("x.txt looks like JSON lines" in prepared(tmp_path, "--text", path)[0]) == said


PLAIN_ROWS = lines_of(TEXTS[:30])
ROW = json.dumps({"text": "a row of text"}) + "\n"
REFUSED = {     # files, words of the sentence
    "not closed": ({"a.jsonl": PLAIN_ROWS + '{"text": \n'}, ["a.jsonl", "line 31"]),
    "a list": ({"a.jsonl": PLAIN_ROWS + '["text"]\n'}, ["a.jsonl", "line 31"]),
    "nested": ({"a.jsonl": PLAIN_ROWS + "[" * 100_000}, ["a.jsonl", "line 31"]),
    "no utf-8": ({"a.jsonl": PLAIN_ROWS.encode() + b'{"text": "\xff"}\n'}, ["a.jsonl", "not whole UTF-8"]),
    "no utf-8 in text": ({"a.txt": b"one\ntwo \xff\n"}, ["a.txt", "not whole UTF-8", "iconv"]),
    "xz cut": ({"a.jsonl.xz": lzma.compress(PLAIN_ROWS.encode())[:-30]}, ["a.jsonl.xz", "damaged"]),
    "no rows with text": ({"a.jsonl": '{"text": ""}\n'}, ["no text"]),
    "nothing": ({"a.txt": ""}, ["no text"]),
    "a word": ({"a.txt": "alone"}, ["5 bytes of text are too few", "2,560 are enough"]),
    "some lines": ({"a.txt": "a line\n" * 300}, ["2,100 bytes of text are too few", "2,560 are enough"]),
    "a row": ({"a.jsonl": ROW}, ["is one document, of 13 bytes", "val needs one of its own"]),
    "a row, often": ({"a.jsonl": ROW * 50}, ["the input is one document, of 13 bytes"]),
    "a row of a list": ({"a.json": '[{"text": "one"}]'}, ["one document, of 3 bytes"]),
    "a row of a csv": ({"a.csv": "text\none\n"}, ["one document, of 3 bytes"]),
    "missing key": ({"a.jsonl": PLAIN_ROWS + '{"txt": "x"}\n'}, ["a.jsonl", "line 31"]),
    "number": ({"a.jsonl": PLAIN_ROWS + '{"text": 1}\n'}, ["a.jsonl", "line 31"]),
    "list of strings": ({"a.json": '["x", "y"]'}, ["a.json", "string `text`"]),
    "json of something else": ({"a.json": '{"a": [1, 2]}'}, ["a.json", "string `text`"]),
    "utf-16 cut": ({"a.jsonl": encoded(PLAIN_ROWS, "utf-16-le")[:-1]}, ["a.jsonl", "UTF-16"]),
    "utf-16 cut in text": ({"a.txt": encoded("x\n" * 999, "utf-16-be")[:-1]}, ["a.txt", "UTF-16"]),
    "gz cut": ({"a.txt.gz": gzip.compress("\n".join(TEXTS).encode())[:-30]}, ["a.txt.gz", "damaged"]),
    "bz2": ({"a.jsonl.bz2": bz2.compress(PLAIN_ROWS.encode())}, ["a.jsonl.bz2", "bz2"]),
    "bz2 by its bytes": ({"a.jsonl": bz2.compress(PLAIN_ROWS.encode())}, ["a.jsonl", "bz2"]),
    "folder, zst": ({"d/a.jsonl.zst": b"\x28\xb5\x2f\xfd" + bytes(9), "d/b.txt": "x"}, ["a.jsonl.zst"]),
    "folder, other rows": ({"d/a.jsonl": '{"prompt": "x"}\n', "d/b.txt": "x"}, ["a.jsonl", "line 1"]),
    "folder, damaged parquet": ({"d/a.parquet": b"PAR1" + bytes(50), "d/b.txt": "x"}, ["a.parquet"]),
    "csv without text": ({"a.csv": "id,words\n1,x\n" * 9}, ["a.csv", "no column `text`", ".txt"]),
    "csv with a short row": ({"a.csv": table_of(TEXTS[:3]) + "5\r\n"}, ["a.csv", "has no `text`"]),
    "csv cut within quotes": ({"a.csv": table_of(TEXTS[:3]) + '9,"x'}, ["a.csv", "is not CSV"]),
    "csv that is no UTF-8": ({"a.csv": table_of(TEXTS).encode() + b"7,\xff\r\n"}, ["a.csv", "UTF-8"]),
    "folder, csv cut": ({"d/a.csv": table_of(TEXTS[:3]) + '9,"x', "d/b.txt": "x"}, ["a.csv", "is not CSV"]),
    "a long integer as text": ({"a.jsonl": PLAIN_ROWS + '{"text": ' + "7" * 5000 + "}\n"},
                               ["a.jsonl", "line 31", "string `text`"]),
    "a pointer of LFS": ({"a.jsonl": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"},
                         ["a.jsonl", "git lfs pull"]),
    "folder, a pointer of LFS": ({"d/a.parquet": "version https://git-lfs.github.com/spec/v1\n",
                                  "d/b.txt": "x"}, ["a.parquet", "git lfs pull"]),
    "hidden files alone": ({"d/.a.txt": "x\n" * 999}, ["no text"])}


@pytest.mark.parametrize("case", REFUSED)
def test_input_that_is_refused_in_a_sentence(tmp_path, case):
    files, words = REFUSED[case]
    for name, content in files.items():
        written(tmp_path / "in" / name, content)
    inside = sorted((tmp_path / "in").iterdir())
    said, _ = prepared(tmp_path, "--text", *inside, expect=2)
    assert all(word in said for word in words), said
    assert not snapshot(tmp_path / "out")


def test_an_empty_device_and_a_name_that_is_no_utf_8(tmp_path):
    assert "no text" in prepared(tmp_path, "--text", "/dev/null", expect=2)[0]
    odd = tmp_path / os.fsdecode(b"d\xff")
    odd.mkdir()
    assert "no text" in prepared(tmp_path, "--text", odd, expect=2)[0]
    os.symlink("nowhere", odd / os.fsdecode(b"l\xff"))
    command = [fork_server.start(), prepare.__file__, "--text", odd, "--name", "toy", "--out", tmp_path]
    env = {"PATH": os.environ["PATH"], "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env)
    assert done.returncode == 2 and "left out: l\\udcff: " in done.stdout
    assert done.stderr == "prepare: there is no text in the input\n"
    shutil.rmtree(odd)
    assert "no such file" in prepared(tmp_path, "--text", odd, expect=2)[0]


# --- val -------------------------------------------------------------------------------------------------
def val_of(tmp_path, texts, capsys):
    """(sizes of val's documents, what was said)"""
    capsys.readouterr()
    files = prepare.find_files([written(tmp_path / "x.jsonl", lines_of(texts))])
    corpus = prepare.Corpus(prepare.Request("x", [], files, frozen=True), 1)
    return corpus.sizes[corpus.order[:corpus.n_val]], capsys.readouterr().out


def test_val_of_long_documents(tmp_path, capsys):
    """A single one is train, whatever its hash, and a few alone are warned about with numbers; many give a
    sample of them."""
    sizes, said = val_of(tmp_path, [*TEXTS, "ab" * 500_000], capsys)
    assert len(sizes) > 20 and sizes.max() < 10_000 and "warning: 1 documents of over" in said
    books = [f"{i} line\n" * 30_000 for i in range(40)]
    sizes, said = val_of(tmp_path, books[:3], capsys)
    assert len(sizes) == 1 and f"warning: val is {sizes[0]:,} of" in said
    sizes, said = val_of(tmp_path, books + TEXTS, capsys)
    assert len(sizes) > 3 and sizes.max() > 200_000 and "warning" not in said


# --- nothing goes around ---------------------------------------------------------------------------------
READS = re.compile(r"(?<!inputs\.)\b(?:open|read_text|read_bytes|fromfile|loadtxt|genfromtxt)"
                   r"\((?!.*[\"'](?:[wxa]b?|w\+b)[\"'])")
# A tar that git archives; a lock; what an exported model.py does. Token shards are numbers: np.memmap
ALLOWED = ("tarfile.open(", "os.open(", '"config.json").read_bytes(')


def test_every_input_of_data_and_records_goes_through_one_reader():
    planted = ["open(path)", "open(path, 'rb')", "path.read_text()", "gzip.open(raw)", "io.open(x, mode)",
               "Path(x).open()", "np.fromfile(path)", "open(path, 'r+')", "open(path, encoding='utf-8')"]
    fine = ["open(path, 'wb')", "inputs.read_text(path)", "open(path, mode='a')", "path.write_text('x')"]
    assert [text for text in planted if not READS.search(text)] == []
    assert [text for text in fine if READS.search(text)] == []
    lines = [(path.name, line) for path in sources("data", "records") if path.name != "inputs.py"
             for line in path.read_text(encoding="utf-8").splitlines()]
    assert [found for found in lines if READS.search(found[1]) and not any(
        name in found[1] for name in ALLOWED)] == []
