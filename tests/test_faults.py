"""Faults put into toy runs by inject.py: what a run says, how it ends, and that it goes on to the same bits.

Quick ones run by default, the slow ones under `-m faults`, and of these the cases marked ci in .ci/run.
"""
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import train_gpt
from helpers import ROOT, TOY, look, run_cli, slow, toy_of, wait_until
from train_gpt import Refused, read_file

pytestmark = pytest.mark.faults


def slow_in_ci(*values):
    """A slow case that .ci/run runs, too."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.ci])


SHORT = dict(TRAIN_BATCH_TOKENS="512", VAL_TOKENS="1500", ITERATIONS="12",
             TRAIN_LOG_EVERY="1", VAL_LOSS_EVERY="5", SAVE_EVERY="3")
PLAIN = TOY | SHORT | dict(BIGRAM_ROWS="512", COUNT_ORDERS="2")
# Documents in order, stages, and an Adam step every other step, so that checkpoints wait for it
STAGES = toy_of("speedrun", **SHORT, MAX_DOC_LEN="48", MAX_EPOCHS="0", SEQ_SCHEDULE="1", WINDOW_PATTERN="SL",
                BATCH_SCHEDULE="1,2,2,2", WINDOW_BLOCK="8", WINDOW_SCHEDULE="16,64,64,64", EVAL_WINDOW="64",
                EVAL_CONTEXT="0", EXTENSION_ITERATIONS="0", SCORE_ARTIFACT="1")
# The mean of past weights, clipping, weight decay, micro-batches, rows that each rank makes by itself
AVERAGED = toy_of("golf_plus", **SHORT | dict(
    SAVE_EVERY="2", NUM_KV_HEADS="1", DEVICE_BATCH_SIZE="4", LOOP_LAYERS="0,0", EVAL_SLIDING="0",
    GPTQ_BATCHES="0"))
# 12 sequences a step, for 1, 2 and 3 ranks
SHARED = PLAIN | dict(TRAIN_BATCH_TOKENS="768", SAVE_EVERY="1", ITERATIONS="8", VAL_LOSS_EVERY="0")


def differences(done, want):
    """What differs between the end of a resumed run and that of an uninterrupted one."""
    if done.code or not done.result or not done.result["resumed"]:
        return [f"{done.run_id}: exit {done.code}, {done.last}, {done.err[-300:]}"]
    same = ("val_loss_partial", "trained", "artifact", "steps", "tokens", "bytes_model", "stop_reason")
    pairs = {name: (done.result[name], want.result[name]) for name in same}
    pairs |= {"final_model.pt": (done.weights, want.weights), "the artifact": (done.artifact, want.artifact),
              "a logged loss": ((done.losses, done.val_losses), (want.losses, want.val_losses))}
    return [f"{done.run_id}: {name} differs" for name, (a, b) in pairs.items() if a != b]


def goes_on(go, whole, done, settings=PLAIN, ranks=1):
    """Resumed it ends as it would have; returns the resumed run."""
    again = go({}, resume=done.run_id, ranks=ranks)
    assert differences(again, whole(settings, ranks)) == []
    return again


def checkpoint_of(folder):
    """What checkpoint.pt holds, which is whole."""
    return read_file(Path(folder, "checkpoint.pt"))


def saved_step(folder):
    return checkpoint_of(folder)["progress"]["step"]


def one_sentence(done):
    """Exit 1, no traceback, no result, and the last line on stderr, which is train.log's too."""
    assert done.met and done.code == 1 and "Traceback" not in done.err, done.err
    said = done.err.strip().splitlines()[-1].removeprefix("train_gpt: ")
    assert done.last == said and done.result is None
    return said


def refused(done, *words):
    """Exit 2 with one sentence that has the words."""
    (line,) = done.err.strip().splitlines()
    assert done.code == 2 and all(word in line for word in words), line
    return line.removeprefix("train_gpt: ")


# ---------------------------------------------------------------- killed after the first checkpoint
PLACED = [  # (where, settings, where again after the first resume or "")
    ("step:8", PLAIN, "step:2"),
    ("update:7", STAGES, ""),
    ("read:44", AVERAGED, "update:1"),      # in the thread that reads ahead
    ("save:3", STAGES, "step:2"),
    ("write/checkpoint.pt:300", PLAIN, "write/checkpoint.pt:30"),    # of the second; the first again
    ("sync/checkpoint.pt.tmp:2", PLAIN, ""),        # written, not yet on the disk
    ("rename/checkpoint.pt:2", PLAIN, "evaluate:1"),
    ("renamed/checkpoint.pt:2", AVERAGED, "rename/checkpoint.pt:1"),
    ("renamed/checkpoint.pt:3", STAGES, ""),
    ("evaluate:3", AVERAGED, ""),
    ("write/final_model.pt:3", PLAIN, ""),
    ("rename/final_model.pt:1", STAGES, "evaluate:1"),
    ("artifact:1", PLAIN, ""),
    ("sync/final_model.int8.ptz.tmp:1", PLAIN, "artifact:1"),
    ("rename/result.json:1", AVERAGED, "rename/result.json:1"),
]


def through(go, whole, what, placed, ranks=1, rank=0):
    """Injects each fault, resumes until the end -> [what was not as it is without]."""
    wrong = []
    for place, settings, again in placed:
        runs = [go(settings, f"{what}@{place}@{rank}", ranks)]
        if again:
            runs.append(go({}, f"{what}@{again}@{rank}", ranks, runs[0].run_id))
        wrong += [f"{place}, {again}: not met" for done in runs if not done.met or not any(done.codes)]
        done = go({}, ranks=ranks, resume=runs[0].run_id)
        wrong += [f"{place}: {line}" for line in differences(done, whole(settings, ranks))]
    return wrong


@pytest.mark.parametrize("row, moment", [
    slow_in_ci(1, "in a step"), (6, "before a checkpoint is renamed"),
    slow_in_ci(14, "before result.json")])
def test_killed_at_a_moment(row, moment, go, whole):
    assert through(go, whole, "kill", [PLACED[row]]) == []


def strike(folder, number, seconds):
    """-> act of a run: the signal, so long after its first checkpoint."""
    def act(process):
        wait_until(lambda: process.poll() is not None or (folder / "checkpoint.pt").exists())
        time.sleep(seconds)
        if process.poll() is None:
            process.send_signal(number)
    return act


@pytest.mark.slow
@pytest.mark.parametrize("what, number", [("kill", signal.SIGKILL), ("term", signal.SIGTERM)])
def test_at_twenty_moments(what, number, go, root, whole):
    """All places and 5 times by the clock, drawn with a seed that is printed; each resumed to the end."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    wrong = through(go, whole, what, PLACED)
    struck = 0
    while struck < 5:
        settings = draw.choice([PLAIN, STAGES, AVERAGED])
        run_id = f"{what}{draw.random()}"
        act = strike(root / "logs" / run_id, number, draw.uniform(0, whole(settings).seconds / 2))
        done = go(settings, act=act, RUN_ID=run_id)
        if done.code == 0:      # it had ended before
            continue
        struck += 1
        if what == "term" and done.last not in (f"RESUME={run_id}", "interrupted"):
            wrong.append(done.last)
        wrong += differences(go({}, resume=run_id), whole(settings))
    assert wrong == []


@pytest.mark.slow
def test_compiled(go):
    """Killed and resumed to the bits of the uninterrupted run, both compiled."""
    settings = PLAIN | dict(COMPILE="1", NUM_LAYERS="1", ITERATIONS="8", EVAL_CONTEXT="64")
    want = go(settings | {"SAVE_EVERY": "0"}, timeout=900)
    assert want.code == 0, want.err
    first = go(settings, fault="kill@sync/checkpoint.pt.tmp:2", timeout=900)
    done = go({}, resume=first.run_id, timeout=900)
    assert first.met and "resume: from step 3" in done.out
    assert differences(done, want) == []


# ---------------------------------------------------------------- signals
@pytest.mark.parametrize("fault", ["term@step:8", slow("int@step:8")])
def test_a_signal(fault, go, whole):
    """The step is finished, a checkpoint of it is made, and the last line says how to go on."""
    done = go(PLAIN | {"SAVE_EVERY": "0"}, fault)
    assert one_sentence(done) == f"RESUME={done.run_id}" and saved_step(done.folder) == 8
    assert "resume: from step 8 at" in goes_on(go, whole, done).out


@pytest.mark.parametrize("fault, left", [
    ("term@warmup:1", []), ("term@evaluate:4", ["checkpoint.pt", "final_model.pt"]),
    slow_in_ci("int@evaluate:5", ["checkpoint.pt", "final_model.pt"]),
    slow("term@artifact:1", ["checkpoint.pt", "final_model.pt"])])
def test_a_signal_outside_of_training(fault, left, go, whole):
    """Ends the run at once; weights that were trained are on the disk before anything scores them."""
    done = go(PLAIN, fault)
    assert one_sentence(done) == "interrupted"
    assert sorted(path.name for path in done.folder.glob("*.pt")) == left
    if left:
        assert saved_step(done.folder) == 12
        assert done.weights == whole(PLAIN).weights
        goes_on(go, whole, done)


@pytest.mark.parametrize("fault", [slow_in_ci("term@step:8@1"), slow("int@step:8@0")])
def test_a_signal_to_two_ranks(fault, go, whole):
    """One that came to a single rank stops both at the same step; log's last line says how to go on."""
    done = go(PLAIN, fault, ranks=2)
    assert done.met and done.codes == [1, 1] and "Traceback" not in done.err, done.err
    assert done.last == f"RESUME={done.run_id}" and saved_step(done.folder) == 8
    goes_on(go, whole, done, ranks=2)


@pytest.mark.parametrize("name", ["term", "int"])
def test_a_signal_in_setup(name, go):
    """Before there is a folder: one word, and nothing is left."""
    done = go(PLAIN, f"{name}@setup:1")
    assert done.met and done.code == 1 and not done.folder.exists()
    assert done.err == "train_gpt: interrupted\n"


# ---------------------------------------------------------------- ranks that die or hang
GONE = r"rank {}: another rank is gone or hangs \(.*\)"


@pytest.mark.parametrize("rank", [0, slow_in_ci(1)])
def test_a_rank_is_killed(rank, go, whole):
    """The other one sees it at once and says so; two ranks go on to the same bits."""
    done = go(PLAIN, f"kill@step:8@{rank}", ranks=2, grace=300)
    codes = [1, 1]
    codes[rank] = -9
    assert done.met and done.codes == codes
    assert re.fullmatch(GONE.format(1 - rank), done.last), done.last
    goes_on(go, whole, done, ranks=2)


@pytest.mark.parametrize("fault, other", [
    ("stop@step:8@1", 0), slow("hang@update:8@0", 1), slow("stop@save:2@1", 0)])
def test_a_rank_hangs(fault, other, go, whole):
    """The other one waits for it as long as collectives do, and ends."""
    done = go(PLAIN, fault, ranks=2, grace=0, TIMEOUT="3")
    assert done.met and done.codes == ([1, -9] if fault.endswith("1") else [-9, 1])
    assert re.fullmatch(GONE.format(other), done.last), done.last
    goes_on(go, whole, done, ranks=2)


@pytest.mark.parametrize("fault, sentence", [
    ("raise@step:8@1", "rank 1: RuntimeError: an injected mistake"),
    slow("raise@step:8@0", "rank 0: RuntimeError: an injected mistake"),
    slow("nan@step:8", "rank 0: train_loss is not finite at step 8: lower the learning rates"),
    slow("oom@step:8@1", "rank 1: out of memory: set DEVICE_BATCH_SIZE below micro_batch"),
    slow("full@write/checkpoint.pt:300@0", "rank 0: the disk is full: free some GB")])
def test_two_ranks_of_which_one_fails(fault, sentence, go, whole):
    """Each says what it saw, the cause among it, and both go on to the same bits."""
    done = go(PLAIN, fault, ranks=2)
    assert done.met and done.codes == [1, 1]
    assert ("Traceback" in done.err) == ("raise" in fault), "only a mistake of ours has one"
    last = sorted(done.log.splitlines()[-2:])
    assert [line[:7] for line in last] == ["rank 0:", "rank 1:"], last
    assert any(line.startswith(sentence) for line in last), last
    goes_on(go, whole, done, ranks=2)


@pytest.mark.slow
def test_two_ranks_with_one_killed_at_each_place(go, whole):
    """Rank 0 at each of the places, rank 1 at those that it comes to; each resumed to the end."""
    both = ("step", "update", "read", "save", "evaluate")
    other = [row for row in PLACED if row[0].split(":")[0] in both]
    wrong = through(go, whole, "kill", PLACED, 2, 0) + through(go, whole, "kill", other, 2, 1)
    moments = len(PLACED) + len(other)
    assert wrong == [] and moments >= 20


def unrounded_losses(folder):
    """{step: train_loss}; those after a resume replace the ones before."""
    lines = Path(folder, "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines if line]
    return {event["step"]: event["train_loss"] for event in events if event["kind"] == "train"}


@pytest.mark.parametrize("before, later", [(2, 1), slow(1, 2), slow(1, 3), slow(3, 2)])
def test_another_number_of_ranks(before, later, go, whole):
    """The first loss after the resume to 1e-5, the others to 1e-4; unrounded, as the events have them."""
    done = go(SHARED, "kill@sync/checkpoint.pt.tmp:5@0", ranks=before)
    again = go({}, ranks=later, resume=done.run_id)
    assert done.met and again.codes == [0] * later, again.err
    assert "resume: from step 4 at" in again.out
    want, got = (unrounded_losses(folder) for folder in (go(SHARED, ranks=before).folder, again.folder))
    off = {step: abs(got[step] - want[step]) for step in want}
    assert sorted(got) == [*range(1, 9)] and off[5] <= 1e-5 and max(off.values()) <= 1e-4


def processes_of(run_id):
    """Those that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):     # it has ended
            found += [path] * (f"RUN_ID={run_id}".encode() in path.read_bytes())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fault, seen", [
    ("kill@step:8@0", GONE.format(1)),
    ("kill@step:8@1", GONE.format(0)),
    ("raise@step:8@1", r"rank 1: RuntimeError: an injected mistake")])
def test_under_torchrun_all_end_in_a_minute(fault, seen, root, go, whole):
    """With the timeouts as they are. The last lines of train.log say what each rank saw."""
    run_id = "torchrun_" + re.sub(r"\W", "_", fault)
    done = run_cli(root, ranks=2, env=PLAIN | {"RUN_ID": run_id, "FAULT": fault}, timeout=300,
                   script=ROOT / "tests/inject.py")
    ended = time.monotonic()
    (met,) = re.findall(r"^inject: .* at (\S+)$", done.err, re.M)
    left = look(root / "logs" / run_id)
    lines = [line for line in left.log.splitlines() if line.startswith("rank ")]
    assert done.code and any(re.fullmatch(seen, line) for line in lines), (lines, done.err)
    assert left.last == lines[-1] and ended - float(met) < 60
    assert not processes_of(run_id)
    goes_on(go, whole, left, ranks=2)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_torchrun_ends_and_leaves_no_rank(number, root):
    """However it ends, in the middle of training. Ranks by interpreters of their own: torchrun's children."""
    run_id = f"orphans{int(number)}"
    env = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    env |= PLAIN | {"RUN_ID": run_id, "ITERATIONS": "1000000", "SAVE_EVERY": "0", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    torchrun = subprocess.Popen([*words, train_gpt.__file__], cwd=root, env=env, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL)
    try:
        log = root / "logs" / run_id / "train.log"
        wait_until(lambda: log.exists() and "step:10/" in log.read_text(errors="replace"))
        assert len(processes_of(run_id)) >= 3
        torchrun.send_signal(number)
        torchrun.wait()
        wait_until(lambda: not processes_of(run_id), 60)
    finally:
        torchrun.kill()
        torchrun.wait()
        for path in processes_of(run_id):
            os.kill(int(path.parent.name), signal.SIGKILL)
    assert look(root / "logs" / run_id).result is None


# ---------------------------------------------------------------- checkpoints that are damaged
@pytest.fixture(scope="module")
def killed(go):
    """A run that was killed at its end, with a checkpoint of step 9."""
    done = go(PLAIN, "kill@sync/checkpoint.pt.tmp:4")
    assert done.met and saved_step(done.folder) == 9
    return done


@pytest.fixture
def copy(killed):
    """Its folder under another name, without what the writing of the last checkpoint left."""
    folder = killed.folder.parent / f"copy{len([*killed.folder.parent.iterdir()])}"
    shutil.copytree(killed.folder, folder, ignore=shutil.ignore_patterns("*.tmp"))
    return folder


class Evil:
    """What weights_only refuses to load."""

    def __reduce__(self):
        return os.mkdir, ("evil",)


def evil(raw):
    torch.save(Evil(), buffer := io.BytesIO())
    return buffer.getvalue()


DAMAGE = {
    "truncated": lambda raw: raw[:len(raw) // 2],
    "truncated by one byte": lambda raw: raw[:-1],
    "a byte flipped": lambda raw: flipped(raw, len(raw) // 3, 1),
    "empty": lambda raw: b"",
    "random bytes": lambda raw: random.Random(0).randbytes(len(raw)),
    "a pickle": lambda raw: pickle.dumps(Evil(), 2),
    "a pickle in a torch file": evil,
}


def flipped(raw, place, bit):
    return raw[:place] + bytes([raw[place] ^ bit]) + raw[place + 1:]


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_found(kind, copy, monkeypatch):
    """Nothing in the file is executed."""
    monkeypatch.chdir(copy)
    path = copy / "checkpoint.pt"
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    with pytest.raises(Refused, match="checkpoint.pt is damaged or not from this trainer"):
        read_file(path)
    assert not (copy / "evil").exists()


def test_all_clocks_stand_still_while_rank_0_writes(go):
    """The other ranks would count their wait for it, and all ranks take the longest time."""
    cap = dict(SAVE_EVERY="2", MAX_WALLCLOCK_SECONDS="4.5")
    done = go(PLAIN | cap, "sleep@write/checkpoint.pt:1@0", ranks=2)
    assert done.met and done.seconds > 5 and done.result["stop_reason"] == "iterations", done.log


# ---------------------------------------------------------------- what a checkpoint carries, what is refused
def test_a_checkpoint_carries_its_config(copy, go, whole):
    """... so that nothing else of the folder is needed: the log may be gone, or tell lies. What is typed
    may be the same again, or change no number."""
    config = checkpoint_of(copy)["config"]
    assert config == asdict(train_gpt.load_config(PLAIN | {"RUN_ID": config["run_id"]}))
    log = copy / "train.log"
    log.write_text(log.read_text().replace("config matrix_lr=0.03", "config matrix_lr=0.5"))
    again = PLAIN | {"SAVE_EVERY": "4", "SAVE_EVERY_SECONDS": "100", "DEVICE_BATCH_SIZE": "16"}
    assert differences(go(again, resume=copy.name), whole(PLAIN)) == []


def test_resume_without_a_checkpoint(copy, go):
    (copy / "checkpoint.pt").unlink()
    refused(go({}, resume=copy.name), f"there is no logs/{copy.name}/checkpoint.pt")


def test_resume_with_other_constants(copy, go):
    before = look(copy).log
    done = go({"MATRIX_LR": "0.5"}, resume=copy.name)
    refused(done, "matrix_lr=0.5", "0.03")
    refused(go({"SHUFFLE": "0"}, resume=copy.name), "shuffle=0")
    # what is typed counts, also where it is what the preset has
    refused(go({"MODEL_DIM": str(train_gpt.Tiny.model_dim)}, resume=copy.name), "model_dim=", "began with 32")
    refused(go({"PRESET": "golf"}, resume=copy.name), "preset=golf")
    assert look(copy).log == before


def test_resume_after_train_gpt_changed(copy, go):
    """It may have had constants that this one lacks, and is not called damaged."""
    payload = checkpoint_of(copy)
    payload["config"]["gone_since"] = 0.0
    torch.save(payload | {"code_sha256": "0" * 64}, copy / "checkpoint.pt")
    assert "damaged" not in refused(go({}, resume=copy.name), "train_gpt.py is not what")


def test_resume_of_a_finished_run(go, whole):
    """Its result, exit 0, and no byte changed."""
    want = whole(PLAIN)
    before = {path.name: path.read_bytes() for path in want.folder.iterdir()}
    done = go({}, resume=want.run_id)
    assert done.code == 0 and before == {path.name: path.read_bytes() for path in want.folder.iterdir()}
    line = done.out.strip().splitlines()[-1]
    assert f"{want.run_id} has finished" in line and f"logs/{want.run_id}/result.json" in line


# ---------------------------------------------------------------- numbers that are not finite, memory


def test_weights_that_are_not_finite_are_not_saved(go):
    """... although no loss has told yet: the checkpoint before stays."""
    done = go(PLAIN | {"TRAIN_LOG_EVERY": "50", "VAL_LOSS_EVERY": "0", "ITERATIONS": "20", "SAVE_EVERY": "6"},
              "spoil@step:12")
    said = one_sentence(done)
    assert "not finite at step 12" in said and saved_step(done.folder) == 6


# ---------------------------------------------------------------- files
@pytest.mark.parametrize("fault", [
    "full@write/checkpoint.pt:300", slow("full@sync/checkpoint.pt.tmp:2"),
    slow("full@write/final_model.pt:1"), slow("full@sync/final_model.int8.ptz.tmp:1"),
    slow_in_ci("full@write/result.json:1"), slow_in_ci("full@log:30"), slow("full@log:35"),
    slow("readonly@write/checkpoint.pt:300")])
def test_a_full_disk(fault, go, whole):
    """... on a checkpoint, on a file of the end, on train.log: a sentence, exit 1, and it can be resumed."""
    done = go(PLAIN, fault)
    said = one_sentence(done)
    assert ("the disk is full: free some GB" if "full" in fault else "Read-only file system") in said, said
    goes_on(go, whole, done)


def test_a_folder_that_is_removed(go):
    done = go(PLAIN, "remove@step:5")
    assert done.met and done.code == 1 and "Traceback" not in done.err
    (said,) = done.err.strip().splitlines()
    assert "No such file" in said


@pytest.mark.parametrize("fault, code", [
    ("shrink@step:8", -signal.SIGBUS), slow("eio@read:70", 1), slow_in_ci("delete@step:6", 0)])
def test_a_shard_that_turns_unreadable(fault, code, go, whole, tiny_data, tmp_path):
    """A run that ends by it goes on once the shard is back; shards are memory maps, so the system ends it
    where one has become shorter. One that is deleted is held open."""
    ordered = PLAIN | {"SHUFFLE": "0"}      # so that the first shard is read
    shutil.copytree(tiny_data / "data", tmp_path / "data")
    done = go(ordered, fault, cwd=tmp_path)
    want = whole(ordered)
    assert done.met and done.code == code
    if code == 0:
        assert (done.weights, done.losses) == (want.weights, want.losses)
        return
    assert code < 0 or "Input/output error" in one_sentence(done)
    shutil.rmtree(tmp_path / "data")
    shutil.copytree(tiny_data / "data", tmp_path / "data")
    assert differences(go({}, resume=done.run_id, cwd=tmp_path), want) == []


# ---------------------------------------------------------------- scores
@pytest.mark.slow
@pytest.mark.ci
def test_a_checkpoint_can_be_scored(go, whole):
    """EVAL_FROM=checkpoint.pt gives the loss that the run had with those weights, to the last digit."""
    run = go(PLAIN | {"SAVE_EVERY": "5"}, "term@artifact:1")
    want = whole(PLAIN)
    assert want.result["trained"]["val_loss"] != want.result["artifact"]["val_loss"]
    done = go(PLAIN, EVAL_FROM=f"logs/{run.run_id}/checkpoint.pt")
    assert done.code == 0 and done.result["trained"] == want.result["trained"], done.err
