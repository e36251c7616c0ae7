"""--proxy: recipes scaled down by rules."""
import re
from pathlib import Path

import pytest

import train_gpt
from helpers import look, slow_but
from tools.run import proxy
from tools.run.proxy import PROXIES, expand_proxy
from tools.run.plan import planned_tokens
from train_gpt import Refused, horizon_weights, load_config, preset_config

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = {"DEVICE": "cpu"}
# tokens per weight, and what the recipe takes in steps
LENGTH = dict(golf=(20, 8394), golf_plus=(20, 4988), speedrun=(5.0, 2160), speedrun_plus=(3.15, 1315),
              gpt2=(7.25, 12_700), gpt2_plus=(8, 5568))


def scaled(preset, width="", *flags, **env):
    """Config of a command line with --proxy=WIDTH, and what it logged."""
    lines = []
    words = expand_proxy(width, [f"--preset={preset}", *flags], CPU | env, lambda *more: lines.extend(more))
    return load_config(CPU | env, words), lines


@pytest.mark.parametrize("preset", [*PROXIES])
def test_sizes_follow_the_rules(preset):
    """At three widths: layers and stages are the recipe's, tokens per weight and steps as stated."""
    full = preset_config(preset)
    ratio, steps = LENGTH[preset]
    before = 0.0
    for width in (32, 64, 128):
        cfg, lines = scaled(preset, str(width))
        assert (cfg.model_dim, cfg.preset, cfg.vocab_size) == (width, preset, 1024)
        assert cfg.num_heads % 2 == 0 and cfg.model_dim % cfg.num_heads == 0
        assert train_gpt.total_steps(cfg) == pytest.approx(steps / 4, rel=0.01)
        # the batch is a whole number of rows, of which there may be few
        slack = 1.5 * cfg.train_seq_len * planned_tokens(cfg) / cfg.train_batch_tokens
        assert abs(planned_tokens(cfg) - ratio * horizon_weights(cfg)) < slack
        assert planned_tokens(cfg) > before
        before = planned_tokens(cfg)
        assert len(cfg.stages()) == len(full.stages())
        assert [s.batch_tokens / cfg.train_batch_tokens for s in cfg.stages()] == [
            s.batch_tokens / full.train_batch_tokens for s in full.stages()]
        if "gpt2" not in preset:
            assert cfg.num_layers == full.num_layers
        assert cfg.matrix_lr == type(full)().matrix_lr
        assert lines[0] == f"proxy: {preset} at width {width} instead of {full.model_dim}"
        assert f"proxy model_dim={width}: the width of the proxy" in lines


def test_the_speedruns_keep_their_proportions():
    full = preset_config("speedrun_plus")
    cfg, lines = scaled("speedrun_plus", "96")
    assert [stage.window / cfg.window_block for stage in cfg.stages()] == [3, 7, 11, 13]
    assert [stage.doc_len / cfg.window_block for stage in cfg.stages()] == [7, 16, 16, 16]
    assert (cfg.window_block, cfg.eval_window, cfg.qk_dim, cfg.num_heads) == (16, 320, 36, 2)
    assert cfg.bigram_rows / cfg.vocab_size == pytest.approx(full.bigram_rows / full.vocab_size, rel=1e-3)
    assert cfg.head_lr == pytest.approx(full.head_lr * 8**0.5, rel=1e-3)
    assert cfg.window_pattern == full.window_pattern and cfg.untie_at == full.untie_at
    assert any(line.startswith("proxy weight_decay=4.8: ") for line in lines)
    # on the whole text, not on the first 80 tokens of each document
    assert cfg.packers[cfg.packing] is train_gpt.Rows and cfg.shuffle
    assert {stage.row_tokens for stage in cfg.stages()} == {cfg.train_seq_len}


@pytest.mark.parametrize("preset", [*PROXIES])
def test_only_the_final_loss_of_the_trained_weights_counts(preset):
    cfg, _ = scaled(preset, "32")
    off = dict(val_loss_every=0, artifact_bytes_limit=0, score_artifact=False, max_wallclock_seconds=0,
               compile=False, warmup_steps=1, dtype="float32")
    if preset != "golf":
        off["max_epochs"] = 0
    assert {name: getattr(cfg, name) for name in off} == off
    assert cfg.val_batch_size % cfg.eval_context == 0 and cfg.val_batch_size <= 16_384


def test_what_is_given_stays_as_given():
    """Flags and environment beat the rules; rules do not follow what a flag changes."""
    plain, _ = scaled("speedrun", "64")
    cfg, lines = scaled("speedrun", "64", "--mlp-mult=3", HEAD_LR="0.008")
    assert (cfg.mlp_mult, cfg.head_lr) == (3, 0.008) and not [line for line in lines if "head_lr" in line]
    assert planned_tokens(cfg) == planned_tokens(plain)
    cfg, _ = scaled("gpt2", "64", "--depth=6")
    assert (cfg.num_layers, cfg.window_pattern, cfg.model_dim) == (6, "SSSLSL", 64)
    assert scaled("gpt2", "512")[0].num_layers == 8


def test_the_plan_is_what_differs():
    """A line per rule; nothing that stays as in the recipe."""
    full = preset_config("speedrun_plus")
    cfg, lines = scaled("speedrun_plus", "48")
    told = dict(re.findall(r"(\w+)=(\S+?)(?=, \w+=|: )", "\n".join(lines[1:])))
    changed = {name for name, value in vars(cfg).items() if value != vars(full)[name]} - {"device"}
    assert {*told} == changed and len(lines) < len(told)
    assert "window_schedule=24,56,88,104, eval_window=160" in "\n".join(lines)
    assert not [line for line in lines if "matrix_lr" in line]


def test_windows_are_given_in_the_tokens_of_the_recipe():
    """And scaled as its own: the same change of the recipe at any width."""
    flag = "--window-schedule=128,896,1408,1664"
    cfg, lines = scaled("speedrun", "48", flag)
    assert cfg.window_schedule == (8, 56, 88, 104) and "window_schedule=8,56,88,104" in "\n".join(lines)
    assert scaled("speedrun", "48", WINDOW_SCHEDULE="128,896,1408,1664")[0] == cfg
    with pytest.raises(Refused, match="window"):
        scaled("speedrun", "48", "--window-schedule=24,56,88,104")


@pytest.mark.parametrize("tokenizer, tokens, found", [
    ('{"vocab_size": 2048}', 300_000, (2048, 262_144)), ("null", 300_000, (50_304, 262_144)),
    ('{"vocab_size": 512}', 9_000, (512, 0)), ("7", 1, (1024, 262_144))])
def test_vocabulary_and_val_tokens_are_those_of_the_text(tokenizer, tokens, found, tmp_path):
    files = f'[{{"split": "train", "tokens": 1}}, {{"split": "val", "tokens": {tokens}}}]'
    (tmp_path / "manifest.json").write_text(f'{{"tokenizer": {tokenizer}, "files": {files}}}')
    cfg, _ = scaled("speedrun", "32", f"--data-path={tmp_path}")
    assert (cfg.vocab_size, cfg.val_tokens, cfg.data_path) == (*found, str(tmp_path))


@pytest.mark.parametrize("preset, width, flags, sentence", [
    ("tiny", "64", [], "tiny has no proxy"), ("golf", "60", [], "a width in steps of 16"),
    ("golf", "512", [], "from 32 to 496"), ("golf", "small", [], "proxy=small"),
    ("golf", "64", ["--matrx-lr=1"], "--matrx-lr=1"),
    ("gpt2", "64", ["--depth=abc"], "^depth='abc' must be written like 26"),
    ("gpt2", "64", ["--vocab-size=many"], "^vocab_size='many' must be written like")])
def test_bad_widths_are_refused(preset, width, flags, sentence):
    with pytest.raises(Refused, match=sentence):
        scaled(preset, width, *flags)


@pytest.mark.parametrize("word, width", [("--proxy", 32), ("--proxy=48", 48)])
def test_a_plan_of_another_trainers_proxy(word, width, capsys):
    """As `record try` asks for its width and tokens."""
    assert proxy.main(["--trainer=elsewhere", "--preset=speedrun", word, "--dry-run"], CPU) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"proxy: speedrun at width {width} instead of 768\n")
    assert re.search(r"\nlimits: .* \(\d+ tokens\)\n$", out)


@pytest.mark.parametrize("preset", slow_but(["golf", "speedrun_plus"], PROXIES))
def test_a_proxy_trains(preset, root, monkeypatch, capsys):
    """On any prepared text; its rules are printed, its model is read like any other."""
    monkeypatch.chdir(root)
    argv = [f"--preset={preset}", "--proxy=32", "--data-path=data/datasets/toy", "--iterations=8",
            "--val-tokens=2048", f"--run-id=proxy_{preset}"]
    if hasattr(train_gpt.RECIPES[preset], "extension_iterations"):
        argv.append("--extension-iterations=0")
    assert proxy.main(argv, CPU) == 0
    run = look(Path("logs", f"proxy_{preset}"))
    assert "\nproxy vocab_size=512" in capsys.readouterr().out
    assert run.result["config"]["model_dim"] == "32" and len(run.losses) == 8
    assert run.result["trained"]["val_loss"] < 9
