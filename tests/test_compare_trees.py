"""tools/dev/compare_trees.py: what its cases set, the differences it finds, what it says of failed runs."""
import re

import pytest
import torch

import train_gpt
from helpers import with_boards
from tools.dev import compare_trees
from tools.dev.bench import random_data
from tools.dev.compare_trees import CASES, COMMON, settings_of
from tools.run.names import constants_of


# ---------- the cases
def test_there_is_a_case_per_preset_and_it_sets_only_what_that_has():
    """The trainer would not heed another name."""
    assert {*CASES} == {*with_boards()}
    for case, settings in CASES.items():
        assert {*settings} <= constants_of(case)
    assert {*COMMON} <= set().union(*[constants_of(case) for case in CASES])


@pytest.mark.parametrize("steps", [12, 50])
@pytest.mark.parametrize("case", CASES)
def test_a_case_reaches_every_stage(case, steps):
    """And the warmdown; a head that is the embedding first is untied later."""
    cfg = train_gpt.load_config(settings_of(case, steps))
    assert train_gpt.total_steps(cfg) == steps
    progress = [cfg.progress(step, 0.0) for step in range(steps)]
    reached = [train_gpt.stage_at(cfg, part) for part in progress]
    assert set(reached) == set(cfg.stages())
    schedules = [cfg.schedule(step, part) for step, part in enumerate(progress)]
    stages = [stage.lr for stage in cfg.stages()]
    top = [cfg.top_lr(part) for part in progress] if "lr_switches" in vars(cfg) else stages
    assert schedules[-1].lr < max(top)
    assert set(top) == set(vars(cfg).get("lr_schedule", stages))
    unties = vars(cfg).get("untie_at", 0) > 0
    assert {now.tied for now in schedules} == ({True, False} if unties else {False})


# ---------- runs of train_gpt.py in this process, from which trees are made
STEPS = 12


@pytest.fixture(scope="module")
def home(tmp_path_factory, one_thread):
    """A folder with logs/run, a run of golf as its case has it, and a tree `same` whose train_gpt.py leaves
    that run behind; that of `other` changes the score of its artifact."""
    home = tmp_path_factory.mktemp("compared")
    settings = settings_of("golf", STEPS) | random_data(home / "data", compare_trees.SIZES, 100_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert train_gpt.main([], settings) == 0
    copied = f"import json, shutil\nshutil.copytree({str(home / 'logs/run')!r}, 'logs/run')\n"
    write_tree(home / "same", copied)
    write_tree(home / "other", copied + """
with open("logs/run/result.json", "r+") as file:
    result = json.load(file)
    result["artifact"]["val_loss"] += 1e-12
    file.seek(0)
    json.dump(result, file)
    file.truncate()
""")
    return home


def write_tree(folder, code):
    folder.mkdir()
    (folder / "train_gpt.py").write_text(code)


def compared(capsys, before, after):
    """Exit code and lines of the tool, for golf on one rank."""
    code = compare_trees.main(
        [str(before), str(after), "--presets", "golf", "--ranks", "1", "--steps", str(STEPS)])
    return code, capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("tree, count, line", [
    ("same", 1, r"identical: 3 x val_loss, 12 x train_loss, \d+ x tensor, \d+ x result"),
    ("other", 0, "DIFFERENT: result artifact: .*")])
def test_two_trees(tree, count, line, home, capsys):
    """A difference fails."""
    code, lines = compared(capsys, home / "same", home / tree)
    assert code == 1 - count and lines[1] == f"{count} of 1 are identical"
    assert re.fullmatch("golf 1 rank: " + line, lines[0])


def test_each_thing_that_is_compared(home):
    """One value changed in each, a number by as little as there is, and one that is only there once."""
    before = compare_trees.read_run(home)
    embed = before["tensor embed"].clone()
    embed[3, 5] += 1e-6
    changed = {name: before[name] * (1 + 2**-52)
               for name in ("train_loss of step 7", f"val_loss of step {STEPS}", "result val_loss")}
    changed |= {"result steps": STEPS + 1, "result tokens": 1, "result stop_reason": "wallclock_cap",
                "tensor embed": embed}
    for name, value in changed.items():
        words = compare_trees.first_difference(before, before | {name: value})
        assert words.startswith(f"{name}: ")
    assert "at [3, 5], the first of 1 of " in words
    assert compare_trees.first_difference(before, before | {"result x": 1}) == "result x is only after"
    assert compare_trees.first_difference(before, dict(before)) == ""


# ---------- smaller parts
def test_bits_are_compared():
    difference = compare_trees.difference
    nan = torch.tensor([float("nan"), 1.0])
    assert difference(nan, nan.clone()) == ""
    assert difference(torch.tensor(0.0), torch.tensor(-0.0)) == (
        "0.0 before, -0.0 after at [], the first of 1 of 1 numbers")
    assert "float16" in difference(torch.zeros(2), torch.zeros(2).half())
    assert "(3,)" in difference(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize("code, words", [
    ("print('train_gpt: no such constant')\nraise SystemExit(2)", "ended with 2\n    train_gpt: no such"),
    ("1 / 0", "ended with 1\n    Traceback")])
def test_runs_that_fail(code, words, tmp_path, capsys):
    """Are not identical."""
    write_tree(tmp_path / "tree", code)
    code, lines = compared(capsys, tmp_path / "tree", tmp_path / "tree")
    assert code == 1 and words in "\n".join(lines) and lines[-1] == "0 of 1 are identical"


@pytest.mark.parametrize("words, sentence", [
    (["--presets", "golff"], "invalid choice: 'golff'"), (["--steps", "13"], "even and at least 12"),
    (["--env", "EVAL_SLIDING"], "must be NAME=value"), ([], "there is no train_gpt.py in")])
def test_arguments_are_checked(words, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit):
        compare_trees.main([str(tmp_path / "nowhere"), str(tmp_path), *words])
    assert sentence in capsys.readouterr().err
