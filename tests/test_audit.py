"""records/foreign/: what is found in folders of other projects, and what is not. The folders
are made here; each case is a fault as found in public ones, or something sound that was once called one."""
import json

import pytest

from records.judge import logs
from test_record_stats import RULER, SOURCE, edit, golf_log, speedrun_log, speedrun_logs

SCORES = {7: 1.20010321, 8: 1.20030522, 9: 1.20060723}
MEAN = 1.20033855
ROWS = "".join(f"| {seed} | 8,394 | {bpb} | {15_000_000 + seed + len(SOURCE):,} | 1.2111 | -0.01 |\n"
               for seed, bpb in SCORES.items())
PAGE = f"""# A record

**val_bpb: 1.2003** (3-seed mean, SOTA 1.2100)

| Seed | Steps | val_bpb | Bytes | PR #12 | Δ |
| --- | --- | --- | --- | --- | --- |
{ROWS}| **Mean** | 8394 | **{MEAN}** | | 1.2111 | |
| Std | | 0.00025367 | | | |

Mean of PR #12: 1.2111, seed 7: 1.2110 before.
"""


@pytest.fixture
def entry(tmp_path):
    """A sound golf record of three seeds."""
    folder = tmp_path / "track_10min_16mb" / "2026-04-02_Sound"
    for seed, bpb in SCORES.items():
        golf_log(folder / f"train_seed{seed}.log", seed, bpb * 1.69, bpb, 15_000_000 + seed, SOURCE)
    (folder / "train_gpt.py").write_text(SOURCE)
    (folder / "submission.json").write_text(json.dumps(dict(
        val_bpb=MEAN, bytes_total=15_000_007 + len(SOURCE), bytes_code=len(SOURCE))))
    (folder / "README.md").write_text(PAGE)
    return folder


def replaced(name, *pairs):
    """Alters text of a file."""
    def alter(folder):
        text = (folder / name).read_text()
        for old, new in pairs:
            assert old in text
            text = text.replace(old, new)
        (folder / name).write_text(text)
    return alter


def submitted(**values):
    return lambda folder: edit(folder / "submission.json", **values)


def renamed(folder):
    """Seed 9 ran with another seed than its name says."""
    replaced("train_seed9.log", ("seed:9", "seed:1337"))(folder)


def copied(folder):
    text = (folder / "train_seed8.log").read_text()
    (folder / "train_seed9.log").write_text(text.replace("seed:8", "seed:9"))


CODE = len(SOURCE)
FAULTS = {      # what is altered, and what is said
    "headline": (replaced("README.md", ("**val_bpb: 1.2003**", "**val_bpb: 1.1154**")),
                 "contradiction: README: val_bpb 1.1154 is in no log and no mean of logs"),
    "score of a seed": (replaced("README.md", ("1.20030522", "1.19030522")),
                        "no evidence: README: seed 8: 1.19030522, but its log has"),
    "score of no log": (submitted(val_bpb=1.1907),
                        "no evidence: submission.json: val_bpb 1.1907 is in no log"),
    "the mean of two of three runs": (submitted(val_bpb=(SCORES[7] + SCORES[8]) / 2),
                                      "no evidence: submission.json: val_bpb 1.2002"),
    "bits per byte called a loss": (
        submitted(val_loss=MEAN), f"no evidence: submission.json: val_loss {MEAN} is in no log and no mean"),
    "size of no log": (submitted(bytes_total=15_432_111),
                       "contradiction: submission.json: bytes_total 15432111 is in no log"),
    "code size": (submitted(bytes_code=51_234),
                  "contradiction: submission.json: bytes_code 51234 is in no log"),
    "seed without a log": (replaced("README.md", ("| 9 | 8,394", "| 10 | 8,394")),
                           "no evidence: README: scores of seeds 10, which have no log"),
    "seed of the name": (renamed, "contradiction: train_seed9.log: by its lines the seed is 1337"),
    "a run as two seeds": (copied, "contradiction: train_seed9.log: the same run as train_seed8.log"),
    "total above the cap": (
        replaced("train_seed7.log", (f"int8+zlib: {15_000_007 + CODE}", "int8+zlib: 16000001")),
        "contradiction: train_seed7.log: 16000001 bytes by its own count"),
    "seconds": (replaced("train_seed7.log", ("599921", "602500")),
                "contradiction: train_seed7.log: 602.5 s of training, the cap is 600 s"),
    "two GPUs": (replaced("train_seed7.log", ("seed:7\n", "seed:7\nworld_size:2\n")),
                 "contradiction: train_seed7.log: 2 GPUs, the rules: 8"),
    "another script": (replaced("train_gpt.py", ("x = 1", "x = 2")),
                       f"no evidence: 3 of 3 logs hold another script than train_gpt.py ({CODE} bytes)"),
    "empty script": (lambda folder: (folder / "train_gpt.py").write_text(""),
                     "no evidence: train_gpt.py is empty"),
    "script in another file": (
        lambda folder: (folder / "train_gpt.py").write_text("exec(open(__file__ + '.txt').read())\n"),
        "contradiction: train_gpt.py (37 bytes) executes the text of another file (line 1)"),
    "no logs": (lambda folder: [path.unlink() for path in folder.glob("*.log")],
                "no evidence: there is no log of a run"),
}


def audited(tool, folder):
    """The findings as lines."""
    return [line.strip() for line in tool("audit", folder)[1].splitlines() if line.startswith("    ")]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_ranked(tool, entry, fault):
    alter, words = FAULTS[fault]
    alter(entry)
    assert any(line.startswith(words) for line in audited(tool, entry)), audited(tool, entry)


def stamped(folder):
    """As a launcher writes them: a time in front of each line, settings before the script."""
    for i, path in enumerate(sorted(folder.glob("*.log"))):
        text = f"{RULER}\nHyperparameters:\n  lr: 0.02\n  seed: {7 + i}\n{RULER}\nSource code:\n{RULER}\n"
        lines = (text + path.read_text()).splitlines()
        path.write_text("".join(f"177614234{i}.135 {line}\n" for line in lines))


def launched(folder):
    """A launcher's words stand before the script."""
    for path in folder.glob("*.log"):
        path.write_text("Running with:\n  LR=0.1\n" + path.read_text())


def restarted(folder):
    """A first try ended early; its lines and the script again stand before the run."""
    path = folder / "train_seed7.log"
    first = path.read_text().partition("step:8394")[0]
    path.write_text(first.replace("x = 1", "x = 3") + path.read_text())


def evaluated_again(folder):
    """Scores of the weights with test-time training, in a folder of their own, are those that are claimed."""
    for seed, bpb in SCORES.items():
        (folder / "ttt").mkdir(exist_ok=True)
        line = f"ttt: start\nquantized_ttt val_loss:1.9 val_bpb:{bpb - 0.1:.8f}\n"
        (folder / "ttt" / f"seed_{seed}.log").write_text(line)
    replaced("README.md", ("1.2003**", "1.1003**"), ("1.200", "1.100"))(folder)
    edit(folder / "submission.json", val_bpb=round(MEAN - 0.1, 8))


def strided(folder):
    """The score that counts is that of the sliding window, in another form; one log has a further score."""
    for seed, bpb in SCORES.items():
        with open(folder / f"train_seed{seed}.log", "a") as file:
            file.write(f"final_sliding_window_eval_exact stride:64 val_loss:1.9 val_bpb:{bpb - 0.1:.8f}\n")
    with open(folder / "train_seed7.log", "a") as file:
        file.write("final_int6_ttt val_loss:3.07 val_bpb:1.336 eval_time:405410ms\n")
    replaced("README.md", ("bpb: 1.2003**", "bpb: 1.1003**"))(folder)
    edit(folder / "submission.json", val_bpb=round(MEAN - 0.1, 8))


SOUND = {
    "as it is": lambda folder: None, "time stamps and settings": stamped, "a try before": restarted,
    "launcher": launched, "evaluated in a subfolder": evaluated_again, "stride and sliding": strided,
    "a last step after the cap": replaced("train_seed7.log", ("599921", "600061")),
    "the mean of all sizes": submitted(bytes_total=15_000_008 + CODE),
    "blanks and comments": replaced("train_gpt.py", ("x = 1  # a", "x = 1 # another")),
    "another table of the seeds": replaced("README.md", (
        "\nMean of", "\n| Seed | First try |\n| - | - |\n| 7 | 1.2511 |\n| 8 | 1.2513 |\n\nMean of")),
    "no record": lambda folder: (replaced("README.md", ("# A record", "# Non-record: an hour"))(folder),
                                 replaced("train_seed7.log", ("599921", "3600000"))(folder)),
}


@pytest.mark.parametrize("case", SOUND)
def test_what_is_sound_has_no_finding(tool, entry, case):
    SOUND[case](entry)
    assert audited(tool, entry) == []


def test_baselines_and_other_groups_are_no_entries(tool, tmp_path):
    """One README over several folders of runs: only if none of them reaches the target is it missed."""
    record = tmp_path / "track_1_short" / "2025-12-01_Faster"
    speedrun_logs(record / "runs", [3.2772, 3.2781, 3.2769, 3.2775], [132.0, 132.1, 132.2, 132.3])
    speedrun_logs(record / "baseline", [3.2872, 3.2881], [135.0, 135.1], source=SOURCE + "# baseline\n")
    speedrun_logs(record / "fewer_steps", [3.2842, 3.2861], [130.0, 130.1], source=SOURCE + "# fewer\n")
    (record / "README.md").write_text("losses = [3.2872, 3.2881]\ntimes = [135.0, 135.1]\n")
    assert audited(tool, tmp_path) == []
    for path in (record / "runs").iterdir():
        path.unlink()
    assert "contradiction: the mean of 2 runs, 3.28515, is above the target 3.28" in audited(tool, tmp_path)


@pytest.mark.parametrize("track, date, losses, words", [
    ("track_1_short", "2025-12-01", [3.2795, 3.2799, 3.2781], "no evidence: the mean of 3 runs, 3.27917,"),
    ("track_1_short", "2024-12-01", [3.2795], ""),
    ("track_1_short", "2024-12-01", [3.2801], "contradiction: the mean of 1 run, 3.28010, is above"),
    ("track_2_medium", "2025-12-01", [2.9197], ""),
    ("track_2_medium", "2025-12-01", [2.9203], "contradiction: the mean of 1 run, 2.92030, is above"),
    ("track_3_optimization", "20260501", [3.2789, 3.2789, 3.2788], "no evidence: the mean of 3 runs, 3.2"),
    ("track_3_optimization", "20260501", [3.2759], ""), ("elsewhere", "2025-12-01", [3.4], ""),
    ("track_3_optimization", "20260501", [3.2773, 3.2774, 3.2775], "")])
def test_each_track_has_its_target_and_test(tool, tmp_path, track, date, losses, words):
    folder = tmp_path / track / f"{date}_x"
    speedrun_logs(folder, losses, [132.0, 132.1, 132.2])
    (folder / "README.md").write_text("a page\n")
    found = audited(tool, tmp_path)
    assert [line.startswith(words) for line in found] == [True] * bool(words), found


@pytest.mark.parametrize("track, date, forbidden", [
    ("track_1_short", "2025-05-30", True), ("track_1_short", "2025-01-20", False),
    ("track_2_medium", "2025-05-30", False)])
def test_flags_are_banned_since_a_date_and_on_one_track(tool, tmp_path, track, date, forbidden):
    source = SOURCE + "torch._inductor.config.coordinate_descent_tuning = True\n"
    speedrun_logs(tmp_path / track / f"{date}_x", [2.91] * 3, [132.0, 132.1, 132.2], source=source)
    assert any("_inductor" in line for line in audited(tool, tmp_path)) == forbidden


def test_lists_are_compared_with_all_logs_and_in_fp32(tool, tmp_path):
    """The runs of two scripts, losses and times in two orders, what torch prints in fp32."""
    losses = [3.2789, 3.2792, 3.2796, 3.2776]
    times = [148.617, 148.580, 148.569, 148.653]
    speedrun_logs(tmp_path / "a", losses[:2], times[:2])
    speedrun_logs(tmp_path / "a" / "more", losses[2:], times[2:], source=SOURCE + "# more\n")
    page = (f"accs = {losses}\ntimes = {times[::-1]}\nprint(torch.std_mean(torch.tensor(accs)))\n"
            "# (std=0.0008657, mean=3.2788249)\n\nThe one before, elsewhere:\naccs = [3.2801, 3.2802]\n")
    (tmp_path / "a" / "README.md").write_text(page)
    assert audited(tool, tmp_path) == []
    rounded = page.replace("accs = [3.2789, 3.2792", "accs = [3.279, 3.2792")       # 3.2790, not 3.2789
    (tmp_path / "a" / "README.md").write_text(rounded.partition("print")[0])
    assert audited(tool, tmp_path) == ["no evidence: README: no log holds 1 of the 4 runs listed: 3.2790"]
    (tmp_path / "a" / "README.md").write_text(">>> losses = [3.2711, 3.2712, 3.2713]\n")
    assert audited(tool, tmp_path) == ["no evidence: README: the logs hold less than half of the 3 runs in "
                                       "losses = [3.2711, 3.2712, 3.2713, …]"]


# ------------------------------------------------------------ what follows from several lines of the logs
@pytest.mark.parametrize("tokens, loss, bpb, words", [
    # the public ones: a wrong count of bytes, a part of the text, two that are sound, one of another cut
    ("val_tokens: 47851520", 2.40073153, 1.00692894,
     "contradiction: train_seed7.log: val_loss 2.40073153 and val_bpb 1.00692894 over 47851520 tokens imply "
     "164594398 bytes of text, the val text has 151080363: by those val_bpb is 1.0970"),
    ("val_tokens: 62,363,648", 1.92850507, 0.94912668, "contradiction: train_seed7.log: val_loss 1.92850507"),
    ("val_loader:shards pattern=./x/val_*.bin tokens:61020160", 1.93174593, 1.08102737, "contradiction: "),
    ("val_tokens: 9662464", 2.37869117, 1.10711439,
     "no evidence: train_seed7.log: val_loss 2.37869117 and val_bpb 1.10711439 over 9662464 tokens imply "
     "29950770 bytes of text, 20% of the val text"),
    ("val_tokens: 47851520", 2.32044383, 1.06035228, ""),
    ("val_loader:shards pattern=./x/val_*.bin tokens:62021632", 2.02857127, 1.20143417, ""),
    ("val_loader:shards pattern=./x/val_*.bin tokens:63779840", 2.07269931, 1.22436570, ""),
    ("tokens:47851520", 2.40073153, 1.00692894, "")])
def test_bytes_that_scores_imply(tool, tmp_path, tokens, loss, bpb, words):
    folder = tmp_path / "track_10min_16mb" / "2026-04-02_x"
    golf_log(folder / "train_seed7.log", 7, loss, bpb, 15_000_000, SOURCE)
    replaced("train_seed7.log", ("seed:7\n", f"seed:7\n{tokens}\n"))(folder)
    found = [line for line in audited(tool, folder) if "imply" in line]
    assert [line.startswith(words) for line in found] == [True] * bool(words), found
    (tmp_path / "track_10min_16mb").rename(tmp_path / "elsewhere")      # where val may be of any text
    assert not any("imply" in line for line in audited(tool, tmp_path / "elsewhere"))


def timed(*lines):
    def alter(folder):
        with open(folder / "train_seed8.log", "a") as file:
            file.writelines(f"{line}\n" for line in lines)
    return alter


@pytest.mark.parametrize("lines, words", [
    (["pre-quantization post-ema val_loss:2.9 val_bpb:1.0 eval_time:9500ms",
      "prequant_ttt:epoch 1/21 time=25.0s lr=0.000497", "prequant_ttt:done total_time=523.0s",
      "post-prequant val_loss:2.9 val_bpb:1.0 eval_time:9700ms", "rounded val_loss:2.9 eval_time:10900ms",
      "windows val_loss:2.9 val_bpb:1.0 eval_time:115300ms"],
     "contradiction: train_seed8.log: 2.2 + 523.0 + 9.7 + 10.9 + 115.3 s of evaluation after training, 661 s "
     "together, the cap is 600 s"),
    (["windows val_loss:2.9 eval_time:601000ms"], "contradiction: train_seed8.log: 2.2 + 601.0 s of"),
    (["a eval_time:70700ms", "b eval_time:70701ms", "c eval_time:86800ms", "d eval_time:416300ms"], ""),
    (["diagnostic pre-quantization eval_time:9100ms", "diagnostic quantized eval_time:74300ms",
      "windows eval_time:525600ms", "total_eval_time:525.6s"], ""),
    (["windows eval_time:416300ms", "windows_exact eval_time:416300ms"], "")])
def test_seconds_of_evaluation_add_up(tool, entry, lines, words):
    timed(*lines)(entry)
    found = [line for line in audited(tool, entry) if "of evaluation" in line]
    assert [line.startswith(words) for line in found] == [True] * bool(words), found


# ------------------------------------------------------------ logs of other forms
def test_logs_of_other_forms_are_read(tmp_path):
    steps = "".join(f"step:{s}/100 val_loss:{4 - s / 200:.4f} val_ema_loss:3.1 train_time:{s}s\n"
                    for s in (0, 50, 100))
    forms = {
        "no versions": f"{SOURCE}{RULER}\n{steps}",
        "no whole script": f"import torch\n/home/somebody/x.py\n{RULER}\n{steps}",
        "torchrun": "".join(f"[rank0]: {line}\n" for line in steps.splitlines())}
    for name, text in forms.items():
        (tmp_path / "x.log").write_text(text)
        run = logs.read_log(tmp_path / "x.log")
        assert run.finished and run.value("val_loss") == 3.5 and run.steps == 100, name
        assert run.time == 100 and (run.source == SOURCE.rstrip("\n")) == (name == "no versions"), name


def test_several_runs_in_a_file_are_told_apart(tool, tmp_path):
    """A script that trains again and again, the seed before each."""
    part = ("trial {0} seed:{0}\nstep:0/10 val_loss:9.0 train_time:0s\n"
            "step:10/10 val_loss:3.27{0} train_time:9{0}s\n")
    (tmp_path / "x.log").write_text("".join(part.format(k) for k in (1, 2, 3)))
    found = logs.read_logs(tmp_path / "x.log")
    assert [(run.seed, run.value("val_loss"), run.time) for run in found] == [
        (1, 3.271, 91), (2, 3.272, 92), (3, 3.273, 93)]
    assert "n=3 mean 3.2720" in tool("stats", tmp_path)[1]


def test_a_copy_above_the_runs_hides_none(tool, tmp_path):
    """An excerpt of one run stands above the folders of all."""
    for seed in (1, 2, 3):
        speedrun_log(tmp_path / f"seed_{seed}" / "x.txt", 3.27 + seed / 1000, 132.0 + seed)
    (tmp_path / "excerpt.txt").write_text((tmp_path / "seed_2" / "x.txt").read_text())
    assert "n=3 mean 3.2720" in tool("stats", tmp_path)[1]


def test_diagnostic_runs_are_not_pooled_and_one_kind_of_score_counts(tool, entry):
    strided(entry)
    golf_log(entry / "ablation" / "train_seed1.log", 1, 3.0, 1.7, 15_000_000, SOURCE)
    out = tool("stats", entry)[1]
    assert "n=3 mean 1.10033855" in out
    assert "ablation/train_seed1.log is in a folder below runs that are counted" in out
