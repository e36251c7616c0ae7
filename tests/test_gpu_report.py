"""./run.sh gpu-report: its rehearsal on a CPU, what it says of planted faults, and the page of results."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

import bench
import gpu_report
import gpu_results
import static_gpu
import train_gpt
from helpers import ROOT, SCRIPT, run_cli

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def report(tmp_path):
    return gpu_report.Report(tmp_path / "report.json", toy=True, minutes=2)


def read(report):
    """[(verdict, text)] in the file."""
    rows = json.loads(report.path.read_text())["verdicts"]
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
        monkeypatch.setattr(gpu_report, "LOSSES", 3)
        settings = gpu_report.one_rank_of_eight(trainer, "speedrun", dict(COMPILE="0") | given, toy=True)
        subject = gpu_report.Subject(trainer, bench, report, settings, True)
        gpu_report.measure(subject, list(only))
        return read(report)

    yield go
    sys.modules.pop("train_gpt_planted", None)


# ---------- the file
def test_the_file_is_valid_whenever_the_report_is_killed(report, monkeypatch):
    """It is replaced as a whole, after each verdict."""
    report.say("ok", "first", number=1)
    assert read(report) == [("ok", "first")]

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        report.say("ok", "second")
    assert read(report) == [("ok", "first")] and not json.loads(report.path.read_text())["complete"]


def test_what_fails_is_a_verdict_and_the_report_goes_on(report):
    def broken():
        raise RuntimeError("no kernel image\nmore")

    assert report.attempt("loss", broken) is None and report.attempt("next", lambda: 3) == 3
    assert read(report) == [("FAULT", "loss: RuntimeError: no kernel image")]
    report.seconds = -1
    assert report.attempt("loop", broken) is None
    assert read(report)[-1] == ("skip", "loop: out of time")
    assert gpu_report.conclude(report) == 1 and json.loads(report.path.read_text())["complete"]


def test_compiling_takes_none_of_the_minutes(report):
    before = report.left()
    with report.compiling():
        time.sleep(0.4)
    assert before - report.left() < 0.2


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
    monkeypatch.setattr(gpu_report, "driver_version", lambda: settings.get("driver", ""))
    monkeypatch.setattr(torch.version, "cuda", settings.get("cuda"))
    monkeypatch.setattr(gpu_report.shutil, "which", lambda name: settings.get("compiler", name))
    gpu_report.environment(report, train_gpt, True)
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
        report.found["verdicts"].clear()
        gpu_report.environment(report, train_gpt, True)
        assert any(f"asks for torch {asked}" in text for _, text in read(report)) == noted


def test_what_to_expect_is_what_the_page_says():
    page = (ROOT / "docs/first_gpu.md").read_text(encoding="utf-8")
    table = page.partition("What to expect on 8xH100")[2].partition("So golf")[0]
    for preset, pairs in gpu_report.EXPECTED.items():
        (line,) = [line for line in table.splitlines() if line.startswith(f"| {preset}")]
        cells = [re.sub(r"\(.*\)", "", cell).split(",") for cell in line.split("|")[2:4]]
        assert [*zip(*[[float(number) for number in cell] for cell in cells])] == pairs


def test_documents_are_cut_where_the_recipe_cuts_them():
    cfg = train_gpt.preset_config("speedrun", dict(vocab_size=1024, bos_id=1, max_doc_len=256))
    run = SimpleNamespace(cfg=cfg, micro=1, team=SimpleNamespace(device="cpu"))
    tokens = gpu_report.random_tokens(run, SimpleNamespace(batch_tokens=16_384, row_tokens=16_384))
    begins = torch.cat((torch.nonzero(tokens[0] == 1)[:, 0], torch.tensor([16_384])))
    lengths = begins.diff()
    assert begins[0] == 0 and lengths.max() == 256 and lengths.min() < 200


def test_flash_attention_is_timed_with_the_slots_of_a_step(monkeypatch):
    """As compiled steps would call it: documents of at most 256 tokens, not a whole row."""
    seen = []

    def varlen(q, k, v, begins, _, longest, *__, **options):
        seen.append((len(begins), longest))
        return q

    module = SimpleNamespace(flash_attn_varlen_func=varlen)
    monkeypatch.setattr(train_gpt, "flash_attention_3", lambda cfg: module)
    monkeypatch.setattr(gpu_report, "importable", lambda name: name == "flash_attn_interface")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    cfg = train_gpt.preset_config("speedrun", dict(vocab_size=1024, max_doc_len=256))
    shape = (1, 2, 1024, 64)
    call = gpu_report.Call(shape, shape, shape, 128, torch.arange(1024)[None] // 256)
    run = SimpleNamespace(cfg=cfg, team=SimpleNamespace(device="cpu", on_gpu=True),
                          model=SimpleNamespace(kernels=train_gpt.Kernels(**train_gpt.WINDOWED)))
    options = gpu_report.attention_options(SimpleNamespace(trainer=train_gpt), run, call)
    (flash,) = [option for option in options if option.name == "FlashAttention 3"]
    flash.function(*[torch.zeros(shape) for _ in range(3)])
    assert seen == [(train_gpt.flash_slots(1024) + 1, 256)]


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
    call = gpu_report.Call(tuple(q.shape), tuple(k.shape), tuple(v.shape), window, documents)
    got = gpu_report.exact_attention(call, q, k, v, grad, 16)
    mask = train_gpt.window_mask(window, T, documents, q.device)
    want = gpu_report.with_gradients(lambda q, k, v: train_gpt.attention(q, k, v, mask), [q, k, v], grad)
    assert max(gpu_report.relative_errors(got, want)) < 1e-6


SCALE = "scaled_mm(grad, w.t(), scale_g, scale_w), scaled_mm(grad.t()"
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


@pytest.mark.parametrize("off, verdicts", [
    ([0.004, 0, 0], ["ok", "ok"]), ([0.006, 0, 0], ["FAULT", "ok"]), ([0, 0.1, 0], ["ok", "FAULT"]),
    ([math.nan, 0, 0], ["FAULT", "FAULT"])])
def test_losses_that_are_off_are_named(off, verdicts, report, monkeypatch):
    """The one at step 0 from log of the vocabulary, all of them from the eager ones."""
    eager = [math.log(512), 6.2, 6.1]
    losses = [[loss + more for loss, more in zip(eager, off)], eager]
    monkeypatch.setattr(gpu_report, "train_steps", lambda *_: losses.pop(0))
    monkeypatch.setattr(gpu_report, "begin_anew", lambda *_: None)
    model = SimpleNamespace(use=lambda kernels: None, head=torch.zeros(4))
    run = SimpleNamespace(model=model, cfg=SimpleNamespace(vocab_size=512), kernels=None, loss_fn=None)
    gpu_report.first_losses(gpu_report.Subject(train_gpt, bench, report, {}, True), run)
    assert [verdict for verdict, _ in read(report)] == verdicts


@pytest.mark.slow
def test_numbers_of_a_toy_are_fine(measured):
    """And the loss at step 0 is what it must be."""
    found = measured(train_gpt, "numbers")
    assert [verdict for verdict, _ in found] == ["ok"] * 6, found
    expected = f"{math.log(512):.4f}"
    assert found[4][1] == f"loss at step 0: {expected}; expected {expected}, log 512, on any text"


@pytest.mark.parametrize("dtype, linear, first", [
    (torch.bfloat16, train_gpt.linear, "one"), (torch.float32, train_gpt.linear, "three"),
    (torch.bfloat16, train_gpt.fp8_linear, "three")])
def test_the_first_of_the_products_is_in_use(dtype, linear, first, monkeypatch):
    """And both are the same queries, keys and values."""
    taken = []
    monkeypatch.setattr(gpu_report, "compare", lambda *args: taken.append(args))
    monkeypatch.setattr(gpu_report, "last_stage", lambda run: SimpleNamespace(row_tokens=6))
    call = SimpleNamespace(q=(1, 4, 6, 8), k=(1, 2, 6, 8), v=(1, 2, 6, 8))
    run = SimpleNamespace(team=SimpleNamespace(dtype=dtype, device=torch.device("cpu")),
                          cfg=SimpleNamespace(model_dim=16), kernels=train_gpt.Kernels(linear))
    gpu_report.products(SimpleNamespace(trainer=train_gpt), run, [(call, 3)], 2)
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
    assert len(named) == 2 and all("SDPA_BACKEND=torch" in text and "gains" in text for text in named), found


def test_a_pause_on_the_clock_is_named(measured, tmp_path):
    """0.5 s, as of a garbage collection."""
    step = "        # 4. a step\n"
    trainer = planted(tmp_path, step, step + "        time.sleep(0.5 * (step == 17))\n")
    found = measured(
        trainer, "loop", ITERATIONS="30", NUM_LAYERS="1", TRAIN_SEQ_LEN="64", WINDOW_SCHEDULE="32"
    )
    (pause,) = [text for verdict, text in found if verdict == "SLOW"]
    assert re.search(r"pauses on the clock: \d.* 0\.[45]\d s in step 17", pause), found


def test_steps_that_take_longer_in_their_stage_are_no_pause():
    stages = [((1, 1), 10.0)] * 20 + [((3, 3), 30.0)] * 20 + [((3, 3), 75.0)]
    typical = {(1, 1): 10.0, (3, 3): 30.0}
    assert gpu_report.pauses_in(stages, typical, toy=False) == [(40, 45.0)]
    assert gpu_report.pauses_in(stages, typical, toy=True) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "old, new, late",
    [
        (None, None, False),
        ("    run.optimizer.connect()\n", "", True),
        ("    gc.disable()\n", "    gc.set_threshold(1)\n", False),
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
        tmp_path, "--toy", "--only=ranks", f"--trainer={folder}", script=ROOT / "tools/gpu_report.py"
    )
    rows = json.loads((tmp_path / "gpu_report.json").read_text())["verdicts"]
    assert [row["verdict"] == "FAULT" for row in rows] == [late, bool(old) and not late], done.out + done.err
    assert not late or any("reduce_scatter" in kind for kind in rows[0]["figures"]["late"])


@pytest.mark.parametrize("words, sentence", [
    (["FP9=off"], "FP9 is no constant"), (["fp8=off"], "fp8 is no constant"), (["bord"], "bord is none of")])
def test_what_is_mistyped_is_refused(words, sentence, tmp_path):
    done = run_cli(tmp_path, *words, script=ROOT / "tools/gpu_report.py")
    assert (done.code, done.out) == (2, "") and done.err.startswith(f"gpu-report: {sentence}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_a_fault_whatever_is_asked_for(tmp_path):
    done = run_cli(tmp_path, "--only=loop", script=ROOT / "tools/gpu_report.py")
    assert done.code == 1 and "torch finds no GPU, so no preset was measured" in done.out


# ---------- the whole
def screen_of(text):
    """The lines of a screen, without their numbers."""
    lines = [line for line in text.splitlines() if re.match(r"(ok|FAULT|SLOW|set|note|skip) ", line)]
    # a machine that does other things, too, has pauses
    lines = [line for line in lines if "pauses on the clock" not in line]
    return [re.sub(r"[\d.,]*\d", "#", line.partition("longest:")[0]) for line in lines]


@pytest.mark.slow
def test_the_rehearsal_and_the_screen_in_the_docs(tmp_path):
    """It ends well, and first_gpu.md shows what it prints."""
    done = run_cli(tmp_path, "--toy", script=ROOT / "tools/gpu_report.py", timeout=600)
    assert done.code == 0, done.out + done.err
    page = (ROOT / "docs/first_gpu.md").read_text(encoding="utf-8")
    shown = screen_of(page)
    assert len(shown) > 12 and [line.split()[0] for line in shown] == [
        line.split()[0] for line in screen_of(done.out)
    ], done.out


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
            ROOT / "tools" / "gpu_report.py",
            *words,
            "--only",
            "environment,numbers,alternatives,loop",
        ],
        env=static_gpu.environment(library, static_gpu.GPUS["h100"], 1, tmp_path),
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
            figures=dict(tokens=65536, p50=99.87, rank_of_eight=91.2),
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
        "TRITON_KERNELS=0 |",
    ]
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
