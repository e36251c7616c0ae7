"""golf_plus's named scores: each protocol scores every token once, by what its row has shown; test-time
training looks only back; the leak probe finds protocols that peek."""
import importlib.util
from collections import namedtuple
from dataclasses import replace

import numpy as np
import pytest
import torch

import train_gpt
from helpers import SCRIPT, fake_team, slow, slow_but, toy_config
from test_eval import CPU, randomised
from train_gpt import log_probs, preset_config
from verify import leak_probe

pytestmark = pytest.mark.usefixtures("one_thread")
T, V, BOS = 16, 64, 1
PROTOCOLS = {
    "sliding": dict(eval_sliding=4), "ttt": dict(eval_ttt=40, eval_ttt_lr=0.5)}


Row = namedtuple("Row", "low first last")


def rows_of(cfg, name, count):
    stride = cfg.eval_stride
    if name != "plain" and cfg.eval_sliding:
        stride = cfg.eval_sliding
    return [Row(*row) for row in train_gpt.evaluation_rows(cfg, count, stride)]


def team_of(rank=0, ranks=1):
    team = fake_team(rank, ranks)
    team.dtype = torch.float32
    return team


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


def nats_of(cfg, model, tokens, name, module=train_gpt, team=None):
    return module.target_nats(model, cfg, tokens, name, team or team_of())


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
    team = team_of()
    team.on_gpu = True
    for protocol in ("plain", "sliding"):
        got = nats_of(cfg, model, stream, protocol, team=team)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert {*shapes} == {(5, T)} and len(shapes) > 15


@pytest.mark.parametrize("changes, refused", [
    (dict(), False), (dict(eval_sliding=64, eval_ttt=65_536), False), (dict(eval_sliding=4), True),
    (dict(eval_sliding=4, artifact_bytes_limit=0), False), (dict(eval_sliding=7, eval_ttt=65_536), True),
    (dict(eval_sliding=7), False), (dict(eval_sliding=1, val_tokens=100_000), False)])
def test_scores_that_cannot_end_within_the_game_are_refused(changes, refused):
    """Of the 40.5 million tokens of golf's validation text, before training; the preset's own are not."""
    cfg = preset_config("golf_plus", changes)
    data = namedtuple("Data", "val")(range(40_540_160))
    if not refused:
        return cfg.check_data(data)
    with pytest.raises(train_gpt.Refused, match="the game allows 600: raise eval_sliding"):
        cfg.check_data(data)


@pytest.mark.parametrize("seconds", [600, 600.5])
def test_the_last_second_of_the_game_counts(seconds, monkeypatch):
    cfg = preset_config("golf_plus", dict(eval_sliding=64, eval_ttt=0))
    flops = seconds * train_gpt.MOST_SCORING_PART * 8 * train_gpt.H100_FLOPS
    monkeypatch.setattr(train_gpt, "scoring_flops", lambda *asked: flops)
    data = namedtuple("Data", "val")(range(100_000))
    if seconds == 600:
        return cfg.check_data(data)
    with pytest.raises(train_gpt.Refused, match="more than 600 s on 8 H100"):
        cfg.check_data(data)


def test_how_long_a_score_takes_is_said_before(cfg, stream, tiny_data):
    """Rows overlap; test-time training costs three times as much for each token."""
    per_token = train_gpt.flops_per_token(cfg)
    wide = replace(cfg, eval_sliding=4)
    assert train_gpt.scoring_flops(cfg, "plain", 160) == pytest.approx(160 * per_token / 3)
    assert train_gpt.scoring_flops(wide, "sliding", 160) == pytest.approx((1 + 36) * 16 * per_token / 3)
    more = train_gpt.scoring_flops(wide, "ttt", 160) - train_gpt.scoring_flops(wide, "sliding", 160)
    assert more == pytest.approx(160 * per_token)
    data = train_gpt.open_data(toy_config(tiny_data), lambda *lines: None)
    lines = []
    data = data._replace(val=stream, val_bytes=100, bos=BOS)
    train_gpt.named_scores(randomised(wide), wide, data, team_of(), lines.append)
    assert lines[0] == "evaluating sliding" and lines[1] == "sliding: about 0 s (estimate)"


@torch.no_grad()
def one_by_one(cfg, model, tokens, rows):
    """Nats of each row's targets, one forward for each, from what precedes it in the row alone."""
    nats = np.zeros(len(tokens))
    for row in rows:
        for i in range(row.first, row.last + 1):
            seen = torch.from_numpy(tokens[row.low:i].astype(np.int64))[None]
            context = model.context(seen.size(1), CPU)
            assert nats[i] == 0, "scored twice"
            nats[i] = -log_probs(model, seen, context)[0, -1, int(tokens[i])].item()
    return nats


# -------------------------------------------------------------------------------- rows
@pytest.mark.parametrize("name, settings", [
    ("sliding", dict(eval_sliding=4)), ("sliding", dict(eval_sliding=1)), ("sliding", dict(eval_sliding=16)),
    ("sliding", dict(eval_sliding=7, eval_context=40)), ("ttt", dict(eval_ttt=40))])
def test_rows(cfg, stream, name, settings):
    """Every target once, in order. A row holds the context and has at least context - stride tokens before
    its targets, unless the text begins there. Where it begins does not depend on the end of the text."""
    cfg = replace(cfg, **settings)
    longest, stride = cfg.eval_context or T, settings.get(f"eval_{name}", T) if name != "ttt" else T
    targets, views = [], {}
    for row in rows_of(cfg, name, len(stream)):
        targets += range(row.first, row.last + 1)
        assert row.low >= 0 and row.last - row.low <= longest
        assert row.low == 0 or row.first - row.low >= longest - stride + 1
        views |= {i: row.low for i in range(row.first, row.last + 1)}
    assert targets == [*range(1, len(stream))]
    for end in range(2, len(stream), 3):
        for row in rows_of(cfg, name, end):
            assert all(row.low == views[i] for i in range(row.first, row.last + 1)) and row.last < end


def test_rows_of_several_settings(cfg, stream):
    """ttt takes the rows of sliding; a stride beyond the row is the row, so that TRAIN_SEQ_LEN can be lowered
    alone on a preset that has them."""
    def rows(name, **settings):
        return rows_of(replace(cfg, **settings), name, len(stream))

    both = dict(eval_ttt=40, eval_sliding=4)
    assert rows("ttt", **both) == rows("sliding", **both) != rows("plain", **both)
    assert rows("ttt", **both | {"eval_sliding": 0}) == rows("plain", **both)
    assert rows("sliding", eval_sliding=1000) == rows("sliding", eval_sliding=T)


@pytest.mark.parametrize("settings", [
    {}, dict(window_pattern="SL", window_schedule=(8,)), dict(val_batch_size=1)])
def test_nats_are_those_of_single_forwards(cfg, stream, settings):
    cfg, stream = replace(cfg, **PROTOCOLS["sliding"], **settings), stream[:120]
    model = randomised(cfg)
    want = one_by_one(cfg, model, stream, rows_of(cfg, "sliding", len(stream)))
    assert np.allclose(nats_of(cfg, model, stream, "sliding"), want, rtol=1e-5, atol=1e-6)
    assert (want[1:] > 0).all() and want[0] == 0


def test_presets_that_ask_for_named_scores():
    """golf_plus for the one that its record has, the others for none."""
    asked = {preset: {name for name in PROTOCOLS if vars(preset_config(preset)).get(f"eval_{name}")}
             for preset in train_gpt.RECIPES}
    assert asked.pop("golf_plus") == {"sliding"} and not any(asked.values())


def test_named_scores(cfg, stream, tiny_data):
    """The sums over the targets and the bytes of the text; those of sliding as evaluate finds them with a
    stride, on a text that its rows fill. Of a part of the split there are no bits per byte."""
    data = train_gpt.open_data(toy_config(tiny_data), lambda *lines: None)
    data = data._replace(val=stream[:16 + 4 * 30 + 1], val_bytes=100, bos=BOS)
    cfg = replace(cfg, eval_sliding=4)
    model = randomised(cfg)
    found = train_gpt.named_scores(model, cfg, data, team_of(), lambda line: None)
    score = train_gpt.evaluate(model, replace(cfg, eval_stride=4), data, fake_team())
    assert found["val_loss_sliding"] == pytest.approx(score.val_loss, rel=1e-6)
    assert found["val_bpb_sliding"] == pytest.approx(score.val_bpb, rel=1e-6)
    nats = nats_of(cfg, model, data.val, "sliding").sum()
    assert found["val_loss_sliding"] == pytest.approx(nats / 136) and "val_loss_ttt" not in found
    part = train_gpt.named_scores(model, replace(cfg, val_tokens=50), data, team_of(), lambda line: None)
    assert part["val_bpb_sliding"] is None and part["val_loss_partial_sliding"] > 0
    off = replace(cfg, eval_sliding=0)
    assert train_gpt.named_scores(model, off, data, None, None) == {}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_ranks_share_the_rows(cfg, stream, name):
    """Two ranks' nats fill each other's gaps; ranks that do not talk cannot train, so without a step."""
    cfg = replace(cfg, **PROTOCOLS[name] | (dict(eval_ttt=10**6) if name == "ttt" else {}))
    model = randomised(cfg)
    parts = [nats_of(cfg, model, stream, name, team=team_of(rank, 2)) for rank in (0, 1)]
    assert np.allclose(sum(parts), nats_of(cfg, model, stream, name), rtol=1e-6)
    assert not (parts[0] * parts[1]).any() and all((part > 0).sum() > 50 for part in parts)


# -------------------------------------------------------------------------------- test-time training
def test_ttt_trains_on_what_it_scored_and_on_nothing_else(cfg, stream, monkeypatch):
    cfg, scored, trained = replace(cfg, **PROTOCOLS["ttt"]), [0], []

    def score(model, cfg, rows, team, *_):
        scored.append(scored[-1] + sum(len(ids) - first for ids, first in rows))
        return ()

    def train(model, optimizer, cfg, tokens, team):
        assert (len(tokens) - 1) % T == 0 and len(tokens) > T
        trained.extend(tokens if not trained else tokens[1:])
        assert np.array_equal(trained, stream[:len(trained)])  # in order, nothing left out
        assert len(trained) <= scored[-1] + 1 < len(trained) + T  # less than a row behind
        assert scored[-1] - scored[-2] >= cfg.eval_ttt

    monkeypatch.setattr(train_gpt, "score_rows", score)
    monkeypatch.setattr(train_gpt, "test_time_step", train)
    nats_of(cfg, randomised(cfg), stream, "ttt")
    assert scored[-1] == len(stream) - 1 and len(trained) > 150


def test_ttt_is_the_trainers_own_step(cfg, stream):
    """The second chunk's nats are those of weights after one step on the first; the model itself stays."""
    cfg = replace(cfg, eval_ttt=64, eval_ttt_lr=0.3)
    model = randomised(cfg)
    kept = {name: p.clone() for name, p in model.state_dict().items()}
    nats, rows = nats_of(cfg, model, stream, "ttt"), rows_of(cfg, "ttt", len(stream))
    assert all(torch.equal(p, kept[name]) for name, p in model.state_dict().items())
    assert [row.last for row in rows[:4]] == [16, 32, 48, 64]
    assert np.allclose(nats[:65], one_by_one(cfg, model, stream, rows[:4])[:65], rtol=1e-5)
    optimizer, context = train_gpt.Optimizer(model, cfg), model.context(T, CPU)
    batch = torch.from_numpy(np.stack([stream[i:i + T + 1] for i in range(0, 64, T)]).astype(np.int64))
    batch = batch[:, :-1], batch[:, 1:]
    train_gpt.train_step(model, optimizer, batch, 4, context, 1.0, 0.3, cfg.muon_momentum)
    want = one_by_one(cfg, model, stream, rows[4:8])
    assert np.allclose(nats[65:129], want[65:129], rtol=1e-4)
    untrained = one_by_one(cfg, randomised(cfg), stream, rows[4:8])
    assert not np.allclose(nats[65:129], untrained[65:129], rtol=1e-3)


def test_ttt_learns_a_text_that_repeats(cfg):
    """The same 62 tokens again and again: what was scored teaches what comes."""
    cfg = replace(cfg, eval_ttt=80, count_orders=(0,), count_words=(0,), copy_orders=(0,))
    stream = np.tile(np.random.default_rng(0).permutation(np.arange(2, V)).astype(np.uint16), 20)
    nats, still = (nats_of(replace(cfg, eval_ttt_lr=lr), randomised(cfg), stream, "ttt") for lr in (0.3, 0.0))
    assert nats[-300:].mean() < 0.6 * still[-300:].mean() and np.array_equal(nats[:65], still[:65])


# -------------------------------------------------------------------------------- the leak probe
SUM = "the probabilities of all tokens that may follow the same ones sum to"
PEEKS = {  # protocol, a piece of the trainer's text, what a cheat has in its place, what the probe says
    "trains before it scores": (
        "ttt", "        score_share(nats, waiting,",
        "        if row[-1] - scored > cfg.train_seq_len:\n"
        "            test_time_step(copied, optimizer, cfg, tokens[scored:row[-1] + 1], team)\n"
        "        score_share(nats, waiting,", "a leak"),
    "trains beyond what it scored": (
        "ttt", "tokens[trained:trained + full + 1]", "tokens[trained:trained + full + 33]", "a leak"),
    "two passes, the second one counts": (
        "ttt", "            trained += full\n", "            trained += full\n"
        "    score_share(nats, rows, copied, cfg, tokens, team)\n", "a leak"),
    "trains the model that it was given": (
        "ttt", "    copied.load_state_dict(model.state_dict())\n", "    copied = model\n", "a leak"),
    "rows that the whole text decides": (
        "sliding", "evaluation_rows(cfg, len(tokens), cfg.eval_sliding or cfg.eval_stride)",
        "evaluation_rows(cfg, len(tokens), cfg.eval_sliding - int(tokens.astype(int).sum() % 3))", "a leak"),
    "fewer nats after the first rows": (
        "sliding", "    return nats\n\ndef named",
        "    nats[3 * cfg.train_seq_len:] -= 1e-3\n    return nats\n\ndef named", SUM),
    "fewer nats once it has trained": (
        "ttt", "            trained += full\n",
        "            trained += full\n    nats[cfg.eval_ttt + 1:] *= 0.99\n", SUM),
    "half of the nats": (
        "sliding", "    return nats\n\ndef named", "    return nats / 2\n\ndef named",
        "the nats of the first row"),
}


def peeking(peek, tmp_path):
    """Its protocol, and the path of a trainer that peeks."""
    name, old, new, _ = PEEKS[peek]
    source = SCRIPT.read_text()
    assert source.count(old) == 1
    (tmp_path / "train_gpt.py").write_text(source.replace(old, new))
    return name, tmp_path / "train_gpt.py"


def probe(cfg, name, module=train_gpt, seed=0):
    """In this process, by two models of the same weights."""
    cfg = replace(cfg, **PROTOCOLS[name])

    def worker():
        model = randomised(cfg)
        return lambda tokens, row, name, bos, step: nats_of(
            leak_probe.shortened(cfg, row, step), model, tokens.astype(np.uint16), name, module)

    @torch.no_grad()
    def ask(tokens):
        return log_probs(randomised(cfg), torch.from_numpy(tokens)).numpy()

    return leak_probe.probe_stream(worker(), worker(), ask, name, BOS, T, V, [], np.random.default_rng(seed))


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_no_seed_of_the_probe_accuses_us(cfg, seed):
    for name in PROTOCOLS:
        assert probe(cfg, name, seed=seed).startswith(f"{name}: 10 changes")


@pytest.mark.parametrize("peek", slow_but([
    "trains before it scores", "rows that the whole text decides", "fewer nats after the first rows"], PEEKS))
def test_a_protocol_that_peeks_is_caught(cfg, peek, tmp_path):
    name, path = peeking(peek, tmp_path)
    spec = importlib.util.spec_from_file_location("peeking", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(leak_probe.ProbeFailed, match=PEEKS[peek][3]):
        probe(cfg, name, module)


@pytest.mark.slow
def test_our_protocols_pass_the_probe():
    """In the workers that `check` starts."""
    env = dict(VOCAB_SIZE=str(V), DEVICE="cpu", COMPILE="0", DTYPE="float32", MODEL_DIM="32", BOS_ID=str(BOS),
               TRAIN_SEQ_LEN=str(T), TRAIN_BATCH_TOKENS=str(T), BIGRAM_ROWS="64", COUNT_BITS="12")
    env |= {key.upper(): str(value) for settings in PROTOCOLS.values() for key, value in settings.items()}
    told = leak_probe.judge(SCRIPT, None, env, seconds=600, seed=0, protocols=[*PROTOCOLS], bos=BOS)
    assert [text.partition(":")[0] for text in told.split("; ")[1:]] == [*PROTOCOLS]
