"""train_gpt: train a GPT as fast as the hardware allows, in one file.

    python train_gpt.py                                                        tiny: 120 s on any CPU or GPU
    torchrun --standalone --nproc_per_node=8 train_gpt.py --preset=golf        16 MB after 600 s on 8xH100
    torchrun --standalone --nproc_per_node=8 train_gpt.py --preset=speedrun    val_loss 3.28 on 8xH100
    torchrun --standalone --nproc_per_node=8 train_gpt.py --preset=gpt2        CORE 0.2565 on 8xH100
    EVAL_FROM=logs/<run_id>/final_model.int8.ptz python train_gpt.py           score what a run left behind

`--help` lists a preset's constants. `./run.sh PRESET` also looks for mistakes before and shows samples after.

Sections begin with `# ----------`. First the core, in the order in which data flow: constants and flags,
techniques, optimizer, schedules, data, scores, artifact, checkpoints, ranks and log, training. Then the
recipes, each after what both recipes of its game share: the part to edit.
"""
# ---------- 2 imports
import argparse
import csv
import ctypes
import fcntl
import gc
import hashlib
import io
import json
import math
import os
import platform
import random
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import Field, asdict, dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, NoReturn, TypeAlias

try:
    from datetime import UTC, datetime, timedelta  # UTC needs Python 3.11

    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import BlockMask, flex_attention
except ImportError as error:
    print(f"train_gpt: {error}: ./run.sh setup, then .venv/bin/python", file=sys.stderr)
    sys.exit(2)

triton: Any = None  # CPU builds of torch ship without it
with suppress(ImportError):
    import triton
    import triton.language as tl

class Refused(Exception):
    """Why there is no run (exit code 2), or why a run ends (exit code 1), in one sentence for the user."""

Logger = Callable[..., None]  # log(*lines)
Kernel = Callable[..., Tensor]  # a function of tensors that has fast versions: linear(), attention
Cap = tuple[float, float, float]  # cap, shift and width of softcap()
Mask: TypeAlias = Tensor | BlockMask | None  # what WindowKernels.window_mask returns
RowLosses = Callable[..., tuple[Tensor, Tensor]]  # row_losses() or its faster version
Scales: TypeAlias = tuple[float | Tensor | None, ...]  # of fp8 tensors; None: by the maximum

def require(condition: object, sentence: str, error: type[Exception] = Refused) -> None:
    """Raises `error` with this sentence unless the condition holds."""
    if not condition:
        raise error(sentence)

# ---------- 3 run constants, flags, checks
def option(default: Any, doc: str, least: float = 0, most: float = 1e12, choices: tuple[str, ...] = (),
           off: bool = False, model: bool = False, of: type | None = None) -> Any:
    """Declares a constant. doc: what it means, with its unit. least, most: the range of a number. choices:
    the allowed strings. off: 0 turns it off. model: the forward pass depends on it. of: the type of a tuple's
    entries, needed if the default is empty."""
    return field(default=default, metadata=dict(doc=doc, least=least, most=most, choices=choices, off=off,
                                                model=model, of=of))

# A constant for which 0 means off or derived. -1 is read as 0, as on nanochat's command lines.
optional: Callable = partial(option, off=True)

@dataclass(frozen=True)
class Config:
    """The constants that every recipe has, with neutral values; a recipe gives its own values and adds what
    only it has. 0 means off or derived. Those without a neutral value stand in the recipes alone: preset,
    data_path, train_seq_len, train_batch_tokens, num_layers, model_dim, num_heads, iterations. Below, what
    the rest of the file asks of a recipe besides; every recipe also provides

        stages() -> [Stage], the table of stages
        parameter_table() -> {kind: Row}, one row for each kind of parameter
        packer(data, loader), whose plan() says which tokens make a row: see Spans
        make_model() or make_model(kernels) -> Model, its parameters not yet filled
        muon_step(state) and adam_step(state): update weights and moments in place
        schedule(step, progress) -> Schedule: learning rate, momentum and decay of a step
        quantize(row, w, ...) -> int8 (R, C) and fp16 scales (R,) of a matrix (R, C)

    Golf is the shortest example."""
    # the run
    run_id: str = option("", "folder under logs/; empty: preset, seed and time")
    seed: int = option(1337, "seed of initial values and samples", 0, 2**31 - 1)
    device: str = option("auto", "where to train; auto: one GPU per rank if there are any",
                         choices=("auto", "cpu", "cuda"))
    dtype: str = option("auto", "activations; auto: bfloat16 where it is fast",
                        choices=("auto", "float32", "bfloat16"))
    compile: bool = option(True, "torch.compile the step; 0: eager")
    eval_from: str = option("", "artifact, final_model.pt or checkpoint.pt to score instead of training")
    resume: str = option("", "run_id to resume")
    dry_run: bool = option(False, "check constants, data and ranks, and train nothing")
    save_every: int = optional(0, "steps between checkpoints; 0: none")
    save_every_seconds: float = optional(0.0, "training seconds between checkpoints; 0: none", 0, 1e7)
    train_log_every: int = optional(0, "steps between train_loss lines after step 10; 0: every 100")
    val_loss_every: int = optional(0, "steps between validations, from step 0 on; 0: at the end only")
    # data and batch
    tokenizer_path: str = option("", "SentencePiece model; empty: the one that the dataset names")
    other_data: bool = option(False, "resume, or score a model, on other data than it was trained on")
    vocab_size: int = optional(0, "tokens; 0: the tokenizer's", 0, 65_536, model=True)
    bos_id: int = optional(0, "token that begins a document; 0: the dataset's", 0, 65_535, model=True)
    device_batch_size: int = optional(0, "rows per rank and micro-step; 0: on a GPU an eighth of a step's")
    val_tokens: int = optional(0, "how many tokens of val are scored, from its start; 0: all")
    val_batch_size: int = option(65_536, "tokens per evaluation step and rank", 1)
    eval_context: int = optional(0, "tokens per row in evaluation; 0: train_seq_len")
    eval_stride: int = optional(0, "targets scored per row; 0: eval_context")
    # optimizer and length
    grad_clip_norm: float = optional(0.0, "largest global gradient norm; 0: no clipping", 0, 1e6)
    max_wallclock_seconds: float = optional(0.0, "training seconds; 0: no cap", 0, 1e7)
    warmup_steps: int = optional(2, "steps on dummy tokens before the clock, at least one a stage", 0, 1000)
    # artifact
    score_artifact: bool = option(True, "pack an artifact and score it; 0: score the trained weights")
    artifact_bytes_limit: int = optional(0, "limit of artifact plus script in bytes; 0: none")
    artifact_keep: int = option(65_536, "tensors of at most this many numbers are stored as fp16")

    codec: ClassVar[Any] = "int8+zlib"  # of the artifact; the first four letters name its file
    aliases: ClassVar[dict[str, str]] = {}  # {constant: a second name that the game's public script gives it}

    @classmethod
    def of(cls: Any, given: dict[str, Any]) -> Any:
        """The recipe with given {constant: value} in place of its own."""
        return cls(**given)

    def check(self: Any) -> None:
        """Raises Refused for constants that are out of range or contradict each other."""
        check_ranges(self)
        require(re.fullmatch(r"(\w[\w.,=+-]*)?", self.run_id), f"run_id={self.run_id!r} names a folder")
        T = self.train_seq_len
        for stage in self.stages():
            require(stage.batch_tokens % T == 0 and stage.batch_tokens % stage.row_tokens == 0,
                    f"a step of {stage.batch_tokens} tokens is not a whole number of rows of "
                    f"{stage.row_tokens}: change train_batch_tokens")
        require(self.model_dim % (2 * self.num_heads) == 0,
                f"model_dim={self.model_dim} must be a multiple of twice num_heads={self.num_heads}")
        kv_heads = vars(self).get("num_kv_heads") or self.num_heads
        require(self.num_heads % kv_heads == 0,
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={kv_heads}")
        require(self.eval_stride <= (self.eval_context or T), "eval_stride exceeds a row")

    def optimizer(self) -> "type[Optimizer]":
        """The class of the optimizer."""
        return Optimizer

    def progress(self, step: int, seconds: float) -> float:
        """The part of the run that is done, 0 to 1: by steps or by seconds of the wall-clock cap, whichever
        is further."""
        by_seconds = seconds / (self.max_wallclock_seconds or math.inf)
        return min(1.0, max(step / total_steps(self), by_seconds))

    def evaluations(self, step: int | None = None) -> list[Callable]:
        """Further scores that are due at this step; None: at the end. Each is a function of (model, cfg,
        data, team, log) that returns its part of the result."""
        return []

    def choose_kernels(self, on_gpu: bool, log: Logger) -> "Kernels":
        """The fastest kernels on this device. Raises Refused if fp8 was asked for and is not possible."""
        return Kernels()

    def pack(self, run: "Run") -> bytes:
        """The artifact of run.model."""
        return zlib.compress(pack_artifact(run.model), 9)

    @staticmethod
    def decompress(packed: bytes) -> bytes:
        """Undoes the compression of pack(). Raises zlib.error for what another recipe packed."""
        return zlib.decompress(packed)

class Parser(argparse.ArgumentParser):
    """Refuses in one sentence and without the usage."""
    def error(self, message: str) -> NoReturn:
        raise Refused(message)

def load_config(env: Mapping[str, str], argv: Sequence[str] = ()) -> Config:
    """Config of the preset that --preset or PRESET names: recipe < environment < flag. Raises Refused."""
    return preset_config(*typed(env, argv))

def typed(env: Mapping[str, str], argv: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """(preset, {constant: value} as given in the environment or by a flag). Raises Refused."""
    first = Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default=env.get("PRESET", next(iter(RECIPES))))
    preset = first.parse_known_args(argv)[0].preset
    recipe = recipe_of(preset)
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    argument_default=argparse.SUPPRESS, allow_abbrev=False)
    constants = {f.name: f for f in fields(recipe)}
    constants |= {alias: constants[name] for name, alias in recipe.aliases.items()}
    given = {}
    for name, f in constants.items():
        if name.upper() in env:
            given[f.name] = parse_value(f, env[name.upper()])
        switch: dict = dict(nargs="?", const="1") if isinstance(f.default, bool) else {}
        parser.add_argument(f"--{name.replace('_', '-')}", dest=f.name, metavar="",
                            type=partial(parse_value, f), help=described(f), **switch)
    return preset, given | vars(parser.parse_args(argv))

def described(f: Field) -> str:
    """A constant's line in --help."""
    limits = f.metadata
    by_type = {bool: "0 or 1", str: "text"}
    numbers = f"{limits['least']:g} to {limits['most']:g}"
    allowed = " | ".join(limits["choices"]) or by_type.get(type(f.default), numbers)
    return f"{limits['doc']} ({allowed}) [{show(f.default)}]".replace("%", "%%")

def recipe_of(preset: str) -> Any:
    """A preset's class. Raises Refused."""
    require(preset in RECIPES, f"preset={preset!r} is none of {', '.join(RECIPES)}")
    return RECIPES[preset]

def preset_config(preset: str, given: Mapping[str, object] | None = None) -> Config:
    """Config of a preset. given {name: value} replaces its values. Raises Refused."""
    cfg = recipe_of(preset).of(dict(given or {}))
    cfg.check()
    return cfg

def parse_value(f: Field, text: str) -> object:
    """Text -> a value of the constant's type. Raises Refused."""
    default: Any = f.default
    try:
        if isinstance(default, tuple):
            number = f.metadata["of"] or type(default[0])
            return tuple(map(number, text.split(","))) if text else ()
        if isinstance(default, bool):
            return {"0": False, "1": True, "false": False, "true": True}[text.lower()]
        if text == "-1" and f.metadata["off"]:  # as on nanochat's command lines
            return type(default)(0)
        return type(default)(text)
    except (KeyError, ValueError):
        raise Refused(f"{f.name}={text!r} must be written like {show(default) or '1,2'}") from None

def show(value: object) -> str:
    """A constant as one types it, in one line; only the last part of an absolute path."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    text = str(int(value)) if isinstance(value, bool) else str(value)
    return Path(text).name if os.path.isabs(text) else text

def overrides(cfg: Any) -> dict[str, list[str]]:
    """{name: [text of the preset's value, text of the value in force]} where the two differ."""
    preset = vars(preset_config(cfg.preset))
    return {name: [show(preset[name]), show(value)] for name, value in vars(cfg).items()
            if value != preset[name]}

def check_ranges(cfg: Config) -> None:
    """Raises Refused for a value of the wrong type, out of range or none of the choices."""
    for f in fields(cfg):
        value = getattr(cfg, f.name)
        limits = f.metadata
        require(type(value) is type(f.default), f"{f.name}={value!r} is no {type(f.default).__name__}")
        require(not limits["choices"] or value in limits["choices"],
                f"{f.name}={value!r} must be one of {', '.join(limits['choices'])}")
        for number in value if isinstance(value, tuple) else [value]:
            require(isinstance(number, str) or limits["least"] <= number <= limits["most"],
                    f"{f.name}={show(value)} must be from {limits['least']:g} to {limits['most']:g}")

# ---------- 4 techniques
def rms_norm(x: Tensor) -> Tensor:
    """x (..., C) divided by its root mean square over C."""
    return F.rms_norm(x, (x.size(-1),), eps=2**-23)

def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., C) @ weight (n, C).T in the dtype of x."""
    return F.linear(x, weight.to(x.dtype))

def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: None = None,
                     kernel: Kernel = F.scaled_dot_product_attention) -> Tensor:
    """Each token sees itself and all tokens before it. q (B, H, T, D), already scaled, k and v (B, KV, T, D)
    -> (B, H, T, D). mask: unused; all functions of Kernels.attention take one. kernel: a function
    with the arguments of scaled_dot_product_attention."""
    return kernel(q, k, v, attn_mask=None, is_causal=True, scale=1.0, enable_gqa=k.size(1) < q.size(1))

def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
              kernel: Kernel = F.scaled_dot_product_attention) -> Tensor:
    """causal_attention() with a mask from window_mask(), or None. Its cost grows with the mask's size."""
    if mask is None:
        return causal_attention(q, k, v, None, kernel)
    B, H, T, _ = q.shape
    kernel = partial(kernel, scale=1.0, enable_gqa=k.size(1) < H)
    blocks = mask.size(1)
    width = mask.size(2)
    if blocks == 1:
        return kernel(q, k, v, attn_mask=mask, is_causal=False)
    # blocks of `width` queries (B, H, blocks, width, D), each with its own keys and those of the block before
    padding = (0, 0, 0, blocks * width - T)
    q = F.pad(q, padding).unflatten(2, (blocks, width))
    k = F.pad(k, padding).unflatten(2, (blocks, width))
    v = F.pad(v, padding).unflatten(2, (blocks, width))
    k = torch.cat((F.pad(k, (0, 0, 0, 0, 1, -1)), k), 3)
    v = torch.cat((F.pad(v, (0, 0, 0, 0, 1, -1)), v), 3)
    # the blocks become rows of the batch
    q = q.transpose(1, 2).flatten(0, 1)
    k = k.transpose(1, 2).flatten(0, 1)
    v = v.transpose(1, 2).flatten(0, 1)
    mask = mask.expand(B, -1, -1, -1).flatten(0, 1)[:, None]
    y = kernel(q, k, v, attn_mask=mask, is_causal=False)
    return y.unflatten(0, (B, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :T]

def window_mask(window: int | Tensor, T: int, documents: Tensor | None, device: torch.device,
                width: int = 0) -> Tensor | None:
    """Each token sees itself and those of the `window` tokens before it that are in its document.
    documents (B, T): the number of each token's document, or None. Returns None if every token sees all
    earlier ones, else bool (B or 1, n, W, K): n blocks of W queries by the K keys up to the block's end.
    width: W, at least the window; 0: the window."""
    window = int(window)
    if window >= T - 1 and documents is None:
        return None
    width = width or window
    if 2 * width >= T:
        width = T
    blocks = math.ceil(T / width)
    keys = min(T, 2 * width)
    arange = partial(torch.arange, device=device, dtype=torch.int32)  # CPUs compare int32 faster than int64
    start = arange(0, blocks * width, width).view(1, blocks, 1, 1)
    query = start + arange(width)[:, None]
    key = start + arange(width - keys, width)
    mask = (key >= 0) & (key <= query) & (key >= query - window)
    if documents is not None:
        documents = F.pad(documents, (keys - width, blocks * width - T), value=-1)
        own = documents[:, keys - width:].view(-1, blocks, width, 1)
        mask = mask & (own == documents.unfold(1, keys, width)[:, :, None])
    return mask

def mlp(x: Tensor, fc: Tensor, proj: Tensor, linear: Kernel = linear, slope: float = 0.0) -> Tensor:
    """ReLU^2 MLP (Primer, arXiv:2109.08668), with a slope for negative activations. x (B, T, C), fc (hidden,
    C), proj (C, hidden) -> (B, T, C)."""
    return linear(F.leaky_relu(linear(x, fc), slope).square(), proj)

def softcap(logits: Tensor, cap: float, shift: float = 0.0, width: float = 0.0) -> Tensor:
    """cap * tanh((logits + shift) / width), any shape. Width 0 means cap; cap 0 changes nothing."""
    if not cap:
        return logits
    # not + shift: Inductor may turn an added float into a bias tensor on the CPU, which GPUs refuse
    return cap * torch.tanh((logits - -shift) / (width or cap))

def lm_loss(x: Tensor, head: Tensor, targets: Tensor, cap: Cap, weights: Tensor | None = None) -> Tensor:
    """Mean cross-entropy in nats. x (B, T, C), head (V, C), targets (B, T). cap: the arguments of
    softcap() after logits. With weights (n,) each token has n targets (B, T, n), -1 meaning none, and its
    loss is their weighted sum."""
    logits = softcap(linear(x, head).float(), *cap)
    if weights is None:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    losses = logits.logsumexp(-1, keepdim=True) - logits.gather(-1, targets.clamp(min=0))
    return (losses * (targets >= 0) * weights).sum() / targets[..., 0].numel()

def plain_window(window: int, T: int, device: torch.device, by_document: bool = False) -> int:
    """The window as window_mask() takes it: tokens before the query. by_document: attention stays within
    documents."""
    return window

@dataclass(frozen=True)
class Kernels:
    """Functions of a model that have faster versions; these are the readable ones."""
    linear: Kernel = linear  # in the blocks
    loss: Callable = lm_loss
    attention: Callable = causal_attention

@dataclass(frozen=True)
class WindowKernels(Kernels):
    """Those of a model whose attention has windows or stays within documents."""
    attention: Callable = attention
    window: Callable = plain_window
    window_mask: Callable = window_mask

def kernel_windows(cfg: Any, kinds: Sequence[str], stage: "Stage | None", T: int, device: torch.device,
                   window: Callable[..., int | Tensor], by_document: bool = False) -> dict:
    """{L or S: its window in rows of T tokens} for the kinds that layers have. window: from WindowKernels."""
    return {kind: window(size, T, device, by_document)
            for kind, size in cfg.windows(stage, T).items() if kind in kinds}

def layer_masks(windows: dict[str, int | Tensor], tokens: Tensor, documents: Tensor | None,
                kernel: Kernel) -> dict[str, Mask]:
    """{L or S: mask for tokens (B, T)}, one for each window from kernel_windows(). documents (B, T): the
    number of each token's document, or None. kernel: WindowKernels.window_mask."""
    return {kind: kernel(window, tokens.size(1), documents, tokens.device)
            for kind, window in windows.items()}

def rope_spectrum(head_dim: int, base: float, fraction: float = 1.0) -> Tensor:
    """-> (head_dim / 2,): radians per token of each pair of channels, from 1 down to almost 1 / base
    (RoFormer, arXiv:2104.09864); base 0: no rotation. Only the first `fraction` of the pairs rotate (partial
    rotary)."""
    pairs = head_dim // 2
    rotating = int(fraction * head_dim / 2) if base else 0
    return F.pad(base ** -(torch.arange(rotating) / rotating), (0, pairs - rotating))

def rope_tables(T: int, frequencies: Tensor, device: torch.device,
                dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin for rotate(), each (T, 1, head_dim / 2)."""
    angles = torch.arange(T, device=device)[:, None, None] * frequencies.to(device)
    return angles.cos().to(dtype), angles.sin().to(dtype)

def key_offset(k: Tensor) -> Tensor:
    """Takes the second half of each key's channels from the token before, so that a query that matches a
    token finds what came after it (modded-nanogpt#49: -1.4 s). k (B, T, ..., D): heads. With rotate(), pass
    k.unflatten(-1, (2, -1)), so that both channels of a pair move together. The first token of a row keeps
    its own."""
    own, moved = k.tensor_split(2, -1)
    moved = torch.cat((moved[:, :1], moved[:, :-1]), 1)
    return torch.cat((own, moved), -1)

def texts_of_tokens(cfg: Any, tokenizer: Any) -> list[bytes]:
    """The bytes of each token, b"" for none. Without a SentencePiece tokenizer they come from cfg.vocab_path,
    GPT-2's vocabulary. Raises Refused."""
    if tokenizer:
        texts = [piece_bytes(tokenizer, piece) for piece in range(tokenizer.vocab_size())]
    else:
        texts = gpt2_texts(cfg.vocab_path)
    return texts[:cfg.vocab_size] + [b""] * (cfg.vocab_size - len(texts))

def piece_bytes(tokenizer: Any, piece: int) -> bytes:
    """The bytes of a SentencePiece piece; b"" if it stands for no text."""
    text = tokenizer.id_to_piece(piece)
    if tokenizer.is_byte(piece):
        return bytes([int(text[3:5], 16)])
    if tokenizer.is_control(piece) or tokenizer.is_unknown(piece) or tokenizer.is_unused(piece):
        return b""
    return text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

@cache
def gpt2_texts(path: str) -> list[bytes]:
    """The bytes of each token of GPT-2's vocabulary. Its file is {characters: token} with a character for
    each byte: itself for a byte that prints, one from 256 on for the others. Raises Refused."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    byte_of = {chr(byte): byte for byte in printed}
    byte_of |= {chr(256 + n): byte for n, byte in enumerate(others)}
    why = f"prefix_weight needs GPT-2's vocabulary at {path!r}: get it with `./run.sh data gpt2-vocab`"
    try:
        tokens = json.loads(Path(path).read_bytes())
        texts = [b""] * len(tokens)
        for characters, token in tokens.items():
            if characters != "<|endoftext|>":
                texts[token] = bytes([byte_of[character] for character in characters])
    except FileNotFoundError:
        raise Refused(f"{why}, or set PREFIX_WEIGHT=0") from None
    except Exception as error:  # a damaged file may raise anything
        raise Refused(f"{why} ({brief(error)})") from None
    return texts

def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """(B, T, H * head_dim) -> (B, T, H, head_dim)"""
    return x.unflatten(-1, (-1, head_dim))

def project_heads(x: Tensor, head_dim: int, product: Kernel, *matrices: Tensor) -> Sequence[Tensor]:
    """x (B, T, C) times each matrix (H * head_dim, C) -> heads (B, T, H, head_dim). In bf16 all matrices are
    joined into one product, which is faster on a GPU; in fp32 and fp8 each has its own."""
    if product is linear and x.dtype == torch.bfloat16:
        # heads first, then the split: the backward pass gets heads and copies nothing
        heads = split_heads(linear(x, torch.cat(matrices)), head_dim)
        return heads.split([len(matrix) // head_dim for matrix in matrices], -2)
    return [split_heads(product(x, matrix), head_dim) for matrix in matrices]

def attend_heads(q: Tensor, k: Tensor, v: Tensor, mask: Any, kernel: Kernel) -> Tensor:
    """Attention on heads as the projections give them: q (B, T, H, D), already scaled, k and v (B, T, KV, D)
    -> (B, T, H, D). kernel: Kernels.attention, which knows what the mask is."""
    return kernel(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask).transpose(1, 2)

def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE that pairs channel i of each head with channel i + D / 2. x (B, T, H, D), cos and sin
    (T, 1, D / 2)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)

def per_layer(values: Sequence, num_layers: int) -> list:
    """A per-layer list, repeated or cut to the number of layers."""
    return [values[i % len(values)] for i in range(num_layers)]

def parameter(*shape: int, on: object = True) -> nn.Parameter | None:
    """A parameter, not initialized yet; None if the model has no use for it."""
    return nn.Parameter(torch.empty(shape)) if on else None

def gate(x: Tensor, weight: Tensor) -> Tensor:
    """Gates from 0 to 1 (B, T, n), computed from the first channels of x (B, T, C). weight (n, channels)."""
    return torch.sigmoid(linear(x[..., :weight.size(1)], weight))

def smear(x: Tensor, weight: Tensor, gate_weight: Tensor) -> Tensor:
    """Adds to each token a gated part of the one before it (modded-nanogpt#130: -1.1 s). x (B, T, C), weight
    (1,) or (1, 1), gate_weight (1, channels)."""
    before = F.pad(x, (0, 0, 1, -1))
    return x + weight.to(x.dtype) * gate(x, gate_weight) * before

class Model(nn.Module):
    """The interface of a recipe's model. Subclasses also set cfg (the recipe's constants), embed and head
    ((V, C); the same parameter if tied) and blocks."""
    trained_on: dict | None = None  # what identifies its data, see check_same_data(); None: unknown
    # context(T, device, dtype=torch.float32, stage=None): what the forward pass needs besides tokens (B, T)
    # and weights, with activations of this dtype, in training or scoring as in this stage; None: in final
    # scores. hidden(tokens, context): last activations, normalized (B, T, C).
    context: Callable
    hidden: Callable

    def use(self, kernels: Kernels) -> None:
        """From now on the model computes with these kernels."""
        for module in (self, *self.blocks):
            module.kernels = kernels

    def compiled_hidden(self) -> Callable:
        """hidden() for scoring, compiled."""
        return partial(compile_once(type(self).hidden), self)

    def update_context(self, context: Any, progress: float) -> None:
        """Writes what changes at every step into a context, without waiting for the device."""

    def cap(self) -> tuple:
        """cap, shift and width of softcap()."""
        return self.cfg.logit_softcap, 0.0, 0.0

    def logits(self, x: Tensor) -> Tensor:
        """Last activations (..., C) -> logits in fp32 (..., V)."""
        return softcap(linear(x, self.head).float(), *self.cap())

    def forward(self, tokens: Tensor, targets: Tensor, context: Any) -> Tensor:
        """tokens and targets (B, T) -> mean training loss in nats."""
        return self.kernels.loss(self.hidden(tokens, context), self.head, targets, self.cap())

    def candidates(self, tokens: Tensor, targets: Tensor) -> list[Tensor]:
        """Further inputs of a training step on tokens and targets (B, T), each with B rows."""
        return []

    def build(self, run: "Run", fresh: bool) -> bool:
        """Builds state (if fresh, initial values too) from training tokens, on the clock; says if it did."""
        return False

    def state(self) -> dict[str, Tensor]:
        """{name: tensor on the CPU} of that state, as files hold it."""
        return {}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Takes its state out of the tensors of a file. Raises Refused."""

def bigram_ids(tokens: Tensor, rows: int) -> Tensor:
    """The row of the hashed bigram table (B, T) for each token (B, T) and the one before. The first token of
    a row gets the last row of the table, and the second one hashes that number as its previous token, as in
    the public record."""
    seen = torch.cat((torch.full_like(tokens[:, :1], rows - 1), tokens[:, 1:]), 1).int()
    pairs = (36313 * seen[:, 1:] ^ 27191 * seen[:, :-1]) % max(1, rows - 1)
    return torch.cat((seen[:, :1], pairs), 1)

class Row(NamedTuple):
    """A row of a recipe's parameter table: how a kind of parameter starts, learns and is stored."""
    kind: str  # the last word of its name in the model
    group: str  # kinds of one group may share buffers in the optimizer; the plan counts by group
    optimizer: str  # muon (whole matrices) or adam
    lr: float  # at an LR factor of 1
    decay: float = 0.0  # weight decay, times the learning rate; Muon's also times Schedule.decay
    decay_with_lr: bool = False  # Adam's decay is multiplied by the LR factor, too
    beta1: float = 0.0  # Adam
    beta2: float = 0.0  # Adam
    eps: float = 0.0  # Adam
    second: str = "long"  # NorMuon's second moment: one per row or column; long: per row unless it is wide
    every: int = 1  # steps whose gradients add up to one update
    # uniform: +-scale / sqrt(columns); positive: 0 to scale; normal: std scale; orthogonal; constant: scale
    init: str = "constant"
    scale: float = 0.0
    change: float = 0.0  # the last layer's scale minus the first's; linear in between
    precision: str = "int8"  # in the artifact: int8 rows (small tensors fp16), fp16 or fp32
    levels: float = 127.0  # int8: the largest rounded number
    step: float = 0.0  # int8: rounding step / rms of a row; 0: the step is the row's maximum / levels
    unit_rows: int = 0  # Muon orthogonalizes this many rows at a time; 0: the whole matrix

@dataclass(frozen=True)
class Stage:
    """A row of the table of stages; recipes add columns of their own."""
    start: float  # fraction of cfg.iterations at which it begins
    batch_tokens: int  # tokens per step over all ranks
    row_tokens: int  # tokens per row
    lr: float = 1.0  # factor on learning rates before the warmdown
    doc_len: int = 0  # maximum document length in tokens; 0: that of all stages
    loss_factor: float = 1.0  # on a step's mean loss before its gradients are taken
    begins: float = 0.0  # start as a fraction of the whole run, extension included
    first_step: int = 0  # its first step, unless the clock brings it forward

@dataclass(frozen=True)
class WindowStage(Stage):
    """A stage of a recipe with windows."""
    window: int = 0  # how many earlier tokens a token sees in long layers; 0: train_seq_len

def kind_of(name: str) -> str:
    """The kind of a parameter: blocks.3.query -> query, value_embeds.0 -> value_embeds."""
    return [part for part in name.split(".") if not part.isdigit()][-1]

def init_parameters(model: Model, seed: int) -> dict[str, Tensor]:
    """{name: fp32}, drawn on the CPU whatever the device. Raises KeyError for a parameter without a row."""
    generator = torch.Generator().manual_seed(seed)
    table = model.cfg.parameter_table()
    values = {}
    for name, p in model.named_parameters():
        row = table[kind_of(name)]
        require(row.init in INITS, f"init={row.init} of {name} is none of {', '.join(INITS)}")
        layer = int(next(filter(str.isdigit, name.split(".")), 0))  # blocks.3.query: 3; embed: 0
        scale = row.scale + row.change * layer / max(1, model.cfg.num_layers - 1)
        values[name] = INITS[row.init](torch.zeros(p.shape), scale, generator)
    return values

# {Row.init: a function that fills a parameter, given its scale and a generator}
INITS: dict[str, Callable[[Tensor, float, torch.Generator], Tensor]] = dict(
    constant=lambda w, scale, _: w.fill_(scale),
    normal=lambda w, scale, generator: w.normal_(0, scale, generator=generator),
    uniform=lambda w, scale, generator: w.uniform_(
        -scale * w.size(-1) ** -0.5, scale * w.size(-1) ** -0.5, generator=generator),
    positive=lambda w, scale, generator: w.uniform_(0, scale, generator=generator),
    orthogonal=lambda w, scale, generator: nn.init.orthogonal_(w, scale, generator))

# ---------- 5 optimizer
# (a, b, c) of each iteration x <- a x + (b gram + c gram gram) x with gram = x x'; the last row repeats
NEWTON_SCHULZ = [(3.4445, -4.7750, 2.0315)]  # Muon: kellerjordan.github.io/posts/muon
POLAR_EXPRESS = [  # arXiv:2505.16932
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)]

def orthogonalize(g: Tensor, steps: int, table: list = NEWTON_SCHULZ, dtype: torch.dtype = torch.float32,
                  safety_factor: float = 1.0, eps: float = 1e-7) -> Tensor:
    """g (N, R, C) -> nearly semi-orthogonal matrices: singular values from 0.6 to 1.3. table: the iterations.
    dtype: of the matrix products. g is first divided by (safety_factor * its norm + eps)."""
    x = g.to(dtype)
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / (safety_factor * x.norm(dim=(-2, -1), keepdim=True) + eps)
    for i in range(steps):
        a, b, c = table[min(i, len(table) - 1)]
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    if tall:
        x = x.mT
    return x.to(g.dtype)

def polar_express(g: Tensor, steps: int, dtype: torch.dtype = torch.float32,
                  safety_factor: float = 1.02) -> Tensor:
    """orthogonalize() by Polar Express, with singular values from 0.7 to 1.2. safety_factor: bf16 may round a
    norm below the largest singular value."""
    return orthogonalize(g, steps, POLAR_EXPRESS, dtype, safety_factor, eps=1e-6)

def normuon_scale(update: Tensor, v: Tensor, beta2: float) -> Tensor:
    """NorMuon (arXiv:2510.05491): divides each row of update (N, R, C), or each column, by its running rms,
    then restores the norm of each matrix. v (N, R, 1) or (N, 1, C), the mean squares, changes."""
    by_row = v.shape[1:] == (update.size(1), 1)
    v.lerp_(update.square().mean(-1 if by_row else -2, keepdim=True), 1 - beta2)
    scaled = update * v.clamp_min(1e-10).rsqrt()
    before = update.norm(dim=(-2, -1), keepdim=True)
    after = scaled.norm(dim=(-2, -1), keepdim=True)
    return scaled * (before / after.clamp_min(1e-10))

def by_kind(rows: list[Row]) -> dict[str, Row]:
    """{kind: its row of the parameter table}"""
    return {row.kind: row for row in rows}

class UpdateState(NamedTuple):
    """What an update rule gets of a bank: tensors, of which it changes all but grad, and hyperparameters,
    0-dim where they change from step to step, so that one compiled graph serves all steps."""
    p: Tensor  # weights, fp32; Muon: matrices (N, R, C), Adam: any one shape
    grad: Tensor  # to be multiplied by grad_scale
    first: Tensor  # Muon's momentum buffer, Adam's first moment
    second: Tensor  # NorMuon's mean squares (N, R, 1) or (N, 1, C), Adam's second moment
    grad_scale: Tensor
    lr: Tensor
    decay: Tensor
    momentum: Tensor  # Muon
    step: Tensor  # Adam: counts from 1
    dtype: torch.dtype = torch.float32  # Muon: of the matrix products
    beta1: float = 0.0  # Adam
    beta2: float = 0.0  # Adam
    eps: float = 0.0  # Adam

def nesterov_of_mean(state: UpdateState) -> Tensor:
    """Nesterov momentum (N, R, C); the first moment, a running mean of gradients, changes in place."""
    grad = state.grad.to(state.p.dtype) * state.grad_scale
    state.first.lerp_(grad, 1 - state.momentum)
    return grad.lerp(state.first, state.momentum)

def cautious_decay(p: Tensor, update: Tensor, lr: Tensor, decay: Tensor) -> None:
    """Weight decay, only where the update shrinks the weight as well (arXiv:2411.16085). p (N, R, C) changes
    in place."""
    p.sub_(lr * decay * p * (p * update >= 0))

def adam_moments(state: UpdateState) -> None:
    """Takes the gradient into both moments, which are running means."""
    grad = state.grad.to(state.p.dtype) * state.grad_scale
    state.first.lerp_(grad, 1 - state.beta1)
    state.second.lerp_(grad.square(), 1 - state.beta2)

def adam_update(state: UpdateState) -> Tensor:
    """Adam's update (arXiv:1412.6980) before the learning rate. As in torch, eps is added to the root of the
    corrected second moment. The moments change in place."""
    adam_moments(state)
    root = (state.second / (1 - state.beta2**state.step)).sqrt() + state.eps
    return state.first / (1 - state.beta1**state.step) / root

class Bank:
    """All parameters with one update rule, as views of one flat buffer, so that one collective serves them
    all. The buffer is a sequence of units (Muon: a matrix or a block of its rows; Adam: 64 numbers), and
    each rank updates an equal share of the units.

    data: the weights the model reads; every rank holds all of them. grad: the sum of the gradients since the
    last update. master: this rank's share of the weights in fp32; it shares data's memory if data is fp32.
    my_data, my_grad: this rank's share. state: first and second moments, then what an optimizer adds. fresh:
    there are no gradients yet, and the next ones overwrite grad."""
    def __init__(self, row: Row, names: Sequence[str], params: Sequence[Tensor], rank: int, world_size: int,
                 dtype: torch.dtype):
        self.row = row
        self.names = names
        self.rank = rank
        self.world_size = world_size
        self.fresh = True
        self.unit: tuple = (64,)
        if row.optimizer == "muon":
            self.unit = (row.unit_rows or len(params[0]), params[0].size(1))
        size = math.prod(self.unit)
        self.shapes = [p.shape for p in params]
        self.places = np.cumsum([0] + [math.ceil(p.numel() / size) * size for p in params])
        self.units = int(self.places[-1]) // size  # without the padding of shares
        total = math.ceil(self.units / world_size) * world_size * size
        self.data = torch.zeros(total, dtype=dtype, device=params[0].device)
        self.grad = torch.zeros_like(self.data)
        self.my_data = self.share(self.data)
        self.my_grad = torch.zeros_like(self.my_data)
        self.master = self.my_data if dtype == torch.float32 else self.my_data.float()
        self.load(dict(zip(names, params)))
        for p, view in zip(params, self.views(self.data)):
            p.data = view
        second = self.master  # shape of Adam's second moment; NorMuon's has one number per row or column
        if row.optimizer == "muon":
            wide = self.unit[0] < self.unit[1]
            by_row = row.second == "rows" or (row.second == "long" and not wide)
            second = second[:, :, :1] if by_row else second[:, :1]
        self.state = [torch.zeros_like(self.master), torch.zeros_like(second)]

    def share(self, flat: Tensor) -> Tensor:
        """(total, ...) -> this rank's (units, *unit)"""
        return flat.view(self.world_size, -1, *self.unit)[self.rank]

    def whole(self, mine: Tensor) -> Tensor:
        """All units of master or of a state, on the CPU, from all ranks, which call it together."""
        whole = torch.cat([mine] * self.world_size)
        if self.world_size > 1:
            all_gather(whole.view(-1), mine.contiguous().view(-1))
        return whole.cpu()[:self.units]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part, in its shape."""
        return [flat[low:low + shape.numel()].view(shape) for low, shape in zip(self.places, self.shapes)]

    @torch.no_grad()
    def load(self, values: dict[str, Tensor]) -> None:
        """Sets the parameters to {name: fp32}."""
        whole = torch.zeros_like(self.data, dtype=torch.float32)
        for name, view in zip(self.names, self.views(whole)):
            view.copy_(values[name])
        self.fresh = True  # the gradients so far belong to other values
        self.data.copy_(whole)
        self.master.copy_(self.share(whole))

    def add(self, gradients: Sequence[Tensor], micro_steps: int) -> None:
        """Adds the gradients of one of the micro-steps of a step."""
        if self.fresh:
            # Summed in fp32, or in the dtype of data where that is as exact: ranks exchange the sum in that
            # dtype, so two gradients are rounded once either way. Embeddings' sums are never in fp32, which
            # would triple their traffic.
            exact = micro_steps * self.row.every <= (2 if self.world_size > 1 else 1)
            narrow = exact or self.row.group in ("embed", "value_embed")
            dtype = self.data.dtype if narrow else torch.float32
            if self.grad.dtype != dtype:
                self.grad = torch.zeros_like(self.data, dtype=dtype)
            torch._foreach_copy_(self.views(self.grad), gradients)
        else:
            torch._foreach_add_(self.views(self.grad), gradients)
        self.fresh = False

    def reduce(self) -> "dist.Work | None":
        """Starts to sum this rank's share of the gradients over ranks, in the dtype of data."""
        if self.world_size == 1:
            self.my_grad = self.share(self.grad)
            return None
        return reduce_scatter(self.my_grad.view(-1), self.grad.to(self.data.dtype), async_op=True)

class Optimizer:
    """Muon for matrices and Adam for everything else, as the parameter table says. The ranks share the work
    and the state. dtype: of the weights that the model reads from now on. muon_dtype: of Muon's matrix
    products; None: dtype."""
    def __init__(self, model: Model, cfg: Any, rank: int = 0, world_size: int = 1,
                 dtype: torch.dtype = torch.float32, muon_dtype: torch.dtype | None = None):
        self.cfg = cfg
        self.world_size = world_size
        self.muon_dtype = muon_dtype or dtype
        self.adam_step = cfg.adam_step
        self.muon_step = cfg.muon_step
        self.step_count = 0
        table = cfg.parameter_table()
        known = dict(model.named_parameters())
        alike = {}  # {(update rule, shape if Muon): [(row, name, parameter)]}
        for name, p in known.items():
            require(kind_of(name) in table, f"{name} has no row in parameter_table()")
            row = table[kind_of(name)]
            shape = p.shape if row.optimizer == "muon" else None
            rule = (row.group, row.optimizer, row.lr, row.decay, row.decay_with_lr, row.beta1, row.beta2,
                    row.eps, row.second, row.unit_rows, row.every)
            alike.setdefault((rule, shape), []).append((row, name, p))
        self.banks = []
        for members in alike.values():
            rows, names, params = zip(*members)
            self.banks.append(Bank(rows[0], names, params, rank, world_size, dtype))
        self.params = [known[name] for bank in self.banks for name in bank.names]

    def backward(self, loss: Tensor, micro_steps: int = 1) -> None:
        """Adds the gradients of the loss of one of the micro-steps of a step to those before."""
        self.add(torch.autograd.grad(loss, self.params, materialize_grads=True), micro_steps)

    def add(self, gradients: Sequence[Tensor], micro_steps: int) -> None:
        """backward() for gradients that are already computed: one per parameter, in the order of params."""
        left = iter(gradients)
        for bank in self.banks:
            bank.add([next(left) for _ in bank.names], micro_steps)

    @torch.no_grad()
    def step(self, schedule: "Schedule") -> None:
        """Updates the weights. A bank whose row has every=n is updated at every n-th step only, with the sum
        of its gradients since the last update."""
        self.step_count += 1
        self.update([bank for bank in self.banks if self.step_count % bank.row.every == 0], schedule)

    def update(self, banks: list[Bank], schedule: "Schedule") -> None:
        """Averages the gradients of these banks over ranks and updates their weights."""
        # 1. All reductions start at once.
        jobs = [bank.reduce() for bank in banks]
        grad_scale = 1 / self.world_size  # the jobs sum over ranks; this gives the mean
        # 2. Clipping waits for all of them.
        if self.cfg.grad_clip_norm and banks:
            for job in filter(None, jobs):
                job.wait()
            squares = sum([bank.my_grad.float().square().sum() for bank in banks])
            norm = grad_scale * all_reduce(squares).sqrt()
            grad_scale = grad_scale * (self.cfg.grad_clip_norm / (norm + 1e-6)).clamp(max=1)
        # 3. Each bank is updated once its gradients arrive; its all-gather overlaps the next bank's update.
        gathers = []
        for bank, job in zip(banks, jobs):
            if job:
                job.wait()
            rule = self.muon_step if bank.row.optimizer == "muon" else self.adam_step
            rule(self.update_state(bank, grad_scale, schedule))
            if bank.master is not bank.my_data:
                bank.my_data.copy_(bank.master)
            bank.fresh = True
            if job:
                gathers.append(all_gather(bank.data, bank.my_data.view(-1), async_op=True))
        for gather in gathers:
            gather.wait()

    def update_state(self, bank: Bank, grad_scale: float | Tensor, schedule: "Schedule") -> UpdateState:
        """What the rule of this bank gets. A tall matrix gets a higher learning rate, so its rows move as far
        as those of a square one. Adam counts the updates of the bank as steps."""
        row = bank.row
        lr = row.lr * schedule.lr
        decay = row.decay
        if row.optimizer == "muon":
            R, C = bank.unit
            lr *= max(1, R / C) ** 0.5
            decay *= schedule.decay
        elif row.decay_with_lr:
            decay *= schedule.lr
        updates = float(self.step_count // row.every)
        numbers = [torch.as_tensor(n) for n in (grad_scale, lr, decay, schedule.momentum, updates)]
        return UpdateState(bank.master, bank.my_grad, *bank.state[:2], *numbers, dtype=self.muon_dtype,
                           beta1=row.beta1, beta2=row.beta2, eps=row.eps)

    def begin(self, values: dict[str, Tensor]) -> None:
        """Starts anew from these weights, {name: fp32}."""
        self.step_count = 0
        for bank in self.banks:
            bank.load(values)
            torch._foreach_zero_(bank.state[:2])

    def end(self) -> None:
        """Training ends; the weights that are scored may differ from the last step's."""

    def weights(self) -> dict[str, Tensor]:
        """{name: fp32 on the CPU} of all parameters. All ranks call it together."""
        found = {}
        for bank in self.banks:
            found |= zip(bank.names, bank.views(bank.whole(bank.master).flatten()))
        return found

    def state(self) -> dict[str, Tensor]:
        """{name: tensor on the CPU} of all moments, for a checkpoint. All ranks call it together."""
        return {f"{bank.names[0]} {i}": bank.whole(mine)
                for bank in self.banks for i, mine in enumerate(bank.state)}

    @torch.no_grad()
    def restore(self, weights: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        """Loads what weights() and state() returned. The number of ranks may have changed since."""
        for bank in self.banks:
            bank.load(weights)
            for i, mine in enumerate(bank.state):
                whole = mine.new_zeros((self.world_size * len(mine), *mine.shape[1:]))
                whole[:bank.units] = state[f"{bank.names[0]} {i}"]
                mine.copy_(whole.view(self.world_size, *mine.shape)[bank.rank])

# torch 2.13 renamed these collectives
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

def all_reduce(tensor: Tensor, op: str = "SUM") -> Tensor:
    """The SUM or MAX over the ranks, in place; also returns it."""
    if dist.is_initialized():
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
    return tensor

# ---------- 6 schedules
class Schedule(NamedTuple):
    """What the schedule gives a step."""
    lr: float  # factor on every learning rate
    momentum: float  # Muon's
    decay: float = 1.0  # factor on the weight decay of matrices
    tied: bool = False  # lm_head and the embedding are one matrix

def stage_rows(cfg: Any, rows: list, **columns: str) -> list:
    """A recipe's stages, with cfg's overrides applied column by column. columns: {extra column: the constant
    that overrides it}. If there is one row and an override has n entries, the row is split into n stages of
    equal length. Raises Refused."""
    columns = dict(start="stage_starts", batch_tokens="batch_schedule", row_tokens="seq_schedule") | columns
    unit = dict(batch_tokens=cfg.train_batch_tokens, row_tokens=cfg.train_seq_len)
    for column, constant in columns.items():
        values = getattr(cfg, constant)
        if not values:
            continue
        if len(rows) == 1 and len(values) > 1:
            rows = [replace(rows[0], start=i / len(values)) for i in range(len(values))]
        require(len(values) in (1, len(rows)),
                f"{constant}={show(values)}: {cfg.preset} has {len(rows)} stages")
        rows = [replace(row, **{column: unit.get(column, 1) * value})
                for row, value in zip(rows, per_layer(values, len(rows)))]
    stages = []
    for row in rows:
        step = row.start * cfg.iterations
        first_step = math.ceil(step - 1e-6)
        ranks = vars(cfg).get("loss_sum_ranks", 0)
        stages.append(replace(row, begins=step / total_steps(cfg), first_step=first_step,
                              loss_factor=row.batch_tokens / ranks if ranks else 1.0))
    return stages

def total_steps(cfg: Any) -> int:
    return cfg.iterations + vars(cfg).get("extension_iterations", 0)

def stage_at(cfg: Any, progress: float) -> Stage:
    """The stage at this progress, 0 to 1, through the whole run."""
    return [stage for stage in cfg.stages() if stage.begins <= progress + 1e-9][-1]

def scheduled_progress(cfg: Any, progress: float) -> float:
    """Progress through the whole run -> through cfg.iterations; it stays at 1 in the extension."""
    return min(1.0, progress * total_steps(cfg) / cfg.iterations)

def warmup_done(step: int, steps: int) -> float:
    """How much of a warmup of this many steps is done, 0 to 1; 1 if there is none (steps 0)."""
    return min(1.0, step / steps) if steps else 1.0

def momentum_at(cfg: Any, warmup: float) -> float:
    """Muon's momentum when this much of its warmup is done, 0 to 1."""
    return (cfg.muon_momentum_warmup_start
            + (cfg.muon_momentum - cfg.muon_momentum_warmup_start) * warmup)

def warmdown_done(progress: float, part: float) -> float:
    """How much of the warmdown, the last `part` of the run, is done, 0 to 1; 0 if there is none (part 0)."""
    return max(0.0, 1 - (1 - progress) / part) if part else 0.0

# ---------- 7 data
class Shard(NamedTuple):
    """A .bin file of tokens."""
    path: Path
    size: int  # in tokens
    groups: list | None = None  # documents in each row group of the parquet file that it was made from

def open_shard(path: Path) -> np.memmap:
    """A .bin shard -> uint16 (n,). Raises Refused.

    Format: 256 little-endian int32 (magic 20240520, version 1, token count, zeros), then uint16 tokens."""
    size = (os.path.getsize(path) - 1024) // 2
    head = np.fromfile(path, "<i4", 3).tolist()
    require(size > 0 and head == [20240520, 1, size], f"{path.name} is damaged: ./run.sh data")
    return np.memmap(path, "<u2", "r", 1024)

class Data(NamedTuple):
    """A dataset, as opened. ./run.sh checks more of what is in it."""
    train: list[Shard]
    val: np.ndarray  # tokens of the whole split, uint16
    tokenizer: Any  # SentencePieceProcessor, or None
    vocab_size: int
    bos: int  # token that begins a document
    val_bytes: int | None  # UTF-8 bytes of the val text; None: no val_bpb
    about: dict  # for result.json; checkpoints and models keep it, too

def decoded_bytes(sp: Any, tokens: np.ndarray, bos: int) -> int:
    """UTF-8 bytes of a text, by definition: each document is decoded. tokens (n,)."""
    documents = np.split(tokens, np.flatnonzero(tokens == bos))
    return sum([len(sp.decode(document.tolist()).encode()) for document in documents])

def file_sha256(path: Path | str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()

def open_data(cfg: Any, log: Logger = print) -> Data:
    """Opens the dataset at cfg.data_path: shards *_train_*.bin and *_val_*.bin, and manifest.json if there is
    one. Raises Refused."""
    folder = Path(cfg.data_path)
    manifest = {}
    tokenizer = None
    try:
        if (folder / "manifest.json").exists():
            manifest = json.loads((folder / "manifest.json").read_bytes())
        groups = {file["path"]: file.get("row_groups") for file in manifest.get("files", [])}
        files = {split: sorted(folder.glob(f"[!.]*_{split}_*[0-9].bin")) for split in ("train", "val")}
        require(files["train"] and files["val"],
                f"no shards at {show(cfg.data_path)!r}: ./run.sh data; ./run.sh {cfg.preset} gets its own")
        train = [Shard(path, len(open_shard(path)), groups.get(path.name)) for path in files["train"]]
        val = np.concatenate([open_shard(path) for path in files["val"]])
        sha256 = {path.name: file_sha256(path) for path in files["val"]}
        made_by = manifest.get("tokenizer") or {}
        path = cfg.tokenizer_path
        if not path and "path" in made_by:
            path = folder / made_by["path"]
        if path:
            import sentencepiece
            tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(path))
            sha256[Path(path).name] = file_sha256(path)
    except ImportError as error:
        raise Refused(f"{brief(error)}: ./run.sh setup") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise Refused(f"manifest.json, a shard or the tokenizer of {folder.name} is damaged or missing "
                      f"({brief(error)}): ./run.sh data") from None
    known = tokenizer.vocab_size() if tokenizer else made_by.get("vocab_size", 0)
    bos = cfg.bos_id or (tokenizer.bos_id() if tokenizer else made_by.get("bos_id", 50256))
    vocab_size = cfg.vocab_size or known
    stated = made_by.get("vocab_size", known)
    require(stated == known, f"{folder.name} was made with {stated} tokens, but the tokenizer has {known}: "
            "set TOKENIZER_PATH")
    require(vocab_size, f"{folder.name} does not say how many tokens there are: set VOCAB_SIZE")
    require(known <= vocab_size < (known or vocab_size) + 64,
            f"vocab_size={vocab_size} does not fit {folder.name} with {known} tokens: set at most 63 more")
    require(cfg.val_tokens <= len(val) > 1,
            f"val_tokens={cfg.val_tokens}, but {folder.name} has {len(val)} val tokens")
    require(val.max() < vocab_size, f"val holds token {val.max()}, but vocab_size is {vocab_size}")
    # a look at each shard; ./run.sh looks at the whole
    sampled = hashlib.sha256()
    for shard in train:
        sample = open_shard(shard.path)[np.linspace(0, shard.size - 1, 2048).astype(int)]
        require(sample.max() < vocab_size,
                f"shard {shard.path.name} holds token {sample.max()}, but vocab_size is {vocab_size}")
        require(2 * np.bincount(sample).max() <= len(sample),
                f"more than half of shard {shard.path.name} is one token, so it is damaged: ./run.sh data")
        sampled.update(sample.tobytes())
    val_bytes = manifest.get("val_bytes")
    if tokenizer and not val_bytes:
        require(val.max() < known and tokenizer.unk_id() not in val,
                f"val of {folder.name} has text unknown to its tokenizer: manifest.json must state val_bytes")
        val_bytes = decoded_bytes(tokenizer, val, bos)
    about = dict(
        name=folder.name, fingerprint=manifest.get("text_fingerprint"), val_bytes=val_bytes, sha256=sha256,
        train_tokens=sum([shard.size for shard in train]), val_tokens=len(val), sampled=sampled.hexdigest())
    log(f"data: {folder.name} train tokens:{about['train_tokens']} in {len(train)} shards, "
        f"val tokens:{len(val)}",
        f"data: val_bytes:{val_bytes}", f"data: text fingerprint {about['fingerprint']}")
    return Data(train, val, tokenizer, vocab_size, bos, val_bytes, about)

# {what Data.about says of a dataset: what differs if this does}
DATA_PARTS = dict(sha256="val tokens or tokenizer", fingerprint="text", train_tokens="number of train tokens",
                  sampled="train tokens")

def check_same_data(file: str, told: dict, cfg: Config, data: Data) -> None:
    """Raises Refused if a checkpoint or model was trained on other data, unless other_data says that it may.
    A model is scored on val alone."""
    compared = ("sha256",) if cfg.eval_from else DATA_PARTS
    other = [DATA_PARTS[name] for name in compared if told.get(name) != data.about[name]]
    require(not other or cfg.other_data,
            f"{file} was trained on {told.get('name')}, from which {data.about['name']} differs in its "
            f"{', '.join(other)}: set DATA_PATH (and TOKENIZER_PATH) to what it was trained on, or "
            "OTHER_DATA=1 to use this anyway")

class Packer(ABC):
    """How training rows are made of the stream of all shards. A position says where the next step begins and
    is the whole state."""
    any_length = False  # may rows be longer in later stages?

    def __init__(self, cfg: Config, data: Data, loader: "Loader"):
        self.loader = loader
        self.team = loader.team
        self.held_tokens = loader.total  # training tokens in a pass over the data

    @abstractmethod
    def plan(self, position: int, n: int, T: int, doc_len: int = 0) -> tuple[list, int]:
        """Plans a step of n rows, each of T tokens and a last target -> (each row's pieces [(start, length)],
        the position after the step). The rows are those of all ranks or only of this one. doc_len:
        Stage.doc_len."""

class Rows(Packer):
    """The stream cut every T tokens; with shuffle, in one random order. The position counts rows."""
    def __init__(self, cfg: Any, data: Data, loader: "Loader"):
        super().__init__(cfg, data, loader)
        self.order = np.random.default_rng(0).permutation(loader.rows) if cfg.shuffle else range(loader.rows)

    def plan(self, position: int, n: int, T: int, doc_len: int = 0) -> tuple[list, int]:
        places = range(position, position + n)
        return [[(int(self.order[place % len(self.order)]) * T, T + 1)] for place in places], position + n

class DocumentIndex:
    """Start, length and shard of every document, in reading order. longest: tokens at which they are cut; 0:
    none is."""
    def __init__(self, data: Data, loader: "Loader", longest: int = 0):
        self.longest = longest or loader.total
        starts = []
        lengths = []
        for shard, low, end in zip(loader.shards, loader.edges, loader.edges[1:]):
            here = low + np.flatnonzero(open_shard(shard.path) == data.bos)
            starts.append(here)
            lengths.append(np.diff(here, append=end))
        self.shard_of = np.repeat(np.arange(len(starts)), [len(here) for here in starts])
        self.starts = np.concatenate(starts)
        self.lengths = np.concatenate(lengths).clip(max=self.longest)
        require(len(self.starts), f"no token {data.bos} begins a document in the train split")

class RankRows(Packer):
    """Rows that each rank makes on its own, in order. The position counts rows of all ranks."""
    def __init__(self, cfg: Config, data: Data, loader: "Loader"):
        super().__init__(cfg, data, loader)
        self.source: Iterator[list] | None = None
        self.made = []
        self.first_made = 0

    @abstractmethod
    def make_rows(self, T: int) -> Iterator[list]:
        """Yields the pieces of this rank's rows, endlessly."""

    def plan(self, position: int, n: int, T: int, doc_len: int = 0) -> tuple[list, int]:
        first = position // self.team.world_size  # counted in this rank's rows
        share = n // self.team.world_size
        if self.source is None or first < self.first_made:
            self.source = self.make_rows(T)
            self.made = []
            self.first_made = 0
        while self.first_made + len(self.made) < first + share:
            self.made.append(next(self.source))
        self.made = self.made[first - self.first_made:]
        self.first_made = first
        return self.made[:share], position + n

class Loader:
    """Batches of training rows. The recipe's packer plans the rows of a step, which the ranks share; a thread
    prefetches one step, which is discarded when the stage changes. `position` is the whole state."""
    def __init__(self, cfg: Any, data: Data, team: "Team", log: Logger = print):
        self.T = cfg.train_seq_len
        self.team = team
        self.position = 0
        self.most_tokens = math.inf  # that training may read
        self.ahead = {}  # {what a step asks for: the job that reads it}
        self.thread = ThreadPoolExecutor(1)
        self.vocab_size = data.vocab_size
        self.shards = data.train
        self.tokens = [open_shard(shard.path) for shard in data.train]
        self.edges = np.cumsum([0, *[shard.size for shard in data.train]])
        self.total = int(self.edges[-1])
        self.rows = (self.total - 1) // self.T
        require(self.rows > 0, f"the train tokens do not fill a row of {self.T}")
        self.packer = cfg.packer(data, self)

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens of the endless stream, int64."""
        start %= self.total
        i = int(np.searchsorted(self.edges, start, "right")) - 1
        first = start - self.edges[i]
        part = self.tokens[i][first:first + count].astype(np.int64)
        require(part.max() < self.vocab_size, f"shard {self.shards[i].path.name} holds token {part.max()}, "
                f"but vocab_size is {self.vocab_size}")
        if len(part) == count:
            return part
        return np.concatenate([part, self.read(start + len(part), count - len(part))])

    def fetch(self, position: int, n: int, T: int, doc_len: int = 0) -> tuple[Tensor, int]:
        """(this rank's rows of a step of n, (rows, T + 1), and the position after the step)"""
        rows, after = self.packer.plan(position, n, T, doc_len)
        share = n // self.team.world_size
        if len(rows) > share:
            rows = rows[self.team.rank * share:(self.team.rank + 1) * share]
        tokens = [np.concatenate([self.read(*piece) for piece in row])[:T + 1] for row in rows]
        return torch.from_numpy(np.stack(tokens)), after

    def next(self, batch_tokens: int, seq_multiple: int = 1, doc_len: int = 0) -> tuple[Tensor, Tensor]:
        """Tokens and targets of this rank's share of a step, each int64 (rows, T), on the device."""
        T = self.T * seq_multiple
        key = self.position, batch_tokens // T, T, doc_len
        job = self.ahead.pop(key, None) or self.thread.submit(self.fetch, *key)
        rows, self.position = job.result()
        after = self.position, *key[1:]
        self.ahead = {after: self.thread.submit(self.fetch, *after)}
        if self.team.on_gpu:  # pinned, or the host would wait for the device
            rows = rows.pin_memory().to(self.team.device, non_blocking=True)
        # clone(): contiguous() would keep the strides of a single row, which costs one more compilation
        tokens = rows[:, :-1].clone(memory_format=torch.contiguous_format)
        targets = rows[:, 1:].clone(memory_format=torch.contiguous_format)
        return tokens, targets

# ---------- 8 evaluation
def log_probs(model: Model, tokens: Tensor, context: Any = None) -> Tensor:
    """tokens int64 (B, T), any B and T -> log-probabilities of the next token, fp32 (B, T, V). context: by
    default that of evaluation, with bf16 activations on a GPU. All scores take the same two steps, the second
    one for the targets only."""
    dtype = torch.bfloat16 if tokens.is_cuda else torch.float32
    context = context or model.context(tokens.size(1), tokens.device, dtype)
    return F.log_softmax(model.logits(model.hidden(tokens, context)), -1)

MAX_SCORES = 1 << 26  # log-probabilities at a time: 256 MiB, uncompiled a few times that
CPU_SCORE_TOKENS = 2048  # tokens at a time on a CPU, as its cache holds them

class Score(NamedTuple):
    val_loss: float  # nats per target
    val_bpb: float | None  # bits per byte; None: a part of val, or bytes unknown
    val_bpb_without_bos: float | None  # the same without the nats of BOS targets

@cache
def compile_once(function: Callable[..., Any], dynamic: bool = False) -> Callable:
    return torch.compile(function, dynamic=dynamic, fullgraph=True)

def score_targets(model: Model, x: Tensor, targets: Tensor) -> Tensor:
    """Last activations (n, C), targets (n,) -> their nats in fp64 (n,)."""
    scores = F.log_softmax(model.logits(x), -1)  # as in log_probs
    return -scores.gather(-1, targets[:, None])[:, 0].double()

def evaluate(model: Model, cfg: Config, data: Data, team: "Team", stage: Stage | None = None) -> Score:
    """Score of the first val_tokens targets, with sums in fp64. stage: whose windows and loops apply; None:
    those of evaluation."""
    tokens = data.val[:1 + (cfg.val_tokens or len(data.val))]
    nats = plain_nats(model, cfg, tokens, team, stage)
    sums = torch.from_numpy(np.array([nats.sum(), nats[tokens != data.bos].sum()]))
    total, without_bos = all_reduce(sums).tolist()
    val_loss = total / (len(tokens) - 1)
    if not data.val_bytes or len(tokens) < len(data.val):
        return Score(val_loss, None, None)
    return Score(val_loss, total / math.log(2) / data.val_bytes, without_bos / math.log(2) / data.val_bytes)

def loss_name(cfg: Any) -> str:
    """val_loss for all of val or as much as the preset scores; else val_loss_partial."""
    return "val_loss" if cfg.val_tokens in (0, preset_config(cfg.preset).val_tokens) else "val_loss_partial"

def score_text(cfg: Config, score: Score, digits: int = 4) -> str:
    """`val_loss:3.2781 val_bpb:1.0123`"""
    bpb = "" if score.val_bpb is None else f" val_bpb:{score.val_bpb:.{digits}f}"
    return f"{loss_name(cfg)}:{score.val_loss:.{digits}f}{bpb}"

def evaluation_rows(cfg: Any, count: int, stride: int) -> list[tuple]:
    """How `count` tokens are scored: [(low, first, last)], rows that read tokens low to last and score tokens
    first to last. The first row scores all its targets, the others `stride` each (0: eval_context)."""
    context = cfg.eval_context or cfg.train_seq_len
    stride = min(stride or context, context)
    rows = [(0, 1, min(context, count - 1))]
    for end in range(context + stride, count + stride - 1, stride):
        rows.append((end - context, end - stride + 1, min(end, count - 1)))
    return rows

@torch.no_grad()
def plain_nats(model: Model, cfg: Config, tokens: np.ndarray, team: "Team", stage: Stage | None = None,
               rows: list[tuple] | None = None) -> np.ndarray:
    """Nats of each token given those before it in rows of eval_context tokens, fp64 (len(tokens),). A row
    scores its last eval_stride tokens, the first row all; the first token and other ranks' targets have 0.
    stage: the one whose windows and loops apply; None: those of evaluation. rows: some evaluation_rows()."""
    nats = np.zeros(len(tokens))
    rows = rows or evaluation_rows(cfg, len(tokens), cfg.eval_stride)
    T = max([last - low for low, _, last in rows])
    batch = cfg.val_batch_size if team.on_gpu else min(cfg.val_batch_size, CPU_SCORE_TOKENS)
    size = max(1, batch // T)
    mine = rows[team.rank::team.world_size]
    context = model.context(T, team.device, team.dtype if team.on_gpu else torch.float32, stage)
    hidden = model.hidden
    score = score_targets
    if team.on_gpu and cfg.compile:
        hidden = model.compiled_hidden()
        score = compile_once(score_targets, dynamic=True)
    for n in range(0, len(mine), size):
        here = mine[n:n + size]
        ids = np.zeros((size, T + 1), np.int64)  # padded, so that all batches have one shape
        scored = np.zeros((size, T), bool)  # scored[i, t]: is ids[i, t + 1] a target?
        for i, (low, first, last) in enumerate(here):
            ids[i, :last + 1 - low] = tokens[low:last + 1]
            scored[i, first - 1 - low:last - low] = True
        places = torch.from_numpy(np.flatnonzero(scored)).to(team.device)
        targets = torch.from_numpy(ids[:, 1:][scored]).to(team.device)
        x = hidden(torch.from_numpy(ids[:, :-1].copy()).to(team.device), context).flatten(0, 1)[places]
        at_once = MAX_SCORES // cfg.vocab_size
        found = [score(model, *part) for part in zip(x.split(at_once), targets.split(at_once))]
        where = np.concatenate([np.arange(first, last + 1) for _, first, last in here])
        nats[where] = torch.cat(found).cpu()
    return nats

def sliding_score(model: Model, cfg: Any, data: Data, team: "Team", log: Logger) -> dict:
    """A score of the same text under a name of its own: rows of eval_context tokens that start eval_sliding
    apart each score as many. Returns {val_loss_sliding, val_bpb_sliding, eval_sliding_ms}, or nothing if the
    loss is not finite."""
    log("evaluating sliding")
    start = time.perf_counter()
    loss, bpb, _ = evaluate(model, replace(cfg, eval_stride=cfg.eval_sliding), data, team)
    if not math.isfinite(loss):
        log(f"final_sliding: the loss is {loss}, so there is no score")
        return {}
    ms = round(1e3 * (time.perf_counter() - start))
    name = f"{loss_name(cfg)}_sliding"
    bits = "" if bpb is None else f" val_bpb_sliding:{bpb:.8f}"
    log(f"final_sliding {name}:{loss:.8f}{bits} eval_time:{ms}ms")
    return {name: loss, "val_bpb_sliding": bpb, "eval_sliding_ms": ms}

# ---------- 9 artifact
CLIP_PERCENTILE = 99.99984  # percentile of a row's magnitudes; larger ones are clipped
MIN_SCALE = 2**-24  # the smallest fp16 number

def decompress(packed: bytes) -> bytes:
    """Undoes the compression of whichever recipe packed it. Raises ValueError and others."""
    for recipe in RECIPES.values():
        with suppress(zlib.error):
            return recipe.decompress(packed)
    raise ValueError("cut short, or compressed in another way")

def quantize_by_maximum(w: Tensor, levels: float, floor: float) -> tuple[Tensor, Tensor]:
    """w (R, C) -> int8 (R, C), clipped to +-levels, and fp16 scales (R,). A row's scale is its
    CLIP_PERCENTILE of magnitudes / levels, but at least floor."""
    clip = torch.from_numpy(np.percentile(w.abs().double(), CLIP_PERCENTILE, 1)).float()
    scale = (clip / levels).clamp_min(max(floor, MIN_SCALE))
    return (w / scale[:, None]).round().clamp(-levels, levels).to(torch.int8), scale.half()

def packed_tensors(w: Tensor, row: Row, cfg: Any, numbers: int, **options: Any) -> dict[str, Tensor]:
    """What the artifact stores for w, {suffix of its name: tensor}. By row.precision: int8 rows and their
    scales (a small parameter: fp16), fp16 or fp32. w: a parameter or some of its rows. numbers: how many the
    whole parameter has. options: of cfg.quantize()."""
    if row.precision == "fp32":
        return {"": w}
    if row.precision == "fp16" or numbers <= cfg.artifact_keep:
        return {"": w.half()}
    rows, scales = cfg.quantize(row, w, **options)
    return {".int8": rows, ".scale": scales}

def pack_artifact(model: Model, options: Callable[[str], dict] = lambda name: {}) -> bytes:
    """The artifact before its compression: packed_tensors() of each parameter, the state and the constants of
    the model. options: of cfg.quantize(), for a parameter's name. Raises Refused for weights that are too
    large."""
    table = model.cfg.parameter_table()
    tensors = model.state()
    for name, p in model.named_parameters():
        w = p.detach().cpu()
        parts = packed_tensors(w, table[kind_of(name)], model.cfg, w.numel(), **options(name))
        tensors |= {name + end: part for end, part in parts.items()}
    require(all([t.isfinite().all() for t in tensors.values()]),
            "the weights outgrew the artifact's fp16: lower the learning rates")
    tensors = dict(sorted(tensors.items(), key=lambda pair: pair[1].element_size()))  # compresses better
    buffer = io.BytesIO()  # given a path, torch would write the file's name into it
    torch.save(to_payload(model, tensors), buffer)
    return buffer.getvalue()

def to_payload(model: Model, tensors: dict[str, Tensor]) -> dict:
    """The dictionary that load_model reads. Tensors are copied: saving a view would write its whole
    buffer."""
    # asdict() copies tuples. torch.save writes one that two constants share only once, but after a resume
    # they no longer share it, so the same model would have other bytes.
    constants = asdict(model.cfg)
    shape = {f.name: constants[f.name] for f in fields(model.cfg) if f.metadata["model"]}
    return dict(shape=shape, data=model.trained_on,
                tensors={name: t.detach().to("cpu", copy=True) for name, t in tensors.items()})

def read_file(path: Path) -> dict:
    """What torch.save wrote, with its checksums checked, which torch does not do. Raises Refused."""
    require(os.path.exists(path), f"there is no {show(str(path))}")
    file: Any = path
    try:
        if not zipfile.is_zipfile(path):
            file = io.BytesIO(decompress(path.read_bytes()))
        require(not zipfile.ZipFile(file).testzip(), "a checksum is wrong", ValueError)
        if file is not path:
            file.seek(0)
        return torch.load(file, "cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        raise Refused(f"{path.name} is damaged or not from this trainer ({brief(error)})") from None

def load_model(path: Path | str, device: torch.device | str = "cpu",
               base: Any = None) -> tuple[Model, Config]:
    """An artifact, final_model.pt or checkpoint.pt -> the model, ready for log_probs, and its Config: base,
    or the defaults, except for what the file says. Raises Refused."""
    payload = read_file(Path(path))
    require({"shape", "tensors"} <= {*payload}, f"{Path(path).name} holds no model")
    shape = payload["shape"]
    tensors = payload["tensors"]
    recipe = recipe_of(shape["preset"])
    base = base if isinstance(base, recipe) else recipe()
    unknown = {*shape} - {f.name for f in fields(recipe)}
    require(not unknown, f"{Path(path).name}: {shape['preset']} here has no {', '.join(unknown)}")
    # one row per step, because the file's row length may not divide any other batch
    cfg = replace(base, **shape, train_batch_tokens=shape["train_seq_len"])
    model = cfg.make_model()
    model.trained_on = payload.get("data")
    for name, p in model.named_parameters():
        scale = tensors.pop(f"{name}.scale", None)
        w = tensors.pop(name if scale is None else f"{name}.int8", torch.empty(0))
        require(w.shape == p.shape, f"{Path(path).name} has no {name} of shape {(*p.shape,)}")
        p.data.copy_(w if scale is None else w.float() * scale[:, None])
    model.to(device).load_state(tensors)
    require(not tensors, f"{Path(path).name} has unknown tensors {list(tensors)[:1]}")
    return model.eval(), cfg

def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Puts what write(file) writes at path, all of it or nothing. Raises OSError."""
    temporary = Path(f"{path}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)  # a full disk needs room for the log
        raise
    os.replace(temporary, path)

# ---------- 10 checkpoints
# A checkpoint is a dictionary written by torch.save: config and code_sha256; shape, tensors and data as
# load_model reads them; state (the optimizer's, of all ranks); progress (TrainState and where loader
# and generator stand). Every rank reads the file, so several nodes need a shared folder.
# Constants that may change on RESUME; all others stay as the run began.
RESUME_FREE = ("resume", "run_id", "dry_run", "device", "data_path", "tokenizer_path", "other_data",
               "core_bundle", "save_every", "save_every_seconds", "device_batch_size", "val_batch_size")

def save_checkpoint(run: "Run") -> None:
    """Writes logs/<run_id>/checkpoint.pt, off the clock. All ranks call it together. Raises Refused for what
    is not finite."""
    state = run.state
    payload = to_payload(run.model, run.optimizer.weights() | run.model.state())
    payload["state"] = run.optimizer.state()
    if run.team.rank == 0:
        for name, tensor in (payload["tensors"] | payload["state"]).items():
            require(tensor.isfinite().all(),
                    f"{name} is not finite at step {state.step}: lower the learning rates")
        payload |= dict(config=asdict(run.asked), code_sha256=script_sha256())
        payload["progress"] = asdict(state) | dict(
            position=run.loader.position, updates=run.optimizer.step_count, started=run.started,
            random=torch.get_rng_state())
        write_atomically(run.folder / "checkpoint.pt", partial(torch.save, payload))
        run.log(kind="checkpoint", step=state.step)
    run.saved = replace(state)

def read_checkpoint(given: dict[str, Any]) -> tuple[Any, dict]:
    """(Config of the run that given["resume"] names, its checkpoint). given: what was typed with RESUME; it
    may only repeat what the run began with, but for RESUME_FREE. Raises Refused."""
    run_id = given["resume"]
    path = Path("logs", run_id, "checkpoint.pt")
    require(os.path.exists(path), f"resume={run_id!r}: there is no {path}")
    checkpoint = read_file(path)
    require(checkpoint["code_sha256"] == script_sha256(),
            f"train_gpt.py is not what {run_id} began with: put {path.parent}/train_gpt.py here")
    saved = recipe_of(checkpoint["config"]["preset"])(**checkpoint["config"])
    for name, value in given.items():
        there = getattr(saved, name, "nothing")
        require(name in RESUME_FREE or value == there,
                f"{name}={show(value)}, but {run_id} began with {show(there)}")
    free = {name: value for name, value in given.items() if name in RESUME_FREE and hasattr(saved, name)}
    return replace(saved, **free | dict(run_id=run_id)), checkpoint

def restore_run(run: "Run", checkpoint: dict[str, Any]) -> None:
    """Continues a run, on any number of ranks."""
    progress = checkpoint["progress"]
    run.optimizer.restore(checkpoint["tensors"], checkpoint["state"])
    run.optimizer.step_count = progress["updates"]
    run.started = progress["started"]
    run.loader.position = progress["position"]
    torch.set_rng_state(progress["random"])
    run.state = TrainState(**{f.name: progress[f.name] for f in fields(TrainState)})
    run.saved = replace(run.state)
    run.log(f"resume: from step {run.state.step} at train_time:{run.state.seconds * 1e3:.0f}ms",
            kind="resume", step=run.state.step, seconds=run.state.seconds)

# ---------- 11 fast kernels
# Each has the signature of what it replaces and is compared with it by a test. docs/first_gpu.md says which
# have run on a GPU; gains on a CPU are in docs/log.md. A recipe's choose_kernels() decides, before compiling.
FLEX_BLOCK = 128  # tokens that flex attention computes or skips together
FLEX_OPTIONS: dict = {}  # its kernel_options, such as USE_TMA=True: ./run.sh gpu-report times them
E4M3_MAX = 448  # the largest number of float8_e4m3fn
MOST_FUSED_CAP = 50  # logits up to this softcap need no maximum subtracted before exp
# Smaller vocabularies take the loss that Inductor generates: for golf's 49,152 x 1,024 logits on an H100 it
# took 0.92 ms, and loss_kernel 1.15. No other vocabulary was timed both ways.
LEAST_KERNEL_VOCABULARY = 2048
LOSS_BLOCK = 2048  # logits of a row that loss_kernel handles at a time

def to_fp8(x: Tensor, scale: float | Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x -> (fp8, the scale to multiply it by, 0-dim). scale: a number or 0-dim; None: max |x| fills the
    range."""
    x = x.float()
    top = torch.finfo(dtype).max
    if scale is None:
        scale = (x.abs().amax() / top).clamp(1e-30)
    elif not torch.is_tensor(scale):
        scale = x.new_full((), scale)
    return (x / scale).clamp(-top, top).to(dtype), scale  # a cast without clamp can give inf or nan

def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, fast: bool = False) -> Tensor:
    """a (M, K) and b (N, K), fp8 -> (scale_a a) @ (scale_b b).T (M, N) in bf16. CUDA needs this layout; a CPU
    takes any. fast: less precise accumulation, for the forward pass."""
    assert not any([side % 16 for side in (*a.shape, *b.shape)]), "sides must be multiples of 16"
    a = a.contiguous()
    b = b.contiguous().t()
    # (1, 1): Inductor of torch 2.13 cannot compile a 0-dim view of a larger tensor
    scales = scale_a.view(1, 1), scale_b.view(1, 1)
    return torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)

def fp8_product(x: Tensor, weight: Tensor, scales: Scales) -> tuple[Tensor, tuple]:
    """x (N, K) @ weight (M, K).T in e4m3 -> (product (N, M), what fp8_gradients needs). scales: of x and
    weight, see to_fp8()."""
    x, scale_x = to_fp8(x, scales[0], torch.float8_e4m3fn)
    w, scale_w = to_fp8(weight, scales[1], torch.float8_e4m3fn)
    return scaled_mm(x, w, scale_x, scale_w, fast=True), (x, w, scale_x, scale_w)

def fp8_gradients(grad: Tensor, kept: Sequence, scale: float | None,
                  grad_t: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradients of x (N, K) and weight (M, K) by products with grad (N, M) in e5m2 (arXiv:2209.05433). grad
    may be in e5m2 already, divided by scale. grad_t: its transpose, where a copy is at hand."""
    x, w, scale_x, scale_w = kept
    if grad.dtype == torch.float8_e5m2:
        scale_g = scale_x.new_full((), scale)
    else:
        grad, scale_g = to_fp8(grad, scale, torch.float8_e5m2)
    if grad_t is None:
        grad_t = grad.t()
    return scaled_mm(grad, w.t(), scale_g, scale_w), scaled_mm(grad_t, x.t(), scale_g, scale_x)

# Largest magnitudes of lm_head's input, weight and gradient in fp8; the gradient is that of a summed loss. 0:
# the largest possible in a row with rms 1. None: the tensor's own.
HEAD_MOST = (0.0, 0.875, 1.0)

def head_scales(C: int, tokens: int, most: Scales) -> tuple:
    """The scales that Fp8Linear takes for such a `most`."""
    most_input, most_weight, most_gradient = [C**0.5 if number == 0 else number for number in most]
    scale_input = None if most_input is None else most_input / E4M3_MAX
    scale_weight = None if most_weight is None else most_weight / E4M3_MAX
    return scale_input, scale_weight, most_gradient / E4M3_MAX / tokens

def fp8_part(cfg: Any, on_gpu: bool, log: Logger | None = None, further: Sequence[int] = ()) -> str:
    """off, head or all, as cfg.fp8 says; auto-: only on a GPU that has fp8 and if the sizes allow it. log:
    gets a line where fp8 is asked for. further: sides of the recipe's own products. Raises Refused."""
    sides = cfg.vocab_size, cfg.train_seq_len, cfg.model_dim, cfg.model_dim // cfg.num_heads, *further
    capability = torch.cuda.get_device_capability() if on_gpu else None
    able = (capability is None or capability >= (8, 9)) and not any([n % 16 for n in sides])
    able = able and not torch.version.hip  # a ROCm build; AMD's fp8 has other formats
    able = able and 0 < cfg.logit_softcap <= MOST_FUSED_CAP  # as lm_head's loss in fp8 is fused
    part = cfg.fp8.removeprefix("auto-")
    if part != cfg.fp8 and not (able and on_gpu):
        part = "off"
    require(able or part == "off",
            f"fp8={part} needs compute capability 8.9, here {capability}, softcap to {MOST_FUSED_CAP}, and "
            f"multiples of 16: vocab_size, train_seq_len, model_dim, head_dim, others are {sides}")
    if log and cfg.fp8 != "off":
        log(f"fp8: {cfg.fp8} is {part} (it needs compute capability 8.9 and sides that are multiples of 16)")
    return part

def gpu_window_mask(window: int | Tensor, T: int, documents: Tensor | None,
                    device: torch.device) -> BlockMask | Tensor | None:
    """window_mask() in compiled steps on a GPU: a BlockMask for flex attention if window is a tensor. The key
    blocks that a query block sees follow one another, and so do those that it sees whole, so their lists need
    no sort, which would compile for minutes (pytorch#182060). Not measured."""
    if not (torch.is_tensor(window) and torch.compiler.is_compiling()):
        return window_mask(int(window), T, documents, device)
    row_length = T
    numbers = documents
    joined = documents is not None and len(documents) > 1
    if joined:  # into one row, as torch 2.11 reads the tables of several rows beyond their ends
        T *= len(documents)
        rows = torch.arange(len(documents), device=device)[:, None]
        numbers = (documents + T * rows).view(1, T)
    size = FLEX_BLOCK
    n = T // size
    block = torch.arange(n, device=device)
    # for each query block: the first key block that it sees, and the first one that it sees whole
    first = (block * size - window) // size
    first_whole = (block * size + 2 * size - 2 - window) // size
    # for each key block: the end of the query blocks that see it, and of those that see it whole
    end = (block * size + 2 * size - 1 + window) // size
    end_whole = (block * size + window + 1) // size
    if documents is not None:  # their numbers grow along a row, so a place is a count of smaller numbers
        low = numbers[:, ::size]
        high = numbers[:, size - 1::size]
        first = first.maximum((high[:, None] < low[..., None]).sum(-1))
        first_whole = first_whole.maximum((low[:, None] < high[..., None]).sum(-1))
        end = end.minimum((low[:, None] <= high[..., None]).sum(-1))
        end_whole = end_whole.minimum((high[:, None] <= low[..., None]).sum(-1))
    first = first.clamp(min=0).view(-1, 1, n, 1)
    first_whole = first_whole.clamp(min=0).minimum(block).view(-1, 1, n, 1)
    end = end.clamp(max=n).view(-1, 1, n, 1)
    end_whole = end_whole.clamp(max=n).maximum(block + 1).view(-1, 1, n, 1)
    own = block[:, None]
    i = block

    def mask_mod(b, h, query, key):
        near = (key <= query) & (query - key <= window)
        if documents is None:
            return near
        if not joined:
            return near & (documents[b, query] == documents[b, key])
        row = query // row_length
        other = key // row_length
        its = documents[row, query % row_length]
        return near & (row == other) & (its == documents[other, key % row_length])

    # (count, blocks) each: the key blocks that a query block sees partly, its own last, and those that it
    # sees whole; the query blocks that see a key block partly, its own first, and those that see it whole
    partly = first_whole - first
    seen_by = end - end_whole
    keys = (partly + 1, torch.where(i < partly, first + i, own))
    whole_keys = (own - first_whole, first_whole + i)
    queries = (seen_by + 1, torch.where(i > 0, end_whole + i - 1, own))
    later = torch.where(own + i < n, own + 1 + i, own)
    whole_queries = (end_whole - own - 1, later.expand_as(end_whole * i))
    tables = []
    for count, blocks in (keys, whole_keys, queries, whole_queries):
        tables += [count[..., 0].int(), blocks.clamp(max=n - 1).int()]
    return BlockMask((T, T), *tables, BLOCK_SIZE=(size, size), mask_mod=mask_mod)

def gpu_window(window: int, T: int, device: torch.device, by_document: bool = False) -> int | Tensor:
    """plain_window() for gpu_window_mask(): a 0-dim tensor for flex attention, so that one compiled step
    serves all sizes; a number for torch's own attention."""
    if T % FLEX_BLOCK or (window >= T - 1 and not by_document):
        return window
    return torch.tensor(window, device=device)

def join_rows(x: Tensor) -> Tensor:
    """(B, heads, T, D) -> (1, heads, B T, D), a view where x is a view of (B, T, heads, D)."""
    return x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]

def gpu_attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Tensor | None) -> Tensor:
    """attention() by flex attention for block masks, else by the kernel that torch chooses; with an explicit
    mask not by cuDNN's, which has given NaN gradients at some lengths. Not measured."""
    if isinstance(mask, BlockMask):
        B, _, T, _ = q.shape
        joined = mask.seq_lengths[0] == B * T and B > 1
        if joined:
            q = join_rows(q)
            k = join_rows(k)
            v = join_rows(v)
        y = flex_attention(q, k, v, block_mask=mask, scale=1.0, enable_gqa=k.size(1) < q.size(1),
                           kernel_options=FLEX_OPTIONS or None)
        if joined:
            y = y[0].unflatten(1, (B, T)).transpose(0, 1)
        return y
    if mask is None:
        return causal_attention(q, k, v)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return attention(q, k, v, mask)

def window_attention(on_gpu: bool, log: Logger) -> dict[str, Callable]:
    """{field of WindowKernels: the fastest function on this device} of attention."""
    if not on_gpu:
        return {}
    log("attention: flex; torch's where every token sees all tokens before it")
    return dict(window=gpu_window, window_mask=gpu_window_mask, attention=gpu_attention)

if triton:
    @triton.jit
    def loss_kernel(logits, targets, weights, losses, grad, V, K: tl.constexpr, top: tl.constexpr,
                    shift: tl.constexpr, scale: tl.constexpr, factor: tl.constexpr, BLOCK: tl.constexpr):
        """Handles one row of logits (N, V), capped to top * sigmoid((x + shift) * scale), so that exp needs
        no maximum. Writes its loss to losses (N,) and factor times its gradient to grad (N, V), which may be
        logits itself. targets (N, K), -1: none; weights (K,). Uses exp2 and log2, which the hardware has."""
        LOG2E: tl.constexpr = 1.4426950408889634
        slope: tl.constexpr = -scale * LOG2E
        offset: tl.constexpr = shift * slope
        most: tl.constexpr = top * LOG2E
        row = tl.program_id(0).to(tl.int64)
        logits = logits + row * V
        grad = grad + row * V
        k = tl.arange(0, triton.next_power_of_2(K))
        target = tl.load(targets + row * K + k, mask=k < K, other=-1)
        weight = tl.load(weights + k, mask=target >= 0, other=0.0)
        whole = tl.sum(weight)
        # read now: if grad is logits, the second loop overwrites them
        logit = tl.load(logits + target, mask=target >= 0, other=0.0).to(tl.float32)
        its = 1 / (1 + tl.exp2(logit * slope + offset))
        total = tl.zeros((BLOCK,), tl.float32)
        for low in range(0, V, BLOCK):
            i = low + tl.arange(0, BLOCK)
            x = tl.load(logits + i, mask=i < V, other=0.0).to(tl.float32)
            part = 1 / (1 + tl.exp2(x * slope + offset))
            total += tl.where(i < V, tl.exp2(most * part - most), 0.0)
        norm = tl.log2(tl.sum(total)) + most
        tl.store(losses + row, whole * norm / LOG2E - top * tl.sum(weight * its))
        slope_whole = factor * top * scale * whole
        for low in range(0, V, BLOCK):
            i = low + tl.arange(0, BLOCK)
            x = tl.load(logits + i, mask=i < V, other=0.0).to(tl.float32)
            part = 1 / (1 + tl.exp2(x * slope + offset))
            error_slope = slope_whole * tl.exp2(most * part - norm) * (part - part * part)
            tl.store(grad + i, error_slope.to(grad.dtype.element_ty), mask=i < V)
        tl.debug_barrier()  # other threads wrote gradients at the targets; the last store must come after
        wanted = tl.sum(tl.where(target[:, None] == target[None, :], weight[None, :], 0.0), 1)
        error = whole * tl.exp2(most * its - norm) - wanted
        its_slope = factor * top * scale * error * (its - its * its)
        tl.store(grad + target, its_slope.to(grad.dtype.element_ty), mask=target >= 0)

def kernel_losses(logits: Tensor, targets: Tensor, weights: Tensor, cap: Cap, factor: float,
                  dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """row_losses() by loss_kernel. On an H100 a kernel with these loops took 4.2 ms for 49,152 x 50,304
    logits, read twice at 2,950 GB/s; the one before it took 5.5."""
    N, V = logits.shape
    limit, shift, width = cap
    grad = torch.empty_like(logits, dtype=dtype) if dtype != logits.dtype else logits
    losses = logits.new_empty(N, dtype=torch.float32)
    block = min(LOSS_BLOCK, 1 << (V - 1).bit_length())
    loss_kernel[(N,)](logits, targets, weights, losses, grad, V, len(weights), 2 * limit, shift,
                      2 / (width or limit), factor, block, num_warps=8)
    return losses, grad

def row_losses(logits: Tensor, targets: Tensor, weights: Tensor, cap: Cap, factor: float,
               dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Caps logits (N, V) -> their losses (N,), and factor times the gradient (N, V) in this dtype. targets
    (N, n), -1: none; weights (n,), one per column of targets."""
    limit, shift, width = cap
    top = 2 * limit
    scale = 2 / (width or limit)
    part = torch.sigmoid((logits.float() + shift) * scale)  # softcap + cap = top * part; faster than tanh
    powers = (top * part - top).exp()
    total = powers.sum(1, keepdim=True)
    weights = weights * (targets >= 0)
    losses = (weights * (total.log() + top - top * part.gather(1, targets.clamp(min=0)))).sum(1)
    error = weights.sum(1, keepdim=True) * powers / total
    tokens = torch.arange(logits.size(1), device=logits.device)
    for target, weight in zip(targets.split(1, 1), weights.split(1, 1)):
        error = error - (tokens == target) * weight
    return losses, (error * part * (1 - part) * (top * scale * factor)).to(dtype)

class FusedLoss(torch.autograd.Function):
    """lm_loss() with a softcap. forward() turns the logits, in the dtype of x, into their gradient. x (N, C),
    head (V, C); targets, weights and cap as row_losses() has them."""
    @staticmethod
    def forward(ctx, x: Tensor, head: Tensor, targets: Tensor, weights: Tensor, cap: Cap,
                row_losses: RowLosses) -> Tensor:
        head = head.to(x.dtype)
        losses, grad = row_losses(x @ head.T, targets, weights, cap, 1 / len(x), x.dtype)
        ctx.save_for_backward(grad, x, head)
        return losses.mean()

    @staticmethod
    def backward(ctx, grad_loss: Tensor) -> tuple:
        grad, x, head = ctx.saved_tensors
        return grad_loss * (grad @ head), grad_loss * (grad.T @ x).float(), None, None, None, None

if triton:
    @triton.jit
    def transpose_kernel(source, out, N, V, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        """out (V, N) = source (N, V).T, a tile of (ROWS, COLUMNS) per program: read along rows of source and
        written along rows of out."""
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row[:, None] < N) & (column[None, :] < V)
        tile = tl.load(source + row[:, None] * V + column[None, :], mask=inside)
        tl.store(out + column[:, None] * N + row[None, :], tl.trans(tile), mask=tl.trans(inside))

def stored_once(x: Tensor) -> Tensor:
    """x itself. Compiled, it is written to memory once for all that read it: Inductor (2.11 and 2.13) writes
    a copy for each fp8 matmul and each Triton kernel of ours, but only one buffer for as_strided()."""
    return x.as_strided(x.shape, x.stride())

def kernel_transpose(x: Tensor) -> Tensor:
    """x (N, V), contiguous -> its transpose (V, N), contiguous, by transpose_kernel. Inductor does not tile
    the copy of what a Triton kernel of ours has written: the speedrun's 2.47 GB took 18.7 ms on an H100. Nor
    does torch 2.13 where it fuses the copy with a reduction, as in fp8_mlp's backward pass. Ours takes 1.8 ms
    there."""
    N, V = x.shape
    out = x.new_empty(V, N)
    tiles = (triton.cdiv(N, 64), triton.cdiv(V, 128))
    transpose_kernel[tiles](stored_once(x), out, N, V, ROWS=64, COLUMNS=128, num_warps=8)
    return out

class Fp8FusedLoss(torch.autograd.Function):
    """FusedLoss with lm_head's products in fp8. The logits' gradient is in e5m2 at once. scales: of x, head
    and that gradient, as head_scales() has them."""
    @staticmethod
    def forward(ctx, x: Tensor, head: Tensor, targets: Tensor, weights: Tensor, cap: Cap,
                row_losses: RowLosses, scales: Scales) -> Tensor:
        logits, kept = fp8_product(x, head, scales[:2])
        factor = 1 / len(x) / scales[2]
        losses, grad = row_losses(logits, targets, weights, cap, factor, torch.float8_e5m2)
        ctx.save_for_backward(grad, *kept)
        ctx.grad_scale = scales[2]
        ctx.by_kernel = row_losses is kernel_losses
        return losses.mean()

    @staticmethod
    def backward(ctx, grad_loss: Tensor) -> tuple:
        grad, *kept = ctx.saved_tensors
        grad_t = None
        if ctx.by_kernel:
            grad_t = kernel_transpose(grad)
        grad_x, grad_head = fp8_gradients(grad, kept, ctx.grad_scale, grad_t)
        return grad_loss * grad_x, grad_loss * grad_head.float(), None, None, None, None, None

def can_fuse(cap: Cap) -> bool:
    return 0 < cap[0] <= MOST_FUSED_CAP and torch.compiler.is_compiling()

def loss_rows(x: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of lm_loss() as row_losses() has them: x (N, C), targets (N, n), weights (n,)."""
    if weights is None:
        weights = x.new_ones(1, dtype=torch.float32)
        targets = targets[..., None]
    return x.flatten(0, -2), targets.flatten(0, 1), weights

def fused_loss(x: Tensor, head: Tensor, targets: Tensor, cap: Cap, weights: Tensor | None = None,
               row_losses: RowLosses = row_losses) -> Tensor:
    """lm_loss() by FusedLoss in compiled steps; on a CPU it made a step of an older tiny a fifth faster."""
    if not can_fuse(cap):
        return lm_loss(x, head, targets, cap, weights)
    x, targets, weights = loss_rows(x, targets, weights)
    return FusedLoss.apply(x, head, targets, weights, cap, row_losses)

def fp8_fused_loss(x: Tensor, head: Tensor, targets: Tensor, cap: Cap, weights: Tensor | None = None,
                   row_losses: RowLosses = row_losses, most: Scales = HEAD_MOST) -> Tensor:
    """lm_loss() with lm_head's products in fp8, scaled by `most`; without gradients, lm_loss() itself."""
    if not torch.is_grad_enabled():
        return lm_loss(x, head, targets, cap, weights)
    x, targets, weights = loss_rows(x, targets, weights)
    scales = head_scales(x.size(-1), len(x), most)
    return Fp8FusedLoss.apply(x, head, targets, weights, cap, row_losses, scales)

def fast_loss(cfg: Any, on_gpu: bool, loss: Kernel,
              row_losses: RowLosses | None = None) -> dict[str, Callable]:
    """{"loss": the fastest lm_loss() on this device}, or {} where torch.compile makes it. loss: fused_loss()
    or fp8_fused_loss(), which torch.compile cannot make. row_losses: kernel_losses() if the vocabulary may be
    large."""
    if on_gpu and not (cfg.triton_kernels and triton):
        return {} if loss is fused_loss else dict(loss=loss)
    if on_gpu and row_losses and cfg.vocab_size >= LEAST_KERNEL_VOCABULARY:
        loss = partial(loss, row_losses=row_losses)
    return dict(loss=loss)

# ---------- 12 ranks and log
COLLECTIVE_TIMEOUT = 600  # seconds after which a collective gives up: then a rank is gone or hangs

class Team:
    """The ranks as torchrun started them, and the device of this one. Raises Refused."""
    def __init__(self, cfg: Config, env: Mapping):
        rank = env.get("RANK", "0")
        numbers = [rank, env.get("WORLD_SIZE", "1"), env.get("LOCAL_RANK", rank)]
        require(all([text.isdecimal() for text in numbers]), f"RANK, WORLD_SIZE, LOCAL_RANK are {numbers}")
        self.rank, self.world_size, local_rank = [int(text) for text in numbers]
        require(self.rank < self.world_size, f"there is no rank {self.rank} of {self.world_size}")
        # 1. the device
        gpus = torch.cuda.device_count()
        wanted = cfg.device != "cpu" and env.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
        require(gpus or not wanted or not subprocess.getoutput("nvidia-smi -L").startswith("GPU "),
                f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use the GPUs here: install a "
                "build for their driver, or set DEVICE=cpu")
        self.on_gpu = gpus > 0 if cfg.device == "auto" else cfg.device == "cuda"
        require(not self.on_gpu or local_rank < gpus,
                f"there is no GPU {local_rank} here, only {gpus}: lower --nproc_per_node or set DEVICE=cpu")
        self.device = torch.device(f"cuda:{local_rank}" if self.on_gpu else "cpu")
        device_module = torch.cuda if self.on_gpu else torch.cpu
        device_module.set_device(self.device)
        self.wait = device_module.synchronize  # until the device has done everything
        # 2. the dtype of activations: bf16 where the hardware has it
        if self.on_gpu:
            has_bf16 = torch.cuda.is_bf16_supported(False)  # not by emulation
        else:
            has_bf16 = torch.cpu.get_capabilities().get("avx512_bf16", False)
        self.dtype = torch.bfloat16 if has_bf16 else torch.float32
        if cfg.dtype != "auto":
            self.dtype = getattr(torch, cfg.dtype)
        # 3. settings of this process
        # else compiled code on a CPU adds up an embedding's gradients in any order
        torch.use_deterministic_algorithms(not self.on_gpu)
        torch.utils.deterministic.fill_uninitialized_memory = False
        for dtype in (np.float32, np.float64):
            np.finfo(dtype)  # numpy warns if it looks for the first time after the next line
        torch.set_flush_denormal(True)
        with suppress(AttributeError):  # not Linux with glibc
            # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD: keeps freed memory, but for blocks above 64 MiB; fresh pages
            # would take a sixth of a step
            ctypes.CDLL(None).mallopt(-1, 2**31 - 1)
            ctypes.CDLL(None).mallopt(-3, 1 << 26)
            if "TORCHELASTIC_RUN_ID" in env:  # PR_SET_PDEATHSIG: a rank ends with torchrun, however that ends
                ctypes.CDLL(None).prctl(1, signal.SIGTERM)
        # 4. the ranks meet
        if self.world_size > 1 and not dist.is_initialized():
            if env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]:  # not where the host's name leads
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            try:
                dist.init_process_group("cpu:gloo,cuda:nccl" if self.on_gpu else "gloo",
                                        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT))
            except (ValueError, RuntimeError) as error:
                raise Refused(f"the ranks do not find each other ({brief(error)})") from None

    def share(self, value: Any) -> Any:
        """Rank 0's object, on every rank."""
        box = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(box)
        return box[0]

    def require_alike(self, facts: dict[str, Any]) -> None:
        """Ends all ranks, of which rank 0 raises Refused, if {what: value} differ between them."""
        of_ranks = [facts] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(of_ranks, facts)
        other = [f"{name} is {there.get(name)} on rank {rank}, {value} on rank 0"
                 for rank, there in enumerate(of_ranks)
                 for name, value in of_ranks[0].items() if there.get(name) != value]
        if other and self.rank:
            sys.exit(2)  # rank 0 says why
        require(not other, next(iter(other), ""))

class Log:
    """Lines to rank 0's terminal and, once a run folder is open, to its train.log; events, which are for
    programs, to events.jsonl beside it: one JSON object per line; its `kind` names the event."""
    def __init__(self, lead: bool):
        self.lead = lead
        self.file: Any = io.StringIO()
        self.events: Any = io.StringIO()
        self.path: Path | None = None

    def __call__(self, *lines: object, echo: bool = True, **event: Any) -> None:
        for line in lines if self.lead else []:
            print(line, file=self.file, flush=True)
            if echo:
                with suppress(OSError):  # the run goes on if nobody reads its terminal any more
                    print(line, flush=True)
        if self.lead and event:
            print(json.dumps(event), file=self.events, flush=True)

    def open(self, path: Path, head: str) -> None:
        """On rank 0: continues in this file and its events.jsonl with everything said so far. A new file
        begins with head; what a crash cut short ends as a line of its own. Raises OSError, and Refused if the
        run is still going."""
        file = open(path, "a", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # some file systems have no locks
            require(not isinstance(error, BlockingIOError),
                    f"{path.parent} belongs to a run that is still going: stop that or wait for its end")
        print("" if file.tell() else head, self.file.getvalue(), sep="\n", end="", file=file, flush=True)
        self.file = file
        events = open(path.with_name("events.jsonl"), "a", encoding="utf-8")
        print("\n" if events.tell() else "", self.events.getvalue(), sep="", end="", file=events, flush=True)
        self.events = events

    def seal(self) -> None:
        """On rank 0: logs the sha256 of train.log so far, so that no line can change unnoticed."""
        if self.lead and self.path:
            self(f"log sha256:{file_sha256(self.path)}")

@cache
def script_source() -> bytes:
    """This file, read once, so that an edit during the run changes nothing."""
    return Path(__file__).read_bytes()

def script_sha256() -> str:
    return hashlib.sha256(script_source()).hexdigest()

def brief(error: BaseException) -> str:
    """An exception in one line, without this machine's folders."""
    line = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
    return re.sub(r"(?<![\w.~-])/\S*/", "", line)[:200]

# {what an error's text holds: what to tell the user}
EXPLAINED = {
    "out ?of ?memory|can't allocate memory":
        "out of memory: set DEVICE_BATCH_SIZE below micro_batch, or lower VAL_BATCH_SIZE",
    "No space left": "the disk is full: free some GB",
    "CppCompileError|InvalidCxxCompiler":
        "no C++ compiler, or a space in the folder of its cache or in TMPDIR: COMPILE=0 trains without",
    "gloo|nccl|closed by|closure|timed out": "another rank is gone or hangs"}

def explain(error: BaseException) -> str:
    """In one line: why an exception ends this rank. Prints a traceback only for a bug of ours."""
    if isinstance(error, (Refused, KeyboardInterrupt)):
        return " ".join(str(error).split()) or "interrupted"
    for text, why in EXPLAINED.items():  # torch raises an error of its own on top of the disk's
        if re.search(text, f"{type(error).__name__}: {error} {error.__context__}", re.I):
            return f"{why} ({brief(error)})"
    if not isinstance(error, OSError):
        traceback.print_exception(error)
    return brief(error)

def hardware(team: Team) -> str:
    if team.on_gpu:
        return f"{team.world_size}x {torch.cuda.get_device_name()}"
    name = subprocess.getoutput("grep -sm1 'model name' /proc/cpuinfo").partition(": ")[2]
    return f"{team.world_size} ranks x {torch.get_num_threads()} threads of {name or platform.machine()}"

def peak_memory(team: Team) -> str:
    """The most memory that this process has held."""
    if team.on_gpu:
        return (f"peak memory allocated: {torch.cuda.max_memory_allocated() >> 20} MiB "
                f"reserved: {torch.cuda.max_memory_reserved() >> 20} MiB")
    return f"peak memory resident: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB"

# ---------- 13 warmup, train, main
@dataclass
class TrainState:
    """Where training stands; a checkpoint keeps it."""
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # on the clock
    loss_sum: float = 0.0  # losses of the steps since the last train_loss line, mean of the ranks
    loss_steps: int = 0  # how many of them

@dataclass
class Run:
    """What the parts of one run share."""
    asked: Any  # Config as given, before the dataset sets vocab_size and bos_id
    cfg: Any
    team: Team
    log: Log
    data: Data
    loader: Loader
    started: str  # UTC
    folder: Path
    micro: int = 0  # sequences per micro-step
    model: Any = None
    optimizer: Any = None
    loss_fn: Any = None  # the model, compiled unless COMPILE=0
    state: TrainState = field(default_factory=TrainState)
    saved: TrainState = field(default_factory=TrainState)  # as of the last checkpoint
    stop: bool = False  # a signal asks for the end
    report: dict = field(default_factory=dict)  # part of the result

class Clock:
    """Training seconds, and whether another step fits before the cap, the same on all ranks. They agree on it
    before each step, on GPUs before every fourth, with at most three steps in flight at that moment if there
    is a cap. Without one the host waits for the device at log lines only."""
    def __init__(self, cfg: Any, team: Team, state: TrainState):
        self.cap = cfg.max_wallclock_seconds
        self.team = team
        self.every = 4 if team.on_gpu else 1
        self.at = state.step  # the last step that was over when the ranks agreed
        self.agreed = state.seconds  # the time then
        self.laps: list[float] = []  # seconds per step
        self.under_way: list[Any] = []  # events of steps on the device
        self.stop_asked = False  # did a signal come to some rank?
        self.start(state.seconds)

    def start(self, seconds: float) -> None:
        """Starts or restarts the clock, with this many training seconds on it."""
        self.began = time.perf_counter() - seconds

    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def agree(self, step: int, exactly: bool, stop: bool) -> float:
        """Training seconds at this step. exactly: the host has just waited for the device. stop: a signal
        came to this rank."""
        if exactly or step % self.every == 0:
            while self.under_way and (len(self.under_way) > 3 or self.under_way[0].query()):
                self.under_way.pop(0).synchronize()
            mine = torch.tensor([self.seconds(), stop, len(self.under_way)], dtype=torch.float64)
            seconds, self.stop_asked, pending = all_reduce(mine, "MAX").tolist()
            steps = step - int(pending) - self.at
            if steps > 0 and (exactly or self.cap or not self.team.on_gpu):
                self.laps.append((seconds - self.agreed) / steps)
                self.agreed = seconds
                self.at += steps
        return self.agreed

    def is_over(self, step: int) -> bool:
        """Might the next `every` steps, starting with this one, end after the cap? Two slow laps of the last
        hundred are taken for pauses of the machine; three are the run's own."""
        laps = sorted(self.laps[-100:]) or [0.0]
        pace = laps[max(0, len(laps) - 3)]
        return step > 0 and 0 < self.cap <= self.agreed + pace * (step + self.every - self.at)

def train_step(loss_fn: Kernel, optimizer: Optimizer, batch: tuple[Tensor, ...], micro: int, context: Any,
               factor: float, schedule: Schedule) -> Tensor:
    """A step on (tokens, targets, *inputs), which have the same rows, at most `micro` rows at a time. factor:
    on the mean loss. Returns this rank's mean loss."""
    size = rows_at_once(len(batch[0]), micro)
    parts = list(zip(*[tensor.split(size) for tensor in batch]))
    total = torch.zeros((), device=batch[0].device)
    for tokens, targets, *inputs in parts:
        loss = loss_fn(tokens, targets, context, *inputs) / len(parts)
        optimizer.backward(loss * factor, len(parts))
        total = total + loss.detach()
    optimizer.step(schedule)
    return total

def rows_at_once(rows: int, most: int) -> int:
    """The largest divisor of rows that is at most `most`, or 1."""
    return max([n for n in range(1, rows + 1) if rows % n == 0 and n <= max(1, most)])

def compile_step(run: Run) -> None:
    """Sets the model and the optimizer's rules that steps call, compiled unless COMPILE=0."""
    cfg = run.cfg
    run.loss_fn = run.model
    if not cfg.compile:
        return
    # our autograd functions may be cached: the key covers their graphs and the source of Triton kernels
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    run.loss_fn = torch.compile(run.model, dynamic=False, fullgraph=run.team.on_gpu)
    run.optimizer.adam_step = torch.compile(cfg.adam_step, dynamic=True)
    # each shape of a bank is a graph, once more if a later stage sums its gradients in another dtype
    torch._dynamo.config.recompile_limit = 64
    if run.team.on_gpu:  # a CPU gains nothing
        run.optimizer.muon_step = torch.compile(cfg.muon_step, dynamic=False, fullgraph=True)
    else:
        # skip Inductor's ISA probe, which takes seconds
        from torch._inductor.cpu_vec_isa import pick_vec_isa
        torch._inductor.config.cpp.vec_isa_ok = platform.machine() == "x86_64" or None
        # puts the vector width into the cache's key: code built for another width would be wrong
        torch._inductor.config.cpp.simdlen = pick_vec_isa().bit_width()

def warm_up(run: Run) -> None:
    """Before the clock: compiles and runs the stages in turn on dummy tokens, warmup_steps of them but each
    stage at least once, then starts over from the init."""
    cfg = run.cfg
    team = run.team
    compile_step(run)
    values = init_parameters(run.model, cfg.seed)
    run.optimizer.begin(values)
    table = cfg.stages()
    for n in range(max(cfg.warmup_steps, len(table))):
        stage = table[n % len(table)]
        T = stage.row_tokens
        share = stage.batch_tokens // T // team.world_size
        tokens = (torch.arange(share * T, device=team.device) % cfg.vocab_size).view(share, T)
        context = run.model.context(T, team.device, team.dtype, stage)
        # one tensor as tokens and as targets would make another graph
        batch = (tokens, tokens.clone(), *run.model.candidates(tokens, tokens))
        micro = run.micro * cfg.train_seq_len // T
        # each stage's own schedule, so that updates that a later one changes compile here
        train_step(run.loss_fn, run.optimizer, batch, micro, context, 1.0,
                   cfg.schedule(stage.first_step, stage.begins))
    mean_of_ranks(torch.zeros((), device=team.device), team)  # NCCL connects on first use, for 0.5 to 2.5 s
    run.optimizer.begin(values)

def train(run: Run) -> Score:
    """Trains -> the last Score. All but checkpoints and scores is on the clock."""
    cfg = run.cfg
    team = run.team
    state = run.state
    began = time.perf_counter()
    if run.model.build(run, state.step == 0) and state.step == 0:  # a resumed run has paid for it
        state.seconds += time.perf_counter() - began
    recent = torch.tensor(state.loss_sum, dtype=torch.float64, device=team.device)  # sum since the last line
    reported = False
    context_stage = None
    gc.collect()
    gc.disable()  # it has paused single ranks for 0.6 s, and all others with them (modded-nanogpt's logs)
    catch_signals(lambda *_: setattr(run, "stop", True))  # from now on they wait for the end of a step
    team.wait()
    clock = Clock(cfg, team, state)
    while True:
        # 1. the time, the same on all ranks; is there another step?
        step = state.step
        state.seconds = clock.agree(step, reported, run.stop)
        progress = cfg.progress(step, state.seconds)
        stage = stage_at(cfg, progress)
        done = why_done(run, clock, stage)
        # 2. checkpoint, validation and further evaluations, off the clock
        save = save_is_due(run, done, clock.stop_asked)
        validation_due = cfg.val_loss_every and step % cfg.val_loss_every == 0
        further = cfg.evaluations(step)
        if save or done or validation_due or further:
            team.wait()
            state.seconds = clock.seconds()
            if save:
                state.loss_sum = mean_of_ranks(recent, team)
                save_checkpoint(run)
                team.share(None)  # the others wait for rank 0's file, off the clock as well
            if save and clock.stop_asked:
                raise KeyboardInterrupt(f"RESUME={cfg.run_id}")
            if done:
                save_weights(run)
                catch_signals()
                step_ms = np.percentile(clock.laps or [0.0], (50, 95, 100)).round(6) * 1e3
                run.report |= dict(
                    train_time_ms=round(state.seconds * 1e3), steps=step, tokens=state.tokens,
                    tok_per_s=round(state.tokens / state.seconds), stop_reason=done,
                    step_ms=dict(zip(("p50", "p95", "max"), step_ms.round(3).tolist())))
                return validate(run, None, done)
            if validation_due:
                validate(run, stage, done)
            for evaluation in further:
                evaluation(run.model, cfg, run.data, team, run.log)
            gc.collect()
            clock.start(state.seconds)
        # 3. a step and its report
        batch = run.loader.next(stage.batch_tokens, stage.row_tokens // cfg.train_seq_len, stage.doc_len)
        batch = (*batch, *run.model.candidates(*batch))
        if stage != context_stage:  # the host waits while the stage's tables go to the device
            context_stage = stage
            context = run.model.context(stage.row_tokens, team.device, team.dtype, stage)
        run.model.update_context(context, progress)
        schedule = cfg.schedule(step, progress)
        micro = run.micro * cfg.train_seq_len // stage.row_tokens
        loss = train_step(run.loss_fn, run.optimizer, batch, micro, context, stage.loss_factor, schedule)
        recent += loss
        state.loss_steps += 1
        if team.on_gpu and clock.cap:
            clock.under_way.append(torch.cuda.current_stream().record_event())
        state.tokens += stage.batch_tokens
        state.step += 1
        reported = state.step <= 10 or state.step % (cfg.train_log_every or 100) == 0
        if reported:
            report_step(run, clock, loss, recent, schedule.lr)

def why_done(run: Run, clock: Clock, stage: Stage) -> str:
    """Why no step follows; empty: one does."""
    if clock.is_over(run.state.step):
        return "wallclock_cap"
    if run.state.tokens + stage.batch_tokens > run.loader.most_tokens:
        return "max_epochs"
    return "iterations" if run.state.step == total_steps(run.cfg) else ""

def save_is_due(run: Run, done: str, stop: bool) -> bool:
    """By steps, by seconds, by a signal (stop) or at the end; not while a bank holds gradients for a later
    update. done: why no step follows."""
    cfg = run.cfg
    state = run.state
    by_step = cfg.save_every and state.step // cfg.save_every > run.saved.step // cfg.save_every
    by_time = 0 < cfg.save_every_seconds <= state.seconds - run.saved.seconds
    at_end = done and (cfg.save_every or cfg.save_every_seconds)
    scheduled = state.step > run.saved.step and (by_step or by_time or at_end)
    between_updates = all([bank.fresh for bank in run.optimizer.banks])
    return bool((stop or scheduled) and (done or between_updates))

def mean_of_ranks(loss: Tensor, team: Team) -> float:
    """The mean of a 0-dim tensor over ranks. The host waits for it."""
    return all_reduce(loss / team.world_size).item()

def report_step(run: Run, clock: Clock, loss: Tensor, recent: Tensor, lr_factor: float) -> None:
    """Logs the loss of the last step and the mean since the last such line. recent: the sum of the losses
    since then, which begins anew. Raises Refused if one of them is not finite."""
    cfg = run.cfg
    state = run.state
    last = mean_of_ranks(loss, run.team)
    mean = mean_of_ranks(recent, run.team) / state.loss_steps
    recent.zero_()
    state.loss_steps = 0
    now = clock.seconds()
    require(math.isfinite(mean), f"train_loss is not finite at step {state.step}: lower the learning rates")
    # a recipe's own progress may ignore one of the ends
    left = now / Config.progress(cfg, state.step, now) - now
    run.log(f"step:{state.step}/{total_steps(cfg)} train_loss:{last:.4f} {time_text(now, state.step)} "
            f"tok/s:{state.tokens / now:.0f} lr_factor:{lr_factor:.3f} eta:{left:.0f}s mean_loss:{mean:.4f}",
            kind="train", step=state.step, steps=total_steps(cfg), seconds=now, train_loss=last,
            mean_loss=mean, tokens=state.tokens, lr_factor=lr_factor, eta=left)

def validate(run: Run, stage: Stage | None, done: str) -> Score:
    """val_loss, off the clock, with the windows and loops of `stage` (None: those of evaluation), by the
    weights that the steps read: on a GPU those are bf16, while files hold the fp32 masters. done: why no step
    follows."""
    cfg = run.cfg
    state = run.state
    if done not in ("", "iterations"):
        run.log(f"stopping_early: {done} train_time:{state.seconds * 1e3:.0f}ms step:{state.step}/"
                f"{total_steps(cfg)}", kind="stop", reason=done, step=state.step, seconds=state.seconds)
    run.log("evaluating val_loss")
    score = evaluate(run.model, cfg, run.data, run.team, stage)
    require(math.isfinite(score.val_loss),
            f"val_loss is not finite at step {state.step}: lower the learning rates")
    run.log(f"step:{state.step}/{total_steps(cfg)} {score_text(cfg, score)} "
            f"{time_text(state.seconds, state.step)}", kind="val", step=state.step, steps=total_steps(cfg),
            seconds=state.seconds, **score._asdict())
    run.log.seal()
    return score

def time_text(seconds: float, step: int) -> str:
    return f"train_time:{seconds * 1e3:.0f}ms step_avg:{seconds * 1e3 / max(step, 1):.2f}ms"

def save_weights(run: Run) -> None:
    """Ends the optimizer's work and writes final_model.pt, before anything scores it. All ranks call it
    together."""
    run.optimizer.end()
    payload = to_payload(run.model, run.optimizer.weights() | run.model.state())
    if run.team.rank == 0:
        write_atomically(run.folder / "final_model.pt", partial(torch.save, payload))

def open_folder(cfg: Config, team: Team, log: Log, data: Data) -> Path:
    """Opens logs/<run_id>/ on rank 0, with train_gpt.py and train.log. Raises Refused."""
    folder = Path("logs", cfg.run_id)
    if team.rank == 0:
        require(cfg.resume or not folder.exists(), f"run_id={cfg.run_id!r}: {folder} exists")
        rule = "=" * 100
        gpus = [subprocess.getoutput("nvidia-smi | sed /Proc/Q")] if team.on_gpu else []
        head = [script_source().decode(), rule, f"python {sys.version.split()[0]} torch {torch.__version__}",
                f"hardware: {hardware(team)}", *gpus, rule]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "train_gpt.py").write_bytes(script_source())
            log.open(folder / "train.log", "\n".join(head))
        except OSError as error:
            raise Refused(
                f"{folder} cannot be written ({brief(error)}): is logs a link to nowhere?") from None
    team.share(None)  # the others end with rank 0
    log.path = folder / "train.log"
    log(f"run folder: {folder}")
    lines = [f"config {name}={show(value)}" for name, value in vars(cfg).items()]
    config = hashlib.sha256("".join([f"{line}\n" for line in lines]).encode()).hexdigest()
    inputs = {"train_gpt.py": script_sha256(), "config": config} | data.about["sha256"]
    log(*[f"sha256 {name}:{digest}" for name, digest in inputs.items()])
    log(*lines, echo=False)
    return folder

def train_model(run: Run, checkpoint: dict | None, began: float) -> Score:
    """Init or a checkpoint, warmup, training. Sets run.model to what was trained. began: when the process
    began."""
    cfg = run.cfg
    team = run.team
    # 1. model and optimizer
    with team.device:
        run.model = cfg.make_model(cfg.choose_kernels(team.on_gpu, run.log))
    run.model.trained_on = run.data.about
    make_optimizer = cfg.optimizer()
    run.optimizer = make_optimizer(run.model, cfg, team.rank, team.world_size,
                                   dtype=team.dtype if team.on_gpu else torch.float32, muon_dtype=team.dtype)
    ready = time.perf_counter()
    # 2. warmup
    how_long = "some minutes" if team.on_gpu else "half a minute"
    run.log("warmup before the clock" + (f", compiling: about {how_long}" if cfg.compile else ""))
    warm_up(run)
    setup_ms = round(1e3 * (ready - began))
    compile_ms = round(1e3 * (time.perf_counter() - ready))
    run.log(f"setup:{setup_ms}ms compile:{compile_ms}ms", kind="setup", setup_ms=setup_ms,
            compile_ms=compile_ms)
    # 3. training
    if checkpoint:
        restore_run(run, checkpoint)
    score = train(run)
    gc.enable()
    run.report |= dict(setup_ms=setup_ms, compile_ms=compile_ms, micro_batch=run.micro)
    # 4. the fp32 weights that it made. What was compiled for bf16 is dropped, because torch 2.11 does not
    # notice that the parameters are now other tensors (pytorch#177525)
    for name, value in run.optimizer.weights().items():
        run.model.get_parameter(name).data = value.to(team.device)
    torch._dynamo.reset()
    run.loss_fn = None
    run.optimizer = None  # frees its gradients and moments
    return score

def write_and_read_back(run: "Run") -> None:
    """Writes the artifact, if it is scored; run.model becomes what it holds, as read back."""
    cfg = run.cfg
    model = run.model
    path = run.folder / "final_model.pt"
    if cfg.score_artifact:
        path = run.folder / f"final_model.{cfg.codec[:4]}.ptz"
        packed = cfg.pack(run)
    if run.team.rank == 0:  # other hosts lack the file
        if cfg.score_artifact:
            write_atomically(path, lambda file: file.write(packed))
            run.model, _ = load_model(path, run.team.device)
            run.model.use(model.kernels)
        code = len(script_source())
        size = path.stat().st_size
        limit = cfg.artifact_bytes_limit
        within = not limit or size + code <= limit
        sizes: dict = dict(bytes_model=size, bytes_total=size + code, artifact_within_limit=within)
        run.report |= sizes
        run.log(f"Serialized model {cfg.codec}: {size} bytes", f"Code size: {code} bytes",
                f"Total submission size {cfg.codec}: {size + code} bytes, limit {limit or 'none'}"
                f"{'' if within else ', OVER'}", kind="artifact", **sizes)
    for p in run.model.parameters():
        if run.team.world_size > 1:
            dist.broadcast(p.data, 0)

def score_final(run: Run, model: Model | None, checkpoint: dict | None, began: float) -> dict:
    """Trains, unless a model is given, and scores what there is -> its part of the result."""
    cfg = run.cfg
    scores = {}
    if model:
        kind = "artifact" if cfg.eval_from.endswith(".ptz") else "trained"
        scores[kind] = evaluate(model, cfg, run.data, run.team)
    else:
        scores["trained"] = train_model(run, checkpoint, began)
        write_and_read_back(run)
        if cfg.score_artifact:
            run.log("scoring the artifact as read back")
            scores["artifact"] = evaluate(run.model, cfg, run.data, run.team)
    result: dict = {"peak_memory": peak_memory(run.team)}
    run.log(result["peak_memory"])
    for kind, score in scores.items():
        tag = "final_model" if kind == "trained" else f"final_{cfg.codec.replace('+', '_')}_roundtrip"
        run.log(f"{tag} {score_text(cfg, score)}", f"{tag}_exact {score_text(cfg, score, 8)}", kind="score",
                tag=tag, **score._asdict())
        require(math.isfinite(score.val_loss), f"{tag}: val_loss is not finite: lower the learning rates")
        result |= {kind: score._asdict(), loss_name(cfg): score.val_loss, "val_bpb": score.val_bpb,
                   "val_bpb_without_bos": score.val_bpb_without_bos}
    for evaluation in cfg.evaluations():
        result |= evaluation(run.model, cfg, run.data, run.team, run.log)
    return result

def model_to_score(cfg: Any, given: dict[str, Any], team: Team, log: Log) -> tuple[Model, Any]:
    """(the model of cfg.eval_from, its Config). given: what was typed; it may only repeat what the model has.
    Raises Refused."""
    model, cfg = load_model(cfg.eval_from, team.device, cfg)
    of_model = {f.name for f in fields(cfg) if f.metadata["model"]}
    for name, value in given.items():
        require(name not in of_model or value == getattr(cfg, name),
                f"the model has {name}={show(getattr(cfg, name, ''))}: set the same")
    model.use(replace(cfg.choose_kernels(team.on_gpu, log), linear=linear))
    return model, cfg

def scoring_settings(cfg: Any) -> dict:
    """What final scores are made of, for the log and result.json."""
    context = cfg.eval_context or cfg.train_seq_len
    return dict(eval_tokens=cfg.val_tokens or "full", eval_context=context,
                eval_stride=cfg.eval_stride or context)

def run_once(argv: Sequence[str], env: Mapping, log: Log) -> None:
    """One run: the score of a file, or training."""
    began = time.perf_counter()
    started = f"{datetime.now(UTC):%FT%TZ}"
    preset, given = typed(env, argv)
    script_source()
    checkpoint = None
    if given.get("resume"):
        finished = Path("logs", given["resume"], "result.json")
        if finished.exists():
            log(f"{given['resume']} has finished: its scores are in {finished}")
            return
        cfg, checkpoint = read_checkpoint(given)
    else:
        cfg = preset_config(preset, given)
    changed = overrides(cfg)
    log(*[f"override {name} {old} -> {new}" for name, (old, new) in changed.items()])
    team = Team(cfg, env)
    # 1. the model to be scored, data, run folder
    model = None
    if cfg.eval_from:
        model, cfg = model_to_score(cfg, given | dict(preset=preset), team, log)
    asked = cfg
    data = open_data(cfg, log)
    if model and model.trained_on:
        check_same_data(f"eval_from={cfg.eval_from}", model.trained_on, cfg, data)
    elif checkpoint:
        check_same_data(f"resume={cfg.run_id}", checkpoint["data"], cfg, data)
    cfg = replace(cfg, vocab_size=data.vocab_size, bos_id=max(data.bos, 0))
    # All that would mix two runs if ranks differed in it. Folders may differ; what is in them may not.
    constants = vars(replace(cfg, run_id="", data_path="", tokenizer_path=""))
    team.require_alike(data.about | constants | dict(script=script_sha256(), torch=torch.__version__,
                                                     activations=team.dtype))
    sequences = cfg.train_batch_tokens // cfg.train_seq_len
    require(sequences % team.world_size == 0 or model,
            f"{team.world_size} ranks do not divide the {sequences} sequences of a step")
    loader = Loader(cfg, data, team, log)
    if cfg.dry_run:
        log("dry run: constants, data and ranks fit together")
        return
    kind = "eval" if model else f"{cfg.preset}_seed{cfg.seed}"
    run_id = team.share(cfg.run_id or f"{kind}_{datetime.now():%Y%m%d_%H%M%S_%f}")
    cfg = replace(cfg, run_id=run_id)
    folder = open_folder(cfg, team, log, data)
    run = Run(replace(asked, run_id=run_id), cfg, team, log, data, loader, started, folder, model=model)
    run.micro = cfg.device_batch_size or max(1, sequences // (8 if team.on_gpu else team.world_size))
    log(f"world_size:{team.world_size} device:{team.device.type} activations:{str(team.dtype)[6:]} "
        f"micro_batch:{run.micro}x{cfg.train_seq_len} tokens", "stage table: from_step tokens_per_step",
        *[f"{stage.first_step:22} {stage.batch_tokens:15}" for stage in cfg.stages()])
    settings = scoring_settings(cfg)
    result: dict = dict(
        run_id=run_id, preset=cfg.preset, seed=cfg.seed, val_loss=None, val_bpb=None, core=None,
        bytes_code=len(script_source()), code_sha256=script_sha256(), world_size=team.world_size,
        hardware=hardware(team), torch=torch.__version__,
        config={name: show(value) for name, value in vars(cfg).items()}, overrides=changed, data=data.about,
        eval=settings, resumed=checkpoint is not None, stop_reason="eval_from" if model else None)
    log(f"eval settings: {' '.join([f'{name}:{value}' for name, value in settings.items()])}", kind="start",
        **result)
    # 2. training, scores, the result
    result |= score_final(run, model, checkpoint, began)
    if team.rank == 0:
        run.report |= dict(started=run.started, finished=f"{datetime.now(UTC):%FT%TZ}",
                           process_ms=round(1e3 * (time.perf_counter() - began)))
        result |= run.report
        log(*[f"{name:>21}  {value}" for name, value in run.report.items()])
        log(*[f"sha256 {path.name}:{file_sha256(path)}" for path in sorted(folder.glob("final_model.*"))])
        log.seal()
        write_atomically(folder / "result.json",
                         lambda file: file.write(f"{json.dumps(result, indent=1)}\n".encode()))
        log(kind="result", **result)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # USR1: a Slurm job's end is near

def catch_signals(handler: Any = signal.default_int_handler) -> None:
    """Outside of training, signals end the run like Ctrl-C. In training: handler."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as a shell sets it for `command &`
            signal.signal(number, handler)

def main(argv: Sequence[str], env: Mapping) -> int:
    """Returns the exit code: 0 done, 1 failed, 2 refused before training. The last line says why."""
    log = Log(lead=env.get("RANK", "0") == "0")
    catch_signals()
    try:
        run_once(argv, env, log)
        if dist.is_initialized():
            dist.destroy_process_group()
        with log.file, log.events:  # closes them
            return 0
    except (Exception, KeyboardInterrupt) as error:
        why = explain(error)
        code = 2 if isinstance(error, Refused) and not log.path else 1
        if "RANK" in env and code == 1 and not isinstance(error, KeyboardInterrupt):
            why = f"rank {env['RANK']}: {why}"
    print(f"train_gpt: {why}", file=sys.stderr, flush=True)
    with suppress(OSError):  # the disk may be full
        if log.path:
            with open(log.path, "a", encoding="utf-8") as file:  # any rank may have the last word
                print(why, file=file)
        log(kind="end", why=why)
    if dist.is_initialized():  # no wait for the others in a collective
        os._exit(code)
    return code

# ---------- 14 recipes
@dataclass(frozen=True)
class Staged(Config):
    """The constants and methods of recipes with several stages and several ways to make rows."""
    # columns of the table of stages, one entry per stage; empty: as the rows of stages() have them
    stage_starts: tuple = option((), "fractions of iterations at which stages begin", 0, 1, of=float)
    batch_schedule: tuple = option((), "train_batch_tokens times this, per stage", 1, 1024, of=int)
    seq_schedule: tuple = option((), "train_seq_len times this, per stage", 1, 1024, of=int)
    packing: str = option("rows", "how training rows are cut from the stream: see Rows", choices=("rows",))
    shuffle: bool = option(False, "training rows in one random order; 0: in order")
    max_epochs: int = optional(0, "passes over the training tokens; 0: any number")
    triton_kernels: bool = option(True, "our own Triton kernels on a GPU; 0: what torch.compile generates")
    # {packing: class of Packer}
    packers: ClassVar[dict[str, type[Packer]]] = dict(rows=Rows)

    def packer(self, data: Data, loader: Loader) -> "Packer":
        self.check_data(data)
        packer = self.packers[self.packing](self, data, loader)
        if self.max_epochs:
            loader.most_tokens = self.max_epochs * packer.held_tokens
        return packer

    def check_data(self, data: Data) -> None:
        """Raises Refused for a dataset that lacks what the recipe's losses and scores need."""

    def check(self: Any) -> None:
        super().check()
        T = self.train_seq_len
        starts = [stage.start for stage in self.stages()]
        require(starts == sorted([0.0, *starts[1:]]), f"stage_starts={show(tuple(starts))} must grow from 0")
        for stage in self.stages():
            require(stage.row_tokens == T or self.packers[self.packing].any_length,
                    f"packing={self.packing} makes rows of train_seq_len={T}, not of {stage.row_tokens}")

# ---------- tiny: lowest val_bpb of the embedded corpus after 120 s on any CPU or GPU
# Our own game; records are in records/track_tiny. Two minutes allow few steps, so the model looks up what it
# need not learn: which tokens followed the current context in the training text and earlier in the row.
@dataclass(frozen=True)
class Tiny(Staged):
    """Two layers, one of them with attention; embeddings of bigrams and of candidates for the next token; key
    offset, U-Net skips, Muon."""
    preset: str = option("tiny", "the recipe", model=True)
    # size
    num_layers: int = option(2, "blocks; with unet_skips the second half reads the first", 1, 1000,
                             model=True)
    model_dim: int = option(128, "width of the residual stream", 2, 1 << 16, model=True)
    num_heads: int = option(2, "heads of queries, keys and values", 1, 4096, model=True)
    mlp_mult: int = option(3, "MLP width / model_dim", 1, 64, model=True)
    window_pattern: str = option("-L", "per layer (cycled): L long window, S half of it, - no attention",
                                 model=True)
    window_schedule: tuple = option((), "long window per stage, in earlier tokens; 0: all; empty: 128",
                                    0, 1 << 20, model=True, of=int)
    rope_base: float = optional(1_000.0, "RoPE: 1 / the lowest frequency; 0: no RoPE", 0, 1e9, model=True)
    qk_gain_init: float = option(1.5, "initial gain of each query head", 0, 100, model=True)
    # modded-nanogpt#49: -1.4 s
    key_offset: bool = option(True, "long layers: half of each key head comes from the token before",
                              model=True)
    value_embed_layers: tuple = option((0, 1), "value embedding per layer (cycled), from 1; 0: none",
                                       0, 999, model=True)
    unet_skips: bool = option(True, "skip connections from the first half of the blocks to the second",
                              model=True)
    logit_softcap: float = optional(15.0, "logits = cap * tanh(logits / cap); 0: no cap", 0, 1e4, model=True)
    bigram_rows: int = optional(65_536, "hashed bigram embedding (modded-nanogpt#62: -5.6 s); 0: none",
                                0, 1 << 26, model=True)
    bigram_init: bool = option(True, "initialize embedding and lm_head from training bigrams, up to "
                               "vocab_size 4,096; 0: random embedding, zero lm_head")
    memory: bool = option(True, "look up what followed the context in training text and row; 0: plain GPT",
                          model=True)
    mixture: bool = option(True, "mix the memory's distributions with the model's softmax; 0: use "
                           "memory only as input candidates", model=True)
    own_loss: float = option(3.0, "weight of the loss on the model's own softmax; the mixture's loss has 1",
                             0, 100)
    count_orders: tuple = option((3, 5, 8, 14), "n-gram lengths to count in the training text; 0: none",
                                 0, 64, model=True)
    count_bits: int = option(24, "log2 of the entries (4 bytes each) per count table", 8, 28, model=True)
    count_words: tuple = option((1, 3, 5, 29), "word contexts to count as well, as bit masks: bit 0 is the "
                                "word so far, bit k the k-th word before it (5: the word so far and the "
                                "second word before it); 0: none", 0, 127, model=True)
    copy_orders: tuple = option((1, 2, 3, 4, 6, 9), "n-gram lengths to match earlier in the row; "
                                "0: none", 0, 64, model=True)
    # data and batch
    data_path: str = option("data/datasets/embedded", "folder of token shards")
    data_fingerprint: str = option("dac98310ae0394c70e5edcf7fc6fc1d66e56671e3d3f3c141065bed6ad3d1c49",
                                   "sha256 of the game's text; empty: any text")
    train_seq_len: int = option(4096, "tokens per row", 2, 1 << 20, model=True)
    train_batch_tokens: int = option(4_096, "tokens per step over all ranks in the first stage", 1, 1 << 30)
    shuffle: bool = option(True, "training rows in one random order; 0: in order")
    train_log_every: int = optional(50, "steps between train_loss lines after step 10; 0: every 100")
    # optimizer
    matrix_lr: float = option(0.03, "Muon: matrices of the blocks", 0, 10)
    embed_lr: float = option(0.3, "Adam: embeddings of tokens, values, bigrams and candidates", 0, 10)
    head_lr: float = option(0.008, "Adam: lm_head", 0, 10)
    scalar_lr: float = option(0.04, "Adam: gains, scales, mixes", 0, 10)
    muon_momentum: float = option(0.95, "Muon's momentum after its warmup", 0, 0.9999)
    muon_momentum_warmup_start: float = option(0.85, "Muon's momentum at step 0", 0, 0.9999)
    muon_momentum_warmup_steps: int = optional(300, "steps of that warmup; 0: none")
    muon_backend_steps: int = option(5, "Newton-Schulz iterations", 1, 20)
    bigram_every: int = option(2, "bigram embedding: update every this many steps on summed gradients", 1, 99)
    beta1: float = option(0.8, "Adam: decay of the first moment", 0, 0.9999)
    beta2: float = option(0.95, "Adam: decay of the second moment", 0, 0.99999)
    adam_eps: float = option(1e-8, "Adam: added to the root of the corrected second moment", 1e-20, 1)
    # length: the clock ends the run
    iterations: int = option(100_000, "maximum number of steps", 1, 10**9)
    max_wallclock_seconds: float = optional(120.0, "training seconds; 0: no cap", 0, 1e7)
    warmdown_frac: float = option(0.5, "last fraction of the run, in which LR falls", 0, 1)
    lr_floor: float = option(0.0, "LR factor at the end of the warmdown", 0, 1)
    # scores
    eval_sliding: int = optional(0, "val_bpb_sliding: targets scored per row; 0: skip this score")
    val_part: int = optional(32_768, "val tokens scored off the clock every val_part_every steps; 0: none")
    val_part_every: int = option(50, "steps between val_part scores", 1, 10**9)

    def stages(self) -> list[WindowStage]:
        B = self.train_batch_tokens
        T = self.train_seq_len
        rows = [
            # begins at this fraction of iterations, tokens per step, tokens per row, long window
            WindowStage(0.0, 1 * B, T, window=128),
            WindowStage(0.5, 2 * B, T, window=128),
        ]
        return stage_rows(self, rows, window="window_schedule")

    def check(self) -> None:
        """Raises Refused for constants that contradict each other."""
        super().check()
        require(self.window_pattern and not set(self.window_pattern) - set("LS-"),
                f"window_pattern={self.window_pattern!r}: a layer is L, S or -")
        for name in ("count_orders", "count_words", "copy_orders"):
            orders = getattr(self, name)
            require(orders == (0,) or len({0, *orders}) > len(orders),
                    f"{name}={show(orders)}: each one once, or 0 alone")

    def parameter_table(self) -> dict[str, Row]:
        """{kind: Row}"""
        adam: dict = dict(optimizer="adam", beta1=self.beta1, beta2=self.beta2, eps=self.adam_eps)
        matrix: Callable = partial(Row, group="matrix", optimizer="muon", lr=self.matrix_lr)
        table: Callable = partial(Row, group="value_embed", lr=self.embed_lr, **adam)
        scalar: Callable = partial(Row, group="scalar", lr=self.scalar_lr, precision="fp32", **adam)
        return by_kind([
            # kind                   init
            matrix("query",          init="uniform", scale=1.0),
            matrix("key",            init="uniform", scale=1.0),
            matrix("value",          init="uniform", scale=1.0),
            matrix("attn_proj",      init="constant", scale=0.0),
            matrix("fc",             init="uniform", scale=1.0),
            matrix("mlp_proj",       init="constant", scale=0.0),
            Row("embed", "embed",    init="normal", scale=1.0, lr=self.embed_lr, **adam),
            Row("head", "head",      init="constant", scale=0.0, lr=self.head_lr, **adam),
            table("value_embeds",    init="constant", scale=0.0),
            table("bigram_embed",    init="constant", scale=0.0, every=self.bigram_every),
            table("candidate_embed", init="constant", scale=0.0),
            table("class_embed",     init="constant", scale=0.0),
            scalar("class_scale",    init="constant", scale=1.0),
            scalar("qk_gain",        init="constant", scale=self.qk_gain_init),
            scalar("resid_lambda",   init="constant", scale=1.0),
            scalar("x0_lambda",      init="constant", scale=0.0),
            scalar("layer_scale",    init="constant", scale=1.0),
            scalar("skip_weights",   init="constant", scale=1.0),
            scalar("gate_weight",    init="constant", scale=0.0),
            scalar("gate_class",     init="constant", scale=0.0),
            scalar("gate_matches",   init="constant", scale=0.0),
        ])

    def muon_step(self, state: UpdateState) -> None:
        update = nesterov_of_mean(state)
        update = orthogonalize(update, self.muon_backend_steps, NEWTON_SCHULZ, state.dtype)
        state.p.sub_(state.lr * update)

    def adam_step(self, state: UpdateState) -> None:
        state.p.sub_(state.lr * adam_update(state))

    def schedule(self, step: int, progress: float) -> "Schedule":
        """LR is 1 until the warmdown, then falls linearly to lr_floor."""
        done = warmdown_done(scheduled_progress(self, progress), self.warmdown_frac)
        warmup = warmup_done(step, self.muon_momentum_warmup_steps)
        return Schedule(lr=1 - done + self.lr_floor * done,
                        momentum=momentum_at(self, warmup))

    def windows(self, stage: WindowStage | None, T: int) -> dict[str, int]:
        window = (stage or self.stages()[-1]).window
        short = (window or self.train_seq_len) // 2
        return dict(L=min(window or T, T), S=min(T, max(1, short)))

    def counted_orders(self) -> list[int]:
        return [n for n in self.count_orders if n > 0 and self.memory]

    def counted_words(self) -> list[int]:
        return [mask for mask in self.count_words if mask > 0 and self.memory]

    def matched_orders(self) -> list[int]:
        return [n for n in self.copy_orders if n > 0 and self.memory]

    def evaluations(self, step: int | None = None) -> list[Callable]:
        if step is None:
            return [sliding_score] if self.eval_sliding else []
        due = self.val_part and step and step % self.val_part_every == 0
        return [partial(score_part, step=step)] if due else []

    def quantize(self, row: Row, w: Tensor, coarser: float = 1.0,
                 hessian: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return quantize_by_maximum(w, row.levels // coarser, 0.0)

    def choose_kernels(self, on_gpu: bool, log: Logger) -> "TinyKernels":
        chosen = dict(attention=cpu_attention) | window_attention(on_gpu, log)
        chosen |= fast_loss(self, on_gpu, fused_loss, kernel_losses)
        return TinyKernels(losses=fused_token_losses, **chosen)

    def make_model(self, *kernels: "TinyKernels") -> Model:
        return TinyModel(self, *kernels)

CPU_KERNEL_TOKENS = 1024  # longest rows of cpu_kernel()

def cpu_kernel(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
               scale: float = 1.0, enable_gqa: bool = False) -> Tensor:
    """scaled_dot_product_attention in compiled steps on a CPU. There, plain products and a fused softmax are
    faster than torch's kernel, but they hold all weights at once, so long rows stay with torch."""
    T = q.size(2)
    K = k.size(2)
    if T > CPU_KERNEL_TOKENS or not torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, scale=scale,
                                              enable_gqa=enable_gqa)
    if is_causal:
        attn_mask = torch.ones(T, K, dtype=torch.bool, device=q.device).tril()
    if enable_gqa:
        k = k.repeat_interleave(q.size(1) // k.size(1), 1)
        v = v.repeat_interleave(q.size(1) // v.size(1), 1)
    scores = ((q @ k.mT).float() * scale).masked_fill(~attn_mask, -torch.inf)
    return scores.softmax(-1).to(q.dtype) @ v

cpu_attention = partial(attention, kernel=cpu_kernel)

MOST_BIGRAM_VOCAB = 4096  # largest vocab_size for bigram counts: their table takes 128 MiB

def bigram_counts(text: np.ndarray, vocab_size: int) -> np.ndarray:
    """uint16 (n,) -> bigram counts, float64 (V, V): row: token, column: the token after it."""
    counts = np.zeros(vocab_size**2)
    for low in range(0, len(text) - 1, 1 << 22):
        tokens = text[low:low + (1 << 22) + 1].astype(np.int64)
        counts += np.bincount(vocab_size * tokens[:-1] + tokens[1:], minlength=len(counts))
    return counts.reshape(vocab_size, vocab_size)

def factorize_bigrams(counts: np.ndarray, C: int, seed: int) -> tuple[Tensor, Tensor]:
    """A normalized embedding and an lm_head, both (V, C), whose product approximates next-token
    log-probabilities up to a constant per token. counts: from bigram_counts(). In numpy, whose linear algebra
    is bit-for-bit reproducible; torch's is not."""
    V = len(counts)
    rng = np.random.default_rng(seed)
    # 1. log-probabilities, smoothed by 4 counts of the unigram distribution
    row_sums = counts.sum(1, keepdims=True)
    unigram = (counts.sum(0) + 1) / (counts.sum() + V)
    log_p = np.log((counts + 4 * unigram) / (row_sums + 4))
    log_p -= log_p @ unigram[:, None]
    # 2. the embedding: leading singular vectors, weighted by frequency, in a random basis
    weight = np.sqrt(row_sums / max(1, row_sums.sum()) + 1e-6)
    weighted = weight * log_p * np.sqrt(unigram)
    basis = rng.standard_normal((V, min(C, V)))
    for _ in range(5):  # subspace iteration
        basis = np.linalg.qr(weighted @ (weighted.T @ basis))[0]
    left, singular_values, _ = np.linalg.svd(basis.T @ weighted, full_matrices=False)
    rotation = np.linalg.qr(rng.standard_normal((C, C)))[0][:len(singular_values)]
    vectors = (basis @ left) * np.sqrt(singular_values) / weight
    embed = vectors @ rotation
    embed /= np.sqrt(np.mean(embed**2, 1, keepdims=True) + 1e-12)
    # 3. the head: weighted least squares
    head = np.linalg.lstsq(weight * embed, weight * log_p, rcond=1e-3)[0].T
    return torch.from_numpy(embed).float(), torch.from_numpy(head).float().contiguous()

# The memory: which tokens followed a context in the training text and earlier in the row. None of it has to
# be learned. Contexts are the last n tokens, for several n; in the text also the word so far plus some of the
# words before it, as in PAQ's word models. At the input, each context in the text and the longest match in
# the row propose a candidate for the next token: the model gets the candidate's embedding, scaled according
# to its confidence class, plus an embedding of that class. At the output, each context in text and row
# predicts a distribution over next tokens, and the model mixes these with its own.
CLASSES = 16  # confidence classes of candidates, per kind of context
# bit widths of the fields packed into integers
KEY_BITS = 36  # hash of a context
TOKEN_BITS = 16
DOCUMENT_BITS = 12  # hash of a document's number, so document counts saturate at 4,096
CHECK_BITS = 16  # low bits of the hash, which tell contexts in the same table slot apart
HASH_FACTOR = -0x61C8864680B583EB  # 2**64 / golden ratio, as int64
WORD_TOKENS = 64  # in a longer word, the order of the tokens after these does not affect its hash
# The text is hashed in chunks of COUNT_CHUNK tokens, each by one thread: an op on all of torch's threads
# waits for the last one, so on a busy machine thousands of them take minutes. For words, a chunk also sees
# the TOKENS_BEFORE_CHUNK tokens before it: only word contexts longer than that are lost at its start.
COUNT_CHUNK = 1 << 18
TOKENS_BEFORE_CHUNK = 1 << 10

def low_bits(bits: int) -> int:
    """A mask of this many low bits."""
    return (1 << bits) - 1

def top_bits(key: Tensor) -> Tensor:
    """int64 -> its KEY_BITS highest bits."""
    return (key >> (64 - KEY_BITS)).bitwise_and_(low_bits(KEY_BITS))

def ngram_keys(tokens: Tensor, orders: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yields (n, hashes (..., T) of the n tokens up to each place) for each n of orders. tokens (..., T)."""
    key = torch.zeros_like(tokens, dtype=torch.int64)
    for n in range(1, max(orders, default=0) + 1):
        key[..., n - 1:].add_(tokens[..., :max(0, tokens.size(-1) - n + 1)])
        key.mul_(HASH_FACTOR)  # modulo 2**64
        if n in orders:
            yield n, top_bits(key)

def word_starts(texts: Sequence[bytes]) -> Tensor:
    """Whether each token begins a word, bool (V,): all do but those whose first byte is a lower-case ASCII
    letter or not ASCII. So digits, punctuation and capitals begin one, and a token without text does, too.
    texts: the bytes of each token."""
    return torch.tensor([not (text[:1].islower() or text[:1] >= b"\x80") for text in texts])

def word_keys(tokens: Tensor, starts: Tensor, masks: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields for each mask the hash of its words at each position of tokens (B, T), and whether these words
    and any that the mask skips all begin within the row, both (B, T). Bit 0 of a mask is the word so far, bit
    k the k-th word before it. Rows are independent. starts: from word_starts()."""
    if not masks:
        return
    begins = starts[tokens]
    row_begins_word = begins[:, :1].clone()
    begins[:, :1] = True
    begins = begins.flatten()
    place = torch.arange(len(begins), device=tokens.device)
    begin = torch.where(begins, place, 0).cummax(0).values
    factors = torch.full((WORD_TOKENS,), HASH_FACTOR, device=tokens.device).cumprod(0)
    terms = (tokens.flatten() + 1) * factors[(place - begin).clamp(max=WORD_TOKENS - 1)]
    sums = terms.cumsum(0)
    so_far = top_bits(sums - (sums - terms)[begin])  # a hash of the word up to here
    word_of = begins.cumsum(0) - 1
    # the hash of each complete word, taken at its last token; no valid key reads the last entry
    slot = torch.where(begins.roll(-1), word_of, len(place))
    whole = so_far.new_zeros(len(place) + 1).scatter_(0, slot, so_far)
    # how many whole words of the row come before this one; -1 in a word that the row's start cuts off
    words_before = word_of.view_as(tokens)
    words_before = words_before - words_before[:, :1] - torch.where(row_begins_word, 0, 1)
    for mask in masks:
        previous = torch.zeros_like(whole)
        for back in range(1, mask.bit_length()):
            if mask >> back & 1:
                previous = (previous + whole.roll(back)) * HASH_FACTOR
        key = previous[word_of]
        if mask & 1:
            key = (key + so_far) * HASH_FACTOR
        yield top_bits(key).view_as(tokens), words_before >= mask.bit_length() - 1

def ngram_pairs(tokens: Tensor, orders: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields for each n of orders, ascending: the hashes of ngram_keys(), and whether the row has n tokens by
    then, both (B, T). tokens (B, T)."""
    for n, key in ngram_keys(tokens, orders):
        enough = torch.ones_like(tokens, dtype=torch.bool)
        enough[:, :n - 1] = False
        yield key, enough

def stacked(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Stacks the hashes and the masks of several kinds of context, each (kinds, B, T)."""
    first, second = zip(*pairs)
    return torch.stack(first), torch.stack(second)

def document_hashes(text: np.ndarray, bos: int) -> np.ndarray:
    """uint16 (n,) -> for each token a hash of its document's number, int16 (n,)."""
    begins = np.flatnonzero(text == bos)
    hashes = (np.arange(len(begins) + 1) * 0x9E3779B1 >> 8 & low_bits(DOCUMENT_BITS)).astype(np.int16)
    return hashes.repeat(np.diff(begins, prepend=0, append=len(text)))

def run_starts(values: np.ndarray) -> np.ndarray:
    """The places (m,) at which runs of equal values (n,) begin."""
    return np.flatnonzero(np.append(True, values[1:] != values[:-1])[:len(values)])

def ngram_lists(seen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """seen (n,): key, next token and document for each token of the text, packed in this order and sorted ->
    the keys (m,), where each key's list begins (m,), and the lists concatenated, in the format of
    NgramCounts.lists, int32 (k,)."""
    pairs = seen[run_starts(seen)] >> DOCUMENT_BITS  # (key, next token), once per document
    begins = run_starts(pairs)
    documents = np.diff(begins, append=len(pairs))  # how many have each pair
    pairs = pairs[begins]
    ranked = documents << TOKEN_BITS | pairs & low_bits(TOKEN_BITS)
    begins = run_starts(pairs >> TOKEN_BITS)
    keys = pairs[begins] >> TOKEN_BITS & low_bits(KEY_BITS)
    sizes = np.diff(begins, append=len(pairs))
    several = sizes > 1
    best = np.maximum.reduceat(ranked, begins)
    left = np.where(ranked == best.repeat(sizes), 0, ranked)
    second = np.maximum.reduceat(left, begins)
    left = left[(left != 0) & (left != second.repeat(sizes))]
    lengths = 1 + several + sizes
    starts = lengths.cumsum() - lengths
    lists = np.empty(lengths.sum(), np.int32)
    first = [
        (starts, sizes << CHECK_BITS | keys & low_bits(CHECK_BITS)),
        (starts[several] + 1, np.add.reduceat(documents, begins)[several]),
        (starts + 1 + several, best),
        (starts[several] + 3, second[several]),
    ]
    rest = np.ones(len(lists), bool)
    for places, values in first:
        lists[places] = values.astype(np.uint32).view(np.int32)
        rest[places] = False
    lists[rest] = left
    return keys, starts, lists

class TextMatches(NamedTuple):
    """What followed each context in the training text; each field is (kinds, B, T) int64."""
    start: Tensor  # where its next tokens begin in NgramCounts.lists
    size: Tensor  # number of next tokens; 0: the text does not have the context
    total: Tensor  # sum of their document counts
    best: Tensor  # documents << TOKEN_BITS | token, for the next token found in the most documents
    second: Tensor  # the same for the runner-up; 0: there is none

class NgramCounts(nn.Module):
    """For each context in the training text, which tokens came next and in how many documents each did. There
    is one table per kind of context (an n, or a word mask): the entry at a context's hash says where the
    context's list begins. A list holds the number of next tokens (16 bits) and a check (16 bits); if there
    are several, the sum of their document counts; then documents << TOKEN_BITS | token for each next token:
    first the two with the most documents, then the others, sorted by token."""
    tables: Tensor  # (kinds, 2**count_bits), int32; 0: no such context
    lists: Tensor  # int32; the lists of each kind of context in turn
    bases: Tensor  # (kinds, 1, 1), int64; a table's entry plus its base is a place in lists
    starts: Tensor  # from word_starts(); without a tokenizer each token is a word

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.cfg = cfg
        self.text: Any = b""  # uint16 (n,)
        self.packed: bytes | bytearray = b""
        self.shift = KEY_BITS  # key >> shift is a place in a table; before count() a table has one entry
        self.most_next = 0  # next tokens in the longest list
        self.orders = cfg.counted_orders()
        self.words = cfg.counted_words()
        kinds = len(self.orders) + len(self.words)
        tables = torch.zeros(kinds, 1, dtype=torch.int32)
        self.register_buffer("tables", tables, persistent=False)
        self.register_buffer("lists", torch.zeros(4, dtype=torch.int32), persistent=False)
        self.register_buffer("bases", torch.zeros(kinds, 1, 1, dtype=torch.int64), persistent=False)
        self.register_buffer("starts", torch.ones(cfg.vocab_size, dtype=torch.bool), persistent=False)

    def count(self, text: np.ndarray) -> None:
        """Makes tables and lists from all training tokens in order, uint16 (n,). Raises Refused."""
        require(2 * len(text) + 8 < 1 << 31,
                f"{len(text)} training tokens are more than n-gram tables hold: MEMORY=0 goes without them")
        require(text.max(initial=0) < self.cfg.vocab_size,
                f"a train shard holds token {text.max(initial=0)}, but vocab_size is {self.cfg.vocab_size}")
        self.text = text
        self.most_next = 0
        self.packed = b""
        self.shift = KEY_BITS - self.cfg.count_bits
        tables = np.empty((len(self.tables), 1 << self.cfg.count_bits), np.int32)
        # Each occurrence adds at most two entries. Pages that are never written take no memory.
        lists = np.empty(2 * len(tables) * len(text) + 8, np.int32)
        lists[:4] = 0  # what table entry 0 (no such context) points to
        end = 4
        documents = torch.from_numpy(document_hashes(text, self.cfg.bos_id))
        threads = torch.get_num_threads()
        try:
            with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                occurrences = self.occurrences(torch.from_numpy(text), documents, pool.map)
                for i, table in enumerate(tables):
                    torch.from_numpy(table).zero_()  # unlike np.zeros, uses all threads and huge pages
                    packed = next(occurrences)
                    torch.sort(packed, out=(packed, torch.empty(0, dtype=torch.int64)))  # in place
                    seen = packed.numpy()
                    cuts = seen.searchsorted(np.arange(-31, 32) << 58)  # parts small enough for the cache
                    base = end - 4
                    self.bases[i] = base
                    for made in pool.map(ngram_lists, np.split(seen, cuts)):
                        end += self.add(table, lists[end:], made, end - base)
                    del packed, seen
        finally:
            torch.set_num_threads(threads)  # also of threads that begin later
        lists[end:end + 4] = 0
        self.tables = torch.from_numpy(tables).to(self.tables.device)
        self.lists = torch.from_numpy(lists[:end + 4]).to(self.lists.device)

    def occurrences(self, tokens: Tensor, documents: Tensor,
                    mapped: Callable[..., Iterable[Any]] = map) -> Iterator[Tensor]:
        """Yields for each kind of context, masks of words first, one int64 per occurrence in the text: its
        key, the next token and the document, packed. tokens (n,), documents (n,) from document_hashes().
        mapped: map(), or that of a pool of threads."""
        n = len(tokens) - 1

        def pack(key: Tensor, begin: int, end: int) -> Tensor:
            low = (tokens[begin + 1:end + 1].int() << DOCUMENT_BITS).add_(documents[begin:end])
            return (key << (TOKEN_BITS + DOCUMENT_BITS)).add_(low)

        def by_words(begin: int) -> list[Tensor]:
            first = max(0, begin - TOKENS_BEFORE_CHUNK)
            end = min(n, begin + COUNT_CHUNK)
            skip = begin - first
            part = tokens[None, first:end].int()
            return [pack(key[0, skip:], begin, end)[enough[0, skip:]]
                    for key, enough in word_keys(part, starts, self.words)]

        def by_order(order: int, packed: Tensor, begin: int) -> None:
            end = min(len(packed), begin + COUNT_CHUNK)
            _, key = next(ngram_keys(tokens[begin:end + order - 1].int(), (order,)))
            packed[begin:end] = pack(key[order - 1:], begin + order - 1, end + order - 1)

        found = [torch.empty(max(0, n), dtype=torch.int64) for _ in self.words]
        filled = [0] * len(found)
        starts = self.starts.cpu()
        wave = 16 * COUNT_CHUNK  # finished chunks that wait to be copied take memory
        for begin in range(0, n, wave):
            for parts in mapped(by_words, range(begin, min(n, begin + wave), COUNT_CHUNK)):
                for i, packed in enumerate(parts):
                    found[i][filled[i]:filled[i] + len(packed)] = packed
                    filled[i] += len(packed)
        while found:
            yield found.pop(0)[:filled.pop(0)]
        for order in self.orders:
            packed = torch.empty(max(0, n - order + 1), dtype=torch.int64)
            for _ in mapped(partial(by_order, order, packed), range(0, len(packed), COUNT_CHUNK)):
                pass  # each call fills its part of packed
            yield packed

    def add(self, table: np.ndarray, lists: np.ndarray, made: tuple[np.ndarray, ...], begin: int) -> int:
        """Copies the output of ngram_lists() to the start of lists and records in table where each begins.
        begin: the index of lists[0], relative to the table's base. Returns the number of entries copied."""
        keys, starts, part = made
        lists[:len(part)] = part
        table[keys >> self.shift] = begin + starts
        sizes = part[starts].view(np.uint32) >> CHECK_BITS
        self.most_next = max(self.most_next, int(sizes.max(initial=0)))
        return len(part)

    def keys(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The hash of each kind of context at each place of tokens (B, T), and whether the row has enough
        tokens for it, both (kinds, B, T)."""
        return stacked([*word_keys(tokens, self.starts, self.words), *ngram_pairs(tokens, self.orders)])

    def forward(self, key: Tensor, enough: Tensor) -> TextMatches:
        """What follows the contexts in the text. key, enough: from keys()."""
        table = torch.arange(len(key), device=key.device).view(-1, 1, 1)
        entry = (table << (KEY_BITS - self.shift)) + (key >> self.shift)
        start = self.tables.view(-1)[entry].long()
        there = (start > 0) & enough
        start = torch.where(there, start + self.bases, 0)
        head = self.lists[start].long()
        there = there & (head & low_bits(CHECK_BITS) == key & low_bits(CHECK_BITS))
        size = torch.where(there, head >> CHECK_BITS & low_bits(TOKEN_BITS), 0)
        several = size > 1
        first = start + torch.where(several, 2, 1)
        best = torch.where(size > 0, self.lists[first], 0).long()
        total = torch.where(several, self.lists[start + 1], best >> TOKEN_BITS).long()
        second = torch.where(several, self.lists[first + 1], 0).long()
        return TextMatches(first, size, total, best, second)

    def documents_with(self, found: TextMatches, targets: Tensor) -> Tensor:
        """How many documents have the target (B, T) after the context, int64 (kinds, B, T)."""
        documents = torch.zeros_like(found.size)
        for ranked in (found.best, found.second):
            same = ranked & low_bits(TOKEN_BITS) == targets
            documents = torch.where(same, (ranked >> TOKEN_BITS).maximum(documents), documents)
        # Binary search among the others, which are sorted by token: on a CPU only where needed; on a GPU
        # everywhere, because finding out where would make the host wait for the device.
        needed = (found.size > 2) & (documents == 0)
        where: Any = slice(None) if needed.is_cuda else needed.nonzero(as_tuple=True)
        target = targets.expand_as(needed)[where]
        low = (found.start + found.size.clamp(max=2))[where]
        high = end = (found.start + found.size)[where]
        for _ in range(self.most_next.bit_length()):
            middle = (low + high) >> 1
            before = (self.lists[middle] & low_bits(TOKEN_BITS) < target) & (low < high)
            low = torch.where(before, middle + 1, low)
            high = torch.where(before, high, middle)
        ranked = torch.where(low < end, self.lists[low], 0).long()
        same = ranked & low_bits(TOKEN_BITS) == target
        documents[where] = torch.where(same, ranked >> TOKEN_BITS, documents[where])
        return documents

    def stored(self) -> dict[str, Tensor]:
        """What files hold: the text, uint16, compressed by zlib, and which tokens begin a word."""
        if not len(self.tables):
            return {}
        self.packed = self.packed or bytearray(zlib.compress(self.text))
        return {"counts.text": torch.frombuffer(self.packed, dtype=torch.uint8),
                "counts.starts": self.starts.cpu().byte()}

    def load(self, packed: Tensor, starts: Tensor) -> None:
        """Counts the text that a file holds, uint8 (n,). starts: uint8 (V,). Raises Refused."""
        stream = zlib.decompressobj()
        text = np.frombuffer(bytearray(stream.decompress(packed.numpy(), 1 << 32)), np.uint16)
        require(packed.dtype == torch.uint8 and stream.eof and not stream.unused_data, "no counted text")
        require(text.max(initial=0) < self.cfg.vocab_size, "another vocabulary")
        require(starts.dtype == torch.uint8 and starts.shape == self.starts.shape, "another vocabulary")
        self.starts.copy_(starts)
        self.count(text)

def without_own_document(found: TextMatches, targets: Tensor, documents: Tensor) -> TextMatches:
    """Leaves the row's own document out of the matches, for training: in it each target (B, T) follows
    its context. Only the target's count drops; other tokens that follow the context elsewhere in that
    document still count. documents: from documents_with()."""
    one_document = 1 << TOKEN_BITS
    size = found.size - (documents == 1).long()
    total = found.total - (documents > 0).long()
    best = found.best
    second = found.second
    best = torch.where(best & low_bits(TOKEN_BITS) == targets, best - one_document, best)
    second = torch.where(second & low_bits(TOKEN_BITS) == targets, second - one_document, second)
    return TextMatches(found.start, size, total, best.maximum(second), best.minimum(second))

def text_candidates(found: TextMatches) -> tuple[Tensor, Tensor, Tensor]:
    """The best next token of each context -> (is there one, the token, its class), each (kinds, B, T)."""
    documents = found.best >> TOKEN_BITS
    share = documents / found.total
    sure = 4 * limits_reached(documents, (2, 4, 16)) + limits_reached(share, (0.4, 0.7, 0.999))
    return documents > 0, found.best & low_bits(TOKEN_BITS), sure

class CountingModel(Model):
    """A model with NgramCounts as `counts`. Counting is on the clock; its files hold the counted text."""
    counts: NgramCounts

    def build(self, run: "Run", fresh: bool) -> bool:
        """Counts the contexts of the training text. Raises Refused if there is no memory for it."""
        if not len(self.counts.tables):
            return False
        run.log("counting n-grams")
        began = time.perf_counter()
        if run.data.tokenizer:  # without one each token is a word
            self.counts.starts.copy_(word_starts(texts_of_tokens(self.counts.cfg, run.data.tokenizer)))
        try:
            # np.array: one file is open at a time
            text = np.concatenate([np.array(open_shard(shard.path)) for shard in run.loader.shards])
            self.counts.count(text)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or re.search("allocate|bad_alloc", str(error)):
                raise Refused("no memory left to count n-grams: MEMORY=0 goes without them") from None
            raise
        run.log(f"n-grams of {run.loader.total} tokens counted in {time.perf_counter() - began:.1f} s")
        return True

    def state(self) -> dict[str, Tensor]:
        return self.counts.stored()

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        if len(self.counts.tables):
            self.counts.load(tensors.pop("counts.text"), tensors.pop("counts.starts"))

def limits_reached(x: Tensor, limits: tuple[float, ...]) -> Tensor:
    """For each number, how many of the rising limits it reaches, int64, any shape."""
    reached = torch.zeros_like(x, dtype=torch.int64)
    for limit in limits:
        reached += x >= limit
    return reached

class RowMatches(NamedTuple):
    """What followed the last n tokens earlier in the row, each (orders, B, T) int64."""
    by_ngram: Tensor  # places of the row, sorted by n-gram, then by place
    rank: Tensor  # how many occurrences of the same n-gram come before, in that order
    total: Tensor  # how often the n-gram came before
    size: Tensor  # number of different tokens that followed it
    next_count: Tensor  # how often the token after this position had followed it before
    last: Tensor  # the token that followed it most recently
    repeated: Tensor  # 1: the same token followed the last two occurrences

def run_ranks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted values (..., T) -> where each one's run of equal values begins, and its rank there, (..., T)."""
    place = torch.arange(values.size(-1), device=values.device)
    begins = F.pad(values[..., 1:] != values[..., :-1], (1, 0), value=True)
    start = torch.where(begins, place, 0).cummax(-1).values
    return start, place - start

def unsort(x: Tensor, order: Tensor) -> Tensor:
    """Undoes x.gather(-1, order)."""
    return torch.empty_like(x).scatter_(-1, order, x)

def row_matches(key: Tensor, enough: Tensor, after: Tensor) -> RowMatches:
    """key, enough: from ngram_pairs(), stacked. after (B, T): the token after each position. If a row's
    last one is unknown, any value will do: only next_count depends on it."""
    place = torch.arange(key.size(-1), device=key.device)
    key = torch.where(enough, key, -1 - place)  # too few tokens: a key of its own
    pair, order = (key * (1 << TOKEN_BITS) + after).sort(dim=-1, stable=True)
    _, rank = run_ranks(pair)
    count = unsort(rank, order)
    key, order = key.sort(dim=-1, stable=True)
    start, rank = run_ranks(key)
    # 1 where the token follows the n-gram for the first time
    new = torch.where(count == 0, 1, 0).gather(-1, order)
    seen = new.cumsum(-1) - new
    size = seen - seen.gather(-1, start)
    follows = after.expand_as(order).gather(-1, order)
    last = follows.roll(1, -1)
    repeated = torch.where((rank > 1) & (last == follows.roll(2, -1)), 1, 0)
    total = unsort(rank, order)
    size = unsort(size, order)
    last = unsort(last, order)
    return RowMatches(order, rank, total, size, count, last, unsort(repeated, order))

def row_candidate(found: RowMatches) -> tuple[Tensor, Tensor, Tensor]:
    """Predicts the token that followed the longest n-gram match earlier in this row -> (is there a match, the
    token, its class), each (1, B, T). Classes of an order: 0: the n-gram occurred once before; 1: more often,
    and the last two times different tokens followed; 2: the same token did."""
    sure = torch.where(found.total > 1, 1 + found.repeated, 0)
    sure += CLASSES * torch.arange(len(sure), device=sure.device).view(-1, 1, 1)
    matches = (found.total > 0).sum(0, keepdim=True)  # where an order matches, shorter ones match, too
    longest = (matches - 1).clamp(min=0)
    return matches > 0, found.last.gather(0, longest), sure.gather(0, longest)

def token_losses(x: Tensor, head: Tensor, targets: Tensor, cap: float) -> Tensor:
    """Cross-entropy of each target in nats (B, T). x (B, T, C), head (V, C), targets (B, T). cap: see
    softcap()."""
    logits = softcap(linear(x, head).float(), cap)
    return logits.logsumexp(-1) - logits.gather(-1, targets[..., None])[..., 0]

# Confidence class of an n-gram's distribution, by how often the n-gram occurred (its `total`, which in the
# text counts documents) and how many distinct tokens followed it; 0: no match.
TEXT_LIMITS = (2, 3, 6, 16, 64)  # how often it occurred
ROW_LIMITS = (2, 3, 5, 9, 20)
SPREADS = 6  # classes of how varied the next tokens are; text_class() has 4
MIX_CLASSES = 1 + SPREADS * (1 + len(TEXT_LIMITS))

def text_class(found: TextMatches) -> Tensor:
    """The class of each context's match in the text (kinds, B, T)."""
    few = limits_reached(found.size, (2, 3))
    spread = few + torch.where((few == 2) & (found.size * 4 > found.total), 1, 0)
    sure = 1 + SPREADS * limits_reached(found.total, TEXT_LIMITS) + spread
    return torch.where(found.total > 0, sure, 0)

def row_class(found: RowMatches) -> Tensor:
    """The class of each order's match in the row (orders, B, T)."""
    several = limits_reached(found.size, (2,))
    spread = several + torch.where((several == 1) & (found.size * 2 > found.total), 1, 0)
    sure = 1 + SPREADS * limits_reached(found.total, ROW_LIMITS) + 2 * spread + found.repeated
    return torch.where(found.total > 0, sure, 0)

def concat_ranges(starts: Tensor, sizes: Tensor) -> Tensor:
    """starts[i], starts[i] + 1, ... (sizes[i] of them) for each i, one after another. Both (n,)."""
    ends = sizes.cumsum(0)
    total = int(ends[-1])
    first = (starts - ends + sizes).repeat_interleave(sizes, output_size=total)
    return first + torch.arange(total, device=sizes.device)

def in_parts(sizes: Tensor, most: int = 1 << 22) -> list[slice]:
    """Slices of sizes (n,), each summing to about `most` tokens, so that memory stays bounded. The last limit
    is at least the sum of sizes, so none is left out."""
    ends = sizes.cumsum(0)
    limits = torch.arange(most, int(ends[-1]) + most, most, device=sizes.device)
    cuts = torch.searchsorted(ends, limits, right=True).tolist()
    return [slice(low, high) for low, high in zip([0, *cuts], cuts) if low < high]

def add_text_shares(mixed: Tensor, found: TextMatches, lists: Tensor, gates: Tensor) -> None:
    """Adds the distributions of the training text, each times its gate (kinds, B, T), to mixed (B, T, V)."""
    V = mixed.size(-1)
    first = torch.arange(mixed.numel() // V, device=mixed.device) * V
    for start, size, total, gate in zip(found.start, found.size, found.total, gates):
        share = (gate / total.clamp(min=1)).flatten()
        start = start.flatten()
        size = size.flatten()
        for part in in_parts(size):
            n = size[part]
            listed = lists[concat_ranges(start[part], n)]
            shares = share[part].repeat_interleave(n) * (listed >> TOKEN_BITS)
            place = first[part].repeat_interleave(n) + (listed & low_bits(TOKEN_BITS))
            mixed.view(-1).index_add_(0, place, shares)

def add_row_shares(mixed: Tensor, found: RowMatches, tokens: Tensor, gates: Tensor) -> None:
    """Adds the distributions of the row, tokens (B, T), each times its gate."""
    B, T, V = mixed.shape
    row = torch.arange(B, device=tokens.device)[:, None] * T
    column = torch.arange(T, device=tokens.device)
    for order, rank, gate in zip(found.by_ngram, found.rank, gates):
        follows = tokens.roll(-1, 1).gather(-1, order).flatten()
        size = rank.flatten()
        start = (row + column - rank).flatten()  # where the earlier occurrences begin in `order`
        here = (row + order).flatten()
        share = gate.flatten()[here] / size.clamp(min=1)
        for part in in_parts(size):
            n = size[part]
            token = follows[concat_ranges(start[part], n)]
            place = (here[part] * V).repeat_interleave(n) + token
            mixed.view(-1).index_add_(0, place, share[part].repeat_interleave(n))

def log_gates(scores: Tensor, classes: Tensor, class_scores: Tensor) -> Tensor:
    """scores (B, T, 1 + n), computed from activations, and classes (B, T, n) -> log gates (B, T, 1 + n): the
    model's own, then those of the n distributions; the gates sum to 1. class_scores (n * MIX_CLASSES,).
    Class 0, no match, is masked out."""
    of_source = MIX_CLASSES * torch.arange(classes.size(-1), device=classes.device)
    by_class = torch.where(classes > 0, class_scores.float()[of_source + classes], -math.inf)
    return (scores + F.pad(by_class, (1, 0))).log_softmax(-1)

def candidate_rows(found: list[tuple], vocab_size: int, classes: int) -> Tensor:
    """Row numbers (B, T, 2, sources) in the tables of candidates and of classes. Each source has rows of its
    own; the last row means no candidate. found: from text_candidates() and row_candidate(), each
    (there, token, class) of shape (n, B, T). classes: how many a source has."""
    there = torch.cat([parts[0] for parts in found])
    token = torch.cat([parts[1] for parts in found])
    sure = torch.cat([parts[2] for parts in found])
    sources = len(there)
    source = torch.arange(sources, device=there.device).view(-1, 1, 1)
    token = torch.where(there, source * vocab_size + token, sources * vocab_size)
    sure = torch.where(there, source * classes + sure, sources * classes)
    return torch.stack((token, sure)).permute(2, 3, 0, 1).contiguous()

def embed_candidates(rows: Tensor, embed: Tensor, class_embed: Tensor, class_scale: Tensor) -> Tensor:
    """The sum (B T, C) of the candidates' embeddings, scaled by class, and the classes' embeddings. rows
    (B, T, 2, sources): from candidate_rows(); embed and class_embed (n, C), class_scale (n,)."""
    token, sure = rows.unbind(2)
    token = token.flatten(0, 1)
    sure = sure.flatten(0, 1)
    if embed.is_cuda:  # torch 2.11 has no backward of a weighted embedding_bag in bf16 there (pytorch#185808)
        # float() sums a scale's gradient, thousands of terms, in fp32: in bf16 a toy's was 8.7 % off
        scaled = (F.embedding(token, embed) * class_scale.float()[sure][..., None]).sum(1)
    else:  # without a copy of the rows
        scaled = F.embedding_bag(token, embed, mode="sum", per_sample_weights=class_scale[sure])
    return scaled + F.embedding_bag(sure, class_embed, mode="sum")

class FusedTokenLosses(torch.autograd.Function):
    """token_losses() that turns the logits into their gradient in forward(), as FusedLoss does. x (N, C),
    head (V, C), targets (N,) -> (N,)."""
    @staticmethod
    def forward(ctx, x: Tensor, head: Tensor, targets: Tensor, cap: float) -> Tensor:
        head = head.to(x.dtype)
        one = x.new_ones(1, dtype=torch.float32)
        losses, grad = row_losses(x @ head.T, targets[:, None], one, (cap, 0.0, 0.0), 1.0, x.dtype)
        ctx.save_for_backward(grad, x, head)
        return losses

    @staticmethod
    def backward(ctx, grad_losses: Tensor) -> tuple:
        grad, x, head = ctx.saved_tensors
        grad = grad * grad_losses[:, None].to(grad.dtype)
        return grad @ head, (grad.T @ x).float(), None, None

def fused_token_losses(x: Tensor, head: Tensor, targets: Tensor, cap: float) -> Tensor:
    """token_losses() by FusedTokenLosses in compiled steps."""
    if not can_fuse((cap, 0.0, 0.0)):
        return token_losses(x, head, targets, cap)
    return FusedTokenLosses.apply(x.flatten(0, 1), head, targets.flatten(), cap).view(targets.shape)

def score_part(model: Model, cfg: Tiny, data: "Data", team: "Team", log: Logger, step: int) -> dict:
    """Logs the mean loss of rows with about val_part tokens, evenly spaced over val and scored as in the
    final evaluation; ./run.sh sends it to LOGGER."""
    tokens = data.val[:1 + (cfg.val_tokens or len(data.val))]
    rows = evaluation_rows(cfg, len(tokens), cfg.eval_stride)
    rows = rows[::max(1, len(tokens) // cfg.val_part)]
    nats = plain_nats(model, cfg, tokens, team, rows=rows)
    targets = sum([1 + last - first for _, first, last in rows])
    loss = all_reduce(torch.tensor(nats.sum())).item() / targets
    log(f"val_part step:{step} val_loss:{loss:.4f}", kind="val_part", step=step, val_loss=loss)
    return {}

@dataclass(frozen=True)
class TinyKernels(WindowKernels):
    """Tiny's functions that have faster versions."""
    losses: Callable = token_losses

class TinyContext(NamedTuple):
    """What the forward pass needs besides tokens and weights."""
    rope: tuple[Tensor, Tensor]  # cos and sin of every position, each (T, 1, head_dim / 2)
    # {L or S: how many earlier tokens a token sees in such a layer}, see kernel_windows()
    windows: dict[str, int | Tensor]
    dtype: torch.dtype  # of activations

class Mixture(NamedTuple):
    """What the log-probabilities of a mixture are made of. Scorers pick tokens out of what hidden() returns,
    so it returns one tensor: the three side by side (..., C + 1 + V)."""
    activations: Tensor  # the last ones, normalized, fp32 (..., C)
    log_gate: Tensor  # log of the gate of the model's own distribution (..., 1)
    others: Tensor  # sum of the other distributions, each times its gate (..., V)

class TinyBlock(nn.Module):
    """Attention and MLP, pre-norm, on a learned mix of the residual stream and the embedding. kind: the
    layer's letter in window_pattern."""
    def __init__(self, cfg: Tiny, kind: str) -> None:
        super().__init__()
        C = cfg.model_dim
        H = cfg.num_heads
        self.head_dim = C // H
        self.attends = kind != "-"
        self.key_offset = cfg.key_offset and kind == "L"
        self.query = parameter(C, C, on=self.attends)
        self.attn_proj = parameter(C, C, on=self.attends)
        self.key = parameter(C, C, on=self.attends)
        self.value = parameter(C, C, on=self.attends)
        self.qk_gain = parameter(H, on=self.attends)
        self.fc = parameter(cfg.mlp_mult * C, C)
        self.mlp_proj = parameter(C, cfg.mlp_mult * C)
        self.resid_lambda = parameter(C)
        self.x0_lambda = parameter(C)
        self.layer_scale = parameter(2, C)  # row 0 scales attention's output, row 1 the MLP's

    def forward(self, x: Tensor, x0: Tensor, value_embed: Tensor | None, mask: Mask,
                context: TinyContext) -> Tensor:
        """x (B, T, C), the residual stream, and x0 (B, T, C), the embedding -> the residual stream.
        value_embed (B, T, C), in layers that have one."""
        embedding = self.x0_lambda.to(x.dtype) * x0
        x = self.resid_lambda.to(x.dtype) * x + embedding
        attn_scale, mlp_scale = self.layer_scale.to(x.dtype)
        if self.attends:
            x = x + attn_scale * self.attend(rms_norm(x), value_embed, mask, context)
        return x + mlp_scale * mlp(rms_norm(x), self.fc, self.mlp_proj, self.kernels.linear)

    def attend(self, h: Tensor, value_embed: Tensor | None, mask: Mask, context: TinyContext) -> Tensor:
        """h (B, T, C), normalized -> what attention adds to the residual stream (B, T, C)."""
        product = self.kernels.linear
        q, k, v = project_heads(h, self.head_dim, product, self.query, self.key, self.value)
        if value_embed is not None:
            v = v + split_heads(value_embed, self.head_dim)
        # expanded over tokens, so that one kernel makes the gradients of rms_norm and of the gain
        gain = (self.qk_gain.float() * self.head_dim**-0.5)[:, None].expand(*q.shape[:3], 1)
        q = rotate((rms_norm(q) * gain).to(k.dtype), *context.rope)
        k = rotate(rms_norm(k), *context.rope)
        if self.key_offset:
            k = key_offset(k.unflatten(-1, (2, -1))).flatten(-2)
        y = attend_heads(q, k, v, mask, self.kernels.attention)
        return product(y.flatten(2), self.attn_proj)

class TinyModel(CountingModel):
    """The embedding includes bigrams and candidates. The second half of the blocks adds the outputs of the
    first half in reverse order (U-Net). The output mixes the model's own next-token distribution with those
    of the memory."""
    def __init__(self, cfg: Tiny, kernels: TinyKernels = TinyKernels()) -> None:
        super().__init__()
        V = cfg.vocab_size
        C = cfg.model_dim
        N = cfg.num_layers
        self.cfg = cfg
        self.kinds = per_layer(cfg.window_pattern, N)
        self.tables = per_layer(cfg.value_embed_layers, N)
        self.embed = parameter(V, C)
        self.head = parameter(V, C)
        self.bigram_embed = parameter(cfg.bigram_rows, C, on=cfg.bigram_rows)
        self.counts = NgramCounts(cfg)
        self.classes = CLASSES * len(cfg.copy_orders)  # per source of candidates
        counted = len(self.counts.tables)
        matched = len(cfg.matched_orders())
        sources = counted + min(1, matched)
        self.candidate_embed = parameter(sources * V + 1, C, on=sources)  # the last row: no candidate
        self.class_embed = parameter(sources * self.classes + 1, C, on=sources)
        self.class_scale = parameter(sources * self.classes + 1, on=sources)
        self.half = N // 2 if cfg.unet_skips else 0
        self.skip_weights = parameter(self.half, C, on=self.half)
        others = 0  # distributions besides the model's own
        if cfg.mixture:
            others = counted + matched
        self.gate_weight = parameter(1 + others, C, on=others)
        self.gate_class = parameter(others * MIX_CLASSES, on=others)
        self.gate_matches = parameter((1 + counted) * (1 + matched), 1 + others, on=others)
        self.blocks = nn.ModuleList([TinyBlock(cfg, kind) for kind in self.kinds])
        self.value_embeds = nn.ParameterList([parameter(V, C) for _ in range(max(self.tables))])
        self.use(kernels)

    def build(self, run: "Run", fresh: bool) -> bool:
        """Counts contexts; in a fresh run, embedding and head start from the bigrams of the first shard."""
        counted = super().build(run, fresh)
        cfg = self.cfg
        V = cfg.vocab_size
        if not fresh or not cfg.bigram_init:
            return counted
        if V > MOST_BIGRAM_VOCAB:
            run.log(f"init of embed is random, that of head zero: no bigrams are counted for vocab_size {V}, "
                    f"only up to {MOST_BIGRAM_VOCAB}")
            return counted
        began = time.perf_counter()
        counts = bigram_counts(open_shard(run.loader.shards[0].path)[:1 << 26], V)
        embed, head = factorize_bigrams(counts, cfg.model_dim, cfg.seed)
        values = run.team.share(dict(embed=embed, head=head))
        for bank in run.optimizer.banks:
            if bank.names[0] in values:
                bank.load(values)
        run.log(f"init of embed and head made from bigrams in {time.perf_counter() - began:.1f} s")
        return True

    def context(self, T: int, device: torch.device, dtype: torch.dtype = torch.float32,
                stage: WindowStage | None = None) -> TinyContext:
        cfg = self.cfg
        rope = rope_tables(T, rope_spectrum(cfg.model_dim // cfg.num_heads, cfg.rope_base), device, dtype)
        windows = kernel_windows(cfg, self.kinds, stage, T, device, self.kernels.window)
        return TinyContext(rope, windows, dtype)

    def compiled_hidden(self) -> Callable:
        return partial(self.hidden, activations=partial(compile_once(TinyModel.activations), self))

    def hidden(self, tokens: Tensor, context: TinyContext, activations: Callable | None = None) -> Tensor:
        """tokens (B, T) -> last activations, normalized (B, T, C); with a mixture a Mixture as one tensor.
        activations: None or self.activations(), compiled."""
        activations = activations or self.activations
        text, row = self.matches(tokens, tokens.roll(-1, 1))
        x = activations(tokens, context, *self.candidate_rows(text, row))
        if self.gate_weight is None:
            return x
        gates = self.gates(x, *self.match_classes(text, row))
        others = self.other_distributions(tokens, text, row, gates[..., 1:].exp())
        return torch.cat(Mixture(x.float(), gates[..., :1], others), -1)

    def activations(self, tokens: Tensor, context: TinyContext, *candidates: Tensor) -> Tensor:
        """tokens (B, T) -> last activations, normalized (B, T, C). candidates: [] or [candidate_rows()]."""
        masks = layer_masks(context.windows, tokens, None, self.kernels.window_mask)
        x = x0 = self.embedded(tokens, candidates, context.dtype)
        outputs = []
        for i, block in enumerate(self.blocks):
            if self.half <= i < 2 * self.half:
                x = x + self.skip_weights[i - self.half].to(x.dtype) * outputs[2 * self.half - 1 - i]
            table = self.tables[i]
            value_embed = None
            if block.attends and table:
                value_embed = F.embedding(tokens, self.value_embeds[table - 1]).to(x.dtype)
            x = block(x, x0, value_embed, masks.get(self.kinds[i]), context)
            outputs.append(x)
        return rms_norm(x)

    def embedded(self, tokens: Tensor, candidates: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """tokens (B, T) -> embedding of each token, its bigram and its candidates, normalized (B, T, C)."""
        x = F.embedding(tokens, self.embed).to(dtype)
        if self.bigram_embed is not None:
            x = x + F.embedding(bigram_ids(tokens, self.cfg.bigram_rows), self.bigram_embed).to(dtype)
        if candidates:
            added = embed_candidates(candidates[0], self.candidate_embed, self.class_embed, self.class_scale)
            x = x + added.view_as(x).to(dtype)
        return rms_norm(x)

    def matches(self, tokens: Tensor, after: Tensor) -> tuple[TextMatches | None, RowMatches | None]:
        """Looks up the contexts of each place of tokens (B, T), in the training text and in the row.
        after: see row_matches()."""
        matched = self.cfg.matched_orders()
        text = self.counts(*self.counts.keys(tokens)) if len(self.counts.tables) else None
        row = row_matches(*stacked(ngram_pairs(tokens, matched)), after) if matched else None
        return text, row

    def candidate_rows(self, text: TextMatches | None, row: RowMatches | None) -> list[Tensor]:
        """[rows of candidate_embed and class_embed (B, T, 2, sources)], or []."""
        found = []
        if text:
            found.append(text_candidates(text))
        if row:
            found.append(row_candidate(row))
        return [candidate_rows(found, self.cfg.vocab_size, self.classes)] if found else []

    def match_classes(self, text: TextMatches | None, row: RowMatches | None) -> tuple[Tensor, Tensor]:
        """The class of each distribution (B, T, n), and the row (B, T) of gate_matches that encodes how many
        kinds of context match in the text and how many n-grams in the row."""
        classes = []
        matches: Any = 0
        if text:
            classes.append(text_class(text))
            matches = (text.total > 0).sum(0)
        if row:
            classes.append(row_class(row))
            matches = matches * (1 + len(row.total)) + (row.total > 0).sum(0)
        return torch.cat(classes).permute(1, 2, 0).contiguous(), matches

    def gates(self, x: Tensor, classes: Tensor, matches: Tensor) -> Tensor:
        """log_gates() from the last activations (B, T, C) and match_classes(), (B, T, 1 + n)."""
        scores = linear(x, self.gate_weight).float() + F.embedding(matches, self.gate_matches)
        return log_gates(scores, classes, self.gate_class)

    def other_distributions(self, tokens: Tensor, text: TextMatches | None, row: RowMatches | None,
                            gates: Tensor) -> Tensor:
        """The sum (B, T, V) of all distributions but the model's own, each times its gate (B, T, n)."""
        mixed = torch.zeros(*tokens.shape, self.cfg.vocab_size, device=tokens.device)
        gates = gates.permute(2, 0, 1)
        if text:
            add_text_shares(mixed, text, self.counts.lists, gates)
        if row:
            add_row_shares(mixed, row, tokens, gates[-len(row.total):])
        return mixed

    def candidates(self, tokens: Tensor, targets: Tensor) -> list[Tensor]:
        """What forward() takes besides tokens and targets (B, T), which are rows of the training text."""
        return self.target_inputs(tokens, targets, of_training=True)

    def target_inputs(self, tokens: Tensor, targets: Tensor, of_training: bool = False) -> list[Tensor]:
        """[candidate_rows(); with a mixture the probability of the target in each distribution (B, T, n), and
        match_classes()]. of_training: see without_own_document()."""
        text, row = self.matches(tokens, targets)
        shares = []
        if text:
            documents = self.counts.documents_with(text, targets)
            if of_training:
                text = without_own_document(text, targets, documents)
                documents = (documents - 1).clamp(min=0)
            shares.append(documents / text.total.clamp(min=1))
        if row:
            shares.append(row.next_count / row.total.clamp(min=1))
        inputs = self.candidate_rows(text, row)
        if self.gate_weight is not None:
            inputs += [torch.cat(shares).permute(1, 2, 0).contiguous(), *self.match_classes(text, row)]
        return inputs

    def logits(self, x: Tensor) -> Tensor:
        """x: from hidden(). With a mixture these are log-probabilities, since logits cannot be mixed."""
        if self.gate_weight is None:
            return super().logits(x)
        mixture = Mixture(*x.split((self.cfg.model_dim, 1, self.cfg.vocab_size), -1))
        own = super().logits(mixture.activations).log_softmax(-1)
        return torch.logaddexp(own + mixture.log_gate, mixture.others.log())

    def forward(self, tokens: Tensor, targets: Tensor, context: TinyContext, *inputs: Tensor) -> Tensor:
        """tokens and targets (B, T) -> mean cross-entropy in nats. inputs: from candidates(), in training."""
        inputs = inputs or tuple(self.target_inputs(tokens, targets))
        if self.gate_weight is None:
            x = self.activations(tokens, context, *inputs)
            return self.kernels.loss(x, self.head, targets, self.cap())
        rows, shares, classes, matches = inputs
        x = self.activations(tokens, context, rows)
        # log-probability of the target
        own = -self.kernels.losses(x, self.head, targets, self.cfg.logit_softcap)
        gates = self.gates(x, classes, matches)
        others = (gates[..., 1:].exp() * shares).sum(-1)
        mixture = torch.logaddexp(gates[..., 0] + own, (others + 1e-30).log())
        # Where n-grams predict well, the mixture passes almost no gradient to the model's own softmax, which
        # would stay untrained. So add own_loss times its cross-entropy for the gradient only: its detached
        # value is subtracted again, so that train_loss is the mixture's.
        own_loss = -self.cfg.own_loss * own.mean()
        return own_loss - own_loss.detach() - mixture.mean()

# ---------- golf and golf_plus: what both use
def nesterov_of_sum(state: UpdateState) -> Tensor:
    """Nesterov momentum (N, R, C); the first moment, a decaying sum of gradients, changes in place."""
    grad = state.grad.to(state.p.dtype) * state.grad_scale
    state.first.mul_(state.momentum).add_(grad)
    return grad + state.momentum * state.first

class Spans:
    """Rows of a step are cut from consecutive spans of the stream, which run on across shards and start over
    at its end. A span holds one token more than it trains on; its rows overlap by one token."""
    SPANS = 8  # per step, at most: one for each rank of the public script

    def plan(self, position: int, n: int, T: int, doc_len: int = 0) -> tuple[list, int]:
        """Plans a step of n rows, each of T tokens and a last target, that begins at this token of the stream
        -> (each row's pieces [(start, length)], the position after the step)."""
        spans = math.gcd(self.SPANS, n)
        rows_per_span = n // spans
        span_tokens = rows_per_span * T + 1  # the last one is only a target
        rows = []
        for span in range(spans):
            begin = position + span * span_tokens
            rows += [[(begin + row * T, T + 1)] for row in range(rows_per_span)]
        return rows, position + spans * span_tokens

# ---------- golf: lowest val_bpb of a 16,000,000-byte artifact after 600 s on 8xH100
# The public record parameter-golf 2026-03-19_TrainingOptSeq4096: val_bpb 1.2014 (mean of three seeds), 8,394
# steps of 71.47 ms.
@dataclass(frozen=True)
class Golf(Config):
    """Nine layers with grouped-query attention, U-Net skips, a tied embedding and Muon. A token sees all
    earlier tokens of its row, those of other documents too."""
    preset: str = option("golf", "the recipe", model=True)
    # size
    num_layers: int = option(9, "blocks; the second half adds the outputs of the first", 1, 1000, model=True)
    model_dim: int = option(512, "width of the residual stream", 2, 1 << 16, model=True)
    num_heads: int = option(8, "query heads", 1, 4096, model=True)
    num_kv_heads: int = optional(4, "key and value heads (GQA); 0: num_heads", 0, 4096, model=True)
    mlp_mult: int = option(2, "MLP width / model_dim", 1, 64, model=True)
    logit_softcap: float = optional(30.0, "logits = cap * tanh(logits / cap); 0: no cap", 0, 1e4, model=True)
    rope_base: float = optional(10_000.0, "RoPE: 1 / the lowest frequency; 0: no RoPE", 0, 1e9, model=True)
    qk_gain_init: float = option(1.5, "initial gain of each query head", 0, 100, model=True)
    # data and batch
    data_path: str = option("data/datasets/fineweb10B_sp1024", "folder of token shards")
    tokenizer_path: str = option("data/tokenizers/fineweb_1024_bpe.model", "SentencePiece model")
    vocab_size: int = option(1024, "tokens", 1, 65_536, model=True)
    # parameter-golf 2026-03-19_TrainingOptSeq4096: -0.023 bpb, with Muon's rate and momentum retuned
    train_seq_len: int = option(4096, "tokens per row", 2, 1 << 20, model=True)
    train_batch_tokens: int = option(393_216, "tokens per step over all ranks", 1, 1 << 30)
    val_batch_size: int = option(524_288, "tokens per evaluation step and rank", 1)
    val_loss_every: int = optional(1000, "steps between validations, from step 0 on; 0: at the end only")
    train_log_every: int = optional(200, "steps between train_loss lines after step 10; 0: every 100")
    # optimizer
    matrix_lr: float = option(0.02, "Muon: matrices of the blocks", 0, 10)
    tied_embed_lr: float = option(0.03, "Adam: embedding", 0, 10)
    tied_embed_init_std: float = option(0.005, "std of the initial embedding", 0, 100)
    scalar_lr: float = option(0.02, "Adam: gains, scales, mixes", 0, 10)
    muon_momentum: float = option(0.99, "Muon's momentum after its warmup", 0, 0.9999)
    muon_momentum_warmup_start: float = option(0.92, "Muon's momentum at step 0", 0, 0.9999)
    muon_momentum_warmup_steps: int = optional(1500, "steps of that warmup; 0: none")
    muon_backend_steps: int = option(5, "Newton-Schulz iterations", 1, 20)
    beta1: float = option(0.9, "Adam: decay of the first moment", 0, 0.9999)
    beta2: float = option(0.95, "Adam: decay of the second moment", 0, 0.99999)
    adam_eps: float = option(1e-8, "Adam: added to the root of the corrected second moment", 1e-20, 1)
    # length: the clock ends the run; warmdown_iters is converted into time at the pace so far
    iterations: int = option(20_000, "maximum number of steps", 1, 10**9)
    max_wallclock_seconds: float = optional(600.0, "training seconds; 0: no cap", 0, 1e7)
    warmdown_iters: int = optional(3000, "last steps, over which LR falls to zero; 0: no warmdown")
    warmup_steps: int = optional(20, "steps on dummy tokens before the clock, at least one a stage", 0, 1000)
    # artifact and scores
    artifact_bytes_limit: int = optional(16_000_000, "limit of artifact plus script in bytes; 0: none")
    artifact_scale_floor: float = optional(1 / 127, "smallest rounding step of an int8 row; 0: none", 0, 1)

    def stages(self) -> list[Stage]:
        # begins at, tokens per step, tokens per row
        return [Stage(0.0, self.train_batch_tokens, self.train_seq_len)]

    def packer(self, data: Data, loader: Loader) -> Spans:
        return Spans()

    def parameter_table(self) -> dict[str, Row]:
        """{kind: Row}"""
        adam: dict = dict(optimizer="adam", beta1=self.beta1, beta2=self.beta2, eps=self.adam_eps)
        matrix: Callable = partial(Row, group="matrix", optimizer="muon", lr=self.matrix_lr)
        scalar: Callable = partial(Row, group="scalar", lr=self.scalar_lr, precision="fp32", **adam)
        return by_kind([
            # kind                   init
            matrix("query",          init="uniform", scale=1.0),
            matrix("key",            init="uniform", scale=1.0),
            matrix("value",          init="uniform", scale=1.0),
            matrix("attn_proj",      init="constant", scale=0.0),
            matrix("fc",             init="uniform", scale=1.0),
            matrix("mlp_proj",       init="constant", scale=0.0),
            Row("embed", "embed",    init="normal", scale=self.tied_embed_init_std, lr=self.tied_embed_lr,
                **adam),
            scalar("qk_gain",        init="constant", scale=self.qk_gain_init),
            scalar("resid_lambda",   init="constant", scale=1.0),
            scalar("x0_lambda",      init="constant", scale=0.0),
            scalar("layer_scale",    init="constant", scale=1.0),
            scalar("skip_weights",   init="constant", scale=1.0),
        ])

    def muon_step(self, state: UpdateState) -> None:
        update = nesterov_of_sum(state)
        update = orthogonalize(update, self.muon_backend_steps, NEWTON_SCHULZ, state.dtype)
        state.p.sub_(state.lr * update)

    def adam_step(self, state: UpdateState) -> None:
        state.p.sub_(state.lr * adam_update(state))

    def progress(self, step: int, seconds: float) -> float:
        """With a cap and a warmdown, progress is seconds / cap, as in the public script. So if iterations end
        the run first, LR has not reached 0."""
        if self.max_wallclock_seconds and self.warmdown_iters:
            return min(1.0, seconds / self.max_wallclock_seconds)
        return super().progress(step, seconds)

    def schedule(self, step: int, progress: float) -> "Schedule":
        """LR is 1, and falls linearly to 0 once warmdown_iters or fewer steps are left at the pace so far."""
        # its length as a fraction of the run, at the pace so far
        warmdown = self.warmdown_iters * (progress / max(step, 1))
        lr = min(1.0, (1 - progress) / warmdown) if warmdown else 1.0
        warmup = warmup_done(step, self.muon_momentum_warmup_steps)
        return Schedule(lr, momentum=momentum_at(self, warmup))

    def quantize(self, row: Row, w: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_by_maximum(w, row.levels, self.artifact_scale_floor)

    def make_model(self, *kernels: Kernels) -> Model:
        return GolfModel(self, *kernels)

class GolfBlock(nn.Module):
    """Attention and MLP, pre-norm, on a learned mix of the residual stream and the embedding."""
    def __init__(self, cfg: Golf) -> None:
        super().__init__()
        C = cfg.model_dim
        H = cfg.num_heads
        self.head_dim = C // H
        kv_dim = (cfg.num_kv_heads or H) * self.head_dim
        self.query = parameter(C, C)
        self.attn_proj = parameter(C, C)
        self.key = parameter(kv_dim, C)
        self.value = parameter(kv_dim, C)
        self.qk_gain = parameter(H)
        self.fc = parameter(cfg.mlp_mult * C, C)
        self.mlp_proj = parameter(C, cfg.mlp_mult * C)
        self.resid_lambda = parameter(C)
        self.x0_lambda = parameter(C)
        self.layer_scale = parameter(2, C)  # row 0 scales attention's output, row 1 the MLP's

    def forward(self, x: Tensor, x0: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """x (B, T, C), the residual stream, and x0 (B, T, C), the embedding -> the residual stream. rope:
        from rope_tables()."""
        embedding = self.x0_lambda.to(x.dtype) * x0
        x = self.resid_lambda.to(x.dtype) * x + embedding
        attn_scale, mlp_scale = self.layer_scale.to(x.dtype)
        x = x + attn_scale * self.attend(rms_norm(x), rope)
        return x + mlp_scale * mlp(rms_norm(x), self.fc, self.mlp_proj, self.kernels.linear)

    def attend(self, h: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """h (B, T, C), normalized -> what attention adds to the residual stream (B, T, C)."""
        product = self.kernels.linear
        q, k, v = project_heads(h, self.head_dim, product, self.query, self.key, self.value)
        # expanded over tokens, so that one kernel makes the gradients of rms_norm and of the gain
        gain = (self.qk_gain.float() * self.head_dim**-0.5)[:, None].expand(*q.shape[:3], 1)
        q = rotate((rms_norm(q) * gain).to(k.dtype), *rope)
        k = rotate(rms_norm(k), *rope)
        y = attend_heads(q, k, v, None, self.kernels.attention)
        return product(y.flatten(2), self.attn_proj)

class GolfModel(Model):
    """Blocks of the second half add the outputs of the first half, in reverse order (U-Net). The last of an
    odd number of blocks adds none."""
    def __init__(self, cfg: Golf, kernels: Kernels = Kernels()) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed = parameter(cfg.vocab_size, cfg.model_dim)
        self.head = self.embed
        self.skip_weights = parameter(cfg.num_layers // 2, cfg.model_dim, on=cfg.num_layers > 1)
        self.blocks = nn.ModuleList([GolfBlock(cfg) for _ in range(cfg.num_layers)])
        self.use(kernels)

    def context(self, T: int, device: torch.device, dtype: torch.dtype = torch.float32,
                stage: Stage | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin of every position, each (T, 1, head_dim / 2), in the dtype of activations."""
        head_dim = self.cfg.model_dim // self.cfg.num_heads
        return rope_tables(T, rope_spectrum(head_dim, self.cfg.rope_base), device, dtype)

    def hidden(self, tokens: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
        """tokens (B, T) -> last activations, normalized (B, T, C)."""
        x = x0 = rms_norm(F.embedding(tokens, self.embed).to(context[0].dtype))
        half = len(self.blocks) // 2
        outputs = []
        for block in self.blocks[:half]:
            x = block(x, x0, context)
            outputs.append(x)
        for i, block in enumerate(self.blocks[half:]):
            if outputs:
                x = x + self.skip_weights[i].to(x.dtype) * outputs.pop()
            x = block(x, x0, context)
        return rms_norm(x)

# ---------- golf_plus: the same game, by a later record
class Shards(RankRows):
    """Rank r of R has shards r, r + R, ... In each epoch the rows of a shard begin at a random offset and
    are shuffled. The next row comes from a random shard, weighted by the rows that each has left."""
    def __init__(self, cfg: Config, data: Data, loader: "Loader"):
        super().__init__(cfg, data, loader)
        dealt = [loader.shards[rank::self.team.world_size] for rank in range(self.team.world_size)]
        enough = all([max([shard.size for shard in part], default=0) > loader.T for part in dealt])
        require(enough or cfg.eval_from, f"packing=shards deals {len(loader.shards)} shards to "
                f"{self.team.world_size} ranks, so some get no row of {loader.T} tokens: set PACKING=rows")

    def make_rows(self, T: int) -> Iterator[list]:
        """Yields the one piece of each row."""
        draw = np.random.Generator(np.random.PCG64(self.team.rank))
        loader = self.loader
        left = {shard: [] for shard in range(self.team.rank, len(loader.shards), self.team.world_size)}
        while True:
            if not any(left.values()):
                for shard in left:
                    size = loader.shards[shard].size
                    phase = int(draw.integers(max(0, min(T - 1, size - T - 1)) + 1))
                    order = draw.permutation((size - 1 - phase) // T)
                    left[shard] = (loader.edges[shard] + phase + order * T).tolist()
            counts = np.array([len(starts) for starts in left.values()], float)
            shard = [*left][draw.choice(len(left), p=counts / counts.sum())]
            yield [(left[shard].pop(), T + 1)]

@dataclass(frozen=True)
class LoopStage(Stage):
    """A stage of a recipe with depth recurrence."""
    loops: int = 0  # extra passes through the looped layers

# parameter-golf#1394, 2026-04-05_SP8192_GPTQ-Embeddings_SDClip_Loop45x2: val_bpb 1.0856, about 4,988 steps.
# Gains below are in bits per byte, as records of parameter-golf report them.
@dataclass(frozen=True)
class GolfPlus(Staged):
    """Eleven layers, two of which run three times in the second half of the run; XSA, EMA, and GPTQ
    to 6 bits (8 for the embedding)."""
    preset: str = option("golf_plus", "the recipe", model=True)
    # size
    num_layers: int = option(11, "blocks", 1, 1000, model=True)
    model_dim: int = option(512, "width of the residual stream", 2, 1 << 16, model=True)
    num_heads: int = option(8, "query heads", 1, 4096, model=True)
    num_kv_heads: int = optional(4, "key and value heads (GQA); 0: num_heads", 0, 4096, model=True)
    # parameter-golf: -0.022 together with a vocabulary of 4,096, weight decay, GPTQ and brotli
    mlp_mult: int = option(4, "MLP width / model_dim", 1, 64, model=True)
    mlp_slope: float = optional(0.5, "slope of negative activations, before the square; 0: ReLU^2", 0, 1,
                                model=True)
    logit_softcap: float = optional(30.0, "logits = cap * tanh(logits / cap); 0: no cap", 0, 1e4, model=True)
    rope_base: float = optional(10_000.0, "RoPE: 1 / the lowest frequency; 0: no RoPE", 0, 1e9, model=True)
    rope_fraction: float = option(0.25, "part of each head that rotates; 1: all of it", 0, 1, model=True)
    qk_gain_init: float = option(4.0, "initial gain of each query head", 0, 100, model=True)
    # parameter-golf: -0.005 together with ema_decay
    exclusive: bool = option(True, "remove each head's output component along its own value (XSA); 0: keep "
                             "it", model=True)
    # parameter-golf: -0.002 together with rope_fraction
    depth_scale: bool = option(True, "divide the i-th layer's normalized input by sqrt(i) (ln_scale); 0: off",
                               model=True)
    skip_mix: bool = option(True, "learned per-channel lerp between residual stream and skip; 0: their sum",
                            model=True)
    # parameter-golf: -0.002
    loop_layers: tuple = option((4, 5), "depth recurrence: first and last layer of the loop; 0: no loop", 0,
                                1000, model=True)
    # overrides a column of stages(), one entry per stage; empty: as stages() has it
    loop_schedule: tuple = option((), "extra loop passes per stage; final scores use the last stage's",
                                  0, 16, model=True, of=int)
    # data and batch
    data_path: str = option("data/datasets/fineweb10B_sp8192", "folder of token shards")
    tokenizer_path: str = option("data/tokenizers/fineweb_8192_bpe.model", "SentencePiece model")
    vocab_size: int = option(8192, "tokens", 1, 65_536, model=True)
    train_seq_len: int = option(2048, "tokens per row", 2, 1 << 20, model=True)
    train_batch_tokens: int = option(786_432, "tokens per step over all ranks", 1, 1 << 30)
    packing: str = option("shards", "how training rows are cut: see Shards and, for fewer shards than ranks, "
                          "Rows", choices=("shards", "rows"))
    val_batch_size: int = option(524_288, "tokens per evaluation step and rank", 1)
    val_loss_every: int = optional(4000, "steps between validations, from step 0 on; 0: at the end only")
    train_log_every: int = optional(500, "steps between train_loss lines after step 10; 0: every 100")
    # optimizer
    matrix_lr: float = option(0.02, "Muon: matrices of the blocks", 0, 10)
    tied_embed_lr: float = option(0.03, "Adam: embedding", 0, 10)
    tied_embed_init_std: float = option(0.005, "std of the initial embedding", 0, 100)
    scalar_lr: float = option(0.02, "Adam: gains, scales, mixes", 0, 10)
    muon_momentum: float = option(0.99, "Muon's momentum after its warmup", 0, 0.9999)
    muon_momentum_warmup_start: float = option(0.92, "Muon's momentum at step 0", 0, 0.9999)
    muon_momentum_warmup_steps: int = optional(1500, "steps of that warmup; 0: none")
    muon_backend_steps: int = option(5, "Newton-Schulz iterations", 1, 20)
    muon_row_norm: bool = option(True, "normalize the rows of an update before it is orthogonalized "
                                 "(MuonEq-R); 0: don't")
    weight_decay: float = optional(4.25, "Muon: decay per step is this * matrix_lr**2 * LR factor; 0: none",
                                   0, 1e6)
    adam_weight_decay: float = optional(0.02, "Adam: weight decay, times LR; 4.25 times that for the "
                                        "embedding; 0: none", 0, 1e6)
    beta1: float = option(0.9, "Adam: decay of the first moment", 0, 0.9999)
    beta2: float = option(0.95, "Adam: decay of the second moment", 0, 0.99999)
    adam_eps: float = option(1e-8, "Adam: added to the root of the corrected second moment", 1e-20, 1)
    grad_clip_norm: float = optional(0.3, "largest global gradient norm; 0: no clipping", 0, 1e6)
    ema_decay: float = optional(0.997, "score the mean of past weights (EMA); 0: the last ones", 0, 0.99999)
    # length: the clock ends the run; GPTQ's calibration gets the 12 s that are left of 600
    iterations: int = option(20_000, "maximum number of steps", 1, 10**9)
    max_wallclock_seconds: float = optional(588.0, "training seconds; 0: no cap", 0, 1e7)
    warmdown_frac: float = optional(0.667, "last fraction of the run, in which LR falls to 0; 0: none", 0, 1)
    warmup_steps: int = optional(40, "steps on dummy tokens before the clock, at least one a stage", 0, 1000)
    # artifact and scores
    artifact_bytes_limit: int = optional(16_000_000, "limit of artifact plus script in bytes; 0: none")
    artifact_codec: str = option("brotli", "compressor", choices=("zlib", "brotli"))
    artifact_step: float = optional(12.85 / 31, "matrices: rounding step / row std; 0: step = row "
                                    "maximum / 31", 0, 10)
    artifact_embed_step: float = optional(20 / 127, "the same for the embedding; 0: maximum / 127", 0, 10)
    gptq_batches: int = optional(64, "calibration batches for GPTQ; 0: round to nearest", 0, 10_000)
    gptq_seconds: float = optional(12.0, "seconds that calibration may take in a run with a cap; 0: no limit",
                                   0, 1e7)
    # parameter-golf#1394: -0.0168
    eval_sliding: int = optional(64, "val_bpb_sliding: targets scored per row; 0: no such score")

    def check(self) -> None:
        super().check()
        looped = self.loop_layers
        require(looped == (0,) or (len(looped) == 2 and looped[0] <= looped[1]),
                f"loop_layers={show(looped)} must be a first and a last layer, or 0")

    packers = dict(shards=Shards, rows=Rows)

    def stages(self) -> list[LoopStage]:
        B = self.train_batch_tokens
        T = self.train_seq_len
        return stage_rows(self, [
            # begins at this fraction of iterations, tokens per step, tokens per row, extra passes
            LoopStage(0.0, B, T, loops=0),
            LoopStage(0.5, B, T, loops=2),
        ], loops="loop_schedule")

    def parameter_table(self) -> dict[str, Row]:
        """{kind: Row}. In the artifact, matrices are 6-bit, the embedding 8-bit, scalars fp16."""
        matrix: Callable = partial(Row, group="matrix", optimizer="muon", lr=self.matrix_lr, levels=31.0,
                                   step=self.artifact_step)
        adam: dict = dict(optimizer="adam", beta1=self.beta1, beta2=self.beta2, eps=self.adam_eps)
        scalar: Callable = partial(Row, group="scalar", lr=self.scalar_lr, decay=self.adam_weight_decay,
                                   precision="fp16", **adam)
        decay = self.weight_decay * self.matrix_lr
        return by_kind([
            # kind                   weight decay  init
            matrix("query",          decay=decay,  init="orthogonal", scale=1.0),
            matrix("key",            decay=decay,  init="orthogonal", scale=1.0),
            matrix("value",          decay=decay,  init="orthogonal", scale=1.0),
            matrix("attn_proj",      decay=decay,  init="constant", scale=0.0),
            # Muon doubles the LR of this tall matrix (at mlp_mult=4), so it gets half the weight decay
            matrix("fc",             decay=decay / 2, init="orthogonal", scale=1.0),
            matrix("mlp_proj",       decay=decay,  init="constant", scale=0.0),
            Row("embed", "embed",    decay=4.25 * self.adam_weight_decay, init="normal",
                scale=self.tied_embed_init_std, lr=self.tied_embed_lr, levels=127.0,
                step=self.artifact_embed_step, **adam),
            scalar("qk_gain",        init="constant", scale=self.qk_gain_init),
            scalar("resid_lambda",   init="constant", scale=1.0),
            scalar("x0_lambda",      init="constant", scale=0.0),
            scalar("layer_scale",    init="constant", scale=1.0),
            scalar("skip_weights",   init="constant", scale=1.0),
            scalar("skip_mix",       init="constant", scale=0.0),
        ])

    def muon_step(self, state: UpdateState) -> None:
        """Muon with decoupled weight decay."""
        update = nesterov_of_sum(state)
        if self.muon_row_norm:
            update = normalize_rows(update)
        update = orthogonalize(update, self.muon_backend_steps, NEWTON_SCHULZ, state.dtype)
        state.p.sub_(state.lr * state.decay * state.p)  # decoupled (arXiv:1711.05101)
        state.p.sub_(state.lr * update)

    def adam_step(self, state: UpdateState) -> None:
        """Adam with decoupled weight decay."""
        update = adam_update(state)
        if self.adam_weight_decay:
            update = update + state.decay * state.p  # decoupled (arXiv:1711.05101)
        state.p.sub_(state.lr * update)

    def schedule(self, step: int, progress: float) -> "Schedule":
        """LR is 1 until the last warmdown_frac of the run, then it falls linearly to 0."""
        done = warmdown_done(scheduled_progress(self, progress), self.warmdown_frac)
        warmup = warmup_done(step, self.muon_momentum_warmup_steps)
        return Schedule(1 - done, momentum=momentum_at(self, warmup))

    def layer_order(self, stage: LoopStage) -> list[int]:
        """The layers in the order in which they run, repeats included."""
        return looped_order(self.num_layers, self.loop_layers, stage.loops)

    def calibrate(self, run: Run) -> dict[str, Tensor]:
        """Hessians for GPTQ; the tied embedding gets one from its inputs as lm_head. Its time counts as
        training, so the recipe has a lower cap."""
        if not self.gptq_batches:
            return {}
        began = time.perf_counter()
        seconds = self.gptq_seconds if self.max_wallclock_seconds else 0.0
        hessians = input_hessians(run.model, self, run.data, run.team, self.gptq_batches, seconds, run.log)
        run.team.wait()
        run.report["calibration_ms"] = round(1e3 * (time.perf_counter() - began))
        return hessians

    def quantize(self, row: Row, w: Tensor, coarser: float = 1.0,
                 hessian: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if not row.step:
            return quantize_by_maximum(w, row.levels // coarser, 0.0)
        if hessian is None:
            return quantize_by_rms(w, row.step * coarser, row.levels)
        return quantize_by_gptq(w, row.step * coarser, row.levels, hessian)

    def check_data(self, data: "Data") -> None:
        """A machine without brotli is refused: a run would be lost there."""
        if self.codec == "brotli":
            try:
                import brotli  # noqa: F401
            except ImportError:
                raise Refused("ARTIFACT_CODEC=brotli needs brotli: ./run.sh setup, or ARTIFACT_CODEC=zlib") \
                    from None

    @property
    def codec(self) -> str:
        return "brotli" if self.artifact_codec == "brotli" else "int8+zlib"

    def compress(self, raw: bytes) -> bytes:
        return shuffle_and_compress(raw) if self.codec == "brotli" else zlib.compress(raw, 9)

    def pack(self, run: Run) -> bytes:
        """With GPTQ, fitted into the limit by rounding steps up to 4 times as wide. If even that is too big,
        the steps stay as they were."""
        hessians = self.calibrate(run)

        def packed(coarser: float) -> bytes:
            return self.compress(pack_artifact(
                run.model, lambda name: dict(hessian=hessians.get(name), coarser=coarser)))

        most = self.artifact_bytes_limit and max(1, self.artifact_bytes_limit - len(script_source()))
        weights = sum([p.numel() for p in run.model.parameters()])
        first = smaller = packed(1.0)
        coarser = 1.0
        while most and len(smaller) > most and coarser < 4:
            # doubling the steps saves about one bit per weight
            bits = 8 * (len(smaller) - most) / weights + 0.01
            coarser = min(4, coarser * 2 ** min(2, bits))
            smaller = packed(coarser)
        if coarser == 1 or len(smaller) > most:
            return first
        run.log(f"artifact: {len(first) - most} bytes over the limit; steps {coarser:.4f} times as wide fit")
        return smaller

    @staticmethod
    def decompress(packed: bytes) -> bytes:
        if packed[:1] == b"x":
            return zlib.decompress(packed)
        return decompress_and_unshuffle(packed)

    def evaluations(self, step: int | None = None) -> list[Callable]:
        return [sliding_score] if self.eval_sliding and step is None else []

    def choose_kernels(self, on_gpu: bool, log: Logger) -> Kernels:
        return Kernels(**fast_loss(self, on_gpu, fused_loss, kernel_losses))

    def make_model(self, *kernels: Kernels) -> Model:
        return GolfPlusModel(self, *kernels)

    def optimizer(self) -> "type[Optimizer]":
        return MeanOptimizer if self.ema_decay else Optimizer

class MeanOptimizer(Optimizer):
    """Also keeps a running mean of the weights (EMA), the third state of each bank; at the end of training
    the weights become that mean."""
    def __init__(self, model: Model, cfg: GolfPlus, *args: Any, **options: Any):
        super().__init__(model, cfg, *args, **options)
        self.decay = cfg.ema_decay
        for bank in self.banks:
            bank.state.append(bank.master.clone())

    @torch.no_grad()
    def step(self, schedule: Schedule) -> None:
        super().step(schedule)
        for bank in self.banks:
            bank.state[2].lerp_(bank.master, 1 - self.decay)

    def begin(self, values: dict[str, Tensor]) -> None:
        super().begin(values)
        for bank in self.banks:
            bank.state[2].copy_(bank.master)

    @torch.no_grad()
    def end(self) -> None:
        for bank in self.banks:
            mean = bank.whole(bank.state[2]).flatten()
            bank.load(dict(zip(bank.names, bank.views(mean))))

def remove_own_value(y: Tensor, v: Tensor) -> Tensor:
    """XSA (arXiv:2603.09078): removes each head's output component along the token's own value, which the
    residual stream has anyway. y (B, T, H, D), v (B, T, KV, D) -> (B, T, H, D)."""
    y = y.unflatten(2, (v.size(2), -1))  # the H / KV heads that share a value are adjacent
    own = F.normalize(v, dim=-1)[:, :, :, None]
    y = y - (y * own).sum(-1, keepdim=True) * own
    return y.flatten(2, 3)

def ln_scale(layer: int) -> float:
    """Factor on the normalized input of a layer, numbered from 0: 1 / sqrt(layer + 1), so that later layers
    change the residual stream less."""
    return (layer + 1) ** -0.5

def looped_order(num_layers: int, looped: tuple[int, ...], loops: int) -> list[int]:
    """Depth recurrence: the layers in the order in which they run. looped: the first and the last layer of
    the block that runs `loops` more times; (0,): none."""
    layers = list(range(num_layers))
    if looped == (0,):
        return layers
    first, last = looped
    return layers[:last + 1] + loops * layers[first:last + 1] + layers[last + 1:]

def learned_lerp(skipped: Tensor, x: Tensor, mix: Tensor) -> Tensor:
    """Per-channel lerp from a skip to the residual stream x, both (B, T, C): sigmoid(mix) = 0 gives the skip,
    1 the stream. mix (C,)."""
    return torch.lerp(skipped, x, torch.sigmoid(mix.to(x.dtype)))

def normalize_rows(update: Tensor) -> Tensor:
    """MuonEq-R (arXiv:2603.28254): every row gets norm 1 before the matrix is orthogonalized. update
    (N, R, C)."""
    return update / update.norm(dim=-1, keepdim=True).clamp_min(1e-7)

def quantize_by_rms(w: Tensor, step: float, levels: float) -> tuple[Tensor, Tensor]:
    """w (R, C) -> int8 (R, C), clipped to +-levels, and fp16 scales (R,). A row's scale is step * its rms."""
    scale = row_scales(step * w.square().mean(1).sqrt())
    rows = (w / scale[:, None]).round().clamp(-levels, levels)
    return rows.to(torch.int8), scale.half()

def quantize_by_gptq(w: Tensor, step: float, levels: float, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """quantize_by_rms() with std in place of rms and rounded by gptq(). hessian (C, C): see
    input_hessians()."""
    scale = row_scales(step * w.std(1))
    device = hessian.device  # a GPU rounds in seconds what takes a core minutes
    rows = gptq(w.to(device), scale.to(device), levels, hessian)
    return rows.to(torch.int8).cpu(), scale.half()

def row_scales(scale: Tensor) -> Tensor:
    """Scales (R,) after a round trip through fp16; never 0."""
    return scale.clamp_min(MIN_SCALE).half().float()

def gptq(w: Tensor, scale: Tensor, levels: float, hessian: Tensor) -> Tensor:
    """GPTQ (arXiv:2210.17323): rounds w (R, C) to +-levels column by column, the most important first; the
    remaining columns compensate for each error. scale (R,). hessian (C, C): sum of x x' over the inputs x,
    up to a constant factor."""
    w = w.clone()
    h = hessian.clone()
    unused = h.diagonal() == 0
    h[unused, unused] = 1
    w[:, unused] = 0
    h.diagonal().add_(0.01 * h.diagonal().mean())
    order = h.diagonal().argsort(descending=True)
    w = w[:, order]
    h = h[order][:, order]
    rows = torch.zeros_like(w)
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
    for i in range(len(h)):  # never waits for the device
        column = (w[:, i] / scale).round().clamp(-levels, levels)
        w[:, i:] -= ((w[:, i] - column * scale) / factor[i, i])[:, None] * factor[i, i:]
        rows[:, i] = column
    return rows[:, order.argsort()]

CALIBRATION_TOKENS = 16_384  # per forward pass; fits in memory beside golf's models

@torch.no_grad()
def input_hessians(model: Model, cfg: Any, data: Data, team: "Team", batches: int, seconds: float,
                   log: Logger) -> dict[str, Tensor]:
    """{matrix: sum of x x' over its inputs x in a batch, averaged over batches (C, C)} for gptq(), on the
    device. A batch is one rank's share of a step. Layers that run more than once sum over all passes. Ranks
    share the batches and stop before one more might exceed `seconds`; 0: no limit. All ranks call it."""
    began = time.perf_counter()
    names = {p: name for name, p in model.named_parameters()}
    sums = {}
    kernels = model.kernels

    def record(x: Tensor, weight: Tensor) -> Tensor:
        flat = x.flatten(0, -2).float()
        sums[names[weight]] = sums.get(names[weight], 0) + flat.T @ flat
        return linear(x, weight)

    loader = Loader(cfg, data, team)
    T = cfg.train_seq_len
    context = model.context(T, team.device, team.dtype)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # TF32 is exact for bf16 inputs
    model.use(replace(kernels, linear=record))
    planned = math.ceil(batches / team.world_size)
    made = 0
    needed = 0.0  # seconds, with one more batch and the sums over ranks (at most as long as a batch)
    while made < planned and (not seconds or made == 0 or needed <= seconds):
        for tokens in loader.next(cfg.train_batch_tokens)[0].split(max(1, CALIBRATION_TOKENS // T)):
            record(model.hidden(tokens, context), model.head)
        made += 1
        if team.on_gpu:
            team.wait()
        spent = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        spent = all_reduce(spent, "MAX").item()
        needed = spent * (made + 2) / made
    model.use(kernels)
    torch.set_float32_matmul_precision(precision)
    if made < planned:
        log(f"calibration: {made} of {planned} batches, as more would take longer than {seconds:g} s")
    return {name: all_reduce(total) / (made * team.world_size) for name, total in sums.items()}

SHUFFLED = b"BSHF\x02"  # a brotli payload is this, the bytes at even places, then those at odd places

def shuffle_and_compress(raw: bytes) -> bytes:
    """Byte shuffle, then brotli."""
    import brotli
    return brotli.compress(SHUFFLED + raw[::2] + raw[1::2])

def decompress_and_unshuffle(packed: bytes) -> bytes:
    """The inverse of shuffle_and_compress()."""
    import brotli
    both = brotli.decompress(packed)[len(SHUFFLED):]
    raw = bytearray(len(both))
    half = (len(both) + 1) // 2
    raw[::2] = both[:half]
    raw[1::2] = both[half:]
    return bytes(raw)

class GolfPlusContext(NamedTuple):
    """What the forward pass needs besides tokens and weights."""
    rope: tuple[Tensor, Tensor]  # cos and sin of every position, each (T, 1, head_dim / 2)
    dtype: torch.dtype  # of activations
    loops: int  # extra passes through loop_layers

class GolfPlusBlock(nn.Module):
    """Attention and MLP, pre-norm, on a learned mix of the residual stream and the embedding."""
    def __init__(self, cfg: GolfPlus, layer: int) -> None:
        super().__init__()
        C = cfg.model_dim
        H = cfg.num_heads
        self.cfg = cfg
        self.head_dim = C // H
        self.ln_scale = ln_scale(layer) if cfg.depth_scale else 1.0
        kv_dim = (cfg.num_kv_heads or H) * self.head_dim
        self.query = parameter(C, C)
        self.attn_proj = parameter(C, C)
        self.key = parameter(kv_dim, C)
        self.value = parameter(kv_dim, C)
        self.qk_gain = parameter(H)
        self.fc = parameter(cfg.mlp_mult * C, C)
        self.mlp_proj = parameter(C, cfg.mlp_mult * C)
        self.resid_lambda = parameter(C)
        self.x0_lambda = parameter(C)
        self.layer_scale = parameter(2, C)  # row 0 scales attention's output, row 1 the MLP's

    def forward(self, x: Tensor, x0: Tensor, context: GolfPlusContext) -> Tensor:
        """x (B, T, C), the residual stream, and x0 (B, T, C), the embedding -> the residual stream."""
        embedding = self.x0_lambda.to(x.dtype) * x0
        x = self.resid_lambda.to(x.dtype) * x + embedding
        attn_scale, mlp_scale = self.layer_scale.to(x.dtype)
        x = x + attn_scale * self.attend(rms_norm(x) * self.ln_scale, context)
        h = rms_norm(x) * self.ln_scale
        return x + mlp_scale * mlp(h, self.fc, self.mlp_proj, self.kernels.linear, self.cfg.mlp_slope)

    def attend(self, h: Tensor, context: GolfPlusContext) -> Tensor:
        """h (B, T, C), normalized -> what attention adds to the residual stream (B, T, C)."""
        product = self.kernels.linear
        q, k, v = project_heads(h, self.head_dim, product, self.query, self.key, self.value)
        # expanded over tokens, so that one kernel makes the gradients of rms_norm and of the gain
        gain = (self.qk_gain.float() * self.head_dim**-0.5)[:, None].expand(*q.shape[:3], 1)
        q = rotate((rms_norm(q) * gain).to(k.dtype), *context.rope)
        k = rotate(rms_norm(k), *context.rope)
        y = attend_heads(q, k, v, None, self.kernels.attention)
        if self.cfg.exclusive:
            y = remove_own_value(y, v)
        return product(y.flatten(2), self.attn_proj)

class GolfPlusModel(Model):
    """U-Net over the layers in the order in which they run, repeats included: the second half mixes in the
    outputs of the first in reverse order."""
    def __init__(self, cfg: GolfPlus, kernels: Kernels = Kernels()) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed = parameter(cfg.vocab_size, cfg.model_dim)
        self.head = self.embed
        # row i is for the i-th layer run in the second half; which layer that is depends on the stage
        skips = max([len(cfg.layer_order(stage)) // 2 for stage in cfg.stages()])
        self.skip_weights = parameter(skips, cfg.model_dim, on=skips)
        mixes = skips > 0 and cfg.skip_mix
        self.skip_mix = parameter(skips, cfg.model_dim, on=mixes)
        self.blocks = nn.ModuleList([GolfPlusBlock(cfg, layer) for layer in range(cfg.num_layers)])
        self.use(kernels)

    def context(self, T: int, device: torch.device, dtype: torch.dtype = torch.float32,
                stage: LoopStage | None = None) -> GolfPlusContext:
        cfg = self.cfg
        frequencies = rope_spectrum(cfg.model_dim // cfg.num_heads, cfg.rope_base, cfg.rope_fraction)
        loops = (stage or cfg.stages()[-1]).loops
        return GolfPlusContext(rope_tables(T, frequencies, device, dtype), dtype, loops)

    def hidden(self, tokens: Tensor, context: GolfPlusContext) -> Tensor:
        """tokens (B, T) -> last activations, normalized (B, T, C)."""
        cfg = self.cfg
        x = x0 = rms_norm(F.embedding(tokens, self.embed).to(context.dtype))
        order = looped_order(cfg.num_layers, cfg.loop_layers, context.loops)
        half = len(order) // 2
        outputs = []
        for layer in order[:half]:
            x = self.blocks[layer](x, x0, context)
            outputs.append(x)
        for i, layer in enumerate(order[half:]):
            if outputs:
                x = self.skip(x, outputs.pop(), i)
            x = self.blocks[layer](x, x0, context)
        return rms_norm(x)

    def skip(self, x: Tensor, earlier: Tensor, i: int) -> Tensor:
        """Mixes an earlier residual stream into x, both (B, T, C), by row i of skip_weights and skip_mix."""
        skipped = self.skip_weights[i].to(x.dtype) * earlier
        if not self.cfg.skip_mix:
            return x + skipped
        return learned_lerp(skipped, x, self.skip_mix[i])

# ---------- speedrun and speedrun_plus: what both use
class Documents(Packer):
    """A row takes the beginnings of documents in order until it is full, which cuts the last one; the next
    row begins with the next document. Documents at the end of a shard that do not fill a row for every rank
    are left out. The position counts documents."""
    any_length = True

    def __init__(self, cfg: Any, data: Data, loader: "Loader"):
        super().__init__(cfg, data, loader)
        self.index = index = DocumentIndex(data, loader, cfg.max_doc_len)
        cuts = {min(stage.doc_len or index.longest, index.longest) for stage in cfg.stages()}
        self.cut = {cut: index.lengths.clip(max=cut) for cut in cuts | {index.longest}}
        self.filled = {cut: np.cumsum([0, *lengths]) for cut, lengths in self.cut.items()}
        self.held_tokens = self.filled[index.longest][-1]

    def plan(self, position: int, n: int, T: int, doc_len: int = 0) -> tuple[list, int]:
        """Makes one row for every rank at a time, from the documents of one shard."""
        index = self.index
        ranks = self.team.world_size
        longest = min(doc_len or index.longest, index.longest)
        lengths = self.cut[longest]
        filled = self.filled[longest]
        count = len(index.starts)
        rows = []
        skipped = 0
        while len(rows) < n:
            epoch, place = divmod(position, count)
            end = int(np.searchsorted(index.shard_of, index.shard_of[place], "right"))
            here = []
            while len(here) < ranks:
                stop = int(filled.searchsorted(filled[place] + T + 1))  # the documents before it fill a row
                if stop > end:
                    break
                here.append([*zip(index.starts[place:stop].tolist(), lengths[place:stop].tolist())])
                place = stop
            if len(here) == ranks:
                rows += here
                skipped = 0
            else:
                place = end
                skipped += 1
                require(skipped <= len(self.loader.shards), f"no shard's documents fill {ranks} rows of {T}")
            position = epoch * count + place
        return rows, position

def rope_spectrum_to_base(head_dim: int, base: float, fraction: float) -> Tensor:
    """-> (head_dim / 2,): radians per token of each pair of channels, from 1 down to exactly 1 / base
    (modded-nanogpt); base 0: no rotation. Only the first `fraction` of the pairs rotate."""
    rotating = int(fraction * head_dim / 2) if base else 0
    return F.pad(base ** -torch.linspace(0, 1, rotating), (0, head_dim // 2 - rotating))

def yarn(frequencies: Tensor, scale: float, old: int, new: int) -> tuple[Tensor, float]:
    """Frequencies (pairs,) and the factor on q @ k after a window has grown from old to new tokens. Pairs of
    channels that turn less than once in the old window are slowed down by old / new, those that turn more
    than 32 times stay as they are, and attention gets sharper (YaRN, arXiv:2309.00071;
    modded-nanogpt#122: -3.7 s)."""
    turns = old * frequencies / (2 * math.pi)
    kept = old / new + ((turns - 1) / 31).clamp(0, 1) * (1 - old / new)
    return frequencies * kept, scale * (1 + 0.2 * math.log(new / old))

def adam_update_early_eps(state: UpdateState) -> Tensor:
    """adam_update(), but eps is added to the root before the correction (modded-nanogpt)."""
    adam_moments(state)
    root = (state.second.sqrt() + state.eps) / (1 - state.beta2**state.step) ** 0.5
    return state.first / (1 - state.beta1**state.step) / root

class SpeedrunRecipe(Staged):
    """Methods that speedrun and speedrun_plus share."""
    packers = dict(documents=Documents, rows=Rows)

    def check(self: Any) -> None:
        super().check()
        for window in [stage.window for stage in self.stages()] + [self.eval_window]:
            require(window % self.window_block == 0,
                    f"a window of {window} tokens is not a multiple of window_block={self.window_block}: "
                    "change window_schedule or eval_window")
        require(len(self.fp8_head_most) == 3,
                f"fp8_head_most={show(self.fp8_head_most)}: three numbers: input, weight, gradient")

    def quantize(self, row: Row, w: Tensor, coarser: float = 1.0,
                 hessian: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return quantize_by_maximum(w, row.levels // coarser, 0.0)

    def momentum(self: Any, step: int, progress: float) -> float:
        """It warms up over the first steps and cools down over the last, estimated from the pace."""
        warmup = warmup_done(step, self.muon_momentum_warmup_steps)
        if self.muon_momentum_cooldown_steps and progress:
            steps_left = (1 - progress) * step / progress
            warmup = min(warmup, steps_left / self.muon_momentum_cooldown_steps)
        return momentum_at(self, warmup)

# ---------- speedrun: least time to val_loss 3.28 on 8xH100
# modded-nanogpt 2025-11-29_BatchSizeSchedule: 132.2 s, 2,160 steps at 33.6, 60.1 and 88.1 ms by stage.
# A gain in seconds is the difference between two records on that leaderboard.
@dataclass(frozen=True)
class Speedrun(SpeedrunRecipe):
    """Windows that grow from stage to stage and stay within a document, value embeddings, gated heads, a skip
    connection, backout; NorMuon, and Adam at every other step."""
    preset: str = option("speedrun", "the recipe", model=True)
    # size
    num_layers: int = option(12, "blocks", 1, 1000, model=True)
    model_dim: int = option(768, "width of the residual stream", 2, 1 << 16, model=True)
    num_heads: int = option(6, "heads of queries, keys and values", 1, 4096, model=True)
    mlp_mult: int = option(4, "MLP width / model_dim", 1, 64, model=True)
    window_pattern: str = option("0SSSLSS-SSSL", "per layer (cycled): L long window, S short "
                                 "window, - no attention, 0 neither attention nor MLP", model=True)
    window_schedule: tuple = option((), "long window per stage, in earlier tokens; 0: all; empty: as "
                                    "stages() has it", 0, 1 << 20, model=True, of=int)
    window_block: int = option(128, "windows are multiples of this many tokens", 1, model=True)
    eval_window: int = optional(2560, "long window of final scores, tokens; 0: as in the last stage",
                                model=True)
    max_doc_len: int = optional(2048, "maximum document length; also keeps attention within documents; "
                                "0: off", model=True)
    attn_scale: float = option(0.1, "factor on q @ k in the first stage", 0, 100, model=True)
    rope_base: float = optional(1024.0, "RoPE: 1 / the lowest frequency; 0: no RoPE", 0, 1e9, model=True)
    rope_fraction: float = option(0.5, "part of each head that rotates", 0, 1, model=True)
    value_embed_layers: tuple = option((0, 1, 2, 0, 0, 0, 0, 0, 0, 3, 1, 2),
                                       "value embedding per layer (cycled), from 1; 0: none", 0, 999,
                                       model=True)
    # modded-nanogpt#117: -0.3 s
    attn_gate_dim: int = optional(12, "channels read by each head's output gate; 0: no gate", 0, 1 << 16,
                                  model=True)
    # modded-nanogpt#130: -1.1 s
    smear_dim: int = optional(12, "channels read by the gate that adds the previous token; 0: no smear",
                              0, 1 << 16, model=True)
    skip_layers: tuple = option((4, 7), "skip connections, as pairs: from layer, to layer; 0: none", 0, 1000,
                                model=True)
    # modded-nanogpt#140: -5.3 s, with tuned rates
    backout_layer: int = optional(8, "layer whose output is partly subtracted at the end; 0: none",
                                  0, 1000, model=True)
    logit_softcap: float = optional(15.0, "logits = cap * tanh(logits / cap); 0: no cap", 0, 1e4, model=True)
    # data and batch
    data_path: str = option("data/datasets/fineweb10B_gpt2", "folder of token shards")
    vocab_size: int = optional(50_304, "tokens; 0: the tokenizer's", 0, 65_536, model=True)
    train_seq_len: int = option(16_384, "tokens per row in the first stage", 2, 1 << 20, model=True)
    train_batch_tokens: int = option(131_072, "tokens per step over all ranks in the first stage", 1, 1 << 30)
    packing: str = option("documents", "how training rows are cut: see Documents and, for proxies, Rows",
                          choices=("documents", "rows"))
    max_epochs: int = optional(1, "passes over the training tokens; 0: any number")
    val_tokens: int = optional(10_485_760, "how many tokens of val are scored, from its start; 0: all")
    val_batch_size: int = option(262_144, "tokens per evaluation step and rank", 1)
    val_loss_every: int = optional(250, "steps between validations, from step 0 on; 0: at the end only")
    eval_context: int = optional(262_144, "tokens per row in evaluation; 0: train_seq_len")
    train_log_every: int = optional(50, "steps between train_loss lines after step 10; 0: every 100")
    fp8: str = option("auto-head", "lm_head in fp8 in training; auto-head: if the GPU has it",
                      choices=("off", "head", "auto-head"))
    fp8_head_most: tuple = option((0.0, 0.875, 1.0), "lm_head in fp8: largest input (0: model_dim ** 0.5), "
                                  "weight, and gradient of the summed loss", 0, 1e6)
    # optimizer
    loss_sum_ranks: int = optional(8, "divide the summed loss by this; 0: train on the mean loss", 0, 1 << 20)
    matrix_lr: float = option(0.023, "Muon: matrices of the blocks, gates", 0, 10)
    embed_lr: float = option(0.6, "Adam: embedding, value embeddings", 0, 10)
    head_lr: float = option(0.008, "Adam: lm_head", 0, 10)
    scalar_lr: float = option(0.04, "Adam: lambdas, skip weights, smear, backout", 0, 10)
    muon_momentum: float = option(0.95, "Muon's momentum between warmup and cooldown", 0, 0.9999)
    muon_momentum_warmup_start: float = option(0.85, "momentum at step 0 and at the end", 0, 0.9999)
    muon_momentum_warmup_steps: int = optional(300, "steps of that warmup; 0: none")
    muon_momentum_cooldown_steps: int = optional(50, "last steps, in which momentum falls back; 0: none")
    muon_backend_steps: int = option(5, "Polar Express iterations", 1, 20)
    # modded-nanogpt#144: -0.8 s; with tuned rates modded-nanogpt#146: -1.9 s
    normuon_beta2: float = option(0.95, "NorMuon: decay of the mean squares", 0, 0.9999)
    # modded-nanogpt#154: -1.7 s
    weight_decay: float = optional(1.2, "Muon: cautious; decay per step is this * (matrix_lr * LR factor)**2",
                                   0, 1e6)
    # modded-nanogpt#136: -1.7 s, with a smaller batch
    adam_every: int = option(2, "Adam: update every this many steps on summed gradients", 1, 1000)
    beta1: float = option(0.65, "Adam: decay of the first moment", 0, 0.9999)
    beta2: float = option(0.95, "Adam: decay of the second moment", 0, 0.99999)
    adam_eps: float = option(1e-8, "Adam: added to the root of the uncorrected second moment", 1e-20, 1)
    # length
    iterations: int = option(2120, "steps before the extension", 1, 10**9)
    extension_iterations: int = optional(40, "further steps in the last stage; 0: none", 0, 10**9)
    lr_schedule: tuple = option((1.0, 1.51, 1.93), "LR factors before the warmdown, in order", 1e-6, 1000)
    lr_switches: tuple = option((0.0, 0.33, 0.66), "fraction of iterations at which each factor begins", 0, 1)
    warmdown_frac: float = option(0.55, "last fraction of iterations, in which LR falls", 0, 1)
    lr_floor: float = option(0.1, "LR factor at the end of the warmdown", 0, 1)
    score_artifact: bool = option(False, "pack an artifact and score it; 0: score the trained weights")

    def stages(self) -> list[WindowStage]:
        B = self.train_batch_tokens
        T = self.train_seq_len
        rows = [  # the batch grows, modded-nanogpt#163: -2.7 s
            # begins at this fraction of iterations, tokens per step, tokens per row, long window
            WindowStage(0.0, 1 * B, 1 * T, window=384),
            WindowStage(1 / 3, 2 * B, 2 * T, window=896),
            WindowStage(2 / 3, 3 * B, 3 * T, window=1408),
            WindowStage(1.0, 3 * B, 3 * T, window=1664),  # the extension
        ]
        return stage_rows(self, rows, window="window_schedule")

    def check(self) -> None:
        """Raises Refused for constants that contradict each other."""
        super().check()
        require(max(self.attn_gate_dim, self.smear_dim) <= self.model_dim,
                f"attn_gate_dim={self.attn_gate_dim}, smear_dim={self.smear_dim}: neither may exceed "
                f"model_dim={self.model_dim}")
        require(self.window_pattern and not set(self.window_pattern) - set("LS-0"),
                f"window_pattern={self.window_pattern!r}: a layer is L, S, - or 0")
        skips = self.skip_layers
        later = [end > start for start, end in zip(skips[::2], skips[1::2])]
        require(skips == (0,) or (len(skips) % 2 == 0 and all(later)),
                f"skip_layers={show(skips)} must be pairs of a layer and a later one")
        switches = self.lr_switches
        require(len(switches) == len(self.lr_schedule) and [0, *switches[1:]] == sorted(switches),
                f"lr_schedule={show(self.lr_schedule)}, lr_switches={show(switches)}: switches must grow "
                "from 0, one per entry")

    def parameter_table(self) -> dict[str, Row]:
        """{kind: Row}"""
        decay = self.weight_decay * self.matrix_lr
        adam: dict = dict(optimizer="adam", beta1=self.beta1, beta2=self.beta2, eps=self.adam_eps,
                          every=self.adam_every)
        matrix: Callable = partial(Row, optimizer="muon", lr=self.matrix_lr, decay=decay)
        scalar: Callable = partial(Row, group="scalar", lr=self.scalar_lr, precision="fp32", **adam)
        return by_kind([
            # kind                 init; uniform ones have std 0.5 / sqrt(columns)
            matrix("query",        "matrix", init="uniform", scale=0.8660254, second="columns"),
            matrix("key",          "matrix", init="uniform", scale=0.8660254, second="columns"),
            matrix("value",        "matrix", init="uniform", scale=0.8660254, second="columns"),
            matrix("attn_proj",    "matrix", init="constant", scale=0.0, second="columns"),
            matrix("fc",           "matrix", init="uniform", scale=0.8660254),
            matrix("mlp_proj",     "matrix", init="constant", scale=0.0),
            matrix("attn_gate",    "gate", init="constant", scale=0.0, precision="fp32"),
            matrix("smear_gate",   "stream_gate", init="constant", scale=0.0, precision="fp32"),
            Row("embed",           "embed", init="normal", scale=1.0, lr=self.embed_lr, **adam),
            Row("head",            "head", init="constant", scale=0.0, lr=self.head_lr, **adam),
            Row("value_embeds",    "value_embed", init="normal", scale=1.0, lr=self.embed_lr, **adam),
            scalar("resid_lambda", init="constant", scale=1.1),
            scalar("x0_lambda",    init="constant", scale=0.0),
            scalar("value_lambdas", init="constant", scale=0.5),
            scalar("smear",        init="constant", scale=0.0),
            scalar("skip_weights", init="constant", scale=-1.5),  # sigmoid: 0.18
            scalar("backout",      init="constant", scale=0.5),
        ])

    def muon_step(self, state: UpdateState) -> None:
        """NorMuon with cautious weight decay."""
        update = nesterov_of_mean(state)
        update = polar_express(update, self.muon_backend_steps, state.dtype)
        update = normuon_scale(update, state.second, self.normuon_beta2)
        cautious_decay(state.p, update, state.lr, state.decay)
        state.p.sub_(state.lr * update)

    def adam_step(self, state: UpdateState) -> None:
        state.p.sub_(state.lr * adam_update_early_eps(state))

    def top_lr(self, progress: float) -> float:
        """LR factor before the warmdown; larger batches allow larger steps."""
        done = scheduled_progress(self, progress)
        begun = [lr for lr, switch in zip(self.lr_schedule, self.lr_switches) if switch <= done + 1e-9]
        return begun[-1]

    def schedule(self, step: int, progress: float) -> "Schedule":
        """LR is its lr_schedule factor, blended linearly into lr_floor by the warmdown; weight decay
        follows."""
        done = warmdown_done(scheduled_progress(self, progress), self.warmdown_frac)
        lr = self.top_lr(progress) * (1 - done) + self.lr_floor * done
        return Schedule(lr, momentum=self.momentum(step, progress), decay=lr)

    def scoring_window(self) -> int:
        """The long window in final scores, tokens."""
        return self.eval_window or self.stages()[-1].window

    def windows(self, stage: WindowStage | None, T: int) -> dict[str, int]:
        """In final scores, long windows may exceed those of the last stage; short ones do not."""
        last = self.stages()[-1].window or self.train_seq_len
        window = self.scoring_window() if stage is None else stage.window
        grown = window or self.train_seq_len
        short = min(grown, last) // 2 // self.window_block * self.window_block
        return dict(L=min(window or T, T), S=min(T, max(short, self.window_block)))

    def rope(self, window: int) -> tuple[Tensor, float]:
        """Radians per token of each pair of channels (head_dim / 2,) and the factor on q @ k, with YaRN
        applied for each window growth up to this one, or for all growth if no stage has it (final scores)."""
        head_dim = self.model_dim // self.num_heads
        frequencies = rope_spectrum_to_base(head_dim, self.rope_base, self.rope_fraction)
        scale = self.attn_scale
        sizes = [stage.window for stage in self.stages() if stage.window]
        for old, new in zip(sizes, sizes[1:]):
            if old == window:
                break
            frequencies, scale = yarn(frequencies, scale, old, new)
        return frequencies, scale

    def choose_kernels(self, on_gpu: bool, log: Logger) -> WindowKernels:
        chosen = window_attention(on_gpu, log)
        loss: Callable = fused_loss
        if fp8_part(self, on_gpu, log) != "off":
            loss = partial(fp8_fused_loss, most=self.fp8_head_most)
        return WindowKernels(**chosen, **fast_loss(self, on_gpu, loss, kernel_losses))

    def make_model(self, *kernels: WindowKernels) -> Model:
        return SpeedrunModel(self, *kernels)

class SpeedrunContext(NamedTuple):
    """What the forward pass needs besides tokens and weights."""
    rope: tuple[Tensor, Tensor]  # cos and sin of every position, each (T, 1, head_dim / 2)
    attn_scale: Tensor  # factor on q @ k, 0-dim, so that one compiled step serves all stages
    # {L or S: how many earlier tokens a token sees in such a layer}, see kernel_windows()
    windows: dict[str, int | Tensor]
    dtype: torch.dtype  # of activations

class SpeedrunBlock(nn.Module):
    """Attention and MLP, pre-norm, on a learned mix of the residual stream and the embedding. kind: the
    layer's letter in window_pattern."""
    def __init__(self, cfg: Speedrun, kind: str) -> None:
        super().__init__()
        C = cfg.model_dim
        H = cfg.num_heads
        self.head_dim = C // H
        self.attends = kind in "LS"
        self.query = parameter(C, C, on=self.attends)
        self.attn_proj = parameter(C, C, on=self.attends)
        self.key = parameter(C, C, on=self.attends)
        self.value = parameter(C, C, on=self.attends)
        gated = self.attends and cfg.attn_gate_dim > 0
        self.attn_gate = parameter(H, cfg.attn_gate_dim, on=gated)
        self.value_lambdas = parameter(2, on=self.attends)  # factors on values and on value embeddings
        has_mlp = kind != "0"
        self.fc = parameter(cfg.mlp_mult * C, C, on=has_mlp)
        self.mlp_proj = parameter(C, cfg.mlp_mult * C, on=has_mlp)
        self.resid_lambda = parameter(1, on=has_mlp)
        self.x0_lambda = parameter(1, on=has_mlp)

    def forward(self, x: Tensor, x0: Tensor, value_embed: Tensor | None, mask: Mask,
                context: SpeedrunContext) -> Tensor:
        """x (B, T, C), the residual stream, and x0 (B, T, C), the embedding -> the residual stream.
        value_embed (B, T, C), in layers that have one."""
        embedding = self.x0_lambda.to(x.dtype) * x0
        x = self.resid_lambda.to(x.dtype) * x + embedding
        if self.attends:
            x = x + self.attend(rms_norm(x), value_embed, mask, context)
        return x + mlp(rms_norm(x), self.fc, self.mlp_proj, self.kernels.linear)

    def attend(self, h: Tensor, value_embed: Tensor | None, mask: Mask, context: SpeedrunContext) -> Tensor:
        """h (B, T, C), normalized -> what attention adds to the residual stream (B, T, C)."""
        product = self.kernels.linear
        q, k, v = project_heads(h, self.head_dim, product, self.query, self.key, self.value)
        own, embedded = self.value_lambdas.to(v.dtype)
        if value_embed is not None:
            v = own * v + embedded * split_heads(value_embed, self.head_dim)
        q = rotate(rms_norm(q) * context.attn_scale, *context.rope)
        k = rotate(rms_norm(k), *context.rope)
        y = attend_heads(q, k, v, mask, self.kernels.attention)
        factor = None
        if self.attn_gate is not None:
            factor = gate(h, self.attn_gate)[..., None]
        if value_embed is None:
            # attention is linear in v, so v's factor can wait for the gate, which spares a pass over v
            factor = own if factor is None else own * factor
        if factor is not None:
            y = y * factor
        return product(y.flatten(2), self.attn_proj)

class SpeedrunModel(Model):
    """The blocks in order, each with its window; skip connections, and backout at the end."""
    def __init__(self, cfg: Speedrun, kernels: WindowKernels = WindowKernels()) -> None:
        super().__init__()
        V = cfg.vocab_size
        C = cfg.model_dim
        N = cfg.num_layers
        self.cfg = cfg
        self.kinds = per_layer(cfg.window_pattern, N)
        self.tables = per_layer(cfg.value_embed_layers, N)
        pairs = zip(cfg.skip_layers[::2], cfg.skip_layers[1::2])
        self.skips = [(start, end) for start, end in pairs if end < N]
        self.embed = parameter(V, C)
        self.head = parameter(V, C)
        self.smear = parameter(1, 1, on=cfg.smear_dim)
        self.smear_gate = parameter(1, cfg.smear_dim, on=cfg.smear_dim)
        self.skip_weights = parameter(len(self.skips), 1, on=self.skips)
        self.backout = parameter(1, on=0 < cfg.backout_layer < N)
        self.blocks = nn.ModuleList([SpeedrunBlock(cfg, kind) for kind in self.kinds])
        self.value_embeds = nn.ParameterList([parameter(V, C) for _ in range(max(self.tables))])
        self.use(kernels)

    def context(self, T: int, device: torch.device, dtype: torch.dtype = torch.float32,
                stage: WindowStage | None = None) -> SpeedrunContext:
        cfg = self.cfg
        frequencies, scale = cfg.rope(cfg.scoring_window() if stage is None else stage.window)
        windows = kernel_windows(cfg, self.kinds, stage, T, device, self.kernels.window,
                                 by_document=cfg.max_doc_len > 0)
        rope = rope_tables(T, frequencies, device, dtype)
        return SpeedrunContext(rope, torch.tensor(scale, device=device), windows, dtype)

    def hidden(self, tokens: Tensor, context: SpeedrunContext) -> Tensor:
        """tokens (B, T) -> last activations, normalized (B, T, C)."""
        documents = None
        if self.cfg.max_doc_len:
            documents = (tokens == self.cfg.bos_id).cumsum(1)
        masks = layer_masks(context.windows, tokens, documents, self.kernels.window_mask)
        x = F.embedding(tokens, self.embed).to(context.dtype)
        if self.smear is not None:
            x = smear(x, self.smear, self.smear_gate)
        x = x0 = rms_norm(x)
        # looked up once, even if layers share a table: the gradient of a look-up is as large as its table
        value_embeds = [F.embedding(tokens, table).to(x.dtype) for table in self.value_embeds]
        outputs = []
        for i, (block, kind, table) in enumerate(zip(self.blocks, self.kinds, self.tables)):
            for s, (start, end) in enumerate(self.skips):
                if end == i:
                    x = x + torch.sigmoid(self.skip_weights[s].to(x.dtype)) * outputs[start]
            value_embed = None
            if block.attends and table:
                value_embed = value_embeds[table - 1]
            if kind != "0":
                x = block(x, x0, value_embed, masks.get(kind), context)
            outputs.append(x)
        if self.backout is not None:
            x = x - self.backout.to(x.dtype) * outputs[self.cfg.backout_layer]
        return rms_norm(x)

# ---------- speedrun_plus: the same game as speedrun, its record of 3 August 2026
class MuddGate(NamedTuple):
    """A gate computed by MUDD: a slice of mudd()'s outputs for each token."""
    name: str
    layer: int  # where it is used
    width: int  # how many values it has
    first: float  # initial value of each

class LastMudd(NamedTuple):
    """MUDD's weights for the last layer, each (B, T, 1), in the order of their rows in mudd_w2. The numbers
    are what they start with: 2 for value embeddings is the maximum of the other layers' gates, and the
    factors start as in other layers."""
    # added to attention's values
    value_first: Any = 0.0  # the first stream
    value_attn_in: Any = 0.0  # the stream after attn_source
    value_x: Any = 0.0  # the residual stream
    # added to the residual stream
    stream_first: Any = 0.0
    stream_attn_in: Any = 0.0
    stream_x: Any = 0.0
    # on the value embedding
    embed_low: Any = 2.0  # in the first half of the heads
    embed_high: Any = 2.0  # in the second half
    # on the sum after attention
    attn_resid: Any = 1.1**0.5  # the residual stream
    attn_out: Any = 1.0  # attention's output
    attn_first: Any = 0.0
    attn_bigrams: Any = 0.05
    # on the sum after the MLP
    mlp_resid: Any = 1.1**0.5
    mlp_out: Any = 1.0

class EndMudd(NamedTuple):
    """MUDD's weights for what is added to the last stream, each (B, T, 1), in the order of their rows in
    mudd_w2. The output starts as that stream minus half of the one after attn_source."""
    first: Any = 0.0  # the first stream
    attn_in: Any = -0.5  # the stream after attn_source
    before: Any = 0.0  # the stream before the last layer
    value_embed: Any = 0.0  # that of layer 1
    skipped: Any = 0.0  # the output of the layer where the skip connection begins

@dataclass(frozen=True)
class TargetStage(WindowStage):
    """A stage of a recipe with windows and several targets per token."""
    # loss weights of the next targets and of the target's prefix token, each as (stage start, stage end),
    # linear in between
    next_weights: tuple = ((1.0, 1.0),)
    prefix_weights: tuple = (0.0, 0.0)

# modded-nanogpt#344, on record 89: val_loss 3.2747 (mean of four seeds) after 1,315 steps, 350.6M tokens, in
# 70.09 s; 30.5, 51.9, 75.1 and 74.7 ms per step in its stages. This port is untimed. The matrices that
# Adam updates are bf16 in the public script; here they are fp32 with a bf16 copy.
@dataclass(frozen=True)
class SpeedrunPlus(SpeedrunRecipe):
    """Eleven layers; the last one and the output mix earlier layers with weights that each token computes for
    itself (MUDD). Paired heads, three kinds of embeddings, losses on several targets, fp8."""
    preset: str = option("speedrun_plus", "the recipe", model=True)
    # size and topology
    num_layers: int = option(11, "blocks; must equal window_pattern's length", 1, 1000, model=True)
    model_dim: int = option(768, "width of the residual stream", 2, 1 << 16, model=True)
    num_heads: int = option(6, "query heads", 1, 4096, model=True)
    # narrower than values: modded-nanogpt#344, -3.8 s with fp8_qkv and the MLP's backward pass in fp8
    qk_dim: int = option(96, "width of query and key heads; values have model_dim / num_heads", 4, 4096,
                         model=True)
    mlp_mult: int = option(4, "MLP width / model_dim", 1, 64, model=True)
    window_pattern: str = option("PSPLSP-SSPL", "per layer: L long window, S short, P short with paired "
                                 "heads (modded-nanogpt#58: -3.5 s), - no attention", model=True)
    window_schedule: tuple = option((), "long window per stage, in earlier tokens; empty: as stages() "
                                    "has it", 1, 1 << 20, model=True, of=int)
    window_block: int = option(128, "windows are multiples of this many tokens", 1, 1 << 16, model=True)
    eval_window: int = option(2560, "long window of the final scores, tokens", 1, 1 << 20, model=True)
    max_doc_len: int = option(2048, "maximum document length in any stage, tokens", 1, 1 << 20)
    # layers are numbered from 0
    value_embed_layers: tuple = option((1, 2, 8, 9, 10), "layers with a value embedding (modded-nanogpt#63: "
                                       "-0.3 s)", 0, 999, model=True)
    xsa_layers: tuple = optional((1, 3, 4, 7), "layers with learned XSA (modded-nanogpt#82: -0.6 s); empty: "
                                 "none", 0, 999, model=True)
    head_gate_layers: tuple = optional((3, 10), "layers with a gate on each head's output; empty: none",
                                       0, 999, model=True)
    skip_layers: tuple = option((3, 6), "from, to: layer `to` adds `from`'s output in place of attention",
                                0, 999, model=True)
    attn_source: int = option(7, "attention in later layers reads this layer's output "
                              "(modded-nanogpt#77: -0.7 s)", 0, 999, model=True)
    gate_layer: int = option(4, "MUDD gates of this and later layers read its input, those of earlier "
                             "layers the embedding", 1, 999, model=True)
    # techniques
    key_offset: bool = option(True, "long layers: half of each key head from the token before "
                              "(modded-nanogpt#49: -1.4 s)", model=True)
    attn_scale: float = option(0.1 * (128 / 96) ** 0.5, "factor on q @ k in the first stage",
                               1e-6, 100, model=True)
    rope_base: float = option(1024.0, "RoPE: longest wavelength / 2 pi", 1, 1e9, model=True)
    # modded-nanogpt#85: -3.5 s together with the MUDD gates; alone 0.0046 nats
    dc_window: int = optional(112, "last layer: keys that dynamic attention (DC) sees; 0: no DC", 0, 1 << 16,
                              model=True)
    smear_dim: int = option(12, "channels read by the gate that adds the previous token (smear)", 1, 1 << 16,
                            model=True)
    value_gate_dim: int = option(12, "channels read by the gates on value embeddings, half of them from the "
                                 "value embedding (modded-nanogpt#55: -1.3 s)", 2, 1 << 16, model=True)
    bigram_rows: int = option(377_280, "rows of the hashed bigram embedding (modded-nanogpt#62: -5.6 s)",
                              3, 1 << 26, model=True)
    bigram_sign_rows: int = optional(8192, "rows of random bigram signs (modded-nanogpt#83: -1.3 s); 0: none",
                                     0, 1 << 20, model=True)
    mudd_dim: int = option(64, "hidden width of MUDD (modded-nanogpt#81: -2.6 s)", 1, 1 << 16, model=True)
    mudd_gate_dim: int = option(64, "hidden width of the MUDD gates (modded-nanogpt#85: -3.5 s with DC)",
                                1, 1 << 16, model=True)
    # modded-nanogpt#54: -2.9 s; written there as 23 * sigmoid((logits + 5) / 7.5)
    logit_softcap: float = option(11.5, "logits = cap * tanh((logits + shift) / width)", 1e-3, 1e4,
                                  model=True)
    logit_shift: float = optional(5.0, "shift in logit_softcap's formula; 0: symmetric", 0, 1e4, model=True)
    logit_width: float = option(15.0, "width in logit_softcap's formula", 1e-3, 1e4, model=True)
    # modded-nanogpt#53: -2.9 s, together with untie_at
    next_targets: int = option(3, "multi-token prediction: maximum targets per token; 1: only the next", 1, 8)
    prefix_weight: float = optional(0.25, "weight of the loss on the longest other token that is a prefix "
                                    "of the target (modded-nanogpt#88: -0.8 s); 0: off", 0, 100)
    # data and batch
    data_path: str = option("data/datasets/fineweb10B_gpt2", "folder of token shards")
    vocab_path: str = option("data/tokenizers/gpt2_vocab.json", "GPT-2's vocabulary, for prefix tokens "
                             "where there is no tokenizer")
    vocab_size: int = optional(50_304, "tokens; 0: the tokenizer's", 0, 65_536, model=True)
    train_seq_len: int = option(16_384, "tokens per row of the first stage", 2, 1 << 20, model=True)
    train_batch_tokens: int = option(131_072, "tokens per step over all ranks in the first stage", 1, 1 << 30)
    # modded-nanogpt#72: -1.2 s, together with lr_floor
    doc_schedule: tuple = option((), "maximum document length per stage, tokens; empty: as stages() has it",
                                 1, 1 << 20, of=int)
    packing: str = option("documents", "how training rows are cut: see Documents and, for proxies, Rows",
                          choices=("documents", "rows"))
    max_epochs: int = optional(1, "passes over the training tokens; 0: any number")
    val_tokens: int = optional(10_485_760, "how many tokens of val are scored, from its start; 0: all")
    val_loss_every: int = optional(250, "steps between validations, from step 0 on; 0: at the end only")
    val_batch_size: int = option(262_144, "tokens per evaluation step and rank", 1)
    eval_context: int = optional(262_144, "tokens per row in evaluation; 0: train_seq_len")
    # fp8, in training only
    fp8: str = option("auto-all", "training matmuls in fp8; auto-all: if the GPU has it",
                      choices=("off", "all", "auto-all"))
    fp8_head: bool = option(True, "matmuls of lm_head in fp8, where fp8 is on; 0: bf16")
    # modded-nanogpt#344: -3.8 s, together with qk_dim and the MLP's backward pass in fp8
    fp8_qkv: bool = option(True, "matmuls of query, key and value in fp8, where fp8 is on; 0: bf16")
    # modded-nanogpt#84: -0.5 s (up), modded-nanogpt#89: -0.8 s (down)
    fp8_mlp: bool = option(True, "matmuls of the MLPs in fp8, where fp8 is on; 0: bf16")
    fp8_head_most: tuple = option((100.0, 1.6, 0.75), "lm_head in fp8: largest input, weight, and gradient "
                                  "of the summed loss", 1e-9, 1e6)
    # optimizer
    loss_sum_ranks: int = optional(8, "divide the summed loss by this; 0: train on the mean loss", 0, 1 << 20)
    matrix_lr: float = option(0.023, "Muon: matrices of the blocks", 0, 10)
    embed_lr: float = option(0.6, "Adam: value and bigram embeddings", 0, 10)
    head_lr: float = option(0.008, "Adam: lm_head and embedding", 0, 10)
    gate_lr: float = option(0.008, "Adam: gates, MUDD, post_lambdas; scaled in parameter_table()", 0, 10)
    scalar_lr: float = option(0.04, "Adam: the other lambdas", 0, 10)
    muon_pairs: bool = option(True, "orthogonalize query and key two heads at a time "
                              "(modded-nanogpt#80: -0.3 s); 0: all heads together")
    muon_momentum: float = option(0.95, "Muon's momentum between warmup and cooldown", 0, 0.9999)
    muon_momentum_warmup_start: float = option(0.85, "momentum at the first step and at the end", 0, 0.9999)
    muon_momentum_warmup_steps: int = optional(300, "steps of that warmup; 0: none")
    muon_momentum_cooldown_steps: int = optional(50, "last steps, in which momentum falls back; 0: none")
    muon_backend_steps: int = option(5, "Polar Express iterations", 1, 20)
    polar_margin: float = option(1.02, "Polar Express: safety factor on a matrix's norm", 1, 2)
    normuon_beta2: float = option(0.9, "NorMuon: decay of the mean squares", 0, 0.9999)
    weight_decay: float = optional(1.2, "Muon: cautious; decay per step is this * (matrix_lr * LR factor)**2",
                                   0, 1e6)
    adam_weight_decay: float = optional(0.005, "Adam: cautious, times LR squared and a factor in "
                                        "parameter_table() (modded-nanogpt#50: -1.1 s)", 0, 1e6)
    adam_eps: float = option(1e-10, "Adam: added to the root of the second moment", 1e-20, 1)
    adam_every: int = option(2, "Adam: update every this many steps on summed gradients", 1, 1000)
    # length
    iterations: int = option(1270, "scheduled steps", 1, 10**9)
    extension_iterations: int = optional(45, "further steps in the last stage; 0: none", 0, 10**9)
    # modded-nanogpt#51: -3.2 s; the embedding starts as a copy of lm_head and stays equal to it until then
    untie_at: float = optional(847 / 1270, "fraction of iterations at which lm_head is untied; 0: never tied",
                               0, 1)
    warmdown_frac: float = option(0.6, "last fraction of iterations, in which LR falls", 0, 1)
    lr_floor: float = option(0.15, "LR factor at the end of the warmdown", 0, 1)
    score_artifact: bool = option(False, "pack an artifact and score it; 0: score the trained weights")

    def check(self) -> None:
        """Raises Refused for constants that contradict each other."""
        super().check()
        self.check_topology()
        require(self.num_heads % 2 == 0 and self.qk_dim % 4 == 0,
                f"num_heads={self.num_heads} must be even, qk_dim={self.qk_dim} a multiple of 4")
        half = self.value_gate_dim // 2
        require(max(self.smear_dim, half) <= self.model_dim and 2 * half == self.value_gate_dim,
                f"smear_dim={self.smear_dim} and value_gate_dim / 2 may not exceed model_dim="
                f"{self.model_dim}, and value_gate_dim={self.value_gate_dim} must be even")

    def check_topology(self) -> None:
        """Raises Refused if constants that name layers contradict each other."""
        pattern = self.window_pattern
        last = len(pattern) - 1
        require(not set(pattern) - set("LSP-") and last > 0,
                f"window_pattern={pattern!r}: two or more layers, each L, S, P or -")
        require(self.num_layers == last + 1,
                f"num_layers={self.num_layers}: window_pattern={pattern} has {last + 1} layers, and the "
                "other lists name them by their numbers")
        skips = self.skip_layers
        require(len(skips) == 2 and skips[0] < skips[1] < last,
                f"skip_layers={show(skips)}: two, in rising order, before the last one")
        require([i for i, kind in enumerate(pattern) if kind == "-"] == [skips[1]],
                f"window_pattern={pattern}: '-' must stand at layer {skips[1]}, the second of "
                f"skip_layers={show(skips)}, and nowhere else")
        require(self.gate_layer <= skips[1] and self.attn_source < last,
                f"gate_layer={self.gate_layer} must not be after the second of skip_layers, "
                f"attn_source={self.attn_source} must be before the last layer")
        attending = {layer for layer, kind in enumerate(pattern) if kind != "-"}
        for name in ("value_embed_layers", "xsa_layers", "head_gate_layers"):
            others = {*getattr(self, name)} - attending
            require(not others, f"{name}={show(getattr(self, name))}: layer {min(others, default=0)} has no "
                    "attention")
        require({1, last} <= {*self.value_embed_layers},
                f"value_embed_layers={show(self.value_embed_layers)} must hold 1 and {last}")
        unpaired = {*self.xsa_layers, last} if self.dc_window else {*self.xsa_layers}
        require("P" not in [pattern[layer] for layer in unpaired],
                f"window_pattern={pattern}: XSA and dynamic attention are not for paired heads")

    def stages(self) -> list[TargetStage]:
        """Three roughly equal parts of iterations, then the extension."""
        B = self.train_batch_tokens
        T = self.train_seq_len
        n = self.next_targets
        prefix = self.prefix_weight
        first = ((1.0, 1.0), (0.5, 0.5), (0.25, 0.0))
        second = ((1.0, 1.0), (0.5, 0.0))
        stage = TargetStage
        return stage_rows(self, [
            #     begins at   batch  row    LR factor  long window
            stage(0.0,        B,     T,     lr=1.0,    window=384,  doc_len=896,
                  next_weights=first[:n], prefix_weights=(prefix, prefix)),
            stage(423 / 1270, 2 * B, 2 * T, lr=1.52,   window=896,  doc_len=2048,
                  next_weights=second[:n], prefix_weights=(prefix, 0.0)),
            stage(847 / 1270, 3 * B, 3 * T, lr=1.73,   window=1408, doc_len=2048),
            stage(1.0,        3 * B, 3 * T, lr=1.73,   window=1664, doc_len=2048),
        ], window="window_schedule", doc_len="doc_schedule")

    def parameter_table(self) -> dict[str, Row]:
        """{kind: Row}"""
        matrix_decay = self.weight_decay * self.matrix_lr
        matrix: Callable = partial(Row, group="matrix", optimizer="muon", decay=matrix_decay)
        pair = 2 * self.qk_dim if self.muon_pairs else 0

        def adam(kind: str, group: str, lr: float, decay: float = 0.0, **columns: Any) -> Row:
            """A row whose decay is proportional to the square of its learning rate."""
            return Row(kind, group, "adam", lr, lr * self.adam_weight_decay * decay, decay_with_lr=True,
                       eps=self.adam_eps, every=self.adam_every, **columns)

        gate: Callable = partial(adam, beta1=0.9, beta2=0.99)
        scalar: Callable = partial(adam, group="scalar", beta1=0.9, precision="fp32")
        table: Callable = partial(adam, lr=self.embed_lr, decay=5, beta1=0.75, beta2=0.95)
        head: Callable = partial(adam, lr=self.head_lr, decay=150, beta1=0.5, beta2=0.95, init="normal",
                                 scale=0.005)
        mudd: Callable = partial(gate, group="mudd", precision="fp16")
        lr = self.matrix_lr
        gate_lr = self.gate_lr
        wide = self.mlp_mult**0.5
        return by_kind([
            # kind              init and learning rate
            matrix("query",     init="uniform", scale=0.8660254, lr=lr, unit_rows=pair),  # std 0.5 / sqrt(C)
            matrix("key",       init="uniform", scale=0.8660254, lr=lr, unit_rows=pair),
            matrix("value",     init="uniform", scale=0.8660254, lr=lr),
            # modded-nanogpt#64: -1.2 s; uniform instead of 0, while sa_lambdas halve the values at first
            matrix("attn_proj", init="uniform", scale=0.8660254, lr=lr, second="columns"),
            matrix("fc",        init="uniform", scale=0.8660254, lr=lr),  # LR doubles, since it is tall
            matrix("mlp_proj",  init="constant", scale=0.0, lr=2 * wide * lr, second="columns"),
            head("head", "head"),
            head("embed", "embed"),
            table("value_embeds", "value_embed", init="normal", scale=0.01),
            table("bigram_embed", "value_embed"),
            gate("value_gate", "gate", gate_lr, decay=1),
            gate("smear_gate", "stream_gate", gate_lr * 0.01),
            # MUDD; adjust_init() sets the output biases
            mudd("mudd_w1", lr=gate_lr * 0.25, decay=1, init="uniform", scale=1.0),
            mudd("mudd_w2", lr=gate_lr * 0.25, decay=1),
            mudd("mudd_b2", lr=gate_lr * 0.25),
            mudd("mudd_gate_w1", lr=gate_lr * 0.1, decay=1, init="uniform", scale=1.0),
            mudd("mudd_gate_w2", lr=gate_lr * 0.1, decay=1),
            mudd("mudd_gate_b2", lr=gate_lr * 0.1),
            mudd("mudd_gate_scale", lr=gate_lr * 0.1, init="constant", scale=MUDD_SCALE),
            scalar("sa_lambdas", lr=self.scalar_lr, beta2=0.99),
            scalar("smear_lambda", lr=self.scalar_lr, beta2=0.99),
            scalar("skip_lambda", lr=self.scalar_lr, beta2=0.99, scale=-1.5),
            scalar("resid_lambdas", lr=self.scalar_lr, beta2=0.95, scale=1.1**0.5),
            scalar("post_lambdas", lr=gate_lr, beta2=0.95, scale=1.0),
        ])

    def adjust_init(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The embedding starts as a copy of lm_head; sa_lambdas halve queries, keys and values; MUDD's
        output biases set the initial values of its weights and gates."""
        values["embed"] = values["head"].clone()
        for layer in range(self.num_layers):
            values[f"blocks.{layer}.sa_lambdas"] = torch.tensor([0.5, 1.0])
        for place, weights in enumerate((LastMudd(), EndMudd())):
            values["mudd_b2"][place, :len(weights)] = torch.tensor(weights) / MUDD_SCALE
        for half, gates in enumerate(self.gate_tables()):
            first = torch.tensor(gate_values(gates))
            values["mudd_gate_b2"][half, :len(first)] = first / MUDD_SCALE
        return values

    def muon_step(self, state: UpdateState) -> None:
        """NorMuon with cautious weight decay."""
        update = nesterov_of_mean(state)
        update = polar_express(update, self.muon_backend_steps, state.dtype, self.polar_margin)
        update = normuon_scale(update, state.second, self.normuon_beta2)
        cautious_decay(state.p, update, state.lr, state.decay)
        state.p.sub_(state.lr * update)

    def adam_step(self, state: UpdateState) -> None:
        """Adam with cautious weight decay."""
        update = adam_update_early_eps(state)
        if self.adam_weight_decay:
            update = update + state.decay * state.p * (update * state.p > 0)
        state.p.sub_(state.lr * update)

    def schedule(self, step: int, progress: float) -> "Schedule":
        """LR is the stage's factor, blended linearly into lr_floor by the warmdown; weight decay follows."""
        scheduled = scheduled_progress(self, progress)
        done = warmdown_done(scheduled, self.warmdown_frac)
        lr = stage_at(self, progress).lr * (1 - done) + self.lr_floor * done
        tied = self.untie_at > 0 and scheduled <= self.untie_at + 1e-9
        return Schedule(lr, momentum=self.momentum(step, progress), decay=lr, tied=tied)

    def windows(self, stage: TargetStage | None, T: int) -> dict[str, int]:
        last = self.stages()[-1]
        half = (stage or last).window // 2
        short = max(1, half // self.window_block) * self.window_block
        long = stage.window if stage else self.eval_window
        return dict(L=min(T, long), S=min(T, short))

    def rope(self, window: int | None = None) -> tuple[Tensor, float]:
        """Radians per token of each pair of channels that rotates (qk_dim / 4,) and the factor on q @ k,
        with YaRN applied for each growth of the long window up to this one; None: for every growth."""
        frequencies = rope_spectrum_to_base(self.qk_dim, self.rope_base, 0.5)[:self.qk_dim // 4]
        scale = self.attn_scale
        sizes = [stage.window for stage in self.stages()]
        for old, new in zip(sizes, sizes[1:]):
            if old == window:
                break
            frequencies, scale = yarn(frequencies, scale, old, new)
        return frequencies, scale

    def gate_tables(self) -> tuple[list[MuddGate], list[MuddGate]]:
        """The MUDD gates computed from the embedding, and those computed from gate_layer's input, each list
        in the order of its rows in mudd_gate_w2."""
        H = self.num_heads
        layers = range(self.num_layers)
        gates = [MuddGate("xsa", i, H, 0.0) for i in layers if i in self.xsa_layers]
        gates += [MuddGate("heads", i, H, 0.25) for i in layers if i in self.head_gate_layers]
        for i in layers[:-1]:
            if self.window_pattern[i] != "-":
                gates += [MuddGate("x0", i, 1, 0.0), MuddGate("bigrams", i, 1, 0.05)]
        gates.append(MuddGate("skip", self.skip_layers[1], 1, 0.5))
        if self.dc_window:
            gates += [MuddGate("mix", layers[-1], H, 1.0), MuddGate("spread", layers[-1], H, 0.0)]
        early = [g for g in gates if g.layer < self.gate_layer]
        late = [g for g in gates if g.layer >= self.gate_layer]
        return early, late

    def loss_weights(self, progress: float) -> list[float]:
        """Loss weights at this progress: one per next target, then one for the prefix loss if the stage has
        it."""
        stage: Any = stage_at(self, progress)
        later = [other.begins for other in self.stages() if other.begins > stage.begins]
        end = min([*later, 1.0])
        done = (progress - stage.begins) / (end - stage.begins or 1.0)
        pairs = [*stage.next_weights]
        if any(stage.prefix_weights):
            pairs.append(stage.prefix_weights)
        return [first + (last - first) * done for first, last in pairs]

    def optimizer(self) -> "type[Optimizer]":
        return SpeedrunPlusOptimizer

    def choose_kernels(self, on_gpu: bool, log: Logger) -> "SpeedrunPlusKernels":
        """fp8 for lm_head, QKV and MLPs, each with its own switch."""
        sides = [2 * self.num_heads * self.qk_dim, self.mlp_mult * self.model_dim]
        fp8 = fp8_part(self, on_gpu, log, sides) != "off"
        chosen = window_attention(on_gpu, log)
        loss: Callable = fused_loss
        if fp8 and self.fp8_head:
            loss = partial(fp8_fused_loss, most=self.fp8_head_most)
        if fp8 and self.fp8_qkv:
            chosen["qkv"] = fp8_qkv
        if fp8 and self.fp8_mlp:
            chosen["mlp"] = fp8_mlp
            if on_gpu and self.triton_kernels and triton:
                chosen["mlp"] = partial(fp8_mlp, transpose=kernel_transpose)
        return SpeedrunPlusKernels(**chosen, **fast_loss(self, on_gpu, loss, kernel_losses))

    def check_data(self, data: "Data") -> None:
        if self.prefix_weight:
            texts_of_tokens(self, data.tokenizer)

    def make_model(self, *kernels: "SpeedrunPlusKernels") -> Model:
        return SpeedrunPlusModel(self, *kernels)

def pair_rope_tables(T: int, frequencies: Tensor, device: torch.device,
                     dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin for paired heads, each (T, 1, 2, pairs of channels): even heads of token t turn as at
    position 2 t, odd ones as at 2 t + 1, although pair_heads() pairs by halves, as in modded-nanogpt#58."""
    positions = torch.arange(2 * T, device=device).view(T, 1, 2, 1)
    angles = positions * frequencies.to(device)
    return angles.cos().to(dtype), angles.sin().to(dtype)

def rotate_adjacent(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on adjacent channels in the first part of each head; the rest stays as it is. x (..., D), cos and
    sin (..., pairs of channels)."""
    rotating = 2 * cos.size(-1)
    a, b = x[..., :rotating].unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos + b * sin, b * cos - a * sin), -1).flatten(-2)
    return torch.cat((turned, x[..., rotating:]), -1)

def scaled_xsa(y: Tensor, v: Tensor, strength: Tensor) -> Tensor:
    """XSA with a learned strength (arXiv:2603.09078; modded-nanogpt#82: -0.6 s): removes a part of each
    head's output along the token's own value. y and v (B, T, H, D), strength (B, T, H), before tanh."""
    along = (y * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True).clamp_min(1e-8)
    return y - torch.tanh(strength)[..., None] * along * v

def dynamic_attention(q: Tensor, k: Tensor, v: Tensor, mix: Tensor, spread: Tensor, mask: Tensor) -> Tensor:
    """What lightweight dynamic attention adds to the heads' outputs, (B, T, H, E) (DC, arXiv:2405.08553;
    modded-nanogpt#85: -3.5 s with the MUDD gates): `mix` merges the attention patterns of all heads
    into one, which is applied to the values of each head; `spread` weights the results. q (B, T, H, D),
    already scaled, k (B, T, H, D), v (B, T, H, E), mix and spread (B, T, H); mix is normalized over heads
    here. mask: from dynamic_mask(); memory grows as T * mask.size(-1) per head."""
    T = q.size(1)
    mix = mix_of_heads(mix, v.dtype)
    blocks = mask.size(1)
    width = mask.size(2)
    q = query_blocks(q, blocks, width)
    mix = query_blocks(mix, blocks, width)
    k = query_blocks(k, blocks, width)
    v = query_blocks(v, blocks, width)
    if blocks > 1:
        k = with_block_before(k)
        v = with_block_before(v)
    scores = torch.einsum("bnqhd,bnkhd->bnhqk", q, k).float()
    patterns = scores.masked_fill(~mask[:, :, None], -torch.inf).softmax(-1).to(v.dtype)
    pattern = (mix.mT[..., None] * patterns).sum(2)
    y = (pattern @ v.flatten(-2)).unflatten(-1, v.shape[-2:])
    return spread[..., None] * y.flatten(1, 2)[:, :T]

def dynamic_mask(keys: int, documents: Tensor) -> Tensor:
    """The mask for dynamic_attention(): each token sees the last `keys` tokens of its document, itself
    included. documents (B, T): the number of each token's document."""
    return window_mask(keys - 1, documents.size(1), documents, documents.device, width=keys)

def mix_of_heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (B, T, H), RMS-normalized over the heads of each token."""
    return F.rms_norm(x.float(), (x.size(-1),), eps=1e-6).to(dtype)

def query_blocks(x: Tensor, blocks: int, width: int) -> Tensor:
    """(B, T, ...) -> (B, blocks, width, ...), zeros at the end."""
    padding = (0, 0) * (x.dim() - 2) + (0, blocks * width - x.size(1))
    return F.pad(x, padding).unflatten(1, (blocks, width))

def with_block_before(x: Tensor) -> Tensor:
    """Keys that each block of queries sees: (B, blocks, width, ...) -> (B, blocks, 2 width, ...)."""
    before = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)
    return torch.cat((before, x), 2)

def mudd(x: Tensor, w1: Tensor, w2: Tensor, bias: Tensor, scale: float | Tensor) -> Tensor:
    """A small MLP computes per-token weights for mixing streams and values, or gates (MUDD,
    arXiv:2502.12170; modded-nanogpt#81: -2.6 s). x (B, T, C), w1 (hidden, C), w2 (n, hidden), bias (n,),
    scale: a number or (1,) -> (B, T, n)."""
    return (linear(F.gelu(linear(x, w1)), w2) + bias.to(x.dtype)) * scale

def mudd_parameters(width: int, hidden: int, rows: list[int]) -> tuple:
    """w1 (places, hidden, C), w2 (places, n, hidden) and bias (places, n) for mudd() in several places of a
    model of width C. rows: how many values each place needs; n is the largest, and the rows that a place does
    not need are idle."""
    places = len(rows)
    n = max(rows)
    return parameter(places, hidden, width), parameter(places, n, hidden), parameter(places, n)

def mudd_weights(x: Tensor, kind: Any, w1: Tensor, w2: Tensor, bias: Tensor, scale: float) -> Any:
    """The weights with which each token of x (B, T, C) mixes streams, as a `kind`, which is LastMudd or
    EndMudd: mudd() with the first rows of w2 and bias."""
    n = len(kind._fields)
    values = mudd(x, w1, w2[:n], bias[:n], scale)
    return kind(*values.split(1, -1))

def gate_values(gates: list[MuddGate]) -> list[float]:
    """The initial values of all these gates, one after the other (n,)."""
    return [g.first for g in gates for _ in range(g.width)]

def mudd_gates(x: Tensor, gates: list[MuddGate], w1: Tensor, w2: Tensor, bias: Tensor,
               scale: Tensor) -> dict[int, dict[str, Tensor]]:
    """{layer: {name: gate (B, T, its width)}}, in place of learned factors and per-layer gates
    (modded-nanogpt#85: -3.5 s with dynamic attention). One mudd() call on x (B, T, C), with the first rows of
    w2 and bias, computes them all, in the order of `gates`. scale (1,)."""
    n = len(gate_values(gates))
    values = mudd(x, w1, w2[:n], bias[:n], scale.to(x.dtype))
    found: dict[int, dict[str, Tensor]] = {}
    for g, part in zip(gates, values.split([g.width for g in gates], -1)):
        found.setdefault(g.layer, {})[g.name] = part
    return found

def random_signs(rows: int, width: int) -> Tensor:
    """int8 (rows, width) of 1 and -1, the same on every machine: the bits of splitmix64's first numbers."""
    numbers = torch.arange(1, 1 + math.ceil(rows * width / 64)) * (0x9E3779B97F4A7C15 - 2**64)  # modulo 2**64
    rounds = [(30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)]
    for shift, factor in rounds:
        without_sign = (1 << 64 - shift) - 1
        numbers = numbers ^ (numbers >> shift & without_sign)
        if factor >= 2**63:
            factor -= 2**64  # the same number as an int64
        numbers = numbers * factor
    bits = numbers[:, None] >> torch.arange(64) & 1
    return (2 * bits - 1).to(torch.int8).flatten()[:rows * width].view(rows, width)

def bigram_signs(tokens: Tensor, signs: Tensor) -> Tensor:
    """A row of signs (B, T, C) for each token and the one before, so that bigrams that share a row of the
    hashed table still differ (modded-nanogpt#83: -1.3 s). tokens (B, T), signs (rows, C)."""
    rows = (tokens[:, 1:] ^ tokens[:, :-1]) % len(signs)
    return signs[F.pad(rows, (1, 0))]

def next_targets(targets: Tensor, n: int) -> Tensor:
    """targets (B, T) -> for each token the next n in its row, (B, T, n); -1 beyond the row's end (multi-token
    prediction, arXiv:2404.19737; modded-nanogpt#53: -2.9 s)."""
    return torch.stack([F.pad(targets[:, k:], (0, k), value=-1) for k in range(n)], -1)

def prefix_tokens(texts: list[bytes]) -> Tensor:
    """int64 (V,): for each token the longest other token that is a prefix of it, -1 if there is none; the
    targets of an extra loss (modded-nanogpt#88: -0.8 s). texts: the bytes of each token, b"" for none."""
    prefixes = [-1] * len(texts)
    stack = []  # tokens, each of which is a prefix of the next one
    for token in sorted(range(len(texts)), key=texts.__getitem__):
        text = texts[token]
        if not text:
            continue
        while stack and (not text.startswith(texts[stack[-1]]) or text == texts[stack[-1]]):
            stack.pop()
        if stack:
            prefixes[token] = stack[-1]
        stack.append(token)
    return torch.tensor(prefixes)

def pair_heads(x: Tensor) -> Tensor:
    """Paired heads: each token becomes two positions of a row twice as long, so that its heads attend to each
    other (modded-nanogpt#58: -3.5 s). (B, T, H, D) -> (B, 2 T, H / 2, D); the j-th head at position 2 t + s
    is head s H / 2 + j of token t."""
    return x.unflatten(2, (2, -1)).flatten(1, 2)

def unpair_heads(x: Tensor) -> Tensor:
    """The inverse: (B, 2 T, H / 2, D) -> (B, T, H, D)."""
    return x.unflatten(1, (-1, 2)).flatten(2, 3)

def pair_mask(window: int | Tensor, documents: Tensor, kernel: Kernel) -> object:
    """The mask of attend_in_pairs(). window: in places of rows of 2 T. documents (B, T): the number of each
    token's document. kernel: WindowKernels.window_mask."""
    T = documents.size(1)
    return kernel(window, 2 * T, documents.repeat_interleave(2, 1), documents.device)

def attend_in_pairs(q: Tensor, k: Tensor, v: Tensor, rope: tuple[Tensor, Tensor], mask: Mask,
                    kernel: Kernel) -> Tensor:
    """Attention of paired heads. q (B, T, H, D), already scaled, and k (B, T, H, D), both before RoPE,
    v (B, T, H, E) -> (B, T, H, E). rope: from pair_rope_tables(). mask: from pair_mask()."""
    q = rotate_adjacent(q.unflatten(2, (-1, 2)), *rope).flatten(2, 3)
    k = rotate_adjacent(k.unflatten(2, (-1, 2)), *rope).flatten(2, 3)
    return unpair_heads(attend_heads(pair_heads(q), pair_heads(k), pair_heads(v), mask, kernel))

def embed_values(tokens: Tensor, layers: Sequence[int], tables: Sequence[Tensor], heads: int,
                 dtype: torch.dtype) -> dict[int, Tensor]:
    """{layer: value embedding (B, T, H, D) of tokens (B, T)} for these layers, each by a table of its own
    (modded-nanogpt#63: -0.3 s). tables: (V, H * D) each, in the order of layers."""
    return {layer: F.embedding(tokens, table).to(dtype).unflatten(-1, (heads, -1))
            for layer, table in zip(layers, tables)}

def gated_value_embed(h: Tensor, value_embed: Tensor, weight: Tensor) -> Tensor:
    """A value embedding (B, T, H, D) times a gate from 0 to 2 per head, computed from the first channels
    of the stream and of the embedding itself (modded-nanogpt#55: -1.3 s). h (B, T, C), weight (H, channels
    of both together)."""
    half = weight.size(1) // 2
    seen = torch.cat((h[..., :half], value_embed.flatten(2)[..., :half]), -1)
    return 2 * gate(seen, weight)[..., None] * value_embed

class DelayedScales:
    """Delayed scaling for fp8_mlp: each layer's scales come from its amax in the step before; each rank has
    its own. The backward pass returns the new amax as the gradient of `values`."""
    NAME = "fp8 scales"  # in checkpoints
    FIRST = (8.0, 16.0, 1.0)  # amax assumed for the first step: input, activations, gradient of fc's output
    FLOORS = (1e-6, 1e-6, 1e-7)  # minimum scales, to avoid dividing by almost 0
    MARGIN = 1.25  # headroom for growth from one step to the next

    def __init__(self, layers: int):
        # amax / E4M3_MAX (layers, 3), 16 bytes apart: cuBLAS requires scales to be 16-byte aligned
        self.values = torch.empty(layers, 3, 4)[..., 0].requires_grad_()
        self.floors = torch.tensor(self.FLOORS)
        self.largest: Tensor | None = None  # amax in the last micro-step (layers, 3)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        self.values.copy_(torch.tensor(self.FIRST) / E4M3_MAX)

    @torch.no_grad()
    def follow(self) -> None:
        """Sets the scales from the amax that the last step measured."""
        scales = torch.maximum(self.MARGIN / E4M3_MAX * self.largest, self.floors)
        self.values.copy_(scales)

    def of_ranks(self, ranks: int) -> Tensor:
        """(ranks, layers, 3), on the CPU. All ranks call it together."""
        mine = self.values.detach()
        whole = mine.repeat(ranks, 1, 1)
        if ranks > 1:
            all_gather(whole.view(-1), mine.contiguous().view(-1))
        return whole.cpu()

    @torch.no_grad()
    def restore(self, stored: Tensor | None, ranks: int, rank: int) -> None:
        """Restores a checkpoint's scales, which rank 0 holds as of_ranks() returned them: each rank's own, or
        the maximum over ranks if their number has changed. None: the initial scales."""
        self.reset()
        if stored is not None:
            same = len(stored) == ranks
            self.values.copy_(stored[rank] if same else stored.amax(0))

class SpeedrunPlusOptimizer(Optimizer):
    """Keeps lm_head and the embedding one matrix until they are untied, and updates the model's delayed
    scales, if it has any, after each step."""
    def __init__(self, model: "SpeedrunPlusModel", *args: Any, **options: Any):
        super().__init__(model, *args, **options)
        self.scales = model.scales

    def backward(self, loss: Tensor, micro_steps: int = 1) -> None:
        if not self.scales:
            super().backward(loss, micro_steps)
            return
        wanted = [*self.params, self.scales.values]
        *gradients, largest = torch.autograd.grad(loss, wanted, materialize_grads=True)
        self.add(gradients, micro_steps)
        self.scales.largest = largest

    def step(self, schedule: Schedule) -> None:
        super().step(schedule)
        if self.scales:
            self.scales.follow()

    def update(self, banks: list[Bank], schedule: Schedule) -> None:
        """While tied, lm_head's bank learns from the gradients of both, and the embedding copies its weights
        and state; once untied, the embedding continues from there."""
        bank_of = {name: bank for bank in banks for name in bank.names}
        if not schedule.tied or "head" not in bank_of:
            super().update(banks, schedule)
            return
        head = bank_of["head"]
        embed = bank_of["embed"]
        head.grad.copy_(head.grad.float().add_(embed.grad))  # rounded once
        super().update([bank for bank in banks if bank is not embed], schedule)
        embed.data.copy_(head.data)
        for mine, other in zip((embed.master, *embed.state), (head.master, *head.state)):
            mine.copy_(other)
        embed.fresh = True

    def state(self) -> dict[str, Tensor]:
        found = super().state()
        if self.scales:
            found[DelayedScales.NAME] = self.scales.of_ranks(self.world_size)
        return found

    def restore(self, weights: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        super().restore(weights, state)
        if self.scales:
            self.scales.restore(state.get(DelayedScales.NAME), self.world_size, self.banks[0].rank)

    def begin(self, values: dict[str, Tensor]) -> None:
        super().begin(self.cfg.adjust_init(values))
        if self.scales:
            self.scales.reset()

def amax_by_rows(x: Tensor) -> Tensor:
    """max |x| of x (N, M), 0-dim, fp32: of each row first, which Inductor fuses with what else reads x. The
    maximum of 49,152 x 3,072 numbers at once would read them a second time."""
    return x.abs().amax(1).amax().float()

class Fp8MLP(torch.autograd.Function):
    """mlp() of x (N, C), fc (hidden, C), proj (C, hidden) with all six products in e4m3. Weights and the
    output's gradient are scaled by their own maximum, everything else by scales (3,), see DelayedScales. The
    activations are saved in fp8 only. transpose: transposes fp8 matrices that have a row per token."""
    @staticmethod
    def forward(ctx, x: Tensor, fc: Tensor, proj: Tensor, scales: Tensor, transpose: Kernel) -> Tensor:
        scale_x, scale_post, scale_pre = scales.unbind()
        x8, _ = to_fp8(x, scale_x, torch.float8_e4m3fn)
        fc8, scale_fc = to_fp8(fc, None, torch.float8_e4m3fn)
        proj8, scale_proj = to_fp8(proj, None, torch.float8_e4m3fn)
        post = scaled_mm(x8, fc8, scale_x, scale_fc).relu().square()
        post8, _ = to_fp8(post, scale_post, torch.float8_e4m3fn)
        largest = torch.stack((amax_by_rows(x), amax_by_rows(post)))
        ctx.save_for_backward(x8, fc8, proj8, post8, scale_fc, scale_proj, scales, largest)
        ctx.transpose = transpose
        return scaled_mm(post8, proj8, scale_post, scale_proj, fast=True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        x8, fc8, proj8, post8, scale_fc, scale_proj, scales, largest = ctx.saved_tensors
        t = ctx.transpose
        scale_x, scale_post, scale_pre = scales.unbind()
        grad8, scale_grad = to_fp8(stored_once(grad), None, torch.float8_e4m3fn)
        grad_proj = scaled_mm(t(grad8), t(post8), scale_grad, scale_post)
        root = (post8.float() * scale_post).sqrt().to(torch.bfloat16)  # relu(x @ fc.T), recomputed
        pre = 2 * scaled_mm(grad8, proj8.t(), scale_grad, scale_proj) * root  # gradient of x @ fc.T
        pre8, _ = to_fp8(pre, scale_pre, torch.float8_e4m3fn)
        grad_fc = scaled_mm(t(pre8), t(x8), scale_pre, scale_x)
        grad_x = scaled_mm(pre8, fc8.t(), scale_pre, scale_fc)
        largest = torch.cat((largest, amax_by_rows(pre)[None]))
        return grad_x.to(grad.dtype), grad_fc.float(), grad_proj.float(), largest, None

def fp8_mlp(x: Tensor, fc: Tensor, proj: Tensor, scales: Tensor, transpose: Kernel = torch.t) -> Tensor:
    """unscaled_mlp() in fp8; if gradients are off, as in scoring, plain mlp()."""
    if not torch.is_grad_enabled():
        return mlp(x, fc, proj)
    return Fp8MLP.apply(x.flatten(0, -2), fc, proj, scales, transpose).to(x.dtype).view(x.shape)

# magnitudes beyond which Fp8QKV clips
QKV_INPUT = 8.0
QKV_GRADIENT = 1.0

class Fp8QKV(torch.autograd.Function):
    """qkv_linear() of x (N, C) by one product in e4m3. The weights are scaled by their maximum, and factor
    (1,) goes into their scale; the input and the output's gradient (of a summed loss) have fixed scales."""
    @staticmethod
    def forward(ctx, x: Tensor, query: Tensor, key: Tensor, value: Tensor, factor: Tensor) -> tuple:
        packed = torch.cat((query, key, value))
        x8, scale_x = to_fp8(x, QKV_INPUT / E4M3_MAX, torch.float8_e4m3fn)
        w8, scale_w = to_fp8(packed, None, torch.float8_e4m3fn)
        factor = factor.float().view(())
        y = scaled_mm(x8, w8, scale_x, scale_w * factor, fast=True)
        ctx.save_for_backward(x8, w8, scale_x, scale_w, factor, packed)
        ctx.sizes = [len(query), len(key), len(value)]
        return y.split(ctx.sizes, -1)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple:
        x8, w8, scale_x, scale_w, factor, packed = ctx.saved_tensors
        g8, scale_g = to_fp8(torch.cat(grads, -1), QKV_GRADIENT / E4M3_MAX, torch.float8_e4m3fn)
        grad_x = scaled_mm(g8, w8.t(), scale_g, scale_w * factor)
        grad_w = scaled_mm(g8.t(), x8.t(), scale_g, scale_x).float()
        grad_factor = (grad_w * packed).sum().view(1)
        return grad_x.to(grads[0].dtype), *(factor * grad_w).split(ctx.sizes), grad_factor

def fp8_qkv(x: Tensor, query: Tensor, key: Tensor, value: Tensor, factor: Tensor) -> Sequence[Tensor]:
    """qkv_linear() in fp8; if gradients are off, as in scoring, plain qkv_linear()."""
    if not torch.is_grad_enabled():
        return qkv_linear(x, query, key, value, factor)
    products = Fp8QKV.apply(x.flatten(0, -2), query, key, value, factor)
    return [product.to(x.dtype).unflatten(0, x.shape[:-1]) for product in products]

MUDD_SCALE = 0.1  # factor on MUDD's output; adjust_init() divides the biases by it

def qkv_linear(x: Tensor, query: Tensor, key: Tensor, value: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
    """x (B, T, C) -> queries, keys and values, each (B, T, n), by one product with their matrices (n, C),
    which are multiplied by factor (1,)."""
    packed = factor.to(x.dtype) * torch.cat((query, key, value)).to(x.dtype)
    return F.linear(x, packed).split([len(query), len(key), len(value)], -1)

def unscaled_mlp(x: Tensor, fc: Tensor, proj: Tensor, scales: Tensor | None) -> Tensor:
    """mlp() with the signature of fp8_mlp(); the delayed scales (3,) are ignored."""
    return mlp(x, fc, proj)

@dataclass(frozen=True)
class SpeedrunPlusKernels(WindowKernels):
    """The functions of speedrun_plus that have faster versions."""
    qkv: Callable = qkv_linear
    mlp: Callable = unscaled_mlp

class SpeedrunPlusContext(NamedTuple):
    """What the forward pass needs besides tokens and weights."""
    rope: tuple[Tensor, Tensor]  # cos and sin of every position, each (T, 1, qk_dim / 4)
    pair_rope: tuple[Tensor, Tensor]  # the same for paired heads, each (T, 1, 2, qk_dim / 4)
    attn_scale: Tensor  # factor on q @ k, 0-dim
    # {L or S: how many earlier tokens a token sees in such a layer}, see kernel_windows()
    windows: dict[str, int | Tensor]
    pair_window: int | Tensor  # the same for paired heads, in rows of 2 T
    dtype: torch.dtype  # activations have this dtype
    # in training only
    next_targets: int = 1  # targets per token
    prefixes: bool = False  # also predict the target's prefix token
    loss_weights: Tensor | None = None  # (n,), one per target; None: the next token alone

class SpeedrunPlusBlock(nn.Module):
    """The parameters of a layer, and its attention."""
    def __init__(self, cfg: SpeedrunPlus, layer: int) -> None:
        super().__init__()
        C = cfg.model_dim
        self.cfg = cfg
        self.kind = cfg.window_pattern[layer]
        attends = self.kind != "-"
        self.query = parameter(cfg.num_heads * cfg.qk_dim, C, on=attends)
        self.key = parameter(cfg.num_heads * cfg.qk_dim, C, on=attends)
        self.value = parameter(C, C, on=attends)
        self.attn_proj = parameter(C, C, on=attends)
        # MUDD gates the last layer's value embedding: there this gate is idle, as in the public record
        self.value_gate = parameter(cfg.num_heads, cfg.value_gate_dim, on=layer in cfg.value_embed_layers)
        self.fc = parameter(cfg.mlp_mult * C, C)
        self.mlp_proj = parameter(C, cfg.mlp_mult * C)
        self.sa_lambdas = parameter(2)  # factors on queries, keys and values; on attention's output
        self.resid_lambdas = parameter(2)  # on the residual stream before attention and MLP are added
        self.post_lambdas = parameter(2)  # on the outputs of attention and MLP

    def attend(self, h: Tensor, further_values: Tensor | None, gates: dict[str, Tensor],
               masks: dict[str, Mask], context: SpeedrunPlusContext) -> Tensor:
        """h (B, T, C), normalized -> attention's output (B, T, C). further_values (B, T, H, D) are added to
        the layer's own. gates: those of this layer, {name: (B, T, width)}. masks: {kind of layer: its mask}
        and "dynamic"."""
        q, k, v = self.kernels.qkv(h, self.query, self.key, self.value, self.sa_lambdas[:1])
        q = split_heads(q, self.cfg.qk_dim)
        k = split_heads(k, self.cfg.qk_dim)
        v = split_heads(v, self.cfg.model_dim // self.cfg.num_heads)
        if further_values is not None:
            v = v + further_values
        q = (rms_norm(q) * context.attn_scale).to(v.dtype)
        k = rms_norm(k)
        if self.kind == "P":
            y = attend_in_pairs(q, k, v, context.pair_rope, masks["P"], self.kernels.attention)
        else:
            q = rotate_adjacent(q, *context.rope)
            k = rotate_adjacent(k, *context.rope)
            if self.kind == "L" and self.cfg.key_offset:
                k = key_offset(k)
            y = attend_heads(q, k, v, masks[self.kind], self.kernels.attention)
        if "mix" in gates:
            y = y + dynamic_attention(q, k, v, gates["mix"], gates["spread"], masks["dynamic"])
        if "xsa" in gates:
            y = scaled_xsa(y, v, gates["xsa"])
        if "heads" in gates:
            y = y * gates["heads"][..., None]
        return linear(y.flatten(2), self.sa_lambdas[1:].to(y.dtype) * self.attn_proj.to(y.dtype))

class SpeedrunPlusModel(Model):
    """The residual stream through the layers; the last one and the output mix earlier streams by MUDD. The
    training loss has several targets per token: the next ones and the target's prefix token."""
    def __init__(self, cfg: SpeedrunPlus, kernels: SpeedrunPlusKernels = SpeedrunPlusKernels()) -> None:
        super().__init__()
        self.cfg = cfg
        V = cfg.vocab_size
        C = cfg.model_dim
        self.embed = parameter(V, C)
        self.head = parameter(V, C)
        self.blocks = nn.ModuleList([SpeedrunPlusBlock(cfg, layer) for layer in range(cfg.num_layers)])
        self.value_embeds = nn.ParameterList([parameter(V, C) for _ in cfg.value_embed_layers])
        self.bigram_embed = parameter(cfg.bigram_rows, C)
        self.smear_lambda = parameter(1)
        self.smear_gate = parameter(1, cfg.smear_dim)
        self.skip_lambda = parameter(1)
        # index 0: for the last layer, 1: for the output
        sizes = [len(LastMudd._fields), len(EndMudd._fields)]
        self.mudd_w1, self.mudd_w2, self.mudd_b2 = mudd_parameters(C, cfg.mudd_dim, sizes)
        # index 0: from the embedding, 1: from gate_layer's input
        self.gate_tables = cfg.gate_tables()
        rows = [len(gate_values(gates)) for gates in self.gate_tables]
        self.mudd_gate_w1, self.mudd_gate_w2, self.mudd_gate_b2 = mudd_parameters(C, cfg.mudd_gate_dim, rows)
        self.mudd_gate_scale = parameter(1)
        # each token's prefix token; -1: none
        self.register_buffer("prefixes", torch.full((V,), -1), persistent=False)
        self.register_buffer("signs", random_signs(cfg.bigram_sign_rows, C), persistent=False)
        self.use(kernels)
        self.scales = None if kernels.mlp is unscaled_mlp else DelayedScales(cfg.num_layers)

    def context(self, T: int, device: torch.device, dtype: torch.dtype = torch.float32,
                stage: TargetStage | None = None) -> SpeedrunPlusContext:
        """As Model says; in a stage with what its losses need besides."""
        cfg = self.cfg
        frequencies, scale = cfg.rope(stage.window if stage else None)
        rope = rope_tables(T, frequencies, device, dtype)
        pair_rope = pair_rope_tables(T, frequencies, device, dtype)
        attn_scale = torch.tensor(scale, device=device)
        window = self.kernels.window
        windows = kernel_windows(cfg, "LS", stage, T, device, window, by_document=True)
        pair_window = window(cfg.windows(stage, T)["S"], 2 * T, device, by_document=True)
        context = SpeedrunPlusContext(rope, pair_rope, attn_scale, windows, pair_window, dtype)
        return self.with_targets(context, stage, device) if stage else context

    def with_targets(self, context: Any, stage: TargetStage, device: torch.device) -> Any:
        """The context of a step, which has the stage's number of targets and room for their weights."""
        n = len(stage.next_weights)
        prefixes = any(stage.prefix_weights)
        if n == 1 and not prefixes:
            return context
        weights = torch.ones(n + 1 if prefixes else n, device=device)
        return context._replace(next_targets=n, prefixes=prefixes, loss_weights=weights)

    def update_context(self, context: SpeedrunPlusContext, progress: float) -> None:
        if context.loss_weights is not None:
            for weight, number in zip(context.loss_weights, self.cfg.loss_weights(progress), strict=True):
                weight.fill_(number)

    def build(self, run: "Run", fresh: bool) -> bool:
        """Finds the prefix token of each token."""
        if not self.cfg.prefix_weight:
            return False
        self.prefixes.copy_(prefix_tokens(texts_of_tokens(self.cfg, run.data.tokenizer)))
        found = (self.prefixes >= 0).sum().item()
        run.log(f"prefix tokens: {found} of {self.cfg.vocab_size} tokens have one")
        return True

    def targets_of(self, targets: Tensor, context: SpeedrunPlusContext) -> Tensor:
        """targets (B, T) -> all targets of each token in training (B, T, n), see lm_loss()."""
        if context.loss_weights is None:
            return targets
        further = next_targets(targets, context.next_targets)
        if context.prefixes:
            further = torch.cat((further, self.prefixes[targets][..., None]), -1)
        return further

    def forward(self, tokens: Tensor, targets: Tensor, context: SpeedrunPlusContext) -> Tensor:
        """tokens and targets (B, T) -> mean training loss in nats, on the next targets and their prefixes."""
        x = self.hidden(tokens, context)
        targets = self.targets_of(targets, context)
        return self.kernels.loss(x, self.head, targets, self.cap(), context.loss_weights)

    def cap(self) -> tuple:
        return self.cfg.logit_softcap, self.cfg.logit_shift, self.cfg.logit_width

    def hidden(self, tokens: Tensor, context: SpeedrunPlusContext) -> Tensor:
        """tokens (B, T) -> last activations, normalized (B, T, C)."""
        cfg = self.cfg
        H = cfg.num_heads
        last = cfg.num_layers - 1
        skip_from, skip_to = cfg.skip_layers
        documents = (tokens == cfg.bos_id).cumsum(1)
        masks = layer_masks(context.windows, tokens, documents, self.kernels.window_mask)
        masks["P"] = pair_mask(context.pair_window, documents, self.kernels.window_mask)
        if cfg.dc_window:
            masks["dynamic"] = dynamic_mask(cfg.dc_window, documents)
        scales = self.scales.values.unbind() if self.scales else [None] * cfg.num_layers
        value_embeds = embed_values(tokens, cfg.value_embed_layers, self.value_embeds, H, context.dtype)
        x = smear(F.embedding(tokens, self.embed).to(context.dtype), self.smear_lambda, self.smear_gate)
        bigrams = F.embedding(bigram_ids(tokens, cfg.bigram_rows), self.bigram_embed).to(context.dtype)
        if cfg.bigram_sign_rows:
            bigrams = bigrams * bigram_signs(tokens, self.signs).to(context.dtype)
        x0 = rms_norm(x)
        gates = mudd_gates(x0, self.gate_tables[0], self.mudd_gate_w1[0], self.mudd_gate_w2[0],
                           self.mudd_gate_b2[0], self.mudd_gate_scale)
        x = first = x0 + gates[0]["bigrams"] * bigrams
        outputs = {}  # {layer: its output}, for the two layers that later ones read
        for i, block in enumerate(self.blocks[:-1]):
            resid = block.resid_lambdas.to(x.dtype)
            post = block.post_lambdas.to(x.dtype)
            if i == cfg.gate_layer:
                gates = mudd_gates(x, self.gate_tables[1], self.mudd_gate_w1[1], self.mudd_gate_w2[1],
                                   self.mudd_gate_b2[1], self.mudd_gate_scale)
            if i == skip_to:
                x = x + torch.sigmoid(self.skip_lambda.to(x.dtype)) * gates[i]["skip"] * outputs[skip_from]
            else:
                added = gates[i]["x0"] * x0
                if i > 0:  # the first layer's bigrams are in the residual stream already
                    added = added + gates[i]["bigrams"] * bigrams
                h = rms_norm(outputs.get(cfg.attn_source, x))
                values = None
                if i in value_embeds:
                    values = gated_value_embed(h, value_embeds[i], block.value_gate)
                y = block.attend(h, values, gates[i], masks, context)
                x = resid[0] * x + post[0] * y + added
            y = self.kernels.mlp(rms_norm(x), block.fc, block.mlp_proj, scales[i])
            x = resid[1] * x + post[1] * y
            if i in (skip_from, cfg.attn_source):
                outputs[i] = x
        before = x
        attn_in = outputs[cfg.attn_source]
        # the last layer: MUDD's weights replace the learned factors and mix in earlier streams
        block = self.blocks[last]
        mu = mudd_weights(x, LastMudd, self.mudd_w1[0], self.mudd_w2[0], self.mudd_b2[0], MUDD_SCALE)
        values = mu.value_first * first + mu.value_attn_in * attn_in + mu.value_x * x
        x = (1 + mu.stream_x) * x + mu.stream_first * first + mu.stream_attn_in * attn_in
        # each half of the heads has its own weight
        halves = torch.cat((mu.embed_low, mu.embed_high), -1).repeat_interleave(H // 2, -1)
        values = split_heads(values, cfg.model_dim // H) + halves[..., None] * value_embeds[last]
        y = block.attend(rms_norm(attn_in), values, gates.get(last, {}), masks, context)
        x = mu.attn_resid * x + mu.attn_out * y + mu.attn_first * first + mu.attn_bigrams * bigrams
        resid = mu.mlp_resid * x
        x = resid + mu.mlp_out * self.kernels.mlp(rms_norm(x), block.fc, block.mlp_proj, scales[last])
        end = mudd_weights(x, EndMudd, self.mudd_w1[1], self.mudd_w2[1], self.mudd_b2[1], MUDD_SCALE)
        x = x + end.first * first + end.attn_in * attn_in + end.before * before
        x = x + end.value_embed * value_embeds[1].flatten(2) + end.skipped * outputs[skip_from]
        return rms_norm(x)

# ---------- gpt2 and gpt2_plus: what both use
@cache
def parameter_counts(cfg: Any) -> Counter:
    """{group of the parameter table: number of parameters}"""
    counts = Counter()
    table = cfg.parameter_table()
    with torch.device("meta"):
        for name, p in cfg.make_model().named_parameters():
            counts[table[kind_of(name)].group] += p.numel()
    return counts

def horizon_weights(cfg: Any) -> int:
    """Weights that the horizon counts: those of the blocks' matrices, gates among them, and of lm_head."""
    counts = parameter_counts(cfg)
    return counts["matrix"] + counts["gate"] + cfg.vocab_size * cfg.model_dim

def flops_per_token(cfg: Any) -> float:
    """Training matmul FLOPs as PaLM counts them (arXiv:2204.02311): 6 per weight, plus 12 * width * window
    per layer, with the windows of the last stage."""
    windows = cfg.windows(cfg.stages()[-1], cfg.train_seq_len)
    keys = sum([windows[kind] for kind in per_layer(cfg.window_pattern, cfg.num_layers)])
    return 6 * (horizon_weights(cfg) + 2 * cfg.model_dim * keys)

class BestFit(RankRows):
    """Fills each row with the longest document in a buffer that still fits, again and again; if none does,
    with the beginning of the shortest, whose rest is lost. Rank r of R reads document groups r, r + R, ... of
    each shard."""
    GROUP = 1024  # documents per group where the dataset does not say
    BUFFER = 1000  # documents
    READ = 128  # documents per refill

    def __init__(self, cfg: Config, data: Data, loader: "Loader"):
        super().__init__(cfg, data, loader)
        self.index = index = DocumentIndex(data, loader)
        self.groups = []
        for number, shard in enumerate(loader.shards):
            first, end = np.searchsorted(index.shard_of, [number, number + 1]).tolist()
            sizes = shard.groups or [self.GROUP] * math.ceil((end - first) / self.GROUP)
            edges = [first, *(first + np.cumsum(sizes)).clip(max=end).tolist()]
            self.groups.append(list(zip(edges, edges[1:])))
        groups = max(map(len, self.groups))
        require(groups >= self.team.world_size,
                "packing=best_fit deals groups of documents to the ranks, but no shard has "
                f"more than {groups}: take at most this many ranks, or set PACKING=rows")

    def make_rows(self, T: int) -> Iterator[list]:
        """Yields the pieces of each row."""
        index = self.index
        buffer = []
        refills = self.refills()
        while True:
            room = T + 1
            row = []
            while room:
                while len(buffer) < self.BUFFER:
                    buffer += next(refills)
                lengths = index.lengths[buffer]
                fits = np.where(lengths <= room, lengths, 0)
                best = int(fits.argmax()) if fits.any() else int(lengths.argmin())
                size = min(room, int(lengths[best]))
                row.append((int(index.starts[buffer.pop(best)]), size))
                room -= size
            yield row

    def refills(self) -> Iterator[list]:
        """Yields the next documents of this rank's groups, endlessly."""
        while True:
            for groups in self.groups:
                for low, high in groups[self.team.rank::self.team.world_size]:
                    for start in range(low, high, self.READ):
                        yield list(range(start, min(high, start + self.READ)))

# CORE (DCLM, arXiv:2406.11794): mean accuracy on 22 in-context learning tasks, centered so that chance is 0.
# A bundle is a folder of core.yaml (the tasks), eval_meta_data.csv (accuracy by chance in percent) and
# eval_data/ (a .jsonl file per task).
CORE_TASKS = 22
CORE_KINDS = ("multiple_choice", "schema", "language_modeling")
CORE_ORDER_SEED = 1337  # order of a task's examples
CORE_SHOTS_SEED = 1234  # plus i: the shots of example i

Encode = Callable[[list[str]], list[list[int]]]  # texts -> their tokens

class Task(NamedTuple):
    label: str
    kind: str  # one of CORE_KINDS
    shots: int  # solved examples before each question
    base: float  # percent that are right by chance
    items: list  # [Item]

class Item(NamedTuple):
    """An example."""
    texts: list  # the question with each of its options
    gold: int  # which option is right
    question: str | None  # the text without its continuation, for language_modeling only

def read_item(kind: str, line: str, delimiter: str) -> Item:
    """A line of a task's file -> Item. Raises KeyError, TypeError, ValueError."""
    row = json.loads(line)
    if kind == "multiple_choice":
        texts = [row["query"] + delimiter + choice for choice in row["choices"]]
    elif kind == "schema":
        texts = [context + delimiter + row["continuation"] for context in row["context_options"]]
    else:
        question = row["context"].strip() + delimiter
        return Item([question + row["continuation"]], 0, question)
    return Item(texts, range(len(texts)).index(row["gold"]), None)

def read_text(path: Path) -> str:
    """The text of a file in UTF-8, UTF-16 or UTF-32, whichever its first bytes tell."""
    raw = path.read_bytes()
    return raw.decode(json.detect_encoding(raw))

def text_lines(path: Path) -> io.StringIO:
    """The lines of a file, ended by LF, CR or both."""
    return io.StringIO(read_text(path), newline=None)

def read_tasks(folder: str | Path, most: int = 0) -> list[Task]:
    """The tasks of a bundle, each with its first `most` examples after shuffling; 0: all. Raises Refused."""
    import yaml
    folder = Path(folder)
    require(folder.is_dir(), f"no CORE tasks at {folder.name!r}: get them with `./run.sh data core`")
    tasks = []
    place = "core.yaml or eval_meta_data.csv"
    try:
        table = csv.DictReader(text_lines(folder / "eval_meta_data.csv"))
        bases = {row["Eval Task"]: row["Random baseline"] for row in table}
        for about in yaml.safe_load(read_text(folder / "core.yaml"))["icl_tasks"]:
            label = about["label"]
            kind = about["icl_task_type"]
            shots = about["num_fewshot"][0]
            place = f"{label} in core.yaml, eval_meta_data.csv or {about['dataset_uri']}"
            base = float(bases[label])
            require(kind in CORE_KINDS and shots >= 0 and base < 100, f"{kind}, {shots} shots, {base} %")
            items = []
            for n, line in enumerate(text_lines(folder / "eval_data" / about["dataset_uri"]), 1):
                place = f"{about['dataset_uri']} line {n}"
                if line.strip():
                    items.append(read_item(kind, line, about.get("continuation_delimiter", " ")))
            random.Random(CORE_ORDER_SEED).shuffle(items)
            require(len(items) > shots, f"{len(items)} examples are too few for {shots} shots")
            tasks.append(Task(label, kind, shots, base, items[:most or None]))
        require(tasks, "no tasks")
    except Exception as error:  # a damaged file may raise anything
        raise Refused(f"CORE bundle: {place} is damaged or missing ({brief(error)})") from None
    for task in tasks:
        require(len(task.items) > task.shots, f"core_metric_max_per_task={most}: {task.label} shows "
                f"{task.shots} examples as shots, so give more than {task.shots}, or 0 for all")
    return tasks

def prompt_rows(task: Task, i: int, encode: Encode, bos: int, longest: int) -> list[tuple]:
    """Example i of a task -> (ids, first) for each option; ids[first:] are scored. A prompt is BOS, the
    shots, drawn from all other examples, and the question, with a blank line between them. Scoring begins
    at the first token that differs between the options; in a schema, at their longest common end; in language
    modeling, after the question's tokens. Prompts of more than `longest` tokens lose their start."""
    others = task.items[:i] + task.items[i + 1:]
    shots = random.Random(CORE_SHOTS_SEED + i).sample(others, task.shots)
    lead = "".join([shot.texts[shot.gold] + "\n\n" for shot in shots])
    texts, _, question = task.items[i]
    prompts = [lead + text for text in texts]
    if question is not None:
        prompts.append((lead + question).strip())
    rows = [[bos, *ids] for ids in encode(prompts)]
    if task.kind == "schema":
        common = len(os.path.commonprefix([row[::-1] for row in rows]))
        firsts = [len(row) - common for row in rows]
    else:
        firsts = [len(os.path.commonprefix(rows))] * len(rows)
    found = []
    for row, first in zip(rows[:len(texts)], firsts):
        cut = max(0, len(row) - longest)
        found.append((tuple(row[cut:]), max(1, first - cut)))
    return found

@torch.no_grad()
def score_rows(model: Model, cfg: Config, rows: list, team: "Team",
               score: Callable[..., Tensor]) -> Iterator[tuple[int, Tensor]]:
    """rows: [(ids, first)], with targets ids[first:]. Yields (a row's index, the scores of its targets), in
    batches of similar length, longest first. score: a function of (model, last activations (n, C), targets
    (n,))."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    tokens = cfg.val_batch_size if team.on_gpu else min(cfg.val_batch_size, CPU_SCORE_TOKENS)
    while order:
        # 1. The longest rows left, padded with zeros.
        T = len(rows[order[-1]][0]) - 1
        context = model.context(T, team.device, team.dtype if team.on_gpu else torch.float32)
        size = max(1, tokens // T)
        here = order[-size:]
        order = order[:-size]
        ids = np.zeros((len(here), T + 1), np.int64)
        wanted = np.zeros((len(here), T), bool)  # wanted[i, t]: is ids[i, t + 1] a target?
        for i, number in enumerate(here):
            row, first = rows[number]
            ids[i, :len(row)] = row
            wanted[i, first - 1:len(row) - 1] = True
        # 2. Their activations; those before a target are scored.
        targets = torch.from_numpy(ids[:, 1:][wanted]).to(team.device)
        places = torch.from_numpy(np.flatnonzero(wanted)).to(team.device)
        x = model.hidden(torch.from_numpy(ids[:, :-1].copy()).to(team.device), context).flatten(0, 1)[places]
        at_once = MAX_SCORES // cfg.vocab_size
        parts = zip(x.split(at_once), targets.split(at_once))
        scores = [score(model, part, its_targets) for part, its_targets in parts]
        counts = [len(rows[i][0]) - rows[i][1] for i in here]
        yield from zip(here, torch.cat(scores).cpu().split(counts))

def score_with_hits(model: Model, x: Tensor, targets: Tensor) -> Tensor:
    """score_targets(), and beside the nats of each target whether it is the likeliest token: (n, 2)."""
    scores = F.log_softmax(model.logits(x), -1)
    nats = -scores.gather(-1, targets[:, None])[:, 0].double()
    hits = scores.argmax(-1) == targets
    return torch.stack((nats, hits.double()), -1)

def pick_options(model: Model, cfg: Any, task: Task, encode: Encode, bos: int,
                 team: "Team") -> dict[int, int]:
    """{example of this rank: pick}. A pick is the option with the lowest mean loss, the first one of a tie,
    or -1 if no option has a token to score. In language modeling it is 0 if every token is the likeliest at
    its place, else -1."""
    mine = range(team.rank, len(task.items), team.world_size)
    table = {}  # {row: its number}, so that equal rows are scored once and tie
    options = []  # the numbers of each example's rows; -1: there is no token to score
    for i in mine:
        numbers = []
        for ids, first in prompt_rows(task, i, encode, bos, 10 * cfg.train_seq_len):
            scored = first < len(ids)
            numbers.append(table.setdefault((ids, first), len(table)) if scored else -1)
        options.append(numbers)
    nats = np.full(len(table) + 1, math.inf)  # the last place is that of number -1
    right = np.zeros(len(table) + 1, bool)
    for n, found in score_rows(model, cfg, [*table], team, score_with_hits):
        losses, hits = found.T.contiguous()
        nats[n] = losses.mean()
        right[n] = hits.all()
    wins = right if task.kind == "language_modeling" else np.isfinite(nats)
    picks = {}
    for i, numbers in zip(mine, options):
        best = int(nats[numbers].argmin())
        picks[i] = best if wins[numbers[best]] else -1
    return picks

def core_metric(model: Model, cfg: "GPT2 | GPT2Plus", data: Data, team: "Team", log: Logger,
                tasks: list[Task] | None = None) -> dict:
    """{core: mean centered accuracy, or None for fewer than all tasks, whose mean is core_partial;
    core_tasks: {label: accuracy, centered, n, seconds}}. All ranks work on it together. Raises Refused."""
    tasks = tasks or read_tasks(cfg.core_bundle, cfg.core_metric_max_per_task)
    began = time.perf_counter()
    results = {}
    log("evaluating CORE")
    for number, task in enumerate(tasks, 1):
        start = time.perf_counter()
        n = len(task.items)
        chance = task.base / 100
        picks = pick_options(model, cfg, task, data.tokenizer.encode, data.bos, team)
        right = len([i for i, pick in picks.items() if pick == task.items[i].gold])
        accuracy = all_reduce(torch.tensor(right)).item() / n
        centered = (accuracy - chance) / (1 - chance)
        seconds = round(time.perf_counter() - start, 2)
        results[task.label] = dict(accuracy=accuracy, centered=centered, n=n, seconds=seconds)
        log(f"core: {task.label:<32} accuracy:{accuracy:.4f} centered:{centered:.4f} n:{n} seconds:{seconds} "
            f"task {number}/{len(tasks)}")
    core = sum([row["centered"] for row in results.values()]) / len(results)
    name = "core" if len(results) == CORE_TASKS else "core_partial"
    log(f"{name}_metric:{core:.6f} tasks:{len(results)} seconds:{time.perf_counter() - began:.1f}")
    return {"core": None, name: core, "core_tasks": results}

# The depth dial of github.com/karpathy/nanochat. Recipes with a depth give learning rates and weight decay
# for this depth, width and batch size in tokens:
REFERENCE_DEPTH = 12
REFERENCE_WIDTH = 768
REFERENCE_BATCH = 2**19
CHANNELS_PER_LAYER = 64
HEAD_DIM = 128
BATCH_POWER = 0.383  # the optimal batch grows as this power of training tokens (arXiv:2505.13738)
HORIZONS = ("iterations", "target_param_data_ratio", "target_flops")

def depth_size(depth: int) -> dict:
    """{constant: value} of a depth: 64 channels per layer, rounded up to whole heads of 128. Every fourth
    layer and the last one have the long window; every other layer, the last one among them, has value
    embeddings."""
    heads = math.ceil(depth * CHANNELS_PER_LAYER / HEAD_DIM)
    pattern = ""
    value_embed_layers = []
    for n in range(1, depth + 1):
        pattern += "L" if n % 4 == 0 or n == depth else "S"
        has_value_embed = (depth - n) % 2 == 0
        value_embed_layers.append((n + 1) // 2 if has_value_embed else 0)
    return dict(num_layers=depth, num_heads=heads, model_dim=HEAD_DIM * heads, window_pattern=pattern,
                value_embed_layers=tuple(value_embed_layers))

def depth_dial(cfg: "GPT2 | GPT2Plus", given: dict[str, Any]) -> Any:
    """cfg with everything that follows from cfg.depth, except for the constants in `given`. Raises
    Refused."""
    # 1. The length of the run, by one of HORIZONS; a given one replaces the preset's.
    horizons = [name for name in HORIZONS if given.get(name)]
    if horizons:
        others: dict[str, Any] = {name: 0.0 for name in HORIZONS[1:] if name not in horizons}
        cfg = replace(cfg, **others)
    # 2. The size of this model and of the reference model.
    reference = replace(cfg, **cfg.size_of_depth(REFERENCE_DEPTH))
    cfg = replace(cfg, **cfg.size_of_depth(cfg.depth) | given)
    weights = horizon_weights(cfg)
    growth = weights / horizon_weights(reference)
    # 3. Batch, unless given: a power of the tokens, which grow as the weights do, rounded to a power of 2.
    batch = cfg.train_batch_tokens or 2 ** round(math.log2(REFERENCE_BATCH * growth**BATCH_POWER))
    # 4. Steps: until the FLOPs are spent, or target_param_data_ratio tokens per weight (arXiv:2203.15556).
    derived: dict[str, Any] = {}
    tokens = cfg.target_flops / flops_per_token(cfg) or cfg.target_param_data_ratio * weights
    if tokens:
        derived["iterations"] = max(1, int(tokens / batch))
    # iterations may be given with another horizon if both yield the same number, as in a record's command.
    repeated = len(horizons) == 2 and derived.get("iterations") == given.get("iterations")
    require(len(horizons) < 2 or repeated, f"{' and '.join(horizons)} are two horizons: give one")
    # 5. Learning rates grow with the square root of the batch (arXiv:2205.10287). Those of embeddings and
    #    lm_head also fall with the square root of the width, halfway to muP (arXiv:2203.03466).
    rate = (batch / REFERENCE_BATCH) ** 0.5
    adam = rate * (cfg.model_dim / REFERENCE_WIDTH) ** -0.5
    # 6. Weight decay is lower in longer runs. It is multiplied by matrix_lr, so it grows with the batch
    #    (arXiv:2405.13698).
    factors = dict(matrix_lr=rate, embed_lr=adam, head_lr=adam, scalar_lr=rate, weight_decay=1 / growth)
    derived |= {name: getattr(cfg, name) * factor for name, factor in factors.items()}
    # 7. The warmdown takes whole steps.
    steps = derived.get("iterations", cfg.iterations)
    derived["warmdown_frac"] = round(cfg.warmdown_frac * steps) / steps
    return replace(cfg, **derived | given | {"train_batch_tokens": batch})

class Fp8Linear(torch.autograd.Function):
    """linear() of x (N, K) and weight (M, K) by the two functions above. scales: of x, weight and the
    output's gradient; None: by its maximum."""
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scales: Scales) -> Tensor:
        y, kept = fp8_product(x, weight, scales[:2])
        ctx.save_for_backward(*kept)
        ctx.grad_scale = scales[2]
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        dx, dw = fp8_gradients(grad, ctx.saved_tensors, ctx.grad_scale)
        return dx.to(grad.dtype), dw.float(), None

def fp8_linear(x: Tensor, weight: Tensor, scales: Scales = (None, None, None)) -> Tensor:
    """linear() in fp8; without gradients, as in scoring, linear() itself."""
    if not torch.is_grad_enabled():
        return linear(x, weight)
    return Fp8Linear.apply(x.flatten(0, -2), weight, scales).to(x.dtype).view(*x.shape[:-1], len(weight))

HEAD_MOST_BY_MAXIMUM = (None, None, 1.0)

class GPT2Recipe(Staged):
    """Methods that gpt2 and gpt2_plus share."""
    aliases = dict(train_batch_tokens="total_batch_size", iterations="num_iterations", run_id="model_tag")

    @classmethod
    def of(cls: Any, given: dict[str, Any]) -> Config:
        cfg = cls(**given)
        check_ranges(cfg)
        require(cfg.window_pattern and not set(cfg.window_pattern) - set("LS"),
                f"window_pattern={cfg.window_pattern!r}: a layer is L or S")
        if cfg.depth:
            cfg = depth_dial(cfg, given)
        return cfg

    def check(self: Any) -> None:
        """Also refuses a depth dial that lacks a constant, and constants that need a dial that is off."""
        require(self.vocab_size or not self.depth, f"depth={self.depth} needs vocab_size")
        require(self.depth or not (self.target_param_data_ratio or self.target_flops),
                f"target_param_data_ratio={self.target_param_data_ratio:g}, "
                f"target_flops={self.target_flops:g}: these horizons need depth")
        require(self.train_batch_tokens, "train_batch_tokens=0 needs depth")
        super().check()

    packers = dict(best_fit=BestFit, rows=Rows)

    def stages(self: Any) -> list[WindowStage]:
        row = WindowStage(0.0, self.train_batch_tokens, self.train_seq_len)
        return stage_rows(self, [row], window="window_schedule")

    def windows(self: Any, stage: WindowStage | None, T: int) -> dict[str, int]:
        long = (stage or self.stages()[-1]).window or self.train_seq_len
        return dict(L=min(long, T), S=min(T, max(1, int(self.short_window * long))))

    def choose_kernels(self: Any, on_gpu: bool, log: Logger) -> WindowKernels:
        chosen = window_attention(on_gpu, log)
        loss: Callable = fused_loss
        if fp8_part(self, on_gpu, log) != "off":
            chosen["linear"] = fp8_linear
            loss = partial(fp8_fused_loss, most=HEAD_MOST_BY_MAXIMUM)
        return WindowKernels(**chosen, **fast_loss(self, on_gpu, loss, kernel_losses))

    def check_data(self: Any, data: "Data") -> None:
        """A run that scores CORE needs its tasks and a tokenizer."""
        if self.core or self.core_metric_every:
            read_tasks(self.core_bundle, self.core_metric_max_per_task)
            require(data.tokenizer, "CORE needs a tokenizer: set TOKENIZER_PATH")

    def evaluations(self: Any, step: int | None = None) -> list[Callable]:
        due = self.core_metric_every and step and step % self.core_metric_every == 0
        if step is None:
            due = self.core
        return [core_metric] if due else []

    def quantize(self, row: Row, w: Tensor, coarser: float = 1.0,
                 hessian: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return quantize_by_maximum(w, row.levels // coarser, 0.0)

class GPT2Context(NamedTuple):
    """What the forward pass needs besides tokens and weights."""
    rope: tuple[Tensor, Tensor]  # cos and sin of every position, each (T, 1, head_dim / 2)
    # {L or S: how many earlier tokens a token sees in such a layer}, see kernel_windows()
    windows: dict[str, int | Tensor]
    dtype: torch.dtype  # of activations

class GPT2BaseBlock(nn.Module):
    """The forward pass of a block, which has the parameters and attend()."""
    def forward(self, x: Tensor, x0: Tensor, value_embed: Tensor | None, mask: Mask,
                context: GPT2Context) -> Tensor:
        """x (B, T, C), the residual stream, and x0 (B, T, C), the embedding -> the residual stream.
        value_embed (B, T, KV, D), in layers that have one."""
        embedding = self.x0_lambda.to(x.dtype) * x0
        x = self.resid_lambda.to(x.dtype) * x + embedding
        x = x + self.attend(rms_norm(x), value_embed, mask, context)
        return x + mlp(rms_norm(x), self.fc, self.mlp_proj, self.kernels.linear)

class GPT2BaseModel(Model):
    """A model of such blocks, with windows."""
    def context(self, T: int, device: torch.device, dtype: torch.dtype = torch.float32,
                stage: WindowStage | None = None) -> GPT2Context:
        cfg = self.cfg
        rope = rope_tables(T, rope_spectrum(cfg.model_dim // cfg.num_heads, cfg.rope_base), device, dtype)
        windows = kernel_windows(cfg, self.kinds, stage, T, device, self.kernels.window)
        return GPT2Context(rope, windows, dtype)

# ---------- gpt2: least time to CORE > 0.256525 on 8xH100
# nanochat 00932d1, depth 26, 7.25 tokens per weight, fp8: 12,700 steps in 8,967 s. The dial, --depth, sets
# size, learning rates, weight decay and length, and the batch if train_batch_tokens=0: see depth_dial(). The
# rates and weight decay below are those of depth 12 and a batch of 2**19 tokens.
@dataclass(frozen=True)
class GPT2(GPT2Recipe):
    """Short and long windows, value embeddings behind gates in every other layer, NorMuon."""
    preset: str = option("gpt2", "the recipe", model=True)
    # the dial
    depth: int = optional(26, "the depth dial: sets size, rates, decay and steps; 0: off", 0, 198)
    target_param_data_ratio: float = optional(7.25, "tokens per weight of matrices and lm_head; 0: off",
                                              0, 1e6)
    target_flops: float = optional(0.0, "training FLOPs of the whole run; 0: off", 0, 1e30)
    # size; the dial sets layers, width, heads, windows and value embeddings
    num_layers: int = option(26, "blocks", 1, 1000, model=True)
    model_dim: int = option(1664, "width of the residual stream", 2, 1 << 16, model=True)
    num_heads: int = option(13, "query heads", 1, 4096, model=True)
    num_kv_heads: int = optional(0, "key and value heads (GQA); 0: num_heads", 0, 4096, model=True)
    mlp_mult: int = option(4, "MLP width / model_dim", 1, 64, model=True)
    logit_softcap: float = optional(15.0, "logits = cap * tanh(logits / cap); 0: no cap", 0, 1e4, model=True)
    rope_base: float = optional(10_000.0, "RoPE: 1 / the lowest frequency; 0: no RoPE", 0, 1e9, model=True)
    window_pattern: str = option("L", "window per layer: L long, S short; repeated", model=True)
    window_schedule: tuple = option((0,), "long window per stage, in earlier tokens; 0: train_seq_len",
                                    0, 1 << 20, model=True)
    short_window: float = option(0.5, "short window / long window", 0, 1, model=True)
    value_embed_layers: tuple = option((0,), "value embedding per layer (cycled), from 1; 0: none",
                                       0, 999, model=True)
    value_gate_dim: int = option(32, "channels read by the gates on value embeddings", 1, 1 << 16, model=True)
    value_gate_factor: float = option(2.0, "factor on value embeddings when the gate is open",
                                      0, 100, model=True)
    # data and batch
    data_path: str = option("data/datasets/fineweb_edu", "folder of token shards")
    vocab_size: int = optional(32_768, "tokens; 0: the tokenizer's (needs depth=0)", 0, 65_536, model=True)
    train_seq_len: int = option(2048, "tokens per row", 2, 1 << 20, model=True)
    train_batch_tokens: int = optional(524_288, "tokens per step over all ranks; 0: by the dial", 0, 1 << 30)
    packing: str = option("best_fit", "how training rows are cut: see BestFit and, for few documents, Rows",
                          choices=("best_fit", "rows"))
    val_tokens: int = optional(20_971_520, "how many tokens of val are scored, from its start; 0: all")
    val_loss_every: int = optional(250, "steps between validations, from step 0 on; 0: at the end only")
    train_log_every: int = optional(50, "steps between train_loss lines after step 10; 0: every 100")
    fp8: str = option("auto-all", "training matmuls in fp8; auto-all: if the GPU has it (+17 % tok/s)",
                      choices=("off", "all", "auto-all"))
    # optimizer
    matrix_lr: float = option(0.02, "Muon: matrices of the blocks, gates", 0, 10)
    embed_lr: float = option(0.3, "Adam: embedding, value embeddings", 0, 10)
    head_lr: float = option(0.004, "Adam: lm_head", 0, 10)
    scalar_lr: float = option(0.5, "Adam: x0_lambda; resid_lambda gets a hundredth of it", 0, 10)
    muon_momentum: float = option(0.95, "Muon's momentum after its warmup", 0, 0.9999)
    muon_momentum_warmup_start: float = option(0.85, "Muon's momentum at step 0", 0, 0.9999)
    muon_momentum_warmup_steps: int = optional(300, "steps of that warmup; 0: none")
    muon_backend_steps: int = option(5, "Polar Express iterations", 1, 20)
    normuon_beta2: float = option(0.95, "NorMuon: decay of the mean squares", 0, 0.9999)
    weight_decay: float = optional(10.0, "Muon: cautious, times matrix_lr; falls linearly to 0", 0, 1e6)
    beta1: float = option(0.8, "Adam: decay of the first moment", 0, 0.9999)
    beta2: float = option(0.95, "Adam: decay of the second moment", 0, 0.99999)
    adam_eps: float = option(1e-10, "Adam: added to the root of the corrected second moment", 1e-20, 1)
    # length
    iterations: int = option(12_700, "maximum steps; set by the dial if a horizon is given", 1, 10**9)
    warmdown_frac: float = option(0.5, "last fraction of the run, in which LR falls", 0, 1)
    lr_floor: float = option(0.0, "LR factor at the end of the warmdown", 0, 1)
    # scores
    score_artifact: bool = option(False, "pack an artifact and score it; 0: score the trained weights")
    core: bool = option(True, "score CORE at the end")
    core_bundle: str = option("data/core_bundle", "folder of CORE's tasks")
    core_metric_every: int = optional(0, "steps between CORE scores; 0: at the end only")
    core_metric_max_per_task: int = optional(0, "examples per task; 0: all")

    def size_of_depth(self, depth: int) -> dict:
        return depth_size(depth)

    def check(self) -> None:
        super().check()
        require(self.value_gate_dim <= self.model_dim,
                f"value_gate_dim={self.value_gate_dim} exceeds model_dim={self.model_dim}")

    def parameter_table(self) -> dict[str, Row]:
        """{kind: Row}"""
        decay = self.weight_decay * self.matrix_lr
        adam: dict = dict(optimizer="adam", beta1=self.beta1, beta2=self.beta2, eps=self.adam_eps)
        matrix: Callable = partial(Row, optimizer="muon", lr=self.matrix_lr, decay=decay)
        scalar: Callable = partial(Row, group="scalar", precision="fp32", **adam)
        return by_kind([
            # kind                 init
            matrix("query",        "matrix", init="uniform", scale=1.7320508),  # std 1 / sqrt(columns)
            matrix("key",          "matrix", init="uniform", scale=1.7320508),
            matrix("value",        "matrix", init="uniform", scale=1.7320508),
            matrix("attn_proj",    "matrix", init="constant", scale=0.0),
            matrix("fc",           "matrix", init="uniform", scale=1.7320508),
            matrix("mlp_proj",     "matrix", init="constant", scale=0.0),
            matrix("value_gate",   "gate", init="constant", scale=0.0, precision="fp32"),
            Row("embed",           "embed", init="normal", scale=1.0, lr=self.embed_lr, **adam),
            Row("head",            "head", init="normal", scale=0.001, lr=self.head_lr, **adam),
            Row("value_embeds",    "value_embed", init="uniform", scale=1.7320508, lr=self.embed_lr, **adam),
            scalar("resid_lambda", init="constant", scale=1.0, lr=self.scalar_lr * 0.01),
            scalar("x0_lambda",    init="constant", scale=0.1, lr=self.scalar_lr, beta1=0.96),
        ])

    def muon_step(self, state: UpdateState) -> None:
        """NorMuon with cautious weight decay."""
        update = nesterov_of_mean(state)
        update = polar_express(update, self.muon_backend_steps, state.dtype)
        update = normuon_scale(update, state.second, self.normuon_beta2)
        cautious_decay(state.p, update, state.lr, state.decay)
        state.p.sub_(state.lr * update)

    def adam_step(self, state: UpdateState) -> None:
        state.p.sub_(state.lr * adam_update(state))

    def schedule(self, step: int, progress: float) -> "Schedule":
        """LR is 1 until the warmdown, then falls linearly to lr_floor; weight decay falls linearly to 0."""
        done = warmdown_done(scheduled_progress(self, progress), self.warmdown_frac)
        warmup = warmup_done(step, self.muon_momentum_warmup_steps)
        return Schedule(lr=1 - done + self.lr_floor * done, decay=1 - progress,
                        momentum=momentum_at(self, warmup))

    def make_model(self, *kernels: WindowKernels) -> Model:
        return GPT2Model(self, *kernels)

class GPT2Block(GPT2BaseBlock):
    """Attention and MLP, pre-norm, on a learned mix of the residual stream and the embedding."""
    def __init__(self, cfg: GPT2, has_value_embed: bool) -> None:
        super().__init__()
        C = cfg.model_dim
        H = cfg.num_heads
        self.head_dim = C // H
        kv_heads = cfg.num_kv_heads or H
        self.value_gate_factor = cfg.value_gate_factor
        self.query = parameter(C, C)
        self.attn_proj = parameter(C, C)
        self.key = parameter(kv_heads * self.head_dim, C)
        self.value = parameter(kv_heads * self.head_dim, C)
        self.value_gate = parameter(kv_heads, cfg.value_gate_dim, on=has_value_embed)
        self.fc = parameter(cfg.mlp_mult * C, C)
        self.mlp_proj = parameter(C, cfg.mlp_mult * C)
        self.resid_lambda = parameter(1)
        self.x0_lambda = parameter(1)

    def attend(self, h: Tensor, value_embed: Tensor | None, mask: Mask, context: GPT2Context) -> Tensor:
        """h (B, T, C), normalized -> what attention adds to the residual stream (B, T, C)."""
        product = self.kernels.linear
        q, k, v = project_heads(h, self.head_dim, product, self.query, self.key, self.value)
        if self.value_gate is not None:
            gates = self.value_gate_factor * gate(h, self.value_gate)[..., None]
            v = v + gates * value_embed
        q = rotate(rms_norm(q) * self.head_dim**-0.5, *context.rope)
        k = rotate(rms_norm(k), *context.rope)
        y = attend_heads(q, k, v, mask, self.kernels.attention)
        return product(y.flatten(2), self.attn_proj)

class GPT2Model(GPT2BaseModel):
    """The blocks in order, each with its window and its value embedding."""
    def __init__(self, cfg: GPT2, kernels: WindowKernels = WindowKernels()) -> None:
        super().__init__()
        V = cfg.vocab_size
        C = cfg.model_dim
        N = cfg.num_layers
        self.cfg = cfg
        self.kinds = per_layer(cfg.window_pattern, N)
        self.tables = per_layer(cfg.value_embed_layers, N)
        self.embed = parameter(V, C)
        self.head = parameter(V, C)
        self.blocks = nn.ModuleList([GPT2Block(cfg, table > 0) for table in self.tables])
        kv_dim = (cfg.num_kv_heads or cfg.num_heads) * (C // cfg.num_heads)
        self.value_embeds = nn.ParameterList([parameter(V, kv_dim) for _ in range(max(self.tables))])
        self.use(kernels)

    def hidden(self, tokens: Tensor, context: GPT2Context) -> Tensor:
        """tokens (B, T) -> last activations, normalized (B, T, C)."""
        masks = layer_masks(context.windows, tokens, None, self.kernels.window_mask)
        x = x0 = rms_norm(F.embedding(tokens, self.embed).to(context.dtype))
        for block, kind, table in zip(self.blocks, self.kinds, self.tables):
            value_embed = None
            if table:
                value_embed = F.embedding(tokens, self.value_embeds[table - 1]).to(x.dtype)
                value_embed = split_heads(value_embed, block.head_dim)
            x = block(x, x0, value_embed, masks[kind], context)
        return rms_norm(x)

# ---------- gpt2_plus: the same game as gpt2, a later record
# nanochat a825e63 (run 6 of its board), depth 24, 8 tokens per weight, ClimbMix, fp8: 5,568 steps in 1.65 h.
# Run 5, without smear and backout and at 8.7 tokens per weight, took 1.80 h. The init of smear, its
# gate and backout is that of nanochat's fix of 13 April 2026; at a825e63 they were never set. The learning
# rates and weight decay below are those of depth 12 and a batch of 2**19 tokens.
@dataclass(frozen=True)
class GPT2Plus(GPT2Recipe):
    """Like gpt2, with smear, backout and sharper attention; LR warms up, weight decay falls as a cosine,
    momentum with LR."""
    preset: str = option("gpt2_plus", "the recipe", model=True)
    # the dial
    depth: int = optional(24, "the depth dial: sets size, batch, rates, decay and steps; 0: off", 0, 198)
    target_param_data_ratio: float = optional(8.0, "tokens per weight of matrices and lm_head; 0: off",
                                              0, 1e6)
    target_flops: float = optional(0.0, "training FLOPs of the whole run; 0: off", 0, 1e30)
    # size; the dial sets layers, width, heads, windows, value embeddings and backout
    num_layers: int = option(24, "blocks", 1, 1000, model=True)
    model_dim: int = option(1536, "width of the residual stream", 2, 1 << 16, model=True)
    num_heads: int = option(12, "query heads", 1, 4096, model=True)
    num_kv_heads: int = optional(0, "key and value heads (GQA); 0: num_heads", 0, 4096, model=True)
    mlp_mult: int = option(4, "MLP width / model_dim", 1, 64, model=True)
    logit_softcap: float = optional(15.0, "logits = cap * tanh(logits / cap); 0: no cap", 0, 1e4, model=True)
    # 1.44 * 128 ** -0.5: the public script multiplies q and k by 1.2 each after their norm
    attn_scale: float = optional(0.12727922, "factor on q @ k; 0: head_dim ** -0.5", 0, 100, model=True)
    rope_base: float = optional(100_000.0, "RoPE: 1 / the lowest frequency; 0: no RoPE", 0, 1e9, model=True)
    window_pattern: str = option("L", "window per layer: L long, S short; repeated", model=True)
    window_schedule: tuple = option((0,), "long window per stage, in earlier tokens; 0: train_seq_len",
                                    0, 1 << 20, model=True)
    short_window: float = option(0.25, "short window / long window", 0, 1, model=True)
    value_embed_layers: tuple = option((0,), "value embedding per layer (cycled), from 1; 0: none",
                                       0, 999, model=True)
    value_gate_dim: int = option(12, "channels read by the gates on value embeddings", 1, 1 << 16, model=True)
    value_gate_factor: float = option(3.0, "factor on value embeddings when the gate is open",
                                      0, 100, model=True)
    smear_dim: int = optional(24, "channels read by the gate that adds the previous token; 0: no smear",
                              0, 1 << 16, model=True)
    backout_layer: int = optional(12, "layer whose output is partly subtracted at the end; 0: none",
                                  0, 1000, model=True)
    # data and batch
    data_path: str = option("data/datasets/climbmix", "folder of token shards")
    vocab_size: int = optional(32_768, "tokens; 0: the tokenizer's (needs depth=0)", 0, 65_536, model=True)
    train_seq_len: int = option(2048, "tokens per row", 2, 1 << 20, model=True)
    train_batch_tokens: int = optional(0, "tokens per step over all ranks; 0: by the dial", 0, 1 << 30)
    packing: str = option("best_fit", "how training rows are cut: see BestFit and, for few documents, Rows",
                          choices=("best_fit", "rows"))
    val_tokens: int = optional(41_943_040, "how many tokens of val are scored, from its start; 0: all")
    val_loss_every: int = optional(250, "steps between validations, from step 0 on; 0: at the end only")
    train_log_every: int = optional(50, "steps between train_loss lines after step 10; 0: every 100")
    fp8: str = option("auto-all", "training matmuls in fp8; auto-all: if the GPU has it (+17 % tok/s)",
                      choices=("off", "all", "auto-all"))
    # optimizer
    matrix_lr: float = option(0.02, "Muon: matrices of the blocks, value gates", 0, 10)
    embed_lr: float = option(0.3, "Adam: embedding; value embeddings get half of it", 0, 10)
    head_lr: float = option(0.008, "Adam: lm_head", 0, 10)
    scalar_lr: float = option(0.5, "Adam: x0_lambda; resid_lambda gets a hundredth of it", 0, 10)
    gate_lr: float = option(0.2, "Adam: smear, its gate, backout; not scaled by the dial", 0, 10)
    muon_momentum: float = option(0.97, "Muon's momentum between warmup and warmdown", 0, 0.9999)
    muon_momentum_warmup_start: float = option(0.85, "Muon's momentum at step 0", 0, 0.9999)
    muon_momentum_warmup_steps: int = optional(400, "steps of that warmup; 0: none")
    muon_momentum_end: float = optional(0.9, "momentum at the end of the LR warmdown; 0: constant", 0,
                                        0.9999)
    muon_backend_steps: int = option(5, "Polar Express iterations", 1, 20)
    polar_margin: float = option(1.01, "Polar Express: safety factor on a matrix's norm", 1, 2)
    normuon_beta2: float = option(0.9, "NorMuon: decay of the mean squares", 0, 0.9999)
    weight_decay: float = optional(14.0, "Muon: cautious, times matrix_lr; falls as a cosine to 0", 0, 1e6)
    adam_weight_decay: float = optional(0.01, "Adam: decay, times LR and a factor per kind; 0: none", 0, 1e6)
    beta1: float = option(0.8, "Adam: decay of the first moment", 0, 0.9999)
    beta2: float = option(0.95, "Adam: decay of the second moment", 0, 0.99999)
    adam_eps: float = option(1e-10, "Adam: added to the root of the corrected second moment", 1e-20, 1)
    # length
    iterations: int = option(5568, "maximum steps; set by the dial if a horizon is given", 1, 10**9)
    lr_warmup_steps: int = optional(40, "LR warmup steps; 0: none")
    warmdown_frac: float = option(0.65, "last fraction of the run, in which LR falls", 0, 1)
    lr_floor: float = option(0.05, "LR factor at the end of the warmdown", 0, 1)
    # scores
    score_artifact: bool = option(False, "pack an artifact and score it; 0: score the trained weights")
    core: bool = option(True, "score CORE at the end")
    core_bundle: str = option("data/core_bundle", "folder of CORE's tasks")
    core_metric_every: int = optional(0, "steps between CORE scores; 0: at the end only")
    core_metric_max_per_task: int = optional(0, "examples per task; 0: all")

    def size_of_depth(self, depth: int) -> dict:
        size = depth_size(depth)
        if self.backout_layer:
            size["backout_layer"] = depth // 2
        return size

    def check(self) -> None:
        super().check()
        require(max(self.value_gate_dim, self.smear_dim) <= self.model_dim,
                f"value_gate_dim={self.value_gate_dim}, smear_dim={self.smear_dim}: neither may exceed "
                f"model_dim={self.model_dim}")

    def parameter_table(self) -> dict[str, Row]:
        """{kind: Row}"""
        decay = self.weight_decay * self.matrix_lr
        adam_decay = self.adam_weight_decay
        adam: dict = dict(optimizer="adam", beta1=self.beta1, eps=self.adam_eps)
        matrix: Callable = partial(Row, optimizer="muon", lr=self.matrix_lr, decay=decay)
        scalar: Callable = partial(Row, group="scalar", precision="fp32", beta2=self.beta2, **adam)
        return by_kind([
            # kind                 init
            matrix("query",        "matrix", init="uniform", scale=1.7320508),  # std 1 / sqrt(columns)
            matrix("key",          "matrix", init="uniform", scale=1.7320508),
            matrix("value",        "matrix", init="uniform", scale=1.7320508),
            matrix("attn_proj",    "matrix", init="constant", scale=0.0),
            matrix("fc",           "matrix", init="uniform", scale=0.6928203),  # std 0.4 / sqrt(columns)
            matrix("mlp_proj",     "matrix", init="constant", scale=0.0),
            matrix("value_gate",   "gate", init="positive", scale=0.02, precision="fp32"),
            Row("embed",           "embed", init="normal", scale=0.8, lr=self.embed_lr, beta2=0.995,
                decay=adam_decay * 0.1, **adam),
            Row("head",            "head", init="normal", scale=0.001, lr=self.head_lr, beta2=0.96,
                decay=adam_decay, **adam),
            Row("value_embeds",    "value_embed", init="uniform", scale=1.7320508, lr=self.embed_lr * 0.5,
                beta2=0.995, decay=adam_decay, **adam),
            # from 1.15 in the first layer to 1.05 in the last one; x0_lambda from 0.2 to 0.05
            scalar("resid_lambda", init="constant", scale=1.15, change=-0.1, lr=self.scalar_lr * 0.01,
                   decay=adam_decay * 5),
            scalar("x0_lambda",    init="constant", scale=0.2, change=-0.15, lr=self.scalar_lr, beta1=0.96),
            Row("smear_gate",      "stream_gate", init="positive", scale=0.02, lr=self.gate_lr,
                beta2=self.beta2, precision="fp32", **adam),
            scalar("smear",        init="constant", scale=0.0, lr=self.gate_lr),
            scalar("backout",      init="constant", scale=0.2, lr=self.gate_lr),
        ])

    def muon_step(self, state: UpdateState) -> None:
        """NorMuon with cautious weight decay."""
        update = nesterov_of_mean(state)
        update = polar_express(update, self.muon_backend_steps, state.dtype, self.polar_margin)
        update = normuon_scale(update, state.second, self.normuon_beta2)
        cautious_decay(state.p, update, state.lr, state.decay)
        state.p.sub_(state.lr * update)

    def adam_step(self, state: UpdateState) -> None:
        """Adam with decoupled weight decay."""
        update = adam_update(state)
        if self.adam_weight_decay:
            update = update + state.decay * state.p
        state.p.sub_(state.lr * update)

    def schedule(self, step: int, progress: float) -> "Schedule":
        """LR warms up, is 1 until the warmdown, then falls linearly to lr_floor. Weight decay
        follows a cosine to 0. Momentum warms up, then falls with LR."""
        done = warmdown_done(scheduled_progress(self, progress), self.warmdown_frac)
        lr = 1 - done + self.lr_floor * done
        if self.lr_warmup_steps:
            lr *= min(1.0, (step + 1) / self.lr_warmup_steps)
        momentum = momentum_at(self, warmup_done(step, self.muon_momentum_warmup_steps))
        if self.muon_momentum_end:
            momentum += (self.muon_momentum_end - momentum) * done
        return Schedule(lr, momentum, decay=(1 + math.cos(math.pi * progress)) / 2)

    def make_model(self, *kernels: WindowKernels) -> Model:
        return GPT2PlusModel(self, *kernels)

class GPT2PlusBlock(GPT2BaseBlock):
    """Attention and MLP, pre-norm, on a learned mix of the residual stream and the embedding."""
    def __init__(self, cfg: GPT2Plus, has_value_embed: bool) -> None:
        super().__init__()
        C = cfg.model_dim
        H = cfg.num_heads
        self.head_dim = C // H
        kv_heads = cfg.num_kv_heads or H
        self.attn_scale = cfg.attn_scale or self.head_dim**-0.5
        self.value_gate_factor = cfg.value_gate_factor
        self.query = parameter(C, C)
        self.attn_proj = parameter(C, C)
        self.key = parameter(kv_heads * self.head_dim, C)
        self.value = parameter(kv_heads * self.head_dim, C)
        self.value_gate = parameter(kv_heads, cfg.value_gate_dim, on=has_value_embed)
        self.fc = parameter(cfg.mlp_mult * C, C)
        self.mlp_proj = parameter(C, cfg.mlp_mult * C)
        self.resid_lambda = parameter(1)
        self.x0_lambda = parameter(1)

    def attend(self, h: Tensor, value_embed: Tensor | None, mask: Mask, context: GPT2Context) -> Tensor:
        """h (B, T, C), normalized -> what attention adds to the residual stream (B, T, C)."""
        product = self.kernels.linear
        q, k, v = project_heads(h, self.head_dim, product, self.query, self.key, self.value)
        if self.value_gate is not None:
            gates = self.value_gate_factor * gate(h, self.value_gate)[..., None]
            v = v + gates * value_embed
        q = rotate(rms_norm(q) * self.attn_scale, *context.rope)
        k = rotate(rms_norm(k), *context.rope)
        y = attend_heads(q, k, v, mask, self.kernels.attention)
        return product(y.flatten(2), self.attn_proj)

class GPT2PlusModel(GPT2BaseModel):
    """The blocks in order, each with its window and its value embedding."""
    def __init__(self, cfg: GPT2Plus, kernels: WindowKernels = WindowKernels()) -> None:
        super().__init__()
        V = cfg.vocab_size
        C = cfg.model_dim
        N = cfg.num_layers
        self.cfg = cfg
        self.kinds = per_layer(cfg.window_pattern, N)
        self.tables = per_layer(cfg.value_embed_layers, N)
        self.embed = parameter(V, C)
        self.head = parameter(V, C)
        self.smear = parameter(1, 1, on=cfg.smear_dim)
        self.smear_gate = parameter(1, cfg.smear_dim, on=cfg.smear_dim)
        self.backout = parameter(1, on=0 < cfg.backout_layer < N)
        self.blocks = nn.ModuleList([GPT2PlusBlock(cfg, table > 0) for table in self.tables])
        kv_dim = (cfg.num_kv_heads or cfg.num_heads) * (C // cfg.num_heads)
        self.value_embeds = nn.ParameterList([parameter(V, kv_dim) for _ in range(max(self.tables))])
        self.use(kernels)

    def hidden(self, tokens: Tensor, context: GPT2Context) -> Tensor:
        """tokens (B, T) -> last activations, normalized (B, T, C)."""
        masks = layer_masks(context.windows, tokens, None, self.kernels.window_mask)
        x = rms_norm(F.embedding(tokens, self.embed).to(context.dtype))
        if self.smear is not None:
            x = smear(x, self.smear, self.smear_gate)
        x0 = x
        for i, block in enumerate(self.blocks):
            table = self.tables[i]
            value_embed = None
            if table:
                value_embed = F.embedding(tokens, self.value_embeds[table - 1]).to(x.dtype)
                value_embed = split_heads(value_embed, block.head_dim)
            x = block(x, x0, value_embed, masks[self.kinds[i]], context)
            if i == self.cfg.backout_layer:
                backed_out = x
        if self.backout is not None:
            x = x - self.backout.to(x.dtype) * backed_out
        return rms_norm(x)

# ---------- the registry of recipes
RECIPES = dict(tiny=Tiny, golf=Golf, golf_plus=GolfPlus, speedrun=Speedrun, speedrun_plus=SpeedrunPlus,
               gpt2=GPT2, gpt2_plus=GPT2Plus)  # type: dict[str, type[Config]]

# ---------- 15 start
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
