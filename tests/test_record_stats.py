"""records/: foreign logs as they are, statistics, audits, comparisons. The logs are made here."""

import json
import os
import re
import sys

import numpy as np
import pytest

import fork_server
from helpers import ROOT
from records.judge import logs, significance
from records.judge.significance import judge

RULER = "=" * 100
GPUS = "\n".join(f"|   {i}  NVIDIA H100 80GB HBM3   On  |   00000000:{i}9:00.0 Off |" for i in range(8))
# A script that is full of what a careless parser takes for results
SOURCE = f'''import torch
DOC = """
step:2160/2160 val_loss:1.0000 train_time:1ms step_avg:0.01ms
final_int8_zlib_roundtrip_exact val_loss:0.50000000 val_bpb:0.30000000
Running PyTorch 0.0.1
{RULER}
"""
def log(step, train_steps, val_loss):
    print(f"step:{{step}}/{{train_steps}} val_loss:{{val_loss:.4f}} train_time:{{0:.0f}}ms step_avg:0ms")
''' + "x = 1  # a long script\n" * 1500
LOSSES = [3.2772, 3.2781, 3.2780, 3.2784, 3.2773, 3.2806, 3.2799, 3.2765]
TIMES = [132.259, 132.152, 132.194, 132.179, 132.249, 132.190, 132.217, 132.275]
EARLIER = [3.2772, 3.2772, 3.2761, 3.2788, 3.2795, 3.2808, 3.2783, 3.2795, 3.2767, 3.2794]
EARLIER_TIMES = [132.754, 132.869, 132.706, 132.803, 132.627, 132.642, 132.683, 132.654, 132.913, 132.706]
OLD_TIMES = [134.069, 134.013, 134.044]
GOLF = {1337: (2.02857127, 1.20143417), 1338: (2.02522281, 1.19945102), 1339: (2.03154510, 1.20319508)}


def failed_rules(out):
    """The rules that `check` says fail."""
    return {line[8:34].strip() for line in out.splitlines() if line.startswith("  FAIL")}


def edit(path, *keys, **values):
    """Changes values of a JSON file, of the object at keys."""
    content = part = json.loads(path.read_text())
    for key in keys:
        part = part[key]
    part.update(values)
    path.write_text(json.dumps(content, indent=1) + "\n")


def speedrun_log(path, loss, seconds, source=SOURCE, every=250, total=2160, cut=False):
    """A log as modded-nanogpt writes them."""
    lines = [source, RULER, "Running Python 3.10.12", "Running PyTorch 2.10.0.dev20250926+cu126", GPUS, RULER]
    for step in range(total + 1):
        ms = seconds * 1e3 * step / total
        if (step % every == 0 or step == total) and not (cut and step == total):
            value = loss + 7.5 * (1 - step / total) ** 2
            lines.append(f"step:{step}/{total} val_loss:{value:.4f} train_time:{ms:.0f}ms step_avg:1.00ms")
        if step < total:
            ms = seconds * 1e3 * (step + 1) / total
            lines.append(f"step:{step + 1}/{total} train_time:{ms:.0f}ms step_avg:61.00ms")
    if not cut:
        lines.append("peak memory allocated: 29892 MiB reserved: 44736 MiB")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def speedrun_logs(folder, losses, times, **options):
    for i, (loss, seconds) in enumerate(zip(losses, times)):
        speedrun_log(folder / f"{i:08x}-run.txt", loss, seconds, **options)


def golf_log(path, seed, loss, bpb, model, source, ms=599_921):
    """A log as parameter-golf writes them."""
    code = len(source)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"""{source}
{RULER}
Running Python 3.12.3
Running PyTorch 2.8.0+cu128
{GPUS}
{RULER}
seed:{seed}
step:0/20000 val_loss:6.9373 val_bpb:4.1086 train_time:0ms step_avg:0.01ms
step:1/20000 train_loss:6.9374 train_time:37ms step_avg:36.55ms
step:5000/20000 train_loss:2.1377 train_time:323094ms step_avg:64.62ms
step:8394/20000 val_loss:{loss - 0.0059:.4f} val_bpb:{bpb - 0.0034:.4f} train_time:{ms}ms step_avg:71.47ms
stopping_early: wallclock_cap train_time:{ms}ms step:8394/20000
peak memory allocated: 7748 MiB reserved: 8070 MiB
Serialized model: 67224983 bytes
Code size: {code} bytes
Total submission size: {67224983 + code} bytes
Serialized model int8+zlib: {model} bytes (payload:17178912 payload_ratio:3.91x)
Total submission size int8+zlib: {model + code} bytes
final_int8_zlib_roundtrip val_loss:{loss:.4f} val_bpb:{bpb:.4f} eval_time:2235ms
final_int8_zlib_roundtrip_exact val_loss:{loss:.8f} val_bpb:{bpb:.8f}
""")


@pytest.fixture(scope="module")
def speedrun(tmp_path_factory):
    """The public record: nine logs of its script, ten of an earlier one, the page with its slips."""
    folder = tmp_path_factory.mktemp("speedrun") / "track_1_short" / "2025-11-29_BatchSizeSchedule"
    speedrun_logs(folder, [3.2777, *LOSSES[1:], 3.2768], [*TIMES, 132.286])
    speedrun_logs(folder / "old", EARLIER, EARLIER_TIMES, source=SOURCE + "# an earlier version\n")
    (folder / "README.md").write_text(f"""# Batch sizes by schedule
```
losses = {LOSSES}
times = {TIMES}
print("p=%.4f" % scipy.stats.ttest_1samp(losses, 3.28, alternative="less").pvalue)
# p=0.0045
print("losses:", torch.std_mean(torch.tensor(losses)))
# losses: (std=0.0014, mean=3.2782)
print("time:", torch.std_mean(torch.tensor(times)))
# time: (std=0.0431, mean=132.2144)
```
The one before, same machine:
```
times = {OLD_TIMES}
print("time:", torch.std_mean(torch.tensor(times)))
# time: (std=0.00281, mean=134.042)
```
""")
    return folder


@pytest.fixture
def golf(tmp_path):
    """The public golf record: one log with another script of 47,642 bytes."""
    folder = tmp_path / "track_10min_16mb" / "2026-03-19_TrainingOptSeq4096"
    comment = "# a comment of sixty characters to fill the script with text\n" * 500
    script = (SOURCE + comment)[:47_758] + "\n"
    other = (SOURCE.replace("x = 1", "x = 2", 1) + comment)[:47_641] + "\n"
    models = {1337: 15_820_684, 1338: 15_835_395, 1339: 15_830_000}
    for seed, (loss, bpb) in GOLF.items():
        name = "train.log" if seed == 1337 else f"train_seed{seed}.log"
        golf_log(folder / name, seed, loss, bpb, models[seed], other if seed == 1337 else script)
    (folder / "train_gpt.py").write_text(script)
    (folder / "submission.json").write_text(json.dumps(dict(
        author="somebody", github_id="somebody", name="Seq4096", blurb="", date="2026-03-19",
        val_loss=2.02857127, val_bpb=1.20143417, bytes_total=15_868_326, bytes_code=47_759)))
    page = "".join(f"- `SEED={seed}`: `{bpb}`\n" for seed, (_, bpb) in GOLF.items())
    (folder / "README.md").write_text(page + "\nSample standard deviation: `0.00187`. Against `1.21113611`: "
                                      "`t=9.06` with `df=2`, `p=0.006`\n")
    return folder


# ------------------------------------------------------------ stats
def test_stats_of_the_speedrun(tool, tmp_path):
    """Its eight runs, then ten in nested folders, two of them with more validations, and two cut off."""
    speedrun_logs(tmp_path / "new", LOSSES, TIMES)
    out = tool("stats", tmp_path / "new", "--target", 3.28)[1]
    assert "n=8 mean 3.2782 std 0.0014" in out and "p=0.0045" in out
    assert "n=8 mean 132.2144 std 0.0431" in out
    for i, (loss, seconds) in enumerate(zip(EARLIER, EARLIER_TIMES)):
        speedrun_log(tmp_path / "old" / f"{i}" / "deep" / "x.log", loss, seconds, every=5 if i < 2 else 250)
    speedrun_log(tmp_path / "old" / "cut.txt", 1.0, 132.0, cut=True)
    (tmp_path / "old" / "inside.txt").write_text(SOURCE[:300])      # cut off within its own source
    out = tool("stats", tmp_path / "old", "--target", 3.28)[1]
    assert "p=0.0035" in out and "n=10 mean 3.2784 std 0.0015" in out and "n=10 mean 132.7357" in out
    assert "cut.txt was cut off at step 2160" in out and "inside.txt has no validation" in out


def test_stats_of_golf(tool, golf):
    code, out, _ = tool("stats", golf, "--target", 1.21113611)
    assert code == 0 and "t=9.04 df=2 p=0.0060" in out
    assert "n=3 mean 1.20136009 std 0.00187" in out and "2 different scripts" in out
    found = json.loads(tool("stats", golf, "--metric", "val_loss", "--json", "--target", "2.04")[1])
    assert found["metric"] == "val_loss" and found["n"] == 3
    assert found["mean"] == pytest.approx(np.mean([loss for loss, _ in GOLF.values()]))
    assert found["test"]["p"] == pytest.approx(0.0120, abs=5e-5)
    assert found["time"]["mean"] == pytest.approx(599.921)


def test_compare_tells_the_ratio_of_times(tool, tmp_path):
    for side, times in (("new", TIMES[:4]), ("old", OLD_TIMES)):
        speedrun_logs(tmp_path / side, [3.278 + i * 1e-4 + 1e-5 * (side == "old") for i in range(4)], times)
    out = tool("compare", tmp_path / "old", tmp_path / "new", "--out", tmp_path / "x.png")[1]
    assert "Welch: t=" in out and f"time ratio: {np.mean(TIMES[:4]) / np.mean(OLD_TIMES):.4f}" in out


def test_newer_golf_logs(tmp_path):
    """Settings before the ruler, blanks after colons, minutes, validation lines without a time."""
    (tmp_path / "train.log").write_text(
        f"Hyperparameters:\n  lr: 1\n{RULER}\nRunning Python 3.12\nRunning PyTorch 2.9.1\n{RULER}\n"
        "1/20000 train_loss: 9.0 train_time: 0.0m tok/s: 8000000\n"
        "4500/20000 train_loss: 2.4 train_time: 8.9m tok/s: 6000000\n"
        "4902/20000 val_loss: 2.3544 val_bpb: 1.0758\n"
        "stopping_early: wallclock_cap train_time: 595546ms step: 4902/20000\n"
        "quantized_sliding_window val_loss:2.37 val_bpb:1.0829 eval_time:90000ms\n"
        "quantized_ttt val_loss:2.36000000 val_bpb:1.08100000 eval_time:370000ms\n")
    run = logs.read_log(tmp_path / "train.log")
    assert run.source is None and run.time == 595.546 and run.finished and run.value("val_bpb") == 1.081
    assert run.curves["val"][0][:3] == (4902, pytest.approx(534), 2.3544)


# ------------------------------------------------------------ logs that are not whole
@pytest.mark.parametrize("cut", ["val_loss:3.", "val_loss:3.2772 train_time:132", "step:2160/2160 val"])
def test_a_log_cut_within_a_line_is_cut_off(tool, tmp_path, cut):
    speedrun_logs(tmp_path, [3.2772, 3.2781], [132.0, 132.1])
    first = tmp_path / "00000000-run.txt"
    text = first.read_text()
    first.write_text(text[:text.rindex(cut) + len(cut)])
    out = tool("stats", tmp_path)[1]
    assert "n=1 mean 3.2781" in out and "00000000-run.txt was cut off" in out


def test_a_cut_golf_log_does_not_change_the_metric(tool, golf):
    text = (golf / "train.log").read_text()
    for ending in ("final_int8_zlib_roundtrip val", "Serialized model", "val_bpb:1.201"):
        (golf / "train.log").write_text(text[:text.rindex(ending) + len(ending)])
        out = tool("stats", golf)[1]
        assert "val_bpb: n=2 " in out and "train.log was cut off before its final score" in out
    (golf / "train.log").write_text(text.replace("_exact val_loss:2.02857127", "_exact val_loss:nan"))
    assert "train.log ended with a loss of nan" in tool("stats", golf)[1]
    (golf / "train.log").write_text(text.rstrip("\n"))      # whole, without a last line end
    assert "t=9.04 df=2 p=0.0060" in tool("stats", golf, "--target", 1.21113611)[1]


def huge(folder):
    (folder / "train.log").touch()
    os.truncate(folder / "train.log", 500 << 20)


GARBAGE = {
    "nothing": lambda folder: None,
    "empty": lambda folder: (folder / "train.log").write_text(""),
    "binary": lambda folder: (folder / "train.log").write_bytes(os.urandom(5000) + b"\0"),
    "json": lambda folder: (folder / "submission.json").write_text('{"rules_version": 1, "tra'),
    "huge": huge,
    "many": lambda folder: [(folder / f"{i}.log").touch() for i in range(logs.MAX_LOGS + 1)],
    "absent": lambda folder: folder.rmdir(),
}


@pytest.mark.parametrize("command", ["stats", "check", "audit", "plot"])
@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_refused_in_one_sentence(tool, tmp_path, monkeypatch, command, kind):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logs, "MAX_LOGS", 20)
    folder = tmp_path / "x"
    folder.mkdir()
    GARBAGE[kind](folder)
    code, out, err = tool(command, folder)
    if command == "audit" and kind == "json":
        assert code == 1 and out.count("\n") == 3       # the folder, the finding, the sum
    else:
        assert code == 2 and err.count("\n") == 1 and err.startswith("record: ")
        assert "more than 20" in err or kind != "many" or command == "audit"


# ------------------------------------------------------------ audit
def test_audit_of_the_speedrun_record(tool, speedrun):
    code, out, _ = tool("audit", speedrun.parent)
    assert code == 1
    assert "3.2772 on the page (time 132.259), 00000000-run.txt, 3.2777 in 132.259 s" in out
    assert "lists 8 runs of a script, not its finished run 00000008-run.txt, 3.2768 in 132.286 s" in out
    assert len([line for line in out.splitlines() if line.startswith("    ")]) == 2


def test_an_audit_of_the_golf_record(tool, golf):
    code, out, _ = tool("audit", golf.parent)
    assert code == 1 and len([line for line in out.splitlines() if line.startswith("    ")]) == 1
    assert "1 of 3 logs hold another script than train_gpt.py (47759 bytes): train.log (47642 bytes)" in out
    code, _, err = tool("check", golf)
    assert code == 2 and "record audit" in err and err.count("\n") == 1


@pytest.mark.parametrize("spoil", [
    lambda odd: (odd / "submission.json").write_text('{"rules_version": [1], "track": {}}'),
    lambda odd: (odd / "loop.log").symlink_to(odd / "loop.log"),
    lambda odd: os.mkfifo(odd / "x.log"),
    lambda odd: (odd / "submission.json").write_text("[" * 100_000),
    lambda odd: (odd / "1.txt").write_text((odd / "0.txt").read_text().replace("loss:3.2700", "loss:3.2.7")),
    lambda odd: (odd / "submission.json").write_text('{"val_bpb": {"x": []}, "bytes_total": "y"}')])
def test_odd_folders_do_not_end_an_audit(tool, tmp_path, spoil):
    for name in ("a_odd", "b_good"):
        speedrun_log(tmp_path / name / "0.txt", 3.27, 132.0)
    spoil(tmp_path / "a_odd")
    code, out, _ = tool("audit", tmp_path)
    assert code < 2 and "b_good: no finding" in out and "2 folders" in out


def test_an_audit_tells_records_from_the_folders_around_them(tool, tmp_path):
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / "README.md").write_text("# the game\n")
    for name in ("r0", "r1"):
        speedrun_log(tmp_path / "records" / name / "0.txt", 3.27, 132.0)
        speedrun_log(tmp_path / "records" / name / "old_logs" / "0.txt", 3.28, 133.0, SOURCE + "# older\n")
        (tmp_path / "records" / name / "README.md").write_text("a page\n")
    out = tool("audit", tmp_path)[1]
    assert "2 folders" in out and "records/r0:" in out and "records/r1:" in out and "same run" not in out


# ------------------------------------------------------------ comparing
def test_equal_runs_are_seldom_called_better_and_real_gains_mostly():
    """100 pairs of each; the gain is what judge itself says that it can find."""
    rng = np.random.default_rng(0)
    better = 0
    found = 0
    for n in (3, 5, 8, 12):
        effect = significance.detectable(0.004, n)
        for _ in range(25):
            a, b = rng.normal(1.35, 0.004, (2, n))
            better += judge(a, b, "val_bpb")["verdict"] == "better"
            found += judge(a, rng.normal(1.35, 0.004, n) - effect, "val_bpb")["verdict"] == "better"
    assert better <= 5 and found >= 80


def test_a_log_in_the_current_folder(monkeypatch):
    """Its own folder is not one below a record's."""
    monkeypatch.chdir(ROOT / "records/track_tiny/2026-11-21_Baseline")
    assert len(logs.load_runs(["train.log"])) == 1 and len(logs.load_runs(["."])) == 5


def test_too_few_runs_say_how_many_are_needed():
    rng = np.random.default_rng(1)
    verdict = judge(rng.normal(1.35, 0.004, 4), rng.normal(1.347, 0.004, 4), "val_bpb")["verdict"]
    more = int(re.search(r"about (\d+) more runs? per side", verdict)[1])
    assert verdict.startswith("cannot tell") and significance.detectable(0.004, 4 + more) < 0.004 * 2
    assert judge([1.0], [2.0], "val_bpb")["verdict"].startswith("cannot tell: each side needs")
    for std in (0.001, 0.04):       # detectable and needed are inverse
        for n in (3, 6, 14):
            assert significance.runs_needed(significance.detectable(std, n) * 1.0001, std) == n
    found = judge([1.35, 1.351, 1.352], [1.34, 1.342, 1.341], "val_bpb")
    assert found["interval"][0] < found["difference"] < found["interval"][1] < 0
    # higher CORE is better
    assert judge([0.25, 0.251, 0.249], [0.27, 0.271, 0.269], "core")["verdict"] == "better"
    assert significance.target_test([0.26, 0.262, 0.261], 0.256525, "core").p < 0.01


# A trainer that is quick: its score follows SEED and MATRIX_LR, or --matrix-lr
FAKE = """import os, pathlib, random, sys
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:])
seed = int(os.environ["SEED"])
assert {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & {*os.environ}, "not as ./run.sh starts a trainer"
lr = float(flags.get("matrix-lr") or os.environ.get("MATRIX_LR", 0.03))
bpb = 1.35 + 0.2 * (lr - 0.03) + random.Random(seed * 7 + int(lr * 1e6)).gauss(0, 0.0005)
folder = pathlib.Path("logs", os.environ["RUN_ID"])
folder.mkdir(parents=True)
steps = "".join(
    f"step:{s}/100 train_loss:{9 - s / 20 + bpb:.4f} train_time:{s * 1000}ms step_avg:1.00ms tok/s:2000\\n"
    for s in range(10, 101, 10))
(folder / "train.log").write_text("torch 2.13.0 numpy\\nhardware: 1 ranks\\n" + steps +
    f"step:100/100 val_loss:{bpb * 1.7:.4f} val_bpb:{bpb:.4f} train_time:100000ms step_avg:1.00ms\\n"
    f"final_int8_zlib_roundtrip_exact val_loss:{bpb * 1.7:.8f} val_bpb:{bpb:.8f}\\n")
"""


@pytest.fixture
def forked_programs(monkeypatch):
    """What the tools start with sys.executable is a fork of a process that has torch imported."""
    monkeypatch.setattr(sys, "executable", fork_server.start())


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A command that runs FAKE."""
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.chdir(tmp_path)
    return f"{sys.executable} -IS fake.py"


def test_compare_runs_both_sides_in_turn(tool, fake, tmp_path):
    code, out, _ = tool("compare", "--run", fake, f"MATRIX_LR=0.01 {fake}", "-n", 5, "--out", "curves.png")
    assert code == 0 and re.findall(r"\d+/10 ([AB]):", out) == list("ABBAABBAAB") and "verdict: better" in out
    assert "at equal time (100 s): train_loss" in out and "at equal tokens (200,000 tokens)" in out
    assert (tmp_path / "curves.png").stat().st_size > 5000
    logs = sorted((tmp_path / "logs").iterdir())        # the same of folders, one of another torch build
    a, b = (",".join(str(log) for log in logs if f"_{k}_seed" in log.name) for k in (0, 1))
    other = logs[-2] / "train.log"
    other.write_text(other.read_text().replace("torch 2.13.0", "torch 2.11.0"))
    out = tool("compare", a, b)[1]
    assert "warning: not the same torch: 2.11.0, 2.13.0" in out and "verdict: better" in out
    out = tool("compare", "--run", fake, fake, "-n", 3)[1]
    assert "verdict: better" not in out     # the same seeds give the same scores
    assert out.count("have the same losses: what differs between A and B does nothing") == 3


@pytest.mark.parametrize("words, sentence", [
    (("compare", "--run", "FAKE", "echo no such thing >&2; exit 3", "-n", 2), "ended with 3: no such thing"),
    (("compare", "--run", "FAKE", "true", "-n", 2), "must heed SEED and RUN_ID"),
    (("compare", "one"), "compare takes A and B"), (("compare", "nowhere", "either"), "is no file")])
def test_bad_questions_are_refused_before_anything_trains(
        tool, fake, forked_programs, tmp_path, words, sentence):
    code, _, err = tool(*(fake if word == "FAKE" else word for word in words))
    assert code == 2 and sentence in err and err.count("\n") == 1
    assert "FAKE" in words or not (tmp_path / "logs").exists()


@pytest.mark.parametrize("words", [
    ("stats", "logs"), ("plot", "logs/a"), ("compare", "logs/a", "logs/b"), ("try", "A=1"),
    ("compare", "--run", "FAKE", "FAKE", "-n", 2), ("board", "--html"), ("export", "a"),
    ("new", "--name", "x", "--blurb", "x", "logs/a"), ("check", "logs/a"),
    ("compare", "A", "B", "--out", "logs/x.png")])
def test_a_link_to_nowhere_is_named(tool, fake, tmp_path, words):
    """logs leads to a disk that is not mounted: no command trains, passes it over, or says `File exists`."""
    (tmp_path / "logs").symlink_to("/no/such/disk")
    for name, losses in (("A", LOSSES[:2]), ("B", EARLIER[2:4])):
        speedrun_logs(tmp_path / name, losses, TIMES[:2])
    code, _, err = tool(*(fake if word == "FAKE" else word for word in words))
    assert code == 2 and "logs is a link to /no/such/disk, where nothing is" in err and err.count("\n") == 1


# ------------------------------------------------------------ each seed counts once
# FAKE, whose log says with which seed it trained, as the trainer's does; --seed has precedence
SEEDED = FAKE.replace('"torch 2.13.0', 'f"config seed={seed}\\n" "torch 2.13.0').replace(
    'int(os.environ["SEED"])', 'int(flags.get("seed") or os.environ["SEED"])')
UNTOLD = FAKE.replace('int(os.environ["SEED"])', "5")      # one seed, of which the log says nothing
# The same without the scores to the eighth decimal: training losses show it
NO_SCORE = UNTOLD.replace("final_int8_zlib_roundtrip_exact", "other").replace(
    "{s * 1000}", "{s * 1000 + os.getpid()}")
TOLD = "its log says seed 5 where SEED=1337 was asked for"


@pytest.mark.parametrize("trainer, words, sentence", [
    (SEEDED, ("compare", "--run", "FAKE --seed=5", "FAKE", "-n", 5), TOLD),
    (SEEDED, ("compare", "--run", "FAKE --seed=1337", "SEED=5 FAKE", "-n", 2), TOLD),
    (UNTOLD, ("compare", "--run", "FAKE", "MATRIX_LR=0.01 FAKE", "-n", 3), "have the same losses"),
    (NO_SCORE, ("compare", "--run", "FAKE", "MATRIX_LR=0.01 FAKE", "-n", 3), "have the same losses")])
def test_a_command_that_fixes_its_seed_is_refused(tool, fake, tmp_path, trainer, words, sentence):
    (tmp_path / "fake.py").write_text(trainer)
    code, out, err = tool(*(str(word).replace("FAKE", fake) for word in words))
    assert code == 2 and sentence in err and err.count("\n") == 1 and "verdict" not in out
    assert len(list(tmp_path.glob("logs/*"))) <= 4      # it is refused as soon as it shows


def seeds_of(folder, seeds, losses, source="import torch\n"):
    """Logs of golf with these seeds and losses, each with a time of its own."""
    for i, (seed, loss) in enumerate(zip(seeds, losses)):
        golf_log(folder / f"run{i}.log", seed, loss, loss / 1.69, 15_000_000, source, 599_000 + i)
    return folder


AGAIN = {       # seeds, losses, what is said of them
    "one seed": ([5, 5, 6], [2.01, 2.02, 2.03], "run1.log and run0.log have the same seed, 5"),
    "one seed, to the bit": ([5, 5, 5], [2.01, 2.01, 2.01], "run1.log and run0.log have the same losses"),
    "other names for one run": ([5, 6, 7], [2.01, 2.02, 2.02], "run2.log and run1.log have the same losses")}


@pytest.mark.parametrize("command", ["stats", "compare"])
@pytest.mark.parametrize("case", AGAIN)
def test_logs_of_one_seed_are_refused(tool, tmp_path, command, case):
    seeds, losses, sentence = AGAIN[case]
    bad = seeds_of(tmp_path / "bad", seeds, losses)
    good = seeds_of(tmp_path / "good", [1, 2, 3], [2.1, 2.11, 2.12])
    code, out, err = tool(command, *[good, bad][command == "stats":])
    assert code == 2 and sentence in err and err.count("\n") == 1 and "n=3 mean 2.0" not in out
    assert tool("stats", good)[0] == 0


def test_one_seed_of_two_recipes_counts_twice(tool, tmp_path):
    """... and a run that is on both sides counts on neither."""
    for name, source in (("a", "import torch\n"), ("b", "import torch  # changed\n")):
        seeds_of(tmp_path / "all" / name, [1, 2], [2.1, 2.11] if name == "a" else [2.0, 2.01], source)
    code, out, _ = tool("stats", tmp_path / "all")
    assert code == 0 and "n=4 " in out
    code, _, err = tool("compare", tmp_path / "all/a", tmp_path / "all")
    assert code == 2 and "is on both sides" in err


def test_an_audit_finds_seeds_that_count_twice(tool, tmp_path):
    """The same seed and script again, and losses of another log without exact scores."""
    seeds_of(tmp_path / "r", [5, 5, 6], [2.01, 2.02, 2.03])
    assert "seed 5 is also that of run0.log, by the same script" in tool("audit", tmp_path)[1]
    for number in (1, 2):
        lines = "".join(f"step:{step}/9 train_loss:{5 - step / 3:.4f} train_time:{step * number}00ms\n"
                        for step in range(1, 10))
        (tmp_path / "s").mkdir(exist_ok=True)
        (tmp_path / "s" / f"x{number}.log").write_text(
            f"seed:{number}\n{lines}step:9/9 val_loss:2.5000 train_time:{number}900ms\n")
    assert "contradiction: x2.log: the losses are those of x1.log" in tool("audit", tmp_path)[1]
