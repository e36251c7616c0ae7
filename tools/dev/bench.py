"""Where the time of a training step goes, on this machine.

    ./run.sh bench [PRESET] [NAME=value ...] [--steps N] [--repeats N]

Trains a few steps again and again and prints medians: tok/s, matmul FLOP/s, on a GPU also against its peak
(MFU), and the shares of forward + backward, the optimizer, and the rest of the loop (loading, logging,
schedules). Needs the preset's data; leaves no run folder. PRESET and NAME=value work everywhere below, too.

    ./run.sh bench --arm "NAME=value ..." --arm "..." [--steps N]
    ./run.sh bench --arm before=PATH --arm after=

Compares settings, or checkouts, on a noisy machine: the arms make one step each in turn, in one process.
Prints the milliseconds of a step, tok/s, and the time per token over that of the first arm, step by step
(median and quartiles). A word with a lower-case name, such as before=PATH, names an arm and the folder of its
train_gpt.py; without a path it is this one.

    ./run.sh bench --peers [--help]     bits per byte of compressors and plainer GPTs, by tools/dev/peers.py
"""
from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

if __name__ == "__main__":
    from tools.run.surroundings import sorting
    os.environ.update(sorting(os.environ))  # numpy reads it when it is loaded
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import train_gpt  # noqa: E402
from tools.dev import older_trainers  # noqa: E402
from tools.run import cards, plan  # noqa: E402
from tools.run.machine import Machine, memory_limit  # noqa: E402

if TYPE_CHECKING:
    from train_gpt import Config, Run, Stage, Team, TrainState

    Batch = tuple[Tensor, ...]  # tokens, targets, what Model.candidates() gives

ROOT = Path(__file__).resolve().parents[2]


# ---------- shared
def machine(team: Team) -> str:
    return f"machine {train_gpt.hardware(team)}, torch {torch.__version__}"


def machine_of(team: Team, free: int = 0) -> Machine:
    """What preflight would find around these ranks. free: bytes that each may take; 0: what is free now."""
    ranks = team.world_size
    if not free:
        free = torch.cuda.mem_get_info()[0] if team.on_gpu else memory_limit() // 2 // ranks
    return Machine(ranks, team.on_gpu, team.device, team.dtype, free, torch.get_num_threads())


def assemble(cfg: Any, trainer: ModuleType = train_gpt) -> Run:
    """A Run with data, model and optimizer; nothing is compiled yet."""
    log = trainer.Log(lead=False)
    team = trainer.Team(cfg, {})
    data = trainer.open_data(cfg, log)
    cfg = trainer.replace(cfg, vocab_size=data.vocab_size, bos_id=cfg.bos_id or max(data.bos, 0))
    loader = trainer.Loader(cfg, data, team, log)
    if older_trainers.is_older(trainer):
        run = older_trainers.assemble(cfg, trainer, team, data, loader, log)
    else:
        micro = plan.micro_batch(cfg, machine_of(team))
        run = trainer.Run(cfg, cfg, team, log, data, loader, "", Path(), micro)
        with team.device:
            run.model = cfg.make_model(cfg.choose_kernels(team.on_gpu, log))
    make_optimizer = older_trainers.optimizer_of(cfg, trainer)
    run.optimizer = make_optimizer(run.model, cfg, team.rank, team.world_size,
                                   dtype=team.dtype if team.on_gpu else torch.float32, muon_dtype=team.dtype)
    return run


def prepare(settings: dict[str, str], steps: int, trainer: ModuleType = train_gpt) -> tuple[Run, float]:
    """(Run of so many steps without a cap, ready to train; seconds of its warmup). Raises Refused."""
    fixed = dict(MAX_WALLCLOCK_SECONDS="0", ITERATIONS=str(steps), EXTENSION_ITERATIONS="0", MAX_EPOCHS="0",
                 TRAIN_LOG_EVERY="10", VAL_LOSS_EVERY="0")
    try:
        run = assemble(trainer.load_config(dict(os.environ) | settings | fixed), trainer)
    except trainer.Refused as error:
        raise train_gpt.Refused(str(error)) from None
    warm_up = trainer.rehearse if older_trainers.is_older(trainer) else trainer.warm_up
    began = time.perf_counter()
    warm_up(run)
    seconds = time.perf_counter() - began
    run.model.build(run, True)
    run.model.build = lambda *_: False  # it is no part of a step
    if run.cfg.compile and run.loss_fn is run.model:
        print("compile: not possible here; measured uncompiled")
    return run, seconds


def timed(function: Callable[..., Any], synchronize: Callable[[], None],
          seconds: list[float]) -> Callable[..., Any]:
    """The function, which adds its seconds to a list; the device is idle at both ends."""
    def call(*args: Any) -> Any:
        synchronize()
        began = time.perf_counter()
        result = function(*args)
        synchronize()
        seconds.append(time.perf_counter() - began)
        return result
    return call


def moment(team: Team) -> Any:
    """Now: on a CPU in seconds, on a GPU as an event in its queue, so that the host need not wait."""
    if not team.on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def median_seconds(team: Team, function: Callable[[], object], repeats: int) -> float:
    """Median seconds of function() on the device, after three calls that do not count."""
    moments = []
    for _ in range(repeats + 3):
        before = moment(team)
        function()
        moments.append((before, moment(team)))
    team.wait()
    if team.on_gpu:
        return statistics.median([before.elapsed_time(after) / 1e3 for before, after in moments[3:]])
    return statistics.median([after - before for before, after in moments[3:]])


# ---------- the training loop
def train_again(run: Run) -> TrainState:
    """Makes all steps of the run, on the first batches, and nothing after them; returns its TrainState."""
    run.loader.position = 0
    run.state = train_gpt.TrainState()
    run.saved = train_gpt.TrainState()
    with mock.patch.multiple(train_gpt, save_weights=lambda _: None, validate=lambda *_: None):
        train_gpt.train(run)
    gc.enable()
    return run.state


def step_table(settings: dict[str, str], steps: int, repeats: int) -> None:
    """Prints the median step and the shares of its parts."""
    run, compile_seconds = prepare(settings, steps)
    cfg = run.cfg
    team = run.team
    rows = []
    plain_step = train_gpt.train_step
    plain_update = run.optimizer.step
    for _ in range(repeats):
        inside: list[float] = []
        updates: list[float] = []
        run.optimizer.step = timed(plain_update, team.wait, updates)
        with mock.patch.object(train_gpt, "train_step", timed(plain_step, team.wait, inside)):
            state = train_again(run)
        total = state.seconds
        update = sum(updates)
        passes = sum(inside) - update
        rows.append((total / steps, passes / total, update / total, 1 - sum(inside) / total))
    step, passes, update, rest = [statistics.median(column) for column in zip(*rows)]
    low = min(rows)[0]
    high = max(rows)[0]
    tokens = state.tokens / steps  # the mean of all stages
    flops = plan.flops_per_token(cfg) * tokens / step
    print(f"{machine(team)}; {cfg.preset}, {steps} steps x {repeats} repeats, {str(team.dtype)[6:]}, "
          f"micro_batch {run.micro}x{cfg.train_seq_len}, compile {compile_seconds:.1f} s")
    print(f"step    {1e3 * step:.2f} ms ({1e3 * low:.2f} to {1e3 * high:.2f}), {tokens / step:,.0f} tok/s")
    print(f"parts   forward+backward {passes:.1%}, optimizer {update:.1%}, rest of the loop {rest:.1%}")
    print(f"matmul  {flops / 1e9:,.0f} GFLOP/s")
    if team.on_gpu:
        print(cards.mfu_text(flops, [torch.cuda.get_device_name()]))


# ---------- settings and checkouts beside each other
def read_arm(text: str) -> tuple[ModuleType, dict[str, str]]:
    """`before=PATH NAME=value` -> (trainer, settings). Raises Refused."""
    folder = ROOT
    settings = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        train_gpt.require(equals, f"--arm: {word!r} must be NAME=value, or name=PATH of a checkout")
        if name.islower():
            folder = Path(value).resolve() if value else ROOT
            script = folder / "train_gpt.py"
            train_gpt.require(script.is_file(), f"--arm: no {value}/train_gpt.py")
            train_gpt.require("RECIPES" in script.read_text(encoding="utf-8"),
                              f"--arm: {value}/train_gpt.py is from before there were recipes")
        else:
            settings[name] = value
    trainer = load_trainer(folder)
    check_names(settings, trainer)
    return trainer, settings


@cache
def load_trainer(folder: Path) -> ModuleType:
    """train_gpt.py of a checkout, under a module name of its own."""
    if folder == ROOT:
        return train_gpt
    name = f"train_gpt_{load_trainer.cache_info().currsize}"
    spec = importlib.util.spec_from_file_location(name, folder / "train_gpt.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    # a record's folder holds what its page lists, and no __pycache__
    with mock.patch.object(sys, "dont_write_bytecode", True):
        spec.loader.exec_module(module)
    return module


def step_function(trainer: ModuleType, run: Run, stage: Stage | None = None) -> Callable[[Batch], None]:
    """A function that makes a step on a batch, as the training loop does. stage: None: the first one."""
    cfg = run.cfg
    stage = stage or cfg.stages()[0]
    if older_trainers.is_older(trainer):
        return older_trainers.step_function(trainer, run, stage)
    micro = run.micro * cfg.train_seq_len // stage.row_tokens
    schedule = trainer.Schedule(1.0, cfg.muon_momentum)

    def step(batch: Batch) -> None:
        context = run.model.context(stage.row_tokens, run.team.device, run.team.dtype, stage)
        batch = (*batch, *run.model.candidates(*batch))
        trainer.train_step(run.loss_fn, run.optimizer, batch, micro, context, stage.loss_factor, schedule)

    return step


def arms_table(settings: dict[str, str], texts: list[str], steps: int, skipped: int = 5) -> None:
    """Prints a row per arm; the first steps of each are not counted."""
    torch._dynamo.config.recompile_limit = 8 * len(texts)  # of the same code; beyond it runs uncompiled
    arms = []
    for text, (trainer, own) in [(text, read_arm(text)) for text in texts]:
        lacks = [name for name in settings if name not in names_of(trainer)]
        if lacks:
            print(f"{text} does not have {', '.join(lacks)}: ignored there")
        run, warmup_seconds = prepare(settings | own, steps, trainer)
        times: list[float] = []
        step = timed(step_function(trainer, run), run.team.wait, times)
        arms.append((text or "(as it is)", run, step, times, warmup_seconds))
    for _ in range(steps + skipped):
        for _, run, step, *_ in arms:
            step(run.loader.next(run.cfg.train_batch_tokens))
    first: list[float] = []
    print(f"{machine(run.team)}; {steps} steps of each arm in turn")
    for text, run, _, times, warmup_seconds in arms:
        mine = [seconds / run.cfg.train_batch_tokens for seconds in times[skipped:]]
        first = first or mine
        low, middle, high = statistics.quantiles((a / b for a, b in zip(mine, first)), n=4)
        token = statistics.median(mine)
        print(f"{1e3 * token * run.cfg.train_batch_tokens:8.2f} ms a step {1 / token:8,.0f} tok/s, time per "
              f"token {middle:.3f} ({low:.3f} to {high:.3f}) of the first, warmup "
              f"{warmup_seconds:4.1f} s: {text}")


# ---------- for gpu-report and tests
def random_data(folder: Path, cfg: Any, tokens: int = 1 << 24, rows: float = 1.0) -> dict[str, str]:
    """Writes random documents of 1 to 1,400 tokens, with so many rows of val -> settings that make a run read
    them."""
    rng = np.random.default_rng(0)
    vocab_size = cfg.vocab_size or 1024
    bos = 1
    files = [("train", tokens), ("val", int(rows * (cfg.eval_context or cfg.train_seq_len)) + 1)]
    for split, count in files:
        stream = rng.integers(2, vocab_size, count).astype("<u2")
        begins = rng.integers(1, 1400, 2 + count // 700).cumsum()
        stream[[0, *begins[begins < count]]] = bos
        head = np.zeros(256, "<i4")
        head[:3] = 20240520, 1, count
        (folder / f"random_{split}_000000.bin").write_bytes(head.tobytes() + stream.tobytes())
    listed = [dict(path=f"random_{split}_000000.bin", split=split, tokens=count) for split, count in files]
    manifest = dict(tokenizer=dict(vocab_size=vocab_size, bos_id=bos), files=listed)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return dict(DATA_PATH=str(folder), TOKENIZER_PATH="", DATA_FINGERPRINT="", VAL_TOKENS="0", CORE="0")


# ---------- main
def names_in(recipe: type[Config]) -> set[str]:
    """The names of a recipe's constants, as the environment has them, and their second names."""
    names = [field.name for field in fields(recipe)]
    return {name.upper() for name in [*names, *recipe.aliases.values()]}


@cache
def names_of(trainer: ModuleType) -> set[str]:
    """The same of all recipes of a trainer."""
    if older_trainers.is_older(trainer):
        return {*trainer.NAMES}
    return set().union(*[names_in(recipe) for recipe in trainer.RECIPES.values()])


def check_names(settings: Mapping[str, str], trainer: ModuleType = train_gpt) -> None:
    """Refuses a name that is no constant of the trainer: it would do nothing."""
    for name in settings:
        train_gpt.require(name in names_of(trainer), f"{name} is no constant")


def main() -> None:
    words = sys.argv[1:]
    if "--peers" in words:
        words.remove("--peers")
        os.execv(sys.executable, [sys.executable, "-m", "tools.dev.peers", *words])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="PRESET or NAME=value")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--arm", action="append", metavar="'NAME=value ...'")
    args = parser.parse_intermixed_args()
    settings = dict(word.split("=", 1) if "=" in word else ("PRESET", word) for word in args.settings)
    try:
        check_names(settings)
        train_gpt.require(args.steps > 1 and args.repeats > 0, "--steps 2 and --repeats 1 at least")
        if args.arm:
            arms_table(settings, args.arm, args.steps)
        else:
            step_table(settings, args.steps, args.repeats)
    except train_gpt.Refused as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
