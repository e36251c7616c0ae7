"""Pictures of curves: `record plot`, those of `record compare`, and a record's loss.png."""
import argparse
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from records.judge.logs import Run, demand, load_runs, make_folder, mean_curve, points_with
from records.judge.scores import differences
from records.show.labels import telling_names, without_date
from records.verify import folders
from records.verify.folders import Folder, track_of

SPLITS = {"train": "train", "val": "val", "part": "a part of val"}
AXES = {"seconds": "train_time (s)", "tokens": "tokens", "step": "steps"}
MARKERS = "os^dv"


def split_to_draw(runs: list[Run], axis: str) -> str:
    """Of which split a picture shows curves: val or a part of it, if all runs have at least four points."""
    for split in ("val", "part"):
        if axis != "tokens" and all(len(run.curves[split]) > 3 for run in runs):
            return split
    return "train"


def ends_of(runs: list[Run], axis: str) -> list[tuple[float, float]]:
    """[(place on the axis, final val_loss)] of the runs that tell both."""
    found = []
    for run in runs:
        ends = {"tokens": int(run.summary.get("tokens", 0)) or None, "seconds": run.time, "step": run.steps}
        loss = run.value("val_loss")
        if ends[axis] is not None and loss is not None:
            found.append((ends[axis], loss))
    return found


def scale_losses(axes: Any, losses: list[float], axis: str, title: str) -> None:
    """The frame around curves with these losses. Raises Refused where there are none."""
    demand(losses, "there are no curves to draw")
    axes.set(xlabel=AXES[axis], ylabel="nats per token", title=title, yscale="log",
             ylim=(0.98 * min(losses), 1.02 * max(losses)), xlim=(0, None))
    axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
    axes.grid(alpha=0.3, which="both")


def with_curve(runs: list[Run], split: str, axis: str) -> list[Run]:
    """The runs that have a curve of a split over an axis."""
    return [run for run in runs if len(points_with(run, split, axis)) > 1]


def band_of(runs: list[Run], split: str, axis: str,
            start: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(places on an axis, losses (run, place)) of runs with a curve, from where all of them have begun, or
    from start, to where the first one ends."""
    points = [points_with(run, split, axis) for run in runs]
    if start is None:
        start = max(getattr(of_run[0], axis) for of_run in points)
    end = min(getattr(of_run[-1], axis) for of_run in points)
    grid = np.linspace(max(start, 0.02 * end), end, 400)
    return grid, mean_curve(runs, split, axis, grid)


def draw_runs(axes: Any, runs: list[Run], split: str, axis: str, number: int, color: str, name: str,
              end: str = "", start: float | None = None) -> list[float]:
    """Draws the median of runs, a band from the lowest to the highest, and the final val_loss of each.
    number: of the runs in the picture. end: how the legend calls the final ones. Returns losses that the
    frame must hold."""
    losses = []
    if drawn := with_curve(runs, split, axis):
        grid, rows = band_of(drawn, split, axis, start)
        axes.fill_between(grid, rows.min(0), rows.max(0), color=color, alpha=0.2, linewidth=0)
        count = f"{len(drawn)} runs" if len(drawn) > 1 else "one run"
        axes.plot(grid, np.median(rows, 0), color=color, linewidth=1.4, label=f"{name}{count}")
        losses += [rows.min(), rows.max()]
    if ends := ends_of(runs, axis):
        axes.plot(*zip(*ends), MARKERS[number % 5], color=color, markersize=4, label=end)
        losses += [loss for _, loss in ends]
    return losses


def draw_record(curves: dict[str, list[Run]], path: Path | str, title: str) -> None:
    """{label: [Run]} -> loss.png of a record. `record check` draws it again and compares the pixels: whoever
    changes it makes every record that there is fail."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    losses = []
    split = split_to_draw([run for runs in curves.values() for run in runs], "seconds")
    for i, (label, runs) in enumerate(curves.items()):
        losses += draw_runs(axes, runs, split, "seconds", i, f"C{i}", f"{label}: {SPLITS[split]}, ",
                            f"{label}: final val", 0)
    scale_losses(axes, losses, "seconds", title)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})


# ------------------------------------------------------------ plot and compare
def picture(curves: dict[str, list[Run]], title: str, by: str = "seconds",
            grey: dict[str, list[Run]] | tuple = ()) -> Any:
    """{label: [Run]} -> the figure of loss over training seconds, tokens or steps, its legend below it. grey:
    labels of records."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 4.6 + 0.1 * len(curves)), layout="constrained")
    axes = figure.subplots()
    losses = []
    split = split_to_draw([run for runs in curves.values() for run in runs], by)
    for i, (label, runs) in enumerate(curves.items()):
        color = "0.5" if label in grey else f"C{i - len(grey)}"
        losses += draw_runs(axes, runs, split, by, i, color, f"{label}, ")
    scale_losses(axes, losses, by, title)
    told = "line: median of runs; band: lowest to highest; dots: final val"
    axes.set_ylabel(f"loss on {SPLITS[split]}, nats per token\n({told})", fontsize=9)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def draw(curves: dict[str, list[Run]], path: Path | str, title: str, by: str = "seconds",
         grey: dict[str, list[Run]] | tuple = ()) -> None:
    """That figure, written to path."""
    make_folder(Path(path).parent)
    picture(curves, title, by, grey).savefig(path, dpi=110)


def newest_record(preset: str) -> Folder | None:
    """The newest record of a preset's track; each is better than those before it."""
    found = sorted(folders.HOME.glob(f"track_{track_of(preset)}/[!.]*/submission.json"))
    return Folder(found[-1].parent) if found else None


def record_to_beat(runs: list[Run]) -> dict[str, list[Run]]:
    """{name: runs} of the newest record of the track that the runs play, if their losses compare; or {}."""
    presets = {run.config.get("preset", "") for run in runs}
    record = newest_record(*presets) if len(presets) == 1 else None
    if not record or differences([*runs, *record.runs], "val_loss"):
        return {}
    return {f"record {without_date(record.path.name)}": record.runs}


def plot(args: argparse.Namespace, say: Callable) -> None:
    """Curves of the runs at each path, and in grey those of their track's record. Trials which differ by seed
    alone are one curve."""
    found = {}
    for path in args.paths:
        name = Path(path).name if Path(path).is_dir() else Path(path).stem
        label = re.sub(r"^(trial_.*)_seed\d+$", r"\1", name)
        found.setdefault(label or path, []).extend(load_runs([path], say))
    runs = [run for of_path in found.values() for run in of_path]
    apart = "; ".join(differences(runs, "val_loss"))
    if apart:
        say(f"warning: these losses are not of the same tokens, scored alike: {apart}")
    record = record_to_beat(runs)
    names = telling_names(found)
    curves = {names[label]: of_path for label, of_path in found.items()}
    title = textwrap.shorten(", ".join(curves), 80, placeholder=" …")
    draw(record | curves, args.out, title, args.by, record)
    say(f"curves: {args.out}")
