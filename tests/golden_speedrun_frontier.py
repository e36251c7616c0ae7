"""speedrun_plus: which of our parameters and constants are which of golden/frontier/speedrun_frontier.npz,
and tests of what this set holds, at the tolerances of golden/frontier/README.md. Runs with test_golden.py."""
import hashlib
import json
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_gpt
from golden_common import (
    CPU, GOLDEN, Later, Setting, close, compare, difference, digest, make_loader, make_optimizer,
    open_shards, replace, set_fixture, tie, value_tables)
from helpers import ROOT
from tools.run import plan
from train_gpt import window_mask

TRAIN_LOSS = 1e-5
XDIGEST = 1e-4
UNIT = 2e-4
FP8 = 5e-3
UNIT_STEP = 1000    # of unit.attention_*


class SpeedrunFrontier(Later):
    FILE = "frontier/speedrun_frontier.npz"
    PRESET = "speedrun_plus"
    RATES_OF_TALL = True
    NATS = 1e-4
    GRADIENT = 5e-4
    GRADIENT_DIGEST = 2e-3
    INIT = 2e-5

    @classmethod
    def series(cls):
        path = GOLDEN / cls.FILE
        return [*json.loads(str(np.load(path)["tags"]))] if path.exists() else ["none"]

    def toy(self):
        """Windows are as many blocks as at full size, in blocks of the toy."""
        meta = self.meta
        blocks = meta["window_block"] / self.full.window_block
        longs = [int(stage.window * blocks) for stage in self.full.stages()]
        first = min(self.json("settings"), key=lambda row: row["step"])
        return {
            "NUM_HEADS": meta["heads"], "MODEL_DIM": meta["model_dim"], "QK_DIM": meta["qk_dim"],
            "VOCAB_SIZE": meta["vocab"], "BOS_ID": meta["bos"], "BIGRAM_ROWS": meta["bigram_rows"],
            "BIGRAM_SIGN_ROWS": meta["sign_rows"], "MUDD_DIM": meta["mudd_dim"],
            "MUDD_GATE_DIM": meta["mudd_gate_dim"], "DC_WINDOW": meta["dc_window"],
            "WINDOW_BLOCK": meta["window_block"], "WINDOW_SCHEDULE": ",".join(map(str, longs)),
            "EVAL_WINDOW": int(self.full.eval_window * blocks), "MAX_DOC_LEN": meta["max_doc"],
            "ATTN_SCALE": first["attn_scale"], "TRAIN_SEQ_LEN": meta["tokens"],
            "TRAIN_BATCH_TOKENS": meta["tokens"], "NUM_LAYERS": meta["layers"]}

    def ours(self, w):
        """Two matrices are stored the other way round; lambdas are the layers' own."""
        found = {name: tensor for name, tensor in w.items()
                 if not name.startswith(("value_embeds.", "sa_", "resid_", "post_"))}
        found |= value_tables(w)
        for name in w:
            if name.endswith((".attn_proj", ".mlp_proj")):
                found[name] = w[name].T
        for i in range(self.meta["layers"]):
            for name in ("sa_lambdas", "resid_lambdas", "post_lambdas"):
                found[f"blocks.{i}.{name}"] = w[name][i]
        return found

    def model(self):
        model = super().model()
        model.signs.copy_(self.tensor("bigram_signs"))
        model.prefixes.copy_(self.tensor("prefix.table"))
        return model

    def stage_of(self, step):
        """Of the toy, at this step of a run at full size."""
        return train_gpt.stage_at(self.cfg, self.cfg.progress(step, 0.0))

    def context_at(self, step, training=True):
        model = self.model()
        T = self.meta["tokens"]
        if not training:
            return model.context(T, CPU, torch.float32)
        context = model.context(T, CPU, torch.float32, self.stage_of(step))
        model.update_context(context, self.cfg.progress(step, 0.0))
        return context

    def settings(self):
        found = []
        for row, losses in zip(self.json("settings"), self.array("loss"), strict=True):
            context = self.context_at(row["step"], row["training"])
            sizes = {kind: int(size) for kind, size in context.windows.items()}
            T = self.meta["tokens"]
            assert sizes == {"L": min(T, row["long"]), "S": min(T, row["short"])}
            assert int(context.pair_window) == min(T, row["short"])
            assert context.attn_scale.item() == pytest.approx(row["attn_scale"], rel=1e-6)
            weights = [1.0] if context.loss_weights is None else context.loss_weights.tolist()
            theirs = row["mtp"] + [row["prefix_weight"]] * context.prefixes
            assert weights == pytest.approx(theirs, rel=1e-6)
            assert context.prefixes == (row["prefix_weight"] > 0)
            found.append(Setting(f"{row['name']}.", losses, context, row["tied"]))
        return found

    def nats(self, model, setting):
        """All losses of a token together."""
        context = setting.context
        tokens, targets = self.batch(0)
        several = train_gpt.next_targets(targets, context.next_targets)
        if context.prefixes:
            several = torch.cat((several, model.prefixes[targets][..., None]), -1)
        with torch.no_grad():
            scores = model.logits(model.hidden(tokens, context)).double()
        nats = scores.logsumexp(-1, keepdim=True) - scores.gather(-1, several.clamp(min=0))
        weights = torch.ones(1) if context.loss_weights is None else context.loss_weights
        return (nats * weights * (several >= 0)).sum(-1).flatten()

    def first_step(self, series, steps):
        about = self.json("tags")[series]
        first = about["first_step"]
        assert about["steps"] == [first, first + steps - 1]
        assert about["tied_at_start"] == self.schedule.at(first).tied
        return first

    def is_tiny(self, series):
        return self.json("tags")[series]["tiny"]

    def allowed(self, moved, whole, tolerance):
        return tolerance * whole.norm()

    def first_text(self, kind, text):
        return "" if kind in ("sa_lambdas", "mudd_b2", "mudd_gate_b2") else text


speedrun_frontier = set_fixture(SpeedrunFrontier)


def check_digest(x, theirs, tolerance, what):
    """By the norm."""
    theirs = torch.as_tensor(theirs, dtype=torch.float64)
    off = (digest(x) - theirs).abs().max().item()
    assert off <= tolerance * max(theirs[1].item(), 1e-30), (what, off, theirs)


# ---------------------------------------------------------------- forward, a few steps
def test_frontier_streams(speedrun_frontier, monkeypatch):
    """The smeared embedding, the residual stream before each MLP and before the last norm."""
    norm = train_gpt.rms_norm
    streams = []

    def recorded(x):
        if x.size(-1) == speedrun_frontier.meta["model_dim"] and x.dim() == 3:
            streams.append(x)
        return norm(x)

    monkeypatch.setattr(train_gpt, "rms_norm", recorded)
    kept = speedrun_frontier.matches(r"xdigest\.(.*)")
    settings = {setting.prefix.rstrip("."): setting for setting in speedrun_frontier.settings()}
    assert kept
    for name in kept:
        model = speedrun_frontier.model_of(settings[name])
        streams.clear()
        with torch.no_grad():
            model.hidden(speedrun_frontier.batch(0)[0], settings[name].context)
        for i, block in enumerate(model.blocks, 1):
            if block.kind != "-":
                del streams[i]      # what its attention reads; what its MLP reads stays
        for i, row in enumerate(zip(streams, speedrun_frontier.tensor(f"xdigest.{name}"), strict=True)):
            check_digest(*row, XDIGEST, (name, i))


def test_frontier_training(speedrun_frontier):
    """The record's own steps across a change of stage, tied, two rows a step: losses, weights."""
    golden = speedrun_frontier
    model = golden.model()
    losses = golden.array("train.loss")
    tie(model)
    steps, rows = losses.shape
    first = golden.full.stages()[1].first_step - 3
    optimizer = make_optimizer(model, golden.cfg, first)
    before = golden.theirs({name: p.detach().clone() for name, p in model.named_parameters()})
    tokens = golden.tensor("train.tokens").long()
    targets = golden.tensor("train.targets")
    for k in range(steps):
        now = golden.schedule.at(first + k)
        context = golden.context_at(first + k)
        for row in range(rows):
            place = k * rows + row
            loss = model(tokens[place:place + 1], targets[place:place + 1], context)
            assert loss.item() == pytest.approx(losses[k, row], rel=TRAIN_LOSS), (k, row)
            optimizer.backward(loss * tokens.size(1) / golden.full.loss_sum_ranks)
        optimizer.step(train_gpt.Schedule(now.lr, now.momentum, now.decay_factor, now.tied))
    after = golden.theirs(dict(model.named_parameters()))
    compare(golden, "train.dw6.", "train.w6digest.", before, after, golden.UPDATE, golden.WEIGHT_DIGEST)


# ---------------------------------------------------------------- units
def test_frontier_attention_alone(speedrun_frontier):
    """A layer with heads in pairs and value embeddings; XSA; the key offset and a gate on heads; dynamic
    attention."""
    golden = speedrun_frontier
    model = golden.model()
    tokens, _ = golden.batch(0)
    context = golden.context_at(UNIT_STEP)
    cfg = golden.cfg
    documents = (tokens == cfg.bos_id).cumsum(1)
    x = golden.tensor("unit.x")[None]
    masks = train_gpt.layer_masks(context.windows, tokens, documents, window_mask)
    masks["P"] = train_gpt.pair_mask(context.pair_window, documents, window_mask)
    masks["dynamic"] = train_gpt.dynamic_mask(cfg.dc_window, documents)
    edges = sorted({*golden.array("cu_seqlens_0").tolist()})
    assert torch.nonzero(tokens[0] == golden.meta["bos"])[:, 0].tolist() == edges[:-1]

    def given(name):
        return golden.tensor(f"unit.{name}")[None]

    values = given("aux_v").unflatten(-1, (golden.meta["heads"], -1))
    mix = train_gpt.mix_of_heads(given("dc_w1"), torch.float32)
    assert difference(mix, given("dc_w1_normed")) < UNIT
    dynamic = dict(mix=given("dc_w1"), spread=given("dc_w2"))
    cases = {"9": (9, values, {}), "1_xsa": (1, values, dict(xsa=given("xsa_alpha"))),
             "3": (3, None, dict(xsa=given("xsa_alpha"), heads=given("attn_gate"))),
             "10_dc": (10, values, dict(heads=given("attn_gate"), **dynamic))}
    assert sorted(cases) == sorted(golden.matches(r"unit\.attention_(.*)"))
    for name, (layer, further_values, gates) in cases.items():
        with torch.no_grad():
            ours = model.blocks[layer].attend(x, further_values, gates, masks, context)
        assert difference(ours, given(f"attention_{name}")) < UNIT, name


def test_frontier_norms_and_rope(speedrun_frontier):
    """Queries and keys after norm and RoPE, plain, with the key offset and in pairs; norms of tiny rows."""
    golden = speedrun_frontier
    both = golden.tensor("unit.qknorm.in")[None]
    T = both.size(1)
    H = golden.meta["heads"]
    D = golden.meta["qk_dim"]
    frequencies = replace(golden.full, qk_dim=D).rope(golden.full.stages()[0].window)[0]
    rope = train_gpt.rope_tables(T, frequencies, CPU, torch.float32)
    pair_rope = train_gpt.pair_rope_tables(T, frequencies, CPU, torch.float32)
    for name, x in zip("qk", both.split(H, 2)):
        normed = train_gpt.rms_norm(x)
        plain = train_gpt.rotate_adjacent(normed, *rope)
        offset = train_gpt.key_offset(plain) if name == "k" else plain
        paired = train_gpt.rotate_adjacent(normed.unflatten(2, (-1, 2)), *pair_rope).flatten(2, 3)
        for kind, ours in (("plain", plain), ("offset", offset), ("paired", train_gpt.pair_heads(paired))):
            assert difference(ours[0], golden.tensor(f"unit.qknorm.{kind}_{name}")) < UNIT, (kind, name)
    normed = train_gpt.rms_norm(golden.tensor("unit.norm.in"))
    assert difference(normed, golden.tensor("unit.norm.out")) < UNIT
    of_heads = train_gpt.mix_of_heads(golden.tensor("unit.dc_norm.in"), torch.float32)
    assert difference(of_heads, golden.tensor("unit.dc_norm.out")) < UNIT


def test_frontier_mudd(speedrun_frontier):
    golden = speedrun_frontier
    model = speedrun_frontier.model()
    x = golden.tensor("unit.x")[None]
    with torch.no_grad():
        for place, kind in enumerate((train_gpt.LastMudd, train_gpt.EndMudd)):
            weights = model.mudd_w1[place], model.mudd_w2[place], model.mudd_b2[place]
            ours = torch.cat(train_gpt.mudd_weights(x, kind, *weights, train_gpt.MUDD_SCALE), -1)
            assert difference(ours[0], golden.tensor(f"unit.mudd_{place}")) < UNIT
        for half, table in enumerate(golden.cfg.gate_tables()):
            weights = model.mudd_gate_w1[half], model.mudd_gate_w2[half], model.mudd_gate_b2[half]
            gates = train_gpt.mudd_gates(x, table, *weights, model.mudd_gate_scale)
            ours = torch.cat([gates[entry.layer][entry.name] for entry in table], -1)
            assert difference(ours[0], golden.tensor(f"unit.mudd_gate_{half}")) < UNIT


def test_frontier_polar_express(speedrun_frontier):
    cfg = speedrun_frontier.full
    shapes = speedrun_frontier.matches(r"unit\.polar_(\w+)\.in")
    assert {"pair", "tiny"} < {*shapes}
    for shape in shapes:
        g = speedrun_frontier.tensor(f"unit.polar_{shape}.in")
        several = g if g.dim() == 3 else g[None]
        ours = train_gpt.polar_express(several, cfg.muon_backend_steps,
                                       safety_factor=cfg.polar_margin).view_as(g)
        assert difference(ours, speedrun_frontier.tensor(f"unit.polar_{shape}.out")) < UNIT, shape


def test_frontier_loss_and_its_gradient(speedrun_frontier):
    """Losses on the next targets and on the prefix, by lm_loss and by the fast kernels' definition. The
    gradient is the true one, where the public kernel's has the weights of targets that a row lacks."""
    golden = speedrun_frontier
    cfg = speedrun_frontier.full
    logits = golden.tensor("unit.ce.logits")
    weights = golden.json("unit.ce.weights")
    targets = train_gpt.next_targets(golden.tensor("unit.ce.targets")[None], len(weights["mtp"]))
    targets = torch.cat((targets, golden.tensor("unit.ce.prefix")[None, :, None]), -1)
    weights = torch.tensor([*weights["mtp"], weights["prefix"]])
    cap = cfg.logit_softcap, cfg.logit_shift, cfg.logit_width
    losses, grads = train_gpt.row_losses(logits, targets[0], weights, cap, 1.0, torch.float32)
    assert difference(losses, golden.tensor("unit.ce.loss")) < UNIT
    assert difference(grads, golden.tensor("unit.ce.grad")) < UNIT
    assert difference(grads, golden.tensor("unit.ce.grad_public_kernel")) > 10 * UNIT
    x = logits[None].clone().requires_grad_()
    loss = train_gpt.lm_loss(x, torch.eye(x.size(-1)), targets, cap, weights=weights)
    assert loss.item() == pytest.approx(golden.tensor("unit.ce.loss").mean().item(), rel=1e-6)
    grad, = torch.autograd.grad(loss * x.size(1), x)
    assert difference(grad[0], golden.tensor("unit.ce.grad")) < UNIT


def test_frontier_bigrams(speedrun_frontier):
    """Rows of the table and of the signs."""
    golden = speedrun_frontier
    full = speedrun_frontier.full
    tokens = golden.tensor("packing.hash_tokens")[None]
    assert train_gpt.bigram_ids(tokens, full.bigram_rows)[0].tolist() == \
        golden.array("packing.hash_rows_full_size").tolist()
    numbered = torch.arange(full.bigram_sign_rows)[:, None]
    assert train_gpt.bigram_signs(tokens, numbered)[0, :, 0].tolist() == \
        golden.array("packing.sign_rows_full_size").tolist()
    for k in range(golden.batches()):
        ours = train_gpt.bigram_ids(golden.batch(k)[0], golden.cfg.bigram_rows)
        assert ours[0].tolist() == golden.array(f"bigram_{k}").tolist()
    tokens = golden.batch(0)[0]
    table = golden.tensor("bigram_signs")
    numbered = torch.arange(len(table))[:, None]
    ours = train_gpt.bigram_signs(tokens, numbered)[0, :, 0]
    assert ours.tolist() == golden.array("unit.sign_rows").tolist()
    model = golden.model()
    wanted = golden.tensor("unit.sign_out")
    bigrams = F.embedding(train_gpt.bigram_ids(tokens, golden.cfg.bigram_rows), model.bigram_embed)
    ours = bigrams * train_gpt.bigram_signs(tokens, model.signs)
    assert difference(ours[0, :len(wanted)].detach(), wanted) < UNIT


def test_frontier_signs_at_full_size(speedrun_frontier):
    """As many of the one as of the other, all rows different, the same every time."""
    size = speedrun_frontier.json("full_size")
    signs = train_gpt.random_signs(size["sign_rows"], size["model_dim"])
    assert signs.shape == (size["sign_rows"], size["model_dim"]) and signs.dtype == torch.int8
    assert {*signs.unique().tolist()} == {-1, 1} and abs(signs.double().mean().item()) < 2e-3
    assert len(signs.unique(dim=0)) == len(signs)
    assert torch.equal(signs, train_gpt.random_signs(size["sign_rows"], size["model_dim"]))


def test_frontier_prefixes(speedrun_frontier):
    texts = [bytes.fromhex(text) for text in speedrun_frontier.json("prefix.token_bytes_hex")]
    texts += [b""] * (speedrun_frontier.meta["vocab"] - len(texts))
    assert train_gpt.prefix_tokens(texts).tolist() == speedrun_frontier.array("prefix.table").tolist()


def test_frontier_prefixes_at_full_size(speedrun_frontier):
    """Of all tokens, where ./run.sh data gpt2-vocab has fetched their bytes."""
    path = ROOT / speedrun_frontier.full.vocab_path
    if not path.exists():
        pytest.skip(f"{path.name} is not there: ./run.sh data gpt2-vocab")
    cfg = replace(speedrun_frontier.full, vocab_path=str(path))
    about = speedrun_frontier.json("prefix.full_size")
    table = train_gpt.prefix_tokens(train_gpt.texts_of_tokens(cfg, None)).numpy()
    assert len(table) == about["length"]
    assert hashlib.sha256(table.astype("<i4").tobytes()).hexdigest() == about["sha256_int32_le"]
    ids = speedrun_frontier.array("prefix.full_size_ids")
    assert table[ids].tolist() == speedrun_frontier.array("prefix.full_size_prefix").tolist()


# ---------------------------------------------------------------- full size
def test_frontier_schedule(speedrun_frontier):
    """Every step: rates, batch, windows, cut of documents, weights of the losses, tying."""
    cfg = speedrun_frontier.full
    schedule = speedrun_frontier.schedule
    columns = speedrun_frontier.json("schedule_columns")
    table = speedrun_frontier.array("schedule")
    notes = speedrun_frontier.json("schedule_notes")
    found = {name: [] for name in columns}
    for row in table:
        step = int(row[0])
        now = schedule.at(step)
        stage = train_gpt.stage_at(cfg, cfg.progress(step, 0.0))
        weights = cfg.loss_weights(now.progress)
        prefix = weights.pop() if any(stage.prefix_weights) else 0.0
        weights += [0.0, 0.0]
        ours = dict(
            step=step, lr_factor=now.lr, muon_momentum=now.momentum, batch_tokens=now.tokens,
            short_window=now.windows["S"], long_window=now.windows["L"], max_doc=now.longest,
            mtp0=weights[0], mtp1=weights[1], mtp2=weights[2], prefix_weight=prefix,
            adam_step=schedule.adam_steps(step), embed_follows_head_after_this_step=now.tied)
        for name in columns:
            found[name].append(np.float32(ours[name]))
    for place, name in enumerate(columns):
        close(found[name], table[:, place], 1e-9, name)
    assert [[stage.first_step for stage in cfg.stages()], train_gpt.total_steps(cfg)] == \
        [[first for first, _ in notes["boundaries"]], notes["total"]]
    assert plan.planned_tokens(cfg) == notes["tokens_total"]
    sizes = cfg.windows(None, cfg.eval_context)
    assert [sizes["S"], sizes["L"]] == notes["final_validation_windows"]
    assert cfg.val_tokens == speedrun_frontier.json("validation")["tokens"]


def test_frontier_rope(speedrun_frontier):
    golden = speedrun_frontier
    cfg = speedrun_frontier.full
    scales = golden.json("rope.attn_scale")
    assert sorted(map(int, scales)) == [stage.window for stage in cfg.stages()]
    for stage in [*cfg.stages(), None]:     # None: scoring
        window = (stage or cfg.stages()[-1]).window
        frequencies, scale = cfg.rope(stage and stage.window)
        torch.testing.assert_close(frequencies, golden.tensor(f"rope.freq_{window}"), rtol=2e-6, atol=0)
        assert scale == pytest.approx(scales[str(window)], rel=1e-9)
    T, D = golden.tensor("rope.toy_factor1").shape
    frequencies = replace(cfg, qk_dim=D).rope(cfg.stages()[0].window)[0]
    n = len(frequencies)
    plain = train_gpt.rope_tables(T, frequencies, CPU, torch.float32)
    pairs = train_gpt.pair_rope_tables(T, frequencies, CPU, torch.float32)
    for mine, pair, name in zip(plain, pairs, ("factor1", "factor2")):
        theirs = golden.tensor(f"rope.toy_{name}")[:, :2 * n:2]      # adjacent channels, sin with its sign
        torch.testing.assert_close(mine[:, 0], theirs, rtol=0, atol=4e-6)
        for half, theirs in zip(pair[:, 0].unbind(1), golden.tensor(f"rope.toy_pair_{name}").split(D, 1)):
            torch.testing.assert_close(half, theirs[:, :2 * n:2], rtol=0, atol=4e-6)


def test_frontier_rows(speedrun_frontier, tmp_path):
    """Heads of documents, of another length in each stage, for two ranks; what ends a shard is dropped."""
    golden = speedrun_frontier
    calls = golden.json("packing.calls")
    stream = golden.array("packing.stream")
    shards = open_shards(tmp_path, [stream])
    ranks = len(calls[0]["starts"])
    T = calls[0]["row_tokens"]
    stages = golden.cfg.stages()
    cuts = sorted({call["max_doc"] for call in calls})
    schedule = (cuts * len(stages))[:len(stages)]
    cfg = replace(
        golden.cfg, vocab_size=int(stream.max()) + 1, train_seq_len=T, train_batch_tokens=ranks * T,
        max_epochs=0, max_doc_len=max(cuts), doc_schedule=tuple(schedule))
    for rank in range(ranks):
        loader = make_loader(cfg, shards, golden.meta["bos"], ranks, rank)
        for call in calls:
            times = call["row_tokens"] // T
            x, y = loader.next(ranks * call["row_tokens"], times, call["max_doc"])
            if call.get("exhausted"):       # the rest of the shard is too short: on with the next one
                first = int(loader.packer.index.starts[0])
                head = stream[first:first + int(loader.packer.cut[call["max_doc"]][0])].tolist()
                assert rank > 0 or x[0, :len(head)].tolist() == head
                continue
            pieces = zip(call["starts"][rank], call["ends"][rank])
            theirs = np.concatenate([stream[low:high] for low, high in pieces]).tolist()
            assert [*x[0].tolist(), y[0, -1].item()] == theirs, (rank, call["row_tokens"])


def test_frontier_sizes(speedrun_frontier):
    """Sizes and parameters at full size."""
    cfg = speedrun_frontier.full
    size = speedrun_frontier.json("full_size")
    ours = dict(
        layers=cfg.num_layers, model_dim=cfg.model_dim, heads=cfg.num_heads, qk_dim=cfg.qk_dim,
        v_dim=cfg.model_dim // cfg.num_heads, mlp_hidden=cfg.mlp_mult * cfg.model_dim, vocab=cfg.vocab_size,
        bigram_rows=cfg.bigram_rows, sign_rows=cfg.bigram_sign_rows, dc_window=cfg.dc_window)
    assert ours == {name: size[name] for name in ours}
    with torch.device("meta"):
        model = cfg.make_model()
    counts = dict.fromkeys(size["parameters"], 0)
    places = {"query": "query+key", "key": "query+key", "value": "value+attn_proj",
              "attn_proj": "value+attn_proj", "fc": "mlp", "mlp_proj": "mlp"}
    for name, p in model.named_parameters():
        kind = train_gpt.kind_of(name)
        group = places.get(kind, kind if kind in counts else "small")
        if kind.startswith("mudd"):
            group = "mudd_gate" if kind.startswith("mudd_gate") else "mudd"
        counts[group] += p.numel()
        counts["total"] += p.numel()
    assert counts == size["parameters"]


def test_frontier_first_values_of_biases(speedrun_frontier):
    """... and of what adjust_init() sets, as init_parameters() draws them."""
    cfg = speedrun_frontier.full
    table = cfg.parameter_table()
    values = dict(head=torch.ones(1), mudd_b2=torch.zeros(2, 14), mudd_gate_b2=torch.zeros(2, 41))
    for i in range(cfg.num_layers):
        values[f"blocks.{i}.sa_lambdas"] = torch.full((2,), float(table["sa_lambdas"].scale))
    values = cfg.adjust_init(values)
    assert torch.equal(values["embed"], values["head"])
    assert values["blocks.0.sa_lambdas"].tolist() == [0.5, 1.0]
    assert speedrun_frontier.entry("sa_lambdas")["init"] == "0.5, 1.0"
    root = 1.1**0.5
    biases = [[0.0] * 6 + [20, 20, 10 * root, 10, 0, 0.5, 10 * root, 10], [0, -5] + [0.0] * 12]
    torch.testing.assert_close(values["mudd_b2"], torch.tensor(biases))
    gates = torch.zeros(2, 41)
    gates[:, 12:18] = 2.5
    gates[0, [19, 21, 23, 25]] = 0.5
    gates[1, [19, 21, 23, 25, 27]] = 0.5
    gates[1, 28] = 5
    gates[1, 29:35] = 10
    torch.testing.assert_close(values["mudd_gate_b2"], gates)


# ---------------------------------------------------------------- fp8
def bf16(x):
    """In bf16, with zeros up to sides that are multiples of 16, as fp8 products need them."""
    wider = [size for side in reversed(x.shape) for size in (0, -side % 16)]
    return F.pad(x, wider).to(torch.bfloat16)


def cut(x, like):
    """Without these zeros, in fp32."""
    return x[tuple(slice(side) for side in like.shape)].float()


def test_frontier_fp8_mlp(speedrun_frontier):
    """Output, gradients, scales now and for the step after."""
    golden = speedrun_frontier
    about = speedrun_frontier.json("unit.fp8_mlp.digests")
    weights = golden.weights("w0")
    block = re.search(r"blocks\.\d+\.", about["weights"])[0]
    fc, proj = (bf16(weights[block + name]).requires_grad_() for name in ("fc", "mlp_proj"))
    scales = train_gpt.DelayedScales(1)
    assert [448 * scale for scale in scales.values[0].tolist()] == pytest.approx([8, 16, 1])
    scales.values.data.copy_(torch.tensor([about["x_scale"], about["post_scale"], about["dpre_scale"]]))
    x = bf16(golden.tensor("unit.fp8_mlp.x")).requires_grad_()
    y = train_gpt.fp8_mlp(x, fc, proj, scales.values[0])
    theirs = golden.tensor("unit.fp8_mlp.out")
    assert difference(cut(y, theirs), theirs) < FP8
    wanted = x, fc, proj, scales.values
    dx, dfc, dproj, largest = torch.autograd.grad(y, wanted, bf16(golden.tensor("unit.fp8_mlp.grad")))
    assert difference(cut(dx, theirs), golden.tensor("unit.fp8_mlp.dx")) < FP8
    check_digest(cut(dfc, weights[block + "fc"]), about["dW1"], FP8, "dW1")
    check_digest(cut(dproj, weights[block + "mlp_proj"]).T, about["dW2"], FP8, "dW2")
    theirs = [about["amax_x"], about["amax_post"], about["amax_dpre"]]
    assert largest[0].tolist() == pytest.approx(theirs, rel=FP8)
    for w, name in ((fc, "w1_scale"), (proj, "w2_scale")):
        ours = train_gpt.to_fp8(w, None, torch.float8_e4m3fn)[1].item()
        assert ours == pytest.approx(about[name], rel=1e-6)
    scales.largest = largest
    scales.follow()
    assert scales.values[0].tolist() == pytest.approx(
        [about["next_x_scale"], about["next_post_scale"], about["next_dpre_scale"]], rel=FP8)


def test_frontier_fp8_qkv(speedrun_frontier):
    golden = speedrun_frontier
    about = speedrun_frontier.json("unit.fp8_qkv.scales")
    weights = golden.weights("w0")
    block = f"blocks.{about['layer']}."
    matrices = [bf16(weights[block + name]) for name in ("query", "key", "value")]
    x = bf16(golden.tensor("unit.fp8_mlp.x"))
    factor = torch.tensor([about["lambda0"]], requires_grad=True)
    ours = train_gpt.fp8_qkv(x, *matrices, factor)
    rows = [len(weights[block + name]) for name in ("query", "key", "value")]
    theirs = golden.tensor("unit.fp8_qkv.out")
    ours = torch.cat([product[:len(theirs), :n].float() for product, n in zip(ours, rows)], -1)
    assert difference(ours, theirs) < FP8
    packed = train_gpt.to_fp8(torch.cat(matrices), None, torch.float8_e4m3fn)[1].item()
    assert [packed, train_gpt.QKV_INPUT / 448, train_gpt.QKV_GRADIENT / 448] == pytest.approx(
        [about["w"], about["x"], about["grad"]], rel=1e-6)
