"""Prints train_gpt.py with one recipe only: ./run.sh script PRESET

    ./run.sh script --reach             how many statements each recipe's script has, and the whole file
    ./run.sh script --reach PRESET      the same by section of its script

Top-level definitions that the recipe does not reach are left out; the rest is kept verbatim, comments
included. Only the registry of recipes and the docstring are edited. The default preset is that recipe. The
script trains bit-identically to the whole file, is a legal script of a record, and its bytes are what golf
counts.
"""
import ast
import dis
import sys
import types
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).resolve().parents[2] / "train_gpt.py"
BANNER = "# ---------- "
ASKED_FOR = ("load_config", "load_model", "log_probs")  # by other programs, the leak probe among them


class Part(NamedTuple):
    """A top-level statement with the comment right above it."""
    first: int  # its first and last line, counted from 0
    last: int
    binds: frozenset[str]  # names that it defines
    uses: frozenset[str]  # names that it reads


def names_bound(node: ast.AST) -> set[str]:
    """Names that a statement defines at the top level, also below `if`, `with` and `try`."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return {target.id for target in ast.walk(node)
                if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)}
    found = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            found |= names_bound(child)
    return found


def names_used(node: ast.stmt) -> set[str]:
    """Global names that a statement reads, in functions and classes of it, too. Compiling it tells them from
    local variables of the same name."""
    waiting = [compile(ast.Module([node], []), "train_gpt.py", "exec")]
    found = set()
    while waiting:
        code = waiting.pop()
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
                found.add(step.argval)
        waiting += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return found


def parts_of(text: str) -> list[Part]:
    """[Part] of a module, without its docstring."""
    lines = text.splitlines()
    parts = []
    end = 0
    for node in ast.parse(text).body:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1
        while first > end and lines[first - 1].startswith("#") and not lines[first - 1].startswith(BANNER):
            first -= 1
        end = node.end_lineno
        if not isinstance(node, ast.Expr):
            parts.append(Part(first, end - 1, frozenset(names_bound(node)), frozenset(names_used(node))))
    return parts


def reached(parts: list[Part]) -> set[Part]:
    """The parts that run when the module does, those that define nothing; what other programs ask for; and
    whatever these reach."""
    owners = {}
    for part in parts:
        for name in part.binds:
            owners.setdefault(name, []).append(part)
    kept = set()
    waiting = [part for part in parts if not part.binds or part.binds & {*ASKED_FOR}]
    while waiting:
        part = waiting.pop()
        if part in kept:
            continue
        kept.add(part)
        for name in part.uses:
            waiting += owners.get(name, [])
    return kept


def without_unreached(text: str) -> str:
    """The module's text less what nothing reaches."""
    parts = parts_of(text)
    kept = reached(parts)
    dropped = set()
    for part in parts:
        if part not in kept:
            dropped |= set(range(part.first, part.last + 1))
    return without_lines(text.splitlines(), dropped, kept)


def without_lines(lines: list[str], dropped: set[int], kept: set[Part]) -> str:
    """The text of lines less those whose numbers are dropped. kept: the parts that stay. A banner goes with
    the last part of its section."""
    banners = [i for i, line in enumerate(lines) if line.startswith(BANNER)]
    for start, end in zip(banners, [*banners[1:], len(lines)]):
        if not any(start < part.first < end for part in kept):
            # the section is empty: its banner and its comments go, too
            dropped = dropped | set(range(start, end))
    out = []
    for i, line in enumerate(lines):
        blank = not line.strip()
        if i in dropped or blank and out and not out[-1].strip():
            continue  # of several blank lines around a gap one stays
        out.append(line)
    return "\n".join(out).rstrip() + "\n"


def registry_of(tree: ast.Module) -> tuple[ast.Assign, dict[str, str]]:
    """The statement that makes the registry of recipes, and {preset: name of its class}."""
    registry = next(node for node in tree.body if isinstance(node, ast.Assign)
                    and ast.unparse(node.targets[0]) == "RECIPES")
    assert isinstance(registry.value, ast.Call)     # dict(golf=Golf, ...)
    return registry, {str(keyword.arg): ast.unparse(keyword.value) for keyword in registry.value.keywords}


def with_one_recipe(text: str, preset: str) -> str:
    """The module's text with a registry and a docstring of that preset alone. Raises SystemExit."""
    tree = ast.parse(text)
    lines = text.splitlines()
    registry, recipes = registry_of(tree)
    if preset not in recipes:
        raise SystemExit(f"script: {preset!r} is none of {', '.join(recipes)}")
    lines[registry.lineno - 1:registry.end_lineno] = [f"RECIPES = dict({preset}={recipes[preset]})"]
    docstring = tree.body[0]
    about = lines[docstring.lineno - 1:docstring.end_lineno]
    others = []
    for name in recipes:
        if name != preset:
            others += [f"--preset={name} ", f" {name}: "]
    about = [line for line in about if not any(other in line for other in others)]
    end = '"""' if len(about) == 1 else ""
    about[0] = f'"""train_gpt: the recipe {preset} alone, made by `./run.sh script {preset}`.{end}'
    lines[docstring.lineno - 1:docstring.end_lineno] = about
    return "\n".join(lines) + "\n"


def script(preset: str, text: str) -> str:
    """The text of a script with that recipe only. text: of train_gpt.py."""
    return without_unreached(with_one_recipe(text, preset))


def statement_lines(text: str) -> list[int]:
    """The first line of each statement, docstrings among them: what neither comments nor packing change."""
    return [node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]


def print_reach(text: str) -> None:
    for preset in registry_of(ast.parse(text))[1]:
        print(f"{len(statement_lines(script(preset, text))):6}  {preset}")
    print(f"{len(statement_lines(text)):6}  train_gpt.py")


def print_sections(text: str) -> None:
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(BANNER)]
    for start, end in zip(starts, [*starts[1:], len(lines)]):
        count = sum([start < line <= end for line in statement_lines(text)])
        print(f"{count:6}  {lines[start].removeprefix(BANNER)}")


def main() -> None:
    words = sys.argv[1:]
    text = SOURCE.read_text(encoding="utf-8")
    if words == ["--reach"]:
        print_reach(text)
    elif len(words) == 2 and words[0] == "--reach":
        print_sections(script(words[1], text))
    elif len(words) == 1:
        print(script(words[0], text), end="")
    else:
        raise SystemExit("script: one recipe is wanted: ./run.sh script PRESET")


if __name__ == "__main__":
    main()
