"""What `record check` asks of a record folder: one function a rule.

Each takes (folder, options), raises Broken where the rule fails, and may return numbers worth a line.
"""
import argparse
import itertools
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
from records.judge.logs import Refused, Run
from records.judge.significance import describe, test_line
from records.judge.scores import differences
from records.verify import leak_probe, scripts, source
from records.verify.folders import (
    NOTES, ROOT, Folder, LeftOut, best_before, change_text, code_diff, computed, read_json, records_of,
    render, sha256, shared_config, summary_of, track_of)

# Files that a record folder may list; in rules version 1 also those that train_gpt.py loaded from beside it
MEMBERS = re.compile(r"(?:train|baseline(?=_))(?:_seed\d+)?\.log|result(?:_seed\d+)?\.json|train_gpt\.py"
                     r"|loss\.png|changes\.diff|final_model(?:_seed\d+)?\.(?:int8|lzma|brot)\.ptz")
ARTIFACT_LIMIT = 2_000_000      # bytes; a larger one stays out of the folder, its sha256 does not
# What reading damaged files may raise
DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError)
# Constants of a run that are not repeated when its model is probed or scored again
OF_ONE_RUN = ("run_id", "resume", "eval_from", "sample", "dry_run", "device", "dtype")
LOOK_ONLY = argparse.Namespace(no_exec=True, rerun_eval=False, artifact=(), replay=0, seconds=60)


class Broken(Refused):
    """A rule fails; the sentence names the file and both values."""


class Rule(NamedTuple):
    name: str
    function: Callable[[Folder, argparse.Namespace], str | None]
    runs_code: bool = False     # the folder's own: left out by --no-exec


def require(good: Any, sentence: str) -> None:
    """Raises Broken with the sentence unless good."""
    if not good:
        raise Broken(sentence)


def same(where: str, name: str, value: Any, other: str, expected: Any) -> None:
    """`value`, found in `where`, must equal `expected`, found in `other`."""
    require(value == expected, f"{where}: {name} is {value!r}, in {other} {expected!r}")


def same_values(where: str, name: str, values: dict[str, Any], other: str, expected: dict[str, Any]) -> None:
    """The same for each key of two objects; one that is not there is None."""
    for key in sorted({*values, *expected}):
        same(where, f"{name}{key}", values.get(key), other, expected.get(key))


def first_difference(a: str, b: str) -> tuple[int, str, str] | None:
    """(line number, line of a, line of b) where two texts first differ, or None."""
    lines = itertools.zip_longest(a.split("\n"), b.split("\n"), fillvalue="")
    return next(((number, *pair) for number, pair in enumerate(lines, 1) if pair[0] != pair[1]), None)


# ------------------------------------------------------------ public
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


def check_time(folder: Folder, options: argparse.Namespace) -> str:
    """Faster than the record before, where time is what is ranked."""
    if folder.track.rank != "time":
        raise LeftOut
    mean = describe(folder.values("time")).mean
    before = folder.submission["before"]
    if folder.baseline:
        times = [run.time for run in folder.baseline]
    elif before:
        times = before["times"]
    else:
        times = [folder.track.start]
    other = describe(times).mean
    require(mean < other, f"the logs take {mean:.4f} s, the record before {other:.4f} s")
    return f"{mean:.4f} s, the record before {other:.4f} s: ratio {mean / other:.4f}"


def check_caps(folder: Folder, options: argparse.Namespace) -> None:
    """Seconds, bytes and hardware within what the track allows."""
    track = folder.track
    for run in folder.runs:
        result = run.result
        hardware = run.facts["hardware"]
        size = result["bytes_model"] + len(folder.script)
        # to read training data for calibrating the rounding is training
        seconds = (result["train_time_ms"] + result.get("calibration_ms", 0)) / 1e3
        parts = ("setup_ms", "compile_ms", "train_time_ms")
        rest = (result["process_ms"] - sum(result[part] for part in parts)) / 1e3
        require(not track.eval_cap or not result["resumed"],
                f"{run.json}: a run that was resumed does not tell its seconds besides training")
        for what, value, cap in (
                ("bytes of model and code", size, track.byte_cap),
                ("s of training and calibration", seconds, track.time_cap),
                ("s besides set-up and training", rest, track.eval_cap)):
            require(not cap or value <= cap, f"{run.json}: {value} {what}, the cap is {cap}")
        require(hardware.startswith(track.hardware), f"{run.file}: {hardware}, the rules: {track.hardware}")


def check_data(folder: Folder, options: argparse.Namespace) -> None:
    """The track's dataset and split, by the log as by the result."""
    track = folder.track
    for run in folder.runs:
        data = run.result["data"]
        told = {key: str(data["name" if key == "data" else key])
                for key in ("data", "fingerprint", "val_bytes", "val_tokens", "train_tokens")}
        same_values(run.json, "", told, run.file, {key: run.facts.get(key) for key in told})
        of_first = data["name"] == track.data.partition(" or ")[0]      # whose tokens the rules count
        wanted = {"data": track.data, "fingerprint": track.fingerprint, "val_bytes": track.val[1],
                  "val_tokens": track.val[0] if of_first or not track.any_tokenizer else None}
        for key, want in wanted.items():
            require(not want or told[key] in str(want).split(" or "),
                    f"{run.file}: {key} is {told[key]!r}, in the rules {str(want)!r}")
        for file, digest in track.sha256.items():
            same(run.json, f"sha256 {file}", data["sha256"].get(file), "the rules", digest)


def check_evaluation(folder: Folder, options: argparse.Namespace) -> None:
    """The track's settings, the whole split, and bits per byte that follow from the loss."""
    for run in folder.runs:
        told = {key: str(value) for key, value in run.result["eval"].items()}
        same_values(run.json, "", told, run.file, run.eval)
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
            require(abs(bits - run.result["val_bpb"]) < 1e-6, f"{run.json}: val_bpb is "
                    f"{run.result['val_bpb']!r}, but loss, tokens and bytes make {bits!r}")


def check_leaks(folder: Folder, options: argparse.Namespace) -> str:
    """The model looks at no token before its turn."""
    result = folder.runs[0].result
    artifact = None
    for owner, artifact in artifacts_of(folder, options)[:1]:
        result = owner.result
    env = environment_of(result) | {"DEVICE": "cpu"}
    return leak_probe.judge(folder.path / "train_gpt.py", artifact, env, val_files(result), options.seconds,
                            result["eval"]["eval_context"])


def environment_of(result: dict[str, Any]) -> dict[str, str]:
    """The constants of a run as environment variables, but for those of that one run and its machine."""
    return {name.upper(): value for name, value in result["config"].items() if name not in OF_ONE_RUN}


def artifacts_of(folder: Folder, options: argparse.Namespace) -> list[tuple[Run, Path]]:
    """[(Run, path)] of the artifacts at hand, or of weights where none was packed: those of the folder by
    their names, those of --artifact by the sha256 of a log or, before rules version 3, of submission.json."""
    if not options.artifact:
        named = [(run, artifact_beside(run)) for run in folder.runs]
        return [(run, path) for run, path in named if path]
    found = []
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
def check_runs(folder: Folder, options: argparse.Namespace) -> None:
    """As many as the rules ask for."""
    least = folder.track.min_runs
    require(len(folder.runs) >= least, f"{len(folder.runs)} runs, the rules ask for {least}")


def check_source(folder: Folder, options: argparse.Namespace) -> None:
    """Each log begins with train_gpt.py or leaves it out."""
    script = folder.source()
    for run in folder.runs:
        text = run.source or ""
        require(text.strip() == script.strip(), f"{run.file}: its source ({len(text.encode())} bytes) is not "
                f"train_gpt.py ({len(script.encode())} bytes)")
        same(run.json, "code_sha256", run.result["code_sha256"], "train_gpt.py", sha256(folder.script))
        same(run.json, "bytes_code", run.result["bytes_code"], "train_gpt.py", len(folder.script))
        # files that the run loaded from beside its script
        for file, digest in run.result.get("companions", {}).items():
            same(file, "sha256", sha256(folder.read(file)), run.json, digest)


def check_config(folder: Folder, options: argparse.Namespace) -> None:
    """The runs differ in nothing but the seed, and logs and results agree on every constant."""
    first = shared_config(folder.runs[0].result["config"])
    for run in folder.runs:
        config = run.result["config"]
        same(run.json, "track", track_of(run.result["preset"]), "submission.json", folder.submission["track"])
        for key in ("preset", "seed", "run_id"):
            same(run.json, key, str(run.result[key]), "its config", config.get(key))
        same_values(run.json, "config ", config, run.file, run.config)
        for key, want in folder.track.config.items():
            same(run.file, f"config {key}", config.get(key), "the rules", want)
        same_values(run.json, "config ", shared_config(config), "that of train.log", first)
        for key, (_, value) in run.result["overrides"].items():
            same(run.json, f"override {key}", value, "its config", config.get(key))
        check_eval_settings(run, config)


def check_eval_settings(run: Run, config: dict[str, str]) -> None:
    """What a score depends on is what the constants make it; 0 stands for the rest of the line."""
    row = config["train_seq_len"]
    wanted = {"eval_tokens": [config["val_tokens"], "full"], "eval_context": [config["eval_context"], row],
              "eval_stride": [config["eval_stride"], config["eval_context"], row]}
    for key, values in wanted.items():
        want = next(value for value in values if value != "0")
        same(run.file, key, run.eval.get(key), "its config", want)


def check_results(folder: Folder, options: argparse.Namespace) -> None:
    """They agree with the logs to the last digit, and sizes add up."""
    for run in folder.runs:
        check_final_scores(run)
        check_summary(run)
        # the last validation line tells the steps, the time and the score of the trained weights
        point = run.curves["val"][-1]
        told = {"steps": run.result["steps"], "train_time_ms": run.result["train_time_ms"],
                "val_loss": round(run.result["trained"]["val_loss"], 4)}
        last = {"steps": run.steps, "train_time_ms": round(point.seconds * 1e3), "val_loss": point.loss}
        same_values(run.json, "", told, f"the last validation of {run.file}", last)
        size = run.result["bytes_model"] + len(folder.script)
        same(run.json, "bytes_total", run.result["bytes_total"], "bytes_model and train_gpt.py", size)


def check_final_scores(run: Run) -> None:
    """The scores of the weights and of the artifact, and which of them counts."""
    result = run.result
    counts = "artifact" if result["config"]["score_artifact"] == "1" else "trained"
    parts = {}
    for tag, loss, bpb in run.finals:
        if tag == "final_model_exact" or tag.endswith("_roundtrip_exact"):
            part = "trained" if tag == "final_model_exact" else "artifact"
            parts[part] = {"val_loss": loss, "val_bpb": bpb}
    require("trained" in parts and counts in parts, f"{run.file} has no exact final score")
    for part, scores in parts.items():
        told = {key: result[part][key] and round(result[part][key], 8) for key in scores}
        same_values(run.json, f"{part} ", told, run.file, scores)
    for key in ("val_loss", "val_bpb"):
        same(run.json, key, result[key], f"its {counts}", result[counts][key])
    if result.get("core") is not None:
        same(run.json, "core", round(result["core"], 6), f"{run.file}, core_metric", run.facts.get("core"))
        centered = [task["centered"] for task in result.get("core_tasks", {}).values()]
        require(centered and abs(sum(centered) / len(centered) - result["core"]) < 1e-9,
                f"{run.json}: core {result['core']} is not the mean of its tasks")


def words_of(value: Any) -> str:
    """A value without what Python puts around the words of an object, as some logs do."""
    return re.sub(r"[{}',]|(?<=:) ", "", str(value))


def check_summary(run: Run) -> None:
    """The table that ends a log, and single lines before it."""
    where = f"the summary of {run.file}"
    for key in ("steps", "tokens", "tok_per_s", "train_time_ms", "step_ms", "bytes_model", "bytes_total",
                "process_ms", "calibration_ms"):
        same(run.json, key, words_of(run.result.get(key)), where, words_of(run.summary.get(key)))
    for key in ("setup_ms", "compile_ms", "bytes_code", "bytes_model", "bytes_total"):
        same(run.json, key, run.result[key], run.file, run.facts.get(key))
    for key in ("world_size", "hardware", "torch", "peak_memory"):
        same(run.json, key, str(run.result[key]), run.file, run.facts.get(key))


def check_submission(folder: Folder, options: argparse.Namespace) -> None:
    """submission.json says what logs and results make, number by number."""
    for key, value in computed(folder).items():
        same("submission.json", key, folder.submission.get(key), "what the logs make", value)


def check_files(folder: Folder, options: argparse.Namespace) -> None:
    """Each file that submission.json lists is there, unaltered, and no other is."""
    listed = folder.submission["files"]
    there = {name: sha256(folder.read(name)) for name in folder.names
             if name not in ("README.md", "submission.json")}
    same_values("submission.json", "sha256 of ", listed, "the folder", there)
    strange = [name for name in listed if not MEMBERS.fullmatch(name) and name not in folder.rules.companions]
    require(not strange, f"{', '.join(strange[:3])}: no part of a record, a script must run alone")
    for name in ("train.log", "result.json", "train_gpt.py", "loss.png"):
        require(name in listed, f"{name} is not part of the record")
    check_artifacts(folder, options)


def check_artifacts(folder: Folder, options: argparse.Namespace) -> None:
    """Small artifacts are there, those of two seeds since rules version 3, and what the logs say."""
    for run in folder.runs[:2 if folder.rules.digests else 1]:
        packed = run.result["config"]["score_artifact"] == "1"
        require(artifact_beside(run) or not packed or run.result["bytes_model"] >= ARTIFACT_LIMIT,
                f"the artifact of {run.file} is not there")
    for owner, path in artifacts_of(folder, options):
        digest = digest_of_model(owner) or folder.submission["artifact_sha256"]     # of older logs
        same(path.name, "sha256", sha256(inputs.read_bytes(path)), owner.file, digest)
        if path.suffix == ".ptz":
            same(path.name, "bytes", path.stat().st_size, owner.json, owner.result["bytes_model"])


def digest_of_model(run: Run) -> str | None:
    """The sha256, by its log, of the artifact or weights that a run is scored by."""
    packed = run.result["config"]["score_artifact"] == "1"
    named = {name.endswith(".ptz"): digest for name, digest in run.digests.items()
             if name.startswith("final_model.")}
    return named.get(packed)


def artifact_beside(run: Run) -> Path | None:
    """A run's artifact in its folder, or None: train_seed5.log has final_model_seed5.int8.ptz."""
    stem = run.path.stem.replace("train", "final_model")
    return next(run.path.parent.glob(f"{stem}.*.ptz"), None)


def check_readme(folder: Folder, options: argparse.Namespace) -> None:
    """README.md is made from the other files, to the byte."""
    top, start, rest = folder.readme.partition(NOTES[0])
    _, stop, end = rest.partition(NOTES[1])
    require(start and stop, f"README.md has no block between {NOTES[0]} and {NOTES[1]}")
    want_top, want_end = render(folder)
    found = first_difference(f"{top}{end}", f"{want_top}\n\n{want_end}")
    require(not found, "README.md, notes apart (line, as it is, as submission.json and the logs make it): "
            f"{found}")


def check_script(folder: Folder, options: argparse.Namespace) -> None:
    """A script that a person can read: not packed, and within the lines and columns of its rules version; in
    the speedrun without extra flags of torch's compiler."""
    text = folder.source()
    lines = text.splitlines()
    longest = max((len(line) for line in lines), default=0)
    packed = source.packed_line(text)
    require(not packed, f"train_gpt.py is packed: line {packed} runs decoded text as code")
    rules = folder.rules
    most = rules.max_lines or "any number of"
    size = f"{len(lines)} lines, the longest of {longest} columns"
    require(longest <= rules.max_columns and (not rules.max_lines or len(lines) <= rules.max_lines),
            f"train_gpt.py: {size}; {most} lines of {rules.max_columns} columns are allowed")
    if folder.track.data == "fineweb10B_gpt2":
        flags = source.compiler_flags(text)
        require(not flags, f"train_gpt.py, {flags and flags[0]}")


def check_before(folder: Folder, options: argparse.Namespace) -> None:
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
        return
    same_values("submission.json", "before: ", before, name, summary_of(name, others[name]))
    text = inputs.read_text(folder.path / "changes.diff")
    told = folder.submission["code_change"]
    same("submission.json", "code_change", told, "changes.diff", change_text(text))
    check_same_machine(folder, before)
    if folder.baseline:
        check_baseline(folder, before)
    diff = code_diff(*scripts.of_one_kind(others[name], folder))
    same("changes.diff", "text", text, "the two scripts", diff)


def check_same_machine(folder: Folder, before: dict[str, Any]) -> None:
    """Hardware and torch build are those of the baseline logs or, without any, of the record before."""
    machines = [(base.file, base.facts) for base in folder.baseline]
    if not machines:
        machines = [(f"{before['name']}, with no baseline logs,", before)]
    for run in folder.runs:
        for where, facts in machines:
            for key in ("torch", "hardware"):
                same(run.file, key, run.facts.get(key), where, facts.get(key))


def check_baseline(folder: Folder, before: dict[str, Any]) -> None:
    """The baseline logs are three runs of the record before."""
    require(len(folder.baseline) > 2, f"{len(folder.baseline)} baseline logs, the rules ask for 3")
    for base in folder.baseline:
        same_values(base.file, "config ", shared_config(base.config), before["name"], before["config"])
        same(base.file, "code_sha256", sha256((base.source or "").encode()), before["name"],
             before["code_sha256"])


def check_artifact_score(folder: Folder, options: argparse.Namespace) -> str:
    """val_loss of the first artifact at hand, added up here from log_probs alone."""
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
    require_score(owner, artifact, "added up here from log_probs", {"val_loss": nats})
    return f"val_loss {nats:.8f} added up here from log_probs, {artifact.name}"


def require_score(owner: Run, artifact: Path, how: str, scores: dict[str, float]) -> None:
    """Scores of an artifact are those of its run: CPUs score in fp32, GPUs in bf16."""
    told = owner.result.get("artifact") or owner.result["trained"]      # weights where none was packed
    tolerance = 2e-5 if "threads" in owner.result["hardware"] else 2e-3
    for key, value in scores.items():
        require(value == told[key] or abs(value - told[key]) < tolerance,
                f"{artifact.name}: {key} is {value} {how}, in {owner.json} {told[key]}")


def check_rerun(folder: Folder, options: argparse.Namespace) -> str:
    """--rerun-eval: the score of each artifact at hand by the folder's script."""
    if not options.rerun_eval:
        raise LeftOut
    found = artifacts_of(folder, options)
    require(found, "the artifact is not in the folder: give it, or final_model.pt, with --artifact PATH")
    said = []
    for owner, artifact in found:
        again = rerun(folder, artifact, owner.result, options)
        scores = {key: again[key] for key in ("val_loss", "val_bpb")}
        require_score(owner, artifact, "evaluated again", scores)
        said.append(f"val_loss {scores['val_loss']:.8f} evaluated again, {artifact.name}")
    return "; ".join(said)


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
    Rule("score", check_score),
    Rule("time", check_time),
    Rule("caps", check_caps),
    Rule("data", check_data),
    Rule("evaluation", check_evaluation),
    Rule("leak probe", check_leaks, runs_code=True),
    Rule("runs", check_runs),
    Rule("one script", check_source),
    Rule("one configuration", check_config),
    Rule("numbers of the results", check_results),
    Rule("numbers of the submission", check_submission),
    Rule("files", check_files),
    Rule("README", check_readme),
    Rule("script", check_script),
    Rule("record before", check_before),
    Rule("score of the artifact", check_artifact_score, runs_code=True),
    Rule("rerun of the evaluation", check_rerun, runs_code=True),
]
