"""What the parts of gpu-report measure. report.py starts a process for each of them, in a folder of its own:

    python -m tools.gpu.parts SPEC.json

The spec names the part, its preset and the constants that the command gave; what is found goes to
events.jsonl, a line of JSON at a time. Runs of the trainer are in training.py. Shapes are those of one rank
of eight. Kernels are timed forward and backward, on the device's own clock where there is a GPU. The loop is
the trainer's own, on random tokens, with the batch of one rank; a single GPU then updates all weights where a
rank of eight updates an eighth of them, so the step is timed once more with an optimizer that owns an eighth.
What the collectives move between GPUs is not in it. What a card computes is compared with fp32 by `./run.sh
test -m gpu`.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt
from tools.dev import bench
from tools.gpu import agenda
from tools.gpu import seen_on_gpu, static, training
from tools.run import plan
from tools.run.machine import Machine
from train_gpt import Optimizer, Run, Stage

if TYPE_CHECKING:
    from torch._ops import OpOverload

ROOT = Path(__file__).resolve().parents[2]
LEAST_GAIN = 0.5  # ms per step that a constant must gain
LEAST_PART = 0.1  # of the time of what it changes
LEAST_PART_OF_A_TOY = 0.5  # where a CPU is measured that does other things, too
STEPS = 200  # of the loop
RANKS = 8  # whose shapes are measured
LINES_SHOWN = 8  # of the traceback of what failed
ROWS = dict(golf_plus="16")  # DEVICE_BATCH_SIZE; the others take what fits into the card's memory
ON_STAND_IN = "STATIC_NAME" in os.environ  # tools/gpu/static.py's stand-in for a GPU computes nothing


def tile(m: int, n: int, warps: int, stages: int, m1: int = 0, n1: int = 0, *launch: int) -> dict[str, int]:
    """Of the forward pass and, if given, of the backward pass."""
    found = dict(fwd_BLOCK_M=m, fwd_BLOCK_N=n, fwd_num_warps=warps, fwd_num_stages=stages)
    if m1:
        found |= dict(bwd_BLOCK_M1=m1, bwd_BLOCK_N1=n1, bwd_BLOCK_M2=n1, bwd_BLOCK_N2=m1)
        found |= dict(bwd_num_warps=launch[0], bwd_num_stages=launch[1])
    return found


# FLEX_OPTIONS to time beside torch's own choice, by the card's generation and the head size of queries and
# keys: of those that compile without spilling (docs/log.md) the ones to try first
TILES = {
    (9, 96): [tile(128, 64, 8, 3), tile(128, 64, 8, 3, 64, 64, 8, 3)],
    (10, 96): [tile(128, 64, 8, 3), tile(128, 64, 8, 3, 64, 128, 8, 2)],
    (12, 96): [tile(128, 64, 8, 2), tile(128, 64, 8, 2, 64, 64, 8, 2)],
}
# ms per step of each stage on 8xH100: what to expect, by the rates of one H100 (docs/milliseconds.md); what
# the public record logged
EXPECTED = {
    "speedrun": [(26.1, 33.6), (52.4, 60.1), (79.1, 88.1)],
    "golf": [(32.8, 71.5)],
    "gpt2": [(659.0, 706.0)],
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


def random_data(cfg: Any, folder: Path, toy: bool) -> dict[str, str]:
    """Settings of random tokens, which all parts of a preset share, and of a vocabulary that stands for
    GPT-2's in losses on prefixes; written once."""
    known = folder / "settings.json"
    if not known.exists():
        folder.mkdir(exist_ok=True)
        letters = [chr(number) for number in range(33, 127)]
        pairs = [a + b for a in letters for b in letters]
        words = [*letters, *pairs, *[pair + letter for pair in pairs[:500] for letter in letters]]
        vocabulary = folder / "vocabulary.json"
        vocabulary.write_text(json.dumps({word: token for token, word in enumerate(words[:50_257])}))
        found = bench.random_data(folder, cfg, 1 << (20 if toy else 24), rows=2.5)
        known.write_text(json.dumps(found | dict(VOCAB_PATH=str(vocabulary))))
    return json.loads(known.read_text())


def rows_that_fit(cfg: Any, machine: Machine) -> str:
    """DEVICE_BATCH_SIZE of a preset that has the card to itself, the same in all parts, so that they compile
    the same graph."""
    cfg = replace(cfg, vocab_size=cfg.vocab_size or 1024)
    return ROWS.get(cfg.preset) or str(plan.micro_batch(cfg, machine))


def settings_of(spec: dict[str, Any]) -> dict[str, str]:
    """Of a part, for the batch of one rank, on random tokens. Raises Refused."""
    toy = spec["toy"]
    settings = one_rank_of_eight(train_gpt, spec["preset"], spec["given"], toy)
    cfg = train_gpt.load_config(os.environ | settings)
    settings |= random_data(cfg, Path("..", f"{spec['preset']}_data").resolve(), toy)
    settings |= dict(MAX_WALLCLOCK_SECONDS="0", VAL_LOSS_EVERY="0", MAX_EPOCHS="0")
    if not toy and not cfg.device_batch_size:
        memory = agenda.MEMORY_SHARE * torch.cuda.get_device_properties(0).total_memory
        machine = bench.machine_of(train_gpt.Team(cfg, {}), int(memory))
        settings["DEVICE_BATCH_SIZE"] = rows_that_fit(cfg, machine)
    if spec["part"] in TRAINING:
        return training.settings_of(settings, spec["given"], toy, Path(spec["here"]))
    return settings


TRAINING = dict(train=training.train, score=training.score, resume=training.resume)


# ---------- the report
def first_line(error: Exception) -> str:
    """What an exception says, else its name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class Report:
    """Verdicts of one part, as lines of JSON in a file that gpu-report reads; without one on the screen."""

    def __init__(
        self, path: Path | None, part: str = "", preset: str = "", machine: dict[str, Any] | None = None
    ) -> None:
        self.path = path
        self.part = part
        self.preset = preset
        self.machine = machine or {}
        self.rows: list[dict[str, Any]] = []

    def send(self, **event: Any) -> None:
        """Tells gpu-report something."""
        if self.path is None:
            print(event, flush=True)
            return
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def say(self, verdict: str, text: str, **figures: Any) -> None:
        """Adds a verdict: ok, FAULT, SLOW, set, note or skip."""
        row = dict(part=self.part, preset=self.preset, verdict=verdict, text=text, figures=figures)
        self.rows.append(row)
        self.send(**row)

    def doing(self, what: str) -> None:
        """What is done now, for whoever waits."""
        self.send(doing=what)

    def attempt(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Calls function(*args); what it raises becomes a verdict, and the part goes on, unless it spoilt all
        later work of the process."""
        self.doing(what)
        try:
            return function(*args)
        except Exception as error:  # a compiler's back end may raise anything
            lines = traceback.format_exc().strip().splitlines()[-LINES_SHOWN:]
            self.say(
                "FAULT",
                f"{what}: {type(error).__name__}: {first_line(error)[:160]}",
                last_lines=[line[:200] for line in lines],
            )
            if "CUDA error" in str(error):
                self.say("skip", f"{self.part}: what comes after {what}, as every later call would fail, too")
                raise SystemExit(0) from None
            torch._dynamo.reset()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return None


class Subject(NamedTuple):
    """What is measured: a preset at the size of one rank of eight."""

    trainer: ModuleType
    report: Report
    settings: dict[str, str]  # constants that differ from the preset's
    toy: bool

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function as compiled steps run it; at toy size without building anything."""
        back_end = "aot_eager" if self.toy else "inductor"
        return torch.compile(function, dynamic=False, fullgraph=True, backend=back_end)


# ---------- 1 environment
def driver_version() -> str:
    """The NVIDIA driver's version, "" where there is none."""
    done = subprocess.getstatusoutput("nvidia-smi --query-gpu=driver_version --format=csv,noheader -i 0")
    return done[1].strip() if done[0] == 0 else ""


def environment(report: Report, toy: bool) -> None:
    """The machine, and whether this torch can use and compile for it."""
    driver = driver_version()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    found: dict[str, Any] = dict(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        driver=driver,
        gpu=gpu,
        gpus=torch.cuda.device_count(),
        cores=os.cpu_count(),
        python=sys.version.split()[0],
    )
    if gpu:
        found |= dict(
            cudnn=torch.backends.cudnn.version(),
            capability=torch.cuda.get_device_capability(),
            memory_GiB=round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
            nccl=".".join([str(number) for number in torch.cuda.nccl.version()]),
        )
    found["triton"] = train_gpt.triton.__version__ if train_gpt.triton else ""
    found["compiler"] = next(filter(shutil.which, ("gcc", "cc", "clang")), "")
    report.machine = found
    report.send(machine=found)
    report.say(
        "ok" if gpu or toy else "FAULT",
        f"{gpu or 'no GPU that torch can use'}, driver {driver or 'none'}, torch {torch.__version__}, cuDNN "
        f"{found.get('cudnn', 'none')}, Triton {found['triton'] or 'none'}",
    )
    if not found["compiler"]:
        report.say("FAULT", "no C compiler, which torch.compile needs: install gcc")


# ---------- a preset, ready to be measured
def assemble(subject: Subject) -> Run:
    """A Run with model, optimizer and data, nothing compiled, all weights zero."""
    cfg = subject.trainer.load_config(os.environ | subject.settings)
    subject.report.doing("building the model")
    return bench.assemble(cfg, subject.trainer)


Sizes = tuple[int, ...]


class Call(NamedTuple):
    """A call of attention in a step: shapes of q, k and v, and the mask's window and documents."""

    q: Sizes
    k: Sizes
    v: Sizes
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


def random_tokens(run: Run, stage: Stage) -> Tensor:
    """A micro-batch of a stage, with documents of about 700 tokens, cut where the recipe cuts them."""
    share = stage.batch_tokens // stage.row_tokens
    rows = min(share, max(1, run.micro * run.cfg.train_seq_len // stage.row_tokens))
    device = run.team.device
    draw = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(2, run.cfg.vocab_size, (rows, stage.row_tokens), device=device, generator=draw)
    begins = torch.rand(tokens.shape, device=device, generator=draw) < 1 / 700
    begins[:, 0] = True
    limit = vars(run.cfg).get("max_doc_len", 0)
    if limit:
        place = torch.arange(stage.row_tokens, device=device)
        first = torch.where(begins, place, 0).cummax(1).values  # of the document
        begins |= (place - first) % limit == 0
    tokens[begins] = run.cfg.bos_id
    return tokens


class LazyMask(NamedTuple):
    """Arguments of window_mask() and its versions: what is timed makes the mask itself, as a compiled step
    does."""

    window: int | Tensor
    T: int
    documents: Tensor | None
    device: torch.device


def attention_calls(run: Run) -> tuple[list[tuple[Call, int]], tuple[Any, ...] | None]:
    """([(call, how many layers make it)] of a micro-step of the dearest stage, its loss's arguments, None
    for a model that computes its own). Meanwhile attention gives values back."""
    stage = last_stage(run)
    model = run.model
    kernels = model.kernels
    tokens = random_tokens(run, stage)
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
        model(tokens, tokens, context, *model.candidates(tokens, tokens))
    model.use(kernels)
    counts = Counter([call.name() for call in calls])
    distinct = {call.name(): call for call in calls}
    return [(call, counts[name]) for name, call in distinct.items()], losses[0] if losses else None


def attention_inputs(run: Run, call: Call) -> list[Tensor]:
    """Random q, k, v and a gradient of the output. Queries and keys are normalized, as the recipes do it."""
    device = run.team.device
    draw = torch.Generator(device).manual_seed(1)
    found = []
    for shape in (call.q, call.k, call.v, (*call.q[:3], call.v[3])):
        found.append(torch.randn(shape, device=device, generator=draw).to(run.team.dtype))
    q, k, v, grad = found
    q = F.rms_norm(q, (q.size(-1),)) * 0.1
    k = F.rms_norm(k, (k.size(-1),))
    return [q, k, v, grad]


def by_kernels(kernels: Any, call: Call, device: torch.device) -> Callable[..., Tensor]:
    """Attention as a compiled step with these Kernels computes it."""
    T = call.q[2]
    documents = call.documents
    window: int | Tensor = call.window
    if documents is not None or call.window < T - 1:
        window = kernels.window(call.window, T, device, documents is not None)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = None
        if documents is not None or call.window < T - 1:
            mask = kernels.window_mask(window, T, documents, q.device)
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


def milliseconds(subject: Subject, run: Run, option: Option, inputs: list[Tensor]) -> float:
    """The median of one call, forward and backward. The first call compiles; a toy stays eager."""
    fast = option.function if subject.toy else subject.compiled(option.function)
    inputs = [x.detach().requires_grad_() for x in inputs]
    grad = torch.ones_like(fast(*inputs))

    def both() -> None:
        torch.autograd.grad(fast(*inputs), inputs, grad)

    both()
    run.team.wait()
    return 1e3 * bench.median_seconds(run.team, both, 10 if subject.toy else 20)


def compare(
    subject: Subject, run: Run, what: str, options: list[Option], inputs: list[Tensor], times: int
) -> None:
    """Times the options, of which the first is in use, and says which constant to set. times: per step."""
    found: dict[str, float] = {}
    failed: dict[str, str] = {}
    for option in options:
        try:
            with mock.patch.object(subject.trainer, "FLEX_OPTIONS", option.flex):
                found[option.name] = milliseconds(subject, run, option, inputs)
        except Exception as error:  # such as tiles that do not fit into shared memory
            failed[option.name] = first_line(error)[:100]
        torch._dynamo.reset()  # the next one has the same code
    listed = ", ".join([f"{name} {ms:.3f}" for name, ms in found.items()])
    listed += f"; not here: {', '.join(failed)}" if failed else ""
    figures = dict(ms=found, times=times, failed=failed)
    in_use = options[0].name
    if in_use not in found or len(found) < 2:
        subject.report.say("note", f"{what}, ms: {listed}; nothing to compare", **figures)
        return
    winner = min(found, key=lambda name: found[name])
    part = 1 - found[winner] / found[in_use]
    gain = times * part * found[in_use]
    if gain > LEAST_GAIN and part > (LEAST_PART_OF_A_TOY if subject.toy else LEAST_PART):
        change = next(option.change for option in options if option.name == winner)
        text = f"{what}, ms: {listed}; {winner} gains {gain:.1f} ms a step: {change}"
        subject.report.say("set", text, winner=winner, gain_ms=gain, change=change, **figures)
    else:
        text = f"{what}, ms: {listed}; x{times} a step, what is in use stays"
        subject.report.say("ok", text, winner=in_use, **figures)


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


def time_kernels(
    subject: Subject, run: Run, calls: list[tuple[Call, int]], loss_args: tuple[Any, ...] | None
) -> None:
    """Attention and the loss, each in the ways that this machine has."""
    stage = last_stage(run)
    rows = len(random_tokens(run, stage))
    micro_steps = max(1, stage.batch_tokens // stage.row_tokens // rows)
    for call, layers in calls:
        *inputs, _ = attention_inputs(run, call)
        options = attention_options(run, call)
        times = layers * micro_steps
        subject.report.attempt(call.name(), compare, subject, run, call.name(), options, inputs, times)
    if loss_args is None:
        subject.report.say("note", "the loss is the model's own: there is no other way to compute it")
        return
    x, head, targets = loss_inputs(run, loss_args)
    what = f"loss of {x.size(1):,} tokens"
    options = loss_options(subject.trainer, run.model.kernels.loss, [targets, *loss_args[3:]])
    subject.report.attempt("loss", compare, subject, run, what, options, [x, head], micro_steps)


# ---------- 3 the loop
Steps = list[tuple[tuple[int, int], float]]  # [((tokens, tokens of a row), ms)]


def run_loop(subject: Subject, run: Run) -> Steps:
    """The steps of the trainer's own loop; the last one has no end."""
    trainer = subject.trainer
    moments: list[Any] = []
    stages: list[tuple[int, int]] = []
    real = trainer.train_step

    def step(
        loss_fn: Callable[..., Tensor], optimizer: Optimizer, batch: tuple[Tensor, ...], *args: Any
    ) -> Tensor:
        moments.append(bench.moment(run.team))
        stages.append((batch[0].numel(), batch[0].size(1)))
        return real(loss_fn, optimizer, batch, *args)

    with mock.patch.object(trainer, "train_step", step):
        bench.train_again(run)
    run.team.wait()
    found = []
    for before, after, stage in zip(moments, moments[1:], stages):
        ms = before.elapsed_time(after) if run.team.on_gpu else 1e3 * (after - before)
        found.append((stage, ms))
    return found


def pauses_in(
    steps: list[tuple[tuple[int, int], float]], typical: dict[tuple[int, int], float], toy: bool
) -> list[tuple[int, float]]:
    """[(step, ms beyond the typical step)] of steps that took far too long. A CPU is shared, so there it
    takes a quarter of a second."""
    found = []
    for number, (stage, ms) in enumerate(steps):
        beyond = ms - typical[stage]
        least = 250.0 if toy else max(10.0, typical[stage])
        if beyond > least:
            found.append((number, beyond))
    return found


def loop(subject: Subject, run: Run) -> None:
    """200 real steps: p50 and p99 of each stage, pauses, allocations, the host, kernels, and the step of a
    rank."""
    report = subject.report
    on_gpu = run.team.on_gpu
    report.doing("compiling the step")
    subject.trainer.warm_up(run)
    report.doing("the loop")
    before = torch.cuda.memory_stats().get("num_device_alloc", 0) if on_gpu else 0
    steps = run_loop(subject, run)
    typical = {}
    for stage in dict.fromkeys([stage for stage, _ in steps]):
        times = sorted([ms for its, ms in steps if its == stage])
        typical[stage] = times[len(times) // 2]
        row: dict[str, float] = dict(tokens=stage[0], row_tokens=stage[1], steps=len(times))
        row |= dict(p50=typical[stage], p99=times[int(len(times) * 0.99)])
        text = f"{stage[0]:,} tokens a step: p50 {row['p50']:.1f} ms, p99 {row['p99']:.1f}"
        report.say("note", text, **row)
    pauses = pauses_in(steps, typical, subject.toy)
    longest = sorted(pauses, key=lambda pause: -pause[1])[:3]
    listed = ", ".join([f"{ms / 1e3:.2f} s in step {number + 1}" for number, ms in longest])
    text = f"pauses on the clock: {len(pauses)}" + (f": {listed}" if pauses else "")
    report.say("SLOW" if pauses else "ok", text, pauses=pauses)
    if on_gpu:
        count = torch.cuda.memory_stats().get("num_device_alloc", 0) - before
        report.say("SLOW" if count else "ok", f"cudaMalloc {count} times in the loop")
        peak = torch.cuda.max_memory_allocated() / 2**30
        report.say("note", f"peak {peak:.1f} GiB with the whole optimizer; micro_batch {run.micro}")
    report.attempt("operators", operators, subject, run)
    report.attempt("kernels", profile_step, subject, run)
    report.attempt("a rank of eight", rank_of_eight, subject, run)


@contextmanager
def alone_of_eight(trainer: ModuleType) -> Iterator[None]:
    """Meanwhile the collectives of rank 0 of eight, which is alone, copy its own share."""

    def reduce_scatter(mine: Tensor, whole: Tensor, **_: Any) -> static.Done:
        mine.copy_(whole.view(RANKS, -1)[0])
        return static.Done()

    def all_gather(whole: Tensor, mine: Tensor, **_: Any) -> static.Done:
        whole.view(RANKS, -1)[0].copy_(mine)
        return static.Done()

    with mock.patch.multiple(trainer, reduce_scatter=reduce_scatter, all_gather=all_gather):
        yield


def own_an_eighth(subject: Subject, run: Run) -> None:
    """From now on run.optimizer is that of rank 0 of eight, with the rules of the one that it replaces."""
    old = run.optimizer
    dtype = old.banks[0].data.dtype
    run.optimizer = run.cfg.optimizer()(run.model, run.cfg, 0, RANKS, dtype=dtype, muon_dtype=old.muon_dtype)
    run.optimizer.adam_step = old.adam_step
    run.optimizer.muon_step = old.muon_step


def rank_of_eight(subject: Subject, run: Run) -> None:
    """The step of each stage with an eighth of the optimizer, and how long Python needs to launch it.
    Nothing can be measured afterwards with the whole optimizer."""
    report = subject.report
    trainer = subject.trainer
    expected = [] if subject.toy else EXPECTED.get(report.preset, [])
    stages: dict[tuple[int, int], Stage] = {}
    for stage in run.cfg.stages():
        stages.setdefault((stage.batch_tokens, stage.row_tokens), stage)
    own_an_eighth(subject, run)
    gc.collect()  # the whole optimizer
    limit = torch._dynamo.config.patch(recompile_limit=64)  # its rules see further shapes
    with alone_of_eight(trainer), limit:
        for place, stage in enumerate(stages.values()):
            multiple = stage.row_tokens // run.cfg.train_seq_len
            batch = run.loader.next(stage.batch_tokens, multiple, stage.doc_len)
            step = bench.step_function(trainer, run, stage)

            def two_steps() -> None:  # as Adam may take every other one
                step(batch)
                step(batch)

            two_steps()
            run.team.wait()
            ms = 1e3 * bench.median_seconds(run.team, two_steps, 2 if subject.toy else 10) / 2
            began = time.perf_counter()
            two_steps()
            host = 1e3 * (time.perf_counter() - began) / 2
            run.team.wait()
            text = f"{stage.batch_tokens:,} tokens a step with an eighth of the optimizer: {ms:.1f} ms, "
            text += f"collectives as copies; {host:.1f} ms of Python to launch it"
            slow = run.team.on_gpu and host > 0.8 * ms
            if place < len(expected):
                estimate, record = expected[place]
                text += f"; on 8xH100 {estimate} expected, the record's {record}"
                slow |= "H100" in report.machine.get("gpu", "") and ms > 1.1 * max(estimate, record)
            figures = dict(tokens=stage.batch_tokens, with_an_eighth=ms, host_ms=host)
            report.say("SLOW" if slow else "ok", text, **figures)


def profile_step(subject: Subject, run: Run) -> None:
    """The 15 kernels that take longest, with the rate of memory traffic that `static` counts for them."""
    from torch.profiler import ProfilerActivity, profile

    stage = last_stage(run)
    batch = run.loader.next(stage.batch_tokens, stage.row_tokens // run.cfg.train_seq_len, stage.doc_len)
    step = bench.step_function(subject.trainer, run, stage)
    moved: Counter[str] = Counter()

    def note(_: str, name: str, size: int) -> None:
        moved[name] += size

    step(batch)
    run.team.wait()
    steps = 4  # even, as Adam may take every other step
    on_gpu = run.team.on_gpu
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    width = batch[0].numel() * run.cfg.model_dim * 4
    counted = static.count_bytes(torch, note, width) if on_gpu else nullcontext()
    with counted, profile(activities=[activity]) as found:
        for _ in range(steps):
            step(batch)
        run.team.wait()
    rows = []
    for event in found.key_averages():
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if us:  # else a call of the driver
            row = dict(name=event.key, ms=us / 1e3 / steps, launches=event.count / steps)
            rows.append(row | (dict(GBps=moved[event.key] / 1e3 / us) if event.key in moved else {}))
    rows.sort(key=lambda row: -row["ms"])
    whole = sum([row["ms"] for row in rows])
    names = ", ".join([f"{row['name'][:36]} {row['ms']:.2f}" for row in rows[:3]])
    text = f"{len(rows)} kernels, {whole:.1f} ms a step; the longest: {names} (15 in the file)"
    subject.report.say("note", text, kernels=rows[:15], kernel_ms=whole)


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
    if ON_STAND_IN:
        return
    stage = run.cfg.stages()[0]
    batch = run.loader.next(stage.batch_tokens, stage.row_tokens // run.cfg.train_seq_len, stage.doc_len)
    step = bench.step_function(subject.trainer, run, stage)
    score = partial(subject.trainer.evaluate, run.model, run.cfg, run.data, run.team)

    def steps() -> None:
        step(batch)
        step(batch)  # Adam may take every other one

    steps()  # compiles
    score()
    with Recorder(run.team.device.type) as recorder:
        steps()
        score()
        run.team.wait()
    found = sorted(recorder.found)
    subject.report.send(operators=[dict(operator=name, dtypes=dtypes) for name, dtypes in found])
    unseen = [kind for kind in found if not seen_on_gpu.seen(*kind)]
    words = "" if subject.toy else f", {len(unseen)} of them not yet in tools/gpu/seen_on_gpu.tsv"
    subject.report.say("note", f"{len(found)} kinds of operators outside of generated kernels{words}")


# ---------- a part
def measure(subject: Subject, part: str) -> None:
    """One part of one preset."""
    report = subject.report
    if part in TRAINING:
        TRAINING[part](subject)
        return
    torch._dynamo.config.recompile_limit = 64  # kinds of attention; beyond it runs uncompiled
    run = report.attempt("setting up", assemble, subject)
    if run is None:
        return
    if part == "kernels":
        found = report.attempt("shapes", attention_calls, run)
        if found:
            report.attempt("kernels", time_kernels, subject, run, *found)
    else:
        report.attempt("the loop", loop, subject, run)


def main(path: str) -> int:
    """Does what the spec asks for."""
    spec = json.loads(Path(path).read_text(encoding="utf-8"))
    part = spec["part"]
    report = Report(Path("events.jsonl"), part, spec["preset"], spec["machine"])
    report.doing("setting up")
    if ON_STAND_IN:
        kept = static.replace_attention(torch, lambda *_: None)  # noqa: F841  held until the end
    if spec["toy"]:
        torch.set_num_threads(1)  # more gain nothing at this size
    if part == "environment":
        report.attempt(part, environment, report, spec["toy"])
    else:
        measure(Subject(train_gpt, report, settings_of(spec), spec["toy"]), part)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
