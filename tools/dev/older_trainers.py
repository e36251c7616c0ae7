"""Trainers from before what runs around them was split off (until 3cbf1f7), for `bench --arm before=PATH`:
how they are put together, warmed up and stepped.
"""
from collections.abc import Callable
from types import ModuleType
from typing import Any


def is_older(trainer: ModuleType) -> bool:
    return not hasattr(trainer, "warm_up")


def assemble(cfg: Any, trainer: ModuleType, team: Any, data: Any, loader: Any, log: Any) -> Any:
    """A run with its model; nothing is compiled yet."""
    run = trainer.Run(cfg, cfg, team, log, None, "", data, loader, trainer.micro_batch(cfg, team))
    run.kernels = trainer.choose_kernels(cfg, team.on_gpu, log)
    with team.device:  # also what is no module's state, such as delayed scales
        run.model = cfg.make_model(run.kernels)
    return run


def optimizer_of(cfg: Any, trainer: ModuleType) -> Any:
    """What makes a recipe's optimizer. The last records' trainers have one for all."""
    return cfg.optimizer() if hasattr(cfg, "optimizer") else trainer.Optimizer


def step_function(trainer: ModuleType, run: Any, stage: Any) -> Callable[[tuple[Any, ...]], None]:
    """A function that makes a step of a stage on a batch, as the training loop does."""
    cfg = run.cfg
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
