"""The presets golf, speedrun and gpt2, and golf_plus, speedrun_plus and gpt2_plus below, against numbers that
the public records' own code gave, at toy size and at full size: README.md of tests/golden and of
tests/golden/plus are the specifications, the .npz beside them hold the numbers.

A table per game says which of our parameters is which of theirs. It is linear with factors 1, so it serves
weights, gradients and updates alike. Everything else, shapes included, is read from the files.
"""
import json
import math
import os
import re
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_gpt
from helpers import add_gradients
from train_gpt import make_context

GOLDEN = Path(os.environ.get("GOLDEN", Path(__file__).parent / "golden"))
GAMES = ("golf", "speedrun", "gpt2")

# Tolerances of golden/README.md; relative and Euclidean
LOSS, NATS, GRADIENT, UPDATE, UNIT = 5e-7, 1e-6, 8e-6, 1e-4, 3e-5
SCALAR_GRADIENT = 2e-5     # gpt2's
TABLE_UPDATE = 1e-3     # speedrun's, whose tiny gradients change sign


# ---------------------------------------------------------------- which of our parameters is which of theirs
def golf_weights(w, cfg):
    ours = {"embed": w["tok_emb.weight"], "skip_weights": w["skip_weights"]}
    for i in range(cfg.num_layers):
        block = f"blocks.{i}."
        ours |= {
            block + "query": w[block + "attn.c_q.weight"], block + "key": w[block + "attn.c_k.weight"],
            block + "value": w[block + "attn.c_v.weight"], block + "attn_proj": w[block + "attn.proj.weight"],
            block + "qk_gain": w[block + "attn.q_gain"], block + "fc": w[block + "mlp.fc.weight"],
            block + "mlp_proj": w[block + "mlp.proj.weight"],
            block + "resid_lambda": w[block + "resid_mix"][0],
            block + "x0_lambda": w[block + "resid_mix"][1],
            block + "layer_scale": torch.stack([w[block + "attn_scale"], w[block + "mlp_scale"]])}
    return ours


def speedrun_weights(w, cfg):
    C, N, scalars = cfg.model_dim, cfg.num_layers, w["scalars"]
    mixes, factors = scalars[N:3 * N].view(N, 2), scalars[3 * N:5 * N].view(N, 2)
    ours = {"embed": w["embed.weight"], "head": w["lm_head.weight"], "smear_gate": w["smear_gate.weight"],
            "skip_weights": scalars[1].view(1, 1), "smear": scalars[5 * N:5 * N + 1].view(1, 1),
            "backout": scalars[5 * N + 1:5 * N + 2]}
    for n, table in enumerate((1, 2, 0)):       # ours are counted from the first layer that has one
        ours[f"value_embeds.{n}"] = w[f"value_embeds.{table}.weight"]
    for i in range(1, N):
        block = f"blocks.{i}."
        ours |= {block + "resid_lambda": mixes[i, :1], block + "x0_lambda": mixes[i, 1:]}
        if block + "attn.qkvo_w" in w:
            names = ("query", "key", "value", "attn_proj")
            ours |= dict(zip([block + name for name in names], w[block + "attn.qkvo_w"].view(4, C, C)))
            ours |= {block + "attn_gate": w[block + "attn.attn_gate.weight"],
                     block + "value_lambdas": factors[i]}
        ours |= {block + "fc": w[block + "mlp.c_fc"].T, block + "mlp_proj": w[block + "mlp.c_proj"]}
    return ours


def gpt2_weights(w, cfg):
    ours = {"embed": w["transformer.wte.weight"], "head": w["lm_head.weight"]}
    for i in range(cfg.num_layers):
        block, theirs = f"blocks.{i}.", f"transformer.h.{i}."
        ours |= {
            block + "query": w[theirs + "attn.c_q.weight"], block + "key": w[theirs + "attn.c_k.weight"],
            block + "value": w[theirs + "attn.c_v.weight"],
            block + "attn_proj": w[theirs + "attn.c_proj.weight"],
            block + "fc": w[theirs + "mlp.c_fc.weight"], block + "mlp_proj": w[theirs + "mlp.c_proj.weight"],
            block + "resid_lambda": w["resid_lambdas"][i:i + 1],
            block + "x0_lambda": w["x0_lambdas"][i:i + 1]}
        if theirs + "attn.ve_gate.weight" in w:
            ours[block + "value_gate"] = w[theirs + "attn.ve_gate.weight"]
    layers = sorted(int(name.split(".")[1]) for name in w if name.startswith("value_embeds"))
    return ours | {f"value_embeds.{n}": w[f"value_embeds.{i}.weight"] for n, i in enumerate(layers)}


MAPS = dict(golf=golf_weights, speedrun=speedrun_weights, gpt2=gpt2_weights)


# ---------------------------------------------------------------- reading the files
class Golden:
    """One .npz: JSON entries, arrays, weights by prefix, batches; our Config at toy size."""

    def __init__(self, game):
        self.game, self.npz = game, np.load(GOLDEN / f"{game}.npz")
        self.cfg = train_gpt.load_config(self.json("overrides"))
        self.full = train_gpt.load_config(self.json("overrides_full"))

    def json(self, name):
        return json.loads(str(self.npz[name]))

    def array(self, name):
        return self.npz[name]

    def their_weights(self, prefix):
        return {name[len(prefix) + 1:]: torch.from_numpy(np.asarray(self.npz[name]))
                for name in self.npz.files if name.startswith(prefix + ".")}

    def weights(self, prefix):
        return MAPS[self.game](self.their_weights(prefix), self.cfg)

    def batch(self, k, series=""):
        prefix = f"{series}/" if f"{series}/tokens_{k}" in self.npz else ""
        return (torch.from_numpy(self.npz[f"{prefix}tokens_{k}"]),
                torch.from_numpy(self.npz[f"{prefix}targets_{k}"]))

    def model(self):
        """Ours with their weights: every parameter of the one is one of the other."""
        model, weights = train_gpt.GPT(self.cfg), self.weights("w0")
        assert {name: tuple(w.shape) for name, w in weights.items()} == \
            {name: tuple(p.shape) for name, p in model.named_parameters()}
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(weights[name])
        return model

    def context(self, T, window, dtype=torch.float32):
        return make_context(self.cfg, T, window, torch.device("cpu"), dtype)

    def schedule_rows(self, name):
        columns = self.json("schedule_columns")
        return [dict(zip(columns, row)) for row in self.array(name)]


@contextmanager
def in_fp64():
    to_fp32 = torch.Tensor.float
    with mock.patch.object(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_fp32(x)):
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module", params=GAMES)
def golden(request, one_thread):
    return Golden(request.param)


@pytest.fixture(scope="module")
def golf(one_thread):
    return Golden("golf")


def difference(ours, theirs):
    """|ours - theirs| / |theirs|, Euclidean."""
    return (ours - theirs).norm().item() / (theirs.norm().item() or 1)


# ---------------------------------------------------------------- forward and backward
def test_losses_and_nats(golden):
    """In every setting of windows, mean loss of six batches and the nats of each token of the first."""
    model = golden.model()
    for setting in golden.json("settings"):
        for k in range(6):
            tokens, targets = golden.batch(k)
            context = golden.context(tokens.size(1), setting["window_long"])
            with torch.no_grad():
                scores = model.logits(model.hidden(tokens, context)).flatten(0, 1)
                nats = F.cross_entropy(scores.double(), targets.flatten(), reduction="none")
                loss = model(tokens, targets, context).item()
            expected = golden.array(f"loss.{setting['name']}")[k]
            assert nats.mean().item() == pytest.approx(expected, rel=LOSS), setting
            assert loss == pytest.approx(expected, rel=LOSS), setting
            if k == 0:
                theirs = torch.from_numpy(golden.array(f"nats.{setting['name']}")).double().flatten()
                assert difference(nats, theirs) < NATS, setting
                assert (nats - theirs).abs().max().item() < 10 * NATS, setting      # fp32 at 10 nats


def test_gradients(golden):
    """Of the mean loss of the first batch, every parameter."""
    model, name = golden.model(), golden.json("g_setting")["name"]
    setting = next(s for s in golden.json("settings") if s["name"] == name)
    tokens, targets = golden.batch(0)
    model(tokens, targets, golden.context(tokens.size(1), setting["window_long"])).backward()
    ours = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    for name, (a, b) in compared(ours, golden.weights("g")).items():
        assert difference(a, b) < (SCALAR_GRADIENT if name in SCALARS else GRADIENT), name


SCALARS = ("resid_lambda", "x0_lambda", "value_lambdas")


def compared(ours, theirs):
    """{name: (our tensor, theirs)}; the lambdas of all layers are one tensor there, and compared as one."""
    found = {name: (a, theirs[name]) for name, a in ours.items() if train_gpt.kind_of(name) not in SCALARS}
    for kind in SCALARS:
        names = [name for name in ours if train_gpt.kind_of(name) == kind]
        if names:
            found[kind] = tuple(torch.cat([tensors[name].flatten() for name in names])
                                for tensors in (ours, theirs))
    return found


@pytest.mark.parametrize("series", ["early", "mid", "late"])
def test_updates(golden, series):
    """Weights after one and after five steps from w0, fresh optimizer state, at three places of the run. Five
    steps multiply rounding errors, and a weight whose update is nearly 0 is decayed on one side only: in fp32
    up to 5.5e-4, in fp64 2.6e-4 off, but never both. A deviation would show in both."""
    single = updates(golden, series, torch.float32)
    with in_fp64():
        double = updates(golden, series, torch.float64)
    first = golden.weights("w0")
    for k in (0, 4):
        moved = {name: w - first[name] for name, w in golden.weights(f"{series}/w{k + 1}").items()}
        found = [compared(ours[k], moved) for ours in (single, double)]
        for name in found[0]:
            table = golden.game == "speedrun" and train_gpt.kind_of(name) in ("embed", "value_embeds", "head")
            off = min(difference(*ours[name]) for ours in found)
            assert off < (TABLE_UPDATE if table else UPDATE), (name, k + 1, off)


def updates(golden, series, dtype):
    """[{name: what the steps up to this one have added}]"""
    model, cfg, added = golden.model().to(dtype), golden.cfg, []
    optimizer = train_gpt.Optimizer(model, cfg)
    schedule = golden.schedule_rows(f"{series}/table")
    optimizer.step_count = int(schedule[0]["step"]) % cfg.adam_every
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for k, row in enumerate(schedule):
        batch = golden.batch(k, series)
        context = golden.context(batch[0].size(1), int(row["window_long"]), dtype)
        factor = batch[0].numel() / cfg.loss_sum_ranks if cfg.loss_sum_ranks else 1
        base = cfg.weight_decay * cfg.matrix_lr
        decay = decay_of(golden, row) / base if base else 0
        rows = 1 if golden.game == "speedrun" else len(batch[0])      # a micro-step there
        schedule_now = row["lr"], row["momentum"], decay
        train_gpt.train_step(model, optimizer, batch, rows, context, factor, *schedule_now)
        added.append({name: p.detach() - before[name] for name, p in model.named_parameters()})
    return added


def decay_of(golden, row):
    """lambda of the specification at a row of their schedule; speedrun states wd before LR and factor."""
    if golden.game == "speedrun":
        return row["wd"] * golden.cfg.matrix_lr * row["lr"]
    return row["wd"]


# ---------------------------------------------------------------- optimizers alone
def test_optimizers_alone(golden):
    """Five steps on given gradients of 1 to 1e-12, where eps shows."""
    unit = golden.json("unit")
    names = sorted((name for name in unit if name != "momentum_of_steps"), key=len, reverse=True)
    keys = sorted(key[:-3] for key in golden.npz.files if key.startswith("unit.") and key.endswith(".p0"))
    assert keys
    for key in keys:
        about = unit[next(name for name in names if key[5:].startswith(name))]
        p0, grads, expected = (torch.from_numpy(golden.array(f"{key}.{x}")) for x in ("p0", "g", "p"))
        found = adam_alone if "betas" in about else muon_alone
        ours = found(golden, about, key, p0, grads, unit["momentum_of_steps"])
        assert difference(ours - p0, expected[-1] - p0) < UNIT, key


def adam_alone(golden, about, key, p, grads, momenta):
    p, m, v = p.clone(), torch.zeros_like(p), torch.zeros_like(p)
    for step, grad in enumerate(grads, 1):
        numbers = [torch.tensor(x) for x in (1.0, float(step), about["lr"])]
        train_gpt.adam_step(p, grad, m, v, *numbers, *about["betas"], about["eps"],
                            golden.cfg.adam_eps_corrected)
    return p


def muon_alone(golden, about, key, p, grads, momenta):
    """By our Optimizer, as the parameter that the name says; qkvo's memory is four matrices."""
    kinds = {"attn": "query", "c_fc": "fc", "c_proj": "mlp_proj", "attn_gate": "attn_gate",
             "smear_gate": "smear_gate"}
    kind = kinds.get(key.split(".")[2], "query")
    turn = (lambda x: x.mT) if kind == "fc" else (lambda x: x)
    cfg, wd = golden.cfg, about.get("wd", 0)
    if golden.game != "speedrun":       # theirs is lambda, ours is times matrix_lr
        wd = wd / about["lr"]
    cfg = train_gpt.replace(cfg, matrix_lr=about["lr"], weight_decay=wd, adam_every=1)
    four = "4 matrices" in about.get("note", "")
    parts = [p.reshape(4, p.size(0), -1)[i] for i in range(4)] if four else [p]
    out = []
    for i, part in enumerate(parts):
        module = torch.nn.Module()
        module.register_parameter(kind, torch.nn.Parameter(turn(part).clone().contiguous()))
        optimizer, ours = train_gpt.Optimizer(module, cfg), dict(module.named_parameters())[kind]
        for grad, momentum in zip(grads, momenta):
            grad = grad.reshape(4, p.size(0), -1)[i] if four else grad
            add_gradients(optimizer, {kind: turn(grad)})
            optimizer.step(1.0, momentum)
        out.append(turn(ours.detach()))
    return torch.stack(out).reshape(p.shape) if four else out[0]


# ---------------------------------------------------------------- schedules, RoPE, first values at full size
def test_schedules_of_every_step(golden):
    cfg = golden.full
    for row in golden.schedule_rows("schedule"):
        step = int(row["step"])
        progress = train_gpt.run_progress(cfg, step, row.get("elapsed_ms", 0) / 1000)
        stage = train_gpt.stage_at(cfg, progress)
        sizes = train_gpt.window_sizes(cfg, stage.window, cfg.train_seq_len * stage.seq_multiple)
        decay = cfg.weight_decay * cfg.matrix_lr * train_gpt.decay_factor(cfg, step, progress)
        ours = dict(lr=train_gpt.lr_factor(cfg, step, progress),
                    momentum=train_gpt.muon_momentum(cfg, step, progress),
                    tokens=cfg.train_batch_tokens * stage.batch_multiple, wd=decay,
                    attn_scale=train_gpt.rope_frequencies(cfg, stage.window)[1])
        theirs = row | {"wd": row["wd"] * cfg.matrix_lr * row["lr"]} if golden.game == "speedrun" else row
        if row["window_long"]:
            ours |= dict(window_long=sizes["L"], window_short=sizes["S"])
        for name, value in ours.items():
            assert value == pytest.approx(theirs[name], abs=1e-9), (step, name)


def test_golf_warmdown_follows_the_clock(golf):
    for step, ms, lr in golf.array("schedule_clock"):
        progress = train_gpt.run_progress(golf.full, int(step), ms / 1000)
        assert train_gpt.lr_factor(golf.full, int(step), progress) == pytest.approx(lr, abs=1e-9), (step, ms)


def test_rope_at_full_size(golden):
    for key in (key for key in golden.npz.files if key.startswith("rope.")):
        ours = train_gpt.rope_frequencies(golden.full, int(key[5:]))[0]
        theirs = torch.from_numpy(golden.array(key))
        torch.testing.assert_close(ours[:len(theirs)], theirs, rtol=2e-6, atol=0)


# {our kind: the entry of `init` that it is in, with its first value where one entry holds several}
ENTRIES = {
    "golf": {
        "embed": "tok_emb.weight", "skip_weights": "skip_weights", "query": "blocks.1.attn.c_q.weight",
        "key": "blocks.1.attn.c_k.weight", "value": "blocks.1.attn.c_v.weight",
        "attn_proj": "blocks.1.attn.proj.weight", "fc": "blocks.1.mlp.fc.weight",
        "mlp_proj": "blocks.1.mlp.proj.weight", "qk_gain": "blocks.1.attn.q_gain",
        "layer_scale": "blocks.1.attn_scale", "resid_lambda": ("blocks.1.resid_mix", 1),
        "x0_lambda": ("blocks.1.resid_mix", 0)},
    "speedrun": {
        "embed": "embed.weight", "head": "lm_head.weight", "value_embeds": "value_embeds.0.weight",
        "query": "blocks.1.attn.qkvo_w", "key": "blocks.1.attn.qkvo_w", "value": "blocks.1.attn.qkvo_w",
        "attn_proj": ("blocks.1.attn.qkvo_w", 0), "attn_gate": "blocks.1.attn.attn_gate.weight",
        "fc": "blocks.1.mlp.c_fc", "mlp_proj": "blocks.1.mlp.c_proj", "smear_gate": "smear_gate.weight",
        "skip_weights": ("scalars", -1.5), "resid_lambda": ("scalars", 1.1), "x0_lambda": ("scalars", 0),
        "value_lambdas": ("scalars", 0.5), "smear": ("scalars", 0), "backout": ("scalars", 0.5)},
    "gpt2": {
        "embed": "transformer.wte.weight", "head": "lm_head.weight", "value_embeds": "value_embeds.1.weight",
        "query": "transformer.h.1.attn.c_q.weight", "key": "transformer.h.1.attn.c_k.weight",
        "value": "transformer.h.1.attn.c_v.weight", "attn_proj": "transformer.h.1.attn.c_proj.weight",
        "value_gate": "transformer.h.1.attn.ve_gate.weight", "fc": "transformer.h.1.mlp.c_fc.weight",
        "mlp_proj": "transformer.h.1.mlp.c_proj.weight", "resid_lambda": "resid_lambdas",
        "x0_lambda": "x0_lambdas"}}


def test_first_values_optimizers_and_rates_at_full_size(golden):
    """Distribution of first values, optimizer, LR, betas and eps of every kind of parameter."""
    cfg, init = golden.full, golden.json("init")
    table, entries = train_gpt.parameter_table(cfg), ENTRIES[golden.game]
    with torch.device("meta"):
        shapes = {train_gpt.kind_of(name): p.shape for name, p in train_gpt.GPT(cfg).named_parameters()}
    assert set(shapes) == set(entries)
    for kind, entry in entries.items():
        name, value = (entry, None) if isinstance(entry, str) else entry
        row, about = table[kind], init[name]
        lr = getattr(cfg, row.lr) * row.lr_mult
        if row.optimizer == "muon" and golden.game != "golf":   # there the factor is on the update
            lr *= max(1, shapes[kind][0] / shapes[kind][1]) ** 0.5
        assert row.optimizer == ("muon" if about["optimizer"] in ("muon", "normuon") else "adam"), kind
        assert lr == pytest.approx(about["lr"] * about["lr_mult"], rel=1e-6), kind
        if row.optimizer == "adam":
            assert [row.beta1 or cfg.beta1, cfg.beta2, cfg.adam_eps] == [*about["betas"], about["eps"]], kind
        law = about["init"]
        bound = law.get("bound", about["init"].get("bound", about.get("bound")))
        if value is not None or law["kind"] in ("constant", "zeros"):
            expected = value if value is not None else law.get("value", 0)
            assert (row.init, row.scale) == ("constant", pytest.approx(expected)), kind
        elif law["kind"] == "normal":
            assert (row.init, row.scale) == ("normal", pytest.approx(law["std"])), kind
        else:
            assert row.init == "uniform", kind
            assert row.scale * shapes[kind][-1] ** -0.5 == pytest.approx(bound, rel=1e-6), kind


# ---------------------------------------------------------------- rows of the loader, validation, artifact
def stream_data(golden, tmp_path, about):
    """The stream of golf and speedrun as shards on the disk."""
    from helpers import write_shard
    stream, edges = golden.array("packing.tokens"), golden.array("packing.shard_edges")
    train = {}
    for n, (low, high) in enumerate(zip(edges, edges[1:])):
        path = tmp_path / f"x_train_{n:06d}.bin"
        write_shard(path, stream[low:high])
        train[path.name] = train_gpt.open_shard(path)
    return stream, train_gpt.Data(train, None, None, golden.cfg.vocab_size, about.get("bos", -1), None, {})


def loader_of(golden, data, ranks, rank, about):
    cfg = train_gpt.replace(
        golden.cfg, train_seq_len=about["row_tokens"], train_batch_tokens=about["batch_tokens"], max_epochs=0,
        batch_schedule=(1,), seq_schedule=(1,), max_doc_len=about.get("max_doc_len", 0),
        bos_id=about.get("bos", golden.cfg.bos_id))
    team = SimpleNamespace(rank=rank, world_size=ranks, on_gpu=False, device=torch.device("cpu"))
    return train_gpt.Loader(cfg, data, team, log=lambda *_: None)


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("game", ["golf", "speedrun"])
def test_rows_of_a_token_stream(game, ranks, tmp_path):
    golden = Golden(game)
    about = golden.json("packing")
    stream, data = stream_data(golden, tmp_path, about)
    wanted = {}
    rows = golden.array(f"packing.rows{ranks}")
    keys = [key for key in ("step", "rank", "micro_step", "row") if key in about["columns"]]
    for row in rows:
        named = dict(zip(about["columns"], row.tolist()))
        length = named.get("length", named.get("length_with_target"))
        piece = stream[np.arange(named["start"], named["start"] + length) % len(stream)]
        wanted.setdefault(tuple(named[key] for key in keys), []).append(piece)
    wanted = {key: np.concatenate(pieces).tolist() for key, pieces in wanted.items()}
    loaders = [loader_of(golden, data, ranks, rank, about) for rank in range(ranks)]
    for step in range(1 + max(key[0] for key in wanted)):
        for rank, loader in enumerate(loaders):
            x, y = loader.next(about["batch_tokens"])
            ours = torch.cat([x, y[:, -1:]], 1).tolist()
            assert ours == [row for key, row in wanted.items() if key[:2] == (step, rank)], (step, rank)


@pytest.mark.parametrize("ranks", [1, 8])
def test_rows_of_packed_documents(ranks, tmp_path, monkeypatch):
    """gpt2: best fit from a buffer; documents here are numbers, so that a row says which it holds."""
    from helpers import write_shard
    golden = Golden("gpt2")
    about, lengths = golden.json("packing"), golden.array("packing.lengths")
    groups = golden.array("packing.groups")
    files, train, sizes = sorted(set(groups[:, 0].tolist()))[:-1], {}, {}      # the last one is val
    numbers = []
    for file in files:
        mine = np.flatnonzero(groups[:, 0] == file)
        numbers += mine.tolist()
        tokens = [np.r_[1, np.full(lengths[d] - 1, 2)] for d in mine]
        path = tmp_path / f"x_train_{file:06d}.bin"
        write_shard(path, np.concatenate(tokens))
        train[path.name] = train_gpt.open_shard(path)
        sizes[path.name] = np.unique(groups[mine, 1], return_counts=True)[1].tolist()
    data = train_gpt.Data(train, None, None, 64, 1, None, {}, sizes)
    monkeypatch.setattr(train_gpt.Loader, "BUFFER", about["buffer_size"])
    monkeypatch.setattr(train_gpt.Loader, "READ", about["tokenizer_batch_size"])
    wanted = {}
    for step, rank, micro, row, document, length in golden.array(f"packing.rows{ranks}").tolist():
        wanted.setdefault((rank, step, micro, row), []).append((document, length))
    T = about["row_tokens"]
    for rank in range(ranks):
        mine = [pieces for key, pieces in sorted(wanted.items()) if key[0] == rank]
        loader = loader_of(golden, data, ranks, rank, about | {"batch_tokens": T * ranks})
        for n, pieces in enumerate(mine):
            found, *_ = loader.plan(n * ranks, ranks, T)
            document = {int(start): number for start, number in zip(loader.starts, numbers)}
            assert [(document[start], length) for start, length in found[0]] == pieces, (rank, n)


def test_validation_rows(golden):
    """Score of their rows with their weights; of golf and speedrun by evaluate, with its windows."""
    model, cfg = golden.model(), golden.cfg
    team = SimpleNamespace(rank=0, world_size=1, on_gpu=False, device=torch.device("cpu"))
    if golden.game == "gpt2":
        tokens, targets, scored = (torch.from_numpy(golden.array(f"validation.{name}"))
                                   for name in ("inputs", "row_targets", "scored"))
        with torch.no_grad():
            scores = train_gpt.log_probs(model, tokens).gather(-1, targets[..., None])[..., 0]
        nats = -scores.double()[scored].sum().item()
        assert nats == pytest.approx(float(golden.array("validation.nats")), rel=LOSS)
        nbytes = golden.array("validation.token_bytes")[targets.numpy()][scored.numpy()].sum()
        assert nats / math.log(2) / nbytes == pytest.approx(float(golden.array("validation.bpb")), rel=1e-6)
        return
    rows, targets = golden.array("validation.rows"), golden.array("validation.targets")
    context = int(rows[0][-1]) - 1
    assert rows[:, -2].tolist() == list(range(0, len(rows) * context, context))
    cfg = train_gpt.replace(cfg, eval_context=context, eval_stride=0, val_tokens=int(targets[-1]))
    data = train_gpt.Data({}, golden.array("validation.tokens"), None, cfg.vocab_size, cfg.bos_id, None, {})
    score = train_gpt.evaluate(model, cfg, data, team)
    assert score.val_loss == pytest.approx(float(golden.array("validation.loss")), rel=LOSS)


def test_golf_artifact(golf):
    """int8 rows and scales of given weights, and what comes back of them."""
    weights = golf.their_weights("artifact.w")
    large = golf.their_weights("artifact.q")
    assert large
    for name, q in large.items():
        ours, scale = train_gpt.quantize_rows(weights[name], 0.0, golf.full.artifact_scale_floor)
        assert torch.equal(ours, q), name
        assert torch.equal(scale, golf.their_weights("artifact.scale")[name]), name
        back = golf.their_weights("artifact.back")[name]
        torch.testing.assert_close(ours.float() * scale.float()[:, None], back, rtol=0, atol=0)
    kept = golf.their_weights("artifact.kept")
    dtypes = {name: w.dtype for name, w in kept.items()}
    assert {torch.float16, torch.float32} == set(dtypes.values())
    for name, w in kept.items():
        assert torch.equal(weights[name].to(w.dtype), w), name


def test_derived_constants_of_gpt2(one_thread):
    """Width, batch, steps and decay of other depths, as the public code derives them."""
    derived = Golden("gpt2").json("derived")
    for about in [*derived["others"], derived | dict(ratio=7.25, asked_batch=524288, batch=524288,
                                                      iterations=derived["num_iterations"])]:
        asked = {"PRESET": "gpt2", "DEPTH": str(about["depth"]),
                 "TRAIN_BATCH_TOKENS": str(about["asked_batch"]),
                 "TARGET_PARAM_DATA_RATIO": str(about["ratio"])}
        cfg = train_gpt.load_config(asked)
        assert (cfg.train_batch_tokens, cfg.iterations) == (about["batch"], about["iterations"]), asked
        assert train_gpt.horizon_weights(cfg) == about["scaling_weights"], about["depth"]
        assert cfg.weight_decay * cfg.matrix_lr == pytest.approx(about["weight_decay_scaled"], rel=1e-9)
        assert cfg.matrix_lr == pytest.approx(0.02 * about["batch_lr_scale"], rel=1e-9)
        assert cfg.scalar_lr == pytest.approx(0.5 * about["batch_lr_scale"], rel=1e-9)


# ---------------------------------------------------------------- the three later records
PLUS_NATS, PLUS_GRADIENT, PLUS_UPDATE = 1e-5, 2e-4, 1e-3    # of golden/plus/README.md; Euclidean


def layers_of(w, i, names):
    return {f"blocks.{i}.{name}": w[f"blocks.{i}.{name}"] for name in names if f"blocks.{i}.{name}" in w}


MATRICES = ("query", "key", "value", "attn_proj", "fc", "mlp_proj")


def gpt2_plus_weights(w, cfg):
    ours = {"embed": w["embed"], "head": w["head"], "smear_gate": w["smear_gate"],
            "smear": w["smear_lambda"].view(1, 1), "backout": w["backout_lambda"]} | value_tables(w)
    # theirs are padded, and their logits cropped
    ours = {name: a if name.startswith(("smear", "backout")) else a[:cfg.vocab_size]
            for name, a in ours.items()}
    for i in range(cfg.num_layers):
        ours |= layers_of(w, i, (*MATRICES, "value_gate"))
        ours |= {f"blocks.{i}.resid_lambda": w["resid_lambdas"][i:i + 1],
                 f"blocks.{i}.x0_lambda": w["x0_lambdas"][i:i + 1]}
    return ours


def speedrun_plus_weights(w, cfg):
    """Their heads rotate adjacent channels of the first half, ours the first quarters of both halves."""
    D = cfg.model_dim // cfg.num_heads
    order = [*range(0, D // 2, 2), *range(D // 2, 3 * D // 4), *range(1, D // 2, 2), *range(3 * D // 4, D)]
    ours = {name: w[name] for name in ("embed", "head", "bigram_embed", "smear_gate", "skip_gate")}
    ours |= {"smear": w["smear_lambda"].view(1, 1), "backout": w["backout_lambda"],
             "skip_weights": w["skip_lambda"].view(1, 1)} | value_tables(w)
    for i in range(cfg.num_layers):
        block = f"blocks.{i}."
        ours |= layers_of(w, i, (*MATRICES, "attn_gate", "value_gate"))
        ours[block + "mlp_proj"] = ours[block + "mlp_proj"].T
        for kind in ("query", "key") if block + "query" in ours else ():
            matrix = ours[block + kind]
            ours[block + kind] = matrix.view(-1, D, matrix.size(1))[:, order].reshape(matrix.shape)
        ours |= {block + "resid_lambda": w["resid_lambdas"][i].view(2, 1),
                 block + "layer_scale": w["post_lambdas"][i].view(2, 1),
                 block + "x0_lambda": w["x0_lambdas"][i:i + 1],
                 block + "bigram_lambda": w["bigram_lambdas"][i:i + 1]}
        if block + "query" in ours:
            ours |= {block + "input_lambda": w["sa_lambdas"][i, :1],
                     block + "output_lambda": w["sa_lambdas"][i, 1:]}
    return ours


def golf_plus_weights(w, cfg):
    """Their heads rotate the first channels, ours the first ones of both halves."""
    D = cfg.model_dim // cfg.num_heads
    n, fixed = int(cfg.rope_fraction * D / 2), (D - int(cfg.rope_fraction * D)) // 2
    order = [*range(n), *range(2 * n, 2 * n + fixed), *range(n, 2 * n), *range(2 * n + fixed, D)]
    ours = {"embed": w["embed"], "skip_weights": w["skip_weights"], "skip_mix": w["skip_gates"]}
    for i in range(cfg.num_layers):
        block = f"blocks.{i}."
        ours |= layers_of(w, i, (*MATRICES, "qk_gain"))
        for kind in ("query", "key"):
            matrix = ours[block + kind]
            ours[block + kind] = matrix.view(-1, D, matrix.size(1))[:, order].reshape(matrix.shape)
        ours |= {block + "resid_lambda": w[block + "residual_mix"][0],
                 block + "x0_lambda": w[block + "residual_mix"][1],
                 block + "layer_scale": torch.stack([w[block + "attn_scale"], w[block + "mlp_scale"]])}
    return ours


def value_tables(w):
    layers = sorted(int(name.split(".")[1]) for name in w if name.startswith("value_embeds"))
    return {f"value_embeds.{n}": w[f"value_embeds.{i}"] for n, i in enumerate(layers)}


def layer_tables(layers, num_layers):
    """value_embed_layers of layers that have a table each."""
    return ",".join(str(layers.index(i) + 1 if i in layers else 0) for i in range(num_layers))


def gpt2_plus_toy(meta, json):
    """Its constants; rates are those of full size, but for the width's factor."""
    full, width = json("full_size"), (meta["model_dim"] / 768) ** -0.5
    rate, adam = full["batch_lr_scale"], full["batch_lr_scale"] * width
    kinds = "".join("L" if window == meta["seq"] else "S" for window in meta["windows"])
    return {
        "DEPTH": "0", "NUM_LAYERS": meta["layers"], "NUM_HEADS": meta["heads"],
        "MODEL_DIM": meta["model_dim"], "VOCAB_SIZE": meta["vocab"],
        "TRAIN_SEQ_LEN": meta["seq"], "WINDOW_SCHEDULE": meta["seq"],
        "TRAIN_BATCH_TOKENS": meta["seq"] * meta["rows"], "WINDOW_PATTERN": kinds,
        "VALUE_EMBED_LAYERS": layer_tables(meta["value_embed_layers"], meta["layers"]),
        "BACKOUT_LAYER": meta["backout_layer"], "ATTN_SCALE": 1.44 * meta["head_dim"] ** -0.5,
        "TARGET_PARAM_DATA_RATIO": "0", "ITERATIONS": full["steps"], "MATRIX_LR": 0.02 * rate,
        "EMBED_LR": 0.3 * adam, "HEAD_LR": 0.008 * adam, "SCALAR_LR": 0.5 * rate,
        "WEIGHT_DECAY": full["weight_decay"] / (0.02 * rate)}


def speedrun_plus_toy(meta, json):
    """Its windows are those of the settings, in blocks of the toy."""
    settings = json("settings")
    longs = sorted({row["long"] for row in settings if row["training"]})
    return {"NUM_LAYERS": meta["layers"], "NUM_HEADS": meta["heads"], "MODEL_DIM": meta["model_dim"],
            "VOCAB_SIZE": meta["vocab"], "BOS_ID": meta["bos"], "BIGRAM_ROWS": meta["bigram_rows"],
            "WINDOW_BLOCK": meta["window_block"], "WINDOW_SCHEDULE": ",".join(map(str, longs)),
            "EVAL_WINDOW": max(row["long"] for row in settings), "MAX_DOC_LEN": meta["max_doc"],
            "TRAIN_SEQ_LEN": meta["tokens"], "TRAIN_BATCH_TOKENS": meta["tokens"]}


def golf_plus_toy(meta, json):
    return {"NUM_LAYERS": meta["layers"], "NUM_HEADS": meta["heads"], "NUM_KV_HEADS": meta["kv_heads"],
            "MODEL_DIM": meta["model_dim"], "VOCAB_SIZE": meta["vocab"], "TRAIN_SEQ_LEN": meta["seq"],
            "TRAIN_BATCH_TOKENS": meta["seq"] * meta["rows"], "ARTIFACT_KEEP": "0",
            "LOOP_LAYERS": f"{meta['loop_start']},{meta['loop_end']}",
            "LOOP_SCHEDULE": f"0,{meta['num_loops']}", "ROPE_FRACTION": meta["rope_dims"] / meta["head_dim"]}


MAPS |= dict(gpt2_plus=gpt2_plus_weights, speedrun_plus=speedrun_plus_weights, golf_plus=golf_plus_weights)
TOYS = dict(gpt2_plus=gpt2_plus_toy, speedrun_plus=speedrun_plus_toy, golf_plus=golf_plus_toy)


class Plus(Golden):
    def __init__(self, game):
        self.game, self.npz = game, np.load(GOLDEN / "plus" / f"{game}.npz")
        self.meta = self.json("meta")
        toy = {name: str(value) for name, value in TOYS[game](self.meta, self.json).items()}
        self.cfg = train_gpt.load_config({"PRESET": game} | toy)
        self.full = train_gpt.load_config({"PRESET": game})
        self.settings = SETTINGS[game](self)

    def first_step(self, series):
        """Of a series of five: stated, or found by the LR and momentum of the last one."""
        if "optimizer_first_steps" in self.npz:
            return self.json("optimizer_first_steps")[series]
        if "optimizer_setting" in self.npz:
            return self.json("optimizer_setting")[series]["first"]
        last = self.json(f"{series}.last_step")["attn_bank"]
        lr, momentum = last["lr"] / self.full.matrix_lr, last["momentum"]
        table = self.array("schedule").astype(np.float64)
        steps, = np.nonzero((abs(table[:, 1] - lr) < 1e-6) & (abs(table[:, 2] - momentum) < 1e-6))
        return int(steps[0]) - 4

    def batch(self, k, series=""):
        rows = [torch.from_numpy(self.array(f"{name}_{k}")).long() for name in ("tokens", "targets")]
        return [row.view(-1, row.size(-1)) for row in rows]

    def numbers(self):
        """{their name: of each number its place in all of them}"""
        shapes = {name: w.shape for name, w in self.their_weights("w0").items()}
        places = torch.arange(sum(shape.numel() for shape in shapes.values()), dtype=torch.float64)
        parts = places.split([shape.numel() for shape in shapes.values()])
        return {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items())}

    def theirs(self, ours):
        """{our name: tensor} -> {their name: tensor}; nan where ours has no such number."""
        numbers = self.numbers()
        flat = torch.full((sum(part.numel() for part in numbers.values()),), math.nan, dtype=torch.float64)
        for name, places in MAPS[self.game](numbers, self.cfg).items():
            flat[places.flatten().long()] = ours[name].detach().double().flatten()
        return {name: flat[places.long()] for name, places in numbers.items()}

    def synthetic_gradients(self, step):
        """Of golden/plus/README.md, as ours."""
        found = {}
        for i, name in enumerate(sorted(self.their_weights("w0"))):
            draw = np.random.default_rng([self.meta["seed"], step, i]).standard_normal
            found[name] = torch.from_numpy((0.01 * draw(self.array(f"w0.{name}").shape)).astype(np.float32))
        return MAPS[self.game](found, self.cfg)

    def schedule_at(self, step, series=""):
        """What Optimizer.step takes."""
        cfg, progress = self.full, step / train_gpt.total_steps(self.full)
        if "optimizer_setting" in self.npz:     # by the clock
            progress = self.json("optimizer_setting")[series]["frac"]
        return [f(cfg, step, progress) for f in (train_gpt.lr_factor, train_gpt.muon_momentum,
                                                 train_gpt.decay_factor, train_gpt.tied)]


def gpt2_plus_settings(golden):
    return [SimpleNamespace(prefix="", batch=0, weights=lambda w: w, losses=golden.array("loss"),
                            context=golden.context(golden.meta["seq"], golden.meta["seq"]))]


def speedrun_plus_settings(golden):
    found = []
    for row, losses in zip(golden.json("settings"), golden.array("loss"), strict=True):
        context = golden.context(golden.meta["tokens"], row["long"])
        assert context.windows == {"L": row["long"], "S": row["short"], "P": row["short"]}
        assert context.attn_scale.item() == pytest.approx(row["attn_scale"], rel=1e-6)
        mtp = torch.tensor(row["mtp"]) if len(row["mtp"]) > 1 else None
        found.append(SimpleNamespace(
            prefix=row["name"] + ".", batch=int(row["step"] > 0), losses=losses, row=row,
            context=context._replace(mtp=mtp),
            weights=lambda w, tied=row["tied"]: w | {"embed": w["head"]} if tied else w))
    return found


def golf_plus_settings(golden):
    """Before and after the loops begin."""
    plain = golden.context(golden.meta["seq"], 0)._replace(loops=0)
    columns = golden.json("loss_columns")
    assert golden.context(golden.meta["seq"], 0).loops == golden.meta["num_loops"]
    for name, loops in (("plain", 0), ("loop", golden.meta["num_loops"])):
        theirs = golden.meta[f"encoder_{name}"] + golden.meta[f"decoder_{name}"]
        assert train_gpt.layer_order(golden.cfg, loops) == theirs
    losses = golden.array("loss")
    return [SimpleNamespace(prefix=f"{name}.", batch=0, weights=lambda w: w, losses=losses[:, k],
                            context=plain._replace(loops=golden.meta["num_loops"] * (name == "loop")))
            for k, name in enumerate(columns)]


SETTINGS = dict(gpt2_plus=gpt2_plus_settings, speedrun_plus=speedrun_plus_settings,
                golf_plus=golf_plus_settings)
PLUS = tuple(TOYS)


@pytest.fixture(scope="module", params=PLUS)
def plus(request, one_thread):
    return Plus(request.param)


def test_plus_losses_and_nats(plus):
    """Mean loss of every batch in every setting, the nats of each token of the first one."""
    for setting in plus.settings:
        model = plus.model()
        with torch.no_grad():
            for name, w in setting.weights(dict(model.named_parameters())).items():
                model.get_parameter(name).copy_(w)
            for k, expected in enumerate(setting.losses):
                tokens, targets = plus.batch(k)
                assert model(tokens, targets, setting.context).item() == pytest.approx(expected, rel=1e-6)
                kept = f"nats.{setting.prefix}".rstrip(".")
                if k == 0 and kept in plus.npz:
                    scores = model.logits(model.hidden(tokens, setting.context)).flatten(0, 1)
                    nats = F.cross_entropy(scores.double(), targets.flatten(), reduction="none")
                    if setting.context.mtp is not None:     # theirs are those of all targets, weighted
                        norm, T = scores.double().logsumexp(-1), len(scores)
                        nats = sum(weight * F.pad(norm[:T - k] - scores[torch.arange(T - k), targets[0, k:]],
                                                  (0, k)) for k, weight in enumerate(setting.context.mtp))
                    theirs = torch.from_numpy(plus.array(kept)).double().flatten()
                    assert difference(nats, theirs) < PLUS_NATS, kept
                    assert (nats - theirs).abs().max() < 10 * PLUS_NATS, kept


def test_plus_gradients(plus):
    """Of the mean loss of a batch, every parameter."""
    kept = [setting for setting in plus.settings
            if any(name.startswith(f"g.{setting.prefix}") for name in plus.npz.files)]
    assert kept
    for setting in kept:
        model = plus.model()
        with torch.no_grad():
            for name, w in setting.weights(dict(model.named_parameters())).items():
                model.get_parameter(name).copy_(w)
        model(*plus.batch(setting.batch), setting.context).backward()
        ours = plus.theirs({name: torch.zeros_like(p) if p.grad is None else p.grad
                            for name, p in model.named_parameters()})
        nothing = {name: torch.zeros_like(grad) for name, grad in ours.items()}
        compare(plus, f"g.{setting.prefix}", f"gdigest.{setting.prefix}", nothing, ours, PLUS_GRADIENT)


@pytest.mark.parametrize("series", ["early", "mid", "late"])
def test_plus_updates(plus, series):
    """Weights after one and five steps on given gradients, no optimizer state before."""
    model, first = plus.model(), plus.first_step(series)
    optimizer = train_gpt.Optimizer(model, plus.cfg)
    optimizer.step_count = first % plus.cfg.adam_every
    if train_gpt.tied(plus.full, first, first / train_gpt.total_steps(plus.full)):      # as it begins
        model.embed.data.copy_(model.head.data)
    before = plus.theirs({name: p.clone() for name, p in model.named_parameters()})
    for k in range(1, 6):
        add_gradients(optimizer, plus.synthetic_gradients(first + k - 1))
        optimizer.step(*plus.schedule_at(first + k - 1, series))
        if k in (1, 5):
            after = plus.theirs(dict(model.named_parameters()))
            compare(plus, f"{series}.dw{k}.", f"{series}.w{k}digest.", before, after, PLUS_UPDATE)


def compare(plus, prefix, digest, before, after, tolerance):
    """What was added to each of their tensors where they kept it, and the digest of every tensor."""
    seen = Counter()
    for name in before:
        moved, there = after[name] - before[name], ~after[name].isnan()
        if prefix + name in plus.npz:
            theirs = torch.from_numpy(plus.array(prefix + name)).double()
            assert difference(moved[there], theirs[there]) < tolerance, prefix + name
            seen["kept"] += 1
        if there.all() and digest + name in plus.npz:
            flat = after[name].flatten()
            wave = torch.arange(len(flat), dtype=torch.float64).cos()
            ours = torch.stack([flat.sum(), flat.norm(), (flat * wave).sum()])
            theirs = torch.from_numpy(plus.array(digest + name))
            allowed = tolerance * moved.norm() + 1e-6 * flat.norm()
            assert (ours - theirs).abs().max() <= allowed, (digest + name, ours, theirs)
            seen["digests"] += 1
    for kind, start in (("kept", prefix), ("digests", digest)):
        assert seen[kind] or not any(name.startswith(start) for name in plus.npz.files), (start, seen)
    assert seen


def test_gpt2_plus_at_full_size(one_thread):
    """Every row of its schedule, derived constants of this and other depths."""
    golden = Plus("gpt2_plus")
    cfg, full = golden.full, golden.json("full_size")
    for step, *theirs in golden.array("schedule"):
        lr, momentum, decay, _ = golden.schedule_at(int(step))
        ours = [lr, momentum, decay * cfg.weight_decay * cfg.matrix_lr]
        assert ours == pytest.approx(theirs, rel=2e-7, abs=1e-9), step
    sizes = train_gpt.window_sizes(cfg, cfg.window_schedule[-1], cfg.train_seq_len)
    counts = train_gpt.parameter_counts(cfg)
    ours = dict(
        depth=cfg.depth, ratio=cfg.target_param_data_ratio, model_dim=cfg.model_dim, heads=cfg.num_heads,
        vocab=cfg.vocab_size, seq=cfg.train_seq_len, steps=cfg.iterations,
        batch_tokens=cfg.train_batch_tokens,
        windows=[sizes[kind] for kind in cfg.window_pattern], backout_layer=cfg.backout_layer,
        scaling_weights=train_gpt.horizon_weights(cfg), weight_decay=cfg.weight_decay * cfg.matrix_lr,
        value_embed_layers=[i for i, table in enumerate(cfg.value_embed_layers) if table],
        flops_per_token=train_gpt.flops_per_token(cfg))
    assert ours == {name: pytest.approx(full[name], rel=1e-6) for name in ours}
    assert counts.total() == full["parameters"]["total"]
    for row in golden.json("scaling_table"):
        cfg = train_gpt.load_config({"PRESET": "gpt2_plus", "DEPTH": str(row["depth"]),
                                     "TARGET_PARAM_DATA_RATIO": str(row["ratio"])})
        sizes = cfg.model_dim, cfg.iterations, cfg.train_batch_tokens
        assert sizes == (row["dim"], row["steps"], row["batch"])
        assert train_gpt.horizon_weights(cfg) == row["scaling"]
        assert cfg.weight_decay * cfg.matrix_lr == pytest.approx(row["wd"])
        assert cfg.scalar_lr == pytest.approx(0.5 * row["lr_scale"])


# {our kind: the entry of `init` that it is in}
PLUS_ENTRIES = {"gpt2_plus": {
    "embed": "embed", "head": "head", "value_embeds": "value_embeds", "resid_lambda": "resid_lambdas",
    "x0_lambda": "x0_lambdas", "smear_gate": "smear_gate", "smear": "smear_lambda",
    "backout": "backout_lambda", "query": "blocks.i.query", "key": "blocks.i.query",
    "value": "blocks.i.query", "attn_proj": "blocks.i.attn_proj", "fc": "blocks.i.fc",
    "mlp_proj": "blocks.i.mlp_proj", "value_gate": "blocks.odd.value_gate"},
    "speedrun_plus": dict(
        {kind: "blocks.i.query" for kind in ("query", "key", "value", "attn_proj")}, fc="blocks.i.fc",
        mlp_proj="blocks.i.mlp_proj", embed="embed", head="head", bigram_embed="bigram_embed",
        value_embeds="value_embeds", attn_gate="blocks.i.attn_gate", value_gate="blocks.l.value_gate",
        input_lambda="sa_lambdas", output_lambda="sa_lambdas", smear="smear_lambda",
        backout="backout_lambda", skip_weights="skip_lambda", smear_gate="smear_gate",
        skip_gate="skip_gate", layer_scale="post_lambdas", x0_lambda="x0_lambdas",
        bigram_lambda="bigram_lambdas", resid_lambda="resid_lambdas"),
    "golf_plus": dict(
        {kind: f"blocks.i.{kind}" for kind in (*MATRICES, "qk_gain")}, embed="embed",
        layer_scale="blocks.i.attn_scale", resid_lambda="blocks.i.residual_mix",
        x0_lambda="blocks.i.residual_mix", skip_weights="skip_weights", skip_mix="skip_gates")}


def stated_law(text):
    """(init, bound, std or first value, change over the layers) of an entry's text."""
    text = text.partition("fixed later: ")[2] or text
    numbers = [float(number) for number in re.findall(r"[-+]?\d+\.?\d*", text.replace("- ", "-"))]
    if text.startswith("uniform"):
        return ("positive" if numbers[0] == 0 else "uniform", numbers[1], 0)
    if text.startswith(("normal", "orthogonal")):
        return (text[:6] if text[0] == "n" else "orthogonal", numbers[-1], 0)
    if text.startswith("sqrt"):
        return ("constant", numbers[0] ** 0.5, 0)
    return ("constant", 0 if text == "zeros" else numbers[0], numbers[1] if " i/" in text else 0)


def test_plus_first_values_optimizers_and_rates(plus):
    """Of every kind of parameter at full size."""
    cfg, init, entries = plus.full, plus.json("init"), PLUS_ENTRIES[plus.game]
    table = train_gpt.parameter_table(cfg)
    with torch.device("meta"):
        shapes = {train_gpt.kind_of(name): p.shape for name, p in train_gpt.GPT(cfg).named_parameters()}
    assert set(shapes) == set(entries)
    for kind, prefix in entries.items():
        row, shape = table[kind], shapes[kind]
        about = next(init[name] for name in init if name.startswith(prefix))
        muon, lr = row.optimizer == "muon", getattr(cfg, row.lr) * row.lr_mult
        if muon and plus.game != "golf_plus":       # there the factor is on the update
            lr *= max(1, shape[0] / shape[1]) ** 0.5
        assert muon == ("muon" in about["optimizer"]), kind
        assert lr == pytest.approx(about["lr"], rel=1e-6), kind
        if not muon:
            betas = [row.beta1 or cfg.beta1, row.beta2 or cfg.beta2]
            assert [*betas, cfg.adam_eps] == [*about["betas"], about["eps"]], kind
        elif "beta2" in about:
            assert cfg.normuon_beta2 == about["beta2"], kind
        if "weight_decay" in about:
            unit = cfg.weight_decay * cfg.matrix_lr if muon else cfg.adam_weight_decay
            unit *= about.get("update_mul", 1)
            assert unit * row.decay_mult == pytest.approx(about["weight_decay"], rel=1e-6), kind
        elif "wd_mul" in about:     # times the square of the rate
            decay = cfg.adam_weight_decay * row.decay_mult
            assert decay == pytest.approx(lr * 0.005 * about["wd_mul"]), kind
        first = about["init"]
        if first.startswith("copy of"):
            assert cfg.untie_at and row.scale == table["head"].scale
            continue
        if "(qkv)" in first:
            first = first.split(", ")[kind == "output_lambda"].split()[0]
        if first.startswith("row 0"):
            first = first.split(", ")[kind == "x0_lambda"].split(": ")[1]
        law, size, change = stated_law(first)
        scale = row.scale * shape[-1] ** -0.5 if law == "uniform" else row.scale
        assert (row.init, row.change) == (law, pytest.approx(change)), kind
        assert scale == pytest.approx(size, rel=2e-6), kind


def test_first_values_follow_the_table(one_thread):
    """Drawn: bounds and spread of each law; constants that change over the layers."""
    cells = ("query.init=uniform", "query.scale=2", "fc.init=positive", "fc.scale=0.5", "key.init=normal",
             "key.scale=0.3", "x0_lambda.scale=0.2", "x0_lambda.change=-0.15")
    cfg = train_gpt.load_config({"PARAMETERS": ",".join(cells), "NUM_LAYERS": "4", "VOCAB_SIZE": "64",
                                  "WINDOW_PATTERN": "L"})
    values = train_gpt.first_values(train_gpt.GPT(cfg), 1)
    bound = 2 * cfg.model_dim ** -0.5
    assert values["blocks.1.query"].abs().max() <= bound
    assert values["blocks.1.query"].std().item() == pytest.approx(bound / 3 ** 0.5, rel=0.02)
    fc = values["blocks.2.fc"]
    assert fc.min() >= 0 and fc.max() <= 0.5 and fc.mean().item() == pytest.approx(0.25, rel=0.02)
    assert values["blocks.0.key"].std().item() == pytest.approx(0.3, rel=0.02)
    lambdas = [values[f"blocks.{i}.x0_lambda"][0].item() for i in range(4)]
    assert lambdas == pytest.approx([0.2, 0.15, 0.1, 0.05])


def test_rows_of_packed_documents_plus(tmp_path, monkeypatch):
    """gpt2_plus: best fit, of one rank."""
    from helpers import write_shard
    golden = Plus("gpt2_plus")
    about, lengths = golden.json("packing"), golden.array("packing.lengths")
    path = tmp_path / "x_train_000000.bin"
    write_shard(path, np.concatenate([np.r_[1, np.full(n - 1, 2)] for n in lengths]))
    train = {path.name: train_gpt.open_shard(path)}
    monkeypatch.setattr(train_gpt.Loader, "BUFFER", about["buffer"])
    monkeypatch.setattr(train_gpt.Loader, "READ", about["refill"])
    T = about["row_tokens"] - 1
    data = train_gpt.Data(train, None, None, 64, 1, None, {})
    loader = loader_of(golden, data, 1, 0, {"row_tokens": T, "batch_tokens": T, "bos": 1})
    numbers = {int(start): number for number, start in enumerate(loader.starts)}
    for n, row in enumerate(json.loads(str(golden.npz["packing.rows"]))):
        found = loader.plan(n, 1, T)[0][0]
        assert [[numbers[start], length] for start, length in found] == row, n


def test_gpt2_plus_rope_and_validation(one_thread):
    golden = Plus("gpt2_plus")
    cos, sin = golden.context(len(golden.array("rope.toy_cos")), 0).rope
    for ours, name in ((cos, "cos"), (sin, "sin")):
        theirs = torch.from_numpy(golden.array(f"rope.toy_{name}"))
        torch.testing.assert_close(ours[:, 0], theirs, rtol=0, atol=1e-6)
    assert json.loads(str(golden.npz["rope"]))["base"] == golden.full.rope_base
    assert golden.json("validation")["tokens"] == golden.full.val_tokens
    model = golden.model()
    batches = [golden.batch(k) for k in range(len(golden.array("loss")))]
    tokens, targets = (torch.cat(rows) for rows in zip(*batches))
    with torch.no_grad():
        nats = -train_gpt.log_probs(model, tokens).gather(-1, targets[..., None])[..., 0].double()
    nbytes = torch.from_numpy(golden.array("validation.token_bytes"))[targets]
    bpb = nats[nbytes > 0].sum() / math.log(2) / nbytes.sum()
    assert bpb.item() == pytest.approx(float(golden.array("validation.bpb")), rel=1e-6)


# ---------------------------------------------------------------- speedrun_plus
@pytest.fixture(scope="module")
def speedrun_plus(one_thread):
    return Plus("speedrun_plus")


def test_speedrun_plus_schedule(speedrun_plus):
    """Every step: rates, batch, windows, cut of documents, weights of the losses, tying."""
    cfg, columns = speedrun_plus.full, speedrun_plus.json("schedule_columns")
    for row in speedrun_plus.array("schedule"):
        theirs = dict(zip(columns, row.tolist()))
        step = int(theirs["step"])
        lr, momentum, _, tied = speedrun_plus.schedule_at(step)
        progress = step / train_gpt.total_steps(cfg)
        stage = train_gpt.stage_at(cfg, progress)
        sizes = train_gpt.window_sizes(cfg, stage.window, cfg.train_seq_len * stage.seq_multiple)
        weights = train_gpt.mtp_weights(cfg, progress) + [0, 0]
        ours = dict(lr_factor=lr, muon_momentum=momentum, short_window=sizes["S"], long_window=sizes["L"],
                    batch_tokens=cfg.train_batch_tokens * stage.batch_multiple, max_doc=stage.longest,
                    mtp0=weights[0], mtp1=weights[1], mtp2=weights[2], adam_step=step % cfg.adam_every,
                    embed_follows_head_after_this_step=tied)
        for name, value in ours.items():
            assert value == pytest.approx(theirs[name], rel=2e-7, abs=1e-7), (step, name)
    long = train_gpt.eval_window(cfg)
    sizes = train_gpt.window_sizes(cfg, long, cfg.train_seq_len)
    assert [sizes["S"], sizes["L"]] == speedrun_plus.json("schedule_notes")["final_validation_windows"]
    assert cfg.val_tokens == speedrun_plus.json("validation")["tokens"]


def test_speedrun_plus_attention_alone(speedrun_plus):
    """A layer with heads in pairs, and a long one with the key offset."""
    model, (tokens, _) = speedrun_plus.model(), speedrun_plus.batch(0)
    setting = next(s for s in speedrun_plus.settings if s.row["step"] == 1200)
    x, documents = torch.from_numpy(speedrun_plus.array("unit.x")), (tokens == model.cfg.bos_id).cumsum(1)
    edges = sorted({*speedrun_plus.array("cu_seqlens_0").tolist()})
    assert torch.nonzero(tokens[0] == speedrun_plus.cfg.bos_id)[:, 0].tolist() == edges[:-1]
    for name in (name for name in speedrun_plus.npz.files if name.startswith("unit.attention_")):
        i = int(name.rpartition("_")[2])
        kind, T = model.kinds[i], x.size(0)
        times = 2 if kind == "P" else 1
        mask = train_gpt.window_mask(setting.context.windows[kind], times * T,
                                     documents.repeat_interleave(times, 1), x.device)
        table = model.value_embeds[model.tables[i] - 1] if model.tables[i] else None
        values = 0 if table is None else F.embedding(tokens, table)
        with torch.no_grad():
            ours = model.blocks[i].attend(x[None], values, mask, setting.context)[0]
        assert difference(ours, torch.from_numpy(speedrun_plus.array(name))) < PLUS_NATS, name


def test_speedrun_plus_rope(speedrun_plus):
    cfg = speedrun_plus.full
    for window, scale in json.loads(str(speedrun_plus.npz["rope.attn_scale"])).items():
        frequencies, ours = train_gpt.rope_frequencies(cfg, int(window))
        theirs = torch.from_numpy(speedrun_plus.array(f"rope.freq_{window}"))
        torch.testing.assert_close(frequencies[:len(theirs)], theirs, rtol=2e-6, atol=0)
        assert not frequencies[len(theirs):].any() and ours == pytest.approx(scale, rel=1e-6)
    factors = [torch.from_numpy(speedrun_plus.array(f"rope.toy_{name}")) for name in
               ("factor1", "factor2", "pair_factor1", "pair_factor2")]
    T, D = factors[0].shape
    cfg = train_gpt.replace(cfg, model_dim=2 * D, num_heads=2)
    context = make_context(cfg, T, cfg.window_schedule[0], torch.device("cpu"), torch.float32)
    cos, sin, pair_cos, pair_sin = factors      # theirs: adjacent channels, sin with its sign
    for mine, theirs in ((context.rope[0], cos), (context.rope[1], sin)):
        torch.testing.assert_close(mine[:, 0, :D // 4], theirs[:, :D // 2:2], rtol=0, atol=2e-6)
    for mine, theirs in ((context.pair_rope[0], pair_cos), (context.pair_rope[1], pair_sin)):
        for half, part in zip(mine[:, 0].unbind(1), theirs.chunk(2, 1)):
            torch.testing.assert_close(half[:, :D // 4], part[:, :D // 2:2], rtol=0, atol=4e-6)


def test_speedrun_plus_bigram_hash(speedrun_plus):
    tokens = torch.from_numpy(speedrun_plus.array("packing.hash_tokens"))[None]
    ours = train_gpt.bigram_ids(tokens, speedrun_plus.full.bigram_rows)
    assert ours[0].tolist() == speedrun_plus.array("packing.hash_rows_full_size").tolist()
    for k in range(3):
        ours = train_gpt.bigram_ids(speedrun_plus.batch(k)[0], speedrun_plus.cfg.bigram_rows)
        assert ours[0].tolist() == speedrun_plus.array(f"bigram_{k}").tolist()


def test_speedrun_plus_rows(speedrun_plus, tmp_path):
    """Heads of documents, of another length in each stage, for two ranks."""
    from helpers import write_shard
    calls, stream = speedrun_plus.json("packing.calls"), speedrun_plus.array("packing.stream")
    path = tmp_path / "x_train_000000.bin"
    write_shard(path, stream)
    train = {path.name: train_gpt.open_shard(path)}
    bos, ranks, T = speedrun_plus.meta["bos"], len(calls[0]["starts"]), calls[0]["row_tokens"]
    data = train_gpt.Data(train, None, None, int(stream.max()) + 1, bos, None, {})
    cuts = tuple(call["max_doc"] for call in calls)
    cfg = train_gpt.replace(
        speedrun_plus.cfg, train_seq_len=T, train_batch_tokens=ranks * T, max_epochs=0, max_doc_len=max(cuts),
        doc_schedule=cuts, batch_schedule=(1,), seq_schedule=(1,), mtp_schedule=("1",), stage_starts=(0.0,),
        window_schedule=(12,))
    for rank in range(ranks):
        team = SimpleNamespace(rank=rank, world_size=ranks, on_gpu=False, device=torch.device("cpu"))
        loader = train_gpt.Loader(cfg, data, team, log=lambda *_: None)
        for call in calls:
            times = call["row_tokens"] // T
            x, y = loader.next(ranks * call["row_tokens"], times, call["max_doc"])
            pieces = zip(call["starts"][rank], call["ends"][rank])
            theirs = np.concatenate([stream[low:high] for low, high in pieces]).tolist()
            assert [*x[0].tolist(), y[0, -1].item()] == theirs, (rank, call["row_tokens"])


# ---------------------------------------------------------------- golf_plus
@pytest.fixture(scope="module")
def golf_plus(one_thread):
    return Plus("golf_plus")


def test_golf_plus_schedule(golf_plus):
    """By the clock: LR, momentum, loops."""
    cfg, columns = golf_plus.full, golf_plus.json("schedule_columns")
    for row in golf_plus.array("schedule"):
        theirs = dict(zip(columns, row.tolist()))
        step, progress = int(theirs["step"]), train_gpt.run_progress(cfg, int(row[0]), row[1] / 1000)
        assert progress == pytest.approx(theirs["frac"], abs=1e-6)
        ours = dict(lr_factor=train_gpt.lr_factor(cfg, step, progress),
                    muon_momentum=train_gpt.muon_momentum(cfg, step, progress))
        for name, value in ours.items():
            assert value == pytest.approx(theirs[name], abs=2e-6), (step, name)
        loops = train_gpt.stage_at(cfg, progress).loops > 0
        assert abs(progress - 0.5) < 1e-6 or loops == theirs["loop_active"], step


def test_golf_plus_at_full_size(golf_plus):
    cfg, full = golf_plus.full, golf_plus.json("full_size")
    names = ("vocab_size num_layers model_dim num_kv_heads num_heads mlp_mult tie_embeddings logit_softcap "
             "rope_base tied_embed_lr tied_embed_init_std matrix_lr scalar_lr muon_momentum beta1 beta2 "
             "muon_momentum_warmup_start muon_momentum_warmup_steps muon_backend_steps adam_eps ema_decay "
             "grad_clip_norm train_seq_len train_batch_tokens iterations warmdown_frac qk_gain_init").split()
    for name in names:
        assert getattr(cfg, name) == full[name], name
    assert (cfg.eval_sliding, cfg.gptq_batches) == (full["eval_stride"], full["gptq_calibration_batches"])
    assert cfg.loop_layers == (full["loop_start"], full["loop_end"])
    assert cfg.loop_schedule == (0, full["num_loops"])
    assert cfg.max_wallclock_seconds == full["max_wallclock_seconds"] - full["gptq_reserve_seconds"]
    assert cfg.warmup_steps == 2 * full["warmup_steps"] and full["enable_looping_at"] == 0.5
    theirs = torch.from_numpy(golf_plus.array("rope.inv_freq"))
    ours = train_gpt.rope_frequencies(cfg, 0)[0]
    torch.testing.assert_close(ours[:len(theirs)], theirs, rtol=2e-6, atol=0)
    assert not ours[len(theirs):].any()


def test_golf_plus_rows(golf_plus, tmp_path):
    """Of each rank's shards in random order."""
    from helpers import write_shard
    about, train = golf_plus.json("packing"), {}
    for k, size in enumerate(about["shard_sizes"]):
        path = tmp_path / f"x_train_{k:06d}.bin"
        draw = np.random.default_rng(golf_plus.meta["seed"] + 10 + k)
        write_shard(path, draw.integers(0, golf_plus.meta["vocab"], size))
        train[path.name] = train_gpt.open_shard(path)
    data = train_gpt.Data(train, None, None, golf_plus.meta["vocab"], 1, None, {})
    ranks, rows, T = about["world"], about["rows_a_step_and_rank"], about["seq"]
    cfg = train_gpt.replace(golf_plus.cfg, train_seq_len=T, train_batch_tokens=ranks * rows * T)
    for rank in range(ranks):
        team = SimpleNamespace(rank=rank, world_size=ranks, on_gpu=False, device=torch.device("cpu"))
        loader = train_gpt.Loader(cfg, data, team, log=lambda *_: None)
        for step, theirs in enumerate(golf_plus.array(f"packing.rank{rank}")):
            x, _ = loader.next(ranks * rows * T)
            assert x.tolist() == theirs.tolist(), (rank, step)


def test_golf_plus_validation(golf_plus):
    """Nats of plain rows and of the sliding score, of which each row's scored part is theirs."""
    model, tokens = golf_plus.model(), golf_plus.array("validation.tokens").astype(np.int64)
    edges, T = golf_plus.array("validation.sliding_edges"), golf_plus.meta["seq"]
    team = SimpleNamespace(rank=0, world_size=1, on_gpu=False, device=torch.device("cpu"))
    stride = int(edges[1, 0])
    cfg = train_gpt.replace(golf_plus.cfg, eval_sliding=stride, eval_stride=0)
    rows = train_gpt.protocol_rows(cfg, "sliding", len(tokens))
    assert [[low, last, first - low - 1] for low, first, last in rows] == edges.tolist()
    data = train_gpt.Data({}, tokens, None, cfg.vocab_size, 1, None, {})
    for protocol, name in (("plain", "rows"), ("sliding", "sliding")):
        score = train_gpt.evaluate(model, cfg, data, team, protocol=protocol)
        theirs = golf_plus.array(f"validation.{name}_result")[0]
        assert score.val_loss == pytest.approx(theirs, rel=1e-6), name


def test_golf_plus_mean_of_weights(golf_plus):
    """e <- 0.997 e + 0.003 w after every step, from the first weights on."""
    model = golf_plus.model()
    optimizer, decay = train_gpt.Optimizer(model, golf_plus.cfg), golf_plus.cfg.ema_decay
    means = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(3):
        add_gradients(optimizer, golf_plus.synthetic_gradients(step))
        optimizer.step(*golf_plus.schedule_at(step, "early"))
        means = {name: decay * means[name] + (1 - decay) * p.detach() for name, p in model.named_parameters()}
    optimizer.take_mean()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), means[name], rtol=1e-6, atol=1e-7)


def test_golf_plus_rounding(golf_plus):
    """GPTQ of a matrix, in every setting that they tried; what full size uses."""
    w, hessian = (torch.from_numpy(golf_plus.array(f"quant.{name}")) for name in "WH")
    tried = [name.split(".")[1] for name in golf_plus.npz.files if name.endswith(".info")]
    assert tried
    for name in tried:
        about = golf_plus.json(f"quant.{name}.info")
        step, most = about["clip_sigmas"] / about["clip_range"], about["clip_range"]
        rows, scale = train_gpt.quantize_rows(w, step, 0.0, most, hessian)
        assert (rows.numpy() == golf_plus.array(f"quant.{name}.q")).all(), name
        assert (scale.numpy() == golf_plus.array(f"quant.{name}.scale")).all(), name
    cfg, full = golf_plus.full, golf_plus.json("full_size")
    table = train_gpt.parameter_table(cfg)
    for kind, prefix in [(kind, "matrix") for kind in MATRICES] + [("embed", "embed")]:
        most = 2 ** (full[f"{prefix}_bits"] - 1) - 1
        assert table[kind].artifact_most == most
        step = cfg.artifact_step * table[kind].artifact_step
        assert step == pytest.approx(full[f"{prefix}_clip_sigmas"] / most, rel=1e-6)
    small = {row.kind for row in table.values() if row.group == "scalar" and row.artifact_step}
    shapes = {train_gpt.kind_of(name) for name, _ in golf_plus.model().named_parameters()}
    assert small & shapes == shapes - {*MATRICES, "embed"}       # in fp16


def test_golf_plus_calibration(golf_plus, monkeypatch):
    """Sums of products of the inputs, over the passes of a looped layer, by batch."""
    wanted = {name[14:]: golf_plus.array(name) for name in golf_plus.npz.files
              if name.startswith("quant.hessian.")}
    calls = int(wanted.pop("calls_of_looped_layer_a_batch"))
    assert calls == 1 + golf_plus.meta["num_loops"]
    batches = [golf_plus.batch(k) for k in range(len(golf_plus.array("loss")))]
    monkeypatch.setattr(train_gpt, "Loader", lambda *_: SimpleNamespace(next=lambda _: batches.pop(0)))
    cfg = train_gpt.replace(golf_plus.cfg, gptq_batches=len(batches))
    team = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    found = train_gpt.calibrate(golf_plus.model(), cfg, None, team)
    assert {train_gpt.kind_of(name) for name in found} == {*MATRICES, "embed"}
    for name, theirs in wanted.items():
        assert difference(found[name], torch.from_numpy(theirs)) < 1e-4, name


def test_golf_plus_compressor(golf_plus):
    """Bytes shuffled as theirs, and back; their size, where brotli is the version that they had."""
    brotli = pytest.importorskip("brotli")
    raw = golf_plus.array("quant.bytes_in").tobytes()
    packed = train_gpt.compress(raw, "brotli")
    assert brotli.decompress(packed) == golf_plus.array("quant.shuffled").tobytes()
    for part in (raw, raw[:-1]):
        assert train_gpt.decompress(train_gpt.compress(part, "brotli")) == part
    assert len(packed) == golf_plus.json("quant.compressed_sizes")["brotli11"]
    assert train_gpt.codec(golf_plus.full) == golf_plus.json("full_size")["compressor"]
