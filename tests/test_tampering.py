"""Record folders altered by somebody who has our code: after each alteration every digest, number, page and
picture that can be made anew is made anew. What `check` finds and what it cannot is a table in
records/tampering.md, which the last test compares with the list here."""

import json
import re
import shutil
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

import train_gpt
from helpers import ROOT, TOY, slow, slow_but
from records import record
from records.verify import checks, evidence, folders, replay
from test_record import (BASELINE, RECORDS, bit, digit, edit, failed_rules, few_data,
                         forked_programs, read_once, renew, said_by, sealed, train_toys)

pytestmark = pytest.mark.usefixtures("forked_programs")

LATEST = next(path for path in RECORDS if path.name.endswith("_FastStepsWindows"))
SETTINGS = TOY | dict(TRAIN_LOG_EVERY="1", VAL_TOKENS="0", VAL_LOSS_EVERY="5", SAMPLE_TOKENS="0")


# ------------------------------------------------------------ what is altered
@pytest.fixture(scope="module")
def toy(few_data, tmp_path_factory):
    """A record of rules version 3 that holds all rules of its small track, with data/ beside it."""
    root = tmp_path_factory.mktemp("toy_record")
    train_toys(root, few_data, {f"run{seed}": SETTINGS | {"SEED": seed} for seed in "12"})
    result = json.loads((root / "logs/run1/result.json").read_text())
    made = SimpleNamespace(root=root, rules=toy_rules(result))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        go_to(made, patch)
        words = ["new", "--name", "Toy", "--blurb", "a toy", "logs/run1", "logs/run2"]
        assert record.main(words) == 0
    made.folder = next(root.glob("records/track_tiny/*_Toy"))
    return made


@pytest.fixture(scope="module")
def root(few_data, tmp_path_factory):
    """A folder for train(), with data/."""
    folder = tmp_path_factory.mktemp("root")
    (folder / "data").symlink_to(few_data / "data")
    return folder


def go_to(made, patch):
    """The tools in the toy's repository, with its rules."""
    patch.setitem(folders.RULES, folders.NEWEST, made.rules)
    patch.setattr(folders, "HOME", made.root / "records")
    for module in (checks, replay):
        patch.setattr(module, "ROOT", made.root)


def toy_rules(result):
    """Rules version 3 with a track of the toy's data and two runs."""
    data = result["data"]
    rules = folders.RULES[folders.NEWEST]
    track = rules.tracks["tiny"]._replace(
        data="toy", fingerprint="toy", val=(data["val_tokens"], data["val_bytes"]), sha256=data["sha256"],
        min_runs=2)
    return rules._replace(tracks={"tiny": track})


def reseal(folder, picture=True):
    """Everything anew that follows from the logs and results of an altered folder."""
    for log in folder.glob("train*.log"):
        raw = log.read_bytes()
        lines = b"".join(re.findall(rb"^config \w+=.*\n", raw, re.M))
        raw = re.sub(rb"(?m)^(sha256 config:).*", rb"\g<1>" + folders.sha256(lines).encode(), raw)
        script = (folder / "train_gpt.py").read_bytes()
        digest = folders.sha256(script).encode()
        raw = re.sub(rb"(?m)^(sha256 train_gpt.py:).*", rb"\g<1>" + digest, raw)
        artifact = folder / log.name.replace("train", "final_model").replace(".log", ".int8.ptz")
        if artifact.exists():
            digest = folders.sha256(artifact.read_bytes()).encode()
            raw = re.sub(rb"(?m)^(sha256 final_model.int8.ptz:).*", rb"\g<1>" + digest, raw)
        log.write_bytes(sealed(raw, script))
    artifact = folder / "final_model.int8.ptz"
    if artifact.exists():
        edit(folder / "submission.json", artifact_sha256=folders.sha256(artifact.read_bytes()))
    opened = folders.Folder(folder)
    if picture:
        evidence.record_picture(opened, folders.records_of("tiny"), folder / "loss.png")
    notes = opened.readme.partition(folders.NOTES[0])[2].partition(folders.NOTES[1])[0]
    renew(folder)
    page = folder / "README.md"
    page.write_text(page.read_text().replace("\nNone.\n", notes))


def in_files(pattern, text, names=("train*.log",), count=0):
    """Replaces a pattern in files of a folder; text: as re.sub takes it."""
    def alter(folder):
        found = 0
        for name in names:
            for path in sorted(folder.glob(name)):
                changed, times = re.subn(pattern, text, path.read_text(), count=count, flags=re.M)
                path.write_text(changed)
                found += times
        assert found, pattern
    return alter


def together(*parts):
    return lambda folder: [part(folder) for part in parts]


def result(name, *keys, **values):
    return lambda folder: edit(folder / name, *keys, **values)


def results(*keys, **values):
    return lambda folder: [edit(path, *keys, **values) for path in folder.glob("result*.json")]


def submission(**values):
    return lambda folder: edit(folder / "submission.json", **values)


STEP = re.compile(r"(?m)^(step:(\d+)/\d+ (\w+):)(\d\.\d{4})(.* train_time:)(\d+)ms step_avg:\S+ms")


def result_of(log):
    return log.replace("train", "result").replace(".log", ".json")


def step_lines(name, change):
    """Rewrites the step lines of a log: change(kind, step, loss, ms) -> loss, ms; step_avg follows."""
    def alter(folder):
        def line(found):
            loss, ms = change(found[3], int(found[2]), float(found[4]), int(found[6]))
            ms = max(1, round(ms))
            return f"{found[1]}{loss:.4f}{found[5]}{ms}ms step_avg:{ms / max(int(found[2]), 1):.2f}ms"

        (folder / name).write_text(STEP.sub(line, (folder / name).read_text()))
    return alter


def lowered(*parts, train=False, names="result*.json"):
    """Final scores of parts (trained, artifact) 1 % lower wherever they stand, and of the trained weights the
    validations before; train: the training losses, too."""
    def alter(folder):
        for path in sorted(folder.glob(names)):
            content = json.loads(path.read_text())
            log = path.name.replace("result", "train").replace(".json", ".log")
            head, ruler, text = (folder / log).read_text().rpartition("=" * 100 + "\n")
            for part in parts:
                content[part] |= {key: 0.99 * content[part][key] for key in ("val_loss", "val_bpb")}
                tag = {"trained": "final_model_exact", "artifact": "final_int8_zlib_roundtrip_exact"}[part]
                text = re.sub(rf"(?m)^{tag} .*$", tag + score_text(content[part]), text)
            content |= {key: content["artifact"][key] for key in ("val_loss", "val_bpb")}
            path.write_text(folders.json_text(content))
            (folder / log).write_text(head + ruler + text)

            def change(kind, step, loss, ms):
                if step == content["steps"] and kind == "val_loss":
                    return content["trained"]["val_loss"], ms
                return loss * (0.99 if train or kind == "val_loss" and "trained" in parts else 1), ms
            step_lines(log, change)(folder)
    return alter


def score_text(score):
    return "".join(f" {key}:{score[key]:.8f}" for key in ("val_loss", "val_bpb"))


def noise(size, seed=0):
    rng = np.random.default_rng(seed)
    return lambda: size * float(rng.uniform(-1, 1))


def copied(change):
    """train_seed1340's run as a new one of seed 1342, by change(kind, step, loss, ms)."""
    def alter(folder):
        for kind, end in (("train", ".log"), ("result", ".json")):
            shutil.copy(folder / f"{kind}_seed1340{end}", folder / f"{kind}_seed1342{end}")
        log = folder / "train_seed1342.log"
        log.write_text(log.read_text().replace("baseline_seed1340", "x").replace("1340", "1342"))
        name = "result_seed1342.json"
        result(name, seed=1342, run_id="x")(folder)
        result(name, "config", seed="1342", run_id="x")(folder)
        result(name, "overrides", seed=["1337", "1342"], run_id=["", "x"])(folder)
        last = json.loads((folder / name).read_text())["steps"]
        step_lines(log.name, lambda kind, step, loss, ms: (
            (loss, ms) if step == last else change(kind, step, loss, ms)))(folder)
    return alter


def twice(name, key, value):
    """Adds a second `key` to a JSON object, which Python's reader takes for the only one."""
    return in_files(r"\n}\n$", f',\n "{key}": {json.dumps(value)}\n}}\n', (name,))


def notes(text):
    return in_files(r"(?<=<!-- notes -->\n).*", text, ("README.md",))


def boards(pattern, text):
    return in_files(pattern, text, ("../../README.md",), 1)


def script(old, new):
    """The folder's script and the source in its logs, and all that tells their size."""
    def alter(folder):
        was = (folder / "train_gpt.py").read_text()
        assert was.count(old) == 1
        text = was.replace(old, new)
        (folder / "train_gpt.py").write_text(text)
        size = len(text.encode())
        for log in folder.glob("train*.log"):
            model = json.loads((folder / result_of(log.name)).read_text())
            total = model["bytes_model"] + size
            body = log.read_text().replace(was, text).replace(f"{model['bytes_total']}", f"{total}")
            log.write_text(re.sub(r"(?m)^Code size: \d+", f"Code size: {size}", body))
            result(result_of(log.name), bytes_code=size, bytes_total=total,
                   code_sha256=folders.sha256(text.encode()))(folder)
    return alter


def one_pixel(folder):
    from matplotlib import image
    pixels = image.imread(folder / "loss.png")
    pixels[200, 300] = 0, 0, 0, 1
    image.imsave(folder / "loss.png", pixels)


def version_1(folder):
    """As if it had been made before there were digests."""
    in_files(r"^(log )?sha256 .*\n", "")(folder)
    submission(rules_version=1)(folder)


class Case(NamedTuple):
    """An alteration, of which record, and the rule that finds it or why none can.

    sealed: "after": all is made anew; "listed": all but the picture; "hashes": the list of files; "before":
    nothing."""
    name: str
    alter: Callable
    rule: str
    base: str = "Baseline"
    sealed: str = "after"


START = '\nif __name__ == "__main__":\n    sys.exit'     # how the last lines of a script begin
LOOKS_AHEAD = """
honest = log_probs
def log_probs(model, tokens):
    return honest(model, tokens.roll(-1, 1))
if __name__ == "__main__":
    sys.exit"""
STEPS = "steps and times"
SCORE = "score of the artifact"
CONFIG = "one configuration"
COPIES = "distinct runs"
LOG = ("train.log",)
ALL = ("train*.log", "result*.json")
FIND = [
    # steps, times, rates
    Case("a step line is taken out", in_files(r"^step:300/.*\n", "", LOG), STEPS),
    Case("a step line is added", in_files(r"^(step:)300(/.*\n)", r"\g<0>\g<1>325\2", LOG), STEPS),
    Case("two step lines change places", in_files(r"^(step:300/.*\n)(step:350/.*\n)", r"\2\1", LOG),
         STEPS),
    Case("time goes back at one step, its rates follow", step_lines(
        "train.log", lambda kind, step, loss, ms: (loss, ms - 9000 * (step == 300))), STEPS),
    Case("one train_time", in_files(r"^(step:300/.*train_time:)\d+", r"\g<1>41000", LOG), STEPS),
    Case("one step_avg", in_files(r"^(step:300/.*step_avg:)[\d.]+", r"\g<1>130.00", LOG), STEPS),
    Case("process_ms", together(results(process_ms=160_000), in_files(
        r"^( +process_ms  ).*", r"\g<1>160000")), "dates"),
    Case("tokens of a run", together(result("result.json", tokens=1_900_000), in_files(
        r"^( +tokens  ).*", r"\g<1>1900000", LOG)), STEPS),
    # scores
    Case("the artifacts' scores 1 % lower", lowered("artifact"), STEPS),
    Case("all final scores and validations 1 % lower", lowered("trained", "artifact"), SCORE, "toy"),
    Case("all losses 1 % lower", lowered("trained", "artifact", train=True), SCORE, "toy"),
    Case("training losses 1 % lower", step_lines("train.log", lambda kind, step, loss, ms: (
        loss * (0.99 if kind == "train_loss" else 1), ms)), "replay", "toy"),
    Case("val_bpb alone lower", in_files(r"1\.475540", "1.465540", ("train.log", "result.json")),
         "evaluation"),
    Case("val_bytes", together(
        results("data", val_bytes=1_121_844), in_files(r"val_bytes:1021844", "val_bytes:1121844")), "data"),
    Case("val_tokens", together(results("data", val_tokens=400_000), in_files(
        r"val tokens:429104", "val tokens:400000")), "data"),
    Case("score_artifact=0", together(results("config", score_artifact="0"), in_files(
        r"^(config score_artifact=)1", r"\g<1>0")), CONFIG),
    Case("eval_context of the score", together(results("eval", eval_context=512, eval_stride=512), in_files(
        r"eval_context:256 eval_stride:256", "eval_context:512 eval_stride:512")), CONFIG),
    Case("VAL_TOKENS", together(results("config", val_tokens="4096"), in_files(
        r"^(config val_tokens=)0", r"\g<1>4096")), CONFIG),
    # inputs
    Case("sha256 of the tokenizer", in_files("67dbde5d", "77dbde5d", ALL[1:]), "data"),
    Case("sha256 of the val tokens", in_files("bd8b97ed", "cd8b97ed", ALL[1:]), "data"),
    Case("sha256 of the val tokens in a log", in_files(r"^(sha256 toy_val\S+:)....", r"\1abcd"),
         "digests", "toy"),
    Case("a constant, in logs and results", together(results("config", matrix_lr="0.05"), in_files(
        r"^(config matrix_lr=).*", r"\g<1>0.05")), "replay", "toy"),
    Case("a constant's default in the script", script(
        ' rope_base: float = optional(1_000.0,', ' rope_base: float = optional(1_001.0,'),
        "replay", "toy"),
    Case("a line of the script in one log", digit("train.log", r"return (\d+)"), "one script"),
    Case("the artifact of another seed", lambda folder: shutil.copy(
        folder / "final_model_seed2.int8.ptz", folder / "final_model.int8.ptz"), SCORE, "toy"),
    Case("one bit of the artifact", bit("final_model.int8.ptz"), SCORE, "toy"),
    Case("a script that looks ahead", script(START, LOOKS_AHEAD), "leak probe", "toy"),
    Case("a packed script", script(START, "\nexec(zlib.decompress(b''))" + START),
         "script", "toy"),
    Case("rules version 1, and no digests", version_1, "dates", "toy"),
    # seeds, names, overrides
    Case("the seed in a log and its result", together(
        in_files(r"^config seed=1340", "config seed=1345", ("train_seed1340.log",)),
        in_files(r"^override seed.*", "override seed 1337 -> 1345", ("train_seed1340.log",)),
        result("result_seed1340.json", seed=1345), result("result_seed1340.json", "config", seed="1345"),
        result("result_seed1340.json", "overrides", seed=["1337", "1345"])), "names"),
    Case("an override line is taken out", in_files(r"^override seed.*\n", "", ("train_seed1340.log",)),
         "names"),
    Case("an override line is added", in_files(
        r"^(override run_id.*\n)", r"\1override matrix_lr 0.03 -> 0.02\n"), "names"),
    Case("an override in results only", results("overrides", matrix_lr=["0.02", "0.03"]), "names"),
    Case("one constant of one log", in_files(r"^(config head_lr=).*", r"\g<1>0.009", LOG), CONFIG),
    # copies of runs
    Case("a run copied, a step's loss altered", copied(lambda kind, step, loss, ms: (
        loss + 0.01 * (step == 50), ms)), COPIES),
    Case("copied, losses 0.01 lower, times longer", copied(
        lambda kind, step, loss, ms: (loss - 0.01, ms + step * 0.2)), COPIES),
    Case("copied, losses with noise of 0.003", copied(
        lambda kind, step, loss, ms, more=noise(0.003): (loss + more(), ms + step * 0.2)), COPIES),
    Case("copied, new losses, old times", copied(
        lambda kind, step, loss, ms, more=noise(0.1): (loss + more(), ms)), COPIES),
    Case("the seed of another run", together(
        in_files(r"^config seed=1340", "config seed=1339", ("train_seed1340.log",)),
        result("result_seed1340.json", seed=1339), result("result_seed1340.json", "config", seed="1339")),
        COPIES),
    # files, JSON, dates, texts
    Case("a key twice in submission.json", twice("submission.json", "val_bpb", 1.1), "rules",
         sealed="before"),
    Case("a key twice in result.json", twice("result.json", "val_bpb", 1.1), "rules", sealed="hashes"),
    Case("NaN in a result", in_files(r'"core": null', '"core": NaN', ("result.json",)),
         "numbers of the submission", sealed="hashes"),
    Case("a file more", lambda folder: (folder / "weights.bin").write_bytes(b"1"), "files"),
    Case("a result without a log", lambda folder: shutil.copy(
        folder / "result_seed1338.json", folder / "result_seed1350.json"), "names"),
    Case("dates in the future", results(
        started="2099-01-01T00:00:00Z", finished="2099-01-01T00:02:53Z"), "dates"),
    Case("finished before it started", results(started="2026-11-22T00:00:00Z"), "dates"),
    Case("markup in the name", submission(name="Best <b>ever</b>"), "plain text"),
    Case("a link in the blurb", submission(blurb="see [the proof](x.md)"), "plain text"),
    Case("a heading in the author", submission(author="me\n\n## Result\n\nval_bpb: 1.1"), "plain text"),
    Case("a result section in the notes", notes("\n## Result\n\nval_bpb: n=5 mean 1.1"), "plain text"),
    Case("a comment in the notes that hides what follows", notes("<!-- x"), "plain text"),
    # pictures, pages, boards
    Case("one pixel of the picture", one_pixel, "picture", sealed="listed"),
    Case("a number of README.md", in_files(r"mean 1\.449", "mean 1.349", ("README.md",)), "README",
         sealed="before"),
    Case("a number of the boards", boards(r"1\.44915319 ±", "1.34915319 ±"), "rules and boards", "tree"),
    Case("a number of the rules", boards(r"< 0\.01 \| 5", "< 0.1 | 2"), "rules and boards", "tree"),
    Case("a number of older rules", in_files(r"< 0\.01 \| 5", "< 0.1 | 2", ("../../rules/rules_1.md",), 1),
         "rules and boards", "tree"),
    Case("the commit", submission(git_commit="7500b4231d1015ea6cc51bc38d247952e0c79888"), "git commit"),
    Case("the record before", in_files(r'"mean": 1\.304', '"mean": 1.404', ("submission.json",)),
         "record before", "latest"),
    Case("changes.diff", in_files(r"^\+.*\n", "", ("changes.diff",), 1), "record before", "latest"),
]
MISS = [
    Case("tok/s, eta and val_bpb of step lines", together(
        in_files(r"^(step:300/.*) tok/s:\d+(.*) eta:\d+", r"\1 tok/s:99999\2 eta:1", LOG),
        in_files(r"^(step:\d+/\d+ val_loss:\S+ val_bpb:)\S+", r"\g<1>1.0000", LOG)),
         "no claim depends on them; step_avg is checked"),
    Case("step_ms, in a log and its result", together(
        result("result.json", step_ms=dict(p50=90.0, p95=91.0, max=92.0)),
        in_files(r"^( +step_ms  ).*", r"\1{'p50': 90.0, 'p95': 91.0, 'max': 92.0}", LOG)),
         "no claim depends on it"),
    Case("ranks, in logs and results", together(
        results(world_size=2), in_files(r"world_size:1", "world_size:2")), "nothing else depends on it"),
    Case("torch build, in logs and results", in_files(r"2\.13\.0\+cpu", "2.12.0+cpu", ALL),
         "nothing else depends on it; a replay refuses to compare, which says that it could not be shown"),
    Case("hardware, in logs and results", in_files("AMD EPYC", "Intel Xeon", ALL),
         "nothing in a folder proves on which machine a log was written"),
    Case("peak memory, in logs and results", in_files(r"(peak memory resident: )\d+", r"\g<1>500", ALL),
         "nothing else depends on it"),
    Case("all runs ten hours earlier", in_files("2026-11-21T1", "2026-11-21T0", ALL[1:]),
         "nobody has signed the time; the history of the repository that takes the record does"),
    Case("all losses 1 % lower, no artifact in the folder", lowered("trained", "artifact", train=True),
         "consistent; `--replay` finds it, and the artifact whose sha256 is listed", "latest"),
    Case("final scores of a seed 1 % lower, whose artifact is not in the folder", lowered(
        "trained", "artifact", names="result_seed1341.json"),
         "consistent; since rules version 3 its log names the sha256 of the artifact that must score so"),
    Case("one training loss", in_files(r"^(step:400/\S+ train_loss:3\.1)\d", r"\g<1>9", LOG, 1),
         "nothing follows from it but the picture; `--replay` finds it"),
]


# ------------------------------------------------------------ what is found
def seal(case, folder, picture):
    """Alters a folder and makes anew what the liar can; picture: loss.png, too."""
    before = {path.name: folders.sha256(path.read_bytes()) for path in folder.iterdir()}
    case.alter(folder)
    if case.sealed == "after":
        reseal(folder, picture)
    elif case.sealed == "listed":
        renew(folder)
    elif case.sealed == "hashes":
        for name in ("submission.json", "README.md"):
            text = (folder / name).read_text()
            for other, digest in before.items():
                text = text.replace(digest, folders.sha256((folder / other).read_bytes()))
            (folder / name).write_text(text)


@pytest.fixture
def copy_of(request, tmp_path, monkeypatch, read_once):
    """A copy of a base: Baseline, latest, toy, or tree, the Baseline among all records and their boards."""
    def copy(base):
        if base == "tree":
            shutil.copytree(ROOT / "records", tmp_path / "records")
            monkeypatch.setattr(folders, "HOME", tmp_path / "records")
            return tmp_path / "records" / "track_tiny" / BASELINE.name
        path = {"Baseline": BASELINE, "latest": LATEST}.get(base)
        if base == "toy":
            made = request.getfixturevalue("toy")
            go_to(made, monkeypatch)
            path = made.folder
        return shutil.copytree(path, tmp_path / path.name)
    return copy


def name_of(case):
    return f"{case.base}: {case.name}"


@pytest.mark.parametrize("base", slow_but(["Baseline", "tree"], ["Baseline", "latest", "tree", "toy"]))
def test_what_is_only_made_anew_holds(copy_of, base, tool):
    """And all rules that run the toy's code."""
    folder = copy_of(base)
    reseal(folder)
    code, out, _ = tool("check", folder, *(["--replay", 5] if base == "toy" else ["--no-exec"]))
    assert code == 0 and "nothing fails" in out, out


# Rules that run the toy's code on the toy's data need a record of toy runs
@pytest.mark.parametrize("case", [
    (slow if case.base == "toy" else pytest.param)(case, id=name_of(case)) for case in FIND])
def test_found(copy_of, case, tool):
    """By its rule, which sees nothing of the others; `rules` is what a folder says that cannot be opened."""
    folder = copy_of(case.base)
    seal(case, folder, picture=case.rule == "picture")
    if case.rule == "rules":
        assert tool("check", "--no-exec", folder)[1].endswith("rules fail: rules\n")
    else:
        word, text = said_by(case.rule, folder)
        assert word == "FAIL", text


@pytest.mark.parametrize("case", MISS, ids=name_of)
def test_not_found(copy_of, case, tool):
    folder = copy_of(case.base)
    seal(case, folder, picture=True)
    code, out, _ = tool("check", "--no-exec", folder)
    assert code == 0 and "nothing fails" in out, out


# ------------------------------------------------------------ runs that were not one piece
@pytest.mark.slow
def test_a_resumed_run_holds_all_rules_of_logs(train, monkeypatch, tmp_path, tool):
    """Its log, with the digests of its lines, goes on in the same file; without one step line it fails."""
    report_step = train_gpt.report_step

    def report_and_stop(run, *more):
        report_step(run, *more)
        if run.state.step == 12:
            signal.raise_signal(signal.SIGTERM)

    settings = SETTINGS | {"SEED": "3"}
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt, "report_step", report_and_stop)
        first = train(settings)
    assert first.code == 1 and first.last == f"RESUME={first.run_id}"
    done = train({}, RESUME=first.run_id)
    assert done.code == 0 and done.result["resumed"], done.err
    # its text is not the track's, so its scores compare with no record's
    words = ("--name", "Resumed", "--blurb", "a toy", "--before", "none", "--into", tmp_path)
    assert tool("new", *words, done.folder)[0] == 0
    made = next(tmp_path.glob("track_tiny/*"))
    out = tool("check", "--no-exec", made)[1]
    assert failed_rules(out) == {"data", "record before", "runs"}, out      # of the rules of tiny itself
    assert len(evidence.LOG_DIGEST.findall((made / "train.log").read_bytes())) == 6
    in_files(r"^step:14/.*\n", "")(made)
    assert [said_by(name, made)[0] for name in ("steps and times", "digests")] == ["FAIL", "FAIL"]


# ------------------------------------------------------------ what records/tampering.md says
def table():
    """The list as a table."""
    rows = [[case.name, case.base, f"`{case.rule}`"] for case in FIND]
    rows += [[case.name, case.base, f"**not found**: {case.rule}"] for case in MISS]
    return folders.table(["alteration", "of", "found by"], rows)


def test_the_table_on_the_page_is_this_list():
    assert len(FIND) + len(MISS) >= 60 and len({case.name for case in FIND + MISS}) == len(FIND) + len(MISS)
    assert table() in (ROOT / "records" / "tampering.md").read_text(encoding="utf-8"), table()
