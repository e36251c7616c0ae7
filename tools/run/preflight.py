"""What a run would do, and whether it may: python -m tools.run.preflight [PRESET] [NAME=value ...]

Finds out whatever takes more than a line to find out: launcher, names, data as a whole, memory, time, disk;
then prints the plan. Exit 0: the run may start. 2: why not, in a sentence. The trainer knows nothing of it.

    --dry-run   plan also without data, or on a machine that is too slow
    --ranks=N   for N ranks on each machine; else one on each GPU
    --script    the script will hold this recipe alone

Before a torchrun of your own, call this yourself: its last line says what to start. ./run.sh calls it with
--json as the first word, in a process of its own, whose memory, also that on a GPU, is free again when
training starts. It then gets missing data, too, makes the script, and its last line is the answer in JSON:
`words` that make Python the trainer or torchrun, how many `ranks` there will be, and for MFU their `gpus`,
the `flops` of each stage and the `dtype` of most products.
"""
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from records.judge.logs import read_events
from tools.run.dataset import check_dataset, command, command_for, has_shards, missing_data
from tools.run.guard import TORCHRUN
from tools.run.machine import check_launch, find_machine
from tools.run.names import check_variables, text_of, trainer_flags
from tools.run.plan import (
    check_layers, config_of, dtype_of_products, full_disk, micro_batch, plan_lines, planned_tokens,
    slow_machine, stage_flops)
from tools.run.script import script
from tools.run.surroundings import compiler_missing
from tools.run.words import Words, read_words
from train_gpt import (
    Data, Loader, Refused, brief, overrides, preset_config, read_file, recipe_of, require, typed)

JSON = "--json"  # for ./run.sh
WHOLE = Path(__file__).resolve().parents[2] / "train_gpt.py"
EMBEDDED = Path("data/datasets/embedded")  # what proxies train on, unless told otherwise
GUESSED_VOCABULARY = 1024  # of a plan without data, for a recipe that does not name its own


class Ended(Exception):
    """A program that this one started failed, with this exit code, and has said why."""


class Asked(NamedTuple):
    """A run as it was asked for."""
    cfg: Any
    given: dict[str, Any]  # {constant: value} as typed
    flags: list[str]  # for the trainer
    ranks: int
    alone: bool  # the script will hold this recipe alone
    dry_run: bool
    launched: bool  # by ./run.sh


def say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


# ---------------------------------------------------------------- what was asked for
def start_of(run_id: str) -> dict[str, Any]:
    """What a run told of itself when it began; {} if it left nothing."""
    events = read_events(Path("logs", run_id)) if run_id else []
    return next((event for event in events if event["kind"] == "start"), {})


def gpus() -> int:
    """GPUs that torch sees, whatever CUDA_VISIBLE_DEVICES holds: numbers, UUIDs, MIG names; AMD's by a ROCm
    build."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_of(cfg: Any, given: Mapping[str, Any], began: Mapping[str, Any]) -> str:
    """The constant device: as typed, as the run began, or by default."""
    return given.get("device") or began.get("config", {}).get("device", cfg.device)


def count_ranks(device: str, preset: str, is_proxy: bool, began: Mapping[str, Any]) -> int:
    """One rank per GPU; for tiny and proxies, whose steps have few rows, one; for a run that goes on as many
    as before."""
    if device == "cpu":
        return 1
    most = began.get("world_size") or (1 if preset == "tiny" or is_proxy else gpus())
    return max(1, min(most, gpus()))


def read_request(words: Words, env: Mapping[str, str], launched: bool, began: Mapping[str, Any]) -> Asked:
    """The run that the command line and the environment ask for. began: what a run to be resumed told of
    itself. Raises Refused."""
    # 1. constants
    typed_words = words.constants
    if began and not text_of("PRESET", env, typed_words):
        typed_words = [f"--preset={began['preset']}", *typed_words]
    preset, flags, lines = trainer_flags(env, typed_words)
    say(*lines, *check_variables(preset, env))
    is_proxy = words.proxy is not None
    if is_proxy:
        require(not words.script, "--script: proxies are made from the whole train_gpt.py")
        if launched and not (text_of("DATA_PATH", env, flags) or words.dry_run or
                             (EMBEDDED / "manifest.json").exists()):
            fetch([])
        from tools.run.proxy import expand_proxy
        flags = expand_proxy(words.proxy or "", flags, env, say)
    preset, given = typed(env, flags)
    cfg = preset_config(preset, given)
    # 2. ranks
    check_launch(env)
    require(not words.ranks or words.ranks.isdecimal() and int(words.ranks),
            f"--ranks={words.ranks} must be a whole number from 1 on")
    device = device_of(cfg, given, began)
    ranks = int(words.ranks or count_ranks(device, preset, is_proxy, began))
    # 3. a step that can be compiled
    if cfg.compile and not began and (device == "cpu" or not gpus()):
        why = compiler_missing(env)
        if why:
            say(f"compile: {why}, so the step stays uncompiled: several times slower")
            flags.append("--compile=0")
    alone = words.script or recipe_of(preset).artifact_bytes_limit > 0 and not is_proxy
    return Asked(cfg, given, flags, ranks, alone, words.dry_run, launched)


# ---------------------------------------------------------------- data
def fetch(arguments: Sequence[str]) -> None:
    """`./run.sh data ARGUMENTS`. Raises Ended, but not for the tasks of CORE: a run with CORE=0 goes on
    without."""
    say(f"getting data: {command([*arguments])}")
    published = arguments and not arguments[0].startswith("-")
    program = "data.download" if published else "data.prepare"
    process = subprocess.Popen([sys.executable, "-m", program, *arguments])
    code = None
    while code is None:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # it got the signal, too, and ends
            pass
    if code and arguments != ["core"]:
        raise Ended(code)


def fetch_missing(asked: Asked) -> None:
    """Gets what the run lacks of published data. What data_path names is its owner's. Raises Ended."""
    own = command_for(Path(asked.cfg.data_path)) if "data_path" in asked.given else ""
    for arguments in missing_data(asked.cfg):
        if command(arguments) != own:
            fetch(arguments)


def with_its_dataset(asked: Asked) -> Asked:
    """A model is to be scored: unless data_path was given, its own dataset is taken, if that lies beside the
    recipe's. Raises Refused."""
    cfg = asked.cfg
    path = Path(cfg.eval_from)
    payload = read_file(path)
    require(isinstance(payload, dict) and "shape" in payload, f"{path.name} holds no model")
    asked = asked._replace(cfg=replace(cfg, vocab_size=payload["shape"].get("vocab_size", cfg.vocab_size)))
    told = payload.get("data")
    if not told:
        say(f"eval_from={path} is older than the digests of data: its text and tokenizer are not compared")
        return asked
    own = Path(cfg.data_path).parent / told["name"]
    if "data_path" in asked.given or not own.is_dir() or str(own) == cfg.data_path:
        return asked
    say(f"data: {own}, which the model was trained on")
    flags = [*asked.flags, f"--data-path={own}"]
    return asked._replace(cfg=replace(asked.cfg, data_path=str(own)), flags=flags)


def check_stream(cfg: Any, data: Data, machine: Any) -> None:
    """Plans rows as the trainer does. Raises Refused if data are too few for that, or lack what scores
    need."""
    most = Loader(cfg, data, machine, say).most_tokens
    needed = planned_tokens(cfg)
    if needed > most:
        require(cfg.max_wallclock_seconds,
                f"{needed} train tokens are needed, max_epochs={cfg.max_epochs} of {most // cfg.max_epochs} "
                "allowed")
        say(f"warning: max_epochs={cfg.max_epochs} of this text are {most} tokens, all steps take {needed}: "
            "the run ends there unless the cap ends it first")


# ---------------------------------------------------------------- the plan
def code_bytes(asked: Asked) -> int:
    """Bytes of the script that the run will use."""
    text = WHOLE.read_text("utf-8")
    return len((script(asked.cfg.preset, text) if asked.alone else text).encode())


def check_run(asked: Asked, env: Mapping[str, str]) -> Any:
    """Looks at everything that a training run needs, prints the plan, and adds to its flags. Returns its
    Config, with the vocabulary of its data. Raises Refused, Ended."""
    def doubt(sentence: str) -> None:
        """Refuses a run for this reason, if there is one; a plan goes on."""
        require(asked.dry_run or not sentence, sentence)
        if sentence:
            say(f"warning: {sentence}")

    # 1. what is refused before gigabytes of data are fetched
    cfg = asked.cfg
    machine = find_machine(cfg, env, asked.ranks)
    check_layers(cfg)
    if cfg.device != "cpu":
        doubt(slow_machine(replace(cfg, vocab_size=cfg.vocab_size or GUESSED_VOCABULARY), machine))
    if asked.launched and not asked.dry_run:
        fetch_missing(asked)
    # 2. data
    if asked.dry_run and not has_shards(Path(cfg.data_path)):
        cfg = replace(cfg, vocab_size=cfg.vocab_size or GUESSED_VOCABULARY)
        say(f"data: there are none at {cfg.data_path!r}: get them with "
            f"`{command_for(Path(cfg.data_path).absolute())}`; planning with vocab_size={cfg.vocab_size}")
    else:
        data = check_dataset(cfg, say)
        cfg = replace(cfg, vocab_size=data.vocab_size, bos_id=cfg.bos_id or max(data.bos, 0))
        try:
            check_stream(cfg, data, machine)
        except Refused as error:  # too few tokens or documents, no tasks of CORE
            doubt(str(error))
    # 3. memory, disk, the plan; a run's own log has its overrides
    if asked.dry_run:
        say(*[f"override {name} {old} -> {new}" for name, (old, new) in overrides(asked.cfg).items()])
    doubt(full_disk(cfg, Path("logs")))
    micro = micro_batch(cfg, machine)
    say(*plan_lines(cfg, machine, micro, lambda: code_bytes(asked)))
    share = cfg.train_batch_tokens // cfg.train_seq_len // machine.world_size
    if not cfg.device_batch_size and (machine.on_gpu or micro != share):
        asked.flags.append(f"--device-batch-size={micro}")
    return cfg


# ---------------------------------------------------------------- the answer
def script_path(asked: Asked, run_id: str) -> Path:
    """The script that trains: a run that goes on has its own; else train_gpt.py, or what `./run.sh script
    PRESET` makes of it."""
    own = Path("logs", run_id, "train_gpt.py")
    if run_id and own.is_file():
        return own
    if not asked.alone:
        return Path(os.path.relpath(WHOLE)) if WHOLE.is_relative_to(Path.cwd()) else WHOLE
    preset = asked.cfg.preset
    made = Path("logs", ".script", preset, "train_gpt.py")
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        temporary = made.with_name(str(os.getpid()))
        temporary.write_text(script(preset, WHOLE.read_text("utf-8")), encoding="utf-8")
        os.replace(temporary, made)
    except OSError as error:
        raise Refused(f"the script of {preset} could not be made in {made.parent} ({brief(error)})") from None
    return made


NO_MFU: dict[str, Any] = dict(gpus=[], flops=[], dtype="")


def for_mfu(cfg: Any, names: list[str]) -> dict[str, Any]:
    """What the live line needs for MFU on these GPUs."""
    return dict(gpus=names, flops=stage_flops(cfg), dtype=dtype_of_products(cfg)) if names else NO_MFU


def for_mfu_of_resumed(began: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """The same for a run that goes on; nothing if it began on other hardware or by another version. Never
    raises, since its own script decides whether it goes on."""
    try:
        same = names and began["hardware"] == f"{len(names)}x {names[0]}"
        return for_mfu(config_of(began), names) if same else NO_MFU
    except Exception:
        return NO_MFU


def preflight(words: Words, env: Mapping[str, str], launched: bool = False) -> dict[str, Any]:
    """Prints the plan. Returns the answer. Raises Refused, Ended."""
    run_id = text_of("RESUME", env, words.constants)
    began = start_of(run_id)
    asked = read_request(words, env, launched, began)
    on_gpu = device_of(asked.cfg, asked.given, began) != "cpu"
    count = min(asked.ranks, gpus()) if on_gpu else 0
    names = [torch.cuda.get_device_name(n) for n in range(count)]
    needed = NO_MFU
    if run_id:
        say(f"resume: {run_id} goes on as it began, with the plan in its log")
        needed = for_mfu_of_resumed(began, names)
    elif asked.cfg.eval_from:
        asked = with_its_dataset(asked)
        check_dataset(asked.cfg, say)
    else:
        needed = for_mfu(check_run(asked, env), names)
    if words.dry_run or not launched:
        return dict(words=["train_gpt.py", *asked.flags])
    command = [str(script_path(asked, run_id)), *asked.flags]
    if asked.ranks > 1:
        command = ["-m", TORCHRUN, "--standalone", f"--nproc_per_node={asked.ranks}", *command]
    return dict(words=command, ranks=asked.ranks, **needed)


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Exit code 0: the run may start; 2: why not, in a sentence."""
    launched = JSON in argv[:1]
    words = read_words(argv[launched:], env)
    try:
        answer = preflight(words, env, launched)
        if launched:
            print(json.dumps(answer), flush=True)
        elif not words.dry_run:
            say(shlex.join(["next:", *answer["words"]]))
        return 0
    except Ended as error:
        return int(error.args[0])
    except Refused as error:
        why = " ".join(str(error).split())
    except OSError as error:  # such as a disk that cannot be read
        why = brief(error)
    except KeyboardInterrupt:
        return 130
    print(f"preflight: {why}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
