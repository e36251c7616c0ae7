"""Is this GPU ready, and which constants should change? Begins with what no card has shown yet.

    ./run.sh gpu-report [PRESET ...] [NAME=value ...]   all seven presets unless told otherwise
    ./run.sh gpu-report speedrun --only kernels loop    of train, score, resume, kernels, loop
    ./run.sh gpu-report --minutes 20                    plans for so many (10), and says what will not fit
    ./run.sh gpu-report --toy                           all of it on a CPU, at toy size: a rehearsal of itself

train: 20 steps by train_gpt.py itself, with validation, artifact, reading back and its score. score: the
file that it wrote, in a process of its own. resume: from its checkpoint to the same score. kernels:
attention's tiles and the loss, timed. loop: 200 steps, timed, and the operators outside of generated
kernels. Each part of each preset is a process of its own with a limit on its time. What is timed runs
alone, the others up to three side by side. Whether results are right at these sizes is asked by `./run.sh
test -m gpu`.

The plan reads docs/gpu_results/ and puts first what none of these reports shows. It expects of a part what
a table says, times what the parts so far have taken more than expected on this host, and starts nothing that
would not end in time. The last line says what is still unseen.

One verdict per line, and the same with its figures in gpu_report.json (--json FILE), which is valid whenever
the command is killed; nothing that it started goes on then. ok: as expected. FAULT: do not train before this
is fixed. SLOW: time that a run would lose. set: a constant or a line to change, since it gains more than
0.5 ms a step and a tenth of that part. note: nothing to judge. skip: not done, with the reason.

Shapes are those of one rank of eight, tokens are random. Exit code 1: some verdict is FAULT.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tools.gpu import agenda
from tools.gpu import results as gpu_results
from tools.gpu.agenda import PRESETS, SHOWS, Part
from tools.run import surroundings

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":  # for the processes of the parts, which are trainers, too
    os.environ.update(surroundings.allocator(os.environ))

MEASURED_TOY = "speedrun"  # of the toys that train, the one that is measured
TOY_GiB = 8.0
ENVIRONMENT_SECONDS = 11  # on one H100, 26 November 2026
LINES_SHOWN = 8  # of the output of what failed
PATIENCE = 2.0  # times what is expected on this host: then a part is stopped
LEAST_LIMIT = 60.0  # s
LEAST_LIMIT_ON_A_CPU = 600.0  # which may do other things, too: a toy, or the stand-in for a GPU


# ---------- the file
class Report:
    """All that is known, on the screen and in a JSON file, which is replaced as a whole at each change; the
    host of the plan."""

    def __init__(self, path: Path, args: argparse.Namespace) -> None:
        self.path = path
        self.began = time.perf_counter()
        self.parts: list[Part] = []
        git = subprocess.getoutput(f"git -C '{ROOT}' rev-parse --short HEAD 2>/dev/null")
        self.found: dict[str, Any] = dict(
            version=3, commit=git, toy=args.toy, complete=False,
            begun=datetime.now(UTC).isoformat(timespec="seconds"), minutes=args.minutes, given=args.given,
            machine={}, parts=[], operators={}, verdicts=[],
        )  # fmt: skip
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

    def say(self, part: Part, verdict: str, text: str) -> None:
        self.add(dict(part=part.part, preset=part.preset, verdict=verdict, text=text, figures={}))

    def skip(self, part: Part, why: str) -> None:
        self.say(part, "skip", f"{part.part}: {why}")

    def now(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self.began

    def pause(self) -> None:
        time.sleep(0.1)

    def left(self) -> float:
        """Seconds until it should end."""
        return 60 * self.found["minutes"] - self.now()


# ---------- processes
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def start_process(
    words: Sequence[str], folder: Path, env: Mapping[str, str], output: Path
) -> subprocess.Popen[bytes]:
    """A process in a group of its own, which the kernel kills when this one ends, however that ends."""
    parent = os.getpid()

    def bound_to_parent() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended in between
            os._exit(1)

    with open(output, "ab") as file:
        return subprocess.Popen(
            words, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True, preexec_fn=bound_to_parent,
        )  # fmt: skip


def stop_process(process: subprocess.Popen[bytes]) -> None:
    """Kills it with all that it started in its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Job:
    """A part that runs, in a folder of its own: what its process prints goes to output.txt, what it finds to
    events.jsonl."""

    def __init__(
        self, part: Part, words: Sequence[str], folder: Path, env: Mapping[str, str], report: Report
    ) -> None:
        self.part = part
        self.folder = folder
        self.report = report
        self.taken = 0  # lines of events
        self.began = time.perf_counter()
        on_cpu = report.found["toy"] or "STATIC_NAME" in os.environ
        expected = part.expected_s * agenda.slowness(report.parts)
        patient = max(LEAST_LIMIT_ON_A_CPU if on_cpu else LEAST_LIMIT, PATIENCE * expected)
        part.limit_s = min(patient, max(1.0, report.left()))
        self.cut = part.limit_s < patient  # by the end of the report, so it may be well if it is stopped
        self.process = start_process(words, folder, env, folder / "output.txt")
        print(f"...   {part.preset:8} {part.part}: started, at most {part.limit_s:.0f} s", flush=True)

    def take_events(self) -> None:
        """What the process has found since the last call, by whole lines: verdicts, machine, operators."""
        file = self.folder / "events.jsonl"
        lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
        found = self.report.found
        for line in lines[self.taken:]:
            event = json.loads(line)
            if "verdict" in event:
                self.report.add(event)
            if "operators" in event:
                found["operators"][self.part.preset] = event["operators"]
            found["machine"] = event.get("machine", found["machine"])
        self.taken = len(lines)

    def poll(self) -> bool:
        """Takes what is new. Has it ended?"""
        code = self.process.poll()
        self.take_events()
        self.part.seconds = round(time.perf_counter() - self.began, 1)
        if code is None and self.part.seconds <= self.part.limit_s:
            return False
        stop_process(self.process)  # and what it may have left
        self.part.state = "done"
        if code != 0:
            self.fail(code)
        self.report.write()
        return True

    def fail(self, code: int | None) -> None:
        """Why it did not end well, with its last lines; None: it ran longer than it may."""
        part = self.part
        text = (self.folder / "output.txt").read_text(encoding="utf-8", errors="replace")
        part.last_lines = [line.rstrip()[:200] for line in text.splitlines() if line.strip()][-LINES_SHOWN:]
        part.state = "stopped" if code is None else "failed"
        verdict = "FAULT"
        why = f"exit code {code}"
        if code is None:
            why = f"stopped after {part.seconds:.0f} s"
            verdict = "skip" if self.cut else "FAULT"
        elif code < 0:
            why = f"ended by {signal.Signals(-code).name}"
        self.report.say(part, verdict, f"{part.part}: {why}; its last lines:")
        for line in part.last_lines:
            print(f"      | {line}", flush=True)


def job_of(part: Part, args: argparse.Namespace, report: Report, folder: Path) -> Job:
    """Starts a part in a folder of its own, beside those of the others. Side by side each compiler would
    start as many workers as there are cores."""
    own = folder / part.name().replace(" ", "_")
    own.mkdir()
    spec = json.dumps(dict(part=part.part, preset=part.preset, given=args.given, toy=args.toy))
    env = dict(os.environ, PYTHONUNBUFFERED="1")
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    if args.toy:
        env["OMP_NUM_THREADS"] = "1"
    else:
        workers = max(2, len(os.sched_getaffinity(0)) // agenda.MOST)
        env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(workers))
    return Job(part, [sys.executable, "-m", "tools.gpu.parts", spec], own, env, report)


# ---------- the command
def parse(argv: list[str]) -> argparse.Namespace:
    """The words of the command; presets and given {NAME: value} apart."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="PRESET or NAME=value")
    parser.add_argument("--toy", action="store_true", help="on a CPU, at toy size")
    parser.add_argument("--only", nargs="+", choices=SHOWS, default=[*SHOWS], help="parts; by default all")
    parser.add_argument("--json", type=Path, default=Path("gpu_report.json"))
    parser.add_argument("--minutes", type=float, default=10.0)
    args = parser.parse_intermixed_args(argv)
    if {*args.only} & {*agenda.AFTER_TRAIN} and "train" not in args.only:
        args.only.insert(0, "train")  # whose file and checkpoint they take
    args.presets = [word for word in args.words if "=" not in word] or [*PRESETS]
    args.given = dict([word.split("=", 1) for word in args.words if "=" in word])
    return args


def conclude(report: Report, complete: bool) -> int:
    """The last lines; the exit code."""
    counts = Counter([row["verdict"] for row in report.found["verdicts"]])
    report.found |= dict(complete=complete, seconds=round(report.now(), 1))
    report.write()
    print(
        f"\n{counts['FAULT']} faults, {counts['SLOW']} slow, {counts['ok']} ok, {counts['skip']} skipped in "
        f"{report.now():.0f} s; {report.path} has the figures."
    )
    planned_some = report.parts[1:]  # beyond the environment: without a GPU nothing was planned
    if planned_some and not report.found["toy"]:
        print(agenda.tell_rest(report.parts))
    return int(counts["FAULT"] > 0)


def planned(args: argparse.Namespace) -> list[Part]:
    """The parts that are asked for; of a toy those that do not train are done of one preset."""
    shown = gpu_results.shown(gpu_results.reports())
    seen = [(preset, goal) for preset, goal, given in shown if not given]
    parts = agenda.make_plan(args.presets, args.only, seen, args.toy)
    if args.toy and len(args.presets) > 1:
        parts = [part for part in parts if part.part == "train" or part.preset == MEASURED_TOY]
    return parts


def measure(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """The environment first, since the plan needs the GPU's memory and how fast this host is; then all
    parts."""

    def start(part: Part) -> Job:
        return job_of(part, args, report, folder)

    report.parts = [Part("environment", "", ENVIRONMENT_SECONDS, 0)]
    agenda.carry_out(report.parts, start, report, 0)
    machine = report.found["machine"]
    if not args.toy and not machine.get("gpu"):
        text = "torch finds no GPU, so no preset was measured: --toy rehearses on a CPU"
        report.say(report.parts[0], "FAULT", text)
        return
    rest = planned(args)
    GiB = agenda.MEMORY_SHARE * machine.get("memory_GiB", TOY_GiB)
    slow = agenda.slowness(report.parts)
    print(*agenda.tell_plan(rest, GiB, report.left(), slow), sep="\n", flush=True)
    report.parts += rest
    agenda.carry_out(report.parts, start, report, GiB)


def main(argv: list[str]) -> int:
    args = parse(argv)
    print("...   importing torch", flush=True)
    from tools.run.names import constants_of
    from train_gpt import RECIPES

    unknown = {*args.presets} - {*RECIPES}
    unknown |= {*args.given}.difference(*[constants_of(preset) for preset in RECIPES])
    if unknown:
        word = min(unknown)
        print(f"gpu-report: {word} is neither a constant nor one of {', '.join(RECIPES)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="gpu_report_") as folder:
        report = Report(args.json, args)
        try:
            measure(args, report, Path(folder))
        except KeyboardInterrupt:
            conclude(report, complete=False)
            return 130
    return conclude(report, complete=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
