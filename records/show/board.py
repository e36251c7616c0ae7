"""`record board`: the leaderboards and the rules in records/README.md; the rule that these are what rules and
records make; what the last lines of a run compare it with."""
import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data import inputs
from records.judge.logs import demand, show
from records.judge.significance import describe, show_p
from records.show.labels import without_date
from records.verify import folders
from records.verify.checks import LOOK_ONLY, LeftOut, Rule, first_difference, require
from records.verify.folders import NEWEST, RULES, Folder, rank_key, records_of, table
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


def goals_of(name: str, record: Folder | None) -> list[dict[str, Any]]:
    """What a run of a track is compared with at its end (tools/run/show.py): the record, or what there was to
    start from, and a plain GPT. Where a value is to be reached in the least time, `seconds` is what the
    record took."""
    track = RULES[NEWEST].tracks[name]
    mean = track.start
    about = f"{track.start_name}, {track.hardware}"
    if record:
        s = describe(record.values("time" if track.rank == "time" else track.metric))
        mean = round(s.mean, 4)
        speed = describe([run.result["tok_per_s"] for run in record.runs]).mean
        about = f"{without_date(record.path.name)}, {s.n} seeds at {speed:,.0f} tok/s"
    other = {"name": "the record", "metric": track.metric, "better": track.better, "value": mean,
             "about": about}
    if track.rank == "time":
        other |= {"value": track.target, "seconds": mean}
    return [other] * (mean is not None) + PLAIN.get(name, [])


def page_of(version: int) -> Path:
    """The page that has this version of the rules: today's on that of the boards, older ones apart."""
    return folders.HOME / "README.md" if version == NEWEST else folders.HOME / "rules" / f"rules_{version}.md"


def part_of(text: str, name: str) -> str:
    """What stands between the markers of a part of a page. Raises Refused."""
    found = re.findall(f"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", text, re.S)
    demand(len(found) == 1, f"the page has no block <!-- {name} -->")
    return found[0]


def with_part(text: str, name: str, content: str) -> str:
    """The text of a page with that made anew. Raises Refused."""
    marker = f"<!-- {name} -->\n"
    return text.replace(f"{marker}{part_of(text, name)}\n", f"{marker}{content}\n")


def board(say: Callable) -> None:
    """Rewrites what stands between the markers of records/README.md."""
    path = folders.HOME / "README.md"
    text = with_part(inputs.read_text(path), f"rules version {NEWEST}", rules_table(NEWEST))
    for name in RULES[NEWEST].tracks:
        text = with_part(text, f"board {name}", board_table(name, records_of(name)))
    path.write_text(text, encoding="utf-8")
    say(f"wrote {os.path.relpath(path)}")


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
        told = re.sub(r"(?m)version \d+: [^|]*(?= \|$)", "", part_of(inputs.read_text(page), part))
        found = first_difference(told, content)
        where = f"records/{page.relative_to(folders.HOME)}, {part}"
        require(not found, f"{where} (line, as it is, as it is recomputed): {found}")


BOARDS = Rule("rules and boards", check_boards)
