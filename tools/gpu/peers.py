"""Times scripts in turn on this machine, so that a ratio comes from one run on one card: ours beside another.

    ./run.sh bench --gpu-peers FOLDER FOLDER ... --command COMMAND [--command ...] [--read PATTERN ...]

A B A B: each FOLDER's command runs in that folder, one at a time, --turns times. A command is a line of
bash; one serves all folders, else there is one per folder, in their order. What it prints is searched for
PATTERN, a regular expression with one group, a number: the last one that it finds counts. One serves all
folders, or one per folder. The first folder is what the others are compared with. For instance

    ./run.sh bench --gpu-peers . ../record --command './run.sh golf ITERATIONS=200' --command 'bash run.sh'

with `step_avg:` of both logs, which is what PATTERN is by itself. The scripts and their data are yours.
Exit code 1 where a command fails or prints no such number, 2 for what cannot be run at all.
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

READ = r"step_avg:\s*([\d.]+)"
LINES_SHOWN = 5  # of what a command printed that failed


class Refused(Exception):
    """Why nothing runs, in a sentence."""


class Failed(Exception):
    """Why a run gave no number."""


class Side(NamedTuple):
    """A folder, what runs in it, and what is read from its output."""

    folder: Path
    command: str
    pattern: re.Pattern


def one_each(values: list[str], folders: list[Path], what: str) -> list[str]:
    """One value per folder, of as many or of one."""
    if len(values) == 1:
        return values * len(folders)
    if len(values) != len(folders):
        raise Refused(f"{len(folders)} folders, but {len(values)} times {what}: give it once, or per folder")
    return values


def sides_of(args: argparse.Namespace) -> list[Side]:
    """Raises Refused."""
    folders = [Path(folder) for folder in args.folders]
    if len(folders) < 2:
        raise Refused("two folders at least: the first is what the others are compared with")
    if args.turns < 1:
        raise Refused("--turns 1 at least")
    for folder in folders:
        if not folder.is_dir():
            raise Refused(f"{folder} is no folder")
    if not args.command:
        raise Refused("--command is missing: what is to run in the folders?")
    commands = one_each(args.command, folders, "--command")
    patterns = []
    for text in one_each(args.read or [READ], folders, "--read"):
        try:
            patterns.append(re.compile(text))
        except re.error as error:
            raise Refused(f"--read {text!r} is no regular expression: {error}") from None
        if patterns[-1].groups != 1:
            raise Refused(f"--read {text!r} needs one group, the number")
    return [Side(*row) for row in zip(folders, commands, patterns)]


def number_in(output: str, pattern: re.Pattern) -> float:
    """The last number that the pattern finds. Raises Failed."""
    found = pattern.findall(output)
    if not found:
        raise Failed(f"printed nothing that {pattern.pattern!r} finds")
    try:
        return float(found[-1])
    except ValueError:
        raise Failed(f"printed {found[-1]!r} where {pattern.pattern!r} finds a number") from None


def run(side: Side, seconds: float) -> float:
    """One run of a side -> its number. Raises Failed. What it started ends with it."""
    process = subprocess.Popen(
        ["bash", "-c", side.command], cwd=side.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise Failed(f"took more than {seconds:g} s (--seconds)") from None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    if process.returncode:
        last = "\n".join(output.strip().splitlines()[-LINES_SHOWN:])
        raise Failed(f"ended with exit code {process.returncode}:\n{last}")
    return number_in(output, side.pattern)


def card() -> str:
    """What the numbers were measured on."""
    if not shutil.which("nvidia-smi"):
        return "no NVIDIA GPU"
    words = "nvidia-smi --query-gpu=name,driver_version --format=csv,noheader"
    code, said = subprocess.getstatusoutput(words)
    return "; ".join(said.splitlines()) if code == 0 else "no NVIDIA GPU"


def measure(sides: list[Side], turns: int, seconds: float) -> list[list[float]]:
    """The numbers of each side, taken in turn. Raises Failed."""
    found: list[list[float]] = [[] for _ in sides]
    for turn in range(turns):
        for side, numbers in zip(sides, found):
            print(f"turn {turn + 1} of {turns}, {side.folder}: ", end="", flush=True)
            try:
                numbers.append(run(side, seconds))
            except Failed as why:
                raise Failed(f"{side.folder}: `{side.command}` {why}") from None
            print(f"{numbers[-1]:g}", flush=True)
    return found


def table(sides: list[Side], found: list[list[float]]) -> list[str]:
    """Median, least and most of each side, and its ratio to the first."""
    first = statistics.median(found[0])
    lines = []
    for side, numbers in zip(sides, found):
        median = statistics.median(numbers)
        line = f"{side.folder}: median {median:g} of {len(numbers)} ({min(numbers):g} to {max(numbers):g})"
        if numbers is not found[0]:
            line += f"; {median / first:.3f} times {sides[0].folder}" if first else "; the first one is 0"
        lines.append(line)
    return lines


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="./run.sh bench --gpu-peers", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("folders", nargs="*", metavar="FOLDER")
    parser.add_argument("--command", action="append", metavar="COMMAND")
    parser.add_argument("--read", action="append", metavar="PATTERN")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1800, help="that a run may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="takes all numbers")
    args = parser.parse_intermixed_args(words)
    try:
        sides = sides_of(args)
        print(f"machine: {card()}")
        found = measure(sides, args.turns, args.seconds)
    except Refused as why:
        print(f"bench: {why}", file=sys.stderr)
        return 2
    except Failed as why:
        print(f"\nbench: {why}", file=sys.stderr)
        return 1
    print(*table(sides, found), sep="\n")
    if args.json:
        rows = []
        for side, numbers in zip(sides, found):
            rows.append(dict(folder=str(side.folder), command=side.command, numbers=numbers))
        args.json.write_text(json.dumps(dict(machine=card(), sides=rows), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
