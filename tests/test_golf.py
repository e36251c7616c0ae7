"""golf_plus's sliding rows, which test_eval.py compares with a reference by their stride."""
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import train_gpt
from helpers import fake_team, toy_config
from test_model import randomised
from train_gpt import preset_config

pytestmark = pytest.mark.usefixtures("one_thread")
T = 16
V = 64
BOS = 1


@pytest.fixture(scope="module")
def cfg(tiny_data):
    return toy_config(tiny_data, vocab_size=V, train_seq_len=T, train_batch_tokens=4 * T, bos_id=BOS,
                      val_tokens=0)


@pytest.fixture(scope="module")
def stream():
    """Documents of 1 to 40 tokens; the first one has lost its beginning."""
    tokens = np.random.default_rng(3).integers(2, V, 260).astype(np.uint16)
    tokens[[7, 8, 20, 60, 61, 95, 130, 150, 190, 207, 240]] = BOS
    return tokens


def nats_of(cfg, model, tokens, name, team=None):
    if name == "sliding":
        cfg = replace(cfg, eval_stride=cfg.eval_sliding)
    return train_gpt.plain_nats(model, cfg, tokens, team or fake_team())


def test_sliding_rows_are_scored_by_the_compiled_step_of_plain_ones(cfg, stream, monkeypatch):
    """On a GPU, whose batches all have one shape, and with the same nats as eagerly."""
    shapes = []

    def compiled(function, dynamic=False):
        def call(model, tokens, *more):
            if not dynamic:
                shapes.append(tuple(tokens.shape))
            return function(model, tokens, *more)
        return call

    monkeypatch.setattr(train_gpt, "compile_once", compiled)
    cfg = replace(cfg, eval_sliding=4, compile=True, val_batch_size=5 * T)
    model = randomised(cfg)
    want = nats_of(cfg, model, stream, "sliding")
    assert shapes == []
    team = fake_team()
    team.on_gpu = True
    for protocol in ("plain", "sliding"):
        got = nats_of(cfg, model, stream, protocol, team=team)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert {*shapes} == {(5, T)} and len(shapes) > 15


def test_rows_of_several_settings(cfg):
    """A stride beyond the row is the row, so that TRAIN_SEQ_LEN can be lowered alone on a preset that has
    sliding rows."""
    plain, as_row, beyond = (train_gpt.evaluation_rows(cfg, 260, stride) for stride in (0, T, 1000))
    assert plain == as_row == beyond != train_gpt.evaluation_rows(cfg, 260, 4)


def test_presets_that_ask_for_the_sliding_score():
    """golf_plus, whose record has it, and no other."""
    asked = [preset for preset in train_gpt.RECIPES
             if train_gpt.sliding_score in preset_config(preset).evaluations()]
    assert asked == ["golf_plus"]
    for preset in ("tiny", "golf_plus"):
        cfg = preset_config(preset, dict(eval_sliding=32))
        assert cfg.evaluations() == [train_gpt.sliding_score] and cfg.evaluations(step=1) == []


def test_the_sliding_score(cfg, stream, tiny_data):
    """The sums over the targets and the bytes of the text, as evaluate finds them with a stride. Of a part of
    the split there are no bits per byte; of a loss that is not finite there is no score."""
    data = train_gpt.open_data(toy_config(tiny_data), lambda *lines: None)
    data = data._replace(val=stream[:16 + 4 * 30 + 1], val_bytes=100, bos=BOS)
    cfg = replace(cfg, eval_sliding=4)
    model = randomised(cfg)
    lines = []
    found = train_gpt.sliding_score(model, cfg, data, fake_team(), lines.append)
    assert lines[0] == "evaluating sliding" and len(lines) == 2
    score = train_gpt.evaluate(model, replace(cfg, eval_stride=4), data, fake_team())
    assert found["val_loss_sliding"] == pytest.approx(score.val_loss, rel=1e-6)
    assert found["val_bpb_sliding"] == pytest.approx(score.val_bpb, rel=1e-6)
    assert lines[-1] == (
        f"final_sliding val_loss_sliding:{found['val_loss_sliding']:.8f} "
        f"val_bpb_sliding:{found['val_bpb_sliding']:.8f} eval_time:{found['eval_sliding_ms']}ms")
    part = train_gpt.sliding_score(model, replace(cfg, val_tokens=50), data, fake_team(), lines.append)
    assert part["val_bpb_sliding"] is None and part["val_loss_partial_sliding"] > 0
    with torch.no_grad():
        model.embed.fill_(math.nan)
    assert train_gpt.sliding_score(model, cfg, data, fake_team(), lines.append) == {}
    assert lines[-1] == "final_sliding: the loss is nan, so there is no score"
