"""What two ranks do for the first time on the clock. Every collective of a step must have run before it: NCCL
makes a communicator at its first one, which takes 0.5 to 2.5 s. On a CPU, with a toy of the speedrun. That
Python's garbage collector is off: test_clock.py."""

import json
import os
import re

import pytest
import torch.distributed as dist

import fork_server
import train_gpt
from conftest import rank_environments
from helpers import ROOT, planted, toy_of

TOY = toy_of("speedrun", ITERATIONS="12", VAL_LOSS_EVERY="5", TRAIN_LOG_EVERY="4", GRAD_CLIP_NORM="1",
             MAX_EPOCHS="0", SEQ_SCHEDULE="1", RUN_ID="ranks", MAX_DOC_LEN="48", EVAL_CONTEXT="0",
             WINDOW_BLOCK="8", WINDOW_SCHEDULE="16,64,64,64", EVAL_WINDOW="64")
MAIN = "import sys, test_ranks_on_clock; sys.exit(test_ranks_on_clock.watched_run())"


def watch_clock():
    """Notes every collective, and those that run for the first time while the clock runs."""
    notes = dict(late=[], collectives=0)
    known = set()
    on_clock = [False]

    def noting(name, real):
        """The collective, which is noted by its name, size and group."""
        def call(first, *args, **kwargs):
            size = first.numel() if name != "all_reduce" else ""
            kind = f"{name} {size}, {kwargs.get('group')}"
            notes["collectives"] += 1
            if on_clock[-1] and kind not in known:
                notes["late"].append(kind)
            known.add(kind)
            return real(first, *args, **kwargs)
        return call

    def with_clock(real, runs):
        def call(*args, **kwargs):
            on_clock.append(runs)
            try:
                return real(*args, **kwargs)
            finally:
                on_clock.pop()
        return call

    train_gpt.reduce_scatter = noting("reduce_scatter", train_gpt.reduce_scatter)
    train_gpt.all_gather = noting("all_gather", train_gpt.all_gather)
    dist.all_reduce = noting("all_reduce", dist.all_reduce)
    train_gpt.train = with_clock(train_gpt.train, True)
    for name in ("validate", "save_checkpoint", "save_weights"):
        setattr(train_gpt, name, with_clock(getattr(train_gpt, name), False))
    return notes


def watched_run():
    """The toy run of one of two ranks, in the current folder. Prints what it noted."""
    notes = watch_clock()
    code = train_gpt.main([], os.environ)
    print("\nnotes " + json.dumps(notes))
    return code


WARMUP_STEP = """        train_step(run.loss_fn, run.optimizer, batch, micro, context, 1.0,
                   cfg.schedule(stage.first_step, stage.begins))
"""


@pytest.mark.slow
@pytest.mark.parametrize("old, new, late", [
    ("", "", False), (WARMUP_STEP, "        batch, micro, context\n", True)],
    ids=["as it is", "a late communicator"])
def test_nothing_is_done_for_the_first_time_on_the_clock(old, new, late, tiny_data, tmp_path):
    """And the fault is noticed where it is planted."""
    planted(tmp_path, old, new)
    (tmp_path / "data").symlink_to(tiny_data / "data")
    places, store = rank_environments(2)
    env = TOY | dict(PATH=os.environ["PATH"], OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="",
                     PYTHONPATH=f"{tmp_path}:{ROOT / 'tests'}:{ROOT}")
    with open(tmp_path / "said", "w+") as said:
        ranks = [fork_server.popen(["-c", MAIN], tmp_path, env | place, said, said) for place in places]
        assert [rank.wait() for rank in ranks] == [0, 0], (tmp_path / "said").read_text()
        words = (tmp_path / "said").read_text()
    notes = [json.loads(text) for text in re.findall("(?m)^notes (.*)$", words)]
    assert len(notes) == 2 and notes[0]["collectives"] > 100
    assert all(bool(its["late"]) == late for its in notes), notes
    assert not late or any("reduce_scatter" in kind for kind in notes[0]["late"])
