"""One HTML page of a tree of runs and records: ./run.sh board --html [PATH…] --out board.html.

A chart to hover over and to zoom into (Bokeh, whose script the page contains), a sortable table in which a
record is one row that opens, the constants that differ, samples, links to the files: for each track, and for
scores that do not compare one below the other. It needs no server and no network, and fits a phone.
"""
import html
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from records.judge.runs import Refused, demand, make_folder, show
from records.judge.significance import describe
from records.judge.scores import name_of_metric, partial_line
from records.show.board_chart import chart_of, colors_of
from records.show.board_rows import Item, Row, Section, group_name, rows_of_paths, samples_of, sections_of
from records.show.board_style import SCRIPT, STYLE
from records.show.labels import constants_of, differing

LIMIT = 4_000_000       # bytes of the page
MOST_COLUMNS = 5        # runs of one's own whose constants are listed
FILES = {"result.json": "result", "train_gpt.py": "script", "loss.png": "picture", "README.md": "page"}
SCORES = ("val_bpb", "val_loss", "core", "time")


def dot(color: str) -> str:
    return f'<span class=dot style="background:{color}"></span>'


def cell(head: str, value: Any, text: str | None = None) -> str:
    """A cell of a sortable table. head: its column's, which a phone shows beside it; text: already HTML."""
    number = isinstance(value, int | float)
    shown = text if text is not None else html.escape("" if value is None else str(value))
    key = "" if value is None else f' data-value="{html.escape(str(value))}"'
    kind = " class=n" if number else ""
    return f'<td{kind}{key} data-label="{html.escape(head)}"><span>{shown}</span></td>'


def links(row: Row, home: Path) -> str:
    """Links to the files of a run, relative to the page's folder."""
    found = {row.run.path.name: "log"} | FILES
    return " ".join([f'<a href="{quote(os.path.relpath(row.folder / name, home))}">{text}</a>'
                     for name, text in found.items() if (row.folder / name).exists()])


# ------------------------------------------------------------ the table
class Columns(NamedTuple):
    """What a section's table shows."""
    numbers: dict[str, str]     # {head: its name}, of which a run has one
    words: list[str]            # that differ between runs
    same: str                   # a sentence of those that do not


def number_of(row: Row, name: str) -> float | None:
    """A run's number in a column."""
    if name in SCORES:
        return row.run.exact(name)
    return row.run.steps or None if name == "steps" else row.run.result.get(name)


def words_of(row: Row) -> dict[str, Any]:
    """The columns of a row that hold words."""
    return {"preset": row.run.result.get("preset") or row.run.config.get("preset"),
            "hardware": row.run.facts.get("hardware"), "torch": row.run.facts.get("torch")}


def columns_of(section: Section) -> Columns:
    """The columns in which the rows of a section have something, or differ."""
    rows = [row for item in section.items for row in item.rows]
    heads = {"val_bpb": "val_bpb", name_of_metric(section.runs, "val_loss"): "val_loss", "core": "core",
             "seconds": "time", "steps": "steps", "tokens": "tokens", "bytes": "bytes_total"}
    heads = {head: name for head, name in heads.items()
             if any(number_of(row, name) is not None for row in rows)}
    told = [words_of(row) for row in rows]
    differ = [name for name in told[0] if len({words[name] for words in told}) > 1]
    same = [f"{name} {value}" for name, value in told[0].items() if name not in differ and value]
    return Columns(heads, differ, "; ".join(same))


def number_cell(head: str, rows: list[Row], name: str) -> str:
    """The mean over runs; of a score of several runs the deviation, too."""
    values = [number_of(row, name) for row in rows]
    if None in values:
        return cell(head, None)
    s = describe(values)
    text = show(name, s.mean) if name in SCORES else f"{s.mean:,.0f}"
    if s.std is not None and name in ("val_bpb", "val_loss", "core"):
        text += f" <small>± {s.std:.4f}</small>"
    return cell(head, s.mean, text)


def table_row(name: str, rows: list[Row], first: str, columns: Columns, home: Path, seed: str) -> str:
    """The cells of a run, or of a record with all of its runs. first: HTML of the first cell."""
    cells = [cell("run", name, first)]
    cells += [number_cell(head, rows, number) for head, number in columns.numbers.items()]
    cells.append(cell("seed", seed))
    for word in columns.words:
        cells.append(cell(word, "/".join(sorted({str(words_of(row)[word]) for row in rows}))))
    cells.append(cell("files", "", links(rows[0], home)))
    return "".join(cells)


def item_body(item: Item, color: str, columns: Columns, home: Path) -> str:
    """The part of the table that an item has: a row, and those of a record's runs, hidden at first."""
    several = len(item.rows) > 1
    state = "" if item.rows[0].run.finished else " (not finished)"
    note = html.escape(item.note)
    if several:
        note += f" <button class=open aria-expanded=false>{len(item.rows)} runs</button>"
    name = f"{dot(color)}<b>{html.escape(item.name + state)}</b><small>{note}</small>"
    seeds = [str(row.run.seed) if row.run.seed >= 0 else "" for row in item.rows]
    told = f"n={len(item.rows)}" if several else seeds[0]
    lines = [f"<tr>{table_row(item.name, item.rows, name, columns, home, told)}</tr>"]
    for row, seed in zip(item.rows if several else [], seeds):
        own = f"<small>{html.escape(row.run.file)}</small>"
        lines.append(f"<tr class=part hidden>{table_row(item.name, [row], own, columns, home, seed)}</tr>")
    return f"<tbody class={'record' if item.record else 'own'}>{''.join(lines)}</tbody>"


def table_of(section: Section, home: Path) -> str:
    """The table of a section, and what is the same in all of its rows."""
    columns = columns_of(section)
    colors = colors_of(section)
    names = ["run", *columns.numbers, "seed", *columns.words, "files"]
    top = "".join([f"<th><button>{html.escape(name)}</button></th>" for name in names])
    bodies = "\n".join([item_body(item, colors[item.key], columns, home) for item in section.items])
    told = f"<p class=same>The same in all rows: {html.escape(columns.same)}.</p>" if columns.same else ""
    return f"<table class=runs><thead><tr>{top}</tr></thead>\n{bodies}\n</table>\n{told}"


# ------------------------------------------------------------ the other parts
def legend_of(section: Section, number: int) -> str:
    """Buttons that hide and show the curves of each kind of run."""
    colors = colors_of(section)
    names: dict[str, list[str]] = {}
    for item in section.items:
        names.setdefault(item.key, []).append(item.name)
    shown = [f'<button data-curve="{html.escape(f"{number} {key}")}" aria-pressed=true>{dot(colors[key])}'
             f"{html.escape(group_name(some))}</button>" for key, some in names.items()]
    return f"<div class=legend>{''.join(shown)}</div>"


def constants_part(section: Section) -> str:
    """A table of the constants in which one's own runs and the best record differ; without runs of one's own
    those of the records."""
    own: dict[str, list[Item]] = {}
    for item in section.items:
        if not item.record:
            own.setdefault(item.key, []).append(item)
    records = [item for item in section.items if item.record]
    items = [some[0] for some in own.values()][:MOST_COLUMNS]
    items += records[:1] if own else records[:MOST_COLUMNS]
    names_above = [group_name([other.name for other in own.get(item.key, [item])]) for item in items]
    configs = [item.runs[0].result.get("config") or constants_of(item.runs[0]) for item in items]
    names = [name for name in differing(configs) if name not in ("seed", "run_id")]
    if not names:
        return ""
    heads = "".join([f"<th>{html.escape(name)}</th>" for name in names_above])
    rows = []
    for name in names:
        cells = [cell(head, config.get(name)) for head, config in zip(names_above, configs)]
        rows.append(f"<tr><th>{html.escape(name)}</th>{''.join(cells)}</tr>")
    return (f"<details><summary>{len(names)} constants that differ</summary>\n<table class=constants>"
            f"<thead><tr><th>constant</th>{heads}</tr></thead>\n"
            f"<tbody>{''.join(rows)}</tbody></table></details>")


def samples_part(sections: list[Section]) -> str:
    """What the models wrote: each run of one's own, and the first run of each record."""
    parts = []
    for item in [item for section in sections for item in section.items]:
        if told := samples_of(item.rows[0]):
            names = dict.fromkeys([item.name, item.rows[0].name])       # of one's own run the same
            name = html.escape(", ".join(names))
            parts.append(f"<details><summary>{name}</summary><pre>{html.escape(told)}</pre></details>")
    return "\n".join(["<h2>Samples</h2>", *parts]) if parts else ""


def section_part(section: Section, number: int, chart: str, home: Path) -> str:
    """HTML of a section."""
    partial = ""
    if any(run.partial for run in section.runs):
        partial = f"<p>{html.escape(partial_line(section.runs))}.</p>"
    return f"""<section>
<h2>{html.escape(section.title)}</h2>
{partial}{legend_of(section, number)}
{chart}
<p class=same>Solid: train loss, smoothed. Dashed: val during training. Dots: final val. Grey: records, the
median of their runs. Scroll or drag a box to zoom; click the legend to hide.</p>
{table_of(section, home)}
{constants_part(section)}
</section>"""


def summary_of(sections: list[Section]) -> str:
    """How much there is."""
    kinds = Counter("record" if item.record else "run" for section in sections for item in section.items)
    counts = [f"{kinds[word]} {word}{'s' * (kinds[word] != 1)}" for word in ("run", "record") if kinds[word]]
    text = " and ".join(counts)
    if len(sections) > 1:
        text += f" in {len(sections)} parts: only scores of the same tokens of the same text compare"
    return text


def write_page(paths: Sequence[Path | str], out: Path | str, say: Callable) -> None:
    """The page of all runs below paths -> out. Raises Refused."""
    try:
        from bokeh.embed import components
        from bokeh.resources import Resources
    except ImportError:
        raise Refused("board --html needs bokeh: pip install -r requirements.txt") from None
    out = Path(out)
    rows = rows_of_paths(paths, say)
    sections = sections_of(rows)
    script, charts = components([chart_of(section, i) for i, section in enumerate(sections)])
    library = Resources(mode="inline", components=["bokeh"]).render()
    home = Path(os.path.abspath(out)).parent       # as people call it, also where that is a link
    parts = [section_part(section, i, chart, home)
             for i, (section, chart) in enumerate(zip(sections, charts))]
    text = f"""<!DOCTYPE html>
<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width, initial-scale=1">
<title>train_gpt: runs and records</title><style>{STYLE}</style>
{library}
</head><body>
<h1>train_gpt: runs and records</h1>
<p>{html.escape(summary_of(sections))}</p>
{"".join(parts)}
{samples_part(sections)}
{script}
<script>{SCRIPT}</script>
</body></html>
"""
    size = len(text.encode())
    demand(size <= LIMIT, f"the page would have {size / 1e6:.1f} MB, more than {LIMIT / 1e6:.0f}: give fewer "
           "runs, say a folder of them")
    make_folder(out.parent)
    out.write_text(text, encoding="utf-8")
    say(f"wrote {out}: {len(rows)} runs, {size / 1e6:.1f} MB; open it in a browser")
