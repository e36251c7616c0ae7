"""Would a test notice? Changes train_gpt.py in one place at a time and runs the tests that run that place.

    python tools/dev/mutation.py                               200 mutants; again: goes on where it ended
    python tools/dev/mutation.py --count 60 -- -m quick        against the tests that -m quick selects
    python tools/dev/mutation.py --only lr_factor --count 50   in one function or class
    python tools/dev/mutation.py --report                      what is known so far, running nothing

Mutants are drawn by a seed, equally many of each kind: a comparison (<= for <, != for ==, `or` for `and`, no
`not`), a constant (False for True, twice a float, one more than an int of a table), a sign (- for +), off by
one (ints, bounds of slices and ranges in a function), a dropped line. Strings, f-strings and annotations are
left alone, as they change texts only or nothing; so is what no CPU runs: the code below `if triton:`, and
what stands below `if ...on_gpu:` if no test runs it.

First, once for a state of the sources, all tests run twice: as always, for their seconds, and with each line
recorded (line_trace.py). .mutation/ keeps which test, or which fixture that it uses, runs which lines, also
in the processes that it starts. A mutant needs only the tests that run its lines. What the import runs, such
as a preset's constant, may matter to any test. Fast tests come first, of these the ones in files that name
the function or the constant, then those that run lines which read the constant, and those that run few lines.
The first failure ends it; a test that takes 30 s longer than five times the usual counts as failed. --budget
bounds the seconds of tests per mutant; with a higher one, survivors for which tests were left out run again.

Survivors are judged in tests/mutation_judged.tsv; the report prints the rows to add there. What is judged
equivalent, log text only or GPU only counts as no change of behaviour. A row's key is a hash of the
function's name and of its changed statement, so that it outlives changes elsewhere.

cosmic-ray runs one command for all mutants, mutmut learns which tests call a function within one process
only; here tests start ranks and scripts, and importing torch takes seconds: each mutant is a fork with torch
in it.
"""
import argparse
import ast
import csv
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
if __name__ == "__main__":  # our modules are those of this checkout, whatever else the path holds
    sys.path[:] = [str(ROOT), *[folder for folder in sys.path if folder != str(HERE)]]
from tools.dev.line_trace import TRACE  # noqa: E402
from tools.dev.mutants import KINDS, Finder, Mutant, draw  # noqa: E402

NO_CHANGE = ("equivalent", "log text only", "GPU only")     # verdicts; the other one is "not tested"
COLUMNS = ("key", "result", "by", "tests", "left_out", "cpu_seconds")
PYTEST = ("-q", "-p", "no:cacheprovider")
Work = TypeVar("Work")  # a task of in_parallel()
MapTask = tuple[str, str, str, bool]  # a file of tests, the script, its text; are its lines recorded?
Row = dict[str, Any]  # of the map: a file of tests
Sized = tuple[int, str, Row, list[str]]  # lines that a test runs, its name, its file's row, its contexts


# ---------------------------------------------------------------- processes
def files_of(root: Path) -> list[Path]:
    """What git tracks or would track; every file where there is no repository."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, capture_output=True)
    if listed.returncode == 0:
        paths = [root / name for name in listed.stdout.decode().split("\0") if name]
    else:
        paths = [path for path in root.rglob("*") if not {"__pycache__", ".mutation"} & set(path.parts)]
    return sorted(path for path in paths if path.is_file())


def copy_tree(root: Path, tree: Path) -> None:
    """A copy to change; the virtual environment stays where it is."""
    for path in files_of(root):
        copy = tree / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    if (root / ".venv").exists():
        (tree / ".venv").symlink_to((root / ".venv").resolve())


def in_parallel(tasks: Iterable[Work], folders: list[Path], act: Callable[[Work, Path], int],
                done: Callable[[Work, Path, int, float], None]) -> None:
    """Forks act(task, folder) for each task, one at a time per folder, then calls done(task, folder, exit
    code, CPU seconds); the code is minus the signal that ended it. What an act has started ends with it."""
    waiting = list(tasks)
    free = list(folders)
    running = {}
    try:
        while waiting or running:
            while waiting and free:
                task = waiting.pop(0)
                folder = free.pop()
                pid = os.fork()
                if pid == 0:
                    alone(act, task, folder)
                running[pid] = task, folder
            pid, status, usage = os.wait4(-1, 0)
            kill_group(pid)
            task, folder = running.pop(pid)
            free.append(folder)
            done(task, folder, os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)
    finally:
        for pid in running:
            kill_group(pid)
            os.waitpid(pid, 0)


def kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def forget_packages() -> None:
    """The tests of a copy import the modules of that copy; the trace of this process stays the only one."""
    for name in [*sys.modules]:
        if name.partition(".")[0] == "tools" and name != TRACE.__module__:
            del sys.modules[name]


def alone(act: Callable[[Work, Path], int], task: Work, folder: Path) -> NoReturn:
    """In a new process: a group of its own, output to a file, and never back to the caller."""
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder / "tree")
        forget_packages()
        code = act(task, folder)
    finally:
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


# ---------------------------------------------------------------- which tests run which lines
class Recorder:
    """A plugin of pytest: the seconds of each context, the contexts of each test, which are its own and those
    of the fixtures that it shares with others, and the tests that did not pass."""

    def __init__(self) -> None:
        self.tests: dict[str, list[str]] = {}
        self.fixtures: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    def begin(self, context: str) -> None:
        TRACE.switch(context)
        self.seconds[context] = -time.perf_counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.begin(item.nodeid)
        answer = yield
        self.seconds[item.nodeid] += time.perf_counter()
        shared = [self.fixtures[name] for name in item.fixturenames if name in self.fixtures]
        self.tests[item.nodeid] = [item.nodeid, *shared]
        TRACE.switch("")
        return answer

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        outer = TRACE.context
        own = self.fixtures[fixturedef.argname] = f"{fixturedef.argname} {len(self.seconds)}"
        self.begin(own)
        try:
            return (yield)
        finally:
            self.seconds[own] += time.perf_counter()
            self.seconds[outer] -= self.seconds[own]    # the fixture's time is not also the test's
            TRACE.switch(outer)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)


def traced(source: str, folder: Path) -> str:
    """The source, its first statement also having its lines recorded; lines keep their numbers."""
    body = ast.parse(source).body
    docstring = isinstance(body[0], ast.Expr)
    lines = source.splitlines(keepends=True)
    hook = f"import sys; sys.path.append({str(ROOT)!r}); from tools.dev.line_trace import TRACE; "
    hook += f"TRACE.follow({str(folder)!r}); "
    lines[body[int(docstring)].lineno - 1] = hook + lines[body[int(docstring)].lineno - 1]
    return "".join(lines)


def record(task: MapTask, folder: Path) -> int:
    """Runs a file of tests, with the lines of the script recorded or as always; leaves what it found."""
    file, script, text, with_lines = task
    for name in ("lines", "context", "found"):
        (folder / name).unlink(missing_ok=True)
    (folder / "tree" / script).write_text(traced(text, folder) if with_lines else text)
    shutil.rmtree((folder / "tree" / script).parent / "__pycache__", ignore_errors=True)
    TRACE.begin(folder, with_lines)
    recorder = Recorder()
    pytest.main([*PYTEST, f"--basetemp={folder / 'temp'}", file], plugins=[recorder])
    lines: dict[str, set[int]] = {}
    for row in (folder / "lines").read_text().splitlines() if with_lines else ():
        line, _, context = row.partition(" ")
        lines.setdefault(context, set()).add(int(line))
    found = dict(file=file, traced=with_lines, tests=recorder.tests, seconds=recorder.seconds,
                 failed=sorted(recorder.failed),
                 lines={context: sorted(numbers) for context, numbers in lines.items()})
    (folder / "found").write_text(json.dumps(found))
    return 0


def coverage_map(args: argparse.Namespace, source: str, folders: list[Path], state: Path) -> list[Row]:
    """A row per file of tests: seconds and results of an ordinary run, contexts and lines of a traced one."""
    path = state / "map.jsonl"
    known: dict[tuple[str, bool], Row] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        found = json.loads(line)
        known[found["file"], found["traced"]] = found
    files = [str(file.relative_to(args.root)) for file in files_of(args.root)
             if file.match("tests/test_*.py") and file.parent == args.root / "tests"]
    tasks = [(file, args.target, source, with_lines) for file in files for with_lines in (True, False)]

    def done(task: MapTask, folder: Path, code: int, seconds: float) -> None:
        if code:
            shutil.copy(folder / "output", state / "output")
            raise SystemExit(f"{task[0]}: exit code {code}, see {state / 'output'}")
        found = json.loads((folder / "found").read_text())
        known[task[0], task[-1]] = found
        with path.open("a") as out:
            out.write(json.dumps(found) + "\n")
        say(f"map: {task[0]}, {len(found['tests'])} tests, {seconds:.0f} CPU seconds",
            *(f"  not among the tests, as it does not pass in a copy: {name}"
              for name in found["failed"] if not task[-1]))

    missing = [task for task in tasks if (task[0], task[-1]) not in known]
    if missing and args.report:
        raise SystemExit("the map of these sources is not complete: run without --report first")
    in_parallel(missing, folders, record, done)
    rows = []
    for file in files:
        usual = known[file, False]
        row = dict(known.get((file, True), usual))
        row["seconds"] = row["seconds"] | usual["seconds"]
        row["tests"] = {name: row["tests"].get(name, contexts) for name, contexts in usual["tests"].items()
                        if name not in usual["failed"]}
        rows.append(row)
    return rows


# ---------------------------------------------------------------- the tests of a mutant, and running them
def plan(mutant: Mutant, rows: list[Row], source: str, texts: dict[str, str], budget: float,
         allowed: set[str] | None = None) -> tuple[list[str], dict[str, float], int]:
    """(tests in order, {test: seconds}, number of tests that the budget leaves out)"""
    wanted = set(mutant.lines)
    if mutant.imported:
        reads = re.compile(rf"\b({'|'.join(map(re.escape, mutant.names))})\b")
        wanted = {number for number, line in enumerate(source.splitlines(), 1) if reads.search(line)}
    groups: dict[tuple[int, int, bool], dict[str, list[Sized]]] = {}
    total = 0.0
    paid: set[tuple[str, str]] = set()
    for row in rows:
        hit = {context for context, lines in row["lines"].items() if not wanted.isdisjoint(lines)}
        named = sum(name in texts[row["file"]] for name in mutant.names)
        for name, contexts in row["tests"].items():
            covers = not hit.isdisjoint(contexts)
            if not (covers or mutant.imported) or allowed is not None and name not in allowed:
                continue
            seconds = sum(row["seconds"][context] for context in contexts)
            size = sum(len(row["lines"].get(context, ())) for context in contexts)
            group = (seconds > 2) + (seconds > 15), -named, not covers
            groups.setdefault(group, {}).setdefault(row["file"], []).append((size, name, row, contexts))
    order = []
    seconds_of = {}
    left_out = 0
    for _, files in sorted(groups.items(), key=lambda item: item[0]):
        for tests in sorted(map(sorted_by_size, files.values()), key=lambda tests: tests[0][0]):
            for _, name, row, contexts in tests:
                new = {(row["file"], context) for context in contexts} - paid
                seconds = sum(row["seconds"][context] for _, context in new)
                if total + seconds > budget:
                    left_out += 1
                    continue
                total += seconds
                paid |= new
                order.append(name)
                seconds_of[name] = seconds
    return order, seconds_of, left_out


def sorted_by_size(tests: Iterable[Sized]) -> list[Sized]:
    return sorted(tests, key=lambda test: test[:2])


class Chosen:
    """A plugin of pytest: only these tests, in this order; notes each that begins, and limits its time."""

    def __init__(self, task: "Task", folder: Path) -> None:
        self.rank = {name: number for number, name in enumerate(task.order)}
        self.seconds = task.seconds
        self.patience = task.patience
        self.note = folder / "note"
        self.count = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.rank),
                          key=lambda item: self.rank[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.count += 1
        self.note.write_text(f"{self.count} {nodeid}")
        signal.alarm(self.patience + int(5 * self.seconds[nodeid]))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus == 0:
            self.note.write_text(f"{self.count} all passed")


class Task(NamedTuple):
    """The tests of a mutant."""
    mutant: Mutant | None       # None: the tests of another one without a change, which must pass
    script: str                 # its path in the tree
    text: str                   # what it holds
    order: list[str]            # of tests
    seconds: dict[str, float]   # that each takes
    left_out: int               # tests, by the budget
    patience: int
    pytest_args: list[str]


def attempt(task: Task, folder: Path) -> int:
    """Runs the tests of a task until one fails."""
    signal.alarm(300)       # whose default ends the process
    script = folder / "tree" / task.script
    script.write_text(task.text)
    # A .pyc is told by its second and size, which two mutants may share
    shutil.rmtree(script.parent / "__pycache__", ignore_errors=True)
    (folder / "note").write_text("0 import")
    files = list(dict.fromkeys(name.partition("::")[0] for name in task.order))
    words = [*PYTEST, "-x", f"--basetemp={folder / 'temp'}", *task.pytest_args, *files]
    return pytest.main(words, plugins=[Chosen(task, folder)])


def outcome(folder: Path, code: int, state: Path) -> tuple[str, str, str]:
    """(result, by which test, number of tests begun) of an attempt."""
    count, _, by = (folder / "note").read_text().partition(" ")
    if code in (4, 70):
        shutil.copy(folder / "output", state / "output")
        raise SystemExit(f"pytest could not begin: see {state / 'output'}")
    if code == 0 and by == "all passed":
        return "survived", "", count
    if code == 5:
        return "survived", "", "0"
    return "timeout" if code == -signal.SIGALRM else "caught", by, count


def selected(pytest_args: list[str], root: Path) -> set[str]:
    """The tests that pytest selects by these arguments."""
    command = [sys.executable, "-m", "pytest", *PYTEST, "--collect-only", *pytest_args]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True)
    names = {line for line in listed.stdout.splitlines() if "::" in line}
    if not names:
        raise SystemExit(f"pytest {' '.join(pytest_args)} selects no tests")
    return names


def read_table(path: Path) -> dict[str, dict[str, str]]:
    """Rows of a file with tabs, by key; of several with one key the last."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {row["key"]: row for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)}


def run_mutants(args: argparse.Namespace, drawn: list[Mutant], rows: list[Row], folders: list[Path],
                results: Path, state: Path) -> None:
    """Those without a result, or whose survival was not tried by all tests that the budget now allows."""
    source = (args.root / args.target).read_text()
    texts = {row["file"]: (args.root / row["file"]).read_text() for row in rows}
    allowed = selected(args.pytest, args.root) if args.pytest else None
    known = read_table(results)
    tasks = []
    raw = source.encode()
    for mutant in drawn:
        order, seconds, left_out = plan(mutant, rows, source, texts, args.budget, allowed)
        row = known.get(mutant.key)
        if row is None or row["result"] == "survived" and int(row["tests"]) < len(order):
            text = (raw[:mutant.start] + mutant.text.encode() + raw[mutant.end:]).decode()
            limits = dict(left_out=left_out, patience=args.patience, pytest_args=args.pytest)
            tasks.append(Task(mutant, args.target, text, order, seconds, **limits))

    def done(task: Task, folder: Path, code: int, seconds: float) -> None:
        result, by, count = outcome(folder, code, state)
        if task.mutant is None:
            if result != "survived":
                shutil.copy(folder / "output", state / "output")
                raise SystemExit(f"the tests fail without a change: {by}, see {state / 'output'}")
            return
        row = (task.mutant.key, result, by, count, str(task.left_out), f"{seconds:.1f}")
        lines = [row] if results.exists() else [COLUMNS, row]
        with results.open("a") as out:
            out.writelines("\t".join(line) + "\n" for line in lines)
        say("\t".join((result, f"{task.mutant.function}:{task.mutant.lines[0]}", task.mutant.change, by)))

    unchanged = [task._replace(mutant=None, text=source) for task in tasks if task.order]
    in_parallel(unchanged[:1], folders, attempt, done)
    in_parallel(tasks, folders, attempt, done)


# ---------------------------------------------------------------- report and command line
def say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


def share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / max(whole, 1):.1f} %)"


def report(drawn: list[Mutant], results: Path, judged: Path) -> None:
    """The shares caught, and the survivors with their verdicts."""
    known = read_table(results)
    verdicts = read_table(judged)
    tried = [mutant for mutant in drawn if mutant.key in known]
    survivors = [mutant for mutant in tried if known[mutant.key]["result"] == "survived"]
    unchanged = [mutant for mutant in survivors
                 if verdicts.get(mutant.key, {}).get("verdict") in NO_CHANGE]
    caught = len(tried) - len(survivors)
    say(f"tried {len(tried)} of {len(drawn)} drawn", f"caught {share(caught, len(tried))}, "
        f"{sum(known[mutant.key]['result'] == 'timeout' for mutant in tried)} of them by a timeout",
        f"caught {share(caught, len(tried) - len(unchanged))} of those that change behaviour")
    for kind in KINDS:
        of_kind = [mutant for mutant in tried if mutant.kind == kind]
        say(f"  {kind}: {share(len(of_kind) - sum(mutant in survivors for mutant in of_kind), len(of_kind))}")
    seconds = sum(float(known[mutant.key]["cpu_seconds"]) for mutant in tried)
    say(f"{seconds / max(len(tried), 1):.1f} CPU seconds per mutant", "",
        "survivors: key, verdict, function, change, reason; the line; n tests ran, m were left out")
    for mutant in sorted(survivors, key=lambda mutant: mutant.start):
        row = known[mutant.key]
        verdict = verdicts.get(mutant.key, dict(verdict="?", reason="?"))
        say("\t".join((mutant.key, verdict["verdict"], mutant.function, mutant.change, verdict["reason"],
                       f"line {mutant.lines[0]}", f"{row['tests']} ran, {row['left_out']} left out")))


def parse(argv: list[str]) -> argparse.Namespace:
    """Arguments; what stands behind -- is for pytest."""
    mine = argv
    for_pytest = []
    if "--" in argv:
        mine = argv[:argv.index("--")]
        for_pytest = argv[argv.index("--") + 1:]
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200, help="mutants to draw")
    parser.add_argument("--only", default="", help="name of a function, a class or a constant")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--budget", type=float, default=90, help="seconds of tests per mutant")
    parser.add_argument("--patience", type=int, default=30,
                        help="seconds that a test may take beyond five times its usual time")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--target", default="train_gpt.py")
    parser.add_argument("--judged", type=Path, default=Path("tests", "mutation_judged.tsv"))
    args = parser.parse_args(mine)
    args.pytest = for_pytest
    return args


def state_folder(root: Path) -> Path:
    """.mutation/<hash of every source>: what was found for them."""
    digest = hashlib.sha256()
    for path in files_of(root):
        if path.suffix == ".py":
            digest.update(path.read_bytes())
    folder = root / ".mutation" / digest.hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def warm_up(source: str) -> None:
    """Imports what the script imports, so that no mutant pays for it."""
    body = ast.parse(source).body
    for node in body + [inner for block in body if isinstance(block, ast.Try) for inner in block.body]:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module]
        for name in names:
            with suppress(ImportError):
                import_module(name)


def main(argv: list[str]) -> int:
    args = parse(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    source = (args.root / args.target).read_text()
    state = state_folder(args.root)
    results = state / f"results{re.sub('[^a-z0-9]+', '_', ' '.join(args.pytest))}.tsv"
    with tempfile.TemporaryDirectory(prefix="mutation") as place:
        folders = [Path(place, f"slot{number}") for number in range(args.jobs)]
        for folder in folders if not args.report else []:
            copy_tree(args.root, folder / "tree")
        try:
            rows = coverage_map(args, source, folders, state)
            reached = {line for row in rows for lines in row["lines"].values() for line in lines}
            mutants = [mutant for mutant in Finder(source).mutants
                       if not mutant.gpu or reached.intersection(mutant.lines)]
            if args.only:
                mutants = [mutant for mutant in mutants if args.only in mutant.function.split(".")]
            drawn = draw(mutants, args.count, args.seed)
            say(f"{len(mutants)} mutants: " + ", ".join(
                f"{count} {kind}" for kind, count in Counter(mutant.kind for mutant in mutants).items()))
            if not args.report:
                warm_up(source)
                run_mutants(args, drawn, rows, folders, results, state)
        except KeyboardInterrupt:
            say(f"interrupted: the same command goes on from here ({state})")
            return 130
    report(drawn, results, args.root / args.judged)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
