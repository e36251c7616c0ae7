"""records/: foreign logs as they are, statistics, audits, comparisons. The logs are made here."""

import json
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from helpers import ROOT

import folders
import runs

RULER = "=" * 100
GPUS = "\n".join(
    f"|   {i}  NVIDIA H100 80GB HBM3          On  |   00000000:{i}9:00.0 Off |" for i in range(8)
)
# A script that is full of what a careless parser takes for results
SOURCE = (
    '''import torch
DOC = """
step:2160/2160 val_loss:1.0000 train_time:1ms step_avg:0.01ms
final_int8_zlib_roundtrip_exact val_loss:0.50000000 val_bpb:0.30000000
Running PyTorch 0.0.1
'''
    + RULER
    + '''
"""
def log(step, train_steps, val_loss):
    print(f"step:{step}/{train_steps} val_loss:{val_loss:.4f} train_time:{0:.0f}ms step_avg:{0:.2f}ms")
'''
    + "x = 1  # a long script\n" * 1500
)


def speedrun_log(path, loss, seconds, source=SOURCE, every=250, total=2160, cut=False):
    """A log as modded-nanogpt writes them."""
    lines = [
        source,
        RULER,
        "Running Python 3.10.12 (main, Aug 15 2025)",
        "Running PyTorch 2.10.0.dev20250926+cu126",
        "Sun Nov 30 01:53:49 2025",
        GPUS,
        RULER,
    ]
    for step in range(total + 1):
        ms = seconds * 1e3 * step / total
        if step % every == 0 or step == total:
            value = loss + 7.5 * (1 - step / total) ** 2
            if not (cut and step == total):
                lines.append(
                    f"step:{step}/{total} val_loss:{value:.4f} train_time:{ms:.0f}ms step_avg:{1:.2f}ms"
                )
        if step < total:
            lines.append(
                f"step:{step + 1}/{total} train_time:{seconds * 1e3 * (step + 1) / total:.0f}ms "
                "step_avg:61.00ms"
            )
    if not cut:
        lines.append("peak memory allocated: 29892 MiB reserved: 44736 MiB")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def golf_log(path, seed, loss, bpb, model, source, code, ms=599_921):
    """A log as parameter-golf writes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "\n".join(
            [
                source,
                RULER,
                "Running Python 3.12.3",
                "Running PyTorch 2.8.0+cu128",
                GPUS,
                RULER,
                f"seed:{seed}",
                "step:0/20000 val_loss:6.9373 val_bpb:4.1086 train_time:0ms step_avg:0.01ms",
                "step:1/20000 train_loss:6.9374 train_time:37ms step_avg:36.55ms",
                "step:5000/20000 train_loss:2.1377 train_time:323094ms step_avg:64.62ms",
                f"step:8394/20000 val_loss:{loss - 0.0059:.4f} val_bpb:{bpb - 0.0034:.4f} train_time:{ms}ms "
                "step_avg:71.47ms",
                f"stopping_early: wallclock_cap train_time:{ms}ms step:8394/20000",
                "peak memory allocated: 7748 MiB reserved: 8070 MiB",
                "Serialized model: 67224983 bytes",
                f"Code size: {code} bytes",
                f"Total submission size: {67224983 + code} bytes",
                f"Serialized model int8+zlib: {model} bytes (payload:17178912 payload_ratio:3.91x)",
                f"Total submission size int8+zlib: {model + code} bytes",
                f"final_int8_zlib_roundtrip val_loss:{loss:.4f} val_bpb:{bpb:.4f} eval_time:2235ms",
                f"final_int8_zlib_roundtrip_exact val_loss:{loss:.8f} val_bpb:{bpb:.8f}",
            ]
        )
        + "\n"
    )


LOSSES = [3.2772, 3.2781, 3.2780, 3.2784, 3.2773, 3.2806, 3.2799, 3.2765]
TIMES = [132.259, 132.152, 132.194, 132.179, 132.249, 132.190, 132.217, 132.275]
EARLIER = [3.2772, 3.2772, 3.2761, 3.2788, 3.2795, 3.2808, 3.2783, 3.2795, 3.2767, 3.2794]
EARLIER_TIMES = [132.754, 132.869, 132.706, 132.803, 132.627, 132.642, 132.683, 132.654, 132.913, 132.706]
GOLF = {1337: (2.02857127, 1.20143417), 1338: (2.02522281, 1.19945102), 1339: (2.03154510, 1.20319508)}


@pytest.fixture(scope="module")
def speedrun(tmp_path_factory):
    """The public record: nine logs of its script, ten of an earlier one, the page with its slips."""
    folder = tmp_path_factory.mktemp("speedrun") / "track_1_short" / "2025-11-29_BatchSizeSchedule"
    logs = [(3.2777, TIMES[0]), *zip(LOSSES[1:], TIMES[1:]), (3.2768, 132.286)]
    for i, (loss, seconds) in enumerate(logs):
        speedrun_log(folder / f"{i:08x}-run.txt", loss, seconds)
    for i, (loss, seconds) in enumerate(zip(EARLIER, EARLIER_TIMES)):
        speedrun_log(
            folder / "old" / f"{i:08x}-earlier.txt", loss, seconds, SOURCE + "# an earlier version\n"
        )
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
times = [134.069, 134.013, 134.044]
print("time:", torch.std_mean(torch.tensor(times)))
# time: (std=0.00281, mean=134.042)
```
""")
    return folder


@pytest.fixture(scope="module")
def golf(tmp_path_factory):
    """The public golf record: one log with another script of 47,642 bytes, t printed as 9.06."""
    folder = tmp_path_factory.mktemp("golf") / "track_10min_16mb" / "2026-03-19_TrainingOptSeq4096"
    comment = "# a comment of sixty characters to fill the script with text\n"
    script = (SOURCE + comment * 500)[:47_758] + "\n"
    other = (SOURCE.replace("x = 1", "x = 2", 1) + comment * 500)[:47_641] + "\n"
    models = {1337: 15_820_684, 1338: 15_835_395, 1339: 15_830_000}
    for seed, (loss, bpb) in GOLF.items():
        name = "train.log" if seed == 1337 else f"train_seed{seed}.log"
        source, code = (other, 47_642) if seed == 1337 else (script, 47_759)
        golf_log(folder / name, seed, loss, bpb, models[seed], source, code)
    (folder / "train_gpt.py").write_text(script)
    (folder / "submission.json").write_text(
        json.dumps(
            {
                "author": "somebody",
                "github_id": "somebody",
                "name": "Seq4096",
                "blurb": "",
                "date": "2026-03-19",
                "val_loss": 2.02857127,
                "val_bpb": 1.20143417,
                "bytes_total": 15_868_326,
                "bytes_code": 47_759,
            }
        )
    )
    (folder / "README.md").write_text(
        "".join(f"- `SEED={seed}`: `{bpb}`\n" for seed, (_, bpb) in GOLF.items())
        + """
Sample standard deviation: `0.00187`. Against `1.21113611`: `t=9.06` with `df=2`, `p=0.006`
"""
    )
    return folder


# ------------------------------------------------------------ stats
def test_stats_of_the_speedrun(tool, tmp_path):
    for i, (loss, seconds) in enumerate(zip(LOSSES, TIMES)):
        speedrun_log(tmp_path / "a" / f"{i}.txt", loss, seconds)
    code, out, _ = tool("stats", tmp_path, "--target", 3.28)
    assert code == 0 and "n=8 mean 3.2782 std 0.0014" in out and "p=0.0045" in out
    assert "n=8 mean 132.2144 std 0.0431" in out


def test_stats_of_the_earlier_version(tool, tmp_path):
    """Ten runs in nested folders, some with validation every 5 steps, one more cut off."""
    for i, (loss, seconds) in enumerate(zip(EARLIER, EARLIER_TIMES)):
        speedrun_log(tmp_path / f"{i}" / "deep" / "x.log", loss, seconds, every=5 if i < 2 else 250)
    speedrun_log(tmp_path / "cut.txt", 1.0, 132.0, cut=True)
    (tmp_path / "inside.txt").write_text(SOURCE[:300])  # cut off within its own source
    code, out, _ = tool("stats", tmp_path, "--target", 3.28)
    assert code == 0 and "p=0.0035" in out and "n=10 mean 3.2784 std 0.0015" in out
    assert "n=10 mean 132.7357 std 0.0977" in out
    assert "cut.txt was cut off at step 2160" in out and "inside.txt has no validation" in out


def test_stats_of_golf(tool, golf):
    code, out, _ = tool("stats", golf, "--target", 1.21113611)
    assert code == 0 and "t=9.04 df=2 p=0.0060" in out
    assert "n=3 mean 1.20136009 std 0.00187" in out and "2 different scripts" in out


def test_stats_as_json_and_by_metric(tool, golf):
    code, out, err = tool("stats", golf, "--metric", "val_loss", "--json", "--target", "2.04")
    found = json.loads(out)
    assert code == 0 and found["metric"] == "val_loss" and found["n"] == 3
    assert found["mean"] == pytest.approx(np.mean([loss for loss, _ in GOLF.values()]))
    assert found["test"]["p"] == pytest.approx(0.0120, abs=5e-5) and found["time"]["mean"] == pytest.approx(
        599.921
    )


def test_stats_with_a_baseline(tool, tmp_path):
    for side, times in (("new", TIMES[:4]), ("old", [134.069, 134.013, 134.044])):
        for i, seconds in enumerate(times):
            speedrun_log(tmp_path / side / f"{i}.txt", 3.278 + i * 1e-4, seconds)
    code, out, _ = tool("stats", tmp_path / "new", "--baseline", tmp_path / "old")
    assert code == 0 and "Welch: t=" in out
    assert f"time ratio: {np.mean(TIMES[:4]) / np.mean([134.069, 134.013, 134.044]):.4f}" in out


def test_a_log_is_read_past_its_misleading_source(speedrun, golf):
    run = runs.read_log(speedrun / "00000000-run.txt")
    assert run.value("val_loss") == 3.2777 and run.time == 132.259 and run.steps == 2160
    assert (
        run.said["torch"] == "2.10.0.dev20250926+cu126" and run.said["hardware"] == "8x NVIDIA H100 80GB HBM3"
    )
    assert run.source == SOURCE
    run = runs.read_log(golf / "train.log")
    assert run.value("val_bpb") == 1.20143417 and run.seed == 1337
    assert run.said["bytes_model"] == 15_820_684 and len(run.source) == 47_642


def test_a_run_that_is_there_twice_counts_once(tool, tmp_path):
    for name in ("a.txt", "copy.txt"):
        speedrun_log(tmp_path / name, 3.278, 132.0)
    speedrun_log(tmp_path / "b.txt", 3.279, 132.1)
    code, out, _ = tool("stats", tmp_path)
    assert code == 0 and "n=2" in out and "copy.txt is the same run as a.txt" in out


# ------------------------------------------------------------ audit
def test_audit_of_the_speedrun_record(tool, speedrun):
    code, out, _ = tool("audit", speedrun.parent)
    assert code == 1
    assert "3.2772 on the page (time 132.259), 3.2777 in 132.259 s in 00000000-run.txt" in out
    assert "finished run 9 of the same script is not there: 00000008-run.txt, 3.2768 in 132.286 s" in out
    assert "std 0.00281 on the page, its times give 0.0281" in out
    assert len([line for line in out.splitlines() if line.startswith("    ")]) == 4  # and that scripts differ


def test_audit_of_the_golf_record(tool, golf):
    code, out, _ = tool("audit", golf.parent)
    assert code == 1
    assert "train.log: its source (47642 bytes) differs from train_gpt.py (47759 bytes)" in out
    assert "bytes_total 15868326 is model 15820684 and 47642 of code, but train_gpt.py has 47759 bytes" in out
    assert "t=9.06 on the page, the logs give t=9.04 df=2 p=0.0060" in out
    assert len([line for line in out.splitlines() if line.startswith("    ")]) == 3


def test_audit_of_a_clean_folder_finds_nothing(tool, tmp_path):
    for i, (loss, seconds) in enumerate(zip(LOSSES, TIMES)):
        speedrun_log(tmp_path / "clean" / f"{i}.txt", loss, seconds)
    (tmp_path / "clean" / "README.md").write_text(f"losses = {LOSSES}\ntimes = {TIMES}\n")
    code, out, _ = tool("audit", tmp_path)
    assert code == 0 and "no findings" in out


def test_audit_names_packed_scripts_missing_files_and_wrong_seeds(tool, tmp_path):
    source = "import lzma, base64\nexec(lzma.decompress(base64.b85decode('" + "A" * 3000 + "')))\n"
    golf_log(tmp_path / "packed" / "train.log", 42, 1.9, 1.1, 15_000_000, source, len(source))
    (tmp_path / "packed" / "train_gpt.py").write_text(source)
    (tmp_path / "packed" / "README.md").write_text("| seed | bpb |\n| 42 | 1.0900 |\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "submission.json").write_text("{}")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "submission.json").write_text('{"val_bpb": 1.')
    speedrun_log(tmp_path / "cut" / "x.txt", 3.2, 132.0, cut=True)
    code, out, _ = tool("audit", tmp_path)
    assert code == 1 and "train_gpt.py is packed" in out and "1.0900 on the page for seed 42" in out
    assert "holds no log of a run" in out and "submission.json is no JSON" in out
    assert "x.txt was cut off at step 2160" in out and "README.md: there is none" in out


def test_check_of_a_foreign_folder_says_what_it_cannot_know(tool, golf):
    code, out, _ = tool("check", golf)
    assert code == 1 and re.search(r"n/a +data", out) and re.search(r"n/a +README", out)
    assert re.search(r"FAIL +one script", out) and re.search(r"pass +time cap", out)


# ------------------------------------------------------------ garbage
@pytest.mark.parametrize("command", ["stats", "check", "audit", "plot"])
@pytest.mark.parametrize("kind", ["empty", "binary", "json", "nothing", "huge", "many", "absent"])
def test_garbage_is_refused_in_one_sentence(tool, tmp_path, command, kind):
    folder = tmp_path / "x"
    folder.mkdir()
    if kind == "empty":
        (folder / "train.log").write_text("")
    elif kind == "binary":
        (folder / "train.log").write_bytes(os.urandom(5000) + b"\0")
    elif kind == "json":
        (folder / "submission.json").write_text('{"rules_version": 1, "tra')
    elif kind == "huge":
        with open(folder / "train.log", "wb") as file:
            file.truncate(500 << 20)
    elif kind == "many":
        for i in range(10_000):
            (folder / f"{i}.log").touch()
    path = folder / "absent" if kind == "absent" else folder
    code, out, err = tool(command, path, *(["--out", str(tmp_path / "p.png")] if command == "plot" else []))
    if command == "audit" and kind == "json":
        assert code == 1 and out.count("\n") == 3  # the folder, the finding, the sum
    else:
        assert code == 2 and err.count("\n") == 1 and err.startswith("record: ")


def test_memory_stays_under_500_mb(tmp_path):
    """A log of 63 MB, just within the limit."""
    speedrun_log(tmp_path / "big.txt", 3.27, 132.0)
    text = (tmp_path / "big.txt").read_text()
    filler = "step:1/2160 train_time:61ms step_avg:61.00ms\n" * ((63 << 20) // 45 - len(text) // 45)
    top, last, end = text.rpartition("step:2160/2160 val_loss")
    (tmp_path / "big.txt").write_text(top + filler + last + end)
    script = (
        f"import runpy, sys; sys.argv[1:] = ['stats', {str(tmp_path)!r}]\n"
        f"try: runpy.run_path({str(ROOT / 'records' / 'record.py')!r}, run_name='__main__')\n"
        "except SystemExit as end:\n    status = open('/proc/self/status').read()\n"
        "    print(end.code, int(status.split('VmHWM:')[1].split()[0]) >> 10)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    code, megabytes = done.stdout.splitlines()[-1].split()
    assert code == "0" and int(megabytes) < 500


@pytest.mark.parametrize("kind", ["rules", "symlink", "pipe", "deep", "number", "types"])
def test_odd_folders_do_not_end_an_audit(tool, tmp_path, kind):
    odd = tmp_path / "a_odd"
    speedrun_log(tmp_path / "b_good" / "0.txt", 3.27, 132.0)
    speedrun_log(odd / "0.txt", 3.27, 132.0)
    if kind == "rules":
        (odd / "submission.json").write_text('{"rules_version": [1], "track": {}}')
    elif kind == "symlink":
        (odd / "loop.log").symlink_to(odd / "loop.log")
    elif kind == "pipe":
        os.mkfifo(odd / "x.log")
    elif kind == "deep":
        (odd / "submission.json").write_text("[" * 100_000)
    elif kind == "number":
        (odd / "1.txt").write_text((odd / "0.txt").read_text().replace("val_loss:3.2700", "val_loss:3.2.7"))
    else:
        (odd / "submission.json").write_text('{"val_bpb": {"x": []}, "bytes_total": "y", "val_loss": [1]}')
    code, out, _ = tool("audit", tmp_path)
    assert code == 1 and "b_good" in out and "2 folders" in out


def test_an_audit_tells_records_from_the_folders_around_them(tool, tmp_path):
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / "README.md").write_text("# the game\n")
    for name in ("r0", "r1"):
        speedrun_log(tmp_path / "records" / name / "0.txt", 3.27, 132.0)
        speedrun_log(tmp_path / "records" / name / "old_logs" / "0.txt", 3.28, 133.0, SOURCE + "# older\n")
        (tmp_path / "records" / name / "README.md").write_text("a page\n")
    code, out, _ = tool("audit", tmp_path)
    assert "2 folders" in out and "records/r0:" in out and "records/r1:" in out and "same run" not in out


def test_audit_names_the_best_seed_wrong_means_and_wrong_p(tool, golf, tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    for path in golf.iterdir():
        (folder / path.name).write_text(path.read_text())
    submission = json.loads((folder / "submission.json").read_text()) | {"val_bpb": 1.19945102}
    (folder / "submission.json").write_text(json.dumps(submission))
    page = (folder / "README.md").read_text().replace("p=0.006", "p=0.0006")
    (folder / "README.md").write_text(page + "The mean of three runs is `1.19936009`.\n")
    code, out, _ = tool("audit", tmp_path)
    assert "val_bpb 1.19945102 is the best of 3 runs, their mean is 1.20136009" in out
    assert "p=0.0006 on the page, the logs give p=0.0060" in out and "mean 1.19936009 on the page" in out


# ------------------------------------------------------------ logs that are not whole
@pytest.mark.parametrize("cut", ["val_loss:3.", "val_loss:3.2772 train_time:132", "step:2160/2160 val"])
def test_a_log_cut_within_a_line_is_cut_off(tool, tmp_path, cut):
    speedrun_log(tmp_path / "a.txt", 3.2772, 132.0)
    speedrun_log(tmp_path / "b.txt", 3.2781, 132.1)
    text = (tmp_path / "a.txt").read_text()
    (tmp_path / "a.txt").write_text(text[: text.rindex(cut) + len(cut)])
    code, out, _ = tool("stats", tmp_path)
    assert code == 0 and "n=1 mean 3.2781" in out and "a.txt was cut off" in out


def test_a_cut_golf_log_does_not_change_the_metric(tool, golf, tmp_path):
    for path in golf.glob("*.log"):
        (tmp_path / path.name).write_text(path.read_text())
    for ending in ("final_int8_zlib_roundtrip val", "Serialized model", "val_bpb:1.201"):
        text = (golf / "train.log").read_text()
        at = text.rindex(ending)
        (tmp_path / "train.log").write_text(text[: at + len(ending)])
        code, out, _ = tool("stats", tmp_path)
        assert code == 0 and "val_bpb: n=2 " in out and "train.log was cut off before its final score" in out
    (tmp_path / "train.log").write_text(text.replace("_exact val_loss:2.02857127", "_exact val_loss:nan"))
    assert "train.log ended with a loss of nan" in tool("stats", tmp_path)[1]


def test_a_log_without_a_last_line_end_is_whole(tool, golf, tmp_path):
    for path in golf.glob("*.log"):
        (tmp_path / path.name).write_text(path.read_text().rstrip("\n"))
    assert "t=9.04 df=2 p=0.0060" in tool("stats", tmp_path, "--target", 1.21113611)[1]


def test_two_runs_in_one_file_and_other_line_ends(tool, tmp_path):
    speedrun_log(tmp_path / "a.txt", 3.2772, 132.0)
    text = (tmp_path / "a.txt").read_text()
    (tmp_path / "a.txt").write_text(text + text.replace("3.2772", "3.2779"))
    speedrun_log(tmp_path / "b.txt", 3.2781, 132.1)
    (tmp_path / "b.txt").write_bytes((tmp_path / "b.txt").read_bytes().replace(b"\n", b"\r\n"))
    code, out, _ = tool("stats", tmp_path)
    assert code == 0 and "n=1 mean 3.2781" in out and "a.txt holds more than one run" in out


def test_newer_golf_logs(tool, tmp_path):
    """Settings before the ruler, blanks after colons, minutes, validation lines without a time."""
    (tmp_path / "train.log").write_text(
        f"Hyperparameters:\n  lr: 1\n{RULER}\nRunning Python 3.12\nRunning PyTorch 2.9.1\n{RULER}\n"
        "1/20000 train_loss: 9.0 train_time: 0.0m tok/s: 8000000\n"
        "4500/20000 train_loss: 2.4 train_time: 8.9m tok/s: 6000000\n"
        "4902/20000 val_loss: 2.3544 val_bpb: 1.0758\n"
        "stopping_early: wallclock_cap train_time: 595546ms step: 4902/20000\n"
        "quantized_sliding_window val_loss:2.37 val_bpb:1.0829 eval_time:90000ms\n"
        "quantized_ttt val_loss:2.36000000 val_bpb:1.08100000 eval_time:370000ms\n"
    )
    run = runs.read_log(tmp_path / "train.log")
    assert run.source is None and run.time == 595.546 and run.finished and run.value("val_bpb") == 1.081
    assert run.curves["val"][0][:3] == (4902, pytest.approx(534), 2.3544)


# ------------------------------------------------------------ comparing
def test_equal_runs_are_seldom_called_better_and_real_gains_mostly():
    """200 pairs of each; the gain is what judge itself says that it can find."""
    rng, better, found = np.random.default_rng(0), 0, 0
    for n in (3, 5, 8, 12):
        for _ in range(50):
            a, b = rng.normal(1.35, 0.004, (2, n))
            first = runs.judge(a, b, "val_bpb")
            better += first["verdict"] == "better"
            effect = runs.detectable(0.004, n)
            found += runs.judge(a, rng.normal(1.35, 0.004, n) - effect, "val_bpb")["verdict"] == "better"
    assert better <= 10 and found >= 160


def test_too_few_runs_say_how_many_are_needed():
    rng = np.random.default_rng(1)
    a, b = rng.normal(1.35, 0.004, 4), rng.normal(1.347, 0.004, 4)
    verdict = runs.judge(a, b, "val_bpb")["verdict"]
    more = int(re.search(r"about (\d+) more runs", verdict)[1])
    assert verdict.startswith("cannot tell")
    assert runs.detectable(0.004, 4 + more) < 0.004 * 2
    assert runs.judge([1.0], [2.0], "val_bpb")["verdict"].startswith("cannot tell: each side needs")


def test_detectable_and_needed_are_inverse():
    for std in (0.001, 0.04):
        for n in (3, 6, 14):
            assert runs.runs_needed(runs.detectable(std, n) * 1.0001, std) == n


def test_higher_core_is_better():
    assert runs.judge([0.25, 0.251, 0.249], [0.27, 0.271, 0.269], "core")["verdict"] == "better"
    assert runs.test_target([0.26, 0.262, 0.261], 0.256525, "core").p < 0.01


FAKE = """import os, pathlib, random
seed, lr = int(os.environ["SEED"]), float(os.environ.get("MATRIX_LR", 0.03))
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
def fake(tmp_path, monkeypatch):
    """A trainer that is quick: a command that writes a log whose score follows SEED and MATRIX_LR."""
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.chdir(tmp_path)
    return f"{sys.executable} fake.py"


def test_compare_runs_both_sides_in_turn(tool, fake, tmp_path):
    code, out, _ = tool("compare", "--run", fake, f"MATRIX_LR=0.01 {fake}", "-n", 5, "--out", "curves.png")
    order = re.findall(r"\d+/10 ([AB]):", out)
    assert code == 0 and order == list("ABBAABBAAB") and "verdict: better" in out
    assert "at equal time (100 s): train_loss" in out and "at equal tokens (200,000 tokens)" in out
    assert (tmp_path / "curves.png").stat().st_size > 5000
    code, out, _ = tool("compare", "--run", fake, fake, "-n", 3)
    assert "verdict: better" not in out  # the same seeds give the same scores


def test_compare_of_folders_and_torch_builds(tool, fake, tmp_path):
    tool("compare", "--run", fake, f"MATRIX_LR=0.01 {fake}", "-n", 4)
    logs = sorted((tmp_path / "logs").iterdir())
    a, b = (",".join(str(log) for log in logs if f"_{k}_seed" in log.name) for k in (0, 1))
    other = logs[-1] / "train.log"
    other.write_text(other.read_text().replace("torch 2.13.0", "torch 2.11.0"))
    code, out, _ = tool("compare", a, b)
    assert code == 0 and "warning: not the same torch: 2.11.0, 2.13.0" in out and "verdict: better" in out


def test_compare_across_a_setting(tool, fake):
    """A and B in turn at each depth, whichever comes first; the change must help at all of them."""
    worse_at_8 = f"if [ $DEPTH = 8 ]; then export MATRIX_LR=0.09; else export MATRIX_LR=0.01; fi; {fake}"
    for b, word in ((f"MATRIX_LR=0.01 {fake}", "B is ahead at 3 of 3 settings, for sure at 3: holds across"),
                    (worse_at_8, "B is ahead at 2 of 3 settings, for sure at 2: does not hold across")):
        code, out, _ = tool("compare", "--run", fake, b, "--across", "DEPTH=4,6,8", "-n", 4)
        order = [line.split(" seed")[0].split(" ", 1)[1] for line in out.splitlines() if "/24 " in line]
        first = [f"{side} DEPTH={depth}" for depth in (4, 6, 8) for side in "AB"]
        assert code == 0 and order == (first + first[::-1]) * 2 and word in out, out
    code, _, err = tool("compare", fake, fake, "--across", "DEPTH=4,6,8")
    assert code == 2 and "--across needs --run" in err


def test_sweep_interleaves_and_corrects(tool, fake):
    code, out, _ = tool("sweep", "MATRIX_LR=0.03,0.031,0.02", "-n", 4, "--command", fake)
    assert code == 0
    lines = {line.split(":")[0]: line for line in out.splitlines() if not re.match(r"\d+/", line)}
    assert lines["MATRIX_LR=0.02"].endswith(": better") and "cannot tell" in lines["MATRIX_LR=0.031"]
    assert len(re.findall(r"(?m)^\d+/12 ", out)) == 12


def test_a_sweep_of_equal_settings_seldom_finds_one(fake):
    """40 sweeps of six equal settings: about 5 % may call one of them better or worse, so at most 6 here."""
    import trials

    rng, wrong = np.random.default_rng(3), 0
    for _ in range(40):
        made = {}
        for k in range(6):
            made[f"s{k}"] = [
                runs.Run(None, finals=[("final_exact", 2.0, float(v))]) for v in rng.normal(1, 0.01, 4)
            ]
        lines = []
        trials.report_many(made, lines.append)
        wrong += any(line.endswith(("better", "worse")) for line in lines)
    assert wrong <= 6


def test_noise_tells_what_n_runs_find(tool, fake, tmp_path):
    tool("compare", "--run", fake, fake, "-n", 5)
    code, out, _ = tool("noise", tmp_path / "logs", "--json")
    found = json.loads(out)
    assert code == 0 and found["n"] == 5  # equal runs count once
    careful = runs.cautious_std(found["std"], 4)
    assert found["detectable"]["5"] == pytest.approx(runs.detectable(careful, 5))


def test_a_command_that_fails_ends_the_comparison(tool, fake):
    code, _, err = tool("compare", "--run", fake, "echo no such thing >&2; exit 3", "-n", 2)
    assert code == 2 and "ended with 3: no such thing" in err
    code, _, err = tool("compare", "--run", fake, "true", "-n", 2)
    assert code == 2 and "must heed SEED and RUN_ID" in err


def test_a_misspelt_setting_is_refused_before_anything_trains(tool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = tool("sweep", "MATRX_LR=0.1,0.2", "-n", 2)
    assert code == 2 and "matrix-lr" in err and not (tmp_path / "logs").exists()
    code, _, err = tool("noise", "tiny", "-n", 1)
    assert code == 2 and "-n 2" in err


@pytest.mark.parametrize(
    "words",
    [
        ("sweep", "MATRIX_LR=0.1"),
        ("sweep", "MATRIX_LR"),
        ("sweep", "A=1,2", "-n", "1"),
        ("compare", "one"),
        ("compare", "nowhere", "either"),
        ("ablate", "nowhere"),
        ("noise", "no_such_preset_anywhere"),
    ],
)
def test_bad_questions_are_refused(tool, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = tool(*words)
    assert code == 2 and err.count("\n") == 1


def test_plot_draws_foreign_logs(tool, speedrun, tmp_path):
    code, out, _ = tool("plot", speedrun / "old", "--out", tmp_path / "x.png")
    assert code == 0 and (tmp_path / "x.png").stat().st_size > 5000
    code, _, err = tool("plot", speedrun / "old", "--out", tmp_path / "y.png", "--by", "tokens")
    assert code == 2 and "no curves" in err      # those logs do not say how many


def test_plot_over_tokens(tool, tmp_path, monkeypatch):
    """Places and ends of the curves are those of the logs of a record of ours."""
    logs, drawn = ROOT / "records/track_tiny/2026-11-21_Baseline", []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda axes, x, *rest, **kw: drawn.append(np.ravel(x)))
    monkeypatch.setattr("matplotlib.axes.Axes.legend", lambda *args, **kw: None)
    code, *_ = tool("plot", logs, "--out", tmp_path / "z.png", "--by", "tokens")
    tokens = [json.loads(path.read_text())["tokens"] for path in sorted(logs.glob("result*.json"))]
    assert code == 0 and sorted(drawn[-1].tolist()) == sorted(tokens)
    assert 0.9 * min(tokens) < drawn[0][-1] <= min(tokens)


def test_audit_is_quick(tool, tmp_path):
    """40 folders of 3 logs of about 190 KB: hundreds of folders then take well under five minutes."""
    for i in range(40):
        for k in range(3):
            speedrun_log(tmp_path / f"r{i}" / f"{k}.txt", 3.27 + k / 1000, 132.0 + k)
        (tmp_path / f"r{i}" / "README.md").write_text(
            "losses = [3.27, 3.271, 3.272]\ntimes = [132.0, 133.0, 134.0]\n"
        )
    began = time.monotonic()
    code, out, _ = tool("audit", tmp_path)
    assert code == 0 and "40 folders, 0 with findings" in out and time.monotonic() - began < 20


def test_rules_agree_with_the_trainer():
    import train_gpt

    tiny, golf = (folders.RULES[1][name] for name in ("tiny", "golf"))
    cfg = train_gpt.load_config({})
    assert tiny.fingerprint == cfg.data_fingerprint and tiny.time_cap == cfg.max_wallclock_seconds
    cfg = train_gpt.load_config({"PRESET": "golf"})
    assert (golf.byte_cap, golf.time_cap) == (cfg.artifact_bytes_limit, cfg.max_wallclock_seconds)
    assert os.path.basename(cfg.data_path) == golf.data
    assert set(folders.RULES[1]) == {"tiny", "golf", "speedrun", "gpt2"}
