"""House rules that a machine can check. Each rule is a function from source code to a list of problems; it is
tried on a planted one, then on the files that it is for."""
import ast
import io
import re
import subprocess
import sys
import tokenize
from functools import cache

import pytest

from helpers import ROOT, SCRIPT, sources
from records.verify.source import packed_line
from tools.run import script

SECTIONS = ["imports", "run constants, flags, checks", "techniques", "optimizer", "schedules", "data",
            "evaluation", "artifact", "checkpoints", "fast kernels", "ranks and log",
            "warmup, train, main", "recipes", "start"]  # from 2 on, in the order in which data flow
TOOLS = sources("data", "records", "tools")
SOURCES = [SCRIPT, *TOOLS, *sources("tests")]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("records/*.md"),
                *ROOT.glob("records/rules/*.md"), *ROOT.glob(".github/**/*.md")])
# In two parts, so that this file passes its own test; a home of `somebody` is made up.
MACHINE_PATHS = re.compile("/" + r"(root|tmp|Users|work)/|/" + r"home/(?!somebody/)")
# Statements that may stand around the trainer: 2 % above what is reached
MOST_AROUND = 13_120    # in tools, records and data
MOST_IN_TESTS = 18_690
LEFTOVERS = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")


def name_of(path):
    return str(path.relative_to(ROOT))


# ---------- the rules
def long_lines(text):
    """Over 110 columns."""
    return [f"line {i}: {len(line)} columns" for i, line in enumerate(text.split("\n"), 1) if len(line) > 110]


def untidy_text(text):
    """Tabs, blanks at the end of a line or of the file, things left to do."""
    lines = text.split("\n")
    found = [f"line {i}: blanks at its end" for i, line in enumerate(lines, 1) if line != line.rstrip()]
    found += [f"line {i}: left to do" for i, line in enumerate(lines, 1) if LEFTOVERS.search(line)]
    if "\t" in text:
        found.append("a tab")
    if not text.endswith("\n") or text.endswith("\n\n"):
        found.append("the end is not one line end")
    return found


def odd_indentation(text):
    """Blocks that are not 4 spaces further in than what they belong to."""
    depth = 0
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.INDENT:
            depth += 1
            if token.string != 4 * depth * " ":
                found.append(f"line {token.start[0]}")
        depth -= token.type == tokenize.DEDENT
    return found


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
    banned = {"eval", "exec", "__import__", "import_module", "make_dataclass"}
    found = []
    for node in nodes_of(text):
        if isinstance(node, ast.Name) and node.id in banned:
            found.append(node.id)
        elif isinstance(node, ast.alias) and node.name in banned | {"importlib", "builtins"}:
            found.append(node.name)
        elif isinstance(node, ast.ImportFrom) and node.module in ("sys", "importlib", "builtins"):
            found.append(node.module)
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if (owner, node.attr) == ("sys", "modules") or node.attr in banned - {"eval"}:
                found.append(f"{owner}.{node.attr}")
    return found


def recipe_names(nodes):
    """The keywords of RECIPES = dict(...), where a module has that."""
    for node in nodes[0].body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RECIPES":
            return {keyword.arg for keyword in node.value.keywords}
    return set()


def preset_names(text):
    """(names, lines on which one stands as a string, apart from the constant `preset` of each recipe)"""
    nodes = nodes_of(text)
    names = recipe_names(nodes)
    allowed = set()
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "preset":
            allowed |= {id(part) for part in ast.walk(node)}
    lines = [node.lineno for node in nodes if isinstance(node, ast.Constant) and node.value in names
             and id(node) not in allowed]
    return names, lines


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


def is_of_a_program(node):
    """`if __name__ == "__main__":`"""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def path_edits(nodes):
    return [f"line {node.lineno}: sys.path" for node in nodes if isinstance(node, ast.Attribute)
            and (ast.unparse(node.value), node.attr) == ("sys", "path")]


# How a program begins that is also started by its path: the modules of its checkout come first, and its own
# folder is no place for modules
HEAD = "sys.path[:] = [str(ROOT), *[folder for folder in sys.path if folder != str(HERE)]]"


def head_of(text):
    """The first HEAD of a program; None where there is none."""
    programs = [node for node in nodes_of(text)[0].body if is_of_a_program(node)]
    lines = [line for program in programs for line in program.body if ast.unparse(line) == HEAD]
    return lines[0] if lines else None


def paths_beside_a_program(text):
    """Edits of sys.path, but for the HEAD of a program: a module is looked for where its program says."""
    head = head_of(text)
    allowed = set(ast.walk(head)) if head else set()
    return path_edits([node for node in nodes_of(text) if node not in allowed])


def imported(node):
    """The modules that a statement names."""
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


# All names by which a module or a package below these folders could be found if the folder were on the path
BARE = {name for path in TOOLS for name in path.relative_to(ROOT).with_suffix("").parts[1:]} - {"__init__"}


def bare_imports(text):
    """Modules of ours that are not imported from the checkout's root, where a stranger's would be found."""
    found = []
    for node in nodes_of(text):
        found += [f"line {node.lineno}: {name}" for name in imported(node) if name.split(".")[0] in BARE]
        if isinstance(node, ast.ImportFrom) and node.level:
            found.append(f"line {node.lineno}: relative")
    return found


def acts_when_imported(text):
    """Statements of a module's top level that do something: a call by itself, a loop; an edit of sys.path
    anywhere."""
    found = []
    for node in nodes_of(text)[0].body:
        words = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Expr | ast.For | ast.While | ast.With | ast.Delete) and not words:
            found.append(f"line {node.lineno}")
    return found + path_edits(nodes_of(text))


def imports_tests(text):
    """Modules of tests/ that a source imports."""
    names = []
    for node in nodes_of(text):
        if isinstance(node, ast.Import):
            names += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    ours = {path.stem for path in sources("tests")} | {"tests"}
    return [name for name in names if name.split(".")[0] in ours]


def sections(text):
    """Where the sections of the trainer depart from SECTIONS."""
    heads = re.findall(r"(?m)^# -{10} (\d+) (.*)$", text)
    wanted = [(str(number), title) for number, title in enumerate(SECTIONS, 2)]
    same = len(heads) == len(wanted) and all(
        number == want and title.startswith(words) for (number, title), (want, words) in zip(heads, wanted))
    return [] if same else [f"{heads} instead of {wanted}"]


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


def of_one_game(text):
    """Definitions of the trainer's core that the recipes of one game alone reach: these stand before them."""
    presets = recipe_names(nodes_of(text))
    games = {}
    for preset in presets:
        for part in script.reached(script.parts_of(script.with_one_recipe(text, preset))):
            for name in part.binds:
                games.setdefault(name, set()).add(preset.removesuffix("_plus"))
    heads = [(line, head) for line, head in enumerate(text.splitlines()) if head.startswith(script.BANNER)]
    found = []
    for part in script.parts_of(text):
        title = [head for line, head in heads if line < part.first][-1].removeprefix(script.BANNER)
        if title[0].isdigit() and title[:2] != "2 ":  # no import
            found += [name for name in sorted(part.binds) if len(games.get(name, ())) == 1]
    return found


# ---------- each on the files that it is for
LONG = "def f():\n" + 70 * "    x = 1\n"
SHORT = "def f():\n" + 11 * "    x = 1\n"
TABLE = 'class C:\n    preset: str = option("tiny")\nRECIPES = dict(tiny=C, golf=C)\n'
PLANTED = [
    (long_lines, "x = '" + 104 * "-" + "'\n", ["x = '" + 105 * "-" + "'\n"]),
    (untidy_text, "x = 1\n", ["x = 1 \n", "x = 1\n\n", "x =\t1\n", "x = 1  # TO" + "DO\n", "x = 1"]),
    (odd_indentation, "if x:\n    y = (1,\n  2)\n", ["if x:\n  y = 1\n", "if x:\n    if y:\n      z = 1\n"]),
    (long_functions, LONG.removesuffix("    x = 1\n"), [LONG, "async " + LONG]),
    (without_docstring, SHORT + LONG.replace("f()", "__init__()") + LONG.replace("f()", "f(ctx)"), [
        LONG, SHORT + "    return x\n", LONG.replace("def f()", "class C")]),
    (runs_text, "model.eval()\nre.compile(x)\nimport sys\n", [
        "eval(x)\n", "builtins.exec(x)\n", "sys.modules[x]\n", "from importlib import import_module\n",
        "import importlib\n", "dataclasses.make_dataclass(x)\n", "f = __import__\n",
        "from sys import modules\n"]),
    (asks_for_a_preset, TABLE + "x = 'golf_plus'\n", [
        TABLE + "cfg.preset == 'golf'\n", TABLE + "x in ('golf',)\n", TABLE + "x.startswith('tiny')\n"]),
    (paths_beside_a_program, f"if __name__ == '__main__':\n    {HEAD}\nimport y\nprint(y)\n", [
        "sys.path.insert(0, x)\n", "def f():\n    sys.path += [x]\n", f"{HEAD}\n",
        "if __name__ == '__main__':\n    sys.path.insert(0, str(ROOT))\n",
        2 * f"if __name__ == '__main__':\n    {HEAD}\n"]),
    (bare_imports, "import train_gpt\nfrom data import inputs\nimport records.judge.runs\n", [
        "import inputs\n", "def f():\n    import prepare\n", "from judge import runs\n",
        "from judge.runs import demand\n", "import run.watch\n", "from . import inputs\n"]),
    (packed_assignments, "a, b = f()\na = 1, 2\nfor a, b in (1, 2), (3, 4):\n    pass\n", [
        "a, b = 1, 2\n", "a, b = b, a\n", "c = (a, b) = 1, 2\n", "self.a, (b, c) = 1, f()\n"]),
    (acts_when_imported, "'words'\nimport x\nX = f()\nif X:\n    Y = 1\ndef g():\n    h()\n", [
        "f()\n", "for x in y:\n    pass\n", "def f():\n    sys.path.insert(0, x)\n", "sys.path += [x]\n"]),
    (imports_tests, "import helpful\nfrom records import x\n", [
        "import helpers\n", "def f():\n    from test_house import x\n", "from tests.conftest import x\n"]),
    (foreign_imports, "import os, torch.nn\nfrom numpy import x\ndef f():\n    import yaml\n", [
        "import yaml\n", "import plan\n", "def f():\n    from scipy import linalg\n", "from . import x\n"])]


@pytest.mark.parametrize("rule, fine, bad", PLANTED, ids=[rule.__name__ for rule, _, _ in PLANTED])
def test_the_rules_find_what_they_are_for(rule, fine, bad):
    assert rule(fine) == []
    assert [text for text in bad if not rule(text)] == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_source(path):
    text = path.read_text(encoding="utf-8")
    assert untidy_text(text) + long_lines(text) + odd_indentation(text) == []
    assert packed_line(text) is None


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_page(path):
    """Whose tables and transcripts may be wider than code."""
    assert untidy_text(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", [SCRIPT, *TOOLS], ids=name_of)
def test_functions_are_short_and_explained(path):
    text = path.read_text(encoding="utf-8")
    assert long_functions(text) + without_docstring(text) == []


@pytest.mark.parametrize("place, call, named", [
    ("def softcap(", "TinyModel", "4 techniques: ['softcap'] uses TinyModel of tiny"),
    ("class GolfBlock(", "NgramCounts", "golf: ['GolfBlock'] uses NgramCounts of tiny"),
    ("class GolfBlock(", "depth_dial", "golf: ['GolfBlock'] uses depth_dial of gpt2 and gpt2_plus")])
def test_a_forbidden_arrow_is_named(place, call, named):
    text = SCRIPT.read_text(encoding="utf-8")
    assert text.count(place) == 1
    line = text[text.index(place):].partition("\n")[0]
    assert named in arrows(text.replace(line, f"{line}\n    {call}", 1))


def test_the_core_serves_several_games():
    assert of_one_game(SCRIPT.read_text(encoding="utf-8")) == []


@pytest.mark.slow
def test_what_one_game_alone_uses_is_named():
    text = SCRIPT.read_text(encoding="utf-8")
    place = "# ---------- 5 optimizer"
    line = "def depth_dial(" + text.partition("def depth_dial(")[2].partition("\n")[0]
    for planted in (place, line):
        assert text.count(planted) == 1
    planted = text.replace(place, f"def halve(depth: int) -> int:\n    return depth // 2\n\n{place}")
    assert of_one_game(planted.replace(line, f"{line}\n    halve(2)")) == ["halve"]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_one_assignment_a_line(path):
    assert packed_assignments(path.read_text(encoding="utf-8")) == []


def test_programs_say_where_modules_are():
    """The three that are also started by their path do, in one place each; `python -m` does for the others.
    What proxy and the leak probe do for another train_gpt.py, for files that old ones import
    beside them, and what the launcher's child does as Python would, apart."""
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in TOOLS}
    found = {name: paths_beside_a_program(text) for name, text in texts.items()}
    known = {"tools/run/proxy.py": 1, "tools/run/guard.py": 2, "records/verify/leak_probe.py": 1}
    assert {name: len(found.pop(name)) for name in known} == known
    assert not any(found.values()), found
    assert {name for name, text in texts.items() if head_of(text)} == {
        "data/prepare.py", "records/record.py", "tools/run/proxy.py"}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_module_of_ours_by_a_bare_name(path):
    assert bare_imports(path.read_text(encoding="utf-8")) == []


def test_modules_of_records_do_nothing_when_imported():
    """What the leak probe does for companions of old scripts apart. Nor does any tool need the tests."""
    packages = sources("records")
    assert {path.parent.name for path in packages} == {"records", "verify", "judge", "foreign", "show"}
    packages.remove(ROOT / "records/record.py")
    found = {name_of(path): acts_when_imported(path.read_text(encoding="utf-8")) for path in packages}
    (companions,) = found.pop("records/verify/leak_probe.py")
    assert companions.endswith("sys.path") and not any(found.values()), found
    found = {name_of(path): imports_tests(path.read_text(encoding="utf-8")) for path in TOOLS}
    assert not any(found.values()), found


@pytest.mark.parametrize("folders, most", [
    (("data", "records", "tools"), MOST_AROUND), (("tests",), MOST_IN_TESTS)])
def test_what_stands_around_the_trainer_has_a_ceiling(folders, most):
    """That of scripts is in test_script.py."""
    assert sum(len(script.statement_lines(path.read_text())) for path in sources(*folders)) <= most


def test_the_trainer():
    """One file, its sections in order, that runs alone."""
    text = SCRIPT.read_text(encoding="utf-8")
    assert [path.name for path in ROOT.glob("*.py")] == ["train_gpt.py"]
    assert sections(text) == [] != sections(text.replace("# ---------- 7 data", "# ---------- 7 tokens"))
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
