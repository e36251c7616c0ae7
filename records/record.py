"""records/record.py: make, check and compare records. Offline; trains nothing unless asked to.

    ./run.sh record new --name NAME --blurb TEXT RUN…   a record folder from finished run folders
    ./run.sh record check FOLDER                  recompute whatever a record folder claims
    ./run.sh record audit DIR                     the same for a tree of folders, foreign ones too: a table
    ./run.sh record stats PATH…                   n, mean, std, tests of runs, records, logs of other projects
    ./run.sh record compare A B                   is B better? (--run "CMD" "CMD" -n 5 trains both first)
    ./run.sh record try "what it is"              the working tree against HEAD on a proxy, and a ledger
    ./run.sh record plot PATH…                    curves of any logs: --by seconds, tokens or step
    ./run.sh record board                         the leaderboards of records/README.md
    ./run.sh board --html [PATH…]                 a page of all runs and records, or of those at PATH…
    ./run.sh record export RUN                    the weights as safetensors, and model.py, which reads them
    ./run.sh record COMMAND --help                a line for each of its options

Map:
verify/   what a record folder claims: folders.py (the tracks' rules, folders on disk, their README),
          new_record.py (a folder from runs), rules.py (all rules in turn, which are in checks.py,
          evidence.py, of logs alone, and replay.py), source.py (what a script shows without running it),
          scripts.py (scripts by commit and preset), leak_probe.py
judge/    what is better: logs.py, scores.py (which scores compare), significance.py (means, t-tests,
          verdicts), trials.py (what trains or compares), tries.py (changes on proxies), sequential.py (their
          evidence)
foreign/  trees of other projects: audit.py, and pages.py, what their pages claim
show/     board.py (leaderboards), board_page.py (the HTML page: board_rows, board_chart, board_style),
          curves.py (pictures), labels.py (what tells runs apart), export.py (models for other programs)

Exit 0: done, and nothing fails; 1: a rule fails; 2: refused.
"""
import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

try:
    import numpy  # noqa: F401
except ImportError:
    sys.exit("record: the package numpy is missing: ./run.sh setup")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
if __name__ == "__main__":  # our modules are those of this checkout, whatever else the path holds
    sys.path[:] = [str(ROOT), *[folder for folder in sys.path if folder != str(HERE)]]
from data import inputs  # noqa: E402
from records.foreign.audit import audit  # noqa: E402
from records.judge import trials, tries  # noqa: E402
from records.judge.logs import DIGITS, Refused, demand  # noqa: E402
from records.show import curves  # noqa: E402
from records.show.board import BOARDS, board  # noqa: E402
from records.show.board_page import write_page  # noqa: E402
from records.show.export import export  # noqa: E402
from records.verify import folders, rules  # noqa: E402
from records.verify.checks import DAMAGE  # noqa: E402
from records.verify.folders import Altered, Folder  # noqa: E402
from records.verify.new_record import new  # noqa: E402

class Command(NamedTuple):
    """One word of the command line."""
    run: Callable[..., Any]     # (options, say) -> exit code, or a result, for --json
    told: str                   # what it does, for --help
    options: list[tuple[str, dict[str, Any]]]


def check(args: argparse.Namespace, say: Callable) -> int:
    """Exit code of `check`."""
    try:
        failed = rules.check(Folder(args.folder), args, say, [*rules.CHECKS, BOARDS])
    except Altered as error:
        say(f"  FAIL  {error}")
        failed = ["rules"]
    say(f"{len(failed)} rules fail: {', '.join(failed)}" if failed else "nothing fails")
    return 1 if failed else 0


def audit_tree(args: argparse.Namespace, say: Callable) -> int:
    """Exit code of `audit`."""
    return 1 if audit(Path(args.folder), say) else 0


def make_board(args: argparse.Namespace, say: Callable) -> None:
    """The leaderboards, or with --html the page of runs."""
    demand(args.html or not args.paths, "board of PATH needs --html")
    if args.html:
        places = args.paths or [path for path in ("logs", folders.HOME) if os.path.lexists(path)]
        write_page(places, args.out, say)
    else:
        board(say)


def option(flags: str, told: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    """An option, or a path, of a command, with its line in --help."""
    shown = f"{told} (default {settings['default']})" if settings.get("default") else told
    return flags, {"help": shown, **settings}


TEXT = dict(default="", metavar="TEXT")
SWITCH = dict(action="store_true")
NUMBER = dict(type=int, metavar="N")
EACH = dict(action="append", default=[])
AS_JSON = option("--json", "print the result as JSON, everything else to stderr", **SWITCH)
METRIC = option("--metric", "which score; without it val_bpb, where all runs have it, else val_loss",
                choices=DIGITS)
PATHS = option("paths", "run folders, record folders, logs, or folders of these", nargs="+", metavar="PATH")

COMMANDS = {
    "new": Command(new, "Makes a record folder from finished run folders.", [
        option("runs", "run folders, or their names under logs/", nargs="+", metavar="RUN"),
        option("--name", "name of the record, which ends that of its folder", required=True),
        option("--author", "who made it", **TEXT),
        option("--github-id", "the author's name on GitHub", **TEXT),
        option("--blurb", "a sentence on what it changes; it begins the record's page", **TEXT),
        option("--ai-disclosure", "what an AI helped with", **TEXT),
        option("--exclude", "RUN=reason: a finished run of the same code and constants that is left out; "
               "once for each", metavar="RUN=reason", **EACH),
        option("--before", "the record to compare with (without it the best on such a machine); none: the "
               "first", **TEXT),
        option("--baseline", "a run of the record before on this machine; once for each", metavar="RUN",
               **EACH),
        option("--into", "folder of the track folders (without it records/)", **TEXT),
        option("--systems-change", "only the speed changed: the test against the target is waived",
               **SWITCH)]),
    "check": Command(
        check, "Recomputes whatever a record folder claims. Runs its code unless --no-exec is given.", [
            option("folder", "a record folder", metavar="FOLDER"),
            option("--rerun-eval", "score its artifacts again", **SWITCH),
            option("--no-exec", "run no code of the folder", **SWITCH),
            option("--artifact", "an artifact that is too large for the folder; once for each",
                   metavar="PATH", **EACH),
            option("--replay", "train the first N steps again and compare the losses", default=0, **NUMBER),
            option("--seed", "with --replay: the run of this seed, not train.log's", type=int, metavar="K"),
            # golf at its own size: 195 on 2 cores
            option("--seconds", "limit for the folder's code, in seconds", default=600, type=float,
                   metavar="N")]),
    "audit": Command(
        audit_tree, "Checks a tree of record folders, other projects' too, each against its own files.", [
            option("folder", "a folder of record folders", metavar="DIR")]),
    "board": Command(
        make_board, "Rewrites the leaderboards of records/README.md, or with --html writes a page of runs.", [
            option("paths", "with --html: what the page shows (without any logs and records)", nargs="*",
                   metavar="PATH"),
            option("--html", "write one HTML page of all runs and records", **SWITCH),
            option("--out", "the page", default="board.html", metavar="FILE")]),
    "stats": Command(
        trials.stats, "n, mean, std and tests of runs, records and logs of other projects.", [
            PATHS, AS_JSON, METRIC,
            option("--target", "test whether the mean is better than this", type=float, metavar="SCORE")]),
    "compare": Command(
        trials.compare,
        "Is B better than A? Scores are compared if they are of the same tokens of the same text.", [
            option("paths", "A and B: run folders, records or logs (several of one side with commas between "
                   "them), or with --run the commands that train them", nargs="+", metavar="PATH"),
            option("--run", "A and B are shell commands: train both -n times, in turn; they get SEED and "
                   "RUN_ID", **SWITCH),
            option("-n", "runs of each side, each with a seed of its own", default=5, **NUMBER),
            METRIC, AS_JSON,
            option("--seed", "seed of the first run; the next have the next ones", default=1337, **NUMBER),
            option("--out", "picture of the curves", default="logs/compare.png", metavar="FILE")]),
    # docs/proxy.md says what its verdicts are worth
    "try": Command(
        tries.try_change, "Tests the working tree, or settings, against HEAD on a proxy until it is clear.", [
            option("words", "what the change is, for the ledger; NAME=value is a setting to try", nargs="*",
                   metavar="WORD"),
            option("--preset", "the recipe", default="speedrun_plus"),
            option("--proxy", "width of the proxy; 0: that of the last try, or the largest for 5 minutes",
                   type=int, default=0, metavar="WIDTH"),
            option("--text", "folder of a dataset", default="data/datasets/embedded", metavar="DIR"),
            AS_JSON,
            option("--same", "HEAD against itself: how often is nothing called a gain?", **SWITCH),
            option("--outside", "allow edits beyond the recipe's own section", **SWITCH)]),
    "plot": Command(
        curves.plot,
        "Loss curves: the median of each path's runs, and a band from the lowest to the highest.", [
            PATHS,
            option("--out", "the picture", default="loss.png", metavar="FILE"),
            option("--by", "the horizontal axis", choices=[*curves.AXES], default="seconds")]),
    "export": Command(
        export, "Writes a run's weights as safetensors, and model.py, which reads them.", [
            option("run", "a run folder, a record folder or a model file", metavar="RUN"),
            option("--out", "the folder (without it export beside the model)", default="", metavar="DIR")]),
}


def parse(argv: list[str]) -> argparse.Namespace:
    """The command's name, as `what`, and its options."""
    parser = argparse.ArgumentParser(prog="record", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, description=command.told)
        for flags, settings in command.options:
            sub.add_argument(flags, **settings)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Exit code: 0 done and nothing fails, 1 a rule fails, 2 refused."""
    args = parse(argv)
    stream = sys.stderr if getattr(args, "json", False) else sys.stdout

    def say(*lines: str) -> None:
        for line in lines:
            print(line, file=stream, flush=True)

    try:
        found = COMMANDS[args.what].run(args, say)
        if getattr(args, "json", False):
            print(json.dumps(found, indent=1))
        return found if isinstance(found, int) else 0
    except Refused as error:
        why = str(error)
    except OSError as error:
        why = f"{error.filename or 'a file'}: {error.strerror or error}"
    except DAMAGE as error:
        why = f"what is there is damaged: {type(error).__name__} {str(error)[:150]}"
    except ImportError as error:
        why = f"{error}: ./run.sh setup"
    except KeyboardInterrupt:
        why = "interrupted"
    print(f"record: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    inputs.steady_output()
    sys.exit(main(sys.argv[1:]))
