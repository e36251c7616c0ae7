"""The chart of a section of the page: smoothed curves to hover over and to zoom into, by Bokeh."""
from typing import Any

import numpy as np

from records.judge.runs import Point, Run, batch_means
from records.show.board_rows import Item, Section

MOST_POINTS = 200       # of a curve
PALETTE = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22")
GREY = "#c2c2c2"        # of a record beside runs of one's own
BEST = "#6b6b6b"        # of the best record there
WINDOW = 41             # of MOST_POINTS, over which a curve is a running mean
START = 0.03            # part of a curve that is left out when the losses are scaled


def colors_of(section: Section) -> dict[str, str]:
    """{key of an item: its colour}: records are grey beside runs of one's own."""
    own = dict.fromkeys([item.key for item in section.items if not item.record])
    records = dict.fromkeys([item.key for item in section.items if item.record])
    colored = own or records
    colors = {key: PALETTE[i % len(PALETTE)] for i, key in enumerate(colored)}
    if own:
        colors |= {key: GREY for key in records}
        best = next((item.key for item in section.items if item.record), None)
        colors |= {best: BEST} if best else {}
    return colors


def smoothed(run: Run) -> list[tuple[float, float]]:
    """[(seconds, training loss)], each the mean over a fiftieth of the run or more."""
    points = [point for point in run.curves["train"] if point.seconds > 0]
    return batch_means(points) if points else []


def median_of(runs: list[Run]) -> list[tuple[float, float]]:
    """The smoothed training loss of a run, or of a record: the median of its runs, where all have one."""
    curves = [curve for curve in map(smoothed, runs) if len(curve) > 1]
    if not curves:
        return []
    start = max(curve[0][0] for curve in curves)
    end = min(curve[-1][0] for curve in curves)
    grid = np.linspace(start, end, MOST_POINTS)
    losses = np.median([np.interp(grid, *zip(*curve)) for curve in curves], 0)
    # the lines of a log are of single batches, or of a few
    padded = np.pad(losses, WINDOW // 2, "edge")
    losses = np.convolve(padded, np.ones(WINDOW) / WINDOW, "valid")
    return [*zip(grid.tolist(), losses.tolist())]


def validations(run: Run) -> list[tuple[float, float]]:
    """[(seconds, loss)] during training: on val, else on a part of it."""
    points: list[Point] = run.curves["val"] if len(run.curves["val"]) > 1 else run.curves["part"]
    return [(point.seconds, point.loss) for point in points if point.seconds > 0]


def curves_of(item: Item) -> list[tuple[str, list[tuple[float, float]]]]:
    """[(what it is, [(seconds, loss)])] of an item: of a record the training loss alone."""
    found = [("train", median_of(item.runs))]
    if not item.record:
        found.append(("val", validations(item.runs[0])))
    return [(split, curve) for split, curve in found if len(curve) > 1]


def ends_of(item: Item) -> list[tuple[float, float]]:
    """[(seconds, final val_loss)] of an item: of a record the means."""
    time = item.mean("time")
    loss = item.mean("val_loss")
    return [(time, loss)] if time and loss else []


def loss_range(section: Section) -> tuple[float, float] | None:
    """The losses that the chart shows at first: all but those of the first steps."""
    shown = []
    for item in section.items:
        shown += [loss for _, loss in ends_of(item)]
        for _, curve in curves_of(item):
            end = curve[-1][0]
            shown += [loss for seconds, loss in curve if seconds > START * end]
    return (0.97 * min(shown), 1.03 * max(shown)) if shown else None


def chart_of(section: Section, number: int) -> Any:
    """The figure of a section; its lines are named by the section's number and the item's key."""
    from bokeh.models import BasicTicker, ColumnDataSource, HoverTool, NumeralTickFormatter, Range1d
    from bokeh.plotting import figure
    colors = colors_of(section)
    losses = loss_range(section)
    plot = figure(height=440, sizing_mode="stretch_width", y_axis_type="log", x_axis_label="train_time (s)",
                  y_axis_label="nats per token", tools="pan,wheel_zoom,box_zoom,reset,save",
                  active_scroll="wheel_zoom", active_drag="box_zoom", output_backend="canvas",
                  toolbar_location="above")
    plot.yaxis.ticker = BasicTicker(desired_num_ticks=8)
    plot.yaxis.formatter = NumeralTickFormatter(format="0.0[00]")
    if losses:
        plot.y_range = Range1d(*losses)
    # records first, so that one's own lie above them
    for item in [*[item for item in section.items if item.record],
                 *[item for item in section.items if not item.record]]:
        style = dict(color=colors[item.key], name=f"{number} {item.key}")
        for split, curve in [*curves_of(item), ("final val", ends_of(item))]:
            if not curve:
                continue
            seconds, values = zip(*curve)
            source = ColumnDataSource(dict(seconds=seconds, loss=values, run=[item.name] * len(curve),
                                           split=[split] * len(curve)))
            if split == "final val":
                plot.scatter("seconds", "loss", source=source, size=8, **style)
            else:
                dash = "solid" if split == "train" else "dashed"
                width = 1.6 if item.record else 2.2
                plot.line("seconds", "loss", source=source, line_dash=dash, line_width=width, **style)
    plot.add_tools(HoverTool(tooltips=[
        ("run", "@run"), ("@split", "@loss{0.0000}"), ("seconds", "@seconds{0.0}")]))
    return plot
