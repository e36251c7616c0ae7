"""records/: a record folder made, checked, altered; the rules of each version; the leak probe; the board."""

import argparse
import json
import os
import re
import shutil
import sys
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece as spm
import torch

import train_gpt
from helpers import (
    ROOT, SCRIPT, TOY, library_documents, load_module, slow, slow_but, tokens_of, write_dataset)
from records.judge import logs
from records.show import board
from records.verify import checks, evidence, folders, leak_probe, new_record, replay, rules, source
from test_record_stats import edit, failed_rules, forked_programs
from tools.run import script

RECORDS = sorted((ROOT / "records" / "track_tiny").iterdir())
BASELINE = next(path for path in RECORDS if path.name.endswith("_Baseline"))
WITH_COMPANION = next(path for path in RECORDS if (path / "kernels.py").exists())
PYTHON = sys.executable
LONG = 86_400       # seconds that no worker takes, however slow the machine
RUN = argparse.Namespace(no_exec=False, rerun_eval=False, artifact=(), replay=5, seed=None, seconds=LONG)
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


def train_toys(root, data, settings, trainer=train_gpt):
    """Runs below root, in this process, one for each of the settings {run_id: settings}."""
    (root / "data").symlink_to(data / "data")
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for run_id, values in settings.items():
            assert trainer.main([], values | {"RUN_ID": run_id}) == 0
    torch.set_num_threads(threads)


def said_by(name, folder, options=RUN):
    """(word, text) of one rule, which may run the folder's code."""
    rule = next(rule for rule in [*rules.CHECKS, board.BOARDS] if rule.name == name)
    return rules.outcome(rule, folders.Folder(folder), options)


# ------------------------------------------------------------ our records, unaltered and altered
@pytest.mark.parametrize("path", slow_but([BASELINE], RECORDS), ids=lambda path: path.name)
def test_records_stay_valid(tool, path, monkeypatch):
    """Their scripts, with files beside them or without, can still be probed."""
    monkeypatch.setattr(leak_probe, "SHORT_ROW", 64)
    probed = path in (BASELINE, WITH_COMPANION)
    code, out, _ = tool("check", path, *(["--seconds", LONG] if probed else ["--no-exec"]))
    assert code == 0 and "nothing fails" in out, out
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


VAL_DIGEST = r"^sha256 toy_val\S+:(\w*?\d)"
LISTED = {      # (rule, file): patterns whose group ends in a digit that only the file's sha256 tells, too
    ("README", "README.md"): [
        r"\| 1338 \| train_seed1338.log \| ([\d.]+)", r"std (\d\.\d+)", r"^\| torch \| (\d)",
        r"\| 1337 \| .* ([\d,]+) \|$", r"loss.png \| (\w*?\d)", r"rules \| version (\d)"],
    ("numbers of the submission", "submission.json"): [
        r'"val_bpb": (\d\.\d{4})', r'"val_bpb_std": (\d\.\d{4})', r'"time_mean": (\d+)', r'"date": "([\d-]+)',
        r'"n": (\d)', r'"seeds": \[\s+(\d+)'],
    ("README", "submission.json"): [r'"git_commit": "(\w*?\d)', r'"artifact_sha256": "(\w*?\d)'],
    ("files", "result.json"): [r'"started": "([\d-]+)'],
    ("files", "train.log"): [r"^step:50/100000 train_loss:([\d.]+)"]}


@pytest.mark.parametrize("rule, words, alter", [
    *[(rule, "README.md" if rule == "README" else name, digit(name, pattern))
      for (rule, name), patterns in LISTED.items() for pattern in patterns],
    *[("files", name, bit(name)) for name in ("train_gpt.py", "loss.png", "final_model.int8.ptz")],
    ("files", "final_model.int8.ptz", gone("final_model.int8.ptz")),
    ("names", "result_seed1339.json", gone("train_seed1339.log")),
    ("files", "more.txt", lambda folder: (folder / "more.txt").touch()),
    ("files", "more", lambda folder: (folder / "more").mkdir())])
def test_what_is_altered_is_found_and_named(folder, rule, words, alter, read_once):
    alter(folder)
    word, text = said_by(rule, folder)
    assert word == "FAIL" and words in text


@pytest.mark.parametrize("name", ["result_seed1339.json", "submission.json"])
def test_a_folder_that_cannot_be_opened(tool, folder, name):
    (folder / name).unlink()
    code, out, _ = tool("check", folder)
    assert code == 1 and "FAIL" in out and name in out and out.endswith("1 rules fail: rules\n")


def renew(folder):
    """Lists the folder's files anew, with their hashes and numbers, and makes its page, as a liar would."""
    submission = json.loads((folder / "submission.json").read_text())
    names = sorted(p.name for p in folder.iterdir() if p.name not in ("README.md", "submission.json"))
    submission["files"] = {name: folders.sha256((folder / name).read_bytes()) for name in names}
    for _ in range(2):
        (folder / "submission.json").write_text(folders.json_text(submission))
        submission |= folders.computed(folders.Folder(folder))
    (folder / "README.md").write_text(folders.readme_of(folders.Folder(folder)))


def sealed(log, script=b""):
    """The bytes of a log with the sha256 of its lines computed anew, as a liar would. script: what a log
    that leaves it out began with."""
    before = script + b"\n" if log.startswith(logs.RULER.encode()) else b""
    for found in evidence.LOG_DIGEST.finditer(log):
        digest = folders.sha256(before + log[:found.start()])
        log = log[:found.start(1)] + digest.encode() + log[found.end(1):]
    return log


TOLD_TWICE = {      # (rule, file): patterns whose group ends in a digit that another file tells too
    ("numbers of the results", "result.json"): [
        r'"val_loss": (\d\.\d{8})', r'"val_bpb": (\d\.\d{8})', r'"train_time_ms": (\d+)', r'"steps": (\d+)',
        r'"bytes_model": (\d+)', r'"bytes_total": (\d+)', r'"p95": ([\d.]+)', r'"setup_ms": (\d+)',
        r'"process_ms": (\d+)', r'"hardware": "(\d)', r'"peak_memory": "\D*(\d+)'],
    ("numbers of the results", "train.log"): [
        r"^step:\d+/\d+ val_loss:([\d.]+)", r"^final_int8_zlib_roundtrip_exact val_loss:([\d.]+)",
        r"roundtrip_exact \S+ val_bpb:([\d.]+)", r"^final_model_exact val_loss:([\d.]+)", r"^ +steps  (\d+)",
        r"^Serialized model int8\+zlib: (\d+)"],
    ("one configuration", "result.json"): [r'"matrix_lr": "([\d.]+)', r'"seed": (\d+)'],
    ("one configuration", "train.log"): [r"^config matrix_lr=([\d.]+)"],
    ("data", "result.json"): [r'"val_bytes": (\d+)', r'"train_tokens": (\d+)', r'"fingerprint": "(\w*?\d)'],
    ("data", "train_seed1341.log"): [r"^data: val_bytes:(\d+)"],
    ("evaluation", "result.json"): [r'"eval_stride": (\d+)'],
    ("one script", "train.log"): [r"return (\d+)"],
    ("one script", "result.json"): [r'"code_sha256": "(\w*?\d)', r'"bytes_code": (\d+)'],
}


@pytest.mark.parametrize("rule, words, alter", [
    *[(rule, name, digit(name, pattern))
      for (rule, name), patterns in TOLD_TWICE.items() for pattern in patterns],
    ("files", "weights.bin: no part of a record", lambda folder: (folder / "weights.bin").touch())])
def test_lies_that_agree_with_the_submission_are_found_too(folder, rule, words, alter, read_once):
    alter(folder)
    renew(folder)
    word, text = said_by(rule, folder)
    assert word == "FAIL" and words in text


def test_notes_are_free(tool, folder, read_once):
    page = folder / "README.md"
    top, start, rest = page.read_text().partition(folders.NOTES[0])
    end = rest.partition(folders.NOTES[1])[2]
    page.write_text(f"{top}{start}\nWe tried 3.14 others.\n\n1 2\n{folders.NOTES[1]}{end}")
    opened = folders.Folder(folder)
    assert rules.check(opened, checks.LOOK_ONLY, print) == []


# ------------------------------------------------------------ the rules of a version
def verdict(rule, folder):
    """What a rule says, "FAIL ..." where it fails."""
    try:
        return rule(folder, checks.LOOK_ONLY)
    except checks.Broken as error:
        return f"FAIL {error}"


def test_companions_are_checked_by_version_1(tmp_path, read_once):
    folder = shutil.copytree(WITH_COMPANION, tmp_path / WITH_COMPANION.name)
    (folder / "kernels.py").write_text("fast = 1\n")
    word, text = said_by("one script", folder)
    assert word == "FAIL" and "kernels.py" in text


def script_said(text, version=5, track="tiny"):
    """What the rule on scripts says."""
    return verdict(checks.check_script, SimpleNamespace(
        rules=folders.RULES[version], track=folders.TRACKS[track], source=lambda: text))


@pytest.mark.parametrize("version, lines, columns, fails", [
    (1, 1500, 110, False), (1, 1501, 110, True), (1, 1500, 111, True),
    (2, 4000, 200, False), (2, 4001, 200, True), (5, 4001, 200, False), (5, 1, 201, True)])
def test_lines_and_columns_of_a_script(version, lines, columns, fails):
    said = script_said("x = 1\n" * (lines - 1) + "#" * columns, version)
    assert bool(said) == fails


PACKED = [
    "exec(zlib.decompress(base64.b85decode('x')))", "code = lzma.decompress(x)\nexec(code)",
    "exec(compile(zlib.decompress(x), 'f', 'exec'))", "import builtins\nbuiltins.exec(x.decode())",
    "code = compile(base64.b64decode(x), 'f', 'exec')\nrun = exec\nrun(code)",
    "getattr(__builtins__, 'eval')(codecs.decode(x, 'rot13'))",
    "def unpack():\n    return bytes.fromhex(x)\nexec(unpack())",
    "def main():\n    if code := bz2.decompress(x):\n        exec(code)", "exec(''.join(map(chr, x)))",
    "types.FunctionType(marshal.loads(x), globals())()"]
NOT_PACKED = [
    "eval('1 + 1')", "exec(open('configurator.py').read())", "model = torch.compile(zlib.decompress(x))",
    "re.compile(zlib.decompress(x))\nmodel.eval()\ncfg['compile'](x.decode())"]


@pytest.mark.parametrize("text", PACKED + NOT_PACKED)
def test_packed_source_is_found(text):
    assert bool(re.match(r"FAIL train_gpt.py is packed: line \d", str(script_said(text)))) == (text in PACKED)


def test_the_speedrun_forbids_flags_of_the_compiler():
    for text in (SCRIPT.read_text(), "torch.compile(f(a, b), dynamic=False, fullgraph=True)",
                 "torch._inductor.config.cpp.threads = 1"):
        assert script_said(text, track="speedrun") is None
    for text in ("torch._inductor.config.coordinate_descent_tuning = True", "torch.compile(f, mode='x')",
                 "partial(torch.compile, mode='x')", "from torch._inductor import config"):
        assert script_said(text, track="speedrun").startswith("FAIL") and script_said(text) is None


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
    (checks.check_time, fake_folder("speedrun", [], [133.0, 133.1]), "FAIL", "the record before 132.2144 s"),
    (checks.check_evaluation, fake_folder("gpt2", [0.26], result=WHOLE), "None", ""),
    (checks.check_evaluation, fake_folder("gpt2", [0.26], result=PART), "FAIL", "CORE took only 100")])
def test_the_rules_of_each_game(rule, folder, begins, words):
    said = str(verdict(rule, folder))
    assert said.startswith(begins) and words in said


def test_rules_agree_with_the_trainer():
    for preset in ("tiny", "golf"):
        track = folders.TRACKS[preset]
        cfg = train_gpt.load_config({"PRESET": preset})
        size = getattr(cfg, "artifact_bytes_limit", 0)
        assert (track.byte_cap, track.time_cap, track.data) == (
            size, cfg.max_wallclock_seconds, os.path.basename(cfg.data_path))
        assert track.fingerprint == getattr(cfg, "data_fingerprint", "")


# ------------------------------------------------------------ new, from toy runs
SETTINGS = TOY | dict(ITERATIONS="6", TRAIN_LOG_EVERY="1", VAL_TOKENS="0", EVAL_SLIDING="32")
THREE = ("logs/a0", "logs/a1", "logs/a2")


@pytest.fixture(scope="module")
def toy(few_data, tmp_path_factory):
    """A folder with data/ and logs/ of toy runs by the script of tiny alone: a0 a1 a2 (seeds 0 to 2), b0 b1
    (another learning rate)."""
    root = tmp_path_factory.mktemp("toy_runs")
    (root / "train_gpt.py").write_text(script.script("tiny", SCRIPT.read_text("utf-8")), "utf-8")
    settings = {}
    for run_id in ("a0", "a1", "a2", "b0", "b1"):
        rate = "0.03" if run_id.startswith("a") else "0.01"
        settings[run_id] = SETTINGS | {"SEED": run_id[1], "MATRIX_LR": rate}
    train_toys(root, few_data, settings, load_module(root / "train_gpt.py", "tiny_alone"))
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
    monkeypatch.setattr(new_record, "git_commit", lambda *_: "not committed")
    return tmp_path


def make(tool, name, *words):
    """A record of toy runs, which were trained in this process."""
    code, _, err = tool("new", "--name", name, "--author", "somebody", "--blurb", "a toy", *words)
    assert code == 0, err
    return next((folders.HOME / "track_tiny").glob(f"*_{name}"))


def test_a_new_record_agrees_with_itself(tool, home):
    """The toy is too small for the track's own rules: data and number of runs; all else passes. The script is
    in train_gpt.py and where train.log begins; other logs leave it out, and their digests cover it."""
    made = make(tool, "First", *THREE)
    out = tool("check", "--seconds", LONG, made)[1]
    assert failed_rules(out) == {"data", "runs"}, out
    submission = json.loads((made / "submission.json").read_text())
    assert submission["rules_version"] == 5 and submission["seeds"] == [0, 1, 2]
    script = (made / "train_gpt.py").read_bytes()
    for i, name in enumerate(("train.log", "train_seed1.log", "train_seed2.log")):
        log = (made / name).read_bytes()
        whole = (home / f"logs/a{i}/train.log").read_bytes()
        assert whole.startswith(script) and log == whole[len(script) + 1 if i else 0:]
    assert [run.source for run in folders.Folder(made).runs] == [script.decode()] * 3
    # without digests, in older versions of the rules, nothing tells what such a log began with
    edit(made / "submission.json", rules_version=1)
    assert "train_seed1.log: its source (0 bytes) is not" in said_by("one script", made)[1]
    # another script beside them, in which nothing else disagrees
    edit(made / "submission.json", rules_version=5)
    other = script + b"# x\n"
    (made / "train_gpt.py").write_bytes(other)
    digests = [folders.sha256(text).encode() for text in (script, other)]
    for log in made.glob("train*.log"):
        log.write_bytes(log.read_bytes().replace(script, other).replace(*digests))
    (made / "train.log").write_bytes(sealed((made / "train.log").read_bytes()))
    assert re.match(r"train_seed1.log: log sha256:\w+ is not the sha256", said_by("digests", made)[1])


def test_the_evaluation_can_be_run_again(tool, home, toy, monkeypatch):
    """By the folder's script in an empty folder, and added up from log_probs alone."""
    folder = folders.Folder(make(tool, "First", *THREE))
    options = SimpleNamespace(rerun_eval=True, artifact=(), seconds=LONG)
    monkeypatch.setattr(checks, "ROOT", home)
    with pytest.raises(checks.Broken, match="could not evaluate the artifact"):
        checks.check_rerun(folder, options)
    monkeypatch.setattr(checks, "ROOT", toy)
    said = [float(number) for number in re.findall(r"\d\.\d{8}", checks.check_rerun(folder, options))]
    assert said == pytest.approx([run.result["val_loss"] for run in folder.runs[:2]], abs=2e-5)
    added = float(re.search(r"\d\.\d{8}", checks.check_artifact_score(folder, options))[0])
    assert added == pytest.approx(said[0], abs=2e-5)
    other = folder.results["result.json"] | {"val_bpb": 9.0}
    monkeypatch.setattr(checks, "rerun", lambda *args: other)
    with pytest.raises(checks.Broken, match="val_bpb is 9.0 evaluated again"):
        checks.check_rerun(folder, options)
    # another artifact of the second run, which the submission lists
    bit("final_model_seed1.int8.ptz")(folder.path)
    renew(folder.path)
    word, text = said_by("files", folder.path)
    assert word == "FAIL" and text.startswith("final_model_seed1.int8.ptz: sha256 is")


def test_a_second_record_with_runs_of_the_first(tool, home):
    first = make(tool, "First", *THREE)
    words = [word for run in THREE for word in ("--baseline", run)]
    second = make(tool, "Second", "logs/b0", "logs/b1", *words)
    page = (second / "README.md").read_text()
    assert f"`{first.name}`" in page and re.search(r"^\| matrix_lr \| 0.03 \| 0.01 \|$", page, re.M)
    assert "train_gpt.py: unchanged" in page and "Its script on the same machine: n=3" in page
    assert said_by("record before", second) == ("pass", None)
    assert "run again, Welch: t=" in said_by("score", second)[1]
    for run_id in ("b0", "b1"):
        digit("train.log", VAL_DIGEST)(home / "logs" / run_id)
    said = tool("new", "--name", "Third", "--blurb", "a toy", "logs/b0", "logs/b1")[2]
    assert "on the same tokens in the same way: val split: " in said
    digit("baseline_seed1.log", "config matrix_lr=([0-9.]+)")(second)
    said = said_by("record before", second)[1]
    assert f"baseline_seed1.log: config matrix_lr is '0.04', in {first.name} '0.03'" in said
    shutil.rmtree(first)
    assert "but the best in this repository by then is 'none'" in said_by("record before", second)[1]
    digit("baseline_seed1.log", VAL_DIGEST)(second)
    assert "the record before are not scored alike: val split: " in said_by("record before", second)[1]


def changed_result(**values):
    return lambda logs: edit(logs / "a1/result.json", **values)


@pytest.mark.parametrize("sentence, words, damage", [
    ("run b0: matrix_lr is '0.01', in run a0 '0.03'", [*THREE, "logs/b0"], None),
    ("run a1: code_sha256 is '000", THREE, changed_result(code_sha256="0" * 64)),
    ("run a1: its log says seed 1, its result.json 0", THREE, changed_result(seed=0)),
    ("run a1 did not finish", THREE, changed_result(stop_reason=None)),
    ("have the same losses", ["logs/a0", "logs/a0", *THREE[1:]], None),
    ("run a2 has the same code", THREE[:2], None),
    ("run a2 has the same code", [*THREE[:2], "--exclude", "a2="], None),
    ("run a2 has the same code", ["elsewhere/a0", "elsewhere/a1"],
     lambda logs: logs.rename(logs.with_name("elsewhere"))),
    ("a1/result.json: No such file", THREE, gone("a1/result.json")),
    ("a1/train.log: No such file", THREE, gone("a1/train.log")),
    ("result.json is no JSON", THREE, lambda logs: (logs / "a1/result.json").write_text('{"seed": 1, "va')),
    ("is no record of track tiny", [*THREE, "--before", "Nobody"], None),
    ("logs/a9/result.json: No such file", [*THREE, "--baseline", "a9"], None),
    ("in the same way: val split: ", [*THREE, "--baseline", "b0"], digit("b0/train.log", VAL_DIGEST)),
    ("run a0 has no artifact", THREE, gone("a0/final_model.int8.ptz")),
    ("what does the record change?", [*THREE, "--blurb", " "], None)])
def test_new_refuses_and_leaves_nothing(tool, home, sentence, words, damage):
    if damage:
        damage(home / "logs")
    code, _, err = tool("new", "--name", "X", "--blurb", "a toy", *words)
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
    assert "the machine was busy" in said_by("README", made)[1]


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


def test_the_board_in_the_repository_is_up_to_date(read_once):
    """All records pass, their code not run."""
    page = (ROOT / "records/README.md").read_text()
    for name in folders.TRACKS:
        records = board.records_of(name)
        table = board.board_table(name, records)
        assert board.with_part(page, f"board {name}", table) == page and "fails" not in table


# ------------------------------------------------------------ the leak probe
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
    "one bidirectional layer": lambda model, x, tokens: x + 0.1 * torch.softmax(x @ x.mT, -1) @ x,
    "a target-dependent gate": lambda model, x, tokens: x * (1 + 0.01 * torch.sigmoid(
        model.embed[tokens.roll(-1, 1)].mean(-1, keepdim=True))),
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


@pytest.mark.parametrize("code, sentence", [
    ("def log_probs(model, tokens):\n    return _log_probs(model, tokens.roll(-1, 1))", "^a leak: "),
    ("def log_probs(model, tokens):\n    return _log_probs(model, tokens)[..., 1:]", "has shape"),
    ("def log_probs(model, tokens):\n    raise SystemExit('no')", "the script does not answer: no"),
    ("time.sleep(3600)", "it took too long")])
def test_what_a_script_does_in_the_worker_is_caught(tmp_path, code, sentence):
    script = tmp_path / "train_gpt.py"
    start = 'if __name__ == "__main__":\n    sys.exit(main('
    whole, _, end = SCRIPT.read_text().rpartition(start)
    script.write_text(f"{whole}\n_log_probs = log_probs\n{code}\n{start}{end}")
    env = SETTINGS | {"VOCAB_SIZE": "512"}
    with pytest.raises(leak_probe.ProbeFailed, match=sentence):
        leak_probe.judge(script, None, env, seconds=1 if "sleep" in code else LONG, seed=0)


STUB = """import os, sys
from types import SimpleNamespace
import torch
import beside
print('{"T": 1}')
def load_config(env):
    model = torch.nn.Module
    return SimpleNamespace(train_seq_len=16, vocab_size=beside.V, choose_kernels=1, make_model=model)
def log_probs(model, tokens):
    print('noise')
    return torch.full((*tokens.shape, 4), -float(os.environ.get('MATRIX_LR', 2))) * torch.tensor(2.0).log()
"""


def test_a_worker_is_an_interpreter_of_its_own(tmp_path, monkeypatch):
    """All other tests fork theirs. It leaves the folder as it was and does not see our environment; what a
    script prints does not reach the judge."""
    monkeypatch.setattr(sys, "executable", PYTHON)
    monkeypatch.setenv("MATRIX_LR", "0.5")
    (tmp_path / "beside.py").write_text("V = 4\n")
    (tmp_path / "train_gpt.py").write_text(STUB)
    said = leak_probe.judge(tmp_path / "train_gpt.py", None, {}, seconds=LONG)
    assert said.startswith("15 changes of later tokens in random tokens of 16, random weights")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside.py", "train_gpt.py"]


# ------------------------------------------------------------ single rules, on made-up runs
def run_of(result, **of_run):
    """A run of a folder of ours."""
    return SimpleNamespace(file="train.log", json="result.json", result=result, **of_run)


def test_core_is_that_of_the_log():
    tasks = {str(i): dict(centered=value) for i, value in enumerate((0.25, 0.26, 0.27))}
    result = dict(config=dict(score_artifact="0"), trained=dict(val_loss=3.1, val_bpb=None), val_loss=3.1,
                  val_bpb=None, core=0.26, core_tasks=tasks)
    run = run_of(result, finals=[("final_model_exact", 3.1, None)], facts={"core": 0.26})
    checks.check_final_scores(run)
    for in_log, words in ((0.26, "core is 0.27"), (0.27, "0.27 is not the mean of its tasks")):
        result["core"] = 0.27
        run.facts["core"] = in_log
        with pytest.raises(checks.Broken, match=words):
            checks.check_final_scores(run)


FITTING = dict(train_time_ms=590_000, calibration_ms=10_000, bytes_model=16_000_000, setup_ms=1000,
               compile_ms=0, process_ms=1_191_000, resumed=False)


@pytest.mark.parametrize("values, words", [
    ({}, ""), (dict(calibration_ms=10_001), "600.001 s of training and calibration"),
    (dict(bytes_model=16_000_001), "16000001 bytes of model and code"),
    (dict(process_ms=1_191_001), "600.001 s besides set-up and training"),
    (dict(resumed=True), "was resumed")])
def test_the_caps_of_golf(values, words):
    folder = SimpleNamespace(track=folders.TRACKS["golf"], script=b"", runs=[
        run_of(FITTING | values, facts={"hardware": "8x NVIDIA H100 80GB"})])
    said = verdict(checks.check_caps, folder)
    assert words in said if words else said is None
    folder.runs[0].facts["hardware"] = "4x NVIDIA H100"
    assert verdict(checks.check_caps, folder).startswith("FAIL")


@pytest.mark.parametrize("stop, cap, epochs, steps, words", [
    ("iterations", 0, 0, 10, ""), ("iterations", 0, 0, 9, "steps is 9, in train.log, whose steps end at 10"),
    ("wallclock_cap", 2, 0, 9, ""), ("wallclock_cap", 3, 0, 9, "stopped by the cap of 3.0 s after 1.0 s"),
    ("wallclock_cap", 0, 0, 9, "stop_reason is"), ("max_epochs", 3, 2, 9, ""),
    ("max_epochs", 3, 0, 9, "stop_reason is"), ("target", 3, 0, 9, "stop_reason is")])
def test_what_ends_a_run(stop, cap, epochs, steps, words):
    config = dict(max_wallclock_seconds=str(cap), max_epochs=str(epochs))
    result = dict(config=config, stop_reason=stop, steps=steps, tokens=100, step_ms=dict(max=100),
                  train_time_ms=1000, tok_per_s=100)
    run = run_of(result, body="step:10/10 val_loss:3.0\n")
    if words:
        with pytest.raises(checks.Broken, match=words):
            evidence.check_end(run)
    else:
        evidence.check_end(run)


def test_an_artifact_from_elsewhere_has_the_stated_size(tmp_path):
    """Its log may say what it likes."""
    artifact = tmp_path / "big.ptz"
    artifact.write_bytes(bytes(100))
    digest = folders.sha256(artifact.read_bytes())
    result = dict(config={"score_artifact": "1"}, bytes_model=3_000_000)
    run = run_of(result, path=tmp_path / "train.log", digests={"final_model.int8.ptz": digest})
    folder = SimpleNamespace(rules=folders.RULES[5], runs=[run], submission={"artifact_sha256": ""})
    with pytest.raises(checks.Broken, match="bytes is 100, in result.json 3000000"):
        checks.check_artifacts(folder, SimpleNamespace(artifact=[artifact]))
    artifact.write_bytes(bytes(101))
    with pytest.raises(checks.Broken, match="its sha256 is in no log"):
        checks.check_artifacts(folder, SimpleNamespace(artifact=[artifact]))


def test_a_replay_that_ends_by_itself(tmp_path):
    """Fails; one that is too slow does not."""
    env = {"PATH": os.environ["PATH"]}
    with pytest.raises(checks.Broken, match="ended before step 3: no data"):
        replay.until_step(3, ["bash", "-c", "echo no data"], tmp_path, env, 60)
    assert replay.until_step(3, ["bash", "-c", "echo begun; sleep 60"], tmp_path, env, 0.5) == ["begun"]


def test_a_replay_is_of_the_seed_that_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "data/datasets/toy").mkdir(parents=True)
    monkeypatch.setattr(replay, "ROOT", tmp_path)
    log = "step:1/1 train_loss:{}.0 train_time:1ms"
    monkeypatch.setattr(replay, "train_again", lambda _, result, *rest: [log.format(result["seed"])])
    folder = SimpleNamespace(runs=[
        run_of(dict(seed=seed, hardware="1 ranks x 2 threads of a CPU", torch=torch.__version__,
                    data=dict(name="toy")), body=log.format(told)) for seed, told in ((1, 1), (2, 3))])
    options = SimpleNamespace(replay=1, seed=None, seconds=LONG)
    assert replay.check_replay(folder, options).startswith("train.log: 1 losses up to step 1 are the same")
    options.seed = 2
    with pytest.raises(checks.Broken, match="step 1: train_loss 3.0, in the replay 2.0"):
        replay.check_replay(folder, options)


def test_a_folder_that_new_left_behind_is_no_record(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "HOME", tmp_path)
    shutil.copytree(BASELINE, tmp_path / "track_tiny" / BASELINE.name)
    shutil.copytree(BASELINE, tmp_path / "track_tiny/.2026-11-21_Killed.tmp")
    assert [*folders.records_of("tiny")] == [BASELINE.name]


@pytest.mark.parametrize("version, name, tokens, size, words", [
    (3, "sp1024", 62_021_632, 151_080_363, ""), (3, "sp8192", 40_000_000, 151_080_363, "data is"),
    (4, "sp8192", 40_000_000, 151_080_363, ""), (4, "sp8192", 40_000_000, 151_080_000, "val_bytes is"),
    (4, "sp1024", 40_000_000, 151_080_363, "val_tokens is '40000000', in the rules '62021632'")])
def test_golf_by_another_tokenizer(version, name, tokens, size, words):
    """golf_plus has 8,192 pieces: another number of val tokens for the same bytes, another compressor."""
    data = dict(name=f"fineweb10B_{name}", fingerprint=None, val_tokens=tokens, val_bytes=size,
                train_tokens=9, sha256={})
    facts = {key: str(value) for key, value in data.items()} | {"data": data["name"]}
    folder = SimpleNamespace(runs=[run_of({"data": data}, facts=facts)],
                             track=folders.RULES[version].tracks["golf"])
    said = verdict(checks.check_data, folder)
    assert words in said if words else said is None
    assert checks.MEMBERS.fullmatch("final_model.brot.ptz")
