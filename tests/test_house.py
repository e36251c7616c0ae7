"""House rules that ruff does not know. Each rule is a function from source code to a list of problems; it is
tried on a planted one, then on the files that it is for."""
import ast
import graphlib
import re
import subprocess
import sys
from functools import cache

import pytest

from helpers import ROOT, SCRIPT, sources
from records.verify.source import packed_line
from tools.run import script

TOOLS = sources("data", "records", "tools")
SOURCES = [SCRIPT, *TOOLS, *sources("tests")]
# In two parts, so that this file passes its own test; a home of `somebody` is made up.
MACHINE_PATHS = re.compile("/" + r"(root|tmp|Users|work)/|/" + r"home/(?!somebody/)")
# Statements that may stand around the trainer
MOST_AROUND = 10_500    # in tools, records and data
MOST_IN_TESTS = 14_500
LEFTOVERS = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")


def name_of(path):
    return str(path.relative_to(ROOT))


# ---------- the rules
@cache
def nodes_of(text):
    """The module of a source and all nodes below it."""
    return list(ast.walk(ast.parse(text)))


def functions_of(text):
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in nodes_of(text) if isinstance(node, kinds)]


def length(node):
    return node.end_lineno - node.lineno + 1


def long_functions(text):
    return [f"{node.name}: {length(node)} lines" for node in functions_of(text) if length(node) > 70]


def without_docstring(text):
    """Functions and classes of more than 12 lines, except main, __init__ and what torch calls with a ctx:
    what they do stands in the docstring of their module or class."""
    found = []
    for node in nodes_of(text):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or length(node) <= 12:
            continue
        if isinstance(node, ast.FunctionDef):
            called_by_torch = [argument.arg for argument in node.args.args[:1]] == ["ctx"]
            if node.name in ("main", "__init__") or called_by_torch:
                continue
        if not ast.get_docstring(node):
            found.append(node.name)
    return found


def runs_text(text):
    """What turns text into code or modules, or reaches for modules by name. model.eval() does not."""
    banned = {"exec", "__import__", "import_module", "importlib", "builtins", "make_dataclass", "sys.modules"}
    found = set()
    for node in nodes_of(text):
        if isinstance(node, ast.Name | ast.Attribute):
            found |= {ast.unparse(node), getattr(node, "attr", "")}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {name.name for name in node.names} | {*imported(node)}
    calls = {node.id for node in nodes_of(text) if isinstance(node, ast.Name)}
    return sorted(found & banned | calls & {"eval"})


def preset_names(text):
    """(the keywords of RECIPES = dict(...), lines on which one stands as a string, apart from the constant
    `preset` of each recipe)"""
    names = set()
    allowed = set()
    for node in nodes_of(text):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RECIPES":
            names |= {keyword.arg for keyword in node.value.keywords}
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "preset":
            allowed |= {*ast.walk(node)}
    return names, [node.lineno for node in nodes_of(text) if isinstance(node, ast.Constant)
                   and node.value in names and node not in allowed]


def asks_for_a_preset(text):
    """Presets choose values; the code asks about values."""
    return [f"line {line}" for line in preset_names(text)[1]]


def foreign_imports(text):
    """What a copy in an empty folder would lack: all but the standard library, torch, numpy, and, not at the
    top level, three that only some runs need, and triton, which a CUDA build of torch brings along."""
    found = []
    top_level = set(nodes_of(text)[0].body)
    for node in nodes_of(text):
        names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        allowed = sys.stdlib_module_names | {"torch", "numpy"}
        if node not in top_level:
            allowed = allowed | {"sentencepiece", "yaml", "triton", "brotli"}
        found += [name for name in names if name.split(".")[0] not in allowed]
    return found


def packed_assignments(text):
    """`a, b = x, y`: tuples on both sides, swaps too."""
    return [f"line {node.lineno}" for node in nodes_of(text)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
            and any(isinstance(target, ast.Tuple) for target in node.targets)]


def path_edits(text):
    """Where sys.path is touched: `python -m` finds our modules."""
    return [f"line {node.lineno}" for node in nodes_of(text) if isinstance(node, ast.Attribute)
            and (ast.unparse(node.value), node.attr) == ("sys", "path")]


def imported(node):
    """The modules that a statement names."""
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


# All names by which a module or a package below these folders could be found if the folder were on the path
BARE = {name for path in TOOLS for name in path.relative_to(ROOT).with_suffix("").parts[1:]} - {"__init__"}
TESTS = {path.stem for path in sources("tests")} | {"tests"}


def bare_imports(text, names=BARE | TESTS):
    """Modules of ours that are not imported from the checkout's root, where a stranger's would be found; and
    tests, which no tool needs."""
    found = []
    for node in nodes_of(text):
        found += [f"line {node.lineno}: {name}" for name in imported(node) if name.split(".")[0] in names]
        if isinstance(node, ast.ImportFrom) and node.level:
            found.append(f"line {node.lineno}: relative")
    return found


# ---------- the parts of the trainer
def arrows(text):
    """What a part of the trainer uses and may not: core no recipe, a recipe no other game. Names are resolved
    as ./run.sh script resolves them. The registry knows all."""
    heads = enumerate(text.splitlines())
    banners = [(line, head) for line, head in heads if head.startswith(script.BANNER)]
    owner = {}
    parts = []
    for part in script.parts_of(text):
        head = [head for line, head in banners if line < part.first][-1].removeprefix(script.BANNER)
        title = head.split(":")[0]
        parts.append((part, title))
        for name in part.binds:
            owner[name] = title
    found = []
    for part, title in parts:
        for name in sorted(part.uses - part.binds):
            its = owner.get(name, title)
            if not may_use(title, its):
                found.append(f"{title}: {sorted(part.binds)} uses {name} of {its}")
    return found


def may_use(title, its):
    """May a section use what another one defines?"""
    registry = "the registry of recipes"
    if its in (title, registry) or title == registry:
        return True
    if its[0].isdigit():  # core
        return True
    # its: a recipe, or what both recipes of a game use
    game = title.split()[0].removesuffix("_plus")
    return game in re.findall(r"\w+", its)


def bare_imports_of_tests(text):
    """Tests import each other."""
    return bare_imports(text, BARE)


# ---------- each on the files that it is for
LONG = "def f():\n" + 70 * "    x = 1\n"
SHORT = "def f():\n" + 11 * "    x = 1\n"
TABLE = 'class C:\n    preset: str = option("tiny")\nRECIPES = dict(tiny=C, golf=C)\n'
PLANTED = [
    (long_functions, LONG.removesuffix("    x = 1\n"), [LONG, "async " + LONG]),
    (without_docstring, SHORT + LONG.replace("f()", "__init__()") + LONG.replace("f()", "f(ctx)"), [
        LONG, SHORT + "    return x\n", LONG.replace("def f()", "class C")]),
    (runs_text, "model.eval()\nre.compile(x)\nimport sys\n", [
        "eval(x)\n", "builtins.exec(x)\n", "sys.modules[x]\n", "from importlib import import_module\n",
        "import importlib\n", "dataclasses.make_dataclass(x)\n", "f = __import__\n"]),
    (asks_for_a_preset, TABLE + "x = 'golf_plus'\n", [
        TABLE + "cfg.preset == 'golf'\n", TABLE + "x in ('golf',)\n", TABLE + "x.startswith('tiny')\n"]),
    (path_edits, "import sys\nsys.argv\n", ["sys.path.insert(0, x)\n", "def f():\n    sys.path += [x]\n"]),
    (bare_imports, "import train_gpt\nfrom data import inputs\nimport records.judge.logs\n", [
        "import inputs\n", "def f():\n    import prepare\n", "from judge import logs\n",
        "from judge.logs import demand\n", "import run.watch\n", "from . import inputs\n",
        "import helpers\n", "from tests.conftest import x\n"]),
    (packed_assignments, "a, b = f()\na = 1, 2\nfor a, b in (1, 2), (3, 4):\n    pass\n", [
        "a, b = 1, 2\n", "a, b = b, a\n", "c = (a, b) = 1, 2\n", "self.a, (b, c) = 1, f()\n"]),
    (foreign_imports, "import os, torch.nn\nfrom numpy import x\ndef f():\n    import yaml\n", [
        "import yaml\n", "import plan\n", "def f():\n    from scipy import linalg\n", "from . import x\n"])]


@pytest.mark.parametrize("rule, fine, bad", PLANTED, ids=[rule.__name__ for rule, _, _ in PLANTED])
def test_the_rules_find_what_they_are_for(rule, fine, bad):
    assert rule(fine) == []
    assert [text for text in bad if not rule(text)] == []


def broken(rule, paths):
    """{file: problems}"""
    found = {name_of(path): rule(path.read_text(encoding="utf-8")) for path in paths}
    return {name: problems for name, problems in found.items() if problems}


@pytest.mark.parametrize("rule, paths", [
    (packed_assignments, SOURCES), (long_functions, [SCRIPT, *TOOLS]), (without_docstring, [SCRIPT, *TOOLS]),
    (bare_imports, [SCRIPT, *TOOLS]), (bare_imports_of_tests, sources("tests"))])
def test_every_source(rule, paths):
    assert len(paths) > 20 and broken(rule, paths) == {}


@pytest.mark.parametrize("place, call, named", [
    ("def softcap(", "TinyModel", "4 techniques: ['softcap'] uses TinyModel of tiny"),
    ("class GolfBlock(", "NgramCounts", "golf: ['GolfBlock'] uses NgramCounts of tiny"),
    ("class GolfBlock(", "depth_dial", "golf: ['GolfBlock'] uses depth_dial of gpt2 and gpt2_plus")])
def test_a_forbidden_arrow_is_named(place, call, named):
    text = SCRIPT.read_text(encoding="utf-8")
    assert text.count(place) == 1
    line = text[text.index(place):].partition("\n")[0]
    assert named in arrows(text.replace(line, f"{line}\n    {call}", 1))


def import_graph(texts):
    """{module: the modules among them that it imports}, also inside functions. texts: {module: source}"""
    graph = {name: set() for name in texts}
    for name, text in texts.items():
        for node in nodes_of(text):
            names = imported(node)
            if isinstance(node, ast.ImportFrom):
                names += [f"{node.module}.{each.name}" for each in node.names]
            graph[name] |= {*names} & {*texts} - {name}
    return graph


def test_no_module_imports_itself_through_others():
    circle = {"a.b": "from a import c", "a.c": "def f():\n    import a.b"}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(import_graph(circle)).prepare()
    texts = {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text() for path in TOOLS}
    graphlib.TopologicalSorter(import_graph(texts)).prepare()


def test_which_programs_touch_the_path_of_modules():
    """Those that are also started by their path put the checkout in the place of their own folder. proxy,
    sample and the leak probe do more for another train_gpt.py, for files that old ones import beside them;
    the launcher's child does what Python would."""
    found = broken(path_edits, [SCRIPT, *TOOLS])
    assert {*found} <= {"data/prepare.py", "records/record.py", "tools/run/proxy.py", "tools/run/sample.py",
                        "tools/run/guard.py", "records/verify/leak_probe.py"}


@pytest.mark.parametrize("folders, most", [
    (("data", "records", "tools"), MOST_AROUND), (("tests",), MOST_IN_TESTS)])
def test_what_stands_around_the_trainer_has_a_ceiling(folders, most):
    """That of scripts is in test_script.py."""
    assert sum(len(script.statement_lines(path.read_text())) for path in sources(*folders)) <= most


def test_the_trainer():
    """One file that runs alone."""
    text = SCRIPT.read_text(encoding="utf-8")
    assert [path.name for path in ROOT.glob("*.py")] == ["train_gpt.py"]
    assert packed_line(text) is None
    assert arrows(text) == []
    assert runs_text(text) + asks_for_a_preset(text) + foreign_imports(text) == []
    assert {"tiny", "golf", "speedrun", "gpt2"} <= preset_names(text)[0]


# Runs in a subprocess: imports each file of argv and prints a line on what that did.
IMPORT = """
import contextlib, importlib.util, io, os, random, signal, sys, threading
import numpy, torch, torch.distributed, torch.nn.attention.flex_attention
paths = sys.argv[1:]
sys.argv = ["script", "--preset=nonsense", "--help"]
done = []

def watch(event, details):
    if event == "open":
        _, mode, flags = details
        if set(mode or "") & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            done.append("opened a file for writing")
    if event.split(".")[0] in ("subprocess", "socket", "shutil") or event in ("os.mkdir", "os.rename"):
        done.append(event)

def state():
    return (list(sys.argv), dict(os.environ), os.getcwd(), torch.get_num_threads(), threading.active_count(),
            torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(), random.getstate(),
            torch.get_rng_state().tolist(), [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)],
            torch.cuda.is_initialized(), torch.distributed.is_initialized())

sys.addaudithook(watch)
for path in paths:
    spec = importlib.util.spec_from_file_location("trainer", path)
    sys.modules["trainer"] = module = importlib.util.module_from_spec(spec)
    before = state()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        spec.loader.exec_module(module)
    if state() != before:
        done.append("changed a setting of the process")
    if printed.getvalue():
        done.append("printed")
    print(os.path.basename(path), *done)
    done.clear()
"""


def test_importing_the_trainer_does_nothing(tmp_path):
    """And what does something is found. Not in a fork: the server of those has imported the trainer."""
    lines = ["print('hello')", "open('x', 'w')", "sys.argv.pop()", "torch.set_num_threads(7)",
             "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"]
    paths = [tmp_path / f"{number}.py" for number in range(len(lines))]
    for path, line in zip(paths, lines):
        path.write_text(f"import sys, torch\nimport torch.distributed as dist\n{line}\n", encoding="utf-8")
    done = subprocess.run([sys.executable, "-B", "-c", IMPORT, SCRIPT, *paths], cwd=tmp_path,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr
    itself, *planted = done.stdout.splitlines()
    assert itself == "train_gpt.py"
    assert [row.partition(" ")[2] for row in planted[:2]] == ["printed", "opened a file for writing"]
    assert all("changed a setting of the process" in row for row in planted[2:]) and len(planted) == 5


def repository_files():
    """Every file that git tracks or would track."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("no git repository here")
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def test_nothing_left_to_do_and_no_machine_path():
    """In any text file of the repository."""
    found = []
    files = repository_files()
    assert SCRIPT in files
    for path in files:
        raw = path.read_bytes()
        if b"\0" in raw:
            continue
        lines = enumerate(raw.decode(errors="replace").splitlines(), 1)
        found += [f"{name_of(path)}:{i}" for i, line in lines
                  if MACHINE_PATHS.search(line) or LEFTOVERS.search(line)]
    assert found == []
