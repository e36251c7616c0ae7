"""The rules of each track, record folders as they lie on disk, and the README that they make.

A record folder holds submission.json, train.log and result.json of the first seed, train_seed<k>.log and
result_seed<k>.json of the others, train_gpt.py, loss.png, the artifact if it is small, changes.diff where
there is a record before, baseline_seed<k>.log where that was run again; and README.md, made from all these.
A log begins with the text of train_gpt.py, or leaves it out, since the folder has it; the digests in the
log then show that it was this script. Folders of rules version 1 also hold the files that train_gpt.py loaded
from beside it.
"""
import contextlib
import difflib
import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from data import inputs
from records.judge.logs import (
    DATE, HIGHER_IS_BETTER, Refused, Run, demand, demand_no_dead_link, find_logs, outermost,
    read_log, read_logs, show)
from records.judge.significance import Stats, Test, describe, stats_line, test_line, target_test, welch_test

HOME = Path(__file__).resolve().parent.parent       # records/
ROOT = HOME.parent


# ------------------------------------------------------------ rules
class Track(NamedTuple):
    """What a record of one track must show. 0, "" and None: no such rule."""
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
    any_tokenizer: bool = False     # may val have another number of tokens, for the same bytes?
    eval_cap: float = 0             # seconds of everything after training
    fingerprint: str = ""           # of the dataset's text
    val: tuple = (0, 0)             # tokens and bytes of the val split
    sha256: dict = {}               # of the files that a score is computed from
    eval: dict = {}                 # settings that the score depends on; "=x": the same as x
    config: dict = {}               # constants that no run may change
    hardware: str = ""              # how the hardware line begins; "": any, compared within its kind
    start: float | None = None      # what the first record here must beat: the metric, or seconds
    start_name: str = ""


class Rules(NamedTuple):
    """One version of the rules: the tracks, and what a script may look like."""
    tracks: dict                    # {name: Track}
    max_lines: int                  # of train_gpt.py; 0: any number
    max_columns: int                # of its longest line
    companions: tuple = ()          # other files that it may load from beside it; they count as code
    until: str = ""                 # the last day on which runs could end that are judged by it
    digests: bool = False           # do logs name the sha256 of what they were made from, and of their lines?


TRACKS = {
    "tiny": Track(
        "val_bpb", "lower", "metric", "embedded", time_cap=120,
        fingerprint="dac98310ae0394c70e5edcf7fc6fc1d66e56671e3d3f3c141065bed6ad3d1c49",
        val=(429_104, 1_021_844), sha256={
            "embedded.model": "67dbde5d90d2cc87aa0dab8a361fb96e93368774dd3c99dfb314991617c449f1",
            "embedded_val_000000.bin": "bd8b97edd6caf59f96b6952fe80eb335850213bbbc2dbd36a212ac72e8fad9a9"},
        eval={"eval_tokens": "full", "eval_stride": "=eval_context"}, config={"score_artifact": "1"}),
    "golf": Track(
        "val_bpb", "lower", "metric", "fineweb10B_sp1024", margin=0.005, unit="nats", min_runs=3,
        byte_cap=16_000_000, time_cap=600, eval_cap=600, val=(62_021_632, 151_080_363),
        eval={"eval_tokens": "full"}, config={"score_artifact": "1"}, hardware="8x NVIDIA H100",
        start=1.20143417, start_name="parameter-golf 2026-03-19_TrainingOptSeq4096"),
    "speedrun": Track(
        "val_loss", "lower", "time", "fineweb10B_gpt2", target=3.28, eval={"eval_tokens": "10485760"},
        config={"score_artifact": "0"}, hardware="8x NVIDIA H100", start=132.2144,
        start_name="modded-nanogpt 2025-11-29_BatchSizeSchedule"),
    "gpt2": Track(
        "core", "higher", "time", "climbmix", target=0.256525, p=0.025, config={"score_artifact": "0"},
        hardware="8x NVIDIA H100", start=8967, start_name="nanochat, depth 26, ratio 7.25"),
}
LATER_TRACKS = TRACKS | {"gpt2": TRACKS["gpt2"]._replace(data="fineweb_edu or climbmix")}
NEWEST_TRACKS = LATER_TRACKS | {"golf": TRACKS["golf"]._replace(
    data="fineweb10B_sp1024 or fineweb10B_sp8192", any_tokenizer=True)}
RULES = {       # a record is judged by the version that its submission.json names
    1: Rules(TRACKS, max_lines=1500, max_columns=110, until="2026-11-22",
             companions=("core.py", "dial.py", "golf.py", "kernels.py")),
    2: Rules(LATER_TRACKS, max_lines=4000, max_columns=200, until="2026-11-22"),
    3: Rules(LATER_TRACKS, max_lines=4000, max_columns=200, digests=True, until="2026-11-24"),
    4: Rules(NEWEST_TRACKS, max_lines=4000, max_columns=200, digests=True, until="2026-11-25"),
    5: Rules(NEWEST_TRACKS, max_lines=0, max_columns=200, digests=True),
}
NEWEST = max(RULES)


def track_of(preset: str) -> str:
    """The track that runs of a preset play: golf_plus plays golf."""
    return preset.removesuffix("_plus")


class LeftOut(Refused):
    """A rule cannot be tried here, and why; without a sentence: the track has none, or nobody asked."""


class Altered(Refused):
    """A folder of ours that no longer says by which rules it is to be judged: a rule that fails."""


def rules_of(submission: dict[str, Any]) -> tuple[Rules, Track]:
    """(Rules, Track) that a submission.json names. Raises Altered."""
    version = submission.get("rules_version")
    demand(version in RULES, f"submission.json: rules_version is {version!r}, known are {[*RULES]}", Altered)
    tracks = RULES[version].tracks
    name = submission.get("track")
    demand(name in tracks, f"submission.json: track is {name!r}, known are {[*tracks]}", Altered)
    return RULES[version], tracks[name]


# ------------------------------------------------------------ record folders
NOTES = ("<!-- notes -->", "<!-- /notes -->")


def sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises Refused."""
    try:
        found = json.loads(inputs.read_text(path))
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path.name} is no JSON ({str(error)[:80]})") from None
    demand(isinstance(found, dict), f"{path.name} holds no JSON object")
    return found


def json_text(content: Any) -> str:
    """A JSON object as our files hold it."""
    return json.dumps(content, indent=1) + "\n"


def is_plain(text: str) -> bool:
    """Is a text shown as it is, by whatever shows Markdown or HTML?"""
    return text.isprintable() and not re.search(r"[<>|`*#\\\[\]]|://|&\w+;", text)


class Folder:
    """A record folder, ours or a foreign one: submission.json, the script, logs, results of ours. Without
    `logs`, a foreign one may have none."""
    def __init__(self, path: Path | str, logs: bool = True) -> None:
        self.path = Path(path)
        demand_no_dead_link(self.path)
        demand(self.path.is_dir(), f"{path} is no folder")
        self.names = sorted(path.name for path in self.path.iterdir())
        self.files = [name for name in self.names if (self.path / name).is_file()]
        self.submission = read_json(self.path / "submission.json") if "submission.json" in self.files else {}
        self.results = {name: read_json(self.path / name) for name in self.files
                        if re.fullmatch(r"result(_seed\d+)?\.json", name)}
        self.script = self.read("train_gpt.py")
        page = next((name for name in self.files if name.lower() == "readme.md"), "README.md")
        self.readme = inputs.decode(self.read(page), "replace")
        self.runs = []
        self.inner = []         # diagnostic runs of a foreign folder
        self.baseline = []
        self.rules: Any = None  # Rules and Track; None for a foreign folder
        self.track: Any = None
        self.ours = "rules_version" in self.submission or bool(self.results)
        if self.ours:
            self.open_ours()
        else:
            self.open_foreign()
        demand(self.runs or not logs, f"{self.path.name} holds no log of a run")
        self.runs.sort(key=lambda run: (run.path.name != "train.log", run.path.name))

    def read(self, name: str) -> bytes:
        """Bytes of a file; none if it is not there."""
        return inputs.read_bytes(self.path / name) if name in self.files else b""

    def open_ours(self) -> None:
        """Rules, results and logs. A log that leaves the script out gets that of the folder."""
        demand(self.submission, f"{self.path.name}: submission.json is missing", Altered)
        self.rules, self.track = rules_of(self.submission)
        for name, content in {"submission.json": self.submission, **self.results}.items():
            # two readers may take other text for different things, such as a key that is there twice
            demand(inputs.read_text(self.path / name) == json_text(content),
                   f"{name} is not written as its content is", Altered)
        for name in self.files:
            if re.fullmatch(r"train(_seed\d+)?\.log", name):
                run = read_log(self.path / name)
                if run.source is None and self.rules.digests:
                    run.source = inputs.decode(self.script, "replace")
                run.json = name.replace("train", "result").replace(".log", ".json")
                demand(run.json in self.results, f"{run.file} has no {run.json}", Altered)
                run.result = self.results[run.json]
                self.runs.append(run)
            elif re.fullmatch(r"baseline_seed\d+\.log", name):
                self.baseline.append(read_log(self.path / name))

    def open_foreign(self) -> None:
        for log in find_logs(self.path, follow=False):      # a stranger's link may lead anywhere
            if any(DATE.match(name) for name in log.relative_to(self.path).parts[:-1]):
                continue        # of another record
            with contextlib.suppress(Refused, OSError):
                for run in read_logs(log):
                    run.label = str(log.relative_to(self.path).with_name(run.file))
                    if run.curves["val"] or run.finals or run.source:
                        self.runs.append(run)
        self.runs, self.inner = outermost(self.runs)

    def source(self) -> str:
        """The script as text: train_gpt.py, or where there is none what the first log begins with."""
        return inputs.decode(self.script, "replace") or (self.runs[0].source if self.runs else "")

    def values(self, metric: str) -> list[float]:
        return [run.exact(metric) for run in self.runs]

    def hardware(self) -> str:
        return self.runs[0].result["hardware"]

    def finished(self) -> str:
        """When the last of its runs ended, UTC."""
        return max(run.result["finished"] for run in self.runs)

    def first_of_track(self) -> bool:
        """Is there neither a target nor anything to beat?"""
        return self.track.target is None and self.track.start is None and not self.submission["before"]

    def test(self) -> tuple[str, Test | None]:
        """(what is claimed, Test or None) by the track's own rule: the target, or the record before."""
        track = self.track
        metric = self.track.metric
        before = self.submission.get("before")
        if track.target is not None:
            return f"{metric} against {track.target}", target_test(self.values(metric), track.target, metric)
        if self.first_of_track():
            return "the first record of its track", None
        if before and track.start is None:      # a track of our own: both sides are runs, on the same machine
            claim = f"{metric} against {before['name']}"
            old = before["values"]
            if self.baseline:
                claim += " run again"
                old = [run.value(metric) for run in self.baseline]
            return f"{claim}, Welch", welch_test(old, self.values(metric), metric)[0]
        goal = before["mean"] if before else track.start
        name = before["name"] if before else track.start_name
        tokens, size = track.val                # nats per token -> bits per byte
        margin = track.margin / math.log(2) * tokens / size if size else 0.0
        goal += margin if metric in HIGHER_IS_BETTER else -margin
        claim = f"{metric} against {show(metric, goal)}, {name}"
        if margin:
            claim += f" less {track.margin} {track.unit}"
        return claim, target_test(self.values(metric), goal, metric)


def shared_config(config: dict[str, str]) -> dict[str, str]:
    """The constants of a configuration that two runs of one record share."""
    return {name: value for name, value in config.items() if name not in ("seed", "run_id")}


def records_of(track: str) -> dict[str, Folder]:
    """{folder name: Folder} of the track's records in this repository that can be read."""
    found = {}
    for path in sorted(HOME.glob(f"track_{track}/[!.]*/submission.json")):      # no .tmp of `new`
        with contextlib.suppress(Refused):
            found[path.parent.name] = Folder(path.parent)
    return found


def rank_key(folder: Folder) -> float:
    """What the board sorts by; less is better."""
    metric = "time" if folder.track.rank == "time" else folder.track.metric
    mean = describe(folder.values(metric)).mean
    return -mean if metric in HIGHER_IS_BETTER else mean


def best_before(records: dict[str, Folder], hardware: str) -> str:
    """Name of the best record; where any hardware may play, of those on this if there are any; or "none"."""
    alike = {name: folder for name, folder in records.items()
             if folder.track.hardware or folder.hardware() == hardware}
    return min(alike or records, key=lambda name: rank_key(records[name]), default="none")


def summary_of(name: str, folder: Folder) -> dict[str, Any]:
    """What a later record keeps of the one before it."""
    first = folder.runs[0].result
    values = folder.values(folder.track.metric)
    return {"name": name, "code_sha256": sha256(folder.script), "hardware": first["hardware"],
            "torch": first["torch"], "mean": round(describe(values).mean, 10), "values": values,
            "val_bpb": folder.values("val_bpb"), "times": folder.values("time"),
            "config": shared_config(first["config"])}


def rounded(value: float | None) -> float | None:
    """The same number on every machine; None stays None."""
    return None if value is None else round(value, 10)


def computed(folder: Folder) -> dict[str, float | None]:
    """Every number of submission.json that follows from logs and results."""
    first = folder.runs[0].result
    out = {key: first[key] for key in ("val_loss", "val_bpb", "core", "bytes_total", "bytes_code")}
    for metric in ("val_loss", "val_bpb", "core", "time"):
        values = folder.values(metric)
        stats = Stats(0, None, None, None, None) if None in values else describe(values)
        out |= {f"{metric}_mean": rounded(stats.mean), f"{metric}_std": rounded(stats.std)}
    _, test = folder.test()
    seeds = [run.result["seed"] for run in folder.runs]
    return out | {"date": folder.finished()[:10], "n": len(folder.runs), "seeds": seeds,
                  "p": rounded(test.p) if test and math.isfinite(test.p) else None}


def open_run(path: Path | str) -> Run:
    """A finished run with its result: its folder, or its run_id under logs/. Raises Refused."""
    path = Path(path) if Path(path).is_dir() else Path("logs", path)
    demand_no_dead_link(path)
    result = read_json(path / "result.json")
    run = read_log(path / "train.log")
    run.result = result
    ended = result.get("stop_reason") in ("iterations", "wallclock_cap", "max_epochs")
    demand(run.finals and ended, f"run {result.get('run_id')} did not finish training")
    return run


def code_diff(before: tuple[str, bytes], after: tuple[str, bytes]) -> str:
    """Unified diff of two scripts, each (name, bytes), no context."""
    old, new = (inputs.decode(raw, "replace").splitlines(keepends=True) for _, raw in (before, after))
    return "".join(difflib.unified_diff(old, new, before[0], after[0], n=0))


def change_text(diff: str) -> str:
    """How many lines a diff adds and removes."""
    lines = diff.splitlines()[2:]       # after the two names
    added = len([line for line in lines if line.startswith("+")])
    removed = len([line for line in lines if line.startswith("-")])
    return f"+{added} -{removed} lines, see changes.diff" if added or removed else "unchanged"


# ------------------------------------------------------------ README
def table(head: list[str], rows: Iterable) -> str:
    """A table in Markdown."""
    rows = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)


def command_of(result: dict[str, Any]) -> str:
    """The line that repeats a run; SEED is left to the caller."""
    words = ["SEED=<seed>"]
    for name, (_, value) in result["overrides"].items():
        if name not in ("seed", "run_id", "preset"):
            words.append(f"{name.upper()}={shlex.quote(value)}")
    ranks = result["world_size"]
    start = f"torchrun --standalone --nproc_per_node={ranks}" if ranks > 1 else "python"
    return " ".join([*words, start, f"train_gpt.py --preset={result['preset']}"])


def result_lines(folder: Folder) -> list[str]:
    """The section on the result: statistics, the test."""
    track = folder.track
    metric = folder.track.metric
    claim, test = folder.test()
    if test:
        claim += f": {test_line(test)} (the rule: p < {track.p})"
    return [
        f"{metric}: {stats_line(metric, describe(folder.values(metric)))}.  ",
        f"Test: {claim}.  ",
        f"Exact metric of train.log: `{metric} {show(metric, folder.runs[0].exact(metric))}`.  ",
        f"Training time: {stats_line('time', describe(folder.values('time')))} s."]


def run_lines(folder: Folder) -> list[str]:
    """The section on the runs: a table, those that were resumed, those that do not count."""
    metric = folder.track.metric
    numbers = computed(folder)
    columns = ["val_loss", "val_bpb", "time"]
    if metric == "core":
        columns.insert(2, "core")
    rows = []
    for run in folder.runs:
        scores = [show(name, run.exact(name)) for name in columns]
        sizes = [f"{run.result[name]:,}" for name in ("steps", "tokens", "bytes_total")]
        rows.append([run.result["seed"], run.path.name, *scores, *sizes])
    resumed = [f"Resumed: {run.result['run_id']}.\n" for run in folder.runs if run.result["resumed"]]
    for part in ("mean", "std"):
        rows.append([part, "", *(show(name, numbers[f"{name}_{part}"]) for name in columns), "", "", ""])
    lines = [table(["seed", "log", *columns, "steps", "tokens", "bytes_total"], rows), "", *resumed]
    if folder.submission["excluded"]:
        rows = [[run["run_id"], run["seed"], show(metric, run["value"]), run["reason"]]
                for run in folder.submission["excluded"]]
        lines += ["Finished runs of the same code and constants that are not counted:", "",
                  table(["run", "seed", metric, "reason"], rows), ""]
    return lines


def before_lines(folder: Folder) -> list[str]:
    """The constants that changed, then the code, then the record before as run again on this machine."""
    before = folder.submission["before"]
    metric = folder.track.metric
    if not before:
        return ["None: the first of its track."]
    now = shared_config(folder.runs[0].result["config"])
    then = before["config"]
    changed = [[name, then.get(name, "(none)"), now.get(name, "(none)")] for name in sorted({*now, *then})
               if now.get(name) != then.get(name)]
    lines = [f"`{before['name']}`: {metric} {stats_line(metric, describe(before['values']))}, "
             f"{before['hardware']}, torch {before['torch']}.", "",
             table(["constant", "before", "now"], changed) if changed else "No constant differs.", "",
             f"train_gpt.py: {folder.submission['code_change']}"]
    diff = inputs.read_text(folder.path / "changes.diff")
    if 0 < diff.count("\n") <= 100:
        lines += ["", "```diff", diff.rstrip("\n"), "```"]
    if folder.baseline:
        values = [run.value(metric) for run in folder.baseline]
        times = [run.time for run in folder.baseline]
        lines += ["", f"Its script on the same machine: {stats_line(metric, describe(values))}; time "
                  f"{stats_line('time', describe(times))} s."]
    return lines


def where_table(folder: Folder) -> str:
    """Where, when, by whom and from what the record was made."""
    s = folder.submission
    first = folder.runs[0].result
    return table(["", ""], [
        ["hardware", first["hardware"]],
        ["torch", first["torch"]],
        ["date", s["date"]],
        ["author", s["author"]],
        ["github", s["github_id"]],
        ["git commit", s["git_commit"]],
        ["code sha256", first["code_sha256"]],
        ["artifact sha256", s["artifact_sha256"]],
        ["AI disclosure", s["ai_disclosure"]],
        ["pure systems change", "yes" if s["systems_change"] else "no"],
        ["rules", f"version {s['rules_version']}, track {s['track']}"],
        ["data", f"{first['data']['name']}, text {first['data']['fingerprint']}"],
        ["evaluation", " ".join(f"{name}:{value}" for name, value in first["eval"].items())]])


def render(folder: Folder) -> tuple[str, str]:
    """README.md, made from the other files alone: (what stands before the notes, what after them)."""
    s = folder.submission
    results = [run.result for run in folder.runs]
    lines = [
        f"# {s['name']}", "", s["blurb"], "",
        "## Result", "", *result_lines(folder), "",
        "## Runs", "", *run_lines(folder),
        "![loss](loss.png)", "",
        "## Command", "", "```", command_of(results[0]), "```", "",
        "Seeds: " + ", ".join(str(result["seed"]) for result in results) + ".", "",
        "## Against the record before", "", *before_lines(folder), "",
        "## Where", "", where_table(folder), "",
        "## Files", "", table(["file", "sha256"], s["files"].items()), ""]
    if folder.rules.digests:
        lines += ["## Notes of the author, which nothing checks", ""]
    return "\n".join(lines), "\nMade by `record.py new`; `record.py check` on this folder recomputes it.\n"


def readme_of(folder: Folder, notes: str = "\nNone.\n") -> str:
    """The whole README.md, with notes between its markers."""
    top, end = render(folder)
    return f"{top}\n{NOTES[0]}{notes}{NOTES[1]}\n{end}"
