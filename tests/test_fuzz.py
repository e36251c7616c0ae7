"""Fuzz, seeded: random configurations are refused or train; mutated files are refused or change nothing.

By default a sample; `-m faults` runs all of it. Each case comes from its number alone, so that a finding is
repeated by `draw(number)` or `MUTATIONS[...]` with `random.Random(...)` of the words in its report.
"""
import contextlib
import faulthandler
import gc
import io
import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import sys
import warnings
import zlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece as spm
import torch

import helpers
import train_gpt
from helpers import TOY, fake_team, run_cli
from train_gpt import ALIASES, FIELDS, PRESETS, Refused, show

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("one_thread")]

SEED = 20
CONFIGURATIONS, MUTATED = 2000, 500     # of the full run
SAMPLE_CONFIGURATIONS, SAMPLE_MUTATED = 120, 60
SECONDS = 60        # for one case: a hang fails
KNOWN = ("a\nb", "--a\nb=1")      # texts left out of the draw: what they are refused with is no one line


# -------------------------------------------------------------------------------- running a case
class Hang(BaseException):
    """What main would not catch."""


@contextlib.contextmanager
def limited(seconds=SECONDS):
    """A case that takes longer fails; one that does not even take the signal ends the process."""
    def late(*_):
        raise Hang(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    faulthandler.dump_traceback_later(3 * seconds, exit=True, file=sys.__stderr__)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def folders():
    return set(Path("logs").iterdir()) if Path("logs").is_dir() else set()


def call_main(argv, env):
    """train_gpt.main -> code, out, err, the run folders that are new, and warnings, which go to stderr."""
    had, out, err = folders(), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), limited(), \
            warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        code = train_gpt.main(argv, env)
    told = [str(w.message) for w in told if not issubclass(w.category, (ResourceWarning, DeprecationWarning))]
    return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue(), new=sorted(folders() - had),
                           warnings=told)


def complaint(done):
    """What a call that failed did wrong, beyond its exit code: "" or a few words."""
    lines = done.err.splitlines()
    if "Traceback" in done.err + done.out:
        return "a traceback"
    if len(lines) != 1 or not lines[0].startswith("train_gpt: ") or len(lines[0]) < 20:
        return f"{len(lines)} lines on stderr instead of one sentence"
    if str(Path.cwd()) in done.err and str(Path.cwd()) not in " ".join(done.given):
        return "a machine's path"
    return ""


def summary(error):
    return re.sub(r"\s+", " ", error)[-600:]


# -------------------------------------------------------------------------------- configurations
# The smallest of each game: what every draw lays over its preset, so that a step takes milliseconds. Never
# drawn large, because the trainer takes at its word whoever asks for more than a machine can hold or a life
# is long, and only --dry-run tells: layers, widths, sequences, batches and their multiples, bigram rows,
# iterations, warm-up steps, sample tokens, val tokens over short strides. Those are drawn large in dry runs.
def base(rng):
    heads = rng.choice((1, 2, 2, 4))
    T = rng.choice((2, 8, 16, 32, 64, 128))
    return dict(
        data_path="data/datasets/toy", data_fingerprint="", tokenizer_path="", device="cpu", dtype="float32",
        compile=False, fp8="off", vocab_size=0, num_layers=rng.randint(1, 4),
        model_dim=heads * rng.choice((4, 8, 16)), num_heads=heads,
        num_kv_heads=rng.choice([0, *(n for n in (1, 2, 4) if heads % n == 0)]), train_seq_len=T,
        train_batch_tokens=T * rng.randint(1, 4), bigram_rows=rng.choice((0, 1, 7, 512, 4096)),
        val_tokens=rng.randint(2, 600), iterations=2, extension_iterations=0, max_wallclock_seconds=0.0,
        warmup_steps=rng.choice((0, 1, 2)), sample_tokens=rng.randint(0, 3), core=False, depth=0,
        target_param_data_ratio=0.0, batch_schedule=(1,))


def uniform(low, high):
    return lambda rng, _: rng.choice((low, high, rng.uniform(low, high), rng.uniform(low, high)))


def scale(low, high, *others):
    """Of numbers whose logarithm counts, and some more."""
    return lambda rng, _: rng.choice((low, high, *others, *(
        math.exp(rng.uniform(math.log(low), math.log(high))) for _ in range(4))))


def among(*values):
    return lambda rng, _: rng.choice(values)


def boolean(rng, _):
    return rng.random() < 0.5


def windows(rng, _):
    block, n = rng.choice((1, 1, 2, 8, 16, 128)), rng.randint(1, 3)
    return dict(window_block=block, eval_window=block * rng.choice((0, 1, 2, 5)),
                window_schedule=tuple(block * rng.choice((0, 1, 2, 3)) for _ in range(n)),
                batch_schedule=tuple(rng.randint(1, 3) for _ in range(rng.choice((1, n)))))


def lr_stages(rng, _):
    n = rng.randint(1, 3)
    return dict(lr_schedule=tuple(round(rng.uniform(0, 2), 3) for _ in range(n)),
                lr_switches=(0.0, *sorted(round(rng.random(), 2) for _ in range(n - 1))))


def by_depth(rng, _):
    """One of the horizons, each of a step or a few."""
    horizon = rng.choice((dict(), dict(target_param_data_ratio=1e-6, iterations=None),
                          dict(target_flops=1.0, iterations=None)))
    return dict(depth=rng.randint(1, 3), vocab_size=512, matrix_lr=0.02) | horizon


def evaluation(rng, cfg):
    context = rng.choice((0, 1, 2, cfg["train_seq_len"], 2 * cfg["train_seq_len"], 100))
    return dict(eval_context=context, eval_stride=rng.choice((0, max(1, context // 4), context)))


def skips(rng, _):
    pairs = [sorted(rng.sample(range(7), 2)) for _ in range(rng.randint(1, 3))]
    return dict(skip_layers=rng.choice(((0,), tuple(sum(pairs, [])))))


RATE = scale(1e-6, 0.1, 0.0)
HOT = ("matrix_lr", "embed_lr", "head_lr", "tied_embed_lr", "scalar_lr", "weight_decay",
       "tied_embed_init_std", "batch_lr_power", "lr_schedule")      # with the most of it a run may diverge
# What is drawn for each constant that is not in base(), or for several that go together
TAME = {
    "run_id": lambda rng, _: f"{rng.choice(('a', 'a=1,b', 'é.', '_-+'))}{rng.randrange(10**9)}",
    "seed": among(0, 1, 42, 2**31 - 1), "device": among("cpu", "cpu", "auto"),
    "dtype": among("auto", "float32", "bfloat16"), "fp8": among("off", "head", "all", "auto-head", "auto-all"),
    "save_every": among(0, 1, 2, 5, 10**12), "save_every_seconds": scale(1e-6, 1e7, 0.0),
    "sample_every": among(0, 1, 2, 3), "sample": among("", "a", "|", "a|b||c", "def f(x):", "é\U0001f600\t", " "),
    "sample_temperature": scale(1e-6, 10.0, 0.0), "sample_top_k": among(0, 1, 5, 512, 65_536),
    "train_log_every": among(0, 1, 2, 50, 10**12), "val_loss_every": among(0, 1, 2, 10**12),
    "artifact_bytes_limit": among(0, 1, 10**6, 16 * 10**6, 10**12), "score_artifact": boolean,
    "data_path": among("data/datasets/toy/", "./data/datasets/../datasets/toy", "data//datasets/toy"),
    "tokenizer_path": among("", "data/tokenizers/toy.model"),
    "data_fingerprint": among("", "toy", "x" * 64, "é"), "shuffle": boolean, "max_epochs": among(0, 1, 2, 9),
    "device_batch_size": among(0, 1, 2, 3, 4, 8, 10**12), "val_batch_size": among(1, 64, 4096, 10**12),
    "val_tokens": among(0, 2, 3, 64, 500), "evaluation": evaluation,
    "core_bundle": among("", "nowhere", "data"), "core_metric_max_per_task": among(0, 1, 10**12),
    "by_depth": by_depth, "plan_mfu": uniform(0.001, 1.0), "vocab_size": among(0, 512, 513, 575),
    "max_doc_len": among(0, 1, 2, 8, 64, 2048, 10**12), "bos_id": among(0, 1, 1, 2, 300),
    "num_layers": among(1, 2, 5, 8), "mlp_mult": among(1, 2, 4, 8), "tie_embeddings": boolean,
    "logit_softcap": scale(0.1, 1e4, 0.0), "qk_gain_init": scale(1e-3, 100.0, 0.0),
    "attn_scale": scale(1e-3, 100.0, 0.0), "key_offset": boolean,
    "attn_gate_dim": lambda rng, cfg: rng.randint(0, cfg["model_dim"]),
    "smear_dim": lambda rng, cfg: rng.randint(0, cfg["model_dim"]), "rope_base": scale(0.1, 1e9, 0.0),
    "rope_fraction": uniform(0.0, 1.0), "rope_yarn": boolean, "residual_mix": boolean, "layer_scale": boolean,
    "unet_skips": boolean, "skips": skips, "backout_layer": among(0, 1, 2, 3, 1000),
    "value_embed_layers": lambda rng, _: tuple(rng.choice((0, 1, 2, 3, 9)) for _ in range(rng.randint(1, 5))),
    "window_pattern": lambda rng, _: "".join(rng.choice("LLSS0-") for _ in range(rng.randint(1, 5))),
    "windows": windows, "matrix_lr": RATE, "embed_lr": RATE, "head_lr": RATE, "tied_embed_lr": RATE,
    "scalar_lr": RATE, "tied_embed_init_std": scale(1e-4, 1.0, 0.0),
    "muon_momentum": uniform(0.0, 0.9999), "muon_momentum_warmup_start": uniform(0.0, 0.9999),
    "muon_momentum_warmup_steps": among(0, 1, 2, 300, 10**12),
    "muon_momentum_cooldown_steps": among(0, 1, 2, 50, 10**12),
    "orthogonalization": among("newton_schulz", "polar_express"), "muon_backend_steps": among(1, 2, 5, 20),
    "normuon_beta2": uniform(0.0, 0.9999), "weight_decay": scale(1e-3, 100.0, 0.0),
    "beta1": uniform(0.0, 0.9999), "beta2": uniform(0.0, 0.99999), "adam_eps": scale(1e-20, 1.0),
    "adam_every": among(1, 1, 2, 3, 1000), "grad_clip_norm": scale(1e-6, 1e6, 0.0),
    "iterations": among(1, 2, 3), "extension_iterations": among(0, 1, 2),
    "max_wallclock_seconds": among(0.0, 1e-6, 30.0, 1e7), "warmup_steps": among(0, 1, 3),
    "warmdown_iters": among(0, 1, 2, 300, 10**12), "warmdown_frac": uniform(0.0, 1.0),
    "lr_floor": uniform(0.0, 1.0), "batch_lr_power": uniform(0.0, 2.0), "lr_stages": lr_stages,
    # drawn by base() or draw() alone
    **dict.fromkeys(("preset", "compile", "dry_run", "eval_from", "resume", "core", "core_metric_every"))}
GROUPS = {"evaluation": ("eval_context", "eval_stride"), "skips": ("skip_layers",),
          "by_depth": ("depth", "target_param_data_ratio", "target_flops"),
          "windows": ("window_block", "eval_window", "window_schedule", "batch_schedule"),
          "lr_stages": ("lr_schedule", "lr_switches")}
JUNK_TEXT = ("", " ", "x", "nan", "1 2", "0x10", "½", "−1", "True", "None", "[1]", "1;2", "1,,2", ",", "--1", "1e", "😀",
             "\udcff", "9" * 5000, "a\nb")
FEATURES = dict(    # settings that break one rule each, on top of base()
    run_id=("a/b", "..", ".", " ", "/x", "a b", "-a", "=", "a\n", "a\\b", "%s"),
    heads=(dict(num_heads=3), dict(num_heads=4096), dict(model_dim=2, num_heads=2), dict(model_dim=37)),
    kv=(dict(num_heads=2, num_kv_heads=4), dict(num_heads=4, num_kv_heads=3, model_dim=32)),
    gates=(dict(smear_dim=65_536), dict(attn_gate_dim=65_536)),
    batch=(dict(train_batch_tokens=129, train_seq_len=128), dict(train_batch_tokens=0),
           dict(train_seq_len=64, train_batch_tokens=32)),
    depth=(dict(depth=2, vocab_size=0), dict(target_param_data_ratio=5.0), dict(target_flops=1e9)),
    artifact=(dict(artifact_bytes_limit=1, fp8="auto-head"),
              dict(artifact_bytes_limit=1, depth=2, vocab_size=512)),
    stride=(dict(eval_stride=2000), dict(eval_context=10, eval_stride=11)),
    val=(dict(val_tokens=1),), pattern=(dict(window_pattern=""), dict(window_pattern="LSX")),
    stages=(dict(batch_schedule=(1, 2, 3), window_schedule=(16, 32), window_block=1, eval_window=0),),
    lrs=(dict(lr_schedule=(1.0, 2.0), lr_switches=(0.0, 0.1, 0.2)),
         dict(lr_schedule=(1.0, 2.0), lr_switches=(0.0, 0.2, 0.1)),
         dict(lr_schedule=(1.0, 2.0), lr_switches=(0.5, 0.6))),
    blocks=(dict(window_block=16, window_schedule=(24,), eval_window=0),
            dict(window_block=16, window_schedule=(0,), eval_window=8)),
    skips=(dict(skip_layers=(1,)), dict(skip_layers=(2, 1)), dict(skip_layers=(1, 1))))
BAD_PATHS = dict(
    data_path=("nowhere", "", "/", ".", "data/tokenizers/toy.model", "data/datasets", "x" * 300, "~", "a\nb"),
    tokenizer_path=("nowhere.model", "data", "data/datasets/toy/manifest.json", "x" * 300, "é\nb"),
    eval_from=("nowhere.ptz", "data", "data/tokenizers/toy.model", "/", "x" * 300, "a\nb"),
    resume=("nowhere", "..", ".", "/", "../data", "x" * 300, "a\nb", "data/datasets"))
OTHER_WORDS = ("--zzz=1", "--zzz", "golf", "-x", "--", "---", "--matrx-lr=0.1", "--Matrix-LRR=1", "=", "", "--=1",
               "--seed", "--presets=golf", "--help-me", "--a\nb=1", "\udcff")


def text_of(rng, name, value):
    """One of the ways to write it."""
    default = FIELDS[name].default
    if isinstance(value, bool):
        return rng.choice(("1", "true", "True", "TRUE") if value else ("0", "false", "False"))
    if value == 0 and type(default) in (int, float) and "; 0: " in FIELDS[name].doc and rng.random() < 0.1:
        return "-1"
    if type(value) is int and rng.random() < 0.15:
        return rng.choice((f"+{value}", f" {value} ", f"{value:_}", f"0{value}"))
    if type(value) is float and rng.random() < 0.3:
        return rng.choice((f"{value!r}0" if re.fullmatch(r"\d+\.\d+", repr(value)) else f"+{value!r}",
                           f" {value!r}"))
    return show(value) if not isinstance(value, str) else value


def spell(rng, texts):
    """{constant: text} -> (argv, env), each on one of the two ways, some by their alias."""
    argv, env = [], {}
    for name, text in texts.items():
        typed = rng.choice([name, name, *(alias for alias, real in ALIASES.items() if real == name)])
        if rng.random() < 0.5:
            env[typed.upper()] = text
            continue
        flag = "--" + (typed.replace("_", "-") if rng.random() < 0.8 else typed)
        if isinstance(FIELDS[name].default, bool) and text == "1" and rng.random() < 0.5:
            argv.append([flag])
        elif rng.random() < 0.5 and not text.startswith("--"):
            argv.append([flag, text])
        else:
            argv.append([f"{flag}={text}"])
    rng.shuffle(argv)
    return sum(argv, []), env


def out_of_range(rng, name):
    """A text that no constant of this kind takes, or None."""
    default, doc, least, most = FIELDS[name]
    off = "; 0: " in doc and type(default) in (int, float)
    if isinstance(default, str):
        return rng.choice(("", "x", "CPU", "float16", " ")) if " | " in doc else None
    if isinstance(default, bool):
        return rng.choice(("yes", "2", "", "on", "-1", "nan", "01"))
    kind = type(default[0] if isinstance(default, tuple) else default)
    beyond = [kind(least) - 1, kind(most) * 2 + 1, 10**30, -10**30, -5]
    texts = [str(n) for n in beyond if n < least or n > most] + [text for text in JUNK_TEXT if text != "True"]
    texts += ["1.5", "1e3", "1e999"] if kind is int else ["inf", "-inf", "1e999", "-1e-9", "nan"]
    if isinstance(default, tuple):
        texts = [*texts, "1,x", f"1,{texts[0]}"]
        texts = [text for text in texts if name != "lr_schedule" or text != "1e999,"]
    return rng.choice([text for text in texts if text not in KNOWN and not (off and text == "-1")])


def dry_settings(rng, cfg):
    """Of a plan, which computes on no memory: as large as the trainer takes."""
    T = rng.choice((512, 2048, 1 << 20))
    return cfg | dict(
        dry_run=True, num_layers=rng.choice((12, 60, 200)), model_dim=rng.choice((4096, 1 << 16)),
        num_heads=rng.choice((32, 64)), num_kv_heads=0, train_seq_len=T, train_batch_tokens=T * rng.choice((8, 512)),
        bigram_rows=1 << 26, mlp_mult=64, iterations=10**9, extension_iterations=10**9, warmup_steps=1000,
        sample_tokens=100_000, val_tokens=0, eval_context=rng.choice((0, 64)), data_path="nowhere")


def draw(number):
    """Configuration of this number: argv, env, what is to be in result.json, and what has to come of it."""
    rng = random.Random(f"{SEED} {number}")
    preset = rng.choice([*PRESETS])
    cfg = base(rng)
    kinds = ["train"] * 11 + ["junk"] * 3 + ["rule"] * 2 + ["path", "words", "twice", "dry"]
    kind = kinds[number % len(kinds)]
    case = SimpleNamespace(number=number, kind=kind, preset=preset, named=None, hot=False, want={})
    tame = [name for name, how in TAME.items() if how]
    if kind == "rule":      # the one that is to be broken, alone
        tame, cfg["model_dim"] = [], 16 * cfg["num_heads"]
    for name in rng.sample(tame, min(len(tame), rng.choice((0, 1, 2, 3, 5, 8, 12)))):
        value = TAME[name](rng, cfg)
        cfg |= value if isinstance(value, dict) else {name: value}
    if kind == "train" and rng.random() < 0.04:     # may diverge, and must say so then
        name = rng.choice(HOT[:5])
        cfg[name], case.hot = rng.choice((1.0, 10.0)), True
    cfg = {name: value for name, value in cfg.items() if value is not None}
    if preset == "gpt2" and cfg["train_batch_tokens"] and "matrix_lr" not in cfg:
        cfg["matrix_lr"] = 0.02
    texts, extra, again = {}, [], {}
    if kind == "dry":
        cfg = dry_settings(rng, cfg)
    elif kind == "rule":
        rule = rng.choice([*FEATURES])
        change = rng.choice([change for change in FEATURES[rule] if change not in KNOWN])
        cfg |= {rule: change} if isinstance(change, str) else change
        case.named = [rule] if isinstance(change, str) else [*change]
    elif kind == "path":
        name = rng.choice([*BAD_PATHS])
        cfg[name] = rng.choice([path for path in BAD_PATHS[name] if path not in KNOWN])
        case.named = [name, "val shards", "tokenizer", "damaged"]
        if name == "tokenizer_path":
            case.named += [cfg[name]]
    texts = {name: text_of(rng, name, value) for name, value in cfg.items()}
    if kind == "junk":
        name = rng.choice([name for name in FIELDS if name != "preset" and out_of_range(rng, name) is not None])
        texts[name], case.named = out_of_range(rng, name), [name]
    elif kind == "words":
        extra = [rng.choice([word for word in OTHER_WORDS if word not in KNOWN])]
        case.named = [extra[0].split("=")[0], "needs a value"]
    elif kind == "twice":
        alias, name = rng.choice([*ALIASES.items()])
        again, case.named = {alias.upper(): "7", name.upper(): "8"}, [name]
        texts.pop(name, None)
    if preset != "tiny" or rng.random() < 0.5:
        texts["preset"] = preset
    case.argv, case.env = spell(rng, texts)
    case.env |= again
    case.argv[:0] = extra if extra != ["--seed"] else []
    case.argv += extra if extra == ["--seed"] else []
    if rng.random() < 0.1:
        case.env |= {"MATRIXLR": "junk", "PATH": "x", "HTTP_PROXY": ""}    # no constants
    derived = {"run_id", "bos_id", "vocab_size", "eval_from"}
    derived |= {"iterations", "train_batch_tokens"} if cfg["depth"] else set()
    case.want = {name: show(value) for name, value in cfg.items() if name not in derived}
    return case


def test_every_constant_is_drawn():
    drawn = {*TAME, *base(random.Random(0)), *(name for group in GROUPS.values() for name in group)}
    assert set(FIELDS) == drawn - set(GROUPS)


def problem_of(case, done):
    """What is wrong with how the trainer took a configuration: "" or a sentence. Sets case.outcome."""
    done.given, case.outcome = [*case.argv, *case.env.values()], {0: "trained", 1: "diverged", 2: "refused"}.get(done.code)
    if done.warnings:
        return f"warnings: {done.warnings}"
    if done.code:
        if words := complaint(done):
            return words
    if done.code == 1:
        said = "not finite" in done.err or "outgrew" in done.err
        return "" if case.hot and said and "learning rates" in done.err else "it failed"
    if done.code == 2:
        if done.new:
            return "a run folder is left"
        named = case.named or [*FIELDS, "val split", "train tokens", "shards"]
        return "" if any(name in done.err or repr(name)[1:-1] in done.err for name in named) else \
            f"the sentence names none of {named[:4]}"
    if done.err:
        return "words on stderr"
    if case.kind == "dry":
        case.outcome = "planned"
        return "a run folder of a dry run" if done.new else ""
    if case.kind not in ("train", "path"):
        return f"not refused ({case.kind} {case.named})"
    if len(done.new) != 1 or not (done.new[0] / "result.json").exists():
        return "no result.json"
    result = json.loads((done.new[0] / "result.json").read_text())
    case.loss = result.get("val_loss", result.get("val_loss_partial"))
    if case.loss is None:
        case.loss = result.get("val_loss_partial")
    if not isinstance(case.loss, float) or not math.isfinite(case.loss):
        return f"loss {case.loss}"
    steps = int(result["config"]["iterations"]) + int(result["config"]["extension_iterations"])
    if not (result["steps"] == steps or result["stop_reason"] == "wallclock_cap" and 1 <= result["steps"] < steps):
        return f"{result['steps']} steps of {steps}"
    wrong = {name: (text, result["config"][name]) for name, text in case.want.items()
             if result["config"][name] != text}
    return f"not as given: {wrong}" if wrong else ""


def run_configuration(case):
    """-> what is wrong; sets case.outcome and case.said. Leaves no run folder."""
    done = call_main(case.argv, case.env)
    case.code, case.said, case.loss = done.code, done.err, None
    try:
        if words := problem_of(case, done):
            return f"{words}\n    exit {done.code}: {summary(done.err)}"
        return ""
    finally:
        for folder in done.new:
            shutil.rmtree(folder)


def fuzz_configurations(numbers, commands):
    """Runs them in this process and so many of them as commands, which have to agree. -> statistics."""
    outcomes, sentences, findings, cases = Counter(), Counter(), [], []
    for number in numbers:
        case = draw(number)
        try:
            words = run_configuration(case)
        except Hang as hang:
            words, case.outcome = str(hang), "hung"
        if words:
            findings.append(f"draw({number}): {words}\n    {case.preset} {case.kind} argv={case.argv} env={case.env}")
        outcomes[case.outcome] += 1
        if case.outcome == "refused":
            sentences[re.sub(r"'.*?'|\d[\d.e+-]*", "#", case.said)[:60]] += 1
            cases.append(case)
        elif case.outcome == "trained":
            cases.append(case)
        if number % 50 == 0:
            gc.collect()        # files and threads of runs that are over
    # as commands: as many of each kind as there are
    for case in [c for kind in ("trained", "refused")
                 for c in [c for c in cases if c.outcome == kind and not any(
                     "\0" in text for text in [*c.argv, *c.env.values()])][::max(1, len(cases) // 12)]][:commands]:
        findings += command_differs(case)
    return outcomes, sentences, findings


def command_differs(case):
    """A configuration as a command line: [] or [what is other than in this process]."""
    had = folders()
    done = run_cli(Path.cwd(), *case.argv, env=case.env | {"PATH": os.environ["PATH"]}, timeout=SECONDS)
    new, loss = folders() - had, None
    for folder in new:
        result = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else {}
        loss = result.get("val_loss") if result.get("val_loss") is not None else result.get("val_loss_partial")
        shutil.rmtree(folder)
    said = done.err.encode(errors="replace") == case.said.encode(errors="replace")
    if done.code == case.code and loss == case.loss and (said or not case.code):
        return []
    return [f"draw({case.number}) as a command: exit {done.code}, loss {loss}, {summary(done.err)}; "
            f"here {case.code}, {case.loss}, {case.said}"]


def report(findings, limit=12):
    assert not findings, f"{len(findings)} findings:\n" + "\n".join(findings[:limit])


@pytest.fixture
def workplace(tiny_data, tmp_path, monkeypatch):
    """tiny_data as the current folder; nothing that is drawn writes to it. Runs draw no picture, which would
    take half of their time."""
    (tmp_path / "data").symlink_to(tiny_data / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_gpt, "plot_curves", lambda *_: None)
    return tmp_path


def check_configurations(total, commands):
    outcomes, sentences, findings = fuzz_configurations(range(total), commands)
    print(f"{total} configurations: {dict(outcomes)}, {len(sentences)} different refusals")
    report(findings)
    assert 3 * outcomes["trained"] >= total and 5 * outcomes["refused"] >= total
    assert outcomes["diverged"] * 20 < total and len(sentences) > min(60, total // 6)


def test_a_sample_of_configurations(workplace):
    check_configurations(SAMPLE_CONFIGURATIONS, 2)


@pytest.mark.slow
def test_configurations(workplace):
    check_configurations(CONFIGURATIONS, 12)
