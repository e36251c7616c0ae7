"""Logs and statistics: what a run said, and what its numbers mean.

Reads the logs of this project and, as they are, of modded-nanogpt and parameter-golf: the script's own source
first, full of strings that look like results, then versions and hardware, then the lines of the run.
"""
import dataclasses
import itertools
import math
import os
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Refused(Exception):
    """What was asked for cannot be done. Exit 2."""


def demand(good, sentence, error=Refused):
    if not good:
        raise error(sentence)


DIGITS = {"val_bpb": 8, "val_loss": 4, "core": 6, "time": 4}    # as they are printed
HIGHER = {"core"}               # metrics of which more is better


def show(metric, value):
    return "-" if value is None else f"{value:.{DIGITS.get(metric, 4)}f}"


# ------------------------------------------------------------ logs
RULER = "=" * 100
MAX_LOG, MAX_LOGS = 64 << 20, 3000       # bytes of one log; logs in one call
HEAD_LINE = re.compile(r"(?i)\n(?:running |python \d|nvidia-smi|torch)")
NUMBER = r"\d+(?:\.\d+)?|nan|inf"
STEP = re.compile(      # step, steps, kind of loss, loss, time, its unit, tok/s
    rf"^(?:step:)?(\d+)/(\d+) (?=\w+(?:_loss|_partial|_time):)"
    rf"(?:(train_loss|val_loss(?:_partial)?): ?({NUMBER})\b)? ?(?:val_bpb: ?(?:{NUMBER})\b)? ?"
    r"(?:train_time: ?(\d+(?:\.\d+)?)(ms|s|m)\b(?:.*? tok/s:(\d+))?)?", re.M)
FINAL = re.compile(rf"^(\S*(?:final|exact|quantized|ttt)\S*) (val_loss(?:_partial)?): ?({NUMBER})"
                   rf"(?: val_bpb: ?({NUMBER}))?(?=\s|$)", re.M)
NAMED = re.compile(r"^final_(\w+) (val_loss_\1:\S+(?: val_bpb_\1:\S+)?) eval_time:", re.M)
WHOLE_END = re.compile(r"(?:ms|\.\d{8}|MiB|bytes)\s*$")       # of a last line without a line end
NUMBERS = {     # what else a log says: the last time that it says it
    "bytes_model": r"^Serialized model [^:\s]\S*: (\d+) bytes", "bytes_code": r"^Code size: (\d+) bytes",
    "bytes_total": r"^Total submission size [^:\s]\S*: (\d+) bytes", "core": r"^core_metric:? ?(-?\d\.\d+)",
    "setup_ms": r"^setup:(\d+)ms", "compile_ms": r"^setup:\d+ms compile:(\d+)ms",
    "stopped_ms": r"^stopping_early: \w+ train_time: ?(\d+)ms",
    "stopped_at": r"^stopping_early: .*step: ?(\d+)/"}
WORDS = {       # the first time
    "torch": r"(?i)(?:running pytorch|torch) (\d\.\S+)", "hardware": r"^hardware: (.+)$",
    "fingerprint": r"^data: text fingerprint (\S+)", "data": r"^data: (\S+) train tokens",
    "val_tokens": r"^data: .* val tokens:(\d+)", "val_bytes": r"^data: val_bytes:(\d+)",
    "train_tokens": r"^data: \S+ train tokens:(\d+)", "world_size": r"^world_size:(\d+)",
    "seed": r"^(?:config )?seed[:=] ?(\d+)", "peak_memory": r"^(peak memory .+)$"}


@dataclasses.dataclass
class Run:
    """One log. Times in seconds, curves {split: [(step, seconds, loss, tokens or None)]}."""
    path: Path
    label: str = ""                 # how it is called, if not by its file's name
    source: str | None = None       # the script that it begins with
    finals: list = dataclasses.field(default_factory=list)      # [(tag, val_loss, val_bpb or None)]
    named: dict = dataclasses.field(default_factory=dict)       # {protocol of golf.py: [what it scored]}
    curves: dict = dataclasses.field(default_factory=lambda: {"train": [], "val": []})
    said: dict = dataclasses.field(default_factory=dict)        # of NUMBERS and WORDS
    config: dict = dataclasses.field(default_factory=dict)
    eval: dict = dataclasses.field(default_factory=dict)
    table: dict = dataclasses.field(default_factory=dict)       # the summary that ends a log of ours
    steps: int = 0
    finished: bool = False
    rewinds: bool = False           # a step number came back: resumed, or two runs in one file

    @property
    def file(self):
        return self.label or self.path.name

    @property
    def seed(self):
        named = re.search(r"seed_?(\d+)", self.path.stem)
        return int(self.said.get("seed") or (named[1] if named else -1))

    @property
    def time(self):
        ends = [curve[-1][1] for curve in self.curves.values() if curve]
        stopped = self.said.get("stopped_ms")
        return stopped / 1000 if stopped else max(ends) if ends else None

    def value(self, metric):
        """val_bpb, val_loss, core or time of a finished run; None where the log has none."""
        if metric in ("time", "core"):
            return self.time if metric == "time" else self.said.get("core")
        trained = self.config.get("score_artifact") == "0"      # of ours: which of its two scores counts
        for tag, loss, bpb in reversed(self.finals):
            found = bpb if metric == "val_bpb" else loss
            if found is not None and (not trained or tag == "final_model_exact"):
                return found
        val = self.curves["val"]
        return val[-1][2] if val and metric == "val_loss" and self.finished else None


def split_log(text):
    """(source or None, versions and hardware, lines of the run) of a log's text."""
    at = -1
    while (at := text.find(RULER + "\n", at + 1)) >= 0:
        if (at == 0 or text[at - 1] == "\n") and HEAD_LINE.match(text, at + len(RULER)):
            source, rest = text[:at].removesuffix("\n"), text[at + len(RULER) + 1:]
            head, found, body = rest.partition(RULER)
            script = re.search(r"^(?:import|from) \w", source, re.M)      # or a list of settings
            return source if script else None, head, body if found else head
    if re.match(r"\s*(?:#!|import \w|from \w+ import|'''|\"\"\"|def |class )", text):
        return text, "", ""     # a script, cut off before the run began
    return None, text[:20_000], text


def read_log(path):
    """A log of this project or of the two public ones -> Run. Raises Refused for what is no text."""
    path = Path(path)
    size = path.stat().st_size
    demand(size <= MAX_LOG, f"{path.name} has {size >> 20} MB, more than any log (limit {MAX_LOG >> 20} MB)")
    raw = path.read_bytes()
    demand(b"\0" not in raw[:1 << 16], f"{path.name} is a binary file, no log")
    text = raw.decode("utf-8", "replace")
    del raw
    text = text.replace("\r\n", "\n") if "\r" in text[:1000] else text
    if not text.endswith("\n") and not WHOLE_END.search(text, max(0, len(text) - 200)):
        text = text[:text.rfind("\n") + 1]      # cut off within a line
    source, head, body = split_log(text)
    del text
    again = body.find("\n" + RULER + "\n")
    while again >= 0 and not HEAD_LINE.match(body, again + 1 + len(RULER)):
        again = body.find("\n" + RULER + "\n", again + 1)
    demand(again < 0 or not STEP.search(body, 0, again), f"{path.name} holds more than one run")
    run, unit_size = Run(path, source=source), {"ms": 1000, "s": 1, "m": 1 / 60}
    seconds = 0.0
    for step, _, kind, loss, took, unit, rate in (found.groups() for found in STEP.finditer(body)):
        seconds = float(took) / unit_size[unit] if took else seconds
        run.steps = max(run.steps, int(step))
        if kind:
            point = (int(step), seconds, float(loss), int(rate) * seconds if rate else None)
            curve = run.curves["val" if kind.startswith("val") else "train"]
            run.rewinds |= bool(curve) and point[0] <= curve[-1][0]
            curve.append(point)
    for protocol, told in NAMED.findall(body):
        run.named.setdefault(protocol, []).append(told)
    run.finals = [(tag, float(loss), float(bpb) if bpb else None)
                  for tag, _, loss, bpb in FINAL.findall(body)]
    for key, pattern in NUMBERS.items():
        if said := re.findall(pattern, body, re.M):
            run.said[key] = float(said[-1])
    for key, pattern in WORDS.items():
        if said := re.search(pattern, head, re.M) or re.search(pattern, body, re.M):
            run.said[key] = said[1]
    if gpus := re.findall(r"^\|\s+\d+\s+(NVIDIA [^|]*?)\s+(?:On|Off)\s*\|", head, re.M):
        run.said.setdefault("hardware", f"{len(gpus)}x {gpus[0]}")
    run.config = dict(re.findall(r"^config (\w+)=(.*)$", body, re.M))
    if found := re.search(r"^eval settings: (.+)$", body, re.M):
        run.eval = dict(pair.partition(":")[::2] for pair in found[1].split())
    run.table = dict(re.findall(r"^ +(\w+)  (\S.*)$", body[-5000:], re.M))
    val, total = run.curves["val"], re.findall(r"^(?:step:)?\d+/(\d+) ", body[-20_000:], re.M)
    ends = {run.said.get("stopped_at"), float(total[-1]) if total else None}
    run.finished = bool(run.finals) or bool(val) and val[-1][0] in ends
    return run


def find_logs(path):
    """Log files at path: itself, or every .log and .txt below it. Raises Refused."""
    path = Path(path)
    demand(path.is_file() or path.is_dir(), f"{path} is no file and no folder")
    if path.is_file():
        return [path]
    found = []
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
        logs = (Path(folder, name) for name in sorted(names) if name.endswith((".log", ".txt")))
        found += [log for log in logs if log.is_file()]
        demand(len(found) <= MAX_LOGS, f"{path} holds more than {MAX_LOGS} logs")
    return found


def load_runs(paths, say=lambda line: None):
    """Finished runs at paths, each log once; say() hears what is left out. Raises Refused if none is left."""
    runs, seen = [], {}
    for path in paths:
        logs = find_logs(path)
        for log in logs:
            try:
                run = read_log(log)
            except Refused as error:
                if len(logs) == 1:
                    raise
                say(f"left out: {error}")
                continue
            key = (run.source and hash(run.source), tuple(run.finals), tuple(run.curves["val"]), run.time)
            loss = run.value("val_loss")
            if not run.curves["val"] and not run.finals:
                say(f"left out: {log.name} has no validation and no final score")
            elif not run.finished:
                say(f"left out: {log.name} was cut off at step {run.steps}")
            elif loss is not None and not math.isfinite(loss):
                say(f"left out: {log.name} ended with a loss of {loss}")
            elif key in seen:
                say(f"left out: {log.name} is the same run as {seen[key]}")
            else:
                if run.rewinds:
                    say(f"warning: step numbers repeat in {log.name}")
                seen[key] = log.name
                runs.append(run)
    exact = {run.path: any(tag.endswith("exact") for tag, *_ in run.finals) for run in runs}
    if any(exact.values()):     # then a log without such a line ended before it
        for run in runs:
            if not exact[run.path]:
                say(f"left out: {run.file} was cut off before its final score")
        runs = [run for run in runs if exact[run.path]]
    demand(runs, f"no finished run in {', '.join(str(path) for path in paths)}")
    return runs


def pick_metric(runs, metric=""):
    """The metric asked for, else val_bpb where every run has a final one, else val_loss. Raises Refused."""
    metric = metric or ("val_bpb" if all(run.value("val_bpb") is not None for run in runs) else "val_loss")
    missing = [run.path.name for run in runs if run.value(metric) is None]
    demand(not missing, f"{missing[:1]} has no {metric}")
    return metric


# ------------------------------------------------------------ statistics
ALPHA, POWER = 0.025, 0.9       # of compare: one-sided level, and how surely an effect it names is found


class Stats(NamedTuple):
    n: int
    mean: float
    std: float | None           # with n - 1; None for one value
    low: float | None           # of the mean's 95 % interval
    high: float | None


class Test(NamedTuple):
    t: float                    # positive: on the better side
    df: float
    p: float                    # one-sided: this or more by chance


def describe(values):
    """Stats of numbers."""
    values = np.asarray(values, float)
    if len(values) < 2:
        return Stats(len(values), float(values.mean()), None, None, None)
    from scipy import stats
    mean, std = float(values.mean()), float(values.std(ddof=1))
    half = float(stats.t.ppf(0.975, len(values) - 1)) * std / len(values) ** 0.5
    return Stats(len(values), mean, std, mean - half, mean + half)


def test_target(values, target, metric):
    """One-sample t-test that the mean is better than target. None for a single value."""
    if len(values) < 2:
        return None
    from scipy import stats
    sign = 1 if metric in HIGHER else -1
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found = stats.ttest_1samp(sign * np.asarray(values, float), sign * target, alternative="greater")
    return Test(float(found.statistic), float(found.df), float(found.pvalue))


def test_welch(a, b, metric):
    """Welch's test that b is better than a, with (low, high) of b - a at 95 %. None without two runs each."""
    if min(len(a), len(b)) < 2:
        return None
    from scipy import stats
    a, b, sign = np.asarray(a, float), np.asarray(b, float), 1 if metric in HIGHER else -1
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found = stats.ttest_ind(sign * b, sign * a, equal_var=False, alternative="greater")
        span = stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    return Test(*map(float, (found.statistic, found.df, found.pvalue))), (float(span.low), float(span.high))


def detectable(std, n, alpha=ALPHA, power=POWER):
    """The difference of means that Welch's test with n >= 3 runs a side finds with that power; None below 3.
    Its degrees of freedom, between n - 1 and 2n - 2 by chance, count as 1.5 (n - 1), which simulations
    bear out."""
    if n < 3:
        return None
    from scipy import optimize, stats
    df = 1.5 * (n - 1)
    critical = stats.t.isf(alpha, df)
    shift = optimize.brentq(lambda d: stats.nct.sf(critical, df, d) - power, 0, 200)
    return float(shift * std * (2 / n) ** 0.5)


def cautious_std(std, df):
    """A bound that the true deviation keeps to in four of five cases, of one measured with df."""
    from scipy import stats
    return std * float(df / stats.chi2.ppf(0.2, df)) ** 0.5


def runs_needed(difference, std, alpha=ALPHA, power=POWER):
    """Runs a side until that difference would be found; None above 1,000."""
    for n in itertools.chain(range(3, 40), range(40, 1001, 20)):
        if detectable(std, n, alpha, power) <= abs(difference):
            return n
    return None


def stats_line(metric, s):
    """n, mean, std and interval of Stats, in the digits of the metric."""
    mean, std, low, high = (show(metric, value) for value in s[1:])
    return f"n={s.n} mean {mean}" + f" std {std} (95 %: {low} to {high})" * (s.std is not None)


def test_line(test):
    return "one run, no test" if test is None else f"t={test.t:.2f} df={test.df:.3g} p={test.p:.4f}"


def judge(a, b, metric):
    """Is b better than a? {verdict, p, difference, interval, ratio, detectable, runs_needed}."""
    first, second = describe(a), describe(b)
    found = test_welch(a, b, metric)
    difference = second.mean - first.mean
    out = {"a": first._asdict(), "b": second._asdict(), "difference": difference,
           "ratio": second.mean / first.mean}
    if found is None:
        return out | {"verdict": "cannot tell: each side needs two runs or more"}
    test, span = found
    with np.errstate(all="ignore"):
        logs = test_welch(np.log(a), np.log(b), metric)[1] if min(*a, *b) > 0 else (math.nan, math.nan)
    std, n = ((first.std ** 2 + second.std ** 2) / 2) ** 0.5, min(first.n, second.n)
    good = difference > 0 if metric in HIGHER else difference < 0
    out |= {"t": test.t, "df": test.df, "p": test.p, "interval": span,
            "ratio_interval": tuple(float(np.exp(edge)) for edge in logs),
            "detectable": detectable(cautious_std(std, first.n + second.n - 2), n)}
    if test.p < ALPHA:
        verdict = "better"
    elif 1 - test.p < ALPHA:
        verdict = "worse"
    else:
        need = runs_needed(difference, std) if std else None
        verdict = "cannot tell: " + (f"needs about {max(1, need - n)} more runs a side" if need else
                                     f"{abs(difference):.2g} would need over 1,000 runs a side")
        verdict += "" if good else " (so far B is not on the better side)"
    return out | {"verdict": verdict}


def judge_lines(metric, j):
    """judge() as text."""
    if "p" not in j:
        return [f"verdict: {j['verdict']}"]
    low, high = j["interval"]
    return [f"B - A: {j['difference']:+.6f} (95 %: {low:+.6f} to {high:+.6f}), ratio {j['ratio']:.5f} "
            f"({j['ratio_interval'][0]:.5f} to {j['ratio_interval'][1]:.5f})",
            f"Welch: t={j['t']:.2f} df={j['df']:.1f} p={j['p']:.4f}; so many runs find " + (
                f"a difference of {j['detectable']:.6f} nine times in ten" if j["detectable"] else
                "nothing reliably, three a side are the least"), f"verdict: {j['verdict']}"]


def mean_curve(runs, split, axis, grid):
    """Loss of runs, averaged, at the places of grid on an axis: 1 seconds, 3 tokens."""
    rows = []
    for run in runs:
        points = [p for p in run.curves[split] if p[axis] is not None]
        if len(points) < 2:
            return None
        places, losses = np.array([p[axis] for p in points], float), np.array([p[2] for p in points])
        if split == "train":    # single batches are noisy: each with its neighbours
            losses = np.convolve(np.pad(losses, 1, "edge"), np.ones(3) / 3, "valid")
        rows.append(np.interp(grid, places, losses))
    return np.array(rows)


def equal_point(a, b, axis):
    """((name, place), losses of a, losses of b) where all have come as far; val loss if all have a curve."""
    for split in ("val", "train"):
        ends = [[p[axis] for p in run.curves[split] if p[axis] is not None] for run in (*a, *b)]
        if all(len(end) >= (2 if split == "train" else 4) for end in ends):
            place = min(end[-1] for end in ends)
            rows = [mean_curve(runs, split, axis, [place]) for runs in (a, b)]
            return (f"{split}_loss", place), rows[0][:, 0], rows[1][:, 0]
    return None
