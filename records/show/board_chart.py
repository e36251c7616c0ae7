"""The chart of a section of the page: curves to hover over, to zoom into and to hide, by Bokeh."""
from typing import Any

import numpy as np

from records.show.board_rows import Section
from records.show.curves import SPLITS, band_of, split_to_draw, with_curve

PALETTE = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22")
GREY = "#c2c2c2"        # of a record beside runs of one's own
BEST = "#6b6b6b"        # of the best record there


def colors_of(section: Section) -> dict[str, str]:
    """{key of an item: its colour}: records are grey beside runs of one's own."""
    own = dict.fromkeys([item.key for item in section.items if not item.record])
    records = dict.fromkeys([item.key for item in section.items if item.record])
    colors = {key: PALETTE[i % len(PALETTE)] for i, key in enumerate(own or records)}
    greys = {key: GREY if i else BEST for i, key in enumerate(records)}
    return greys | colors


def names_of(section: Section) -> dict[str, str]:
    """{key of an item: what the legend calls it}"""
    names: dict[str, list[str]] = {}
    for item in section.items:
        names.setdefault(item.key, []).append(item.name)
    return {key: some[0] + (f" and {len(some) - 1} more" if some[1:] else "") for key, some in names.items()}


def chart_of(section: Section) -> Any:
    """The figure of a section: of each item the loss over time, the median of its runs, and the final
    val_loss."""
    from bokeh.models import BasicTicker, ColumnDataSource, HoverTool, NumeralTickFormatter, Range1d
    from bokeh.plotting import figure
    from scipy.ndimage import uniform_filter1d
    colors = colors_of(section)
    names = names_of(section)
    split = split_to_draw(section.runs, "seconds")
    plot = figure(height=420 + 12 * len(names), sizing_mode="stretch_width", y_axis_type="log",
                  x_axis_label="train_time (s)", y_axis_label=f"loss on {SPLITS[split]}, nats per token",
                  tools="pan,wheel_zoom,box_zoom,reset,save", active_scroll="wheel_zoom",
                  active_drag="box_zoom", output_backend="canvas", toolbar_location="above")
    plot.yaxis.ticker = BasicTicker(desired_num_ticks=8)
    plot.yaxis.formatter = NumeralTickFormatter(format="0.0[00]")
    losses = []
    # records first, so that one's own lie above them
    for item in sorted(section.items, key=lambda item: not item.record):
        style = dict(color=colors[item.key], legend_label=names[item.key])
        if drawn := with_curve(item.runs, split, "seconds"):
            grid, rows = band_of(drawn, split, "seconds")
            median = uniform_filter1d(np.median(rows, 0), 31, mode="nearest")     # single batches are noisy
            losses += median[len(grid) // 30:].tolist()     # but for the first steps
            source = ColumnDataSource(dict(seconds=grid, loss=median, run=[item.name] * len(grid)))
            plot.line("seconds", "loss", source=source, line_width=1.6 if item.record else 2.2, **style)
        time = item.mean("time")
        loss = item.mean("val_loss")
        if time and loss:
            losses.append(loss)
            source = ColumnDataSource(dict(seconds=[time], loss=[loss], run=[f"{item.name}: final val"]))
            plot.scatter("seconds", "loss", source=source, size=8, **style)
    if losses:
        plot.y_range = Range1d(0.97 * min(losses), 1.03 * max(losses))
        plot.add_layout(plot.legend[0], "below")
        plot.legend.update(ncols=2, click_policy="hide", label_text_font_size="9pt", border_line_width=0,
                           location="top_left")
    plot.add_tools(HoverTool(tooltips=[
        ("run", "@run"), ("loss", "@loss{0.0000}"), ("seconds", "@seconds{0.0}")]))
    return plot
