"""What the page of runs shows: runs of one's own and records, in sections whose scores compare."""
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data import inputs
from records.judge.runs import DATE, Refused, Run, demand, find_logs, read_runs
from records.judge.significance import describe
from records.judge.scores import differences, part_of_val
from records.show.labels import NEVER_TOLD, without_date
from records.verify.folders import read_json, track_of

MOST_SAMPLE = 4000      # characters of a run's samples
UNTOLD = (*NEVER_TOLD, "preset", "device")      # overrides that a name leaves out


class Row(NamedTuple):
    """A run as the page shows it."""
    name: str           # its folder, and its log where the folder holds several
    run: Run            # with its result.json, if there is one
    record: bool

    @property
    def folder(self) -> Path:
        return self.run.path.absolute().parent


class Item(NamedTuple):
    """A row of a table: a run of one's own, or a record with all of its runs."""
    name: str           # tells it from the others
    note: str           # smaller, below it
    key: str            # of its curves; runs of one script and equal constants share it
    rows: list[Row]

    @property
    def record(self) -> bool:
        return self.rows[0].record

    @property
    def runs(self) -> list[Run]:
        return [row.run for row in self.rows]

    def mean(self, metric: str) -> float | None:
        """The mean of its runs; None where one lacks it."""
        values = [row.run.exact(metric) for row in self.rows]
        return None if None in values else describe(values).mean


class Section(NamedTuple):
    """Runs and records whose scores compare: one's own first, then records, the best of each first."""
    title: str
    items: list[Item]

    @property
    def runs(self) -> list[Run]:
        return [run for item in self.items for run in item.runs]


# ------------------------------------------------------------ reading
def result_beside(log: Path) -> dict[str, Any]:
    """The result.json of a log of ours, or {}."""
    name = log.name.replace("train", "result").removesuffix(".log") + ".json"
    try:
        return read_json(log.with_name(name))
    except (Refused, OSError):
        return {}


def samples_of(row: Row) -> str:
    """What the run's model wrote."""
    path = row.folder / "samples.txt"
    return inputs.read_text(path, "replace")[:MOST_SAMPLE].rstrip() if path.is_file() else ""


def is_record(folder: Path) -> bool:
    """Does a folder hold a record: of ours, or by a date in the name one of another project?"""
    dated = bool(DATE.match(folder.name)) and not (folder / "result.json").exists()
    return (folder / "submission.json").exists() or dated


def rows_of_paths(paths: Sequence[Path | str], say: Callable) -> list[Row]:
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
            record = is_record(log.absolute().parent)
            alone = log.name == "train.log" and not record and len(found) == 1
            for run in found:
                run.result = result_beside(log) if len(found) == 1 else {}
                name = log.absolute().parent.name
                rows.append(Row(name if alone else f"{name}/{run.file}", run, record))
    demand(rows, f"no run in {', '.join(str(path) for path in paths)}")
    return rows


# ------------------------------------------------------------ names
def own_items(rows: list[Row]) -> list[Item]:
    """Items of one's own runs, with what was asked for below the name."""
    scripts = [row.run.result.get("code_sha256", "")[:6] for row in rows]
    items = []
    for row, script in zip(rows, scripts):
        overrides = row.run.result.get("overrides", {})
        asked = " ".join([f"{name}={pair[-1]}" for name, pair in overrides.items() if name not in UNTOLD])
        # what no result.json tells about is of one kind with nothing else
        key = " ".join([track_name(row), script or row.name, asked])
        told = f" script {script}" if len({*scripts}) > 1 else ""
        items.append(Item(row.name, (asked + told).strip(), key, [row]))
    return items


def group_name(names: list[str]) -> str:
    """How the legend calls runs of one kind."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def record_items(rows: list[Row]) -> list[Item]:
    """Items of records, one for each folder."""
    homes: dict[Path, list[Row]] = {}
    for row in rows:
        homes.setdefault(row.folder, []).append(row)
    items = []
    for home, of_record in homes.items():
        name = without_date(home.name)
        date = home.name.removesuffix(name).rstrip("_")
        items.append(Item(name, f"record{' of ' * bool(date)}{date}", str(home), of_record))
    return items


# ------------------------------------------------------------ sections
def track_name(row: Row) -> str:
    """The track of a run, or for another project's the folder around its own."""
    preset = row.run.result.get("preset") or row.run.config.get("preset")
    return track_of(preset) if preset else row.folder.parent.name


def metric_of(runs: list[Run]) -> str:
    """What ranks runs: val_bpb, where all finished ones have it, else val_loss."""
    whole = all(run.value("val_bpb") is not None for run in runs if run.finished)
    return "val_bpb" if whole else "val_loss"


def title_of(items: list[Item]) -> str:
    """`tiny: all 429,103 val tokens of embedded`"""
    row = items[0].rows[0]
    text = row.run.result.get("data", {}).get("name") or row.run.facts.get("data")
    part = part_of_val(row.run)
    told = f"{part} of {text}" if part and text else part
    return f"{track_name(row)}: {told}" if told else track_name(row)


def in_order(items: list[Item], metric: str) -> list[Item]:
    """One's own runs first, then records, the best of each first and unfinished ones last."""
    def place(item: Item) -> tuple:
        value = item.mean(metric)
        return item.record, value is None, value or 0.0

    return sorted(items, key=place)


def sections_of(rows: list[Row]) -> list[Section]:
    """The sections, those with runs of one's own first."""
    groups: list[list[Row]] = []
    for row in rows:
        for group in groups:
            runs = [group[0].run, row.run]
            if track_name(group[0]) == track_name(row) and not differences(runs, metric_of(runs)):
                group.append(row)
                break
        else:
            groups.append([row])
    sections = []
    for group in groups:
        items = own_items([row for row in group if not row.record])
        items += record_items([row for row in group if row.record])
        metric = metric_of([row.run for row in group])
        sections.append(Section(title_of(items), in_order(items, metric)))
    # those with runs of one's own first, of these the one with records
    return sorted(sections, key=lambda section: (section.items[0].record, not section.items[-1].record))
