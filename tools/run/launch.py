"""Trains: ./run.sh [PRESET] [NAME=value ...] [--name=value ...] [--script] [--proxy[=WIDTH]] [--dry-run]

A run is three programs, one after another: preflight.py; the trainer, by itself or below torchrun; show.py.
This one starts them and shows what they print. Nothing that it starts outlives it: guard.py. Exit code 0: the
run finished. 1: it failed or was stopped. 2: it was refused.

    RESTARTS=N                      a run that fails goes on from its checkpoint, up to N times
    LOGGER=tensorboard | wandb | trackio    gets scalars, constants and samples
"""
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from data import inputs
from tools.run import surroundings
from tools.run.guard import Guarded
from tools.run.pulse import Pulse
from tools.run.watch import (
    Logger, Progress, Screen, Signals, follow, lines_of, open_logger, show_line, show_result)
from tools.run.words import OWN, Words, read_words

ROOT = Path(__file__).resolve().parents[2]
PREFLIGHT = ("-m", "tools.run.preflight", "--json")
PACKAGES = ("numpy", "torch")


def trainer_help(words: Words) -> int:
    """The trainer's own --help, of the preset that was named."""
    flags = []
    for word in words.constants:
        name, equals, text = word.partition("=")
        if name.startswith("--"):
            flags.append(word)
        else:
            flags.append(f"--{name.lower().replace('_', '-')}={text}" if equals else f"--preset={word}")
    return subprocess.call([sys.executable, str(ROOT / "train_gpt.py"), *flags, "--help"])


def refuse(sentence: str) -> int:
    print(f"run.sh: {sentence}", file=sys.stderr)
    return 2


# ------------------------------------------------------------ a run
class Launcher:
    """What the parts of a run have in common. env: the environment of each."""

    def __init__(self, env: Mapping[str, str], logger: Logger, restarts: int, proxy: bool = False) -> None:
        self.env = env
        self.proxy = proxy
        self.logger = logger
        self.restarts = restarts  # that are left
        self.signals = Signals()
        self.screen = Screen(sys.stdout.isatty())
        self.progress = Progress()
        self.folder = Path()  # of the run, once the trainer has told it

    def prepare(self, argv: Sequence[str]) -> tuple[int, dict[str, Any]]:
        """Runs preflight.py and shows what it prints -> (its exit code, its answer, which is not shown)."""
        preparing = Guarded([*PREFLIGHT, *argv], self.env, subprocess.PIPE)
        self.signals.follow(preparing, everyone=True)
        self.progress.enter("checking")
        answer = {}
        fetching = False  # what gets data writes to the terminal itself
        for stream, line in lines_of(preparing):
            if line.startswith('{"words"'):
                answer = json.loads(line)
            elif stream:
                show_line(line, self.screen, self.progress)
                fetching = line.startswith("getting data: ")
                if fetching:
                    self.screen.hide()
            elif not fetching:
                self.screen.tick(*self.progress.live())
        return preparing.wait(), answer

    def attempt(self, words: Sequence[str], ranks: int) -> int:
        """Trains until the trainer has ended. Returns its exit code."""
        # like torchrun, unless told otherwise
        alone = {"OMP_NUM_THREADS": "1"} if ranks > 1 and "OMP_NUM_THREADS" not in os.environ else {}
        trainer = Guarded(words, {**self.env, **alone}, subprocess.PIPE, subprocess.PIPE)
        self.signals.follow(trainer)
        pulse = Pulse(ranks)
        for word in words:
            if word.startswith("--resume="):
                pulse.skip_events(word.removeprefix("--resume="))
        hung = follow(trainer, self.screen, self.progress, self.logger, self.signals, pulse)
        code = trainer.wait()
        self.folder = pulse.folder or self.folder
        blame = pulse.blame()
        if code and blame:
            self.screen.show(blame, sys.stderr)
        return 1 if hung else code

    def train(self, words: Sequence[str], ranks: int) -> int:
        """Attempts, until one has finished, was refused or stopped, or none is left. Returns the exit
        code."""
        code = self.attempt(words, ranks)
        while code not in (0, 2) and self.restarts and not self.signals.came:
            if not (self.folder / "checkpoint.pt").exists():
                break
            self.restarts -= 1
            said = f"run.sh: exit code {code}; RESUME={self.folder.name}, {self.restarts} restarts left"
            self.screen.show(said, sys.stderr)
            code = self.attempt(goes_on(words, self.folder), ranks)
        return code


def goes_on(words: Sequence[str], folder: Path) -> list[str]:
    """The words that let a run go on from its checkpoint, by the script that it began with."""
    script = [word.endswith("train_gpt.py") for word in words].index(True)
    flags = [word for word in words[script + 1:] if not word.startswith(("--run-id=", "--resume="))]
    return [*words[:script], str(folder / "train_gpt.py"), *flags, f"--resume={folder.name}"]


def launch(argv: Sequence[str], launcher: Launcher) -> int:
    """Prepares, trains, shows. Returns the exit code."""
    try:
        code, answer = launcher.prepare(argv)
        if code or not answer:
            return code
        launcher.progress.gpus = answer["gpus"]
        launcher.progress.flops = answer["flops"]
        launcher.progress.dtype = answer["dtype"]
        code = launcher.train(answer["words"], answer["ranks"])
    finally:
        launcher.screen.hide()
    env = {**launcher.env, "PROXY": "1"} if launcher.proxy else launcher.env
    show_result(launcher.folder, code, env, launcher.signals, launcher.logger)
    return code


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    words = read_words(argv, env)
    if words.help:
        return trainer_help(words)
    for name in PACKAGES:
        if find_spec(name) is None:
            return refuse(f"the package {name} is missing: ./run.sh setup")
    if words.dry_run:
        from tools.run import preflight
        return preflight.main(argv, env)
    if not (words.restarts or "0").isdecimal():
        return refuse(f"RESTARTS={words.restarts} must be a number")
    logger = open_logger(words.logger)
    if not logger:
        return 2
    surroundings.raise_file_limit()
    changes, notes = surroundings.for_trainer(env)
    print(*notes, sep="\n", end="\n" * bool(notes), flush=True)
    of_parts = {name: text for name, text in {**env, **changes}.items() if name not in OWN}
    try:
        return launch(argv, Launcher(of_parts, logger, int(words.restarts or 0), words.proxy is not None))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    inputs.steady_output()
    sys.exit(main(sys.argv[1:], os.environ))
