"""Runs train_gpt.py with a fault in it, in its place and with its arguments, also under torchrun.

    FAULT=kill@step:17 python tests/inject.py
    python tests/inject.py --serve      a run per line of JSON on stdin, forked: none pays for imports

FAULT: WHAT@PLACE[/FILE]:N[@RANK], several with ';' between: at the N-th time that this process comes to the
place, there of a file whose name ends so, on that rank or on all. LIMITS=training=6,first=8,silent=4,...:
what faults.py waits for. Nothing of train_gpt.py and faults.py is changed but what a fault needs.
"""
import ctypes
import errno
import functools
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import faults  # noqa: E402
import train_gpt  # noqa: E402

# When a place is met: as this function is entered
PLACES = {
    "setup": (train_gpt, "open_data"),          # before there is a folder
    "rehearse": (train_gpt, "rehearse"),        # the phase `compile`
    "step": (train_gpt, "train_step"),
    "update": (train_gpt.Optimizer, "step"),    # gradients are there, weights are as before
    "read": (train_gpt.Loader, "part"),
    "save": (faults.Guard, "save"),
    "write": (faults.Stored, "write"),          # of a part of a checkpoint
    "evaluate": (train_gpt, "log_probs"),       # a batch
    "artifact": (train_gpt, "pack_artifact"),
    "atomically": (train_gpt, "write_atomically"),
    "sync": (os, "fsync"),
    "rename": (os, "replace"),                  # renamed: as it is left
}
DAY = 86_400


def jump():
    """The wall clock is set forward by a day."""
    real, now = time.time, train_gpt.datetime.now

    class Tomorrow(datetime):
        @classmethod
        def now(cls, zone=None):
            return now(zone) + timedelta(days=1)

    time.time = lambda: real() + DAY
    train_gpt.datetime = Tomorrow


def hang():
    while True:
        time.sleep(0.05)


def spin():
    while True:
        pass


def error(exception):
    raise exception


def shards():
    return sorted(Path(os.environ["DATA_PATH"]).glob("*_train_*.bin"))


ACTIONS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "int": lambda: os.kill(os.getpid(), signal.SIGINT),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: os._exit(3),
    "hang": hang,
    "spin": spin,
    "slow": lambda: time.sleep(1.5),
    "raise": lambda: error(RuntimeError("an injected mistake")),
    "oom": lambda: error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
    "full": lambda: error(OSError(errno.ENOSPC, "No space left on device")),
    "readonly": lambda: error(OSError(errno.EROFS, "Read-only file system")),
    "eio": lambda: error(OSError(errno.EIO, "Input/output error")),
    "shrink": lambda: [os.truncate(path, 1024 + 64) for path in shards()],
    "delete": lambda: [path.unlink() for path in shards()],
    "remove": lambda: shutil.rmtree(Path("logs", os.environ["RUN_ID"])),
    "jump": jump,
    "nan": lambda: "nan",       # a step's loss
    "spoil": lambda: "spoil",   # a step's weights
}


class Faults:
    """Those of this rank; counts how often each one's place was met."""

    def __init__(self, text, rank):
        self.faults, self.counts = [], {}
        for fault in filter(None, text.split(";")):
            what, place, file, n, where = re.fullmatch(
                r"(\w+)@(\w+)(?:/([\w.]+))?:(\d+)(?:@(\d+))?", fault).groups()
            if where in (None, rank):
                self.faults.append((fault, what, place, file or "", int(n)))

    def hit(self, *places, name=""):
        due = []
        for fault, what, place, file, n in self.faults:
            if place in places and name.endswith(file):
                self.counts[fault] = self.counts.get(fault, 0) + 1
                due += [(fault, what)] * (self.counts[fault] == n)
        for fault, what in due:
            print(f"inject: {fault} at {time.monotonic():.3f}", file=sys.stderr, flush=True)
            return ACTIONS[what]()


class Through:
    """A file of lines, of which the n-th can fail."""

    def __init__(self, file, faults):
        self.file, self.faults = file, faults

    def write(self, text):
        if text != "\n":
            self.faults.hit("log")
        return self.file.write(text)

    def __getattr__(self, name):
        return getattr(self.file, name)


def named(place, args):
    """The file that a call is about."""
    if place == "sync":
        return os.readlink(f"/proc/self/fd/{args[0]}")
    return str(args[1 if place == "rename" else 0]) if place in ("rename", "atomically") else ""


def install(text, rank):
    """Patches the places that FAULT names."""
    mine = Faults(text, rank)
    used = {place for _, _, place, _, _ in mine.faults}
    for place, (owner, name) in PLACES.items():
        if not {place, place + "d"} & used:
            continue

        def call(*args, place=place, real=getattr(owner, name), **kw):
            file = named(place, args)
            done = mine.hit(place, name=file)
            value = real(*args, **kw)
            mine.hit(place + "d", name=file)
            if done == "spoil":
                args[1].banks[0].data.fill_(float("nan"))
            return value * float("nan") if done == "nan" else value

        setattr(owner, name, functools.wraps(getattr(owner, name))(call))
    if "log" in used:
        real_open = train_gpt.Log.open

        def log_open(self, *args):
            real_open(self, *args)
            self.file = Through(self.file, mine)

        train_gpt.Log.open = log_open


def end_with_parent():
    """Or a rank that hangs would outlive a test that gave up."""
    with suppress(OSError, AttributeError):     # there is no prctl
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def shorten(text):
    for name, seconds in (pair.split("=") for pair in filter(None, text.split(","))):
        if name in faults.LIMITS:
            faults.LIMITS[name] = int(seconds)
        else:
            setattr(faults, {"first": "FIRST_STEPS", "silent": "SILENT"}[name], int(seconds))


def serve():
    """Forks the ranks of a run for each line {cwd, args, ranks: [{env, out}]}, answers with their ids, then
    with their exit codes. Returns a forked rank's arguments, None at the end of the input."""
    import matplotlib.figure  # noqa: F401
    import sentencepiece  # noqa: F401
    import torch._inductor.compile_fx
    import torch._meta_registrations  # noqa: F401

    torch.use_deterministic_algorithms(True)    # imports the compiler
    torch.use_deterministic_algorithms(False)
    answer = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        job, pids = json.loads(line), []
        for rank in job["ranks"]:
            pids.append(os.fork())
            if not pids[-1]:
                os.chdir(job["cwd"])
                os.environ.clear()
                os.environ.update(rank["env"])
                for fd, path, flags in ((0, os.devnull, os.O_RDONLY),
                                        (1, rank["out"] + ".out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
                                        (2, rank["out"] + ".err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
                    os.dup2(os.open(path, flags), fd)
                return job["args"]
        print(json.dumps(pids), file=answer, flush=True)
        print(json.dumps(wait(pids)), file=answer, flush=True)
    return None


def wait(pids, grace=20):
    """Exit codes; what is left so many seconds after one failed is killed."""
    codes, failed = {}, None
    while len(codes) < len(pids):
        for pid in {*pids} - {*codes}:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
                failed = failed or codes[pid] and time.monotonic()
            elif failed and time.monotonic() > failed + grace:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    arguments = serve() if sys.argv[1:] == ["--serve"] else sys.argv[1:]
    if arguments is not None:
        sys.stdout.reconfigure(errors="replace")
        end_with_parent()
        install(os.environ.get("FAULT", ""), os.environ.get("RANK", "0"))
        shorten(os.environ.get("LIMITS", ""))
        code = train_gpt.main(arguments, os.environ)
        if sys.argv[1:] == ["--serve"]:     # what an exit does, without the second that torch takes for it
            threading._shutdown()
            sys.stdout.flush()
            os._exit(code)
        sys.exit(code)
