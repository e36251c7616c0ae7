"""The launcher and its parts. What a command line asks for, what is prepared, how a run is started, watched,
stopped, restarted and shown, and that nothing outlives it."""
import json
import os
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

import fork_server
from helpers import OURS, ROOT, SCRIPT, TOY, look, on_terminal, run_cli, slow, wait_until
from tools.run import guard, launch, preflight, pulse, surroundings, watch
import train_gpt
from train_gpt import Refused, load_config

SMALL = {name: text for name, text in TOY.items() if name.lower() in vars(load_config({}))}
SMALL |= dict(
    ITERATIONS="12", TRAIN_SEQ_LEN="64", TRAIN_BATCH_TOKENS="256", VAL_TOKENS="256", TRAIN_LOG_EVERY="1",
    NUM_LAYERS="1", MODEL_DIM="16", NUM_HEADS="1", VALUE_EMBED_LAYERS="0", COUNT_ORDERS="0", COUNT_WORDS="0",
    COPY_ORDERS="0", VAL_PART="0", OMP_NUM_THREADS="1")


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """An empty folder, as the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------- the command line
def read(*argv, **env):
    return launch.read_words(argv, env)


def test_words_of_the_launcher_are_told_from_constants():
    found = read("tiny", "MATRIX_LR=0.02", "--script", "SAMPLE=a b=c", "--compile", "LOGGER=wandb",
                 "RESTARTS=3")
    assert found.constants == ["tiny", "MATRIX_LR=0.02", "SAMPLE=a b=c", "--compile"]
    assert (found.script, found.proxy, found.dry_run, found.help) == (True, None, False, False)
    assert (found.logger, found.restarts) == ("wandb", "3")
    assert read("golf", "--proxy").proxy == "" and read("--proxy=64").proxy == "64" == read("PROXY=64").proxy
    assert read("--restarts=2", RESTARTS="1").restarts == "2"
    assert read(RESTARTS="1", LOGGER="x")[-3:] == ("x", "1", "") and read("--ranks=2").ranks == "2"


@pytest.mark.parametrize("words, env, planned", [
    (["--dry-run"], {}, True), (["DRY_RUN=1"], {}, True), (["--dry-run=True"], {}, True),
    ([], dict(DRY_RUN="1"), True), ([], dict(DRY_RUN="0"), False), (["DRY_RUN=false"], {}, False),
    (["--dry-run=0"], dict(DRY_RUN="1"), False)])
def test_ways_to_ask_for_a_plan(words, env, planned):
    assert read(*words, **env)[:4] == ([], False, None, planned)


# ---------------------------------------------------------------- what is prepared
@pytest.fixture
def machine(monkeypatch):
    """machine(gpus, compiler): such a one, whose plan is not made. What it returns tells what was asked for
    and fetched."""
    told = SimpleNamespace(asked=[], fetches=[])

    def machine(gpus=0, compiler=True):
        def check_run(asked, env):
            told.asked.append(asked)
            print("a plan")
            return asked.cfg

        monkeypatch.setattr(preflight, "gpus", lambda: gpus)
        monkeypatch.setattr(preflight.torch.cuda, "get_device_name", lambda n: f"card {n}")
        why = "" if compiler else "there is no C++ compiler (g++)"
        monkeypatch.setattr(preflight, "compiler_missing", lambda env: why)
        monkeypatch.setattr(preflight, "check_run", check_run)
        monkeypatch.setattr(preflight, "fetch", told.fetches.append)
        return told
    return machine


def answer(*argv, **env):
    return preflight.preflight(launch.read_words(argv, env), env, launched=True)


def prepared(*argv, **env):
    found = answer(*argv, **env)
    return dict(words=found["words"], ranks=found["ranks"])


def torchrun(ranks, *words):
    start = ["-m", guard.TORCHRUN, "--standalone", f"--nproc_per_node={ranks}"]
    return dict(words=[*start, *words], ranks=ranks)


def alone(*words):
    return dict(words=[*words], ranks=1)


GOLF = "logs/.script/golf/train_gpt.py"
OLD = "logs/old/train_gpt.py"
WHOLE = str(SCRIPT)


def test_every_gpu_is_used(machine, empty):
    """But one for tiny and proxies, whose steps have few rows, and none with DEVICE=cpu. The golf games train
    by a script of their recipe alone."""
    machine(gpus=3)
    assert prepared("golf") == torchrun(3, GOLF, "--preset=golf")
    assert (empty / GOLF).read_text().startswith('"""train_gpt: the recipe golf alone')
    assert prepared(PRESET="golf") == torchrun(3, GOLF)
    assert prepared("speedrun") == torchrun(3, WHOLE, "--preset=speedrun")
    assert prepared() == prepared("tiny") | dict(words=[WHOLE]) == alone(WHOLE)
    assert prepared("gpt2", "--device=cpu", COMPILE="0") == alone(WHOLE, "--preset=gpt2", "--device=cpu")
    assert prepared("gpt2", DEVICE="cpu") == alone(WHOLE, "--preset=gpt2")


def test_what_mfu_needs(machine, empty):
    """A run that goes on has what it began with, and nothing on other hardware or by another version."""
    machine(gpus=2)
    found = answer("speedrun")
    assert (found["gpus"], found["dtype"]) == (["card 0", "card 1"], "bf16")
    assert [(first, tokens) for first, tokens, _ in found["flops"]] == [
        (0, 131_072), (707, 262_144), (1414, 393_216), (2120, 393_216)]
    assert found["flops"] == sorted(found["flops"], key=lambda stage: stage[2])     # as windows grow
    assert (answer("speedrun", DEVICE="cpu")["gpus"], answer("gpt2")["dtype"]) == ([], "fp8")
    constants = {name: train_gpt.show(value)
                 for name, value in vars(train_gpt.preset_config("speedrun_plus")).items()}
    resumed = constants | dict(folder=empty, run_id="old", vocab_size="1024")
    began(ranks=2, **resumed)
    found = answer("RESUME=old")
    assert (found["gpus"], found["dtype"]) == (["card 0", "card 1"], "fp8")
    stages = [*zip(found["flops"], answer("speedrun_plus")["flops"], strict=True)]
    assert all(old[:2] == new[:2] and old[2] < new[2] for old, new in stages)     # a smaller lm_head
    assert answer("RESUME=old", DEVICE="cpu")["gpus"] == []
    for other in (dict(ranks=1), dict(ranks=2, vocab_size="x"), dict(ranks=2, batch_schedule="1,2,3"),
                  dict(ranks=2, of_another_version="1")):
        began(**resumed | other)
        assert answer("RESUME=old", "--ranks=2")["gpus"] == []
    began(ranks=2, **resumed)
    machine(gpus=1)
    assert answer("RESUME=old", "--ranks=2")["gpus"] == []


def test_what_gets_data(monkeypatch, capsys, empty):
    """Without data there is no run, and the exit code is that of the program. Without the tasks of CORE the
    trainer decides."""
    called = []

    def popen(words):
        called.append(words[1:])
        return SimpleNamespace(wait=lambda: 3)

    monkeypatch.setattr(preflight.subprocess, "Popen", popen)
    for arguments, program in (([], "prepare"), (["gpt2"], "download")):
        with pytest.raises(preflight.Ended, match="3"):
            preflight.fetch(arguments)
        assert called.pop() == ["-m", f"data.{program}", *arguments]
    preflight.fetch(["core"])
    assert capsys.readouterr().out.splitlines()[1:] == [
        "getting data: ./run.sh data gpt2", "getting data: ./run.sh data core"]
    monkeypatch.setattr(preflight, "gpus", lambda: 0)
    assert preflight.main(["--json", "--device=cpu", "--compile=0"], {}) == 3


@pytest.mark.parametrize("words, env", [(["gpt2", "--dry-run"], {}), (["golf"], dict(DRY_RUN="1"))])
def test_a_plan_fetches_and_makes_nothing(words, env, machine, empty, capsys):
    told = machine()
    assert launch.main(words, env) == 0 and capsys.readouterr().out == "a plan\n"
    assert told.fetches == [] and list(empty.iterdir()) == [] and told.asked[0].dry_run


def test_without_a_compiler_the_step_stays_uncompiled(machine, empty, capsys):
    """On a CPU, and a line says so."""
    machine(compiler=False)
    assert prepared("--seed=1")["words"] == [WHOLE, "--seed=1", "--compile=0"]
    line, plan = capsys.readouterr().out.splitlines()
    assert line.startswith("compile: there is no C++ compiler (g++), so the step stays uncompiled: ")
    assert plan == "a plan"
    assert prepared(COMPILE="0")["words"] == [WHOLE] and capsys.readouterr().out == "a plan\n"
    machine(gpus=1, compiler=False)
    assert prepared("golf")["words"] == [GOLF, "--preset=golf"]


def test_a_compiler_is_found_where_torch_looks(tmp_path, monkeypatch):
    for name in ("g++", "mine"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    path = dict(PATH=str(tmp_path))
    assert surroundings.compiler_missing(path) == "" == surroundings.compiler_missing(path | dict(CXX="mine"))
    assert surroundings.compiler_missing(path | dict(CXX="gone")) == "there is no C++ compiler (gone)"
    assert surroundings.compiler_missing(dict(PATH="/nowhere")) == "there is no C++ compiler (g++)"
    monkeypatch.setattr(sys, "prefix", "/opt/it's me/venv")
    assert surroundings.compiler_missing(path) == "the path of this Python has a space or quote in it"


def test_a_preset_trains_by_a_script_of_its_recipe_where_that_is_asked_for(machine, empty):
    told = machine()
    own = "logs/.script/tiny/train_gpt.py"
    assert prepared("tiny", "--script", "MATRIX_LR=0.02") == alone(own, "--preset=tiny", "--matrix-lr=0.02")
    assert told.asked[0].alone and [*Path(own).parent.iterdir()] == [Path(own)]
    assert Path(own).read_text().startswith('"""train_gpt: the recipe tiny alone')
    with pytest.raises(Refused, match="--script: proxies are made from the whole"):
        prepared("speedrun", "--script", "--proxy=64")


def test_a_proxy_takes_one_gpu_and_the_embedded_text(machine, empty, monkeypatch):
    """It is trained by train_gpt.py itself; a text of one's own is left alone."""
    told = machine(gpus=8)
    def expand_proxy(width, words, env, log):
        return [*words, f"--model-dim={width or 32}"]

    monkeypatch.setitem(sys.modules, "tools.run.proxy", SimpleNamespace(expand_proxy=expand_proxy))
    found = prepared("golf", "--proxy=128")
    assert found == alone(WHOLE, "--preset=golf", "--model-dim=128") and told.fetches == [[]]
    mine = prepared("golf", "--proxy", "DATA_PATH=mine")
    assert mine["words"][1:] == ["--preset=golf", "--data-path=mine", "--model-dim=32"]
    assert told.fetches == [[]]


# ---------------------------------------------------------------- a run that goes on
def began(folder, run_id="old", preset="golf", ranks=1, device="auto", script="a script\n", **constants):
    """The folder of a run, as far as the launcher asks it."""
    place = folder / "logs" / run_id
    place.mkdir(parents=True, exist_ok=True)
    config = dict(preset=preset, device=device, run_id=run_id) | constants
    start = dict(kind="start", preset=preset, world_size=ranks, config=config, hardware=f"{ranks}x card 0")
    events = [start, start | dict(preset="tiny")]       # when it began, when it went on
    (place / "events.jsonl").write_text("".join([json.dumps(event) + "\n" for event in events]))
    (place / "train_gpt.py").write_text(script)


@pytest.mark.parametrize("words, env", [
    (["RESUME=old"], {}), (["--resume=old"], {}), (["--resume", "old"], {}), ([], dict(RESUME="old"))])
def test_a_run_goes_on_as_it_began(words, env, machine, empty):
    """With its script, preset and ranks, whatever is here now."""
    told = machine(gpus=8)
    began(empty, ranks=2)
    flags = ["--preset=golf", *["--resume=old"] * len(words[:1])]
    assert prepared(*words, **env) == torchrun(2, "logs/old/train_gpt.py", *flags)
    assert told.fetches == told.asked == []


@pytest.mark.parametrize("run, words, found", [
    (dict(ranks=8), [], torchrun(2, OLD, "--preset=golf", "--resume=old")),     # fewer GPUs
    (dict(ranks=8, device="cpu"), [], alone(OLD, "--preset=golf", "--resume=old")),
    (dict(preset="speedrun"), [], alone(OLD, "--preset=speedrun", "--resume=old")),     # a proxy
    (dict(preset="speedrun"), ["PRESET=tiny"], alone(OLD, "--resume=old", "--preset=tiny")),
    (dict(run_id="another"), [], alone(WHOLE, "--resume=old"))])       # which the trainer refuses
def test_a_run_goes_on_where_it_can(run, words, found, machine, empty):
    """Without a compiler, too: its checkpoint knows whether it began so, and a flag would be refused."""
    machine(gpus=2, compiler=False)
    began(empty, **run)
    assert prepared("RESUME=old", *words) == found


def test_words_of_a_restart():
    folder = Path("logs/r")
    assert launch.goes_on(["train_gpt.py", "--run-id=r", "--matrix-lr=0.02"], folder) == [
        "logs/r/train_gpt.py", "--matrix-lr=0.02", "--resume=r"]
    flags = ["--preset=golf", "--resume=r"]
    words = torchrun(2, GOLF, *flags)["words"]
    assert launch.goes_on(words, folder) == torchrun(2, "logs/r/train_gpt.py", *flags)["words"]


# ---------------------------------------------------------------- the environment of a trainer
@pytest.mark.parametrize("vendor, given, found", [
    ("AuthenticAMD", {}, "AVX512F"), ("GenuineIntel", {}, None),
    ("AuthenticAMD", dict(NPY_DISABLE_CPU_FEATURES=""), None),
    ("AuthenticAMD", dict(NPY_ENABLE_CPU_FEATURES="AVX512F"), None),
    ("AuthenticAMD", dict(NPY_DISABLE_CPU_FEATURES="AVX2"), None)])
def test_a_run_sorts_without_avx512_on_amd_unless_told_otherwise(vendor, given, found, monkeypatch, tmp_path):
    """The trainer reads it when it imports numpy; an empty one leaves numpy as it is."""
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    monkeypatch.setattr(surroundings, "CPU_INFO", tmp_path / "cpuinfo")
    assert surroundings.for_trainer(given)[0].get("NPY_DISABLE_CPU_FEATURES") == found


def test_idle_threads_soon_sleep_unless_told_otherwise():
    assert surroundings.for_trainer({})[0]["GOMP_SPINCOUNT"] == "5000"
    for given in (dict(GOMP_SPINCOUNT="INFINITE"), dict(OMP_WAIT_POLICY="active")):
        assert "GOMP_SPINCOUNT" not in surroundings.for_trainer(given)[0]


def test_memory_grows_in_segments_unless_told_otherwise():
    assert surroundings.allocator({}) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert surroundings.allocator(dict(PYTORCH_CUDA_ALLOC_CONF="x")) == {}


# ---------------------------------------------------------------- a run that stands still
class Clocked:
    """A Pulse whose clock stands still but where a test lets it run, of a run with that config."""

    def __init__(self, tmp_path, ranks=1, **config):
        self.now = 0.0
        self.pulse = pulse.Pulse(ranks, lambda: self.now)
        self.file = tmp_path / "events.jsonl"
        self.file.write_text("")
        self.pulse.line(f"run folder: {tmp_path}")
        self.tell("start", config=config, data=dict(val_tokens=1000))
        self.tell("setup")

    def tell(self, kind, **event):
        with open(self.file, "a") as file:
            file.write(json.dumps(event | dict(kind=kind)) + "\n")
        self.pulse.read_events()

    def trains(self, last, seconds, first=1, steps=1000):
        """Reports of steps that take so many seconds each."""
        for step in [*range(first, min(last, 10) + 1), *range(100, last + 1, 100)]:
            before = self.pulse.report.get("step", 0)
            self.now += (step - before) * seconds
            self.tell("train", step=step, steps=steps, seconds=step * seconds, tokens=100 * step)

    def waits(self, seconds):
        """What is said once nothing has happened for so long, and when."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1
            said = self.pulse.overdue()
            if said:
                return said
        return ""


def test_a_run_that_stands_still(tmp_path):
    """Ten times what the slowest steps until the next report would take, and two minutes."""
    run = Clocked(tmp_path)
    run.trains(200, 0.5)
    waited = pulse.LEAST + 10 * 0.5 * 100 + 3 * 50
    assert run.waits(waited - 2) == ""
    said = run.waits(5)
    assert said.startswith("run.sh: nothing has happened for ")
    assert " s after step 200, where no step took longer than 0.5 s: the run hangs" in said


def test_a_run_that_is_slow_does_not_hang(tmp_path):
    """As its steps were, or its longest silence; a line is a sign of life."""
    run = Clocked(tmp_path)
    run.trains(10, 30.0)
    assert run.waits(90 * 30) == ""
    run.now += 600
    run.pulse.line("a warning")
    run.trains(100, 30.0, first=100)
    assert run.waits(3 * 600) == ""


def test_what_is_no_training_has_no_pace(tmp_path):
    """Compiling and counting, scores, the end, and the last validation, which may have begun."""
    run = Clocked(tmp_path)
    assert run.waits(9000) == ""
    run.trains(200, 0.1)
    assert run.waits(9000) != ""
    run.pulse.line("evaluating CORE")
    assert run.waits(9000) == ""
    for kind in ("stop", "artifact", "score", "end"):
        run.trains(300, 0.1, first=300)
        run.tell(kind)
        assert run.waits(9000) == ""


@pytest.mark.parametrize("config, more", [
    (dict(save_every="50"), pulse.SAVING), (dict(save_every_seconds="60.0"), pulse.SAVING)])
def test_checkpoints_take_their_time(config, more, tmp_path):
    plain = Clocked(tmp_path)
    plain.trains(100, 0.1)
    run = Clocked(tmp_path, **config)
    run.trains(100, 0.1)
    assert run.pulse.may_be_silent() == pytest.approx(plain.pulse.may_be_silent() + more)


def test_a_launcher_that_was_stopped_itself_blames_nobody(tmp_path):
    """Ctrl-Z, a laptop that slept."""
    run = Clocked(tmp_path)
    run.trains(100, 0.1)
    run.now += 9000
    assert run.pulse.overdue() == "" and run.waits(100) == "" and run.waits(9000) != ""


@pytest.mark.parametrize("heard, blamed", [
    ([], ""), ([0], "rank 1 did"), ([1], "rank 0 did"), ([0, 1], "")])
def test_the_rank_that_does_not_say_that_it_waited(heard, blamed):
    run = pulse.Pulse(2)
    for rank in heard:
        run.line(f"train_gpt: rank {rank}: another rank is gone or hangs (DistBackendError: timed out)")
    assert run.blame().startswith(f"run.sh: {blamed}" if blamed else "") and bool(run.blame()) == bool(blamed)


# ---------------------------------------------------------------- the guard
ASKS = """
import json, os, sys
print(json.dumps(dict(argv=sys.argv, name=__name__, file=__file__, first=sys.path[0], stdin=sys.stdin.read(),
                      x=os.environ.get("X"), ours="guard" in sys.modules)))
"""


def guarded(*words, **env):
    """(exit code, stdout, stderr) of such a program."""
    child = guard.Guarded(words, os.environ | env, subprocess.PIPE, subprocess.PIPE)
    out, err = child.process.communicate(timeout=300)
    return child.process.returncode, out, err


def test_a_guarded_program_is_run_as_python_runs_it(empty):
    (empty / "asks.py").write_text(ASKS)
    plain = subprocess.run([sys.executable, "asks.py", "a b", "--c"], capture_output=True, text=True,
                           stdin=subprocess.DEVNULL, env=os.environ | dict(X="1"))
    code, out, err = guarded("asks.py", "a b", "--c", X="1")
    asked = json.loads(plain.stdout)
    asked["argv"][0] = str(empty / "asks.py")
    assert (code, json.loads(out), err) == (0, asked, "")
    _, out, _ = guarded("-m", "asks", "d")
    assert json.loads(out)["argv"] == [str(empty / "asks.py"), "d"] and json.loads(out)["name"] == "__main__"


@pytest.mark.parametrize("code, ends, err", [
    ("import sys; sys.exit(2)", 2, ""), ("import sys; sys.exit('why')", 1, "why\n"),
    ("1 / 0", 1, "ZeroDivisionError"),
    ("import os; os.kill(os.getpid(), 9)", 137, ""), ("import os; os._exit(5)", 5, ""),
    ("raise KeyboardInterrupt", 130, "")])
def test_the_exit_code_of_a_guarded_program(code, ends, err, empty):
    (empty / "p.py").write_text(code)
    found = guarded("p.py")
    assert found[0] == ends and (err in found[2] if err else found[2] == "")


LEAVES = """
import os, subprocess, sys, time
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", DEAF], start_new_session=True, stdout=subprocess.DEVNULL,
                 stderr=subprocess.DEVNULL)
if sys.argv[1] == "dies":
    time.sleep(0.5)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["ends", "dies"])
def test_what_a_program_leaves_behind_is_ended(how, empty, monkeypatch, marker):
    """Also in a session of its own, deaf to SIGTERM, and where the program was killed."""
    monkeypatch.setattr(guard, "PATIENCE", 1.0)
    (empty / "leaves.py").write_text(LEAVES)
    assert guarded("leaves.py", how, **marker.env)[0] == (0 if how == "ends" else 137)
    assert marker.left() == []


class Marker:
    """Finds processes by a variable of their environment."""

    def __init__(self):
        self.env = dict(LAUNCHER_TEST=uuid.uuid4().hex)

    def left(self):
        found = []
        text = f"LAUNCHER_TEST={self.env['LAUNCHER_TEST']}\0".encode()
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if text in (path / "environ").read_bytes():     # of a zombie it is empty
                    found.append(int(path.name))
        return found


@pytest.fixture
def marker():
    marker = Marker()
    yield marker
    guard.kill(marker.left(), signal.SIGKILL)


# ---------------------------------------------------------------- as a program, its parts stand-ins
DRIVER = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
os.environ["PYTHONPATH"] = {str(ROOT)!r}
from tools.run import guard, launch, pulse, watch
if "STAND_INS" in os.environ:
    launch.PREFLIGHT, watch.SHOW = ["prepare.py"], ["show.py"]
guard.PATIENCE = float(os.environ.get("PATIENCE", 60))
pulse.LEAST = float(os.environ.get("LEAST", 120))
sys.exit(launch.main(sys.argv[1:], os.environ))
"""
PREPARE = """
import json, os, subprocess, sys, time
FETCHES = "import signal, time; signal.signal(2, 0); print('fetching', flush=True); time.sleep(600)"
print("a plan", flush=True)
if "FETCHING" in os.environ:
    fetching = subprocess.Popen([sys.executable, "-c", FETCHES])
    fetching.wait()
if os.environ.get("REFUSED"):
    sys.exit(2)
print(json.dumps(dict(words=json.loads(os.environ["WORDS"]), ranks=int(os.environ.get("RANKS", 1)), gpus=[],
                      flops=[], dtype="bf16")))
"""
SHOW = """
import os, sys, time
print("shown", sys.argv[1:], flush=True)
if "SHOWING" in os.environ:
    time.sleep(600)
with open(sys.argv[1] + "/samples.txt", "w") as file:
    file.write("sample 1: x")
sys.exit(os.environ.get("SHOW_FAILS"))
"""
# Notes its arguments, says that it trains, then does what TASKS has for this attempt. Notes who stops it
TRAINER = """
import json, os, signal, sys, time
def came(number, frame):
    open("stopped", "a").write(f"{number} ")
    sys.exit("train_gpt: interrupted")
attempt = len(os.listdir("attempts"))
task = json.loads(os.environ["TASKS"])[attempt]
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN if task == "deaf" else came)
open(f"attempts/{attempt}", "w").write(json.dumps(sys.argv[1:]))
os.makedirs("logs/r", exist_ok=True)
print("run folder: logs/r", flush=True)
print("warmup before the clock", flush=True)
def event(**event):
    print(json.dumps(event), file=open("logs/r/events.jsonl", "a"))
event(kind="start", config={}, data=dict(val_tokens=1))
event(kind="setup", setup_ms=1, compile_ms=1)
for step in range(1, 11):
    event(kind="train", step=step, steps=1000, seconds=step / 1000, tokens=step, mean_loss=2.0, eta=60.0)
if "SAVES" in os.environ:
    open("logs/r/checkpoint.pt", "w")
print(f"attempt {attempt}: {task}", flush=True)
if task in ("sleep", "deaf"):
    time.sleep(600)
if task == 0:
    open("logs/r/result.json", "w").write("{}")
sys.exit(task)
"""


@pytest.fixture
def place(empty):
    for name, text in (("driver", DRIVER), ("prepare", PREPARE), ("show", SHOW), ("train_gpt", TRAINER)):
        (empty / f"{name}.py").write_text(text)
    (empty / "attempts").mkdir()
    (empty / "logs/r").mkdir(parents=True)
    (empty / "logs/r/train_gpt.py").write_text(TRAINER)
    return empty


def driver(place, *argv, python=sys.executable, **env):
    """The launcher, in a process group of its own, as by a shell with jobs."""
    env = dict(PATH=os.environ["PATH"]) | env
    return subprocess.Popen([python, "driver.py", *argv], cwd=place, env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0)


def start(place, marker, *argv, tasks=(0,), words=("train_gpt.py", "--x=1"), **env):
    """The launcher. tasks: what the trainer does, per attempt: its exit code, or sleep."""
    env = dict(STAND_INS="1", WORDS=json.dumps(words), TASKS=json.dumps(tasks)) | marker.env | env
    return driver(place, *argv, **env)


def ended(process, timeout=120):
    """exit code, stdout, stderr"""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def attempts(place):
    """The arguments of each."""
    count = len(list((place / "attempts").iterdir()))
    return [json.loads((place / f"attempts/{n}").read_text()) for n in range(count)]


def test_a_run_from_plan_to_picture(place, marker):
    """The answer of preflight.py is not shown."""
    code, out, err = ended(start(place, marker, "tiny", "--x=1"))
    assert (code, err, attempts(place), marker.left()) == (0, "", [["--x=1"]], [])
    assert out == "a plan\nrun folder: logs/r\nwarmup before the clock\nattempt 0: 0\nshown ['logs/r']\n"


SLOW_PREPARE = """
import json, os, sys, time
time.sleep(0.7)
print("getting data: x", flush=True)
time.sleep(0.7)
print("75 %", file=sys.stderr, flush=True)
print("parameters:7", flush=True)
print(json.dumps(dict(words=json.loads(os.environ["WORDS"]), ranks=1, gpus=[], flops=[], dtype="bf16")))
"""


def test_a_terminal_shows_the_plan_in_short(place, marker):
    """With a live line from the beginning, but not while data are fetched, whose program writes there
    itself."""
    (place / "prepare.py").write_text(SLOW_PREPARE)
    env = dict(STAND_INS="1", WORDS=json.dumps(["train_gpt.py"]), TASKS="[0]") | marker.env
    code, lines, live = on_terminal([sys.executable, "driver.py"], place, env=env)
    assert code == 0 and [line for line in lines if line] == [
        "getting data: x", "75 %", "parameters:7", "attempt 0: 0", "shown ['logs/r']"]
    stages = [text.partition(":")[0] for text in live if text.strip()]
    assert stages[0] == "checking" and "75 %" not in "".join(live)


LIMITS = """
from resource import RLIMIT_NOFILE, getrlimit, setrlimit
from tools.run.surroundings import raise_file_limit
hard = getrlimit(RLIMIT_NOFILE)[1]
setrlimit(RLIMIT_NOFILE, (256, hard))
raise_file_limit()
assert getrlimit(RLIMIT_NOFILE) == (hard, hard)
"""


def test_a_trainer_may_open_a_thousand_shards():
    """Whatever the shell's limit is: the system's counts."""
    subprocess.run([sys.executable, "-c", LIMITS], cwd=ROOT, check=True)


@pytest.mark.parametrize("refused, ends, said", [("1", 2, "a plan\n"), ("", 3, "attempt 0: 3\n")])
def test_the_exit_code(refused, ends, said, place, marker):
    """What is refused is not trained; nothing is shown of a run that failed; without a checkpoint there is
    no restart."""
    found, out, err = ended(start(place, marker, tasks=[3, 0], RESTARTS="3", REFUSED=refused))
    assert (found, err, marker.left()) == (ends, "", []) and out.endswith(said)


WANDB = """
class Run:
    def log(self, values, step=None):
        print("logged", step, values.get("samples", ""), flush=True)
    def finish(self):
        pass
def init(project, name, config):
    return Run()
"""


def test_what_cannot_be_shown_changes_nothing(place, marker):
    code, out, err = ended(start(place, marker, SHOW_FAILS="no matplotlib"))
    assert code == 0 and err == "no matplotlib\n" and "shown" in out


@pytest.mark.parametrize("restarts, tasks, count, ends", [
    ("2", [1, 1, 0], 2, 0), ("1", [1, 1, 0], 1, 1), ("5", [3, 2, 0], 1, 2), ("", [1, 0], 0, 1)])
def test_restarts(restarts, tasks, count, ends, place, marker):
    """Up to so many, until one finishes or is refused. Each goes on from the checkpoint, by the run's own
    script."""
    code, _, err = ended(start(place, marker, "--run-id=r", f"RESTARTS={restarts}", tasks=tasks, SAVES="1",
                               words=["train_gpt.py", "--run-id=r", "--x=1"]))
    assert code == ends and marker.left() == []
    assert attempts(place) == [["--run-id=r", "--x=1"], *[["--x=1", "--resume=r"]] * count]
    left = [int(restarts) - 1 - n for n in range(count)]
    assert err.splitlines() == [f"run.sh: exit code {code}; RESUME=r, {n} restarts left"
                                for code, n in zip(tasks, left)]


def test_a_logger_gets_each_step_once_though_the_run_is_restarted(place, marker):
    """And the samples, from the launcher: the trainer does not know of it. The events of the first attempt
    lie in the file that the second one continues."""
    (place / "wandb.py").write_text(WANDB)
    (place / "train_gpt.py").write_text(f"import os\nassert 'LOGGER' not in os.environ\n{TRAINER}")
    code, out, err = ended(start(
        place, marker, "--run-id=r", "LOGGER=wandb", "RESTARTS=1", tasks=[1, 0], SAVES="1",
        words=["train_gpt.py", "--run-id=r", "--x=1"], PYTHONPATH=f"{place}:{ROOT}"))
    assert code == 0 and err == "run.sh: exit code 1; RESUME=r, 0 restarts left\n"
    logged = [line.rstrip() for line in out.splitlines() if line.startswith("logged")]
    assert logged == [*[f"logged {step}" for step in range(1, 11)] * 2, "logged None sample 1: x"]


def test_help_is_the_trainers(monkeypatch):
    called = []
    monkeypatch.setattr(launch.subprocess, "call", lambda words: called.append(words) or 0)
    assert launch.main(["golf", "--help", "MATRIX_LR=1", "--seed=2"], {}) == 0
    assert called == [[sys.executable, str(SCRIPT), "--preset=golf", "--matrix-lr=1", "--seed=2", "--help"]]


@pytest.mark.parametrize("word, said", [
    ("RESTARTS=x", "RESTARTS=x must be a number"),
    ("LOGGER=mlflow", "LOGGER=mlflow is none of tensorboard, wandb, trackio")])
def test_words_of_the_launcher_that_are_refused(word, said, capsys):
    assert launch.main([word], {}) == 2 and capsys.readouterr() == ("", f"run.sh: {said}\n")


def test_a_package_that_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(launch, "PACKAGES", ("no_such_package",))
    assert launch.main([], {}) == 2
    assert capsys.readouterr().err == "run.sh: the package no_such_package is missing: ./run.sh setup\n"


def wait_for(process, words):
    """Reads the output until a line begins so."""
    for line in process.stdout:
        if line.startswith(words):
            return
    raise AssertionError(process.communicate())


def test_a_run_that_hangs_is_stopped(place, marker):
    """By SIGTERM, a deaf one by SIGKILL; a restart goes on; the exit code is 1."""
    process = start(place, marker, tasks=["deaf", "sleep"], RESTARTS="1", SAVES="1", LEAST="1", PATIENCE="1")
    code, out, err = ended(process)
    assert code == 1 and "attempt 1: sleep\n" in out and marker.left() == []
    first, second, third, last = err.splitlines()
    assert last == "train_gpt: interrupted"
    for said in (first, third):
        assert said.startswith("run.sh: nothing has happened for ") and said.endswith("hangs and is stopped")
    assert second == "run.sh: exit code 1; RESUME=r, 0 restarts left"
    assert (place / "stopped").read_text() == "15 "


def test_the_rank_that_hangs_is_named(place, marker):
    said = "train_gpt: rank 0: another rank is gone or hangs (x)"
    (place / "train_gpt.py").write_text(f"import sys\nsys.exit({said!r})")
    code, _, err = ended(start(place, marker, RANKS="2"))
    blamed = "run.sh: rank 1 did not answer the others: it is gone or hangs"
    assert code == 1 and err.splitlines() == [said, blamed]


def test_ctrl_c_twice_ends_at_once(place, marker):
    """The first one lets the trainer save, which may take minutes."""
    process = start(place, marker, tasks=["deaf"])
    wait_for(process, "attempt 0")
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().startswith("stopping: a checkpoint is saved first")
    assert process.poll() is None and len(marker.left()) == 3
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 137 and marker.left() == []


# ---------------------------------------------------------------- nothing outlives it
SIGNALS = ["INT", "TERM", "HUP", "USR1", "QUIT", "USR2", "KILL", "ABRT", "SEGV"]
SAVED = {"INT": "2 ", "TERM": "15 ", "HUP": "15 ", "USR1": "10 ", "KILL": "15 ", "ABRT": "15 ", "SEGV": "15 "}
PHASES = {  # the last line before the signal
    "fetching": dict(FETCHING="1"), "attempt": {}, "shown": dict(SHOWING="1")}


MOMENTS = [("attempt", "INT"), ("attempt", "HUP"), ("attempt", "KILL"), ("attempt", "QUIT"),
           ("fetching", "INT"), ("fetching", "KILL"), ("shown", "TERM"), ("shown", "SEGV")]


@pytest.mark.parametrize("phase, sent", [
    (phase, sent) if (phase, sent) in MOMENTS else slow(phase, sent)
    for phase in PHASES for sent in SIGNALS])
def test_nothing_outlives_the_launcher(phase, sent, place, marker):
    """Whatever ends it and when; while it trains, the trainer is asked to save first. Who stops a run wants
    no restart."""
    tasks = [0 if phase == "shown" else "sleep", 0]
    process = start(place, marker, tasks=tasks, SAVES="1", RESTARTS="1" if sent in SAVED else "",
                    **PHASES[phase])
    wait_for(process, phase)
    process.send_signal(getattr(signal, f"SIG{sent}"))
    code, _, err = ended(process)
    wait_until(lambda: marker.left() == [], 30)
    assert "Traceback" not in err and len(attempts(place)) == (phase != "fetching")
    assert code == 0 if phase == "shown" and sent not in ("KILL", "ABRT", "SEGV") else code != 0
    stopped = (place / "stopped").read_text() if (place / "stopped").exists() else None
    assert stopped == (SAVED.get(sent) if phase == "attempt" else None)


def test_a_terminal_that_closes_ends_the_run(place, marker):
    """All of the job gets SIGHUP, then SIGKILL, as by a window that is closed; a deaf trainer ends, too."""
    process = start(place, marker, tasks=["deaf"], PATIENCE="1")
    wait_for(process, "attempt")
    os.killpg(process.pid, signal.SIGHUP)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: marker.left() == [], 30)


def states(process):
    """Of all below a process: T is stopped."""
    return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            for pid in guard.below(process.pid)[1:]}


@pytest.mark.parametrize("sent", ["KILL", "TERM"])
def test_what_is_stopped_stands_still_goes_on_and_can_be_ended(sent, place, marker):
    """Ctrl-Z and fg, then Ctrl-Z and `kill %1`, which also wakes it."""
    process = start(place, marker, tasks=["sleep"])
    wait_for(process, "attempt")
    process.send_signal(signal.SIGTSTP)
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    wait_until(lambda: states(process) == {"T"}, 30)
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: "T" not in states(process), 30)
    process.send_signal(signal.SIGTSTP)
    os.waitpid(process.pid, os.WUNTRACED)
    process.send_signal(getattr(signal, f"SIG{sent}"))
    process.send_signal(signal.SIGCONT)
    assert ended(process)[0] != 0
    wait_until(lambda: marker.left() == [], 30)


def test_a_guard_that_is_killed_takes_its_program_along(place, marker):
    process = start(place, marker, tasks=["sleep"])
    wait_for(process, "attempt")
    (guarding,) = [pid for pid in guard.below(process.pid) if len(guard.below(pid)) == 1]
    os.kill(guarding, signal.SIGKILL)
    assert ended(process)[0] != 0
    wait_until(lambda: marker.left() == [], 30)
    assert (place / "stopped").read_text() == "15 "


# ---------------------------------------------------------------- with the real trainer
@pytest.fixture
def real(tiny_data, empty):
    (empty / "data").symlink_to(tiny_data / "data")
    (empty / "driver.py").write_text(DRIVER)
    (empty / "slow.py").write_text(SLOW)
    return empty


# The trainer, but that it pauses where PAUSE says: at the entry of that function
SLOW = f"""
import contextlib, os, sys, time
sys.path.insert(0, {str(ROOT)!r})
import train_gpt
name, _, seconds = os.environ["PAUSE"].partition(":")
real = getattr(train_gpt, name)
def slow(*args, **kw):
    with contextlib.suppress(OSError):      # once nobody reads it
        print("pausing in", name, flush=True)
    time.sleep(float(seconds))
    return real(*args, **kw)
setattr(train_gpt, name, slow)
sys.exit(train_gpt.main(sys.argv[1:], os.environ))
"""


def test_a_real_run(real):
    """From the plan to the last screen, with the weights of a bare run. Its programs are forks, which is
    quicker; those below have interpreters of their own."""
    code, out, err = ended(driver(real, "RUN_ID=a", python=fork_server.start(), **SMALL), 300)
    assert (code, err) == (0, ""), err
    lines = out.splitlines()
    kinds = ["limits: ", "run folder: logs/a", "warmup before", "step:12/12 val_loss", "sample 1: ", "next: "]
    found = [next(i for i, line in enumerate(lines) if line.startswith(kind)) for kind in kinds]
    assert found == sorted(found)
    assert {path.name for path in (real / "logs/a").iterdir()} == {
        "train.log", "events.jsonl", "train_gpt.py", "result.json", "final_model.pt", "final_model.int8.ptz",
        "loss.png", "samples.txt"}
    same_run(real)


def same_run(real):
    """logs/a is what a bare trainer makes."""
    bare = run_cli(real, "--run-id=bare", env=SMALL)
    assert bare.code == 0, bare.err
    run, plain = (look(real / "logs" / name) for name in ("a", "bare"))
    assert (run.weights, run.losses, run.val_losses) == (plain.weights, plain.losses, plain.val_losses)
    assert len(run.losses) == 12


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["| head -n 2", "> /dev/full 2>&1", "<&- >&- 2>&-"])
def test_nobody_reads(shell, real, marker):
    """A run goes on to its end, into its folder."""
    env = dict(PATH=os.environ["PATH"]) | OURS | SMALL | marker.env | dict(RUN_ID="a")
    script = f'"$0" -m tools.run.launch {shell}; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", script, sys.executable], cwd=real, env=env, capture_output=True,
                          text=True)
    assert (done.returncode, "Traceback" in done.stderr, marker.left()) == (0, False, []), done.stderr
    same_run(real)


def slow_words(ranks, run_id, **settings):
    flags = [f"--{name.lower().replace('_', '-')}={text}" for name, text in settings.items()]
    words = ["slow.py", f"--run-id={run_id}", *flags]
    return words if ranks == 1 else torchrun(ranks, *words)["words"]


REAL_PHASES = {     # what pauses, does a stop leave a checkpoint?
    "open_data": False, "open_folder": False, "train_step": True, "save_checkpoint": True, "evaluate": False,
    "score_final": False}


@pytest.mark.parametrize("phase, sent, ranks", [
    ("train_step", "TERM", 2), slow("train_step", "KILL", 1), slow("train_step", "INT", 1), *[
        slow(phase, sent, 2) for phase in REAL_PHASES for sent in ("INT", "HUP", "KILL", "QUIT")]])
def test_nothing_of_a_real_run_outlives_the_launcher(phase, sent, ranks, real, marker):
    (real / "prepare.py").write_text(PREPARE)
    (real / "show.py").write_text(SHOW)
    seconds = "0.5" if phase == "train_step" else "3"
    env = dict(STAND_INS="1", RANKS=str(ranks), PAUSE=f"{phase}:{seconds}", SAVE_EVERY="3", PATIENCE="40",
               WORDS=json.dumps(slow_words(ranks, "a")))
    process = driver(real, **SMALL | marker.env | env)
    wait_for(process, "step:2/" if phase == "train_step" else "pausing in")
    process.send_signal(getattr(signal, f"SIG{sent}"))
    code, _, err = ended(process)
    wait_until(lambda: marker.left() == [], 60)
    assert code != 0
    if REAL_PHASES[phase] and sent != "QUIT":
        assert (real / "logs/a/checkpoint.pt").exists()
    if sent in ("INT", "TERM", "HUP") and phase == "train_step":
        # each process writes its own lines, whose ends may come late
        assert watch.STOPPING in err and err.count("train_gpt: RESUME=a") == ranks, err
        assert err.count("\n") == 1 + ranks, err
