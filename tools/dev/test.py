"""./run.sh test [ARG ...]: pytest. Without arguments all tests run, with `quick` the quick ones, in two
processes, of which one takes over what is left of the other's. Tests that are named run in one process, as
pytest runs them: docs/testing.md
"""
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec


def words_for(argv: Sequence[str], has_xdist: bool) -> list[str]:
    """pytest's arguments."""
    words = ["-m", "quick and not slow"] if [*argv] == ["quick"] else [*argv]
    if has_xdist and [*argv] in ([], ["quick"]):
        words = ["-n", "2", "--dist", "worksteal", *words]
    return words


if __name__ == "__main__":
    arguments = words_for(sys.argv[1:], find_spec("xdist") is not None)
    if arguments[:1] == ["-n"]:
        os.environ["OMP_NUM_THREADS"] = "1"
    # else each of some hundred programs would compile its modules again
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.execv(sys.executable, [sys.executable, "-m", "pytest", "-q", *arguments])
