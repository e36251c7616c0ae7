"""records/record.py: make, check and compare records. Offline; trains nothing unless asked to.

    ./run.sh record new --name NAME --blurb TEXT RUN…   a record folder from finished run folders
    ./run.sh record check FOLDER                  recompute whatever a record folder claims
    ./run.sh record audit DIR                     the same for a tree of folders, foreign ones too: a table
    ./run.sh record stats PATH…                   n, mean, std, tests of runs, records, logs of other projects
    ./run.sh record compare A B                   is B better? (--run "CMD" "CMD" -n 5 trains both first)
    ./run.sh record sweep NAME=a,b,c -n K         settings against the first of them, interleaved
    ./run.sh record ablate RUN -n K               each changed constant reverted alone, interleaved
    ./run.sh record noise PRESET -n K             the spread, and what n runs can detect
    ./run.sh record try "what it is"              the working tree against HEAD on a proxy, and a ledger
    ./run.sh record rank CHANGE…                  changes at several widths and on several texts
    ./run.sh record calibrate                     which public gains the speedrun's proxies show
    ./run.sh record plot PATH…                    curves of any logs: --by seconds, tokens or step
    ./run.sh record board                         the leaderboards of records/README.md
    ./run.sh board --html [PATH…]                 a page of all runs and records, or of those at PATH…
    ./run.sh record export RUN                    the weights as safetensors, and model.py, which reads them

Map: 1 new - 2 board - 3 main. Beside it: checks.py (what check asks), evidence.py (what it asks of logs by
themselves), replay.py (check --replay), folders.py (the games' rules, folders on disk, their README), runs.py
(logs, statistics), trials.py (what trains or compares), tries.py (changes on proxies), sequential.py (their
statistics), calibration.py (how far to believe them), audit.py (trees of other projects), pages.py (claims of
their pages), source.py (what a script shows without running it), scripts.py (scripts by commit and preset),
leak_probe.py; board_page.py (the HTML page), export.py (models for other programs).
Exit 0: done, and nothing fails; 1: a rule fails; 2: refused.
"""
import argparse
import contextlib
import json
import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

try:
    import numpy as np
except ImportError:
    sys.exit("record: the package numpy is missing: ./run.sh setup")

sys.path.insert(0, str(Path(__file__).resolve().parent))
import replay  # noqa: E402, F401  its rule, and those of evidence.py
import trials  # noqa: E402
import tries  # noqa: E402
from audit import audit  # noqa: E402
from board_page import write_page  # noqa: E402
from calibration import TEXTS, WIDTHS, calibrate  # noqa: E402
from checks import (  # noqa: E402
    ARTIFACT_LIMIT, DAMAGE, LOOK_ONLY, check, first_difference, json_text, require, rule)
from export import export  # noqa: E402
from folders import (  # noqa: E402
    HOME, NEWEST, ROOT, RULES, Altered, Folder, best_before, change_text, code_diff, computed, is_plain,
    open_run, rank_key, read_json, readme_of, records_of, sha256, shared_config, summary_of, table, track_of)
from runs import (  # noqa: E402
    DIGITS, Refused, batch_means, demand, demand_samples, describe, inputs, show, show_p)
from scripts import Source, git_commit, of_one_kind, source_of  # noqa: E402


# ------------------------------------------------------------ 1 new
def siblings(paths, chosen, first):
    """{run_id: result} of the finished runs beside those at paths, and in logs/, that are not chosen but have
    the code and constants of the result `first`."""
    found = {}
    for parent in {Path(path).resolve().parent for path in paths} | {Path("logs").resolve(), ROOT / "logs"}:
        for path in sorted(parent.glob("*/result.json")):
            with contextlib.suppress(Refused, KeyError, AttributeError):
                result = read_json(path)
                alike = (result["code_sha256"] == first["code_sha256"]
                         and shared_config(result["config"]) == shared_config(first["config"]))
                if result["run_id"] not in chosen and result["steps"] and alike:
                    found[result["run_id"]] = result
    return found


def check_alike(opened):
    """Refuses runs that differ in more than the seed, or in less, and those with files beside the script. The
    seed is what the log says."""
    first = opened[0][1]
    expected = shared_config(first["config"])
    for _, result in opened:
        name, config = result["run_id"], shared_config(result["config"])
        demand(not result.get("companions"), f"run {name} loaded files from beside its script: since rules "
               "version 2 a record holds train_gpt.py alone, so train it with today's")
        demand(result["code_sha256"] == first["code_sha256"],
               f"run {name} has other code than {first['run_id']}")
        for key in sorted({*config, *expected}):
            demand(config.get(key) == expected.get(key),
                   f"run {name} has {key}={config.get(key)}, {first['run_id']} has {expected.get(key)}")
    counts = Counter(result["seed"] for _, result in opened)
    repeated = [seed for seed, count in counts.items() if count > 1]
    demand(not repeated, f"seed {repeated and repeated[0]} is used by more than one run")
    for run, result in opened:
        demand(run.seed_in_lines in (-1, result["seed"]), f"run {result['run_id']}: its log says seed "
               f"{run.seed_in_lines}, its result.json {result['seed']}")
    demand_samples([run for run, _ in opened])


def excluded_runs(args, opened):
    """The runs of the same code and constants that are left out, as submission.json lists them. Raises
    Refused where one has no reason."""
    first = opened[0][1]
    metric = RULES[NEWEST].tracks[track_of(first["preset"])].metric
    others = siblings(args.runs, {result["run_id"] for _, result in opened}, first)
    reasons = {}
    for pair in args.exclude:
        run, _, reason = pair.partition("=")
        reasons[Path(run).name] = reason
    for name in others:
        demand(reasons.get(name), f"run {name} has the same code and constants: include it, or give "
               f"--exclude {name}=reason")
    unknown = [name for name in reasons if name not in others]
    demand(not unknown, f"--exclude {unknown and unknown[0]}: no finished run of the same code and constants")
    return [{"run_id": name, "seed": other["seed"], "value": other.get(metric), "reason": reasons[name]}
            for name, other in others.items()]


def model_of(run, result):
    """The file that a run is scored by. Raises Refused."""
    packed = result["config"]["score_artifact"] == "1"
    found = sorted(run.path.parent.glob("final_model.*.ptz" if packed else "final_model.pt"))
    demand(found, f"run {result['run_id']} has no artifact")
    return found[0]


def copy_files(folder, opened, baseline, models):
    """Logs, results, the script, and small artifacts of the first two runs: both can be scored again."""
    for i, (run, result) in enumerate(opened):
        end = f"_seed{result['seed']}" if i else ""
        shutil.copyfile(run.path, folder / f"train{end}.log")
        shutil.copyfile(run.path.parent / "result.json", folder / f"result{end}.json")
        if i < len(models) and models[i].suffix == ".ptz" and models[i].stat().st_size < ARTIFACT_LIMIT:
            shutil.copyfile(models[i], folder / models[i].name.replace("final_model", f"final_model{end}"))
    for run, result in baseline:
        shutil.copyfile(run.path, folder / f"baseline_seed{result['seed']}.log")
    shutil.copyfile(opened[0][0].path.parent / "train_gpt.py", folder / "train_gpt.py")


def new(args, say):
    """Makes the record folder of finished runs. Returns its path."""
    demand(args.blurb.strip(), "what does the record change? --blurb 'a sentence' says so on its page")
    # 1. which runs
    opened = sorted((open_run(path) for path in args.runs), key=lambda pair: pair[1]["seed"])
    check_alike(opened)
    first = opened[0][1]
    track = track_of(first["preset"])
    demand(track in RULES[NEWEST].tracks, f"preset {first['preset']} has no track")
    excluded = excluded_runs(args, opened)
    for text in (args.name, args.author, args.github_id, args.blurb, args.ai_disclosure, *args.exclude):
        demand(is_plain(text), f"{text[:60]!r}: must be one line without < > | * # [ ] \\ ` or addresses")
    baseline = [open_run(path) for path in args.baseline]
    seeds = {result["seed"] for _, result in baseline}
    demand(len(seeds) == len(baseline), "two baseline runs have the same seed")
    # 2. which record before
    earlier = records_of(track)
    before = args.before or best_before(earlier, first["hardware"])
    demand(before in ("none", *earlier), f"--before {before} is no record of track {track}")
    if before != "none":
        then = earlier[before].result(earlier[before].runs[0])["config"]
        for name, value in first["config"].items():     # those that differ stand in a table
            demand(is_plain(value) or value == then.get(name),
                   f"constant {name}={value[:60]!r} differs from the record before and breaks its page")
    # 3. the files
    models = [model_of(run, result) for run, result in opened[:2]]
    date = max(result["finished"] for _, result in opened)[:10]
    short_name = re.sub(r"[^A-Za-z0-9]+", "", args.name)
    final = Path(args.into or HOME) / f"track_{track}" / f"{date}_{short_name}"
    demand(not final.exists(), f"{final.name} is there already")
    folder = final.with_name(f".{final.name}.tmp")      # whole or not at all
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    copy_files(folder, opened, baseline, models)
    script = inputs.read_bytes(folder / "train_gpt.py")
    commit = git_commit(script, first["preset"])
    submission = dict(
        author=args.author, github_id=args.github_id, name=args.name, blurb=args.blurb, date=date,
        track=track, rules_version=NEWEST, ai_disclosure=args.ai_disclosure, git_commit=commit,
        systems_change=args.systems_change, artifact_sha256=sha256(inputs.read_bytes(models[0])), before=None,
        code_change="", excluded=excluded)
    curves = {args.name: [run for run, _ in opened]}
    if before != "none":
        diff = code_diff(*of_one_kind(source_of(earlier[before]), Source(script, commit, first["preset"])))
        curves = {before: earlier[before].runs} | curves
        (folder / "changes.diff").write_text(diff, encoding="utf-8")
        submission |= {"before": summary_of(before, earlier[before]), "code_change": change_text(diff)}
    trials.draw(curves, folder / "loss.png", f"{first['preset']}: {args.name}")
    submission["files"] = {path.name: sha256(inputs.read_bytes(path)) for path in sorted(folder.iterdir())}
    # 4. the numbers, from what was copied
    for _ in range(2):
        (folder / "submission.json").write_text(json_text(submission), encoding="utf-8")
        submission |= computed(Folder(folder))
    (folder / "README.md").write_text(readme_of(Folder(folder)), encoding="utf-8")
    folder.rename(final)
    say(f"made {os.path.relpath(final)}; now `record check` it, then `record board`")
    return str(final)


# ------------------------------------------------------------ 2 board
# A plain GPT within the limits of a game, as docs/log.md has it ("peers, tuned")
PLAIN = {"tiny": [{"name": "a plain GPT", "metric": "val_bpb", "better": "lower",
                   "value": 1.4221, "about": "4 layers of 128, 3 seeds"}]}
PACE_STEP = 100     # at which a machine's speed is compared with the record's


def verdict_of(folder):
    """The last cell of a record's row."""
    failed = check(folder, LOOK_ONLY, lambda line: None)
    said = f"fails {', '.join(failed)}" if failed else "passes, code not run"
    return f"version {folder.submission['rules_version']}: {said}"


def board_table(name, folders, last_cell=verdict_of):
    """A leaderboard: the best first, then what there was to start from. Where time is ranked, the metric that
    had to be reached has a column; where that is CORE, which is noisy, val_bpb has one, too."""
    track, rows = RULES[NEWEST].tracks[name], []
    by = "time" if track.rank == "time" else track.metric
    others = [] if by == track.metric else [track.metric]
    if track.metric == "core":
        others.append("val_bpb")

    def order(folder):      # where any hardware may play, only records on the same compare
        return "" if track.hardware else folder.hardware(), rank_key(folder)

    for folder in sorted(folders.values(), key=order):
        s, (_, test) = describe(folder.values(by)), folder.test()
        spread = "one run" if s.std is None else f"± {show(by, s.std)}"
        p = "none"      # of a record of one run
        if test:
            p = show_p(test.p)
        elif folder.first_of_track():
            p = "first"
        rows.append([
            f"[{folder.path.name}]({folder.path.parent.name}/{folder.path.name})",
            f"{show(by, s.mean)} {spread}",
            *(show(metric, describe(folder.values(metric)).mean) for metric in others),
            s.n,
            p,
            folder.hardware(),
            folder.submission["author"],
            last_cell(folder)])
    if track.start is not None:
        blank = [""] * len(others)
        rows.append([track.start_name, show(by, track.start), *blank, "", "", track.hardware, "",
                     "the start"])
    column = "time (s)" if by == "time" else by
    head = ["record", f"{column}, mean and std", *others, "n", "p", "hardware", "by", "rules"]
    return table(head, rows)


def rules_table(version):
    """A version of the rules, a row a track, for people."""
    rows = []
    for name, track in RULES[version].tracks.items():
        goal = "the record before" if track.target is None else f"mean {track.target}"
        if track.margin:
            goal += f" by {track.margin} {track.unit}"
        if track.rank == "time":
            goal += " in less time"
        caps = f"{track.byte_cap:,} bytes " if track.byte_cap else ""
        if track.time_cap:
            caps += f"{track.time_cap} s"
        settings = " ".join(f"{key}:{value.lstrip('=')}" for key, value in track.eval.items())
        rows.append([name, f"{track.better} {track.metric}", goal, f"< {track.p}", track.min_runs, caps,
                     track.data, settings, track.hardware or "any, compared within its kind"])
    head = "track, better is, to reach or beat, p, runs at least, caps, data, evaluation, hardware"
    return table(head.split(", "), rows)


def target_of(name, folders):
    """What a run of a track is shown against at its end (tools/watch.py) and in its loss.png. curve_of: of
    which split `curve` has the loss. Where the game is to reach a value in the least time, `seconds` is what
    the record took. pace: the median training seconds of its runs at step PACE_STEP, and their machine."""
    track = RULES[NEWEST].tracks[name]
    mean, about = track.start, f"{track.start_name}, {track.hardware}"
    best, curve, pace = best_before(folders, ""), [], None
    split = "train"
    if best != "none":
        record = folders[best]
        s = describe(record.values("time" if track.rank == "time" else track.metric))
        mean, about = round(s.mean, 4), f"{best.partition('_')[2]}, {s.n} seeds"
        times = [point.seconds for run in record.runs for point in run.curves["train"]
                 if point.step == PACE_STEP]
        if times and track.time_cap:
            machine = record.hardware().removeprefix("1 ranks x ")
            pace = dict(step=PACE_STEP, seconds=round(float(np.median(times)), 1), machine=machine)
        curves = [batch_means(run.curves["train"]) for run in record.runs]
        if all(len(run.curves["part"]) > 3 for run in record.runs):
            split = "part"
            curves = [[(point.seconds, point.loss) for point in run.curves[split]] for run in record.runs]
        grid = np.geomspace(max(points[0][0] for points in curves),
                            min(points[-1][0] for points in curves), 80)
        losses = np.median([np.interp(grid, *zip(*points)) for points in curves], 0)
        curve = np.column_stack([grid, losses]).round(4).tolist()
    other = {"name": "the record", "metric": track.metric, "better": track.better, "value": mean,
             "about": about}
    if track.rank == "time":
        other |= {"value": track.target, "seconds": mean}
    return {"compare": [other] * (mean is not None) + PLAIN.get(name, []), "curve": curve,
            "curve_of": split, "pace": pace}


def page_of(version):
    """The page that has this version of the rules: today's on that of the boards, older ones apart."""
    return HOME / "README.md" if version == NEWEST else HOME / "rules" / f"rules_{version}.md"


def with_part(text, name, content, page):
    """The text of a page with what stands between the markers of a part made anew."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    demand(text.count(start) == text.count(end) == 1, f"records/{page} has no block {start}")
    top, _, rest = text.partition(start)
    _, _, bottom = rest.partition(end)
    return f"{top}{start}\n{content}\n{end}{bottom}"


def board(say):
    """Rewrites what stands between the markers of records/README.md, and targets.json."""
    path = HOME / "README.md"
    text = with_part(inputs.read_text(path), f"rules version {NEWEST}", rules_table(NEWEST), path.name)
    for name in RULES[NEWEST].tracks:
        text = with_part(text, f"board {name}", board_table(name, records_of(name)), path.name)
    path.write_text(text, encoding="utf-8")
    targets = {name: target_of(name, records_of(name)) for name in RULES[NEWEST].tracks}
    (HOME / "targets.json").write_text(json.dumps(targets) + "\n", encoding="utf-8")
    say(f"wrote {os.path.relpath(path)} and targets.json")


@rule("strict", "rules and boards")
def check_boards(folder, options):
    """The tables of records/README.md and of the older rules are what rules and records make; verdicts and a
    record that the board does not list yet apart."""
    name = folder.submission.get("track")
    if not folder.ours or not page_of(NEWEST).exists() or options is LOOK_ONLY:      # with which board() asks
        return None
    text = inputs.read_text(page_of(NEWEST))
    records = {other: found for other, found in records_of(name).items()
               if other != folder.path.name or f"[{other}]" in text}
    parts = [(page_of(version), f"rules version {version}", rules_table(version)) for version in RULES]
    parts.append((page_of(NEWEST), f"board {name}", board_table(name, records, lambda folder: "")))
    for page, part, content in parts:
        told = inputs.read_text(page).partition(f"<!-- {part} -->\n")[2].partition(f"\n<!-- /{part} -->")[0]
        told = re.sub(r"(?m)version \d+: [^|]*(?= \|$)", "", told)
        found = first_difference(told, content)
        where = f"records/{page.relative_to(HOME)}, {part}"
        require(not found, f"{where} (line, as it is, as it is recomputed): {found}")
    return f"the rules and the board of {name} are what rules and records make"


# ------------------------------------------------------------ 3 main
COMMANDS = {"new": new, "stats": trials.stats, "compare": trials.compare, "sweep": trials.sweep,
            "try": tries.try_change, "rank": tries.rank, "calibrate": calibrate,
            "ablate": trials.ablate, "noise": trials.noise, "plot": trials.plot, "export": export}


def parse(argv):
    """The command's name, as `what`, and its options."""
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
    add("check", ("folder", {}), ("--rerun-eval", on), ("--no-exec", on), ("--artifact", several),
        ("--verbose", on), ("--replay", {"type": int, "default": 0, "metavar": "N"}),
        ("--seed", {"type": int, "help": "with --replay: which run, if not train.log's"}),
        ("--seconds", {"type": float, "default": 600}))     # golf at its own size: 195 on 2 cores
    add("audit", ("folder", {}))
    add("stats", paths, as_json, metric, ("--target", {"type": float}), ("--baseline", text))
    add("compare", paths, ("--run", on), count, metric, as_json, seed,
        ("--across", {"metavar": "NAME=a,b", "help": "with --run: at each value, say DEPTH=4,6,8"}),
        ("--out", {"default": "logs/compare.png"}))
    add("sweep", ("settings", {"nargs": "+"}), count, as_json, ("--command", text), seed)
    add("ablate", ("run", {}), count, ("--before", text), as_json, seed)
    add("noise", ("preset", {}), count, metric, as_json, seed)
    place = ("--preset", {"default": "speedrun_plus"}), ("--workers", {"type": int, "default": 0})
    width = {"type": int, "default": 0, "metavar": "WIDTH"}
    add("try", ("words", {"nargs": "*"}), *place, ("--proxy", width),
        ("--text", {"default": "data/datasets/embedded"}), ("--ledger", {"default": tries.LEDGER}), as_json,
        ("--pairs", {"type": int, "default": tries.MOST_PAIRS}), ("--same", on), ("--outside", on))
    add("rank", ("changes", {"nargs": "*"}), *place, ("--name", {"default": "changes"}),
        ("--widths", {"type": int, "nargs": "+", "default": [32, 48]}), as_json, seed,
        ("--texts", {"nargs": "+", "default": ["data/datasets/embedded"]}),
        ("--rounds", {"type": int, "default": 6}), ("--out", text))
    add("calibrate", ("settings", {"nargs": "*"}), ("--workers", {"type": int, "default": 0}), as_json,
        ("--seeds", {"type": int, "default": 3}), ("--texts", {"nargs": "+", "default": TEXTS}),
        ("--widths", {"type": int, "nargs": "+", "default": WIDTHS}), ("--kept", on), ("--list", on),
        ("--report", on))
    add("plot", paths, ("--out", {"default": "loss.png"}),
        ("--by", {"choices": [*trials.AXES], "default": "seconds"}))
    add("board", ("paths", {"nargs": "*"}), ("--html", on), ("--out", {"default": "board.html"}))
    add("export", ("run", {}), ("--out", text))
    return parser.parse_args(argv)


def run_check(args, say):
    """Exit code of `check`."""
    try:
        failed = check(Folder(args.folder), args, say)
    except Altered as error:
        say(f"  FAIL  {error}")
        failed = ["rules"]
    say(f"{len(failed)} rules fail: {', '.join(failed)}" if failed else "nothing fails")
    return 1 if failed else 0


def run(args, say):
    """Exit code of a command."""
    if args.what == "check":
        return run_check(args, say)
    if args.what == "audit":
        return 1 if audit(Path(args.folder), say) else 0
    if args.what == "board":
        demand(args.html or not args.paths, "board of PATH needs --html")
        if args.html:
            places = args.paths or [path for path in ("logs", HOME) if Path(path).exists()]
            write_page(places, args.out, say)
        else:
            board(say)
        return 0
    found = COMMANDS[args.what](args, say)
    if getattr(args, "json", False):
        print(json.dumps(found, indent=1))
    return 0


def main(argv):
    """Exit code: 0 done and nothing fails, 1 a rule fails, 2 refused."""
    args = parse(argv)
    inputs.print_any_name()
    stream = sys.stderr if getattr(args, "json", False) else sys.stdout

    def say(*lines):
        for line in lines:
            print(line, file=stream, flush=True)

    try:
        return run(args, say)
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
    inputs.steady_output()
    sys.exit(main(sys.argv[1:]))
