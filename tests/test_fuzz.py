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
import plan
import train_gpt
from helpers import TOY, fake_team, run_cli
from train_gpt import ALIASES, FIELDS, PRESETS, Refused, show

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("one_thread")]

SEED = 20
CONFIGURATIONS, MUTATED = 2000, 500     # of the full run
SAMPLE_CONFIGURATIONS, SAMPLE_MUTATED = 70, 60
SECONDS = 60        # for one case: a hang fails
# Findings in train_gpt.py that are left out of the draw until it is mended; () draws them all.
# lines: a text of two lines is refused in two. temperature: one of 1e-300 ends a run without its result.
# clipping: of no gradients, where all parameters are Adam's and it waits. no_tokenizer: a manifest without
# one, with a bos_id, vocab_size or val_bytes of another type. final_model: no checksum of it is looked at.
# shapes: constants of another type in an artifact
KNOWN = ()


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


def one_of(rng, texts):
    """One of them, of one line each as long as others are known to be a problem."""
    return rng.choice([text for text in texts if not ("lines" in KNOWN and "\n" in str(text))])


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
    strides = {name: rng.choice((0, max(1, context // 4), context))
               for name in ("eval_stride", "eval_sliding", "eval_documents")}
    return dict(eval_context=context) | strides


def skips(rng, _):
    pairs = [sorted(rng.sample(range(7), 2)) for _ in range(rng.randint(1, 3))]
    return dict(skip_layers=rng.choice(((0,), tuple(sum(pairs, [])))))


RATE = scale(1e-6, 0.1, 0.0)
RATES = ("matrix_lr", "embed_lr", "head_lr", "tied_embed_lr", "scalar_lr")      # above 0.5 a run may diverge
# What is drawn for each constant that is not in base(), or for several that go together
TAME = {
    "run_id": lambda rng, _: f"{rng.choice(('a', 'a=1,b', 'é.', '_-+'))}{rng.randrange(10**9)}",
    "seed": among(0, 1, 42, 2**31 - 1), "device": among("cpu", "cpu", "auto"),
    "dtype": among("auto", "float32", "bfloat16"),
    "fp8": among("off", "head", "all", "auto-head", "auto-all"),
    "save_every": among(0, 1, 2, 5, 10**12), "save_every_seconds": scale(1e-6, 1e7, 0.0),
    "sample_every": among(0, 1, 2, 3),
    "sample": among("", "a", "|", "a|b||c", "def f(x):", "é\U0001f600", " "),
    "sample_temperature": scale(1e-3, 10.0, 0.0, 1e-6 if "temperature" in KNOWN else 1e-300),
    "sample_top_k": among(0, 1, 5, 512, 65_536),
    "train_log_every": among(0, 1, 2, 50, 10**12), "val_loss_every": among(0, 1, 2, 10**12),
    "artifact_bytes_limit": among(0, 1, 10**6, 16 * 10**6, 10**12), "score_artifact": boolean,
    "artifact_step": scale(1e-3, 10.0, 0.0), "artifact_keep": among(0, 1, 100, 65_536, 10**12),
    "data_path": among("data/datasets/toy/", "./data/datasets/../datasets/toy", "data//datasets/toy"),
    "tokenizer_path": among("", "data/tokenizers/toy.model"),
    "data_fingerprint": among("", "toy", "x" * 64, "é"), "shuffle": boolean, "max_epochs": among(0, 1, 2, 9),
    "device_batch_size": among(0, 1, 2, 3, 4, 8, 10**12), "val_batch_size": among(1, 64, 4096, 10**12),
    "val_tokens": among(0, 2, 3, 64, 500), "evaluation": evaluation,
    "eval_ttt": among(0, 0, 2000, 10**12), "eval_ttt_lr": uniform(0.0, 0.1),
    "core_bundle": among("", "nowhere", "data"), "core_metric_max_per_task": among(0, 1, 10**12),
    "by_depth": by_depth, "plan_mfu": uniform(0.001, 1.0), "vocab_size": among(0, 512, 513, 575),
    "max_doc_len": among(0, 1, 2, 8, 64, 2048, 10**12), "bos_id": among(0, 1, 1, 2, 300),
    "num_layers": among(1, 2, 5, 8), "mlp_mult": among(1, 2, 4, 8), "tie_embeddings": boolean,
    "logit_softcap": scale(0.1, 1e4, 0.0, 1e-30), "qk_gain_init": scale(1e-3, 100.0, 0.0, 1e-30),
    "attn_scale": scale(1e-3, 100.0, 0.0, 1e-30), "key_offset": boolean,
    "attn_gate_dim": lambda rng, cfg: rng.randint(0, cfg["model_dim"]),
    "smear_dim": lambda rng, cfg: rng.randint(0, cfg["model_dim"]), "rope_base": scale(0.1, 1e9, 0.0, 1e-30),
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
    "adam_every": among(1, 1, 2, 3, 1000), "grad_clip_norm": scale(1e-6, 1e6, 0.0, 1e-300),
    "iterations": among(1, 2, 3), "extension_iterations": among(0, 1, 2),
    "max_wallclock_seconds": among(0.0, 1e-6, 30.0, 1e7), "warmup_steps": among(0, 1, 3),
    "warmdown_iters": among(0, 1, 2, 300, 10**12), "warmdown_frac": uniform(0.0, 1.0),
    "lr_floor": uniform(0.0, 1.0), "batch_lr_power": uniform(0.0, 2.0), "lr_stages": lr_stages,
    # drawn by base() or draw() alone
    **dict.fromkeys(("preset", "compile", "dry_run", "eval_from", "resume", "core", "core_metric_every"))}
GROUPS = {"evaluation": ("eval_context", "eval_stride", "eval_sliding", "eval_documents"),
          "skips": ("skip_layers",),
          "by_depth": ("depth", "target_param_data_ratio", "target_flops"),
          "windows": ("window_block", "eval_window", "window_schedule", "batch_schedule"),
          "lr_stages": ("lr_schedule", "lr_switches")}
JUNK_TEXT = ("", " ", "x", "nan", "1 2", "0x10", "½", "−1", "None", "[1]", "1;2", "1,,2", ",", "--1", "1e",
             "\U0001f600", "\udcff", "9" * 5000, "a\nb")
FEATURES = dict(    # settings that break one rule each, on top of base()
    run_id=("a/b", "..", ".", " ", "/x", "a b", "-a", "=", "a\n", "a\\b", "%s"),
    heads=(dict(num_heads=3), dict(num_heads=4096), dict(model_dim=2, num_heads=2), dict(model_dim=37)),
    kv=(dict(num_heads=2, num_kv_heads=4), dict(num_heads=4, num_kv_heads=3, model_dim=32)),
    gates=(dict(smear_dim=65_536), dict(attn_gate_dim=65_536)),
    batch=(dict(train_batch_tokens=129, train_seq_len=128), dict(train_batch_tokens=0),
           dict(train_seq_len=64, train_batch_tokens=32)),
    depth=(dict(depth=2, vocab_size=0), dict(target_param_data_ratio=5.0), dict(target_flops=1e9)),
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
OTHER_WORDS = ("--zzz=1", "--zzz", "golf", "-x", "--", "---", "--matrx-lr=0.1", "--Matrix-LRR=1", "=", "",
               "--=1", "--seed", "--presets=golf", "--help-me", "--a\nb=1", "\udcff")


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
        return one_of(rng, ("", "x", "CPU", "float16", " ", "a\nb")) if " | " in doc else None
    if isinstance(default, bool):
        return rng.choice(("yes", "2", "", "on", "-1", "nan", "01"))
    kind = type(default[0] if isinstance(default, tuple) else default)
    beyond = [kind(least) - 1, kind(most) * 2 + 1, 10**30, -10**30, -5]
    texts = [str(n) for n in beyond if n < least or n > most] + [*JUNK_TEXT]
    texts += ["1.5", "1e3", "1e999"] if kind is int else ["inf", "-inf", "1e999", "-1e-9", "nan"]
    if isinstance(default, tuple):
        texts += ["1,x", f"1,{texts[0]}"]
    return one_of(rng, [text for text in texts if not (off and text == "-1")])


def dry_settings(rng, cfg):
    """Of a plan, which computes on no memory: as large as the trainer takes."""
    T = rng.choice((512, 2048, 1 << 20))
    return cfg | dict(
        dry_run=True, num_layers=rng.choice((12, 60, 200)), model_dim=rng.choice((4096, 1 << 16)),
        num_heads=rng.choice((32, 64)), num_kv_heads=0, train_seq_len=T,
        train_batch_tokens=T * rng.choice((8, 512)), bigram_rows=1 << 26, mlp_mult=64,
        iterations=10**9, extension_iterations=10**9, warmup_steps=1000, sample_tokens=100_000, val_tokens=0,
        eval_context=rng.choice((0, 64)), data_path="nowhere")


def draw(number):
    """Configuration of this number: argv, env, what is to be in result.json, and what has to come of it."""
    rng = random.Random(f"{SEED} {number}")
    preset = rng.choice([*PRESETS])
    cfg = base(rng)
    kinds = ["train"] * 11 + ["junk"] * 3 + ["rule"] * 2 + ["path", "words", "twice", "dry"]
    kind = kinds[number % len(kinds)]
    case = SimpleNamespace(number=number, kind=kind, preset=preset, named=None, hot=False, want={})
    tame = [name for name, how in TAME.items() if how]
    if kind in ("rule", "path"):        # what is to be refused, alone
        tame = []
    if kind == "rule" or preset == "speedrun":      # which has gates of 12 channels
        cfg["model_dim"] = 16 * cfg["num_heads"]
    for name in rng.sample(tame, min(len(tame), rng.choice((0, 1, 2, 3, 5, 8, 12)))):
        value = TAME[name](rng, cfg)
        cfg |= value if isinstance(value, dict) else {name: value}
    if kind == "train" and rng.random() < 0.04:     # may diverge, and must say so then
        cfg[rng.choice(RATES)] = rng.choice((1.0, 10.0))
    case.hot = cfg.get("beta2", 1) < 0.1 or any(cfg.get(name, 0) > 0.5 for name in RATES)
    if "clipping" in KNOWN and cfg.get("grad_clip_norm"):
        cfg["adam_every"] = 1
    cfg = {name: value for name, value in cfg.items() if value is not None}
    if preset == "gpt2" and cfg["train_batch_tokens"] and "matrix_lr" not in cfg:
        cfg["matrix_lr"] = 0.02
    texts, extra, again = {}, [], {}
    if kind == "dry":
        cfg = dry_settings(rng, cfg)
    elif kind == "rule":
        rule = rng.choice([*FEATURES])
        change = one_of(rng, FEATURES[rule])
        cfg |= {rule: change} if isinstance(change, str) else change
        case.named = [rule] if isinstance(change, str) else [*change]
    elif kind == "path":
        name = rng.choice([*BAD_PATHS])
        cfg[name] = one_of(rng, BAD_PATHS[name])
        case.named = [name, "val shards", "tokenizer", "damaged", "manifest.json"]
        if name == "tokenizer_path":
            case.named += [cfg[name]]
    texts = {name: text_of(rng, name, value) for name, value in cfg.items()}
    if kind == "junk":
        wrong = {name: out_of_range(rng, name) for name in FIELDS}
        name = rng.choice([name for name, text in wrong.items() if text is not None])
        texts[name], case.named = wrong[name], [name]
    elif kind == "words":
        extra = [one_of(rng, OTHER_WORDS)]
        case.named = [" ".join(extra[0].split("=")[0].split()), "needs a value"]
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


def loss_of(result):
    return result.get("val_loss_partial") if result["val_loss"] is None else result["val_loss"]


def problem_of(case, done):
    """What is wrong with how the trainer took a configuration: "" or a sentence. Sets case.outcome."""
    done.given = [*case.argv, *case.env.values()]
    case.outcome = {0: "trained", 1: "diverged", 2: "refused"}.get(done.code)
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
    case.loss = loss_of(result)
    if not isinstance(case.loss, float) or not math.isfinite(case.loss):
        return f"loss {case.loss}"
    steps = int(result["config"]["iterations"]) + int(result["config"]["extension_iterations"])
    capped = result["stop_reason"] == "wallclock_cap" and 1 <= result["steps"] < steps
    if result["steps"] != steps and not capped:
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
            findings.append(f"draw({number}): {words}\n    {case.preset} {case.kind} argv={case.argv} "
                            f"env={case.env}")
        outcomes[case.outcome] += 1
        if case.outcome == "refused":
            sentences[re.sub(r"'.*?'|\d[\d.e+-]*", "#", case.said)[:60]] += 1
            cases.append(case)
        elif case.outcome == "trained":
            cases.append(case)
        if number % 50 == 0:
            gc.collect()        # files and threads of runs that are over
    for outcome in ("trained", "refused"):
        here = [case for case in cases if case.outcome == outcome]
        for case in here[::2 * len(here) // commands][:commands // 2] if commands else ():
            findings += command_differs(case)
    return outcomes, sentences, findings


def command_differs(case):
    """A configuration as a command line: [] or [what is other than in this process]."""
    had = folders()
    done = run_cli(Path.cwd(), *case.argv, env=case.env | {"PATH": os.environ["PATH"]}, timeout=SECONDS)
    new, loss = folders() - had, None
    for folder in new:
        result = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else {}
        loss = result and loss_of(result)
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
    monkeypatch.setattr(plan, "plot_curves", lambda *_: None)
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


# -------------------------------------------------------------------------------- mutated files
DATA, MODEL = Path("data/datasets/small"), Path("data/tokenizers/small.model")
MANIFEST, VAL = DATA / "manifest.json", DATA / "small_val_000000.bin"
TRAIN = [DATA / f"small_train_{i:06d}.bin" for i in range(3)]
RUN = Path("logs/run")
SMALL = TOY | dict(
    DATA_PATH=str(DATA), TRAIN_SEQ_LEN="32", TRAIN_BATCH_TOKENS="64", MODEL_DIM="16", BIGRAM_ROWS="64",
    VAL_TOKENS="0", SAMPLE_TOKENS="0", ITERATIONS="6", MAX_DOC_LEN="64")
SHAPES = ("NUM_LAYERS", "MODEL_DIM", "NUM_HEADS", "TRAIN_SEQ_LEN", "BIGRAM_ROWS", "MAX_DOC_LEN")
SCORING = {name: text for name, text in SMALL.items() if name not in SHAPES} | {"TRAIN_BATCH_TOKENS": "4096"}
JUNK = [None, -1, 0, 1, 7, 2**40, 2**70, 1.5, 512.0, 1e300, math.nan, math.inf, True, False, "", "x", "../x",
        ".", "/", "..", "val", "train", "test", "0" * 64, VAL.name, f"./{VAL.name}", TRAIN[1].name,
        f"../small/{TRAIN[0].name}", "../../tokenizers/small.model", "manifest.json", [], [1], {}, {"a": 1},
        [[]], "x" * 5000, "a\nb"]


class Evil:
    """Pickles to a call of os.system."""
    def __reduce__(self):
        return os.system, ("touch executed",)


def spots(tree, path=()):
    """Every place in a tree of dicts, lists and tuples."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield path + (key,)
        yield from spots(child, path + (key,))


def edit(rng, tree, junk=JUNK):
    """A value of the tree replaced, deleted or doubled."""
    *way, last = rng.choice([*spots(tree)])
    at = tree
    for key in way:
        at = at[key]
    kind = rng.random()
    if kind < 0.2:
        del at[last]
    elif kind < 0.3 and isinstance(at, list):
        at.append(at[last])
    elif kind < 0.4 and type(at[last]) is int:
        at[last] += rng.choice((-1, 1, 2**31, -2 * at[last]))
    else:
        at[last] = one_of(rng, junk)
    return tree


def scramble(rng, raw):
    """raw with bytes flipped, zeroed, moved, cut off or added; never as it was."""
    new, n = bytearray(raw), len(raw)
    kind = rng.randrange(8)
    here, size = rng.randrange(n), rng.choice((1, 8, 64, 512, 4096))
    if kind == 0:
        new = new[:rng.choice((0, 1, 5, here, n - 1))]
    elif kind == 1:
        new += rng.randbytes(size) if rng.random() < 0.5 else bytes(size)
    elif kind == 2:
        new[here:here + size] = bytes(len(new[here:here + size]))
    elif kind == 3:
        del new[here:here + size]
    elif kind == 4:
        new[here:here] = new[here:here + size]
    elif kind == 5:
        new[here] ^= 1 << rng.randrange(8)
    else:
        for _ in range(rng.randint(1, 5)):
            new[rng.randrange(n if kind == 6 else min(n, 64))] = rng.randrange(256)
    return bytes(new) if new != raw else scramble(rng, raw)


def payload_of(raw):
    return torch.load(io.BytesIO(raw if raw[:2] == b"PK" else zlib.decompress(raw)), weights_only=True)


def packed(payload, squeeze=True):
    torch.save(payload, buffer := io.BytesIO())
    return zlib.compress(buffer.getvalue(), 1) if squeeze else buffer.getvalue()


def edit_tensors(rng, tensors):
    """One tensor missing, more, of another shape, dtype, kind or not finite."""
    name = rng.choice([*tensors])
    w = tensors[name]
    kinds = [lambda: tensors.pop(name), lambda: tensors.update({name + "x": w}), lambda: tensors.update(x=w),
             lambda: tensors.update({name + ".int8": w}), lambda: tensors.update({name + ".scale": w})]
    kinds += [lambda new=new: tensors.update({name: new(w)}) for new in (
        lambda w: w.double(), lambda w: w.to(torch.int64), lambda w: w.bool(), lambda w: w.bfloat16(),
        lambda w: w.flatten(), lambda w: w[:1], lambda w: w[None],
        lambda w: w.flatten()[0], lambda w: torch.cat((w, w)), lambda w: w[:0],
        lambda w: w.float() * torch.nan,
        lambda w: torch.full_like(w, torch.inf, dtype=torch.float32), lambda w: w.tolist(), lambda w: None,
        lambda w: "weights", lambda w: w.float().to_sparse(), lambda w: w.to("meta"),
        lambda w: torch.nn.Parameter(w.float()), lambda w: w.T if w.ndim == 2 else w.view(-1, 1),
        lambda w: w.flatten()[:1].as_strided((1 << 40,), (0,)),
        lambda w: w.flatten()[:1].as_strided(w.shape, (0,) * w.ndim))]
    rng.choice(kinds)()


# Each of these damages a file, by chance, and returns what has to come of it: "refused"; "same": the score of
# whole files; "either"; "any": a refusal or a finite score, as no checksum is stated that would tell.
def val_shard(rng):
    raw = VAL.read_bytes()
    if rng.random() < 0.7:
        VAL.write_bytes(scramble(rng, raw))
    else:
        helpers.write_shard(VAL, np.frombuffer(raw, "<u2", offset=1024)[:rng.randrange(1, 900)])
    return "refused"


def train_shard(rng):
    """Header and size are checked at the start, the range of its tokens when a shard is first read. A token
    in that range is not: a sum over 100 GB at each start would take longer than a run."""
    path = rng.choice(TRAIN)
    raw = path.read_bytes()
    kind = rng.randrange(4)
    if kind == 0:
        new = scramble(rng, raw)
    elif kind == 1:
        header = np.frombuffer(raw[:1024], "<i4").copy()
        header[rng.randrange(3)] = rng.choice((0, 1, -1, 2, 2**31 - 1, 20240519, int(header[2]) - 1))
        new = header.tobytes() + raw[1024:]
    elif kind == 2:
        new = raw[:1024 + rng.randrange(len(raw) - 1024)]
    else:
        place = 1024 + 2 * rng.randrange((len(raw) - 1024) // 2)
        new = raw[:place] + rng.choice((512, 65_535)).to_bytes(2, "little") + raw[place + 2:]
    path.write_bytes(new)
    known = len(new) == len(raw) and new[:12] == raw[:12]
    return "any" if known or new == raw else "refused"


def train_file(rng):
    """A file that is missing, no file, or another file."""
    path, other = rng.sample([*TRAIN, VAL, MODEL, MANIFEST], 2)
    path.unlink()
    kind = rng.randrange(4)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.symlink_to(path.name)
    elif kind == 2:
        shutil.copy(other, path)
    return "any" if path == MANIFEST else "refused"


def tokenizer(rng):
    MODEL.write_bytes(scramble(rng, MODEL.read_bytes()))
    return "refused"


def tokenizer_unstated(rng):
    """Where no sha256 is stated, the bytes of the val text tell of pieces that others stand for."""
    manifest = json.loads(MANIFEST.read_text())
    del manifest["tokenizer"]["sha256"]
    MANIFEST.write_text(json.dumps(manifest))
    MODEL.write_bytes(scramble(rng, MODEL.read_bytes()))
    return "either"


def manifest_bytes(rng):
    MANIFEST.write_bytes(scramble(rng, MANIFEST.read_bytes()))
    return "either"


def manifest_values(rng):
    MANIFEST.write_text(json.dumps(edit(rng, json.loads(MANIFEST.read_text()))))
    return "either"


def manifest_without_tokenizer(rng):
    """As of a dataset that a tokenizer of another kind made."""
    manifest = json.loads(MANIFEST.read_text())
    manifest["tokenizer"] = {"vocab_size": 512, "bos_id": 1}
    at = rng.choice((manifest, manifest["tokenizer"]))
    at[rng.choice(("val_bytes", "tokenizer", "files") if at is manifest else [*at])] = one_of(rng, JUNK)
    MANIFEST.write_text(json.dumps(manifest))
    return "any"


def hashes(rng):
    path = DATA / "document_hashes.bin"
    path.write_bytes(scramble(rng, path.read_bytes()))
    return "either"


def artifact(rng):
    path = Path("model.ptz")
    path.write_bytes(scramble(rng, path.read_bytes()))
    return "either"


def final_model(rng):
    path = Path("model.pt")
    path.write_bytes(scramble(rng, path.read_bytes()))
    return "either"


def artifact_inside(rng):
    """Sound checksums over other tensors, other constants, or what is no model."""
    path = rng.choice((Path("model.ptz"), Path("model.pt")))
    payload, kind = payload_of(path.read_bytes()), rng.randrange(10)
    if kind < 4:
        edit_tensors(rng, payload["tensors"])
    elif kind < 8:
        numbers = [0, 1, 2, 3, 4, 16, 16.0, 17, 64, 99, 1000, 65_536, 1 << 20, 1 << 26, (0,), (1, 2), (),
                   ("L",), 1e-3]
        old = dict(payload["shape"])
        new = edit(rng, payload["shape"], [*JUNK, *numbers])
        kept = {name for name in new if "shapes" in KNOWN and type(new[name]) is not type(old[name])}
        payload["shape"] = new | {name: old[name] for name in kept}
    elif kind == 8:
        shape, tensors = {"shape": payload["shape"]}, {"tensors": payload["tensors"]}
        payload = rng.choice(([1, 2], None, "x", {}, shape, tensors, shape | {"tensors": []},
                              tensors | {"shape": Evil()}, Evil()))
    raw = packed(payload, path.suffix == ".ptz")
    if kind == 9:
        raw = rng.choice((pickle.dumps(Evil()), zlib.compress(pickle.dumps(Evil())), raw[:2],
                          zlib.compress(bytes(10**7)), zlib.compress(raw), raw + raw,
                          zlib.compress(b"PK\3\4" + bytes(99))))
    path.write_bytes(raw)
    return "any"


def checkpoint(rng):
    """Of two one is left, or none: from there a run goes on to the same end."""
    for path in rng.choice(([RUN / "checkpoint.pt"], [RUN / "checkpoint.pt", RUN / "checkpoint_prev.pt"])):
        if rng.random() < 0.1:
            path.unlink()
        else:
            path.write_bytes(scramble(rng, path.read_bytes()))
    return "same"


def checkpoint_inside(rng):
    path = RUN / "checkpoint.pt"
    payload, kind = payload_of(path.read_bytes()), rng.randrange(8)
    if kind < 2:
        edit_tensors(rng, payload["tensors"])
    elif kind < 4:
        edit_tensors(rng, payload["state"])
    elif kind < 6:
        payload["progress"] = edit(rng, payload["progress"], [*JUNK, 3, 6, 10**9, torch.zeros(3)])
    elif kind == 6:
        edit(rng, payload, [*JUNK, torch.zeros(3)])
    else:
        payload = rng.choice(([1], None, {}, Evil(), payload["tensors"], {"progress": {"step": 4}}))
    path.write_bytes(packed(payload))
    return "any"


def run_log(rng):
    """The constants that a run began with have no checksum; the trainer in front of them is compared."""
    path = RUN / "train.log"
    raw = path.read_bytes()
    end = raw.rindex(b"config ")
    head = len(train_gpt.script_files()["train_gpt.py"])
    if rng.random() < 0.5:
        path.write_bytes(scramble(rng, raw[:head]) + raw[head:])
    else:
        path.write_bytes(raw[:head + 200] + scramble(rng, raw[head + 200:end]) + raw[end:])
    return "any"


def finished(rng):
    """A result.json that is there says that the run is over."""
    text = (RUN / "done.json").read_text()
    path = RUN / "result.json"
    if rng.random() < 0.5:
        path.write_bytes(scramble(rng, text.encode()))
    else:
        path.write_text(json.dumps(edit(rng, json.loads(text))))
    return "over"


MUTATIONS = {   # what scores the file: the trainer, or its functions, which are faster
    val_shard: "data", train_shard: "train", train_file: "data", tokenizer: "data",
    tokenizer_unstated: "data", manifest_bytes: "data", manifest_values: "data",
    manifest_without_tokenizer: "score", hashes: "data", artifact: "score", final_model: "score",
    artifact_inside: "score", checkpoint: "resume", checkpoint_inside: "resume", run_log: "resume",
    finished: "resume"}
TIMES = {manifest_values: 4, train_shard: 2, artifact_inside: 4, checkpoint_inside: 3, checkpoint: 2}
ROUND = [mutation for mutation in MUTATIONS for _ in range(TIMES.get(mutation, 1))]


def prepare(tiny_data):
    """Everything that is damaged, whole, in the current folder -> (its files, scores of it)."""
    model = Path(tiny_data, "data/tokenizers/toy.model").read_bytes()
    sp = spm.SentencePieceProcessor(model_proto=model)
    text = list(helpers.library_documents(12_000))
    train, val = helpers.tokens_of(sp, text[2:]), helpers.tokens_of(sp, text[:2])
    helpers.write_dataset(".", "small", model, np.split(train, [700, 1500]), val,
                          sum(len(part.encode()) for part in text[:2]))
    manifest = json.loads(MANIFEST.read_text())
    np.arange(len(text), dtype="<u8").tofile(DATA / "document_hashes.bin")
    manifest["document_hashes"] = {"path": "document_hashes.bin", "val": 2}
    MANIFEST.write_text(json.dumps(manifest))
    import faults
    kept, write = [], faults.write_checkpoint

    def keep(folder, payload):
        write(folder, payload)
        kept.append((folder / "checkpoint.pt").read_bytes())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "write_checkpoint", keep)
        assert call_main([], SMALL | {"SAVE_EVERY": "2", "RUN_ID": "run"}).code == 0
    result = json.loads((RUN / "result.json").read_text())
    (RUN / "checkpoint.pt").write_bytes(kept[1])
    (RUN / "checkpoint_prev.pt").write_bytes(kept[0])
    (RUN / "result.json").rename(RUN / "done.json")
    shutil.move(RUN / "final_model.int8.ptz", "model.ptz")
    shutil.move(RUN / "final_model.pt", "model.pt")
    gc.collect()        # and the lock on train.log with them
    files = {path: path.read_bytes() for path in Path(".").rglob("*") if path.is_file()}
    want = {"resume": (result["val_loss"], result["val_bpb"])}
    for name in ("model.ptz", "model.pt"):
        want[name] = score_of(call_main([], SCORING | {"EVAL_FROM": name, "RUN_ID": "whole"}), "whole")
        shutil.rmtree("logs/whole")
    assert math.isfinite(sum(sum(pair) for pair in want.values()))
    return files, want


def put_back(files):
    """Undo what a case did to the folder."""
    for path in sorted(Path(".").rglob("*"), key=lambda path: -len(path.parts)):
        if path.is_symlink() or path.is_file():
            if path.is_symlink() or path not in files:
                path.unlink()
        elif path not in {parent for file in files for parent in file.parents}:
            path.rmdir()
    for path, raw in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != raw:
            path.write_bytes(raw)


def score_of(done, name):
    """(val_loss, val_bpb) of a call that went well."""
    assert done.code == 0, done.err
    result = json.loads(Path("logs", name, "result.json").read_text())
    return result["val_loss"], result["val_bpb"]


def try_data(model):
    """Score of the data by the functions that read them, and a batch."""
    cfg = train_gpt.load_config(SMALL)
    data = train_gpt.open_data(cfg, lambda *_: None)
    cfg = train_gpt.replace(cfg, vocab_size=data.vocab_size, bos_id=cfg.bos_id or max(data.bos, 0))
    loader = train_gpt.Loader(cfg, data, fake_team(), lambda *_: None)
    tokens, _ = loader.next(cfg.train_batch_tokens)
    assert 0 <= tokens.min() and tokens.max() < data.vocab_size == 512
    score = train_gpt.evaluate(model, cfg, data, fake_team())
    return score.val_loss, score.val_bpb


def run_mutation(mutation, rng, model, want, direct):
    """-> (what came of it, what is wrong: "" or a sentence). direct: by functions where that is possible."""
    expected = mutation(rng)
    how, score = MUTATIONS[mutation], None
    if how == "data" and direct:
        try:
            with limited():
                score = try_data(model)
        except Refused as refusal:
            if expected == "same" or "\n" in str(refusal) or len(str(refusal)) < 10:
                return "refused", f"refused: {refusal}"
            return "refused", ""
        wanted = want["data"]
    else:
        touched = Path("model.pt").read_bytes() != want["files"][Path("model.pt")]
        which = "model.pt" if touched else "model.ptz"
        env = {"data": SCORING | {"EVAL_FROM": which, "RUN_ID": "new"},
               "score": SCORING | {"EVAL_FROM": which, "RUN_ID": "new"},
               "train": SMALL | {"ITERATIONS": "2", "RUN_ID": "new", "SHUFFLE": rng.choice("01")},
               "resume": SMALL | {"RESUME": "run"}}[how]
        wanted = want["resume"] if how == "resume" else want[which]
        done = call_main([], env)
        done.given = []
        if Path("executed").exists():
            return "executed", "code of the file was run"
        if done.code:
            words = complaint(done)
            if done.code == 1 and not words and not done.err.startswith("train_gpt: "):
                words = "no sentence"
            if expected == "same":
                words = words or "refused"
            if not words and done.code == 2 and [path for path in done.new]:
                words = "a run folder is left"
            return "refused", words and f"{words}: exit {done.code}: {summary(done.err)}"
        if done.err or done.warnings:
            return "scored", f"words on stderr: {summary(done.err)} {done.warnings}"
        if expected == "over":
            return "over", "" if "has finished" in done.out else "not over"
        score = score_of(done, "run" if how == "resume" else "new")
    if not math.isfinite(score[0]):
        return "scored", f"score {score}"
    if expected == "refused":
        return "accepted", "accepted"
    if expected in ("either", "same") and (score[0] != wanted[0] or score[1] not in (wanted[1], None)):
        return "accepted", f"score {score} instead of {wanted}"
    return "scored", ""


def fuzz_files(numbers, files, want):
    """-> {(mutation, what came of it): times}, findings."""
    outcomes, findings = Counter(), []
    model, cfg = train_gpt.load_model("model.pt")
    want |= {"files": files, "data": try_data(model)}
    for number in numbers:
        mutation = ROUND[number % len(ROUND)]
        if {final_model: "final_model", manifest_without_tokenizer: "no_tokenizer"}.get(mutation) in KNOWN:
            continue
        words = f"{SEED} {mutation.__name__} {number}"
        rng = random.Random(words)
        try:
            outcome, wrong = run_mutation(mutation, rng, model, want, number // len(ROUND) % 4 > 0)
        except Hang as hang:
            outcome, wrong = "hung", str(hang)
        except Exception as error:
            outcome, wrong = "raised", f"{type(error).__name__}: {summary(str(error))}"
        if MUTATIONS[mutation] == "resume":
            gc.collect()        # the lock on train.log goes with its file
        outcomes[mutation.__name__, outcome] += 1
        if wrong:
            findings.append(f"{mutation.__name__}(random.Random({words!r})): {wrong}")
        put_back(files)
        if number % 50 == 0:
            gc.collect()
    return outcomes, findings


@pytest.fixture
def damaged(tiny_data, tmp_path, monkeypatch):
    """A folder to damage; runs in it draw no picture."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "plot_curves", lambda *_: None)
    return prepare(tiny_data)


def check_files(total, damaged):
    outcomes, findings = fuzz_files(range(total), *damaged)
    print(f"{total} mutations:", *(f"{name} {what} {n}," for (name, what), n in sorted(outcomes.items())))
    report(findings)
    sums = Counter(what for (_, what), n in outcomes.items() for _ in range(n))
    assert sums["refused"] * 4 > total and sums["scored"] * 10 > total


def test_a_sample_of_mutated_files(damaged):
    check_files(SAMPLE_MUTATED, damaged)


@pytest.mark.slow
def test_mutated_files(damaged):
    check_files(MUTATED, damaged)
