"""What the README of a foreign record claims, recomputed from its own lists and from the logs beside it.

Each function yields one sentence a claim that does not hold, with both values.
"""
import hashlib
import re
from typing import NamedTuple

from runs import describe, show, test_target


def groups(runs):
    """Runs that share a script, the largest group first."""
    found = {}
    for run in runs:
        found.setdefault(hashlib.sha256((run.source or "").strip().encode()).digest(), []).append(run)
    return sorted(found.values(), key=len, reverse=True)


def decimals(text):
    return len(text.partition(".")[2])


def means(text, value):
    """Does a printed number mean value, at its own digits? torch prints fp32, hence the half and a little."""
    return value is not None and abs(float(text) - value) <= 0.51 * 10.0 ** -decimals(text)


class PageList(NamedTuple):
    """A Python list of numbers on a page."""
    name: str
    numbers: list       # as printed
    end: int            # where it ends


def page_lists(readme):
    """The lists of a page, in order."""
    found = re.finditer(r"^\s*(\w+)\s*=\s*\[([\d.,\s]+)\]", readme, re.M)
    return [PageList(m[1], re.findall(r"\d+(?:\.\d+)?", m[2]), m.end()) for m in found]


# ------------------------------------------------------------ lists of losses and times
class Row(NamedTuple):
    """A run as a page lists it, numbers as printed."""
    loss: str
    time: str | None    # None: the page lists no times

    def fits(self, run, units):
        """(does the loss fit, does the time fit); units: of the page's times in a second."""
        loss = means(self.loss, run.value("val_loss"))
        if self.time is None:
            return loss, loss
        return loss, means(self.time, run.time and run.time * units)


def list_findings(readme, runs):
    """Lists of losses and times on the page, against the logs of the script that they tell of."""
    lists = [*page_lists(readme), PageList("", [], 0)]
    for losses, times in zip(lists, lists[1:]):
        paired = times.name.lower().startswith("time") and len(times.numbers) == len(losses.numbers)
        if len(losses.numbers) < 2 or not (paired or losses.name.lower().startswith("loss")):
            continue
        units = 1
        rows = [Row(loss, None) for loss in losses.numbers]
        if paired:
            rows = [Row(*numbers) for numbers in zip(losses.numbers, times.numbers)]
            if min(float(time) for time in times.numbers) > 20_000:
                units = 1000        # milliseconds
        yield from row_findings(losses, rows, units, runs)


def row_findings(losses, rows, units, runs):
    """The rows of one list, each against a run of its own."""
    def hits(group):
        return len([row for row in rows if any(any(row.fits(run, units)) for run in group)])

    pool = max(groups(runs), key=hits, default=[])
    if hits(pool) * 2 < len(rows):
        yield f"README: no script's logs hold most of {losses.name} = [{', '.join(losses.numbers[:3])}, …]"
        return
    left = [run for run in pool if run.finished]
    listed = len(rows)
    for enough in (all, any):       # first the rows that fit in both numbers, then those that fit in one
        for row in list(rows):
            run = next((run for run in left if enough(row.fits(run, units))), None)
            if run is None:
                continue
            rows.remove(row)
            left.remove(run)
            loss_fits, time_fits = row.fits(run, units)
            there = f"{show('val_loss', run.value('val_loss'))} in {run.time or 0:.3f} s in {run.file}"
            if not loss_fits:
                yield f"README: {row.loss} on the page (time {row.time}), {there}"
            elif not time_fits:
                yield f"README: time {row.time} on the page (loss {row.loss}), {there}"
    for row in rows:
        yield f"README: {row.loss} is in no log"
    for i, run in enumerate(left, listed + 1):
        yield (f"README: the page lists {listed} runs, finished run {i} of the same script is not "
               f"there: {run.file}, {show('val_loss', run.value('val_loss'))} in {run.time or 0:.3f} s")


# ------------------------------------------------------------ statistics
def claim_findings(readme, runs):
    """Means, deviations and tests that the page prints, from its own lists or, if it has none, the logs."""
    lists = page_lists(readme)
    for i, one in enumerate(lists):
        end = next((other.end for other in lists[i + 1:] if other.name == one.name), len(readme))
        values = [float(number) for number in one.numbers]
        if len(values) > 1:
            yield from printed_findings(one.name, values, readme[one.end:end])
    values = [run.value("val_bpb") for run in runs if run.finished and run.value("val_bpb")]
    if len(values) > 1:
        yield from mean_findings(readme, runs, values)
        yield from test_findings(readme, values)


def printed_findings(name, values, part):
    """What a part of the page prints of the list `name`: torch's deviation and mean, scipy's p."""
    s = describe(values)
    said = re.search(r"std_mean\(torch\.tensor\(" + name + r"\).*\n#[^\n]*?(?:std=|tensor\()([\d.]+)\)?, "
                     r"(?:mean=|tensor\()([\d.]+)", part)
    if said:
        for label, text, value in (("std", said[1], s.std), ("mean", said[2], s.mean)):
            text = text.rstrip(".")
            if not means(text, value):
                digits = max(4, decimals(text) - 1)
                yield f"README: {label} {text} on the page, its {name} give {value:.{digits}f}"
    said = re.search(r"ttest_1samp\(" + name + r", ([\d.]+).*\n#\s*p=([\d.]+)", part)
    if said:
        p = test_target(values, float(said[1]), "val_loss").p
        if not means(said[2], p):
            yield f"README: p={said[2]} on the page, its {name} give {p:.4f}"


def mean_findings(readme, runs, values):
    """Means in the page's text, near those of the logs but not theirs."""
    mean = describe(values).mean
    known = [mean, describe([run.value("val_loss") for run in runs if run.finished]).mean, *values]
    for text in re.findall(r"(?i)\bmean\b[^\d\n]{0,60}?(\d\.\d{4,})", readme):
        if 0.99 < float(text) / mean < 1.01 and not any(means(text, value) for value in known):
            yield f"README: mean {text} on the page, the logs give {mean:.8f}"


def test_findings(readme, values):
    """t, p and the standard deviation in the page's text."""
    said = re.search(r"\bt\s*=\s*`?-?(\d+\.\d+)", readme)
    goal = re.search(r"(?i)against\s+`?(\d\.\d{3,})", readme)
    if said and goal:
        test, freedom = test_target(values, float(goal[1]), "val_bpb"), re.search(r"df\s*=\s*`?(\d+)", readme)
        if (not freedom or int(freedom[1]) == test.df) and not means(said[1], abs(test.t)):
            yield (f"README: t={said[1]} on the page, the logs give t={abs(test.t):.2f} df={test.df:.0f} "
                   f"p={test.p:.4f}")
        p = re.search(r"\bp\s*=\s*`?(0\.\d+)", readme)
        if p and not means(p[1], test.p):
            yield f"README: p={p[1]} on the page, the logs give p={test.p:.4f}"
    spread = re.search(r"(?i)standard deviation[^\d\n]{0,20}(\d\.\d+)", readme)
    if spread and not means(spread[1], describe(values).std):
        yield f"README: standard deviation {spread[1]} on the page, the logs give {describe(values).std:.5f}"


def seed_findings(readme, runs):
    """A line of the page that names a seed and scores must hold a score of the seed's log."""
    for run in runs:
        known = [value for _, loss, bpb in run.finals for value in (loss, bpb) if value is not None]
        if run.curves["val"]:
            known.append(run.curves["val"][-1].loss)
        if run.seed < 0 or not known:
            continue
        for line in readme.splitlines():
            if not re.search(rf"(?i)(?:^\|\s*|seed[`=: _]*){run.seed}\b", line):
                continue
            scores = re.findall(r"(?<![\d.,])\d\.\d{4,}(?![\d.])", line)
            if scores and not any(means(text, value) for text in scores for value in known):
                yield f"README: {scores[0]} on the page for seed {run.seed}, {known[-1]} in {run.file}"
