"""What `record check` asks of a record folder: one function a rule.

Each takes (folder, options) and returns what holds, in a few words, or None where its track has no such rule.
It raises Broken where the rule fails.
"""
import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data import inputs
from records.judge.runs import RESUMED, Refused, Run, same_losses
from records.judge.significance import describe, test_line, welch_test
from records.judge.scores import differences
from records.verify import leak_probe, scripts, source
from records.verify.folders import (
    KEYS, NOTES, ROOT, Folder, best_before, change_text, code_diff, computed, read_json, records_of, render,
    sha256, shared_config, summary_of, track_of)

# Files that a record folder may list, besides companions
MEMBERS = re.compile(r"(?:train|baseline(?=_))(?:_seed\d+)?\.log|result(?:_seed\d+)?\.json|train_gpt\.py"
                     r"|loss\.png|changes\.diff|final_model(?:_seed\d+)?\.(?:int8|lzma|brot)\.ptz")
ARTIFACT_LIMIT = 2_000_000      # bytes; a larger one stays out of the folder, its sha256 does not
# What reading damaged files may raise
DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError)
# Constants of a run that are not repeated when its model is probed or scored again
OF_ONE_RUN = ("run_id", "resume", "eval_from", "sample", "dry_run", "device", "dtype")
LOOK_ONLY = argparse.Namespace(no_exec=True, rerun_eval=False, artifact=(), replay=0, seconds=60)


class Broken(Exception):
    """A rule fails; the sentence names the file and both values."""


class LeftOut(Exception):
    """The rule cannot be tried here; why, or nothing where it would run the folder's code under --no-exec."""


class Rule(NamedTuple):
    name: str
    function: Callable[[Folder, argparse.Namespace], str | None]


def require(good: Any, sentence: str) -> None:
    """Raises Broken with the sentence unless good."""
    if not good:
        raise Broken(sentence)


def same(where: str, name: str, value: Any, other: str, expected: Any) -> None:
    """`value`, found in `where`, must equal `expected`, found in `other`."""
    require(value == expected, f"{where}: {name} is {value!r}, in {other} {expected!r}")


def first_difference(a: str, b: str) -> tuple[int, str, str] | None:
    """(line number, line of a, line of b) where two texts first differ, or None."""
    lines = itertools.zip_longest(a.split("\n"), b.split("\n"), fillvalue="")
    for number, (line_a, line_b) in enumerate(lines, 1):
        if line_a != line_b:
            return number, line_a, line_b
    return None


# ------------------------------------------------------------ public
def check_finished(folder: Folder, options: argparse.Namespace) -> str:
    for run in folder.runs:
        require(run.finished, f"{run.file} was cut off at step {run.steps}")
        require(run.finals, f"{run.file} has no final score")
    return f"{len(folder.runs)} logs end with a score"


def check_score(folder: Folder, options: argparse.Namespace) -> str:
    """The mean reaches the target, or beats the record before by the margin, at the track's p."""
    track = folder.track
    claim, test = folder.test()
    if folder.first_of_track():
        return claim
    require(test, f"{claim}: a single run, the test needs more")
    if folder.submission["systems_change"] and track.rank == "time":
        mean = describe(folder.values(track.metric)).mean
        good = mean <= track.target if track.better == "lower" else mean >= track.target
        require(good, f"{claim}: the mean is {mean}")
        return f"{claim}: mean {mean:.6f}; the test is waived for a pure systems change"
    require(test.p < track.p, f"{claim}: {test_line(test)}, the rule asks for p < {track.p}")
    return f"{claim}: {test_line(test)}"


def check_time(folder: Folder, options: argparse.Namespace) -> str | None:
    """Faster than the record before, where time is what is ranked."""
    if folder.track.rank != "time":
        return None
    mean = describe(folder.values("time")).mean
    before = folder.submission["before"]
    if folder.baseline:
        other = describe([run.time for run in folder.baseline]).mean
        name = "the baseline logs"
    elif before:
        other = describe(before["times"]).mean
        name = before["name"]
    else:
        other = folder.track.start
        name = folder.track.start_name
    require(mean < other, f"the logs take {mean:.4f} s, {name} {other:.4f} s")
    return f"{mean:.4f} s, {name} {other:.4f} s: ratio {mean / other:.4f}"


def check_time_cap(folder: Folder, options: argparse.Namespace) -> str | None:
    cap = folder.track.time_cap
    if not cap:
        return None
    for run in folder.runs:
        in_time = run.time is None or run.time <= cap
        require(in_time, f"{run.file}: {run.time} s of training, the cap is {cap} s")
    # to read training data for calibrating the rounding is training
    for run in folder.runs:
        whole = (run.result["train_time_ms"] + run.result.get("calibration_ms", 0)) / 1e3
        require(whole <= cap, f"{run.json}: {whole} s of training and calibration, the cap is {cap} s")
    return f"longest {max(run.time or 0 for run in folder.runs):.4f} s, the cap is {cap} s"


def check_bytes(folder: Folder, options: argparse.Namespace) -> str | None:
    """All code that a run loads counts: the script and, by rules version 1, the files beside it."""
    cap = folder.track.byte_cap
    if not cap:
        return None
    companions = folder.companions()
    code = len(folder.script) + sum(len(folder.read(name)) for name in companions)
    for run in folder.runs:
        total = int(run.facts["bytes_model"]) + code
        require(total <= cap, f"{run.file}: model and code have {total} bytes, the cap is {cap}")
    return f"model and code ({', '.join(['train_gpt.py', *companions])}) within {cap} in each run"


def check_eval_time(folder: Folder, options: argparse.Namespace) -> str | None:
    cap = folder.track.eval_cap
    if not cap:
        return None
    for run in folder.runs:
        resumed = RESUMED.findall(run.body)
        before = int(resumed[-1][1]) if resumed else 0      # ms of training by earlier processes
        rest = run.result["process_ms"] - run.result["setup_ms"] - run.result["compile_ms"]
        rest -= run.result["train_time_ms"] - before
        require(rest <= 1e3 * cap,
                f"{run.json}: {rest / 1e3:.0f} s besides setup and training, the cap is {cap} s")
    return f"everything besides setup and training takes less than {cap} s"


def check_data(folder: Folder, options: argparse.Namespace) -> str:
    """The track's dataset and split, by the log as by the result."""
    track = folder.track
    for run in folder.runs:
        data = run.result["data"]
        of_first = data["name"] == track.data.partition(" or ")[0]      # whose tokens the rules count
        wanted = {"data": track.data, "fingerprint": track.fingerprint, "val_bytes": track.val[1],
                  "val_tokens": track.val[0] if of_first or not track.any_tokenizer else None}
        for key, want in wanted.items():
            value = run.facts.get(key)
            same(run.json, key, str(data["name" if key == "data" else key]), run.file, value)
            if want:
                require(value in str(want).split(" or "),
                        f"{run.file}: {key} is {value!r}, in the rules {str(want)!r}")
        tokens = run.facts.get("train_tokens")
        same(run.json, "train_tokens", str(data["train_tokens"]), run.file, tokens)
        for file, digest in track.sha256.items():
            same(run.json, f"sha256 {file}", data["sha256"].get(file), "the rules", digest)
    return f"{track.data}: the same text and split in every run"


def check_evaluation(folder: Folder, options: argparse.Namespace) -> str:
    """The track's settings, the whole split, and bits per byte that follow from the loss."""
    for run in folder.runs:
        for key in sorted({*run.result["eval"], *run.eval}):
            same(run.json, key, str(run.result["eval"].get(key)), run.file, run.eval.get(key))
        for key, want in folder.track.eval.items():
            if want.startswith("="):
                want = run.eval.get(want[1:])
            same(run.file, key, run.eval.get(key), "the rules", want)
        require("val_loss_partial" not in run.result, f"{run.json}: only a part of the split was scored")
        if folder.track.metric == "core":
            most = run.result["config"]["core_metric_max_per_task"]
            require(most == "0", f"{run.json}: CORE took only {most} examples of each task")
        if run.result["val_bpb"] is not None:
            data = run.result["data"]
            bits = run.result["val_loss"] / math.log(2) * (data["val_tokens"] - 1) / data["val_bytes"]
            told = run.result["val_bpb"]
            require(abs(bits - told) < 1e-6,
                    f"{run.json}: val_bpb is {told!r}, but loss, tokens and bytes make {bits!r}")
    settings = " ".join(f"{key}:{value}" for key, value in folder.runs[0].eval.items())
    return f"{settings}; bits per byte add up"


def check_flags(folder: Folder, options: argparse.Namespace) -> str | None:
    """No extra torch._inductor.config or torch.compile flags in the speedrun."""
    if folder.track.data != "fineweb10B_gpt2":
        return None
    found = source.compiler_flags(folder.source())
    require(not found, f"train_gpt.py, {found and found[0]}")
    return "none"


def check_hardware(folder: Folder, options: argparse.Namespace) -> str | None:
    want = folder.track.hardware
    if not want:
        return None
    for run in folder.runs:
        value = run.facts["hardware"]
        require(value.startswith(want), f"{run.file}: {value}, the rules: {want}")
    return want


def check_leaks(folder: Folder, options: argparse.Namespace) -> str:
    """Runs the folder's code, in a process of its own."""
    result = folder.runs[0].result
    artifact = None
    if options.no_exec:
        raise LeftOut
    for owner, artifact in artifacts_of(folder, options)[:1]:
        result = owner.result
    env = environment_of(result) | {"DEVICE": "cpu"}
    return leak_probe.judge(folder.path / "train_gpt.py", artifact, env, val_files(result), options.seconds,
                            result["eval"]["eval_context"])


def environment_of(result: dict[str, Any]) -> dict[str, str]:
    """The constants of a run as environment variables, but for those of that one run and its machine."""
    return {name.upper(): value for name, value in result["config"].items() if name not in OF_ONE_RUN}


def scored_part(result: dict[str, Any]) -> dict[str, float]:
    """Scores of the artifact, or of the weights where none was packed."""
    return result.get("artifact") or result["trained"]


def artifacts_of(folder: Folder, options: argparse.Namespace) -> list[tuple[Run, Path]]:
    """[(Run, path)] of the artifacts at hand, or of weights where none was packed: those of the folder by
    their names, those of --artifact by the sha256 of a log or, before rules version 3, of submission.json."""
    found = []
    names = [name for name in folder.files if name.endswith(".ptz")]
    if not options.artifact:
        named = [(run, artifact_name(run, names)) for run in folder.runs]
        return [(run, folder.path / name) for run, name in named if name]
    owners = {digest: run for run in folder.runs for digest in run.digests.values()}
    owners.setdefault(folder.submission["artifact_sha256"], folder.runs[0])
    for path in map(Path, options.artifact):
        owner = owners.get(sha256(inputs.read_bytes(path)))
        require(owner, f"{path.name}: its sha256 is in no log and not in submission.json")
        found.append((owner, path))
    return found


def val_files(result: dict[str, Any]) -> list[Path]:
    """The shards of the val split, as far as they are here."""
    return sorted((ROOT / "data" / "datasets" / result["data"]["name"]).glob("*_val_*.bin"))


# ------------------------------------------------------------ strict
def check_runs(folder: Folder, options: argparse.Namespace) -> str:
    n = len(folder.runs)
    least = folder.track.min_runs
    excluded = folder.submission.get("excluded", [])
    require(n >= least, f"{n} runs, the rules ask for {least}")
    for entry in excluded:
        require(entry["reason"].strip(), f"submission.json: {entry['run_id']} is excluded without a reason")
    return f"{n} runs, {len(excluded)} more excluded with reasons"


def check_distinct(folder: Folder, options: argparse.Namespace) -> str:
    """No run is there twice, no seed is used twice."""
    seeds = {}
    for i, run in enumerate(folder.runs):
        for other in folder.runs[:i]:
            require(not same_losses(run, other), f"{run.file} is the same run as {other.file}, by its losses")
        require(run.seed not in seeds,
                f"{run.file} has seed {run.seed}, as {seeds.get(run.seed)} has")
        seeds[run.seed] = run.file
    for run in folder.runs:
        same(run.json, "seed", run.result["seed"], run.file, run.seed)
        require(not run.steps_repeat or run.result["resumed"],
                f"{run.file}: steps repeat, but {run.json} says resumed false")
    return "seeds " + ", ".join(str(seed) for seed in seeds)


def check_source(folder: Folder, options: argparse.Namespace) -> str:
    """Each log begins with train_gpt.py or leaves it out."""
    script = folder.source()
    for run in folder.runs:
        text = run.source or ""
        found = first_difference(text.strip(), script.strip())
        require(not found, f"{run.file}: its source ({len(text.encode())} bytes) differs from train_gpt.py "
                f"({len(script.encode())} bytes), line, as it is, in train_gpt.py: {str(found)[:200]}")
    for run in folder.runs:
        same(run.json, "code_sha256", run.result["code_sha256"], "train_gpt.py", sha256(folder.script))
        same(run.json, "bytes_code", run.result["bytes_code"], "train_gpt.py", len(folder.script))
        check_companions(folder, run)
    return f"{len(folder.runs)} logs are of train_gpt.py"


def check_companions(folder: Folder, run: Run) -> None:
    """Files that the run loaded from beside its script are in the folder, as they were."""
    for file, digest in run.result.get("companions", {}).items():
        require(file in folder.rules.companions, f"{run.json}: the run loaded {file} from beside its script, "
                f"which rules version {folder.submission['rules_version']} does not allow")
        require(file in folder.files, f"{file} is missing, {run.json} says that the run loaded it")
        same(file, "sha256", sha256(folder.read(file)), run.json, digest)


def check_config(folder: Folder, options: argparse.Namespace) -> str:
    """The runs differ in nothing but the seed, and logs and results agree on every constant."""
    first = shared_config(folder.runs[0].result["config"])
    for run in folder.runs:
        config = run.result["config"]
        track = track_of(run.result["preset"])
        same(run.json, "track", track, "submission.json (track)", folder.submission["track"])
        for key in ("preset", "seed", "run_id"):
            same(run.json, key, str(run.result[key]), "its config", config.get(key))
        for key in sorted({*config, *run.config}):
            same(run.json, f"config {key}", config.get(key), run.file, run.config.get(key))
        for key, want in folder.track.config.items():
            same(run.file, f"config {key}", config.get(key), "the rules", want)
        shared = shared_config(config)
        for key in sorted({*first, *shared}):
            same(run.json, f"config {key}", shared.get(key), "that of train.log", first.get(key))
        for key, (_, value) in run.result["overrides"].items():
            same(run.json, f"override {key}", value, "its config", config.get(key))
        check_eval_settings(run, config)
    return f"{len(first)} constants, the same but for the seed"


def check_eval_settings(run: Run, config: dict[str, str]) -> None:
    """What a score depends on is what the constants make it; 0 stands for the rest of the line."""
    row = config["train_seq_len"]
    wanted = {"eval_tokens": [config["val_tokens"], "full"], "eval_context": [config["eval_context"], row],
              "eval_stride": [config["eval_stride"], config["eval_context"], row]}
    for key, values in wanted.items():
        want = next(value for value in values if value != "0")
        same(run.file, key, run.eval.get(key), "its config", want)


def check_results(folder: Folder, options: argparse.Namespace) -> str:
    for run in folder.runs:
        check_final_scores(run)
        check_last_validation(run)
        check_summary(run)
        size = run.result["bytes_model"] + len(folder.script)
        same(run.json, "bytes_total", run.result["bytes_total"], "bytes_model and train_gpt.py", size)
    return "agree with the logs to the last digit, sizes add up"


def check_final_scores(run: Run) -> None:
    """The two scores, each rounded on one line of the log and exact on another."""
    lines = {tag: {"val_loss": loss, "val_bpb": bpb} for tag, loss, bpb in run.finals}
    counts = "artifact" if run.result["config"]["score_artifact"] == "1" else "trained"
    packed = next((tag for tag in lines if tag.endswith("_roundtrip")), "final_..._roundtrip")
    tags = {"trained": "final_model", "artifact": packed}
    for part, tag in tags.items():
        if part == "artifact" != counts and part not in run.result:
            continue                            # no artifact was packed
        for line, digits in ((tag, 4), (tag + "_exact", 8)):
            require(line in lines, f"{run.file} has no line {line}")
            for key, value in lines[line].items():
                if value is not None:
                    told = round(run.result[part][key], digits)
                    same(run.json, f"{part} {key}", told, f"{run.file}, {line}", value)
    for key in ("val_loss", "val_bpb"):
        same(run.json, key, run.result[key], f"its {counts}", run.result[counts][key])
    if run.result.get("core") is not None:
        core = run.facts.get("core")
        same(run.json, "core", round(run.result["core"], 6), f"{run.file}, core_metric", core)
        centered = [task["centered"] for task in run.result.get("core_tasks", {}).values()]
        require(centered and abs(sum(centered) / len(centered) - run.result["core"]) < 1e-9,
                f"{run.json}: core {run.result['core']} is not the mean of its tasks")


def check_last_validation(run: Run) -> None:
    """The last validation line tells the steps, the time and the score of the trained weights."""
    point = run.curves["val"][-1]
    where = f"the last validation of {run.file}"
    same(run.json, "trained val_loss", round(run.result["trained"]["val_loss"], 4), where, point.loss)
    same(run.json, "steps", run.result["steps"], where, run.steps)
    same(run.json, "train_time_ms", run.result["train_time_ms"], where, round(point.seconds * 1e3))
    if run.result["stop_reason"] != "iterations":
        where = f"stopping_early of {run.file}"
        same(run.json, "train_time_ms", run.result["train_time_ms"], where, run.facts.get("stopped_ms"))


def check_summary(run: Run) -> None:
    """The table that ends a log, and single lines before it."""
    where = f"the summary of {run.file}"
    for key in ("steps", "tokens", "tok_per_s", "train_time_ms", "step_ms", "bytes_model", "bytes_total",
                "process_ms"):
        value = run.result[key]
        if isinstance(value, dict) and "{" not in run.summary.get(key, ""):     # older logs print Python's
            value = " ".join(f"{part}:{number}" for part, number in value.items())
        same(run.json, key, str(value), where, run.summary.get(key))
    score = f"val_loss:{run.result['val_loss']:.4f}"
    if run.result["val_bpb"]:
        score += f" val_bpb:{run.result['val_bpb']:.4f}"
    same(run.file, "score", run.summary.get("score", score), run.json, score)        # only in older logs
    for key in ("setup_ms", "compile_ms", "bytes_code", "bytes_model", "bytes_total"):
        same(run.json, key, run.result[key], run.file, run.facts.get(key))
    for key in ("world_size", "hardware", "torch", "peak_memory"):
        same(run.json, key, str(run.result[key]), run.file, run.facts.get(key))
    told = run.summary.get("calibration_ms")
    same(run.json, "calibration_ms", run.result.get("calibration_ms"), where, told and int(told))


def json_text(content: Any) -> str:
    """A JSON object as our files hold it."""
    return json.dumps(content, indent=1) + "\n"


def check_submission(folder: Folder, options: argparse.Namespace) -> str:
    """submission.json says what logs and results make, number by number."""
    numbers = computed(folder)
    for key, value in numbers.items():
        same("submission.json", key, folder.submission.get(key), "what the logs make", value)
    missing = [key for key in KEYS if key not in folder.submission]
    require(not missing, f"submission.json lacks {', '.join(missing)}")
    text = folder.read("submission.json").decode()
    found = first_difference(text, json_text(folder.submission))
    require(not found, f"submission.json (line, as it is, as its numbers are written): {found}")
    return f"{len(numbers)} recomputed"


def check_files(folder: Folder, options: argparse.Namespace) -> str:
    """Each file that submission.json lists is there, unaltered, and no other is."""
    listed = folder.submission["files"]
    for name, digest in listed.items():
        require(name in folder.files, f"{name} is missing, submission.json lists it")
        same(name, "sha256", sha256(folder.read(name)), "submission.json", digest)
    extra = [name for name in folder.names if name not in {*listed, "README.md", "submission.json"}]
    require(not extra, f"{', '.join(extra[:3])}: not listed in submission.json")
    strange = [name for name in listed if not MEMBERS.fullmatch(name) and name not in folder.rules.companions]
    require(not strange, f"{', '.join(strange[:3])}: no part of a record, a script must run alone")
    for name in ("train.log", "result.json", "train_gpt.py", "loss.png"):
        require(name in listed, f"{name} is not part of the record")
    check_artifacts(folder, [name for name in listed if name.endswith(".ptz")])
    return f"{len(listed)}, with the sha256 that submission.json lists"


def check_artifacts(folder: Folder, names: list[str]) -> None:
    """Small artifacts are there, those of two seeds since rules version 3, as large as the results say."""
    for run in folder.runs[:2 if folder.rules.digests else 1]:
        name = artifact_name(run, names)
        packed = run.result["config"]["score_artifact"] == "1"
        require(name or not packed or run.result["bytes_model"] >= ARTIFACT_LIMIT,
                f"the artifact of {run.file} is not there")
        if name:
            names = [other for other in names if other != name]
            same(name, "bytes", len(folder.read(name)), run.json, run.result["bytes_model"])
            if run is folder.runs[0]:
                same("submission.json", "artifact_sha256", folder.submission["artifact_sha256"], name,
                     sha256(folder.read(name)))
    require(not names, f"{', '.join(names)}: no artifact of the first two runs")


def artifact_name(run: Run, names: list[str]) -> str | None:
    """That of a run's artifact among names, or None: train_seed5.log has final_model_seed5.int8.ptz."""
    stem = run.path.stem.replace("train", "final_model")
    return next((name for name in names if name.partition(".")[0] == stem), None)


def check_readme(folder: Folder, options: argparse.Namespace) -> str:
    """README.md is made from the other files, to the byte."""
    marked = folder.read("README.md").startswith(b"\xef\xbb\xbf")
    require(not marked, "README.md begins with a byte order mark")
    top, start, rest = folder.readme.partition(NOTES[0])
    _, stop, end = rest.partition(NOTES[1])
    require(start and stop, f"README.md has no block between {NOTES[0]} and {NOTES[1]}")
    want_top, want_end = render(folder)
    found = first_difference(f"{top}{end}", f"{want_top}\n\n{want_end}")
    require(not found, "README.md, notes apart (line, as it is, as submission.json and the logs make it): "
            f"{found}")
    return "is what submission.json and the logs make, notes apart"


def check_readable(folder: Folder, options: argparse.Namespace) -> str:
    """A script that a person can read: not packed, and within the lines and columns of its rules version."""
    text = folder.source()
    lines = text.splitlines()
    longest = max((len(line) for line in lines), default=0)
    size = f"{len(lines)} lines, the longest of {longest} columns"
    require(longest < 2000, f"train_gpt.py is packed: {size}")
    packed = source.packed_line(text)
    require(not packed, f"train_gpt.py is packed: line {packed} runs decoded text as code")
    rules = folder.rules
    require(not rules.max_lines or len(lines) <= rules.max_lines,
            f"train_gpt.py: {size}; at most {rules.max_lines} lines are allowed")
    require(longest <= rules.max_columns,
            f"train_gpt.py: {size}; at most {rules.max_columns} columns are allowed")
    return size


def check_before(folder: Folder, options: argparse.Namespace) -> str:
    """The record before is known and told as it is; the difference too; the same machine and torch build."""
    before = folder.submission["before"]
    others = records_of(folder.submission["track"])
    require(folder.track.rank != "time" or folder.baseline, "time is claimed without logs of a baseline")
    older = {name: other for name, other in others.items() if other.finished() < folder.finished()}
    best = best_before(older, folder.hardware())
    name = before["name"] if before else None
    runs = [*folder.runs, *folder.baseline]
    if name in others:
        runs += others[name].runs
    apart = "; ".join(differences(runs, folder.track.metric))
    require(not apart, f"the runs, the baseline and the record before are not scored alike: {apart}")
    require((name or "none") == best, f"submission.json: the record before is {name!r}, "
            f"but the best in this repository by then is {best!r}")
    if not before:
        return "none, it is the first of its track"
    for key, value in summary_of(name, others[name]).items():
        same("submission.json", f"before: {key}", before[key], name, value)
    text = inputs.read_text(folder.path / "changes.diff")
    told = folder.submission["code_change"]
    same("submission.json", "code_change", told, "changes.diff", change_text(text))
    check_same_machine(folder, before)
    if folder.baseline:
        check_baseline(folder, before)
    try:
        compared = scripts.of_one_kind(scripts.source_of(others[name]), scripts.source_of(folder))
    except Refused as why:
        raise LeftOut(f"changes.diff: {why}") from None
    same("changes.diff", "text", text, "the two scripts", code_diff(*compared))
    return f"{name}, on the same machine and torch build"


def check_same_machine(folder: Folder, before: dict[str, Any]) -> None:
    """Hardware and torch build are those of the baseline logs or, without any, of the record before."""
    for run in folder.runs:
        for key in ("torch", "hardware"):
            value = run.facts.get(key)
            for base in folder.baseline:
                same(base.file, key, base.facts.get(key), run.file, value)
            if not folder.baseline:
                same(run.file, key, value, f"{before['name']}, with no baseline logs,", before[key])


def check_baseline(folder: Folder, before: dict[str, Any]) -> None:
    """The baseline logs are three finished runs of the record before, and the new ones are better."""
    logs = folder.baseline
    track = folder.track
    require(len(logs) > 2, f"{len(logs)} baseline logs, the rules ask for 3")
    scores = {tuple(base.finals) for base in logs}
    require(len(scores) == len(logs), "two baseline logs hold the same run")
    for base in logs:
        require(base.finished, f"{base.file} was cut off")
        config = shared_config(base.config)
        wanted = before["config"]
        for key in sorted({*config, *wanted}):
            same(base.file, f"config {key}", config.get(key), before["name"], wanted.get(key))
        digest = sha256((base.source or "").encode())
        same(base.file, "sha256 of its source", digest, before["name"], before["code_sha256"])
    if track.rank != "time":
        values = [base.value(track.metric) for base in logs]
        test, _ = welch_test(values, folder.values(track.metric), track.metric)
        require(test and test.p < track.p,
                f"against the baseline logs: {test_line(test)}, the rule asks for p < {track.p}")


def check_artifact_score(folder: Folder, options: argparse.Namespace) -> str:
    """val_loss of the first artifact at hand, added up here from log_probs alone."""
    if options.no_exec:
        raise LeftOut
    found = artifacts_of(folder, options)
    if not found:
        raise LeftOut("no artifact is here; --artifact PATH gives one")
    owner, artifact = found[0]
    result = owner.result
    files = val_files(result)
    if not files:
        raise LeftOut(f"data/datasets/{result['data']['name']} is not here")
    row = int(result["config"]["train_seq_len"])
    plain = result["eval"]["eval_stride"] == result["eval"]["eval_context"] == row
    tokens = np.memmap(files[0], "<u2", "r", 1024)
    if not plain or len(files) > 1 or len(tokens) * int(result["config"]["vocab_size"]) >= 1 << 30:
        raise LeftOut("too large, or not one row after the other")
    nats = leak_probe.score(folder.path / "train_gpt.py", artifact, {}, tokens, options.seconds)
    want = scored_part(result)["val_loss"]
    require(abs(nats - want) < tolerance_of(result), f"{artifact.name}: val_loss added up here from "
            f"log_probs is {nats:.8f}, in {owner.json} {want:.8f}")
    return f"val_loss {nats:.8f} added up here from log_probs, {artifact.name}"


def check_rerun(folder: Folder, options: argparse.Namespace) -> str | None:
    """--rerun-eval: the score of each artifact at hand by the folder's script."""
    if not options.rerun_eval:
        return None
    if options.no_exec:
        raise LeftOut
    found = artifacts_of(folder, options)
    require(found, "the artifact is not in the folder: give it, or final_model.pt, with --artifact PATH")
    return "; ".join(rerun_one(folder, artifact, owner, options) for owner, artifact in found)


def tolerance_of(result: dict[str, Any]) -> float:
    """Nats by which a score may differ: CPUs score in fp32, GPUs in bf16."""
    return 2e-5 if "threads" in result["hardware"] else 2e-3


def rerun_one(folder: Folder, artifact: Path, owner: Run, options: argparse.Namespace) -> str:
    """The score of one artifact by the folder's script, against that of its run."""
    result = owner.result
    files = val_files(result)
    want = scored_part(result)
    require(files, f"data/datasets/{result['data']['name']} is not here, so nothing can be evaluated")
    again = rerun(folder, artifact, result, options)
    for key in ("val_loss", "val_bpb"):
        value = want[key]
        close = again[key] == value or abs(again[key] - value) < tolerance_of(result)
        require(close, f"{artifact.name}: {key} is {again[key]} evaluated again, in {owner.json} {value}")
    return f"val_loss {again['val_loss']:.8f}, in {owner.json} {want['val_loss']:.8f}"


def rerun(folder: Folder, artifact: Path, result: dict[str, Any],
          options: argparse.Namespace) -> dict[str, Any]:
    """result.json of the folder's train_gpt.py when it evaluates the artifact in an empty folder."""
    with tempfile.TemporaryDirectory() as scratch:
        os.symlink(ROOT / "data", Path(scratch, "data"))
        env = leak_probe.clean_environment() | environment_of(result)
        env |= {"EVAL_FROM": str(artifact.resolve()), "RUN_ID": "rerun", "SAMPLE_TOKENS": "0"}
        command = [sys.executable, str(folder.path.resolve() / "train_gpt.py")]
        try:
            done = subprocess.run(command, cwd=scratch, env=env, capture_output=True, text=True,
                                  errors="replace", timeout=options.seconds)
        except subprocess.TimeoutExpired:
            raise Broken(f"train_gpt.py: no evaluation within {options.seconds:.0f} s") from None
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        require(done.returncode == 0, f"train_gpt.py could not evaluate the artifact: {last[:200]}")
        return read_json(Path(scratch, "logs", "rerun", "result.json"))


# In the order in which `record check` asks them
CHECKS = [
    Rule("finished", check_finished),
    Rule("score", check_score),
    Rule("time", check_time),
    Rule("time cap", check_time_cap),
    Rule("bytes", check_bytes),
    Rule("evaluation time", check_eval_time),
    Rule("data", check_data),
    Rule("evaluation", check_evaluation),
    Rule("compile flags", check_flags),
    Rule("hardware", check_hardware),
    Rule("leak probe", check_leaks),
    Rule("runs", check_runs),
    Rule("distinct runs", check_distinct),
    Rule("one script", check_source),
    Rule("one configuration", check_config),
    Rule("numbers of the results", check_results),
    Rule("numbers of the submission", check_submission),
    Rule("files", check_files),
    Rule("README", check_readme),
    Rule("readable", check_readable),
    Rule("record before", check_before),
    Rule("score of the artifact", check_artifact_score),
    Rule("rerun of the evaluation", check_rerun),
]
