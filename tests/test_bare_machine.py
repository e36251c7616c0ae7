"""What a machine may lack, and what is said then."""
import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from helpers import OURS, ROOT, SCRIPT, TOY
from records.verify import scripts

SMALL = TOY | dict(
    ITERATIONS="2", VAL_TOKENS="512", NUM_LAYERS="1", MODEL_DIM="16", NUM_HEADS="1", COUNT_ORDERS="0",
    COUNT_WORDS="0", COPY_ORDERS="0", OMP_NUM_THREADS="1", RUN_ID="r")


@pytest.mark.slow
def test_no_compiler(tiny_data, tmp_path):
    """It trains uncompiled, and a line says why. Neither git nor nvidia-smi is asked for, either."""
    (tmp_path / "data").symlink_to(tiny_data / "data")
    bare = tmp_path / "bin"
    bare.mkdir()
    for name in ("bash", "dirname", "readlink", "sed", "cat", "sh", "du", "grep", "uname"):
        (bare / name).symlink_to(shutil.which(name))
    for name in ("run.sh", "train_gpt.py", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("records", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    env = SMALL | dict(COMPILE="1", PATH=str(bare), HOME=str(tmp_path), PYTHON=sys.executable)
    done = subprocess.run([shutil.which("bash"), "run.sh"], cwd=tmp_path, env=env | OURS, capture_output=True,
                          text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.startswith("compile: there is no C++ compiler (g++), so the step stays uncompiled: ")
    assert json.loads((tmp_path / "logs/r/result.json").read_text())["config"]["compile"] == "0"


def test_an_old_python_by_hand(tmp_path):
    code = "import datetime, runpy, sys; del datetime.UTC; runpy.run_path(sys.argv[1], run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, SCRIPT], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    said = r"train_gpt: .*UTC.*: \./run\.sh setup, then \.venv/bin/python\n"
    assert re.fullmatch(said, done.stderr), done.stderr


def test_no_git(monkeypatch):
    """A record says that its script is not committed."""
    def run(command, **_):
        raise FileNotFoundError(2, "No such file or directory", command[0])

    monkeypatch.setattr(scripts, "subprocess", SimpleNamespace(run=run))
    assert scripts.git_commit(b"x", "tiny") == "not committed"
