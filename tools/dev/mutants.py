"""All changes of one place of a source that mutation.py draws from, each a Mutant; by Python's ast."""
import ast
import hashlib
import random
import re
from collections import Counter
from typing import Any, NamedTuple

KINDS = ("comparison", "constant", "sign", "off by one", "dropped line")
SWAPS = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
         ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
         ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
         ast.Add: ("+", "-"), ast.Sub: ("-", "+")}
TABLE_STATEMENTS = (ast.Assign, ast.AnnAssign)
COMPOUND = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef, ast.ClassDef)
DROPPED = (ast.AugAssign, ast.Raise, ast.Delete, ast.Continue, ast.Break)


class Mutant(NamedTuple):
    """A change of source[start:end] to text, in bytes."""
    kind: str
    function: str       # dotted, or the name that a statement of the module sets
    lines: range        # of the statement; of a compound one its head
    imported: bool      # run by the import, not by a call
    names: frozenset    # what to look for in tests, and in lines that read a constant
    gpu: bool           # below `if ... on_gpu:`
    start: int
    end: int
    text: str
    change: str         # for people
    key: str



class Finder:
    """Walks a module; what belongs to a place is in `here`: a dict of the fields of a Mutant."""

    def __init__(self, source: str) -> None:
        self.source = source.encode()
        self.line_starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))
        self.mutants = []
        self.keys = Counter()
        self.bound = set()
        here = dict(function="", lines=range(0), imported=True, names=frozenset(), gpu=False)
        self.statements(ast.parse(source).body, here)

    def begin(self, node: ast.stmt | ast.expr) -> int:
        return self.line_starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.stmt | ast.expr) -> int:
        return self.line_starts[node.end_lineno - 1] + node.end_col_offset

    def segment(self, node: ast.stmt | ast.expr) -> str:
        return self.source[self.begin(node):self.end(node)].decode()

    def add(self, here: dict[str, Any], kind: str, start: int, end: int, text: str) -> None:
        """A mutant; `whole` of here are the bounds of the statement that it is in."""
        first, last = here["whole"]
        before = self.source[first:last].decode()
        after = (self.source[first:start] + text.encode() + self.source[end:last]).decode()
        identity = "\n".join((here["function"], " ".join(before.split()), " ".join(after.split())))
        self.keys[identity] += 1
        key = hashlib.sha256(f"{identity}\n{self.keys[identity]}".encode()).hexdigest()[:12]
        line_start = max(first, self.source.rfind(b"\n", 0, start) + 1)
        line_end = min(last, self.source.find(b"\n", end) % (len(self.source) + 1))
        old = self.source[start:end].decode()
        around = self.source[line_start:start].decode(), self.source[end:line_end].decode()
        change = " ".join(f"{around[0]}[{old} -> {text}]{around[1]}".split())
        fields = {name: here[name] for name in ("function", "lines", "imported", "names", "gpu")}
        self.mutants.append(Mutant(kind, start=start, end=end, text=text, change=change, key=key, **fields))

    def statements(self, body: list[ast.stmt], here: dict[str, Any]) -> None:
        for node in body:
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                self.statement(node, here)

    def statement(self, node: Any, here: dict[str, Any]) -> None:
        """Mutants of a statement; of a compound one also those of what is in it."""
        last = node.end_lineno
        end = self.end(node)
        if isinstance(node, COMPOUND):
            last = max(node.lineno, node.body[0].lineno - 1)
            end = self.begin(node.body[0])
        here = here | dict(lines=range(node.lineno, last + 1), whole=(self.begin(node), end))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.definition(node, here)
            return
        if here["imported"] and isinstance(node, TABLE_STATEMENTS):
            target = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            here |= dict(function=f"{here['function']}.{target}".lstrip("."), names=frozenset({target}))
        if self.can_be_dropped(node, here):
            start, end = here["whole"]
            self.add(here, "dropped line", start, end, "pass")
        for target in getattr(node, "targets", []):
            self.bound.add(ast.unparse(target))
        if isinstance(node, ast.AugAssign) and type(node.op) in SWAPS:
            self.swap(node.op, node.target, node.value, here, "sign")
        blocks = [value for _, value in ast.iter_fields(node) if isinstance(value, list)]
        parts = (ast.stmt, ast.ExceptHandler)
        inside = [part for block in blocks for part in block if isinstance(part, parts)]
        for part in ast.iter_child_nodes(node):
            if part not in inside and part is not getattr(node, "annotation", None):
                self.expression(part, here)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "triton":
            return
        for part in inside:
            gpu = isinstance(node, ast.If) and part in node.body and "on_gpu" in ast.unparse(node.test)
            below = here | dict(gpu=here["gpu"] or gpu and "not " not in ast.unparse(node.test))
            self.statements(part.body if isinstance(part, ast.ExceptHandler) else [part], below)

    def definition(self, node: Any, here: dict[str, Any]) -> None:
        """A function or a class."""
        name = f"{here['function']}.{node.name}".lstrip(".")
        here |= dict(function=name, names=frozenset({*name.split(".")} - {"__init__"}))
        if isinstance(node, ast.ClassDef):
            self.statements(node.body, here)
            return
        arguments = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.expression(default, here)
        outside = self.bound
        self.bound = set(arguments)
        self.statements(node.body, here | dict(imported=False))
        self.bound = outside

    def can_be_dropped(self, node: ast.AST, here: dict[str, Any]) -> bool:
        """A line without which the rest would still run, more or less."""
        if here["imported"]:
            return False
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            return isinstance(target, ast.Attribute | ast.Subscript) or ast.unparse(target) in self.bound
        bare_return = isinstance(node, ast.Return) and node.value is None
        return isinstance(node, DROPPED + (ast.Expr,)) or bare_return

    def swap(self, operator: ast.AST, left: ast.expr, right: ast.expr, here: dict[str, Any],
             kind: str) -> None:
        """The operator between two expressions for another."""
        old, new = SWAPS[type(operator)]
        start = self.end(left)
        between = self.source[start:self.begin(right)].decode()
        found = re.search(r"(?<!\w)" + re.escape(old).replace(r"\ ", r"\s+") + r"(?!\w)", between)
        self.add(here, kind, start + found.start(), start + found.end(), new)

    def expression(self, node: ast.AST, here: dict[str, Any]) -> None:
        """Mutants of an expression and its parts."""
        if isinstance(node, ast.JoinedStr):
            return
        if isinstance(node, ast.Compare):
            for operator, left, right in zip(node.ops, [node.left, *node.comparators], node.comparators):
                self.swap(operator, left, right, here, "comparison")
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:]):
                self.swap(node.op, left, right, here, "comparison")
        elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
            texts = [isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str)
                     for side in (node.left, node.right)]
            if not any(texts):
                self.swap(node.op, node.left, node.right, here, "sign")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            kind, word = ("sign", "-") if isinstance(node.op, ast.USub) else ("comparison", "not ")
            self.add(here, kind, self.begin(node), self.begin(node) + len(word), "")
        elif isinstance(node, ast.Constant):
            self.constant(node, here)
        bounds = []
        if isinstance(node, ast.Slice):
            bounds = [node.lower, node.upper]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "range":
            bounds = node.args[:2]
        for bound in bounds:
            if bound is not None and not isinstance(bound, ast.Constant | ast.UnaryOp | ast.Starred):
                text = f"({self.segment(bound)} + 1)"
                self.add(here, "off by one", self.begin(bound), self.end(bound), text)
        keys = {id(value): ast.unparse(key) for key, value in zip(node.keys, node.values) if key} \
            if isinstance(node, ast.Dict) else {}
        for part in ast.iter_child_nodes(node):
            name = part.arg if isinstance(part, ast.keyword) else keys.get(id(part), "").strip("'")
            named = here["imported"] and name
            self.expression(part, here | dict(names=here["names"] | {name}) if named else here)

    def constant(self, node: ast.Constant, here: dict[str, Any]) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add(here, "constant", self.begin(node), self.end(node), str(not value))
        elif isinstance(value, float):
            self.add(here, "constant", self.begin(node), self.end(node), repr(2 * value or 1.0))
        elif isinstance(value, int):
            kind = "constant" if here["imported"] else "off by one"
            self.add(here, kind, self.begin(node), self.end(node), str(value + 1))


def draw(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """As many of each kind as there are; a smaller count is the beginning of a larger one."""
    piles = {kind: [mutant for mutant in mutants if mutant.kind == kind] for kind in KINDS}
    for pile in piles.values():
        random.Random(seed).shuffle(pile)
    drawn = []
    while len(drawn) < count and any(piles.values()):
        for pile in piles.values():
            drawn += pile[:1]
            del pile[:1]
    return drawn[:count]
