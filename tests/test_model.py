"""tiny against a plain reference in float64, parts of other recipes that are off, what scores rely on, the
parameter tables, init. What the public records compute: test_golden.py."""

from collections import Counter, defaultdict
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import nn

import test_speedrun_plus
import train_gpt
from helpers import fake_run, init_parameters
from tools.run import plan
from train_gpt import RECIPES, kind_of, log_probs

pytestmark = pytest.mark.usefixtures("one_thread")
SIZE = dict(vocab_size=61, train_seq_len=24, train_batch_tokens=24, model_dim=48, num_layers=4, num_heads=6,
            mlp_mult=2, bos_id=4)
TOY = {  # what else makes a recipe small; its techniques stay on
    "tiny": dict(bigram_rows=500, count_bits=20, count_orders=(2,), count_words=(5,), copy_orders=(1, 3),
                 window_pattern="L", window_schedule=(0,), batch_schedule=(1,)),
    "golf": dict(num_kv_heads=3),
    "golf_plus": dict(num_kv_heads=2, loop_layers=(1, 2), gptq_batches=0),
    "speedrun": dict(
        num_layers=6, max_doc_len=9, window_pattern="0SL-SL", value_embed_layers=(0, 1, 2, 0, 1, 2),
        skip_layers=(2, 3), backout_layer=4, window_schedule=(4, 8, 12, 14), window_block=2, eval_window=16,
        eval_context=0),
    "gpt2": dict(depth=0, target_param_data_ratio=0.0, num_layers=5, num_heads=4, window_pattern="SSSLL",
                 window_schedule=(20,), value_embed_layers=(1, 0, 2, 0, 3)),
    "gpt2_plus": dict(depth=0, target_param_data_ratio=0.0, num_layers=5, num_heads=4, window_pattern="SSSLL",
                      window_schedule=(20,), value_embed_layers=(1, 0, 2, 0, 3), backout_layer=2)}
# Of a recipe without a row
OTHER = dict(num_kv_heads=3, depth=0, target_param_data_ratio=0.0)

def small(preset, **settings):
    """A recipe at toy size."""
    names = {constant.name for constant in fields(RECIPES[preset])}
    other = {name: value for name, value in OTHER.items() if name in names}
    cfg = RECIPES[preset](**SIZE | TOY.get(preset, other) | settings)
    cfg.check()
    return cfg


def randomised(cfg, seed=0):
    """A model with no parameter at zero: the init would hide half of the arithmetic."""
    model = cfg.make_model()
    generator = torch.Generator().manual_seed(seed)
    table = cfg.parameter_table()
    for name, p in model.named_parameters():
        spread = {"matrix": 1.5 * p.shape[-1] ** -0.5, "head": 0.3}.get(table[kind_of(name)].group, 1.0)
        p.data.normal_(0, spread, generator=generator)
    if plan.counted_bytes(cfg):
        model.counts.starts.copy_(some_starts(cfg.vocab_size))
        model.counts.count(some_tokens(cfg, 1, 3000)[0].numpy().astype(np.uint16))
    return model


def some_starts(vocab_size):
    """All tokens begin a word except every third."""
    return torch.arange(vocab_size) % 3 != 2


def values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def some_tokens(cfg, B, T, seed=0):
    return torch.randint(cfg.vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def make_context(model, T, window=None, dtype=None):
    """Context of rows of T tokens; window: tokens before its own that a long layer sees; None: of scores."""
    stage = None
    if window is not None:
        stage = model.cfg.stages()[-1]
        if "window" in vars(stage):
            stage = replace(stage, window=window)
    return model.context(T, torch.device("cpu"), dtype, stage)


def close(got, want, tolerance=1e-5):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------ the reference
def normalised(x):
    return x / (x.pow(2).mean(-1, keepdim=True) + 2**-23).sqrt()


def rope_speeds(cfg, D):
    """Radians per token of each pair of channels; the base is the longest wavelength over 2 pi."""
    n = D // 2
    if not cfg.rope_base:
        return torch.zeros(n, dtype=torch.float64)
    return torch.tensor([cfg.rope_base ** (-d / n) for d in range(n)], dtype=torch.float64)


def turned(x, speed):
    """RoPE on x (T, D): channels d and d + D/2 are one complex number that turns by -t * speed[d]."""
    T, D = x.shape
    z = torch.complex(x[:, :D // 2].contiguous(), x[:, D // 2:].contiguous())
    angle = -torch.arange(T, dtype=torch.float64)[:, None] * speed
    z = z * torch.polar(torch.ones(T, D // 2, dtype=torch.float64), angle)
    return torch.cat((z.real, z.imag), -1)


def attended(q, k, v, reach):
    """q, k, v (T, D): each position sees itself and the `reach` before it."""
    out = torch.zeros_like(q)
    for t in range(len(q)):
        first = max(0, t - reach)
        scores = k[first:t + 1] @ q[t] * q.size(1) ** -0.5
        out[t] = (scores.exp() / scores.exp().sum()) @ v[first:t + 1]
    return out


def reference_embedding(cfg, w, tokens):
    """tokens (T,) -> (T, C): embedding, bigram with the token before, candidates (test_candidates.py has
    their rows)."""
    x = w["embed"][tokens].clone()
    if cfg.bigram_rows:
        x = x + torch.stack([w["bigram_embed"][row] for row in bigram_rows(cfg, tokens.tolist())])
    for rows in w["candidates"]:
        for t, (token, sure) in enumerate(rows[0].tolist()):
            for a, c in zip(token, sure):
                x[t] += w["candidate_embed"][a] * w["class_scale"][c] + w["class_embed"][c]
    return normalised(x)


def bigram_rows(cfg, tokens):
    """The first token has the last row, and counts as that number for the second (in 32 bits)."""
    last = cfg.bigram_rows - 1
    before = cfg.bigram_rows - 1
    rows = [last]
    for token in tokens[1:]:
        rows.append((36313 * token ^ (27191 * before + 2**31) % 2**32 - 2**31) % max(1, last))
        before = token
    return rows


def reference_attention(cfg, b, h, value_embed, kind, reach):
    """b: {name: tensor} of a block; h (T, C), normalised -> what its attention adds to the stream."""
    D = cfg.model_dim // cfg.num_heads
    speeds = rope_speeds(cfg, D)
    q = h @ b["query"].T
    k = h @ b["key"].T
    v = h @ b["value"].T
    if value_embed is not None:
        v = v + value_embed
    out = []
    for n, (one_q, one_k, one_v) in enumerate(zip(q.split(D, 1), k.split(D, 1), v.split(D, 1))):
        one_q = turned(normalised(one_q), speeds)
        one_k = turned(normalised(one_k), speeds)
        if cfg.key_offset and kind == "L":  # second and fourth quarter, from the token before
            late = [d for d in range(D) if d % (D // 2) >= (D // 2 + 1) // 2]
            one_k[1:, late] = one_k[:-1, late].clone()
        out.append(attended(one_q * b["qk_gain"][n], one_k, one_v, reach[kind]))
    return torch.cat(out, -1) @ b["attn_proj"].T


def reference_log_probs(model, tokens):
    """One sequence, tokens (T,) -> (T, V) float64, by the window of scores."""
    cfg = model.cfg
    w = {name: p.detach().double() for name, p in model.named_parameters()}
    w["candidates"] = model.candidate_rows(*model.matches(tokens[None], tokens.roll(-1)[None]))
    T = len(tokens)
    half = cfg.num_layers // 2
    window = cfg.stages()[-1].window
    reach = {"L": window or T, "S": (window or cfg.train_seq_len) // 2}
    x = x0 = reference_embedding(cfg, w, tokens)
    stack = []
    for i in range(cfg.num_layers):
        b = {name.split(".")[-1]: value for name, value in w.items() if name.startswith(f"blocks.{i}.")}
        kind = cfg.window_pattern[i % len(cfg.window_pattern)]
        if cfg.unet_skips and i >= half and stack:  # inside out: the last one in is the first one out
            x = x + w["skip_weights"][i - half] * stack.pop()
        x = b["resid_lambda"] * x + b["x0_lambda"] * x0
        if kind in "LS":
            table = cfg.value_embed_layers[i % len(cfg.value_embed_layers)]
            value_embed = w[f"value_embeds.{table - 1}"][tokens] if table else None
            x = x + b["layer_scale"][0] * reference_attention(cfg, b, normalised(x), value_embed, kind, reach)
        inner = normalised(x) @ b["fc"].T
        x = x + b["layer_scale"][1] * (inner.clamp(min=0) ** 2 @ b["mlp_proj"].T)
        if i < half:
            stack.append(x)
    x = normalised(x)
    logits = x @ w["head"].T
    if cfg.logit_softcap:
        logits = cfg.logit_softcap * torch.tanh(logits / cfg.logit_softcap)
    scores = logits - logits.exp().sum(-1, keepdim=True).log()
    if "gate_weight" not in w:
        return scores
    return reference_mixture(cfg, model.counts, w, tokens.tolist(), x, scores.exp()).log()


def ngram_at(n):
    """A function of tokens and a place: the last n tokens there; None: there are fewer."""
    return lambda tokens, t: tuple(tokens[t + 1 - n:t + 1]) if t + 1 >= n else None


def words_at(context, starts):
    """Like ngram_at(), for a mask of words; starts: whether each token begins a word."""
    def find(tokens, t):
        words = []
        word = []
        while t >= 0 and len(words) < context.bit_length():
            word.insert(0, tokens[t])
            if starts[tokens[t]]:
                words.append(tuple(word))
                word = []
            t -= 1
        if len(words) < context.bit_length():
            return None
        return tuple(word for back, word in enumerate(words) if context >> back & 1)
    return find


def counted_contexts(cfg, starts):
    """Functions that give a place's contexts, in the order of NgramCounts."""
    return [words_at(context, starts.tolist()) for context in cfg.counted_words()] + [
        ngram_at(n) for n in sorted(cfg.counted_orders())]


def documents_after(text, context_at, bos):
    """{context: {token: documents in which it comes next}}"""
    found = defaultdict(lambda: defaultdict(set))
    document = np.cumsum(text == bos)
    tokens = text.tolist()
    for t in range(len(text) - 1):
        if (context := context_at(tokens, t)) is not None:
            found[context][tokens[t + 1]].add(int(document[t]))
    return found


def reference_mixture(cfg, counts, w, row, x, own):
    """The model's own probabilities (T, V) mixed with those of the n-grams. counts: holds the training text,
    which counts by documents. row: T tokens. x (T, C): last activations. w: {name: weights}"""
    contexts = counted_contexts(cfg, counts.starts)
    matched = cfg.matched_orders()
    after = [documents_after(counts.text, context_at, cfg.bos_id) for context_at in contexts]
    mixed = torch.zeros_like(own)
    for t in range(len(row)):
        sources = []
        classes = []
        longest = [0, 0]
        for context_at, following in zip(contexts, after):
            after_it = following.get(context_at(row, t), {})
            counts = Counter({token: len(documents) for token, documents in after_it.items()})
            few = min(len(counts), 3) - 1
            spread = few + (few == 2 and 4 * len(counts) > counts.total())
            sources.append(counts)
            classes.append(1 + 6 * sum(counts.total() >= limit for limit in (2, 3, 6, 16, 64)) + spread)
            longest[0] += bool(counts)
        for n in matched:
            gram = row[t + 1 - n:t + 1]
            ends = [end for end in range(n - 1, t) if t + 1 >= n and row[end + 1 - n:end + 1] == gram]
            counts = Counter(row[end + 1] for end in ends)
            twice = len(ends) > 1 and row[ends[-1] + 1] == row[ends[-2] + 1]
            spread = 0 if len(counts) < 2 else 1 + (2 * len(counts) > counts.total())
            sources.append(counts)
            often = sum(counts.total() >= limit for limit in (2, 3, 5, 9, 20))
            classes.append(1 + 6 * often + 2 * spread + twice)
            longest[1] += bool(counts)
        both = longest[0] * (1 + len(matched)) + longest[1]
        score = w["gate_weight"] @ x[t] + w["gate_matches"][both]
        for i, counts in enumerate(sources):
            score[1 + i] += w["gate_class"][37 * i + classes[i]] if counts else -100
        gates = score.exp() / score.exp().sum()
        mixed[t] = gates[0] * own[t]
        for gate, counts in zip(gates[1:], sources):
            for token, count in counts.items():
                mixed[t, token] += gate * count / counts.total()
    return mixed


SETTINGS = {
    "as it is": {}, "no softcap": dict(logit_softcap=0.0), "no RoPE": dict(rope_base=0.0),
    "no key offset": dict(key_offset=False),
    "no bigrams": dict(bigram_rows=0), "few bigram rows": dict(bigram_rows=31),
    "no counts": dict(count_orders=(0,), count_words=(0,)),
    "words only": dict(count_orders=(0,)), "n-grams only": dict(count_words=(0,)),
    "no copies": dict(copy_orders=(0,)),
    "no candidates": dict(count_orders=(0,), count_words=(0,), copy_orders=(0,)),
    "no memory": dict(memory=False),
    "no mixture": dict(mixture=False),
    "no skips": dict(unet_skips=False), "no value embeddings": dict(value_embed_layers=(0,)),
    "value embeddings": dict(value_embed_layers=(1, 0, 2)),
    "windows": dict(window_pattern="SSL", window_schedule=(10,)),
    "a layer without attention": dict(window_pattern="-L", num_layers=5, value_embed_layers=(0, 2, 1)),
    "many matches": dict(vocab_size=12, bos_id=1, count_orders=(1, 2, 4), count_words=(1, 5, 6)),
    "one layer": dict(num_layers=1, value_embed_layers=(1,)),
    "three layers": dict(num_layers=3, window_pattern="SL", window_schedule=(7,)),
    "key offset of six channels": dict(num_heads=8), "key offset of two channels": dict(num_heads=24)}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@torch.no_grad()
def test_tiny_equals_the_reference(settings):
    """Log-probabilities and the training loss, which knows what comes next."""
    cfg = small("tiny", **settings)
    model = randomised(cfg)
    tokens = some_tokens(cfg, 2, 24)
    got = log_probs(model, tokens[:, :-1])
    want = torch.stack([reference_log_probs(model, row) for row in tokens[:, :-1]])
    assert got.dtype == torch.float32 and got.shape == (2, 23, cfg.vocab_size)
    assert want.std() > 0.1  # a flat distribution would prove nothing
    close(got.double(), want, 1e-4)
    nats = -want.gather(-1, tokens[:, 1:, None]).mean()
    close(model(tokens[:, :-1], tokens[:, 1:], make_context(model, 23)).double(), nats)


def test_no_rope_of_speedrun():
    assert train_gpt.rope_spectrum_to_base(12, 1024.0, 0.5).any()
    assert not train_gpt.rope_spectrum_to_base(12, 0.0, 0.5).any()


# What is off equals a model that has it with these constants and weights: {kind of parameter: value}
NEUTRAL = [
    ("golf", dict(logit_softcap=0.0), dict(logit_softcap=1e4), {}),
    ("golf", dict(num_kv_heads=0), dict(num_kv_heads=6), {}),
    ("golf_plus", dict(logit_softcap=0.0), dict(logit_softcap=1e4), {}),
    ("golf_plus", dict(num_kv_heads=0), dict(num_kv_heads=6), {}),
    ("golf_plus", dict(loop_layers=(0,)), dict(loop_schedule=(0, 0)), {}),
    ("speedrun", dict(logit_softcap=0.0), dict(logit_softcap=1e4), {}),
    ("speedrun", dict(smear_dim=0), {}, dict(smear=0.0)),
    ("speedrun", dict(backout_layer=0), {}, dict(backout=0.0)),
    ("speedrun", dict(skip_layers=(0,)), {}, dict(skip_weights=-1e4)),      # in a sigmoid
    ("speedrun", dict(value_embed_layers=(0,)), {}, dict(value_embeds=0.0)),
    ("speedrun", dict(attn_gate_dim=0), {}, dict(attn_gate=0.0)),
    ("speedrun", dict(max_doc_len=0), dict(bos_id=60), {}),
    ("speedrun", dict(window_schedule=(0,), eval_window=0), dict(window_schedule=(0,), eval_window=24), {}),
    ("gpt2", dict(logit_softcap=0.0), dict(logit_softcap=1e4), {}),
    ("gpt2", dict(value_embed_layers=(0,)), {}, dict(value_embeds=0.0)),
    ("gpt2", dict(num_kv_heads=0), dict(num_kv_heads=4), {}),
    ("gpt2_plus", dict(smear_dim=0), {}, dict(smear=0.0)),
    ("gpt2_plus", dict(backout_layer=0), {}, dict(backout=0.0)),
    ("gpt2_plus", dict(attn_scale=0.0), dict(attn_scale=12**-0.5), {})]


@pytest.mark.parametrize("preset, off, constants, weights", NEUTRAL)
@torch.no_grad()
def test_what_is_off_changes_nothing(preset, off, constants, weights):
    without = randomised(small(preset, **off))
    having = randomised(small(preset, **constants), seed=1)
    as_is = randomised(small(preset), seed=1)
    own = dict(without.named_parameters())
    for model in (having, as_is):
        for name, p in model.named_parameters():
            if name in own and own[name].shape == p.shape:
                p.copy_(own[name])
    for name, p in having.named_parameters():
        if kind_of(name) in weights:
            p.fill_(weights[kind_of(name)])
        if "attn_gate" in weights and kind_of(name) == "attn_proj":
            p.mul_(2.0)     # sigmoid(0) is a half
    tokens = some_tokens(without.cfg, 2, 23) % 59
    want = log_probs(without, tokens)
    close(log_probs(having, tokens), want, 1e-4)
    assert weights == {} or (log_probs(as_is, tokens) - want).abs().max() > 1e-3


OFF = [("tiny", dict(bigram_rows=0)),
       ("tiny", dict(count_orders=(0,), count_words=(0,), copy_orders=(0,))), ("tiny", dict(memory=False)),
       ("tiny", dict(mixture=False)), ("tiny", dict(unet_skips=False)),
       ("tiny", dict(value_embed_layers=(0,))), ("golf_plus", dict(skip_mix=False)),
       ("speedrun", dict(attn_gate_dim=0)), ("speedrun", dict(smear_dim=0)),
       ("speedrun", dict(backout_layer=0)),
       ("speedrun", dict(skip_layers=(0,))), ("gpt2", dict(value_embed_layers=(0,))),
       ("gpt2_plus", dict(smear_dim=0)), ("gpt2_plus", dict(backout_layer=0))]


@pytest.mark.parametrize("preset, settings", [*((preset, {}) for preset in TOY), *OFF])
def test_each_part_matters(preset, settings):
    """The reference and the model could both ignore a parameter: every one has a gradient. A part that is off
    has no parameters."""
    cfg = small(preset, **settings)
    model = randomised(cfg)
    assert len(values(model)) < len(values(small(preset).make_model())) or not settings
    tokens = some_tokens(cfg, 2, 25)
    model(tokens[:, :-1], tokens[:, 1:], make_context(model, 24, 16)).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name


@pytest.mark.parametrize("preset", TOY)
def test_log_probs_of_any_shape(preset, tmp_path):
    """B and T are free on a freshly loaded model, whatever was called before; each row is scored as if alone,
    and a beginning as if nothing followed; beyond train_seq_len too those of tiny are the reference's."""
    cfg = small(preset)
    path = tmp_path / "artifact"
    path.write_bytes(cfg.pack(fake_run(cfg, randomised(cfg))))
    used = train_gpt.load_model(path)[0]
    for B, T in ((2, 61), (1, 1), (3, 24), (1, 25), (2, 5), (5, 24), (1, 2)):
        tokens = some_tokens(cfg, B, T, seed=T)
        with torch.no_grad():
            want = log_probs(train_gpt.load_model(path)[0], tokens)
            assert want.shape == (B, T, cfg.vocab_size) and torch.equal(log_probs(used, tokens), want)
            if preset == "tiny":
                close(want[0].double(), reference_log_probs(used, tokens[0]), 1e-4)
            for i in range(B):
                close(log_probs(used, tokens[i:i + 1])[0], want[i])
            for t in {1, T // 3 + 1, T - 1} - {0}:
                close(log_probs(used, tokens[:, :t]), want[:, :t])
            # other calls: bf16, another window
            rounded = log_probs(used, tokens, make_context(used, T, dtype=torch.bfloat16))
            assert rounded.dtype == torch.float32 and (rounded - want).abs().mean() < 0.05 * want.std() + 0.01
            log_probs(used, tokens, make_context(used, T, 4))
        used(tokens, tokens, make_context(used, T, 6)).backward()


# ------------------------------------------------------------ parameters
@pytest.mark.parametrize("preset", RECIPES)
def test_the_table_has_a_row_for_every_kind(preset):
    """The recipe as it is has every row's kind, and no other; Muon's rows are matrices."""
    cfg = train_gpt.preset_config(preset)
    cfg = replace(cfg, vocab_size=cfg.vocab_size or 64)
    table = cfg.parameter_table()
    with torch.device("meta"):
        shapes = {kind_of(name): p.dim() for name, p in cfg.make_model().named_parameters()}
    assert shapes.keys() == table.keys() and all(row.kind == kind for kind, row in table.items())
    muon = {kind for kind, row in table.items() if row.optimizer == "muon"}
    assert {"query", "key", "value", "attn_proj", "fc", "mlp_proj"} <= muon
    assert all(shapes[kind] == 2 for kind in muon)


def test_a_parameter_without_a_row_raises():
    cfg = small("tiny")
    model = cfg.make_model()
    model.blocks[1].other = nn.Parameter(torch.zeros(3))
    with pytest.raises(train_gpt.Refused, match=r"blocks.1.other has no row in parameter_table\(\)"):
        train_gpt.Optimizer(model, cfg)
    for use in (lambda: init_parameters(model, 0), lambda: train_gpt.pack_artifact(model)):
        with pytest.raises(KeyError, match="other"):
            use()


# ------------------------------------------------------------ init
CONSTANTS = dict(attn_proj=0, mlp_proj=0, head=0, value_embeds=0, bigram_embed=0, candidate_embed=0,
                 class_embed=0, class_scale=1, resid_lambda=1, x0_lambda=0, layer_scale=1, skip_weights=1,
                 qk_gain=1.25, gate_weight=0, gate_class=0, gate_matches=0)


def test_first_values_of_tiny():
    """Each parameter is drawn by itself."""
    model = small("tiny", model_dim=192, vocab_size=2000, qk_gain_init=1.25).make_model()
    init_parameters(model, 3)
    assert not torch.equal(model.blocks[0].query, model.blocks[1].query)
    for name, p in values(model).items():
        kind = kind_of(name)
        bound = p.size(-1) ** -0.5
        if kind in ("query", "key", "value", "fc"):
            assert 0.95 * bound < p.abs().max() < 1.0001 * bound, name
            assert p.std() == pytest.approx(bound / 3**0.5, rel=0.05) and abs(p.mean()) < 0.05 * bound, name
        elif kind == "embed":
            assert p.std() == pytest.approx(1.0, rel=0.02) and p.abs().max() > 3.5
        else:
            assert (p == CONSTANTS[kind]).all(), name


def test_bigrams_are_counted_in_parts():
    """Also the pair where one part of 4,194,304 tokens ends and the next begins."""
    text = np.zeros((1 << 22) + 3, np.uint16)
    text[1 << 22] = 2
    text[-1] = 1
    counts = train_gpt.bigram_counts(text, 3)
    assert counts.tolist() == [[(1 << 22) - 1, 1, 1], [0, 0, 0], [1, 0, 0]]
    assert train_gpt.bigram_counts(text[:1], 3).sum() == 0


def test_first_values_from_bigrams_predict_them():
    """Nearly, where the width is no less than the vocabulary."""
    text = np.random.default_rng(0).integers(0, 12, 2000) ** 2 // 12
    counts = train_gpt.bigram_counts(text.astype(np.uint16), 12)
    unigram = (counts.sum(0) + 1) / (counts.sum() + 12)
    expected = torch.from_numpy((counts + 4 * unigram) / (counts.sum(1, keepdims=True) + 4)).float()
    embed, head = train_gpt.factorize_bigrams(counts, 16, 1)
    assert ((embed @ head.T).softmax(-1) - expected).abs().sum(-1).max() < 0.05
    torch.testing.assert_close(embed.square().mean(-1), torch.ones(12))
    # with fewer channels the common tokens are fitted best
    embed, head = train_gpt.factorize_bigrams(counts, 4, 1)
    errors = ((embed @ head.T).softmax(-1) - expected).abs().sum(-1)
    common = counts.sum(1).argsort().tolist()
    assert embed.shape == head.shape == (12, 4) and errors[common[-3:]].max() < errors[common[:3]].max() < 1


def with_rows(cfg, change):
    """cfg with another parameter table: each Row as the function makes it."""
    class Changed(type(cfg)):
        def parameter_table(self):
            return {kind: change(row) for kind, row in super().parameter_table().items()}
    return Changed(**vars(cfg))


def with_columns(cfg, **kinds):
    """cfg with {column: value} in place of a kind's own."""
    return with_rows(cfg, lambda row: row._replace(**kinds.get(row.kind, {})))


def test_first_values_follow_the_table():
    """Drawn: bounds and spread of each law; constants that change over the layers."""
    cfg = with_columns(
        small("tiny", model_dim=192), query=dict(init="uniform", scale=2.0),
        fc=dict(init="positive", scale=0.5), key=dict(init="normal", scale=0.3),
        value=dict(init="orthogonal", scale=2.0), x0_lambda=dict(scale=0.2, change=-0.15))
    found = train_gpt.init_parameters(cfg.make_model(), 1)
    bound = 2 * cfg.model_dim ** -0.5
    assert found["blocks.1.query"].abs().max() <= bound
    assert found["blocks.1.query"].std().item() == pytest.approx(bound / 3 ** 0.5, rel=0.02)
    fc = found["blocks.2.fc"]
    assert fc.min() >= 0 and fc.max() <= 0.5 and fc.mean().item() == pytest.approx(0.25, rel=0.02)
    assert found["blocks.0.key"].std().item() == pytest.approx(0.3, rel=0.02)
    value = found["blocks.0.value"]
    close(value @ value.T, 4 * torch.eye(len(value)), 1e-4)
    lambdas = [found[f"blocks.{i}.x0_lambda"][0].item() for i in range(4)]
    assert lambdas == pytest.approx([0.2, 0.15, 0.1, 0.05])


@pytest.mark.parametrize("preset", RECIPES)
@torch.no_grad()
def test_what_a_model_reads_is_in_its_files(preset):
    """Constants that change what a model computes are marked model=True, so a file is scored with its own.
    Only those that say which stage is the last are read besides."""
    cfg = test_speedrun_plus.small() if preset == "speedrun_plus" else small(preset)
    names = {constant.name for constant in fields(cfg)}
    read = set()

    class Recorded(type(cfg)):
        def __getattribute__(self, name):
            if name in names:
                read.add(name)
            return super().__getattribute__(name)

    object.__setattr__(cfg, "__class__", Recorded)
    model = cfg.make_model()
    built = set(read)
    init_parameters(model, 0)  # learning rates, too
    read.clear()
    log_probs(model, some_tokens(cfg, 2, 24))
    read |= built
    stages = {"batch_schedule", "doc_schedule", "extension_iterations", "iterations", "next_targets",
              "prefix_weight", "seq_schedule", "stage_starts", "train_batch_tokens"}
    of_model = {constant.name for constant in fields(cfg) if constant.metadata["model"]}
    assert len(read) > 7 and read - of_model <= stages
