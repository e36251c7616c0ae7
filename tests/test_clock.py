"""Honest clocks and scores: what may pause train_time, what trains on which text, what does not grow."""
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import faults
import numpy as np
import pytest
import torch
from helpers import TOY, shard_file, tokens_of, toy_environment, write_dataset, write_shard

import train_gpt

PAUSE = 1.2     # seconds, more than the rest of a run of six steps takes


@pytest.fixture
def home(tiny_data, tmp_path, monkeypatch, one_thread):
    """An empty folder to run in, with the toy data."""
    (tmp_path / "data").symlink_to(tiny_data / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, **settings):
    """A run in this process -> its result."""
    code = train_gpt.main([], toy_environment(run_id="r", iterations=6, **settings))
    assert code == 0, capsys.readouterr().err
    return json.loads(Path("logs/r/result.json").read_text())


def once(fn, when):
    """fn, but that the first of its calls that finds when(…) true takes PAUSE longer; and a list that is not
    empty once it did."""
    paused = []

    def slow(*args, **kwargs):
        if not paused and when(*args, **kwargs):
            paused.append(True)
            time.sleep(PAUSE)
        return fn(*args, **kwargs)
    return slow, paused


def second(when):
    """True at the second call that when finds true."""
    found = []

    def again(*args, **kwargs):
        found.extend([True] * when(*args, **kwargs))
        return len(found) == 2
    return again


# (place, name, when it pauses, settings)
ALWAYS = lambda *_, **__: True  # noqa: E731
COUNTED = {
    "the agreement on the time": (train_gpt, "all_reduce", lambda x, *_: x.numel() == 2, {}),
    "the batch": (train_gpt.Loader, "next", lambda self, _: self.position > 0, {}),
    "the disk": (train_gpt.Loader, "fetch", lambda _, places: places[0] > 32, {}),
    "forward and backward": (train_gpt, "train_step", ALWAYS, {}),
    "the optimizer": (train_gpt.Optimizer, "step", ALWAYS, dict(warmup_steps=0)),
    "the schedules": (train_gpt, "lr_factor", lambda _, step, __: step == 2, {}),     # no plan tells of it
    "the log": (train_gpt.Log, "__call__", lambda _, *lines, **__: "step:2/" in lines[:1][0][:7], {}),
    "a change of the window": (     # the first is rehearsal's
        train_gpt.GPT, "set_context", second(lambda _, __, window, *more: window == 32),
        dict(window_schedule=(16, 32), eval_window=16)),
    "the copy for a checkpoint": (faults.Guard, "save", ALWAYS, dict(save_every=3)),
    "whether a checkpoint is due": (faults.Guard, "due", lambda _, step, *__: step == 2, {}),
}
NOT_COUNTED = {
    "validation": (train_gpt, "evaluate", ALWAYS, dict(val_loss_every=3)),
    "the last validation": (train_gpt, "evaluate", ALWAYS, {}),
    "samples": (train_gpt, "show_samples", ALWAYS, dict(sample_every=2)),
    "writing a checkpoint": (faults, "write_checkpoint", ALWAYS, dict(save_every=3)),
    "rehearsal": (train_gpt, "rehearse", ALWAYS, {}),
    "the artifact": (train_gpt, "write_artifact", ALWAYS, {}),
}


@pytest.mark.parametrize("what", [*COUNTED, *NOT_COUNTED])
def test_only_what_the_contract_names_pauses_the_clock(what, home, monkeypatch, capsys):
    place, name, when, settings = (COUNTED | NOT_COUNTED)[what]
    slow, paused = once(getattr(place, name), when)
    monkeypatch.setattr(place, name, slow)
    result = run(capsys, **settings)
    assert paused
    seconds, longest = result["train_time_ms"] / 1e3, result["step_ms"]["max"] / 1e3
    assert (seconds >= PAUSE) == (what in COUNTED), (what, seconds)
    assert longest < PAUSE or what in COUNTED
    log = Path("logs/r/train.log").read_text()
    assert re.findall(r"^step:6/6 val_loss.* train_time:(\d+)ms", log, re.M) == [str(result["train_time_ms"])]


def test_a_cap_counts_the_copies_of_checkpoints(home, monkeypatch, capsys):
    """A run that saves after each step still ends before its cap."""
    def slow(*args, **kwargs):
        time.sleep(0.3)
        return save(*args, **kwargs)
    save = faults.Guard.save
    monkeypatch.setattr(faults.Guard, "save", slow)
    assert train_gpt.main([], toy_environment(run_id="r", max_wallclock_seconds=2.0, save_every=1)) == 0
    result = json.loads(Path("logs/r/result.json").read_text())
    assert result["stop_reason"] == "wallclock_cap" and 3 <= result["steps"] < 9
    assert result["train_time_ms"] <= 2000


def test_a_step_that_a_checkpoint_left_no_time_for_is_not_made(home, monkeypatch, capsys):
    """Steps of 0.3 s; after the one checkpoint, at 2.2 to 2.4 s of 3, there is no room for another."""
    def later(fn, seconds):
        def call(*args):
            time.sleep(seconds)
            return fn(*args)
        return call
    monkeypatch.setattr(train_gpt, "train_step", later(train_gpt.train_step, 0.3))
    monkeypatch.setattr(faults.Guard, "save", later(faults.Guard.save, 0.55))
    monkeypatch.setattr(faults.Guard, "save_last", lambda *_: None)
    env = toy_environment(run_id="r", max_wallclock_seconds=3.0, save_every=7, warmup_steps=0)
    assert train_gpt.main([], env) == 0, capsys.readouterr().err
    result = json.loads(Path("logs/r/result.json").read_text())
    assert result["steps"] == 7 and result["train_time_ms"] <= 3000


def test_a_clock_that_is_set_means_nothing(home, monkeypatch, capsys):
    """The wall clock jumps by a day at each look: no time, schedule or result depends on it."""
    plain = run(capsys, max_wallclock_seconds=60)
    Path("logs/r").rename("logs/first")
    jumps = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: 1e9 + 86_400 * next(jumps))

    class Jumping(train_gpt.datetime):
        @classmethod
        def now(cls, zone=None):
            return cls.fromtimestamp(time.time(), zone)
    monkeypatch.setattr(train_gpt, "datetime", Jumping)
    again = run(capsys, max_wallclock_seconds=60)
    assert again["val_loss_partial"] == plain["val_loss_partial"] and again["steps"] == 6
    assert again["train_time_ms"] < 20_000 and next(jumps) >= 2
    assert again["finished"] > again["started"]


def test_validation_text_never_reaches_the_optimizer(tmp_path, monkeypatch, capsys):
    """Train and val share no token: what the gradient is taken of, after the rehearsal's made-up tokens that
    are undone, has none of val's."""
    monkeypatch.chdir(tmp_path)
    folder = Path("data/datasets/apart")
    rng = np.random.default_rng(0)
    write_shard(folder / "x_train_000000.bin", rng.integers(0, 100, 20_000))
    write_shard(folder / "x_val_000000.bin", rng.integers(100, 200, 3_000))
    loss, seen, scored, optimized = train_gpt.lm_loss, [], [], []

    def lm_loss(x, head, targets, *more):
        assert torch.is_grad_enabled()
        seen.append(targets)
        return loss(x, head, targets, *more)

    def log_probs(model, tokens):
        assert not torch.is_grad_enabled()
        scored.append(tokens)
        return score(model, tokens)

    def step(self, *more):
        optimized.append(len(seen))
        return plain_step(self, *more)
    score, plain_step = train_gpt.log_probs, train_gpt.Optimizer.step
    monkeypatch.setattr(train_gpt, "lm_loss", lm_loss)
    monkeypatch.setattr(train_gpt, "log_probs", log_probs)
    monkeypatch.setattr(train_gpt.Optimizer, "step", step)
    env = toy_environment(
        run_id="r", data_path=folder, vocab_size=200, val_tokens=0, iterations=8, val_loss_every=2,
        warmup_steps=2, sample_every=4, save_every=3, device_batch_size=8)
    assert train_gpt.main([], env) == 0, capsys.readouterr().err
    warm_up, steps, micro_steps = 2, 8, 2
    batches = seen[warm_up:]
    assert len(batches) == steps * micro_steps and all(batch.max() < 100 for batch in batches)
    assert optimized == [1, 2, *range(4, 19, 2)], "each update follows its own micro-steps, and nothing else"
    assert scored and all(((tokens >= 100) | (tokens == 0)).all() for tokens in scored), "0 fills rows up"


@pytest.mark.parametrize("both", [0, 1, 3])
def test_documents_in_train_and_val_are_refused(both, tiny_data, tmp_path, monkeypatch, capsys):
    """By the hashes beside the manifest, where there are any."""
    monkeypatch.chdir(tmp_path)
    sp = train_gpt.open_data(train_gpt.replace(
        train_gpt.load_config(TOY), data_path=str(tiny_data / TOY["DATA_PATH"]))).tokenizer
    texts = ["def one(): return 1\n" * 400, "x = [1, 2]\n" * 300]
    model = (tiny_data / "data/tokenizers/toy.model").read_bytes()
    train, val = tokens_of(sp, texts * 4), tokens_of(sp, texts)
    folder = write_dataset(tmp_path, "toy", model, [train], val, sum(len(text.encode()) for text in texts))
    val_hashes, train_hashes = np.arange(4), np.arange(4 - both, 40)
    np.concatenate([val_hashes, train_hashes]).astype("<u8").tofile(folder / "document_hashes.bin")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["document_hashes"] = dict(path="document_hashes.bin", val=4, train=len(train_hashes))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    code = train_gpt.main([], toy_environment(run_id="r", val_tokens=0, iterations=2))
    err = capsys.readouterr().err
    assert code == (2 if both else 0), err
    assert not both or f"{both} documents of toy are in train and in val" in err and "Traceback" not in err


def anonymous_memory():
    return int(re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)[1]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.slow
@pytest.mark.faults
def test_memory_does_not_grow_with_the_steps(home, monkeypatch, capsys, report):
    """Under 50 MB from step 200 to step 2,200, with checkpoints, validation and several epochs on the way."""
    grown, began = {}, time.monotonic()

    def step(loss_fn, optimizer, *more):
        loss = plain(loss_fn, optimizer, *more)
        if optimizer.step_count in (200, 2200):
            grown[optimizer.step_count] = anonymous_memory()
        return loss
    plain = train_gpt.train_step
    monkeypatch.setattr(train_gpt, "train_step", step)
    env = toy_environment(
        run_id="r", iterations=2200, num_layers=1, model_dim=16, train_seq_len=32, train_batch_tokens=256,
        bigram_rows=64, save_every=250, val_loss_every=500, train_log_every=5)
    assert train_gpt.main([], env) == 0, capsys.readouterr().err
    assert "epoch 2 begins" in Path("logs/r/train.log").read_text()
    more = grown[2200] - grown[200]
    report("2,000 steps with checkpoints", f"{more:.1f} MB more memory at the end", time.monotonic() - began)
    assert more < 50, grown


def test_a_shard_is_read_and_not_mapped(home):
    """A map of a file that shrinks would end the process without a word."""
    shard = shard_file(np.arange(400) % 200)
    cfg = train_gpt.replace(train_gpt.Config(), train_seq_len=16, train_batch_tokens=64, shuffle=False)
    data = train_gpt.Data({"s0": shard}, None, None, 256, 1, None, {})
    team = train_gpt.Team(train_gpt.load_config(TOY), {})
    loader = train_gpt.Loader(cfg, data, team, lambda *_: None)
    assert loader.row(3).tolist() == shard[48:65].tolist()
    with open(shard.filename, "r+b") as file:
        file.truncate(1024 + 2 * 100)
    assert loader.row(3).tolist() == list(range(48, 65)), "what is left can be read"
    with pytest.raises(train_gpt.Refused, match="shard s0 cannot be read to its end"):
        loader.row(6)


# ------------------------------------------------------------------------------ the host ahead of a device
class Device:
    """A device that works off steps of given seconds while the host, which needs 1 ms each, runs ahead."""
    on_gpu, rank, world_size, device = True, 0, 1, torch.device("cpu")

    def __init__(self, seconds, skew=0.0):
        self.seconds, self.skew, self.clock, self.free = seconds, skew, 0.0, 0.0
        self.steps, self.waits = 0, []

    def now(self):
        return self.clock + self.skew

    def launch(self, *_):
        self.free = max(self.free, self.clock) + self.seconds(self.steps)
        self.clock += 0.001
        self.steps += 1
        return torch.tensor(1.0)

    def wait(self):
        self.clock = max(self.clock, self.free)

    def record_event(self):
        end, step = self.free, self.steps

        def synchronize():
            self.waits.append((step, self.steps))
            self.clock = max(self.clock, end)
        return SimpleNamespace(synchronize=synchronize, query=lambda: self.clock >= end)

    def at(self, *_):
        pass

    def loader(self):
        return SimpleNamespace(position=0, T=8, epoch=1, rows=1, next=lambda _: None)


def run_ahead(monkeypatch, device, other=lambda mine: mine, **settings):
    """t.train on that device -> its report, and (step, progress) of each step. other: what the ranks agree on
    when this one says mine; they hear of it only when they wait."""
    cfg = train_gpt.replace(train_gpt.load_config(TOY), train_log_every=100, **settings)
    seen, schedule = [], train_gpt.lr_factor

    def agree(mine, op, later):
        def wait():
            mine[0] = result
        assert later and op == "MAX"
        result = other(float(mine[0]))
        return mine, SimpleNamespace(wait=wait)

    def lr_factor(cfg, step, progress):
        seen.append((step, progress))
        return schedule(cfg, step, progress)

    def all_reduce(tensor, op="SUM", later=False):
        if later:
            return agree(tensor, op, later)
        device.wait()       # the loss is read
        return tensor
    model = SimpleNamespace(set_context=lambda *_: None)
    log = train_gpt.Log(lead=False)
    with monkeypatch.context() as patch:
        for name, fake in dict(all_reduce=all_reduce, lr_factor=lr_factor, train_step=device.launch,
                               evaluate=lambda *_: train_gpt.Score(1.0, 1.0, 1.0)).items():
            patch.setattr(train_gpt, name, fake)
        patch.setattr(train_gpt.time, "perf_counter", device.now)
        patch.setattr(torch.cuda, "current_stream", lambda: device)
        patch.setattr(train_gpt, "hardware", lambda _: "none")
        _, _, report = train_gpt.train(cfg, device, None, model, None, device.loader(), None, 1, log)
    return report, seen


@pytest.mark.parametrize("pattern", ["even", "jitter", "slower", "short"])
def test_a_gpu_run_ends_before_its_cap(pattern, monkeypatch):
    """With little time left over, though the host hears of the time late."""
    rng = np.random.default_rng(0)
    seconds = dict(even=lambda _: 0.1, jitter=lambda _: rng.uniform(0.08, 0.12),
                   slower=lambda step: 0.1 + step / 20_000, short=lambda _: 3.0)[pattern]
    report, _ = run_ahead(monkeypatch, Device(seconds), max_wallclock_seconds=60.0, iterations=10**6)
    assert report["stop_reason"] == "wallclock_cap"
    left, slow = 60 - report["train_time_ms"] / 1e3, report["step_ms"]["p95"] / 1e3
    assert 0 <= left < 4 * slow + 0.3, left


def test_a_gpu_run_with_a_cap_is_few_steps_ahead(monkeypatch):
    device = Device(lambda _: 0.1)
    run_ahead(monkeypatch, device, max_wallclock_seconds=60.0, iterations=10**6)
    later = [launched - done for done, launched in device.waits if done > 16]
    assert len(later) > 100 and max(later) <= 6, "it asks every four, and waits until three are under way"


def test_a_gpu_run_without_a_cap_waits_at_log_lines_only(monkeypatch):
    device = Device(lambda _: 0.1)
    report, _ = run_ahead(monkeypatch, device, max_wallclock_seconds=0.0, iterations=300)
    assert not device.waits and report["train_time_ms"] == pytest.approx(30_000, rel=0.01)
    assert report["step_ms"]["p50"] == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize("cap", [0.0, 60.0])
def test_a_gpu_run_of_one_step(cap, monkeypatch):
    """It ends before anyone heard of the time."""
    report, _ = run_ahead(monkeypatch, Device(lambda _: 0.1), max_wallclock_seconds=cap, iterations=1)
    assert report["step_ms"]["p50"] == pytest.approx(101, abs=1)


def test_a_gpu_run_that_waits_for_its_host(monkeypatch):
    """Steps that the device has done in no time take what the host needs for them, no two of them at once."""
    report, _ = run_ahead(monkeypatch, Device(lambda _: 1e-5), max_wallclock_seconds=1.0, iterations=10**6)
    assert report["step_ms"]["p50"] == pytest.approx(1, rel=0.05)
    assert report["step_ms"]["max"] < 1.1 and 980 < report["steps"] < 1000


def test_ranks_of_a_gpu_run_follow_what_they_agreed_on(monkeypatch):
    """Two ranks with clocks of their own take the same schedule and stop at the same step."""
    said = {}

    def agreed(times):
        return lambda _: next(times)
    plain = Device(lambda _: 0.1)
    run_ahead(monkeypatch, plain, lambda mine: said.setdefault(len(said), mine),
              max_wallclock_seconds=20.0, iterations=10**6)
    ranks = [run_ahead(monkeypatch, Device(lambda _: 0.1 + 0.01 * rank, skew=1000 * rank),
                       agreed(iter(said.values())), max_wallclock_seconds=20.0, iterations=10**6)
             for rank in (0, 1)]
    assert ranks[0][1] == ranks[1][1] and len(ranks[0][1]) > 150
    steps, progress = zip(*ranks[0][1])
    assert [*steps] == [*range(len(steps))] and min(np.diff(progress)) > -0.5 / len(steps)
    assert all(abs(part - 0.1 * step / 20) < 1.5 * 0.1 / 20 for step, part in ranks[0][1])
