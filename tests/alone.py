"""Runs each test marked gpu in a process of its own. After an illegal memory access every later call of a
process fails, so in one process a fault would fail all tests that come after it.

conftest.py calls it. It does nothing without a GPU, in the processes that it starts, and on the stand-in for
a GPU, which nothing can spoil.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tools.gpu.report import start_process, stop_process

LIMIT = 240.0  # s of one test; with five presets compiling alongside, two of 21 needed more than 100
CHILD = "GPU_TEST_CHILD"  # in the environment of the processes


def active():
    """Is there a GPU that a test could spoil for others?"""
    if CHILD in os.environ or "STATIC_NAME" in os.environ:
        return False
    import torch

    return torch.cuda.is_available()


def result_of(item):
    """(exit code or None, output, seconds) of a test in a process of its own."""
    words = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", item.nodeid]
    env = os.environ | {CHILD: "1", "PYTHONUNBUFFERED": "1"}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpu_test_") as folder:
        output = Path(folder, "output.txt")
        process = start_process(words, item.config.rootpath, env, output)
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            stop_process(process)
        return code, output.read_text(encoding="utf-8", errors="replace"), time.perf_counter() - began


def report_of(item, code, text, seconds):
    """What the process of a test said, as pytest has it."""
    skipped = re.search(r"^SKIPPED .*?: (.*)$", text, re.M)
    outcome = "passed"
    longrepr = None
    if code != 0:  # below zero: by a signal
        outcome = "failed"
        longrepr = f"no end in {LIMIT:.0f} s\n{text}" if code is None else f"exit code {code}\n{text}"
    elif skipped:
        outcome = "skipped"
        longrepr = (str(item.path), 0, f"Skipped: {skipped[1]}")
    keywords = {name: 1 for name in item.keywords}
    return pytest.TestReport(item.nodeid, item.location, keywords, outcome, longrepr, "call",
                             duration=seconds)


def run(item):
    """True: the test was run here, in a process of its own."""
    if item.get_closest_marker("gpu") is None or not active():
        return None
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    hook.pytest_runtest_logreport(report=report_of(item, *result_of(item)))
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
