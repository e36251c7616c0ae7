"""What the page and the submission.json of a foreign record claim, against its own logs, lists and tables.

Each function yields one Finding a claim that does not hold, with both values.
"""
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from records.judge.logs import Run, identity, score_kind, show
from records.judge.significance import describe
from records.verify.folders import Folder

# Ranks of a finding: two things in the folder exclude each other, or a rule of the track; nothing in the
# folder shows a claim
CONTRADICTION = "contradiction"
NO_EVIDENCE = "no evidence"
# Names of columns, and beginnings of lines, that tell of something else than a run's own scores
OTHERS = re.compile(
    r"(?i)Δ|delta|gain|diff|improv|gap|penalty|base|prev|prior|before|parent|reference|leader|control|"
    r"upstream|\bvs\b|sota|#\d|\bpr\b|old|merged|source|std|dev\b|sigma|time|\bms\b|eval|avg|wall|/")
SCORE = re.compile(r"(\d\.\d{4,})(?: ?[(±].*)?$")      # a cell with one score


class Finding(NamedTuple):
    rank: str       # CONTRADICTION or NO_EVIDENCE
    text: str


def groups(runs: list[Run], key: Callable = lambda run: (run.path.parent, run.source)) -> list[list[Run]]:
    """Runs of one folder that share a script, the largest group first."""
    found = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    return sorted(found.values(), key=len, reverse=True)


def different(runs: list[Run]) -> list[Run]:
    """The finished runs, each once though there may be copies of its log."""
    return list({identity(run): run for run in runs if run.finished}.values())


def decimals(text: str) -> int:
    return len(text.partition(".")[2])


def means(text: str, value: float | None) -> bool:
    """Does a printed number mean value, at its own digits?"""
    return value is not None and abs(float(text) - value) <= 0.51 * 10.0 ** -decimals(text)


def about(text: str, values: Iterable[float]) -> bool:
    """Is one of values what a printed number rounds or truncates?"""
    return any(abs(float(text) - value) <= 1.01 * 10.0 ** -decimals(text) for value in values)


def nearest(text: str, values: Iterable[float]) -> float:
    return min(values, key=lambda value: abs(float(text) - value))


# ------------------------------------------------------------ scores and sizes of the record as a whole
def known_scores(runs: list[Run], metric: str) -> set[float]:
    """val_loss or val_bpb of logs since their last step, and the means that a record may tell: of each kind
    of final score, over all runs or those of a group."""
    found = {value for run in runs for name, value in run.scores if name == metric}
    for pool in [different(runs), *map(different, groups(runs))]:
        found |= {float(np.mean(values)) for kind in ("ttt", "sliding", "plain", "")
                  if pool and None not in (values := [score_of(run, metric, kind) for run in pool])}
    return found


def score_of(run: Run, metric: str, kind: str) -> float | None:
    """The last final score of a kind; "": the one that counts."""
    if not kind:
        return run.value(metric)
    place = 1 + (metric == "val_bpb")
    return next((final[place] for final in reversed(run.finals) if score_kind(final[0]) == kind), None)


def score_findings(folder: Folder) -> Iterator[Finding]:
    """Scores of the submission and of the page's first lines that neither a log nor a mean of logs has."""
    said = folder.submission
    wrong = []
    for key in ("val_loss", "val_bpb"):
        known = known_scores(folder.runs + folder.inner, key)
        if known and isinstance(said.get(key), float) and not about(repr(said[key]), known):
            wrong.append(key)
            closest = nearest(repr(said[key]), known)
            yield Finding(NO_EVIDENCE, f"submission.json: {key} {said[key]} is in no log and no mean of "
                          f"logs, the nearest is {closest:.8f}")
    for line in folder.readme.splitlines()[:12]:
        first = re.search(r"(?i)^([^\d]*?)val[\\_ ]*bpb\W{0,8}(\d\.\d{3,})", line)
        if known and first and not OTHERS.search(first[1]):
            if not about(first[2], known):
                agreed = isinstance(said.get("val_bpb"), float) and "val_bpb" not in wrong
                rank = CONTRADICTION if agreed else NO_EVIDENCE
                yield Finding(rank, f"README: val_bpb {first[2]} is in no log and no mean of logs, the "
                              f"nearest is {nearest(first[2], known):.8f}")
            return


def code_sizes(folder: Folder) -> set[int]:
    """Bytes of each script, and of all."""
    sizes = [len(folder.read(name)) for name in folder.files if name.endswith(".py")]
    return {*sizes, sum(sizes)} - {0}


def size_findings(folder: Folder) -> Iterator[Finding]:
    """Sizes of the submission that neither its files nor its logs have."""
    said = folder.submission
    runs = folder.runs + folder.inner
    code = code_sizes(folder)
    sizes = {size for run in runs for size in run.sizes}
    totals = [run.facts["bytes_total"] for run in different(runs) if "bytes_total" in run.facts]
    total, told, score = (said.get(key) for key in ("bytes_total", "bytes_code", "val_bpb"))
    score = score if isinstance(score, float) else 0.0
    if isinstance(total, int) and totals and total % 1000 and total not in sizes:
        if abs(total - describe(totals).mean) > 1:
            of_these = score and about(repr(score), known_scores(runs, "val_bpb"))
            rank = CONTRADICTION if of_these else NO_EVIDENCE
            yield Finding(rank, f"submission.json: bytes_total {total} is in no log, the nearest is "
                          f"{nearest(str(total), totals):.0f}")
    if isinstance(told, int) and told % 1000 and code and sizes and told not in sizes | code:
        yield Finding(CONTRADICTION, f"submission.json: bytes_code {told} is in no log and the size of no "
                      f"script, the nearest is {nearest(str(told), sizes | code):.0f}")


# ------------------------------------------------------------ scores of single seeds
def tables(page: str) -> list[tuple[list[str], list[list[str]]]]:
    """[(names of the columns, rows)] of a page's tables, cells without marks."""
    found = []
    rows = []
    for line in [*page.splitlines(), ""]:
        if line.lstrip().startswith("|"):
            rows.append([re.sub(r"[*`\\]", "", cell).strip() for cell in line.strip().strip("|").split("|")])
            continue
        if len(rows) > 2 and not re.search(r"[^-: ]", "".join(rows[1])):
            found.append((rows[0], [row for row in rows[2:] if len(row) == len(rows[0])]))
        rows = []
    return found


def page_scores(page: str) -> list[tuple[int, str]]:
    """[(seed, score as printed)] of the rows and lines of a page that name a seed."""
    found = []
    for names, rows in tables(page):
        if re.search(r"(?i)\bseed\b", names[0]):
            found += [(int(row[0]), score[1]) for row in rows if row[0].isdigit()
                      for name, cell in zip(names[1:], row[1:])
                      if not OTHERS.search(name.replace("_", " ")) and (score := SCORE.match(cell))]
    for line in page.splitlines():
        told = re.search(r"(?i)\bseed[`=: *]*(\d+)\b[^\d\n|]{0,25}(\d\.\d{4,})(?!\d)", line)
        if told and not OTHERS.search(line.replace("/", " ")):
            found.append((int(told[1]), told[2]))
    return found


def seed_findings(page: str, runs: list[Run]) -> Iterator[Finding]:
    """Scores that the page tells of seeds, against their logs. A row of which the log has no score is of
    another try of the seed if another row has one."""
    by_seed: dict[int, list[float]] = {}
    for run in runs:
        values = [value for _, value in run.scores] + [point.loss for point in run.curves["val"]]
        for seed in {run.seed, run.seed_in_name} - {-1}:
            by_seed.setdefault(seed, []).extend(values)
    told: dict[int, list[str]] = {}
    for seed, text in page_scores(page):
        told.setdefault(seed, []).append(text)
    missing = [str(seed) for seed in told if seed not in by_seed]
    if missing and by_seed:
        yield Finding(NO_EVIDENCE, f"README: scores of seeds {', '.join(missing)}, which have no log")
    for seed, texts in told.items():
        known = by_seed.get(seed, [])
        if known and not any(about(text, known) for text in texts):
            yield Finding(NO_EVIDENCE, f"README: seed {seed}: {texts[0]}, but its log has "
                          f"{nearest(texts[0], known)}")


# ------------------------------------------------------------ lists of losses and times
def page_lists(readme: str) -> list[tuple[str, list[str]]]:
    """[(name, numbers as printed)] of the Python lists of numbers on a page, in order."""
    found = re.findall(r"^(?:>>>)?\s*(\w+)\s*=\s*\[([\d.,\s]+)\]", readme, re.M)
    return [(name.lower(), re.findall(r"\d+(?:\.\d+)?", numbers)) for name, numbers in found]


class Row(NamedTuple):
    """A run as a page lists it, numbers as printed."""
    loss: str
    time: str | None    # None: the page lists no times

    def fits(self, run: Run) -> tuple[bool, bool]:
        """(does the loss fit, does the time fit or, without times, the loss)"""
        loss = means(self.loss, run.value("val_loss"))
        if self.time is None:
            return loss, loss
        return loss, means(self.time, run.time)


def listed_rows(readme: str) -> Iterator[tuple[str, list[Row]]]:
    """(how it is printed, its rows) of each list of losses on a page, with the times listed after it."""
    lists = page_lists(readme)
    for (name, losses), (next_name, times) in zip(lists, [*lists[1:], ("", [])]):
        if len(losses) < 2 or not name.startswith(("loss", "acc", "val")):
            continue
        digits = max(map(decimals, losses))     # 3.28 among others stands for 3.2800
        printed = [f"{float(loss):.{digits}f}" for loss in losses]
        rows = [Row(loss, None) for loss in printed]
        if next_name.startswith("time") and len(times) == len(losses):
            rows = [Row(loss, time) for loss, time in zip(printed, times)]
        yield f"{name} = [{', '.join(losses[:3])}, …]", rows


def list_findings(readme: str, runs: list[Run]) -> Iterator[Finding]:
    """Lists of losses and times on the page, against the logs. A list that fits no logs may tell of other
    runs, if another one fits."""
    found = [*listed_rows(readme)]
    fitting = [rows for _, rows in found
               if 2 * sum(any(row.fits(run)[1] for run in runs) for row in rows) >= len(rows)]
    if found and not fitting:
        told, rows = found[0]
        yield Finding(NO_EVIDENCE, f"README: the logs hold less than half of the {len(rows)} runs in {told}")
    for rows in fitting:
        yield from row_findings(rows, runs)


def row_findings(rows: list[Row], runs: list[Run]) -> Iterator[Finding]:
    """The rows of one list, each against a run of its own."""
    scripts = {run.source for run in runs if any(row.fits(run)[1] for row in rows)}
    left = [run for run in runs if run.finished and run.source in scripts]
    missing = []
    for row in rows:
        run = next((run for run in left if all(row.fits(run))), None)
        if run:
            left.remove(run)
        else:
            missing.append(row)
    if rows[0].time and len(missing) * 2 > len(rows):       # losses and times are listed in two orders
        runs = [run for run in runs if run.source in scripts]
        yield from row_findings([Row(row.loss, None) for row in rows], runs)
        return
    for row in list(missing):
        fits = [row.fits(run) for run in left]
        run = next((run for run, (_, time) in zip(left, fits) if time), None)
        if run:
            missing.remove(row)
        if run and not any(loss for loss, _ in fits):
            left.remove(run)
            yield Finding(CONTRADICTION, f"README: {row.loss} on the page (time {row.time}), {told_of(run)}")
    if missing:
        numbers = ", ".join(row.loss if row.time is None else f"{row.loss} in {row.time}" for row in missing)
        yield Finding(NO_EVIDENCE, f"README: no log holds {len(missing)} of the {len(rows)} runs listed: "
                      f"{numbers}")
    for run in left if len(scripts) == 1 and not missing else []:
        yield Finding(NO_EVIDENCE, f"README: lists {len(rows)} runs of a script, not its finished run "
                      f"{told_of(run)}")


def told_of(run: Run) -> str:
    return f"{run.file}, {show('val_loss', run.value('val_loss'))} in {run.time or 0:.3f} s"
