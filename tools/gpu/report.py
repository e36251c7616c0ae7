"""Is this GPU ready, and which constants should change? Begins with what no card has shown yet.

    ./run.sh gpu-report [PRESET ...] [NAME=value ...]   all seven presets unless told otherwise
    ./run.sh gpu-report speedrun --only kernels,loop    of train, score, resume, kernels, loop
    ./run.sh gpu-report --minutes 20                    plans for so many (10), and says what will not fit
    ./run.sh gpu-report --toy                           all of it on a CPU, at toy size: a rehearsal of itself

train: 20 steps by train_gpt.py itself, with validation, artifact, reading back and its score. score: the
file that it wrote, in a process of its own. resume: from its checkpoint to the same score. kernels:
attention's tiles and the loss, timed. loop: 200 steps, timed, and the operators outside of generated
kernels. Each part of each preset is a process of its own with a limit on its time. What is timed runs
alone, the others up to three side by side. Whether results are right at these sizes is asked by `./run.sh
test -m gpu`.

The plan reads docs/gpu_results/ and puts first what none of these reports shows. It expects of a part what
a table says, times what the parts so far have taken more than expected on this host, and starts nothing that
would not end in time. The last line says what is still unseen.

One verdict per line, and the same with its figures in gpu_report.json (--json FILE), which is valid whenever
the command is killed; nothing that it started goes on then. ok: as expected. FAULT: do not train before this
is fixed. SLOW: time that a run would lose. set: a constant or a line to change, since it gains more than
0.5 ms a step and a tenth of that part. note: nothing to judge. skip: not done, with the reason. Lines that
begin with `...` tell what is being done.

Shapes are those of one rank of eight, tokens are random; tiny and golf train on text where their data are
here or DATA_PATH names some. --trainer FOLDER takes another train_gpt.py. Exit code 1: some verdict is
FAULT.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple
from unittest import mock

from tools.gpu import plan as gpu_plan
from tools.gpu import results as gpu_results
from tools.gpu import static
from tools.gpu.plan import PARTS, PRESETS, Part
from tools.run import surroundings

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":  # for the processes of the parts, which are trainers, too
    os.environ.update(surroundings.allocator(os.environ))

TRAIN_STEPS = 20
TRAIN_STEPS_OF_A_TOY = 10
MEASURED_TOY = "speedrun"  # of the toys that train, the one that is measured
# DEVICE_BATCH_SIZE. The others take what fits into the card's memory by the plan of ./run.sh, whatever is
# free of it, so that all parts compile the same graph. These are what the first report ran with; in `train`
# gpt2 takes one row at a time, so that others fit beside it.
ROWS = dict(golf="12", golf_plus="16")
TRAIN_ROWS = dict(gpt2="1", gpt2_plus="1")
VOCABULARY = Path("data/tokenizers/gpt2_vocab.json")
ON_TEXT = ("tiny", "golf")
TEXT_TOKENS = "131072"  # of val, that a score of real text reads
TOY_GiB = 8.0
MOST_APART = (
    0.01  # of the score of a run and that of the file that it wrote, or of the run from its checkpoint
)
LINES_SHOWN = 8  # of the output of what failed
PATIENCE = 2.0  # times what is expected on this host: then a part is stopped
LEAST_LIMIT = 60.0  # s
LEAST_LIMIT_ON_A_CPU = 600.0  # which may do other things, too: a toy, or the stand-in for a GPU
HEARTBEAT = 15.0  # s between two lines about a part of which nothing new is known
QUIET = 3.0  # s after such a line, in which what it does next gets none


# ---------- the file
class Report:
    """All that is known, on the screen and in a JSON file, which is replaced as a whole at each change."""

    def __init__(self, path: Path, args: argparse.Namespace, begun: str) -> None:
        self.path = path
        self.began = time.perf_counter()
        self.found: dict[str, Any] = dict(
            version=3, commit=commit_of_here(), toy=args.toy, complete=False, begun=begun,
            minutes=args.minutes, given=args.given, machine={}, parts=[], operators={}, verdicts=[],
        )  # fmt: skip
        self.parts: list[Part] = []
        self.write()

    def write(self) -> None:
        self.found["parts"] = [asdict(part) for part in self.parts]
        new = self.path.with_name(self.path.name + ".tmp")
        new.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
        os.replace(new, self.path)

    def add(self, row: dict[str, Any]) -> None:
        """A verdict: ok, FAULT, SLOW, set, note or skip."""
        self.found["verdicts"].append(row)
        self.write()
        print(f"{row['verdict']:5} {row['preset']:8} {row['text']}", flush=True)
        for line in row["figures"].get("last_lines", []):
            print(f"      | {line}", flush=True)

    def say(self, part: Part, verdict: str, text: str, **figures: Any) -> None:
        self.add(dict(part=part.part, preset=part.preset, verdict=verdict, text=text, figures=figures))

    def skip(self, part: Part, why: str) -> None:
        self.say(part, "skip", f"{part.part}: {why}")

    def now(self) -> float:
        """Seconds since it began; with pause() the clock of the plan."""
        return time.perf_counter() - self.began

    def pause(self) -> None:
        time.sleep(0.1)

    def left(self) -> float:
        """Seconds until it should end."""
        return 60 * self.found["minutes"] - self.now()

    def memory(self) -> float:
        """GiB that parts may fill."""
        return gpu_plan.MEMORY_SHARE * self.found["machine"].get("memory_GiB", TOY_GiB)


# ---------- processes
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def start_process(
    words: Sequence[str | Path], folder: Path, env: Mapping[str, str], output: Path
) -> subprocess.Popen[bytes]:
    """A process in a group of its own, which the kernel kills when this one ends, however that ends."""
    parent = os.getpid()

    def bound_to_parent() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended in between
            os._exit(1)

    with open(output, "ab") as file:
        return subprocess.Popen(
            [str(word) for word in words], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file,
            stderr=file, start_new_session=True, preexec_fn=bound_to_parent,
        )  # fmt: skip


def stop_process(process: subprocess.Popen[bytes]) -> None:
    """Kills it with all that it started in its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def last_lines(path: Path) -> list[str]:
    """The last lines of a file that say something."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return [line.rstrip()[:200] for line in lines if line.strip()][-LINES_SHOWN:]


class Command(NamedTuple):
    """How to run a part. read: the event that a line of `events` tells, or None; look: is called now and then
    while it runs; finish: what to say when it has ended well."""

    words: list[str | Path]
    folder: Path
    env: dict[str, str]
    output: Path
    events: Path
    read: Callable[[str], dict[str, Any] | None]
    look: Callable[[], None]
    finish: Callable[[Job], None]


class Job:
    """A part that runs."""

    def __init__(self, part: Part, command: Command, report: Report) -> None:
        self.part = part
        self.command = command
        self.report = report
        self.position = 0  # in the file of events
        self.began = time.perf_counter()
        self.told = self.began
        on_cpu = report.found["toy"] or "STATIC_NAME" in os.environ
        expected = part.expected_s * gpu_plan.slowness(report.parts)
        patient = max(LEAST_LIMIT_ON_A_CPU if on_cpu else LEAST_LIMIT, PATIENCE * expected)
        part.limit_s = min(patient, max(1.0, report.left()))
        self.cut = part.limit_s < patient  # by the end of the report, so it may be well if it is stopped
        self.process = start_process(command.words, command.folder, command.env, command.output)
        self.tell("starting")

    def tell(self, doing: str) -> None:
        """A line about what it does now."""
        self.part.doing = doing
        self.told = time.perf_counter()
        seconds = self.told - self.began
        print(f"...   {self.part.preset:8} {self.part.part}: {doing}, {seconds:.0f} s", flush=True)

    def events(self) -> list[dict[str, Any]]:
        """What the process has told since the last call, by whole lines."""
        if not self.command.events.exists():
            return []
        with open(self.command.events, "rb") as file:
            file.seek(self.position)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self.position += len(whole)
        found = [self.command.read(line) for line in whole.decode(errors="replace").splitlines()]
        return [event for event in found if event]

    def take(self, event: dict[str, Any]) -> None:
        """A verdict, what the process does, or figures of its part."""
        if "verdict" in event:
            self.report.add(event)
        if "doing" in event and event["doing"] != self.part.doing:
            self.part.doing = event["doing"]
            if time.perf_counter() - self.told > QUIET:
                self.tell(self.part.doing)
        if "machine" in event:
            self.report.found["machine"] = event["machine"]
        if "operators" in event:
            self.report.found["operators"][self.part.preset] = event["operators"]
        for name in ("compile_seconds", "peak_GiB"):
            if name in event:
                setattr(self.part, name, event[name])

    def poll(self) -> bool:
        """Takes what is new. Has it ended?"""
        code = self.process.poll()
        for event in self.events():
            self.take(event)
        self.command.look()
        self.part.seconds = round(time.perf_counter() - self.began, 1)
        if code is None and self.part.seconds <= self.part.limit_s:
            if time.perf_counter() - self.told > HEARTBEAT:
                self.tell(self.part.doing)
            return False
        self.end(code)
        return True

    def end(self, code: int | None) -> None:
        """What became of it; None: it ran longer than it may. What failed shows its last lines."""
        stop_process(self.process)  # and what it may have left
        part = self.part
        if code == 0:
            part.state = "done"
            self.command.finish(self)
            self.report.write()
            return
        part.state = "stopped" if code is None else "failed"
        part.last_lines = last_lines(self.command.output)
        if code is None:
            why = f"stopped after {part.seconds:.0f} s"
        else:
            why = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        verdict = "skip" if code is None and self.cut else "FAULT"
        text = f"{part.part}: {why}, at: {part.doing}"
        self.report.say(part, verdict, text, last_lines=part.last_lines)


# ---------- settings and data
class Workshop:
    """What the parts of a report share: settings and random data."""

    def __init__(
        self,
        trainer: ModuleType,
        bench: ModuleType,
        parts: ModuleType,
        args: argparse.Namespace,
        folder: Path,
    ) -> None:
        self.trainer = trainer
        self.bench = bench
        self.parts = parts
        self.args = args
        self.folder = folder
        self.settings: dict[str, dict[str, str]] = {}

    def random_tokens(self, cfg: Any) -> dict[str, str]:
        """Random tokens for a preset's vocabulary and rows, written once."""
        folder = self.folder / f"tokens_{cfg.vocab_size or 1024}_{cfg.eval_context or cfg.train_seq_len}"
        known = folder / "settings.json"
        if not known.exists():
            folder.mkdir()
            size = 1 << (20 if self.args.toy else 24)
            known.write_text(json.dumps(self.bench.random_data(folder, cfg, size, rows=2.5)))
        return json.loads(known.read_text())

    def vocabulary(self) -> Path:
        """GPT-2's, for prefix tokens; a random one where it was not fetched."""
        if VOCABULARY.exists():
            return VOCABULARY.resolve()
        file = self.folder / "vocabulary.json"
        letters = [chr(number) for number in range(33, 127)]
        words = [a + b + c for a in letters[:6] for b in letters for c in letters]
        file.write_text(json.dumps({word: token for token, word in enumerate(words[:50_257])}))
        return file

    def rows(self, report: Report, cfg: Any) -> str:
        """DEVICE_BATCH_SIZE of a preset that has the card to itself."""
        if cfg.preset in ROWS:
            return ROWS[cfg.preset]
        from tools.run import machine, plan  # they import the trainer

        torch = self.trainer.torch
        free = int(report.memory() * 2**30)
        card = machine.Machine(1, 1, True, torch.device("cuda"), torch.bfloat16, free, 1)
        cfg = self.trainer.replace(cfg, vocab_size=cfg.vocab_size or 1024)
        capability = tuple(report.found["machine"]["capability"])
        with mock.patch.object(torch.cuda, "get_device_capability", lambda: capability):
            return str(plan.micro_batch(cfg, card))  # without the driver, which this process leaves alone

    def settings_of(self, report: Report, preset: str) -> dict[str, str]:
        """For the batch of one rank, on random tokens. Raises Refused."""
        if preset not in self.settings:
            settings = self.parts.one_rank_of_eight(self.trainer, preset, self.args.given, self.args.toy)
            cfg = self.trainer.load_config(os.environ | settings)
            settings |= self.random_tokens(cfg)
            settings |= dict(MAX_WALLCLOCK_SECONDS="0", VAL_LOSS_EVERY="0", MAX_EPOCHS="0")
            settings["VOCAB_PATH"] = str(self.vocabulary())
            if not self.args.toy and not cfg.device_batch_size:
                settings["DEVICE_BATCH_SIZE"] = self.rows(report, cfg)
            self.settings[preset] = settings
        return dict(self.settings[preset])

    def train_settings(self, report: Report, preset: str) -> dict[str, str]:
        """Of 20 steps from the first to the score of what was read back, with a checkpoint halfway."""
        settings = self.settings_of(report, preset)
        steps = TRAIN_STEPS_OF_A_TOY if self.args.toy else TRAIN_STEPS
        half = str(steps // 2)
        settings |= dict(ITERATIONS=str(steps), VAL_LOSS_EVERY=half, TRAIN_LOG_EVERY="5", RUN_ID=preset)
        if preset not in gpu_plan.LARGE:
            settings["SAVE_EVERY"] = half
        if not self.args.toy:
            # golf's warmdown of 3,000 steps would leave 0.006 of its LR after the first one
            settings |= dict(WARMUP_STEPS="2", EXTENSION_ITERATIONS="2", WARMDOWN_ITERS=half)
            if preset in TRAIN_ROWS:
                settings["DEVICE_BATCH_SIZE"] = TRAIN_ROWS[preset]
        if preset in ON_TEXT:
            own = self.trainer.load_config(dict(PRESET=preset) | self.args.given).data_path
            if Path(own, "manifest.json").exists():
                settings |= dict(DATA_PATH=str(Path(own).resolve()), VAL_TOKENS=TEXT_TOKENS)
        return settings | {name: text for name, text in self.args.given.items() if name != "DATA_PATH"}

    def environment(self) -> dict[str, str]:
        """For processes side by side: each compiler would start as many workers as there are cores."""
        env = dict(os.environ, PYTHONUNBUFFERED="1")
        if self.args.toy:
            env["OMP_NUM_THREADS"] = "1"
        else:
            cores = len(os.sched_getaffinity(0))
            env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(2, cores // gpu_plan.MOST)))
        return env

    def run_of(self, preset: str, part: str = "train") -> Path:
        """The folder of the run that a part makes of a preset."""
        return self.folder / f"{preset}_{part}" / "logs" / preset


# ---------- commands
def command_of(workshop: Workshop, report: Report, part: Part) -> Command:
    """How to run a part, in a folder of its own. Raises Refused."""
    folder = workshop.folder / part.name().replace(" ", "_")
    folder.mkdir()
    source = workshop.args.trainer.resolve()
    output = folder / "output.txt"
    if part.part in ("train", "score", "resume"):
        settings = workshop.train_settings(report, part.preset)
        judge = judge_training
        look = partial(keep_checkpoint, folder / "logs" / part.preset)
        if part.part == "score":
            settings |= dict(EVAL_FROM=str(file_of(workshop, part.preset)))
            judge = judge_again
        elif part.part == "resume":
            restore_checkpoint(workshop, part.preset)
            settings |= dict(RESUME=part.preset)
            judge = judge_again
        words: list[str | Path] = [sys.executable, source / "train_gpt.py"]
        env = workshop.environment() | settings
        return Command(words, folder, env, output, output, read_training, look, partial(judge, workshop))
    settings = workshop.settings_of(report, part.preset) if part.preset else {}
    spec = dict(
        part=part.part, preset=part.preset, settings=settings, trainer=str(source), toy=workshop.args.toy,
        events=str(folder / "events.jsonl"), machine=report.found["machine"],
    )  # fmt: skip
    file = folder / "spec.json"
    file.write_text(json.dumps(spec), encoding="utf-8")
    words = [sys.executable, "-m", "tools.gpu.parts", file]
    env = workshop.environment()
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    return Command(
        words, folder, env, output, Path(spec["events"]), json.loads, lambda: None, lambda job: None,
    )  # fmt: skip


def keep_checkpoint(run: Path) -> None:
    """The first one that a run writes stays under another name: the one of its end would replace it."""
    if (run / "checkpoint.pt").exists() and not (run / "halfway.pt").exists():
        os.link(run / "checkpoint.pt", run / "halfway.pt")


def restore_checkpoint(workshop: Workshop, preset: str) -> None:
    """The run of `train` as it was halfway, for `resume`."""
    run = workshop.run_of(preset)
    again = workshop.run_of(preset, "resume")
    shutil.copytree(
        run, again, ignore=lambda _, names: [name for name in names if name.endswith(("pt", "ptz"))]
    )
    (again / "result.json").unlink()
    os.link(run / "halfway.pt", again / "checkpoint.pt")


def file_of(workshop: Workshop, preset: str) -> Path:
    """What `train` has written to be scored: the artifact, where the preset has one."""
    files = sorted(workshop.run_of(preset).glob("final_model.*"), key=lambda file: file.suffix != ".ptz")
    workshop.trainer.require(bool(files), "there is no file of train's to score")
    return files[0]


# The lines of train.log that tell what a run does now
STATIONS = [
    (r"warmup before the clock, compiling", "compiling"),
    (r"warmup before the clock", "warmup"),
    (r"setup:\d+ms compile:\d+ms", "training"),
    (r"evaluating val_loss", "scoring val"),
    (r"step:\d+/\d+ train_loss", "training"),
    (r"scoring the artifact as read back", "scoring the artifact as read back"),
]


def read_training(line: str) -> dict[str, Any] | None:
    """What a line of train_gpt.py tells."""
    compiled = re.match(r"setup:\d+ms compile:(\d+)ms", line)
    if compiled:
        return dict(doing="training", compile_seconds=round(int(compiled[1]) / 1e3, 1))
    memory = re.match(r"peak memory allocated: \d+ MiB reserved: (\d+) MiB", line)
    if memory:
        return dict(peak_GiB=round(int(memory[1]) / 1024, 1))
    return next((dict(doing=doing) for pattern, doing in STATIONS if re.match(pattern, line)), None)


def scores_of(run: Path) -> dict[str, float]:
    """{trained or artifact: val loss} of a run that has ended."""
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    return {kind: result[kind]["val_loss"] for kind in ("trained", "artifact") if result.get(kind)}


def judge_training(workshop: Workshop, job: Job) -> None:
    """A verdict on a run that ended well: its losses are numbers."""
    part = job.part
    run = workshop.run_of(part.preset)
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    log = job.command.output.read_text(encoding="utf-8", errors="replace")
    losses = [float(loss) for loss in re.findall(r"^step:\d+/\d+ train_loss:(\S+)", log, re.M)]
    scores = scores_of(run)
    good = len(losses) > 1 and bool(scores) and all([math.isfinite(n) for n in [*losses, *scores.values()]])
    folder = Path(job.command.env["DATA_PATH"])
    data = "random tokens" if folder.parent == workshop.folder else folder.name
    told = f"loss {losses[0]:.4f} to {losses[-1]:.4f}" if losses else "no loss"
    for kind, words in (("trained", "val"), ("artifact", "as read back")):
        if kind in scores:
            told += f", {words} {scores[kind]:.4f}"
    compiled = result["config"]["compile"] == "1"
    told += f"; {part.compile_seconds:.0f} s to compile" if compiled else "; not compiled"
    told += f"; micro_batch {result['micro_batch']}, {part.peak_GiB:.1f} GiB" if part.peak_GiB else ""
    text = f"train: {result['steps']} steps on {data}, {told}"
    figures = dict(losses=losses, scores=scores, steps=result["steps"], micro_batch=result["micro_batch"])
    job.report.say(part, "ok" if good else "FAULT", text, compiled=compiled, **figures)


def last_score(run: Path) -> float:
    """The val loss of what a run has written."""
    return [*scores_of(run).values()][-1]


def judge_again(workshop: Workshop, job: Job) -> None:
    """The file scores what the run that wrote it said; from its checkpoint the run comes to the same."""
    part = job.part
    scored = last_score(workshop.run_of(part.preset, part.part))
    said = last_score(workshop.run_of(part.preset))
    verdict = "ok" if abs(scored - said) < MOST_APART else "FAULT"
    text = (
        f"score: {Path(job.command.env.get('EVAL_FROM', '')).name} gives {scored:.4f} in a process of its own"
    )
    if part.part == "resume":
        log = job.command.output.read_text(encoding="utf-8", errors="replace")
        steps = re.findall(r"^resume: from step (\d+)", log, re.M)
        text = f"resume: from step {', '.join(steps)} to {scored:.4f}"
    job.report.say(part, verdict, f"{text}; the run said {said:.4f}", scored=scored, said=said)


# ---------- the command
def parse(argv: list[str]) -> argparse.Namespace:
    """The words of the command; presets and given {NAME: value} apart."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="PRESET or NAME=value")
    parser.add_argument("--toy", action="store_true", help="on a CPU, at toy size")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--json", type=Path, default=Path("gpu_report.json"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--trainer", type=Path, default=ROOT, help="folder of train_gpt.py")
    args = parser.parse_intermixed_args(argv)
    args.only = [name for name in args.only.split(",") if name != "environment"]
    unknown = [name for name in args.only if name not in PARTS]
    if unknown:
        parser.error(f"--only: {unknown[0]} is none of {', '.join(PARTS)}")
    if {*args.only} & {*gpu_plan.AFTER_TRAIN} and "train" not in args.only:
        args.only.insert(0, "train")  # whose file and checkpoint they take
    args.presets = [word for word in args.words if "=" not in word] or [*PRESETS]
    args.given = dict([word.split("=", 1) for word in args.words if "=" in word])
    return args


def commit_of_here() -> str:
    if not shutil.which("git"):
        return ""
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def conclude(report: Report, complete: bool) -> int:
    """The last lines; the exit code."""
    verdicts = report.found["verdicts"]
    counts = Counter([row["verdict"] for row in verdicts])
    report.found["complete"] = complete
    report.found["seconds"] = round(report.now(), 1)
    report.write()
    changes = [row["figures"]["change"] for row in verdicts if row["verdict"] == "set"]
    print(
        f"\n{counts['FAULT']} faults, {counts['SLOW']} slow, {counts['ok']} ok, {counts['skip']} skipped in "
        f"{report.found['seconds']:.0f} s; {report.path} has the figures."
    )
    if not report.found["toy"]:
        if changes:
            print("Set: " + "; ".join(dict.fromkeys(changes)))
        print(gpu_plan.tell_rest(report.parts))
    return int(counts["FAULT"] > 0)


def planned(args: argparse.Namespace) -> list[Part]:
    """The parts that are asked for; of a toy those that do not train are done of one preset."""
    rows = gpu_results.shown(gpu_results.reports())
    shown = {(row.preset, row.goal) for row in rows if not row.given}
    parts = gpu_plan.make_plan(args.presets, args.only, shown, args.toy)
    if args.toy and len(args.presets) > 1:
        parts = [part for part in parts if part.part == "train" or part.preset == MEASURED_TOY]
    return parts


def measure(workshop: Workshop, report: Report) -> None:
    """The environment first, since the plan needs the GPU's memory and how fast this host is; then all
    parts."""
    args = workshop.args

    def start(part: Part) -> Job | None:
        try:
            return Job(part, command_of(workshop, report, part), report)
        except Exception as error:  # such as constants that the trainer refuses
            part.state = "failed"
            report.say(part, "FAULT", f"{part.part}: {str(error) or type(error).__name__}")
            return None

    def carry_out() -> None:
        seconds = 60 * args.minutes
        gpu_plan.carry_out(report.parts, start, report.skip, report, seconds, report.memory())

    try:
        report.parts = gpu_plan.make_plan([], ["environment"], [], args.toy)
        carry_out()
        if not args.toy and not report.found["machine"].get("gpu"):
            text = "torch finds no GPU, so no preset was measured: --toy rehearses on a CPU"
            report.say(report.parts[0], "FAULT", text)
            return
        rest = planned(args)
        slow = gpu_plan.slowness(report.parts)
        for line in gpu_plan.tell_plan(rest, report.memory(), report.left(), slow):
            print(line, flush=True)
        report.parts += rest
        carry_out()
    finally:
        for part in report.parts:
            if part.state == "running":  # it ends with this process
                part.state = "stopped"
        report.write()


def interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(argv: list[str]) -> int:
    args = parse(argv)
    print("...   importing torch", flush=True)
    from tools.gpu import parts as gpu_parts

    trainer = static.load_trainer(args.trainer / "train_gpt.py")
    from tools.dev import bench

    try:
        for preset in args.presets:
            trainer.require(preset in trainer.RECIPES, f"{preset} is none of {', '.join(trainer.RECIPES)}")
        bench.check_names(args.given, trainer)
    except trainer.Refused as error:
        print(f"gpu-report: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, interrupted)
    begun = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="gpu_report_") as folder:
        workshop = Workshop(trainer, bench, gpu_parts, args, Path(folder))
        report = Report(args.json, args, begun)
        try:
            measure(workshop, report)
        except KeyboardInterrupt:
            conclude(report, complete=False)
            return 130
    return conclude(report, complete=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
