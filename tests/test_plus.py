"""The three later records at toy size from end to end: warmup, stages, artifact, a kill and a resume, two
ranks, a compiled step. That their arithmetic is right: test_golden.py and test_model.py."""
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import train_gpt
from helpers import calibrated, fake_run, fake_team, init_parameters, slow_but, toy_config, toy_of
from test_speedrun_plus import randomised, small, some_tokens
from train_gpt import preset_config

SHORT = dict(
    VAL_TOKENS="1500", ITERATIONS="12", EXTENSION_ITERATIONS="0", TRAIN_LOG_EVERY="1",
    VAL_LOSS_EVERY="0", SAVE_EVERY="2", VOCAB_SIZE="512", WARMUP_STEPS="0", TOKENIZER_PATH="",
    VAL_BATCH_SIZE="2048")
GAMES = {
    "gpt2_plus": toy_of("gpt2_plus", **SHORT) | dict(
        DEPTH="0", TARGET_PARAM_DATA_RATIO="0", WINDOW_PATTERN="SSSL", NUM_LAYERS="4", CORE="0",
        VALUE_EMBED_LAYERS="0,1,0,2", BACKOUT_LAYER="2", WINDOW_SCHEDULE="64", LR_WARMUP_STEPS="3"),
    # every side a multiple of 16, so that all of fp8 is tried
    "speedrun_plus": toy_of("speedrun_plus", **SHORT) | dict(
        NUM_LAYERS="11", WINDOW_PATTERN="PSPLSP-SSPL", QK_DIM="8", DC_WINDOW="7", MUDD_DIM="8",
        MUDD_GATE_DIM="8", BIGRAM_SIGN_ROWS="64", BATCH_SCHEDULE="1,2,3,3", TRAIN_BATCH_TOKENS="256",
        MAX_DOC_LEN="60", DOC_SCHEDULE="20,60,60,60", EVAL_CONTEXT="256", MAX_EPOCHS="0", WINDOW_BLOCK="4",
        WINDOW_SCHEDULE="12,28,44,52", EVAL_WINDOW="80", ITERATIONS="8", EXTENSION_ITERATIONS="2", FP8="all"),
    "golf_plus": toy_of("golf_plus", **SHORT) | dict(
        NUM_LAYERS="5", NUM_KV_HEADS="1", LOOP_LAYERS="1,2", GPTQ_BATCHES="2", EVAL_SLIDING="0",
        ARTIFACT_KEEP="1000"),
}


@pytest.mark.parametrize("game", GAMES)
def test_a_run_killed_and_resumed(game, go, whole):
    """The loss falls, and the end has the same bits as without the kill: head and embedding tied, then not,
    the mean of weights, the order of shards."""
    want = whole(GAMES[game])
    losses = [*want.losses.values()]
    assert losses[-1] < losses[0] - 0.1     # in bf16 gpt2_plus has fallen by 0.12, else by more than 0.3
    killed = go(GAMES[game], fault="kill@step:9")
    assert killed.met
    done = go({}, resume=killed.run_id)
    assert done.code == 0 and done.result["resumed"], done.err
    assert (done.losses, done.weights) == (want.losses, want.weights)
    same = ("val_loss_partial", "steps", "tokens", "bytes_model")
    assert [done.result[name] for name in same] == [want.result[name] for name in same]


@pytest.mark.parametrize("game", slow_but(["golf_plus"], GAMES))
def test_two_ranks_end_as_one_does(game, go, whole):
    """But golf_plus, whose ranks draw from shards of their own."""
    settings = GAMES[game] | ({"PACKING": "rows"} if game == "golf_plus" else {})
    alone = whole(settings)
    two = go(settings | {"SAVE_EVERY": "0"}, ranks=2)
    assert two.codes == [0, 0], two.err
    assert game != "golf_plus" or min(run.result["calibration_ms"] for run in (alone, two)) > 0
    if game == "gpt2_plus":     # deals groups of documents to its ranks
        return
    if game == "speedrun_plus":     # a row that fills no two at a shard's end is lost
        assert two.losses[1] == pytest.approx(alone.losses[1], rel=1e-3)
        return
    for step, loss in alone.losses.items():
        assert two.losses[step] == pytest.approx(loss, rel=1e-3), step


def test_the_mean_of_weights_is_what_a_run_ends_with(go, whole):
    """golf_plus trains as without it."""
    mean = whole(GAMES["golf_plus"])
    last = go(GAMES["golf_plus"] | {"SAVE_EVERY": "0", "EMA_DECAY": "0"})
    assert last.code == 0 and mean.losses == last.losses, last.err
    assert abs(mean.result["trained"]["val_loss"] - last.result["trained"]["val_loss"]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fp8", ["off", "all"])
def test_a_compiled_step_equals_the_eager_one(fp8, backend, one_thread):
    """Heads in pairs, dynamic attention, several targets whose weights change, fp8: losses and gradients; no
    new graph while only weights and scales change."""
    cfg = small(fp8=fp8)
    kernels = cfg.choose_kernels(False, lambda line: None)
    model = randomised(cfg, kernels)
    tokens, targets = some_tokens()
    context = model.context(64, torch.device("cpu"), torch.float32, cfg.stages()[0])
    fast = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
    counted = torch._dynamo.utils.counters["stats"]
    wanted = [*model.parameters(), *([model.scales.values] if model.scales else [])]
    graphs = []
    for progress in (0.0, 0.1):
        model.update_context(context, progress)
        results = []
        for fn in (model, fast):
            loss = fn(tokens, targets, context)
            results.append([loss, *torch.autograd.grad(8 * loss, wanted, materialize_grads=True)])
        for a, b in zip(*results, strict=True):
            if fp8 == "off":
                torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-5)
            elif a.numel() > 200:   # a value near the middle of two in fp8 may become either
                assert F.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.97
        assert results[1][0].item() == pytest.approx(results[0][0].item(), rel=1e-3)
        graphs.append(counted["unique_graphs"])
        if model.scales:
            torch.testing.assert_close(results[1][-1], results[0][-1], rtol=0.1, atol=0)
            model.scales.largest = results[0][-1]
            model.scales.follow()
    assert graphs[0] == graphs[1]


# ------------------------------------------------------------ golf_plus after training
@pytest.fixture
def calibrate(tiny_data):
    """Calibrates a model of one layer: a Team, a log, constants -> (hessians, model)."""
    def calibrate(team=None, log=print, **settings):
        cfg = toy_config(tiny_data, "golf_plus", packing="rows", num_layers=1, loop_layers=(0,), **settings)
        model = cfg.make_model()
        init_parameters(model, 1)
        data = train_gpt.open_data(cfg, lambda *_: None)
        return calibrated(cfg, model, data, team or fake_team(), log), model
    return calibrate


def test_golf_plus_calibrates_on_all_ranks(calibrate):
    """Four batches of two ranks are two each, of which each rank has half: as two batches of one. What ranks
    have is added up: below."""
    first, second = (calibrate(fake_team(rank, 2), gptq_batches=4)[0] for rank in (0, 1))
    alone, _ = calibrate(gptq_batches=2)
    assert first.keys() == alone.keys() and len(alone) == 7
    for name, hessian in alone.items():
        torch.testing.assert_close(2 * (first[name] + second[name]), hessian, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seconds, cap, made, slowest", [
    (0.0, 588.0, 7, 0), (1e-3, 588.0, 1, 0), (1e6, 588.0, 7, 0), (1e-3, 0.0, 7, 0), (1e6, 588.0, 1, 1e7)])
def test_golf_plus_calibration_ends_in_time(seconds, cap, made, slowest, calibrate, monkeypatch):
    """With fewer batches, which the log says: it counts as training. Without a cap all runs are alike. All
    ranks stop with the slowest, else one would wait for the others without end."""
    batches = []
    said = []
    real = train_gpt.Loader.next
    monkeypatch.setattr(train_gpt.Loader, "next", lambda *args: batches.append(1) or real(*args))
    monkeypatch.setattr(train_gpt, "all_reduce",
                        lambda tensor, *how: tensor + slowest if how == ("MAX",) else tensor)
    found, _ = calibrate(log=said.append, gptq_batches=7, gptq_seconds=seconds, max_wallclock_seconds=cap)
    assert len(batches) == made and found
    late = [f"calibration: 1 of 7 batches, as more would take longer than {seconds:g} s"]
    assert said == (late if made == 1 else [])


def test_golf_plus_rounds_on_the_device(calibrate, monkeypatch):
    """Hessians stay where they were summed, and GPTQ goes there: on one core it takes minutes. As a CPU has
    no other device, tensors without numbers stand for those of a GPU."""
    seen = []

    def all_reduce(tensor, *more):
        return tensor.to("meta") if tensor.dim() == 2 else tensor

    def gptq(w, scale, levels, hessian):
        seen.append({tensor.device.type for tensor in (w, scale, hessian)})
        return torch.zeros(w.shape)

    monkeypatch.setattr(train_gpt, "all_reduce", all_reduce)
    monkeypatch.setattr(train_gpt, "gptq", gptq)
    hessians, model = calibrate(gptq_batches=1)
    assert {hessian.device.type for hessian in hessians.values()} == {"meta"}
    rows, scale = train_gpt.quantize_by_gptq(model.blocks[0].query.data, 0.1, 7, hessians["blocks.0.query"])
    assert seen == [{"meta"}] and rows.device.type == scale.device.type == "cpu"


def test_golf_plus_finds_wider_steps_in_few_tries(monkeypatch):
    """Each packs the whole, and brotli takes half a minute."""
    cfg = preset_config("golf_plus", dict(num_layers=1, loop_layers=(0,), model_dim=64, num_heads=2,
                                          num_kv_heads=1, vocab_size=512, artifact_keep=1000, gptq_batches=0))
    model = cfg.make_model()
    draw = torch.Generator().manual_seed(0)
    for p in model.parameters():        # heavy tails, so that steps twice as wide cost less than a bit
        p.data = torch.randn(p.shape, generator=draw) * torch.rand(p.shape, generator=draw) ** 3
    monkeypatch.setattr(train_gpt, "script_source", lambda: bytes(50))
    whole = len(cfg.pack(fake_run(cfg, model)))
    real = train_gpt.shuffle_and_compress
    for part in (0.99, 0.9):
        calls = []
        monkeypatch.setattr(train_gpt, "shuffle_and_compress", lambda raw: calls.append(1) or real(raw))
        limit = round(part * whole)
        limited = replace(cfg, artifact_bytes_limit=limit + 50)
        packed = limited.pack(fake_run(limited, model))
        assert 0.98 * limit < len(packed) <= limit and len(calls) <= 4, (part, len(packed) / limit, calls)


def test_an_artifact_that_fills_the_limit_fits(monkeypatch):
    """To the byte, with the script; a byte more, and the steps stay as they were."""
    monkeypatch.setattr(train_gpt, "script_source", lambda: bytes(50))
    monkeypatch.setattr(train_gpt, "pack_artifact", lambda model, options: bytes(round(
        1200 / options("embed")["coarser"])))
    monkeypatch.setattr(train_gpt.GolfPlus, "compress", lambda cfg, raw: raw)
    for limit, size in [(350, 300), (349, 1200), (1250, 1200), (0, 1200)]:
        cfg = preset_config("golf_plus", dict(gptq_batches=0, artifact_bytes_limit=limit))
        assert len(cfg.pack(fake_run(cfg, torch.nn.Linear(1, 1)))) == size
