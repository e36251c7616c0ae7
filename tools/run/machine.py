"""What a run finds around it: its launcher, its ranks, their share of memory and CPUs."""
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from data.inputs import usable_cpus
from tools.run.surroundings import cgroup_folders, words_of
from train_gpt import Team, require

LAUNCH_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
# How Slurm, Open MPI and MPICH number their tasks: (this one, how many there are)
TASKS = (("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
         ("PMI_RANK", "PMI_SIZE"))


class Launch(NamedTuple):
    """What the variables of a launcher say."""
    world_size: int
    ranks_here: int  # on this machine


class Machine(NamedTuple):
    """What a rank trains on, with what the trainer's Loader asks of a Team."""
    world_size: int
    ranks_here: int  # ranks on this machine
    on_gpu: bool
    device: torch.device
    dtype: torch.dtype  # of activations
    free: int  # bytes of memory that this rank may take
    threads: int
    rank: int = 0


# ---------------------------------------------------------------- launchers
def read_launch(env: Mapping[str, str]) -> Launch | None:
    """What torchrun, or a launcher that sets the same variables, says about this process; None: there is
    none. Raises Refused for what the trainer could not use."""
    numbers = {}
    for name in LAUNCH_NUMBERS:
        if name in env:
            text = env[name]
            require(re.fullmatch("[0-9]{1,6}", text), f"{name}={text[:40]!r} must be a whole number")
            numbers[name] = int(text)
    port = numbers.pop("MASTER_PORT", 1)
    require(0 < port < 65_536, f"MASTER_PORT={port} must be from 1 to 65535")
    if not numbers:
        refuse_lone_tasks(env)
        return None
    told = " ".join([f"{name}:{number}" for name, number in numbers.items()])
    for name in ("RANK", "WORLD_SIZE"):
        require(name in numbers,
                f"{name} is missing beside {told}: torchrun --nproc_per_node=GPUS sets both; "
                "a run of one process needs neither")
    world_size = numbers["WORLD_SIZE"]
    ranks_here = numbers.get("LOCAL_WORLD_SIZE", world_size)
    right = numbers["RANK"] < world_size and 0 < ranks_here <= world_size
    right = right and numbers.get("LOCAL_RANK", 0) < ranks_here
    require(right, f"no such rank, as they count from 0: {told}")
    require(world_size == 1 or env.get("MASTER_ADDR") and "MASTER_PORT" in env,
            f"{world_size} ranks need MASTER_ADDR and MASTER_PORT, where they meet")
    return Launch(world_size, ranks_here)


def refuse_lone_tasks(env: Mapping[str, str]) -> None:
    """Raises Refused for one of several tasks, each of which would train alone as it lacks RANK."""
    for task, tasks in TASKS:
        count = env.get(tasks, "")
        if tasks == "SLURM_NTASKS":  # an allocation may have more tasks than this step of it
            count = env.get("SLURM_STEP_NUM_TASKS", count)
        require(task not in env or not count.isdecimal() or int(count) < 2,
                f"{tasks}={count} tasks without RANK and WORLD_SIZE would each train alone: let one task "
                "per node start torchrun --nproc_per_node=GPUS, which sets both, or set RANK=0 WORLD_SIZE=1")


# ---------------------------------------------------------------- the machine
def memory_limit() -> int:
    """Bytes of memory that this process and its children may use: the machine's, or less by its cgroup."""
    least = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder in cgroup_folders("memory"):
        limits = words_of(folder / "memory.max") + words_of(folder / "memory.limit_in_bytes")
        least = min([least, *[int(limit) for limit in limits if limit.isdecimal()]])
    return least


def find_machine(cfg: Any, env: Mapping[str, str], ranks: int = 0) -> Machine:
    """The machine, for this many ranks on it; 0: as the launcher says that started this process, else one on
    each GPU if they divide a step, else one. Raises Refused."""
    launch = read_launch(env)
    others = {name: text for name, text in env.items() if name not in LAUNCH_NUMBERS}
    team = Team(cfg, others)  # of one rank: its device and dtype
    gpus = torch.cuda.device_count() if team.on_gpu else 0
    sequences = cfg.train_batch_tokens // cfg.train_seq_len
    if ranks:
        launch = Launch(ranks, ranks)
    elif not launch and gpus and sequences % gpus == 0:
        launch = Launch(gpus, gpus)
    elif not launch:
        launch = Launch(1, 1)
    require(sequences % launch.world_size == 0 or cfg.eval_from,
            f"{launch.world_size} ranks do not divide the {sequences} sequences of a step")
    require(not team.on_gpu or launch.ranks_here <= gpus, f"{launch.ranks_here} ranks for {gpus} GPUs here: "
            "lower --nproc_per_node or use DEVICE=cpu")
    if team.on_gpu:
        free = min([torch.cuda.mem_get_info(n)[0] for n in range(launch.ranks_here)])
    else:
        free = memory_limit() // 2 // launch.ranks_here
    threads = min(torch.get_num_threads(), usable_cpus())
    return Machine(*launch, team.on_gpu, team.device, team.dtype, free, threads)
