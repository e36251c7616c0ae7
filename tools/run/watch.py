"""What a run looks like: a live line, signals that are passed on, LOGGER. launch.py shows runs by it.

On a terminal one live line replaces the log lines, which train.log keeps: the stage, and in training loss,
bits per byte, tok/s, on GPUs MFU, and the time left. Elsewhere every line passes; train_loss lines get MFU.
LOGGER=tensorboard | wandb | trackio hands scalars, constants and samples on.
"""
import math
import os
import queue
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from data import inputs
from tools.run import cards
from tools.run.guard import Guarded
from tools.run.pulse import Pulse

SHOW = ("-m", "tools.run.show")
CLEAR = "\x1b[K"        # clears what a terminal's line held before
# A line that begins so begins a stage of a run, which is called so; "": as the line says
STAGES = {
    "data:": "reading the data", "world_size:": "setting up", "warmup before": "", "counting n-grams": "",
    "evaluating ": "", "Serialized": "evaluating the artifact", "final_": "writing the result"}
# Lines that a terminal does not need: the live line has them, or result.json
QUIET = re.compile(
    r"data: (val_bytes|text fingerprint)|matmul |world_size:|collectives:|record:|stage table:| {3,}\d+ |"
    r"warmdown:|evaluation:|(log )?sha256|eval settings:|attention: |run folder:|warmup before|setup:|"
    r"step:\d+/\d+ train_loss|val_part |(counting )?n-grams|init of |stopping_early:|evaluating |"
    r"Serialized |Code size:|Total submission|peak memory|scoring the artifact|final_| *[a-z_]+  \S")

TRAIN_LINE = re.compile(r"step:(\d+)/\d+ train_loss:.* tok/s:(\d+)")


class Progress:
    """How far a run is, by its lines until it trains, then by its events."""
    def __init__(self) -> None:
        self.stage = "starting"
        self.began = time.monotonic()
        self.data: dict[str, Any] = {}      # of the run, as its first event tells it
        self.report: dict[str, Any] = {}    # the last one of a step
        self.reported = 0.0                 # when it came
        self.stopped = False                # training, by a cap
        self.gpus: list[str] = []           # the card of each rank
        self.flops: list[tuple[int, int, float]] = []   # cards.mean_flops()'s stages
        self.dtype = "bf16"                 # of most matmuls

    def read(self, line: str) -> str | None:
        """Takes a line in. Returns what a terminal shows of it; None: nothing."""
        for start, stage in STAGES.items():
            if line.startswith(start):
                self.enter(stage or line)
        return None if QUIET.match(line) else line

    def take(self, event: dict[str, Any]) -> None:
        """Takes in what an event tells."""
        kind = event["kind"]
        if kind == "start":
            self.data = event["data"]
        elif kind == "stop":
            self.stopped = True
        elif kind == "train":
            self.report = event
            self.reported = time.monotonic()
        goes_on = kind == "val" and event["step"] < event["steps"] and not self.stopped
        if kind in ("setup", "train") or goes_on:
            self.enter("training")

    def enter(self, stage: str) -> None:
        if stage != self.stage:
            self.stage = stage
            self.began = time.monotonic()

    def mfu(self, step: int, rate: float) -> str:
        """MFU of these GPUs. rate: tok/s, the mean over the first `step` steps."""
        flops = cards.mean_flops(self.flops, step) * rate
        return cards.mfu_text(cards.Work(flops, self.gpus, self.dtype)).partition(", ")[0]

    def with_mfu(self, line: str) -> str:
        """A line of the log, with MFU added if it is a train_loss line of a run on GPUs."""
        found = TRAIN_LINE.match(line)
        if not self.gpus or not found:
            return line
        end = found.end()  # what reads logs expects mean_loss at the end of the line
        return f"{line[:end]} {self.mfu(int(found[1]), int(found[2]))}{line[end:]}"

    def live(self) -> tuple[float | None, str]:
        """(part done or None, text) of the live line now."""
        now = time.monotonic()
        report = self.report
        if self.stage != "training" or not report:
            return None, f"{self.stage}: {now - self.began:.0f} s"
        left = max(0.0, report["eta"] - (now - self.reported))
        seconds = report["seconds"] + report["eta"] - left
        rate = report["tokens"] / report["seconds"]
        words = [f"step {report['step']:,}", f"loss {report['mean_loss']:.4f}"]
        if self.data.get("val_bytes"):
            bits = report["mean_loss"] / math.log(2)
            words.append(f"{bits * self.data['val_tokens'] / self.data['val_bytes']:.3f} bpb")
        words.append(f"{rate:,.0f} tok/s")
        if self.gpus:
            words.append(self.mfu(report["step"], rate))
        words.append(f"{left:.0f} s left")
        return seconds / max(seconds + left, 1e-9), ", ".join(words)


class Screen:
    """Where lines go: on a terminal above a live line, else straight out."""
    def __init__(self, terminal: bool) -> None:
        self.terminal = terminal

    def show(self, line: str, stream: TextIO) -> None:
        self.hide()
        print(line, file=stream, flush=True)

    def tick(self, part: float | None, text: str) -> None:
        """The live line: with a bar where the part that is done is known."""
        if self.terminal:
            if part is not None:
                text = f"{part:4.0%} |{'#' * round(10 * part):10}| {text}"
            print(f"\r{text[:shutil.get_terminal_size().columns - 1]}{CLEAR}", end="", flush=True)

    def hide(self) -> None:
        """Clears the live line until the next one."""
        if self.terminal:
            print(f"\r{CLEAR}", end="", flush=True)


def pump(stream: TextIO, name: str, lines: queue.Queue[tuple[str, str | None]]) -> None:
    for line in stream:
        lines.put((name, line.rstrip("\n")))
    lines.put((name, None))


def lines_of(child: Guarded) -> Iterator[tuple[str, str]]:
    """(stream, line) of what a program prints to its pipes, as it comes; ("", "") whenever 0.2 s bring
    none."""
    lines: queue.Queue[tuple[str, str | None]] = queue.Queue()
    streams = {name for name in ("stdout", "stderr") if getattr(child.process, name)}
    for name in streams:
        threading.Thread(target=pump, args=(getattr(child.process, name), name, lines), daemon=True).start()
    while streams:
        try:
            name, line = lines.get(timeout=0.2)
        except queue.Empty:
            yield "", ""
            continue
        if line is None:
            streams.remove(name)
        else:
            yield name, line


def follow(child: Guarded, screen: Screen, progress: Progress, logger: "Logger", signals: "Signals",
           pulse: Pulse) -> bool:
    """Shows a trainer's lines until it and all that it started have ended. Stops one that hangs. Returns
    whether it hung."""
    hung = False
    for stream, line in lines_of(child):
        for event in pulse.read_events():       # before the line, which may end what they began
            progress.take(event)
            logger.take(event, pulse.folder)
        if stream:
            pulse.line(line)
        if stream == "stdout":
            show_line(line, screen, progress)
        elif stream == "stderr":
            screen.show(line, sys.stderr)
        else:
            signals.tell(screen)
            if pulse.overdue() and not hung:
                screen.show(pulse.overdue(), sys.stderr)
                child.let_go()
                hung = True
        screen.tick(*progress.live())
    return hung


def show_line(line: str, screen: Screen, progress: Progress) -> None:
    """A line of stdout; on a terminal, if it is to be shown there."""
    shown = progress.read(line)
    if shown is not None or not screen.terminal:
        screen.show(progress.with_mfu(line), sys.stdout)


# ------------------------------------------------------------ signals
# What asks a run to stop -> what the trainer gets, which saves a checkpoint first
STOPS: dict[int, int] = {
    signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1}
PASSED = (signal.SIGQUIT, signal.SIGUSR2)   # end it at once
STOPPING = "stopping: a checkpoint is saved first if training has begun; Ctrl-C again ends it at once"


class Signals:
    """Passes signals on to the program that runs, and remembers whether one asked it to stop."""
    def __init__(self) -> None:
        self.child: Guarded | None = None
        self.everyone = False
        self.came: list[int] = []
        self.told = False
        for number in (*STOPS, *PASSED):
            if signal.getsignal(number) != signal.SIG_IGN:  # as a shell sets it for `command &`
                signal.signal(number, self.on_signal)
        if signal.getsignal(signal.SIGTSTP) != signal.SIG_IGN:
            signal.signal(signal.SIGTSTP, self.on_pause)

    def follow(self, child: Guarded, everyone: bool = False) -> None:
        """From now on this program gets them; or everyone that it has started, too."""
        self.child = child
        self.everyone = everyone

    def on_signal(self, number: int, _: FrameType | None) -> None:
        child = self.child
        if child is None or child.process.poll() is not None:
            raise KeyboardInterrupt     # what is left, such as a logger that hangs, ends here
        if number == signal.SIGINT and number in self.came:     # Ctrl-C for the second time
            child.send(signal.SIGKILL, everyone=True)
        else:
            child.send(STOPS.get(number, number), self.everyone)
        if number in STOPS:
            self.came.append(number)

    def tell(self, screen: Screen) -> None:
        """Says once that the run is about to stop."""
        if self.came and not self.told:
            self.told = True
            screen.show(STOPPING, sys.stderr)

    def on_pause(self, number: int, _: FrameType | None) -> None:
        """Ctrl-Z: stops the program and all below it, then this one, until the shell's `fg` or `bg`."""
        if self.child:
            self.child.pause()
        handler = signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)     # returns when this program goes on
        signal.signal(number, handler)
        if self.child:
            self.child.go_on()


# ------------------------------------------------------------ LOGGER
LOGGERS = ("tensorboard", "wandb", "trackio")       # the last has the interface of wandb


class TensorBoard:
    """TensorBoard with the interface of wandb."""
    def __init__(self, folder: Path, config: dict[str, str]) -> None:
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(str(folder / "tensorboard"))
        rows = "\n".join(f"| {name} | {value} |" for name, value in config.items())
        self.writer.add_text("config", f"| constant | value |\n| --- | --- |\n{rows}")

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        for name, value in values.items():
            if isinstance(value, str):
                self.writer.add_text(name, f"```\n{value}\n```")
            else:
                self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()


class Logger:
    """Hands on what a run logs: to TensorBoard, Weights & Biases, Trackio or, by default, nobody. After a
    warning the run goes on without one that fails."""
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.run: Any = None        # of wandb's interface

    def safely(self, do: Callable[..., None], *args: Any) -> None:
        try:
            do(*args)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            print(f"run.sh: LOGGER={self.kind} failed ({why}); the run goes on without it", file=sys.stderr,
                  flush=True)
            self.kind = ""
            self.run = None

    def take(self, event: dict[str, Any], folder: Path) -> None:
        """An event of the run in that folder: constants, scalars of a step."""
        kind = event["kind"]
        if kind == "start" and self.kind and not self.run:
            self.safely(self.open, folder, event["config"])
        elif self.run and kind in ("train", "val", "val_part"):
            values = {name: value for name, value in event.items()
                      if name not in ("kind", "step", "steps") and value is not None}
            if kind == "val_part":
                values = {"val_part_loss": event["val_loss"]}
            self.safely(self.run.log, values, event["step"])

    def open(self, folder: Path, config: dict[str, str]) -> None:
        if self.kind == "tensorboard":
            self.run = TensorBoard(folder, config)
        else:
            os.environ.setdefault("WANDB_DIR", str(folder))
            library = import_module(self.kind)
            self.run = library.init(project="train_gpt", name=folder.name, config=config)

    def close(self, samples: str) -> None:
        """Hands on the samples and ends."""
        if self.run:
            self.safely(self.finish, samples)

    def finish(self, samples: str) -> None:
        self.run.log({"samples": samples})
        self.run.finish()


def open_logger(kind: str) -> Logger | None:
    """Logger, or None after saying why there cannot be one."""
    if kind not in ("", *LOGGERS):
        print(f"run.sh: LOGGER={kind} is none of {', '.join(LOGGERS)}", file=sys.stderr)
        return None
    if kind and find_spec(kind) is None:
        python = os.path.relpath(sys.executable)
        install = f"{python} -m pip install"
        if find_spec("pip") is None:  # uv made this environment
            install = f"uv pip install --python {python}"
        print(f"run.sh: LOGGER={kind} needs the package {kind}: {install} {kind}", file=sys.stderr)
        return None
    return Logger(kind)


# ------------------------------------------------------------ the end
def show_result(folder: Path, code: int, env: Mapping[str, str], signals: Signals, logger: Logger) -> None:
    """Samples, loss.png and the last screen, if a run has finished; whatever becomes of them, it has. code:
    its exit code."""
    samples = folder / "samples.txt"
    if code == 0 and (folder / "result.json").exists():
        # the run's own are in its result.json: a flag goes before a variable
        others = {name: env[name] for name in env if name not in ("DATA_PATH", "TOKENIZER_PATH")}
        showing = Guarded([*SHOW, str(folder)], others)
        signals.follow(showing)
        showing.wait()
    logger.close(inputs.read_text(samples) if samples.exists() else "")
