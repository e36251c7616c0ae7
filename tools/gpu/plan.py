"""The plan of gpu-report: its parts, what each is expected to need, and the processes that run them.

Nothing here imports torch, so the process that plans, waits and writes the JSON file never touches the GPU.
"""

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# In the order in which they are done. What is timed runs alone, the others side by side.
PARTS = ["environment", "ranks", "train", "score", "numbers", "losses", "loop", "alternatives"]
ALONE = {"environment", "loop", "alternatives"}
OF_A_PRESET = ["train", "score", "numbers", "losses", "loop", "alternatives"]
PRESETS = [
    "tiny",
    "golf",
    "speedrun",
    "gpt2",
    "speedrun_plus",
    "golf_plus",
    "gpt2_plus",
]  # dearest to know first
# By which share of the minutes a kind of part must be done, so that the kinds after it get some; what is then
# left over goes to those that were put off.
SHARES = dict(environment=1.0, ranks=1.0, train=0.65, score=0.7, numbers=0.78, losses=0.84, loop=0.97,
              alternatives=1.0)
LINES_SHOWN = 8  # of the output of what failed
PATIENCE = 3.0  # times the expected seconds: then a part is stopped
LEAST_LIMIT = 60.0  # s
LEAST_LIMIT_ON_A_CPU = 600.0  # which may do other things, too: a toy, or the stand-in for a GPU
MEMORY_SHARE = 0.95  # of the GPU's, that parts side by side may fill by their own account
# What `train` counts for there: most of its time it compiles, and its steps come when others are done. On 27
# November six presets that need 117 GiB were side by side on 79; three reached their steps, after 60, 154
# and 200 s, and none ran out of memory. One that does runs again, alone.
TRAIN_SHARE = 0.65
HEARTBEAT = 15.0  # s between two lines about a part of which nothing new is known
QUIET = 3.0  # s after such a line, in which what it does next gets none


class Need(NamedTuple):
    """What a part is expected to need."""

    seconds: float
    GiB: float
    source: str  # where the seconds come from


# One H100 80GB HBM3 with 16 cores, 26 and 27 November 2026, torch 2.11.0 (docs/gpu_results/): "measured" is
# what a command printed, for what was in it; a share of such a time is a guess, as is whatever has no figure
# there. The commands that compiled ran beside others, on the 27th all seven presets side by side.
GUESS = "guess"
NEEDS = {
    # `--only environment,ranks` took 24 s
    ("environment", ""): Need(11, 0, "measured"),
    ("ranks", ""): Need(26, 0, "measured beside others"),
    ("train", "tiny"): Need(90, 2, "guess: 41 s of compiling measured beside others"),
    ("train", "golf"): Need(121, 8, "measured beside others, of which 49 compiling; 7.2 GiB"),
    ("train", "golf_plus"): Need(130, 15, "guess: 94 s of compiling measured; 14.1 GiB measured"),
    ("train", "speedrun"): Need(250, 28, "guess: 189 s of compiling measured; 27.0 GiB measured"),
    ("train", "speedrun_plus"): Need(240, 36, GUESS),
    # 188 s on one core to compile depth 26; 36.0 GiB for one row by the trainer's own plan
    ("train", "gpt2"): Need(330, 37, "guess: still compiling after 215 s; GiB of the plan"),
    ("train", "gpt2_plus"): Need(330, 37, "guess: 225 s at depth 12, measured beside others"),
    ("score", "tiny"): Need(25, 2, GUESS),
    ("score", "golf"): Need(47, 5, "measured beside others"),
    ("score", "golf_plus"): Need(30, 8, GUESS),
    ("score", "speedrun"): Need(50, 20, GUESS),
    ("score", "speedrun_plus"): Need(60, 30, GUESS),
    ("score", "gpt2"): Need(90, 20, GUESS),
    ("score", "gpt2_plus"): Need(90, 20, GUESS),
    ("numbers", "tiny"): Need(30, 2, GUESS),
    # golf, numbers and loop together: 78.7 s, speedrun 197.7 s and 41.2 GiB, golf_plus 152.0 s and 14.1 GiB
    ("numbers", "golf"): Need(30, 6, "guess: a part of 79 s measured"),
    ("numbers", "golf_plus"): Need(30, 10, "guess: a part of 152 s measured"),
    ("numbers", "speedrun"): Need(50, 42, "guess: a part of 198 s measured; 41.2 GiB measured"),
    ("numbers", "speedrun_plus"): Need(50, 60, GUESS),
    ("numbers", "gpt2"): Need(60, 60, GUESS),
    ("numbers", "gpt2_plus"): Need(60, 60, GUESS),
    ("losses", "tiny"): Need(45, 2, GUESS),
    ("losses", "golf"): Need(50, 10, "guess: a part of 79 s measured; 9.1 GiB measured"),
    ("losses", "golf_plus"): Need(70, 15, "guess: a part of 152 s measured; 14.1 GiB measured"),
    ("losses", "speedrun"): Need(80, 42, "guess: a part of 198 s measured; 41.2 GiB measured"),
    ("losses", "speedrun_plus"): Need(100, 60, GUESS),
    ("losses", "gpt2"): Need(220, 74, GUESS),
    ("losses", "gpt2_plus"): Need(220, 74, GUESS),
    # golf, alternatives and loop together, alone and with filled caches: 31.3 s
    ("loop", "tiny"): Need(40, 2, GUESS),
    ("loop", "golf"): Need(25, 8, "guess: a part of 31 s measured; 7.1 GiB measured"),
    ("loop", "golf_plus"): Need(70, 15, GUESS),
    ("loop", "speedrun"): Need(75, 28, "measured: 75.2 s, of which 46.3 compiling; 27.0 GiB"),
    ("loop", "speedrun_plus"): Need(90, 60, GUESS),
    ("loop", "gpt2"): Need(360, 74, GUESS),
    ("loop", "gpt2_plus"): Need(360, 74, GUESS),
    ("alternatives", "tiny"): Need(30, 2, GUESS),
    ("alternatives", "golf"): Need(15, 6, "guess: a part of 31 s measured"),
    ("alternatives", "golf_plus"): Need(25, 10, GUESS),
    ("alternatives", "speedrun"): Need(50, 30, GUESS),
    ("alternatives", "speedrun_plus"): Need(60, 40, GUESS),
    ("alternatives", "gpt2"): Need(40, 40, GUESS),
    ("alternatives", "gpt2_plus"): Need(40, 40, GUESS),
}
# A rehearsal: measured on two cores of an EPYC with other work, 27 November 2026
TOY_NEEDS = {
    "environment": 5.0,
    "train": 10.0,
    "score": 8.0,
    "numbers": 15.0,
    "losses": 20.0,
    "ranks": 12.0,
    "loop": 20.0,
    "alternatives": 10.0,
}
COMPILED_TOY = "speedrun"  # the one toy that is compiled and measured; the others just train
TOY_LONGER = dict(speedrun=60.0, speedrun_plus=15.0)  # s more to train: to compile, and for 11 layers


@dataclass
class Part:
    """A part of the report, run by a process of its own, and what became of it."""

    part: str
    preset: str
    expected_s: float
    GiB: float
    source: str
    state: str = "waiting"  # running, done, failed, stopped or skipped
    doing: str = ""
    seconds: float = 0.0
    limit_s: float = 0.0
    compile_seconds: float = 0.0
    peak_GiB: float = 0.0
    last_lines: list[str] = field(default_factory=list)
    again: bool = False  # alone, since memory ran out beside others

    def name(self) -> str:
        return f"{self.preset} {self.part}".strip()

    def alone(self) -> bool:
        return self.part in ALONE

    def counted_GiB(self) -> float:
        """What it counts for beside others."""
        return self.GiB * (TRAIN_SHARE if self.part == "train" else 1.0)


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


def needed(part: str, preset: str, earlier: dict[tuple[str, str], Need], toy: bool) -> Need:
    """By an earlier report, else by the table."""
    if (part, preset) in earlier:
        return earlier[part, preset]
    if toy:
        longer = TOY_LONGER.get(preset, 0.0) if part == "train" else 0.0
        return Need(TOY_NEEDS[part] + longer, 1, "measured on two cores")
    return NEEDS.get((part, preset)) or Need(120, 40, GUESS)


def make_plan(
    presets: list[str], only: list[str], earlier: dict[tuple[str, str], Need], toy: bool
) -> list[Part]:
    """The parts in order: kind by kind, and in each the presets, the dearest to know first."""
    found = []
    ordered = [preset for preset in PRESETS if preset in presets]
    if toy and COMPILED_TOY in ordered:  # takes longest
        ordered.remove(COMPILED_TOY)
        ordered.insert(0, COMPILED_TOY)
    for part in PARTS:
        if part not in only:
            continue
        its = ordered if part in OF_A_PRESET else [""]
        if toy and part in OF_A_PRESET and part != "train" and len(ordered) > 1:
            its = [preset for preset in ordered if preset == COMPILED_TOY]
        for preset in its:
            need = needed(part, preset, earlier, toy)
            found.append(Part(part, preset, need.seconds, need.GiB, need.source))
    return found


def next_part(waiting: list[Part], running: list[Part], GiB: float, most: int) -> Part | None:
    """The first part that may start: alone, or beside others within memory and number. One whose preset
    still trains waits, since it would compile the same again, and lets others pass. A part larger than the
    GPU by its own account is tried when nothing else runs."""
    if not running:
        return waiting[0] if waiting else None
    if any([other.alone() for other in running]) or len(running) >= most:
        return None
    training = [other.preset for other in running if other.part == "train"]
    for part in waiting:
        if part.preset in training:
            continue
        fits = part.counted_GiB() + sum([other.counted_GiB() for other in running]) <= GiB
        return part if fits and not part.alone() else None
    return None


def latest_ends(parts: list[Part], seconds: float) -> dict[str, float]:
    """{kind: second by which its parts must be done}, of so many in all. The last kind has all of them."""
    shares = [SHARES[part.part] for part in parts if part.part not in ("environment", "ranks")]
    last = max(shares, default=1.0)
    return {kind: seconds * min(1.0, share / last) for kind, share in SHARES.items()}


def foreseen(parts: list[Part], GiB: float, most: int, minutes: float) -> list[tuple[Part, float]]:
    """[(part, second of its end)] if all takes as long as expected; -1: it will not fit."""
    now = 0.0
    seconds = 60 * minutes
    ends = latest_ends(parts, seconds)
    waiting = [*parts]
    put_off: list[Part] = []
    running: list[tuple[float, Part]] = []
    found = []
    while waiting or running or put_off:
        if not waiting and not running:
            waiting = put_off
            put_off = []
            ends = dict.fromkeys(SHARES, seconds)
        part = next_part(waiting, [other for _, other in running], GiB, most)
        if part:
            waiting.remove(part)
            end = now + part.expected_s
            if end > ends[part.part]:
                if ends[part.part] < seconds:
                    put_off.append(part)
                else:
                    found.append((part, -1.0))
                continue
            running.append((end, part))
            found.append((part, end))
        else:
            running.sort(key=lambda pair: pair[0])
            now, _ = running.pop(0)
    return found


def tell_plan(parts: list[Part], GiB: float, most: int, minutes: float) -> list[str]:
    """Lines: how long all takes, what will not fit, and how much of this was measured."""
    ends = foreseen(parts, GiB, most, minutes)
    last = max([end for _, end in ends], default=0.0)
    late = [part.name() for part, end in ends if end < 0]
    measured = len([part for part in parts if part.source.startswith("measured")])
    known = "as measured before"
    if measured < len(parts):
        known = f"{measured} of these times were measured, the others are guesses"
    lines = [
        f"plan: {len(parts)} parts in {last / 60:.1f} of {minutes:.1f} minutes, up to {most} side by side "
        f"within {GiB:.0f} GiB; {known}"
    ]
    if late:
        lines.append(f"will not fit: {', '.join(late)}")
    return lines


# ---------- the file
class Report:
    """All that is known, on the screen and in a JSON file, which is replaced as a whole at each change."""

    def __init__(self, path: Path, toy: bool, minutes: float, commit: str, begun: str) -> None:
        self.path = path
        self.began = time.perf_counter()
        self.seconds = 60 * minutes
        self.found: dict[str, Any] = dict(
            version=2,
            commit=commit,
            toy=toy,
            complete=False,
            begun=begun,
            minutes=minutes,
            machine={},
            parts=[],
            operators={},
            verdicts=[],
        )
        self.parts: list[Part] = []
        self.write()

    def write(self) -> None:
        self.found["parts"] = [asdict(part) for part in self.parts]
        new = self.path.with_name(self.path.name + ".tmp")
        new.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
        os.replace(new, self.path)

    def add(self, row: dict[str, Any]) -> None:
        """A verdict: ok, FAULT, SLOW, set, note or skip."""
        self.found["verdicts"].append(row)
        self.write()
        print(f"{row['verdict']:5} {row['preset']:8} {row['text']}", flush=True)
        for line in row["figures"].get("last_lines", []):
            print(f"      | {line}", flush=True)

    def say(self, part: Part, verdict: str, text: str, **figures: Any) -> None:
        self.add(dict(part=part.part, preset=part.preset, verdict=verdict, text=text, figures=figures))

    def left(self) -> float:
        """Seconds until the report should end."""
        return self.seconds - (time.perf_counter() - self.began)


# ---------- processes
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def start_process(
    words: Sequence[str | Path], folder: Path, env: Mapping[str, str], output: Path
) -> subprocess.Popen:
    """A process in a group of its own, which the kernel kills when this one ends, however that ends."""
    parent = os.getpid()

    def bound_to_parent() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended in between
            os._exit(1)

    with open(output, "ab") as file:
        return subprocess.Popen(
            [str(word) for word in words],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=bound_to_parent,
        )


def stop_process(process: subprocess.Popen) -> None:
    """Kills it with all that it started in its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def last_lines(path: Path, most: int = LINES_SHOWN) -> list[str]:
    """The last lines of a file that say something."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.rstrip()[:200] for line in lines if line.strip()][-most:]


class Tail:
    """The whole lines that a file has got since it was last asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0

    def lines(self) -> list[str]:
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self.position)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self.position += len(whole)
        return whole.decode(errors="replace").splitlines()


class Command(NamedTuple):
    """How to run a part. read: an event of a line of `events`, or None; finish: what to say when it has ended
    well."""

    words: list[str | Path]
    folder: Path
    env: dict[str, str]
    output: Path
    events: Path
    read: Callable[[str], dict[str, Any] | None]
    finish: Callable[["Job"], None]


class Job:
    """A part that runs."""

    def __init__(self, part: Part, command: Command, report: Report) -> None:
        self.part = part
        self.command = command
        self.report = report
        self.tail = Tail(command.events)
        self.began = time.perf_counter()
        part.state = "running"
        on_cpu = report.found["toy"] or "STATIC_NAME" in os.environ
        self.least = LEAST_LIMIT_ON_A_CPU if on_cpu else LEAST_LIMIT
        part.limit_s = min(max(self.least, PATIENCE * part.expected_s), max(1.0, report.left()))
        self.told = self.began
        self.shared = False  # did others run beside it?
        self.out_of_memory = False  # and did it lack memory then?
        self.process = start_process(command.words, command.folder, command.env, command.output)
        self.tell("starting")

    def tell(self, doing: str) -> None:
        """A line about what it does now."""
        self.part.doing = doing
        self.told = time.perf_counter()
        print(
            f"...   {self.part.preset:8} {self.part.part}: {doing}, {self.told - self.began:.0f} s",
            flush=True,
        )

    def take(self, event: dict[str, Any]) -> None:
        """What the process told: a verdict, what it does, or figures of its part."""
        if "verdict" in event:
            if event["verdict"] == "FAULT" and self.lacked_memory(event["text"]):
                event["verdict"] = "note"
                event["text"] += "; others ran beside it, so once more, alone"
            self.report.add(event)
        if "doing" in event and event["doing"] != self.part.doing:
            self.part.doing = event["doing"]
            if time.perf_counter() - self.told > QUIET:
                self.tell(self.part.doing)
        if "machine" in event:
            self.report.found["machine"] = event["machine"]
        if "operators" in event:
            self.report.found["operators"][self.part.preset] = event["operators"]
        for name in ("compile_seconds", "peak_GiB"):
            if name in event:
                setattr(self.part, name, event[name])

    def lacked_memory(self, text: str) -> bool:
        """Is that what the text says, of a part that others ran beside? Then it tells nothing yet."""
        if "out of memory" in text.lower() and self.shared and not self.part.again:
            self.out_of_memory = True
            return True
        return False

    def poll(self) -> bool:
        """Takes what is new. Has it ended?"""
        code = self.process.poll()
        for line in self.tail.lines():
            event = self.command.read(line)
            if event:
                self.take(event)
        self.part.seconds = round(time.perf_counter() - self.began, 1)
        if code is None and self.part.seconds <= self.part.limit_s:
            if time.perf_counter() - self.told > HEARTBEAT:
                self.tell(self.part.doing)
            return False
        self.end(code)
        return True

    def end(self, code: int | None) -> None:
        """What became of it; None: it ran longer than it may. What failed shows its last lines."""
        stop_process(self.process)  # and what it may have left
        if code == 0:
            self.part.state = "done"
            self.command.finish(self)
            self.report.write()
            return
        self.part.state = "stopped" if code is None else "failed"
        self.part.last_lines = last_lines(self.command.output)
        if code is None:
            why = f"stopped after {self.part.seconds:.0f} s, at: {self.part.doing}"
        elif code < 0:
            why = f"ended by {signal.Signals(-code).name}, at: {self.part.doing}"
        else:
            why = f"exit code {code}, at: {self.part.doing}"
        if self.lacked_memory(" ".join(self.part.last_lines)):
            why = "out of memory beside others; once more, alone"
            self.report.say(self.part, "note", f"{self.part.part}: {why}")
            return
        # where time was cut short by the end of the report, the part may be well
        cut = code is None and self.part.limit_s < max(self.least, self.part.expected_s)
        self.report.say(
            self.part, "skip" if cut else "FAULT", f"{self.part.part}: {why}", last_lines=self.part.last_lines
        )


def carry_out(
    report: Report, command_of: Callable[[Part], Command], most: int, memory: Callable[[], float]
) -> None:
    """Runs the parts of a report in order, side by side where they may be. memory: GiB that they may fill.
    However this ends, nothing that it started goes on."""
    waiting = [part for part in report.parts if part.state == "waiting"]
    put_off: list[Part] = []
    ends = latest_ends(waiting, report.seconds)
    jobs: list[Job] = []
    try:
        while waiting or jobs or put_off:
            if not waiting and not jobs:
                waiting = put_off
                put_off = []
                ends = dict.fromkeys(SHARES, report.seconds)
            ended = [job for job in jobs if job.poll()]
            jobs = [job for job in jobs if job not in ended]
            for part in [job.part for job in ended if job.out_of_memory]:
                part.again = True
                part.state = "waiting"
                part.GiB = max(part.GiB, memory())
                waiting.append(part)
            while part := next_part(waiting, [job.part for job in jobs], memory(), most):
                waiting.remove(part)
                left = report.left()
                if report.seconds - left + part.expected_s > ends[part.part]:
                    if ends[part.part] < report.seconds:
                        put_off.append(part)
                        continue
                    part.state = "skipped"
                    report.say(
                        part,
                        "skip",
                        f"{part.part}: needs about {part.expected_s:.0f} s, {max(0.0, left):.0f} are left",
                    )
                    continue
                try:
                    command = command_of(part)
                except Exception as error:  # such as constants that the trainer refuses
                    part.state = "failed"
                    report.say(part, "FAULT", f"{part.part}: {str(error) or type(error).__name__}")
                    continue
                jobs.append(Job(part, command, report))
                for job in jobs:
                    job.shared = job.shared or len(jobs) > 1
                report.write()
            time.sleep(0.1)
    finally:
        for job in jobs:
            stop_process(job.process)
            job.part.state = "stopped"
        report.write()
