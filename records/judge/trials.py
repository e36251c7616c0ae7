"""Runs side by side: statistics and comparisons.

What is run here is run in turn (A B, B A, A B …), so that a machine whose speed drifts treats all alike.
"""
import argparse
import datetime
import itertools
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from records.judge.logs import (
    Run, demand, demand_no_dead_link, demand_samples, demand_seed, equal_point, identity, load_runs, name_of,
    pick_metric, read_log, read_runs, same_losses, show, why_not_another)
from records.judge.significance import (
    describe, judge, judge_lines, stats_line, test_line, target_test, welch_test)
from records.judge.scores import comparable_curves, demand_comparable, name_of_metric
from records.show.curves import draw
from records.show.labels import telling_names
from records.verify.folders import sha256
from tools.run.surroundings import libraries


# ------------------------------------------------------------ running
def last_line(done: subprocess.CompletedProcess, streams: tuple[str, ...] = ("stderr",)) -> str:
    """What a process said last, on the first of the streams on which it said something."""
    for stream in streams:
        if text := getattr(done, stream).strip():
            return text.splitlines()[-1][:200]
    return "no word"


def run_once(label: str, command: str, run_id: str, seed: int) -> Run:
    """Runs a shell command with SEED and RUN_ID in the environment, and what ./run.sh sets for numpy and
    torch -> Run. Raises Refused when it fails, or if its log says that it was trained with another seed."""
    env = os.environ | libraries(os.environ) | {"SEED": str(seed), "RUN_ID": run_id}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, errors="replace")
    said = last_line(done, ("stderr", "stdout"))
    demand(done.returncode == 0, f"{label}: the command ended with {done.returncode}: {said}")
    log = Path("logs", run_id, "train.log")
    demand(log.exists(), f"{label}: the command left no {log}; it must heed SEED and RUN_ID")
    run = read_log(log, read_runs)
    demand_seed(run, seed, label)
    return run


def run_in_turn(commands: dict[str, str], n: int, say: Callable, seed: int = 1337) -> dict[str, list[Run]]:
    """Runs {label: shell command} n times each, in turn, every second round backwards. Returns
    {label: [Run]}. Raises Refused when a command fails, gives the same run at two seeds, or is scored on
    other tokens than those beside it."""
    demand_no_dead_link(Path("logs"))
    stamp = datetime.datetime.now().strftime("%Y%m%d_%H%M%S_%f")
    total = n * len(commands)
    found = {label: [] for label in commands}
    first = None
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
            first = first or run
            demand_comparable([first, run], metric)
            left = (total - len(times)) * sum(times) / len(times)
            say(f"{len(times)}/{total} {label} seed {seed + i}: {name_of_metric([run], metric)} "
                f"{show(metric, run.value(metric))} eta:{left:.0f}s")
    return found


# ------------------------------------------------------------ comparing
def compare(args: argparse.Namespace, say: Callable) -> dict[str, Any]:
    """Is B better than A?"""
    demand(len(args.paths) == 2, "compare takes A and B: paths (several of a side with commas), or commands "
           "with --run")
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
    mean_times = []
    for letter, runs in (("A", a), ("B", b)):
        s = describe([run.value(metric) for run in runs])
        times = [run.time for run in runs if run.time is not None]
        seconds = f"{describe(times).mean:.4f} s" if times else "no times"
        mean_times += [describe(times).mean] if times else []
        torch, hardware = ("/".join(sorted({str(run.facts.get(key)) for run in runs}))
                           for key in ("torch", "hardware"))
        say(f"{letter}: {name_of_metric(both, metric)} {stats_line(metric, s)}; {seconds}; torch {torch}; "
            f"{hardware}")
    splits = comparable_curves(both)
    for axis, name, unit in (("seconds", "time", "s"), ("tokens", "tokens", "tokens")):
        if point := equal_point(a, b, axis, splits):
            (kind, place), of_a, of_b = point
            test, _ = welch_test(of_a, of_b, "val_loss")
            say(f"at equal {name} ({place:,.0f} {unit}): {kind} A {of_a.mean():.4f}, B {of_b.mean():.4f}, "
                f"{test_line(test)}")
    of_a, of_b = ([run.value(metric) for run in runs] for runs in (a, b))
    out = {"metric": metric, **judge(of_a, of_b, metric)}
    say(*judge_lines(metric, out))
    if len(mean_times) == 2:
        out["time_ratio"] = mean_times[1] / mean_times[0]
        say(f"time ratio: {out['time_ratio']:.4f}")
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


def stats(args: argparse.Namespace, say: Callable) -> dict[str, Any]:
    """n, values, times, mean, std and tests of whatever lies at the paths."""
    runs = load_runs(args.paths, say)
    demand_samples(runs)
    metric = pick_metric(runs, args.metric)
    demand_comparable(runs, metric, say)
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
        comparable = shown == metric
        test = target_test(values, args.target, metric) if comparable else None
        told = test_line(test) if comparable else "no test: a target is not a loss of these tokens"
        out["test"] = test and test._asdict()
        say(f"against {args.target:.10g}: {told}")
    return out
