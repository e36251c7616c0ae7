"""Honest clocks and scores, on a simulated clock: what counts as train_time, the cap, the host ahead of a
GPU, which text trains. No test here depends on how fast the machine is."""
import gc
import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_gpt
from helpers import TOY, fake_run, toy_of, write_shard

pytestmark = pytest.mark.usefixtures("one_thread")

# seconds on the simulated clock, exact in binary
STEP = 0.125
SIX = TOY | dict(ITERATIONS="6", TRAIN_LOG_EVERY="1")
CAPPED = TOY | dict(ITERATIONS="100000", TRAIN_BATCH_TOKENS="128", VAL_TOKENS="500")


@pytest.fixture
def paced(clock, monkeypatch):
    """paced(seconds): the simulated clock, on which training steps take so long: a number or a function."""
    def paced(seconds=STEP):
        def in_training(*args):
            if clock.run is None:       # a step of the warmup
                return 0
            return seconds(*args) if callable(seconds) else seconds

        monkeypatch.setattr(train_gpt, "train_step", clock.passes(train_gpt.train_step, in_training))
        return clock
    return paced


@pytest.fixture
def interrupted(paced):
    """The simulated clock, and the step of each run in which a signal comes, which a test sets; 0: none."""
    def seconds(loss_fn, optimizer, *_):
        if optimizer.step_count + 1 == interrupted.step:
            interrupted.step = 0
            interrupted.clock.run.stop = True
        return STEP

    interrupted = SimpleNamespace(clock=paced(seconds), step=0)
    return interrupted


# -------------------------------------------------------------------------------- what counts
def nth(n, when=lambda *_: True):
    """True at the n-th call that `when` finds true, and at no other one."""
    calls = itertools.count(1)

    def is_it(*args, **kw):
        return bool(when(*args, **kw)) and next(calls) == n
    return is_it


def ever(*_, **__):
    return True


# what: (place, name, the call that takes longer: once, as what is counted twice would hide what is not)
COUNTED = {
    "the agreement on the time": (train_gpt.Clock, "agree", nth(2)),
    "the count of n-grams": (train_gpt.NgramCounts, "count", nth(1)),
    "first values from the text": (train_gpt, "factorize_bigrams", nth(1)),
    "the batch": (train_gpt.Loader, "next", nth(1)),
    "forward and backward": (train_gpt.TinyModel, "forward", nth(3)),     # after the warmup
    "the optimizer": (train_gpt.Optimizer, "step", nth(3)),
    "the schedules": (train_gpt.Tiny, "schedule", nth(1, lambda _, step, __: step == 2)),
    "the log": (train_gpt.Log, "__call__", nth(1, lambda _, *lines, **__: "step:2/" in "".join(lines))),
    # of the first stage, after those of the warmup and of the validation before the first step
    "the context": (train_gpt.TinyModel, "context",
                    nth(3, lambda _, T, device, dtype, stage: stage and stage.window == 32)),
    "whether a checkpoint is due": (train_gpt, "save_is_due", nth(1, lambda run, *_: run.state.step == 2)),
}
# what: (place, name), every call
NOT_COUNTED = {
    "validation": (train_gpt, "evaluate"),
    "a part of val": (train_gpt, "score_part"),
    "a checkpoint": (train_gpt, "save_checkpoint"),
    "final_model.pt": (train_gpt, "save_weights"),
    "warmup": (train_gpt, "warm_up"),
    "the artifact": (train_gpt, "write_and_read_back"),
}


def test_only_what_the_contract_names_pauses_the_clock(train, paced, monkeypatch):
    """Each takes another power of two of seconds, so the time says what was counted. CORE: test_gpt2.py."""
    clock = paced()
    places = COUNTED | {what: (*place, ever) for what, place in NOT_COUNTED.items()}
    pauses = {what: 2.0 ** n for n, what in enumerate(places, 4)}
    met = set()

    def seconds(what, when):
        def its(*args, **kw):
            if not when(*args, **kw):
                return 0
            met.add(what)
            return pauses[what]
        return its

    for what, (place, name, when) in places.items():
        monkeypatch.setattr(place, name, clock.passes(getattr(place, name), seconds(what, when)))
    done = train(SIX, VAL_LOSS_EVERY="3", VAL_PART_EVERY="2", SAVE_EVERY="2", WINDOW_SCHEDULE="32,16")
    assert done.code == 0 and met == {*places}, done.err
    counted = round(done.result["train_time_ms"] / 1e3 - 6 * STEP)
    assert {what for what, pause in pauses.items() if counted & round(pause)} == {*COUNTED}
    times = [int(ms) for ms in re.findall(r"^step:\d+/6 train_loss.* train_time:(\d+)ms", done.log, re.M)]
    assert len(times) == 6 and times == sorted(times)
    assert re.findall(r"^step:6/6 val_loss.* train_time:(\d+)ms", done.log, re.M) == [
        str(done.result["train_time_ms"])]


def test_a_part_of_val_is_scored_on_the_way(train):
    """The whole of val where it is as large; it changes no weight and is no validation."""
    plain = train(SIX, VAL_PART="0", VAL_PART_EVERY="3", VAL_LOSS_EVERY="3")
    done = train(SIX, VAL_PART="100000", VAL_PART_EVERY="3")
    told = re.findall(r"^val_part step:(\d+) val_loss:(\S+)$", done.log, re.M)
    assert told == [("3", f"{plain.val_losses[3]:.4f}")] and "\nval_part " not in plain.log
    assert done.weights == plain.weights and [*done.val_losses] == [6]
    assert "evaluating val_loss" not in done.log.partition("val_part")[0]


# -------------------------------------------------------------------------------- the cap in whole runs
def test_checkpoints_take_no_time_of_the_cap(train, paced, monkeypatch):
    """Nor do they count as slow steps, after which fewer would seem to fit. The run ends before its cap, with
    no step for which there is no time."""
    clock = paced()
    monkeypatch.setattr(train_gpt, "save_checkpoint", clock.passes(train_gpt.save_checkpoint, 0.375))
    done = train(CAPPED, MAX_WALLCLOCK_SECONDS="3", SAVE_EVERY="2")
    assert done.code == 0, done.err
    assert (done.result["steps"], done.result["train_time_ms"]) == (23, 2875)
    assert done.result["step_ms"] == dict(p50=125, p95=125, max=125)
    assert "stopping_early: wallclock_cap train_time:2875ms step:23/100000" in done.out.splitlines()


def test_the_epochs_end_a_capped_run(train, paced):
    """Before a step that would read past them, whatever time is left."""
    paced()
    done = train(CAPPED, MAX_WALLCLOCK_SECONDS="20", MAX_EPOCHS="1", TRAIN_BATCH_TOKENS="8192",
                 NUM_LAYERS="1", MODEL_DIM="16")
    assert done.code == 0 and done.result["stop_reason"] == "max_epochs", done.err
    assert done.result["tokens"] == 14 * 8192


def test_a_capped_run_goes_on_from_its_clock(train, interrupted, monkeypatch):
    """Interrupted in step 12 and resumed: both parts together are the uninterrupted run, to the bit and the
    millisecond, with learning rates that follow the time and a mean loss of steps 11 to 18; its n-grams are
    counted twice and cost once."""
    count = train_gpt.NgramCounts.count
    monkeypatch.setattr(train_gpt.NgramCounts, "count", interrupted.clock.passes(count, 0.25))
    settings = CAPPED | dict(MAX_WALLCLOCK_SECONDS="4", WARMDOWN_FRAC="0.8", TRAIN_LOG_EVERY="9")
    want = train(settings)
    each = train(settings, TRAIN_LOG_EVERY="1")
    assert want.result["steps"] == 29 and want.result["train_time_ms"] == 3875
    interrupted.step = 12
    first = train(settings)
    assert first.code == 1 and first.last == f"RESUME={first.run_id}" and max(first.losses) == 10
    done = train({}, RESUME=first.run_id)
    assert "resume: from step 12 at train_time:1750ms" in done.out
    assert done.weights == want.weights and done.losses == want.losses
    lines = [re.findall(r"^step:18/\S+ train_loss.*", run.log, re.M) for run in (want, done)]
    mean = np.mean([each.losses[step] for step in range(11, 19)])
    assert lines[0] == lines[1] and float(lines[0][0].split("mean_loss:")[1]) == pytest.approx(mean, abs=1e-4)
    assert done.result["train_time_ms"] == 3875 and done.result["stop_reason"] == "wallclock_cap"


def test_the_garbage_collector_is_off_on_the_clock(train, monkeypatch):
    """It runs before the clock and at validations, such as one in the middle, and as before once training is
    over."""
    step = train_gpt.train_step
    collect = gc.collect
    when = []
    collected = []

    def train_step(*args):
        when.append(gc.isenabled())
        return step(*args)

    monkeypatch.setattr(train_gpt, "train_step", train_step)
    monkeypatch.setattr(gc, "collect", lambda *args: collected.append(len(when)) or collect(*args))
    assert train(SIX, VAL_LOSS_EVERY="3").code == 0
    assert when == [True, True] + [False] * 6 and gc.isenabled()    # two steps of the warmup
    assert {2, 2 + 3} <= {*collected}


@pytest.mark.parametrize("settings, steps", [
    (dict(ITERATIONS="20", SAVE_EVERY_SECONDS="1"), [8, 16, 20]),
    (dict(ITERATIONS="11", SAVE_EVERY="5", BIGRAM_EVERY="2"), [6, 10, 11])])
def test_when_checkpoints_are_saved(settings, steps, train, paced, monkeypatch):
    """By seconds of training, of which a step takes an eighth, or by steps. They wait for bigrams, which are
    updated at every second one, but not at the end."""
    save = train_gpt.save_checkpoint
    written = []

    def save_checkpoint(run):
        written.append(run.state.step)
        save(run)

    monkeypatch.setattr(train_gpt, "save_checkpoint", save_checkpoint)
    paced()
    done = train(TOY, **settings)
    assert done.code == 0 and written == steps and "RESUME" not in done.log
    assert train_gpt.read_file(done.folder / "checkpoint.pt")["progress"]["step"] == steps[-1]


# -------------------------------------------------------------------------------- train() on our own device
class Device:
    """Makes steps of seconds(step, batch multiple). The host of a GPU runs ahead, it needs 1 ms for each; a
    CPU is its own host. skew: what its counter starts at."""
    rank = 0
    world_size = 1
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, seconds, on_gpu=True, skew=0.0):
        self.seconds = seconds
        self.on_gpu = on_gpu
        self.skew = skew
        self.clock = self.free = 0.0
        self.steps = 0
        self.waits = []
        self.agreements = 0

    def perf_counter(self):
        return self.clock + self.skew

    def share(self, value):
        return value

    def train_step(self, loss_fn, optimizer, batch, *_):
        self.free = max(self.free, self.clock) + self.seconds(self.steps, batch[0].numel() // 1024)
        self.clock += 0.001
        self.steps += 1
        if not self.on_gpu:
            self.wait()
        return torch.tensor(1.0)

    def wait(self):
        self.clock = max(self.clock, self.free)

    def record_event(self):
        end = self.free
        step = self.steps

        def synchronize():
            self.waits.append((step, self.steps))
            self.clock = max(self.clock, end)
        return SimpleNamespace(synchronize=synchronize, query=lambda: self.clock >= end)


def run_on(device, monkeypatch, others=lambda mine: mine, preset="tiny", save=None, **settings):
    """train() there -> its report, and [(step, progress, LR factor)]. others(my numbers): what all ranks
    agree on. save(): makes the last checkpoint."""
    env = toy_of(preset, WINDOW_SCHEDULE="0", EVAL_WINDOW="0")
    cfg = train_gpt.replace(train_gpt.load_config(env), vocab_size=512, train_log_every=100, **settings)
    seen = []
    schedule = type(cfg).schedule

    def noted(cfg, step, progress):
        now = schedule(cfg, step, progress)
        seen.append((step, progress, now.lr))
        return now

    def all_reduce(tensor, op="SUM"):
        if op == "MAX":     # the time
            device.agreements += 1
            return others(tensor)
        device.wait()       # the loss is read
        return tensor

    loader = SimpleNamespace(next=lambda tokens, *_: 2 * (torch.empty(tokens // 64, 64),),
                             most_tokens=math.inf)
    model = SimpleNamespace(candidates=lambda *_: [], build=lambda *_: False,
                            context=lambda *_: None, update_context=lambda *_: None)
    run = fake_run(cfg, model, team=device, log=train_gpt.Log(lead=False), micro=1)
    run.loader = loader
    fakes = dict(
        train_step=device.train_step, all_reduce=all_reduce, time=device,
        gc=SimpleNamespace(collect=lambda: None, disable=lambda: None),
        evaluate=lambda *_: train_gpt.Score(1.0, 1.0, 1.0), score_part=lambda *_, **__: {},
        save_is_due=lambda run, done, stop: bool(save and done), save_checkpoint=lambda run: save(),
        save_weights=lambda run: None)
    with monkeypatch.context() as patch:
        patch.setattr(type(cfg), "schedule", noted)
        patch.setattr(torch.cuda, "current_stream", lambda: device)
        for name, fake in fakes.items():
            patch.setattr(train_gpt, name, fake)
        train_gpt.train(run)
        return run.report, seen


@pytest.mark.parametrize("cap", [21.3, 21.35, 21.4, 21.45])
def test_no_step_follows_the_last_checkpoint(cap, monkeypatch):
    """While it is made the device catches up, so that one more step could seem to fit."""
    device = Device(lambda step, _: 0.3 if step // 4 % 3 == 0 else 0.1)
    steps = []

    def save():
        steps.append(device.steps)
        device.wait()

    report, _ = run_on(device, monkeypatch, save=save, iterations=10**6, max_wallclock_seconds=cap)
    assert steps == [device.steps] == [report["steps"]] and report["stop_reason"] == "wallclock_cap"


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("pattern", ["even", "two kinds", "jitter", "slower", "long", "stages"])
def test_the_cap_holds(pattern, on_gpu, monkeypatch):
    """... with little time left over, though the host of a GPU hears of the time late. No step is longer than
    those that were seen, but for the slow growth of one pattern."""
    rng = np.random.default_rng(0)
    seconds = {
        "even": lambda step, _: 0.1,
        "two kinds": lambda step, _: 0.15 if step % 7 == 3 else 0.08,
        "jitter": lambda step, _: rng.choice([0.08, 0.09, 0.1, 0.11, 0.12]),
        "slower": lambda step, _: 0.1 + step / 10_000,
        "long": lambda step, _: 3.0,
        "stages": lambda step, multiple: 0.05 * multiple}[pattern]
    stages = dict(batch_schedule=(1, 3)) if pattern == "stages" else {}
    cap = 60.0 if pattern == "long" else 20.0
    report, seen = run_on(Device(seconds, on_gpu), monkeypatch, max_wallclock_seconds=cap, iterations=10**6,
                          **stages)
    assert report["stop_reason"] == "wallclock_cap"
    left = cap - report["train_time_ms"] / 1e3
    slow = report["step_ms"]["max"] / 1e3
    assert 0 <= left < (4 * slow + 0.3 if on_gpu else 2 * slow), left
    behind = 7 * slow / cap if on_gpu else 0     # steps since the ranks agreed on the time
    assert seen[-1][1] > 0.7 - behind and report["steps"] == len(seen)


@pytest.mark.parametrize("slow", range(1, 10))
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_slow_step_among_ten_ends_no_run_early(slow, on_gpu, monkeypatch):
    """Of some ten steps one takes three times as long; the others are what the rest of the time is reckoned
    with, one at a time or on a GPU four."""
    device = Device(lambda step, _: 0.3 if step == slow else 0.1, on_gpu)
    report, _ = run_on(device, monkeypatch, max_wallclock_seconds=1.65, iterations=10**6)
    left = 1.65 - report["train_time_ms"] / 1e3
    assert 0 <= left < (0.4 if on_gpu else 0.1), report


@pytest.mark.parametrize("cap, most", [(60.0, 70), (0.0, 65)])
def test_ranks_with_gpus_agree_at_every_fourth_step(cap, most, monkeypatch):
    """... and after a log line, each of which the host waits for anyway: the first ten steps have one."""
    steps = 200
    device = Device(lambda *_: 0.1)
    report, _ = run_on(device, monkeypatch, max_wallclock_seconds=cap, iterations=steps)
    assert report["steps"] == steps and steps / 4 <= device.agreements <= most
    cpu = Device(lambda *_: 0.1, on_gpu=False)
    run_on(cpu, monkeypatch, max_wallclock_seconds=cap, iterations=steps)
    assert cpu.agreements == steps + 1


PAUSES = [{1: 6.0}, {2: 6.0}, {7: 3.0}, {12: 2.0}, {2: 4.0, 3: 4.0}, {2: 5.0, 9: 2.0}]    # step: seconds


@pytest.mark.parametrize("pauses, on_gpu", [
    ({0: 6.0}, False), *((pauses, on_gpu) for pauses in PAUSES for on_gpu in (False, True))])
def test_an_early_pause_ends_no_run_early(pauses, on_gpu, monkeypatch):
    """... such as one by kill -STOP, though a step of the second stage is twice as long. After the first step
    a GPU knows no other pace, by which it might be four steps ahead."""
    def seconds(step, multiple):
        return 0.35 * multiple + pauses.get(step, 0.0)

    report, _ = run_on(Device(seconds, on_gpu), monkeypatch, max_wallclock_seconds=20.0, iterations=10**6,
                       batch_schedule=(1, 2))
    left = 20 - report["train_time_ms"] / 1e3
    # a GPU's laps are four steps; a run of thirty has three of the second stage only when it is over
    least = -0.35 if on_gpu and 12 in pauses else 0
    assert least <= left < (4 * 0.7 + 0.3 if on_gpu else 2 * 0.7), left


@pytest.mark.parametrize("every", [2, 3, 5])
def test_slow_steps_that_come_back_are_no_pauses(every, monkeypatch):
    """The cap holds whatever it is, once three of them were seen: fewer than 20 laps are known."""
    for tenths in range(16 * every, 26 * every, 3):
        device = Device(lambda step, _: 0.4 if step % every == every - 1 else 0.1, False)
        cap = tenths * (0.4 + 0.1 * (every - 1)) / every / 5 + 0.005
        report, _ = run_on(device, monkeypatch, max_wallclock_seconds=cap, iterations=10**6)
        assert report["steps"] < 3 * every or 0 <= cap - report["train_time_ms"] / 1e3 < 0.8


@pytest.mark.parametrize("slowdown", [1, 3, 10])
def test_learning_rates_follow_the_time(slowdown, monkeypatch):
    """Slower hardware gets fewer steps, not another schedule: whole for half of the budget, then down to 0;
    larger batches at once have larger ones."""
    cap = 2.7
    lap = 0.05 * slowdown
    settings = dict(max_wallclock_seconds=cap, iterations=10**5)
    _, seen = run_on(Device(lambda *_: lap, False), monkeypatch, **settings)
    factors = [factor for *_, factor in seen]
    whole = [factor for step, _, factor in seen if step * lap < 0.48 * cap]
    assert len(whole) >= 2 and set(whole) == {1.0}
    assert factors == sorted(factors, reverse=True) and factors[-1] < 2.5 * lap / (cap / 2)
    _, seen = run_on(Device(lambda _, multiple: lap * multiple / 3, False), monkeypatch, preset="speedrun",
                     warmdown_frac=0.0, seq_schedule=(1,), batch_schedule=(1, 1, 3, 3),
                     extension_iterations=0, stage_starts=(0.0, 0.25, 0.5, 0.75),
                     lr_schedule=(1.0, 3.0), lr_switches=(0.0, 0.5), **settings)
    assert all(factor == (1.0 if progress < 0.5 else 3.0) for _, progress, factor in seen)
    assert {factor for *_, factor in seen} == {1.0, 3.0}


def test_a_gpu_run_with_a_cap_is_few_steps_ahead(monkeypatch):
    device = Device(lambda *_: 0.1)
    run_on(device, monkeypatch, max_wallclock_seconds=20.0, iterations=10**6)
    later = [launched - done for done, launched in device.waits if done > 16]
    assert len(later) > 100 and max(later) <= 6, "it asks every four, and waits until three are under way"


def test_a_gpu_run_without_a_cap_waits_at_log_lines_only(monkeypatch):
    device = Device(lambda *_: 0.1)
    report, _ = run_on(device, monkeypatch, max_wallclock_seconds=0.0, iterations=300)
    assert not device.waits and report["train_time_ms"] == pytest.approx(30_000, rel=0.01)
    assert report["step_ms"]["p50"] == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize("cap", [0.0, 60.0])
def test_a_gpu_run_of_one_step(cap, monkeypatch):
    """It ends before anyone heard of the time."""
    report, _ = run_on(Device(lambda *_: 0.1), monkeypatch, max_wallclock_seconds=cap, iterations=1)
    assert report["step_ms"]["p50"] == pytest.approx(101, abs=1)


def test_a_gpu_run_that_waits_for_its_host(monkeypatch):
    """Steps that the device has done in no time take what the host needs for them, no two of them at once."""
    report, _ = run_on(Device(lambda *_: 1e-5), monkeypatch, max_wallclock_seconds=0.2, iterations=10**6)
    assert report["step_ms"]["p50"] == pytest.approx(1, rel=0.05)
    assert report["step_ms"]["max"] < 1.1 and 190 < report["steps"] < 200


@pytest.mark.parametrize("on_gpu", [False, True])
def test_ranks_follow_what_they_agreed_on(on_gpu, monkeypatch):
    """Two ranks with clocks of their own, of which one has no step under way on its device when the other one
    has three, take the same schedule and stop at the same step."""
    said = []
    settings = dict(max_wallclock_seconds=20.0, iterations=10**6)

    def note(mine):
        said.append(mine.clone())
        return mine

    run_on(Device(lambda *_: 0.1, on_gpu), monkeypatch, note, **settings)
    ranks = []
    for rank in (0, 1):
        agreed = iter(said)
        device = Device(lambda *_: 0.0001 if rank else 0.1, on_gpu, skew=1000.0 * rank)
        ranks.append(run_on(device, monkeypatch, lambda mine: next(agreed), **settings))
    reports, seen = zip(*ranks)
    assert reports[0]["step_ms"] == reports[1]["step_ms"]
    assert seen[0] == seen[1] and len(seen[0]) > 150
    steps, progress, _ = zip(*seen[0])
    assert [*steps] == [*range(len(steps))] and min(np.diff(progress)) > -0.5 / len(steps)
    behind = 8 if on_gpu else 1.5       # steps; a GPU's ranks agree at every fourth, with three under way
    assert all(abs(part - 0.1 * step / 20) < behind * 0.1 / 20 for step, part, _ in seen[0])


# -------------------------------------------------------------------------------- honest text
def test_validation_text_never_reaches_the_optimizer(train, tmp_path, monkeypatch):
    """Train and val share no token: what gradients are taken of, after the warmup's dummy tokens that are
    undone, has none of val's."""
    rng = np.random.default_rng(0)
    write_shard(tmp_path / "x_train_000000.bin", rng.integers(0, 100, 20_000))
    write_shard(tmp_path / "x_val_000000.bin", rng.integers(100, 200, 3_000))
    trained = []
    scored = []
    forward = train_gpt.TinyModel.forward
    hidden = train_gpt.TinyModel.hidden

    def spy_forward(self, tokens, targets, *more):
        trained.append(torch.stack([tokens, targets]))
        return forward(self, tokens, targets, *more)

    def spy_hidden(self, tokens, *more):
        if not torch.is_grad_enabled():
            scored.append(tokens)
        return hidden(self, tokens, *more)

    monkeypatch.setattr(train_gpt.TinyModel, "forward", spy_forward)
    monkeypatch.setattr(train_gpt.TinyModel, "hidden", spy_hidden)
    done = train(TOY, DATA_PATH=str(tmp_path), VOCAB_SIZE="200", VAL_TOKENS="0", ITERATIONS="8",
                 VAL_LOSS_EVERY="2", WARMUP_STEPS="2", SAVE_EVERY="3", DEVICE_BATCH_SIZE="8")
    assert done.code == 0, done.err
    micro_steps = 2
    assert len(trained) == (2 + 8) * micro_steps
    assert all(batch.max() < 100 for batch in trained[2 * micro_steps:])
    assert scored and all(((tokens >= 100) | (tokens == 0)).all() for tokens in scored), "0 fills rows up"


def anonymous_memory():
    """MB of this process."""
    return int(re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)[1]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.slow
@pytest.mark.faults
def test_memory_does_not_grow_with_the_steps(train, monkeypatch):
    """Under 50 MB from step 200 to step 2,200, with checkpoints, validation and several epochs on the way."""
    grown = {}
    plain = train_gpt.train_step

    def step(loss_fn, optimizer, *more):
        loss = plain(loss_fn, optimizer, *more)
        if optimizer.step_count in (200, 2200):
            grown[optimizer.step_count] = anonymous_memory()
        return loss

    monkeypatch.setattr(train_gpt, "train_step", step)
    done = train(TOY, ITERATIONS="2200", NUM_LAYERS="1", MODEL_DIM="16", TRAIN_SEQ_LEN="32",
                 TRAIN_BATCH_TOKENS="256", BIGRAM_ROWS="64", SAVE_EVERY="250", VAL_LOSS_EVERY="500",
                 TRAIN_LOG_EVERY="5")
    assert done.code == 0 and done.result["tokens"] > 120_000, done.err
    more = grown[2200] - grown[200]
    assert more < 50, grown
