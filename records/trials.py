"""Runs side by side: statistics, comparisons, sweeps, ablations, noise, curves.

What is run here is run in turn (A B, B A, A B …), so that a machine whose speed drifts treats all alike.
"""
import datetime
import itertools
import os
import shlex
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np

from folders import ROOT, best_before, config_of, open_run, records_of, sha256
from runs import (
    HIGHER, cautious_std, demand, describe, detectable, equal_point, judge, judge_lines, load_runs,
    mean_curve, pick_metric, read_log, show, stats_line, test_line, test_target, test_welch)


# ------------------------------------------------------------ running
def trials(commands, n, say, seed=1337):
    """Runs {label: shell command} n times each, in turn, every second round backwards, with SEED and RUN_ID
    in the environment. Returns {label: [Run]}. Raises Refused when a command fails."""
    stamp, total = datetime.datetime.now().strftime("%Y%m%d_%H%M%S_%f"), n * len(commands)
    found, times = {label: [] for label in commands}, []
    for i in range(n):
        for k, label in list(enumerate(commands))[::1 if i % 2 == 0 else -1]:
            run_id = f"trial_{stamp}_{k}_seed{seed + i}"
            env, began = os.environ | {"SEED": str(seed + i), "RUN_ID": run_id}, time.monotonic()
            done = subprocess.run(["bash", "-c", commands[label]], env=env, capture_output=True, text=True,
                                  errors="replace")
            last = (done.stderr.strip() or done.stdout.strip() or "no word").splitlines()[-1]
            demand(done.returncode == 0, f"{label}: the command ended with {done.returncode}: {last[:200]}")
            log = Path("logs", run_id, "train.log")
            demand(log.exists(), f"{label}: the command left no {log}; it must heed SEED and RUN_ID")
            run = read_log(log)
            found[label].append(run)
            times.append(time.monotonic() - began)
            metric, left = pick_metric([run]), (total - len(times)) * sum(times) / len(times)
            say(f"{len(times)}/{total} {label} seed {seed + i}: {metric} {show(metric, run.value(metric))} "
                f"eta:{left:.0f}s")
    return found


def training_command(settings, script=ROOT / "train_gpt.py"):
    """A shell command that trains with {name: value} as flags; the trainer refuses one it does not know."""
    words = [sys.executable, str(script), *(f"--{name.lower().replace('_', '-')}={value}"
                                            for name, value in settings.items())]
    return shlex.join(words)


def dry_run(command):
    """Refuses a setting that the trainer refuses, before anything is trained."""
    done = subprocess.run(["bash", "-c", command + " --dry-run"], capture_output=True, text=True,
                          errors="replace")
    last = (done.stderr.strip() or "no word").splitlines()[-1]
    demand(done.returncode == 0, f"{command}: {last[:200]}")


def parse_settings(words):
    """NAME=a,b,c … -> [{NAME: value}], the product of all. / separates values that hold commas."""
    axes = []
    for word in words:
        name, given, values = word.partition("=")
        demand(given and name and values, f"{word!r} is no NAME=value,value")
        axes.append([(name, value) for value in values.split("/" if "/" in values else ",")])
    return [dict(choice) for choice in itertools.product(*axes)]


def sweep(args, say):
    """Each setting against the first of them."""
    settings = parse_settings(args.settings)
    demand(len(settings) > 1 and args.n > 1, "a sweep needs two settings (NAME=a,b) and -n 2 at least")
    commands = {}
    for setting in settings:
        pairs = [f"{name.upper()}={value}" for name, value in setting.items()]
        own = f"export {shlex.join(pairs)}; {args.command}" if args.command else training_command(setting)
        commands[" ".join(pairs)] = own
        if not args.command:
            dry_run(own)
    return report_many(trials(commands, args.n, say, args.seed), say)


def report_many(found, say):
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
        good = difference > 0 if metric in HIGHER else difference < 0
        verdict = "cannot tell" if not p < 0.05 else "better" if good else "worse"
        say(f"{label}: {stats_line(metric, describe(side))}; difference {difference:+.6f} (95 %, for all at "
            f"once: {low:+.6f} to {high:+.6f}) p={p:.4f}: {verdict}")
    return {"metric": metric, "values": values, "p": [float(p) for p in test.pvalue]}


def without_derived(own):
    """Overrides {name: text} without those that follow from the others: of a depth's constants the depth."""
    sys.path.insert(0, str(ROOT))
    import train_gpt
    for name in [name for name in own if name not in ("depth", "preset")] if int(own.get("depth", 0)) else ():
        rest = {key: text for key, text in own.items() if key != name}
        cfg = train_gpt.load_config({key.upper(): text for key, text in rest.items()})
        own = rest if train_gpt.show(getattr(cfg, name)) == own[name] else own
    return own


def ablate(args, say):
    """The run's settings against the same with one changed constant reverted to the record before."""
    run, result = open_run(args.run)
    earlier = records_of(result["preset"])
    before = args.before or best_before(earlier, result["hardware"])
    demand(before in earlier, f"track {result['preset']} has no record before, or none named {before}")
    demand(args.n > 1, "an ablation needs -n 2 at least")
    then, now = config_of(earlier[before].result(earlier[before].runs[0])), config_of(result)
    say(*[f"left alone: {before} has no constant {name}" for name in now if name not in then])
    changed = [name for name in now if name in then and now[name] != then[name]]
    demand(changed, f"no constant of {result['run_id']} differs from {before}")
    own = {name: new for name, (_, new) in result["overrides"].items() if name not in ("seed", "run_id")}
    script, asked = run.path.parent / "train_gpt.py", without_derived(own | {"preset": result["preset"]})
    changed = [name for name in changed if name in asked or name not in own]
    own = asked
    commands = {"as it is": training_command(own, script)}
    for name in changed:
        label = f"{name}={then[name]} (not {now[name]})"
        commands[label] = training_command(own | {name: then[name]}, script)
    return report_many(trials(commands, args.n, say, args.seed), say)


def noise(args, say):
    """The spread of K runs of a preset, or of runs that are there, and what n runs a side can detect."""
    if Path(args.preset).exists():
        runs = load_runs([args.preset], say)
    else:
        demand(args.n > 1, "the spread needs -n 2 at least")
        command = training_command({"preset": args.preset})
        dry_run(command)
        runs, = trials({args.preset: command}, args.n, say, args.seed).values()
    metric = pick_metric(runs, args.metric)
    s = describe([run.value(metric) for run in runs])
    demand(s.std is not None, "the spread needs two runs or more")
    found = {n: detectable(cautious_std(s.std, s.n - 1), n) for n in (3, 5, 8, 10, 20)}
    say(f"{metric}: {stats_line(metric, s)}")
    say(*[f"{n} runs a side find a difference of {size:.6f} nine times in ten" for n, size in found.items()])
    return {"metric": metric, **s._asdict(), "detectable": found}


def compare(args, say):
    """Is B better than A?"""
    demand(len(args.paths) == 2, "compare takes A and B: paths (several of a side with commas), or commands "
           "with --run")
    if args.across:
        return compare_across(args, say)
    if args.run:
        demand(args.n > 1, "a comparison needs -n 2 at least")
        labels = {f"{letter}: {command}": command for letter, command in zip("AB", args.paths)}
        a, b = trials(labels, args.n, say, args.seed).values()
    else:
        a, b = (load_runs(side.split(","), say) for side in args.paths)
    metric = pick_metric([*a, *b], args.metric)
    values = [[run.value(metric) for run in runs] for runs in (a, b)]
    for letter, runs, side in zip("AB", (a, b), values):
        where = ["/".join(sorted({str(run.said.get(key)) for run in runs})) for key in ("torch", "hardware")]
        seconds = describe([run.time for run in runs if run.time is not None]).mean
        say(f"{letter}: {metric} {stats_line(metric, describe(side))}; {seconds:.4f} s; torch {where[0]}; "
            f"{where[1]}")
    for key in ("torch", "hardware"):
        kinds = {str(run.said.get(key)) for run in (*a, *b)}
        if len(kinds) > 1:
            say(f"warning: not the same {key}: {', '.join(sorted(kinds))}")
    for axis, name, unit in ((1, "time", "s"), (3, "tokens", "tokens")):
        if point := equal_point(a, b, axis):
            (kind, place), first, second = point
            found = test_welch(first, second, "val_loss")
            say(f"at equal {name} ({place:,.0f} {unit}): {kind} A {first.mean():.4f}, B {second.mean():.4f}, "
                f"{test_line(found and found[0])}")
    out = {"metric": metric, **judge(*values, metric)}
    say(*judge_lines(metric, out))
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    draw({"A": a, "B": b}, args.out, "A against B")
    say(f"curves: {args.out}")
    return out


def compare_across(args, say):
    """Is B better than A at every value of a setting, say of depth? A change that holds at one size only may
    be luck, or hurt at the size that counts."""
    demand(args.run and args.n > 1, "--across needs --run, and -n 2 at least")
    settings = [" ".join(f"{name.upper()}={value}" for name, value in one.items())
                for one in parse_settings([args.across])]
    commands = {f"{letter} {setting}": f"export {shlex.join(setting.split(' '))}; {command}"
                for setting in settings for letter, command in zip("AB", args.paths)}
    found, out = trials(commands, args.n, say, args.seed), []
    metric = pick_metric([run for runs in found.values() for run in runs], args.metric)
    for setting in settings:
        a, b = ([run.value(metric) for run in found[f"{letter} {setting}"]] for letter in "AB")
        out.append({"setting": setting, "metric": metric, **judge(a, b, metric)})
        say(f"{setting}: A {stats_line(metric, describe(a))}; B {stats_line(metric, describe(b))}")
        say(*[f"  {line}" for line in judge_lines(metric, out[-1])])
    good = [one["difference"] * (1 if metric in HIGHER else -1) > 0 for one in out]
    sure = [one["verdict"] for one in out].count("better")
    say(f"B is ahead at {sum(good)} of {len(good)} settings, for sure at {sure}: "
        + ("holds across them" if sure == len(out) else "leans the same way at all" if all(good)
           else "does not hold across them"))
    return {"metric": metric, "settings": out}


def stats(args, say):
    """n, values, times, mean, std and tests of whatever lies at the paths."""
    runs = load_runs(args.paths, say)
    metric = pick_metric(runs, args.metric)
    values, times = [run.value(metric) for run in runs], [run.time for run in runs if run.time is not None]
    for run in runs:
        say(f"{run.path.parent.name}/{run.file}: {metric} {show(metric, run.value(metric))} "
            f"time {show('time', run.time)}")
    scripts = {sha256(run.source.strip().encode()) for run in runs if run.source}
    if len(scripts) > 1:
        say(f"warning: these logs begin with {len(scripts)} different scripts")
    s, clock = describe(values), describe(times) if times else None
    out = {"metric": metric, **s._asdict(), "values": values, "times": times,
           "time": clock and clock._asdict()}
    say(f"{metric}: {stats_line(metric, s)}", "time: " + (f"{stats_line('time', clock)} s" if clock else "-"))
    if args.target is not None:
        test = test_target(values, args.target, metric)
        out["test"] = test and test._asdict()
        say(f"against {args.target:.10g}: {test_line(test)}")
    if args.baseline:
        others = load_runs([args.baseline], say)
        base = [run.value(pick_metric(others, metric)) for run in others]
        base_times = [run.time for run in others if run.time is not None]
        found, difference = test_welch(base, values, metric), s.mean - describe(base).mean
        ratio = clock.mean / describe(base_times).mean if clock and base_times else None
        out |= {"baseline": describe(base)._asdict(), "welch": found and found[0]._asdict(),
                "difference": difference, "interval": found and found[1], "time_ratio": ratio}
        span = f" (95 %: {found[1][0]:+.6f} to {found[1][1]:+.6f})" if found else ""
        say(f"baseline: {metric} {stats_line(metric, describe(base))}",
            f"Welch: {test_line(found and found[0])}; difference {difference:+.6f}{span}",
            f"time ratio: {show('', ratio)}")
    return out


# ------------------------------------------------------------ curves
def draw(curves, path, title, by="seconds"):
    """{label: [Run]} -> a picture of loss over training seconds or tokens: means, single runs thin."""
    axis, unit = (3, "tokens") if by == "tokens" else (1, "train_time (s)")
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    seen = []
    for i, (label, runs) in enumerate(curves.items()):
        split = "train" if axis == 3 or any(len(run.curves["val"]) < 4 for run in runs) else "val"
        drawn = [run for run in runs if len([p for p in run.curves[split] if p[axis] is not None]) > 1]
        if drawn:
            end = min(run.curves[split][-1][axis] for run in drawn)
            grid = np.linspace(0.02 * end, end, 400)
            rows = mean_curve(drawn, split, axis, grid)
            axes.plot(grid, rows.T, color=f"C{i}", alpha=0.2, linewidth=0.7)
            axes.plot(grid, rows.mean(0), color=f"C{i}", linewidth=1.4,
                      label=f"{label}: {split}, {len(drawn)} runs")
            seen += [rows.min(), np.median(rows)]
        ends = [int(run.table.get("tokens", 0)) or None if by == "tokens" else run.time for run in runs]
        points = [(end, run.value("val_loss")) for end, run in zip(ends, runs)]
        points = [point for point in points if None not in point]
        if points:
            axes.plot(*zip(*points), "os^dv"[i % 5], color=f"C{i}", markersize=4, label=f"{label}: final val")
            seen += [loss for _, loss in points]
    demand(seen, "there are no curves to draw")
    low, high = min(seen), max(seen)
    axes.set(xlabel=unit, ylabel="nats per token", title=title,
             ylim=(low - 0.1 * (high - low) - 0.01, high + 0.6 * (high - low) + 0.05))
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def plot(args, say):
    curves = {}
    for path in args.paths:
        runs = load_runs([path], say)
        curves[Path(path).stem or path] = runs
    draw(curves, args.out, " / ".join(curves), args.by)
    say(f"curves: {args.out}")
