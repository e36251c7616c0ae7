"""Is this GPU ready, and which constants should change? Ten minutes on one GPU, compiling included.

    ./run.sh gpu-report [PRESET ...] [NAME=value ...]   all seven presets unless told otherwise
    ./run.sh gpu-report speedrun --only numbers,loop    of train, score, numbers, losses, ranks, loop,
                                                        alternatives
    ./run.sh gpu-report --minutes 20                    plans for so many minutes, and says what will not fit
    ./run.sh gpu-report --toy                           all of it on a CPU, at toy size: a rehearsal of itself

train: 20 steps by train_gpt.py itself, with validation, artifact, reading back and its score. score: the file
that it wrote, in a process of its own. numbers: attention, loss and fp8 products against fp32. losses: 50
compiled steps beside 50 eager ones, and the operators outside of generated kernels. ranks: two on the CPU.
loop: 200 steps, timed. alternatives: other ways to compute the same, timed. Each part of each preset is a
process of its own with a limit on its time. Those that are not timed run side by side, as far as memory goes,
and fill the caches of compiled code for those that are, which run alone.

One verdict per line, and the same with its figures in gpu_report.json (--json FILE), which is valid whenever
the command is killed; nothing that it started goes on then. ok: as expected. FAULT: do not train before this
is fixed. SLOW: time that a run would lose. set: a constant or a line to change, since it gains more than
0.5 ms a step and a tenth of that part. note: nothing to judge. skip: not done, with the reason. Lines that
begin with `...` tell what is being done.

Shapes are those of one rank of eight, tokens are random; tiny and golf train on text where DATA_PATH=FOLDER
or data/datasets has some. What a part took in the report that --json names, or in docs/gpu_results, is what
the plan expects of it. --trainer FOLDER takes another train_gpt.py. Exit code 1: some verdict is FAULT.
"""

from __future__ import annotations

import argparse
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
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
if __name__ == "__main__":  # our modules are those of this checkout, whatever else the path holds
    sys.path[:] = [str(ROOT), *[folder for folder in sys.path if folder != str(HERE)]]
from tools.gpu import plan as gpu_plan  # noqa: E402
from tools.gpu.plan import COMPILED_TOY, PARTS, PRESETS, Command, Job, Need, Part, Report  # noqa: E402
from tools.run import surroundings  # noqa: E402

if __name__ == "__main__":  # for the processes of the parts, which are trainers, too
    os.environ.update(surroundings.allocator(os.environ))

if TYPE_CHECKING:  # --trainer names the folder of the one that runs
    from train_gpt import Config

TRAIN_STEPS = 20
TRAIN_STEPS_OF_A_TOY = 10
# DEVICE_BATCH_SIZE. The others take what fits into the card's memory by the plan of ./run.sh, whatever is
# free of it, so that all parts compile the same graph. These are what the first report ran with; in `train`
# gpt2 takes one row at a time, so that others fit beside it.
ROWS = dict(golf="12", golf_plus="16")
TRAIN_ROWS = dict(gpt2="1", gpt2_plus="1")
VOCABULARY = Path("data/tokenizers/gpt2_vocab.json")
ON_TEXT = ("tiny", "golf")
TEXT_TOKENS = 1 << 17  # of val, that a score of real text reads
TOY_GiB = 8.0
MOST_APART = 0.01  # of the score of a run and that of the file that it wrote


# ---------- settings and data
def manifest_of(folder: Path) -> dict[str, Any]:
    """A dataset's manifest, {} if there is none or a shard is missing."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        splits = [row["split"] for row in manifest["files"] if (folder / row["path"]).exists()]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return manifest if {"train", "val"} <= {*splits} else {}


def text_for(cfg: Config, given: dict[str, str]) -> dict[str, str]:
    """Settings that make a run read real text in the preset's vocabulary, {} if there is none here."""
    folders = [Path(given["DATA_PATH"])] if "DATA_PATH" in given else []
    folders += [Path(cfg.data_path), *sorted(Path("data/datasets").glob("*"))]
    for folder in folders:
        manifest = manifest_of(folder)
        tokenizer = manifest.get("tokenizer", {})
        if not manifest or cfg.vocab_size not in (0, tokenizer.get("vocab_size")):
            continue
        model = folder / tokenizer.get("path", "missing")
        count = sum([row["tokens"] for row in manifest["files"] if row["split"] == "val"])
        return dict(
            DATA_PATH=str(folder.resolve()),
            DATA_FINGERPRINT="",
            TOKENIZER_PATH=str(model.resolve()) if model.exists() else "",
            VAL_TOKENS=str(TEXT_TOKENS if count > TEXT_TOKENS else 0),
        )
    return {}


class Workshop:
    """What the parts of a report share: settings, random data, the memory and the cores."""

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
        self.cores = len(os.sched_getaffinity(0))
        self.most = max(2, self.cores // 2)
        self.settings: dict[str, dict[str, str]] = {}

    def random_tokens(self, cfg: Config) -> dict[str, str]:
        """Random tokens for a preset's vocabulary and rows, written once."""
        context = cfg.eval_context or cfg.train_seq_len
        folder = self.folder / f"tokens_{cfg.vocab_size or 1024}_{context}"
        known = folder / "settings.json"
        if not known.exists():
            folder.mkdir()
            size = 1 << (20 if self.args.toy else 24)
            known.write_text(json.dumps(self.bench.random_data(folder, cfg, size, rows=2.5)))
        return json.loads(known.read_text())

    def vocabulary(self) -> Path:
        """GPT-2's, for prefix tokens; a made-up one where it was not fetched."""
        if VOCABULARY.exists():
            return VOCABULARY.resolve()
        file = self.folder / "vocabulary.json"
        if not file.exists():
            letters = [chr(number) for number in range(33, 127)]
            words = [a + b + c for a in letters[:6] for b in letters for c in letters]
            file.write_text(json.dumps({word: token for token, word in enumerate(words[:50_257])}))
        return file

    def rows(self, report: Report, cfg: Config) -> str:
        """DEVICE_BATCH_SIZE of a preset that has the card to itself."""
        if cfg.preset in ROWS:
            return ROWS[cfg.preset]
        from tools.run import machine, plan  # they import the trainer

        torch = self.trainer.torch
        free = int(self.memory(report) * 2**30)
        card = machine.Machine(1, 1, True, torch.device("cuda"), torch.bfloat16, free, 1)
        cfg = self.trainer.replace(cfg, vocab_size=cfg.vocab_size or 1024)
        capability = tuple(report.found["machine"]["capability"])
        with mock.patch.object(torch.cuda, "get_device_capability", lambda: capability):
            return str(plan.micro_batch(cfg, card))  # without the driver, which this process leaves alone

    def settings_of(self, report: Report, preset: str) -> dict[str, str]:
        """For the batch of one rank, on random tokens. Raises Refused."""
        if preset not in self.settings:
            settings = self.parts.one_rank_of_eight(self.trainer, preset, self.args.given, self.args.toy)
            if self.args.toy and preset != COMPILED_TOY:
                settings = dict(COMPILE="0") | settings
            cfg = self.trainer.load_config(os.environ | settings)
            settings |= self.random_tokens(cfg)
            settings |= dict(MAX_WALLCLOCK_SECONDS="0", VAL_LOSS_EVERY="0", MAX_EPOCHS="0")
            settings["VOCAB_PATH"] = str(self.vocabulary())
            if not self.args.toy and not cfg.device_batch_size:
                settings["DEVICE_BATCH_SIZE"] = self.rows(report, cfg)
            self.settings[preset] = settings
        return dict(self.settings[preset])

    def train_settings(self, report: Report, preset: str) -> dict[str, str]:
        """Of 20 steps from the first to the score of what was read back."""
        settings = self.settings_of(report, preset)
        steps = TRAIN_STEPS_OF_A_TOY if self.args.toy else TRAIN_STEPS
        settings |= dict(
            ITERATIONS=str(steps),
            VAL_LOSS_EVERY=str(steps // 2),
            TRAIN_LOG_EVERY="5",
            RUN_ID=preset,
        )
        if not self.args.toy:
            # golf's warmdown of 3,000 steps would leave 0.006 of its LR after the first one
            settings |= dict(WARMUP_STEPS="2", EXTENSION_ITERATIONS="2", WARMDOWN_ITERS=str(steps // 2))
            if preset in TRAIN_ROWS:
                settings["DEVICE_BATCH_SIZE"] = TRAIN_ROWS[preset]
        if preset in ON_TEXT:
            own = {name: text for name, text in settings.items() if name != "DATA_PATH"}
            settings |= text_for(self.trainer.load_config(own), self.args.given)
        return settings | {name: text for name, text in self.args.given.items() if name != "DATA_PATH"}

    def memory(self, report: Report) -> float:
        """GiB that parts may fill."""
        whole = report.found["machine"].get("memory_GiB", TOY_GiB)
        return gpu_plan.MEMORY_SHARE * whole

    def environment(self) -> dict[str, str]:
        """For processes side by side: each compiler would start as many workers as there are cores."""
        env = dict(os.environ, PYTHONUNBUFFERED="1")
        if self.args.toy:
            env["OMP_NUM_THREADS"] = "1"
            # gcc killed while it writes would leave half a file in the cache that all programs share
            env["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "compiled")
        else:
            env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(2, self.cores // 4)))
        return env


# ---------- commands
def command_of(workshop: Workshop, report: Report, part: Part) -> Command:
    """How to run a part, in a folder of its own. Raises Refused."""
    folder = workshop.folder / part.name().replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)  # of the same part, beside others
    folder.mkdir()
    source = workshop.args.trainer.resolve()
    output = folder / "output.txt"
    if part.part in ("train", "score"):
        words = [sys.executable, source / "train_gpt.py"]
        settings = workshop.train_settings(report, part.preset)
        judge = partial(judge_training, workshop)
        if part.part == "score":
            settings = score_settings(workshop, part.preset, settings)
            judge = partial(judge_score, workshop)
        return Command(words, folder, workshop.environment() | settings, output, output, read_training, judge)
    settings = workshop.settings_of(report, part.preset) if part.preset else {}
    events = folder / "events.jsonl"
    spec = dict(
        part=part.part,
        preset=part.preset,
        settings=settings,
        trainer=str(source),
        toy=workshop.args.toy,
        events=str(events),
        machine=report.found["machine"],
        folder=str(folder),
    )
    file = folder / "spec.json"
    file.write_text(json.dumps(spec), encoding="utf-8")
    words = [sys.executable, ROOT / "tools/gpu/parts.py", file]
    return Command(
        words,
        folder,
        workshop.environment(),
        output,
        events,
        json.loads,
        lambda job: None,
    )


def run_of(workshop: Workshop, preset: str) -> Path:
    """The folder of the run that `train` makes of a preset."""
    return workshop.folder / f"{preset}_train" / "logs" / preset


def score_settings(workshop: Workshop, preset: str, settings: dict[str, str]) -> dict[str, str]:
    """Of the score of the file that `train` has written."""
    files = sorted(run_of(workshop, preset).glob("final_model.*"))
    workshop.trainer.require(bool(files), "there is no file of train's to score")
    artifacts = [file for file in files if file.suffix == ".ptz"]
    return settings | dict(EVAL_FROM=str([*artifacts, *files][0]), RUN_ID=preset)


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
    for pattern, doing in STATIONS:
        if re.match(pattern, line):
            return dict(doing=doing)
    return None


def judge_training(workshop: Workshop, job: Job) -> None:
    """A verdict on a run that ended well: its losses are numbers."""
    part = job.part
    run = job.command.folder / "logs" / part.preset
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    log = job.command.output.read_text(encoding="utf-8", errors="replace")
    losses = [float(loss) for loss in re.findall(r"^step:\d+/\d+ train_loss:(\S+)", log, re.M)]
    scores = {kind: result[kind]["val_loss"] for kind in ("trained", "artifact") if result.get(kind)}
    numbers = [*losses, *scores.values()]
    compiled = result["config"]["compile"] == "1"
    good = len(losses) > 1 and bool(scores) and all([math.isfinite(number) for number in numbers])
    folder = Path(job.command.env["DATA_PATH"])
    data = "random tokens" if folder.parent == workshop.folder else folder.name
    text = (
        f"train: {result['steps']} steps on {data}, loss {losses[0]:.4f} to {losses[-1]:.4f}"
        if losses
        else "train: no loss"
    )
    for kind, words in (("trained", "val"), ("artifact", "as read back")):
        if kind in scores:
            text += f", {words} {scores[kind]:.4f}"
    text += f"; {part.compile_seconds:.0f} s to compile" if compiled else "; not compiled"
    text += f"; micro_batch {result['micro_batch']}, {part.peak_GiB:.1f} GiB" if part.peak_GiB else ""
    job.report.say(
        part,
        "ok" if good else "FAULT",
        text,
        losses=losses,
        scores=scores,
        steps=result["steps"],
        micro_batch=result["micro_batch"],
        compiled=compiled,
    )


def judge_score(workshop: Workshop, job: Job) -> None:
    """The file scores what the run that wrote it said."""
    part = job.part
    result = json.loads(
        (job.command.folder / "logs" / part.preset / "result.json").read_text(encoding="utf-8")
    )
    scored = [result[kind]["val_loss"] for kind in ("artifact", "trained") if result.get(kind)][0]
    of_the_run = run_of(workshop, part.preset) / "result.json"
    if not of_the_run.exists():
        text = f"score: {scored:.4f} in a process of its own; train failed before its own score"
        job.report.say(part, "note", text, scored=scored)
        return
    before = json.loads(of_the_run.read_text(encoding="utf-8"))
    said = [before[kind]["val_loss"] for kind in ("artifact", "trained") if before.get(kind)][0]
    name = Path(job.command.env["EVAL_FROM"]).name
    good = abs(scored - said) < MOST_APART
    job.report.say(
        part,
        "ok" if good else "FAULT",
        f"score: {name} gives {scored:.4f} in a process of its own; the run said {said:.4f}",
        scored=scored,
        said=said,
    )


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
    args.only = args.only.split(",")
    unknown = [name for name in args.only if name not in PARTS]
    if unknown:
        parser.error(f"--only: {unknown[0]} is none of {', '.join(PARTS)}")
    args.presets = [word for word in args.words if "=" not in word]
    args.given = dict([word.split("=", 1) for word in args.words if "=" in word])
    return args


def commit_of_here() -> str:
    if not shutil.which("git"):
        return ""
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def conclude(report: Report, complete: bool) -> int:
    """The last line; the exit code."""
    verdicts = report.found["verdicts"]
    counts = Counter([row["verdict"] for row in verdicts])
    report.found["complete"] = complete
    report.found["seconds"] = round(time.perf_counter() - report.began, 1)
    report.found["compile_seconds"] = round(sum([part.compile_seconds for part in report.parts]), 1)
    report.write()
    changes = [row["figures"]["change"] for row in verdicts if row["verdict"] == "set"]
    print(
        f"\n{counts['FAULT']} faults, {counts['SLOW']} slow, {counts['ok']} ok, {counts['skip']} skipped in "
        f"{report.found['seconds']:.0f} s; {report.path} has the figures."
    )
    if changes and not report.found["toy"]:
        print("Set: " + "; ".join(dict.fromkeys(changes)))
    return int(counts["FAULT"] > 0)


def measure(
    workshop: Workshop, report: Report, presets: list[str], earlier: dict[tuple[str, str], Need]
) -> None:
    """The environment first, since the plan needs the GPU's memory; then all parts."""
    args = workshop.args
    command = partial(command_of, workshop, report)
    report.parts = gpu_plan.make_plan([], ["environment"], earlier, args.toy)
    gpu_plan.carry_out(report, command, workshop.most, lambda: workshop.memory(report))
    if not args.toy and not report.found["machine"].get("gpu"):
        report.say(
            report.parts[0],
            "FAULT",
            "torch finds no GPU, so no preset was measured: --toy rehearses on a CPU",
        )
        return
    rest = [part for part in args.only if part != "environment"]
    report.parts += gpu_plan.make_plan(presets, rest, earlier, args.toy)
    waiting = [part for part in report.parts if part.state == "waiting"]
    for line in gpu_plan.tell_plan(waiting, workshop.memory(report), workshop.most, report.left() / 60):
        print(line, flush=True)
    gpu_plan.carry_out(report, command, workshop.most, lambda: workshop.memory(report))


def interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(argv: list[str]) -> int:
    args = parse(argv)
    print("...   importing torch", flush=True)
    from tools.gpu import parts as gpu_parts

    trainer = gpu_parts.load_trainer(args.trainer)
    from tools.dev import bench

    presets = args.presets or PRESETS
    try:
        for preset in presets:
            trainer.require(preset in trainer.RECIPES, f"{preset} is none of {', '.join(trainer.RECIPES)}")
        bench.check_names(args.given, trainer)
    except trainer.Refused as error:
        print(f"gpu-report: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, interrupted)
    begun = datetime.now(UTC).isoformat(timespec="seconds")
    results = sorted((ROOT / "docs" / "gpu_results").glob("*.json"))
    earlier = gpu_plan.earlier_needs([*results, args.json], args.toy)  # before this report replaces it
    with tempfile.TemporaryDirectory(prefix="gpu_report_") as folder:
        workshop = Workshop(trainer, bench, gpu_parts, args, Path(folder))
        report = Report(args.json, args.toy, args.minutes, commit_of_here(), begun)
        try:
            measure(workshop, report, presets, earlier)
        except KeyboardInterrupt:
            conclude(report, complete=False)
            return 130
    return conclude(report, complete=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
