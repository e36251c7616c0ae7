"""Text that stands in val and in train as well, however both were cut into documents.

Blanks and line ends aside, every WINDOW bytes of val have a hash, and those whose hash is small, one of
SPACING on average, are kept: a window is kept in val exactly if it is kept in train. A run is a stretch of a
train document whose kept windows are all in val. It is text of val if it has RUN of them, some 280 bytes, or
half of those of a val document, or is the whole document of train; documents of less than about 60 bytes
have too few. A window that proves nothing, and ends no run, is one that a val document holds twice, as a line
of dashes, or that COMMON of them hold: a licence, a prompt that all begin with.
Memory: 12 bytes for each SPACING bytes of val.
"""
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

WINDOW = 32         # bytes; a power of two
SPACING = 8
RUN = 32            # windows
LEAST = 2           # windows of a document that counts as a whole,
LEAST_PART = 4      # and of a part of a val document
COMMON = 4          # val documents
LEAST_LEFT = 200    # bytes: less between two runs, or at an end of a document, goes with them
LINE = 200          # bytes: a run is widened to whole lines where they end within so many
BATCH = 1 << 19     # bytes of text hashed at a time
FACTOR = 0x9E3779B97F4A7C15
BLANKS = b" \t\n\r\x0b\x0c"
NEVER = 1 << 30     # no run has so many windows


def window_hashes(data: np.ndarray) -> np.ndarray:
    """A hash of the WINDOW bytes that begin at each place. data: (n,) uint8 -> (n - WINDOW + 1,) uint64."""
    hashes = data.astype(np.uint64) * np.uint64(FACTOR)
    step = 1
    while step < WINDOW:        # from windows of `step` bytes to those of twice as many
        hashes = hashes[:-step] * np.uint64(pow(FACTOR, step, 1 << 64)) + hashes[step:]
        step *= 2
    return hashes


def kept_windows(texts: list[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(hash, index of the text, place in the text without blanks) of every window that is kept, in order."""
    dense = [text.translate(None, BLANKS) for text in texts]
    ends = np.cumsum([len(text) for text in dense])
    data = np.frombuffer(b"".join(dense), np.uint8)
    hashes = window_hashes(data)
    places = np.flatnonzero(hashes < np.uint64((1 << 64) // SPACING))
    index = np.searchsorted(ends, places, "right")
    inside = places + WINDOW <= ends[index]
    places = places[inside]
    index = index[inside]
    starts = np.concatenate([[0], ends[:-1]])
    return hashes[places], index, places - starts[index]


def in_batches(texts: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """The texts, about `size` bytes or characters at a time."""
    total = 0

    def number(text: Any) -> int:
        nonlocal total
        total += len(text)
        return total // size

    for _, batch in itertools.groupby(texts, number):
        yield list(batch)


def batches(texts: Iterable[str]) -> Iterator[list[bytes]]:
    """The texts as UTF-8, about BATCH bytes at a time."""
    return in_batches((text.encode() for text in texts), BATCH)


class ValText(NamedTuple):
    """The kept windows of val."""
    hashes: np.ndarray  # uint64 (n,), ascending
    needed: np.ndarray  # int32 (n,): how many windows that count make a run with this one, or NEVER

    @classmethod
    def of(cls, texts: Iterable[str]) -> "ValText":
        """From the documents of val."""
        found = [(np.zeros(1, np.uint64), np.full(1, NEVER, np.int32))]     # for a val without windows
        for batch in batches(texts):
            hashes, index, _ = kept_windows(batch)
            order = np.lexsort((hashes, index))
            hashes = hashes[order]
            index = index[order]
            same = (hashes[1:] == hashes[:-1]) & (index[1:] == index[:-1])
            counts = np.ones(len(hashes), bool)
            counts[1:] &= ~same
            counts[:-1] &= ~same
            windows = np.bincount(index[counts], minlength=len(batch))[index]
            part = np.minimum(windows, np.clip(windows // 2, LEAST_PART, RUN))
            needed = np.where(counts & (windows >= LEAST), part, NEVER)
            first = np.append(True, ~same)[:len(hashes)]        # once for each document
            found.append((hashes[first], needed[first].astype(np.int32)))
        hashes = np.concatenate([part for part, _ in found])
        needed = np.concatenate([part for _, part in found])
        # a window of several documents counts as in the shortest one
        order = np.lexsort((needed, hashes))
        hashes, first, holders = np.unique(hashes[order], return_index=True, return_counts=True)
        return cls(hashes, np.where(holders < COMMON, needed[order][first], NEVER))

    def runs(self, texts: list[bytes]) -> list[tuple[int, int, int]]:
        """(index of the text, start, stop) of each run in these texts as UTF-8, in order; start and stop
        count its bytes without blanks."""
        hashes, index, places = kept_windows(texts)
        row = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        found = np.flatnonzero(self.hashes[row] == hashes)
        if not len(found):
            return []
        needed = self.needed[row[found]]
        begins = (np.diff(found) > 1) | (np.diff(index[found]) > 0)
        first = np.flatnonzero(np.append(True, begins))
        last = np.append(first[1:], len(found)) - 1
        counting = np.add.reduceat(needed < NEVER, first, dtype=np.int64)
        whole = np.bincount(index, minlength=len(texts))[index[found[first]]] == last - first + 1
        is_run = counting >= np.minimum(np.minimum.reduceat(needed, first), np.where(whole, LEAST, NEVER))
        first = found[first[is_run]]
        last = found[last[is_run]]
        return list(zip(index[first].tolist(), places[first].tolist(), (places[last] + WINDOW).tolist()))

    def left_of(self, texts: Iterable[str]) -> Iterator[list[tuple[int, int]] | None]:
        """For each text the (start, stop) of what stands outside of runs, in bytes of its UTF-8; None where
        there is no run."""
        for batch in batches(texts):
            runs = {}
            for index, start, stop in self.runs(batch):
                runs.setdefault(index, []).append((start, stop))
            for index, text in enumerate(batch):
                yield parts_between(text, runs[index]) if index in runs else None


def parts_between(text: bytes, runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, stop) of what is left of a text without these runs, widened to whole lines; parts of less than
    LEAST_LEFT bytes are left out. The runs count bytes without blanks."""
    is_blank = np.zeros(256, bool)
    is_blank[list(BLANKS)] = True
    places = np.flatnonzero(~is_blank[np.frombuffer(text, np.uint8)])
    parts = []
    end = 0
    for start, stop in runs:
        start = int(places[start])
        stop = int(places[stop - 1]) + 1
        start = text.rfind(b"\n", max(0, start - LINE), start) + 1 or (0 if start <= LINE else start)
        line_end = text.find(b"\n", stop, stop + LINE) + 1
        stop = line_end or (len(text) if stop + LINE >= len(text) else stop)
        while start and text[start] & 0xC0 == 0x80:         # inside a character
            start -= 1
        while stop < len(text) and text[stop] & 0xC0 == 0x80:
            stop += 1
        parts.append((end, start))
        end = max(end, stop)
    parts.append((end, len(text)))
    return [(start, stop) for start, stop in parts if stop - start >= LEAST_LEFT]
