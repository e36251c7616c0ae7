"""train_gpt: train a GPT as fast as the hardware allows, in one file.

    python train_gpt.py    tiny: 120 s on any CPU or GPU
    torchrun --standalone --nproc_per_node=8 train_gpt.py --preset=golf        golf: 600 s, 16 MB, 8xH100
    torchrun --standalone --nproc_per_node=8 train_gpt.py --preset=speedrun    val_loss 3.28, 8xH100
    torchrun --standalone --nproc_per_node=8 train_gpt.py --preset=gpt2        CORE 0.2565, 8xH100
    EVAL_FROM=logs/<run_id>/final_model.int8.ptz python train_gpt.py    score what a run left behind

Map: 3 FIELDS, PRESETS: the numbers to edit - 4 model - 5 optimizer - 6 schedules - 7 data - 8 evaluation -
9 artifact - 10 kernels - 11 main. --help: the constants, --dry-run: the plan. Limits: 1,500 lines, 80,000
bytes. Beside it: core.py, dial.py (gpt2), golf.py, kernels.py (speed), plan.py (samples), faults.py (saves).
"""
# ---------- 2 imports
import fcntl
import hashlib
import io
import json
import lzma
import math
import os
import platform
import re
import subprocess
import sys
import time
import traceback
import zipfile
import zlib
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import make_dataclass, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

class Refused(Exception):
  """Why there is no run, exit 2, or no more of one, exit 1."""

class Missing(Refused):
  """Data that are not there yet."""

def demand(good, sentence, error=Refused):
  if not good:
    raise error(sentence)

reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name since 2.13
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

def all_reduce(tensor, op="SUM", later=False):
  """Sum or MAX over the ranks, in place; later: -> (tensor, the job to wait for, if any)."""
  job = dist.is_initialized() and dist.all_reduce(tensor, getattr(dist.ReduceOp, op), async_op=later)
  return (tensor, job) if later else tensor

# ---------- 3 configuration
Constant = namedtuple("Constant", "default doc least most", defaults=(0, 1e12))
# Every constant, once, with unit and off-value; the defaults are the `tiny` game. 0 means off or derived.
FIELDS = {name: Constant(*row) for name, row in dict(
    # the run
    preset=("tiny", "row of PRESETS"),
    run_id=("", "folder under logs/; empty: by preset, time"),
    seed=(1337, "of first values and samples", 0, 2**31 - 1),
    device=("auto", "auto | cpu | cuda"),
    dtype=("auto", "auto | float32 | bfloat16"),  # of activations; auto: bf16 where it is fast
    fp8=("off", "off | head | all | auto-head | auto-all"),  # products in training; auto: on a GPU that can
    compile=(True, "by torch; 0: eager"),
    dry_run=(False, "print the plan only"),
    eval_from=("", "artifact or final_model.pt to score"),
    resume=("", "run_id to go on with"),
    save_every=(0, "steps between checkpoints; 0: none"),
    save_every_seconds=(0.0, "of training between them; 0: none", 0, 1e7),
    sample_every=(0, "steps; 0: at the end"),
    sample=("", "prompts, '|' between; empty: of val"),
    sample_tokens=(96, "tokens per sample; 0: none", 0, 100_000),
    sample_temperature=(0.8, "0: greedy", 0, 10),
    sample_top_k=(0, "likeliest tokens; 0: all", 0, 65_536),
    train_log_every=(50, "steps; 0: the first ten"),
    val_loss_every=(0, "steps; 0: at the end"),
    artifact_bytes_limit=(0, "bytes with the script; 0: none"),
    artifact_step=(0.0, "rounding / a row's rms, then lzma; 0: int8, zlib", 0, 10),
    artifact_keep=(65_536, "numbers of a tensor that stays fp16"),
    score_artifact=(True, "result.json scores it; 0: the weights"),
    # data and batch
    data_path=("data/datasets/embedded", "folder of token shards"),
    tokenizer_path=("", "SentencePiece; empty: the dataset's"),
    data_fingerprint=("dac98310ae0394c70e5edcf7fc6fc1d66e56671e3d3f3c141065bed6ad3d1c49",
                      "of the game's text; empty: any"),
    train_batch_tokens=(4_096, "tokens per step, all ranks; 0: by depth", 0, 1 << 30),
    shuffle=(True, "sequences from anywhere; 0: in order"),
    max_epochs=(0, "passes over the train tokens; 0: any"),
    device_batch_size=(0, "sequences per rank and micro-step; 0: what fits"),
    val_tokens=(0, "first tokens of val; 0: all"),
    val_batch_size=(65_536, "tokens per evaluation step and rank", 1),
    eval_context=(0, "tokens per row; 0: train_seq_len"),
    eval_stride=(0, "targets scored per row; 0: eval_context"),
    eval_sliding=(0, "the same for val_bpb_sliding; 0: none"),
    eval_documents=(0, "and within documents; 0: none"),
    eval_ttt=(0, "tokens scored before a step on them: val_bpb_ttt; 0: none"),
    eval_ttt_lr=(0.05, "LR factor of such steps", 0, 10),
    core=(False, "score CORE at the end"),
    core_bundle=("data/core_bundle", "folder of its tasks"),
    core_metric_every=(0, "steps; 0: at the end"),
    core_metric_max_per_task=(0, "examples; 0: all"),
    depth=(0, "sets size, batch, rates, decay, steps; 0: none", 0, 198),
    target_param_data_ratio=(0.0, "tokens per weight of matrices and head; 0: none", 0, 1e6),
    target_flops=(0.0, "of the run; 0: none", 0, 1e30),
    plan_mfu=(0.5, "for the plan's hours", 0.001, 1),
    # model: what an artifact carries
    vocab_size=(0, "tokens; 0: the tokenizer's", 0, 65_536),
    train_seq_len=(512, "tokens per sequence", 2, 1 << 20),
    max_doc_len=(0, "tokens of a document that sees no other; 0: any"),
    bos_id=(0, "token that begins documents; 0: the dataset's", 0, 65_535),
    num_layers=(2, "blocks", 1, 1000),
    model_dim=(128, "width of the residual stream", 2, 1 << 16),
    num_heads=(2, "query heads", 1, 4096),
    num_kv_heads=(0, "key and value heads; 0: num_heads", 0, 4096),
    mlp_mult=(3, "width of the MLP in model_dim", 1, 64),
    tie_embeddings=(False, "the head is the embedding"),
    logit_softcap=(15.0, "logits = cap * tanh(x / cap); 0: none", 0, 1e4),
    qk_gain_init=(1.5, "learnt, per head, on queries; 0: none", 0, 100),
    attn_scale=(0.0, "of attention's logits; 0: head_dim ** -0.5", 0, 100),
    key_offset=(True, "in long layers half of a key is the token before's"),
    attn_gate_dim=(0, "channels that gate each head's output; 0: none", 0, 1 << 16),
    rope_base=(1_000.0, "RoPE, longest wavelength / 2 pi; 0: none", 0, 1e9),
    rope_fraction=(1.0, "part of each head that turns", 0, 1),
    rope_yarn=(False, "RoPE and attn_scale follow the window (YaRN)"),
    smear_dim=(0, "channels that gate the token before; 0: none", 0, 1 << 16),
    bigram_rows=(65_536, "embeddings of hashed token pairs; 0: none", 0, 1 << 26),
    residual_mix=(True, "blocks read a learnt mix of stream and embedding"),
    layer_scale=(True, "learnt scales of what attention and MLP add"),
    unet_skips=(True, "skips from first to second half"),
    skip_layers=((0,), "from, to, ...: further skips; 0: none", 0, 1000),
    backout_layer=(0, "half of its output, learnt, leaves in the end; 0: none", 0, 1000),
    value_embed_layers=((1, 2), "table of value embeddings per layer; 0: none", 0, 99),
    window_pattern=("SL", "per layer L long, S short, - no attention, 0 no MLP either"),
    window_schedule=((256,), "L per stage, tokens; 0: all. S: half of it"),
    window_block=(1, "tokens that windows are multiples of", 1),
    eval_window=(0, "L in evaluation; 0: the last stage's"),
    # optimizer
    matrix_lr=(0.03, "Muon: matrices of the blocks", 0, 10),
    embed_lr=(0.3, "Adam: untied and value embeddings", 0, 10),
    head_lr=(0.008, "Adam: untied head", 0, 10),
    tied_embed_lr=(0.05, "Adam: tied embedding", 0, 10),
    tied_embed_init_std=(0.005, "of a tied embedding; untied: 1", 0, 100),
    scalar_lr=(0.04, "Adam: gains, scales, mixes", 0, 10),
    muon_momentum=(0.95, "after its warm-up", 0, 0.9999),
    muon_momentum_warmup_start=(0.85, "at step 0", 0, 0.9999),
    muon_momentum_warmup_steps=(300, "steps; 0: none"),
    muon_momentum_cooldown_steps=(0, "last steps, back to the start; 0: none"),
    orthogonalization=("newton_schulz", "newton_schulz | polar_express"),
    muon_backend_steps=(5, "iterations of it", 1, 20),
    normuon_beta2=(0.0, "of NorMuon's mean square per row; 0: none", 0, 0.9999),
    weight_decay=(0.0, "on matrices, cautious, times LR squared; 0: none", 0, 1e6),
    beta1=(0.8, "Adam", 0, 0.9999),
    beta2=(0.95, "Adam", 0, 0.99999),
    adam_eps=(1e-8, "Adam", 1e-20, 1),
    adam_every=(1, "steps that one of Adam sums up", 1, 1000),
    grad_clip_norm=(0.0, "of all gradients together; 0: any", 0, 1e6),
    # schedule
    iterations=(100_000, "steps at most", 1, 10**9),
    extension_iterations=(0, "further ones of the last stage; 0: none", 0, 10**9),
    max_wallclock_seconds=(120.0, "of training; 0: no cap", 0, 1e7),
    warmup_steps=(2, "steps before the clock, undone", 0, 1000),
    warmdown_iters=(0, "steps of LR decay; 0: warmdown_frac"),
    warmdown_frac=(0.5, "part of the run with LR decay", 0, 1),
    lr_floor=(0.0, "LR factor at the end", 0, 1),
    batch_schedule=((1,), "train_batch_tokens times this, per stage", 1, 1024),
    batch_lr_power=(0.0, "LR factor = multiple ** this; 0: none", 0, 2),
    lr_schedule=((0.0,), "LR factors instead; 0: none", 0, 1000),
    lr_switches=((0.0,), "part of iterations from which on each holds", 0, 1)).items()}
Config = make_dataclass("Config", [(n, type(f.default), f.default) for n, f in FIELDS.items()], frozen=True)
PRESETS = {  # what differs from the defaults
    "tiny": {},  # one CPU or GPU, 120 s; lowest val_bpb on the embedded corpus
    # 8xH100, 600 s, 16,000,000 bytes; unmeasured. Its record's recipe (records/README) scored 1.20136
    "golf": dict(
        data_path="data/datasets/fineweb10B_sp1024", tokenizer_path="data/tokenizers/fineweb_1024_bpe.model",
        data_fingerprint="", vocab_size=1024, train_seq_len=4096, train_batch_tokens=393_216, shuffle=False,
        val_batch_size=524_288, num_layers=9, model_dim=512, num_heads=8, num_kv_heads=4, mlp_mult=2,
        rope_base=10_000.0, value_embed_layers=(1, 0, 0, 0, 0, 0, 0, 0, 2), bigram_rows=16_384,
        window_pattern="L", window_schedule=(0,), matrix_lr=0.02, scalar_lr=0.02, embed_lr=0.6, beta1=0.9,
        muon_momentum=0.99, muon_momentum_warmup_start=0.92, muon_momentum_warmup_steps=1500,
        iterations=20_000, max_wallclock_seconds=600.0, warmup_steps=20, warmdown_iters=3000,
        train_log_every=200, val_loss_every=1000, artifact_bytes_limit=16_000_000, artifact_step=0.2,
        eval_sliding=1024, eval_documents=1024, eval_ttt=131_072),
    # 8xH100; val_loss 3.28 in 132.2 s (8 seeds: mean 3.2782), without bigrams; with: 1/4 fewer tokens (BENCH)
    "speedrun": dict(
        data_path="data/datasets/fineweb10B_gpt2", data_fingerprint="", vocab_size=50_304, shuffle=False,
        train_seq_len=16_384, train_batch_tokens=131_072, max_doc_len=2048, max_epochs=1,
        val_tokens=10_485_760, num_layers=12, model_dim=768, num_heads=6, mlp_mult=4, qk_gain_init=0.0,
        attn_scale=0.1, attn_gate_dim=12, rope_base=1024.0, rope_fraction=0.5, rope_yarn=True, smear_dim=12,
        bigram_rows=131_072, layer_scale=False, unet_skips=False, skip_layers=(4, 7),
        value_embed_layers=(0, 1, 2, 0, 0, 0, 0, 0, 0, 3, 1, 2), window_pattern="0SSSLSS-SSSL",
        backout_layer=8, window_schedule=(384, 896, 1408, 1664), window_block=128, eval_window=2560,
        matrix_lr=0.023, embed_lr=0.6, beta1=0.65, muon_momentum_cooldown_steps=50, weight_decay=1.2,
        normuon_beta2=0.95, orthogonalization="polar_express", adam_every=2, iterations=2120,
        extension_iterations=40, max_wallclock_seconds=0.0, warmdown_frac=0.55, lr_floor=0.1,
        batch_schedule=(1, 2, 3, 3), lr_schedule=(1.0, 1.51, 1.93), lr_switches=(0.0, 0.33, 0.66),
        val_loss_every=250, score_artifact=False, fp8="auto-head"),
    # 8xH100; CORE 0.2565 in 8,967 s by depth 26, ratio 7.25, fp8. Rates and decay of depth 12: dial.py
    "gpt2": dict(
        depth=24, target_param_data_ratio=10.5, data_path="data/datasets/climbmix", data_fingerprint="",
        vocab_size=32_768, shuffle=False, train_seq_len=2048, train_batch_tokens=524_288, max_doc_len=2048,
        mlp_mult=4, qk_gain_init=0.0, rope_base=10_000.0, bigram_rows=16_384, layer_scale=False,
        unet_skips=False, matrix_lr=0.02, head_lr=0.004, weight_decay=10.0, normuon_beta2=0.95,
        orthogonalization="polar_express", max_wallclock_seconds=0.0, val_loss_every=250,
        score_artifact=False, core=True, fp8="auto-all", sample_temperature=0.0, sample_tokens=16,
        sample="Paris is in|Hamlet is by|The largest planet is|Water is|3 + 4 =|After Monday comes|Gold is"),
}
ALIASES = {"total_batch_size": "train_batch_tokens", "num_iterations": "iterations", "model_tag": "run_id",
           "run": "run_id"}
NAMES = {name.upper(): ALIASES.get(name, name) for name in (*FIELDS, *ALIASES)}  # as typed: the constant
SHAPE = ["preset", *re.findall("vocab_size.* (?=matrix_lr)", " ".join(FIELDS))[0].split()]

def load_config(env, argv=()):
  """Default < preset < environment < flag. env: {NAME: text}. Raises Refused."""
  given = {}
  for source in (env, dict(parse_flags(argv))):
    texts = {}
    for typed, name in NAMES.items():
      if (text := source.get(typed)) is not None:
        first = texts.setdefault(name, text)
        demand(first == text, f"{name} is given twice, as {first} and as {text}")
        given[name] = parse_value(name, text)
  return preset_config(given.get("preset", Config.preset), given)

def preset_config(preset, given=()):
  """The preset, what was given instead, what dial.py makes of depth. Raises Refused."""
  demand(preset in PRESETS, f"preset={preset!r} is none of {', '.join(PRESETS)}")
  cfg = Config(**{"preset": preset} | PRESETS[preset] | dict(given))
  check_config(cfg, ())
  if cfg.depth:
    import dial
    cfg, problem = dial.turn(cfg, dict(given), horizon_weights, flops_per_token)
    demand(cfg, problem)
  check_config(cfg)
  return cfg

RULES = (  # between constants, as they are said to who breaks one
    r"re.fullmatch(r'(\w[\w.,=+-]*)?', run_id)  # letters, digits and .,=+-",
    "model_dim / num_heads % 2 == num_heads % (num_kv_heads or 1) == 0  # heads are even",
    "max(smear_dim, attn_gate_dim) <= model_dim",
    "train_batch_tokens % train_seq_len == 0 < train_batch_tokens",
    "vocab_size or not depth",
    "depth or not (target_param_data_ratio or target_flops)",
    "eval_stride <= (eval_context or train_seq_len)",
    "val_tokens != 1  # a target is left",
    "re.fullmatch('[LS0-]+', window_pattern)",
    "len({1, len(batch_schedule), len(window_schedule)}) < 3  # as many stages, or one",
    "len(lr_switches) == len(lr_schedule) and sorted(lr_switches) == [0, *lr_switches[1:]]  # grow from 0",
    "not any(window % window_block for window in (*window_schedule, eval_window))",
    "skip_layers == (0,) or len(skip_layers) % 2 == 0  # pairs",
    "all(a < b for a, b in zip(skip_layers[::2], skip_layers[1::2]))  # of a layer and a later one")

def check_config(cfg, rules=RULES):
  """Refuses what is out of its range, or breaks a rule."""
  for name, value in vars(cfg).items():
    _, doc, least, most = FIELDS[name]
    if isinstance(value, str):
      good, legal = " | " not in doc or value in doc.split(" | "), doc
    else:
      good, legal = all(least <= n <= most for n in np.atleast_1d(value)), f"from {least:g} to {most:g}"
    demand(good, f"{name}={show(value)} must be {legal}")
  for rule in rules:
    values = [f"{name}={value!r}" for name, value in vars(cfg).items() if re.search(rf"\b{name}\b", rule)]
    demand(eval(rule, {"re": re, **vars(cfg)}), f"{' and '.join(values)} break the rule {rule}")

# ---------- 4 model
def rms_norm(x):
  return F.rms_norm(x, (x.size(-1),), eps=1e-6)

def linear(x, weight):
  """x @ weight.T in the dtype of x; master weights stay fp32."""
  return F.linear(x, weight.to(x.dtype))

def attention(q, k, v, mask, scale=None, kernel=None):
  """Causal attention. q (B, H, T, D), k and v (B, KV, T, D); the cost is the size of the mask."""
  B, H, T, _ = q.shape
  kernel = partial(kernel or F.scaled_dot_product_attention, scale=scale, enable_gqa=k.size(1) < H)
  if mask is None or (n := mask.size(1)) == 1:
    return kernel(q, k, v, attn_mask=mask, is_causal=mask is None)
  W = mask.size(2)
  q, k, v = (F.pad(x, (0, 0, 0, n * W - T)).unflatten(2, (n, W)) for x in (q, k, v))
  k, v = (torch.cat((F.pad(x, (0, 0, 0, 0, 1, -1)), x), 3) for x in (k, v))  # with the one before
  q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
  y = kernel(q, k, v, attn_mask=mask.expand(B, -1, -1, -1).flatten(0, 1)[:, None])
  return y.unflatten(0, (B, n)).transpose(1, 2).flatten(2, 3)[:, :, :T]

def window_mask(reach, T, documents, device, first=0):
  """Each token sees the last reach of its document, itself included; documents (B, T) numbers them. Returns
  None for the whole past, else bool (B or 1, n, W, K): n blocks of W queries, K keys up to their end; or
  one block of the queries from first on."""
  if reach >= T and documents is None and not first:
    return None
  W = T if first or 2 * reach >= T else reach
  n, K = math.ceil(T / W), min(T, 2 * W)
  block = torch.arange(0, n * W, W, device=device).view(1, n, 1, 1)
  query, key = (block + torch.arange(low, W, device=device) for low in (first, W - K))
  query = query.mT
  mask = (key >= 0) & (key <= query) & (key > query - reach)
  if documents is not None:
    documents = F.pad(documents, (K - W, n * W - T), value=-1)
    mine = documents[:, K - W:].view(-1, n, W, 1)[:, :, first:]
    mask = mask & (mine == documents.unfold(1, K, W)[:, :, None])
  return mask

def mlp(x, fc, proj, linear=linear):
  """ReLU^2 MLP (Primer, arXiv:2109.08668). x (B, T, C), fc (hidden, C), proj (C, hidden)."""
  return linear(F.relu(linear(x, fc)).square(), proj)

def softcap(logits, cap):
  """cap * tanh(logits / cap)."""
  return 2 * cap * torch.sigmoid(logits * (2 / cap)) - cap if cap else logits

def lm_loss(x, head, targets, cap, linear=linear):
  """Mean cross-entropy, nats. x (B, T, C), head (V, C), targets (B, T)."""
  return F.cross_entropy(softcap(linear(x, head).float(), cap).flatten(0, 1), targets.flatten())

Fast = namedtuple("Fast", "linear head_linear window_mask attention loss",  # seams for section 10
                  defaults=(linear, linear, window_mask, attention, lm_loss))

def rope_frequencies(cfg, window):
  """Radians per token of each pair of channels (RoFormer, arXiv:2104.09864) and the scale of the logits;
  with rope_yarn (YaRN, arXiv:2309.00071) both follow the windows up to this one."""
  D, windows = cfg.model_dim // cfg.num_heads, [w for w in cfg.window_schedule * cfg.rope_yarn if w]
  pairs, scale = int(cfg.rope_fraction * D / 2) * (cfg.rope_base > 0), cfg.attn_scale or D ** -0.5
  frequencies = F.pad(cfg.rope_base ** (-torch.arange(pairs) / pairs), (0, D // 2 - pairs))
  for old, new in zip(windows, windows[1:]):
    if old == window:
      break
    turns = old * frequencies / (2 * math.pi)
    frequencies *= old / new + ((turns - 1) / 31).clamp(0, 1) * (1 - old / new)
    scale *= 1 + 0.2 * math.log(new / old)
  return frequencies, scale

def rotate(x, cos, sin):
  a, b = x.chunk(2, -1)
  return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)

def per_layer(values, num_layers):
  """A per-layer list, repeated or cut to the number of layers."""
  return [values[i % len(values)] for i in range(num_layers)]

def window_sizes(cfg, window, T):
  """Tokens of T that long and short layers see. window 0: all."""
  half = min(w or cfg.train_seq_len for w in (window, cfg.window_schedule[-1])) // 2
  half = max(1, half // cfg.window_block) * cfg.window_block
  return {"L": min(window or T, T), "S": min(T, half)}

def parameter(*shape, on=True):
  return nn.Parameter(torch.empty(shape)) if on else None

def gate(x, weight):
  """(B, T, C) -> (B, T, n), 0 to 1, by the first channels; weight (n, channels)."""
  return torch.sigmoid(linear(x[..., :weight.size(1)], weight))

class Block(nn.Module):
  """Attention and MLP, pre-norm, as far as kind has them."""
  def __init__(self, cfg, kind, fast):
    super().__init__()
    self.fast, self.linear, self.key_offset = fast, fast.linear, cfg.key_offset and kind == "L"
    C, H, KV = cfg.model_dim, cfg.num_heads, cfg.num_kv_heads or cfg.num_heads
    self.head_dim, attends, has_mlp = C // H, kind in "LS", kind != "0"
    self.query, self.attn_proj = (parameter(C, C, on=attends) for _ in range(2))
    self.key, self.value = (parameter(KV * C // H, C, on=attends) for _ in range(2))
    self.attn_gate = parameter(H, cfg.attn_gate_dim, on=attends and cfg.attn_gate_dim)
    self.qk_gain = parameter(H, on=attends and cfg.qk_gain_init)
    self.fc = parameter(cfg.mlp_mult * C, C, on=has_mlp)
    self.mlp_proj = parameter(C, cfg.mlp_mult * C, on=has_mlp)
    self.residual_mix = parameter(2, C, on=cfg.residual_mix)
    self.layer_scale = parameter(2, C, on=cfg.layer_scale)

  def forward(self, x, x0, value_embed, mask, *context):
    """Stream x and embedding x0 (B, T, C), value_embed (B, T, KV * D) or 0 -> stream."""
    if self.residual_mix is not None:
      mix = self.residual_mix.to(x.dtype)
      x = mix[0] * x + mix[1] * x0
    scales = (1, 1) if self.layer_scale is None else self.layer_scale.to(x.dtype)
    if self.query is not None:
      x = x + scales[0] * self.attend(rms_norm(x), value_embed, mask, *context)
    if self.fc is not None:
      x = x + scales[1] * mlp(rms_norm(x), self.fc, self.mlp_proj, self.linear)
    return x

  def attend(self, h, value_embed, mask, rope, scale, follows, cache):
    """h (B, T, C), normalised -> what attention adds to the stream (B, T, C)."""
    q, k, v = (self.linear(h, weight) for weight in (self.query, self.key, self.value))
    v = v + value_embed
    q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (q, k, v))
    if self.key_offset:  # so that a match finds what came after it
      now, before = k.unflatten(-1, (2, -1)).tensor_split(2, -1)
      before = F.pad(before, (0, 0, 0, 0, 1, -1)) * follows[..., None, :, None, None]
      k = torch.cat((now, before), -1).flatten(-2)
    q, k = (rotate(rms_norm(y), *rope) for y in (q, k))
    if cache is not None:  # what is kept, of one row for all, then what is new
      k, v = cache[self] = [torch.cat((old.expand(len(h), -1, -1, -1), new[:, :, min(3, old.size(2)):]), 2)
                            for old, new in zip(cache.get(self, (k[:, :, :0], v[:, :, :0])), (k, v))]
    if self.qk_gain is not None:
      q = q * self.qk_gain.to(q.dtype)[:, None, None]
    y = self.fast.attention(q, k, v, mask, scale).transpose(1, 2)
    if self.attn_gate is not None:
      y = y * gate(h, self.attn_gate)[..., None]
    return self.linear(y.flatten(2), self.attn_proj)

class GPT(nn.Module):
  """Decoder-only transformer; cfg.vocab_size is resolved, dtype of activations."""
  def __init__(self, cfg, dtype=torch.float32, fast=Fast()):
    super().__init__()
    self.cfg, self.dtype, self.fast, self.loss = cfg, dtype, fast, partial(fast.loss, linear=fast.head_linear)
    N, V, C = cfg.num_layers, cfg.vocab_size, cfg.model_dim
    self.kinds, self.embed = per_layer(cfg.window_pattern, N), parameter(V, C)
    self.head = self.embed if cfg.tie_embeddings else parameter(V, C)
    self.bigram_embed = parameter(cfg.bigram_rows, C, on=cfg.bigram_rows)
    self.smear, self.smear_gate = (parameter(1, n, on=cfg.smear_dim) for n in (1, cfg.smear_dim))
    self.blocks = nn.ModuleList(Block(cfg, kind, fast) for kind in self.kinds)
    self.tables, kv_heads = per_layer(cfg.value_embed_layers, N), cfg.num_kv_heads or cfg.num_heads
    self.value_embeds = nn.ParameterList(
        parameter(V, kv_heads * C // cfg.num_heads) for _ in range(max(self.tables)))
    self.skips = [(i, N // 2 * 2 - 1 - i) for i in range(N // 2)] * cfg.unet_skips
    self.skips += [pair for pair in zip(cfg.skip_layers[::2], cfg.skip_layers[1::2]) if pair[1] < N]
    self.skip_weights = parameter(len(self.skips), C, on=self.skips)
    self.backout = parameter(1, on=0 < cfg.backout_layer < N)

  def set_context(self, T, window, wanted=..., cache=None):
    """For T tokens; window of long layers, 0: all; wanted, bool (B, T): where logits are made. cache {} keeps
    keys and values; then only new tokens are computed, and 3 before them, what one sees besides attention."""
    self.wanted, self.cache = wanted, cache
    frequencies, self.scale = rope_frequencies(self.cfg, window)
    angles = torch.arange(T)[:, None] * frequencies
    self.rope = [t.to(self.embed.device, self.dtype) for t in (angles.cos(), angles.sin())]
    self.reach = {k: size for k, size in window_sizes(self.cfg, window, T).items() if k in self.kinds}

  def hidden(self, tokens):
    """tokens (B, T) -> last activations, normalised (B, T, C)."""
    cfg, T, documents = self.cfg, tokens.size(1), None
    first = max(0, next(iter(self.cache.values()))[0].size(2) - 3) if self.cache else 0
    follows = torch.arange(T, device=tokens.device) > 0  # another token of the same document
    if cfg.max_doc_len:
      documents, follows = (tokens == cfg.bos_id).cumsum(1), follows & (tokens != cfg.bos_id)
    masks = {kind: self.fast.window_mask(reach, T, documents, tokens.device, first)
             for kind, reach in self.reach.items()}
    tokens, follows, rope = tokens[:, first:], follows[..., first:], [t[first:T] for t in self.rope]
    x = F.embedding(tokens, self.embed).to(self.dtype)
    if self.bigram_embed is not None:
      pairs = (tokens * 0x9E3779B1 ^ tokens.roll(1, 1) * 0x85EBCA6B) % cfg.bigram_rows
      x = x + F.embedding(pairs, self.bigram_embed).to(x.dtype) * follows[..., None]
    if self.smear is not None:
      before = F.pad(x, (0, 0, 1, -1)) * follows[..., None]
      x = x + self.smear.to(x.dtype) * gate(x, self.smear_gate) * before
    x, outputs = (x0 := rms_norm(x)), []
    for i, (block, kind) in enumerate(zip(self.blocks, self.kinds)):
      for row, (source, to) in enumerate(self.skips):
        if to == i:
          x = x + self.skip_weights[row].to(x.dtype) * outputs[source]
      if value_embed := self.tables[i]:
        value_embed = F.embedding(tokens, self.value_embeds[value_embed - 1]).to(x.dtype)
      outputs.append(x := block(x, x0, value_embed, masks.get(kind), rope, self.scale, follows, self.cache))
    if self.backout is not None:
      x = x - self.backout.to(x.dtype) * outputs[cfg.backout_layer]
    return rms_norm(x)

  def logits(self, tokens):
    """tokens (B, T) -> (B, T, V) fp32, or of the n that are wanted (n, V)."""
    return softcap(linear(self.hidden(tokens)[self.wanted], self.head).float(), self.cfg.logit_softcap)

  def forward(self, tokens, targets):
    """Mean training loss, nats. tokens and targets (B, T)."""
    return self.loss(self.hidden(tokens), self.head, targets, self.cfg.logit_softcap)

GROUPS = {  # of the optimizer: {name, numbers aside: its first values or how they are drawn}
    "matrix": dict(query="uniform", key="uniform", value="uniform", attn_proj=0, fc="uniform", mlp_proj=0),
    "scalar": dict(residual_mix=[[1], [0]], layer_scale=1, qk_gain="gain", attn_gate=0, smear=0,
                   smear_gate=0, skip_weights=1, backout=0.5),
    "embed": dict(embed="normal"), "head": dict(head=0), "value_embed": dict(value_embeds=0, bigram_embed=0)}
PARAMETERS = {name: (group, first) for group, members in GROUPS.items() for name, first in members.items()}

def parameter_rule(name):
  """(group, first values). Raises KeyError for an unknown name."""
  return PARAMETERS[re.findall("[a-z_]+", name)[-1]]

@torch.no_grad()
def init_parameters(model, seed):
  """Draws on the CPU, for the same values on every device."""
  generator, cfg = torch.Generator().manual_seed(seed), model.cfg
  for name, p in model.named_parameters():
    first, value = parameter_rule(name)[1], torch.zeros(p.shape)
    if first == "uniform":  # torch's own default for a Linear
      value.uniform_(-p.size(1) ** -0.5, p.size(1) ** -0.5, generator=generator)
    elif first == "normal":
      value.normal_(0, cfg.tied_embed_init_std if cfg.tie_embeddings else 1, generator=generator)
    else:
      value += torch.tensor(cfg.qk_gain_init if first == "gain" else first)
    p.copy_(value)

# ---------- 5 optimizer
ORTHOGONALIZERS = {     # (a, b, c) per iteration, the last repeats: x <- a x + (b g + c g g) x, g = x x'
    "newton_schulz": [(3.4445, -4.7750, 2.0315)],   # Muon: kellerjordan.github.io/posts/muon
    "polar_express": [(8.156555, -22.483293, 15.878770), (4.042930, -2.808917, 0.500018),  # arXiv:2505.16932
                      (3.891668, -2.772484, 0.506065), (3.285754, -2.368129, 0.464490),
                      (2.346541, -1.709783, 0.423236)]}

def orthogonalize(g, steps, method="newton_schulz"):
  """g (N, R, C) -> nearly the nearest semi-orthogonal matrices, singular values 0.6 to 1.3; CPUs in fp32."""
  x = g.float() if g.device.type == "cpu" else g.bfloat16()
  if tall := x.size(-2) > x.size(-1):
    x = x.mT
  x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
  if method == "polar_express":
    x = x / 1.02  # bf16 may round a value to above 1, where it diverges
  for i in range(steps):
    a, b, c = ORTHOGONALIZERS[method][:i + 1][-1]
    gram = x @ x.mT
    x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
  return (x.mT if tall else x).to(g.dtype)

def muon_update(grad, buffer, momentum, steps, method="newton_schulz"):
  """Nesterov momentum, orthogonalised; grad and buffer (N, R, C), buffer changes. Returns what to subtract,
  before LR; tall matrices move as far as square ones."""
  buffer.lerp_(grad, 1 - momentum)
  update = orthogonalize(grad.lerp(buffer, momentum), steps, method)
  return update * max(1, grad.size(-2) / grad.size(-1)) ** 0.5

def normuon_scale(update, v, beta2):
  """NorMuon (arXiv:2510.05491): update (N, R, C) with its rows, or columns if wide, over their running rms
  and its norm kept. v (N, R, 1) or (N, 1, C), mean squares, changes."""
  v.lerp_(update.square().mean(-1 if v.size(-1) == 1 else -2, keepdim=True), 1 - beta2)
  scaled = update * v.clamp_min(1e-10).rsqrt()
  before, after = (t.norm(dim=(-2, -1), keepdim=True) for t in (update, scaled))
  return scaled * (before / after.clamp_min(1e-10))

def adam_update(grad, m, v, step, beta1, beta2, eps):
  """Adam (arXiv:1412.6980), step from 1; m and v change. Returns what to subtract, before LR."""
  m.lerp_(grad, 1 - beta1)
  v.lerp_(grad.square(), 1 - beta2)
  return m / (1 - beta1 ** step) / ((v / (1 - beta2 ** step)).sqrt() + eps)

def adam_step(p, grad, m, v, scale, step, lr, *constants):
  """p, all but matrices, changes; one pass over memory if compiled."""
  p.sub_(lr * adam_update(grad * scale, m, v, step, *constants))

class Bank:
  """Parameters of one kind, and their gradients, as views of a buffer: one collective serves all. A rank
  updates its share of units: matrices for Muon, 64 numbers for Adam."""
  def __init__(self, group, names, params, rank, world_size):
    self.group, self.names = group, names
    unit = params[0].shape if group == "matrix" else (64,)
    size = math.prod(unit)
    places = np.cumsum([0] + [math.ceil(p.numel() / size) * size for p in params])
    total = math.ceil(places[-1] / size / world_size) * size * world_size
    self.data, self.grad = (torch.zeros(total, device=params[0].device) for _ in range(2))
    for p, place in zip(params, places):
      data, p.grad = (t[place:place + p.numel()].view(p.shape) for t in (self.data, self.grad))
      p.data = data.copy_(p.data)
    self.my_data = self.data.view(world_size, -1, *unit)[rank]
    self.my_grad = torch.zeros_like(self.my_data) if world_size > 1 else self.grad.view(-1, *unit)
    second = self.my_data  # Adam's second moment; of NorMuon one number per row, or column
    if group == "matrix":
      second = second[:, :, :1] if unit[0] >= unit[1] else second[:, :1]
    self.state = [torch.zeros_like(t) for t in (self.my_data, second)]

class Optimizer:
  """Muon for matrices, Adam for the rest; the ranks share its state."""
  def __init__(self, model, cfg, rank=0, world_size=1):
    self.cfg, self.world_size, self.adam_step, self.step_count, kinds = cfg, world_size, adam_step, 0, {}
    for name, p in model.named_parameters():
      kind = (group := parameter_rule(name)[0], p.shape if group == "matrix" else None)
      kinds.setdefault(kind, []).append((name, p))
    self.banks = [Bank(group, *zip(*members), rank, world_size) for (group, _), members in kinds.items()]
    self.lr = dict(matrix=cfg.matrix_lr, embed=cfg.tied_embed_lr if cfg.tie_embeddings else cfg.embed_lr,
                   value_embed=cfg.embed_lr, head=cfg.head_lr, scalar=cfg.scalar_lr)

  def tensors(self):
    """All that a step changes, parameters included."""
    return [t for bank in self.banks for t in (bank.data, bank.grad, *bank.state)]

  @torch.no_grad()
  def step(self, lr_factor, momentum):
    """Averages the ranks' gradients and updates, meanwhile."""
    self.step_count += 1
    cfg, scale, count = self.cfg, 1 / self.world_size, self.step_count // self.cfg.adam_every
    banks = [bank for bank in self.banks if bank.group == "matrix" or self.step_count % cfg.adam_every == 0]
    jobs = [reduce_scatter(bank.my_grad.flatten(), bank.grad, async_op=True)
            for bank in banks * (self.world_size > 1)]
    if cfg.grad_clip_norm and banks:
      for job in jobs:
        job.wait()
      norm = scale * all_reduce(sum(bank.my_grad.square().sum() for bank in banks)).sqrt()
      scale *= (cfg.grad_clip_norm / (norm + 1e-6)).clamp(max=1)
    for i, bank in enumerate(banks):
      if self.world_size > 1:
        jobs[i].wait()
      grad, lr, p, state = bank.my_grad, self.lr[bank.group] * lr_factor, bank.my_data, bank.state
      if bank.group == "matrix":
        update = muon_update(grad * scale, state[0], momentum, cfg.muon_backend_steps, cfg.orthogonalization)
        if cfg.normuon_beta2:
          update = normuon_scale(update, state[1], cfg.normuon_beta2)
        if cfg.weight_decay:  # only where the update shrinks it too (arXiv:2411.16085)
          p.addcmul_(p, (p * update > 0).to(p.dtype), value=-lr * lr * cfg.weight_decay)
        p.sub_(update, alpha=lr)
      else:
        numbers = map(torch.as_tensor, (scale, float(count), lr))
        self.adam_step(p, grad, *state, *numbers, cfg.beta1, cfg.beta2, cfg.adam_eps)
      bank.grad.zero_()
      if self.world_size > 1:
        jobs.append(all_gather(bank.data, p.flatten(), async_op=True))
    for job in jobs:
      job.wait()

# ---------- 6 schedules
Stage = namedtuple("Stage", "start first_step batch_multiple window")  # start: part of the run

def total_steps(cfg):
  return cfg.iterations + cfg.extension_iterations

def stage_table(cfg):
  """Equal stages, then the extension; one entry serves all. window: of long layers."""
  n = max(len(cfg.batch_schedule), len(cfg.window_schedule))
  equal = max(1, n - (cfg.extension_iterations > 0))
  steps = [min(i / equal, 1) * cfg.iterations for i in range(n)]
  return [Stage(step / total_steps(cfg), math.ceil(step - 1e-6), *entries) for step, *entries in zip(
      steps, per_layer(cfg.batch_schedule, n), per_layer(cfg.window_schedule, n))]

def stage_at(cfg, progress):
  return [stage for stage in stage_table(cfg) if stage.start <= progress + 1e-9][-1]

def planned_tokens(cfg):
  """Tokens of all steps."""
  _, steps, multiples, _ = zip(*stage_table(cfg))
  return cfg.train_batch_tokens * int(np.diff([*steps, total_steps(cfg)]) @ multiples)

def run_progress(cfg, step, elapsed):
  """Part of the run that is done, 0 to 1, by steps or by seconds, whichever is further."""
  return min(1.0, max(step / total_steps(cfg), elapsed / (cfg.max_wallclock_seconds or math.inf)))

def lr_factor(cfg, step, progress):
  """Factor on every LR at this step and progress."""
  # 1. a decay in steps becomes a part of the run, at the pace so far, at most half
  scheduled = min(1.0, progress * total_steps(cfg) / cfg.iterations)  # the extension stays at the floor
  decay = cfg.warmdown_frac
  if cfg.warmdown_iters:
    decay = min(0.5, cfg.warmdown_iters * progress / max(step, 1))
  # 2. larger batches allow larger steps
  top = stage_at(cfg, progress).batch_multiple ** cfg.batch_lr_power
  if any(cfg.lr_schedule):
    top = cfg.lr_schedule[sum(switch <= scheduled + 1e-9 for switch in cfg.lr_switches) - 1]
  # 3. the top until the decay begins, then linear down to the floor
  down = max(0.0, 1 - (1 - scheduled) / decay) if decay else 0.0
  return top * (1 - down) + cfg.lr_floor * down

def muon_momentum(cfg, step, progress):
  """Warms up by steps done, cools down by steps left at the pace so far."""
  first, left = cfg.muon_momentum_warmup_start, (1 - progress) * step / progress if progress else math.inf
  parts = ((step, cfg.muon_momentum_warmup_steps), (left, cfg.muon_momentum_cooldown_steps))
  return first + (cfg.muon_momentum - first) * min([1.0, *(steps / n for steps, n in parts if n)])

# ---------- 7 data
DATA_ARGUMENTS = {"embedded": "", "fineweb10B_sp1024": " sp1024 -n 40", "fineweb10B_gpt2": " gpt2",
                  "climbmix": " climbmix"}

def open_shard(path, tokens=None):
  """A .bin shard, of so many tokens -> their memory map, uint16. Raises Refused."""
  held, head = (os.path.getsize(path) - 1024) / 2, np.fromfile(path, "<i4", 3).tolist()
  demand(held > 0 and head == [20240520, 1, held] and tokens in (None, held),
         f"{path.name} is truncated or damaged: {held} tokens, header {head}, manifest {tokens}")
  return np.memmap(path, "<u2", "r", 1024)

def check_tokens(tokens, vocab_size, name):
  largest = tokens.max()
  demand(largest < vocab_size, f"{name} holds token {largest}, but vocab_size is {vocab_size}")

# train: {shard: tokens}; tokenizer, val_bytes (UTF-8) or None; about for result.json
Data = namedtuple("Data", "train val tokenizer vocab_size bos val_bytes about")

def table_bytes(sp, tokens):
  """UTF-8 bytes of the pieces: wrong where a tokenizer normalises."""
  ids = list(range(sp.vocab_size()))
  sizes = np.array([len(piece.replace("\u2581", " ").encode()) for piece in sp.id_to_piece(ids)])
  sizes[sp.is_byte(ids)], sizes[sp.is_control(ids)] = 1, 0
  return int(np.bincount(tokens, minlength=len(sizes)) @ sizes)

def decoded_bytes(sp, tokens, bos):
  """UTF-8 bytes by decoding each document: the definition."""
  documents = np.split(tokens, np.flatnonzero(tokens == bos))
  return sum(len(sp.decode(document.tolist()).encode()) for document in documents)

def file_sha256(path, stated=None):
  """Raises Refused if it is not the stated one."""
  digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
  demand(stated in (None, digest), f"{Path(path).name} is not the file that manifest.json means")
  return digest

def open_data(cfg, log=print):
  """The dataset of cfg.data_path, checked. Raises Refused, Missing if it is not there."""
  folder = Path(cfg.data_path).absolute()
  get_it = f"get it with `./run.sh data{DATA_ARGUMENTS.get(folder.name, ' --text PATH --name NAME')}`"
  try:
    return read_dataset(cfg, folder, get_it, log)
  except Refused:
    raise
  except Exception as error:
    raise Refused(f"manifest.json, a shard or the tokenizer of {folder.name} is damaged or missing "
                  f"({brief(error)}): {get_it}") from None

def read_dataset(cfg, folder, get_it, log):
  """By manifest.json; without one, all *_train_*.bin and *_val_*.bin."""
  # 1. the shards
  path, name = folder / "manifest.json", folder.name
  manifest = json.loads(path.read_text()) if path.exists() else {"files": [
      {"path": shard.name, "split": shard.name.split("_")[-2]} for shard in sorted(folder.glob("*_*_*.bin"))]}
  train, val = ({file["path"]: open_shard(folder / file["path"], file.get("tokens"))
                 for file in manifest["files"] if file["split"] == split} for split in ("train", "val"))
  demand(train and val, f"no train and val shards at {show(cfg.data_path)!r}: {get_it}", Missing)
  sha256 = {file["path"]: file_sha256(folder / file["path"], file.get("sha256"))
            for file in manifest["files"] if file["path"] in val}
  val, train_tokens = np.concatenate([*val.values()]), sum(map(len, train.values()))
  least = max((cfg.eval_context or cfg.train_seq_len) + 1, cfg.val_tokens)
  demand(len(val) >= least, f"the val split of {name} has {len(val)} tokens; VAL_TOKENS, rows need {least}")
  log(f"data: {name} train tokens:{train_tokens} in {len(train)} shards, val tokens:{len(val)}")
  if side := manifest.get("document_hashes"):
    hashes = np.split(np.fromfile(folder / side["path"], "<u8"), [side["val"]])
    both = len(np.intersect1d(*hashes))
    demand(not both, f"{both} documents of {name} are in train and in val: prepare it again")
  # 2. the tokenizer that made them
  made_by, tokenizer, size = manifest.get("tokenizer") or {}, None, 0
  stated, bos = int(made_by.get("vocab_size", 0)), int(made_by.get("bos_id", 50256))
  if path := cfg.tokenizer_path or "path" in made_by and str(folder / made_by["path"]):
    import sentencepiece
    sha256[Path(path).name] = file_sha256(path, made_by.get("sha256"))
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=path)
    size, bos = tokenizer.vocab_size(), tokenizer.bos_id()
  known, *others = {stated, size} - {0} or {cfg.vocab_size}
  vocab_size = cfg.vocab_size or known
  demand(not others and 0 < known <= vocab_size < known + 64 < 1e5,
         f"vocab_size={cfg.vocab_size} does not fit {name} (manifest.json {stated}, tokenizer {size}): "
         "set VOCAB_SIZE, at most 63 above theirs, or TOKENIZER_PATH")
  check_tokens(val, vocab_size, f"the val split of {name}")
  # 3. the bytes that val_bpb divides by
  val_bytes, source = manifest.get("val_bytes"), "manifest"
  if tokenizer:
    if val_bytes is None:
      val_bytes, source = decoded_bytes(tokenizer, val, bos), "decoded tokens"
    table = table_bytes(tokenizer, val)
    demand(val_bytes == table or not made_by.get("lossless"),
           f"the val text of {name} has {val_bytes!r} bytes, but {table} by its tokens: prepare it again")
    log(f"data: val_bytes:{val_bytes} ({source}), by the per-token table:{table}")
  elif val_bytes is None:
    log("data: no tokenizer, so val_bpb is null")
  demand(val_bytes is None or type(val_bytes) is int and val_bytes > 0, f"{name} has {val_bytes!r} val_bytes")
  fingerprint = manifest.get("text_fingerprint")
  log(f"data: text fingerprint {fingerprint}")
  if cfg.data_fingerprint not in ("", fingerprint):
    log(f"data: this is another game than {cfg.preset}, whose text is {cfg.data_fingerprint}")
  return Data(train, val, tokenizer, vocab_size, bos, val_bytes, dict(
      name=name, fingerprint=fingerprint, train_tokens=train_tokens, val_tokens=len(val),
      val_bytes=val_bytes, sha256=sha256))

class Loader:
  """Batches from endless rows of T train tokens and the target after: the stream cut every T tokens or,
  with max_doc_len, heads of documents until a row is full; with shuffle in one random order. Ranks share
  the rows of a step. A thread reads a step ahead; position, in rows, is the whole state."""
  def __init__(self, cfg, data, team, log=print):
    self.T, self.team, self.position, self.ahead = cfg.train_seq_len, team, 0, {}
    self.names, self.shards = zip(*data.train.items())
    self.files = [open(shard.filename, "rb") for shard in self.shards]
    self.check = cache(lambda i: [check_tokens(self.part(i, n), data.vocab_size, f"shard {self.names[i]}")
                                  for n in range(0, len(self.shards[i]), 1 << 24)])
    self.edges, self.thread = np.cumsum([0, *map(len, self.shards)]), ThreadPoolExecutor(1)
    # 1. the pieces of the stream that are read
    total, full, bos = int(self.edges[-1]), self.T + 1, cfg.bos_id or data.bos
    starts = np.arange(0, total - self.T, self.T)
    lengths = np.full(len(starts), full)
    if longest := cfg.max_doc_len:
      starts = np.concatenate([a + np.flatnonzero(b == bos) for a, b in zip(self.edges, self.shards)])
      lengths = np.diff(starts, append=total).clip(max=longest)
    # 2. the first piece of each row
    filled, first = np.cumsum([0, *lengths]), [0]
    while (end := filled.searchsorted(filled[first[-1]] + full)) < len(filled):
      first.append(end)
    self.pieces, self.rows = (starts, lengths, first), len(first) - 1
    demand(self.rows > 0, f"the train tokens do not fill a row of {self.T}")
    if longest:
      kept, rest = self.rows * full, filled[-1] + starts[0]
      log(f"documents: {len(starts)} in {self.rows} rows; of {total} train tokens {kept} are read, "
          f"{total - rest} beyond max_doc_len:{longest} and {rest - kept} beyond a row are not")
    # 3. their order, and whether they are enough
    self.order = np.random.default_rng(0).permutation(self.rows) if cfg.shuffle else range(self.rows)
    short = planned_tokens(cfg) - self.rows * self.T * (cfg.max_epochs or math.inf)
    demand(cfg.max_wallclock_seconds or cfg.eval_from or short <= 0, f"{short} of {planned_tokens(cfg)} "
           f"train tokens are missing; max_epochs is {cfg.max_epochs}", Missing)

  def part(self, i, start, count=1 << 24):
    """Tokens of a shard; if it shrank, a memory map would end the process."""
    size = 2 * min(count, len(self.shards[i]) - start)
    raw = os.pread(self.files[i].fileno(), size, 1024 + 2 * start)
    demand(len(raw) == size, f"shard {self.names[i]} cannot be read to its end")
    return np.frombuffer(raw, "<u2")

  def read(self, start, count):
    """count tokens from start on, int64 (count,). Checks a shard before its first use."""
    i = int(np.searchsorted(self.edges, start, "right")) - 1
    self.check(i)
    part = self.part(i, start - self.edges[i], count).astype(np.int64)
    rest = count - len(part)
    return np.r_[part, self.read(start + len(part), rest)] if rest else part

  def row(self, place):
    """The row at this place of the endless sequence (T + 1,)."""
    i, (starts, lengths, first) = int(self.order[place % self.rows]), self.pieces
    here = slice(first[i], first[i + 1])
    return np.concatenate([*map(self.read, starts[here], lengths[here])])[:self.T + 1]

  def fetch(self, places):
    return torch.from_numpy(np.stack([*map(self.row, places)]))

  def next(self, batch_tokens):
    """(tokens, targets), each (rows of this rank, T), on the device."""
    n, team = batch_tokens // self.T, self.team
    share = n // team.world_size
    first = self.position + team.rank * share
    here, after = (range(start, start + share) for start in (first, first + n))
    rows = (self.ahead.pop(here, None) or self.thread.submit(self.fetch, here)).result()
    if team.on_gpu:  # or the copy would wait for the device
      rows = rows.pin_memory().to(team.device, non_blocking=True)
    self.position, self.ahead = self.position + n, {after: self.thread.submit(self.fetch, after)}
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

  @property
  def epoch(self):
    return self.position // self.rows + 1

# ---------- 8 evaluation
def log_probs(model, tokens):
  """tokens (B, T) int64 -> (B, T, V) fp32 of the next token, whence every score."""
  return F.log_softmax(model.logits(tokens), -1)

# nats per target; bits per byte, None for a part of val; these without the nats of BOS targets
Score = namedtuple("Score", "val_loss val_bpb val_bpb_without_bos")

def eval_window(cfg):
  return cfg.eval_window or cfg.window_schedule[-1]

def eval_settings(cfg):
  """What a score depends on besides weights and text."""
  context = cfg.eval_context or cfg.train_seq_len
  return dict(eval_tokens=cfg.val_tokens or "full", eval_context=context,
              eval_stride=cfg.eval_stride or context, eval_window=eval_window(cfg) or "full")

@torch.no_grad()
def scored(model, cfg, rows, team):
  """rows [(ids, first)], of which ids[first:] are targets -> batches of rows of like length: the row of each
  target (n,), the targets, their nats in fp64, whether each was the likeliest. CPUs score in fp32."""
  order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
  most = max([len(ids) - first for ids, first in rows], default=1)
  fit = (1 << 28) // (most * cfg.vocab_size)  # rows of 1 GiB of logits
  tokens = min(cfg.val_batch_size, 1 << 30 if team.on_gpu else 2048)  # what a CPU's cache holds
  dtype, model.dtype = model.dtype, model.dtype if team.on_gpu else torch.float32
  while order:
    team.at("evaluation")
    T = len(rows[order[-1]][0]) - 1  # of the longest that is left
    step = max(1, min(tokens // T, fit))
    order, here = order[:-step], order[-step:]
    ids = np.zeros((len(here), T + 1), np.int64)
    wanted = np.zeros(ids.shape, bool)
    for i, (row, first) in enumerate(rows[j] for j in here):
      ids[i, :len(row)], wanted[i, first:len(row)] = row, True
    batch, mask, targets = (torch.from_numpy(t).to(team.device) for t in (ids, wanted[:, 1:], ids[wanted]))
    model.set_context(T, eval_window(cfg), mask)
    scores = log_probs(model, batch[:, :-1])
    nats = -scores.gather(-1, targets[:, None])[:, 0].double().cpu().numpy()
    yield np.array(here)[wanted.nonzero()[0]], ids[wanted], nats, (scores.argmax(-1) == targets).cpu().numpy()
  model.dtype, model.wanted = dtype, ...

def evaluate(model, cfg, data, team):
  """Score of the first val_tokens tokens, each target once: rows of eval_context tokens score their last
  eval_stride targets, the first row all. Sums are fp64."""
  tokens, nats = data.val[:cfg.val_tokens or None], torch.zeros(2, dtype=torch.float64)
  _, context, stride, _ = eval_settings(cfg).values()
  n = len(tokens) - 1
  lows = range(0, max(1, n - context + stride), stride)[team.rank::team.world_size]
  rows = [(tokens[low:low + context + 1], context - stride + 1 if low else 1) for low in lows]
  for _, targets, found, _ in scored(model, cfg, rows, team):
    nats += torch.tensor([found.sum(), found[targets != data.bos].sum()])
  nats, without = all_reduce(nats).tolist()
  whole = data.val_bytes and len(tokens) == len(data.val)
  return Score(nats / n, *(x / math.log(2) / data.val_bytes if whole else None for x in (nats, without)))

def score_text(cfg, score, digits=4):
  """`val_loss:… val_bpb:…`, val_loss_partial if not of the preset's own split."""
  partial = "" if cfg.val_tokens in (0, preset_config(cfg.preset).val_tokens) else "_partial"
  bpb = "" if score.val_bpb is None else f" val_bpb:{score.val_bpb:.{digits}f}"
  return f"val_loss{partial}:{score.val_loss:.{digits}f}{bpb}"

def core_metric(*run):
  """(model, cfg, data, team, log) -> part of the result. Raises Refused."""
  import core
  return core.core_of_run(sys.modules[__name__], *run)

def show_samples(*run):
  """(model, cfg, data, log): continues cfg.sample's prompts, or three documents."""
  import plan
  plan.show_samples(sys.modules[__name__], *run)

# ---------- 9 artifact
CLIP_PERCENTILE = 99.99984  # of a row's magnitudes; what lies beyond is clipped
STEPS = dict(matrix=1, embed=0.6, head=0.5, value_embed=1.6)  # of artifact_step, by what it costs (BENCH)
LZMA = [dict(id=lzma.FILTER_LZMA2, preset=9, lc=0)]  # no context of the byte before

def codec(cfg):
  """Of the artifact; its first word names the file."""
  return "lzma" if cfg.artifact_step or ".lzma." in cfg.eval_from else "int8+zlib"

def quantize_rows(w, step=0.0):
  """w (R, C) fp32 -> int8 (R, C), fp16 scales (R,)."""
  scale = step * w.square().mean(1).sqrt() if step else torch.from_numpy(
      np.percentile(w.abs().double(), CLIP_PERCENTILE, 1)) / 127
  scale = scale.clamp_min(2 ** -24).half()  # the least fp16: a row of zeros stays one
  return (w / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scale

def pack_artifact(model):
  """Weights, int8 rows or fp16, fp32 for scalars, and shape constants."""
  tensors, cfg = {}, model.cfg
  for name, p in model.named_parameters():
    w, group = p.data.cpu(), parameter_rule(name)[0]
    if group != "scalar" and w.numel() > cfg.artifact_keep:
      tensors[name + ".int8"], tensors[name + ".scale"] = quantize_rows(w, cfg.artifact_step * STEPS[group])
    else:
      tensors[name] = w if group == "scalar" else w.half()
  demand(all(t.isfinite().all() for t in tensors.values()),
         "the weights outgrew the artifact's fp16: lower the learning rates")
  tensors = dict(sorted(tensors.items(), key=lambda pair: pair[1].element_size()))  # like beside like
  raw = to_bytes(cfg, tensors)
  return lzma.compress(raw, filters=LZMA) if cfg.artifact_step else zlib.compress(raw, 9)

def to_bytes(cfg, tensors):
  """torch.save, without a path or whole banks getting in."""
  shape = {name: getattr(cfg, name) for name in SHAPE}
  tensors = {name: t.detach().cpu().clone() for name, t in tensors.items()}
  torch.save(dict(shape=shape, tensors=tensors), buffer := io.BytesIO())
  return buffer.getvalue()

def load_model(path, device="cpu", base=None):
  """Artifact or final_model.pt -> (GPT ready for log_probs, Config: base but for SHAPE). Raises Refused."""
  try:
    raw = Path(path).read_bytes()
    raw = raw if raw[:2] == b"PK" else (zlib if raw[:1] == b"x" else lzma).decompress(raw)
    demand(not zipfile.ZipFile(io.BytesIO(raw)).testzip(), "a checksum is wrong")
    payload = torch.load(io.BytesIO(raw), "cpu", weights_only=True)
    shape, tensors = {name: payload["shape"][name] for name in SHAPE}, payload["tensors"]
    demand(all(type(shape[name]) is type(FIELDS[name].default) for name in SHAPE), "a type is wrong")
    cfg = replace(base or Config(), **shape, batch_schedule=(1,),
                  train_batch_tokens=shape["train_seq_len"])
    check_config(cfg)
    model = GPT(cfg)
    for name, p in model.named_parameters():
      rows = tensors.pop(name + ".int8", None)
      w = tensors.pop(name) if rows is None else rows.float() * tensors.pop(name + ".scale")[:, None]
      demand(w.shape == p.shape and w.isfinite().all(), f"{name} has another shape or is not finite")
      p.data.copy_(w)
    demand(not tensors, f"unknown {list(tensors)[:1]}")
    model.to(device).dtype = torch.bfloat16 if "cuda" in str(device) else torch.float32
    model.set_context(cfg.train_seq_len, eval_window(cfg))
  except Exception as error:
    raise Refused(f"{show(str(path))} is damaged or no model of this trainer ({brief(error)})") from None
  return model.eval(), cfg

def write_atomically(path, content):
  """bytes -> path, whole or not at all."""
  with open(f"{path}.tmp", "wb") as file:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())
  os.replace(file.name, path)

# ---------- 10 fast kernels
def script_files():
  """{name: bytes} of this file and of what it loaded that counts."""
  others = (sys.modules[name].__file__ for name in ("core", "dial", "golf", "kernels") if name in sys.modules)
  return {Path(file).name: Path(file).read_bytes() for file in (__file__, *others)}

def beside(name, wanted=True):
  """A file beside this one as a module, if it is wanted and there."""
  return wanted and find_spec(name) and import_module(name)

def fast_kernels(cfg, team, log):
  """Raises Refused where fp8 cannot be."""
  kernels = import_module("kernels") if cfg.fp8 != "off" else beside("kernels")
  return kernels.choose(sys.modules[__name__], cfg, team.on_gpu, log) if kernels else Fast()

# ---------- 11 main
def near_misses(env):
  """[(variable that is no constant, the constant a slip away)]"""
  return [(key, name) for key in env for name in get_close_matches(key.upper(), NAMES, 1, 0.75)
          if key != name and abs(len(key) - len(name)) < 2]

def parse_value(name, text):
  """Text -> a value of the constant's type. Raises Refused."""
  default, booleans = FIELDS[name].default, {"0": False, "1": True, "false": False, "true": True}
  try:
    text.encode()  # an environment may hold other bytes
    if isinstance(default, tuple):
      return tuple(map(type(default[0]), text.split(",")))
    if text == "-1" and type(default) in (int, float) and "; 0: " in FIELDS[name].doc:  # as the field has it
      return type(default)(0)
    return booleans[text.lower()] if isinstance(default, bool) else type(default)(text)
  except (KeyError, ValueError):
    raise Refused(f"{name}={text!r} must be written like {show(default)}") from None

def parse_flags(argv):
  """--matrix-lr=0.03 or --matrix-lr 0.03 or bare --compile -> ("MATRIX_LR", text) each. Raises Refused."""
  words = [*argv]
  while words:
    flag, equals, text = words.pop(0).partition("=")
    name = flag[2:].replace("-", "_").upper()
    near = dict(near_misses([name])).get(name, "help").lower().replace("_", "-")
    demand(flag[:2] == "--" and name in NAMES, f"unknown argument {flag}; did you mean --{near}?")
    if not equals:  # the value is the next word; a Boolean can do without, and fp8
      alone = "all" if name == "FP8" else "1" if type(FIELDS[NAMES[name]].default) is bool else None
      bare = not words or words[0].startswith("--")
      demand(alone or not bare, f"{flag} needs a value")
      text = alone if bare else words.pop(0)
    yield name, text

def show(value):
  """A constant as one types it; of an absolute path the last part."""
  if isinstance(value, tuple):
    return ",".join(map(str, value))
  text = str(int(value) if isinstance(value, bool) else value)
  return Path(text).name if os.path.isabs(text) else text

def overrides(cfg):
  """{name: [text of the preset, text in force]} where they differ."""
  preset = vars(preset_config(cfg.preset))
  return {name: [show(preset[name]), show(value)] for name, value in vars(cfg).items()
          if value != preset[name]}

class Team:
  """The ranks, and where this one computes."""
  def __init__(self, cfg, env):
    alone = dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, LOCAL_WORLD_SIZE=1)
    self.rank, local, self.world_size, self.ranks_here = (int(env.get(*pair)) for pair in alone.items())
    gpus = torch.cuda.is_available() and torch.cuda.device_count()
    sequences = cfg.train_batch_tokens // cfg.train_seq_len
    self.on_gpu = gpus > 0 if cfg.device == "auto" else cfg.device == "cuda"
    demand(not self.on_gpu or self.ranks_here <= gpus,
           f"{self.ranks_here} ranks for {gpus} GPUs here: lower --nproc_per_node or use DEVICE=cpu")
    demand(sequences % self.world_size == 0 or cfg.eval_from or cfg.resume,
           f"{self.world_size} ranks do not divide the {sequences} sequences of a step")
    self.device = torch.device(f"cuda:{local}" if self.on_gpu else "cpu")
    has_bf16 = (torch.cuda.is_bf16_supported(including_emulation=False) if self.on_gpu else
                getattr(torch.cpu, "get_capabilities", dict)().get("avx512_bf16"))
    auto = "bfloat16" if has_bf16 else "float32"
    self.dtype = getattr(torch, auto if cfg.dtype == "auto" else cfg.dtype)
    backend = torch.cuda if self.on_gpu else torch.cpu
    backend.set_device(self.device)
    self.wait = backend.synchronize  # until the device has done all
    torch.use_deterministic_algorithms(not self.on_gpu)  # or compiled embedding gradients are not
    torch.utils.deterministic.fill_uninitialized_memory = False
    np.finfo(np.float32), np.finfo(np.float64)  # numpy warns if it looks later
    torch.set_flush_denormal(True)
    if "RANK" in env and not dist.is_initialized():
      dist.init_process_group("cpu:gloo,cuda:nccl" if self.on_gpu else "gloo")

  def share(self, value):
    """Rank 0's object on every rank."""
    box = [value]
    if self.world_size > 1:
      dist.broadcast_object_list(box)
    return box[0]

  def at(self, phase, step=None):
    """Tells the watch how far this rank is."""

class Log:
  """Lines to rank 0's terminal and, once open, train.log."""
  def __init__(self, lead):
    self.lead, self.file, self.started, self.guard = lead, io.StringIO(), False, None

  def __call__(self, *lines, echo=True):
    for line in lines:
      if self.lead and echo:
        print(line, flush=True)
      print(line, file=self.file, flush=True)

  def open(self, path, head):
    early, self.file = self.file.getvalue(), open(path, "a", encoding="utf-8")
    with suppress(OSError):
      fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # one run at a time
    print("" if self.file.tell() else head, early, sep="\n", end="", file=self.file, flush=True)

def brief(error):
  """An exception in one line, without this machine's folders."""
  line = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
  return re.sub(r"(?<![\w.~-])/\S*/", "", line.replace(platform.node() or "\n", "host"))[:200]

def out_of_memory(error):
  return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)

def hardware(team):
  """One line: what the run computes on."""
  if team.on_gpu:
    return f"{team.world_size}x {torch.cuda.get_device_name()}"
  name = subprocess.getoutput("grep -sm1 'model name' /proc/cpuinfo").partition(": ")[2]
  return f"{team.world_size} ranks x {torch.get_num_threads()} threads of {name or platform.machine()}"

def parameter_counts(cfg):
  """{group of the optimizer: parameters}"""
  counts = Counter()
  with torch.device("meta"):
    for name, p in GPT(cfg).named_parameters():
      counts[parameter_rule(name)[0]] += p.numel()
  return counts

def horizon_weights(cfg):
  """Matrices and head."""
  return parameter_counts(cfg)["matrix"] + cfg.vocab_size * cfg.model_dim

def flops_per_token(cfg):
  """Matmul FLOPs of training, as PaLM counts: 6 per weight, 12 * width * window per layer."""
  sizes = window_sizes(cfg, cfg.window_schedule[-1], cfg.train_seq_len)
  keys = sum(sizes.get(kind, 0) for kind in per_layer(cfg.window_pattern, cfg.num_layers))
  return 6 * (horizon_weights(cfg) + 2 * cfg.model_dim * keys)

def step_memory(cfg, team, sequences):
  """Bytes of a rank with so many sequences at a time, roughly."""
  total, width = sum(parameter_counts(cfg).values()), team.dtype.itemsize
  per_token = cfg.num_layers * cfg.model_dim * (14 + 3 * cfg.mlp_mult) * width + 14 * cfg.vocab_size
  return int(total * (8 + width + 8 / team.world_size) + sequences * cfg.train_seq_len * per_token)

def free_memory(team):
  """Bytes free on a GPU, or a rank's part of half a machine."""
  if team.on_gpu:
    return torch.cuda.mem_get_info()[0]
  return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2 / team.ranks_here

def micro_batch(cfg, team):
  """Sequences at a time: a divisor of a rank's that device_batch_size or memory allows."""
  share, most = cfg.train_batch_tokens // cfg.train_seq_len // team.world_size, cfg.device_batch_size
  return max(n for n in range(1, share + 1) if share % n == 0 and (
      n == 1 or n <= most or not most and step_memory(cfg, team, n) <= free_memory(team)))

def listed(table):
  return " ".join(f"{name}:{value}" for name, value in table.items())

def open_run(cfg, team, log, files, again=False):
  """logs/<run_id>/ with the script's files and train.log, new or again -> (cfg, folder). Raises Refused."""
  kind, rule = "eval" if cfg.eval_from else cfg.preset, "=" * 100
  run_id = team.share(cfg.run_id or f"{kind}_seed{cfg.seed}_{datetime.now():%Y%m%d_%H%M%S_%f}")
  folder, problem = Path("logs", run_id), None
  if team.rank == 0:
    versions = f"python {platform.python_version()} torch {torch.__version__} {platform.platform()}"
    gpus = [subprocess.getoutput("nvidia-smi | sed /Proc/Q")] if team.on_gpu else []
    head = [files["train_gpt.py"].decode(), rule, versions, f"hardware: {hardware(team)}", *gpus, rule]
    try:
      folder.mkdir(parents=True, exist_ok=again)
      for name, content in files.items():
        (folder / name).write_bytes(content)
      log.open(folder / "train.log", "\n".join(head))
    except OSError as error:
      problem = f"run_id={run_id!r}: {folder} cannot be written ({error.strerror})"
  demand(not (problem := team.share(problem)), problem)
  log.started = True
  return replace(cfg, run_id=run_id), folder

def train_step(loss_fn, optimizer, batch, micro, lr, momentum):
  """A step, micro sequences at a time. Returns this rank's mean loss."""
  parts, total = list(zip(*(t.split(micro) for t in batch))), 0.0
  for part in parts:
    loss = loss_fn(*part) / len(parts)
    loss.backward()
    total = total + loss.detach()
  optimizer.step(lr, momentum)
  return total

def rehearse(cfg, team, model, optimizer, micro, log):
  """Compiles, runs each window on made-up tokens, undoes it. Returns the loss function."""
  T, kept, stages = cfg.train_seq_len, [t.clone() for t in optimizer.tensors()], stage_table(cfg)
  batch = torch.arange(2 * micro * T, device=team.device).view(2, micro, T) % cfg.vocab_size
  for loss_fn in [torch.compile(model, dynamic=False)] * cfg.compile + [model]:
    optimizer.adam_step = adam_step if loss_fn is model else torch.compile(adam_step, dynamic=True)
    try:
      for step in range(max(cfg.warmup_steps, len(stages))):
        model.set_context(T, stages[step % len(stages)].window)
        loss_fn(*batch).backward()
        if step < cfg.warmup_steps:
          optimizer.step(1.0, cfg.muon_momentum)
      break
    except Exception as error:  # a compiler's back end may raise anything
      if loss_fn is model or team.world_size > 1 or out_of_memory(error):
        raise
      log(f"compile: not possible here ({brief(error)}); training uncompiled")
  torch._foreach_copy_(optimizer.tensors(), kept)
  optimizer.step_count = 0
  return loss_fn

def train(cfg, team, data, model, optimizer, loader, loss_fn, micro, log):
  """All that is on the clock. Returns the last Score, {split: [(step, seconds, loss)]}, part of the result.
  On GPUs the ranks ask for the time every few steps, hear it next time and go by their pace meanwhile;
  the host waits till three are under way, without a cap at log lines only."""
  every = 4 if team.on_gpu else 1
  cap, last, tokens = cfg.max_wallclock_seconds, total_steps(cfg), loader.position * loader.T
  report, window, events, asked = False, None, [], []
  guard, begin = log.guard, dict(step=0, now=0.0, curves={"train": [], "val": []}, laps=[])
  step, now, curves, laps = ((guard and guard.state or begin)[key] for key in begin)
  at, then = lap_start = step, now
  multiple, stop = 1, 0
  broken = torch.zeros((), device=team.device)  # nan once a loss was not finite
  team.wait()
  start = time.perf_counter() - now  # the clock starts
  while True:
    # 1. the time, the same on all ranks; does another step fit in before the cap?
    team.at("training", step)
    if report or step % every == 0:
      while events and (len(events) > 3 or events[0].query()):  # of steps under way
        events.pop(0).synchronize()
      mine = torch.tensor([time.perf_counter() - start, guard.stop if guard else 0], dtype=torch.float64)
      exact = report or cap or not team.on_gpu
      asked.append((step - len(events), exact, *all_reduce(mine, "MAX", True)))
    if len(asked) > team.on_gpu:
      at, exact, mine, job = asked.pop(0)
      if job:
        job.wait()
      then, stop = mine.tolist()
      if exact and at > lap_start[0]:
        laps.append(((then - lap_start[1]) / (at - lap_start[0]), multiple))
        lap_start = at, then
    pace = sorted(t / n for t, n in laps[-100:]) or [0.0]
    now = then + (step - at) * pace[len(pace) // 2] * multiple
    progress = run_progress(cfg, step, now)
    stage = stage_at(cfg, progress)
    multiple = stage.batch_multiple
    reserve = pace[len(pace) * 95 // 100] * multiple * (step + every - at)
    done = "iterations" if step == last else None
    done = "wallclock_cap" if step and 0 < cap <= then + reserve else done
    # 2. a checkpoint
    if guard and guard.due(step, now, stop or team.world_size == 1 and guard.stop, done):
      guard.save(step, now, curves, laps)
      continue
    # 3. validation, off the clock
    measure, show = (step and due(every, step) for every in (cfg.core_metric_every, cfg.sample_every))
    if done or due(cfg.val_loss_every, step) or measure or show:
      team.wait()
      now = time.perf_counter() - start  # it stops
      if done and guard:
        guard.save_last(step, now, curves, laps)
      if done == "wallclock_cap":
        log(f"stopping_early: {done} train_time:{now * 1e3:.0f}ms step:{step}/{last}")
      score, window = evaluate(model, cfg, data, team), None
      curves["val"].append((step, now, score.val_loss))
      log(f"step:{step}/{last} {score_text(cfg, score)} {time_text(now, step)}")
      check_finite(score.val_loss, "val_loss", step, curves["train"])
      if done:
        break
      if measure:
        core_metric(model, cfg, data, team, log)
      if show:
        show_samples(model, cfg, data, log)
      start = time.perf_counter() - now  # it goes on
    if stage.window != window:
      model.set_context(cfg.train_seq_len, window := stage.window)
    # 4. a step
    lr, momentum = (f(cfg, step, progress) for f in (lr_factor, muon_momentum))
    epoch, batch = loader.epoch, loader.next(cfg.train_batch_tokens * multiple)
    loss = train_step(loss_fn, optimizer, batch, micro, lr, momentum)
    broken += 0 * loss
    step, tokens = step + 1, loader.position * loader.T
    if team.on_gpu and cap:
      events.append(torch.cuda.current_stream().record_event())
    if loader.epoch > epoch:
      log(f"epoch {loader.epoch} begins in step {step}: all {loader.rows} train sequences were read")
    # 5. a report
    if report := step <= 10 or step % (cfg.train_log_every or 100) == 0:
      mean = all_reduce((loss + broken) / team.world_size).item()
      curves["train"].append((step, now := time.perf_counter() - start, mean))
      check_finite(mean, "train_loss", step, curves["train"])
      left = now / run_progress(cfg, step, now) - now
      log(f"step:{step}/{last} train_loss:{mean:.4f} {time_text(now, step)} tok/s:{tokens / now:.0f} "
          f"lr_factor:{lr:.3f} eta:{left:.0f}s")
  step_ms = np.percentile([1e3 * t for t, _ in laps or [(now / step, 1)]], (50, 95, 100)).round(3).tolist()
  return score, curves, dict(
      train_time_ms=round(now * 1e3), step_ms=dict(zip(("p50", "p95", "max"), step_ms)), steps=step,
      tokens=tokens, tok_per_s=round(tokens / now), stop_reason=done)

def due(every, step):
  return every and step % every == 0

def time_text(seconds, step):
  return f"train_time:{seconds * 1e3:.0f}ms step_avg:{seconds * 1e3 / max(step, 1):.2f}ms"

def check_finite(loss, name, step, curve):
  past = ", ".join(f"{value:.4f} at step {s}" for s, _, value in curve[-4:-1]) or "nothing"
  demand(math.isfinite(loss),
         f"{name} is not finite at step {step} (before: {past}): lower the learning rates")

def write_artifact(model, folder, files, log):
  """final_model.pt and the artifact. Returns the sizes; all code counts for the limit."""
  cfg, packed, code = model.cfg, pack_artifact(model), len(files["train_gpt.py"])
  write_atomically(folder / "final_model.pt", to_bytes(cfg, dict(model.named_parameters())))
  write_atomically(folder / f"final_model.{codec(cfg)[:4]}.ptz", packed)
  size, total, limit = len(packed), len(packed) + code, cfg.artifact_bytes_limit
  rest = sum(map(len, files.values())) - code
  log(f"Serialized model {codec(cfg)}: {size} bytes ({sum(map(torch.numel, model.parameters()))} weights)",
      f"Code size: {code} bytes", f"Code beside it: {rest} bytes",
      f"Total submission size {codec(cfg)}: {total} bytes")
  fits = not limit or total + rest <= limit
  if limit:
    log(f"artifact_bytes_limit: {limit} bytes, " + ("within it" if fits else
        f"OVER by {total + rest - limit}: lower MODEL_DIM, NUM_LAYERS, BIGRAM_ROWS or raise ARTIFACT_STEP"))
  return dict(bytes_model=size, bytes_total=total, artifact_within_limit=fits)

def run(argv, env, log):
  """One run: dry, of a file, or training."""
  cfg, me = load_config(env, argv), sys.modules[__name__]
  began, started = time.perf_counter(), f"{datetime.now(UTC):%FT%TZ}"
  for key, name in near_misses(env):
    log(f"warning: {key} in the environment is no constant; did you mean {name}?")
  team, model, scores, curves, report, state = Team(cfg, env), None, {}, None, {}, None
  faults, plan = map(beside, ("faults", "plan"))
  log.guard = faults and faults.Guard(me, team, env, log)
  if gone := [name for name in ("faults", "golf", "kernels", "plan") if not find_spec(name)]:
    log(f"not beside this: {', '.join(gone)}; see its map")
  if cfg.resume:
    import faults  # or refuse
    cfg, state = log.guard.resume(cfg, overrides(cfg))
    if not cfg:
      return
    team.__init__(cfg, env)
  changed = overrides(cfg)
  log(*(f"override {name} {old} -> {new}" for name, (old, new) in changed.items()))
  # 1. the plan
  if cfg.eval_from:
    told, (model, cfg) = cfg, load_model(cfg.eval_from, team.device, cfg)
    model.dtype = team.dtype
    for name in {"preset", *changed} & {*SHAPE}:
      asked, there = (show(getattr(c, name)) for c in (told, cfg))
      demand(asked == there, f"{name}={asked}, but the model has {there}: give that")
  try:
    data = open_data(cfg, log)
    cfg = replace(cfg, vocab_size=data.vocab_size, bos_id=cfg.bos_id or max(data.bos, 0))
    loader = Loader(cfg, data, team, log)
    if (cfg.core or cfg.core_metric_every) and not cfg.dry_run:
      import core
      core.open_tasks(me, cfg)
      demand(data.tokenizer, "CORE needs a tokenizer: set TOKENIZER_PATH")
  except Missing as error:  # part of the plan
    if not cfg.dry_run:
      raise
    cfg = replace(cfg, vocab_size=cfg.vocab_size or 1024)
    log(f"data: {error}; planning with {cfg.vocab_size} tokens")
  if not model:
    micro = micro_batch(cfg, team)
    log(*plan.lines(me, cfg, team, micro, argv, env) if plan else ())
    fast = fast_kernels(cfg, team, log)
  if cfg.dry_run:
    return
  if model and "sample" in changed:
    return show_samples(model, cfg, data, log)
  golf = beside("golf", cfg.eval_sliding or cfg.eval_documents or cfg.eval_ttt)
  # 2. the folder
  loader.read(0, 1)  # checks the first shard
  cfg, folder = open_run(cfg, team, log, files := script_files(), state is not None)
  companions = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
  result = dict(
      run_id=cfg.run_id, preset=cfg.preset, seed=cfg.seed, val_loss=None, val_bpb=None, core=None,
      train_time_ms=0, steps=0, tokens=0, bytes_code=len(files["train_gpt.py"]), bytes_model=None,
      bytes_total=None, code_sha256=companions.pop("train_gpt.py"), companions=companions,
      world_size=team.world_size, hardware=hardware(team),
      torch=torch.__version__, config={name: show(value) for name, value in vars(cfg).items()},
      overrides=changed, data=data.about, eval=eval_settings(cfg), stop_reason="eval_from",
      started=(state or {}).get("started", started), resumed=state is not None)
  log(f"eval settings: {listed(result['eval'])}")
  log(*(f"config {name}={value}" for name, value in result["config"].items()), echo=False)
  # 3. the scores: of a file, or of what was trained and of its artifact as read back
  def core(counts=True):
    if cfg.core and counts:
      result.update(core_metric(model, cfg, data, team, log))

  if model:
    kind = "artifact" if cfg.eval_from.endswith(".ptz") else "trained"
    scores[kind] = evaluate(model, cfg, data, team)
    core()
  else:
    model = GPT(cfg, team.dtype, fast)
    init_parameters(model, cfg.seed)
    optimizer = Optimizer(model.to(team.device), cfg, team.rank, team.world_size)
    ready = time.perf_counter()
    team.at("compile")
    log("rehearsal before the clock" + ", compiling: about a minute" * cfg.compile)
    loss_fn = rehearse(cfg, team, model, optimizer, micro, log)
    setup_ms, compile_ms = (round(1e3 * t) for t in (ready - began, time.perf_counter() - ready))
    log(f"setup:{setup_ms}ms compile:{compile_ms}ms")
    if log.guard:
      log.guard.begin(cfg, model, optimizer, loader, folder, started)
    scores["trained"], curves, report = train(
        cfg, team, data, model, optimizer, loader, loss_fn, micro, log)
    core(not cfg.score_artifact)
    report |= plan.derived(me, cfg, team, scores["trained"], curves, report) if plan else {}
    report |= dict(setup_ms=setup_ms, compile_ms=compile_ms, micro_batch=micro, compiled=loss_fn is not model)
    if team.rank == 0:  # other hosts lack the file
      report |= write_artifact(model, folder, files, log)
      model.load_state_dict(load_model(folder / f"final_model.{codec(cfg)[:4]}.ptz")[0].state_dict())
    for bank in optimizer.banks if team.world_size > 1 else ():
      dist.broadcast(bank.data, 0)
    scores["artifact"] = evaluate(model, cfg, data, team)
    core(cfg.score_artifact)
  result["peak_memory"] = plan and plan.peak_memory(team, log)
  for kind, score in scores.items():
    tag = "final_model" if kind == "trained" else f"final_{codec(cfg).replace('+', '_')}_roundtrip"
    log(f"{tag} {score_text(cfg, score)}", f"{tag}_exact {score_text(cfg, score, 8)}")
    check_finite(score.val_loss, "the final val_loss", report.get("steps", 0), [])
    result[kind] = score._asdict()
  result.update(golf.further_scores(me, model, cfg, data, team, log) if golf else {})
  if team.rank > 0:
    return
  # 4. the result
  score = scores.get("artifact" if cfg.score_artifact else "trained", score)  # a file has but one
  text = score_text(cfg, score)
  if plan:
    show_samples(model, cfg, data, log)
  if plan and curves:
    plan.plot_curves(me, curves, f"{cfg.preset}: {text}", folder / "loss.png", log)
  report |= dict(process_ms=round(1e3 * (time.perf_counter() - began)),
                 val_bpb_without_bos=score.val_bpb_without_bos)
  result |= report | {text.split(":")[0]: score.val_loss, "val_bpb": score.val_bpb,  # or val_loss_partial
                      "finished": f"{datetime.now(UTC):%FT%TZ}"}
  rows = report | {"core_metric": result["core"], "score": text, "run folder": f"logs/{cfg.run_id}"}
  log(*(f"{key:>21}  {value}" for key, value in rows.items() if value is not None))
  write_atomically(folder / "result.json", (json.dumps(result, indent=1) + "\n").encode())

def main(argv, env):
  """Returns the exit code: 0 done, 1 failed, 2 refused."""
  log = Log(lead=env.get("RANK", "0") == "0")
  try:
    if {"--help", "-h"} & {*argv}:
      import plan
      print(*plan.help_text(sys.modules[__name__]), sep="\n")
    else:
      run(argv, env, log)
    if log.guard:
      log.guard.done()
    if dist.is_initialized():
      dist.destroy_process_group()
    return 0
  except (Exception, KeyboardInterrupt) as error:
    refused, out = isinstance(error, (Refused, ImportError)), out_of_memory(error)
    code = 2 if refused and not log.started else 1
    said = refused or isinstance(error, KeyboardInterrupt)
    why = " ".join(str(error).split()) or "interrupted" if said else brief(error)
    why += ": is it beside this file, or installed?" * isinstance(error, ImportError)
    why = "out of memory: lower DEVICE_BATCH_SIZE" if out else why
    if log.guard:
      why = log.guard.verdict(why, error)
    if not (said or out or isinstance(error, (OSError, dist.DistError))):
      traceback.print_exc()  # a mistake of ours
  with suppress(OSError):  # of a full disk
    log(why, echo=False)
  if code == 1 or env.get("LOCAL_RANK", "0") == "0":  # ranks refuse alike
    print(f"train_gpt: {why}", file=sys.stderr, flush=True)
  if dist.is_initialized():  # do not wait for peers in a collective
    os._exit(code)
  return code

if __name__ == "__main__":
  sys.stdout.reconfigure(errors="replace")  # for samples
  sys.exit(main(sys.argv[1:], os.environ))
