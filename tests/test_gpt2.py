"""The gpt2 game: its dial, horizons and miniseries, CORE and samples in a run, scores without BOS targets."""

import json
import math
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import train_gpt
from core_reference import write_bundle
from helpers import ROOT, TOY, fake_team, run_cli, toy_config
from test_core import small_tasks
from train_gpt import Refused, load_config, overrides

# FACTS: depth, ratio, batch -> steps, parameters that the horizon counts
RUNS = [(24, "12", 524_288, 16_704), (26, "8.5", 524_288, 14_889), (26, "8.25", 1_048_576, 7_226),
        (26, "7.25", 524_288, 12_700)]
COMMAND = """--preset=gpt2 --depth=26 --run=d26 --target-param-data-ratio=7.25 --total-batch-size=524288
--device-batch-size=16 --core-metric-max-per-task=-1 --sample-every=-1 --save-every=-1 --fp8"""


def dialled(*flags, **env):
    return load_config(env, ["--preset=gpt2", *flags])


# -------------------------------------------------------------------------------- the dial
@pytest.mark.parametrize("depth, ratio, batch, steps", RUNS)
def test_the_runs_of_the_leaderboard(depth, ratio, batch, steps):
    cfg = dialled(f"--depth={depth}", f"--target-param-data-ratio={ratio}", f"--train-batch-tokens={batch}")
    assert cfg.iterations == pytest.approx(steps, rel=1e-3) and cfg.train_batch_tokens == batch
    assert (cfg.num_layers, cfg.model_dim, cfg.num_heads) == {24: (24, 1536, 12), 26: (26, 1664, 13)}[depth]
    assert cfg.window_schedule == (2048,)
    assert train_gpt.window_sizes(cfg, 2048, 2048) == {"L": 2048, "S": 1024}
    assert cfg.window_pattern == ("SSSL" * 7)[:depth - 1] + "L"
    flops = {24: 4.945e9, 26: 6.185e9}[depth]
    assert train_gpt.flops_per_token(cfg) == pytest.approx(flops, rel=1e-3)


def test_the_records_own_command_line():
    cfg = load_config({}, shlex.split(COMMAND))
    assert (cfg.depth, cfg.run_id, cfg.iterations, cfg.device_batch_size) == (26, "d26", 12_700, 16)
    assert (cfg.fp8, cfg.core, cfg.core_metric_max_per_task, cfg.sample_every) == ("all", True, 0, 0)
    assert {"depth", "fp8", "num_layers", "iterations"} <= set(overrides(cfg))
    assert overrides(dialled()) == {}, "what the preset's own depth derives is no override"


def test_rates_and_decay_follow_batch_width_and_horizon():
    """By hand at depth 20, whose matrices have 20 * 12 * 1280^2 weights and its head 32768 * 1280."""
    base = vars(train_gpt.Config()) | train_gpt.PRESETS["gpt2"]
    cfg = dialled("--depth=20", "--train-batch-tokens=1048576")
    weights, few = 20 * 12 * 1280**2 + 32_768 * 1280, 12 * 12 * 768**2 + 32_768 * 768
    assert cfg.matrix_lr == pytest.approx(base["matrix_lr"] * 2**0.5)
    for name in ("embed_lr", "head_lr", "scalar_lr"):
        assert getattr(cfg, name) == pytest.approx(base[name] * 2**0.5 * (768 / 1280) ** 0.5)
    assert cfg.weight_decay == pytest.approx(base["weight_decay"] * 2**0.5 * few / weights)
    assert cfg.iterations == int(base["target_param_data_ratio"] * weights / 1_048_576)
    at_12 = dialled("--depth=12")
    assert all(getattr(at_12, name) == pytest.approx(base[name])
               for name in ("matrix_lr", "embed_lr", "head_lr", "scalar_lr", "weight_decay"))


@pytest.mark.parametrize("depth, batch", [(4, 2**18), (12, 2**19), (24, 2**20), (26, 2**20)])
def test_the_suggested_batch_is_a_power_of_two(depth, batch):
    assert dialled(f"--depth={depth}", "--train-batch-tokens=0").train_batch_tokens == batch


@pytest.mark.parametrize("name, value", [
    ("num_layers", 5), ("model_dim", 512), ("num_heads", 4), ("window_pattern", "L"), ("iterations", 77),
    ("window_schedule", (1024,)), ("value_embed_layers", (0,)), ("matrix_lr", 0.5), ("embed_lr", 0.5),
    ("head_lr", 0.5), ("scalar_lr", 0.5), ("weight_decay", 0.0), ("train_batch_tokens", 65_536)])
def test_what_is_given_is_not_derived(name, value):
    cfg = dialled("--depth=8", **{name.upper(): train_gpt.show(value)})
    assert getattr(cfg, name) == value


def test_a_given_width_counts_in_the_horizon():
    cfg = dialled("--depth=8", "--model-dim=256", "--num-heads=2")
    assert cfg.iterations == int(10.5 * (8 * 12 * 256**2 + 32_768 * 256) / 524_288)


def test_the_horizons():
    """Steps, tokens per weight or FLOPs; one that is given replaces the preset's."""
    cfg = dialled("--depth=8", "--target-flops=1e16")
    assert cfg.iterations == int(1e16 / train_gpt.flops_per_token(cfg) / 524_288)
    assert cfg.target_param_data_ratio == 0
    cfg = dialled("--depth=8", "--num-iterations=33")
    assert (cfg.iterations, cfg.target_param_data_ratio) == (33, 0)
    assert dialled("--depth=8", "--target-flops=1").iterations == 1


def test_a_config_repeats_itself():
    """All constants of a log, derived ones too, as an environment: the same run, not two horizons."""
    for flags in ([], ["--depth=8", "--target-flops=1e16"], ["--depth=8", "--num-iterations=33"]):
        cfg = dialled(*flags)
        env = {name.upper(): train_gpt.show(value) for name, value in vars(cfg).items()}
        assert load_config(env) == cfg
        env = {name.upper(): new for name, (_, new) in overrides(cfg).items()} | {"PRESET": "gpt2"}
        assert load_config(env) == cfg


def test_an_ablation_repeats_what_was_asked(monkeypatch):
    """Of a depth's overrides, which a log lists with all that follows from it, those that were given."""
    monkeypatch.syspath_prepend(str(ROOT / "records"))
    import trials
    asked = {"preset": "gpt2", "depth": "8", "target_param_data_ratio": "8.0", "matrix_lr": "0.03"}
    env = {name.upper(): value for name, value in asked.items()}
    listed = {name: new for name, (_, new) in overrides(load_config(env)).items()} | {"preset": "gpt2"}
    assert len(listed) > 9 and trials.without_derived(listed) == asked
    tiny = {"preset": "tiny", "matrix_lr": "0.01"}
    assert trials.without_derived(tiny) == tiny


@pytest.mark.parametrize("flags, words", [
    (["--preset=gpt2", "--depth=0"], "depth=0"), (["--preset=gpt2", "--depth=-3"], "depth=-3"),
    (["--preset=gpt2", "--depth=199"], "depth=199"), (["--preset=gpt2", "--depth=2.5"], "depth='2.5'"),
    (["--preset=gpt2", "--num-iterations=5", "--target-flops=1e15"], "iterations and target_flops"),
    (["--preset=gpt2", "--target-param-data-ratio=5", "--target-flops=1e15"], "target_param_data_ratio and"),
    (["--preset=gpt2", "--target-param-data-ratio=5", "--num-iterations=5"], "two horizons"),
    (["--preset=gpt2", "--target-flops=nan"], "target_flops=nan"), (["--target-flops=1e15"], "depth=0"),
    (["--target-param-data-ratio=10"], "depth=0"), (["--preset=gpt2", "--vocab-size=0"], "vocab_size=0"),
    (["--train-batch-tokens=0"], "train_batch_tokens=0"),
    (["--iterations=-1"], "iterations=-1"), (["--core-metric-max-per-task=-2"], "per_task=-2")])
def test_what_the_dial_refuses(flags, words, capsys):
    assert train_gpt.main(flags, {}) == 2
    err = capsys.readouterr().err
    assert words in err and len(err.strip().splitlines()) == 1


def test_minus_one_is_off_or_all():
    cfg = load_config({"VAL_LOSS_EVERY": "-1"}, ["--core-metric-every", "-1", "--sample-every=-1"])
    assert cfg == load_config({}) and dialled("--target-flops=-1") == dialled()
    for text in ({"SEED": "-1"}, {"VAL_TOKENS": "-2"}, {"MATRIX_LR": "-1"}):
        with pytest.raises(Refused):
            load_config(text)


def test_the_miniseries_of_the_plan(tmp_path, monkeypatch, capsys):
    """Without data, every depth by itself; what was given holds for all."""
    monkeypatch.chdir(tmp_path)
    flags = ["--preset=gpt2", "--depth=26", "--plan-mfu=0.25", "--dry-run", "--device=cpu"]
    assert train_gpt.main(flags, {}) == 0
    out = capsys.readouterr().out
    rows = [dict(re.findall(r"(\w+):([\d.e+]+)", line)) for line in out.splitlines() if line[:6] == "depth:"]
    assert [int(row["depth"]) for row in rows] == [4, 8, 12, 16, 20, 24, 26, 28, 32]
    for row in rows:
        cfg = dialled(f"--depth={row['depth']}")
        tokens = cfg.iterations * 524_288
        flops = tokens * train_gpt.flops_per_token(cfg)
        assert [int(row[key]) for key in ("tokens", "batch", "steps")] == [tokens, 524_288, cfg.iterations]
        assert float(row["hours"]) == pytest.approx(flops / (8 * 0.25 * 989.4e12 * 3600), abs=0.005)
        assert float(row["flops"]) == pytest.approx(flops, rel=1e-3)
        assert int(row["parameters"]) == sum(train_gpt.parameter_counts(cfg).values())
    assert "run.sh data climbmix" in out


@pytest.mark.parametrize("given", [dict(NUM_KV_HEADS="5", DEPTH="20"), dict(NUM_HEADS="20", DEPTH="20"),
                                   dict(DEPTH="8", TARGET_FLOPS="1e16", ITERATIONS="60")])
def test_the_miniseries_leaves_out_what_does_not_fit(given, tmp_path, monkeypatch, capsys):
    """What is given may suit this depth alone: the plan of it goes on."""
    monkeypatch.chdir(tmp_path)
    if "TARGET_FLOPS" in given:
        given = given | {"ITERATIONS": str(dialled("--depth=8", "--target-flops=1e16").iterations)}
    assert train_gpt.main(["--preset=gpt2", "--dry-run", "--device=cpu"], given) == 0
    assert re.search(rf"^depth:{given['DEPTH']} ", capsys.readouterr().out, re.M)


# -------------------------------------------------------------------------------- a run
@pytest.fixture
def workplace(tiny_data, tmp_path, monkeypatch):
    (tmp_path / "data").symlink_to(tiny_data / "data")
    monkeypatch.chdir(tmp_path)
    write_bundle(tmp_path / "bundle", small_tasks(["copa", "winograd", "jeopardy"], 8))
    return tmp_path


SMALL = {name: TOY[name] for name in ("COMPILE", "DEVICE", "DTYPE", "DATA_PATH")} | dict(
    PRESET="gpt2", DEPTH="1", MODEL_DIM="32", NUM_HEADS="2", VOCAB_SIZE="512", TRAIN_SEQ_LEN="64",
    TRAIN_BATCH_TOKENS="512", ITERATIONS="6", CORE_BUNDLE="bundle", WARMUP_STEPS="0", TRAIN_LOG_EVERY="1",
    MAX_DOC_LEN="64", VAL_LOSS_EVERY="2", SAMPLE="the one|and two", SAMPLE_TOKENS="4")


def test_a_run(workplace, capsys, monkeypatch):
    """Trains, scores CORE on the way and at the end, samples each prompt; off the clock, which each CORE
    moves on by 1,000 s."""
    real, calls, clock = train_gpt.core_metric, [], train_gpt.time.perf_counter

    def slow(*args):
        calls.append(args)
        return real(*args)

    monkeypatch.setattr(train_gpt, "core_metric", slow)
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: clock() + 1000 * len(calls))
    monkeypatch.delitem(sys.modules, "golf", raising=False)    # of other tests; what this run loads counts
    env = SMALL | dict(RUN_ID="run", CORE_METRIC_EVERY="2", SAMPLE_EVERY="4")
    assert train_gpt.main([], env) == 0, capsys.readouterr().err
    out, folder = capsys.readouterr().out, workplace / "logs/run"
    result = json.loads((folder / "result.json").read_text())
    assert len(calls) == 3, "at steps 2 and 4, and once at the end: of the weights, not of the artifact too"
    assert result["core"] is None and set(result["core_tasks"]) == {"copa", "winograd", "jeopardy"}
    centered = [task["centered"] for task in result["core_tasks"].values()]
    assert result["core_partial"] == pytest.approx(np.mean(centered))
    assert result["train_time_ms"] < 1e6, "what CORE took on the way is not on the clock"
    prompts = re.findall(r"^sample (\d): (the one|and two)", out, re.M)
    assert prompts == [("1", "the one"), ("2", "and two")] * 2
    assert result["total_training_flops"] == pytest.approx(
        6 * 512 * train_gpt.flops_per_token(load_config(env)))
    assert result["mfu"] is None and result["val_bpb_without_bos"] < result["val_bpb"]
    vals = [float(x) for x in re.findall(r"^step:\d+/6 val_loss:\S+ val_bpb:(\S+)", out, re.M)]
    assert len(vals) == 4 and result["min_val_bpb"] == pytest.approx(min(vals), abs=1e-4)
    assert (folder / "core.py").read_bytes() == (ROOT / "core.py").read_bytes()
    assert {*result["companions"]} == {"core.py", "dial.py", "kernels.py"}
    for name in ("total_training_flops", "tok_per_s", "min_val_bpb", "val_bpb_without_bos"):
        assert re.search(rf"^ +{name}  \S", out, re.M)


def test_samples_of_padding(workplace, capsys):
    """Ids above the tokenizer's, which an untrained model may draw, are left out."""
    env = SMALL | dict(RUN_ID="padded", VOCAB_SIZE="575", ITERATIONS="1", CORE="0", SAMPLE_TEMPERATURE="10",
                       SAMPLE_TOKENS="60", SAMPLE_EVERY="1", HEAD_LR="0")
    assert train_gpt.main([], env) == 0, capsys.readouterr().err


def test_core_changes_nothing_in_training(workplace, capsys):
    weights = []
    for name, every in (("with", "2"), ("without", "0")):
        env = SMALL | dict(RUN_ID=name, CORE_METRIC_EVERY=every, SAMPLE_EVERY=every, CORE=every)
        env["CORE"] = str(int(every != "0"))
        assert train_gpt.main([], env) == 0, capsys.readouterr().err
        weights.append((workplace / "logs" / name / "final_model.pt").read_bytes())
    assert weights[0] == weights[1]


def test_the_run_folder_runs_alone(workplace, tmp_path):
    """Its script finds core.py beside it; without it, and without the bundle, one sentence and exit 2."""
    done = run_cli(workplace, env=SMALL | {"RUN_ID": "first"})
    assert done.code == 0, done.err
    want = json.loads((workplace / "logs/first/result.json").read_text())
    (tmp_path / "elsewhere").mkdir()
    for name in ("train_gpt.py", "core.py", "dial.py", "kernels.py", "final_model.pt"):
        (tmp_path / "elsewhere" / name).write_bytes((workplace / "logs/first" / name).read_bytes())
    env = SMALL | {"EVAL_FROM": "elsewhere/final_model.pt", "RUN_ID": "again", "PATH": "/usr/bin:/bin"}
    for name in ("MODEL_DIM", "NUM_HEADS", "DEPTH", "VOCAB_SIZE", "SAMPLE"):
        env.pop(name)
    command = [sys.executable, "elsewhere/train_gpt.py"]
    found = subprocess.run(command, env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    again = json.loads((workplace / "logs/again/result.json").read_text())
    assert again["core_partial"] == want["core_partial"]
    assert again["val_loss"] == pytest.approx(want["val_loss"], abs=1e-6)
    (tmp_path / "elsewhere/core.py").unlink()
    found = subprocess.run(command, env=env | {"RUN_ID": "third"}, capture_output=True, text=True)
    assert found.returncode == 2 and "No module named 'core': is it beside this file" in found.stderr


def test_a_missing_bundle(workplace, capsys):
    """Refused before training, with the command that gets it; a dry run goes on."""
    assert train_gpt.main([], SMALL | {"CORE_BUNDLE": "nowhere"}) == 2
    assert "./run.sh data core" in capsys.readouterr().err and not (workplace / "logs").exists()
    assert train_gpt.main(["--dry-run"], SMALL | {"CORE_BUNDLE": "nowhere"}) == 0


def test_core_without_a_tokenizer(workplace, capsys):
    manifest = workplace / "data/datasets/toy/manifest.json"
    about = json.loads(manifest.read_text())
    folder = workplace / "bare"
    folder.mkdir()
    for file in about["files"]:
        (folder / file["path"]).write_bytes((manifest.parent / file["path"]).read_bytes())
    assert train_gpt.main([], SMALL | {"DATA_PATH": "bare", "MAX_DOC_LEN": "0"}) == 2
    assert "CORE needs a tokenizer" in capsys.readouterr().err


# -------------------------------------------------------------------------------- bits per byte without BOS
def test_bits_per_byte_without_bos_targets(tiny_data):
    """Against sums over single tokens: BOS targets leave the nats, the bytes are the same."""
    cfg = replace(toy_config(tiny_data), val_tokens=0, vocab_size=512)
    data = train_gpt.open_data(cfg, lambda *lines: None)
    model = train_gpt.GPT(cfg)
    train_gpt.init_parameters(model, 0)
    model.head.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    score, nats = train_gpt.evaluate(model, cfg, data, fake_team()), []
    tokens = torch.from_numpy(data.val.astype(np.int64))
    model.set_context(64, 0)
    with torch.no_grad():
        for low in range(0, len(tokens) - 1, 64):
            row = tokens[low:low + 65]
            losses = train_gpt.log_probs(model, row[None, :-1])[0]
            nats += (-losses[torch.arange(len(row) - 1), row[1:]]).double().tolist()
    pairs = list(zip(nats, tokens[1:].tolist(), strict=True))
    plain, without = (sum(x for x, t in pairs if t != skip) for skip in (-1, data.bos))
    assert (tokens[1:] == data.bos).sum() > 5
    assert score.val_bpb == pytest.approx(plain / math.log(2) / data.val_bytes, rel=1e-6)
    assert score.val_bpb_without_bos == pytest.approx(without / math.log(2) / data.val_bytes, rel=1e-6)
