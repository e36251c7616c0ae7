"""The speedrun preset: columns of the table of stages that are overridden, a scaled run with every part
of it. That documents do not see each other: test_golden.py, test_kernels.py."""

import json
import math
import random

import numpy as np
import pytest
import torch

import train_gpt
from helpers import fake_team, init_parameters, library_documents, write_shard
from train_gpt import load_config, preset_config

SPEEDRUN = preset_config("speedrun")

pytestmark = pytest.mark.usefixtures("one_thread")


# -------------------------------------------------------------------------------- schedules
def test_columns_of_the_table_are_overridden():
    """The others stay; a column of one entry serves every stage; what is off."""
    off = {"PRESET": "speedrun", "LR_SCHEDULE": "1.5", "LR_SWITCHES": "0", "ITERATIONS": "24"}
    cfg = load_config(off | {"BATCH_SCHEDULE": "2", "SEQ_SCHEDULE": "1", "EXTENSION_ITERATIONS": "4"})
    rows = cfg.stages()
    assert [row.first_step for row in rows] == [0, 8, 16, 24]
    assert [row.window for row in rows] == [384, 896, 1408, 1664]
    assert {row.row_tokens for row in rows} == {16_384}
    assert {row.batch_tokens for row in rows} == {262_144}
    assert {cfg.top_lr(part / 9) for part in range(10)} == {1.5}
    cfg = load_config(off | {"EXTENSION_ITERATIONS": "0", "EVAL_WINDOW": "0", "WINDOW_SCHEDULE": "512"})
    assert {row.window for row in cfg.stages()} == {512}
    assert tuple(cfg.windows(None, 16_384).values()) == (512, 256)
    cfg = load_config({"PRESET": "speedrun", "LR_SCHEDULE": "2,3", "LR_SWITCHES": "0,0.5"})
    assert [cfg.top_lr(step / 2160) for step in (0, 1059, 1060, 2159)] == [2, 2, 3, 3]


# -------------------------------------------------------------------------------- a scaled run
BOS = 256  # after the 256 bytes that are the other tokens of the toy data
SCALED = dict(
    PRESET="speedrun", COMPILE="0", DEVICE="cpu", DTYPE="float32", DATA_PATH="data/datasets/bytes",
    VOCAB_SIZE="272", NUM_LAYERS="6", MODEL_DIM="32", NUM_HEADS="2", TRAIN_SEQ_LEN="128",
    TRAIN_BATCH_TOKENS="512", MAX_DOC_LEN="80", EVAL_CONTEXT="256",
    VALUE_EMBED_LAYERS="0,1,2,0,1,2", WINDOW_PATTERN="0SL-SL", SKIP_LAYERS="2,3",
    BACKOUT_LAYER="4", WINDOW_SCHEDULE="12,28,44,52", WINDOW_BLOCK="4", EVAL_WINDOW="80", ITERATIONS="24",
    EXTENSION_ITERATIONS="4", MUON_MOMENTUM_WARMUP_STEPS="6", MUON_MOMENTUM_COOLDOWN_STEPS="4",
    VAL_TOKENS="3000", VAL_LOSS_EVERY="7", TRAIN_LOG_EVERY="1")
# first step: tokens of each of the 4 rows, long and short window
STAGES = {0: (128, 12, 4), 8: (256, 28, 12), 16: (384, 44, 20), 24: (384, 52, 24)}
TOKENS = 128 * (8 * 4 + 8 * 8 + 12 * 12)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder to run in: bytes of Python source in documents of one to eight lines, as GPT-2-format shards
    that cut documents anywhere. Their manifest knows the vocabulary and the BOS, and no tokenizer."""
    folder = tmp_path_factory.mktemp("speedrun")
    rng = random.Random(0)
    lines = "".join(library_documents(150_000)).splitlines(keepends=True)
    tokens = []
    while lines:
        count = rng.randrange(1, 9)
        tokens += [BOS, *"".join(lines[:count]).encode()]
        del lines[:count]
    data = folder / "data/datasets/bytes"
    splits = {"val_000000": tokens[:8000], "train_000001": tokens[8000:30_011],
              "train_000002": tokens[30_011:]}
    files = [write_shard(data / f"fineweb_{name}.bin", part) | {"split": name.split("_")[0]}
             for name, part in splits.items()]
    manifest = {"files": files, "tokenizer": {"vocab_size": 257, "bos_id": BOS}}
    (data / "manifest.json").write_text(json.dumps(manifest))
    return folder


def stage_of(step):
    return STAGES[max(start for start in STAGES if start <= step)]


def tokens_of(root, name):
    return np.fromfile(root / f"data/datasets/bytes/fineweb_{name}.bin", "<u2", offset=1024)


def test_the_scaled_run(root, train, monkeypatch):
    """Windows, batches, gradients of the summed loss, LR factor, momentum and decay of each step; each window
    is run before the clock; validation has the window of its step, the last one that of evaluation, which
    EVAL_FROM finds again, though the train tokens would not do for the schedule; the tokens that were planned
    were read."""
    steps = []
    contexts = []
    real_step = train_gpt.train_step
    real_context = train_gpt.SpeedrunModel.context

    def train_step(loss_fn, optimizer, batch, micro, context, grad_factor, schedule):
        steps.append((batch[0].shape, context.windows["L"], context.windows["S"], grad_factor, *schedule))
        return real_step(loss_fn, optimizer, batch, micro, context, grad_factor, schedule)

    def noted_context(*args):
        context = real_context(*args)
        contexts.append((len(steps), context.windows["L"], context.windows["S"], torch.is_grad_enabled()))
        return context

    monkeypatch.setattr(train_gpt, "train_step", train_step)
    monkeypatch.setattr(train_gpt.SpeedrunModel, "context", noted_context)
    done = train(SCALED)
    assert done.code == 0, done.err
    warmup = 4      # steps, one of each stage
    assert len(steps) == warmup + 28
    for step, (shape, long, short, grad_factor, lr, momentum, decay, _) in enumerate(steps[warmup:]):
        assert len(shape) == 2 and shape[0] == 4 and (shape[1], long, short) == stage_of(step)
        assert grad_factor == 4 * shape[1] / 8 and decay == lr
        top = (1.0, 1.51, 1.93)[(step >= 0.33 * 24) + (step >= 0.66 * 24)]
        down = min(1, max(0, 1 - (24 - step) / (0.55 * 24)))
        assert lr == pytest.approx(top + (0.1 - top) * down)
        assert momentum == pytest.approx(0.85 + 0.1 * min(1, step / 6, (28 - step) / 4))
    scored = {(step - warmup, long, short) for step, long, short, grad in contexts if not grad}
    assert scored == {(step, *stage_of(step)[1:]) for step in (0, 7, 14, 21)} | {(28, 80, 24)}
    assert {long for step, long, _, grad in contexts if step < warmup and grad} == {12, 28, 44, 52}
    assert done.result["tokens"] == TOKENS and done.result["steps"] == 28 and done.result["val_bpb"] is None
    assert done.losses[1] == pytest.approx(math.log(272), abs=1e-3) and done.losses[28] < done.losses[1] - 1
    again = train(SCALED, EVAL_FROM=f"logs/{done.run_id}/final_model.pt", ITERATIONS="5000")
    assert again.code == 0, again.err
    assert again.result["val_loss_partial"] == pytest.approx(done.result["val_loss_partial"], abs=2e-6)
    assert again.result["eval"] == done.result["eval"]


@pytest.mark.usefixtures("train")
def test_shards_that_run_out(root):
    """The run ends there. Of a document at most 80 tokens are read."""
    shards = tokens_of(root, "train_000001"), tokens_of(root, "train_000002")
    held = sum(int(np.diff(np.flatnonzero(shard == BOS), append=len(shard)).clip(max=80).sum())
               for shard in shards)
    cfg = load_config(SCALED)
    assert train_gpt.Loader(cfg, train_gpt.open_data(cfg), fake_team()).most_tokens == held


def test_a_value_table_is_looked_up_once():
    """Though two layers use it: each look-up has a gradient as large as the table."""
    cfg = preset_config("speedrun", dict(vocab_size=64, train_seq_len=16, train_batch_tokens=16, model_dim=16,
                                         num_heads=2, window_block=4, window_schedule=(8,), eval_window=8,
                                         seq_schedule=(1,), batch_schedule=(1,), stage_starts=(0.0,)))
    model = cfg.make_model()
    init_parameters(model, 1)
    assert len(model.value_embeds) == 3 and sorted(model.tables)[-5:] == [1, 1, 2, 2, 3]
    tokens = torch.arange(16)[None]
    context = model.context(16, tokens.device, torch.float32, cfg.stages()[0])
    with torch.profiler.profile() as found:
        model(tokens, tokens, context).backward()
    counts = {event.key: event.count for event in found.key_averages()}
    assert counts["aten::embedding_dense_backward"] == 1 + 3
