"""Runs a Python program so that nothing of it is left once the process that asked for it is gone.

    child = Guarded(environment, imports=["torch"])      # a process that imports torch meanwhile
    child.run(["train_gpt.py", "--seed=2"])              # now it becomes that program
    child.send(signal.SIGTERM)                           # the trainer saves a checkpoint and ends
    code = child.process.wait()                          # nothing of it is left

Between the two stands the guard, which is this file as a program: launcher -> guard -> trainer, or launcher
-> guard -> torchrun -> ranks. It adopts whatever the program's processes leave behind, and ends last. If the
launcher goes first, even by kill -9, the guard asks the program to stop, which saves a checkpoint, and kills
what is left after PATIENCE seconds. It imports the standard library only: it lives as long as its run.
"""
import ctypes
import importlib
import json
import logging
import math
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

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
    """A Python program below a guard. env: its environment. imports: modules that it imports before it is
    told what to run. stdout, stderr: as subprocess.Popen takes them."""

    def __init__(self, env: Mapping[str, str], imports: Sequence[str] = (), stdout: int | None = None,
                 stderr: int | None = None) -> None:
        self.control, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(PATIENCE), *imports]
        # a session of its own: a signal of the terminal reaches it once, from the launcher
        self.process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=stdout, stderr=stderr,
                                        env=dict(env), start_new_session=True, text=True, errors="replace")
        theirs.close()

    def tell(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # the guard has ended
            self.control.sendall(json.dumps(message).encode() + b"\n")

    def run(self, words: Sequence[str], changes: Mapping[str, str] | None = None) -> None:
        """Starts `python WORDS...`. changes: to the environment."""
        self.tell(dict(words=list(words), changes=dict(changes or {})))

    def send(self, number: int, everyone: bool = False) -> None:
        """A signal to the program, which for torchrun means its ranks; or to everyone below the guard."""
        self.tell(dict(signal=int(number), everyone=everyone))

    def pause(self) -> None:
        """Stops the program and all that it has started, until go_on()."""
        kill(below(self.process.pid), signal.SIGSTOP)

    def go_on(self) -> None:
        kill(below(self.process.pid), signal.SIGCONT)

    def leave(self) -> None:
        """Leaves the program to its guard, which asks it to stop, and kills it after PATIENCE seconds."""
        self.control.close()

    def wait(self) -> int:
        """Waits until nothing of it is left. Returns its exit code."""
        code = self.process.wait()
        for file in (self.control, self.process.stdout, self.process.stderr):
            if file:
                file.close()
        return code

    def end(self) -> int:
        """Kills all of it. Returns its exit code."""
        self.send(signal.SIGKILL, everyone=True)
        return self.wait()


# ------------------------------------------------------------ the guard
class Guard:
    """The guard's own state, and what it does for each message."""

    def __init__(self, control: socket.socket, program: int, go: int, patience: float) -> None:
        self.control = control
        self.program = program
        self.go = go  # where the program waits for its words
        self.patience = patience
        self.told = b""  # an unfinished message
        self.ends = math.inf  # when everything that is left is killed
        self.code: int | None = None  # the program's exit code, once it has ended

    def listen(self) -> None:
        """Takes messages in. At the end of them the launcher is gone."""
        part = self.control.recv(1 << 16)
        *messages, self.told = (self.told + part).split(b"\n")
        for message in map(json.loads, messages):
            if "words" in message:
                self.start(message)
            elif "signal" in message:
                self.pass_on(message["signal"], message["everyone"])
        if not part:
            self.be_alone()

    def start(self, message: dict[str, Any]) -> None:
        """Tells the program what it is."""
        with suppress(OSError), open(self.go, "wb") as file:  # it may have ended
            file.write(json.dumps(message).encode())
        self.go = -1

    def everyone(self) -> list[int]:
        """The program, and all that it has started. Once it has ended, its number may be another's."""
        return below(os.getpid()) or ([self.program] if self.code is None else [])

    def pass_on(self, number: int, everyone: bool) -> None:
        kill(self.everyone() if everyone or self.code is not None else ranks_of(self.program), number)

    def be_alone(self) -> None:
        """The launcher is gone: the program is asked to stop."""
        self.control.close()
        if self.go >= 0:
            os.close(self.go)  # it waits for its words no longer
        self.pass_on(signal.SIGCONT, True)  # if Ctrl-Z has stopped it
        self.pass_on(signal.SIGTERM, False)
        self.ends = time.monotonic() + self.patience

    def reap(self) -> None:
        """Takes note of what has ended. When the program has, what it left behind is asked to stop."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self.program:
                    code = os.waitstatus_to_exitcode(status)
                    self.code = code if code >= 0 else 128 - code
                    self.ends = min(self.ends, time.monotonic() + self.patience)
                    kill(below(os.getpid()), signal.SIGTERM)

    def watch(self, child_ended: int) -> int:
        """Waits until nothing of the program is left. Returns its exit code."""
        killed = 0
        while self.code is None or below(os.getpid()):
            sources = [child_ended]
            if self.control.fileno() >= 0:
                sources.append(self.control.fileno())
            timeout = None if self.ends == math.inf else 0.1
            ready = select.select(sources, [], [], timeout)[0]
            if self.control.fileno() in ready:
                self.listen()
            if child_ended in ready:
                os.read(child_ended, 1 << 16)
            self.reap()
            if time.monotonic() > self.ends:
                kill(self.everyone(), signal.SIGKILL)
                killed += 1
                if killed > 100:  # a driver keeps it: no signal reaches it
                    break
        self.control.close()
        return self.code if self.code is not None else 128 + signal.SIGKILL


def main(patience: str, *imports: str) -> int:
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    waits, go = os.pipe()
    guard = os.getpid()
    program = os.fork()
    if program == 0:
        control.close()
        os.close(go)
        become(waits, guard, imports)
    os.close(waits)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    return Guard(control, program, go, float(patience)).watch(woken)


# ------------------------------------------------------------ the program
def become(waits: int, guard: int, imports: Sequence[str]) -> NoReturn:
    """Imports what any trainer needs, then runs the words that the guard writes into the pipe `waits`, as
    Python would."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != guard:  # it was gone before
        os._exit(1)
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:  # no traceback of an import
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for name in imports:
        if not select.select([waits], [], [], 0)[0]:
            with suppress(Exception):  # the program will say what is wrong with it
                importlib.import_module(name)
    with open(waits, "rb") as file:
        text = file.read()
    if not text:
        os._exit(1)
    message = json.loads(text)
    os.environ.update(message["changes"])
    words = message["words"]
    signal.signal(signal.SIGINT, interrupt)
    if words[:2] == ["-m", TORCHRUN]:
        sys.exit(run_torchrun(words[2:]))
    sys.argv[:] = words if words[0] != "-m" else words[1:]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd() if words[0] == "-m" else str(Path(words[0]).resolve().parent))
    try:
        if words[0] == "-m":
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
