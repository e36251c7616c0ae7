"""The parts of gpu-report that train: 20 steps by train_gpt.py's own main(), the score of the file that they
wrote, the same run from its checkpoint. parts.py calls them, each in a process and a folder of its own, which
lie side by side. `static --run` keeps checkpoints and reads losses and scores in the same way.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

import train_gpt
from tools.gpu import agenda
from tools.gpu.subject import Report, Subject
from train_gpt import Run

STEPS = 20
STEPS_OF_A_TOY = 10
ONE_ROW = ("gpt2", "gpt2_plus")  # at a time, so that others fit beside it
MOST_APART = 0.01  # the score of a run and that of the file that it wrote, or of the run from its checkpoint


def settings_of(settings: Mapping[str, str], given: Mapping[str, str], toy: bool) -> dict[str, str]:
    """Of 20 steps from the first to the score of what was read back, with a checkpoint halfway. settings: of
    the preset on random tokens; given: those that the command names."""
    preset = settings["PRESET"]
    steps = STEPS_OF_A_TOY if toy else STEPS
    half = str(steps // 2)
    more = dict(ITERATIONS=str(steps), VAL_LOSS_EVERY=half, TRAIN_LOG_EVERY="5", RUN_ID=preset)
    if preset not in agenda.LARGE:
        more["SAVE_EVERY"] = half
    if not toy:
        # golf's warmdown of 3,000 steps would leave 0.006 of its LR after the first one
        more |= dict(WARMUP_STEPS="2", EXTENSION_ITERATIONS="2", WARMDOWN_ITERS=half)
        if preset in ONE_ROW:
            more["DEVICE_BATCH_SIZE"] = "1"
    return {**settings, **more, **given}


# ---------- runs
@contextmanager
def first_checkpoint_kept(trainer: ModuleType) -> Iterator[None]:
    """Meanwhile a run's first checkpoint stays as halfway.pt: that of its end replaces it."""
    save = trainer.save_checkpoint

    def save_and_keep(run: Run) -> None:
        save(run)
        if not (run.folder / "halfway.pt").exists():
            os.link(run.folder / "checkpoint.pt", run.folder / "halfway.pt")

    with mock.patch.object(trainer, "save_checkpoint", save_and_keep):
        yield


def result_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text(encoding="utf-8"))


def scores_of(run: Path) -> dict[str, float]:
    """{trained or artifact: val loss} of a run that has ended; the last is that of what it has written."""
    result = result_of(run)
    return {kind: result[kind]["val_loss"] for kind in ("trained", "artifact") if result.get(kind)}


def written_file(run: Path) -> Path:
    """What a run has written to be scored: the artifact, where the preset has one, else the weights."""
    return max(run.glob("final_model.*"), key=lambda file: file.suffix == ".ptz")


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in [json.loads(line) for line in lines if line] if event["kind"] == kind]


def run_main(subject: Subject, **more: str) -> Path:
    """The folder of a run by main(). Where it does not end well, the process ends with its exit code."""
    code = train_gpt.main([], os.environ | subject.settings | more)
    if code:
        sys.exit(code)
    return Path("logs", subject.settings["PRESET"])


def run_of_train(preset: str) -> Path:
    """The folder of the run that `train` made, seen from the folder of another part."""
    return Path("..", f"{preset}_train", "logs", preset)


# ---------- parts
def train(subject: Subject) -> None:
    """20 steps: their losses and scores are numbers."""
    with first_checkpoint_kept(train_gpt):
        run = run_main(subject)
    result = result_of(run)
    losses = [event["train_loss"] for event in events_of(run, "train")]
    scores = scores_of(run)
    good = all([math.isfinite(number) for number in [*losses, *scores.values()]])
    told = f"loss {losses[0]:.4f} to {losses[-1]:.4f}"
    for kind, words in (("trained", "val"), ("artifact", "as read back")):
        if kind in scores:
            told += f", {words} {scores[kind]:.4f}"
    told += f"; warmup {result['compile_ms'] / 1e3:.0f} s"  # and compiling
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_reserved() / 2**30
        told += f"; micro_batch {result['micro_batch']}, {peak:.1f} GiB"
    text = f"train: {result['steps']} steps on random tokens, {told}"
    subject.report.say("ok" if good else "FAULT", text, losses=losses, scores=scores)


def compare_scores(report: Report, text: str, run: Path, before: Path) -> None:
    """A verdict: what a run has written scores what the one before it said."""
    scored = [*scores_of(run).values()][-1]
    said = [*scores_of(before).values()][-1]
    verdict = "ok" if abs(scored - said) < MOST_APART else "FAULT"
    report.say(verdict, f"{text} {scored:.4f}; the run said {said:.4f}", scored=scored, said=said)


def score(subject: Subject) -> None:
    """What `train` has written, in a process of its own: the artifact, where the preset has one."""
    before = run_of_train(subject.settings["PRESET"])
    file = written_file(before)
    run = run_main(subject, EVAL_FROM=str(file))
    compare_scores(subject.report, f"score: {file.name} in a process of its own gives", run, before)


def resume(subject: Subject) -> None:
    """The run of `train` as it was halfway, in a copy of its folder, comes to the same score."""
    preset = subject.settings["PRESET"]
    before = run_of_train(preset)
    run = Path("logs", preset)
    shutil.copytree(before, run, ignore=shutil.ignore_patterns("*.pt", "*.ptz", "result.json"))
    os.link(before / "halfway.pt", run / "checkpoint.pt")
    run_main(subject, RESUME=preset)
    step = events_of(run, "resume")[-1]["step"]
    compare_scores(subject.report, f"resume: from step {step} to", run, before)
