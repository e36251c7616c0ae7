"""Muon and Adam against torch's own, the flat banks, ranks against one process, and the schedules."""

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import train_gpt
from helpers import ROOT
from train_gpt import GPT, Config, Optimizer, preset_config

SMALL = replace(
    Config(),
    vocab_size=70,
    train_seq_len=16,
    model_dim=24,
    num_layers=5,
    bigram_rows=40,
    num_heads=4,
    num_kv_heads=2,
    mlp_mult=2,
    value_embed_layers=(1, 0),
    tied_embed_lr=0.01,
)
MATRICES = {"query", "key", "value", "attn_proj", "fc", "mlp_proj"}


def some_model(cfg=SMALL, seed=0):
    """A GPT whose parameters are all away from zero."""
    model, generator = GPT(cfg), torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data.normal_(0, 0.5, generator=generator)
    return model


def some_gradients(model, step):
    """{name: gradient}, scales from 1e-3 to 10, the same for every model of this shape."""
    generator = torch.Generator().manual_seed(1000 + step)
    return {
        name: torch.randn(p.shape, generator=generator) * 10 ** (i % 5 - 3)
        for i, (name, p) in enumerate(model.named_parameters())
    }


def kind(name):
    """query, embed, value_embeds, ...: the name of a parameter without its place."""
    return [part for part in name.split(".") if not part.isdigit()][-1]


def add_gradients(model, gradients, factor=1.0):
    """As a backward does: what a step leaves behind stays in."""
    for name, p in model.named_parameters():
        p.grad.add_(gradients[name] * factor)


def values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def use_our_orthogonalisation(monkeypatch):
    """torch's is hard-coded to bf16: give torch.optim.Muon ours, so that the rest can be compared to 1e-5."""
    import torch.optim._muon as theirs

    def ours(grad, ns_coefficients, ns_steps, eps):
        assert tuple(ns_coefficients) == (3.4445, -4.7750, 2.0315)
        return train_gpt.orthogonalize(grad[None], ns_steps)[0]

    monkeypatch.setattr(theirs, "_zeropower_via_newtonschulz", ours)


def close(got, want, tolerance=1e-5):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# -------------------------------------------------------------------------------- update rules
@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (64, 16), (7, 33), (40, 5)])
@pytest.mark.parametrize("momentum", [0.0, 0.95])
def test_muon_update_equals_torch(shape, momentum, monkeypatch):
    use_our_orthogonalisation(monkeypatch)
    generator = torch.Generator().manual_seed(sum(shape))
    ours = torch.randn(3, *shape, generator=generator)
    theirs = [nn.Parameter(w.clone()) for w in ours]
    optimizer = torch.optim.Muon(
        theirs, lr=0.05, weight_decay=0, momentum=momentum, nesterov=True, ns_steps=5, adjust_lr_fn="original"
    )
    buffer = torch.zeros_like(ours)
    for _ in range(10):
        grad = torch.randn(ours.shape, generator=generator)
        for p, g in zip(theirs, grad):
            p.grad = g.clone()
        optimizer.step()
        ours -= 0.05 * train_gpt.muon_update(grad, buffer, momentum, 5)
    close(ours, torch.stack([p.detach() for p in theirs]))


def test_muon_equals_torch_on_a_model(monkeypatch):
    """Every matrix of a GPT through our Optimizer, learning rate and momentum changing from step to step."""
    use_our_orthogonalisation(monkeypatch)
    model, twin = some_model(), some_model()
    matrices = {name: p for name, p in twin.named_parameters() if kind(name) in MATRICES}
    reference = torch.optim.Muon(
        matrices.values(), lr=1.0, weight_decay=0, nesterov=True, ns_steps=5, adjust_lr_fn="original"
    )
    optimizer = Optimizer(model, SMALL)
    for step in range(10):
        gradients, factor, momentum = some_gradients(model, step), 1 - 0.05 * step, 0.85 + 0.01 * step
        add_gradients(model, gradients)
        optimizer.step(factor, momentum)
        reference.param_groups[0].update(lr=SMALL.matrix_lr * factor, momentum=momentum)
        for name, p in matrices.items():
            p.grad = gradients[name]
        reference.step()
    after = values(model)
    assert len(matrices) == 6 * SMALL.num_layers
    for name, p in matrices.items():
        close(after[name], p.detach())


@pytest.mark.parametrize("tied, every", [(False, 1), (True, 1), (False, 3)])
def test_adam_equals_torch_on_a_model(tied, every):
    """Every other parameter, each kind with its own learning rate; every third step on the sum of three."""
    cfg = replace(SMALL, tie_embeddings=tied, beta1=0.8, beta2=0.95, adam_every=every)
    model, twin = some_model(cfg), some_model(cfg)

    def lr(name):
        return {
            "embed": cfg.tied_embed_lr if tied else cfg.embed_lr,
            "value_embeds": cfg.embed_lr,
            "bigram_embed": cfg.embed_lr,
            "head": cfg.head_lr,
        }.get(kind(name), cfg.scalar_lr)

    others = {name: p for name, p in twin.named_parameters() if kind(name) not in MATRICES}
    reference = torch.optim.Adam(
        [{"params": [p], "lr": lr(name), "base": lr(name)} for name, p in others.items()],
        betas=(cfg.beta1, cfg.beta2),
        eps=cfg.adam_eps,
    )
    optimizer, sums = Optimizer(model, cfg), {}
    for step in range(1, 11):
        gradients, factor, before = some_gradients(model, step), 1 - 0.05 * step, values(model)
        add_gradients(model, gradients)
        optimizer.step(factor, 0.9)
        sums = {name: gradients[name] + sums.get(name, 0) for name in others}
        if step % every:
            assert all(torch.equal(values(model)[name], before[name]) for name in others)
            continue
        for group in reference.param_groups:
            group["lr"] = group["base"] * factor
        for name, p in others.items():
            p.grad = sums[name]
        reference.step()
        sums = {}
    after = values(model)
    kinds = {"embed", "value_embeds", "bigram_embed", "qk_gain", "residual_mix", "layer_scale"}
    kinds.add("skip_weights")
    assert {kind(name) for name in others} == kinds | (set() if tied else {"head"})
    for name, p in others.items():
        close(after[name], p.detach())


def test_adam_every_leaves_the_matrices_alone():
    """They move at each step; a step zeroes the gradients that it used, no others."""
    every, each = (replace(SMALL, adam_every=n) for n in (2, 1))
    models = some_model(every), some_model(each)
    optimizers = Optimizer(models[0], every), Optimizer(models[1], each)
    for step in range(4):
        gradients = some_gradients(models[0], step)
        for model, optimizer in zip(models, optimizers):
            add_gradients(model, gradients)
            optimizer.step(1.0, 0.9)
            for bank in optimizer.banks:
                due = bank.group == "matrix" or (step + 1) % model.cfg.adam_every == 0
                assert bool(bank.grad.any()) == (not due)
        waits = [bank for bank in optimizers[0].banks if bank.grad.any()]
        assert bool(waits) == (step % 2 == 0) and all(bank.group != "matrix" for bank in waits)
    for name, p in values(models[0]).items():
        assert torch.equal(p, values(models[1])[name]) == (kind(name) in MATRICES), name


@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (64, 16)])
def test_normuon_scale_is_the_paper_s(shape):
    """Each row over its running rms, of a wide matrix each column; the norm of the matrix stays."""
    generator, beta2 = torch.Generator().manual_seed(1), 0.9
    axis = 1 if shape[0] >= shape[1] else 0
    v = torch.zeros(3, shape[0], 1) if axis else torch.zeros(3, 1, shape[1])
    mean = [torch.zeros(v[0].shape, dtype=torch.float64) for _ in range(3)]
    for _ in range(4):
        update = torch.randn(3, *shape, generator=generator) * torch.tensor([1, 1e-3, 30])[:, None, None]
        got = train_gpt.normuon_scale(update, v, beta2)
        for i, one in enumerate(update.double()):
            mean[i] = beta2 * mean[i] + (1 - beta2) * one.square().mean(axis, keepdim=True)
            want = one / mean[i].sqrt()
            close(got[i].double(), want * one.norm() / want.norm())
            close(v[i].double(), mean[i])
    assert train_gpt.normuon_scale(torch.zeros(1, *shape), torch.zeros_like(v[:1]), beta2).abs().max() == 0


def test_normuon_in_the_optimizer():
    """A step is Muon's, scaled; the means are the last of a matrix bank's tensors and outlive the step."""
    cfg = replace(SMALL, normuon_beta2=0.95)
    model, means, buffers = some_model(cfg), {}, {}
    optimizer = Optimizer(model, cfg)
    for step in range(3):
        before, gradients = values(model), some_gradients(model, step)
        add_gradients(model, gradients)
        optimizer.step(0.5, 0.9)
        for name, p in values(model).items():
            if kind(name) in MATRICES:
                g = gradients[name][None]
                narrow = g[..., :1] if g.size(1) >= g.size(2) else g[:, :1]
                buffer = buffers.setdefault(name, torch.zeros_like(g))
                mean = means.setdefault(name, torch.zeros_like(narrow))
                update = train_gpt.muon_update(g, buffer, 0.9, cfg.muon_backend_steps)
                update = train_gpt.normuon_scale(update, mean, 0.95)
                close(p, before[name] - 0.5 * cfg.matrix_lr * update[0], 1e-6)
    for bank in optimizer.banks:
        if bank.group == "matrix":
            rows, columns = bank.my_data.shape[1:]
            assert bank.state[1][0].numel() == max(rows, columns)


@pytest.mark.parametrize("shape", [(48, 48), (64, 256), (256, 64)])
def test_polar_express_is_nearer_to_orthogonal(shape):
    """Its first five iterations, of which the fifth repeats: singular values near 1 from small ones, too."""
    g = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    left, sizes, right = torch.linalg.svd(g, full_matrices=False)
    sizes = torch.logspace(-2, 0, sizes.size(-1)).expand_as(sizes)
    g = left @ torch.diag_embed(sizes) @ right
    found = {method: torch.linalg.svdvals(train_gpt.orthogonalize(g, 5, method))
             for method in ("newton_schulz", "polar_express")}
    far = {method: (values - 1).abs().mean() for method, values in found.items()}
    assert far["polar_express"] < far["newton_schulz"] and far["polar_express"] < 0.1
    more = torch.linalg.svdvals(train_gpt.orthogonalize(g, 8, "polar_express"))
    assert (more - 1).abs().max() < 0.1
    close(train_gpt.orthogonalize(g * 1e3, 5, "polar_express"), train_gpt.orthogonalize(
        g, 5, "polar_express"))


def test_orthogonalised_gaussian():
    g = torch.randn(1, 256, 1024, generator=torch.Generator().manual_seed(0))
    for matrix in (g * 1e-6, g.mT * 1e6):
        singular = torch.linalg.svdvals(train_gpt.orthogonalize(matrix, 5)[0])
        assert 0.6 <= singular.min() and singular.max() <= 1.3
    assert train_gpt.orthogonalize(torch.zeros(2, 4, 6), 5).abs().max() == 0  # a matrix without gradient


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_batched_equals_one_by_one(shape):
    g = torch.randn(4, *shape, generator=torch.Generator().manual_seed(1))
    g *= torch.tensor([1, 1e-3, 10, 1])[:, None, None]
    close(train_gpt.orthogonalize(g, 5), torch.cat([train_gpt.orthogonalize(x[None], 5) for x in g]), 1e-6)


# -------------------------------------------------------------------------------- banks
def places(model, bank):
    """{name: slice of the flat buffer} of a bank's parameters."""
    known = dict(model.named_parameters())
    return {
        name: slice(known[name].storage_offset(), known[name].storage_offset() + known[name].numel())
        for name in bank.names
    }


def outside(model, bank):
    """Mask of the numbers of a bank that belong to no parameter."""
    mask = torch.ones(bank.data.numel(), dtype=torch.bool)
    for here in places(model, bank).values():
        assert mask[here].all(), "two parameters share a place"
        mask[here] = False
    return mask


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_banks_cover_the_model(world_size):
    model = some_model()
    before = values(model)
    optimizer = Optimizer(model, SMALL, world_size - 1, world_size)
    known = dict(model.named_parameters())
    names = [name for bank in optimizer.banks for name in bank.names]
    assert sorted(names) == sorted(known)
    for bank in optimizer.banks:
        assert bank.data.numel() % world_size == 0
        assert (
            outside(model, bank).sum() + sum(known[name].numel() for name in bank.names) == bank.data.numel()
        )
        assert bank.data[outside(model, bank)].abs().sum() == 0
        for name in bank.names:
            p = known[name]
            assert torch.equal(p, before[name])
            for view, flat in ((p, bank.data), (p.grad, bank.grad)):
                assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
                assert view.storage_offset() == places(model, bank)[name].start and view.is_contiguous()


def test_gradients_land_in_the_banks():
    """backward() adds to the flat buffers, which step empties; padding is never touched."""
    cfg = replace(SMALL, train_seq_len=8)
    model, twin = some_model(cfg), some_model(cfg)
    optimizer = Optimizer(model, cfg)
    tokens = torch.randint(70, (2, 9), generator=torch.Generator().manual_seed(0))
    for one in (model, twin):
        one.set_context(8, 0)
    for _ in range(3):
        twin.zero_grad()
        for part in tokens.split(1):
            for one in (model, twin):
                (one(part[:, :-1], part[:, 1:]) / 2).backward()
        for bank in optimizer.banks:
            for name, here in places(model, bank).items():
                close(bank.grad[here], dict(twin.named_parameters())[name].grad.flatten(), 1e-6)
            assert bank.grad[outside(model, bank)].abs().sum() == 0
        optimizer.step(1.0, 0.9)
        assert all(bank.data[outside(model, bank)].abs().sum() == 0 for bank in optimizer.banks)
        assert not any(bank.grad.any() for bank in optimizer.banks)
        twin.load_state_dict(model.state_dict())
    assert optimizer.step_count == 3


def test_tensors_are_all_that_a_step_changes():
    """Putting them and step_count back takes steps back, to the bit, also gradients that wait for Adam."""
    cfg = replace(SMALL, normuon_beta2=0.95, adam_every=2)
    model = some_model(cfg)
    optimizer = Optimizer(model, cfg)

    def steps():
        for step in range(3):
            add_gradients(model, some_gradients(model, step))
            optimizer.step(1.0, 0.9)
        return values(model)

    kept = [t.clone() for t in optimizer.tensors()]
    first = steps()
    for t, value in zip(optimizer.tensors(), kept):
        t.copy_(value)
    optimizer.step_count = 0
    second = steps()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_no_bank_is_sent_before_the_last_micro_step(monkeypatch):
    """Not even one with parameters that get no gradient: an empty first layer leaves two of them without."""
    sent, done = [], SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(train_gpt, "reduce_scatter", lambda *_, async_op: sent.append(1) or done)
    monkeypatch.setattr(train_gpt, "all_gather", lambda *_, async_op: done)
    cfg = replace(SMALL, window_pattern="0LLLL", value_embed_layers=(1, 2), adam_every=2)
    model, generator = some_model(cfg), torch.Generator().manual_seed(0)
    optimizer, early = Optimizer(model, cfg, 0, 2), []
    model.set_context(16, 0)

    def loss_fn(tokens, targets):
        early.append(len(sent))
        return model(tokens, targets)

    for step in range(1, 5):
        due = len(optimizer.banks) if step % 2 == 0 else sum(b.group == "matrix" for b in optimizer.banks)
        early[:], sent[:] = [], []
        batch = torch.randint(70, (2, 3, 16), generator=generator).unbind()
        train_gpt.train_step(loss_fn, optimizer, batch, 1, 1.0, 0.9)
        assert early == [0, 0, 0] and len(sent) == due, step
    assert due == len(optimizer.banks)


# -------------------------------------------------------------------------------- decay and clipping
def test_cautious_decay(monkeypatch):
    """Only matrices decay, and only where the update shrinks the weight too."""
    plain, decayed, start = some_model(), some_model(), values(some_model())
    muon_update, updates = train_gpt.muon_update, []

    def spied(*args):
        updates.append(muon_update(*args))
        return updates[-1]

    monkeypatch.setattr(train_gpt, "muon_update", spied)
    for model, decay in ((plain, 0.0), (decayed, 0.7)):
        cfg = replace(SMALL, weight_decay=100 * decay)
        optimizer = Optimizer(model, cfg)
        add_gradients(model, some_gradients(model, 0))
        optimizer.step(0.5, 0.9)
    banks = [bank for bank in optimizer.banks if bank.group == "matrix"]
    assert len(updates) == 2 * len(banks)
    updated = {name: update for bank, stack in zip(banks, updates) for name, update in zip(bank.names, stack)}
    for name, p in values(plain).items():
        q = values(decayed)[name]
        if kind(name) not in MATRICES:
            assert torch.equal(p, q), name
            continue
        agree = updated[name] * start[name] > 0
        assert 0.2 < agree.float().mean() < 0.8
        assert torch.equal(p[~agree], q[~agree])
        close((p - q)[agree], ((0.5 * SMALL.matrix_lr) ** 2 * 70 * start[name])[agree], 1e-6)


@pytest.mark.parametrize("limit", [0.01, 3.0, 1e5])
def test_clipping_equals_torch(limit):
    clipped, plain = some_model(), some_model()
    one, other = Optimizer(clipped, replace(SMALL, grad_clip_norm=limit)), Optimizer(plain, SMALL)
    for step in range(3):
        gradients = some_gradients(plain, step)
        add_gradients(clipped, gradients)
        add_gradients(plain, gradients)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), limit)
        one.step(1.0, 0.9)
        other.step(1.0, 0.9)
    for name, p in values(plain).items():
        close(values(clipped)[name], p, 1e-6)


# -------------------------------------------------------------------------------- ranks
RANK_CONFIGS = [
    replace(SMALL, weight_decay=0.1, grad_clip_norm=20.0),
    replace(SMALL, normuon_beta2=0.9, adam_every=2, orthogonalization="polar_express"),
]


def rank_main(folder, rank, world_size):
    """One rank of test_ranks_equal_one_process: ten steps, then its weights go to a file."""
    if world_size > 1:
        torch.distributed.init_process_group(
            "gloo", f"file://{folder}/meet{world_size}", rank=rank, world_size=world_size
        )
    for i, cfg in enumerate(RANK_CONFIGS):
        model = some_model(cfg)
        optimizer, padding = Optimizer(model, cfg, rank, world_size), 0.0
        for step in range(10):  # each rank has another gradient; their mean is the same for any world_size
            gradients, factor = some_gradients(model, step), 2 * (rank + 1) / (world_size + 1)
            if step % 3:  # backward in two micro-steps
                for _ in range(2):
                    parts = ((p * gradients[name]).sum() for name, p in model.named_parameters())
                    (sum(parts) * factor / 2).backward()
            else:
                add_gradients(model, gradients, factor)
            optimizer.step(1 - 0.05 * step, 0.9)
        padding = sum(float(bank.data[outside(model, bank)].abs().sum()) for bank in optimizer.banks)
        torch.save((values(model), padding), f"{folder}/{world_size}_{rank}_{i}.pt")
    if world_size > 1:
        torch.distributed.destroy_process_group()


def test_collectives_are_under_way_while_others_compute(monkeypatch):
    """All gradients are sent at once; a bank is updated as its own arrive, and goes out as the next is."""
    events = []

    class Job:
        def __init__(self, what):
            events.append(what)
            self.what = what

        def wait(self):
            events.append(f"wait {self.what}")

    def reduce_scatter(output, whole, async_op):
        output.copy_(whole[:len(output)])
        return Job(f"reduce {len(whole)}")

    monkeypatch.setattr(train_gpt, "reduce_scatter", reduce_scatter)
    monkeypatch.setattr(train_gpt, "all_gather", lambda whole, part, async_op: Job(f"gather {len(whole)}"))
    for name in ("muon_update", "adam_update"):
        real = getattr(train_gpt, name)
        monkeypatch.setattr(train_gpt, name, lambda *args, real=real: events.append("update") or real(*args))
    model = some_model(SMALL)
    optimizer = Optimizer(model, SMALL, 0, 2)
    add_gradients(model, some_gradients(model, 0), 1.0)
    optimizer.step(1.0, 0.9)
    sizes = [len(bank.data) for bank in optimizer.banks]
    each = [[f"wait reduce {n}", "update", f"gather {n}"] for n in sizes]
    assert len(sizes) > 3 and events[:len(sizes) * 4] == [*[f"reduce {n}" for n in sizes], *sum(each, [])]
    assert {f"wait gather {n}" for n in sizes} <= {*events[len(sizes) * 4:]}


def test_ranks_equal_one_process(tmp_path):
    """5 layers: neither the 5 MLP matrices nor the 10 others are shared evenly by 2 or by 3 ranks."""
    counts = {
        sum(kind(name) in MATRICES for name in bank.names) for bank in Optimizer(some_model(), SMALL).banks
    } - {0}
    assert any(count % 2 for count in counts) and any(count % 3 for count in counts)
    clean = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    start = "import sys, test_optimizer as t; t.rank_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))"
    jobs = [
        subprocess.Popen([sys.executable, "-c", start, str(tmp_path), str(rank), str(n)], env=clean)
        for n in (2, 3)
        for rank in range(n)
    ]
    try:
        assert [job.wait(90) for job in jobs] == [0] * 5
    finally:
        for job in jobs:
            job.kill()
    rank_main(tmp_path, 0, 1)
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


# -------------------------------------------------------------------------------- schedules
def simulated_run(cfg, seconds_per_step):
    """[(step, progress, lr_factor)] of a run whose steps all take the same time."""
    rows, step = [], 0
    while True:
        progress = train_gpt.run_progress(cfg, step, step * seconds_per_step)
        rows.append((step, progress, train_gpt.lr_factor(cfg, step, progress)))
        if progress >= 1:
            return rows
        step += 1


@pytest.mark.parametrize("slowdown", [1, 3, 10, 500])
@pytest.mark.parametrize("iters", [0, 1, 100, 3000, 10**6])
def test_lr_factor_over_a_run(iters, slowdown):
    """Half the budget at full LR on any hardware, then down, never up, and at the floor in the end."""
    for cap, iterations, floor in ((600.0, 20_000, 0.0), (600.0, 1500, 0.1), (0.0, 2000, 0.05)):
        cfg = replace(
            preset_config("golf"),
            warmdown_iters=iters,
            lr_floor=floor,
            iterations=iterations,
            max_wallclock_seconds=cap,
        )
        rows = simulated_run(cfg, 0.07147 * slowdown)
        assert all(factor == 1 for _, progress, factor in rows if progress <= 0.5)
        assert len(rows) < 10 or rows[1][2] == 1
        factors = [factor for _, _, factor in rows]
        assert all(a >= b for a, b in zip(factors, factors[1:]))
        assert factors[-1] == pytest.approx(floor, abs=1e-12) and min(factors) >= floor - 1e-12
        assert train_gpt.lr_factor(cfg, rows[-1][0] // 2, 0.5) == 1


def test_warmdown_counts_steps():
    """At the golf record's pace (71.47 ms, 8394 steps) a warm-down of 3000 takes the last 3000 steps."""
    rows = {step: factor for step, _, factor in simulated_run(preset_config("golf"), 600 / 8394)}
    assert rows[5390] == 1 and rows[5400] < 1
    assert rows[8394 - 1500] == pytest.approx(0.5, abs=1e-3) and rows[8394 - 300] == pytest.approx(
        0.1, abs=1e-3
    )


def test_warmdown_frac():
    cfg = replace(Config(), warmdown_frac=0.25, lr_floor=0.2)
    assert [train_gpt.lr_factor(cfg, 7, p) for p in (0, 0.5, 0.75)] == [1, 1, 1]
    assert train_gpt.lr_factor(cfg, 7, 0.875) == pytest.approx(0.6)
    assert train_gpt.lr_factor(cfg, 7, 1.0) == pytest.approx(0.2)
    assert train_gpt.lr_factor(replace(cfg, warmdown_frac=0.0), 7, 1.0) == 1


def test_schedules_are_pure():
    cfg = replace(
        preset_config("golf"), batch_schedule=(1, 2), batch_lr_power=0.5, muon_momentum_cooldown_steps=50
    )
    points = [(step, p / 10) for step in (0, 1, 400, 9000) for p in range(11)]

    def table(order):
        return {
            point: (
                train_gpt.lr_factor(cfg, *point),
                train_gpt.muon_momentum(cfg, *point),
                train_gpt.stage_at(cfg, point[1]),
            )
            for point in order
        }

    assert table(points) == table(reversed(points))


def test_progress():
    cfg = replace(Config(), iterations=100, max_wallclock_seconds=10.0)
    assert train_gpt.run_progress(cfg, 50, 1.0) == 0.5
    assert train_gpt.run_progress(cfg, 5, 2.5) == 0.25
    assert train_gpt.run_progress(cfg, 100, 30.0) == 1
    assert train_gpt.run_progress(replace(cfg, max_wallclock_seconds=0.0), 5, 1e9) == 0.05


def test_muon_momentum_warms_up():
    cfg = replace(
        Config(), muon_momentum=0.99, muon_momentum_warmup_start=0.92, muon_momentum_warmup_steps=1500
    )

    def at(step, **kw):
        return train_gpt.muon_momentum(replace(cfg, **kw), step, step / 10_000)

    assert at(0) == pytest.approx(0.92)
    assert at(750) == pytest.approx(0.955)
    assert at(1500) == at(9000) == at(10_000) == pytest.approx(0.99)
    assert at(0, muon_momentum_warmup_steps=0) == pytest.approx(0.99)


def test_muon_momentum_cools_down():
    """Over the last 50 steps back to where it began: by the steps left, or as many at the pace so far."""
    cfg = preset_config("speedrun")
    rows = {0: 0.85, 150: 0.9, 300: 0.95, 301: 0.95, 2110: 0.95, 2135: 0.9, 2160: 0.85}
    got = [train_gpt.muon_momentum(cfg, step, step / 2160) for step in rows]
    assert got == pytest.approx([*rows.values()], abs=1e-9)
    capped = replace(cfg, muon_momentum_warmup_steps=0)  # 1000 steps in the first half: 1000 are to come
    at = [train_gpt.muon_momentum(capped, 1000 * p / 0.5, p) for p in (0.5, 0.975, 0.9875, 1)]
    assert at == pytest.approx([0.95, 0.95, 0.9, 0.85], abs=1e-9)
    both = replace(cfg, muon_momentum_warmup_steps=10, muon_momentum_cooldown_steps=10)  # of a run of ten
    assert train_gpt.muon_momentum(both, 5, 0.5) == pytest.approx(0.9)


def test_stage_tables():
    cfg = replace(Config(), batch_schedule=(1, 2, 3), window_schedule=(384, 896, 1408))
    assert [(s.batch_multiple, s.window) for s in train_gpt.stage_table(cfg)] == [
        (1, 384),
        (2, 896),
        (3, 1408),
    ]
    at = [train_gpt.stage_at(cfg, p).batch_multiple for p in (0, 0.33, 1 / 3, 0.34, 0.66, 2 / 3, 0.67, 1)]
    assert at == [1, 1, 2, 2, 2, 3, 3, 3]
    for one in (dict(batch_schedule=(2,)), dict(window_schedule=(512,))):  # one entry serves all stages
        stages = train_gpt.stage_table(replace(cfg, **one))
        assert len(stages) == 3 and len({s[2 if "batch_schedule" in one else 3] for s in stages}) == 1
    assert train_gpt.stage_table(replace(Config(), window_schedule=(0,))) == [(0, 0, 1, 0)]


def first_steps(cfg):
    return [stage.first_step for stage in train_gpt.stage_table(cfg)]


def test_the_last_stage_is_the_extension():
    """Speedrun: thirds of 2,120 steps, then 40 more; 571M tokens in all."""
    cfg = preset_config("speedrun")
    assert train_gpt.total_steps(cfg) == 2160 and first_steps(cfg) == [0, 707, 1414, 2120]
    stages = [train_gpt.stage_at(cfg, step / 2160) for step in (0, 706, 707, 1413, 1414, 2119, 2120, 2160)]
    assert [s.batch_multiple for s in stages] == [1, 1, 2, 2, 3, 3, 3, 3]
    assert [s.window for s in stages] == [384, 384, 896, 896, 1408, 1408, 1664, 1664]
    tokens = sum(131_072 * train_gpt.stage_at(cfg, step / 2160).batch_multiple for step in range(2160))
    assert train_gpt.planned_tokens(cfg) == tokens == 571_342_848
    assert first_steps(Config()) == [0]
    one = replace(cfg, batch_schedule=(2,), window_schedule=(128,))  # an extension without stages
    assert first_steps(one) == [0] and train_gpt.planned_tokens(one) == 2160 * 262_144


@pytest.mark.parametrize("iterations, extension, stages", [(7, 0, 3), (10, 3, 4), (2, 1, 4), (1, 0, 3)])
def test_stage_steps_are_where_the_loop_changes(iterations, extension, stages):
    cfg = replace(Config(), iterations=iterations, extension_iterations=extension, max_wallclock_seconds=0.0,
                  batch_schedule=tuple(range(1, stages + 1)))
    last, edges = iterations + extension, [*first_steps(cfg), iterations + extension]
    multiples = [train_gpt.stage_at(cfg, train_gpt.run_progress(cfg, step, 0)).batch_multiple
                 for step in range(last)]
    assert multiples == [i for i, (a, b) in enumerate(zip(edges, edges[1:]), 1) for _ in range(a, b)]
    assert train_gpt.planned_tokens(cfg) == cfg.train_batch_tokens * sum(multiples)


def test_batch_lr_power():
    """Speedrun: a batch of 2 and 3 times the first has 1.516 and 1.933 times its LR."""
    cfg = replace(Config(), batch_schedule=(1, 2, 3), batch_lr_power=0.6, warmdown_frac=0.0)
    assert [train_gpt.lr_factor(cfg, 9, p) for p in (0.1, 0.5, 0.9)] == pytest.approx(
        [1, 1.5157, 1.9332], abs=1e-4
    )
    off = replace(cfg, batch_lr_power=0.0)
    assert [train_gpt.lr_factor(off, 9, p) for p in (0.1, 0.5, 0.9)] == [1, 1, 1]


@pytest.mark.parametrize("settings", [
    dict(batch_lr_power=0.6), dict(lr_schedule=(1.0, 1.5, 2.0), lr_switches=(0.0, 0.33, 0.66))])
def test_the_lr_floor_is_that_of_any_batch(settings):
    """The decay goes from the larger batch's LR to lr_floor itself, and is a half of both on half its way."""
    cfg = replace(Config(), batch_schedule=(1, 2, 3), warmdown_frac=0.2, lr_floor=0.1, **settings)
    top = train_gpt.lr_factor(cfg, 8, 0.8)
    assert top == pytest.approx(3**0.6 if "batch_lr_power" in settings else 2.0)
    assert train_gpt.lr_factor(cfg, 9, 0.9) == pytest.approx((top + 0.1) / 2)
    assert train_gpt.lr_factor(cfg, 10, 1.0) == pytest.approx(0.1)


def test_lr_schedule():
    """Its own switches, parts of iterations, which the extension does not move."""
    cfg = replace(preset_config("speedrun"), warmdown_frac=0.0)
    steps = {0: 1.0, 699: 1.0, 700: 1.51, 1399: 1.51, 1400: 1.93, 2119: 1.93, 2160: 1.93}
    assert [train_gpt.lr_factor(cfg, step, step / 2160) for step in steps] == [*steps.values()]
    power = replace(cfg, lr_schedule=(0.0,), lr_switches=(0.0,), batch_lr_power=0.6)  # the stages' own steps
    assert train_gpt.lr_factor(power, 707, 707 / 2160) == pytest.approx(2**0.6)


def test_speedrun_cools_down():
    """Over the last 55 % of 2,120 steps to 0.1, where the extension stays."""
    cfg = preset_config("speedrun")
    factors = [train_gpt.lr_factor(cfg, step, step / 2160) for step in range(2161)]
    assert factors[953] == 1.51 and factors[955] < 1.51
    assert factors[2120:] == pytest.approx([0.1] * 41, abs=1e-12) and factors[2119] > 0.1
    down = (1700 / 2120 - 0.45) / 0.55
    assert factors[1700] == pytest.approx(1.93 * (1 - down) + 0.1 * down)
