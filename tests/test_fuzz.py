"""Fuzz, seeded: random configurations are refused or train as asked; random corpora are prepared so that
every document decodes to itself.

By default a sample; `-m fuzz` runs many times as many cases. A case comes from its number alone: what a
failed test printed last, as `drawn_run(7)`, repeats it.
"""
import contextlib
import io
import json
import math
import random
import re
import shutil
from collections import Counter
from pathlib import Path
from types import MappingProxyType

import pytest

import train_gpt
from data import prepare
from helpers import toy_of
from test_faults import PLAIN, STAGES
from test_plus import GAMES
from test_prepare import ALPHABETS, read_documents
from train_gpt import RECIPES, Refused, load_config, show

pytestmark = [pytest.mark.fuzz, pytest.mark.usefixtures("one_thread")]
sample_or_all = pytest.mark.parametrize("times", [
    pytest.param(1, id="sample"), pytest.param(60, id="all", marks=pytest.mark.slow)])


def fields_of(recipe):
    """{name: Field} of its constants, but for the one that trains nothing."""
    return {f.name: f for f in train_gpt.fields(recipe) if f.name != "dry_run"}


KNOWN = {name: f for recipe in RECIPES.values() for name, f in fields_of(recipe).items()}

# -------------------------------------------------------------------------------- load_config, on any texts
JUNK_TEXT = ("", " ", "x", "nan", "inf", "-1", "-5", "0", "1.5", "1e3", "1e999", "1 2", "0x10", "½", "−1",
             "é€", "#", "[1]", "1;2", "1,,2", ",", "1,x", "--1", "\U0001f600", "\udcff", "9" * 5000, "a=b")
OTHER_WORDS = ("--zzz=1", "golf", "-x", "--", "---", "--matrx-lr=0.1", "=", "", "--=1", "--a\nb=1", "\udcff")


def value_of(rng, f):
    """A value of the type and range of a constant: at the ends, near them, the default, or anywhere."""
    default = f.default
    limits = f.metadata
    least = limits["least"]
    most = limits["most"]
    if isinstance(default, bool):
        return rng.random() < 0.5
    if isinstance(default, int):
        return int(rng.choice((least, least + 1, 2, 3, default, most)))
    if isinstance(default, float):
        between = math.exp(rng.uniform(math.log(max(least, 1e-6)), math.log(most)))
        return float(rng.choice((least, default, most, between, between)))
    if isinstance(default, tuple) and default and not isinstance(default[0], str):
        numbers = [rng.choice((least, min(most, 2), most)) for _ in range(rng.randint(1, 3))]
        return tuple(map(type(default[0]), numbers))
    return rng.choice(limits["choices"] or [default])


def spelled(rng, texts):
    """{constant: text} -> (argv, env), each on one of the ways."""
    argv = []
    env = {}
    for name, text in texts.items():
        flag = "--" + name.replace("_", "-")
        if rng.random() < 0.5:
            env[name.upper()] = text
        elif text.startswith("-") or rng.random() < 0.5:
            argv.append(f"{flag}={text}")
        else:
            argv += [flag, text]
    return argv, env


def given(number):
    """argv and env of this number: a few constants, of which some are out of range, no such thing or another
    recipe's."""
    rng = random.Random(f"given {number}")
    texts = {"preset": rng.choice([*RECIPES])} if rng.random() < 0.7 else {}
    own = fields_of(RECIPES[texts.get("preset", next(iter(RECIPES)))])
    for name in rng.sample([*(own if rng.random() < 0.8 else KNOWN)], rng.randint(1, 5)):
        texts[name] = show(value_of(rng, own.get(name, KNOWN[name])))
        if rng.random() < 0.2:
            texts[name] = rng.choice(JUNK_TEXT)
    argv, env = spelled(rng, texts)
    if rng.random() < 0.1:
        argv.append(rng.choice(OTHER_WORDS))
    return argv, env | rng.choice(({}, {"PATH": "x", "MATRIXLR": "junk", "a": "\udcff", "HTTP_PROXY": ""}))


def logged_again(cfg):
    """The Config that the lines make which a run logs of another one; records read them like this."""
    log = "".join(f"config {name}={show(value)}\n" for name, value in vars(cfg).items())
    lines = re.findall(r"^config (\w+)=(.*)$", log, re.M)
    assert [name for name, _ in lines] == [*vars(cfg)]
    return load_config({name.upper(): text for name, text in lines})


@sample_or_all
def test_load_config_takes_any_texts(times):
    """It returns a Config that its own constants, written down, make again, or it names what is wrong."""
    outcomes = Counter()
    for case in range(200 * times):
        argv, env = given(case)
        print(f"given({case}): {argv} {env}")
        try:
            cfg = load_config(MappingProxyType(env), argv)
        except Refused as refusal:
            named = "argument" in str(refusal) or any(name in str(refusal) for name in KNOWN)
            assert named or any(word in str(refusal) for word in argv), refusal
            outcomes["refused"] += 1
            continue
        assert type(cfg) is RECIPES[cfg.preset] and logged_again(cfg) == cfg
        outcomes["accepted"] += 1
    assert 5 * min(outcomes["accepted"], outcomes["refused"]) > outcomes.total()


# -------------------------------------------------------------------------------- configurations that train
NO_DIAL = dict(DEPTH="0", TARGET_PARAM_DATA_RATIO="0", CORE="0")
FEW = dict(ITERATIONS="2", VAL_TOKENS="300", SAVE_EVERY="0", VAL_LOSS_EVERY="0")
# Of every game, so that a step takes milliseconds. What costs time or memory is never drawn large: the
# trainer believes who asks for more than a machine holds.
SMALLEST = GAMES | {
    "tiny": PLAIN, "golf": toy_of("golf"), "speedrun": STAGES, "gpt2": toy_of("gpt2", **NO_DIAL),
    "speedrun_plus": GAMES["speedrun_plus"] | dict(FP8="off", TRAIN_BATCH_TOKENS="64")}


RATES = ("matrix_lr", "embed_lr", "head_lr", "tied_embed_lr", "scalar_lr")
DRAWN_FROM = {  # where the whole range of a constant would take too long, refuse most runs or diverge
    "run_id": ("", "a", "a=1,b", "é.", "_-+"),
    "fp8": ("off", "auto-head", "auto-all"), "mlp_mult": (1, 2, 4), "bos_id": (0, 1, 2, 300),
    "vocab_size": (0, 512, 513, 575), "data_path": ("data/datasets/toy/", "data//datasets/toy"),
    "tokenizer_path": ("data/tokenizers/toy.model",), "data_fingerprint": ("", "toy", "é"),
    "core_bundle": ("", "nowhere"), "window_pattern": ("L", "LS", "SSL", "0SL", "S-L", "-", "0"),
    "dc_window": (0, 1, 20), "max_doc_len": (0, 5, 20, 2048), "fp8_head_most": ((0.01, 1.0, 100.0),),
    "value_embed_layers": ((0,), (1,), (1, 2, 0), (9, 1), (0, 3)), "attn_gate_dim": (0, 1, 16),
    "num_layers": (1, 2, 3, 4), "num_heads": (1, 2, 4), "num_kv_heads": (0, 1, 2),
    "train_seq_len": (2, 32, 64), "train_batch_tokens": (64, 256, 320), "val_tokens": (2, 100, 399),
    "iterations": (1, 2, 3),
    "extension_iterations": (0, 1), "warmup_steps": (0, 1, 2), "bigram_rows": (0, 1, 7, 512),
    "count_orders": ((0,), (1, 3)), "count_words": ((0,), (1, 5)), "count_bits": (12,),
    "copy_orders": ((0,), (2,)), "qk_dim": (4, 12), "mudd_dim": (1, 8), "mudd_gate_dim": (1, 8),
    "bigram_sign_rows": (0, 8), "gptq_batches": (0, 1, 2), "loop_layers": ((0,), (0, 0), (1, 2), (3, 9)),
    "loop_schedule": ((0,), (0, 1), (3, 1)), "value_gate_dim": (2, 16), "smear_dim": (0, 1, 16),
    "window_block": (1, 2), "window_schedule": ((0,), (16,), (2, 4), (4, 8, 8, 16)),
    "eval_window": (0, 2, 32),
    "doc_schedule": ((20,), (5, 20, 20, 1000)), "batch_schedule": ((1,), (3,), (1, 2)),
    "seq_schedule": ((1,), (2,)), "stage_starts": ((), (0.0, 0.5)), "lr_schedule": ((1.5,),),
    "lr_switches": ((0.0,),), "eval_context": (0, 2, 64, 100), "eval_stride": (0, 1, 16),
    "eval_sliding": (0, 2, 64), "skip_layers": ((0,), (0, 1), (1, 3, 0, 5)), "depth": (0, 1),
    "target_flops": (0.0, 1.0), "target_param_data_ratio": (0.0, 1e-6), "next_targets": (1, 3),
    "max_wallclock_seconds": (0.0, 1e-6, 1e7), "weight_decay": (0.0, 0.1, 100.0),
    **dict.fromkeys(RATES, (0.0, 1e-6, 0.003, 0.1))}

ELSEWHERE = {"core_metric_every", "eval_from", "resume"}     # they need more than a Config
PATTERNS = dict(tiny="LS-", speedrun="LS-0", gpt2="LS", gpt2_plus="LS")     # kinds of layers
# Numbers of layers, which name each other; test_speedrun_plus.py says what is refused
TOPOLOGY = {"window_pattern", "value_embed_layers", "xsa_layers", "head_gate_layers", "skip_layers",
            "attn_source", "gate_layer"}


def in_range(f, value):
    """Does a constant take this number or choice?"""
    if isinstance(value, (int, float)):
        return f.metadata["least"] <= value <= f.metadata["most"]
    return not f.metadata["choices"] or value in f.metadata["choices"]


def drawn_run(number):
    """A configuration of this number, {constant: text}: the smallest, with many other constants of its recipe
    drawn."""
    rng = random.Random(f"run {number}")
    preset = rng.choice([*RECIPES])
    own = fields_of(RECIPES[preset])
    texts = {name.lower(): text for name, text in (SMALLEST[preset] | FEW).items()}
    texts = {name: text for name, text in texts.items() if name in own} | {"preset": preset}
    free = [name for name in own if name in DRAWN_FROM or name not in {*texts} | ELSEWHERE]
    if preset == "speedrun_plus":
        free = [name for name in free if name not in TOPOLOGY]
    for name in rng.sample(free, min(len(free), rng.choice((3, 10, 25)))):
        some = [value for value in DRAWN_FROM.get(name, ()) if in_range(own[name], value)]
        if name == "window_pattern":
            some = [value for value in some if not {*value} - {*PATTERNS[preset]}]
        texts[name] = show(rng.choice(some) if some else value_of(rng, own[name]))
    return texts


def called(function, *args):
    """(exit code, stderr) of a program's main()."""
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        code = function(*args)
    return code, err.getvalue()


def check_result(argv, env):
    """The only run folder holds a finite loss after all steps, with the constants that were given."""
    folder, = Path("logs").iterdir()
    result = json.loads((folder / "result.json").read_text())
    asked = load_config(env, argv)
    assert math.isfinite(result["val_loss"] or result["val_loss_partial"])
    assert result["steps"] == train_gpt.total_steps(asked) or result["stop_reason"] in (
        "wallclock_cap", "max_epochs")
    for name, value in vars(asked).items():
        assert name in ("run_id", "bos_id", "vocab_size") or result["config"][name] == show(value), name


@sample_or_all
def test_configurations_train_as_asked(times, root, monkeypatch):
    monkeypatch.chdir(root)
    codes = Counter()
    for case in range(10 * times if times > 1 else 5):
        argv, env = spelled(random.Random(case), drawn_run(case))
        print(f"drawn_run({case}): {argv} {env}")
        code, err = called(train_gpt.main, argv, env)
        codes[code] += 1
        assert err == "" if code == 0 else err.startswith("train_gpt: ") and err.count("\n") == 1, err
        if code == 0:
            check_result(argv, env)
        elif code == 1:
            assert "learning rates" in err
        else:
            words = (*KNOWN, "val split", "train split", "train tokens")
            assert any(word in err for word in words), err
            assert not Path("logs").exists()
        shutil.rmtree("logs", ignore_errors=True)
    if times > 1:       # else too few for shares
        assert codes[0] * 2 > codes.total() and codes[1] * 5 < codes.total(), codes
    assert codes[0] > 1, codes


# -------------------------------------------------------------------------------- corpora
LETTERS = [*ALPHABETS, "etaoin shrdlu", "日本語一二三。", "0123456789.,- ", "\t\n", " ", "e", "中" * 30 + " ",
           "".join(map(chr, range(0x4E00, 0x5200)))]


def drawn_corpus(number):
    """(texts, vocabulary) of this number: from a few alphabets, in which any letter may be rare."""
    rng = random.Random(f"corpus {number}")
    letters = [*dict.fromkeys("".join(rng.sample(LETTERS, rng.randint(1, 3))))]
    weights = [rng.choice((1, 1, 10, 1000, 0.001)) for _ in letters]
    number_of_words = rng.choice((3, 30, 300))
    words = ["".join(rng.choices(letters, weights, k=rng.randint(1, 8))) for _ in range(number_of_words)]
    texts = []
    for _ in range(rng.choice((2, 12, 40, 150))):
        size = rng.choice((1, 5, 80))
        texts.append(rng.choice(("", " ", "\n")).join(rng.choices(words, k=size)))
    if rng.random() < 0.3:
        texts.append("".join(rng.choices("".join(LETTERS), k=50)))      # what the others may lack
    vocab_size = rng.choice((1, 259, 260, 261, 262, 270, 300, 400, 1024, 5000, 65_537))
    return texts, vocab_size


@sample_or_all
def test_corpora_decode_to_themselves(times, tmp_path):
    """Every document of both splits, but for what of a train document stands in val. What is refused is
    refused in a sentence of ours, and the sizes that it names are possible."""
    outcomes = Counter()
    for case in range(12 * min(times, 40)):
        texts, vocab_size = drawn_corpus(case)
        print(f"drawn_corpus({case}): {len(texts)} texts, {vocab_size}")
        folder = tmp_path / str(case)
        folder.mkdir()
        path = folder / "x.jsonl"
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        command = ["--text", path, "--name", "toy", "--out", folder]
        code, said = prepared([*command, "--vocab-size", vocab_size])
        while code == 2 and (possible := re.search(r"possible size is (\d+)", said)):
            outcomes["another size"] += 1
            assert outcomes["another size"] <= 2 * (case + 1)
            code, said = prepared([*command, "--vocab-size", possible[1]])
        outcomes[code] += 1
        if code == 0:
            outcomes["cut"] += check_kept(folder, {*texts} - {""})
        else:
            assert code == 2 and "INTERNAL" not in said
            reasons = ("65536", "leave nothing for train", "leaves no document", "no text", "too little")
            assert any(reason in said for reason in reasons), said
            assert not (folder / "datasets/toy").exists()
        shutil.rmtree(folder)
    assert outcomes[0] > outcomes[2] and 4 * outcomes["cut"] < outcomes[0], outcomes


def check_kept(folder, wanted):
    """Both splits have these documents; of some in train parts are left out, which the manifest counts -> are
    there any?"""
    manifest = json.loads((folder / "datasets/toy/manifest.json").read_text())
    found = [text for split in ("val", "train") for text in read_documents(folder, "toy", split)]
    cut = manifest["dropped"]["val_bytes_in_train"]
    if not cut:
        assert sorted(found) == sorted(wanted)
        return False
    assert all(text in wanted or any(text in whole for whole in wanted) for text in found)
    assert len(found) == len({*found}) and {*read_documents(folder, "toy", "val")} <= wanted
    sizes = [sum(len(text.encode()) for text in texts) for texts in (wanted, found)]
    assert sizes[0] - sizes[1] == cut or manifest["dropped"]["duplicate_documents"]
    return True


def prepared(words):
    """(exit code, stderr) of prepare.py with these words."""
    code, err = called(prepare.main, [str(word) for word in words])
    assert err.count("prepare: ") == (1 if code else 0), err
    return code, err
