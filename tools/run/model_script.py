"""Writes model.py, a recipe's model and load(folder) with torch alone, for ./run.sh record export RUN

As in ./run.sh script, top-level definitions that are not reached, here by load() and log_probs(), are left
out and the rest is kept verbatim; but classes keep only the methods that are asked for. In place of the
recipe's class stands one with those constants of the run that the model depends on.
"""
import ast
import copy
import functools
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from tools.run.script import Part, names_used, parts_of, registry_of, without_lines

LOADER = Path(__file__).resolve().parent / "model_loader.py"
ROOTS = ("load", "log_probs")
CALLED_BY_TORCH = ("forward",)
IMPORTS = (ast.Import, ast.ImportFrom)
ABOUT = '''"""A model of train_gpt's recipe {preset}, from `./run.sh record export RUN`. It needs torch alone:

    from model import load, log_probs
    model = load(".")  # the folder of model.safetensors
    log_probs(model, tokens)  # int64 (B, T) -> log-probabilities of the next token (B, T, V)
"""'''
LOAD = '''
def load(folder):
    """The model in folder/model.safetensors, for log_probs()."""
    tensors = read_safetensors(Path(folder, "model.safetensors"))
    model = {model}({recipe}())
    fill(model, tensors)
    return model.eval()
'''
COUNTS = '    fill_counts(model.counts, tensors["counts.text"], tensors["counts.starts"])\n'


class Piece(NamedTuple):
    """Some lines of a module and what they ask for."""
    first: int  # the first and the last line, counted from 0
    last: int
    names: set[str]  # global names
    attributes: set[str]  # names after a dot
    constants: set[str]  # names after `cfg.` and `self.`, and texts, which may be such names for getattr()


class Definition(NamedTuple):
    """A top-level statement, of a class without its methods."""
    part: Part
    head: Piece
    methods: dict[str, Piece]


class Module(NamedTuple):
    """A file and its definitions."""
    lines: list[str]
    tree: ast.Module
    definitions: list[Definition]


def piece_of(node: ast.AST, first: int, last: int) -> Piece:
    """Piece of a statement."""
    attributes = set()
    constants = set()
    keys = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute):
            attributes.add(part.attr)
            owner = ast.unparse(part.value)
            if owner == "self" or owner.split(".")[-1] == "cfg":
                constants.add(part.attr)
        elif isinstance(part, ast.Subscript):
            keys.add(id(part.slice))
        elif isinstance(part, ast.Constant) and isinstance(part.value, str) and id(part) not in keys:
            constants.add(part.value)
    return Piece(first, last, names_used(node), attributes, constants)


def definition_of(node: ast.AST, part: Part) -> Definition:
    """Definition of a top-level statement."""
    methods = {}
    if isinstance(node, ast.ClassDef):
        before = node.lineno
        rest: list[ast.stmt] = [ast.Pass(lineno=node.lineno, col_offset=0)]
        for member in node.body:
            if isinstance(member, ast.FunctionDef):
                # with what stands between it and the statement before: a blank line, comments, decorators
                methods[member.name] = piece_of(member, before, member.end_lineno - 1)
            else:
                rest.append(member)
            before = member.end_lineno
        node = copy.copy(node)
        node.body = rest
    return Definition(part, piece_of(node, part.first, part.last), methods)


@functools.cache
def module_of(text: str) -> Module:
    """Module of a file's text."""
    tree = ast.parse(text)
    nodes = {node.end_lineno - 1: node for node in tree.body}
    return Module(text.splitlines(), tree, [definition_of(nodes[part.last], part) for part in parts_of(text)])


def by_name(*modules: Module) -> dict[str, list[Definition]]:
    """{name: [Definition]}"""
    found = {}
    for module in modules:
        for definition in module.definitions:
            for name in definition.part.binds:
                found.setdefault(name, []).append(definition)
    return found


class Reach:
    """What load() and log_probs() reach. definitions: {name: [Definition]}. bases: the recipe's class and
    those that it inherits from, whose methods are reached one by one: of two alike the first one's."""
    def __init__(self, definitions: dict[str, list[Definition]], bases: list[str]) -> None:
        self.definitions = definitions
        self.bases = bases
        self.members = {}
        for base in reversed(bases):
            self.members |= definitions[base][0].methods
        self.names = set(ROOTS)
        self.attributes = set()
        self.constants = set()
        size = 0
        while size < self.size():
            size = self.size()
            for piece in self.pieces():
                self.names |= piece.names
                self.attributes |= piece.attributes
                self.constants |= piece.constants

    def size(self) -> int:
        return len(self.names) + len(self.attributes) + len(self.constants)

    def pieces(self) -> list[Piece]:
        """All that is reached so far."""
        found = [*self.recipe_methods().values()]
        for definition in self.kept():
            found.append(definition.head)
            found += [piece for name, piece in definition.methods.items() if self.asks_for(name)]
        return found

    def kept(self) -> list[Definition]:
        """The definitions that are reached, apart from the recipe's classes."""
        names = sorted(self.names - {*self.bases})
        return [definition for name in names for definition in self.definitions.get(name, ())]

    def recipe_methods(self) -> dict[str, Piece]:
        """{name: Piece} of the recipe's methods that are reached."""
        asked = self.attributes & self.constants  # a text alone calls nothing
        return {name: piece for name, piece in self.members.items() if name in asked}

    def asks_for(self, method: str) -> bool:
        """Is this method of another class reached?"""
        return method in self.attributes or method in CALLED_BY_TORCH or method.startswith("__")


def class_named(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def bases_of(tree: ast.Module, recipe: str) -> list[str]:
    """[recipe, the class that it inherits from, the class that this inherits from, ...]"""
    found = [recipe]
    while parents := class_named(tree, found[-1]).bases:
        parent = parents[0]
        if isinstance(parent, ast.Subscript):  # Config[Stage]
            parent = parent.value
        if ast.unparse(parent) in ("ABC", "Generic"):
            break
        found.append(ast.unparse(parent))
    return found


def model_of(tree: ast.Module, recipe: str) -> str:
    """Name of the recipe's model, which make_model() makes."""
    make_model = next(node for node in class_named(tree, recipe).body
                      if isinstance(node, ast.FunctionDef) and node.name == "make_model")
    made = next(node.value for node in ast.walk(make_model) if isinstance(node, ast.Return))
    assert isinstance(made, ast.Call)
    return ast.unparse(made.func)


def recipe_lines(trainer: Module, recipe: str, own: Definition, reach: Reach,
                 constants: dict[str, tuple[Any, str]]) -> list[str]:
    """The lines of a class with the run's constants and the recipe's methods that are reached. own: the
    Definition of the recipe's class, whose comment and docstring stay."""
    lines = trainer.lines
    node = class_named(trainer.tree, recipe)
    docstring = node.body[0]
    out = [line for line in lines[own.part.first:node.lineno - 1] if line.startswith("#")]
    out += [f"class {recipe}:", *lines[docstring.lineno - 1:docstring.end_lineno], ""]
    for name, (value, about) in constants.items():
        if name in reach.constants:
            line = f"    {name} = {value!r}  # {about}"
            if len(line) > 110:
                line = textwrap.fill(about, 110, initial_indent="    # ", subsequent_indent="    # ")
                line += f"\n    {name} = {value!r}"
            out.append(line)
    for piece in reach.recipe_methods().values():
        method = lines[piece.first:piece.last + 1]
        out += method if not method[0].strip() else ["", *method]
    return out


def imports_of(node: ast.Try, names: set[str]) -> str:
    """The imports below a `try` statement whose names are reached, without what it does where they fail."""
    out = []
    for statement in node.body:
        assert isinstance(statement, ast.Import | ast.ImportFrom)
        statement.names = [alias for alias in statement.names
                           if (alias.asname or alias.name.split(".")[0]) in names]
        if statement.names:
            out.append(ast.unparse(statement))
    return "\n".join(out)


def dropped_lines(module: Module, reach: Reach, kept: set[Part]) -> set[int]:
    """Numbers of the module's lines that are not reached. kept: the parts that stay."""
    dropped = set()
    for definition in module.definitions:
        if definition.part not in kept:
            dropped |= set(range(definition.part.first, definition.part.last + 1))
        for name, piece in definition.methods.items():
            if not reach.asks_for(name):
                dropped |= set(range(piece.first, piece.last + 1))
    return dropped


def model_script(preset: str, text: str, constants: dict[str, tuple[Any, str]], has_counts: bool) -> str:
    """The text of model.py. text: of train_gpt.py. constants: {name: (value, meaning)} of the run.
    has_counts: does the file of weights hold a text whose n-grams are counted?"""
    # 1. what is reached
    trainer = module_of(text)
    loader = module_of(LOADER.read_text(encoding="utf-8"))
    recipe = registry_of(trainer.tree)[1][preset]
    load = LOAD.format(model=model_of(trainer.tree, recipe), recipe=recipe)
    if has_counts:
        load = load.replace("    return", f"{COUNTS}    return")
    definitions = by_name(trainer, loader, module_of(load))
    reach = Reach(definitions, bases_of(trainer.tree, recipe))
    own = definitions[recipe][0]
    in_hints = [name for name in reach.bases[1:] if name in reach.names]
    written = [definitions[name][0].part for name in (recipe, *in_hints)]
    kept = {*written, *[definition.part for definition in reach.kept()]}
    # 2. the trainer's part, in which the recipe's class and the docstring are written anew
    lines = [*trainer.lines]
    dropped = dropped_lines(trainer, reach, kept)
    for part in written:
        dropped |= set(range(part.first + 1, part.last + 1))
    dropped |= set(range(1, trainer.tree.body[0].end_lineno))
    for name, part in zip(in_hints, written[1:]):
        lines[part.first] = f"{name} = object  # in type hints: {recipe}, below"
    lines[own.part.first] = "\n".join(recipe_lines(trainer, recipe, own, reach, constants))
    for node in ast.parse(text).body:
        if isinstance(node, ast.Try) and all([isinstance(line, IMPORTS) for line in node.body]):
            lines[node.lineno - 1] = imports_of(node, reach.names)
            dropped |= set(range(node.lineno, node.end_lineno))
    lines[0] = ABOUT.format(preset=preset)
    out = [without_lines(lines, dropped, kept), "# ---------- load"]
    # 3. the loader's, whose imports the trainer has, too
    for definition in loader.definitions:
        part = definition.part
        if part in kept and not loader.lines[part.first].startswith(("import ", "from ")):
            out += ["", *loader.lines[part.first:part.last + 1]]
    return "\n".join(out) + "\n" + load
