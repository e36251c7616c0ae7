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
from types import MappingProxyType, SimpleNamespace

import pytest

import train_gpt
from data import prepare
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
             "[1]", "1;2", "1,,2", ",", "1,x", "--1", "\U0001f600", "\udcff", "9" * 5000, "a=b")
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


@pytest.mark.parametrize("preset", RECIPES)
def test_a_config_repeats_itself(preset):
    """The preset as it is, and with odd texts."""
    assert logged_again(load_config({"PRESET": preset})) == load_config({"PRESET": preset})
    for text in ("é€", "a=b", "a b/c", "#"):
        cfg = load_config({"PRESET": preset, "TOKENIZER_PATH": text})
        assert logged_again(cfg) == cfg


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
def smallest(rng):
    """Of every game, so that a step takes milliseconds. What costs time or memory is never drawn large: the
    trainer believes who asks for more than a machine holds."""
    heads = rng.choice((1, 2, 4))
    T = rng.choice((2, 8, 32, 64))
    preset = rng.choice([*RECIPES])
    layers = rng.randint(1, 4)
    if preset == "speedrun_plus":       # pairs of heads, layers that name each other
        heads = 2
        layers = 11
    return dict(
        preset=preset, data_path="data/datasets/toy", data_fingerprint="", tokenizer_path="", device="cpu",
        compile=False, vocab_size=0, num_layers=layers, model_dim=16 * heads, num_heads=heads,
        num_kv_heads=rng.choice((0, 1, heads)), value_gate_dim=rng.choice((2, 16)),
        smear_dim=rng.choice((0, 1, 16)),
        train_seq_len=T, batch_schedule=(1,), seq_schedule=(1,), train_batch_tokens=T * rng.randint(1, 4),
        bigram_rows=rng.choice((0, 1, 7, 512)), count_orders=rng.choice(((0,), (1, 3))),
        count_words=rng.choice(((0,), (1, 5))), count_bits=12,
        copy_orders=rng.choice(((0,), (2,))), qk_dim=rng.choice((4, 12)), mudd_dim=rng.choice((1, 8)),
        mudd_gate_dim=rng.choice((1, 8)), bigram_sign_rows=rng.choice((0, 8)), gptq_batches=rng.randint(0, 2),
        loop_layers=rng.choice(((0,), (0, 0), (1, 2), (3, 9))),
        val_tokens=rng.randint(2, 400), iterations=rng.randint(1, 3), extension_iterations=rng.randint(0, 1),
        warmup_steps=rng.randint(0, 2), core=False, core_metric_every=0, depth=0,
        target_param_data_ratio=0.0, target_flops=0.0, max_wallclock_seconds=0.0, eval_from="", resume="")


def drawn_together(rng, preset, T):
    """[constants that only go together]"""
    own = fields_of(RECIPES[preset])
    if preset == "golf":
        return [{}, {}]
    rows = len(RECIPES[preset]().stages())
    n = rng.randint(1, 3) if rows == 1 else rng.choice((1, rows))
    block = rng.choice((1, 1, 2, 16))
    least = own["window_schedule"].metadata["least"] if "window_schedule" in own else 0
    windows = dict(
        window_block=block, eval_window=block * rng.choice((least, 1, 2, 5)),
        window_schedule=tuple(block * rng.choice((least, 1, 2, 3)) for _ in range(n)),
        doc_schedule=tuple(rng.choice((5, 20, 1000)) for _ in range(n)),
        loop_schedule=tuple(rng.choice((0, 1, 3)) for _ in range(n)),
        batch_schedule=tuple(rng.randint(1, 3) for _ in range(rng.choice((1, n)))))
    count = rng.randint(1, 3)
    rates = dict(
        lr_schedule=tuple(round(rng.uniform(0.001, 2), 3) for _ in range(count)),
        lr_switches=(0.0, *sorted(round(rng.random(), 2) for _ in range(count - 1))))
    context = rng.choice((0, 2, T, 2 * T, 100))
    evaluation = {"eval_context": context} | {
        name: rng.choice((0, max(1, context // 4), context))
        for name in ("eval_stride", "eval_sliding")}
    packing = rng.choice(own["packing"].metadata["choices"])
    longer = rng.choice((1, 2)) if packing == "documents" else 1
    lengths = dict(
        packing=packing, shuffle=packing == "rows" and rng.random() < 0.5,
        seq_schedule=(longer,), train_batch_tokens=T * longer * rng.randint(1, 4))
    skips = dict(skip_layers=tuple(sum((sorted(rng.sample(range(7), 2)) for _ in range(count)), [])))
    horizon = rng.choice((dict(iterations=2), dict(target_param_data_ratio=1e-6), dict(target_flops=1.0)))
    return [windows, rates, evaluation, lengths, {} if preset == "speedrun_plus" else skips,
            dict(depth=rng.randint(1, 2), vocab_size=512) | horizon]


RATES = ("matrix_lr", "embed_lr", "head_lr", "tied_embed_lr", "scalar_lr")
DRAWN_FROM = {  # where the whole range of a constant would take too long, refuse most runs or diverge
    "run_id": ("", "a", "a=1,b", "é.", "_-+"),
    "fp8": ("off", "auto-head", "auto-all"), "mlp_mult": (1, 2, 4), "bos_id": (0, 1, 2, 300),
    "vocab_size": (0, 512, 513, 575), "data_path": ("data/datasets/toy/", "data//datasets/toy"),
    "tokenizer_path": ("data/tokenizers/toy.model",), "data_fingerprint": ("", "toy", "é"),
    "core_bundle": ("", "nowhere"), "window_pattern": ("L", "LS", "SSL", "0SL", "S-L", "-", "0"),
    "dc_window": (0, 1, 20), "max_doc_len": (0, 5, 20, 2048), "fp8_head_most": ((0.01, 1.0, 100.0),),
    "value_embed_layers": ((0,), (1,), (1, 2, 0), (9, 1), (0, 3)), "attn_gate_dim": (0, 1, 16),
    "max_wallclock_seconds": (0.0, 1e-6, 1e7), "weight_decay": (0.0, 0.1, 100.0),
    **dict.fromkeys(RATES, (0.0, 1e-6, 0.003, 0.1))}

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
    """A configuration of this number, {constant: value}: the smallest, with many other constants of its
    recipe drawn."""
    rng = random.Random(f"run {number}")
    cfg = smallest(rng)
    preset = cfg["preset"]
    own = fields_of(RECIPES[cfg["preset"]])
    groups = drawn_together(rng, preset, cfg["train_seq_len"])
    elsewhere = {*cfg, *(name for group in groups for name in group)}
    free = [name for name in own if name not in elsewhere or name in DRAWN_FROM]
    if preset == "speedrun_plus":
        free = [name for name in free if name not in TOPOLOGY]
    for name in rng.sample(free, min(len(free), rng.choice((3, 10, 25)))):
        some = [value for value in DRAWN_FROM.get(name, ()) if in_range(own[name], value)]
        if name == "window_pattern":
            some = [value for value in some if not {*value} - {*PATTERNS[preset]}]
        cfg[name] = rng.choice(some) if some else value_of(rng, own[name])
    for group in rng.sample(groups, 2):
        cfg |= group
    if "depth" in own and (cfg["target_flops"] or cfg["target_param_data_ratio"]):
        del cfg["iterations"]
    cfg = {name: value for name, value in cfg.items() if name in own}
    for name, value in cfg.items():
        if not in_range(own[name], value):
            cfg[name] = 512 if name == "vocab_size" else own[name].metadata["least"]
    return cfg


def call_main(argv, env):
    """train_gpt.main -> exit code, out, err, which is one sentence if it failed."""
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = train_gpt.main(argv, env)
    err = err.getvalue()
    assert err == "" if code == 0 else err.startswith("train_gpt: ") and err.count("\n") == 1, err
    return SimpleNamespace(code=code, out=out.getvalue(), err=err)


def check_result(cfg):
    """The only run folder holds a finite loss after all steps, with the constants that were given."""
    folder, = Path("logs").iterdir()
    result = json.loads((folder / "result.json").read_text())
    config = result["config"]
    steps = int(config["iterations"]) + int(config.get("extension_iterations", 0))
    assert math.isfinite(result["val_loss"] or result["val_loss_partial"])
    assert result["steps"] == steps or result["stop_reason"] in ("wallclock_cap", "max_epochs")
    for name in {*cfg} - {"run_id", "bos_id", "vocab_size"}:
        assert config[name] == show(cfg[name]), name


@sample_or_all
def test_configurations_train_as_asked(times, root, monkeypatch):
    monkeypatch.chdir(root)
    codes = Counter()
    for case in range(10 * times if times > 1 else 5):
        cfg = drawn_run(case)
        argv, env = spelled(random.Random(case), {name: show(value) for name, value in cfg.items()})
        print(f"drawn_run({case}): {argv} {env}")
        done = call_main(argv, env)
        codes[done.code] += 1
        if done.code == 0:
            check_result(cfg)
        elif done.code == 1:
            assert "learning rates" in done.err
        else:
            words = (*KNOWN, "val split", "train split", "train tokens")
            assert any(word in done.err for word in words), done.err
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
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = prepare.main([str(word) for word in words])
    assert err.getvalue().count("prepare: ") == (1 if code else 0), err.getvalue()
    return code, err.getvalue()
