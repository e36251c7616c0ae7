"""The text of toy runs: source of a package that requirements.txt pins, so the same under every Python.
"""
import importlib.util
import random
from pathlib import Path

FILES = ("classes/graph", "classes/digraph", "classes/multigraph", "classes/reportviews", "drawing/layout",
         "algorithms/planarity", "algorithms/isomorphism/ismags", "algorithms/isomorphism/isomorphvf2",
         "algorithms/tree/mst", "algorithms/similarity", "generators/random_graphs", "utils/backends",
         "drawing/nx_pylab")


def library_documents(total):
    """About `total` characters of networkx's source, in documents of 60 lines, in a fixed order."""
    package = Path(importlib.util.find_spec("networkx").origin).parent
    documents = []
    for name in FILES:
        lines = (package / f"{name}.py").read_text(encoding="utf-8").splitlines(keepends=True)
        documents += ["".join(lines[i:i + 60]) for i in range(0, len(lines), 60)]
    random.Random(0).shuffle(documents)
    size = 0
    while size < total and documents:
        size += len(documents[-1])
        yield documents.pop()
