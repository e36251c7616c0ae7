"""Puts the repository on the import path; what several tests share. Functions are in helpers.py.

What the markers are for: docs/testing.md.
"""

import gc
import itertools
import os
import re
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

# Modules with asserts that are no test files
pytest.register_assert_rewrite("golden_common", "golden_golf", "golden_speedrun", "golden_gpt2",
                               "golden_golf_plus", "golden_speedrun_frontier", "golden_gpt2_plus")

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")      # before torch: threads that wait take no core

import torch  # noqa: E402

import alone  # noqa: E402
import fork_server  # noqa: E402
import helpers  # noqa: E402
import train_gpt  # noqa: E402


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """A folder to run in that holds data/datasets/toy and data/tokenizers/toy.model. Read only, please."""
    root = tmp_path_factory.mktemp("tiny_data")
    helpers.write_toy_data(root)
    return root


@pytest.fixture
def workplace(tiny_data, tmp_path, monkeypatch):
    """A copy of tiny_data that a test may damage, as the current folder."""
    shutil.copytree(tiny_data / "data", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def smaller():
    """A tokenizer of 400 pieces."""
    return helpers.train_tokenizer(helpers.library_documents(60_000), 400)


@pytest.fixture(scope="session")
def other_512():
    """A tokenizer of 512 pieces that the toy dataset does not have. Its bytes of val are other ones."""
    return helpers.train_tokenizer([text.upper() for text in helpers.library_documents(60_000)], 512)


@pytest.fixture(scope="module")
def one_thread():
    """Threads that wait for each other take seconds on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tool(capsys):
    """records/record.py: words -> (exit code, what it printed, what went to stderr)."""
    from records import record

    def call(*words):
        capsys.readouterr()
        code = record.main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


@pytest.fixture(scope="session", autouse=True)
def imports_apart():
    """What was imported is no garbage: each collection of a run would look through it, for 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_trainer():
    """Where a test has loaded another train_gpt.py, the next one gets the one from before again."""
    yield
    sys.modules["train_gpt"] = train_gpt


@pytest.fixture(autouse=True)
def torch_settings():
    """A Team sets them for its whole process; the next test starts from torch's own again."""
    yield
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_flush_denormal(False)


# ---------------------------------------------------------------- runs
NUMBERS = itertools.count()     # of runs, for their names


@pytest.fixture(scope="module")
def root(tiny_data, tmp_path_factory):
    """A folder to run in, with data/."""
    folder = tmp_path_factory.mktemp("root")
    (folder / "data").symlink_to(tiny_data / "data")
    return folder


@pytest.fixture
def train(root, monkeypatch, capsys):
    """main() in this process, in root: settings -> code, out, err and what helpers.look finds."""
    monkeypatch.chdir(root)

    def go(base, **settings):
        run_id = settings.get("RESUME") or f"run{next(NUMBERS)}"
        env = base | settings | {"RESUME" if "RESUME" in settings else "RUN_ID": run_id}
        capsys.readouterr()
        code = train_gpt.main([], env)
        train_gpt.catch_signals()       # those of training hold the run, and that its locked log
        gc.enable()
        out, err = capsys.readouterr()
        return SimpleNamespace(**vars(helpers.look(root / "logs" / run_id)), code=code, out=out, err=err)

    return go


class SimulatedClock:
    """For train(): a clock that stands still but where a test lets time pass; and the Run that trains."""

    def __init__(self):
        self.now = 0.0
        self.run = None

    def perf_counter(self):
        return self.now

    def passes(self, fn, seconds):
        """fn, but that each call takes so many seconds: a number, or a function of the call's arguments."""
        def call(*args, **kw):
            self.now += seconds(*args, **kw) if callable(seconds) else seconds
            return fn(*args, **kw)
        return call


@pytest.fixture
def clock(monkeypatch):
    """The clock of runs in this process while they train."""
    clock = SimulatedClock()
    real = train_gpt.train

    def train(run):
        clock.run = run
        with monkeypatch.context() as patch:
            patch.setattr(train_gpt, "time", clock)
            try:
                return real(run)
            finally:
                clock.run = None

    monkeypatch.setattr(train_gpt, "train", train)
    return clock


def rank_environments(ranks):
    """What torchrun adds to each rank's environment, and the store that its agent holds."""
    if ranks == 1:
        return [{}], None
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                          timeout=timedelta(seconds=60))
    common = dict(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                  MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True")
    return [common | dict(RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(ranks)], store


def wait_for_ranks(processes, timeout, grace):
    """Until all have ended, or so many seconds after one failed, as torchrun has it, or until the timeout."""
    ends = time.monotonic() + timeout
    failed = False
    while None in (codes := [process.poll() for process in processes]) and time.monotonic() < ends:
        if not failed and any(codes):
            failed = True
            ends = min(ends, time.monotonic() + grace)
        time.sleep(0.02)
    assert any(codes) or None not in codes, f"no end in {timeout} s"


def start_rank(cwd, env, output):
    """A rank in that folder. What it prints goes to OUTPUT.out and OUTPUT.err."""
    with open(output + ".out", "wb") as out, open(output + ".err", "wb") as err:
        return fork_server.popen([ROOT / "tests/inject.py"], cwd, env, out, err)


@pytest.fixture(scope="module")
def go(root):
    """A run of ranks, forks of one process -> codes, code (rank 0's), out, err, seconds, met (was a fault
    met?), and what helpers.look finds.

    fault: as inject.py has it. resume: of a run, with nothing else given unless it is in settings. act:
    called with the process of rank 0 when the ranks have begun."""
    def go(settings, fault="", ranks=1, resume="", act=None, cwd=root, timeout=400, grace=30, **more):
        run_id = resume or more.get("RUN_ID") or f"run{next(NUMBERS)}"
        env = settings | more | {"RESUME" if resume else "RUN_ID": run_id}
        env |= {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        env |= dict(OMP_NUM_THREADS="1", FAULT=fault, PYTHONPATH=str(ROOT))
        places, store = rank_environments(ranks)
        outs = [str(Path(cwd, f"output{next(NUMBERS)}")) for _ in range(ranks)]
        began = time.monotonic()
        processes = [start_rank(cwd, env | place, out) for place, out in zip(places, outs)]
        try:
            if act:
                act(processes[0])
            wait_for_ranks(processes, timeout, grace)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        codes = [process.returncode for process in processes]
        seconds = time.monotonic() - began
        out, err = ("".join(Path(name + end).read_text(errors="replace") for name in outs)
                    for end in (".out", ".err"))
        return SimpleNamespace(
            **vars(helpers.look(Path(cwd, "logs", run_id))), code=codes[0], codes=codes, out=out,
            err=re.sub(r"(?m)^inject: .*\n", "", err), met="inject: " in err, seconds=seconds)

    return go


@pytest.fixture(scope="module")
def whole(go):
    """The same run, uninterrupted and without checkpoints; each once."""
    kept = {}

    def whole(settings, ranks=1):
        key = (ranks, *sorted(settings.items()))
        if key not in kept:
            kept[key] = go(settings | {"SAVE_EVERY": "0"}, ranks=ranks)
            assert kept[key].codes == [0] * ranks, kept[key].err
        return kept[key]

    return whole


# ---------------------------------------------------------------- two processes
def pytest_configure(config):
    """Processes that share the tests share one server of forks."""
    if hasattr(config, "workerinput"):
        sys.executable = config.workerinput["python"]
    elif getattr(config.option, "numprocesses", None):
        os.environ[fork_server.SHARED] = fork_server.start()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    """... and are forks of it themselves."""
    for spec in specs:
        spec.python = fork_server.start()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["python"] = sys.executable


# ---------------------------------------------------------------- which tests run
QUICK = {       # a file, or a test of it with its cases
    "test_config.py", "test_data.py", "test_eval.py", "test_golden.py", "test_kernel_costs.py",
    "test_model.py", "test_optimizer.py", "test_speedrun.py",
    "test_train.py::test_one_rank", "test_train.py::test_two_ranks_agree_with_one",
    "test_train.py::test_same_seed_same_bits", "test_faults.py::test_killed_at_a_moment",
    "test_plus.py::test_a_run_killed_and_resumed"}


def markers_of(item):
    return {mark.name for mark in item.iter_markers()}


def is_left_out(markers, asked):
    """Of a test with these markers, where -m names these: static, which needs CUDA's libraries, unless it is
    named itself; slow, unless one of the test's markers is."""
    return "static" in markers - asked or ("slow" in markers and not markers & asked)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks the quick tests; leaves out what takes long or needs CUDA's libraries, unless asked for it."""
    for item in items:
        if QUICK & {item.path.name, f"{item.path.name}::{item.originalname}"}:
            item.add_marker("quick")
    asked = set(re.findall(r"\w+", config.option.markexpr))
    left = [item for item in items if is_left_out(markers_of(item), asked)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    return alone.run(item)
