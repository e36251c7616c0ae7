"""Scores against a slow reference, the artifact, and what one small run leaves behind."""

import getpass
import hashlib
import io
import json
import math
import operator
import platform
import re
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_gpt
from helpers import (
    ROOT, SCRIPT, TOY, fake_run, fake_team, look, run_cli, slow, toy_config, toy_of)
from test_model import randomised
from train_gpt import (
    RECIPES, Refused, Tiny, evaluate, fields, kind_of, log_probs, loss_name, pack_artifact, preset_config)

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


# -------------------------------------------------------------------------------- the score
def test_what_scores_compile_has_no_graph_breaks():
    """A break would be compiled in pieces and score slowly without a word."""
    def broken(x):
        torch._dynamo.graph_break()
        return x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        train_gpt.compile_once(broken)(torch.ones(2))


@pytest.mark.parametrize("shift", [0.0, 5.0])
def test_what_scores_compile_adds_no_float_to_logits(shift):
    """With dynamic shapes torch.compile turns floats into tensors on the CPU. On a GPU, one that is added to
    a product becomes its bias, and the product is refused."""
    called = []

    def backend(graph, inputs):
        called.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    def logits(x):
        return train_gpt.softcap(x, 15.0, shift)

    torch.compile(logits, dynamic=True, backend=backend)(torch.ones(2, 3))
    assert torch.tanh in called and operator.add not in called


@torch.no_grad()
def reference_nats(model, tokens):
    """Nats of every target, one forward for each: the exact context that the rows of evaluation give it."""
    cfg = model.cfg
    longest = cfg.eval_context or cfg.train_seq_len
    stride = cfg.eval_stride or longest
    nats = []
    context = model.context(longest, CPU)
    for i in range(len(tokens) - 1):  # tokens[i] predicts tokens[i + 1]
        row = 0 if i < longest else math.ceil((i - longest + 1) / stride)
        seen = torch.zeros(1, longest, dtype=torch.int64)  # what comes after tokens[i] is blank
        seen[0, :i + 1 - row * stride] = torch.from_numpy(tokens[row * stride:i + 1].astype(np.int64))
        nats.append(-log_probs(model, seen, context)[0, i - row * stride, int(tokens[i + 1])].item())
    return np.array(nats)


@pytest.fixture(scope="module")
def toy(tiny_data):
    """The first 211 val tokens, three of which begin a document, as a split of 400 bytes."""
    def config(preset="tiny", **settings):
        size = dict(vocab_size=512, train_seq_len=16, train_batch_tokens=64, val_tokens=0, eval_context=0)
        return toy_config(tiny_data, preset, **size | settings)

    cfg = config("tiny")
    data = train_gpt.open_data(cfg, lambda *lines: None)
    val = np.array(data.val[:211])
    val[[0, 60, 150]] = data.bos
    return SimpleNamespace(cfg=cfg, config=config, data=data._replace(val=val, val_bytes=400))


@pytest.mark.parametrize("settings, tokens", [
    ({}, 81), ({}, 17), ({}, 20), (dict(eval_context=40), 100), (dict(eval_context=5), 30),
    (dict(eval_stride=4), 70), (dict(eval_stride=1), 50), (dict(eval_context=40, eval_stride=9), 80),
    (dict(window_pattern="SL", window_schedule=(8,), eval_context=32, eval_stride=8), 80),
    (dict(preset="golf_plus", loop_layers=(0, 1)), 50),
    (dict(preset="speedrun", window_schedule=(4, 8, 8, 8), window_block=4, eval_window=12, max_doc_len=9,
          bos_id=1, skip_layers=(0, 1), seq_schedule=(1,)), 50)])
def test_evaluate_equals_reference(toy, settings, tokens, monkeypatch):
    """The tail is no multiple of the row, strides do not divide contexts, every target counts once; so it
    does where ranks share the rows, in batches of any size, and where the logits of a batch are made in
    parts. Targets that begin a document can be left out of the nats, not of the bytes."""
    cfg = toy.config(**settings)
    model = randomised(cfg)
    data = toy.data._replace(val=toy.data.val[:tokens])
    nats = reference_nats(model, data.val)
    bits = math.log(2) * data.val_bytes
    without_bos = nats[data.val[1:] != data.bos].sum()
    assert without_bos < nats.sum() or tokens < 61
    for size in (1, 65, 100_000):
        score = evaluate(model, replace(cfg, val_batch_size=size), data, fake_team())
        want = nats.mean(), nats.sum() / bits, without_bos / bits
        assert score == pytest.approx(want, rel=1e-6)
    monkeypatch.setattr(train_gpt, "MAX_SCORES", 7 * 512)
    assert evaluate(model, cfg, data, fake_team()) == pytest.approx(want, rel=1e-6)
    parts = [evaluate(model, cfg, data, fake_team(rank, 3)).val_loss for rank in range(3)]
    assert sum(parts) == pytest.approx(nats.mean(), rel=1e-6)


def test_part_of_the_split_has_no_bpb(toy):
    """... and its loss, of so many targets, is called val_loss_partial, unless the preset itself is scored on
    that part."""
    part = replace(toy.cfg, val_tokens=100)
    model = randomised(part)
    score = evaluate(model, part, toy.data, fake_team())
    assert score.val_bpb is None and loss_name(part) == "val_loss_partial"
    assert score.val_loss == pytest.approx(reference_nats(model, toy.data.val[:101]).mean(), rel=1e-6)
    assert loss_name(toy.cfg) == "val_loss" == loss_name(preset_config("speedrun"))
    assert evaluate(model, toy.cfg, toy.data._replace(val_bytes=None), fake_team()).val_bpb is None


# -------------------------------------------------------------------------------- the artifact
def quantized(w, step, floor, levels=127):
    """int8 rows and their scales."""
    if step:
        return train_gpt.quantize_by_rms(w, step, levels)
    return train_gpt.quantize_by_maximum(w, levels, floor)


@pytest.mark.parametrize("step, floor", [(0, 0.0), (0, 1 / 127), (0.05, 0.0), (0.3, 0.0), (1.0, 0.0)])
@pytest.mark.parametrize("rows, columns", [(12, 700), (6, 1), (6, 2), (4, 70_000)])
def test_quantize_rows_equals_numpy(rows, columns, step, floor):
    """By the clipped maximum of each row, but no scale is below the floor, and rounding goes by it before it
    is stored as fp16; or by a step of so much of the rms, as stored; what lies beyond 127 is clipped. Rows of
    many sizes, one of zeros, one below fp16's range, an outlier."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((rows, columns)) * np.exp(rng.uniform(-8, 3, (rows, 1)))
    w[0] = 0
    w[1] = 1e-9
    w[2, columns // 2] = -9.0
    w = w.astype(np.float32)
    q, scale = (t.numpy() for t in quantized(torch.from_numpy(w), step, floor))
    assert q.dtype == np.int8 and scale.dtype == np.float16 and scale.shape == (rows,)
    exact = w.astype(np.float64)
    clip = np.percentile(np.abs(exact), 99.99984, axis=1)
    want = np.maximum(step * np.sqrt((exact**2).mean(1)) if step else clip / 127, max(floor, 2.0**-24))
    assert (np.abs(scale - want) <= np.maximum(want * 2.0**-10, 2.0**-25 + 1e-12)).all()
    s = (scale.astype(np.float64) if step else want)[:, None]
    near = np.abs(w / s % 1 - 0.5) < 1e-4  # a tie may fall either way
    assert (np.abs(q - np.clip(np.rint(w / s), -127, 127)) <= near).all() and not q[0].any()


def packed_by_recipe(model):
    """The artifact of a model, as a run packs it."""
    return model.cfg.pack(fake_run(model.cfg, model))


def of_model(cfg):
    """{constant: value} of those that a model's files hold."""
    return {f.name: getattr(cfg, f.name) for f in fields(cfg) if f.metadata["model"]}


def wide_config(preset="tiny", **settings):
    """Matrices on both sides of artifact_keep: 256 x 256 is the largest that stays fp16."""
    size = dict(vocab_size=300, train_seq_len=16, train_batch_tokens=16, num_layers=1, mlp_mult=2,
                model_dim=256, num_heads=4)
    own = {
        "tiny": dict(value_embed_layers=(1,), bigram_rows=300, count_bits=12, window_pattern="SL",
                     window_schedule=(8,), batch_schedule=(1,)),
        "golf": dict(num_kv_heads=0, artifact_bytes_limit=0),
        "golf_plus": dict(num_kv_heads=0, loop_layers=(0,), gptq_batches=0, artifact_bytes_limit=0)}
    return RECIPES[preset](**size | own[preset] | settings)


@pytest.mark.parametrize("preset, settings", [
    ("tiny", {}), ("tiny", dict(artifact_keep=1)),
    ("golf", dict(artifact_keep=1, artifact_scale_floor=0.004)),
    slow("golf_plus", dict(num_layers=2, artifact_step=0.2)),
    ("golf_plus", dict(artifact_step=0.0, artifact_embed_step=0.3, artifact_keep=4096,
                       artifact_codec="zlib"))])
@torch.no_grad()
def test_what_an_artifact_holds(preset, settings, tmp_path):
    """Small tensors in fp16, of the rest int8 rows, by the parameter table; scalars as they are or in fp16;
    like beside like. Loaded it is that model, whatever T. Neither the run nor its date nor a path gets in."""
    secret = dict(run_id="my_secret_run", data_path="/home/somebody/data", seed=77)
    cfg = wide_config(preset, **settings)
    packed, again = (packed_by_recipe(randomised(replace(cfg, **more))) for more in ({}, secret))
    assert packed == again
    raw = train_gpt.decompress(packed)
    assert not any(word in raw for word in (b"secret", b"/home", b"run_id", b"/tmp", str(ROOT).encode()))
    assert {info.date_time[0] for info in zipfile.ZipFile(io.BytesIO(raw)).infolist()} == {1980}
    tensors = torch.load(io.BytesIO(raw), weights_only=True)["tensors"]
    widths = [t.element_size() for t in tensors.values()]
    assert widths == sorted(widths)
    path = tmp_path / "model.ptz"
    model = randomised(cfg)
    path.write_bytes(packed)
    loaded, known = train_gpt.load_model(path)
    assert of_model(known) == of_model(cfg)
    if preset == "tiny":
        for name, tensor in model.counts.stored().items():
            assert torch.equal(tensors.pop(name), tensor)
    floor = vars(cfg).get("artifact_scale_floor", 0.0)
    table = cfg.parameter_table()
    for name, p in model.named_parameters():
        row = table[kind_of(name)]
        back = loaded.get_parameter(name)
        if row.precision == "fp32":
            assert torch.equal(tensors.pop(name), p) and torch.equal(back, p)
        elif row.precision == "fp16" or p.numel() <= cfg.artifact_keep:
            assert torch.equal(tensors.pop(name), p.half()) and torch.equal(back, p.half().float())
        else:
            q, scale = quantized(p, row.step, floor, row.levels)
            assert torch.equal(tensors.pop(name + ".int8"), q)
            assert torch.equal(tensors.pop(name + ".scale"), scale)
            assert torch.equal(back, q.float() * scale.float()[:, None]) and (back - p).norm() < p.norm() / 3
    assert not tensors
    tokens = torch.arange(46).view(2, 23)
    want = log_probs(model, tokens)
    assert 0 < (log_probs(loaded, tokens) - want).abs().mean() < 0.25 * want.std()
    path.write_bytes(packed[:-100])
    with pytest.raises(Refused):
        train_gpt.load_model(path)


def test_sizes_and_limits_of_artifacts(tmp_path, monkeypatch):
    """Fewer levels are a smaller file; the limit is the last size that is within it; weights beyond fp16 are
    no artifact. What is larger is rounded further: test_plus.py."""
    monkeypatch.setattr(train_gpt, "script_source", lambda: bytes(50))
    small = dict(artifact_keep=4096, model_dim=128, artifact_codec="zlib")
    model, coarser = (
        randomised(wide_config("golf_plus", artifact_step=step, artifact_embed_step=step, **small))
        for step in (0.1, 0.25))
    size = len(packed_by_recipe(model))
    assert len(packed_by_recipe(coarser)) < 0.85 * size
    for limit, fits, word in ((0, True, "none"), (size + 50, True, size + 50), (60, False, "60, OVER")):
        said = []
        run = fake_run(replace(model.cfg, artifact_bytes_limit=limit), model, folder=tmp_path,
                       log=lambda *lines, **event: said.extend(lines))
        train_gpt.write_and_read_back(run)
        assert run.report == dict(bytes_model=size, bytes_total=size + 50, artifact_within_limit=fits)
        assert said[-1].endswith(f"limit {word}")
    model.head.data[0, 0] = 1e8
    with pytest.raises(Refused, match="the weights outgrew the artifact's fp16"):
        pack_artifact(model)


# -------------------------------------------------------------------------------- one run
RULE = "=" * 100
# 69,632 embedding and head weights: more than artifact_keep, so that the artifact holds int8 rows
RUN = TOY | dict(
    RUN_ID="first", MODEL_DIM="136", VAL_TOKENS="0", ITERATIONS="25", TRAIN_LOG_EVERY="5",
    VAL_LOSS_EVERY="20", WARMUP_STEPS="1", ARTIFACT_BYTES_LIMIT="1000", MATRIX_LR="0.02")
FILE = "logs/first/final_model.int8.ptz"
AGAIN = {key: TOY[key] for key in ("DATA_PATH", "DATA_FINGERPRINT", "DEVICE", "COMPILE", "DTYPE")}
TAG = "final_int8_zlib_roundtrip"


@pytest.fixture(scope="module")
def first(root):
    """A run of 25 steps through the command line, with the data at an absolute path."""
    source = SCRIPT.read_bytes()
    data = (root / TOY["DATA_PATH"]).resolve()
    done = run_cli(root, env=RUN | {"DATA_PATH": str(data)}, timeout=600)
    assert done.code == 0, done.err
    assert {path.name for path in root.iterdir()} == {"data", "logs"}
    text = (root / "logs/first/train.log").read_text()
    assert text.startswith(source.decode() + f"\n{RULE}\n")
    return SimpleNamespace(**vars(look(root / "logs/first")), out=done.out, source=source,
                           machine=text.split(f"\n{RULE}\n")[1])


def find(first, pattern):
    """The groups of every line of the log that is the pattern."""
    return [m.groups() for m in map(re.compile(pattern).fullmatch, first.log.splitlines()) if m]


def test_run_folder(first):
    """What a run leaves behind; no absolute path, host or user name in it."""
    assert {path.name for path in first.folder.iterdir()} == {
        "train.log", "events.jsonl", "train_gpt.py", "result.json", "final_model.int8.ptz", "final_model.pt"}
    assert (first.folder / "train_gpt.py").read_bytes() == first.source
    assert all(word in first.machine for word in ("python 3.", f"torch {torch.__version__}", "hardware:"))
    text = first.machine + first.log + json.dumps(first.result)
    user = getpass.getuser()
    secrets = first.folder.parents[1], ROOT, f"{Path.home()}/", platform.node(), f"/{user}/", f"{user}@"
    assert not [secret for secret in map(str, secrets) if len(secret) > 3 and secret in text]
    assert not re.search(r"/(tmp|home|work|usr|Users|var)/", text)


def test_log_lines(first):
    """What other people's parsers read."""
    number = r"(\d+\.\d{4})"
    time = r"train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"
    train = find(first, rf"step:(\d+)/25 train_loss:{number} {time}.*")
    val = find(first, rf"step:(\d+)/25 val_loss:{number} val_bpb:{number} {time}")
    assert [int(step) for step, *_ in train] == [*range(1, 11), 15, 20, 25]
    assert [int(step) for step, *_ in val] == [0, 20, 25]
    losses = [float(loss) for _, loss, *_ in train]
    assert max(losses[0], float(val[0][1])) < math.log(512)     # untrained: n-grams beside a uniform guess
    assert losses[-1] < math.log(512) - 1
    times = [int(ms) for _, _, ms, _ in train]
    assert times == sorted(times)
    assert all(float(mean) == pytest.approx(int(ms) / int(step), abs=1) for step, _, ms, mean in train)
    for once in (r"Serialized model int8\+zlib: \d+ bytes", r"override matrix_lr \S+ -> 0\.02",
                 rf"{TAG} val_loss:{number} val_bpb:{number}", r"peak memory .*: \d+ MiB.*",
                 rf"{TAG}_exact val_loss:\d\.\d{{8}} val_bpb:\d\.\d{{8}}"):
        assert len(find(first, once)) == 1, once
    assert len(find(first, r"config (\w+)=.*")) == len(fields(Tiny))
    shown = [line for line in first.log.splitlines() if not line.startswith("config ")]
    assert all(line in first.out for line in shown), "the terminal shows all but the config"


def test_result(first):
    """The keys that others read, and the log's own numbers. Over its game's byte limit a run is marked."""
    r = first.result
    assert set(r) >= set("""run_id preset seed val_loss val_bpb core train_time_ms steps tokens bytes_code
        bytes_model bytes_total code_sha256 world_size hardware torch config overrides data eval stop_reason
        started finished resumed""".split())
    ((loss, bpb),) = find(first, rf"{TAG}_exact val_loss:(\S+) val_bpb:(\S+)")
    assert f"{r['val_loss']:.8f}" == loss and f"{r['val_bpb']:.8f}" == bpb
    ((ms,),) = find(first, r"step:25/25 val_loss:.* train_time:(\d+)ms .*")
    assert r["train_time_ms"] == int(ms) and r["steps"] == 25 and r["tokens"] == 25 * 1024
    assert r["bytes_model"] == (first.folder / "final_model.int8.ptz").stat().st_size
    assert r["bytes_code"] == len(first.source) and r["bytes_total"] == r["bytes_model"] + r["bytes_code"]
    sizes = [*find(first, r"Serialized model int8\+zlib: (\d+) bytes"),
             *find(first, r"Total submission size int8\+zlib: (\d+) bytes, limit 1000, OVER")]
    assert [int(size) for size, in sizes] == [r["bytes_model"], r["bytes_total"]]
    assert r["code_sha256"] == hashlib.sha256(first.source).hexdigest() and not r["artifact_within_limit"]
    assert (r["run_id"], r["preset"], r["seed"], r["world_size"]) == ("first", "tiny", 1337, 1)
    assert (r["core"], r["resumed"], r["stop_reason"]) == (None, False, "iterations")
    assert r["torch"] == torch.__version__ and r["hardware"]
    assert set(r["config"]) == {f.name for f in fields(Tiny)} and r["config"]["matrix_lr"] == "0.02"
    assert "matrix_lr" in r["overrides"] and "embed_lr" not in r["overrides"]
    assert r["started"] <= r["finished"] and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", r["started"])
    assert r["data"]["fingerprint"] == "toy" and r["val_bpb"] / r["val_loss"] == pytest.approx(
        (r["data"]["val_tokens"] - 1) / math.log(2) / r["data"]["val_bytes"], rel=1e-9)


def test_the_file_scores_what_the_run_said(first, root, train, go):
    """On one rank and on two, in other batches: the exact line of the run; the sliding score, whose rows the
    ranks share, in the log and in the result."""
    asked = AGAIN | dict(EVAL_FROM=FILE, EVAL_SLIDING="32")
    one = train(asked)
    two = go(asked | {"VAL_BATCH_SIZE": "1000"}, ranks=2)
    keys = ["val_loss", "val_bpb", "val_loss_sliding", "val_bpb_sliding"]
    for done in (one, two):
        assert done.code == 0, done.err
        result = done.result
        line = r"^final_sliding val_loss_sliding:(\S+) val_bpb_sliding:(\S+) eval_time:(\d+)ms$"
        ((loss, bpb, ms),) = re.findall(line, done.out, re.M)
        assert [f"{result[key]:.8f}" for key in keys[2:]] == [loss, bpb]
        assert result["eval_sliding_ms"] == int(ms)
        assert float(bpb) / float(loss) == pytest.approx(result["val_bpb"] / result["val_loss"], rel=1e-6)
        ((loss, bpb),) = re.findall(rf"^{TAG}_exact val_loss:(\S+) val_bpb:(\S+)$", done.out, re.M)
        assert [f"{result['val_loss']:.8f}", f"{result['val_bpb']:.8f}"] == [loss, bpb]
        for key in ("val_loss", "val_bpb"):
            assert result[key] == pytest.approx(first.result[key], abs=1e-6)
        assert [result[key] for key in keys] == pytest.approx([one.result[key] for key in keys], rel=2e-4)
        assert result["core"] is None
    assert two.result["world_size"] == 2 and two.result["stop_reason"] == "eval_from"
    assert len({one.result[key] for key in keys}) == 4 and not {*keys[2:]} & {*first.result}


def test_eval_from_the_trained_weights(first, train):
    done = train(AGAIN, EVAL_FROM="logs/first/final_model.pt")
    assert done.code == 0, done.err
    ((loss, bpb),) = re.findall(r"^final_model_exact val_loss:(\S+) val_bpb:(\S+)$", done.out, re.M)
    (last,) = find(first, r"step:25/25 val_loss:(\S+) val_bpb:(\S+) .*")
    assert [float(loss), float(bpb)] == pytest.approx([float(text) for text in last], abs=6e-5)
    assert done.result["val_loss"] == pytest.approx(first.result["trained"]["val_loss"], abs=1e-6)
    assert abs(done.result["val_loss"] - first.result["val_loss"]) > 1e-7, "int8 costs something"
    model, _ = train_gpt.load_model(first.folder / "final_model.pt")
    assert packed_by_recipe(model) == first.artifact


def test_a_run_whose_artifact_is_rounded_more(train):
    """Its names say so, in the run and when the file is scored again."""
    toy = toy_of("golf_plus", LOOP_LAYERS="0", GPTQ_BATCHES="2", EVAL_SLIDING="0", ARTIFACT_KEEP="1000",
                 PACKING="rows")
    done = train(toy, ARTIFACT_STEP="0.3", ITERATIONS="3")
    assert done.code == 0, done.err
    path = done.folder / "final_model.brot.ptz"
    (size,) = re.findall(r"^Serialized model brotli: (\d+) bytes", done.out, re.M)
    assert int(size) == path.stat().st_size and "int8" not in done.out and done.artifact is None
    (score,) = re.findall(r"^final_brotli_roundtrip_exact .*$", done.out, re.M)
    file = f"logs/{done.run_id}/{path.name}"
    again = train(AGAIN, PRESET="golf_plus", EVAL_FROM=file, VAL_TOKENS=TOY["VAL_TOKENS"], TOKENIZER_PATH="",
                  EVAL_SLIDING="0")
    assert again.code == 0 and score in again.out.splitlines()
