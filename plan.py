"""What a run tells of itself: the plan that --dry-run shows and train.log holds, --help, samples, loss.png.

t is the trainer's module.
"""
import math
import re
import resource
import sys

import numpy as np
import torch

GPUS = 8
H100_FLOPS = 989.4e12  # per second, bf16, also an H200: what mfu is a part of
# Ceilings of one Hopper GPU. Measured on an H200 by torch 2.11: a product of 8,192 cubed in bf16, random data
# and a copy, bytes read and written. Not measured, so 80 % of the datasheet's like the first: fp8 and NVLink.
MATMUL, MATMUL_FP8, MEMORY, LINK = 788e12, 1576e12, 4.3e12, 360e9  # FLOP/s, FLOP/s, bytes/s, bytes/s
LEAST_FLOPS = 1e16  # of a run whose roofline is shown: what a GPU does in a minute or two


def help_text(t):
    yield t.__doc__ + "\nNAME=value in the environment or --name=value. [default | presets]"
    for name, (default, doc, *_) in t.FIELDS.items():
        rows = [f"{preset} {t.show(row[name])}" for preset, row in t.PRESETS.items() if name in row]
        yield f"  --{name.replace('_', '-'):28} {doc}  [{' | '.join([t.show(default), *rows])}]"
    yield "Aliases: " + ", ".join(map(" = ".join, t.ALIASES.items()))


def schedules(t, cfg):
    """The run's limits, and its schedules wherever one of them turns, by steps as if there were no cap."""
    last, tokens = t.total_steps(cfg), t.planned_tokens(cfg)

    def windows(window):
        return "long_window:{L} short_window:{S}".format(**t.window_sizes(cfg, window, cfg.train_seq_len))

    yield (f"limits: {last} steps of {tokens} tokens in all, {tokens / last:.0f} per step, "
           f"{cfg.max_wallclock_seconds:g} s (0: none)")
    decay = min(cfg.warmdown_iters, last // 2) or cfg.warmdown_frac * cfg.iterations
    warmup, cooldown = cfg.muon_momentum_warmup_steps, cfg.muon_momentum_cooldown_steps
    marks = {warmup // 2, warmup, last - cooldown, last, math.ceil(cfg.iterations - decay),
             *(math.ceil(part * cfg.iterations) for part in cfg.lr_switches),
             *(stage.first_step for stage in t.stage_table(cfg))}
    for step in sorted(mark for mark in marks if 0 <= mark <= last):
        stage = t.stage_at(cfg, part := step / last)
        yield (f"at step {step} ({part:.1%}): tokens:{cfg.train_batch_tokens * stage.batch_multiple} "
               f"{windows(stage.window)} lr_factor:{t.lr_factor(cfg, step, part):.4f} "
               f"muon_momentum:{t.muon_momentum(cfg, step, part):.4f}")
    yield f"in evaluation: {windows(t.eval_window(cfg))}"


def miniseries(t, cfg, argv, env):
    """What a run takes at the depths 4, 8, … 32 and at this one, but where what was given does not fit."""
    for depth in sorted({*range(4, 33, 4), cfg.depth}):
        try:
            c = t.load_config(env, [*argv, f"--depth={depth}"])
        except t.Refused:
            continue
        tokens, flops_per_token = t.planned_tokens(c), t.flops_per_token(c)
        flops = flops_per_token * tokens
        hours = flops / (GPUS * H100_FLOPS * c.plan_mfu) / 3600
        yield (f"depth:{depth} parameters:{t.parameter_counts(c).total()} "
               f"flops_per_token:{flops_per_token:.4g} tokens:{tokens} batch:{c.train_batch_tokens} "
               f"steps:{c.iterations} flops:{flops:.4g} hours:{hours:.2f} "
               f"({GPUS}xH100 at mfu {c.plan_mfu:g})")


def orthogonalization_flops(t, cfg):
    """Of one step of Muon, all matrices."""
    flops = 0
    with torch.device("meta"):
        for name, p in t.GPT(cfg).named_parameters():
            if t.parameter_rule(name)[0] == "matrix":
                short, long = sorted(p.shape)
                flops += cfg.muon_backend_steps * (4 * short * short * long + 2 * short ** 3)
    return flops


def roofline(t, cfg, gpus, tokens, window):
    """{part: seconds of a step of so many tokens} on so many GPUs, at the ceilings and with nothing hidden
    behind anything else: about the least that it can take. Gradients and weights of some travel while others
    are updated: of optimizer and communication the shorter one can be hidden, no more."""
    counts, C, T = t.parameter_counts(cfg), cfg.model_dim, cfg.train_seq_len
    sizes = t.window_sizes(cfg, window, T)
    seen = [sizes.get(kind, 0) for kind in t.per_layer(cfg.window_pattern, cfg.num_layers)]
    keys = sum(w * (1 - (w - 1) / (2 * T)) for w in seen)  # the mean over a row: its first tokens see fewer
    here, fp8 = tokens / gpus, cfg.fp8.removeprefix("auto-")
    blocks, head = (6 * weights * here for weights in (counts["matrix"], C * cfg.vocab_size))
    adam = (counts.total() - counts["matrix"]) / cfg.adam_every
    # bf16: what is kept for backward is written and read twice; logits and their gradient move six times
    activations = here * (3 * 2 * cfg.num_layers * C * (14 + 3 * cfg.mlp_mult) + 6 * 2 * cfg.vocab_size)
    # fp32: of Adam parameter, gradient, both moments, of Muon the update twice more; read, most of it written
    state = 4 * (8 * adam + 12 * counts["matrix"]) / gpus
    return {
        "blocks": blocks / (MATMUL_FP8 if fp8 == "all" else MATMUL),
        "head": head / (MATMUL if fp8 == "off" else MATMUL_FP8),
        "attention": 12 * C * keys * here / MATMUL,
        "activations": activations / MEMORY,
        "optimizer": state / MEMORY + orthogonalization_flops(t, cfg) / gpus / MATMUL,
        "communication": 2 * 4 * (adam + counts["matrix"]) * (1 - 1 / gpus) / LINK}  # gradients, then weights


def rooflines(t, cfg):
    """Per stage and number of GPUs: the parts, the step, its tok/s per GPU and mfu."""
    stages = dict.fromkeys((s.batch_multiple, s.window) for s in t.stage_table(cfg))
    for gpus, (multiple, window) in ((gpus, stage) for gpus in (1, GPUS) for stage in stages):
        tokens = multiple * cfg.train_batch_tokens
        if tokens // cfg.train_seq_len % gpus == 0:
            parts = roofline(t, cfg, gpus, tokens, window)
            step = sum(parts.values())
            flops = t.flops_per_token(t.replace(cfg, window_schedule=(window,))) * tokens / gpus
            yield (f"roofline {gpus}xH200 tokens:{tokens} long_window:{window or cfg.train_seq_len} "
                   f"ms {t.listed({name: f'{1e3 * part:.2f}' for name, part in parts.items()})} "
                   f"step:{1e3 * step:.2f} tok/s per GPU:{tokens / gpus / step:.0f} "
                   f"mfu:{flops / step / H100_FLOPS:.2f}")


def derived(t, cfg, team, score, curves, report):
    """What follows from a run's report: its FLOPs, its mfu where that has a meaning, its best val_bpb."""
    flops = t.flops_per_token(cfg) * report["tokens"]
    peak = H100_FLOPS * team.world_size * report["train_time_ms"] / 1e3
    best = min(loss for _, _, loss in curves["val"])
    return dict(total_training_flops=flops, mfu=re.search("H[12]00", t.hardware(team)) and flops / peak,
                min_val_bpb=score.val_bpb and score.val_bpb * best / score.val_loss)


def peak_memory(team, log):
    """Logs and returns the most that this process has held."""
    if team.on_gpu:
        used, held = torch.cuda.max_memory_allocated() >> 20, torch.cuda.max_memory_reserved() >> 20
        text = f"peak memory allocated: {used} MiB reserved: {held} MiB"
    else:
        kib = 1024 if sys.platform == "darwin" else 1  # there it is in bytes
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // kib >> 10
        text = f"peak memory resident: {used} MiB"
    log(text)
    return text


def plot_curves(t, curves, title, path, log):
    """A run's loss.png: its losses, {split: [(step, training seconds, loss)]}. A run needs no picture: says
    why where there is none."""
    try:
        from matplotlib.figure import Figure
        figure = Figure()
        axes = figure.subplots()
        for split, points in curves.items():
            _, seconds, losses = zip(*points)
            axes.plot(seconds, losses, ".-", label=split)
        axes.set(xlabel="train_time (s)", ylabel="nats per token", title=title,
                 ylim=(0.9 * losses[-1], 1.9 * losses[-1]))
        axes.legend()
        figure.savefig(path)
    except Exception as error:
        log(f"loss.png: not drawn ({t.brief(error)})")


@torch.no_grad()
def generate(t, model, prompt, count, temperature, top_k=0):
    """prompt and count ids more, each one of the top_k likeliest, 0: all; temperature 0: the likeliest."""
    ids, cfg = list(prompt), model.cfg
    model.set_context(len(ids) + count, t.eval_window(cfg) or cfg.train_seq_len, cache={})
    for _ in range(count):
        scores = model.logits(torch.tensor([ids], device=model.embed.device))[0, -1].cpu()
        best, which = scores.topk(min(top_k or len(scores), len(scores)) if temperature else 1)
        ids.append(which[torch.multinomial((best / max(temperature, 1e-6)).softmax(-1), 1)].item())
    model.cache = None
    return ids


def show_samples(t, model, cfg, data, log):
    """Logs how the model goes on with cfg.sample's prompts, or with the beginnings of three val documents."""
    if not (sp := data.tokenizer):
        return log("samples: none without a tokenizer")
    starts = np.flatnonzero(data.val == data.bos)
    prompts = [data.val[i:i + 24].tolist() for i in starts[::len(starts) // 3 + 1]]
    if cfg.sample:
        prompts = [[data.bos, *sp.encode(prompt)] for prompt in cfg.sample.split("|")]
    torch.manual_seed(cfg.seed)
    for i, prompt in enumerate(prompts if cfg.sample_tokens else (), 1):
        ids = generate(t, model, prompt, cfg.sample_tokens, cfg.sample_temperature, cfg.sample_top_k)
        ids = [i for i in ids if i < sp.vocab_size()]  # the rest is padding of the vocabulary
        text = sp.decode(prompt)
        log(f"sample {i}: {text}»{sp.decode(ids)[len(text):]}")


def lines(t, cfg, team, micro, argv, env):
    """Size, cost and memory of the run, its schedules, and the miniseries of a run by depth."""
    counts, flops = t.parameter_counts(cfg), t.flops_per_token(cfg)
    batch, T = cfg.train_batch_tokens, cfg.train_seq_len
    yield f"parameters:{counts.total()} ({t.listed(counts)})"
    yield f"matmul FLOPs per token:{flops:.4g} per step:{flops * batch:.4g}"
    yield (f"world_size:{team.world_size} device:{team.device.type} activations:{str(team.dtype)[6:]} "
           f"micro_batch:{micro}x{T} grad_accum_steps:{batch // T // team.world_size // micro} "
           f"memory:{t.step_memory(cfg, team, micro) >> 20} MiB (estimate)")
    yield from schedules(t, cfg)
    if cfg.dry_run and flops * t.planned_tokens(cfg) > LEAST_FLOPS:
        yield from rooflines(t, cfg)
    if cfg.depth and cfg.dry_run:
        yield from miniseries(t, cfg, argv, env)
