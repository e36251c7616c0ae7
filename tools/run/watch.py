"""What a run looks like: a live line, signals that are passed on, LOGGER. launch.py shows runs by it.

    python -m tools.run.watch SCRIPT [WORD ...]     shows another script so, such as a copy of train_gpt.py

On a terminal one live line stands for the log lines, which train.log keeps: the stage, and in training loss,
bits per byte, tok/s, on a GPU MFU, and the time left. Elsewhere every line passes as it is.
LOGGER=tensorboard | wandb | trackio hands scalars, constants and samples on.
"""
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from data import inputs
from records.verify.folders import HOME, track_of
from tools.run import cards, guard
from tools.run.guard import Guarded
from tools.run.pulse import Pulse

SHOW = ("-m", "tools.run.show")
# A line that begins so begins a stage of a run; the events of training, below, end them
STAGES = {
    "data:": "reading the data", "world_size:": "setting up", "warmup before": "warming up",
    "counting n-grams": "counting n-grams", "n-grams of": "training", "evaluating ": "evaluating",
    "core": "training", "Serialized": "evaluating the artifact", "final_": "writing the result"}
# Lines that a terminal does not need: the live line has them, or result.json
QUIET = re.compile(
    r"data: (val_bytes|text fingerprint)|matmul |world_size:|collectives:|record:|stage table:| {3,}\d+ |"
    r"warmdown:|evaluation:|(log )?sha256|eval settings:|attention: |run folder:|warmup before|setup:|"
    r"step:\d+/\d+ train_loss|val_part |(counting )?n-grams|init of |stopping_early:|evaluating |"
    r"Serialized |Code size:|Total submission|peak memory|scoring the artifact|final_| *[a-z_]+  \S")


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
    """How far a run is, by its lines until it trains, then by its events."""
    def __init__(self) -> None:
        self.stage = "starting"
        self.began = time.monotonic()
        self.data: dict[str, Any] = {}      # of the run, as its first event tells it
        self.report: dict[str, Any] = {}    # the last one of a step
        self.reported = 0.0                 # when it came
        self.trained = False
        self.told: set[str] = set()         # lines about data, which preflight and the trainer have alike
        self.gpus: list[str] = []           # the card of each rank
        self.flops: list[tuple[int, float]] = []    # (first step of a stage, its FLOPs per token)

    def read(self, line: str) -> str | None:
        """Takes a line in. Returns what a terminal shows of it; None: nothing."""
        for start, stage in STAGES.items():
            if line.startswith(start) and not (self.trained and stage == "training"):
                self.enter(f"evaluating {line.split()[1]}" if stage == "evaluating" else stage)
        if line.startswith("warmup before the clock, compiling: "):
            self.enter(f"compiling, {line.partition('compiling: ')[2]} the first time")
        if QUIET.match(line) or line in self.told:
            return None
        if line.startswith("data:"):
            self.told.add(line)
        return line

    def take(self, event: dict[str, Any]) -> None:
        """Takes in what an event tells."""
        kind = event["kind"]
        if kind == "start":
            self.data = event["data"]
            if event["config"].get("eval_from"):
                self.trained = True
                self.enter("evaluating val_loss")
        elif kind == "setup":
            self.enter("training")
        elif kind == "train":
            self.report = event
            self.reported = time.monotonic()
            self.enter("training")
        elif kind == "stop":
            self.trained = True
        elif kind == "val":
            self.trained = self.trained or event["step"] == event["steps"]
            self.enter("writing the model" if self.trained else "training")

    def enter(self, stage: str) -> None:
        if stage != self.stage:
            self.stage = stage
            self.began = time.monotonic()

    def bits_per_byte(self, loss: float) -> float | None:
        """Bits per byte for a loss in nats per token; None if the val split's bytes per token are unknown."""
        if not self.data.get("val_bytes"):
            return None
        return loss / math.log(2) * self.data["val_tokens"] / self.data["val_bytes"]

    def mfu(self, step: int, rate: float) -> str:
        """Model FLOPs utilization at so many tok/s; empty without a GPU."""
        if not self.gpus:
            return ""
        flops = [each for first, each in self.flops if first <= step][-1]
        return cards.mfu_text(flops * rate, self.gpus).partition(" of ")[0]

    def live(self) -> tuple[float | None, str]:
        """(part done or None, text) of the live line now."""
        now = time.monotonic()
        if self.stage != "training" or not self.report:
            return None, f"{self.stage}: {now - self.began:.0f} s"
        report = self.report
        since = min(now - self.reported, report["eta"])
        seconds = report["seconds"] + since
        left = report["eta"] - since
        bpb = self.bits_per_byte(report["mean_loss"])
        rate = report["tokens"] / report["seconds"]
        words = [f"step {report['step']:,}", f"loss {report['mean_loss']:.4f}",
                 f"{bpb:.3f} bpb" if bpb else "", f"{rate:,.0f} tok/s", self.mfu(report["step"], rate),
                 f"{left:.0f} s left"]
        return seconds / max(seconds + left, 1e-9), ", ".join(filter(None, words))


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

    def tick(self, part: float | None, text: str) -> None:
        """The live line: with a bar where the part that is done is known."""
        if self.bar is not None and time.monotonic() > self.ticked + 0.2:
            self.ticked = time.monotonic()
            known = "{percentage:3.0f}% |{bar:10}| {desc}"
            self.bar.bar_format = "{desc}" if part is None else known
            self.bar.ncols = shutil.get_terminal_size().columns - 1     # 79 where the terminal does not say
            self.bar.n = min(part or 0.0, 1.0)
            self.bar.set_description_str(text)

    def hide(self) -> None:
        """Clears the live line until the next one."""
        if self.bar is not None:
            self.bar.clear()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


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
    patience = math.inf     # until a run that hangs is killed
    for stream, line in lines_of(child):
        if stream:
            pulse.line(line)
        for event in pulse.read_events():
            progress.take(event)
            logger.take(event, pulse.folder)
        if stream == "stdout":
            show_line(line, screen, progress)
        elif stream == "stderr":
            screen.show(line, sys.stderr)
        else:
            signals.tell(screen)
            hangs = patience == math.inf and pulse.overdue()
            if hangs:
                screen.show(hangs, sys.stderr)
                child.send(signal.SIGTERM)
                patience = time.monotonic() + guard.PATIENCE
            if time.monotonic() > patience:
                child.send(signal.SIGKILL, everyone=True)
        screen.tick(*progress.live())
    return patience < math.inf


def show_line(line: str, screen: Screen, progress: Progress) -> None:
    """A line of stdout; on a terminal, if it is to be shown there."""
    shown = progress.read(line)
    if screen.bar is None:
        shown = line
    if shown is not None:
        screen.show(shown, sys.stdout)


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


# ------------------------------------------------------------ the track
def target_of(result: dict[str, Any]) -> dict[str, Any]:
    """What records/targets.json has for the run's track; {} where the run changes what the track fixes, or
    its recipe has no track."""
    fixed = {"data_path", "data_fingerprint", "val_tokens", "eval_context", "iterations",
                  "max_wallclock_seconds"}
    if fixed & {*result["overrides"]}:
        return {}
    return json.loads(inputs.read_text(HOME / "targets.json")).get(track_of(result["preset"]), {})


# ------------------------------------------------------------ LOGGER
LOGGERS = ("tensorboard", "wandb", "trackio")       # the last has the interface of wandb


class Logger:
    """Hands on what a run logs: to TensorBoard, Weights & Biases, Trackio or, by default, nobody. After a
    warning the run goes on without one that fails."""
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.run: Any = None        # of the library that kind names
        self.config: dict[str, str] = {}
        if kind == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter
            self.module = SummaryWriter
        elif kind:
            self.module = import_module(kind)

    def take(self, event: dict[str, Any], folder: Path) -> None:
        """An event of the run in that folder: constants, scalars of a step."""
        if self.kind:
            self.safely(self.read, event, folder)

    def safely(self, do: Callable[..., None], *args: Any) -> None:
        try:
            do(*args)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            print(failed(self.kind, error), file=sys.stderr, flush=True)
            self.kind = ""
            self.run = None

    def read(self, event: dict[str, Any], folder: Path) -> None:
        kind = event["kind"]
        if kind == "start":
            self.config = event["config"]
        if kind == "setup" and not self.run:        # it trains
            self.open(folder)
        if self.run and kind in ("train", "val", "val_part"):
            values = {name: value for name, value in event.items()
                      if name not in ("kind", "step", "steps") and value is not None}
            if kind == "val_part":
                values = {"val_part_loss": event["val_loss"]}
            self.scalars(event["step"], values)

    def open(self, folder: Path) -> None:
        if self.kind == "tensorboard":
            self.run = self.module(str(folder / "tensorboard"))
            rows = "\n".join(f"| {name} | {value} |" for name, value in self.config.items())
            self.run.add_text("config", f"| constant | value |\n| --- | --- |\n{rows}")
        else:
            os.environ.setdefault("WANDB_DIR", str(folder))
            self.run = self.module.init(project="train_gpt", name=folder.name, config=self.config)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        if self.kind == "tensorboard":
            for name, value in values.items():
                self.run.add_scalar(name, value, step)
        else:
            self.run.log(values, step=step)

    def close(self, samples: list[str]) -> None:
        """Hands on the samples, as one text, and ends."""
        if self.run:
            self.safely(self.finish, samples)

    def finish(self, samples: list[str]) -> None:
        text = "\n".join(samples)
        if self.kind == "tensorboard":
            self.run.add_text("samples", f"```\n{text}\n```")
            self.run.close()
        else:
            self.run.log({"samples": text})
            self.run.finish()


def failed(kind: str, error: BaseException) -> str:
    why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return f"run.sh: LOGGER={kind} failed ({why}); the run goes on without it"


def open_logger(kind: str) -> Logger | None:
    """Logger, or None after saying why there cannot be one."""
    if kind not in ("", *LOGGERS):
        why = f"LOGGER={kind} is none of {', '.join(LOGGERS)}"
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


# ------------------------------------------------------------ the end
def samples_of(folder: Path) -> list[str]:
    """What show.py has sampled from a run's model."""
    path = folder / "samples.txt"
    return inputs.read_text(path).splitlines() if path.exists() else []


def show_result(folder: Path, code: int, env: Mapping[str, str], signals: Signals, logger: Logger) -> None:
    """Samples, loss.png and the last screen, if a run has finished; whatever becomes of them, it has. code:
    its exit code."""
    samples = []
    if code == 0 and (folder / "result.json").exists():
        # the run's own are in its result.json: a flag goes before a variable
        others = {name: env[name] for name in env if name not in ("DATA_PATH", "TOKENIZER_PATH")}
        showing = Guarded([*SHOW, str(folder)], others)
        signals.follow(showing)
        showing.wait()
        samples = samples_of(folder)
    logger.close(samples)


def main(words: list[str]) -> int:
    """Runs a script, shown as ./run.sh shows the trainer. Returns its exit code."""
    if not words:
        print("watch: which script? python -m tools.run.watch SCRIPT [WORD ...]", file=sys.stderr)
        return 2
    logger = open_logger(os.environ.get("LOGGER", ""))
    if not logger:
        return 2
    env = {name: text for name, text in os.environ.items() if name != "LOGGER"}     # which is heeded here
    screen = Screen(sys.stdout.isatty())
    signals = Signals()
    child = Guarded(words, env, subprocess.PIPE, subprocess.PIPE)
    pulse = Pulse()
    signals.follow(child)
    try:
        hung = follow(child, screen, Progress(), logger, signals, pulse)
    finally:
        screen.close()
    code = child.wait()
    code = 1 if hung else code
    show_result(pulse.folder or Path(), code, env, signals, logger)
    return code


if __name__ == "__main__":
    inputs.steady_output()
    sys.exit(main(sys.argv[1:]))
