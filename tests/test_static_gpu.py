"""The stand-in for a GPU: its library, what it makes of a record, and planted faults that it must report.

The library is compiled and tested here without CUDA. Tests marked static need the CUDA build of torch that
`./run.sh static` installs: `./run.sh test -m static` runs them.
"""

import ctypes
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT, SCRIPT, planted
from tools.gpu import stand_in
from tools.gpu import static as static_gpu
from tools.run.cards import CARDS

MIB = 1 << 20
E4M3 = 28
E5M2 = 29
BF16 = 14


# ---------------------------------------------------------------- the library
@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """As gcc makes it without CUDA's headers: an H100 of 1,000 MiB, of which 600 are taken."""
    path = stand_in.build(tmp_path_factory.mktemp("library"), Path("/nowhere"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STATIC_MIB", "1000")
        yield ctypes.CDLL(str(path))


@pytest.fixture
def recorded(library, tmp_path):
    """What the library writes down while a function runs: [[word]]."""

    def of(function):
        library.static_record(str(tmp_path / "record").encode())
        try:
            function()
        finally:
            library.static_record(None)
        return [line.split("\t") for line in (tmp_path / "record").read_text().splitlines()]

    return of


def allocate(library, size, name="cudaMalloc"):
    pointer = ctypes.c_void_p()
    extra = (0,) if name == "cudaHostAlloc" else ()
    return getattr(library, name)(ctypes.byref(pointer), ctypes.c_size_t(size), *extra), pointer


def test_memory_has_a_limit_and_a_peak(library):
    used = library.static_used
    peak = library.static_peak
    used.restype = peak.restype = ctypes.c_size_t
    code, first = allocate(library, 300 * MIB)
    assert code == 0 and used() == 300 * MIB
    assert allocate(library, 101 * MIB)[0] == 2 and used() == 300 * MIB
    assert allocate(library, 1000 * MIB, "cudaHostAlloc")[0] == 0 and used() == 300 * MIB
    code, second = allocate(library, 100 * MIB)
    assert code == 0 and library.cudaFree(first) == library.cudaFree(second) == 0
    assert used() == 0 and peak() == 400 * MIB


def test_copies_and_who_waits(library, recorded):
    _, there = allocate(library, 8 * MIB)
    _, pinned = allocate(library, 8 * MIB, "cudaHostAlloc")
    data = ctypes.create_string_buffer(b"abc", 16)
    back = ctypes.create_string_buffer(16)

    def copies():
        library.cudaMemcpyAsync(there, data, ctypes.c_size_t(16), 1, None)
        library.cudaMemcpyAsync(pinned, there, ctypes.c_size_t(16), 2, None)
        library.cudaMemcpy(back, there, ctypes.c_size_t(16), 2)
        library.cudaMemsetAsync(there, 0, ctypes.c_size_t(64), None)
        library.cudaStreamSynchronize(None)

    lines = recorded(copies)
    assert back.value == b"abc" and ctypes.string_at(pinned, 3) == b"abc"
    assert [line[1] for line in lines if line[0] == "wait"] == [
        "cudaMemcpyAsync of pageable memory",
        "cudaMemcpy",
        "cudaStreamSynchronize",
    ]
    assert [line[2] for line in lines if line[0] == "copy"] == [
        "host->device",
        "device->host",
        "device->host",
    ]
    assert ["memset", "64"] in lines


def fp8_product(library, a=(E4M3, 32, 64, 32), b=(E4M3, 32, 16, 32), transposes=(1, 0), scales=(16, 32)):
    """cublasLtMatmul of two matrices (type, rows, columns, leading dimension), with scales at these addresses
    -> its status."""

    def layout(kind, rows, columns, leading):
        made = ctypes.c_void_p()
        library.cublasLtMatrixLayoutCreate(
            ctypes.byref(made), kind, ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(leading)
        )
        return made

    matmul = ctypes.c_void_p()
    library.cublasLtMatmulDescCreate(ctypes.byref(matmul), 68, 0)
    for what, value in zip((3, 4), transposes):
        library.cublasLtMatmulDescSetAttribute(
            matmul, what, ctypes.byref(ctypes.c_int(value)), ctypes.c_size_t(4)
        )
    for what, address in zip((17, 18), scales):
        library.cublasLtMatmulDescSetAttribute(
            matmul, what, ctypes.byref(ctypes.c_void_p(address)), ctypes.c_size_t(8)
        )
    out = layout(BF16, a[2], b[2], a[2])
    return library.cublasLtMatmul(
        None,
        matmul,
        None,
        None,
        layout(*a),
        None,
        layout(*b),
        None,
        None,
        out,
        None,
        out,
        None,
        None,
        ctypes.c_size_t(0),
        None,
    )


@pytest.mark.parametrize(
    "wrong, why",
    [
        (dict(), None),
        (dict(a=(E5M2, 32, 64, 32)), None),
        (dict(transposes=(0, 0)), "not TN"),
        (dict(transposes=(1, 1)), "not TN"),
        (dict(a=(E5M2, 32, 64, 32), b=(E5M2, 32, 16, 32)), "both are e5m2"),
        (dict(a=(E4M3, 24, 64, 24), b=(E4M3, 24, 16, 24)), "multiples of 16"),
        (dict(scales=()), "a scale is missing"),
        (dict(scales=(16, 20)), "no multiple of 16"),
        (dict(a=(BF16, 24, 64, 24), b=(BF16, 24, 16, 24), transposes=(0, 1), scales=()), None),
    ],
)
def test_what_cublas_refuses_of_fp8(wrong, why, library, recorded):
    lines = recorded(lambda: fp8_product(library, **wrong))
    if why:
        assert [line[0] for line in lines] == ["refused"] and why in lines[0][1]
    else:
        assert lines[0][0] == "gemm" and lines[0][3:5] == ["64", "16"]


def test_fp8_needs_ada_or_hopper(library, monkeypatch):
    monkeypatch.setenv("STATIC_CC", "80")
    assert fp8_product(library) == 15


@pytest.mark.parametrize("threads, shared, refused", [(128, 1000, 0), (1025, 0, 1), (128, 232_449, 1)])
def test_launches_beyond_what_a_block_can_have_are_refused(threads, shared, refused, library, recorded):
    module = ctypes.c_void_p()
    function = ctypes.c_void_p()
    library.cuModuleLoadData(ctypes.byref(module), ctypes.create_string_buffer(64))
    library.cuModuleGetFunction(ctypes.byref(function), module, b"kernel_7")
    lines = recorded(
        lambda: library.cuLaunchKernel(function, 2, 3, 1, threads, 1, 1, shared, *[None] * 3)
    )
    assert lines[0] == ["triton", "kernel_7", "2,3,1", str(threads), str(shared), "0", "0"]
    assert len(static_gpu.refusals(lines)) == refused


# ---------------------------------------------------------------- what a record says
LINES = [
    ["gemm", "cublasLtMatmul", "TN", "64", "32", "16", "2", "14", "14"],
    ["gemm", "cublasLtMatmul", "TN", "64", "32", "16", "1", "28", "14"],
    ["attention", "flash", "forward", "2", "4", "128", "64", "128", "1"],
    ["attention", "flash", "backward", "2", "4", "128", "64", "128", "1"],
    ["bytes", "triton_poi_fused_add_0", "1000"],
    ["triton", "triton_poi_fused_add_0", "1,1,1", "128", "0", "40", "0"],
    ["bytes", "triton_tem_fused_flex_attention_1", "500"],
    ["triton", "triton_tem_fused_flex_attention_1", "1,1,1", "128", "0", "255", "16"],
    ["torch", "add_kernel", "1,1,1", "128"],
    ["memset", "24"],
    ["collective", "all_gather", "4000000"],
    ["wait", "cudaStreamSynchronize"],
    ["refused", "cublasLt fp8: the layout is not TN"],
]


def test_figures_of_two_steps():
    found = static_gpu.figures(LINES * 2, flex_flop=2e12, steps=2)
    dense = 2 * 2 * 4 * 128 * 128 * 64
    assert found["launches"] == 8 and found["kinds"]["gemm"] == 2 and found["registers"] == 255
    assert found["spilled_bytes"] == 16 and found["refused"] == {"cublasLt fp8: the layout is not TN": 2}
    flex = dict(name="triton_tem_fused_flex_attention_1", GB=0, launches=1, registers=255, stack=16)
    add = dict(name="triton_poi_fused_add_0", GB=0, launches=1, registers=40, stack=0)
    assert found["largest"] == [add, flex]  # flex attention's bytes are not counted
    assert found["TFLOP"] == {
        "products bf16": round(2 * 64 * 32 * 16 * 2 / 1e12, 3),
        "products fp8": 0.0,
        "flex attention": 1.0,
        "attention forward": round(dense / 1e12, 3),
        "attention backward": round(2.5 * dense / 1e12, 3),
    }
    assert found["GB"] == {"collectives": 0.004}


def clean(**changed):
    """What measure() finds where all is well, with changes of a stage."""
    stage = dict(peak_GiB=8.0, waits=[], recompiles=0, refused={}) | changed
    rehearsal = dict(graph_breaks=0, refused={}, log=[], peak_GiB=7.0)
    return dict(rehearsal=rehearsal, stages={"x1": stage}, estimate_GiB=8.5)


@pytest.mark.parametrize(
    "found, words",
    [
        (clean(), None),
        (clean(waits=["cudaFree at train_gpt.py:1 x"]), "waits"),
        (clean(recompiles=1), "compiles"),
        (clean(refused={"cublasLt fp8: both are e5m2": 1}), "both are e5m2"),
        (clean(peak_GiB=10.5), "10.5 GiB"),
        (clean(peak_GiB=7.0), "7.0 GiB"),
        (clean() | {"rehearsal": clean()["rehearsal"] | {"peak_GiB": 10.4}}, "10.4 GiB"),
        (dict(error="exit code 1"), "exit code 1"),
        (clean() | {"rehearsal": clean()["rehearsal"] | {"graph_breaks": 2}}, "breaks"),
    ],
)
def test_problems(found, words):
    problems = static_gpu.problems(found)
    assert bool(problems) == bool(words) and (not words or words in problems[0])


def test_words_of_the_command():
    args = static_gpu.parse(["golf", "--gpu", "a100", "t4", "--ranks", "1", "2", "NUM_LAYERS=2"])
    assert args.presets == ["golf"] and args.given == dict(NUM_LAYERS="2") and args.gpu == ["a100", "t4"]
    assert static_gpu.parse([]).presets == ["golf", "speedrun", "gpt2"]


# ---------------------------------------------------------------- planted faults, with a CUDA build of torch
SMALL = (
    "gpt2",
    "DEPTH=0",
    "TARGET_PARAM_DATA_RATIO=0",
    "NUM_LAYERS=2",
    "MODEL_DIM=512",
    "NUM_HEADS=8",
    "VOCAB_SIZE=1024",
    "TRAIN_SEQ_LEN=1024",
    "TRAIN_BATCH_TOKENS=131072",
    "WARMUP_STEPS=1",
)
STEP = "    optimizer.step(schedule)\n"
PLANTED = {
    "nothing": (None, None, None),
    "a wait": (STEP, STEP + "    total.item()\n", "waits"),
    "a graph break": (
        "        for block, kind, table in zip(self.blocks, self.kinds, self.tables):\n",
        "        torch._dynamo.graph_break()\n"
        "        for block, kind, table in zip(self.blocks, self.kinds, self.tables):\n",
        "graph break",
    ),
    "2 GiB more": (STEP, STEP + "    more = torch.empty(1 << 31, dtype=torch.uint8, device='cuda')\n", "GiB"),
    "a wrong fp8 layout": (
        "b = b.contiguous().t()",
        "b = b.t().contiguous()",
        "col_major",
    ),
    "gradients in e5m2 on both sides": (
        "x, scale_x = to_fp8(x, scales[0], torch.float8_e4m3fn)",
        "x, scale_x = to_fp8(x, scales[0], torch.float8_e5m2)",
        "e5m2",
    ),
    "another graph in the step": ("(tokens, tokens.clone(), ", "(tokens.int(), tokens.clone(), ", "compiles"),
}


def test_planted_faults_have_a_place():
    source = SCRIPT.read_text()
    assert [name for name, (old, *_) in PLANTED.items() if old and source.count(old) != 1] == []


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Of compiled kernels: the planted faults share most of them."""
    return tmp_path_factory.mktemp("cache")


def static(folder, *words):
    """(what it found of a preset, what it printed)"""
    command = [sys.executable, "-m", "tools.gpu.static", *words, "--json", folder / "json"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    (found,) = json.loads((folder / "json").read_text()).values()
    assert done.returncode == bool(static_gpu.problems(found)) == ("PROBLEM" in done.stdout), done.stderr
    return found, done.stdout


@pytest.mark.static
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_reported(name, tmp_path, cache):
    assert importlib.util.find_spec("triton"), "run it by `./run.sh test -m static`"
    old, new, words = PLANTED[name]
    planted(tmp_path, old or "", new)
    found, printed = static(tmp_path, *SMALL, "--trainer", tmp_path, "--cache", cache)
    problems = static_gpu.problems(found)
    assert bool(problems) == bool(words), printed
    assert not words or any(words in problem for problem in problems), problems


TRANSPOSED = """
import json, os, sys
from functools import partial
import torch
sys.path[:0] = sys.argv[1:2]
import train_gpt
from tools.gpu import stand_in

def leaf(*shape, dtype=torch.float32):
    return torch.empty(*shape, device="cuda", dtype=dtype, requires_grad=True)

N = 2048
C = 256
V = 8192
x = leaf(1, N, C, dtype=torch.bfloat16)
head = leaf(V, C)
fc = leaf(4 * C, C)
proj = leaf(C, 4 * C)
scales = leaf(3, 4)[:, 0]
targets = torch.zeros(1, N, device="cuda", dtype=torch.long)
several = train_gpt.next_targets(targets, 3)
fused = partial(train_gpt.fp8_fused_loss, row_losses=train_gpt.kernel_losses)
by_maximum = partial(fused, most=train_gpt.HEAD_MOST_BY_MAXIMUM)

def speedrun(x, head):
    return fused(x, head, targets, (15.0, 0.0, 0.0))

def speedrun_plus(x, head):
    return fused(x, head, several, (11.5, 5.0, 15.0), torch.ones(3, device="cuda"))

def gpt2(x, head):
    return by_maximum(x, head, targets, (15.0, 0.0, 0.0))

def mlp(x, fc, proj, scales):
    y = train_gpt.fp8_mlp(train_gpt.rms_norm(x), fc, proj, scales, train_gpt.kernel_transpose)
    return (x + y).float().square().mean()

step, *leaves = dict(speedrun=(speedrun, x, head), speedrun_plus=(speedrun_plus, x, head),
                     gpt2=(gpt2, x, head), mlp=(mlp, x, fc, proj, scales))[sys.argv[2]]
compiled = torch.compile(step, dynamic=False, fullgraph=True)
moved = []
with stand_in.count_bytes(torch, lambda _, name, size: moved.append((name, size)), 0):
    torch.autograd.grad(compiled(*leaves), leaves)
print(json.dumps(moved), flush=True)
os._exit(0)
"""


def moved_bytes(what, tmp_path):
    """[(name, bytes)] of the kernels in a step of TRANSPOSED, compiled for an H100. Those of ours lose the
    number that Inductor adds to their name."""
    library = stand_in.build(tmp_path)
    env = stand_in.environment(library, CARDS["h100"], 1, tmp_path)
    command = [sys.executable, "-c", TRANSPOSED, str(ROOT), what]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return [(re.sub(r"(_kernel)_\d+$", r"\1", name), size) for name, size in found]


@pytest.mark.static
@pytest.mark.parametrize("recipe", ["speedrun", "speedrun_plus", "gpt2"])
def test_only_kernels_of_ours_move_the_logits_gradient(recipe, tmp_path):
    """A generated kernel that reads and writes N x V bytes would be the transposed copy of the gradient,
    which took 18.7 of 103.6 ms on an H100."""
    moved = moved_bytes(recipe, tmp_path)
    assert {"loss_kernel", "transpose_kernel"} <= {name for name, _ in moved}
    large = [name for name, size in moved if size >= 2 * 2048 * 8192]
    assert [name for name in large if name.startswith("triton_")] == []


@pytest.mark.static
def test_no_generated_kernel_transposes_what_the_fp8_mlp_keeps(tmp_path):
    """Its backward pass makes relu^2's gradient in fp8: per number it reads 3 bytes and writes 1. Were it
    stored in two layouts, that would be 5 in all; with the transposed copies of it and of relu^2 in the same
    kernel, as torch 2.13 fuses them, 6."""
    moved = moved_bytes("mlp", tmp_path)
    assert [name for name, _ in moved].count("transpose_kernel") == 4
    most = max([size for name, size in moved if name.startswith("triton_")])
    assert 4 * 2048 * 1024 <= most < 4.1 * 2048 * 1024


@pytest.mark.static
@pytest.mark.parametrize("computes, tests", [
    # those that ask for no numbers
    (False, ["", "-m", "structure"]),
    # Six like these failed on an H100 because a test helper had made weights on the CPU
    (True, ["::test_compiled_attention_equals_the_reference[200-True]"]),
    (True, ["::test_compiled_attention_equals_the_reference[1024-False]"]),
    (True, ["::test_evaluation_equals_the_cpu"])])
def test_gpu_tests_on_the_stand_in(computes, tests, tmp_path):
    """Tests of test_gpu.py with the library in place; some on the emulated GPU, by interpreted kernels."""
    library = stand_in.build(tmp_path)
    env = stand_in.environment(library, CARDS["h100"], 1, tmp_path, computes)
    command = [sys.executable, "-m", "pytest", "-q", f"{ROOT}/tests/test_gpu.py{tests[0]}", *tests[1:]]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-3000:]


HITS = """
import torch, torch._functorch.config, train_gpt
torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
x = torch.zeros(1, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
head = torch.zeros(4096, 32, device="cuda", dtype=torch.bfloat16)
targets = torch.zeros(1, 64, device="cuda", dtype=torch.long)
loss = torch.compile(lambda x: train_gpt.fused_loss(
    x, head, targets, (15.0, 0.0, 0.0), row_losses=train_gpt.kernel_losses), fullgraph=True)
torch.autograd.grad(loss(x), x)
print("hits", torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.static
def test_a_changed_kernel_is_not_taken_from_the_compile_cache(tmp_path):
    """A step with loss_kernel comes whole from the cache of an earlier process, but not one with another
    source of that kernel, which its graph does not show."""
    line = "tl.store(losses + row, whole * norm / LOG2E"
    for name, new in dict(same=line, changed=line.replace("whole", "2 * whole")).items():
        (tmp_path / name).mkdir()
        planted(tmp_path / name, line, new)
    env = stand_in.environment(stand_in.build(tmp_path), CARDS["h100"], 1, tmp_path)
    said = []
    for folder in (ROOT, tmp_path / "same", tmp_path / "changed"):
        done = subprocess.run([sys.executable, "-c", HITS], env=env | dict(PYTHONPATH=str(folder)),
                              cwd=folder, capture_output=True, text=True)
        said.append(done.stdout or done.stderr[-2000:])
    assert said == ["hits 0\n", "hits 1\n", "hits 0\n"]


@pytest.mark.static
def test_the_default_game_on_one_gpu(tmp_path):
    """Training with counts of n-grams and words, and the mixture's score."""
    found, printed = static(tmp_path, "tiny")
    assert not static_gpu.problems(found), printed


@pytest.mark.static
@pytest.mark.parametrize("gpu, ranks", [("a100", 1), ("l4", 2), ("t4", 1), ("5090", 1), ("b300", 1)])
def test_other_gpus(gpu, ranks, tmp_path):
    """The step compiles, without fp8 where there is none, and in fp32 where there is no bf16."""
    found, printed = static(tmp_path, *SMALL, "--gpu", gpu, "--ranks", ranks)
    products = found["stages"]["step of stage 1"]["TFLOP"]
    assert found["rehearsal"]["graphs"], printed
    assert ("products fp8" in products) == (gpu in ("l4", "5090", "b300"))
    assert ("products bf16" in products) == (gpu != "t4") == (found["dtype"] == "bfloat16")


def test_what_changed_is_told_with_its_ratio(capsys):
    """Of two files of figures; what varies by itself is left out."""
    before = {"golf": {"launches": 528, "seconds": 3.0, "log": [], "gone": 1}}
    after = {"golf": {"launches": 264, "seconds": 4.0, "log": ["x"]}}
    static_gpu.print_changes(before, after)
    assert capsys.readouterr().out.splitlines() == [
        "  golf, gone: 1 -> None", "  golf, launches: 528 -> 264 (x0.500)", "  golf, log: [] -> ['x']"]
