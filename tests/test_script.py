"""tools/run/script.py: a script with one recipe trains as the whole file, to the bit, and holds no other."""
import re
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import train_gpt
from helpers import SCRIPT, TOY, load_module, look, slow_but, with_boards
from records.verify.checks import OF_ONE_RUN, environment_of
from tools.run import script

PRESETS = [*train_gpt.RECIPES]
SOME = slow_but(["tiny", "golf"], PRESETS)
# Statements that each script and the whole file may have: 5 % above what they reach
CEILINGS = dict(tiny=2730, golf=1627, golf_plus=2088, speedrun=2247, speedrun_plus=2777, gpt2=2453,
                gpt2_plus=2492)
WHOLE_FILE = 5154
TOY_RUN = dict(
    tiny=dict(MODEL_DIM="32", NUM_HEADS="2", TRAIN_SEQ_LEN="64", TRAIN_BATCH_TOKENS="256", BIGRAM_ROWS="512",
              COUNT_BITS="12", ARTIFACT_KEEP="1000", VAL_LOSS_EVERY="5", DATA_FINGERPRINT=""),
    golf=dict(NUM_LAYERS="5", MODEL_DIM="32", NUM_HEADS="4", NUM_KV_HEADS="2", TRAIN_SEQ_LEN="64",
              TRAIN_BATCH_TOKENS="256", VOCAB_SIZE="512", WARMDOWN_ITERS="4", ARTIFACT_KEEP="1000",
              TOKENIZER_PATH="data/tokenizers/toy.model", VAL_LOSS_EVERY="5"),
    speedrun=dict(MODEL_DIM="32", NUM_HEADS="2", TRAIN_SEQ_LEN="64", TRAIN_BATCH_TOKENS="128",
                  VOCAB_SIZE="512", MAX_DOC_LEN="48", WINDOW_SCHEDULE="16,32,48,64", WINDOW_BLOCK="8",
                  EVAL_WINDOW="96", EVAL_CONTEXT="256", EXTENSION_ITERATIONS="2", VAL_LOSS_EVERY="5"),
    golf_plus=dict(NUM_LAYERS="5", MODEL_DIM="32", NUM_HEADS="4", NUM_KV_HEADS="2", TRAIN_SEQ_LEN="64",
                   TRAIN_BATCH_TOKENS="256", VOCAB_SIZE="512", LOOP_LAYERS="1,2", EMA_DECAY="0.9",
                   GPTQ_BATCHES="2", ARTIFACT_KEEP="1000", EVAL_SLIDING="48", VAL_LOSS_EVERY="5",
                   ARTIFACT_BYTES_LIMIT="0", TOKENIZER_PATH="data/tokenizers/toy.model"),
    speedrun_plus=dict(MODEL_DIM="32", NUM_HEADS="2", QK_DIM="8", TRAIN_SEQ_LEN="64",
                       TRAIN_BATCH_TOKENS="128", VOCAB_SIZE="512", MAX_DOC_LEN="48",
                       DOC_SCHEDULE="24,48,48,48", DC_WINDOW="7",
                       WINDOW_SCHEDULE="16,32,48,64", WINDOW_BLOCK="8", EVAL_WINDOW="96", BIGRAM_ROWS="64",
                       EVAL_CONTEXT="256", EXTENSION_ITERATIONS="2", VAL_LOSS_EVERY="5", FP8="all"),
    gpt2=dict(DEPTH="2", MODEL_DIM="32", NUM_HEADS="2", TRAIN_SEQ_LEN="64", TRAIN_BATCH_TOKENS="256",
              VOCAB_SIZE="512", CORE="0", SCORE_ARTIFACT="1", ARTIFACT_KEEP="1000", VAL_LOSS_EVERY="5"),
    gpt2_plus=dict(DEPTH="4", MODEL_DIM="32", NUM_HEADS="2", TRAIN_SEQ_LEN="64", TRAIN_BATCH_TOKENS="256",
                   VOCAB_SIZE="512", CORE="0", LR_WARMUP_STEPS="2", VAL_LOSS_EVERY="5"))
COMMON = ("COMPILE", "DEVICE", "DTYPE", "DATA_PATH", "VAL_TOKENS", "MAX_WALLCLOCK_SECONDS", "WARMUP_STEPS")

TOY_MODULE = '''"""About."""
# ---------- 1 imports
import os
import sys

# ---------- 2 helpers
LIMIT = 3

def used():  # a comment that stays
    os = LIMIT
    return os

def unused():
    return sys.argv

# what only `unused` needs
HELPER = unused

# ---------- 3 nothing that is reached
class Other:
    pass

# ---------- 4 recipes
class Golf:
    x = used()

RECIPES = dict(golf=Golf, other=Other)

if __name__ == "__main__":
    print(RECIPES)
'''


def whole_text():
    return SCRIPT.read_text(encoding="utf-8")


@cache
def alone(preset):
    return script.script(preset, whole_text())


def test_what_nothing_reaches_is_gone():
    """A local variable of the same name reaches nothing; a banner goes with the last part of its section."""
    text = script.script("golf", TOY_MODULE)
    for gone in ("unused", "HELPER", "Other", "import os", "import sys", "nothing that is reached"):
        assert gone not in text
    for kept in ("LIMIT = 3", "# a comment that stays", "x = used()", "RECIPES = dict(golf=Golf)",
                 "# ---------- 4 recipes", 'if __name__ == "__main__":'):
        assert kept in text
    with pytest.raises(SystemExit, match="gulf"):
        script.script("gulf", TOY_MODULE)


@pytest.mark.parametrize("preset", SOME)
def test_what_stays_is_verbatim_and_all_of_it_is_reached(preset):
    text = alone(preset)
    assert script.without_unreached(text) == text
    known = {*whole_text().splitlines()}
    new = [line for line in text.splitlines() if line not in known]
    assert len(new) == 2 and new[0].startswith('"""train_gpt: ') and new[1].startswith("RECIPES = ")
    assert f"class {train_gpt.RECIPES[preset].__name__}(" in text
    others = [recipe.__name__ for name, recipe in train_gpt.RECIPES.items() if name != preset]
    assert not [name for name in others if f"class {name}(" in text]
    assert ("class NgramCounts" in text) == (preset == "tiny")
    assert all(f"\ndef {name}(" in text for name in ("load_config", "load_model", "log_probs"))
    assert not re.findall(r"Scaled|Proxy|PROXY|_proxy|proxy_", text)
    for name in ("def core_metric", "def depth_dial"):
        assert (name in text) == ("gpt2" in preset)


@pytest.mark.parametrize("preset", with_boards())
def test_who_reads_one_game_reads_one_game(preset):
    """./run.sh script --reach prints what each script has."""
    assert len(script.statement_lines(alone(preset))) <= CEILINGS[preset]


def test_the_whole_file_has_a_ceiling():
    assert len(script.statement_lines(whole_text())) <= WHOLE_FILE


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """preset -> its script, imported once"""
    found = {}

    def module_of(preset):
        if preset not in found:
            path = tmp_path_factory.mktemp(preset) / "train_gpt.py"
            path.write_text(alone(preset), encoding="utf-8")
            found[preset] = load_module(path, f"train_gpt_{preset}")
        return found[preset]

    yield module_of
    for preset in found:
        del sys.modules[f"train_gpt_{preset}"]


@pytest.mark.parametrize("preset", SOME)
def test_it_trains_to_the_same_bits(preset, modules, root, monkeypatch, one_thread):
    monkeypatch.chdir(root)
    env = {name: TOY[name] for name in COMMON} | TOY_RUN[preset] | dict(
        ITERATIONS="8", TRAIN_LOG_EVERY="1", VAL_TOKENS="1024")
    runs = []
    for module, run_id, named in ((train_gpt, "whole", {"PRESET": preset}), (modules(preset), "alone", {})):
        assert module.main([], env | named | {"RUN_ID": f"{preset}_{run_id}"}) == 0
        runs.append(look(Path("logs", f"{preset}_{run_id}")))
    whole, own = runs
    assert own.losses == whole.losses and len(own.losses) >= 8 and own.val_losses == whole.val_losses
    assert own.weights == whole.weights and own.artifact == whole.artifact
    assert own.result["val_bpb"] == whole.result["val_bpb"]
    # what the run logs of its constants makes the same ones again, as does what records take from result.json
    logged = dict(re.findall(r"^config (\w+)=(.*)$", whole.log, re.M))
    again = vars(train_gpt.load_config({name.upper(): text for name, text in logged.items()}))
    assert logged == whole.result["config"] == {name: train_gpt.show(value) for name, value in again.items()}
    remade = vars(train_gpt.load_config(environment_of(whole.result)))
    assert remade | {name: value for name, value in again.items() if name in OF_ONE_RUN} == again
    assert own.result["bytes_code"] == len(alone(preset).encode())


@pytest.mark.parametrize("preset", SOME)
def test_it_knows_its_recipe_alone(preset, modules, tmp_path):
    """Its default preset; another one and a model of another one are refused in a sentence."""
    module = modules(preset)
    assert vars(module.load_config({})) == vars(train_gpt.load_config({"PRESET": preset}))
    other = next(name for name in train_gpt.RECIPES if name != preset)
    with pytest.raises(module.Refused, match=f"'{other}' is none of {preset}"):
        module.load_config({"PRESET": other})
    path = tmp_path / "final_model.pt"
    torch.save({"shape": {"preset": other}, "tensors": {}}, path)
    with pytest.raises(module.Refused, match=f"'{other}' is none of {preset}"):
        module.load_model(path)
