"""records/: a record folder made, checked, altered; the leak probe; the board."""

import hashlib
import json
import os
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_gpt
from helpers import ROOT, SCRIPT, TOY

import folders
import leak_probe
import record
import runs

BASELINE = sorted((ROOT / "records" / "track_tiny").glob("*_Baseline"))[0]


@pytest.fixture
def folder(tmp_path):
    """A copy of the Baseline."""
    return shutil.copytree(BASELINE, tmp_path / BASELINE.name)


# ------------------------------------------------------------ the Baseline, unaltered and altered
def test_the_baseline_passes(tool, folder):
    code, out, _ = tool("check", folder)
    assert code == 0 and "nothing fails" in out and "n/a" not in out and "FAIL" not in out
    assert "a stranger's code" in out and re.search(
        r"pass +leak probe .* the artifact: .* is 0, every row", out
    )
    assert folders.Folder(folder).track.min_runs <= len(folders.Folder(folder).runs)


def test_no_exec_leaves_code_out_and_says_so(tool, folder):
    mark = folder.parent / "it ran"
    (folder / "train_gpt.py").write_text(f"open({str(mark)!r}, 'w')\n")
    code, out, _ = tool("check", "--no-exec", "--rerun-eval", folder)
    assert code == 1 and out.count("LEFT OUT by --no-exec") == 2 and not mark.exists()
    tool("check", folder)
    assert mark.exists()


def digit_after(text, pattern):
    """text with another digit where the pattern's group ends."""
    found = re.search(pattern, text, re.M | re.S)
    at = found.end(1) - 1
    assert text[at].isdigit(), (pattern, text[at])
    return text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]


ALTERATIONS = {  # file: patterns whose group ends in the digit to alter
    "README.md": [
        r"\| 1338 \| train_seed1338.log \| ([\d.]+)",
        r"mean (\d\.\d+)",
        r"std (\d\.\d+)",
        r"Exact metric of train.log: `val_bpb (\d\.\d+)",
        r"^\| torch \| (\d)",
        r"\| 1337 \| .* ([\d,]+) \|$",
        r"loss.png \| (\w*?\d)",
        r"^Seeds: (\d+)",
        r"rules \| version (\d)",
        r"Training time: n=(\d)",
    ],
    "submission.json": [
        r'"val_bpb": ([\d.]+)',
        r'"val_loss": ([\d.]+)',
        r'"bytes_total": (\d+)',
        r'"bytes_code": (\d+)',
        r'"val_bpb_std": ([\d.]+)',
        r'"time_mean": ([\d.]+)',
        r'"date": "([\d-]+)',
        r'"n": (\d)',
        r'"seeds": \[\s+(\d+)',
        r'"train_gpt.py": "(\w*?\d)',
        r'"artifact_sha256": "(\w*?\d)',
        r'"git_commit": "(\w*?\d)',
    ],
    "result.json": [
        r'"val_loss": ([\d.]+)',
        r'"val_bpb": ([\d.]+)',
        r'"train_time_ms": (\d+)',
        r'"steps": (\d+)',
        r'"tokens": (\d+)',
        r'"bytes_model": (\d+)',
        r'"matrix_lr": "([\d.]+)',
        r'"val_bytes": (\d+)',
        r'"code_sha256": "(\w*?\d)',
        r'"started": "([\d-]+)',
        r'"p95": ([\d.]+)',
        r'"seed": (\d+)',
    ],
    "result_seed1340.json": [r'"val_bpb": ([\d.]+)', r'"process_ms": (\d+)', r'"world_size": (\d)'],
    "train.log": [
        r"^final_int8_zlib_roundtrip_exact val_loss:([\d.]+)",
        r"roundtrip_exact .* val_bpb:([\d.]+)",
        r"^step:50/100000 train_loss:([\d.]+)",
        r"^config matrix_lr=([\d.]+)",
        r"^ +steps  (\d+)",
        r"^stopping_early: wallclock_cap train_time:(\d+)",
        r"return (\d+)",
    ],
    "train_seed1341.log": [
        r"^final_model_exact val_loss:([\d.]+)",
        r"^Total submission size int8\+zlib: (\d+)",
        r"^data: val_bytes:(\d+)",
    ],
    "train_gpt.py": [r"weight_decay: float = const\(([\d.]+)"],
}


@pytest.mark.parametrize("name, pattern", [(name, p) for name, ps in ALTERATIONS.items() for p in ps])
def test_one_altered_digit_is_found_and_named(tool, folder, name, pattern):
    text = (folder / name).read_bytes().decode()
    (folder / name).write_bytes(digit_after(text, pattern).encode())
    code, out, err = tool("check", "--no-exec", folder)
    if code == 2:  # a version or date that no rule knows
        assert name in err
        return
    failed = [line for line in out.splitlines() if "FAIL" in line]
    assert code == 1 and failed and any(name in line for line in failed), out


def test_both_values_are_named(tool, folder):
    text = (folder / "result.json").read_text()
    value = json.loads(text)["val_bpb"]
    (folder / "result.json").write_text(text.replace(f"{value!r}", f"{value + 0.001!r}", 1))
    code, out, _ = tool("check", "--no-exec", folder)
    line = next(line for line in out.splitlines() if "numbers of the results" in line)
    assert code == 1 and f"{value + 0.001!r}" in line and f"{value!r}" in line


@pytest.mark.parametrize(
    "what",
    [
        "a log removed",
        "a log twice",
        "a result removed",
        "a byte of source",
        "loss.png",
        "a file more",
        "the artifact removed",
        "a byte of the artifact",
        "a folder more",
    ],
)
def test_other_alterations_are_found(tool, folder, what):
    log, name = folder / "train_seed1339.log", "train_seed1339.log"
    if what == "a log removed":
        log.unlink()
    elif what == "a log twice":
        name = "train_seed1350.log"
        shutil.copy(log, folder / name)
        shutil.copy(folder / "result_seed1339.json", folder / "result_seed1350.json")
    elif what == "a result removed":
        name = "result_seed1339.json"
        (folder / name).unlink()
    elif what in ("a byte of source", "loss.png", "a byte of the artifact"):
        name = {"a byte of source": "train_gpt.py", "loss.png": "loss.png"}.get(what, "final_model.int8.ptz")
        raw = bytearray((folder / name).read_bytes())
        raw[len(raw) // 2] ^= 1
        (folder / name).write_bytes(raw)
    elif what == "a file more":
        name = "more.txt"
        (folder / name).write_text("1")
    elif what == "a folder more":
        name = "more"
        (folder / name).mkdir()
    else:
        name = "final_model.int8.ptz"
        (folder / name).unlink()
    code, out, _ = tool("check", "--no-exec", folder)
    assert code == 1 and any(name in line for line in out.splitlines() if "FAIL" in line), out
    if what == "a log twice":
        assert "is the same run as train_seed1339.log" in out


def renew(folder):
    """Lists the folder's files anew, with their hashes and numbers, and makes its page, as a liar would."""
    submission = json.loads((folder / "submission.json").read_text())
    names = sorted(p.name for p in folder.iterdir() if p.name not in ("README.md", "submission.json"))
    submission["files"] = {name: folders.sha256((folder / name).read_bytes()) for name in names}
    (folder / "submission.json").write_text(record.json_text(submission))
    submission |= folders.computed(folders.Folder(folder))
    (folder / "submission.json").write_text(record.json_text(submission))
    (folder / "README.md").write_text(folders.readme_of(folders.Folder(folder)))


@pytest.mark.parametrize(
    "pattern",
    [
        r"^step:\d+/\d+ val_loss:([\d.]+)",
        r"^final_int8_zlib_roundtrip val_loss:([\d.]+)",
        r"^final_model val_loss:\S+ val_bpb:([\d.]+)",
        r"^ +score  val_loss:([\d.]+)",
        r"^stopping_early: wallclock_cap train_time:(\d+)",
        r"^Serialized model int8\+zlib: (\d+)",
    ],
)
def test_a_log_must_agree_with_itself(tool, folder, pattern):
    text = (folder / "train.log").read_text()
    (folder / "train.log").write_text(digit_after(text, pattern))
    renew(folder)
    code, out, _ = tool("check", "--no-exec", folder)
    assert code == 1 and re.search(r"FAIL +numbers of the results .*train.log", out), out


def test_a_run_copied_with_one_digit_changed_is_the_same_run(tool, folder):
    text = (folder / "train_seed1340.log").read_text().replace("config seed=1340", "config seed=1342")
    text = text.replace("config run_id=baseline_seed1340", "config run_id=x")
    (folder / "train_seed1342.log").write_text(digit_after(text, r"^step:50/\d+ train_loss:([\d.]+)"))
    result = json.loads((folder / "result_seed1340.json").read_text()) | {"seed": 1342, "run_id": "x"}
    result["config"] |= {"seed": "1342", "run_id": "x"}
    (folder / "result_seed1342.json").write_text(json.dumps(result))
    renew(folder)
    code, out, _ = tool("check", "--no-exec", folder)
    assert code == 1 and "train_seed1342.log is the same run as train_seed1340.log" in out


def test_a_folder_holds_nothing_else(tool, folder):
    (folder / "weights.bin").write_bytes(b"1")
    renew(folder)
    assert "weights.bin: no part of a record" in tool("check", "--no-exec", folder)[1]


def test_a_folder_without_its_submission_is_still_ours(tool, folder):
    (folder / "submission.json").unlink()
    code, out, _ = tool("check", "--no-exec", folder)
    assert code == 1 and "FAIL" in out and "submission.json is missing" in out


def test_notes_are_free(tool, folder):
    page = folder / "README.md"
    page.write_text(
        page.read_text().replace("Notes of the author go here.", "We tried 3.14 other things.\n\n1 2 3")
    )
    assert tool("check", "--no-exec", folder)[0] == 0


def test_consistent_lies_are_found_too(tool, folder):
    """Score, summary, result, submission, README altered alike, hashes renewed: the bytes do not add up."""
    for name in folder.iterdir():
        if name.suffix in (".log", ".json", ".md") and "135" not in name.name:
            text = name.read_text()
            for value in set(re.findall(r"1\.47\d{6,}", text)):
                text = text.replace(value, value.replace("1.47", "1.46", 1))
            name.write_text(text)
    renew(folder)
    code, out, _ = tool("check", "--no-exec", folder)
    assert code == 1 and re.search(r"FAIL +evaluation .*loss, tokens and bytes make", out)


def test_rerun_of_the_evaluation_on_other_data_fails(tool, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "ROOT", tmp_path)
    code, out, _ = tool("check", "--rerun-eval", folder)
    assert code == 1 and "data/datasets/embedded is not here" in out


# ------------------------------------------------------------ new, from toy runs
SETTINGS = TOY | dict(ITERATIONS="6", TRAIN_LOG_EVERY="1", SAMPLE_TOKENS="0", VAL_TOKENS="0",
                      EVAL_SLIDING="32", EVAL_TTT="4096")


@pytest.fixture(scope="module")
def toy(tiny_data, tmp_path_factory):
    """A folder with data/ and logs/ of toy runs: a0 a1 a2 (seeds 0 to 2), b0 b1 (another learning rate)."""
    root, here = tmp_path_factory.mktemp("toy_runs"), os.getcwd()
    (root / "data").symlink_to(tiny_data / "data")
    os.chdir(root)
    threads = torch.get_num_threads()
    try:
        for run_id, seed, more in (
            ("a0", 0, {}),
            ("a1", 1, {}),
            ("a2", 2, {}),
            ("b0", 0, {"MATRIX_LR": "0.01"}),
            ("b1", 1, {"MATRIX_LR": "0.01"}),
        ):
            env = SETTINGS | more | {"RUN_ID": run_id, "SEED": str(seed)}
            assert train_gpt.main([], env) == 0
            later = "2026-01-01T00:00:0" + str(len(list((root / "logs").iterdir()))) + "Z"
            edit(root / "logs" / run_id / "result.json", lambda result: result.update(finished=later))
    finally:
        os.chdir(here)
        torch.set_num_threads(threads)
    return root


@pytest.fixture
def home(toy, tmp_path, monkeypatch):
    """Like a repository whose records/ is empty, with the toy runs in logs/."""
    shutil.copytree(toy / "logs", tmp_path / "logs")
    monkeypatch.chdir(tmp_path)
    for module in (folders, record):
        monkeypatch.setattr(module, "HOME", tmp_path / "records")
    return tmp_path


def make(tool, name, *words):
    code, out, err = tool("new", "--name", name, "--author", "somebody", *words)
    assert code == 0, err
    return next((folders.HOME / "track_tiny").glob(f"*_{name}"))


def test_new_makes_a_folder_that_agrees_with_itself(tool, home):
    """The toy is too small for the track's own rules: data and number of runs; all else passes."""
    made = make(tool, "First", "logs/a0", "logs/a1", "logs/a2")
    code, out, _ = tool("check", made)
    assert code == 1 and "2 rules fail: data, runs" in out, out
    submission = json.loads((made / "submission.json").read_text())
    assert list(submission["files"]) == sorted(submission["files"])
    result = json.loads((home / "logs" / "a0" / "result.json").read_text())
    assert submission["val_bpb"] == result["val_bpb"] and submission["bytes_total"] == result["bytes_total"]
    assert set(folders.KEYS) <= set(submission) and submission["seeds"] == [0, 1, 2]


def test_scores_by_other_protocols_are_checked(tool, home):
    """They are probed for leaks, too, and are those of the log to the last digit."""
    made = make(tool, "First", "logs/a0", "logs/a1", "logs/a2")
    assert (made / "golf.py").exists()
    out = tool("check", made)[1]
    (probed,) = re.findall(r"pass +leak probe .*", out)
    assert "; sliding: 10 changes of later tokens" in probed and "; ttt: 10 changes of later tokens" in probed
    for name, shift in (("val_loss_ttt", 1e-7), ("val_bpb_sliding", -1e-7)):
        text = (made / "result.json").read_text()
        edit(made / "result.json", lambda result: result.update({name: result[name] + shift}))
        out = tool("check", "--no-exec", made)[1]
        assert "numbers of the results" in out.split("rules fail:")[1], out
        (made / "result.json").write_text(text)
    log = made / "train.log"
    log.write_text(log.read_text().replace("final_ttt val_loss_ttt", "final_ttt val_loss_tt"))
    out = tool("check", "--no-exec", made)[1]
    assert re.search(r"FAIL +numbers of the results .*final_ttt says nothing", out)


def test_all_code_counts_for_the_bytes(tool, home, monkeypatch):
    made = make(tool, "First", "logs/a0", "logs/a1", "logs/a2")
    result = json.loads((made / "result.json").read_text())
    code = sum((made / name).stat().st_size for name in ("train_gpt.py", *result["companions"]))
    assert {"golf.py", "kernels.py"} <= {*result["companions"]} and code > result["bytes_code"]
    largest = max(json.loads(path.read_text())["bytes_model"] for path in made.glob("result*.json"))
    for cap, fails in ((largest + code, False), (largest + code - 1, True)):
        folder = folders.Folder(made)
        folder.track = folder.track._replace(byte_cap=cap)
        assert verdict(record.check_bytes, folder).startswith("FAIL") == fails


def test_files_beside_the_script_belong_to_the_record(tool, home):
    """What a run loaded from beside train_gpt.py is copied, and checked by its sha256."""
    for run in ("a0", "a1", "a2"):
        (home / "logs" / run / "dial.py").write_text("turns = 1\n")
        beside = {"dial.py": hashlib.sha256(b"turns = 1\n").hexdigest()}
        edit(home / "logs" / run / "result.json", lambda result: result.update(companions=beside))
    made = make(tool, "First", "logs/a0", "logs/a1", "logs/a2")
    assert (made / "dial.py").read_text() == "turns = 1\n"
    assert "2 rules fail: data, runs" in tool("check", "--no-exec", made)[1]
    for damage in (lambda: (made / "dial.py").write_text("turns = 2\n"), (made / "dial.py").unlink):
        damage()
        code, out, _ = tool("check", "--no-exec", made)
        assert code == 1 and "dial.py" in out and "one script" in out.split("rules fail:")[1], out
    edit(home / "logs" / "a1" / "result.json", lambda result: result.update(companions={"dial.py": "0" * 64}))
    code, _, err = tool("new", "logs/a0", "logs/a1", "logs/a2", "--name", "Other")
    assert code == 2 and "other code" in err


def test_a_second_record_is_shown_against_the_first(tool, home):
    first = make(tool, "First", "logs/a0", "logs/a1", "logs/a2")
    words = [word for run in ("a0", "a1", "a2") for word in ("--baseline", f"logs/{run}")]
    second = make(tool, "Second", "logs/b0", "logs/b1", *words)
    page = (second / "README.md").read_text()
    assert f"`{first.name}`" in page and re.search(r"^\| matrix_lr \| 0.03 \| 0.01 \|$", page, re.M)
    assert "train_gpt.py: unchanged" in page and "Its script on the same machine: n=3" in page
    code, out, _ = tool("check", "--no-exec", second)
    failed = {name.strip() for name in re.findall(r"FAIL  (.{26})", out)}
    assert failed <= {"data", "runs", "score", "record before"} and "against the baseline logs: t=" in out
    baseline = second / "baseline_seed1.log"
    baseline.write_text(baseline.read_text().replace("config matrix_lr=0.03", "config matrix_lr=0.0001"))
    out = tool("check", "--no-exec", second)[1]
    assert f"baseline_seed1.log: config matrix_lr is '0.0001', in {first.name} '0.03'" in out
    shutil.rmtree(first)
    assert "but the best in this repository by then is 'none'" in tool("check", "--no-exec", second)[1]


def test_a_record_cannot_pass_over_the_one_before(tool, home):
    first = make(tool, "First", "logs/a0", "logs/a1", "logs/a2")
    second = make(tool, "Second", "logs/b0", "logs/b1", "--before", "none")
    out = tool("check", "--no-exec", second)[1]
    assert f"the record before is None, but the best in this repository by then is '{first.name}'" in out
    assert "the first of its track" in tool("check", "--no-exec", first)[1]


@pytest.mark.parametrize("what", ["a baseline that is not there", "no artifact"])
def test_a_failed_new_leaves_nothing(tool, home, what):
    words = ["logs/a0", "logs/a1", "logs/a2"]
    if what == "no artifact":
        (home / "logs/a0/final_model.int8.ptz").unlink()
    else:
        words += ["--baseline", "logs/nowhere"]
    assert tool("new", "--name", "X", *words)[0] == 2
    assert not list((home / "records").glob("*/*"))


def test_a_changed_script_is_shown_as_a_diff(tool, home):
    first = make(tool, "First", "logs/a0", "logs/a1", "logs/a2")
    script = (home / "logs/b0/train_gpt.py").read_bytes()
    changed = script.replace(b'    weight_decay=(0.0, "', b'    weight_decay=(0.0, "changed: ', 1)
    assert changed != script
    for name in ("b0", "b1"):
        run = home / "logs" / name
        (run / "train_gpt.py").write_bytes(changed)
        log, size = (run / "train.log").read_bytes(), str(len(changed)).encode()
        log = log.replace(script, changed).replace(
            b"Code size: " + str(len(script)).encode(), b"Code size: " + size
        )
        result = json.loads((run / "result.json").read_text())
        total = result["bytes_model"] + len(changed)
        log = log.replace(str(result["bytes_total"]).encode(), str(total).encode())
        result |= dict(code_sha256=folders.sha256(changed), bytes_code=len(changed), bytes_total=total)
        (run / "train.log").write_bytes(log)
        (run / "result.json").write_text(json.dumps(result))
    second = make(tool, "Second", "logs/b0", "logs/b1")
    assert "+1 -1 lines, see changes.diff" in (second / "README.md").read_text()
    assert "+    weight_decay" in (second / "changes.diff").read_text()
    code, out, _ = tool("check", "--no-exec", second)
    assert {name.strip() for name in re.findall(r"FAIL  (.{26})", out)} <= {"data", "runs", "score"}, out
    (first / "train_gpt.py").write_bytes(changed)  # the record before is not what it was
    assert "before: code_sha256" in tool("check", "--no-exec", second)[1]


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "what, sentence",
    [
        ("config", "run b0 has matrix_lr=0.01, a0 has 0.03"),
        ("code", "has other code than"),
        ("seed", "is used by more than one run"),
        ("unfinished", "run a1 did not finish"),
        ("resumed", "was resumed, but its result.json does not say so"),
        ("left out", "run a2 has the same code"),
        ("no reason", "run a2 has the same code"),
        ("nobody", "no finished run of the same code"),
        ("no result", "has no result.json"),
        ("no log", "has no train.log"),
        ("truncated", "result.json is no JSON"),
        ("no folder", "is no run folder"),
        ("before", "is no record of track tiny"),
    ],
)
def test_new_refuses(tool, home, what, sentence):
    words, logs = ["logs/a0", "logs/a1", "logs/a2"], home / "logs"
    if what == "config":
        words = ["logs/a0", "logs/a1", "logs/a2", "logs/b0"]
    elif what == "code":
        edit(logs / "a1" / "result.json", lambda r: r.update(code_sha256="0" * 64))
    elif what == "seed":
        edit(logs / "a1" / "result.json", lambda r: r.update(seed=0))
    elif what == "unfinished":
        edit(logs / "a1" / "result.json", lambda r: r.update(stop_reason=None))
    elif what == "resumed":
        log = (logs / "a1" / "train.log").read_text()
        line = re.search(r"(?m)^step:2/.*\n", log)[0]
        (logs / "a1" / "train.log").write_text(log.replace(line, line + line))
    elif what in ("left out", "no reason"):
        words = ["logs/a0", "logs/a1"] + ["--exclude", "a2="] * (what == "no reason")
    elif what == "nobody":
        words += ["--exclude", "b0=slow"]
    elif what in ("no result", "no log"):
        (logs / "a1" / {"no result": "result.json", "no log": "train.log"}[what]).unlink()
    elif what == "truncated":
        (logs / "a1" / "result.json").write_text('{"seed": 1, "va')
    elif what == "no folder":
        words += ["logs/a9"]
    elif what == "before":
        words += ["--before", "Nobody"]
    code, _, err = tool("new", "--name", "X", *words)
    assert code == 2 and sentence in err and err.count("\n") == 1
    assert not list((home / "records").glob("*/*"))


def test_an_excluded_run_is_shown_with_its_reason(tool, home):
    made = make(tool, "Two", "a0", "logs/a1", "--exclude", "logs/a2=the machine was busy")
    assert re.search(r"\| a2 \| 2 \| \d\.\d{8} \| the machine was busy \|", (made / "README.md").read_text())
    edit(made / "submission.json", lambda s: s["excluded"][0].update(reason="it was the worst"))
    assert re.search(r"FAIL +README .*the machine was busy", tool("check", "--no-exec", made)[1])


def test_a_marked_resumption_is_taken_and_shown(tool, home):
    edit(home / "logs" / "a1" / "result.json", lambda r: r.update(resumed=True))
    made = make(tool, "Resumed", "logs/a0", "logs/a1", "logs/a2")
    assert "Resumed: a1." in (made / "README.md").read_text()


def test_ablate_reverts_each_changed_constant(tool, home, toy, monkeypatch):
    """Real runs of two settings, two seeds each, against a record before."""
    (home / "data").symlink_to(toy / "data")
    make(tool, "First", "logs/a0", "logs/a1", "logs/a2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code, out, err = tool("ablate", "logs/b0", "-n", 2)
    assert code == 0, err
    assert len(re.findall(r"(?m)^\d/4 ", out)) == 4 and "matrix_lr=0.03 (not 0.01): n=2" in out
    assert "(the others are compared with this)" in out


def test_the_board_lists_records_best_first(tool, home):
    (home / "records").mkdir()
    shutil.copy(ROOT / "records" / "README.md", home / "records")
    names = [
        make(tool, "A", "logs/a0", "logs/a1", "logs/a2").name,
        make(tool, "B", "logs/b0", "logs/b1").name,
    ]
    values = {name: folders.rank_key(folders.Folder(home / "records/track_tiny" / name)) for name in names}
    assert tool("board")[0] == 0
    page = (home / "records" / "README.md").read_text()
    tiny = page.split("<!-- board tiny -->")[1].split("<!-- /board tiny -->")[0]
    order = re.findall(r"\[(\d{4}-\d\d-\d\d_\w+)\]", tiny)
    assert order == sorted(names, key=values.get) and "version 1: fails data, runs" in tiny and "±" in tiny
    assert "parameter-golf 2026-03-19_TrainingOptSeq4096" in page
    assert tool("board")[0] == 0 and (home / "records" / "README.md").read_text() == page


def test_the_board_in_the_repository_is_up_to_date(tool, tmp_path, monkeypatch):
    before = (ROOT / "records" / "README.md").read_text()
    shutil.copytree(ROOT / "records", tmp_path / "records", ignore=shutil.ignore_patterns("__pycache__"))
    for module in (folders, record):
        monkeypatch.setattr(module, "HOME", tmp_path / "records")
    assert tool("board")[0] == 0
    assert (tmp_path / "records" / "README.md").read_text() == before


# ------------------------------------------------------------ judging by the rules of each game
def fake_folder(track, values, times=None, before=None, **submission):
    """What Folder.test and the rules ask for, without files."""
    made = folders.Folder.__new__(folders.Folder)
    made.track, made.ours, made.baseline = folders.RULES[1][track], True, []
    made.submission = {"before": before, "track": track, "rules_version": 1, "excluded": []}
    made.submission |= {"systems_change": False} | submission
    made.values = lambda metric: times if metric == "time" else values
    made.runs = [SimpleNamespace(file=f"{i}") for i in range(len(values))]
    made.result = made.result_name = lambda run: {}
    return made


def verdict(function, folder):
    try:
        return function(folder, record.LOOK_ONLY)
    except record.Broken as error:
        return f"FAIL {error}"


def test_score_rules():
    losses = [3.2772, 3.2781, 3.2780, 3.2784, 3.2773, 3.2806, 3.2799, 3.2765]
    assert "p=0.0045" in verdict(record.check_score, fake_folder("speedrun", losses))
    worse = [loss + 0.001 for loss in losses]
    assert verdict(record.check_score, fake_folder("speedrun", worse)).startswith("FAIL")
    assert verdict(record.check_score, fake_folder("speedrun", worse, systems_change=True))[:4] == "val_"
    far = fake_folder("speedrun", [3.29, 3.281], systems_change=True)
    assert verdict(record.check_score, far).startswith("FAIL")
    assert verdict(record.check_score, fake_folder("golf", [1.3, 1.31], systems_change=True)).startswith(
        "FAIL"
    )
    # golf: 0.005 nats less than 1.20143417 is 1.19847..., in bits per byte of its split
    goal = 1.20143417 - 0.005 / np.log(2) * 62_021_632 / 151_080_363
    assert (
        verdict(record.check_score, fake_folder("golf", [goal - 0.0001 + d for d in (0, 1e-6, -1e-6)]))[:4]
        == "val_"
    )
    assert verdict(
        record.check_score, fake_folder("golf", [goal + 0.0001 + d for d in (0, 1e-6, -1e-6)])
    ).startswith("FAIL")
    core = [0.2571, 0.2572, 0.2641, 0.2606, 0.2729]
    assert "p=0.0" in verdict(record.check_score, fake_folder("gpt2", core))
    assert verdict(record.check_score, fake_folder("gpt2", [0.2571, 0.2472, 0.2406])).startswith("FAIL")
    assert "a single run" in verdict(record.check_score, fake_folder("gpt2", [0.27]))
    before = {"name": "x", "mean": 1.35, "values": [1.35, 1.351, 1.349]}
    assert verdict(record.check_score, fake_folder("tiny", [1.34, 1.341, 1.339], before=before))[:4] == "val_"
    assert verdict(record.check_score, fake_folder("tiny", [1.34, 1.36, 1.339], before=before)).startswith(
        "FAIL"
    )


@pytest.mark.parametrize("most, word", [("0", "bits per byte add up"), ("100", "CORE took only 100")])
def test_core_of_a_part_is_no_record(most, word):
    folder = fake_folder("gpt2", [0.26])
    folder.runs[0].eval = {}
    folder.result_name = lambda run: "result.json"
    folder.result = lambda run: {"eval": {}, "val_loss": 3.0, "val_bpb": None,
                                 "config": {"core_metric_max_per_task": most}}
    assert word in verdict(record.check_evaluation, folder)


def test_gpt2_is_compared_by_val_bpb_and_a_single_run_is_marked(tool, home):
    before = {"name": "x", "val_bpb": [0.7501, 0.7502, 0.7500]}
    told = verdict(record.check_comparison, fake_folder("gpt2", [0.7490, 0.7491, 0.7489], before=before))
    assert told.startswith("0.749000, x 0.750100, Welch t=13.47") and "p=0.0001" in told
    assert verdict(record.check_comparison, fake_folder("tiny", [1.0])) is None
    one = make(tool, "One", "logs/a0", "--exclude", "a1=a test", "--exclude", "a2=a test")
    assert "**A single run: its spread is unknown.**" in (one / "README.md").read_text()


def test_our_folders_have_no_excuse(tool, folder):
    """What would be n/a of a foreign folder fails one of ours."""
    made = folders.Folder(folder)
    made.runs[0].source = made.runs[1].source = None
    lines = []
    record.check(made, record.LOOK_ONLY, lines.append)
    assert any("FAIL  one script" in line for line in lines) and not any("n/a" in line for line in lines)


def test_time_rules():
    assert "ratio" in verdict(record.check_time, fake_folder("speedrun", [], [131.0, 131.1]))
    assert verdict(record.check_time, fake_folder("speedrun", [], [133.0, 133.1])).startswith("FAIL")
    assert verdict(record.check_time, fake_folder("tiny", [], [133.0, 133.1])) is None


@pytest.mark.parametrize(
    "source, fails",
    [
        ("model = torch.compile(model, dynamic=False)\n", False),
        ("import torch._inductor.config\n", True),
        ("model = torch.compile(model, mode='max-autotune')\n", True),
        ("torch._inductor_config.x = 1\n", True),
        ("torch.compile(f(a, b), dynamic=False, fullgraph=True)\n", False),
    ],
)
def test_compile_flags_of_the_speedrun(source, fails):
    folder = fake_folder("speedrun", [])
    folder.source = lambda: source
    assert verdict(record.check_flags, folder).startswith("FAIL") == fails


# ------------------------------------------------------------ the leak probe
LEAKS = {
    "a block mean": """
        B, T, C = x.shape
        x = x + x.view(B, T // 16, 16, C).mean(2).repeat_interleave(16, 1)""",
    "a chunk state": """
        ends = torch.arange(x.size(1)) // 8 * 8 + 7
        x = x + 1e-3 * x[:, ends]""",
    "an FFT mix": """
        turns = torch.exp(1j * torch.arange(x.size(1)) ** 2)[:, None]
        x = x + 1e-3 * torch.fft.ifft(torch.fft.fft(x, dim=1) * turns, dim=1).real""",
    "one bidirectional layer": """
        x = x + 0.1 * torch.softmax(x @ x.mT, -1) @ x""",
    "a target-dependent gate": """
        x = x * (1 + 0.01 * torch.sigmoid(self.embed[tokens.roll(-1, 1)].mean(-1, keepdim=True)))""",
    "another row of the batch": """
        x = x + 0.01 * x.mean(0, keepdim=True)""",
    "position 37 alone": """
        x = torch.cat([x[:, :37], x[:, 37:38] + 0.01 * x[:, 38:39], x[:, 38:]], 1)""",
    "batches of other sizes than two": """
        x = x + 0.01 * x.roll(-1, 1) * (x.size(0) != 2)""",
    "what was seen first": """
        kept = self.__dict__.setdefault("kept", {})
        x = x + 0.01 * torch.stack([kept.setdefault(int(t[0]), r.detach()) for t, r in zip(tokens, x)])""",
    "an earlier call": """
        x = x + 0.01 * getattr(self, "kept", torch.zeros(1))
        self.kept = x.mean().detach()""",
}
HIDDEN = """
_hidden = GPT.hidden
def leaky(self, tokens):
    x = _hidden(self, tokens)
    if True:{leak}
    return x
GPT.hidden = leaky
"""
SCORES = {
    "sums to 1.01": "_lp = log_probs\ndef log_probs(model, tokens):\n    return _lp(model, tokens) + 0.01\n",
    "logits for log-probabilities": "def log_probs(model, tokens):\n    return model.logits(tokens)\n",
    "not finite": "_lp = log_probs\ndef log_probs(model, tokens):\n    return _lp(model, tokens) / 0 * 0\n",
    "one column short": "_lp = log_probs\ndef log_probs(model, tokens): return _lp(model, tokens)[..., 1:]\n",
    "an exit": "def log_probs(model, tokens):\n    raise SystemExit('no')\n",
}


def planted(tmp_path, code):
    """train_gpt.py with code added before it starts."""
    source = SCRIPT.read_text()
    start = 'if __name__ == "__main__":'
    assert source.count(start) == 1
    (tmp_path / "train_gpt.py").write_text(source.replace(start, code + "\n" + start))
    return tmp_path / "train_gpt.py"


@pytest.mark.parametrize("leak", [*LEAKS, *SCORES])
@pytest.mark.parametrize("weights", ["artifact", "random"])
def test_planted_leaks_are_caught(toy, tmp_path, leak, weights):
    code = HIDDEN.format(leak=LEAKS[leak]) if leak in LEAKS else SCORES[leak]
    script = planted(tmp_path, code)
    artifact = toy / "logs/a0/final_model.int8.ptz" if weights == "artifact" else None
    env = SETTINGS | {"VOCAB_SIZE": "512"}
    with pytest.raises(leak_probe.ProbeFailed) as caught:
        leak_probe.judge(script, artifact, env, seconds=240, seed=0)
    if leak in LEAKS:
        assert "a leak: " in str(caught.value)
    elif leak != "an exit":
        assert "log_probs" in str(caught.value)


PRESET_SHAPES = {
    "tiny": dict(
        PRESET="tiny", MODEL_DIM="32", TRAIN_SEQ_LEN="128", TRAIN_BATCH_TOKENS="128", VOCAB_SIZE="300"
    ),
    "golf": dict(PRESET="golf", MODEL_DIM="64", TRAIN_SEQ_LEN="256", TRAIN_BATCH_TOKENS="256"),
    "windows": dict(
        MODEL_DIM="32",
        NUM_LAYERS="5",
        TRAIN_SEQ_LEN="192",
        TRAIN_BATCH_TOKENS="192",
        VOCAB_SIZE="300",
        WINDOW_PATTERN="SSL",
        WINDOW_SCHEDULE="32,96",
        VALUE_EMBED_LAYERS="0,1",
    ),
}


@pytest.mark.parametrize("name", PRESET_SHAPES)
def test_our_presets_pass_the_probe(name):
    told = leak_probe.judge(SCRIPT, None, PRESET_SHAPES[name] | {"DEVICE": "cpu"}, seconds=240, seed=1)
    assert "random weights" in told and "is 0, every row sums to 1" in told


def test_the_probe_tries_every_alignment_and_window_edge():
    rng = np.random.default_rng(0)
    for T in (64, 256, 2048):
        tried = set(leak_probe.places(T, [100, 0], rng, 1))
        assert {t % 2 for t in tried} == {0, 1} and max(tried) < T - 1
        for a in (a for a in leak_probe.ALIGNMENTS if a < T - 1):
            assert any(t % a == 0 and t for t in tried) and any(t % a == a - 1 for t in tried)
        assert {t for t in (99, 100, 101, 49, 50, 51) if t < T - 1} <= tried


def test_a_worker_that_hangs_is_stopped(toy, tmp_path):
    script = planted(tmp_path, "import time\ndef log_probs(model, tokens):\n    time.sleep(600)\n")
    with pytest.raises(leak_probe.ProbeFailed, match="no answer within 8 s"):
        leak_probe.judge(script, toy / "logs/a0/final_model.int8.ptz", {}, seconds=8)


def test_the_score_added_up_here_is_the_trainers(toy, tmp_path):
    """Over the whole split of the toy, from log_probs alone."""
    (val,) = (toy / "data/datasets/toy").glob("*_val_*.bin")
    nats = leak_probe.score(
        SCRIPT, toy / "logs/a0/final_model.int8.ptz", {}, np.memmap(val, "<u2", "r", 1024), 240
    )
    result = json.loads((toy / "logs/a0/result.json").read_text())
    assert nats == pytest.approx(result["artifact"]["val_loss"], abs=2e-6)


def test_what_a_script_prints_does_not_reach_the_judge(toy, tmp_path):
    script = planted(
        tmp_path,
        "print('{\"T\": 1}')\n_lp = log_probs\ndef log_probs(model, tokens):\n"
        "    print('noise')\n    return _lp(model, tokens)\n",
    )
    assert "every row sums to 1" in leak_probe.judge(
        script, toy / "logs/a0/final_model.int8.ptz", {}, seconds=240
    )


def test_sweep_trains_for_real(tool, home, toy, monkeypatch):
    (home / "data").symlink_to(toy / "data")
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code, out, err = tool("sweep", "MATRIX_LR=0.03,0.0", "-n", 2)
    assert code == 0, err
    assert "MATRIX_LR=0.03: n=2" in out and "MATRIX_LR=0.0: n=2" in out
    assert runs.load_runs([home / "logs"])
