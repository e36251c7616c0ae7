"""Scores against a slow reference, the artifact, and what one small run leaves behind."""

import getpass
import hashlib
import io
import json
import lzma
import math
import platform
import re
import shutil
import zipfile
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import plan
import train_gpt
from helpers import ROOT, SCRIPT, TOY, fake_team, run_cli, toy_config
from train_gpt import GPT, Config, Refused, evaluate, init_parameters, log_probs, parameter_rule

RULE = "=" * 100
# 81,920 embedding and head weights: more than artifact_keep, so that the artifact holds int8 rows
RUN = TOY | dict(
    RUN_ID="first",
    NUM_LAYERS="3",
    MODEL_DIM="160",
    VAL_TOKENS="0",
    ITERATIONS="25",
    TRAIN_LOG_EVERY="5",
    VAL_LOSS_EVERY="10",
    WARMUP_STEPS="1",
    ARTIFACT_BYTES_LIMIT="1000",
    MATRIX_LR="0.02",
)


pytestmark = pytest.mark.usefixtures("one_thread")


def randomised(cfg, seed=0):
    model, generator = GPT(cfg), torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        spread = {"matrix": 1.5 * p.shape[-1] ** -0.5, "embed": 0.1, "head": 0.1}.get(
            parameter_rule(name)[0], 0.5
        )
        p.data.normal_(0, spread, generator=generator)
    model.set_context(cfg.train_seq_len, cfg.window_schedule[-1])
    return model


# -------------------------------------------------------------------------------- the score
def reference_nats(model, cfg, tokens):
    """Nats of every target, one forward for each: the exact context that DESIGN's row layout gives it."""
    context = cfg.eval_context or cfg.train_seq_len
    stride, nats = cfg.eval_stride or context, []
    model.set_context(context, cfg.eval_window or cfg.window_schedule[-1])
    for i in range(len(tokens) - 1):  # tokens[i] predicts tokens[i + 1]
        row = 0 if i < context else math.ceil((i - context + 1) / stride)
        seen = torch.zeros(1, context, dtype=torch.int64)  # what comes after tokens[i] is blank
        seen[0, : i + 1 - row * stride] = torch.from_numpy(tokens[row * stride : i + 1].astype(np.int64))
        nats.append(-log_probs(model, seen)[0, i - row * stride, int(tokens[i + 1])].double().item())
    return nats


@pytest.fixture(scope="module")
def toy(tiny_data):
    cfg = toy_config(tiny_data, vocab_size=512, train_seq_len=16, train_batch_tokens=64, val_tokens=0)
    data = train_gpt.open_data(cfg)
    return SimpleNamespace(cfg=cfg, data=data._replace(val=np.array(data.val[:211]), val_bytes=400))


@pytest.mark.parametrize(
    "settings, tokens",
    [
        ({}, 211),
        ({}, 193),
        ({}, 17),
        ({}, 20),
        (dict(eval_context=40), 211),
        (dict(eval_context=5), 30),
        (dict(eval_stride=4), 211),
        (dict(eval_stride=16), 100),
        (dict(eval_stride=1), 60),
        (dict(eval_stride=7), 99),
        (dict(eval_context=40, eval_stride=9), 211),
        (dict(window_pattern="SL", window_schedule=(4, 8)), 100),
        (dict(window_pattern="SL", window_schedule=(8,), eval_context=32, eval_stride=8), 120),
        (dict(window_pattern="SL", window_schedule=(4, 8), eval_window=13), 100),
        (dict(window_schedule=(4, 8), eval_window=12, rope_yarn=True, max_doc_len=9, bos_id=1), 100),
    ],
)
@torch.no_grad()
def test_evaluate_equals_reference(toy, settings, tokens):
    """The tail is no multiple of the row, strides do not divide contexts, every target counts once."""
    cfg = replace(toy.cfg, **settings)
    model, data = randomised(cfg), toy.data._replace(val=toy.data.val[:tokens])
    score = evaluate(model, cfg, data, fake_team())
    nats = reference_nats(model, cfg, data.val)
    assert score.val_loss == pytest.approx(sum(nats) / (tokens - 1), rel=1e-6)
    assert score.val_bpb == pytest.approx(sum(nats) / math.log(2) / data.val_bytes, rel=1e-6)


def test_score_does_not_depend_on_the_batch(toy):
    model = randomised(toy.cfg)
    scores = [
        evaluate(model, replace(toy.cfg, val_batch_size=size, eval_stride=stride), toy.data, fake_team())
        for stride in (0, 5)
        for size in (1, 48, 65, 100_000)
    ]
    for some in (scores[:4], scores[4:]):
        assert all(score.val_loss == pytest.approx(some[0].val_loss, rel=1e-6) for score in some)
    assert abs(scores[0].val_loss - scores[4].val_loss) > 1e-4  # more context is another score


def test_score_of_a_uniform_guess(toy):
    """Zero head: every token has probability 1/512, whatever the text."""
    model = GPT(toy.cfg)
    init_parameters(model, 0)
    score = evaluate(model, toy.cfg, toy.data, fake_team())
    assert score.val_loss == pytest.approx(math.log(512), rel=1e-6)
    assert score.val_bpb == pytest.approx(9 * 210 / 400, rel=1e-6)


def test_part_of_the_split_has_no_bpb(toy):
    """... and its loss is called val_loss_partial, unless the preset itself is scored on that part."""
    model = randomised(toy.cfg)
    part = replace(toy.cfg, val_tokens=100)
    score = evaluate(model, part, toy.data, fake_team())
    assert score.val_bpb is None
    assert score.val_loss == pytest.approx(np.mean(reference_nats(model, part, toy.data.val[:100])), rel=1e-6)
    assert re.fullmatch(r"val_loss_partial:\d\.\d{4}", train_gpt.score_text(part, score))
    assert evaluate(model, toy.cfg, toy.data._replace(val_bytes=None), fake_team()).val_bpb is None


def test_evaluate_leaves_the_weights_and_draws_nothing(toy):
    model = randomised(toy.cfg)
    before, state = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    evaluate(model, toy.cfg, toy.data, fake_team())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert all(p.grad is None for p in model.parameters()) and torch.equal(state, torch.get_rng_state())


generate = partial(plan.generate, train_gpt)


@torch.no_grad()
def test_greedy_samples_are_the_argmax(toy):
    """Also once the text is longer than the model's context: each token sees train_seq_len of them."""
    model, prompt = randomised(toy.cfg), toy.data.val[:5].tolist()
    ids = list(prompt)
    for _ in range(20):
        model.set_context(len(ids), 16)
        ids.append(int(model.logits(torch.tensor([ids]))[0, -1].argmax()))
    assert generate(model, prompt, 20, 0) == ids == generate(model, prompt, 20, 1, 1)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(generate(model, prompt, 20, 1.0))
    assert drawn[0] == drawn[1] != drawn[2] and len(drawn[0]) == 25
    scores = log_probs(model, torch.tensor([prompt]))[0, -1]
    best = {*scores.topk(3)[1].tolist()}
    assert {generate(model, prompt, 1, 50.0, 3)[-1] for _ in range(60)} == best


def test_scores_and_samples_leave_nothing_behind(toy):
    """After them log_probs is again of every token, whatever they wanted or kept."""
    model = randomised(toy.cfg)
    for use in (lambda: evaluate(model, toy.cfg, toy.data, fake_team()),
                lambda: generate(model, [1, 5, 6, 7, 8], 4, 0)):
        use()
        assert model.wanted is ... and model.cache is None and model.dtype == torch.float32


EVERYTHING = dict(
    num_layers=4, window_pattern="SL-L", window_schedule=(32, 64), max_doc_len=200, bos_id=1, smear_dim=6,
    attn_gate_dim=5, rope_yarn=True, rope_fraction=0.5, backout_layer=2, skip_layers=(0, 3), num_kv_heads=1,
)


@pytest.mark.parametrize("settings", [dict(), dict(num_layers=3, window_pattern="SSL"), EVERYTHING])
@pytest.mark.parametrize("window", [0, 64])
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(toy, settings, window):
    """300 tokens one by one after a prompt of 7; full and short windows, documents that end on the way."""
    cfg = replace(toy.cfg, train_seq_len=128, train_batch_tokens=128, **settings)
    model = randomised(cfg)
    tokens = torch.randint(2, cfg.vocab_size, (1, 307), generator=torch.Generator().manual_seed(3))
    tokens[0, [0, 90, 91, 250]] = 1
    model.set_context(307, window)
    full = model.logits(tokens)
    model.set_context(307, window, cache={})
    found = [model.logits(tokens[:, :7])]
    found += [model.logits(tokens[:, :T])[:, -1:] for T in range(8, 308)]
    assert (torch.cat(found, 1) - full).abs().max() < 1e-4
    assert full.std() > 0.5


# -------------------------------------------------------------------------------- the artifact
def awkward_matrix(rows, columns, seed=0):
    """Gaussian rows of many sizes, heavy tails, a row of zeros, one below fp16's range, an outlier."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((rows, columns)) * np.exp(rng.uniform(-8, 3, (rows, 1)))
    w[0], w[1] = 0, 1e-9
    w[2] = rng.standard_normal(columns) / 50
    w[2, columns // 2] = -9.0
    return w.astype(np.float32)


@pytest.mark.parametrize("shape", [(12, 700), (6, 1), (6, 2), (5, 700_000)])
def test_quantize_rows_equals_numpy(shape):
    w = awkward_matrix(*shape)
    q, scale = (t.numpy() for t in train_gpt.quantize_rows(torch.from_numpy(w)))
    assert q.dtype == np.int8 and scale.dtype == np.float16 and scale.shape == shape[:1]
    clip = np.percentile(np.abs(w.astype(np.float64)), 99.99984, axis=1)
    want = np.maximum(clip / 127, 2.0**-24)
    assert (np.abs(scale.astype(np.float64) - want) <= np.maximum(want * 2.0**-10, 2.0**-25 + 1e-12)).all()
    s = scale.astype(np.float64)[:, None]
    exact = np.clip(np.rint(w / s), -127, 127)
    assert (np.abs(q - exact) <= (np.abs(w / s % 1 - 0.5) < 1e-4)).all()  # a tie may fall either way
    assert (q[0] == 0).all()
    error, beyond = np.abs(w - q * s), np.maximum(np.abs(w) - 127 * s, 0)
    assert (error <= s * 0.5001 + beyond).all()
    assert (
        beyond[np.abs(w) <= clip[:, None]]
        <= np.broadcast_to(127 * s * 2.0**-10, w.shape)[np.abs(w) <= clip[:, None]]
    ).all()


def wide_config(**settings):
    """Matrices on both sides of artifact_keep: 256 x 256 is the largest that stays fp16."""
    return replace(
        Config(),
        **dict(
            vocab_size=300,
            train_seq_len=16,
            train_batch_tokens=16,
            num_layers=1,
            model_dim=256,
            num_heads=4,
            value_embed_layers=(1,),
            bigram_rows=300,
        )
        | settings,
    )


def test_artifact_dtypes():
    model = randomised(wide_config(num_layers=2, mlp_mult=2))
    raw = zlib.decompress(train_gpt.pack_artifact(model))
    tensors = torch.load(io.BytesIO(raw), weights_only=True)["tensors"]
    for name, p in model.named_parameters():
        if name.split(".")[-1] in ("qk_gain", "residual_mix", "layer_scale", "skip_weights"):
            assert torch.equal(tensors.pop(name), p.detach())
        elif p.numel() <= 65_536:
            assert torch.equal(tensors.pop(name), p.detach().half())
        else:
            q, scale = tensors.pop(name + ".int8"), tensors.pop(name + ".scale")
            assert q.dtype == torch.int8 and scale.dtype == torch.float16 and q.shape == p.shape
            assert (q.float() * scale.float()[:, None] - p).abs().max() < p.abs().max() / 200
    assert not tensors


@pytest.mark.parametrize(
    "settings", [{}, dict(tie_embeddings=True, num_layers=3), dict(qk_gain_init=0.0, rope_base=0.0)]
)
@torch.no_grad()
def test_artifact_loads(tmp_path, settings):
    cfg = wide_config(window_pattern="SL", window_schedule=(8,), **settings)
    model = randomised(cfg)
    path = tmp_path / "final_model.int8.ptz"
    path.write_bytes(train_gpt.pack_artifact(model))
    loaded, known = train_gpt.load_model(path)
    assert all(getattr(known, name) == getattr(cfg, name) for name in train_gpt.SHAPE)
    tokens = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(0))
    model.set_context(16, 8)
    got, want = log_probs(loaded, tokens), log_probs(model, tokens)
    assert got.shape == (2, 16, 300) and got.dtype == torch.float32
    assert 0 < (got - want).abs().mean() < 0.05
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(Refused):
        train_gpt.load_model(path)


@pytest.mark.parametrize("step", [0.05, 0.3, 1.0])
def test_rounding_by_a_step(step):
    """Of each row's rms; what lies beyond 127 steps is clipped."""
    w = awkward_matrix(12, 700)
    q, scale = (t.numpy() for t in train_gpt.quantize_rows(torch.from_numpy(w), step))
    assert q.dtype == np.int8 and scale.dtype == np.float16
    want = np.maximum(step * np.sqrt((w.astype(np.float64) ** 2).mean(1)), 2.0**-24)
    assert (np.abs(scale - want) <= np.maximum(want * 2.0**-10, 2.0**-25 + 1e-12)).all()
    s = scale.astype(np.float64)[:, None]
    inside = np.abs(w) <= 127 * s
    assert (np.abs(w - q * s) <= s * 0.5001)[inside].all() and (np.abs(q)[~inside] == 127).all()


def test_scalars_are_never_rounded():
    """However few numbers a tensor may have to stay what it is."""
    model = randomised(wide_config(artifact_keep=1))
    raw = zlib.decompress(train_gpt.pack_artifact(model))
    tensors = torch.load(io.BytesIO(raw), weights_only=True)["tensors"]
    for name, p in model.named_parameters():
        scalar = parameter_rule(name)[0] == "scalar"
        assert (name in tensors) == scalar and (not scalar or torch.equal(tensors[name], p.detach()))


@torch.no_grad()
def test_artifact_by_lzma(tmp_path):
    """Fewer levels cost less: the same weights, smaller and still those that were trained, nearly."""
    sizes, tokens = [], torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(0))
    for step in (0.0, 0.1, 0.4):
        model = randomised(wide_config(artifact_step=step, artifact_keep=4096))
        path = tmp_path / f"{step}.ptz"
        path.write_bytes(train_gpt.pack_artifact(model))
        sizes.append(path.stat().st_size)
        loaded, _ = train_gpt.load_model(path)
        assert 0 < (log_probs(loaded, tokens) - log_probs(model, tokens)).abs().mean() < 0.05 + step
        for name, p in model.named_parameters():
            rounded = loaded.get_parameter(name)
            if p.ndim == 2 and p.numel() > 4096 and step:
                part = step * train_gpt.STEPS[parameter_rule(name)[0]]
                levels = rounded / (part * p.square().mean(1, keepdim=True).sqrt())
                assert (levels - levels.round()).abs().max() < 0.02 * levels.abs().max()
    assert sizes[1] < 0.85 * sizes[0] and sizes[2] < 0.7 * sizes[1]


def test_an_artifact_holds_like_beside_like():
    """Its int8 first, then fp16, then fp32: lzma's frequencies need not change at every scale."""
    raw = lzma.decompress(train_gpt.pack_artifact(randomised(wide_config(artifact_step=0.2))))
    widths = [t.element_size() for t in torch.load(io.BytesIO(raw), weights_only=True)["tensors"].values()]
    assert widths == sorted(widths) and {*widths} == {1, 2, 4}


def test_a_run_whose_artifact_is_rounded_more(first, monkeypatch, capsys):
    """Its names say so, in the run and when the file is scored again; what is too large is said to be so
    before its score, with what to do."""
    settings = {name: TOY[name] for name in TOY} | dict(
        RUN_ID="lzma", ARTIFACT_STEP="0.3", ARTIFACT_KEEP="1000", ARTIFACT_BYTES_LIMIT="1000", ITERATIONS="3")
    code, out, err = in_process(first, monkeypatch, capsys, **settings)
    assert code == 0, err
    size, total = (int(re.search(rf"^{line} lzma: (\d+) bytes", out, re.M)[1])
                   for line in ("Serialized model", "Total submission size"))
    folder = first.root / "logs/lzma"
    assert size == (folder / "final_model.lzma.ptz").stat().st_size and "int8" not in out
    assert not (folder / "final_model.int8.ptz").exists()
    beside = int(re.search(r"^Code beside it: (\d+) bytes$", out, re.M)[1])
    over = out.index(f"OVER by {total + beside - 1000}: lower MODEL_DIM")
    (score,) = re.findall(r"^final_lzma_roundtrip_exact (.*)$", out, re.M)
    assert over < out.index(score)
    code, out, _ = in_process(first, monkeypatch, capsys, EVAL_FROM="logs/lzma/final_model.lzma.ptz",
                              VAL_TOKENS=TOY["VAL_TOKENS"], RUN_ID="lzma_again")
    assert code == 0 and f"final_lzma_roundtrip_exact {score}" in out


def test_artifact_is_the_same_bytes_for_the_same_weights():
    """Neither the run nor its date nor a path gets into it."""
    secret = dict(
        run_id="my_secret_run", data_path="/home/somebody/data", tokenizer_path="/etc/secret.model", seed=77
    )
    packed = [train_gpt.pack_artifact(randomised(wide_config(**kw))) for kw in ({}, {}, secret)]
    assert packed[0] == packed[1] == packed[2]
    raw = zlib.decompress(packed[2])
    assert not any(word in raw for word in (b"secret", b"/home", b"run_id", b"/tmp", str(ROOT).encode()))
    assert {info.date_time[0] for info in zipfile.ZipFile(io.BytesIO(raw)).infolist()} == {1980}
    assert zlib.compress(raw, 9) == packed[2]


# -------------------------------------------------------------------------------- one run
@pytest.fixture(scope="module")
def first(tiny_data, tmp_path_factory):
    """A run of 25 steps through the command line, with the data at an absolute path."""
    root = tmp_path_factory.mktemp("first_run")
    source = SCRIPT.read_bytes()
    done = run_cli(root, env=RUN | {"DATA_PATH": str(tiny_data / "data/datasets/toy")})
    assert done.code == 0, done.err
    folder = root / "logs" / "first"
    text = (folder / "train.log").read_text()
    head, machine, lines = text.split(f"\n{RULE}\n")
    (root / "data").symlink_to(tiny_data / "data")
    return SimpleNamespace(
        root=root,
        folder=folder,
        out=done.out,
        source=source,
        text=text,
        head=head,
        machine=machine,
        lines=lines,
        result=json.loads((folder / "result.json").read_text()),
    )


def find(first, pattern):
    """The groups of every line of the log that is the pattern."""
    return [m.groups() for m in map(re.compile(pattern).fullmatch, first.lines.splitlines()) if m]


def test_run_folder(first):
    assert {path.name for path in first.folder.iterdir()} == {
        "train.log",
        "train_gpt.py",
        "kernels.py",
        "result.json",
        "final_model.int8.ptz",
        "final_model.pt",
        "loss.png",
    }
    assert {path.name for path in first.root.iterdir()} == {"logs", "data"}
    assert (first.folder / "train_gpt.py").read_bytes() == first.source
    png = (first.folder / "loss.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and len(png) > 5000 and png[-8:-4] == b"IEND"


def test_log_begins_with_its_source(first):
    assert first.text.startswith(first.source.decode() + f"\n{RULE}\n")
    assert all(word in first.machine for word in ("python 3.", f"torch {torch.__version__}", "hardware:"))


def test_log_lines(first):
    """What other people's parsers read."""
    number = r"(\d+\.\d{4})"
    train = find(first, rf"step:(\d+)/25 train_loss:{number} train_time:(\d+)ms step_avg:(\d+\.\d\d)ms.*")
    assert [int(step) for step, *_ in train] == [*range(1, 11), 15, 20, 25]
    val = find(
        first, rf"step:(\d+)/25 val_loss:{number} val_bpb:{number} train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"
    )
    assert [int(step) for step, *_ in val] == [0, 10, 20, 25]
    assert float(val[0][1]) == pytest.approx(math.log(512), abs=1e-3)
    losses = [float(loss) for _, loss, *_ in train]
    assert losses[0] == pytest.approx(math.log(512), abs=1e-3) and losses[-1] < losses[0] - 0.5
    times = [int(ms) for _, _, ms, _ in train]
    assert times == sorted(times)
    for step, _, ms, average in train:
        assert float(average) == pytest.approx(int(ms) / int(step), abs=1)
    assert len(find(first, r"Serialized model int8\+zlib: (\d+) bytes \(.*\)")) == 1
    assert len(find(first, r"Total submission size int8\+zlib: (\d+) bytes")) == 1
    assert len(find(first, r"final_int8_zlib_roundtrip_exact val_loss:\d\.\d{8} val_bpb:\d\.\d{8}")) == 1
    assert len(find(first, r"peak memory .*: \d+ MiB.*")) == 1
    assert find(first, r"override matrix_lr (\S+) -> (\S+)")[0][1] == "0.02"
    assert len(find(first, r"config (\w+)=.*")) == len(train_gpt.FIELDS)
    assert len(find(first, r"sample \d: .*")) == 3
    for line in first.lines.splitlines():  # the terminal shows all but the config
        assert line in first.out or line.startswith("config "), line


def test_result(first):
    r = first.result
    assert set(r) >= set(
        """run_id preset seed val_loss val_bpb core train_time_ms steps tokens bytes_code bytes_model
        bytes_total code_sha256 world_size hardware torch config overrides data eval stop_reason started
        finished
        resumed""".split()
    )
    ((loss, bpb),) = find(first, r"final_int8_zlib_roundtrip_exact val_loss:(\S+) val_bpb:(\S+)")
    assert f"{r['val_loss']:.8f}" == loss and f"{r['val_bpb']:.8f}" == bpb
    ((ms,),) = find(first, r"step:25/25 val_loss:.* train_time:(\d+)ms .*")
    assert r["train_time_ms"] == int(ms) and r["steps"] == 25 and r["tokens"] == 25 * 1024
    assert r["bytes_model"] == (first.folder / "final_model.int8.ptz").stat().st_size
    assert r["bytes_code"] == len(first.source) and r["bytes_total"] == r["bytes_model"] + r["bytes_code"]
    ((model_bytes,),) = find(first, r"Serialized model int8\+zlib: (\d+) bytes .*")
    ((total,),) = find(first, r"Total submission size int8\+zlib: (\d+) bytes")
    assert (int(model_bytes), int(total)) == (r["bytes_model"], r["bytes_total"])
    assert r["code_sha256"] == hashlib.sha256(first.source).hexdigest()
    assert (r["run_id"], r["preset"], r["seed"], r["world_size"]) == ("first", "tiny", 1337, 1)
    assert r["core"] is None and r["resumed"] is False and r["stop_reason"] == "iterations"
    assert r["torch"] == torch.__version__ and r["hardware"]
    assert set(r["config"]) == set(train_gpt.FIELDS) and r["config"]["matrix_lr"] in (0.02, "0.02")
    assert "matrix_lr" in r["overrides"] and "embed_lr" not in r["overrides"]
    assert r["data"]["fingerprint"] == "toy" and r["data"]["val_bytes"] > 0
    assert r["started"] <= r["finished"] and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", r["started"])
    loss_ratio = r["val_bpb"] / r["val_loss"]
    assert loss_ratio == pytest.approx(
        (r["data"]["val_tokens"] - 1) / math.log(2) / r["data"]["val_bytes"], rel=1e-9
    )


def test_no_machine_in_log_or_result(first):
    """No absolute path, host or user name."""
    text = first.machine + first.lines + json.dumps(first.result)
    for secret in (
        str(first.root),
        str(first.root.parent),
        str(ROOT),
        str(Path.home()) + "/",
        platform.node(),
        f"/{getpass.getuser()}/",
        f"{getpass.getuser()}@",
    ):
        assert len(secret) < 4 or secret not in text, secret
    assert not re.search(r"/(tmp|home|work|usr|Users|var)/", text)


def test_over_the_artifact_limit(first):
    """A run over its game's byte limit ends, but is marked as failing the rule."""
    ((total,),) = find(first, r"Total submission size int8\+zlib: (\d+) bytes")
    ((over,),) = find(first, r"artifact_bytes_limit: 1000 bytes, OVER by (\d+): lower .*")
    ((beside,),) = find(first, r"Code beside it: (\d+) bytes")
    assert int(beside) == len((ROOT / "kernels.py").read_bytes())  # what it loaded counts
    assert int(over) == int(total) + int(beside) - 1000 and first.result["artifact_within_limit"] is False


@pytest.mark.parametrize("ranks", [0, 2])
def test_eval_from_reproduces_the_score(first, ranks):
    """In a fresh process, on any number of ranks and in other batches: the exact line again."""
    name = f"again{ranks}"
    done = run_cli(
        first.root,
        ranks=ranks,
        env={
            "EVAL_FROM": "logs/first/final_model.int8.ptz",
            "RUN_ID": name,
            "DATA_PATH": TOY["DATA_PATH"],
            "DEVICE": "cpu",
            "COMPILE": "0",
            "DATA_FINGERPRINT": "",
            "SAMPLE_TOKENS": "0",
            "VAL_BATCH_SIZE": "1000" if ranks else "65536",
        },
    )
    assert done.code == 0, done.err
    ((loss, bpb),) = re.findall(
        r"^final_int8_zlib_roundtrip_exact val_loss:(\S+) val_bpb:(\S+)$", done.out, re.M
    )
    assert float(loss) == pytest.approx(first.result["val_loss"], abs=1e-6)
    assert float(bpb) == pytest.approx(first.result["val_bpb"], abs=1e-6)
    result = json.loads((first.root / "logs" / name / "result.json").read_text())
    assert result["val_loss"] == pytest.approx(first.result["val_loss"], abs=1e-6)
    assert result["world_size"] == max(1, ranks) and result["stop_reason"] == "eval_from"
    assert (first.root / "logs" / name / "train.log").read_text().startswith(first.source.decode())


def in_process(first, monkeypatch, capsys, **settings):
    """main() in the run's folder -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(first.root)
    base = {key: TOY[key] for key in ("DATA_PATH", "DATA_FINGERPRINT", "DEVICE", "COMPILE", "DTYPE")}
    code = train_gpt.main([], base | {"SAMPLE_TOKENS": "0"} | settings)
    return code, *capsys.readouterr()


def test_eval_from_the_trained_weights(first, monkeypatch, capsys):
    code, out, _ = in_process(
        first, monkeypatch, capsys, EVAL_FROM="logs/first/final_model.pt", RUN_ID="weights"
    )
    assert code == 0
    ((loss, bpb),) = re.findall(r"^final_model_exact val_loss:(\S+) val_bpb:(\S+)$", out, re.M)
    (last,) = find(first, r"step:25/25 val_loss:(\S+) val_bpb:(\S+) .*")
    assert [float(loss), float(bpb)] == pytest.approx([float(text) for text in last], abs=6e-5)
    result = json.loads((first.root / "logs/weights/result.json").read_text())
    assert result["val_loss"] == pytest.approx(first.result["trained"]["val_loss"], abs=1e-6)
    assert result["val_loss"] != pytest.approx(first.result["val_loss"], abs=1e-7)  # int8 costs something


def test_final_model_loads(first):
    model, cfg = train_gpt.load_model(first.folder / "final_model.pt")
    assert cfg.model_dim == 160 and cfg.vocab_size == 512
    packed = (first.folder / "final_model.int8.ptz").read_bytes()
    assert train_gpt.pack_artifact(model) == packed
    scores = log_probs(model, torch.zeros(1, 64, dtype=torch.int64))
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(1, 64))


def test_sample_of_an_artifact(first, monkeypatch, capsys):
    before = sorted(path.name for path in (first.root / "logs").iterdir())
    code, out, _ = in_process(
        first,
        monkeypatch,
        capsys,
        EVAL_FROM="logs/first/final_model.int8.ptz",
        SAMPLE="def main(",
        SAMPLE_TOKENS="12",
    )
    assert code == 0 and re.search(r"^sample 1: def main\(.+", out, re.M | re.S)
    continuation = out[out.index("def main(") + len("def main(") :].strip()
    assert len(continuation) > 3
    assert sorted(path.name for path in (first.root / "logs").iterdir()) == before


def test_a_run_id_is_never_overwritten(first, monkeypatch, capsys):
    before = {path: path.read_bytes() for path in first.folder.iterdir()}
    code, _, err = in_process(first, monkeypatch, capsys, **RUN | {"DATA_PATH": TOY["DATA_PATH"]})
    assert code == 2 and "first" in err and len(err.strip().splitlines()) == 1
    assert {path: path.read_bytes() for path in first.folder.iterdir()} == before


def test_eval_from_refuses_another_shape(first, monkeypatch, capsys):
    code, _, err = in_process(
        first,
        monkeypatch,
        capsys,
        EVAL_FROM="logs/first/final_model.int8.ptz",
        RUN_ID="shape",
        MODEL_DIM="64",
        NUM_HEADS="2",
    )
    assert code == 2 and "model_dim" in err
    code, _, err = in_process(
        first, monkeypatch, capsys, EVAL_FROM="logs/first/nothing.ptz", RUN_ID="missing"
    )
    assert code == 2 and "nothing.ptz" in err
    assert not (first.root / "logs/shape").exists() and not (first.root / "logs/missing").exists()


def test_the_copied_script_runs_alone(first, tmp_path):
    """The train_gpt.py of a run folder needs no other file of the repository."""
    import subprocess
    import sys

    shutil.copy(first.folder / "train_gpt.py", tmp_path / "train_gpt.py")
    done = subprocess.run(
        [sys.executable, "train_gpt.py", "--preset=golf", "--dry-run", "--device=cpu"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "planning with 1024 tokens" in done.stdout, done.stderr
    assert "not beside this: faults, golf, kernels, plan" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["train_gpt.py"]
