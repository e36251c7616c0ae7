"""What a run would do, and whether it may: python -m tools.run.preflight [PRESET] [NAME=value ...]

Finds out whatever takes more than a line to find out: launcher, names, data as a whole, memory, time, disk;
then prints the plan. Exit 0: the run may start. 2: why not, in a sentence. The trainer knows nothing of it.

    --dry-run   plan also without data, or on a machine that is too slow
    --ranks=N   for N ranks on each machine; else one on each GPU
    --script    the script will hold this recipe alone

./run.sh calls preflight() before each run, and for --dry-run. Before a torchrun of your own, call this
yourself: its last line says what to start.
"""
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tools.run.dataset import Log, check_dataset, command, command_for, has_shards, missing_data
from tools.run.machine import find_machine
from tools.run.names import check_variables, trainer_flags
from tools.run.plan import (
    check_layers, full_disk, micro_batch, plan_lines, planned_tokens, slow_machine, slow_sliding, stage_flops)
from tools.run.script import script
from train_gpt import (
    RESUME_FREE, Data, Loader, Refused, brief, check_same_data, overrides, preset_config, read_file,
    recipe_of, require, script_source, typed)

GUESSED_VOCABULARY = 1024  # of a plan without data, for a recipe that does not name its own


class Report(NamedTuple):
    """What the launcher needs to know."""
    preset: str  # also of a run that is resumed
    flags: list[str]  # for the trainer
    device_batch_size: int = 0  # DEVICE_BATCH_SIZE for the trainer; 0: it needs none
    missing: Sequence[list[str]] = ()  # arguments of ./run.sh data, to be called before the next preflight
    finished: bool = False  # the run to be resumed has finished
    flops: Sequence[tuple[int, float]] = ()  # (first step of a stage, its FLOPs per token)


class Asked(NamedTuple):
    """A run as it was asked for."""
    cfg: Any
    given: dict[str, Any]  # {constant: value} as typed
    flags: list[str]  # for the trainer
    file: str = ""  # that holds a model: what sentences call it
    trained_on: dict[str, Any] | None = None  # what it tells of its data; None: there is no file


def say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


def preflight(env: Mapping[str, str], words: Sequence[str], log: Log = say, dry_run: bool = False,
              ranks: int = 0, alone: bool = False, may_fetch: bool = False) -> Report:
    """Looks at everything and logs the plan. words: the command line, less what is the launcher's own. ranks:
    on each machine, see find_machine(). alone: the script will hold this recipe alone. may_fetch: data that
    are missing are reported, so that the caller gets them and calls again. Raises Refused.

    On a GPU, call it in a process of its own: its CUDA context takes memory as long as the process lives."""
    def doubt(sentence: str) -> None:
        """Refuses a run for this reason, if there is one; a plan goes on."""
        require(dry_run or not sentence, sentence)
        if sentence:
            log(f"warning: {sentence}")

    # 1. what was asked for
    asked = read_request(env, words, log)
    if asked is None:
        return Report("", [], finished=True)
    cfg = asked.cfg
    machine = find_machine(cfg, env, ranks)
    # 2. what is refused before gigabytes of data are fetched
    check_logs(cfg)
    check_layers(cfg)
    if not cfg.eval_from and cfg.device != "cpu":
        doubt(slow_machine(replace(cfg, vocab_size=cfg.vocab_size or GUESSED_VOCABULARY), machine))
    missing = data_to_get(asked)
    if missing and may_fetch and not dry_run:
        return Report(cfg.preset, asked.flags, missing=missing)
    # 3. data
    if dry_run and not has_shards(Path(cfg.data_path)):
        cfg = replace(cfg, vocab_size=cfg.vocab_size or GUESSED_VOCABULARY)
        log(f"data: there are none at {cfg.data_path!r}: get them with "
            f"`{command_for(Path(cfg.data_path).absolute())}`; planning with vocab_size={cfg.vocab_size}")
    else:
        data = check_dataset(cfg, log)
        compare_data(asked, data, log)
        cfg = replace(cfg, vocab_size=data.vocab_size, bos_id=cfg.bos_id or max(data.bos, 0))
        doubt(slow_sliding(cfg, cfg.val_tokens or len(data.val)))
        try:
            check_stream(cfg, data, machine, log)
        except Refused as error:  # too few tokens or documents, no tasks of CORE
            doubt(str(error))
    if cfg.eval_from:
        return Report(cfg.preset, asked.flags)
    # 4. memory, disk, the plan; a run's own log has its overrides
    if dry_run:
        log(*[f"override {name} {old} -> {new}" for name, (old, new) in overrides(asked.cfg).items()])
    doubt(full_disk(cfg, Path("logs")))
    micro = micro_batch(cfg, machine)
    alone = alone or counts_its_script(cfg.preset)
    log(*plan_lines(cfg, machine, micro, lambda: code_bytes(cfg.preset, alone)))
    share = cfg.train_batch_tokens // cfg.train_seq_len // machine.world_size
    is_known = cfg.device_batch_size or not machine.on_gpu and micro == share
    flops = stage_flops(cfg) if machine.on_gpu else ()
    return Report(cfg.preset, asked.flags, device_batch_size=0 if is_known else micro, flops=flops)


def counts_its_script(preset: str) -> bool:
    """Does the track count the bytes of the script? ./run.sh then trains with one that holds this recipe
    alone."""
    return recipe_of(preset).artifact_bytes_limit > 0


def code_bytes(preset: str, alone: bool) -> int:
    """Bytes of the script that the run will use. alone: one that holds this recipe alone."""
    text = script_source().decode()
    if alone:
        text = script(preset, text)
    return len(text.encode())


# ---------------------------------------------------------------- what was asked for
def read_request(env: Mapping[str, str], words: Sequence[str], log: Log) -> Asked | None:
    """The run that the command line and the environment ask for; None: one that is resumed has finished.
    Raises Refused."""
    preset, flags, lines = trainer_flags(env, words)
    log(*lines, *check_variables(preset, env))
    preset, given = typed(env, flags)
    asked = Asked(preset_config(preset, given), given, flags)
    if asked.cfg.resume:
        return resumed(asked, log)
    if asked.cfg.eval_from:
        return scored(asked, log)
    return asked


def header(path: Path) -> dict[str, Any]:
    """A model's file or checkpoint, without reading the tensors of one that is not compressed. Raises
    Refused."""
    try:
        with open(path, "rb") as file:
            compressed = file.read(2) != b"PK"
        if not compressed:
            return torch.load(path, "cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged file may raise anything
        raise Refused(f"{path.name} is damaged or not from this trainer ({brief(error)})") from None
    return read_file(path)


def resumed(asked: Asked, log: Log) -> Asked | None:
    """The run to be resumed, as its checkpoint tells; None if it has finished. Raises Refused."""
    run_id = asked.cfg.resume
    folder = Path("logs", run_id)
    require(folder.is_dir(), f"resume={run_id!r}: there is no {folder}")
    if (folder / "result.json").exists():
        log(f"{run_id} has finished: its scores are in {folder}/result.json")
        return None
    path = folder / "checkpoint.pt"
    require(path.exists(), f"resume={run_id!r}: {folder} has no checkpoint; start a new run")
    payload = header(path)
    saved = payload["config"]
    recipe = recipe_of(saved["preset"])
    known = {f.name for f in fields(recipe)}
    require({*saved} <= known,
            f"train_gpt.py is not what {run_id} began with: put {folder}/train_gpt.py here")
    free = {name: value for name, value in asked.given.items() if name in RESUME_FREE and name in known}
    cfg = recipe(**saved | free | dict(run_id=run_id))
    return asked._replace(cfg=cfg, file=f"resume={run_id}", trained_on=payload.get("data") or {})


def scored(asked: Asked, log: Log) -> Asked:
    """The model to be scored. Unless data_path was given, its own dataset is taken, if that lies beside the
    recipe's. Raises Refused."""
    path = Path(asked.cfg.eval_from)
    payload = header(path)
    require(isinstance(payload, dict) and "shape" in payload, f"{path.name} holds no model")
    shape = payload["shape"]
    recipe = recipe_of(shape["preset"])
    unknown = {*shape} - {f.name for f in fields(recipe)}
    require(not unknown, f"{path.name}: {shape['preset']} here has no {', '.join(sorted(unknown))}")
    base = asked.cfg if isinstance(asked.cfg, recipe) else recipe(eval_from=str(path))
    cfg = replace(base, **shape, train_batch_tokens=shape["train_seq_len"])
    told = payload.get("data") or {}
    own = Path(cfg.data_path).parent / told.get("name", "")
    flags = asked.flags
    if told and "data_path" not in asked.given and own.is_dir() and str(own) != cfg.data_path:
        log(f"data: {own}, which the model was trained on")
        cfg = replace(cfg, data_path=str(own))
        flags = [*flags, f"--data-path={own}"]
    return asked._replace(cfg=cfg, flags=flags, file=f"eval_from={path}", trained_on=told)


def check_logs(cfg: Any) -> None:
    """Raises Refused if the run's folder exists or could not be made."""
    logs = Path("logs")
    folder = logs / (cfg.run_id or "x")
    require(logs.exists() or not logs.is_symlink(),
            "logs is a link to nowhere: make the folder that it names, or remove it")
    require(logs.is_dir() or not logs.exists(), f"{folder} cannot be written: logs is a file")
    try:
        taken = cfg.run_id and not cfg.resume and folder.exists()
    except OSError as error:  # such as for a name that is too long
        raise Refused(f"run_id={cfg.run_id!r}: {folder} cannot be written ({error.strerror})") from None
    require(not taken, f"run_id={cfg.run_id!r}: {folder} exists")
    place = logs if logs.exists() else Path(".")
    require(os.access(place, os.W_OK | os.X_OK), f"{folder} cannot be written (Permission denied)")


# ---------------------------------------------------------------- data
def data_to_get(asked: Asked) -> list[list[str]]:
    """Arguments of the `./run.sh data` commands that get what the run lacks. What data_path names is its
    owner's, and a model or checkpoint had its data."""
    if asked.file:
        return []
    missing = missing_data(asked.cfg)
    if "data_path" in asked.given:
        own = command_for(Path(asked.cfg.data_path))
        missing = [arguments for arguments in missing if command(arguments) != own]
    return missing


def compare_data(asked: Asked, data: Data, log: Log) -> None:
    """Raises Refused for other data than a model or checkpoint was trained on, unless other_data says that
    they may differ."""
    if asked.trained_on:
        check_same_data(asked.file, asked.trained_on, asked.cfg, data)
    elif asked.file:
        log(f"{asked.file} is older than the digests of data: its text and tokenizer are not compared")


def check_stream(cfg: Any, data: Data, machine: Any, log: Log) -> None:
    """Plans rows as the trainer does. Raises Refused if data are too few for that, or lack what scores
    need."""
    most = Loader(cfg, data, machine, log).most_tokens
    needed = planned_tokens(cfg)
    if needed > most and not cfg.eval_from:
        require(cfg.max_wallclock_seconds,
                f"{needed} train tokens are needed, max_epochs={cfg.max_epochs} of {most // cfg.max_epochs} "
                "allowed")
        log(f"warning: max_epochs={cfg.max_epochs} of this text are {most} tokens, all steps take {needed}: "
            "the run ends there unless the cap ends it first")


# ---------------------------------------------------------------- as a program
def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    ours = {"--dry-run": env.get("DRY_RUN", "0"), "--script": "0", "--ranks": "0"}
    words = []
    for word in argv:
        name, _, text = word.partition("=")
        if name in ours:
            ours[name] = text or "1"
        else:
            words.append(word)
    try:
        require(ours["--ranks"].isdecimal(), f"--ranks={ours['--ranks']} must be a whole number")
        dry_run = ours["--dry-run"].lower() not in ("0", "false", "")
        report = preflight(env, words, say, dry_run, int(ours["--ranks"]), ours["--script"] != "0")
        if not (dry_run or report.finished):
            micro = report.device_batch_size
            flags = [*report.flags, f"--device-batch-size={micro}"] if micro else report.flags
            say(shlex.join(["next:", "train_gpt.py", *flags]))
        if env.get("LOGGER"):
            say("warning: LOGGER works only through ./run.sh")
        return 0
    except Refused as error:
        why = " ".join(str(error).split())
    except OSError as error:  # such as a disk that cannot be read
        why = brief(error)
    print(f"preflight: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
