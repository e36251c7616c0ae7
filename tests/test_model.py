"""The model against a plain reference in float64, what scores rely on, the parameter table, first values."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import train_gpt
from helpers import init_parameters
from train_gpt import FIELDS, GPT, MODEL_FIELDS, Config, Kernels, kind_of, log_probs

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = replace(Config(), vocab_size=61, train_seq_len=24, train_batch_tokens=24, model_dim=48, num_layers=4,
                num_heads=6, mlp_mult=2, bigram_rows=500, count_bits=12, window_pattern="L",
                window_schedule=(0,), batch_schedule=(1,), parameters=())
MAXIMAL = replace(  # has every kind of parameter; a test below says so
    SMALL, num_layers=7, num_kv_heads=2, value_embed_layers=(0, 1), window_pattern="SSSL", mlp_mult=3,
    window_schedule=(8, 16), eval_window=12, skip_layers=(0, 6), backout_layer=5, smear_dim=6, bigram_rows=64,
    count_orders=(2,), count_bits=12, copy_orders=(1, 3), attn_gate_dim=8, max_doc_len=9, bos_id=4,
    attn_scale=0.3, rope_yarn=True, rope_end=True,
    scalar_mix=True, skip_sigmoid=True, smear_documents=True, value_lambdas=True, value_gate_dim=6,
    value_gate_mixed=(0, 0, 0, 1), logit_shift=2.0, logit_width=20.0, smear_normed=True, bigram_lambdas=True,
    attn_lambdas=True, attn_source=3, mix_sublayers=True, skip_gate_dim=7)
GOLF_PLUS = replace(
    train_gpt.preset_config("golf_plus"), vocab_size=61, train_seq_len=24, train_batch_tokens=24,
    model_dim=48, num_layers=5, num_heads=4, num_kv_heads=2, mlp_mult=2, loop_layers=(1, 2),
    artifact_keep=1000)
# {constant that the reference knows: its off-value} of recipes that lack it
OFF_IN_GOLF_PLUS = vars(replace(SMALL, key_offset=False, bigram_rows=0, count_orders=(0,), copy_orders=(0,),
                                value_embed_layers=(0,), tie_embeddings=True))
OFF_IN_OTHERS = dict(exclusive=False, depth_scale=False, skip_mix=False, mlp_slope=0.0, loop_layers=(0,))


def randomised(cfg, seed=0):
    """A model with no parameter at zero: first values would hide half of the arithmetic."""
    model, table = cfg.make_model(Kernels()), cfg.parameter_table()
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        spread = {"matrix": 1.5 * p.shape[-1] ** -0.5, "head": 0.3}.get(table[kind_of(name)].group, 1.0)
        p.data.normal_(0, spread, generator=generator)
    if isinstance(cfg, Config) and any(cfg.count_orders):
        model.counts.count(some_tokens(cfg, 1, 3000)[0].numpy().astype(np.uint16))
    return model


def values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def some_tokens(cfg, B, T, seed=0):
    return torch.randint(cfg.vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def make_context(cfg, T, window, *more):
    return train_gpt.make_context(cfg, T, window, torch.device("cpu"), *more)


def close(got, want, tolerance=1e-5):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------ the reference
def normalised(x):
    return x / (x.pow(2).mean(-1, keepdim=True) + 2**-23).sqrt()


def rope_speeds(cfg, D, window):
    """Radians per token of each pair of channels, and the factor on the logits: the first pairs turn with
    wavelengths up to rope_base, which with rope_end the last of them has; the rest stand still. With YaRN,
    what turns fewer than 32 times in the window slows down as the window grows, all the way if it turns less
    than once."""
    n = int(cfg.rope_fraction * D / 2) if cfg.rope_base else 0
    steps = max(1, n - 1) if cfg.rope_end else n
    speeds = [cfg.rope_base ** (-d / steps) for d in range(n)] + [0.0] * (D // 2 - n)
    factor = cfg.attn_scale or 1 / math.sqrt(D)
    past = list(cfg.window_schedule)
    if window in past:
        past = past[:past.index(window) + 1]
    for i in range(1, len(past) if cfg.rope_yarn else 1):
        ratio = past[i] / past[i - 1]
        factor *= 1 + 0.2 * math.log(ratio)
        for d, speed in enumerate(speeds):
            kept = min(1.0, max(0.0, (past[i - 1] * speed / (2 * math.pi) - 1) / 31))
            speeds[d] = speed * kept + speed / ratio * (1 - kept)
    return torch.tensor(speeds, dtype=torch.float64), factor


def turned(x, speed, places):
    """RoPE on x (T, D): channels d and d + D/2 are one complex number that turns by -place * speed[d]."""
    T, D = x.shape
    z = torch.complex(x[:, :D // 2].contiguous(), x[:, D // 2:].contiguous())
    angle = -places[:, None] * speed
    z = z * torch.polar(torch.ones(T, D // 2, dtype=torch.float64), angle)
    return torch.cat((z.real, z.imag), -1)


def attended(q, k, v, reach, factor, begins):
    """q, k, v (T, D): each position sees itself and the `reach` before it, within its document."""
    out = torch.zeros_like(q)
    for t in range(len(q)):
        first = max(begins[t], t - reach)
        scores = k[first:t + 1] @ q[t] * factor
        out[t] = (scores.exp() / scores.exp().sum()) @ v[first:t + 1]
    return out


def reference_embedding(cfg, w, tokens, begins):
    """tokens (T,) -> (T, C): embedding, bigram with the token before, candidates (test_candidates.py has
    their rows), a gated part of the one before, which with smear_documents may be of another document; and
    the bigrams if they are not in it."""
    x, bigrams = w["embed"][tokens].clone(), None
    follows = [t for t in range(len(tokens)) if begins[t] < t]
    if cfg.bigram_rows:
        bigrams = torch.stack([w["bigram_embed"][row] for row in bigram_rows(cfg, tokens.tolist())])
        if not cfg.bigram_lambdas:
            x, bigrams = x + bigrams, None
    for rows in w["candidates"]:
        for t, (token, sure) in enumerate(rows[0].tolist()):
            for a, c in zip(token, sure):
                x[t] += w["candidate_embed"][a] * w["class_scale"][c] + w["class_embed"][c]
    if cfg.smear_dim:
        x = normalised(x) if cfg.smear_normed else x
        plain = x.clone()
        for t in range(1, len(tokens)) if cfg.smear_documents else follows:
            opened = torch.sigmoid(plain[t, :cfg.smear_dim] @ w["smear_gate"][0])
            x[t] += w["smear"].squeeze() * opened * plain[t - 1]
    return x if cfg.smear_dim and cfg.smear_normed else normalised(x), bigrams


def bigram_rows(cfg, tokens):
    """The first token has the last row, and counts as that number for the second (in 32 bits)."""
    last, before = cfg.bigram_rows - 1, cfg.bigram_rows - 1
    rows = [last]
    for token in tokens[1:]:
        rows.append((36313 * token ^ (27191 * before + 2**31) % 2**32 - 2**31) % max(1, last))
        before = token
    return rows


def reference_attention(cfg, b, h, value_embed, mixed, kind, reach, window, begins):
    """b: {name: tensor} of a block; h (T, C), normalised -> what its attention adds to the stream."""
    H, KV, D = cfg.num_heads, cfg.num_kv_heads or cfg.num_heads, cfg.model_dim // cfg.num_heads
    speeds, factor = rope_speeds(cfg, D, window)
    q, k, v, heads = h @ b["query"].T, h @ b["key"].T, h @ b["value"].T, []
    own, table = b["value_lambdas"] if cfg.value_lambdas else (1, 1)
    own, end = (own * b["input_lambda"], b["output_lambda"]) if cfg.attn_lambdas else (own, 1)
    for n in range(H):
        pair = n * KV // H  # the kv head that this query head shares
        one_q, one_k, one_v = (y[:, m * D:(m + 1) * D] for y, m in ((q, n), (k, pair), (v, pair)))
        one_v = own * one_v
        if value_embed is not None:
            added = value_embed[:, pair * D:(pair + 1) * D]
            if cfg.value_gate_dim:  # from 0 to 2
                seen = h[:, :cfg.value_gate_dim]
                if mixed:
                    half = cfg.value_gate_dim // 2
                    seen = torch.cat((h[:, :half], value_embed[:, :half]), 1)
                opened = torch.sigmoid(seen @ b["value_gate"][pair])[:, None]
                added = cfg.value_gate_factor * opened * added
            one_v = one_v + table * added
        places = torch.arange(len(h), dtype=torch.float64)
        one_q, one_k = (turned(normalised(y), speeds, 2 * places + m % 2 if kind == "P" else places)
                        for y, m in ((one_q, n), (one_k, pair)))
        if cfg.key_offset and kind == "L":  # second and fourth quarter, from the token before
            late = [d for d in range(D) if d % (D // 2) >= (D // 2 + 1) // 2]
            one_k[1:, late] = one_k[:-1, late].clone()
        if cfg.qk_gain_init:
            one_q = one_q * b["qk_gain"][n]
        heads.append([one_q, one_k, one_v])
    if kind == "P":  # head n with head n + H / 2, in turn
        twice, out = [2 * begins[t // 2] for t in range(2 * len(h))], [None] * H
        for n in range(H // 2):
            q, k, v = (torch.stack(both, 1).flatten(0, 1) for both in zip(heads[n], heads[n + H // 2]))
            out[n], out[n + H // 2] = attended(q, k, v, reach[kind], factor, twice).view(-1, 2, D).unbind(1)
    else:
        out = [attended(*head, reach[kind], factor, begins) for head in heads]
    for n, y in enumerate(out):
        if cfg.exclusive:
            unit = heads[n][2] / heads[n][2].norm(dim=1, keepdim=True)
            y = y - (y * unit).sum(1, keepdim=True) * unit
        if cfg.attn_gate_dim:
            y = y * torch.sigmoid(h[:, :cfg.attn_gate_dim] @ b["attn_gate"][n])[:, None]
        out[n] = y
    return end * torch.cat(out, -1) @ b["attn_proj"].T


def reference_log_probs(cfg, model, tokens, window, loops=0):
    """One sequence, tokens (T,) -> (T, V) float64. window: of long layers, 0: everything. loops: further runs
    of golf_plus's loop_layers."""
    off = OFF_IN_OTHERS if isinstance(cfg, Config) else OFF_IN_GOLF_PLUS
    cfg = SimpleNamespace(**off | vars(cfg))
    w = {name: p.detach().double() for name, p in model.named_parameters()}
    w["candidates"] = model.candidates(tokens[None])
    first, last = cfg.loop_layers if cfg.loop_layers != (0,) else (0, -1)
    order = [*range(last + 1), *[*range(first, last + 1)] * loops, *range(last + 1, cfg.num_layers)]
    order = [i for i in order if i < cfg.num_layers]
    T, half = len(tokens), len(order) // 2
    short = min(window or cfg.train_seq_len, cfg.window_schedule[-1] or cfg.train_seq_len)
    short = int(cfg.short_window * short)
    short = max(cfg.window_block, short - short % cfg.window_block)
    reach = {"L": window or T, "S": short, "P": short}
    skip_weights = w.get("skip_weights")
    if skip_weights is not None and cfg.skip_sigmoid:
        skip_weights = 1 / (1 + (-skip_weights).exp())
    begins = [0] * T  # of the document of each position
    for t in range(1, T):
        begins[t] = t if cfg.max_doc_len and tokens[t] == cfg.bos_id else begins[t - 1]
    x0, bigrams = reference_embedding(cfg, w, tokens, begins)
    x = x0 if bigrams is None else x0 + w["blocks.0.bigram_lambda"] * bigrams
    stack, popped, outputs = [], 0, {}

    def joined(x, row, earlier):
        weight = skip_weights[row]
        if cfg.skip_gate_dim:
            weight = weight * 2 * torch.sigmoid(x0[:, :cfg.skip_gate_dim] @ w["skip_gate"][row])[:, None]
        part = torch.sigmoid(w["skip_mix"][row]) if cfg.skip_mix else None
        return part * x + (1 - part) * weight * earlier if cfg.skip_mix else x + weight * earlier

    further = list(zip(cfg.skip_layers[::2], cfg.skip_layers[1::2]))
    for place, i in enumerate(order):
        b = {name.split(".")[-1]: value for name, value in w.items() if name.startswith(f"blocks.{i}.")}
        kind = cfg.window_pattern[i % len(cfg.window_pattern)]
        if cfg.unet_skips and place >= half and stack:  # inside out: the last one in is the first one out
            x, popped = joined(x, popped, stack.pop()), popped + 1
        for row, (source, target) in enumerate(further, len(order) // 2 * cfg.unet_skips):
            if target == i:
                x = joined(x, row, outputs[source])
        keep, added = (1, 1), 0
        if cfg.residual_mix and kind != "0":
            added = b["x0_lambda"] * x0
            if cfg.mix_sublayers:
                keep = b["resid_lambda"]
            else:
                x = b["resid_lambda"] * x
        if bigrams is not None and i and kind != "0":
            added = added + b["bigram_lambda"] * bigrams
        if not cfg.mix_sublayers:
            x, added = x + added, 0
        scale = b["layer_scale"] if cfg.layer_scale and kind != "0" else (1, 1)
        depth = (i + 1) ** -0.5 if cfg.depth_scale else 1
        if kind in "LSP":
            table = cfg.value_embed_layers[i % len(cfg.value_embed_layers)]
            value_embed = w[f"value_embeds.{table - 1}"][tokens] if table else None
            mixed = cfg.value_gate_mixed[i % len(cfg.value_gate_mixed)]
            h = depth * normalised(outputs[cfg.attn_source] if 0 < cfg.attn_source < i else x)
            y = reference_attention(cfg, b, h, value_embed, mixed, kind, reach, window, begins)
            x = keep[0] * x + scale[0] * y + added
        if kind != "0":
            inner = depth * normalised(x) @ b["fc"].T
            inner = torch.where(inner > 0, inner, cfg.mlp_slope * inner)
            x = keep[1] * x + scale[1] * (inner ** 2 @ b["mlp_proj"].T)
        outputs[i] = x
        if place < half:
            stack.append(x)
    if cfg.backout_layer:
        x = x - w["backout"] * outputs[cfg.backout_layer]
    logits = normalised(x) @ (w["embed"] if cfg.tie_embeddings else w["head"]).T
    if cfg.logit_softcap:
        width = cfg.logit_width or cfg.logit_softcap
        logits = cfg.logit_softcap * torch.tanh((logits + cfg.logit_shift) / width)
    return logits - logits.exp().sum(-1, keepdim=True).log()


ALL_OFF = dict(qk_gain_init=0.0, rope_base=0.0, logit_softcap=0.0, residual_mix=False, layer_scale=False,
               unet_skips=False, key_offset=False, bigram_rows=0, value_embed_layers=(0,))
DOCUMENTS = dict(max_doc_len=9, bos_id=4)
SETTINGS = {
    "defaults": {},
    "gqa": dict(num_kv_heads=2),
    "mqa": dict(num_kv_heads=1),
    "tied": dict(tie_embeddings=True),
    **{f"without {name}": {name: value} for name, value in ALL_OFF.items()},
    "all off": ALL_OFF,
    "value embeddings": dict(value_embed_layers=(1, 0, 2), num_kv_heads=3),
    "windows": dict(window_pattern="SSL", window_schedule=(10,)),
    "golf-like": dict(num_layers=5, num_kv_heads=3, tie_embeddings=True, logit_softcap=30.0, rope_base=1e4),
    "one layer": dict(num_layers=1, value_embed_layers=(1,)),
    "three layers": dict(num_layers=3, window_pattern="SL", window_schedule=(7,), num_kv_heads=2),
    "shared value tables": dict(num_layers=5, value_embed_layers=(0, 2, 1, 0, 2), window_pattern="LL-LL"),
    "documents": DOCUMENTS,
    "documents in windows": dict(**DOCUMENTS, window_pattern="SL", window_schedule=(6,)),
    "smear": dict(smear_dim=5, **DOCUMENTS),
    "smear across": dict(smear_dim=5),
    "smear across documents": dict(smear_dim=5, smear_documents=True, **DOCUMENTS),
    "bigrams": dict(bigram_rows=31, **DOCUMENTS),
    "bigrams across": dict(bigram_rows=4096),
    "attention gate": dict(attn_gate_dim=7, num_kv_heads=2),
    "key offset": dict(window_pattern="SL", window_schedule=(12,), num_kv_heads=3),
    "key offset of six channels": dict(num_heads=8),
    "key offset of two channels": dict(num_heads=24),
    "half of RoPE": dict(rope_fraction=0.5),
    "RoPE to its end": dict(rope_end=True),
    "RoPE of one pair to its end": dict(rope_end=True, rope_fraction=0.25),
    "value lambdas": dict(value_lambdas=True, value_embed_layers=(1, 0), num_kv_heads=2),
    "value gate": dict(value_gate_dim=7, value_embed_layers=(1, 0, 2), num_kv_heads=3),
    "value gate and lambdas": dict(value_gate_dim=48, value_lambdas=True, value_embed_layers=(0, 1)),
    "scalar mix": dict(scalar_mix=True, skip_layers=(0, 2)),
    "sigmoid of skips": dict(skip_sigmoid=True, skip_layers=(0, 2)),
    "scalar mix without a mix": dict(scalar_mix=True, residual_mix=False),
    "yarn": dict(rope_yarn=True, window_schedule=(5, 9, 14), attn_scale=0.3, rope_base=30.0),
    "parts of layers": dict(num_layers=5, window_pattern="0L-S", value_embed_layers=(0,)),
    "skip and backout": dict(unet_skips=False, skip_layers=(0, 2), backout_layer=1),
    "several skips into a layer": dict(skip_layers=(0, 2, 1, 3, 0, 3)),
    "skips of both kinds": dict(num_layers=5, skip_layers=(0, 4)),
    "speedrun-like": dict(
        **DOCUMENTS, num_layers=6, qk_gain_init=0.0, attn_scale=0.1, attn_gate_dim=12, rope_base=1024.0,
        rope_fraction=0.5, rope_yarn=True, smear_dim=12, layer_scale=False, unet_skips=False,
        skip_layers=(2, 3), backout_layer=4, value_embed_layers=(0, 1, 2, 0, 1, 2), window_pattern="0SL-SL",
        window_schedule=(4, 8, 12), window_block=2, eval_window=16, bigram_rows=0, key_offset=False,
        rope_end=True, scalar_mix=True, skip_sigmoid=True, smear_documents=True, value_lambdas=True),
    "gpt2-like": dict(
        num_layers=5, num_heads=4, qk_gain_init=0.0, rope_base=1e4, key_offset=False, bigram_rows=0,
        scalar_mix=True, layer_scale=False, unet_skips=False, value_gate_dim=32,
        value_embed_layers=(1, 0, 2, 0, 3), window_pattern="SSSLL", window_schedule=(20,)),
    "smear after the norm": dict(smear_dim=5, smear_normed=True, **DOCUMENTS),
    "short windows": dict(window_pattern="SL", window_schedule=(12,), short_window=0.25),
    "shifted softcap": dict(logit_shift=5.0, logit_width=20.0),
    "heads in pairs": dict(window_pattern="PL", window_schedule=(10,), num_kv_heads=2),
    "heads in pairs, documents": dict(window_pattern="P", window_schedule=(10,), **DOCUMENTS),
    "bigram lambdas": dict(bigram_lambdas=True, bigram_rows=40),
    "mixes of sublayers": dict(mix_sublayers=True, window_pattern="LL-0", value_embed_layers=(0,)),
    "mixes of sublayers, bigrams": dict(mix_sublayers=True, bigram_lambdas=True, scalar_mix=True),
    "attention to an earlier stream": dict(attn_source=1),
    "attention lambdas": dict(attn_lambdas=True, value_embed_layers=(1,)),
    "value gates that see values": dict(value_gate_dim=6, value_gate_mixed=(1, 0), value_gate_factor=3.0),
    "gated skips": dict(skip_gate_dim=9, skip_layers=(0, 2)),
    "maximal": {name: getattr(MAXIMAL, name) for name in MODEL_FIELDS},
}


def settings(name):
    return replace(SMALL, **SETTINGS[name])


@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_forward_equals_reference(name):
    """Log-probabilities and the training loss, with YaRN at the window of each stage."""
    cfg = settings(name)
    model, tokens = randomised(cfg), some_tokens(cfg, 2, 24)
    final = train_gpt.eval_window(cfg)
    for window in [final, *cfg.window_schedule] if cfg.rope_yarn else [final]:
        context = make_context(cfg, 23, window)
        got = log_probs(model, tokens[:, :-1], context if window != final else None)
        want = torch.stack([reference_log_probs(cfg, model, row, window) for row in tokens[:, :-1]])
        assert got.dtype == torch.float32 and got.shape == (2, 23, cfg.vocab_size)
        assert want.std() > 0.1  # a flat distribution would prove nothing
        close(got.double(), want, 1e-4)
        nats = -want.gather(-1, tokens[:, 1:, None]).mean()
        close(model(tokens[:, :-1], tokens[:, 1:], context).double(), nats)


@pytest.mark.parametrize("settings", [
    {}, dict(num_kv_heads=0), dict(num_kv_heads=1), dict(exclusive=False), dict(depth_scale=False),
    dict(skip_mix=False), dict(mlp_slope=0.0), dict(rope_fraction=1.0), dict(rope_fraction=0.0),
    dict(rope_base=0.0), dict(logit_softcap=0.0), dict(loop_layers=(0,)), dict(loop_layers=(3, 3)),
    dict(loop_layers=(2, 4), loop_schedule=(1, 3)), dict(num_layers=1), dict(num_layers=2)], ids=str)
@torch.no_grad()
def test_golf_plus_equals_reference(settings):
    """In both of its stages, of which the last one's loops are those of scores."""
    cfg = replace(GOLF_PLUS, **settings)
    train_gpt.check_config(cfg)
    model, tokens = randomised(cfg), some_tokens(cfg, 2, 24)
    found = []
    for stage in cfg.stages():
        context = model.context(23, torch.device("cpu"), stage=stage)
        loops = 0 if cfg.loop_layers == (0,) else stage.loops
        want = torch.stack([reference_log_probs(cfg, model, row, 0, loops) for row in tokens[:, :-1]])
        assert want.std() > 0.1
        found.append(log_probs(model, tokens[:, :-1], context))
        close(found[-1].double(), want, 1e-4)
        nats = -want.gather(-1, tokens[:, 1:, None]).mean()
        close(model(tokens[:, :-1], tokens[:, 1:], context).double(), nats)
    assert torch.equal(log_probs(model, tokens[:, :-1]), found[-1])
    assert torch.equal(found[0], found[1]) == (cfg.loop_layers == (0,) or cfg.num_layers == 1)


def test_each_part_of_golf_plus_matters():
    """And each has a row in its table, which has no other."""
    model, tokens = randomised(GOLF_PLUS), some_tokens(GOLF_PLUS, 2, 25)
    context = model.context(24, torch.device("cpu"), stage=GOLF_PLUS.stages()[-1])
    model(tokens[:, :-1], tokens[:, 1:], context).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum(-1).min() > 0, name
    assert {kind_of(name) for name, _ in model.named_parameters()} == GOLF_PLUS.parameter_table().keys()


@torch.no_grad()
def test_golf_plus_scores_any_shape(tmp_path):
    """B and T are free on a loaded model; each row is scored as if alone, and a beginning as if nothing
    followed."""
    path = tmp_path / "artifact"
    path.write_bytes(train_gpt.pack_artifact(randomised(GOLF_PLUS)))
    model, cfg = train_gpt.load_model(path)
    names = cfg.model_fields()
    assert [getattr(cfg, name) for name in names] == [getattr(GOLF_PLUS, name) for name in names]
    for B, T in ((2, 61), (1, 1), (3, 24), (2, 5)):
        tokens = some_tokens(cfg, B, T, seed=T)
        want = log_probs(model, tokens)
        assert want.shape == (B, T, cfg.vocab_size)
        close(want[0].double(), reference_log_probs(cfg, model, tokens[0], 0, 2), 1e-4)
        for i in range(B):
            close(log_probs(model, tokens[i:i + 1])[0], want[i])
        for t in {1, T // 3 + 1, T - 1} - {0}:
            close(log_probs(model, tokens[:, :t]), want[:, :t])


def test_first_values_of_golf_plus():
    """Of each layer the matrices that read it are orthogonal, those that write begin at 0."""
    model = GOLF_PLUS.make_model(Kernels())
    init_parameters(model, 3)
    constants = dict(CONSTANTS, qk_gain=4)
    for name, p in values(model).items():
        kind = kind_of(name)
        if kind in ("query", "key", "value", "fc"):
            square = p @ p.T if len(p) <= p.size(1) else p.T @ p
            close(square, torch.eye(len(square)))
        elif kind == "embed":
            assert p.std() == pytest.approx(0.005, rel=0.05)
        else:
            assert (p == constants[kind]).all(), name


@pytest.mark.parametrize("tied", [False, True])
def test_each_part_matters(tied):
    """The reference and the model could both ignore a parameter: every one has a gradient."""
    cfg = replace(MAXIMAL, tie_embeddings=tied)
    model, tokens = randomised(cfg), some_tokens(cfg, 2, 25)
    model(tokens[:, :-1], tokens[:, 1:], make_context(cfg, 24, 16)).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name


@pytest.mark.parametrize("name", ["defaults", "windows", "documents in windows", "speedrun-like", "maximal"])
def test_log_probs_of_any_shape(name, tmp_path):
    """B and T are free on a freshly loaded model, whatever was called before; each row is scored as if alone,
    and a beginning as if nothing followed; beyond train_seq_len too they are the reference's."""
    cfg, path = settings(name), tmp_path / "artifact"
    path.write_bytes(train_gpt.pack_artifact(randomised(cfg)))
    used, window = train_gpt.load_model(path)[0], train_gpt.eval_window(cfg)
    for B, T in ((2, 61), (1, 1), (3, 24), (1, 25), (2, 5), (5, 24), (1, 2)):
        tokens = some_tokens(cfg, B, T, seed=T)
        with torch.no_grad():
            want = log_probs(train_gpt.load_model(path)[0], tokens)
            assert want.shape == (B, T, cfg.vocab_size) and torch.equal(log_probs(used, tokens), want)
            close(want[0].double(), reference_log_probs(cfg, used, tokens[0], window), 1e-4)
            for i in range(B):
                close(log_probs(used, tokens[i:i + 1])[0], want[i])
            for t in {1, T // 3 + 1, T - 1} - {0}:
                close(log_probs(used, tokens[:, :t]), want[:, :t])
            # other calls: some places only, bf16, another window, a sample
            wanted = (torch.arange(T) % 2 == 0).expand(B, T)
            x = used.hidden(tokens, make_context(cfg, T, window))
            close(torch.log_softmax(used.logits(x[wanted]), -1), want[wanted])
            close(used.logits(x).log_softmax(-1), want)
            rounded = log_probs(used, tokens, make_context(cfg, T, window, torch.bfloat16))
            assert rounded.dtype == torch.float32 and (rounded - want).abs().mean() < 0.15
            log_probs(used, tokens, make_context(cfg, T, 3))
            train_gpt.generate(used, [1, 2, 3], 4, 0.0)
        used(tokens, tokens, make_context(cfg, T, 6)).backward()


# ------------------------------------------------------------ parameters
def test_golf_has_its_parameters():
    """As many as the public record."""
    cfg = train_gpt.load_config({"PRESET": "golf"})
    counts = train_gpt.parameter_counts(cfg)
    assert counts == dict(embed=524_288, matrix=9 * 1_835_008, scalar=4 * 512 + 9 * (8 + 512 + 512 + 1024))
    assert sum(counts.values()) == 17_059_912


def test_what_is_off_has_no_parameters():
    """... and leaves the parameters of the rest as they were."""
    everything = values(GPT(MAXIMAL)).keys()
    for name in ("qk_gain_init", "residual_mix", "layer_scale", "unet_skips", "bigram_rows",
                 "smear_dim", "attn_gate_dim", "value_gate_dim", "value_lambdas", "backout_layer",
                 "value_embed_layers"):
        off = {name: (0,) if name == "value_embed_layers" else 0, "skip_layers": (0,)}
        assert values(GPT(replace(MAXIMAL, **off))).keys() < everything, name
    assert everything - values(GPT(replace(MAXIMAL, tie_embeddings=True))).keys() == {"head"}


def test_the_table_has_a_row_for_every_kind():
    """A configuration in which everything that can be off is on has every row's kind, and no other."""
    for name in MODEL_FIELDS:
        optional = FIELDS[name].metadata["off"] or isinstance(FIELDS[name].default, bool)
        assert not optional or getattr(MAXIMAL, name) or name == "tie_embeddings", f"{name} is off here"
    table = train_gpt.parameter_table(MAXIMAL)
    shapes = {kind_of(name): p.dim() for name, p in GPT(MAXIMAL).named_parameters()}
    assert shapes.keys() == table.keys() and all(row.kind == kind for kind, row in table.items())
    muon = {kind for kind, row in table.items() if row.optimizer == "muon"}
    assert muon == {"query", "key", "value", "attn_proj", "fc", "mlp_proj", "attn_gate", "smear_gate",
                    "value_gate", "skip_gate"}
    assert all(shapes[kind] == 2 for kind in muon)


def test_a_parameter_without_a_row_raises():
    model = GPT(SMALL)
    model.blocks[1].other = nn.Parameter(torch.zeros(3))
    for use in (lambda: init_parameters(model, 0), lambda: train_gpt.Optimizer(model, SMALL),
                lambda: train_gpt.pack_artifact(model)):
        with pytest.raises(KeyError, match="other"):
            use()


@pytest.mark.parametrize("cell", [
    "gain.lr_mult=2", "query=2", "query.kind=key", "query.lr_mult=fast", "query.scale=nan",
    "query.optimizer=sgd", "query.lr=seed", "query.init=ones", "query.group=", "qk_gain.optimizer=muon",
    "backout.init=uniform", "resid_lambda.init=normal", "x0_lambda.optimizer=muon",
    "layer_scale.optimizer=muon", "query.second=diagonal", "x0_lambda.beta1=fast", "residual_mix.lr_mult=2"])
def test_an_impossible_cell_is_refused(cell):
    with pytest.raises(train_gpt.Refused):
        train_gpt.load_config({"PARAMETERS": cell})


# ------------------------------------------------------------ first values
CONSTANTS = dict(attn_proj=0, mlp_proj=0, head=0, value_embeds=0, bigram_embed=0, attn_gate=0,
                 candidate_embed=0, class_embed=0, class_scale=1,
                 smear=0, smear_gate=0, value_gate=0, resid_lambda=1, x0_lambda=0, value_lambdas=0.5,
                 layer_scale=1,
                 skip_weights=1, qk_gain=1.25, backout=0.5, skip_gate=0, skip_mix=0, input_lambda=1,
                 output_lambda=1, bigram_lambda=0.05)


@pytest.mark.parametrize("tied", [False, True])
def test_first_values(tied):
    cfg = replace(MAXIMAL, model_dim=192, vocab_size=2000, qk_gain_init=1.25, tie_embeddings=tied,
                  tied_embed_init_std=0.02)
    model, std = GPT(cfg), 0.02 if tied else 1.0
    init_parameters(model, 3)
    for name, p in values(model).items():
        kind, bound = kind_of(name), p.size(-1) ** -0.5
        if kind in ("query", "key", "value", "fc"):
            assert 0.95 * bound < p.abs().max() < 1.0001 * bound, name
            assert p.std() == pytest.approx(bound / 3**0.5, rel=0.05) and abs(p.mean()) < 0.05 * bound, name
        elif kind == "embed":
            assert p.std() == pytest.approx(std, rel=0.02) and p.abs().max() > 3.5 * std
        else:
            assert (p == CONSTANTS[kind]).all(), name


def test_first_values_depend_on_the_seed_alone():
    def first_values(seed):
        torch.manual_seed(torch.seed() % 1000)  # whatever was drawn before
        model, state = GPT(SMALL), torch.get_rng_state()
        init_parameters(model, seed)
        assert torch.equal(torch.get_rng_state(), state)
        return values(model)

    first, again, other = first_values(7), first_values(7), first_values(8)
    drawn = {"query", "key", "value", "fc", "embed"}
    for name in first:
        assert torch.equal(first[name], again[name]), name
        assert torch.equal(first[name], other[name]) == (kind_of(name) not in drawn), name
    assert not torch.equal(first["blocks.0.query"], first["blocks.1.query"])


def test_first_values_follow_the_table():
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


def test_changed_cells_change_first_values_and_the_artifact(tmp_path):
    """Another distribution, another scale, a number in place of one per row, fp32 in place of fp16."""
    cells = ("fc.init=normal", "fc.scale=0.5", "query.scale=3", "resid_lambda.scale=0.25", "head.scale=0.5",
             "head.init=uniform", "head.artifact_step=0", "fc.scale=0.02")  # of two the last one counts
    asked = {"PARAMETERS": ",".join(cells), "WINDOW_PATTERN": "L"}
    cfg = replace(train_gpt.load_config(asked), vocab_size=300)
    model, plain, path = GPT(cfg), GPT(replace(cfg, parameters=())), tmp_path / "artifact"
    for one in (model, plain):
        init_parameters(one, 0)
    block, bound = model.blocks[0], cfg.model_dim**-0.5
    assert block.fc.detach().std() == pytest.approx(0.02, rel=0.05) and block.fc.abs().max() > 0.06
    assert 2.9 * bound < block.query.abs().max() < 3.001 * bound
    assert 0.49 * bound < model.head.abs().max() < 0.501 * bound
    assert (block.resid_lambda == 0.25).all() and (block.x0_lambda == 0).all()
    for kind in ("attn_proj", "mlp_proj", "layer_scale", "qk_gain"):
        assert torch.equal(getattr(block, kind), getattr(plain.blocks[0], kind))
    assert torch.equal(model.embed, plain.embed)
    path.write_bytes(train_gpt.pack_artifact(model))
    found = train_gpt.load_model(path)[0]
    assert torch.equal(found.head, model.head) and not torch.equal(found.embed, model.embed)


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 8])
@torch.no_grad()
def test_any_depth_begins_with_a_uniform_guess(layers):
    """Projections and the untied head are zero."""
    cfg = replace(SMALL, num_layers=layers)
    model, tokens = GPT(cfg), some_tokens(cfg, 2, 25)
    init_parameters(model, 0)
    loss = model(tokens[:, :-1], tokens[:, 1:], make_context(cfg, 24, 0))
    assert loss.item() == pytest.approx(math.log(cfg.vocab_size), abs=1e-5)
    assert len(model.skip_weights if layers > 1 else []) == layers // 2
