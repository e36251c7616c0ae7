"""`record new`: a record folder from finished run folders."""
import argparse
import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data import inputs
from records.judge.logs import RULER, Refused, Run, demand, demand_no_dead_link, demand_samples, remove_folder
from records.judge.scores import demand_comparable
from records.verify import folders
from records.verify.checks import ARTIFACT_LIMIT, same, same_values
from records.verify.evidence import record_picture
from records.verify.folders import (
    NEWEST, ROOT, RULES, Folder, best_before, change_text, code_diff, computed, is_plain, json_text, open_run,
    read_json, readme_of, records_of, sha256, shared_config, summary_of, track_of)
from records.verify.scripts import git_commit, of_one_kind


def check_alike(opened: list[Run]) -> None:
    """Refuses runs that differ in more than the seed, or in less. The seed is what the log says."""
    first = opened[0].result
    other = f"run {first['run_id']}"
    for run in opened:
        result = run.result
        name = f"run {result['run_id']}"
        same(name, "code_sha256", result["code_sha256"], other, first["code_sha256"])
        same_values(name, "", shared_config(result["config"]), other, shared_config(first["config"]))
        demand(run.seed_in_lines in (-1, result["seed"]),
               f"{name}: its log says seed {run.seed_in_lines}, its result.json {result['seed']}")
    demand_samples(opened)


def excluded_runs(args: argparse.Namespace, opened: list[Run]) -> list[dict[str, Any]]:
    """The finished runs of the same code and constants that are left out, as submission.json lists them.
    Raises Refused where one has no reason."""
    first = opened[0].result
    metric = RULES[NEWEST].tracks[track_of(first["preset"])].metric
    chosen = {run.result["run_id"] for run in opened}
    places = {Path(path).resolve().parent for path in args.runs} | {Path("logs").resolve(), ROOT / "logs"}
    others = {}         # {run_id: result}, beside those that are chosen, and in logs/
    for path in sorted(path for place in places for path in place.glob("*/result.json")):
        with contextlib.suppress(Refused, KeyError, AttributeError):
            result = read_json(path)
            alike = (result["code_sha256"] == first["code_sha256"]
                     and shared_config(result["config"]) == shared_config(first["config"]))
            if result["run_id"] not in chosen and result["steps"] and alike:
                others[result["run_id"]] = result
    reasons = {}
    for pair in args.exclude:
        run_id, _, reason = pair.partition("=")
        reasons[Path(run_id).name] = reason
    for name in others:
        demand(reasons.get(name), f"run {name} has the same code and constants: include it, or give "
               f"--exclude {name}=reason")
    return [{"run_id": name, "seed": other["seed"], "value": other.get(metric), "reason": reasons[name]}
            for name, other in others.items()]


def model_of(run: Run) -> Path:
    """The file that a run is scored by. Raises Refused."""
    packed = run.result["config"]["score_artifact"] == "1"
    found = sorted(run.path.parent.glob("final_model.*.ptz" if packed else "final_model.pt"))
    demand(found, f"run {run.result['run_id']} has no artifact")
    return found[0]


def copy_files(folder: Path, opened: list[Run], baseline: list[Run], models: list[Path]) -> None:
    """Logs, results, the script, and small artifacts of the first two runs: both can be scored again. Logs
    after the first leave out the script that they begin with."""
    script = inputs.read_bytes(opened[0].path.parent / "train_gpt.py") + b"\n"
    for i, run in enumerate(opened):
        end = f"_seed{run.result['seed']}" if i else ""
        log = inputs.read_bytes(run.path)
        if i and log.startswith(script + RULER.encode()):
            log = log.removeprefix(script)
        (folder / f"train{end}.log").write_bytes(log)
        shutil.copyfile(run.path.parent / "result.json", folder / f"result{end}.json")
        if i < len(models) and models[i].suffix == ".ptz" and models[i].stat().st_size < ARTIFACT_LIMIT:
            shutil.copyfile(models[i], folder / models[i].name.replace("final_model", f"final_model{end}"))
    for run in baseline:
        shutil.copyfile(run.path, folder / f"baseline_seed{run.result['seed']}.log")
    shutil.copyfile(opened[0].path.parent / "train_gpt.py", folder / "train_gpt.py")


def new(args: argparse.Namespace, say: Callable) -> str:
    """Makes the record folder of finished runs. Returns its path."""
    demand(args.blurb.strip(), "what does the record change? --blurb 'a sentence' says so on its page")
    # 1. which runs
    opened = sorted(map(open_run, args.runs), key=lambda run: run.result["seed"])
    check_alike(opened)
    first = opened[0].result
    track = track_of(first["preset"])
    demand(track in RULES[NEWEST].tracks, f"preset {first['preset']} has no track")
    excluded = excluded_runs(args, opened)
    for text in (args.name, args.author, args.github_id, args.blurb, args.ai_disclosure, *args.exclude):
        demand(is_plain(text), f"{text[:60]!r}: must be one line without < > | * # [ ] \\ ` or addresses")
    baseline = [open_run(path) for path in args.baseline]
    demand_samples(baseline)
    # 2. which record before
    earlier = records_of(track)
    before = args.before or best_before(earlier, first["hardware"])
    demand(before in ("none", *earlier), f"--before {before} is no record of track {track}")
    runs_before = earlier[before].runs if before != "none" else []
    demand_comparable([*opened, *baseline, *runs_before], RULES[NEWEST].tracks[track].metric)
    # 3. the files
    models = [model_of(run) for run in opened[:2]]
    date = max(run.result["finished"] for run in opened)[:10]
    short_name = re.sub(r"[^A-Za-z0-9]+", "", args.name)
    final = Path(args.into or folders.HOME) / f"track_{track}" / f"{date}_{short_name}"
    demand_no_dead_link(final)
    demand(not final.exists(), f"{final.name} is there already")
    folder = final.with_name(f".{final.name}.tmp")      # whole or not at all
    remove_folder(folder)
    folder.mkdir(parents=True)
    copy_files(folder, opened, baseline, models)
    commit = git_commit(inputs.read_bytes(folder / "train_gpt.py"), first["preset"])
    submission = dict(
        author=args.author, github_id=args.github_id, name=args.name, blurb=args.blurb, date=date,
        track=track, rules_version=NEWEST, ai_disclosure=args.ai_disclosure, git_commit=commit,
        systems_change=args.systems_change,
        artifact_sha256=sha256(inputs.read_bytes(models[0])), before=None, code_change="", excluded=excluded)
    if before != "none":
        submission["before"] = summary_of(before, earlier[before])
    (folder / "submission.json").write_text(json_text(submission), encoding="utf-8")
    made = Folder(folder)
    record_picture(made, earlier, folder / "loss.png")
    if before != "none":
        diff = code_diff(*of_one_kind(earlier[before], made))
        (folder / "changes.diff").write_text(diff, encoding="utf-8")
        submission["code_change"] = change_text(diff)
    listed = [path for path in sorted(folder.iterdir()) if path.name != "submission.json"]
    submission["files"] = {path.name: sha256(inputs.read_bytes(path)) for path in listed}
    # 4. the numbers, from what was copied
    submission |= computed(made)
    (folder / "submission.json").write_text(json_text(submission), encoding="utf-8")
    (folder / "README.md").write_text(readme_of(Folder(folder)), encoding="utf-8")
    folder.rename(final)
    say(f"made {os.path.relpath(final)}; now `record check` it, then `record board`")
    return str(final)
