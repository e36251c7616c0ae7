"""What a run will take and do: memory, micro-batch, time, disk, the artifact's bytes, the table of stages.
All of it is estimated before anything trains; docs/log.md says what the estimates were fitted to."""
import math
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import train_gpt
from tools.run import cards
from tools.run.machine import Machine
from train_gpt import (
    Config, Stage, Tiny, horizon_weights, kind_of, packed_tensors, parameter_counts,
    parse_value, per_layer, require, rows_at_once, stage_at, total_steps)

CPU_FLOPS = 75e9  # fp32 FLOP/s of a CPU core (docs/log.md)
GPU_PART = 0.5  # of the peak FLOP/s: nanochat's d24 in bf16 on 8 H100s
# Seconds of each recipe's record on eight H100s, by its log; golf's and golf_plus's are their time cap
RECORD_SECONDS = dict(golf=600, golf_plus=600, speedrun=132.2, speedrun_plus=70.09, gpt2=8967, gpt2_plus=5940)
# What a layer keeps per token for the backward pass, in multiples of model_dim: fitted to the peaks that
# ./run.sh static counted (docs/log.md).
KEPT_BY_ATTENTION = 13
KEPT_BY_MLP = 2.2  # times its width / model_dim
KEPT_IN_FP8 = 0.68  # factor on both where all products are in fp8
ENTRY_BYTES = 64  # a tensor's name and place, compressed
# Bytes of trained weights / bytes of random normal ones: 0.9961 in golf's public log, 0.9963 to 0.9967 in
# five of golf_plus
TRAINED_PART = 0.9965
STAGE_COLUMNS = ("doc_len", "loops", "next_weights", "prefix_weights")  # in the table if they differ


# ---------------------------------------------------------------- what a recipe costs
class Layer(NamedTuple):
    """What one layer costs."""
    window: int     # tokens that a token sees; 0: no attention
    mlp_mult: float     # MLP width / model_dim; 0: no MLP
    passes: int     # how often it runs


def layers_of(cfg: Any, stage: Stage | None = None) -> list[Layer]:
    """What each layer costs in a stage; None: in the last one."""
    stage = stage or cfg.stages()[-1]
    seen = dict.fromkeys("LS", stage.row_tokens) | {"-": 0, "0": 0}
    if hasattr(cfg, "windows"):
        seen |= cfg.windows(stage, stage.row_tokens)
    seen["P"] = seen["S"]
    kinds = per_layer(vars(cfg).get("window_pattern", "L"), cfg.num_layers)
    order = [*range(cfg.num_layers)]
    if hasattr(cfg, "layer_order"):  # some layers run several times
        order = cfg.layer_order(stage)
    return [Layer(seen[kind], 0 if kind == "0" else cfg.mlp_mult, order.count(i))
            for i, kind in enumerate(kinds)]


def windows_of(cfg: Any, stage: Stage | None, T: int) -> dict[str, int]:
    """{long_window, short_window: tokens that a token sees} in rows of T; {}: all before it. stage None: in
    final scores."""
    if not hasattr(cfg, "windows"):
        return {}
    sizes = cfg.windows(stage, T)
    return dict(long_window=sizes["L"], short_window=sizes["S"])


def flops_per_token(cfg: Any, stage: Stage | None = None) -> float:
    """Training matmul FLOPs as PaLM counts them (arXiv:2204.02311): 6 per weight, plus 12 * width * window
    per layer. A layer that runs several times counts each time, averaged over the stages. stage: the one
    whose windows count; None: the last."""
    keys = sum([layer.window for layer in layers_of(cfg, stage)])
    passes = [sum([layer.passes for layer in layers_of(cfg, row)]) for row in cfg.stages()]
    again = sum(passes) / len(passes) / cfg.num_layers
    head = cfg.vocab_size * cfg.model_dim
    return 6 * (head + again * (horizon_weights(cfg) - head + 2 * cfg.model_dim * keys))


def planned_tokens(cfg: Any) -> int:
    """Training tokens of all steps, if no cap on time ends the run."""
    table = cfg.stages()
    ends = [stage.first_step for stage in table[1:]] + [total_steps(cfg)]
    return sum([(end - stage.first_step) * stage.batch_tokens for stage, end in zip(table, ends)])


def fp8_part(cfg: Any, on_gpu: bool) -> str:
    """Which products of training are in fp8: off, head or all. Raises Refused."""
    if not hasattr(cfg, "fp8"):
        return "off"
    further = [2 * cfg.num_heads * cfg.qk_dim, cfg.mlp_mult * cfg.model_dim] if hasattr(cfg, "qk_dim") else []
    part = train_gpt.fp8_part(cfg, on_gpu, further=further)
    constants = vars(cfg)
    all_of_it = constants.get("fp8_qkv", True) and constants.get("fp8_mlp", True)
    return "head" if part == "all" and not all_of_it else part


def dtype_of_products(cfg: Any) -> str:
    """fp8 or bf16: the dtype of most training matmuls on a GPU that has both."""
    if not hasattr(cfg, "fp8"):
        return "bf16"
    asked = replace(cfg, fp8=cfg.fp8.removeprefix("auto-"))
    try:
        part = fp8_part(asked, on_gpu=False)
    except train_gpt.Refused:  # sizes or a softcap for which auto- turns it off
        part = "off"
    return "fp8" if part == "all" else "bf16"


def counted_bytes(cfg: Any) -> int:
    """Bytes of the tables of n-grams that tiny counts; its lists grow with the text. 0 in other recipes."""
    if not isinstance(cfg, Tiny):
        return 0
    return 4 * len(cfg.counted_orders() + cfg.counted_words()) << cfg.count_bits


def stage_flops(cfg: Any) -> list[tuple[int, int, float]]:
    """(planned first step, tokens per step, FLOPs per token) of each stage."""
    return [(stage.first_step, stage.batch_tokens, flops_per_token(cfg, stage)) for stage in cfg.stages()]


def config_of(told: Mapping[str, Any]) -> Any:
    """The constants that a run trained with. told: its first event or result.json, with preset and config.
    Raises Refused if they are another version's."""
    recipe = train_gpt.recipe_of(told["preset"])
    own = {f.name: f for f in fields(recipe)}
    require(own.keys() == told["config"].keys(), "another version has other constants")
    return recipe(**{name: parse_value(own[name], text) for name, text in told["config"].items()})


def work_of(result: Mapping[str, Any]) -> cards.Work | None:
    """What the GPUs of a run did, from its result.json; None: it had none. Raises Refused."""
    gpus, _, card = result["hardware"].partition("x ")
    if not gpus.isdecimal():
        return None
    cfg = config_of(result)
    flops = cards.mean_flops(stage_flops(cfg), result["steps"]) * result["tok_per_s"]
    return cards.Work(flops, int(gpus) * [card], dtype_of_products(cfg))


# ---------------------------------------------------------------- memory, time, disk
def step_memory(cfg: Any, machine: Machine, sequences: int) -> int:
    """Estimate of the bytes that a rank needs for micro-steps of this many sequences, in the stage that needs
    most."""
    counts = parameter_counts(cfg)
    width = machine.dtype.itemsize
    stages = cfg.stages()
    fp8 = fp8_part(cfg, machine.on_gpu)
    longest = max([stage.row_tokens for stage in stages]) // cfg.train_seq_len
    tokens = max(sequences, longest if sequences else 0) * cfg.train_seq_len
    # 1. weights as the model reads them, gradients and their sums; the share of gradients, masters, moments.
    #    Gradients that wait for the second step of an update are left out, and so is an EMA.
    shared = 16 if machine.world_size > 1 else 12
    tables = counts["embed"] + counts["value_embed"] if machine.on_gpu else 0  # whose sums are as narrow
    held = counts.total() * ((2 * width if machine.on_gpu else 4) + 4 + shared / machine.world_size)
    held -= (4 - width) * tables
    # 2. what layers keep for the backward pass
    kept = 0.0
    for stage in stages:
        of_stage = 0.0
        for layer in layers_of(cfg, stage):
            by_attention = KEPT_BY_ATTENTION if layer.window > 0 else 0
            of_stage += layer.passes * (by_attention + KEPT_BY_MLP * layer.mlp_mult)
        kept = max(kept, of_stage)
    kept *= cfg.model_dim
    if machine.on_gpu and fp8 == "all":
        kept *= KEPT_IN_FP8
    # 3. logits and their gradients, which overwrite them on a GPU; in fp8 they lie beside them
    if not machine.on_gpu:
        per_logit = 2 * width
    elif fp8 == "off":
        per_logit = width
    else:
        per_logit = width + 1
    return int(held + counted_bytes(cfg) + tokens * (width * kept + per_logit * cfg.vocab_size))


def micro_batch(cfg: Any, machine: Machine) -> int:
    """Sequences per micro-step: the largest divisor of a rank's sequences that is within device_batch_size
    or, if that is 0, that memory should hold."""
    share = cfg.train_batch_tokens // cfg.train_seq_len // machine.world_size
    fitting = [n for n in range(1, share + 1) if step_memory(cfg, machine, n) <= machine.free]
    return rows_at_once(share, cfg.device_batch_size or max(fitting, default=1))


def slow_machine(cfg: Any, machine: Machine) -> str:
    """On a CPU where a step would take more than a minute: how long, and what else to do. Empty elsewhere."""
    token = flops_per_token(cfg) / CPU_FLOPS / machine.threads  # seconds
    if machine.on_gpu or token * cfg.train_batch_tokens <= 60:
        return ""
    ends = f"the whole run {token * planned_tokens(cfg) / 86400:.1f} days (estimate)"
    if cfg.max_wallclock_seconds:
        ends = f"and the run ends after {cfg.max_wallclock_seconds:g} s"
    minutes = token * cfg.train_batch_tokens / 60
    return (f"{cfg.preset} is made for GPUs: a step takes {minutes:.0f} min here, {ends}; ./run.sh "
            f"{cfg.preset} --proxy trains a small version of it, PRESET=tiny trains for 2 min, DEVICE=cpu "
            "trains anyway")


def limits_line(cfg: Any, machine: Machine) -> str:
    """What ends the run and, without a cap, about when, if that can be told."""
    line = f"limits: at most {total_steps(cfg)} steps ({planned_tokens(cfg)} tokens); "
    if cfg.max_wallclock_seconds:
        return f"{line}at most {cfg.max_wallclock_seconds:g} s of training"
    flops = flops_per_token(cfg) * planned_tokens(cfg)
    speed = CPU_FLOPS * machine.threads
    if machine.on_gpu:
        speed = GPU_PART * cards.peak_flops(torch.cuda.get_device_name()) * machine.world_size
    if not speed:
        return f"{line}no cap"
    minutes = math.ceil(flops / speed / 60)
    length = f"{minutes / 60:.1f} h" if minutes >= 60 else f"{minutes} min"
    return f"{line}no cap, about {length} (estimate)"


def record_line(cfg: Any, machine: Machine) -> str:
    """How long the record's own run would take on these GPUs if they came as close to their peak as its
    eight H100s did. Empty on a CPU, for a card whose peak is unknown, and for tiny."""
    peak = cards.peak_flops(torch.cuda.get_device_name()) if machine.on_gpu else 0
    seconds = RECORD_SECONDS.get(cfg.preset, 0)
    if not peak or not seconds:
        return ""
    hours = seconds / 3600 * 8 / machine.world_size * cards.CARDS["h100"].peak / peak
    gpus = f"{machine.world_size} x {torch.cuda.get_device_name()}"
    return (f"record: {seconds:g} s at full size on eight H100s, so about {hours:.1f} h on {gpus} (estimate "
            "by their bf16 peaks)")


def full_disk(cfg: Any, folder: Path) -> str:
    """If the disk of this folder has no room for what a run leaves: how much is missing; else empty. A run
    leaves fp32 weights, an artifact and a checkpoint of weights and two moments; while a later checkpoint is
    written, there are two."""
    weights = 4 * parameter_counts(cfg).total()
    checkpoints = 2 if cfg.save_every or cfg.save_every_seconds else 1
    needed = 2 * weights + checkpoints * 3 * weights
    while not folder.exists():
        folder = folder.absolute().parent
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return ""
    return (f"the disk of logs/ has {free >> 20} MiB free, but the files of this run may take "
            f"{needed >> 20} MiB")


# ---------------------------------------------------------------- the artifact
def planned_bytes(cfg: Any) -> int | None:
    """Estimates the artifact's bytes by compressing about 65,536 random normal weights per kind and shape;
    trained ones take TRAINED_PART of that. None if the artifact also holds the training text."""
    if counted_bytes(cfg):
        return None
    table = cfg.parameter_table()
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = cfg.make_model()
        parameters = [(table[kind_of(name)], p.shape) for name, p in model.named_parameters()]
    sizes = {}
    for row, shape in dict.fromkeys(parameters):
        drawn = max(1, (1 << 16) // math.prod(shape[1:]))
        w = torch.randn((drawn, *shape[1:]), generator=generator)
        parts = packed_tensors(w, row, cfg, shape.numel()).values()
        raw = b"".join([part.numpy().tobytes() for part in parts])
        packed = cfg.compress(raw) if hasattr(cfg, "compress") else zlib.compress(raw, 9)
        sizes[row, shape] = ENTRY_BYTES * len(parts) + len(packed) * shape[0] / drawn
    return round(TRAINED_PART * sum([sizes[key] for key in parameters]))


def artifact_line(cfg: Any, code: int) -> str:
    """The artifact's bytes and those of its script against the limit. code: bytes of the script."""
    limit = cfg.artifact_bytes_limit
    size = planned_bytes(cfg)
    if size is None:
        return f"artifact: it also holds the training text, so its bytes are not known yet; {code} of code"
    room = limit - size - code
    said = f"{room} bytes of room" if room >= 0 else f"{-room} bytes over it"
    return (f"artifact: {size} bytes and {code} of code, {(size + code) / limit:.2%} of the limit, {said} "
            f"(estimate: as normally distributed weights compress, less the {1 - TRAINED_PART:.2%} that "
            "trained ones took less in public logs)")


# ---------------------------------------------------------------- the plan
def listed(table: Mapping[str, object]) -> str:
    return " ".join([f"{name}:{value}" for name, value in table.items()])


def plan_lines(cfg: Any, machine: Machine, micro: int, code: Callable[[], int]) -> Iterator[str]:
    """Yields size, cost and memory of the run, and its schedules. micro: sequences per micro-step. code:
    returns the bytes of the script that the run will use."""
    counts = parameter_counts(cfg)
    flops = flops_per_token(cfg)
    batch = cfg.train_batch_tokens
    T = cfg.train_seq_len
    yield f"parameters:{counts.total()} ({listed(counts)})"
    yield f"matmul FLOPs per token:{flops:.4g} per step:{flops * batch:.4g}"
    yield (f"world_size:{machine.world_size} device:{machine.device.type} "
           f"activations:{str(machine.dtype)[6:]} micro_batch:{micro}x{T} "
           f"grad_accum_steps:{batch // T // machine.world_size // micro} "
           f"memory:{step_memory(cfg, machine, micro) >> 20} MiB (estimate)")
    if machine.world_size > 1:  # gradients and weights of all banks
        width = machine.dtype.itemsize if machine.on_gpu else 4
        yield f"collectives: {2 * width * counts.total() / 1e6:.0f} MB per step"
    yield limits_line(cfg, machine)
    record = record_line(cfg, machine)
    if record:
        yield record
    if cfg.artifact_bytes_limit and cfg.score_artifact:
        yield artifact_line(cfg, code())
    yield from stage_lines(cfg)


def lr_marks(cfg: Any) -> dict[int, float]:
    """{step: LR factor from there on, before the warmdown} where a stage begins or the factor changes."""
    last = total_steps(cfg)
    steps = {stage.first_step for stage in cfg.stages()}
    switches = vars(cfg).get("lr_switches", ())
    steps |= {math.ceil(switch * cfg.iterations - 1e-6) for switch in switches}
    factors = {}
    for step in sorted(steps):
        if step < last:
            factors[step] = stage_at(cfg, step / last).lr
            if switches:
                factors[step] = cfg.top_lr(step / last)
    return factors


def check_layers(cfg: Any) -> None:
    """Raises Refused where window_pattern has more layers than num_layers, so that its last ones would not be
    built, and neither would what other lists say of them."""
    pattern = vars(cfg).get("window_pattern", "")
    n = cfg.num_layers
    require(n >= len(pattern), f"num_layers={n}, but window_pattern={pattern} has {len(pattern)} layers: set "
            "WINDOW_PATTERN, and the lists that name layers, as well")


def warmdown_text(cfg: Config) -> str:
    """When and how far the learning rate falls."""
    constants = vars(cfg)
    floor = constants.get("lr_floor", 0)
    if "warmdown_iters" in constants:
        return f"in the last {constants['warmdown_iters']} steps lr_factor falls to {floor:g}"
    whole = "iterations" if constants.get("extension_iterations") else "the run"
    return f"in the last {constants.get('warmdown_frac', 0):.0%} of {whole} lr_factor falls to {floor:g}"


def weights_text(value: Any) -> str:
    """A column of a stage; loss weights as 1,0.5,0.25:0, where 0.25:0 falls from 0.25 to 0."""
    if not isinstance(value, tuple):
        return str(value)
    pairs = value if isinstance(value[0], tuple) else (value,)
    return ",".join([f"{first:g}" if first == last else f"{first:g}:{last:g}" for first, last in pairs])


def stage_lines(cfg: Any) -> Iterator[str]:
    """Yields the table of stages, with a row wherever a column changes; steps assume no time cap."""
    last = total_steps(cfg)
    T = cfg.train_seq_len
    rows = [(step, stage_at(cfg, step / last), lr) for step, lr in lr_marks(cfg).items()]
    stages = cfg.stages()
    more = []
    for name in STAGE_COLUMNS:
        if hasattr(stages[0], name) and len({getattr(stage, name) for stage in stages}) > 1:
            more.append(name)
    windows = [*windows_of(cfg, rows[0][1], T)]
    yield " ".join(["stage table: from_step tokens_per_step row_tokens", *windows, "lr_factor", *more])
    for step, stage, lr in rows:
        line = f"{step:22} {stage.batch_tokens:15} {stage.row_tokens:10}"
        for name, size in windows_of(cfg, stage, stage.row_tokens).items():
            line += f" {size:{len(name)}}"
        line += f" {lr:9.4f}"
        for name in more:
            line += f" {weights_text(getattr(stage, name)):>{len(name)}}"
        yield line
    yield f"warmdown: {warmdown_text(cfg)}"
    context = cfg.eval_context or T
    line = f"evaluation: {cfg.val_tokens or 'all'} val tokens, rows of {context}"
    sizes = windows_of(cfg, None, context)
    yield f"{line}, {listed(sizes)}" if sizes else line
