"""tools/dev/bench.py: the training loop, settings and checkouts in turn."""
import re
import sys

import pytest
import torch

import train_gpt
from helpers import ROOT, TOY
from tools.dev import bench

WITHOUT_RECIPES = ROOT / "records/track_tiny/2026-11-22_FastStepsWindows"
WITH_SAVER = ROOT / "records/track_tiny/2026-11-26_WordsLongNgrams"  # has recipes


@pytest.fixture
def toy_folder(tiny_data, monkeypatch):
    monkeypatch.chdir(tiny_data)


def test_the_training_loop(toy_folder, capsys):
    """The shares of a step add up, and a second is as long in every row."""
    bench.step_table(TOY, steps=4, repeats=3)
    _, step, parts, _ = capsys.readouterr().out.splitlines()
    milliseconds, rate = re.match(r"step +([\d.]+) ms \(.*\), ([\d,]+) tok/s", step).groups()
    assert 1024 / float(milliseconds) * 1e3 == pytest.approx(int(rate.replace(",", "")), rel=0.01)
    shares = [float(share) for share in re.findall(r"([\d.]+)%", parts)]
    assert len(shares) == 3 and min(shares) > 0


@torch._dynamo.config.patch(recompile_limit=8)      # a monkeypatch would leave it hidden
def test_arms_step_in_turn(toy_folder, monkeypatch, capsys):
    """A checkout of an older interface beside this one with two settings."""
    settings = {name: value for name, value in TOY.items() if name in bench.names_of(train_gpt)}
    calls = []
    for name, trainer in (("before", bench.load_trainer(WITH_SAVER)), ("after", train_gpt)):
        def counted(*args, name=name, plain=trainer.train_step):
            calls.append(name)
            return plain(*args)
        monkeypatch.setattr(trainer, "train_step", counted)
    arms = [f"before={WITH_SAVER}", "after=", "after= TRAIN_BATCH_TOKENS=2048"]
    bench.arms_table(settings, arms, steps=3, skipped=1)
    assert calls[-12:] == ["before", "after", "after"] * 4      # those before are of the warmup
    first, second, third = capsys.readouterr().out.splitlines()[-3:]
    assert "token 1.000 (1.000 to 1.000) of the first" in first and first.endswith(f": before={WITH_SAVER}")
    assert second.endswith(": after=") and third.endswith(": after= TRAIN_BATCH_TOKENS=2048")
    for row, tokens in ((second, 1024), (third, 2048)):
        milliseconds, rate = re.match(r" *([\d.]+) ms a step +([\d,]+) tok/s", row).groups()
        assert tokens / float(milliseconds) * 1e3 == pytest.approx(int(rate.replace(",", "")), rel=0.01)


@pytest.mark.parametrize("words", [
    ["--arm", "a=", "--steps=1"], ["--repeats=0"]])
def test_too_few_steps_are_refused(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2 and "and --repeats 1 at least" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["before=nowhere", f"before={WITHOUT_RECIPES}", "MATRX_LR=0.1", "golf",
                                  "after= SAVE"])
def test_refused_arms(text):
    with pytest.raises(train_gpt.Refused):
        bench.read_arm(text)
