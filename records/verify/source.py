"""What the source of a script shows without running it: packed code, flags of the compiler.

All look at the syntax tree. They find mistakes and lazy tricks, not every way to hide something.
"""
import ast
import re
from functools import cache

RUNNERS = {"exec", "eval", "compile", "FunctionType"}       # what turns text or bytes into code
HOMES = {"builtins", "__builtins__", "globals", "types"}    # where else they are found
DECODERS = {"bytes", "bytearray", "chr", "fromhex", "unhexlify", "loads", "translate", "reversed"}
DECODER_PARTS = ("decompress", "decode", "a2b_")            # of names such as b85decode
READERS = {"open", "read_text", "read_bytes"}
# What a script may say of torch's compiler: how it makes code for CPUs, and where its files go
FOR_CPUS = re.compile(r"torch\._inductor\.(config\.cpp\b|cpu_vec_isa)|TORCHINDUCTOR_CACHE_DIR")


def names_in(node: ast.AST) -> set[str]:
    """All names and attributes in an expression: {"zlib", "decompress"} of zlib.decompress."""
    return {getattr(part, "id", "") or getattr(part, "attr", "") for part in ast.walk(node)} - {""}


def is_runner(node: ast.AST, runners: set[str]) -> bool:
    """Is this exec, eval or compile of Python, by a name of these or out of builtins? torch.compile,
    re.compile and model.eval are not."""
    if isinstance(node, ast.Name):
        return node.id in runners
    words = set()
    if isinstance(node, ast.Attribute):                                 # builtins.exec
        words = {node.attr}
    elif isinstance(node, ast.Subscript) or isinstance(node, ast.Call) and "getattr" in names_in(node.func):
        # globals()["exec"], getattr(builtins, "exec")
        words = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
    return bool(words & RUNNERS and names_in(node) & HOMES)


def assignments(tree: ast.Module) -> list[tuple[set[str], ast.AST]]:
    """[(names, value)] of everything that gives names a value: =, :=, for, with, and def by its returns."""
    found: list[tuple[set[str], ast.AST]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            returned = [part for part in ast.walk(node) if isinstance(part, ast.Return | ast.Yield)]
            found += [({node.name}, part) for part in returned]
        target = getattr(node, "target", None) or getattr(node, "optional_vars", None)
        values = [getattr(node, key, None) for key in ("value", "iter", "context_expr")]
        value = next(filter(None, values), None)
        targets = getattr(node, "targets", [target])
        if value and targets[0]:
            found.append((set().union(*map(names_in, targets)), value))
    return found


def runs_of_text(tree: ast.Module) -> list[tuple[int, set[str]]]:
    """[(line, names in what is run)] of each call of exec and its like, of names for these, and of functions
    that pass a parameter on to them."""
    runners = set(RUNNERS)
    for names, value in assignments(tree):
        if any(is_runner(part, RUNNERS) for part in ast.walk(value) if not isinstance(value, ast.Call)):
            runners |= names
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in HOMES:
            runners |= {alias.asname or alias.name for alias in node.names if alias.name in RUNNERS}
        if isinstance(node, ast.FunctionDef):
            parameters = {argument.arg for argument in node.args.args}
            calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
            if any(is_runner(call.func, RUNNERS) and what_is_run(call) & parameters for call in calls):
                runners.add(node.name)
    return [(node.lineno, what_is_run(node)) for node in ast.walk(tree)
            if isinstance(node, ast.Call) and is_runner(node.func, runners)]


def what_is_run(call: ast.Call) -> set[str]:
    """The names in the code that a call would run; "[::-1]" for text that is turned around."""
    named = [keyword.value for keyword in call.keywords if keyword.arg in ("source", "code")]
    code = [*call.args[:1], *named]
    turned = any(isinstance(part, ast.Slice) and part.step for one in code for part in ast.walk(one))
    return set().union(*map(names_in, code)) | ({"[::-1]"} if turned else set())


def is_decoded(names: set[str]) -> bool:
    """Does an expression of these names decode something?"""
    by_part = any(piece in name for name in names for piece in DECODER_PARTS)
    return by_part or bool(names & {*DECODERS, "[::-1]"})


@cache
def packed_line(source: str) -> int | None:
    """The line on which decoded text is run as code, exec(zlib.decompress(...)) in any of its usual forms, or
    None. Raises SyntaxError for what is no Python."""
    tree = ast.parse(source)
    runs = runs_of_text(tree)
    decoded = {name for names, value in assignments(tree) if is_decoded(names_in(value)) for name in names}
    return min([line for line, names in runs if names & decoded or is_decoded(names)], default=None)


def line_of_file(source: str) -> int | None:
    """The line on which the text of another file is run as code, or None. Raises SyntaxError for what is no
    Python."""
    return next((line for line, names in runs_of_text(ast.parse(source)) if names & READERS), None)


def compiler_flags(source: str) -> list[str]:
    """What a script sets of torch's compiler beyond dynamic and fullgraph, as sentences; settings of its code
    for CPUs don't count. Raises SyntaxError for what is no Python."""
    tree = ast.parse(source)
    lines = [FOR_CPUS.sub("", line) for line in ast.unparse(tree).splitlines()]     # without comments
    found = [f"sets {line.strip()[:60]!r}" for line in lines if re.search("_inductor|TORCHINDUCTOR", line)]
    compilers = {"torch.compile"}       # by whatever name
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            compilers |= {alias.asname or alias.name for alias in node.names if alias.name == "compile"}
        elif isinstance(node, ast.Import):
            compilers |= {f"{alias.asname}.compile" for alias in node.names if alias.name == "torch"}
    for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        called = {ast.unparse(part) for part in (call.func, *call.args[:1])}    # partial(torch.compile)
        flags = [word.arg or "**" for word in call.keywords if word.arg not in ("dynamic", "fullgraph")]
        if flags and called & compilers:
            found.append(f"line {call.lineno}: torch.compile with {', '.join(flags)}")
    return found
