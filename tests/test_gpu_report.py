"""./run.sh gpu-report: its rehearsal on a CPU, what it says of planted faults, and the page of results."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import alone
import exact
import train_gpt
from helpers import OURS, ROOT, load_module, planted, run_cli, wait_until, with_boards
from tools.dev import bench
from tools.gpu import agenda, seen_on_gpu, training
from tools.gpu import parts as gpu_parts
from tools.gpu import report as gpu_report
from tools.gpu import results as gpu_results
from tools.gpu import stand_in
from tools.gpu.subject import Report, Subject
from tools.run.cards import CARDS

pytestmark = pytest.mark.usefixtures("one_thread")


def planted_trainer(folder, old, new):
    """train_gpt.py with one change, as a module."""
    return load_module(planted(folder, old, new), "train_gpt_planted")


def verdicts_of(report):
    return [(row["verdict"], row["text"]) for row in report.rows]


@pytest.fixture
def measured(tmp_path):
    """The verdicts on a part of a toy, by a trainer; or on what a function of exact.py computes there."""

    def go(trainer, what, **given):
        settings = gpu_parts.one_rank_of_eight(trainer, "speedrun", given, toy=True)
        settings |= bench.random_data(tmp_path / "data", trainer.load_config(settings), 1 << 16)
        settings |= dict(MAX_WALLCLOCK_SECONDS="0", VAL_LOSS_EVERY="0", MAX_EPOCHS="0")
        subject = Subject(trainer, Report(None, "loop", "speedrun"), settings, True)
        if what in (gpu_parts.kernels, gpu_parts.loop):
            what(subject)
        else:
            run = subject.assemble()
            stage = gpu_parts.last_stage(run)
            calls, loss_args = gpu_parts.step_calls(run, stage, *bench.next_batch(run, stage))
            what(subject, run, calls[0][0] if what is exact.attention_numbers else loss_args)
        return verdicts_of(subject.report)

    yield go
    sys.modules.pop("train_gpt_planted", None)


# ---------- the file
@pytest.fixture
def whole(tmp_path):
    """The report that the command keeps."""
    return gpu_report.Report(tmp_path / "report.json", gpu_report.parse(["--toy", "--minutes", "2"]))


def read(report):
    """[(verdict, text)] in its file."""
    return [(row["verdict"], row["text"]) for row in json.loads(report.path.read_text())["verdicts"]]


def part_of(part="train", preset="golf", seconds=1.0, GiB=1.0, unseen=("trains",)):
    return agenda.Part(part, preset, seconds, GiB, [*unseen])


def test_the_file_is_replaced_as_a_whole(whole, monkeypatch):
    """After each verdict, so that it is valid whenever the report is killed."""
    whole.say(part_of(), "ok", "first")
    monkeypatch.setattr(os, "replace", lambda *_: None)
    whole.say(part_of(), "ok", "second")
    assert read(whole) == [("ok", "first")]


# ---------- the plan, on a clock of its own
class Host:
    """A machine on which each part takes so many times what is expected, or fails, or hangs until it is
    stopped at twice of that. bad: {part: failed or stopped}."""

    def __init__(self, parts, factor=1.0, bad=()):
        self.parts = parts
        self.factor = factor
        self.bad = dict(bad)
        self.seconds = 0.0
        self.ends = []
        self.skipped = {}
        self.most = 0
        self.running = []

    def start(self, part):
        state = self.bad.get(part.name(), "done")
        factor = gpu_report.PATIENCE * agenda.slowness(self.parts) if state == "stopped" else self.factor
        end = self.seconds + factor * part.expected_s
        self.running.append(part)
        self.most = max(self.most, len(self.running))
        assert part.part not in agenda.ALONE or self.running == [part]

        def poll():
            if self.seconds < end:
                return False
            part.state = state
            part.seconds = factor * part.expected_s
            self.ends.append(self.seconds)
            self.running.remove(part)
            return True

        return SimpleNamespace(part=part, poll=poll)

    def skip(self, part, why):
        self.skipped[part.name()] = why

    def run(self, minutes):
        self.minutes = minutes
        agenda.carry_out(self.parts, self.start, self, 75)
        return self

    def left(self):
        return 60 * self.minutes - self.seconds

    def pause(self):
        self.seconds += 1


def whole_plan(presets=agenda.PRESETS, seen=None):
    """seen: [(preset, goal)]; None: as the committed reports have it."""
    if seen is None:
        shown = gpu_results.shown(gpu_results.reports())
        seen = [(preset, goal) for preset, goal, given in shown if not given]
    return agenda.make_plan(presets, agenda.SHOWS, seen, False)


FIRST = ["tiny train", "golf_plus train", "speedrun_plus train"]


def test_what_no_card_has_shown_comes_first():
    """Training that no card has shown, the cheapest first; then scores and RESUME with their training; then
    what is timed; golf's score and loop, which a card has shown, last."""
    names = [part.name() for part in whole_plan()]
    assert names[:3] == FIRST and names[-4:] == ["golf score", "golf kernels", "golf loop", "speedrun loop"]
    assert names.index("golf train") < names.index("golf resume") < names.index("tiny kernels")
    shown = gpu_results.shown(gpu_results.reports())    # by another depth than the preset's
    assert ("gpt2_plus", "trains", "DEPTH=12") in shown and "gpt2_plus train" in names[:5]
    everything = {(preset, goal) for preset in agenda.PRESETS for goal in agenda.GOALS}
    assert not [part for part in whole_plan(seen=everything) if part.unseen]


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.4])
def test_nothing_begins_that_the_time_does_not_hold(factor):
    """On a fast host, one as expected and one that is 40 % slower; at most three side by side. What is late
    is so by what no part before it had shown of the host."""
    parts = whole_plan()
    host = Host(parts, factor).run(10)
    assert max(host.ends) <= 600 and host.most == agenda.MOST
    done = {part.name() for part in parts if part.state == "done"}
    assert done | {*host.skipped} == {part.name() for part in parts}
    assert {*FIRST} <= done and ("gpt2 train" in done) == (factor < 1.4)
    assert all("are left" in why or "no run of" in why for why in host.skipped.values())


@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_a_part_that_hangs_or_fails_holds_up_no_other(state):
    """Only what needs its run is not done."""
    parts = whole_plan(["tiny", "golf_plus", "speedrun_plus"])
    host = Host(parts, bad={"golf_plus train": state}).run(20)
    states = {part.name(): part.state for part in parts}
    assert states.pop("golf_plus train") == state
    assert host.skipped == {
        f"golf_plus {part}": "there is no run of golf_plus that ended well" for part in ("score", "resume")}
    assert {states[name] for name in states if name not in host.skipped} == {"done"}
    rest = agenda.tell_rest(parts)
    assert rest.startswith("still unseen: golf_plus train, golf_plus score, golf_plus resume; about ")


def test_parts_side_by_side_fit_into_memory_and_one_that_waits_for_training_lets_others_pass():
    running = [part_of("train", "golf", GiB=4)]
    waiting = [part_of("score", "golf"), part_of("train", "tiny", GiB=5), part_of("train", "gpt2", GiB=4)]
    assert agenda.next_part(waiting, running, 8) is None    # in order: what comes after it waits, too
    assert agenda.next_part(waiting, running, 9) is waiting[1]
    assert agenda.next_part([part_of("loop", "tiny")], running, 99) is None
    assert agenda.next_part([part_of("train", "gpt2", GiB=99)], [], 8).preset == "gpt2"


def test_the_tables_of_needs_have_every_part_of_every_preset():
    assert {*agenda.PRESETS} == {*with_boards()}
    for preset in with_boards():
        for part in agenda.SHOWS:
            if part != "resume" or preset not in agenda.LARGE:
                assert min(agenda.needed(part, preset, False)) > 0
        artifact = train_gpt.load_config(dict(PRESET=preset)).score_artifact
        assert bool(artifact) == (preset in agenda.WITH_ARTIFACT)


# ---------- processes
HELPER = """
import json, os, signal, sys, time
def say(text):
    with open("events.jsonl", "a") as file:
        print(json.dumps(dict(part="x", preset="", verdict="ok", text=text, figures={})), file=file)
"""


def job_of(part, code, whole, folder):
    """A part whose process is a line of Python, which finds say()."""
    folder.mkdir()
    words = [sys.executable, "-IS", "-c", HELPER + code]
    return gpu_report.Job(part, words, folder, dict(os.environ), whole)


@pytest.mark.parametrize("code, minutes, state, verdicts, last_lines", [
    ("say('fine'); print('one')", 2, "done", [("ok", "fine")], []),
    ("say('fine'); print('one'); sys.exit(3)", 2, "failed",
     [("ok", "fine"), ("FAULT", "train: exit code 3; its last lines:")], ["one"]),
    ("os.kill(os.getpid(), signal.SIGSEGV)", 2, "failed",
     [("FAULT", "train: ended by SIGSEGV; its last lines:")], []),
    ("print('one', flush=True); time.sleep(60)", 2, "stopped",
     [("FAULT", "train: stopped after N s; its last lines:")], ["one"]),
    ("time.sleep(60)", 0, "stopped", [("skip", "train: stopped after N s; its last lines:")], [])],
    ids=["well", "exit code", "signal", "its own limit", "the end of the report"])
def test_how_a_part_ends(code, minutes, state, verdicts, last_lines, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "LEAST_LIMIT_ON_A_CPU", 1.0)
    whole.found["minutes"] = minutes
    part = part_of(seconds=0.1 if "one" in last_lines and state == "stopped" else 20)
    job = job_of(part, code, whole, tmp_path / "part")
    wait_until(job.poll)
    found = [(verdict, re.sub(r"\d+ s;", "N s;", text)) for verdict, text in read(whole)]
    assert part.state == state and found == verdicts and part.last_lines == last_lines


def test_the_score_and_the_resumed_run_are_compared_with_the_run(tmp_path):
    for name, loss in [("train", 6.75), ("score", 6.5), ("resume", 6.751)]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(dict(trained=dict(val_loss=loss))))
    report = Report(None)
    for name in ("score", "resume"):
        training.compare_scores(report, f"{name}: gives", tmp_path / name, tmp_path / "train")
    assert verdicts_of(report) == [("FAULT", "score: gives 6.5000; the run said 6.7500"),
                                   ("ok", "resume: gives 6.7510; the run said 6.7500")]


def test_golf_keeps_its_learning_rates_in_the_first_half_of_the_run():
    cfg = train_gpt.load_config(training.settings_of(dict(PRESET="golf"), {}, False))
    assert [cfg.schedule(step, step / cfg.iterations).lr for step in (1, 9, 10, 15)] == [1, 1, 1, 0.5]


KILLED = """
import sys
sys.path.insert(0, {root!r})
from tools.gpu import agenda, report as gpu_report
from pathlib import Path
report = gpu_report.Report(Path("report.json"), gpu_report.parse(["--toy"]))
report.parts = [agenda.Part("train", name, 1.0, 1.0) for name in "abcdef"]
def start(part):
    folder = Path(part.preset)
    folder.mkdir()
    words = [sys.executable, "-IS", "-c", "import time; time.sleep(600)"]
    return gpu_report.Job(part, words, folder.resolve(), dict(MARK={mark!r}), report)
agenda.carry_out(report.parts, start, report, 8.0)
"""


def marked(mark):
    """How many processes have it in their environment."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += f"MARK={mark}".encode() in path.read_bytes().split(b"\0")
        except OSError:     # it has ended, or is somebody else's
            continue
    return found


def test_killed_it_leaves_a_valid_file_and_nothing_running(tmp_path):
    """By SIGKILL, while three parts run."""
    mark = str(os.getpid())
    script = KILLED.format(root=str(ROOT), mark=mark)
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_until(lambda: marked(mark) == agenda.MOST)
    process.kill()
    process.wait()
    assert not json.loads((tmp_path / "report.json").read_text())["complete"]
    wait_until(lambda: not marked(mark))


def test_gpu_tests_start_and_stop_processes_in_the_same_way():
    item = SimpleNamespace(nodeid="--version", config=SimpleNamespace(rootpath=ROOT))
    code, said, _ = alone.result_of(item)
    assert code == 0 and said.startswith("pytest")


# ---------- planted faults
SCALE = "scaled_mm(grad, w.t(), scale_g, scale_w), scaled_mm(grad_t"
LOSS = "error * part * (1 - part) * (top * scale * factor)"
ATTENTION = "    kernel = partial(kernel, scale=1.0, enable_gqa=k.size(1) < H)\n    blocks ="


@pytest.mark.parametrize("old, new, function", [
    pytest.param(SCALE, SCALE.replace("scale_w", "1.2 * scale_w"), exact.fp8_numbers, id="fp8"),
    pytest.param(LOSS, LOSS.replace("* scale *", "* 0.8 * scale *"), exact.loss_numbers, id="loss"),
    pytest.param(ATTENTION, ATTENTION.replace("scale=1.0", "scale=1.1"), exact.attention_numbers,
                 id="attention")])
def test_a_wrong_scale_is_named(old, new, function, measured, tmp_path):
    """By what `test -m gpu` compares at real size; without it all is well."""
    found = measured(planted_trainer(tmp_path, old, new), function, WINDOW_PATTERN="L", NUM_LAYERS="1")
    assert [verdict for verdict, _ in found] == ["FAULT"] and "off from fp32" in found[0][1], found
    found = measured(train_gpt, function, WINDOW_PATTERN="L", NUM_LAYERS="1")
    assert [verdict for verdict, _ in found] == ["ok"], found


def test_a_slow_kernel_is_named_with_what_to_set(measured, tmp_path):
    old = "def fast_loss("
    slow = "def slow_loss(*args):\n    time.sleep(0.05)\n    return lm_loss(*args)\n\n"
    trainer = planted_trainer(tmp_path, old, slow + old)
    trainer.fast_loss = lambda *_: dict(loss=trainer.slow_loss)
    found = measured(trainer, gpu_parts.kernels)
    named = [text for verdict, text in found if verdict == "set"]
    assert len(named) == 1 and "readable gains" in named[0], found


@pytest.mark.parametrize("generation", [9, 10, 12])
def test_tiles_are_offered_where_attention_is_flex(generation, monkeypatch):
    """By the card and the head size of queries and keys; each with the constant that sets it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (generation, 0))
    kernels = train_gpt.WindowKernels(window=lambda *_: 2)
    run = SimpleNamespace(model=SimpleNamespace(kernels=kernels),
                          team=SimpleNamespace(device="cpu", on_gpu=True))
    flex = gpu_parts.Call((1, 6, 4, 96), (1, 6, 4, 96), (1, 6, 4, 128), 2, torch.zeros(1, 4))
    as_it_is, first, second = gpu_parts.attention_options(run, flex)
    assert as_it_is.flex == {} and [first.flex, second.flex] == gpu_parts.TILES[generation, 96]
    assert first.change == f"FLEX_OPTIONS = {first.flex}"
    assert len(gpu_parts.attention_options(run, flex._replace(window=4, documents=None))) == 1


SHORT = dict(ITERATIONS="20", NUM_LAYERS="1", TRAIN_SEQ_LEN="64", WINDOW_SCHEDULE="32")


def test_a_pause_on_the_clock_is_named(measured, tmp_path, monkeypatch):
    """0.8 s, as of a garbage collection."""
    for later in ("operators", "profile_step"):      # what is measured after the loop
        monkeypatch.setattr(gpu_parts, later, lambda *_: None)
    step = "        # 3. a step and its report\n"
    trainer = planted_trainer(tmp_path, step, step + "        time.sleep(0.8 * (step == 17))\n")
    slow = [text for verdict, text in measured(trainer, gpu_parts.loop, **SHORT) if verdict == "SLOW"]
    assert any(re.search(r"longest \d{3,}\.\d in step 17", text) for text in slow), slow


@pytest.mark.slow
def test_the_loop_is_that_of_a_rank_of_eight(measured, monkeypatch):
    """It owns an eighth of all moments, updates that share alone, and no process group is asked."""
    seen = []

    def spy(subject, run, shortest):
        seen.extend(run.optimizer.banks)

    monkeypatch.setattr(gpu_parts, "profile_step", spy)
    found = measured(train_gpt, gpu_parts.loop, **SHORT)
    assert not [row for row in found if row[0] == "FAULT"] and "kinds of operators" in found[-1][1], found
    assert seen and all(8 * bank.master.numel() == bank.data.numel() for bank in seen)
    assert any(bank.my_data.any() for bank in seen)


@pytest.mark.parametrize("word", ["FP9=off", "fp8=off", "bord", "MATRIX_LR"])
def test_what_is_mistyped_is_refused(word, capsys):
    assert gpu_report.main([word]) == 2
    name = word.partition("=")[0]
    assert capsys.readouterr().err.startswith(f"gpu-report: {name} is neither a constant nor one of tiny, ")


def test_no_gpu_is_a_fault_whatever_is_asked_for(tmp_path, monkeypatch, capsys):
    def job(part, args, report, folder):
        return job_of(part, "say('no GPU')", report, folder / "part")

    monkeypatch.setattr(gpu_report, "job_of", job)
    monkeypatch.setattr(gpu_report.signal, "signal", lambda *_: None)
    assert gpu_report.main(["--only", "loop", f"--json={tmp_path}/report.json"]) == 1
    said = capsys.readouterr().out
    assert "torch finds no GPU, so no preset was measured" in said and "seen on a card" not in said


# ---------- the whole
def screen_of(text):
    """What the verdicts of a screen are about, without numbers, sorted, since parts run side by side."""
    lines = [line for line in text.splitlines() if re.match(r"(ok|FAULT|SLOW|set|note|skip) ", line)]
    # a machine that does other things, too, has pauses, and by chance another kernel is the faster one
    lines = [re.sub("^(ok|set|SLOW) +", "timed ", line) if " ms" in line else line for line in lines]
    return sorted([re.split("[,:]", re.sub(r"[\d.,]*\d", "#", line))[0] for line in lines])


@pytest.mark.slow
def test_the_rehearsal_and_the_screen_in_the_docs(tmp_path):
    """It ends well, and first_gpu.md shows what it prints."""
    done = run_cli(tmp_path, "--toy", module="tools.gpu.report", timeout=600)
    assert done.code == 0, done.out + done.err
    page = (ROOT / "docs/first_gpu.md").read_text(encoding="utf-8")
    shown = screen_of(page)
    assert len(shown) > 15 and shown == screen_of(done.out), done.out


@pytest.mark.static
def test_the_structure_on_the_stand_in(tmp_path):
    """All kernels of a small speedrun launch at a GPU's shapes; nothing fails."""
    library = stand_in.build(tmp_path)
    small = "NUM_LAYERS=3 WINDOW_PATTERN=SLS SKIP_LAYERS=0 BACKOUT_LAYER=0 MODEL_DIM=256 NUM_HEADS=2 " \
        "TRAIN_SEQ_LEN=1024 TRAIN_BATCH_TOKENS=8192 VOCAB_SIZE=1024"
    words = ["speedrun", *small.split(), "--only", "kernels", "loop", "--minutes=60"]
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu.report", *words], cwd=tmp_path, capture_output=True, text=True,
        env=OURS | stand_in.environment(library, CARDS["h100"], 1, tmp_path))
    rows = json.loads((tmp_path / "gpu_report.json").read_text())["verdicts"]
    faults = [row["text"] for row in rows if row["verdict"] == "FAULT"]
    assert not faults and len(rows) > 8, done.stdout + done.stderr
    assert rows[0]["text"].startswith("NVIDIA H100")


# ---------- the tables of the page
def result(**settings):
    """A report of one preset, as a GPU would give it."""
    verdicts = [
        dict(part="kernels", preset="golf", verdict="set", text="x", figures=dict(change="X=0", ms={})),
        dict(part="loop", preset="golf", verdict="note", text="x",
             figures=dict(tokens=49_152, row_tokens=4096, p50=35.7, p99=42.34)),
        dict(part="loop", preset="golf", verdict="ok", text="x",
             figures=dict(tokens=49_152, with_an_eighth=31.2)),
        dict(part="train", preset="golf", verdict="ok", text="x",
             figures=dict(losses=[3.0, 2.0], scores=dict(trained=2.0, artifact=2.1))),
        dict(part="score", preset="golf", verdict="FAULT", text="x", figures={}),
        dict(part="resume", preset="golf", verdict="ok", text="x", figures={}),
    ]
    machine = dict(gpu="NVIDIA H100 80GB HBM3", driver="999.1", torch="2.13.0+cu130")
    return dict(version=3, commit="abc", toy=False, complete=False, begun="2026-12-01T10:00:00+00:00",
                machine=machine, verdicts=verdicts) | settings


def table_of(folder):
    """The lines of the page's table, by the reports in a folder."""
    return gpu_results.matrix(gpu_results.shown(gpu_results.reports(folder))).splitlines()


def test_the_table_of_the_page(tmp_path):
    """What a preset did on which card, by which torch and when. What ran beside others was not timed."""
    (tmp_path / "mine.json").write_text(json.dumps(result()))
    lines = table_of(tmp_path)
    where = "H100, 2.13.0, 2026-12-01"
    assert lines[0] == "| | " + " | ".join(agenda.GOALS) + " |"
    golf = dict(zip(agenda.GOALS, lines[3].split(" | ")[1:]))
    assert lines[3].startswith("| golf | ") and golf.pop("scores apart") == ""
    assert {cell.removesuffix(" |") for cell in golf.values()} == {where}
    (tmp_path / "mine.json").write_text(json.dumps(result(side_by_side=True, given=dict(DEPTH="12"))))
    golf = dict(zip(agenda.GOALS, table_of(tmp_path)[3].split(" | ")[1:]))
    assert golf["trains"] == f"{where} (DEPTH=12)" and golf["kernels timed"] == ""


@pytest.mark.parametrize("content", [
    result(verdicts=[dict(part="environment", preset="", verdict="ok", text="x", figures={})]),
    result(toy=True), [1], {}, result(machine={})])
def test_what_is_no_report_is_refused(content, tmp_path, capsys):
    """And leaves nothing."""
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(content))
    folder = tmp_path / "results"
    folder.mkdir()
    assert gpu_results.main([str(file), "first"], folder, tmp_path / "page.md") == 2
    assert "mine.json is no report of gpu-report" in capsys.readouterr().err and not [*folder.iterdir()]


def test_a_report_is_added(tmp_path):
    """To the page, and to what a card has been seen to run: operators by their dtypes, whatever their
    overload."""
    file = tmp_path / "report.json"
    file.write_text(json.dumps(result(operators=dict(golf=[dict(operator="aten.mm", dtypes=["bfloat16"])]))))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{gpu_results.BEGIN}{gpu_results.END}after\n")
    folder = tmp_path / "results"
    folder.mkdir()
    assert gpu_results.main([str(file), "first"], folder, page) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "H100, 2.13.0" in text
    for name in ("aten.mm", "aten.mm.out", "aten::mm"):
        assert seen_on_gpu.seen(name, ("bfloat16",), folder), name
    for name, *dtypes in (("aten.mm", "bfloat16", "float32"), ("aten.addmm", "bfloat16"), ("aten.mm",)):
        assert not seen_on_gpu.seen(name, tuple(dtypes), folder)


def test_the_table_is_what_the_reports_show(tmp_path):
    """No row of it was written by hand."""
    page = tmp_path / "page.md"
    text = gpu_results.PAGE.read_text(encoding="utf-8")
    page.write_text(text, encoding="utf-8")
    assert gpu_results.main([], gpu_results.FOLDER, page) == 0
    assert page.read_text(encoding="utf-8") == text and gpu_results.BEGIN in text


# ---------- what a step runs
def test_operators_are_recorded_with_dtypes():
    """Each dtype once; what launches nothing is left out."""
    a = torch.ones(4, 6, dtype=torch.bfloat16)
    b = torch.ones(4, 8, dtype=torch.bfloat16)

    def function():
        torch.mm(a.t(), b, out=torch.empty(6, 8, dtype=torch.bfloat16))
        torch._foreach_copy_([b.float(), a.float()], [b, a])
        b[:, ::2].sum()

    with gpu_parts.Recorder("cpu") as recorder:
        function()
    assert recorder.found == {
        ("aten.mm", ("bfloat16",)), ("aten.sum", ("bfloat16",)), ("aten._to_copy", ("bfloat16",)),
        ("aten._foreach_copy_", ("float32", "bfloat16"))}


@pytest.mark.slow
def test_of_a_compiled_step_only_what_is_not_generated_is_recorded():
    """Forward and backward, without compiling again."""
    a, b = [torch.randn(32, 32, requires_grad=True) for _ in range(2)]
    fast = torch.compile(lambda a, b: (torch.relu(a.t() @ b) * 2).sum(), fullgraph=True, dynamic=False)
    fast(a, b).backward()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with gpu_parts.Recorder("cpu") as recorder:
        fast(a, b).backward()
    found = {operator for operator, _ in recorder.found}
    assert "aten.mm" in found and "aten.relu" not in found and "aten.mul" not in found, found
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
