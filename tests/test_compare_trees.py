"""tools/dev/compare_trees.py: what its cases set, the differences it finds, what it says of failed runs."""
import json
import shutil
from dataclasses import fields

import pytest
import torch

import train_gpt
from helpers import with_boards
from tools.dev import compare_trees
from tools.dev.compare_trees import CASES, COMMON, settings_of

OFF = (0, 0.0, "", False, (0,), (0.0,), (), "off")
PLANTED = ("ARTIFACT_SCALE_FLOOR", "0.02")  # shows in the score of golf's artifact alone
OF_OLDER_TREES = {"SAMPLE_TOKENS"}      # the trainer no longer makes samples


def names_of(preset):
    """{name in the environment: constant} of a preset."""
    recipe = train_gpt.RECIPES[preset]
    names = {field.name.upper(): field.name for field in fields(recipe)}
    return names | {alias.upper(): name for name, alias in recipe.aliases.items()}


# ---------- the cases
def test_one_case_per_preset():
    assert set(CASES) == set(with_boards())


@pytest.mark.parametrize("case", CASES)
def test_a_case_sets_only_what_its_preset_has(case):
    """What the preset leaves off stays off; DEVICE_BATCH_SIZE=0 means as many as fit, an empty schedule the
    preset's own stages."""
    preset = train_gpt.preset_config(case)
    turned_on = []
    for name in CASES[case]:
        field = names_of(case)[name]
        own_stages = field.endswith("_schedule") and getattr(preset, field) == ()
        if getattr(preset, field) in OFF and field != "device_batch_size" and not own_stages:
            turned_on.append(name)
    assert turned_on == []


def test_what_all_cases_set_some_preset_has():
    known = set().union(*[names_of(preset) for preset in CASES])
    assert {*COMMON} - known <= OF_OLDER_TREES < {*COMMON}


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
    """A folder with two runs of golf as its case has it, `plain` and `again`, and one with the planted
    change, `planted`; each in a tree whose train_gpt.py takes no time: it leaves that run behind."""
    home = tmp_path_factory.mktemp("compared")
    compare_trees.write_data(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        for run in ("plain", "again", "planted"):
            settings = settings_of("golf", STEPS)
            if run == "planted":
                settings |= dict([PLANTED])
            assert train_gpt.main([], settings) == 0
            write_tree(home / run, f"import shutil\nshutil.copytree({str(home / run / 'run')!r}, 'logs/run')")
            shutil.move("logs/run", home / run / "run")
    return home


def write_tree(folder, code):
    folder.mkdir()
    (folder / "train_gpt.py").write_text(code)


def compared(capsys, before, after, *words):
    """Exit code and lines of the tool, for golf on one rank."""
    code = compare_trees.main([str(before), str(after), "--presets", "golf", "--ranks", "1", "--steps",
                               str(STEPS), *words])
    return code, capsys.readouterr().out.splitlines()


def finished(home, run, tmp_path):
    """What the tool reads of one of the runs, with a copy of its folder for changes."""
    folder = tmp_path / run
    shutil.copytree(home / run / "run", folder / "logs/run")
    return folder, compare_trees.read_run(folder)


def test_the_same(home, capsys):
    code, (same, *totals) = compared(capsys, home / "plain", home / "again")
    assert code == 0 and totals[0] == "1 of 1 are identical"
    assert same.startswith("golf 1 rank: identical: 12 train losses, 3 val losses, ")
    assert ", artifact of " in same


def test_a_difference_fails(home, capsys):
    """Of the artifact alone, by its score."""
    code, lines = compared(capsys, home / "plain", home / "planted")
    assert code == 1 and lines[1] == "0 of 1 are identical"
    assert lines[0].startswith("golf 1 rank: DIFFERENT: result val_loss: ")


def test_two_runs_are_identical(home, tmp_path):
    """Each trained by itself."""
    _, plain = finished(home, "plain", tmp_path)
    _, again = finished(home, "again", tmp_path)
    assert plain.artifact and len(plain.train_losses) == STEPS
    assert compare_trees.first_difference(plain, again) == ""


def test_each_thing_that_is_compared(home, tmp_path):
    """One number changed in each, by as little as there is."""
    folder, before = finished(home, "plain", tmp_path)

    def difference():
        return compare_trees.first_difference(before, compare_trees.read_run(folder))

    run = folder / "logs/run"
    result = json.loads((run / "result.json").read_text())
    for name, value, words in (
            ("steps", STEPS + 1, "result steps: "),
            ("tokens", result["tokens"] + 1, "result tokens: "),
            ("stop_reason", "wallclock_cap", "result stop_reason: "),
            ("val_bpb", result["val_bpb"] * (1 + 2**-52), "result val_bpb: "),
            ("val_loss_sliding", 1.0, "result val_loss_sliding is only after")):
        (run / "result.json").write_text(json.dumps(result | {name: value}))
        assert difference().startswith(words)
    (run / "result.json").write_text(json.dumps(result))
    assert difference() == ""
    payload = torch.load(run / "final_model.pt", weights_only=True)
    payload["tensors"]["embed"][3, 5] += 1e-6
    torch.save(payload, run / "final_model.pt")
    assert difference().startswith("tensor embed: ") and "at [3, 5], the first of 1 of " in difference()
    shutil.copy(home / "plain/run/final_model.pt", run)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for kind, step in (("train", 7), ("val", STEPS)):
        (event,) = [event for event in events if event["kind"] == kind and event["step"] == step]
        loss = event[f"{kind}_loss"]
        event[f"{kind}_loss"] = loss * (1 + 2**-52)
        (run / "events.jsonl").write_text("".join([json.dumps(one) + "\n" for one in events]))
        assert difference().startswith(f"{kind}_loss step {step}: ")
        event[f"{kind}_loss"] = loss


def test_an_artifact_in_another_container(home, tmp_path):
    """Its bytes may differ; the line says so."""
    folder, before = finished(home, "plain", tmp_path)
    path, = (folder / "logs/run").glob("final_model.*.ptz")
    path.write_bytes(b"other")
    after = compare_trees.read_run(folder)
    assert compare_trees.first_difference(before, after) == ""
    assert compare_trees.counted(before, after).endswith(", but not the artifact's bytes")
    assert ", artifact of " in compare_trees.counted(before, before)


# ---------- smaller parts
def test_bits_are_compared():
    difference = compare_trees.tensor_difference
    nan = torch.tensor([float("nan"), 1.0])
    assert difference(nan, nan.clone()) == ""
    assert difference(torch.tensor(0.0), torch.tensor(-0.0)) == (
        "0.0 before, -0.0 after at [], the first of 1 of 1 numbers")
    assert "float16" in difference(torch.zeros(2), torch.zeros(2).half())
    assert "(3,)" in difference(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize("code, words", [
    ("print('train_gpt: no such constant')\nraise SystemExit(2)", "exit code 2\n    train_gpt: no such"),
    ("import os\nos.mkdir('x')\n1 / 0", "exit code 1\n    Traceback"),
    ("import time\ntime.sleep(60)", "no end after 0.3 s")])
def test_runs_that_fail(code, words, tmp_path, monkeypatch, capsys):
    """Are not identical."""
    write_tree(tmp_path / "tree", code)
    monkeypatch.setattr(compare_trees, "TIMEOUT", 0.3 if "sleep" in code else 30)
    code, lines = compared(capsys, tmp_path / "tree", tmp_path / "tree")
    assert code == 1
    assert words in "\n".join(lines)
    assert lines[-2] == "0 of 1 are identical"


@pytest.mark.parametrize("words, sentence", [
    (["--presets", "golff"], "golff is none of tiny"), (["--steps", "13"], "even and at least 12"),
    (["--env", "EVAL_SLIDING"], "not of the form NAME=value"), ([], "there is no train_gpt.py in nowhere")])
def test_arguments_are_checked(words, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit):
        compare_trees.main([str(tmp_path / "nowhere"), str(tmp_path), *words])
    assert sentence in capsys.readouterr().err
