"""Which lines of a script run, in whatever process: mutation.py has this imported by the script's copy.

Each new line of the present context is appended at once to a file, so that a process that is killed loses
nothing. Other processes learn the context, the name of a test, from a file: those that a test starts, and
those that it forks. sys.settrace does it, as sys.monitoring needs Python 3.12, and coverage.py keeps a
process's lines until it ends in an orderly way, which ranks that tests kill do not.
"""
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

TraceFunction = Callable[[FrameType, str, Any], Any]


class Trace:
    """The trace of this process. folder: where the files `context` and `lines` are."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.scripts: set[str] = set()
        self.context = ""
        self.seen: set[int] = set()

    def begin(self, folder: Path | str, with_lines: bool = True) -> None:
        """In the process that runs the tests; before torch is imported."""
        self.folder = Path(folder)
        self.read_context()
        if with_lines:
            os.environ["TORCHDYNAMO_DISABLE"] = "1"     # compiled functions would run without their lines
            self.output = os.open(self.folder / "lines", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.register_at_fork(after_in_child=self.read_context)
            threading.settrace(self.enter)
            sys.settrace(self.enter)

    def follow(self, folder: str) -> None:
        """Called by a script's copy in its first statement, in that process or another one."""
        if self.folder is None:
            self.begin(folder)
        self.scripts.add(sys._getframe(1).f_code.co_filename)

    def read_context(self) -> None:
        file = self.folder / "context"
        self.context = file.read_text() if file.exists() else ""
        self.seen.clear()

    def switch(self, context: str) -> None:
        """From here on lines belong to this context; "": to none."""
        (self.folder / "context").write_text(context)
        self.read_context()

    def enter(self, frame: FrameType, event: str, argument: Any) -> TraceFunction | None:
        return self.line if frame.f_code.co_filename in self.scripts else None

    def line(self, frame: FrameType, event: str, argument: Any) -> TraceFunction:
        number = frame.f_lineno
        if event == "line" and number not in self.seen and self.context:
            self.seen.add(number)
            os.write(self.output, f"{number} {self.context}\n".encode())
        return self.line


TRACE = Trace()
