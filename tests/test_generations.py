"""Scripts by commit and preset, diffs of scripts of one kind; the generations of scripts that our records
hold and today's two kinds, each trained at toy size: replay, leak probe and export open them."""
import json
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from helpers import SCRIPT, slow_but
from records.judge import logs
from records.verify import checks, evidence, folders, leak_probe, replay, scripts
from test_record import (
    BASELINE, LONG, RECORDS, SETTINGS, WITH_COMPANION, few_data, forked_programs)
from tools.run import script

pytestmark = pytest.mark.usefixtures("forked_programs")
# A script of two recipes, and a tool that makes a script of one
WHOLE = """The whole.
golf_lr = 0.02
tiny_lr = 0.01
RECIPES = dict(golf=golf_lr, tiny=tiny_lr)
"""
LATER = WHOLE.replace("0.02", "0.03")
TOOL = """
import sys
preset = sys.argv[1]
own = [line for line in open("train_gpt.py") if line.startswith(f"{preset}_")]
assert own
print(f"{preset} alone.\\n{own[0]}RECIPES = dict({preset}={preset}_lr)")
"""
ALONE = "{0} alone.\n{0}_lr = {1}\nRECIPES = dict({0}={0}_lr)\n"
GOLF = ALONE.format("golf", "0.02").encode()
GOLF_LATER = ALONE.format("golf", "0.03").encode()
TINY = ALONE.format("tiny", "0.01").encode()


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """(folder, its commits): with the tool as tools/script.py, as older commits have it; with another rate
    and the tool of today's path."""
    folder = tmp_path_factory.mktemp("repository")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x"]
    commits = []
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    for text, tool in ((WHOLE, "tools/script.py"), (LATER, "tools/run/script.py")):
        shutil.rmtree(folder / "tools", ignore_errors=True)
        for path, content in ((folder / "train_gpt.py", text), (folder / tool, TOOL)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        for words in (["add", "."], ["commit", "-q", "-m", "x"]):
            subprocess.run([*git, *words], cwd=folder, check=True)
        commits += subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=folder, text=True).split()
    return folder, commits


@pytest.fixture
def here(repository, monkeypatch):
    """The commits of the repository, which the tools take for ours."""
    monkeypatch.setattr(scripts, "ROOT", repository[0])
    return repository[1]


def test_the_commit_of_a_script(here):
    """Of equal ones the newest; whole, or made by the tool of the commit."""
    first, second = here
    for made, preset, wanted in (
            (WHOLE.encode(), "golf", first), (LATER.encode(), "tiny", second), (GOLF, "golf", first),
            (GOLF_LATER, "golf", second), (TINY, "tiny", second), (GOLF, "golf_plus", "not committed"),
            (WHOLE.encode() + b"#", "golf", "not committed"), (GOLF + b"#", "golf", "not committed"),
            (BASELINE.joinpath("train_gpt.py").read_bytes(), "golf", "not committed")):
        assert scripts.git_commit(made, preset) == wanted, made


def test_check_finds_the_script_again(here):
    """As it is in the commit, or made by the tool of the commit for the preset of the run."""
    first, second = here
    other = pytest.raises(checks.Broken, match="has another train_gpt.py than the folder")
    elsewhere = pytest.raises(checks.LeftOut, match="is not in this repository")
    for made, preset, named, outcome in (
            (WHOLE.encode(), "golf", first, nullcontext()), (WHOLE.encode(), "golf", second, other),
            (b"", "golf", first, other), (WHOLE.encode(), "golf", "0" * 40, elsewhere),
            (GOLF, "golf", first, nullcontext()), (GOLF, "golf", second, other),
            (GOLF, "golf_plus", first, other), (GOLF + b"\n", "golf", first, other)):
        with outcome:
            evidence.check_commit(record_of(made, named, preset), None)


def record_of(script, commit, preset):
    """A record, as far as its script goes."""
    return SimpleNamespace(script=script, submission={"git_commit": commit},
                           runs=[SimpleNamespace(result={"preset": preset})])


def test_diffs_compare_scripts_of_one_kind(here):
    """A whole one against one of a recipe by what the tool makes of it, either way."""
    first, second = here
    old = WITH_COMPANION.joinpath("train_gpt.py").read_bytes()
    names = ["before/train_gpt.py", "train_gpt.py"]
    for before, after, name_before, name_after in (
            (WHOLE.encode(), LATER.encode(), *names), (GOLF, GOLF_LATER, *names),
            (WHOLE.encode(), GOLF_LATER, f"before/train_gpt.py, golf of {first[:9]}", "train_gpt.py"),
            (GOLF, LATER.encode(), "before/train_gpt.py", f"train_gpt.py, golf of {second[:9]}")):
        pair = record_of(before, first, "golf"), record_of(after, second, "golf")
        lines = folders.code_diff(*scripts.of_one_kind(*pair)).splitlines()
        assert [line for line in lines if line[0] in "+-"] == [
            f"--- {name_before}", f"+++ {name_after}", "-golf_lr = 0.02", "+golf_lr = 0.03"]
    with pytest.raises(logs.Refused, match="commit train_gpt.py before you train"):     # it has no recipes
        scripts.of_one_kind(record_of(old, "not committed", "tiny"), record_of(TINY, second, "tiny"))


# ------------------------------------------------------------ generations
ONE_CLASS = next(path for path in RECORDS if path.name.endswith("_BatchGrowth"))
GENERATIONS = {     # folder of a record, or what to train of today's
    "one that must be told the length": BASELINE, "one with a file beside it": WITH_COMPANION,
    "one class for all presets": ONE_CLASS, "recipes": "tiny",
    "one recipe": "golf"}
ENVIRONMENT = SETTINGS | dict(ITERATIONS="10", VAL_LOSS_EVERY="5", TRAIN_BATCH_TOKENS="256",
                              VAL_TOKENS="1024", EVAL_SLIDING="0", SEED="3", RUN_ID="first")
GOLF_RUN = dict(PRESET="golf", VOCAB_SIZE="512", NUM_KV_HEADS="1", TOKENIZER_PATH="data/tokenizers/toy.model")


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
        (root / "train_gpt.py").write_text(script.script("golf", SCRIPT.read_text("utf-8")), "utf-8")
        env |= GOLF_RUN
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
    assert tensors.keys() == torch.load(trained.run / "final_model.pt")["tensors"].keys()
    assert (tmp_path / "out/model.py").exists()
