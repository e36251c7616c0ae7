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
judge/    what is better: runs.py (logs and statistics), scores.py (which scores compare), trials.py (what
          trains or compares), tries.py (changes on proxies), sequential.py (their statistics)
foreign/  trees of other projects: audit.py, and pages.py, what their pages claim
show/     board.py (leaderboards), board_page.py (the HTML page: board_rows, board_chart, board_style),
          curves.py (pictures), names.py (what tells runs apart), export.py (models for other programs)

Exit 0: done, and nothing fails; 1: a rule fails; 2: refused.
"""
import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from records.judge.runs import DIGITS, Refused, demand  # noqa: E402
from records.show import curves  # noqa: E402
from records.show.board import BOARDS, board  # noqa: E402
from records.show.board_page import write_page  # noqa: E402
from records.show.export import export  # noqa: E402
from records.verify import folders, rules  # noqa: E402
from records.verify.checks import DAMAGE  # noqa: E402
from records.verify.folders import Altered, Folder  # noqa: E402
from records.verify.new_record import new  # noqa: E402

COMMANDS = {"new": new, "stats": trials.stats, "compare": trials.compare, "try": tries.try_change,
            "plot": curves.plot, "export": export}


Option = tuple[str, dict[str, Any]]
Add = Callable[..., None]       # (name of a command, what it does, its options)


def option(flags: str, told: str, **settings: Any) -> Option:
    """An option, or a path, of a command, with its line in --help."""
    return flags, {"help": told, **settings}


def text(flag: str, told: str, default: str = "") -> Option:
    return option(flag, told, default=default, metavar="TEXT")


def switch(flag: str, told: str) -> Option:
    return option(flag, told, action="store_true")


def number(flag: str, told: str, default: float, kind: type = int) -> Option:
    return option(flag, f"{told} (default {default})", default=default, type=kind, metavar="N")


AS_JSON = switch("--json", "print the result as JSON, everything else to stderr")
METRIC = option("--metric", "which score; without it val_bpb, where all runs have it, else val_loss",
                choices=DIGITS)
COUNT = number("-n", "runs of each side or setting, each with a seed of its own", 5)
SEED = number("--seed", "seed of the first run; the next have the next ones", 1337)
PATHS = option("paths", "run folders, record folders, logs, or folders of these", nargs="+", metavar="PATH")
PRESET = option("--preset", "the recipe (default speedrun_plus)", default="speedrun_plus")
WORKERS = number("--workers", "how many runs at a time; 0: one on a GPU, else one for each core", 0)


def add_records(add: Add) -> None:
    """Commands that make and check records."""
    add("new", "Makes a record folder from finished run folders.",
        option("runs", "run folders, or their names under logs/", nargs="+", metavar="RUN"),
        option("--name", "name of the record, which ends that of its folder", required=True),
        text("--author", "who made it"),
        text("--github-id", "the author's name on GitHub"),
        text("--blurb", "a sentence on what it changes; it begins the record's page"),
        text("--ai-disclosure", "what an AI helped with"),
        option("--exclude", "RUN=reason: a finished run of the same code and constants that is left out; "
               "once for each", action="append", default=[], metavar="RUN=reason"),
        text("--before", "the record to compare with (default: the best on such a machine); none: the first"),
        option("--baseline", "a run of the record before on this machine; once for each", action="append",
               default=[], metavar="RUN"),
        text("--into", "folder of the track folders (default records/)"),
        switch("--systems-change", "only the speed changed: the test against the target is waived"),
        switch("--whole", "take a script with several recipes"))
    add("check", "Recomputes whatever a record folder claims. Runs its code unless --no-exec is given.",
        option("folder", "a record folder", metavar="FOLDER"),
        switch("--rerun-eval", "score its artifacts again"),
        switch("--no-exec", "run no code of the folder"),
        option("--artifact", "an artifact that is too large for the folder; once for each", action="append",
               default=[], metavar="PATH"),
        switch("--verbose", "a line for each rule, not only for those that fail"),
        option("--replay", "train the first N steps again and compare the losses", type=int, default=0,
               metavar="N"),
        option("--seed", "with --replay: the run of this seed, not train.log's", type=int, metavar="K"),
        # golf at its own size: 195 on 2 cores
        number("--seconds", "limit for the folder's code, in seconds", 600, float))
    add("audit", "Checks a tree of record folders, other projects' too, each against its own files.",
        option("folder", "a folder of record folders", metavar="DIR"))
    add("board", "Rewrites the leaderboards of records/README.md, or with --html writes a page of runs.",
        option("paths", "with --html: what the page shows (default logs and records)", nargs="*",
               metavar="PATH"),
        switch("--html", "write one HTML page of all runs and records"),
        option("--out", "the page (default board.html)", default="board.html", metavar="FILE"))


def add_comparisons(add: Add) -> None:
    """Commands that compare runs, and those that train them first."""
    add("stats", "n, mean, std and tests of runs, records and logs of other projects.",
        PATHS, AS_JSON, METRIC,
        option("--target", "test whether the mean is better than this", type=float, metavar="SCORE"),
        option("--baseline", "runs to compare with: Welch's test and the ratio of times", default="",
               metavar="PATH"))
    add("compare", "Is B better than A? Scores are compared if they are of the same tokens of the same text.",
        option("paths", "A and B: run folders, records or logs (several of one side with commas between "
               "them), or with --run the commands that train them", nargs="+", metavar="PATH"),
        switch("--run", "A and B are shell commands: train both -n times, in turn; they get SEED and RUN_ID"),
        COUNT, METRIC, AS_JSON, SEED,
        option("--out", "picture of the curves (default logs/compare.png)", default="logs/compare.png",
               metavar="FILE"))


def add_proxies(add: Add) -> None:
    """Commands that try changes on proxies. docs/proxy.md says what their verdicts are worth."""
    add("try", "Tests the working tree, or settings, against HEAD on a proxy until it is clear.",
        option("words", "what the change is, for the ledger; NAME=value is a setting to try", nargs="*",
               metavar="WORD"),
        PRESET, WORKERS,
        option("--proxy", "width of the proxy; 0: that of the last try, or the largest for 5 minutes",
               type=int, default=0, metavar="WIDTH"),
        option("--text", "folder of a dataset (default the embedded corpus)",
               default="data/datasets/embedded", metavar="DIR"),
        option("--ledger", f"file of all tries (default {tries.LEDGER})", default=tries.LEDGER,
               metavar="FILE"),
        AS_JSON, number("--pairs", "pairs of runs at most", tries.MOST_PAIRS),
        switch("--same", "HEAD against itself: how often is nothing called a gain?"),
        switch("--outside", "allow edits beyond the recipe's own section"))


def add_pictures(add: Add) -> None:
    """Commands that show a run to people, or its model to other programs."""
    add("plot", "Loss curves: the median of each path's runs, and a band from the lowest to the highest.",
        PATHS,
        option("--out", "the picture (default loss.png)", default="loss.png", metavar="FILE"),
        option("--by", "the horizontal axis (default seconds)", choices=[*curves.AXES], default="seconds"))
    add("export", "Writes a run's weights as safetensors, and model.py, which reads them.",
        option("run", "a run folder, a record folder or a model file", metavar="RUN"),
        option("--out", "the folder (default: export beside the model)", default="", metavar="DIR"))


def parse(argv: list[str]) -> argparse.Namespace:
    """The command's name, as `what`, and its options."""
    parser = argparse.ArgumentParser(prog="record", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)

    def add(name: str, told: str, *options: Option) -> None:
        sub = commands.add_parser(name, description=told)
        for flags, settings in options:
            sub.add_argument(*flags.split(), **settings)

    for add_some in (add_records, add_comparisons, add_proxies, add_pictures):
        add_some(add)
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
            places = args.paths or [path for path in ("logs", folders.HOME) if os.path.lexists(path)]
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
