"""What the golden tests of all recipes share: the sets on the disk, how the trainer is called, comparisons.

What the shared tests ask of train_gpt stands in the section "the trainer". golden_<recipe>.py says which of
its parameters and constants are which of a set's, and tests what that set alone holds. Everything else,
shapes included, is read from the sets.
"""
import json
import math
import os
import re
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_gpt
from helpers import add_gradients, fake_team, write_shard

OURS = Path(__file__).parent / "golden"
GOLDEN = Path(os.environ.get("GOLDEN") or OURS)     # GOLDEN=FOLDER lays another set over ours
FOREIGN = GOLDEN.resolve() != OURS.resolve()

# The matrices of a block, by the names that our parameters and those of the later sets have
MATRICES = ("query", "key", "value", "attn_proj", "fc", "mlp_proj")


# ---------------------------------------------------------------- the trainer
CPU = torch.device("cpu")
load_config = train_gpt.load_config
replace = train_gpt.replace
kind_of = train_gpt.kind_of


def full_size_shapes(cfg):
    """{name of a parameter: its shape}, without the memory."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in cfg.make_model().named_parameters()}


def tie(model):
    """The embedding becomes the head."""
    model.embed.data.copy_(model.head.data)


def adam_every(cfg):
    """Steps whose gradients add up to one of Adam's."""
    return max(row.every for row in cfg.parameter_table().values() if row.optimizer == "adam")


def make_optimizer(model, cfg, first_step):
    """As it is at this step of a run, but that it has no state."""
    optimizer = cfg.optimizer()(model, cfg)
    optimizer.step_count = first_step % adam_every(cfg)
    return optimizer


def step_on_gradients(optimizer, gradients, now):
    """A step on {name: gradient} at `now`, which is of Schedule.at."""
    add_gradients(optimizer, gradients)
    optimizer.step(train_gpt.Schedule(now.lr, now.momentum, now.decay_factor, now.tied))


def adam_alone(p, grads, lr, betas, eps, cfg):
    """p after a step on each of grads."""
    p = p.clone()
    m = torch.zeros_like(p)
    v = torch.zeros_like(p)
    for step, grad in enumerate(grads, 1):
        numbers = [torch.tensor(x) for x in (1.0, lr, 0.0, 0.0, float(step))]
        cfg.adam_step(train_gpt.UpdateState(p, grad, m, v, *numbers, torch.float32, *betas, eps))
    return p


def muon_alone(kind, p, grads, momenta, lr, decay, cfg):
    """p after a step on each of grads by our Optimizer, as a parameter of this kind. decay: what a step takes
    off a weight, over its LR."""
    cfg = replace(cfg, matrix_lr=lr)
    if "weight_decay" in vars(cfg):
        cfg = replace(cfg, weight_decay=decay / lr)
    module = train_gpt.Model()
    module.register_parameter(kind, torch.nn.Parameter(p.clone().contiguous()))
    optimizer = cfg.optimizer()(module, cfg)
    for grad, momentum in zip(grads, momenta):
        add_gradients(optimizer, {kind: grad})
        optimizer.step(train_gpt.Schedule(1.0, momentum))
    return module.get_parameter(kind).detach()


class Schedule:
    """Of a run at full size. attn_scale: a function of (Config, stage)."""

    def __init__(self, cfg, attn_scale):
        self.cfg = cfg
        self.attn_scale = attn_scale

    def at(self, step, seconds=0.0, progress=None):
        """lr, momentum, decay_factor, tied: what a step takes. progress, stage, and of it tokens (of a
        batch), windows {"L": long, "S": short}, attn_scale, longest (document)."""
        if progress is None:
            progress = self.cfg.progress(step, seconds)
        stage = train_gpt.stage_at(self.cfg, progress)
        now = self.cfg.schedule(step, progress)
        windows, attn_scale = self.of_stage(stage)
        return SimpleNamespace(
            progress=progress, lr=now.lr, momentum=now.momentum, decay_factor=now.decay, tied=now.tied,
            stage=stage, tokens=stage.batch_tokens, longest=stage.doc_len, windows=windows,
            attn_scale=attn_scale)

    @cache
    def of_stage(self, stage):
        windows = self.cfg.windows(stage, stage.row_tokens) if hasattr(self.cfg, "windows") else {}
        return {kind: windows.get(kind) for kind in "LS"}, self.attn_scale(self.cfg, stage)

    def adam_steps(self, step):
        """Does Adam take a step at the end of this one?"""
        return (step + 1) % adam_every(self.cfg) == 0


def open_shards(folder, parts):
    """{name: Shard} of shards on the disk."""
    found = {}
    for number, tokens in enumerate(parts):
        path = folder / f"x_train_{number:06d}.bin"
        write_shard(path, tokens)
        found[path.name] = train_gpt.Shard(path, len(tokens))
    return found


def make_loader(cfg, shards, bos, ranks, rank, groups=()):
    """groups: {name of a shard: documents of each of its groups}."""
    groups = dict(groups)
    shards = [shard._replace(groups=groups.get(name)) for name, shard in shards.items()]
    data = train_gpt.Data(shards, None, None, cfg.vocab_size, bos, None, {})
    with mock.patch.object(type(cfg), "check_data", lambda *_: None, create=True):
        return train_gpt.Loader(cfg, data, fake_team(rank, ranks), log=lambda *_: None)


def loss_of_split(model, cfg, tokens):
    """val_loss of a val split."""
    data = train_gpt.Data([], tokens, None, cfg.vocab_size, cfg.bos_id, None, {})
    return train_gpt.evaluate(model, cfg, data, fake_team()).val_loss


def nats_of(model, tokens, targets):
    """Of each target, by log_probs."""
    with torch.no_grad():
        return -train_gpt.log_probs(model, tokens).gather(-1, targets[..., None])[..., 0].double()


# ---------------------------------------------------------------- the sets
@cache
def open_set(recipe):
    """The set of a recipe. One that is not there is skipped by name if it is not ours that is asked for."""
    path = GOLDEN / recipe.FILE
    if not path.exists() and FOREIGN:
        pytest.skip(f"{recipe.FILE}: not in this folder")
    assert path.exists(), f"{recipe.FILE} is missing"
    return recipe(np.load(path))


def set_fixture(recipe):
    """A fixture that is the set of a recipe."""
    @pytest.fixture(scope="module")
    def opened(one_thread):
        return open_set(recipe)
    return opened


class GoldenSet:
    """A set: JSON texts, arrays, weights by prefix, batches. A recipe adds FILE, its place in the folder; cfg
    and full, our Config at toy and at full size; ours(), which of our parameters is which of theirs; and
    RATES_OF_TALL, whether their rates hold the factor of tall matrices. ours() is linear with factors 1, so
    it serves weights, gradients and updates alike."""

    def __init__(self, npz):
        self.npz = npz
        self.arrays = {}
        self.names = {*npz.files}

    def array(self, name):
        if name not in self.arrays:
            self.arrays[name] = self.npz[name]
        return self.arrays[name]

    def tensor(self, name):
        return torch.from_numpy(np.asarray(self.array(name)))

    def json(self, name):
        return json.loads(str(self.array(name)))

    def rows(self, name):
        """Rows of a schedule as {column: number}."""
        columns = self.json("schedule_columns")
        return [dict(zip(columns, row)) for row in self.array(name).tolist()]

    def matches(self, pattern):
        """[what the group of the pattern holds, of every name that it fits], in order, each once."""
        found = (re.fullmatch(pattern, name) for name in self.npz.files)
        return list(dict.fromkeys(match[1] for match in found if match))

    def their_weights(self, prefix):
        return {name: self.tensor(f"{prefix}.{name}") for name in self.matches(re.escape(prefix) + r"\.(.*)")}

    def weights(self, prefix):
        return self.ours(self.their_weights(prefix))

    def batches(self, prefix=""):
        """How many there are."""
        return len(self.matches(re.escape(prefix) + r"tokens_(\d+)"))

    def model(self):
        """Ours with their weights: every parameter of the one is one of the other."""
        model = self.cfg.make_model()
        weights = self.weights("w0")
        assert {name: tuple(w.shape) for name, w in weights.items()} == \
            {name: tuple(p.shape) for name, p in model.named_parameters()}
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(weights[name])
        return model

    # what a recipe with windows has of its own; here every layer sees everything before it
    def context(self, T, window, dtype=torch.float32):
        """For rows of T tokens; window: tokens before its own that a long layer sees."""
        with torch.device("meta"):
            model = self.cfg.make_model()
        return model.context(T, CPU, dtype, self.stage(window or T))

    def stage(self, window):
        """None: as in scores."""
        return None

    def windows(self, context):
        """{kind of layer: tokens before its own that it sees}"""
        return {}

    def scale_in(self, context):
        """Factor on q @ k in a forward pass."""
        return self.attn_scale(self.cfg, None)

    def rope(self, cfg, window):
        """Radians per token of each pair of channels."""
        return train_gpt.rope_spectrum(cfg.model_dim // cfg.num_heads, cfg.rope_base)

    def attn_scale(self, cfg, stage):
        """The same by a stage."""
        return (cfg.model_dim // cfg.num_heads) ** -0.5


class WithWindows(GoldenSet):
    """A set whose recipe has long and short windows, which are a column of its stages."""

    def stage(self, window):
        return replace(self.cfg.stages()[-1], window=window)

    def windows(self, context):
        return {kind: int(size) for kind, size in context.windows.items()}


class Seed(GoldenSet):
    """A set of golden/README.md. A recipe may also name SCALARS, kinds that are one tensor there for all
    layers and are compared as one, with the tolerance SCALAR_GRADIENT, and TABLES, whose tiny gradients
    change sign."""
    SCALARS = ()
    SCALAR_GRADIENT = 8e-6
    TABLES = ()

    def __init__(self, npz):
        super().__init__(npz)
        self.cfg = load_config(self.json("overrides"))
        self.full = load_config(self.json("overrides_full"))
        self.schedule = Schedule(self.full, self.attn_scale)

    @classmethod
    def series(cls):
        """Names of the series of steps, before a test has opened the set."""
        path = GOLDEN / cls.FILE
        return json.loads(str(np.load(path)["series"])) if path.exists() else ["none"]

    def prefix(self, series):
        """Of the batches of a series: its own where they grow, else the plain ones."""
        return f"{series}/" if self.batches(f"{series}/") else ""

    def batch(self, k, prefix=""):
        return self.tensor(f"{prefix}tokens_{k}"), self.tensor(f"{prefix}targets_{k}")

    def setting_context(self, setting, T):
        """Context of one of `settings`, whose numbers beside the long window are ours."""
        context = self.context(T, setting["window_long"])
        sizes = self.windows(context)
        if "S" in sizes and setting["window_short"]:
            assert sizes["S"] == setting["window_short"], setting
        if "attn_scale" in setting:
            assert self.scale_in(context) == pytest.approx(setting["attn_scale"], rel=1e-6), setting
        return context

    def rows_at_once(self, batch):
        """Rows of a micro-step."""
        return len(batch[0])

    def grad_factor(self, row, batch):
        """Their gradient over that of the mean loss, at a row of a series."""
        return 1

    def decay_at(self, row):
        """What Muon takes off a weight, over its LR, at a row of a schedule."""
        return row["wd"]

    def unit_decay(self, about):
        """The same of an optimizer alone."""
        return about.get("wd", 0)

    def unit_kind(self, name):
        """(the kind of our parameter that an optimizer alone is tried on, whether theirs is transposed)"""
        return "query", False

    def first_values(self, name, about):
        """Init of a tensor at full size; inf: drawn."""
        law = about["init"]
        known = {"constant": law.get("value"), "zeros": 0, "rows": law.get("values")}
        values = torch.tensor(known.get(law["kind"], math.inf), dtype=torch.float64)
        while values.dim() < len(about["shape"]):
            values = values.unsqueeze(-1)
        return values.expand(about["shape"])

    def stated_decay(self, about):
        """What a step takes off a weight, over its LR, by an entry of init."""
        return about.get("wd", 0) * about.get("wd_mult", 1)


class Setting(NamedTuple):
    """Of a later set: its name with a dot, the loss of each batch, how a model runs, whether its embedding is
    the head."""
    prefix: str
    losses: np.ndarray
    context: tuple
    tied: bool = False


class Later(GoldenSet):
    """A set of golden/plus/README.md. A recipe also gives PRESET; toy(), its constants; settings(), a list;
    first_step(), of a series of so many; and NAMES, {kind of our parameter: theirs}, where they differ."""
    NAMES = {}
    LOSS = 1e-6
    NATS = 1e-5
    GRADIENT = GRADIENT_DIGEST = 2e-4
    UPDATE = WEIGHT_DIGEST = 1e-3
    INIT = 2e-6

    def __init__(self, npz):
        super().__init__(npz)
        self.meta = self.json("meta")
        self.full = load_config({"PRESET": self.PRESET})
        self.schedule = Schedule(self.full, self.attn_scale)
        self.overrides = {"PRESET": self.PRESET} | {name: str(x) for name, x in self.toy().items()}
        self.cfg = load_config(self.overrides)

    @classmethod
    def series(cls):
        path = GOLDEN / cls.FILE
        if not path.exists():
            return ["none"]
        found = (re.match(r"(\w+)\.dw\d+\.", name) for name in np.load(path).files)
        return list(dict.fromkeys(match[1] for match in found if match))

    def batch(self, k):
        rows = [self.tensor(f"{name}_{k}").long() for name in ("tokens", "targets")]
        return [row.view(-1, row.size(-1)) for row in rows]

    def model_of(self, setting):
        model = self.model()
        if setting.tied:
            tie(model)
        return model

    def nats(self, model, setting):
        """Of each token of the first batch."""
        tokens, targets = self.batch(0)
        with torch.no_grad():
            scores = model.logits(model.hidden(tokens, setting.context)).double()
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")

    def schedule_at(self, step, series):
        return self.schedule.at(step)

    def allowed(self, moved, whole, tolerance):
        """How far a digest may be off: of what was added, and of how fp32 holds the sum."""
        return tolerance * moved.norm() + 1e-6 * whole.norm()

    @cache
    def numbers(self):
        """{their name: of each number its place in all of them}"""
        shapes = {name: w.shape for name, w in self.their_weights("w0").items()}
        places = torch.arange(sum(shape.numel() for shape in shapes.values()), dtype=torch.float64)
        parts = places.split([shape.numel() for shape in shapes.values()])
        return {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items())}

    def theirs(self, ours):
        """{our name: tensor} -> {their name: tensor}; nan where ours has no such number."""
        numbers = self.numbers()
        flat = torch.full((sum(part.numel() for part in numbers.values()),), math.nan, dtype=torch.float64)
        for name, places in self.ours(numbers).items():
            flat[places.flatten().long()] = ours[name].detach().double().flatten()
        return {name: flat[places.long()] for name, places in numbers.items()}

    def synthetic_gradients(self, step, tiny=False):
        """Of golden/plus/README.md, as ours; tiny: of golden/frontier/README.md."""
        found = {}
        for i, name in enumerate(sorted(self.their_weights("w0"))):
            draw = np.random.default_rng([self.meta["seed"], step, i])
            shape = self.array(f"w0.{name}").shape
            grad = 0.01 * draw.standard_normal(shape)
            if tiny:
                grad = grad * 10 ** (-10 * draw.random(shape))
            found[name] = torch.from_numpy(grad.astype(np.float32))
        return self.ours(found)

    def is_tiny(self, series):
        return False

    def first_text(self, kind, text):
        """The part of an entry's `init` about this kind of our parameters; "": it has a test of its own."""
        return text

    def entry(self, kind):
        """The entry of `init` for this kind of our parameters: blocks.i.query/key/value (10 layers)."""
        init = self.json("init")
        name = self.NAMES.get(kind, kind)
        found = [about for key, about in init.items() if name in re.split(r"[./]", key.split(" ")[0])]
        assert len(found) == 1, (kind, [*init])
        return found[0]


def value_tables(w, suffix=""):
    """Value embeddings: theirs are named after their layers, ours are counted."""
    layers = sorted({int(name.split(".")[1]) for name in w if name.startswith("value_embeds.")})
    return {f"value_embeds.{n}": w[f"value_embeds.{i}{suffix}"] for n, i in enumerate(layers)}


# ---------------------------------------------------------------- what a later set's `init` says
def stated_law(text):
    """(law, bound, std or first value, change over the layers) of an entry's text."""
    text = text.partition("fixed later: ")[2] or text
    numbers = [float(number) for number in re.findall(r"[-+]?\d+\.?\d*", text.replace("- ", "-"))]
    if text.startswith("uniform"):
        return ("positive" if numbers[0] == 0 else "uniform", numbers[1], 0)
    if text.startswith(("normal", "orthogonal")):
        return (text.split("(")[0].split(",")[0], numbers[-1], 0)
    if text.startswith("sqrt"):
        return ("constant", numbers[0] ** 0.5, 0)
    return ("constant", 0 if text == "zeros" else numbers[0], numbers[1] if " i/" in text else 0)


def check_decay(row, about, kind):
    """What a step takes off a weight; `row` has it over our LR, which lacks the factor of tall matrices."""
    text = about.get("decay_per_step", "")
    if "weight_decay" in about:
        assert row.decay * about.get("update_mul", 1) == pytest.approx(about["weight_decay"], rel=1e-6), kind
    elif "wd_mul" in about:         # (lr*factor)^2*0.005*wd_mul
        factor = float(re.search(r"\^2\*([\d.]+)\*wd_mul", text)[1])
        assert row.decay == pytest.approx(row.lr * factor * about["wd_mul"]), kind
        assert row.decay_with_lr or not about["wd_mul"]
    else:       # 1.2*(0.023*factor)*(0.023*factor*lr_mul)
        numbers = re.match(r"([\d.]+)\*\(([\d.]+)\*factor\)\*", text).groups()
        assert row.decay == pytest.approx(math.prod(map(float, numbers))), kind


# ---------------------------------------------------------------- comparisons
def difference(ours, theirs):
    """|ours - theirs| / |theirs|, Euclidean."""
    return (ours - theirs).norm().item() / (theirs.norm().item() or 1)


def close(ours, theirs, tolerance, what):
    """All numbers of two lists, at once."""
    ours = np.asarray(ours, np.float64)
    theirs = np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape and len(ours), what
    assert np.isfinite(ours).all() and np.isfinite(theirs).all(), what
    wrong = np.flatnonzero(np.abs(ours - theirs) > tolerance)
    assert not len(wrong), (what, [(i, ours[i], theirs[i]) for i in wrong[:5]])


def distinct(tensor):
    """The different values of a tensor, of which much may be one number, expanded."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    least, most = tensor.aminmax()
    return [least.item()] if least == most else tensor.unique().tolist()


def digest(x):
    """[sum, norm, sum of x_i cos(i)]"""
    flat = x.detach().double().flatten()
    wave = torch.arange(len(flat), dtype=torch.float64).cos()
    return torch.stack([flat.sum(), flat.norm(), (flat * wave).sum()])


def compare(later, start, digests, before, after, tolerance, of_digests):
    """What was added to each of their tensors that they kept under names that start so, and the digest of
    each tensor, unless ours has a part of it only. before, after: {their name: tensor}"""
    kept = later.matches(re.escape(start) + "(.*)")
    for name in kept:
        there = ~after[name].isnan()
        theirs = later.tensor(start + name).double()
        assert difference((after[name] - before[name])[there], theirs[there]) < tolerance, start + name
    whole = [name for name in later.matches(re.escape(digests) + "(.*)") if not after[name].isnan().any()]
    for name in whole:
        theirs = later.tensor(digests + name)
        off = (digest(after[name]) - theirs).abs().max()
        allowed = later.allowed(after[name] - before[name], after[name], of_digests)
        assert off <= allowed, (digests + name, off, theirs)
    assert kept or whole


def gradients(model, tokens, targets, context):
    """{name: gradient of the mean loss}"""
    names, params = zip(*model.named_parameters())
    loss = model(tokens, targets, context)
    return dict(zip(names, torch.autograd.grad(loss, params, materialize_grads=True)))


@contextmanager
def in_fp64():
    """What the trainer makes fp32 of stays fp64."""
    to_fp32 = torch.Tensor.float
    with mock.patch.object(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_fp32(x)):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)
