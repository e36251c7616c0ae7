"""tools/watch.py: what a run looks like on a terminal and in a pipe, its end, signals, LOGGER."""
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

import fork_server
import watch
from helpers import ROOT, SCRIPT, TOY, slow, wait_until
from screens import on_terminal

WATCH = [sys.executable, str(ROOT / "tools" / "watch.py")]
RUN = """
import os, sys, time
for line in open(sys.argv[1]).read().splitlines():
    print(line, flush=True)
    if line.startswith(("step:50/", "rehearsal")):
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
rehearsal before the clock, compiling: about half a minute
setup:1752ms compile:25111ms
step:50/100000 train_loss:2.0000 train_time:60000ms step_avg:114.90ms tok/s:35649 lr_factor:1.000 eta:60s
stopping_early: wallclock_cap train_time:119969ms step:1033/100000
evaluating val_loss
step:1033/100000 val_loss:2.0077 val_bpb:1.2163 train_time:119969ms step_avg:116.14ms
peak memory resident: 840 MiB
final_model val_loss:2.0077 val_bpb:1.2163
sample 1: def »f(x):
    return x
   x  step:9/9 train_loss:1.0000
        train_time_ms  119969
           run folder  logs/a
"""
RESULT = dict(
    preset="tiny", val_loss=2.0077, val_bpb=1.21635559, core=None, steps=1033, tokens=4231168,
    train_time_ms=119969, tok_per_s=35269, overrides={"matrix_lr": ["0.03", "0.02"]})


@pytest.fixture
def run(tmp_path):
    """A finished run's folder and output in tmp_path; the command that prints it."""
    (tmp_path / "logs/a").mkdir(parents=True)
    (tmp_path / "logs/a/result.json").write_text(json.dumps(RESULT))
    (tmp_path / "logs/a/final_model.int8.ptz").write_bytes(bytes(2_500_000))
    (tmp_path / "logs/a/loss.png").touch()
    (tmp_path / "logs/a/train.log").write_text(f"import x\n{'=' * 100}\nconfig preset=tiny\n{LINES}")
    start = dict(kind="start", preset="tiny", config=dict(preset="tiny", seed="7", dtype="auto"),
                 overrides=RESULT["overrides"])
    (tmp_path / "logs/a/events.jsonl").write_text(json.dumps(start) + "\n")
    (tmp_path / "lines").write_text(LINES)
    (tmp_path / "run.py").write_text(RUN)
    return [*WATCH, sys.executable, "run.py", "lines"]


def in_pipe(command, cwd, **env):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300,
                          env=os.environ | {"NAP": "0"} | env)


def test_a_terminal_has_one_live_line_and_one_screen(run, tmp_path):
    code, lines, live = on_terminal(run, tmp_path, columns=200)
    assert code == 0
    training = [text for text in live if "%" in text]
    assert any(text.startswith("compiling, about half a minute the first time: ") for text in live)
    # bits per byte: 2 / ln 2 * 429104 / 1021844
    assert re.match(r" 50% \|.+\| step 50, loss 2.0000, 1.212 bpb, 35,649 tok/s, 60 s left", training[0])
    assert max(map(len, live)) < 80
    text = "\n".join(lines)
    assert text.startswith("override matrix_lr 0.03 -> 0.02\ndata: not the text")
    assert ("data: embedded, 25,176,420 tokens to train on, 429,104 to be scored on\n"
            "plan: 9,241,732 parameters, 4,096 tokens per step (later 8,192), at most 100,000 steps, at most "
            "120 s of training\nstep:1033/100000 val_loss" in text)
    assert "step:50/" not in text and "train_time_ms" not in text and "peak memory" not in text
    assert "sample 1: def »f(x):\n    return x\n   x  step:9/9 train_loss:1.0000\n\nval_bpb 1.2164" in text


@pytest.mark.parametrize("columns", [50, 80])
def test_a_narrow_terminal(run, tmp_path, columns):
    """No row is longer, no word is broken, the live line shows all that it has at 80."""
    code, lines, live = on_terminal(run, tmp_path, columns=columns)
    assert code == 0 and max(map(len, lines)) <= columns and max(map(len, live)) < columns
    assert any(text.rstrip().endswith("60 s left") for text in live) == (columns == 80)
    words = " ".join(lines).split()
    log = (tmp_path / "lines").read_text().split()
    plan = "parameters, 4,096 tokens per step (later 8,192),"
    assert plan in " ".join(words) and {"override", "val_bpb:1.2163", "return"} <= {*words} & {*log}
    compared = [line for line in lines if "the record: " in line or "a plain GPT: " in line]
    assert len(compared) == 2 and all(line.endswith(")") for line in compared) == (columns == 80)


def test_a_slow_machine_says_so_early(run, tmp_path):
    """Once, in the game itself; not where it is as fast as the record's or plays another game."""
    pace = watch.target_of(RESULT)["pace"]
    events = tmp_path / "logs/a/events.jsonl"
    start = dict(kind="start", preset="tiny", overrides=dict(seed=["1", "2"]))
    events.write_text(json.dumps(start) + "\n")

    def said(factor, step=pace["step"]):
        progress = watch.Progress()
        progress.seen["folder"] = str(tmp_path / "logs/a")
        progress.step = (step, factor * pace["seconds"], 60, 1000, 0.0)
        return progress.slower(), progress.slower()

    here = round(2 * pace["seconds"])
    there = round(pace["seconds"])
    line, again = said(2.0)
    assert line.startswith(f"{here} s for 100 steps, {there} s on the record's machine (2 threads of ")
    assert again is None
    assert said(1.1) == (None, None) == said(2.0, step=50)
    events.write_text(json.dumps(start | dict(overrides=dict(iterations=["1", "200"]))) + "\n")
    assert said(2.0) == (None, None)
    events.unlink()
    assert said(2.0) == (None, None)


# A run of 200 steps that samples and validates on its way, and scores in further ways at its end
MIDDLE = """data: embedded train tokens:25176420 in 1 shards, val tokens:429104
parameters:9241732 (embed:131072)
limits: at most 200 steps (819200 tokens); no cap
run folder: logs/a
rehearsal before the clock, compiling: about some minutes
setup:1752ms compile:25111ms
{}
sample 1: x »y
step:9/9 train_loss:1.0000 train_time:9ms eta:9s
step:100/200 train_loss:1.0000 train_time:9ms eta:9s
{}
evaluating CORE
core_metric:0.100000 tasks:22 seconds:1.0
{}
evaluating val_loss
step:200/200 val_loss:2.0077 train_time:119969ms step_avg:116.14ms
Serialized model int8+zlib: 9 bytes (9 weights)
evaluating sliding
final_sliding val_loss_sliding:2.00000000 eval_time:9ms
sample 1: a »b
        train_time_ms  119969
"""


def report(step, kind="train", loss=2.0):
    if kind == "val":
        return f"evaluating val_loss\nstep:{step}/200 val_loss:2.0000 train_time:9ms step_avg:9.00ms"
    return (f"step:{step}/200 train_loss:{loss:.4f} train_time:{step * 9}ms step_avg:9.00ms tok/s:9 "
            f"lr_factor:1.000 eta:{200 - step}s")


MIDDLE = MIDDLE.format(report(100, "val"), report(150), report(200)).splitlines()


def test_samples_in_the_middle_of_a_run():
    """The next step of the run ends them, no text that looks like one; the last samples are kept."""
    progress = watch.Progress()
    shown = {line: progress.read(line) for line in MIDDLE}
    assert shown[report(150)] is None is shown[report(200)]
    inside = "step:9/9 train_loss:1.0000 train_time:9ms eta:9s"
    assert shown[inside] == inside
    assert progress.step[0] == 200 and progress.sample == ["sample 1: a »b"]


def test_what_is_evaluated_is_said():
    """Also in the middle of a run, which then trains on, and of a file."""
    progress = watch.Progress()
    stages = []
    for line in MIDDLE:
        progress.read(line)
        stages += [progress.stage] if [progress.stage] != stages[-1:] else []
    assert stages == [
        "reading the data", "setting up", "compiling, about some minutes the first time", "training",
        "evaluating val_loss", "training", "evaluating CORE", "training", "evaluating val_loss",
        "writing the model", "evaluating the artifact", "evaluating sliding", "writing samples"]
    progress = watch.Progress()
    for line in (MIDDLE[0], "run folder: logs/a", "eval settings: eval_tokens:full"):
        progress.read(line)
    assert progress.live()[1].startswith("evaluating val_loss: ")
    progress.read("core_metric:0.100000 tasks:22 seconds:1.0")
    assert progress.stage != "training"


def test_a_script_of_one_recipe_logs_no_plan():
    """It trains nevertheless, and nothing is said of what is unknown."""
    progress = watch.Progress()
    lines = (MIDDLE[0], "world_size:1 device:cpu activations:float32 micro_batch:1x4096",
             "stage table: from_step tokens_per_step", "                     0            4096",
             "run folder: logs/a", "eval settings: eval_tokens:full")
    assert [progress.read(line) for line in lines] == [None] * len(lines)
    assert progress.stage == "setting up" and not progress.trained
    assert [*progress.plan()] == ["data: embedded, 25,176,420 tokens to train on, 429,104 to be scored on"]


def test_the_loss_that_is_shown_is_a_mean():
    """Of ten reports, but none of before half of the steps, when it was another."""
    progress = watch.Progress()
    for step in range(1, 11):
        progress.read(report(step, loss=7.0))
    assert progress.mean_loss() == 7
    for step, loss in ((60, 3.0), (80, 2.0), (100, 1.0)):
        progress.read(report(step, loss=loss))
    assert progress.mean_loss() == 2
    for step in range(101, 111):
        progress.read(report(step, loss=1.5))
    progress.stage = "training"
    assert progress.mean_loss() == 1.5 and "loss 1.5000" in progress.live()[1]


def test_without_tqdm_a_terminal_gets_the_log_lines(run, tmp_path):
    (tmp_path / "tqdm.py").write_text("raise ImportError")
    code, lines, live = on_terminal(run, tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert code == 0 and not any(live) and LINES in "\n".join(lines)


def test_a_pipe_has_every_line_then_the_end(run, tmp_path):
    done = in_pipe(run, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines, _, end = done.stdout.partition("\n\nval_bpb")
    assert lines + "\n" == LINES
    assert end.splitlines() == [
        " 1.2164, val_loss 2.0077 after 1,033 steps, 4,231,168 tokens, 120.0 s (35,269 tok/s)",
        *(f"  {watch.distance(RESULT, other)}" for other in watch.target_of(RESULT)["compare"]),
        "in logs/a/: train.log (all of the samples), result.json, loss.png, train_gpt.py, "
        "final_model.int8.ptz (2.5 MB)",
        "next: better, or luck? ./run.sh record compare trains both several times: docs/first_change.md"]


def test_no_picture_without_matplotlib(run, tmp_path):
    """The run has said so; nothing else is amiss."""
    (tmp_path / "logs/a/loss.png").unlink()
    done = in_pipe(run, tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and "result.json, train_gpt.py, final" in done.stdout
    assert not (tmp_path / "logs/a/loss.png").exists()


def test_the_end_fits_a_terminal(run, tmp_path):
    """24 rows of 100 columns hold three long samples and all that follows."""
    sample = "sample {}: def »f(x):\n" + "    return x\n" * 9
    text = "".join(map(sample.format, (1, 2))) + "sample 3: " + "long " * 200 + "\nafter\n"
    (tmp_path / "lines").write_text(re.sub(r"(?s)sample 1.*?(?=\n +train_time_ms)", text.strip(), LINES))
    code, lines, _ = on_terminal(run, tmp_path, columns=100)
    screen = lines[lines.index("sample 1: def »f(x):"):]
    assert code == 0 and screen.count("    return x") == 8 and "after" not in screen
    third = screen.index(next(line for line in screen if line.startswith("sample 3")))
    assert [line.startswith("  long") for line in screen[third + 1:third + 6]] == [True] * 4 + [False]
    assert screen[-2].startswith("next: ") and max(map(len, screen)) <= 100
    assert len(screen) <= 25, "\n".join(screen)


def test_the_distance_to_the_record_and_to_a_plain_gpt():
    lower = dict(name="the record", metric="val_bpb", better="lower", value=1.2, about="x, 5 seeds")
    assert watch.distance(RESULT, lower) == "0.0164 behind the record: val_bpb 1.2 (x, 5 seeds)"
    plain = lower | dict(name="a plain GPT", value=1.6039)
    assert watch.distance(RESULT, plain) == "0.3875 ahead of a plain GPT: val_bpb 1.6039 (x, 5 seeds)"
    assert watch.distance(RESULT | {"val_bpb": None}, lower) == "the record: val_bpb 1.2 (x, 5 seeds)"
    race = lower | dict(metric="val_loss", value=3.28, seconds=132.2144)
    assert watch.distance(RESULT, race) == (
        "12.2454 s ahead of the record: 132.2144 s to val_loss 3.28 (x, 5 seeds)")
    assert watch.distance(RESULT | {"val_loss": 3.3}, race) == (
        "0.0200 short of val_loss 3.28; the record: 132.2144 s to val_loss 3.28 (x, 5 seeds)")
    core = lower | dict(metric="core", better="higher", value=0.25, seconds=100)
    for value, words in ((0.2, "0.0500 short of core 0.25; "), (0.3, "19.9690 s behind ")):
        assert watch.distance(RESULT | {"core": value}, core) == (
            f"{words}the record: 100 s to core 0.25 (x, 5 seeds)")


def test_the_end_of_a_scored_file(run, tmp_path):
    """EVAL_FROM has its score and folder, no training to speak of."""
    scored = RESULT | dict(steps=0, tokens=0, train_time_ms=0, config={"eval_from": "logs/b/final_model.pt"})
    (tmp_path / "logs/a/result.json").write_text(json.dumps(scored))
    assert in_pipe(run, tmp_path).stdout.endswith(
        "\n\nval_bpb 1.2164, val_loss 2.0077 of logs/b/final_model.pt\nin logs/a/: train.log, result.json\n")


@pytest.mark.parametrize("name", ["data_path", "val_tokens", "max_wallclock_seconds", "iterations"])
def test_another_game_is_not_compared(name):
    assert watch.target_of(RESULT)["compare"]
    assert not watch.target_of(RESULT | {"overrides": {name: ["a", "b"]}})


def test_the_exit_code_and_last_words_are_the_commands(tmp_path):
    done = in_pipe([*WATCH, "bash", "-c", "echo a; echo why >&2; exit 2"], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "a\n", "why\n")
    code, lines, _ = on_terminal([*WATCH, "bash", "-c", "echo why >&2; exit 1"], tmp_path)
    assert code == 1 and "why" in lines


def test_counting_is_a_stage_of_its_own():
    progress = watch.Progress()
    for line, stage in (("setup:1ms compile:2ms", "training"), ("counting n-grams", "counting n-grams"),
                        ("n-grams of 9 tokens counted in 1.0 s", "training")):
        assert progress.read(line) is None and progress.stage == stage


@pytest.mark.parametrize("sent, received", [
    ("INT", "INT"), ("TERM", "TERM"), ("HUP", "TERM"), ("USR1", "USR1"), ("USR2", "USR2"), ("QUIT", "QUIT")])
def test_a_signal_reaches_the_command_once(tmp_path, sent, received):
    command = (f"trap 'echo got {received}; sleep 1; exit 7' {received}; echo ready; "
               "while sleep 0.1; do :; done")
    def as_in_a_terminal():     # what a shell runs in the background ignores INT, below nohup HUP
        for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(ignored, signal.SIG_DFL)

    process = subprocess.Popen([*WATCH, "bash", "-c", command], text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, preexec_fn=as_in_a_terminal)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(getattr(signal, f"SIG{sent}"))
    out, err = process.communicate(timeout=300)
    assert out == f"got {received}\n" and process.returncode == 7
    asks = sent not in ("USR2", "QUIT")
    assert err == ("stopping: a checkpoint is saved first if training has begun\n" if asks else "")


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
        process = subprocess.Popen([*WATCH, sys.executable, "counts.py", *names], cwd=tmp_path, text=True,
                                   stdout=subprocess.PIPE, process_group=0)     # as a shell with jobs does
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
        watch.send(watch.tree(process.pid), signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("sent", ["KILL", "QUIT", "USR1", "USR2", "ABRT", "SEGV"])
def test_nothing_outlives_the_watcher(sent, counting):
    process = counting("one")
    (child,) = [pid for pid in watch.tree(process.pid)[1:] if b"counts.py" in cmdline(pid)]
    process.send_signal(getattr(signal, f"SIG{sent}"))
    assert process.wait(300) != 0
    wait_until(lambda: b"counts.py" not in cmdline(child))
    assert not counting.moves("one", 0.1)


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
    (child,) = [pid for pid in watch.tree(process.pid)[1:] if b"counts.py" in cmdline(pid)]
    process.send_signal(getattr(signal, f"SIG{sent}"))
    process.send_signal(signal.SIGCONT)
    assert process.wait(300) != 0
    wait_until(lambda: b"counts.py" not in cmdline(child))


def cmdline(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def test_a_watcher_that_fails_leaves_no_orphan(tmp_path, monkeypatch):
    """Whatever fails in it."""
    (tmp_path / "counts.py").write_text(COUNTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watch.Progress, "read", lambda *_: 1 / 0)
    monkeypatch.setattr(watch, "pass_signals", lambda child, stop: started.append(child))
    started = []
    with pytest.raises(ZeroDivisionError):
        watch.main([sys.executable, "counts.py", "one"])
    assert started[0].wait(300) == -signal.SIGTERM


@pytest.mark.slow
def test_a_real_run(tiny_data, tmp_path):
    (tmp_path / "data").symlink_to(tiny_data / "data")
    python = fork_server.start()
    env = TOY | dict(RUN_ID="r", OMP_NUM_THREADS="1", ITERATIONS="10")
    done = in_pipe([python, *WATCH[1:], python, str(SCRIPT)], tmp_path, **env)
    assert done.returncode == 0 and "in logs/r/: train.log" in done.stdout
    env |= dict(RUN_ID="s", SAMPLE_TOKENS="300")  # sampling takes longer than a tick of the live line
    code, lines, live = on_terminal([python, *WATCH[1:], python, str(SCRIPT)], tmp_path, env=env)
    assert code == 0 and any(text.startswith("writing samples") for text in live)
    said = [line.split(":")[0] for line in lines if line and not line.startswith("override ")]
    assert said[:4] == ["data", "plan", "step", "sample 1"] and len(said) < 40


# ---------------------------------------------------------------- LOGGER
WANDB = """
import json
class Run:
    summary = {}
    def log(self, values, step): print("logged", step, json.dumps(values), flush=True)
    def finish(self): print("samples", self.summary["samples"][:20], flush=True)
def init(project, name, dir, config):
    print("init", project, name, dir, config, flush=True)
    return Run()
"""


def test_wandb_gets_scalars_config_and_samples(run, tmp_path):
    (tmp_path / "wandb.py").write_text(WANDB)
    done = in_pipe(run, tmp_path, LOGGER="wandb", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "init train_gpt a logs/a {'preset': 'tiny', 'seed': '7', 'dtype': 'auto'}" in done.stdout
    logged = [line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith("logged")]
    assert [(step, json.loads(values)) for _, step, values in logged] == [
        ("50", {"train_loss": 2.0, "train_time": 60000, "step_avg": 114.9, "tok/s": 35649, "lr_factor": 1.0,
                "eta": 60}),
        ("1033", {"val_loss": 2.0077, "val_bpb": 1.2163, "train_time": 119969, "step_avg": 116.14})]
    assert "samples sample 1: def »f(x):" in done.stdout


UNWELL = {      # where it fails: what is put in the package's place
    "no key": ('def init(project, name, dir, config):\n    return Run()',
               'def init(**_):\n    raise ValueError("api_key not configured")'),
    "an exit at the start": ("    print(\"init\"", "    raise SystemExit(1)\n    print(\"init\""),
    "at the first scalar": ('print("logged"', 'raise ConnectionError("no route"); print("logged"'),
    "later": ('print("logged"', 'assert step < 1000; print("logged"'),
    "at the end": ('print("samples"', 'raise OSError("no space"); print("samples"'),
    "when it is imported": ("import json", "import json\nraise TypeError('Descriptors cannot be created')")}


@pytest.mark.parametrize("where", UNWELL)
def test_a_logger_that_fails_is_a_warning(where, run, tmp_path):
    """... and the run goes on to its end."""
    old, new = UNWELL[where]
    package = WANDB.replace(old, new) if old in WANDB else WANDB + new
    (tmp_path / "wandb.py").write_text(package)
    plain = in_pipe(run, tmp_path)
    done = in_pipe(run, tmp_path, LOGGER="wandb", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0
    own = ("init", "logged", "samples ")        # lines of the stand-in
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
    assert [(event.step, event.value) for event in events.Scalars("train_loss")] == [(50, 2.0)]
    assert events.Scalars("val_bpb")[0].value == pytest.approx(1.2163)
    assert {"config/text_summary", "samples/text_summary"} <= {*events.Tags()["tensors"]}


@pytest.mark.parametrize("kind, words", [
    slow("tensorboard", "-m pip install tensorboard"), ("wandb", "-m pip install wandb"),
    ("mlflow", "none of")])
def test_a_logger_that_is_missing_is_refused(run, tmp_path, kind, words):
    for name in ("tensorboard", "wandb"):
        (tmp_path / f"{name}.py").write_text("raise ImportError")
    began = time.monotonic()
    done = in_pipe(run, tmp_path, LOGGER=kind, PYTHONPATH=str(tmp_path))
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
