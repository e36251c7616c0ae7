"""What a run takes, found out before it starts: ranks, data, script, micro-batch. Gets missing data and
prints the plan.

launch.py calls it in a process of its own, whose memory, also that on a GPU, is free again when training
starts. The last line that it prints is the answer, in JSON: `words` that make Python the trainer or torchrun,
how many `ranks` there will be, and for MFU their `gpus` and the `flops` per token of each stage.
"""
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from records.judge.runs import read_events
from tools.run.dataset import command
from tools.run.guard import TORCHRUN
from tools.run.names import text_of, trainer_flags
from tools.run.preflight import Report, counts_its_script, preflight
from tools.run.script import script
from tools.run.surroundings import compiler_missing
from tools.run.words import Words, read_words
from train_gpt import RECIPES, Refused, brief, preset_config, require, typed

ROOT = Path(__file__).resolve().parents[2]

EMBEDDED = Path("data/datasets/embedded")  # what proxies train on, unless told otherwise


class Ended(Exception):
    """A program that this one started failed, with this exit code, and has said why."""


# ------------------------------------------------------------ a run that goes on
def start_of(run_id: str) -> dict[str, Any]:
    """What a run told of itself when it began; {} if it left nothing."""
    folder = Path("logs", run_id)
    starts = [event for event in read_events(folder) if event["kind"] == "start"] if run_id else []
    return starts[0] if starts else {}


# ------------------------------------------------------------ the parts
def gpus() -> int:
    """GPUs that torch sees, whatever CUDA_VISIBLE_DEVICES holds: numbers, UUIDs, MIG names; AMD's by a ROCm
    build."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def count_ranks(device: str, preset: str, is_proxy: bool, began: Mapping[str, Any]) -> int:
    """One rank per GPU; for tiny and proxies, whose steps have few rows, one; for a run that goes on as many
    as before."""
    if device == "cpu":
        return 1
    most = began.get("world_size") or (1 if preset == "tiny" or is_proxy else gpus())
    return max(1, min(most, gpus()))


def fetch(arguments: Sequence[str]) -> int:
    """`./run.sh data ARGUMENTS` -> its exit code."""
    published = arguments and not arguments[0].startswith("-")
    program = "data.download" if published else "data.prepare"
    process = subprocess.Popen([sys.executable, "-m", program, *arguments])
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # it got the signal, too, and ends
            pass


def fetch_missing(missing: Sequence[list[str]]) -> None:
    """Gets data. Raises Ended. Without the tasks of CORE a run with CORE=0 goes on; preflight refuses
    others."""
    for arguments in missing:
        print(f"getting data: {command(arguments)}", flush=True)
        code = fetch(arguments)
        if code and arguments != ["core"]:
            raise Ended(code)


def script_path(preset: str, alone: bool, run_id: str) -> Path:
    """The script that trains: a run that goes on has its own; else train_gpt.py, or what `./run.sh script
    PRESET` makes of it."""
    own = Path("logs", run_id, "train_gpt.py")
    if run_id and own.is_file():
        return own
    whole = ROOT / "train_gpt.py"
    if not alone:
        return Path(os.path.relpath(whole)) if whole.is_relative_to(Path.cwd()) else whole
    made = Path("logs", ".script", preset, "train_gpt.py")
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        temporary = made.with_name(str(os.getpid()))
        temporary.write_text(script(preset, whole.read_text("utf-8")), encoding="utf-8")
        os.replace(temporary, made)
    except OSError as error:
        raise Refused(f"the script of {preset} could not be made in {made.parent} ({brief(error)})") from None
    return made


def flags_of(words: Words, env: Mapping[str, str], began: Mapping[str, Any]) -> list[str]:
    """What was typed, as flags of the trainer; for a proxy, the flags that it stands for. Raises Refused."""
    typed_words = words.constants
    if began and not text_of("PRESET", env, typed_words):
        typed_words = [f"--preset={began['preset']}", *typed_words]
    _, flags, _ = trainer_flags(env, typed_words)
    if words.proxy is None:
        return flags
    require(not words.script, "--script: proxies are made from the whole train_gpt.py")
    from tools.run.proxy import expand_proxy
    if not (text_of("DATA_PATH", env, flags) or words.dry_run or (EMBEDDED / "manifest.json").exists()):
        fetch_missing([[]])
    return [*expand_proxy([f"--proxy={words.proxy}" if words.proxy else "--proxy", *flags], env)]


def check(flags: Sequence[str], env: Mapping[str, str], words: Words, ranks: int) -> Report:
    """Preflight, once more if it found data missing that can be fetched. Prints what the last one says.
    Raises Refused, Ended."""
    said: list[str] = []

    def look(may_fetch: bool) -> Report:
        said.clear()
        return preflight(env, flags, lambda *lines: said.extend(lines), words.dry_run, ranks, words.script,
                         may_fetch)

    try:
        report = look(may_fetch=not words.dry_run)
        if report.missing:
            fetch_missing(report.missing)
            report = look(may_fetch=False)
        return report
    finally:
        for line in said:
            print(line, flush=True)


def prepare(words: Words, env: Mapping[str, str]) -> dict[str, Any] | None:
    """The answer for the launcher; None if there is nothing to run. Raises Refused, Ended."""
    # 1. constants
    run_id = text_of("RESUME", env, words.constants)
    began = start_of(run_id)
    flags = flags_of(words, env, began)
    preset, given = typed(env, flags)
    cfg = preset_config(preset, given)
    # 2. ranks
    device = given.get("device") or began.get("config", {}).get("device", cfg.device)
    ranks = count_ranks(device, preset, words.proxy is not None, began)
    # 3. a step that can be compiled
    if cfg.compile and not began and (device == "cpu" or not gpus()):
        why = compiler_missing(env)
        if why:
            print(f"compile: {why}, so the step stays uncompiled: several times slower")
            flags.append("--compile=0")
    # 4. data and plan
    report = check(flags, env, words, ranks)
    if words.dry_run or report.finished:
        return None
    flags = [*report.flags]
    if report.device_batch_size and not began:
        flags.append(f"--device-batch-size={report.device_batch_size}")
    # 5. the script
    alone = words.script or counts_its_script(preset) and words.proxy is None
    command = [str(script_path(preset, alone, run_id)), *flags]
    if ranks > 1:
        command = ["-m", TORCHRUN, "--standalone", f"--nproc_per_node={ranks}", *command]
    names = [torch.cuda.get_device_name(n) for n in range(ranks)] if report.flops else []
    return dict(words=command, ranks=ranks, gpus=names, flops=[*report.flops])


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Exit code 0: the run may start; 2: why not, in a sentence."""
    words = read_words(argv, env)
    try:
        answer = prepare(words, env)
        if answer:
            print(json.dumps(answer), flush=True)
        return 0
    except Ended as error:
        return int(error.args[0])
    except Refused as error:
        why = " ".join(str(error).split())
    except OSError as error:
        why = brief(error)
    except KeyboardInterrupt:
        return 130
    print(f"preflight: {why}", file=sys.stderr, flush=True)
    first = [*words.constants, "-"][0]
    if first not in RECIPES and first[:1] != "-" and "=" not in first:
        print("run.sh: ./run.sh help lists its commands", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
