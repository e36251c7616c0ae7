"""Preflight: what is found out before a run starts. Launchers, machines, names, data as a whole, models and
checkpoints, the plan."""
import itertools
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_gpt
from helpers import (
    DATA, LATER, MANIFEST, SCRIPT, TOY, TRAIN, VAL, cut, edit_manifest, patch,
    rewrite_tokens, run_cli, set_tokenizer, write_shard)
from tools.run import dataset, machine, names, plan, preflight, script, surroundings
from train_gpt import Refused, load_config, preset_config

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {name: text for name, text in TOY.items() if name.lower() in vars(load_config({}))}
CPU = machine.Machine(1, False, torch.device("cpu"), torch.float32, 1 << 40, 2)
GPU = CPU._replace(on_gpu=True, device=torch.device("cuda"), dtype=torch.bfloat16)


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """An empty folder, as the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def call(capsys):
    """Words and an environment -> (exit code, what was printed, what went to stderr). It leaves nothing."""
    def call(*words, **env):
        capsys.readouterr()
        had = sorted(Path(".").rglob("*"))
        code = preflight.main(words, env)
        out, err = capsys.readouterr()
        assert sorted(Path(".").rglob("*")) == had
        return code, out, err
    return call


@pytest.fixture
def refused(call):
    """Calls it and holds it to the contract of a refusal -> the sentence."""
    def refused(*words, **env):
        code, out, err = call(*words, **env)
        assert code == 2 and err.startswith("preflight: ") and err.count("\n") == 1, err
        assert str(Path.cwd()) not in err and "Traceback" not in out + err
        return err
    return refused


# -------------------------------------------------------------------------------- launchers
LONE_TASKS = [
    dict(SLURM_PROCID="1", SLURM_NTASKS="8"),
    dict(SLURM_PROCID="0", SLURM_NTASKS="1", SLURM_STEP_NUM_TASKS="2"),     # a step of an allocation
    dict(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="4"), dict(PMI_RANK="3", PMI_SIZE="4")]


@pytest.mark.parametrize("words", [[], ["--dry-run"]])
@pytest.mark.parametrize("env", LONE_TASKS)
def test_several_tasks_do_not_each_train_alone(env, words, workplace, refused):
    sentence = refused(*words, **SMALL | env)
    assert all(word in sentence for word in ("without RANK and WORLD_SIZE", "torchrun --nproc_per_node"))
    machine.check_launch(env | dict(RANK="0", WORLD_SIZE="1"))  # torchrun or a batch script has set them


@pytest.mark.parametrize("env, missing", [
    (dict(RANK="0"), "WORLD_SIZE"), (dict(WORLD_SIZE="2"), "RANK"), (dict(LOCAL_RANK="0"), "RANK"),
    (dict(RANK="0", LOCAL_WORLD_SIZE="2"), "WORLD_SIZE")])
def test_half_of_a_launch(env, missing, workplace, refused):
    assert f"preflight: {missing} is missing beside {[*env][0]}=" in refused(**SMALL | env)


@pytest.mark.parametrize("text", ["", "x", "1.0", "-1", " 1", "½", "4,2", "9" * 5000, "1\n", "\udcff"])
def test_numbers_of_a_launch(text, workplace, refused):
    assert "must be a whole number" in refused(**SMALL | dict(RANK="0", WORLD_SIZE=text))


@pytest.mark.parametrize("env", [
    {}, dict(SLURM_PROCID="0", SLURM_NTASKS="1"), dict(SLURM_NTASKS="8"),       # salloc: no task of a step
    dict(SLURM_PROCID="0", SLURM_NTASKS="8", SLURM_STEP_NUM_TASKS="1"),
    dict(SLURM_PROCID="0", SLURM_NTASKS="x"),
    dict(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="1"), dict(PMI_RANK="0", PMI_SIZE="")])
def test_one_task_trains(env):
    machine.check_launch(env)


@pytest.mark.parametrize("preset, env, code", [
    ("speedrun", dict(NUM_LAYERS="11"), 2), ("speedrun", dict(NUM_LAYERS="13"), 0),
    ("speedrun", dict(NUM_LAYERS="11", WINDOW_PATTERN="0SSSLSS-SSL"), 0)])
def test_layers_that_num_layers_would_leave_out(preset, env, code, workplace, call):
    """The last of window_pattern, with its long window and value embedding."""
    found, _, err = call(preset, "--dry-run", **env)
    assert found == code and ("window_pattern=" in err) == (code == 2), err


# -------------------------------------------------------------------------------- the machine
WHOLE = 100 * 4096


@pytest.mark.parametrize("own, files, found", [
    ("", {}, WHOLE), ("4:memory:/job\n0::/job\n", {"job/memory.max": "max"}, WHOLE),
    ("0::/job\n", {"job/memory.max": "9000"}, 9000),
    ("0::/job/step\n", {"job/memory.max": "9000", "job/step/memory.max": "max"}, 9000),  # what is above, too
    ("0::/\n", {"memory.max": "8000"}, 8000),       # in a container
    ("0::/../../x\n", {"memory.max": "8000"}, 8000), ("0::/job", {"job/memory.max": str(1 << 62)}, WHOLE)])
def test_limits_of_cgroups(own, files, found, tmp_path, monkeypatch):
    """Of memory; each rank plans with its share of half of it. Of CPUs: test_kinds_of_text.py."""
    (tmp_path / "cgroup").write_text(own)
    for name, text in files.items():
        path = tmp_path / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "sys")
    monkeypatch.setattr(os, "sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 100)
    assert machine.memory_limit() == found
    assert machine.find_machine(load_config(SMALL), {}, 2).free == found // 4


@pytest.fixture
def gpus(monkeypatch):
    """gpus(free, ...): a machine with GPUs that have so many bytes free."""
    def gpus(*free):
        team = SimpleNamespace(on_gpu=True, device=torch.device("cuda:0"), dtype=torch.bfloat16)
        monkeypatch.setattr(machine, "Team", lambda cfg, env: team)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda n: (free[n], 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return gpus


def test_a_rank_for_each_gpu(gpus):
    """Or as many as are asked for. The one with the least memory decides."""
    gpus(70, 50, 60)
    golf = preset_config("golf")
    assert preflight.count_ranks("auto", "golf", False, {}) == 3
    assert machine.find_machine(golf, {}, 3)[:2] == (3, True)
    assert machine.find_machine(golf, {}, 3).free == 50
    with pytest.raises(Refused, match="5 ranks do not divide the 96 sequences"):
        machine.find_machine(golf, {}, 5)
    with pytest.raises(Refused, match="4 ranks for 3 GPUs here"):
        machine.find_machine(golf, dict(RANK="0", WORLD_SIZE="2"), 4)


def test_the_trainer_gets_the_micro_batch_of_a_gpu(gpus, workplace, call):
    """Always on a GPU, where its own choice is another; unless it was given."""
    gpus(80 << 30)
    assert call("SEED=3", **SMALL)[1].endswith("\nnext: train_gpt.py --seed=3 --device-batch-size=16\n")
    assert call("DEVICE_BATCH_SIZE=3", **SMALL)[1].endswith("\nnext: train_gpt.py --device-batch-size=3\n")
    gpus(*[80 << 30] * 8)
    _, out, _ = call("gpt2", "--dry-run")
    assert "world_size:8 device:cuda activations:bfloat16" in out and "collectives: 6727 MB per step" in out
    assert "; no cap, about 2.9 h (estimate)" in out
    assert "; no cap, about 1 min (estimate)" in call("gpt2", "--dry-run", "--iterations=20")[1]


CACHE = "TORCHINDUCTOR_CACHE_DIR"
ODD_FOLDERS = {     # the environment, what the trainer gets instead, what is blamed
    "nothing": (dict(TMPDIR="/scratch/Café-1.2", LOGNAME="jürgen", HOME="a b"), [], []),
    "a cache with a space": ({CACHE: "my cache"}, [CACHE], [CACHE]),
    "a cache with a quote": ({CACHE: '6" disk'}, [CACHE], [CACHE]),
    "a cache that cannot be made": ({CACHE: "/proc/nowhere"}, [CACHE], [CACHE]),
    "an empty cache": ({CACHE: ""}, [CACHE], [CACHE]),
    "a good cache stays": ({CACHE: "cache", "TMPDIR": "/scratch/a b"}, ["TMPDIR"], ["TMPDIR"]),
    "a temporary folder": (dict(TMPDIR="/scratch/it's tmp"), ["TMPDIR"], ["TMPDIR"]),
    "a user": (dict(LOGNAME="J. O'Neil"), ["LOGNAME"], ["the user's name"]),
    "both": (dict(USER="a b", TMPDIR="/scratch/a\tb"), ["TMPDIR", "LOGNAME"], ["TMPDIR", "the user's name"])}


@pytest.mark.parametrize("case", ODD_FOLDERS)
def test_torchs_compiler_gets_folders_that_it_can_use(case, empty):
    """It is told what was to blame; what is set is fine by itself."""
    env, replaced, blamed = ODD_FOLDERS[case]
    if "USER" not in env:
        env = dict(LOGNAME="me") | env
    settings, odd = surroundings.compiler_folders(env)
    assert [*settings] == replaced and odd == blamed
    assert not any(map(surroundings.is_odd, settings.values()))
    assert surroundings.compiler_folders(env | settings) == ({}, [])
    lines = surroundings.for_trainer(env | dict(OMP_NUM_THREADS="1"))[1]
    assert len(lines) == bool(blamed) and all(word in line for line in lines for word in blamed)


def test_threads_are_no_more_than_cpus(monkeypatch):
    monkeypatch.setattr(surroundings, "usable_cpus", lambda: 2)
    monkeypatch.setattr(surroundings, "allowed_cpus", lambda: 16)
    settings, lines = surroundings.for_trainer(dict(LOGNAME="me"))
    assert settings["OMP_NUM_THREADS"] == "2" and len(lines) == 1 and "OMP_NUM_THREADS=2" in lines[0]
    settings, lines = surroundings.for_trainer(dict(LOGNAME="me", OMP_NUM_THREADS="6"))
    assert "OMP_NUM_THREADS" not in settings and lines == []


# -------------------------------------------------------------------------------- names
ORDINARY = """PATH HOME LANG LC_ALL SHELL USER LOGNAME HOSTNAME HOST TERM PWD OLDPWD SHLVL _ TZ TMPDIR TEMP
PAGER MAIL EDITOR LESS XDG_SESSION_ID SSH_CLIENT PYTHONPATH PYTHONHASHSEED VIRTUAL_ENV CONDA_PREFIX PS1
OMP_NUM_THREADS MKL_NUM_THREADS LD_LIBRARY_PATH LD_PRELOAD CUDA_HOME CUDA_VISIBLE_DEVICES NCCL_DEBUG RANK
LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK ROLE_NAME MASTER_ADDR MASTER_PORT TORCH_LOGS
TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCH_HOME TRITON_CACHE_DIR HF_HOME
PYTORCH_CUDA_ALLOC_CONF HF_ENDPOINT HF_TOKEN HF_HUB_OFFLINE TOKENIZERS_PARALLELISM WANDB_API_KEY WANDB_PROJECT
PYTORCH_ALLOC_CONF GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME LOGGER RESTARTS DRY_RUN
SLURM_JOB_ID SLURM_NTASKS SLURM_NODELIST SLURM_STEP_ID RUNNER_OS GITHUB_RUN_ID GITHUB_ACTIONS CI container
HTTPS_PROXY NO_PROXY PYTEST_CURRENT_TEST PYTHON PRESS DEVEL DATA MODEL CC CXX CFLAGS MAKEFLAGS""".split()


def meant(line):
    """The names that a line suggests."""
    return re.findall(r"[A-Z_0-9]{2,}", line.partition("did you mean ")[2])


@pytest.mark.parametrize("preset", train_gpt.RECIPES)
def test_no_warning_of_what_is_right(preset):
    assert names.check_variables(preset, dict.fromkeys([*ORDINARY, *names.constants_of(preset)], "1")) == []


@pytest.mark.parametrize("typo, name", [
    ("MATRIX_RL", "MATRIX_LR"), ("NUM_LAYER", "NUM_LAYERS"), ("SEEED", "SEED"), ("Seed", "SEED"),
    ("matrix_lr", "MATRIX_LR"), ("VAL_TOKEN", "VAL_TOKENS"), ("ITERATIOMS", "ITERATIONS")])
def test_slips(typo, name):
    line, = names.check_variables("tiny", {typo: "1"})
    assert line == f"warning: {typo} in the environment is no constant; did you mean {name}?"


@pytest.mark.parametrize("preset", train_gpt.RECIPES)
def test_no_suggestion_that_the_preset_refuses(preset):
    """Whatever is typed: what other scripts say, and the constants of other presets with a slip."""
    own = names.constants_of(preset)
    everywhere = [name for other in train_gpt.RECIPES for name in names.constants_of(other)]
    typed = [*names.ELSEWHERE, *[f"{name}S" for name in everywhere]]
    for name in typed:
        for line in names.check_variables(preset, {name: "1"}):
            assert {*meant(line)} <= own, line
        with pytest.raises(Refused) as caught:
            names.trainer_flags({"PRESET": preset}, [f"--{name.lower()}=1"])
        flags = re.findall(r"--([a-z0-9-]+)", str(caught.value).partition("did you mean ")[2])
        assert {flag.replace("-", "_").upper() for flag in flags} <= {*own, *names.OF_RUN_SH}


@pytest.mark.parametrize("preset, typed, wanted", [
    ("tiny", "LEARNING_RATE", "--matrix-lr, --embed-lr, --head-lr or --scalar-lr"),
    ("golf", "LR", "--matrix-lr, --tied-embed-lr or --scalar-lr"),
    ("gpt2", "BATCH_SIZE", "--train-batch-tokens or --device-batch-size"),
    ("golf", "MOMENTUM", "--muon-momentum"),
    ("tiny", "N_LAYER", "--num-layers"), ("tiny", "N_EMBD", "--model-dim"), ("golf", "N_HEAD", "--num-heads"),
    ("speedrun", "BLOCK_SIZE", "--train-seq-len"), ("tiny", "MAX_ITERS", "--iterations"),
    ("tiny", "MAX_WALLCLOCK", "--max-wallclock-seconds"), ("tiny", "DRYRUN", "--dry-run"),
    ("tiny", "SCRIP", "--script")])
def test_what_an_argument_probably_means(preset, typed, wanted, refused, empty):
    for word in (f"--{typed.lower()}=1", f"{typed}=1"):
        said = refused(word, PRESET=preset)
        assert said == f"preflight: unknown argument {word[:-2]}: did you mean {wanted}?\n"


@pytest.mark.parametrize("words, said", [
    (["--matrix-l=3"], "--matrix-l: did you mean --matrix-lr?"),
    (["--matrixlr", "3"], "did you mean --matrix-lr?"),
    (["stray"], "unknown argument stray: ./run.sh help lists commands, ./run.sh tiny --help constants"),
    (["golff"], "did you mean golf?"), (["-x"], "unknown argument -x: ./run.sh help lists"),
    (["--"], "unknown argument --: "), ([""], "unknown argument : "), (["--zz=1"], "unknown argument --zz: "),
    (["--local-rank=0"], "--local-rank is a launcher's: start with torchrun --nproc_per_node"),
    (["--nproc_per_node=8"], "which sets RANK, WORLD_SIZE and LOCAL_RANK"),
    (["--master-port=29500"], "--master-port is a launcher's: "), (["--ranks=x"], "--ranks=x must be"),
    (["matrix-lr"], "unknown argument matrix-lr: did you mean --matrix-lr?"),
    (["core"], "core: tiny has no such constant, only gpt2, gpt2_plus"),
    (["--proxy=64"], "tiny has no proxy; these have: golf, "),
    (["--preset=gulf"], "preset='gulf' is none of tiny, golf"),
    (["--seed"], "--seed"), (["--seed", "--compile"], "--seed"),
    (["SEED=x"], "seed='x' must be written like 1337")])
def test_arguments_that_are_refused(words, said, refused, empty):
    assert said in refused(*words)


@pytest.mark.parametrize("words, flags", [
    (["golf", "MATRIX_LR=0.1"], ["--preset=golf", "--matrix-lr=0.1"]),
    (["--seed", "3", "--compile", "--iterations=-5"], ["--seed=3", "--compile", "--iterations=-5"]),
    (["--run_id", "golf", "matrix_lr=1"], ["--run-id=golf", "--matrix-lr=1"]),
    (["RUN_ID=a=b"], ["--run-id=a=b"]), (["speedrun", "PRESET=golf"], ["--preset=speedrun", "--preset=golf"]),
    (["gpt2", "--num-iterations=3"], ["--preset=gpt2", "--num-iterations=3"])])
def test_every_way_to_write_an_argument(words, flags):
    preset, found, lines = names.trainer_flags({}, words)
    presets = [flag.removeprefix("--preset=") for flag in flags if "--preset=" in flag]
    assert found == flags and lines == [] and preset == ["tiny", *presets][-1]


def test_constants_of_other_recipes():
    """A flag is refused, a variable of the environment is warned of: with the presets that have it."""
    for preset, name, owners in (("golf", "CORE", "gpt2, gpt2_plus"), ("gpt2", "BIGRAM_ROWS", ""),
                                 ("tiny", "NUM_KV_HEADS", "")):
        sentence = f"{preset} has no such constant, only {owners}"
        line, = names.check_variables(preset, {name: "0"})
        assert line.startswith(f"warning: {name} in the environment: {sentence}")
        with pytest.raises(Refused, match=sentence):
            names.trainer_flags({}, [preset, f"{name}=0"])


@pytest.mark.parametrize("preset", ["golf", "golf_plus"])
def test_what_the_public_script_of_golf_has_and_golf_does_not_need(preset, refused, empty):
    line = f"EMBED_LR: accepted, as the public script has it; {preset} does not need it"
    assert names.check_variables(preset, dict(EMBED_LR="0.6")) == [line]
    assert names.trainer_flags({}, [preset, "EMBED_LR=0.6"]) == (preset, [f"--preset={preset}"], [line])
    assert names.check_variables(preset, dict(TIE_EMBEDDINGS="1")) != []
    for env, words in ((dict(TIE_EMBEDDINGS="0"), []), ({}, ["TIE_EMBEDDINGS=0"])):
        assert f"TIE_EMBEDDINGS=0: in {preset} it is always 1" in refused(*words, PRESET=preset, **env)


def test_lines_about_names_are_printed(empty, call):
    """Above the plan, which goes on without them."""
    code, out, _ = call("tiny", "--dry-run", LR="0.1", DEVICE="cpu")
    assert code == 0 and out.startswith("warning: LR in the environment is no constant; did you mean MATRIX")


def test_names_are_looked_at_before_anything_else(empty, refused):
    """A slip does not cost a download: neither data nor speed have been looked at."""
    assert "did you mean --dry-run?" in refused("--json", "golf", "--dryrun")
    assert "did you mean --matrix-lr?" in refused("--json", "golf", "--matrx-lr=1")


# -------------------------------------------------------------------------------- data


def set_file(place, **changes):
    edit_manifest(files=lambda files: [f | changes if i == place else f for i, f in enumerate(files)])


def token_512(path):
    """A token outside the vocabulary, between the places at which the trainer looks."""
    tokens = np.fromfile(path, "<u2", offset=1024)
    tokens[5000] = 512
    rewrite_tokens(path, tokens)


def zeros(path, first, count=20_000):
    """So many zeros from this token on."""
    patch(path, 1024 + 2 * first, bytes(2 * count))


# What is done to the data (s: the smaller tokenizer), what the sentence holds, constants
BAD_DATA = {
    "no folder": (lambda s: shutil.rmtree(DATA), ["data/datasets/toy", "./run.sh data --text"]),
    "no embedded corpus": (None, ["get it with `./run.sh data`"], dict(DATA_PATH="data/datasets/embedded")),
    "no sp1024": (None, ["./run.sh data sp1024 -n 80"], dict(DATA_PATH="data/datasets/fineweb10B_sp1024")),
    "a shard is missing": (lambda s: LATER.unlink(), [LATER.name, "is missing", "./run.sh data"]),
    "truncated train shard": (lambda s: cut(TRAIN, 30_001), [TRAIN.name, "14488.5 tokens", "says 44001"]),
    "truncated val shard": (lambda s: cut(VAL, 5_000), [VAL.name, "1988.0 tokens", "says 10745"]),
    "shard with a tail": (lambda s: TRAIN.write_bytes(TRAIN.read_bytes() + b"\0\0"), [TRAIN.name, "44002.0"]),
    "token id in train": (lambda s: token_512(TRAIN), [TRAIN.name, "token 512", "vocab_size is 512"]),
    "val tokens changed": (lambda s: patch(VAL, 1024 + 2 * 500, b"\x03\x00" * 40), [VAL.name, "sha256"]),
    "train tokens changed": (lambda s: patch(LATER, 1024 + 2 * 500, b"\x03\x00" * 40), [
        LATER.name, "sha256"]),
    "three quarters of a shard are zeros": (lambda s: zeros(TRAIN, 11_000, 33_001), [
        TRAIN.name, "./run.sh data"]),
    "some zeros": (lambda s: zeros(TRAIN, 20_000, 100), [TRAIN.name, "sha256"]),
    "zeros, no manifest": (lambda s: (zeros(TRAIN, 16_384), MANIFEST.unlink()), [TRAIN.name, "token"],
                           dict(VOCAB_SIZE="512")),
    "TOKENIZER_PATH of another digest": (
        lambda s: (Path("other.model").write_bytes(s), set_tokenizer(vocab_size=400, path="other.model")),
        ["toy"], dict(TOKENIZER_PATH="other.model", VOCAB_SIZE="512")),
    "tokenizer sha256": (lambda s: set_tokenizer(sha256="0" * 64), ["toy.model", "sha256"]),
    "no tokenizer, no VOCAB_SIZE": (lambda s: MANIFEST.unlink(), ["names no tokenizer: set VOCAB_SIZE"]),
    "val is a train shard, too": (lambda s: edit_manifest(
        files=lambda files: [*files, files[0] | {"split": "train"}]), [VAL.name, "train and a val shard"]),
    "val copied to a train shard": (lambda s: (shutil.copy(VAL, LATER), edit_manifest(files=lambda files: [
        files[0] | {"path": LATER.name, "split": "train"} if file["path"] == LATER.name else file
        for file in files])), [LATER.name, "documents sampled", "are in val"]),
    "val in a train shard": (lambda s: rewrite_tokens(LATER, np.concatenate([
        np.fromfile(TRAIN, "<u2", offset=1024)[:30_000], np.fromfile(VAL, "<u2", offset=1024)])),
        [LATER.name, "documents sampled", "are in val"]),
    "a shard that the manifest does not know": (lambda s: shutil.copy(LATER, DATA / "toy_train_000007.bin"), [
        "toy_train_000007.bin is no train shard by its name or by manifest.json: move it out of toy"]),
    "more tokens than the epochs have": (None, ["819200 train tokens are needed", "max_epochs=2 of 120000"],
                                         dict(MAX_EPOCHS="2", BATCH_SCHEDULE="1,3", ITERATIONS="400")),
    "manifest cut": (lambda s: cut(MANIFEST, 300), ["manifest.json", "./run.sh data"]),
    "a manifest that is a list": (lambda s: MANIFEST.write_text("[1, 2]"), ["manifest.json"]),
    "a file without split": (lambda s: edit_manifest(files=[{"path": "x"}]), ["x is missing"]),
    "a tokenizer of text": (lambda s: edit_manifest(tokenizer="toy.model"), ["manifest.json"]),
    "other token counts": (lambda s: set_file(1, tokens=44_000), [TRAIN.name, "44000"]),
    "a file outside": (lambda s: set_file(1, path="../../../outside.bin"), ["outside.bin is missing"]),
    "val_bytes too small": (lambda s: edit_manifest(val_bytes=lambda n: n - 1), ["val", "toy", "bytes"]),
    "val_bytes zero": (lambda s: edit_manifest(val_bytes=0), ["toy", "val_bytes=0"]),
    "val_bytes in words": (lambda s: edit_manifest(val_bytes="many"), ["toy", "val_bytes='many'"]),
    "hashes are missing": (lambda s: edit_manifest(document_hashes=dict(path="gone.bin", val=3)), [
        "gone.bin"])}


def test_the_toy_dataset_is_fine(workplace, call):
    """What the cases below damage is whole to begin with; preflight leaves nothing behind."""
    code, out, err = call(**SMALL)
    assert code == 0 and err == "" and "data: toy train tokens:120000 in 3 shards, val tokens:10745\n" in out
    assert "warning" not in out and str(workplace) not in out


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data(case, workplace, smaller, refused):
    damage, words, *env = BAD_DATA[case]
    if damage:
        damage(smaller)
    sentence = refused(**SMALL | (env[0] if env else {}))
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize("path", ["", "/", "data/datasets", "x" * 300, "a\nb"])
def test_folders_that_hold_no_data(path, workplace, refused):
    assert "no train and val shards at " in refused(**SMALL | dict(DATA_PATH=path))


def test_a_dataset_by_its_name_and_a_text_are_answered(workplace, refused):
    """As `sample` and `bench` take the name."""
    assert "did you mean DATA_PATH=data/datasets/toy?" in refused(**SMALL | dict(DATA_PATH="toy"))
    Path("mine.txt").write_text("a text")
    said = refused(**SMALL | dict(DATA_PATH="mine.txt"))
    assert "mine.txt --name mine`" in said and "./run.sh data --text" in said


def test_a_plan_shows_what_was_changed(call):
    _, out, _ = call("golf", "MATRIX_LR=0.031", "--dry-run")
    assert "override matrix_lr 0.02 -> 0.031" in out


def test_a_large_dataset_is_sampled_and_that_is_said(workplace, call, refused, monkeypatch):
    """64 places of each shard: its digest is not compared, a hole is still found, and so are tokens beyond
    the vocabulary."""
    monkeypatch.setattr(dataset, "WHOLE_BYTES", 200_000)
    monkeypatch.setattr(dataset, "PLACE_TOKENS", 256)
    code, out, _ = call(**SMALL)
    assert code == 0 and "data: 64 places of each train shard were looked at, not its sha256: " in out
    patch(TRAIN, 1024 + 2 * 9000, b"\x03\x00" * 40)
    assert call(**SMALL)[0] == 0
    zeros(TRAIN, 20_000, 2000)
    assert f"{TRAIN.name} holds nothing but zeros from token " in refused(**SMALL)
    patch(TRAIN, 1024 + 2 * 20_000, b"\x00\x02" * 2000)
    assert f"{TRAIN.name} holds token 512, but vocab_size is 512" in refused(**SMALL)


@pytest.mark.parametrize("both", [0, 1, 3])
def test_documents_in_train_and_val_are_refused(both, workplace, call):
    """By the hashes beside the manifest, where there are any."""
    hashes = np.concatenate([np.arange(4), np.arange(4 - both, 40)])
    hashes.astype("<u8").tofile(DATA / "document_hashes.bin")
    edit_manifest(document_hashes=dict(path="document_hashes.bin", val=4, train=36 + both))
    code, _, err = call(**SMALL)
    assert code == (2 if both else 0)
    assert not both or f"{both} documents of toy are in train and in val: prepare it again" in err


@pytest.mark.parametrize("shared, documents, refused", [(8, 8, False), (9, 180, True), (9, 181, False)])
def test_val_documents_in_train_are_found_without_hashes(shared, documents, refused, empty):
    """At least nine, and at least a twentieth of those looked at."""
    bos = 60_000

    def texts(numbers):
        rows = [[bos, *[2 + number % 90, 2 + number // 90] * 32][:dataset.BEGINNING] for number in numbers]
        return np.array(rows, np.uint16).reshape(-1)

    write_shard("x_train_000000.bin", texts(range(documents)))
    shard = train_gpt.Shard(Path("x_train_000000.bin"), documents * dataset.BEGINNING)
    val = texts([*range(shared), *range(1000, 1100)])
    data = SimpleNamespace(train=[shard], val=val, bos=bos, about=dict(name="x"))
    if not refused:
        return dataset.refuse_val_in_train(data)
    with pytest.raises(Refused, match=f"{shared} of {documents} documents sampled from train shard x_train"):
        dataset.refuse_val_in_train(data)


def test_a_text_that_is_not_the_games(workplace, call):
    """Said, not refused."""
    said = "data: not the text that tiny is scored on (fingerprint abc)\n"
    for wanted, lines in (("", 0), ("toy", 0), ("abc", 1)):
        assert call(**SMALL | dict(DATA_FINGERPRINT=wanted))[1].count(said) == lines


@pytest.mark.parametrize("name, lines", [("fineweb10B_sp1024", 1), ("mine", 0)])
def test_shards_of_a_known_dataset_without_a_manifest(name, lines, workplace, call):
    """They are used, as published ones are, but a download may have been cut short; others are
    their owner's."""
    MANIFEST.unlink()
    folder = DATA.rename(f"data/datasets/{name}")
    code, out, _ = call(**SMALL | dict(DATA_PATH=str(folder), VOCAB_SIZE="512"))
    assert code == 0 and out.count("get it with `./run.sh data sp1024 -n 80` to be sure") == lines


@pytest.mark.parametrize("cap, code", [("0", 2), ("60", 0)])
def test_a_schedule_that_runs_out_of_text(cap, code, workplace, call):
    """Refused where steps end the run; with a cap on time a line says what comes first."""
    env = SMALL | dict(MAX_EPOCHS="1", ITERATIONS="300", BATCH_SCHEDULE="1", MAX_WALLCLOCK_SECONDS=cap)
    found, out, err = call(**env)
    assert found == code and "307200" in out + err and "120000" in out + err
    assert ("warning: max_epochs=1 of this text are 120000 tokens, all steps take 307200: the run ends there "
            "unless the cap ends it first\n" in out) == (code == 0)
    assert call(**env | dict(ITERATIONS="100"))[1].count("max_epochs") == 0


# -------------------------------------------------------------------------------- data that are missing
@pytest.mark.parametrize("preset, commands", [
    ("tiny", [[]]), ("golf", [["sp1024", "-n", "80"]]), ("golf_plus", [["sp8192", "-n", "128"]]),
    ("speedrun", [["gpt2"]]), ("speedrun_plus", [["gpt2"], ["gpt2-vocab"]]),
    ("gpt2", [["fineweb-edu"], ["core"]]), ("gpt2_plus", [["climbmix"], ["core"]])])
def test_what_is_missing_is_fetched(preset, commands, empty, gpus, monkeypatch, refused):
    """For ./run.sh, before anything is planned, and nothing that somebody else's DATA_PATH names."""
    gpus(80 << 30)
    fetched = []
    monkeypatch.setattr(preflight, "fetch", fetched.append)
    path = preset_config(preset).data_path
    for words, env, wanted in ((["--json"], {}, commands), (["--json"], dict(DATA_PATH=path), commands[1:]),
                               ([], {}, [])):
        fetched.clear()
        assert "no train and val shards" in refused(*words, preset, **env)      # nothing has come
        assert fetched == wanted


def test_a_download_that_was_cut_short_is_to_be_completed(workplace):
    """Its shards are there, its manifest is not. With one, and without CORE, nothing is missing."""
    DATA.rename("data/datasets/fineweb_edu")
    cfg = load_config(dict(PRESET="gpt2", CORE="0"))
    assert dataset.missing_data(cfg) == []
    Path("data/datasets/fineweb_edu/manifest.json").unlink()
    assert dataset.missing_data(cfg) == [["fineweb-edu"]]


def test_tasks_of_core_are_looked_at(workplace, refused, call):
    """A plan goes on without them."""
    small = {name: text for name, text in SMALL.items() if name.lower() in vars(preset_config("gpt2"))}
    env = small | dict(PRESET="gpt2", DEPTH="0", TARGET_PARAM_DATA_RATIO="0", NUM_KV_HEADS="0",
                       VOCAB_SIZE="512", CORE_BUNDLE="nowhere", PACKING="rows")
    assert "no CORE tasks at 'nowhere': get them with `./run.sh data core`" in refused(**env)
    code, out, _ = call("--dry-run", **env)
    assert code == 0 and "warning: no CORE tasks at " in out and "stage table" in out


# -------------------------------------------------------------------------------- runs and models
def model_file(path, trained_on=None, **changes):
    """A model of SMALL's shape at path."""
    cfg = train_gpt.replace(load_config(SMALL), vocab_size=512, bos_id=1, **changes)
    shape = {name: value for name, value in vars(cfg).items()
             if type(cfg).__dataclass_fields__[name].metadata["model"]}
    torch.save(dict(shape=shape, tensors={}, data=trained_on), path)
    return path


def identity(folder=DATA):
    return train_gpt.open_data(load_config(SMALL | dict(DATA_PATH=str(folder))), lambda *_: None).about


def test_a_run_that_goes_on_has_no_second_plan(workplace, call):
    """The trainer compares what the checkpoint holds: test_bad_input.py."""
    code, out, _ = call("--resume=first")
    assert code == 0 and out.splitlines() == [
        "resume: first goes on as it began, with the plan in its log", "next: train_gpt.py --resume=first"]


def test_a_model_is_scored_on_its_own_dataset(workplace, call, refused):
    """It is found by its name, and the trainer is told; whether it is the same, the trainer finds out."""
    model_file("a model.pt", identity())
    code, out, _ = call("--eval-from=a model.pt")
    assert code == 0 and "data: data/datasets/toy, which the model was trained on" in out
    assert "stage table" not in out
    assert out.endswith("\nnext: train_gpt.py '--eval-from=a model.pt' --data-path=data/datasets/toy\n")
    code, out, _ = call("--eval-from=a model.pt", DATA_PATH=str(DATA))
    assert code == 0 and "which the model" not in out
    edit_manifest(val_bytes=lambda n: n - 1)
    assert "val bytes, the tokens" in refused(EVAL_FROM="a model.pt")


def test_models_that_do_not_say_what_they_were_trained_on(workplace, call):
    """As those written before this was kept."""
    model_file("old.pt")
    code, out, _ = call(EVAL_FROM="old.pt", DATA_PATH=str(DATA))
    assert code == 0 and "eval_from=old.pt is older than the digests of data" in out


@pytest.mark.parametrize("save_every, times", [("0", 5), ("100", 8)])
def test_a_disk_that_the_run_would_fill(save_every, times, workplace, refused, call, monkeypatch):
    """fp32 weights, artifact, and one or two checkpoints of three times the weights; a plan goes on."""
    cfg = train_gpt.replace(load_config(SMALL), vocab_size=512)
    needed = times * 4 * train_gpt.parameter_counts(cfg).total()
    env = SMALL | dict(SAVE_EVERY=save_every)
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    assert call(**env)[0] == 0
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    assert "the disk of logs/ has " in refused(**env)
    code, out, _ = call("--dry-run", **env)
    assert code == 0 and "warning: the disk of logs/ has " in out


# -------------------------------------------------------------------------------- memory and speed
def fitting(cfg, world_size, sequences):
    """A machine with room for so many sequences at a time."""
    rank = CPU._replace(world_size=world_size)
    return rank._replace(free=plan.step_memory(cfg, rank, sequences) + 1)


@pytest.mark.parametrize("fits, world_size, asked, micro", [
    (99, 1, 0, 12),     # the whole share of a rank
    (99, 2, 0, 6),
    (11, 1, 0, 6),      # the largest divisor that fits
    (5, 1, 0, 4),
    (5, 4, 0, 3),
    (0, 1, 0, 1),       # one sequence at least, whatever the estimate
    (99, 1, 5, 4),      # device_batch_size is obeyed, as far as it divides
    (1, 1, 6, 6),       # ... whatever the estimate
    (99, 3, 99, 4)])
def test_micro_batch(fits, world_size, asked, micro):
    cfg = train_gpt.replace(
        load_config(SMALL), vocab_size=512, train_batch_tokens=12 * 64, device_batch_size=asked)
    needs = [plan.step_memory(cfg, CPU, n) for n in range(13)]
    # weights, gradients and the two moments, in float32
    assert needs[0] >= 16 * plan.parameter_counts(cfg).total()
    assert 0 < needs[0] < needs[1]
    assert needs[12] - needs[0] == pytest.approx(12 * (needs[1] - needs[0]), abs=12)
    assert plan.micro_batch(cfg, fitting(cfg, world_size, fits)) == micro


def test_loops_count_in_flops_and_memory():
    """golf_plus: 11 layers in the first half of the run, 15 passes in the second one."""
    looped = preset_config("golf_plus")
    once = train_gpt.replace(looped, loop_layers=(0,))
    head = 6 * looped.vocab_size * looped.model_dim
    blocks = [plan.flops_per_token(cfg) - head for cfg in (looped, once)]
    assert blocks[0] / blocks[1] == pytest.approx(13 / 11)
    rows = [plan.step_memory(cfg, CPU, 2) - plan.step_memory(cfg, CPU, 1) for cfg in (looped, once)]
    logits = 2 * CPU.dtype.itemsize * looped.vocab_size * looped.train_seq_len
    assert (rows[0] - logits) / (rows[1] - logits) == pytest.approx(15 / 11)


@pytest.mark.parametrize("preset, flops", [
    ("golf", 6 * (16_515_072 + 1024 * 512) + 12 * 9 * 512 * 4096),   # 6 per weight, 12 C T per layer
    ("gpt2", None), ("gpt2_plus", None)])
def test_flops_are_those_of_the_trainer(preset, flops):
    cfg = preset_config(preset)
    cfg = train_gpt.replace(cfg, vocab_size=cfg.vocab_size or 1024)
    assert plan.flops_per_token(cfg) == (flops or train_gpt.flops_per_token(cfg))


@pytest.mark.parametrize("preset", ["golf", "speedrun", "gpt2", "golf_plus"])
def test_a_game_for_gpus_on_a_laptop(empty, refused, call, preset):
    """Refused with what it would take and a way to train something like it, unless the CPU is asked for; a
    plan has a line about it."""
    said = refused("--json", preset)    # before its data are fetched
    assert said.startswith(f"preflight: {preset} is made for GPUs: a step takes ")
    assert f"./run.sh {preset} --proxy" in said and "PRESET=tiny" in said and "DEVICE=cpu" in said
    assert "./run.sh data" in refused(preset, DEVICE="cpu")     # the next thing that is missing
    code, out, _ = call(preset, "--dry-run")
    assert code == 0 and f"warning: {preset} is made for GPUs" in out
    assert "\nstage table: from_step tokens_per_step" in out


def test_a_gpu_may_take_a_minute_a_step():
    gpt2 = preset_config("gpt2")
    assert plan.slow_machine(gpt2, CPU) and not plan.slow_machine(gpt2, GPU)


def test_games_that_fit_a_laptop_are_not_refused(empty, refused):
    """tiny, and README's gpt2 for one: only their data are missing."""
    laptop = dict(PRESET="gpt2", DEPTH="4", TRAIN_SEQ_LEN="256", TRAIN_BATCH_TOKENS="4096", PACKING="rows",
                  VOCAB_SIZE="1024")
    for env in ({}, laptop):
        said = refused(**env)
        assert "GPUs" not in said and "no train and val shards" in said


# -------------------------------------------------------------------------------- the artifact


@pytest.mark.parametrize("preset, logged", [("golf", [15_820_684]), ("golf_plus", [15_967_802, 15_973_467])])
def test_planned_bytes_of_public_logs(preset, logged):
    """Within 0.1 % of the bytes of the records' models, the least and the most of five logs of golf_plus."""
    planned = plan.planned_bytes(preset_config(preset))
    assert planned == pytest.approx(sum(logged) / len(logged), rel=1e-3)


def artifact(text):
    """(bytes of the artifact, of the script, of room) in a plan."""
    words = r"^artifact: (\d+) bytes and (\d+) of code, .* (\d+) bytes (of room|over it) "
    found = re.search(words, text, re.M)
    size, code, room = [int(number) for number in found.groups()[:3]]
    return size, code, room if found[4] == "of room" else -room


def test_the_plan_counts_the_script_that_the_run_will_use(empty, call):
    """golf's own; for others the whole file."""
    size, code, room = artifact(call("golf", "--dry-run")[1])
    assert code == len(script.script("golf", SCRIPT.read_text("utf-8")).encode())
    assert room == 16_000_000 - size - code > 0
    size, code, room = artifact(call("MEMORY=0", "ARTIFACT_BYTES_LIMIT=1000000", "--dry-run")[1])
    assert code == SCRIPT.stat().st_size and room == 1_000_000 - size - code < 0
    assert "it also holds the training text" in plan.artifact_line(preset_config("tiny"), code)


# -------------------------------------------------------------------------------- the plan
@pytest.mark.parametrize("preset, command, parameters, steps", [
    ("tiny", "./run.sh data", None, 100_000), ("golf", "./run.sh data sp1024 -n 80", 17_059_912, 20_000),
    ("golf_plus", "./run.sh data sp8192 -n 128", 35_943_512, 20_000),
    ("speedrun", "./run.sh data gpt2", None, 2160), ("gpt2", "./run.sh data fineweb-edu", None, 12_700),
    ("gpt2_plus", "./run.sh data climbmix", 1_384_122_122, 5568)])
def test_a_dry_run_needs_no_data(preset, command, parameters, steps, empty, call):
    code, text, _ = call(f"--preset={preset}", "--dry-run", "DEVICE=cpu")
    cfg = preset_config(preset)
    cfg = train_gpt.replace(cfg, vocab_size=cfg.vocab_size or 1024)
    total = train_gpt.parameter_counts(cfg).total()
    assert code == 0 and parameters in (None, total) and re.search(rf"\bparameters:{total}\b", text)
    assert cfg.data_path in text and f"`{command}`" in text
    assert re.search(rf"\b{steps} steps\b", text) and f"{plan.planned_tokens(cfg)} tokens" in text


@pytest.mark.parametrize("preset, steps", [
    ("golf", [0]), ("golf_plus", [0, 10_000]), ("speedrun", [0, 700, 707, 1400, 1414, 2120]),
    ("speedrun_plus", [0, 423, 847, 1270]), ("gpt2", [0])])
def test_the_plan_has_a_row_for_each_change_and_no_other(preset, steps):
    rows = [line.split() for line in plan.stage_lines(preset_config(preset)) if line.startswith("   ")]
    assert [int(row[0]) for row in rows] == steps
    assert all(before[1:] != after[1:] for before, after in itertools.pairwise(rows))


def test_the_plan_of_speedrun_plus():
    table = [line.split() for line in plan.stage_lines(preset_config("speedrun_plus"))]
    assert table[0][-3:] == ["doc_len", "next_weights", "prefix_weights"]
    assert table[2] == "423 262144 32768 896 384 1.5200 2048 1,0.5:0 0.25:0".split()


@pytest.mark.parametrize("card, preset, words", [
    ("NVIDIA GeForce RTX 5090", "golf", "record: 600 s at full size on eight H100s, so about 6.3 h on 1 x "),
    ("NVIDIA H200", "gpt2", "record: 8967 s at full size on eight H100s, so about 19.9 h on 1 x NVIDIA H200"),
    ("NVIDIA GeForce RTX 4070", "golf", ""), ("Tesla T4", "golf", ""), ("NVIDIA H200", "tiny", "")])
def test_hours_beside_the_records(card, preset, words, monkeypatch):
    """By the peaks of both; none for an unknown card, one without bf16, a CPU, and tiny."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (12, 0))
    cfg = preset_config(preset)
    assert plan.record_line(cfg, CPU) == ""
    lines = [*plan.plan_lines(train_gpt.replace(cfg, vocab_size=1024), GPU, 1, lambda: 0)]
    found = [line for line in lines if line.startswith("record:")]
    assert len(found) == bool(words) and all(line.startswith(words) for line in found)


# -------------------------------------------------------------------------------- as a program
def test_the_program(workplace, refused):
    """As those start it who start torchrun themselves: from the checkout, or with it on the path."""
    done = run_cli(workplace, "--ranks=2", module="tools.run.preflight", env=SMALL)
    assert (done.code, done.err) == (0, "")
    assert "world_size:2" in done.out and done.out.endswith("\nnext: train_gpt.py\n")
    assert "3 ranks do not divide the 16 sequences" in refused("--ranks=3", **SMALL)
