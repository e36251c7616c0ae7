"""tools/run/show.py FOLDER: the result of a run: samples, loss.png, the last screen.

./run.sh calls it after each successful run. It reads what the run left in its folder: the artifact,
events.jsonl and result.json. If something cannot be shown, a line says why; no result depends on it.
"""
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data import inputs
from records.judge.runs import Refused, Run, batch_means, demand, read_events, run_of_events
from records.judge.scores import partial_line
from records.show.curves import SPLITS
from tools.run import plan
from tools.run.sample import (
    SAMPLES, Settings, brief, find_model, import_script, keep, sample_lines)
from tools.run.watch import in_rows, target_of

SAMPLE_ROWS = 5         # of each sample on a terminal; samples.txt has them all
MOST_CHANGES = 90      # characters of the line in loss.png that names what a run changed
SCHEDULE_POINTS = 2000  # of the curve of the learning rate
CLEAR = "\x1b[K"        # clears what a terminal's line held before


# ------------------------------------------------------------ loss.png
class Steps(NamedTuple):
    """What the schedule gave the steps of a run, each array (n,): at most SCHEDULE_POINTS of them."""
    seconds: np.ndarray     # of training, when the step began
    lr: np.ndarray          # factor on the learning rates
    warmdown: np.ndarray    # bool: does the warmdown lower it?
    stage: np.ndarray       # number of the stage


def schedule_of(run: Run, script: Path) -> Steps:
    """The schedule of a run, computed step by step with the script that trained it: log lines are too few.
    They time some steps; the others are interpolated."""
    module = import_script(script)
    cfg = module.load_config({name.upper(): text for name, text in run.config.items()})
    without = replace(cfg, **{name: 0 for name in ("warmdown_frac", "warmdown_iters") if name in vars(cfg)})
    times = {point.step: point.seconds for split in ("train", "val") for point in run.curves[split]}
    known = sorted(times)
    steps = np.unique(np.linspace(0, max(1, known[-1]) - 1, SCHEDULE_POINTS).astype(int))
    rows = []
    seconds_of = np.interp(steps, known, [times[step] for step in known])
    for step, seconds in zip(steps.tolist(), seconds_of.tolist()):
        progress = cfg.progress(step, seconds)
        lr = cfg.schedule(step, progress).lr
        stage = cfg.stages().index(module.stage_at(cfg, progress))
        rows.append((seconds, lr, lr < without.schedule(step, progress).lr, stage))
    return Steps(*[np.array(column) for column in zip(*rows)])


def draw_schedule(axes: Any, right: Any, steps: Steps, end: float) -> None:
    """The LR factor on an axis of its own, the warmdown as a band, and where stages begin. end: seconds."""
    seconds = np.append(steps.seconds, end)     # the last step is drawn to its end
    right.plot(seconds, np.append(steps.lr, steps.lr[-1]), color="tab:green", linewidth=1.2,
               drawstyle="steps-post", label="LR factor (right axis)")
    right.set(ylabel="LR factor", ylim=(0, 1.15 * max(steps.lr) or 1))
    if steps.warmdown.any():
        axes.axvspan(steps.seconds[steps.warmdown][0], end, color="0.5", alpha=0.14, linewidth=0,
                     label="warmdown")
    for i, at in enumerate(steps.seconds[1:][np.diff(steps.stage) > 0]):
        axes.axvline(at, color="tab:purple", linestyle=(0, (1, 3)), linewidth=1.2,
                     label="" if i else "a stage begins")


def name_of(result: dict[str, Any]) -> str:
    """A run's name in pictures: preset, seed, score."""
    return f"{result['preset']}, seed {result['seed']}: {scores_text(result)}"


def changes_of(result: dict[str, Any]) -> str:
    """The constants that a run changed, as many as fit a line; "" for none."""
    changed = [f"{name}={new}" for name, (_, new) in result["overrides"].items()
               if name not in ("run_id", "seed", "preset", "data_path", "tokenizer_path")]
    shown = []
    while changed and len(", ".join([*shown, changed[0]])) < MOST_CHANGES:
        shown.append(changed.pop(0))
    if not shown:
        return f"constants changed: {len(changed)}" if changed else ""
    return ", ".join(shown) + (f" and {len(changed)} more" if changed else "")


def draw_run(folder: Path, result: dict[str, Any], target: dict[str, Any]) -> None:
    """Draws loss.png of a finished run: train_loss as means of many batches, val_loss, the loss on the part
    of val that is scored during training, the schedule. target: what records/targets.json has for the track;
    in grey are the record's curve and final scores to compare with, as nats per token of this text."""
    from matplotlib.figure import Figure
    run = run_of_events(folder / "train.log", read_events(folder))
    figure = Figure(figsize=(8, 5.2), layout="constrained")
    axes = figure.subplots()
    right = axes.twinx()
    if target.get("curve"):
        axes.plot(*zip(*target["curve"]), color="0.65", linewidth=4,
                  label=f"the record: {SPLITS[target['curve_of']]}, median of runs")
    train = [point for point in run.curves["train"] if point.step > 10]     # before, each is one batch
    axes.plot(*zip(*batch_means(train or run.curves["train"])), color="tab:blue", linewidth=1.2, alpha=0.8,
              label="train, mean of many batches")
    if run.curves["part"]:
        part = [(point.seconds, point.loss) for point in run.curves["part"]]
        axes.plot(*zip(*part), ".-", color="tab:red", linewidth=2, label="a part of val, during training")
    dashes = ["--", "-.", (0, (6, 2, 1, 2, 1, 2))]
    for other in target.get("compare", []):
        if other["metric"] == "val_bpb" and result.get("val_bpb"):
            nats = other["value"] / result["val_bpb"] * result["val_loss"]
            axes.axhline(nats, color="0.3", linestyle=dashes[0], linewidth=1,
                         label=f"{other['name']}: final val_bpb {other['value']:.4f}")
            dashes.append(dashes.pop(0))
    val = [(point.seconds, point.loss) for point in run.curves["val"]]
    axes.plot(*zip(*val), "o-", color="tab:red", markersize=5, label=f"val, trained weights {val[-1][1]:.4f}")
    draw_schedule(axes, right, schedule_of(run, folder / "train_gpt.py"), val[-1][0])
    axes.set(xlabel="train_time (s)", ylabel="nats per token", yscale="log", xlim=(0, None))
    axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.set_zorder(right.get_zorder() + 1)     # the losses before the LR
    axes.patch.set_visible(False)
    axes.set_title(changes_of(result), fontsize=8.5)
    figure.suptitle(name_of(result), fontsize=11)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8.5, frameon=False)     # it hides no curve
    figure.savefig(folder / "loss.png", dpi=110)


# ------------------------------------------------------------ the screen
def size_text(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size:,} bytes"


def scores_text(result: dict[str, Any]) -> str:
    """The scores that count."""
    names = [name for name in ("core", "val_bpb", "val_loss", "val_loss_partial")
             if result.get(name) is not None]
    return ", ".join(f"{name} {result[name]:.4f}" for name in names)


def distance(result: dict[str, Any], other: dict[str, Any]) -> str:
    """How far a result is from one of targets.json, in a line. Where that has `seconds`, the goal is its
    value in fewer of them."""
    goal = f"{other['metric']} {other['value']:.10g}"
    seconds = other.get("seconds")
    what = f"{other['name']}: {f'{seconds} s to ' if seconds else ''}{goal} ({other['about']})"
    mine = result.get(other["metric"])
    if mine is None:
        return what
    gap = (mine - other["value"]) * (1 if other["better"] == "lower" else -1)       # > 0: worse
    unit = ""
    if seconds and gap > 0:
        return f"{gap:.4f} short of {goal}; {what}"
    if seconds:
        gap = result["train_time_ms"] / 1e3 - seconds
        unit = " s"
    return f"{abs(gap):.4f}{unit} {'behind' if gap > 0 else 'ahead of'} {what}"


def baseline_line(folder: Path, result: dict[str, Any]) -> str:
    """How far a run is from the newest other one on the same data that differs in the fewest constants."""
    def changes(other: dict[str, Any]) -> list[str]:
        return [name for name, text in result["config"].items()
                if other["config"].get(name) != text and name not in ("run_id", "seed")]

    found = []
    for path in folder.parent.glob("*/result.json"):
        other = json.loads(inputs.read_text(path))
        same = all(other.get(name) == result.get(name) for name in ("preset", "data"))
        if path.parent != folder and same and other.get("val_loss_partial") is not None:
            found.append((-len(changes(other)), path.stat().st_mtime, path.parent.name, other))
    if not found:
        return "no run to compare with yet: the recipe without changes is its own baseline"
    _, _, name, other = max(found, key=lambda row: row[:2])
    gap = result["val_loss_partial"] - other["val_loss_partial"]
    differ = [f"{name} {other['config'].get(name)}" for name in changes(other)]
    shown = ", ".join(differ[:3]) or "another seed"
    shown += f" and {len(differ) - 3} more" if len(differ) > 3 else ""
    return f"{abs(gap):.4f} {'behind' if gap > 0 else 'ahead of'} logs/{name} ({shown})"


def end_lines(folder: Path, result: dict[str, Any]) -> Iterator[str]:
    """The screen after a run: score, what it compares with, the files, what to try next."""
    yield ""
    if not result["steps"]:
        yield f"{scores_text(result)} of {result['config']['eval_from']}"
        yield f"in {folder}/: train.log, result.json"
        return
    yield (f"{scores_text(result)} after {result['steps']:,} steps, {result['tokens']:,} tokens, "
           f"{result['train_time_ms'] / 1e3:.1f} s ({result['tok_per_s']:,} tok/s)")
    if used := plan.mfu(result):
        yield f"  {used}"
    for other in target_of(result).get("compare", ()):
        yield f"  {distance(result, other)}"
    if result.get("val_loss_partial") is not None:
        yield f"  {baseline_line(folder, result)}"
        yield partial_line([run_of_events(folder / "train.log", read_events(folder))])
    made = [name for name in (SAMPLES, "loss.png") if (folder / name).exists()]
    names = ", ".join(["train.log", "result.json", *made, "train_gpt.py"])
    model = next((path.name for path in sorted(folder.glob("final_model.*.ptz"))), "final_model.pt")
    yield f"in {folder}/: {names}, {model} ({size_text((folder / model).stat().st_size)})"
    if SAMPLES in made:
        yield f'more samples: ./run.sh sample {folder.name} "a prompt" "another one"'
    if os.environ.get("PROXY"):
        size = f"--preset {result['preset']} --proxy {result['config']['model_dim']}"
        yield (f'next: ./run.sh record try "what it is" NAME=value {size} trains the recipe with and without '
               "a change, seed by seed: docs/proxy.md")
    elif result["overrides"].keys() - {"run_id", "seed"}:
        yield "next: better, or luck? ./run.sh record compare trains both several times: docs/first_change.md"
    else:
        yield "next: change a number, say ./run.sh MATRIX_LR=0.02, and compare: docs/first_change.md"


def in_short(lines: Sequence[str]) -> list[str]:
    """Samples as a terminal shows them: the first rows of each."""
    rows = []
    for line in lines:
        rows += in_rows(line, break_words=True)[:SAMPLE_ROWS]
    return rows


def show_run(folder: Path, terminal: bool) -> Iterator[str]:
    """Makes samples.txt and loss.png of a finished run; yields the lines of its end. Raises Refused."""
    path = folder / "result.json"
    demand(path.is_file(), f"{folder} is no run that has ended: it has no result.json")
    result = json.loads(inputs.read_text(path))
    if result["steps"]:
        try:
            model = find_model(str(folder))
            lines = sample_lines(model)
            keep(folder, [f"{model} {Settings().flags()}", *lines], mode="w")
            yield from in_short(lines) if terminal else lines
        except KeyboardInterrupt:
            yield "samples: none (interrupted)"
        except Exception as error:
            why = str(error) if isinstance(error, Refused) else brief(error)
            yield f"samples: none ({why})"
        try:
            draw_run(folder, result, target_of(result))
        except Exception as error:
            yield f"loss.png: not drawn ({brief(error)})"
    yield from end_lines(folder, result)


def main(argv: Sequence[str]) -> int:
    """Shows the run in the folder that is named. Returns the exit code."""
    terminal = sys.stdout.isatty()
    if terminal:
        print("sampling the model", end="\r", flush=True)
    try:
        demand(len(argv) == 1, "show takes the folder of a run that has ended, logs/RUN")
        for line in show_run(Path(argv[0]), terminal):
            rows = [CLEAR + row for row in in_rows(line)] if terminal else [line]
            print(*rows, sep="\n", flush=True)
    except Refused as error:
        print(f"show: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    inputs.steady_output()
    sys.exit(main(sys.argv[1:]))
