"""The rates of estimates beside an H100's logs."""

import json
import re

import pytest

from helpers import ROOT
from tools.gpu import kernel_costs

# ---------------------------------------------------------------- rates
MOST_OFF = 0.2
RESULTS = ROOT / "docs/gpu_results"


def measured_kernels(log):
    """The 15 longest kernels of a log."""
    verdicts = json.loads((RESULTS / f"2026-11-26_{log}.json").read_text())["verdicts"]
    (figures,) = [row["figures"] for row in verdicts if "kernels" in row.get("figures", {})]
    return figures["kernels"]


def measured_rate(rate):
    """The same rate by its logs."""
    work = 0.0
    seconds = 0.0
    for log in rate.log.split():
        for row in measured_kernels(log):
            if re.search(rate.kernels, row["name"]):
                seconds += row["ms"] / 1e3
                work += row.get("GBps", 0) * 1e9 * row["ms"] / 1e3
    return (rate.work or work) / seconds


@pytest.mark.parametrize("factor, right", [(1.0, True), (1.3, False), (0.7, False)])
@pytest.mark.parametrize("name", kernel_costs.RATES)
def test_rates_are_those_of_the_logs(name, factor, right):
    """Within a fifth, and a rate that is changed by 30 % is not."""
    rate = kernel_costs.RATES[name]
    ratio = factor * rate.value / measured_rate(rate)
    assert (abs(ratio - 1) < MOST_OFF) == right, ratio


@pytest.mark.parametrize("factor, right", [(1.0, True), (1.3, False), (0.7, False)])
def test_the_loss_and_its_copy_take_what_was_timed(factor, right, monkeypatch):
    """Its rate and its time per row: 49,152 rows of 50,304 logits, in bf16, and their gradient in fp8."""
    timed = (RESULTS / "2026-11-27_loss_and_transpose.txt").read_text()
    found = dict(
        loss=re.search(r"^loss  (\S+) ms  block 2048, 8 warps: by powers of two$", timed, re.M),
        transpose=re.search(r"^transpose tile 64x128 warps 8: (\S+) ms", timed, re.M),
    )
    logits = 49_152 * 50_304
    for kind, value in kernel_costs.TIMED_ALONE.items():
        monkeypatch.setitem(kernel_costs.TIMED_ALONE, kind, value * factor)
    monkeypatch.setattr(kernel_costs, "LOSS_ROW", kernel_costs.LOSS_ROW / factor)
    wanted = dict(
        loss=kernel_costs.memory_seconds("loss_kernel", 3 * logits, 49_152),
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
        ["phase", "model"],
        ["bytes", "triton_poi_fused_add_1", "1000"],
        ["triton", "triton_poi_fused_add_1", "1,1,1", "128", "0", "40", "0"],
        ["torch", "add_kernel", "1,1,1", "128"],
    ]
    found = kernel_costs.estimate(lines * 2, flex_flop=2 * 214.5e9, steps=2)
    assert found["estimate_ms"] == {
        "flex attention": 1.0,
        "products bf16": 1.51,
        "attention forward": 0.48,
        "other generated": 0.76,
        "torch's kernels": 0.0,
    }
    assert found["estimate_sum_ms"] == 3.8 and found["estimate_optimizer_ms"] == 0.76
