"""How a run is launched: the variables of torchrun, ranks that do not meet, streams that nobody reads, odd
interpreters and environments. Each is a run like any other, or one sentence."""
import ast
import importlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fork_server
import train_gpt
from helpers import ROOT, SCRIPT, TOY, look, sources, wait_until
from train_gpt import Ranks, Refused, read_ranks

SMALL = TOY | dict(
    ITERATIONS="2", TRAIN_SEQ_LEN="64", TRAIN_BATCH_TOKENS="128", VAL_TOKENS="256", SAMPLE_TOKENS="2",
    NUM_LAYERS="1", MODEL_DIM="16", NUM_HEADS="1", VALUE_EMBED_LAYERS="0", COUNT_ORDERS="0",
    COUNT_WORDS="0", COPY_ORDERS="0")
MEETING = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
TWO = dict(RANK="0", WORLD_SIZE="2") | MEETING


# -------------------------------------------------------------------------------- one parser
WELL_FORMED = [
    ({}, Ranks()), (MEETING, Ranks()), (dict(RANK="0", WORLD_SIZE="1"), Ranks()),
    (dict(RANK="1", WORLD_SIZE="2"), Ranks(1, 2, 1, 2)), (TWO, Ranks(0, 2, 0, 2, ("127.0.0.1", 29500))),
    (dict(RANK="9", WORLD_SIZE="16", LOCAL_WORLD_SIZE="8"), Ranks(9, 16, 1, 8)),
    (dict(RANK="9", WORLD_SIZE="16", LOCAL_RANK="3", LOCAL_WORLD_SIZE="4"), Ranks(9, 16, 3, 4)),
    (dict(RANK="00", WORLD_SIZE="01", TORCHELASTIC_USE_AGENT_STORE="True"), Ranks(by_torchrun=True))]
NO_NUMBERS = ("", " ", "x", "1.0", "-1", "+1", " 1", "1 ", "1_0", "0x1", "1e0", "½", "٣", "１", "nan", "None",
              "4,2", "9" * 5000, "1\n", "\udcff", "tcp://10.0.0.1:2345", "70000000")
MALFORMED = [   # variables, what the sentence names
    *((TWO | {name: text}, name) for name in train_gpt.LAUNCH_NUMBERS for text in NO_NUMBERS),
    (dict(RANK="0"), "WORLD_SIZE"), (dict(RANK="3"), "WORLD_SIZE"), (dict(WORLD_SIZE="2"), "RANK"),
    (dict(WORLD_SIZE="1"), "RANK"), (dict(LOCAL_RANK="0"), "RANK"), (dict(LOCAL_WORLD_SIZE="2"), "RANK"),
    (dict(RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"), "WORLD_SIZE"),
    (dict(RANK="0") | MEETING, "WORLD_SIZE"),
    (dict(WORLD_SIZE="0"), "RANK is missing"), (TWO | dict(WORLD_SIZE="0"), "WORLD_SIZE:0"),
    (TWO | dict(RANK="2"), "RANK:2"), (TWO | dict(RANK="7"), "RANK:7"),
    (TWO | dict(LOCAL_RANK="7"), "LOCAL_RANK:7"), (TWO | dict(LOCAL_WORLD_SIZE="3"), "LOCAL_WORLD_SIZE:3"),
    (TWO | dict(LOCAL_WORLD_SIZE="0"), "LOCAL_WORLD_SIZE"),
    (TWO | dict(LOCAL_RANK="1", LOCAL_WORLD_SIZE="1"), "LOCAL_RANK:1"),
    *((MEETING | dict(MASTER_PORT=port), "MASTER_PORT") for port in ("0", "65536", "99999"))]


@pytest.mark.parametrize("env, ranks", WELL_FORMED)
def test_ranks(env, ranks):
    assert read_ranks(env) == ranks


def test_malformed_ranks_are_refused_in_one_sentence():
    for env, word in MALFORMED:
        with pytest.raises(Refused) as caught:
            read_ranks(env)
        sentence = str(caught.value)
        assert word in sentence and len(sentence) < 250 and sentence.isprintable(), (env, sentence)


@pytest.mark.parametrize("argv", [[], ["--dry-run"]])
@pytest.mark.parametrize("env", [
    dict(RANK=""), dict(RANK="0"), dict(WORLD_SIZE="2"), TWO | dict(RANK="2"), TWO | dict(RANK="x"),
    dict(RANK="0", WORLD_SIZE="2"), dict(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1"),
    dict(RANK="1", WORLD_SIZE="2", MASTER_ADDR="", MASTER_PORT="29500")])
def test_a_run_and_a_dry_run_refuse_alike(env, argv, root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    assert train_gpt.main(argv, SMALL | env) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("train_gpt: ") and err.count("\n") == 1, (out, err)
    assert any(name in err for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))


def test_one_process_needs_no_place_to_meet(train):
    """RANK=0 WORLD_SIZE=1, as some set it by hand, also beside a MASTER_ADDR that is nowhere."""
    plain = train(SMALL)
    for more in ({}, dict(MASTER_ADDR="nowhere.invalid", MASTER_PORT="1", LOCAL_RANK="0")):
        done = train(SMALL | dict(RANK="0", WORLD_SIZE="1") | more)
        assert done.code == 0 and done.losses == plain.losses and done.weights == plain.weights


def test_the_gpu_of_a_rank(monkeypatch):
    """LOCAL_RANK, or what follows from RANK and LOCAL_WORLD_SIZE; never that of another rank."""
    monkeypatch.setattr(train_gpt.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(train_gpt.torch.cuda, "device_count", lambda: 2)
    for more, word in ((dict(WORLD_SIZE="4"), "4 ranks for 2 GPUs"),
                       (dict(WORLD_SIZE="4", LOCAL_WORLD_SIZE="4"), "4 ranks for 2 GPUs")):
        with pytest.raises(Refused, match=word):
            train_gpt.Team(train_gpt.load_config(SMALL | dict(DEVICE="cuda")), TWO | more)


@pytest.mark.parametrize("flag", [
    "--local-rank=0", "--local_rank=1", "--local-rank", "--nproc_per_node=8", "--nnodes=2", "--node-rank=0",
    "--master-port=29500", "--world-size=2"])
def test_flags_of_launchers_name_torchrun(flag, root, monkeypatch, capsys):
    """As torch.distributed.launch and others add them; those of torchrun behind the script's name."""
    monkeypatch.chdir(root)
    for env in (SMALL, SMALL | dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")):
        assert train_gpt.main([flag, "0"] if flag == "--local-rank" else [flag], env) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"train_gpt: {flag.partition('=')[0]} is a launcher's: ")
        assert all(word in err for word in ("torchrun --nproc_per_node", "RANK, WORLD_SIZE and LOCAL_RANK"))


LONE_TASKS = {
    "Slurm": dict(SLURM_PROCID="1", SLURM_NTASKS="8"),
    "Slurm, a step of an allocation": dict(SLURM_PROCID="0", SLURM_NTASKS="1", SLURM_STEP_NUM_TASKS="2"),
    "Open MPI": dict(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="4"),
    "MPICH": dict(PMI_RANK="3", PMI_SIZE="4")}


@pytest.mark.parametrize("argv", [[], ["--dry-run"]])
@pytest.mark.parametrize("env", LONE_TASKS.values(), ids=LONE_TASKS)
def test_several_tasks_do_not_each_train_alone(env, argv, root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    assert train_gpt.main(argv, SMALL | env | dict(MASTER_ADDR="127.0.0.1")) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert all(word in err for word in ("without RANK and WORLD_SIZE", "torchrun --nproc_per_node"))
    read_ranks(env | TWO)       # torchrun or a batch script has set them
    read_ranks(env | dict(RANK="0", WORLD_SIZE="1"))


@pytest.mark.parametrize("env", [
    dict(SLURM_PROCID="0", SLURM_NTASKS="1"), dict(SLURM_NTASKS="8"),       # salloc: no task of a step
    dict(SLURM_PROCID="0", SLURM_NTASKS="8", SLURM_STEP_NUM_TASKS="1"),
    dict(SLURM_PROCID="0", SLURM_NTASKS="x"),
    dict(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="1"), dict(PMI_RANK="0", PMI_SIZE="")])
def test_one_task_trains(env):
    assert read_ranks(env) == Ranks()


# Programs that a launcher's variables pass through; the trainers in record folders are what they were
LAUNCHERS = [SCRIPT, ROOT / "run.sh", *sources("data", "records", "tools")]
LAUNCH_NAMES = "(?:RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)"
LAUNCH_WORDS = re.compile(rf"""(["']){LAUNCH_NAMES}\1|\$\{{?{LAUNCH_NAMES}\b""")


def reads_around(text):
    """Lines that name such a variable as a string or expand it, outside of read_ranks and its table; and
    torch's own reader of them, init_process_group without a store."""
    lines = text.split("\n")
    if "def read_ranks" in text:
        for node in ast.parse(text).body:
            name = getattr(node, "name", "")
            if isinstance(node, ast.Assign):
                name = ast.unparse(node.targets[0])
            if name in ("LAUNCH_NUMBERS", "read_ranks"):
                lines[node.lineno - 1:node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    found = [line for line in lines if LAUNCH_WORDS.search(line)]
    calls = re.findall(r"init_process_group\((?:[^()]|\([^()]*\))*\)", "\n".join(lines))
    return found + [call for call in calls if "store=" not in call]


ALLOCATOR = """
import os, runpy, sys
sys.argv = ["train_gpt.py", "--help"]
try:
    runpy.run_path(os.environ["SCRIPT"], run_name="__main__")
except SystemExit:
    print("allocator", os.environ.get("PYTORCH_ALLOC_CONF"))
"""


@pytest.mark.parametrize("given, found", [
    ({}, "expandable_segments:True"),
    (dict(PYTORCH_ALLOC_CONF="max_split_size_mb:64"), "max_split_size_mb:64"),
    (dict(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64"), None)])
def test_memory_that_grows_in_segments_unless_told_otherwise(given, found):
    clean = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run([fork_server.start(), "-c", ALLOCATOR], capture_output=True, text=True,
                          env=clean | dict(SCRIPT=str(SCRIPT)) | given, timeout=60)
    assert done.stdout.endswith(f"allocator {found}\n"), done.stderr


@pytest.mark.parametrize("ranks, given, found", [
    (dict(RANK="0", WORLD_SIZE="2"), None, "lo"), (dict(RANK="0", WORLD_SIZE="2"), "eth7", "eth7"),
    (dict(RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1"), None, "lo"),
    (dict(RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1"), "eth7", "eth7"),
    (dict(RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", MASTER_ADDR="no such host"), None, ""),
    (dict(RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", MASTER_ADDR="x" * 70), None, "")])
def test_the_interface_through_which_ranks_talk(ranks, given, found, monkeypatch):
    """On one machine its loopback, where its name may lead elsewhere; on several the one that leads to the
    first (test_cluster has two machines). gloo chooses by itself if it is empty."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given or "")
    if not given:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    met = []
    monkeypatch.setattr(train_gpt, "meet", lambda ranks: "the store")
    monkeypatch.setattr(train_gpt.dist, "init_process_group",
                        lambda *args, **kw: met.append(os.environ.get("GLOO_SOCKET_IFNAME")))
    train_gpt.Team(train_gpt.load_config(TOY), ranks)
    assert met == [found]


def test_nothing_reads_the_launch_around_the_parser():
    planted = ["env.get('RANK')", 'int(os.environ["WORLD_SIZE"])', "echo $RANK", "echo ${LOCAL_RANK:-0}",
               "dist.init_process_group('gloo', timeout=timedelta(seconds=1))"]
    assert [text for text in planted if not reads_around(text)] == []
    assert reads_around("def read_ranks(env):\n    return env['RANK']\nself.rank = 0  # RANK=0\n") == []
    assert [(path.name, line) for path in LAUNCHERS for line in reads_around(path.read_text("utf-8"))] == []


def undecoded(text):
    """Calls that read text by themselves, as by the encoding of the locale."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            modes = {part.value for part in node.args[1:] if isinstance(part, ast.Constant)}
            if name.endswith(".read_text") or name.endswith("open") and not modes & {"rb", "wb", "a"}:
                if name not in ("os.open", "log.open"):
                    found.append(name)
    return found


def test_text_comes_in_through_one_decoder():
    """read_text(), or json.loads() of bytes, which decodes alike."""
    planted = "path.read_text('utf-8')\nopen(path)\nio.open(x, 'r')\n"
    assert undecoded(planted) == ["path.read_text", "open", "io.open"]
    assert undecoded(SCRIPT.read_text("utf-8")) == []


# -------------------------------------------------------------------------------- ranks that do not meet
# SIGUSR2 lets the clock of its timeouts pass a day
TEAM = """
import signal, sys, train_gpt
now = train_gpt.time.monotonic
passed = []
train_gpt.time.monotonic = lambda: now() + 86400 * len(passed)
signal.signal(signal.SIGUSR2, lambda *_: passed.append(1))
train_gpt.MEETING_TIMEOUT = float(sys.argv.pop(1))
sys.exit(train_gpt.main(sys.argv[1:], train_gpt.os.environ))
"""


@pytest.fixture
def start(root, tmp_path):
    """Starts a dry run, as a fork -> Popen; its words are in tmp_path, NUMBER.out and NUMBER.err. What is
    left ends with the test."""
    started = []

    def start(env, patience=20.0, *argv):
        path = tmp_path / str(len(started))
        with open(f"{path}.out", "wb") as out, open(f"{path}.err", "wb") as err:
            process = fork_server.popen(["-c", TEAM, str(patience), *argv], root, SMALL | env | {
                "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, out, err)
        process.said = lambda: Path(f"{path}.err").read_text()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def free_port():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return str(place.getsockname()[1])


def answers(port):
    with socket.socket() as place:
        return place.connect_ex(("127.0.0.1", int(port))) == 0


def ended(process, seconds=120):
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    return process.poll()


@pytest.mark.parametrize("address", [
    "127.0.0.1", "192.0.2.1", "nowhere.invalid", "a..b", "x" * 300])
def test_an_address_that_does_not_answer(address, start):
    """Refused after the time that is given it, by a rank that torchrun starts and by one that it does not.
    192.0.2.1 is of a network that nobody has."""
    env = TWO | dict(RANK="1", MASTER_ADDR=address, MASTER_PORT=free_port())
    by_torchrun = env | dict(TORCHELASTIC_USE_AGENT_STORE="True", LOCAL_RANK="0")
    for process in (start(env, 0.5, "--dry-run"), start(by_torchrun, 0.5)):
        assert ended(process) == 2
        assert process.said().startswith("train_gpt: MASTER_ADDR=") and process.said().count("\n") == 1
        assert "does not answer" in process.said()


@pytest.fixture
def silent():
    """The port of something that takes connections and says nothing, as a wrong port often does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield str(listener.getsockname()[1])


def test_something_else_answers(silent, start):
    process = start(TWO | dict(RANK="1", MASTER_PORT=silent), 0.5, "--dry-run")
    assert ended(process) == 2 and process.said() == (
        f"train_gpt: something other than our ranks listens at port {silent}\n")


def test_ranks_that_never_come(start):
    """Rank 0 of two, alone; and with a rank 1 that says it is one of four."""
    port = free_port()
    env = MEETING | dict(MASTER_PORT=port, TRAIN_BATCH_TOKENS="256")
    first = start(env | dict(RANK="0", WORLD_SIZE="2"), 300)     # holds the store until the other has ended
    wait_until(lambda: answers(port))
    other = start(env | dict(RANK="1", WORLD_SIZE="4"), 0.5)
    assert ended(other) == 2
    os.kill(first.pid, signal.SIGUSR2)
    for process, count, seconds in ((other, 4, 0.5), (first, 2, 305.0)):
        assert ended(process) == 2 and process.said().count("\n") == 1
        assert f"only 1 of {count} ranks came within {seconds} s" in process.said()


@pytest.mark.parametrize("how", ["no answer", "silence", "alone"])
def test_a_rank_that_waits_stops_at_once(how, silent, start):
    port = silent if how == "silence" else free_port()
    process = start(TWO | dict(RANK="0" if how == "alone" else "1", MASTER_PORT=port), 120)
    wait_until(lambda: threads_of(process) > 1)     # the second one waits for the network
    time.sleep(0.3)
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    assert ended(process) == 1 and time.monotonic() - began < 30
    assert process.said() == "train_gpt: interrupted\n"


def threads_of(process):
    return len(os.listdir(f"/proc/{process.pid}/task"))


def test_two_ranks_without_torchrun(start):
    """As Slurm starts them: RANK and WORLD_SIZE, nothing of this machine. A third one that calls itself rank
    1 is turned away, and the two go on."""
    for _ in range(10):
        env = TWO | dict(MASTER_PORT=free_port())
        second = start(env | dict(RANK="1"), 300, "--dry-run")
        impostor = start(env | dict(RANK="1"), 300, "--dry-run")
        wait_until(lambda: threads_of(second) > 1 and threads_of(impostor) > 1)     # both look for the first
        first = start(env, 300, "--dry-run")
        assert ended(first) == 0, first.said()
        codes = {ended(second, 5), ended(impostor, 5)}
        said = second.said() + impostor.said()
        if "another process has RANK=1, too" in said:   # else the third came when the two were done
            break
    assert codes == {0, 2} and said.count("\n") == 1, said
    assert "another process has RANK=1, too" in said


@pytest.mark.parametrize("error, lost", [
    (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:3421"), True),
    (RuntimeError("NCCL communicator was aborted on rank 1."), True),
    (torch.distributed.DistStoreError("wait timeout after 300000ms"), True),
    (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
    (OSError("[Errno 104] connection closed by the server that has the shards"), False)])
def test_which_errors_blame_another_rank(error, lost):
    assert train_gpt.lost_peer(error) == lost


def test_a_port_in_use(silent, start):
    process = start(TWO | dict(MASTER_PORT=silent))
    assert ended(process) == 2 and process.said() == (
        "train_gpt: MASTER_PORT is in use: give torchrun --standalone or another --master-port\n")


# -------------------------------------------------------------------------------- torchrun starts ranks again
@pytest.fixture
def agent():
    """agent(attempt): the environment of torchrun's attempt, one rank. All of them have the same store."""
    store = train_gpt.dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def attempt(number, **more):
        return SMALL | dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
                            MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True",
                            TORCHELASTIC_RESTART_COUNT=str(number), TORCHELASTIC_MAX_RESTARTS="3") | more
    yield attempt


def dies_in_step(monkeypatch, number):
    """The next run does; the ones after it do not. number None: before its folder is there."""
    steps = []
    step = train_gpt.train_step
    prepare = train_gpt.prepare

    def train_step(*args):
        steps.append(1)
        if len(steps) == number:
            raise RuntimeError("killed")
        return step(*args)

    def prepare_once(run):
        prepare(run)
        if number is None and not steps:
            steps.append(0)
            raise RuntimeError("killed")

    monkeypatch.setattr(train_gpt, "train_step", train_step)
    monkeypatch.setattr(train_gpt, "prepare", prepare_once)


def test_a_later_attempt_goes_on_from_the_checkpoint(agent, root, monkeypatch, capsys):
    """With a name of its own, and without one."""
    monkeypatch.chdir(root)
    for more in (dict(RUN_ID="restarted"), {}):
        dies_in_step(monkeypatch, 4)
        settings = dict(ITERATIONS="5", SAVE_EVERY="2") | more
        assert train_gpt.main([], agent(0, **settings)) == 1
        assert train_gpt.main([], agent(1, **settings)) == 0
        out = capsys.readouterr().out
        assert "torchrun: attempt 2, from the last checkpoint\nresume: from step 2 " in out
        folder = Path(re.findall(r"run folder: (.+)", out)[-1])
        assert out.count(f"run folder: {folder}\n") == 2 and look(folder).result["resumed"]


@pytest.mark.parametrize("death, name", [(2, "again_restart1"), (None, "before")])
def test_a_later_attempt_begins_again_without_a_checkpoint(death, name, agent, root, monkeypatch, capsys):
    """In a folder of its own; so does one whose ranks died before they had a folder."""
    monkeypatch.chdir(root)
    dies_in_step(monkeypatch, death)
    settings = dict(ITERATIONS="3", RUN_ID=name.partition("_")[0])
    assert train_gpt.main([], agent(0, **settings)) == 1
    assert train_gpt.main([], agent(1, **settings)) == 0
    assert "torchrun: attempt 2, from the beginning\n" in capsys.readouterr().out
    assert look(Path("logs", name)).result["steps"] == 3


def test_a_resumed_run_is_restarted(agent, root, monkeypatch, capsys):
    """It is resumed again; a third attempt takes the folder that the second one had."""
    monkeypatch.chdir(root)
    settings = dict(ITERATIONS="6", RUN_ID="thrice")
    dies_in_step(monkeypatch, 2)
    assert train_gpt.main([], agent(0, **settings)) == 1
    dies_in_step(monkeypatch, 5)
    assert train_gpt.main([], agent(1, SAVE_EVERY="3", **settings)) == 1
    assert train_gpt.main([], agent(2, SAVE_EVERY="3", **settings)) == 0
    assert "resume: from step 3 " in capsys.readouterr().out
    assert look(Path("logs/thrice_restart1")).result["resumed"]


def test_ranks_meet_again(start):
    """Two ranks, three attempts, one store: each attempt's ranks find each other."""
    store = train_gpt.dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in range(3):
        env = TWO | dict(MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True",
                         TORCHELASTIC_RESTART_COUNT=str(attempt), TORCHELASTIC_MAX_RESTARTS="2")
        ranks = [start(env | dict(RANK=rank, LOCAL_RANK=rank), 20, "--dry-run") for rank in "01"]
        assert [ended(rank) for rank in ranks] == [0, 0], [rank.said() for rank in ranks]


# -------------------------------------------------------------------------------- streams that nobody reads
def run_program(words, cwd, env, shell, python="", timeout=300):
    """`python WORDS… SHELL` by bash, whose exit code is that of python -> code, out, err."""
    python = python or fork_server.start()
    command = f'"$PROGRAM" "$@" {shell}; exit ${{PIPESTATUS[0]}}'
    clean = dict(PATH=os.environ["PATH"], HOME=str(cwd), OMP_NUM_THREADS="1", PROGRAM=python) | env
    done = subprocess.run(["bash", "-c", command, "bash", *map(str, words)], cwd=cwd, env=clean,
                          capture_output=True, timeout=timeout)
    # in another encoding where PYTHONIOENCODING asks for one
    out = done.stdout.decode(errors="replace")
    err = done.stderr.decode(errors="replace")
    return SimpleNamespace(code=done.returncode, out=out, err=err)


@pytest.fixture(scope="module")
def plain(root):
    """The run that no environment may change."""
    done = run_program([SCRIPT], root, SMALL | dict(RUN_ID="plain", PICTURE="0"), "")
    assert done.code == 0, done.err
    return look(root / "logs/plain")


def same_run(folder, plain):
    found = look(folder)
    assert found.losses == plain.losses and found.weights == plain.weights
    assert found.artifact == plain.artifact
    assert found.result["val_loss_partial"] == plain.result["val_loss_partial"]
    steps = [re.findall(r"^(step:\S+ \S+|sample \d.*)", run.log, re.M) for run in (found, plain)]
    assert steps[0] == steps[1] and len(steps[0]) > 3


@pytest.mark.parametrize("by_watch, shell", [
    (False, "| head -2"), (False, "> /dev/full 2>&1"), (True, "| head -2")])
def test_a_run_goes_on_when_nobody_reads(by_watch, shell, root, plain):
    """Into train.log, to its end."""
    run_id = f"r{by_watch}_{re.sub('[^a-z0-9]', '', shell)}"
    words = [ROOT / "tools/watch.py", fork_server.start(), SCRIPT] if by_watch else [SCRIPT]
    done = run_program(words, root, SMALL | dict(RUN_ID=run_id, PICTURE="0"), shell)
    assert (done.code, done.err) == (0, "")
    same_run(root / "logs" / run_id, plain)


@pytest.mark.parametrize("words, code", [(["--help"], 0), (["--dry-run"], 0), (["--nonsense"], 2)])
def test_plans_and_refusals_that_nobody_reads(words, code, root):
    for shell in ("| true", "> /dev/full 2>&1"):
        done = run_program([SCRIPT, *words], root, SMALL, shell)
        assert done.code == code and "Traceback" not in done.err and done.err.count("\n") <= 1, done.err


def test_a_record_tool_that_nobody_reads(root, plain):
    words = [ROOT / "records/record.py", "stats", "logs/plain"]
    assert run_program(words, root, {}, "").out
    done = run_program(words, root, {}, "| true")
    assert (done.code, done.err) == (0, "")


# -------------------------------------------------------------------------------- interpreters, environments
ODD = dict(
    PYTHONOPTIMIZE="2", PYTHONWARNINGS="error", PYTHONUTF8="0", LC_ALL="C", PYTHONIOENCODING="ascii",
    PYTHONSAFEPATH="1", PYTHONDONTWRITEBYTECODE="1", PYTHONNOUSERSITE="1", PYTHONHASHSEED="7",
    PYTHONFAULTHANDLER="1", PYTHONUNBUFFERED="1", PYTHONCOERCECLOCALE="0", OMP_NUM_THREADS="1",
    TMPDIR="/nowhere/x", HOME="/nowhere/y", XDG_CACHE_HOME="", MPLCONFIGDIR="/proc/nowhere", TZ="Mars/Moon",
    TORCHINDUCTOR_CACHE_DIR="/proc/nowhere", COLUMNS="0", LINES="-1", TERM="odd", NO_COLOR="1",
    CUDA_VISIBLE_DEVICES="abc")


@pytest.mark.parametrize("folder, stays", [("", False), ("/proc/nowhere", False), ("cache", True)])
def test_the_cache_of_the_compiler(folder, stays, tmp_path, monkeypatch):
    """Torch imports its compiler for every run, which fails where this folder cannot be made. When it is
    imported first, it puts a folder of its own into the environment: not after the run has begun."""
    importlib.import_module("torch._dynamo.package")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
    train_gpt.Team(train_gpt.load_config(SMALL), {})
    assert ("TORCHINDUCTOR_CACHE_DIR" in os.environ) == stays == Path("cache").is_dir()


ODD_FOLDERS = {     # what has a space or quote, what is said of it
    "a cache with a space": (dict(TORCHINDUCTOR_CACHE_DIR="my cache"), "TORCHINDUCTOR_CACHE_DIR"),
    "a cache with a quote": (dict(TORCHINDUCTOR_CACHE_DIR='6" disk'), "TORCHINDUCTOR_CACHE_DIR"),
    "a temporary folder": (dict(TMPDIR="it's tmp"), "TMPDIR"),
    "a user": (dict(LOGNAME="J. O'Neil"), "the user's name"),
    "a user and a temporary folder": (dict(USER="a b", LOGNAME="", TMPDIR="a\tb"),
                                      "TMPDIR and the user's name"),
    "a good cache stays": (dict(TORCHINDUCTOR_CACHE_DIR="cache", TMPDIR="a b"), "TMPDIR"),
    "nothing": (dict(TMPDIR="Café-1.2", LOGNAME="jürgen", HOME="a b"), None)}


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """folders(env): such an environment, with folders that are there -> what names torch's folders."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    def folders(env):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        monkeypatch.setattr(tempfile, "tempdir", None)
        for name in ("LOGNAME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):     # what a run may change
            monkeypatch.setenv(name, "kept")
            monkeypatch.delenv(name)
        for name, value in env.items():
            path = tmp_path / value
            if name not in ("LOGNAME", "USER"):
                path.mkdir(exist_ok=True)
            monkeypatch.setenv(name, value if name in ("LOGNAME", "USER") else str(path))
        return lambda: (cache_dir(), default_cache_dir(), tempfile.gettempdir())
    return folders


@pytest.mark.parametrize("case", ODD_FOLDERS)
def test_the_compiler_gets_folders_that_it_can_use(case, folders, tmp_path):
    """The line says what was to blame."""
    env, named = ODD_FOLDERS[case]
    places = folders(env)
    note = train_gpt.Team(train_gpt.load_config(SMALL), {}).cache_note
    assert note == (f"compile: a space or quote in {named}: other folders are used" if named else "")
    assert not [path for path in places() if train_gpt.is_odd(path)]
    assert (places()[0] == str(tmp_path / "cache")) == (env.get("TORCHINDUCTOR_CACHE_DIR") == "cache")
    assert train_gpt.choose_cache() == ""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a cache with a quote", "a temporary folder", "a user"])
def test_a_run_compiles_whatever_its_folders(case, folders, root):
    folders(ODD_FOLDERS[case][0])
    env = {name: os.environ[name] for name in ODD_FOLDERS[case][0]}
    name = f"odd{case.count('a')}{len(case)}"
    done = run_program([SCRIPT], root, SMALL | env | dict(COMPILE="1", RUN_ID=name), "", sys.executable)
    assert done.code == 0, done.err
    assert look(root / "logs" / name).result["compiled"] and "other folders are used" in done.out


def test_what_did_not_compile_is_blamed(train, monkeypatch):
    """The path of Python; a variable that turns compiling off. result.json says what happened."""
    def fails(*args, **kw):
        raise RuntimeError("no such file")

    assert train(SMALL, COMPILE="0").result["compiled"] is False
    monkeypatch.setattr(train_gpt.sys, "prefix", "/opt/it's me/venv")
    monkeypatch.setattr(train_gpt.torch, "compile", fails)
    done = train(SMALL, COMPILE="1")
    assert done.code == 0 and done.result["compiled"] is False
    assert ("compile: not possible here (RuntimeError: no such file); the path of this Python has a space or "
            "quote in it; training uncompiled\n") in done.log
    with train_gpt.torch._dynamo.config.patch(disable=True):  # a monkeypatch would leave it hidden
        done = train(SMALL, COMPILE="1")
    assert done.code == 0 and done.result["compiled"] is False
    assert "compile: TORCH_COMPILE_DISABLE turns it off; training uncompiled\n" in done.log


@pytest.mark.slow
def test_an_odd_environment_changes_nothing(root, plain):
    """A run by watch.py in all of it, its reader gone."""
    words = [ROOT / "tools/watch.py", sys.executable, SCRIPT]
    env = SMALL | ODD | dict(RUN_ID="odd")
    done = run_program(words, root, env, "| head -3", sys.executable)
    assert done.code == 0 and "Traceback" not in done.err, done.err
    same_run(root / "logs/odd", plain)


@pytest.mark.slow
def test_odd_flags_and_closed_streams_change_nothing(root, plain):
    words = ["-OOIbb", "-W", "error", "-X", "dev", SCRIPT]
    done = run_program(words, root, SMALL | dict(RUN_ID="flags"), "<&- >&- 2>&-", sys.executable)
    assert done.code == 0
    same_run(root / "logs/flags", plain)


# -------------------------------------------------------------------------------- 300 drawn environments
NUMBERS = ("0", "0", "1", "1", "2", "", "x", "-1", "1.0", " 1", "9" * 30, "½")
DRAWN = {
    **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), NUMBERS),
    "MASTER_ADDR": ("127.0.0.1", "", "nowhere.invalid", "192.0.2.1", "a b", "::1"),
    "MASTER_PORT": ("29500", "1", "0", "65536", "x", "", "tcp://10.0.0.1:80"),
    "TORCHELASTIC_USE_AGENT_STORE": ("False", "True", "x"), "CUDA_VISIBLE_DEVICES": ("", "-1", "abc", "0"),
    "LANG": ("C", "xx_YY", ""), "LC_ALL": ("C", "POSIX", "de_DE.UTF-8", "x"), "TZ": ("", "x", ":/x"),
    "HOME": ("/nowhere", "", "data", "a b"), "TMPDIR": ("/nowhere", "", "data", "/proc"),
    "XDG_CACHE_HOME": ("/proc", ""), "TERM": ("", "dumb", "x"), "COLUMNS": ("0", "-1", "x", "1"),
    "USER": ("", "a/b"), "PWD": ("/nowhere",), "SHELL": ("/nowhere",), "NO_COLOR": ("1",)}
# What an interpreter or the libraries heed when they begin, so that a fork would not notice
AT_THE_START = {
    "OMP_NUM_THREADS": ("0", "", "abc", "-1", "4,2", "1.5"), "MKL_NUM_THREADS": ("0", "x"),
    "OMP_SCHEDULE": ("x",), "OMP_PROC_BIND": ("x", "true"), "KMP_AFFINITY": ("x",), "OMP_DYNAMIC": ("x",),
    "PYTHONOPTIMIZE": ("1", "2", "x"), "PYTHONWARNINGS": ("error", "always"), "PYTHONUTF8": ("0", "1"),
    "PYTHONIOENCODING": ("ascii", "latin-1", ":strict"), "PYTHONSAFEPATH": ("1",), "PYTHONDEVMODE": ("1",),
    "PYTHONHASHSEED": ("0", "77", "random"), "PYTHONDONTWRITEBYTECODE": ("1",), "PYTHONNOUSERSITE": ("1",),
    "PYTHONUNBUFFERED": ("1", ""), "PYTHONFAULTHANDLER": ("1",), "PYTHONCOERCECLOCALE": ("0", "warn"),
    "PYTHONPATH": ("/nowhere", ":::"), "PYTHONMALLOC": ("malloc", "debug"),
    "PYTHONINTMAXSTRDIGITS": ("640",), "PYTHONWARNDEFAULTENCODING": ("1",), "PYTHONNODEBUGRANGES": ("1",)}
CASES = range(300)
FRESH = 20      # each such case has an interpreter of its own, the others are forks
SAMPLE = random.Random(46).sample([case for case in CASES if case % FRESH], 6) + [160]


def drawn_environment(case):
    """{name: text} of this number; for every twentieth what matters at the start, too."""
    rng = random.Random(f"environment {case}")
    table = DRAWN
    if case % FRESH == 0:
        table = {name: texts for name, texts in DRAWN.items() if rng.random() < 0.3} | AT_THE_START
    names = rng.sample([*table], rng.randint(2, 12))
    env = {name: rng.choice(table[name]) for name in names}
    if case % 4 == 0:       # a launch of one process, or none
        env = {name: text for name, text in env.items() if not re.search("RANK|WORLD|MASTER", name)}
        env |= rng.choice(({}, dict(RANK="0", WORLD_SIZE="1"), TWO | dict(WORLD_SIZE="1")))
    return env


def test_text_is_utf8_whatever_the_locale():
    """A C locale without Python's UTF-8 mode hands its bytes on undecoded."""
    raw = "é😀".encode()
    assert train_gpt.load_config({"SAMPLE": raw.decode("ascii", "surrogateescape")}).sample == "é😀"
    with pytest.raises(Refused, match=r"^sample='.*' must be written like text in UTF-8$"):
        train_gpt.load_config({"SAMPLE": b"\xe9".decode("ascii", "surrogateescape")})


def test_a_value_of_the_wrong_form():
    """The sentence shows one of the right form, also for lists that are empty by default."""
    with pytest.raises(Refused, match="^window_schedule='abc' must be written like 1,2$"):
        train_gpt.load_config({"WINDOW_SCHEDULE": "abc"})
    with pytest.raises(Refused, match="^seed='abc' must be written like 1337$"):
        train_gpt.load_config({"SEED": "abc"})


@pytest.mark.parametrize("word, flag", [
    ("MATRIX_LR=0.03", "matrix-lr"), ("matrix-lr", "matrix-lr"), ("core", "core")])
def test_a_flag_without_its_dashes(word, flag):
    with pytest.raises(Refused, match=f"did you mean --{flag}"):
        list(train_gpt.parse_flags([word]))


def test_the_driver_is_asked_only_if_torch_finds_no_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(train_gpt.subprocess, "getoutput", lambda what: asked.append(what) or "GPU 0: H100")
    monkeypatch.setattr(train_gpt.torch.cuda, "is_available", lambda: False)
    auto = train_gpt.load_config(SMALL | dict(DEVICE="auto"))
    with pytest.raises(Refused, match="cannot use the GPUs of the driver GPU 0: H100: install a build"):
        train_gpt.Team(auto, {})
    assert [what.split()[1] for what in asked] == ["-L", "--query-gpu=driver_version"]
    asked.clear()
    train_gpt.Team(auto, {"CUDA_VISIBLE_DEVICES": "-1"})
    train_gpt.Team(train_gpt.load_config(SMALL), {})
    monkeypatch.setattr(train_gpt.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(train_gpt.torch.cuda, "device_count", lambda: 1)
    ranks = TWO | dict(LOCAL_WORLD_SIZE="2", LOCAL_RANK="0")
    with pytest.raises(Refused, match="2 ranks for 1 GPUs here"):
        train_gpt.Team(auto, ranks)
    assert not asked


def test_a_name_that_the_locale_cannot_write(root, plain, monkeypatch, capsys):
    def mkdir(path, **_):
        str(path).encode("ascii")

    monkeypatch.chdir(root)
    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert train_gpt.main([], SMALL | dict(RUN_ID="naïve")) == 2
    assert capsys.readouterr().err == "train_gpt: run_id='naïve': this locale cannot write it\n"


def test_a_working_folder_that_is_gone(tmp_path):
    """MKL would end the process, in words of its own."""
    script = f'cd "{tmp_path}" && mkdir gone && cd gone && rmdir "{tmp_path}/gone" && exec "$0" "$1"'
    done = subprocess.run(["bash", "-c", script, sys.executable, SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "train_gpt: the working folder is gone\n")


def is_one_process(env):
    """Do the variables of a launch name one process, or nothing?"""
    given = {name: env[name] for name in train_gpt.LAUNCH_NUMBERS if name in env}
    if any(not re.fullmatch("[0-9]{1,9}", text) for text in given.values()):
        return False
    if not 0 < int(given.pop("MASTER_PORT", 1)) < 65536:
        return False
    alone = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1)
    right = all(int(text) == alone[name] for name, text in given.items())
    return not given or right and {"RANK", "WORLD_SIZE"} <= {*given}


@pytest.mark.fuzz
@pytest.mark.parametrize("cases", [
    pytest.param(SAMPLE, id="sample"), pytest.param(CASES, id="all", marks=pytest.mark.slow)])
def test_drawn_environments(cases, root, plain):
    """The same run, to the bit, or one sentence about the launch, within a minute: four on a busy machine,
    where that begins with the import of torch."""
    trained = 0
    for case in cases:
        env = drawn_environment(case)
        print(f"drawn_environment({case}): {env}")
        whole = SMALL | dict(RUN_ID=f"drawn{case}", PICTURE="0", OMP_NUM_THREADS="1") | env
        fresh = case % FRESH == 0
        words = [SCRIPT] if fresh else ["-c", TEAM, "0.3"]
        paths = {} if fresh else {"PYTHONPATH": str(ROOT)}
        python = sys.executable if fresh else ""
        done = run_program(words, root, whole | paths, "", python, timeout=240 if fresh else 60)
        assert "Traceback" not in done.err, done.err
        if is_one_process(env):
            assert done.code == 0, done.err
            same_run(root / "logs" / f"drawn{case}", plain)
            trained += 1
        else:
            said = [line for line in done.err.splitlines() if line.startswith("train_gpt: ")]
            assert done.code == 2 and len(said) == 1 and done.out == "", (done.code, done.err)
            assert re.search("RANK|WORLD_SIZE|MASTER_|ranks", said[0]), said
            assert not (root / "logs" / f"drawn{case}").exists()
    assert len(cases) / 10 < trained < len(cases) * 0.7
