"""`record board`: the leaderboards and the rules in records/README.md, and targets.json, which a run's last
lines and its picture compare it with; the rule that these are what rules and records make."""
import argparse
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from data import inputs
from records.judge.runs import batch_means, demand, show
from records.judge.significance import describe, show_p
from records.verify import folders
from records.verify.checks import LOOK_ONLY, LeftOut, Rule, first_difference, require
from records.verify.folders import NEWEST, RULES, Folder, best_before, rank_key, records_of, table
from records.verify.rules import check

# A plain GPT within the limits of a track, as docs/log.md has it ("peers, tuned")
PLAIN = {"tiny": [{"name": "a plain GPT", "metric": "val_bpb", "better": "lower",
                   "value": 1.4221, "about": "4 layers of 128, 3 seeds"}]}


def verdict_of(folder: Folder) -> str:
    """The last cell of a record's row."""
    failed = check(folder, LOOK_ONLY, lambda line: None)
    said = f"fails {', '.join(failed)}" if failed else "passes, code not run"
    return f"version {folder.submission['rules_version']}: {said}"


def board_table(name: str, records: dict[str, Folder], last_cell: Callable = verdict_of) -> str:
    """A leaderboard: the best first, then what there was to start from. Where time is ranked, the metric that
    had to be reached has a column; where that is CORE, which is noisy, val_bpb has one, too."""
    track = RULES[NEWEST].tracks[name]
    rows = []
    by = "time" if track.rank == "time" else track.metric
    others = [] if by == track.metric else [track.metric]
    if track.metric == "core":
        others.append("val_bpb")

    # where any hardware may play, only records on the same compare
    def order(folder: Folder) -> tuple[str, float]:
        return "" if track.hardware else folder.hardware(), rank_key(folder)

    for folder in sorted(records.values(), key=order):
        s = describe(folder.values(by))
        _, test = folder.test()
        spread = "one run" if s.std is None else f"± {show(by, s.std)}"
        p = "none"      # of a record of one run
        if test:
            p = show_p(test.p)
        elif folder.first_of_track():
            p = "first"
        rows.append([
            f"[{folder.path.name}]({folder.path.parent.name}/{folder.path.name})",
            f"{show(by, s.mean)} {spread}",
            *(show(metric, describe(folder.values(metric)).mean) for metric in others),
            s.n,
            p,
            folder.hardware(),
            folder.submission["author"],
            last_cell(folder)])
    if track.start is not None:
        blank = [""] * len(others)
        rows.append([track.start_name, show(by, track.start), *blank, "", "", track.hardware, "",
                     "the start"])
    column = "time (s)" if by == "time" else by
    head = ["record", f"{column}, mean and std", *others, "n", "p", "hardware", "by", "rules"]
    return table(head, rows)


def rules_table(version: int) -> str:
    """A version of the rules, a row a track, for people."""
    rows = []
    for name, track in RULES[version].tracks.items():
        goal = "the record before" if track.target is None else f"mean {track.target}"
        if track.margin:
            goal += f" by {track.margin} {track.unit}"
        if track.rank == "time":
            goal += " in less time"
        caps = f"{track.byte_cap:,} bytes " if track.byte_cap else ""
        if track.time_cap:
            caps += f"{track.time_cap} s"
        settings = " ".join(f"{key}:{value.lstrip('=')}" for key, value in track.eval.items())
        rows.append([name, f"{track.better} {track.metric}", goal, f"< {track.p}", track.min_runs, caps,
                     track.data, settings, track.hardware or "any, compared within its kind"])
    head = "track, better is, to reach or beat, p, runs at least, caps, data, evaluation, hardware"
    return table(head.split(", "), rows)


def target_of(name: str, records: dict[str, Folder]) -> dict[str, Any]:
    """What a run of a track is shown against at its end (tools/run/watch.py) and in its loss.png. curve_of:
    of which split `curve` has the loss. Where the track is to reach a value in the least time, `seconds` is
    what the record took."""
    track = RULES[NEWEST].tracks[name]
    mean = track.start
    about = f"{track.start_name}, {track.hardware}"
    best = best_before(records, "")
    curve = []
    split = "train"
    if best != "none":
        record = records[best]
        s = describe(record.values("time" if track.rank == "time" else track.metric))
        mean = round(s.mean, 4)
        about = f"{best.partition('_')[2]}, {s.n} seeds"
        curves = [batch_means(run.curves["train"]) for run in record.runs]
        if all(len(run.curves["part"]) > 3 for run in record.runs):
            split = "part"
            curves = [[(point.seconds, point.loss) for point in run.curves[split]] for run in record.runs]
        grid = np.geomspace(max(points[0][0] for points in curves),
                            min(points[-1][0] for points in curves), 80)
        losses = np.median([np.interp(grid, *zip(*points)) for points in curves], 0)
        curve = np.column_stack([grid, losses]).round(4).tolist()
    other = {"name": "the record", "metric": track.metric, "better": track.better, "value": mean,
             "about": about}
    if track.rank == "time":
        other |= {"value": track.target, "seconds": mean}
    return {"compare": [other] * (mean is not None) + PLAIN.get(name, []), "curve": curve,
            "curve_of": split}


def page_of(version: int) -> Path:
    """The page that has this version of the rules: today's on that of the boards, older ones apart."""
    return folders.HOME / "README.md" if version == NEWEST else folders.HOME / "rules" / f"rules_{version}.md"


def with_part(text: str, name: str, content: str, page: str) -> str:
    """The text of a page with what stands between the markers of a part made anew."""
    start = f"<!-- {name} -->"
    end = f"<!-- /{name} -->"
    demand(text.count(start) == text.count(end) == 1, f"records/{page} has no block {start}")
    top, _, rest = text.partition(start)
    _, _, bottom = rest.partition(end)
    return f"{top}{start}\n{content}\n{end}{bottom}"


def board(say: Callable) -> None:
    """Rewrites what stands between the markers of records/README.md, and targets.json."""
    path = folders.HOME / "README.md"
    text = with_part(inputs.read_text(path), f"rules version {NEWEST}", rules_table(NEWEST), path.name)
    for name in RULES[NEWEST].tracks:
        text = with_part(text, f"board {name}", board_table(name, records_of(name)), path.name)
    path.write_text(text, encoding="utf-8")
    targets = {name: target_of(name, records_of(name)) for name in RULES[NEWEST].tracks}
    (folders.HOME / "targets.json").write_text(json.dumps(targets) + "\n", encoding="utf-8")
    say(f"wrote {os.path.relpath(path)} and targets.json")


def check_boards(folder: Folder, options: argparse.Namespace) -> None:
    """The tables of records/README.md and of the older rules are what rules and records make; verdicts and a
    record that the board does not list yet apart."""
    name = folder.submission.get("track")
    if not page_of(NEWEST).exists() or options is LOOK_ONLY:      # with which board() asks
        raise LeftOut
    text = inputs.read_text(page_of(NEWEST))
    records = {other: found for other, found in records_of(name).items()
               if other != folder.path.name or f"[{other}]" in text}
    parts = [(page_of(version), f"rules version {version}", rules_table(version)) for version in RULES]
    parts.append((page_of(NEWEST), f"board {name}", board_table(name, records, lambda folder: "")))
    for page, part, content in parts:
        told = inputs.read_text(page).partition(f"<!-- {part} -->\n")[2].partition(f"\n<!-- /{part} -->")[0]
        told = re.sub(r"(?m)version \d+: [^|]*(?= \|$)", "", told)
        found = first_difference(told, content)
        where = f"records/{page.relative_to(folders.HOME)}, {part}"
        require(not found, f"{where} (line, as it is, as it is recomputed): {found}")


BOARDS = Rule("rules and boards", check_boards)
