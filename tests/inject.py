"""Runs train_gpt.py with a fault in it, in its place and with its arguments, also under torchrun.

    FAULT=kill@step:17 python tests/inject.py

FAULT: WHAT@PLACE[/FILE]:N[@RANK], several with ';' between: at the N-th time that this process comes to the
place, there of a file whose name ends so, on that rank or on all. TIMEOUT: seconds after which a
collective gives up.
"""
import ctypes
import errno
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import train_gpt  # noqa: E402

# A place is where this function is entered
PLACES = {
    "setup": (train_gpt, "open_data"),              # before there is a folder
    "warmup": (train_gpt, "warm_up"),
    "step": (train_gpt, "train_step"),
    "update": (train_gpt.Optimizer, "step"),        # gradients are there, weights are as before
    "read": (train_gpt.Loader, "read"),
    "save": (train_gpt, "save_checkpoint"),
    "write": (train_gpt, "write_atomically"),       # of a part of the file
    "evaluate": (train_gpt, "score_targets"),      # a batch
    "artifact": (train_gpt, "pack_artifact"),       # final_model.pt is there
    "log": (train_gpt.Log, "__call__"),
    "sync": (os, "fsync"),
    "rename": (os, "replace"),
    "renamed": (os, "replace"),                     # as it is left
}


def hang():
    while True:
        time.sleep(0.05)


def fail(error):
    raise error


def shards():
    return Path(os.environ["DATA_PATH"]).glob("*_train_*.bin")


ACTIONS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "int": lambda: os.kill(os.getpid(), signal.SIGINT),
    "usr1": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": hang,
    "sleep": lambda: time.sleep(5),
    "raise": lambda: fail(RuntimeError("an injected mistake")),
    "oom": lambda: fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
    "full": lambda: fail(OSError(errno.ENOSPC, "No space left on device")),
    "readonly": lambda: fail(OSError(errno.EROFS, "Read-only file system")),
    "eio": lambda: fail(OSError(errno.EIO, "Input/output error")),
    "shrink": lambda: [os.truncate(path, 1024 + 64) for path in shards()],
    "delete": lambda: [path.unlink() for path in shards()],
    "remove": lambda: shutil.rmtree(Path("logs", os.environ["RUN_ID"])),
    "nan": lambda: None,        # the loss of a step; the weights after it:
    "spoil": lambda: None,
}


class Fault:
    """One of those that FAULT names; counts how often its place was met, the steps of the warmup apart."""
    warming_up = False

    def __init__(self, text):
        self.text = text
        self.count = 0
        self.what, place, *rank = text.split("@")
        place, n = place.split(":")
        self.place, _, self.file = place.partition("/")
        self.n = int(n)
        self.rank = rank[0] if rank else None

    def meet(self, file):
        """Its name if this is the n-th time, after what it does."""
        if Fault.warming_up or not file.endswith(self.file):
            return ""
        self.count += 1
        if self.count != self.n:
            return ""
        print(f"inject: {self.text} at {time.monotonic():.3f}", file=sys.stderr, flush=True)
        ACTIONS[self.what]()
        return self.what


class Writes:
    """A file of that name, whose n-th write meets the fault."""

    def __init__(self, file, fault, name):
        self.file = file
        self.fault = fault
        self.name = str(name)
        self.flush = file.flush

    def write(self, content):
        self.fault.meet(self.name)
        return self.file.write(content)


def file_of(place, args):
    """The file that a call is about."""
    if place == "sync":
        return os.readlink(f"/proc/self/fd/{args[0]}")
    return str(args[1]) if place in ("rename", "renamed") else ""


def faulty(fault, real):
    """The function at the fault's place, with the fault."""
    def call(*args, **kw):
        file = file_of(fault.place, args)
        if fault.place == "write":
            path, write = args
            return real(path, lambda opened: write(Writes(opened, fault, path)))
        if fault.place == "renamed":
            real(*args, **kw)
            return fault.meet(file)
        what = fault.meet(file)
        value = real(*args, **kw)
        if what == "spoil":
            args[1].banks[0].data.fill_(float("nan"))
        return value * float("nan") if what == "nan" else value

    return call


def install(faults):
    for fault in faults:
        owner, name = PLACES[fault.place]
        setattr(owner, name, faulty(fault, getattr(owner, name)))


def warm_up(run, real=train_gpt.warm_up):
    Fault.warming_up = True
    real(run)
    Fault.warming_up = False


def main(arguments):
    """train_gpt.py's main, with the faults of the environment. Ends the process."""
    sys.stdout.reconfigure(errors="replace")
    with suppress(OSError, AttributeError):     # a rank that hangs ends with its parent, where there is prctl
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    faults = [Fault(text) for text in os.environ.get("FAULT", "").split(";") if text]
    train_gpt.warm_up = warm_up
    install(fault for fault in faults if fault.rank in (None, os.environ.get("RANK", "0")))
    train_gpt.COLLECTIVE_TIMEOUT = float(os.environ.get("TIMEOUT", train_gpt.COLLECTIVE_TIMEOUT))
    sys.exit(train_gpt.main(arguments, os.environ))


if __name__ == "__main__":
    main(sys.argv[1:])
