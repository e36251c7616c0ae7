"""A change of a recipe, tried on a proxy: `record try`.

A finished run is read, never trained again, so a try that was killed goes on where it stopped. The statistics
are in sequential.py.
"""
import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data import inputs
from records.judge import sequential
from records.judge.logs import (
    Refused, Run, demand, demand_seed, make_folder, read_log, read_runs, remove_folder,
    why_not_another)
from records.judge.scores import demand_comparable
from records.judge.sequential import Noise
from records.judge.trials import last_line, run_once
from records.verify.folders import ROOT, sha256, track_of

LEDGER = Path("logs/tries.tsv")
COLUMNS = ("number", "when", "commit", "script", "what", "preset", "width", "text", "tokens", "pairs", "gain",
           "low", "high", "std", "evidence", "needed", "verdict", "kept", "seconds")
MOST_PAIRS = 10         # of a try
FIRST_SEED = 100_000    # each try has a hundred seeds of its own, above those that people use
# Sections of train_gpt.py that a try may edit besides its recipe's
FREE_SECTIONS = ("4 techniques", "5 optimizer", "6 schedules")
BANNER = "# ---------- "
PROXIES = "tools/run/proxy.py"  # scales recipes down


class Proxy(NamedTuple):
    """Where a change is tried."""
    preset: str
    width: int
    text: str           # folder of a dataset


class Change(NamedTuple):
    """A script, and flags on top of the proxy's."""
    name: str
    script: Path
    flags: dict


# ------------------------------------------------------------ running
def proxy_command(change: Change, proxy: Proxy) -> str:
    """A shell command that trains the change on the proxy, by the rules of this checkout."""
    settings = {"trainer": change.script.parent, "preset": proxy.preset, "proxy": proxy.width,
                "data_path": proxy.text} | change.flags
    flags = [f"--{name.lower().replace('_', '-')}={value}" for name, value in settings.items()]
    return shlex.join([sys.executable, str(ROOT / PROXIES), *flags])


def run_name(change: Change, proxy: Proxy, seed: int) -> str:
    """The folder of a run: proxy, a hash of script and flags, and the seed, which no other try has."""
    made_of = json.dumps([inputs.read_text(change.script), sorted(change.flags.items())])
    digest = sha256(made_of.encode())[:10]
    return f"proxy_{proxy.preset}_{proxy.width}_{Path(proxy.text).name}_{digest}_seed{seed}"


def finished(name: str) -> Run | None:
    """The run of that name, if it has ended."""
    log = Path("logs", name, "train.log")
    if not Path("logs", name, "result.json").exists() or not log.exists():
        return None
    return read_log(log, read_runs)


def run_or_read(change: Change, proxy: Proxy, seed: int, threads: int) -> Run:
    """The run of a change, trained if it is not there yet. Raises Refused when it fails, or if its log says
    another seed."""
    name = run_name(change, proxy, seed)
    if run := finished(name):
        demand_seed(run, seed, change.name)
        return run
    remove_folder(Path("logs", name))       # what a killed run left
    command = f"export OMP_NUM_THREADS={threads} OMP_WAIT_POLICY=PASSIVE; exec {proxy_command(change, proxy)}"
    return run_once(change.name, command, name, seed)


def loss_of(run: Run | Refused) -> float:
    """What is compared: the final val_loss, in nats per token. Raises Refused for one that is not finite, or
    if the run failed."""
    if isinstance(run, Refused):
        raise run
    loss = run.value("val_loss")
    demand(loss is not None and abs(loss) < 1e6, f"{run.path.parent.name} has no finite val_loss")
    return float(loss)      # type: ignore[arg-type]


def side_by_side(jobs: list) -> list:
    """The runs of [(change, proxy, seed)], one at a time on a GPU, else one for each core, since a proxy is
    too small for two threads; for one that fails the Refused that says why."""
    cpus = inputs.usable_cpus()
    workers = 1 if shutil.which("nvidia-smi") else cpus
    threads = cpus // workers

    def work(job: tuple) -> Any:
        try:
            change, proxy, seed = job
            return run_or_read(change, proxy, seed, threads)
        except Refused as error:
            return error

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, jobs))


def planned(change: Change, proxy: Proxy) -> tuple[int, int]:
    """Width and tokens of a run, by a dry run of it. A width of 0 is a bare --proxy. Raises Refused."""
    command = proxy_command(change, proxy)
    if not proxy.width:
        command = command.replace("--proxy=0", "--proxy")
    done = subprocess.run(["bash", "-c", f"{command} --dry-run"], capture_output=True, text=True,
                          errors="replace")
    demand(done.returncode == 0, f"{change.name}: {last_line(done)}")
    width = re.search(r"^proxy: \w+ at width (\d+)", done.stdout, re.M)
    tokens = re.search(r"^limits: .*\((\d+) tokens\)", done.stdout, re.M)
    demand(width and tokens, f"{change.name}: its plan has no width or no limits")
    return int(width[1]), int(tokens[1])        # type: ignore[index]


# ------------------------------------------------------------ what is tried
def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, errors="replace")
    demand(done.returncode == 0, f"git {words[0]}: {last_line(done)}")
    return done.stdout


def sections(text: str) -> dict[str, str]:
    """{title: text} of the sections of a train_gpt.py."""
    parts = [part.partition("\n") for part in f"1 docstring\n{text}".split(f"\n{BANNER}")]
    return {title.strip(): body for title, _, body in parts}


def forbidden_edits(before: str, after: str, preset: str) -> list[str]:
    """Titles of the sections that differ and that a try of this recipe leaves alone."""
    old = sections(before)
    new = sections(after)
    titles = [title for title in {**old, **new} if old.get(title) != new.get(title)]
    track = track_of(preset)
    own = (f"{preset}:", f"{track} and {track}_plus:")
    return [title for title in titles if title not in FREE_SECTIONS and not title.startswith(own)]


def frozen(text: str, folder: Path) -> Path:
    """Writes a script where later edits do not reach it."""
    make_folder(folder)
    path = folder / "train_gpt.py"
    path.write_text(text, encoding="utf-8")
    return path


def flags_of(words: list[str]) -> dict:
    """["NAME=value", ...] -> {name: value}. Raises Refused."""
    flags = {}
    for word in words:
        name, given, value = word.partition("=")
        demand(given and name, f"{word!r} is no NAME=value")
        demand(name.lower() != "seed", f"{word}: each run has a seed of its own, so leave SEED out")
        flags[name.lower()] = value
    return flags


# ------------------------------------------------------------ the ledger
def read_ledger() -> list[dict]:
    """The tries so far: rows of tab-separated cells, whose first line names the columns."""
    if not LEDGER.exists():
        return []
    return list(csv.DictReader(inputs.read_text(LEDGER).split("\n"), delimiter="\t"))


def add_to_ledger(row: dict) -> None:
    """Adds a line in one write, so that a kill leaves none or all of it."""
    head = "" if LEDGER.exists() else "\t".join(COLUMNS) + "\n"
    cells = [re.sub(r"\s+", " ", str(row.get(name, ""))) for name in COLUMNS]
    with open(LEDGER, "a", encoding="utf-8") as file:
        file.write(head + "\t".join(cells) + "\n")


def noise_of(tries: list[dict], proxy: Proxy) -> Noise:
    """What earlier tries on this proxy tell about the deviation of a difference."""
    squares = 0.0
    df = 0
    for row in tries:
        same = (row["preset"], row["width"], row["text"]) == (proxy.preset, str(proxy.width), proxy.text)
        if same and row["std"] and int(row["pairs"]) > 1:
            squares += float(row["std"]) ** 2 * (int(row["pairs"]) - 1)
            df += int(row["pairs"]) - 1
    return Noise(squares, df)


# ------------------------------------------------------------ try
def try_change(args: Any, say: Callable) -> dict:
    """The working tree, or a setting, against HEAD on the proxy, until the verdict stands."""
    began = time.monotonic()
    tries = read_ledger()
    number = max([int(row["number"]) for row in tries], default=0) + 1
    # 1. the two scripts
    commit = git("rev-parse", "--short", "HEAD").strip()
    head_text = git("show", "HEAD:train_gpt.py")
    tree_text = inputs.read_text(ROOT / "train_gpt.py")
    settings = [word for word in args.words if re.match(r"[A-Za-z]\w*=\S", word)]
    flags = flags_of(settings)
    demand(args.same or flags or tree_text != head_text,
           "train_gpt.py is as in HEAD: edit the recipe's section, give NAME=value, or --same to try nothing")
    outside = forbidden_edits(head_text, tree_text, args.preset)
    demand(args.outside or not outside, f"the change reaches beyond {args.preset}'s section: "
           f"{', '.join(outside)}; --outside tries it nevertheless")
    text = head_text if args.same else tree_text
    folder = Path("logs", "tries", f"{number:04d}")
    while (folder / "train_gpt.py").exists() and inputs.read_text(folder / "train_gpt.py") != text:
        number += 1     # another edit with this number was killed, or is still running
        folder = Path("logs", "tries", f"{number:04d}")
    head = Change(f"HEAD {commit}", frozen(head_text, folder / "head"), {})
    yours = Change("yours", frozen(text, folder), flags)
    # 2. the proxy
    proxy, tokens = proxy_of(args, tries, head)
    tokens_here = planned(yours, proxy)[1]
    what = " ".join([word for word in args.words if word not in settings] or settings) or "an edit"
    say(f"try {number}: {what}, against {head.name} on {proxy.preset} at width {proxy.width}, {proxy.text}, "
        f"{tokens} tokens a run")
    if tokens != tokens_here:
        say(f"warning: yours trains {tokens_here} tokens")
    # 3. the pairs
    noise = noise_of(tries, proxy)
    found = sum([row["verdict"] == "gains" for row in tries])
    needed = sequential.needed_evidence(number, found)
    row = dict(number=number, commit=commit, script=sha256(inputs.read_bytes(yours.script))[:12], what=what,
               preset=proxy.preset, width=proxy.width, text=proxy.text, tokens=tokens_here,
               needed=f"{needed:.4g}")
    row |= pairs_of(head, yours, proxy, number, noise, needed, args, say)
    row |= dict(when=f"{datetime.now(UTC):%FT%TZ}", seconds=round(time.monotonic() - began))
    add_to_ledger(row)
    say(f"verdict: {row['said']}; {row['seconds']} s; written to {LEDGER}")
    return row


def proxy_of(args: Any, tries: list[dict], head: Change) -> tuple[Proxy, int]:
    """The proxy that args ask for, and the tokens of a run. Without a width that of the last try of this
    recipe and text, else the smallest."""
    width = args.proxy
    for row in tries:
        if not args.proxy and (row["preset"], row["text"]) == (args.preset, args.text):
            width = int(row["width"])
    width, tokens = planned(head, Proxy(args.preset, width, args.text))
    return Proxy(args.preset, width, args.text), tokens


def pairs_of(head: Change, yours: Change, proxy: Proxy, number: int, noise: Noise, needed: float,
             args: Any, say: Callable) -> dict:
    """Runs pairs until the verdict stands -> the ledger's cells about them."""
    gains: list[float] = []
    runs_before: list[Run] = []
    runs_after: list[Run] = []
    stop = False
    while not stop:
        seed = FIRST_SEED + 100 * number + len(gains)
        jobs = [(head, proxy, seed), (yours, proxy, seed)]
        if args.same:       # else both would be one run
            jobs[1] = (yours, proxy, seed + 50)
        before, after = side_by_side(jobs)
        head_loss = loss_of(before)
        try:
            loss = loss_of(after)
        except Refused as error:
            return dict(pairs=len(gains), verdict="fails", kept="no", said=f"fails: {error}")
        for change, run, earlier in ((head, before, runs_before), (yours, after, runs_after)):
            why = why_not_another(run, earlier)
            demand(not why, f"{change.name}: {why}: its train_gpt.py must heed SEED")
            earlier.append(run)
        hearers = [] if gains else [say]        # what it says of the first pair holds for all
        demand_comparable([runs_before[0], before, after], "val_loss", *hearers)
        gains.append(head_loss - loss)
        series = sequential.series_of(gains, noise)
        said, stop = sequential.verdict(series, needed, MOST_PAIRS)
        say(f"pair {len(gains)}: {head.name} {head_loss:.4f}, {yours.name} {loss:.4f}, "
            f"gain {gains[-1]:+.4f}; mean {series.mean:+.4f}, "
            f"evidence {sequential.evidence(series):.3g} of {needed:.0f}")
    low, high = sequential.interval(series)
    std = f"{np.std(gains, ddof=1):.6f}" if len(gains) > 1 else ""
    text = (f"{said}, {series.mean:+.4f} nats (95 %, at any time: {low:+.4f} to {high:+.4f}) "
            f"after {len(gains)} pairs")
    if said == "cannot tell":
        more = sequential.more_needed(series, needed)
        text += f"; as it looks, {more or 'over 1,000'} more pairs would tell"
    return dict(pairs=len(gains), gain=f"{series.mean:+.6f}", low=f"{low:+.6f}", high=f"{high:+.6f}", std=std,
                evidence=f"{sequential.evidence(series):.4g}", verdict=said,
                kept="yes" if said == "gains" else "no", said=text)
