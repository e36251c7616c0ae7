"""The model against a plain reference in float64, and what scores rely on: causality, windows, seeds."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import train_gpt
from helpers import GOLF_RECORD
from train_gpt import GPT, Config, init_parameters, log_probs, parameter_rule

SMALL = replace(
    Config(), vocab_size=61, train_seq_len=24, model_dim=48, num_layers=4, num_heads=6, mlp_mult=2,
    window_pattern="L", window_schedule=(0,)
)


def randomised(cfg, T=None, window=0, seed=0, dtype=torch.float32):
    """A model with no parameter at zero: initial values would hide half of the arithmetic."""
    model, generator = GPT(cfg, dtype), torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        spread = {"matrix": 1.5 * p.shape[-1] ** -0.5, "head": 0.3}.get(parameter_rule(name)[0], 1.0)
        p.data.normal_(0, spread, generator=generator)
    model.set_context(T or cfg.train_seq_len, window)
    return model


def some_tokens(cfg, B, T, seed=0):
    return torch.randint(cfg.vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


# -------------------------------------------------------------------------------- the reference
def normalised(x):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def rope_speeds(cfg, D, window):
    """Radians per token of each pair of dims, and the factor on the logits: the first pairs turn with
    wavelengths up to rope_base, the rest stand still; with YaRN what turns fewer than 32 times in the window
    slows down as the window grows, all the way if it turns less than once."""
    n = int(cfg.rope_fraction * D / 2) if cfg.rope_base else 0
    speeds = [cfg.rope_base ** (-d / n) for d in range(n)] + [0.0] * (D // 2 - n)
    factor = cfg.attn_scale or 1 / math.sqrt(D)
    past = list(cfg.window_schedule)
    if window in past:
        past = past[: past.index(window) + 1]
    for i in range(1, len(past) if cfg.rope_yarn else 1):
        ratio = past[i] / past[i - 1]
        factor *= 1 + 0.2 * math.log(ratio)
        for d, speed in enumerate(speeds):
            kept = min(1.0, max(0.0, (past[i - 1] * speed / (2 * math.pi) - 1) / 31))
            speeds[d] = speed * kept + speed / ratio * (1 - kept)
    return torch.tensor(speeds, dtype=torch.float64), factor


def turned(x, speed):
    """RoPE on x (T, D): dims d and d + D/2 are one complex number that turns by -position * speed[d]."""
    T, D = x.shape
    z = torch.complex(x[:, : D // 2].contiguous(), x[:, D // 2 :].contiguous())
    z = z * torch.polar(
        torch.ones(T, D // 2, dtype=torch.float64), -torch.arange(T, dtype=torch.float64)[:, None] * speed
    )
    return torch.cat((z.real, z.imag), -1)


def attended(q, k, v, reach, factor, begins):
    """q, k, v (T, D): each position sees itself and the reach - 1 before it, back to where its document
    begins."""
    out = torch.zeros_like(q)
    for t in range(len(q)):
        first = max(begins[t], t - reach + 1)
        scores = k[first : t + 1] @ q[t] * factor
        out[t] = (scores.exp() / scores.exp().sum()) @ v[first : t + 1]
    return out


def reference_log_probs(cfg, weights, tokens, window):
    """One sequence, tokens (T,) -> (T, V) float64. weights: {name: tensor} of the model."""
    w = {name: p.detach().double() for name, p in weights.items()}
    C, H, KV = cfg.model_dim, cfg.num_heads, cfg.num_kv_heads or cfg.num_heads
    D, T, half = C // H, len(tokens), cfg.num_layers // 2
    long = T if window == 0 else min(window, T)
    half_window = (min(window, cfg.window_schedule[-1]) or cfg.train_seq_len) // 2
    half_window = max(cfg.window_block, half_window - half_window % cfg.window_block)
    reach = {"L": long, "S": min(T, half_window)}
    begins = [0] * T  # of the document of each position
    for t in range(1, T):
        begins[t] = t if cfg.max_doc_len and tokens[t] == cfg.bos_id else begins[t - 1]
    speeds, factor = rope_speeds(cfg, D, window)
    x = w["embed"][tokens].clone()
    if cfg.bigram_rows:
        for t in range(T):
            if begins[t] < t:
                pair = (int(tokens[t]) * 0x9E3779B1) ^ (int(tokens[t - 1]) * 0x85EBCA6B)
                x[t] += w["bigram_embed"][pair % cfg.bigram_rows]
    if cfg.smear_dim:
        plain = x.clone()
        for t in range(T):
            if begins[t] < t:
                opened = torch.sigmoid(plain[t, : cfg.smear_dim] @ w["smear_gate"][0])
                x[t] += w["smear"].squeeze() * opened * plain[t - 1]
    x0 = x = normalised(x)
    stack, popped, outputs = [], 0, []
    further = list(zip(cfg.skip_layers[::2], cfg.skip_layers[1::2]))
    for i in range(cfg.num_layers):
        b = {name.split(".")[-1]: value for name, value in w.items() if name.startswith(f"blocks.{i}.")}
        if cfg.unet_skips and i >= half and stack:  # inside out: the last one in is the first one out
            popped += 1
            x = x + w["skip_weights"][half - popped] * stack.pop()
        for row, (source, target) in enumerate(further, half * cfg.unet_skips):
            if target == i:
                x = x + w["skip_weights"][row] * outputs[source]
        if cfg.residual_mix:
            x = b["residual_mix"][0] * x + b["residual_mix"][1] * x0
        scale = b["layer_scale"] if cfg.layer_scale else (1, 1)
        h, heads, kind = normalised(x), [], cfg.window_pattern[i % len(cfg.window_pattern)]
        attends = kind in "LS"
        if attends:
            q, k, v = h @ b["query"].T, h @ b["key"].T, h @ b["value"].T
        if attends and (table := cfg.value_embed_layers[i % len(cfg.value_embed_layers)]):
            v = v + w[f"value_embeds.{table - 1}"][tokens]
        for n in range(H if attends else 0):
            pair = n * KV // H  # the kv head that this query head shares
            one_q, one_k, one_v = (y[:, m * D : (m + 1) * D] for y, m in ((q, n), (k, pair), (v, pair)))
            if cfg.key_offset and kind == "L":  # second and fourth quarter, from the token before
                late = [n for n in range(D) if n % (D // 2) >= (D // 2 + 1) // 2]
                moved = one_k.clone()
                for t in range(T):
                    moved[t, late] = one_k[t - 1, late] if begins[t] < t else 0.0
                one_k = moved
            one_q, one_k = normalised(one_q), normalised(one_k)
            one_q, one_k = turned(one_q, speeds), turned(one_k, speeds)
            if cfg.qk_gain_init:
                one_q = one_q * b["qk_gain"][n]
            y = attended(one_q, one_k, one_v, reach[kind], factor, begins)
            if cfg.attn_gate_dim:
                y = y * torch.sigmoid(h[:, : cfg.attn_gate_dim] @ b["attn_gate"][n])[:, None]
            heads.append(y)
        if attends:
            x = x + scale[0] * (torch.cat(heads, -1) @ b["attn_proj"].T)
        if kind != "0":
            x = x + scale[1] * ((normalised(x) @ b["fc"].T).clamp(min=0) ** 2 @ b["mlp_proj"].T)
        outputs.append(x)
        if i < half:
            stack.append(x)
    if cfg.backout_layer:
        x = x - w["backout"] * outputs[cfg.backout_layer]
    logits = normalised(x) @ (w["embed"] if cfg.tie_embeddings else w["head"]).T
    if cfg.logit_softcap:
        logits = cfg.logit_softcap * torch.tanh(logits / cfg.logit_softcap)
    return logits - logits.exp().sum(-1, keepdim=True).log()


SETTINGS = {
    "defaults": {},
    "gqa": dict(num_kv_heads=2),
    "mqa": dict(num_kv_heads=1),
    "tied": dict(tie_embeddings=True),
    "no gain": dict(qk_gain_init=0.0),
    "no rope": dict(rope_base=0.0),
    "no softcap": dict(logit_softcap=0.0),
    "no mix": dict(residual_mix=False),
    "no scale": dict(layer_scale=False),
    "no skips": dict(unet_skips=False),
    "all off": dict(
        qk_gain_init=0.0,
        rope_base=0.0,
        logit_softcap=0.0,
        residual_mix=False,
        layer_scale=False,
        unet_skips=False,
    ),
    "value embeddings": dict(value_embed_layers=(1, 0, 2), num_kv_heads=3),
    "windows": dict(window_pattern="SSL", window_schedule=(10,)),
    "golf-like": dict(
        num_layers=5, num_kv_heads=3, tie_embeddings=True, logit_softcap=30.0, rope_base=10_000.0
    ),
    "one layer": dict(num_layers=1, value_embed_layers=(1,)),
    "three layers": dict(num_layers=3, window_pattern="SL", window_schedule=(7,), num_kv_heads=2),
    "shared value tables": dict(
        num_layers=5, value_embed_layers=(0, 2, 1, 0, 2), window_pattern="LL-LL", window_schedule=(0,)
    ),
    "documents": dict(max_doc_len=9, bos_id=4),
    "documents in windows": dict(max_doc_len=9, bos_id=4, window_pattern="SL", window_schedule=(6,)),
    "smear": dict(smear_dim=5, max_doc_len=9, bos_id=4),
    "smear across": dict(smear_dim=5),
    "bigrams": dict(bigram_rows=31, max_doc_len=9, bos_id=4),
    "bigrams across": dict(bigram_rows=4096),
    "attention gate": dict(attn_gate_dim=7, num_kv_heads=2),
    "key offset": dict(key_offset=True, window_pattern="SL", window_schedule=(12,), num_kv_heads=3),
    "key offset of six channels": dict(key_offset=True, num_heads=8),
    "key offset of two channels": dict(key_offset=True, num_heads=24),
    "key offset in documents": dict(key_offset=True, max_doc_len=9, bos_id=4),
    "half of RoPE": dict(rope_fraction=0.5),
    "yarn": dict(rope_yarn=True, window_schedule=(5, 9, 14), attn_scale=0.3, rope_base=30.0),
    "parts of layers": dict(num_layers=5, window_pattern="0L-S", value_embed_layers=(0,)),
    "skip and backout": dict(unet_skips=False, skip_layers=(0, 2), backout_layer=1),
    "several skips into a layer": dict(num_layers=4, skip_layers=(0, 2, 1, 3, 0, 3)),
    "skips of both kinds": dict(num_layers=5, skip_layers=(0, 4)),
    "speedrun-like": dict(
        num_layers=6,
        max_doc_len=9,
        bos_id=4,
        qk_gain_init=0.0,
        attn_scale=0.1,
        attn_gate_dim=12,
        rope_base=1024.0,
        rope_fraction=0.5,
        rope_yarn=True,
        smear_dim=12,
        layer_scale=False,
        unet_skips=False,
        skip_layers=(2, 3),
        backout_layer=4,
        value_embed_layers=(0, 1, 2, 0, 1, 2),
        window_pattern="0SL-SL",
        window_schedule=(4, 8, 12),
        window_block=2,
        eval_window=16,
        bigram_rows=50,
        key_offset=True,
    ),
    "all on": dict(
        num_layers=7,
        num_kv_heads=2,
        value_embed_layers=(0, 1),
        window_pattern="SSSL",
        window_schedule=(16,),
        mlp_mult=3,
        skip_layers=(0, 6),
        backout_layer=5,
        smear_dim=6,
        bigram_rows=64,
        key_offset=True,
        attn_gate_dim=8,
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_forward_equals_reference(name):
    cfg = replace(SMALL, **SETTINGS[name])
    window = train_gpt.eval_window(cfg)
    model = randomised(cfg, 23, window)
    tokens = some_tokens(cfg, 2, 24)
    with torch.no_grad():
        got, loss = log_probs(model, tokens[:, :-1]), model(tokens[:, :-1], tokens[:, 1:])
    weights = dict(model.named_parameters())
    want = torch.stack([reference_log_probs(cfg, weights, row, window) for row in tokens[:, :-1]])
    assert got.dtype == torch.float32 and got.shape == (2, 23, cfg.vocab_size)
    assert want.std() > 0.1  # a flat distribution would prove nothing
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    nats = -want.gather(-1, tokens[:, 1:, None]).mean()
    torch.testing.assert_close(loss.double(), nats, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "off",
    [
        dict(qk_gain_init=0.0),
        dict(residual_mix=False),
        dict(layer_scale=False),
        dict(unet_skips=False),
        dict(tie_embeddings=True),
    ],
)
def test_what_is_off_has_no_parameters(off):
    """... and leaves the parameters of the rest as they were."""
    names = [{name for name, _ in GPT(replace(SMALL, **kw)).named_parameters()} for kw in ({}, off)]
    assert names[1] < names[0]


def test_each_part_matters():
    """The reference and the model could both ignore a parameter: every one has a gradient."""
    cfg = replace(SMALL, **SETTINGS["all on"])
    model = randomised(cfg, 24, cfg.window_schedule[-1])
    tokens = some_tokens(cfg, 2, 25)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name


# -------------------------------------------------------------------------------- what scores rely on
@pytest.mark.parametrize(
    "kw",
    [
        {},
        dict(num_kv_heads=2, window_pattern="SL", window_schedule=(16,)),
        dict(rope_base=0.0, value_embed_layers=(1,), num_layers=5),
        dict(key_offset=True, smear_dim=6, bigram_rows=300),
    ],
)
def test_causal(kw):
    cfg = replace(SMALL, train_seq_len=72, **kw)
    model = randomised(cfg, 72, cfg.window_schedule[-1])
    edges = (0, 1, 6, 7, 8, 15, 16, 17, 31, 32, 33, 47, 63, 64, 70)
    tokens = some_tokens(cfg, 1, 72).repeat(1 + len(edges), 1)
    for row, t in enumerate(edges, 1):  # other tokens after t, each one different
        tokens[row, t + 1 :] = (
            tokens[row, t + 1 :] + 1 + some_tokens(cfg, 1, 71 - t, t)[0] % 60
        ) % cfg.vocab_size
    with torch.no_grad():
        scores = log_probs(model, tokens)
    for row, t in enumerate(edges, 1):
        torch.testing.assert_close(scores[row, : t + 1], scores[0, : t + 1], rtol=0, atol=1e-6)
        assert (scores[row, t + 1 :] - scores[0, t + 1 :]).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("pattern, window", [("L", 8), ("S", 4)])
@pytest.mark.parametrize("before", [dict(), dict(key_offset=True), dict(bigram_rows=64)])
def test_window_limits_the_past(pattern, window, before):
    """To the token; a key offset in long layers and bigrams see the token before that one too."""
    plain = replace(SMALL, num_layers=1, train_seq_len=40, window_pattern=pattern)
    cfg = replace(plain, **dict(key_offset=False, bigram_rows=0) | before)
    reach = window + (cfg.bigram_rows > 0 or cfg.key_offset and pattern == "L")
    model = randomised(cfg, 40, 8)
    tokens = some_tokens(cfg, 1, 40)
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 7) % cfg.vocab_size
    with torch.no_grad():
        difference = (log_probs(model, tokens) - log_probs(model, changed)).abs().amax(-1)[0]
    assert difference[:10].max() == 0
    assert difference[10 : 10 + reach].min() > 1e-4
    assert difference[10 + reach :].max() < 1e-6


def test_windows_are_clipped_to_the_sequence():
    model, tokens = randomised(SMALL, 24), some_tokens(SMALL, 2, 24)
    with torch.no_grad():
        whole = log_probs(model, tokens)
        for window in (24, 25, 4096):
            model.set_context(24, window)
            torch.testing.assert_close(log_probs(model, tokens), whole, rtol=0, atol=1e-6)
    cfg = replace(SMALL, train_seq_len=24)
    for window, T, sizes in ((0, 24, (24, 12)), (99, 24, (24, 12)), (1, 24, (1, 1)), (8, 24, (8, 4))):
        assert tuple(train_gpt.window_sizes(cfg, window, T).values()) == sizes
    # a short layer looks back as far in a short prompt as it did in training
    assert train_gpt.window_sizes(cfg, 0, 10) == {"L": 10, "S": 10}
    assert train_gpt.window_sizes(cfg, 0, 16) == {"L": 16, "S": 12}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_are_a_distribution(dtype):
    cfg = replace(SMALL, num_kv_heads=2, window_pattern="SL", window_schedule=(8,))
    model, tokens = randomised(cfg, 24, 8, dtype=dtype), some_tokens(cfg, 3, 24)
    with torch.no_grad():
        scores = log_probs(model, tokens)
        model.dtype = torch.float32
        model.set_context(24, 8)
        exact = log_probs(model, tokens)
    assert scores.dtype == torch.float32 and scores.isfinite().all() and scores.max() <= 0
    torch.testing.assert_close(scores.double().exp().sum(-1), torch.ones(3, 24).double(), rtol=0, atol=1e-5)
    assert (scores - exact).abs().mean() < (0.1 if dtype == torch.bfloat16 else 1e-6)


def test_sequences_of_a_batch_do_not_mix():
    model, tokens = randomised(SMALL), some_tokens(SMALL, 3, 24)
    with torch.no_grad():
        together = log_probs(model, tokens)
        for i in range(3):
            torch.testing.assert_close(log_probs(model, tokens[i : i + 1])[0], together[i], rtol=0, atol=1e-5)


# -------------------------------------------------------------------------------- sizes and first values
def test_golf_has_its_parameters():
    with torch.device("meta"):
        cfg = train_gpt.load_config({"PRESET": "golf"} | GOLF_RECORD)
        sizes = {name: p.numel() for name, p in GPT(cfg).named_parameters()}
    assert sum(sizes.values()) == 17_059_912
    assert sizes.pop("embed") == 524_288
    assert sizes.pop("skip_weights") == 4 * 512
    matrices = ("query", "key", "value", "attn_proj", "fc", "mlp_proj")
    for i in range(9):
        block = {
            name.split(".")[-1]: sizes.pop(name) for name in list(sizes) if name.startswith(f"blocks.{i}.")
        }
        assert sum(block.pop(name) for name in matrices) == 1_835_008
        assert sum(block.values()) == 8 + 512 + 512 + 1024
    assert not sizes
    assert sum(train_gpt.parameter_counts(cfg).values()) == 17_059_912


def test_every_parameter_has_a_rule():
    cfg = replace(SMALL, **SETTINGS["all on"])
    model = GPT(cfg)
    kinds = {name: parameter_rule(name) for name, _ in model.named_parameters()}
    assert {group for group, _ in kinds.values()} == set(train_gpt.GROUPS)
    known = [name for members in train_gpt.GROUPS.values() for name in members]
    assert {name.rstrip(".0123456789").split(".")[-1] for name in kinds} == set(known) and len(known) == 18
    for name, p in model.named_parameters():
        assert (kinds[name][0] == "matrix") == (
            name.split(".")[-1] in ("query", "key", "value", "attn_proj", "fc", "mlp_proj")
        ), name


def test_unmatched_parameter_raises():
    model = GPT(SMALL)
    model.blocks[1].gate = nn.Parameter(torch.zeros(3))
    with pytest.raises(KeyError):
        init_parameters(model, 0)
    with pytest.raises(KeyError):
        train_gpt.Optimizer(model, SMALL)


def test_per_layer_repeats_and_cuts():
    assert train_gpt.per_layer("SSSL", 6) == list("SSSLSS")
    assert train_gpt.per_layer((1, 0), 1) == [1]
    assert train_gpt.per_layer((5,), 3) == [5, 5, 5]
    with_values = GPT(replace(SMALL, num_layers=3, value_embed_layers=(0, 1, 0, 1, 1)))
    assert with_values.tables == [0, 1, 0] and len(with_values.value_embeds) == 1


def test_first_values():
    cfg = replace(SMALL, model_dim=384, num_layers=3, value_embed_layers=(1, 0), qk_gain_init=1.25)
    for tied in (False, True):
        model = GPT(replace(cfg, tie_embeddings=tied, vocab_size=2000, tied_embed_init_std=0.02))
        init_parameters(model, 3)
        assert abs(model.embed.std() - (0.02 if tied else 1.0)) < (0.02 if tied else 1.0) / 50
        assert tied or model.head.abs().max() == 0
        for block in model.blocks:
            assert block.attn_proj.abs().max() == 0 and block.mlp_proj.abs().max() == 0
            assert 0.95 < block.query.abs().max() * 384**0.5 < 1.0001
            assert (block.qk_gain == 1.25).all() and (block.layer_scale == 1).all()
            assert (block.residual_mix[0] == 1).all() and (block.residual_mix[1] == 0).all()
        assert (model.skip_weights == 1).all()


def test_first_values_depend_on_the_seed_alone():
    def values(seed):
        torch.manual_seed(torch.seed() % 1000)  # whatever was drawn before
        model, state = GPT(replace(SMALL, value_embed_layers=(1,))), torch.get_rng_state()
        init_parameters(model, seed)
        assert torch.equal(torch.get_rng_state(), state)
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    first, again, other = values(7), values(7), values(8)
    assert all(torch.equal(first[name], again[name]) for name in first)
    for name in first:
        assert torch.equal(first[name], other[name]) == (
            parameter_rule(name)[1] not in ("uniform", "normal")
        ), name
    assert not torch.equal(first["blocks.0.query"], first["blocks.1.query"])


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 8])
def test_any_depth_initialises_to_the_embedding_alone(layers):
    """Zero projections: at the start the loss is that of a uniform guess (untied, zero head)."""
    cfg = replace(SMALL, num_layers=layers)
    model = GPT(cfg)
    init_parameters(model, 0)
    model.set_context(24, 0)
    tokens = some_tokens(cfg, 2, 25)
    assert abs(model(tokens[:, :-1], tokens[:, 1:]).item() - math.log(cfg.vocab_size)) < 1e-5
    assert len(model.skip_weights if layers > 1 else []) == layers // 2
