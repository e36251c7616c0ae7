"""What a newcomer's machine may lack, and what is said then."""
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers import ROOT, SCRIPT, TOY, sources
from records.verify import scripts
from tools.dev import first_hour

LAUNCH = ROOT / "tools/run/launch.py"
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
    done = subprocess.run([*map(str, words)], cwd=place, env=clean | SMALL | env, capture_output=True,
                          text=True, timeout=300)
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)


def pythons():
    """An interpreter of each version that a user may have and that is there, on the PATH or by pyenv."""
    found = {}
    for version in ("3.11", "3.12", "3.13"):
        by_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
        for path in (shutil.which(f"python{version}"), *by_pyenv):
            starts = path and subprocess.run([path, "-c", ""], stderr=subprocess.DEVNULL).returncode == 0
            if starts:      # a shim of pyenv for a version that is not chosen does not
                found.setdefault(version, str(path))
    return found


PYTHONS = pythons()
# Of the toy text, of words of a version of networkx that requirements.txt pins
TOY_TEXT = "542e4be8d0196b40"


@pytest.mark.parametrize("version", PYTHONS)
def test_toy_text_does_not_depend_on_the_python(version, tmp_path):
    """The tests' numbers hold under each Python that is there; without torch, of which few have a build."""
    site = Path(importlib.util.find_spec("networkx").origin).parent.parent
    if f"networkx=={importlib.metadata.version('networkx')}" not in (ROOT / "requirements.txt").read_text():
        pytest.skip("another version of networkx is installed")
    code = ("import hashlib, sys, toy_text; texts = toy_text.library_documents(10**9); "
            "print(hashlib.sha256('\\0'.join(texts).encode()).hexdigest()[:16])")
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT / 'tests'}:{site}"}
    command = [PYTHONS[version], "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.stdout == TOY_TEXT + "\n", done.stderr


@pytest.mark.parametrize("version", PYTHONS)
def test_every_file_is_syntax_of_every_python(version, tmp_path):
    code = ("import ast, sys\nfor path in sys.argv[1:]:\n"
            "    ast.parse(open(path, encoding='utf-8').read(), path)\nprint('fine')")
    files = [str(path) for path in [SCRIPT, *sources("data", "records", "tests", "tools")]]
    command = [PYTHONS[version], "-W", "error", "-c", code, *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.slow
def test_no_compiler(place):
    """It trains uncompiled, and a line says why."""
    bare = place / "bin"
    bare.mkdir()
    for name in ("grep", "uname", "sh", "du"):
        (bare / name).symlink_to(shutil.which(name))
    done = run(place, sys.executable, LAUNCH, COMPILE="1", PATH=str(bare))
    assert done.code == 0 and done.err == "", done.err
    said = [line for line in done.out.splitlines() if line.startswith("compile: ")]
    assert len(said) == 1 and said[0].startswith("compile: there is no C++ compiler (g++), so the step ")
    result = json.loads((place / "logs/r/result.json").read_text())
    assert result["steps"] == 2 and result["config"]["compile"] == "0"


def test_a_port_in_use(place):
    """By hand; torchrun --standalone takes a free one."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run(place, sys.executable, SCRIPT, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0",
                   LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken.getsockname()[1]))
    assert done.code == 2 and "Traceback" not in done.err, done.err
    last = done.err.splitlines()[-1]
    assert last.startswith("train_gpt: the ranks do not find each other (") and "EADDRINUSE" in last
    assert not (place / "logs").exists()


@pytest.mark.parametrize("damage, words", [
    (lambda path: path.unlink(), "is missing"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1000]), "toy_train_000001.bin")])
def test_data_half_downloaded(tiny_data, tmp_path, damage, words):
    """The command that completes them is named; a .part file is no shard."""
    shutil.copytree(tiny_data / "data", tmp_path / "data")
    shard = tmp_path / TOY["DATA_PATH"] / "toy_train_000001.bin"
    damage(shard)
    shard.with_name("toy_train_000009.bin.part").write_bytes(b"x")
    done = run(tmp_path, sys.executable, LAUNCH)
    assert done.code == 2 and words in done.err and "./run.sh data" in done.err, done.err
    assert len(done.err.splitlines()) == 1 and not (tmp_path / "logs").exists()


def test_the_port_of_torchrun_is_in_use():
    """Its own words come before any of ours; README and first_gpu.md say what they mean."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", f"--master-port={port}",
                               str(SCRIPT), "--help"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stdout == "" and "EADDRINUSE" in done.stderr.splitlines()[-1]
    for page in ("README.md", "docs/first_gpu.md"):
        assert "EADDRINUSE" in (ROOT / page).read_text(encoding="utf-8")


def test_an_old_python_by_hand(tmp_path):
    code = "import datetime, runpy, sys; del datetime.UTC; runpy.run_path(sys.argv[1], run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, SCRIPT], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    said = r"train_gpt: .*UTC.*: \./run\.sh setup, then \.venv/bin/python\n"
    assert re.fullmatch(said, done.stderr), done.stderr


def test_a_home_that_cannot_be_written(place):
    """Nothing needs it. A folder that cannot exist stands for it, as root may write anywhere."""
    done = run(place, sys.executable, LAUNCH, HOME="/proc/nowhere")
    assert done.code == 0 and "Traceback" not in done.out + done.err, done.err
    assert (place / "logs/r/loss.png").exists()


def test_no_git(monkeypatch):
    """A record says that its script is not committed."""
    def run(command, **_):
        raise FileNotFoundError(2, "No such file or directory", command[0])

    monkeypatch.setattr(scripts, "subprocess", SimpleNamespace(run=run))
    assert scripts.git_commit(b"x", "tiny") == "not committed"


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


def test_what_the_page_takes_from_a_run(tmp_path):
    """How long the newest run compiled, and its whole end screen."""
    for number, (run_id, ms) in enumerate((("a", 9000), ("b", 25111))):
        events = tmp_path / "logs" / run_id / "events.jsonl"
        events.parent.mkdir(parents=True)
        events.write_text(f'{{"kind": "start"}}\n{{"kind": "setup", "setup_ms": 17, "compile_ms": {ms}}}\n')
        os.utime(events, (number, number))
    assert first_hour.compile_seconds(tmp_path) == 25.111
    end = ["sample 1: x »y", *["z"] * 30, "next: "]
    assert first_hour.end_screen(["plan: ", "step:9/9", *end]) == end
