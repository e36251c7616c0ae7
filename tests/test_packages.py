"""Whose modules our programs import: those of their checkout, whatever else the path of imports holds."""
import os
import shutil
import subprocess
import sys

import pytest

from helpers import ROOT, SCRIPT, sources

BY_PATH = {     # words: exit code, and words of what is printed
    "records/record.py stats logs/x": (0, "3.2000"),
    "data/prepare.py --text text --name t --vocab-size 300 --out .": (0, "300"),
    "tools/run/proxy.py --preset=tiny --proxy": (2, "tiny has no proxy"),
}
BY_NAME = {     # from the checkout, as ./run.sh does
    "records.record --help": "usage: ",
    "tools.gpu.results --help": "side_by_side",
    "tools.gpu.static --help": "--kernels",
    "tools.run.script golf": "def log_probs(",
    "tools.run.sample --help": "usage: ",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a log, text, and theirs/: a module for each name that ours have, which are our packages,
    what is in them, and train_gpt.py. Whoever imports one of these ends."""
    root = tmp_path_factory.mktemp("place")
    ours = sources("data", "records", "tools")
    names = {name for path in ours for name in path.relative_to(ROOT).with_suffix("").parts} | {SCRIPT.stem}
    (root / "theirs").mkdir()
    for name in names - {"__init__"}:
        (root / "theirs" / f"{name}.py").write_text(f"raise SystemExit('the {name} of somebody else')\n")
    assert {"inputs.py", "logs.py", "tools.py"} < {path.name for path in (root / "theirs").iterdir()}
    (root / "logs/x").mkdir(parents=True)
    (root / "logs/x/train.log").write_text("step:1/1 val_loss:3.2000 train_time:1000ms step_avg:1.00ms\n")
    (root / "text").mkdir()
    for i in range(60):
        lines = [f"line {number} of the {i}th file, which has {number * i % 97} words of its own.\n"
                 for number in range(30)]
        (root / "text" / f"{i}.txt").write_text("".join(lines))
    return root


def started(words, cwd, **more):
    """(exit code, what it prints) of a program. By the real interpreter: forks set the path themselves."""
    env = {name: text for name, text in os.environ.items() if name != "PYTHONSAFEPATH"} | more
    done = subprocess.run([sys.executable, *words.split()], cwd=cwd, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("words", BY_PATH)
def test_modules_of_the_same_names(words, place, tmp_path):
    """On PYTHONPATH, also where Python leaves out a program's own folder, and in the working directory."""
    program, _, rest = words.partition(" ")
    code, text = BY_PATH[words]
    theirs = str(place / "theirs")
    cases = dict(PYTHONPATH=theirs, PYTHONSAFEPATH="1"), dict(PYTHONPATH=f":{theirs}")
    for number, more in enumerate(cases):
        home = tmp_path / str(number)
        shutil.copytree(place, home)
        shutil.copytree(place / "theirs", home, dirs_exist_ok=True)
        found, said = started(f"{ROOT / program} {rest}", home, **more)
        assert found == code and text in said and "somebody else" not in said, (more, said[-2000:])


@pytest.mark.parametrize("words", BY_NAME)
def test_started_as_a_module_from_the_checkout(words, place):
    found, said = started(f"-m {words}", ROOT, PYTHONPATH=str(place / "theirs"))
    assert found == 0 and BY_NAME[words] in said, said[-2000:]
