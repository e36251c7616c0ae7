"""speedrun_plus beyond its golden numbers: its techniques against plain definitions, attention with two
widths on every path, fp8 with delayed scales, what is refused. End to end: test_plus.py."""
import json
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

import train_gpt
from helpers import init_parameters, train_tokenizer
from test_kernels import seen_by_each, two_rows
from train_gpt import Refused, SpeedrunPlusKernels, load_config, preset_config, window_mask

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
# every side a multiple of 16, for fp8
SMALL = dict(
    vocab_size=64, bos_id=3, model_dim=64, num_heads=4, qk_dim=12, bigram_rows=48, bigram_sign_rows=8,
    mudd_dim=8, mudd_gate_dim=8, dc_window=7, window_block=4, window_schedule=(12, 28, 44, 52),
    eval_window=80, train_seq_len=64, train_batch_tokens=128, max_doc_len=20, doc_schedule=(20, 20, 20, 20))


def small(**settings):
    cfg = replace(preset_config("speedrun_plus"), **SMALL | settings)
    cfg.check()
    return cfg


def randomised(cfg, kernels=SpeedrunPlusKernels(), seed=0):
    """A model whose parameters all matter."""
    model = cfg.make_model(kernels)
    init_parameters(model, seed)
    draw = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data += 0.05 * torch.randn(p.shape, generator=draw)
    return model


def some_tokens(rows=2, T=64, vocab=64, seed=1):
    tokens = torch.randint(vocab, (rows, T + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# ---------------------------------------------------------------- attention
def tensors(T, widths=(12, 12, 16), heads=4, rows=2, seed=0):
    """q, k, v (rows, T, heads, width)"""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, T, heads, width, generator=draw).requires_grad_() for width in widths]


def dense(q, k, v, seen):
    """Outputs (B, T, H, E) and weights (B, H, T, T) by the definition. seen (B, T, T)."""
    scores = torch.einsum("bthd,bshd->bhts", q, k).masked_fill(~seen[:, None], -torch.inf)
    weights = scores.softmax(-1)
    return torch.einsum("bhts,bshe->bthe", weights, v), weights


def flex_mask(window, *rest):
    return train_gpt.gpu_window_mask(torch.tensor(window), *rest)


PATHS = {
    "reference": (window_mask, train_gpt.attention), "cpu": (window_mask, train_gpt.cpu_attention),
    "flex": (flex_mask, train_gpt.gpu_attention)}


@pytest.mark.parametrize("window", [7, 100, 200, 511])
@pytest.mark.parametrize("path", PATHS)
def test_queries_narrower_than_values(path, window, monkeypatch):
    """Values, and where a CPU has them gradients, of every kernel with two widths."""
    T = 512
    mask_of, attention = PATHS[path]
    q, k, v = tensors(T)
    documents = two_rows(T)
    want, _ = dense(q, k, v, seen_by_each(window, T, documents))
    with monkeypatch.context() as patch:
        if path in ("cpu", "flex"):
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
        mask = mask_of(window, T, documents, CPU)
        if path == "flex":
            patch.undo()
        given = [x.detach() for x in (q, k, v)] if path == "flex" else (q, k, v)
        got = train_gpt.attend_heads(*given, mask, attention)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    if path != "flex":
        side = torch.randn(want.shape, generator=torch.Generator().manual_seed(0))
        grads = [torch.autograd.grad(y, (q, k, v), side) for y in (got, want)]
        for mine, exact in zip(*grads):
            torch.testing.assert_close(mine, exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("T", [1, 5, 13, 14, 15, 64, 97])
@pytest.mark.parametrize("window", [1, 2, 7])
def test_dynamic_attention_equals_its_definition(T, window):
    """Values and gradients: patterns of all heads over few keys of the document, mixed and spread. Its cost
    is that of the window."""
    q, k, v = tensors(T)
    draw = torch.Generator().manual_seed(T)
    mix, spread = (torch.randn(2, T, 4, generator=draw).requires_grad_() for _ in range(2))
    documents = torch.stack([torch.arange(T) // 9, torch.arange(T) // 41])
    _, weights = dense(q, k, v, seen_by_each(window - 1, T, documents))
    normed = mix * (mix.square().mean(-1, keepdim=True) + 1e-6)**-0.5
    pattern = torch.einsum("bth,bhts->bts", normed, weights)
    want = spread[..., None] * torch.einsum("bts,bshe->bthe", pattern, v)
    mask = train_gpt.dynamic_mask(window, documents)
    got = train_gpt.dynamic_attention(q, k, v, mix, spread, mask)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    inputs = q, k, v, mix, spread
    for mine, exact in zip(*(torch.autograd.grad(y.square().sum(), inputs) for y in (got, want))):
        # sums of many terms: what is near 0 has the error of the largest one
        torch.testing.assert_close(mine, exact, atol=1e-5 * exact.abs().max().item(), rtol=1e-4)
    assert mask.numel() <= 2 * 2 * window * (T + 2 * window)


# ---------------------------------------------------------------- losses, prefixes
def test_texts_of_sentencepiece_tokens():
    import sentencepiece
    model = train_tokenizer(["ein Haus am See, zwei Häuser"] * 50, vocab_size=290)
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    cfg = small(vocab_size=320)
    texts = train_gpt.texts_of_tokens(cfg, sp)
    assert len(texts) == 320 and texts[sp.vocab_size():] == [b""] * (320 - sp.vocab_size())
    assert texts[sp.unk_id()] == texts[sp.bos_id()] == b""
    ids = sp.encode("ein Häuser \x07 See")
    assert b"".join(texts[token] for token in ids).decode() == "ein Häuser \x07 See"


def test_texts_of_gpt2s_tokens(tmp_path):
    """Each byte is a character there: printed ones themselves, others from 256 on."""
    names = {"!": 0, "a": 1, "Ġthe": 2, "Ċ": 3, "é": 4, "<|endoftext|>": 5, "ÃŃ": 6}
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(names), "utf-8")
    texts = train_gpt.gpt2_texts(str(path))
    assert texts == [b"!", b"a", b" the", b"\n", b"\xe9", b"", b"\xc3\xad"]
    every = {chr(n): n for n in range(256 + 68)}
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(every), "utf-8")
    with pytest.raises(Refused, match="damaged.json.*data gpt2-vocab"):
        train_gpt.gpt2_texts(str(path))
    with pytest.raises(Refused, match="missing.json.*data gpt2-vocab.*PREFIX_WEIGHT=0"):
        train_gpt.gpt2_texts(str(tmp_path / "missing.json"))


def test_the_prefix_table_is_built_from_the_tokenizer():
    cfg = small()
    model = cfg.make_model()
    said = []
    assert (model.prefixes == -1).all()
    pieces = [b"a", b"ab", b"abc", b"b"]
    tokenizer = SimpleNamespace(
        vocab_size=lambda: 4, id_to_piece=lambda i: pieces[i].decode(), is_byte=lambda i: False,
        is_control=lambda i: False, is_unknown=lambda i: False, is_unused=lambda i: False)
    table = model.prefixes
    run = SimpleNamespace(data=SimpleNamespace(tokenizer=tokenizer), log=said.append)
    assert model.build(run, fresh=True)
    assert model.prefixes is table and table.tolist() == [-1, 0, 1] + [-1] * 61     # compiled steps hold it
    assert said == ["prefix tokens: 2 of 64 tokens have one"]
    assert not small(prefix_weight=0.0).make_model().build(run, fresh=True)


# ---------------------------------------------------------------- constants that turn a part off
@pytest.mark.parametrize("settings", [
    dict(key_offset=False), dict(dc_window=0), dict(bigram_sign_rows=0), dict(xsa_layers=()),
    dict(head_gate_layers=()), dict(next_targets=1), dict(prefix_weight=0.0), dict(muon_pairs=False),
    dict(adam_weight_decay=0.0), dict(weight_decay=0.0), dict(untie_at=0.0), dict(logit_shift=0.0),
    dict(window_pattern="SSSLSS-SSSL"), dict(adam_every=1)])
def test_a_part_can_be_turned_off(settings):
    """Losses and gradients are finite and other ones, or the step is."""
    losses, weights = two_steps(small(**settings))
    plain_losses, plain_weights = two_steps(small())
    assert weights.isfinite().all()
    assert losses != plain_losses or not torch.equal(weights, plain_weights)


@cache
def two_steps(cfg):
    """(losses, weights)"""
    model = randomised(cfg)
    if model.prefixes is not None:
        model.prefixes.copy_(torch.arange(64) // 2 - 1)
    optimizer = cfg.optimizer()(model, cfg)
    context = model.context(64, CPU, torch.float32, cfg.stages()[0])
    model.update_context(context, 0.0)
    losses = []
    for step in range(2):
        loss = model(*some_tokens(), context)
        optimizer.backward(loss)
        optimizer.step(cfg.schedule(step, cfg.progress(step, 0)))
        losses.append(loss.item())
    return losses, torch.cat([w.flatten() for w in optimizer.weights().values()])


@pytest.mark.parametrize("settings, sentence", [
    (dict(NUM_LAYERS="12"), "num_layers=12: window_pattern=PSPLSP-SSPL has 11 layers"),
    (dict(WINDOW_PATTERN="PSPLSPSSSPL"), "and nowhere else"),
    (dict(WINDOW_PATTERN="XSPLSP-SSPL"), "each L, S, P or -"),
    (dict(XSA_LAYERS="6"), "layer 6 has no attention"), (dict(HEAD_GATE_LAYERS="11"), "layer 11"),
    (dict(XSA_LAYERS="2"), "not for paired heads"), (dict(VALUE_EMBED_LAYERS="2,10"), "must hold 1 and 10"),
    (dict(SKIP_LAYERS="6,3"), "in rising order"), (dict(GATE_LAYER="7"), "must not be after the second"),
    (dict(ATTN_SOURCE="10"), "before the last layer"), (dict(NUM_HEADS="3"), "must be even"),
    (dict(QK_DIM="90"), "a multiple of 4"), (dict(EVAL_WINDOW="2000"), "not a multiple of window_block"),
    (dict(WINDOW_SCHEDULE="1,2"), "speedrun_plus has 4 stages"), (dict(FP8_HEAD_MOST="1,2"), "three numbers"),
    (dict(VALUE_GATE_DIM="13"), "must be even"), (dict(SMEAR_DIM="800"), "may not exceed model_dim")])
def test_what_cannot_be_is_refused_in_a_sentence(settings, sentence):
    with pytest.raises(Refused, match=sentence):
        load_config({"PRESET": "speedrun_plus"} | settings)


@pytest.mark.parametrize("settings", [dict(SMEAR_DIM="768"), dict(VALUE_GATE_DIM="1536")])
def test_gates_may_read_the_whole_stream(settings):
    load_config({"PRESET": "speedrun_plus"} | settings)


# ---------------------------------------------------------------- fp8
@pytest.mark.parametrize("part", ["fp8_head", "fp8_qkv", "fp8_mlp"])
def test_each_part_of_fp8_is_a_constant(part, monkeypatch):
    off = {name: False for name in ("fp8_head", "fp8_qkv", "fp8_mlp")}
    kernels = [small(fp8="all", **off | {part: on}).choose_kernels(False, lambda line: None)
               for on in (False, True)]
    without, having = map(vars, kernels)
    name = {"fp8_head": "loss", "fp8_qkv": "qkv", "fp8_mlp": "mlp"}[part]
    assert [field for field in having if having[field] != without[field]] == [name]
    assert kernels[0] == small(fp8="auto-all").choose_kernels(False, lambda line: None)


def test_scales_follow_the_last_micro_step():
    """1.25 times its largest magnitudes, but not below the floors; the step itself used those before."""
    cfg = small(fp8="all")
    model = randomised(cfg, cfg.choose_kernels(False, lambda line: None))
    optimizer = cfg.optimizer()(model, cfg)
    context = model.context(64, CPU, torch.float32, cfg.stages()[2])
    first = model.scales.values.detach().clone()
    assert [448 * x for x in first[5].tolist()] == pytest.approx([8, 16, 1])
    inputs = []
    real = train_gpt.Fp8MLP.apply

    def apply(x, fc, proj, scales, transpose):
        inputs.append((x.abs().amax().item(), scales.detach().clone()))
        return real(x, fc, proj, scales, transpose)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt.Fp8MLP, "apply", apply)
        for seed in (1, 2):
            optimizer.backward(model(*some_tokens(seed=seed), context))
    assert all(torch.equal(scales, first[i % 11]) for i, (_, scales) in enumerate(inputs))
    optimizer.step(train_gpt.Schedule(1.0, 0.9))
    now = model.scales.values.detach()
    assert now[:, 0].tolist() == pytest.approx([1.25 / 448 * largest for largest, _ in inputs[11:]], rel=1e-5)
    assert (now > 0).all() and not torch.equal(now, first)
    optimizer.backward(model(*some_tokens(), context) * 0)
    optimizer.step(train_gpt.Schedule(1.0, 0.9))
    assert model.scales.values[:, 2].tolist() == pytest.approx([1e-7] * 11)
    optimizer.begin(train_gpt.init_parameters(model, 1))  # as after the warmup
    assert torch.equal(model.scales.values, first)


def test_scales_of_a_checkpoint():
    """A rank takes its own; the largest of all where there were more or fewer ranks; none: the first ones."""
    scales = train_gpt.DelayedScales(2)
    first = scales.values.detach().clone()
    stored = torch.rand(2, 2, 3, generator=torch.Generator().manual_seed(0))

    def restored(whole, rank, ranks):
        scales.restore(whole, ranks, rank)
        return scales.values.detach().clone()

    assert all(torch.equal(restored(stored, rank, 2), stored[rank]) for rank in range(2))
    assert torch.equal(restored(stored, 0, 1), stored.amax(0))
    assert torch.equal(restored(None, 0, 1), first)
    assert torch.equal(scales.of_ranks(1), first[None])


def test_warmup_has_updates_of_the_tied_and_of_the_untied_embedding(monkeypatch):
    """On one rank lm_head's gradient has another dtype than the embedding's, so the first update after
    untying compiled on the clock."""
    cfg = train_gpt.load_config({"PRESET": "speedrun_plus"})
    tied = []
    monkeypatch.setattr(train_gpt, "train_step", lambda *args: tied.append(args[-1].tied))
    for name in ("compile_step", "init_parameters", "mean_of_ranks"):
        monkeypatch.setattr(train_gpt, name, lambda *args: None)
    model = MagicMock(candidates=lambda *tokens: ())
    team = SimpleNamespace(world_size=64, device="cpu", dtype=torch.float32)
    train_gpt.warm_up(SimpleNamespace(cfg=cfg, team=team, model=model, optimizer=MagicMock(), micro=1,
                                      loss_fn=None))
    assert tied[0] and not tied[-1]
