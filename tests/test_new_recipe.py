"""docs/recipes.md, "Adding a recipe", followed step by step in a copy of the project."""
import os
import re
import shutil
import subprocess
import sys

import pytest

from helpers import ROOT, TOY
from test_script import COMMON, TOY_RUN

REGISTRY = "# ---------- the registry of recipes"
SHARED = "# ---------- golf and golf_plus: what both use"
SHARED_BY_THREE = "# ---------- golf, golf_plus and mine: what they share"


def steps_of_the_page():
    """The numbered steps, as one text."""
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8").partition("## Adding a recipe\n")[2]
    steps = re.findall(r"(?m)^\d\. .*\n(?:   .*\n)*", page)
    assert len(steps) == 3
    return " ".join("".join(steps).split())


def with_mine(text):
    """train_gpt.py after the steps of the page."""
    section = text[text.index("# ---------- golf: "):text.index("# ---------- golf_plus: ")]
    section = section.replace("# ---------- golf: ", "# ---------- mine: ").replace('"golf"', '"mine"')
    section = re.sub(r"\bGolf(?=(Context|Block|Model)?\b)", "Mine", section)
    text = text.replace(REGISTRY, section + REGISTRY).replace(SHARED, SHARED_BY_THREE)
    return re.sub(r"(?m)^(RECIPES = dict\(.*\n)", r"\1               mine=Mine,\n", text)


def copied(to):
    """The files that git knows, at `to`."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in names.stdout.rstrip("\0").split("\0"):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, to / name)
    return to


def called(home, *command, env=None):
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=1200, env=env)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_the_steps_of_recipes_md(tmp_path, tiny_data):
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    steps = steps_of_the_page()
    assert re.findall(r"`(\S+\.\w+)`", steps) == ["train_gpt.py"]
    assert all(f"`{words}`" in steps for words in (REGISTRY, SHARED, SHARED_BY_THREE, "mine=Mine,"))
    home = copied(tmp_path / "copy")
    before = (home / "train_gpt.py").read_text(encoding="utf-8")
    assert all(before.count(words) == 1 for words in (REGISTRY, SHARED))
    (home / "train_gpt.py").write_text(with_mine(before), encoding="utf-8")
    # the tests that hold for every recipe
    (home / ".git").symlink_to(ROOT / ".git")
    called(home, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_house.py",
           "tests/test_lint.py", env=env)
    called(home, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k",
           "mine or test_names or one_case_per_preset or table_of_needs or ceiling", "tests", env=env)
    # a run, from the plan to the last screen
    shutil.copytree(tiny_data / "data", home / "data", dirs_exist_ok=True)
    toy = {name: TOY[name] for name in COMMON} | TOY_RUN["golf"] | dict(ITERATIONS="4", VAL_TOKENS="1024")
    said = called(home, "./run.sh", "mine", env=env | toy | dict(PYTHON=sys.executable, RUN_ID="a"))
    assert "\nval_loss_partial " in said
    assert "\nin logs/a/: train.log, result.json, samples.txt, loss.png, " in said
