"""The rules of each game, record folders as they lie on disk, and the README that they make.

A record folder holds submission.json, train.log and result.json of the first seed, train_seed<k>.log and
result_seed<k>.json of the others, train_gpt.py, loss.png, the artifact if it is small, changes.diff where
there is a record before, baseline_seed<k>.log where that was run again; and README.md, made from all these.
"""
import contextlib
import difflib
import hashlib
import itertools
import json
import math
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from runs import (HIGHER, MAX_LOGS, Refused, Stats, demand, describe, find_logs, read_log, show, stats_line,
                  test_line, test_target, test_welch)

HOME = Path(__file__).resolve().parent      # records/
ROOT = HOME.parent


# ------------------------------------------------------------ rules
class Track(NamedTuple):
    """What a record of one game must show. 0, "" and None: no such rule."""
    metric: str                     # val_bpb, val_loss or core
    better: str                     # lower or higher
    rank: str                       # metric, or time: what the board sorts by
    data: str                       # dataset
    target: float | None = None     # the metric's mean must reach it; None: beat the record before
    margin: float = 0.0             # by which the record before must be beaten
    unit: str = ""                  # of the margin: nats (per token) or bpb
    p: float = 0.01                 # of the one-sided test
    min_runs: int = 5
    byte_cap: int = 0               # script and artifact
    time_cap: float = 0             # seconds of training
    eval_cap: float = 0             # seconds of everything after training
    fingerprint: str = ""           # of the dataset's text
    val: tuple = (0, 0)             # tokens and bytes of the val split
    eval: dict = {}                 # settings that the score depends on; "=x": the same as x
    hardware: str = ""              # how the hardware line begins; "": any, compared within its kind
    start: float | None = None      # what the first record here must beat: the metric, or seconds
    start_name: str = ""


RULES = {1: {   # version -> track; a record is judged by the version that its submission.json names
    "tiny": Track(
        "val_bpb", "lower", "metric", "embedded", time_cap=120,
        fingerprint="dac98310ae0394c70e5edcf7fc6fc1d66e56671e3d3f3c141065bed6ad3d1c49",
        eval={"eval_tokens": "full", "eval_stride": "=eval_context"}),
    "golf": Track(
        "val_bpb", "lower", "metric", "fineweb10B_sp1024", margin=0.005, unit="nats", min_runs=3,
        byte_cap=16_000_000, time_cap=600, eval_cap=600, val=(62_021_632, 151_080_363),
        eval={"eval_tokens": "full"}, hardware="8x NVIDIA H100",
        start=1.20143417, start_name="parameter-golf 2026-03-19_TrainingOptSeq4096"),
    "speedrun": Track(
        "val_loss", "lower", "time", "fineweb10B_gpt2", target=3.28, eval={"eval_tokens": "10485760"},
        hardware="8x NVIDIA H100", start=132.2144, start_name="modded-nanogpt 2025-11-29_BatchSizeSchedule"),
    "gpt2": Track(
        "core", "higher", "time", "climbmix", target=0.256525, p=0.025, hardware="8x NVIDIA H100",
        start=8967, start_name="nanochat, depth 26, ratio 7.25"),
}}
NEWEST = max(RULES)



class Altered(Refused):
    """A folder of ours that no longer says by which rules it is to be judged: a rule that fails."""


def track_of(submission):
    version, name = submission.get("rules_version"), submission.get("track")
    for key, value, known in (("rules_version", version, list(RULES)), ("track", name, list(RULES[NEWEST]))):
        demand(value in known, f"submission.json: {key} is {value!r}, known are {known}", Altered)
    return RULES[version][name]


# ------------------------------------------------------------ record folders
KEYS = "author github_id name blurb date val_loss val_bpb bytes_total bytes_code".split()
NOTES = ("<!-- notes -->", "<!-- /notes -->")


def sha256(raw):
    return hashlib.sha256(raw).hexdigest()


def read_json(path):
    """A JSON object. Raises Refused."""
    try:
        demand(path.stat().st_size < 10 << 20, f"{path.name} has over 10 MB")
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Refused(f"{path.parent.name} has no {path.name}") from None
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path.name} is no JSON ({str(error)[:80]})") from None
    demand(isinstance(found, dict), f"{path.name} holds no JSON object")
    return found


class Folder:
    """A record folder: submission.json, train.log and train_seed<k>.log with their results, the script."""
    def __init__(self, path):
        self.path = Path(path)
        demand(self.path.is_dir(), f"{path} is no folder")
        self.names = sorted(p.name for p in itertools.islice(self.path.iterdir(), MAX_LOGS + 1))
        demand(len(self.names) <= MAX_LOGS, f"{path} holds more than {MAX_LOGS} files")
        self.files = [name for name in self.names if (self.path / name).is_file()]
        self.submission = read_json(self.path / "submission.json") if "submission.json" in self.files else {}
        self.results = {name: read_json(self.path / name) for name in self.files
                        if re.fullmatch(r"result(_seed\d+)?\.json", name)}
        read = lambda name: (self.path / name).read_bytes() if name in self.files else b""  # noqa: E731
        page = next((name for name in self.files if name.lower() == "readme.md"), "README.md")
        self.script, self.readme = read("train_gpt.py"), read(page).decode("utf-8", "replace")
        self.runs, self.baseline, self.ours = [], [], "rules_version" in self.submission or bool(self.results)
        if self.ours:
            demand(self.submission, f"{self.path.name}: submission.json is missing", Altered)
            self.track = track_of(self.submission)
            for name in self.files:
                if re.fullmatch(r"(train|train_seed\d+|baseline_seed\d+)\.log", name):
                    (self.baseline if name[0] == "b" else self.runs).append(read_log(self.path / name))
        else:
            self.track = None
            for log in find_logs(self.path):
                with contextlib.suppress(Refused, OSError):
                    run = read_log(log)
                    run.label = str(log.relative_to(self.path))
                    if run.curves["val"] or run.finals or run.source:
                        self.runs.append(run)
        demand(self.runs, f"{self.path.name} holds no log of a run")
        self.runs.sort(key=lambda run: (run.path.name != "train.log", run.path.name))

    def source(self):
        """The script as text: train_gpt.py, or where there is none what the first log begins with."""
        return self.script.decode("utf-8", "replace") or self.runs[0].source

    def result_name(self, run):
        return run.file.replace("train", "result").replace(".log", ".json")

    def result(self, run):
        """The result.json that belongs to a run of ours."""
        demand(self.result_name(run) in self.results, f"{run.file} has no {self.result_name(run)}")
        return self.results[self.result_name(run)]

    def value(self, run, metric):
        """A run's number as its result.json has it, with all digits; seconds for time."""
        result = self.result(run)
        return result["train_time_ms"] / 1000 if metric == "time" else result[metric]

    def values(self, metric):
        return [self.value(run, metric) for run in self.runs]

    def hardware(self):
        return self.result(self.runs[0])["hardware"]

    def finished(self):
        """When the last of its runs ended, UTC."""
        return max(self.result(run)["finished"] for run in self.runs)

    def first_of_track(self):
        return self.track.target is None and self.track.start is None and not self.submission["before"]

    def test(self):
        """(what is claimed, Test or None) by the track's own rule: the target, or the record before."""
        metric, track, before = self.track.metric, self.track, self.submission.get("before")
        if track.target is not None:
            return f"{metric} against {track.target}", test_target(self.values(metric), track.target, metric)
        if self.first_of_track():
            return "the first record of its track", None
        if before and track.start is None:      # a game of our own: both sides are runs, on the same machine
            old = [run.value(metric) for run in self.baseline] or before["values"]
            found, again = test_welch(old, self.values(metric), metric), " run again" * bool(self.baseline)
            return f"{metric} against {before['name']}{again}, Welch", found and found[0]
        goal, name = (before["mean"], before["name"]) if before else (track.start, track.start_name)
        tokens, size = track.val
        margin = track.margin / math.log(2) * tokens / size if size else 0.0       # nats per token -> bpb
        goal += margin if metric in HIGHER else -margin
        less = f" less {track.margin} {track.unit}" * bool(margin)
        claim = f"{metric} against {show(metric, goal)}, {name}{less}"
        return claim, test_target(self.values(metric), goal, metric)


def config_of(result):
    """The constants that two runs of one record share."""
    return {name: value for name, value in result["config"].items() if name not in ("seed", "run_id")}


def records_of(track):
    """{folder name: Folder} of the track's records in this repository that can be read."""
    found = {}
    for path in sorted(HOME.glob(f"track_{track}/*/submission.json")):
        with contextlib.suppress(Refused):
            found[path.parent.name] = Folder(path.parent)
    return found


def rank_key(folder):
    """What the board sorts by; less is better."""
    metric = "time" if folder.track.rank == "time" else folder.track.metric
    return describe(folder.values(metric)).mean * (-1 if metric in HIGHER else 1)


def best_before(records, hardware):
    """Name of the best record; where any hardware may play, of those on this if there are any; or "none"."""
    alike = {name: folder for name, folder in records.items()
             if folder.track.hardware or folder.hardware() == hardware}
    return min(alike or records, key=lambda name: rank_key(records[name]), default="none")


def summary_of(name, folder):
    """What a later record keeps of the one before it."""
    first = folder.result(folder.runs[0])
    return {"name": name, "code_sha256": sha256(folder.script), "hardware": first["hardware"],
            "torch": first["torch"], "mean": round(describe(folder.values(folder.track.metric)).mean, 10),
            "values": folder.values(folder.track.metric), "val_bpb": folder.values("val_bpb"),
            "times": folder.values("time"),
            "config": config_of(first)}


def computed(folder):
    """Every number of submission.json that follows from logs and results."""
    first, out = folder.result(folder.runs[0]), {}
    for key in ("val_loss", "val_bpb", "core", "bytes_total", "bytes_code"):
        out[key] = first[key]
    for metric in ("val_loss", "val_bpb", "core", "time"):
        values = folder.values(metric)
        stats = describe(values) if None not in values else Stats(0, None, None, None, None)
        out |= {f"{metric}_{part}": value and round(value, 10)      # the same on every machine
                for part, value in (("mean", stats.mean), ("std", stats.std))}
    test = folder.test()[1]
    seeds = [folder.result(run)["seed"] for run in folder.runs]
    return out | {"date": folder.finished()[:10], "n": len(folder.runs), "seeds": seeds,
                  "p": test and round(test.p, 10)}


def named(run):
    """The constants of a log of ours that two runs of one record share."""
    return {name: value for name, value in run.config.items() if name not in ("seed", "run_id")}


def open_run(path):
    """(Run, result) of a finished run: its folder, or its run_id under logs/. Raises Refused."""
    path = Path(path) if Path(path).is_dir() else Path("logs", path)
    demand(path.is_dir(), f"{path.name} is no run folder")
    demand((path / "train.log").exists(), f"{path} has no train.log")
    result, run = read_json(path / "result.json"), read_log(path / "train.log")
    name, ended = result.get("run_id"), result.get("stop_reason") in ("iterations", "wallclock_cap")
    demand(run.finals and ended, f"run {name} did not finish training")
    demand(result.get("resumed") or not run.rewinds,
           f"run {name} was resumed, but its result.json does not say so")
    return run, result


def code_diff(before, after):
    """Unified diff of two scripts, no context."""
    lines = [raw.decode("utf-8", "replace").splitlines(keepends=True) for raw in (before, after)]
    return "".join(difflib.unified_diff(*lines, "before/train_gpt.py", "train_gpt.py", n=0))


def change_text(diff):
    lines = diff.splitlines()[2:]       # after the two names
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    return f"+{added} -{removed} lines, see changes.diff" if added or removed else "unchanged"


# ------------------------------------------------------------ README
def table(head, rows):
    rows = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)


def command_of(result):
    """The line that repeats a run; SEED is left to the caller."""
    changed = {name: new for name, (_, new) in result["overrides"].items()
               if name not in ("seed", "run_id", "preset")}
    words = [f"{name.upper()}={shlex.quote(value)}" for name, value in changed.items()]
    ranks = result["world_size"]
    start = f"torchrun --standalone --nproc_per_node={ranks}" if ranks > 1 else "python"
    return " ".join(["SEED=<seed>", *words, start, f"train_gpt.py --preset={result['preset']}"])


def render(folder):
    """README.md, made from the other files alone: (what stands before the notes, what after them)."""
    s, track, metric = folder.submission, folder.track, folder.track.metric
    results = [folder.result(run) for run in folder.runs]
    first, (claim, test) = results[0], folder.test()
    line = lambda metric: stats_line(metric, describe(folder.values(metric)))  # noqa: E731
    columns = ["val_loss", "val_bpb", *["core"] * (metric == "core"), "time"]
    rows = [[result["seed"], run.path.name, *(show(c, folder.value(run, c)) for c in columns),
             f"{result['steps']:,}", f"{result['tokens']:,}", f"{result['bytes_total']:,}"]
            for run, result in zip(folder.runs, results)]
    numbers = computed(folder)
    for part in ("mean", "std"):
        rows.append([part, "", *(show(c, numbers[f"{c}_{part}"]) for c in columns), "", "", ""])
    lines = [
        f"# {s['name']}", "", s["blurb"] or "(no description)", "", "## Result", "",
        f"{metric}: {line(metric)}.  ",
        f"Test: {claim}" + f": {test_line(test)} (the rule: p < {track.p})" * bool(test) + ".  ",
        f"Exact metric of train.log: `{metric} {show(metric, folder.value(folder.runs[0], metric))}`.  ",
        f"Training time: {line('time')} s.",
        *["", "**A single run: its spread is unknown.**"] * (len(results) == 1),
        "", "## Runs", "", table(["seed", "log", *columns, "steps", "tokens", "bytes_total"], rows), "",
        *[f"Resumed: {result['run_id']}.\n" for result in results if result["resumed"]]]
    if s["excluded"]:
        rows = [[e["run_id"], e["seed"], show(metric, e["value"]), e["reason"]] for e in s["excluded"]]
        lines += ["Finished runs of the same code and constants that are not counted:", "",
                  table(["run", "seed", metric, "reason"], rows), ""]
    lines += ["![loss](loss.png)", "", "## Command", "", "```", command_of(first), "```", "",
              "Seeds: " + ", ".join(str(result["seed"]) for result in results) + ".", "",
              "## Against the record before", "", *before_lines(folder), "", "## Where", "",
              table(["", ""], [
                  ["hardware", first["hardware"]], ["torch", first["torch"]], ["date", s["date"]],
                  ["author", s["author"]], ["github", s["github_id"]], ["git commit", s["git_commit"]],
                  ["code sha256", first["code_sha256"]],
                  ["artifact sha256", s["artifact_sha256"]], ["AI disclosure", s["ai_disclosure"]],
                  ["pure systems change", "yes" if s["systems_change"] else "no"],
                  ["rules", f"version {s['rules_version']}, track {s['track']}"],
                  ["data", f"{first['data']['name']}, text {first['data']['fingerprint']}"],
                  ["evaluation", " ".join(f"{k}:{v}" for k, v in first["eval"].items())]]), "",
              "## Files", "", table(["file", "sha256"], s["files"].items()), ""]
    return "\n".join(lines), "\nMade by `record.py new`; `record.py check` on this folder recomputes it.\n"


def before_lines(folder):
    """The constants that changed, then the code, then the record before as run again on this machine."""
    before, metric = folder.submission["before"], folder.track.metric
    if not before:
        return ["None: the first of its track."]
    now, then = config_of(folder.result(folder.runs[0])), before["config"]
    changed = [[name, then.get(name, "(none)"), now.get(name, "(none)")] for name in sorted({*now, *then})
               if now.get(name) != then.get(name)]
    lines = [f"`{before['name']}`: {metric} {stats_line(metric, describe(before['values']))}, "
             f"{before['hardware']}, torch {before['torch']}.", "",
             table(["constant", "before", "now"], changed) if changed else "No constant differs.", "",
             f"train_gpt.py: {folder.submission['code_change']}"]
    diff = (folder.path / "changes.diff").read_text(encoding="utf-8")
    if 0 < diff.count("\n") <= 100:
        lines += ["", "```diff", diff.rstrip("\n"), "```"]
    if folder.baseline:
        values, times = ([run.value(key) for run in folder.baseline] for key in (metric, "time"))
        found = test_welch(values, folder.values(metric), metric)
        ratios = [describe(folder.values(key)).mean / describe(old).mean for key, old in
                  ((metric, values), ("time", times))]
        lines += ["", f"Its script on the same machine: {stats_line(metric, describe(values))}; time "
                  f"{stats_line('time', describe(times))} s; Welch {test_line(found and found[0])}; ratio of "
                  f"{metric} {ratios[0]:.4f}, of time {ratios[1]:.4f}."]
    return lines


def readme_of(folder, notes="\nNotes of the author go here.\n"):
    top, end = render(folder)
    return f"{top}\n{NOTES[0]}{notes}{NOTES[1]}\n{end}"
