"""Turn text into a tokenizer, token shards and a manifest that train_gpt.py reads.

    python data/prepare.py                                              the embedded corpus
    python data/prepare.py --text PATH... --name NAME --vocab-size N    one's own text
    python data/prepare.py --parquet PATH... --name NAME --vocab-size N [--val PATH] [--val-bytes N]

The embedded corpus is the .py source of four installed packages: the same text on every machine, without
a network. Your own text is files, folders of files, or a pipe: plain text, and with a key or column `text`
.jsonl, .json, .csv, .tsv and .parquet, all but the last also as .gz or .xz. inputs.py has what holds for all
of them: encodings, hidden files, links. A null or empty `text` is no
document, and their number is told; a missing one, or one that is no string, is refused.

A file counts once, however often and by whatever names it is given. What stands in val is cut out of train,
however both are cut into documents: see overlap.py. The embedded corpus is kept as it is.

The input is read in several passes, so memory does not grow with it: hash every document and split by hash,
collect val, look for it in train, train the tokenizer on a sample, encode to a scratch file, copy into shards
in hash order. The result depends on the set of documents, not on their order. The dataset's folder gets its
name last, so a folder with that name is complete. Much text is read and encoded file by file in several
processes, whose number does not change the result. Hashes and sizes of the documents stay in memory, about
65 MB per million documents.

--parquet is for many gigabytes of text: files, or folders of *.parquet, with a column `text`. The documents
keep their order, so they should be shuffled already. Val is the file that --val names, else the last one,
up to --val-bytes.
Exit status: 0 done or already there, 1 failed, 2 refused.
"""

import argparse
import atexit
import contextlib
import csv
import errno
import hashlib
import importlib.metadata
import io
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from array import array
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

try:
    import numpy as np
    import pyarrow
    import pyarrow.parquet as pq
    import sentencepiece as spm
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"prepare: the package {error.name} is missing: ./run.sh setup")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
if __name__ == "__main__":  # our modules are those of this checkout, whatever else the path holds
    sys.path[:] = [str(ROOT), *[folder for folder in sys.path if folder != str(HERE)]]
from data import inputs  # noqa: E402
from data import overlap  # noqa: E402

VOCAB_SIZE = 1024  # default; a small model has to learn the embedding within its two minutes
VAL_BYTES = 1_000_000  # default size of val in bytes of text; at most a tenth of the corpus
VAL_DOCUMENT_BYTES = 65_536  # a longer document goes to train, unless most of the text is in such documents
SHARD_TOKENS = 100_000_000  # tokens per shard, at most
SAMPLE_BYTES = 64_000_000  # text that the tokenizer is trained on; more than the embedded corpus has
TEXT_PIECE = 16 << 10  # a plain text file is cut into documents of about this many bytes
FOLDER_LIMIT = 1 << 20  # bytes; in a folder, a longer file is cut into documents
FOLDER_PIECE = 64 << 10  # of about this many bytes
BATCH_BYTES = 1_000_000  # text encoded in one call
MUCH_TEXT = 200_000_000  # bytes of files from which on several processes work
PARQUET_VAL_BYTES = 50_000_000  # val from parquet, at most; some 10M tokens of English at vocabulary 32,768
PARQUET_ROWS = 256  # rows read at a time
csv.field_size_limit(1 << 31)  # characters of one text in a .csv
BOS_ID = 1
SPACE_MARK = "\u2581"  # how SentencePiece writes a space; where a text has it, it is encoded as three bytes
RARE_SPACES = 0.002  # share of characters below which coverage might leave the space without a piece
LEAST_PIECE = 64  # bytes: small plain texts are cut as finely as this, so that val is about a tenth
LEAST_VOCAB = 260  # three reserved pieces, the bytes and the space

PACKAGES = ("numpy", "scipy", "sympy", "networkx")
# Left out of the packages: files that their builds write, a package's own __init__.py (wheel repair patches
# it on Windows), and what only some wheels hold (numpy.distutils, Python < 3.12).
LEFT_OUT = re.compile(r"[^/]+/__init__\.py|numpy/distutils/.*"
                      r"|(.*/)?(__config__|_?version|__version__|_distributor_init[^/]*)\.py")
GENERATED = re.compile(r"do not edit|generated by\b", re.IGNORECASE)
LICENCE = re.compile(r"licen[cs]e|copyright|warrant|redistribut|all rights reserved", re.IGNORECASE)


class DataError(Exception):
    """The input or the request cannot be used; the message is one sentence for the user."""


class Input(NamedTuple):
    """A file and how it is read."""
    path: Path
    kind: str  # a key of READERS
    piece: int = TEXT_PIECE  # bytes of the documents that plain text is cut into, about
    encoding: str = ""  # of a text that is not UTF-8, 16 or 32
    marks: bool = True  # <|endoftext|> and the like end documents, and are no text


@dataclass(frozen=True)
class Request:
    """What to build."""
    name: str
    source: list[str]  # where the text comes from, for the manifest
    files: list[Input]
    vocab_size: int = VOCAB_SIZE
    val_bytes: int = VAL_BYTES
    val_files: list[Input] | None = None
    repeated: int = 0  # inputs that are equal to others, or to val
    frozen: bool = False  # every document is kept as it is, though a part of it may be in val
    keeps_order: bool = False  # of the documents, in the shards; val_files are used up to val_bytes


def other_encodings(path: Path) -> str:
    """What to do with a file that is not UTF-8."""
    return (f"if it is Latin-1, --encoding latin-1 reads it, or convert it with `iconv -f LATIN1 -t UTF-8 "
            f"{path.name} > NEW`")


# --- documents: a reader takes an open binary file, its path and counts (see documents), and yields texts,
# --- None for a row whose text is null

# What dumps of text put between documents: anywhere but in quotes, or alone in a line; with the blanks around
# it and the line ends after it
MARKS = (b"<|endoftext|>", b"<|end_of_text|>", b"</s>", b"<eos>", b"<|eos|>", b"<EOS>", b"[EOS]")
MARK = re.compile(
    rb"(?:[ \t]{0,64}(?<![\"'`])<\|end(?:of|_of_)text\|>(?![\"'`])"
    rb"|^[ \t]*(?:</s>|<eos>|<\|eos\|>|<EOS>|\[EOS\])(?=[ \t]*(?:\r?\n|\Z)))"
    rb"[ \t]*(?:\r?\n(?:[ \t]*\r?\n)*)?", re.M)
LONGEST_MARK = 64  # bytes, with blanks around it


def has_marks(text: bytes) -> bool:
    return any(mark in text for mark in MARKS)


def split_at_marks(text: str, counts: Counter[str]) -> Iterator[str]:
    """The documents of a row's text, whose ends may be marked."""
    raw = text.encode()
    parts = MARK.split(raw) if has_marks(raw) else []
    if len(parts) < 2:
        yield text
        return
    counts["marks"] += len(parts) - 1
    yield from [part.decode() for part in parts if part.strip()]


def split_pieces(raw: BinaryIO, target: int, marks: bool, counts: Counter[str]) -> Iterator[bytes]:
    """The bytes of the open file `raw` in pieces of about `target` bytes. A piece ends at a mark, which is no
    part of it, else at the first blank line between target and 2 * target, else at the first line end there,
    else at 2 * target."""
    buffer = b""
    start = 0
    may_have_marks = False
    while True:
        if len(buffer) - start <= 2 * target + LONGEST_MARK:
            buffer = buffer[start:] + raw.read(max(1 << 20, 2 * target))
            start = 0
            may_have_marks = marks and has_marks(buffer)
        if len(buffer) == start:
            return
        far = start + 2 * target
        mark = MARK.search(buffer, start, far + LONGEST_MARK) if may_have_marks else None
        if mark and mark.start() <= far:
            counts["marks"] += 1
            if buffer[start:mark.start()].strip():
                yield buffer[start:mark.start()]
            start = mark.end()
        else:
            stop = end_of_piece(buffer, start + target, far)
            yield buffer[start:stop]
            start = stop


def end_of_piece(buffer: bytes, near: int, far: int) -> int:
    """Where a piece ends that has to end between these places, or at the end of the buffer."""
    if len(buffer) <= near:
        return len(buffer)
    end = re.compile(rb"\n\r?\n").search(buffer, near, far) or re.compile(rb"\n").search(buffer, near, far)
    stop = end.end() if end else min(len(buffer), far)
    while near < stop < len(buffer) and buffer[stop] & 0xC0 == 0x80:  # inside a character
        stop -= 1
    return stop


def read_text_file(raw: BinaryIO, file: Input, counts: Counter[str]) -> Iterator[str]:
    stream = inputs.text_stream(raw, file.encoding)
    for piece in split_pieces(stream, file.piece, file.marks, counts):
        yield piece.decode()


# Numbers are not read, and Python limits the digits of an integer, but not those of a float
JSON = json.JSONDecoder(parse_int=float)
BLANKS = re.compile(r"\s*")


def json_values(text: str) -> Iterator[Any]:
    """The values of some JSON: one, or several, as where lines end with CR alone. Raises ValueError."""
    text = text.removeprefix("\ufeff").strip()        # files with marks may have been joined
    at = 0
    while at < len(text):
        value, end = JSON.raw_decode(text, at)
        yield value
        at = BLANKS.match(text, end).end()


def text_of(row: Any) -> str | None:
    """The `text` of an object, lone surrogates replaced. Raises KeyError, TypeError or AttributeError."""
    text = row["text"]
    return text if text is None else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def texts_of_json(content: str, where: str) -> list[str | None]:
    """The `text` of every object in some JSON, which a list may hold. DataError where anything else is."""
    try:
        values = [*json_values(content)]
        rows = values[0] if len(values) == 1 and isinstance(values[0], list) else values
        return [text_of(row) for row in rows]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{where} is no JSON object with a string `text`, nor a list of them") from None


def read_jsonl(raw: BinaryIO, file: Input, counts: Counter[str]) -> Iterator[str | None]:
    for number, line in enumerate(inputs.text_stream(raw, file.encoding), 1):
        yield from texts_of_json(line.decode(), f"{file.path}: line {number}")


def read_json(raw: BinaryIO, file: Input, counts: Counter[str]) -> list[str | None]:
    """Those of a file that is held in memory as a whole."""
    content = inputs.text_stream(raw, file.encoding).read().decode()
    return texts_of_json(content, str(file.path))


def csv_rows(raw: BinaryIO, encoding: str = "") -> Any:
    """The rows of an open table, a dictionary each; None without a column `text` in the first line. The
    delimiter is the one that sets `text` apart there: a comma, a tab or a semicolon."""
    stream = inputs.text_stream(raw, encoding)
    start = stream.peek()[:1 << 16].decode(errors="replace").removeprefix("\ufeff")
    for delimiter in ",\t;":
        names = [name.strip() for name in next(csv.reader(start.splitlines()[:1], delimiter=delimiter), [])]
        if "text" in names:
            lines = io.TextIOWrapper(stream, "utf-8", newline="")
            return csv.DictReader(lines, names, delimiter=delimiter, strict=True)
    return None


def read_csv(raw: BinaryIO, file: Input, counts: Counter[str]) -> Iterator[str]:
    """The column `text` of a table whose first line names the columns."""
    path = file.path
    rows = csv_rows(raw, file.encoding)
    if rows is None:
        raise DataError(f"{path} has no column `text` in its first line: name the column of the texts so, or "
                        "name the file .txt to read it as it is")
    try:
        next(rows)      # the names
        for row in rows:
            if row["text"] is None:
                raise DataError(f"{path}: line {rows.line_num} has no `text`, which is column "
                                f"{rows.fieldnames.index('text') + 1}")
            yield row["text"]
    except csv.Error as error:
        raise DataError(f"{path}: line {rows.line_num} is not CSV ({error}): mend it, or name the file .txt "
                        "to read it as it is") from None


def read_python(raw: BinaryIO, file: Input, counts: Counter[str]) -> Iterator[str]:
    yield clean_source(inputs.decode(raw.read()))


def read_parquet(raw: BinaryIO, file: Input, counts: Counter[str]) -> Iterator[str | None]:
    """The column `text`, a few rows at a time."""
    path = file.path
    try:
        table = pq.ParquetFile(raw, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True)
        kinds = {field.name: field.type for field in table.schema_arrow}
        texts = ("string", "large_string", "dictionary<values=string", "null")
        if not str(kinds.get("text")).startswith(texts):
            raise DataError(f"{path} has no column `text` of strings")
        for batch in table.iter_batches(PARQUET_ROWS, columns=["text"], use_threads=False):
            yield from batch.column(0).to_pylist()
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # an error of the disk, not of the file's content
            raise
        raise DataError(f"{path} is a damaged parquet file or none at all") from None


READERS = {"text": read_text_file, "jsonl": read_jsonl, "json": read_json, "csv": read_csv,
           "python": read_python, "parquet": read_parquet}

# What is left of documents a part of which is in val: {index of the document: [(start, stop), ...]}, in bytes
Cuts = dict[int, list[tuple[int, int]]]


def documents(file: Input, counts: Counter[str], cuts: Cuts | None = None) -> Iterator[str]:
    """The text of every document in a file, empty ones left out, and of some that the cuts name only parts.
    `counts` collects `empty` (rows and files without text) and `marks` (of a document's end)."""
    for index, text in enumerate(whole_documents(file, counts)):
        if cuts and index in cuts:
            raw = text.encode()
            yield from [raw[start:stop].decode() for start, stop in cuts[index]]
        else:
            yield text


def whole_documents(file: Input, counts: Counter[str]) -> Iterator[str]:
    """documents() without cuts."""
    with inputs.open_binary(file.path) as raw:
        try:
            for text in READERS[file.kind](raw, file, counts):
                if text and file.marks and file.kind not in ("text", "python"):
                    yield from split_at_marks(text, counts)
                elif text:
                    yield text
                elif file.kind != "python":
                    counts["empty"] += 1
        except inputs.DAMAGED:
            raise DataError(f"{file.path}: the compressed data is damaged") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{file.path} is not whole {error.encoding.upper()}: {other_encodings(file.path)}"
                            ) from None


# --- what the input files are --------------------------------------------------------------------------

NO_TEXTS = (DataError, UnicodeDecodeError, *inputs.DAMAGED)     # where a file holds something else
FORMS = {"parquet": "parquet", "pq": "parquet", "jsonl": "jsonl", "ndjson": "jsonl", "json": "json",
         "csv": "csv", "tsv": "csv"}


def form_of(path: Path, encoding: str) -> str:
    """What a file holds: "jsonl", "json", "csv", "parquet" or "text", by its name and, where that does not
    tell, by its first lines; or the name of a compression or an archive that is not known here."""
    with inputs.open_binary(path) as raw:
        start = raw.read(32)
    if start.startswith(b"version https://git-lfs."):
        raise DataError(f"{path} is a Git LFS pointer, not the file itself: `git lfs pull` gets that")
    packed = inputs.compression_of(start)
    name = re.sub(r"\.[gx]z$", "", path.name.lower())
    unknown = re.search(r"\.(bz2|zst|lz4|zip|tar|tgz|txz)$", name)
    if packed not in ("", "gzip", "xz") or unknown:
        return packed or unknown[1]
    if start.startswith(b"PAR1"):
        return "parquet"
    form = FORMS.get(name.rpartition(".")[2], "text")
    may_be_rows = form == "json" or "." not in name
    return "jsonl" if may_be_rows and is_rows(path, encoding) else form


def is_rows(path: Path, encoding: str) -> bool:
    """Are the first two lines of a file, or its only one, JSON objects with a `text`?"""
    with inputs.open_binary(path) as raw, contextlib.suppress(*NO_TEXTS):
        stream = inputs.text_stream(raw, encoding)
        lines = stream.readline(1 << 24) + stream.readline(1 << 24)
        return bool(texts_of_json(lines.decode(), str(path)))
    return False


def has_texts(file: Input) -> bool:
    """Does a .json file hold texts, and nothing else? Has a .csv or .tsv file a column `text`?"""
    with inputs.open_binary(file.path) as raw, contextlib.suppress(*NO_TEXTS):
        if file.kind == "csv":
            return csv_rows(raw, file.encoding) is not None
        return read_json(raw, file, Counter()) is not None
    return False


def copy_of_pipe(path: Path) -> Path:
    """A file with what a pipe or a device holds, which can be read once only; it is deleted at the end."""
    folder = Path(tempfile.mkdtemp(prefix="prepare-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with inputs.open_binary(path) as source, open(folder / path.name, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    return folder / path.name


def find_file(path: Path, encoding: str = "") -> Input:
    """A file that the command line names, or the copy of a pipe."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    if not path.is_file():
        path = copy_of_pipe(path)
    form = form_of(path, encoding)
    if form not in READERS:
        raise DataError(f"{path}: {form} is not read here; files may be plain, .gz or .xz")
    if form == "text" and is_rows(path, encoding):
        print(f"warning: {path.name} looks like JSON lines, but by its name it is text and read as it is, "
              "braces and all; .jsonl would be read row by row")
    return Input(path, form, TEXT_PIECE, encoding)


NOT_UTF8 = "text that is not UTF-8"
PACKED_TEXT = re.compile(r"\.(jsonl|ndjson|json|csv|tsv|txt|md|parquet)\.\w+$")


def find_in_folder(folder: Path, encoding: str = "") -> list[Input]:
    """Every file in a folder. What is no text, such as a picture, is left out and named; text in an unknown
    compression is refused."""
    files = []
    left_out = []
    no_utf8 = []
    for path in sorted(inputs.files_below(folder)):
        # a link to nowhere or a pipe is none
        form = form_of(path, encoding) if path.is_file() else "no file"
        file = in_folder(Input(path, form, FOLDER_LIMIT, encoding))
        if file.kind in READERS:
            files.append(file)
        elif file.kind == NOT_UTF8:
            no_utf8.append(path)
        elif path.is_file() and PACKED_TEXT.search(path.name.lower()):
            raise DataError(f"{path}: {file.kind} is not read here; files may be plain, .gz or .xz")
        else:
            left_out.append(path)
    say_left_out(left_out, "no text, archives or links to nowhere")
    if no_utf8:
        say_left_out(no_utf8, f"{NOT_UTF8} ({len(no_utf8):,} files): {other_encodings(no_utf8[0])}")
    return files


def in_folder(file: Input) -> Input:
    """A file in a folder. Plain text is a document, but for a long one, which is cut; so is what holds no
    `text` where .json or .csv should. The kind may also be "no text" or NOT_UTF8."""
    if file.kind not in ("text", "json", "csv") or file.kind != "text" and has_texts(file):
        return file
    try:
        size = inputs.utf8_size(file.path)
        if size is None and inputs.may_be_text(file.path):
            size = inputs.utf8_size(file.path, file.encoding)
            kind = NOT_UTF8
        else:
            kind = "no text"
    except inputs.DAMAGED:
        raise DataError(f"{file.path}: the compressed data is damaged") from None
    if size is None:
        return file._replace(kind=kind)
    return file._replace(kind="text", piece=FOLDER_LIMIT if size <= FOLDER_LIMIT else FOLDER_PIECE)


def say_left_out(paths: list[Path], what: str) -> None:
    if paths:
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        print(f"left out: {', '.join(path.name for path in paths[:3])}{more}: {what}")


def find_files(paths: Iterable[Path | str], encoding: str = "") -> list[Input]:
    """Every input file; a pipe that is named twice is read once."""
    files = []
    for path in dict.fromkeys(map(Path, paths)):
        files += find_in_folder(path, encoding) if path.is_dir() else [find_file(path, encoding)]
    return files


def find_parquet(paths: Sequence[Path | str]) -> list[Input]:
    """Every parquet file."""
    files = find_files(paths)
    if not any(file.kind == "parquet" for file in files):
        raise DataError(f"{', '.join(map(str, paths))}: no parquet file there")
    say_left_out([file.path for file in files if file.kind != "parquet"], "not parquet")
    return [file for file in files if file.kind == "parquet"]


def once(files: list[Input], taken: Sequence[Input] = ()) -> list[Input]:
    """The files, each once and without those that are `taken`, whatever their names: links by what they lead
    to, copies by what they hold."""
    sizes = Counter(file.path.stat().st_size for file in (*files, *taken))

    def content(file: Input) -> tuple[int, str]:
        size = file.path.stat().st_size
        return size, file_sha256(file.path) if sizes[size] > 1 else ""

    kept: dict[tuple[int, str], Input | None] = {content(file): None for file in taken}
    for file in files:
        kept.setdefault(content(file), file)
    return [file for file in kept.values() if file]


def embedded_files(packages: Sequence[str] = PACKAGES) -> tuple[list[Input], list[str]]:
    """Source files of the packages as their RECORD lists them -> (files, ["name==version", ...])."""
    files = []
    source = []
    for package in packages:
        try:
            distribution = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            raise DataError(f"{package} is not installed: pip install -r requirements.txt") from None
        for name in sorted(file.as_posix() for file in distribution.files or ()):
            source_file = name.startswith(f"{package}/") and name.endswith(".py")
            if source_file and not LEFT_OUT.fullmatch(name):
                files.append(Input(Path(str(distribution.locate_file(name))), "python"))
        source.append(f"{package}=={distribution.version}")
    return files, source


def clean_source(text: str) -> str:
    """Source with \\n line ends and without the licence at its top: the leading comment is dropped down to
    its last paragraph about a licence. "" where the leading comment says that the file is generated."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    head = re.match(r"(?:[ \t]*(?:#.*)?\n)*", text).group()
    if GENERATED.search(head):
        return ""
    paragraphs = re.split(r"(\n\s*\n)", head)
    while paragraphs and not LICENCE.search(paragraphs[-1]):
        paragraphs.pop()
    if not paragraphs:
        return text
    return text[len("".join(paragraphs)):].lstrip("\n")


# --- hashes and split ----------------------------------------------------------------------------------

def document_hash(text: str) -> int:
    """64-bit BLAKE2b hash of the UTF-8 text, as an integer."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def text_fingerprint(val_hashes: np.ndarray, train_hashes: np.ndarray) -> str:
    """sha256 over the document hashes, both arrays ascending: it does not depend on the tokenizer."""
    return hashlib.sha256(b"val" + val_hashes.astype("<u8").tobytes()
                          + b"train" + train_hashes.astype("<u8").tobytes()).hexdigest()


DOCUMENT = np.dtype([("hash", np.uint64), ("size", np.int64)])


class Found(NamedTuple):
    """What is in a file."""
    file: Input
    documents: np.ndarray  # DOCUMENT (n,), in reading order
    cuts: Cuts


def hash_documents(file: Input) -> tuple[Found, Counter[str]]:
    """The documents of a file, and its counts."""
    counts: Counter[str] = Counter()
    rows = ((document_hash(text), len(text.encode())) for text in documents(file, counts))
    return Found(file, np.fromiter(rows, DOCUMENT), {}), counts


def choose_val(sizes: np.ndarray, val_bytes: int) -> tuple[np.ndarray, str]:
    """(which of the documents are val, a warning or ""). sizes: of distinct documents by ascending hash. Val
    is the first ones up to `val_bytes` or a tenth of the text. A document over VAL_DOCUMENT_BYTES goes to
    train, because it would dominate val. Where most of the text is in such documents, only one with a tenth
    of the text or more goes to train, if 10 others are left."""
    warning = ""
    most = int(sizes.sum()) // 10
    target = min(val_bytes, most)
    small = sizes <= VAL_DOCUMENT_BYTES
    if sizes[small].sum() * 2 < sizes.sum():
        small = sizes <= max(VAL_DOCUMENT_BYTES, most)
        if small.sum() < 10:
            small[:] = True
        elif not small.all():
            left = int(sizes[small].sum())
            target = min(target, left // 10)
            warning = (f"warning: {(~small).sum():,} documents of over {most:,} bytes go to train, since one "
                       f"would be most of val, which is chosen from the {left:,} bytes of the others")
    n_val = np.searchsorted(sizes[small].cumsum(), target) + 1
    return small & (small.cumsum() <= min(n_val, max(1, len(sizes) - 1))), warning


def say_val(split_bytes: list[int], val_bytes: int) -> None:
    """What val is, where it is not what was asked for. split_bytes: of text in val and train."""
    val = split_bytes[0]
    total = sum(split_bytes)
    about = f"val is {val:,} of {total:,} bytes ({val / total:.0%})"
    if val > 2 * min(val_bytes, total // 10):
        print(f"warning: {about}, since documents are few or long: give more of them, or --val PATH")
    elif val_bytes > total // 10:
        print(f"{about}: about a tenth of the text, since {val_bytes:,} would be more")


def wanted_documents(found: Found, wanted: np.ndarray) -> Iterator[str]:
    """Those documents of a file that are wanted, bool (n,). DataError where the texts are others by now."""
    texts = documents(found.file, Counter(), found.cuts)
    try:
        for text, key, is_wanted in zip(texts, found.documents["hash"], wanted, strict=True):
            if is_wanted and document_hash(text) != key:
                raise ValueError
            if is_wanted:
                yield text
    except ValueError:
        raise DataError("the input changed while it was being read") from None


def texts_of(found: Found, wanted: np.ndarray) -> list[str]:
    return [*wanted_documents(found, wanted)]


def cut_file(found: Found, val: overlap.ValText, val_hashes: np.ndarray) -> Found:
    """The same without text of val in documents other than val's own."""
    others = ~np.isin(found.documents["hash"], val_hashes)
    cuts = {}
    rows = [[row] for row in found.documents.tolist()]
    texts, again = itertools.tee(wanted_documents(found, others))
    for index, text, left in zip(np.flatnonzero(others).tolist(), texts, val.left_of(again)):
        if left is not None:
            raw = text.encode()
            cuts[index] = left
            rows[index] = [(document_hash(raw[start:stop].decode()), stop - start) for start, stop in left]
    return Found(found.file, np.array([row for part in rows for row in part], DOCUMENT), cuts)


class Corpus:
    """The distinct documents of a request, those of val before those of train, without val's text in train.

    `found`: what is in each file, val's first; `hashes`, `sizes`: of all documents in reading order;
    `starts`: of each file; `order`: indices of the documents that are kept, the `n_val` of val first, each
    split by ascending hash or as they were read; `unused`: how many of the val files are neither; `counts`:
    see documents(); `cut_bytes`: text of val left out."""

    def __init__(self, request: Request, processes: int) -> None:
        self.request = request
        self.processes = processes
        val_files = request.val_files or []
        self.scan(val_files + request.files)
        if not val_files:
            self.cut_finer()
        self.unused = 0
        val_hashes = self.choose()
        self.select(val_hashes)
        before = int(self.sizes.sum())
        if not request.frozen:
            self.cut_val(val_hashes, len(val_files))
        self.cut_bytes = before - int(self.sizes.sum())
        if not val_files:
            say_val(self.split_bytes(), request.val_bytes)

    def scan(self, files: list[Input]) -> None:
        """Finds all documents. DataError if there are none."""
        self.counts: Counter[str] = Counter()
        self.found = []
        for found, counts in self.map_files(hash_documents, [(file,) for file in files], "reading"):
            self.found.append(found)
            self.counts += counts
        self.join()
        if not len(self.hashes):
            raise DataError("there is no text in the input")

    def map_files(self, function: Callable[..., Any], jobs: list[tuple[Any, ...]], label: str) -> tqdm:
        """parallel_map() of jobs for a file each, with a progress line on a terminal."""
        results = parallel_map(function, jobs, min(self.processes, len(jobs)))
        return tqdm(results, label, len(jobs), leave=False, disable=None, unit=" files")

    def join(self) -> None:
        """Sets what is known of all documents."""
        each = [found.documents for found in self.found]
        self.starts = np.cumsum([0, *map(len, each)])
        joined = np.concatenate([np.zeros(0, DOCUMENT), *each])
        self.hashes = joined["hash"]
        self.sizes = joined["size"]

    def val_fits(self) -> bool:
        """Would val be about as large as asked for, and of files that are cut anyway at least four pieces?"""
        sizes = self.sizes[np.unique(self.hashes, return_index=True)[1]]
        is_val, _ = choose_val(sizes, self.request.val_bytes)
        target = min(self.request.val_bytes, int(sizes.sum()) // 10)
        few = is_val.sum() < 4 and all(file[1:3] == ("text", TEXT_PIECE) for file, *_ in self.found)
        return len(sizes) > 1 and not few and sizes[is_val].sum() <= 1.5 * target

    def cut_finer(self) -> None:
        """Where val would be far larger than asked for, plain text is read again in shorter documents."""
        is_text = [found.file.kind == "text" for found in self.found]
        if not any(is_text) or self.val_fits():
            return
        total = int(self.sizes.sum())
        piece = max(LEAST_PIECE, min(self.request.val_bytes, total // 10) // 4)
        self.scan([file._replace(piece=min(file.piece, piece)) for file, *_ in self.found])
        if all(is_text) and total < 40 * LEAST_PIECE and not self.val_fits():
            raise DataError(f"{total:,} bytes of text are too few to hold out a tenth, which would leave "
                            f"nothing for train: {40 * LEAST_PIECE:,} are enough")
        print(f"plain text is cut into documents of about {piece:,} bytes, so that val is not too large")

    def choose(self) -> np.ndarray:
        """Hashes of val's documents: those of its files, where the order is kept the first ones up to
        `val_bytes`; without files what choose_val() says."""
        request = self.request
        if request.val_files:
            val = int(self.starts[len(request.val_files)])
            if request.keeps_order:
                ends = self.sizes[:val].cumsum()
                self.unused = val - int(np.searchsorted(ends, request.val_bytes, "right"))
            return self.hashes[:val - self.unused]
        distinct, first = np.unique(self.hashes, return_index=True)
        if len(first) == 1:
            raise DataError(f"the input is one document, of {self.sizes[0]:,} bytes, and val needs one of "
                            "its own, which would leave nothing for train: more documents, or --val PATH")
        is_val, warning = choose_val(self.sizes[first], request.val_bytes)
        if warning:
            print(warning)
        return distinct[is_val]

    def select(self, val_hashes: np.ndarray) -> None:
        """Sets which documents are kept, each text once."""
        places = np.arange(len(self.hashes))
        places = np.delete(places, np.s_[len(val_hashes):len(val_hashes) + self.unused])
        order = places[np.unique(self.hashes[places], return_index=True)[1]]
        if self.request.keeps_order:
            order.sort()
        is_val = np.isin(self.hashes[order], val_hashes)
        if not is_val.any():
            raise DataError("the input leaves no document for val: --val-bytes "
                            f"{self.request.val_bytes:,} is too little, or the text of --val is")
        if is_val.all():
            raise DataError("all of the text is val's as well, which would leave nothing for train")
        self.order = np.concatenate([order[is_val], order[~is_val]])
        self.n_val = int(is_val.sum())

    def cut_val(self, val_hashes: np.ndarray, val_files: int) -> None:
        """Leaves out of train what stands in val."""
        parts = self.by_file(self.order[:self.n_val])
        val = overlap.ValText.of(text for part in parts for text in wanted_documents(*part))
        jobs = [(found, val, val_hashes) for found in self.found[val_files:]]
        self.found[val_files:] = self.map_files(cut_file, jobs, "comparing with val")
        self.join()
        self.select(val_hashes)

    def split_hashes(self) -> list[np.ndarray]:
        """Ascending hashes of val and of train."""
        return [np.sort(part) for part in np.split(self.hashes[self.order], [self.n_val])]

    def split_bytes(self) -> list[int]:
        """Bytes of text of val and of train."""
        return [int(part.sum()) for part in np.split(self.sizes[self.order], [self.n_val])]

    def duplicates(self) -> int:
        """Documents that are in neither split because another one is equal."""
        return len(self.hashes) - self.unused - len(self.order)

    def by_file(self, places: np.ndarray) -> list[tuple[Found, np.ndarray]]:
        """(what is in it, which of its documents) for each file that has some of these."""
        wanted = np.zeros(len(self.hashes), bool)
        wanted[places] = True
        parts = np.split(wanted, self.starts[1:-1])
        return [(found, part) for found, part in zip(self.found, parts) if part.any()]

    def sample(self) -> list[str]:
        """The train documents with the smallest hashes, SAMPLE_BYTES together, by ascending hash."""
        order = self.order[self.n_val:]
        order = order[np.argsort(self.hashes[order])]
        order = order[:np.searchsorted(self.sizes[order].cumsum(), SAMPLE_BYTES) + 1]
        wanted = np.sort(order)
        texts = []
        for part in self.map_files(texts_of, self.by_file(wanted), "sampling"):
            texts += part
        return [texts[place] for place in np.searchsorted(wanted, order)]

    def tokens(self, model: bytes) -> Generator[np.ndarray, None, None]:
        """BOS and tokens, as uint16, of the documents that are kept, as they are read."""
        threads = inputs.usable_cpus() if self.processes == 1 else 1
        texts = (text for part in self.by_file(self.order) for text in wanted_documents(*part))
        jobs = ((model, batch, threads) for batch in overlap.in_batches(texts, BATCH_BYTES))
        total = sum(self.split_bytes()) // BATCH_BYTES
        with contextlib.closing(parallel_map(encode_batch, jobs, self.processes)) as results:
            for arrays in tqdm(results, "encoding", total, leave=False, disable=None, unit=" MB"):
                yield from arrays


# --- in several processes ------------------------------------------------------------------------------

def exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def start_worker() -> None:
    """In a new process: ignore Ctrl-C, which the parent handles, and exit when the parent ends or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=exit_with_parent, daemon=True).start()


def parallel_map(function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]],
                 processes: int) -> Generator[Any, None, None]:
    """function(*job) for every job, results in the jobs' order; `jobs` is read a few jobs ahead only."""
    if processes < 2:
        yield from itertools.starmap(function, jobs)
        return
    try:
        pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), start_worker)
    except (OSError, ImportError, NotImplementedError) as error:
        raise DataError(f"this system has no semaphores for several processes ({error}): --processes 1 takes "
                        "longer, with the same result") from None
    try:
        waiting = deque()
        for job in jobs:
            waiting.append(pool.submit(function, *job))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise OSError(errno.ENOMEM, "a worker process died, perhaps for lack of memory: fewer --processes "
                      "need less of it") from None
    finally:
        pool.shutdown(cancel_futures=True)


# --- tokenizer -----------------------------------------------------------------------------------------

def training_sentences(texts: Iterable[str]) -> Iterator[str]:
    """The texts in chunks of whole lines, about 2,000 characters each, so that a piece of the vocabulary may
    contain a line end. Split at NUL, which the trainer refuses, and at two characters that it reserves."""
    for text in texts:
        start = 0
        while start < len(text):
            stop = text.rfind("\n", start, start + 2000) + 1 or start + 2000
            yield from filter(None, re.split("[\0\u2581\u2585]", text[start:stop]))
            start = stop


class TooSmall(Exception):
    """The text gives no vocabulary of the size, but one of args[0]."""


class TooManyCharacters(Exception):
    """The vocabulary cannot hold every byte and a piece for each character of the text."""


def train_tokenizer(texts: list[str], vocab_size: int) -> bytes:
    """SentencePiece BPE model as bytes; the same list of texts gives the same bytes. Where the vocabulary
    has no room for all characters of the text, the rarer ones are bytes."""
    spaces = sum(text.count(" ") for text in texts)
    needs_space = spaces < RARE_SPACES * sum(map(len, texts))
    try:
        with contextlib.suppress(TooManyCharacters):
            return train_bpe(texts, vocab_size, needs_space)
        return train_on_frequent(texts, vocab_size, needs_space)
    except TooSmall as error:
        raise DataError(f"the text is too small for a vocabulary of {vocab_size}: the largest possible "
                        f"size is {error.args[0]}") from None


def train_on_frequent(texts: list[str], vocab_size: int, needs_space: bool) -> bytes:
    """The same with pieces for the most frequent characters only: half of the vocabulary, or more where the
    text does not give that many longer pieces. Raises TooSmall."""
    room = vocab_size - LEAST_VOCAB + 1
    counts = Counter(itertools.chain.from_iterable(texts))
    frequent = sorted(counts, key=lambda char: (-counts[char], char))
    most = max(1, room // 2)
    coverage = 0.999
    while True:
        kept = frequent[:most]
        if needs_space or " " not in kept:      # it has a piece, too
            needs_space = True
            kept = [char for char in frequent if char != " "][:most - 1] + [" "]
        without_piece = dict.fromkeys(map(ord, counts.keys() - set(kept)), "\0")
        shorter = [text.translate(without_piece) for text in texts]
        try:
            return train_bpe(shorter, vocab_size, needs_space, coverage)
        except TooSmall as error:
            if most >= room:
                raise
            most = min(room, most + vocab_size - error.args[0])
            coverage = 1.0


def train_bpe(texts: list[str], vocab_size: int, needs_space: bool, coverage: float = 0.999) -> bytes:
    """One SentencePiece model, as bytes. needs_space: give the space a piece though it is rare in the text.
    Raises TooSmall and TooManyCharacters. The percentages below are changes in tokens per byte of held-out
    code at vocabulary 1,024 / 4,096; on English the signs are the same and the changes smaller."""
    model = io.BytesIO()
    sentences = training_sentences(texts)
    first = next(sentences, " ")        # the trainer refuses an empty text
    options: dict[str, Any] = {"required_chars": SPACE_MARK} if needs_space else {}
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=itertools.chain([first], sentences), model_writer=model, model_type="bpe",
            vocab_size=vocab_size, byte_fallback=True, unk_id=0, bos_id=BOS_ID, eos_id=2, pad_id=-1,
            normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,  # indentation
            split_by_unicode_script=False, split_by_number=False,  # -2 % / -6 %
            split_digits=False,  # on: +3 % / +7 %
            split_by_whitespace=True,  # off: -2 % / -8 %, but a trigram model's bpb is 0.6 % / 1.7 % worse
            character_coverage=coverage,  # at 0.999 rarer characters are bytes; 1.0: +3 %
            max_sentence_length=1 << 14, minloglevel=3,
            num_threads=2, **options)  # threads are fixed, because the model file contains their number
    except RuntimeError as error:
        message = str(error)
        if limit := re.search(r"value <= (\d+)", message):
            raise TooSmall(int(limit[1])) from None
        if "Vocabulary size is smaller than required_chars" in message:
            raise TooManyCharacters from None
        raise DataError("no tokenizer can be trained on this text: more or other text may do") from None
    return model.getvalue()


def encode(sp: spm.SentencePieceProcessor, text: str) -> list[int]:
    """Token ids of `text` without BOS; sp.decode(ids) == text for any text without lone surrogates."""
    mark = [sp.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
    first, *rest = text.split(SPACE_MARK)
    ids = sp.encode(first)
    for part in rest:
        ids += mark + sp.encode(part)
    return ids


@lru_cache(1)
def load_tokenizer(model: bytes) -> spm.SentencePieceProcessor:
    return spm.SentencePieceProcessor(model_proto=model)


def encode_batch(model: bytes, texts: list[str], threads: int) -> list[np.ndarray]:
    """BOS and tokens of each text, which is decoded to check it."""
    sp = load_tokenizer(model)
    plain = ["" if SPACE_MARK in text else text for text in texts]
    found = sp.encode(plain, num_threads=threads)
    found = [encode(sp, text) if SPACE_MARK in text else ids for text, ids in zip(texts, found)]
    for text, decoded in zip(texts, sp.decode(found, num_threads=threads)):
        if decoded != text:
            raise DataError(f"the tokenizer would change the document that begins with {text[:40]!r}: leave "
                            "it out, and please report it")
    return [np.array(array("H", [BOS_ID, *ids]), "<u2") for ids in found]


# --- shards --------------------------------------------------------------------------------------------

def file_sha256(path: Path) -> str:
    with inputs.open_binary(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def in_shards(token_arrays: Iterable[np.ndarray], shard_tokens: int) -> Iterator[tuple[int, np.ndarray]]:
    """(number of its shard, tokens) of each document, or of the parts of one that is longer than a shard. A
    document that does not fit into the open shard starts the next one."""
    number = 0
    count = 0
    for tokens in token_arrays:
        for start in range(0, len(tokens), shard_tokens):
            part = tokens[start:start + shard_tokens]
            if count + len(part) > shard_tokens:
                number += 1
                count = 0
            yield number, part
            count += len(part)


def write_shards(folder: Path, name: str, split: str, token_arrays: Iterable[np.ndarray],
                 shard_tokens: int = SHARD_TOKENS) -> list[dict[str, Any]]:
    """Write uint16 arrays, one per document, as numbered shards -> manifest entries."""
    entries: list[dict[str, Any]] = []
    for number, parts in itertools.groupby(in_shards(token_arrays, shard_tokens), lambda part: part[0]):
        path = folder / f"{name}_{split}_{number:06d}.bin"
        count = 0
        with open(path, "wb") as shard:
            shard.write(bytes(1024))
            for _, tokens in parts:
                shard.write(tokens.astype("<u2").tobytes())
                count += len(tokens)
            shard.seek(0)
            shard.write(np.array([20240520, 1, count], "<i4").tobytes())  # magic, version; the rest is 0
        entries.append({"path": path.name, "split": split, "tokens": count, "sha256": file_sha256(path)})
    return entries


# --- build ---------------------------------------------------------------------------------------------

def in_order(corpus: Corpus, arrays: Iterator[np.ndarray], scratch: BinaryIO) -> Iterator[np.ndarray]:
    """The token arrays of the documents by `corpus.order`, which come as they are read; the open file
    `scratch` holds them meanwhile, unless that is the same."""
    if corpus.request.keeps_order:
        yield from arrays
        return
    ends = [0]
    for tokens in arrays:
        ends.append(scratch.write(tokens.tobytes()) + ends[-1])
    for place in np.searchsorted(np.sort(corpus.order), corpus.order):
        scratch.seek(ends[place])
        yield np.frombuffer(scratch.read(ends[place + 1] - ends[place]), "<u2")


def write_dataset(corpus: Corpus, folder: Path, tokenizer: Path,
                  shard_tokens: int = SHARD_TOKENS) -> dict[str, Any]:
    """Write tokenizer.model, shards, document_hashes.bin and, last, the manifest to `folder` -> manifest."""
    request = corpus.request
    texts = corpus.sample()
    print(f"training the tokenizer on {sum(len(text.encode()) for text in texts):,} bytes", flush=True)
    model = train_tokenizer(texts, request.vocab_size)
    del texts
    (folder / "tokenizer.model").write_bytes(model)
    with (open(folder / "tokens.scratch", "w+b") as scratch,
          contextlib.closing(corpus.tokens(model)) as tokens):
        arrays = in_order(corpus, tokens, scratch)
        entries = write_shards(folder, request.name, "val", itertools.islice(arrays, corpus.n_val),
                               shard_tokens)
        entries += write_shards(folder, request.name, "train", arrays, shard_tokens)
    (folder / "tokens.scratch").unlink()
    return write_manifest(corpus, folder, tokenizer, model, entries)


def write_manifest(corpus: Corpus, folder: Path, tokenizer: Path, model: bytes,
                   entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Write document_hashes.bin, both arrays ascending, and then manifest.json -> the manifest."""
    request = corpus.request
    val_hashes, train_hashes = corpus.split_hashes()
    val_bytes, train_bytes = corpus.split_bytes()
    (folder / "document_hashes.bin").write_bytes(
        val_hashes.astype("<u8").tobytes() + train_hashes.astype("<u8").tobytes())
    manifest = {
        "version": 1, "name": request.name, "source": request.source,
        "tokenizer": {"path": inputs.path_between(folder, tokenizer),
                      "sha256": hashlib.sha256(model).hexdigest(), "vocab_size": request.vocab_size,
                      "bos_id": BOS_ID, "lossless": True},
        "files": entries, "train_bytes": train_bytes, "val_bytes": val_bytes,
        "train_docs": len(train_hashes), "val_docs": len(val_hashes),
        "text_fingerprint": text_fingerprint(val_hashes, train_hashes),
        "document_hashes": {"path": "document_hashes.bin", "val": len(val_hashes),
                            "train": len(train_hashes)},
        "dropped": {"repeated_inputs": request.repeated, "duplicate_documents": corpus.duplicates(),
                    "val_bytes_in_train": corpus.cut_bytes},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def is_complete(folder: Path, request: Request, fingerprint: str = "") -> bool:
    """Whether `folder` holds the requested dataset, of the text with this fingerprint if that is known, and
    it is complete; DataError if it holds another one."""
    try:
        manifest = json.loads(inputs.read_text(folder / "manifest.json"))
        found = manifest["source"], manifest["tokenizer"]["vocab_size"], manifest["text_fingerprint"]
        made_of = ", ".join(map(str, manifest["source"]))
        tokenizer = folder / manifest["tokenizer"]["path"]
        shards = [(folder / file["path"], 1024 + 2 * file["tokens"]) for file in manifest["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"{request.name} exists without a readable manifest; --force replaces it") from None
    if found != (request.source, request.vocab_size, fingerprint or found[2]):
        raise DataError(f"{request.name} exists, of {made_of}, with other text, other documents of this text "
                        "or another vocabulary; --force replaces it")
    return (tokenizer.is_file() and file_sha256(tokenizer) == manifest["tokenizer"]["sha256"]
            and all(path.is_file() and path.stat().st_size == size for path, size in shards))


class Places(NamedTuple):
    """Where a dataset goes."""
    folder: Path  # behind a link, where it leads
    tokenizer: Path
    partial: Path  # the folder in which it is written


def layout(request: Request, out: Path | str) -> Places:
    """Where the dataset goes; DataError if the request is invalid."""
    size = request.vocab_size
    for is_fine, what in (
            (re.fullmatch(r"\w[\w.-]*", request.name),
             f"--name {request.name!r} may hold letters, digits, dot, dash and underscore only"),
            (size <= 65536, f"--vocab-size {size} is beyond 65536, the range of uint16"),
            (size >= LEAST_VOCAB, f"--vocab-size {size} cannot hold every byte and the space: the smallest "
             f"possible size is {LEAST_VOCAB}"),
            (request.val_bytes > 0, f"--val-bytes {request.val_bytes} is not positive")):
        if not is_fine:
            raise DataError(what)
    folder = inputs.behind_link(Path(out, "datasets", request.name))     # what is replaced, not the link
    if not folder:
        raise DataError(f"datasets/{request.name} is a link to a place in a folder that is not there: "
                        f"{os.readlink(Path(out, 'datasets', request.name))}")
    tokenizer = Path(out, "tokenizers", f"{request.name}.model")
    return Places(folder, tokenizer, folder.with_name(f".{request.name}.partial"))


def check_places(places: Places) -> None:
    """DataError, before hours of work, if the dataset could not be put in place afterwards."""
    for folder in (places.folder.parent, places.tokenizer.parent):
        if reason := inputs.why_not_writable(folder):
            raise DataError(f"the dataset cannot be written: {reason}")
    if places.tokenizer.is_dir():
        raise DataError(f"{places.tokenizer} is a folder, where the tokenizer has to go: move it away")
    if os.path.ismount(places.folder):
        raise DataError(f"{places.folder} is where another disk is mounted, and cannot be replaced: mount "
                        "that one folder higher, or choose another --name")


def install(places: Places) -> None:
    """Puts the finished dataset in place of what is there, which comes back if that fails."""
    folder, tokenizer, partial = places
    new = tokenizer.with_name(f".{tokenizer.name}.new")
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    tokenizer.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(partial / "tokenizer.model", new)       # it may be on another disk
    try:
        if folder.exists():
            shutil.move(folder, old)        # which copies where nothing can be renamed, as in a container
        os.replace(partial, folder)
    except BaseException:
        if not folder.exists() and old.exists():
            shutil.move(old, folder)
        new.unlink()
        raise
    os.replace(new, tokenizer)
    (folder / "tokenizer.model").unlink()
    shutil.rmtree(old, ignore_errors=True)


def report(corpus: Corpus, manifest: dict[str, Any], folder: Path) -> None:
    """Print what was written."""
    request = corpus.request
    tokens = sum(file["tokens"] for file in manifest["files"])
    count = manifest["train_docs"] + manifest["val_docs"]
    text_bytes = manifest["train_bytes"] + manifest["val_bytes"]
    dropped = [f"{corpus.duplicates():,} duplicates dropped"]
    for number, what in ((corpus.counts["empty"], "empty or null texts skipped"),
                         (corpus.unused, "documents of the val file not used"),
                         (request.repeated, "inputs equal to others, or to val, read once"),
                         (corpus.cut_bytes, "bytes left out of train because they are in val"),
                         (corpus.counts["marks"], "marks such as <|endoftext|> left out, which end documents "
                          "(--keep-marks keeps them as text)")):
        if number:
            dropped.append(f"{number:,} {what}")
    print(f"{request.name}: {count:,} documents, {text_bytes:,} bytes; {', '.join(dropped)}")
    print(f"{tokens:,} tokens, {text_bytes / (tokens - count):.3f} bytes per token at vocabulary "
          f"{request.vocab_size}")
    print(f"val: {manifest['val_docs']:,} documents, {manifest['val_bytes']:,} bytes")
    print(f"fingerprint: {manifest['text_fingerprint']}")
    if not request.frozen:
        print(f"next: DATA_PATH={folder} ./run.sh")


def processes_for(request: Request) -> int:
    """How many processes work: one for each processor, where there is enough text for them."""
    size = sum(file.path.stat().st_size for file in request.files)
    return inputs.usable_cpus() if size > MUCH_TEXT else 1


def build(request: Request, out: Path | str, force: bool = False, shard_tokens: int = SHARD_TOKENS,
          processes: int = 0) -> dict[str, Any] | None:
    """Write out/datasets/<name>/ and out/tokenizers/<name>.model -> the manifest, None if they are there
    already. processes: 0 for as many as processes_for() says. DataError if that is impossible."""
    places = layout(request, out)
    exists = places.folder.exists() and not force
    if not exists:
        check_places(places)
    corpus = Corpus(request, processes or processes_for(request))
    if exists:
        if is_complete(places.folder, request, text_fingerprint(*corpus.split_hashes())):
            print(f"{request.name} is there already: nothing to do")
            return None
        check_places(places)
    try:
        with inputs.locked(places.partial):
            try:
                for path in places.partial.iterdir():      # what a killed run left
                    path.unlink()
                manifest = write_dataset(corpus, places.partial, places.tokenizer, shard_tokens)
                install(places)
            except BaseException:
                shutil.rmtree(places.partial, ignore_errors=True)
                raise
    except inputs.Busy:
        raise DataError("another process is preparing this dataset: the same command works when that has "
                        "ended") from None
    report(corpus, manifest, places.folder)
    return manifest


# --- command line --------------------------------------------------------------------------------------

def make_request(args: argparse.Namespace) -> Request:
    """The Request of a command line."""
    if args.text is None and args.parquet is None:
        if args.val is not None or args.keep_marks or args.encoding:
            raise DataError("--val, --keep-marks and --encoding go with --text or --parquet")
        files, source = embedded_files()
        val_bytes = VAL_BYTES if args.val_bytes is None else args.val_bytes
        return Request(args.name or "embedded", source, files, args.vocab_size, val_bytes, frozen=True)
    if args.name is None:
        raise DataError("--text and --parquet need --name")
    if args.text and args.val is not None and args.val_bytes is not None:
        raise DataError("--val and --val-bytes go together with --parquet only")
    try:
        "".encode(args.encoding or "utf-8")
    except (LookupError, ValueError):
        raise DataError(f"--encoding {args.encoding!r} is not known; among others latin-1, cp1252, cp1251, "
                        "gb18030, shift_jis are") from None

    def find(paths: list[Path]) -> list[Input]:
        files = find_files(paths, args.encoding) if args.text else find_parquet(paths)
        return [file._replace(marks=not args.keep_marks) for file in files]

    paths = [*map(Path, args.text or args.parquet)]
    # a pipe has another name at each run
    source = sorted([path.name if path.is_file() or path.is_dir() else "pipe"
                     for path in {path.resolve() for path in paths}])
    found = find(paths)
    if args.text:       # where a file is given twice, that of rows counts, then that of a folder
        found.sort(key=lambda file: (file.kind == "text", -file.piece))
    files = once(found)
    repeated = len(paths) - len({*paths}) + len(found) - len(files)
    val_files = once(find([Path(args.val)])) if args.val is not None else []
    if args.parquet and not val_files:
        val_files = [files.pop()]
    others = once(files, val_files)
    if found and not others:
        raise DataError("all of the text is val's as well, which would leave nothing for train: give more, "
                        "or files with --text, of whose documents a tenth is val")
    val_bytes = PARQUET_VAL_BYTES if args.parquet else VAL_BYTES
    return Request(args.name, source, others, args.vocab_size,
                   val_bytes if args.val_bytes is None else args.val_bytes, val_files or None,
                   repeated + len(files) - len(others), keeps_order=bool(args.parquet))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="./run.sh data", description="Text to tokenizer, token shards and manifest.")
    origin = parser.add_mutually_exclusive_group()
    origin.add_argument("--text", nargs="+", metavar="PATH",
                        help="files (text, .jsonl, .json, .csv, .tsv, .parquet; .gz, .xz), folders or pipes; "
                        "without it the embedded corpus. A row is a document. Plain text is cut into "
                        f"documents of about {TEXT_PIECE >> 10} KiB, at blank lines if possible, and of less "
                        "where there is little text. In a folder a file is a document, and one of over "
                        f"{FOLDER_LIMIT >> 20} MiB is cut to about {FOLDER_PIECE >> 10} KiB. <|endoftext|>, "
                        "or </s> in a line of its own, ends a document")
    origin.add_argument("--parquet", nargs="+", metavar="PATH",
                        help="parquet files, or folders of them, with a column `text`")
    parser.add_argument("--keep-marks", action="store_true",
                        help="<|endoftext|> and the like are text as any other")
    parser.add_argument("--encoding", default="", metavar="NAME",
                        help="with --text: how files are read that are not UTF-8, 16 or 32, such as latin-1")
    parser.add_argument("--name", help="of the dataset and its tokenizer")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="default %(default)s")
    parser.add_argument("--val", metavar="PATH",
                        help="text of the val split; default with --parquet: the last file")
    parser.add_argument("--val-bytes", type=int, help=f"size of val without --val, default {VAL_BYTES}; with "
                        f"--parquet the val file is used up to this size, default {PARQUET_VAL_BYTES}")
    parser.add_argument("--processes", type=int, default=0,
                        help="0, the default: one for each processor that may be used, if there is much text")
    parser.add_argument("--out", default=HERE, metavar="DIR",
                        help="holds datasets/ and tokenizers/; default: the folder of this script")
    parser.add_argument("--force", action="store_true", help="replace a finished dataset")
    args = parser.parse_args(argv)
    try:
        build(make_request(args), args.out, args.force, processes=args.processes)
        return 0
    except DataError as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare: interrupted, nothing was written", file=sys.stderr)
    except OSError as error:        # such as of a full disk
        print(f"prepare: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    inputs.steady_output()
    sys.exit(main())
