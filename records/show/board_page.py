"""One HTML page of a tree of runs and records: ./run.sh board --html [PATH…] --out board.html.

A chart to hover over and to zoom into (Bokeh, whose script the page contains), a sortable table in which a
record is one row that opens, the constants that differ, samples, links to the files: for each track, and for
scores that do not compare one below the other. It needs no server and no network, and fits a phone.
"""
import html
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from records.judge.logs import Run, make_folder, show
from records.judge.significance import describe
from records.judge.scores import name_of_metric, partial_line
from records.show.board_chart import chart_of, colors_of
from records.show.board_rows import Item, Section, items_of, runs_below, sections_of
from records.show.board_style import SCRIPT, STYLE

FILES = {"result.json": "result", "train_gpt.py": "script", "loss.png": "picture", "README.md": "page"}
WORDS = ("preset", "hardware", "torch", "script")       # columns where runs differ in them


def cell(head: str, value: Any, text: str | None = None) -> str:
    """A cell of a sortable table. head: its column's, which a phone shows beside it; text: already HTML."""
    number = isinstance(value, int | float)
    shown = text if text is not None else html.escape("" if value is None else str(value))
    key = "" if value is None else f' data-value="{html.escape(str(value))}"'
    kind = " class=n" if number else ""
    return f'<td{kind}{key} data-label="{html.escape(head)}"><span>{shown}</span></td>'


def links(item: Item, home: Path) -> str:
    """Links to the files of an item's first run, relative to the page's folder."""
    found = {item.runs[0].path.name: "log"} | FILES
    return " ".join([f'<a href="{quote(os.path.relpath(item.folder / name, home))}">{text}</a>'
                     for name, text in found.items() if (item.folder / name).exists()])


# ------------------------------------------------------------ the table
def facts_of(run: Run) -> dict[str, Any]:
    """{head of a column: what a run has there, or None}"""
    result = run.result
    return {
        "val_bpb": run.exact("val_bpb"), name_of_metric([run], "val_loss"): run.exact("val_loss"),
        "core": run.exact("core"), "seconds": run.exact("time"), "steps": run.steps or None,
        "tokens": result.get("tokens"), "bytes": result.get("bytes_total"),
        "preset": result.get("preset") or run.config.get("preset"), "hardware": run.facts.get("hardware"),
        "torch": run.facts.get("torch"), "script": result.get("code_sha256", "")[:6] or None}


def columns_of(section: Section) -> list[str]:
    """The columns in which the runs of a section have a number, or differ in a word."""
    columns = []
    facts = [facts_of(run) for run in section.runs]
    for head in dict.fromkeys([head for fact in facts for head in fact]):
        values = {fact.get(head) for fact in facts} - {None}
        if len(values) > 1 or values and head not in WORDS:
            columns.append(head)
    return columns


def fact_cell(head: str, runs: list[Run]) -> str:
    """What runs have in a column: the mean and the deviation of numbers, all of the words."""
    values = [facts_of(run).get(head) for run in runs]
    if None in values:
        return cell(head, None)
    if head in WORDS:
        return cell(head, "/".join(sorted({*values})))
    s = describe(values)
    if not any(isinstance(value, float) for value in values):
        return cell(head, s.mean, f"{s.mean:,.0f}")
    spread = "" if s.std is None else f" <small>± {s.std:.4f}</small>"
    return cell(head, s.mean, show(head, s.mean) + spread)


def table_row(first: str, item: Item, columns: list[str], home: Path) -> str:
    """The cells of a run, or of a record with all of its runs. first: HTML of the first cell."""
    seed = f"n={len(item.runs)}"
    if len(item.runs) == 1:
        seed = str(item.runs[0].seed) if item.runs[0].seed >= 0 else ""
    cells = [cell("run", item.name, first), *[fact_cell(head, item.runs) for head in columns],
             cell("seed", seed), cell("files", "", links(item, home))]
    return "".join(cells)


def item_body(item: Item, color: str, columns: list[str], home: Path) -> str:
    """The part of the table that an item has: a row, and those of a record's runs, hidden at first."""
    state = "" if item.runs[0].finished else " (not finished)"
    note = html.escape(item.note)
    parts = item.runs if len(item.runs) > 1 else []
    if parts:
        note += f" <button class=open aria-expanded=false>{len(parts)} runs</button>"
    dot = f'<span class=dot style="background:{color}"></span>'
    name = f"{dot}<b>{html.escape(item.name + state)}</b><small>{note}</small>"
    lines = [f"<tr>{table_row(name, item, columns, home)}</tr>"]
    for run in parts:
        own = f"<small>{html.escape(run.file)}</small>"
        lines.append(f"<tr class=part hidden>{table_row(own, item._replace(runs=[run]), columns, home)}</tr>")
    return f"<tbody class={'record' if item.record else 'own'}>{''.join(lines)}</tbody>"


def table_of(section: Section, home: Path) -> str:
    """The table of a section."""
    columns = columns_of(section)
    colors = colors_of(section)
    top = "".join([f"<th><button>{html.escape(name)}</button></th>"
                   for name in ["run", *columns, "seed", "files"]])
    bodies = "\n".join([item_body(item, colors[item.key], columns, home) for item in section.items])
    return f"<table class=runs><thead><tr>{top}</tr></thead>\n{bodies}\n</table>"


# ------------------------------------------------------------ the other parts
def samples_part(items: list[Item]) -> str:
    """What the models of runs wrote."""
    parts = [f"<details><summary>{html.escape(item.name)}</summary><pre>{html.escape(item.samples)}</pre>"
             "</details>" for item in items if item.samples]
    return "\n".join(["<h2>Samples</h2>", *parts]) if parts else ""


def section_part(section: Section, chart: str, home: Path) -> str:
    """HTML of a section."""
    partial = ""
    if any(run.partial for run in section.runs):
        partial = f"<p>{html.escape(partial_line(section.runs))}.</p>"
    return f"""<section>
<h2>{html.escape(section.title)}</h2>
{partial}{chart}
<p class=same>Dots: final val. Grey: records, the median of their runs. Scroll or drag a box to zoom; click
the legend to hide.</p>
{table_of(section, home)}
</section>"""


def write_page(paths: Sequence[Path | str], out: Path | str, say: Callable) -> None:
    """The page of all runs below paths -> out. Raises Refused."""
    from bokeh.embed import components
    from bokeh.resources import Resources
    out = Path(out)
    runs = runs_below(paths, say)
    items = items_of(runs)
    sections = sections_of(items)
    script, charts = components([chart_of(section) for section in sections])
    home = Path(os.path.abspath(out)).parent       # as people call it, also where that is a link
    records = sum(item.record for item in items)
    text = f"""<!DOCTYPE html>
<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width, initial-scale=1">
<title>train_gpt: runs and records</title><style>{STYLE}</style>
{Resources(mode="inline", components=["bokeh"]).render()}
</head><body>
<h1>train_gpt: runs and records</h1>
<p>Runs: {len(items) - records}. Records: {records}. Scores of the same tokens of the same text are together:
others do not compare.</p>
{"".join([section_part(section, chart, home) for section, chart in zip(sections, charts)])}
{samples_part([item for section in sections for item in section.items])}
{script}
<script>{SCRIPT}</script>
</body></html>
"""
    make_folder(out.parent)
    out.write_text(text, encoding="utf-8")
    say(f"wrote {out}: {len(runs)} runs, {len(text.encode()) / 1e6:.1f} MB; open it in a browser")
