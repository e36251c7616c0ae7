"""A toy run of a preset on a GPU that is emulated: do its kernels compute what the eager step computes, and
does the whole of main() work on CUDA's code?

    ./run.sh static --run [PRESET ...] [NAME=value ...]

1. Steps of the first and the last stage: the loss and the gradients of each kind of parameter, compiled, in
   bf16 and by the kernels of an H100, on several rows with documents. They must be as near to fp32 as the
   eager step in bf16 is. Then the same in fp8, where the recipe has it, of the loss and of matrices.
2. A run by main(): warmup, steps of all stages, validation, checkpoints, artifact, its score as read back,
   sliding rows, CORE; EVAL_FROM its artifact, which must give the same score, also on the CPU in fp32; the
   same run in fp32 on the CPU; and resumed from its first checkpoint, which must give the same losses.

static.py starts it, once per preset, in a process with the stand-in's library. What differs ends it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import train_gpt  # of the folder that --trainer names
from data import prepare
from tools.dev import bench
from tools.gpu import emulate_gpu
from tools.gpu import interpret_kernels
from tools.gpu import training
from tools.run import plan
from train_gpt import Config, Model, Stage

ROOT = Path(__file__).resolve().parents[2]
ROWS = 3  # of a step that is compared; more than one, as some faults need
LOSS_SLACK = 0.004  # of a loss, beyond what eager bf16 is off
SLACK = 0.02  # of a gradient's norm
FP8_SLACK = 0.25  # a product in e5m2 is off by 6 %, and gradients pass several
FP8_NUMBERS = 1024
SMALL = 64  # numbers of a kind of parameter; their gradients are long sums in bf16
SMALL_SLACK = 0.05
SCORE_SLACK = 4e-3  # nats, between a score in bf16 and in fp32
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
                         EVAL_WINDOW="320", VAL_TOKENS="1200", VAL_BATCH_SIZE="1152"),
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


def make_data(folder: Path) -> None:
    """A dataset of the project's own tools, and a bundle of one task of CORE."""
    words = ["--text", ROOT / "tools", "--name", "toy", "--vocab-size", "512", "--out", folder / "data"]
    with contextlib.redirect_stdout(io.StringIO()):
        prepare.main([str(word) for word in words])
    bundle = folder / "data" / "core_bundle"
    (bundle / "eval_data").mkdir(parents=True)
    (bundle / "core.yaml").write_text(CORE_TASK)
    (bundle / "eval_meta_data.csv").write_text("Eval Task,Random baseline\ntoy,50\n")
    items = [dict(query=f"{n} and", choices=["one", "two"], gold=n % 2) for n in range(3)]
    (bundle / "eval_data" / "toy.jsonl").write_text("".join([json.dumps(item) + "\n" for item in items]))


def say(line: str) -> None:
    print(f"  {line}", flush=True)


# ---------- steps against fp32
def off_values(model: Model, seed: int) -> dict[str, Tensor]:
    """The init with noise, so that parameters that start at zero have gradients, too. A model with MUDD gets
    a tenth of that noise: its sums of layers nearly cancel, which alone puts bf16 a third off fp32."""
    draw = torch.Generator().manual_seed(seed)
    noise = 0.1 if hasattr(model.cfg, "mudd_dim") else 1.0
    values = train_gpt.init_parameters(model, seed)
    for name, value in values.items():
        scale = 0.5 * value.size(-1) ** -0.5 if value.dim() > 1 else 0.1
        values[name] = value + noise * scale * torch.randn(value.shape, generator=draw)
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

    def __init__(self, env: dict[str, str], device: str, compiled: bool = False) -> None:
        dtype = "auto" if device == "cuda" else "float32"
        self.run = bench.assemble(train_gpt.load_config(env | dict(DEVICE=device, DTYPE=dtype)))
        values = off_values(self.run.model, 1)
        for bank in self.run.optimizer.banks:
            bank.load(values)
        self.loss = self.run.model
        if compiled:
            self.loss = torch.compile(self.run.model, dynamic=False, fullgraph=True)

    def step(self, tokens: Tensor, stage: Stage) -> dict[str, Tensor]:
        """{"loss": the loss, kind of parameter: the gradients of all layers}, fp32 on the CPU. Gradients of
        few numbers may almost cancel, so those of a kind are judged together, and small kinds as `small`."""
        model = self.run.model
        team = self.run.team
        inputs = tokens[:, :-1].contiguous().to(team.device)
        targets = tokens[:, 1:].contiguous().to(team.device)
        context = model.context(inputs.size(1), team.device, team.dtype, stage)
        model.update_context(context, stage.begins)
        loss = self.loss(inputs, targets, context, *model.candidates(inputs, targets))
        # fp8's fixed scales are those of a summed loss
        factor = inputs.numel() if stage.loss_factor != 1 else 1
        names = [name for bank in self.run.optimizer.banks for name in bank.names]
        gradients = torch.autograd.grad(factor * loss, self.run.optimizer.params, materialize_grads=True)
        kinds: dict[str, list[Tensor]] = {}
        for name, gradient in zip(names, gradients):
            kinds.setdefault(train_gpt.kind_of(name), []).append(gradient.float().cpu().flatten())
        found = {kind: torch.cat(its) for kind, its in kinds.items()}
        small = [kind for kind, value in found.items() if value.numel() < SMALL]
        if small:
            found["small"] = torch.cat([found.pop(kind) for kind in small])
        return found | dict(loss=loss.detach().float().cpu())


def error(mine: Tensor, exact: Tensor) -> float:
    return float((mine - exact).norm() / exact.norm().clamp(min=1e-12))


def allowed_errors(wanted: dict[str, Tensor], eager: dict[str, Tensor], fp8: bool) -> dict[str, float]:
    """How far from fp32 the loss and the gradients of a compiled step may be. A gradient of few numbers is
    mostly noise in fp8 at this size, so it has no limit there."""
    slacks = dict(loss=LOSS_SLACK, small=SMALL_SLACK)
    found = {}
    for name, value in wanted.items():
        if not fp8 or name == "loss" or value.numel() >= FP8_NUMBERS:
            slack = slacks.get(name, FP8_SLACK if fp8 else SLACK)
            found[name] = 1.5 * error(eager[name], value) + slack
    return found


def compare_stage(where: str, machines: list[Machine], stage: Stage) -> None:
    """Raises an error where the first machine's step is further from that of the last, in fp32, than the one
    of the second, eager in bf16, allows."""
    tokens = documents(machines[0].run.cfg, stage.row_tokens, ROWS, stage.row_tokens)
    got, eager, wanted = [machine.step(tokens, stage) for machine in machines]
    allowed = allowed_errors(wanted, eager, plan.fp8_part(machines[0].run.cfg, True) != "off")
    parts = {name: error(got[name], wanted[name]) / most for name, most in allowed.items()}
    worst = max(parts, key=lambda name: parts[name])
    if not max(parts.values()) <= 1:  # also for NaN
        raise RuntimeError(
            f"{where}: compiled {worst} is off from fp32 by {error(got[worst], wanted[worst]):.1%}, "
            f"eager bf16 by {error(eager[worst], wanted[worst]):.1%}; {allowed[worst]:.1%} allowed"
        )
    losses = [float(found["loss"]) for found in (got, eager, wanted)]
    say(
        f"{where}: {ROWS} rows of {stage.row_tokens}, loss compiled {losses[0]:.4f}, eager {losses[1]:.4f}, "
        f"fp32 {losses[2]:.4f}; {len(allowed) - 1} kinds of gradients, the furthest at {parts[worst]:.0%} of "
        f"what is allowed ({worst})"
    )


def compare_steps(env: dict[str, str]) -> None:
    """Steps of the stages with the shortest and the longest rows."""
    exact = Machine(env, "cpu")
    plain = Machine(env | dict(FP8="off"), "cuda")
    gpu = Machine(env | dict(FP8="off"), "cuda", True)
    stages = exact.run.cfg.stages()
    compare_stage("step of the first stage", [gpu, plain, exact], stages[0])
    if len(stages) > 1:
        compare_stage("step of the last stage", [gpu, plain, exact], stages[-1])
    if plan.fp8_part(exact.run.cfg, True) != "off":
        fp8 = Machine(env, "cuda", True)
        compare_stage("step of the first stage in fp8", [fp8, plain, exact], stages[0])


# ---------- a run
def run_main(name: str, env: dict[str, str], device: str, **settings: str) -> Path:
    """The folder of a run of that name by main(), in the current folder. Raises an error with the last lines
    that it printed if it failed."""
    dtype, compiled = ("auto", "1") if device == "cuda" else ("float32", "0")
    env = env | dict(RUN_ID=name, DEVICE=device, DTYPE=dtype, COMPILE=compiled) | settings
    out = io.StringIO()
    torch._dynamo.reset()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = train_gpt.main([], env)
    if code:
        lines = out.getvalue().strip().splitlines()[-10:]
        raise RuntimeError(f"{name}: exit code {code}: " + "\n".join(lines))
    return Path("logs", name)


def compare_runs(env: dict[str, str]) -> None:
    """A whole run, the score of what it wrote, the run on the CPU, the run from its first checkpoint."""
    with training.first_checkpoint_kept(train_gpt):
        run = run_main("gpu", env, "cuda")
    losses = losses_of(run)
    scores = training.scores_of(run)
    told = ", ".join([f"{kind} {loss:.4f}" for kind, loss in scores.items()])
    say(f"main(): {max(losses)} steps, train_loss {losses[max(losses)]:.4f}, val_loss {told}")

    file = training.written_file(run)
    kind = [*scores][-1]
    for device, slack in (("cuda", FILE_SLACK), ("cpu", SCORE_SLACK)):
        found = training.scores_of(run_main(f"{device}_score", env, device, EVAL_FROM=str(file)))[kind]
        if not abs(found - scores[kind]) <= slack:
            raise RuntimeError(f"EVAL_FROM={file} on {device}: val_loss {found}, in the run {scores[kind]}")
        say(f"EVAL_FROM {file.name} on {device}: val_loss {found:.4f}")

    exact = run_main("cpu", env, "cpu")
    mine = [*losses.values(), *scores.values()]
    there = [*losses_of(exact).values(), *training.scores_of(exact).values()]
    off = max([abs(loss / its - 1) for loss, its in zip(mine, there, strict=True)])
    if not off <= RUN_SLACK:
        raise RuntimeError(f"losses are up to {off:.1%} from those of fp32 on the CPU: {mine}, {there}")
    say(f"on the CPU in fp32: losses and score within {off:.1%}")

    os.replace(run / "halfway.pt", run / "checkpoint.pt")
    os.remove(run / "result.json")
    run_main("gpu", env, "cuda", RESUME="gpu")
    step = training.events_of(run, "resume")[-1]["step"]
    again = losses_of(run)  # of the steps that came twice, the second time
    if again != losses or step >= max(losses):
        raise RuntimeError(f"resumed from step {step}, the losses are {again}; before they were {losses}")
    say(f"resumed: steps {step + 1} to {max(losses)} with the same losses")


def losses_of(run: Path) -> dict[int, float]:
    """{step: train_loss}"""
    return {event["step"]: event["train_loss"] for event in training.events_of(run, "train")}


def check(preset: str, given: dict[str, str]) -> dict[str, Any]:
    """Everything about a preset -> {operators, seconds, torch}; in a process with the library in place.
    Raises an error if something differs."""
    began = time.perf_counter()
    operators = emulate_gpu.Operators()
    interpreter = interpret_kernels.Interpreter()
    torch._dynamo.config.recompile_limit = 64
    train_gpt.LEAST_KERNEL_VOCABULARY = 0  # so that toys run loss_kernel, too
    train_gpt.LOSS_BLOCK = 256  # of 528 logits: two whole blocks and a part of one

    with tempfile.TemporaryDirectory() as folder, interpreter.in_place_of_the_gpu():
        make_data(Path(folder))
        os.chdir(folder)
        env = COMMON | TOYS[preset] | dict(CORE_BUNDLE="data/core_bundle", PRESET=preset) | given
        compare_steps(env)
        operators.seen.clear()  # the comparison of steps called more, eagerly
        compare_runs(env)
        assert not interpreter.faults, "\n".join(interpreter.faults)
        os.chdir(ROOT)
    return dict(
        operators=sorted(operators.seen),
        seconds=round(time.perf_counter() - began, 1),
        torch=torch.__version__,
    )
