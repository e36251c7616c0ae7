"""A newcomer's first hour on a fresh clone, timed: writes docs/first_hour.md, the output of the tutorials and
the pictures in docs/. On a quiet machine: python tools/dev/first_hour.py [FOLDER to clone into]. An hour.
"""
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from PIL import Image

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
if __name__ == "__main__":  # our modules are those of this checkout, whatever else the path holds
    sys.path[:] = [str(ROOT), *[folder for folder in sys.path if folder != str(HERE)]]
import train_gpt  # noqa: E402
from tools.dev.screens import CHROMIUM, on_terminal  # noqa: E402
from tools.run.names import constants_of  # noqa: E402

STEPS = [       # command, what it is
    ("git clone {root} train_gpt", "the clone"),
    ("./run.sh setup", "Python packages into `.venv`"),
    ("./run.sh data", "the embedded corpus: tokenizer and token shards"),
    ("./run.sh", "the first run"),
    ("./run.sh MATRIX_LR=0.02", "the second one, with another learning rate; it finds everything compiled"),
    ("./run.sh record plot logs/tiny_* --out runs.png", "both beside the record"),
    ("./run.sh board --html", "and as a page"),
]
MARK = "<!-- measured -->"      # what follows on a page is written here
LIVE = re.compile(r" *\d+% \|")
COLUMNS = 80        # of the terminal
BOARD_HEIGHT = 1900     # pixels: table, curves, and where the constants begin


def conditions() -> str:
    """On what kind of machine, how busy, and with which constants from the environment."""
    cpu: Any = SimpleNamespace(on_gpu=False, world_size=1)      # as much of a Team as is asked for
    machine = train_gpt.hardware(cpu).partition(" x ")[2]
    cores = os.cpu_count()
    busy = os.getloadavg()[0]
    beside = ", other work beside it" if busy > cores + 1 else ""
    constants = {name for preset in train_gpt.RECIPES for name in constants_of(preset)}
    given = " ".join(f"{name}={value}" for name, value in os.environ.items() if name in constants)
    return f"on {machine} (load average {busy:.1f}{beside})" + (f", with {given}" if given else "")


def shown(lines: list[str]) -> list[str]:
    """What a reader needs of an output: at most 16 lines, of at most 118 characters."""
    lines = [line if len(line) <= 118 else line[:117] + "…" for line in lines if line.strip()]
    return lines if len(lines) <= 16 else [*lines[:5], "…", *lines[-10:]]


def step(command: str, home: Path, env: dict[str, str]) -> tuple[float, float | None, list[str], list[str]]:
    """(seconds, seconds to the first training loss or None, lines, states of the live line)"""
    began = time.time()
    stamps = []
    code, lines, live = on_terminal(["bash", "-c", command], home, columns=COLUMNS, env=env, stamps=stamps)
    seconds = time.time() - began
    assert code == 0, (command, lines[-5:])
    first = next((at - began for at, text in stamps if LIVE.search(text)), None)
    return seconds, first, lines, live


def compile_seconds(home: Path) -> float:
    """How long the newest run compiled, by its events."""
    path = max(home.glob("logs/*/events.jsonl"), key=lambda path: path.stat().st_mtime)
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return next(event["compile_ms"] for event in events if event["kind"] == "setup") / 1e3


def end_screen(lines: list[str]) -> list[str]:
    """What a terminal shows at the end of a run: its samples and all that follows."""
    return lines[next(i for i, line in enumerate(lines) if line.startswith("sample 1: ")):]


def picture(page: Path, path: Path, width: int, height: int) -> None:
    """A screenshot of an HTML file, in 64 colours."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                        f"--user-data-dir={profile}", f"--window-size={width},{max(height, 600)}",
                        "--virtual-time-budget=10000", f"--screenshot={path}", Path(page).resolve().as_uri()],
                       check=True, capture_output=True, timeout=300)
    image = Image.open(path).convert("RGB").crop((0, 0, width, height))
    image.quantize(64, Image.Quantize.FASTOCTREE).save(path, optimize=True)


def terminal_picture(lines: list[str], path: Path, folder: Path) -> None:
    """A screenshot of a terminal."""
    page = Path(folder, "terminal.html")
    body = html.escape("\n".join(lines))
    page.write_text(f"<meta charset=utf-8><body style='margin:0;background:#fafafa'><pre style='margin:12px;"
                    f"font:14px/1.4 monospace;color:#111'>{body}</pre>", encoding="utf-8")
    picture(page, path, 720, 24 + 20 * len(lines))


def fill(page: str, home: Path, env: dict[str, str]) -> float:
    """The output block after each block of commands in a tutorial. Returns its seconds."""
    text = (ROOT / page).read_text(encoding="utf-8")
    began = time.time()

    def run(found: re.Match) -> str:
        lines = step(found[1].replace("\\\n", " "), home, env)[2]
        return f"```sh\n{found[1]}```\n\n```\n" + "\n".join(shown(lines)) + "\n```\n"

    text = re.sub(r"^```sh\n(.*?)^```\n\n```\n.*?\n```\n", run, text, flags=re.M | re.S)
    text = text.partition(MARK)[0] + f"{MARK}\nPrinted {conditions()}.\n"
    (ROOT / page).write_text(text, encoding="utf-8")
    return time.time() - began


def main(folder: Path | str) -> None:
    """Steps, tutorials, pictures, page."""
    folder = Path(folder) / "a first hour"
    folder.mkdir(parents=True)
    env = {"TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp()}
    home = folder
    rows = []
    parts = []
    for command, what in STEPS:
        seconds, first, lines, live = step(command.format(root=f"'{ROOT}'"), home, env)
        home = folder / "train_gpt"
        known = command.format(root="<this repository>")
        trained = f"{compile_seconds(home):.0f} | {first:.0f}" if first else " | "
        rows.append(f"| `{known}` | {what} | {seconds:.0f} | {trained} |")
        parts.append(f"```\n$ {known}\n" + "\n".join(shown(lines)) + "\n```\n")
        print(rows[-1], flush=True)
        if command == "./run.sh":
            training = [text for text in live if LIVE.match(text)]
            half = training[len(training) // 2]
            terminal_picture([f"$ {known}", *lines[:3], half], ROOT / "docs/terminal_live.png", folder)
            terminal_picture(end_screen(lines), ROOT / "docs/terminal_end.png", folder)
            run = max((home / "logs").glob("tiny_*/loss.png"))
            shutil.copy(run, ROOT / "docs/loss.png")
    picture(home / "board.html", ROOT / "docs/board.png", 1600, BOARD_HEIGHT)
    for page in ("docs/first_change.md", "docs/own_text.md"):
        seconds = fill(page, home, env)
        name = Path(page).name
        rows.append(f"| [{name}]({name}) | the tutorial, all its commands | {seconds:.0f} |  |  |")
        print(rows[-1], flush=True)
    path = ROOT / "docs/first_hour.md"
    head = path.read_text(encoding="utf-8").partition(MARK)[0]
    heads = ["| command | what | seconds | of them compiling | to the first training loss |",
             "|---|---|---:|---:|---:|"]
    table = "\n".join([*heads, *rows])
    path.write_text(f"{head}{MARK}\nBy `python tools/dev/first_hour.py`, {conditions()}:\n\n{table}\n\n"
                    "## What it printed\n\n" + "\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
