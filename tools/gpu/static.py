"""What a training step does on a GPU, found without one.

    ./run.sh static [PRESET ...] [NAME=value ...] [--gpu h100 ...] [--ranks 8 ...] [--json FILE]
    ./run.sh static speedrun --kernels 20               and the Triton kernels that move most bytes
    ./run.sh static speedrun --against FILE             what a change did to the compiled step
    ./run.sh static speedrun --trainer FOLDER           the train_gpt.py of another checkout
    ./run.sh static --run [PRESET ...]                  toy runs whose results are computed: emulated_run.py
    TORCH=2.11.0 ./run.sh static ...                    by another torch than that of requirements.txt

torch (a CUDA build, in a virtual environment of its own), Inductor, Triton and ptxas run unchanged on a
stand-in for an H100 (or --gpu), which stand_in.py describes. Without --run all results are zeros or garbage,
so nothing here says anything about numerics or speed; what is counted, refused or laid out can be believed.
Replaced in Python: NCCL by torch.testing's fake process group (this is rank 0); dense attention by functions
that allocate what the fused kernels would; the init, which is not drawn.

"estimate by what an H100 took" is the counted work at the rates that one H100 reached, kernel by kernel
(kernel_costs.py), without collectives and pauses. Exit code 1: some PROBLEM line was printed.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from tools.gpu import kernel_costs
from tools.gpu import seen_on_gpu
from tools.gpu import stand_in
from tools.gpu.agenda import PRESETS
from tools.run.cards import CARDS

if TYPE_CHECKING:  # imported by the process that measures, from the folder of --trainer
    from torch import Tensor

    from train_gpt import Stage

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GIB = 2**30


# ---------- one preset, in a process with the library in place
def window_pairs(trainer: Any, cfg: Any, stage: Stage, document: int) -> int:
    """Pairs of query and key that flex attention computes of a row, in whole blocks, in all layers that use
    it. document: as if each had so many tokens; 0: attention does not stay within documents."""
    import torch

    from tools.run import plan

    T = stage.row_tokens
    cpu = torch.device("cpu")
    documents = torch.arange(T)[None] // document if document else None
    pairs = 0
    with mock.patch("torch.compiler.is_compiling", lambda: True):
        for layer in plan.layers_of(cfg, stage):
            window = trainer.gpu_window(layer.window, T, cpu, bool(document))
            if layer.window and torch.is_tensor(window):
                mask = trainer.gpu_window_mask(window, T, documents, cpu)
                blocks = mask.kv_num_blocks + mask.full_kv_num_blocks
                pairs += int(blocks.sum()) * trainer.FLEX_BLOCK**2
    return pairs


class Subject:
    """A trainer's model and optimizer on this GPU."""

    def __init__(self, trainer: Any, torch: ModuleType, settings: dict[str, str], ranks: int) -> None:
        from tools.dev import bench  # they import the trainer
        from tools.run import plan

        self.trainer = trainer
        self.torch = torch
        self.recorder = stand_in.Recorder()
        self.kept = stand_in.replace_attention(torch, self.recorder.note)
        env = {}
        if ranks > 1:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
            env = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        # as flags, of which one that the recipe lacks is refused
        words = [f"--{name.lower().replace('_', '-')}={value}" for name, value in settings.items()]
        cfg = trainer.load_config({}, words)
        cfg = trainer.replace(cfg, vocab_size=cfg.vocab_size or 1024, bos_id=cfg.bos_id or 1)
        team = trainer.Team(cfg, env)
        self.log: list[str] = []
        machine = bench.machine_of(team)
        micro = plan.micro_batch(cfg, machine)
        self.estimate = plan.step_memory(cfg, machine, micro)  # bytes
        self.run = run = SimpleNamespace(cfg=cfg, team=team, log=self.add_to_log, micro=micro)
        run.kernels = cfg.choose_kernels(True, self.add_to_log)
        trainer.init_parameters = lambda *_: {}
        if hasattr(cfg, "adjust_init"):
            type(cfg).adjust_init = lambda _, values: values
        trainer.Bank.load = lambda bank, _: setattr(bank, "fresh", True)
        with torch.device("cuda"):
            run.model = cfg.make_model(run.kernels)
        run.optimizer = cfg.optimizer()(run.model, cfg, team.rank, ranks, dtype=team.dtype)
        for name in ("reduce_scatter", "all_gather"):
            setattr(trainer, name, partial(self.note_collective, name))

    def add_to_log(self, *lines: str) -> None:
        self.log += lines

    def note_collective(self, name: str, out: Tensor, inp: Tensor, **_: Any) -> stand_in.Done:
        """In the place of a collective. What it moves is counted apart: on a GPU NCCL's kernels do that."""
        self.recorder.note("collective", name, max(out.nbytes, inp.nbytes))
        return stand_in.Done()

    def peak(self) -> float:
        """GiB allocated at most since the last call."""
        cuda = self.torch.cuda
        found = cuda.max_memory_allocated() / GIB
        cuda.empty_cache()
        cuda.reset_peak_memory_stats()
        return round(found, 2)

    def rehearse(self) -> dict[str, Any]:
        """Warmup: what was compiled, and how long that took."""
        from torch._dynamo.utils import counters

        self.peak()
        began = sum(os.times()[:4])  # of this process and of those that it has started, such as ptxas
        lines, _ = self.recorder.of(lambda: self.trainer.warm_up(self.run))
        loaded = {tuple(line[1:]) for line in lines if line[0] == "load"}  # name, registers, stack
        return dict(
            seconds=round(sum(os.times()[:4]) - began, 1),
            graphs=counters["stats"]["unique_graphs"],
            graph_breaks=sum(counters["graph_break"].values()),
            kernels=len(loaded),
            spilling=sum([int(stack) > 0 for _, _, stack in loaded]),
            refused=refusals(lines),
            peak_GiB=self.peak(),
            log=self.log,
        )

    def stage(self, stage: Stage) -> dict[str, Any]:
        """Figures of a step of a stage: the mean over as many as Adam waits for."""
        run = self.run
        cfg = self.run.cfg
        torch = self.torch
        T = stage.row_tokens
        tokens = stage.batch_tokens
        rows = tokens // T // run.team.world_size
        context = run.model.context(T, run.team.device, run.team.dtype, stage)
        batch = [torch.zeros((rows, T), dtype=torch.int64, device=run.team.device) for _ in range(2)]
        batch += run.model.candidates(*batch)
        micro = self.trainer.rows_at_once(rows, run.micro * cfg.train_seq_len // T)
        every = max(bank.row.every for bank in run.optimizer.banks)
        schedule = self.trainer.Schedule(1.0, 0.95)

        def steps() -> None:
            for _ in range(every):
                self.trainer.train_step(run.loss_fn, run.optimizer, batch, micro, context, 1, schedule)

        from torch._dynamo.utils import counters

        before = counters["stats"]["unique_graphs"]
        steps()
        self.peak()
        lines, waits = self.recorder.of(steps)
        peak = self.peak()
        document = kernel_costs.DOCUMENT if vars(cfg).get("max_doc_len") else 0
        flex = 3.5 * 4 * cfg.model_dim * rows * every * window_pairs(self.trainer, cfg, stage, document)
        found = figures(lines, flex, every)
        if os.environ.get("STATIC_NAME") == CARDS["h100"].name:
            found |= kernel_costs.estimate(lines, flex, every)
        return dict(
            T=T,
            rows=rows,
            micro_batch=micro,
            **found,
            waits=waits,
            recompiles=counters["stats"]["unique_graphs"] - before,
            peak_GiB=peak,
        )


def refusals(lines: list[list[str]]) -> dict[str, int]:
    return dict(collections.Counter(line[1] for line in lines if line[0] == "refused"))


def figures(lines: list[list[str]], flex_flop: float, steps: int) -> dict[str, Any]:
    """What the lines of so many steps say of one step. flex_flop: of all of them."""
    kinds = collections.Counter([line[0] for line in lines])
    flop: dict[str, float] = collections.defaultdict(float, {"flex attention": flex_flop})
    kernels: dict[str, list[kernel_costs.Launch]] = collections.defaultdict(list)  # of Triton
    for launch in kernel_costs.launches(lines):
        if launch.flop:
            flop[launch.family] += launch.flop
        elif launch.family != kernel_costs.TORCH:
            kernels[launch.kernel].append(launch)
    largest: list[dict[str, Any]] = []
    for name, its in kernels.items():
        size = sum([launch.size for launch in its]) / steps
        largest.append(
            dict(name=name, GB=round(size / 1e9, 3), launches=len(its) / steps, registers=its[0].registers,
                 stack=its[0].stack)
        )  # fmt: skip
    collectives = sum([int(line[2]) for line in lines if line[0] == "collective"]) / steps
    moved = dict(triton=sum([row["GB"] for row in largest]), collectives=collectives / 1e9)
    launched = ("triton", "torch", "gemm", "attention", "copy", "memset")
    return dict(
        launches=round(sum(kinds[kind] for kind in launched) / steps),
        kinds={kind: round(kinds[kind] / steps) for kind in launched if kinds[kind]},
        TFLOP={name: round(work / steps / 1e12, 3) for name, work in flop.items() if work},
        GB={name: round(size, 3) for name, size in moved.items() if size},
        registers=max([row["registers"] for row in largest], default=0),
        spilled_bytes=max([row["stack"] for row in largest], default=0),
        refused=refusals(lines),
        largest=sorted(largest, key=lambda row: -row["GB"]),
    )


def measure(settings: dict[str, str], ranks: int) -> dict[str, Any]:
    """Everything about one preset, as a dict; in a process with the library in place."""
    import torch
    import torch._inductor.config as inductor

    import train_gpt as trainer

    # The stand-in times nothing, so what a cache would keep as a kernel's best configuration is any of them
    inductor.autotune_local_cache = False
    subject = Subject(trainer, torch, settings, ranks)
    run = subject.run
    cfg = subject.run.cfg
    found = dict(
        torch=torch.__version__,
        dtype=str(run.team.dtype)[6:],
        estimate_GiB=round(subject.estimate / GIB, 2),
        parameters=sum(p.numel() for p in run.model.parameters()),
    )
    found["rehearsal"] = subject.rehearse()
    found["micro_batch"] = run.micro
    found["stages"] = {}
    looked_up = 4 * cfg.train_seq_len * run.micro * cfg.model_dim
    with stand_in.count_bytes(torch, subject.recorder.note, looked_up):
        for number, stage in enumerate(cfg.stages(), 1):
            found["stages"][f"step of stage {number}"] = subject.stage(stage)
    return found


# ---------- the command
# What the plan's estimate may be off from the peak: a part of it, and GiB
MEMORY_ERROR = 0.15
MEMORY_SLACK = 0.5


def problems(found: dict[str, Any]) -> list[str]:
    """Sentences on what would cost a run on a real GPU; none where all is well."""
    if "error" in found:
        return [f"no run: {found['error']}"]
    if "stages" not in found:  # a toy run
        return []
    rehearsal = found["rehearsal"]
    stages = found["stages"]
    sentences = []
    for place in (rehearsal, *stages.values()):
        sentences += [f"the GPU would refuse: {what}" for what in place["refused"]]
    if rehearsal["graph_breaks"]:
        sentences.append(f"{rehearsal['graph_breaks']} graph breaks")
    for name, stage in stages.items():
        if stage["recompiles"]:
            sentences.append(f"the {name} compiles on the clock")
        if stage["waits"]:
            sentences.append(f"{len(stage['waits'])} waits in the {name}: {', '.join({*stage['waits']})}")
    # the warmup holds the init beside what a step takes
    peak = max([place["peak_GiB"] for place in (rehearsal, *stages.values())])
    plan = found["estimate_GiB"]
    if abs(plan - peak) > max(MEMORY_ERROR * peak, MEMORY_SLACK):
        sentences.append(f"a run takes {peak} GiB, the plan says {plan}")
    return sentences


def listed(row: dict[str, Any]) -> str:
    """Figures in a line, each after its name."""
    apart = ("largest", "rehearsal", "stages")
    return ", ".join([f"{name} {value}" for name, value in row.items() if name not in apart])


def report(found: dict[str, Any], kernels: int) -> None:
    """Prints what measure() found, and of each stage so many of the Triton kernels that move most."""
    for name, row in ({"plan": found, "warmup": found["rehearsal"]} | found["stages"]).items():
        text = f"{name}: {listed(row)}"
        print(textwrap.fill(text, 110, initial_indent="  ", subsequent_indent="    "))
        for kernel in row.get("largest", [])[:kernels]:
            print(f"    {listed(kernel)}")


def flat(tree: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """{place: value} of nested dicts."""
    if not isinstance(tree, dict):
        return {", ".join(path): tree}
    return {place: value for key, child in tree.items() for place, value in flat(child, (*path, key)).items()}


def print_changes(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Prints which figures differ, with their ratio."""
    old = flat(before)
    new = flat(after)
    for place in sorted(old.keys() | new.keys()):
        a = old.get(place)
        b = new.get(place)
        if a != b and not place.endswith(("seconds", "largest", "spilling")):
            both = all(isinstance(value, (int, float)) and value for value in (a, b))
            print(f"  {place}: {a} -> {b}" + (f" (x{b / a:.3f})" if both else ""))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """-> the flags, with `presets` and `given`, {NAME: value}."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="PRESET or NAME=value")
    parser.add_argument("--gpu", nargs="+", default=["h100"], choices=CARDS)
    parser.add_argument("--ranks", nargs="+", type=int, help="8; tiny, whose step is one row: 1")
    parser.add_argument("--trainer", type=Path, default=ROOT, help="folder of train_gpt.py")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="list the N that move most bytes")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--against", type=argparse.FileType(), help="file of --json: print what changed")
    parser.add_argument("--cache", help="folder of compiled kernels; by default all are compiled anew")
    parser.add_argument("--run", action="store_true", help="toy runs with results: all presets by default")
    constants = [word for word in argv if re.match("[A-Z][A-Z0-9_]*=", word)]  # also after --ranks
    args = parser.parse_args([word for word in argv if word not in constants])
    constants += [word for word in args.words if "=" in word]
    args.given = dict([word.split("=", 1) for word in constants])
    args.presets = [word for word in args.words if "=" not in word]
    if not args.presets:
        args.presets = [*PRESETS] if args.run else ["golf", "speedrun", "gpt2"]
    return args


def in_a_process(
    args: argparse.Namespace, preset: str, gpu: str, ranks: int, library: Path, folder: str
) -> dict[str, Any]:
    """What find() finds of a preset in a process of its own with the library in place."""
    # Its temporary files go with the folder: os._exit() leaves them
    cache = args.cache or tempfile.mkdtemp(dir=folder)
    env = stand_in.environment(library, CARDS[gpu], ranks, cache, args.run)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=find, args=(args, preset, ranks, sender))
    with mock.patch.dict(os.environ, env, TMPDIR=folder):
        process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return dict(error=f"exit code {process.exitcode}")


def find(args: argparse.Namespace, preset: str, ranks: int, sender: Connection) -> None:
    """In a process of its own: sends what measure() or, with --run, emulated_run.check() finds of a preset,
    or its error. Does not return."""
    spec = importlib.util.spec_from_file_location("train_gpt", args.trainer.resolve() / "train_gpt.py")
    trainer = sys.modules["train_gpt"] = importlib.util.module_from_spec(spec)  # which all tools import
    try:
        spec.loader.exec_module(trainer)
        if args.run:
            from tools.gpu import emulated_run

            found = emulated_run.check(preset, args.given)
        else:
            found = measure(dict(PRESET=preset) | args.given, ranks)
    except Exception as error:  # a compiler or an operator may raise anything
        found = dict(error="\n".join(f"{type(error).__name__}: {error}".splitlines()[:12]))
    sender.send(found)
    os._exit(0)  # torch's own end would ask the driver for what is not there


def report_run(found: dict[str, Any]) -> None:
    """Prints how emulated_run.check() ended."""
    print(f"  torch {found['torch']}, {found['seconds']} s")
    print(f"  no card has been seen to run: {', '.join(unseen(found['operators'])) or 'nothing'}")


def unseen(operators: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Of [(name, dtypes)] those in no report of a card, as `aten.mm(bfloat16)`."""
    return [
        f"{name}({', '.join(dtypes)})"
        for name, dtypes in operators
        if seen_on_gpu.launches(name) and not seen_on_gpu.seen(name, tuple(dtypes))
    ]


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 if there is a problem."""
    args = parse(argv)
    results = {}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        library = stand_in.build(folder)
        for preset, gpu in itertools.product(args.presets, args.gpu):
            for ranks in args.ranks or [1 if args.run or preset == "tiny" else 8]:
                words = [f"{name}={value}" for name, value in args.given.items()]
                title = " ".join([preset, *words, f"on {ranks} x {gpu}"])
                print(f"\n== {title}", flush=True)
                found = results[title] = in_a_process(args, preset, gpu, ranks, library, folder)
                for sentence in problems(found):
                    print(f"  PROBLEM: {sentence}", flush=True)
                    failed = True
                if "stages" in found:
                    report(found, args.kernels)
                elif "error" not in found:
                    report_run(found)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    if args.against:
        print(f"\n== changes since {args.against.name}")
        print_changes(json.load(args.against), results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
