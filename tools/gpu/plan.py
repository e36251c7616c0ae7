"""The plan of gpu-report: what no card has shown comes first, and nothing starts that the time left cannot
hold.

Nothing here imports torch, starts a process or knows what time it is: a part is begun by a function and
ends by the poll() of what that returns, on a clock that is given. So the same loop foresees a report and
carries it out.
"""

import copy
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# What each kind of part shows of a preset. train: 20 steps by train_gpt.py itself; score: the file that it
# wrote, in a process of its own; resume: the same from its checkpoint; kernels and loop are timed, so they
# run alone.
SHOWS = dict(
    train=("trains", "validates", "writes", "reads back"),
    score=("scores apart",),
    resume=("resumes",),
    kernels=("kernels timed",),
    loop=("loop timed",),
)
PARTS = ("environment", *SHOWS)
ALONE = ("environment", "kernels", "loop")
AFTER_TRAIN = ("score", "resume")
GOALS = [goal for goals in SHOWS.values() for goal in goals]
PRESETS = ("tiny", "golf", "golf_plus", "speedrun", "speedrun_plus", "gpt2", "gpt2_plus")
WITH_ARTIFACT = ("tiny", "golf", "golf_plus")  # the others have no file that is read back before the end
LARGE = ("gpt2", "gpt2_plus")  # checkpoints of 19 and 16 GiB, two of each: they are not resumed
MOST = 3  # processes side by side: with seven on 16 cores each of them compiled for minutes
MEMORY_SHARE = 0.95  # of the GPU's, that parts side by side may fill by their own account
FASTEST = 0.5  # a host is never taken to be faster than this
GUESS = "guess"


class Need(NamedTuple):
    """What a part is expected to need."""

    seconds: float
    GiB: float
    source: str  # where the seconds come from


# One H100 80GB HBM3 with 16 cores, 26 and 27 November 2026, torch 2.11.0 (docs/gpu_results/): "measured" is
# what a command printed, for what was in it; a share of such a time is a guess, as is whatever has no
# figure there.
ENVIRONMENT = Need(11, 0, "measured")
TRAIN = dict(
    tiny=Need(90, 2, "guess: 41 s of compiling measured"),
    golf=Need(121, 8, "measured beside others, of which 49 compiling; 7.2 GiB"),
    golf_plus=Need(130, 15, "guess: 94 s of compiling measured; 14.1 GiB measured"),
    speedrun=Need(250, 28, "guess: 189 s of compiling measured; 27.0 GiB measured"),
    speedrun_plus=Need(240, 36, "guess: still compiling after 225 s, beside six others on a slow host"),
    # 188 s on one core to compile depth 26; 36.0 GiB for one row by the trainer's own plan
    gpt2=Need(330, 37, "guess: 155 s of compiling measured on a slow host; GiB of the plan"),
    gpt2_plus=Need(330, 37, "guess: 225 s at depth 12, measured beside others"),
)
SCORE = dict(tiny=25, golf=47, golf_plus=30, speedrun=50, speedrun_plus=60, gpt2=90, gpt2_plus=90)
KERNELS = dict(tiny=20, golf=20, golf_plus=25, speedrun=50, speedrun_plus=80, gpt2=60, gpt2_plus=60)
LOOP = dict(tiny=40, golf=25, golf_plus=70, speedrun=75, speedrun_plus=90, gpt2=360, gpt2_plus=360)
LARGEST = dict(tiny=2, golf=10, golf_plus=15, speedrun=42, speedrun_plus=60, gpt2=74, gpt2_plus=74)  # GiB
MEASURED = dict(  # the others of these tables are guesses
    score={"golf": "measured beside others"},
    loop={"golf": "measured", "speedrun": "measured: 75.2 s, of which 46.3 compiling; 27.0 GiB"},
)
# On two cores of an EPYC that had other work, 28 November 2026
TOY_SECONDS = dict(environment=6, train=12, score=10, resume=12, kernels=10, loop=12)


def needed(part: str, preset: str, toy: bool) -> Need:
    """By the tables."""
    if toy:
        return Need(TOY_SECONDS[part], 1, "measured on two cores")
    if part == "environment":
        return ENVIRONMENT
    train = TRAIN[preset]
    if part == "train":
        return train
    source = MEASURED.get(part, {}).get(preset, GUESS)
    if part == "score":
        return Need(SCORE[preset], train.GiB, source)
    if part == "resume":  # its graphs are in the cache by then
        return Need(0.6 * train.seconds, train.GiB, source)
    return Need((KERNELS if part == "kernels" else LOOP)[preset], LARGEST[preset], source)


def earlier_needs(paths: Iterable[Path], toy: bool) -> dict[tuple[str, str], Need]:
    """What the parts of earlier reports took; a later path is preferred. Other files are passed over."""
    found = {}
    for path in paths:
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            if report["toy"] != toy or report.get("side_by_side"):
                continue
            for row in report["parts"]:
                if row["state"] == "done":
                    GiB = max(row["peak_GiB"], row["GiB"])
                    found[row["part"], row["preset"]] = Need(row["seconds"], GiB, f"measured: {path.name}")
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


# ---------- the parts
@dataclass
class Part:
    """A part of the report, run by a process of its own, and what became of it."""

    part: str
    preset: str
    expected_s: float
    GiB: float
    source: str
    unseen: list[str] = field(default_factory=list)  # what it would show that no card has shown
    state: str = "waiting"  # running, done, failed, stopped or skipped
    doing: str = ""
    seconds: float = 0.0
    limit_s: float = 0.0
    compile_seconds: float = 0.0
    peak_GiB: float = 0.0
    last_lines: list[str] = field(default_factory=list)

    def name(self) -> str:
        return f"{self.preset} {self.part}".strip()


def make_plan(
    presets: Iterable[str],
    only: Iterable[str],
    seen: Iterable[tuple[str, str]],
    earlier: dict[tuple[str, str], Need],
    toy: bool,
) -> list[Part]:
    """The parts in order. seen: (preset, goal) that a card has shown. First training that no card has
    shown, the cheapest first; then scores and RESUME, with the training that they need; then what is timed;
    then, in the same order, what has been seen before."""
    seen = {*seen}
    parts = []
    for part in only:
        for preset in [""] if part == "environment" else presets:
            if part == "resume" and preset in LARGE:
                continue
            need = earlier.get((part, preset)) or needed(part, preset, toy)
            goals = [goal for goal in SHOWS.get(part, ()) if goal != "reads back" or preset in WITH_ARTIFACT]
            unseen = [goal for goal in goals if (preset, goal) not in seen]
            parts.append(Part(part, preset, need.seconds, need.GiB, need.source, unseen))
    train_seconds = {part.preset: part.expected_s for part in parts if part.part == "train"}
    needs_training = {part.preset for part in parts if part.part in AFTER_TRAIN and part.unseen}
    groups = dict(environment=0, train=0, score=1, resume=1, kernels=2, loop=2)

    def place(part: Part) -> tuple[bool, int, float, int]:
        again = not part.unseen
        group = groups[part.part]
        if part.part == "train" and again and part.preset in needs_training:
            again = False
            group = 1
        return again, group, train_seconds.get(part.preset, part.expected_s), PARTS.index(part.part)

    return sorted(parts, key=place)


def next_part(waiting: list[Part], running: list[Part], GiB: float) -> Part | None:
    """The first part that may start now: alone, or beside others within memory and number. What needs a run
    that still trains, or would compile the same beside it, lets others pass. A part larger than the GPU by
    its own account is tried when nothing else runs."""
    if len(running) >= MOST or any([other.part in ALONE for other in running]):
        return None
    training = [part.preset for part in [*waiting, *running] if part.part == "train"]
    for part in waiting:
        if part.part != "train" and part.preset in training and (part.part in AFTER_TRAIN or running):
            continue
        if not running:
            return part
        fits = part.GiB + sum([other.GiB for other in running]) <= GiB
        return part if fits and part.part not in ALONE else None
    return None


def slowness(parts: list[Part]) -> float:
    """How much longer than expected the parts that are done have taken on this host."""
    done = [part for part in parts if part.state == "done"]
    expected = sum([part.expected_s for part in done])
    return max(FASTEST, sum([part.seconds for part in done]) / expected) if expected else 1.0


def why_not(part: Part, parts: list[Part], left: float) -> str:
    """Why a part cannot be done any more; empty where it can."""
    needs = part.expected_s * slowness(parts)
    if needs > left:
        return f"needs about {needs:.0f} s, {max(0.0, left):.0f} are left"
    if part.part in AFTER_TRAIN:
        states = [other.state for other in parts if (other.part, other.preset) == ("train", part.preset)]
        if not states or states[0] not in ("waiting", "running", "done"):
            return f"there is no run of {part.preset} that ended well"
    return ""


def carry_out(
    parts: list[Part],
    start: Callable[[Part], Any],
    skip: Callable[[Part, str], None],
    clock: Any,
    seconds: float,
    GiB: float,
) -> None:
    """Runs the parts in order, side by side where they may be, until so many seconds have passed. start()
    returns None where a part cannot be begun, else what has its part and poll(): whether it has ended, and
    then it has set the part's state and seconds. clock: now(), in seconds since the report began, and
    pause()."""
    jobs: list[Any] = []
    while True:
        jobs = [job for job in jobs if not job.poll()]
        waiting = [part for part in parts if part.state == "waiting"]
        if not waiting and not jobs:
            return
        for part in waiting:
            why = why_not(part, parts, seconds - clock.now())
            if why:
                part.state = "skipped"
                skip(part, why)
        waiting = [part for part in waiting if part.state == "waiting"]
        part = next_part(waiting, [job.part for job in jobs], GiB)
        if part is None:
            clock.pause()
            continue
        part.state = "running"
        job = start(part)
        if job:
            jobs.append(job)


# ---------- what it will be
class ForeseenClock:
    """Goes on by a second at each pause."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def pause(self) -> None:
        self.seconds += 1.0


class ForeseenJob:
    """A part that takes as long as it is expected to take on this host."""

    def __init__(self, part: Part, clock: ForeseenClock, seconds: float) -> None:
        self.part = part
        self.clock = clock
        self.seconds = seconds
        self.end = clock.now() + seconds

    def poll(self) -> bool:
        if self.clock.now() < self.end:
            return False
        self.part.state = "done"
        self.part.seconds = self.seconds
        return True


def foreseen(parts: list[Part], GiB: float, seconds: float, slow: float) -> dict[str, float]:
    """{name of a part: second in which it ends} of those that will be done."""
    clock = ForeseenClock()
    ends: dict[str, float] = {}
    imagined = [copy.copy(part) for part in parts]
    for part in imagined:
        part.expected_s *= slow

    def start(part: Part) -> ForeseenJob:
        ends[part.name()] = clock.now() + part.expected_s
        return ForeseenJob(part, clock, part.expected_s)

    def skip(part: Part, why: str) -> None:
        pass

    carry_out(imagined, start, skip, clock, seconds, GiB)
    return ends


def minutes_for(parts: list[Part], GiB: float, slow: float) -> int:
    """How many minutes these parts would take, with the training that they need."""
    again = [copy.copy(part) for part in parts]
    for part in again:
        part.state = "waiting"
    ends = foreseen(again, GiB, 1e9, slow)
    return round(max(ends.values(), default=0.0) / 60 + 0.5)


def tell_plan(parts: list[Part], GiB: float, seconds: float, slow: float) -> list[str]:
    """Lines: how long all takes, which presets get to their scores and when, what is left out."""
    ends = foreseen(parts, GiB, seconds, slow)
    measured = len([part for part in parts if part.source.startswith("measured")])
    lines = [
        f"plan: {len(ends)} of {len(parts)} parts in {max(ends.values(), default=0.0) / 60:.1f} of "
        f"{seconds / 60:.1f} minutes, up to {MOST} side by side within {GiB:.0f} GiB; {measured} of their "
        "times were measured, the others are guesses"
    ]
    if slow > 1.1:
        lines.append(f"this host is slow: all is expected to take {slow:.1f} times as long")
    trains = [part for part in parts if part.part == "train" and part.unseen]
    if trains:
        told = [f"{part.preset} {ends[part.name()] / 60:.1f} min" for part in trains if part.name() in ends]
        late = [part.preset for part in trains if part.name() not in ends]
        line = f"not yet trained to its score on a card: {', '.join(told) or 'none'}"
        lines.append(line + (f"; cannot be done in this time: {', '.join(late)}" if late else ""))
    late = [part for part in parts if part.name() not in ends]
    if late:
        lines.append(f"will not fit: {by_kind(late)}")
    return lines


def by_kind(parts: list[Part]) -> str:
    """`train: golf, tiny; loop: golf`"""
    kinds: dict[str, list[str]] = {}
    for part in parts:
        kinds.setdefault(part.part, []).append(part.preset)
    return "; ".join([f"{kind}: {', '.join(presets)}" for kind, presets in kinds.items()])


def tell_rest(parts: list[Part], GiB: float) -> str:
    """What no card has shown after this report, and how long that takes."""
    undone = [part for part in parts if part.unseen and part.state != "done"]
    if not undone:
        return "all that was asked for has been seen on a card"
    presets = [part.preset for part in undone if part.part in AFTER_TRAIN]
    trains = [
        part for part in parts if part.part == "train" and part.preset in presets and part not in undone
    ]
    minutes = minutes_for([*trains, *undone], GiB, slowness(parts))
    return f"still unseen: {by_kind(undone)}; about {minutes} minutes"
