"""The trainer started without ./run.sh: the variables of torchrun, ranks that do not meet or that differ,
streams that nobody reads, odd interpreters and environments. Each is a run like any other or one sentence."""
import os
import re
import shutil
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fork_server
import train_gpt
from helpers import ROOT, SCRIPT, TOY, free_port, look, slow
from train_gpt import Refused

SMALL = TOY | dict(
    ITERATIONS="2", TRAIN_SEQ_LEN="64", TRAIN_BATCH_TOKENS="128", VAL_TOKENS="256",
    NUM_LAYERS="1", MODEL_DIM="16", NUM_HEADS="1", VALUE_EMBED_LAYERS="0", COUNT_ORDERS="0",
    COUNT_WORDS="0", COPY_ORDERS="0")
MEETING = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
TWO = dict(RANK="0", WORLD_SIZE="2") | MEETING


# -------------------------------------------------------------------------------- the variables of torchrun
@pytest.mark.parametrize("env, words", [
    (dict(RANK=""), ["RANK", "['', '1', '']"]), (TWO | dict(RANK="2"), ["no rank 2 of 2"]),
    (TWO | dict(RANK="½"), ["'½'"]),
    (dict(RANK="1"), ["no rank 1 of 1"]), (TWO | dict(RANK="x"), ["RANK", "'x'"]),
    (TWO | dict(WORLD_SIZE="0"), ["no rank 0 of 0"]), (TWO | dict(WORLD_SIZE="-1"), ["'-1'"]),
    (TWO | dict(LOCAL_RANK="1.0"), ["LOCAL_RANK", "'1.0'"])])
def test_numbers_of_ranks_that_cannot_be(env, words, root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    assert train_gpt.main([], SMALL | env) == 2
    out, err = capsys.readouterr()
    assert err.startswith("train_gpt: ") and err.count("\n") == 1 and all(word in err for word in words), err
    assert "step:" not in out


def test_one_process_needs_no_place_to_meet(train):
    """RANK=0 WORLD_SIZE=1, as some set it by hand, beside a MASTER_ADDR that is nowhere."""
    plain = train(SMALL)
    place = dict(MASTER_ADDR="nowhere.invalid", MASTER_PORT="1", LOCAL_RANK="0")
    done = train(SMALL | dict(RANK="0", WORLD_SIZE="1") | place)
    assert done.code == 0 and done.losses == plain.losses and done.weights == plain.weights


@pytest.mark.parametrize("more, gpu", [
    (dict(RANK="0"), 0), (dict(RANK="1", WORLD_SIZE="2"), 1), (dict(RANK="2", WORLD_SIZE="4"), None),
    (dict(RANK="9", WORLD_SIZE="16", LOCAL_RANK="1"), 1),
    (dict(RANK="3", WORLD_SIZE="4", LOCAL_RANK="2"), None)])
def test_the_gpu_of_a_rank(more, gpu, monkeypatch):
    """LOCAL_RANK's, or RANK's on a single machine; never that of another rank."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: True)
    monkeypatch.setattr(train_gpt.dist, "init_process_group", lambda *args, **kw: None)
    cfg = train_gpt.load_config(SMALL | dict(DEVICE="cuda"))
    if gpu is None:
        with pytest.raises(Refused, match="there is no GPU 2 here, only 2: lower --nproc_per_node"):
            train_gpt.Team(cfg, more)
    else:
        assert train_gpt.Team(cfg, more).device == torch.device("cuda", gpu)


@pytest.mark.parametrize("ranks, given, found", [
    (dict(LOCAL_WORLD_SIZE="2"), None, "lo"), (dict(LOCAL_WORLD_SIZE="2"), "eth7", "eth7"),
    (dict(LOCAL_WORLD_SIZE="1"), None, None), ({}, None, None), (dict(LOCAL_WORLD_SIZE="1"), "eth7", "eth7")])
def test_the_interface_through_which_ranks_talk(ranks, given, found, monkeypatch):
    """On one machine its loopback, where its name may lead elsewhere; on several gloo chooses."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given or "")
    if not given:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    met = []
    monkeypatch.setattr(train_gpt.dist, "init_process_group",
                        lambda *args, **kw: met.append(os.environ.get("GLOO_SOCKET_IFNAME")))
    train_gpt.Team(train_gpt.load_config(TOY), TWO | ranks)
    assert met == [found]


# -------------------------------------------------------------------------------- ranks that do not meet
TEAM = """
import sys, train_gpt
train_gpt.COLLECTIVE_TIMEOUT = float(sys.argv.pop(1))
sys.exit(train_gpt.main(sys.argv[1:], train_gpt.os.environ))
"""


@pytest.fixture
def start(root, tmp_path):
    """Starts a rank, as a fork -> Popen; its words are in tmp_path, NUMBER.out and NUMBER.err. What is left
    ends with the test. patience: seconds after which a collective gives up."""
    started = []

    def start(env, patience=100.0, *argv):
        path = tmp_path / str(len(started))
        with open(f"{path}.out", "wb") as out, open(f"{path}.err", "wb") as err:
            whole = dict(PATH=os.environ["PATH"], PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1") | SMALL | env
            process = fork_server.popen(["-c", TEAM, str(patience), *argv], root, whole, out, err)
        process.said = lambda: Path(f"{path}.err").read_text()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def did_not_meet(process):
    """Exit 2 and one sentence."""
    assert process.wait(120) == 2, process.said()
    said = [line for line in process.said().splitlines() if line.startswith("train_gpt: ")]
    assert len(said) == 1 and "the ranks do not find each other (" in said[0], process.said()
    assert "Traceback" not in process.said()


@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.0.1", "nowhere.invalid", "192.0.2.1", "a..b", "x" * 300])
def test_an_address_that_does_not_answer(address, start):
    """192.0.2.1 is of a network that nobody has."""
    did_not_meet(start(TWO | dict(RANK="1", MASTER_ADDR=address, MASTER_PORT=free_port()), 2))


@pytest.mark.parametrize("env", [
    dict(WORLD_SIZE="2"), dict(RANK="0", WORLD_SIZE="2"),
    dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1"),
    TWO | dict(MASTER_PORT="")])
def test_no_word_of_where_to_meet(env, start):
    did_not_meet(start(env, 2))


def test_ranks_that_never_come(start):
    did_not_meet(start(TWO | dict(MASTER_PORT=free_port()), 1))


# -------------------------------------------------------------------------------- ranks that differ
def other_script(root, tmp_path):
    """A copy of the trainer with a line more."""
    text = SCRIPT.read_text("utf-8") + "# edited on this machine\n"
    (tmp_path / "train_gpt.py").write_text(text, encoding="utf-8")
    return dict(PYTHONPATH=str(tmp_path))


def other_data(root, tmp_path, split="val"):
    """The same text, of which the first token of a shard is the last."""
    shutil.copytree(root / "data", tmp_path / "data")
    path = tmp_path / f"data/datasets/toy/toy_{split}_000000.bin"
    raw = path.read_bytes()
    path.write_bytes(raw[:1024] + raw[1026:] + raw[1024:1026])
    return dict(DATA_PATH=str(path.parent))


DIFFERENCES = {     # {what differs: (what rank 1 has besides, what rank 0 says)}
    "a learning rate": (dict(MATRIX_LR="0.5"), "matrix_lr is 0.5 on rank 1, 0.03 on rank 0"),
    "the seed": (dict(SEED="2"), "seed is 2 on rank 1, 1337 on rank 0"),
    "how much of val": (dict(VAL_TOKENS="2"), "val_tokens is 2 on rank 1, 256 on rank 0"),
    "the script": (other_script, r"script is \w{64} on rank 1, \w{64} on rank 0"),
    "val": (other_data, r"sha256 is \{.*\} on rank 1, \{.*\} on rank 0"),
    "train": (partial(other_data, split="train"), r"sampled is \w{64} on rank 1, \w{64} on rank 0")}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_differ_are_refused(what, start, root, tmp_path):
    """One sentence by rank 0, exit 2 of both, nothing left behind."""
    more, sentence = DIFFERENCES[what]
    env = TWO | dict(MASTER_PORT=free_port(), RUN_ID="differ")
    first = start(env)
    second = start(env | dict(RANK="1") | (more(root, tmp_path) if callable(more) else more))
    assert [first.wait(120), second.wait(120)] == [2, 2], first.said() + second.said()
    assert re.fullmatch(f"train_gpt: {sentence}\n", first.said()) and second.said() == ""
    assert not (root / "logs/differ").exists()


def test_folders_and_names_may_differ(start, root, tmp_path):
    """Each machine has its own; what is in them is the same. Ranks without torchrun, as Slurm starts them:
    RANK and WORLD_SIZE, nothing of this machine."""
    shutil.copytree(root / "data", tmp_path / "data")
    env = TWO | dict(MASTER_PORT=free_port(), RUN_ID="folders")
    second = start(env | dict(RANK="1", DATA_PATH=str(tmp_path / "data/datasets/toy"), RUN_ID="other"))
    first = start(env)
    assert [first.wait(120), second.wait(120)] == [0, 0], first.said() + second.said()
    assert look(root / "logs/folders").result["world_size"] == 2 and not (root / "logs/other").exists()


@pytest.mark.parametrize("error, why", [
    (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:3421"),
     "another rank is gone or hangs"),
    (RuntimeError("NCCL communicator was aborted on rank 1."), "another rank is gone or hangs"),
    (RuntimeError("Timed out waiting 600000ms for recv operation to complete"),
     "another rank is gone or hangs"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
     "out of memory: set DEVICE_BATCH_SIZE below micro_batch"),
    (OSError(28, "No space left on device"), "the disk is full: free some GB"),
    (RuntimeError("InductorError: CppCompileError: C++ compile error"),
     "no C++ compiler, or a space in the folder"),
    (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), "RuntimeError: The size"),
    (OSError(5, "Input/output error"), "OSError: ")])
def test_why_a_rank_ended(error, why, capsys):
    """In one line; with a traceback only what nothing explains."""
    assert train_gpt.explain(error).startswith(why)
    assert ("RuntimeError: The size" in capsys.readouterr().err) == why.startswith("RuntimeError")


def test_a_port_in_use(start):
    """By something that takes connections and says nothing, as a wrong port often does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        did_not_meet(start(TWO | dict(MASTER_PORT=str(listener.getsockname()[1])), 2))


# -------------------------------------------------------------------------------- streams that nobody reads
def run_program(words, cwd, env, shell, python=""):
    """`python WORDS… SHELL` by bash, whose exit code is that of python -> code, out, err."""
    python = python or fork_server.start()
    command = f'"$PROGRAM" "$@" {shell}; exit ${{PIPESTATUS[0]}}'
    clean = dict(PATH=os.environ["PATH"], HOME=str(cwd), OMP_NUM_THREADS="1", PROGRAM=python) | env
    done = subprocess.run(["bash", "-c", command, "bash", *map(str, words)], cwd=cwd, env=clean,
                          capture_output=True, timeout=300)
    # in another encoding where PYTHONIOENCODING asks for one
    out = done.stdout.decode(errors="replace")
    err = done.stderr.decode(errors="replace")
    return SimpleNamespace(code=done.returncode, out=out, err=err)


@pytest.fixture(scope="module")
def plain(root):
    """The run that no environment may change."""
    done = run_program([SCRIPT], root, SMALL | dict(RUN_ID="plain"), "")
    assert done.code == 0, done.err
    return look(root / "logs/plain")


def same_run(folder, plain):
    found = look(folder)
    assert found.losses == plain.losses and found.weights == plain.weights
    assert found.artifact == plain.artifact
    assert found.result["val_loss_partial"] == plain.result["val_loss_partial"]
    steps = [re.findall(r"^(step:\S+ \S+)", run.log, re.M) for run in (found, plain)]
    assert steps[0] == steps[1] and len(steps[0]) == 3


@pytest.mark.parametrize("shell", ["| head -2", "> /dev/full 2>&1"])
def test_a_run_goes_on_when_nobody_reads(shell, root, plain):
    """Into train.log, to its end."""
    run_id = f"r_{re.sub('[^a-z0-9]', '', shell)}"
    done = run_program([SCRIPT], root, SMALL | dict(RUN_ID=run_id), shell)
    assert (done.code, done.err) == (0, "")
    same_run(root / "logs" / run_id, plain)


def test_a_refusal_that_nobody_reads(root):
    done = run_program([SCRIPT, "--nonsense"], root, SMALL, "> /dev/full")
    assert done.code == 2 and "Traceback" not in done.err


# -------------------------------------------------------------------------------- interpreters, environments
ENVIRONMENTS = [    # what may be set where somebody works, also what Python and torch read when they begin
    dict(PYTHONWARNINGS="error", PYTHONUTF8="0", LC_ALL="C", PYTHONIOENCODING="ascii",
         PYTHONSAFEPATH="1", PYTHONHASHSEED="7", PYTHONCOERCECLOCALE="0", PYTHONINTMAXSTRDIGITS="640",
         OMP_NUM_THREADS="abc", HOME="/nowhere/y", XDG_CACHE_HOME="", TMPDIR="/nowhere/x", TZ="Mars/Moon",
         COLUMNS="0", LINES="-1", TERM="odd", NO_COLOR="1", CUDA_VISIBLE_DEVICES="abc", RANK="0",
         WORLD_SIZE="1", MASTER_PORT="x"),
    dict(PYTHONDEVMODE="1", PYTHONOPTIMIZE="2", OMP_NUM_THREADS="-1", OMP_SCHEDULE="x", KMP_AFFINITY="x",
         MKL_NUM_THREADS="0", LANG="xx_YY", TMPDIR="/proc", HOME="", PYTHONWARNDEFAULTENCODING="1",
         PYTHONPATH=":::")]


@pytest.mark.parametrize("number", [0, slow(1)])
def test_odd_environments_change_nothing(number, root, plain):
    env = SMALL | dict(RUN_ID=f"odd{number}") | ENVIRONMENTS[number]
    done = run_program([SCRIPT], root, env, "", sys.executable)
    assert done.code == 0, done.err
    same_run(root / f"logs/odd{number}", plain)


def test_the_driver_is_asked_only_if_torch_finds_no_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(train_gpt.subprocess, "getoutput", lambda what: asked.append(what) or "GPU 0: H100")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    auto = train_gpt.load_config(SMALL | dict(DEVICE="auto"))
    with pytest.raises(Refused, match="cannot use the GPUs here: install a build for their driver, or set "):
        train_gpt.Team(auto, {})
    assert asked == ["nvidia-smi -L"]
    asked.clear()
    for hidden in ("", "-1"):
        assert not train_gpt.Team(auto, {"CUDA_VISIBLE_DEVICES": hidden}).on_gpu
    assert not train_gpt.Team(train_gpt.load_config(SMALL), {}).on_gpu
    assert not asked
