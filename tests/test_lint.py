"""ruff over all sources, mypy over those that pyproject.toml names; each finds what is planted."""
import re
import subprocess
import sys

from helpers import ROOT


def findings(*command):
    """(exit code, what a checker printed)"""
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True,
                          timeout=600)
    assert "No module named" not in done.stderr, f"{command[0]} is missing: ./run.sh setup installs it"
    return done.returncode, done.stdout + done.stderr


def test_ruff(tmp_path):
    code, said = findings("ruff", "check", "--no-cache", "--output-format=concise", ".")
    assert code == 0, said
    planted = tmp_path / "planted.py"
    planted.write_text("import os\nprint(undefined, 'x' is 'y')\n", encoding="utf-8")
    code, said = findings("ruff", "check", "--no-cache", "--config=pyproject.toml", planted)
    assert code == 1 and all(rule in said for rule in ("F401", "F821", "F632")), said


def test_mypy(tmp_path):
    code, said = findings("mypy", f"--cache-dir={tmp_path}")
    assert code == 0 and int(re.search(r"in (\d+) source files", said)[1]) > 60, said
    planted = tmp_path / "tools/run/planted.py"
    planted.parent.mkdir(parents=True)
    for folder in planted.parents[:2]:
        (folder / "__init__.py").touch()
    planted.write_text("def half(x: int) -> int:\n    return 'x'\n\n\ndef bare(x):\n    half(1, 2)\n\n\n"
                       "half(1, 2)\nvague: list = []\n", encoding="utf-8")
    code, said = findings("mypy", "--config-file=pyproject.toml", planted)
    kinds = ("[return-value]", "[call-arg]", "[no-untyped-def]", "[type-arg]")
    assert code == 1 and all(kind in said for kind in kinds), said
