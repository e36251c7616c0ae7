"""What the parts of gpu-report measure. tools/gpu/report.py starts a process for each of them:

    python tools/gpu/parts.py SPEC.json

The spec names the part, the preset and its settings, and the file that takes what is found, a line of JSON at
a time. Shapes are those of one rank of eight. Numbers are compared with fp32, computed in slices. An
alternative is timed forward and backward, on the device's own clock where there is a GPU. The loop is the
trainer's own, on random tokens, with the batch of one rank; a single GPU then updates all weights where a
rank of eight updates an eighth of them, so the step is timed once more with an optimizer that owns an eighth.
What the collectives move between GPUs is not in it.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
if __name__ == "__main__":  # our modules are those of this checkout, whatever else the path holds
    sys.path[:] = [str(ROOT), *[folder for folder in sys.path if folder != str(HERE)]]
from tools.gpu import seen_on_gpu  # noqa: E402
from tools.gpu.plan import LINES_SHOWN, last_lines, start_process, stop_process  # noqa: E402

if TYPE_CHECKING:  # the spec names the folder of the one that runs
    from torch._ops import OpOverload

    from tools.dev.bench import LazyMask
    from train_gpt import Kernels, Model, Optimizer, Run, Stage, Team

MOST_ERROR = 0.02  # relative, of a result in bf16
MOST_ERROR_FP8 = 0.10
LEAST_GAIN = 0.5  # ms per step that a constant must gain
LEAST_PART = 0.1  # of the time of what it changes
LEAST_PART_OF_A_TOY = 0.5  # where a CPU is measured that does other things, too
LOSSES = 50  # steps of the compiled run beside the eager one
# The mean of the 50 differences. With bf16 on both sides one H100 gave 0.0009 (golf) and 0.0027 (golf_plus):
# docs/gpu_results/2026-11-26_golf.json and 2026-11-26_golf_plus.json
MOST_MEAN_DIFFERENCE = 0.02
# Where the compiled step has fp8 products, which the eager one makes in bf16, gradients are off by 3 to 6 %
# instead of 0.3 %. speedrun gave 0.0407 on average, 0.2434 at most, and 0.003 in its last step
# (docs/gpu_results/2026-11-26_speedrun.json). The limit lies between that and a model that does not train,
# whose loss of the first step is 0.25 from the eager ones.
MOST_MEAN_DIFFERENCE_FP8 = 0.10
STEPS = 200  # of the loop
RANKS = 8  # whose shapes are measured
OLDEST_DRIVER = 580  # of NVIDIA for CUDA 13
ON_STAND_IN = "STATIC_NAME" in os.environ  # tools/gpu/static.py's stand-in for a GPU computes nothing
# ms per step of each stage on 8xH100: what to expect, estimated part by part; what the public record logged
EXPECTED = {
    "speedrun": [(34.3, 33.6), (60.3, 60.1), (89.5, 88.1)],
    "golf": [(43.0, 71.5)],
    "gpt2": [(660.0, 706.0)],
}
# A size for a CPU; a trainer ignores those that its preset lacks
TOY = dict(
    DEVICE="cpu",
    DTYPE="float32",
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
        self.compile_seconds = 0.0
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

    @contextmanager
    def compiling(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.compile_seconds += time.perf_counter() - began

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
    bench: ModuleType
    report: Report
    settings: dict[str, str]  # constants that differ from the preset's
    toy: bool

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function as compiled steps run it; at toy size without building anything."""
        back_end = "aot_eager" if self.toy else "inductor"
        return torch.compile(function, dynamic=False, fullgraph=True, backend=back_end)

    def slice_size(self) -> int:
        """How many rows of a score matrix are computed at once in fp32."""
        return 64 if self.toy else 512


def load_trainer(folder: Path) -> ModuleType:
    """train_gpt.py of a folder, under its own name, so that tools/dev/bench.py measures it."""
    spec = importlib.util.spec_from_file_location("train_gpt", folder / "train_gpt.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module
    spec.loader.exec_module(module)
    return module


def one_rank_of_eight(
    trainer: ModuleType, preset: str, given: dict[str, str], toy: bool
) -> dict[str, str]:
    """The settings of a preset for the batch of one rank."""
    settings = dict(PRESET=preset, SAVE_EVERY="0", ITERATIONS=str(STEPS))
    if toy:
        settings |= TOY | TOY_OF.get(preset, {})
    settings |= given
    cfg = trainer.load_config(os.environ | settings)
    share = max(cfg.train_batch_tokens // RANKS, cfg.train_seq_len)
    return settings | dict(TRAIN_BATCH_TOKENS=str(share))


# ---------- 1 environment
def driver_version() -> str:
    """The NVIDIA driver's version, "" where there is none."""
    done = subprocess.getstatusoutput("nvidia-smi --query-gpu=driver_version --format=csv,noheader -i 0")
    return done[1].strip() if done[0] == 0 else ""


def environment(report: Report, trainer: ModuleType, toy: bool) -> None:
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
    found["triton"] = trainer.triton.__version__ if trainer.triton else ""
    compilers = [name for name in ("gcc", "cc", "clang") if shutil.which(name)]
    found["compiler"] = compilers[0] if compilers else ""
    report.machine = found
    report.send(machine=found)
    report.say(
        "ok" if gpu or toy else "FAULT",
        f"{gpu or 'no GPU that torch can use'}, driver {driver or 'none'}, torch {torch.__version__}, cuDNN "
        f"{found.get('cudnn', 'none')}, Triton {found['triton'] or 'none'}",
    )
    asked = (ROOT / "requirements.txt").read_text(encoding="utf-8").split("torch==")[1].split()[0]
    if torch.__version__.split("+")[0] != asked:
        report.say("note", f"requirements.txt asks for torch {asked}, for which `static` compiled the steps")
    old = driver.split(".")[0].isdigit() and int(driver.split(".")[0]) < OLDEST_DRIVER
    if old and (torch.version.cuda or "").startswith("13"):
        report.say(
            "FAULT", f"driver {driver} is too old for a CUDA 13 build, which needs {OLDEST_DRIVER} or newer"
        )
    if not found["compiler"]:
        report.say("FAULT", "no C compiler, which torch.compile needs: install gcc")


# ---------- a preset, ready to be measured
def assemble(subject: Subject) -> Run:
    """A Run with model, optimizer and data, nothing compiled, all weights zero."""
    cfg = subject.trainer.load_config(os.environ | subject.settings)
    subject.report.doing("building the model")
    return subject.bench.assemble(cfg, subject.trainer)


def warm_up(subject: Subject, run: Run) -> bool:
    """Compiles the step, as a run does before its clock."""
    with subject.report.compiling():
        subject.trainer.warm_up(run)
    return True


def init_drawn_once(trainer: ModuleType) -> None:
    """Drawing the init takes 13 s at depth 26, and a part needs it up to four times: that of the same model
    and seed is kept."""
    real = trainer.init_parameters
    kept: dict[tuple[int, int], tuple[Model, dict[str, Tensor]]] = {}

    def init_parameters(model: Model, seed: int) -> dict[str, Tensor]:
        key = id(model), seed
        if key not in kept:
            kept.clear()
            kept[key] = model, real(model, seed)
        return kept[key][1]

    trainer.init_parameters = init_parameters


def begin_anew(subject: Subject, run: Run) -> None:
    """The init, as a run begins with it."""
    run.optimizer.begin(subject.trainer.init_parameters(run.model, run.cfg.seed))


def has_fp8(run: Run) -> bool:
    """Are some of a training step's products in fp8? golf knows none."""
    return hasattr(run.cfg, "fp8_part") and run.cfg.fp8_part(run.team.on_gpu) != "off"


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

    def kind(self) -> tuple[Sizes, Sizes, Sizes, int, bool]:
        return self.q, self.k, self.v, self.window, self.documents is None


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
    limit = run.cfg.document_limit() if hasattr(run.cfg, "document_limit") else 0
    if limit:
        place = torch.arange(stage.row_tokens, device=device)
        first = torch.where(begins, place, 0).cummax(1).values  # of the document
        begins |= (place - first) % limit == 0
    tokens[begins] = run.cfg.bos_id
    return tokens


def attention_calls(
    subject: Subject, run: Run
) -> tuple[list[tuple[Call, int]], tuple[Any, ...] | None]:
    """([(call, how many layers make it)] of a micro-step of the dearest stage, the arguments of its loss)."""
    stage = last_stage(run)
    tokens = random_tokens(run, stage)
    calls: list[Call] = []

    def note(q: Tensor, k: Tensor, v: Tensor, mask: LazyMask | None) -> None:
        T = q.size(2)
        window = T
        documents = None
        if mask is not None:
            window = int(mask.window)
            documents = mask.documents
        calls.append(Call(tuple(q.shape), tuple(k.shape), tuple(v.shape), min(window, T), documents))

    _, loss_args = subject.bench.recorded_calls(run, stage, tokens, note)
    counts = Counter([call.kind() for call in calls])
    distinct = {call.kind(): call for call in calls}
    return [(call, counts[kind]) for kind, call in distinct.items()], loss_args


# ---------- 2 numbers, against fp32
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


def exact_attention(call: Call, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, size: int) -> list[Tensor]:
    """Output and gradients of q, k and v in fp32, for `size` queries of a row at a time."""
    B, H, T, _ = q.shape
    groups = H // k.size(1)
    y = torch.zeros_like(grad, dtype=torch.float32)
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    for row in range(B):
        for low in range(0, T, size):
            high = min(T, low + size)
            first = max(0, low - call.window)
            query = torch.arange(low, high, device=q.device)[:, None]
            key = torch.arange(first, high, device=q.device)
            seen = (key <= query) & (query - key <= call.window)
            if call.documents is not None:
                own = call.documents[row % len(call.documents)]
                seen = seen & (own[low:high, None] == own[first:high])
            places = [slice(low, high), slice(first, high), slice(first, high)]
            inputs = []
            for x, place in zip((q, k, v), places):
                inputs.append(x[row, :, place].float().requires_grad_())
            keys = inputs[1].repeat_interleave(groups, 0)
            values = inputs[2].repeat_interleave(groups, 0)
            scores = (inputs[0] @ keys.mT).masked_fill(~seen, -torch.inf)
            part = scores.softmax(-1) @ values
            y[row, :, low:high] = part.detach()
            found = torch.autograd.grad(part, inputs, grad[row, :, low:high].float())
            for whole, its, place in zip(grads, found, places):
                whole[row, :, place] += its
    return [y, *grads]


def with_gradients(
    function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor | None = None
) -> list[Tensor]:
    """The value of function(*inputs) and the gradients of the inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    value = function(*inputs)
    return [value.detach(), *torch.autograd.grad(value, inputs, grad)]


def relative_errors(mine: list[Tensor], exact: list[Tensor]) -> list[float]:
    found = []
    for a, b in zip(mine, exact, strict=True):
        found.append(float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30)))
    return found


def judge(subject: Subject, what: str, errors: dict[str, float], most: float) -> None:
    """A verdict on relative errors; not a number is a fault, too."""
    worst = max(errors, key=lambda name: errors[name] if math.isfinite(errors[name]) else math.inf)
    good = all([error < most for error in errors.values()])
    figures = {name: round(error, 6) for name, error in errors.items()}
    if ON_STAND_IN:
        subject.report.say("note", f"{what}: ran; there are no numbers here")
        return
    subject.report.say(
        "ok" if good else "FAULT",
        f"{what}: off from fp32 by {errors[worst]:.2%} ({worst}), at most {most:.0%} allowed",
        most=most,
        **figures,
    )


def by_kernels(kernels: Kernels, call: Call, device: torch.device) -> Callable[..., Tensor]:
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


@contextmanager
def without_stderr() -> Iterator[None]:
    """torch's profiler writes lines of its own there, from C++."""
    before = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def what_ran(run: Run, function: Callable[[], object]) -> str:
    """The kernels of attention that a call launches, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if run.team.on_gpu:
        activities.append(ProfilerActivity.CUDA)
    with without_stderr(), profile(activities=activities) as found:
        function()
        run.team.wait()
    names = [event.key.removeprefix("aten::") for event in found.key_averages()]
    words = ("_scaled_dot_product", "flex_attention", "fmha", "flash_fwd", "cudnn")
    seen = [name for name in names if any([word in name for word in words]) and "backward" not in name]
    return seen[-1][:60] if seen else "plain products"


def attention_numbers(subject: Subject, run: Run, call: Call) -> None:
    """Attention as the step computes it, forward and backward, and which kernel that was."""
    *inputs, grad = attention_inputs(run, call)
    exact = exact_attention(call, *inputs, grad, subject.slice_size())
    fast = subject.compiled(by_kernels(run.model.kernels, call, run.team.device))
    with subject.report.compiling():
        mine = with_gradients(fast, inputs, grad)
    errors = dict(zip(("output", "grad q", "grad k", "grad v"), relative_errors(mine, exact)))
    by = what_ran(run, lambda: with_gradients(fast, inputs, grad))
    judge(subject, f"{call.name()}, by {by}", errors, MOST_ERROR)


def exact_loss(
    subject: Subject,
    x: Tensor,
    head: Tensor,
    targets: Tensor,
    cap: tuple[float, float, float],
    weights: Tensor | None,
) -> list[Tensor]:
    """The loss in fp32 and the gradients of x (1, N, C) and head (V, C), for some rows at a time."""
    N = x.size(1)
    size = 4 * subject.slice_size()
    total = torch.zeros((), device=x.device)
    grad_x = torch.zeros_like(x, dtype=torch.float32)
    grad_head = torch.zeros_like(head, dtype=torch.float32)
    for low in range(0, N, size):
        part = x[:, low : low + size].float()
        share = part.size(1) / N
        loss = partial(
            subject.trainer.lm_loss, targets=targets[:, low : low + size], cap=cap, weights=weights
        )
        value, its_x, its_head = with_gradients(loss, [part, head.float()])
        total += share * value
        grad_x[:, low : low + size] = share * its_x
        grad_head += share * its_head
    return [total, grad_x, grad_head]


def loss_inputs(run: Run, loss_args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """x (1, N, C) of norm 1, a head (V, C) and targets (1, N, ...) of a micro-step."""
    x, head, targets, *_ = loss_args
    draw = torch.Generator(x.device).manual_seed(2)
    x = torch.randn((1, x[..., 0].numel(), x.size(-1)), device=x.device, generator=draw)
    x = F.rms_norm(x, (x.size(-1),)).to(run.team.dtype)
    head = 0.05 * torch.randn(head.shape, device=x.device, generator=draw)
    return x, head, targets.flatten(0, 1)[None]


def loss_numbers(subject: Subject, run: Run, loss_args: tuple[Any, ...]) -> None:
    """lm_head and loss as the step computes them; the last rows are those beyond 2^31 logits."""
    x, head, targets = loss_inputs(run, loss_args)
    cap, product, *more = loss_args[3:]
    weights = more[0] if more else None

    def loss(x: Tensor, head: Tensor) -> Tensor:
        return run.model.kernels.loss(x, head, targets, cap, product, *more)

    exact = exact_loss(subject, x, head, targets, cap, weights)
    with subject.report.compiling():
        mine = with_gradients(subject.compiled(loss), [x, head])
    errors = dict(zip(("loss", "grad x", "grad head"), relative_errors(mine, exact)))
    tail = [mine[1][:, -64:]], [exact[1][:, -64:]]
    errors["grad x, last rows"] = relative_errors(*tail)[0]
    most = MOST_ERROR_FP8 if has_fp8(run) else MOST_ERROR
    judge(subject, f"loss of {x.size(1):,} x {len(head):,} logits", errors, most)


def fp8_numbers(subject: Subject, run: Run, loss_args: tuple[Any, ...]) -> None:
    """scaled_mm in its three layouts, at the size of lm_head."""
    trainer = subject.trainer
    x, head, _ = loss_inputs(run, loss_args)
    x = x[0]
    rows = x[: len(x) // 16 * 16]
    draw = torch.Generator(x.device).manual_seed(3)
    grad = torch.randn((len(rows), len(head)), device=x.device, generator=draw, dtype=torch.float32)
    grad = grad.to(run.team.dtype)
    y, kept = trainer.fp8_product(rows, head, (None, None))
    grad_x, grad_head = trainer.fp8_gradients(grad, kept, None)
    errors = {"output": 0.0, "grad x": 0.0}
    size = 4 * subject.slice_size()
    exact_head = torch.zeros_like(head)
    ends = [0, max(0, len(rows) - size)]  # the first and the last rows
    for low in range(0, len(rows), size):
        exact_head += grad[low : low + size].float().T @ rows[low : low + size].float()
        if low in ends or low + size >= len(rows):
            part = slice(low, low + size)
            wanted = [rows[part].float() @ head.T, grad[part].float() @ head]
            for name, error in zip(errors, relative_errors([y[part], grad_x[part]], wanted)):
                errors[name] = max(errors[name], error)
    errors["grad weight"] = relative_errors([grad_head], [exact_head])[0]
    judge(subject, f"fp8 products {len(rows):,} x {x.size(1)} x {len(head):,}", errors, MOST_ERROR_FP8)


def train_steps(subject: Subject, run: Run, loss_fn: Callable[..., Tensor], steps: int) -> list[float]:
    """Losses of the first steps, from the init, on the first rows of the data."""
    begin_anew(subject, run)
    run.loader.position = 0
    cfg = run.cfg
    stage = cfg.stages()[0]
    context = run.model.context(stage.row_tokens, run.team.device, run.team.dtype, stage)
    losses = []
    for step in range(steps):
        batch = run.loader.next(stage.batch_tokens, stage.row_tokens // cfg.train_seq_len, stage.doc_len)
        batch = (*batch, *run.model.candidates(*batch))
        run.model.update_context(context, step / STEPS)
        schedule = cfg.schedule(step, step / STEPS)
        micro = run.micro * cfg.train_seq_len // stage.row_tokens
        loss = subject.trainer.train_step(
            loss_fn, run.optimizer, batch, micro, context, stage.loss_factor, schedule
        )
        losses.append(loss)
    return [float(loss) for loss in losses]


def first_losses(subject: Subject, run: Run) -> None:
    """The loss at step 0, and the compiled run beside an eager one. Needs the compiled step."""
    report = subject.report
    report.doing(f"{LOSSES} compiled steps")
    compiled = train_steps(subject, run, run.loss_fn, LOSSES)
    report.doing(f"{LOSSES} eager steps")
    kernels = run.model.kernels
    run.model.use(type(run.model.kernels)())
    eager = train_steps(subject, run, run.model, LOSSES)
    run.model.use(kernels)
    if ON_STAND_IN:
        report.say("note", f"{LOSSES} compiled and eager steps: ran; there are no numbers here")
        return
    begin_anew(subject, run)
    wanted = eager[0]
    words = "that of the eager step"
    tokens = torch.zeros((1, run.cfg.train_seq_len), dtype=torch.long, device=run.team.device)
    if not run.model.head.any() and not run.model.candidates(tokens, tokens):  # with these it knows more
        wanted = math.log(run.cfg.vocab_size)
        words = f"log {run.cfg.vocab_size:,}, on any text"
    good = abs(compiled[0] - wanted) < 0.005
    report.say(
        "ok" if good else "FAULT",
        f"loss at step 0: {compiled[0]:.4f}; expected {wanted:.4f}, {words}",
        loss=compiled[0],
        wanted=wanted,
    )
    differences = [abs(a - b) for a, b in zip(compiled, eager)]
    mean = statistics.mean(differences)
    fp8 = has_fp8(run)
    most = MOST_MEAN_DIFFERENCE_FP8 if fp8 else MOST_MEAN_DIFFERENCE
    good = math.isfinite(mean) and mean < most
    against = "fp8 against eager bf16" if fp8 else "compiled against eager"
    report.say(
        "ok" if good else "FAULT",
        f"{LOSSES} losses, {against}: {mean:.4f} apart on average, {max(differences):.4f} at most, {most} "
        f"allowed on average; the last ones {compiled[-1]:.4f} and {eager[-1]:.4f}",
        compiled=compiled,
        eager=eager,
    )


# ---------- 3 alternatives, timed
class Option(NamedTuple):
    """A way to compute the same thing. change: what to set to get it; "": it is in use."""

    name: str
    change: str
    function: Callable[..., Tensor]


def attention_options(subject: Subject, run: Run, call: Call) -> list[Option]:
    """Ways to compute one call of attention on this machine."""
    trainer = subject.trainer
    T = call.q[2]
    documents = call.documents
    masked = documents is not None or call.window < T - 1
    device = run.team.device
    found = [Option("as it is", "", by_kernels(run.model.kernels, call, device))]

    def explicit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = None
        if masked:
            mask = trainer.window_mask(call.window, T, documents, device)
        return trainer.attention(q, k, v, mask)

    if masked or not run.team.on_gpu:
        found.append(Option("torch's", "leave window_attention() out of the recipe's kernels()", explicit))
    if not masked:
        for backend in (
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
        ):
            name = backend.name.split("_")[0].lower()
            if run.team.on_gpu:
                found.append(
                    Option(
                        name,
                        f"sdpa_kernel(SDPBackend.{backend.name}) around attention()",
                        partial(by_backend, trainer, backend),
                    )
                )
    if masked and run.team.on_gpu:
        window = trainer.gpu_window(call.window, T, device, documents is not None)
        if torch.cuda.get_device_capability() >= (9, 0):
            options = dict(USE_TMA=True)
            attend = partial(by_flex, trainer, options, window, documents)
            found.append(Option("flex with TMA", f"FLEX_OPTIONS = {options}", attend))
    return found


def by_flex(
    trainer: ModuleType,
    options: dict[str, Any],
    window: int | Tensor,
    documents: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """flex attention with options of its kernels."""
    mask = trainer.gpu_window_mask(window, q.size(2), documents, q.device)
    return trainer.flex_attention(
        q, k, v, block_mask=mask, scale=1.0, enable_gqa=k.size(1) < q.size(1), kernel_options=options
    )


def by_backend(trainer: ModuleType, backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel([backend]):
        return trainer.attention(q, k, v, None)


def milliseconds(subject: Subject, run: Run, function: Callable[..., Tensor], inputs: list[Tensor]) -> float:
    """The median of one call, forward and backward. The first call compiles; a toy stays eager."""
    fast = function if subject.toy else subject.compiled(function)
    inputs = [x.detach().requires_grad_() for x in inputs]
    with subject.report.compiling():
        value = fast(*inputs)
    grad = torch.ones_like(value)

    def both() -> None:
        torch.autograd.grad(fast(*inputs), inputs, grad)

    with subject.report.compiling():
        both()
        run.team.wait()
    return 1e3 * subject.bench.median_seconds(run.team, both, 10 if subject.toy else 20)


def compare(
    subject: Subject, run: Run, what: str, options: list[Option], inputs: list[Tensor], times: int
) -> None:
    """Times the options, of which the first is in use, and says which constant to set. times: per step."""
    found: dict[str, float] = {}
    failed: dict[str, str] = {}
    for option in options:
        try:
            found[option.name] = milliseconds(subject, run, option.function, inputs)
        except Exception as error:  # such as a backend that does not take these shapes
            failed[option.name] = first_line(error)[:100]
            torch._dynamo.reset()
    listed = ", ".join([f"{name} {ms:.3f}" for name, ms in found.items()])
    if failed:
        listed += f"; not here: {', '.join(failed)}"
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
        subject.report.say(
            "set",
            f"{what}, ms: {listed}; {winner} gains {gain:.1f} ms a step: {change}",
            winner=winner,
            gain_ms=gain,
            change=change,
            **figures,
        )
    else:
        subject.report.say(
            "ok", f"{what}, ms: {listed}; x{times} a step, what is in use stays", winner=in_use, **figures
        )


def products(subject: Subject, run: Run, calls: list[tuple[Call, int]], micro_steps: int) -> None:
    """Queries, keys and values: three products or one."""
    call, _ = calls[0]
    layers = sum([count for _, count in calls])
    tokens = call.q[0] * call.q[2]
    width = run.cfg.model_dim
    draw = torch.Generator(run.team.device).manual_seed(4)
    sides = [shape[1] * shape[3] for shape in (call.q, call.k, call.v)]
    if call.q[2] > last_stage(run).row_tokens:  # paired heads: half as many, twice as long
        tokens //= 2
        sides = [2 * side for side in sides]
    h = torch.randn((tokens, width), device=run.team.device, generator=draw).to(run.team.dtype)
    matrices = []
    for side in sides:
        matrix = torch.randn((side, width), device=run.team.device, generator=draw)
        matrices.append(matrix.to(run.team.dtype))

    def three(h: Tensor, *matrices: Tensor) -> Tensor:
        return torch.cat([F.linear(h, matrix) for matrix in matrices], -1)

    def one(h: Tensor, *matrices: Tensor) -> Tensor:
        return F.linear(h, torch.cat(matrices))

    options = [
        Option("three", "let project_heads() take one matrix at a time", three),
        Option("one", "let project_heads() join the matrices in this dtype, too", one),
    ]
    if run.team.dtype == torch.bfloat16 and run.model.kernels.linear is subject.trainer.linear:
        options.reverse()  # one is in use
    compare(subject, run, f"q, k and v of {tokens:,} tokens", options, [h, *matrices], layers * micro_steps)


def alternatives(
    subject: Subject, run: Run, calls: list[tuple[Call, int]], loss_args: tuple[Any, ...] | None
) -> None:
    """Attention, the products before it, and the loss, each in the ways that this machine has."""
    stage = last_stage(run)
    report = subject.report
    rows = len(random_tokens(run, stage))
    micro_steps = max(1, stage.batch_tokens // stage.row_tokens // rows)
    for call, layers in calls:
        *inputs, _ = attention_inputs(run, call)
        options = attention_options(subject, run, call)
        report.attempt(call.name(), compare, subject, run, call.name(), options, inputs, layers * micro_steps)
    if calls:
        report.attempt("q, k and v", products, subject, run, calls, micro_steps)
    if loss_args is None:
        report.say("note", "the loss is the model's own: there is no other way to compute it")
        return
    x, head, targets = loss_inputs(run, loss_args)
    cap, product, *more = loss_args[3:]

    def loss(x: Tensor, head: Tensor, function: Callable[..., Tensor]) -> Tensor:
        return function(x, head, targets, cap, product, *more)

    trainer = subject.trainer
    in_use = run.model.kernels.loss
    options = [Option("as it is", "", partial(loss, function=in_use))]
    if not (run.team.on_gpu and trainer.triton and getattr(run.cfg, "triton_kernels", True)):
        change = "loss=lm_loss in fast_loss()"
        options.append(Option("readable", change, partial(loss, function=trainer.lm_loss)))
    else:
        name = "Inductor's"
        change = "a larger LEAST_KERNEL_VOCABULARY in train_gpt.py"
        row_losses = trainer.row_losses
        if not getattr(in_use, "keywords", {}).get("row_losses"):
            name = "by our kernel"
            change = "a smaller LEAST_KERNEL_VOCABULARY, and kernel_losses in the recipe's kernels()"
            row_losses = trainer.kernel_losses
        other = partial(in_use, row_losses=row_losses)
        options.append(Option(name, change, partial(loss, function=other)))
    report.attempt(
        "loss", compare, subject, run, f"loss of {x.size(1):,} tokens", options, [x, head], micro_steps
    )


# ---------- 4 ranks: what is done for the first time on the clock
def watch_clock(trainer: ModuleType) -> dict[str, Any]:
    """Notes which collectives run for the first time while the clock runs, and how often the garbage
    collector does. Returns where the notes are."""
    notes: dict[str, Any] = dict(late=[], collections=0, collectives=0)
    known = set()
    state = dict(running=False)

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """The collective, which is noted by its name, size, device and group."""

        def call(first: Tensor, *args: Any, **kwargs: Any) -> Any:
            group = "training" if kwargs.get("group") is not None else "default"
            size = first.numel() if name != "all_reduce" else ""
            kind = f"{name} {size} on {first.device.type}, {group} group".replace("  ", " ")
            if state["running"]:
                notes["collectives"] += 1
                if kind not in known:
                    notes["late"].append(kind)
            known.add(kind)
            return real(first, *args, **kwargs)

        return call

    def running(real: Callable[..., Any], during: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = state["running"]
            state["running"] = during
            try:
                return real(*args, **kwargs)
            finally:
                state["running"] = before

        return call

    def collecting(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and state["running"]:
            notes["collections"] += 1

    trainer.reduce_scatter = noting("reduce_scatter", trainer.reduce_scatter)
    trainer.all_gather = noting("all_gather", trainer.all_gather)
    dist.all_reduce = noting("all_reduce", dist.all_reduce)
    trainer.train = running(trainer.train, True)
    for name in ("validate", "save_checkpoint", "save_weights"):
        setattr(trainer, name, running(getattr(trainer, name), False))
    gc.collect = running(gc.collect, False)  # the trainer's own calls are off the clock
    gc.callbacks.append(collecting)
    return notes


def run_as_rank(folder: Path, trainer: ModuleType) -> int:
    """A toy run of one of two ranks on the CPU, watched. Rank 0 writes what it noted."""
    notes = watch_clock(trainer)
    os.chdir(folder)
    settings = json.loads((folder / "settings.json").read_text())
    code = trainer.main([], os.environ | settings)
    if os.environ["RANK"] == "0":
        (folder / "notes.json").write_text(json.dumps(notes))
    return code


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def toy_of_two_ranks(trainer: ModuleType, bench: ModuleType, folder: Path) -> dict[str, str]:
    """Settings of a run of 12 steps, and its data."""
    settings = one_rank_of_eight(trainer, "speedrun", {}, toy=True)
    settings |= dict(
        ITERATIONS="12",
        COMPILE="0",
        RUN_ID="ranks",
        TRAIN_BATCH_TOKENS="1024",
        VAL_LOSS_EVERY="5",
        TRAIN_LOG_EVERY="4",
        FP8="off",
        GRAD_CLIP_NORM="1",
        MAX_EPOCHS="0",
    )
    return settings | bench.random_data(folder, trainer.load_config(settings), 1 << 16)


def ranks(report: Report, trainer: ModuleType, bench: ModuleType, source: Path, folder: Path) -> None:
    """Two ranks train a toy on the CPU: every collective of a step must have run before the clock, since NCCL
    makes a communicator at its first one, which takes 0.5 to 2.5 s; the garbage collector must be off."""
    settings = toy_of_two_ranks(trainer, bench, folder)
    (folder / "settings.json").write_text(json.dumps(settings))
    report.doing("two ranks train on the CPU")
    meeting = dict(
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
    )
    words: list[str | Path] = [sys.executable, __file__, "--rank-of", folder, source]
    processes = []
    for rank in range(2):
        env = os.environ | meeting | dict(RANK=str(rank), LOCAL_RANK=str(rank))
        processes.append(start_process(words, folder, env, folder / f"rank{rank}.txt"))
    codes = [process.wait() for process in processes]
    for process in processes:
        stop_process(process)
    notes_file = folder / "notes.json"
    if any(codes) or not notes_file.exists():
        failed = 1 if codes[1] and not codes[0] else 0
        report.say(
            "FAULT",
            f"two ranks on the CPU: exit codes {codes[0]} and {codes[1]}",
            last_lines=last_lines(folder / f"rank{failed}.txt"),
        )
        return
    notes = json.loads(notes_file.read_text())
    late = notes["late"]
    if late:
        more = f" and {len(late) - 3} more" if len(late) > 3 else ""
        report.say(
            "FAULT",
            "first used on the clock, where NCCL would connect for 0.5 to 2.5 s: "
            f"{'; '.join(late[:3])}{more}",
            late=late,
        )
    else:
        report.say(
            "ok",
            f"two ranks on the CPU: all {notes['collectives']} collectives on the clock had run before it",
        )
    if notes["collections"]:
        report.say(
            "FAULT", f"Python's garbage collector ran {notes['collections']} times on the clock", **notes
        )
    else:
        report.say("ok", "Python's garbage collector did not run on the clock")


# ---------- 5 the loop
class Marks:
    """When each step began, on the device's clock where there is a GPU, and its stage: (tokens, tokens of a
    row)."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.moments: list[Any] = []
        self.stages: list[tuple[int, int]] = []

    def mark(self, stage: tuple[int, int]) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.moments.append(event)
        else:
            self.moments.append(time.perf_counter())
        self.stages.append(stage)

    def steps(self) -> list[tuple[tuple[int, int], float]]:
        """[(stage, ms)]; the last step has no end."""
        found = []
        for before, after, stage in zip(self.moments, self.moments[1:], self.stages):
            ms = before.elapsed_time(after) if self.on_gpu else 1e3 * (after - before)
            found.append((stage, ms))
        return found


def device_allocations(team: Team) -> int:
    """How often memory was asked of the driver; each time the device waits."""
    return torch.cuda.memory_stats().get("num_device_alloc", 0) if team.on_gpu else 0


def run_loop(subject: Subject, run: Run) -> tuple[list[tuple[tuple[int, int], float]], int]:
    """The trainer's own loop -> ([(stage, ms)] of its steps, allocations in it)."""
    trainer = subject.trainer
    marks = Marks(run.team.on_gpu)
    real = trainer.train_step

    def step(
        loss_fn: Callable[..., Tensor], optimizer: Optimizer, batch: tuple[Tensor, ...], *args: Any
    ) -> Tensor:
        marks.mark((batch[0].numel(), batch[0].size(1)))
        return real(loss_fn, optimizer, batch, *args)

    begin_anew(subject, run)
    before = device_allocations(run.team)
    with mock.patch.object(trainer, "train_step", step):
        subject.bench.train_again(run)
    run.team.wait()
    return marks.steps(), device_allocations(run.team) - before


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
    """200 real steps: p50 and p99 of each stage beside what to expect, pauses, allocations, the host."""
    report = subject.report
    steps, allocations = run_loop(subject, run)
    typical = {}
    rows = []
    for stage in dict.fromkeys([stage for stage, _ in steps]):
        times = sorted([ms for its, ms in steps if its == stage])
        typical[stage] = times[len(times) // 2]
        rows.append(
            dict(
                tokens=stage[0],
                row_tokens=stage[1],
                steps=len(times),
                p50=typical[stage],
                p99=times[int(len(times) * 0.99)],
            )
        )
    schedule = subject.trainer.Schedule(0.0, 0.9)
    optimizer_ms = 1e3 * subject.bench.median_seconds(run.team, lambda: run.optimizer.step(schedule), 10)
    for row in rows:
        text = f"{row['tokens']:,} tokens a step: p50 {row['p50']:.1f} ms, p99 {row['p99']:.1f}"
        report.say("note", text, optimizer_ms=optimizer_ms, **row)
    pauses = pauses_in(steps, typical, subject.toy)
    longest = sorted(pauses, key=lambda pause: -pause[1])[:3]
    listed = ", ".join([f"{ms / 1e3:.2f} s in step {number + 1}" for number, ms in longest])
    report.say(
        "SLOW" if pauses else "ok",
        f"pauses on the clock: {len(pauses)}" + (f": {listed}" if pauses else ""),
        pauses=pauses,
    )
    if run.team.on_gpu:
        report.say(
            "SLOW" if allocations else "ok", f"memory asked of the driver {allocations} times in the loop"
        )
        peak = torch.cuda.max_memory_allocated() / 2**30
        report.say(
            "note",
            f"peak {peak:.1f} GiB on one GPU, whose optimizer holds all moments; micro_batch {run.micro}",
        )
    report.attempt("host", host_time, subject, run)
    report.attempt("kernels", kernels, subject, run)
    report.attempt("a rank of eight", rank_of_eight, subject, run)


class Done:
    """A collective that is over."""

    def wait(self) -> None:
        pass


@contextmanager
def alone_of_eight(trainer: ModuleType) -> Iterator[None]:
    """Meanwhile the collectives of rank 0 of eight, which is alone, copy its own share."""

    def reduce_scatter(mine: Tensor, whole: Tensor, **_: Any) -> Done:
        mine.copy_(whole.view(RANKS, -1)[0])
        return Done()

    def all_gather(whole: Tensor, mine: Tensor, **_: Any) -> Done:
        whole.view(RANKS, -1)[0].copy_(mine)
        return Done()

    with mock.patch.multiple(trainer, reduce_scatter=reduce_scatter, all_gather=all_gather):
        yield


def own_an_eighth(subject: Subject, run: Run) -> None:
    """From now on run.optimizer is that of rank 0 of eight, with the rules of the one that it replaces."""
    old = run.optimizer
    dtype = old.banks[0].data.dtype
    run.optimizer = run.cfg.optimizer()(
        run.model, run.cfg, 0, RANKS, dtype=dtype, muon_dtype=old.muon_dtype
    )
    run.optimizer.adam_step = old.adam_step
    run.optimizer.muon_step = old.muon_step


def rank_of_eight(subject: Subject, run: Run) -> None:
    """The step of each stage with an eighth of the optimizer, beside what to expect. Nothing can be measured
    afterwards with the whole optimizer."""
    report = subject.report
    trainer = subject.trainer
    expected = [] if subject.toy else EXPECTED.get(report.preset, [])
    stages = {}
    for stage in subject.bench.distinct_stages(run.cfg):
        stages.setdefault((stage.batch_tokens, stage.row_tokens), stage)
    own_an_eighth(subject, run)
    gc.collect()  # the whole optimizer
    limit = torch._dynamo.config.patch(recompile_limit=64)  # its rules see further shapes
    with alone_of_eight(trainer), limit:
        for place, stage in enumerate(stages.values()):
            multiple = stage.row_tokens // run.cfg.train_seq_len
            batch = run.loader.next(stage.batch_tokens, multiple, stage.doc_len)
            step = subject.bench.step_function(trainer, run, stage)

            def two_steps() -> None:  # as Adam may take every other one
                step(batch)
                step(batch)

            with report.compiling():
                two_steps()
                run.team.wait()
            ms = 1e3 * subject.bench.median_seconds(run.team, two_steps, 2 if subject.toy else 10) / 2
            text = f"{stage.batch_tokens:,} tokens a step with an eighth of the optimizer: {ms:.1f} ms, "
            text += "collectives as copies"
            verdict = "note"
            if place < len(expected):
                estimate, record = expected[place]
                text += f"; on 8xH100 {estimate} expected, the record's {record}"
                if "H100" in report.machine.get("gpu", ""):
                    verdict = "ok" if ms < 1.1 * max(estimate, record) else "SLOW"
            report.say(verdict, text, tokens=stage.batch_tokens, with_an_eighth=ms)


def host_time(subject: Subject, run: Run) -> None:
    """How long Python needs to launch a step when the device has nothing to do."""
    stage = run.cfg.stages()[0]
    batch = run.loader.next(stage.batch_tokens, stage.row_tokens // run.cfg.train_seq_len, stage.doc_len)
    step = subject.bench.step_function(subject.trainer, run, stage)
    times = []
    whole = []
    for _ in range(12):
        run.team.wait()
        began = time.perf_counter()
        step(batch)
        times.append(1e3 * (time.perf_counter() - began))
        run.team.wait()
        whole.append(1e3 * (time.perf_counter() - began))
    host = statistics.median(times[2:])
    step_ms = statistics.median(whole[2:])
    verdict = "note"
    if run.team.on_gpu:
        verdict = "SLOW" if host > 0.8 * step_ms else "ok"
    subject.report.say(
        verdict, f"host: {host:.1f} ms to launch a step of {step_ms:.1f} ms", host_ms=host, step_ms=step_ms
    )


def kernels(subject: Subject, run: Run) -> None:
    """The 15 kernels that take longest, with the rate of memory traffic that `static` counts for them."""
    from torch.profiler import ProfilerActivity, profile

    from tools.gpu import static as static_gpu

    stage = last_stage(run)
    batch = run.loader.next(stage.batch_tokens, stage.row_tokens // run.cfg.train_seq_len, stage.doc_len)
    step = subject.bench.step_function(subject.trainer, run, stage)
    moved: Counter[str] = Counter()

    def note(_: str, name: str, size: int) -> None:
        moved[name] += size

    step(batch)
    run.team.wait()
    steps = 4  # even, as Adam may take every other step
    activity = ProfilerActivity.CPU
    counted: AbstractContextManager[None] = nullcontext()
    if run.team.on_gpu:
        activity = ProfilerActivity.CUDA
        counted = static_gpu.count_bytes(torch, note, batch[0].numel() * run.cfg.model_dim * 4)
    with counted, without_stderr(), profile(activities=[activity]) as found:
        for _ in range(steps):
            step(batch)
        run.team.wait()
    rows = []
    for event in found.key_averages():
        us = event.self_device_time_total if run.team.on_gpu else event.self_cpu_time_total
        if not us:  # a call of the driver
            continue
        row = dict(name=event.key, ms=us / 1e3 / steps, launches=event.count / steps)
        if event.key in moved:
            row["GBps"] = moved[event.key] / 1e3 / us
        rows.append(row)
    rows.sort(key=lambda row: -row["ms"])
    whole = sum([row["ms"] for row in rows])
    top = rows[:15]
    names = ", ".join([f"{row['name'][:36]} {row['ms']:.2f}" for row in top[:3]])
    subject.report.say(
        "note",
        f"{len(rows)} kernels, {whole:.1f} ms a step; the longest: {names} (15 in the file)",
        kernels=top,
        kernel_ms=whole,
    )


# ---------- operators outside of Inductor's kernels
class Recorder(TorchDispatchMode):
    """Counts the operators that are called on a kind of device, with dtypes and layouts. Compiled code stays
    as it is: what Inductor generates calls no operator, what it does not generate comes by here."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.counts: Counter[tuple[str, tuple[str, ...], tuple[str, ...]]] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, function: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        value = function(*args, **kwargs)
        name = str(function)
        if seen_on_gpu.launches(name):
            leaves = torch.utils._pytree.tree_leaves((args, kwargs, value))
            if any([isinstance(leaf, Tensor) and leaf.device.type == self.device for leaf in leaves]):
                self.counts[seen_on_gpu.canonical(name), *seen_on_gpu.describe(args, kwargs)] += 1
        return value

    def rows(self, how: str) -> list[dict[str, Any]]:
        found = []
        for (operator, dtypes, layouts), count in sorted(self.counts.items()):
            found.append(dict(operator=operator, dtypes=dtypes, layouts=layouts, count=count, how=how))
        return found


def operators(subject: Subject, run: Run) -> None:
    """Which operators reach the device outside of Inductor's kernels, in a compiled step, an eager one, and a
    score. What raises, as a card without such a kernel would, is a verdict of attempt()."""
    if ON_STAND_IN:
        return
    found = []
    device = run.team.device.type
    kernels = run.model.kernels
    train_steps(subject, run, run.loss_fn, 1)
    with Recorder(device) as compiled:
        train_steps(subject, run, run.loss_fn, 2)  # Adam may take every other step
        run.team.wait()
    found += compiled.rows("compiled step")
    subject.report.send(operators=found)
    run.model.use(type(run.model.kernels)())
    with Recorder(device) as eager:
        train_steps(subject, run, run.model, 2)
        run.team.wait()
    run.model.use(kernels)
    found += eager.rows("eager step")
    subject.report.send(operators=found)
    score = partial(subject.trainer.evaluate, run.model, run.cfg, run.data, run.team)
    score()  # compiles
    with Recorder(device) as scoring:
        score()
        run.team.wait()
    found += scoring.rows("score")
    subject.report.send(operators=found)
    kinds = {(row["operator"], row["dtypes"]) for row in found}
    unseen = sorted([kind for kind in kinds if not seen_on_gpu.seen(*kind)])
    words = "" if subject.toy else f", {len(unseen)} of them not yet in tools/gpu/seen_on_gpu.tsv"
    subject.report.say("note", f"{len(kinds)} kinds of operators outside of generated kernels{words}")


# ---------- a part
def measure(subject: Subject, part: str) -> None:
    """One part of one preset."""
    report = subject.report
    run = report.attempt("setting up", assemble, subject)
    if run is None:
        return
    if part in ("losses", "loop"):
        torch._dynamo.reset()
        ready = report.attempt("compiling the step", warm_up, subject, run)
        report.send(compile_seconds=round(report.compile_seconds, 1))
        if not ready:
            return
        if part == "losses":
            report.attempt("losses", first_losses, subject, run)
            report.attempt("operators", operators, subject, run)
        else:
            report.attempt("loop", loop, subject, run)
        return
    found = report.attempt("shapes", attention_calls, subject, run)
    if found is None:
        return
    calls, loss_args = found
    if part == "alternatives":
        report.attempt("alternatives", alternatives, subject, run, calls, loss_args)
        return
    for call, _ in calls:
        report.attempt(call.name(), attention_numbers, subject, run, call)
    if loss_args is None:
        report.say("note", "the loss is the model's own, and is not compared with fp32")
        return
    report.attempt("loss", loss_numbers, subject, run, loss_args)
    if has_fp8(run):
        report.attempt("fp8 products", fp8_numbers, subject, run, loss_args)


def main(path: str) -> int:
    """Does what the spec asks for."""
    spec = json.loads(Path(path).read_text(encoding="utf-8"))
    part = spec["part"]
    toy = spec["toy"]
    report = Report(Path(spec["events"]), part, spec["preset"], spec["machine"])
    report.doing("importing torch's compiler")
    source = Path(spec["trainer"])
    trainer = load_trainer(source)
    from tools.dev import bench

    init_drawn_once(trainer)
    if ON_STAND_IN:
        from tools.gpu import static as static_gpu

        kept = static_gpu.replace_attention(torch, lambda *_: None)  # noqa: F841  held until the end
    torch._dynamo.config.recompile_limit = 64  # kinds of attention times options; beyond it runs uncompiled
    if toy:
        torch.set_num_threads(1)  # more gain nothing at this size
    if part == "environment":
        report.attempt(part, environment, report, trainer, toy)
    elif part == "ranks":
        report.attempt(part, ranks, report, trainer, bench, source, Path(spec["folder"]))
    else:
        measure(Subject(trainer, bench, report, spec["settings"], toy), part)
    peak = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
    report.send(compile_seconds=round(report.compile_seconds, 1), peak_GiB=round(peak, 1))
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--rank-of":
        sys.exit(run_as_rank(Path(sys.argv[2]), load_trainer(Path(sys.argv[3]))))
    sys.exit(main(sys.argv[1]))
