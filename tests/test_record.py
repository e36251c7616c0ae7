"""records/: a record folder made, checked, altered; the rules of each version; the leak probe; the board."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece as spm
import torch
import torch.nn.functional as F

import train_gpt
from helpers import ROOT, SCRIPT, TOY, library_documents, slow, slow_but, tokens_of, write_dataset
from records.judge import runs, trials
from records.judge.runs import Point
from records.show import board
from records.verify import checks, evidence, folders, leak_probe, new_record, replay, rules, scripts, source
from test_record_stats import FAKE, edit, failed_rules, forked_programs

RECORDS = sorted((ROOT / "records" / "track_tiny").iterdir())
BASELINE = next(path for path in RECORDS if path.name.endswith("_Baseline"))
WITH_COMPANION = next(path for path in RECORDS if (path / "kernels.py").exists())
PYTHON = sys.executable
LONG = 86_400       # seconds that no worker takes, however slow the machine
pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture
def folder(tmp_path):
    """A copy of the Baseline."""
    return shutil.copytree(BASELINE, tmp_path / BASELINE.name)


# ------------------------------------------------------------ also for test_tampering
RECORDS_READ = {}


@pytest.fixture
def read_once(monkeypatch):
    """The records of the repository, which these tests only read, are read once."""
    read = folders.records_of

    def records_of(track):
        if folders.HOME != ROOT / "records":
            return read(track)
        if track not in RECORDS_READ:
            RECORDS_READ[track] = read(track)
        return dict(RECORDS_READ[track])

    for module in (folders, checks, evidence, new_record, board):
        monkeypatch.setattr(module, "records_of", records_of)


@pytest.fixture(scope="session")
def few_data(tiny_data, tmp_path_factory):
    """A folder with the dataset `toy` of about 20,000 train tokens and 3,000 of val. Read only."""
    root = tmp_path_factory.mktemp("few_data")
    model = (tiny_data / "data/tokenizers/toy.model").read_bytes()
    documents = list(library_documents(84_000))
    val = documents[:3]
    train = documents[3:]
    sp = spm.SentencePieceProcessor(model_proto=model)
    size = sum(len(text.encode()) for text in val)
    write_dataset(root, "toy", model, [tokens_of(sp, train)], tokens_of(sp, val), size)
    return root


def train_toys(root, data, settings):
    """Runs below root, in this process, one for each of the settings {run_id: settings}."""
    (root / "data").symlink_to(data / "data")
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for run_id, values in settings.items():
            assert train_gpt.main([], values | {"RUN_ID": run_id}) == 0
    torch.set_num_threads(threads)


# ------------------------------------------------------------ our records, unaltered and altered
@pytest.mark.parametrize("path", slow_but([BASELINE], RECORDS), ids=lambda path: path.name)
def test_records_stay_valid(tool, path, monkeypatch):
    """Their scripts, with files beside them or without, can still be probed."""
    monkeypatch.setattr(leak_probe, "SHORT_ROW", 64)
    probed = path in (BASELINE, WITH_COMPANION)
    code, out, _ = tool("check", "--verbose", path, *(["--seconds", LONG] if probed else ["--no-exec"]))
    assert code == 0 and "nothing fails" in out and "n/a" not in out, out
    version = json.loads((path / "submission.json").read_text())["rules_version"]
    assert version == (1 if path.name < "2026-11-23" else 3 if path.name < "2026-11-25" else 5)
    weights = "the artifact" if list(path.glob("*.ptz")) else "random weights"
    assert bool(re.search(rf"pass +leak probe .* {weights}: .* is 0, every row", out)) == probed


def test_no_exec_runs_no_code_of_the_folder(tool, folder, read_once):
    mark = folder.parent / "it ran"
    (folder / "train_gpt.py").write_text(f"open({str(mark)!r}, 'w')\n")
    code, out, _ = tool("check", "--no-exec", "--rerun-eval", folder)
    assert code == 1 and out.count("LEFT OUT by --no-exec") == 4 and not mark.exists()
    tool("check", "--seconds", LONG, folder)
    assert mark.exists()


def digit(name, pattern):
    """Alters the digit on which the pattern's group ends."""
    def alter(folder):
        text = (folder / name).read_bytes().decode()
        at = re.search(pattern, text, re.M | re.S).end(1) - 1
        other = str((int(text[at]) + 1) % 10)
        (folder / name).write_bytes((text[:at] + other + text[at + 1:]).encode())
    return alter


def bit(name):
    def alter(folder):
        raw = bytearray((folder / name).read_bytes())
        raw[len(raw) // 2] ^= 1
        (folder / name).write_bytes(raw)
    return alter


def gone(name):
    return lambda folder: (folder / name).unlink()


def run_copied(folder):
    shutil.copy(folder / "train_seed1339.log", folder / "train_seed1350.log")
    shutil.copy(folder / "result_seed1339.json", folder / "result_seed1350.json")


LISTED = {      # file: patterns whose group ends in a digit that nothing else tells, or the file's sha256
    "README.md": [
        r"\| 1338 \| train_seed1338.log \| ([\d.]+)", r"mean (\d\.\d+)", r"std (\d\.\d+)",
        r"Exact metric of train.log: `val_bpb (\d\.\d+)", r"^\| torch \| (\d)", r"\| 1337 \| .* ([\d,]+) \|$",
        r"loss.png \| (\w*?\d)", r"^Seeds: (\d+)", r"rules \| version (\d)", r"Training time: n=(\d)"],
    "submission.json": [
        r'"val_bpb": ([\d.]+)', r'"val_loss": ([\d.]+)', r'"bytes_total": (\d+)', r'"bytes_code": (\d+)',
        r'"val_bpb_std": ([\d.]+)', r'"time_mean": ([\d.]+)', r'"date": "([\d-]+)', r'"n": (\d)',
        r'"seeds": \[\s+(\d+)', r'"train_gpt.py": "(\w*?\d)', r'"artifact_sha256": "(\w*?\d)',
        r'"git_commit": "(\w*?\d)'],
    "result.json": [r'"started": "([\d-]+)'], "train.log": [r"^step:50/100000 train_loss:([\d.]+)"]}


@pytest.mark.parametrize("words, alter", [
    *[(name, digit(name, pattern)) for name, patterns in LISTED.items() for pattern in patterns],
    *[(name, bit(name)) for name in ("train_gpt.py", "loss.png", "final_model.int8.ptz")],
    *[(name, gone(name)) for name in ("train_seed1339.log", "result_seed1339.json")],
    ("final_model.int8.ptz is missing", gone("final_model.int8.ptz")),
    ("submission.json is missing", gone("submission.json")),
    ("train_seed1350.log is the same run as train_seed1339.log", run_copied),
    ("more.txt", lambda folder: (folder / "more.txt").touch()),
    ("more", lambda folder: (folder / "more").mkdir())])
def test_what_is_altered_is_found_and_named(tool, folder, words, alter, read_once):
    alter(folder)
    code, out, _ = tool("check", "--no-exec", folder)
    assert code == 1 and any("FAIL" in line and words in line for line in out.splitlines()), out


def renew(folder):
    """Lists the folder's files anew, with their hashes and numbers, and makes its page, as a liar would."""
    submission = json.loads((folder / "submission.json").read_text())
    names = sorted(p.name for p in folder.iterdir() if p.name not in ("README.md", "submission.json"))
    submission["files"] = {name: folders.sha256((folder / name).read_bytes()) for name in names}
    for _ in range(2):
        (folder / "submission.json").write_text(checks.json_text(submission))
        submission |= folders.computed(folders.Folder(folder))
    (folder / "README.md").write_text(folders.readme_of(folders.Folder(folder)))


def sealed(log, script=b""):
    """The bytes of a log with the sha256 of its lines computed anew, as a liar would. script: what a log
    that leaves it out began with."""
    before = script + b"\n" if log.startswith(runs.RULER.encode()) else b""
    for found in evidence.LOG_DIGEST.finditer(log):
        digest = folders.sha256(before + log[:found.start()])
        log = log[:found.start(1)] + digest.encode() + log[found.end(1):]
    return log


def better_scores(folder):
    """Score, summary, result, submission and README altered alike."""
    for path in folder.iterdir():
        if path.suffix in (".log", ".json", ".md"):
            text = path.read_text()
            for value in set(re.findall(r"1\.47\d{6,}", text)):
                text = text.replace(value, value.replace("1.47", "1.46", 1))
            path.write_text(text)


def run_copied_as_another(folder):
    text = (folder / "train_seed1340.log").read_text().replace("config seed=1340", "config seed=1342")
    (folder / "train_seed1342.log").write_text(text.replace("run_id=baseline_seed1340", "run_id=x"))
    shutil.copy(folder / "result_seed1340.json", folder / "result_seed1342.json")
    digit("train_seed1342.log", r"^step:50/\d+ train_loss:([\d.]+)")(folder)
    edit(folder / "result_seed1342.json", seed=1342, run_id="x")
    edit(folder / "result_seed1342.json", "config", seed="1342", run_id="x")


def seed_of_another(folder):
    log = folder / "train_seed1340.log"
    log.write_text(log.read_text().replace("config seed=1340", "config seed=1339"))
    edit(folder / "result_seed1340.json", seed=1339)
    edit(folder / "result_seed1340.json", "config", seed="1339")


TOLD_TWICE = {      # (rule, file): patterns whose group ends in a digit that another file tells too
    ("numbers of the results", "result.json"): [
        r'"val_loss": (\d\.\d{8})', r'"val_bpb": (\d\.\d{8})', r'"train_time_ms": (\d+)', r'"steps": (\d+)',
        r'"tokens": (\d+)', r'"bytes_model": (\d+)', r'"bytes_total": (\d+)', r'"p95": ([\d.]+)',
        r'"setup_ms": (\d+)', r'"process_ms": (\d+)', r'"world_size": (\d)', r'"hardware": "(\d)',
        r'"torch": "(\d)', r'"tok_per_s": (\d+)', r'"peak_memory": "\D*(\d+)'],
    ("numbers of the results", "train.log"): [
        r"^step:\d+/\d+ val_loss:([\d.]+)", r"^final_int8_zlib_roundtrip val_loss:([\d.]+)",
        r"^final_int8_zlib_roundtrip_exact val_loss:([\d.]+)", r"roundtrip_exact .* val_bpb:([\d.]+)",
        r"^final_model val_loss:\S+ val_bpb:([\d.]+)", r"^final_model_exact val_loss:([\d.]+)",
        r"^ +score  val_loss:([\d.]+)", r"^ +steps  (\d+)", r"^stopping_early: .* train_time:(\d+)",
        r"^Serialized model int8\+zlib: (\d+)", r"^Total submission size int8\+zlib: (\d+)"],
    ("one configuration", "result.json"): [r'"matrix_lr": "([\d.]+)', r'"seed": (\d+)'],
    ("one configuration", "train.log"): [r"^config matrix_lr=([\d.]+)"],
    ("distinct runs", "result_seed1340.json"): [r'"seed": (\d+)'],
    ("data", "result.json"): [r'"val_bytes": (\d+)', r'"train_tokens": (\d+)', r'"fingerprint": "(\w*?\d)'],
    ("data", "train_seed1341.log"): [r"^data: val_bytes:(\d+)"],
    ("evaluation", "result.json"): [r'"eval_stride": (\d+)'],
    ("one script", "train.log"): [r"return (\d+)"],
    ("one script", "train_gpt.py"): [r"weight_decay: float = const\(([\d.]+)"],
    ("one script", "result.json"): [r'"code_sha256": "(\w*?\d)', r'"bytes_code": (\d+)'],
}


@pytest.mark.parametrize("words, alter", [
    *[(f"{rule} .*{name}", digit(name, pattern))
      for (rule, name), patterns in TOLD_TWICE.items() for pattern in patterns],
    ("evaluation .*loss, tokens and bytes make", better_scores),
    ("distinct runs .*train_seed1342.log is the same run as train_seed1340.log", run_copied_as_another),
    ("distinct runs .*train_seed1340.log has seed 1339, as train_seed1339.log", seed_of_another),
    ("files .*weights.bin: no part of a record", lambda folder: (folder / "weights.bin").touch())])
def test_lies_that_agree_with_the_submission_are_found_too(tool, folder, words, alter, read_once):
    alter(folder)
    renew(folder)
    out = tool("check", "--no-exec", folder)[1]
    assert re.search(f"FAIL +{words}", out), out


def test_notes_are_free(tool, folder, read_once):
    page = folder / "README.md"
    top, start, rest = page.read_text().partition(folders.NOTES[0])
    end = rest.partition(folders.NOTES[1])[2]
    page.write_text(f"{top}{start}\nWe tried 3.14 others.\n\n1 2\n{folders.NOTES[1]}{end}")
    opened = folders.Folder(folder)
    assert rules.check(opened, checks.LOOK_ONLY, print) == []
    for run in opened.runs:
        run.source = None
    assert rules.check(opened, checks.LOOK_ONLY, print) == ["one script"]


# ------------------------------------------------------------ the rules of a version
def verdict(rule, folder):
    """What a rule says, "FAIL ..." where it fails."""
    try:
        return rule(folder, checks.LOOK_ONLY)
    except checks.Broken as error:
        return f"FAIL {error}"


def fails_above(folder, code):
    """Does the rule on bytes count so much code, to the byte?"""
    largest = max(result["bytes_model"] for result in folder.results.values())
    track = folder.track
    said = []
    for cap in (largest + code, largest + code - 1):
        folder.track = track._replace(byte_cap=cap)
        said.append(verdict(checks.check_bytes, folder).startswith("FAIL"))
    return said == [False, True]


def test_companions_count_and_are_checked_by_version_1(tool, tmp_path, read_once):
    folder = shutil.copytree(WITH_COMPANION, tmp_path / WITH_COMPANION.name)
    beside = folder / "kernels.py"
    script = folder / "train_gpt.py"
    assert fails_above(folders.Folder(folder), beside.stat().st_size + script.stat().st_size)
    for damage in (lambda: beside.write_text("fast = 1\n"), beside.unlink):
        damage()
        out = tool("check", "--no-exec", folder)[1]
        assert "one script" in failed_rules(out) and "kernels.py" in out


def script_folder(text, version=2, ours=True):
    """As far as the rules on scripts look."""
    return SimpleNamespace(ours=ours, rules=folders.RULES[version], track=folders.TRACKS["speedrun"],
                           source=lambda: text)


@pytest.mark.parametrize("version, lines, columns, fails", [
    (1, 1500, 110, False), (1, 1501, 110, True), (1, 1500, 111, True),
    (2, 4000, 200, False), (2, 4001, 200, True), (2, 4000, 201, True)])
def test_lines_and_columns_of_a_script(version, lines, columns, fails):
    said = verdict(checks.check_readable, script_folder("x = 1\n" * (lines - 1) + "#" * columns, version))
    assert said.startswith("FAIL") == fails and f"{lines} lines, the longest of {columns} columns" in said


PACKED = [
    "exec(zlib.decompress(base64.b85decode('x')))", "code = lzma.decompress(x)\nexec(code)",
    "exec(compile(zlib.decompress(x), 'f', 'exec'))", "import builtins\nbuiltins.exec(x.decode())",
    "code = compile(base64.b64decode(x), 'f', 'exec')\nrun = exec\nrun(code)",
    "getattr(__builtins__, 'eval')(codecs.decode(x, 'rot13'))",
    "from builtins import exec as go\ngo(source=zlib.decompress(x))",
    "def unpack():\n    return bytes.fromhex(x)\nexec(unpack())",
    "def go(text):\n    exec(text)\ngo(zlib.decompress(x))",
    "go = lambda text: eval(text)\ngo(zlib.decompress(x))",
    "def main():\n    if code := bz2.decompress(x):\n        exec(code)", "exec(''.join(map(chr, x)))",
    "eval('1 + 1'[::-1])", "types.FunctionType(marshal.loads(x), globals())()"]
NOT_PACKED = [
    "eval('1 + 1')", "exec(open('configurator.py').read())", "model = torch.compile(zlib.decompress(x))",
    "re.compile(zlib.decompress(x))\nmodel.eval()\ncfg['compile'](x.decode())"]


@pytest.mark.parametrize("version, ours", [(1, True), (2, True), (2, False)])
def test_packed_source_is_found(version, ours):
    for text in PACKED + NOT_PACKED:
        said = verdict(checks.check_readable, script_folder(text, version, ours))
        assert bool(re.match(r"FAIL train_gpt.py is packed: line \d", said)) == (text in PACKED), text


def test_our_script_is_readable():
    folder = script_folder(SCRIPT.read_text(), version=folders.NEWEST)
    assert "lines" in checks.check_readable(folder, checks.LOOK_ONLY)
    with pytest.raises(checks.Broken, match="at most 4000 lines"):
        checks.check_readable(script_folder(4001 * "x = 1\n", version=4), checks.LOOK_ONLY)


def fake_folder(track, values, times=None, before=None, result=None, **submission):
    """What Folder.test and the rules ask for, without files."""
    made = folders.Folder.__new__(folders.Folder)
    made.track = folders.TRACKS[track]
    made.ours = True
    made.baseline = []
    made.submission = {"before": before, "systems_change": False} | submission
    made.values = lambda metric: times if metric == "time" else list(values)
    made.runs = [SimpleNamespace(file=f"{i}", eval={}, json="result.json", result=result or {})
                 for i in range(len(values))]
    return made


SPEEDRUN = np.array([3.2772, 3.2781, 3.2780, 3.2784, 3.2773, 3.2806, 3.2799, 3.2765])
# golf: 0.005 nats less than 1.20143417 in bits per byte of its split
GOLF = 1.20143417 - 0.005 / np.log(2) * 62_021_632 / 151_080_363 + np.array([0, 1e-6, -1e-6])
BEFORE = {"name": "x", "mean": 1.35, "values": [1.35, 1.351, 1.349], "val_bpb": [0.7501, 0.7502, 0.7500]}
PART = {"eval": {}, "val_loss": 3.0, "val_bpb": None, "config": {"core_metric_max_per_task": "100"}}
WHOLE = PART | {"config": {"core_metric_max_per_task": "0"}}


@pytest.mark.parametrize("rule, folder, begins, words", [
    (checks.check_score, fake_folder("speedrun", SPEEDRUN), "val_loss", "p=0.0045"),
    (checks.check_score, fake_folder("speedrun", SPEEDRUN + 0.001), "FAIL", "p < 0.01"),
    (checks.check_score, fake_folder("speedrun", SPEEDRUN + 1e-3, systems_change=True), "val_loss", "waived"),
    (checks.check_score, fake_folder("speedrun", [3.29, 3.281], systems_change=True), "FAIL", "the mean"),
    (checks.check_score, fake_folder("golf", GOLF - 0.0001), "val_bpb", "less 0.005 nats"),
    (checks.check_score, fake_folder("golf", GOLF + 0.0001), "FAIL", "less 0.005 nats"),
    (checks.check_score, fake_folder("golf", [1.3, 1.31], systems_change=True), "FAIL", "p < 0.01"),
    (checks.check_score, fake_folder("gpt2", [0.2671, 0.2672, 0.2641, 0.2606, 0.2729]), "core", "p=0.0"),
    (checks.check_score, fake_folder("gpt2", [0.2571, 0.2572, 0.2641, 0.2606, 0.2729]), "FAIL", "p=0.0581"),
    (checks.check_score, fake_folder("gpt2", [0.27]), "FAIL", "a single run"),
    (checks.check_score, fake_folder("tiny", [1.34, 1.341, 1.339], before=BEFORE), "val_bpb", "x, Welch"),
    (checks.check_score, fake_folder("tiny", [1.34, 1.36, 1.339], before=BEFORE), "FAIL", "x, Welch"),
    (checks.check_score, fake_folder("tiny", [1.34]), "the first record of its track", ""),
    (checks.check_time, fake_folder("speedrun", [], [131.0, 131.1]), "131.05", "ratio"),
    (checks.check_time, fake_folder("speedrun", [], [133.0, 133.1]), "FAIL", "132.2144"),
    (checks.check_time, fake_folder("tiny", [], [133.0, 133.1]), "None", ""),
    (checks.check_evaluation, fake_folder("gpt2", [0.26], result=WHOLE), "; bits per byte add up", ""),
    (checks.check_evaluation, fake_folder("gpt2", [0.26], result=PART), "FAIL", "CORE took only 100")])
def test_the_rules_of_each_game(rule, folder, begins, words):
    said = str(verdict(rule, folder))
    assert said.startswith(begins) and words in said


def test_rules_agree_with_the_trainer():
    assert set(folders.TRACKS) <= set(train_gpt.RECIPES)
    track = folders.TRACKS["tiny"]
    cfg = train_gpt.load_config({})
    assert (track.fingerprint, track.time_cap) == (cfg.data_fingerprint, cfg.max_wallclock_seconds)
    track = folders.TRACKS["golf"]
    cfg = train_gpt.load_config({"PRESET": "golf"})
    assert (track.byte_cap, track.time_cap) == (cfg.artifact_bytes_limit, cfg.max_wallclock_seconds)
    assert track.data == os.path.basename(cfg.data_path)


# ------------------------------------------------------------ new, from toy runs
SETTINGS = TOY | dict(ITERATIONS="6", TRAIN_LOG_EVERY="1", VAL_TOKENS="0", EVAL_SLIDING="32")
THREE = ("logs/a0", "logs/a1", "logs/a2")


@pytest.fixture(scope="module")
def toy(few_data, tmp_path_factory):
    """A folder with data/ and logs/ of toy runs: a0 a1 a2 (seeds 0 to 2), b0 b1 (another learning rate)."""
    root = tmp_path_factory.mktemp("toy_runs")
    settings = {}
    for run_id in ("a0", "a1", "a2", "b0", "b1"):
        rate = "0.03" if run_id.startswith("a") else "0.01"
        settings[run_id] = SETTINGS | {"SEED": run_id[1], "MATRIX_LR": rate}
    train_toys(root, few_data, settings)
    for minute, run_id in enumerate(settings):
        path = root / "logs" / run_id / "result.json"
        began = datetime(2026, 1, 1, 0, minute, tzinfo=UTC)
        ended = began + timedelta(milliseconds=json.loads(path.read_text())["process_ms"])
        edit(path, started=f"{began:%FT%TZ}", finished=f"{ended:%FT%TZ}")
    return root


@pytest.fixture
def home(toy, tmp_path, monkeypatch):
    """Like a repository whose records/ is empty, with the toy runs in logs/."""
    shutil.copytree(toy / "logs", tmp_path / "logs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders, "HOME", tmp_path / "records")
    return tmp_path


def make(tool, name, *words):
    """A record of toy runs, which the whole file trained in this process."""
    code, _, err = tool("new", "--name", name, "--author", "somebody", "--blurb", "a toy", "--whole", *words)
    assert code == 0, err
    return next((folders.HOME / "track_tiny").glob(f"*_{name}"))


def test_a_new_record_holds_one_script_and_agrees_with_itself(tool, home, monkeypatch):
    """The toy is too small for the track's own rules: data and number of runs; all else passes."""
    made = make(tool, "First", *THREE)
    out = tool("check", "--verbose", "--seconds", LONG, made)[1]
    assert failed_rules(out) == {"data", "runs"}, out
    submission = json.loads((made / "submission.json").read_text())
    result = json.loads((made / "result.json").read_text())
    assert submission["rules_version"] == 5 and submission["seeds"] == [0, 1, 2]
    assert list(submission["files"]) == sorted(submission["files"]) and set(folders.KEYS) <= set(submission)
    assert [path.name for path in made.glob("*.py")] == ["train_gpt.py"] and "companions" not in result
    script = (made / "train_gpt.py").read_bytes()
    assert (result["code_sha256"], result["bytes_code"]) == (folders.sha256(script), len(script))
    assert submission["bytes_total"] == result["bytes_model"] + len(script)
    assert fails_above(folders.Folder(made), len(script))


def test_the_script_is_in_a_new_record_once(tool, home):
    """In train_gpt.py and where train.log begins; the logs of other seeds leave it out, and the digests that
    they name cover it nevertheless."""
    made = make(tool, "First", *THREE)
    script = (made / "train_gpt.py").read_bytes()
    for i, name in enumerate(("train.log", "train_seed1.log", "train_seed2.log")):
        log = (made / name).read_bytes()
        whole = (home / f"logs/a{i}/train.log").read_bytes()
        assert whole.startswith(script) and log == whole[len(script) + 1 if i else 0:]
    opened = folders.Folder(made)
    assert [run.source for run in opened.runs] == [script.decode()] * 3
    assert [run.config["seed"] for run in opened.runs] == ["0", "1", "2"]
    # another script beside them, in which nothing else disagrees
    other = script + b"# x\n"
    (made / "train_gpt.py").write_bytes(other)
    (made / "train.log").write_bytes(sealed((made / "train.log").read_bytes().replace(script, other)))
    out = tool("check", "--no-exec", "--verbose", made)[1]
    assert "digests" in failed_rules(out)
    digests = [folders.sha256(text).encode() for text in (script, other)]
    for log in made.glob("train*.log"):
        log.write_bytes(log.read_bytes().replace(*digests))
    (made / "train.log").write_bytes(sealed((made / "train.log").read_bytes()))
    out = tool("check", "--no-exec", "--verbose", made)[1]
    (line,) = re.findall(r"FAIL +digests +train_seed1.log: the lines before line (\d+) are not those", out)
    lines = (made / "train_seed1.log").read_text().splitlines()
    assert lines[int(line) - 1].startswith("log sha256:"), out      # of the file, which lacks the script
    # without digests, in older versions of the rules, nothing tells what such a log began with
    edit(made / "submission.json", rules_version=1)
    assert re.search(r"FAIL +one script +train_seed1.log: its source \(0 bytes\) differs",
                     tool("check", "--no-exec", "--verbose", made)[1])


def test_a_new_record_shows_its_recipe(tool, home):
    """A run of the whole file is refused in a sentence that says how to train, unless it is asked for."""
    code, _, err = tool("new", "--name", "X", "--blurb", "a toy", *THREE)
    assert code == 2 and err == (
        "record: run a0 has a script with 7 recipes, and a record shows its own: train it by `./run.sh tiny "
        "--script`; --whole makes a record of the whole file\n")
    for script in (b"", b"RECIPES = dict(tiny=Tiny)\n", BASELINE.joinpath("train_gpt.py").read_bytes()):
        (home / "logs/a0/train_gpt.py").write_bytes(script)
        new_record.demand_one_recipe(folders.open_run("a0"), False)


def test_files_beside_the_script_are_no_part_of_a_new_record(tool, home):
    made = make(tool, "First", *THREE)
    beside = {"golf.py": folders.sha256(b"1")}
    (made / "golf.py").write_bytes(b"1")
    edit(made / "result.json", companions=beside)
    renew(made)
    assert {"one script", "files"} <= failed_rules(tool("check", "--no-exec", made)[1])
    edit(home / "logs" / "a1" / "result.json", companions=beside)
    code, _, err = tool("new", *THREE, "--name", "Other", "--blurb", "a toy", "--whole")
    assert code == 2 and "run a1 loaded files from beside its script" in err


def test_the_evaluation_can_be_run_again(tool, home, toy, monkeypatch):
    """By the folder's script in an empty folder, and added up from log_probs alone."""
    folder = folders.Folder(make(tool, "First", *THREE))
    options = SimpleNamespace(rerun_eval=True, no_exec=False, artifact=(), seconds=LONG)
    monkeypatch.setattr(checks, "ROOT", home)
    with pytest.raises(checks.Broken, match="data/datasets/toy is not here"):
        checks.check_rerun(folder, options)
    monkeypatch.setattr(checks, "ROOT", toy)
    said = [float(number) for number in re.findall(r"\d\.\d{8}", checks.check_rerun(folder, options))]
    assert len(said) == 4 and len({*said}) > 1, "two seeds' artifacts"
    assert said[::2] == pytest.approx(said[1::2], abs=2e-5)
    added = float(re.search(r"\d\.\d{8}", checks.check_artifact_score(folder, options))[0])
    assert added == pytest.approx(said[1], abs=2e-5)
    other = folder.results["result.json"] | {"val_bpb": 9.0}
    monkeypatch.setattr(checks, "rerun", lambda *args: other)
    with pytest.raises(checks.Broken, match="val_bpb is 9.0 evaluated again"):
        checks.check_rerun(folder, options)


def test_a_second_record_is_shown_against_the_first(tool, home):
    first = make(tool, "First", *THREE)
    second = make(tool, "Second", "logs/b0", "logs/b1")
    page = (second / "README.md").read_text()
    assert f"`{first.name}`" in page and re.search(r"^\| matrix_lr \| 0.03 \| 0.01 \|$", page, re.M)
    assert "train_gpt.py: unchanged" in page
    assert failed_rules(tool("check", "--no-exec", second)[1]) <= {"data", "runs", "score", "record before"}


@pytest.mark.slow
def test_a_second_record_with_runs_of_the_first(tool, home):
    first = make(tool, "First", *THREE)
    words = [word for run in THREE for word in ("--baseline", run)]
    second = make(tool, "Second", "logs/b0", "logs/b1", *words)
    assert "Its script on the same machine: n=3" in (second / "README.md").read_text()
    out = tool("check", "--no-exec", second)[1]
    assert failed_rules(out) <= {"data", "runs", "score", "record before"}
    assert "against the baseline logs: t=" in out
    digit("baseline_seed1.log", "config matrix_lr=([0-9.]+)")(second)
    out = tool("check", "--no-exec", second)[1]
    assert f"baseline_seed1.log: config matrix_lr is '0.04', in {first.name} '0.03'" in out
    third = make(tool, "Third", "logs/b0", "logs/b1", "--before", "none")
    out = tool("check", "--no-exec", third)[1]
    assert f"the record before is None, but the best in this repository by then is '{first.name}'" in out
    assert "the first of its track" in tool("check", "--no-exec", "--verbose", first)[1]
    shutil.rmtree(first)
    assert "but the best in this repository by then is 'none'" in tool("check", "--no-exec", second)[1]


def step_twice(logs):
    text = (logs / "a1/train.log").read_text()
    line = re.search(r"(?m)^step:2/.*\n", text)[0]
    (logs / "a1/train.log").write_text(text.replace(line, line + line))


def changed_result(**values):
    return lambda logs: edit(logs / "a1/result.json", **values)


@pytest.mark.parametrize("sentence, words, damage", [
    ("run b0 has matrix_lr=0.01, a0 has 0.03", [*THREE, "logs/b0"], None),
    ("has other code than", THREE, changed_result(code_sha256="0" * 64)),
    ("is used by more than one run", THREE, changed_result(seed=0)),
    ("run a1 did not finish", THREE, changed_result(stop_reason=None)),
    ("was resumed, but its result.json does not say so", THREE, step_twice),
    ("run a2 has the same code", THREE[:2], None),
    ("run a2 has the same code", [*THREE[:2], "--exclude", "a2="], None),
    ("no finished run of the same code", [*THREE, "--exclude", "b0=slow"], None),
    ("has no result.json", THREE, gone("a1/result.json")), ("has no train.log", THREE, gone("a1/train.log")),
    ("result.json is no JSON", THREE, lambda logs: (logs / "a1/result.json").write_text('{"seed": 1, "va')),
    ("is no run folder", [*THREE, "logs/a9"], None),
    ("is no run folder", [*THREE, "--baseline", "logs/nowhere"], None),
    ("run a0 has no artifact", THREE, gone("a0/final_model.int8.ptz")),
    ("is no record of track tiny", [*THREE, "--before", "Nobody"], None),
    ("what does the record change?", [*THREE, "--blurb", " "], None)])
def test_new_refuses_and_leaves_nothing(tool, home, sentence, words, damage):
    if damage:
        damage(home / "logs")
    code, _, err = tool("new", "--name", "X", "--blurb", "a toy", "--whole", *words)
    assert code == 2 and sentence in err and err.count("\n") == 1
    assert not list((home / "records").glob("*/*"))


@pytest.mark.slow
def test_the_page_shows_what_is_left_out_resumed_or_alone(tool, home):
    changed_result(resumed=True)(home / "logs")
    made = make(tool, "Two", "a0", "logs/a1", "--exclude", "logs/a2=the machine was busy")
    page = (made / "README.md").read_text()
    assert re.search(r"\| a2 \| 2 \| \d\.\d{8} \| the machine was busy \|", page) and "Resumed: a1." in page
    text = (made / "submission.json").read_text()
    (made / "submission.json").write_text(text.replace("the machine was busy", "it was the worst"))
    assert re.search(r"FAIL +README .*the machine was busy", tool("check", "--no-exec", made)[1])
    one = make(tool, "One", "logs/a0", "--exclude", "a1=a test", "--exclude", "a2=a test")
    assert "**A single run: its spread is unknown.**" in (one / "README.md").read_text()


@pytest.mark.slow
def test_the_board_lists_records_best_first(tool, home):
    page = home / "records" / "README.md"
    page.parent.mkdir()
    shutil.copy(ROOT / "records" / "README.md", page)
    made = [make(tool, "A", *THREE), make(tool, "B", "logs/b0", "logs/b1")]
    made.sort(key=lambda path: folders.rank_key(folders.Folder(path)))
    assert tool("board")[0] == 0
    text = page.read_text()
    tiny = text.split("<!-- board tiny -->")[1].split("<!-- /board tiny -->")[0]
    assert re.findall(r"\[(\d{4}-\d\d-\d\d_\w+)\]", tiny) == [path.name for path in made]
    assert "version 5: fails data, runs" in tiny and "parameter-golf 2026-03-19_TrainingOptSeq4096" in text
    assert tool("board")[0] == 0 and page.read_text() == text


@pytest.mark.parametrize("game, head", [
    ("speedrun", "| record | time (s), mean and std | val_loss | n | p |"),
    ("gpt2", "| record | time (s), mean and std | core | val_bpb | n | p |"),
    ("golf", "| record | val_bpb, mean and std | n | p |")])
def test_a_board_has_the_columns_of_its_game(game, head):
    values = {"time": [99.0, 98.0], "val_loss": [3.27, 3.28], "core": [0.26, 0.27], "val_bpb": [0.75, 0.76]}
    folder = SimpleNamespace(track=folders.RULES[folders.NEWEST].tracks[game], values=values.get,
                             path=folders.HOME / f"track_{game}" / "2026-01-01_X", hardware=lambda: "8x H100",
                             test=lambda: ("", SimpleNamespace(p=2e-9)), submission={"author": "me"})
    table = board.board_table(game, {"X": folder}, lambda folder: "passes").splitlines()
    assert table[0].startswith(head) and len({line.count(" |") for line in table}) == 1
    assert "| 2 | <1e-4 | 8x H100 | me | passes |" in table[2]


def test_the_board_in_the_repository_is_up_to_date(tool, tmp_path, monkeypatch):
    before = (ROOT / "records/README.md").read_text()
    shutil.copytree(ROOT / "records", tmp_path / "records", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(folders, "HOME", tmp_path / "records")
    assert tool("board")[0] == 0
    assert (tmp_path / "records/README.md").read_text() == before


def test_what_was_built_before_the_first_step_is_no_part_of_a_step():
    """Both kinds of lines count: without one, the steps look slower than the slowest."""
    lines = ["n-grams of 9 tokens counted in 8.0 s",
             "init of embed and head made from bigrams in 2.0 s"]
    built = [float(evidence.BUILT.fullmatch(line)[1]) for line in lines]
    pace = dict(p50=100.0, p95=100.0, max=100.0)
    result = dict(config=dict(max_wallclock_seconds="0"), train_time_ms=11_000, steps=10, tokens=110,
                  tok_per_s=10, stop_reason="iterations", step_ms=pace, resumed=False, process_ms=20_000,
                  setup_ms=0, compile_ms=0)
    end = [SimpleNamespace(kind="val", total=10)]
    evidence.check_end(run_of(result), end, [], built)
    for less in (built[:1], built[1:], []):
        with pytest.raises(checks.Broken, match="10 steps took"):
            evidence.check_end(run_of(result), end, [], less)


# ------------------------------------------------------------ the leak probe
def mixed_by_fft(model, x, tokens):
    turns = torch.exp(1j * torch.arange(x.size(1)) ** 2)[:, None]
    return x + 1e-3 * torch.fft.ifft(torch.fft.fft(x, dim=1) * turns, dim=1).real


def target_gate(model, x, tokens):
    return x * (1 + 0.01 * torch.sigmoid(model.embed[tokens.roll(-1, 1)].mean(-1, keepdim=True)))


def seen_first(model, x, tokens):
    kept = model.__dict__.setdefault("kept", {})
    return x + 0.01 * torch.stack([kept.setdefault(int(t[0]), row) for t, row in zip(tokens, x)])


def earlier_call(model, x, tokens):
    x = x + 0.01 * model.__dict__.get("kept", torch.zeros(1))
    model.__dict__["kept"] = x.mean()
    return x


LEAKS = {       # (model, last activations (B, T, C), tokens) -> what a leaky model makes of them
    "a block mean": lambda model, x, tokens: x + x.unflatten(1, (-1, 16)).mean(2).repeat_interleave(16, 1),
    "a chunk state": lambda model, x, tokens: x + 1e-3 * x[:, torch.arange(x.size(1)) // 8 * 8 + 7],
    "an FFT mix": mixed_by_fft,
    "one bidirectional layer": lambda model, x, tokens: x + 0.1 * torch.softmax(x @ x.mT, -1) @ x,
    "a target-dependent gate": target_gate,
    "another row of the batch": lambda model, x, tokens: x + 0.01 * x.mean(0, keepdim=True),
    "position 37 alone": lambda model, x, tokens: (
        x + 0.01 * x.roll(-1, 1) * (torch.arange(64) == 37)[:, None]),
    "batches of other sizes than two": lambda model, x, tokens: (
        x + 0.01 * x.roll(-1, 1) if len(x) != 2 else x),
    "what was seen first": seen_first,
    "an earlier call": earlier_call,
}
SCORES = {      # log-probabilities -> what is no distribution
    "sums to 1.01": lambda scores: scores + 0.01,
    "logits": lambda scores: 2 * scores + 3,
    "not finite": lambda scores: scores / 0 * 0,
}


def probe_here(env, artifact=None, seed=0):
    """The probe in this process, by two models of the same weights."""
    seen, fresh = (leak_probe.Script(train_gpt, artifact, env) for _ in range(2))
    about = seen.about()
    return leak_probe.probe(fresh, seen, about["T"], about["V"], [], np.random.default_rng(seed))


@pytest.mark.parametrize("peek", [*LEAKS, *SCORES])
@pytest.mark.parametrize("weights", ["artifact", slow("random")])
def test_planted_leaks_are_caught(toy, monkeypatch, peek, weights):
    activations = train_gpt.TinyModel.activations
    log_probs = train_gpt.log_probs
    if peek in LEAKS:
        monkeypatch.setattr(train_gpt.TinyModel, "activations", lambda model, tokens, *more: LEAKS[peek](
            model, activations(model, tokens, *more), tokens))
    else:
        monkeypatch.setattr(train_gpt, "log_probs", lambda *asked: SCORES[peek](log_probs(*asked)))
    artifact = toy / "logs/a0/final_model.int8.ptz" if weights == "artifact" else None
    words = "^a leak: other rows" if peek == "another row of the batch" else "^a leak: "
    with pytest.raises(leak_probe.ProbeFailed, match=words if peek in LEAKS else "^log_probs are"):
        probe_here(SETTINGS | {"VOCAB_SIZE": "512"}, artifact)


@pytest.mark.parametrize("preset, shape", [
    ("tiny", dict(MODEL_DIM="32", BIGRAM_ROWS="512")), ("golf", dict(MODEL_DIM="64", NUM_LAYERS="3")),
    ("speedrun", dict(MODEL_DIM="36", MAX_DOC_LEN="24", BOS_ID="1", WINDOW_BLOCK="4", EVAL_WINDOW="52",
                      WINDOW_SCHEDULE="16,48,48,48", BATCH_SCHEDULE="1", SEQ_SCHEDULE="1")),
    ("gpt2", dict(DEPTH="2", BOS_ID="1"))])
def test_our_presets_pass_the_probe(preset, shape):
    env = dict(PRESET=preset, DEVICE="cpu", TRAIN_SEQ_LEN="64", TRAIN_BATCH_TOKENS="64", VOCAB_SIZE="300")
    tried, worst, _ = probe_here(env | shape, seed=1)
    assert tried == 63 and worst < 2e-6


def test_the_probe_tries_every_alignment_and_window_edge():
    for T in (64, 256, 2048):
        tried = set(leak_probe.some_places(T, np.random.default_rng(0)))
        assert {t % 2 for t in tried} == {0, 1} and max(tried) < T - 1
        for step in (step for step in leak_probe.ALIGNMENTS if step < T - 1):
            assert {0, step - 1} <= {t % step for t in tried if t}
        assert {t for edge in range(64, T - 1, 64) for t in (edge - 1, edge)} <= tried


def planted(tmp_path, code):
    """train_gpt.py with code added before it starts."""
    text = SCRIPT.read_text()
    start = 'if __name__ == "__main__":\n    sys.exit(main('
    assert text.count(start) == 1
    (tmp_path / "train_gpt.py").write_text(text.replace(start, f"_log_probs = log_probs\n{code}\n{start}"))
    return tmp_path / "train_gpt.py"


@pytest.mark.parametrize("code, sentence", [
    ("def log_probs(model, tokens):\n    return _log_probs(model, tokens.roll(-1, 1))", "^a leak: "),
    ("def log_probs(model, tokens):\n    return _log_probs(model, tokens)[..., 1:]", "has shape"),
    ("def log_probs(model, tokens):\n    raise SystemExit('no')", "the script does not answer"),
    ("time.sleep(3600)", "no answer within 1 s")])
def test_what_a_script_does_in_the_worker_is_caught(tmp_path, code, sentence):
    script = planted(tmp_path, code)
    env = SETTINGS | {"VOCAB_SIZE": "512"}
    with pytest.raises(leak_probe.ProbeFailed, match=sentence):
        leak_probe.judge(script, None, env, seconds=1 if "sleep" in code else LONG, seed=0)


def test_a_worker_is_an_interpreter_of_its_own(tmp_path, monkeypatch):
    """All other tests fork theirs. It leaves the folder as it was and does not see our environment."""
    monkeypatch.setattr(sys, "executable", PYTHON)
    monkeypatch.setenv("MATRIX_LR", "0.5")
    (tmp_path / "beside.py").write_text("LR = 0.25\n")
    (tmp_path / "train_gpt.py").write_text(
        "import os, sys\nfrom types import SimpleNamespace\nimport beside\n"
        "print('noise')\nModelConfig, show = 1, str\n"
        "def load_config(env):\n    lr = env.get('MATRIX_LR', os.environ.get('MATRIX_LR', beside.LR))\n"
        "    return SimpleNamespace(lr=lr, torch='torch' in sys.modules)\n")
    found = leak_probe.configurations(tmp_path / "train_gpt.py", [{}, {"MATRIX_LR": "0.1"}], LONG)
    assert found == [{"lr": "0.25", "torch": "False"}, {"lr": "0.1", "torch": "False"}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside.py", "train_gpt.py"]


def test_what_a_script_prints_does_not_reach_the_judge(toy, tmp_path):
    """Rows longer than SHORT_ROW are probed, too."""
    script = planted(tmp_path, "print('{\"T\": 1}')\ndef log_probs(model, tokens):\n    print('noise')\n"
                     "    return _log_probs(model, tokens)")
    said = leak_probe.judge(script, toy / "logs/a0/final_model.int8.ptz", {}, seconds=LONG, context=1100)
    assert "of 1024 and 1100, the artifact" in said and "every row sums to 1" in said


class OldGPT(torch.nn.Module):
    """A table of bigrams, which must be told the length of its rows."""
    def __init__(self, cfg):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(cfg.vocab_size, cfg.vocab_size))
        self.T = None

    def set_context(self, T, window):
        assert window == 7
        self.T = T


def old_log_probs(model, tokens):
    assert tokens.shape[1] == model.T
    return F.log_softmax(model.table[tokens], -1)


def test_scripts_of_rules_version_1_are_probed():
    """Their models have set_context."""
    config = SimpleNamespace(vocab_size=31, train_seq_len=16, window_schedule=(3, 7))
    module = SimpleNamespace(GPT=OldGPT, log_probs=old_log_probs, load_config=lambda env: config)
    seen, fresh = (leak_probe.Script(module, None, {}) for _ in range(2))
    assert seen.about() == {"T": 16, "V": 31}
    rng = np.random.default_rng(0)
    assert leak_probe.probe(fresh, seen, 16, 31, [], rng)[0] == 15
    module.log_probs = lambda model, tokens: old_log_probs(model, tokens.roll(-1, 1))
    with pytest.raises(leak_probe.ProbeFailed, match="a leak: "):
        leak_probe.probe(fresh, seen, 16, 31, [], rng)


# ------------------------------------------------------------ single rules, on made-up runs
def run_of(result, **of_run):
    """A run of a folder of ours."""
    return SimpleNamespace(file="train.log", json="result.json", result=result, **of_run)


def test_core_is_that_of_the_log():
    tasks = {str(i): dict(centered=value) for i, value in enumerate((0.25, 0.26, 0.27))}
    result = dict(config=dict(score_artifact="0"), trained=dict(val_loss=3.1, val_bpb=None), val_loss=3.1,
                  val_bpb=None, core=0.26, core_tasks=tasks)
    finals = [("final_model", 3.1, None), ("final_model_exact", 3.1, None)]
    run = run_of(result, finals=finals, facts={"core": 0.26})
    checks.check_final_scores(run)
    result["core"] = 0.27
    with pytest.raises(checks.Broken, match="core"):
        checks.check_final_scores(run)
    run.facts["core"] = 0.27
    with pytest.raises(checks.Broken, match="0.27 is not the mean of its tasks"):
        checks.check_final_scores(run)
    del result["core_tasks"]
    with pytest.raises(checks.Broken, match="0.27 is not the mean of its tasks"):
        checks.check_final_scores(run)


def test_calibration_is_that_of_the_log():
    result = dict(steps=1, tokens=2, tok_per_s=3, train_time_ms=4, step_ms=5, bytes_model=6, bytes_total=7,
                  process_ms=8, setup_ms=9, compile_ms=10, bytes_code=11, val_loss=3.0, val_bpb=None,
                  world_size="1", hardware="x", torch="y", peak_memory="z", calibration_ms=12)
    summary = {key: str(value) for key, value in result.items()} | {"score": "val_loss:3.0000"}
    run = run_of(result, facts=dict(result), summary=summary)
    checks.check_summary(run)
    del result["calibration_ms"]
    with pytest.raises(checks.Broken, match="calibration_ms"):
        checks.check_summary(run)


@pytest.mark.parametrize("resumed, fits", [(False, True), (True, False)])
def test_seconds_of_evaluation_are_those_of_the_last_process(resumed, fits):
    """11 s of it after 600 s of training, or 601 s after 10 s, which followed 590 s of another process."""
    body = "resume: from step 3 at train_time:590000ms\n" * resumed
    result = dict(process_ms=611_000, setup_ms=0, compile_ms=0, train_time_ms=600_000)
    folder = SimpleNamespace(track=folders.RULES[folders.NEWEST].tracks["golf"],
                             runs=[run_of(result, body=body)])
    if fits:
        assert "takes less than 600 s" in checks.check_eval_time(folder, None)
    else:
        with pytest.raises(checks.Broken, match="601 s besides setup and training"):
            checks.check_eval_time(folder, None)


def test_what_ends_a_run():
    """Its steps, or a cap if there is one."""
    steps = [evidence.Step(10, 10, "val", 3.0, None, 1000, 100.0, None, None)]
    result = dict(config=dict(max_wallclock_seconds="0"), stop_reason="iterations", steps=10, tokens=100,
                  step_ms=dict(p50=100, p95=100, max=100), resumed=False, setup_ms=0, compile_ms=0,
                  train_time_ms=1000, process_ms=2000, tok_per_s=100)
    evidence.check_end(run_of(result), steps, [10])
    for stop in ("target", "wallclock_cap", "max_epochs"):
        with pytest.raises(checks.Broken, match=f"stop_reason is '{stop}', with max_wallclock_seconds=0"):
            evidence.check_end(run_of(result | dict(stop_reason=stop)), steps, [10])


def test_a_run_ends_with_its_epochs():
    """Under a cap, and after no more tokens than those epochs have."""
    steps = [evidence.Step(10, 20, "val", 3.0, None, 1000, 100.0, None, None)]
    result = dict(config=dict(max_wallclock_seconds="9", max_epochs="2"), stop_reason="max_epochs", steps=10,
                  tokens=100, step_ms=dict(p50=100, p95=100, max=100), resumed=False, setup_ms=0,
                  compile_ms=0, train_time_ms=1000, process_ms=2000, tok_per_s=100,
                  data=dict(train_tokens=50))
    evidence.check_end(run_of(result), steps, [10])
    result["data"]["train_tokens"] = 49
    with pytest.raises(checks.Broken, match="tokens is 100, max_epochs=2 of the text are 98"):
        evidence.check_end(run_of(result), steps, [10])
    result["config"]["max_epochs"] = "0"
    with pytest.raises(checks.Broken, match="stop_reason is 'max_epochs', with .* max_epochs=0"):
        evidence.check_end(run_of(result), steps, [10])


def test_an_artifact_from_elsewhere_has_the_stated_size(monkeypatch, tmp_path):
    """Its log may say what it likes."""
    artifact = tmp_path / "big.ptz"
    artifact.write_bytes(bytes(100))
    digest = folders.sha256(artifact.read_bytes())
    config = {"score_artifact": "1"}
    lines = "".join(f"config {key}={value}\n" for key, value in config.items()).encode()
    result = dict(config=config, data=dict(sha256={}), bytes_model=100)
    run = run_of(result, config=config, digests={
        "train_gpt.py": folders.sha256(b""), "config": folders.sha256(lines), "final_model.int8.ptz": digest})
    sealed_log = tmp_path / "train.log"
    sealed_log.write_bytes(b"a line\nlog sha256:%s\n" % folders.sha256(b"a line\n").encode())
    run.path = sealed_log
    monkeypatch.setattr(evidence, "artifacts_of", lambda *_: [(run, artifact)])
    folder = SimpleNamespace(rules=folders.RULES[folders.NEWEST], script=b"", baseline=[], runs=[run],
                             submission=dict(artifact_sha256=digest))
    assert "1 times their own" in evidence.check_digests(folder, None)
    result["bytes_model"] = 50
    with pytest.raises(checks.Broken, match="bytes"):
        evidence.check_digests(folder, None)
    result["bytes_model"] = 100
    altered = tmp_path / "baseline.log"
    altered.write_bytes(b"another" + sealed_log.read_bytes())
    script = train_gpt.script_source().decode()
    folder.baseline = [SimpleNamespace(file="baseline.log", path=altered, source=script)]
    with pytest.raises(checks.Broken, match="baseline.log: the lines before line"):
        evidence.check_digests(folder, None)
    altered.write_bytes(b"a line\n")        # taken out
    with pytest.raises(checks.Broken, match="baseline.log does not end with the sha256"):
        evidence.check_digests(folder, None)
    folder.baseline[0].source = "an older script"
    evidence.check_digests(folder, None)


def test_final_scores_of_baseline_logs(monkeypatch, tmp_path):
    """They are those of the last validation, said once."""
    monkeypatch.setattr(evidence, "check_lines", lambda *_: [((0, 0), [])])
    base = SimpleNamespace(
        file="baseline.log", body="final_model_exact val_loss:3.00000000\n", config={}, steps=1,
        value=lambda _: 3.0, finals=[("final_model_exact", 3.0, None)],
        curves={"val": [Point(1, 1.0, 3.0, None)]})
    folder = SimpleNamespace(baseline=[base], runs=[])
    evidence.check_steps(folder, None)
    base.finals = [("final_model_exact", 3.06, None)]
    with pytest.raises(checks.Broken, match="is not the score of its last validation"):
        evidence.check_steps(folder, None)
    base.body += "final_model_exact val_loss:3.06000000\n"
    with pytest.raises(checks.Broken, match="says both"):
        evidence.check_steps(folder, None)


def test_a_commit_of_another_repository_is_said_to_be_unknown():
    folder = SimpleNamespace(submission=dict(git_commit="0" * 40))
    with pytest.raises(checks.LeftOut, match="commit 000000000 is not in this repository"):
        evidence.check_commit(folder, None)


def test_no_constant_is_taken_out(monkeypatch):
    result = dict(config={"seed": "1", "matrix_lr": "0.03"}, preset="tiny", overrides={})
    made = {"seed": "1", "matrix_lr": "0.03"}
    monkeypatch.setattr(leak_probe, "configurations", lambda *_: [made])
    options = SimpleNamespace(no_exec=False, seconds=1)
    folder = SimpleNamespace(path=ROOT, runs=[run_of(result)])
    assert "are what" in evidence.check_constants(folder, options)
    made["beta1"] = "0.8"
    with pytest.raises(checks.Broken, match="config beta1"):
        evidence.check_constants(folder, options)


def test_our_script_keeps_the_compile_flags_of_the_speedrun():
    """Settings of Inductor's code for CPUs don't count, others do, under any name."""
    text = SCRIPT.read_text()
    assert source.compiler_flags(text) == [] and "torch._inductor.config.cpp." in text
    assert source.compiler_flags("torch.compile(f(a, b), dynamic=False, fullgraph=True)") == []
    for line in ("torch._inductor.config.coordinate_descent_tuning = True", "torch.compile(f, mode='x')",
                 "import torch as t; t.compile(f, mode='x')", "partial(torch.compile, mode='x')",
                 "from torch._inductor import config",
                 "from torch import compile as fast; fast(f, options={})"):
        assert len(source.compiler_flags(line)) > 0, line


def test_a_replay_that_ends_by_itself(tmp_path):
    """Fails; one that is too slow does not."""
    env = {"PATH": os.environ["PATH"]}
    with pytest.raises(checks.Broken, match="ended before step 3: no data"):
        replay.until_step(3, ["bash", "-c", "echo no data"], tmp_path, env, 60)
    assert replay.until_step(3, ["bash", "-c", "echo begun; sleep 60"], tmp_path, env, 0.5) == ["begun"]


def test_a_folder_that_new_left_behind_is_no_record(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "HOME", tmp_path)
    shutil.copytree(BASELINE, tmp_path / "track_tiny" / BASELINE.name)
    shutil.copytree(BASELINE, tmp_path / "track_tiny/.2026-11-21_Killed.tmp")
    assert [*folders.records_of("tiny")] == [BASELINE.name]


@pytest.mark.parametrize("version, fits", [(3, False), (4, True)])
def test_golf_by_another_tokenizer(version, fits):
    """golf_plus has 8,192 pieces: another number of val tokens for the same bytes, and another compressor."""
    data = dict(name="fineweb10B_sp8192", fingerprint=None, val_tokens=40_000_000, val_bytes=151_080_363,
                train_tokens=9, sha256={})
    facts = {"data": data["name"], "fingerprint": "None", "val_tokens": "40000000", "val_bytes": "151080363",
             "train_tokens": "9"}
    folder = SimpleNamespace(track=folders.RULES[version].tracks["golf"],
                             runs=[run_of({"data": data}, facts=facts)])
    if fits:
        assert "same text" in checks.check_data(folder, None)
        facts["val_bytes"] = data["val_bytes"] = "151080000"
    with pytest.raises(checks.Broken, match="in the rules"):
        checks.check_data(folder, None)
    data["name"] = facts["data"] = "fineweb10B_sp1024"      # whose number is known
    facts["val_bytes"] = "151080363"
    data["val_bytes"] = 151_080_363
    with pytest.raises(checks.Broken, match="val_tokens is '40000000', in the rules '62021632'"):
        checks.check_data(folder, None)
    if not fits:
        return
    other = {"data": "fineweb10B_sp8192"}       # also where a run by the other comes first
    folder.runs.insert(0, run_of({"data": data | {"name": other["data"]}}, facts=facts | other))
    with pytest.raises(checks.Broken, match="train.log: val_tokens is '40000000', in the rules '62021632'"):
        checks.check_data(folder, None)
    assert checks.MEMBERS.fullmatch("final_model.brot.ptz")
    assert not checks.MEMBERS.fullmatch("final_model.zip")
