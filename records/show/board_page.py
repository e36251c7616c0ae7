"""One HTML page of a tree of runs and records: ./run.sh board --html [PATH…] --out board.html.

A sortable table, loss curves to hover over and to zoom into (Bokeh, whose script the page contains), the
constants that differ, samples, links to the files. It needs no server and no network.
"""
import html
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from judge.runs import Point, Refused, Run, demand, find_logs, log_text, points_with, read_runs, show
from verify.folders import read_json

MOST_POINTS = 200       # of a curve
MOST_SAMPLE = 4000      # characters of a run's samples
LIMIT = 4_000_000       # bytes of the page
PALETTE = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22",
           "#17becf")
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1400px; padding: 0 1em;
       color: #1a1a1a; background: #fff; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25em .7em; border-bottom: 1px solid #ddd; text-align: left; white-space: nowrap; }
td.n { text-align: right; } th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid #1f77b4; } th button::after { content: " \\2195"; color: #999; }
pre { background: #f5f5f5; padding: .8em; overflow-x: auto; } .dot { font-size: 1.3em; line-height: 0; }
"""
# A click on the head of a column sorts by it, another one turns it round; cells without a value come last
SORT = """
for (const button of document.querySelectorAll("th button")) button.onclick = () => {
  const head = button.parentElement, table = head.closest("table"), rows = [...table.tBodies[0].rows];
  const down = head.ariaSort === "ascending";
  for (const other of table.querySelectorAll("th")) other.ariaSort = "none";
  head.ariaSort = down ? "descending" : "ascending";
  const value = row => row.cells[head.cellIndex].dataset.value ?? "";
  rows.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (!x || !y) return !x - !y;
    const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
    return down ? -order : order;
  });
  table.tBodies[0].append(...rows);
};
"""


class Row(NamedTuple):
    """A run as the page shows it."""
    name: str           # its folder, and its log where the folder holds several
    group: str          # runs that share a colour: a record's, or those of equal script and constants
    run: Run
    result: dict        # result.json; {} where there is none
    folder: Path
    samples: str


def result_beside(log: Path) -> dict[str, Any]:
    """The result.json of a log of ours, or {}."""
    name = log.name.replace("train", "result").removesuffix(".log") + ".json"
    try:
        return read_json(log.with_name(name))
    except (Refused, OSError):
        return {}


def samples_of(log: Path) -> str:
    """What the run wrote at its end, from its first sample to the summary."""
    text = log_text(log).rpartition("=" * 100 + "\n")[2]
    found = re.search(r"^sample 1: (?s:.*?)(?=^ +train_time_ms  |\Z)", text, re.M)
    return found[0][:MOST_SAMPLE].rstrip() if found else ""


def rows_of(paths: Sequence[Path | str], say: Callable) -> list[Row]:
    """The runs below paths, each log once. Raises Refused if there is none."""
    rows = []
    seen = set()
    for path in paths:
        for log in find_logs(path):
            if log.resolve() in seen:
                continue
            seen.add(log.resolve())
            try:
                found = [run for run in read_runs(log) if run.curves["train"] or run.curves["val"]]
            except Refused as error:
                say(f"left out: {error}")
                continue
            result = result_beside(log) if len(found) == 1 else {}
            home = log.parent
            is_record = (log.parent / "submission.json").exists()
            alone = log.name == "train.log" and not is_record
            words = [result.get("preset", "")]
            words += [f"{key}={pair[-1]}" for key, pair in result.get("overrides", {}).items()
                      if key not in ("seed", "run_id")]
            words.append(f"script {result.get('code_sha256', '')[:6]}")
            group = home.name if is_record or not result else " ".join(words)
            for run in found:
                name = home.name if alone and len(found) == 1 else f"{home.name}/{run.file}"
                rows.append(Row(name, group, run, result, home, samples_of(log)))
    demand(rows, f"no run in {', '.join(str(path) for path in paths)}")
    return rows


# ------------------------------------------------------------ parts of the page
def cell(value: Any, text: str | None = None) -> str:
    """A cell of a sortable table; text: already HTML."""
    number = isinstance(value, int | float)
    shown = text if text is not None else html.escape("" if value is None else str(value))
    key = "" if value is None else f' data-value="{html.escape(str(value))}"'
    return f"<td{' class=n' if number else ''}{key}>{shown}</td>"


def table(heads: list[str], rows: list[list[str]]) -> str:
    """HTML of a table whose columns sort. rows: lists of cells."""
    top = "".join(f"<th><button>{html.escape(head)}</button></th>" for head in heads)
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class=wide><table><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def links(row: Row, home: Path) -> str:
    """Links to the files of a run, relative to the page's folder."""
    names = [row.run.path.name, "result.json", "train_gpt.py", "loss.png", "README.md"]
    found = [name for name in names if (row.folder / name).exists()]
    return " ".join(f'<a href="{quote(os.path.relpath(row.folder / name, home))}">{html.escape(name)}</a>'
                    for name in found)


def main_table(rows: list[Row], colors: dict[str, str], home: Path) -> str:
    """A row a run: scores, counts, links."""
    heads = ["run", "preset", "val_bpb", "val_loss", "core", "seconds", "steps", "tokens", "bytes", "seed",
             "text", "hardware", "files"]
    made = []
    for row in rows:
        run = row.run
        result = row.result
        scores = [(value, show(metric, value)) if value is not None else (None, "") for metric, value in
                  ((metric, run.value(metric)) for metric in ("val_bpb", "val_loss", "core", "time"))]
        counts = [(value, f"{value:,}" if value is not None else "") for value in
                  (run.steps, result.get("tokens"), result.get("bytes_total"))]
        dot = f'<span class=dot style="color:{colors[row.group]}">●</span> '
        state = "" if run.finished else " (not finished)"
        made.append([
            cell(row.name, dot + html.escape(row.name + state)),
            cell(result.get("preset") or run.config.get("preset")),
            *(cell(*pair) for pair in scores + counts), cell(run.seed if run.seed >= 0 else None),
            cell(result.get("data", {}).get("name")), cell(run.facts.get("hardware")),
            cell("", links(row, home))])
    return table(heads, made)


def constants_table(rows: list[Row], colors: dict[str, str]) -> str:
    """The constants in which the runs differ, but for seed and name."""
    configs = [row.result.get("config") or row.run.config for row in rows]
    names = sorted({name for config in configs for name in config} - {"seed", "run_id"})
    differ = [name for name in names if len({config[name] for config in configs if name in config}) > 1]
    if not differ:
        return "<p>All runs have the same constants.</p>"
    made = [[cell(row.name, f'<span class=dot style="color:{colors[row.group]}">●</span> '
                  + html.escape(row.name)), *(cell(config.get(name)) for name in differ)]
            for row, config in zip(rows, configs)]
    return table(["run", *differ], made)


def samples_part(rows: list[Row]) -> str:
    parts = []
    for row in rows:
        if row.samples:
            name = html.escape(row.name)
            text = html.escape(row.samples)
            parts.append(f"<details><summary>{name}</summary><pre>{text}</pre></details>")
    return "\n".join(parts) or "<p>No run wrote samples.</p>"


def thinned(points: list[Point]) -> list[Point]:
    """At most MOST_POINTS of a curve, the first and the last among them."""
    places = np.unique(np.linspace(0, len(points) - 1, min(len(points), MOST_POINTS)).round().astype(int))
    return [points[i] for i in places]


def curves_part(rows: list[Row], colors: dict[str, str]) -> tuple[str, str]:
    """(script and HTML of the curves, the library's script)"""
    from bokeh.embed import components
    from bokeh.models import ColumnDataSource, HoverTool, Legend, LegendItem
    from bokeh.plotting import figure
    from bokeh.resources import Resources
    plot = figure(height=560, sizing_mode="stretch_width", y_axis_type="log", x_axis_label="train_time (s)",
                  y_axis_label="nats per token", tools="pan,wheel_zoom,box_zoom,reset,save",
                  active_scroll="wheel_zoom", active_drag="box_zoom", output_backend="canvas")
    drawn = {}
    for row in rows:
        for split, dash in (("train", "solid"), ("val", "dashed")):
            points = thinned(points_with(row.run, split, "seconds"))
            if not points:
                continue
            source = ColumnDataSource(dict(
                seconds=[point.seconds for point in points], loss=[point.smooth for point in points],
                step=[point.step for point in points], run=[row.name] * len(points),
                split=[split] * len(points)))
            style = dict(color=colors[row.group], alpha=0.8)
            parts = [plot.line("seconds", "loss", source=source, line_dash=dash, line_width=1.6, **style)]
            if split == "val":
                parts.append(plot.scatter("seconds", "loss", source=source, size=6, **style))
            drawn.setdefault(row.group, []).extend(parts)
    plot.add_tools(HoverTool(tooltips=[
        ("run", "@run"), ("step", "@step{0,0}"), ("@split", "@loss{0.0000}"), ("seconds", "@seconds{0.0}")]))
    names = {group: group if len(group) < 60 else group[:57] + "..." for group in drawn}
    plot.add_layout(Legend(items=[LegendItem(label=names[group], renderers=parts)
                                  for group, parts in drawn.items()][:30], click_policy="hide"), "below")
    script, div = components(plot)
    return script + div, Resources(mode="inline", components=["bokeh"]).render()


def write_page(paths: Sequence[Path | str], out: Path | str, say: Callable) -> None:
    """The page of all runs below paths -> out. Raises Refused."""
    try:
        import bokeh  # noqa: F401
    except ImportError:
        raise Refused("board --html needs bokeh: pip install -r requirements.txt") from None
    out = Path(out)
    rows = rows_of(paths, say)
    rows.sort(key=lambda row: (row.run.value("val_bpb") or 99, row.run.value("val_loss") or 99))
    groups = dict.fromkeys(row.group for row in rows)
    colors = {group: PALETTE[i % len(PALETTE)] for i, group in enumerate(groups)}
    curves, library = curves_part(rows, colors)
    home = out.resolve().parent
    text = f"""<!DOCTYPE html>
<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width">
<title>{len(rows)} runs</title><style>{STYLE}</style>
{library}
</head><body>
<h1>{len(rows)} runs</h1>
{main_table(rows, colors, home)}
<h2>Loss</h2>
<p>Solid: train, dashed: val. The wheel zooms, a drawn box too; a click in the legend hides.</p>
{curves}
<h2>Constants that differ</h2>
{constants_table(rows, colors)}
<h2>Samples</h2>
{samples_part(rows)}
<script>{SORT}</script>
</body></html>
"""
    size = len(text.encode())
    demand(size <= LIMIT, f"the page would have {size / 1e6:.1f} MB, more than {LIMIT / 1e6:.0f}: give fewer "
           "runs, say a folder of them")
    out.write_text(text, encoding="utf-8")
    say(f"wrote {out}: {len(rows)} runs, {size / 1e6:.1f} MB; open it in a browser")
