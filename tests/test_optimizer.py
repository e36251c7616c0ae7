"""Muon, Adam against torch's own, banks, rows of the parameter table, ranks, and the schedules."""

import math
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fork_server
import train_gpt
from tools.run import plan
from golden_common import muon_alone
from helpers import ROOT, add_gradients
from test_model import close, randomised, small, values, with_columns, with_rows
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


# ------------------------------------------------------------ update rules
def test_muon_of_tiny():
    """Momentum is a mean of gradients; tall matrices have a factor. The parts: test_golden.py."""
    p, *grads = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(0))
    momenta = (0.0, 0.5, 0.9)
    want = p.clone()
    mean = torch.zeros_like(p)
    for grad, momentum in zip(grads, momenta):
        mean.lerp_(grad, 1 - momentum)
        update = train_gpt.orthogonalize(grad.lerp(mean, momentum)[None], TINY.muon_backend_steps)[0]
        want -= 0.1 * (8 / 6) ** 0.5 * update
    close(muon_alone("query", p, grads, momenta, 0.1, 0.0, TINY), want)


def rates_of(cfg):
    """{kind: learning rate} of what Adam updates in tiny."""
    rates = dict.fromkeys(("embed", "value_embeds", "bigram_embed", "candidate_embed", "class_embed"),
                          cfg.embed_lr)
    rates |= dict.fromkeys(("class_scale", "qk_gain", "resid_lambda", "x0_lambda", "layer_scale",
                            "skip_weights", "gate_weight", "gate_class", "gate_matches"), cfg.scalar_lr)
    return rates | {"head": cfg.head_lr}


@pytest.mark.parametrize("cfg, every, twice", [
    (replace(TINY, scalar_lr=0.07, bigram_every=2), 1, {"bigram_embed": 2}),
    (with_rows(TINY, lambda row: row._replace(every=1 if row.optimizer == "muon" else 3)), 3, {})])
def test_adam_equals_torch_on_a_model(cfg, every, twice):
    """Every other parameter, each kind with its own learning rate; every third step on the sum of three
    gradients, bigrams at every second one. Matrices move at each step; a step zeroes the gradients that it
    used, no others. Other recipes: test_golden.py."""
    model = randomised(cfg)
    twin = randomised(cfg)
    rates = rates_of(cfg)
    matrices = muon_names(cfg, model)
    others = {name: p for name, p in twin.named_parameters() if name not in matrices}
    assert {kind_of(name) for name in others} == rates.keys()
    groups = [dict(params=[p], lr=rates[kind_of(name)]) for name, p in others.items()]
    reference = torch.optim.Adam(groups, betas=(0.8, 0.95), eps=cfg.adam_eps)
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
            group["lr"] = rates[kind_of(name)] * factor
            p.grad = sums.pop(name) if turn else None
        reference.step()
    for name, p in others.items():
        close(values(model)[name], p.detach())


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


# ------------------------------------------------------------ banks
def outside(model, bank):
    """Mask of the numbers of a bank that belong to no parameter."""
    mask = torch.ones(bank.data.numel(), dtype=torch.bool)
    for name in bank.names:
        p = model.get_parameter(name)
        here = slice(p.storage_offset(), p.storage_offset() + p.numel())
        assert mask[here].all(), "two parameters share a place"
        mask[here] = False
    return mask


@pytest.mark.parametrize("column", [dict(eps=1e-4), dict(decay_with_lr=True), dict(lr=1.0)])
def test_rows_of_one_group_that_differ_share_no_bank(column):
    """A bank is updated by one row."""
    def kinds_beside_resid_lambda(cfg):
        banks = Optimizer(randomised(cfg), cfg).banks
        kinds = [{kind_of(name) for name in bank.names} for bank in banks]
        return next(its for its in kinds if "resid_lambda" in its)

    assert "x0_lambda" in kinds_beside_resid_lambda(TINY)
    assert kinds_beside_resid_lambda(with_columns(TINY, resid_lambda=column)) == {"resid_lambda"}


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
            p = model.get_parameter(name)
            grad = bank.views(bank.grad)[bank.names.index(name)]
            assert torch.equal(p, before[name]) and p.storage_offset() == grad.storage_offset()
            for view, flat in ((p, bank.data), (grad, bank.grad)):
                assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
                assert view.is_contiguous()


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


def test_a_step_tells_how_many_micro_steps_it_has():
    """train_step() to Optimizer.backward()."""
    said = []
    optimizer = SimpleNamespace(backward=lambda loss, micro_steps: said.append(micro_steps),
                                step=lambda *_: None)
    batch = (torch.zeros(4, 8), torch.zeros(4, 8))
    train_gpt.train_step(lambda *_: torch.zeros(()), optimizer, batch, 2, (), 1.0, Schedule(1.0, 0.9))
    assert said == [2, 2]


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
@pytest.mark.parametrize("slowdown", [1, 10, 500])
@pytest.mark.parametrize("cap, iterations, floor", [
    (600.0, 20_000, 0.0), (600.0, 1500, 0.1), (0.0, 2000, 0.05)])
def test_lr_factor_of_tiny_over_a_run(cap, iterations, floor, slowdown):
    """Full LR, then straight down over the second half of the run, by steps or by seconds, to its floor. That
    of golf: test_golden.py."""
    cfg = replace(TINY, lr_floor=floor, iterations=iterations, max_wallclock_seconds=cap)
    pace = 0.07147 * slowdown
    end = min(cap / pace, iterations) if cap else iterations     # steps, also in part
    steps = range(min(iterations, math.ceil(end)) + 1)
    factors = [cfg.schedule(step, cfg.progress(step, step * pace)).lr for step in steps]
    left = [min(1, max(0, end - step) / (end / 2)) for step in steps]
    assert factors == pytest.approx([floor + (1 - floor) * part for part in left], abs=1e-9)
    assert factors[-1] == pytest.approx(floor, abs=1e-12)


def test_golf_without_a_cap_goes_by_steps():
    cfg = replace(GOLF, iterations=100, max_wallclock_seconds=0.0, warmdown_iters=50)
    factors = [cfg.schedule(step, cfg.progress(step, 1e9)).lr for step in (0, 50, 75, 100)]
    assert factors == pytest.approx([1, 1, 0.5, 0])


def test_momentum_of_tiny_warms_up():
    found = [TINY.schedule(step, step / 10_000).momentum for step in (0, 150, 300, 9000)]
    assert found == pytest.approx([0.85, 0.9, 0.95, 0.95])


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
