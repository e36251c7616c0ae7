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
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

import first_hour
import fork_server
import train_gpt
from helpers import ROOT, SCRIPT, TOY, run_cli, slow, sources
from test_train import LEAN
from verify import scripts


@pytest.fixture
def place(tiny_data, tmp_path):
    (tmp_path / "data").symlink_to(tiny_data / "data")
    return tmp_path


def test_a_compiler_that_fails(train, monkeypatch):
    """It trains uncompiled, says so once, and the result says it, too."""
    def compile(function, **_):
        def built(*args):
            raise RuntimeError("no C++ compiler")
        return built

    monkeypatch.setattr(train_gpt.torch, "compile", compile)
    done = train(TOY | LEAN, COMPILE="1", ITERATIONS="2", VAL_TOKENS="512")
    assert done.code == 0 and done.result["steps"] == 2 and done.result["compiled"] is False, done.err
    said = re.findall("^compile: not possible here .*$", done.out, re.M)
    assert said == ["compile: not possible here (RuntimeError: no C++ compiler); training uncompiled"]


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
    """The same on a machine without one. One plain layer: less to compile until the compiler is looked
    for."""
    bare = place / "bin"
    bare.mkdir()
    for name in ("grep", "uname", "sh"):
        (bare / name).symlink_to(shutil.which(name))
    env = TOY | LEAN | dict(COMPILE="1", RUN_ID="r", ITERATIONS="2", PATH=str(bare), PICTURE="0",
                     TORCHINDUCTOR_CACHE_DIR=str(place / "cache"))
    done = run_cli(place, env=env)
    assert done.code == 0, done.err
    lines = [line for line in done.out.splitlines() if line.startswith("compile: not possible here")]
    assert len(lines) == 1 and "C++ compiler" in lines[0] and lines[0].endswith("training uncompiled")
    result = json.loads((place / "logs/r/result.json").read_text())
    assert result["steps"] == 2 and result["compiled"] is False


@pytest.mark.parametrize("preset", ["golf", "speedrun", "gpt2", slow("golf_plus")])
def test_a_game_for_gpus_on_a_laptop(tmp_path, monkeypatch, capsys, preset):
    """Refused with what it would take, unless the CPU is asked for; a plan has a line about it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_gpt.torch.cuda, "is_available", lambda: False)
    assert train_gpt.main([], {"PRESET": preset}) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"train_gpt: {preset} is made for GPUs: a step takes ") and err.count("\n") == 1
    assert " days (estimate)" in err and "PRESET=tiny" in err and "DEVICE=cpu" in err
    assert train_gpt.main([], {"PRESET": preset, "DEVICE": "cpu"}) == 2
    assert "./run.sh data" in capsys.readouterr().err       # the next thing that is missing
    assert train_gpt.main(["--dry-run"], {"PRESET": preset}) == 0
    plan = capsys.readouterr().out
    assert f"machine: {preset} is made for GPUs" in plan
    assert "\nstage table: from_step tokens_per_step" in plan


@pytest.mark.parametrize("on_gpu, eval_from, refused", [
    (False, None, True), (True, None, False), (False, "logs/a/final_model.pt", False), (True, "a.pt", False)])
def test_who_may_take_a_minute_a_step(on_gpu, eval_from, refused):
    """A GPU may, and a score has no steps."""
    cfg = train_gpt.load_config({"PRESET": "gpt2"} | ({"EVAL_FROM": eval_from} if eval_from else {}))
    team = SimpleNamespace(on_gpu=on_gpu)
    with pytest.raises(train_gpt.Refused) if refused else nullcontext():
        train_gpt.check_speed(cfg, team, lambda *_: None)


def test_games_that_fit_a_laptop_are_not_refused(tmp_path, monkeypatch, capsys):
    """tiny, and README's gpt2 for one: only their data are missing."""
    monkeypatch.chdir(tmp_path)
    laptop = dict(PRESET="gpt2", DEPTH="4", TRAIN_SEQ_LEN="256", TRAIN_BATCH_TOKENS="4096", PACKING="rows",
                  VOCAB_SIZE="1024")
    for env in ({}, laptop):
        assert train_gpt.main([], env) == 2
        assert "GPUs" not in (err := capsys.readouterr().err) and "no train and val shards" in err


def test_a_port_in_use(place):
    """By hand; torchrun --standalone takes a free one."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = TOY | dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2",
                         MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken.getsockname()[1]))
        done = run_cli(place, env=env)
    assert done.code == 2 and "Traceback" not in done.err, done.err
    assert "MASTER_PORT is in use" in done.err.splitlines()[-1]
    assert done.err.endswith(": give torchrun --standalone or another --master-port\n")


@pytest.mark.parametrize("damage, words", [
    (lambda path: path.unlink(), "is damaged or missing"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1000]), "toy_train_000001.bin")])
def test_data_half_downloaded(tiny_data, tmp_path, damage, words):
    """The command that completes them is named; a .part file is no shard."""
    shutil.copytree(tiny_data / "data", tmp_path / "data")
    shard = tmp_path / TOY["DATA_PATH"] / "toy_train_000001.bin"
    damage(shard)
    shard.with_name("toy_train_000009.bin.part").write_bytes(b"x")
    done = run_cli(tmp_path, env=TOY)
    assert done.code == 2 and words in done.err and "./run.sh data" in done.err, done.err
    assert len(done.err.splitlines()) == 1 and not (tmp_path / "logs").exists()


def test_the_port_of_torchrun_is_in_use():
    """Its own words come before any of ours; README and first_gpu.md say what they mean."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run([fork_server.start(), "-m", "torch.distributed.run", f"--master-port={port}",
                               str(SCRIPT), "--dry-run"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stdout == "" and "EADDRINUSE" in done.stderr.splitlines()[-1]
    for page in ("README.md", "docs/first_gpu.md"):
        assert "EADDRINUSE" in (ROOT / page).read_text(encoding="utf-8")


def test_an_old_python_by_hand(tmp_path):
    code = "import runpy, sys; sys.version_info = (3, 10); runpy.run_path(sys.argv[1], run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, SCRIPT], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"train_gpt: Python 3\.11 or newer is needed.*\n", done.stderr), done.stderr


def test_shards_of_a_known_dataset_without_a_manifest(tiny_data, tmp_path):
    """They load, as published ones do, but a download may have been cut short; others are their owner's."""
    for name, command in (("fineweb10B_sp1024", "`./run.sh data sp1024 -n 80`"), ("mine", "")):
        folder = tmp_path / name
        said = []
        shutil.copytree(tiny_data / TOY["DATA_PATH"], folder)
        (folder / "manifest.json").unlink()
        cfg = train_gpt.load_config(TOY | dict(DATA_PATH=str(folder), VOCAB_SIZE="512"))
        assert len(train_gpt.open_data(cfg).train) == 3
        train_gpt.warn(cfg, [], {}, said.append)
        warned = [line for line in said if line.startswith("data: no manifest.json, so ")]
        assert len(warned) == bool(command) and all(command in line for line in warned)


def test_logger_by_hand(tmp_path):
    """Only ./run.sh hands a log on: the trainer alone says so, under watch.py it does not."""
    by_hand = run_cli(tmp_path, "--dry-run", env={"LOGGER": "wandb"})
    assert by_hand.code == 0 and "warning: LOGGER works only through ./run.sh" in by_hand.out
    python = fork_server.start()
    command = [python, ROOT / "tools" / "watch.py", python, SCRIPT, "--dry-run"]
    (tmp_path / "wandb.py").touch()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True,
                          env=os.environ | {"LOGGER": "wandb", "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0 and "parameters:" in done.stdout and "LOGGER" not in done.stdout


def test_a_home_that_cannot_be_written(place):
    """Nothing needs it. A folder that cannot exist stands for it, as root may write anywhere."""
    done = run_cli(place, env=TOY | dict(HOME="/proc/nowhere", ITERATIONS="2", RUN_ID="r"))
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
    env = TOY | dict(PATH=str(bare), PYTHON=fork_server.start(), OMP_NUM_THREADS="1", ITERATIONS="2",
                     RUN_ID="r", HOME=os.environ.get("HOME", ""))
    done = subprocess.run([shutil.which("bash"), "run.sh"], cwd=place, capture_output=True, text=True,
                          env=env)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "in logs/r/: train.log" in done.stdout and SCRIPT.exists()


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
