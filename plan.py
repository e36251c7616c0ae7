"""What a run tells of itself: the plan that --dry-run shows and train.log holds, --help, loss.png.

t is the trainer's module.
"""
import math

GPUS = 8


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
        hours = flops / (GPUS * t.H100_FLOPS * c.plan_mfu) / 3600
        yield (f"depth:{depth} parameters:{t.parameter_counts(c).total()} "
               f"flops_per_token:{flops_per_token:.4g} tokens:{tokens} batch:{c.train_batch_tokens} "
               f"steps:{c.iterations} flops:{flops:.4g} hours:{hours:.2f} "
               f"({GPUS}xH100 at mfu {c.plan_mfu:g})")


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
    if cfg.depth and cfg.dry_run:
        yield from miniseries(t, cfg, argv, env)
