"""The launcher and its parts. What a command line asks for, what is prepared, how a run is started, watched,
stopped, restarted and shown, and that nothing outlives it."""
import json
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

import train_gpt
from helpers import OURS, ROOT, SCRIPT, TOY, look, on_terminal, slow, wait_until
from tools.run import guard, launch, prepare, pulse, surroundings, watch
from tools.run.preflight import Report
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
    assert read(RESTARTS="1", LOGGER="x")[-2:] == ("x", "1")


@pytest.mark.parametrize("words, env, planned", [
    (["--dry-run"], {}, True), (["DRY_RUN=1"], {}, True), (["--dry-run=True"], {}, True),
    ([], dict(DRY_RUN="1"), True), ([], dict(DRY_RUN="0"), False), (["DRY_RUN=false"], {}, False),
    (["--dry-run=0"], dict(DRY_RUN="1"), False)])
def test_ways_to_ask_for_a_plan(words, env, planned):
    assert read(*words, **env).dry_run == planned and read(*words, **env).constants == []


# ---------------------------------------------------------------- what is prepared
@pytest.fixture
def machine(monkeypatch):
    """machine(gpus, missing, codes, ...): such a one, where preflight finds that data are missing, and the
    programs that get them end with these codes. What it returns tells what was called."""
    told = SimpleNamespace(preflights=[], fetches=[])

    def machine(gpus=0, missing=(), codes=(), finished=False, batch=0, compiler=True, flops=()):
        codes = [*codes]
        monkeypatch.setattr(prepare, "gpus", lambda: gpus)
        why = "" if compiler else "there is no C++ compiler (g++)"
        monkeypatch.setattr(prepare, "compiler_missing", lambda env: why)

        def preflight(env, words, log, dry_run, ranks, alone, may_fetch):
            told.preflights.append(([*words], dry_run, ranks, alone))
            log("a plan")
            preset, _ = train_gpt.typed(env, words)
            return Report(preset, [*words], batch, missing if may_fetch else [], finished, flops)

        def fetch(arguments):
            told.fetches.append(arguments)
            return codes.pop(0) if codes else 0

        monkeypatch.setattr(prepare, "preflight", preflight)
        monkeypatch.setattr(prepare, "fetch", fetch)
        return told
    return machine


def prepared(*argv, **env):
    return prepare.prepare(launch.read_words(argv, env), env)


def torchrun(ranks, *words):
    start = ["-m", guard.TORCHRUN, "--standalone", f"--nproc_per_node={ranks}"]
    return dict(words=[*start, *words], ranks=ranks, gpus=[], flops=[])


def alone(*words):
    return dict(words=[*words], ranks=1, gpus=[], flops=[])


GOLF = "logs/.script/golf/train_gpt.py"
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
    assert prepared("golf", "--device=cpu") == alone(GOLF, "--preset=golf", "--device=cpu")
    assert prepared("golf", DEVICE="cpu") == alone(GOLF, "--preset=golf")
    machine(gpus=1)
    assert prepared("speedrun") == alone(WHOLE, "--preset=speedrun")


def test_the_launcher_learns_what_mfu_needs(machine, empty, monkeypatch):
    """The card of each rank, and the FLOPs of each stage."""
    monkeypatch.setattr(prepare.torch.cuda, "get_device_name", lambda n: f"card {n}")
    machine(gpus=2, flops=[(0, 1e9), (700, 2e9)])
    answer = prepared("speedrun")
    assert (answer["gpus"], answer["flops"]) == (["card 0", "card 1"], [(0, 1e9), (700, 2e9)])


def test_missing_data_are_fetched_then_looked_at(machine, empty, capsys):
    told = machine(missing=[["fineweb-edu"], ["core"]])
    assert prepared("gpt2")["ranks"] == 1
    assert told.fetches == [["fineweb-edu"], ["core"]] and len(told.preflights) == 2
    assert capsys.readouterr().out == (     # the plan once
        "getting data: ./run.sh data fineweb-edu\ngetting data: ./run.sh data core\na plan\n")


def test_what_cannot_be_fetched(machine, empty, capsys):
    """Without data there is no run, and the exit code is that of the program. Without CORE's tasks preflight
    decides: it is asked once more."""
    told = machine(missing=[["fineweb-edu"]], codes=[3])
    assert prepare.main(["gpt2"], {}) == 3
    assert capsys.readouterr() == ("getting data: ./run.sh data fineweb-edu\na plan\n", "")
    assert len(told.preflights) == 1
    told = machine(missing=[["core"]], codes=[1])
    assert prepare.main(["gpt2", "CORE=0"], {}) == 0
    assert told.fetches[1:] == [["core"]] and len(told.preflights) == 3
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["words"][1:] == ["--preset=gpt2", "--core=0"]


@pytest.mark.parametrize("preset", ["golf", "gpt2"])
def test_a_game_for_gpus_is_refused_before_its_data_are_fetched(preset, empty, monkeypatch, capsys):
    """By preflight itself; whoever asks for the CPU gets them."""
    fetched = []
    monkeypatch.setattr(prepare, "gpus", lambda: 0)
    monkeypatch.setattr(prepare, "fetch", lambda arguments: fetched.append(arguments) or 5)
    assert prepare.main([preset], {}) == 2 and fetched == []
    assert capsys.readouterr().err.startswith(f"preflight: {preset} is made for GPUs: ")
    assert prepare.main([preset, "DEVICE=cpu"], {}) == 5 and len(fetched) == 1
    assert list(empty.iterdir()) == []


def test_data_of_ones_own_are_not_fetched(empty, monkeypatch, capsys):
    fetched = []
    monkeypatch.setattr(prepare, "fetch", lambda arguments: fetched.append(arguments) or 5)
    assert prepare.main(["DATA_PATH=data/datasets/embedded"], {}) == 2
    assert prepare.main([], dict(DATA_PATH="mine")) == 2
    assert "./run.sh data" in capsys.readouterr().err and fetched == []
    assert prepare.main([], {}) == 5 and fetched == [[]]


def test_a_plan_fetches_and_makes_nothing(machine, empty, capsys):
    told = machine(missing=[["fineweb-edu"]])
    assert prepare.main(["gpt2", "--dry-run"], {}) == 0 == prepare.main(["golf"], dict(DRY_RUN="1"))
    assert capsys.readouterr().out == "a plan\na plan\n"
    assert told.fetches == [] and list(empty.iterdir()) == []
    assert [dry_run for _, dry_run, *_ in told.preflights] == [True, True]


def test_a_word_that_is_no_preset_is_refused_once(machine, empty, capsys):
    machine()
    assert prepare.main(["bord"], {}) == 2
    out, err = capsys.readouterr()
    refused, hint = err.splitlines()
    assert out == "" and refused.startswith("preflight: unknown argument bord")
    assert hint == "run.sh: ./run.sh help lists its commands"
    for words in (["--matrix-lrr=1"], ["golf", "--matrix-lrr=1"], ["MATRIX_LR=much"]):
        assert prepare.main(words, {}) == 2 and capsys.readouterr().err.count("\n") == 1


def test_the_micro_batch_is_that_of_preflight(machine, empty):
    machine(gpus=8, batch=6)
    assert prepared("speedrun")["words"][-2:] == ["--preset=speedrun", "--device-batch-size=6"]


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
    assert prepared("--script") == alone(own)
    assert prepared("tiny", "--script", "MATRIX_LR=0.02") == alone(own, "--preset=tiny", "--matrix-lr=0.02")
    assert [alone for *_, alone in told.preflights] == [True, True]
    assert (empty / own).read_text().startswith('"""train_gpt: the recipe tiny alone')
    assert [*(empty / "logs/.script/tiny").iterdir()] == [empty / own]
    with pytest.raises(Refused, match="--script: proxies are made from the whole"):
        prepared("speedrun", "--script", "--proxy=64")


def test_a_proxy_takes_one_gpu_and_the_embedded_text(machine, empty, monkeypatch):
    """It is trained by train_gpt.py itself; a text of one's own is left alone."""
    told = machine(gpus=8)
    def expand_proxy(argv, env):
        return [*argv[1:], "--model-dim=128", f"--seed={len(argv[0])}"]

    monkeypatch.setitem(sys.modules, "tools.run.proxy", SimpleNamespace(expand_proxy=expand_proxy))
    found = prepared("golf", "--proxy=128")
    assert found == alone(WHOLE, "--preset=golf", "--model-dim=128", "--seed=11") and told.fetches == [[]]
    mine = prepared("golf", "--proxy", "DATA_PATH=mine")
    assert mine["words"][1:3] == ["--preset=golf", "--data-path=mine"]
    assert told.fetches == [[]]


# ---------------------------------------------------------------- a run that goes on
def began(folder, run_id="old", preset="golf", ranks=1, device="auto", script="a script\n"):
    """The folder of a run, as far as the launcher asks it."""
    place = folder / "logs" / run_id
    place.mkdir(parents=True, exist_ok=True)
    start = dict(kind="start", preset=preset, world_size=ranks, config=dict(preset=preset, device=device))
    events = [start, start | dict(preset="tiny")]       # when it began, when it went on
    (place / "events.jsonl").write_text("".join([json.dumps(event) + "\n" for event in events]))
    (place / "train_gpt.py").write_text(script)


@pytest.mark.parametrize("words, env", [
    (["RESUME=old"], {}), (["--resume=old"], {}), (["--resume", "old"], {}), ([], dict(RESUME="old"))])
def test_a_run_goes_on_as_it_began(words, env, machine, empty):
    """With its script, preset and ranks, whatever is here now."""
    told = machine(gpus=8, batch=5)
    began(empty, ranks=2)
    flags = ["--preset=golf", *["--resume=old"] * len(words[:1])]
    assert prepared(*words, **env) == torchrun(2, "logs/old/train_gpt.py", *flags)
    assert told.fetches == [] and told.preflights[-1][0] == flags


def test_a_run_goes_on_where_it_can(machine, empty):
    """On fewer GPUs; on the CPU that it began on; one that nobody knows is refused by preflight."""
    machine(gpus=2)
    own = "logs/old/train_gpt.py"
    began(empty, ranks=8)
    assert prepared("RESUME=old") == torchrun(2, own, "--preset=golf", "--resume=old")
    began(empty, ranks=8, device="cpu")
    assert prepared("RESUME=old") == alone(own, "--preset=golf", "--resume=old")
    began(empty, preset="speedrun", ranks=1)        # a proxy
    assert prepared("RESUME=old") == alone(own, "--preset=speedrun", "--resume=old")
    assert prepared("RESUME=old", "PRESET=tiny")["words"] == [own, "--resume=old", "--preset=tiny"]
    assert prepared("RESUME=none") == alone(WHOLE, "--resume=none")


def test_a_run_that_has_finished_is_not_started(machine, empty, capsys):
    machine(finished=True)
    began(empty)
    assert prepare.main(["RESUME=old"], {}) == 0 and capsys.readouterr().out == "a plan\n"


def test_a_run_that_began_uncompiled_goes_on_so(machine, empty, capsys):
    """Its checkpoint knows it: no flag, which would be refused beside RESUME."""
    machine(compiler=False)
    began(empty, preset="tiny")
    assert prepared("RESUME=old")["words"][1:] == ["--preset=tiny", "--resume=old"]


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


@pytest.mark.parametrize("given, found", [
    ({}, "expandable_segments:True"), (dict(PYTORCH_ALLOC_CONF=""), None),
    (dict(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64"), None)])
def test_memory_grows_in_segments_unless_told_otherwise(given, found):
    assert surroundings.for_trainer(given)[0].get("PYTORCH_ALLOC_CONF") == found


HELP_OF = """
import os, runpy, sys
program = sys.argv.pop(1)
sys.argv.append("--help")
try:
    runpy.run_module(program, run_name="__main__")
except SystemExit:
    print(sorted(name for name in os.environ if name.startswith(("NPY", "PYTORCH_A"))))
"""


@pytest.mark.parametrize("program", ["tools.gpu.report", "tools.dev.bench"])
def test_tools_that_train_have_it_too(program, tmp_path):
    """gpu-report and bench set what they need before they load numpy."""
    done = subprocess.run([sys.executable, "-c", HELP_OF, program], cwd=tmp_path, text=True,
                          capture_output=True, env=OURS | dict(PATH=os.environ["PATH"]))
    names = surroundings.allocator({}) if "report" in program else surroundings.sorting({})
    assert done.stdout.splitlines()[-1] == str(sorted(names)), done.stderr


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
    """Compiling and counting, the first step, scores, and the end."""
    run = Clocked(tmp_path)
    assert run.waits(9000) == ""
    run.pulse.line("counting n-grams")
    assert run.waits(9000) == ""
    run.trains(100, 0.1)
    run.pulse.line("evaluating CORE")
    assert run.waits(9000) == ""
    run.trains(200, 0.1, first=200)
    assert run.waits(9000) != ""
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


def guarded(words, env=None, imports=(), changes=None):
    """(exit code, stdout, stderr) of such a program."""
    child = guard.Guarded(os.environ | (env or {}), imports, subprocess.PIPE, subprocess.PIPE)
    child.run(words, changes)
    out, err = child.process.communicate(timeout=300)
    return child.process.returncode, out, err


def test_a_guarded_program_is_run_as_python_runs_it(empty):
    (empty / "asks.py").write_text(ASKS)
    plain = subprocess.run([sys.executable, "asks.py", "a b", "--c"], capture_output=True, text=True,
                           stdin=subprocess.DEVNULL, env=os.environ | dict(X="1"))
    code, out, err = guarded(["asks.py", "a b", "--c"], changes=dict(X="1"))
    asked = json.loads(plain.stdout)
    asked["argv"][0] = str(empty / "asks.py")
    assert (code, json.loads(out), err) == (0, asked, "")
    _, out, _ = guarded(["-m", "asks", "d"])
    assert json.loads(out)["argv"] == [str(empty / "asks.py"), "d"] and json.loads(out)["name"] == "__main__"


@pytest.mark.parametrize("code, ends, err", [
    ("import sys; sys.exit(2)", 2, ""), ("import sys; sys.exit('why')", 1, "why\n"),
    ("1 / 0", 1, "ZeroDivisionError"),
    ("import os; os.kill(os.getpid(), 9)", 137, ""), ("import os; os._exit(5)", 5, ""),
    ("raise KeyboardInterrupt", 130, "")])
def test_the_exit_code_of_a_guarded_program(code, ends, err, empty):
    (empty / "p.py").write_text(code)
    found = guarded(["p.py"])
    assert found[0] == ends and (err in found[2] if err else found[2] == "")


def test_imports_are_made_while_a_program_waits(empty):
    """A broken one is the program's own business; once the words are there, no more are made."""
    (empty / "first.py").write_text("import pathlib\npathlib.Path('imported').touch()")
    (empty / "broken.py").write_text("1 / 0")
    (empty / "p.py").write_text("import sys\nprint('first' in sys.modules, 'broken' in sys.modules)")
    env = os.environ | dict(PYTHONPATH=str(empty))
    child = guard.Guarded(env, ["broken", "first"], subprocess.PIPE, subprocess.PIPE)
    wait_until((empty / "imported").exists)
    child.run(["p.py"])
    assert child.process.communicate(timeout=300) == ("True False\n", "")


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
    assert guarded(["leaves.py", how], env=marker.env)[0] == (0 if how == "ends" else 137)
    assert marker.left() == []


class Marker:
    """Finds processes by a variable of their environment."""

    def __init__(self):
        self.env = dict(LAUNCHER_TEST=uuid.uuid4().hex)

    def left(self):
        found = []
        text = f"LAUNCHER_TEST={self.env['LAUNCHER_TEST']}\0".encode()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if text in (path / "environ").read_bytes():     # of a zombie it is empty
                    found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                pass
        return found


@pytest.fixture
def marker():
    marker = Marker()
    yield marker
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker.env["LAUNCHER_TEST"].encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
        except OSError:
            pass


# ---------------------------------------------------------------- as a program, its parts stand-ins
DRIVER = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
os.environ["PYTHONPATH"] = {str(ROOT)!r}
from tools.run import guard, launch, pulse, watch
launch.EARLY = ()
if "STAND_INS" in os.environ:
    launch.PREPARE, watch.SHOW = ["prepare.py"], ["show.py"]
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
if "REFUSED" in os.environ:
    sys.exit(2)
print(json.dumps(dict(words=json.loads(os.environ["WORDS"]), ranks=int(os.environ.get("RANKS", 1)), gpus=[],
                      flops=[])))
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
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN if "DEAF" in os.environ else came)
attempt = len(os.listdir("attempts"))
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
task = json.loads(os.environ["TASKS"])[attempt]
print(f"attempt {attempt}: {task}", flush=True)
if task == "sleep":
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


def driver(place, *argv, **env):
    """The launcher, in a process group of its own, as by a shell with jobs."""
    env = dict(PATH=os.environ["PATH"]) | env
    return subprocess.Popen([sys.executable, "driver.py", *argv], cwd=place, env=env, text=True,
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
    """The answer of prepare.py is not shown."""
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
print(json.dumps(dict(words=json.loads(os.environ["WORDS"]), ranks=1, gpus=[], flops=[])))
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


def test_a_trainer_may_open_a_thousand_shards(place, marker):
    """Whatever the shell's limit is: the system's counts."""
    said = "import resource, sys\nsys.exit(f'train_gpt: {resource.getrlimit(resource.RLIMIT_NOFILE)}')\n"
    (place / "train_gpt.py").write_text(said)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    process = start(place, marker)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    _, _, err = ended(process)
    assert err == f"train_gpt: {(hard, hard)}\n"


def test_what_is_refused_is_not_trained(place, marker):
    code, out, err = ended(start(place, marker, REFUSED="1"))
    assert (code, out, err, attempts(place), marker.left()) == (2, "a plan\n", "", [], [])


@pytest.mark.parametrize("code", [1, 2, 3])
def test_the_exit_code_is_the_trainers(code, place, marker):
    """And nothing is shown of a run that failed."""
    found, out, _ = ended(start(place, marker, tasks=[code]))
    assert found == code and out.endswith(f"attempt 0: {code}\n") and marker.left() == []


def test_a_logger_gets_scalars_and_samples(place, marker):
    """From the launcher; the trainer does not know of it."""
    (place / "wandb.py").write_text(WANDB)
    (place / "train_gpt.py").write_text(f"import os\nassert 'LOGGER' not in os.environ\n{TRAINER}")
    code, out, err = ended(start(place, marker, "LOGGER=wandb", PYTHONPATH=str(place)))
    assert (code, err) == (0, "") and out.endswith("\nsample 1: x\n")
    assert ended(start(place, marker, LOGGER="wandb", PYTHONPATH=str(place), REFUSED="1"))[0] == 2
    code, _, err = ended(start(place, marker, LOGGER="mlflow"))
    assert (code, err) == (2, "run.sh: LOGGER=mlflow is none of tensorboard, wandb, trackio\n")


WANDB = """
class Run:
    def log(self, values, step=None):
        print(*values.values(), flush=True)
    def finish(self):
        pass
def init(project, name, config):
    return Run()
"""


def test_what_cannot_be_shown_changes_nothing(place, marker):
    code, out, err = ended(start(place, marker, SHOW_FAILS="no matplotlib"))
    assert code == 0 and err == "no matplotlib\n" and "shown" in out


@pytest.mark.parametrize("restarts, tasks, count, ends", [
    ("2", [1, 1, 0], 2, 0), ("1", [1, 1, 0], 1, 1), ("5", [3, 2, 0], 1, 2), ("0", [1, 0], 0, 1),
    ("", [1, 0], 0, 1), ("3", [0, 1], 0, 0)])
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
    """The events of the first attempt lie in the file that the second one continues."""
    (place / "wandb.py").write_text(WANDB.replace("*values.values()", '"logged", step'))
    code, out, _ = ended(start(
        place, marker, "--run-id=r", "LOGGER=wandb", "RESTARTS=1", tasks=[1, 0], SAVES="1",
        words=["train_gpt.py", "--run-id=r", "--x=1"], PYTHONPATH=f"{place}:{ROOT}"))
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("logged")] == [
        *[f"logged {step}" for step in range(1, 11)] * 2, "logged None"]     # None: the samples


def test_without_a_checkpoint_there_is_no_restart(place, marker):
    assert ended(start(place, marker, tasks=[1, 0], RESTARTS="3"))[0] == 1 and len(attempts(place)) == 1


def test_who_stops_a_run_wants_no_restart(place, marker):
    process = start(place, marker, tasks=["sleep", 0], RESTARTS="3", SAVES="1")
    wait_for(process, "attempt 0")
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 1 and len(attempts(place)) == 1


def test_help_is_the_trainers(monkeypatch):
    called = []
    monkeypatch.setattr(launch.subprocess, "call", lambda words: called.append(words) or 0)
    assert launch.main(["golf", "--help", "MATRIX_LR=1", "--seed=2"], {}) == 0
    assert called == [[sys.executable, str(SCRIPT), "--preset=golf", "--matrix-lr=1", "--seed=2", "--help"]]


def test_restarts_must_be_a_number(place, marker):
    code, _, err = ended(start(place, marker, RESTARTS="x"))
    assert (code, err) == (2, "run.sh: RESTARTS=x must be a number\n")


def test_a_package_that_is_missing(place, marker):
    without = DRIVER.replace("launch.EARLY = ()", "launch.PACKAGES = ('no_such_package',)")
    (place / "driver.py").write_text(without)
    code, _, err = ended(start(place, marker))
    assert (code, err) == (2, "run.sh: the package no_such_package is missing: ./run.sh setup\n")


def wait_for(process, words):
    """Reads the output until a line begins so."""
    for line in process.stdout:
        if line.startswith(words):
            return
    raise AssertionError(process.communicate())


def test_a_run_that_hangs_is_stopped(place, marker):
    """A deaf one is killed; the exit code is 1, and a restart goes on."""
    env = dict(LEAST="1", PATIENCE="1", SAVES="1", DEAF="1")
    began_at = time.monotonic()
    code, out, err = ended(start(place, marker, tasks=["sleep", 0], RESTARTS="1", **env))
    assert code == 0 and "attempt 1: 0\n" in out and marker.left() == []
    first, second = err.splitlines()
    assert first.startswith("run.sh: nothing has happened for ") and first.endswith("hangs and is stopped")
    assert second == "run.sh: exit code 1; RESUME=r, 0 restarts left" and time.monotonic() - began_at < 60
    assert not (place / "stopped").exists()


def test_a_hang_ends_with_exit_code_1(place, marker):
    code, _, err = ended(start(place, marker, tasks=["sleep"], LEAST="1"))
    assert code == 1 and "the run hangs" in err and (place / "stopped").read_text() == "15 "


def test_the_rank_that_hangs_is_named(place, marker):
    said = "train_gpt: rank 0: another rank is gone or hangs (x)"
    (place / "train_gpt.py").write_text(f"import sys\nsys.exit({said!r})")
    code, _, err = ended(start(place, marker, RANKS="2"))
    blamed = "run.sh: rank 1 did not answer the others: it is gone or hangs"
    assert code == 1 and err.splitlines() == [said, blamed]


def test_ctrl_c_twice_ends_at_once(place, marker):
    """The first one lets the trainer save, which may take minutes."""
    process = start(place, marker, tasks=["sleep"], DEAF="1")
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
    """Whatever ends it and when; while it trains, the trainer is asked to save first."""
    process = start(place, marker, tasks=[0 if phase == "shown" else "sleep"], **PHASES[phase])
    wait_for(process, phase)
    process.send_signal(getattr(signal, f"SIG{sent}"))
    code, _, err = ended(process)
    wait_until(lambda: marker.left() == [], 30)
    assert "Traceback" not in err
    assert code == 0 if phase == "shown" and sent not in ("KILL", "ABRT", "SEGV") else code != 0
    stopped = (place / "stopped").read_text() if (place / "stopped").exists() else None
    assert stopped == (SAVED.get(sent) if phase == "attempt" else None)


def test_a_deaf_trainer_does_not_outlive_a_launcher_that_was_killed(place, marker):
    process = start(place, marker, tasks=["sleep"], DEAF="1", PATIENCE="1")
    wait_for(process, "attempt")
    process.kill()
    process.wait()
    wait_until(lambda: marker.left() == [], 30)


def test_a_terminal_that_closes_ends_the_run(place, marker):
    """All of the job gets SIGHUP, then SIGKILL, as by a window that is closed."""
    process = start(place, marker, tasks=["sleep"])
    wait_for(process, "attempt")
    os.killpg(process.pid, signal.SIGHUP)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: marker.left() == [], 30)
    assert (place / "stopped").read_text() in ("15 ", "15 15 ")


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


def start_real(real, marker, *argv, **env):
    return driver(real, *argv, **SMALL | marker.env | env)


def test_a_real_run(real, marker):
    """From the plan to the last screen, with the weights of a bare run."""
    code, out, err = ended(start_real(real, marker, "RUN_ID=a"), 300)
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
    bare = subprocess.run([sys.executable, str(SCRIPT)], cwd=real, capture_output=True, text=True,
                          env=dict(PATH=os.environ["PATH"]) | SMALL | dict(RUN_ID="bare"))
    assert bare.returncode == 0, bare.stderr
    run, plain = (look(real / "logs" / name) for name in ("a", "bare"))
    assert (run.weights, run.losses, run.val_losses) == (plain.weights, plain.losses, plain.val_losses)
    assert len(run.losses) == 12


# What may be set where somebody works
ODD = dict(
    PYTHONOPTIMIZE="2", PYTHONWARNINGS="error", PYTHONUTF8="0", LC_ALL="C", PYTHONIOENCODING="ascii",
    PYTHONSAFEPATH="1", PYTHONDONTWRITEBYTECODE="1", PYTHONNOUSERSITE="1", PYTHONHASHSEED="7",
    PYTHONFAULTHANDLER="1", PYTHONUNBUFFERED="1", PYTHONCOERCECLOCALE="0", OMP_NUM_THREADS="1",
    TMPDIR="/nowhere/x", HOME="/nowhere/y", XDG_CACHE_HOME="", MPLCONFIGDIR="/proc/nowhere", TZ="Mars/Moon",
    TORCHINDUCTOR_CACHE_DIR="/proc/nowhere", COLUMNS="0", LINES="-1", TERM="odd", NO_COLOR="1",
    CUDA_VISIBLE_DEVICES="abc")


@pytest.mark.parametrize("odd, shell", [
    slow({}, "| head -n 2"), slow({}, "> /dev/full 2>&1"), slow({}, "<&- >&- 2>&-"), slow(ODD, "| head -n 3"),
    slow(ODD, "2>&1 | cat > said")])
def test_nobody_reads_and_odd_environments_change_nothing(odd, shell, real, marker):
    """A run goes on to its end, into its folder."""
    env = dict(PATH=os.environ["PATH"]) | OURS | SMALL | marker.env | odd | dict(RUN_ID="a")
    script = f'"$0" -m tools.run.launch {shell}; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", script, sys.executable], cwd=real, env=env, capture_output=True,
                          text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert marker.left() == []
    same_run(real)


@pytest.mark.slow
def test_a_run_that_goes_on_belongs_to_one(real, marker):
    """A second process, also from another shell, enters it as little as it resumes it."""
    first = start_real(real, marker, "RUN_ID=a", ITERATIONS="100000", SAVE_EVERY="1")
    wait_for(first, "step:3/")
    for word, said in (("RESUME=a", "belongs to a run that is still going"), ("RUN_ID=a", "logs/a exists")):
        code, _, err = ended(start_real(real, marker, word, ITERATIONS="100000", SAVE_EVERY="1"))
        assert code == 2 and said in err and err.count("\n") == 1, err
    first.kill()        # the lock ends with it
    first.communicate()
    wait_until(lambda: marker.left() == [], 60)
    again = start_real(real, marker, "RESUME=a", ITERATIONS="100000", SAVE_EVERY="1")
    wait_for(again, "resume: from step ")
    again.send_signal(signal.SIGTERM)
    assert ended(again)[0] == 1 and marker.left() == []


def slow_words(ranks, run_id, **settings):
    flags = [f"--{name.lower().replace('_', '-')}={text}" for name, text in settings.items()]
    words = ["slow.py", f"--run-id={run_id}", *flags]
    return words if ranks == 1 else torchrun(ranks, *words)["words"]


REAL_PHASES = {     # what pauses, does a stop leave a checkpoint?
    "open_data": False, "open_folder": False, "train_step": True, "save_checkpoint": True, "evaluate": False,
    "score_final": False}
FEW = [("train_step", "TERM", 2), ("train_step", "KILL", 1)]


@pytest.mark.parametrize("phase, sent, ranks", [
    (phase, sent, ranks) if (phase, sent, ranks) in FEW else slow(phase, sent, ranks)
    for phase in REAL_PHASES for sent in ("INT", "TERM", "HUP", "KILL", "QUIT") for ranks in (1, 2)])
def test_nothing_of_a_real_run_outlives_the_launcher(phase, sent, ranks, real, marker):
    (real / "prepare.py").write_text(PREPARE)
    (real / "show.py").write_text(SHOW)
    seconds = "0.5" if phase == "train_step" else "3"
    env = dict(STAND_INS="1", RANKS=str(ranks), PAUSE=f"{phase}:{seconds}", SAVE_EVERY="3", PATIENCE="40",
               WORDS=json.dumps(slow_words(ranks, "a")))
    process = start_real(real, marker, **env)
    wait_for(process, "step:2/" if phase == "train_step" else "pausing in")
    process.send_signal(getattr(signal, f"SIG{sent}"))
    code, _, err = ended(process)
    wait_until(lambda: marker.left() == [], 60)
    assert code != 0
    if REAL_PHASES[phase] and sent != "QUIT":
        assert (real / "logs/a/checkpoint.pt").exists()
    if sent in ("INT", "TERM", "HUP") and phase == "train_step":
        # Each process writes its own lines: whose come first is chance
        assert sorted(err.splitlines()) == sorted([watch.STOPPING] + ["train_gpt: RESUME=a"] * ranks), err
