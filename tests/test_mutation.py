"""tools/dev/mutation.py on a toy script: what is caught, what survives, what hangs, what is not tried."""
import ast
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from helpers import ROOT, wait_until
from tools.dev.mutants import KINDS, Finder, draw

# The loop sleeps, so that one without an end costs little
SCRIPT = '''"""A toy."""
import sys
from time import sleep

LIMIT: float = 3.0


def clamp(x):
    if x < LIMIT:
        return x
    return LIMIT


def count(n: "at least 0" = 2):
    """Up to n."""
    total = 0
    while total != n:
        total += 1
        sleep(0.01)
    return total


def untested(x, on_gpu):
    if on_gpu:
        x = x + 40
    return f"{x + 50}"


def noted(notes, x):
    notes.append(x)
    return notes


if __name__ == "__main__":
    print(clamp(float(sys.argv[1])))
'''
TESTS = '''import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "toy.py"
sys.path.insert(0, str(SCRIPT.parent))
import toy

@pytest.fixture(scope="module")
def counted():
    return toy.count()

def test_clamp():
    done = subprocess.run([sys.executable, SCRIPT, "7"], capture_output=True, text=True)
    assert done.stdout == "3.0\\n"

def test_before(counted):
    assert counted

def test_counted(counted):
    assert counted == 2

def test_noted():
    assert toy.noted([], 1) == [1]
'''


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("toy")
    (root / "tests").mkdir()
    (root / "toy.py").write_text(SCRIPT)
    (root / "tests" / "test_toy.py").write_text(TESTS)
    return root


def command(root, *words):
    return [sys.executable, str(ROOT / "tools/dev/mutation.py"), "--root", str(root), "--target", "toy.py",
            "--patience", "10", "--jobs", "2", *words]


def mutation(root, *words):
    """What it prints."""
    done = subprocess.run(command(root, *words), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def said(root):
    return mutation(root)


def outcomes(said):
    """{change: (result, name of the test)}"""
    found = {}
    for line in said.splitlines():
        cells = line.split("\t")
        if len(cells) == 4:
            result, _, change, by = cells
            found[change] = result, by.rpartition("::")[2]
    return found


@pytest.mark.slow
def test_each_kind(said):
    """Also of what a subprocess runs, what a shared fixture runs, and what the import runs."""
    found = outcomes(said)
    caught = {
        "LIMIT: float = [3.0 -> 6.0]": "test_clamp", 'def count(n: "at least 0" = [2 -> 3]):': "test_counted",
        "while total [!= -> ==] n:": "test_before", "[notes.append(x) -> pass]": "test_noted",
        'if __name__ [== -> !=] "__main__":': "import",
        "print(clamp(float(sys.argv[[1 -> 2]])))": "test_clamp"}
    assert {change: by for change, (result, by) in found.items() if result == "caught"} == caught
    slow = {change: by for change, (result, by) in found.items() if result == "timeout"}
    assert slow == {"[total += 1 -> pass]": "test_before", "total [+ -> -]= 1": "test_before"}
    survived = {change for change, (result, _) in found.items() if result == "survived"}
    assert survived == {"if x [< -> <=] LIMIT:", "total = [0 -> 1]", "total += [1 -> 2]",
                        "sleep([0.01 -> 0.02])", "[sleep(0.01) -> pass]"}


@pytest.mark.slow
def test_a_later_call_runs_nothing_and_counts_what_is_judged(root, said):
    """Verdicts are read by key."""
    rows = [line.split("\t") for line in said.splitlines() if line.endswith(" left out") and "\t" in line]
    keys = {change: key for key, _, _, change, *_ in rows}
    assert "caught 8 of 13 (61.5 %), 2 of them by a timeout" in said
    (root / "tests" / "mutation_judged.tsv").write_text(
        "key\tverdict\tfunction\tchange\treason\n"
        f"{keys['total = [0 -> 1]']}\tequivalent\tcount\t\tcounts to n anyway\n"
        f"{keys['total += [1 -> 2]']}\tnot tested\tcount\t\todd numbers\n")
    again = mutation(root)
    assert outcomes(again) == {}
    assert "caught 8 of 13 (61.5 %), 2 of them by a timeout" in again
    assert "caught 8 of 12 (66.7 %) of those that change behaviour" in again
    assert "\tequivalent\tcount\ttotal = [0 -> 1]\tcounts to n anyway\t" in again


@pytest.mark.slow
def test_tests_that_are_selected(root, said):
    """By arguments for pytest: then only these can catch a mutant."""
    found = outcomes(mutation(root, "--only", "noted", "--", "-k", "clamp"))
    assert found == {"[notes.append(x) -> pass]": ("survived", "")}


def processes_of(folder):
    """The command lines that name the folder, of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = path.read_text(errors="replace")
            found += [line] if str(folder) in line else []
    return found


def notes_of_mutants(folder):
    """Those of tests under way; before, the same tests are run without a change."""
    notes = folder.glob("mutation*/slot*/note")
    return [note for note in notes if (note.parent / "tree/toy.py").read_text() != SCRIPT]


@pytest.mark.slow
def test_an_interrupt_leaves_what_was_found(root, said, tmp_path):
    """Nothing that was started goes on by itself; the same command goes on with what was missing."""
    toy = tmp_path / "toy"
    shutil.copytree(root, toy)
    results, = toy.glob(".mutation/*/results.tsv")
    lines = results.read_text().splitlines(keepends=True)
    hanging = next(line for line in lines if "\ttimeout\t" in line)
    lines.remove(hanging)
    results.write_text("".join(lines))
    process = subprocess.Popen(command(toy, "--patience", "60"), text=True, stdout=subprocess.PIPE,
                               env=os.environ | {"TMPDIR": str(tmp_path)})
    assert " mutants: " in process.stdout.readline()
    wait_until(lambda: any("test_before" in note.read_text() for note in notes_of_mutants(tmp_path)))
    assert len(processes_of(toy)) == 2
    process.terminate()
    last, _ = process.communicate(timeout=300)
    assert process.returncode == 130 and last.startswith("interrupted: ")
    assert results.read_text() == "".join(lines) and processes_of(toy) == []
    again = mutation(toy)
    assert [result for result, _ in outcomes(again).values()] == ["timeout"]
    assert "caught 8 of 13" in again


def test_the_tests_of_a_copy_import_its_own_packages(tmp_path):
    """Though mutation.py itself is in a package of the same name."""
    for folder in ("tests", "tools/dev"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "toy.py").write_text("import sys\n\n\ndef double(x):\n    return 2 * x\n")
    for name in ("tools/__init__.py", "tools/dev/__init__.py"):
        (tmp_path / name).touch()
    (tmp_path / "tools/dev/own.py").write_text("import toy\n\n\ndef four_times(x):\n"
                                               "    return toy.double(toy.double(x))\n")
    (tmp_path / "tests/test_toy.py").write_text(
        "import sys\nfrom pathlib import Path\n"
        "sys.path.insert(0, str(Path(__file__).resolve().parent.parent))\n"
        "from tools.dev import own\n\ndef test_four_times():\n    assert own.four_times(3) == 12\n")
    found = outcomes(mutation(tmp_path))
    assert found == {"return [2 -> 3] * x": ("caught", "test_four_times")}


def test_tests_that_fail_without_a_change(tmp_path):
    """Nothing counts as caught by them."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "toy.py").write_text("import sys\n\n\ndef double(x):\n    return 2 * x\n")
    (tmp_path / "tests" / "test_toy.py").write_text(
        "import sys\nfrom pathlib import Path\nROOT = Path(__file__).resolve().parent.parent\n"
        "sys.path.insert(0, str(ROOT))\nimport toy\n\ndef test_the_third_time():\n"
        "    with (ROOT / 'times').open('a') as file:\n        file.write('x')\n"
        "    assert toy.double(2) == 4 and len((ROOT / 'times').read_text()) < 3\n")
    done = subprocess.run(command(tmp_path, "--jobs", "1"), capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.startswith("the tests fail without a change: tests/test_toy.py::test_the_third_time")


SOURCE = '''"""Text with 1 < 2."""
triton = None
SIZES = dict(width=8, rate=0.0, deep=True)
if triton:
    DEPTH = 4


class Layer:
    """A layer."""
    size: "1 + 1" = option(3, "text", least=-1)

    def widen(self, by=1) -> "2":
        if not (self.size > 2 and by is not None):
            raise ValueError(f"{by + 1}")
        self.size = self.size + by
        text = "a" + str(by)
        text = text[by:]
        log(text)
        for i in range(self.size):
            continue
        return text
'''


def test_the_changes_of_a_source():
    """All are Python, and another program. What changes texts only, or runs on no CPU, is left alone."""
    mutants = Finder(SOURCE).mutants
    assert sorted((mutant.kind, mutant.function, mutant.change) for mutant in mutants) == sorted([
        ("constant", "SIZES", "SIZES = dict(width=[8 -> 9], rate=0.0, deep=True)"),
        ("constant", "SIZES", "SIZES = dict(width=8, rate=[0.0 -> 1.0], deep=True)"),
        ("constant", "SIZES", "SIZES = dict(width=8, rate=0.0, deep=[True -> False])"),
        ("constant", "Layer.size", 'size: "1 + 1" = option([3 -> 4], "text", least=-1)'),
        ("constant", "Layer.size", 'size: "1 + 1" = option(3, "text", least=-[1 -> 2])'),
        ("sign", "Layer.size", 'size: "1 + 1" = option(3, "text", least=[- -> ]1)'),
        ("constant", "Layer.widen", 'def widen(self, by=[1 -> 2]) -> "2":'),
        ("comparison", "Layer.widen", "if [not -> ](self.size > 2 and by is not None):"),
        ("comparison", "Layer.widen", "if not (self.size > 2 [and -> or] by is not None):"),
        ("comparison", "Layer.widen", "if not (self.size [> -> >=] 2 and by is not None):"),
        ("comparison", "Layer.widen", "if not (self.size > 2 and by [is not -> is] None):"),
        ("off by one", "Layer.widen", "if not (self.size > [2 -> 3] and by is not None):"),
        ("dropped line", "Layer.widen", '[raise ValueError(f"{by + 1}") -> pass]'),
        ("dropped line", "Layer.widen", "[self.size = self.size + by -> pass]"),
        ("sign", "Layer.widen", "self.size = self.size [+ -> -] by"),
        ("dropped line", "Layer.widen", "[text = text[by:] -> pass]"),
        ("off by one", "Layer.widen", "text = text[[by -> (by + 1)]:]"),
        ("dropped line", "Layer.widen", "[log(text) -> pass]"),
        ("off by one", "Layer.widen", "for i in range([self.size -> (self.size + 1)]):"),
        ("dropped line", "Layer.widen", "[continue -> pass]")])
    texts = {SOURCE[:mutant.start] + mutant.text + SOURCE[mutant.end:] for mutant in mutants}
    trees = {ast.dump(ast.parse(text)) for text in texts}
    assert len(trees - {ast.dump(ast.parse(SOURCE))}) == len(mutants)


def test_keys_outlive_changes_elsewhere():
    """And all are different."""
    keys = [mutant.key for mutant in Finder(SOURCE).mutants]
    moved = SOURCE.replace("class Layer", "OTHER = 7\n\n\nclass Layer").replace("log(text)", "print(text)")
    after = {mutant.key for mutant in Finder(moved).mutants}
    assert len(set(keys)) == len(keys)
    assert len(set(keys) - after) == 1      # the line that was dropped


def test_a_draw():
    """Equally many of each kind, as long as there are some; fewer are the first of many; another seed draws
    others."""
    mutants = Finder(SOURCE).mutants
    assert [mutant.kind for mutant in draw(mutants, 10, 0)] == [*KINDS, *KINDS]
    assert draw(mutants, 7, 0) == draw(mutants, 12, 0)[:7] != draw(mutants, 7, 1)
    assert {mutant.key for mutant in draw(mutants, 99, 0)} == {mutant.key for mutant in mutants}
