"""Runs side by side: statistics, comparisons, sweeps, ablations, noise.

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

from records.judge.runs import (
    Run, cautious_std, demand, demand_no_dead_link, demand_samples, demand_seed, describe, detectable,
    equal_point, identity, is_better, judge, judge_lines, load_runs, name_of, only, p_term, pick_metric,
    read_runs, same_losses, show, stats_line, test_line, test_target, test_welch, why_not_another)
from records.judge.scores import SCORING, comparable_curves, demand_comparable, name_of_metric
from records.show.curves import draw
from records.show.names import telling_names
from records.verify.folders import ROOT, best_before, open_run, records_of, sha256, shared_config, track_of


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


def run_in_turn(commands: dict[str, str], n: int, say: Callable, seed: int = 1337,
                together: Callable[[str], str] = lambda label: "") -> dict[str, list[Run]]:
    """Runs {label: shell command} n times each, in turn, every second round backwards. Returns
    {label: [Run]}. together(): which labels are compared, those for which it is equal. Raises Refused when a
    command fails, gives the same run at two seeds, or is scored on other tokens than those beside it."""
    demand_no_dead_link(Path("logs"))
    stamp = datetime.datetime.now().strftime("%Y%m%d_%H%M%S_%f")
    total = n * len(commands)
    found = {label: [] for label in commands}
    first = {}
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
            demand_comparable([first.setdefault(together(label), run), run], metric)
            left = (total - len(times)) * sum(times) / len(times)
            say(f"{len(times)}/{total} {label} seed {seed + i}: {name_of_metric([run], metric)} "
                f"{show(metric, run.value(metric))} eta:{left:.0f}s")
    return found


def flags_of(settings: dict[str, Any]) -> list[str]:
    """{name: value} as flags of the trainer."""
    return [f"--{name.lower().replace('_', '-')}={value}" for name, value in settings.items()]


def training_command(settings: dict[str, Any], script: Path = ROOT / "train_gpt.py") -> str:
    """A shell command that trains with {name: value} as flags; the trainer refuses one it does not know."""
    return shlex.join([sys.executable, str(script), *flags_of(settings)])


def demand_settings(settings: dict[str, Any]) -> None:
    """Refuses a setting that preflight or the trainer refuses, before anything is trained."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-m", "tools.run.preflight", "--dry-run", *flags_of(settings)],
                          env=env, capture_output=True, text=True, errors="replace")
    demand(done.returncode == 0, last_line(done))


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
            demand_settings(setting)
            command = training_command(setting)
        commands[" ".join(pairs)] = command
    return report_many(run_in_turn(commands, args.n, say, args.seed), say)


def report_many(found: dict[str, list[Run]], say: Callable) -> dict[str, Any]:
    """A line a setting: mean, std, difference from the first of them; intervals and p by Dunnett's test,
    which holds for all of them at once."""
    from scipy import stats
    everything = [run for runs in found.values() for run in runs]
    metric = pick_metric(everything)
    demand_comparable(everything, metric, say)
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
    for name in [name for name in changed if name in SCORING]:
        say(f"left alone: {name} decides what is scored")
        changed.remove(name)
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
    if os.path.lexists(args.preset):
        runs = load_runs([args.preset], say)
        demand_samples(runs)
    else:
        demand(args.n > 1, "the spread needs -n 2 at least")
        settings = {"preset": args.preset}
        demand_settings(settings)
        command = training_command(settings)
        runs = run_in_turn({args.preset: command}, args.n, say, args.seed)[args.preset]
    metric = pick_metric(runs, args.metric)
    demand_comparable(runs, metric, say)
    s = describe([run.value(metric) for run in runs])
    demand(s.std is not None, "the spread needs two runs or more")
    found = {n: detectable(cautious_std(s.std, s.n - 1), n) for n in (3, 5, 8, 10, 20)}
    say(f"{name_of_metric(runs, metric)}: {stats_line(metric, s)}")
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
    both = [*a, *b]
    metric = pick_metric(both, args.metric)
    demand_comparable(both, metric, say)
    for letter, runs in (("A", a), ("B", b)):
        s = describe([run.value(metric) for run in runs])
        times = [run.time for run in runs if run.time is not None]
        seconds = f"{describe(times).mean:.4f} s" if times else "no times"
        say(f"{letter}: {name_of_metric(both, metric)} {stats_line(metric, s)}; {seconds}; "
            f"torch {kinds('torch', runs)}; {kinds('hardware', runs)}")
    splits = comparable_curves(both)
    for axis, name, unit in (("seconds", "time", "s"), ("tokens", "tokens", "tokens")):
        if point := equal_point(a, b, axis, splits):
            (kind, place), of_a, of_b = point
            test, _ = test_welch(of_a, of_b, "val_loss")
            say(f"at equal {name} ({place:,.0f} {unit}): {kind} A {of_a.mean():.4f}, B {of_b.mean():.4f}, "
                f"{test_line(test)}")
    of_a, of_b = ([run.value(metric) for run in runs] for runs in (a, b))
    out = {"metric": metric, **judge(of_a, of_b, metric)}
    say(*judge_lines(metric, out))
    draw(sides_by_name(a, b), args.out, "A against B")
    say(f"curves: {args.out}")
    return out


def sides_by_name(a: list[Run], b: list[Run]) -> dict[str, list[Run]]:
    """The two sides as a picture calls them: `A, gelu`."""
    folders = [re.sub(r"_seed\d+$", "", runs[0].path.resolve().parent.name) for runs in (a, b)]
    if folders[0] == folders[1]:
        return {"A": a, "B": b}
    names = telling_names(dict(zip(folders, (a, b))))
    return {f"{letter}, {name}": runs for letter, name, runs in zip("AB", names.values(), (a, b))}


def demand_sides(a: list[Run], b: list[Run]) -> None:
    """Refuses a seed that counts twice on a side, and a run that is on both."""
    for side in (a, b):
        demand_samples(side)
    of_a = {identity(run): run for run in a}
    for run in b:
        demand(identity(run) not in of_a, f"{name_of(run)} is on both sides: leave it out of one of them")


def kinds(key: str, runs: list[Run]) -> str:
    """The torch builds or the hardware of runs, each once."""
    return "/".join(sorted({str(run.facts.get(key)) for run in runs}))


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
    found = run_in_turn(commands, args.n, say, args.seed, lambda label: label.partition(" ")[2])
    out = []
    metric = pick_metric([run for runs in found.values() for run in runs], args.metric)
    for setting in settings:
        sides = [found[f"{letter} {setting}"] for letter in "AB"]
        demand_comparable([*sides[0], *sides[1]], metric, say)
        a, b = ([run.value(metric) for run in runs] for runs in sides)
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
    baseline = load_runs([args.baseline], say) if args.baseline else []
    demand_sides(baseline, runs)
    metric = pick_metric(runs, args.metric)
    pick_metric(baseline, metric)
    demand_comparable([*runs, *baseline], metric, say)
    shown = name_of_metric(runs, metric)
    values = [run.value(metric) for run in runs]
    times = [run.time for run in runs if run.time is not None]
    for run in runs:
        say(f"{run.path.parent.name}/{run.file}: {shown} {show(metric, run.value(metric))} "
            f"time {show('time', run.time)}")
    scripts = {sha256(run.source.strip().encode()) for run in runs if run.source}
    if len(scripts) > 1:
        say(f"warning: these logs begin with {len(scripts)} different scripts")
    s = describe(values)
    clock = describe(times) if times else None
    out = {"metric": metric, **s._asdict(), "values": values, "times": times,
           "time": clock and clock._asdict()}
    say(f"{shown}: {stats_line(metric, s)}", f"time: {stats_line('time', clock)} s" if clock else "time: -")
    if args.target is not None:
        test = None
        told = "no test: a target is not a loss of these tokens"
        if shown == metric:
            test = test_target(values, args.target, metric)
            told = test_line(test)
        out["test"] = test and test._asdict()
        say(f"against {args.target:.10g}: {told}")
    if baseline:
        out |= against_baseline(baseline, metric, values, times, say)
    return out


def against_baseline(baseline: list[Run], metric: str, values: list[float], times: list[float],
                     say: Callable) -> dict[str, Any]:
    """Welch's test and the ratio of times of the baseline's runs and others."""
    old = [run.value(metric) for run in baseline]
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
