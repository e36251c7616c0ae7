"""records/judge/calibration.py: its list fits today's train_gpt.py, its conversions and its analysis."""
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import train_gpt
from tools.run import plan
from helpers import ROOT, SCRIPT, look
from records.judge import calibration, tries
from records.judge.calibration import (
    LIST, Known, Public, agreement, edited, flags_at, gains_of, kept_names, report, report_whole_list,
    spread_of)
from tools.run.proxy import expand_proxy


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr(calibration, "RESAMPLES", 60)


CHANGED = [pytest.param(known, id=known.name) for known in LIST]


def config_of(known, width):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in flags_at(known, width).items()]
    argv = ["--preset=speedrun_plus", f"--proxy={width}", *flags]
    return train_gpt.load_config({"DEVICE": "cpu"}, expand_proxy(argv, {}, lambda *lines: None))


def test_the_list_is_long_enough_and_its_third_is_drawn_by_a_seed():
    assert len([known for known in LIST if not known.put_in]) >= 12
    assert len([known for known in LIST if known.put_in]) >= 4
    assert len({known.name for known in LIST}) == len(LIST)
    kept = kept_names()
    assert kept == kept_names() and len(kept) == 8 and len({*kept}) == 8
    # as drawn before anything ran; a technique under another name would draw another third
    assert {*kept} == {"bigram embedding", "documents cut in the second stage", "gates on value embeddings",
                       "normed value embeddings", "paired heads", "prefix loss", "signs on bigrams",
                       "tied lm_head"}
    assert all(known.public is None or (known.public.percent < 0) == known.put_in for known in LIST)


def test_conversions():
    assert Public(2160, 50).percent == pytest.approx(2.3148, abs=1e-4)
    assert Public(1385, 0, 0.0046).percent == pytest.approx(100 * 0.0046 / 1385 / calibration.NATS_PER_STEP)
    assert calibration.NATS_PER_STEP == pytest.approx(1.435e-4, rel=1e-3)


@pytest.mark.parametrize("known", CHANGED)
def test_changes_fit_the_recipe(known):
    """Edits find their places and make a script; flags make the proxy another one, at both widths."""
    text = SCRIPT.read_text(encoding="utf-8")
    changed = edited(text, known.edits)
    compile(changed, "train_gpt.py", "exec")
    base = Known("base", "", None, {})
    for width in calibration.WIDTHS:
        cfg = config_of(known, width)
        assert (cfg != config_of(base, width)) == bool(known.flags)
        assert plan.planned_tokens(cfg) == plan.planned_tokens(config_of(base, width))
    assert known.flags or changed != text


def test_blocks_follow_the_width():
    known = LIST[-1]
    assert known.name == "documents cut in the second stage"
    for width in calibration.WIDTHS:
        cfg = config_of(known, width)
        assert [stage.doc_len / cfg.window_block for stage in cfg.stages()] == [7, 12, 16, 16]


def losses_of_script(text, run_id, folder):
    """{step: loss} of a few steps of a script on the proxy."""
    path = tries.frozen(text, folder)
    spec = importlib.util.spec_from_file_location(run_id, path)
    module = sys.modules[run_id] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.plot_curves = lambda *_: None
    argv = ["--preset=speedrun_plus", "--proxy=32", "--data-path=data/datasets/toy", "--iterations=6",
            "--extension-iterations=0", "--val-tokens=2048", f"--run-id={run_id}"]
    assert module.main(expand_proxy(argv, {}, lambda *lines: None), {"DEVICE": "cpu"}) == 0
    del sys.modules[run_id]
    return look(Path("logs", run_id)).losses


@pytest.mark.slow
def test_edited_scripts_train(root, monkeypatch, tmp_path, one_thread):
    """To other losses than the recipe's."""
    monkeypatch.chdir(root)
    text = SCRIPT.read_text(encoding="utf-8")
    base = losses_of_script(text, "calibration_base", tmp_path / "base")
    for i, known in enumerate([known for known in LIST if known.edits]):
        losses = losses_of_script(edited(text, known.edits), f"calibration_{i}", tmp_path / str(i))
        assert losses != base and losses.keys() == base.keys(), known.name


def test_gains_and_agreement():
    """Signs of what is taken out and of what is put in; a perfect order, an inverted one."""
    losses = {("base", 32, "a"): {1: 3.0, 2: 4.0, 3: 9.0}, ("MUDD", 32, "a"): {1: 3.11, 2: 4.13, 4: 5.0},
              ("GELU", 32, "a"): {1: 3.05}, ("Muon on pairs of heads", 32, "a"): {1: 3.0, 2: 4.0}}
    by_name = {known.name: known for known in LIST}
    assert gains_of(by_name["MUDD"], losses, 32, "a") == pytest.approx([0.11, 0.13])
    assert gains_of(by_name["GELU"], losses, 32, "a") == pytest.approx([-0.05])
    assert gains_of(by_name["XSA"], losses, 32, "a") == []
    assert spread_of([[1.0, 3.0], [0.0], [5.0, 5.0]]) == pytest.approx(1.0) and spread_of([[1.0]]) == 0
    public = np.array([5.0, 4.0, 3.0, 2.0, 1.0, -1.0])
    good = agreement([*zip(public, public / 100), (None, -0.1)])
    assert good["rho"] == pytest.approx(1) and good["signs"] == good["n"] == 7
    assert good["signs_interval"][0] > 0.6
    assert good["ranked"] == 6      # the last has no number
    bad = agreement([*zip(public, -public)])
    assert bad["rho"] == pytest.approx(-1) and bad["signs"] == 0
    lines = []
    found = report(LIST, losses, lines.append)
    assert found["32 a"]["n"] == 2, "without the change that changes nothing"
    assert "MUDD: public +4.72 %; 32 a +0.1200 ± 0.0100" in lines
    assert "Muon on pairs of heads: public +0.67 %; changes nothing here, or was not run" in lines
    assert lines[-1] == "32 a: one seed's gain has a deviation of 0.0141 nats"
    # at another width MUDD loses and GELU gains
    other = {("base", 48, "a"): {1: 3.0}, ("MUDD", 48, "a"): {1: 2.9}, ("GELU", 48, "a"): {1: 2.9}}
    whole = report_whole_list(losses | other, lines.append)
    names = ["whole list, 32 a", "whole list, 48 a", "32 a and 48 a"]
    assert [whole[name]["signs"] for name in names] == [2, 0, 0]
    assert lines[-1] == "whole list, 48 a: 0 of 2 signs agree (0% to 66%)"
    lines.clear()
    report(LIST, {cell: {1: some[1]} for cell, some in losses.items()}, lines.append)
    assert "MUDD: public +4.72 %; 32 a +0.1100" in lines and "deviation" not in lines[-1]


def test_the_command_runs_from_any_folder(tmp_path):
    """As a process of its own, which finds train_gpt.py; what calibration.tsv has is not missing."""
    command = [sys.executable, str(ROOT / "records" / "record.py"), "calibrate", "--report", "--seeds", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    names = {"base", *[known.name for known in LIST]} - {*kept_names()}
    texts = ("embedded", "eng1024")
    cells = [(name, width, text) for name in names for width in (32, 48) for text in texts]
    losses = calibration.read_runs(calibration.RUNS)
    there = [cell for cell in cells if calibration.FIRST_SEED in losses.get(cell, {})]
    assert there, "the project's own runs"
    assert f"{len(cells)} runs, of which {len(cells) - len(there)} are missing" in done.stdout


def test_runs_are_trained_once_and_written(tmp_path, monkeypatch):
    """The runner trains what the file lacks, a bad run ends it, and the file holds every loss, also of other
    settings, in a file of their own."""
    monkeypatch.chdir(tmp_path)
    asked = []

    def fake(change, proxy, seed, threads):
        if change.name == "MUDD" and not asked.count("bad"):
            asked.append("bad")
            raise tries.Refused("MUDD broke")
        asked.append((change.name, proxy.width, seed))
        folder = Path("logs", tries.run_name(change, proxy, seed))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").write_text("{}")
        loss = 2 + len(asked) / 100
        (folder / "train.log").write_text(f"step:9/9 val_loss:{loss:.4f} train_time:100ms\n")
        return tries.finished(folder.name)

    monkeypatch.setattr(tries, "run_or_read", fake)
    monkeypatch.setattr(calibration, "RUNS", tmp_path / "runs.tsv")
    from records import record
    words = ["calibrate", "--widths", "32", "--texts", "a", "--seeds", "1", "--workers", "1"]
    some = 1 + len(LIST) - len(kept_names())
    assert record.main(words) != 0
    assert 0 < len(asked) < some
    assert record.main(words) == 0
    asked.remove("bad")
    assert len(asked) == len({*asked}) == some
    assert record.main(words) == 0 and len(asked) == some
    assert len(calibration.read_runs(tmp_path / "runs.tsv")) == some
    asked[:] = ["bad"]
    assert record.main([*words, "--kept"]) == 0
    assert {name for name, _, _ in asked[1:]} == {*kept_names()}       # base is there
    assert len(calibration.read_runs(tmp_path / "runs.tsv")) == 1 + len(LIST), "all of them are written"
    assert record.main([*words, "MATRIX_LR=0.03"]) == 0
    assert len(calibration.read_runs(calibration.FOLDER / "MATRIX_LR=0.03.tsv")) == some
    assert len(calibration.read_runs(tmp_path / "runs.tsv")) == 1 + len(LIST), "as they were"
