"""Config: values of the presets, where values come from, spelling, ranges, refusals, help."""
import dataclasses
import math
import re
import signal
import sys

import pytest
import torch

import train_gpt
from helpers import with_boards
from tools.run import plan
from train_gpt import Refused, fields, load_config, overrides, show

# Every constant of every recipe, by name and value: records rely on them. What all share, and each, whole. A
# change here is a decision.
RUN = dict(
    run_id="", seed=1337, device="auto", dtype="auto", compile=True, eval_from="", resume="",
    other_data=False, dry_run=False,
    save_every=0, save_every_seconds=0.0, bos_id=0, device_batch_size=0, val_tokens=0,
    eval_context=0, eval_stride=0, grad_clip_norm=0.0, score_artifact=True, artifact_keep=65_536)
STAGED = RUN | dict(
    stage_starts=(), batch_schedule=(), seq_schedule=(), shuffle=False, max_epochs=0, triton_kernels=True)
RECIPES = {
    "tiny": STAGED | dict(
        preset='tiny', train_log_every=50, val_loss_every=0, data_path='data/datasets/embedded',
        tokenizer_path='',
        data_fingerprint='dac98310ae0394c70e5edcf7fc6fc1d66e56671e3d3f3c141065bed6ad3d1c49', vocab_size=0,
        train_seq_len=4096, train_batch_tokens=4096, packing='rows', shuffle=True, val_batch_size=65536,
        num_layers=2, model_dim=128, num_heads=2, iterations=100000, max_wallclock_seconds=120.0,
        warmup_steps=2, artifact_bytes_limit=0, mlp_mult=3, window_pattern='-L', window_schedule=(),
        rope_base=1000.0, qk_gain_init=1.5, key_offset=True, value_embed_layers=(0, 1), unet_skips=True,
        logit_softcap=15.0, bigram_rows=65536, bigram_init=True, memory=True, mixture=True, own_loss=3.0,
        count_orders=(3, 5, 8, 14), count_words=(1, 3, 5, 29), count_bits=24,
        copy_orders=(1, 2, 3, 4, 6, 9), matrix_lr=0.03,
        embed_lr=0.3, head_lr=0.008, scalar_lr=0.04, muon_momentum=0.95,
        muon_momentum_warmup_start=0.85, muon_momentum_warmup_steps=300, muon_backend_steps=5, bigram_every=2,
        beta1=0.8, beta2=0.95, adam_eps=1e-08, warmdown_frac=0.5, lr_floor=0.0, eval_sliding=0,
        val_part=32768, val_part_every=50),
    "golf": RUN | dict(
        preset="golf", num_layers=9, model_dim=512, num_heads=8, num_kv_heads=4, mlp_mult=2,
        logit_softcap=30.0, rope_base=10_000.0, qk_gain_init=1.5, data_path="data/datasets/fineweb10B_sp1024",
        tokenizer_path="data/tokenizers/fineweb_1024_bpe.model", vocab_size=1024, train_seq_len=4096,
        train_batch_tokens=393_216, val_batch_size=524_288, val_loss_every=1000,
        train_log_every=200, matrix_lr=0.02, tied_embed_lr=0.03, tied_embed_init_std=0.005, scalar_lr=0.02,
        muon_momentum=0.99, muon_momentum_warmup_start=0.92, muon_momentum_warmup_steps=1500,
        muon_backend_steps=5, beta1=0.9, beta2=0.95, adam_eps=1e-8, iterations=20_000,
        max_wallclock_seconds=600.0, warmdown_iters=3000, warmup_steps=20, artifact_bytes_limit=16_000_000,
        artifact_scale_floor=1 / 127),
    "speedrun": STAGED | dict(
        preset='speedrun', train_log_every=50, val_loss_every=250, data_path='data/datasets/fineweb10B_gpt2',
        tokenizer_path='', vocab_size=50304, train_seq_len=16384, train_batch_tokens=131072,
        packing='documents', max_epochs=1, val_tokens=10485760, val_batch_size=262144, eval_context=262144,
        num_layers=12, model_dim=768, num_heads=6, loss_sum_ranks=8, iterations=2120, extension_iterations=40,
        max_wallclock_seconds=0.0, warmup_steps=2, score_artifact=False, artifact_bytes_limit=0, mlp_mult=4,
        window_pattern="0SSSLSS-SSSL", window_schedule=(), window_block=128, eval_window=2560,
        max_doc_len=2048, attn_scale=0.1, rope_base=1024.0, rope_fraction=0.5, value_embed_layers=(0, 1, 2, 0,
        0, 0, 0, 0, 0, 3, 1, 2), attn_gate_dim=12, smear_dim=12, skip_layers=(4, 7), backout_layer=8,
        logit_softcap=15.0, fp8='auto-head', fp8_head_most=(0.0, 0.875, 1.0), matrix_lr=0.023, embed_lr=0.6,
        head_lr=0.008, scalar_lr=0.04, muon_momentum=0.95, muon_momentum_warmup_start=0.85,
        muon_momentum_warmup_steps=300, muon_momentum_cooldown_steps=50, muon_backend_steps=5,
        normuon_beta2=0.95, weight_decay=1.2, adam_every=2, beta1=0.65, beta2=0.95, adam_eps=1e-08,
        lr_schedule=(1.0, 1.51, 1.93), lr_switches=(0.0, 0.33, 0.66), warmdown_frac=0.55, lr_floor=0.1),
    "golf_plus": STAGED | dict(
        preset="golf_plus", num_layers=11, model_dim=512, num_heads=8, num_kv_heads=4, mlp_mult=4,
        mlp_slope=0.5, logit_softcap=30.0, rope_base=10_000.0, rope_fraction=0.25, qk_gain_init=4.0,
        exclusive=True, depth_scale=True, skip_mix=True, loop_layers=(4, 5), loop_schedule=(),
        data_path="data/datasets/fineweb10B_sp8192",
        tokenizer_path="data/tokenizers/fineweb_8192_bpe.model", vocab_size=8192, train_seq_len=2048,
        train_batch_tokens=786_432, packing="shards", val_batch_size=524_288, val_loss_every=4000,
        train_log_every=500, matrix_lr=0.02, tied_embed_lr=0.03, tied_embed_init_std=0.005, scalar_lr=0.02,
        muon_momentum=0.99, muon_momentum_warmup_start=0.92, muon_momentum_warmup_steps=1500,
        muon_backend_steps=5, muon_row_norm=True, weight_decay=4.25, adam_weight_decay=0.02, beta1=0.9,
        beta2=0.95, adam_eps=1e-8, grad_clip_norm=0.3, ema_decay=0.997, iterations=20_000,
        max_wallclock_seconds=588.0, warmdown_frac=0.667, warmup_steps=40, artifact_bytes_limit=16_000_000,
        artifact_codec="brotli", artifact_step=12.85 / 31, artifact_embed_step=20 / 127, gptq_batches=64,
        gptq_seconds=12.0,
        eval_sliding=64),
    "speedrun_plus": STAGED | dict(
        preset='speedrun_plus', train_log_every=0, val_loss_every=250,
        data_path='data/datasets/fineweb10B_gpt2', tokenizer_path='', vocab_size=50304, train_seq_len=16384,
        train_batch_tokens=131072, packing='documents', max_epochs=1, val_tokens=10485760,
        val_batch_size=262144, eval_context=262144, num_layers=11, model_dim=768, num_heads=6,
        loss_sum_ranks=8, iterations=1270, extension_iterations=45, max_wallclock_seconds=0.0,
        warmup_steps=2, score_artifact=False, artifact_bytes_limit=0, qk_dim=96, mlp_mult=4,
        window_pattern='PSPLSP-SSPL', window_schedule=(), window_block=128, eval_window=2560,
        max_doc_len=2048, value_embed_layers=(1, 2, 8, 9, 10), xsa_layers=(1, 3, 4, 7), head_gate_layers=(3,
        10), skip_layers=(3, 6), attn_source=7, gate_layer=4, key_offset=True,
        attn_scale=0.11547005383792515, rope_base=1024.0, dc_window=112, smear_dim=12, value_gate_dim=12,
        bigram_rows=377280, bigram_sign_rows=8192, mudd_dim=64, mudd_gate_dim=64, logit_softcap=11.5,
        logit_shift=5.0, logit_width=15.0, next_targets=3, prefix_weight=0.25,
        vocab_path='data/tokenizers/gpt2_vocab.json', doc_schedule=(), fp8='auto-all', fp8_head=True,
        fp8_qkv=True, fp8_mlp=True, fp8_head_most=(100.0, 1.6, 0.75), matrix_lr=0.023, embed_lr=0.6,
        head_lr=0.008, gate_lr=0.008, scalar_lr=0.04, muon_pairs=True, muon_momentum=0.95,
        muon_momentum_warmup_start=0.85, muon_momentum_warmup_steps=300, muon_momentum_cooldown_steps=50,
        muon_backend_steps=5, polar_margin=1.02, normuon_beta2=0.9, weight_decay=1.2,
        adam_weight_decay=0.005, adam_eps=1e-10, adam_every=2, untie_at=0.6669291338582677,
        warmdown_frac=0.6, lr_floor=0.15),
    "gpt2": STAGED | dict(
        preset='gpt2', train_log_every=50,
        val_loss_every=250,
        data_path='data/datasets/fineweb_edu', tokenizer_path='', vocab_size=32768, train_seq_len=2048,
        train_batch_tokens=524288, packing='best_fit', val_tokens=20971520, val_batch_size=65536,
        num_layers=26, model_dim=1664, num_heads=13, iterations=12700, max_wallclock_seconds=0.0,
        warmup_steps=2, score_artifact=False, artifact_bytes_limit=0, depth=26, target_param_data_ratio=7.25,
        target_flops=0.0, num_kv_heads=0, mlp_mult=4, logit_softcap=15.0, rope_base=10000.0,
        window_pattern='SSSLSSSLSSSLSSSLSSSLSSSLSL', window_schedule=(0,), short_window=0.5,
        value_embed_layers=(0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13),
        value_gate_dim=32, value_gate_factor=2.0, fp8='auto-all', matrix_lr=0.02,
        embed_lr=0.20380986614602722, head_lr=0.00271746488194703, scalar_lr=0.5, muon_momentum=0.95,
        muon_momentum_warmup_start=0.85, muon_momentum_warmup_steps=300, muon_backend_steps=5,
        normuon_beta2=0.95, weight_decay=1.1988066830515525, beta1=0.8, beta2=0.95, adam_eps=1e-10,
        warmdown_frac=0.5, lr_floor=0.0, core=True, core_bundle='data/core_bundle', core_metric_every=0,
        core_metric_max_per_task=0),
    "gpt2_plus": STAGED | dict(
        preset='gpt2_plus', train_log_every=50,
        val_loss_every=250,
        data_path='data/datasets/climbmix', tokenizer_path='', vocab_size=32768,
        train_seq_len=2048, train_batch_tokens=1048576, packing='best_fit', val_tokens=41943040,
        val_batch_size=65536, num_layers=24, model_dim=1536, num_heads=12, iterations=5568,
        max_wallclock_seconds=0.0, warmup_steps=2, score_artifact=False, artifact_bytes_limit=0, depth=24,
        target_param_data_ratio=8.0, target_flops=0.0, num_kv_heads=0, mlp_mult=4, logit_softcap=15.0,
        attn_scale=0.12727922, rope_base=100000.0, window_pattern='SSSLSSSLSSSLSSSLSSSLSSSL',
        window_schedule=(0,), short_window=0.25, value_embed_layers=(0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7,
        0, 8, 0, 9, 0, 10, 0, 11, 0, 12), value_gate_dim=12, value_gate_factor=3.0, smear_dim=24,
        backout_layer=12, fp8='auto-all', matrix_lr=0.028284271247461905, embed_lr=0.30000000000000004,
        head_lr=0.008000000000000002, scalar_lr=0.7071067811865476, gate_lr=0.2, muon_momentum=0.97,
        muon_momentum_warmup_start=0.85, muon_momentum_warmup_steps=400, muon_momentum_end=0.9,
        muon_backend_steps=5, polar_margin=1.01, normuon_beta2=0.9, weight_decay=2.1120722517736326,
        adam_weight_decay=0.01, beta1=0.8, beta2=0.95, adam_eps=1e-10, lr_warmup_steps=40,
        warmdown_frac=0.6499640804597702, lr_floor=0.05, core=True, core_bundle='data/core_bundle',
        core_metric_every=0, core_metric_max_per_task=0)}
# {constant: the first preset that has it}, which the tests of it are about; and its declaration there
OWNER = {f.name: preset for preset, recipe in reversed(train_gpt.RECIPES.items()) for f in fields(recipe)}
FIELDS = {f.name: f for recipe in reversed(train_gpt.RECIPES.values()) for f in fields(recipe)}
# tiny has them with one possible value
for f in fields(train_gpt.Speedrun):
    if f.name in ("packing", "seq_schedule"):
        OWNER[f.name] = "speedrun"
        FIELDS[f.name] = f
ALIASES = dict(total_batch_size="train_batch_tokens", num_iterations="iterations", model_tag="run_id")
NUMBERS = [name for name, f in FIELDS.items() if type(f.default) in (int, float)]
BOOLEANS = [name for name, f in FIELDS.items() if type(f.default) is bool]
TUPLES = [name for name, f in FIELDS.items() if type(f.default) is tuple]
DIAL = ("depth", "target_param_data_ratio", "target_flops")  # they derive others: tests/test_gpt2.py
# what must be there for a constant to have another value than its default
COMPANIONS = {"lr_switches": {"lr_schedule": (1.0, 1.5)}, "lr_schedule": {"lr_switches": (0.0, 0.25)},
              "packing": {"seq_schedule": (1,)}}


def flag(name):
    return "--" + name.replace("_", "-")


def other_value(name):
    """A legal value other than the default, for an unchanged rest of the defaults."""
    f = FIELDS[name]
    special = dict(
        preset="speedrun", window_pattern="LS", value_embed_layers=(1, 0), window_schedule=(64, 0),
        batch_schedule=(2, 3), seq_schedule=(2,), shuffle=False, train_seq_len=256,
        train_batch_tokens=8192, model_dim=512, num_heads=8, num_kv_heads=2, val_tokens=2,
        count_orders=(2, 5), count_words=(1, 6), copy_orders=(1, 3),
        skip_layers=(0, 2, 1, 3), lr_schedule=(1.0, 1.5),
        lr_switches=(0.0, 0.25), polar_margin=1.01, value_gate_dim=14, fp8="head", artifact_codec="zlib",
        fp8_head_most=(1.0, 2.0, 3.0),
        window_block=64, eval_window=256, loop_layers=(0, 1), loop_schedule=(0, 3), stage_starts=(0.0, 0.5),
        doc_schedule=(64,), qk_dim=64, xsa_layers=(3, 4), head_gate_layers=(10,))
    if name in special:
        return special[name]
    if f.metadata["choices"]:
        return f.metadata["choices"][-1]
    if type(f.default) in (bool, str):
        return not f.default if type(f.default) is bool else f.default + "x"
    value = f.default + 1 if type(f.default) is int else f.default / 2 or 0.125
    assert f.metadata["least"] <= value <= f.metadata["most"], f"give {name} a value in `special`"
    return value


def by_owner(name, env=(), argv=()):
    """Config of the preset that the tests of this constant are about."""
    return load_config({"PRESET": OWNER[name]} | dict(env), argv)


def refusal(env, argv=()):
    """The sentence with which load_config refuses."""
    with pytest.raises(Refused) as refused:
        load_config(env, argv)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# -------------------------------------------------------------------------------- values of the presets
@pytest.mark.parametrize("preset", RECIPES)
def test_every_constant_of_a_recipe(preset):
    """Its own and the shared ones, and no others."""
    assert vars(load_config({"PRESET": preset})) == RECIPES[preset]


# {(smallest, largest value): the numbers that have this range}; 1e12 is none at all
RANGES = {
    (0, 0.9999): "beta1 muon_momentum muon_momentum_end muon_momentum_warmup_start normuon_beta2",
    (0, 0.99999): "beta2 ema_decay",
    (0, 1): (
        "artifact_scale_floor lr_floor lr_switches mlp_slope rope_fraction short_window stage_starts "
        "untie_at warmdown_frac"),
    (0, 10): (
        "artifact_embed_step artifact_step embed_lr gate_lr head_lr matrix_lr "
        "scalar_lr tied_embed_lr"),
    (0, 16): "loop_schedule",
    (0, 64): "copy_orders count_orders",
    (0, 127): "count_words",
    (0, 100): "attn_scale own_loss prefix_weight qk_gain_init tied_embed_init_std value_gate_factor",
    (0, 198): "depth",
    (0, 999): "attn_source head_gate_layers value_embed_layers xsa_layers",
    (0, 1000): "backout_layer loop_layers skip_layers warmup_steps",
    (0, 4096): "num_kv_heads",
    (0, 1e4): "gptq_batches logit_shift logit_softcap",
    (0, 2**16 - 1): "bos_id",
    (0, 2**16): "attn_gate_dim dc_window smear_dim vocab_size",
    (0, 1e6): "adam_weight_decay fp8_head_most grad_clip_norm target_param_data_ratio weight_decay",
    (0, 2**20): "bigram_sign_rows loss_sum_ranks window_schedule",
    (0, 1e7): "gptq_seconds max_wallclock_seconds save_every_seconds",
    (0, 2**26): "bigram_rows",
    (0, 1e9): "extension_iterations rope_base",
    (0, 2**31 - 1): "seed",
    (0, 1e12): (
        "artifact_bytes_limit artifact_keep core_metric_every core_metric_max_per_task "
        "device_batch_size eval_context eval_sliding eval_stride eval_window lr_warmup_steps "
        "max_doc_len max_epochs muon_momentum_cooldown_steps muon_momentum_warmup_steps "
        "save_every train_log_every val_loss_every val_part val_tokens warmdown_iters"),
    (0, 1e30): "target_flops",
    (1e-20, 1): "adam_eps",
    (1e-06, 1000): "lr_schedule",
    (0.001, 1e4): "logit_width",
    (1, 2): "polar_margin",
    (1, 8): "next_targets",
    (1, 20): "muon_backend_steps",
    (1, 64): "mlp_mult",
    (1, 99): "bigram_every",
    (1, 999): "gate_layer",
    (1, 1000): "adam_every num_layers",
    (1, 1024): "batch_schedule seq_schedule",
    (1, 4096): "num_heads",
    (1, 2**16): "mudd_dim mudd_gate_dim value_gate_dim",
    (1, 2**20): "doc_schedule",
    (1, 1e9): "iterations val_part_every",
    (1, 2**30): "train_batch_tokens",
    (1, 1e12): "val_batch_size window_block",
    (2, 2**16): "model_dim",
    (2, 2**20): "train_seq_len",
    (4, 4096): "qk_dim",
    (8, 28): "count_bits",
}
# {preset: {constant: its range where that is not the one of RANGES}}
OTHER_RANGES = {
    "speedrun_plus": dict(
        attn_scale=(1e-06, 100), bigram_rows=(3, 2**26), eval_window=(1, 2**20), fp8_head_most=(1e-09, 1e6),
        logit_softcap=(0.001, 1e4), max_doc_len=(1, 2**20), rope_base=(1, 1e9), skip_layers=(0, 999),
        smear_dim=(1, 2**16), value_gate_dim=(2, 2**16), window_block=(1, 2**16),
        window_schedule=(1, 2**20)),
    "gpt2": dict(train_batch_tokens=(0, 2**30)),
    "gpt2_plus": dict(train_batch_tokens=(0, 2**30)),
    "golf": dict(vocab_size=(1, 2**16)),
    "golf_plus": dict(vocab_size=(1, 2**16)),
}


@pytest.mark.parametrize("preset", RECIPES)
def test_the_range_of_every_number(preset):
    """Ranges are as public as the names. Those of tuples are for each entry."""
    ranges = {name: limits for limits, names in RANGES.items() for name in names.split()}
    ranges |= OTHER_RANGES.get(preset, {})
    found = {}
    for constant in fields(train_gpt.RECIPES[preset]):
        if not (constant.metadata["choices"] or isinstance(constant.default, (bool, str))):
            found[constant.name] = (constant.metadata["least"], constant.metadata["most"])
    assert found == {name: ranges[name] for name in found}


@pytest.mark.parametrize("preset", RECIPES)
def test_constants_of_other_recipes(preset):
    """A flag is refused; the environment may hold what other recipes and programs read."""
    others = {*FIELDS} - {f.name for f in fields(train_gpt.RECIPES[preset])}
    plain = load_config({"PRESET": preset})
    assert load_config({name.upper(): "yes please" for name in others} | {"PRESET": preset}) == plain
    for name in others:
        argument = f"{flag(name)}={show(other_value(name))}"
        assert refusal({}, [f"--preset={preset}", argument]) == f"unrecognized arguments: {argument}"
    assert len(others) > 20


def test_the_loops_of_golf_plus():
    """They are a column of its stages; one constant turns them off, either way."""
    def orders(**settings):
        cfg = load_config({"PRESET": "golf_plus"} | settings)
        found = [cfg.layer_order(stage) for stage in cfg.stages()]
        for stage, order in zip(cfg.stages(), found):
            passes = [layer.passes for layer in plan.layers_of(cfg, stage)]
            assert passes == [order.count(i) for i in range(cfg.num_layers)]
        return found

    assert orders(LOOP_LAYERS="0") == orders(LOOP_SCHEDULE="0") == 2 * [[*range(11)]]
    assert orders(LOOP_LAYERS="10,30", LOOP_SCHEDULE="1,0") == [[*range(11), 10], [*range(11)]]
    assert orders(NUM_LAYERS="3") == 2 * [[0, 1, 2]]


def test_names():
    """Of presets and aliases; what a preset has is no override."""
    assert load_config({}).preset == "tiny" and set(with_boards()) == set(RECIPES)
    for preset, recipe in train_gpt.RECIPES.items():
        of_preset = ALIASES if preset.startswith("gpt2") else {}
        assert recipe.aliases == {name: alias for alias, name in of_preset.items()}
    for preset in RECIPES:
        assert overrides(load_config({"PRESET": preset})) == {}


@pytest.mark.parametrize("preset", train_gpt.RECIPES)
@pytest.mark.parametrize("name", ["model_dim", "num_layers", "train_seq_len", "train_batch_tokens"])
def test_the_four_sizes_can_each_be_set_alone(preset, name):
    cfg = train_gpt.preset_config(preset)
    values = dict(model_dim=[cfg.num_heads * head for head in (4, 10, 64)], num_layers=[1, 2, 5, 13],
                  train_seq_len=[64, 256, 2048], train_batch_tokens=[n * cfg.train_seq_len for n in (1, 96)])
    derived = ("iterations weight_decay window_schedule embed_lr head_lr scalar_lr matrix_lr warmdown_frac "
               "train_batch_tokens").split()
    if (preset, name) == ("speedrun_plus", "num_layers"):      # its lists name layers by their numbers
        assert all("has 11 layers" in refusal({"PRESET": preset, "NUM_LAYERS": str(n)}) for n in values[name])
        return
    for value in values[name]:
        cfg = load_config({"PRESET": preset, name.upper(): str(value)})
        follow = derived if vars(cfg).get("depth") else []
        assert getattr(cfg, name) == value and {*overrides(cfg)} <= {name, *follow}
        with torch.device("meta"):
            cfg = dataclasses.replace(cfg, vocab_size=cfg.vocab_size or 1024)
            model = cfg.make_model()
        assert len(model.blocks) == cfg.num_layers and model.embed.size(1) == cfg.model_dim


# -------------------------------------------------------------------------------- where values come from
@pytest.mark.parametrize("name", [name for name in FIELDS if name not in DIAL])
def test_environment_flag_and_edit_are_the_same_config(name):
    value = other_value(name)
    others = COMPANIONS.get(name, {})
    env = {key.upper(): show(companion) for key, companion in others.items()}
    plain = by_owner(name)
    by_edit = dataclasses.replace(plain, **others | {name: value})
    if name == "preset":
        by_edit = train_gpt.preset_config(value)
        assert load_config({}, [f"--preset={value}"]) == load_config({"PRESET": value}) == by_edit
        return
    assert by_owner(name, env | {name.upper(): show(value)}) == by_edit != plain
    assert by_owner(name, env, [f"{flag(name)}={show(value)}"]) == by_edit
    assert by_owner(name, env, [flag(name), show(value)]) == by_edit
    assert train_gpt.parse_value(FIELDS[name], show(value)) == value


def test_default_preset_environment_flag():
    """Each source wins over the ones before it, and only where it speaks; none of them is changed."""
    golf = {"PRESET": "golf"}
    assert load_config(golf | {"MATRIX_LR": "0.05"}).matrix_lr == 0.05
    assert load_config({"MATRIX_LR": "0.05"}, ["--preset=golf"]).matrix_lr == 0.05
    assert load_config({"PRESET": "tiny"}, ["--preset", "golf"]) == load_config(golf)
    cfg = load_config(golf | {"SEED": "7"}, ["--iterations=30"])
    assert (cfg.preset, cfg.seed, cfg.iterations, cfg.num_layers, cfg.beta2) == ("golf", 7, 30, 9, 0.95)
    # a flag that says what the preset says still wins over the environment
    assert load_config(golf | {"NUM_LAYERS": "3"}, ["--num-layers=9"]) == load_config(golf)
    env = {"MATRIX_LR": "0.05", "PATH": "x"}
    argv = ["--seed", "3", "--compile"]
    load_config(env, argv)
    assert env == {"MATRIX_LR": "0.05", "PATH": "x"} and argv == ["--seed", "3", "--compile"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.matrix_lr = 0.1


@pytest.mark.parametrize("alias, name", ALIASES.items())
def test_aliases(alias, name):
    gpt2 = {"PRESET": "gpt2"}
    value, third = dict(train_batch_tokens=("8192", "4096"), iterations=("78", "77"), run_id=("a", "b"))[name]
    argv = ["--preset=gpt2", f"{flag(alias)}={value}"]
    wanted = load_config(gpt2 | {name.upper(): value})
    assert load_config(gpt2 | {alias.upper(): value}) == load_config({}, argv) == wanted
    assert load_config(gpt2, [flag(alias), value]) == wanted and alias not in FIELDS
    # a flag beats the environment under either name
    assert load_config({name.upper(): third}, argv) == wanted
    assert load_config(gpt2 | {alias.upper(): third}, [f"{flag(name)}={value}"]) == wanted


# -------------------------------------------------------------------------------- what values look like
@pytest.mark.parametrize("name", BOOLEANS)
def test_booleans(name):
    upper = name.upper()
    for text, value in {"0": False, "1": True, "false": False, "true": True, "True": True}.items():
        for env, argv in ({upper: text}, []), ({}, [f"{flag(name)}={text}"]), ({}, [flag(name), text]):
            assert getattr(by_owner(name, env, argv), name) is value
    cfg = by_owner(name, {upper: "0"}, [flag(name), "--seed=5"])
    assert getattr(cfg, name) is True and cfg.seed == 5
    owner = {"PRESET": OWNER[name]}
    for text in ("yes please", "2", "-1", "", "on", "0.0", "none"):
        assert name in refusal(owner | {upper: text})


@pytest.mark.parametrize("name", TUPLES)
def test_tuples_are_comma_lists(name):
    kind, least, most = map(FIELDS[name].metadata.get, ("of", "least", "most"))
    kind = kind or type(FIELDS[name].default[0])
    legal = dict(skip_layers=["0", "0,3, 1,2"], lr_switches=["0, 0.25"], lr_schedule=["0.5,2.5"],
                 count_orders=["0", "2", "3,1"], count_words=["0", "5,1"], copy_orders=["0", "2,3"],
                 stage_starts=["0,0.25"], fp8_head_most=["0,1,2.5"],
                 loop_layers=["0, 1"], loop_schedule=["0,2"], batch_schedule=["1", "1, 3"],
                 seq_schedule=["1", "1,1, 2,2"], window_schedule=["0", "64,128"],
                 doc_schedule=["64", "1,2,3,4"],
                 xsa_layers=["3", "3, 10"])
    env = {key.upper(): show(value) for key, value in COMPANIONS.get(name, {}).items()}
    for text in legal.get(name, [f"{least}", f"{least},{least + 1}, {least}"]):
        for cfg in (by_owner(name, env | {name.upper(): text}),
                    by_owner(name, env, [f"{flag(name)}={text}"])):
            assert getattr(cfg, name) == tuple(map(kind, text.split(",")))
            assert {type(part) for part in getattr(cfg, name)} == {kind}
    wrong = [",", "1,", "1;2", "a", "1,nan", "inf", f"{least},{least - 1}", "1 2", f"{most + 1:g}"]
    owner = {"PRESET": OWNER[name]}
    assert all(name in refusal(owner | {name.upper(): text}) for text in wrong + ["1.5"] * (kind is int))


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_finite_and_keep_to_their_range(name):
    default = FIELDS[name].default
    least = FIELDS[name].metadata.get("least")
    most = FIELDS[name].metadata.get("most")
    assert -math.inf < least <= default <= most < math.inf
    outside = ["", "x", "1,2", "0x10", "1e", "--", "1 2", "nan", "inf", "-inf", "1e999", most * 1000 + 1]
    if type(default) is int:
        outside += ["1.5", "1e3", "true", most + 1, least - 2]  # -1 may be off
    else:
        outside += [least - 1e-6, most * (1 + 1e-6) + 1e-9]
    owner = {"PRESET": OWNER[name]}
    assert all(name in refusal(owner | {name.upper(): str(text)}) for text in outside)
    assert name in refusal(owner, [f"{flag(name)}={outside[-1]}"])


def test_minus_one_is_off():
    """As nanochat's command lines have it, wherever 0 means off or derived; nowhere else."""
    off = {name for name in NUMBERS if FIELDS[name].metadata["off"]}
    assert off >= {"save_every", "val_loss_every", "core_metric_every", "target_flops",
                   "core_metric_max_per_task", "target_param_data_ratio", "device_batch_size"}
    for name in off - {"train_batch_tokens", *DIAL}:
        assert by_owner(name, {}, [flag(name), "-1"]) == by_owner(name, {name.upper(): "0"})
    for name in {*NUMBERS} - off | {"train_batch_tokens"}:
        assert name in refusal({"PRESET": OWNER[name], name.upper(): "-1"})


def test_flags_take_negative_and_spaced_values():
    assert "iterations=-5" in refusal({}, ["--iterations", "-5"])
    assert load_config({}, ["--data-path", "once upon a time"]).data_path == "once upon a time"
    assert load_config({}, ["--data-path=--seed=5 = x"]).data_path == "--seed=5 = x"


@pytest.mark.parametrize("value, text", [
    ((1, 2, 3), "1,2,3"), ((), ""), (True, "1"), (False, "0"), (0.03, "0.03"), (7, "7"), ("data/x", "data/x"),
    ("/some/where/shards/", "shards"), ("", "")])
def test_show(value, text):
    assert show(value) == text


@pytest.mark.parametrize("argv, sentence", [
    (["--matrix-l=3"], "unrecognized arguments: --matrix-l=3"),     # no abbreviations
    (["--matrixlr", "3"], "unrecognized arguments: --matrixlr 3"),
    (["stray"], "unrecognized arguments: stray"),
    (["-x"], "unrecognized arguments: -x"), (["matrix_lr=1"], "unrecognized arguments: matrix_lr=1"),
    (["--"], "unrecognized arguments: --"), ([""], "unrecognized arguments: "),
    (["--seed"], "argument --seed: expected one argument"),
    (["--seed", "--compile"], "argument --seed: expected one argument"),
    (["--preset"], "argument --preset: expected one argument")])
def test_unknown_arguments_are_refused(argv, sentence):
    assert refusal({}, argv) == sentence


@pytest.mark.parametrize("settings, words", [
    ("NUM_HEADS=3", "num_heads=3 model_dim"), ("MODEL_DIM=34", "model_dim=34 num_heads"),
    ("PRESET=golf NUM_KV_HEADS=3", "num_kv_heads=3 num_heads"),
    ("PRESET=golf NUM_KV_HEADS=16", "num_kv_heads=16 num_heads=8"),
    ("PRESET=gpt2 NUM_KV_HEADS=5", "num_kv_heads=5"),
    ("TRAIN_BATCH_TOKENS=100", "100 rows 4096 train_batch_tokens"),
    ("TRAIN_BATCH_TOKENS=700", "700 rows 4096 train_batch_tokens"),
    ("TRAIN_BATCH_TOKENS=0", "train_batch_tokens=0"), ("TRAIN_SEQ_LEN=16384", "4096 rows 16384"),
    ("EVAL_STRIDE=4097", "eval_stride row"), ("EVAL_CONTEXT=10 EVAL_STRIDE=11", "eval_stride row"),
    ("PRESET=gulf", "gulf tiny golf"), ("DEVICE=tpu", "tpu cpu cuda"),
    ("DTYPE=fp64", "fp64 float32"), ("PRESET=gpt2 FP8=on", "fp8 auto-all"),
    ("PRESET=speedrun PACKING=heads", "heads documents rows"),
    ("SEQ_SCHEDULE=2 TRAIN_SEQ_LEN=512", "packing=rows 1024"),
    ("BATCH_SCHEDULE=1,2,3", "batch_schedule=1,2,3 2 stages"),
    ("STAGE_STARTS=0.1,0.5", "stage_starts=0.1,0.5"),
    ("WINDOW_PATTERN=SXL", "SXL"), ("WINDOW_PATTERN=", "window_pattern"),
    ("PRESET=gpt2 VOCAB_SIZE=0", "depth=26 vocab_size"),
    ("PRESET=gpt2 DEPTH=0 TARGET_PARAM_DATA_RATIO=0 TARGET_FLOPS=1e15", "target_flops depth"),
    ("PRESET=gpt2 DEPTH=0", "target_param_data_ratio depth"),
    ("PRESET=gpt2_plus DEPTH=0 TARGET_PARAM_DATA_RATIO=0", "train_batch_tokens=0 depth"),
    ("PRESET=gpt2 WINDOW_PATTERN=SXL", "SXL"),
    ("PRESET=gpt2 VALUE_GATE_DIM=2000", "value_gate_dim=2000 1664"),
    ("PRESET=gpt2_plus SMEAR_DIM=2000", "smear_dim=2000 1536"),
    ("PRESET=gpt2 SEQ_SCHEDULE=1,2", "packing=best_fit 4096"),
    *((f"{name}={text}", name.lower()) for name in ("COUNT_ORDERS", "COUNT_WORDS", "COPY_ORDERS")
      for text in ("0,2", "2,0", "2,2", "1,3,1")),
    *(("PRESET=golf_plus LOOP_LAYERS=" + text, f"loop_layers={text} must") for text in ("4", "5,4", "0,0,1")),
    ("PRESET=golf_plus LOOP_SCHEDULE=0,1,2", "loop_schedule=0,1,2 golf_plus 2 stages"),
    ("PRESET=speedrun SMEAR_DIM=769", "smear_dim=769 model_dim=768"),
    ("PRESET=speedrun ATTN_GATE_DIM=769", "attn_gate_dim=769 model_dim=768"),
    ("PRESET=speedrun WINDOW_PATTERN=SPL", "SPL"),
    ("PRESET=speedrun FP8_HEAD_MOST=1,2", "fp8_head_most=1.0,2.0"),
    ("PRESET=speedrun WINDOW_SCHEDULE=64,100,64,64 WINDOW_BLOCK=64", "100 window_block=64"),
    ("PRESET=speedrun EVAL_WINDOW=100", "100 window_block=128"),
    ("PRESET=speedrun SEQ_SCHEDULE=5", "whole number of rows"),
    ("PRESET=speedrun LR_SWITCHES=0.5", "lr_switches=0.5"),
    ("PRESET=speedrun LR_SCHEDULE=1,2,3 LR_SWITCHES=0.5", "lr_schedule=1.0,2.0,3.0 lr_switches=0.5"),
    ("PRESET=speedrun LR_SCHEDULE=1 LR_SWITCHES=0,0.5", "lr_schedule=1.0 lr_switches=0.0,0.5"),
    ("PRESET=speedrun LR_SWITCHES=0,0.5,0.4", "lr_switches=0.0,0.5,0.4"),
    ("PRESET=speedrun SKIP_LAYERS=2", "skip_layers=2"),
    ("PRESET=speedrun SKIP_LAYERS=2,1", "skip_layers=2,1"),
    ("PRESET=speedrun SKIP_LAYERS=1,1", "skip_layers=1,1"),
    ("PRESET=speedrun SKIP_LAYERS=1,2,3", "skip_layers=1,2,3")])
def test_impossible_combinations_are_named(settings, words):
    sentence = refusal(dict(pair.split("=") for pair in settings.split()))
    assert all(word in sentence for word in words.split())


@pytest.mark.parametrize("run_id", ["a/b", "..", ".", " ", "/x", "a b", "-a", "=", "a\n", "a\\b", "%s"])
def test_a_run_id_is_the_name_of_a_folder(run_id):
    assert "run_id=" in refusal({"RUN_ID": run_id})


# -------------------------------------------------------------------------------- what is printed
def test_overrides_are_printed(tmp_path, monkeypatch, capsys):
    """First of all, here before there is data; nothing is written."""
    monkeypatch.chdir(tmp_path)
    env = dict(BATCH_SCHEDULE="1,2", NUM_LAYERS="9", MATRIX_RL="0.1")
    assert train_gpt.main(["--preset=golf_plus", "--matrix-lr=0.03", "--device=cpu"], env) == 2
    out, err = capsys.readouterr()
    assert err.startswith("train_gpt: no shards at 'data/datasets/fineweb10B_sp8192'")
    assert out.splitlines() == [
        "override device auto -> cpu", "override batch_schedule  -> 1,2", "override num_layers 11 -> 9",
        "override matrix_lr 0.02 -> 0.03"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("argv, env, preset", [
    (["--help"], {}, "tiny"), (["-h"], {}, "tiny"), (["--seed=3", "--help"], {"PRESET": "gpt2"}, "gpt2"),
    (["--preset=golf", "--help"], {}, "golf"), (["--help", "--preset", "golf"], {"PRESET": "gpt2"}, "golf")])
def test_help_lists_the_constants_of_a_preset(argv, env, preset, capsys, monkeypatch):
    """Each with its unit, range or choices and value, and no others."""
    monkeypatch.setenv("COLUMNS", "500")    # no word is broken
    with pytest.raises(SystemExit) as ended:
        train_gpt.main(argv, env)
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "") and train_gpt.__doc__.splitlines()[0] in out
    cfg = train_gpt.preset_config(preset)
    blocks = [" ".join(block.split()) for block in re.split(r"\n  (?=--)", out)[1:]]
    texts = {block.split()[0]: block for block in blocks}
    assert set(texts) == {flag(name) for name in [*vars(cfg), *cfg.aliases.values()]}
    for f in fields(cfg):
        text = texts[flag(f.name)]
        words = [" ".join(f.metadata["doc"].split()), *f.metadata["choices"]]
        assert words[0] and all(word in text for word in words) and text.endswith(f"[{show(f.default)}]")
    assert "(0 to 10)" in texts["--matrix-lr"] and "(0 or 1)" in texts["--compile"]
    assert "(text)" in texts["--run-id"]


# -------------------------------------------------------------------------------- the process
def test_an_errors_folders_are_left_out():
    """They name the machine; what is relative stays."""
    for error, line in (
            (BlockingIOError(11, "busy", "/srv/me/x.bin"), "BlockingIOError: [Errno 11] busy: 'x.bin'"),
            (ValueError("data/x, ./y/z at step:1/20\nand more"), "ValueError: data/x, ./y/z at step:1/20"),
            (RuntimeError("\n/opt/people/me/g++ is missing"), "RuntimeError: g++ is missing")):
        assert train_gpt.brief(error) == line


def test_activations_are_fp32_where_torch_cannot_tell(monkeypatch):
    """ARM has other capabilities than AVX-512."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert train_gpt.Team(load_config({"DEVICE": "cpu"}), {}).dtype is torch.float32


def test_the_environment_is_what_is_given(monkeypatch):
    """And not that of the process, nor its arguments."""
    monkeypatch.setenv("MATRIX_LR", "0.5")
    monkeypatch.setattr(sys, "argv", ["x", "--seed=5"])
    assert load_config({}) == train_gpt.preset_config("tiny")


def test_a_signal_that_a_shell_ignores_stays_ignored(monkeypatch):
    """As it is for `command &` in a script, in training, too."""
    now = dict.fromkeys(train_gpt.SIGNALS, signal.SIG_DFL) | {signal.SIGINT: signal.SIG_IGN}
    monkeypatch.setattr(signal, "getsignal", now.get)
    monkeypatch.setattr(signal, "signal", now.__setitem__)
    for given, others in (([], signal.default_int_handler), ([print], print)):
        train_gpt.catch_signals(*given)
        assert [now[number] for number in train_gpt.SIGNALS] == [signal.SIG_IGN, others, others]
