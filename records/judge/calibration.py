"""Which gains of the full-size speedrun do its proxies show? ./run.sh record calibrate

The losses of all runs are in calibration.tsv; those that it lacks are trained. Remove it and logs/calibration
when the recipe or a proxy's rule changes.

The list, its public gains and their conversion into tokens were written before the first run. A technique is
taken out of speedrun_plus, a known loser is put into it, and each run is compared with the recipe's of the
same seed. A third of both, drawn by a seed, is kept for the end: `--kept` runs and reports it. The plan was
to compare means; comparing runs of one seed was decided after the first two thirds had run. Then most of the
kept third showed that the proxies themselves were wrong, so of the mended ones no third is unseen: see the
entry on the calibration in docs/log.md.
"""
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data import inputs
from records.judge import tries
from records.judge.runs import demand
from records.judge.scores import demand_comparable
from records.judge.tries import Change, Proxy
from records.verify.folders import ROOT

PRESET = "speedrun_plus"
WIDTHS = (32, 48)
TEXTS = ("data/datasets/embedded", "data/datasets/eng1024")
FIRST_SEED = 4800
KEPT_SEED = 48
KEPT_PART = 1 / 3
RESAMPLES = 2000    # of the bootstrap
FOLDER = Path("logs", "calibration")
RUNS = ROOT / "records" / "calibration.tsv"

# What a step less costs at the end of the full-size speedrun, in nats: runs of one script with 50 steps less,
# by the logs of 2026-04-22_MuddFormer (3.28674 at 1430 and 3.27875 at 1480 steps, 10 runs each) and of
# 2026-05-27-MuddGatedAndDC (3.28477 at 1335, 9 runs, and 3.27841 at 1385, 10 runs).
NATS_PER_STEP = ((3.28674 - 3.27875) / 50 + (3.28477 - 3.27841) / 50) / 2


class Public(NamedTuple):
    """A gain at full size as it was published. Steps are compared: a record keeps the proportions of the
    stages before it, so a part of the steps is that part of the tokens, and kernels change none of them."""
    before: float       # steps that the record before took to the target, or seconds where steps are not told
    fewer: float        # how many fewer
    nats: float = 0.0   # and how much lower the loss was nevertheless
    source: str = ""

    @property
    def percent(self) -> float:
        """Tokens saved, in percent of those of the record before."""
        return 100 * (self.fewer + self.nats / NATS_PER_STEP) / self.before


class Known(NamedTuple):
    """A technique or a loser."""
    name: str
    kind: str           # table, attention, streams, loss, optimizer, init, schedule
    public: Public | None       # None: worse, but not told by how much
    flags: dict         # {name: value}; a tuple counts blocks of windows
    edits: tuple = ()   # (text of train_gpt.py, what takes its place)
    put_in: bool = False        # a loser; else a technique that is taken out

    @property
    def percent(self) -> float | None:
        """Its public gain, if it is told."""
        return self.public.percent if self.public else None


STATIC_MUDD = (
    "    values = mudd(x, w1, w2[:n], bias[:n], scale)\n",
    "    static = (scale * bias[:n]).to(x.dtype)\n"
    "    values = static.expand(*x.shape[:2], n)\n")
STATIC_GATES = (
    "    values = mudd(x, w1, w2[:n], bias[:n], scale.to(x.dtype))\n",
    "    static = (bias[:n] * scale).to(x.dtype)\n"
    "    values = static.expand(*x.shape[:2], n)\n")
SHARED_TABLES = (
    "    for layer, table in zip(layers, tables):\n",
    "    shared = [tables[i] for i in (0, 1, 2, 0, 1)]\n"
    "    for layer, table in zip(layers, shared):\n")
ZERO_PROJ = (
    '            matrix("attn_proj", init="uniform", scale=0.8660254, lr=lr, second="columns"),\n',
    '            matrix("attn_proj", init="constant", scale=0.0, lr=lr, second="columns"),\n')
FULL_VALUES = ("torch.tensor([0.5, 1.0])", "torch.tensor([1.0, 1.0])")
UNGATED = (
    "                    values = gated_value_embed(h, value_embeds[i], block.value_gate)\n",
    "                    values = 1.0 * value_embeds[i]\n")
GELU = (
    "are ignored.\"\"\"\n    return mlp(x, fc, proj)\n",
    "are ignored.\"\"\"\n    return linear(F.gelu(linear(x, fc)), proj)\n")
WHOLE_OFFSET = (
    "    own, moved = k.tensor_split(2, -1)\n",
    "    return torch.cat((k[:, :1], k[:, :-1]), 1)\n"
    "    own, moved = k.tensor_split(2, -1)\n")
NORMED_TABLES = (
    "        value_embed = F.embedding(tokens, table).to(dtype)\n"
    "        found[layer] =",
    "        value_embed = rms_norm(F.embedding(tokens, table).to(dtype))\n"
    "        found[layer] =")
NO_FIRST_MLP = (
    "            y = self.kernels.mlp(rms_norm(x), block.fc, block.mlp_proj, scales[i])\n"
    "            x = resid[1] * x + post[1] * y\n",
    "            if i > 0:\n"
    "                y = self.kernels.mlp(rms_norm(x), block.fc, block.mlp_proj, scales[i])\n"
    "                x = resid[1] * x + post[1] * y\n")
NO_LAST_MLP = (
    "        x = resid + mu.mlp_out * self.kernels.mlp(rms_norm(x), block.fc, block.mlp_proj, "
    "scales[last])\n",
    "        x = resid\n")

# Steps are those of the logs and pages in records/track_1_short of github.com/KellerJordan/modded-nanogpt, as
# of its commit f411b3d3; #N is a pull request there.
LIST = [
    Known("bigram embedding", "table",
          Public(1765, 165, source="2026-01-19_BigramHashEmbedding, 0.5 of 5.6 s by a mended key offset"),
          dict(bigram_rows=3)),
    Known("signs on bigrams", "table",
          Public(81, 1.3, source="record 83, in seconds"),
          dict(bigram_sign_rows=0)),
    Known("value embeddings of their own", "table",
          Public(1600, 25, source="2026-01-26-UntieValueEmbeddings"),
          {}, (SHARED_TABLES,)),
    Known("gates on value embeddings", "table",
          Public(1880, 35, source="2025-12-29_VeSkipGates, together with a gate on the skip"),
          {}, (UNGATED,)),
    Known("paired heads", "attention",
          Public(1840, 65, source="2026-01-07_PairedHeadAttention"),
          dict(window_pattern="SSSLSS-SSSL")),
    Known("key offset", "attention",
          Public(2160, 50, source="2025-12-14_PartialKeyOffset"),
          dict(key_offset=0)),
    Known("XSA", "attention",
          Public(1480, 30, 0.00097, "2026-05-07_XSAGatedLayers"),
          dict(xsa_layers="")),
    Known("dynamic attention", "attention",
          Public(1385, 0, 0.0046, "2026-05-27-MuddGatedAndDC, as told for DC alone"),
          dict(dc_window=0)),
    Known("MUDD", "streams",
          Public(1480, 65, 0.0007, "2026-04-22_MuddFormer"),
          {}, (STATIC_MUDD,)),
    Known("MUDD gates", "streams",
          Public(1385, 0, 0.0030, "2026-05-27-MuddGatedAndDC, 0.0076 less the part of DC"),
          {}, (STATIC_GATES,)),
    Known("several targets", "loss",
          Public(2000, 80, source="2025-12-22_MultiTokenPrediction, together with the untied end"),
          dict(next_targets=1)),
    Known("prefix loss", "loss",
          Public(1375, 0, 0.0031, "2026-07-13_PrefixTokenPrediction"),
          dict(prefix_weight=0)),
    Known("shifted softcap", "loss",
          Public(1920, 40, source="2025-12-26_LogitRescale"),
          dict(logit_softcap=15, logit_shift=0, logit_width=15)),
    Known("tied lm_head", "optimizer",
          Public(2090, 55, source="2025-12-19_RetieLMHead, there tied to the end"),
          dict(untie_at=0)),
    Known("cautious decay of Adam", "optimizer",
          Public(2110, 20, source="2025-12-18_CautiousWDAdam"),
          dict(adam_weight_decay=0)),
    Known("Muon on pairs of heads", "optimizer",
          Public(1490, 10, source="2026-04-08_PairedHeadMuon"),
          dict(muon_pairs=0)),
    Known("first values of V and O", "init",     # a name that the draw of the third depends on
          Public(1575, 20, source="2026-01-30_MimeticValueOutput"),
          {}, (ZERO_PROJ, FULL_VALUES)),
    # ----- losers
    Known("GELU", "MLP",
          Public(100, -1.5, source="the public scripts put ReLU^2 1 to 2 % ahead"),
          {}, (GELU,), put_in=True),
    Known("no MLP in the first and last layer", "MLP",
          Public(100, -1.5, source="#120: about 1.5 % more steps"),
          {}, (NO_FIRST_MLP, NO_LAST_MLP), put_in=True),
    Known("key offset on all channels", "attention",
          None,     # 2025-12-14_PartialKeyOffset: worse than on half of them
          {}, (WHOLE_OFFSET,), put_in=True),
    Known("normed value embeddings", "table",
          None,     # 2025-08-23_SparseAttnGate: worse
          {}, (NORMED_TABLES,), put_in=True),
    # does nothing since proxies read the whole text; without it another third would be drawn
    Known("documents cut in the second stage", "schedule",
          Public(1515, 0, -0.00035, "2026-02-10_ShortWindow: 0.0003 to 0.0004 above the target"),
          dict(doc_schedule=(7, 12, 16, 16)), put_in=True)]


def kept_names() -> list[str]:
    """The third that is kept for the end, of techniques and of losers alike."""
    chance = random.Random(KEPT_SEED)
    kept = []
    for put_in in (False, True):
        names = sorted([known.name for known in LIST if known.put_in == put_in])
        kept += chance.sample(names, round(KEPT_PART * len(names)))
    return kept


# ------------------------------------------------------------ running
def edited(text: str, edits: tuple) -> str:
    """A script with edits, each of which finds its place exactly once. Raises Refused."""
    for old, new in edits:
        demand(text.count(old) == 1, f"train_gpt.py has {text.count(old)} places for {old.strip()!r}")
        text = text.replace(old, new)
    return text


def flags_at(known: Known, width: int) -> dict:
    """Its flags at a width."""
    from tools.run import proxy
    import train_gpt
    full: Any = train_gpt.preset_config(PRESET)
    windows = proxy.speedrun_windows(full, width / full.model_dim)
    block = proxy.value_of(windows, "window_block")
    flags = {}
    for name, value in known.flags.items():
        if isinstance(value, tuple):
            value = ",".join([str(blocks * block) for blocks in value])
        flags[name] = str(value)
    return flags


def scripts(text: str) -> dict[str, Path]:
    """{name: script} of the recipe, as "base", and of all changes, frozen in FOLDER at the first call."""
    found = {}
    for name, edits in [("base", ()), *[(known.name, known.edits) for known in LIST]]:
        path = FOLDER / name.replace(" ", "_") / "train_gpt.py"
        if not path.exists():
            tries.frozen(edited(text, edits), path.parent)
        found[name] = path
    return found


def jobs_of(args: Any, chosen: list[Known]) -> list:
    """[(change, proxy, seed)]: the recipe and all changes at the first seed, then at the next."""
    further = tries.flags_of(args.settings)
    files = scripts(inputs.read_text(ROOT / "train_gpt.py"))
    base = Change("base", files["base"], further)
    jobs = []
    for number in range(args.seeds):
        seed = FIRST_SEED + 2 * number      # the recipe was also run at the odd ones, for means
        for width in args.widths:
            for text in args.texts:
                proxy = Proxy(PRESET, width, text)
                jobs.append((base, proxy, seed))
                for known in chosen:
                    change = Change(known.name, files[known.name], flags_at(known, width) | further)
                    jobs.append((change, proxy, seed))
    return jobs


def calibrate(args: Any, say: Callable) -> dict:
    """Runs what RUNS lacks, unless the changes are only to be listed or reported, then reports."""
    kept = kept_names()
    chosen = [known for known in LIST if (known.name in kept) == args.kept]
    if args.list:
        return listed(kept, say)
    path = RUNS
    if args.settings:   # another recipe, whose losses are not those of RUNS
        path = FOLDER / f"{'_'.join(args.settings).replace('/', '_')}.tsv"
    losses = read_runs(path)
    jobs = jobs_of(args, chosen)
    missing = [job for job in jobs if job[-1] not in losses.get(cell_of(*job), {})]
    say(f"{len(jobs)} runs, of which {len(missing)} are missing")
    if not args.report:
        run_jobs(missing, tries.workers_of(args), losses, path, say)
    return report(chosen, losses, say) | report_whole_list(losses, say)


def run_jobs(jobs: list, workers: int, losses: dict, path: Path, say: Callable) -> None:
    """Trains them and adds their losses to `losses` and to the file; the first that fails, or is scored on
    other tokens than those before it, ends it, once those beside it are done."""
    first: dict = {}        # {(width, text): run}
    for i in range(0, len(jobs), workers):
        some = jobs[i:i + workers]
        for job, run in zip(some, tries.side_by_side(some, workers)):
            demand(not isinstance(run, Exception), str(run))
            change, proxy, seed = job
            demand_comparable([first.setdefault((proxy.width, proxy.text), run), run], "val_loss")
            loss = tries.loss_of(run)
            losses.setdefault(cell_of(*job), {})[seed] = loss
            say(f"{i + len(some)}/{len(jobs)} {change.name}, width {proxy.width}, {proxy.text}, seed {seed}: "
                f"{loss:.4f}, {run.time or 0:.0f} s")
        write_runs(losses, path)


def listed(kept: list[str], say: Callable) -> dict:
    """The list, the largest public gain first."""
    def order(known: Known) -> float:
        return 99.0 if known.percent is None else -known.percent

    say(f"a step is worth {NATS_PER_STEP:.6f} nats")
    for known in sorted(LIST, key=order):
        gain = "worse"
        if known.public:
            gain = f"{known.public.percent:+.2f} % of the tokens ({known.public.source})"
        say(f"{'put in' if known.put_in else 'taken out'}: {known.name} [{known.kind}]: {gain}"
            f"{'; kept for the end' if known.name in kept else ''}")
    return {known.name: known.percent for known in LIST}


# ------------------------------------------------------------ runs as numbers
def cell_of(change: Change, proxy: Proxy, seed: int) -> tuple[str, int, str]:
    """Where the losses of a job stand, by seed."""
    return change.name, proxy.width, Path(proxy.text).name


def write_runs(losses: dict, path: Path) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write("name\twidth\ttext\tseed\tval_loss\n")
        for (name, width, text), cell in sorted(losses.items()):
            for seed, loss in sorted(cell.items()):
                file.write(f"{name}\t{width}\t{text}\t{seed}\t{loss:.8f}\n")


def read_runs(path: Path) -> dict:
    """{(name, width, text): {seed: loss}} of a file that write_runs() wrote, or {}."""
    losses: dict = {}
    for row in tries.read_table(path) if path.exists() else []:
        cell = (row["name"], int(row["width"]), row["text"])
        losses.setdefault(cell, {})[int(row["seed"])] = float(row["val_loss"])
    return losses


# ------------------------------------------------------------ analysis
def gains_of(known: Known, losses: dict, width: int, text: str) -> list[float]:
    """What a technique or a loser gains at this width on this text, in nats, negative for a loss: one number
    for each seed that it shares with the recipe. Runs of one seed read the same rows and draw the same first
    values, so their difference is less noisy than that of runs of two seeds."""
    mine = losses.get((known.name, width, text), {})
    base = losses.get(("base", width, text), {})
    sign = -1 if known.put_in else 1
    return [sign * (loss - base[seed]) for seed, loss in sorted(mine.items()) if seed in base]


def spread_of(gains: list[list[float]]) -> float:
    """The standard deviation of a gain, pooled over changes; 0 if none has two."""
    variances = [np.var(some, ddof=1) for some in gains if len(some) > 1]
    return float(np.mean(variances)) ** 0.5 if variances else 0.0


def rank_correlation(public: np.ndarray, gains: np.ndarray) -> float:
    """Spearman's rho; 0 where one side has a single value."""
    from scipy import stats
    if len({*public}) < 2 or len({*gains}) < 2:
        return 0.0
    return float(stats.spearmanr(public, gains).statistic)


def agreement(pairs: list) -> dict:
    """Rank correlation and agreement in sign of [(public gain or None, gain here)], with 95 % intervals: rho
    by a bootstrap over the list, the share of equal signs by Wilson."""
    from scipy import stats
    numbers = [(public, gain) for public, gain in pairs if public is not None]
    found: dict = {"n": len(pairs), "ranked": len(numbers)}
    if len(numbers) > 3:
        public = np.array([public for public, _ in numbers])
        gains = np.array([gain for _, gain in numbers])
        found["rho"] = rank_correlation(public, gains)
        spread = stats.bootstrap((public, gains), rank_correlation, paired=True, vectorized=False, rng=0,
                                 n_resamples=RESAMPLES, method="percentile").confidence_interval
        found["rho_interval"] = (float(spread.low), float(spread.high))
    equal = [(public is not None and public > 0) == (gain > 0) for public, gain in pairs]
    found["signs"] = sum(equal)
    if equal:
        span = stats.binomtest(sum(equal), len(equal)).proportion_ci(method="wilson")
        found["signs_interval"] = (float(span.low), float(span.high))
    return found


def report(known_ones: list[Known], losses: dict, say: Callable) -> dict:
    """The table of gains, then agreement with the public ones by width and text and for their means. A change
    that leaves every loss as it was does nothing in this proxy and is left out: with two heads, Muon on pairs
    of heads is Muon on all of them."""
    places = sorted({(width, text) for _, width, text in losses})
    gains: dict = {}
    spreads: dict = {}
    for place in places:
        here = {known.name: gains_of(known, losses, *place) for known in known_ones}
        gains[place] = {name: some for name, some in here.items() if any(some)}
        spreads[place] = spread_of([*gains[place].values()])
    columns: dict = {place: [] for place in places}
    means = []
    for known in known_ones:
        public = known.percent
        told = "worse" if public is None else f"{public:+.2f} %"
        line = f"{known.name}: public {told}"
        mine = []
        for place in places:
            some = gains[place].get(known.name)
            if not some:
                continue
            gain = float(np.mean(some))
            columns[place].append((public, gain))
            mine.append(gain)
            width, text = place
            line += f"; {width} {text} {gain:+.4f}"
            if spreads[place] > 0:
                line += f" ± {spreads[place] / len(some) ** 0.5:.4f}"
        if mine:
            means.append((public, float(np.mean(mine))))
        say(line if mine else f"{line}; changes nothing here, or was not run")
    found = {f"{width} {text}": agreement(columns[width, text]) for width, text in places}
    found["mean of all"] = agreement(means)
    for name, one in found.items():
        say_agreement(name, one, say)
    for (width, text), spread in spreads.items():
        if spread > 0:
            say(f"{width} {text}: one seed's gain has a deviation of {spread:.4f} nats")
    return found


def say_agreement(name: str, found: dict, say: Callable) -> None:
    """The lines of what agreement() found."""
    if "rho" in found:
        low, high = found["rho_interval"]
        say(f"{name}: Spearman's rho {found['rho']:+.2f} ({low:+.2f} to {high:+.2f}), "
            f"{found['ranked']} changes")
    if "signs_interval" in found:
        low, high = found["signs_interval"]
        say(f"{name}: {found['signs']} of {found['n']} signs agree ({low:.0%} to {high:.0%})")


def report_whole_list(losses: dict, say: Callable) -> dict:
    """Over the whole list, the kept third included: how far each width and text agrees with the public gains,
    and each two of them with each other."""
    places = sorted({(width, text) for _, width, text in losses})
    means: dict = {}
    for place in places:
        here = {known.name: gains_of(known, losses, *place) for known in LIST}
        means[place] = {name: float(np.mean(some)) for name, some in here.items() if any(some)}
    publics = {known.name: known.percent for known in LIST}
    found = {}
    for i, (width, text) in enumerate(places):
        mine = means[width, text]
        found[f"whole list, {width} {text}"] = agreement([(publics[name], mine[name]) for name in mine])
        for other in places[i + 1:]:
            pairs = [(mine[name], means[other][name]) for name in mine if name in means[other]]
            found[f"{width} {text} and {other[0]} {other[1]}"] = agreement(pairs)
    for name, one in found.items():
        say_agreement(name, one, say)
    return found
