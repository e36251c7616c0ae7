"""gpt2: which of our parameters and constants are which of golden/gpt2.npz,
and tests of what this set alone holds. Runs with test_golden.py."""
import math

import numpy as np
import pytest

import train_gpt
from golden_common import (Seed, WithWindows, load_config, make_loader, nats_of, open_shards, replace,
                           set_fixture, value_tables)


class GPT2(WithWindows, Seed):
    FILE = "gpt2.npz"
    RATES_OF_TALL = True
    SCALARS = ("resid_lambda", "x0_lambda")
    SCALAR_GRADIENT = 2e-5

    def ours(self, w):
        found = {"embed": w["transformer.wte.weight"], "head": w["lm_head.weight"]}
        for i in range(len(w["resid_lambdas"])):
            block = f"blocks.{i}."
            theirs = f"transformer.h.{i}."
            found |= {
                block + "query": w[theirs + "attn.c_q.weight"],
                block + "key": w[theirs + "attn.c_k.weight"],
                block + "value": w[theirs + "attn.c_v.weight"],
                block + "attn_proj": w[theirs + "attn.c_proj.weight"],
                block + "fc": w[theirs + "mlp.c_fc.weight"],
                block + "mlp_proj": w[theirs + "mlp.c_proj.weight"],
                block + "resid_lambda": w["resid_lambdas"][i:i + 1],
                block + "x0_lambda": w["x0_lambdas"][i:i + 1]}
            if theirs + "attn.ve_gate.weight" in w:
                found[block + "value_gate"] = w[theirs + "attn.ve_gate.weight"]
        return found | value_tables(w, ".weight")

    def packing_config(self, about):
        return replace(self.cfg, train_seq_len=about["row_tokens"], train_batch_tokens=about["row_tokens"],
                       max_epochs=0)


gpt2 = set_fixture(GPT2)


def documents(lengths, cfg):
    """Tokens of documents of these lengths: each BOS, then another token."""
    bos = cfg.bos_id
    other = (bos + 1) % cfg.vocab_size
    return [np.r_[bos, np.full(n - 1, other)] for n in lengths]


def packed_rows(loader, numbers, steps, ranks, T):
    """Of each step the row of this rank: [(number of the document, tokens of it)]"""
    document = {int(start): number for start, number in zip(loader.packer.index.starts, numbers)}
    found = []
    for n in range(steps):
        row = loader.packer.plan(n * ranks, ranks, T)[0][0]
        found.append([(document[start], length) for start, length in row])
    return found


def window_sizes(cfg):
    """{kind of layer: tokens before its own that it sees} in training."""
    return cfg.windows(None, cfg.train_seq_len)


def test_gpt2_rows_of_packed_documents(gpt2, tmp_path, monkeypatch):
    """Best fit from a buffer; documents here are numbers, so that a row says which it holds."""
    about = gpt2.json("packing")
    lengths = gpt2.array("packing.lengths")
    groups = gpt2.array("packing.groups")
    columns = about["groups_columns"]
    file, group = (groups[:, columns.index(name)] for name in ("file", "row_group"))
    texts = documents(lengths, gpt2.cfg)
    numbers = []
    parts = []
    sizes = []
    for one in sorted({*file.tolist()})[:-1]:       # the last one is val
        mine = np.flatnonzero(file == one)
        numbers += mine.tolist()
        parts.append(np.concatenate([texts[d] for d in mine]))
        sizes.append(np.unique(group[mine], return_counts=True)[1].tolist())
    shards = open_shards(tmp_path, parts)
    monkeypatch.setattr(train_gpt.BestFit, "BUFFER", about["buffer_size"])
    monkeypatch.setattr(train_gpt.BestFit, "READ", about["tokenizer_batch_size"])
    T = about["row_tokens"]
    order = ("rank", "step", "micro_step", "row")
    counts = gpt2.matches(r"packing\.rows(\d+)")
    assert counts
    for ranks in map(int, counts):
        wanted = {}
        for values in gpt2.array(f"packing.rows{ranks}").tolist():
            named = dict(zip(about["columns"], values))
            place = tuple(named[name] for name in order)
            wanted.setdefault(place, []).append((named["document"], named["length"]))
        cfg = replace(gpt2.packing_config(about), train_batch_tokens=T * ranks)
        for rank in range(ranks):
            loader = make_loader(cfg, shards, gpt2.cfg.bos_id, ranks, rank, zip(shards, sizes))
            mine = [pieces for place, pieces in sorted(wanted.items()) if place[0] == rank]
            assert mine and packed_rows(loader, numbers, len(mine), ranks, T) == mine, (ranks, rank)


def test_gpt2_validation_rows(gpt2):
    """Score of their packed rows with their weights, by log_probs."""
    tokens, targets, scored = (gpt2.tensor(f"validation.{name}")
                               for name in ("inputs", "row_targets", "scored"))
    nats = nats_of(gpt2.model(), tokens, targets)[scored].sum().item()
    assert nats == pytest.approx(float(gpt2.array("validation.nats")), rel=5e-7)
    nbytes = gpt2.array("validation.token_bytes")[targets.numpy()][scored.numpy()].sum()
    assert nbytes == gpt2.array("validation.bytes")
    assert nats / math.log(2) / nbytes == pytest.approx(float(gpt2.array("validation.bpb")), rel=1e-6)


def test_derived_constants_of_gpt2(gpt2):
    """Size, batch, steps and decay of this and other depths, as the public code derives them."""
    derived = gpt2.json("derived")
    cfg = gpt2.full
    full = gpt2.json("overrides_full")
    assert (cfg.model_dim, cfg.num_heads) == (derived["model_dim"], derived["num_heads"])
    sizes = window_sizes(cfg)
    assert [sizes[kind] for kind in cfg.window_pattern] == derived["windows"]
    assert train_gpt.parameter_counts(cfg).total() == derived["parameters"]
    assert train_gpt.flops_per_token(cfg) == derived["flops_per_token"]
    init = gpt2.json("init")
    of_matrices, of_scalars = (init[name]["lr"] * init[name]["lr_mult"] / derived["batch_lr_scale"]
                               for name in ("transformer.h.0.attn.c_q.weight", "x0_lambdas"))
    itself = dict(ratio=full["TARGET_PARAM_DATA_RATIO"], asked_batch=full["TRAIN_BATCH_TOKENS"],
                  batch=derived["total_batch_size"], iterations=derived["num_iterations"])
    for about in [*derived["others"], derived | itself]:
        asked = {"PRESET": full["PRESET"], "DEPTH": str(about["depth"]),
                 "TRAIN_BATCH_TOKENS": str(about["asked_batch"]),
                 "TARGET_PARAM_DATA_RATIO": str(about["ratio"])}
        cfg = load_config(asked)
        assert (cfg.train_batch_tokens, cfg.iterations) == (about["batch"], about["iterations"]), asked
        assert train_gpt.horizon_weights(cfg) == about["scaling_weights"], about["depth"]
        assert cfg.weight_decay * cfg.matrix_lr == pytest.approx(about["weight_decay_scaled"], rel=1e-9)
        assert cfg.matrix_lr == pytest.approx(of_matrices * about["batch_lr_scale"], rel=1e-9)
        assert cfg.scalar_lr == pytest.approx(of_scalars * about["batch_lr_scale"], rel=1e-9)
