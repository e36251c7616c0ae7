"""What the README of a foreign record claims, recomputed from its own lists and from the logs beside it.

Each function yields one sentence a claim that does not hold, with both values.
"""
import hashlib
import re

from runs import describe, show, test_target


def groups(runs):
    """Runs that share a script, the largest group first."""
    found = {}
    for run in runs:
        found.setdefault(hashlib.sha256((run.source or "").strip().encode()).digest(), []).append(run)
    return sorted(found.values(), key=len, reverse=True)


def decimals(text):
    return len(text.partition(".")[2])


def near(text, value):
    """Does a printed number mean value, at its own digits? torch prints fp32, hence the half and a little."""
    return value is not None and abs(float(text) - value) <= 0.51 * 10.0 ** -decimals(text)


def page_lists(readme):
    """[(name, [number as printed], where it ends)] of the Python lists on a page, in order."""
    found = re.finditer(r"^\s*(\w+)\s*=\s*\[([\d.,\s]+)\]", readme, re.M)
    return [(m[1], re.findall(r"\d+(?:\.\d+)?", m[2]), m.end()) for m in found]


def list_findings(readme, runs):
    """Lists of losses and times on the page, against the logs of the script that they tell of."""
    lists = [*page_lists(readme), ("", [], 0)]
    for (name, losses, _), (other, times, _) in zip(lists, lists[1:]):
        paired = other.lower().startswith("time") and len(times) == len(losses)
        if len(losses) < 2 or not (paired or name.lower().startswith("loss")):
            continue
        size = 1000 if paired and float(min(times, key=float)) > 20_000 else 1     # milliseconds, or seconds
        rows = list(zip(losses, times if paired else losses))

        def fits(row, run):
            """(the loss fits, the time fits)"""
            loss = near(row[0], run.value("val_loss"))
            return loss, near(row[1], run.time and run.time * size) if paired else loss

        def hits(group):
            return sum(any(any(fits(row, run)) for run in group) for row in rows)

        pool = max(groups(runs), key=hits, default=[])
        if hits(pool) * 2 < len(rows):
            yield f"README: no script's logs hold most of {name} = [{', '.join(losses[:3])}, …]"
            continue
        left = [run for run in pool if run.finished]
        for enough in (all, any):       # first the rows that fit in both numbers, then those that fit in one
            for row in list(rows):
                run = next((run for run in left if enough(fits(row, run))), None)
                if run is None:
                    continue
                rows.remove(row)
                left.remove(run)
                loss_fits, time_fits = fits(row, run)
                there = f"{show('val_loss', run.value('val_loss'))} in {run.time or 0:.3f} s in {run.file}"
                if not loss_fits:
                    yield f"README: {row[0]} on the page (time {row[1]}), {there}"
                elif not time_fits:
                    yield f"README: time {row[1]} on the page (loss {row[0]}), {there}"
        for row in rows:
            yield f"README: {row[0]} is in no log"
        for i, run in enumerate(left, len(losses) + 1):
            yield (f"README: the page lists {len(losses)} runs, finished run {i} of the same script is not "
                   f"there: {run.file}, {show('val_loss', run.value('val_loss'))} in {run.time or 0:.3f} s")


def claim_findings(readme, runs):
    """Means, deviations and tests that the page prints, from its own lists or, if it has none, the logs."""
    lists = page_lists(readme)
    for i, (name, numbers, start) in enumerate(lists):
        end = next((place for other, _, place in lists[i + 1:] if other == name), len(readme))
        part, values = readme[start:end], list(map(float, numbers))
        if len(values) < 2:
            continue
        said = re.search(r"std_mean\(torch\.tensor\(" + name + r"\).*\n#[^\n]*?(?:std=|tensor\()([\d.]+)\)?, "
                         r"(?:mean=|tensor\()([\d.]+)", part)
        s = describe(values)
        for label, text, value in zip(("std", "mean"), said.groups() if said else (), (s.std, s.mean)):
            text = text.rstrip(".")
            if not near(text, value):
                digits = max(4, decimals(text) - 1)
                yield f"README: {label} {text} on the page, its {name} give {value:.{digits}f}"
        said = re.search(r"ttest_1samp\(" + name + r", ([\d.]+).*\n#\s*p=([\d.]+)", part)
        if said:
            p = test_target(values, float(said[1]), "val_loss").p
            if not near(said[2], p):
                yield f"README: p={said[2]} on the page, its {name} give {p:.4f}"
    values = [run.value("val_bpb") for run in runs if run.finished and run.value("val_bpb")]
    if len(values) < 2:
        return
    mean = describe(values).mean
    for text in re.findall(r"(?i)\bmean\b[^\d\n]{0,60}?(\d\.\d{4,})", readme):
        known = [mean, describe([run.value("val_loss") for run in runs if run.finished]).mean, *values]
        if 0.99 < float(text) / mean < 1.01 and not any(near(text, value) for value in known):
            yield f"README: mean {text} on the page, the logs give {mean:.8f}"
    said = re.search(r"\bt\s*=\s*`?-?(\d+\.\d+)", readme)
    goal = re.search(r"(?i)against\s+`?(\d\.\d{3,})", readme)
    if said and goal:
        test, freedom = test_target(values, float(goal[1]), "val_bpb"), re.search(r"df\s*=\s*`?(\d+)", readme)
        if (not freedom or int(freedom[1]) == test.df) and not near(said[1], abs(test.t)):
            yield (f"README: t={said[1]} on the page, the logs give t={abs(test.t):.2f} df={test.df:.0f} "
                   f"p={test.p:.4f}")
        p = re.search(r"\bp\s*=\s*`?(0\.\d+)", readme)
        if p and not near(p[1], test.p):
            yield f"README: p={p[1]} on the page, the logs give p={test.p:.4f}"
    spread = re.search(r"(?i)standard deviation[^\d\n]{0,20}(\d\.\d+)", readme)
    if spread and not near(spread[1], describe(values).std):
        yield f"README: standard deviation {spread[1]} on the page, the logs give {describe(values).std:.5f}"


def seed_findings(readme, runs):
    """A line of the page that names a seed and scores must hold a score of the seed's log."""
    for run in runs:
        known = [value for _, loss, bpb in run.finals for value in (loss, bpb) if value is not None]
        known += [loss for *_, loss, _ in run.curves["val"][-1:]]
        for line in readme.splitlines() if run.seed >= 0 and known else ():
            if not re.search(rf"(?i)(?:^\|\s*|seed[`=: _]*){run.seed}\b", line):
                continue
            scores = re.findall(r"(?<![\d.,])\d\.\d{4,}(?![\d.])", line)
            if scores and not any(near(text, value) for text in scores for value in known):
                yield f"README: {scores[0]} on the page for seed {run.seed}, {known[-1]} in {run.file}"
