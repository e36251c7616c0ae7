"""Toy runs of all presets on the stand-in that computes, and faults that it must name.

All need the CUDA build of torch that `./run.sh static` installs; `./run.sh test -m static` runs them, with
TORCH=2.11.0 before it by the oldest torch that is promised, which has three of the faults.
"""

import subprocess
import sys

import pytest
import torch

from helpers import ROOT, SCRIPT, planted
from tools.gpu.agenda import PRESETS

pytestmark = pytest.mark.static
# name: (what is written in the script, in its place, preset, words of the PROBLEM). A card showed the first
# three, which are torch 2.11's
PLANTED = {
    "a weighted embedding_bag in bf16": (
        "if embed.is_cuda:", "if False:", "tiny",
        "not implemented for 'BFloat16'"),
    "code compiled for weights of another dtype": (
        "    torch._dynamo.reset()\n    run.loss_fn = None\n",
        "    evaluate(run.model, cfg, run.data, team)\n    run.loss_fn = None\n", "golf",
        "expected mat1 and mat2 to have the same dtype"),
    "tables of several rows": (
        "joined = documents is not None and len(documents) > 1", "joined = False", "speedrun",
        "which has"),
    "a table without its first blocks": (
        "blocks.clamp(max=n - 1).int()]", "blocks.clamp(max=n - 1).int()[..., 1:].contiguous()]",
        "speedrun", "off from fp32"),
    "lists of whole blocks that begin one block late": (
        "whole_keys = (own - first_whole, first_whole + i)",
        "whole_keys = (own - first_whole, first_whole + i + 1)", "speedrun", "off from fp32"),
    "a token beyond the embedding": (
        "F.embedding(tokens, self.embed).to(dtype)", "F.embedding(tokens + 500, self.embed).to(dtype)",
        "tiny", "index out of"),
    "the gradient of a scale that is summed in bf16": (
        "class_scale.float()[sure]", "class_scale[sure]", "tiny", "compiled class_scale is off from fp32"),
    "gradients of the loss without its slope": (
        "most * part - norm) * (part - part * part)", "most * part - norm)", "golf_plus",
        "off from fp32"),
    "an fp8 scale at an address that cuBLAS refuses": (
        "torch.empty(layers, 3, 4)[..., 0].requires_grad_()", "torch.empty(layers, 3, requires_grad=True)",
        "speedrun_plus", "CUBLAS_STATUS_NOT_SUPPORTED"),
    "a loss over the first block of the logits": (
        "        for low in range(0, V, BLOCK):\n            i = low + tl.arange(0, BLOCK)\n"
        "            x = tl.load(logits + i, mask=i < V, other=0.0).to(tl.float32)\n"
        "            part = 1 / (1 + tl.exp2(x * slope + offset))\n            total",
        "        for low in range(0, BLOCK, BLOCK):\n            i = low + tl.arange(0, BLOCK)\n"
        "            x = tl.load(logits + i, mask=i < V, other=0.0).to(tl.float32)\n"
        "            part = 1 / (1 + tl.exp2(x * slope + offset))\n            total", "golf_plus",
        "off from fp32"),
    "a window one token too wide": (
        "(key <= query) & (query - key <= window)", "(key <= query) & (query - key <= window + 1)",
        "speedrun", "off from fp32"),
}  # fmt: skip
OF_THE_OLDEST = [*PLANTED][:3]


def run(preset, folder):
    """(exit code, what it printed)"""
    command = [sys.executable, "-m", "tools.gpu.static", "--run", preset, "--trainer", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_planted_faults_have_a_place():
    source = SCRIPT.read_text()
    assert [name for name, (old, *_) in PLANTED.items() if source.count(old) != 1] == []


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named(name, tmp_path):
    old, new, preset, words = PLANTED[name]
    if name in OF_THE_OLDEST and not torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.12 and newer run this")
    planted(tmp_path, old, new)
    code, printed = run(preset, tmp_path)
    assert code == 1 and words in printed.split("PROBLEM")[1], printed


@pytest.mark.parametrize("preset", PRESETS)
def test_a_toy_run_computes_what_the_cpu_computes(preset):
    code, printed = run(preset, ROOT)
    assert code == 0 and "PROBLEM" not in printed, printed
    assert "EVAL_FROM" in printed and "with the same losses" in printed
