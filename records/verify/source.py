"""What the source of a script shows without running it: packed code, flags of the compiler.

All look at the syntax tree. They find mistakes and lazy tricks, not every way to hide something.
"""
import ast
import re

RUNNERS = {"exec", "eval", "compile"}               # what turns text or bytes into code
HOMES = {"builtins", "__builtins__", "FunctionType"}        # other ways to it
DECODERS = {"bytes", "bytearray", "chr", "fromhex", "unhexlify", "loads", "translate", "reversed"}
DECODER_PARTS = ("decompress", "decode", "a2b_")            # of names such as b85decode
READERS = {"open", "read_text", "read_bytes"}
# What a script may say of torch's compiler: how it makes code for CPUs, and where its files go
FOR_CPUS = re.compile(r"torch\._inductor\.(config\.cpp\b|cpu_vec_isa)|TORCHINDUCTOR_CACHE_DIR")


def names_in(node: ast.AST) -> set[str]:
    """All names and attributes in an expression: {"zlib", "decompress"} of zlib.decompress."""
    return {getattr(part, "id", "") or getattr(part, "attr", "") for part in ast.walk(node)} - {""}


def runs_of_text(tree: ast.Module) -> list[tuple[int, set[str]]]:
    """[(line, names in what is run)] of each call of exec, eval or compile of Python; torch.compile,
    re.compile and model.eval are not."""
    found = []
    for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        by_name = isinstance(call.func, ast.Name) and call.func.id in RUNNERS
        if by_name or names_in(call.func) & HOMES:
            found.append((call.lineno, set().union(*map(names_in, call.args[:1]))))
    return found


def decodes(names: set[str]) -> bool:
    """Does an expression, or a function, with these names decode something?"""
    return bool(names & DECODERS) or any(part in name for name in names for part in DECODER_PARTS)


def packed_line(source: str) -> int | None:
    """The line on which decoded text is run as code, exec(zlib.decompress(...)) in one of its usual forms, or
    None. Raises SyntaxError for what is no Python."""
    tree = ast.parse(source)
    runs = runs_of_text(tree)
    if not runs:
        return None
    decoded = set()     # names of what is decoded
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and decodes(names_in(node)):
            decoded.add(node.name)
        elif isinstance(node, ast.Assign | ast.NamedExpr) and decodes(names_in(node.value)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            decoded |= set().union(*map(names_in, targets))
    return min([line for line, names in runs if names & decoded or decodes(names)], default=None)


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
    for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        called = {ast.unparse(part) for part in (call.func, *call.args[:1])}    # partial(torch.compile)
        flags = [word.arg or "**" for word in call.keywords if word.arg not in ("dynamic", "fullgraph")]
        if flags and "torch.compile" in called:
            found.append(f"line {call.lineno}: torch.compile with {', '.join(flags)}")
    return found
