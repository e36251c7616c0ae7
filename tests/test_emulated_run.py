"""Toy runs of all presets on the stand-in that computes, and faults that it must name.

All need the CUDA build of torch that `./run.sh static` installs; `./run.sh test -m static` runs them, with
TORCH=2.11.0 before it by the oldest torch that is promised.
"""

import json
import subprocess
import sys

import pytest
import torch

from helpers import ROOT, SCRIPT, planted
from tools.gpu.agenda import PRESETS

pytestmark = pytest.mark.static
OLDEST = torch.__version__.startswith("2.11.")
STEPS = ("--parts", "steps")
MAIN = ("--parts", "main")
# name: (what is written in the script, in its place, preset, part, words of the PROBLEM; None: none)
PLANTED = {
    "a weighted embedding_bag in bf16": (
        "if embed.is_cuda:", "if False:", "tiny", STEPS,
        "not implemented for 'BFloat16'" if OLDEST else None),
    "code compiled for weights of another dtype": (
        "    torch._dynamo.reset()\n    run.loss_fn = None\n", "    run.loss_fn = None\n", "golf", MAIN,
        "expected mat1 and mat2 to have the same dtype" if OLDEST else None),
    "tables of several rows": (
        "joined = documents is not None and len(documents) > 1", "joined = False", "speedrun", STEPS,
        "which has" if OLDEST else None),
    "a table without its first blocks": (
        "blocks.clamp(max=n - 1).int()]", "blocks.clamp(max=n - 1).int()[..., 1:].contiguous()]",
        "speedrun", STEPS, "off from fp32"),
    "lists of whole blocks that begin one block late": (
        "whole_keys = (own - first_whole, first_whole + i)",
        "whole_keys = (own - first_whole, first_whole + i + 1)", "speedrun", STEPS, "off from fp32"),
    "a token beyond the embedding": (
        "F.embedding(tokens, self.embed).to(dtype)", "F.embedding(tokens + 500, self.embed).to(dtype)",
        "tiny", STEPS, "index out of"),
    "gradients of the loss without its slope": (
        "most * part - norm) * (part - part * part)", "most * part - norm)", "golf_plus", STEPS,
        "off from fp32"),
    "an fp8 scale at an address that cuBLAS refuses": (
        "torch.empty(layers, 3, 4)[..., 0].requires_grad_()", "torch.empty(layers, 3, requires_grad=True)",
        "speedrun_plus", STEPS, "CUBLAS_STATUS_NOT_SUPPORTED"),
    "a loss over the first block of the logits": (
        "        for low in range(0, V, BLOCK):\n            i = low + tl.arange(0, BLOCK)\n"
        "            x = tl.load(logits + i, mask=i < V, other=0.0).to(tl.float32)\n"
        "            part = 1 / (1 + tl.exp2(x * slope + offset))\n            total",
        "        for low in range(0, BLOCK, BLOCK):\n            i = low + tl.arange(0, BLOCK)\n"
        "            x = tl.load(logits + i, mask=i < V, other=0.0).to(tl.float32)\n"
        "            part = 1 / (1 + tl.exp2(x * slope + offset))\n            total", "golf_plus", STEPS,
        "off from fp32"),
    "a window one token too wide": (
        "(key <= query) & (query - key <= window)", "(key <= query) & (query - key <= window + 1)",
        "speedrun", STEPS, "off from fp32"),
}  # fmt: skip


def run(preset, parts, folder):
    """(exit code, what it found, what it printed)"""
    words = ["--run", preset, *parts, "--trainer", folder, "--json", folder / "found.json"]
    if folder == ROOT:
        words = ["--run", preset, *parts]
    command = [sys.executable, "-m", "tools.gpu.static", *words]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_planted_faults_have_a_place():
    source = SCRIPT.read_text()
    assert [name for name, (old, *_) in PLANTED.items() if source.count(old) != 1] == []


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named(name, tmp_path):
    old, new, preset, parts, words = PLANTED[name]
    planted(tmp_path, old, new)
    code, printed = run(preset, parts, tmp_path)
    (found,) = json.loads((tmp_path / "found.json").read_text()).values()
    assert code == (words is not None), printed
    assert words is None or any(words in fault for fault in found["faults"]), printed


@pytest.mark.parametrize("preset", PRESETS)
def test_a_toy_run_computes_what_the_cpu_computes(preset):
    code, printed = run(preset, (), ROOT)
    assert code == 0 and "PROBLEM" not in printed, printed
    assert "EVAL_FROM" in printed and "on the CPU in fp32" in printed
