"""Runs a Python program so that nothing of it is left once the process that asked for it is gone.

    child = Guarded(["train_gpt.py", "--seed=2"], environment)
    child.send(signal.SIGTERM)                           # the trainer saves a checkpoint and ends
    code = child.wait()                                  # nothing of it is left

Between the two stands the guard, which is this file as a program: launcher -> guard -> trainer, or launcher
-> guard -> torchrun -> ranks. It adopts whatever the program's processes leave behind, and ends last. If the
launcher goes first, even by kill -9, the guard asks the program to stop, which saves a checkpoint, and kills
what is left after PATIENCE seconds. It imports the standard library only: it lives as long as its run.
"""
import ctypes
import logging
import math
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

TORCHRUN = "torch.distributed.run"
PATIENCE = 60.0  # seconds that a program may take to end after SIGTERM: a large checkpoint takes half of them
AGENT_KILLS = 20  # torchrun kills 30 s after it asked: a rank that dies so much later than the first one hung
# what prctl() calls these
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


# ------------------------------------------------------------ processes
def parents() -> dict[int, list[int]]:
    """{process: its children}, of all that run here; empty without /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parent = int(path.read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    return children


def below(pid: int) -> list[int]:
    """All processes below this one, such as torchrun and its ranks, which have sessions of their own."""
    children = parents()
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def ranks_of(pid: int) -> list[int]:
    """The ranks that torchrun has started, if that process is torchrun; else the process itself."""
    ranks = []
    for child in parents().get(pid, []):
        with suppress(OSError):
            if b"\0TORCHELASTIC_RUN_ID=" in Path(f"/proc/{child}/environ").read_bytes():
                ranks.append(child)
    return ranks or [pid]


def kill(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def prctl(option: int, value: int) -> None:
    """Linux's prctl(); elsewhere nothing."""
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(option, value)


# ------------------------------------------------------------ the launcher's side
class Guarded:
    """`python WORDS...` below a guard. env: its environment. stdout, stderr: as subprocess.Popen takes
    them."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], stdout: int | None = None,
                 stderr: int | None = None) -> None:
        ends_with_us, self.ours = os.pipe()  # nothing is written: that it closes tells the guard
        command = [sys.executable, __file__, str(PATIENCE), *words]
        # a session of its own: a signal of the terminal reaches it once, from the launcher
        self.process = subprocess.Popen(command, stdin=ends_with_us, stdout=stdout, stderr=stderr,
                                        env=dict(env), start_new_session=True, text=True, errors="replace")
        os.close(ends_with_us)

    def send(self, number: int, everyone: bool = False) -> None:
        """A signal to the program, which for torchrun means its ranks; or to everyone below the guard."""
        found = below(self.process.pid)
        if not found:  # it has not begun, or there is no /proc: the guard asks it to stop
            self.let_go()
        elif everyone:
            kill(found, number)
        else:
            kill(ranks_of(found[0]), number)

    def let_go(self) -> None:
        if self.ours >= 0:
            os.close(self.ours)
        self.ours = -1

    def pause(self) -> None:
        """Stops the program and all that it has started, until go_on()."""
        kill(below(self.process.pid), signal.SIGSTOP)

    def go_on(self) -> None:
        kill(below(self.process.pid), signal.SIGCONT)

    def wait(self) -> int:
        """Waits until nothing of it is left. Returns its exit code."""
        code = self.process.wait()
        self.let_go()
        for file in (self.process.stdout, self.process.stderr):
            if file:
                file.close()
        return code


# ------------------------------------------------------------ the guard
def ended() -> dict[int, int]:
    """{process: its exit code} of the children that have ended since the last call."""
    codes = {}
    with suppress(ChildProcessError):  # there are no more
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            code = os.waitstatus_to_exitcode(status)
            codes[pid] = code if code >= 0 else 128 - code
    return codes


def watch(program: int, patience: float) -> int:
    """Waits until nothing of the program is left. Returns its exit code."""
    launcher = [0]  # stdin, which ends with it
    code = None
    ends = math.inf  # when everything that is left is killed
    while code is None or below(os.getpid()):
        # 1. without a launcher the program is asked to stop
        if select.select(launcher, [], [], 0.05)[0]:
            launcher = []
            kill(below(os.getpid()), signal.SIGCONT)  # if Ctrl-Z has stopped it
            if code is None:
                kill(ranks_of(program), signal.SIGTERM)
            ends = min(ends, time.monotonic() + patience)
        # 2. once the program has ended, what it left behind is
        codes = ended()
        if program in codes:
            code = codes[program]
            kill(below(os.getpid()), signal.SIGTERM)
            ends = min(ends, time.monotonic() + patience)
        # 3. what is still there is killed
        if time.monotonic() > ends:
            kill(below(os.getpid()) or [program], signal.SIGKILL)
        if time.monotonic() > ends + 10:  # a driver keeps it: no signal reaches it
            break
    return 128 + signal.SIGKILL if code is None else code


def main(patience: str, *words: str) -> int:
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    program = os.fork()
    if program == 0:
        become(words, guard)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    return watch(program, float(patience))


# ------------------------------------------------------------ the program
def become(words: Sequence[str], guard: int) -> NoReturn:
    """Runs the words as Python would, but that Ctrl-C has no traceback, not even while it imports."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != guard:  # it was gone before
        os._exit(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        if words[:2] == ("-m", TORCHRUN):
            sys.exit(run_torchrun(words[2:]))
        is_module = words[0] == "-m"
        sys.argv[:] = words[is_module:]
        if not sys.flags.safe_path:
            sys.path.insert(0, os.getcwd() if is_module else str(Path(words[0]).resolve().parent))
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(os.path.abspath(words[0]), run_name="__main__")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    sys.exit(0)


def run_torchrun(words: Sequence[str]) -> int:
    """torchrun, without its pages about ranks that fail: they say why themselves, unless a signal ended
    them."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun
    logging.disable(logging.ERROR)
    try:
        torchrun(words)
        return 0
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        first = min(failure.timestamp for failure in error.failures.values())
        for rank, failure in error.failures.items():
            late = failure.timestamp - first > AGENT_KILLS
            if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM and not late:
                name = signal.Signals(-failure.exitcode).name
                hint = ": was memory full?" if name == "SIGKILL" else ""
                print(f"run.sh: rank {rank} was ended by {name}{hint}", file=sys.stderr, flush=True)
        # ranks refuse alike; those that have not come so far are asked to end
        codes = {failure.exitcode for failure in error.failures.values()}
        return 2 if 2 in codes and codes <= {2, -signal.SIGTERM} else 1


if __name__ == "__main__":
    if not sys.flags.safe_path:  # no module of ours is found by its bare name
        sys.path.remove(str(Path(__file__).resolve().parent))
    sys.exit(main(*sys.argv[1:]))
