"""A process per gpu test: one that dies by a signal spoils no other. Without a GPU, by GPU_TESTS_ALONE=1."""

import os
import re
import subprocess
import sys

import alone
from helpers import ROOT

CONFTEST = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import alone

def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: x")
    alone.LIMIT = 6.0

def pytest_runtest_protocol(item, nextitem):
    return alone.run(item)
"""
TESTS = """
import os, signal, time
import pytest

PARENT = os.getppid()
spoilt = []

@pytest.mark.gpu
def test_an_illegal_access():
    spoilt.append(1)
    os.kill(os.getpid(), signal.SIGSEGV)

@pytest.mark.gpu
@pytest.mark.parametrize("case", [1, 2])
def test_fine(case):
    assert not spoilt and "GPU_TEST_CHILD" in os.environ

@pytest.mark.gpu
def test_wrong():
    assert 1 == 2, "as planted"

@pytest.mark.gpu
def test_without_an_end():
    time.sleep(60)

@pytest.mark.gpu
def test_not_here():
    pytest.skip("no fp8")

def test_another():
    assert "GPU_TEST_CHILD" not in os.environ
"""


def test_a_gpu_test_that_dies_spoils_no_other(tmp_path):
    """Signals, failures, limits and skips are told apart; other tests stay in the process."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_planted.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    clean = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    words = [sys.executable, "-m", "pytest", "-v", "-rfs", "-p", "no:cacheprovider"]
    done = subprocess.run(words, cwd=tmp_path, env=clean | {alone.FORCED: "1"}, capture_output=True,
                          text=True, timeout=100)
    found = dict(re.findall(r"^test_planted\.py::(\S+) (PASSED|FAILED|SKIPPED)", done.stdout, re.M))
    assert found == {
        "test_an_illegal_access": "FAILED", "test_fine[1]": "PASSED", "test_fine[2]": "PASSED",
        "test_wrong": "FAILED", "test_without_an_end": "FAILED", "test_not_here": "SKIPPED",
        "test_another": "PASSED"}, done.stdout + done.stderr
    for words in ("its process ended by SIGSEGV", "AssertionError: as planted", "no end in 6 s", "no fp8"):
        assert words in done.stdout, words
    assert done.returncode == 1 and "3 failed, 3 passed, 1 skipped" in done.stdout


def test_without_a_gpu_nothing_changes(monkeypatch):
    monkeypatch.delenv(alone.FORCED, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert not alone.active()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert alone.active()
    for name in (alone.CHILD, "STATIC_NAME"):
        monkeypatch.setenv(name, "1")
        assert not alone.active()
        monkeypatch.delenv(name)
