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

Map:
verify/   what a record folder claims: folders.py (the games' rules, folders on disk, their README),
          new_record.py (a folder from runs), rules.py (all rules in turn, which are in checks.py,
          evidence.py, of logs alone, and replay.py), source.py (what a script shows without running it),
          scripts.py (scripts by commit and preset), leak_probe.py
judge/    what is better: runs.py (logs and statistics), trials.py (what trains or compares), tries.py
          (changes on proxies), sequential.py (their statistics), calibration.py (how far to believe them)
foreign/  trees of other projects: audit.py, and pages.py, what their pages claim
show/     board.py (leaderboards), board_page.py (the HTML page), export.py (models for other programs)

Exit 0: done, and nothing fails; 1: a rule fails; 2: refused.
"""
import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import numpy  # noqa: F401
except ImportError:
    sys.exit("record: the package numpy is missing: ./run.sh setup")

# The only place that says where modules are: the four folders beside this file, train_gpt.py, and what is
# shared with data/ and tools/
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
sys.path += [str(HERE.parent / "data"), str(HERE.parent / "tools")]
import inputs  # noqa: E402
from foreign.audit import audit  # noqa: E402
from judge import trials, tries  # noqa: E402
from judge.calibration import TEXTS, WIDTHS, calibrate  # noqa: E402
from judge.runs import DIGITS, Refused, demand  # noqa: E402
from show.board import BOARDS, board  # noqa: E402
from show.board_page import write_page  # noqa: E402
from show.export import export  # noqa: E402
from verify import folders, rules  # noqa: E402
from verify.checks import DAMAGE  # noqa: E402
from verify.folders import Altered, Folder  # noqa: E402
from verify.new_record import new  # noqa: E402

COMMANDS = {"new": new, "stats": trials.stats, "compare": trials.compare, "sweep": trials.sweep,
            "try": tries.try_change, "rank": tries.rank, "calibrate": calibrate,
            "ablate": trials.ablate, "noise": trials.noise, "plot": trials.plot, "export": export}


def parse(argv: list[str]) -> argparse.Namespace:
    """The command's name, as `what`, and its options."""
    parser = argparse.ArgumentParser(prog="record", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)

    def add(name: str, *options: tuple[str, dict[str, Any]]) -> None:
        sub = commands.add_parser(name)
        for flags, settings in options:
            sub.add_argument(*flags.split(), **settings)

    text = {"default": ""}
    on = {"action": "store_true"}
    several = {"action": "append", "default": []}
    paths = ("paths", {"nargs": "+"})
    as_json = ("--json", on)
    metric = ("--metric", {"choices": DIGITS})
    count = ("-n", {"type": int, "default": 5})
    seed = ("--seed", {"type": int, "default": 1337})
    add("new", ("runs", {"nargs": "+"}), ("--name", {"required": True}), ("--author", text),
        ("--github-id", text), ("--blurb", text), ("--ai-disclosure", text), ("--exclude", several),
        ("--before", text), ("--baseline", several), ("--into", text), ("--systems-change", on),
        ("--whole", on))
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


def run_check(args: argparse.Namespace, say: Callable) -> int:
    """Exit code of `check`."""
    try:
        failed = rules.check(Folder(args.folder), args, say, [*rules.CHECKS, BOARDS])
    except Altered as error:
        say(f"  FAIL  {error}")
        failed = ["rules"]
    say(f"{len(failed)} rules fail: {', '.join(failed)}" if failed else "nothing fails")
    return 1 if failed else 0


def run(args: argparse.Namespace, say: Callable) -> int:
    """Exit code of a command."""
    if args.what == "check":
        return run_check(args, say)
    if args.what == "audit":
        return 1 if audit(Path(args.folder), say) else 0
    if args.what == "board":
        demand(args.html or not args.paths, "board of PATH needs --html")
        if args.html:
            places = args.paths or [path for path in ("logs", folders.HOME) if Path(path).exists()]
            write_page(places, args.out, say)
        else:
            board(say)
        return 0
    found = COMMANDS[args.what](args, say)
    if getattr(args, "json", False):
        print(json.dumps(found, indent=1))
    return 0


def main(argv: list[str]) -> int:
    """Exit code: 0 done and nothing fails, 1 a rule fails, 2 refused."""
    args = parse(argv)
    inputs.print_any_name()
    stream = sys.stderr if getattr(args, "json", False) else sys.stdout

    def say(*lines: str) -> None:
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
