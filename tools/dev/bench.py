"""Where the time of a training step goes, on this machine; settings or checkouts beside each other.

    ./run.sh bench [PRESET] [NAME=value ...] [--steps N]
    ./run.sh bench --arm "NAME=value ..." --arm "..."
    ./run.sh bench --arm before=PATH --arm after=

Makes steps of the preset's first stage; of several arms one each in turn, in one process, as machines are
noisy. Needs the preset's data; leaves no run folder. Prints for each arm the median milliseconds of a step,
tok/s, matmul FLOP/s, on a GPU also against its peak (MFU), the shares of forward + backward, the optimizer
and loading, and the time per token over that of the first arm, step by step (median and quartiles). A word
with a lower-case name, such as before=PATH, names an arm and the folder of its train_gpt.py, from 28 November
2026 or later; without a path it is this one.

    ./run.sh bench --peers [--help]     bits per byte of compressors and plainer GPTs, by tools/dev/peers.py
"""
from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import string
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    from tools.run.surroundings import libraries
    os.environ.update(libraries(os.environ))  # before they are loaded
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import train_gpt  # noqa: E402
from data import prepare as data_prepare  # noqa: E402
from tools.run import cards, plan  # noqa: E402
from tools.run.machine import Machine, memory_limit  # noqa: E402
from tools.run.names import as_flag  # noqa: E402

if TYPE_CHECKING:
    from train_gpt import Run, Stage, Team

    Batch = tuple[Tensor, ...]  # tokens, targets, what Model.candidates() gives

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 5  # steps of each arm, before those that count
SHARDS = 3  # of made-up data; packing=shards deals them to the ranks
DOCUMENTS_OF_A_GROUP = 16
LETTERS = string.ascii_lowercase + string.digits + "_"  # of made-up words: 37 + 37^2 + 37^3 of them


# ---------- a run
def machine_of(team: Team, free: int = 0) -> Machine:
    """What preflight would find around these ranks. free: bytes that each may take; 0: what is free now."""
    ranks = team.world_size
    if not free:
        free = torch.cuda.mem_get_info()[0] if team.on_gpu else memory_limit() // 2 // ranks
    return Machine(ranks, team.on_gpu, team.device, team.dtype, free, torch.get_num_threads())


def assemble(cfg: Any, trainer: ModuleType = train_gpt, ranks: int = 1) -> Run:
    """A Run with data, model and the optimizer of rank 0 of so many; nothing is compiled yet."""
    log = trainer.Log(lead=False)
    team = trainer.Team(cfg, {})
    data = trainer.open_data(cfg, log)
    cfg = trainer.replace(cfg, vocab_size=data.vocab_size, bos_id=cfg.bos_id or max(data.bos, 0))
    loader = trainer.Loader(cfg, data, team, log)
    run = trainer.Run(cfg, cfg, team, log, data, loader, "", Path(), plan.micro_batch(cfg, machine_of(team)))
    with team.device:
        run.model = cfg.make_model(cfg.choose_kernels(team.on_gpu, log))
    run.optimizer = cfg.optimizer()(run.model, cfg, 0, ranks, muon_dtype=team.dtype,
                                    dtype=team.dtype if team.on_gpu else torch.float32)
    return run


def prepare(settings: dict[str, str], steps: int, trainer: ModuleType = train_gpt) -> tuple[Run, float]:
    """(Run of so many steps without a cap, ready to train; seconds of its warmup). Raises Refused, also for a
    name that the preset lacks."""
    fixed = dict(MAX_WALLCLOCK_SECONDS="0", ITERATIONS=str(steps), EXTENSION_ITERATIONS="0", MAX_EPOCHS="0",
                 TRAIN_LOG_EVERY="10", VAL_LOSS_EVERY="0")
    flags = [f"{as_flag(name)}={text}" for name, text in settings.items() if name not in fixed]
    try:
        run = assemble(trainer.load_config(os.environ | fixed, flags), trainer)
    except trainer.Refused as error:
        raise train_gpt.Refused(str(error)) from None
    began = time.perf_counter()
    trainer.warm_up(run)
    seconds = time.perf_counter() - began
    run.model.build(run, True)
    run.model.build = lambda *_: False  # it is no part of a step
    return run, seconds


def timed(function: Callable[..., Any], synchronize: Callable[[], None],
          seconds: list[float]) -> Callable[..., Any]:
    """The function, which adds its seconds to a list; the device is idle at both ends."""
    def call(*args: Any) -> Any:
        synchronize()
        began = time.perf_counter()
        result = function(*args)
        synchronize()
        seconds.append(time.perf_counter() - began)
        return result
    return call


# ---------- arms
def read_arm(text: str) -> tuple[ModuleType, dict[str, str]]:
    """`before=PATH NAME=value` -> (trainer, settings). Raises Refused."""
    folder = ROOT
    settings = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        train_gpt.require(equals, f"--arm: {word!r} must be NAME=value, or name=PATH of a checkout")
        if name.islower():
            folder = Path(value).resolve() if value else ROOT
            script = folder / "train_gpt.py"
            train_gpt.require(script.is_file(), f"--arm: no {value}/train_gpt.py")
            train_gpt.require("\ndef warm_up(" in script.read_text(encoding="utf-8"),
                              f"--arm: {value}/train_gpt.py is older than 28 November 2026")
        else:
            settings[name] = value
    return load_trainer(folder), settings


def load_trainer(folder: Path) -> ModuleType:
    """train_gpt.py of a checkout, under a module name of its own."""
    if folder == ROOT:
        return train_gpt
    name = f"train_gpt_{len(sys.modules)}"
    spec = importlib.util.spec_from_file_location(name, folder / "train_gpt.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def next_batch(run: Run, stage: Stage) -> Batch:
    """Tokens and targets of the next step, as in this stage."""
    return run.loader.next(stage.batch_tokens, stage.row_tokens // run.cfg.train_seq_len, stage.doc_len)


def step_function(trainer: ModuleType, run: Run, stage: Stage) -> Callable[[Batch], None]:
    """A function that makes a step on a batch, as the training loop does."""
    cfg = run.cfg
    micro = run.micro * cfg.train_seq_len // stage.row_tokens
    schedule = trainer.Schedule(1.0, cfg.muon_momentum)

    def step(batch: Batch) -> None:
        context = run.model.context(stage.row_tokens, run.team.device, run.team.dtype, stage)
        batch = (*batch, *run.model.candidates(*batch))
        trainer.train_step(run.loss_fn, run.optimizer, batch, micro, context, stage.loss_factor, schedule)

    return step


class Arm:
    """A run whose steps are timed, in three parts."""
    def __init__(self, text: str, settings: dict[str, str], steps: int) -> None:
        self.text = text
        trainer, own = read_arm(text)
        self.run, self.warmup_seconds = run, _ = prepare(settings | own, steps, trainer)
        self.stage = run.cfg.stages()[0]
        self.loads: list[float] = []
        self.steps: list[float] = []
        self.updates: list[float] = []
        self.load = timed(partial(next_batch, run, self.stage), run.team.wait, self.loads)
        run.optimizer.step = timed(run.optimizer.step, run.team.wait, self.updates)
        self.step = timed(step_function(trainer, run, self.stage), run.team.wait, self.steps)

    def lines(self, first: np.ndarray | None) -> tuple[np.ndarray, list[str]]:
        """Seconds per token of each step, and what is printed. first: those of the first arm."""
        load, step, update = np.array([self.loads, self.steps, self.updates])[:, SKIPPED:]
        per_token = (load + step) / self.stage.batch_tokens
        rate = 1 / np.median(per_token)
        relative = 1.0 if first is None else per_token / first
        low, middle, high = np.quantile(relative, (0.25, 0.5, 0.75))
        flops = rate * plan.flops_per_token(self.run.cfg, self.stage)
        whole = sum(load + step)
        lines = [
            f"{self.text or 'as it is'}: {1e3 * self.stage.batch_tokens / rate:.2f} ms a step, "
            f"{rate:,.0f} tok/s, {flops / 1e9:,.0f} GFLOP/s",
            f"    forward+backward {sum(step - update) / whole:.1%}, optimizer {sum(update) / whole:.1%}, "
            f"loading {sum(load) / whole:.1%}; warmup {self.warmup_seconds:.1f} s",
            f"    time per token {middle:.3f} ({low:.3f} to {high:.3f}) of the first arm's"]
        if self.run.team.on_gpu:
            work = cards.Work(flops, [torch.cuda.get_device_name()], plan.dtype_of_products(self.run.cfg))
            lines.append(f"    {cards.mfu_text(work)}")
        return per_token, lines


def compare_arms(settings: dict[str, str], texts: list[str], steps: int) -> None:
    """Prints a few lines per arm; the first steps of each are not counted."""
    torch._dynamo.config.recompile_limit = 8 * len(texts)  # of the same code; beyond it runs uncompiled
    arms = [Arm(text, settings, steps) for text in texts]
    for _ in range(steps + SKIPPED):
        for arm in arms:
            arm.step(arm.load())
    team = arms[0].run.team
    print(f"machine {train_gpt.hardware(team)}, torch {torch.__version__}; {steps} steps of each in turn")
    first = None
    for arm in arms:
        per_token, lines = arm.lines(first)
        first = per_token if first is None else first
        print(*lines, sep="\n")


# ---------- for gpu-report and tests
def random_data(folder: Path, cfg: Any, tokens: int, rows: float = 1, longest: int = 1400) -> dict[str, str]:
    """Settings that make a run read random documents, with so many rows of val, and a vocabulary that stands
    for GPT-2's in losses on prefixes. As in a text, few tokens are frequent: there is something to learn, and
    n-grams come back. Writes what is not there yet. longest: tokens of a document."""
    vocab_size = cfg.vocab_size or 1024
    bos = 1
    vocabulary = folder / "vocabulary.json"
    if not vocabulary.exists():
        folder.mkdir(exist_ok=True)
        rng = np.random.default_rng(0)
        files = []
        val = int(rows * (cfg.eval_context or cfg.train_seq_len)) + 1
        for number, (split, count) in enumerate([("val", val)] + SHARDS * [("train", tokens // SHARDS)]):
            stream = rng.zipf(1.3, count) % (vocab_size - 2) + 2
            begins = rng.integers(1, longest, 2 + 4 * count // longest).cumsum()
            stream[[0, *begins[begins < count]]] = bos
            (file,) = data_prepare.write_shards(folder, f"random{number}", split, [stream])
            # the groups of documents that packing=best_fit deals to the ranks
            groups = -(-np.count_nonzero(stream == bos) // DOCUMENTS_OF_A_GROUP)
            files.append(file | dict(row_groups=groups * [DOCUMENTS_OF_A_GROUP]))
        manifest = dict(tokenizer=dict(vocab_size=vocab_size, bos_id=bos), files=files)
        (folder / "manifest.json").write_text(json.dumps(manifest))
        words = ["".join(word) for length in (1, 2, 3) for word in itertools.product(LETTERS, repeat=length)]
        vocabulary.write_text(json.dumps({word: token for token, word in enumerate(words[:50_257])}))
    return dict(DATA_PATH=str(folder), VOCAB_PATH=str(vocabulary), TOKENIZER_PATH="", DATA_FINGERPRINT="",
                VAL_TOKENS="0", CORE="0")


# ---------- main
def main() -> None:
    words = sys.argv[1:]
    if "--peers" in words:
        words.remove("--peers")
        os.execv(sys.executable, [sys.executable, "-m", "tools.dev.peers", *words])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="PRESET or NAME=value")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--arm", action="append", metavar="'NAME=value ...'")
    args = parser.parse_intermixed_args()
    settings = dict(word.split("=", 1) if "=" in word else ("PRESET", word) for word in args.settings)
    try:
        train_gpt.require(args.steps > 0, f"--steps {args.steps}: at least 1")
        compare_arms(settings, args.arm or [""], args.steps)
    except train_gpt.Refused as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
