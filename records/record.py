"""records/record.py: make, check and compare records. Offline; trains nothing unless asked to.

    ./run.sh record new --name NAME RUN…          a record folder from finished run folders
    ./run.sh record check FOLDER                  recompute whatever a record folder claims
    ./run.sh record audit DIR                     the same for a tree of folders, foreign ones too: a table
    ./run.sh record stats PATH…                   n, mean, std, tests of runs, records, logs of other projects
    ./run.sh record compare A B                   is B better? (--run "CMD" "CMD" -n 5 trains both first)
    ./run.sh record sweep NAME=a,b,c -n K         settings against the first of them, interleaved
    ./run.sh record ablate RUN -n K               each changed constant reverted alone, interleaved
    ./run.sh record noise PRESET -n K             the spread, and what n runs can detect
    ./run.sh record plot PATH…                    curves of any logs
    ./run.sh record board                         the leaderboards of records/README.md

Map: 1 what check asks - 2 audit - 3 new - 4 board - 5 main. Beside it: folders.py (the games' rules, folders
on disk, their README), runs.py (logs, statistics), trials.py (what trains or compares), pages.py (claims of
foreign pages), leak_probe.py. Exit 0: done, and nothing fails; 1: a rule fails; 2: refused.
"""
import argparse
import ast
import contextlib
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import leak_probe  # noqa: E402
import pages  # noqa: E402
import trials  # noqa: E402
from folders import (  # noqa: E402
    HOME, KEYS, NEWEST, NOTES, ROOT, RULES, Altered, Folder, best_before, change_text, code_diff, computed,
    config_of, named, open_run, rank_key, read_json, readme_of, records_of, render, sha256, summary_of, table)
from runs import (  # noqa: E402
    DIGITS, FINAL, RULER, STEP, Refused, demand, describe, show, test_line, test_target, test_welch)

ARTIFACT_LIMIT = 2_000_000      # bytes; a larger one stays out of the folder, its sha256 does not
MEMBERS = re.compile(r"(train|train_seed\d+|baseline_seed\d+)\.log|result(_seed\d+)?\.json|train_gpt\.py|"
                     r"(core|dial|golf|kernels)\.py|loss\.png|changes\.diff|final_model\.\w+\.ptz")
DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError)


# ------------------------------------------------------------ 1 what check asks
class Broken(Exception):
    """A rule fails; the sentence names the file and both values."""


class NoEvidence(Exception):
    """A foreign format cannot hold what the rule asks for. A folder of ours must."""


class LeftOut(Exception):
    """--no-exec: the rule would run the folder's code."""


CHECKS = []     # (heading, name, function(folder, options) -> what holds, or None: no rule of this track)


def rule(heading, name):
    def add(function):
        CHECKS.append((heading, name, function))
        return function
    return add


def hold(good, sentence):
    if not good:
        raise Broken(sentence)


def same(where, name, there, other, here):
    """`there`, found in `where`, must equal `here`, found in `other`."""
    hold(there == here, f"{where}: {name} is {there!r}, in {other} {here!r}")


def difference(there, here):
    """(line number, line of there, line of here) of two texts' first difference, or None."""
    lines = itertools.zip_longest(there.split("\n"), here.split("\n"), fillvalue="")
    return None if there == here else next((i, a, b) for i, (a, b) in enumerate(lines, 1) if a != b)


def each(folder):
    """(run, file name of its log, its result, that file's name) of a folder of ours. NoEvidence of others."""
    if not folder.ours:
        raise NoEvidence
    return [(run, run.file, folder.result(run), folder.result_name(run)) for run in folder.runs]


@rule("public", "finished")
def check_finished(folder, options):
    for run in folder.runs:
        hold(run.finished, f"{run.file} was cut off at step {run.steps}")
        hold(not folder.ours or run.finals, f"{run.file} has no final score")
    return f"{len(folder.runs)} logs end with a score"


@rule("public", "score")
def check_score(folder, options):
    """The mean reaches the target, or beats the record before by the margin, at the track's p."""
    track = folder.track
    if folder.ours:
        claim, test = folder.test()
        if folder.first_of_track():
            return claim
    elif track.target is None:
        raise NoEvidence
    else:
        values = [run.value(track.metric) for run in folder.runs]
        claim, test = f"against {track.target}", test_target(values, track.target, track.metric)
    hold(test, f"{claim}: a single run, the test needs more")
    if folder.ours and folder.submission["systems_change"] and track.rank == "time":
        mean = describe(folder.values(track.metric)).mean
        good = mean <= track.target if track.better == "lower" else mean >= track.target
        hold(good, f"{claim}: the mean is {mean}")
        return f"{claim}: mean {mean:.6f}; the test is waived for a pure systems change"
    hold(test.p < track.p, f"{claim}: {test_line(test)}, the rule asks for p < {track.p}")
    return f"{claim}: {test_line(test)}"


@rule("public", "time")
def check_time(folder, options):
    """Faster than the record before, where time is what is ranked."""
    if folder.track.rank != "time":
        return None
    each(folder)
    mean, before = describe(folder.values("time")).mean, folder.submission["before"]
    if folder.baseline:
        other, name = describe([run.time for run in folder.baseline]).mean, "the baseline logs"
    elif before:
        other, name = describe(before["times"]).mean, before["name"]
    else:
        other, name = folder.track.start, folder.track.start_name
    hold(mean < other, f"the logs take {mean:.4f} s, {name} {other:.4f} s")
    return f"{mean:.4f} s, {name} {other:.4f} s: ratio {mean / other:.4f}"


@rule("public", "val_bpb")
def check_comparison(folder, options):
    """CORE is noisy, val_bpb hardly: where CORE decides, this is what two records are compared by."""
    if folder.track.metric != "core":
        return None
    each(folder)
    before, own = folder.submission["before"], folder.values("val_bpb")
    found = test_welch(before["val_bpb"], own, "val_bpb") if before else None
    return f"{describe(own).mean:.6f}" + (f", {before['name']} {describe(before['val_bpb']).mean:.6f}, Welch "
                                          f"{test_line(found and found[0])}" if before else "")


@rule("public", "time cap")
def check_time_cap(folder, options):
    cap = folder.track.time_cap
    if not cap:
        return None
    for run in folder.runs:
        hold(run.time is None or run.time <= cap, f"{run.file}: {run.time} s of training, the cap is {cap} s")
    return f"longest {max(run.time or 0 for run in folder.runs):.4f} s, the cap is {cap} s"


@rule("public", "bytes")
def check_bytes(folder, options):
    cap = folder.track.byte_cap
    if not cap:
        return None
    beside = each(folder)[0][2].get("companions", {}) if folder.ours else {}
    code = len(folder.script) + sum((folder.path / name).stat().st_size for name in beside)
    for run in folder.runs:
        if "bytes_model" not in run.said or not folder.script:
            raise NoEvidence
        total = int(run.said["bytes_model"]) + code
        hold(total <= cap, f"{run.file}: model and code have {total} bytes, the cap is {cap}")
    return f"model and code ({', '.join(['train_gpt.py', *beside])}) within {cap} in each run"


@rule("public", "evaluation time")
def check_eval_time(folder, options):
    cap = folder.track.eval_cap
    if not cap:
        return None
    for _, name, result, _ in each(folder):
        rest = result["process_ms"] - result["setup_ms"] - result["compile_ms"] - result["train_time_ms"]
        hold(rest <= 1e3 * cap, f"{name}: {rest / 1e3:.0f} s besides setup and training, the cap is {cap} s")
    return f"everything besides setup and training takes less than {cap} s"


@rule("public", "data")
def check_data(folder, options):
    track = folder.track
    wanted = {"data": track.data, "fingerprint": track.fingerprint,
              "val_tokens": track.val[0], "val_bytes": track.val[1]}
    for run, name, result, where in each(folder):
        for key, want in wanted.items():
            same(where, key, str(result["data"]["name" if key == "data" else key]), name, run.said.get(key))
            if want:
                same(name, key, run.said.get(key), "the rules", str(want))
        same(where, "train_tokens", str(result["data"]["train_tokens"]), name, run.said.get("train_tokens"))
    return f"{track.data}: the same text and split in every run"


@rule("public", "evaluation")
def check_evaluation(folder, options):
    for run, name, result, where in each(folder):
        for key in sorted({*result["eval"], *run.eval}):
            same(where, key, str(result["eval"].get(key)), name, run.eval.get(key))
        for key, want in folder.track.eval.items():
            want = run.eval.get(want[1:]) if want[0] == "=" else want
            same(name, key, run.eval.get(key), "the rules", want)
        hold("val_loss_partial" not in result, f"{where}: only a part of the split was scored")
        if folder.track.metric == "core":
            most = result["config"]["core_metric_max_per_task"]
            hold(most == "0", f"{where}: CORE took only {most} examples of each task")
        if result["val_bpb"] is not None:
            data = result["data"]
            bits = result["val_loss"] / math.log(2) * (data["val_tokens"] - 1) / data["val_bytes"]
            hold(abs(bits - result["val_bpb"]) < 1e-6, f"{where}: val_bpb is {result['val_bpb']!r}, "
                 f"but loss, tokens and bytes make {bits!r}")
    return " ".join(f"{k}:{v}" for k, v in folder.runs[0].eval.items()) + "; bits per byte add up"


@rule("public", "compile flags")
def check_flags(folder, options):
    """No extra torch._inductor.config or torch.compile flags in the speedrun."""
    if folder.track.data != "fineweb10B_gpt2":
        return None
    try:
        tree = ast.parse(folder.source() or "raise")
    except (SyntaxError, ValueError, RecursionError):
        raise NoEvidence from None
    names = {"compile": "torch"}        # of torch.compile, by whatever name
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            names |= {alias.asname or alias.name: "" for alias in node.names if alias.name == "compile"}
        texts = [getattr(node, key, None) for key in ("id", "attr", "name", "module", "value")]
        for text in (text for text in texts if isinstance(text, str)):
            hold("_inductor" not in text and "TORCHINDUCTOR" not in text,
                 f"train_gpt.py, line {getattr(node, 'lineno', '?')}: {text[:60]!r}")
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        owner, _, name = ast.unparse(node.func).rpartition(".")
        flags = [word.arg or "**" for word in node.keywords if word.arg not in ("dynamic", "fullgraph")]
        hold(not flags or names.get(name) != owner,
             f"train_gpt.py, line {node.lineno}: torch.compile with {', '.join(flags)}")
    return "none"


@rule("public", "hardware")
def check_hardware(folder, options):
    want = folder.track.hardware
    if not want:
        return None
    for run in folder.runs:
        if "hardware" not in run.said:
            raise NoEvidence
        hold(run.said["hardware"].startswith(want), f"{run.file}: {run.said['hardware']}, the rules: {want}")
    return want


@rule("public", "leak probe")
def check_leaks(folder, options):
    """Runs the folder's code, in a process of its own."""
    run, _, result, _ = each(folder)[0]
    if options.no_exec:
        raise LeftOut
    artifact, script = artifact_of(folder, options), folder.path / "train_gpt.py"
    context = result["eval"]["eval_context"]
    env = {name.upper(): value for name, value in result["config"].items()
           if name not in ("run_id", "sample", "eval_from", "dry_run", "device", "dtype")}
    try:
        return leak_probe.judge(script, artifact, env | {"DEVICE": "cpu"}, val_files(result), options.seconds,
                                context, None, named_scores(result), int(result["config"].get("bos_id", 1)))
    except leak_probe.ProbeFailed as error:
        raise Broken(f"train_gpt.py: {error}") from None


def named_scores(result):
    """Of golf.py's protocols those that the run was scored by."""
    names = [key.removeprefix("val_loss_") for key in result if key.startswith("val_loss_")]
    return [name for name in names if not name.startswith("partial")]


def artifact_of(folder, options):
    """The artifact of train.log's run: in the folder, or where --artifact says; None if it is not at hand."""
    here = sorted(folder.path.glob("final_model.*.ptz"))
    path = Path(options.artifact) if options.artifact else here[0] if here else None
    if path:
        want = folder.submission["artifact_sha256"]
        same(path.name, "sha256", sha256(path.read_bytes()), "submission.json", want)
    return path


def val_files(result):
    return sorted((ROOT / "data" / "datasets" / result["data"]["name"]).glob("*_val_*.bin"))


@rule("strict", "runs")
def check_runs(folder, options):
    n, least, excluded = len(folder.runs), folder.track.min_runs, folder.submission.get("excluded", [])
    hold(n >= least, f"{n} runs, the rules ask for {least}")
    for entry in excluded:
        hold(entry["reason"].strip(), f"submission.json: {entry['run_id']} is excluded without a reason")
    return f"{n} runs" + f", {len(excluded)} more excluded with reasons" * folder.ours


@rule("strict", "distinct runs")
def check_distinct(folder, options):
    seeds, scores = {}, {}
    for run in folder.runs:
        exact = [final for final in run.finals if final[0].endswith("exact")]       # to the eighth decimal
        score = tuple(exact or [*run.finals, *run.curves["val"], run.time])
        hold(score not in scores, f"{run.file} is the same run as {scores.get(score)}")
        hold(run.seed not in seeds or run.seed < 0,
             f"{run.file} has seed {run.seed}, as {seeds.get(run.seed)} has")
        seeds[run.seed], scores[score] = run.file, run.file
    for run, name, result, where in each(folder) if folder.ours else ():
        same(where, "seed", result["seed"], name, run.seed)
        hold(not run.rewinds or result["resumed"], f"{name}: steps repeat, but {where} says resumed false")
    if -1 in seeds:
        raise NoEvidence
    return "seeds " + ", ".join(map(str, seeds))


@rule("strict", "one script")
def check_source(folder, options):
    """Each log begins with train_gpt.py; where the folder has none, the logs begin alike."""
    script = folder.source()
    if not script or all(run.source is None for run in folder.runs):
        raise NoEvidence
    for run in folder.runs:
        source = run.source or ""
        if found := difference(source.strip(), script.strip()):
            i, there, here = found
            at = max(0, len(os.path.commonprefix([there, here])) - 30)
            hold(False, f"{run.file}: its source ({len(source.encode())} bytes) differs from train_gpt.py "
                 f"({len(script.encode())} bytes), line {i}: {there[at:at + 60]!r}, not {here[at:at + 60]!r}")
    for _, _, result, where in each(folder) if folder.ours else ():
        for key, value in (("code_sha256", sha256(folder.script)), ("bytes_code", len(folder.script))):
            same(where, key, result[key], "train_gpt.py", value)
        for name, digest in result.get("companions", {}).items():
            hold(name in folder.files, f"{name} is missing, {where} says that the run loaded it")
            same(name, "sha256", sha256((folder.path / name).read_bytes()), where, digest)
    return f"{len(folder.runs)} logs begin with train_gpt.py"


@rule("strict", "one configuration")
def check_config(folder, options):
    first = config_of(each(folder)[0][2])
    for run, name, result, where in each(folder):
        same(where, "preset", result["preset"], "submission.json (track)", folder.submission["track"])
        for key in ("preset", "seed", "run_id"):
            same(where, key, str(result[key]), "its config", result["config"].get(key))
        for key in sorted({*result["config"], *run.config}):
            same(where, f"config {key}", result["config"].get(key), name, run.config.get(key))
        for key in sorted({*first, *config_of(result)}):
            same(where, f"config {key}", config_of(result).get(key), "that of train.log", first.get(key))
        for key, (_, value) in result["overrides"].items():
            same(where, f"override {key}", value, "its config", result["config"].get(key))
    return f"{len(first)} constants, the same but for the seed"


@rule("strict", "numbers of the results")
def check_results(folder, options):
    for run, name, result, where in each(folder):
        exact = {tag: (loss, bpb) for tag, loss, bpb in run.finals}
        codec = "int8_zlib" if float(result["config"].get("artifact_step", 0)) == 0 else "lzma"
        for part, tag in (("trained", "final_model"), ("artifact", f"final_{codec}_roundtrip")):
            for line, digits in ((tag, 4), (tag + "_exact", 8)):
                hold(line in exact, f"{name} has no line {line}")
                for key, there in zip(("val_loss", "val_bpb"), exact[line]):
                    if there is not None:
                        told = round(result[part][key], digits)
                        same(where, f"{part} {key}", told, f"{name}, {line}", there)
        for protocol in named_scores(result):
            line, told = f"final_{protocol}", "; ".join({*run.named.get(protocol, ["nothing"])})
            hold(protocol in run.named and ";" not in told, f"{name}: {line} says {told}")
            want = f"val_loss_{protocol}:{result['val_loss_' + protocol]:.8f}"
            if (bpb := result[f"val_bpb_{protocol}"]) is not None:
                want += f" val_bpb_{protocol}:{bpb:.8f}"
                ratio = bpb / result[f"val_loss_{protocol}"] / (result["val_bpb"] / result["val_loss"])
                hold(abs(ratio - 1) < 1e-6, f"{where}: val_bpb_{protocol} and val_loss_{protocol} disagree")
            same(where, protocol, want, f"{name}, {line}", told)
        (*_, (_, seconds, loss, _)), last = run.curves["val"], f"the last validation of {name}"
        same(where, "trained val_loss", round(result["trained"]["val_loss"], 4), last, loss)
        part = "artifact" if result["config"]["score_artifact"] == "1" else "trained"
        for key in ("val_loss", "val_bpb"):
            same(where, key, result[key], f"its {part}", result[part][key])
        for key in "steps tokens tok_per_s train_time_ms step_ms bytes_model bytes_total process_ms".split():
            same(where, key, str(result[key]), f"the summary of {name}", run.table.get(key))
        for key in "setup_ms compile_ms bytes_code bytes_model bytes_total".split():
            same(where, key, result[key], name, run.said.get(key))
        for key in "world_size hardware torch peak_memory".split():
            same(where, key, str(result[key]), name, run.said.get(key))
        same(where, "steps", result["steps"], last, run.steps)
        same(where, "train_time_ms", result["train_time_ms"], last, round(seconds * 1e3))
        if result["stop_reason"] == "wallclock_cap":
            last = f"stopping_early of {name}"
            same(where, "train_time_ms", result["train_time_ms"], last, run.said.get("stopped_ms"))
        told = f"val_loss:{result['val_loss']:.4f}"
        told += f" val_bpb:{result['val_bpb']:.4f}" if result["val_bpb"] else ""
        same(name, "score", run.table.get("score"), where, told)
        same(where, "bytes_total", result["bytes_total"], "bytes_model and train_gpt.py",
             result["bytes_model"] + len(folder.script))
    return "agree with the logs to the last digit, sizes add up"


@rule("strict", "numbers of the submission")
def check_submission(folder, options):
    if not folder.submission:
        raise NoEvidence
    if not folder.ours:
        return check_foreign_submission(folder)
    numbers = computed(folder)
    for key, value in numbers.items():
        same("submission.json", key, folder.submission.get(key), "what the logs make", value)
    missing = [key for key in KEYS if key not in folder.submission]
    hold(not missing, f"submission.json lacks {', '.join(missing)}")
    text = (folder.path / "submission.json").read_text(encoding="utf-8")
    found = difference(text, json_text(folder.submission))
    hold(not found, f"submission.json (line, as it is, as its numbers are written): {found}")
    return f"{len(numbers)} recomputed"


def check_foreign_submission(folder):
    """A foreign submission.json against the logs: its scores, its sizes."""
    s, problems, code = folder.submission, [], len(folder.script)
    for i, key in ((1, "val_loss"), (2, "val_bpb")):
        values = [final[i] for run in folder.runs for final in run.finals if final[i] is not None]
        if isinstance(s.get(key), (int, float)) and values:
            slack = 0.51 * 10.0 ** -max(4, len(repr(s[key]).partition(".")[2]))
            means = [describe([run.value(key) for run in folder.runs if run.value(key)] or values).mean]
            best = min(values + means, key=lambda value: abs(value - s[key]))
            if abs(best - s[key]) > slack:
                problems.append(f"submission.json: {key} {s[key]} is in no log, the nearest is {best:.8f}")
    values = [run.value("val_bpb") for run in folder.runs if run.value("val_bpb")]
    if len(values) > 1 and s.get("val_bpb") == min(values) < describe(values).mean:
        problems.append(f"submission.json: val_bpb {s['val_bpb']} is the best of {len(values)} runs, "
                        f"their mean is {describe(values).mean:.8f}")
    total, models = s.get("bytes_total"), [int(run.said.get("bytes_model", 0)) for run in folder.runs]
    if isinstance(total, int) and any(models) and code and total - code not in models:
        model = min(filter(None, models), key=lambda model: abs(total - code - model))
        problems.append(f"submission.json: bytes_total {total} is model {model} and {total - model} of code, "
                        f"but train_gpt.py has {code} bytes")
    if isinstance(s.get("bytes_code"), int) and code and s["bytes_code"] != code:
        problems.append(f"submission.json: bytes_code {s['bytes_code']}, train_gpt.py has {code} bytes")
    hold(not problems, "; ".join(problems))
    return "agree with the logs"


@rule("strict", "files")
def check_files(folder, options):
    """Each file that submission.json lists is there, unaltered, and no other is."""
    first, listed = each(folder)[0][2], folder.submission["files"]
    for name, digest in listed.items():
        hold(name in folder.files, f"{name} is missing, submission.json lists it")
        same(name, "sha256", sha256((folder.path / name).read_bytes()), "submission.json", digest)
    extra = [name for name in folder.names if name not in {*listed, "README.md", "submission.json"}]
    hold(not extra, f"{', '.join(extra[:3])}: not listed in submission.json")
    strange = [name for name in listed if not MEMBERS.fullmatch(name)]
    hold(not strange, f"{', '.join(strange[:3])}: no part of a record, a script must run alone")
    for name in ("train.log", "result.json", "train_gpt.py", "loss.png"):
        hold(name in listed, f"{name} is not part of the record")
    artifact = [name for name in listed if name.endswith(".ptz")]
    hold(artifact or first["bytes_model"] >= ARTIFACT_LIMIT, "the artifact of train.log is not there")
    for name in artifact:
        same("submission.json", "artifact_sha256", folder.submission["artifact_sha256"], name, listed[name])
        same(name, "bytes", (folder.path / name).stat().st_size, "result.json", first["bytes_model"])
    return f"{len(listed)}, with the sha256 that submission.json lists"


@rule("strict", "README")
def check_readme(folder, options):
    each(folder)
    top, found, rest = folder.readme.partition(NOTES[0])
    _, closed, end = rest.partition(NOTES[1])
    hold(found and closed, f"README.md has no block between {NOTES[0]} and {NOTES[1]}")
    want_top, want_end = render(folder)
    if found := difference(f"{top}{end}", f"{want_top}\n\n{want_end}"):
        i, there, here = found
        hold(False, f"README.md, line {i} (notes apart): {there!r}, "
             f"submission.json and the logs make {here!r}")
    return "is what submission.json and the logs make, notes apart"


@rule("strict", "readable")
def check_readable(folder, options):
    """A script that a person can read: text, at most 1,500 lines of 110 columns."""
    source = folder.source()
    if not source:
        raise NoEvidence
    lines = source.splitlines()
    size = f"{len(lines)} lines, the longest of {max(map(len, lines), default=0)} columns"
    packed = re.search(r"exec\(.{0,200}(?:decompress|b\d\ddecode|a85decode)", source, re.S)
    hold(not packed and max(map(len, lines), default=0) < 2000, f"train_gpt.py is packed: {size}")
    hold(not folder.ours or len(lines) <= 1500 and max(map(len, lines)) <= 110,
         f"train_gpt.py: {size}; the limits are 1500 and 110")
    return size


@rule("strict", "record before")
def check_before(folder, options):
    """The record before is known and told as it is; the difference too; the same machine and torch build."""
    runs, before, others = each(folder), folder.submission["before"], records_of(folder.submission["track"])
    hold(folder.track.rank != "time" or folder.baseline, "time is claimed without logs of a baseline")
    older = {name: other for name, other in others.items() if other.finished() < folder.finished()}
    best = best_before(older, folder.hardware())
    hold((before["name"] if before else "none") == best, "submission.json: the record before is "
         f"{before['name'] if before else None!r}, but the best in this repository by then is {best!r}")
    if not before:
        return "none, it is the first of its track"
    other = others[before["name"]]
    for key, value in summary_of(before["name"], other).items():
        same("submission.json", f"before: {key}", before[key], before["name"], value)
    diff = code_diff(other.script, folder.script)
    told, text = folder.submission["code_change"], (folder.path / "changes.diff").read_text(encoding="utf-8")
    same("changes.diff", "text", text, "the two scripts", diff)
    same("submission.json", "code_change", told, "changes.diff", change_text(text))
    for run, name, _, _ in runs:
        for key in ("torch", "hardware"):
            for base in folder.baseline:
                same(base.file, key, base.said.get(key), name, run.said.get(key))
            if not folder.baseline:
                same(name, key, run.said.get(key), f"{before['name']}, with no baseline logs,", before[key])
    if folder.baseline:
        hold(len(folder.baseline) > 2, f"{len(folder.baseline)} baseline logs, the rules ask for 3")
        scores = [tuple(base.finals) for base in folder.baseline]
        hold(len({*scores}) == len(scores), "two baseline logs hold the same run")
        for base in folder.baseline:
            hold(base.finished, f"{base.file} was cut off")
            told, was = named(base), before["config"]
            for key in sorted({*told, *was}):
                same(base.file, f"config {key}", told.get(key), before["name"], was.get(key))
            same(base.file, "sha256 of its source", sha256((base.source or "").encode()), before["name"],
                 before["code_sha256"])
        metric, p = folder.track.metric, folder.track.p
        found = test_welch([base.value(metric) for base in folder.baseline], folder.values(metric), metric)
        hold(folder.track.rank == "time" or found and found[0].p < p,
             f"against the baseline logs: {test_line(found and found[0])}, the rule asks for p < {p}")
    return f"{before['name']}, on the same machine and torch build"


@rule("strict", "rerun of the evaluation")
def check_rerun(folder, options):
    """--rerun-eval: the artifact's score by the folder's script and, where small, added up here."""
    if not options.rerun_eval:
        return None
    run, _, result, where = each(folder)[0]
    if options.no_exec:
        raise LeftOut
    artifact, files, want = artifact_of(folder, options), val_files(result), result["artifact"]
    hold(artifact, "the artifact is not in the folder: give it with --artifact PATH")
    hold(files, f"data/datasets/{result['data']['name']} is not here, so nothing can be evaluated")
    slack = 2e-5 if "threads" in result["hardware"] else 2e-3       # CPUs score in fp32, GPUs in bf16
    again = rerun(folder, artifact, result, options)
    told = {key: want[key] for key in ("val_loss", "val_bpb")}
    told |= {f"{key}_{name}": result[f"{key}_{name}"] for key in list(told) for name in named_scores(result)}
    for key, there in told.items():
        gap = 0 if again[key] == there else abs(again[key] - there)
        limit = slack * (5 if key.endswith("_ttt") and slack < 1e-3 else 1)    # steps enlarge rounding
        hold(gap < limit, f"{artifact.name}: {key} is {again[key]} evaluated again, in {where} {there}")
    text, config = f"val_loss {again['val_loss']:.8f}", result["config"]
    tokens = np.memmap(files[0], "<u2", "r", 1024)
    plain = result["eval"]["eval_stride"] == result["eval"]["eval_context"] == int(config["train_seq_len"])
    if plain and len(files) == 1 and len(tokens) * int(config["vocab_size"]) < 1 << 30:
        try:
            nats = leak_probe.score(folder.path / "train_gpt.py", artifact, {}, tokens, options.seconds)
        except leak_probe.ProbeFailed as error:
            raise Broken(f"train_gpt.py: {error}") from None
        hold(abs(nats - want["val_loss"]) < slack, f"{artifact.name}: val_loss added up here from log_probs "
             f"is {nats:.8f}, in {where} {want['val_loss']:.8f}")
        text += f", added up here from log_probs {nats:.8f}"
    else:
        text += " (too large or another protocol than one row after the other: not added up here)"
    return f"{text}, in {where} {want['val_loss']:.8f}"


def rerun(folder, artifact, result, options):
    """result.json of the folder's train_gpt.py when it evaluates the artifact in an empty folder."""
    wanted = "eval_|val_|(?:.*_lr|muon_.*|beta.|adam_.*|normuon_.*|weight_decay|orthogonal.*|grad_clip_norm)$"
    config = {key.upper(): value for key, value in result["config"].items() if re.match(wanted, key)}
    with tempfile.TemporaryDirectory() as scratch:
        os.symlink(ROOT / "data", Path(scratch, "data"))
        env = {key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH") if key in os.environ} | config | {
            "EVAL_FROM": str(artifact.resolve()), "PRESET": result["preset"], "RUN_ID": "rerun",
            "SAMPLE_TOKENS": "0", "DATA_PATH": result["config"]["data_path"]}
        command = [sys.executable, folder.path.resolve() / "train_gpt.py"]
        try:
            done = subprocess.run(command, cwd=scratch, env=env, capture_output=True, text=True,
                                  errors="replace", timeout=options.seconds)
        except subprocess.TimeoutExpired:
            raise Broken(f"train_gpt.py: no evaluation within {options.seconds:.0f} s") from None
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        hold(done.returncode == 0, f"train_gpt.py could not evaluate the artifact: {last[:200]}")
        return read_json(Path(scratch, "logs", "rerun", "result.json"))


def check(folder, options, say):
    """Says one line a rule. Returns the names of the rules that fail."""
    if not folder.ours:
        folder.track = RULES[NEWEST]["golf" if "val_bpb" in folder.submission else "speedrun"]
    elif not options.no_exec:
        say("this runs the folder's own train_gpt.py, a stranger's code, in a process of its own "
            f"(limit {options.seconds:.0f} s); --no-exec leaves that out")
    failed = []
    for heading, rules in itertools.groupby(CHECKS, key=lambda entry: entry[0]):
        say(heading)
        for _, name, function in rules:
            try:
                text, word = function(folder, options), "pass"
            except NoEvidence:
                text, word = "there is no evidence of it", "FAIL" if folder.ours else "n/a"
            except LeftOut:
                text, word = "LEFT OUT by --no-exec", "----"
            except (Broken, Refused) as error:
                text, word = str(error), "FAIL"
            except (OSError, *DAMAGE) as error:
                text, word = f"what is there is damaged: {type(error).__name__} {str(error)[:120]}", "FAIL"
            if text is not None:
                say(f"  {word:4}  {name:26}  {text}")
                failed += [name] * (word == "FAIL")
    return failed


# ------------------------------------------------------------ 2 audit
LOOK_ONLY = argparse.Namespace(no_exec=True, rerun_eval=False, artifact="", seconds=60)


def findings(path):
    """Everything wrong with a record folder that its files show, as sentences."""
    folder, lines = Folder(path), []
    check(folder, LOOK_ONLY, lines.append)
    out = [f"{line[8:34].strip()}: {line[36:]}" for line in lines if line.startswith("  FAIL")]
    if folder.ours:
        return out
    # a foreign folder may hold logs of several scripts and machines, and its track's rules are only guessed
    several = len(pages.groups(folder.runs)) > 1
    skip = ["runs:", "hardware:", *["score:", "distinct runs:"] * several]
    skip += ["one script:"] * (not folder.script)
    out = [line for line in out if not line.startswith(tuple(skip))]
    if several and not folder.script:
        counts = " + ".join(str(len(group)) for group in pages.groups(folder.runs))
        out.append(f"one script: the {len(folder.runs)} logs begin with different ones ({counts})")
    for look in (pages.list_findings, pages.claim_findings, pages.seed_findings):
        out += look(folder.readme, folder.runs)
    missing = ["README.md"] * (not folder.readme)
    missing += ["train_gpt.py"] * ("submission.json" in folder.files and not folder.script)
    return out + [f"{name}: there is none" for name in missing]


def looks_like_log(path):
    """Does a file begin or end as a log of some run does?"""
    with contextlib.suppress(OSError):
        if path.is_file():
            with open(path, "rb") as file:
                start = file.read(1 << 18)
                file.seek(max(0, path.stat().st_size - (1 << 16)))
                text = (start + b"\n" + file.read()).decode("utf-8", "replace")
            return RULER in text or bool(STEP.search(text) or FINAL.search(text))
    return False


def record_folders(root):
    """Folders below root that hold a record: submission.json, or logs that no folder above claims with a
    submission.json or with a README beside logs of its own."""
    found = []
    for here, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
        here, claimed = Path(here), any(other in Path(here).parents for other, claims in found if claims)
        if "submission.json" in names:
            found.append((here, True))
        elif not claimed and any(looks_like_log(here / n) for n in names if n.endswith((".log", ".txt"))):
            found.append((here, any(name.lower() == "readme.md" for name in names)))
    return [path for path, _ in found]


def audit(root, say):
    """One row a folder. Returns how many have findings."""
    folders, bad = record_folders(root), 0
    demand(folders, f"no record folder below {root}")
    for path in folders:
        try:
            found = findings(path)
        except Refused as error:
            found = [str(error)]
        except (OSError, *DAMAGE) as error:
            found = [f"what is there is damaged: {type(error).__name__} {str(error)[:120]}"]
        bad += bool(found)
        name = path.relative_to(root) if path != Path(root) else path.name
        say(f"{name}: {len(found) or 'no'} finding{'s' * (len(found) != 1)}")
        for line in found:
            say(f"    {line}")
    say(f"{len(folders)} folders, {bad} with findings")
    return bad


# ------------------------------------------------------------ 3 new
def json_text(content):
    return json.dumps(content, indent=1) + "\n"


def siblings(paths, chosen, first):
    """{run_id: result} of the finished runs beside those at paths, and in logs/, that are not chosen but have
    the code and constants of the result `first`."""
    found = {}
    for parent in {Path(path).resolve().parent for path in paths} | {Path("logs").resolve(), ROOT / "logs"}:
        for path in sorted(parent.glob("*/result.json")):
            with contextlib.suppress(Refused, KeyError, AttributeError):
                result = read_json(path)
                name, kind = result["run_id"], lambda r: (r["code_sha256"], config_of(r))
                if name not in chosen and result["steps"] and kind(result) == kind(first):
                    found[name] = result
    return found


def git_commit(script):
    """The newest commit whose train_gpt.py is script, or "not committed"."""
    def git(*words, **options):
        done = subprocess.run(["git", *words], capture_output=True, cwd=ROOT, **options)
        return done.stdout.decode().split()

    blob = git("hash-object", "--stdin", input=script)
    for commit in git("log", "--format=%H", "-n", "500", "--", "train_gpt.py"):
        if blob and git("rev-parse", f"{commit}:train_gpt.py") == blob:
            return commit
    return "not committed"


def agree(opened):
    """Refuses runs that differ in more than the seed, or in less."""
    first, one = opened[0][1], opened[0][1]["run_id"]
    for _, result in opened:
        name, here, there = result["run_id"], config_of(result), config_of(first)
        for key in ("code_sha256", "companions"):
            demand(result.get(key) == first.get(key), f"run {name} has other code than {one}")
        for key in sorted({*here, *there}):
            demand(here.get(key) == there.get(key),
                   f"run {name} has {key}={here.get(key)}, {one} has {there.get(key)}")
    repeated = [seed for seed, count in Counter(result["seed"] for _, result in opened).items() if count > 1]
    demand(not repeated, f"seed {repeated[:1]} is used by more than one run")


def new(args, say):
    """Makes the record folder of finished runs. Returns its path."""
    # 1. which runs
    opened = sorted((open_run(path) for path in args.runs), key=lambda pair: pair[1]["seed"])
    agree(opened)
    first, home, preset = opened[0][1], opened[0][0].path.parent, opened[0][1]["preset"]
    demand(preset in RULES[NEWEST], f"preset {preset} has no track")
    others = siblings(args.runs, {result["run_id"] for _, result in opened}, first)
    reasons = {Path(run).name: reason for run, _, reason in (pair.partition("=") for pair in args.exclude)}
    for name in others:
        demand(reasons.get(name), f"run {name} has the same code and constants: include it, or give "
               f"--exclude {name}=reason")
    unknown = [name for name in reasons if name not in others]
    demand(not unknown, f"--exclude {unknown[:1]} is no finished run of the same code and constants")
    baseline = [open_run(path) for path in args.baseline]
    seeds = {result["seed"] for _, result in baseline}
    demand(len(seeds) == len(baseline), "two baseline runs have the same seed")
    # 2. which record before
    earlier = records_of(preset)
    before = args.before or best_before(earlier, first["hardware"])
    demand(before in ("none", *earlier), f"--before {before} is no record of track {preset}")
    # 3. the files
    date = max(result["finished"] for _, result in opened)[:10]
    short = re.sub(r"[^A-Za-z0-9]+", "", args.name)
    folder = Path(args.into or HOME) / f"track_{preset}" / f"{date}_{short}"
    artifact, = sorted(home.glob("final_model.*.ptz"))[:1] or [None]
    demand(artifact, f"run {first['run_id']} has no artifact")
    demand(not folder.exists(), f"{folder.name} is there already")
    final, folder = folder, folder.with_name(f".{folder.name}.tmp")     # whole or not at all
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for i, (run, result) in enumerate(opened):
        end = f"_seed{result['seed']}" if i else ""
        shutil.copyfile(run.path, folder / f"train{end}.log")
        shutil.copyfile(run.path.parent / "result.json", folder / f"result{end}.json")
    for run, result in baseline:
        shutil.copyfile(run.path, folder / f"baseline_seed{result['seed']}.log")
    for name in ("train_gpt.py", *first.get("companions", {})):
        shutil.copyfile(home / name, folder / name)
    if artifact.stat().st_size < ARTIFACT_LIMIT:
        shutil.copyfile(artifact, folder / artifact.name)
    script, metric = (home / "train_gpt.py").read_bytes(), RULES[NEWEST][preset].metric
    submission = dict(
        author=args.author, github_id=args.github_id, name=args.name, blurb=args.blurb, date=date,
        track=preset, rules_version=NEWEST, ai_disclosure=args.ai_disclosure, git_commit=git_commit(script),
        systems_change=args.systems_change, artifact_sha256=sha256(artifact.read_bytes()), before=None,
        code_change="", excluded=[{"run_id": name, "seed": other["seed"], "value": other.get(metric),
                                   "reason": reasons[name]} for name, other in others.items()])
    curves = {args.name: [run for run, _ in opened]}
    if before != "none":
        diff, curves = code_diff(earlier[before].script, script), {before: earlier[before].runs} | curves
        (folder / "changes.diff").write_text(diff, encoding="utf-8")
        submission |= {"before": summary_of(before, earlier[before]), "code_change": change_text(diff)}
    trials.draw(curves, folder / "loss.png", f"{preset}: {args.name}")
    submission["files"] = {path.name: sha256(path.read_bytes()) for path in sorted(folder.iterdir())}
    # 4. the numbers, from what was copied
    for _ in range(2):
        (folder / "submission.json").write_text(json_text(submission), encoding="utf-8")
        submission |= computed(Folder(folder))
    (folder / "README.md").write_text(readme_of(Folder(folder)), encoding="utf-8")
    folder.rename(final)
    say(f"made {os.path.relpath(final)}; now `record check` it, then `record board`")
    return str(final)


# ------------------------------------------------------------ 4 board
def board_table(name, folders):
    """A leaderboard: the best first, then what there was to start from."""
    track, rows = RULES[NEWEST][name], []
    by = "time" if track.rank == "time" else track.metric
    anywhere = not track.hardware       # then only records on the same hardware compare
    for folder in sorted(folders.values(), key=lambda f: (f.hardware() * anywhere, rank_key(f))):
        failed, test = check(folder, LOOK_ONLY, lambda line: None), folder.test()[1]
        s, link = describe(folder.values(by)), f"{folder.path.parent.name}/{folder.path.name}"
        spread = "one run" if s.std is None else f"± {show(by, s.std)}"
        rows.append([
            f"[{folder.path.name}]({link})", f"{show(by, s.mean)} {spread}",
            show("val_bpb", describe(folder.values("val_bpb")).mean), s.n,
            f"{test.p:.4f}" if test else "first", folder.hardware(), folder.submission["author"],
            f"version {folder.submission['rules_version']}: " +
            (f"fails {', '.join(failed)}" if failed else "passes, code not run")])
    if track.start is not None:
        rows.append([track.start_name, show(by, track.start), "", "", "", track.hardware, "", "the start"])
    unit = " (s)" if by == "time" else ""
    head = ["record", f"{by}{unit}, mean and std", "val_bpb", "n", "p", "hardware", "by", "rules"]
    return table(head, rows)


def rules_table():
    """The newest rules, a row a track, for people."""
    rows = []
    for name, track in RULES[NEWEST].items():
        goal = f"mean {track.target}" if track.target is not None else "the record before"
        goal += f" by {track.margin} {track.unit}" * bool(track.margin)
        goal += " in less time" * (track.rank == "time")
        caps = f"{track.byte_cap:,} bytes " * bool(track.byte_cap)
        caps += f"{track.time_cap} s" * bool(track.time_cap)
        rows.append([name, f"{track.better} {track.metric}", goal, f"< {track.p}", track.min_runs, caps,
                     track.data, " ".join(f"{k}:{v.lstrip('=')}" for k, v in track.eval.items()),
                     track.hardware or "any, compared within its kind"])
    head = "track, better is, to reach or beat, p, runs at least, caps, data, evaluation, hardware"
    return table(head.split(", "), rows)


def board(say):
    """Rewrites what stands between the markers of records/README.md."""
    path = HOME / "README.md"
    text = path.read_text(encoding="utf-8")
    parts = {f"rules version {NEWEST}": rules_table()}
    parts |= {f"board {name}": board_table(name, records_of(name)) for name in RULES[NEWEST]}
    for name, content in parts.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        demand(text.count(start) == text.count(end) == 1, f"records/README.md has no block {start}")
        top, _, rest = text.partition(start)
        text = f"{top}{start}\n{content}\n{end}{rest.partition(end)[2]}"
    path.write_text(text, encoding="utf-8")
    say(f"wrote {os.path.relpath(path)}")


# ------------------------------------------------------------ 5 main
def parse(argv):
    parser = argparse.ArgumentParser(prog="record", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)

    def add(name, *options):
        sub = commands.add_parser(name)
        for flags, settings in options:
            sub.add_argument(*flags.split(), **settings)

    text, on, several = {"default": ""}, {"action": "store_true"}, {"action": "append", "default": []}
    paths, as_json, metric = ("paths", {"nargs": "+"}), ("--json", on), ("--metric", {"choices": DIGITS})
    count, seed = ("-n", {"type": int, "default": 5}), ("--seed", {"type": int, "default": 1337})
    add("new", ("runs", {"nargs": "+"}), ("--name", {"required": True}), ("--author", text),
        ("--github-id", text), ("--blurb", text), ("--ai-disclosure", text), ("--exclude", several),
        ("--before", text), ("--baseline", several), ("--into", text), ("--systems-change", on))
    add("check", ("folder", {}), ("--rerun-eval", on), ("--no-exec", on), ("--artifact", text),
        ("--seconds", {"type": float, "default": 600}))     # golf at its own size: 195 on 2 cores
    add("audit", ("folder", {}))
    add("stats", paths, as_json, metric, ("--target", {"type": float}), ("--baseline", text))
    add("compare", paths, ("--run", on), count, metric, as_json, seed,
        ("--across", {"metavar": "NAME=a,b", "help": "with --run: at each value, say DEPTH=4,6,8"}),
        ("--out", {"default": "logs/compare.png"}))
    add("sweep", ("settings", {"nargs": "+"}), count, as_json, ("--command", text), seed)
    add("ablate", ("run", {}), count, ("--before", text), as_json, seed)
    add("noise", ("preset", {}), count, metric, as_json, seed)
    add("plot", paths, ("--out", {"default": "loss.png"}),
        ("--by", {"choices": ["seconds", "tokens"], "default": "seconds"}))
    add("board")
    return parser.parse_args(argv)


def main(argv):
    """Exit code: 0 done and nothing fails, 1 a rule fails, 2 refused."""
    args = parse(argv)
    quiet = getattr(args, "json", False)

    def say(*lines):
        for line in lines:
            print(line, file=sys.stderr if quiet else sys.stdout, flush=True)

    try:
        if args.what == "check":
            try:
                failed = check(Folder(args.folder), args, say)
            except Altered as error:
                say(f"  FAIL  {error}")
                failed = ["rules"]
            say(f"{len(failed)} rules fail: {', '.join(failed)}" if failed else "nothing fails")
            return 1 if failed else 0
        if args.what == "audit":
            return 1 if audit(Path(args.folder), say) else 0
        if args.what == "board":
            board(say)
            return 0
        command = new if args.what == "new" else getattr(trials, args.what)
        out = command(args, say)
        if quiet:
            print(json.dumps(out, indent=1))
        return 0
    except Refused as error:
        why = str(error)
    except OSError as error:
        why = f"{error.filename or 'a file'}: {error.strerror or error}"
    except DAMAGE as error:
        why = f"what is there is damaged: {type(error).__name__} {str(error)[:150]}"
    except KeyboardInterrupt:
        why = "interrupted"
    print(f"record: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
