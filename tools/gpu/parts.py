"""What the parts of gpu-report measure. report.py starts a process for each of them, in a folder of its own:

    python -m tools.gpu.parts SPEC

The spec, in JSON, names the part, its preset and the constants that the command gave. Findings go to
events.jsonl, a line of JSON at a time. Runs of the trainer are in training.py. Shapes are those of one rank
of eight. Kernels are timed forward and backward. The loop is the trainer's own, on random tokens, with the
batch of one rank and its eighth of the optimizer; collectives copy the rank's own share, so what they move
between GPUs is not in it. What a card computes is compared with fp32 by `./run.sh test -m gpu`.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark import Timer

import train_gpt
from tools.dev import bench
from tools.gpu import agenda, seen_on_gpu, stand_in, training
from tools.gpu.subject import RANKS, Report, Subject
from tools.run import plan
from tools.run.machine import Machine
from train_gpt import Run, Stage

LEAST_GAIN = 0.5  # ms per step that a constant must gain
LEAST_PART = 0.1  # of the time of what it changes
LEAST_PART_OF_A_TOY = 0.5  # where a CPU is measured that does other things, too
LEAST_PAUSE = 10.0  # ms that a step takes beyond the usual
LEAST_PAUSE_OF_A_TOY = 250.0
STEPS = 200  # of the loop
ROWS = dict(golf_plus="16")  # DEVICE_BATCH_SIZE; the others take what fits into the card's memory
ON_STAND_IN = "STATIC_NAME" in os.environ  # stand_in.py's GPU computes nothing


def backward_tile(m: int, n: int, warps: int, stages: int) -> dict[str, int]:
    """FLEX_OPTIONS of the backward pass."""
    return dict(
        bwd_BLOCK_M1=m, bwd_BLOCK_N1=n, bwd_BLOCK_M2=n, bwd_BLOCK_N2=m, bwd_num_warps=warps,
        bwd_num_stages=stages,
    )  # fmt: skip


# FLEX_OPTIONS to time beside torch's own choice, by the card's generation and the head size of queries and
# keys: of those that compile without spilling (docs/log.md) the ones to try first
TILE = dict(fwd_BLOCK_M=128, fwd_BLOCK_N=64, fwd_num_warps=8, fwd_num_stages=3)
SMALL_TILE = TILE | dict(fwd_num_stages=2)
TILES = {
    (9, 96): [TILE, TILE | backward_tile(64, 64, 8, 3)],
    (10, 96): [TILE, TILE | backward_tile(64, 128, 8, 2)],
    (12, 96): [SMALL_TILE, SMALL_TILE | backward_tile(64, 64, 8, 2)],
}
# A size for a CPU; a trainer ignores those that its preset lacks
TOY = dict(
    DEVICE="cpu",
    DTYPE="float32",
    COMPILE="0",
    NUM_LAYERS="2",
    WINDOW_PATTERN="SL",
    MODEL_DIM="64",
    NUM_HEADS="2",
    NUM_KV_HEADS="0",
    VOCAB_SIZE="512",
    TRAIN_SEQ_LEN="256",
    TRAIN_BATCH_TOKENS="2048",
    SEQ_SCHEDULE="1",
    STAGE_STARTS="0,0.34,0.67,1",
    EXTENSION_ITERATIONS="0",
    WINDOW_BLOCK="32",
    WINDOW_SCHEDULE="64",
    EVAL_WINDOW="64",
    EVAL_CONTEXT="256",
    MAX_DOC_LEN="256",
    FP8="head",
    DEPTH="0",
    WARMUP_STEPS="2",
    TARGET_PARAM_DATA_RATIO="0",
    ARTIFACT_BYTES_LIMIT="0",
    VAL_BATCH_SIZE="2048",
)
# What else a preset needs, and what it cannot take
TOY_OF: dict[str, dict[str, str]] = dict(
    speedrun=dict(DEVICE_BATCH_SIZE="1"),  # so all its stages share one graph
    tiny=dict(
        STAGE_STARTS="",
        BATCH_SCHEDULE="1",
        BIGRAM_ROWS="1024",
        COUNT_BITS="12",
        COUNT_ORDERS="2",
        COUNT_WORDS="0",
        COPY_ORDERS="1,3",
        BIGRAM_EVERY="1",
    ),
    golf_plus=dict(
        STAGE_STARTS="",
        NUM_LAYERS="5",
        NUM_KV_HEADS="1",
        LOOP_LAYERS="1,2",
        GPTQ_BATCHES="2",
        EVAL_SLIDING="0",
    ),
    speedrun_plus=dict(
        STAGE_STARTS="",
        FP8="all",
        NUM_LAYERS="11",
        WINDOW_PATTERN="PSPLSP-SSPL",
        QK_DIM="16",
        DC_WINDOW="7",
        MUDD_DIM="8",
        MUDD_GATE_DIM="8",
        BIGRAM_SIGN_ROWS="64",
        DOC_SCHEDULE="64,256,256,256",
        EXTENSION_ITERATIONS="2",
    ),
    gpt2=dict(FP8="all"),
    gpt2_plus=dict(FP8="all", NUM_LAYERS="4", VALUE_EMBED_LAYERS="0,1,0,2", BACKOUT_LAYER="2"),
)


# ---------- settings and data
def one_rank_of_eight(trainer: ModuleType, preset: str, given: dict[str, str], toy: bool) -> dict[str, str]:
    """The settings of a preset for the batch of one rank."""
    settings = dict(PRESET=preset, SAVE_EVERY="0", ITERATIONS=str(STEPS))
    if toy:
        settings |= TOY | TOY_OF.get(preset, {})
    settings |= given
    cfg = trainer.load_config(os.environ | settings)
    share = max(cfg.train_batch_tokens // RANKS, cfg.train_seq_len)
    return settings | dict(TRAIN_BATCH_TOKENS=str(share))


def rows_that_fit(cfg: Any, machine: Machine) -> str:
    """DEVICE_BATCH_SIZE of a preset that has the card to itself, the same in all parts, so that they compile
    the same graph."""
    cfg = replace(cfg, vocab_size=cfg.vocab_size or 1024)
    return ROWS.get(cfg.preset) or str(plan.micro_batch(cfg, machine))


def settings_of(spec: dict[str, Any]) -> dict[str, str]:
    """Of a part, for the batch of one rank, on random tokens that all parts of its preset share."""
    toy = spec["toy"]
    settings = one_rank_of_eight(train_gpt, spec["preset"], spec["given"], toy)
    cfg = train_gpt.load_config(os.environ | settings)
    data = Path("..", f"{spec['preset']}_data").resolve()
    settings |= bench.random_data(data, cfg, 1 << (20 if toy else 24), rows=2.5)
    settings |= dict(MAX_WALLCLOCK_SECONDS="0", VAL_LOSS_EVERY="0", MAX_EPOCHS="0")
    if not toy and not cfg.device_batch_size:
        memory = agenda.MEMORY_SHARE * torch.cuda.get_device_properties(0).total_memory
        machine = bench.machine_of(train_gpt.Team(cfg, {}), int(memory))
        settings["DEVICE_BATCH_SIZE"] = rows_that_fit(cfg, machine)
    return settings


# ---------- 1 environment
def environment(report: Report, toy: bool) -> None:
    """The machine, and whether this torch can use and compile for it."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    command = "nvidia-smi --query-gpu=driver_version --format=csv,noheader -i 0 2>/dev/null"
    found = dict(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        driver=subprocess.getoutput(command) or "none",
        gpu=gpu,
        gpus=torch.cuda.device_count(),
        cores=os.cpu_count(),
        python=platform.python_version(),
        triton=train_gpt.triton.__version__ if train_gpt.triton else "none",
        cudnn=torch.backends.cudnn.version() or "none",
    )
    if gpu:
        found["memory_GiB"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    report.send(machine=found)
    text = "{}, driver {driver}, torch {torch}, cuDNN {cudnn}, Triton {triton}"
    report.say("ok" if gpu or toy else "FAULT", text.format(gpu or "no GPU that torch can use", **found))
    if not any([shutil.which(name) for name in ("gcc", "cc", "clang")]):
        report.say("FAULT", "no C compiler, which torch.compile needs: install gcc")


# ---------- what a step calls
class Call(NamedTuple):
    """A call of attention in a step: shapes of q, k and v, and the mask's window and documents."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    window: int  # tokens before its own that a query sees
    documents: Tensor | None

    def name(self) -> str:
        words = f"attention {self.q[1]}x{self.q[3]}, T {self.q[2]:,}"
        if self.window < self.q[2] - 1:
            words += f", window {self.window:,}"
        return words + (", documents" if self.documents is not None else "")


def last_stage(run: Run) -> Stage:
    """The stage with the longest rows, which is the dearest one."""
    return max(run.cfg.stages(), key=lambda stage: (stage.row_tokens, stage.batch_tokens))


class LazyMask(NamedTuple):
    """Arguments of window_mask() and its versions: what is timed makes the mask itself, as a compiled step
    does."""

    window: int | Tensor
    T: int
    documents: Tensor | None
    device: torch.device


def step_calls(
    run: Run, stage: Stage, tokens: Tensor, targets: Tensor
) -> tuple[list[tuple[Call, int]], tuple[Any, ...] | None]:
    """([(call of attention, how many layers make it)] of a micro-step, its loss's arguments, None for a model
    that computes its own). Meanwhile attention gives values back."""
    model = run.model
    kernels = model.kernels
    context = model.context(stage.row_tokens, run.team.device, run.team.dtype, stage)
    calls: list[Call] = []
    losses: list[tuple[Any, ...]] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: LazyMask | None) -> Tensor:
        T = q.size(2)
        window = T if mask is None else min(int(mask.window), T)
        documents = None if mask is None else mask.documents
        calls.append(Call(tuple(q.shape), tuple(k.shape), tuple(v.shape), window, documents))
        return v.repeat_interleave(q.size(1) // v.size(1), 1)

    def loss(*args: Any) -> Tensor:
        losses.append(args)
        return args[0].sum()

    noting: dict[str, Any] = dict(attention=attention, loss=loss)
    if hasattr(kernels, "window_mask"):
        noting["window_mask"] = LazyMask
    model.use(replace(kernels, **noting))
    with torch.no_grad():
        model(tokens, targets, context, *model.candidates(tokens, targets))
    model.use(kernels)
    counts = Counter([call.name() for call in calls])
    distinct = {call.name(): call for call in calls}
    return [(call, counts[name]) for name, call in distinct.items()], losses[0] if losses else None


def attention_inputs(run: Run, call: Call) -> list[Tensor]:
    """Random q, k, v and a gradient of the output. Queries and keys are normalized, as the recipes do it."""
    device = run.team.device
    draw = torch.Generator(device).manual_seed(1)
    shapes = (call.q, call.k, call.v, (*call.q[:3], call.v[3]))
    q, k, v, grad = [torch.randn(shape, device=device, generator=draw) for shape in shapes]
    q = F.rms_norm(q, (q.size(-1),)) * 0.1
    k = F.rms_norm(k, (k.size(-1),))
    return [x.to(run.team.dtype) for x in (q, k, v, grad)]


def by_kernels(kernels: Any, call: Call, device: torch.device) -> Callable[..., Tensor]:
    """Attention as a compiled step with these Kernels computes it."""
    T = call.q[2]
    documents = call.documents
    masked = documents is not None or call.window < T - 1
    window = kernels.window(call.window, T, device, documents is not None) if masked else 0

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = kernels.window_mask(window, T, documents, q.device) if masked else None
        return kernels.attention(q, k, v, mask)

    return attend


def loss_inputs(run: Run, loss_args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """x (1, N, C) of norm 1, a head (V, C) and targets (1, N, ...) of a micro-step."""
    x, head, targets, *_ = loss_args
    draw = torch.Generator(x.device).manual_seed(2)
    x = torch.randn((1, x[..., 0].numel(), x.size(-1)), device=x.device, generator=draw)
    x = F.rms_norm(x, (x.size(-1),)).to(run.team.dtype)
    head = 0.05 * torch.randn(head.shape, device=x.device, generator=draw)
    return x, head, targets.flatten(0, 1)[None]


# ---------- 2 kernels, timed
class Option(NamedTuple):
    """A way to compute the same thing. change: what to set to get it; "": it is in use."""

    name: str
    change: str
    function: Callable[..., Tensor]
    flex: dict[str, Any] = {}  # FLEX_OPTIONS meanwhile


def milliseconds(subject: Subject, option: Option, inputs: list[Tensor]) -> float:
    """The median of one call, forward and backward. The first call compiles; a toy stays eager."""
    fast = option.function if subject.toy else subject.compiled(option.function)
    inputs = [x.detach().requires_grad_() for x in inputs]
    grad = torch.ones_like(fast(*inputs))

    def both() -> None:
        torch.autograd.grad(fast(*inputs), inputs, grad)

    both()
    return 1e3 * Timer("both()", globals=dict(both=both)).blocked_autorange().median


def compare(subject: Subject, what: str, options: list[Option], inputs: list[Tensor], times: int) -> None:
    """Times the options, of which the first is in use, and says which constant to set. times: per step."""
    print(what)
    found: dict[str, float] = {}
    failed: dict[str, str] = {}
    for option in options:
        try:
            with mock.patch.object(subject.trainer, "FLEX_OPTIONS", option.flex):
                found[option.name] = milliseconds(subject, option, inputs)
        except Exception as error:  # such as tiles that do not fit into shared memory
            failed[option.name] = repr(error)[:100]
        torch._dynamo.reset()  # the next one has the same code
    text = f"{what}, ms: " + ", ".join([f"{name} {ms:.3f}" for name, ms in found.items()])
    if failed:
        text += f"; not here: {', '.join(failed)}"
    figures = dict(ms=found, times=times, failed=failed)
    in_use = options[0].name
    if in_use not in found or len(found) < 2:
        verdict = "note" if in_use in found else "FAULT"
        subject.report.say(verdict, f"{text}; nothing to compare", **figures)
        return
    winner = min(options, key=lambda option: found.get(option.name, torch.inf))
    part = 1 - found[winner.name] / found[in_use]
    gain = times * part * found[in_use]
    if gain > LEAST_GAIN and part > (LEAST_PART_OF_A_TOY if subject.toy else LEAST_PART):
        text += f"; {winner.name} gains {gain:.1f} ms a step: {winner.change}"
        subject.report.say("set", text, change=winner.change, **figures)
    else:
        subject.report.say("ok", f"{text}; x{times} a step, what is in use stays", **figures)


def attention_options(run: Run, call: Call) -> list[Option]:
    """One call of attention as it is and, where that is flex attention, with other tiles."""
    attend = by_kernels(run.model.kernels, call, run.team.device)
    found = [Option("as it is", "", attend)]
    if call.documents is not None and run.team.on_gpu:
        for options in TILES.get((torch.cuda.get_device_capability()[0], call.q[3]), []):
            name = " ".join([f"{name} {value}" for name, value in options.items()])
            found.append(Option(name, f"FLEX_OPTIONS = {options}", attend, options))
    return found


def loss_options(trainer: ModuleType, in_use: Callable[..., Tensor], more: list[Any]) -> list[Option]:
    """The loss as it is, and by Inductor's kernel where ours is in use, else by the readable function. more:
    its arguments after x and head."""
    name = "readable"
    change = "loss=lm_loss in fast_loss()"
    other = trainer.lm_loss
    if getattr(in_use, "keywords", {}).get("row_losses"):
        name = "Inductor's"
        change = "a larger LEAST_KERNEL_VOCABULARY in train_gpt.py"
        other = partial(in_use, row_losses=trainer.row_losses)
    return [
        Option("as it is", "", lambda x, head: in_use(x, head, *more)),
        Option(name, change, lambda x, head: other(x, head, *more)),
    ]


def kernels(subject: Subject) -> None:
    """Attention and the loss of the dearest stage, each in the ways that this machine has."""
    torch._dynamo.config.recompile_limit = 64  # kinds of attention; beyond it runs uncompiled
    run = subject.assemble()
    stage = last_stage(run)
    tokens, targets = bench.next_batch(run, stage)
    rows = max(1, run.micro * run.cfg.train_seq_len // stage.row_tokens)
    micro_steps = -(-len(tokens) // rows)
    calls, loss_args = step_calls(run, stage, tokens[:rows], targets[:rows])
    for call, layers in calls:
        *inputs, _ = attention_inputs(run, call)
        compare(subject, call.name(), attention_options(run, call), inputs, layers * micro_steps)
    if loss_args:  # else the loss is the model's own
        x, head, targets = loss_inputs(run, loss_args)
        options = loss_options(subject.trainer, run.model.kernels.loss, [targets, *loss_args[3:]])
        compare(subject, f"loss of {x.size(1):,} tokens", options, [x, head], micro_steps)


# ---------- 3 the loop
@contextmanager
def alone_of_eight(trainer: ModuleType) -> Iterator[None]:
    """Meanwhile the collectives of rank 0 of eight, which is alone, copy its own share."""

    def reduce_scatter(mine: Tensor, whole: Tensor, **_: Any) -> stand_in.Done:
        mine.copy_(whole.view(RANKS, -1)[0])
        return stand_in.Done()

    def all_gather(whole: Tensor, mine: Tensor, **_: Any) -> stand_in.Done:
        whole.view(RANKS, -1)[0].copy_(mine)
        return stand_in.Done()

    with mock.patch.multiple(trainer, reduce_scatter=reduce_scatter, all_gather=all_gather):
        yield


def moment(on_gpu: bool) -> Any:
    """Now: on a CPU in seconds, on a GPU as an event in its queue, so that the host need not wait."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def run_loop(subject: Subject, run: Run) -> dict[tuple[int, int], dict[int, float]]:
    """{(tokens, tokens of a row): {step: ms}} of the trainer's own loop; the last step has no end."""
    trainer = subject.trainer
    on_gpu = run.team.on_gpu
    moments: list[Any] = []
    stages: list[tuple[int, int]] = []
    real = trainer.train_step

    def step(loss_fn: Any, optimizer: Any, batch: tuple[Tensor, ...], *args: Any) -> Tensor:
        moments.append(moment(on_gpu))
        stages.append((batch[0].numel(), batch[0].size(1)))
        return real(loss_fn, optimizer, batch, *args)

    with mock.patch.multiple(trainer, train_step=step, save_weights=mock.Mock(), validate=mock.Mock()):
        trainer.train(run)
    gc.enable()
    run.team.wait()
    found: dict[tuple[int, int], dict[int, float]] = {stage: {} for stage in stages}
    for number, (before, after, stage) in enumerate(zip(moments, moments[1:], stages), 1):
        found[stage][number] = before.elapsed_time(after) if on_gpu else 1e3 * (after - before)
    return found


def tell_steps(subject: Subject, steps: dict[tuple[int, int], dict[int, float]]) -> float:
    """A verdict for each stage -> the shortest typical step, in ms."""
    typical = []
    for (tokens, row_tokens), of_stage in steps.items():
        p50, p99 = np.percentile([*of_stage.values()], (50, 99)).tolist()
        typical.append(p50)
        longest = max(of_stage, key=of_stage.__getitem__)
        least = LEAST_PAUSE_OF_A_TOY if subject.toy else LEAST_PAUSE
        slow = of_stage[longest] - p50 > max(least, p50)
        text = f"{tokens:,} tokens a step: p50 {p50:.1f} ms, p99 {p99:.1f}, "
        text += f"longest {of_stage[longest]:.1f} in step {longest}"
        figures = dict(tokens=tokens, row_tokens=row_tokens, steps=len(of_stage), p50=p50, p99=p99)
        subject.report.say("SLOW" if slow else "ok", text, **figures)
    return min(typical)


def loop(subject: Subject) -> None:
    """200 real steps of a rank of eight: each stage's times, allocations, the host, kernels, operators."""
    report = subject.report
    with alone_of_eight(subject.trainer):
        run = subject.assemble()
        on_gpu = run.team.on_gpu
        print("compiling the step")
        subject.trainer.warm_up(run)
        before = torch.cuda.memory_stats().get("num_device_alloc", 0) if on_gpu else 0
        print("the loop")
        shortest = tell_steps(subject, run_loop(subject, run))
        if on_gpu:
            count = torch.cuda.memory_stats().get("num_device_alloc", 0) - before
            report.say("SLOW" if count else "ok", f"cudaMalloc {count} times in the loop")
            peak = torch.cuda.max_memory_allocated() / 2**30
            report.say("note", f"peak {peak:.1f} GiB; micro_batch {run.micro}")
        print("what a step launches")
        profile_step(subject, run, shortest)
        if not ON_STAND_IN:
            operators(subject, run)


def profile_step(subject: Subject, run: Run, shortest: float) -> None:
    """How long Python needs to launch a step, which must not be longer than the shortest one, and the 15
    kernels that take longest."""
    from torch.profiler import ProfilerActivity, profile

    stage = last_stage(run)
    batch = bench.next_batch(run, stage)
    step = bench.step_function(subject.trainer, run, stage)
    steps = 4  # even, as Adam may take every other step
    host = 0.0
    for number in range(steps):
        run.team.wait()
        began = time.perf_counter()
        step(batch)
        if number > 1:
            host += 1e3 * (time.perf_counter() - began) / 2
    run.team.wait()
    on_gpu = run.team.on_gpu
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            step(batch)
        run.team.wait()
    rows = []
    for event in found.key_averages():
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if us:  # else a call of the driver
            rows.append(dict(name=event.key, ms=us / 1e3 / steps, launches=event.count / steps))
    rows.sort(key=lambda row: -row["ms"])
    whole = sum([row["ms"] for row in rows])
    names = ", ".join([f"{row['name'][:36]} {row['ms']:.2f}" for row in rows[:3]])
    text = f"{len(rows)} kernels, {whole:.1f} ms a step, {host:.1f} ms of Python to launch it; the longest: "
    text += f"{names} (15 in the file)"
    slow = on_gpu and host > 0.8 * shortest
    subject.report.say("SLOW" if slow else "ok", text, kernels=rows[:15], kernel_ms=whole, host_ms=host)


# ---------- operators outside of Inductor's kernels
class Recorder(TorchDispatchMode):
    """Notes the operators that are called on a kind of device, with dtypes. Compiled code stays as it is:
    what Inductor generates calls no operator, what it does not generate comes by here."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.found: set[tuple[str, tuple[str, ...]]] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, function: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        value = function(*args, **kwargs)
        name = seen_on_gpu.canonical(str(function))
        given = torch.utils._pytree.tree_leaves((args, kwargs))
        leaves = [*given, *torch.utils._pytree.tree_leaves(value)]
        devices = [leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)]
        if seen_on_gpu.launches(name) and self.device in devices:
            self.found.add((name, seen_on_gpu.dtypes_of(given)))
        return value


def operators(subject: Subject, run: Run) -> None:
    """Which operators reach the device outside of Inductor's kernels, in a compiled step and a score."""
    stage = run.cfg.stages()[0]
    batch = bench.next_batch(run, stage)
    step = bench.step_function(subject.trainer, run, stage)

    def steps() -> None:
        step(batch)
        step(batch)  # Adam may take every other one
        subject.trainer.evaluate(run.model, run.cfg, run.data, run.team)

    steps()  # compiles
    with Recorder(run.team.device.type) as recorder:
        steps()
        run.team.wait()
    found = sorted(recorder.found)
    subject.report.send(operators=[dict(operator=name, dtypes=dtypes) for name, dtypes in found])
    unseen = [kind for kind in found if not seen_on_gpu.seen(*kind)]
    words = "" if subject.toy else f", {len(unseen)} of them in no report so far"
    subject.report.say("note", f"{len(found)} kinds of operators outside of generated kernels{words}")


# ---------- a part
PARTS = dict(
    train=training.train, score=training.score, resume=training.resume, kernels=kernels, loop=loop
)


def main(text: str) -> None:
    """Does what the spec asks for."""
    spec = json.loads(text)
    part = spec["part"]
    report = Report(Path("events.jsonl"), part, spec["preset"])
    if ON_STAND_IN:
        kept = stand_in.replace_attention(torch, lambda *_: None)  # noqa: F841  held until the end
    if part == "environment":
        environment(report, spec["toy"])
        return
    settings = settings_of(spec)
    if part not in agenda.ALONE:
        settings = training.settings_of(settings, spec["given"], spec["toy"])
    PARTS[part](Subject(train_gpt, report, settings, spec["toy"]))


if __name__ == "__main__":
    main(sys.argv[1])
