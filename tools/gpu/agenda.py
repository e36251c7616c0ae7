"""The plan of gpu-report: what no card has shown comes first, and nothing starts that the time left cannot
hold.

Nothing here imports torch, starts a process or knows what time it is: a part is begun by a function and
ends by the poll() of what that returns, on a host whose clock is given.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

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
ALONE = ("environment", "kernels", "loop")
AFTER_TRAIN = ("score", "resume")
GOALS = [goal for goals in SHOWS.values() for goal in goals]
PRESETS = ("tiny", "golf", "golf_plus", "speedrun", "speedrun_plus", "gpt2", "gpt2_plus")
WITH_ARTIFACT = ("tiny", "golf", "golf_plus")  # the others have no file that is read back before the end
LARGE = ("gpt2", "gpt2_plus")  # checkpoints of 19 and 16 GiB, two of each: they are not resumed
MOST = 3  # processes side by side: with seven on 16 cores each of them compiled for minutes
MEMORY_SHARE = 0.95  # of the GPU's, that parts side by side may fill by their own account
FASTEST = 0.5  # a host is never taken to be faster than this

# Seconds and GiB that a part needs, mostly guesses. Measured on one H100 80GB HBM3 with 16 cores, 26 and 27
# November 2026, torch 2.11.0 (docs/gpu_results/): train, score and loop of golf; loop of
# speedrun, 46 s of which were compiling; GiB of golf, golf_plus and speedrun.
SECONDS = dict(
    train=dict(tiny=90, golf=121, golf_plus=130, speedrun=250, speedrun_plus=240, gpt2=330, gpt2_plus=330),
    score=dict(tiny=25, golf=47, golf_plus=30, speedrun=50, speedrun_plus=60, gpt2=90, gpt2_plus=90),
    # its graphs are in the cache by then
    resume=dict(tiny=54, golf=73, golf_plus=78, speedrun=150, speedrun_plus=144),
    kernels=dict(tiny=20, golf=20, golf_plus=25, speedrun=50, speedrun_plus=80, gpt2=60, gpt2_plus=60),
    loop=dict(tiny=40, golf=25, golf_plus=70, speedrun=75, speedrun_plus=90, gpt2=360, gpt2_plus=360),
)
TRAIN_GiB = dict(tiny=2, golf=8, golf_plus=15, speedrun=28, speedrun_plus=36, gpt2=37, gpt2_plus=37)
LARGEST_GiB = dict(tiny=2, golf=10, golf_plus=15, speedrun=42, speedrun_plus=60, gpt2=74, gpt2_plus=74)
TOY_SECONDS = 12  # on two cores of an EPYC that had other work, 28 November 2026


def needed(part: str, preset: str, toy: bool) -> tuple[float, float]:
    """(seconds, GiB) by the tables."""
    if toy:
        return TOY_SECONDS, 1
    of_part = LARGEST_GiB if part in ALONE else TRAIN_GiB
    return SECONDS[part][preset], of_part[preset]


# ---------- the parts
@dataclass
class Part:
    """A part of the report, run by a process of its own, and what became of it."""

    part: str
    preset: str
    expected_s: float
    GiB: float
    unseen: list[str] = field(default_factory=list)  # what it would show that no card has shown
    state: str = "waiting"  # running, done, failed, stopped or skipped
    seconds: float = 0.0
    limit_s: float = 0.0
    last_lines: list[str] = field(default_factory=list)

    def name(self) -> str:
        return f"{self.preset} {self.part}".strip()


def make_plan(
    presets: Iterable[str],
    only: Iterable[str],
    seen: Iterable[tuple[str, str]],
    toy: bool,
) -> list[Part]:
    """The parts in order. seen: (preset, goal) that a card has shown. First training that no card has
    shown, the cheapest first; then scores and RESUME, with the training that they need; then what is timed;
    then, in the same order, what has been seen before."""
    seen = {*seen}
    parts = []
    for part in only:
        for preset in presets:
            if part == "resume" and preset in LARGE:
                continue
            seconds, GiB = needed(part, preset, toy)
            goals = [goal for goal in SHOWS[part] if goal != "reads back" or preset in WITH_ARTIFACT]
            unseen = [goal for goal in goals if (preset, goal) not in seen]
            parts.append(Part(part, preset, seconds, GiB, unseen))
    train_seconds = {part.preset: part.expected_s for part in parts if part.part == "train"}
    needs_training = {part.preset for part in parts if part.part in AFTER_TRAIN and part.unseen}
    groups = dict(train=0, score=1, resume=1, kernels=2, loop=2)

    def place(part: Part) -> tuple[bool, int, float, int]:
        again = not part.unseen
        group = groups[part.part]
        if part.part == "train" and again and part.preset in needs_training:
            again = False
            group = 1
        return again, group, train_seconds.get(part.preset, part.expected_s), [*SHOWS].index(part.part)

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


def carry_out(parts: list[Part], start: Callable[[Part], Any], host: Any, GiB: float) -> None:
    """Runs the parts in order, side by side where they may be, while there is time. start() returns what has
    its part and poll(): whether it has ended, and then it has set the part's state and seconds. host: left(),
    seconds until the end, pause(), and skip(part, why)."""
    jobs: list[Any] = []
    while True:
        jobs = [job for job in jobs if not job.poll()]
        waiting = [part for part in parts if part.state == "waiting"]
        if not waiting and not jobs:
            return
        for part in waiting:
            why = why_not(part, parts, host.left())
            if why:
                part.state = "skipped"
                host.skip(part, why)
        waiting = [part for part in waiting if part.state == "waiting"]
        part = next_part(waiting, [job.part for job in jobs], GiB)
        if part is None:
            host.pause()
            continue
        part.state = "running"
        jobs.append(start(part))


# ---------- in words
def tell_plan(parts: list[Part], GiB: float, seconds: float, slow: float) -> list[str]:
    """Lines: how much there is to do, and what comes first."""
    total = slow * sum([part.expected_s for part in parts]) / 60
    lines = [
        f"plan: {len(parts)} parts, about {total:.0f} min one after another, up to {MOST} side by side "
        f"within {GiB:.0f} GiB, for {seconds / 60:.1f} min"
    ]
    trains = [part.preset for part in parts if part.part == "train" and part.unseen]
    if trains:
        lines.append(f"not yet trained to its score on a card, so first: {', '.join(trains)}")
    return lines


def tell_rest(parts: list[Part]) -> str:
    """What no card has shown after this report, and about how long it takes."""
    undone = [part for part in parts if part.unseen and part.state != "done"]
    if not undone:
        return "all that was asked for has been seen on a card"
    minutes = slowness(parts) * sum([part.expected_s for part in undone]) / 60
    names = ", ".join([part.name() for part in undone])
    return f"still unseen: {names}; about {minutes:.0f} minutes one after another"
