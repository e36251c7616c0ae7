"""events.jsonl: what a run tells programs is what its train.log tells people, also of a run that crashed and
was resumed; what reads it goes by the log where there is none."""
import json
import re
import shutil

import pytest

from helpers import ROOT, TOY
from records.judge import logs
from test_logs import facts_of
from test_record_stats import speedrun_log

RUN = TOY | dict(TRAIN_BATCH_TOKENS="512", VAL_TOKENS="0", ITERATIONS="24",
                 TRAIN_LOG_EVERY="4", VAL_LOSS_EVERY="8", VAL_PART_EVERY="5", SAVE_EVERY="6",
                 WARMDOWN_FRAC="0.5", MEMORY="0")
LINES = {       # kind: (its line of train.log, what that says by the event)
    "setup": (r"setup:(\d+)ms compile:(\d+)ms", "{setup_ms} {compile_ms}"),
    "train": (r"step:(\d+)/(\d+) train_loss:(\S+) train_time:(\d+)ms .* lr_factor:(\S+) eta:(\d+)s "
              r"mean_loss:(\S+)",
              "{step} {steps} {train_loss:.4f} {ms:.0f} {lr_factor:.3f} {eta:.0f} {mean_loss:.4f}"),
    "val": (r"step:(\d+)/(\d+) val_loss:(\S+) val_bpb:(\S+) train_time:(\d+)ms .*",
            "{step} {steps} {val_loss:.4f} {val_bpb:.4f} {ms:.0f}"),
    "val_part": (r"val_part step:(\d+) val_loss:(\S+)", "{step} {val_loss:.4f}"),
    "resume": (r"resume: from step (\d+) at train_time:(\d+)ms", "{step} {ms:.0f}"),
    "stop": (r"stopping_early: (\S+) train_time:(\d+)ms step:(\d+)/\d+", "{reason} {ms:.0f} {step}"),
    "artifact": (r"Total submission size \S+: (\d+) bytes, limit .*", "{bytes_total}"),
    "score": (r"(final_\S+)_exact val_loss:(\S+) val_bpb:(\S+)", "{tag} {val_loss:.8f} {val_bpb:.8f}"),
    "result": (r" +tok_per_s  (\d+)", "{tok_per_s}"),
    "end": (r"(the disk is full: .*)", "{why}")}
# What of a Run only checks of records ask for
OF_THE_TEXT = {"source", "body", "digests", "eval", "summary", "scores", "sizes", "after", "facts",
               "curves"}


@pytest.fixture(scope="module")
def crashed(go):
    """A run that was killed before its step 14, and the beginning of a further event."""
    done = go(RUN, "kill@step:14", RUN_ID="crashed")
    assert done.codes == [-9]
    with open(done.folder / "events.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 16, "tra')
    return done


@pytest.fixture(scope="module")
def told(go, crashed, tmp_path_factory):
    """{run: its folder}: one that crashed, which was resumed, one that ended by its cap and failed."""
    kept = shutil.copytree(crashed.folder, tmp_path_factory.mktemp("kept") / "cut")
    resumed = go({}, resume="crashed")
    failed = go(RUN, "full@write/final_model.int8.ptz:1", RUN_ID="failed", ITERATIONS="100000",
                MAX_WALLCLOCK_SECONDS="0.5")
    assert (resumed.code, failed.code) == (0, 1), resumed.err
    return dict(cut=kept, resumed=resumed.folder, failed=failed.folder)


def said_by_the_log(folder, pattern):
    log = (folder / "train.log").read_text().rpartition(logs.RULER + "\n")[2]
    return [" ".join(found) for found in re.findall(rf"^{pattern}$", log, re.M) for found in [
        found if isinstance(found, tuple) else (found,)]]


@pytest.mark.parametrize("kind", LINES)
def test_an_event_is_what_the_line_says(kind, told):
    """In the same order, as often, in the digits of the line."""
    pattern, words = LINES[kind]
    count = 0
    for folder in told.values():
        events = [event for event in logs.read_events(folder) if event["kind"] == kind]
        by_events = [words.format(ms=1e3 * event.get("seconds", 0), **event) for event in events]
        assert by_events == said_by_the_log(folder, pattern), folder
        count += len(events)
    assert count


def test_what_a_run_is_and_what_came_of_it(told):
    """`start` has the constants, overrides and fingerprints of the log, each time that the run begins;
    `result` is result.json; a checkpoint is told once it is on the disk."""
    folder = told["resumed"]
    starts = [event for event in logs.read_events(folder) if event["kind"] == "start"]
    assert [start["resumed"] for start in starts] == [False, True]
    config = []
    changed = []
    for start in starts:
        config += [f"{name}={value}" for name, value in start["config"].items()]
        changed += [f"{name} {old} {new}" for name, (old, new) in start["overrides"].items()]
        digests = {"train_gpt.py": start["code_sha256"], **start["data"]["sha256"]}
        for name, digest in digests.items():
            assert {*said_by_the_log(folder, rf"sha256 {name}:(\w+)")} == {digest}
        assert {*said_by_the_log(folder, r"data: text fingerprint (\S+)")} == {start["data"]["fingerprint"]}
        assert start["stop_reason"] is None
    assert said_by_the_log(folder, r"config (\w+=.*)") == config
    assert said_by_the_log(folder, r"override (\w+) (.*) -> (.*)") == changed
    *_, last = logs.read_events(folder)
    assert last == {"kind": "result"} | json.loads((folder / "result.json").read_text())
    saved = [event["step"] for event in logs.read_events(folder) if event["kind"] == "checkpoint"]
    assert saved == [6, 12, 18, 24]


def test_the_kinds_are_those_of_the_page(told):
    found = {event["kind"] for folder in told.values() for event in logs.read_events(folder)}
    assert found == {*LINES, "start", "checkpoint"}
    page = (ROOT / "docs/running.md").read_text(encoding="utf-8")
    assert {*re.findall(r"^\| `(\w+)` \|", page, re.M)} == found


@pytest.mark.parametrize("name", ["cut", "resumed", "failed"])
def test_a_run_is_the_same_by_its_events_and_by_its_log(name, told):
    """All that compares runs: curves, scores, time, constants, what makes two runs one."""
    log = told[name] / "train.log"
    (run,) = logs.read_runs(log)
    text = logs.read_log(log)
    assert {key: value for key, value in vars(run).items() if key not in OF_THE_TEXT} == {
        key: value for key, value in vars(text).items() if key not in OF_THE_TEXT}
    assert run.source.strip() == text.source.strip()
    assert run.facts == {key: value for key, value in text.facts.items() if key in run.facts}
    assert {*run.facts} >= {"torch", "hardware", "fingerprint", "val_tokens"}
    for split, curve in text.curves.items():
        assert [point._replace(tokens=None) for point in run.curves[split]] == [
            point._replace(tokens=None) for point in curve]
        for point, its in zip(run.curves[split], curve):
            slack = 0.501 * its.seconds + 5e-4 * (its.tokens or 0) / max(its.seconds, 1e-3)
            assert its.tokens is None or abs(point.tokens - its.tokens) <= slack
    for metric in ("val_bpb", "val_loss", "core", "time"):
        assert run.value(metric) == text.value(metric), metric
    assert run.seed == text.seed and logs.recipe_of(run) == logs.recipe_of(text)
    assert logs.identity(run) == logs.identity(text) and logs.same_losses(run, text)
    assert run.finished == (name in ("resumed", "failed"))
    assert run.summary == {key: value for key, value in text.summary.items() if key in run.summary}


def test_a_torn_line_ends_where_the_run_goes_on(told):
    """Both files of the crashed run: what follows begins a line of its own."""
    raw = (told["resumed"] / "events.jsonl").read_text()
    pattern = r'"step": 16, "tra\n\{"kind": "start", .*\n(\{.*\n)*\{"kind": "resume", "step": 12,'
    assert re.search(pattern, raw)
    assert len(logs.read_events(told["resumed"])) == len(raw.splitlines()) - 1
    assert logs.read_events(told["cut"])[-1]["kind"] in ("train", "checkpoint")


def test_rank_0_alone_tells_events(go):
    done = go(RUN, ranks=2, ITERATIONS="6")
    assert done.codes == [0, 0], done.err
    lines = (done.folder / "events.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds[0] == "start" and kinds[-1] == "result" and kinds.count("start") == kinds.count("setup") == 1
    assert kinds.count("train") == 6


@pytest.mark.parametrize("events", [None, "", '{"kind": "start"}\n{"kind": "train"}\n', "[1]\n7\n{\n",
                                    '{"kind": "start", "data": 1}\n'])
def test_without_events_of_ours_a_run_is_read_from_its_log(events, told, tmp_path):
    """An older run, and one beside whose log something else wrote a file of that name."""
    folder = shutil.copytree(told["resumed"], tmp_path / "run")
    (folder / "events.jsonl").unlink()
    if events is not None:
        (folder / "events.jsonl").write_text(events)
    (run,) = logs.read_runs(folder / "train.log")
    assert facts_of(run) == facts_of(logs.read_log(folder / "train.log"))
    speedrun_log(tmp_path / "foreign" / "train.log", 3.2744, 69.993, total=1490)
    (run,) = logs.read_runs(tmp_path / "foreign" / "train.log")
    assert run.value("val_loss") == 3.2744
