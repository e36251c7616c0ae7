"""tools/dev/compare_trees.py: what its cases set, the differences it finds, what it says of failed runs."""
import json
import lzma
import shutil
import zlib
from dataclasses import fields

import pytest
import torch

import train_gpt
from helpers import with_boards
from tools.dev import compare_trees
from tools.dev.compare_trees import CASES, COMMON, PLANTED, settings_of

OFF = (0, 0.0, "", False, (0,), (0.0,), (), "off")
OF_OLDER_TREES = {"SAMPLE_TOKENS"}      # the trainer no longer makes samples


def names_of(preset):
    """{name in the environment: constant} of a preset."""
    recipe = train_gpt.RECIPES[preset]
    names = {field.name.upper(): field.name for field in fields(recipe)}
    return names | {alias.upper(): name for name, alias in recipe.aliases.items()}


# ---------- the cases
def test_one_case_per_preset():
    assert set(CASES) == set(PLANTED) == set(with_boards())


@pytest.mark.parametrize("case", CASES)
def test_a_case_sets_only_what_its_preset_has(case):
    """What the preset leaves off stays off; DEVICE_BATCH_SIZE=0 means as many as fit, an empty schedule the
    preset's own stages."""
    preset = train_gpt.preset_config(case)
    cfg = train_gpt.load_config(settings_of(case, 50))
    planted, value = PLANTED[case]
    turned_on = []
    for name in [*CASES[case], planted]:
        field = names_of(case)[name]
        own_stages = field.endswith("_schedule") and getattr(preset, field) == ()
        if getattr(preset, field) in OFF and field != "device_batch_size" and not own_stages:
            turned_on.append(name)
    assert turned_on == []
    changed = train_gpt.load_config(settings_of(case, 50) | {planted: value})
    planted = names_of(case)[planted]
    assert getattr(changed, planted) != getattr(cfg, planted)


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
# A tree whose train_gpt.py takes no time: it leaves the run behind that the environment asks for.
TREE = """
import os, shutil
name, value = {planted!r}
run = "planted" if os.environ.get(name) == value else "plain"
shutil.copytree("{home}/" + run, "logs/run")
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory, one_thread):
    """A folder with two runs of golf as its case has it, `plain` and `again`, one with the planted change,
    `planted`, and `tree`, which leaves plain or planted behind."""
    home = tmp_path_factory.mktemp("compared")
    compare_trees.write_data(home)
    name, value = PLANTED["golf"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        for run in ("plain", "again", "planted"):
            settings = settings_of("golf", STEPS)
            if run == "planted":
                settings[name] = value
            assert train_gpt.main([], settings) == 0
            shutil.move("logs/run", run)
    write_tree(home / "tree", TREE.format(planted=(name, value), home=home))
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
    shutil.copytree(home / run, folder / "logs/run")
    return folder, compare_trees.read_run(folder)


def test_the_same_and_a_planted_change(home, capsys):
    code, lines = compared(capsys, home / "tree", home / "tree", "--planted")
    assert code == 0
    same, planted, *totals = lines
    assert same.startswith("golf 1 rank: identical: 12 train losses, 3 val losses, ")
    assert "artifact of" in same and " bytes (" in same and "not its bytes" not in same
    name, value = PLANTED["golf"]
    assert planted.startswith(f"golf planted {name}={value}: DIFFERENT: artifact tensor ")
    assert totals[:2] == ["1 of 1 are identical", "1 of 1 planted changes were reported"]


def test_a_change_that_is_not_reported_fails(home, tmp_path, capsys):
    """Of a tree that ignores the planted constant."""
    write_tree(tmp_path / "deaf", TREE.format(planted=("", ""), home=home))
    code, lines = compared(capsys, home / "tree", tmp_path / "deaf", "--planted")
    assert code == 1
    assert lines[-2] == "0 of 1 planted changes were reported"


def test_a_difference_fails(home, capsys):
    code, lines = compared(capsys, home / "tree", home / "tree", "--after-env", "=".join(PLANTED["golf"]))
    assert code == 1
    assert "DIFFERENT" in lines[0] and lines[1] == "0 of 1 are identical"


def test_two_runs_are_identical(home, tmp_path):
    """Each trained by itself."""
    _, plain = finished(home, "plain", tmp_path)
    _, again = finished(home, "again", tmp_path)
    assert plain.artifact and len(plain.train_losses) == STEPS
    assert compare_trees.first_difference(plain, again, {}) == ""


def test_each_thing_that_is_compared(home, tmp_path):
    """One number changed in each, by as little as there is."""
    folder, before = finished(home, "plain", tmp_path)

    def difference():
        return compare_trees.first_difference(before, compare_trees.read_run(folder), {})

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
    shutil.copy(home / "plain/final_model.pt", run)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for kind, step in (("train", 7), ("val", STEPS)):
        (event,) = [event for event in events if event["kind"] == kind and event["step"] == step]
        loss = event[f"{kind}_loss"]
        event[f"{kind}_loss"] = loss * (1 + 2**-52)
        (run / "events.jsonl").write_text("".join([json.dumps(one) + "\n" for one in events]))
        assert difference().startswith(f"{kind}_loss step {step}: ")
        event[f"{kind}_loss"] = loss


def test_artifacts_whose_payloads_say_something_else(home, tmp_path):
    """Then their bytes may differ, their tensors may not; with the same payload the bytes count."""
    folder, before = finished(home, "plain", tmp_path)
    path, = (folder / "logs/run").glob("final_model.*.ptz")
    payload = compare_trees.unpack(path.read_bytes())
    loosely = zlib.compress(raw_bytes(payload), 1)
    path.write_bytes(loosely)
    same = "artifact: the tensors are the same, the bytes are not"
    assert compare_trees.first_difference(before, compare_trees.read_run(folder), {}) == same
    path.write_bytes(zlib.compress(raw_bytes(payload | {"recipe": "golf"}), 1))
    assert compare_trees.first_difference(before, compare_trees.read_run(folder), {}) == ""
    path.unlink()
    found = compare_trees.first_difference(before, compare_trees.read_run(folder), {})
    assert found.startswith("artifact tensor ") and found.endswith(" is only before")


def raw_bytes(payload):
    buffer = train_gpt.io.BytesIO()
    torch.save(payload, buffer)
    return buffer.getvalue()


# ---------- smaller parts
COMPRESSORS = dict(zlib=zlib.compress, lzma=lzma.compress, brotli=train_gpt.shuffle_and_compress)


@pytest.mark.parametrize("kind", COMPRESSORS)
@pytest.mark.parametrize("odd", [0, 1])
def test_artifacts_are_unpacked(kind, odd):
    raw = raw_bytes({"tensors": {"w": torch.arange(100)}}) + odd * b"\0"
    assert compare_trees.decompress(COMPRESSORS[kind](raw)) == raw


def test_bits_are_compared():
    difference = compare_trees.tensor_difference
    nan = torch.tensor([float("nan"), 1.0])
    assert difference(nan, nan.clone()) == ""
    assert difference(torch.tensor(0.0), torch.tensor(-0.0)) == (
        "0.0 before, -0.0 after at [], the first of 1 of 1 numbers")
    assert "float16" in difference(torch.zeros(2), torch.zeros(2).half())
    assert "(3,)" in difference(torch.zeros(2), torch.zeros(3))


def test_renamed_parameters():
    old = {"embed": torch.ones(2, 3), "blocks.0.layer_scale": torch.tensor([[1.0], [2.0]]),
           "blocks.0.query.int8": torch.zeros(1), "rescale": torch.ones(1)}
    new = compare_trees.after_names(old, {"layer_scale": ["attn_scale", "mlp_scale"], "query": ["attn.q"],
                                          "scale": ["never"]})
    assert list(new) == ["embed", "blocks.0.attn_scale", "blocks.0.mlp_scale", "blocks.0.attn.q.int8",
                         "rescale"]
    assert new["blocks.0.mlp_scale"].tolist() == [2.0]


@pytest.mark.parametrize("code, words", [
    ("print('train_gpt: no such constant')\nraise SystemExit(2)", "exit code 2\n    train_gpt: no such"),
    ("import os\nos.mkdir('x')\n1 / 0", "exit code 1\n    Traceback"),
    ("import time\ntime.sleep(60)", "no end after 0.3 s")])
def test_runs_that_fail(code, words, tmp_path, capsys):
    """Are neither identical nor a planted change that was reported."""
    write_tree(tmp_path / "tree", code)
    timeout = "0.3" if "sleep" in code else "30"
    code, lines = compared(capsys, tmp_path / "tree", tmp_path / "tree", "--planted", "--timeout", timeout)
    assert code == 1
    assert words in "\n".join(lines)
    assert lines[-3:-1] == ["0 of 1 are identical", "0 of 1 planted changes were reported"]


@pytest.mark.parametrize("words, sentence", [
    (["--presets", "golff"], "golff is none of tiny"), (["--steps", "13"], "even and at least 12"),
    (["--env", "EVAL_SLIDING"], "not of the form NAME=value"), ([], "there is no train_gpt.py in nowhere")])
def test_arguments_are_checked(words, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit):
        compare_trees.main([str(tmp_path / "nowhere"), str(tmp_path), *words])
    assert sentence in capsys.readouterr().err
