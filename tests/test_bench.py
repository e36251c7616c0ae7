"""tools/dev/bench.py: settings and checkouts, stepped in turn."""
import re
import sys

import pytest
import torch

from helpers import ROOT, TOY, planted
from tools.dev import bench

OLDER = ROOT / "records/track_tiny/2026-11-26_WordsLongNgrams"


@torch._dynamo.config.patch(recompile_limit=8)      # a monkeypatch would leave it hidden
def test_arms_step_in_turn(tiny_data, tmp_path, monkeypatch, capsys):
    """Another checkout beside this one with two settings; shares add up, and a second is as long in every
    line."""
    monkeypatch.chdir(tiny_data)
    planted(tmp_path)
    plain = bench.next_batch
    order = []

    def noted(run, stage):
        order.append(id(run))
        return plain(run, stage)

    monkeypatch.setattr(bench, "next_batch", noted)
    arms = [f"before={tmp_path}", "after=", "after= TRAIN_BATCH_TOKENS=2048"]
    bench.compare_arms(TOY, arms, steps=3)
    assert len({*order}) == 3 and order == 8 * order[:3]
    _, *lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("    time per token 1.000 (1.000 to 1.000) of the first")
    for arm, tokens, line, parts in zip(arms, (1024, 1024, 2048), lines[::3], lines[1::3], strict=True):
        milliseconds, rate = re.fullmatch(
            rf"{arm}: ([\d.]+) ms a step, ([\d,]+) tok/s, [\d,]+ GFLOP/s", line).groups()
        assert tokens / float(milliseconds) * 1e3 == pytest.approx(int(rate.replace(",", "")), rel=0.01)
        shares = [float(share) for share in re.findall(r"([\d.]+)%", parts)]
        assert len(shares) == 3 and min(shares) > 0 and sum(shares) == pytest.approx(100, abs=0.2)


@pytest.mark.parametrize("words, sentence", [
    (["--steps=0"], "--steps 0: at least 1"), (["--arm=before=nowhere"], "--arm: no nowhere/train_gpt.py"),
    ([f"--arm=before={OLDER}"], f"--arm: {OLDER}/train_gpt.py is older than 28 November 2026"),
    (["--arm=golf"], "--arm: 'golf' must be NAME=value, or name=PATH of a checkout"),
    (["--arm=MATRX_LR=0.1"], "unrecognized arguments: --matrx-lr=0.1"),
    (["golff"], "preset='golff' is none of tiny")])
def test_refused(words, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2 and f"bench: {sentence}" in capsys.readouterr().err
