"""tools/watch.py COMMAND…: runs the trainer's command and shows what it does; ./run.sh calls it.

On a terminal one live line stands for the log lines, which train.log keeps: the stage, and in training loss,
bits per byte, tok/s and the time left. Elsewhere every line passes as it is. The end is one screen about the
result. LOGGER=tensorboard | wandb hands scalars, constants and samples on. The exit code is the command's.
Signals reach the command and all that it started; it ends when this program does, however that ends.
"""
import ctypes
import json
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

try:
    import numpy  # noqa: F401
except ImportError:
    sys.exit("run.sh: the package numpy is missing: ./run.sh setup")
ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "records"), str(ROOT / "data")]
import inputs  # noqa: E402
from judge.runs import STEP, read_events  # noqa: E402
from judge.trials import draw_run  # noqa: E402
from verify.folders import HOME, track_of  # noqa: E402

# How the line begins with which a stage of a run begins
STAGES = {
    "data:": "reading the data", "parameters:": "setting up", "world_size:": "setting up",
    "rehearsal before": "warming up",
    "setup:": "training", "counting n-grams": "counting n-grams", "n-grams of": "training",
    "Serialized": "evaluating the artifact", "final_": "writing samples"}
# Lines that a terminal does not need: the plan, which it shows in short, and what result.json says
QUIET = re.compile(
    r"data: (?!no |not )|parameters:|matmul |world_size:|collectives:|limits:|stage table:| {3,}\d+ |"
    r"warmdown:|evaluation:|(log )?sha256|eval settings:|attention: |run folder:|rehearsal before|setup:|"
    r"step:\d+/\d+ train_loss|val_part |(counting )?n-grams|first values of |stopping_early:|evaluating |"
    r"Serialized |Code size:|Total submission|peak memory|scoring the artifact|final_")
STEP_OF = re.compile(r"(?:stopping_early: .*)?step:(\d+)/(\d+)\b")
SUMMARY = re.compile(r" +[a-z_ ]+  \S")     # the table after the samples
SAMPLE_ROWS = 5     # of each sample on a terminal; train.log has them all
SLOWER = 1.15       # times the record's seconds: from there on a line says so


def in_rows(text: str, break_words: bool = False) -> list[str]:
    """The text in rows that fit the terminal, broken between words; further rows of a line are indented. A
    word that is longer than a row, such as a path, is left whole unless break_words."""
    rows = []
    for line in text.splitlines() or [""]:
        line = line.expandtabs()
        further = " " * (len(line) - len(line.lstrip()) + 2)
        rows += textwrap.wrap(line, shutil.get_terminal_size().columns, subsequent_indent=further,
                              replace_whitespace=False, break_on_hyphens=False,
                              break_long_words=break_words) or [""]
    return rows


class Progress:
    """What the lines of a run have said so far."""
    def __init__(self) -> None:
        self.stage = "starting"
        self.began = time.monotonic()
        self.seen = {}
        # (step, training seconds, seconds left, tok/s, when) of the last report
        self.step: tuple[int, float, int, int, float] | None = None
        self.at = 0, 0          # the last step that a line told, and of how many
        self.losses = deque(maxlen=10)      # (step, loss) of the last reports
        self.trained = self.in_samples = self.in_summary = self.paced = False
        self.pace = None        # the record's, once the log tells the recipe
        self.sample = []
        self.rows_left = 0

    def read(self, line: str) -> str | None:
        """Takes a line in. Returns what a terminal shows of it; None: nothing."""
        found = STEP.match(line)
        told = STEP_OF.match(line)
        later = told and self.at[0] < int(told[1]) <= int(told[2]) == self.at[1]
        if self.in_samples and (later or line.startswith("val_part step:")):
            self.in_samples = False         # a step after samples in the middle of the run
        if line.startswith("sample 1: ") and not self.in_samples:
            self.in_samples = True
            self.sample = []
        if self.in_samples and SUMMARY.match(line) and line.strip().startswith("train_time_ms"):
            self.in_samples = False
            self.in_summary = True
        if self.in_samples:
            self.sample.append(line)
            return self.beginning(line)
        for start, stage in STAGES.items():
            if line.startswith(start):
                self.enter(stage)
        if words := re.fullmatch(r"rehearsal before the clock, compiling: (.+)", line):
            self.enter(f"compiling, {words[1]} the first time")
        if re.fullmatch(r"evaluating \S+", line):
            self.enter(line)
        if line.startswith("eval settings:") and "ranks" not in self.seen:      # EVAL_FROM
            self.trained = True
            self.enter("evaluating val_loss")
        self.trained |= line.startswith("stopping_early:")
        if re.match(r"core\w*_metric:", line) and not self.trained:
            self.enter("training")
        if found:
            self.read_step(found, line)
        for key, pattern in (("folder", r"run folder: (\S+)"), ("parameters", r"parameters:(\d+)"),
                             ("ranks", r"world_size:(\d+)"),
                             ("batch", r" +0 +(\d+) "), ("limits", r"limits: (.+)"),
                             ("later", r" {3,}[1-9]\d* +(\d+) +\d+ +\d+ +\d+ +\d\.\d{4}"),
                             ("data", r"data: (\S+) train tokens:\d+"),
                             ("train", r"data: \S+ train tokens:(\d+)"),
                             ("val", r"data: .* val tokens:(\d+)"), ("bytes", r"data: val_bytes:(\d+)")):
            if found := re.match(pattern, line):
                self.seen.setdefault(key, found[1])
        return None if QUIET.match(line) or self.in_summary else line

    def read_step(self, found: re.Match, line: str) -> None:
        """Takes a step line in, which STEP found. After a validation, but the last, the run trains on."""
        self.at = (int(found[1]), int(found[2]))
        left = re.search(r"eta:(\d+)s", line)
        if found[3] != "train_loss":
            self.trained |= self.at[0] == self.at[1]
            self.enter("writing the model" if self.trained else "training")
        elif found[6] and left:
            self.enter("training")
            self.losses.append((self.at[0], float(found[9] or found[4])))
            self.step = self.at[0], float(found[6]) / 1e3, int(left[1]), int(found[8] or 0), time.monotonic()

    def beginning(self, line: str) -> str | None:
        """The part of a sample's line that fits into its first rows on the terminal; None: nothing."""
        if re.match(r"sample \d+: ", line):
            self.rows_left = SAMPLE_ROWS
        rows = in_rows(line, break_words=True)[:self.rows_left]
        self.rows_left -= len(rows)
        return "\n".join(rows) if rows else None

    def mean_loss(self) -> float:
        """The mean of the last ten reports, without those before half of the steps so far: the loss falls."""
        losses = [loss for step, loss in self.losses if step >= self.losses[-1][0] / 2]
        return sum(losses) / len(losses)

    def enter(self, stage: str) -> None:
        if stage != self.stage:
            self.stage = stage
            self.began = time.monotonic()

    def plan(self) -> str:
        """What is going to happen, in two lines."""
        seen = {key: f"{int(text):,}" if text.isdigit() else text for key, text in self.seen.items()}
        limits = re.sub(r" \(\d+ tokens\);", ",", seen.get("limits", ""))
        limits = re.sub(r"\d{4,}", lambda number: f"{int(number[0]):,}", limits)
        if "data" in seen:
            yield f"data: {seen['data']}, {seen['train']} tokens to train on, {seen['val']} to be scored on"
        if "limits" not in seen:    # of a script of one recipe; run.sh has shown the whole file's plan
            return
        batch = seen.get("batch")
        later = f" (later {seen['later']})" if seen.get("later", batch) != batch else ""
        yield f"plan: {seen.get('parameters')} parameters, {batch} tokens per step{later}, {limits}"

    def bits_per_byte(self, loss: float) -> float | None:
        """Bits per byte for a loss in nats per token; None if the val split's bytes per token are unknown."""
        if not {"val", "bytes"} <= {*self.seen}:
            return None
        return loss / math.log(2) * int(self.seen["val"]) / int(self.seen["bytes"])

    def slower(self) -> str | None:
        """A line, once, where this machine is slower than the record's; else None."""
        if self.paced or "folder" not in self.seen or not self.step:
            return None
        if self.pace is None:
            self.pace = pace_of(Path(self.seen["folder"]))
        pace = self.pace
        step, seconds, *_ = self.step
        if step < pace.get("step", 0):
            return None
        self.paced = True
        if not pace or step > pace["step"] or seconds < SLOWER * pace["seconds"]:
            return None
        return (f"{seconds:.0f} s for {step} steps, {pace['seconds']:.0f} s on the record's machine "
                f"({pace['machine']}): expect fewer steps and a higher loss than the record's")

    def live(self) -> tuple[float, str]:
        """(part done or None, text) of the live line now."""
        now = time.monotonic()
        if self.stage != "training" or not self.step:
            return None, f"{self.stage}: {now - self.began:.0f} s"
        step, seconds, left, rate, then = self.step
        since = min(now - then, left)
        loss = self.mean_loss()
        bpb = self.bits_per_byte(loss)
        words = [f"step {step:,}", f"loss {loss:.4f}", f"{bpb:.3f} bpb" if bpb else "",
                 f"{rate:,} tok/s", f"{left - since:.0f} s left"]
        return (seconds + since) / max(seconds + left, 1e-9), ", ".join(filter(None, words))


def pace_of(folder: Path) -> dict[str, Any]:
    """The pace of the record of a run's game, from targets.json; {} where the run changes the recipe."""
    with suppress(Exception):   # it is a hint: the run goes on without
        start = start_of(folder)
        changed = {*start["overrides"]} - {"run_id", "seed"}
        if not changed:
            return target_of(start).get("pace") or {}
    return {}


def start_of(folder: Path) -> dict[str, Any]:
    """What a run told of itself before it trained; {} where it left no events."""
    starts = [event for event in read_events(folder) if event["kind"] == "start"]
    return starts[-1] if starts else {}


class Screen:
    """Where lines go: above a live line on a terminal that has tqdm, else straight out."""
    def __init__(self, terminal: bool) -> None:
        self.terminal = terminal
        self.bar = None
        self.ticked = 0.0
        with suppress(ImportError):
            if terminal:
                from tqdm import tqdm
                self.bar = tqdm(total=1.0, bar_format="{desc}", file=sys.stdout, leave=False, ascii=" #")

    def show(self, line: str, stream: TextIO) -> None:
        if self.bar is not None:
            self.bar.clear()
            if stream.isatty():
                line = "\n".join(in_rows(line))
        print(line, file=stream, flush=True)
        if self.bar is not None:
            self.bar.refresh()

    def tick(self, part: float, text: str) -> None:
        """The live line: with a bar where the part that is done is known."""
        if self.bar is not None and time.monotonic() > self.ticked + 0.2:
            self.ticked = time.monotonic()
            known = "{percentage:3.0f}% |{bar:10}| {desc}"
            self.bar.bar_format = "{desc}" if part is None else known
            self.bar.ncols = shutil.get_terminal_size().columns - 1     # 79 where the terminal does not say
            self.bar.n = min(part or 0.0, 1.0)
            self.bar.set_description_str(text)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def pump(stream: TextIO, name: str, lines: queue.Queue) -> None:
    for line in stream:
        lines.put((name, line.rstrip("\n")))
    lines.put((name, None))


def follow(child: subprocess.Popen, screen: Screen, progress: Progress, logger: "Logger",
           stop: list[int | str]) -> None:
    """Shows the child's lines until it closes both of its streams. stop: has an entry once a signal came."""
    lines = queue.Queue()
    open_streams = {"stdout", "stderr"}
    for name in open_streams:
        threading.Thread(target=pump, args=(getattr(child, name), name, lines), daemon=True).start()
    while open_streams:
        try:
            name, line = lines.get(timeout=0.2)
        except queue.Empty:
            if len(stop) == 1:
                stop.append("told")
                screen.show("stopping: a checkpoint is saved first if training has begun", sys.stderr)
            screen.tick(*progress.live())
            continue
        if line is None:
            open_streams = open_streams - {name}
            continue
        shown = progress.read(line) if name == "stdout" else line
        if name == "stdout":
            logger.line(line, progress)
        shown = line if screen.bar is None else shown
        if shown is not None:
            screen.show(shown, getattr(sys, name))
        if line.startswith("run folder:") and screen.bar is not None:
            for row in progress.plan():
                screen.show(row, sys.stdout)
        if screen.bar is not None and (slow := progress.slower()):
            screen.show(slow, sys.stdout)
        screen.tick(*progress.live())


# ------------------------------------------------------------ signals
# What asks a run to stop -> what the command gets; the trainer saves a checkpoint first
STOPS = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM,
         signal.SIGUSR1: signal.SIGUSR1}
PASSED = (signal.SIGQUIT, signal.SIGUSR2)   # end it at once
PR_SET_PDEATHSIG = 1    # what prctl() calls it
# Goes on with stopped processes if the one that stopped them is gone: a signal that ends them waits for that
GUARD = 'while kill -0 "$0" 2>/dev/null; do sleep 1; done; kill -CONT "$@"'


def start(command: list[str]) -> subprocess.Popen:
    """The command in a session of its own, so that a signal of the terminal reaches it once: from here. It
    gets SIGTERM when this program is gone, by kill -9, too."""
    libc = ctypes.CDLL(None)
    env = {name: text for name, text in os.environ.items() if name != "LOGGER"}    # which is heeded here

    def end_with_parent() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
                            errors="replace", start_new_session=True,
                            preexec_fn=end_with_parent if hasattr(libc, "prctl") else None)


def tree(pid: int) -> list[int]:
    """A process and all below it, such as torchrun and its ranks, which have sessions of their own."""
    children = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):     # it has ended
            parent = path.read_bytes().rpartition(b")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def pause(child: subprocess.Popen) -> None:
    """Ctrl-Z: stops the command and all below it, then this program, until the shell's `fg` or `bg`."""
    pids = tree(child.pid)
    send(pids, signal.SIGSTOP)
    guard = subprocess.Popen(["sh", "-c", GUARD, str(os.getpid()), *map(str, pids)], start_new_session=True)
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTSTP)     # returns when this program goes on
    signal.signal(signal.SIGTSTP, handler)
    guard.kill()
    guard.wait()
    send(pids, signal.SIGCONT)


def pass_signals(child: subprocess.Popen, stop: list[int | str]) -> None:
    """From now on, until the command has ended. stop: gets an entry for one that asks it to stop."""
    def pass_on(number: int, _: FrameType | None) -> None:
        if child.poll() is not None:    # what is left, such as a logger that hangs, ends here
            raise KeyboardInterrupt
        if number in STOPS:
            stop.append(number)
        child.send_signal(STOPS.get(number, number))

    for number in (*STOPS, *PASSED):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    if signal.getsignal(signal.SIGTSTP) != signal.SIG_IGN:
        signal.signal(signal.SIGTSTP, lambda *_: pause(child))


# ------------------------------------------------------------ the end
def size_text(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size:,} bytes"


def scores_text(result: dict[str, Any]) -> str:
    """The scores that count."""
    names = [name for name in ("core", "val_bpb", "val_loss", "val_loss_partial")
             if result.get(name) is not None]
    return ", ".join(f"{name} {result[name]:.4f}" for name in names)


def target_of(result: dict[str, Any]) -> dict[str, Any]:
    """What records/targets.json has for the run's game; {} where the run played another one."""
    other_game = {"data_path", "data_fingerprint", "val_tokens", "eval_context", "iterations",
                  "max_wallclock_seconds"}
    if other_game & {*result["overrides"]}:
        return {}
    return json.loads(inputs.read_text(HOME / "targets.json"))[track_of(result["preset"])]


def distance(result: dict[str, Any], other: dict[str, Any]) -> str:
    """How far a result is from one of targets.json, in a line. Where that has `seconds`, the game is to reach
    its value in fewer of them."""
    goal = f"{other['metric']} {other['value']:.10g}"
    seconds = other.get("seconds")
    what = f"{other['name']}: {f'{seconds} s to ' if seconds else ''}{goal} ({other['about']})"
    mine = result.get(other["metric"])
    if mine is None:
        return what
    gap = (mine - other["value"]) * (1 if other["better"] == "lower" else -1)       # > 0: worse
    unit = ""
    if seconds and gap > 0:
        return f"{gap:.4f} short of {goal}; {what}"
    if seconds:
        gap = result["train_time_ms"] / 1e3 - seconds
        unit = " s"
    return f"{abs(gap):.4f}{unit} {'behind' if gap > 0 else 'ahead of'} {what}"


def end_lines(folder: Path, result: dict[str, Any]) -> Iterator[str]:
    """The screen after a run: score, what it compares with, the files, what to try next."""
    yield ""
    if not result["steps"]:
        yield f"{scores_text(result)} of {result['config']['eval_from']}"
        yield f"in {folder}/: train.log, result.json"
        return
    model = next((path.name for path in sorted(folder.glob("final_model.*.ptz"))), "final_model.pt")
    yield (f"{scores_text(result)} after {result['steps']:,} steps, {result['tokens']:,} tokens, "
           f"{result['train_time_ms'] / 1e3:.1f} s ({result['tok_per_s']:,} tok/s)")
    yield from (f"  {distance(result, other)}" for other in target_of(result).get("compare", ()))
    picture = "loss.png, " if (folder / "loss.png").exists() else ""
    yield (f"in {folder}/: train.log (all of the samples), result.json, {picture}train_gpt.py, "
           f"{model} ({size_text((folder / model).stat().st_size)})")
    if result["overrides"].keys() - {"run_id", "seed"}:
        yield "next: better, or luck? ./run.sh record compare trains both several times: docs/first_change.md"
    else:
        yield "next: change a number, say ./run.sh MATRIX_LR=0.02, and compare: docs/first_change.md"


# ------------------------------------------------------------ LOGGER
class Logger:
    """Hands on what a run logs: to TensorBoard, Weights & Biases or, by default, nobody. After a warning the
    run goes on without one that fails."""
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.run = None
        self.opened = False
        if kind == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter
            self.module = SummaryWriter
        elif kind == "wandb":
            import wandb
            self.module = wandb

    def open(self, folder: Path) -> None:
        config = start_of(folder).get("config", {})
        if self.kind == "tensorboard":
            self.run = self.module(str(folder / "tensorboard"))
            rows = "\n".join(f"| {name} | {value} |" for name, value in config.items())
            self.run.add_text("config", f"| constant | value |\n| --- | --- |\n{rows}")
        else:
            self.run = self.module.init(project="train_gpt", name=folder.name, dir=str(folder), config=config)

    def line(self, line: str, progress: Progress) -> None:
        """A line of the run's output: scalars of a step."""
        if self.kind:
            self.safely(self.read, line, progress)

    def safely(self, do: Callable[..., None], *args: Any) -> None:
        try:
            do(*args)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            print(failed(self.kind, error), file=sys.stderr, flush=True)
            self.kind = ""
            self.run = None

    def read(self, line: str, progress: Progress) -> None:
        if line.startswith("rehearsal before") and not self.run and "folder" in progress.seen:
            self.open(Path(progress.seen["folder"]))
        found = STEP.match(line)
        if self.run and found and not progress.in_samples:
            pairs = re.findall(r"(\w+(?:/s)?):(-?\d+(?:\.\d+)?)(?=ms\b|s\b|\s|$)", line)
            self.scalars(int(found[1]), {name: float(value) for name, value in pairs if name != "step"})
        if self.run and (part := re.fullmatch(r"val_part step:(\d+) val_loss:(\S+)", line)):
            self.scalars(int(part[1]), {"val_part_loss": float(part[2])})

    def scalars(self, step: int, values: dict[str, float]) -> None:
        if self.kind == "wandb":
            self.run.log(values, step=step)
        else:
            for name, value in values.items():
                self.run.add_scalar(name, value, step)

    def close(self, samples: list[str]) -> None:
        """Hands on the samples, as one text, and ends."""
        if self.run:
            self.safely(self.finish, samples)

    def finish(self, samples: list[str]) -> None:
        text = "\n".join(samples)
        if self.kind == "wandb":
            self.run.summary["samples"] = text
            self.run.finish()
        else:
            self.run.add_text("samples", f"```\n{text}\n```")
            self.run.close()


def failed(kind: str, error: BaseException) -> str:
    why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return f"run.sh: LOGGER={kind} failed ({why}); the run goes on without it"


def open_logger(kind: str) -> Logger | None:
    """Logger, or None after saying why there cannot be one."""
    if kind not in ("", "tensorboard", "wandb"):
        why = f"LOGGER={kind} is none of tensorboard, wandb"
    else:
        try:
            return Logger(kind)
        except ImportError:
            python = os.path.relpath(sys.executable)
            install = f"{python} -m pip install" if find_spec("pip") else f"uv pip install --python {python}"
            why = f"LOGGER={kind} needs the package {kind}: {install} {kind}"
        except Exception as error:      # it is there, but broken
            print(failed(kind, error), file=sys.stderr, flush=True)
            return Logger("")
    print(f"run.sh: {why}", file=sys.stderr)
    return None


def main(command: list[str]) -> int:
    logger = open_logger(os.environ.get("LOGGER", ""))
    if not logger:
        return 2
    progress = Progress()
    screen = Screen(sys.stdout.isatty())
    stop = []
    child = start(command)
    pass_signals(child, stop)
    try:
        follow(child, screen, progress, logger, stop)
        code = child.wait()
    finally:
        screen.close()
        if child.poll() is None:    # a bug of ours: no orphan is left
            child.terminate()
    logger.close(progress.sample)
    if code == 0 and "folder" in progress.seen:
        folder = Path(progress.seen["folder"])
        try:
            result = json.loads(inputs.read_text(folder / "result.json"))
            rows = end_lines(folder, result)
            if screen.terminal:
                rows = in_rows("\n".join(rows))
            print(*rows, sep="\n", flush=True)
            if result["steps"] and (folder / "loss.png").exists():  # not without matplotlib
                draw_run(folder, target_of(result))
        except Exception as error:      # the run itself is done: its code stays 0
            print(f"the end of {folder} cannot be shown: {type(error).__name__}: {error}", file=sys.stderr)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    inputs.steady_output()
    sys.exit(main(sys.argv[1:]))
