"""Rules of `check` on what a log shows by itself: lines that follow from each other, digests, runs that are
copies of one another, names, dates, texts, and the picture. Whoever alters a number must alter all that
follow from it; a log that is made up consistently from end to end passes (README.md: what makes faking
harder).
"""
import argparse
import hashlib
import itertools
import math
import re
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from data import inputs
from records.judge.runs import DATE, RESUMED, RULER, Run
from records.show.curves import draw_record
from records.verify import leak_probe, scripts
from records.verify.checks import OF_ONE_RUN, LeftOut, Rule, artifacts_of, require, same
from records.verify.folders import NOTES, ROOT, Folder, is_plain, records_of, sha256

STEP_LINE = re.compile(
    r"step:(\d+)/(\d+) (train|val)_loss:(\d+\.\d{4})(?: val_bpb:(\d+\.\d{4}))? train_time:(\d+)ms "
    r"step_avg:(\d+\.\d\d)ms"
    r"(?: tok/s:(\d+) lr_factor:\d\.\d{3} eta:(\d+)s(?: mean_loss:(\d+\.\d{4}))?)?")
# A run says these once; a resumed one says those of SAID_AGAIN again
SAID_ONCE = re.compile(
    r"(config \w+|override \w+|sha256 \S+(?=:[0-9a-f]{64}$)|data: \w+|parameters|world_size|eval settings"
    r"|run folder|setup|stopping_early|Code size|Serialized model|Total submission size"
    r"|peak memory|final_\w+(?= val_loss))[ :=]")
SAID_AGAIN = ("config", "override", "sha256 config", "data", "parameters", "world_size", "run folder",
              "setup")
LOG_DIGEST = re.compile(rb"^log sha256:([0-9a-f]{64})\n", re.M)
# Residuals in nats of one curve fitted to another, by SHUFFLE: those of two seeds are over 2.5 times as large
SAME_CURVE = {"1": 4e-3, "0": 5e-4}
LEAST_POINTS = 12       # of two curves that can be compared
# On the clock, before the first step
BUILT = re.compile(
    r"(?:n-grams of \d+ tokens counted|(?:first values|init) of .* made from bigrams) in (\d+\.\d) s")
UNUSED_STEPS = 5        # of the slowest, that a run may end before its cap
GAIN_BY_PACKING = 5e-3  # nats by which an artifact may be better than the weights that it was made from
CLOCKS_DIFFER = timedelta(hours=1)
# Headings, HTML, pictures, and how generated lines begin
NOT_IN_NOTES = re.compile(r"(?m)^ {0,3}(?:#|=+ *$|-{2,} *$|\| *(?:seed|mean|std) *\||Test: |Exact metric"
                          r"|Training time: |(?:val_bpb|val_loss|core): n=)|<[A-Za-z!/?]|!\[")


class Step(NamedTuple):
    """A step line of a log. rate, eta: None at a validation."""
    step: int
    total: int
    kind: str           # train or val
    loss: float
    bpb: float | None
    ms: int
    average: float
    rate: int | None
    eta: int | None
    mean: float | None = None       # of the steps since the line before; older scripts don't tell it


def segments_of(run: Run) -> list[tuple[tuple[int, int], list[Step]]]:
    """[((step, ms) at which the run began or was resumed, its Steps)]. Raises Broken for other step lines."""
    found = [((0, 0), [])]
    for line in run.body.split("\n"):
        if resumed := RESUMED.match(line):
            found.append(((int(resumed[1]), int(resumed[2])), []))
        elif re.match(r"step:\d", line):
            parts = STEP_LINE.fullmatch(line)
            require(parts, f"{run.file}: train_gpt.py writes no such line as {line[:80]!r}")
            step, total, kind, loss, bpb, ms, average, rate, eta, mean = parts.groups()
            found[-1][1].append(Step(
                int(step), int(total), kind, float(loss), float(bpb) if bpb else None, int(ms),
                float(average), int(rate) if rate else None, int(eta) if eta else None,
                float(mean) if mean else None))
    return found


# ------------------------------------------------------------ steps


def check_steps(folder: Folder, options: argparse.Namespace) -> str:
    """Steps and times rise, no report is missing, and every rate is what steps and times make."""
    count = 0
    for run in folder.runs:
        segments = check_lines(run)
        resumed = run.result["resumed"]
        require((len(segments) > 1) == resumed,
                f"{run.json} says resumed {resumed}, {run.file} was resumed {len(segments) - 1} times")
        # only what is built before the first step is on the clock: a resumed run counts again, off it
        early = itertools.takewhile(lambda line: not line.startswith("step:"), run.body.split("\n"))
        built = [float(found[1]) for found in map(BUILT.fullmatch, early) if found]
        first = min((step.ms for _, steps in segments for step in steps), default=0)
        require(sum(built) <= first / 1e3 + 0.1,
                f"{run.file}: {sum(built)} s of counting end after its first step line")
        check_end(run, segments[-1][1], batches_of(run), built)
        check_said_once(run, resumed)
        count += sum(len(steps) for _, steps in segments)
    for run in folder.baseline:         # without results
        scores = {metric: run.value(metric) for metric in ("val_loss", "val_bpb")}
        run.result = scores | {"config": run.config, "steps": run.steps}
        segments = check_lines(run)
        check_said_once(run, len(segments) > 1)
        trained = [loss for tag, loss, _ in run.finals if tag == "final_model_exact"]
        require(trained and abs(trained[0] - run.curves["val"][-1].loss) < 6e-5,
                f"{run.file}: final_model_exact is not the score of its last validation")
    return f"{count} lines rise and agree with step_avg, tok/s, eta and val_bpb"


def batches_of(run: Run) -> list[int]:
    """Tokens per step of each stage: by batch_schedule where it is given, as in all older logs, else by the
    table of stages in the log."""
    config = run.result["config"]
    if config.get("batch_schedule"):
        return [int(config["train_batch_tokens"]) * int(n) for n in config["batch_schedule"].split(",")]
    batches = []
    column = None
    for line in run.body.split("\n"):
        if line.startswith("stage table:"):
            column = line.split()[2:].index("tokens_per_step")
        elif column is not None:
            if not re.match(r" *\d+ ", line):
                break
            batches.append(int(line.split()[column]))
    require(batches, f"{run.path.name} has no table of stages")
    return batches


def check_lines(run: Run) -> list[tuple[tuple[int, int], list[Step]]]:
    """The step lines of a log by themselves. Returns its segments."""
    segments = segments_of(run)
    batches = batches_of(run)
    for begin, steps in segments:
        check_order(run.file, begin, steps)
        check_reports(run, begin[0], steps)
        check_means(run.file, begin[0], steps)
        for step in steps:
            check_rates(f"{run.file}, step {step.step}", step, run.result, batches)
    return segments


def check_order(log: str, begin: tuple[int, int], steps: list[Step]) -> None:
    """Neither steps nor time go back; begin: (step, ms) of what came before."""
    last_step, last_ms = begin
    for step in steps:
        where = f"{log}, step {step.step}"
        again = step.step == last_step and step.kind == "val"
        require(step.step > last_step or again, f"{where} comes after step {last_step}")
        require(step.ms > last_ms or again and step.ms == last_ms or step.ms < 10,
                f"{where}: train_time {step.ms} ms comes after {last_ms} ms")
        same(where, "the last step", step.total, "its first line", steps[0].total)
        last_step = step.step
        last_ms = step.ms


def check_reports(run: Run, first: int, steps: list[Step]) -> None:
    """Every line is there that the run wrote after step `first`, and no other."""
    config = run.result["config"]
    last = steps[-1].step if steps else first
    every = int(config["train_log_every"]) or 100
    wanted = {n for n in range(first + 1, last + 1) if n <= 10 or n % every == 0}
    odd = sorted({step.step for step in steps if step.kind == "train"} ^ wanted)
    require(not odd, f"{run.file}: train_loss of step {odd and odd[0]} is missing, or is no step to be "
            f"reported (TRAIN_LOG_EVERY={every})")
    if any(config.get(name, "0") != "0" for name in ("core_metric_every", "sample_every")):
        return                      # these validate, too
    every = int(config["val_loss_every"])
    wanted = set()
    if every:
        wanted = {n for n in range(0, last + 1, every) if n > first or first == 0}
    differing = {step.step for step in steps if step.kind == "val"} ^ wanted
    odd = sorted(differing - {first, run.result["steps"]})
    require(not odd, f"{run.file}: val_loss of step {odd and odd[0]} is missing, or is no step to be "
            f"validated (VAL_LOSS_EVERY={every})")


def check_means(log: str, first: int, steps: list[Step]) -> None:
    """Where a line reports a single step, the mean since the line before is that step's loss."""
    before = first
    for step in steps:
        if step.kind != "train":
            continue
        if step.mean is not None and step.step == before + 1:
            same(f"{log}, step {step.step}", "mean_loss", step.mean, "its train_loss", step.loss)
        before = step.step


def check_rates(where: str, step: Step, result: dict[str, Any], batches: list[int]) -> None:
    """step_avg, val_bpb, tok/s and eta of one Step."""
    config = result["config"]
    seconds = step.ms / 1e3
    done = max(step.step, 1)
    require(abs(step.ms / done - step.average) <= 0.5 / done + 0.006,
            f"{where}: step_avg {step.average} ms, but train_time and steps make {step.ms / done:.2f}")
    if step.bpb is not None:
        ratio = result["val_bpb"] / result["val_loss"]
        require(abs(step.loss * ratio - step.bpb) < 6e-5 * (1 + ratio),
                f"{where}: val_bpb {step.bpb}, but val_loss makes {step.loss * ratio:.4f}")
    if step.rate is None or step.ms < 2:
        return
    # 1. tokens of the steps so far, between those of the smallest and of the largest batches
    low = step.step * min(batches) / (seconds + 5e-4) - 0.6
    high = step.step * max(batches) / (seconds - 5e-4) + 0.6
    require(low <= step.rate <= high, f"{where}: tok/s {step.rate}, but steps and train_time make "
            f"{low:.0f} to {high:.0f}")
    # 2. the rest of the run by steps or by the cap, whichever comes first
    cap = float(config["max_wallclock_seconds"])
    by_steps = step.step / step.total
    by_seconds = seconds / cap if cap else 0
    progress = [max(by_steps, by_seconds), by_seconds if cap else by_steps]
    etas = [seconds / min(1, part) - seconds for part in progress]
    slack = 0.6 + 5e-4 / by_steps
    require(any(abs(eta - step.eta) <= slack for eta in etas),
            f"{where}: eta {step.eta} s, but train_time, steps and cap make {etas[0]:.0f} s")


def check_end(run: Run, steps: list[Step], batches: list[int], built: Sequence[float] = ()) -> None:
    """What the last step says of the whole run. batches: from batches_of(). built: seconds of what was built
    on the clock before the first step."""
    result = run.result
    name = run.json
    config = result["config"]
    seconds = result["train_time_ms"] / 1e3
    pace = result["step_ms"]
    mean_ms = (result["train_time_ms"] - 1e3 * sum(built)) / result["steps"]
    stop = result["stop_reason"]
    require(steps and steps[-1].kind == "val", f"{run.file} does not end with a validation")
    cap = float(config["max_wallclock_seconds"])
    epochs = int(config.get("max_epochs", "0"))
    possible = {"iterations": True, "wallclock_cap": cap, "max_epochs": cap and epochs}
    require(possible.get(stop), f"{name}: stop_reason is {stop!r}, with max_wallclock_seconds={cap:g} and "
            f"max_epochs={epochs}")
    most = epochs * result["data"]["train_tokens"] if epochs else math.inf
    require(result["tokens"] <= most,
            f"{name}: tokens is {result['tokens']}, max_epochs={epochs} of the text are {most}")
    if stop == "iterations":
        same(name, "steps", result["steps"], f"{run.file}, whose steps end at", steps[-1].total)
    elif stop == "wallclock_cap":
        unused = cap - seconds - UNUSED_STEPS * pace["max"] / 1e3
        require(unused < 1, f"{name}: stopped by the cap of {cap} s after {seconds} s, with steps of at most "
                f"{pace['max']} ms")
    ordered = pace["p50"] <= pace["p95"] <= pace["max"]
    slack = 50 * len(built) / result["steps"]       # their seconds have one digit
    require(ordered and (result["resumed"] or mean_ms < 1.01 * pace["max"] + 1 + slack),
            f"{name}: step_ms {pace}, but {result['steps']} steps took {mean_ms:.2f} ms on average")
    least = sum(result[key] for key in ("setup_ms", "compile_ms", "train_time_ms"))
    require(result["resumed"] or result["process_ms"] >= least,
            f"{name}: process_ms is {result['process_ms']}, its parts make {least}")
    if len(batches) == 1:
        same(name, "tokens", result["tokens"], "steps and batch", result["steps"] * batches[0])
    rate = result["tokens"] / seconds
    require(abs(rate - result["tok_per_s"]) < 1 + rate * 1e-3 / seconds,
            f"{name}: tok_per_s is {result['tok_per_s']}, but tokens and time make {rate:.0f}")
    if "artifact" in result:
        gain = result["trained"]["val_loss"] - result["artifact"]["val_loss"]
        require(gain < GAIN_BY_PACKING, f"{name}: the artifact is better than the weights that it was made "
                f"from, by {gain:.4f} nats")
    if result.get("min_val_bpb") and not result["resumed"]:
        best = min(step.bpb for step in steps if step.bpb is not None)
        same(name, "min_val_bpb", round(result["min_val_bpb"], 4), run.file, best)


def check_said_once(run: Run, resumed: bool) -> None:
    """A line that a run writes once is not there twice with two values, of which a reader sees one."""
    said = {}
    for line in run.body.split("\n"):
        found = SAID_ONCE.match(line)
        if found and not (resumed and found[1].startswith(SAID_AGAIN)):
            key = found[1] if found[1] != "peak memory" else line[:20]
            require(said.setdefault(key, line) == line,
                    f"{run.file} says both {said[key][:80]!r} and {line[:80]!r}")


# ------------------------------------------------------------ copies
def check_independent(folder: Folder, options: argparse.Namespace) -> str:
    """No run's curve, times or pace is that of another one with another seed."""
    shuffle = folder.runs[0].result["config"].get("shuffle", "1")
    for runs in (folder.runs, folder.baseline):
        for one, other in itertools.combinations(runs, 2):
            if why := likeness(one, other, SAME_CURVE[shuffle]):
                raise_same(one, other, why)
    for one, other in itertools.combinations(folder.runs, 2):
        paces = [[run.result["step_ms"][key] for key in ("p50", "p95", "max")]
                 for run in (one, other)]
        if sum(a == b for a, b in zip(*paces)) > 1:
            raise_same(one, other, f"step_ms {paces[0]} and {paces[1]}")
    return "curves, times and paces differ"


def raise_same(one: Run, other: Run, why: str) -> NoReturn:
    require(False, f"{other.file} looks like a copy of {one.file}: {why}")


def likeness(one: Run, other: Run, limit: float) -> str:
    """Why two runs look like the same one, or ""."""
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
def check_names(folder: Folder, options: argparse.Namespace) -> str:
    """File names, seeds, run ids, overrides and hardware say the same."""
    results = sorted(run.json for run in folder.runs)
    same("the results", "files", sorted(folder.results), "the logs", results)
    ids = [run.result["run_id"] for run in folder.runs]
    require(len({*ids}) == len(ids), f"two runs have one run_id: {', '.join(sorted(ids))}")
    first = folder.runs[0].result["seed"]
    defaults = {}
    for run in folder.runs:
        if "_seed" in run.file:
            same(run.file, "seed", run.result["seed"], "its name", int(re.search(r"_seed(\d+)", run.file)[1]))
        require(run.result["seed"] >= first,
                f"{run.json}: seed {run.result['seed']} is below that of train.log, {first}")
        told = run.summary.get("run folder")
        run_id = run.result["run_id"]
        require(told in (None, f"logs/{run_id}"),
                f"{run.file}: run folder is {told!r}, in {run.json} {run_id!r}")
        ranks = re.match(r"(\d+)(?: ranks )?x ", run.result["hardware"])
        world_size = run.result["world_size"]
        same(run.json, "ranks of the hardware", ranks and int(ranks[1]), "world_size", world_size)
        lines = re.findall(r"(?m)^override (\w+) (.*) -> (.*)$", "\n".join(run.body.split("\n")))
        said = {constant: [old, new] for constant, old, new in lines}
        wanted = {constant: list(texts) for constant, texts in run.result["overrides"].items()}
        same(run.file, "overrides", said, run.json, wanted)
        for constant, (old, _) in wanted.items():
            same(run.json, f"default of {constant}", old, "another run", defaults.setdefault(constant, old))
    for run in folder.runs:         # what a run did not override is the default
        for constant in {*defaults} - {*run.result["overrides"]}:
            same(run.json, constant, run.result["config"][constant], "the default that others override",
                 defaults[constant])
    return "files, seeds, run ids, overrides and ranks agree"


def utc(text: str) -> datetime:
    """A time as our results write it."""
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


def check_dates(folder: Folder, options: argparse.Namespace) -> str:
    """No run ended before it began or after today, or took another time than its process."""
    now = datetime.now(UTC) + CLOCKS_DIFFER
    for run in folder.runs:
        began = utc(run.result["started"])
        ended = utc(run.result["finished"])
        require(began <= ended <= now, f"{run.json}: started {began}, finished {ended}, it is {now:%F %H:%M}")
        differ = (ended - began).total_seconds() - run.result["process_ms"] / 1e3
        require(run.result["resumed"] or abs(differ) < 3, f"{run.json}: from start to finish is "
                f"{differ:+.1f} s more than process_ms, {run.result['process_ms']}")
    date = folder.submission["date"]
    told = DATE.match(folder.path.name)
    require(not told or "-".join(told.groups()) == date, f"{folder.path.name} is of {date}")
    until = folder.rules.until
    version = folder.submission["rules_version"]
    require(not until or date <= until, f"submission.json: runs of {date} are judged by the newest rules; "
            f"version {version} ended on {until}")
    return f"the last run ended on {date}"


def check_commit(folder: Folder, options: argparse.Namespace) -> str | None:
    """The commit holds the script, or the tool makes it of the commit for the run's preset, where this
    repository knows it."""
    commit = folder.submission["git_commit"]
    if commit == "not committed":
        return None
    require(re.fullmatch(r"[0-9a-f]{40}", commit), f"submission.json: git_commit {commit!r} is no commit")
    if not scripts.is_known(commit):        # another repository, or no git here
        raise LeftOut(f"commit {commit[:9]} is not in this repository")
    preset = scripts.source_of(folder).preset
    require(scripts.is_made_at(commit, folder.script, preset),
            f"submission.json: {commit[:9]} has another train_gpt.py than the folder, and so has what "
            f"`./run.sh script {preset}` makes of it")
    return f"{commit[:9]} holds the script"


# ------------------------------------------------------------ digests
def check_digests(folder: Folder, options: argparse.Namespace) -> str | None:
    """Since rules version 3 a log names the sha256 of what it was made from and of its own lines."""
    if not folder.rules.digests:
        return None
    count = 0
    models = {}
    for run in folder.runs:
        config = "".join(f"config {key}={value}\n" for key, value in run.config.items())
        wanted = {"train_gpt.py": sha256(folder.script), "config": sha256(config.encode())}
        for key, digest in (wanted | run.result["data"]["sha256"]).items():
            same(run.file, f"sha256 {key}", run.digests.get(key), "what it stands for", digest)
        for key, digest in run.digests.items():
            if key.startswith("final_model"):
                other = models.setdefault(digest, run.file)
                require(other == run.file, f"{run.file} names the {key} of {other}")
        count += check_own_lines(run)
    for base in folder.baseline:
        if "log sha256:" in (base.source or ""):        # older scripts write none
            check_own_lines(base)
    run = folder.runs[0]
    model = [name for name in run.digests if name.startswith("final_model.")]
    packed = run.result["config"]["score_artifact"] == "1"
    counts = [name for name in model if name.endswith(".ptz") == packed]
    require(len(counts) == 1, f"{run.file} names {len(counts)} files with the weights that count")
    same("submission.json", "artifact_sha256", folder.submission["artifact_sha256"], run.file,
         run.digests[counts[0]])
    for owner, path in artifacts_of(folder, options):
        digest = sha256(inputs.read_bytes(path))
        same(path.name, "sha256", digest, owner.file, owner.digests.get(counts[0]))
        if packed:
            same(path.name, "bytes", path.stat().st_size, owner.json, owner.result["bytes_model"])
    return f"inputs, models and lines have the sha256 that the logs name, {count} times their own"


def check_own_lines(run: Run) -> int:
    """Each `log sha256` line is right, and the last line is one. Returns their number."""
    raw = inputs.read_bytes(run.path)
    script = b""
    if raw.startswith(RULER.encode()):      # the folder holds the script that it began with once
        script = f"{run.source}\n".encode()
        raw = script + raw
    digest = hashlib.sha256()
    at = 0
    count = 0
    for found in LOG_DIGEST.finditer(raw):
        digest.update(raw[at:found.start()])
        line = raw.count(b"\n", len(script), found.start()) + 1     # of the file
        require(digest.hexdigest().encode() == found[1], f"{run.file}: the lines before line {line} are not "
                "those whose sha256 it is")
        at = found.start()
        count += 1
    require(count and found.end() == len(raw), f"{run.file} does not end with the sha256 of its lines")
    return count


def check_constants(folder: Folder, options: argparse.Namespace) -> str:
    """The script makes the configuration of a run from the preset and the overrides."""
    if options.no_exec:
        raise LeftOut
    asked = [{"PRESET": run.result["preset"]} | {
        key.upper(): new for key, (_, new) in run.result["overrides"].items() if key not in OF_ONE_RUN}
        for run in folder.runs]
    found = leak_probe.configurations(folder.path / "train_gpt.py", asked, options.seconds)
    for made, run in zip(found, folder.runs):
        config = run.result["config"]
        for key in sorted({*made, *config} - {*OF_ONE_RUN}):
            by_data = key in ("vocab_size", "bos_id") and made.get(key) == "0"
            if not by_data:
                value = config.get(key)
                same(run.json, f"config {key}", value, "train_gpt.py with these overrides", made.get(key))
    return "are what train_gpt.py makes of preset and overrides"


# ------------------------------------------------------------ texts
def check_text(folder: Folder, options: argparse.Namespace) -> str:
    """No markup in anything that the page shows, and notes that nobody takes for results."""
    for where, content in [("submission.json", folder.submission), *folder.results.items()]:
        for key, value in content.items():
            shown_as_code = key in ("config", "overrides", "before")
            for text in strings_of(value):
                good = is_plain(text) or shown_as_code and text.isprintable() and "`" not in text
                require(good, f"{where}: {key} holds markup: {text[:60]!r}")
    before = (folder.submission["before"] or {}).get("config", {})
    for where, content in folder.results.items():       # constants that differ stand in a table
        for key, value in content["config"].items():
            shown = bool(before) and value != before.get(key)
            require(is_plain(value) or not shown, f"{where}: config {key} holds markup: {value[:60]!r}")
    notes = folder.readme.partition(NOTES[0])[2].partition(NOTES[1])[0]
    found = NOT_IN_NOTES.search(notes)
    require(not found, "README.md: the notes hold a heading, HTML, a picture or a line like those of the "
            f"result: {found and notes[found.start():][:60]!r}")
    return "no markup; notes look like notes"


def strings_of(value: Any) -> list[str]:
    """All strings of a JSON value, keys too."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [*value, *itertools.chain.from_iterable(map(strings_of, value.values()))]
    return [*itertools.chain.from_iterable(map(strings_of, value))] if isinstance(value, list) else []


# ------------------------------------------------------------ the picture
def record_picture(folder: Folder, earlier: dict[str, Folder], path: Path) -> None:
    """Draws a record's loss.png: its runs and those of the record before, of `earlier` {name: Folder}."""
    s = folder.submission
    curves = {folder.submission["name"]: folder.runs}
    if s["before"]:
        name = s["before"]["name"]
        require(name in earlier, f"loss.png shows {name}, which is not here")
        curves = {name: earlier[name].runs} | curves
    draw_record(curves, path, f"{folder.runs[0].result['preset']}: {s['name']}")


def pinned(package: str) -> str:
    """Its version in requirements.txt."""
    return re.search(rf"(?m)^{package}==(\S+)", inputs.read_text(ROOT / "requirements.txt"))[1]


def check_picture(folder: Folder, options: argparse.Namespace) -> str:
    """loss.png is what the logs draw, pixel by pixel."""
    from matplotlib import image
    with tempfile.TemporaryDirectory() as scratch:
        again = Path(scratch, "loss.png")
        record_picture(folder, records_of(folder.submission["track"]), again)
        if inputs.read_bytes(again) != folder.read("loss.png"):
            here = metadata.version("matplotlib")
            want = pinned("matplotlib")
            if here != want:
                raise LeftOut(f"matplotlib {here} draws otherwise than {want}")
            pictures = [image.imread(path) for path in (again, folder.path / "loss.png")]
            require(np.array_equal(*pictures), "loss.png is not the picture of these logs")
    return "loss.png, drawn again, is the same"


# In the order in which `record check` asks them
CHECKS = [
    Rule("steps and times", check_steps),
    Rule("independent runs", check_independent),
    Rule("names", check_names),
    Rule("dates", check_dates),
    Rule("git commit", check_commit),
    Rule("digests", check_digests),
    Rule("constants", check_constants),
    Rule("plain text", check_text),
    Rule("picture", check_picture),
]
