"""Scripts by commit and preset, diffs of scripts of one kind; the generations of scripts that our records
hold and today's two kinds, each trained at toy size: replay, leak probe and export open them."""
import json
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from helpers import ROOT, SCRIPT, slow, slow_but
from records.judge import runs
from records.verify import checks, evidence, folders, leak_probe, new_record, replay, scripts
from test_record import (BASELINE, LONG, RECORDS, SETTINGS, THREE, WITH_COMPANION, edit,
                         failed_rules, few_data, forked_programs, home, make, sealed, toy)
from tools.run import script

pytestmark = pytest.mark.usefixtures("forked_programs")
WHOLE = SCRIPT.read_text(encoding="utf-8")
LATER = WHOLE.replace('matrix_lr: float = option(0.02, "Muon: matrices of the blocks", 0, 10)\n    tied',
                      'matrix_lr: float = option(0.03, "Muon: matrices of the blocks", 0, 10)\n    tied')


def commit(folder):
    """All files of a folder, in its own repository -> the commit."""
    git = ["git", "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], cwd=folder, check=True)
    return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=folder, text=True).strip()


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """(folder, its commits): train_gpt.py and tools/ of today, then with another rate of the two golfs."""
    folder = tmp_path_factory.mktemp("repository")
    commits = []
    shutil.copytree(ROOT / "tools", folder / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    for text in (WHOLE, LATER):
        (folder / "train_gpt.py").write_text(text, encoding="utf-8")
        commits.append(commit(folder))
    return folder, commits


@pytest.fixture
def here(repository, monkeypatch):
    """The commits of the repository, which the tools take for ours."""
    monkeypatch.setattr(scripts, "ROOT", repository[0])
    scripts.made_at.cache_clear()
    yield repository[1]
    scripts.made_at.cache_clear()


@cache
def of(preset, text=WHOLE):
    """What the tool makes of a whole script for a preset."""
    return script.script(preset, text).encode()


def test_the_commit_of_a_whole_script(here):
    first, second = here
    assert LATER != WHOLE
    assert scripts.git_commit(WHOLE.encode(), "golf") == first
    assert scripts.git_commit(LATER.encode(), "tiny") == second
    assert scripts.git_commit(WHOLE.encode() + b"#", "golf") == "not committed"


@pytest.mark.slow
def test_the_commit_of_a_script_of_one_recipe(here):
    """Of equal ones the newest."""
    first, second = here
    assert of("golf", LATER) != of("golf")
    assert scripts.git_commit(of("golf", LATER), "golf") == second
    assert scripts.git_commit(of("golf"), "golf") == first
    assert scripts.git_commit(of("speedrun"), "speedrun") == second
    for unknown in (of("golf") + b"#", BASELINE.joinpath("train_gpt.py").read_bytes()):
        assert scripts.git_commit(unknown, "golf") == "not committed"
    assert scripts.git_commit(of("golf"), "golf_plus") == "not committed"


def test_a_script_by_the_tool_of_an_older_commit(tmp_path, monkeypatch):
    """Which had it as tools/script.py, and no packages."""
    source = (ROOT / "tools/run/script.py").read_text(encoding="utf-8")
    assert source.count("parents[2]") == 1
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/script.py").write_text(source.replace("parents[2]", "parents[1]"), encoding="utf-8")
    (tmp_path / "train_gpt.py").write_text(WHOLE, encoding="utf-8")
    monkeypatch.setattr(scripts, "ROOT", tmp_path)
    older = commit(tmp_path)
    scripts.made_at.cache_clear()
    assert scripts.made_at(older, "golf") == of("golf")
    assert scripts.git_commit(of("golf"), "golf") == older
    scripts.made_at.cache_clear()


@pytest.mark.parametrize("by_tool", [False, slow(True)])
def test_check_finds_the_script_again(by_tool, here):
    """As it is in the commit, or made by the tool of the commit for the preset of the run."""
    first, second = here
    other = pytest.raises(checks.Broken, match="has another train_gpt.py than the folder")
    elsewhere = pytest.raises(checks.LeftOut, match="is not in this repository")
    cases = [(WHOLE.encode(), "golf", first, nullcontext()), (WHOLE.encode(), "golf", second, other),
             (b"", "golf", first, other), (WHOLE.encode(), "golf", "0" * 40, elsewhere)]
    if by_tool:
        cases = [(of("golf"), "golf", first, nullcontext()), (of("golf"), "golf", second, other),
                 (of("golf"), "golf_plus", first, other), (of("golf") + b"\n", "golf", first, other),
                 (of("golf"), "golf", "0" * 40, elsewhere)]
    for made, preset, named, outcome in cases:
        with outcome:
            evidence.check_commit(record_of(made, named, preset), None)


def record_of(script, commit, preset):
    """A record, as far as its script goes."""
    return SimpleNamespace(script=script, submission={"git_commit": commit},
                           runs=[SimpleNamespace(result={"preset": preset})])


def changed_lines(before, after):
    compared = scripts.of_one_kind(record_of(*before), record_of(*after))
    diff = folders.code_diff(*compared)
    return [line for line in diff.splitlines() if line[0] in "+-"]


RATES = ['-    matrix_lr: float = option(0.02, "Muon: matrices of the blocks", 0, 10)',
         '+    matrix_lr: float = option(0.03, "Muon: matrices of the blocks", 0, 10)']


def test_the_diff_of_whole_scripts(here):
    first, second = here
    lines = changed_lines((WHOLE.encode(), first, "golf"), (LATER.encode(), second, "golf"))
    assert lines == ["--- before/train_gpt.py", "+++ train_gpt.py", *RATES * 2]


@pytest.mark.slow
def test_diffs_compare_scripts_of_one_kind(here):
    first, second = here
    old = WITH_COMPANION.joinpath("train_gpt.py").read_bytes()
    lines = changed_lines((of("golf"), first, "golf"), (of("golf", LATER), second, "golf"))
    assert lines == ["--- before/train_gpt.py", "+++ train_gpt.py", *RATES]
    # a whole one against one of a recipe, either way
    lines = changed_lines((WHOLE.encode(), first, "golf"), (of("golf", LATER), second, "golf"))
    assert lines == [f"--- before/train_gpt.py, golf of {first[:9]}", "+++ train_gpt.py", *RATES]
    lines = changed_lines((of("golf"), first, "golf"), (LATER.encode(), second, "golf"))
    assert lines == ["--- before/train_gpt.py", f"+++ train_gpt.py, golf of {second[:9]}", *RATES]
    with pytest.raises(runs.Refused, match="commit train_gpt.py before you train"):     # it has no recipes
        changed_lines((old, "not committed", "tiny"), (of("tiny"), "not committed", "tiny"))


def test_runs_of_one_recipe_make_a_record(tool, few_data, tmp_path, monkeypatch):
    """Of the script as it is, without the lab: its logs hold all that the rules ask of them."""
    (tmp_path / "data").symlink_to(few_data / "data")
    (tmp_path / "train_gpt.py").write_bytes(of("tiny"))
    env = SETTINGS | leak_probe.clean_environment() | {"OMP_NUM_THREADS": "1"}
    del env["BATCH_SCHEDULE"]
    for seed in "12":
        done = subprocess.run([sys.executable, "train_gpt.py"], cwd=tmp_path, capture_output=True, text=True,
                              env=env | {"SEED": seed, "RUN_ID": f"run{seed}"})
        assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders, "HOME", tmp_path / "records")
    monkeypatch.setattr(new_record, "git_commit", lambda *_: "not committed")
    code, _, err = tool("new", "--name", "Alone", "--blurb", "a toy", "logs/run1", "logs/run2")
    assert code == 0, err
    made = next(tmp_path.glob("records/track_tiny/*"))
    assert (made / "train_gpt.py").read_bytes() == of("tiny")
    assert (made / "train_seed2.log").stat().st_size < 20_000 < (made / "train.log").stat().st_size
    out = tool("check", "--no-exec", made)[1]
    assert failed_rules(out) == {"data", "runs"}, out


# ------------------------------------------------------------ generations
ONE_CLASS = next(path for path in RECORDS if path.name.endswith("_BatchGrowth"))
GENERATIONS = {     # folder of a record, or what to train of today's
    "one that must be told the length": BASELINE, "one with a file beside it": WITH_COMPANION,
    "one class for all presets": ONE_CLASS, "recipes": "tiny",
    "one recipe": "golf"}
ENVIRONMENT = SETTINGS | dict(ITERATIONS="10", VAL_LOSS_EVERY="5", TRAIN_BATCH_TOKENS="256",
                              VAL_TOKENS="1024", EVAL_SLIDING="0", SEED="3", RUN_ID="first")
GOLF = dict(PRESET="golf", VOCAB_SIZE="512", NUM_KV_HEADS="1", TOKENIZER_PATH="data/tokenizers/toy.model")


@pytest.fixture(scope="module", params=slow_but(["recipes"], GENERATIONS))
def trained(request, few_data, tmp_path_factory):
    """A script's folder, a run of it in a process of its own, and what the tools ask of a record."""
    root = tmp_path_factory.mktemp("generation")
    (root / "data").symlink_to(few_data / "data")
    source = GENERATIONS[request.param]
    env = dict(ENVIRONMENT)
    if source == "tiny":
        shutil.copy(SCRIPT, root)
    elif source == "golf":
        (root / "train_gpt.py").write_bytes(of("golf"))
        env |= GOLF
    else:
        for path in source.glob("*.py"):
            shutil.copy(path, root)
    env = {name: value for name, value in env.items() if value} | leak_probe.clean_environment()
    done = subprocess.run([sys.executable, "train_gpt.py"], cwd=root, capture_output=True, text=True,
                          env=env | {"OMP_NUM_THREADS": "1", "PICTURE": "0"})
    assert done.returncode == 0, done.stderr
    run = root / "logs/first"
    folder = SimpleNamespace(path=root, companions=lambda: [path.name for path in root.glob("*.py")
                                                            if path.name != "train_gpt.py"])
    return SimpleNamespace(name=request.param, root=root, run=run, folder=folder, env=env,
                           result=json.loads((run / "result.json").read_text()))


def test_replay_trains_it_again(trained, few_data, tmp_path, monkeypatch):
    """To the printed digits; another loss is found."""
    monkeypatch.setattr(replay, "ROOT", few_data)
    lines = (trained.run / "train.log").read_text().split("\n")
    again = replay.train_again(trained.folder, trained.result, 1, 1, 10, LONG, tmp_path)
    assert re.match(r"1\d losses up to step 10 are the same", replay.compare("train.log", lines, again, 10))
    lines = [line.replace("train_loss:", "train_loss:1") if "step:7/" in line else line for line in lines]
    with pytest.raises(checks.Broken, match="step 7"):
        replay.compare("train.log", lines, again, 10)


def test_the_leak_probe_opens_it(trained, monkeypatch):
    monkeypatch.setattr(leak_probe, "SHORT_ROW", 64)
    env = {name: value for name, value in trained.env.items() if name not in ("RUN_ID", "DATA_PATH")}
    artifact = next(trained.run.glob("final_model.*.ptz"))
    script_file = trained.root / "train_gpt.py"
    said = leak_probe.judge(script_file, artifact, env, seconds=LONG, seed=0)
    assert "the artifact: the largest effect on an earlier log-probability is 0," in said


def test_export_opens_it(trained, tool, tmp_path):
    """Models of older scripts, which have no recipes, are refused."""
    code, out, err = tool("export", trained.run, "--out", tmp_path / "out")
    if trained.name not in ("recipes", "one recipe"):
        assert code == 2 and err.count("\n") == 1
        return
    assert code == 0, err
    tensors = load_file(tmp_path / "out/model.safetensors")
    weights = torch.load(trained.run / "final_model.pt")["tensors"]
    assert weights.keys() == tensors.keys()
    for name, w in weights.items():
        if w.is_floating_point():
            assert tensors[name].shape == w.shape
            assert (tensors[name] - w).abs().max() < 0.02 * w.abs().max() + 1e-3
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["model_dim"] == 32 and config["vocab_size"] == 512
    assert (tmp_path / "out/model.py").exists()
