"""tools/run/install.py REQUIREMENTS: installs them by uv or pip for the interpreter that runs this, for
./run.sh setup. What these print is in install.log beside that file; on a terminal a line tells the seconds
and what has arrived so far. With --ready it tells whether all packages are there, in 0.1 s; with --imports it
imports them.

pip's variables and configuration files say where packages come from. Where they go, and whether they are
installed at all, is not for them to say here: PIP_TARGET, PIP_NO_DEPS, PIP_DRY_RUN and the like would leave
an environment without packages behind.
"""
import ast
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # what prctl() calls it
# Settings of pip that are heeded: how it reaches its packages
HEEDED = ("index-url", "extra-index-url", "no-index", "find-links", "trusted-host", "proxy", "cert",
          "client-cert", "keyring-provider", "timeout", "retries", "cache-dir", "no-cache-dir", "use-feature")
MODULES = {"pyyaml": "yaml", "pytest-xdist": "xdist"}       # where it is not the package's name


def modules(requirements: Path) -> list[str]:
    """What the packages of a requirements file are imported as."""
    lines = [line.partition("#")[0].strip() for line in requirements.read_bytes().decode().splitlines()]
    names = [line.partition("=")[0].strip().lower() for line in lines if line]
    return [MODULES.get(name, name.replace("-", "_")) for name in names]


def missing(name: str, by_import: bool) -> str:
    """Why a module cannot be had, in a sentence; empty if it can."""
    try:
        spec = find_spec(name)
        if spec is None or spec.origin is None:     # no such folder, or an empty one
            return f"{name} is missing"
        if by_import:
            import_module(name)
    except Exception as error:      # a damaged package may raise anything
        why = " ".join(str(error).split())[:200]
        return f"{name} cannot be imported ({type(error).__name__}: {why})"
    return ""


def configured() -> dict[str, str]:
    """{setting: value} of what is heeded in pip's configuration files, those of `install` before the global
    ones."""
    found = {}
    kept = {name: text for name, text in os.environ.items() if not name.upper().startswith("PIP_")}
    if "PIP_CONFIG_FILE" in os.environ:
        kept["PIP_CONFIG_FILE"] = os.environ["PIP_CONFIG_FILE"]
    command = [sys.executable, "-m", "pip", "config", "list"]
    told = subprocess.run(command, env=kept, capture_output=True, text=True)
    for line in told.stdout.splitlines():       # sorted: global.proxy='…', then install.proxy='…'
        name, _, text = line.partition("=")
        section, _, setting = name.rpartition(".")
        if section in ("global", "install") and setting in HEEDED:
            with suppress(SyntaxError, ValueError):
                found[setting] = " ".join(ast.literal_eval(text).split("\n")).strip()
    return found


def environment() -> dict[str, str]:
    """This process's, with those of pip's settings that are heeded. A variable counts more than a file."""
    heeded = {f"PIP_{name.upper().replace('-', '_')}": text for name, text in configured().items()}
    for setting in HEEDED:
        name = f"PIP_{setting.upper().replace('-', '_')}"
        if name in os.environ:
            heeded[name] = os.environ[name]
    others = {name: text for name, text in os.environ.items() if not name.upper().startswith("PIP_")}
    return others | heeded | {"PIP_CONFIG_FILE": os.devnull}


def end_with_parent() -> None:
    """Lets this process end with run.sh, however that ends."""
    with suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def show_progress(folder: Path, seconds: float) -> None:
    """Rewrites the line on the terminal."""
    told = subprocess.run(["du", "-sh", str(folder)], capture_output=True, text=True).stdout
    size = told.partition("\t")[0]
    print(f"\r\033[Kinstalling: {seconds:.0f} s, {size}", end="", file=sys.stderr, flush=True)


def fetch(path: Path) -> int:
    """uv or pip installs what the file lists -> its exit code, after Ctrl-C 130."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-r", str(path)]
    env = environment()
    uv = shutil.which("uv")
    if uv:
        command = [uv, "pip", "install", "--python", sys.executable, "-r", str(path)]
        env = dict(os.environ)
    terminal = sys.stderr.isatty()
    began = time.monotonic()
    with open(path.with_name("install.log"), "wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
            if terminal:
                show_progress(path.parent, time.monotonic() - began)
        return process.returncode
    except KeyboardInterrupt:
        process.terminate()
        return 130
    finally:
        if terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def install(path: Path) -> int:
    """Installs, or says why that failed. Returns an exit code."""
    code = fetch(path)
    if code in (0, 130):
        return code
    log = path.with_name("install.log")
    why = f"requirements.txt could not be installed: is there a network? {log} has the details"
    if b"no space left" in log.read_bytes().lower():
        why = f"the disk is full: {path.parent} takes some gigabytes"
    print(f"run.sh: {why}", file=sys.stderr)
    return 2


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main(words: list[str]) -> int:
    path = Path(words[-1])
    if words[0] in ("--ready", "--imports"):
        for name in modules(path):
            why = missing(name, words[0] == "--imports")
            if why:
                print(why)
                return 1
        return 0
    end_with_parent()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, interrupt)
    return install(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
