"""`check --replay N`: the first N steps trained again by the folder's own script, their losses compared.

A CPU run in fp32 of one torch build, dataset, and number of ranks and threads repeats itself to the printed
digits, one in bf16 nearly: whoever makes a log up has to train for it after all. The run starts in an empty
folder that holds the script, what old ones loaded from beside it, and data/. What the clock decides cannot be
repeated: the clock of the replay stands almost still, and losses are compared up to the first line whose
learning rate differs.
"""
import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from data import inputs
from records.verify.checks import OF_ONE_RUN, LeftOut, Rule, require
from records.verify.folders import ROOT, Folder
from records.verify.leak_probe import clean_environment

SLOWER = 1e-6           # seconds of the replay's clock in one of ours: schedules stand still on any machine
START = f"""import runpy, time
counter = time.perf_counter
time.perf_counter = lambda: {SLOWER} * counter()
runpy.run_path("train_gpt.py", run_name="__main__")
"""
COMPARED = re.compile(r"step:(\d+)/\d+ (train|val)_loss:(\S+) .*?(?:lr_factor:(\S+) |$)")
# Lines of a log from before training that do not depend on the machine
PLAN = re.compile(r"(?:data: |parameters:|matmul FLOPs|eval settings:|config (?!run_id)|sha256 (?!config)).*")
MACHINE = re.compile(r"world_size:.* (activations:\S+ micro_batch:\S+)")    # what it decides
BF16_LOSS = 5e-3        # CPUs round products of bfloat16 differently: by this part a loss may differ
LEAST = 10              # losses that must be compared, where N asks for so many


def check_replay(folder: Folder, options: argparse.Namespace) -> str:
    """--replay N: the run of train.log, or of --seed, trained again for N steps."""
    if not options.replay:
        raise LeftOut
    asked = [run for run in folder.runs if options.seed in (None, run.result["seed"])]
    require(asked, f"no run has seed {options.seed}")
    run = asked[0]
    lines = run.body.split("\n")
    told = [int(found[1]) for found in map(COMPARED.match, lines) if found]
    last = max((step for step in told if step <= options.replay), default=0)
    require(last, f"{run.file} has no loss up to step {options.replay}")
    cpus = re.match(r"(\d+) ranks x (\d+) threads of ", run.result["hardware"])
    if not cpus:        # of GPUs
        raise LeftOut(f"a run on {run.result['hardware']} does not repeat itself to the printed digits")
    here = metadata.version("torch")
    if here.partition("+")[0] != run.result["torch"].partition("+")[0]:
        raise LeftOut(f"the run has torch {run.result['torch']}, this machine {here}")
    dataset = f"data/datasets/{run.result['data']['name']}"
    if not (ROOT / dataset).exists():
        raise LeftOut(f"{dataset} is not here")
    with tempfile.TemporaryDirectory() as scratch:
        again = train_again(folder, run.result, int(cpus[1]), int(cpus[2]), last, options.seconds,
                            Path(scratch))
    return f"{run.file}: {compare(run.file, lines, again, last)}"


def train_again(folder: Folder, result: dict[str, Any], ranks: int, threads: int, last: int, seconds: float,
                scratch: Path) -> list[str]:
    """The lines of the log of a new run up to the step `last`, or for so many seconds."""
    for path in folder.path.glob("*.py"):       # old scripts load others from beside them
        shutil.copy(path, scratch)
    (scratch / "start.py").write_text(START)
    (scratch / "data").symlink_to(ROOT / "data")
    command = [sys.executable, "start.py"]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    env = environment(result, threads, scratch)
    said = until_step(last, command, scratch, env, seconds)
    log = scratch / "logs" / "replay" / "train.log"
    require(log.exists(), f"train_gpt.py does not train: {said[-1][:200] if said else 'no word'}")
    body = inputs.read_text(log, "replace").rpartition("=" * 100 + "\n")[2]
    return [*body.split("\n"), *said]      # the last line may have reached the terminal only


def environment(result: dict[str, Any], threads: int, scratch: Path) -> dict[str, str]:
    """The run's preset, seed and overrides, and nothing of ours that a run could see."""
    env = {name.upper(): text for name, (_, text) in result["overrides"].items()
           if name not in OF_ONE_RUN or name in ("device", "dtype")}
    if "/" not in env.get("DATA_PATH", "/"):            # a log shows the last part of an absolute path
        env["DATA_PATH"] = str(ROOT / "data" / "datasets" / env["DATA_PATH"])
    return env | clean_environment() | dict(
        PRESET=result["preset"], SEED=str(result["seed"]), RUN_ID="replay", CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE", HOME=str(scratch),
        TORCHINDUCTOR_CACHE_DIR=str(scratch / "compiled"))


def until_step(steps: int, command: list[str], folder: Path, env: dict[str, str],
               seconds: float) -> list[str]:
    """Runs a command until it prints the loss of that step, at most so many seconds. Returns its lines.
    Raises Broken if it ends before either."""
    said = []
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=folder, env=env, text=True, errors="replace",
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    late = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
    late.start()
    try:
        for line in process.stdout:
            said.append(line.rstrip("\n"))
            found = COMPARED.match(said[-1])
            if found and int(found[1]) >= steps:
                return said
    finally:
        late.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    require(time.monotonic() - began >= seconds,
            f"train_gpt.py ended before step {steps}: {said[-1][:200] if said else 'no word'}")
    return said


def compare(log: str, lines: list[str], again: list[str], steps: int) -> str:
    """Lines of a log against those of the replay. Raises Broken where they differ."""
    for line in filter(PLAN.fullmatch, again):
        require(line in lines, f"{log} has no line {line!r}, which its script writes on this data")
    here, there = (next(filter(None, map(MACHINE.match, text)), [None] * 2)[1] for text in (again, lines))
    if here and here != there:
        raise LeftOut(f"the run has {there}, this machine {here}")
    made = {found.group(1, 2): found for found in map(COMPARED.match, again) if found}
    compared = 0
    limit = BF16_LOSS if there and "bfloat16" in there else 0
    for found in filter(None, map(COMPARED.match, lines)):
        other = made.get(found.group(1, 2))
        if not other or int(found[1]) > steps:
            break
        if other[4] != found[4]:        # the clock's doing, but hardly so early
            require(compared >= min(LEAST, steps), f"{log}, step {found[1]}: lr_factor {found[4]}, with a "
                    f"clock that stands still {other[4]}: its schedule cannot be replayed")
            break
        loss = float(found[3])
        require(abs(loss - float(other[3])) <= limit * loss,
                f"{log}, step {found[1]}: {found[2]}_loss {loss}, in the replay {other[3]}")
        compared += 1
    if compared < min(LEAST, steps):
        raise LeftOut(f"only {compared} losses were trained in time; --seconds gives it more")
    how = f"within {limit:.1%}, as bfloat16 rounds on other CPUs" if limit else "to the printed digits"
    return f"{compared} losses up to step {steps} are the same {how}"


# In the order in which `record check` asks them
CHECKS = [
    Rule("replay", check_replay, runs_code=True),
]
