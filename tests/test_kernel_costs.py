"""How generated kernels walk through memory, by their source; the rates of estimates beside
an H100's logs."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from helpers import ROOT
from tools.gpu import kernel_costs
from tools.gpu import static as static_gpu

# As Inductor writes them: a copy of (512, 1024) in bytes, straight, transposed, and transposed in tiles
STRAIGHT = """
@triton_heuristics.pointwise(size_hints={'x': 524288}, filename=__file__)
@triton.jit
def triton_poi_fused_copy_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 524288
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = tl.full([XBLOCK], True, tl.int1)[:]
    x2 = xindex
    tmp0 = tl.load(in_ptr0 + (x2), None).to(tl.float32)
    tmp1 = libdevice.exp(tmp0) * 2.0
    tl.store(out_ptr0 + (x2), tmp1, None)
"""
TRANSPOSED = STRAIGHT.replace("in_ptr0 + (x2)", "in_ptr0 + (xindex // 512 + 1024*(xindex % 512))")
TILED = """
def triton_poi_fused_copy_0(in_ptr0, out_ptr0, ynumel, xnumel, YBLOCK: tl.constexpr, XBLOCK: tl.constexpr):
    ynumel = 1024
    xnumel = 512
    yoffset = (tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)) * YBLOCK
    yindex = yoffset + tl.arange(0, YBLOCK)[:, None]
    ymask = yindex < ynumel
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[None, :]
    xmask = xindex < xnumel
    tmp0 = tl.load(in_ptr0 + (yindex + 1024*xindex), xmask & ymask, eviction_policy='evict_last')
    tl.store(out_ptr0 + (xindex + 512*yindex), tmp0, xmask & ymask)
"""
GATHERED = STRAIGHT.replace("in_ptr0 + (x2)", "in_ptr0 + (tl.load(in_ptr1 + (x2), None)*1024)").replace(
    "(in_ptr0,", "(in_ptr0, in_ptr1,"
)
# Rows of 1,024 are summed; what is added lies the other way around
REDUCED = """
def triton_red_fused_copy_0(in_ptr0, in_ptr1, out_ptr0, xnumel, r0_numel,
                            XBLOCK: tl.constexpr, R0_BLOCK: tl.constexpr):
    xnumel = 512
    r0_numel = 1024
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    xmask = xindex < xnumel
    r0_base = tl.arange(0, R0_BLOCK)[None, :]
    x0 = xindex
    _tmp2 = tl.full([XBLOCK, R0_BLOCK], 0, tl.float32)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0_index = r0_offset + r0_base
        r0_mask = r0_index < r0_numel
        r0_1 = r0_index
        tmp0 = tl.load(in_ptr0 + (r0_1 + 1024*x0), r0_mask & xmask, other=0.0)
        tmp1 = tl.load(in_ptr1 + (x0 + 512*r0_1), r0_mask & xmask, other=0.0)
        _tmp2 = tl.where(r0_mask & xmask, _tmp2 + tmp0 * tmp1, _tmp2)
    tmp2 = tl.sum(_tmp2, 1)[:, None]
    tl.store(out_ptr0 + (x0), tmp2, xmask)
"""
MIB = 1 << 20


@pytest.mark.parametrize(
    "source, kind, blocks, want",
    [
        (STRAIGHT, "poi", dict(XBLOCK=256), 0),
        (TRANSPOSED, "poi", dict(XBLOCK=256), 2),
        (TILED, "poi", dict(XBLOCK=32, YBLOCK=32), 0),
        (TILED, "poi", dict(XBLOCK=256, YBLOCK=1), 2),
        (GATHERED, "poi", dict(XBLOCK=256), 0),
        (REDUCED, "red", dict(XBLOCK=1, R0_BLOCK=512), 2),
        (REDUCED, "red", dict(XBLOCK=32, R0_BLOCK=32), 0),
    ],
)
def test_what_a_kernel_walks_against_the_order(source, kind, blocks, want, monkeypatch):
    monkeypatch.setattr(kernel_costs, "LEAST_BYTES", MIB // 4)
    kernel = kernel_costs.Kernel(source, f"triton_{kind}_fused_copy_0")
    item = 4 if kind == "red" else 1
    tensors = {name: (item, MIB * item // 2) for name in kernel.names if "ptr" in name}
    found = kernel_costs.strided_bytes(kernel, kernel.sizes, [blocks], tensors)
    assert found == want * item * MIB // 4
    assert kernel_costs.strided_bytes(kernel, kernel.sizes, [blocks, blocks], tensors) == found


def test_a_small_tensor_may_lie_as_it_likes():
    """It stays in the cache."""
    kernel = kernel_costs.Kernel(TRANSPOSED, "triton_poi_fused_copy_0")
    tensors = dict(in_ptr0=(1, MIB // 2), out_ptr0=(1, MIB // 2))
    assert kernel_costs.strided_bytes(kernel, kernel.sizes, [dict(XBLOCK=256)], tensors) == 0


def test_sectors():
    straight = np.arange(1024)
    assert kernel_costs.overfetch(straight, 1) == (1, 1024)
    assert kernel_costs.overfetch(straight * 2, 2) == (2, 1024)
    assert kernel_costs.overfetch(straight * 768, 2) == (16, 1024)
    assert kernel_costs.overfetch(np.zeros(1024, dtype=int), 4) == (8, 1)


# ---------------------------------------------------------------- rates
MOST_OFF = 0.2


@pytest.mark.parametrize("factor, right", [(1.0, True), (1.3, False), (0.7, False)])
@pytest.mark.parametrize("name", kernel_costs.RATES)
def test_rates_are_those_of_the_logs(name, factor, right):
    """Within a fifth, and a rate that is changed by 30 % is not."""
    rate = kernel_costs.RATES[name]
    ratio = factor * rate.value / kernel_costs.measured_rate(rate)
    assert (abs(ratio - 1) < MOST_OFF) == right, ratio


@pytest.mark.parametrize("factor, right", [(1.0, True), (1.3, False), (0.7, False)])
def test_the_loss_and_its_copy_take_what_was_timed(factor, right, monkeypatch):
    """Its rate and its time per row: 49,152 rows of 50,304 logits, in bf16, and their gradient in fp8."""
    timed = (kernel_costs.RESULTS / "2026-11-27_loss_and_transpose.txt").read_text()
    found = dict(
        loss=re.search(r"^loss  (\S+) ms  block 2048, 8 warps: by powers of two$", timed, re.M),
        transpose=re.search(r"^transpose tile 64x128 warps 8: (\S+) ms", timed, re.M),
    )
    logits = 49_152 * 50_304
    for kind, value in kernel_costs.TIMED_ALONE.items():
        monkeypatch.setitem(kernel_costs.TIMED_ALONE, kind, value * factor)
    monkeypatch.setattr(kernel_costs, "LOSS_ROW", kernel_costs.LOSS_ROW / factor)
    wanted = dict(
        loss=kernel_costs.memory_seconds("loss_kernel", 3 * logits, 0, 49_152),
        transpose=kernel_costs.memory_seconds("transpose_kernel", 2 * logits),
    )
    for kind, seconds in wanted.items():
        ratio = 1e3 * seconds / float(found[kind][1])
        assert (abs(ratio - 1) < MOST_OFF) == right, (kind, ratio)


def test_the_kernels_of_a_record_are_added_up():
    lines = [
        ["gemm", "cublasLtMatmul", "TN", "8192", "8192", "8192", "1", "14", "14"],
        ["attention", "cudnn", "forward", "12", "8", "4096", "64", "4096", "1"],
        ["phase", "optimizer"],
        ["bytes", "triton_poi_fused_copy_0", "2000000000"],
        ["triton", "triton_poi_fused_copy_0", "9,1,1", "128", "0", "40", "0"],
        ["strided", "triton_poi_fused_copy_0", "1000000000"],
        ["phase", "model"],
        ["bytes", "triton_poi_fused_add_1", "1000"],
        ["triton", "triton_poi_fused_add_1", "1,1,1", "128", "0", "40", "0"],
        ["strided", "triton_poi_fused_add_1", "-1"],
        ["torch", "add_kernel", "1,1,1", "128"],
    ]
    found = kernel_costs.estimate(lines * 2, flex_flop=2 * 214.5e9, eager=2 * 2.63e9, steps=2)
    assert found["estimate_ms"] == {
        "flex attention": 1.0,
        "products bf16": 1.51,
        "dense attention": 0.48,
        "transposing": 7.55,
        "other generated": 0.0,
        "torch's kernels": 1.0,
    }
    assert found["estimate_sum_ms"] == 11.5 and found["estimate_optimizer_ms"] == 7.55
    assert found["transposing"] == [
        dict(name="triton_poi_fused_copy_0", launches=1, ms=7.547, GB=2.0, strided_GB=1.0)
    ]
    assert found["unread"] == ["triton_poi_fused_add_1"]


# ---------------------------------------------------------------- with a CUDA build of torch
STEP = """
import json, os, sys
import torch
sys.path[:0] = sys.argv[1:2]
from tools.gpu import static as static_gpu

def transposing(x):
    return x.view(4096, 2048).t().contiguous() + 1

def streaming(x):
    return x * 2 + 1

torch._inductor.config.triton.prefer_nd_tiling = False
torch._inductor.config.triton.coalesce_tiling_analysis = False
torch._inductor.config.triton.max_tiles = 1
lines = []
with static_gpu.count_bytes(torch, lambda *words: lines.append(words), 0, True):
    for function in (transposing, streaming):
        lines.append(("function", function.__name__, 0))
        torch.compile(function, dynamic=False)(torch.empty(4096 * 2048, device="cuda"))
print(json.dumps(lines), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("markers, runs", [("quick", False), ("quick or static", True), ("static", True)])
def test_what_needs_cuda_runs_where_it_is_named(markers, runs):
    """The next test is quick, too, as all of this file are; without CUDA's libraries it would fail."""
    words = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", markers, __file__]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert ("test_a_planted_transposing_kernel_is_named" in done.stdout) == runs, done.stdout + done.stderr


@pytest.mark.static
def test_a_planted_transposing_kernel_is_named(tmp_path):
    """By this torch's Inductor, which is told not to tile; a streaming kernel is not named."""
    library = static_gpu.build(tmp_path)
    env = static_gpu.environment(library, static_gpu.CARDS["h100"], 1, tmp_path)
    command = [sys.executable, "-c", STEP, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.stdout, done.stderr[-2000:]
    found: dict = {}
    for what, name, size in json.loads(done.stdout.splitlines()[-1]):
        if what == "function":
            function = name
        elif what == "strided":
            found[function] = size
    assert found == {"transposing": 4 * 4096 * 2048, "streaming": 0}, found
