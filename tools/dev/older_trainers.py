"""Trainers of older checkouts, for `bench --arm before=PATH`: how each generation is put together, warmed up
and stepped. Generations, newest first: recipes with a Saver (until 3cbf1f7), one class for all presets, and
before that models that are told their context.
"""
import inspect
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

COMPANIONS = ("core", "dial", "faults", "golf", "kernels", "plan")  # files that some of them import


def is_older(trainer: ModuleType) -> bool:
    """Is this a train_gpt.py from before the trainer was split from what runs around it?"""
    return not hasattr(trainer, "warm_up")


def names_of(trainer: ModuleType) -> set[str]:
    """The names of its constants, as the environment has them."""
    return set(trainer.NAMES)


def kernels_of(trainer: ModuleType, cfg: Any, team: Any, log: Any) -> tuple[Any, ...]:
    """What GPT takes besides cfg and dtype: nothing, functions, or one tuple of them."""
    kernels = trainer.fast_kernels(cfg, team, log) if hasattr(trainer, "fast_kernels") else ()
    return (kernels,) if hasattr(trainer, "Fast") else kernels


def assemble(cfg: Any, trainer: ModuleType, team: Any, data: Any, loader: Any, log: Any) -> Any:
    """A run with its model and optimizer; nothing is compiled yet."""
    if hasattr(trainer, "check_slots") and cfg.sdpa_backend == "flash4":
        trainer.check_slots(cfg, loader.packer)
    micro = trainer.micro_batch(cfg, team)
    if hasattr(trainer, "Run"):
        run = trainer.Run(cfg, cfg, team, log, None, "", data, loader, micro)
        run.kernels = trainer.choose_kernels(cfg, team.on_gpu, log)
        with team.device:  # also what is no module's state, such as delayed scales
            if hasattr(trainer, "RECIPES"):
                model = cfg.make_model(run.kernels)
            else:
                model = trainer.GPT(cfg, run.kernels)
    else:
        run = SimpleNamespace(cfg=cfg, team=team, loader=loader, micro=micro, log=log)
        model = trainer.GPT(cfg, team.dtype, *kernels_of(trainer, cfg, team, log))
    run.model = model.to(team.device)
    options = {}
    if hasattr(trainer, "init_parameters"):
        trainer.init_parameters(model, cfg.seed)
    elif team.on_gpu:
        options = dict(dtype=team.dtype)
    if "muon_dtype" in inspect.signature(trainer.Optimizer).parameters:
        options["muon_dtype"] = team.dtype
    make_optimizer = cfg.optimizer() if hasattr(cfg, "optimizer") else trainer.Optimizer
    run.optimizer = make_optimizer(run.model, cfg, team.rank, team.world_size, **options)
    return run


def warm_up(run: Any, trainer: ModuleType) -> float:
    """Compiles the step, makes some on dummy tokens, counts n-grams -> seconds without those of counting."""
    cfg = run.cfg
    loader = run.loader
    began = time.perf_counter()
    if hasattr(trainer, "Run"):
        trainer.rehearse(run)
    else:
        run.loss_fn = trainer.rehearse(cfg, run.team, run.model, run.optimizer, run.micro, run.log)
    seconds = time.perf_counter() - began
    if hasattr(run.model, "build"):
        older = "loader" in inspect.signature(run.model.build).parameters
        run.model.build(*((loader, run.log) if older else (run, True)))
    elif any(getattr(cfg, "count_orders", ())):
        run.model.counts.count(np.concatenate(loader.shards))
    return seconds


def step_function(trainer: ModuleType, run: Any, stage: Any = None) -> Callable[[tuple[Any, ...]], None]:
    """A function that makes a step on a batch, as the training loop does. stage: None: the first one; before
    there were stages, the last window."""
    cfg = run.cfg
    if not hasattr(cfg, "stages"):
        return step_without_stages(trainer, run)
    stage = stage or cfg.stages()[0]
    micro = run.micro * cfg.train_seq_len // stage.row_tokens
    schedule: tuple[Any, ...] = (1.0, cfg.muon_momentum, 1.0)
    if hasattr(trainer, "UpdateState"):
        schedule = (trainer.Schedule(1.0, cfg.muon_momentum),)
    factor = stage.batch_tokens / cfg.loss_sum_ranks if cfg.loss_sum_ranks else 1

    def step(batch: tuple[Any, ...]) -> None:
        context = run.model.training_context(stage.row_tokens, run.team.device, run.team.dtype, stage)
        batch = (*batch, *run.model.candidates(*batch))
        trainer.train_step(run.loss_fn, run.optimizer, batch, micro, context, factor, *schedule)

    return step


def step_without_stages(trainer: ModuleType, run: Any) -> Callable[[tuple[Any, ...]], None]:
    """step_function() of checkouts with one class for all presets."""
    cfg = run.cfg
    momentum = cfg.muon_momentum
    T = cfg.train_seq_len
    window = cfg.window_schedule[-1]
    if not hasattr(trainer, "Run"):
        run.model.set_context(T, window)
        return lambda batch: trainer.train_step(run.loss_fn, run.optimizer, batch, run.micro, 1.0, momentum)

    def step(batch: tuple[Any, ...]) -> None:
        context = trainer.make_context(cfg, T, window, run.team.device, run.team.dtype)
        factors = [1.0, momentum]
        if hasattr(trainer, "decay_factor"):
            tokens = batch[0].numel() * run.team.world_size
            factors = [tokens / cfg.loss_sum_ranks if cfg.loss_sum_ranks else 1, *factors, 1.0]
        if hasattr(run.model, "candidates"):
            batch = (*batch, *run.model.candidates(*batch))
        trainer.train_step(run.loss_fn, run.optimizer, batch, run.micro, context, *factors)

    return step
