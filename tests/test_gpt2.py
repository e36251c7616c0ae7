"""The gpt2 game: its dial, horizons and miniseries; CORE in a run."""

import shlex
import shutil

import numpy as np
import pytest

import train_gpt
from helpers import TOY
from test_core import small_tasks, write_bundle
from train_gpt import flops_per_token, load_config, overrides, show

pytestmark = pytest.mark.usefixtures("one_thread")


def dialled(*flags, **env):
    return load_config(env, ["--preset=gpt2", *flags])


# -------------------------------------------------------------------------------- the dial
COMMAND = """--preset=gpt2 --depth=26 --model-tag=d26 --target-param-data-ratio=7.25 --total-batch-size=524288
--device-batch-size=16 --core-metric-max-per-task=-1 --save-every=-1 --fp8=all"""


def test_the_command_line_of_the_leaderboard():
    """In nanochat's words it is the preset itself but for its name, fp8 on any device and the micro-batch.
    What other depths and ratios derive: test_golden.py."""
    typed = load_config({}, shlex.split(COMMAND))
    assert (typed.depth, typed.run_id, typed.iterations, typed.device_batch_size) == (26, "d26", 12_700, 16)
    assert (typed.fp8, typed.core, typed.core_metric_max_per_task, typed.save_every) == ("all", True, 0, 0)
    assert set(overrides(typed)) == {"run_id", "fp8", "device_batch_size"}
    assert {"depth", "num_layers", "iterations"} <= set(overrides(dialled("--depth=24")))
    assert overrides(dialled()) == {}, "what the preset's own depth derives is no override"


@pytest.mark.parametrize("name, value", [
    ("num_layers", 5), ("model_dim", 512), ("num_heads", 4), ("window_pattern", "L"), ("iterations", 77),
    ("window_schedule", (1024,)), ("value_embed_layers", (0,)), ("matrix_lr", 0.5), ("embed_lr", 0.5),
    ("head_lr", 0.5), ("scalar_lr", 0.5), ("weight_decay", 0.0), ("train_batch_tokens", 65_536)])
def test_what_is_given_is_not_derived(name, value):
    assert getattr(dialled("--depth=8", **{name.upper(): show(value)}), name) == value


def test_the_horizons():
    """Steps, tokens per weight or FLOPs; one that is given replaces the preset's. -1 is off."""
    cfg = dialled("--depth=8", "--target-flops=1e16")
    assert cfg.iterations == int(1e16 / flops_per_token(cfg) / 524_288) and cfg.target_param_data_ratio == 0
    cfg = dialled("--depth=8", "--num-iterations=33")
    assert (cfg.iterations, cfg.target_param_data_ratio) == (33, 0)
    assert dialled("--depth=8", "--target-flops=1").iterations == 1
    assert dialled("--target-flops=-1") == dialled()
    cfg = dialled("--core-metric-every", "-1", "--save-every=-1", VAL_LOSS_EVERY="-1")
    assert cfg == dialled(VAL_LOSS_EVERY="0")
@pytest.mark.parametrize("flags, words", [
    ("--preset=gpt2 --depth=0", "depth"), ("--preset=gpt2 --depth=-3", "depth=-3"),
    ("--preset=gpt2 --depth=199", "depth=199"), ("--preset=gpt2 --depth=2.5", "depth='2.5'"),
    ("--preset=gpt2 --num-iterations=5 --target-flops=1e15", "iterations and target_flops"),
    ("--preset=gpt2 --target-param-data-ratio=5 --target-flops=1e15", "target_param_data_ratio and"),
    ("--preset=gpt2 --target-param-data-ratio=5 --num-iterations=5", "two horizons"),
    ("--preset=gpt2 --target-flops=nan", "target_flops=nan"), ("--target-flops=1e15", "unrecognized"),
    ("--target-param-data-ratio=10", "unrecognized"), ("--preset=gpt2 --vocab-size=0", "vocab_size"),
    ("--train-batch-tokens=0", "train_batch_tokens=0"), ("--iterations=-1", "iterations=-1"),
    ("--preset=gpt2 --core-metric-max-per-task=-2", "per_task=-2")])
def test_what_the_dial_refuses(flags, words, capsys):
    assert train_gpt.main(flags.split(), {}) == 2
    err = capsys.readouterr().err
    assert words in err and len(err.strip().splitlines()) == 1


# -------------------------------------------------------------------------------- a run
SMALL = {name: TOY[name] for name in ("COMPILE", "DEVICE", "DTYPE", "DATA_PATH")} | dict(
    PRESET="gpt2", DEPTH="1", MODEL_DIM="32", NUM_HEADS="2", VOCAB_SIZE="512", TRAIN_SEQ_LEN="64",
    TRAIN_BATCH_TOKENS="512", ITERATIONS="6", CORE_BUNDLE="bundle", WARMUP_STEPS="0", TRAIN_LOG_EVERY="1",
    VAL_TOKENS="0", VAL_LOSS_EVERY="2")


@pytest.fixture(scope="module", autouse=True)
def bundle(root):
    return write_bundle(root / "bundle", small_tasks(["copa", "winograd", "jeopardy"], 8))


def test_a_run(train, clock, monkeypatch):
    """Trains, scores CORE on the way and at the end, off the clock; without that it trains to the same
    weights."""
    calls = []
    core_metric = clock.passes(train_gpt.core_metric, 1000)

    def counted(*args):
        calls.append(args)
        return core_metric(*args)

    monkeypatch.setattr(train_gpt, "core_metric", counted)
    monkeypatch.setattr(train_gpt, "train_step", clock.passes(train_gpt.train_step, 0.5))
    done = train(SMALL, CORE_METRIC_EVERY="2")
    plain = train(SMALL, CORE="0", VAL_LOSS_EVERY="0", VAL_TOKENS="512")
    assert done.code == 0 == plain.code, done.err + plain.err
    assert done.weights == plain.weights
    assert len(calls) == 3, "at steps 2 and 4, and once at the end: of the weights, not of the artifact too"
    result = done.result
    assert result["core"] is None and set(result["core_tasks"]) == {"copa", "winograd", "jeopardy"}
    centered = [task["centered"] for task in result["core_tasks"].values()]
    assert result["core_partial"] == pytest.approx(np.mean(centered)) and plain.result["core"] is None
    assert result["train_time_ms"] == 3000 == plain.result["train_time_ms"]
    assert result["val_bpb_without_bos"] < result["val_bpb"]


def test_what_core_needs(root, train):
    """Without its tasks or a tokenizer refused before training, with the command that gets them."""
    assert "./run.sh data core" in train(SMALL, CORE_BUNDLE="nowhere").err
    for shard in (root / TOY["DATA_PATH"]).glob("*.bin"):
        (root / "bare").mkdir(exist_ok=True)
        shutil.copy(shard, root / "bare")
    done = train(SMALL, DATA_PATH="bare", BOS_ID="1")
    assert done.code == 2 and "TOKENIZER_PATH" in done.err and not done.folder.exists()
