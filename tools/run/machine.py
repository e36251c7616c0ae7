"""What a run finds around it: its launcher, its ranks, their share of memory and CPUs."""
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data.inputs import usable_cpus
from tools.run.surroundings import words_of
from train_gpt import Team, require

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # which torchrun numbers
# How Slurm, Open MPI and MPICH number their tasks: (this one, how many there are)
TASKS = (("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
         ("PMI_RANK", "PMI_SIZE"))
OWN_CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


class Machine(NamedTuple):
    """What a rank trains on, with what the trainer's Loader asks of a Team."""
    world_size: int
    on_gpu: bool
    device: torch.device
    dtype: torch.dtype  # of activations
    free: int  # bytes of memory that this rank may take
    threads: int
    rank: int = 0


def check_launch(env: Mapping[str, str]) -> None:
    """Raises Refused for one of several tasks that would each train alone, as it lacks RANK or WORLD_SIZE.
    Whether these fit together, the trainer tells."""
    numbers = [f"{name}={env[name]}" for name in RANKS if name in env]
    for number in numbers:
        require(re.fullmatch("[A-Z_]+=[0-9]{1,6}", number), f"{number[:40]!a} must be a whole number")
    if numbers:
        for name in ("RANK", "WORLD_SIZE"):
            require(name in env, f"{name} is missing beside {' '.join(numbers)}: torchrun "
                    "--nproc_per_node=GPUS sets both; a run of one process needs neither")
        return
    for task, tasks in TASKS:
        count = env.get(tasks, "")
        if tasks == "SLURM_NTASKS":  # an allocation may have more tasks than this step of it
            count = env.get("SLURM_STEP_NUM_TASKS", count)
        require(task not in env or not count.isdecimal() or int(count) < 2,
                f"{tasks}={count} tasks without RANK and WORLD_SIZE would each train alone: let one task "
                "per node start torchrun --nproc_per_node=GPUS, which sets both, or set RANK=0 WORLD_SIZE=1")


def memory_limit() -> int:
    """Bytes of memory that this process and its children may use: the machine's, or less by its cgroup."""
    least = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    own = [word.removeprefix("0::/") for word in words_of(OWN_CGROUP) if word.startswith("0::/")]
    for place in own:
        folder = CGROUPS / place.replace("../", "")
        for parent in (folder, *folder.parents):
            limits = [int(word) for word in words_of(parent / "memory.max") if word.isdecimal()]
            least = min([least, *limits])
    return least


def find_machine(cfg: Any, env: Mapping[str, str], ranks: int) -> Machine:
    """The machine, for this many ranks on it. Raises Refused."""
    others = {name: text for name, text in env.items() if name not in RANKS}
    team = Team(cfg, others)  # of one rank: its device and dtype
    sequences = cfg.train_batch_tokens // cfg.train_seq_len
    require(sequences % ranks == 0 or cfg.eval_from,
            f"{ranks} ranks do not divide the {sequences} sequences of a step")
    free = memory_limit() // 2 // ranks
    if team.on_gpu:
        gpus = torch.cuda.device_count()
        require(ranks <= gpus, f"{ranks} ranks for {gpus} GPUs here: ask for fewer, or use DEVICE=cpu")
        free = min([torch.cuda.mem_get_info(n)[0] for n in range(ranks)])
    threads = min(torch.get_num_threads(), usable_cpus())
    return Machine(ranks, team.on_gpu, team.device, team.dtype, free, threads)
