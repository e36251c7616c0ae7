"""What a machine may lack, and what is said then."""
import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from helpers import OURS, ROOT, SCRIPT, TOY
from records.verify import scripts

LAUNCH = ("-m", "tools.run.launch")
SMALL = TOY | dict(
    ITERATIONS="2", VAL_TOKENS="512", NUM_LAYERS="1", MODEL_DIM="16", NUM_HEADS="1", COUNT_ORDERS="0",
    COUNT_WORDS="0", COPY_ORDERS="0", OMP_NUM_THREADS="1", RUN_ID="r")


@pytest.fixture
def place(tiny_data, tmp_path):
    (tmp_path / "data").symlink_to(tiny_data / "data")
    return tmp_path


def run(place, *words, **env):
    """A program in that folder, in a clean environment -> exit code, out, err."""
    clean = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    done = subprocess.run([*map(str, words)], cwd=place, env=clean | OURS | SMALL | env, capture_output=True,
                          text=True, timeout=300)
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)


@pytest.mark.slow
def test_no_compiler(place):
    """It trains uncompiled, and a line says why."""
    bare = place / "bin"
    bare.mkdir()
    for name in ("grep", "uname", "sh", "du"):
        (bare / name).symlink_to(shutil.which(name))
    done = run(place, sys.executable, *LAUNCH, COMPILE="1", PATH=str(bare))
    assert done.code == 0 and done.err == "", done.err
    said = [line for line in done.out.splitlines() if line.startswith("compile: ")]
    assert len(said) == 1 and said[0].startswith("compile: there is no C++ compiler (g++), so the step ")
    result = json.loads((place / "logs/r/result.json").read_text())
    assert result["steps"] == 2 and result["config"]["compile"] == "0"


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


@pytest.mark.slow
def test_no_git_and_no_nvidia_smi_for_a_run(place):
    """run.sh asks for neither."""
    bare = place / "bin"
    bare.mkdir()
    for name in ("bash", "dirname", "sed", "tr", "head", "grep", "cat", "sh"):
        (bare / name).symlink_to(shutil.which(name))
    for name in ("run.sh", "train_gpt.py", "requirements.txt"):
        shutil.copy(ROOT / name, place)
    for name in ("records", "tools"):
        (place / name).symlink_to(ROOT / name)
    done = run(place, shutil.which("bash"), "run.sh", PATH=str(bare), PYTHON=sys.executable)
    assert done.code == 0 and done.err == "", done.err
    assert "in logs/r/: train.log" in done.out and SCRIPT.exists()
