"""Config: precedence, spelling, ranges, near misses, presets, help, plan; and an import that does nothing."""

import dataclasses
import importlib.util
import math
import os
import random
import re
import subprocess
import sys

import pytest
import torch

import plan
import train_gpt
from helpers import GOLF_RECORD, ROOT, SCRIPT
from train_gpt import ALIASES, FIELDS, PRESETS, Config, Refused, load_config, near_misses, overrides, show

NUMBERS = [name for name, f in FIELDS.items() if type(f.default) in (int, float) and f.least < f.most]
FLOATS = [name for name, f in FIELDS.items() if type(f.default) is float]
BOOLEANS = [name for name, f in FIELDS.items() if type(f.default) is bool]
TUPLES = [name for name, f in FIELDS.items() if type(f.default) not in (int, float, bool, str)]


def flag(name):
    return "--" + name.replace("_", "-")


def other_value(name):
    """A legal value other than the default, for an unchanged rest of the defaults."""
    f = FIELDS[name]
    special = dict(preset="golf", device="cpu", dtype="float32", window_pattern="LS",
                   value_embed_layers=(1, 0), window_schedule=(64, 0), batch_schedule=(1, 2),
                   train_seq_len=256, train_batch_tokens=8192, model_dim=512, num_heads=8, num_kv_heads=2,
                   eval_stride=64, rope_base=500.0, run_id="a_run", val_tokens=2, skip_layers=(0, 2, 1, 3),
                   orthogonalization="polar_express", lr_schedule=(1.0, 1.5), lr_switches=(0.0, 0.25),
                   rope_yarn=True, fp8="auto-head")
    if name in special:
        return special[name]
    if type(f.default) is bool:
        return not f.default
    if type(f.default) is str:
        return f.default + "x"
    value = f.default + 1 if type(f.default) is int else f.default / 2 or 0.125
    assert f.least <= value <= f.most, f"give {name} a value in `special`"
    return value


# -------------------------------------------------------------------------------- where values come from
def test_without_anything_the_defaults_hold():
    assert load_config({}) == Config() == train_gpt.preset_config("tiny")


# What must be there for a constant to have another value than its default
COMPANIONS = {"lr_switches": {"lr_schedule": (1.0, 1.5)}, "lr_schedule": {"lr_switches": (0.0, 0.25)},
              "rope_yarn": {"window_schedule": (64, 128)}}
DIAL = ("depth", "target_param_data_ratio", "target_flops")     # derive others: tests/test_gpt2.py


def test_save_every_takes_the_fields_off_value():
    """As the gpt2 game's command line has it."""
    assert load_config({}, ["--save-every=-1"]) == load_config({"SAVE_EVERY": "0"}) == load_config({})


def companions(name):
    """Config with them, and the environment that says so."""
    others = COMPANIONS.get(name, {})
    return dataclasses.replace(Config(), **others), {key.upper(): show(v) for key, v in others.items()}


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in DIAL])
def test_environment_flag_and_edit_are_the_same_config(name):
    value, (base, env) = other_value(name), companions(name)
    text = show(value)
    by_edit = dataclasses.replace(base, **{name: value})
    if name == "preset":
        by_edit = Config(preset=value, **PRESETS[value])
    assert load_config(env | {name.upper(): text}) == by_edit != base
    assert load_config(env, [f"{flag(name)}={text}"]) == by_edit
    assert load_config(env, [flag(name), text]) == by_edit


def test_the_four_spellings_of_matrix_lr(tmp_path):
    """Environment, both kinds of flag, and an edit of the default in the file itself."""
    line, = re.findall(r'    matrix_lr=\([\d.]+,', SCRIPT.read_text())
    edited = tmp_path / "edited.py"
    edited.write_text(SCRIPT.read_text().replace(line, "    matrix_lr=(0.0375,"))
    spec = importlib.util.spec_from_file_location("edited", edited)
    module = sys.modules["edited"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    wanted = dataclasses.asdict(module.load_config({}))
    assert wanted["matrix_lr"] == 0.0375
    for env, argv in (({"MATRIX_LR": "0.0375"}, []), ({}, ["--matrix-lr=0.0375"]),
                      ({}, ["--matrix-lr", "0.0375"]), ({}, ["--matrix_lr=0.0375"]),
                      ({"MATRIX_LR": "3.75e-2"}, [])):
        assert dataclasses.asdict(load_config(env, argv)) == wanted
    del sys.modules["edited"]


def test_default_preset_environment_flag():
    """Each source wins over the ones before it, and only where it speaks."""
    golf = {"PRESET": "golf"}
    assert load_config({}).matrix_lr == FIELDS["matrix_lr"].default
    assert load_config(golf).matrix_lr == PRESETS["golf"]["matrix_lr"] == 0.02
    assert load_config(golf | {"MATRIX_LR": "0.05"}).matrix_lr == 0.05
    assert load_config(golf | {"MATRIX_LR": "0.05"}, ["--matrix-lr=0.06"]).matrix_lr == 0.06
    assert load_config({"MATRIX_LR": "0.05"}, ["--preset=golf"]).matrix_lr == 0.05
    assert load_config({"PRESET": "tiny"}, ["--preset", "golf"]) == load_config(golf)
    cfg = load_config(golf | {"SEED": "7"}, ["--iterations=30"])
    assert (cfg.preset, cfg.seed, cfg.iterations, cfg.num_layers, cfg.beta2) == ("golf", 7, 30, 9, 0.95)
    # a flag that says what the preset says still wins over the environment
    assert load_config(golf | {"NUM_LAYERS": "3"}, ["--num-layers=9"]) == load_config(golf)


def test_any_mapping_is_an_environment_and_stays_as_it_is():
    env, argv = {"MATRIX_LR": "0.05", "PATH": "x"}, ["--seed", "3", "--compile"]
    load_config(env, argv)
    assert env == {"MATRIX_LR": "0.05", "PATH": "x"} and argv == ["--seed", "3", "--compile"]


@pytest.mark.parametrize("alias, name", ALIASES.items())
def test_aliases(alias, name):
    assert name in FIELDS and alias not in FIELDS
    value = other_value(name)
    wanted = dataclasses.replace(Config(), **{name: value})
    assert load_config({alias.upper(): show(value)}) == wanted
    assert load_config({}, [f"{flag(alias)}={show(value)}"]) == wanted
    assert load_config({}, [flag(alias), show(value)]) == wanted
    # twice the same is fine, two different values are not, a flag beats the environment under either name
    assert load_config({alias.upper(): show(value), name.upper(): show(value)}) == wanted
    third = {"run_id": "b_run", "iterations": 77, "train_batch_tokens": 2048}[name]
    for env, argv in (({alias.upper(): show(value), name.upper(): show(third)}, []),
                      ({}, [f"{flag(alias)}={show(value)}", f"{flag(name)}={show(third)}"])):
        with pytest.raises(Refused, match=name):
            load_config(env, argv)
    assert load_config({name.upper(): show(third)}, [f"{flag(alias)}={show(value)}"]) == wanted
    assert load_config({alias.upper(): show(third)}, [f"{flag(name)}={show(value)}"]) == wanted


def test_the_promised_aliases_exist():
    assert ALIASES["total_batch_size"] == "train_batch_tokens" and ALIASES["num_iterations"] == "iterations"
    assert {a for a, name in ALIASES.items() if name == "run_id"} >= {"model_tag", "run"}


# -------------------------------------------------------------------------------- what values look like
@pytest.mark.parametrize("name", BOOLEANS)
def test_booleans(name):
    _, env = companions(name)
    for text, value in dict({"0": False, "1": True}, false=False, true=True, True_=True, FALSE=False).items():
        text = text.rstrip("_")
        assert getattr(load_config(env | {name.upper(): text}), name) is value
        assert getattr(load_config(env, [f"{flag(name)}={text}"]), name) is value
        assert getattr(load_config(env, [flag(name), text]), name) is value
    assert getattr(load_config(env | {name.upper(): "0"}, [flag(name)]), name) is True
    cfg = load_config(env | {name.upper(): "0"}, [flag(name), "--seed=5"])
    assert getattr(cfg, name) is True and cfg.seed == 5
    for text in ("yes please", "yes", "2", "-1", "", "on", "0.0", "none"):
        with pytest.raises(Refused, match=name):
            load_config(env | {name.upper(): text})


# Two lists of each constant that is one, where any two numbers will not do
LEGAL_LISTS = {"skip_layers": ["0", "0,3, 1,2"], "lr_switches": ["0", "0, 0.75"],
               "lr_schedule": ["0", "0,2.5"]}


@pytest.mark.parametrize("name", TUPLES)
def test_tuples_are_comma_lists(name):
    lo, kind = FIELDS[name].least, type(FIELDS[name].default[0])
    for text in LEGAL_LISTS.get(name, [str(lo), f"{lo},{lo + 1}, {lo}"]):
        wanted = tuple(map(kind, text.split(",")))
        env = {"LR_SCHEDULE": ",".join("1" * len(wanted))} if name == "lr_switches" else {}
        env = {"LR_SWITCHES": ["0", "0,0.5"][len(wanted) - 1]} if name == "lr_schedule" else env
        for cfg in load_config(env | {name.upper(): text}), load_config(env, [f"{flag(name)}={text}"]):
            assert getattr(cfg, name) == wanted and {type(n) for n in getattr(cfg, name)} == {kind}
    wrong = ["", ",", "1,", "1;2", "a", "1,nan", "inf", f"{lo},{lo - 1}", "1 2", f"{FIELDS[name].most + 1:g}"]
    for text in wrong + ["1.5"] * (kind is int):
        with pytest.raises(Refused, match=name):
            load_config({name.upper(): text})


@pytest.mark.parametrize("name", FLOATS)
def test_floats_are_finite(name):
    for text in ("nan", "inf", "-inf", "NaN", "Infinity", "1e999"):
        for env, argv in (({name.upper(): text}, []), ({}, [f"{flag(name)}={text}"])):
            with pytest.raises(Refused, match=name) as refusal:
                load_config(env, argv)
            assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_keep_to_their_range_and_type(name):
    f = FIELDS[name]
    lo, hi = f.least, f.most
    assert -math.inf < lo <= f.default <= hi, "the default is legal, and every range has a lower end"
    outside = [lo - 1] + ([hi + 1, hi * 1000] if hi < math.inf else [])
    if type(f.default) is float:
        outside += [lo - 1e-6] + ([hi * (1 + 1e-6) + 1e-9] if hi < math.inf else [])
    if "; 0: " in f.doc:     # -1: as the field says off, or all
        outside[0] = -2
        assert load_config({name.upper(): "-1", "LR_FLOOR": "0.5"}) == load_config(
            {name.upper(): "0", "LR_FLOOR": "0.5"}) if name != "train_batch_tokens" else True
    for text in [*map(str, outside), "", "x", "1,2", "0x10", "one", "1e", "--", "1 2"]:
        with pytest.raises(Refused, match=name):
            load_config({name.upper(): text})
    if type(f.default) is int:
        for text in ("1.5", "1e3", "nan", "inf", "true"):
            with pytest.raises(Refused, match=name):
                load_config({name.upper(): text})


def test_negative_and_spaced_flag_values_are_values():
    with pytest.raises(Refused, match="iterations=-5"):
        load_config({}, ["--iterations", "-5"])
    assert load_config({}, ["--sample", "once upon a time"]).sample == "once upon a time"
    assert load_config({}, ["--sample=--seed=5 = x"]).sample == "--seed=5 = x"


@pytest.mark.parametrize("argv, words", [
    (["--matrix-l=3"], ["--matrix-l", "--matrix-lr"]), (["--matrixlr", "3"], ["--matrixlr", "--matrix-lr"]),
    (["--num-layer=3"], ["--num-layers"]), (["--dryrun"], ["--dry-run"]),
    (["--num-iteration=9"], ["iterations"]), (["--zzz"], ["--zzz", "--help"]), (["stray"], ["stray"]),
    (["-x"], ["-x"]), (["matrix_lr=0.1"], ["matrix_lr"]), (["--seed"], ["--seed"]),
    (["--seed", "--compile"], ["--seed"]), (["--"], ["--"]), ([""], [])])
def test_unknown_arguments_are_named_with_the_nearest_constant(argv, words):
    with pytest.raises(Refused) as refusal:
        load_config({}, argv)
    assert all(word in str(refusal.value) for word in words) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("settings, words", [
    (dict(NUM_HEADS="3"), ["num_heads=3", "model_dim"]),
    (dict(NUM_KV_HEADS="3"), ["num_kv_heads=3", "num_heads"]),
    (dict(NUM_KV_HEADS="8"), ["num_kv_heads=8", "num_heads=2"]),
    (dict(MODEL_DIM="34"), ["model_dim=34", "even"]),
    (dict(TRAIN_BATCH_TOKENS="100"), ["train_batch_tokens=100", "train_seq_len=512"]),
    (dict(TRAIN_BATCH_TOKENS="700"), ["train_batch_tokens=700", "train_seq_len=512"]),
    (dict(TRAIN_SEQ_LEN="16384"), ["train_batch_tokens", "train_seq_len=16384"]),
    (dict(EVAL_STRIDE="513"), ["eval_stride=513", "512"]), (dict(PRESET="gulf"), ["gulf", "tiny", "golf"]),
    (dict(DEVICE="tpu"), ["tpu", "cpu", "cuda"]), (dict(DTYPE="fp64"), ["fp64", "float32"]),
    (dict(WINDOW_PATTERN="SXL"), ["SXL"]), (dict(WINDOW_PATTERN=""), ["window_pattern"]),
    (dict(BATCH_SCHEDULE="1,2,3", WINDOW_SCHEDULE="64,0"), ["batch_schedule", "window_schedule", "3", "2"]),
    (dict(LR_SCHEDULE="1,2,3", LR_SWITCHES="0.5"), ["lr_schedule=(1.0, 2.0, 3.0)", "lr_switches=(0.5,)"]),
    (dict(LR_SWITCHES="0,0.5"), ["lr_schedule=(0.0,)", "lr_switches=(0.0, 0.5)"]),
    (dict(LR_SWITCHES="0.5"), ["lr_switches=(0.5,)", "from 0"]),
    (dict(LR_SCHEDULE="1,2,3", LR_SWITCHES="0,0.5,0.4"), ["lr_switches=(0.0, 0.5, 0.4)", "grow"]),
    (dict(WINDOW_SCHEDULE="64,100", WINDOW_BLOCK="64"), ["window_schedule=(64, 100)", "window_block=64"]),
    (dict(EVAL_WINDOW="100", WINDOW_BLOCK="64"), ["eval_window=100", "window_block=64"]),
    (dict(SKIP_LAYERS="2"), ["skip_layers=(2,)"]), (dict(SKIP_LAYERS="2,1"), ["skip_layers=(2, 1)"]),
    (dict(SKIP_LAYERS="1,2,3"), ["skip_layers=(1, 2, 3)"]),
    (dict(ORTHOGONALIZATION="svd"), ["svd", "polar_express"]),
    (dict(WINDOW_PATTERN="LS1"), ["window_pattern='LS1'"])])
def test_impossible_combinations_are_named(settings, words):
    with pytest.raises(Refused) as refusal:
        load_config(settings)
    assert all(word.lower() in str(refusal.value).lower() for word in words), str(refusal.value)


# -------------------------------------------------------------------------------- near misses
ORDINARY = """PATH HOME LANG LC_ALL LC_CTYPE LANGUAGE SHELL USER LOGNAME HOSTNAME HOST TERM TERMINFO
COLORTERM PWD OLDPWD SHLVL _ TZ TMPDIR TEMP EDITOR VISUAL PAGER LESS MAIL DISPLAY XDG_RUNTIME_DIR
XDG_SESSION_ID SSH_AUTH_SOCK SSH_TTY SSH_CLIENT SSH_CONNECTION DBUS_SESSION_BUS_ADDRESS PYTHONPATH
PYTHONUNBUFFERED PYTHONHASHSEED VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV PS1 LS_COLORS OMP_NUM_THREADS
MKL_NUM_THREADS OPENBLAS_NUM_THREADS KMP_AFFINITY LD_LIBRARY_PATH LD_PRELOAD CUDA_VISIBLE_DEVICES CUDA_HOME
CUDA_VERSION CUDA_LAUNCH_BLOCKING NVIDIA_VISIBLE_DEVICES NCCL_DEBUG NCCL_SOCKET_IFNAME NCCL_VERSION RANK
LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE GROUP_WORLD_SIZE
MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS
TORCHELASTIC_USE_AGENT_STORE TORCH_LOGS TORCH_HOME TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR
PYTORCH_CUDA_ALLOC_CONF HF_HOME HF_ENDPOINT HF_TOKEN HF_HUB_OFFLINE TOKENIZERS_PARALLELISM WANDB_API_KEY
WANDB_PROJECT SLURM_JOB_ID SLURM_PROCID SLURM_NTASKS SLURM_NODELIST SLURM_STEP_ID RUNNER_OS GITHUB_RUN_ID
GITHUB_ACTIONS CI KUBERNETES_SERVICE_HOST KUBERNETES_PORT container DEBIAN_FRONTEND http_proxy HTTPS_PROXY
NO_PROXY SSL_CERT_FILE GIT_AUTHOR_NAME PYTEST_CURRENT_TEST PYTHON PRESS DEVEL DATA MODEL CC CXX CFLAGS
MAKEFLAGS""".split()


def test_ordinary_environments_are_no_near_misses():
    assert near_misses(dict.fromkeys(ORDINARY, "1")) == []
    assert near_misses(dict.fromkeys((name.upper() for name in (*FIELDS, *ALIASES)), "1")) == []


def one_slip(rng, name):
    """name with one letter lost, doubled, replaced or swapped with its neighbour."""
    i, letter = rng.randrange(1, len(name) - 1), rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ_")
    return rng.choice([name[:i] + name[i + 1:], name[:i] + name[i] + name[i:],
                       name[:i] + letter + name[i + 1:], name[:i] + letter + name[i:],
                       name[:i - 1] + name[i] + name[i - 1] + name[i + 1:]])


def test_one_slip_in_a_name_is_reported():
    """Names of four letters or more; those of three resemble too many ordinary words."""
    rng, known = random.Random(4), [name.upper() for name in (*FIELDS, *ALIASES) if len(name) > 3]
    all_known = {name.upper() for name in (*FIELDS, *ALIASES)}
    for name in known * 12:
        typo = one_slip(rng, name)
        if typo in all_known:
            continue
        reported = near_misses({typo: "1", "PATH": "x"})
        assert len(reported) == 1 and reported[0][0] == typo, f"{typo} for {name} gives {reported}"
        similar = [other for other in all_known if abs(len(other) - len(typo)) < 2]
        assert reported[0][1] in similar


def test_suggestions_are_the_right_ones():
    for typo, name in dict(
            MATRIX_RL="MATRIX_LR", NUM_LAYER="NUM_LAYERS", ITERATION="ITERATIONS", SEEED="SEED",
            matrix_lr="MATRIX_LR", Seed="SEED", MAX_WALLCLOCK_SECOND="MAX_WALLCLOCK_SECONDS",
            TOTAL_BATCHSIZE="TOTAL_BATCH_SIZE", VAL_TOKEN="VAL_TOKENS").items():
        assert near_misses({typo: "1"}) == [(typo, name)]


def test_a_near_miss_is_warned_about_and_changes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train_gpt.main(["--dry-run"], {"MATRIX_RL": "0.1", "PATH": "x"}) == 0
    out = capsys.readouterr().out
    assert "MATRIX_RL" in out and "did you mean MATRIX_LR?" in out and "override matrix_lr" not in out


# -------------------------------------------------------------------------------- presets
GOLF = dict(
    vocab_size=1024, num_layers=9, model_dim=512, num_heads=8, num_kv_heads=4, mlp_mult=2,
    tie_embeddings=True, train_seq_len=4096, train_batch_tokens=393_216, tied_embed_lr=0.03,
    matrix_lr=0.02, scalar_lr=0.02,
    muon_momentum=0.99, muon_momentum_warmup_steps=1500, muon_momentum_warmup_start=0.92, warmdown_iters=3000,
    iterations=20_000, max_wallclock_seconds=600.0, seed=1337, val_loss_every=1000, train_log_every=200,
    val_batch_size=524_288, warmup_steps=20, qk_gain_init=1.5, rope_base=10_000.0, logit_softcap=30.0,
    tied_embed_init_std=0.005, muon_backend_steps=5, beta1=0.9, beta2=0.95, adam_eps=1e-8, grad_clip_norm=0.0,
    embed_lr=0.6, head_lr=0.008,
    # and what follows from the game
    data_path="data/datasets/fineweb10B_sp1024", tokenizer_path="data/tokenizers/fineweb_1024_bpe.model",
    artifact_bytes_limit=16_000_000, score_artifact=True, val_tokens=0, residual_mix=True, layer_scale=True,
    unet_skips=True, value_embed_layers=(0,), weight_decay=0.0, lr_floor=0.0, batch_schedule=(1,),
    window_schedule=(0,), batch_lr_power=0.0, window_pattern="L", eval_context=0, eval_stride=0,
    key_offset=False, bigram_rows=0, artifact_step=0.0, eval_sliding=0, eval_documents=0, eval_ttt=0)

RECORD = """VOCAB_SIZE=1024 NUM_LAYERS=9 MODEL_DIM=512 NUM_HEADS=8 NUM_KV_HEADS=4 MLP_MULT=2
TIE_EMBEDDINGS=1 TRAIN_SEQ_LEN=4096 TRAIN_BATCH_TOKENS=393216 TIED_EMBED_LR=0.030 MATRIX_LR=0.020
SCALAR_LR=0.020 MUON_MOMENTUM=0.99 MUON_MOMENTUM_WARMUP_STEPS=1500 MUON_MOMENTUM_WARMUP_START=0.92
WARMDOWN_ITERS=3000 ITERATIONS=20000 MAX_WALLCLOCK_SECONDS=600 SEED=1337 RUN_ID=track_10min_16mb
DATA_PATH=./data/datasets/fineweb10B_sp1024 TOKENIZER_PATH=./data/tokenizers/fineweb_1024_bpe.model"""
OTHERS = """VAL_LOSS_EVERY=1000 TRAIN_LOG_EVERY=200 VAL_BATCH_SIZE=524288 WARMUP_STEPS=20 QK_GAIN_INIT=1.5
ROPE_BASE=10000 LOGIT_SOFTCAP=30 TIED_EMBED_INIT_STD=0.005 MUON_BACKEND_STEPS=5 BETA1=0.9 BETA2=0.95
ADAM_EPS=1e-8 GRAD_CLIP_NORM=0 EMBED_LR=0.6 HEAD_LR=0.008"""


def test_golf_is_the_record_by_overrides():
    """And those that records/README.md prints are these; they differ from the preset, all of them."""
    cfg = load_config({"PRESET": "golf"} | GOLF_RECORD)
    assert {name: getattr(cfg, name) for name in GOLF} == GOLF
    assert {*overrides(cfg)} == {name.lower() for name in GOLF_RECORD}
    assert " ".join(map("=".join, GOLF_RECORD.items())) in " ".join(
        (ROOT / "records/README.md").read_text().replace("\\\n", " ").split())


@pytest.mark.parametrize("text", [RECORD, f"{RECORD} {OTHERS}"])
def test_the_records_own_command_line_is_golf(text):
    cfg = load_config(GOLF_RECORD | dict(pair.split("=", 1) for pair in text.split()) | {"PRESET": "golf"})
    record = load_config({"PRESET": "golf"} | GOLF_RECORD)
    assert {*overrides(cfg)} - {*overrides(record)} == {"run_id", "data_path", "tokenizer_path"}  # ./data
    for name in ("data_path", "tokenizer_path"):
        assert os.path.normpath(getattr(cfg, name)) == GOLF[name]
    assert dataclasses.replace(cfg, run_id="", data_path=GOLF["data_path"],
                               tokenizer_path=GOLF["tokenizer_path"]) == record


@pytest.mark.parametrize("pair", f"{RECORD} {OTHERS}".split())
def test_each_name_of_the_record_is_a_constant(pair):
    name, text = pair.split("=", 1)
    assert name.lower() in FIELDS
    assert getattr(load_config({"PRESET": "golf", name: text}), name.lower()) is not None


def test_golf_dry_run_without_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train_gpt.main(["--preset=golf", "--dry-run", "--matrix-lr=0.03"], {}) == 0
    out, err = capsys.readouterr()
    assert re.search(r"\bparameters:26497096\b", out) and err == ""
    assert "override matrix_lr 0.02 -> 0.03" in out.splitlines()
    assert "fineweb10B_sp1024" in out and "./run.sh data sp1024" in out
    assert "393216 per step, 600 s" in out and "tokens:393216" in out and list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------- the roofline of a dry run
RECORDS = [     # settings, tokens, window, milliseconds of a step on eight H100
    (dict(PRESET="golf"), 393_216, 0, 71.47), (dict(PRESET="speedrun"), 131_072, 384, 33.6),
    (dict(PRESET="speedrun"), 262_144, 896, 60.1), (dict(PRESET="speedrun"), 393_216, 1408, 88.1),
    (dict(PRESET="gpt2", DEPTH="26", TARGET_PARAM_DATA_RATIO="7.25", FP8="all"), 524_288, 2048, 706.0)]


@pytest.mark.parametrize("settings, tokens, window, record", RECORDS)
def test_no_record_beats_the_roofline(settings, tokens, window, record):
    """And each is within four times of it: what it counts is most of what takes time."""
    parts = plan.roofline(train_gpt, load_config(settings), 8, tokens, window)
    assert record / 4 < 1e3 * sum(parts.values()) < record


def test_the_roofline_by_hand():
    """Two layers of 512, one of which sees 64 tokens: FLOPs over rates, part by part."""
    cfg = load_config(dict(
        PRESET="golf", NUM_LAYERS="2", WINDOW_PATTERN="SL", WINDOW_SCHEDULE="128", TRAIN_SEQ_LEN="1024"))
    one, eight = (plan.roofline(train_gpt, cfg, gpus, 65_536, 128) for gpus in (1, 8))
    assert one["communication"] == 0
    assert one["blocks"] == pytest.approx(6 * 2 * 1_835_008 * 65_536 / plan.MATMUL)
    assert one["head"] == pytest.approx(6 * 512 * 1024 * 65_536 / plan.MATMUL)
    seen = sum(min(i + 1, reach) for reach in (64, 128) for i in range(1024)) / 1024
    assert one["attention"] == pytest.approx(12 * 512 * seen * 65_536 / plan.MATMUL)
    for name in ("blocks", "head", "attention", "activations", "optimizer"):
        assert one[name] == pytest.approx(8 * eight[name])
    parameters = train_gpt.parameter_counts(cfg).total()
    assert eight["communication"] == pytest.approx(8 * parameters * 7 / 8 / plan.LINK)
    muon = sum(5 * (4 * short * short * long + 2 * short ** 3) for short, long in 2 * [
        (512, 512), (256, 512), (256, 512), (512, 512), (512, 1024), (512, 1024)])
    assert plan.orthogonalization_flops(train_gpt, cfg) == muon
    fast = plan.roofline(train_gpt, dataclasses.replace(cfg, fp8="all"), 1, 65_536, 128)
    assert fast["blocks"] == one["blocks"] * plan.MATMUL / plan.MATMUL_FP8


def test_a_dry_run_shows_the_roofline_of_each_stage(tmp_path, monkeypatch, capsys):
    """For one GPU and for eight; none for a run that a laptop does."""
    monkeypatch.chdir(tmp_path)
    assert train_gpt.main(["--preset=speedrun", "--dry-run"], {}) == 0
    rows = re.findall(r"^roofline (\d)xH200 tokens:(\d+) long_window:(\d+) ms .* step:([\d.]+) "
                      r"tok/s per GPU:(\d+) mfu:0\.\d\d$", capsys.readouterr().out, re.M)
    stages = [("131072", "384"), ("262144", "896"), ("393216", "1408"), ("393216", "1664")]
    assert [row[:3] for row in rows] == [(gpus, *stage) for gpus in "18" for stage in stages]
    for gpus, tokens, _, step, speed in rows:
        assert int(tokens) / int(gpus) / float(step) * 1e3 == pytest.approx(int(speed), rel=1e-3)
    assert train_gpt.main(["--dry-run"], {}) == 0
    assert "roofline" not in capsys.readouterr().out


def test_golf_parameters_by_group():
    counts = train_gpt.parameter_counts(load_config({"PRESET": "golf"} | GOLF_RECORD))
    rest = {"matrix": 9 * 1_835_008, "scalar": 9 * (8 + 512 + 512 + 1024) + 4 * 512}
    assert counts == {"embed": 524_288} | rest
    assert sum(counts.values()) == 17_059_912
    assert train_gpt.parameter_counts(load_config({"PRESET": "golf"})) == rest | {
        "embed": 524_288, "head": 524_288, "value_embed": 16_384 * 512 + 2 * 1024 * 256}


def test_tiny_dry_run_names_the_command_that_gets_the_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train_gpt.main(["--dry-run"], {}) == 0
    assert "./run.sh data" in capsys.readouterr().out and list(tmp_path.iterdir()) == []


SPEEDRUN_TABLE = """
    0 131072 384 128 1.0000 0.8500        150 131072 384 128 1.0000 0.9000
    300 131072 384 128 1.0000 0.9500      700 131072 384 128 1.5100 0.9500
    707 262144 896 384 1.5100 0.9500      954 262144 896 384 1.5100 0.9500
    1400 262144 896 384 1.2300 0.9500     1414 393216 1408 640 1.2080 0.9500
    2110 393216 1408 640 0.1157 0.9500    2120 393216 1664 768 0.1000 0.9300
    2160 393216 1664 768 0.1000 0.8500"""


def test_speedrun_dry_run_without_data(tmp_path, monkeypatch, capsys):
    """The stage table of FACTS: tokens, windows, LR factor and momentum where one of them changes."""
    monkeypatch.chdir(tmp_path)
    assert train_gpt.main(["--preset=speedrun", "--dry-run"], {}) == 0
    out, err = capsys.readouterr()
    rows = re.findall(r"^at step (\d+) \(.*\): tokens:(\d+) long_window:(\d+) short_window:(\d+) "
                      r"lr_factor:(\d\.\d{4}) muon_momentum:(\d\.\d{4})$", out, re.M)
    wanted = SPEEDRUN_TABLE.split()
    assert [*map(list, rows)] == [wanted[i:i + 6] for i in range(0, len(wanted), 6)]
    assert "limits: 2160 steps of 571342848 tokens in all, 264511 per step, 0 s" in out
    assert "./run.sh data gpt2" in out and "fineweb10B_gpt2" in out and err == ""
    assert re.search(r"^parameters:\d+ \(", out, re.M) and "matmul FLOPs per token" in out
    assert re.search(r"memory:\d+ MiB", out) and list(tmp_path.iterdir()) == []


def test_speedrun_is_the_record():
    """FACTS 1, where it is not in the table above."""
    cfg = load_config({"PRESET": "speedrun"})
    wanted = dict(
        vocab_size=50_304, num_layers=12, model_dim=768, num_heads=6, max_doc_len=2048, val_tokens=10_485_760,
        backout_layer=8, smear_dim=12, attn_gate_dim=12, rope_base=1024.0,
        rope_fraction=0.5, attn_scale=0.1, eval_window=2560, window_block=128, matrix_lr=0.023,
        normuon_beta2=0.95, weight_decay=1.2, head_lr=0.008, embed_lr=75 * 0.008, scalar_lr=5 * 0.008,
        beta1=0.65, beta2=0.95, adam_eps=1e-8, adam_every=2, warmdown_frac=0.55, lr_floor=0.1,
        muon_momentum_warmup_steps=300, muon_momentum_cooldown_steps=50, score_artifact=False)
    assert {name: getattr(cfg, name) for name in wanted} == pytest.approx(wanted)
    assert cfg.skip_layers == (4, 7)
    assert [i for i, kind in enumerate(cfg.window_pattern) if kind not in "LS"] == [0, 7]
    assert [i for i, kind in enumerate(cfg.window_pattern) if kind == "0"] == [0]
    assert [i for i, kind in enumerate(cfg.window_pattern) if kind == "L"] == [4, 11]
    assert [i for i, table in enumerate(cfg.value_embed_layers) if table] == [1, 2, 9, 10, 11]


def fitting(cfg, name):
    """Values of one of the four sizes that the rest of a preset can take: heads are even, sequences whole."""
    if name == "model_dim":
        return [cfg.num_heads * head for head in (2, 10, 16, 32, 64, 128)]
    if name == "train_batch_tokens":
        return [cfg.train_seq_len * sequences for sequences in (1, 2, 3, 8, 96)]
    return {"num_layers": [1, 2, 3, 5, 8, 12, 13], "train_seq_len": [64, 128, 256, 512, 1024, 2048]}[name]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ["model_dim", "num_layers", "train_seq_len", "train_batch_tokens"])
def test_the_four_sizes_can_each_be_set_alone(preset, name):
    for value in fitting(train_gpt.preset_config(preset), name):
        cfg = load_config({"PRESET": preset, name.upper(): str(value)})
        derived = "iterations weight_decay window_schedule embed_lr head_lr scalar_lr matrix_lr".split()
        assert set(overrides(cfg)) <= {name, *derived * (cfg.depth > 0)} and getattr(cfg, name) == value
        cfg = dataclasses.replace(cfg, vocab_size=cfg.vocab_size or 1024)
        with torch.device("meta"):
            model = train_gpt.GPT(cfg)
        assert len(model.blocks) == cfg.num_layers and model.embed.shape == (cfg.vocab_size, cfg.model_dim)
        for p in train_gpt.per_layer(cfg.window_schedule, 3):
            assert max(train_gpt.window_sizes(cfg, p, cfg.train_seq_len).values()) <= cfg.train_seq_len


# Values that golf pins although `tiny` has the same ones today: `tiny` is tuned, the record is not.
GUARDS = {"data_fingerprint", "tied_embed_init_std", "qk_gain_init", "value_embed_layers", "head_lr"}


def test_preset_rows_hold_only_differences():
    assert next(iter(PRESETS)) == "tiny" and PRESETS["tiny"] == {}, "the defaults are the game tiny"
    for preset, row in PRESETS.items():
        assert set(row) <= set(FIELDS) - {"preset", "run_id"}
        same = {name for name, value in row.items() if value == FIELDS[name].default}
        assert same <= GUARDS, f"{preset} repeats defaults: {same - GUARDS}"
        for name, value in row.items():
            assert type(value) is type(FIELDS[name].default), f"{preset}: {name} has another type"
        train_gpt.check_config(train_gpt.preset_config(preset))


def test_overrides_have_old_and_new_values():
    cfg = load_config({"PRESET": "golf", "MATRIX_LR": "0.03", "TIE_EMBEDDINGS": "1", "BATCH_SCHEDULE": "1,2"})
    assert overrides(cfg) == {"matrix_lr": ["0.02", "0.03"], "tie_embeddings": ["0", "1"],
                              "batch_schedule": ["1", "1,2"]}


@pytest.mark.parametrize("value, text", [
    ((1, 2, 3), "1,2,3"), (True, "1"), (False, "0"), (0.03, "0.03"), (7, "7"), ("data/x", "data/x"),
    ("/some/where/shards/", "shards"), ("", "")])
def test_show(value, text):
    assert show(value) == text


@pytest.mark.parametrize("name", FIELDS)
def test_what_is_shown_can_be_typed(name):
    value = other_value(name)
    assert train_gpt.parse_value(name, show(value)) == value


# -------------------------------------------------------------------------------- the file itself
def test_config_is_frozen_and_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().matrix_lr = 0.1
    assert hash(Config()) == hash(Config())


def test_every_constant_says_what_it_is():
    for name, f in FIELDS.items():
        assert f.doc and type(f.default) in (int, float, bool, str, tuple), name


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--seed=3", "--help"]])
def test_help_lists_everything(argv, capsys):
    assert train_gpt.main(argv, {}) == 0
    out, err = capsys.readouterr()
    assert err == "" and train_gpt.__doc__.splitlines()[0] in out
    for name, f in FIELDS.items():
        line, = [line for line in out.splitlines() if line.split()[:1] == [flag(name)]]
        shown = line[line.rindex("  ["):] if not show(f.default) else line
        assert f.doc in line and show(f.default) in shown
        for preset, row in PRESETS.items():
            assert name not in row or f"{preset} {show(row[name])}" in line
    assert all(alias in out for alias in ALIASES)


IMPORT = """
import os, sys, torch, torch.distributed, torch.nn.functional, numpy
import concurrent.futures, dataclasses, difflib, resource, pathlib, platform, subprocess, zlib
sys.path.insert(0, sys.argv[1])

class Trap:
    def __getattribute__(self, name): raise AssertionError("the import reads " + name)
    __getitem__ = __iter__ = __len__ = __contains__ = __getattribute__

written = []
def hook(event, args):
    if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        written.append(str(args[0]))
    if event in ("os.mkdir", "os.rename", "os.remove", "subprocess.Popen", "socket.connect"):
        written.append(event)

rng, before = torch.get_rng_state(), (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
sys.argv, os.environ = Trap(), Trap()
sys.addaudithook(hook)
import train_gpt
assert not written, written
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
assert torch.equal(rng, torch.get_rng_state())
assert before == (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
train_gpt.load_config({})       # neither does load_config look at anything but its arguments
"""


def test_import_does_nothing(tmp_path):
    """No print, file, CUDA, process group, argv or environment."""
    done = subprocess.run([sys.executable, "-B", "-c", IMPORT, str(ROOT), "--no-such-flag"], cwd=tmp_path,
                          env={"PATH": os.environ["PATH"], "MATRIX_LR": "nan", "RANK": "0"},
                          capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_errors_folders_are_left_out():
    """They name the machine; what is relative stays."""
    for error, line in (
            (BlockingIOError(11, "busy", "/srv/me/x.bin"), "BlockingIOError: [Errno 11] busy: 'x.bin'"),
            (ValueError("data/x, ./y/z at step:1/20\nand more"), "ValueError: data/x, ./y/z at step:1/20"),
            (RuntimeError("\n/opt/people/me/g++ is missing"), "RuntimeError: g++ is missing")):
        assert train_gpt.brief(error) == line


def test_activations_are_fp32_where_torch_cannot_tell(monkeypatch):
    """Older builds of torch have no get_capabilities."""
    monkeypatch.delattr(train_gpt.torch.cpu, "get_capabilities", raising=False)
    assert train_gpt.Team(load_config({"DEVICE": "cpu"}), {}).dtype is train_gpt.torch.float32
