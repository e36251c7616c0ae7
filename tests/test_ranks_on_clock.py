"""What two ranks do for the first time on the clock. Every collective of a step must have run before it:
NCCL makes a communicator at its first one, which takes 0.5 to 2.5 s. Python's garbage collector must be off,
as a collection takes up to 0.6 s on all ranks. On a CPU, with a toy of the speedrun."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT, free_port, load_module, planted
from tools.dev import bench
from tools.gpu import parts as gpu_parts

if __name__ == "__main__":
    import torch.distributed as dist


def watch_clock(trainer):
    """Notes which collectives run for the first time while the clock runs, and how often the garbage
    collector does. Returns where the notes are."""
    notes = dict(late=[], collections=0, collectives=0)
    known = set()
    state = dict(running=False)

    def noting(name, real):
        """The collective, which is noted by its name, size, device and group."""

        def call(first, *args, **kwargs):
            group = "training" if kwargs.get("group") is not None else "default"
            size = first.numel() if name != "all_reduce" else ""
            kind = f"{name} {size} on {first.device.type}, {group} group"
            if state["running"]:
                notes["collectives"] += 1
                if kind not in known:
                    notes["late"].append(kind)
            known.add(kind)
            return real(first, *args, **kwargs)

        return call

    def running(real, during):
        def call(*args, **kwargs):
            before = state["running"]
            state["running"] = during
            try:
                return real(*args, **kwargs)
            finally:
                state["running"] = before

        return call

    def collecting(phase, info):
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


def run_as_rank(folder):
    """The toy run of one of two ranks, watched. Rank 0 writes what it noted."""
    trainer = load_module(folder / "train_gpt.py", "train_gpt")
    notes = watch_clock(trainer)
    os.chdir(folder)
    code = trainer.main([], os.environ | json.loads((folder / "settings.json").read_text()))
    if os.environ["RANK"] == "0":
        (folder / "notes.json").write_text(json.dumps(notes))
    return code


WARMUP_STEP = ("        train_step(run.loss_fn, run.optimizer, batch, micro, context, 1.0, "
               "cfg.schedule(0, 0.0))\n")


@pytest.mark.slow
@pytest.mark.parametrize("old, new, late, collected", [
    ("", "", False, False), (WARMUP_STEP, "        batch, micro, context\n", True, False),
    ("    gc.disable()  #", "    gc.set_threshold(1)  #", False, True)],
    ids=["as it is", "a late communicator", "garbage collected"])
def test_nothing_is_done_for_the_first_time_on_the_clock(old, new, late, collected, tmp_path):
    """And both faults are noticed where they are planted."""
    trainer = load_module(planted(tmp_path, old, new), "train_gpt_planted")
    settings = gpu_parts.one_rank_of_eight(trainer, "speedrun", {}, toy=True)
    settings |= dict(ITERATIONS="12", RUN_ID="ranks", TRAIN_BATCH_TOKENS="1024", VAL_LOSS_EVERY="5",
                     TRAIN_LOG_EVERY="4", FP8="off", GRAD_CLIP_NORM="1", MAX_EPOCHS="0")
    settings |= bench.random_data(tmp_path, trainer.load_config(settings), 1 << 16)
    sys.modules.pop("train_gpt_planted")
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    meeting = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(),
                   OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    ranks = []
    for rank in ("0", "1"):
        env = os.environ | meeting | dict(RANK=rank, LOCAL_RANK=rank)
        ranks.append(subprocess.Popen([sys.executable, __file__, tmp_path], env=env, text=True,
                                      stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
    said = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    notes = json.loads((tmp_path / "notes.json").read_text())
    assert notes["collectives"] > 100 and bool(notes["late"]) == late, notes
    assert bool(notes["collections"]) == collected, notes
    assert not late or any("reduce_scatter" in kind for kind in notes["late"])


if __name__ == "__main__":
    sys.exit(run_as_rank(Path(sys.argv[1])))
