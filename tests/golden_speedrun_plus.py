"""speedrun_plus: which of our parameters and constants are which of golden/plus/speedrun_plus.npz,
and tests of what this set alone holds. Runs with test_golden.py."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_gpt
from golden_common import (CPU, MATRICES, Later, SharedClass, difference, make_loader, open_shards, replace,
                           set_fixture, value_tables)

UNIT_STEP = 1200    # of unit.attention_*: golden/plus/README.md


class SpeedrunPlus(SharedClass, Later):
    FILE, PRESET, RATES_OF_TALL = "plus/speedrun_plus.npz", "speedrun_plus", True
    # {kind of our parameter: theirs, by which `init` has it}
    NAMES = {"input_lambda": "sa_lambdas", "output_lambda": "sa_lambdas", "smear": "smear_lambda",
             "backout": "backout_lambda", "skip_weights": "skip_lambda", "layer_scale": "post_lambdas",
             "x0_lambda": "x0_lambdas", "bigram_lambda": "bigram_lambdas", "resid_lambda": "resid_lambdas"}

    def toy(self):
        """Its windows are those of the settings, in blocks of the toy."""
        meta, settings = self.meta, self.json("settings")
        longs = sorted({row["long"] for row in settings if row["training"]})
        return {
            "NUM_LAYERS": meta["layers"], "NUM_HEADS": meta["heads"], "MODEL_DIM": meta["model_dim"],
            "VOCAB_SIZE": meta["vocab"], "BOS_ID": meta["bos"], "BIGRAM_ROWS": meta["bigram_rows"],
            "WINDOW_BLOCK": meta["window_block"], "WINDOW_SCHEDULE": ",".join(map(str, longs)),
            "EVAL_WINDOW": max(row["long"] for row in settings), "MAX_DOC_LEN": meta["max_doc"],
            "TRAIN_SEQ_LEN": meta["tokens"], "TRAIN_BATCH_TOKENS": meta["tokens"]}

    def ours(self, w):
        """Their heads rotate adjacent channels of the first half, ours the first quarters of both halves."""
        D = self.meta["head_dim"]
        first, second = [*range(0, D // 2, 2)], [*range(1, D // 2, 2)]
        order = [*first, *range(D // 2, 3 * D // 4), *second, *range(3 * D // 4, D)]
        found = {name: w[name] for name in ("embed", "head", "bigram_embed", "smear_gate", "skip_gate")}
        found |= {
            "smear": w["smear_lambda"].view(1, 1), "backout": w["backout_lambda"],
            "skip_weights": w["skip_lambda"].view(1, 1)} | value_tables(w)
        for i in range(self.meta["layers"]):
            block = f"blocks.{i}."
            for name in (*MATRICES, "attn_gate", "value_gate"):
                if block + name in w:
                    found[block + name] = w[block + name]
            found[block + "mlp_proj"] = w[block + "mlp_proj"].T
            if block + "query" in w:
                for name in ("query", "key"):
                    matrix = w[block + name]
                    found[block + name] = matrix.view(-1, D, matrix.size(1))[:, order].reshape(matrix.shape)
                found |= {block + "input_lambda": w["sa_lambdas"][i, :1],
                          block + "output_lambda": w["sa_lambdas"][i, 1:]}
            found |= {
                block + "resid_lambda": w["resid_lambdas"][i].view(2, 1),
                block + "layer_scale": w["post_lambdas"][i].view(2, 1),
                block + "x0_lambda": w["x0_lambdas"][i:i + 1],
                block + "bigram_lambda": w["bigram_lambdas"][i:i + 1]}
        return found

    def settings(self):
        found = []
        for row, losses in zip(self.json("settings"), self.array("loss"), strict=True):
            mtp = torch.tensor(row["mtp"]) if len(row["mtp"]) > 1 else None
            context = self.context(self.meta["tokens"], row["long"], mtp=mtp)
            sizes = self.windows(context)
            assert sizes == {"L": row["long"], "S": row["short"], "P": row["short"]}
            assert self.scale_in(context) == pytest.approx(row["attn_scale"], rel=1e-6)
            tied = row["tied"]
            found.append(SimpleNamespace(
                prefix=row["name"] + ".", losses=losses, context=context, mtp=mtp,
                weights=lambda w, tied=tied: w | {"embed": w["head"]} if tied else w))
        return found

    def first_step(self, series, steps):
        """Found by rate and momentum of the last one."""
        last = self.json(f"{series}.last_step")["attn_bank"]
        lr, momentum = last["lr"] / self.entry("query")["lr"], last["momentum"]
        steps_there = [int(row["step"]) for row in self.rows("schedule")
                       if abs(row["lr_factor"] - lr) < 1e-6 and abs(row["muon_momentum"] - momentum) < 1e-6]
        return steps_there[0] - (steps - 1)

    def first_text(self, kind, text):
        """0.5 (qkv), 1.0 (out)"""
        if "(qkv)" in text:
            return text.split(", ")[kind == "output_lambda"].split()[0]
        return text


speedrun_plus = set_fixture(SpeedrunPlus)


def test_speedrun_plus_schedule(speedrun_plus):
    """Every step: rates, batch, windows, cut of documents, weights of the losses, tying."""
    cfg, schedule = speedrun_plus.full, speedrun_plus.schedule
    for row in speedrun_plus.rows("schedule"):
        step = int(row["step"])
        now = schedule.at(step)
        weights = schedule.target_weights(now.progress) + [0, 0]
        ours = dict(
            lr_factor=now.lr, muon_momentum=now.momentum, batch_tokens=now.tokens, max_doc=now.longest,
            short_window=now.windows["S"], long_window=now.windows["L"], mtp0=weights[0], mtp1=weights[1],
            mtp2=weights[2], adam_step=schedule.adam_steps(step), embed_follows_head_after_this_step=now.tied)
        for name, value in ours.items():
            assert abs(value - row[name]) <= max(1e-7, 2e-7 * abs(row[name])), (step, name)
    sizes = train_gpt.window_sizes(cfg, train_gpt.eval_window(cfg), cfg.train_seq_len)
    assert [sizes["S"], sizes["L"]] == speedrun_plus.json("schedule_notes")["final_validation_windows"]
    assert cfg.val_tokens == speedrun_plus.json("validation")["tokens"]


def test_speedrun_plus_attention_alone(speedrun_plus):
    """A layer with heads in pairs, and a long one with the key offset."""
    model, (tokens, _) = speedrun_plus.model(), speedrun_plus.batch(0)
    long = next(row["long"] for row in speedrun_plus.json("settings") if row["step"] == UNIT_STEP)
    context = speedrun_plus.context(tokens.size(1), long)
    x, bos = speedrun_plus.tensor("unit.x"), speedrun_plus.meta["bos"]
    documents = (tokens == bos).cumsum(1)
    edges = sorted({*speedrun_plus.array("cu_seqlens_0").tolist()})
    assert torch.nonzero(tokens[0] == bos)[:, 0].tolist() == edges[:-1]
    layers = speedrun_plus.matches(r"unit\.attention_(\d+)")
    assert layers
    for i in map(int, layers):
        kind, T = model.kinds[i], x.size(0)
        times = 2 if kind == "P" else 1
        mask = train_gpt.window_mask(context.windows[kind], times * T, documents.repeat_interleave(times, 1),
                                     x.device)
        table = model.value_embeds[model.tables[i] - 1] if model.tables[i] else None
        values = 0 if table is None else F.embedding(tokens, table)
        with torch.no_grad():
            ours = model.blocks[i].attend(x[None], values, mask, context)[0]
        assert difference(ours, speedrun_plus.tensor(f"unit.attention_{i}")) < 1e-5, i


def test_speedrun_plus_polar_express(speedrun_plus):
    cfg = speedrun_plus.full
    shapes = speedrun_plus.matches(r"unit\.polar_(\w+)\.in")
    assert shapes
    for shape in shapes:
        g = speedrun_plus.tensor(f"unit.polar_{shape}.in")
        ours = train_gpt.orthogonalize(g[None], cfg.muon_backend_steps, cfg.orthogonalization,
                                       margin=cfg.polar_margin)[0]
        assert difference(ours, speedrun_plus.tensor(f"unit.polar_{shape}.out")) < 3e-5, shape


def test_speedrun_plus_rope(speedrun_plus):
    cfg = speedrun_plus.full
    for window, scale in speedrun_plus.json("rope.attn_scale").items():
        frequencies, ours = train_gpt.rope_frequencies(cfg, int(window))
        theirs = speedrun_plus.tensor(f"rope.freq_{window}")
        torch.testing.assert_close(frequencies[:len(theirs)], theirs, rtol=2e-6, atol=0)
        assert not frequencies[len(theirs):].any() and ours == pytest.approx(scale, rel=1e-6)
    cos, sin, pair_cos, pair_sin = (speedrun_plus.tensor(f"rope.toy_{name}") for name in (
        "factor1", "factor2", "pair_factor1", "pair_factor2"))
    T, D = cos.shape
    cfg = replace(cfg, model_dim=2 * D, num_heads=2)
    context = train_gpt.make_context(cfg, T, cfg.window_schedule[0], CPU)
    # theirs: adjacent channels, sin with its sign
    for mine, theirs in ((context.rope[0], cos), (context.rope[1], sin)):
        torch.testing.assert_close(mine[:, 0, :D // 4], theirs[:, :D // 2:2], rtol=0, atol=2e-6)
    for mine, theirs in ((context.pair_rope[0], pair_cos), (context.pair_rope[1], pair_sin)):
        for half, part in zip(mine[:, 0].unbind(1), theirs.chunk(2, 1)):
            torch.testing.assert_close(half[:, :D // 4], part[:, :D // 2:2], rtol=0, atol=4e-6)


def test_speedrun_plus_bigram_hash(speedrun_plus):
    tokens = speedrun_plus.tensor("packing.hash_tokens")[None]
    ours = train_gpt.bigram_ids(tokens, speedrun_plus.full.bigram_rows)
    assert ours[0].tolist() == speedrun_plus.array("packing.hash_rows_full_size").tolist()
    for k in range(speedrun_plus.batches()):
        ours = train_gpt.bigram_ids(speedrun_plus.batch(k)[0], speedrun_plus.cfg.bigram_rows)
        assert ours[0].tolist() == speedrun_plus.array(f"bigram_{k}").tolist()


def test_speedrun_plus_rows(speedrun_plus, tmp_path):
    """Heads of documents, of another length in each stage, for two ranks."""
    calls, stream = speedrun_plus.json("packing.calls"), speedrun_plus.array("packing.stream")
    shards = open_shards(tmp_path, [stream])
    ranks, T = len(calls[0]["starts"]), calls[0]["row_tokens"]
    cuts = tuple(call["max_doc"] for call in calls)
    cfg = replace(
        speedrun_plus.cfg, vocab_size=int(stream.max()) + 1, train_seq_len=T, train_batch_tokens=ranks * T,
        max_epochs=0, max_doc_len=max(cuts), doc_schedule=cuts, batch_schedule=(1,), seq_schedule=(1,),
        mtp_schedule=("1",), stage_starts=(0.0,), window_schedule=speedrun_plus.cfg.window_schedule[:1])
    for rank in range(ranks):
        loader = make_loader(cfg, shards, speedrun_plus.meta["bos"], ranks, rank)
        for call in calls:
            times = call["row_tokens"] // T
            x, y = loader.next(ranks * call["row_tokens"], times, call["max_doc"])
            pieces = zip(call["starts"][rank], call["ends"][rank])
            theirs = np.concatenate([stream[low:high] for low, high in pieces]).tolist()
            assert [*x[0].tolist(), y[0, -1].item()] == theirs, (rank, call["row_tokens"])
