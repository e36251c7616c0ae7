"""Runs each test marked gpu in a process of its own, some side by side. After an illegal memory access every
later call of a process fails, so in one process a fault would fail all tests that come after it.

conftest.py calls it. It does nothing without a GPU, in the processes that it starts, and on the stand-in for
a GPU, which nothing can spoil. GPU_TESTS_ALONE=1 makes it work anywhere, for its own test.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tools.gpu.report import start_process, stop_process

LIMIT = 240.0  # s of one test; with five presets compiling alongside, two of 21 needed more than 100
CHILD = "GPU_TEST_CHILD"  # in the environment of the processes
FORCED = "GPU_TESTS_ALONE"
MOST = 6  # side by side, on cores enough
GiB_OF_A_TOY = 4
# The most telling first, and of these the cheapest; what needs most memory last. GiB are estimates, for
# logits of 49,152 x 50,304 in bf16 (4.6 GiB), their gradient and slices in fp32.
ORDER = dict(
    test_bf16_on_the_gpu_trains_like_fp32_on_the_cpu=GiB_OF_A_TOY,
    test_evaluation_equals_the_cpu=GiB_OF_A_TOY,
    test_compiled=GiB_OF_A_TOY,
    test_compiled_loss_equals_the_reference=GiB_OF_A_TOY,
    test_fp8=GiB_OF_A_TOY,
    test_compiled_attention_equals_the_reference=GiB_OF_A_TOY,
    test_compiled_fp8_of_speedrun_plus_equals_the_cpu=GiB_OF_A_TOY,
    test_fp8_compiles_with_the_delayed_scales_of_all_layers=GiB_OF_A_TOY,
    test_nothing_compiles_on_the_clock=GiB_OF_A_TOY,
    test_no_synchronisation_between_log_lines=GiB_OF_A_TOY,
    test_the_cap=GiB_OF_A_TOY,
    test_fp32_on_the_gpu=GiB_OF_A_TOY,
    test_under_torchrun=GiB_OF_A_TOY,
    test_the_plan_knows_the_memory_of_a_step=12,
    test_flex_attention_at_real_size=12,
    test_fp8_products_at_real_size=24,
    test_the_loss_kernel_at_real_size=32,
)
PLACES = {name: place for place, name in enumerate(ORDER)}


def is_gpu_test(item):
    return item.get_closest_marker("gpu") is not None


def active():
    """Is there a GPU that a test could spoil for others? Asked once a gpu test was collected."""
    if CHILD in os.environ or "STATIC_NAME" in os.environ:
        return False
    if FORCED in os.environ:
        return True
    import torch

    return torch.cuda.is_available()


def name_of(item):
    return getattr(item, "originalname", None) or item.name


def free_GiB():
    """Of the first GPU, asked without touching it."""
    words = "nvidia-smi --query-gpu=memory.free --format=csv,noheader,nounits -i 0"
    code, said = subprocess.getstatusoutput(words)
    return float(said) / 1024 if code == 0 and said.strip().isdigit() else 16.0


class Processes:
    """The tests of a session, each in a process. A result is waited for in order; those that follow run
    meanwhile, as many as cores and memory allow."""

    def __init__(self, config, items):
        self.config = config
        self.waiting = [] if hasattr(config, "workerinput") else list(items)  # xdist: each worker its own
        self.running = {}  # item: (process, output, when it began)
        self.results = {}  # item: (exit code or None, output, seconds)
        self.most = max(1, min(MOST, len(os.sched_getaffinity(0)) // 2))
        self.memory = free_GiB()
        self.folder = tempfile.TemporaryDirectory(prefix="gpu_tests_")

    def start(self, item):
        output = Path(self.folder.name, f"{len(self.results) + len(self.running)}.txt")
        words = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", item.nodeid]
        env = os.environ | {CHILD: "1", "PYTHONUNBUFFERED": "1"}
        process = start_process(words, self.config.rootpath, env, output)
        self.running[item] = process, output, time.perf_counter()

    def fits(self, item):
        held = sum([ORDER.get(name_of(other), GiB_OF_A_TOY) for other in self.running])
        enough = held + ORDER.get(name_of(item), GiB_OF_A_TOY) <= self.memory
        return not self.running or len(self.running) < self.most and enough

    def pump(self):
        """Takes what has ended, starts what may start."""
        for item, (process, output, began) in [*self.running.items()]:
            code = process.poll()
            seconds = time.perf_counter() - began
            if code is not None or seconds > LIMIT:
                stop_process(process)
                text = output.read_text(encoding="utf-8", errors="replace")
                self.results[item] = code, text, seconds
                del self.running[item]
        while self.waiting and self.fits(self.waiting[0]):
            self.start(self.waiting.pop(0))

    def result(self, item):
        if item not in self.results and item not in self.running:
            if item in self.waiting:
                self.waiting.remove(item)
            self.waiting.insert(0, item)
        while item not in self.results:
            self.pump()
            time.sleep(0.05)
        return self.results.pop(item)

    def stop(self):
        for process, _, _ in self.running.values():
            stop_process(process)
        self.folder.cleanup()


def report_of(item, code, text, seconds):
    """What the process of a test said, as pytest has it."""
    outcome = "passed"
    longrepr = None
    if code is None:
        outcome = "failed"
        longrepr = f"no end in {LIMIT:.0f} s\n{text}"
    elif code < 0:
        outcome = "failed"
        longrepr = f"its process ended by {signal.Signals(-code).name}\n{text}"
    elif code != 0:
        outcome = "failed"
        longrepr = text
    elif re.search(r"^1 skipped", text, re.M):
        why = re.search(r"^SKIPPED .*?: (.*)$", text, re.M)
        outcome = "skipped"
        longrepr = (str(item.path), 0, f"Skipped: {why[1] if why else ''}")
    keywords = {name: 1 for name in item.keywords}
    return pytest.TestReport(item.nodeid, item.location, keywords, outcome, longrepr, "call",
                             duration=seconds)


# ---------- what conftest.py calls
def arrange(config, items):
    """Sorts the gpu tests among themselves, where each gets a process."""
    mine = [item for item in items if is_gpu_test(item)]
    if not mine or not active():
        return
    places = [place for place, item in enumerate(items) if is_gpu_test(item)]
    mine.sort(key=lambda item: PLACES.get(name_of(item), len(PLACES)))
    for place, item in zip(places, mine):
        items[place] = item
    config.gpu_processes = Processes(config, mine)


def run(item):
    """True: the test was run here, in a process of its own."""
    processes = getattr(item.config, "gpu_processes", None)
    if processes is None or not is_gpu_test(item):
        return None
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    hook.pytest_runtest_logreport(report=report_of(item, *processes.result(item)))
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def finish(config):
    """Nothing goes on after the session, however it ends."""
    processes = getattr(config, "gpu_processes", None)
    if processes:
        processes.stop()
