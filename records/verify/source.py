"""What the source of a script shows without running it: packed code, flags of the compiler.

All look at the syntax tree. They find mistakes and lazy tricks, not every way to hide something.
"""
import ast
import re
from functools import cache

RUNNERS = {"exec", "eval", "compile", "FunctionType"}   # what turns text or bytes into code
DECODERS = {"bytes", "bytearray", "chr", "fromhex", "unhexlify", "loads", "translate", "reversed"}
# A script without any of these words runs no text as code
WORDS = re.compile(r"(?<![.\w])(?:exec|eval|compile)\b|marshal|FunctionType|builtins|globals")
DECODER_PARTS = ("decompress", "decode", "a2b_")        # of names such as b85decode


def last_name(node: ast.AST) -> str:
    """zlib.decompress -> decompress; "" for what has no name."""
    return getattr(node, "id", "") or getattr(node, "attr", "")


def is_runner(node: ast.AST, runners: set[str]) -> bool:
    """Is this expression exec, eval or compile of Python, or another name for one of them? torch.compile,
    re.compile and model.eval are not."""
    if isinstance(node, ast.Name):
        return node.id in runners
    owner = None
    name = None
    if isinstance(node, ast.Attribute):                                 # builtins.exec
        owner = node.value
        name = node.attr
    elif isinstance(node, ast.Subscript):                               # globals()["exec"]
        owner = node.value
        name = getattr(node.slice, "value", None)
    elif isinstance(node, ast.Call) and last_name(node.func) == "getattr" and len(node.args) > 1:
        owner = node.args[0]
        name = getattr(node.args[1], "value", None)
    if name not in RUNNERS:
        return False
    return any(word in ast.unparse(owner) for word in ("builtins", "globals", "types"))


def code_argument(call: ast.Call) -> ast.AST | None:
    """What a call of exec and its like would run, or None."""
    named = [keyword.value for keyword in call.keywords if keyword.arg in ("source", "code")]
    return next(iter([*call.args, *named]), None)


def is_decoded(node: ast.AST, decoded: set[str]) -> bool:
    """Does this expression decode something, or use a name that holds decoded text?"""
    for part in ast.walk(node):
        name = last_name(part)
        if name in DECODERS or name in decoded or any(piece in name for piece in DECODER_PARTS):
            return True
        if isinstance(part, ast.Slice) and isinstance(part.step, ast.UnaryOp):      # text[::-1]
            return True
    return False


def parse(source: str) -> ast.Module | None:
    """The syntax tree of a script in which local names are told apart: `text` of the function run is called
    run.text. Raises SyntaxError for what is no Python."""
    tree = ast.parse(source)
    for function in ast.walk(tree):     # outer ones before those in them
        if isinstance(function, (ast.FunctionDef, ast.Lambda)):
            parts = list(ast.walk(function))
            local = {part.arg for part in parts if isinstance(part, ast.arg)}
            names = [part for part in parts if isinstance(part, ast.Name)]
            local |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
            for part in parts:
                if isinstance(part, (ast.Global, ast.Nonlocal)):
                    local -= set(part.names)
            prefix = getattr(function, "name", "lambda")
            for part in parts:
                if isinstance(part, ast.Name) and part.id in local:
                    part.id = f"{prefix}.{part.id}"
                elif isinstance(part, ast.arg) and part.arg in local:
                    part.arg = f"{prefix}.{part.arg}"
    return tree


def assignments(tree: ast.Module) -> list[tuple]:
    """[(names, value)] of everything that gives a name a value: =, :=, for, with, and def by its returns."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            found += [(target, node.value) for target in node.targets]
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value:
            found.append((node.target, node.value))
        elif isinstance(node, (ast.For, ast.comprehension)):
            found.append((node.target, node.iter))
        elif isinstance(node, ast.withitem) and node.optional_vars:
            found.append((node.optional_vars, node.context_expr))
        elif isinstance(node, ast.FunctionDef):
            name = ast.Name(node.name)
            found += [(name, part.value) for part in ast.walk(node)
                      if isinstance(part, (ast.Return, ast.Yield)) and part.value]
    return [({last_name(part) for part in ast.walk(target)} - {""}, value) for target, value in found]


def runners_of(tree: ast.Module) -> set[str]:
    """exec and its like by every name that they have here: of assignments, imports, and functions that pass
    a parameter on to one of them."""
    runners = set(RUNNERS)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("builtins", "types"):
            runners |= {alias.asname or alias.name for alias in node.names if alias.name in RUNNERS}
    given = assignments(tree)
    functions = [(node.name, node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    functions += [(name, value) for names, value in given for name in names if isinstance(value, ast.Lambda)]
    size = 0
    while size < len(runners):      # until no further name turns out to be one
        size = len(runners)
        for names, value in given:
            if is_runner(value, runners):
                runners |= names
        for name, function in functions:
            parameters = {argument.arg for argument in function.args.args}
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and is_runner(call.func, runners):
                    used = {last_name(part) for part in ast.walk(code_argument(call) or call)}
                    if used & parameters:
                        runners.add(name)
    return runners


@cache
def packed_line(source: str) -> int | None:
    """The line on which decoded text is run as code, exec(zlib.decompress(...)) in any of its usual forms, or
    None. Raises SyntaxError for what is no Python."""
    if not WORDS.search(source):
        return None
    tree = parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in calls:
        if last_name(call.func) == "loads" and last_name(getattr(call.func, "value", None)) == "marshal":
            return call.lineno
    runners = runners_of(tree)
    calls = [call for call in calls if is_runner(call.func, runners) and code_argument(call)]
    if not calls:
        return None
    given = assignments(tree)
    decoded = set()
    size = -1
    while size < len(decoded):      # until no further name turns out to hold decoded text
        size = len(decoded)
        for names, value in given:
            if not names <= decoded and is_decoded(value, decoded):
                decoded |= names
    lines = [call.lineno for call in calls if is_decoded(code_argument(call), decoded)]
    return min(lines, default=None)


def line_of_file(source: str) -> int | None:
    """The line on which the text of another file is run as code, or None. Raises SyntaxError for what is no
    Python."""
    if not WORDS.search(source):
        return None
    tree = parse(source)
    runners = runners_of(tree)
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and is_runner(call.func, runners) and code_argument(call):
            parts = [last_name(part) for part in ast.walk(code_argument(call))]
            if {"open", "read_text", "read_bytes"} & set(parts):
                return call.lineno
    return None


def compiler_flags(source: str) -> list[str]:
    """What a script sets of torch's compiler beyond dynamic and fullgraph, as sentences; settings of its code
    for CPUs don't count. Raises SyntaxError for what is no Python."""
    tree = ast.parse(source)
    found = []
    compilers = {"torch.compile"}       # by whatever name
    for_cpus = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            compilers |= {alias.asname or alias.name for alias in node.names if alias.name == "compile"}
        elif isinstance(node, ast.Import):
            compilers |= {f"{alias.asname}.compile" for alias in node.names if alias.name == "torch"}
        if isinstance(node, ast.ImportFrom) and node.module == "torch._inductor.cpu_vec_isa":
            for_cpus |= {*ast.walk(node)}
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch._inductor.config.cpp."):
            for_cpus |= {*ast.walk(node)}
    for node in ast.walk(tree):
        if node in for_cpus:
            continue
        for key in ("id", "attr", "name", "module", "value"):
            text = getattr(node, key, None)
            if text == "TORCHINDUCTOR_CACHE_DIR":       # a folder
                continue
            if isinstance(text, str) and ("_inductor" in text or "TORCHINDUCTOR" in text):
                found.append(f"line {getattr(node, 'lineno', '?')}: {text[:60]!r}")
        if isinstance(node, ast.Call):
            called = {ast.unparse(part) for part in (node.func, *node.args[:1])}    # partial(torch.compile)
            flags = [word.arg or "**" for word in node.keywords if word.arg not in ("dynamic", "fullgraph")]
            if flags and called & compilers:
                found.append(f"line {node.lineno}: torch.compile with {', '.join(flags)}")
    return found
