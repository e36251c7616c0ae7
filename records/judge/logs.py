"""Reads logs, ours and other projects', into Run; tells whether two logs are of one run; averages curves.

Reads the logs of this project and, as they are, of modded-nanogpt and parameter-golf: first the script's own
source, full of strings that look like results, then versions and hardware, then the lines of the run.
"""
import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data import inputs


class Refused(Exception):
    """What was asked for cannot be done. Exit 2."""


def demand(good: Any, sentence: str, error: type[Exception] = Refused) -> None:
    """Raises error with the sentence unless good."""
    if not good:
        raise error(sentence)


def demand_no_dead_link(path: Path) -> None:
    """Refuses a path that leads through a link to where nothing is, such as a disk that is not mounted."""
    for part in (path, *path.parents):
        if part.is_symlink() and not part.exists():
            raise Refused(f"{part} is a link to {os.readlink(part)}, where nothing is: make that folder, or "
                          "remove the link")


def make_folder(path: Path) -> None:
    """Makes a folder and those around it. Raises Refused where a link leads nowhere."""
    demand_no_dead_link(path)
    path.mkdir(parents=True, exist_ok=True)


def remove_folder(path: Path) -> None:
    """Removes a folder that an earlier run left, or the link that stands for it."""
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


DIGITS = {"val_bpb": 8, "val_loss": 4, "core": 6, "time": 4}    # as they are printed
HIGHER_IS_BETTER = {"core"}


def show(metric: str, value: float | None) -> str:
    """A number in the digits of its metric; "-" where there is none."""
    return "-" if value is None else f"{value:.{DIGITS.get(metric, 4)}f}"


# ------------------------------------------------------------ logs
RULER = "=" * 100               # stands before and after the versions and the hardware
MAX_LOG = 64 << 20              # bytes of one log
MAX_LOGS = 3000                 # logs in one call
DATE = re.compile(r"(20\d\d)-?(\d\d)-?(\d\d)")     # how the folder of a record begins
# Begins what a log says of versions and hardware, which another ruler ends
HEADER = re.compile(rf"^{RULER}\n(?=(?i:running |python \d|nvidia-smi|torch))", re.M)
NUMBER = r"(?:\d+(?:\.\d+)?|nan|inf)(?=[\s,;]|$)"       # else it may be a part of a damaged one
STEP = re.compile(              # step, steps, kind of loss, loss, val_bpb, time, its unit, tok/s, mean loss
    rf"^(?:step:)?(\d+)/(\d+) (?=\w+(?:_loss|_partial|_time):)"
    rf"(?:(train_loss|val_loss(?:_partial)?): ?({NUMBER}))? ?(?:val_bpb: ?({NUMBER}))?"
    r"(?:.*?\btrain_time: ?(\d+(?:\.\d+)?)(ms|s|m)\b(?:.*? tok/s:(\d+))?)?"
    rf"(?:.* mean_loss:({NUMBER})$)?", re.M)
FINAL = re.compile(             # tag, name of the loss, loss, val_bpb
    rf"^(\S*(?:final|exact|quantized|ttt)\S*)(?: [a-z_]+:\S+)*? (val_loss(?:_partial)?): ?({NUMBER})"
    rf"(?: val_bpb: ?({NUMBER}))?(?=\s|$)", re.M)
SETTINGS = re.compile(          # before a script
    rf"{RULER}\n(?:[\w ]+:\n)?(?: +\w+: .*\n)*(?:(?:[\w ]+:\n)?{RULER}\n)*")
# What terminals, loggers and progress bars leave in a log: escapes, a bar of tqdm with no line end after it
ESCAPE = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]?")
BAR = re.compile(r"(\[(?:\d+:)?\d\d:\d\d[<,][^\]\n]*\]) *(?=\S)")
# What a logger or torchrun may put in front of every line
STAMP = re.compile(r"^(?:\d{10}\.\d+|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,]*Z?\]?|\[\w+\d\]:) ?", re.M)
# Constants as a log lists them: a block, or lines of nothing but name:value
SETTINGS_BLOCK = re.compile(r"^Hyperparameters:\n((?: +\w+: ?.*\n)+)", re.M)
SETTINGS_LINE = re.compile(
    r"^(?!step:|warmup_step:|val_loader|train_loader)\w+:[^\s:]+(?: \w+:[^\s:]+)* *$", re.M)
# Seconds of what comes after training, but for looks at weights that are no submission
SECONDS = re.compile(
    r"^(?!.*(?:diagnostic|pre-quantization))"
    r".*?\b(?:eval_time: ?(\d+)ms|total_time[=:] ?(\d+(?:\.\d+)?)s)", re.M)
RESUMED = re.compile(r"(?m)^resume: from step (\d+) at train_time:(\d+)ms")
SUMMARY = re.compile(r"^ +(\w+)  (\S.*)$", re.M)
WHOLE_END = re.compile(r"(?:ms|\.\d{8}|MiB|bytes)\s*$")         # of a last line without a line end
NUMBERS = {     # the last line of the log that has them counts
    "bytes_model": r"^Serialized model [^:\s]\S*: (\d+) bytes",
    "bytes_code": r"^Code size: (\d+) bytes",
    "bytes_total": r"(?:^Total submission size [^:\s]\S*: |\bTotal submission: |^budget:)(\d+)",
    "core": r"^core_metric:? ?(-?\d\.\d+)",
    "setup_ms": r"^setup:(\d+)ms",
    "compile_ms": r"^setup:\d+ms compile:(\d+)ms",
    "stopped_ms": r"^stopping_early: \w+ train_time: ?(\d+)ms",
    "stopped_at": r"^stopping_early: .*step: ?(\d+)/",
}
WORDS = {       # the first line that has them counts
    "torch": r"(?i)(?:running pytorch|torch) (\d\.\S+)",
    "hardware": r"^hardware: (.+)$",
    "fingerprint": r"^data: text fingerprint (\S+)",
    "data": r"^data: (\S+) train tokens",
    "val_tokens": r"^(?:data: .* val tokens:|val_tokens: ?|val_loader:.* tokens:)(\d[\d,]*)",
    "val_bytes": r"^data: val_bytes:(\d+)",
    "train_tokens": r"^data: \S+ train tokens:(\d+)",
    "world_size": r"\bworld_size[:= ] ?(\d+)\b",
    "seed": r"(?:^|^config | )seed[:=] ?(\d+)\b",
    "peak_memory": r"^(peak memory .+)$",
}


class Point(NamedTuple):
    """One loss of a log."""
    step: int
    seconds: float              # of training
    loss: float
    tokens: float | None        # read so far, where the log tells the rate
    mean: float | None = None   # of the steps since the line before, where the log tells it

    @property
    def smooth(self) -> float:
        """What pictures show: the mean where there is one, since single batches differ."""
        return self.loss if self.mean is None else self.mean


@dataclasses.dataclass
class Run:
    """One run of a log."""
    path: Path
    label: str = ""                 # how it is called, if not by its file's name
    kind: str = ""                  # of score_kind(): which of its final scores counts; "": the last
    source: str | None = None       # the script that it begins with
    body: str = ""                  # its lines, without script and versions
    finals: list = dataclasses.field(default_factory=list)      # [(tag, val_loss, val_bpb or None)]
    # of Points; part: a part of val, scored during training
    curves: dict = dataclasses.field(default_factory=lambda: {"train": [], "val": [], "part": []})
    facts: dict = dataclasses.field(default_factory=dict)       # of NUMBERS and WORDS
    config: dict = dataclasses.field(default_factory=dict)
    eval: dict = dataclasses.field(default_factory=dict)
    digests: dict = dataclasses.field(default_factory=dict)     # {name: sha256} of inputs and models
    summary: dict = dataclasses.field(default_factory=dict)     # the table that ends a log of ours
    scores: list = dataclasses.field(default_factory=list)      # [(metric, value since the last step)]
    sizes: set = dataclasses.field(default_factory=set)         # all numbers of bytes
    settings: dict = dataclasses.field(default_factory=dict)    # constants of a foreign log
    after: list = dataclasses.field(default_factory=list)       # [(adapts weights?, seconds)] after training
    json: str = ""                  # in a record of ours the file name of its result,
    result: dict = dataclasses.field(default_factory=dict)      # and what that holds
    steps: int = 0
    finished: bool = False
    steps_repeat: bool = False      # a step number came back: resumed, or two runs in one file
    partial: bool = False           # val_loss_partial: of fewer val tokens than its preset scores

    @property
    def file(self) -> str:
        return self.label or self.path.name

    @property
    def seed(self) -> int:
        """By the log or by its name; -1: unknown."""
        return self.seed_in_name if self.seed_in_lines < 0 else self.seed_in_lines

    @property
    def seed_in_lines(self) -> int:
        """By the log's own lines, whatever a command or a name says; -1: unknown."""
        told = self.config.get("seed") or self.facts.get("seed") or ""
        return int(told) if re.fullmatch(r"\d{1,18}", told) else -1

    @property
    def seed_in_name(self) -> int:
        """By the log's file or folder; -1: unknown."""
        found = re.search(r"seed[_-]?(\d+)", self.path.stem)
        found = found or re.fullmatch(r"seed[_-]?(\d+)", self.path.parent.name)
        return int(found[1]) if found else -1

    @property
    def time(self) -> float | None:
        """Seconds of training, None where the log has none."""
        if "stopped_ms" in self.facts:
            return self.facts["stopped_ms"] / 1000
        ends = [curve[-1].seconds for curve in self.curves.values() if curve]
        return max(ends, default=0) or None

    def value(self, metric: str) -> float | None:
        """val_bpb, val_loss, core or time of a finished run; None where the log has none."""
        if metric == "time":
            return self.time
        if metric == "core":
            return self.facts.get("core")
        if final := self.counted(metric):
            _, loss, bpb = final
            return bpb if metric == "val_bpb" else loss
        val = self.curves["val"]
        if val and metric == "val_loss" and self.finished:
            return val[-1].loss
        if metric == "val_bpb" and self.finished and not self.finals:
            return self.facts.get("last_bpb")
        return None

    def exact(self, metric: str) -> float | None:
        """The same with all digits, where there is a result.json that tells it."""
        if metric == "time" and "train_time_ms" in self.result:
            return self.result["train_time_ms"] / 1000
        told = self.result.get(metric)
        return self.value(metric) if told is None else told

    def counted(self, metric: str) -> tuple | None:
        """The one of the final scores that counts; None where the log has none."""
        # a log of ours has two scores; its configuration says which one counts
        trained_counts = self.config.get("score_artifact") == "0"
        for final in reversed(self.finals):
            tag, _, bpb = final
            has_value = metric != "val_bpb" or bpb is not None
            if has_value and (not trained_counts or tag == "final_model_exact"):
                if self.kind in ("", score_kind(tag)):
                    return final
        return None


def score_kind(tag: str) -> str:
    """What a final score was evaluated by: "ttt" (test-time training), "sliding" or "plain"."""
    return next((kind for kind in ("ttt", "sliding") if kind in tag), "plain")


def script_of(text: str) -> tuple[str | None, str]:
    """(script or None, settings) of what stands before the versions of a log."""
    found = SETTINGS.match(text)
    settings = found[0] if found else ""
    script = text.removeprefix(settings).removesuffix("\n")
    if re.search(r"^(?:import|from) \w", script, re.M):
        return script, settings
    return None, settings + script      # a list of settings


def split_at_ruler(text: str) -> tuple[str, str, str]:
    """For a log that begins with its script and names no versions: the last ruler ends the script."""
    script, ruler, body = text.rpartition(f"\n{RULER}\n")
    if not ruler:
        return text, "", ""     # cut off before the run began
    return script, body[:20_000], body


def plain_text(raw: bytes) -> str:
    """Bytes of a log -> its text, lines ended by \\n, without escapes of terminals, progress bars on lines of
    their own. None for what is no text."""
    text = inputs.decode(raw, "replace")
    if "\0" in text:
        text = re.sub("\0+", "\ufffd", text)        # a hole
        start = text[:1 << 16]
        odd = sum(not (char.isprintable() or char.isspace()) for char in start) + start.count("\ufffd")
        if odd * 10 > len(start):
            return None
    text = re.sub(r"\r+\n", "\n", ESCAPE.sub("", text))
    text = re.sub(r"\r|[\b]+", "\n", text)       # each of them goes back to the start of the line
    text = re.sub("(?m)^[\ufeff\ufffd]+", "", text)
    return BAR.sub(r"\1\n", text)


def log_text(path: Path) -> str:
    """A log's text up to its last whole line. Raises Refused for what is no text."""
    size = path.stat().st_size
    demand(size <= MAX_LOG, f"{path.name} has {size >> 20} MB, more than any log (limit {MAX_LOG >> 20} MB)")
    text = plain_text(inputs.read_bytes(path))
    demand(text is not None, f"{path.name} is a binary file, no log")
    start = text[:20_000]
    if 2 * len(STAMP.findall(start)) > start.count("\n"):
        text = STAMP.sub("", text)
    if not text.endswith("\n") and not WHOLE_END.search(text, max(0, len(text) - 200)):
        text = text[:text.rfind("\n") + 1]      # cut off within a line
    return text


def parts_of(text: str) -> list[tuple[str | None, str, str]]:
    """[(script or None, versions and hardware, lines)] of each run of a log's text, one for each header."""
    header = HEADER.search(text)
    if not header:
        begins_with_script = re.match(r"\s*(?:#!|import \w|from \w+ import|'''|\"\"\"|def |class )", text)
        return [split_at_ruler(text) if begins_with_script else (None, text[:20_000], text)]
    found = []
    source, settings = script_of(text[:header.start()])
    while header:
        end = text.find(RULER, header.end())
        head = text[header.end():end if end >= 0 else None]
        start = end + len(RULER) if end >= 0 else header.end()
        following = HEADER.search(text, start)
        body = text[start:following.start() if following else None]
        next_source = None
        if following:       # its script begins as the one before does
            body, line_end, rest = body.rpartition("\n" + "\n".join((source or RULER).split("\n")[:3]))
            next_source = line_end[1:] + rest if line_end else None
            body = body or rest
        found.append((source, f"{settings}\n{head}", body))
        source = next_source and next_source.removesuffix("\n")
        settings = ""
        header = following
    return found


def cut_where_steps_begin_again(body: str) -> list[str]:
    """The lines of a run, or of each of several that one log holds without further headers."""
    first = STEP.search(body)
    cuts = [0]
    for before, line in itertools.pairwise(STEP.finditer(body)):
        if line[1] == first[1] and int(line[1]) < int(before[1]):
            ends = [before, *FINAL.finditer(body, before.end(), line.start())]
            cuts.append(body.index("\n", ends[-1].end()) + 1)
    return [body[start:end] for start, end in itertools.pairwise([*cuts, len(body)])] if cuts[1:] else [body]


def read_curves(run: Run, body: str) -> None:
    """Fills in run.curves, run.steps and run.steps_repeat."""
    units_per_second = {"ms": 1000, "s": 1, "m": 1 / 60}
    seconds = 0.0
    at = 0
    for found in STEP.finditer(body):
        step, _, kind, loss, bpb, time, unit, rate, mean = found.groups()
        step = int(step)
        at = found.start()
        run.steps = max(run.steps, step)
        if time:
            seconds = float(time) / units_per_second[unit]
        if kind:
            curve = run.curves["val" if kind.startswith("val") else "train"]
            run.partial |= kind == "val_loss_partial"
            if curve and step <= curve[-1].step:
                run.steps_repeat = True
            tokens = int(rate) * seconds if rate else None
            curve.append(Point(step, seconds, float(loss), tokens, float(mean) if mean else None))
        if bpb:
            run.facts["last_bpb"] = float(bpb)
    losses = dict(re.findall(r"^val_part step:(\d+) val_loss:(\d+\.\d+)$", body, re.M))
    run.curves["part"] = points_of_part(run, {int(step): float(loss) for step, loss in losses.items()})
    for metric, value in re.findall(r"val_\w*?(loss|bpb)\w*[:=] ?(\d+\.\d+)", body[at:]):
        run.scores.append((f"val_{metric}", float(value)))
    for ms, seconds in dict.fromkeys(SECONDS.findall(body, at)):
        run.after.append((bool(seconds), float(seconds) if seconds else float(ms) / 1000))
    run.sizes = {int(value) for value in re.findall(r"(\d{4,})(?= bytes|/16000000)", body)}


def points_of_part(run: Run, losses: dict[int, float]) -> list[Point]:
    """The Points of losses {step: loss} on a part of val, with the seconds of the training lines."""
    train = {point.step: point.seconds for point in run.curves["train"]}
    if not train:
        return []
    steps = sorted(train)
    seconds = [train[step] for step in steps]
    return [Point(step, float(np.interp(step, steps, seconds)), loss, None)
            for step, loss in sorted(losses.items())]


def read_facts(run: Run, head: str, body: str) -> None:
    """Fills in run.facts."""
    for key, pattern in NUMBERS.items():
        if found := re.findall(pattern, body, re.M):
            run.facts[key] = float(found[-1])
    for key, pattern in WORDS.items():
        texts = (body, head) if key == "seed" else (head, body)     # each run of a log may have its seed
        if word := re.search(pattern, texts[0], re.M) or re.search(pattern, texts[1], re.M):
            run.facts[key] = word[1]
    gpus = re.findall(r"^\|\s+\d+\s+(NVIDIA [^|]*?)\s+(?:On|Off)\s*\|", head, re.M)     # of nvidia-smi
    if gpus:
        run.facts.setdefault("hardware", f"{len(gpus)}x {gpus[0]}")
    totals = re.findall(r"^Total submission size: (\d+) bytes", body, re.M)
    if len(totals) > 1:         # of the raw weights, then of the artifact
        run.facts.setdefault("bytes_total", float(totals[-1]))


def read_settings(run: Run, head: str, body: str) -> None:
    """Fills in run.settings: what the log lists before the first step."""
    first = STEP.search(body)
    body = body[:first.start() if first else 20_000]
    for text in (head, body):
        for block in SETTINGS_BLOCK.findall(text):
            run.settings |= dict(re.findall(r"^ +(\w+): ?(.*)$", block, re.M))
    for line in SETTINGS_LINE.findall(body):
        run.settings |= dict(pair.split(":") for pair in line.split())


def read_log(path: Path, read: Callable[[Path], list[Run]] | None = None) -> Run:
    """The one run of a log, by its text or as `read` does. Raises Refused for what is no text or holds more
    than one."""
    found = (read or read_logs)(path)
    demand(len(found) == 1, f"{found[0].path.name} holds more than one run")
    return found[0]


def read_logs(path: Path) -> list[Run]:
    """The runs of a log of this project or of another one, as Runs. Raises Refused for what is no text."""
    path = Path(path)
    found = [read_run(path, source, head, lines) for source, head, body in parts_of(log_text(path))
             for lines in cut_where_steps_begin_again(body)]
    found = [run for run in found if run.curves["val"] or run.finals] or found[:1]
    if len(found) > 1:
        for number, run in enumerate(found, 1):
            run.label = f"{path.name} (run {number} of {len(found)})"
    return found


def read_run(path: Path, source: str | None, head: str, body: str) -> Run:
    """One part of a log -> Run."""
    run = Run(path, source=source, body=body)
    read_curves(run, body)
    rest = re.sub(r"^step:\d.*\n", "", body, flags=re.M)        # most lines of a log are steps
    read_facts(run, head, rest)
    read_settings(run, head, body)
    for tag, name, loss, bpb in FINAL.findall(rest):
        run.partial |= name == "val_loss_partial"
        run.finals.append((tag, float(loss), float(bpb) if bpb else None))
    run.config = dict(re.findall(r"^config (\w+)=(.*)$", rest, re.M))
    run.digests = dict(re.findall(r"^sha256 (\S+):([0-9a-f]{64})$", rest, re.M))
    if settings := re.search(r"^eval settings: (.+)$", rest, re.M):
        run.eval = dict(re.findall(r"(\S+?):(\S*)", settings[1]))
    run.summary = dict(SUMMARY.findall(body[-5000:]))
    # finished: there is a final score, or the last validation is at the last step
    totals = re.findall(r"^(?:step:)?\d+/(\d+) ", body[-20_000:], re.M)
    last_steps = {run.facts.get("stopped_at"), float(totals[-1]) if totals else None}
    val = run.curves["val"]
    run.finished = bool(run.finals) or bool(val) and val[-1].step in last_steps
    return run


# ------------------------------------------------------------ events of our own runs
EVENTS = "events.jsonl"         # what a run of ours writes beside its train.log, for programs


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The events in a run's folder, in order; [] if there are none. A line that a crash cut short is
    skipped."""
    path = folder / EVENTS
    if not path.is_file() or path.stat().st_size > MAX_LOG:
        return []
    found = []
    for line in inputs.read_text(path, "replace").split("\n"):
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict) and "kind" in event:
                found.append(event)
    return found


def read_runs(log: Path | str) -> list[Run]:
    """The runs of a log: by its events where a run of ours left some, in which nothing that its model wrote
    can look like a result; else, as for records and foreign logs, by its text."""
    log = Path(log)
    events = read_events(log.parent) if log.name == "train.log" else []
    if any(event["kind"] == "start" for event in events):
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):      # another program's
            return [run_of_events(log, events)]
    return read_logs(log)


def run_of_events(log: Path, events: list[dict[str, Any]]) -> Run:
    """The Run of a train.log by its events: those that compare runs are read as the lines of the log that
    they stand for. What only checks of records ask for, such as sizes, is left to read_log()."""
    script = log.with_name("train_gpt.py")
    source = inputs.read_text(script, "replace") if script.is_file() else None
    start = next(event for event in events if event["kind"] == "start")
    own, taken = start.get("overrides", {}).get("val_tokens", ("0", "0"))
    name = "val_loss" if taken in ("0", own) else "val_loss_partial"
    lines = [line for event in events for line in lines_of_event(event, name)]
    head = f"torch {start['torch']} \nhardware: {start['hardware']}\n"
    return read_run(log, source, head, "\n".join([*lines, ""]))


def lines_of_event(event: dict[str, Any], name: str) -> list[str]:
    """An event as a log of ours tells it. name: of the loss on val."""
    kind = event["kind"]
    ms = round(1e3 * event.get("seconds", 0))
    if kind == "start":
        data = event["data"]
        settings = " ".join([f"{key}:{value}" for key, value in event.get("eval", {}).items()])
        return [f"data: {data.get('name')} train tokens:{data.get('train_tokens', 0)} in 1 shards, "
                f"val tokens:{data['val_tokens']}", f"data: val_bytes:{data.get('val_bytes')}",
                f"data: text fingerprint {data['fingerprint']}", f"eval settings: {settings}",
                *[f"config {key}={value}" for key, value in event["config"].items()],
                *[f"sha256 {key}:{digest}" for key, digest in data.get("sha256", {}).items()]]
    if kind == "setup":
        return [f"setup:{event['setup_ms']}ms compile:{event['compile_ms']}ms"]
    if kind == "train":
        rate = f" tok/s:{event['tokens'] / event['seconds']:.0f}" if event.get("tokens") and ms else ""
        mean = event.get("mean_loss")
        more = "" if mean is None else f" mean_loss:{mean:.4f}"
        return [f"step:{event['step']}/{event.get('steps', 0)} train_loss:{event['train_loss']:.4f} "
                f"train_time:{ms}ms{rate}{more}"]
    if kind == "val":
        return [f"step:{event['step']}/{event['steps']} {name}:{event['val_loss']:.4f}"
                f"{bpb_text(event, 4)} train_time:{ms}ms"]
    if kind == "val_part":
        return [f"val_part step:{event['step']} val_loss:{event['val_loss']:.4f}"]
    if kind == "stop":
        return [f"stopping_early: {event['reason']} train_time:{ms}ms step:{event['step']}/0"]
    if kind == "score":
        return [f"{event['tag']}{end} {name}:{event['val_loss']:.{digits}f}{bpb_text(event, digits)}"
                for end, digits in (("", 4), ("_exact", 8))]
    if kind == "result":
        core = [] if event["core"] is None else [f"core_metric {event['core']:.6f}"]
        return [*core, f"        tokens  {event['tokens']}"]
    return []


def bpb_text(event: dict[str, Any], digits: int) -> str:
    """The bits per byte of an event, if it has them."""
    return "" if event.get("val_bpb") is None else f" val_bpb:{event['val_bpb']:.{digits}f}"


# ------------------------------------------------------------ many runs
def agree(runs: list[Run]) -> None:
    """Makes the runs of a record comparable: which of their final scores counts is that which all of a script
    have."""
    for run in runs:
        kinds = [[score_kind(tag) for tag, *_ in other.finals] for other in runs
                 if other.finals and other.source == run.source and other.path.parent == run.path.parent]
        common = [kind for kind in (kinds or [[]])[0] if all(kind in other for other in kinds)]
        run.kind = common[-1] if common else ""


def outermost(runs: list[Run]) -> tuple[list[Run], list[Run]]:
    """(runs of a record, made comparable; diagnostic runs: in folders below one that has finished runs)"""
    agree(runs)
    copies = Counter(map(identity, runs))
    outer = []
    inner = []
    homes = {run.path.parent for run in runs if run.finished and copies[identity(run)] == 1}
    for run in runs:
        here = run.path.parent
        while here != here.parent and not DATE.match(here.name) and here.parent not in homes:
            here = here.parent
        below = here != here.parent and here.parent in homes        # Path(".") is its own parent
        diagnostic = below and not DATE.match(here.name)            # a date begins another record
        (inner if diagnostic else outer).append(run)
    agree(outer)
    return outer, inner


def find_logs(path: Path | str, follow: bool = True) -> list[Path]:
    """Log files at path: itself, or every .log and .txt below it, of linked folders too if they are to be
    followed. Raises Refused."""
    path = Path(path)
    demand_no_dead_link(path)
    demand(path.is_file() or path.is_dir(), f"{path} is no file and no folder")
    if path.is_file():
        return [path]
    found = []
    for file in inputs.files_below(path, follow):
        if file.suffix.lower() in (".log", ".txt") and file.name != "samples.txt" and file.is_file():
            found.append(file)
        demand(len(found) <= MAX_LOGS, f"{path} holds more than {MAX_LOGS} logs")
    return found


def why_left_out(run: Run, seen: dict[tuple, str]) -> str:
    """Why a run does not count, or ""; seen: {what makes a run the same: its name} of those before it."""
    loss = run.value("val_loss")
    if not run.curves["val"] and not run.finals:
        return f"{run.file} has no validation and no final score"
    if not run.finished:
        return f"{run.file} was cut off at step {run.steps}"
    if loss is not None and not math.isfinite(loss):
        return f"{run.file} ended with a loss of {loss}"
    if identity(run) in seen:
        return f"{run.file} is the same run as {seen[identity(run)]}"
    return ""


def identity(run: Run) -> tuple:
    """Two logs for which this is equal are of the same run."""
    return tuple(run.finals), tuple(run.curves["val"][-1:]), run.time


def load_runs(paths: list[str], say: Callable = lambda line: None) -> list[Run]:
    """Finished runs at paths, each log once; say() hears what is left out. Raises Refused if none is left."""
    runs = []
    seen = {}
    for path in paths:
        logs = find_logs(path)
        found = []
        for log in logs:
            try:
                found += read_runs(log)
            except Refused as error:
                if len(logs) == 1:
                    raise
                say(f"left out: {error}")
        found, inner = outermost(found)
        for run in inner:
            say(f"left out: {run.path.relative_to(path)} is in a folder below runs that are counted")
        for run in found:
            if why := why_left_out(run, seen):
                say(f"left out: {why}")
                continue
            if run.steps_repeat:
                say(f"warning: step numbers repeat in {run.file}")
            seen[identity(run)] = run.file
            runs.append(run)
    exact = [run for run in runs if any(tag.endswith("exact") for tag, *_ in run.finals)]
    homes = {run.path.parent for run in exact}
    cut = [run for run in runs if run.path.parent in homes and run not in exact]    # before such a line
    for run in cut:
        say(f"left out: {run.file} was cut off before its final score")
    runs = [run for run in runs if run not in cut]
    demand(runs, f"no finished run in {', '.join(str(path) for path in paths)}")
    return runs


def pick_metric(runs: list[Run], metric: str | None = "") -> str:
    """The metric asked for, else val_bpb where every run has a final one, else val_loss. Raises Refused."""
    if not metric:
        all_have_bpb = all(run.value("val_bpb") is not None for run in runs)
        metric = "val_bpb" if all_have_bpb else "val_loss"
    missing = [run.path.name for run in runs if run.value(metric) is None]
    demand(not missing, f"{missing and missing[0]} has no {metric}")
    return metric


# ------------------------------------------------------------ seeds
LEAST_EQUAL = 5     # training losses that two runs share, beside that of step 1, until they are one run


def same_losses(one: Run, other: Run) -> bool:
    """Do two logs hold the losses of one run, however long each step took? By final scores with 8 decimals,
    else by the curves. False where the logs have too few losses to tell."""
    exact = [[final for final in run.finals if final[0].endswith("exact")] for run in (one, other)]
    if all(exact):
        return exact[0] == exact[1]
    if (one.finals, one.steps) != (other.finals, other.steps):
        return False
    train_one, train_other = ([(point.step, point.loss) for point in run.curves["train"] if point.step > 1]
                              for run in (one, other))
    val_one, val_other = ([(point.step, point.loss) for point in run.curves["val"]] for run in (one, other))
    return len(train_one) >= LEAST_EQUAL and train_one == train_other and val_one == val_other


def recipe_of(run: Run) -> tuple:
    """What two runs share if they differ in the seed alone."""
    constants = {name: value for name, value in (run.settings | run.config).items()
                 if not re.search(r"(?i)^seed$|run_id|log_?file|date|stamp", name)}
    return (run.source or "").strip(), constants, run.facts.get("fingerprint")


def why_not_another(run: Run, earlier: list[Run]) -> str:
    """Why a run is no further sample beside the earlier ones, or "": it has the losses of one of them, or its
    recipe and its seed."""
    for other in earlier:
        where = f"{name_of(run)} and {name_of(other)}"
        if same_losses(run, other):
            return f"{where} have the same losses"
        if run.seed >= 0 and run.seed == other.seed and recipe_of(run) == recipe_of(other):
            return f"{where} have the same seed, {run.seed}"
    return ""


def name_of(run: Run) -> str:
    """How a sentence calls a run: by its folder where all logs have one name."""
    return run.path.resolve().parent.name if run.file == "train.log" else run.file


def demand_samples(runs: list[Run]) -> None:
    """Refuses runs of which two are one sample, since each counts as a seed."""
    for i, run in enumerate(runs):
        why = why_not_another(run, runs[:i])
        demand(not why, f"{why}: each seed counts once, so leave one of the two out or train another SEED")


def demand_seed(run: Run, seed: int, label: str) -> None:
    """Refuses a run that by its own log was trained with another seed than it was asked for."""
    told = run.seed_in_lines
    demand(told in (-1, seed), f"{label}: its log says seed {told} where SEED={seed} was asked for: leave "
           "the seed to this command, which gives each run its own")


# ------------------------------------------------------------ curves
def points_with(run: Run, split: str, axis: str) -> list[Point]:
    """The points of a curve that have a place on an axis: "seconds" or "tokens"."""
    return [point for point in run.curves[split] if getattr(point, axis) is not None]


def mean_curve(runs: list[Run], split: str, axis: str, grid: Sequence[float]) -> np.ndarray:
    """Losses of runs (run, place) at the places of grid on an axis, on which each has two points or more."""
    rows = []
    for run in runs:
        points = points_with(run, split, axis)
        places = np.array([getattr(point, axis) for point in points], float)
        losses = np.array([point.smooth for point in points])
        if split == "train":    # single batches are noisy: each with its neighbours
            losses = np.convolve(np.pad(losses, 1, "edge"), np.ones(3) / 3, "valid")
        rows.append(np.interp(grid, places, losses))
    return np.array(rows)


def batch_means(points: list[Point]) -> list[tuple[float, float]]:
    """[(seconds, mean loss)], means over at least a fiftieth of the run's steps: the first lines of a log are
    of single batches, whose losses differ by more than training changes them."""
    points = sorted({point.step: point for point in points}.values())    # a resumed run repeats some
    least = points[-1].step / 50
    rows = []
    before = weight = 0
    total = 0.0
    for point in points:
        total += point.smooth * (point.step - before)
        weight += point.step - before
        before = point.step
        if weight >= least or point is points[-1]:
            rows.append((point.seconds, total / weight))
            total = weight = 0
    return rows


def equal_point(a: list[Run], b: list[Run], axis: str,
                splits: list[str]) -> tuple[tuple[str, float], np.ndarray, np.ndarray] | None:
    """((name of the loss, place), losses of a, losses of b) at the last place on an axis that all runs have
    reached, by the first of the splits that all have a curve of. None where there is no such place."""
    for split in splits:
        least = 4 if split == "val" else 2
        curves = [points_with(run, split, axis) for run in (*a, *b)]
        if all(len(curve) >= least for curve in curves):
            place = min(getattr(curve[-1], axis) for curve in curves)
            of_a, of_b = (mean_curve(runs, split, axis, [place])[:, 0] for runs in (a, b))
            return (f"{split}_loss", place), of_a, of_b
    return None
