"""Runs side by side: statistics, comparisons, sweeps, ablations, noise, curves.

What is run here is run in turn (A B, B A, A B …), so that a machine whose speed drifts treats all alike.
"""
import argparse
import datetime
import itertools
import os
import re
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from judge.runs import (
    Run, batch_means, cautious_std, demand, demand_samples, demand_seed, describe, detectable, equal_point,
    identity, is_better, judge, judge_lines, load_runs, log_text, mean_curve, name_of, only, p_term,
    pick_metric, points_with, read_log, read_runs, same_losses, show, stats_line, test_line, test_target,
    test_welch, why_not_another)
from verify.folders import ROOT, best_before, open_run, records_of, sha256, shared_config, track_of


# ------------------------------------------------------------ running
def last_line(done: subprocess.CompletedProcess, streams: tuple[str, ...] = ("stderr",)) -> str:
    """What a process said last, on the first of the streams on which it said something."""
    for stream in streams:
        if text := getattr(done, stream).strip():
            return text.splitlines()[-1][:200]
    return "no word"


def run_once(label: str, command: str, run_id: str, seed: int) -> Run:
    """Runs a shell command with SEED and RUN_ID in the environment -> Run. Raises Refused when it fails, or
    if its log says that it was trained with another seed."""
    env = os.environ | {"SEED": str(seed), "RUN_ID": run_id}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, errors="replace")
    said = last_line(done, ("stderr", "stdout"))
    demand(done.returncode == 0, f"{label}: the command ended with {done.returncode}: {said}")
    log = Path("logs", run_id, "train.log")
    demand(log.exists(), f"{label}: the command left no {log}; it must heed SEED and RUN_ID")
    run = only(read_runs(log))
    demand_seed(run, seed, label)
    return run


def run_in_turn(commands: dict[str, str], n: int, say: Callable, seed: int = 1337) -> dict[str, list[Run]]:
    """Runs {label: shell command} n times each, in turn, every second round backwards. Returns
    {label: [Run]}. Raises Refused when a command fails, or gives the same run at two seeds."""
    stamp = datetime.datetime.now().strftime("%Y%m%d_%H%M%S_%f")
    total = n * len(commands)
    found = {label: [] for label in commands}
    times = []
    for i in range(n):
        order = list(enumerate(commands.items()))
        if i % 2:
            order.reverse()
        for k, (label, command) in order:
            began = time.monotonic()
            run = run_once(label, command, f"trial_{stamp}_{k}_seed{seed + i}", seed + i)
            why = why_not_another(run, found[label])
            demand(not why, f"{label}: {why}: the command must heed SEED")
            found[label].append(run)
            times.append(time.monotonic() - began)
            metric = pick_metric([run])
            left = (total - len(times)) * sum(times) / len(times)
            say(f"{len(times)}/{total} {label} seed {seed + i}: {metric} {show(metric, run.value(metric))} "
                f"eta:{left:.0f}s")
    return found


def training_command(settings: dict[str, Any], script: Path = ROOT / "train_gpt.py") -> str:
    """A shell command that trains with {name: value} as flags; the trainer refuses one it does not know."""
    flags = [f"--{name.lower().replace('_', '-')}={value}" for name, value in settings.items()]
    return shlex.join([sys.executable, str(script), *flags])


def dry_run(command: str) -> None:
    """Refuses a setting that the trainer refuses, before anything is trained."""
    done = subprocess.run(["bash", "-c", command + " --dry-run"], capture_output=True, text=True,
                          errors="replace")
    demand(done.returncode == 0, f"{command}: {last_line(done)}")


def parse_settings(words: list[str]) -> list[dict[str, str]]:
    """NAME=a,b,c … -> [{NAME: value}], the product of all. / separates values that hold commas."""
    axes = []
    for word in words:
        name, given, values = word.partition("=")
        demand(given and name and values, f"{word!r} is no NAME=value,value")
        separator = "/" if "/" in values else ","
        axes.append([(name, value) for value in values.split(separator)])
    return [dict(choice) for choice in itertools.product(*axes)]


def sweep(args: argparse.Namespace, say: Callable) -> dict[str, Any]:
    """Each setting against the first of them."""
    settings = parse_settings(args.settings)
    demand(len(settings) > 1 and args.n > 1, "a sweep needs two settings (NAME=a,b) and -n 2 at least")
    demand("SEED" not in [name.upper() for name in settings[0]],
           "a sweep gives each run its own seed: leave SEED out, --seed is the first one")
    commands = {}
    for setting in settings:
        pairs = [f"{name.upper()}={value}" for name, value in setting.items()]
        if args.command:
            command = f"export {shlex.join(pairs)}; {args.command}"
        else:
            command = training_command(setting)
            dry_run(command)
        commands[" ".join(pairs)] = command
    return report_many(run_in_turn(commands, args.n, say, args.seed), say)


def report_many(found: dict[str, list[Run]], say: Callable) -> dict[str, Any]:
    """A line a setting: mean, std, difference from the first of them; intervals and p by Dunnett's test,
    which holds for all of them at once."""
    from scipy import stats
    metric = pick_metric([run for runs in found.values() for run in runs])
    values = {label: [run.value(metric) for run in runs] for label, runs in found.items()}
    (first, control), *others = values.items()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        test = stats.dunnett(*(np.array(side) for _, side in others), control=np.array(control), rng=0)
        span = test.confidence_interval(0.95)
    say(f"{first}: {stats_line(metric, describe(control))} (the others are compared with this)")
    for (label, side), p, low, high in zip(others, test.pvalue, span.low, span.high):
        difference = describe(side).mean - describe(control).mean
        verdict = "cannot tell"
        if p < 0.05:
            verdict = "better" if is_better(difference, metric) else "worse"
        say(f"{label}: {stats_line(metric, describe(side))}; difference {difference:+.6f} (95 %, for all at "
            f"once: {low:+.6f} to {high:+.6f}) {p_term(p)}: {verdict}")
    return {"metric": metric, "values": values, "p": [float(p) for p in test.pvalue]}


def without_derived(overrides: dict[str, str]) -> dict[str, str]:
    """Overrides {name: text} without those that follow from the others: of a depth's constants the depth."""
    import train_gpt
    if int(overrides.get("depth", 0)) == 0:
        return overrides
    for name in [name for name in overrides if name not in ("depth", "preset")]:
        rest = {key: text for key, text in overrides.items() if key != name}
        cfg = train_gpt.load_config({key.upper(): text for key, text in rest.items()})
        if train_gpt.show(getattr(cfg, name)) == overrides[name]:
            overrides = rest
    return overrides


def ablate(args: argparse.Namespace, say: Callable) -> dict[str, Any]:
    """The run's settings against the same with one changed constant reverted to the record before."""
    run, result = open_run(args.run)
    track = track_of(result["preset"])
    earlier = records_of(track)
    before = args.before or best_before(earlier, result["hardware"])
    demand(before in earlier, f"track {track} has no record before, or none named {before}")
    demand(args.n > 1, "an ablation needs -n 2 at least")
    # 1. what changed
    then = shared_config(earlier[before].result(earlier[before].runs[0])["config"])
    now = shared_config(result["config"])
    for name in now:
        if name not in then:
            say(f"left alone: {before} has no constant {name}")
    changed = [name for name in now if name in then and now[name] != then[name]]
    demand(changed, f"no constant of {result['run_id']} differs from {before}")
    # 2. of that, what was asked for
    overrides = {name: value for name, (_, value) in result["overrides"].items()
                 if name not in ("seed", "run_id")}
    asked = without_derived(overrides | {"preset": result["preset"]})
    changed = [name for name in changed if name in asked or name not in overrides]
    # 3. the runs
    script = run.path.parent / "train_gpt.py"
    commands = {"as it is": training_command(asked, script)}
    for name in changed:
        label = f"{name}={then[name]} (not {now[name]})"
        commands[label] = training_command(asked | {name: then[name]}, script)
    return report_many(run_in_turn(commands, args.n, say, args.seed), say)


def noise(args: argparse.Namespace, say: Callable) -> dict[str, Any]:
    """The spread of K runs of a preset, or of runs that are there, and what n runs a side can detect."""
    if Path(args.preset).exists():
        runs = load_runs([args.preset], say)
        demand_samples(runs)
    else:
        demand(args.n > 1, "the spread needs -n 2 at least")
        command = training_command({"preset": args.preset})
        dry_run(command)
        runs = run_in_turn({args.preset: command}, args.n, say, args.seed)[args.preset]
    metric = pick_metric(runs, args.metric)
    s = describe([run.value(metric) for run in runs])
    demand(s.std is not None, "the spread needs two runs or more")
    found = {n: detectable(cautious_std(s.std, s.n - 1), n) for n in (3, 5, 8, 10, 20)}
    say(f"{metric}: {stats_line(metric, s)}")
    for n, size in found.items():
        say(f"{n} runs a side find a difference of {size:.6f} nine times in ten")
    return {"metric": metric, **s._asdict(), "detectable": found}


# ------------------------------------------------------------ comparing
def compare(args: argparse.Namespace, say: Callable) -> dict[str, Any]:
    """Is B better than A?"""
    demand(len(args.paths) == 2, "compare takes A and B: paths (several of a side with commas), or commands "
           "with --run")
    if args.across:
        return compare_across(args, say)
    if args.run:
        demand(args.n > 1, "a comparison needs -n 2 at least")
        labels = {f"{letter}: {command}": command for letter, command in zip("AB", args.paths)}
        a, b = run_in_turn(labels, args.n, say, args.seed).values()
    else:
        a, b = (load_runs(side.split(","), say) for side in args.paths)
        demand_sides(a, b)
    for one, other in itertools.product(a, b):
        if same_losses(one, other):
            say(f"warning: {name_of(one)} of A and {name_of(other)} of B have the same losses: what differs "
                "between A and B does nothing there")
    metric = pick_metric([*a, *b], args.metric)
    for letter, runs in (("A", a), ("B", b)):
        s = describe([run.value(metric) for run in runs])
        times = [run.time for run in runs if run.time is not None]
        seconds = f"{describe(times).mean:.4f} s" if times else "no times"
        say(f"{letter}: {metric} {stats_line(metric, s)}; {seconds}; "
            f"torch {kinds('torch', runs, '/')}; {kinds('hardware', runs, '/')}")
    for key in ("torch", "hardware", "fingerprint", "val_tokens"):
        if len({str(run.facts.get(key)) for run in (*a, *b)}) > 1:
            say(f"warning: not the same {key}: {kinds(key, [*a, *b], ', ')}")
    for axis, name, unit in (("seconds", "time", "s"), ("tokens", "tokens", "tokens")):
        if point := equal_point(a, b, axis):
            (kind, place), of_a, of_b = point
            test, _ = test_welch(of_a, of_b, "val_loss")
            say(f"at equal {name} ({place:,.0f} {unit}): {kind} A {of_a.mean():.4f}, B {of_b.mean():.4f}, "
                f"{test_line(test)}")
    values = [[run.value(metric) for run in runs] for runs in (a, b)]
    out = {"metric": metric, **judge(*values, metric)}
    say(*judge_lines(metric, out))
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    draw({"A": a, "B": b}, args.out, "A against B")
    say(f"curves: {args.out}")
    return out


def demand_sides(a: list[Run], b: list[Run]) -> None:
    """Refuses a seed that counts twice on a side, and a run that is on both."""
    for side in (a, b):
        demand_samples(side)
    of_a = {identity(run): run for run in a}
    for run in b:
        demand(identity(run) not in of_a, f"{name_of(run)} is on both sides: leave it out of one of them")


def kinds(key: str, runs: list[Run], separator: str) -> str:
    """The torch builds or the hardware of runs, each once."""
    return separator.join(sorted({str(run.facts.get(key)) for run in runs}))


def compare_across(args: argparse.Namespace, say: Callable) -> dict[str, Any]:
    """Is B better than A at every value of a setting, say of depth? A change that holds at one size only may
    be luck, or hurt at the size that counts."""
    demand(args.run and args.n > 1, "--across needs --run, and -n 2 at least")
    settings = [" ".join(f"{name.upper()}={value}" for name, value in one.items())
                for one in parse_settings([args.across])]
    commands = {}
    for setting in settings:
        for letter, command in zip("AB", args.paths):
            commands[f"{letter} {setting}"] = f"export {shlex.join(setting.split(' '))}; {command}"
    found = run_in_turn(commands, args.n, say, args.seed)
    out = []
    metric = pick_metric([run for runs in found.values() for run in runs], args.metric)
    for setting in settings:
        a, b = ([run.value(metric) for run in found[f"{letter} {setting}"]] for letter in "AB")
        judged = judge(a, b, metric)
        out.append({"setting": setting, "metric": metric, **judged})
        say(f"{setting}: A {stats_line(metric, describe(a))}; B {stats_line(metric, describe(b))}")
        say(*[f"  {line}" for line in judge_lines(metric, judged)])
    ahead = len([one for one in out if is_better(one["difference"], metric)])
    sure = len([one for one in out if one["verdict"] == "better"])
    verdict = "does not hold across them"
    if sure == len(out):
        verdict = "holds across them"
    elif ahead == len(out):
        verdict = "leans the same way at all"
    say(f"B is ahead at {ahead} of {len(out)} settings, for sure at {sure}: {verdict}")
    return {"metric": metric, "settings": out}


def stats(args: argparse.Namespace, say: Callable) -> dict[str, Any]:
    """n, values, times, mean, std and tests of whatever lies at the paths."""
    runs = load_runs(args.paths, say)
    demand_samples(runs)
    metric = pick_metric(runs, args.metric)
    values = [run.value(metric) for run in runs]
    times = [run.time for run in runs if run.time is not None]
    for run in runs:
        say(f"{run.path.parent.name}/{run.file}: {metric} {show(metric, run.value(metric))} "
            f"time {show('time', run.time)}")
    scripts = {sha256(run.source.strip().encode()) for run in runs if run.source}
    if len(scripts) > 1:
        say(f"warning: these logs begin with {len(scripts)} different scripts")
    s = describe(values)
    clock = describe(times) if times else None
    out = {"metric": metric, **s._asdict(), "values": values, "times": times,
           "time": clock and clock._asdict()}
    say(f"{metric}: {stats_line(metric, s)}", f"time: {stats_line('time', clock)} s" if clock else "time: -")
    if args.target is not None:
        test = test_target(values, args.target, metric)
        out["test"] = test and test._asdict()
        say(f"against {args.target:.10g}: {test_line(test)}")
    if args.baseline:
        baseline = load_runs([args.baseline], say)
        demand_sides(baseline, runs)
        out |= against_baseline(baseline, metric, values, times, say)
    return out


def against_baseline(baseline: list[Run], metric: str, values: list[float], times: list[float],
                     say: Callable) -> dict[str, Any]:
    """Welch's test and the ratio of times of the baseline's runs and others."""
    old = [run.value(pick_metric(baseline, metric)) for run in baseline]
    old_times = [run.time for run in baseline if run.time is not None]
    test, interval = test_welch(old, values, metric)
    difference = describe(values).mean - describe(old).mean
    ratio = describe(times).mean / describe(old_times).mean if times and old_times else None
    span = f" (95 %: {interval[0]:+.6f} to {interval[1]:+.6f})" if interval else ""
    say(f"baseline: {metric} {stats_line(metric, describe(old))}",
        f"Welch: {test_line(test)}; difference {difference:+.6f}{span}",
        f"time ratio: {show('', ratio)}")
    return {"baseline": describe(old)._asdict(), "welch": test and test._asdict(),
            "difference": difference, "interval": interval, "time_ratio": ratio}


# ------------------------------------------------------------ curves
SPLITS = {"train": "train", "val": "val", "part": "a part of val"}


def split_to_draw(runs: list[Run], axis: str) -> str:
    """Of which split a picture shows curves: val or a part of it, if all runs have at least four points."""
    for split in ("val", "part"):
        if axis != "tokens" and all(len(run.curves[split]) > 3 for run in runs):
            return split
    return "train"


def draw_curves(axes: Any, label: str, runs: list[Run], split: str, axis: str, color: str) -> list[float]:
    """Loss over an axis: the median of the runs, and a band from the lowest to the highest. Returns the least
    and the largest loss drawn."""
    drawn = [run for run in runs if len(points_with(run, split, axis)) > 1]
    if not drawn:
        return []
    end = min(getattr(run.curves[split][-1], axis) for run in drawn)
    grid = np.linspace(0.02 * end, end, 400)
    rows = mean_curve(drawn, split, axis, grid)
    count = f"{len(drawn)} runs" if len(drawn) > 1 else "one run"
    axes.fill_between(grid, rows.min(0), rows.max(0), color=color, alpha=0.2, linewidth=0)
    axes.plot(grid, np.median(rows, 0), color=color, linewidth=1.4,
              label=f"{label}: {SPLITS[split]}, {count}")
    return [rows.min(), rows.max()]


def draw_ends(axes: Any, label: str, runs: list[Run], axis: str, color: str, marker: str) -> list[float]:
    """The final val_loss of each run, where it ended. Returns the losses drawn."""
    points = []
    for run in runs:
        ends = {"tokens": int(run.summary.get("tokens", 0)) or None, "seconds": run.time, "step": run.steps}
        loss = run.value("val_loss")
        if ends[axis] is not None and loss is not None:
            points.append((ends[axis], loss))
    if points:
        axes.plot(*zip(*points), marker, color=color, markersize=4, label=f"{label}: final val")
    return [loss for _, loss in points]


AXES = {"seconds": "train_time (s)", "tokens": "tokens", "step": "steps"}


def draw(curves: dict[str, list[Run]], path: Path | str, title: str, by: str = "seconds",
         grey: dict[str, list[Run]] | tuple = ()) -> None:
    """{label: [Run]} -> a picture of loss over training seconds, tokens or steps. grey: labels of records."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    losses = []
    split = split_to_draw([run for runs in curves.values() for run in runs], by)
    for i, (label, runs) in enumerate(curves.items()):
        color = "0.5" if label in grey else f"C{i - len(grey)}"
        losses += draw_curves(axes, label, runs, split, by, color)
        losses += draw_ends(axes, label, runs, by, color, "os^dv"[i % 5])
    demand(losses, "there are no curves to draw")
    axes.set(xlabel=AXES[by], ylabel="nats per token", title=title, yscale="log",
             ylim=(0.98 * min(losses), 1.02 * max(losses)), xlim=(0, None))
    axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def draw_run(folder: Path, target: dict[str, Any] | None = None) -> None:
    """A finished run's loss.png: train_loss, mean of many batches; val_loss; the loss on the part of val that
    is scored during training; stages as bands; the LR factor. In grey what records/targets.json has for the
    game: the record's curve, and final val_bpb to compare with."""
    from matplotlib.figure import Figure
    run = read_log(folder / "train.log")
    text = log_text(run.path)
    target = target or {}
    rows = re.findall(r"^step:(\d+)/.* train_time:(\d+)ms .* lr_factor:(\S+) eta:(\d+)s", text, re.M)
    steps, ms, rates, eta = np.array(rows, float).T
    last = float(re.search(r"^limits: at most (\d+) steps", text, re.M)[1])
    starts = [int(step) / last for step in re.findall(r"^ {3,}(\d+) +\d+ +\d+ +\d+ +\d+ +\S+$", text, re.M)]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    right = axes.twinx()
    if target.get("curve"):
        split = SPLITS[target["curve_of"]]
        axes.plot(*zip(*target["curve"]), color="0.6", linewidth=4,
                  label=f"the record: {split}, median of its runs")
    axes.plot(*zip(*batch_means(run.curves["train"])), color="tab:blue", linewidth=1, alpha=0.6,
              label="train, mean of many batches")
    if run.curves["part"]:
        part = [(point.seconds, point.loss) for point in run.curves["part"]]
        axes.plot(*zip(*part), color="tab:red", linewidth=2, label="a part of val, during training")
    for other in target.get("compare", []):
        if other["metric"] == "val_bpb" and run.value("val_bpb"):
            # bits per byte as nats per token of this text
            nats = other["value"] / run.value("val_bpb") * run.value("val_loss")
            axes.axhline(nats, color="0.3", linestyle="--", linewidth=1)
            axes.annotate(f"{other['name']} ended at val_bpb {other['value']:.4f}", (0.01, nats), (0, -3),
                          ("axes fraction", "data"), "offset points", va="top", color="0.3", fontsize=9)
    val = [(point.seconds, point.loss) for point in run.curves["val"]]
    axes.plot(*zip(*val), "o-", color="tab:red", label=f"val, at the end {val[-1][1]:.4f}")
    right.plot(ms / 1e3, rates, ":", color="tab:green")
    right.set(ylabel="LR factor (dotted)", ylim=(0, 1.25 * max(rates) or 1))
    stage = np.searchsorted(starts, np.maximum(steps / last, ms / (ms + 1e3 * eta)), "right")
    changes = [0, *np.flatnonzero(np.diff(stage)) + 1, len(ms) - 1]
    for low, high in zip(changes[1::2], changes[2::2]):     # every second stage
        axes.axvspan(ms[low] / 1e3, ms[high] / 1e3, color="0.5", alpha=0.12)
    score = ", ".join(f"{name} {value:.4f}" for name in ("val_bpb", "val_loss") if (value := run.value(name)))
    axes.set(xlabel="train_time (s)", ylabel="nats per token", yscale="log", xlim=(0, None),
             title=f"{run.config['preset']}: {score}")
    axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=110)


def record_to_beat(runs: list[Run]) -> dict[str, list[Run]]:
    """{name: runs} of the best record of the track that the runs play, on the same text; or {}."""
    texts = {run.facts.get("fingerprint") for run in runs}
    presets = {run.config.get("preset", "") for run in runs}
    if len(presets) > 1 or presets == {""}:
        return {}
    records = records_of(track_of(*presets))
    name = best_before(records, runs[0].facts.get("hardware"))
    same = name != "none" and {run.facts.get("fingerprint") for run in records[name].runs} == texts
    return {f"record {name}": records[name].runs} if same else {}


def plot(args: argparse.Namespace, say: Callable) -> None:
    """Curves of the runs at each path, and in grey those of their track's record. Trials which differ by seed
    alone are one curve."""
    curves = {}
    for path in args.paths:
        name = Path(path).name if Path(path).is_dir() else Path(path).stem
        label = re.sub(r"^(trial_.*)_seed\d+$", r"\1", name)
        curves.setdefault(label or path, []).extend(load_runs([path], say))
    title = " / ".join(curves)
    record = record_to_beat([run for runs in curves.values() for run in runs])
    if any(name.endswith(label) for name in record for label in curves):
        record = {}     # it is drawn already
    draw(record | curves, args.out, title, args.by, record)
    say(f"curves: {args.out}")
