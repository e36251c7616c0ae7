"""Puts the repository on the import path; what several tests share. Functions are in helpers.py."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "records"), str(ROOT / "data")]

import helpers  # noqa: E402


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """A folder to run in that holds data/datasets/toy and data/tokenizers/toy.model. Read only, please."""
    root = tmp_path_factory.mktemp("tiny_data")
    helpers.write_toy_data(root)
    return root


@pytest.fixture(scope="module")
def one_thread():
    """Threads that wait for each other take seconds on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tool(capsys):
    """records/record.py: words -> (exit code, what it printed, what went to stderr)."""
    import record

    def call(*words):
        capsys.readouterr()
        code = record.main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


@pytest.fixture(autouse=True)
def torch_settings():
    """A Team sets them for its whole process; the next test starts from torch's own again."""
    yield
    if torch := sys.modules.get("torch"):
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.set_flush_denormal(False)
