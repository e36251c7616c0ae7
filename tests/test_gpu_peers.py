"""bench --gpu-peers: foreign scripts beside ours, in turn."""

import json
import re
import subprocess
import sys
import time

import pytest

import fork_server
from helpers import ROOT
from tools.gpu import peers as gpu_peers

# Notes when it ran, and prints some lines, of which the last one counts
SCRIPT = """
import sys
name, *numbers = sys.argv[1:]
with open("../ran", "a") as file:
    file.write(name)
turn = len(open("../ran").read().replace("A" if name == "B" else "B", "")) - 1
print("step:1/2 step_avg:999.0ms")
print(f"step:2/2 step_avg:{numbers[turn]}ms", file=sys.stderr)
"""


@pytest.fixture
def folders(tmp_path):
    """Two of them, with the script."""
    found = [tmp_path / name for name in ("ours", "theirs")]
    for folder in found:
        folder.mkdir()
        (folder / "time.py").write_text(SCRIPT)
    return found


def command(name, *numbers):
    return f"{sys.executable} time.py {name} " + " ".join(numbers)


def bench(*words):
    """(exit code, what it prints, its last line on stderr)"""
    done = subprocess.run([fork_server.start(), ROOT / "tools/dev/bench.py", "--gpu-peers",
                           *map(str, words)], capture_output=True, text=True)
    return done.returncode, done.stdout, (done.stderr.strip().splitlines() or [""])[-1]


def test_two_scripts_take_turns(folders, tmp_path):
    """A B A B A B, each in its folder: median of each, and the ratio of these."""
    code, said, error = bench(*folders, "--command", command("A", "10.0", "30.0", "11.0"),
                              "--command", command("B", "22.0", "5.5", "44.0"), "--json", tmp_path / "json")
    assert code == 0, error
    assert (tmp_path / "ran").read_text() == "ABABAB"
    ours, theirs = folders
    assert said.splitlines()[-2:] == [
        f"{ours}: median 11 of 3 (10 to 30)", f"{theirs}: median 22 of 3 (5.5 to 44); 2.000 times {ours}"]
    kept = json.loads((tmp_path / "json").read_text())["sides"]
    assert [side["numbers"] for side in kept] == [[10, 30, 11], [22, 5.5, 44]]


def test_each_side_has_its_own_line_to_read(folders):
    """A regular expression with a group; one command serves both."""
    code, said, error = bench(*folders, "--command", "echo took 7 ms; echo took 8 ms, 0.5 s", "--read",
                              r"took (\d+) ms", "--read", r"([\d.]+) s", "--turns", 1)
    assert code == 0 and said.splitlines()[-2:] == [
        f"{folders[0]}: median 8 of 1 (8 to 8)",
        f"{folders[1]}: median 0.5 of 1 (0.5 to 0.5); 0.062 times {folders[0]}"], error


@pytest.mark.parametrize("words, said", [
    (["--command", "true"], r"printed nothing that 'step_avg:.*' finds"),
    (["--command", "echo step_avg:.."], "printed '..' where"),
    (["--command", "echo no memory; exit 3"], "no memory"),
    (["--command", "sleep 60", "--seconds", "0.3"], r"took more than 0.3 s \(--seconds\)")])
def test_a_run_without_a_number_fails(folders, words, said):
    code, _, error = bench(*folders, *words)
    assert code == 1 and re.search(said, error), error


@pytest.mark.parametrize("words, said", [
    ([], "--command is missing"),
    (["--command", "a", "--command", "b", "--command", "c"], "2 folders, but 3 times --command"),
    (["--command", "a", "--read", "("], "no regular expression"),
    (["--command", "a", "--read", "step"], "needs one group"),
    (["--command", "a", "--turns", 0], "--turns 1 at least"),
    (["--command", "a", "gone"], "gone is no folder")])
def test_what_cannot_run_is_refused(folders, words, said):
    code, _, error = bench(*folders, *words)
    assert code == 2 and said in error, error


def test_one_folder_is_refused(folders):
    code, _, error = bench(folders[0], "--command", "true")
    assert code == 2 and "two folders at least" in error


def test_what_a_command_started_ends_with_it(folders, tmp_path):
    """Else it would run beside the next one."""
    late = tmp_path / "late"
    command = f"(sleep 1; touch {late}) >/dev/null 2>&1 & echo step_avg:1"
    side = gpu_peers.Side(folders[0], command, re.compile(gpu_peers.READ))
    assert gpu_peers.run(side, 20) == 1
    time.sleep(1.5)
    assert not late.exists()
