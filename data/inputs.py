"""How text comes in, for data/ and records/: one decoder, one way to open a file, one walk through a folder,
one lock for a place where only one process may write; where links lead; how many processors we may use.

A text file is decoded by what its first bytes say: a byte order mark of UTF-8, UTF-16 or UTF-32, or without
one the NULs that UTF-16 and UTF-32 put between plain letters. Every other file is UTF-8. Files that are
compressed by gzip or xz are known by their first bytes, too, whatever their name.
tests/test_inputs.py refuses any other open() of input in these two folders.
"""
import codecs
import contextlib
import errno
import gzip
import io
import lzma
import math
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

# The mark of UTF-32, little-endian, begins with that of UTF-16
MARKS = [(codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"),
         (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")]
SNIFFED = 4096      # first bytes of a file that tell its encoding
COMPRESSED = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zst", b"BZh91AY": "bz2",
              b"\x04\x22\x4d\x18": "lz4", b"PK\x03\x04": "zip"}
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)      # what reading them may raise


def encoding_of(start: bytes) -> tuple[str, int]:
    """(encoding, bytes of its mark) of a file that begins with these bytes."""
    for mark, name in MARKS:
        if start.startswith(mark):
            return name, len(mark)
    start = start[:min(len(start), SNIFFED) // 4 * 4]
    for _, name in MARKS if b"\0" in start else ():
        text = start.decode(name, "replace")
        plain = sum(char < "\u0100" and (char.isprintable() or char.isspace()) for char in text)
        if plain > 0.7 * len(text) > 1:     # else it is a table of small numbers
            return name, 0
    return "utf-8", 0


def decode(raw: bytes, errors: str = "strict") -> str:
    """Bytes of a text file -> text without a byte order mark. Raises UnicodeDecodeError."""
    name, mark = encoding_of(raw[:SNIFFED])
    return raw[mark:].decode(name, errors)


class Outlet(io.FileIO):
    """stdout or stderr of a program that goes on when nobody reads it any more or the disk there is full."""
    def write(self, text: Any) -> int:
        try:
            return super().write(text)
        except OSError:
            return len(text)


def steady_output() -> None:
    """For a program to call first: it neither ends nor complains when `| head` has seen enough, where >&-
    closes a stream, whose number the next file would get, or at a name with letters that it cannot show."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        try:
            outlet = Outlet(number, "w", closefd=False)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            outlet = Outlet(number, "w", closefd=False)
        encoding = getattr(stream, "encoding", "utf-8")
        by_lines = getattr(stream, "line_buffering", False)
        text = io.TextIOWrapper(io.BufferedWriter(outlet), encoding, "backslashreplace",
                                line_buffering=by_lines)
        setattr(sys, name, text)


class Busy(Exception):
    """Another process holds the lock."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder, made if need be, as a place where one process works at a time, to its end. Raises Busy. On
    file systems without locks there is none. What was made goes again if it is empty in the end."""
    import fcntl
    folder = Path(folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            os.close(handle)
            raise Busy from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(handle), os.stat(folder)):     # not of a later process
                for path in dict.fromkeys([folder, *made]):
                    os.rmdir(path)
        os.close(handle)


def open_binary(path: Path | str) -> io.BufferedReader:
    return open(path, "rb")


def read_bytes(path: Path | str) -> bytes:
    with open_binary(path) as file:
        return file.read()


def read_text(path: Path | str, errors: str = "strict") -> str:
    """The text of a file. Raises UnicodeDecodeError."""
    return decode(read_bytes(path), errors)


def compression_of(start: bytes) -> str:
    """gzip, xz, zst, bz2, lz4 or zip; "" where a file that begins with these bytes is none of them."""
    return next((name for magic, name in COMPRESSED.items() if start.startswith(magic)), "")


def unpacked(raw: BinaryIO) -> Any:
    """An open file, at its start -> a binary stream of its bytes, decompressed."""
    kind = compression_of(raw.read(16))
    raw.seek(0)
    if kind == "gzip":
        return gzip.open(raw)
    return lzma.open(raw) if kind == "xz" else raw


def text_stream(raw: BinaryIO, encoding: str = "") -> io.BufferedReader:
    """An open file, at its start -> a binary stream of its text, decompressed, in UTF-8 without a mark. Text
    that may be in another encoding is held in memory: `encoding` is that of a text that is not UTF-8, 16 or
    32. Raises UnicodeDecodeError for damaged text, reading it what is in DAMAGED."""
    stream = io.BufferedReader(unpacked(raw), 1 << 20)
    name, mark = encoding_of(stream.peek(SNIFFED)[:SNIFFED])
    stream.read(mark)
    if name == "utf-8" and not encoding:
        return stream
    content = stream.read()
    try:
        text = content.decode(name)
    except UnicodeDecodeError:
        if not encoding:
            raise
        text = content.decode(encoding)
    return io.BufferedReader(io.BytesIO(text.encode()))     # type: ignore[arg-type]


def utf8_size(path: Path | str, encoding: str = "") -> int | None:
    """Bytes of a file's text as UTF-8, decompressed; None where it is not whole in UTF-8, 16, 32 or in this
    encoding. Raises what is in DAMAGED."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    with open_binary(path) as raw, contextlib.suppress(UnicodeDecodeError):
        stream = text_stream(raw, encoding)
        while block := stream.read(1 << 20):
            decoder.decode(block)
            size += len(block)
        decoder.decode(b"", final=True)
        return size
    return None


CONTROLS = bytes(sorted({*range(32), 127} - {*b"\t\n\v\f\r\x1a\x1b"}))


def may_be_text(path: Path | str) -> bool:
    """May a file that is not whole UTF-8, 16 or 32 be text in another encoding? Its first bytes have no NULs
    and almost no control characters, or they are UTF-16 or UTF-32 but for some damage."""
    with open_binary(path) as raw:
        start = unpacked(raw).read(1 << 16)
    name, mark = encoding_of(start)
    if name != "utf-8":
        text = start[mark:].decode(name, "replace")
        return sum(char.isprintable() for char in text) > 0.7 * len(text) > 5
    return b"\0" not in start and len(start) - len(start.translate(None, CONTROLS)) <= len(start) / 100


def identity_of(path: Path | str) -> tuple[int, int]:
    """What is equal for all names of a file, links among them."""
    about = os.stat(path)
    return about.st_dev, about.st_ino


def path_between(folder: Path | str, file: Path) -> str:
    """The path of a file from a folder, as the system finds it: `..` leads out of where a link leads to."""
    place = os.path.join(os.path.realpath(file.parent), file.name)
    return Path(os.path.relpath(place, os.path.realpath(folder))).as_posix()


def behind_link(path: Path) -> Path | None:
    """Where a link leads, else the path itself; None where not even the folder of that place is there."""
    if not path.is_symlink():
        return path
    place = Path(os.path.realpath(path))
    return place if place.parent.is_dir() else None


def why_not_writable(folder: Path) -> str:
    """Why nothing can be written to a folder, or to one that would have to be made; "" if it can."""
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.exists():
        return f"{folder} is a link to {os.readlink(folder)}, which is not there"
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"cannot write to {folder}: {error.strerror}"
    return ""


def cgroup_limits(root: Path) -> Iterator[float]:
    """Processors that the cgroups of this process allow it, those of every level."""
    about = root / "proc/self/cgroup"
    groups = read_text(about, "replace") if about.is_file() else ""
    for group in re.findall("^0::/(.*)", groups, re.MULTILINE):
        place = root / "sys/fs/cgroup" / group
        for folder in (place, *place.parents):      # above the file system of cgroups there is no cpu.max
            with contextlib.suppress(OSError, ValueError):
                quota, period = map(int, read_text(folder / "cpu.max").split())
                yield quota / period


def usable_cpus(root: Path = Path("/")) -> int:
    """Processors that this process may use: not more than its affinity and its cgroups allow."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    return max(1, min([count, *[math.ceil(limit) for limit in cgroup_limits(root)]]))


# Names that desktops, archives, editors and Spark leave beside somebody's files
NO_DATA = re.compile(r"(?i)thumbs\.db|ehthumbs(_vista)?\.db|desktop\.ini|icon\r|.*[:\uf03a]zone\.identifier"
                     r"|~\$.*|.*~|_success|_(common_)?metadata|_(started|committed)_\d+|cachedir\.tag")
NO_DATA_FOLDERS = {"__pycache__", "__MACOSX", "$RECYCLE.BIN", "System Volume Information", "lost+found",
                   "@eaDir"}


def files_below(folder: Path | str, follow: bool = True) -> Iterator[Path]:
    """Yields the path of each file in a folder, by name, and then those of the folders in it. Hidden files
    and folders are passed over, and those that desktops and archives add. A linked folder or file is there
    once, wherever else it is linked or lies; without `follow` what linked folders hold isn't."""
    seen = {identity_of(folder)}

    def is_new(path: Path) -> bool:
        if not path.exists():       # a link to nowhere
            return True
        before = len(seen)
        seen.add(identity_of(path))
        return len(seen) > before

    def refuse(error: OSError) -> NoReturn:
        raise error

    for here, folders, names in os.walk(folder, onerror=refuse, followlinks=follow):
        below = [Path(here, name) for name in sorted(folders)
                 if not name.startswith(".") and name not in NO_DATA_FOLDERS]
        folders[:] = [path.name for path in below if (follow or not path.is_symlink()) and is_new(path)]
        files = [Path(here, name) for name in sorted(names)
                 if not name.startswith(".") and not NO_DATA.fullmatch(name)]
        yield from filter(is_new, files)
