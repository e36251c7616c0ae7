"""A toy run of a preset on a GPU that is emulated: do its kernels compute what the eager step computes, and
does the whole of main() work on CUDA's code?

    ./run.sh static --run [PRESET ...] [NAME=value ...]

1. Steps of the first and the last stage: the loss and the gradients of each kind of parameter, compiled, in
   bf16 and by the kernels of an H100, on several rows with documents. They must be as near to fp32 as the
   eager step in bf16 is. Then the same in fp8, where the recipe has it, of the loss and of matrices.
2. Scores: the same rows, compiled and eager.
3. A run by main(): warmup, steps of all stages, validation, checkpoints, artifact, its score as read back,
   sliding rows, CORE; then resumed from its first checkpoint, which must give the same losses, and
   EVAL_FROM its artifact, which must give the same score; then the same run in fp32 on the CPU.

static.py starts it, once per preset, in a process with the stand-in's library.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tools.gpu import emulate_gpu
from tools.gpu import interpret_kernels
from tools.gpu import training

if TYPE_CHECKING:  # --trainer names the folder of the one that runs
    from train_gpt import Config, Model, Stage

ROOT = Path(__file__).resolve().parents[2]
Say = Callable[[str], None]
ROWS = 3  # of a step that is compared; more than one, as some faults need
LOSS_SLACK = 0.004  # of a loss, beyond what eager bf16 is off
SLACK = 0.02  # of a gradient's norm
FP8_SLACK = 0.25  # a product in e5m2 is off by 6 %, and gradients pass several
FP8_NUMBERS = 1024
SMALL = 64  # numbers of a kind of parameter; their gradients are long sums in bf16
SMALL_SLACK = 0.05
FILE_SLACK = 1e-3  # nats: in the run small parameters are bf16, in the file fp32
RUN_SLACK = 0.05  # of a loss, between runs in bf16 and in fp32 of a few steps, whose LRs are high

# What all presets take; the trainer ignores what one lacks. The vocabulary is no power of two, as kernels
# have masks there
COMMON = dict(
    DATA_PATH="data/datasets/toy", DATA_FINGERPRINT="", TOKENIZER_PATH="data/tokenizers/toy.model",
    VOCAB_SIZE="528", TRAIN_SEQ_LEN="256", TRAIN_BATCH_TOKENS="512", MODEL_DIM="64", NUM_HEADS="2",
    SEQ_SCHEDULE="1", MAX_EPOCHS="0", MAX_WALLCLOCK_SECONDS="0", ITERATIONS="4", WARMUP_STEPS="1",
    TRAIN_LOG_EVERY="1", VAL_LOSS_EVERY="2", VAL_TOKENS="700", VAL_BATCH_SIZE="512", EVAL_CONTEXT="256",
    SAVE_EVERY="2", ARTIFACT_BYTES_LIMIT="0", SEED="1",
)  # fmt: skip
PLUS = dict(
    TRAIN_SEQ_LEN="128", TRAIN_BATCH_TOKENS="256", WINDOW_BLOCK="32", MAX_DOC_LEN="128", EVAL_WINDOW="64",
    WINDOW_SCHEDULE="32,64,64,96", EXTENSION_ITERATIONS="0",
)  # fmt: skip
TOYS = dict(
    tiny=dict(BIGRAM_ROWS="512", COUNT_BITS="12", WINDOW_SCHEDULE="64", NUM_LAYERS="2"),
    golf=dict(NUM_LAYERS="3", NUM_KV_HEADS="1", WARMDOWN_ITERS="2", EVAL_SLIDING="128"),
    golf_plus=dict(NUM_LAYERS="5", NUM_KV_HEADS="1", LOOP_LAYERS="1,2", EMA_DECAY="0.9", GPTQ_BATCHES="1",
                   EVAL_SLIDING="128"),
    # rows of three blocks, and a window that holds one of them whole; a large scale, by which the gradients
    # depend on where each token looks
    speedrun=PLUS | dict(NUM_LAYERS="5", WINDOW_PATTERN="0SL-S", SKIP_LAYERS="1,3", BACKOUT_LAYER="3",
                         VALUE_EMBED_LAYERS="0,1,0,0,1", TRAIN_SEQ_LEN="384", TRAIN_BATCH_TOKENS="768",
                         ATTN_SCALE="0.6",
                         MAX_DOC_LEN="384", EVAL_CONTEXT="384", WINDOW_SCHEDULE="288,288,320,320",
                         EVAL_WINDOW="320"),
    speedrun_plus=PLUS | dict(QK_DIM="16", DOC_SCHEDULE="64,128,128,128", BIGRAM_ROWS="64",
                              BIGRAM_SIGN_ROWS="64", MUDD_DIM="16", MUDD_GATE_DIM="16", DC_WINDOW="15"),
    gpt2=dict(DEPTH="2", SCORE_ARTIFACT="1", CORE="1", WINDOW_SCHEDULE="128"),
    gpt2_plus=dict(DEPTH="4", LR_WARMUP_STEPS="2", CORE="1", WINDOW_SCHEDULE="128"),
)  # fmt: skip
CORE_TASK = """icl_tasks:
- label: toy
  dataset_uri: toy.jsonl
  num_fewshot: [1]
  icl_task_type: multiple_choice
  continuation_delimiter: " "
"""


class Fault(RuntimeError):
    """Something that differs, in a sentence."""


def settings_of(preset: str, given: dict[str, str]) -> dict[str, str]:
    """Constants of the toy run, as an environment."""
    return COMMON | TOYS[preset] | dict(CORE_BUNDLE="data/core_bundle", PRESET=preset) | given


def make_data(folder: Path) -> None:
    """A dataset of the project's own tools, and a bundle of one task of CORE."""
    words = ["--text", ROOT / "tools", "--name", "toy", "--vocab-size", "512", "--out", folder / "data"]
    command = [sys.executable, ROOT / "data" / "prepare.py", *words]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    bundle = folder / "data" / "core_bundle"
    (bundle / "eval_data").mkdir(parents=True)
    (bundle / "core.yaml").write_text(CORE_TASK)
    (bundle / "eval_meta_data.csv").write_text("Eval Task,Random baseline\ntoy,50\n")
    items = [dict(query=f"{n} and", choices=["one", "two"], gold=n % 2) for n in range(3)]
    (bundle / "eval_data" / "toy.jsonl").write_text("".join([json.dumps(item) + "\n" for item in items]))


# ---------- steps and scores against fp32
def off_values(trainer: ModuleType, model: Model, seed: int) -> dict[str, Tensor]:
    """The init with noise, so that what starts as zero has gradients, too."""
    draw = torch.Generator().manual_seed(seed)
    values = trainer.init_parameters(model, seed)
    for name, value in values.items():
        scale = 0.5 * value.size(-1) ** -0.5 if value.dim() > 1 else 0.1
        values[name] = value + scale * torch.randn(value.shape, generator=draw)
    return values


def documents(cfg: Config, T: int, rows: int, seed: int) -> Tensor:
    """Tokens (rows, T + 1) in documents of about 60; the first row is one document, which flex attention sees
    in whole blocks."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, cfg.vocab_size, (rows, T + 1), generator=draw)
    begins = torch.rand(tokens.shape, generator=draw) < 1 / 60
    begins[0] = False
    begins[:, 0] = True
    return tokens.masked_fill(begins, cfg.bos_id)


class Machine:
    """A recipe's model on a device, with the same values on each."""

    def __init__(self, trainer: ModuleType, env: dict[str, str], compiled: bool, **settings: str) -> None:
        self.trainer = trainer
        cfg = trainer.load_config(env | settings)
        self.cfg = cfg = trainer.replace(cfg, vocab_size=cfg.vocab_size or 512, bos_id=1)
        self.team = trainer.Team(cfg, {})
        on_gpu = self.team.on_gpu
        kernels = [cfg.choose_kernels(True, lambda *_: None)] if compiled else []
        with self.team.device:
            self.model = cfg.make_model(*kernels)
        dtype = self.team.dtype if on_gpu else torch.float32
        make_optimizer = cfg.optimizer()
        self.optimizer = make_optimizer(self.model, cfg, dtype=dtype)
        values = off_values(trainer, self.model, 1)
        for bank in self.optimizer.banks:
            bank.load(values)
        self.loss = torch.compile(self.model, dynamic=False, fullgraph=True) if compiled else self.model

    def step(self, tokens: Tensor, stage: Stage) -> dict[str, Tensor]:
        """{"loss": the loss, kind of parameter: the gradients of all layers}, fp32 on the CPU. Gradients of
        few numbers may almost cancel, so those of a kind are judged together, and small kinds as `small`."""
        device = self.team.device
        dtype = self.team.dtype if self.team.on_gpu else torch.float32
        inputs = tokens[:, :-1].contiguous().to(device)
        targets = tokens[:, 1:].contiguous().to(device)
        context = self.model.context(inputs.size(1), device, dtype, stage)
        self.model.update_context(context, stage.begins)
        loss = self.loss(inputs, targets, context, *self.model.candidates(inputs, targets))
        names = [name for bank in self.optimizer.banks for name in bank.names]
        gradients = torch.autograd.grad(loss, self.optimizer.params, materialize_grads=True)
        found = dict(loss=loss.detach().float().cpu())
        for name, gradient in zip(names, gradients):
            kind = self.trainer.kind_of(name)
            whole = [found[kind]] if kind in found else []
            found[kind] = torch.cat([*whole, gradient.float().cpu().flatten()])
        small = [kind for kind, value in found.items() if kind != "loss" and value.numel() < SMALL]
        if small:
            found["small"] = torch.cat([found.pop(kind) for kind in small])
        return found

    def scores(self, tokens: Tensor) -> Tensor:
        """Nats of all targets of rows of two lengths."""
        places = []
        start = 0
        for i, row in enumerate(tokens):
            end = start + len(row) - (40 if i == 0 else 0)
            places.append((start, start + 1, end - 1))
            start += len(row)
        text = tokens.flatten().numpy()
        nats = self.trainer.plain_nats(self.model, self.cfg, text, self.team, rows=places)
        return torch.cat([torch.from_numpy(nats[first:last + 1]) for _, first, last in places])


def error(mine: Tensor, exact: Tensor) -> float:
    return float((mine - exact).norm() / exact.norm().clamp(min=1e-12))


def allowed_errors(wanted: dict[str, Tensor], eager: dict[str, Tensor], fp8: bool) -> dict[str, float]:
    """How far from fp32 the loss and the gradients of a compiled step may be. A gradient of few numbers is
    mostly noise in fp8 at this size, so it has no limit there."""
    slack = FP8_SLACK if fp8 else SLACK
    found = {}
    for name, value in wanted.items():
        if not fp8 or value.numel() >= FP8_NUMBERS:
            found[name] = 1.5 * error(eager[name], value) + slack
    found["loss"] = 1.5 * error(eager["loss"], wanted["loss"]) + LOSS_SLACK
    if "small" in found:
        found["small"] += SMALL_SLACK - SLACK
    return found


def compare_stage(where: str, machines: list[Machine], stage: Stage, say: Say) -> None:
    """Raises Fault where the first machine's step is further from that of the last, in fp32, than the one of
    the second, eager in bf16, allows."""
    gpu, plain, exact = machines
    tokens = documents(gpu.cfg, stage.row_tokens, ROWS, stage.row_tokens)
    wanted = exact.step(tokens, stage)
    eager = plain.step(tokens, stage)
    got = gpu.step(tokens, stage)
    from tools.run import plan

    fp8 = plan.fp8_part(gpu.cfg, True) != "off"
    allowed = allowed_errors(wanted, eager, fp8)
    parts = {name: error(got[name], wanted[name]) / most for name, most in allowed.items()}
    worst = max(parts, key=lambda name: parts[name])
    if not max(parts.values()) <= 1:  # also for NaN
        raise Fault(
            f"{where}: compiled {worst} is off from fp32 by {error(got[worst], wanted[worst]):.1%}, "
            f"eager bf16 by {error(eager[worst], wanted[worst]):.1%}; {allowed[worst]:.1%} allowed"
        )
    losses = [float(found["loss"]) for found in (got, eager, wanted)]
    say(
        f"{where}: {ROWS} rows of {stage.row_tokens}, loss compiled {losses[0]:.4f}, eager {losses[1]:.4f}, "
        f"fp32 {losses[2]:.4f}; {len(allowed) - 1} kinds of gradients, the furthest at {parts[worst]:.0%} of "
        f"what is allowed ({worst})"
    )


def compare_steps(trainer: ModuleType, env: dict[str, str], say: Say) -> None:
    """Steps of the stages with the shortest and the longest rows, and scores. Raises Fault."""
    plain = Machine(trainer, env, False, DEVICE="cuda", DTYPE="auto", COMPILE="0")
    exact = Machine(trainer, env, False, DEVICE="cpu", DTYPE="float32", COMPILE="0")
    stages = exact.cfg.stages()
    on_gpu = env | dict(DEVICE="cuda", DTYPE="auto", COMPILE="1")
    has_fp8 = hasattr(exact.cfg, "fp8")
    gpu = Machine(trainer, on_gpu | (dict(FP8="off") if has_fp8 else {}), True)
    compare_stage("step of the first stage", [gpu, plain, exact], stages[0], say)
    if len(stages) > 1:
        compare_stage("step of the last stage", [gpu, plain, exact], stages[-1], say)
    if has_fp8:
        fp8 = Machine(trainer, on_gpu, True)
        compare_stage("step of the first stage in fp8", [fp8, plain, exact], stages[0], say)
    tokens = documents(gpu.cfg, gpu.cfg.eval_context or gpu.cfg.train_seq_len, ROWS, 9)
    wanted = exact.scores(tokens)
    off = [float((machine.scores(tokens) - wanted).abs().mean()) for machine in (gpu, plain)]
    if not off[0] <= 1.5 * off[1] + LOSS_SLACK:
        raise Fault(f"compiled scores are {off[0]:.4f} nats from fp32, eager ones {off[1]:.4f}")
    say(f"scores: compiled {off[0]:.4f} nats from fp32 in the mean, eager {off[1]:.4f}")


# ---------- a run
class Walk:
    """Runs of main(), in the current folder."""

    def __init__(self, trainer: Any, env: dict[str, str]) -> None:
        self.trainer = trainer
        self.env = env

    def run(self, name: str, **settings: str) -> Path:
        """The folder of a run of that name. Raises Fault."""
        out = io.StringIO()
        torch._dynamo.reset()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = self.trainer.main([], self.env | settings)
        if code:
            lines = out.getvalue().strip().splitlines()[-12:]
            raise Fault(f"{name}: exit code {code}: " + "\n".join(lines))
        return Path("logs", name)

    def all(self, say: Say) -> None:
        with training.first_checkpoint_kept(self.trainer):
            run = self.run("gpu", DEVICE="cuda", COMPILE="1", RUN_ID="gpu")
        losses = losses_of(run)
        scores = training.scores_of(run)
        told = ", ".join([f"{kind} {loss:.4f}" for kind, loss in scores.items()])
        say(f"main(): {max(losses)} steps, train_loss {losses[max(losses)]:.4f}, val_loss {told}")
        self.scored_again(run, scores, say)
        self.on_cpu(losses, scores, say)
        self.resumed(run, losses, say)

    def resumed(self, run: Path, losses: dict[int, float], say: Say) -> None:
        """From the first checkpoint."""
        os.replace(run / "halfway.pt", run / "checkpoint.pt")
        os.remove(run / "result.json")
        self.run("gpu", RESUME="gpu", DEVICE="cuda")
        step = training.events_of(run, "resume")[-1]["step"]
        again = losses_of(run)  # of the steps that came twice, the second time
        if again != losses or step >= max(losses):
            raise Fault(f"resumed from step {step}, the losses are {again}; before they were {losses}")
        say(f"resumed: steps {step + 1} to {max(losses)} with the same losses")

    def scored_again(self, run: Path, scores: dict[str, float], say: Say) -> None:
        """EVAL_FROM the artifact, else the weights."""
        kind = [*scores][-1]
        path = training.written_file(run)
        found = training.scores_of(self.run("scored", EVAL_FROM=str(path), DEVICE="cuda", COMPILE="1",
                                            RUN_ID="scored"))  # fmt: skip
        if abs(found[kind] - scores[kind]) > FILE_SLACK:
            raise Fault(f"EVAL_FROM={path}: val_loss {found[kind]}, in the run {scores[kind]}")
        say(f"EVAL_FROM {path.name}: val_loss {found[kind]:.4f}, as in the run")

    def on_cpu(self, losses: dict[int, float], scores: dict[str, float], say: Say) -> None:
        run = self.run("cpu", DEVICE="cpu", DTYPE="float32", COMPILE="0", RUN_ID="cpu")
        there = [*losses_of(run).values(), *training.scores_of(run).values()]
        mine = [*losses.values(), *scores.values()]
        off = max([abs(loss / its - 1) for loss, its in zip(mine, there, strict=True)])
        if not off <= RUN_SLACK:
            raise Fault(f"losses are up to {off:.1%} from those of fp32 on the CPU: {mine}, {there}")
        say(f"on the CPU in fp32: losses and score within {off:.1%}")


def losses_of(run: Path) -> dict[int, float]:
    """{step: train_loss}"""
    return {event["step"]: event["train_loss"] for event in training.events_of(run, "train")}


def check(
    trainer: Any, preset: str, given: dict[str, str], parts: list[str]
) -> dict[str, Any]:
    """Everything about a preset -> {lines, faults, operators, kernels, seconds}; in a process with the
    library in place. parts: of steps and main."""
    began = time.perf_counter()
    lines: list[str] = []
    faults: list[str] = []
    operators = emulate_gpu.Operators()
    interpreter = interpret_kernels.Interpreter()
    torch._dynamo.config.recompile_limit = 64
    trainer.LEAST_KERNEL_VOCABULARY = 0  # so that toys run loss_kernel, too
    trainer.LOSS_BLOCK = 256  # of 528 logits: two whole blocks and a part of one

    def say(line: str) -> None:
        lines.append(line)
        print(f"{preset}: {line}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder, interpreter.in_place_of_the_gpu():
        make_data(Path(folder))
        os.chdir(folder)
        env = settings_of(preset, given)
        for part in parts:
            try:
                if part == "steps":
                    compare_steps(trainer, env, say)
                else:
                    operators.seen.clear()  # the comparison of steps called more, eagerly
                    Walk(trainer, env).all(say)
            except Exception as problem:  # a compiler or an operator may raise anything
                faults.append(f"{type(problem).__name__}: {problem}")
                say(faults[-1])
        faults += [f"kernel {what}" for what in interpreter.faults]
        os.chdir(ROOT)
    return dict(
        lines=lines,
        faults=faults,
        operators=[(name, dtypes, line) for (name, dtypes), line in sorted(operators.seen.items())],
        kernels=sorted(interpreter.seen),
        seconds=round(time.perf_counter() - began, 1),
        torch=torch.__version__,
    )
