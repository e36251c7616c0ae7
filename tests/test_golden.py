"""golf, speedrun and gpt2, and golf_plus, speedrun_plus and gpt2_plus, against numbers that the public
records' own code gave, at toy size and at full size. README.md of tests/golden, of plus and of frontier
there are the specifications, the .npz beside them hold the numbers.

GOLDEN=FOLDER lays another set of the same form over ours: *.npz, plus/*.npz, frontier/*.npz. A file there
that has no recipe here is skipped by name, and so is a recipe whose file is missing. Of our own files none
may be missing.

What all sets of a form share is tested here; what one set alone holds is tested in golden_<recipe>.py, whose
tests run with this file. Those modules also say which of our parameters and constants are which of a set's.
"""
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_gpt
from golden_common import (
    FOREIGN, GOLDEN, adam_alone, check_decay, close, compare, difference, distinct, full_size_shapes,
    gradients, in_fp64, kind_of, load_config, loss_of_split, make_loader, make_optimizer, muon_alone,
    open_set, open_shards, stated_law, step_on_gradients, tie)
from golden_golf import *  # noqa: F403
from golden_golf import Golf
from golden_golf_plus import *  # noqa: F403
from golden_golf_plus import GolfPlus
from golden_gpt2 import *  # noqa: F403
from golden_gpt2 import GPT2
from golden_gpt2_plus import *  # noqa: F403
from golden_gpt2_plus import GPT2Plus
from golden_speedrun import *  # noqa: F403
from golden_speedrun import Speedrun
from golden_speedrun_frontier import *  # noqa: F403
from golden_speedrun_frontier import SpeedrunFrontier

SEEDS = (Golf, Speedrun, GPT2)                  # of the form of golden/README.md
LATER = (GolfPlus, GPT2Plus, SpeedrunFrontier)  # of that of plus/README.md and of frontier/README.md
SETS = {recipe.FILE: recipe for recipe in (*SEEDS, *LATER)}

# Tolerances of golden/README.md, but those that a recipe has; relative and Euclidean
LOSS = 5e-7
NATS = 1e-6
GRADIENT = 8e-6
UPDATE = 1e-4
TABLE_UPDATE = 1e-3
UNIT = 3e-5


def name_of(value):
    return value.FILE.rpartition("/")[2].removesuffix(".npz") if isinstance(value, type) else str(value)


def with_series(recipes):
    """Each recipe with each of its series of steps."""
    return [(recipe, series) for recipe in recipes for series in recipe.series()]


@pytest.fixture(scope="module", params=SEEDS, ids=name_of)
def seed(request, one_thread):
    return open_set(request.param)


@pytest.fixture(scope="module", params=LATER, ids=name_of)
def later(request, one_thread):
    return open_set(request.param)


# ---------------------------------------------------------------- the folder
def files_there():
    return sorted(str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*.npz"))


@pytest.mark.parametrize("file", sorted({*files_there(), *SETS}))
def test_each_set_has_a_recipe(file):
    """And each recipe a set."""
    if FOREIGN and file not in SETS:
        pytest.skip(f"{file}: no recipe here")
    open_set(SETS[file])


def test_the_folder_holds_a_set():
    """Else a mistyped GOLDEN=FOLDER would pass, with every test skipped."""
    assert {*files_there()} & {*SETS}, f"no set of {', '.join(SETS)}"


def test_constants_that_a_set_states(seed):
    """All are accepted, together and those of full size also alone. A constant that the recipe lacks stands
    at its off-value, which changes nothing."""
    full = seed.json("overrides_full")
    toy = seed.json("overrides")
    assert full["PRESET"] == toy["PRESET"]
    for name, text in full.items():
        load_config({"PRESET": full["PRESET"], name: text})
    for overrides, cfg in ((full, seed.full), (toy, seed.cfg)):
        check_stated(overrides, cfg)
    off = [name for name in full if full[name] == toy.get(name) == "0"]
    for name in off:
        without = {other: text for other, text in toy.items() if other != name}
        assert load_config(without) == seed.cfg, name
        assert load_config({"PRESET": full["PRESET"], name: "0"}) == load_config({"PRESET": full["PRESET"]})


def test_constants_of_a_later_toy(later):
    check_stated(later.overrides, later.cfg)


def check_stated(overrides, cfg):
    """A Config holds what was typed, unless it has no such constant, which then is off or what the recipe
    does anyway."""
    names = {alias: constant for constant, alias in cfg.aliases.items()}
    for name, text in overrides.items():
        value = vars(cfg).get(names.get(name.lower(), name.lower()))
        if value is None:
            assert text in ("0", "1"), name  # an environment may hold what the recipe lacks
            continue
        held = train_gpt.show(value)
        if held != text:
            close([float(x) for x in held.split(",")], [float(x) for x in text.split(",")], 1e-12, name)


# ---------------------------------------------------------------- forward and backward
def test_losses_and_nats(seed):
    """In every setting of windows, mean loss of every batch and the nats of each token of the first."""
    model = seed.model()
    for setting in seed.json("settings"):
        losses = seed.array(f"loss.{setting['name']}")
        assert len(losses) == seed.batches() > 0
        for k, expected in enumerate(losses):
            tokens, targets = seed.batch(k)
            context = seed.setting_context(setting, tokens.size(1))
            with torch.no_grad():
                scores = model.logits(model.hidden(tokens, context)).double().flatten(0, 1)
                loss = model(tokens, targets, context).item()
            nats = F.cross_entropy(scores, targets.flatten(), reduction="none")
            assert nats.mean().item() == pytest.approx(expected, rel=LOSS), setting
            assert loss == pytest.approx(expected, rel=LOSS), setting
            if k == 0:
                theirs = seed.tensor(f"nats.{setting['name']}").double().flatten()
                assert difference(nats, theirs) < NATS, setting
                assert (nats - theirs).abs().max().item() < 10 * NATS, setting      # fp32 at 10 nats


def test_gradients(seed):
    """Of the mean loss of the first batch, every parameter."""
    name = seed.json("g_setting")["name"]
    setting = next(s for s in seed.json("settings") if s["name"] == name)
    tokens, targets = seed.batch(0)
    ours = gradients(seed.model(), tokens, targets, seed.setting_context(setting, tokens.size(1)))
    for name, (a, b) in compared(seed, ours, seed.weights("g")).items():
        assert difference(a, b) < (seed.SCALAR_GRADIENT if name in seed.SCALARS else GRADIENT), name


def compared(seed, ours, theirs):
    """{name: (our tensor, theirs)}; what is one tensor there for all layers is compared as one."""
    found = {name: (a, theirs[name]) for name, a in ours.items() if kind_of(name) not in seed.SCALARS}
    for kind in seed.SCALARS:
        names = [name for name in ours if kind_of(name) == kind]
        mine, other = ([tensors[name].flatten() for name in names] for tensors in (ours, theirs))
        found[kind] = torch.cat(mine), torch.cat(other)
    return found


@pytest.mark.parametrize("recipe, series", with_series(SEEDS), ids=name_of)
def test_updates(recipe, series, one_thread):
    """Weights after one and after five steps from w0, fresh optimizer state, at three places of the run. Five
    steps multiply rounding errors, and a weight whose update is nearly 0 is decayed on one side only: in fp32
    up to 5.5e-4, in fp64 2.6e-4 off, but never both. A deviation would show in both; so fp64 only where fp32
    is off."""
    seed = open_set(recipe)
    after = sorted(map(int, seed.matches(series + r"/w(\d+)\..*")))
    assert after
    off = updates_off(seed, series, after, torch.float32)
    if off:
        with in_fp64():
            off &= updates_off(seed, series, after, torch.float64)
    assert not off


def updates_off(seed, series, after, dtype):
    """{(steps done, parameter)} where what the steps up to this one have added differs from theirs."""
    model = seed.model().to(dtype)
    cfg = seed.cfg
    schedule = seed.rows(f"{series}/table")
    optimizer = make_optimizer(model, cfg, int(schedule[0]["step"]))
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    their_first = seed.weights("w0")
    prefix = seed.prefix(series)
    found = set()
    for k, row in enumerate(schedule[:max(after)]):
        batch = seed.batch(k, prefix)
        context = seed.context(batch[0].size(1), int(row["window_long"]), dtype)
        decay_factor = seed.decay_at(row) / (cfg.parameter_table()["query"].decay or 1)
        now = train_gpt.Schedule(row["lr"], row["momentum"], decay_factor)
        train_gpt.train_step(model, optimizer, batch, seed.rows_at_once(batch), context,
                             seed.grad_factor(row, batch), now)
        if k + 1 not in after:
            continue
        ours = {name: p.detach() - first[name] for name, p in model.named_parameters()}
        theirs = {name: w - their_first[name] for name, w in seed.weights(f"{series}/w{k + 1}").items()}
        for name, pair in compared(seed, ours, theirs).items():
            if difference(*pair) >= (TABLE_UPDATE if kind_of(name) in seed.TABLES else UPDATE):
                found.add((k + 1, name))
    return found


def test_optimizers_alone(seed):
    """Steps on given gradients of 1 to 1e-12, where eps shows."""
    unit = seed.json("unit")
    names = sorted((name for name in unit if name != "momentum_of_steps"), key=len, reverse=True)
    keys = seed.matches(r"unit\.(.*)\.p0")
    assert keys
    for key in keys:
        name = next(name for name in names if key.startswith(name))
        p0, grads, expected = (seed.tensor(f"unit.{key}.{x}") for x in ("p0", "g", "p"))
        ours = unit_alone(seed, name, unit[name], p0, grads, unit["momentum_of_steps"])
        assert difference(ours - p0, expected[-1] - p0) < UNIT, key


def unit_alone(seed, name, about, p, grads, momenta):
    """p after the steps. Where the note says that it is read as several matrices, each for itself."""
    if "betas" in about:
        return adam_alone(p, grads, about["lr"], about["betas"], about["eps"], seed.cfg)
    kind, transposed = seed.unit_kind(name)
    said = re.search(r"read as (\d+) matrices", about.get("note", ""))
    parts = int(said[1]) if said else 1
    matrices = p.reshape(parts, len(p), -1)
    grads = grads.reshape(len(grads), parts, len(p), -1)
    if transposed:
        matrices = matrices.mT
        grads = grads.mT
    done = torch.stack([muon_alone(kind, matrices[i], grads[:, i], momenta, about["lr"],
                                   seed.unit_decay(about), seed.cfg) for i in range(parts)])
    return (done.mT if transposed else done).reshape(p.shape)


# ---------------------------------------------------------------- schedules, RoPE, init at full size
def test_schedules_of_every_step(seed):
    rows = seed.rows("schedule")
    found = [seed.schedule.at(int(row["step"]), row.get("elapsed_ms", 0) / 1000) for row in rows]
    pairs = {
        "lr": [now.lr for now in found],
        "momentum": [now.momentum for now in found],
        "tokens": [now.tokens for now in found],
        "attn_scale": [now.attn_scale for now in found],
        "wd": [seed.full.parameter_table()["query"].decay * now.decay_factor for now in found],
        "adam_steps": [seed.schedule.adam_steps(int(row["step"])) for row in rows]}
    for name, kind in (("window_long", "L"), ("window_short", "S")):
        if any(row[name] for row in rows):
            pairs[name] = [now.windows[kind] for now in found]
    for name, ours in pairs.items():
        if name in rows[0]:
            theirs = [seed.decay_at(row) if name == "wd" else row[name] for row in rows]
            close(ours, theirs, 1e-9, name)


@pytest.mark.parametrize("size, prefix", [("full", "rope"), ("cfg", "rope_toy")], ids=["full", "toy"])
def test_rope(seed, size, prefix):
    windows = seed.matches(prefix + r"\.(\d+)")
    assert windows
    for window in windows:
        theirs = seed.tensor(f"{prefix}.{window}")
        ours = seed.rope(getattr(seed, size), int(window))
        torch.testing.assert_close(ours[:len(theirs)], theirs, rtol=2e-6, atol=0)
        assert not ours[len(theirs):].any()


def test_first_values_optimizers_and_rates_at_full_size(seed):
    """Of every parameter: shape, distribution of the init, optimizer, LR, decay, betas and eps."""
    init = seed.json("init")
    rows = seed.full.parameter_table()
    shapes = full_size_shapes(seed.full)
    entries = list(init.values())
    numbers = {name: torch.tensor(float(n)).expand(init[name]["shape"]) for n, name in enumerate(init)}
    numbers = seed.ours(numbers)
    firsts = seed.ours({name: seed.first_values(name, about) for name, about in init.items()})
    assert {name: tuple(number.shape) for name, number in numbers.items()} == shapes
    for name, shape in shapes.items():
        row = rows[kind_of(name)]
        for about in [entries[int(n)] for n in distinct(numbers[name])]:
            lr = row.lr
            if row.optimizer == "muon" and seed.RATES_OF_TALL:
                lr *= max(1, shape[0] / shape[1]) ** 0.5
            assert row.optimizer == ("muon" if about["optimizer"] in ("muon", "normuon") else "adam"), name
            assert lr == pytest.approx(about["lr"] * about["lr_mult"], rel=1e-6), name
            assert row.decay == pytest.approx(seed.stated_decay(about), rel=1e-6), name
            if row.optimizer == "adam":
                assert [row.beta1, row.beta2, row.eps] == [*about["betas"], about["eps"]], name
            values = distinct(firsts[name])
            law = about["init"]
            if values != [torch.inf]:
                assert (row.init, row.change, values) == ("constant", 0, [pytest.approx(row.scale)]), name
            elif "std" in law:
                assert (row.init, row.scale) == ("normal", pytest.approx(law["std"])), name
            else:
                assert row.init == "uniform", name
                assert row.scale * shape[-1] ** -0.5 == pytest.approx(law["bound"], rel=1e-6), name


# ---------------------------------------------------------------- rows of the loader, validation
@pytest.mark.parametrize("recipe", [Golf, Speedrun], ids=name_of)
def test_rows_of_a_token_stream(recipe, tmp_path, one_thread):
    seed = open_set(recipe)
    about = seed.json("packing")
    stream = seed.array("packing.tokens")
    edges = seed.array("packing.shard_edges")
    shards = open_shards(tmp_path, [stream[low:high] for low, high in zip(edges, edges[1:])])
    counts = seed.matches(r"packing\.rows(\d+)")
    assert counts
    keys = [key for key in ("step", "rank", "micro_step", "row") if key in about["columns"]]
    for ranks in map(int, counts):
        wanted = {}
        for row in seed.array(f"packing.rows{ranks}").tolist():
            named = dict(zip(about["columns"], row))
            length = named.get("length", named.get("length_with_target"))
            piece = stream[np.arange(named["start"], named["start"] + length) % len(stream)]
            wanted.setdefault(tuple(named[key] for key in keys), []).append(piece)
        wanted = {key: np.concatenate(pieces).tolist() for key, pieces in wanted.items()}
        cfg = seed.packing_config(about)
        bos = about.get("bos", seed.cfg.bos_id)
        loaders = [make_loader(cfg, shards, bos, ranks, rank) for rank in range(ranks)]
        for step in range(1 + max(key[0] for key in wanted)):
            for rank, loader in enumerate(loaders):
                x, y = loader.next(about["batch_tokens"])
                ours = torch.cat([x, y[:, -1:]], 1).tolist()
                assert ours == [row for key, row in wanted.items() if key[:2] == (step, rank)], (ranks, step)


@pytest.mark.parametrize("recipe", [Golf, Speedrun], ids=name_of)
def test_validation_rows(recipe, one_thread):
    """Score of their rows with their weights by evaluate, with its windows."""
    seed = open_set(recipe)
    rows = seed.array("validation.rows")
    targets = seed.array("validation.targets")
    context = int(rows[0][-1]) - 1
    assert rows[:, -2].tolist() == list(range(0, len(rows) * context, context))
    cfg = seed.validation_config(context, int(targets[-1]))
    ours = loss_of_split(seed.model(), cfg, seed.array("validation.tokens"))
    assert ours == pytest.approx(float(seed.array("validation.loss")), rel=LOSS)


# ---------------------------------------------------------------- the later records
def test_later_losses_and_nats(later):
    """Mean loss of every batch in every setting, the nats of each token of the first one."""
    seen = 0
    for setting in later.settings():
        model = later.model_of(setting)
        assert len(setting.losses) == later.batches() > 0
        for k, expected in enumerate(setting.losses):
            with torch.no_grad():
                loss = model(*later.batch(k), setting.context).item()
            assert loss == pytest.approx(expected, rel=later.LOSS), (setting.prefix, k)
        kept = f"nats.{setting.prefix}".rstrip(".")
        if kept in later.names:
            nats = later.nats(model, setting)
            theirs = later.tensor(kept).double().flatten()
            assert difference(nats, theirs) < later.NATS, kept
            assert (nats - theirs).abs().max() < 10 * later.NATS, kept
            seen += 1
    assert seen == sum(name == "nats" or name.startswith("nats.") for name in later.names) > 0


def test_later_gradients(later):
    """Of the mean loss of a batch, every parameter. Which batch it is the gradients themselves tell."""
    kept = [setting for setting in later.settings() if later.matches(rf"g\.{setting.prefix}(.*)")]
    assert kept
    for setting in kept:
        model = later.model_of(setting)
        for k in range(later.batches()):
            ours = later.theirs(gradients(model, *later.batch(k), setting.context))
            off = [difference(ours[name], later.tensor(f"g.{setting.prefix}{name}").double())
                   for name in later.matches(rf"g\.{setting.prefix}(.*)") if not ours[name].isnan().any()]
            if min(off) < later.GRADIENT:
                break
        nothing = {name: torch.zeros_like(grad) for name, grad in ours.items()}
        compare(later, f"g.{setting.prefix}", f"gdigest.{setting.prefix}", nothing, ours, later.GRADIENT,
                later.GRADIENT_DIGEST)


@pytest.mark.parametrize("recipe, series", with_series(LATER), ids=name_of)
def test_later_updates(recipe, series, one_thread):
    """Weights after one and five steps on given gradients, no optimizer state before."""
    later = open_set(recipe)
    model = later.model()
    after = sorted(map(int, later.matches(series + r"\.dw(\d+)\..*")))
    first = later.first_step(series, max(after))
    optimizer = make_optimizer(model, later.cfg, first)
    if later.schedule.at(first).tied:       # as it begins
        tie(model)
    before = later.theirs({name: p.clone() for name, p in model.named_parameters()})
    for k in range(1, 1 + max(after)):
        step = first + k - 1
        given = later.synthetic_gradients(step, later.is_tiny(series))
        step_on_gradients(optimizer, given, later.schedule_at(step, series))
        if k in after:
            now = later.theirs(dict(model.named_parameters()))
            compare(later, f"{series}.dw{k}.", f"{series}.w{k}digest.", before, now, later.UPDATE,
                    later.WEIGHT_DIGEST)


def test_later_first_values_optimizers_and_rates(later):
    """Of every kind of parameter at full size."""
    rows = later.full.parameter_table()
    shapes = {}
    for name, shape in full_size_shapes(later.full).items():
        shapes[kind_of(name)] = shape
    for kind, shape in shapes.items():
        row = rows[kind]
        about = later.entry(kind)
        muon = row.optimizer == "muon"
        lr = row.lr
        if muon and later.RATES_OF_TALL:
            lr *= max(1, (row.unit_rows or shape[0]) / shape[1]) ** 0.5
        assert muon == ("muon" in about["optimizer"]), kind
        assert lr == pytest.approx(about["lr"], rel=1e-6), kind
        if not muon:
            assert [row.beta1, row.beta2, row.eps] == [*about["betas"], about["eps"]], kind
        elif "beta2" in about:
            assert later.full.normuon_beta2 == about["beta2"], kind
        check_decay(row, about, kind)
        first = later.first_text(kind, about["init"])
        if first.startswith("copy of"):
            assert later.schedule.at(0).tied and row.scale == rows["head"].scale
        elif first:
            law, size, change = stated_law(first)
            scale = row.scale * shape[-1] ** -0.5 if law == "uniform" else row.scale
            assert (row.init, row.change) == (law, pytest.approx(change)), kind
            assert scale == pytest.approx(size, rel=later.INIT), kind
