"""Rules of `check` on what a log shows by itself: lines that follow from each other, digests, runs that are
copies of one another, names, dates, texts, and the picture. Whoever alters a number must alter all that
follow from it; a log that is made up consistently from end to end passes (README.md: what makes faking
harder).
"""
import argparse
import itertools
import re
import tempfile
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from data import inputs
from records.judge.logs import RESUMED, RULER, Run, same_losses
from records.show.curves import draw_record
from records.verify import scripts
from records.verify.checks import LeftOut, Rule, digest_of_model, require, same, same_values
from records.verify.folders import NOTES, ROOT, Folder, is_plain, records_of, sha256

STEP_LINE = re.compile(
    r"step:(\d+)/\d+ (train|val)_loss:\d+\.\d{4}(?: val_bpb:\d+\.\d{4})? train_time:(\d+)ms "
    r"step_avg:(\d+\.\d\d)ms(?: tok/s:.*)?")
LOG_DIGEST = re.compile(rb"^log sha256:([0-9a-f]{64})\n", re.M)
# Residuals in nats of one curve fitted to another, by SHUFFLE: those of two seeds are over 2.5 times as large
SAME_CURVE = {"1": 4e-3, "0": 5e-4}
LEAST_POINTS = 12       # of two curves that can be compared
UNUSED_STEPS = 5        # of the slowest, that a run may end before its cap
GAIN_BY_PACKING = 5e-3  # nats by which an artifact may be better than the weights that it was made from
CLOCKS_DIFFER = timedelta(hours=1)
# Headings, HTML, pictures, and how generated lines begin
NOT_IN_NOTES = re.compile(r"(?m)^ {0,3}(?:#|=+ *$|-{2,} *$|\| *(?:seed|mean|std) *\||Test: |Exact metric"
                          r"|Training time: |(?:val_bpb|val_loss|core): n=)|<[A-Za-z!/?]|!\[")


# ------------------------------------------------------------ steps
def check_steps(folder: Folder, options: argparse.Namespace) -> None:
    """Steps and times rise, no report is missing, and what follows from them does."""
    for run in folder.runs:
        same(run.json, "resumed", run.result["resumed"], run.file, bool(RESUMED.search(run.body)))
        check_lines(run)
        check_end(run)


def check_lines(run: Run) -> None:
    """The step lines of a log by themselves."""
    last_step = 0
    last_ms = 0
    reported = set()
    for line in run.body.split("\n"):
        if resumed := RESUMED.match(line):
            last_step = int(resumed[1])
            last_ms = int(resumed[2])
        if not re.match(r"step:\d", line):
            continue
        found = STEP_LINE.fullmatch(line)
        require(found, f"{run.file}: train_gpt.py writes no such line as {line[:80]!r}")
        step = int(found[1])
        ms = int(found[3])
        where = f"{run.file}, step {step}"
        again = step == last_step and found[2] == "val"
        require(step > last_step or again, f"{where} comes after step {last_step}")
        require(ms > last_ms or again and ms == last_ms or ms < 10,
                f"{where}: train_time {ms} ms comes after {last_ms} ms")
        average = ms / max(step, 1)
        require(abs(average - float(found[4])) <= 0.5 / max(step, 1) + 0.006,
                f"{where}: step_avg {found[4]} ms, but train_time and steps make {average:.2f}")
        last_step = step
        last_ms = ms
        if found[2] == "train":
            reported.add(step)
    every = int(run.result["config"]["train_log_every"]) or 100
    odd = reported ^ {n for n in range(1, last_step + 1) if n <= 10 or n % every == 0}
    require(not odd, f"{run.file}: train_loss of step {odd and min(odd)} is missing, or is no step to be "
            f"reported (TRAIN_LOG_EVERY={every})")


def check_end(run: Run) -> None:
    """What ended a run, and what its result says of the whole."""
    result = run.result
    name = run.json
    seconds = result["train_time_ms"] / 1e3
    stop = result["stop_reason"]
    cap = float(result["config"]["max_wallclock_seconds"])
    epochs = int(result["config"].get("max_epochs", "0"))
    possible = {"iterations": True, "wallclock_cap": cap, "max_epochs": cap and epochs}
    require(possible.get(stop), f"{name}: stop_reason is {stop!r}, with max_wallclock_seconds={cap:g} and "
            f"max_epochs={epochs}")
    if stop == "iterations":
        totals = re.findall(r"(?m)^step:\d+/(\d+) ", run.body)
        same(name, "steps", result["steps"], f"{run.file}, whose steps end at", int(totals[-1]))
    elif stop == "wallclock_cap":
        slowest = result["step_ms"]["max"]
        require(cap - seconds < 1 + UNUSED_STEPS * slowest / 1e3, f"{name}: stopped by the cap of {cap} s "
                f"after {seconds} s, with steps of at most {slowest} ms")
    rate = result["tokens"] / seconds
    require(abs(rate - result["tok_per_s"]) < 1 + rate * 1e-3 / seconds,
            f"{name}: tok_per_s is {result['tok_per_s']}, but tokens and time make {rate:.0f}")
    if "artifact" in result:
        gain = result["trained"]["val_loss"] - result["artifact"]["val_loss"]
        require(gain < GAIN_BY_PACKING, f"{name}: the artifact is better than the weights that it was made "
                f"from, by {gain:.4f} nats")


# ------------------------------------------------------------ copies
def check_distinct(folder: Folder, options: argparse.Namespace) -> None:
    """No seed is used twice; no run's curve or times are those of another one."""
    shuffle = folder.runs[0].result["config"].get("shuffle", "1")
    for runs in (folder.runs, folder.baseline):
        for one, other in itertools.combinations(runs, 2):
            require(one.seed != other.seed, f"{other.file} has seed {other.seed}, as {one.file} has")
            why = likeness(one, other, SAME_CURVE[shuffle])
            require(not why, f"{other.file} looks like a copy of {one.file}: {why}")


def likeness(one: Run, other: Run, limit: float) -> str:
    """Why two runs look like the same one, or ""."""
    if same_losses(one, other):
        return "its losses are the same"
    a, b = ({point.step: point for point in run.curves["train"]} for run in (one, other))
    steps = sorted(a.keys() & b.keys() - {1})        # the first loss is that of the init
    if len(steps) < LEAST_POINTS:
        return ""
    losses = np.array([[a[n].loss for n in steps], [b[n].loss for n in steps]])
    equal = int((losses[0] == losses[1]).sum())
    if equal > 2 + len(steps) // 10:
        return f"{equal} of {len(steps)} losses are equal"
    rest = np.std(losses[1] - np.polyval(np.polyfit(*losses, 1), losses[0]))
    if rest < limit:
        return f"its losses are those of the other on a line, but for {rest:.4f} nats"
    late = [n for n in steps if a[n].seconds > 1]
    equal = sum(a[n].seconds == b[n].seconds for n in late)
    return f"{equal} of {len(late)} times are equal" if equal > 2 + len(late) // 5 else ""


# ------------------------------------------------------------ names and dates
def check_names(folder: Folder, options: argparse.Namespace) -> None:
    """File names, seeds and overrides say the same."""
    same("the results", "files", sorted(folder.results), "the logs", sorted(run.json for run in folder.runs))
    for run in folder.runs:
        if "_seed" in run.file:
            same(run.file, "seed", run.result["seed"], "its name", run.seed_in_name)
        told = re.findall(r"(?m)^override (\w+) (.*) -> (.*)$", run.body)
        said = {constant: [old, new] for constant, old, new in told}
        same_values(run.file, "override ", said, run.json, run.result["overrides"])


def check_dates(folder: Folder, options: argparse.Namespace) -> None:
    """No run ended before it began or after today, or took another time than its process."""
    now = datetime.now(UTC) + CLOCKS_DIFFER
    for run in folder.runs:
        began = datetime.fromisoformat(run.result["started"])
        ended = datetime.fromisoformat(run.result["finished"])
        require(began <= ended <= now, f"{run.json}: started {began}, finished {ended}, it is {now:%F %H:%M}")
        differ = (ended - began).total_seconds() - run.result["process_ms"] / 1e3
        require(run.result["resumed"] or abs(differ) < 3, f"{run.json}: from start to finish is "
                f"{differ:+.1f} s more than process_ms, {run.result['process_ms']}")
    date = folder.submission["date"]
    until = folder.rules.until
    require(not until or date <= until, f"submission.json: runs of {date} are judged by the newest rules; "
            f"version {folder.submission['rules_version']} ended on {until}")


def check_commit(folder: Folder, options: argparse.Namespace) -> None:
    """The commit holds the script, or the tool makes it of the commit for the run's preset, where this
    repository knows it."""
    commit = folder.submission["git_commit"]
    if commit == "not committed":
        raise LeftOut
    if scripts.git("cat-file", "-t", commit).strip() != b"commit":      # another repository, or no git here
        raise LeftOut(f"commit {commit[:9]} is not in this repository")
    preset = folder.runs[0].result["preset"]
    whole = scripts.git("show", f"{commit}:train_gpt.py")
    made = scripts.has_one_recipe(folder.script) and scripts.made_at(commit, preset)
    require(folder.script in (whole, made),
            f"submission.json: {commit[:9]} has another train_gpt.py than the folder, and so has what "
            f"`./run.sh script {preset}` makes of it")


# ------------------------------------------------------------ digests
def check_digests(folder: Folder, options: argparse.Namespace) -> None:
    """Since rules version 3 a log names the sha256 of what it was made from and of its own lines."""
    if not folder.rules.digests:
        raise LeftOut
    for run in folder.runs:
        config = "".join(f"config {key}={value}\n" for key, value in run.config.items())
        wanted = {"train_gpt.py": sha256(folder.script), "config": sha256(config.encode())}
        for key, digest in (wanted | run.result["data"]["sha256"]).items():
            same(run.file, f"sha256 {key}", run.digests.get(key), "what it stands for", digest)
        check_own_lines(run)
    for base in folder.baseline:
        if "log sha256:" in (base.source or ""):        # older scripts write none
            check_own_lines(base)
    first = folder.runs[0]
    same("submission.json", "artifact_sha256", folder.submission["artifact_sha256"], first.file,
         digest_of_model(first))


def check_own_lines(run: Run) -> None:
    """Each `log sha256` line is right, and the last line is one."""
    raw = inputs.read_bytes(run.path)
    if raw.startswith(RULER.encode()):      # the folder holds the script that it began with once
        raw = f"{run.source}\n".encode() + raw
    lines = [*LOG_DIGEST.finditer(raw)]
    for found in lines:
        require(sha256(raw[:found.start()]).encode() == found[1],
                f"{run.file}: {found[0].decode().strip()} is not the sha256 of the lines before it")
    require(lines and lines[-1].end() == len(raw), f"{run.file} does not end with the sha256 of its lines")


# ------------------------------------------------------------ texts
def check_text(folder: Folder, options: argparse.Namespace) -> None:
    """No markup in anything that the page shows, and notes that nobody takes for results."""
    before = (folder.submission["before"] or {}).get("config", {})
    for where, content in [("submission.json", folder.submission), *folder.results.items()]:
        for key, value in content.items():
            shown_as_code = key in ("config", "overrides", "before")
            for text in strings_of(value):
                good = is_plain(text) or shown_as_code and text.isprintable() and "`" not in text
                require(good, f"{where}: {key} holds markup: {text[:60]!r}")
        for key, value in content.get("config", {}).items():        # those that differ stand in a table
            require(is_plain(value) or not before or value == before.get(key),
                    f"{where}: config {key} holds markup: {value[:60]!r}")
    notes = folder.readme.partition(NOTES[0])[2].partition(NOTES[1])[0]
    found = NOT_IN_NOTES.search(notes)
    require(not found, "README.md: the notes hold a heading, HTML, a picture or a line like those of the "
            f"result: {found and notes[found.start():][:60]!r}")


def strings_of(value: Any) -> list[str]:
    """All strings of a JSON value, keys too."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return [text for part in value for text in strings_of(part)]
    return [value] if isinstance(value, str) else []


# ------------------------------------------------------------ the picture
def record_picture(folder: Folder, earlier: dict[str, Folder], path: Path) -> None:
    """Draws a record's loss.png: its runs and those of the record before, of `earlier` {name: Folder}."""
    title = folder.submission["name"]
    curves = {title: folder.runs}
    if before := folder.submission["before"]:
        name = before["name"]
        require(name in earlier, f"loss.png shows {name}, which is not here")
        curves = {name: earlier[name].runs} | curves
    draw_record(curves, path, f"{folder.runs[0].result['preset']}: {title}")


def check_picture(folder: Folder, options: argparse.Namespace) -> None:
    """loss.png is what the logs draw, pixel by pixel."""
    from matplotlib import image
    with tempfile.TemporaryDirectory() as scratch:
        again = Path(scratch, "loss.png")
        record_picture(folder, records_of(folder.submission["track"]), again)
        pictures = [image.imread(path) for path in (again, folder.path / "loss.png")]
    here = metadata.version("matplotlib")
    want = re.search(r"(?m)^matplotlib==(\S+)", inputs.read_text(ROOT / "requirements.txt"))[1]
    if not np.array_equal(*pictures) and here != want:
        raise LeftOut(f"matplotlib {here} draws otherwise than {want}")
    require(np.array_equal(*pictures), "loss.png is not the picture of these logs")


# In the order in which `record check` asks them
CHECKS = [
    Rule("steps and times", check_steps),
    Rule("distinct runs", check_distinct),
    Rule("names", check_names),
    Rule("dates", check_dates),
    Rule("git commit", check_commit),
    Rule("digests", check_digests),
    Rule("plain text", check_text),
    Rule("picture", check_picture),
]
