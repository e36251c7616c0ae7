"""records/: logs in other encodings, with what terminals, progress bars and crashes leave in them. The
numbers are those of the plain log, or none."""
import re

import pytest

from records.judge import logs
from test_inputs import ENCODINGS, encoded
from test_record_stats import RULER, SOURCE, golf_log, speedrun_log

SHORT = SOURCE.replace("x = 1  # a long script\n" * 1500, "x = 1\n")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """{"speedrun" or "golf": (text of a log, its Run)}; the numbers of the first are public ones."""
    folder = tmp_path_factory.mktemp("plain")
    speedrun_log(folder / "speedrun.txt", 3.2744, 69.993, source=SHORT, total=1490)
    golf_log(folder / "golf.log", 7, 2.02857127, 1.20143417, 15_000_000, SHORT)
    return {path.stem: (path.read_text(), logs.read_log(path)) for path in folder.iterdir()}


# --- what may be around the lines of a log: text -> text or bytes ----------------------------------------
def bar(i, total=1490):
    """As tqdm draws it."""
    share = i * 100 // total
    drawn = f"{'█' * (share // 10):<10}"
    return f"train: {share:3d}%|{drawn}| {i}/{total} [00:{i % 60:02d}<01:07, 20.96it/s, loss=3]"


def step_lines(text, change):
    """Changes each line of the run, after the last ruler, by its number."""
    top, ruler, body = text.rpartition(RULER + "\n")
    lines = body.split("\n")
    return top + ruler + "\n".join(change(i, line) if line else line for i, line in enumerate(lines))


COLORS = ("\x1b[0m", "\x1b[1;32m", "\x1b[38;2;9;9;9m", "\x1b[K", "\x1b[2K", "\x1b[1A", "\x1b]0;a title\x07",
          "\x1b(B", "\x1b[?25l", "\x1b7")
BEFORE = ("\r\r", "\x1b[2K\r", "\x1b[0G", "\b\b\b", "\r{}\r", "{}", "{}\n")     # {}: a bar


def colored(text):
    """Each number in a color of its own."""
    def change(i, line):
        return COLORS[i % 10] + re.sub(r"(\d+\.?\d*)", "\x1b[1m\\1\x1b[0m", line)
    return step_lines(text, change)


def with_holes(text):
    """Blocks of a file that were never written."""
    raw = text.encode()
    for start in (b"seed:", b"step:250/"):
        raw = raw.replace(b"\n" + start, b"\n" + bytes(700) + b"\n" + start)
    return raw


WAYS = {
    **{encoding: (lambda text, encoding=encoding: encoded(text, encoding)) for encoding in ENCODINGS},
    "crlf": lambda text: text.replace("\n", "\r\n"),
    "cr": lambda text: text.replace("\n", "\r"),
    "cr cr lf": lambda text: text.replace("\n", "\r\r\n"),
    "crlf after the source": lambda text: step_lines(text, lambda i, line: line + "\r"),
    "colors": colored,
    "colors in utf-16": lambda text: encoded(colored(text), "utf-16-le unmarked"),
    "bars rewritten": lambda text: step_lines(text, lambda i, line: f"\r{bar(i)}\r{bar(i + 1)}\r{line}"),
    "bars before": lambda text: step_lines(text, lambda i, line: bar(i) + line),
    "bars cleared": lambda text: step_lines(text, lambda i, line: f"\r{bar(i)}\r{' ' * 90}\r\x1b[K{line}"),
    "bars after": lambda text: step_lines(text, lambda i, line: f"{line}\n\r{bar(i)}"),
    "bars without an end": lambda text: step_lines(text, lambda i, line: f"{i}it [00:01, 10.31it/s]{line}"),
    "bars of hours": lambda text: step_lines(text, lambda i, line: f"{i}it [1:00:01, 1.3s/it] {line}"),
    "backspaces": lambda text: step_lines(text, lambda i, line: f"{i} %" + "\b" * 4 + line),
    "zeros at the end": lambda text: text.encode() + bytes(4096),
    "zeros between lines": with_holes,
    "latin-1": lambda text: step_lines(text, lambda i, line: f"{line}\n30 µs in Zürich").encode("latin-1"),
    "no last line end": lambda text: text.rstrip("\n")}


def facts_of(run):
    """All that stands in a log but for its text."""
    beside = ("path", "label", "sizes", "body")
    return {name: value for name, value in vars(run).items() if name not in beside}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["speedrun", "golf"])
def test_the_numbers_are_those_of_the_plain_log(tmp_path, plain, kind, way):
    text, wanted = plain[kind]
    changed = WAYS[way](text)
    path = tmp_path / f"{kind}.TXT"
    path.write_bytes(changed.encode() if isinstance(changed, str) else changed)
    run = logs.read_log(path)
    assert facts_of(run) == facts_of(wanted)
    assert kind == "golf" or (run.value("val_loss"), run.time) == (3.2744, 69.993)


@pytest.mark.parametrize("damage", ["3.2\ufffd44", "3.2\x0044", "3.2\ud7ff", "3.", "3.27x"])
def test_a_damaged_number_is_no_other_number(tmp_path, plain, damage):
    text, wanted = plain["speedrun"]
    (tmp_path / "x.log").write_text(text.replace("3.2744", damage))
    run = logs.read_log(tmp_path / "x.log")
    assert run.value("val_loss") is None and run.curves["val"] == wanted.curves["val"][:-1]
