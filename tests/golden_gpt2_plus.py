"""gpt2_plus: which of our parameters and constants are which of golden/plus/gpt2_plus.npz,
and tests of what this set alone holds. Runs with test_golden.py."""
import math

import numpy as np
import pytest
import torch

import train_gpt
from golden_common import (MATRICES, Later, Setting, WithWindows, load_config, make_loader, nats_of,
                           open_shards, replace, set_fixture, value_tables)
from golden_gpt2 import documents, packed_rows, window_sizes


class GPT2Plus(WithWindows, Later):
    FILE = "plus/gpt2_plus.npz"
    PRESET = "gpt2_plus"
    RATES_OF_TALL = True
    # {kind of our parameter: theirs, by which `init` has it}
    NAMES = {"resid_lambda": "resid_lambdas", "x0_lambda": "x0_lambdas", "smear": "smear_lambda",
             "backout": "backout_lambda"}

    def toy(self):
        """Rates are those of full size, but that Adam's have the factor of the toy's width."""
        meta = self.meta
        size = self.json("full_size")
        init = self.json("init")
        width = (size["model_dim"] / meta["model_dim"]) ** 0.5
        matrix_lr = self.entry("query")["lr"]
        kinds = "".join("L" if window == meta["seq"] else "S" for window in meta["windows"])
        short = min(meta["windows"])
        full_head_dim = size["model_dim"] / size["heads"]
        tables = [0] * meta["layers"]
        for number, layer in enumerate(meta["value_embed_layers"], 1):
            tables[layer] = number
        return {
            "DEPTH": 0, "NUM_LAYERS": meta["layers"], "NUM_HEADS": meta["heads"],
            "MODEL_DIM": meta["model_dim"], "VOCAB_SIZE": meta["vocab"],
            "TRAIN_SEQ_LEN": meta["seq"], "TRAIN_BATCH_TOKENS": meta["seq"] * meta["rows"],
            "WINDOW_PATTERN": kinds,
            "SHORT_WINDOW": min(1, (short + 0.5) / meta["seq"]),      # what is left over is cut off
            "VALUE_EMBED_LAYERS": ",".join(map(str, tables)), "BACKOUT_LAYER": meta["backout_layer"],
            "ATTN_SCALE": self.full.attn_scale * (full_head_dim / meta["head_dim"]) ** 0.5,
            "TARGET_PARAM_DATA_RATIO": 0, "ITERATIONS": size["steps"], "MATRIX_LR": matrix_lr,
            "EMBED_LR": init["embed"]["lr"] * width, "HEAD_LR": init["head"]["lr"] * width,
            "SCALAR_LR": init["x0_lambdas"]["lr"], "WEIGHT_DECAY": size["weight_decay"] / matrix_lr}

    def ours(self, w):
        """Theirs are padded, and their logits cropped."""
        vocab = self.meta["vocab"]
        found = {
            "embed": w["embed"][:vocab], "head": w["head"][:vocab], "smear_gate": w["smear_gate"],
            "smear": w["smear_lambda"].view(1, 1), "backout": w["backout_lambda"]}
        for name, table in value_tables(w).items():
            found[name] = table[:vocab]
        for i in range(self.meta["layers"]):
            block = f"blocks.{i}."
            for name in (*MATRICES, "value_gate"):
                if block + name in w:
                    found[block + name] = w[block + name]
            found |= {block + "resid_lambda": w["resid_lambdas"][i:i + 1],
                      block + "x0_lambda": w["x0_lambdas"][i:i + 1]}
        return found

    def settings(self):
        T = self.meta["seq"]
        context = self.context(T, T)
        sizes = self.windows(context)
        assert [sizes[kind] for kind in self.cfg.window_pattern] == self.meta["windows"]
        return [Setting("", self.array("loss"), context)]

    def first_step(self, series, steps):
        return self.json("optimizer_first_steps")[series]


gpt2_plus = set_fixture(GPT2Plus)


def test_gpt2_plus_at_full_size(gpt2_plus):
    """Every row of its schedule, derived constants of this and other depths."""
    cfg = gpt2_plus.full
    full = gpt2_plus.json("full_size")
    decay = cfg.weight_decay * cfg.matrix_lr
    for row in gpt2_plus.rows("schedule"):
        now = gpt2_plus.schedule.at(int(row["step"]))
        ours = (("lr_factor", now.lr), ("muon_momentum", now.momentum),
                ("muon_weight_decay", now.decay_factor * decay))
        assert all(abs(x - row[name]) < max(1e-9, 2e-7 * abs(row[name])) for name, x in ours), row
    sizes = window_sizes(cfg)
    ours = dict(
        depth=cfg.depth, ratio=cfg.target_param_data_ratio, model_dim=cfg.model_dim, heads=cfg.num_heads,
        vocab=cfg.vocab_size, seq=cfg.train_seq_len, steps=cfg.iterations,
        batch_tokens=cfg.train_batch_tokens, backout_layer=cfg.backout_layer,
        windows=[sizes[kind] for kind in cfg.window_pattern],
        scaling_weights=train_gpt.horizon_weights(cfg), weight_decay=decay,
        value_embed_layers=[i for i, table in enumerate(cfg.value_embed_layers) if table],
        flops_per_token=train_gpt.flops_per_token(cfg))
    assert ours == {name: pytest.approx(full[name], rel=1e-6) for name in ours}
    assert train_gpt.parameter_counts(cfg).total() == full["parameters"]["total"]
    of_scalars = gpt2_plus.json("init")["x0_lambdas"]["lr"] / full["batch_lr_scale"]
    for row in gpt2_plus.json("scaling_table"):
        cfg = load_config({"PRESET": gpt2_plus.PRESET, "DEPTH": str(row["depth"]),
                           "TARGET_PARAM_DATA_RATIO": str(row["ratio"])})
        sizes = cfg.model_dim, cfg.iterations, cfg.train_batch_tokens
        assert sizes == (row["dim"], row["steps"], row["batch"])
        assert train_gpt.horizon_weights(cfg) == row["scaling"]
        assert cfg.weight_decay * cfg.matrix_lr == pytest.approx(row["wd"])
        assert cfg.scalar_lr == pytest.approx(of_scalars * row["lr_scale"])


def test_gpt2_plus_rows_of_packed_documents(gpt2_plus, tmp_path, monkeypatch):
    """Best fit, of one rank."""
    about = gpt2_plus.json("packing")
    texts = documents(gpt2_plus.array("packing.lengths"), gpt2_plus.cfg)
    shards = open_shards(tmp_path, [np.concatenate(texts)])
    monkeypatch.setattr(train_gpt.BestFit, "BUFFER", about["buffer"])
    monkeypatch.setattr(train_gpt.BestFit, "READ", about["refill"])
    T = about["row_tokens"] - 1
    cfg = replace(gpt2_plus.cfg, train_seq_len=T, train_batch_tokens=T, max_epochs=0)
    loader = make_loader(cfg, shards, cfg.bos_id, 1, 0)
    rows = [[(number, length) for number, length in row] for row in gpt2_plus.json("packing.rows")]
    assert rows and packed_rows(loader, range(len(texts)), len(rows), 1, T) == rows


def test_gpt2_plus_rope_and_validation(gpt2_plus):
    cos, sin = gpt2_plus.context(len(gpt2_plus.array("rope.toy_cos")), 0).rope
    for ours, name in ((cos, "cos"), (sin, "sin")):
        torch.testing.assert_close(ours[:, 0], gpt2_plus.tensor(f"rope.toy_{name}"), rtol=0, atol=1e-6)
    assert gpt2_plus.json("rope")["base"] == gpt2_plus.full.rope_base
    assert gpt2_plus.json("validation")["tokens"] == gpt2_plus.full.val_tokens
    batches = [gpt2_plus.batch(k) for k in range(gpt2_plus.batches())]
    tokens, targets = (torch.cat(rows) for rows in zip(*batches))
    nats = nats_of(gpt2_plus.model(), tokens, targets)
    nbytes = gpt2_plus.tensor("validation.token_bytes")[targets]
    bpb = nats[nbytes > 0].sum() / math.log(2) / nbytes.sum()
    assert bpb.item() == pytest.approx(float(gpt2_plus.array("validation.bpb")), rel=1e-6)
