"""Muon and Adam against torch's own, banks, rows of the parameter table, ranks, and the schedules."""

import math
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fork_server
import train_gpt
from tools.run import plan
from helpers import ROOT, add_gradients
from test_model import close, randomised, small, values
from train_gpt import Optimizer, Refused, Schedule, kind_of

pytestmark = pytest.mark.usefixtures("one_thread")
SIZE = dict(vocab_size=70, model_dim=24, num_heads=4, mlp_mult=2)
# Five layers, so that neither 2 nor 3 ranks share their matrices evenly
TINY = small("tiny", **SIZE, num_layers=5, value_embed_layers=(1, 0), window_pattern="SL", bigram_rows=40,
             bigram_every=1)
GOLF = small("golf", **SIZE, num_layers=5, num_kv_heads=2)
GOLF_PLUS = small("golf_plus", **SIZE, num_layers=5, num_kv_heads=2)
SPEEDRUN = small("speedrun", **SIZE)
GPT2 = small("gpt2", **SIZE, num_kv_heads=2, value_gate_dim=1)
GPT2_PLUS = small("gpt2_plus", **SIZE, num_kv_heads=2, value_gate_dim=1, smear_dim=3)


def with_rows(cfg, change):
    """cfg with another parameter table: each Row as the function makes it."""
    class Changed(type(cfg)):
        def parameter_table(self):
            return {kind: change(row) for kind, row in super().parameter_table().items()}
    return Changed(**vars(cfg))


def with_columns(cfg, **kinds):
    """cfg with {column: value} in place of a kind's own."""
    return with_rows(cfg, lambda row: row._replace(**kinds.get(row.kind, {})))


def some_gradients(model, step):
    """{name: gradient}, scales from 1e-3 to 10, the same for every model of this shape."""
    generator = torch.Generator().manual_seed(1000 + step)
    gradients = {}
    for i, (name, p) in enumerate(model.named_parameters()):
        gradients[name] = torch.randn(p.shape, generator=generator) * 10 ** (i % 5 - 3)
    return gradients


def take_step(model, optimizer, step, factor=1.0, momentum=0.9, *more):
    """Gradients are added, as a backward does: what a step leaves behind stays in."""
    add_gradients(optimizer, some_gradients(model, step))
    optimizer.step(Schedule(factor, momentum, *more))


def muon_names(cfg, model):
    """Names of the parameters that Muon updates."""
    table = cfg.parameter_table()
    return [name for name in values(model) if table[kind_of(name)].optimizer == "muon"]


@pytest.fixture
def torch_muon(monkeypatch):
    """torch.optim.Muon with our orthogonalization; its own is in bf16, too far off to compare the rest."""
    import torch.optim._muon as theirs

    def ours(grad, coefficients, steps, eps):
        assert tuple(coefficients) == (3.4445, -4.7750, 2.0315)
        return train_gpt.orthogonalize(grad[None], steps)[0]

    monkeypatch.setattr(theirs, "_zeropower_via_newtonschulz", ours)
    return lambda params, **options: torch.optim.Muon(
        params, weight_decay=0, nesterov=True, ns_steps=5, adjust_lr_fn="original", **options)


# ------------------------------------------------------------ update rules
def test_muon_equals_torch_on_a_model(torch_muon):
    """Every matrix of tiny through our Optimizer, learning rate and momentum changing from step to step."""
    model = randomised(TINY)
    twin = randomised(TINY)
    matrices = {name: twin.get_parameter(name) for name in muon_names(TINY, twin)}
    optimizer = Optimizer(model, TINY)
    reference = torch_muon(matrices.values(), lr=1.0)
    for step in range(10):
        gradients = some_gradients(model, step)
        factor = 1 - 0.05 * step
        momentum = 0.1 * step
        take_step(model, optimizer, step, factor, momentum)
        reference.param_groups[0].update(lr=TINY.matrix_lr * factor, momentum=momentum)
        for name, p in matrices.items():
            p.grad = gradients[name]
        reference.step()
    assert len(matrices) == 6 * TINY.num_layers
    for name, p in matrices.items():
        close(values(model)[name], p.detach())


def in_tiny(cfg):
    """{kind: (learning rate, beta1, beta2, weight decay)} of what Adam updates."""
    rates = dict.fromkeys(("embed", "value_embeds", "bigram_embed", "candidate_embed", "class_embed"),
                          cfg.embed_lr)
    rates |= dict.fromkeys(("class_scale", "qk_gain", "resid_lambda", "x0_lambda", "layer_scale",
                            "skip_weights", "gate_weight", "gate_class", "gate_matches"), cfg.scalar_lr)
    rates["head"] = cfg.head_lr
    return {kind: (lr, 0.8, 0.95, 0) for kind, lr in rates.items()}


def in_golf(cfg, decay=0.0, more=()):
    scalars = ("qk_gain", "resid_lambda", "x0_lambda", "layer_scale", "skip_weights", *more)
    return dict.fromkeys(scalars, (cfg.scalar_lr, 0.9, 0.95, decay)) | {
        "embed": (cfg.tied_embed_lr, 0.9, 0.95, 4.25 * decay)}


def in_golf_plus(cfg):
    return in_golf(cfg, cfg.adam_weight_decay, ["skip_mix"])


def in_gpt2(cfg):
    return dict(
        embed=(cfg.embed_lr, 0.8, 0.95, 0), value_embeds=(cfg.embed_lr, 0.8, 0.95, 0),
        head=(cfg.head_lr, 0.8, 0.95, 0), resid_lambda=(0.01 * cfg.scalar_lr, 0.8, 0.95, 0),
        x0_lambda=(cfg.scalar_lr, 0.96, 0.95, 0))


def in_gpt2_plus(cfg):
    decay = cfg.adam_weight_decay
    gate_lr = cfg.gate_lr
    return dict(
        embed=(cfg.embed_lr, 0.8, 0.995, 0.1 * decay), head=(cfg.head_lr, 0.8, 0.96, decay),
        value_embeds=(0.5 * cfg.embed_lr, 0.8, 0.995, decay), x0_lambda=(cfg.scalar_lr, 0.96, 0.95, 0),
        resid_lambda=(0.01 * cfg.scalar_lr, 0.8, 0.95, 5 * decay), smear=(gate_lr, 0.8, 0.95, 0),
        smear_gate=(gate_lr, 0.8, 0.95, 0), backout=(gate_lr, 0.8, 0.95, 0))


@pytest.mark.parametrize("cfg, stated, every, twice", [
    (replace(TINY, scalar_lr=0.07, bigram_every=2), in_tiny, 1, {"bigram_embed": 2}),
    (with_rows(TINY, lambda row: row._replace(every=1 if row.optimizer == "muon" else 3)), in_tiny, 3, {}),
    (GOLF, in_golf, 1, {}),
    (replace(GOLF_PLUS, grad_clip_norm=0.0, ema_decay=0.0, adam_weight_decay=0.9), in_golf_plus, 1, {}),
    (GPT2, in_gpt2, 1, {}), (replace(GPT2_PLUS, adam_weight_decay=0.3), in_gpt2_plus, 1, {})],
    ids=["tiny", "tiny, every third step", "golf", "golf_plus", "gpt2", "gpt2_plus"])
def test_adam_equals_torch_on_a_model(cfg, stated, every, twice):
    """Every other parameter, each kind with its own learning rate, betas and decay; every third step on the
    sum of three gradients, bigrams at every second one. Matrices move at each step; a step zeroes the
    gradients that it used, no others."""
    model = randomised(cfg)
    twin = randomised(cfg)
    wanted = stated(cfg)
    matrices = muon_names(cfg, model)
    others = {name: p for name, p in twin.named_parameters() if name not in matrices}
    assert {kind_of(name) for name in others} == wanted.keys()
    groups = []
    for name, p in others.items():
        lr, beta1, beta2, decay = wanted[kind_of(name)]
        groups.append(dict(params=[p], lr=lr, betas=(beta1, beta2), weight_decay=decay))
    reference = torch.optim.AdamW(groups, eps=cfg.adam_eps)
    optimizer = Optimizer(model, cfg)
    sums = {}
    for step in range(1, 11):
        gradients = some_gradients(model, step)
        factor = 1 - 0.05 * step
        before = values(model)
        take_step(model, optimizer, step, factor)
        sums = {name: gradients[name] + sums.get(name, 0) for name in others}
        for name, p in model.named_parameters():
            moves = name in matrices or step % twice.get(kind_of(name), every) == 0
            bank = next(bank for bank in optimizer.banks if name in bank.names)
            assert torch.equal(p, before[name]) != moves and bank.fresh == moves, name
        for group, (name, p) in zip(reference.param_groups, others.items()):
            turn = step % twice.get(kind_of(name), every) == 0
            group["lr"] = wanted[kind_of(name)][0] * factor
            p.grad = sums.pop(name) if turn else None
        reference.step()
    for name, p in others.items():
        close(values(model)[name], p.detach())


@pytest.mark.parametrize("R, C", [(2, 1), (1, 2), (1, 1), (3, 3)])
@pytest.mark.parametrize("rows", [True, False])
def test_normuon_means_are_of_what_was_asked(R, C, rows):
    """Also of a matrix of one row or column, of which both have the same number of means."""
    update = torch.arange(1.0, 1 + R * C).view(1, R, C)
    v = torch.zeros(1, R, 1) if rows else torch.zeros(1, 1, C)
    train_gpt.normuon_scale(update, v, 0.5)
    assert torch.equal(v, 0.5 * update.square().mean(2 if rows else 1, keepdim=True))


def test_muon_may_add_gradients_up():
    """A matrix with every=2 moves at every second step, as far as by the sum of two gradients."""
    cfg = with_columns(TINY, fc=dict(every=2))
    model = randomised(cfg)
    twin = randomised(TINY)
    optimizer = Optimizer(model, cfg)
    plain = Optimizer(twin, TINY)
    gradients = [some_gradients(model, step) for step in (0, 1)]
    for step, gradient in enumerate(gradients):
        before = values(model)
        add_gradients(optimizer, gradient)
        optimizer.step(Schedule(1.0, 0.9))
        fc = [name for name in before if kind_of(name) == "fc"]
        assert all(torch.equal(before[name], values(model)[name]) != step for name in fc)
    add_gradients(plain, {name: gradients[0][name] + g for name, g in gradients[1].items()})
    plain.step(Schedule(1.0, 0.9))
    assert all(torch.equal(values(model)[name], values(twin)[name]) for name in fc)


@pytest.mark.parametrize("update", [train_gpt.adam_update, train_gpt.adam_update_early_eps])
def test_adam_corrects_its_start_before_eps_or_after(update):
    """With gradients of the size of eps, where it matters."""
    draw = torch.Generator().manual_seed(0)
    eps = 1e-3
    m, v, mean, square = (torch.zeros(50, dtype=torch.float64) for _ in range(4))
    for step in range(1, 6):
        g = eps * torch.randn(50, generator=draw, dtype=torch.float64)
        mean = 0.8 * mean + 0.2 * g
        square = 0.95 * square + 0.05 * g * g
        first = 1 - 0.8**step
        second = math.sqrt(1 - 0.95**step)
        early = update is train_gpt.adam_update_early_eps
        divisor = (square.sqrt() + eps) / second if early else square.sqrt() / second + eps
        numbers = [torch.tensor(x) for x in (1.0, 1.0, 0.0, 0.0, float(step))]
        state = train_gpt.UpdateState(g, g, m, v, *numbers, torch.float32, 0.8, 0.95, eps)
        close(update(state), mean / first / divisor, 1e-6)


def muon_alone(cfg, g, buffer, momentum, second=None):
    """What Muon subtracts at LR 1, of one step of a matrix or several; buffer and second change."""
    p = torch.zeros_like(g)
    numbers = [torch.tensor(x) for x in (1.0, 1.0, 0.0, momentum, 0.0)]
    cfg.muon_step(train_gpt.UpdateState(p, g, buffer, second, *numbers))
    return -p


def plain_update(weight, gradients, beta2, margin, lr, decay, second):
    """NorMuon on one matrix in float64 but for the orthogonalization: momentum 0.9, Nesterov, each row (or
    column: `second`; long: of a wide matrix) divided by its running rms, the norm put back, lr by the root of
    rows / columns if tall, cautious decay. Returns the weight and where the sign of no update is in doubt."""
    weight = weight.double()
    buffer = 0.0
    mean = 0.0
    sure = torch.ones(weight.shape, dtype=torch.bool)
    R, C = weight.shape
    rate = lr * math.sqrt(max(1, R / C))
    by_row = second == "rows" or second == "long" and R >= C
    for g in gradients:
        g = g.double()
        buffer = 0.9 * buffer + 0.1 * g
        ahead = (0.1 * g + 0.9 * buffer).float()[None]
        u = train_gpt.polar_express(ahead, 5, safety_factor=margin)[0].double()
        mean = beta2 * mean + (1 - beta2) * u.square().mean(1 if by_row else 0, keepdim=True)
        scaled = u / mean.sqrt()
        u = scaled * u.norm() / scaled.norm()
        weight = weight - rate * decay * weight * (weight * u >= 0) - rate * u
        sure &= u.abs() > 1e-4 * u.abs().max()
    return weight.float(), sure


@pytest.mark.parametrize("cfg, beta2, margin, sides", [
    (replace(SPEEDRUN, weight_decay=0.0), 0.95, 1.02, dict.fromkeys(
        ("query", "key", "value", "attn_proj"), "columns")),
    (with_columns(replace(GPT2, weight_decay=120.0), key=dict(second="rows")), 0.95, 1.02, dict(key="rows")),
    (replace(GPT2_PLUS, weight_decay=120.0), 0.9, 1.01, {})], ids=["speedrun", "gpt2", "gpt2_plus"])
def test_matrices_equal_a_plain_update(cfg, beta2, margin, sides):
    """Square, tall and wide matrices of a model, ten steps; mean squares of the other side in some kinds."""
    model = randomised(cfg)
    optimizer = Optimizer(model, cfg)
    start = values(model)
    gradients = [some_gradients(model, step) for step in range(10)]
    shapes = set()
    for step in range(10):
        take_step(model, optimizer, step, 0.5, 0.9, 0.7)
    for name in muon_names(cfg, model):
        if "gate" in name:  # too few numbers for a share of doubtful ones
            continue
        shapes.add(start[name].shape)
        past = [step[name] for step in gradients]
        want, sure = plain_update(start[name], past, beta2, margin, 0.5 * cfg.matrix_lr,
                                  0.7 * cfg.matrix_lr * cfg.weight_decay, sides.get(kind_of(name), "long"))
        close(values(model)[name][sure], want[sure], 1e-4)
        assert sure.float().mean() > 0.98
    assert shapes == {(24, 24), (48, 24), (24, 48)} | ({(12, 24)} if "num_kv_heads" in vars(cfg) else set())
    for bank in optimizer.banks:
        if bank.row.optimizer == "muon":  # a mean square per row, or per column
            R, C = bank.my_data.shape[1:]
            assert bank.state[1][0].numel() == dict(rows=R, columns=C, long=max(R, C))[bank.row.second]


def test_normuon_of_no_gradient():
    assert train_gpt.normuon_scale(torch.zeros(1, 4, 6), torch.zeros(1, 1, 6), 0.95).abs().max() == 0


def test_a_weight_without_gradient_decays():
    """A matrix that was never used: its update is zero, which does not disagree."""
    cfg = replace(SPEEDRUN, weight_decay=5.0)
    model = randomised(cfg)
    optimizer = Optimizer(model, cfg)
    before = values(model)
    optimizer.step(Schedule(0.5, 0.9, 0.7))
    for name, p in values(model).items():
        decay = 0.0
        if name in muon_names(cfg, model):
            R, C = p.shape
            decay = 0.5 * 0.7 * 5.0 * cfg.matrix_lr**2 * math.sqrt(max(1, R / C))
        close(p, (1 - decay) * before[name], 1e-6)


@pytest.mark.parametrize("cfg, as_sum", [(TINY, False), (GOLF, True)], ids=["tiny", "golf"])
def test_momentum_is_a_mean_or_a_sum(cfg, as_sum):
    """The buffer is a mean or a sum of gradients; as the momentum changes they differ in more than size."""
    draw = torch.Generator().manual_seed(0)
    buffer = torch.zeros(2, 6, 8)
    plain = torch.zeros(2, 6, 8)
    for momentum in (0.5, 0.8, 0.95):
        g = torch.randn(2, 6, 8, generator=draw)
        new = 1 if as_sum else 1 - momentum
        plain = momentum * plain + new * g
        want = train_gpt.orthogonalize(new * g + momentum * plain, 5)
        close(muon_alone(cfg, g, buffer, momentum), want, 1e-4)
        close(buffer, plain)


@pytest.mark.parametrize("shape", [(2, 8, 32), (2, 32, 8)])
def test_products_of_muon_are_of_the_shorter_side(shape, monkeypatch):
    """A tall matrix is transposed: its products would else be those of the longer side."""
    sides = set()
    real = torch.baddbmm

    def baddbmm(x, first, second, **options):
        sides.add(first.shape)
        return real(x, first, second, **options)

    monkeypatch.setattr(torch, "baddbmm", baddbmm)
    assert train_gpt.orthogonalize(torch.randn(shape), 2).shape == shape
    assert sides == {(2, 8, 8)}


# ------------------------------------------------------------ orthogonalization
@pytest.mark.parametrize("method, least, most", [
    (train_gpt.orthogonalize, 0.6, 1.3), (train_gpt.polar_express, 0.7, 1.2)])
@pytest.mark.parametrize("shape", [(256, 1024), (1024, 256), (64, 300)])
def test_orthogonalized_gaussian(method, least, most, shape):
    """Of any size: singular values near 1, the directions kept."""
    g = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(g[0], full_matrices=False)
    for size in (1e-6, 1e6):
        x = method(g * size, 5)[0]
        singular = torch.linalg.svdvals(x)
        assert least <= singular.min() and singular.max() <= most
        assert torch.cosine_similarity(x.flatten(), (left @ right).flatten(), 0) > 0.98
    single = torch.linalg.svdvals(method(g[:, :, :1] @ g[:, :1], 5)[0])
    assert least <= single[0] <= most  # of rank one: nothing diverges where all is in one direction
    assert method(torch.zeros(2, 4, 6), 5).abs().max() == 0  # without gradient


@pytest.mark.parametrize("shape", [(48, 48), (64, 256), (256, 64)])
def test_polar_express_is_nearer_to_orthogonal(shape):
    """Its first five iterations, of which the fifth repeats: singular values near 1 from small ones, too."""
    left, sizes, right = torch.linalg.svd(torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)),
                                          full_matrices=False)
    g = left @ torch.diag_embed(torch.logspace(-2, 0, sizes.size(-1)).expand_as(sizes)) @ right

    def far(steps, method):
        return (torch.linalg.svdvals(method(g, steps)) - 1).abs()

    assert far(5, train_gpt.polar_express).mean() < min(0.1, far(5, train_gpt.orthogonalize).mean())
    assert far(8, train_gpt.polar_express).max() < 0.1


# ------------------------------------------------------------ rows of the parameter table
def changes(cfg):
    """{name: what one step adds to the parameter}"""
    model = randomised(cfg)
    optimizer = Optimizer(model, cfg)
    before = values(model)
    take_step(model, optimizer, 0, 0.5)
    return {name: p - before[name] for name, p in values(model).items()}


@pytest.mark.parametrize("cfg, kinds", [
    (replace(SPEEDRUN, weight_decay=0.0), {"attn_gate": (4, 12), "smear_gate": (1, 12), "fc": (48, 24)}),
    (replace(GPT2, weight_decay=0.0), {"value_gate": (2, 1)})], ids=["speedrun", "gpt2"])
def test_gates_by_muon_or_adam(cfg, kinds):
    """By Muon they move as a matrix does, a tall one further. By Adam the first step is the learning rate,
    whatever the gradient; all others move as before."""
    by_adam = dict(optimizer="adam", lr=cfg.scalar_lr, every=1)
    before = changes(cfg)
    after = changes(with_columns(cfg, **dict.fromkeys(kinds, by_adam)))
    for name, gradient in some_gradients(randomised(cfg), 0).items():
        if kind_of(name) in kinds:
            R, C = gradient.shape
            assert (R, C) == kinds[kind_of(name)]
            second = torch.zeros(1, R, 1) if R >= C else torch.zeros(1, 1, C)
            update = muon_alone(cfg, gradient[None], torch.zeros(1, R, C), 0.9, second)[0]
            close(before[name], -0.5 * cfg.matrix_lr * math.sqrt(max(1, R / C)) * update, 1e-6)
            close(after[name], -0.5 * cfg.scalar_lr * gradient.sign(), 1e-3)
        else:
            assert torch.equal(after[name], before[name]), name


def test_rates_and_decay_are_of_a_row():
    """The learning rate multiplies the step, the decay that of its row alone; only matrices decay."""
    cfg = replace(GPT2, weight_decay=70.0)
    off = replace(GPT2, weight_decay=0.0)
    plain = changes(off)
    decayed = changes(cfg)
    faster = changes(with_columns(off, query=dict(lr=3 * cfg.matrix_lr), embed=dict(lr=cfg.embed_lr / 4)))
    decay = 70 * cfg.matrix_lr
    otherwise = changes(with_columns(cfg, fc=dict(decay=3 * decay), key=dict(decay=0.0)))
    for name in plain:
        kind = kind_of(name)
        close(faster[name], plain[name] * dict(query=3, embed=0.25).get(kind, 1), 1e-6)
        factor = dict(fc=3, key=0).get(kind, 1)
        close(otherwise[name] - plain[name], factor * (decayed[name] - plain[name]), 1e-6)
        if kind != "value_gate":  # of two numbers maybe none decays
            assert torch.equal(decayed[name], plain[name]) != (name in muon_names(cfg, randomised(cfg))), name


# ------------------------------------------------------------ banks
def outside(model, bank):
    """Mask of the numbers of a bank that belong to no parameter."""
    mask = torch.ones(bank.data.numel(), dtype=torch.bool)
    known = dict(model.named_parameters())
    for name in bank.names:
        here = slice(known[name].storage_offset(), known[name].storage_offset() + known[name].numel())
        assert mask[here].all(), "two parameters share a place"
        mask[here] = False
    return mask


@pytest.mark.parametrize("column", [dict(eps=1e-4), dict(decay_with_lr=True), dict(lr=1.0)])
def test_rows_of_one_group_that_differ_share_no_bank(column):
    """A bank is updated by one row."""
    def banks(cfg):
        optimizer = Optimizer(randomised(cfg), cfg)
        return [[kind_of(name) for name in bank.names] for bank in optimizer.banks]

    together = next(kinds for kinds in banks(TINY) if "resid_lambda" in kinds)
    assert "x0_lambda" in together
    apart = next(kinds for kinds in banks(with_columns(TINY, resid_lambda=column)) if "resid_lambda" in kinds)
    assert {*apart} == {"resid_lambda"}


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_banks_cover_the_model(world_size):
    model = randomised(TINY)
    before = values(model)
    optimizer = Optimizer(model, TINY, world_size - 1, world_size)
    assert sorted(name for bank in optimizer.banks for name in bank.names) == sorted(before)
    for bank in optimizer.banks:
        rest = outside(model, bank)
        assert bank.data.numel() % world_size == 0 and not bank.data[rest].any()
        assert rest.sum() + sum(before[name].numel() for name in bank.names) == bank.data.numel()
        for name in bank.names:
            p = dict(model.named_parameters())[name]
            grad = bank.views(bank.grad)[bank.names.index(name)]
            assert torch.equal(p, before[name]) and p.storage_offset() == grad.storage_offset()
            for view, flat in ((p, bank.data), (grad, bank.grad)):
                assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
                assert view.is_contiguous()


def test_data_gradients_and_state_are_all_that_a_step_changes():
    """Putting them and step_count back takes steps back, to the bit, also gradients that wait for Adam."""
    model = randomised(SPEEDRUN)
    optimizer = Optimizer(model, SPEEDRUN)
    found = []
    tensors = [t for bank in optimizer.banks for t in (bank.data, bank.grad, *bank.state)]
    kept = [t.clone() for t in tensors]
    for _ in range(2):
        for t, value in zip(tensors, kept):
            t.copy_(value)
        optimizer.step_count = 0
        for step in range(3):
            take_step(model, optimizer, step)
        found.append(values(model))
    assert all(torch.equal(p, found[1][name]) for name, p in found[0].items())


def test_bf16_weights_have_fp32_masters():
    """As on a GPU. Steps are those of fp32 up to what bf16 gradients lose."""
    model = randomised(SPEEDRUN)
    twin = randomised(SPEEDRUN)
    optimizer = Optimizer(model, SPEEDRUN, dtype=torch.bfloat16, muon_dtype=torch.float32)
    plain = Optimizer(twin, SPEEDRUN)
    before = values(twin)
    for bank in optimizer.banks:
        assert bank.data.dtype == torch.bfloat16 and bank.master.dtype == torch.float32
    for step in range(4):
        take_step(model, optimizer, step)
        take_step(twin, plain, step)
    masters = optimizer.weights()
    for name, p in values(twin).items():
        assert torch.equal(values(model)[name], masters[name].bfloat16())
        off = (masters[name] - p).norm()
        moved = (p - before[name]).norm()
        assert 0 < off <= 0.05 * moved, (name, float(off / moved))  # small sums differ in sign


@pytest.mark.parametrize("limit", [0.01, 3.0, 1e5])
def test_clipping_equals_torch(limit):
    model = randomised(TINY)
    twin = randomised(TINY)
    optimizer = Optimizer(model, replace(TINY, grad_clip_norm=limit))
    plain = Optimizer(twin, TINY)
    for step in range(3):
        take_step(model, optimizer, step)
        for name, gradient in some_gradients(twin, step).items():
            twin.get_parameter(name).grad = gradient
        torch.nn.utils.clip_grad_norm_(twin.parameters(), limit)
        add_gradients(plain, {name: p.grad for name, p in twin.named_parameters()})
        plain.step(Schedule(1.0, 0.9))
    for name, p in values(twin).items():
        close(values(model)[name], p, 1e-6)


# ------------------------------------------------------------ ranks
def test_collectives_are_under_way_while_others_compute(monkeypatch):
    """All gradients are sent at once; a bank is updated as its own arrive, and goes out as the next is."""
    events = []

    class Job:
        def __init__(self, kind, whole):
            self.what = f"{kind} {len(whole)}"
            events.append(self.what)

        def wait(self):
            events.append(f"wait {self.what}")

    def noted(update):
        return lambda *args: events.append("update") or update(*args)

    def collective(kind):
        return lambda output, given, async_op: Job(kind, max(output, given, key=len))

    monkeypatch.setattr(train_gpt, "reduce_scatter", collective("reduce"))
    monkeypatch.setattr(train_gpt, "all_gather", collective("gather"))
    model = randomised(TINY)
    optimizer = Optimizer(model, TINY, 0, 2)
    optimizer.muon_step = noted(optimizer.muon_step)
    optimizer.adam_step = noted(optimizer.adam_step)
    optimizer.step(Schedule(1.0, 0.9))
    sizes = [len(bank.data) for bank in optimizer.banks]
    each = [[f"wait reduce {n}", "update", f"gather {n}"] for n in sizes]
    assert len(sizes) > 3 and events[:len(sizes) * 4] == [*[f"reduce {n}" for n in sizes], *sum(each, [])]
    assert {f"wait gather {n}" for n in sizes} <= {*events[len(sizes) * 4:]}


@pytest.mark.parametrize("world_size, most", [(1, 1), (2, 2)])
@pytest.mark.parametrize("every, micro_steps", [(1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (3, 1)])
def test_gradients_add_up_in_fp32_unless_bf16_is_as_exact(every, micro_steps, world_size, most, monkeypatch):
    """Of one gradient, and between ranks of two, whose sum is rounded once anyway; and those of the tables.
    Where it is as exact, what is sent is the same as by a sum in fp32, to the bit."""
    sent = []
    monkeypatch.setattr(train_gpt, "reduce_scatter", lambda _, whole, **__: sent.append(whole))
    cfg = with_rows(TINY, lambda row: row._replace(every=every))
    model = randomised(cfg)
    optimizer = Optimizer(model, cfg, 0, world_size, dtype=torch.bfloat16)
    gradients = [some_gradients(model, n) for n in range(every * micro_steps)]
    for gradient in gradients:
        add_gradients(optimizer, gradient, micro_steps)
    for bank in optimizer.banks:
        table = bank.row.group in ("embed", "value_embed")
        exact = every * micro_steps <= most
        assert bank.grad.dtype == (torch.bfloat16 if table or exact else torch.float32), bank.names
        kept = bank.views(bank.grad)
        sent.clear()
        bank.reduce()
        if world_size > 1:
            whole, = sent
            assert whole.dtype == torch.bfloat16
            kept = bank.views(whole)
        for name, mine in zip(bank.names, kept):
            if exact or not table:
                total = sum(gradient[name].bfloat16().float() for gradient in gradients)
                assert torch.equal(mine, total.to(mine.dtype)), name


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_tells_how_many_micro_steps_it_has(parts):
    """train_step() to Optimizer.backward()."""
    said = []
    optimizer = SimpleNamespace(backward=lambda loss, micro_steps: said.append(micro_steps),
                                step=lambda *_: None)
    batch = (torch.zeros(4, 8), torch.zeros(4, 8))
    schedule = Schedule(1.0, 0.9)
    train_gpt.train_step(lambda *_: torch.zeros(()), optimizer, batch, 4 // parts, (), 1.0, schedule)
    assert said == [parts] * parts


@pytest.mark.parametrize("preset", train_gpt.RECIPES)
def test_the_warmup_updates_every_bank(preset):
    """So that each rule is compiled and each collective has its connection before the clock starts."""
    cfg = train_gpt.preset_config(preset)
    every = max(row.every for row in cfg.parameter_table().values())
    assert max(cfg.warmup_steps, len(cfg.stages())) >= every


RANK_CONFIGS = [
    replace(GOLF_PLUS, weight_decay=0.1, grad_clip_norm=20.0),
    # its embed_lr of 0.6 would make rounding as large as the tolerance
    with_columns(replace(SPEEDRUN, normuon_beta2=0.9, embed_lr=0.1), fc=dict(lr=SPEEDRUN.matrix_lr / 2))]


def rank_main(folder, rank, world_size):
    """One rank of test_ranks_equal_one_process: ten steps of each config, then its weights go to a file."""
    if world_size > 1:
        place = f"file://{folder}/meet{world_size}"
        torch.distributed.init_process_group("gloo", place, rank=rank, world_size=world_size)
    for i, cfg in enumerate(RANK_CONFIGS):
        model = randomised(cfg)
        optimizer = Optimizer(model, cfg, rank, world_size)
        for step in range(10):  # each rank has another gradient; their mean is the same for any world_size
            gradients = some_gradients(model, step)
            factor = 2 * (rank + 1) / (world_size + 1)
            micro = 1 if step in (2, 3, 5, 8) else 2  # both steps of an update, its second, its first
            for _ in range(micro):
                parts = [(p * gradients[name]).sum() for name, p in model.named_parameters()]
                optimizer.backward(sum(parts) * factor / micro, micro)
            optimizer.step(Schedule(1 - 0.05 * step, 0.9))
        padding = sum(float(bank.data[outside(model, bank)].abs().sum()) for bank in optimizer.banks)
        torch.save((values(model), padding), f"{folder}/{world_size}_{rank}_{i}.pt")
    if world_size > 1:
        torch.distributed.destroy_process_group()


def test_ranks_equal_one_process(tmp_path):
    """1, 2 and 3 ranks by gloo: neither 2 nor 3 share the matrices of every bank evenly."""
    for cfg in RANK_CONFIGS:
        banks = Optimizer(randomised(cfg), cfg).banks
        units = {bank.units for bank in banks if bank.row.optimizer == "muon"}
        assert any(n % 2 for n in units) and any(n % 3 for n in units)
    ranks = [(rank, n) for n in (2, 3) for rank in range(n)]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "said", "w+") as said:
        code = "import sys, test_optimizer; test_optimizer.rank_main(sys.argv[1], *map(int, sys.argv[2:]))"
        jobs = [fork_server.popen(["-c", code, tmp_path, *map(str, place)], tmp_path, env, said, said)
                for place in ranks]
        rank_main(tmp_path, 0, 1)
        assert [job.wait() for job in jobs] == [0] * 5, (tmp_path / "said").read_text()
    for i in range(len(RANK_CONFIGS)):
        alone, _ = torch.load(tmp_path / f"1_0_{i}.pt")
        for n in (2, 3):
            first = torch.load(tmp_path / f"{n}_0_{i}.pt")[0]
            for rank in range(n):
                weights, padding = torch.load(tmp_path / f"{n}_{rank}_{i}.pt")
                assert padding == 0
                for name in alone:
                    close(weights[name], alone[name], 5e-6)
                    assert torch.equal(weights[name], first[name]), "ranks differ"


# ------------------------------------------------------------ schedules
def simulated_run(cfg, seconds_per_step):
    """[(step, progress, LR factor)] of a run whose steps all take the same time."""
    rows = []
    step = 0
    progress = 0.0
    while progress < 1 and step <= train_gpt.total_steps(cfg):
        progress = cfg.progress(step, step * seconds_per_step)
        rows.append((step, progress, cfg.schedule(step, progress).lr))
        step += 1
    return rows


@pytest.mark.parametrize("slowdown", [1, 10, 500])
@pytest.mark.parametrize("iters", [None, 1, 100, 3000, 10**6])
def test_lr_factor_over_a_run(iters, slowdown):
    """Full LR, then straight down: in tiny over the second half of the run to its floor; in golf to 0 over as
    many last steps as are asked for, on any hardware. With a cap they are those before the cap, and where
    they are more than fit into it, LR falls from the second step on."""
    for cap, iterations, floor in ((600.0, 20_000, 0.0), (600.0, 1500, 0.1), (0.0, 2000, 0.05)):
        if iters:
            cfg = replace(GOLF, warmdown_iters=iters)
            floor = 0.0
        else:
            cfg = replace(TINY, lr_floor=floor)
        cfg = replace(cfg, iterations=iterations, max_wallclock_seconds=cap)
        pace = 0.07147 * slowdown
        rows = simulated_run(cfg, pace)
        factors = [factor for _, _, factor in rows]
        again = [cfg.schedule(step, progress).lr for step, progress, _ in rows[::-1]]
        assert again == factors[::-1]  # a pure function
        fit = cap / pace if cap else iterations  # steps, also in part
        end = fit if iters else min(fit, iterations)
        left = [max(0, end - step) / (iters or end / 2) if step else 1 for step in range(len(rows))]
        assert factors == pytest.approx([floor + (1 - floor) * min(1, part) for part in left], abs=1e-9)
        assert all(a >= b for a, b in zip(factors, factors[1:]))
        assert len(rows) > iterations or rows[-1][1] == 1 and factors[-1] == pytest.approx(floor, abs=1e-12)


def test_warmdown():
    """In steps, at the pace of golf's record (8394 in 600 s): the last 3000. Or as a part of the run."""
    cfg = replace(GOLF, iterations=20_000, max_wallclock_seconds=600.0)
    rows = {step: factor for step, _, factor in simulated_run(cfg, 600 / 8394)}
    assert rows[5390] == 1 and rows[5400] < 1
    assert [rows[8394 - left] for left in (1500, 300)] == pytest.approx([0.5, 0.1], abs=1e-3)
    assert {factor for *_, factor in simulated_run(replace(cfg, warmdown_iters=0), 1.0)} == {1}
    cfg = replace(TINY, warmdown_frac=0.25, lr_floor=0.2)
    factors = [cfg.schedule(7, progress).lr for progress in (0, 0.5, 0.75, 0.875, 1.0)]
    assert factors == pytest.approx([1, 1, 1, 0.6, 0.2])
    assert replace(cfg, warmdown_frac=0.0).schedule(7, 1.0).lr == 1


def test_progress_is_by_steps_or_seconds():
    """In golf by seconds alone, if there is a cap."""
    limits = dict(iterations=100, max_wallclock_seconds=10.0)
    for cfg, points, wanted in ((TINY, ((50, 1.0), (5, 2.5), (100, 30.0)), [0.5, 0.25, 1]),
                                (GOLF, ((50, 1.0), (5, 20.0)), [0.1, 1])):
        cfg = replace(cfg, **limits)
        assert [cfg.progress(*point) for point in points] == wanted
        assert replace(cfg, max_wallclock_seconds=0.0).progress(5, 1e9) == 0.05


def test_decay_follows_the_lr_or_falls_linearly_or_as_a_cosine():
    speedrun = replace(SPEEDRUN, warmdown_frac=0.5, lr_floor=0.1)
    for progress in (0.0, 0.3, 0.75, 1.0):
        schedule = speedrun.schedule(7, progress)
        assert schedule.decay == schedule.lr
        assert GPT2.schedule(7, progress).decay == pytest.approx(1 - progress)
        cosine = 0.5 + 0.5 * math.cos(math.pi * progress)
        assert GPT2_PLUS.schedule(7, progress).decay == pytest.approx(cosine)


def test_muon_momentum():
    """Warms up by steps; cools down over the last steps, by the steps left or as many at the pace so far."""
    def momentum(cfg, *points):
        return [cfg.schedule(*point).momentum for point in points]

    found = momentum(GOLF, *((step, step / 10_000) for step in (0, 750, 1500, 9000, 10_000)))
    assert found == pytest.approx([0.92, 0.955, 0.99, 0.99, 0.99])
    assert momentum(replace(GOLF, muon_momentum_warmup_steps=0), (0, 0.0)) == [0.99]
    rows = {0: 0.85, 150: 0.9, 300: 0.95, 2110: 0.95, 2135: 0.9, 2160: 0.85}
    assert momentum(SPEEDRUN, *((step, step / 2160) for step in rows)) == pytest.approx([*rows.values()])
    capped = replace(SPEEDRUN, muon_momentum_warmup_steps=0)  # 1000 steps in the first half: 1000 are to come
    found = momentum(capped, *((2000 * progress, progress) for progress in (0.5, 0.975, 0.9875, 1)))
    assert found == pytest.approx([0.95, 0.95, 0.9, 0.85])
    both = replace(SPEEDRUN, muon_momentum_warmup_steps=10, muon_momentum_cooldown_steps=10)  # a run of ten
    assert momentum(both, (5, 0.5)) == pytest.approx([0.9])


def test_the_table_of_stages():
    """Several entries make equal stages of gpt2's single row; one entry serves every stage. Other columns are
    in test_speedrun.py."""
    def rows(**columns):
        stages = replace(GPT2, **columns).stages()
        return [(stage.batch_tokens // GPT2.train_batch_tokens, stage.row_tokens // GPT2.train_seq_len)
                for stage in stages]

    three = dict(batch_schedule=(1, 2, 3))
    assert rows() == [(1, 1)] and rows(**three) == [(1, 1), (2, 1), (3, 1)]
    assert rows(**three, seq_schedule=(1, 2, 3)) == [(1, 1), (2, 2), (3, 3)]
    assert rows(batch_schedule=(6,), seq_schedule=(1, 2)) == [(6, 1), (6, 2)]
    with pytest.raises(Refused, match="seq_schedule=1,2: gpt2 has 3 stages"):
        rows(**three, seq_schedule=(1, 2))
    cfg = replace(GPT2, **three)
    progress = (0, 0.33, 1 / 3, 0.34, 0.66, 2 / 3, 0.67, 1)
    stages = [train_gpt.stage_at(cfg, part) for part in progress]
    assert [cfg.stages().index(stage) for stage in stages] == [0, 0, 1, 1, 1, 2, 2, 2]
    cfg = replace(cfg, stage_starts=(0.0, 0.1, 0.7), iterations=100)
    assert [stage.first_step for stage in cfg.stages()] == [0, 10, 70]


@pytest.mark.parametrize("cfg, iterations, extension, stages", [
    (GPT2, 7, 0, 3), (GPT2, 1, 0, 3), (SPEEDRUN, 7, 2, 4), (SPEEDRUN, 10, 3, 4), (SPEEDRUN, 2, 1, 4),
    (SPEEDRUN, 9, 0, 4)])
def test_stage_steps_are_where_the_loop_changes(cfg, iterations, extension, stages):
    """Parts of iterations; in speedrun the extension is the last stage."""
    more = dict(extension_iterations=extension) if cfg.preset == "speedrun" else {}
    cfg = replace(cfg, iterations=iterations, max_wallclock_seconds=0.0,
                  batch_schedule=tuple(range(1, stages + 1)), **more)
    progress = [cfg.progress(step, 0) for step in range(train_gpt.total_steps(cfg))]
    found = [train_gpt.stage_at(cfg, part).batch_tokens // cfg.train_batch_tokens for part in progress]
    edges = [*(stage.first_step for stage in cfg.stages()), iterations + extension]
    assert found == [i for i, (a, b) in enumerate(zip(edges, edges[1:]), 1) for _ in range(a, b)]
    assert plan.planned_tokens(cfg) == cfg.train_batch_tokens * sum(found)
    assert cfg.preset == "gpt2" or edges[-2] == iterations
