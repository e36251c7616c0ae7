"""House rules that a machine can check: limits of size, no machine's paths, docstrings, imports."""

import ast
import re
import subprocess
import sys

import pytest

from helpers import ROOT, SCRIPT

# In two parts, so that this file passes its own test; a home of `somebody` is made up.
MACHINE_PATHS = re.compile("/" + r"(root|tmp|Users)/|/" + r"home/(?!somebody/)")
FOLDERS = ("data", "tests", "records")
BESIDE = ("core", "dial", "faults", "kernels", "plan")
SOURCES = [SCRIPT, *(ROOT / f"{name}.py" for name in BESIDE),
           *sorted(path for part in FOLDERS for path in ROOT.glob(part + "/*.py"))]
LEFTOVERS = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")


def repository_files():
    """Every file that git tracks or would track."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("no git repository here")
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def read_text(path):
    """The text of a file, or None if it is no text."""
    raw = path.read_bytes()
    if b"\0" in raw:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def test_limits_of_the_trainer():
    text = SCRIPT.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 1500
    assert len(SCRIPT.read_bytes()) <= 80_000


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_lines_fit_in_110_columns(path):
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    assert [f"{path.name}:{i} has {len(line)}" for i, line in lines if len(line) > 110] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_text_is_clean(path):
    """No tab, no blank at a line's end, one line end at the end, nothing left to do."""
    text = path.read_text(encoding="utf-8")
    assert "\t" not in text and "\r" not in text and text.endswith("\n") and not text.endswith("\n\n")
    assert [i for i, line in enumerate(text.splitlines(), 1) if line != line.rstrip()] == []
    assert LEFTOVERS.findall(text) == []


def test_nothing_left_to_do_and_no_machine_path():
    """In any text file of the repository."""
    for path in repository_files():
        text = read_text(path)
        if text is None:
            continue
        for i, line in enumerate(text.splitlines(), 1):
            place = f"{path.relative_to(ROOT)}:{i}"
            assert not MACHINE_PATHS.search(line), f"{place} holds a path of some machine"
            assert not LEFTOVERS.search(line), f"{place} has something left to do"


def long_functions(tree):
    """(name, docstring) of every public function and method of more than 12 lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            if node.end_lineno - node.lineno + 1 > 12:
                yield node.name, ast.get_docstring(node)


def test_long_functions_of_the_trainer_have_docstrings():
    functions = list(long_functions(ast.parse(SCRIPT.read_text(encoding="utf-8"))))
    assert [name for name, doc in functions if not doc] == [] and len(functions) > 15


def test_classes_of_the_trainer_have_docstrings():
    """Named tuples of a few fields explain themselves in their comments."""
    for node in ast.parse(SCRIPT.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.bases[:1] and ast.unparse(node.bases[0]) == "NamedTuple":
            continue
        if isinstance(node, ast.ClassDef):
            assert ast.get_docstring(node), node.name


def test_sections_are_in_order():
    """DESIGN's order of the file; what researchers edit, 3 to 6, stays under about 600 lines."""
    text = SCRIPT.read_text(encoding="utf-8")
    heads = {int(m[1]): text[:m.start()].count("\n") for m in re.finditer(r"(?m)^# -{10} (\d+) \w", text)}
    assert list(heads) == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert heads[7] - heads[3] <= 600


def test_only_known_modules_are_imported():
    """A copy in a record folder runs alone: the standard library, torch, numpy; two more where needed, and
    what stands beside it, which only some runs load and their folders hold; that needs nothing of it."""
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    top = {name.split(".")[0] for node in tree.body for name in imported(node)}
    everywhere = {name.split(".")[0] for node in ast.walk(tree) for name in imported(node)}
    assert top - sys.stdlib_module_names == {"torch", "numpy"}
    assert everywhere - sys.stdlib_module_names <= {"torch", "numpy", "sentencepiece", "matplotlib", *BESIDE}
    for name in BESIDE:
        tree = ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))
        found = {found.split(".")[0] for node in ast.walk(tree) for found in imported(node)}
        assert found - sys.stdlib_module_names <= {"torch", "numpy", "yaml", "matplotlib"}, name


def imported(node):
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) else []


def test_the_trainer_never_asks_for_the_presets_name():
    """Presets choose numbers; the code asks about numbers."""
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            assert not any(side.strip("'\"") in ("tiny", "golf", "speedrun", "gpt2") for side in sides), sides
