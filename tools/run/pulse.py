"""Notices that a run stands still, by its lines and events.jsonl, and which rank is to blame."""
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LEAST = 120.0  # seconds of silence that are never too long
SAVING = 600.0  # more of them where checkpoints are written: some disks are slow
PAUSED = 30.0  # who did not look for so long was stopped, too, as by Ctrl-Z
SLOWER = 10  # so many times the slowest step so far is much longer
LONGER = 3  # and so many times the longest silence so far
DEAF = re.compile(r"train_gpt: rank (\d+): another rank is gone or hangs")
FOLDER = re.compile(r"run folder: (.+)")


class Pulse:
    """When a run gave its last sign of life, and how long it may be silent. Only training has a pace; while a
    run compiles, counts or scores, it may be silent for as long as it likes."""

    def __init__(self, ranks: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.ranks = ranks
        self.clock = clock
        self.last = clock()  # sign of life
        self.looked = clock()
        self.folder: Path | None = None
        self.place = 0  # in events.jsonl, up to which it was read
        self.config: dict[str, str] = {}
        self.training = False
        self.report: dict[str, Any] = {}  # the last one of a step
        self.slowest = 0.0  # seconds of a step
        self.longest = 0.0  # silence so far
        self.deaf: set[int] = set()  # ranks that waited for another one in vain

    def line(self, line: str) -> None:
        """A line of the run's output."""
        if found := DEAF.match(line):
            self.deaf.add(int(found[1]))
        if found := FOLDER.match(line):
            self.folder = Path(found[1])
        self.sign()
        if line.startswith("evaluating "):
            self.training = False

    def skip_events(self, run_id: str) -> None:
        """Those that are there already are of an earlier attempt."""
        path = Path("logs", run_id, "events.jsonl")
        if path.exists():
            self.place = path.stat().st_size

    def sign(self) -> None:
        now = self.clock()
        if self.training:
            self.longest = max(self.longest, now - self.last)
        self.last = now

    def read_events(self) -> list[dict[str, Any]]:
        """Takes in what events.jsonl has got since the last time, and returns it."""
        path = Path(self.folder or "", "events.jsonl")
        if not self.folder or not path.exists():
            return []
        with open(path, "rb") as file:
            file.seek(self.place)
            whole, newline, _ = file.read().rpartition(b"\n")  # the last line may be under way
        self.place += len(whole + newline)
        events = [json.loads(line) for line in whole.splitlines() if line.strip()]
        for event in events:
            self.take(event)
        return events

    def take(self, event: dict[str, Any]) -> None:
        """Takes in what an event tells of the run's pace."""
        kind = event["kind"]
        self.sign()
        if kind == "start":
            self.config = event["config"]
            self.report = {}
        if kind == "train":
            steps = event["step"] - self.report.get("step", 0)
            if self.report and steps > 0:  # the first step also counts n-grams
                self.slowest = max(self.slowest, (event["seconds"] - self.report["seconds"]) / steps)
            self.report = event
            self.training = event["step"] < event["steps"]
        elif kind not in ("val_part", "checkpoint"):
            self.training = False

    def number(self, name: str) -> float:
        """A constant of the run; 0 if it has none of that name."""
        return float(self.config.get(name) or 0)

    def may_be_silent(self) -> float:
        """Seconds until the next sign of life is overdue."""
        step = self.report["step"]
        every = int(self.number("train_log_every")) or 100
        steps = 1 if step < 10 else every - step % every
        seconds = LEAST + SLOWER * self.slowest * steps + LONGER * self.longest
        saves = self.number("save_every") or self.number("save_every_seconds")
        return seconds + SAVING if saves else seconds

    def overdue(self) -> str:
        """What to say if the run stands still by the events that were read, else empty."""
        now = self.clock()
        if now - self.looked > PAUSED:
            self.last = now
        self.looked = now
        silent = now - self.last
        if not self.training or silent < self.may_be_silent():
            return ""
        return (f"run.sh: nothing has happened for {silent:.0f} s after step {self.report['step']}, where no "
                f"step took longer than {self.slowest:.2g} s: the run hangs and is stopped")

    def blame(self) -> str:
        """Which ranks did not say that they waited for another one, if some did; else empty."""
        silent = sorted({*range(self.ranks)} - self.deaf)
        if not self.deaf or not silent:
            return ""
        names = ", ".join(map(str, silent))
        return f"run.sh: rank {names} did not answer the others: it is gone or hangs"
