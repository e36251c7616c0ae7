"""tools/run/watch.py: what a run looks like on a terminal and in a pipe, LOGGER. Signals: test_launcher."""
import json
import os
import re
import subprocess
from types import SimpleNamespace

import pytest

from records.judge import logs
from tools.run import watch
from tools.run.guard import Guarded
from tools.run.pulse import Pulse

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


@pytest.fixture
def follow(tmp_path, monkeypatch, capsys):
    """(on a terminal?, LOGGER) -> what is printed of a run with these lines and events, and its errors"""
    (tmp_path / "logs/a").mkdir(parents=True)
    (tmp_path / "events").write_text(json.dumps(EVENTS))
    (tmp_path / "lines").write_text(LINES)
    (tmp_path / "run.py").write_text(RUN)
    monkeypatch.chdir(tmp_path)

    def follow(terminal=False, kind="", **env):
        logger = watch.open_logger(kind)
        env = os.environ | {"NAP": "0"} | env
        child = Guarded(["run.py", "lines"], env, subprocess.PIPE, subprocess.PIPE)
        signals = SimpleNamespace(tell=lambda screen: None)
        screen = watch.Screen(terminal)
        watch.follow(child, screen, watch.Progress(), logger, signals, Pulse())
        screen.hide()
        assert child.wait() == 0
        logger.close("sample 1: x")
        return capsys.readouterr()

    return follow


def test_what_shows_a_run_takes_its_data_from_its_result(tmp_path, monkeypatch):
    """A flag beat the variable when it trained."""
    given = []
    monkeypatch.setattr(watch, "Guarded", lambda words, env: given.append(env) or SimpleNamespace(
        wait=lambda: 0))
    (tmp_path / "result.json").write_text("{}")
    env = dict(DATA_PATH="a", TOKENIZER_PATH="b", DEVICE="cpu")
    watch.show_result(tmp_path, 0, env, SimpleNamespace(follow=lambda child: None), watch.Logger(""))
    assert given == [dict(DEVICE="cpu")]


@pytest.mark.parametrize("columns", [200, 50])
def test_a_terminal_has_one_live_line(follow, monkeypatch, columns):
    """It is never longer than a row, and has all at 80 columns."""
    monkeypatch.setenv("COLUMNS", str(columns))
    out, _ = follow(True, NAP="0.3")
    rows = [row.split("\r") for row in out.replace(watch.CLEAR, "").split("\n")]
    live = [text for row in rows for text in row[:-1]]
    assert max(map(len, live)) < min(columns, 85)
    assert any(text.startswith("warmup before the clock, compiling: about half ") for text in live)
    # bits per byte: 2 / ln 2 * 429104 / 1021844
    training = [text for text in live if "%" in text]
    shown = r" 50% \|#####     \| step 50, loss 2.0000, 1.212 bpb, 35,649 tok/s, 60 s left"
    assert re.match(shown if columns == 200 else shown[:45], training[0])
    assert [row[-1] for row in rows if row[-1]] == [
        "override matrix_lr 0.03 -> 0.02",
        "data: embedded train tokens:25176420 in 1 shards, val tokens:429104",
        "data: not the text that tiny is scored on (fingerprint abc)",
        "parameters:9241732 (embed:131072)",
        "limits: at most 100000 steps (409600000 tokens); at most 120 s of training",
        "step:1033/100000 val_loss:2.0077 val_bpb:1.2163 train_time:119969ms step_avg:116.14ms"]


def test_the_live_line_has_mfu_on_a_gpu():
    """By the mean FLOPs of a token so far; `mfu:?` on a card whose peak is unknown."""
    progress = watch.Progress()
    progress.take(EVENTS["run folder:"])
    progress.flops = [(0, 1000, 1e9), (60, 3000, 3e9)]     # 80 steps: half of the tokens in each
    progress.take(dict(kind="train", step=80, steps=100, tokens=989_400 * 10, seconds=10.0, eta=5.0,
                       train_loss=2.0, mean_loss=2.0))
    assert "mfu" not in progress.live()[1]
    progress.gpus = ["NVIDIA H100 80GB HBM3"] * 2
    assert ", 989,400 tok/s, mfu:1.000 in bf16, " in progress.live()[1]
    line = ("step:80/100 train_loss:2.0000 train_time:10000ms step_avg:125.00ms tok/s:989400 lr_factor:1.000 "
            "eta:3s mean_loss:2.1000")
    shown = progress.with_mfu(line)
    assert shown == line.replace(" lr_factor", " mfu:1.000 in bf16 lr_factor")
    assert logs.STEP.match(shown).groups() == logs.STEP.match(line).groups()
    assert progress.with_mfu("step:80/100 val_loss:2.0000") == "step:80/100 val_loss:2.0000"
    progress.dtype = "fp8"
    assert ", mfu:0.500 in fp8, " in progress.live()[1]
    progress.gpus = ["a card of tomorrow"]
    assert ", mfu:? of a card of tomorrow, " in progress.live()[1]


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
    """Also in the middle of a run, which then trains on."""
    progress = watch.Progress()
    stages = []
    for line in MIDDLE:
        if isinstance(line, dict):
            progress.take(line)
        else:
            progress.read(line)
        stages += [progress.stage] if [progress.stage] != stages[-1:] else []
    assert stages == [
        "reading the data", "setting up", "warmup before the clock, compiling: about some minutes",
        "training", "counting n-grams", "evaluating val_loss", "training", "evaluating CORE",
        "evaluating val_loss", "evaluating the artifact", "evaluating sliding", "writing the result"]


# ---------------------------------------------------------------- LOGGER
class Library:
    """A stand-in for wandb, whose method `fails` fails."""
    def __init__(self, fails=""):
        self.fails = fails
        self.said = []

    def init(self, project, name, config):
        assert self.fails != "init"
        self.said.append((project, name, config))
        return self

    def log(self, values, step=None):
        assert self.fails != "log"
        self.said.append((step, values))

    def finish(self):
        if self.fails == "finish":
            raise SystemExit("no space")
        self.said.append("finished")


@pytest.fixture
def library(monkeypatch):
    """fails -> the Library that is every logger's"""
    def library(fails=""):
        made = Library(fails)
        monkeypatch.setattr(watch, "find_spec", lambda kind: kind)
        monkeypatch.setattr(watch, "import_module", lambda kind: made if fails != "import" else 1 / 0)
        return made

    return library


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_wandb_and_trackio_get_scalars_and_config(kind, follow, library):
    made = library()
    assert follow(kind=kind) == (LINES, "")
    assert made.said == [
        ("train_gpt", "a", dict(preset="tiny", seed="7", dtype="auto")),
        (50, dict(seconds=60.0, train_loss=2.5, mean_loss=2.0, tokens=2138940, lr_factor=1.0, eta=60.0)),
        (1033, dict(seconds=119.969, val_loss=2.0077, val_bpb=1.2163)),
        (None, dict(samples="sample 1: x")), "finished"]


@pytest.mark.parametrize("where", ["import", "init", "log", "finish"])
def test_a_logger_that_fails_is_a_warning(where, follow, library):
    """... and the run goes on to its end."""
    library(where)
    out, err = follow(kind="wandb")
    assert out == LINES
    (warning,) = err.splitlines()
    assert warning.startswith("run.sh: LOGGER=wandb failed (") and warning.endswith("goes on without it")


def test_tensorboard_gets_the_same(follow, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    assert follow(kind="tensorboard") == (LINES, "")
    events = EventAccumulator(str(tmp_path / "logs/a/tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train_loss")] == [(50, 2.5)]
    assert events.Scalars("val_bpb")[0].value == pytest.approx(1.2163)
    assert {"config/text_summary", "samples/text_summary"} <= {*events.Tags()["tensors"]}


@pytest.mark.parametrize("kind, made_by, words", [
    ("wandb", "pip", "-m pip install wandb"), ("wandb", "uv", "uv pip install --python "),
    ("mlflow", "pip", "none of")])
def test_a_logger_that_is_missing_is_refused(kind, made_by, words, monkeypatch, capsys):
    """The command that installs it fits the environment: uv makes one without pip."""
    monkeypatch.setattr(watch, "find_spec", lambda name: made_by == name or None)
    assert watch.open_logger(kind) is None
    err = capsys.readouterr().err
    assert err.startswith("run.sh: LOGGER=") and words in err and err.count("\n") == 1
