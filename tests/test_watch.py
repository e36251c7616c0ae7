"""tools/run/watch.py: what a run looks like on a terminal and in a pipe, signals, LOGGER."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

import train_gpt
from helpers import OURS, ROOT, on_terminal, slow, wait_until
from tools.run import guard, plan, watch

WATCH = [sys.executable, "-m", "tools.run.watch"]
RUN = """
import json, os, sys, time
events = json.load(open("events"))      # {beginning of a line: what is written before it}
for line in open(sys.argv[1]).read().splitlines():
    for start in [start for start in events if line.startswith(start)]:
        with open("logs/a/events.jsonl", "a") as file:
            file.write(json.dumps(events[start]) + chr(10))
    print(line, flush=True)
    if line.startswith(("step:50/", "warmup")):
        time.sleep(float(os.environ.get("NAP", "0.6")))
"""
LINES = """override matrix_lr 0.03 -> 0.02
data: embedded train tokens:25176420 in 1 shards, val tokens:429104
data: val_bytes:1021844
data: not the text that tiny is scored on (fingerprint abc)
parameters:9241732 (embed:131072)
limits: at most 100000 steps (409600000 tokens); at most 120 s of training
stage table: from_step tokens_per_step row_tokens long_window short_window lr_factor
                     0            4096        512         256          128    1.0000
                 50000            8192        512         256          128    1.0000
run folder: logs/a
warmup before the clock, compiling: about half a minute
setup:1752ms compile:25111ms
step:50/100000 train_loss:2.0000 train_time:60000ms step_avg:114.90ms tok/s:35649 lr_factor:1.000 eta:60s
stopping_early: wallclock_cap train_time:119969ms step:1033/100000
evaluating val_loss
step:1033/100000 val_loss:2.0077 val_bpb:1.2163 train_time:119969ms step_avg:116.14ms
peak memory resident: 840 MiB
final_model val_loss:2.0077 val_bpb:1.2163
        train_time_ms  119969
              step_ms  {'p50': 114.9}
artifact_within_limit  True
"""
EVENTS = {
    "run folder:": dict(
        kind="start", preset="tiny", config=dict(preset="tiny", seed="7", dtype="auto"),
        data=dict(val_tokens=429104, val_bytes=1021844)),
    "setup:": dict(kind="setup", setup_ms=1752, compile_ms=25111),
    "step:50/": dict(kind="train", step=50, steps=100000, seconds=60.0, train_loss=2.5, mean_loss=2.0,
                     tokens=2138940, lr_factor=1.0, eta=60.0),
    "stopping_early:": dict(kind="stop", reason="wallclock_cap", step=1033, seconds=119.969),
    "step:1033/": dict(kind="val", step=1033, steps=100000, seconds=119.969, val_loss=2.0077, val_bpb=1.2163,
                       val_bpb_without_bos=None)}
RESULT = dict(
    preset="tiny", val_loss=2.0077, val_bpb=1.21635559, core=None, steps=1033, tokens=4231168,
    train_time_ms=119969, tok_per_s=35269, overrides={"matrix_lr": ["0.03", "0.02"]})


@pytest.fixture
def run(tmp_path):
    """A run's folder and output in tmp_path; the command that shows it."""
    (tmp_path / "logs/a").mkdir(parents=True)
    (tmp_path / "events").write_text(json.dumps(EVENTS))
    (tmp_path / "lines").write_text(LINES)
    (tmp_path / "run.py").write_text(RUN)
    return [*WATCH, "run.py", "lines"]


def in_pipe(command, cwd, **env):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300,
                          env=os.environ | OURS | {"NAP": "0"} | env)


def test_what_shows_a_run_takes_its_data_from_its_result(tmp_path, monkeypatch):
    """A flag beat the variable when it trained."""
    given = []
    monkeypatch.setattr(watch, "Guarded", lambda words, env: given.append(env) or SimpleNamespace(
        wait=lambda: 0))
    (tmp_path / "result.json").write_text("{}")
    env = dict(DATA_PATH="a", TOKENIZER_PATH="b", DEVICE="cpu")
    watch.show_result(tmp_path, 0, env, SimpleNamespace(follow=lambda child: None), watch.Logger(""))
    assert given == [dict(DEVICE="cpu")]


def test_without_a_script(tmp_path):
    done = in_pipe(WATCH, tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "watch: which script? python -m tools.run.watch SCRIPT [WORD ...]\n"


def test_a_terminal_has_one_live_line(run, tmp_path):
    code, lines, live = on_terminal(run, tmp_path, columns=200)
    assert code == 0
    training = [text for text in live if "%" in text]
    assert any(text.startswith("compiling, about half a minute the first time: ") for text in live)
    # bits per byte: 2 / ln 2 * 429104 / 1021844
    assert re.match(r" 50% \|.+\| step 50, loss 2.0000, 1.212 bpb, 35,649 tok/s, 60 s left", training[0])
    assert max(map(len, live)) < 80
    assert [line for line in lines if line] == [
        "override matrix_lr 0.03 -> 0.02",
        "data: embedded train tokens:25176420 in 1 shards, val tokens:429104",
        "data: not the text that tiny is scored on (fingerprint abc)",
        "parameters:9241732 (embed:131072)",
        "limits: at most 100000 steps (409600000 tokens); at most 120 s of training",
        "step:1033/100000 val_loss:2.0077 val_bpb:1.2163 train_time:119969ms step_avg:116.14ms"]


@pytest.mark.parametrize("columns", [50, 80])
def test_a_narrow_terminal(run, tmp_path, columns):
    """No row is longer, no word is broken, the live line shows all that it has at 80."""
    code, lines, live = on_terminal(run, tmp_path, columns=columns)
    assert code == 0 and max(map(len, lines)) <= columns and max(map(len, live)) < columns
    assert any(text.rstrip().endswith("60 s left") for text in live) == (columns == 80)
    words = " ".join(lines).split()
    log = (tmp_path / "lines").read_text().split()
    assert "(409600000 tokens); at most 120 s" in " ".join(words)
    assert {"override", "val_bpb:1.2163"} <= {*words} & {*log}


def test_the_live_line_has_mfu_on_a_gpu():
    """golf's 49,152 tokens in 35.7 ms on an H100; none on a CPU."""
    progress = watch.Progress()
    progress.flops = plan.stage_flops(train_gpt.preset_config("golf"))
    rate = round(49_152 / 0.0357)
    progress.take(dict(EVENTS["step:50/"], tokens=2 * rate, seconds=1.0))
    assert "mfu" not in progress.live()[1]
    progress.gpus = 2 * ["NVIDIA H100 80GB HBM3"]
    assert f" {2 * rate:,} tok/s, mfu:0.457, " in progress.live()[1]
    progress.gpus = 2 * ["NVIDIA Made Up"]
    assert ", mfu:?, " in progress.live()[1]


def test_mfu_is_by_the_stage():
    """The speedrun's later stages see further back."""
    progress = watch.Progress()
    progress.gpus = 8 * ["NVIDIA H100 80GB HBM3"]
    progress.flops = plan.stage_flops(train_gpt.preset_config("speedrun"))
    early, late = [float(progress.mfu(step, 4e6).removeprefix("mfu:")) for step in (1, 2000)]
    assert 0.2 < early < late < 0.5


# A run of 200 steps that validates on its way, and scores in further ways at its end: lines and events
MIDDLE = [
    "data: embedded train tokens:25176420 in 1 shards, val tokens:429104", "run folder: logs/a",
    EVENTS["run folder:"], "world_size:1 device:cpu",
    "warmup before the clock, compiling: about some minutes",
    "setup:1752ms compile:25111ms", EVENTS["setup:"],
    "counting n-grams", "n-grams of 9 tokens counted in 1.0 s",
    "evaluating val_loss", dict(kind="val", step=100, steps=200, val_loss=2.0), EVENTS["step:50/"],
    "evaluating CORE", "core_metric:0.100000 tasks:22 seconds:1.0",
    "evaluating val_loss", dict(kind="val", step=200, steps=200, val_loss=2.0),
    "Serialized model int8+zlib: 9 bytes (9 weights)", "evaluating sliding",
    "final_sliding val_loss_sliding:2.00000000 eval_time:9ms", "        train_time_ms  119969"]


def test_what_is_evaluated_is_said():
    """Also in the middle of a run, which then trains on, and of a file."""
    progress = watch.Progress()
    stages = []
    for line in MIDDLE:
        if isinstance(line, dict):
            progress.take(line)
        else:
            progress.read(line)
        stages += [progress.stage] if [progress.stage] != stages[-1:] else []
    assert stages == [
        "reading the data", "setting up", "compiling, about some minutes the first time", "training",
        "counting n-grams", "training", "evaluating val_loss", "training", "evaluating CORE", "training",
        "evaluating val_loss", "writing the model", "evaluating the artifact", "evaluating sliding",
        "writing the result"]
    progress = watch.Progress()
    start = EVENTS["run folder:"]
    progress.take(start | dict(config=dict(eval_from="logs/a/final_model.pt")))
    assert progress.live()[1].startswith("evaluating val_loss: ")
    progress.read("core_metric:0.100000 tasks:22 seconds:1.0")
    assert progress.stage != "training"


def test_what_preflight_and_the_trainer_say_alike_is_shown_once():
    progress = watch.Progress()
    assert [progress.read(MIDDLE[0]) for _ in range(2)] == [MIDDLE[0], None]
    assert [progress.read("warning: a") for _ in range(2)] == 2 * ["warning: a"]


def test_without_tqdm_a_terminal_gets_the_log_lines(run, tmp_path):
    (tmp_path / "tqdm.py").write_text("raise ImportError")
    code, lines, live = on_terminal(run, tmp_path, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert code == 0 and not any(live) and LINES in "\n".join(lines)


def test_a_pipe_has_every_line(run, tmp_path):
    done = in_pipe(run, tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", LINES)


@pytest.mark.parametrize("name", ["data_path", "val_tokens", "max_wallclock_seconds", "iterations"])
def test_another_game_is_not_compared(name):
    assert watch.target_of(RESULT)["compare"]
    assert not watch.target_of(RESULT | {"overrides": {name: ["a", "b"]}})


def test_the_exit_code_and_last_words_are_the_scripts(tmp_path):
    (tmp_path / "fails.py").write_text("import sys\nprint('a')\nsys.exit(sys.argv[1])")
    done = in_pipe([*WATCH, "fails.py", "why"], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "a\n", "why\n")
    code, lines, _ = on_terminal([*WATCH, "fails.py", "why"], tmp_path)
    assert code == 1 and "why" in lines


WAITS = """
import signal, sys, time
def came(number, frame):
    print("got", sys.argv[1], flush=True)
    time.sleep(1)
    sys.exit(7)
signal.signal(getattr(signal, "SIG" + sys.argv[1]), came)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("sent, received", [
    ("INT", "INT"), ("HUP", "TERM"), ("USR2", "USR2")])
def test_a_signal_reaches_the_script_once(tmp_path, sent, received):
    (tmp_path / "waits.py").write_text(WAITS)

    def as_in_a_terminal():     # what a shell runs in the background ignores INT, below nohup HUP
        for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(ignored, signal.SIG_DFL)

    process = subprocess.Popen([*WATCH, "waits.py", received], cwd=tmp_path, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env=os.environ | OURS,
                               preexec_fn=as_in_a_terminal)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(getattr(signal, f"SIG{sent}"))
    out, err = process.communicate(timeout=300)
    assert out == f"got {received}\n" and process.returncode == 7
    assert err == ("" if sent == "USR2" else f"{watch.STOPPING}\n")


COUNTS = """
import subprocess, sys, time
if len(sys.argv) > 2:       # a rank, which torchrun gives a session of its own
    subprocess.Popen([sys.executable, __file__, sys.argv[2]], start_new_session=True)
for number in range(12_000):
    with open(sys.argv[1], "w") as file:
        file.write(str(number))
    if number == 0:
        print("ready", flush=True)
    time.sleep(0.05)
"""


@pytest.fixture
def counting(tmp_path):
    """counting(names): a watcher of a program, which writes a number to the first file as long as it runs,
    and starts one that does so with the second. moves(name, seconds): does that one run within so many?"""
    started = []
    (tmp_path / "counts.py").write_text(COUNTS)

    def counting(*names):
        process = subprocess.Popen([*WATCH, "counts.py", *names], cwd=tmp_path, text=True,
                                   stdout=subprocess.PIPE, env=os.environ | OURS,
                                   process_group=0)     # as a shell with jobs does
        started.append(process)
        for _ in names:
            assert process.stdout.readline() == "ready\n"
        return process

    def moves(name, seconds=0.5):
        before = (tmp_path / name).read_text()
        ends = time.monotonic() + seconds
        while (tmp_path / name).read_text() == before and time.monotonic() < ends:
            time.sleep(0.02)
        return (tmp_path / name).read_text() != before

    counting.moves = moves
    yield counting
    for process in started:
        guard.kill([process.pid, *guard.below(process.pid)], signal.SIGKILL)
        process.wait()
        process.stdout.close()


def test_what_is_stopped_stands_still(counting):
    """Ctrl-Z and fg, twice: the command and what it started."""
    process = counting("one", "two")
    for _ in range(2):
        process.send_signal(signal.SIGTSTP)
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        assert not counting.moves("one") and not counting.moves("two", 0.1)
        process.send_signal(signal.SIGCONT)
        assert counting.moves("one", 60) and counting.moves("two", 60)


@pytest.mark.parametrize("sent", ["KILL", "TERM", "HUP"])
def test_a_stopped_run_can_be_ended(sent, counting):
    """As by `kill -9 %1` and `kill %1`, which also wakes it."""
    process = counting("one")
    process.send_signal(signal.SIGTSTP)
    os.waitpid(process.pid, os.WUNTRACED)
    children = guard.below(process.pid)
    process.send_signal(getattr(signal, f"SIG{sent}"))
    process.send_signal(signal.SIGCONT)
    assert process.wait(300) != 0
    wait_until(lambda: not any(map(is_there, children)))


def is_there(pid):
    """A process that runs, or could."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def test_a_watcher_that_fails_leaves_no_orphan(counting, tmp_path):
    """Whatever fails in it."""
    (tmp_path / "fails.py").write_text(FAILS)
    process = subprocess.Popen([sys.executable, "fails.py"], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})
    children = [int(pid) for pid in process.stdout.readline().split()]
    assert len(children) == 2 and "ZeroDivisionError" in process.communicate(timeout=300)[1]
    wait_until(lambda: not any(map(is_there, children)))


FAILS = """
import os, sys, time
from tools.run import guard, plan, watch

def read(*_):
    while len(found := guard.below(os.getpid())) < 2:
        time.sleep(0.01)
    print(*found, flush=True)
    1 / 0

watch.Progress.read = read
sys.exit(watch.main(["counts.py", "one"]))
"""


# ---------------------------------------------------------------- LOGGER
WANDB = """
import json
class Run:
    def log(self, values, step=None): print("logged", step, json.dumps(values), flush=True)
    def finish(self): print("finished", flush=True)
def init(project, name, config):
    print("init", project, name, config, flush=True)
    return Run()
"""


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_wandb_and_trackio_get_scalars_and_config(kind, run, tmp_path):
    (tmp_path / f"{kind}.py").write_text(WANDB)
    done = in_pipe(run, tmp_path, LOGGER=kind, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 0, done.stderr
    assert "init train_gpt a {'preset': 'tiny', 'seed': '7', 'dtype': 'auto'}" in done.stdout
    logged = [line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith("logged")]
    assert [(step, json.loads(values)) for _, step, values in logged] == [
        ("50", {"seconds": 60.0, "train_loss": 2.5, "mean_loss": 2.0, "tokens": 2138940, "lr_factor": 1.0,
                "eta": 60.0}),
        ("1033", {"seconds": 119.969, "val_loss": 2.0077, "val_bpb": 1.2163}),
        ("None", {"samples": ""})]      # the launcher hands on what show.py has sampled
    assert done.stdout.endswith("finished\n")


UNWELL = {      # where it fails: what is put in the package's place
    "an exit at the start": ("    print(\"init\"", "    raise SystemExit(1)\n    print(\"init\""),
    "later": ('print("logged"', 'assert step and step < 1000; print("logged"'),
    "at the end": ('print("finished"', 'raise OSError("no space"); print("finished"'),
    "when it is imported": ("import json", "import json\nraise TypeError('Descriptors cannot be created')")}


@pytest.mark.parametrize("where", UNWELL)
def test_a_logger_that_fails_is_a_warning(where, run, tmp_path):
    """... and the run goes on to its end."""
    old, new = UNWELL[where]
    package = WANDB.replace(old, new) if old in WANDB else WANDB + new
    (tmp_path / "wandb.py").write_text(package)
    plain = in_pipe(run, tmp_path)
    done = in_pipe(run, tmp_path, LOGGER="wandb", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 0
    own = ("init", "logged", "finished")        # lines of the stand-in
    said = [line for line in done.stdout.splitlines() if not line.startswith(own)]
    assert said == plain.stdout.splitlines()
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("run.sh: LOGGER=wandb failed (") and warning.endswith("goes on without it")


def test_tensorboard_gets_the_same(run, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    assert in_pipe(run, tmp_path, LOGGER="tensorboard").returncode == 0
    events = EventAccumulator(str(tmp_path / "logs/a/tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train_loss")] == [(50, 2.5)]
    assert events.Scalars("val_bpb")[0].value == pytest.approx(1.2163)
    assert {"config/text_summary", "samples/text_summary"} <= {*events.Tags()["tensors"]}


@pytest.mark.parametrize("kind, words", [
    slow("tensorboard", "-m pip install tensorboard"), ("wandb", "-m pip install wandb"),
    ("mlflow", "none of")])
def test_a_logger_that_is_missing_is_refused(run, tmp_path, kind, words):
    for name in ("tensorboard", "wandb"):
        (tmp_path / f"{name}.py").write_text("raise ImportError")
    began = time.monotonic()
    done = in_pipe(run, tmp_path, LOGGER=kind, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 2 and done.stdout == "" and words in done.stderr, done.stderr
    assert done.stderr.startswith("run.sh: LOGGER=") and len(done.stderr.splitlines()) == 1
    assert time.monotonic() - began < 60


def test_where_there_is_no_pip_the_advice_is_uv(monkeypatch, capsys):
    """As in an environment that uv made."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(watch, "find_spec", lambda name: None)
    assert watch.open_logger("wandb") is None
    python = os.path.relpath(sys.executable)
    assert capsys.readouterr().err.endswith(f": uv pip install --python {python} wandb\n")
