"""./run.sh gpu-report: its rehearsal on a CPU, what it says of planted faults, and the page of results."""

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train_gpt
from helpers import ROOT, SCRIPT, run_cli, wait_until
from tools.dev import bench
from tools.gpu import parts as gpu_parts
from tools.gpu import plan as gpu_plan
from tools.gpu import report as gpu_report
from tools.gpu import results as gpu_results
from tools.gpu import seen_on_gpu
from tools.gpu import static as static_gpu

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def report(tmp_path):
    return gpu_parts.Report(tmp_path / "events.jsonl", "numbers", "speedrun")


def read(report):
    """[(verdict, text)] in the file of a part, or of a whole report."""
    if report.path.suffix == ".json":
        rows = json.loads(report.path.read_text())["verdicts"]
    else:
        lines = report.path.read_text().splitlines() if report.path.exists() else []
        rows = [row for row in map(json.loads, lines) if "verdict" in row]
    return [(row["verdict"], row["text"]) for row in rows]


def planted(folder, old, new):
    """train_gpt.py with one change, as a module; in a folder, for --trainer."""
    source = SCRIPT.read_text(encoding="utf-8")
    assert source.count(old) == 1, old
    path = folder / "train_gpt.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("train_gpt_planted", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt_planted"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def measured(report, tmp_path, monkeypatch):
    """The report's verdicts on some parts of a toy, by a trainer."""

    def go(trainer, *only, **given):
        monkeypatch.setattr(bench, "train_gpt", trainer)
        monkeypatch.setattr(gpu_parts, "LOSSES", 3)
        settings = gpu_parts.one_rank_of_eight(trainer, "speedrun", dict(COMPILE="0") | given, toy=True)
        data = bench.random_data(tmp_path, trainer.load_config(settings), 1 << 20)
        settings |= data | dict(MAX_WALLCLOCK_SECONDS="0", VAL_LOSS_EVERY="0", MAX_EPOCHS="0")
        subject = gpu_parts.Subject(trainer, bench, report, settings, True)
        for part in only:
            gpu_parts.measure(subject, part)
        return read(report)

    yield go
    sys.modules.pop("train_gpt_planted", None)


# ---------- the file
@pytest.fixture
def whole(tmp_path):
    """The report that the command keeps."""
    return gpu_plan.Report(tmp_path / "report.json", True, 2, "abc", "2026-12-01T10:00:00+00:00")


def part_of(name="numbers", preset="golf", seconds=1.0, GiB=1.0):
    return gpu_plan.Part(name, preset, seconds, GiB, "guess")


def test_the_file_is_valid_whenever_the_report_is_killed(whole, monkeypatch):
    """It is replaced as a whole, after each verdict."""
    whole.say(part_of(), "ok", "first", number=1)
    assert read(whole) == [("ok", "first")]

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        whole.say(part_of(), "ok", "second")
    assert read(whole) == [("ok", "first")] and not json.loads(whole.path.read_text())["complete"]
    monkeypatch.undo()
    assert gpu_report.conclude(whole, complete=True) == 0 and json.loads(whole.path.read_text())["complete"]


def test_what_fails_is_a_verdict_and_the_part_goes_on(report):
    def broken():
        raise RuntimeError("no kernel image\nmore")

    assert report.attempt("loss", broken) is None and report.attempt("next", lambda: 3) == 3
    assert read(report) == [("FAULT", "loss: RuntimeError: no kernel image")]
    assert report.rows[0]["figures"]["last_lines"][-1] == "more"


def test_an_illegal_access_ends_the_part(report):
    """Every later call of the process would fail, too."""
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(SystemExit) as end:
        report.attempt("loss", broken)
    assert end.value.code == 0
    assert [verdict for verdict, _ in read(report)] == ["FAULT", "skip"]


# ---------- the plan
@pytest.fixture
def carried_out(whole, tmp_path):
    """Runs parts whose processes are one line of Python each: {name: code}, which finds say() -> verdicts."""
    helper = """
import json, os, signal, sys, time
def say(told, **more):
    row = dict(part="x", preset="", verdict="ok", text=told, figures={})
    with open("events", "a") as file:
        file.write(json.dumps(row if not more else more) + "\\n")
"""

    def command_of(codes, part):
        folder = tmp_path / part.name().replace(" ", "_")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        words = [sys.executable, "-IS", "-c", helper + codes[part.name()]]
        return gpu_plan.Command(words, folder, dict(os.environ), folder / "output", folder / "events",
                                json.loads, lambda job: None)

    def go(parts, codes, GiB=8.0, most=2):
        whole.parts = parts
        gpu_plan.carry_out(whole, lambda part: command_of(codes, part), most, lambda: GiB)
        return read(whole)

    return go


def test_a_part_that_dies_or_hangs_spoils_no_other(carried_out, whole, monkeypatch):
    """By a signal, by a limit on its time, by an exit code; each with its last lines and where it was."""
    monkeypatch.setattr(gpu_plan, "LEAST_LIMIT_ON_A_CPU", 1.0)
    seconds = dict(dies=20.0, hangs=0.2, fails=20.0, works=20.0)    # only what hangs has a short limit
    parts = [part_of("numbers", name, expected) for name, expected in seconds.items()]
    found = carried_out(parts, {
        "dies numbers": "say('before'); say('', doing='a kernel'); os.kill(os.getpid(), signal.SIGSEGV)",
        "hangs numbers": "print('here I am', flush=True); time.sleep(60)",
        "fails numbers": "print('one'); print('two'); sys.exit(3)",
        "works numbers": "say('fine')"})
    texts = sorted([text for verdict, text in found if verdict == "FAULT"])
    assert texts[0] == "numbers: ended by SIGSEGV, at: a kernel"
    assert texts[1] == "numbers: exit code 3, at: starting"
    assert re.match(r"numbers: stopped after \d+ s", texts[2])
    assert {("ok", "before"), ("ok", "fine")} <= {*found} and len(texts) == 3
    assert [part.state for part in parts] == ["failed", "stopped", "failed", "done"]
    assert parts[1].last_lines == ["here I am"] and parts[2].last_lines == ["one", "two"]


def test_a_part_that_lacks_memory_beside_others_runs_again_alone(carried_out, tmp_path):
    """Both by a verdict and by its end; alone it is a fault."""
    fault = "say('', part='x', preset='', figures={}, verdict='FAULT', text='CUDA out of memory')"
    once = f"first = not os.path.exists('../once'); open('../once', 'a'); first and {fault}"
    parts = [part_of("train", "a"), part_of("train", "b"), part_of("train", "c")]
    found = carried_out(parts, {
        "a train": once, "b train": "time.sleep(0.5)",
        "c train": "print('train_gpt: out of memory: lower it'); sys.exit(1)"}, GiB=8.0, most=3)
    notes = [text for verdict, text in found if verdict == "note"]
    faults = [text for verdict, text in found if verdict == "FAULT"]
    assert len(notes) == 2 and all("once more, alone" in text for text in notes), found
    assert len(faults) == 1 and faults[0].startswith("train: exit code 1"), found
    assert [part.state for part in parts] == ["done", "done", "failed"]
    assert [part.again for part in parts] == [True, False, True]


def test_the_score_of_a_run_that_failed_after_writing_its_file(tmp_path):
    """Its training is a fault by itself; the score is told, and the report goes on."""
    said = []
    report = SimpleNamespace(say=lambda part, *words, **figures: said.append(words))
    command = SimpleNamespace(folder=tmp_path / "golf_score", env=dict(EVAL_FROM="final_model.pt"))
    job = SimpleNamespace(part=part_of("score", "golf"), report=report, command=command)
    workshop = SimpleNamespace(folder=tmp_path)
    for folder, loss in [("golf_score", 6.5), ("golf_train", 6.75)]:
        run = tmp_path / folder / "logs" / "golf"
        run.mkdir(parents=True)
        (run / "result.json").write_text(json.dumps(dict(trained=dict(val_loss=loss))))
    gpu_report.judge_score(workshop, job)
    (tmp_path / "golf_train" / "logs" / "golf" / "result.json").unlink()
    gpu_report.judge_score(workshop, job)
    assert [verdict for verdict, _ in said] == ["FAULT", "note"]
    assert "6.5000 in a process of its own; the run said 6.7500" in said[0][1]
    assert "6.5000 in a process of its own; train failed before its own score" in said[1][1]


def test_timed_parts_run_alone_and_others_side_by_side(carried_out, tmp_path):
    """Each notes when it began and ended; those of one preset are never together, nor more than fit. Of the
    two that may be together each waits up to a minute until the other has begun."""
    code = "other = dict(a_train='../b_train/begun', b_train='../a_train/begun').get(NAME, '.'); " \
        "began = time.time(); open('begun', 'w').close(); " \
        "[time.sleep(0.01) for _ in range(6000) if not os.path.exists(other)]; " \
        f"time.sleep(0.4); log = open({str(tmp_path / 'log')!r}, 'a'); " \
        "log.write(f'{NAME} {began} {time.time()}\\n')"
    parts = [part_of("train", "a", GiB=3), part_of("train", "b", GiB=3), part_of("numbers", "c", GiB=6),
             part_of("loop", "a"), part_of("loop", "b")]
    carried_out(parts, {part.name(): f"NAME = '{part.preset}_{part.part}'; {code}" for part in parts})
    rows = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    times = {name: (float(began), float(ended)) for name, began, ended in rows}

    def together(a, b):
        return times[a][0] < times[b][1] and times[b][0] < times[a][1]

    assert len(times) == 5 and together("a_train", "b_train")
    for name in ("a_train", "b_train", "a_loop", "b_loop"):
        assert not together("c_numbers", name)
    assert not together("a_loop", "b_loop")


def test_a_part_of_a_preset_that_still_trains_lets_others_pass():
    """It would compile again what is being compiled."""
    running = [part_of("train", "golf")]
    waiting = [part_of("numbers", "golf"), part_of("numbers", "tiny"), part_of("loop", "tiny")]
    assert gpu_plan.next_part(waiting, running, 8, 4) is waiting[1]
    assert gpu_plan.next_part(waiting[::2], running, 8, 4) is None    # timed
    assert gpu_plan.next_part(waiting, [part_of("score", "golf")], 8, 4) is waiting[0]
    assert gpu_plan.next_part(waiting, [part_of("loop", "tiny")], 8, 4) is None
    assert gpu_plan.next_part(waiting[2:], [], 0, 4) is waiting[2]


def test_what_will_not_fit_is_said_before_and_skipped_then(carried_out, whole):
    whole.seconds = 100
    parts = [part_of("train", "golf", 60, 8), part_of("train", "gpt2", 70, 8), part_of("loop", "golf", 30)]
    lines = gpu_plan.tell_plan(parts, 8, 2, 100 / 60)
    assert "3 parts" in lines[0] and lines[1] == "will not fit: gpt2 train"
    ends = [(part.name(), end) for part, end in gpu_plan.foreseen(parts, 8, 2, 100 / 60)]
    assert ends == [("golf train", 60.0), ("golf loop", 90.0), ("gpt2 train", -1.0)]
    whole.seconds = 40
    parts = [part_of("train", "golf", 60), part_of("loop", "golf", 30)]
    found = carried_out(parts, {"golf loop": "say('ran')"})
    assert found[0] == ("ok", "ran") and found[1][0] == "skip" and "needs about 60 s" in found[1][1]


def test_kinds_leave_time_for_those_after_them():
    """Trains have 67 of 100 s here; what was put off gets what is left in the end."""
    parts = [part_of("train", "golf", 30, 8), part_of("train", "tiny", 35, 8),
             part_of("train", "gpt2", 10, 8), part_of("loop", "golf", 20)]
    found = [(part.name(), end) for part, end in gpu_plan.foreseen(parts, 8, 2, 100 / 60)]
    assert found == [("golf train", 30.0), ("tiny train", 65.0), ("golf loop", 85.0), ("gpt2 train", 95.0)]
    assert gpu_plan.latest_ends(parts[:3], 100)["train"] == 100


def test_training_counts_for_less_memory_side_by_side():
    """It compiles most of the time."""
    trains = [part_of("train", "tiny", 60, 6)]
    assert gpu_plan.next_part([part_of("train", "golf", 60, 6)], trains, 8, 4)
    assert not gpu_plan.next_part([part_of("numbers", "golf", 60, 6)], trains, 8, 4)
    assert not gpu_plan.next_part([part_of("train", "golf", 60, 8)], trains, 8, 4)


def test_the_plan_knows_what_earlier_reports_took(tmp_path):
    """Of the same kind, of parts that were done; a file that is no report is passed over."""
    row = dict(part="loop", preset="golf", state="done", seconds=12.5, GiB=8.0, peak_GiB=9.5)
    rows = [row, row | dict(preset="tiny", state="failed")]
    disturbed = dict(toy=False, side_by_side=True, parts=[row | dict(seconds=99.0)])
    for name, content in (("a.json", dict(toy=False, parts=rows)), ("b.json", [1]),
                          ("d.json", dict(toy=False)),
                          ("c.json", dict(toy=True, parts=[row | dict(seconds=1.0)])),
                          ("e.json", disturbed)):
        (tmp_path / name).write_text(json.dumps(content))
    earlier = gpu_plan.earlier_needs([*sorted(tmp_path.glob("*.json")), tmp_path / "gone"], toy=False)
    assert earlier == {("loop", "golf"): gpu_plan.Need(12.5, 9.5, "measured: a.json")}
    golf, tiny = gpu_plan.make_plan(["tiny", "golf"], ["loop"], earlier, False)[::-1]
    assert (golf.expected_s, golf.GiB) == (12.5, 9.5) and tiny.source == "guess"


def test_the_report_that_is_replaced_is_read_first(tmp_path, monkeypatch):
    """Its file is written anew when the report begins; the plan expects what its parts took."""
    path = tmp_path / "report.json"
    row = dict(part="loop", preset="golf", state="done", seconds=12.0, GiB=5.0, peak_GiB=6.5)
    path.write_text(json.dumps(dict(toy=False, parts=[row])))
    known = []
    monkeypatch.setattr(gpu_report, "measure", lambda *args: known.append(args[-1]))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    gpu_report.main(["golf", "--only", "loop", "--json", str(path)])
    assert known[0]["loop", "golf"] == gpu_plan.Need(12.0, 6.5, "measured: report.json")


def test_the_table_of_needs_has_every_part_and_names_its_sources():
    wanted = {(part, preset) for part in gpu_plan.OF_A_PRESET for preset in train_gpt.RECIPES}
    assert wanted | {("environment", ""), ("ranks", "")} == {*gpu_plan.NEEDS}
    assert [*gpu_plan.PRESETS] == sorted(train_gpt.RECIPES, key=gpu_plan.PRESETS.index)
    assert all(need.source.startswith(("guess", "measured")) for need in gpu_plan.NEEDS.values())


@pytest.fixture
def workshop(tmp_path):
    return gpu_report.Workshop(train_gpt, bench, gpu_parts, gpu_report.parse([]), tmp_path)


def on_a_card(GiB):
    return SimpleNamespace(found=dict(machine=dict(memory_GiB=GiB, capability=[9, 0])))


def test_golf_keeps_its_learning_rates_in_the_first_half_of_the_run(workshop):
    cfg = train_gpt.load_config(workshop.train_settings(on_a_card(80), "golf"))
    assert [cfg.schedule(step, step / cfg.iterations).lr for step in (1, 9, 10, 15)] == [1, 1, 1, 0.5]


def test_rows_at_a_time_are_what_fits_into_the_card(workshop):
    """Unless they are given; the trainer by itself would take an eighth of the step."""
    rows = {}
    for GiB in (40, 80):
        workshop.settings.clear()
        rows[GiB] = int(workshop.settings_of(on_a_card(GiB), "gpt2")["DEVICE_BATCH_SIZE"])
    assert 1 <= rows[40] < rows[80]
    workshop.settings.clear()
    workshop.args.given = dict(DEVICE_BATCH_SIZE="3")
    assert workshop.settings_of(on_a_card(80), "gpt2")["DEVICE_BATCH_SIZE"] == "3"


KILLED = """
import sys
sys.path.insert(0, {root!r})
from tools.gpu import plan as gpu_plan
from pathlib import Path
report = gpu_plan.Report(Path("report.json"), True, 2, "", "")
report.parts = [gpu_plan.Part("train", name, 1.0, 1.0, "guess") for name in "abcdef"]
def command_of(part):
    folder = Path(part.preset)
    folder.mkdir()
    code = "import time; time.sleep(" + dict(a="0.1", b="0.2", c="0.3").get(part.preset, "600") + ")"
    env = dict(MARK={mark!r})
    return gpu_plan.Command([sys.executable, "-IS", "-c", code], folder.resolve(), env, folder / "output",
                            folder / "events", lambda line: None,
                            lambda job: report.say(part, "ok", "ran"))
gpu_plan.carry_out(report, command_of, 2, lambda: 8.0)
"""


def marked(mark):
    """Processes that have it in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"MARK={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:     # it has ended, or is somebody else's
            continue
    return found


def parts_in(path):
    """The rows of a report's file; none before there is one."""
    return json.loads(path.read_text())["parts"] if path.exists() else []


@pytest.mark.parametrize("seconds", [0.0, 0.25, 0.8])
def test_killed_it_leaves_a_valid_file_and_nothing_running(seconds, tmp_path):
    """By SIGKILL, at three moments."""
    mark = f"{os.getpid()}_{seconds}"
    script = KILLED.format(root=str(ROOT), mark=mark)
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_until(lambda: marked(mark) and parts_in(tmp_path / "report.json"))
    time.sleep(seconds)
    wait_until(lambda: marked(mark))    # one may just have ended and the next not begun
    process.kill()
    process.wait()
    found = json.loads((tmp_path / "report.json").read_text())
    assert not found["complete"] and [part["part"] for part in found["parts"]] == ["train"] * 6
    wait_until(lambda: not marked(mark))


def test_a_terminated_report_ends_its_parts(carried_out, whole, monkeypatch):
    """And says so in its file."""
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    part = part_of("train", "golf")
    with pytest.raises(KeyboardInterrupt):
        carried_out([part], {"golf train": "time.sleep(60)"})
    assert json.loads(whole.path.read_text())["parts"][0]["state"] == "stopped"


# ---------- the machine
@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(driver="550.54", cuda="13.0"), "driver 550.54 is too old"),
        (dict(driver="580.65", cuda="13.0"), ""),
        (dict(driver="550.54", cuda="12.6"), ""),
        (dict(compiler=""), "no C compiler"),
    ],
)
def test_environment(settings, words, report, monkeypatch):
    monkeypatch.setattr(gpu_parts, "driver_version", lambda: settings.get("driver", ""))
    monkeypatch.setattr(torch.version, "cuda", settings.get("cuda"))
    monkeypatch.setattr(gpu_parts.shutil, "which", lambda name: settings.get("compiler", name))
    gpu_parts.environment(report, train_gpt, True)
    faults = [text for verdict, text in read(report) if verdict == "FAULT"]
    if words:
        (fault,) = faults
        assert fault.startswith(words)
    else:
        assert not faults


def test_another_torch_than_static_compiled_for_is_noted(report, monkeypatch):
    asked = re.search(r"^torch==(\S+)", (ROOT / "requirements.txt").read_text(), re.M)[1]
    for version, noted in ((f"{asked}+cu130", False), ("9.9.9", True)):
        monkeypatch.setattr(torch, "__version__", version)
        report.path.unlink(missing_ok=True)
        gpu_parts.environment(report, train_gpt, True)
        assert any(f"asks for torch {asked}" in text for _, text in read(report)) == noted


def test_what_to_expect_is_what_the_page_says():
    page = (ROOT / "docs/first_gpu.md").read_text(encoding="utf-8")
    table = page.partition("What to expect on 8xH100")[2].partition("So golf")[0]
    for preset, pairs in gpu_parts.EXPECTED.items():
        (line,) = [line for line in table.splitlines() if line.startswith(f"| {preset}")]
        cells = [re.sub(r"\(.*\)", "", cell).split(",") for cell in line.split("|")[2:4]]
        assert [*zip(*[[float(number) for number in cell] for cell in cells])] == pairs


def test_documents_are_cut_where_the_recipe_cuts_them():
    cfg = train_gpt.preset_config("speedrun", dict(vocab_size=1024, bos_id=1, max_doc_len=256))
    run = SimpleNamespace(cfg=cfg, micro=1, team=SimpleNamespace(device="cpu"))
    tokens = gpu_parts.random_tokens(run, SimpleNamespace(batch_tokens=16_384, row_tokens=16_384))
    begins = torch.cat((torch.nonzero(tokens[0] == 1)[:, 0], torch.tensor([16_384])))
    lengths = begins.diff()
    assert begins[0] == 0 and lengths.max() == 256 and lengths.min() < 200


# ---------- the reference, and planted faults
@pytest.mark.parametrize(
    "window, with_documents, heads", [(5, True, (2, 2)), (64, False, (4, 2)), (17, False, (2, 1))]
)
def test_the_exact_attention_is_that_of_the_trainer(window, with_documents, heads):
    """In fp64 both, over slices that end within a window and within a row."""
    T = 50
    documents = torch.stack([torch.arange(T) // 7, torch.arange(T) // 20]) if with_documents else None
    draw = torch.Generator().manual_seed(0)
    H, KV = heads
    shapes = ((2, H, T, 8), (2, KV, T, 8), (2, KV, T, 8), (2, H, T, 8))
    q, k, v, grad = [torch.randn(shape, generator=draw) for shape in shapes]
    call = gpu_parts.Call(tuple(q.shape), tuple(k.shape), tuple(v.shape), window, documents)
    got = gpu_parts.exact_attention(call, q, k, v, grad, 16)
    mask = train_gpt.window_mask(window, T, documents, q.device)
    want = gpu_parts.with_gradients(lambda q, k, v: train_gpt.attention(q, k, v, mask), [q, k, v], grad)
    assert max(gpu_parts.relative_errors(got, want)) < 1e-6


SCALE = "scaled_mm(grad, w.t(), scale_g, scale_w), scaled_mm(grad_t"
LOSS = "error * part * (1 - part) * (top * scale * factor)"
ATTENTION = "    scores = ((q @ k.mT).float() * scale)"


@pytest.mark.parametrize(
    "old, new, words",
    [
        pytest.param(SCALE, SCALE.replace("scale_w", "1.2 * scale_w"), "fp8 products", id="fp8"),
        pytest.param(
            LOSS, LOSS.replace("* scale *", "* 0.8 * scale *"), "loss of", id="loss", marks=pytest.mark.slow
        ),
        pytest.param(
            ATTENTION,
            ATTENTION.replace("* scale)", "* 1.1 * scale)"),
            "attention 2x32",
            id="attention",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_wrong_scale_is_named(old, new, words, measured, tmp_path):
    found = measured(planted(tmp_path, old, new), "numbers", WINDOW_PATTERN="L", NUM_LAYERS="1")
    faults = [text for verdict, text in found if verdict == "FAULT"]
    assert faults and all("off from fp32" in text for text in faults), found
    assert any(text.startswith(words) for text in faults), found


def judged(losses, fp8, report, monkeypatch, vocab_size=512):
    """The verdicts on compiled and eager losses of a step in fp8 or bf16."""
    losses = [*losses]
    monkeypatch.setattr(gpu_parts, "train_steps", lambda *_: losses.pop(0))
    monkeypatch.setattr(gpu_parts, "begin_anew", lambda *_: None)
    cfg = SimpleNamespace(vocab_size=vocab_size, fp8_part=lambda on_gpu: fp8, train_seq_len=4)
    if fp8 is None:
        del cfg.fp8_part
    model = SimpleNamespace(use=lambda kernels: None, head=torch.zeros(4), candidates=lambda *_: [],
                            kernels=None)
    team = SimpleNamespace(on_gpu=True, device="cpu")
    run = SimpleNamespace(model=model, cfg=cfg, loss_fn=None, team=team)
    gpu_parts.first_losses(gpu_parts.Subject(train_gpt, bench, report, {}, True), run)
    return [verdict for verdict, _ in read(report)]


@pytest.mark.parametrize("off, fp8, verdicts", [
    ([0.004, 0, 0], "off", ["ok", "ok"]), ([0.006, 0, 0], "off", ["FAULT", "ok"]),
    ([0, 0.1, 0], "off", ["ok", "FAULT"]), ([0, 0.1, 0], "head", ["ok", "ok"]),
    ([0, 0.1, 0], None, ["ok", "FAULT"]), ([0, 0.2, 0.2], "all", ["ok", "FAULT"]),
    ([math.nan, 0, 0], "off", ["FAULT", "FAULT"])])
def test_losses_that_are_off_are_named(off, fp8, verdicts, report, monkeypatch):
    """The one at step 0 from log of the vocabulary, all of them from the eager ones. None: a recipe without
    fp8."""
    eager = [math.log(512), 6.2, 6.1]
    losses = [[loss + more for loss, more in zip(eager, off)], eager]
    assert judged(losses, fp8, report, monkeypatch) == verdicts


def losses_on_a_card(preset):
    """[losses compiled, eager] that a card gave."""
    path = ROOT / "docs" / "gpu_results" / f"2026-11-26_{preset}.json"
    rows = json.loads(path.read_text())["verdicts"]
    (figures,) = [row["figures"] for row in rows if "eager" in row["figures"]]
    return [figures["compiled"], figures["eager"]]


@pytest.mark.parametrize("preset, fp8, vocab_size", [("speedrun", "head", 50_304), ("golf", "off", 1024)])
def test_the_losses_that_a_card_gave_are_judged_by_what_the_step_runs_in(preset, fp8, vocab_size, report,
                                                                         monkeypatch):
    """They are fine; taken for bf16 the speedrun's would not be, and a model that stands still is neither."""
    compiled, eager = losses_on_a_card(preset)
    assert judged([compiled, eager], fp8, report, monkeypatch, vocab_size)[1] == "ok"
    assert judged([compiled, eager], "off", report, monkeypatch, vocab_size)[3] == (
        "FAULT" if fp8 == "head" else "ok")
    assert judged([50 * [compiled[0]], eager], fp8, report, monkeypatch, vocab_size)[5] == "FAULT"


def test_an_init_is_drawn_once_in_a_process():
    """At depth 26 that takes 13 s. Another model or seed is another draw."""
    drawn = []
    trainer = SimpleNamespace(init_parameters=lambda model, seed: drawn.append((model, seed)) or [seed])
    gpu_parts.init_drawn_once(trainer)
    model = SimpleNamespace()
    other = SimpleNamespace()
    assert trainer.init_parameters(model, 1) is trainer.init_parameters(model, 1)
    trainer.init_parameters(model, 2)
    trainer.init_parameters(other, 2)
    assert drawn == [(model, 1), (model, 2), (other, 2)]


@pytest.mark.slow
def test_numbers_of_a_toy_are_fine(measured):
    """And the loss at step 0 is what it must be."""
    found = measured(train_gpt, "numbers", "losses")
    assert [verdict for verdict, _ in found] == ["ok"] * 6 + ["note"], found
    expected = f"{math.log(512):.4f}"
    assert found[4][1] == f"loss at step 0: {expected}; expected {expected}, log 512, on any text"


@pytest.mark.parametrize("dtype, linear, first", [
    (torch.bfloat16, train_gpt.linear, "one"), (torch.float32, train_gpt.linear, "three"),
    (torch.bfloat16, train_gpt.fp8_linear, "three")])
def test_the_first_of_the_products_is_in_use(dtype, linear, first, monkeypatch):
    """And both are the same queries, keys and values."""
    taken = []
    monkeypatch.setattr(gpu_parts, "compare", lambda *args: taken.append(args))
    monkeypatch.setattr(gpu_parts, "last_stage", lambda run: SimpleNamespace(row_tokens=6))
    call = SimpleNamespace(q=(1, 4, 6, 8), k=(1, 2, 6, 8), v=(1, 2, 6, 8))
    run = SimpleNamespace(team=SimpleNamespace(dtype=dtype, device=torch.device("cpu")),
                          cfg=SimpleNamespace(model_dim=16),
                          model=SimpleNamespace(kernels=train_gpt.Kernels(linear)))
    gpu_parts.products(SimpleNamespace(trainer=train_gpt), run, [(call, 3)], 2)
    ((_, _, what, options, inputs, times),) = taken
    assert [option.name for option in options][0] == first and (what[:9], times) == ("q, k and ", 6)
    values = [option.function(*inputs) for option in options]
    assert values[0].shape == (6, 64)
    torch.testing.assert_close(*values, rtol=0.02, atol=0.02)


def test_a_slow_kernel_is_named_with_what_to_set(measured, tmp_path):
    kernel = "cpu_attention = partial(attention, kernel=cpu_kernel)\n"
    slow = "def slow(*args):\n    time.sleep(0.02)\n    return attention(*args, kernel=cpu_kernel)\n\n"
    trainer = planted(tmp_path, kernel, slow + "cpu_attention = slow\n")
    found = measured(trainer, "alternatives")
    named = [text for verdict, text in found if verdict == "set"]
    assert len(named) == 2 and all("attention_kernels" in text and "gains" in text for text in named), found


def test_a_pause_on_the_clock_is_named(measured, tmp_path, monkeypatch):
    """0.5 s, as of a garbage collection."""
    for later in ("kernels", "rank_of_eight"):      # what is measured after the loop
        monkeypatch.setattr(gpu_parts, later, lambda *_: None)
    step = "        # 3. a step and its report\n"
    trainer = planted(tmp_path, step, step + "        time.sleep(0.5 * (step == 17))\n")
    found = measured(
        trainer, "loop", ITERATIONS="30", NUM_LAYERS="1", TRAIN_SEQ_LEN="64", WINDOW_SCHEDULE="32"
    )
    (pause,) = [text for verdict, text in found if verdict == "SLOW"]
    assert re.search(r"pauses on the clock: \d.* 0\.[45]\d s in step 17", pause), found


def test_a_step_with_an_eighth_of_the_optimizer_is_timed_as_such(measured, monkeypatch):
    """It owns an eighth of all moments, updates that share alone, and no process group is asked."""
    seen = []
    real = gpu_parts.own_an_eighth

    def spy(subject, run):
        before = sum(bank.master.numel() for bank in run.optimizer.banks)
        real(subject, run)
        banks = run.optimizer.banks
        seen.append((before, banks, [bank.data.clone() for bank in banks]))

    monkeypatch.setattr(gpu_parts, "own_an_eighth", spy)
    found = measured(train_gpt, "loop", ITERATIONS="12", NUM_LAYERS="1", TRAIN_SEQ_LEN="64",
                     WINDOW_SCHEDULE="32")
    assert not [row for row in found if row[0] == "FAULT"], found
    texts = [text for _, text in found if "with an eighth of the optimizer" in text]
    assert texts and all(re.search(r"optimizer: \d+\.\d ms, collectives as copies$", text) for text in texts)
    ((before, banks, values),) = seen
    mine = sum(bank.master.numel() for bank in banks)
    assert mine < before / 2 and all(8 * bank.master.numel() == bank.data.numel() for bank in banks)
    moved = [bank.data.view(8, -1) != value.view(8, -1) for bank, value in zip(banks, values)]
    assert any(rows[0].any() for rows in moved) and not any(rows[1:].any() for rows in moved)


def test_steps_that_take_longer_in_their_stage_are_no_pause():
    stages = [((1, 1), 10.0)] * 20 + [((3, 3), 30.0)] * 20 + [((3, 3), 75.0)]
    typical = {(1, 1): 10.0, (3, 3): 30.0}
    assert gpu_parts.pauses_in(stages, typical, toy=False) == [(40, 45.0)]
    assert gpu_parts.pauses_in(stages, typical, toy=True) == []


WARMUP_STEP = ("        train_step(run.loss_fn, run.optimizer, batch, micro, context, 1.0, "
               "cfg.schedule(0, 0.0))\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "old, new, late",
    [
        (None, None, False),
        (WARMUP_STEP, "        batch, micro, context\n", True),
        ("    gc.disable()  #", "    gc.set_threshold(1)  #", False),
    ],
    ids=["nothing", "a late communicator", "garbage collected"],
)
def test_the_ranks(old, new, late, tmp_path):
    folder = SCRIPT.parent
    if old:
        planted(tmp_path, old, new)
        sys.modules.pop("train_gpt_planted")
        folder = tmp_path
    done = run_cli(
        tmp_path, "--toy", "--only=ranks", f"--trainer={folder}", script=ROOT / "tools/gpu/report.py"
    )
    rows = json.loads((tmp_path / "gpu_report.json").read_text())["verdicts"]
    rows = [row for row in rows if row["part"] == "ranks"]
    assert [row["verdict"] == "FAULT" for row in rows] == [late, bool(old) and not late], done.out + done.err
    assert not late or any("reduce_scatter" in kind for kind in rows[0]["figures"]["late"])


@pytest.mark.parametrize("words, sentence", [
    (["FP9=off"], "FP9 is no constant"), (["fp8=off"], "fp8 is no constant"), (["bord"], "bord is none of")])
def test_what_is_mistyped_is_refused(words, sentence, tmp_path):
    done = run_cli(tmp_path, *words, script=ROOT / "tools/gpu/report.py")
    assert (done.code, done.out) == (2, "...   importing torch\n")
    assert done.err.startswith(f"gpu-report: {sentence}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_a_fault_whatever_is_asked_for(tmp_path):
    done = run_cli(tmp_path, "--only=loop", script=ROOT / "tools/gpu/report.py")
    assert done.code == 1 and "torch finds no GPU, so no preset was measured" in done.out


# ---------- the whole
def screen_of(text):
    """What the verdicts of a screen are about, without numbers, sorted, since parts run side by side."""
    lines = [line for line in text.splitlines() if re.match(r"(ok|FAULT|SLOW|set|note|skip) ", line)]
    # a machine that does other things, too, has pauses, and by chance another kernel is the faster one
    lines = [line for line in lines if "pauses on the clock" not in line]
    lines = [re.sub("^(ok |set) ", "timed ", line) if ", ms: " in line else line for line in lines]
    return sorted([re.split("[,:]", re.sub(r"[\d.,]*\d", "#", line))[0] for line in lines])


@pytest.mark.slow
def test_the_rehearsal_and_the_screen_in_the_docs(tmp_path):
    """It ends well, and first_gpu.md shows what it prints."""
    done = run_cli(tmp_path, "--toy", script=ROOT / "tools/gpu/report.py", timeout=600)
    assert done.code == 0, done.out + done.err
    page = (ROOT / "docs/first_gpu.md").read_text(encoding="utf-8")
    shown = screen_of(page)
    assert len(shown) > 20 and shown == screen_of(done.out), done.out


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [4, 12, 25])
def test_a_rehearsal_killed_at_a_moment(seconds, tmp_path):
    """Its file is valid, and neither trainers nor compilers go on."""
    mark = f"{os.getpid()}_toy_{seconds}"
    process = subprocess.Popen([sys.executable, ROOT / "tools/gpu/report.py", "--toy"], cwd=tmp_path,
                               env=os.environ | dict(MARK=mark), stdout=subprocess.DEVNULL)
    report = tmp_path / "gpu_report.json"
    wait_until(lambda: [row for row in parts_in(report) if row["state"] == "running"])
    time.sleep(seconds)
    wait_until(lambda: len(marked(mark)) > 1)   # one may just have ended and the next not begun
    assert process.poll() is None
    process.kill()
    process.wait()
    found = json.loads(report.read_text())
    assert not found["complete"] and found["toy"] and found["parts"][0]["state"] in ("running", "done")
    wait_until(lambda: not marked(mark), 20)    # torch's own workers look for their parent now and then


@pytest.mark.static
def test_the_structure_on_the_stand_in(tmp_path):
    """All kernels of a small speedrun launch at a GPU's shapes; nothing fails."""
    library = static_gpu.build(tmp_path)
    words = [
        "speedrun",
        "NUM_LAYERS=3",
        "WINDOW_PATTERN=SLS",
        "SKIP_LAYERS=0",
        "BACKOUT_LAYER=0",
        "MODEL_DIM=256",
        "NUM_HEADS=2",
        "TRAIN_SEQ_LEN=1024",
        "TRAIN_BATCH_TOKENS=8192",
        "VOCAB_SIZE=1024",
    ]
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "tools/gpu/report.py",
            *words,
            "--only",
            "environment,numbers,alternatives,loop",
            "--minutes=60",
        ],
        env=static_gpu.environment(library, static_gpu.CARDS["h100"], 1, tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    rows = json.loads((tmp_path / "gpu_report.json").read_text())["verdicts"]
    faults = [row["text"] for row in rows if row["verdict"] == "FAULT"]
    assert not faults and len(rows) > 12, done.stdout + done.stderr
    assert rows[0]["text"].startswith("NVIDIA H100")


# ---------- the page of results
def result(**settings):
    """A report of one preset, as a GPU would give it."""
    verdicts = [
        dict(
            part="numbers",
            preset="golf",
            verdict="ok",
            text="x",
            figures=dict(most=0.02, output=0.004, loss=0.005),
        ),
        dict(
            part="alternatives",
            preset="golf",
            verdict="set",
            text="x",
            figures=dict(change="TRITON_KERNELS=0"),
        ),
        dict(part="loop", preset="golf", verdict="SLOW", text="pauses | 1", figures={}),
        dict(
            part="loop",
            preset="golf",
            verdict="note",
            text="x",
            figures=dict(tokens=65536, p50=99.87),
        ),
        dict(
            part="loop",
            preset="golf",
            verdict="ok",
            text="x",
            figures=dict(tokens=65536, with_an_eighth=91.2),
        ),
    ]
    machine = dict(gpu="NVIDIA Made Up", driver="999.1", torch="9.9")
    return (
        dict(
            version=1,
            commit="abc",
            toy=False,
            complete=False,
            begun="2026-12-01T10:00:00+00:00",
            machine=machine,
            verdicts=verdicts,
        )
        | settings
    )


def test_the_page_of_results(tmp_path):
    assert gpu_results.page(tmp_path).endswith(gpu_results.NONE)
    (tmp_path / "mine.json").write_text(json.dumps(result()))
    row = gpu_results.page(tmp_path).splitlines()[-1].split(" | ")
    assert row == [
        "| 2026-12-01, abc (mine, ended early)",
        "NVIDIA Made Up, driver 999.1, torch 9.9",
        "golf",
        "65,536: 99.9 (91.2)",
        "25% of what is allowed",
        "none",
        "pauses / 1",
        "TRITON_KERNELS=0",
        " |",
    ]
    (tmp_path / "mine.json").write_text(json.dumps(result(side_by_side=True, remark="beside others")))
    row = gpu_results.page(tmp_path).splitlines()[-1].split(" | ")
    assert row[3] == "not timed: others ran beside it" and row[6:] == [
        "not timed", "TRITON_KERNELS=0", "beside others |"]
    failed = result()
    failed["verdicts"].append(dict(part="numbers", preset="golf", verdict="FAULT", text="off", figures={}))
    (tmp_path / "mine.json").write_text(json.dumps(failed))
    assert gpu_results.page(tmp_path).splitlines()[-1].split(" | ")[5] == "off"
    for errors in (dict(output=0.005, gradient=math.nan), dict(output=math.nan, gradient=0.005)):
        broken = result()
        broken["verdicts"][0]["figures"] = errors | dict(most=0.02)
        (tmp_path / "mine.json").write_text(json.dumps(broken))
        assert gpu_results.page(tmp_path).splitlines()[-1].split(" | ")[4] == "not finite"
    unfinished = result()
    del unfinished["complete"]
    environment = dict(part="environment", preset="", verdict="ok", text="x", figures={})
    for content, words in (
        (json.dumps(unfinished), "no report"),
        (json.dumps(result(verdicts=[environment])), "measured no preset"),
        (json.dumps(result(toy=True)), "rehearsal"),
        ("[1]", "no report"),
        ("{", "no report"),
        (json.dumps(result(machine={})), "no GPU"),
    ):
        (tmp_path / "mine.json").write_text(content)
        with pytest.raises(gpu_results.NoReport, match=words):
            gpu_results.page(tmp_path)


def test_the_page_in_docs_is_what_the_tool_makes():
    page = (ROOT / "docs/gpu_results.md").read_text(encoding="utf-8")
    assert page == gpu_results.page(ROOT / "docs/gpu_results")


def test_a_report_is_added_with_what_it_lacks(tmp_path, capsys):
    """Its machine from the screen of another command. What is no report leaves nothing."""
    file = tmp_path / "report.json"
    screen = tmp_path / "screen.txt"
    folder = tmp_path / "results"
    folder.mkdir()
    file.write_text(json.dumps(result(machine={}, commit="")))
    line = "ok             NVIDIA Card, driver 1.2, torch 2.11.0+cu130, cuDNN 9, Triton 3"
    screen.write_text(f"$ gpu-report\n{line}\n")
    words = ["--add", str(file), "--name", "first"]
    assert gpu_results.main(words, folder) == 2 and "saw no GPU" in capsys.readouterr().err
    assert not [*folder.iterdir()]
    words += ["--environment", str(screen), "--commit", "abc1", "--side-by-side", "--remark", "as it was"]
    assert gpu_results.main(words, folder) == 0
    found = json.loads((folder / "first.json").read_text())
    assert found["machine"]["gpu"] == "NVIDIA Card" and found["machine"]["torch"] == "2.11.0+cu130"
    assert (found["commit"], found["side_by_side"], found["remark"]) == ("abc1", True, "as it was")
    assert "NVIDIA Card, driver 1.2" in folder.with_suffix(".md").read_text()


# ---------- what a card has been seen to run
def test_the_table_is_what_the_reports_show(tmp_path):
    """No row of it was written by hand."""
    rows = []
    for path in sorted((ROOT / "docs/gpu_results").glob("*.json")):
        rows += seen_on_gpu.rows_of(gpu_results.read(path), path.name)
    made = tmp_path / "made.tsv"
    seen_on_gpu.write(rows, made)
    assert made.read_text() == seen_on_gpu.TABLE.read_text(encoding="utf-8") and len(seen_on_gpu.load()) > 10


def test_what_ran_is_seen_and_nothing_else(tmp_path):
    """Operators by their dtypes, whatever their overload and layout; kernels by their families."""
    operators = [dict(operator="aten.mm", dtypes=["bfloat16", "bfloat16"], count=2, how="compiled step",
                      layouts=["contiguous", "transposed"])]
    report = result(operators=dict(golf=operators))
    attention = "attention 8x64, by triton_tem_fused_flex_attention_2: off from fp32 by 1%"
    report["verdicts"][0]["text"] = attention
    report["verdicts"][3]["figures"] = dict(kernels=[dict(name="triton_poi_fused_add_3", ms=1.0, launches=1)])
    file = tmp_path / "r.json"
    table = tmp_path / "seen.tsv"
    file.write_text(json.dumps(report))
    folder = tmp_path / "results"
    folder.mkdir()
    assert gpu_results.main(["--seen", str(file)], folder, table) == 0
    assert [row.operator for row in seen_on_gpu.load(table)] == ["aten.mm", "triton_tem flex_attention"]
    for name in ("aten.mm", "aten.mm.out", "aten::mm", "mm"):
        assert seen_on_gpu.seen(name, ("bfloat16", "torch.bfloat16"), table), name
    assert not seen_on_gpu.seen("aten.mm", ("bfloat16", "float32"), table)
    assert not seen_on_gpu.seen("aten.addmm", ("bfloat16", "bfloat16"), table)
    assert not seen_on_gpu.seen("mm", (), table)
    before = table.read_text()
    assert gpu_results.main(["--seen", str(file)], folder, table) == 0 and table.read_text() == before


@pytest.mark.parametrize("kernel, found", [
    ("nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_splitK_NTN", ("nvjet_sm90_tst", "-", "NTN")),
    ("nvjet_sm90_qrtst_128x160_128x5_1x2_h_bz_coopA_algo2_TNT", ("nvjet_sm90_qrtst", "-", "TNT")),
    ("triton_per_fused__fused_rms_norm_4", None),
    ("triton_tem_fused__unsafe_view_flex_attention_backward_mul_6",
     ("triton_tem flex_attention_backward", "-", "-")),
    ("void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::func_wrapper_t<float, "
     "at::native::sum_functor<float, float, float>",
     ("at::native::reduce_kernel sum_functor", "float32", "-")),
    ("loss_kernel", ("loss_kernel", "-", "-"))])
def test_families_of_kernels(kernel, found):
    assert seen_on_gpu.family(kernel) == found


def operators_of(function):
    with gpu_parts.Recorder("cpu") as recorder:
        function()
    return {(row["operator"], row["dtypes"], row["layouts"]) for row in recorder.rows("here")}


def test_operators_are_recorded_with_dtypes_and_layouts():
    """Of the inputs, not of `out`; lists as one; what launches nothing is left out; other devices, too."""
    a = torch.ones(4, 6, dtype=torch.bfloat16)
    b = torch.ones(4, 8, dtype=torch.bfloat16)

    def function():
        torch.mm(a.t(), b, out=torch.empty(6, 8, dtype=torch.bfloat16))
        torch._foreach_zero_([b, a])
        b[:, ::2].sum()

    found = operators_of(function)
    both = ("bfloat16", "bfloat16")
    assert found == {("aten.mm", both, ("transposed", "contiguous")), ("aten.sum", both[:1], ("strided",)),
                     ("aten._foreach_zero_", ("bfloat16[]",), ("contiguous[]",))}
    with gpu_parts.Recorder("cuda") as recorder:
        function()
    assert recorder.rows("here") == []


@pytest.mark.slow
def test_of_a_compiled_step_only_what_is_not_generated_is_recorded():
    """Forward and backward, without compiling again."""
    a, b = [torch.randn(32, 32, requires_grad=True) for _ in range(2)]
    fast = torch.compile(lambda a, b: (torch.relu(a.t() @ b) * 2).sum(), fullgraph=True, dynamic=False)
    fast(a, b).backward()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found = {operator for operator, *_ in operators_of(lambda: fast(a, b).backward())}
    assert "aten.mm" in found and "aten.relu" not in found and "aten.mul" not in found, found
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
