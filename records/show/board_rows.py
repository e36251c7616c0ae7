"""What the page of runs shows: runs of one's own and records, in sections whose scores compare."""
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from data import inputs
from records.judge.logs import DATE, Refused, Run, demand, find_logs, read_runs
from records.judge.significance import describe
from records.judge.scores import differences, part_of_val
from records.show.labels import NEVER_TOLD, without_date
from records.verify.folders import read_json, track_of

MOST_SAMPLE = 4000      # characters of a run's samples
UNTOLD = (*NEVER_TOLD, "preset", "device")      # overrides that a note leaves out


class Item(NamedTuple):
    """A row of a table: a run of one's own, or a record with all of its runs."""
    name: str           # tells it from the others
    note: str           # smaller, below it
    key: str            # of its curves; runs of one script and equal constants share it
    record: bool
    folder: Path
    runs: list[Run]     # each with its result.json, if there is one

    @property
    def track(self) -> str:
        """The track of its runs, or for another project's the folder around its own."""
        run = self.runs[0]
        preset = run.result.get("preset") or run.config.get("preset")
        return track_of(preset) if preset else self.folder.parent.name

    @property
    def samples(self) -> str:
        """What the model of its run wrote."""
        path = self.folder / "samples.txt"
        return inputs.read_text(path, "replace")[:MOST_SAMPLE].rstrip() if path.is_file() else ""

    def mean(self, metric: str) -> float | None:
        """The mean of its runs; None where one lacks it."""
        values = [run.exact(metric) for run in self.runs]
        return None if None in values else describe(values).mean


class Section(NamedTuple):
    """Runs and records whose scores compare: one's own first, then records, the best of each first."""
    title: str
    items: list[Item]

    @property
    def runs(self) -> list[Run]:
        return [run for item in self.items for run in item.runs]


# ------------------------------------------------------------ reading
def runs_below(paths: Sequence[Path | str], say: Callable) -> list[Run]:
    """The runs below paths with their result.json, each log once. Raises Refused if there is none."""
    logs = {log.resolve(): log for path in paths for log in find_logs(path)}
    runs = []
    for log in logs.values():
        try:
            found = [run for run in read_runs(log) if run.curves["train"] or run.curves["val"]]
        except Refused as error:
            say(f"left out: {error}")
            continue
        if len(found) == 1:
            name = log.name.replace("train", "result").removesuffix(".log") + ".json"
            with contextlib.suppress(Refused, OSError):
                found[0].result = read_json(log.with_name(name))
        runs += found
    demand(runs, f"no run in {', '.join(str(path) for path in paths)}")
    return runs


def is_record(folder: Path) -> bool:
    """Does a folder hold a record: of ours, or by a date in the name one of another project?"""
    dated = bool(DATE.match(folder.name)) and not (folder / "result.json").exists()
    return (folder / "submission.json").exists() or dated


def record_item(folder: Path, runs: list[Run]) -> Item:
    """A record with its runs."""
    name = without_date(folder.name)
    date = folder.name.removesuffix(name).rstrip("_")
    return Item(name, f"record of {date}" if date else "record", str(folder), True, folder, runs)


def own_item(folder: Path, run: Run, alone: bool) -> Item:
    """A run of one's own, with what was asked for below the name. alone: is it the only one of its folder?"""
    overrides = run.result.get("overrides", {})
    asked = " ".join([f"{name}={pair[-1]}" for name, pair in overrides.items() if name not in UNTOLD])
    name = folder.name if alone else f"{folder.name}/{run.file}"
    # what no result.json tells about is of one kind with nothing else
    script = run.result.get("code_sha256") or name
    return Item(name, asked, f"{script} {asked}", False, folder, [run])


def items_of(runs: list[Run]) -> list[Item]:
    """One's own runs one by one, those of a record together."""
    homes: dict[Path, list[Run]] = {}
    for run in runs:
        homes.setdefault(run.path.absolute().parent, []).append(run)
    items = []
    for folder, found in homes.items():
        if is_record(folder):
            items.append(record_item(folder, found))
        else:
            items += [own_item(folder, run, len(found) == 1) for run in found]
    return items


# ------------------------------------------------------------ sections
def metric_of(runs: list[Run]) -> str:
    """What ranks runs: val_bpb, where all finished ones have it, else val_loss."""
    whole = all(run.value("val_bpb") is not None for run in runs if run.finished)
    return "val_bpb" if whole else "val_loss"


def title_of(item: Item) -> str:
    """`tiny: all 429,103 val tokens of embedded`"""
    run = item.runs[0]
    text = run.result.get("data", {}).get("name") or run.facts.get("data")
    part = part_of_val(run)
    return f"{item.track}: {part} of {text}" if part and text else item.track


def in_order(items: list[Item]) -> list[Item]:
    """One's own runs first, then records, the best of each first and unfinished ones last."""
    metric = metric_of([run for item in items for run in item.runs])

    def place(item: Item) -> tuple:
        value = item.mean(metric)
        return item.record, value is None, value or 0.0

    return sorted(items, key=place)


def sections_of(items: list[Item]) -> list[Section]:
    """The sections, those with runs of one's own first, of these the one with records."""
    groups: list[list[Item]] = []
    for item in items:
        for group in groups:
            runs = [group[0].runs[0], item.runs[0]]
            if group[0].track == item.track and not differences(runs, metric_of(runs)):
                group.append(item)
                break
        else:
            groups.append([item])
    sections = [Section(title_of(group[0]), in_order(group)) for group in groups]
    return sorted(sections, key=lambda section: (section.items[0].record, not section.items[-1].record))
