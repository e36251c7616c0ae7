"""The speedrun preset: its tables, a scaled run with every part of it on one rank, two ranks and two hosts,
documents, NorMuon, what attention costs, and what the schedules refuse."""

import contextlib
import io
import itertools
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_gpt
from helpers import SCRIPT, fake_team, library_documents, run_cli, shard_file, write_shard
from test_model import randomised
from train_gpt import GPT, Config, Loader, Optimizer, Refused, load_config, preset_config

SPEEDRUN = preset_config("speedrun")


pytestmark = pytest.mark.usefixtures("one_thread")


# -------------------------------------------------------------------------------- the table of FACTS
def record_stage(step):
    """(tokens of the step, long window, short window): thirds of 2,120 steps, then the extension."""
    if step < 707:
        return 131_072, 384, 128
    if step < 1414:
        return 262_144, 896, 384
    return (393_216, 1408, 640) if step < 2120 else (393_216, 1664, 768)


def record_lr(step):
    """1.0, 1.51 and 1.93 from steps 0, 700 and 1400; linear to 0.1 over the last 55 % of 2,120 steps; 0.1 for
    40 more."""
    top = 1.0 if step < 700 else 1.51 if step < 1400 else 1.93
    left = max(0, 2120 - step) / (0.55 * 2120)
    return top if left >= 1 else 0.1 + (top - 0.1) * left


def record_momentum(step):
    """0.85 to 0.95 in 300 steps, and back in the last 50 of 2,160."""
    return 0.85 + 0.1 * min(1, step / 300, (2160 - step) / 50)


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """What --dry-run prints where there are no data."""
    folder = tmp_path_factory.mktemp("dry")
    done = run_cli(folder, "--preset=speedrun", "--dry-run", env={"DEVICE": "cpu"})
    assert done.code == 0, done.err
    assert not list(folder.iterdir()), "a dry run writes nothing"
    return done.out


def table(text):
    """{step: the rest of its line} of the plan."""
    return {int(step): rest for step, rest in re.findall(r"^at step (\d+) \([\d.]+%\): (.*)$", text, re.M)}


def table_line(step):
    tokens, long, short = record_stage(step)
    return (f"tokens:{tokens} long_window:{long} short_window:{short} lr_factor:{record_lr(step):.4f} "
            f"muon_momentum:{record_momentum(step):.4f}")


def test_dry_run_prints_the_stage_table(dry_run):
    lines = table(dry_run)
    assert {0, 150, 300, 700, 707, 1400, 1414, 2110, 2120, 2160} <= set(lines)
    for step in set(lines) - {2160}:
        assert lines[step] == table_line(step)
    assert lines[2160].endswith("lr_factor:0.1000 muon_momentum:0.8500")
    for step, words in {    # the same in figures, lest one mistake is made twice
            0: "tokens:131072 long_window:384 short_window:128 lr_factor:1.0000 muon_momentum:0.8500",
            150: "muon_momentum:0.9000", 300: "muon_momentum:0.9500", 700: "lr_factor:1.5100",
            707: "tokens:262144 long_window:896 short_window:384 lr_factor:1.5100",
            1400: "lr_factor:1.2300",
            1414: "tokens:393216 long_window:1408 short_window:640 lr_factor:1.2080",
            2110: "muon_momentum:0.9500", 2120: "tokens:393216 long_window:1664 short_window:768"}.items():
        assert words in lines[step]


def test_dry_run_prints_the_final_window(dry_run):
    assert re.search(r"long_window:2560 short_window:768\b", dry_run)


def test_dry_run_prints_size_cost_and_what_data_it_needs(dry_run):
    matrices = 10 * 4 * 768 * 768 + 11 * 2 * 768 * 3072    # 10 layers with attention, 11 with an MLP
    tables = 50_304 * 768                                   # embedding, head, three value embeddings
    bigrams = 131_072 * 768
    counts = dict(re.findall(r"(embed|head|scalar|matrix|value_embed):(\d+)", dry_run))
    assert int(counts["matrix"]) == matrices and int(counts["value_embed"]) == 3 * tables + bigrams
    total = int(re.search(r"^parameters:(\d+)", dry_run, re.M)[1])
    assert total == matrices + 5 * tables + bigrams + int(counts["scalar"])
    flops = float(re.search(r"FLOPs per token:(\S+)", dry_run)[1])
    keys = 2 * 1664 / 2 + 8 * 768 / 2       # two long layers, eight short ones; all, as the field counts
    assert flops == pytest.approx(6 * (matrices + tables) + 12 * 768 * 2 * keys, rel=1e-3)
    assert int(re.search(r"memory:(\d+) MiB", dry_run)[1]) > 1000
    tokens = 131_072 * (707 * 1 + 707 * 2 + 746 * 3)
    assert tokens == 571_342_848
    assert f"2160 steps of {tokens} tokens in all, {tokens / 2160:.0f} per step" in dry_run
    data, = re.findall(r"^data: .*$", dry_run, re.M)
    assert "no train and val shards at 'data/datasets/fineweb10B_gpt2'" in data
    assert "`./run.sh data gpt2`" in data


def test_every_step_of_the_schedules():
    """All 2,160 steps against FACTS spelled out above."""
    spent = 0
    for step in range(2161):
        progress = train_gpt.run_progress(SPEEDRUN, step, 1e6)
        stage = train_gpt.stage_at(SPEEDRUN, progress)
        tokens = SPEEDRUN.train_batch_tokens * stage.batch_multiple
        sizes = train_gpt.window_sizes(SPEEDRUN, stage.window, SPEEDRUN.train_seq_len)
        assert (tokens, sizes["L"], sizes["S"]) == record_stage(step), step
        assert train_gpt.lr_factor(SPEEDRUN, step, progress) == pytest.approx(record_lr(step), abs=1e-9), step
        momentum = train_gpt.muon_momentum(SPEEDRUN, step, progress)
        assert momentum == pytest.approx(record_momentum(step), abs=1e-9), step
        spent += tokens if step < 2160 else 0
    assert spent == train_gpt.planned_tokens(SPEEDRUN) == 571_342_848
    final = train_gpt.window_sizes(SPEEDRUN, train_gpt.eval_window(SPEEDRUN), SPEEDRUN.train_seq_len)
    assert final == {"L": 2560, "S": 768}


def test_the_rest_of_the_record():
    """Constants of FACTS 1 that no table shows; learning rates are lr times multiplier there."""
    optimizer = Optimizer(GPT(replace(SPEEDRUN, vocab_size=64, model_dim=96)), SPEEDRUN)
    lr = {"embed": 0.008 * 75, "value_embed": 0.008 * 75, "scalar": 0.008 * 5, "head": 0.008, "matrix": 0.023}
    assert optimizer.lr == pytest.approx(lr)
    c = SPEEDRUN
    assert (c.beta1, c.beta2, c.adam_eps, c.adam_every) == (0.65, 0.95, 1e-8, 2)
    assert (c.normuon_beta2, c.weight_decay, c.orthogonalization) == (0.95, 1.2, "polar_express")
    assert (c.max_doc_len, c.val_tokens, c.skip_layers, c.backout_layer) == (2048, 10_485_760, (4, 7), 8)
    assert (c.attn_gate_dim, c.rope_base, c.vocab_size, c.mlp_mult) == (12, 1024, 50_304, 4)
    x = torch.linspace(-40, 40, 9)      # a softmax does not feel the 15
    torch.testing.assert_close(train_gpt.softcap(x, c.logit_softcap) + 15, 30 * torch.sigmoid(x / 7.5))
    assert not c.shuffle and c.max_epochs == 1 and c.max_wallclock_seconds == 0
    assert [i for i, kind in enumerate(c.window_pattern) if kind in "LS"] == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11]
    assert c.window_pattern.count("0") == 1 and c.window_pattern[0] == "0"  # the one without an MLP
    assert [i for i, kind in enumerate(c.window_pattern) if kind == "L"] == [4, 11]
    assert [i for i, table in enumerate(c.value_embed_layers) if table] == [1, 2, 9, 10, 11]


def test_attention_scale_follows_the_windows():
    """0.1 times the product of 1 + 0.2 ln of the ratios; no further change for the final window."""
    want = 0.1
    for old, new in zip((None, *SPEEDRUN.window_schedule), SPEEDRUN.window_schedule):
        want *= 1 + 0.2 * math.log(new / old) if old else 1
        assert train_gpt.rope_frequencies(SPEEDRUN, new)[1] == pytest.approx(want)
    last, final = (train_gpt.rope_frequencies(SPEEDRUN, window) for window in (1664, 2560))
    assert torch.equal(last[0], final[0]) and last[1] == final[1] == pytest.approx(want)
    assert (last[0][:32] > 0).all() and (last[0][32:] == 0).all(), "half of the dims turn"


# -------------------------------------------------------------------------------- a scaled run
BOS = 256      # after the 256 bytes that are the other tokens of the toy data
SCALED = dict(
    PRESET="speedrun", COMPILE="0", DEVICE="cpu", DTYPE="float32", DATA_PATH="data/datasets/bytes",
    VOCAB_SIZE="272", NUM_LAYERS="6", MODEL_DIM="32", NUM_HEADS="2", TRAIN_SEQ_LEN="128",
    TRAIN_BATCH_TOKENS="512", MAX_DOC_LEN="80", BIGRAM_ROWS="512",
    VALUE_EMBED_LAYERS="0,1,2,0,1,2", WINDOW_PATTERN="0SL-SL", SKIP_LAYERS="2,3",
    BACKOUT_LAYER="4", WINDOW_SCHEDULE="12,28,44,52", WINDOW_BLOCK="4", EVAL_WINDOW="80", ITERATIONS="24",
    EXTENSION_ITERATIONS="4", MUON_MOMENTUM_WARMUP_STEPS="6", MUON_MOMENTUM_COOLDOWN_STEPS="4",
    VAL_TOKENS="3000", VAL_LOSS_EVERY="7", TRAIN_LOG_EVERY="1")
# step at which each begins: sequences, long window, short window
STAGES = {0: (4, 12, 4), 8: (8, 28, 12), 16: (12, 44, 20), 24: (12, 52, 24)}
TOKENS = 128 * (8 * 4 + 8 * 8 + 12 * 12)
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder to run in: bytes of Python source in documents of one to eight lines, as GPT-2-format shards
    that cut documents anywhere. Their manifest knows the vocabulary and the BOS, and no tokenizer."""
    folder, rng = tmp_path_factory.mktemp("speedrun"), random.Random(0)
    lines, tokens = "".join(library_documents(150_000)).splitlines(keepends=True), []
    while lines:
        count = rng.randrange(1, 9)
        tokens += [BOS, *"".join(lines[:count]).encode()]
        del lines[:count]
    data = folder / "data/datasets/bytes"
    splits = {"fineweb_val_000000": tokens[:8000], "fineweb_train_000001": tokens[8000:30_011],
              "fineweb_train_000002": tokens[30_011:]}
    files = [write_shard(data / f"{name}.bin", part) | {"split": name.split("_")[1]}
             for name, part in splits.items()]
    manifest = {"files": files, "tokenizer": {"vocab_size": 257, "bos_id": BOS}}
    (data / "manifest.json").write_text(json.dumps(manifest))
    return folder


def run_here(root, **settings):
    """main() in this process, beside data/: settings over SCALED -> code, out, err, log, result, weights."""
    name, out, err = f"run{next(NUMBERS)}", io.StringIO(), io.StringIO()
    with contextlib.chdir(root), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = train_gpt.main([], SCALED | {"RUN_ID": name} | settings)
    folder = root / "logs" / name
    read = lambda file: (folder / file).read_bytes() if (folder / file).exists() else b""  # noqa: E731
    log = read("train.log").decode().rpartition("=" * 100 + "\n")[2]
    return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue(), log=log, folder=folder,
                           result=json.loads(read("result.json") or "null"), weights=read("final_model.pt"))


def curves(text):
    """{(kind, step): loss} of a log's step lines, train and val, and of its final lines."""
    lines = re.findall(r"^step:(\d+)/\d+ (train|val)_loss(?:_partial)?:(\S+)", text, re.M)
    last = re.findall(r"^final_model_exact val_loss_partial:(\S+)", text, re.M)
    return {(kind, int(step)): float(loss) for step, kind, loss in lines} | {
        ("final", 28): float(loss) for loss in last}


def same_curves(got, want):
    """To 1e-4 at every step; the lines have four decimals."""
    got, want = curves(got), curves(want)
    assert sorted(got) == sorted(want) and len(want) == 28 + 5 + 1
    assert max(abs(got[place] - want[place]) for place in want) < 1.01e-4


@pytest.fixture(scope="module")
def alone(root):
    """The scaled run on one rank, with (sequences, windows, LR factor, momentum) of each step and the windows
    of each evaluation."""
    steps, evaluations = [], []
    real_step, real_evaluate = train_gpt.train_step, train_gpt.evaluate

    def train_step(loss_fn, optimizer, batch, micro, lr, momentum):
        if len(evaluations):    # else it is the rehearsal's
            sizes = loss_fn.reach
            steps.append((len(batch[0]), sizes["L"], sizes["S"], lr, momentum))
        return real_step(loss_fn, optimizer, batch, micro, lr, momentum)

    def evaluate(model, *rest):
        score = real_evaluate(model, *rest)
        evaluations.append((model.reach["L"], model.reach["S"]))
        return score

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "train_step", train_step)
        patch.setattr(train_gpt, "evaluate", evaluate)
        done = run_here(root)
    assert done.code == 0, done.err
    done.steps, done.evaluations = steps, evaluations
    return done


def test_the_scaled_run_passes_all_stages(alone):
    """What the plan in the log says is what the steps did."""
    assert len(alone.steps) == 28
    for step, (sequences, long, short, lr, momentum) in enumerate(alone.steps):
        assert (sequences, long, short) == STAGES[max(start for start in STAGES if start <= step)]
        top = (1.0, 1.51, 1.93)[(step >= 0.33 * 24) + (step >= 0.66 * 24)]
        down = min(1, max(0, 1 - (24 - step) / (0.55 * 24)))
        assert lr == pytest.approx(top + (0.1 - top) * down)
        assert momentum == pytest.approx(0.85 + 0.1 * min(1, step / 6, (28 - step) / 4))
    plan = table(alone.log)
    for start, (sequences, long, short) in STAGES.items():
        assert plan[start].startswith(f"tokens:{128 * sequences} long_window:{long} short_window:{short} ")
    assert set(alone.evaluations) == {(80, 24)} and len(alone.evaluations) == 6
    assert "in evaluation: long_window:80 short_window:24" in alone.log


def test_the_scaled_run_learns(alone):
    losses = curves(alone.log)
    train = [losses["train", step] for step in range(1, 29)]
    val = [losses["val", step] for step in range(0, 29, 7)]
    assert train[0] == pytest.approx(math.log(272), abs=1e-3) == val[0]
    assert all(map(math.isfinite, train)) and np.mean(train[-4:]) < np.mean(train[8:12]) < train[0] - 1
    assert val == sorted(val, reverse=True) and val[-1] < 3.5


def test_the_scaled_run_counts_its_tokens(alone):
    assert alone.result["tokens"] == TOKENS and alone.result["steps"] == 28
    assert f"28 steps of {TOKENS} tokens in all, {TOKENS / 28:.0f} per step" in alone.log
    assert alone.result["eval"]["eval_window"] == 80 and alone.result["val_bpb"] is None


def test_the_final_score_is_the_final_windows(alone, root):
    """Computed from the weights in the run folder, row by row."""
    model, cfg = train_gpt.load_model(alone.folder / "final_model.pt")
    val = np.fromfile(root / "data/datasets/bytes/fineweb_val_000000.bin", "<u2", offset=1024)[:3000]
    tokens = torch.from_numpy(val.astype(np.int64))

    def loss(window):
        nats = 0.0
        for first in range(0, 2999, 128):
            row = tokens[first:first + 129]
            model.set_context(len(row) - 1, window)
            with torch.no_grad():
                nats -= train_gpt.log_probs(model, row[None, :-1])[0].gather(1, row[1:, None]).sum().item()
        return nats / 2999

    assert (cfg.bos_id, cfg.eval_window, cfg.max_doc_len) == (BOS, 80, 80)
    assert alone.result["val_loss_partial"] == pytest.approx(loss(80), abs=2e-6)
    assert abs(loss(80) - loss(12)) > 1e-5, "else the test proves nothing"


def test_the_final_score_is_found_again(alone, root):
    """EVAL_FROM the run's weights, which no schedule hinders for which the train tokens would not suffice."""
    done = run_here(root, EVAL_FROM=f"logs/{alone.folder.name}/final_model.pt", ITERATIONS="5000")
    assert done.code == 0, done.err
    assert done.result["val_loss_partial"] == pytest.approx(alone.result["val_loss_partial"], abs=1e-6)
    assert done.result["eval"] == alone.result["eval"]


def test_micro_batches_agree_with_one_batch(alone, root):
    done = run_here(root, DEVICE_BATCH_SIZE="1")
    assert done.code == 0 and "micro_batch:1x128 grad_accum_steps:4" in done.out, done.err
    same_curves(done.log, alone.log)


@pytest.fixture(scope="module")
def two_ranks(root):
    done = run_cli(root, ranks=2, env=SCALED | {"RUN_ID": "two"})
    assert done.code == 0, done.err
    return done.out


def test_two_ranks_agree_with_one(alone, two_ranks, root):
    same_curves(two_ranks, alone.log)
    result = json.loads((root / "logs/two/result.json").read_text())
    assert result["world_size"] == 2 and result["tokens"] == TOKENS


def test_a_real_vocabulary_and_no_manifest(tmp_path):
    """50,257 tokens of which 50256 begins a document, padded to 50,304, as published shards have them."""
    rng = np.random.default_rng(0)
    for split, size in (("train_000001", 1600), ("train_000002", 960), ("val_000000", 300)):
        tokens = rng.integers(0, 50_256, size)
        tokens[::40] = 50_256
        write_shard(tmp_path / f"data/datasets/bytes/fineweb_{split}.bin", tokens)
    done = run_here(tmp_path, VOCAB_SIZE="50304", MODEL_DIM="16", TRAIN_SEQ_LEN="64", TRAIN_BATCH_TOKENS="64",
                    ITERATIONS="3", EXTENSION_ITERATIONS="1", VAL_TOKENS="200", VAL_LOSS_EVERY="0")
    assert done.code == 0, done.err
    assert done.result["tokens"] == 64 * (1 + 2 + 3 + 3) and done.result["config"]["bos_id"] == "50256"
    assert "documents: 64 in 32 rows; of 2560 train tokens 2080 are read, 0 beyond" in done.log
    assert "no tokenizer" in done.log


# -------------------------------------------------------------------------------- the stage warm-up
def test_the_stage_warm_up_leaves_no_trace(alone, root):
    """Weights and losses of a run, to the bit, whether seven steps were rehearsed, two or nothing at all."""
    warm = run_here(root, WARMUP_STEPS="7")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "rehearse", lambda cfg, team, model, *rest: model)
        cold = run_here(root)
    assert warm.code == cold.code == 0
    assert warm.weights == cold.weights == alone.weights
    assert curves(warm.log) == curves(cold.log) == curves(alone.log)


def test_the_stage_warm_up_restores_the_state(root):
    """Model, optimizer, rotary tables, loader and random generators, with state that is not zero."""
    with contextlib.chdir(root):
        cfg = replace(load_config(SCALED | {"WARMUP_STEPS": "9"}), bos_id=BOS)
        team = train_gpt.Team(cfg, {})
        data = train_gpt.open_data(cfg)
        loader = Loader(cfg, data, team)
        model = GPT(cfg)
        train_gpt.init_parameters(model, 1)
        optimizer = Optimizer(model, cfg)
        model.set_context(128, 12)
        for _ in range(2):
            train_gpt.train_step(model, optimizer, loader.next(512), 2, 1.0, 0.9)
        optimizer.step_count = 0

    def state():
        rng = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        numbers = optimizer.step_count, loader.position, loader.epoch, model.scale, model.reach
        return [t.clone() for t in (*optimizer.tensors(), *model.parameters(), *model.rope)], (rng, numbers)

    before, windows, real = state(), [], model.set_context
    model.set_context = lambda T, window: (windows.append(window), real(T, window))
    assert train_gpt.rehearse(cfg, team, model, optimizer, 2, print) is model
    assert set(windows) == {12, 28, 44, 52} and len(windows) == 9, "each was rehearsed"
    real(128, 12)   # as the first step of a run does
    after = state()
    assert all(map(torch.equal, before[0], after[0])) and before[1] == after[1]
    fetched = loader.next(512)[0]
    assert fetched[0].tolist() == loader.row(8).tolist()[:-1], "nor does the loader skip a row"


# -------------------------------------------------------------------------------- documents
def document_stream(seed, count, longest=40, lead=5):
    """Tokens of so many documents of 1 to `longest` tokens, each number but the BOS used once, after `lead`
    tokens of a document whose BOS is missing."""
    rng, fresh = random.Random(seed), itertools.count(1000)
    tokens = [next(fresh) for _ in range(lead)]
    for _ in range(count):
        tokens += [BOS, *(next(fresh) for _ in range(rng.randrange(longest)))]
    return tokens


def packed_rows(tokens, longest, T):
    """Plain packing -> (rows of T + 1 tokens, documents, tokens beyond `longest`, tokens in no row)."""
    documents, rows, row = [], [], []
    for token in tokens:
        if token == BOS:
            documents.append([])
        if documents:
            documents[-1].append(token)
    cut = sum(max(0, len(document) - longest) for document in documents)
    lost = tokens.index(BOS)
    for document in documents:
        row = row + document[:longest]
        if len(row) > T:
            rows.append(row[:T + 1])
            lost += len(row) - (T + 1)
            row = []
    return rows, len(documents), cut, lost + len(row)


def document_loader(tokens, cuts=(), rank=0, world_size=1, T=16, longest=20, log=print, **settings):
    """Loader of a stream that is cut into shards at these places."""
    cfg = replace(Config(), train_seq_len=T, max_doc_len=longest,
                  **dict(shuffle=False, train_batch_tokens=8 * T) | settings)
    shards = np.split(np.array(tokens, "<u2"), cuts)
    train = {f"s{i}": shard_file(shard) for i, shard in enumerate(shards)}
    data = SimpleNamespace(train=train, vocab_size=60_000, bos=BOS, about={"name": "toy"})
    return Loader(cfg, data, fake_team(rank, world_size), log)


def rows_of(loader, steps, batch_tokens):
    """Rows of the next steps: each sequence and its last target."""
    batches = [loader.next(batch_tokens) for _ in range(steps)]
    for tokens, targets in batches:
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
    return [[*row.tolist(), int(target[-1])] for step in batches for row, target in zip(*step)]


LAYOUTS = {     # where shards end
    "one shard": (), "three shards": (301, 702), "a shard of one token": (400, 401),
    "a shard without a BOS": (505, 508), "a shard before the first BOS": (3,),
    "shards of seven": range(7, 900, 7)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("T, longest", [(16, 20), (32, 12), (8, 40), (64, 1000), (16, 1)])
def test_documents_are_packed(layout, T, longest):
    """Every row begins with a BOS; documents are cut at max_doc_len; all as the plain packer has it, wherever
    shards end; and the accounting adds up."""
    tokens = document_stream(3, 60)
    loader = document_loader(tokens, LAYOUTS[layout], T=T, longest=longest, log=(lines := []).append)
    want, count, cut, lost = packed_rows(tokens, longest, T)
    got = rows_of(loader, len(want), T)
    assert got == want and loader.rows == len(want) and loader.epoch == 2
    assert all(row[0] == BOS for row in got)
    for row in got:
        starts = [i for i, token in enumerate(row) if token == BOS] + [T + 1]
        assert all(b - a <= longest for a, b in itertools.pairwise(starts))
    read = len(want) * (T + 1)
    assert lines == [
        f"documents: {count} in {len(want)} rows; of {len(tokens)} train tokens {read} are read, "
        f"{cut} beyond max_doc_len:{longest} and {lost} beyond a row are not"]
    assert read + cut + lost == len(tokens)


def test_the_layouts_are_what_their_names_say():
    tokens = document_stream(3, 60)
    assert BOS not in tokens[505:508] and BOS not in tokens[:3] and tokens[3] != BOS and len(tokens) > 900
    borders = [i for i in LAYOUTS["shards of seven"] if tokens[i] != BOS]
    assert len(borders) > 100, "documents span shards"


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_documents_are_one_stream_for_any_world_size(world_size, shuffle):
    """Also as the batch grows, and past the end of the data."""
    tokens, sizes = document_stream(4, 180), [8, 8, 16, 24, 24, 8, 40]
    alone = document_loader(tokens, (1000, 2000), shuffle=shuffle)
    ranks = [document_loader(tokens, (1000, 2000), rank, world_size, shuffle=shuffle)
             for rank in range(world_size)]
    assert alone.rows < sum(sizes)
    for size in sizes:
        want = rows_of(alone, 1, 16 * size)
        assert sum((rows_of(loader, 1, 16 * size) for loader in ranks), []) == want
        assert len(want) == size
    assert {loader.position for loader in ranks} == {sum(sizes)}


def test_shuffled_documents_are_each_read_once():
    tokens = document_stream(5, 200)
    want = packed_rows(tokens, 20, 16)[0]
    got = rows_of(document_loader(tokens, shuffle=True), len(want), 16)
    assert got != want and sorted(got) == sorted(want)


def test_the_schedule_reads_documents_once_or_refuses():
    """Rows of whole documents are what a schedule has to get by with, not the tokens of the shards."""
    tokens = document_stream(6, 200)
    rows = len(packed_rows(tokens, 20, 16)[0])
    settings = dict(max_epochs=1, max_wallclock_seconds=0.0, train_batch_tokens=16)
    document_loader(tokens, **settings, iterations=rows)
    words = f"16 of {16 * rows + 16} train tokens are missing; max_epochs is 1"
    with pytest.raises(Refused, match=words):
        document_loader(tokens, **settings, iterations=rows + 1)
    document_loader(tokens, **settings | {"max_epochs": 2}, iterations=2 * rows)


def test_a_bos_of_ones_own():
    """bos_id, where given, is where documents begin, to the loader as to the model."""
    tokens = [BOS if token == 7 else 7 if token == BOS else token for token in document_stream(7, 60)]
    got = rows_of(document_loader(tokens, bos_id=7), 5, 16)
    assert all(row[0] == 7 for row in got)


@pytest.mark.parametrize("tokens", [range(1000, 1100), [BOS, *range(1000, 1016)][:16], 40 * [1] + 16 * [BOS],
                                    [BOS, *range(1000, 1100)]])
def test_documents_that_fill_no_row_are_refused(tokens):
    """No BOS, too few tokens, too few after the first BOS, too few within max_doc_len."""
    with pytest.raises(Refused, match="do not fill a row of 16"):
        document_loader(tokens, longest=12)


def test_every_part_of_a_row_is_checked():
    """A token outside the vocabulary is met where it is read."""
    tokens = document_stream(8, 60)
    tokens[-30] = 65_000
    loader = document_loader(tokens, (len(tokens) - 60,))
    with pytest.raises(Refused, match="shard s1 holds token 65000"):
        rows_of(loader, loader.rows, 16)


# -------------------------------------------------------------------------------- independent documents
PARTS = replace(
    SPEEDRUN, vocab_size=70, bos_id=3, model_dim=32, num_heads=2, num_layers=6, train_seq_len=64,
    max_doc_len=40, value_embed_layers=(0, 1, 2, 0, 1, 2), window_pattern="0SL-SL",
    window_schedule=(8, 24), window_block=4, skip_layers=(1, 2), backout_layer=4, bigram_rows=97)


def row_with(document, place, seed, T=64):
    """A row (T,) of other documents around this one."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(4, 70, (T,), generator=generator)
    row[torch.rand(T, generator=generator) < 0.1] = 3
    row[place:place + len(document)] = document
    row[0] = row[place + len(document)] = 3
    return row


@pytest.mark.parametrize("window", [8, 24, 64])
@pytest.mark.parametrize("length", [1, 2, 9, 30])
def test_documents_are_independent(window, length):
    """Whatever stands around a document, and wherever it stands: its log-probabilities are those that it has
    alone. With max_doc_len=0 they are not."""
    document = torch.randint(4, 70, (length,), generator=torch.Generator().manual_seed(length))
    document[0] = 3
    for cfg, independent in ((PARTS, True), (replace(PARTS, max_doc_len=0), False)):
        model = randomised(cfg)

        def scores(row, place):
            model.set_context(len(row), window)
            with torch.no_grad():
                return train_gpt.log_probs(model, row[None])[0, place:place + length]

        alone = scores(document, 0)
        for place in (5, 20, 33):
            there = [scores(row_with(document, place, seed), place) for seed in (1, 2)]
            gap = max(float((found - alone).abs().max()) for found in there)
            change = float((there[0] - there[1]).abs().max())
            assert (gap < 1e-4 and change < 1e-5) if independent else (gap > 1e-2 and change > 1e-2), place


def test_gradients_are_independent():
    """The embedding of a token that stands in another document gets no gradient from this one."""
    model, document = randomised(PARTS), torch.tensor([3, 10, 11, 12, 10])
    row = row_with(document, 20, 1)
    row[row == 12] = 13
    row[23] = 12
    model.set_context(64, 24)
    train_gpt.log_probs(model, row[None])[0, 20:25].sum().backward()
    touched = {*torch.nonzero(model.embed.grad.abs().sum(1)).flatten().tolist()}
    assert touched == {3, 10, 11, 12}


# -------------------------------------------------------------------------------- the optimizer
def some_matrices(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain_normuon(weight, gradients, momentum, beta2, lr, decay):
    """NorMuon on one matrix, step by step, in float64 but for the orthogonalisation: momentum, Nesterov, each
    row (of a wide matrix each column) divided by its running rms, the norm put back, cautious decay."""
    weight, buffer = weight.double(), torch.zeros(weight.shape, dtype=torch.float64)
    R, C = weight.shape
    v = torch.zeros(R if R >= C else C, dtype=torch.float64)
    for g in gradients:
        g = g.double()
        buffer = momentum * buffer + (1 - momentum) * g
        ahead = (1 - momentum) * g + momentum * buffer
        u = train_gpt.orthogonalize(ahead.float()[None], 5, "polar_express")[0].double()
        u = u * math.sqrt(max(1, R / C))
        mean_square = (u ** 2).mean(1 if R >= C else 0)
        v = beta2 * v + (1 - beta2) * mean_square
        scaled = u / (v[:, None] if R >= C else v[None]).sqrt()
        scaled = scaled * u.norm() / scaled.norm()
        weight = weight - lr * lr * decay * weight * (weight * scaled > 0) - lr * scaled
    return weight.float()


@pytest.mark.parametrize("decay", [0.0, 120.0])
def test_normuon_equals_a_plain_one(decay):
    """Square, tall and wide matrices of a model, ten steps, gradients of all sizes."""
    cfg = replace(Config(), vocab_size=30, model_dim=24, num_layers=3, mlp_mult=2, normuon_beta2=0.95,
                  orthogonalization="polar_express", weight_decay=decay)
    model, gradients = randomised(cfg), {}
    optimizer = Optimizer(model, cfg)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(10):
        for i, (name, p) in enumerate(model.named_parameters()):
            p.grad.copy_(some_matrices(*p.shape, seed=100 * step + i) * 10 ** (i % 5 - 3))
            gradients.setdefault(name, []).append(p.grad.clone())
        optimizer.step(0.5, 0.9)
    shapes = set()
    for name, p in model.named_parameters():
        if train_gpt.parameter_rule(name)[0] == "matrix":
            shapes.add(tuple(p.shape))
            want = plain_normuon(start[name], gradients[name], 0.9, 0.95, 0.5 * cfg.matrix_lr, decay)
            torch.testing.assert_close(p.detach(), want, rtol=1e-4, atol=1e-5)
    assert shapes == {(24, 24), (48, 24), (24, 48)}


def test_normuon_evens_out_the_rows():
    """Rows of very different size end up alike, which Muon alone does not do; the norm stays."""
    update = some_matrices(2, 48, 24) * torch.logspace(-2, 0, 48)[:, None]
    v = torch.zeros(2, 48, 1)
    scaled = train_gpt.normuon_scale(update, v, 0.95)
    sizes = scaled.norm(dim=2)
    assert (sizes.amax(1) / sizes.amin(1) < 1.001).all()
    torch.testing.assert_close(scaled.norm(dim=(1, 2)), update.norm(dim=(1, 2)))
    torch.testing.assert_close(v, 0.05 * update.square().mean(2, keepdim=True))
    assert train_gpt.normuon_scale(torch.zeros(1, 4, 6), torch.zeros(1, 1, 6), 0.95).abs().max() == 0


@pytest.mark.parametrize("shape", [(256, 1024), (1024, 256), (64, 300)])
def test_polar_express_is_nearer_to_orthogonal(shape):
    g = some_matrices(1, *shape)
    spread = {}
    for method in train_gpt.ORTHOGONALIZERS:
        x = train_gpt.orthogonalize(g * 1e-4, 5, method)[0]
        singular = torch.linalg.svdvals(x)
        spread[method] = (singular - 1).abs().max()
        if method == "polar_express":
            assert 0.7 <= singular.min() and singular.max() <= 1.2
            left, _, right = torch.linalg.svd(g[0], full_matrices=False)
            assert F.cosine_similarity(x.flatten(), (left @ right).flatten(), 0) > 0.99
    assert spread["polar_express"] < spread["newton_schulz"]


def test_adam_steps_on_the_sum_of_two_gradients():
    """adam_every=2: nothing at odd steps, Adam on the sum at even ones; matrices move at each."""
    cfg = replace(Config(), vocab_size=30, model_dim=24, num_layers=2, adam_every=2, beta1=0.65, beta2=0.95)
    model = randomised(cfg)
    optimizer = Optimizer(model, cfg)
    plain = {name: (p.detach().clone(), torch.zeros(p.shape), torch.zeros(p.shape))
             for name, p in model.named_parameters()}
    sums = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for step in range(1, 9):
        before, factor = {name: p.detach().clone() for name, p in model.named_parameters()}, 1 - 0.05 * step
        for i, (name, p) in enumerate(model.named_parameters()):
            gradient = some_matrices(*p.shape, seed=100 * step + i)
            p.grad.add_(gradient)
            sums[name] += gradient
        optimizer.step(factor, 0.9)
        for name, p in model.named_parameters():
            group = train_gpt.parameter_rule(name)[0]
            if group == "matrix":
                assert not torch.equal(p, before[name]), name
            elif step % 2:
                assert torch.equal(p, before[name]), name
            else:
                p0, m, v = plain[name]
                m.mul_(0.65).add_(0.35 * sums[name])
                v.mul_(0.95).add_(0.05 * sums[name] ** 2)
                count = step // 2
                p0 -= factor * optimizer.lr[group] * (m / (1 - 0.65 ** count)) / (
                    (v / (1 - 0.95 ** count)).sqrt() + cfg.adam_eps)
                torch.testing.assert_close(p.detach(), p0, rtol=1e-5, atol=1e-6)
                sums[name].zero_()
    assert optimizer.step_count == 8


# -------------------------------------------------------------------------------- what attention costs
def spied_attention(monkeypatch, B, T, reach, documents=None, H=4, KV=2, D=8):
    """Attention forward and backward -> (logits computed, bytes kept for backward, numbers of the mask)."""
    cost, kernel = [], F.scaled_dot_product_attention

    def count(q, k, v, attn_mask=None, **kw):
        cost.append(q.shape[:-1].numel() * k.size(-2))
        return kernel(q, k, v, attn_mask=attn_mask, **kw)

    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    q, k, v = (some_matrices(B, heads, T, D).requires_grad_() for heads in (H, KV, KV))
    mask = train_gpt.window_mask(reach, T, documents, "cpu")
    with monkeypatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        patch.setattr(F, "scaled_dot_product_attention", count)
        train_gpt.attention(q, k, v, mask).sum().backward()
    return sum(cost), sum(kept.values()), mask.numel()


@pytest.mark.parametrize("with_documents", [False, True])
def test_attention_costs_what_the_window_costs(with_documents, monkeypatch):
    """Twice the tokens, twice the logits, the memory and the mask; twice the window, twice the logits."""
    def cost(T, reach):
        documents = (torch.arange(T) // 37)[None].repeat(2, 1) if with_documents else None
        return spied_attention(monkeypatch, 2, T, reach, documents)

    base = cost(1024, 64)
    assert base[0] == 2 * 4 * 1024 * 128 and base[2] == (1 + with_documents) * 1024 * 128
    for factor in (2, 4):
        longer, wider = cost(1024 * factor, 64), cost(1024, 64 * factor)
        assert longer[0] == wider[0] == factor * base[0] and longer[2] == factor * base[2]
        assert longer[1] == pytest.approx(factor * base[1], rel=0.01)
    assert cost(1000, 64)[0] == base[0], "the last block is filled up"
    assert cost(1024, 512)[0] == 2 * 4 * 1024 ** 2 == cost(1024, 1000)[0], "never more than all"


def plain_mask(T, reach, documents):
    """(B or 1, T, T): what each token sees, by the definition."""
    i = torch.arange(T)
    mask = ((i[None] <= i[:, None]) & (i[None] > i[:, None] - reach))[None]
    return mask if documents is None else mask & (documents[:, None] == documents[:, :, None])


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("T, reach", [(1, 1), (5, 9), (64, 16), (100, 16), (97, 48), (97, 49), (33, 16),
                                      (65, 32), (50, 1), (31, 2), (100, 99), (100, 100)])
def test_blocks_equal_dense_attention(T, reach, with_documents):
    """Values and gradients; T is a multiple of the window or not; two queries share a key."""
    documents = torch.stack([torch.arange(T) // 7, torch.arange(T) // 41]) if with_documents else None
    got, want = ([some_matrices(2, heads, T, 8, seed=heads).double().requires_grad_() for heads in (4, 2, 3)]
                 for _ in range(2))
    got[2], want[2] = (x[2][:, :2].detach().requires_grad_() for x in (got, want))
    weight = some_matrices(2, 4, T, 8, seed=9).double()
    mask = train_gpt.window_mask(reach, T, documents, "cpu")
    y = train_gpt.attention(*got, mask, 0.3)
    q, k, v = want[0], *(x.repeat_interleave(2, 1) for x in want[1:])
    logits = (q @ k.mT * 0.3).masked_fill(~plain_mask(T, reach, documents)[:, None], -math.inf)
    dense = logits.softmax(-1) @ v
    torch.testing.assert_close(y, dense, rtol=1e-9, atol=1e-9)
    (y * weight).sum().backward()
    (dense * weight).sum().backward()
    for a, b in zip(got, want):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)


# -------------------------------------------------------------------------------- two hosts
def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@contextlib.contextmanager
def two_hosts():
    """Two network namespaces and a cable between them, or, where these are not permitted, this host twice.
    Yields ([prefix of each host's commands], first host's address, [interface of each], port)."""
    names, made = [f"gpt{os.getpid() % 100_000:05}{side}" for side in "ab"], []
    devices = [f"v{name}" for name in names]
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", devices[0], "netns", names[0], "type", "veth", "peer", "name", devices[1], "netns",
           names[1])
        for i, (name, device) in enumerate(zip(names, devices), 1):
            ip("-n", name, "addr", "add", f"10.83.61.{i}/30", "dev", device)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", device, "up")
            ip("netns", "exec", name, "true")
        hosts = [["ip", "netns", "exec", name] for name in names], "10.83.61.1", devices, 29_500
    except (OSError, subprocess.SubprocessError):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            hosts = [[], []], "127.0.0.1", ["lo", "lo"], probe.getsockname()[1]
    try:
        yield hosts
    finally:    # a namespace takes its end of the cable along, and so the other one
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def test_two_hosts_agree_with_one(two_ranks, root, tmp_path):
    """--nnodes=2, each host with a folder of its own: the losses of two ranks on one host. The first keeps
    the run folder."""
    (tmp_path / "data").symlink_to(root / "data")
    clean = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ} | {"OMP_NUM_THREADS": "1"}
    with two_hosts() as (prefixes, address, devices, port):
        jobs = [subprocess.Popen(
            [*prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
             "--nproc_per_node=1", f"--master-addr={address}", f"--master-port={port}", str(SCRIPT)],
            cwd=folder, env=clean | SCALED | {"RUN_ID": "hosts", "GLOO_SOCKET_IFNAME": device}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
            for node, (prefix, device, folder) in enumerate(zip(prefixes, devices, (root, tmp_path)))]
        try:
            texts = [job.communicate(timeout=90) for job in jobs]
        finally:
            for job in jobs:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
    assert [job.returncode for job in jobs] == [0, 0], texts
    same_curves(texts[0][0], two_ranks)
    assert "step:" not in texts[1][0]
    result = json.loads((root / "logs/hosts/result.json").read_text())
    assert result["world_size"] == 2 and not (tmp_path / "logs").exists()


# -------------------------------------------------------------------------------- bad input
BAD = {     # settings over SCALED: words of the sentence
    "half a sequence": (dict(TRAIN_BATCH_TOKENS="576"), ["train_seq_len=128", "train_batch_tokens=576"]),
    "three ranks": (dict(RANK="0", WORLD_SIZE="3"), ["3 ranks do not divide the 4 sequences of a step"]),
    "window of no whole blocks": (dict(WINDOW_SCHEDULE="12,28,42,52"),
                                  ["window_block=4", "window_schedule=(12, 28, 42, 52)"]),
    "final window of no whole blocks": (dict(EVAL_WINDOW="81"), ["window_block=4", "eval_window=81"]),
    "batches for three stages": (dict(BATCH_SCHEDULE="1,2,3"),
                                 ["batch_schedule=(1, 2, 3)", "window_schedule=(12, 28, 44, 52)"]),
    "windows for two stages": (dict(WINDOW_SCHEDULE="12,28"), ["batch_schedule", "window_schedule=(12, 28)"]),
    "switch too few": (dict(LR_SWITCHES="0.33"), ["lr_switches=(0.33,)", "lr_schedule=(1.0, 1.51, 1.93)"]),
    "switch too many": (dict(LR_SWITCHES="0,0.2,0.4,0.6"),
                        ["lr_switches=(0.0, 0.2, 0.4, 0.6)", "lr_schedule"]),
    "switches that do not grow": (dict(LR_SWITCHES="0,0.66,0.33"), ["lr_switches=(0.0, 0.66, 0.33)", "grow"]),
    "batch of none": (dict(BATCH_SCHEDULE="0,1,2,3"), ["batch_schedule=0,1,2,3"]),
    "part of a batch": (dict(BATCH_SCHEDULE="1,1.5,2,3"), ["batch_schedule='1,1.5,2,3'"]),
    "factor below zero": (dict(LR_SCHEDULE="1,-1,2"), ["lr_schedule=1.0,-1.0,2.0"]),
    "a gate wider than the stream": (dict(SMEAR_DIM="4000"), ["smear_dim=4000", "model_dim="]),
    "skips that are no pairs": (dict(SKIP_LAYERS="2,3,4"), ["skip_layers=(2, 3, 4)", "pairs"]),
    "skip backwards": (dict(SKIP_LAYERS="3,2"), ["skip_layers=(3, 2)", "later"]),
    "no such orthogonalisation": (dict(ORTHOGONALIZATION="svd"), ["orthogonalization=svd", "polar_express"]),
    "val too short": (dict(VAL_TOKENS="8001"), ["bytes has 8000 tokens; VAL_TOKENS, rows need 8001"]),
    "documents fill no row": (dict(TRAIN_SEQ_LEN="16384", TRAIN_BATCH_TOKENS="16384", EVAL_CONTEXT="128",
                                   MAX_DOC_LEN="1"), ["do not fill a row of 16384"]),
    "BOS that never comes": (dict(BOS_ID="260"), ["do not fill a row of 128"]),
}


@pytest.fixture
def no_training(monkeypatch):
    """Whatever comes after the plan is an error of the test."""
    for name in ("rehearse", "init_parameters", "open_run"):
        monkeypatch.setattr(train_gpt, name, lambda *args, name=name: pytest.fail(f"came as far as {name}"))


def one_sentence(done, words):
    assert done.code == 2
    last = done.err.splitlines()[-1]
    assert last.startswith("train_gpt: ") and all(word in last for word in words), done.err
    assert "Traceback" not in done.err + done.out and "rehearsal" not in done.out


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, root, no_training):
    settings, words = BAD[case]
    done = run_here(root, COMPILE="1", **settings)
    one_sentence(done, words)
    assert len(done.err.splitlines()) == 1 and not done.folder.exists()


def missing_tokens(root, steps):
    """Tokens that these steps after the scaled schedule want and the shards do not have."""
    shards = [np.fromfile(root / f"data/datasets/bytes/fineweb_train_00000{i}.bin", "<u2", offset=1024)
              for i in (1, 2)]
    rows = len(packed_rows(np.concatenate(shards).tolist(), 80, 128)[0])
    return TOKENS + steps * 12 * 128 - rows * 128


def test_shards_that_run_out(root, no_training):
    """With the number of missing tokens; more epochs or a shorter schedule would do."""
    steps = next(steps for steps in itertools.count() if missing_tokens(root, steps) > 0)
    missing = missing_tokens(root, steps)
    assert 0 < missing <= 12 * 128
    done = run_here(root, EXTENSION_ITERATIONS=str(4 + steps))
    reads = TOKENS + steps * 12 * 128
    one_sentence(done, [f"{missing} of {reads} train tokens are missing", "max_epochs is 1"])
    plan = run_here(root, EXTENSION_ITERATIONS=str(4 + steps), DRY_RUN="1")
    assert plan.code == 0 and f"{missing} of {reads} train tokens are missing" in plan.out, "and goes on"
    enough = run_here(root, EXTENSION_ITERATIONS=str(3 + steps), DRY_RUN="1")
    assert enough.code == 0 and "missing" not in enough.out


COMMANDS = {
    "shards that run out": (["--extension-iterations=5000"], ["train tokens are missing; max_epochs is 1"]),
    "windows of no whole blocks": (["--window-schedule=12,28,42,52"], ["window_block=4"]),
    "val too short": (["--val-tokens=8001"], ["8000 tokens; VAL_TOKENS, rows need 8001"]),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_bad_input_on_the_command_line(case, root):
    argv, words = COMMANDS[case]
    done = run_cli(root, *argv, env=SCALED | {"COMPILE": "1", "RUN_ID": "refused"})
    one_sentence(done, words)
    assert not (root / "logs/refused").exists()


def test_bad_input_under_torchrun(root):
    """Three ranks and four sequences: our sentence comes once, from rank 0."""
    done = run_cli(root, ranks=3, env=SCALED | {"RUN_ID": "refused"})
    ours = [line for line in done.err.splitlines() if line.startswith("train_gpt: ")]
    assert done.code != 0 and ours == ["train_gpt: 3 ranks do not divide the 4 sequences of a step"]
