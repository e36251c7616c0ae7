"""record try: verdicts that may be looked at after each run, a ledger, kills."""
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import fork_server
from helpers import ROOT
from records.judge import sequential, tries
from records.judge.logs import Refused
from records.judge.sequential import Noise, Series, series_of

# A trainer that knows --proxy and is quick: its loss follows seed, width, text, flags and edits
FAKE = '''"""A trainer."""
import json, os, pathlib, random, sys
# ---------- 4 techniques
# ---------- speedrun_plus: the recipe
GAIN = 0.0
# ---------- 8 evaluation
SCORED = 1
flags = dict(word[2:].split("=", 1) if "=" in word else (word[2:], "") for word in sys.argv[1:])
for name in flags:
    if name not in ("preset", "proxy", "data-path", "dry-run", "gain", "part"):
        sys.exit(f"train_gpt: unknown argument --{name}")
width = int(flags["proxy"] or 48)
print(f"proxy: {flags['preset']} at width {width} instead of 768")
print(f"limits: at most 100 steps ({width * 1000} tokens); no cap")
if "dry-run" not in flags:
    noise = random.Random(" ".join([os.environ["SEED"], *sys.argv[1:], str(GAIN)])).gauss(0, 0.004)
    gain = GAIN + float(flags.get("gain", 0))
    if gain > 9:
        sys.exit("train_gpt: the loss is nan")
    loss = 3 - width / 100 - gain + noise
    folder = pathlib.Path("logs", os.environ["RUN_ID"])
    folder.mkdir(parents=True)
    with open("trained.txt", "a") as file:
        file.write(folder.name + "\\n")
    (folder / "train.log").write_text(f"data: toy train tokens:99 in 1 shards, val tokens:50834\\n"
                                      f"eval settings: eval_tokens:{flags.get('part', 1024)} eval_context:64 "
                                      f"eval_stride:64 eval_window:full\\n"
                                      f"step:100/100 val_loss:{loss:.4f} train_time:100ms step_avg:1.00ms\\n"
                                      f"final_model_exact val_loss_partial:{loss:.8f}\\n")
    (folder / "result.json").write_text("{}")
'''


# It hands everything to the trainer
FAKE_PROXY = """import os, sys
folder = sys.argv[1].removeprefix("--trainer=")
os.execv(sys.executable, [sys.executable, folder + "/train_gpt.py", *sys.argv[2:]])
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A repository whose train_gpt.py is FAKE, to run in."""
    (tmp_path / "train_gpt.py").write_text(FAKE)
    (tmp_path / "tools/run").mkdir(parents=True)
    (tmp_path / "tools/run/proxy.py").write_text(FAKE_PROXY)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "train_gpt.py"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tries, "ROOT", tmp_path)
    # an interpreter without site-packages, which starts in a moment
    (tmp_path / "quick").write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "$@"\n')
    (tmp_path / "quick").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "quick"))
    return tmp_path


def edit(place, **constants):
    """FAKE with other constants."""
    text = FAKE
    for name, value in constants.items():
        text = re.sub(rf"(?m)^{name} = .*", f"{name} = {value}", text)
    (place / "train_gpt.py").write_text(text)


# ------------------------------------------------------------ statistics
def test_evidence_is_an_e_value_and_sees_gains():
    """Without a gain it seldom exceeds 20, however often one looks; a loss makes it small."""
    rng = np.random.default_rng(0)
    above = 0
    for _ in range(150):
        numbers = rng.normal(0, 3, 7)
        above += max([sequential.evidence(series_of(numbers[:n])) for n in range(2, 8)]) >= 20
    assert above <= 12      # of 7.5 that are allowed on average
    assert np.mean([sequential.evidence(series_of(rng.normal(-2, 1, 4))) for _ in range(50)]) < 0.3
    series = series_of([1.1, 0.9, 1.0, 1.2])
    assert sequential.evidence(series) > 100 > 1 > sequential.evidence(series.negative())
    assert sequential.evidence(series_of([1.0])) == sequential.evidence(series_of([1.0, 1.0])) == 1
    assert sequential.evidence(series_of([1.0], Noise(0.4, 10))) > 5
    low, high = sequential.interval(series)
    assert low < 1.05 < high and low > 0
    assert sequential.interval(series_of([1.0])) == (-np.inf, np.inf)


def test_the_ratio_of_densities_is_that_of_scipy():
    shifts = np.array([0.5, 2.0, 5.0])
    for t, df in ((0.3, 1), (2.0, 3), (-1.0, 9), (7.0, 30)):
        wanted = stats.nct.pdf(t, df, shifts) / stats.t.pdf(t, df)
        assert sequential.t_ratio(t, df, shifts) == pytest.approx(wanted, rel=1e-3)
    assert sequential.t_ratio(1000.0, 40, np.array([25.0])) > 1e30


def test_alpha_is_spent_once():
    parts = [sequential.spending(number) for number in range(1, 351)]
    assert sum(parts) == pytest.approx(0.75 + 0.1875 + 0.046875) and parts == sorted(parts, reverse=True)
    assert sequential.needed_evidence(1, 0) == pytest.approx(50 / 0.75 / 0.1)
    assert sequential.needed_evidence(1, 1) == pytest.approx(25 / 0.75 / 0.1)


def test_more_runs_are_named_that_would_tell():
    series = Series(0.5, 1.0, 20, 4)
    more = sequential.more_needed(series, 100)
    assert sequential.evidence(sequential.after(series, more, 0.5)) >= 100
    assert sequential.evidence(sequential.after(series, more - 1, 0.5)) < 100
    assert sequential.more_needed(Series(1e-9, 1.0, 20, 4), 100) is None
    loss = Series(-series.mean, *series[1:])     # takes evidence of 20, whatever a gain takes
    assert sequential.more_needed(loss, 667) == sequential.more_needed(series, 20)


# ------------------------------------------------------------ try
def test_a_gain_is_kept_a_loss_stops_early_and_the_ledger_tells(place, tool):
    edit(place, GAIN=0.05)
    code, out, _ = tool("try", "a better recipe", "--proxy", 32)
    assert code == 0 and "verdict: gains, +0.0" in out and "a better recipe" in out
    assert out.count("val_loss_partial: the loss on the first 1,024 of 50,834 val tokens") == 1
    edit(place, GAIN=-0.05)
    code, out, _ = tool("try", "a worse one")
    assert "verdict: loses, -0.0" in out and "on speedrun_plus at width 32" in out     # that of the last try
    (place / "train_gpt.py").write_text(FAKE)
    code, out, _ = tool("try", "GAIN=0.0001")
    assert "verdict: cannot tell" in out and "more pairs would tell" in out
    rows = tries.read_ledger()
    assert [row["verdict"] for row in rows] == ["gains", "loses", "cannot tell"]
    assert [row["kept"] for row in rows] == ["yes", "no", "no"]
    assert [row["number"] for row in rows] == ["1", "2", "3"]
    assert rows[2]["what"] == "GAIN=0.0001" and rows[0]["tokens"] == "32000" and rows[0]["text"]
    assert float(rows[0]["low"]) < float(rows[0]["gain"]) < float(rows[0]["high"])
    assert float(rows[1]["needed"]) < float(rows[0]["needed"])     # a gain before it
    pairs = sum(int(row["pairs"]) for row in rows)
    trained = Path("trained.txt").read_text().split()
    assert len(trained) == len({*trained}) == 2 * pairs
    assert int(rows[1]["pairs"]) <= 5


def test_a_try_of_nothing(place, tool):
    """Its runs differ by their seeds, and the next try knows by how much."""
    code, out, err = tool("try", "--same", "--proxy", 48)
    assert code == 0, err
    rows = tries.read_ledger()
    assert "cannot tell" in out and rows[0]["kept"] == "no" and float(rows[0]["std"]) > 0
    seeds = [int(name.split("_seed")[1]) for name in Path("trained.txt").read_text().split()]
    assert {*seeds[:4]} == {100_100, 100_150, 100_101, 100_151}
    pairs = int(rows[0]["pairs"])
    noise = tries.noise_of(rows * 2, tries.Proxy("speedrun_plus", 48, "data/datasets/embedded"))
    assert noise == (pytest.approx(2 * float(rows[0]["std"]) ** 2 * (pairs - 1)), 2 * (pairs - 1))
    assert tries.noise_of(rows, tries.Proxy("speedrun_plus", 64, "data/datasets/embedded")) == (0, 0)


def test_a_try_counts_the_noise_of_those_before_it(place, tool):
    """A clear gain needs fewer pairs once a try of nothing has shown the noise."""
    edit(place, GAIN=0.05)
    tool("try", "--proxy", 32)
    first, = tries.read_ledger()
    tries.LEDGER.unlink()
    tool("try", "--same", "--proxy", 32)
    tool("try", "--proxy", 32)
    assert int(tries.read_ledger()[1]["pairs"]) < int(first["pairs"])


def test_a_try_that_was_killed_goes_on(place, tool, monkeypatch):
    """Before its line is in the ledger, a try has the same number, and finished runs are read."""
    edit(place, GAIN=0.05)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(tries, "add_to_ledger", lambda *args: sys.exit("killed"))
        tool("try", "--proxy", 32)
    before = Path("trained.txt").read_text()
    assert "verdict: gains" in tool("try", "--proxy", 32)[1]
    assert Path("trained.txt").read_text() == before


def test_an_edit_does_not_take_the_place_of_one_that_still_runs(place, tool):
    edit(place, GAIN=0.05)
    other = Path("logs/tries/0001/train_gpt.py")
    other.parent.mkdir(parents=True)
    other.write_text("another edit")
    assert tool("try", "--proxy", 32)[1].startswith("try 2: ")
    assert other.read_text() == "another edit"
    assert tries.read_ledger()[0]["number"] == "2"


def test_names_of_runs_say_what_they_depend_on(tmp_path):
    """Script, flags and proxy; the seed is that of one try alone."""
    change = tries.Change("x", tries.frozen("pass", tmp_path / "a"), {"mlp_mult": "3"})
    proxy = tries.Proxy("golf", 32, "text")
    other = tries.frozen("pass  # changed", tmp_path / "b")
    names = [tries.run_name(change, proxy, 1), tries.run_name(change._replace(flags={}), proxy, 1),
             tries.run_name(change._replace(script=other), proxy, 1), tries.run_name(change, proxy, 2)]
    assert names[0].startswith("proxy_golf_32_text_") and names[0].endswith("_seed1")
    assert len({*names}) == len(names) and tries.run_name(change._replace(name="y"), proxy, 1) == names[0]


@pytest.mark.parametrize("constants, words, sentence", [
    ({}, (), "as in HEAD"), ({"SCORED": 2}, (), "beyond speedrun_plus's section: 8 evaluation"),
    ({"GAIN": "0 +"}, (), "SyntaxError"),
    ({}, ("NO_SUCH=1",), "unknown argument --no-such")])
def test_bad_tries_are_refused_before_anything_trains(place, tool, constants, words, sentence):
    edit(place, **constants)
    code, _, err = tool("try", *words, "--proxy", 32)
    assert code == 2 and sentence in err
    assert not Path("trained.txt").exists() and not Path("logs/tries.tsv").exists()


def test_the_size_of_a_proxy_is_known_before_it_trains(tiny_data, tmp_path, monkeypatch):
    """By the real rules, and what the trainer refuses is refused."""
    monkeypatch.setattr(sys, "executable", fork_server.start())
    monkeypatch.chdir(tmp_path)
    change = tries.Change("yours", ROOT / "train_gpt.py", {"iterations": 7, "train_batch_tokens": 1024})
    proxy = tries.Proxy("golf", 32, str(tiny_data / "data/datasets/toy"))
    assert tries.planned(change, proxy) == (32, 7 * 1024)
    with pytest.raises(Refused, match="yours: train_gpt: .*no-such"):
        tries.planned(change._replace(flags={"no_such": 1}), proxy)
    assert [*tmp_path.iterdir()] == []


# ------------------------------------------------------------ each seed counts once
FIXED = FAKE.replace('os.environ["SEED"]', '"5"')
TELLS = FAKE.replace('write_text(f"data', 'write_text(f"config seed=5\\ndata')
DIVERGES = FAKE.replace("GAIN = 0.0", "GAIN = 10.0")


@pytest.mark.parametrize("script, words, sentence", [
    (FIXED, ("try", "an edit", "--outside", "--proxy", 32), "have the same losses"),
    (FAKE, ("try", "SEED=5", "--proxy", 32), "leave SEED out"),
    (FAKE, ("try", "PART=512", "--proxy", 32), "val tokens scored: 1,024 ")])
def test_trials_that_tell_nothing_are_refused(place, tool, script, words, sentence):
    """Of one seed, or scored on other tokens."""
    (place / "train_gpt.py").write_text(script)
    code, out, err = tool(*words)
    assert code == 2 and sentence in err and err.count("\n") == 1 and "verdict: " not in out
    assert not Path("logs/tries.tsv").exists()


@pytest.mark.parametrize("script, sentence", [
    (DIVERGES, "fails: "), (TELLS, "fails: yours: its log says seed 5 where SEED=100100")])
def test_a_try_whose_runs_fail_is_in_the_ledger(place, tool, script, sentence):
    (place / "train_gpt.py").write_text(script)
    code, out, _ = tool("try", "an edit", "--outside", "--proxy", 32)
    assert code == 0 and sentence in out and tries.read_ledger()[0]["verdict"] == "fails"
