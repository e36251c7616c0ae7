"""golf_plus: which of our parameters and constants are which of golden/plus/golf_plus.npz,
and tests of what this set alone holds. Runs with test_golden.py."""
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_gpt
from golden_common import (MATRICES, Later, Setting, difference, fake_team, kind_of, loss_of_split,
                           make_loader, make_optimizer, open_shards, replace, set_fixture, step_on_gradients)
from helpers import calibrated


class GolfPlus(Later):
    FILE = "plus/golf_plus.npz"
    PRESET = "golf_plus"
    RATES_OF_TALL = False
    # {kind of our parameter: theirs, by which `init` has it}
    NAMES = {"layer_scale": "attn_scale", "resid_lambda": "residual_mix", "x0_lambda": "residual_mix",
             "skip_mix": "skip_gates"}
    # {our constant at full size: theirs} where the names differ; and those that are the same
    CONSTANTS = {"eval_sliding": "eval_stride", "gptq_batches": "gptq_calibration_batches"}
    SAME = ("vocab_size", "num_layers", "model_dim", "num_kv_heads", "num_heads", "mlp_mult",
            "logit_softcap", "rope_base", "tied_embed_lr", "tied_embed_init_std",
            "matrix_lr", "scalar_lr", "muon_momentum", "muon_momentum_warmup_start",
            "muon_momentum_warmup_steps", "muon_backend_steps", "beta1", "beta2", "adam_eps", "ema_decay",
            "grad_clip_norm", "train_seq_len", "train_batch_tokens", "iterations", "warmdown_frac",
            "qk_gain_init")

    def toy(self):
        meta = self.meta
        return {
            "NUM_LAYERS": meta["layers"], "NUM_HEADS": meta["heads"], "NUM_KV_HEADS": meta["kv_heads"],
            "MODEL_DIM": meta["model_dim"], "VOCAB_SIZE": meta["vocab"], "TRAIN_SEQ_LEN": meta["seq"],
            "TRAIN_BATCH_TOKENS": meta["seq"] * meta["rows"], "ARTIFACT_KEEP": 0,
            "LOOP_LAYERS": f"{meta['loop_start']},{meta['loop_end']}",
            "LOOP_SCHEDULE": f"0,{meta['num_loops']}",
            "ROPE_FRACTION": meta["rope_dims"] / meta["head_dim"]}

    def ours(self, w):
        """Their heads rotate the first channels, ours the first ones of both halves."""
        D = self.meta["head_dim"]
        rotated = self.meta["rope_dims"]
        n = rotated // 2
        fixed = (D - rotated) // 2
        order = [*range(n), *range(rotated, rotated + fixed), *range(n, rotated), *range(rotated + fixed, D)]
        found = {"embed": w["embed"], "skip_weights": w["skip_weights"], "skip_mix": w["skip_gates"]}
        for i in range(self.meta["layers"]):
            block = f"blocks.{i}."
            for name in (*MATRICES, "qk_gain"):
                found[block + name] = w[block + name]
            for name in ("query", "key"):
                matrix = w[block + name]
                found[block + name] = matrix.view(-1, D, matrix.size(1))[:, order].reshape(matrix.shape)
            found |= {
                block + "resid_lambda": w[block + "residual_mix"][0],
                block + "x0_lambda": w[block + "residual_mix"][1],
                block + "layer_scale": torch.stack([w[block + "attn_scale"], w[block + "mlp_scale"]])}
        return found

    def settings(self):
        """Before and after the loops begin."""
        meta = self.meta
        found = []
        assert self.context(meta["seq"], 0).loops == meta["num_loops"]
        for name, losses in zip(self.json("loss_columns"), self.array("loss").T, strict=True):
            loops = {"plain": 0, "loop": meta["num_loops"]}[name]
            order = meta[f"encoder_{name}"] + meta[f"decoder_{name}"]
            assert train_gpt.looped_order(self.cfg.num_layers, self.cfg.loop_layers, loops) == order
            context = self.context(meta["seq"], 0)._replace(loops=loops)
            found.append(Setting(f"{name}.", losses, context))
        return found

    def first_step(self, series, steps):
        return self.json("optimizer_setting")[series]["first"]

    def rope(self, cfg, window):
        return train_gpt.rope_spectrum(cfg.model_dim // cfg.num_heads, cfg.rope_base, cfg.rope_fraction)

    def schedule_at(self, step, series):
        """By the clock."""
        return self.schedule.at(step, progress=self.json("optimizer_setting")[series]["frac"])

    def first_text(self, kind, text):
        """row 0: 1, row 1: 0"""
        if text.startswith("row 0"):
            return text.split(", ")[kind == "x0_lambda"].split(": ")[1]
        return text


golf_plus = set_fixture(GolfPlus)


def test_golf_plus_schedule(golf_plus):
    """By the clock: LR, momentum, loops."""
    half = golf_plus.json("full_size")["enable_looping_at"]
    for row in golf_plus.rows("schedule"):
        now = golf_plus.schedule.at(int(row["step"]), row["nominal_ms"] / 1000)
        off = max(abs(now.lr - row["lr_factor"]), abs(now.momentum - row["muon_momentum"]))
        assert off < 2e-6 and abs(now.progress - row["frac"]) < 1e-6, row
        assert abs(now.progress - half) < 1e-6 or (now.stage.loops > 0) == row["loop_active"], row


def test_golf_plus_at_full_size(golf_plus):
    cfg = golf_plus.full
    full = golf_plus.json("full_size")
    for ours, theirs in ({name: name for name in golf_plus.SAME} | golf_plus.CONSTANTS).items():
        assert getattr(cfg, ours) == full[theirs], ours
    assert cfg.loop_layers == (full["loop_start"], full["loop_end"])
    assert [stage.loops for stage in cfg.stages()] == [0, full["num_loops"]]
    assert full["tie_embeddings"] and "head" not in dict(golf_plus.model().named_parameters())
    assert cfg.max_wallclock_seconds == full["max_wallclock_seconds"] - full["gptq_reserve_seconds"]
    assert cfg.warmup_steps == 2 * full["warmup_steps"]     # they loop in the second half
    theirs = golf_plus.tensor("rope.inv_freq")
    ours = golf_plus.rope(cfg, 0)
    torch.testing.assert_close(ours[:len(theirs)], theirs, rtol=2e-6, atol=0)
    assert not ours[len(theirs):].any()


def test_golf_plus_rows(golf_plus, tmp_path):
    """Of each rank's shards in random order."""
    about = golf_plus.json("packing")
    meta = golf_plus.meta
    parts = []
    for k, size in enumerate(about["shard_sizes"]):
        draw = np.random.default_rng(meta["seed"] + 10 + k)     # as the set's note says
        parts.append(draw.integers(0, meta["vocab"], size))
    shards = open_shards(tmp_path, parts)
    ranks = about["world"]
    rows = about["rows_a_step_and_rank"]
    T = about["seq"]
    cfg = replace(golf_plus.cfg, train_seq_len=T, train_batch_tokens=ranks * rows * T)
    for rank in range(ranks):
        loader = make_loader(cfg, shards, golf_plus.cfg.bos_id, ranks, rank)
        for step, theirs in enumerate(golf_plus.array(f"packing.rank{rank}")):
            x, _ = loader.next(ranks * rows * T)
            assert x.tolist() == theirs.tolist(), (rank, step)


def test_golf_plus_validation(golf_plus):
    """Nats of plain and of overlapping rows, of which each row's scored part is theirs."""
    model = golf_plus.model()
    tokens = golf_plus.array("validation.tokens").astype(np.int64)
    edges = golf_plus.array("validation.sliding_edges")
    plain = replace(golf_plus.cfg, eval_stride=0)
    sliding = replace(plain, eval_stride=int(edges[1, 0]))
    rows = train_gpt.evaluation_rows(sliding, len(tokens), sliding.eval_stride)
    assert [[low, last, first - low - 1] for low, first, last in rows] == edges.tolist()
    for cfg, name in ((plain, "rows"), (sliding, "sliding")):
        theirs = golf_plus.array(f"validation.{name}_result")[0]
        ours = loss_of_split(model, cfg, tokens)
        assert ours == pytest.approx(theirs, rel=1e-6), name


def test_golf_plus_mean_of_weights(golf_plus):
    """After every step, from the first weights on: e <- 0.997 e + 0.003 w."""
    said = re.match(r"e <- (\S+) e \+ (\S+) w after every step", str(golf_plus.array("ema")))
    kept, added = map(float, said.groups())
    model = golf_plus.model()
    optimizer = make_optimizer(model, golf_plus.cfg, 0)
    means = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(3):
        now = golf_plus.schedule_at(step, golf_plus.series()[0])
        step_on_gradients(optimizer, golf_plus.synthetic_gradients(step), now)
        means = {name: kept * means[name] + added * p.detach() for name, p in model.named_parameters()}
    optimizer.end()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), means[name], rtol=1e-6, atol=1e-7)


def test_golf_plus_rounding(golf_plus):
    """GPTQ of a matrix, in every setting that they tried; what full size uses."""
    w = golf_plus.tensor("quant.W")
    hessian = golf_plus.tensor("quant.H")
    tried = golf_plus.matches(r"quant\.(.*)\.info")
    assert tried
    for name in tried:
        about = golf_plus.json(f"quant.{name}.info")
        step = about["clip_sigmas"] / about["clip_range"]
        most = about["clip_range"]
        rows, scale = train_gpt.quantize_by_gptq(w, step, most, hessian)
        assert (rows.numpy() == golf_plus.array(f"quant.{name}.q")).all(), name
        assert (scale.numpy() == golf_plus.array(f"quant.{name}.scale")).all(), name
    full = golf_plus.json("full_size")
    table = golf_plus.full.parameter_table()
    for kind, prefix in [(kind, "matrix") for kind in MATRICES] + [("embed", "embed")]:
        most = 2 ** (full[f"{prefix}_bits"] - 1) - 1
        assert table[kind].levels == most
        step = full[f"{prefix}_clip_sigmas"] / most
        assert table[kind].step == pytest.approx(step, rel=1e-6), kind
    small = {kind for kind, row in table.items() if row.precision == "fp16"}
    kinds = {kind_of(name) for name, _ in golf_plus.model().named_parameters()}
    assert small == kinds - {*MATRICES, "embed"} == table.keys() - {*MATRICES, "embed"}


def test_golf_plus_calibration(golf_plus, monkeypatch):
    """Sums of products of the inputs, over the passes of a looped layer, by batch."""
    calls = int(golf_plus.array("quant.hessian.calls_of_looped_layer_a_batch"))
    assert calls == 1 + golf_plus.meta["num_loops"]
    names = golf_plus.matches(r"quant\.hessian\.(embed|blocks\..*)")
    batches = [golf_plus.batch(k) for k in range(golf_plus.batches())]
    monkeypatch.setattr(train_gpt, "Loader", lambda *_: SimpleNamespace(next=lambda _: batches.pop(0)))
    cfg = replace(golf_plus.cfg, gptq_batches=len(batches))
    found = calibrated(cfg, golf_plus.model(), None, fake_team())
    assert names and not batches
    assert {kind_of(name) for name in found} == {*MATRICES, "embed"}
    for name in names:
        assert difference(found[name], golf_plus.tensor(f"quant.hessian.{name}")) < 1e-4, name


def test_golf_plus_compressor(golf_plus):
    """Bytes shuffled as theirs, and back; their size, where brotli is the version that they had."""
    brotli = pytest.importorskip("brotli")
    raw = golf_plus.array("quant.bytes_in").tobytes()
    packed = golf_plus.full.compress(raw)
    assert brotli.decompress(packed) == golf_plus.array("quant.shuffled").tobytes()
    for part in (raw, raw[:-1]):
        assert train_gpt.decompress(golf_plus.full.compress(part)) == part
    assert len(packed) == golf_plus.json("quant.compressed_sizes")["brotli11"]
    assert golf_plus.full.codec == golf_plus.json("full_size")["compressor"]
