"""Where the time of a training step goes, on this machine.

    ./run.sh bench [PRESET] [NAME=value ...] [--steps N] [--repeats N]

Trains a few steps again and again and prints medians: tok/s, matmul FLOP/s against the rate of plain matrix
products, and the shares of forward + backward, the optimizer, and the rest of the loop (loading, logging,
schedules). Needs the preset's data; leaves no run folder. PRESET and NAME=value work everywhere below, too.

    ./run.sh bench --arm "NAME=value ..." --arm "..." [--steps N]
    ./run.sh bench --arm before=PATH --arm after=

Compares settings, or checkouts, on a noisy machine: the arms make one step each in turn, in one process.
Prints the milliseconds of a step, tok/s, and the time per token over that of the first arm, step by step
(median and quartiles). A word with a lower-case name, such as before=PATH, names an arm and the folder of its
train_gpt.py; without a path it is this one.

    ./run.sh bench --parts [--steps N]
    torchrun --standalone --nproc_per_node=N tools/dev/bench.py --parts ...

For each stage a step on random data, which needs no data: medians of its tok/s and, on cards whose peak is
known, mfu; and of its parts, each measured alone, forward and backward: attention and MLP of all layers, head
and loss, optimizer; and of these the collectives and, on a GPU, the host's launches. Also what the loader
could deliver.

    ./run.sh bench --roofline [PRESET]

About the least time that a step can take on 1 and on 8 H200: FLOPs and bytes over the rates of the
hardware, one part after another, nothing overlapped. Computed, not measured; without PRESET for golf,
speedrun and gpt2.

    ./run.sh bench --saving [--repeats N]   a checkpoint's bytes and seconds, in which the clock stands still
    ./run.sh bench --codecs logs/<run_id>/final_model.pt    one run's weights in every codec: score and bytes
    ./run.sh bench --peers [--help]     bits per byte of compressors and plainer GPTs, by tools/dev/peers.py
    ./run.sh bench --gpu-peers [--help] FOLDER ...          a foreign script beside ours, in turn, on one card
"""
from __future__ import annotations

import argparse
import gc
import importlib.util
import io
import json
import lzma
import math
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
if __name__ == "__main__":  # our modules are those of this checkout, whatever else the path holds
    sys.path[:] = [str(ROOT), *[folder for folder in sys.path if folder != str(HERE)]]
    from tools.run.surroundings import sorting
    os.environ.update(sorting(os.environ))  # numpy reads it when it is loaded
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import train_gpt  # noqa: E402
from tools.dev import older_trainers  # noqa: E402
from tools.run import cards  # noqa: E402

if TYPE_CHECKING:
    from train_gpt import Bank, Config, Row, Run, Stage, Team, TrainState

    Batch = tuple[Tensor, ...]  # tokens, targets, what Model.candidates() gives
    Call = tuple[nn.Module, tuple[Any, ...]]  # a block and the arguments of its attend()
    Quantizer = Callable[[Row, Tensor], tuple[Tensor, Tensor]]  # w (R, C) -> int8 rows, scales


# ---------- shared
def machine(team: Team) -> str:
    return f"machine {train_gpt.hardware(team)}, torch {torch.__version__}"


def micro_batch(cfg: Any, team: Team) -> int:
    """Sequences per micro-step, as ./run.sh chooses them."""
    from tools.run import plan
    from tools.run.machine import Machine, memory_limit
    ranks = team.world_size
    free = torch.cuda.mem_get_info()[0] if team.on_gpu else memory_limit() // 2 // ranks
    machine = Machine(ranks, ranks, team.on_gpu, team.device, team.dtype, free, torch.get_num_threads())
    return plan.micro_batch(cfg, machine)


def assemble(cfg: Any, trainer: ModuleType = train_gpt, team: Team | None = None) -> Run:
    """A Run with data, model and optimizer; nothing is compiled yet."""
    log = trainer.Log(lead=False)
    team = team or trainer.Team(cfg, {})
    data = trainer.open_data(cfg, log)
    cfg = trainer.replace(cfg, vocab_size=data.vocab_size, bos_id=cfg.bos_id or max(data.bos, 0))
    loader = trainer.Loader(cfg, data, team, log)
    if older_trainers.is_older(trainer):
        return older_trainers.assemble(cfg, trainer, team, data, loader, log)
    run = trainer.Run(cfg, cfg, team, log, data, loader, "", Path(), micro_batch(cfg, team))
    with team.device:
        run.model = cfg.make_model(cfg.choose_kernels(team.on_gpu, log))
    make_optimizer = cfg.optimizer()
    run.optimizer = make_optimizer(run.model, cfg, team.rank, team.world_size,
                                   dtype=team.dtype if team.on_gpu else torch.float32, muon_dtype=team.dtype)
    return run


def prepare(settings: dict[str, str], steps: int, trainer: ModuleType = train_gpt,
            team: Team | None = None) -> tuple[Run, float]:
    """(Run of so many steps without a cap, ready to train; seconds of its warmup). Raises Refused."""
    fixed = dict(MAX_WALLCLOCK_SECONDS="0", ITERATIONS=str(steps), EXTENSION_ITERATIONS="0", MAX_EPOCHS="0",
                 TRAIN_LOG_EVERY="10", VAL_LOSS_EVERY="0")
    try:
        run = assemble(trainer.load_config(dict(os.environ) | settings | fixed), trainer, team)
    except trainer.Refused as error:
        raise train_gpt.Refused(str(error)) from None
    if older_trainers.is_older(trainer):
        seconds = older_trainers.warm_up(run, trainer)
    else:
        began = time.perf_counter()
        trainer.warm_up(run)
        seconds = time.perf_counter() - began
        run.model.build(run, True)
    run.model.build = lambda *_: False  # it is no part of a step
    if run.cfg.compile and run.loss_fn is run.model:
        print("compile: not possible here; measured uncompiled")
    return run, seconds


def flops_per_token(cfg: Any, stage: Stage | None = None, trainer: ModuleType = train_gpt) -> float:
    """Training matmul FLOPs, with the windows of this stage; None: those of the last."""
    if older_trainers.is_older(trainer):
        return trainer.flops_per_token(cfg)
    from tools.run import plan
    return plan.flops_per_token(cfg, stage)


def windows_of(cfg: Any, stage: Stage) -> dict[str, int]:
    """{name: tokens that a token sees}; {} for a recipe without windows."""
    from tools.run import plan
    return plan.windows_of(cfg, stage, stage.row_tokens)


def peak_flops(team: Team) -> float:
    """The bf16 peak of this machine's card; 0: a CPU, or a card that is not listed."""
    return cards.peak_flops(torch.cuda.get_device_name()) if team.on_gpu else 0.0


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


def in_turn(team: Team, calls: dict[Any, Callable[[], object]], repeats: int) -> dict[Any, float]:
    """{key: median seconds of a call on the device}. The calls take turns: a machine that slows down slows
    all of them. Three rounds before do not count."""
    moments: dict[Any, list[tuple[Any, Any]]] = {key: [] for key in calls}
    for _ in range(repeats + 3):
        for key, call in calls.items():
            before = moment(team)
            call()
            moments[key].append((before, moment(team)))
    team.wait()
    medians = {}
    for key, pairs in moments.items():
        if team.on_gpu:
            seconds = [before.elapsed_time(after) / 1e3 for before, after in pairs[3:]]
        else:
            seconds = [after - before for before, after in pairs[3:]]
        medians[key] = statistics.median(seconds)
    return medians


def median_seconds(team: Team, function: Callable[[], object], repeats: int) -> float:
    """Median seconds of function() on the device, after three calls that do not count."""
    return in_turn(team, {"": function}, repeats)[""]


def gemm_rate(team: Team, dtype: torch.dtype, shapes: Sequence[tuple[int, int, int]]) -> float:
    """FLOP/s of the fastest of the products (M, K) @ (K, N), on random data."""
    rates = []
    for m, k, n in shapes:
        a = torch.randn((m, k), device=team.device).to(dtype)
        b = torch.randn((k, n), device=team.device).to(dtype)
        rates.append(2 * m * k * n / median_seconds(team, partial(torch.matmul, a, b), 5))
    return max(rates)


def distinct_stages(cfg: Any) -> list[Stage]:
    """[Stage] that differ in batch, rows or windows, each once."""
    stages = {}
    for stage in cfg.stages():
        key = stage.batch_tokens, stage.row_tokens, *windows_of(cfg, stage).values()
        stages.setdefault(key, stage)
    return [*stages.values()]


# ---------- the training loop, and checkpoints
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
    flops = flops_per_token(cfg) * tokens / step
    mlp_shape = run.micro * cfg.train_seq_len, cfg.model_dim, cfg.mlp_mult * cfg.model_dim
    rate = gemm_rate(team, team.dtype, [(2048, 2048, 2048), mlp_shape])
    print(f"{machine(team)}; {cfg.preset}, {steps} steps x {repeats} repeats, {str(team.dtype)[6:]}, "
          f"micro_batch {run.micro}x{cfg.train_seq_len}, compile {compile_seconds:.1f} s")
    print(f"step    {1e3 * step:.2f} ms ({1e3 * low:.2f} to {1e3 * high:.2f}), {tokens / step:,.0f} tok/s")
    print(f"parts   forward+backward {passes:.1%}, optimizer {update:.1%}, rest of the loop {rest:.1%}")
    print(f"matmul  {flops / 1e9:,.0f} GFLOP/s, {flops / rate:.1%} of what plain products reach")


def saving_table(settings: dict[str, str], repeats: int) -> None:
    """Prints how large a checkpoint is and how long the run waits for it, off its clock."""
    run, _ = prepare(settings, 2)
    train_again(run)
    seconds: list[float] = []
    save = timed(train_gpt.save_checkpoint, run.team.wait, seconds)
    with tempfile.TemporaryDirectory() as folder:
        run.folder = Path(folder)
        for _ in range(repeats):
            save(run)
        size = (run.folder / "checkpoint.pt").stat().st_size
    print(f"{machine(run.team)}; {run.cfg.preset}, {repeats} checkpoints")
    print(f"checkpoint   {size / 2**20:.1f} MiB, {1e3 * statistics.median(seconds):.1f} ms (longest "
          f"{1e3 * max(seconds):.1f}), in which the run waits and its clock stands still")


# ---------- settings and checkouts beside each other
def read_arm(text: str) -> tuple[ModuleType, Path, dict[str, str]]:
    """`before=PATH NAME=value` -> (trainer, its folder, settings). Raises Refused."""
    folder = ROOT
    settings = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        train_gpt.require(equals, f"--arm: {word!r} must be NAME=value, or name=PATH of a checkout")
        if name.islower():
            folder = Path(value).resolve() if value else ROOT
            train_gpt.require((folder / "train_gpt.py").is_file(), f"--arm: no {value}/train_gpt.py")
        else:
            settings[name] = value
    trainer = load_trainer(folder)
    check_names(settings, trainer)
    return trainer, folder, settings


@contextmanager
def without_bytecode() -> Iterator[None]:
    """A record's folder holds what its page lists, and no __pycache__."""
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    yield
    sys.dont_write_bytecode = before


@cache
def load_trainer(folder: Path) -> ModuleType:
    """train_gpt.py of a checkout, under a module name of its own."""
    if folder == ROOT:
        return train_gpt
    name = f"train_gpt_{load_trainer.cache_info().currsize}"
    spec = importlib.util.spec_from_file_location(name, folder / "train_gpt.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    with without_bytecode():
        spec.loader.exec_module(module)
    return module


@contextmanager
def companions_of(folder: Path) -> Iterator[None]:
    """While an older checkout is prepared, the files that it imports are those beside its train_gpt.py."""
    for name in older_trainers.COMPANIONS:
        if (folder / f"{name}.py").exists():
            sys.modules.pop(name, None)
    sys.path.insert(0, str(folder))
    with without_bytecode():
        yield
    sys.path.remove(str(folder))


def step_function(trainer: ModuleType, run: Run, stage: Stage | None = None) -> Callable[[Batch], None]:
    """A function that makes a step on a batch, as the training loop does. stage: None: the first one."""
    if older_trainers.is_older(trainer):
        return older_trainers.step_function(trainer, run, stage)
    cfg = run.cfg
    stage = stage or cfg.stages()[0]
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
    for text, (trainer, folder, own) in [(text, read_arm(text)) for text in texts]:
        lacks = [name for name in settings if name not in names_of(trainer)]
        if lacks:
            print(f"{text} does not have {', '.join(lacks)}: ignored there")
        with companions_of(folder):
            run, rehearsal = prepare(settings | own, steps, trainer)
        step = step_function(trainer, run)
        times: list[float] = []
        flops = flops_per_token(run.cfg, trainer=trainer)
        arms.append((text or "(as it is)", run, timed(step, run.team.wait, times), times, rehearsal, flops))
    for _ in range(steps + skipped):
        for _, run, step, *_ in arms:
            step(run.loader.next(run.cfg.train_batch_tokens))
    team = run.team
    first: list[float] = []
    rate = gemm_rate(team, torch.float32, [(2048, 2048, 2048), (4096, 128, 384)])
    print(f"{machine(team)}; {steps} steps of each arm in turn; plain products in float32 "
          f"{rate / 1e9:,.0f} GFLOP/s")
    for text, run, _, times, rehearsal, flops in arms:
        mine = [seconds / run.cfg.train_batch_tokens for seconds in times[skipped:]]
        first = first or mine
        low, middle, high = statistics.quantiles((a / b for a, b in zip(mine, first)), n=4)
        token = statistics.median(mine)
        print(f"{1e3 * token * run.cfg.train_batch_tokens:8.2f} ms a step {1 / token:8,.0f} tok/s, time per "
              f"token {middle:.3f} ({low:.3f} to {high:.3f}) of the first, {flops / token / rate:6.1%} of "
              f"plain products, rehearsal {rehearsal:4.1f} s: {text}")


# ---------- the parts of a step
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


def forward_and_backward(function: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor],
                         compiled: bool) -> Callable[[], tuple[Tensor, ...]]:
    """A function that calls another one on these inputs and makes the gradients of inputs and weights."""
    fast = torch.compile(function, dynamic=False) if compiled else function
    inputs = [x.detach().requires_grad_() for x in inputs]
    grad = torch.ones_like(function(*inputs))
    return lambda: torch.autograd.grad(fast(*inputs), [*inputs, *weights], grad)


class LazyMask(NamedTuple):
    """Arguments of window_mask() and its versions: what is measured makes the mask itself, as a compiled step
    does."""
    window: int | Tensor
    T: int
    documents: Tensor | None
    device: torch.device


def recorded_calls(run: Run, stage: Stage, tokens: Tensor,
                   note: Callable[..., None] = lambda *_: None) -> tuple[list[Call], tuple[Any, ...] | None]:
    """([(block, arguments of its attend())] in the order in which they run, arguments of the loss, None for a
    model that computes its own) of a training step on tokens (B, T), with attention that gives values back.
    Each attention's q, k, v and mask go to note()."""
    model = run.model
    kernels = run.model.kernels
    attended: list[Call] = []
    losses: list[tuple[Any, ...]] = []
    context = model.context(tokens.size(1), run.team.device, run.team.dtype, stage)

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: LazyMask | None) -> Tensor:
        note(q, k, v, mask)
        return v.repeat_interleave(q.size(1) // v.size(1), 1)

    def loss(*args: Any) -> Tensor:
        losses.append(args)
        return args[0].sum()

    def attend(block: nn.Module, plain: Callable[..., Tensor], *args: Any) -> Tensor:
        attended.append((block, args))
        return plain(*args)

    noting = dict(attention=attention, loss=loss)
    if hasattr(kernels, "window_mask"):
        noting["window_mask"] = LazyMask
    model.use(replace(kernels, **noting))
    for block in model.blocks:
        block.attend = partial(attend, block, block.attend)
    with torch.no_grad():
        model(tokens, tokens, context, *model.candidates(tokens, tokens))
    for block in model.blocks:
        del block.attend
    model.use(kernels)
    return attended, losses[0] if losses else None


def alike(block: nn.Module, args: Sequence[Any]) -> str:
    """What blocks have in common whose attention takes as long."""
    shapes = [tuple(p.shape) for p in block.parameters()]
    given = []
    for x in args:
        if isinstance(x, LazyMask):
            given.append(x.window)
        elif isinstance(x, dict):   # gates, or the masks of all kinds of layers, which tell none apart
            given.append(sorted(x))
        else:
            given.append(tuple(x.shape) if torch.is_tensor(x) else type(x))
    return str([getattr(block, "kind", ""), *shapes, *given])


def parts_of(run: Run, stage: Stage,
             rows: int) -> dict[str, list[tuple[int, Callable[[], tuple[Tensor, ...]]]]]:
    """{part: [(layers, a function that makes one of them, both ways, on a random micro-batch)]}"""
    cfg = run.cfg
    team = run.team
    model = run.model
    kernels = run.model.kernels
    tokens = torch.randint(2, cfg.vocab_size, (rows, stage.row_tokens), device=team.device)
    tokens[torch.rand(tokens.shape, device=team.device) < 1 / 700] = cfg.bos_id
    h = torch.randn((*tokens.shape, cfg.model_dim), device=team.device, dtype=team.dtype)
    attended, loss_args = recorded_calls(run, stage, tokens)

    def made(value: Any) -> Any:
        """A mask, also those in a dictionary."""
        if isinstance(value, dict):
            return {name: made(mask) for name, mask in value.items()}
        return kernels.window_mask(*value) if isinstance(value, LazyMask) else value

    def attend(block: nn.Module, args: Sequence[Any], h: Tensor) -> Tensor:
        return block.attend(train_gpt.rms_norm(h), *[made(value) for value in args])

    def mlp(h: Tensor, fc: Tensor, proj: Tensor) -> Tensor:
        if vars(model).get("scales"):
            return kernels.mlp(train_gpt.rms_norm(h), fc, proj, model.scales.values[0])
        return train_gpt.mlp(train_gpt.rms_norm(h), fc, proj, kernels.linear)

    def head(h: Tensor, weight: Tensor) -> Tensor:
        x = train_gpt.rms_norm(h)
        if loss_args:
            return kernels.loss(x, weight, *loss_args[2:])
        # of a model that mixes distributions: its own one; the others are part of the rest
        losses = kernels.losses or train_gpt.token_losses
        return losses(x, weight, tokens, cfg.logit_softcap).mean()

    both = partial(forward_and_backward, compiled=cfg.compile)
    found = {"attention": [], "MLP": [], "head and loss": [(1, both(head, [h, model.head], []))]}
    groups: dict[str, list[tuple[nn.Module, list[Any]]]] = {}
    for block, (_, *args) in attended:
        groups.setdefault(alike(block, args), []).append((block, args))
    for members in groups.values():
        block, args = members[0]
        projections = [block.query, block.key, block.value, block.attn_proj]
        found["attention"].append((len(members), both(partial(attend, block, args), [h], projections)))
    with_mlp = [block for block in model.blocks if block.fc is not None]
    if with_mlp:
        passes = len(with_mlp)
        if hasattr(cfg, "layer_order"):  # some layers run several times
            passes = len(cfg.layer_order(stage))
        weights_of_mlp = [with_mlp[0].fc, with_mlp[0].mlp_proj]
        found["MLP"].append((passes, both(mlp, [h, *weights_of_mlp], [])))
    return found


def communicate(banks: Sequence[Bank]) -> None:
    """The collectives of an update of these banks."""
    for bank in banks:
        train_gpt.reduce_scatter(bank.my_grad.view(-1), bank.data)
        train_gpt.all_gather(bank.data, bank.my_data.flatten())


def stage_seconds(run: Run, stage: Stage, repeats: int) -> tuple[float, dict[str, float], dict[str, float]]:
    """(seconds of a step of this stage, {part: its seconds}, {what is inside several parts: its seconds})"""
    team = run.team
    batch = run.loader.next(stage.batch_tokens, stage.row_tokens // run.cfg.train_seq_len, stage.doc_len)
    step = partial(step_function(train_gpt, run, stage), batch)
    rows = train_gpt.rows_at_once(len(batch[0]), run.micro * run.cfg.train_seq_len // stage.row_tokens)
    parts = parts_of(run, stage, rows)
    schedule = train_gpt.Schedule(0.0, run.cfg.muon_momentum)
    # 1. one call of each kind
    calls: dict[Any, Callable[[], object]] = {
        "step": step, "optimizer": partial(run.optimizer.step, schedule)}
    for part, kinds in parts.items():
        for i, (_, call) in enumerate(kinds):
            calls[part, i] = call
    updates = {bank.row.every for bank in run.optimizer.banks}      # steps per update
    for every in updates if team.world_size > 1 else ():
        calls["communication", every] = partial(
            communicate, [bank for bank in run.optimizer.banks if bank.row.every == every])
    found = in_turn(team, calls, repeats)
    # 2. how often a step makes it
    seconds = {}
    for part, kinds in parts.items():
        layers = sum([count * found[part, i] for i, (count, _) in enumerate(kinds)])
        seconds[part] = len(batch[0]) // rows * layers
    seconds["optimizer"] = found["optimizer"]
    inside = {}
    if team.world_size > 1:
        inside["communication"] = sum([found["communication", every] / every for every in updates])
    if team.on_gpu:
        hosts: list[float] = []
        for _ in range(repeats):
            team.wait()  # or a full queue of launches would make it wait in between
            timed(step, lambda: None, hosts)()
        inside["host"] = statistics.median(hosts)
    return found["step"], seconds, inside


def stage_parts(run: Run, stage: Stage, repeats: int, loads: float, say: Callable[[str], None]) -> None:
    """Prints a stage's step and its parts. loads: tok/s of the loader."""
    ranks = run.team.world_size
    tokens = stage.batch_tokens
    window = windows_of(run.cfg, stage).get("long_window", stage.row_tokens)
    step, parts, inside = stage_seconds(run, stage, repeats)
    rate = tokens / step
    flops = flops_per_token(run.cfg, stage) * rate / ranks
    peak = peak_flops(run.team)
    mfu = f", mfu {flops / peak:.2%}" if peak else ""
    say(f"\n{tokens:,} tokens, window {window}: {1e3 * step:.2f} ms a step, {rate:,.0f} tok/s, "
        f"{rate / ranks:,.0f} per rank, {flops / 1e9:,.0f} GFLOP/s{mfu}")
    total = sum(parts.values())
    whole = max(step, total)
    for name, seconds in (parts | {"the rest": whole - total}).items():
        say(f"  {name:16} {1e3 * seconds:10.3f} ms {seconds / whole:7.1%}")
    for name, seconds in inside.items():
        say(f"  {name:16} {1e3 * seconds:10.3f} ms {seconds / step:7.1%} (inside the above)")
    if total > step:
        say(f"  alone, the parts take {total / step:.2f} times as long as in the step, where they share "
            "work; the percentages are of their sum")
    say(f"  the loader delivers {loads:,.0f} tok/s, {loads * ranks / rate:,.1f} times what its rank consumes")


def parts_table(settings: dict[str, str], steps: int) -> None:
    """Prints a table per stage."""
    torch._dynamo.config.recompile_limit = 64  # kinds of layers times stages; beyond it runs uncompiled
    repeats = steps + steps % 2  # as Adam may take every other step
    with tempfile.TemporaryDirectory() as folder:
        given = train_gpt.load_config(dict(os.environ) | settings)
        team = train_gpt.Team(given, os.environ)
        run, compile_seconds = prepare(settings | random_data(Path(folder), given), 10**6, team=team)
        say = train_gpt.Log(lead=team.rank == 0)
        say(f"{machine(team)}; {run.cfg.preset}, {str(team.dtype)[6:]}, random data, medians of {repeats}, "
            f"rehearsal {compile_seconds:.1f} s")
        T = run.cfg.train_seq_len
        positions = [0]

        def load() -> None:
            positions.append(run.loader.fetch(positions[-1], run.micro * team.world_size, T)[1])

        loads = run.micro * T / median_seconds(team, load, 20)
        for stage in distinct_stages(run.cfg):
            stage_parts(run, stage, repeats, loads, say)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# ---------- codecs
LZMA = [dict(id=lzma.FILTER_LZMA2, preset=9, lc=0)]  # lc=0: the byte before says nothing here


def by_largest(bits: int, row: Row, w: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of so many bits, in which the largest of a row is the largest number."""
    scale = (w.abs().amax(1) / (2 ** (bits - 1) - 1)).clamp_min(2**-24).half()
    return (w / scale.float()[:, None]).round().to(torch.int8), scale


def by_step(step: float, row: Row, w: Tensor) -> tuple[Tensor, Tensor]:
    """Steps of a row's rms times this."""
    return train_gpt.quantize_by_rms(w, step, row.levels)


def roundings(cfg: Any) -> Iterator[tuple[str, Quantizer]]:
    """Yields (label, function) of every codec."""
    yield "as the recipe has it", cfg.quantize
    for bits in (7, 6, 5, 4):
        yield f"int{bits} by the largest", partial(by_largest, bits)
    for step in (0.1, 0.2, 0.25, 0.3, 0.4):
        yield f"step {step:g}", partial(by_step, step)


def entropy_bytes(tensors: dict[str, Tensor]) -> int:
    """What an ideal coder needs that knows the frequencies of each tensor's int8; the rest as it is."""
    total = 0.0
    for tensor in tensors.values():
        bits = 8 * tensor.element_size()
        if tensor.dtype == torch.int8:
            p = np.unique(tensor.numpy(), return_counts=True)[1] / tensor.numel()
            bits = -(p * np.log2(p)).sum()
        total += tensor.numel() * bits / 8
    return round(total)


def codec_table(settings: dict[str, str], path: str) -> None:
    """Prints per codec val_bpb and what rounding costs, bytes by zlib, by brotli as the trainer uses it and
    by lzma with lc=0, what an ideal coder of each tensor would need, and the seconds to read it back."""
    asked: Any = train_gpt.load_config(dict(os.environ) | settings | dict(DEVICE="cpu"))
    data = train_gpt.open_data(asked, lambda *_: None)
    team = train_gpt.Team(asked, {})
    cfg: Any
    model, cfg = train_gpt.load_model(path, "cpu", asked)
    if cfg.preset != asked.preset:
        raise SystemExit(f"bench: the file is of {cfg.preset}: set PRESET={cfg.preset}")
    base = train_gpt.evaluate(model, cfg, data, team).val_bpb
    weights = sum(p.numel() for p in model.parameters())
    print(f"{machine(team)}; {weights} weights, val_bpb {base:.5f}")
    print(f"{'rounding':20} {'val_bpb':>8} {'lost':>8} {'zlib 9':>10} {'brotli':>10} {'lzma lc=0':>10} "
          f"{'entropy':>10} {'read back':>10}")
    for label, quantize in roundings(cfg):
        def rounded(_: Any, row: Row, w: Tensor, quantize: Quantizer = quantize,
                    **options: Any) -> tuple[Tensor, Tensor]:
            return quantize(row, w)

        with mock.patch.object(type(cfg), "quantize", rounded):
            raw = train_gpt.pack_artifact(model)
        packed = zlib.compress(raw, 9)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "artifact")
            file.write_bytes(packed)
            began = time.perf_counter()
            again, _ = train_gpt.load_model(file)
            seconds = time.perf_counter() - began
        bpb = train_gpt.evaluate(again, cfg, data, team).val_bpb
        tensors = torch.load(io.BytesIO(raw), weights_only=True)["tensors"]
        sizes = (len(packed), len(train_gpt.shuffle_and_compress(raw)),
                 len(lzma.compress(raw, filters=LZMA)), entropy_bytes(tensors))
        print(f"{label:20} {bpb:8.5f} {bpb - base:+8.5f}", *(f"{size:10,}" for size in sizes),
              f"{seconds:8.2f} s", flush=True)


# ---------- rooflines
# Ceilings of one Hopper GPU. Measured on an H200 by torch 2.11: a bf16 product of 8,192 cubed on random data,
# and a copy, bytes read and written. Not measured, so 80 % of the datasheet's like the first: fp8 and NVLink.
MATMUL = 788e12  # FLOP/s
MATMUL_FP8 = 1576e12  # FLOP/s
MEMORY = 4.3e12  # bytes/s
LINK = 360e9  # bytes/s
H200_FLOPS = 989.4e12  # peak bf16 FLOP/s by its datasheet, which mfu is relative to


def parameters_of(cfg: Any) -> list[tuple[Row, nn.Parameter]]:
    """[(Row, parameter)] of a model without values."""
    table = cfg.parameter_table()
    with torch.device("meta"):
        model = cfg.make_model()
    return [(table[train_gpt.kind_of(name)], p) for name, p in model.named_parameters()]


def muon_shapes(cfg: Any) -> list[torch.Size]:
    """The shape of each matrix that Muon updates."""
    return [p.shape for row, p in parameters_of(cfg) if row.optimizer == "muon"]


def orthogonalization_flops(cfg: Any) -> int:
    """FLOPs of one step of Muon over all matrices."""
    sides = [sorted(shape) for shape in muon_shapes(cfg)]
    return cfg.muon_backend_steps * sum(4 * short * short * long + 2 * short**3 for short, long in sides)


def roofline(cfg: Any, gpus: int, stage: Stage) -> dict[str, float]:
    """{part: seconds of a step of a stage on so many GPUs}, at the ceilings and with nothing hidden behind
    anything else: about the least that it can take. Of optimizer and communication the shorter can be hidden,
    as some parameters travel while others are updated; no more."""
    from tools.run.plan import layers_of
    counts = train_gpt.parameter_counts(cfg)
    C = cfg.model_dim
    T = stage.row_tokens
    here = stage.batch_tokens / gpus
    fp8 = vars(cfg).get("fp8", "off").removeprefix("auto-")
    layers = layers_of(cfg, stage)
    seen = [min(layer.window + 1, T) for layer in layers if layer.window]  # its own included
    keys = sum(w * (1 - (w - 1) / (2 * T)) for w in seen)  # the mean over a row: its first tokens see fewer
    muon = sum(math.prod(shape) for shape in muon_shapes(cfg))
    adam = sum(p.numel() / row.every for row, p in parameters_of(cfg) if row.optimizer == "adam")
    # bf16: what is kept for backward is written and read twice; logits and their gradient move six times
    kept = sum(14 + 3 * layer.mlp_mult for layer in layers)
    activations = here * (3 * 2 * C * kept + 6 * 2 * cfg.vocab_size)
    # fp32: of Adam parameter, gradient, both moments, of Muon the update twice more; read, most of it written
    state = 4 * (8 * adam + 12 * muon) / gpus
    return {
        "blocks": 6 * counts["matrix"] * here / (MATMUL_FP8 if fp8 == "all" else MATMUL),
        "head": 6 * C * cfg.vocab_size * here / (MATMUL if fp8 == "off" else MATMUL_FP8),
        "attention": 12 * C * keys * here / MATMUL,
        "activations": activations / MEMORY,
        "optimizer": state / MEMORY + orthogonalization_flops(cfg) / gpus / MATMUL,
        "communication": 2 * 4 * (adam + muon) * (1 - 1 / gpus) / LINK}  # gradients, then weights


def rooflines(settings: dict[str, str], preset: str) -> Iterator[str]:
    """Yields a line per number of GPUs and stage: the parts, the step, its tok/s per GPU and mfu."""
    from tools.run.plan import listed
    cfg: Any = train_gpt.load_config(dict(os.environ) | settings | dict(PRESET=preset))
    cfg = train_gpt.replace(cfg, vocab_size=cfg.vocab_size or 1024)
    for gpus in (1, 8):
        for stage in distinct_stages(cfg):
            tokens = stage.batch_tokens
            T = stage.row_tokens
            if tokens // T % gpus:
                continue
            parts = roofline(cfg, gpus, stage)
            step = sum(parts.values())
            flops = flops_per_token(cfg, stage) * tokens / gpus / step
            window = windows_of(cfg, stage).get("long_window", T)
            yield (f"{cfg.preset}, {gpus} H200, tokens:{tokens} long_window:{window} "
                   f"ms {listed({name: f'{1e3 * part:.2f}' for name, part in parts.items()})} "
                   f"step:{1e3 * step:.2f} tok/s per GPU:{tokens / gpus / step:.0f} "
                   f"mfu:{flops / H200_FLOPS:.2f}")


# ---------- main
def names_in(recipe: type[Config]) -> set[str]:
    """The names of a recipe's constants, as the environment has them, and their second names."""
    names = [field.name for field in fields(recipe)]
    return {name.upper() for name in [*names, *recipe.aliases.values()]}


@cache
def names_of(trainer: ModuleType) -> set[str]:
    """The same of all recipes of a trainer."""
    if older_trainers.is_older(trainer):
        return older_trainers.names_of(trainer)
    return set().union(*[names_in(recipe) for recipe in trainer.RECIPES.values()])


def check_names(settings: Mapping[str, str], trainer: ModuleType = train_gpt) -> None:
    """Refuses a name that is no constant of the trainer: it would do nothing."""
    for name in settings:
        train_gpt.require(name in names_of(trainer), f"{name} is no constant")


def main() -> None:
    words = sys.argv[1:]
    if "--peers" in words:
        words.remove("--peers")
        os.execv(sys.executable, [sys.executable, str(ROOT / "tools/dev/peers.py"), *words])
    if "--gpu-peers" in words:
        words.remove("--gpu-peers")
        os.execv(sys.executable, [sys.executable, str(ROOT / "tools/gpu/peers.py"), *words])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="PRESET or NAME=value")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--arm", action="append", metavar="'NAME=value ...'")
    what.add_argument("--codecs", metavar="PATH")
    for flag in ("--parts", "--roofline", "--saving"):
        what.add_argument(flag, action="store_true")
    args = parser.parse_intermixed_args()
    settings = dict(word.split("=", 1) if "=" in word else ("PRESET", word) for word in args.settings)
    try:
        check_names(settings)
        train_gpt.require(args.steps > 1 and args.repeats > 0, "--steps 2 and --repeats 1 at least")
        if args.arm:
            arms_table(settings, args.arm, args.steps)
        elif args.parts:
            parts_table(settings, args.steps)
        elif args.roofline:
            asked = settings.get("PRESET")
            for preset in [asked] if asked else ("golf", "speedrun", "gpt2"):
                print(*rooflines(settings, preset), sep="\n")
        elif args.saving:
            saving_table(settings, args.repeats)
        elif args.codecs:
            codec_table(settings, args.codecs)
        else:
            step_table(settings, args.steps, args.repeats)
    except train_gpt.Refused as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
