"""train_gpt: train a GPT as fast as the hardware allows, in one file.

    ./run.sh                                                               tiny: 120 s on any CPU or GPU
    torchrun --standalone --nproc_per_node=8 train_gpt.py --preset=golf    golf: 600 s, 16 MB, 8xH100
    EVAL_FROM=logs/<run_id>/final_model.int8.ptz python train_gpt.py       score what a run left behind

Map: 3 Config, PRESETS: the numbers to edit - 4 model - 5 optimizer - 6 schedules - 7 data - 8 evaluation -
9 artifact - 11 main. --help lists every constant, --dry-run prints the plan of a run.
Limits: 1,500 lines of 110 columns and 80,000 bytes; golf pays for every byte.
"""
# ------------------------------------------------------------ 2 imports
import difflib
import hashlib
import io
import json
import math
import os
import platform
import re
import resource
import subprocess
import sys
import time
import traceback
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

class Refused(Exception):
    """Configuration or data that cannot be trained on. Exit 2."""

class Missing(Refused):
    """Data that are not there yet."""

class Failed(Exception):
    """A run that broke after it began. Exit 1."""

def demand(good, sentence, error=Refused):
    if not good:
        raise error(sentence)

# ------------------------------------------------------------ 3 configuration
def const(default, doc, lo=0, hi=1e12):
    """One constant: its default, then unit and off-value for --help, then the legal range."""
    return field(default=default, metadata={"doc": doc, "lo": lo, "hi": hi})

@dataclass(frozen=True)
class Config:
    """Every constant, once; the defaults are the `tiny` game. 0 means off or derived."""
    # the run
    preset: str = const("tiny", "row of PRESETS to start from")
    run_id: str = const("", "folder under logs/; empty: preset, seed and time")
    seed: int = const(1337, "of first values and samples", 0, 2**31 - 1)
    device: str = const("auto", "auto | cpu | cuda")
    dtype: str = const("auto", "auto | float32 | bfloat16")  # of activations; auto: bf16 on CUDA, AMX CPUs
    compile: bool = const(True, "torch.compile; 0: eager")
    dry_run: bool = const(False, "print the plan, train nothing")
    eval_from: str = const("", "artifact or final_model.pt to score instead of training")
    sample: str = const("", "prompt; empty: beginnings of three val documents")
    sample_tokens: int = const(96, "tokens per sample; 0: no samples", 0, 100_000)
    sample_temperature: float = const(0.8, "0: greedy", 0, 10)
    # data and batch
    data_path: str = const("data/datasets/embedded", "folder of token shards")
    tokenizer_path: str = const("", "SentencePiece model; empty: as manifest.json says")
    data_fingerprint: str = const("dac98310ae0394c70e5edcf7fc6fc1d66e56671e3d3f3c141065bed6ad3d1c49",
                                  "of the text of the game; empty: any text")
    vocab_size: int = const(0, "tokens; 0: the tokenizer's", 0, 65_536)
    train_seq_len: int = const(256, "tokens per sequence", 2, 1 << 20)
    train_batch_tokens: int = const(2_048, "tokens per step, all ranks", 2, 1 << 30)
    shuffle: bool = const(True, "sequences of a step come from all over the stream; 0: one after the other")
    device_batch_size: int = const(0, "sequences per rank and micro-step; 0: what fits", 0, 1 << 20)
    val_tokens: int = const(0, "scored tokens, from the start of the val split; 0: all")
    val_batch_size: int = const(65_536, "tokens per evaluation step and rank", 1, 1 << 30)
    eval_context: int = const(0, "tokens per evaluation row; 0: train_seq_len", 0, 1 << 20)
    eval_stride: int = const(0, "targets scored per evaluation row; 0: eval_context", 0, 1 << 20)
    # model
    num_layers: int = const(4, "blocks", 1, 1000)
    model_dim: int = const(128, "width of the residual stream", 2, 1 << 16)
    num_heads: int = const(2, "query heads", 1, 4096)
    num_kv_heads: int = const(0, "key and value heads; 0: num_heads", 0, 4096)
    mlp_mult: int = const(3, "hidden width of the MLP in model_dim", 1, 64)
    tie_embeddings: bool = const(False, "the head is the embedding")
    tied_embed_init_std: float = const(0.005, "of a tied embedding; an untied one starts at 1", 0, 100)
    logit_softcap: float = const(15.0, "logits = cap * tanh(x / cap); 0: none", 0, 1e4)
    qk_gain_init: float = const(1.5, "learnt gain per head on normalised queries; 0: none", 0, 100)
    rope_base: float = const(1_000.0, "longest RoPE wavelength / 2 pi, tokens; 0: no RoPE", 0, 1e9)
    residual_mix: bool = const(True, "blocks read a learnt mix of the stream and the embedding")
    layer_scale: bool = const(True, "learnt scale per channel of what attention and MLP add")
    unet_skips: bool = const(True, "learnt skips from first to second half of the blocks, inside out")
    value_embed_layers: tuple[int, ...] = const((1,), "1 per layer with token-indexed value embedding", 0, 1)
    window_pattern: str = const("L", "L long or S short attention window per layer")
    window_schedule: tuple[int, ...] = const((0,), "L per stage, tokens; 0: all. S: half of it")
    # optimizer
    matrix_lr: float = const(0.03, "Muon: matrices inside the blocks", 0, 10)
    embed_lr: float = const(0.3, "Adam: untied embedding, value embeddings", 0, 10)
    head_lr: float = const(0.008, "Adam: untied head", 0, 10)
    tied_embed_lr: float = const(0.05, "Adam: tied embedding", 0, 10)
    scalar_lr: float = const(0.04, "Adam: gains, scales, mixes", 0, 10)
    muon_momentum: float = const(0.95, "after its warm-up", 0, 0.9999)
    muon_momentum_warmup_start: float = const(0.85, "at step 0", 0, 0.9999)
    muon_momentum_warmup_steps: int = const(300, "steps; 0: none")
    muon_backend_steps: int = const(5, "Newton-Schulz iterations", 1, 20)
    weight_decay: float = const(0.0, "cautious, on matrices, times their LR; 0: none", 0, 10)
    beta1: float = const(0.8, "Adam", 0, 0.9999)
    beta2: float = const(0.95, "Adam", 0, 0.99999)
    adam_eps: float = const(1e-8, "Adam", 1e-20, 1)
    grad_clip_norm: float = const(0.0, "global gradient norm; 0: no clipping", 0, 1e6)
    # schedule
    iterations: int = const(100_000, "steps at most", 1, 10**9)
    max_wallclock_seconds: float = const(120.0, "of training; 0: no cap", 0, 1e7)
    warmup_steps: int = const(2, "steps on random tokens before the clock, undone", 0, 1000)
    warmdown_iters: int = const(0, "steps of LR decay, at most half the run; 0: warmdown_frac")
    warmdown_frac: float = const(0.5, "part of the run over which LR decays", 0, 1)
    lr_floor: float = const(0.0, "LR factor at the end of the decay", 0, 1)
    batch_schedule: tuple[int, ...] = const((1,), "train_batch_tokens times this, per stage", 1, 1024)
    batch_lr_power: float = const(0.0, "LR factor = multiple ** this; 0: none", 0, 2)
    # reports
    train_log_every: int = const(50, "steps; 0: only the first ten")
    val_loss_every: int = const(0, "steps; 0: only at the end")
    artifact_bytes_limit: int = const(0, "bytes of script and artifact; 0: no limit")
    score_artifact: bool = const(True, "result.json scores the artifact; 0: the trained weights")

PRESETS = {  # what differs from the defaults above
    # one CPU or GPU, 120 s; lowest val_bpb on the embedded corpus
    "tiny": {},
    # 8xH100, 600 s, 16,000,000 bytes; val_bpb 1.2014 (three seeds: mean 1.20136, std 0.0019)
    "golf": dict(
        data_path="data/datasets/fineweb10B_sp1024", tokenizer_path="data/tokenizers/fineweb_1024_bpe.model",
        data_fingerprint="", vocab_size=1024, train_seq_len=4096, train_batch_tokens=393_216,
        val_batch_size=524_288, num_layers=9, model_dim=512, num_heads=8, num_kv_heads=4, mlp_mult=2,
        tie_embeddings=True, logit_softcap=30.0, rope_base=10_000.0, value_embed_layers=(0,), shuffle=False,
        matrix_lr=0.02, scalar_lr=0.02, tied_embed_lr=0.03, embed_lr=0.6, head_lr=0.008, beta1=0.9,
        muon_momentum=0.99, muon_momentum_warmup_start=0.92, muon_momentum_warmup_steps=1500,
        iterations=20_000, max_wallclock_seconds=600.0, warmup_steps=20, warmdown_iters=3000,
        train_log_every=200, val_loss_every=1000, artifact_bytes_limit=16_000_000),
}
DATA_COMMANDS = {"embedded": "./run.sh data", "fineweb10B_sp1024": "./run.sh data sp1024 -n 40",
                 "fineweb10B_gpt2": "./run.sh data gpt2"}
ALIASES = {"total_batch_size": "train_batch_tokens", "num_iterations": "iterations", "model_tag": "run_id",
           "run": "run_id"}
FIELDS = {f.name: f for f in fields(Config)}
NAMES = [*FIELDS, *ALIASES]
SHAPE = """preset vocab_size train_seq_len num_layers model_dim num_heads num_kv_heads mlp_mult tie_embeddings
    logit_softcap qk_gain_init rope_base residual_mix layer_scale unet_skips value_embed_layers window_pattern
    window_schedule""".split()      # the constants that an artifact carries
READERS = {     # type of a constant: (from text, what the text must be)
    bool: (lambda text: {"0": False, "1": True, "false": False, "true": True}[text.lower()],
           "0, 1, true or false"),
    int: (int, "a whole number"), float: (float, "a number"), str: (str, "text"),
    tuple[int, ...]: (lambda text: tuple(map(int, text.split(","))), "whole numbers with commas")}

def nearest(word, known):
    """[the known name that word resembles], or []."""
    return difflib.get_close_matches(word, known, 1, 0.75)

def near_misses(env):
    """[(variable, constant)] of each variable that no constant reads and that is one slip away from one."""
    known, found = [name.upper() for name in NAMES], []
    for key in env:
        near = nearest(key.upper(), [name for name in known if abs(len(key) - len(name)) < 2])
        found += [(key, name) for name in near if key not in known]
    return found

def parse_value(name, text):
    """Text -> a value of the constant's type. Raises Refused."""
    read, legal = READERS[FIELDS[name].type]
    try:
        text.encode()  # a ValueError too, for bytes of the environment that are no UTF-8
        return read(text)
    except (KeyError, ValueError):
        raise Refused(f"{name}={text!r} must be {legal}") from None

def parse_flags(argv):
    """--matrix-lr=0.03, --matrix-lr 0.03 and bare --compile -> {name as typed: text}. Raises Refused."""
    flags, rest = {}, list(argv)
    while rest:
        arg, given, text = rest.pop(0).partition("=")
        typed = arg[2:].replace("-", "_")
        f = FIELDS.get(ALIASES.get(typed, typed))
        if not arg.startswith("--") or not f:
            near, = nearest(typed, NAMES) or ["help"]
            raise Refused(f"unknown argument {arg}; did you mean --{near.replace('_', '-')}?")
        if not given:  # the value is the next word; a Boolean can do without
            bare = not rest or rest[0].startswith("--")
            demand(not bare or f.type is bool, f"{arg} needs a value")
            text = "1" if bare else rest.pop(0)
        flags[typed] = text
    return flags

def load_config(env, argv=()):
    """Default < preset < environment < flag. env: a mapping of NAME to text; argv: flags. Raises Refused."""
    given = {}
    for source in ({name: env[name.upper()] for name in NAMES if name.upper() in env}, parse_flags(argv)):
        texts = {}
        for typed, text in source.items():
            name = ALIASES.get(typed, typed)
            first = texts.setdefault(name, text)
            demand(first == text, f"{name} is given twice, as {first} and as {text}")
            given[name] = parse_value(name, text)
    cfg = replace(preset_config(given.get("preset", Config.preset)), **given)
    check_config(cfg)
    return cfg

def preset_config(preset):
    demand(preset in PRESETS, f"preset={preset!r} is none of {', '.join(PRESETS)}")
    return Config(preset=preset, **PRESETS[preset])

def check_config(cfg):
    """Refuses what no data and no number of ranks could make possible."""
    for name, value in vars(cfg).items():
        f = FIELDS[name]
        doc, lo, hi = f.metadata.values()
        numbers = value if isinstance(value, tuple) else [value] * (f.type in (int, float))
        demand(all(lo <= number <= hi for number in numbers),
               f"{name}={show(value)} must be a number from {lo:g} to {hi:g}")
        demand(" | " not in doc or value in doc.split(" | "), f"{name}={value!r} must be {doc}")
    heads, batch, context = cfg.num_heads, cfg.train_batch_tokens, cfg.eval_context or cfg.train_seq_len
    kv_heads, head_dim = cfg.num_kv_heads or heads, cfg.model_dim / heads
    stages, windows = len(cfg.batch_schedule), len(cfg.window_schedule)
    demand(re.fullmatch(r"[\w.,=+-]*", cfg.run_id) and cfg.run_id not in (".", ".."),
           f"run_id={cfg.run_id!r} names a folder: letters, digits and . _ - + = , only")
    demand(head_dim % 1 == 0, f"num_heads={heads} does not divide model_dim={cfg.model_dim}")
    demand(heads % kv_heads == 0, f"num_kv_heads={kv_heads} does not divide num_heads={heads}")
    demand(not cfg.rope_base or cfg.rope_base >= 1 and head_dim % 2 == 0, f"rope_base={cfg.rope_base:g} must "
           f"be 0, or at least 1 and model_dim / num_heads = {head_dim:g} even")
    demand(batch % cfg.train_seq_len == 0,
           f"train_batch_tokens={batch} is no multiple of train_seq_len={cfg.train_seq_len}")
    demand(cfg.eval_stride <= context, f"eval_stride={cfg.eval_stride} skips targets in rows of {context}")
    demand(cfg.val_tokens != 1, "val_tokens=1 has no target to score")
    demand(re.fullmatch("[LS]+", cfg.window_pattern), f"window_pattern={cfg.window_pattern!r} is not L and S")
    demand(1 in (stages, windows) or stages == windows,
           f"batch_schedule has {stages} stages, window_schedule {windows}")

def overrides(cfg):
    """{name: (the preset's value, the value in force)} where environment or flags changed it."""
    pairs = zip(FIELDS, vars(preset_config(cfg.preset)).values(), vars(cfg).values())
    return {name: (old, new) for name, old, new in pairs if old != new}

def show(value):
    """A constant as one would type it; of an absolute path only the last part."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, str) and os.path.isabs(value):
        return os.path.basename(value.rstrip("/"))
    return str(int(value) if isinstance(value, bool) else value)

def help_text():
    lines = [__doc__, "NAME=value in the environment or --name=value. [default | presets]"]
    for name, f in FIELDS.items():
        values = [show(f.default)] + [f"{p} {show(row[name])}" for p, row in PRESETS.items() if name in row]
        lines.append(f"  --{name.replace('_', '-'):28} {f.metadata['doc']}  [{' | '.join(values)}]")
    return "\n".join([*lines, "Aliases: " + ", ".join(map(" = ".join, ALIASES.items()))])

# ------------------------------------------------------------ 4 model
def rms_norm(x):
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)

def linear(x, weight):
    """x @ weight.T in the dtype of x; master weights stay fp32."""
    return F.linear(x, weight.to(x.dtype))

def attention(q, k, v, mask):
    """Causal attention. q (B, H, T, D), k and v (B, KV, T, D), mask (T, T) bool, None for the whole past."""
    if (groups := q.size(1) // k.size(1)) > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)

def mlp(x, fc, proj):
    """ReLU^2 MLP (Primer, arXiv:2109.08668). x (B, T, C), fc (hidden, C), proj (C, hidden)."""
    return linear(F.relu(linear(x, fc)).square(), proj)

def softcap(logits, cap):
    return cap * torch.tanh(logits / cap) if cap else logits

def lm_loss(x, head, targets, cap):
    """Mean cross-entropy, nats. x (B, T, C), head (V, C), targets (B, T)."""
    return F.cross_entropy(softcap(linear(x, head).float(), cap).flatten(0, 1), targets.flatten())

def rope_tables(T, head_dim, base):
    """cos and sin, each (T, head_dim / 2) fp32 (RoFormer, arXiv:2104.09864)."""
    angles = torch.arange(T)[:, None] * base ** (-torch.arange(0, head_dim, 2) / head_dim)
    return angles.cos(), angles.sin()

def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)

def per_layer(values, num_layers):
    """A per-layer list, repeated or cut to the number of layers."""
    return [values[i % len(values)] for i in range(num_layers)]

def window_sizes(cfg, window, T):
    """Tokens that long and short layers look back on among T, themselves included. window 0: all."""
    return {"L": min(window or T, T), "S": min(T, max(1, (window or cfg.train_seq_len) // 2))}

def parameter(*shape, on=True):
    return nn.Parameter(torch.empty(shape)) if on else None

class Block(nn.Module):
    """Attention and MLP, each on the normalised stream (pre-norm)."""
    def __init__(self, cfg, value_embed):
        super().__init__()
        C, H, KV = cfg.model_dim, cfg.num_heads, cfg.num_kv_heads or cfg.num_heads
        self.head_dim = D = C // H
        self.query, self.key, self.value = parameter(H * D, C), parameter(KV * D, C), parameter(KV * D, C)
        self.attn_proj = parameter(C, H * D)
        self.fc, self.mlp_proj = parameter(cfg.mlp_mult * C, C), parameter(C, cfg.mlp_mult * C)
        self.qk_gain = parameter(H, on=cfg.qk_gain_init)
        self.residual_mix = parameter(2, C, on=cfg.residual_mix)
        self.layer_scale = parameter(2, C, on=cfg.layer_scale)
        self.value_embed = parameter(cfg.vocab_size, KV * D, on=value_embed)

    def forward(self, x, x0, tokens, rope, mask):
        """x and x0, the stream and the embedding (B, T, C); tokens (B, T) -> the new stream."""
        B, T, _ = x.shape
        if self.residual_mix is not None:
            mix = self.residual_mix.to(x.dtype)
            x = mix[0] * x + mix[1] * x0
        scale = (1, 1) if self.layer_scale is None else self.layer_scale.to(x.dtype)
        h = rms_norm(x)
        q, k, v = linear(h, self.query), linear(h, self.key), linear(h, self.value)
        if self.value_embed is not None:
            v = v + F.embedding(tokens, self.value_embed).to(x.dtype)
        q, k, v = (y.view(B, T, -1, self.head_dim).transpose(1, 2) for y in (q, k, v))
        q, k = rms_norm(q), rms_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if self.qk_gain is not None:
            q = q * self.qk_gain.to(q.dtype)[:, None, None]
        x = x + scale[0] * linear(attention(q, k, v, mask).transpose(1, 2).reshape(B, T, -1), self.attn_proj)
        return x + scale[1] * mlp(rms_norm(x), self.fc, self.mlp_proj)

class GPT(nn.Module):
    """Decoder-only transformer. Sees cfg only, vocab_size resolved; dtype is that of the activations."""
    def __init__(self, cfg, dtype=torch.float32):
        super().__init__()
        self.cfg, self.dtype, half = cfg, dtype, cfg.num_layers // 2
        self.embed = parameter(cfg.vocab_size, cfg.model_dim)
        embeds = per_layer(cfg.value_embed_layers, cfg.num_layers)
        self.blocks = nn.ModuleList(Block(cfg, value_embed) for value_embed in embeds)
        self.skips = {half + i: half - 1 - i for i in range(half)} if cfg.unet_skips else {}  # {to: from}
        self.skip_weights = parameter(len(self.skips), cfg.model_dim, on=self.skips)
        self.head = self.embed if cfg.tie_embeddings else parameter(cfg.vocab_size, cfg.model_dim)

    def set_context(self, T, window):
        """Positions and masks for sequences of T tokens; window: that of a long layer, tokens, 0: all."""
        cfg, device, self.rope = self.cfg, self.embed.device, None
        if cfg.rope_base:
            tables = rope_tables(T, cfg.model_dim // cfg.num_heads, cfg.rope_base)
            self.rope = [t.to(device, self.dtype) for t in tables]
        distance = torch.arange(T, device=device)[:, None] - torch.arange(T, device=device)
        self.masks = {kind: None if reach >= T else (distance >= 0) & (distance < reach)
                      for kind, reach in window_sizes(cfg, window, T).items()}

    def hidden(self, tokens):
        """tokens (B, T) -> last activations, normalised (B, T, C)."""
        x = x0 = rms_norm(F.embedding(tokens, self.embed).to(self.dtype))
        outputs, kinds = [], per_layer(self.cfg.window_pattern, len(self.blocks))
        for i, block in enumerate(self.blocks):
            if (source := self.skips.get(i)) is not None:
                x = x + self.skip_weights[source].to(x.dtype) * outputs[source]
            outputs.append(x := block(x, x0, tokens, self.rope, self.masks[kinds[i]]))
        return rms_norm(x)

    def logits(self, tokens):
        """tokens (B, T) -> (B, T, V) fp32."""
        return softcap(linear(self.hidden(tokens), self.head).float(), self.cfg.logit_softcap)

    def forward(self, tokens, targets):
        """Mean training loss, nats. tokens and targets (B, T)."""
        return lm_loss(self.hidden(tokens), self.head, targets, self.cfg.logit_softcap)

# Last part of a parameter's name: (its first values, its group in the optimizer)
PARAMETERS = dict.fromkeys(("query", "key", "value", "fc"), ("uniform", "matrix")) | {
    "attn_proj": ("zeros", "matrix"), "mlp_proj": ("zeros", "matrix"), "skip_weights": ("ones", "scalar"),
    "embed": ("embed", "embed"), "head": ("zeros", "head"), "value_embed": ("zeros", "value_embed"),
    "qk_gain": ("gain", "scalar"), "residual_mix": ("mix", "scalar"), "layer_scale": ("ones", "scalar")}

def parameter_rule(name):
    """(first values, group) of a parameter. KeyError for one that PARAMETERS does not know."""
    return PARAMETERS[name.rsplit(".", 1)[-1]]

@torch.no_grad()
def init_parameters(model, seed):
    """Draws on the CPU, so that every device starts from the same values."""
    generator, cfg = torch.Generator().manual_seed(seed), model.cfg
    for name, p in model.named_parameters():
        first, value = parameter_rule(name)[0], torch.zeros(p.shape)
        if first == "uniform":  # torch's own default for a Linear
            value.uniform_(-p.size(1) ** -0.5, p.size(1) ** -0.5, generator=generator)
        elif first == "embed":
            value.normal_(0, cfg.tied_embed_init_std if cfg.tie_embeddings else 1, generator=generator)
        elif first == "mix":  # all stream, no embedding
            value[0] = 1
        elif first != "zeros":
            value += 1 if first == "ones" else cfg.qk_gain_init
        p.copy_(value)

# ------------------------------------------------------------ 5 optimizer
def orthogonalize(g, steps):
    """g (N, R, C) -> roughly the nearest semi-orthogonal matrices: singular values end in [0.6, 1.3].
    Newton-Schulz with Muon's quintic coefficients (kellerjordan.github.io/posts/muon), in bf16, but on the
    CPU, where that is slow, in fp32."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.float() if g.device.type == "cpu" else g.bfloat16()
    if tall := x.size(-2) > x.size(-1):
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(g.dtype)

def muon_update(grad, buffer, momentum, steps):
    """Nesterov momentum, orthogonalised; tall matrices move as far as square ones. grad and buffer (N, R, C);
    buffer changes in place. Returns what to subtract, before LR."""
    buffer.lerp_(grad, 1 - momentum)
    return orthogonalize(grad.lerp(buffer, momentum), steps) * max(1, grad.size(-2) / grad.size(-1)) ** 0.5

def adam_update(grad, m, v, step, beta1, beta2, eps):
    """Adam (arXiv:1412.6980), step from 1; m and v change in place. Returns what to subtract, before LR."""
    m.lerp_(grad, 1 - beta1)
    v.lerp_(grad.square(), 1 - beta2)
    return m / (1 - beta1 ** step) / ((v / (1 - beta2 ** step)).sqrt() + eps)

# torch 2.13 renamed the two
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)
all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)

def all_reduce(tensor, world_size, op="SUM"):
    """Sum or MAX over the ranks, in place."""
    if world_size > 1:
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
    return tensor

class Bank:
    """Parameters of one kind in one flat buffer, so that one collective serves them all. They and their
    gradients become views of data and grad, cut into units: a matrix for Muon, 64 numbers for Adam, padded to
    a multiple of world_size. Each rank keeps optimizer state for its own share of the units."""
    def __init__(self, group, names, params, rank, world_size):
        self.group, self.names = group, names
        unit, states = (tuple(params[0].shape), 1) if group == "matrix" else ((64,), 2)
        size = math.prod(unit)
        places = np.cumsum([0] + [math.ceil(p.numel() / size) for p in params])
        share = math.ceil(places[-1] / world_size) * size
        self.data = torch.zeros(share * world_size, device=params[0].device)
        self.grad = torch.zeros_like(self.data)
        for p, place in zip(params, places):
            here = slice(place * size, place * size + p.numel())
            self.data[here] = p.data.flatten()
            p.data, p.grad = self.data[here].view(p.shape), self.grad[here].view(p.shape)
        self.my_data = self.data[rank * share:(rank + 1) * share].view(-1, *unit)
        self.my_grad = torch.zeros_like(self.my_data) if world_size > 1 else self.grad.view(-1, *unit)
        self.state = [torch.zeros_like(self.my_data) for _ in range(states)]

class Optimizer:
    """Muon for matrices, Adam for the rest. Reduces gradients once per step; ranks share the state."""
    def __init__(self, model, cfg, rank=0, world_size=1):
        self.cfg, self.world_size, self.step_count, kinds = cfg, world_size, 0, {}
        for name, p in model.named_parameters():
            kind = (group := parameter_rule(name)[1], p.shape if group == "matrix" else None)
            kinds.setdefault(kind, []).append((name, p))
        self.banks = [Bank(group, *zip(*members), rank, world_size) for (group, _), members in kinds.items()]
        covered = [name for bank in self.banks for name in bank.names]
        assert sorted(covered) == sorted(dict(model.named_parameters())), "each parameter in one bank"
        embed_lr = cfg.tied_embed_lr if cfg.tie_embeddings else cfg.embed_lr
        self.lr = dict(matrix=cfg.matrix_lr, embed=embed_lr, value_embed=cfg.embed_lr, head=cfg.head_lr,
                       scalar=cfg.scalar_lr)

    def zero_grad(self):
        for bank in self.banks:
            bank.grad.zero_()

    def tensors(self):
        """All that a step changes, parameters included."""
        return [t for bank in self.banks for t in (bank.data, *bank.state)]

    @torch.no_grad()
    def step(self, lr_factor, momentum):
        """One step from the gradients that each rank summed; they are averaged over the ranks here."""
        cfg, self.step_count = self.cfg, self.step_count + 1
        if self.world_size > 1:
            jobs = [reduce_scatter(bank.my_grad.flatten(), bank.grad, async_op=True) for bank in self.banks]
            for bank, job in zip(self.banks, jobs):
                job.wait()
                bank.my_grad.div_(self.world_size)
        if cfg.grad_clip_norm:
            norm = all_reduce(sum(bank.my_grad.square().sum() for bank in self.banks), self.world_size).sqrt()
            for bank in self.banks:
                bank.my_grad.mul_((cfg.grad_clip_norm / (norm + 1e-6)).clamp(max=1))
        for bank in self.banks:
            lr, p, args = self.lr[bank.group] * lr_factor, bank.my_data, (bank.my_grad, *bank.state)
            if bank.group == "matrix":
                update = muon_update(*args, momentum, cfg.muon_backend_steps)
                if cfg.weight_decay:  # only where the update shrinks the weight too (arXiv:2411.16085)
                    p.addcmul_(p, (p * update > 0).to(p.dtype), value=-lr * cfg.weight_decay)
            else:
                update = adam_update(*args, self.step_count, cfg.beta1, cfg.beta2, cfg.adam_eps)
            p.sub_(update, alpha=lr)
        if self.world_size > 1:
            for job in [all_gather(b.data, b.my_data.flatten(), async_op=True) for b in self.banks]:
                job.wait()

# ------------------------------------------------------------ 6 schedules
class Stage(NamedTuple):
    start: float            # part of the run at which it begins
    batch_multiple: int     # of train_batch_tokens
    window: int             # of a long layer, tokens; 0: all

def stage_table(cfg):
    """Stages of equal length in progress; a table of one entry serves them all."""
    n = max(len(cfg.batch_schedule), len(cfg.window_schedule))
    starts = (i / n for i in range(n))
    return [*map(Stage, starts, per_layer(cfg.batch_schedule, n), per_layer(cfg.window_schedule, n))]

def stage_at(cfg, progress):
    return [stage for stage in stage_table(cfg) if stage.start <= progress + 1e-9][-1]

def run_progress(cfg, step, elapsed):
    """Part of the run that is done, 0 to 1: of the steps or of the training seconds, whichever is further."""
    cap = cfg.max_wallclock_seconds
    return min(1.0, max(step / cfg.iterations, elapsed / cap if cap else 0.0))

def lr_factor(cfg, step, progress):
    """Factor on every LR at this step and progress."""
    # 1. a decay counted in steps becomes a part of the run, at the pace so far, and at most half of it
    decay = cfg.warmdown_frac
    if cfg.warmdown_iters:
        decay = min(0.5, cfg.warmdown_iters * progress / step if step else 0.5)
    # 2. constant until the decay begins, then linear down to the floor
    factor = 1.0 if progress <= 1 - decay else cfg.lr_floor + (1 - cfg.lr_floor) * (1 - progress) / decay
    # 3. larger batches allow larger steps
    return factor * stage_at(cfg, progress).batch_multiple ** cfg.batch_lr_power

def muon_momentum(cfg, step):
    part = min(1.0, step / cfg.muon_momentum_warmup_steps) if cfg.muon_momentum_warmup_steps else 1.0
    return cfg.muon_momentum_warmup_start + (cfg.muon_momentum - cfg.muon_momentum_warmup_start) * part

# ------------------------------------------------------------ 7 data
SHARD_HEAD, SHARD_HEADER_BYTES = [20240520, 1], 1024  # magic, version; then the number of tokens

def open_shard(path, tokens=None):
    """A .bin shard -> memory map of its uint16 tokens. tokens: as the manifest has it. Raises Refused."""
    size, head = os.path.getsize(path), np.fromfile(path, "<i4", 3).tolist()
    demand(head[:2] == SHARD_HEAD, f"{path.name} is no token shard: it begins {head[:2]}, not {SHARD_HEAD}")
    demand(SHARD_HEADER_BYTES < size == SHARD_HEADER_BYTES + 2 * head[-1],
           f"shard {path.name} is truncated or its header lies: {size} bytes for {head[-1]} tokens")
    demand(tokens in (None, head[-1]), f"{path.name} has {head[-1]} tokens, its manifest says {tokens}")
    return np.memmap(path, "<u2", "r", SHARD_HEADER_BYTES)

def check_tokens(tokens, vocab_size, name):
    """Refuses tokens outside the vocabulary. Reads them once, in pieces."""
    largest = max(int(tokens[i:i + (1 << 24)].max()) for i in range(0, len(tokens), 1 << 24))
    demand(largest < vocab_size, f"{name} holds token {largest}, but vocab_size is {vocab_size}")

class Data(NamedTuple):
    """An opened dataset: memory maps of its tokens, and what is known of the text behind them."""
    name: str
    train: dict  # {shard: tokens}
    val: np.ndarray
    tokenizer: object  # SentencePieceProcessor or None
    vocab_size: int
    bos: int
    val_bytes: int | None  # UTF-8 bytes of the val documents
    fingerprint: str | None
    lines: list                     # for the log
    sha256: dict                    # of val shards and tokenizer, by name

def table_bytes(sp, tokens, bos):
    """UTF-8 bytes behind tokens, summed per token: the field's short cut, wrong if a tokenizer normalises.
    A dummy prefix, which decoding takes off again, does not count."""
    pieces = [sp.id_to_piece(i) for i in range(sp.vocab_size())]
    sizes = np.array([0 if sp.is_control(i) or sp.is_unused(i) else 1 if sp.is_byte(i) else
                      len((sp.decode([i]) if sp.is_unknown(i) else piece.replace("\u2581", " ")).encode())
                      for i, piece in enumerate(pieces)])
    first, total = sp.encode("a")[0], int(np.bincount(tokens, minlength=len(sizes)) @ sizes)
    if len(sp.decode([first])) < sizes[first]:
        spaced = np.array([piece.startswith("\u2581") for piece in pieces])
        total -= int(spaced[tokens[1:][tokens[:-1] == bos]].sum())
    return total

def decoded_bytes(sp, tokens, bos):
    """UTF-8 bytes behind tokens by decoding every document, from one bos to the next: the definition."""
    edges, total = np.unique(np.r_[0, np.flatnonzero(tokens == bos), len(tokens)]), 0
    for i in range(0, len(edges) - 1, 4096):
        some = edges[i:i + 4097]
        texts = sp.decode([tokens[a:b].tolist() for a, b in zip(some, some[1:])])
        total += sum(len(text.encode()) for text in texts)
    return total

def file_sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

def open_data(cfg):
    """Finds, opens and checks the dataset of cfg.data_path. Raises Refused."""
    name = os.path.basename(cfg.data_path.rstrip("/"))
    get_it = f"get it with `{DATA_COMMANDS.get(name, './run.sh data --text PATH --name NAME')}`"
    demand(name and os.path.isdir(cfg.data_path), f"no dataset at {show(cfg.data_path)!r}: {get_it}", Missing)
    try:
        return read_dataset(cfg, Path(cfg.data_path), name, get_it)
    except Refused:
        raise
    except Exception as error:  # json, numpy and sentencepiece each have their own for bad files
        raise Refused(f"manifest.json, a shard or the tokenizer of {name} is damaged or missing "
                      f"({brief(error)}): {get_it}") from None

def read_dataset(cfg, folder, name, get_it):
    """open_data but for unreadable files. manifest.json lists the shards; without one *_train_*.bin and
    *_val_*.bin are taken by name."""
    # 1. the shards
    files = [{"path": path.name, "split": split} for split in ("train", "val")
             for path in sorted(folder.glob(f"*_{split}_*.bin"))]
    path, shards, sha256 = folder / "manifest.json", {}, {}
    manifest = json.loads(path.read_text()) if path.exists() else {"files": files}
    for split in ("train", "val"):
        files = [(folder / f["path"], f) for f in manifest["files"] if f["split"] == split]
        demand(files, f"dataset {name} has no {split} split: {get_it}", Missing)
        shards[split] = {path.name: open_shard(path, f.get("tokens")) for path, f in files}
        demand(len(shards[split]) == len(files), f"dataset {name} lists a {split} shard twice")
    train, val = shards["train"], list(shards["val"].values())
    # 2. the tokenizer that made them
    tokenizer, about, val_bytes = None, manifest.get("tokenizer") or {}, manifest.get("val_bytes")
    vocab_size, bos = about.get("vocab_size", 0), about.get("bos_id", 50256)
    if path := cfg.tokenizer_path or "path" in about and os.path.normpath(folder / about["path"]):
        import sentencepiece
        digest = sha256[os.path.basename(path)] = file_sha256(path)
        tokenizer = sentencepiece.SentencePieceProcessor(model_file=path)
        size, bos = tokenizer.vocab_size(), tokenizer.bos_id()
        demand(about.get("sha256", digest) == digest, f"tokenizer {show(path)} did not make dataset {name}")
        demand(vocab_size in (0, size), f"tokenizer {show(path)} has {size} tokens, {name} {vocab_size}")
        vocab_size = size
    vocab_size = vocab_size or cfg.vocab_size
    demand(vocab_size, f"dataset {name} has no tokenizer: give VOCAB_SIZE")
    demand(cfg.vocab_size in (0, vocab_size),
           f"vocab_size={cfg.vocab_size}, but the tokenizer of {name} has {vocab_size} tokens")
    # 3. the tokens
    val = val[0] if len(val) == 1 else np.concatenate(val)
    check_tokens(val, vocab_size, f"the val split of {name}")
    train_tokens, row = sum(map(len, train.values())), cfg.eval_context or cfg.train_seq_len
    for split, tokens, least, why in (
            ("val", len(val), max(row + 1, cfg.val_tokens), f"rows of {row} or val_tokens={cfg.val_tokens}"),
            ("train", train_tokens, cfg.train_seq_len + 1, "one sequence")):
        demand(tokens >= least, f"the {split} split of {name} has {tokens} tokens, too few for {why}")
    lines = [f"data: {name} train tokens:{train_tokens} in {len(train)} shards, val tokens:{len(val)}"]
    # 4. the bytes that val_bpb divides by
    demand(val_bytes is None or type(val_bytes) is int and val_bytes > 0,
           f"manifest.json of {name} is damaged: val_bytes is {val_bytes!r}")
    if tokenizer:
        table, counted = table_bytes(tokenizer, val, bos), val_bytes is None
        val_bytes = decoded_bytes(tokenizer, val, bos) if counted else val_bytes
        demand(table == val_bytes or not about.get("lossless"),
               f"the val text of {name} has {val_bytes} bytes, but {table} by its tokens: prepare it again")
        lines.append(f"data: val_bytes:{val_bytes} ({'decoded tokens' if counted else 'manifest'}), "
                     f"by the per-token table:{table}")
    elif val_bytes is None:
        lines.append("data: no tokenizer to count the bytes of the val text with, so val_bpb is null")
    for f in manifest["files"]:
        if f["split"] == "val":
            digest = sha256[f["path"]] = file_sha256(folder / f["path"])
            demand(f.get("sha256", digest) == digest, f"{f['path']} is not the shard that the manifest means")
    lines.append(f"data: text fingerprint {(fingerprint := manifest.get('text_fingerprint'))}")
    if cfg.data_fingerprint not in ("", fingerprint):
        lines.append(f"data: this is another game than {cfg.preset}, whose text is {cfg.data_fingerprint}")
    return Data(name, train, val, tokenizer, vocab_size, bos, val_bytes, fingerprint, lines, sha256)

class Loader:
    """Batches from the endless stream of train tokens: position p of the stream is token p mod their number.
    A step reads the batch_tokens after position, for any world size; a rank takes its contiguous share of
    the sequences. With shuffle the sequence at place i is the stream's number i * stride mod their count,
    stride being coprime to the count and about its golden section: a step then comes from all over the text,
    not from one document. A thread reads one step ahead; position is the whole state."""
    def __init__(self, cfg, data, team):
        self.T, self.team, self.vocab_size = cfg.train_seq_len, team, data.vocab_size
        self.names, self.shards = zip(*data.train.items())
        self.edges = np.cumsum([0, *map(len, self.shards)])
        self.position, self.checked, self.ahead = 0, set(), {}
        here = torch.cuda.set_device if team.on_gpu else None  # the thread pins memory
        self.thread = ThreadPoolExecutor(1, initializer=here, initargs=(team.device,) if here else ())
        self.stride, self.period = 1, int(self.edges[-1])
        if cfg.shuffle:
            self.period -= self.period % self.T
            self.stride = int(0.618 * self.period / self.T) + 1
            while math.gcd(self.stride, self.period // self.T) > 1:
                self.stride += 1

    def read(self, start, count):
        """count tokens from position start on, int64 (count,). Checks a shard before its first use."""
        parts = []
        while count:
            offset = start % self.edges[-1]
            i = int(np.searchsorted(self.edges, offset, "right")) - 1
            if i not in self.checked:
                check_tokens(self.shards[i], self.vocab_size, f"shard {self.names[i]}")
                self.checked.add(i)
            parts.append(self.shards[i][offset - self.edges[i]:][:count].astype(np.int64))
            start, count = start + len(parts[-1]), count - len(parts[-1])
        return np.concatenate(parts)

    def fetch(self, position, batch_tokens):
        """This rank's sequences of the step at position, each with one token more (B, T + 1)."""
        n = batch_tokens // self.team.world_size
        first = position + self.team.rank * n
        places = [place * self.stride % self.period for place in range(first, first + n, self.T)]
        rows = torch.from_numpy(np.stack([self.read(place, self.T + 1) for place in places]))
        return rows.pin_memory() if self.team.on_gpu else rows

    def next(self, batch_tokens):
        """(tokens, targets), each (sequences of this rank, T), on the device. Then reads the step after."""
        step, after = ((self.position + n, batch_tokens) for n in (0, batch_tokens))
        rows = (self.ahead.pop(step, None) or self.thread.submit(self.fetch, *step)).result()
        rows = rows.to(self.team.device, non_blocking=True)
        self.position, self.ahead = after[0], {after: self.thread.submit(self.fetch, *after)}
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    @property
    def epoch(self):
        return self.position // self.period + 1

# ------------------------------------------------------------ 8 evaluation
def log_probs(model, tokens):
    """tokens (B, T) int64 -> log-probabilities of the next token (B, T, V) fp32, whence every score."""
    return F.log_softmax(model.logits(tokens), -1)

class Score(NamedTuple):
    val_loss: float         # mean nats per target
    val_bpb: float | None   # bits per byte of the text; None for a part of the split

def eval_settings(cfg):
    """What a score depends on besides weights and text."""
    context = cfg.eval_context or cfg.train_seq_len
    return dict(eval_tokens=cfg.val_tokens or "full", eval_context=context,
                eval_stride=cfg.eval_stride or context, eval_window=cfg.window_schedule[-1] or "full")

@torch.no_grad()
def evaluate(model, cfg, data, team, log=print):
    """Scores each target of the val split's first val_tokens tokens once, shared by the ranks. Returns Score.
    A row holds eval_context tokens and scores its last eval_stride targets, the first row all of its own.
    Sums are fp64, so neither ranks nor rows per step change the score; on the CPU activations are fp32."""
    tokens = data.val[:cfg.val_tokens or None]
    _, context, stride, _ = eval_settings(cfg).values()
    n, world = len(tokens) - 1, team.world_size
    rows = math.ceil(max(0, n - context) / stride) + 1
    fit = (1 << 30 if team.on_gpu else 1 << 26) // (4 * context * data.vocab_size)  # rows of fp32 logits
    step = max(1, min(cfg.val_batch_size // context, fit, rows))
    training_dtype, model.dtype = model.dtype, model.dtype if team.on_gpu else torch.float32
    model.set_context(context, cfg.window_schedule[-1])
    sums, began = torch.zeros(2, dtype=torch.float64), time.perf_counter()
    spoken = began
    for first in range(team.rank * step, rows, step * world):
        low = np.arange(first, first + step)[:, None] * stride
        index = low + np.arange(context)
        scored = torch.from_numpy((index < n) & ((index >= low + context - stride) | (low == 0)))
        inputs, targets = (torch.from_numpy(tokens[np.minimum(index + shift, n)].astype(np.int64))
                           .to(team.device) for shift in (0, 1))
        nats = -log_probs(model, inputs).gather(-1, targets[..., None]).squeeze(-1)
        sums += torch.tensor([nats[scored.to(team.device)].double().sum(), scored.sum()])
        if (now := time.perf_counter()) - spoken > 5:
            spoken, part = now, min(1, (first + step) / rows)
            log(f"evaluation: {part:.0%} eta:{(now - began) * (1 / part - 1):.0f}s")
    model.dtype = training_dtype
    nats, count = all_reduce(sums, world).tolist()
    assert count == n, f"scored {count:.0f} targets of {n}"
    whole = data.val_bytes and len(tokens) == len(data.val)
    return Score(nats / n, nats / math.log(2) / data.val_bytes if whole else None)

def score_text(cfg, score, digits=4):
    """`val_loss:… val_bpb:…`; a score on less than the preset's own split is called val_loss_partial."""
    partial = "" if cfg.val_tokens in (0, preset_config(cfg.preset).val_tokens) else "_partial"
    bpb = "" if score.val_bpb is None else f" val_bpb:{score.val_bpb:.{digits}f}"
    return f"val_loss{partial}:{score.val_loss:.{digits}f}{bpb}"

@torch.no_grad()
def generate(model, prompt, count, temperature, generator):
    """Continues prompt (ids) by count tokens; temperature 0 is greedy. Returns the new ids."""
    ids, cfg = list(prompt), model.cfg
    for _ in range(count):
        recent = torch.tensor([ids[-cfg.train_seq_len:]], device=model.embed.device)
        model.set_context(recent.size(1), cfg.window_schedule[-1])
        scores = log_probs(model, recent)[0, -1].cpu()
        if temperature:
            ids.append(int(torch.multinomial((scores / temperature).softmax(-1), 1, generator=generator)))
        else:
            ids.append(int(scores.argmax()))
    return ids[len(prompt):]

def show_samples(model, cfg, data, log):
    """Continues cfg.sample, or the beginnings of three documents of the val split."""
    if not (sp := data.tokenizer) or not cfg.sample_tokens:
        return log("samples: none" + ", there is no tokenizer" * (not sp))
    starts = np.flatnonzero(data.val == data.bos)
    starts = starts[np.linspace(0, len(starts) - 1, 3).astype(int)] if len(starts) else [0]
    prompts = [data.val[i:i + 24].tolist() for i in starts]
    if cfg.sample:
        prompts = [[data.bos, *sp.encode(cfg.sample)]]
    generator = torch.Generator().manual_seed(cfg.seed)
    for i, prompt in enumerate(prompts, 1):
        new = generate(model, prompt, cfg.sample_tokens, cfg.sample_temperature, generator)
        text = sp.decode(prompt)
        log(f"sample {i}: {text}»{sp.decode(prompt + new)[len(text):]}")

# ------------------------------------------------------------ 9 artifact
CODEC = "int8"
CLIP_PERCENTILE = 99.99984      # of a row's magnitudes; what lies beyond is clipped
KEEP_NUMEL = 65_536             # tensors of at most this many numbers stay fp16

def quantize_rows(w):
    """w (R, C) fp32 -> int8 (R, C) and one fp16 scale per row (R,)."""
    place = CLIP_PERCENTILE / 100 * (w.size(1) - 1)
    top = w.abs().topk(w.size(1) - math.floor(place), 1).values  # the percentile lies between the last two
    clip = top[:, -1].lerp(top[:, max(-2, -top.size(1))], place % 1)
    scale = (clip / 127).clamp_min(2 ** -24).half()  # the least fp16: a row of zeros stays one
    return (w / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scale

def pack_artifact(model):
    """Weights and shape constants as bytes: int8 rows or fp16, fp32 for scalars that steer channels; zlib."""
    tensors = {}
    for name, p in model.named_parameters():
        w = p.detach().float().cpu()
        if w.ndim == 2 and w.numel() > KEEP_NUMEL:
            tensors[name + ".int8"], tensors[name + ".scale"] = quantize_rows(w)
        else:
            tensors[name] = w.clone() if parameter_rule(name)[1] == "scalar" else w.half()
    demand(all(t.isfinite().all() for t in tensors.values()),
           "the weights outgrew the artifact's fp16: lower the learning rates", Failed)
    return zlib.compress(to_bytes(model.cfg, tensors), 9)

def to_bytes(cfg, tensors):
    """torch.save through memory: a path would end up in the bytes."""
    payload = {"shape": {name: getattr(cfg, name) for name in SHAPE}, "tensors": tensors}
    torch.save(payload, buffer := io.BytesIO())
    return buffer.getvalue()

def load_model(path, device="cpu", base=None):
    """Artifact or final_model.pt -> (GPT ready for log_probs, Config). base: Config for all but the shape.
    Raises Refused."""
    try:
        raw = Path(path).read_bytes()
        raw = raw if raw[:2] == b"PK" else zlib.decompress(raw)
        payload = torch.load(io.BytesIO(raw), "cpu", weights_only=True)
        shape, tensors = {name: payload["shape"][name] for name in SHAPE}, payload["tensors"]
        demand(all(type(shape[name]) is type(getattr(Config, name)) for name in SHAPE), "bad shape constants")
        shape |= {"batch_schedule": (1,), "train_batch_tokens": shape["train_seq_len"]}
        cfg = replace(base or Config(), **shape)
        check_config(cfg)
        model = GPT(cfg)
        for name, p in model.named_parameters():
            w = tensors.pop(name, None)
            if w is None:
                w = tensors.pop(name + ".int8").float() * tensors.pop(name + ".scale").float()[:, None]
            demand(w.shape == p.shape and w.isfinite().all(), f"{name} has another shape or is not finite")
            p.data.copy_(w)
        demand(not tensors, f"unknown {list(tensors)[:1]}")
        model.to(device).dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
        model.set_context(cfg.train_seq_len, cfg.window_schedule[-1])
    except OSError as error:
        raise Refused(f"model {show(str(path))} cannot be read: {error.strerror}") from None
    except Exception as error:  # zlib, zip, pickle and torch have one each for bytes that are no model
        raise Refused(f"{show(str(path))} is damaged or no model of this trainer ({brief(error)})") from None
    return model.eval(), cfg

def write_atomically(path, content):
    """bytes -> path, whole or not at all."""
    with open(f"{path}.tmp", "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)

# ------------------------------------------------------------ 11 main
class Team:
    """The ranks of a run, and where this one computes. A single process is a team of one."""
    def __init__(self, cfg, env):
        self.rank, local = int(env.get("RANK", 0)), int(env.get("LOCAL_RANK", 0))
        self.world_size, self.ranks_here = int(env.get("WORLD_SIZE", 1)), int(env.get("LOCAL_WORLD_SIZE", 1))
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self.on_gpu = cfg.device == "cuda" or cfg.device == "auto" and gpus > 0
        demand(not self.on_gpu or max(local + 1, self.ranks_here) <= gpus,
               f"{self.ranks_here} ranks for {gpus} GPUs here: lower --nproc_per_node or use DEVICE=cpu")
        sequences = cfg.train_batch_tokens // cfg.train_seq_len
        demand(sequences % self.world_size == 0 or cfg.eval_from,
               f"{self.world_size} ranks do not divide the {sequences} sequences of a step")
        self.device = torch.device("cuda", local) if self.on_gpu else torch.device("cpu")
        bf16_units = (torch.cuda.is_bf16_supported(including_emulation=False) if self.on_gpu else
                      getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16"))
        auto = "bfloat16" if bf16_units else "float32"
        self.dtype = getattr(torch, auto if cfg.dtype == "auto" else cfg.dtype)
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        torch.use_deterministic_algorithms(not self.on_gpu)  # or compiled embedding gradients are not
        torch.utils.deterministic.fill_uninitialized_memory = False
        np.finfo(np.float32), np.finfo(np.float64)  # numpy warns if it looks first after the next line
        torch.set_flush_denormal(True)
        if "RANK" in env and not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if self.on_gpu else "gloo")

    def largest(self, *values):
        """The largest of the ranks' numbers, each of values by itself, without touching the device."""
        return all_reduce(torch.tensor(values, dtype=torch.float64), self.world_size, "MAX").tolist()

    def share(self, value):
        """Rank 0's object on every rank, which all wait for."""
        box = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(box)
        return box[0]

class Clock:
    """train_time in seconds: now() while it runs, total after stop; the device is idle at start and stop."""
    def __init__(self, team):
        self.total, self.synchronize = 0.0, torch.cuda.synchronize if team.on_gpu else lambda: None

    def start(self):
        self.synchronize()
        self.total -= time.perf_counter()

    def stop(self):
        self.synchronize()
        self.total = self.now()

    def now(self):
        return self.total + time.perf_counter()

class Log:
    """Lines to the terminal and to train.log, from rank 0; those from before there is a file wait."""
    def __init__(self, lead):
        self.lead, self.file, self.started = lead, io.StringIO(), False

    def __call__(self, *lines, echo=True):
        for line in map(scrub, lines):
            if self.lead and echo:
                print(line, flush=True)
            print(line, file=self.file, flush=True)

    def open(self, path, head):
        early, self.file = self.file.getvalue(), open(path, "w", encoding="utf-8")
        print(head, early, sep="\n", end="", file=self.file, flush=True)

def scrub(text):
    """Text without this machine's folders, but for a short one such as /, which is part of too much else."""
    for folder, word in ((os.getcwd(), "."), (os.path.expanduser("~"), "~")):
        text = text.replace(folder, word) if len(folder) > 3 else text
    return text

def brief(error):
    """An exception in one short line."""
    line = next(iter(str(error).strip().splitlines()), "").replace(platform.node() or "\n", "host")
    return scrub(f"{type(error).__name__}: {line}")[:200]

def out_of_memory(error):
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)

def hardware(team):
    """One line: what the run computes on."""
    if team.on_gpu:
        return f"{team.world_size}x {torch.cuda.get_device_name()}"
    about = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    name = re.search(r"model name\s*: (.+)|$", about)[1] or platform.machine()
    return f"{team.world_size} ranks x {torch.get_num_threads()} threads of {name}"

def parameter_counts(cfg):
    """{group of the optimizer: parameters}"""
    counts = {}
    with torch.device("meta"):
        for name, p in GPT(cfg).named_parameters():
            group = parameter_rule(name)[1]
            counts[group] = counts.get(group, 0) + p.numel()
    return counts

def flops_per_token(cfg):
    """Matmul FLOPs to train on a token: 6 per weight of blocks and head, 12 * width * half of the window."""
    sizes = window_sizes(cfg, cfg.window_schedule[-1], cfg.train_seq_len)
    keys = sum(sizes[kind] / 2 for kind in per_layer(cfg.window_pattern, cfg.num_layers))
    return 6 * (parameter_counts(cfg)["matrix"] + cfg.vocab_size * cfg.model_dim) + 12 * cfg.model_dim * keys

def step_memory(cfg, team, sequences):
    """Bytes that a rank needs for a step of so many sequences at a time, roughly."""
    total, width = sum(parameter_counts(cfg).values()), team.dtype.itemsize
    per_token = cfg.num_layers * cfg.model_dim * (14 + 3 * cfg.mlp_mult) * width + 14 * cfg.vocab_size
    return int(total * (8 + width + 8 / team.world_size) + sequences * cfg.train_seq_len * per_token)

def free_memory(team):
    """Bytes that a CPU rank may count on; a GPU's limit is found by trying."""
    if team.on_gpu or sys.platform != "linux":
        return math.inf
    known = re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    limit = limit.read_text().strip() if limit.exists() else "max"
    return min(int(known[1]) * 1024, math.inf if limit == "max" else int(limit)) / team.ranks_here

def micro_batch(cfg, team, at_most):
    """Sequences per rank and micro-step: the largest divisor of a rank's share of a step; at_most 0: all."""
    share = cfg.train_batch_tokens // cfg.train_seq_len // team.world_size
    return max(n for n in range(1, share + 1) if share % n == 0 and n <= (at_most or share))

def plan(cfg, team, micro):
    """Lines: size, cost, memory and schedule of the run."""
    counts, flops, batch = parameter_counts(cfg), flops_per_token(cfg), cfg.train_batch_tokens
    yield f"parameters:{sum(counts.values())} ({', '.join(f'{k} {v}' for k, v in counts.items())})"
    yield f"matmul FLOPs per token:{flops:.4g} per step:{flops * batch:.4g}"
    accum = batch // cfg.train_seq_len // team.world_size // micro
    yield (f"world_size:{team.world_size} device:{team.device.type} activations:{str(team.dtype)[6:]} "
           f"micro_batch:{micro}x{cfg.train_seq_len} grad_accum_steps:{accum} "
           f"memory:{step_memory(cfg, team, micro) >> 20} MiB (estimate)")
    yield (f"limits: {cfg.iterations} steps of {cfg.iterations * batch} tokens in all, "
           f"{cfg.max_wallclock_seconds:g} s (0: none)")
    for i, stage in enumerate(stage_table(cfg)):
        sizes = window_sizes(cfg, stage.window, cfg.train_seq_len)
        yield (f"stage {i} from {stage.start:.0%}: {batch * stage.batch_multiple} tokens per step, "
               f"long window {sizes['L']}, short {sizes['S']}")
    for part in (0, 0.5, 0.75, 1):
        step = int(part * cfg.iterations)
        yield (f"at {part:4.0%}: lr_factor {lr_factor(cfg, step, part):.4f} "
               f"muon_momentum {muon_momentum(cfg, step):.4f}")

def open_run(cfg, team, log, source):
    """Makes logs/<run_id>/ with the script and a train.log that begins with it. Returns (cfg, folder)."""
    kind, millisecond = "eval" if cfg.eval_from else cfg.preset, time.time_ns() // 10**6 % 1000
    now = time.strftime(f"%Y%m%d_%H%M%S_{millisecond:03}")
    run_id = team.share(cfg.run_id or f"{kind}_seed{cfg.seed}_{now}")
    folder, problem, rule = Path("logs", run_id), None, "=" * 100
    if team.rank == 0:
        about = [f"python {platform.python_version()} torch {torch.__version__} numpy {np.__version__} "
                 f"{platform.system()} {platform.machine()}", f"hardware: {hardware(team)}"]
        if team.on_gpu:
            ask = "name,driver_version,memory.total,power.limit,clocks.max.sm"
            about.append(subprocess.getoutput(f"nvidia-smi --query-gpu={ask} --format=csv"))
        try:
            folder.mkdir(parents=True)
            (folder / "train_gpt.py").write_bytes(source)
            log.open(folder / "train.log", "\n".join([source.decode(), rule, *about, rule]))
        except FileExistsError:
            problem = f"run_id={run_id!r} is already used: logs/{run_id} is never overwritten"
        except OSError as error:
            problem = f"logs/{run_id} cannot be written: {error.strerror}"
    problem = team.share(problem)
    demand(not problem, problem)
    log.started = True
    return replace(cfg, run_id=run_id), folder

def train_step(loss_fn, optimizer, batch, micro, lr, momentum):
    """Gradients of a step, micro sequences at a time, then the update. Returns this rank's mean loss."""
    parts, total = list(zip(*(t.split(micro) for t in batch))), 0.0
    optimizer.zero_grad()
    for tokens, targets in parts:
        loss = loss_fn(tokens, targets) / len(parts)
        loss.backward()
        total = total + loss.detach()
    optimizer.step(lr, momentum)
    return total

def rehearse(cfg, team, model, optimizer, log):
    """Compiles and runs each window of the run on random tokens before the clock, and undoes all that it did.
    Halves the micro-batch while memory does not suffice; trains uncompiled where compiling fails. Returns
    (loss function, sequences per micro-step)."""
    kept, rng = [t.clone() for t in optimizer.tensors()], torch.get_rng_state()
    windows = list(dict.fromkeys(stage.window for stage in stage_table(cfg)))
    generator, micro = torch.Generator().manual_seed(0), micro_batch(cfg, team, cfg.device_batch_size)
    while True:
        loss_fn, trouble = torch.compile(model, dynamic=False) if cfg.compile else model, 0
        noise = torch.randint(cfg.vocab_size, (2, micro, cfg.train_seq_len), generator=generator)
        batch = noise.to(team.device).unbind()
        try:
            if micro > 1 and step_memory(cfg, team, micro) > free_memory(team):
                raise MemoryError
            for window in windows:
                model.set_context(cfg.train_seq_len, window)
                loss_fn(*batch).backward()
        except Exception as error:  # a compiler's back end may raise anything
            trouble, why = 1 + out_of_memory(error), brief(error)
            if trouble == 1 and not cfg.compile:
                raise
        worst, = team.largest(trouble)
        if worst == 0:
            break
        if worst == 1:
            log(f"compile: not possible here ({why if trouble else 'another rank'}); training uncompiled")
            cfg = replace(cfg, compile=False)
        else:
            demand(micro > 1, "out of memory with one sequence: lower TRAIN_SEQ_LEN or MODEL_DIM", Failed)
            micro = micro_batch(cfg, team, micro // 2)
            log(f"memory does not suffice: trying a micro-batch of {micro} sequences")
        torch._dynamo.reset()  # what failed counts against the limit of recompilations
        torch.cuda.empty_cache()
    for step in range(cfg.warmup_steps):
        model.set_context(cfg.train_seq_len, windows[step % len(windows)])
        train_step(loss_fn, optimizer, batch, micro, 1.0, cfg.muon_momentum)
    for tensor, value in zip(optimizer.tensors(), kept):
        tensor.copy_(value)
    optimizer.step_count = 0
    optimizer.zero_grad()
    torch.set_rng_state(rng)
    return loss_fn, micro

def train(cfg, team, data, model, optimizer, loader, loss_fn, micro, log):
    """The loop from the first step to the last: all that runs on the clock. Returns the last Score, the
    curves {split: [(step, train seconds, loss)]} and the part of result.json that tells how it went.
    With a cap the host stays at most one step ahead of the device, so that it knows the time; without one it
    waits for the device at log lines only, and a lap is the mean between two of them."""
    clock, cap, laps, lap_start, events = Clock(team), cfg.max_wallclock_seconds, [], (0, 0.0), []
    paces = []  # laps per batch multiple
    step, last, tokens, window, curves = 0, cfg.iterations, 0, None, {"train": [], "val": []}
    lost, now, lap = torch.zeros((), device=team.device), 0.0, 0.0
    clock.start()
    while True:
        # 1. the time, the same on all ranks, and whether another step fits in before the cap
        if len(events) > 1:
            events.pop(0).synchronize()
        if cap:
            now, lap = team.largest(clock.now(), percentile(paces[-100:], 95) if step else 0.0)
        progress = run_progress(cfg, step, now)
        stage = stage_at(cfg, progress)
        reserve = lap * stage.batch_multiple * (1 + team.on_gpu)
        done = "iterations" if step == last else None
        done = "wallclock_cap" if step and 0 < cap <= now + reserve else done
        # 2. validation, off the clock
        if done or cfg.val_loss_every and step % cfg.val_loss_every == 0:
            clock.stop()
            if done == "wallclock_cap":
                log(f"stopping_early: {done} train_time:{clock.total * 1e3:.0f}ms step:{step}/{last}")
            score, window = evaluate(model, cfg, data, team, log), None
            curves["val"].append((step, clock.total, score.val_loss))
            log(f"step:{step}/{last} {score_text(cfg, score)} {time_text(clock.total, step)}")
            check_finite(score.val_loss, "val_loss", step, curves["train"])
            if done:
                break
            clock.start()
        if stage.window != window:
            model.set_context(cfg.train_seq_len, window := stage.window)
        # 3. a step
        batch_tokens, epoch = cfg.train_batch_tokens * stage.batch_multiple, loader.epoch
        batch = loader.next(batch_tokens)
        lr, momentum = lr_factor(cfg, step, progress), muon_momentum(cfg, step)
        loss = train_step(loss_fn, optimizer, batch, micro, lr, momentum)
        lost += ~loss.isfinite()
        step, tokens = step + 1, tokens + batch_tokens
        if team.on_gpu and cap:
            events.append(torch.cuda.current_stream().record_event())
        if loader.epoch > epoch:
            log(f"epoch {loader.epoch} begins in step {step}: all {loader.period} train tokens were read")
        # 4. a report
        if report := step <= 10 or step % (cfg.train_log_every or 100) == 0:
            mean, bad = all_reduce(torch.stack([loss / team.world_size, lost]), team.world_size).tolist()
            curves["train"].append((step, seconds := clock.now(), mean))
            check_finite(math.nan if bad else mean, "train_loss", step, curves["train"])
            left = seconds / run_progress(cfg, step, seconds) - seconds
            log(f"step:{step}/{last} train_loss:{mean:.4f} {time_text(seconds, step)} "
                f"tok/s:{tokens / seconds:.0f} lr_factor:{lr:.3f} eta:{left:.0f}s")
        if report or cap or not team.on_gpu:
            laps.append((clock.now() - lap_start[1]) / (step - lap_start[0]))
            paces.append(laps[-1] / stage.batch_multiple)
            lap_start = (step, clock.now())
    lap_ms = {name: round(1e3 * percentile(laps, q), 3) for name, q in dict(p50=50, p95=95, max=100).items()}
    return score, curves, dict(train_time_ms=round(clock.total * 1e3), step_ms=lap_ms, steps=step,
                               tokens=tokens, tok_per_s=round(tokens / clock.total), stop_reason=done)

def percentile(values, q):
    return sorted(values)[min(len(values) - 1, len(values) * q // 100)]

def time_text(seconds, step):
    return f"train_time:{seconds * 1e3:.0f}ms step_avg:{seconds * 1e3 / max(step, 1):.2f}ms"

def check_finite(loss, name, step, curve):
    past = ", ".join(f"{value:.4f} at step {s}" for s, _, value in curve[-4:-1]) or "nothing"
    demand(math.isfinite(loss),
           f"{name} is not finite at step {step} (before: {past}): lower the learning rates", Failed)

def write_artifact(cfg, model, folder, source, log):
    """final_model.pt and the artifact, their sizes in the log. Returns the sizes for result.json."""
    weights = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    write_atomically(folder / "final_model.pt", to_bytes(model.cfg, weights))
    write_atomically(folder / f"final_model.{CODEC}.ptz", packed := pack_artifact(model))
    code, size, limit = len(source), len(packed), cfg.artifact_bytes_limit
    raw, total = 4 * sum(map(torch.numel, weights.values())), code + size
    log(f"Serialized model {CODEC}+zlib: {size} bytes (weights:{raw} ratio:{raw / size:.2f}x)",
        f"Code size: {code} bytes", f"Total submission size {CODEC}+zlib: {total} bytes")
    if limit:
        verdict = "within it" if total <= limit else f"OVER by {total - limit}: this run fails its rule"
        log(f"artifact_bytes_limit: {limit} bytes, {verdict}")
    return dict(bytes_model=size, bytes_total=total, artifact_within_limit=not limit or total <= limit)

def plot_curves(curves, title, path):
    """loss.png: train and val loss over training seconds."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for split, style in (("train", "-"), ("val", "o-")):
        _, seconds, losses = zip(*curves[split])
        axes.plot(seconds, losses, style, label=split, linewidth=1)
    axes.set(xlabel="train_time (s)", ylabel="nats per token", title=title,
             ylim=(0.9 * losses[-1], 1.9 * losses[-1]))
    axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

def peak_memory(team):
    if team.on_gpu:
        used, held = torch.cuda.max_memory_allocated() >> 20, torch.cuda.max_memory_reserved() >> 20
        return f"peak memory allocated: {used} MiB reserved: {held} MiB"
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == "darwin" else 10)
    return f"peak memory resident: {used} MiB"

def utc_now():
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

def run(cfg, env, log):
    """One run: dry, of a file, or training. Returns what it wrote to result.json, None if nothing."""
    began, started, source = time.perf_counter(), utc_now(), Path(__file__).read_bytes()
    for key, name in near_misses(env):
        log(f"warning: {key} in the environment is no constant; did you mean {name}?")
    changed = {name: [*map(show, pair)] for name, pair in overrides(cfg).items()}
    log(*(f"override {name} {old} -> {new}" for name, (old, new) in changed.items()))
    # 1. the plan
    team, model, curves, trained, artifact = Team(cfg, env), None, None, None, None
    if cfg.eval_from:
        preset = cfg.preset
        model, cfg = load_model(cfg.eval_from, team.device, cfg)
        demand(cfg.preset == preset, f"this model played {cfg.preset}: give PRESET={cfg.preset}")
        model.dtype = team.dtype if team.on_gpu else model.dtype
        for name in set(SHAPE) & set(changed):
            asked, there = changed[name][1], show(getattr(cfg, name))
            demand(asked == there, f"{name}={asked}, but the model has {there}")
    try:
        data = open_data(cfg)
        cfg = replace(cfg, vocab_size=data.vocab_size)
        log(*data.lines)
    except Missing as error:  # to a dry run, data that is not there is part of the plan
        if not cfg.dry_run:
            raise
        cfg = replace(cfg, vocab_size=cfg.vocab_size or 1024)
        log(f"data: {error}; planning with {cfg.vocab_size} tokens")
    if not model:
        log(*plan(cfg, team, micro_batch(cfg, team, cfg.device_batch_size)))
    if cfg.dry_run:
        return None
    if model and cfg.sample:
        return show_samples(model, cfg, data, log) if team.rank == 0 else None
    # 2. the folder
    loader = Loader(cfg, data, team)
    loader.read(0, 1)  # a first shard of another vocabulary is refused here
    cfg, folder = open_run(cfg, team, log, source)
    config = {name: show(value) for name, value in vars(cfg).items()}
    log("eval settings: " + " ".join(f"{k}:{v}" for k, v in eval_settings(cfg).items()))
    log(*(f"config {name}={value}" for name, value in config.items()), echo=False)
    report = dict(train_time_ms=0, steps=0, tokens=0, stop_reason="eval_from", bytes_model=None,
                  bytes_total=None)
    if model:
        # 3. the score of a file
        score = evaluate(model, cfg, data, team, log)
        trained, artifact = (None, score) if cfg.eval_from.endswith(".ptz") else (score, None)
        peak = peak_memory(team)
    else:
        # 3. rehearsal, training, the score of what was trained, then of the artifact as read back
        model = GPT(cfg, team.dtype)
        init_parameters(model, cfg.seed)
        optimizer = Optimizer(model.to(team.device), cfg, team.rank, team.world_size)
        ready = time.perf_counter()
        log("rehearsal before the clock starts" + ", compiling: about a minute" * cfg.compile)
        loss_fn, micro = rehearse(cfg, team, model, optimizer, log)
        setup_ms, compile_ms = (round(1e3 * t) for t in (ready - began, time.perf_counter() - ready))
        log(f"setup:{setup_ms}ms compile:{compile_ms}ms micro_batch:{micro}x{cfg.train_seq_len}")
        trained, curves, report = train(cfg, team, data, model, optimizer, loader, loss_fn, micro, log)
        log(peak := peak_memory(team))
        sizes = team.share(write_artifact(cfg, model, folder, source, log) if team.rank == 0 else None)
        report |= dict(setup_ms=setup_ms, compile_ms=compile_ms, micro_batch=micro,
                       compiled=loss_fn is not model, **sizes)
        if team.rank == 0:  # other hosts do not have the file
            model.load_state_dict(load_model(folder / f"final_model.{CODEC}.ptz")[0].state_dict())
        for bank in optimizer.banks if team.world_size > 1 else ():
            dist.broadcast(bank.data, 0)
        artifact = evaluate(model, cfg, data, team, log)
    for name, score in (("final_model", trained), (f"final_{CODEC}_zlib_roundtrip", artifact)):
        if score:
            log(f"{name} {score_text(cfg, score)}", f"{name}_exact {score_text(cfg, score, 8)}")
            check_finite(score.val_loss, "the final val_loss", report["steps"], [])
    if team.rank > 0:
        return None
    # 4. samples, curve, result
    show_samples(model, cfg, data, log)
    score = trained if trained and not (artifact and cfg.score_artifact) else artifact
    text = score_text(cfg, score)
    result = dict(
        {text.split(":")[0]: score.val_loss},  # val_loss, or val_loss_partial
        run_id=cfg.run_id, preset=cfg.preset, seed=cfg.seed, val_bpb=score.val_bpb, core=None, **report,
        resumed=False, trained=trained and trained._asdict(), artifact=artifact and artifact._asdict(),
        eval=eval_settings(cfg), bytes_code=len(source), code_sha256=hashlib.sha256(source).hexdigest(),
        world_size=team.world_size, hardware=hardware(team), torch=torch.__version__,
        peak_memory=peak, config=config, overrides=changed, started=started, finished=utc_now(),
        data=dict(name=data.name, fingerprint=data.fingerprint, train_tokens=int(loader.edges[-1]),
                  val_tokens=len(data.val), val_bytes=data.val_bytes, sha256=data.sha256),
        process_ms=round(1e3 * (time.perf_counter() - began)))
    result.setdefault("val_loss")
    if curves:
        try:
            plot_curves(curves, f"{cfg.preset}: {text}", folder / "loss.png")
        except Exception as error:  # no picture is no reason to lose a run
            log(f"loss.png: not drawn, matplotlib says {brief(error)}")
    keys = "steps tokens tok_per_s train_time_ms step_ms bytes_model bytes_total process_ms".split()
    table = {key: result.get(key) for key in keys} | {"score": text, "run folder": f"logs/{cfg.run_id}"}
    log(*(f"{key:>14}  {value}" for key, value in table.items()))
    write_atomically(folder / "result.json", (json.dumps(result, indent=1) + "\n").encode())
    return result

def main(argv, env):
    """Runs what argv and env ask for. Returns the exit code: 0 done, 1 failed, 2 refused."""
    log, code = Log(lead=env.get("RANK", "0") == "0"), 1
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # samples may not fit the terminal's encoding
    if {"--help", "-h"} & set(argv):
        print(help_text())
        return 0
    try:
        run(load_config(env, argv), env, log)
        code = 0
    except (Refused, Failed) as error:  # once the run has its folder, nothing is refused any more
        code, why = 2 if isinstance(error, Refused) and not log.started else 1, str(error)
    except KeyboardInterrupt:
        why = "interrupted"
    except OSError as error:
        why = f"{show(str(error.filename or 'a file'))}: {error.strerror or brief(error)}"
    except Exception as error:
        why = "out of memory: lower DEVICE_BATCH_SIZE"
        if not out_of_memory(error):
            why = brief(error)
            traceback.print_exc()  # a mistake of ours
    if code:
        log(why, echo=False)
        if log.lead or code == 1 or env.get("LOCAL_RANK") == "0":  # the ranks of a host refuse alike
            print(f"train_gpt: {scrub(why)}", file=sys.stderr, flush=True)
    if dist.is_initialized():
        if code:  # peers may wait in a collective: do not wait for them
            sys.stdout.flush()
            os._exit(code)
        dist.destroy_process_group()
    return code

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
