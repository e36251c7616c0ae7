"""GOLDEN=FOLDER pytest tests/test_golden.py on a folder of other sets: ours with other numbers for tokens,
BOS among them, other names of series, and a batch less. What holds for ours holds for those."""
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import golden_common
import test_golden as entry
from golden_common import OURS
from helpers import ROOT

# Rows of these are tokens
TABLES = re.compile(r"(.*[./])?(tok_emb|embed|lm_head|head|wte|value_embeds\.\d+)(\.weight)?")
TOKENS = re.compile(r"(\w+/)?(tokens|targets)_\d+|packing\.tokens|validation\.(tokens|inputs|row_targets)")
SERIES = {"early": "start", "mid": "between", "late": "last"}


def renamed(text):
    """Names of series, also within names of arrays."""
    return re.sub(r"(?<![\w])(early|mid|late)(?=[./\"]|$)", lambda match: SERIES[match[1]], text)


def relabelled(path, seed):
    """{name: array} of a set of golden/README.md whose tokens have other numbers."""
    sets = np.load(path)
    overrides, packing = (json.loads(str(sets[name])) for name in ("overrides", "packing"))
    V = int(overrides["VOCAB_SIZE"])
    number = np.random.default_rng(seed).permutation(V)
    if "BOS_ID" in overrides:
        overrides["BOS_ID"] = str(number[int(overrides["BOS_ID"])])
    if "bos" in packing:
        packing["bos"] = int(number[packing["bos"]])
    last = max(int(name.removeprefix("tokens_")) for name in sets.files if re.fullmatch(r"tokens_\d+", name))
    found = {}
    for name in sets.files:
        array = sets[name]
        if name in (f"tokens_{last}", f"targets_{last}"):
            continue
        if name.startswith("loss."):
            array = array[:last]
        elif TOKENS.fullmatch(name):
            assert array.max() < V, name
            array = number[array]
        elif TABLES.fullmatch(name) and not name.startswith("artifact") or name == "validation.token_bytes":
            assert len(array) == V, name
            moved = np.empty_like(array)
            moved[number] = array
            array = moved
        elif array.ndim == 0 and array.dtype.kind == "U":
            array = np.array(renamed(str(array)))
        found[renamed(name)] = array
    return found | {"overrides": np.array(json.dumps(overrides)), "packing": np.array(json.dumps(packing))}


def run_golden(folder, *words):
    env = os.environ | {"GOLDEN": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/test_golden.py"]
    done = subprocess.run([*command, *words], cwd=ROOT, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.slow
def test_sets_with_other_tokens(tmp_path):
    """They pass. A set without a recipe and a recipe without a set are skipped, with their names."""
    (tmp_path / "frontier").mkdir()
    np.savez(tmp_path / "frontier" / "other_game.npz", x=0)
    for file in ("speedrun.npz", "gpt2.npz"):
        np.savez(tmp_path / file, **relabelled(OURS / file, seed=3))
    some = "each_set or the_folder or constants or rows or gradients or (losses or updates) and gpt2"
    code, said = run_golden(tmp_path, "-k", some)
    assert code == 0, said
    skipped = {*re.findall(r"\S+\.npz: .*", said)}
    missing = ("golf.npz", "plus/golf_plus.npz", "plus/gpt2_plus.npz", "frontier/speedrun_frontier.npz")
    assert skipped == {"frontier/other_game.npz: no recipe here",
                       *(f"{file}: not in this folder" for file in missing)}


def test_a_folder_without_any_set_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(entry, "GOLDEN", tmp_path)
    with pytest.raises(AssertionError, match="no set of golf.npz"):
        entry.test_the_folder_holds_a_set()


def test_none_of_our_own_sets_may_be_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(golden_common, "GOLDEN", tmp_path)
    for recipe in entry.SETS.values():
        with pytest.raises(AssertionError, match=f"{recipe.FILE} is missing"):
            golden_common.open_set.__wrapped__(recipe)
