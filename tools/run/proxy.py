"""A recipe's proxy: `--proxy=WIDTH` stands for the flags of a recipe that is scaled down to this width, for
machines that cannot train the recipe itself.

    ./run.sh speedrun --proxy=64 [NAME=value ...]
    python tools/run/proxy.py [--trainer=FOLDER] --preset=speedrun --proxy [--name=value ...]

Whatever you give yourself stays as given. Each recipe's rule is a function below, and the log shows what it
gives. A bare --proxy is 32 wide. --trainer: folder of another train_gpt.py. --dry-run: prints the rules and
the limits of the run, and trains nothing. docs/proxy.md: what a proxy's verdict is worth.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TRAINER = "--trainer="
if __name__ == "__main__":
    sys.path[:] = [str(ROOT), *[folder for folder in sys.path if folder != str(HERE)]]
    folders = [word.removeprefix(TRAINER) for word in sys.argv[1:] if word.startswith(TRAINER)]
    if folders:
        sys.path.insert(0, str(Path(folders[0]).resolve()))

import torch  # noqa: E402

import train_gpt  # noqa: E402
from tools.run.plan import planned_tokens  # noqa: E402
from tools.run.words import read_words  # noqa: E402
from train_gpt import (  # noqa: E402
    CHANNELS_PER_LAYER, GPT2, HEAD_DIM, REFERENCE_WIDTH, Config, GPT2Plus, Golf, GolfPlus, Refused, Speedrun,
    SpeedrunPlus, horizon_weights, load_config, preset_config, read_text, require, show, total_steps, typed)

PROXY_DATA = "data/datasets/embedded"  # any prepared text will do
PROXY_STEPS = 0.25  # steps of a proxy / steps of its recipe, at any width
PROXY_VAL = 262_144  # val tokens that are scored
WIDTH = 32  # of a bare --proxy, and the least: minutes on two cores (docs/proxy.md)
Log = Callable[..., None]  # takes lines


class Scaled(NamedTuple):
    """A constant of a proxy."""
    name: str
    value: Any
    rule: str  # where the value comes from, for the log


class ProxySize(NamedTuple):
    """What a proxy's rule starts from."""
    width: int
    vocab_size: int  # of the text
    val_tokens: int  # of its val split that are scored; 0: all
    depth: int  # that of the depth dial as it was given; 0: by the rule
    on_gpu: bool


def lines_of(rows: list[Scaled], full: Any) -> list[str]:
    """What differs from the recipe, a line per rule."""
    by_rule: dict[str, list[str]] = {}
    for row in rows:
        if row.value != getattr(full, row.name):
            by_rule.setdefault(row.rule, []).append(f"{row.name}={show(row.value)}")
    return [f"proxy {', '.join(changed)}: {rule}" for rule, changed in by_rule.items()]


def value_of(rows: list[Scaled], name: str) -> Any:
    """The value of a proxy's constant."""
    return {row.name: row.value for row in rows}[name]


def proxy_shape(full: Any, size: ProxySize) -> list[Scaled]:
    """Width, heads and vocabulary. full: the recipe."""
    width = size.width
    possible = [n for n in range(2, full.num_heads + 1, 2) if width % (2 * n) == 0]
    wanted = full.num_heads * (width / full.model_dim) ** 0.5
    heads = min(possible, key=lambda n: abs(math.log(n / wanted)))
    return [Scaled("model_dim", width, "the width of the proxy"),
            Scaled("num_heads", heads, "even; heads, and channels per head, fall as the root of model_dim"),
            Scaled("vocab_size", size.vocab_size, "that of the text")]


def proxy_length(full: Any, shape: list[Scaled], steps: int, tokens_per_weight: float) -> list[Scaled]:
    """Steps, and the batch that follows from them. full: the recipe, whose run takes `steps`. shape: the
    proxy's other sizes."""
    small = replace(full, **{row.name: row.value for row in shape})
    T = small.train_seq_len
    part = PROXY_STEPS * steps / total_steps(full)
    iterations = max(1, round(part * full.iterations))
    extension = round(part * (total_steps(full) - full.iterations))
    warmup = round(PROXY_STEPS * full.muon_momentum_warmup_steps)
    # tokens of the whole run if a step of the first stage is one row
    small = replace(small, iterations=iterations, train_batch_tokens=T)
    if extension:
        small = replace(small, extension_iterations=extension)
    one_row = planned_tokens(small)
    rows = max(1, round(tokens_per_weight * horizon_weights(small) / one_row))
    return [
        Scaled("iterations", iterations, f"{PROXY_STEPS:g} of the recipe's {steps} steps, at any width"),
        Scaled("extension_iterations", extension, "the same part of the run"),
        Scaled("muon_momentum_warmup_steps", warmup, "the same part of the run"),
        Scaled("train_batch_tokens", rows * T,
               f"{tokens_per_weight:.3g} tokens per weight of matrices and lm_head in those steps"),
        Scaled("max_epochs", 0, "a small text is read again")]


def proxy_rates(full: Any, width: int, reference: int, tables: Sequence[str]) -> list[Scaled]:
    """Learning rates. reference: the width for which `full` states them. tables: constants of the rates of
    embeddings and lm_head."""
    factor = (width / reference) ** -0.5
    rates = [Scaled("matrix_lr", full.matrix_lr,
                    "stays: Muon's updates have the same spectral norm at any width (arXiv:2310.17813)")]
    for name in tables:
        rule = f"Adam's rates of tables go as width**-0.5, as on gpt2's depth dial: {factor:.3g} times"
        rates.append(Scaled(name, round(factor * getattr(full, name), 6), rule))
    return rates


def proxy_rows() -> list[Scaled]:
    """Rows of the whole text, for recipes that read only the beginnings of documents: at a small width those
    are so short that a proxy would read a small part of the text several times."""
    rule = "rows of one length from the whole text, in one random order"
    rows: dict[str, Any] = dict(packing="rows", shuffle=True, seq_schedule=(1,))
    return [Scaled(name, value, rule) for name, value in rows.items()]


def proxy_scores(context: int, size: ProxySize) -> list[Scaled]:
    """Scores, artifact, clock and compiler. context: tokens per row in evaluation."""
    rule = "scored once, at the end, on the same part of val at any width"
    scores = [
        Scaled("eval_context", context, rule),
        Scaled("val_tokens", size.val_tokens, rule),
        Scaled("val_batch_size", max(context, 16_384 // context * context), rule),
        Scaled("val_loss_every", 0, rule),
        Scaled("artifact_bytes_limit", 0, "the trained weights are scored"),
        Scaled("score_artifact", False, "the trained weights are scored"),
        Scaled("max_wallclock_seconds", 0.0, "steps end the run: a slow machine trains the same model")]
    if not size.on_gpu:
        scores += [Scaled("compile", False, "compiling every stage would take longer than it saves"),
                   Scaled("warmup_steps", 1, "compiling every stage would take longer than it saves"),
                   Scaled("dtype", "float32", "faster at these widths, and alike on all CPUs")]
    return scores


def proxy_text(path: str, full: Any) -> tuple[int, int]:
    """The vocabulary of a dataset, and how many tokens of its val split are scored; 0: all. If it is not
    there, those of the embedded corpus; without a tokenizer, the recipe's vocab_size."""
    try:
        manifest = json.loads(read_text(Path(path, "manifest.json")))
        vocab_size = (manifest.get("tokenizer") or {}).get("vocab_size", full.vocab_size)
        val = sum([file["tokens"] for file in manifest["files"] if file["split"] == "val"])
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return 1024, PROXY_VAL
    return int(vocab_size), PROXY_VAL if val > PROXY_VAL else 0


# ---------- the rules of the recipes
def golf_shape(full: Any, size: ProxySize) -> list[Scaled]:
    """The sizes of the golf recipes' proxies, with as many query heads per key head as in the recipe."""
    shape = proxy_shape(full, size)
    kv_heads = value_of(shape, "num_heads") * full.num_kv_heads // full.num_heads
    T = max(64, round(full.train_seq_len * size.width / full.model_dim))
    return shape + [
        Scaled("num_kv_heads", kv_heads, "one per two query heads"),
        Scaled("train_seq_len", T, "in proportion to the width")]


def golf_proxy(full: Golf, size: ProxySize) -> list[Scaled]:
    """The number of layers stays, and the warmdown's part of the run. The record trains on 194 tokens per
    weight, too many for a small machine; a proxy trains on 20 (arXiv:2203.15556)."""
    shape = golf_shape(full, size)
    rates = proxy_rates(full, size.width, full.model_dim, ["tied_embed_lr"])
    length = proxy_length(full, shape, steps=8394, tokens_per_weight=20)
    return shape + length + rates + [
        Scaled("warmdown_iters", round(PROXY_STEPS * full.warmdown_iters), "the same part of the run"),
        Scaled("tokenizer_path", "", "that of the text"),
    ] + proxy_scores(value_of(shape, "train_seq_len"), size)


def golf_plus_proxy(full: GolfPlus, size: ProxySize) -> list[Scaled]:
    """Layers, loops, grouped queries and the stages stay. The record trains some 109 tokens per weight, which
    no small machine can; a proxy trains 20 (arXiv:2203.15556)."""
    shape = golf_shape(full, size)
    rates = proxy_rates(full, size.width, full.model_dim, ["tied_embed_lr"])
    table_factor = value_of(rates, "tied_embed_lr") / full.tied_embed_lr
    length = proxy_length(full, shape, steps=4988, tokens_per_weight=20)
    return shape + length + rates + [
        Scaled("weight_decay", full.weight_decay / PROXY_STEPS, "shrinks as much over the whole run"),
        Scaled("adam_weight_decay", round(full.adam_weight_decay / PROXY_STEPS / table_factor, 6),
               "shrinks the embedding as much over the whole run"),
        Scaled("ema_decay", 1 - (1 - full.ema_decay) / PROXY_STEPS, "the mean of the same part of the run"),
        Scaled("tokenizer_path", "", "that of the text"),
        Scaled("gptq_batches", 0, "there is no artifact to round"),
        Scaled("eval_sliding", 0, "the plain score counts"),
    ] + proxy_scores(value_of(shape, "train_seq_len"), size)


def speedrun_windows(full: Any, share: float) -> list[Scaled]:
    """Windows, documents and rows in proxies of the speedruns. share: proxy's width / recipe's width."""
    block = max(4, round(full.window_block * share))
    windows = [stage.window // full.window_block * block for stage in full.stages()]
    longest = full.max_doc_len // full.window_block * block
    return [
        Scaled("window_block", block, "in proportion to the width"),
        Scaled("window_schedule", tuple(windows), "as many blocks as in the recipe"),
        Scaled("eval_window", full.eval_window // full.window_block * block,
               "as many blocks as in the recipe"),
        Scaled("max_doc_len", longest, "as many blocks as in the recipe"),
        Scaled("train_seq_len", longest, "one document: a CPU computes masked attention in full")]


def speedrun_decay(full: Any, batch: int) -> list[Scaled]:
    """Weight decay, momentum cooldown, gradient scale and fp8 in proxies of the speedruns. batch: tokens
    per step of the proxy."""
    ranks = max(1, round(full.loss_sum_ranks * batch / full.train_batch_tokens))
    return [
        Scaled("weight_decay", full.weight_decay / PROXY_STEPS, "shrinks as much over the whole run"),
        Scaled("muon_momentum_cooldown_steps", round(PROXY_STEPS * full.muon_momentum_cooldown_steps),
               "the same part of the run"),
        Scaled("loss_sum_ranks", ranks, "gradients as large beside adam_eps as in the recipe, or nearly"),
        Scaled("fp8", "off", "fp8 gains seconds, not loss per token")]


def speedrun_proxy(full: Speedrun, size: ProxySize) -> list[Scaled]:
    """All layers, skips and stages stay, and so do the channels of gates."""
    share = size.width / full.model_dim
    shape = proxy_shape(full, size)
    heads = value_of(shape, "num_heads")
    shape += speedrun_windows(full, share)
    shrunk = (full.model_dim / full.num_heads) / (size.width / heads)
    length = proxy_length(full, shape, total_steps(full), planned_tokens(full) / horizon_weights(full))
    rates = proxy_rates(full, size.width, full.model_dim, ["embed_lr", "head_lr"])
    return shape + length + rates + speedrun_decay(full, value_of(length, "train_batch_tokens")) + [
        Scaled("attn_scale", full.attn_scale * shrunk**0.5, "rises as the root of the heads' width falls"),
    ] + proxy_rows() + proxy_scores(8 * value_of(shape, "max_doc_len"), size)


def speedrun_plus_proxy(full: SpeedrunPlus, size: ProxySize) -> list[Scaled]:
    """All layers, skips and stages stay, and so do the channels of gates. Bigram tables keep their rows per
    token of the vocabulary."""
    share = size.width / full.model_dim
    shape = proxy_shape(full, size)
    head_dim = size.width / value_of(shape, "num_heads")
    qk_dim = max(4, round(head_dim * full.qk_dim * full.num_heads / full.model_dim / 4) * 4)
    windows = speedrun_windows(full, share)
    block = value_of(windows, "window_block")
    documents = [stage.doc_len // full.window_block * block for stage in full.stages()]
    per_token = size.vocab_size / full.vocab_size
    hidden = max(8, round(full.mudd_dim * share))
    shape += windows + [
        Scaled("qk_dim", qk_dim, "the same part of a head"),
        Scaled("doc_schedule", tuple(documents), "as many blocks as in the recipe"),
        Scaled("dc_window", round(full.dc_window * block / full.window_block), "the same part of a block"),
        Scaled("bigram_rows", round(full.bigram_rows * per_token), "as many per token of the vocabulary"),
        Scaled("bigram_sign_rows", max(16, round(full.bigram_sign_rows * per_token)),
               "as many per token of the vocabulary"),
        Scaled("mudd_dim", hidden, "the same part of the width, but 8 at least"),
        Scaled("mudd_gate_dim", hidden, "the same part of the width, but 8 at least")]
    length = proxy_length(full, shape, total_steps(full), planned_tokens(full) / horizon_weights(full))
    rates = proxy_rates(full, size.width, full.model_dim, ["embed_lr", "head_lr"])
    decay = full.adam_weight_decay / PROXY_STEPS * share  # the squared rates of tables rise as 1 / share
    return shape + length + rates + speedrun_decay(full, value_of(length, "train_batch_tokens")) + [
        Scaled("adam_weight_decay", round(decay, 6), "shrinks the tables as much over the whole run"),
        Scaled("attn_scale", full.attn_scale * (full.qk_dim / qk_dim) ** 0.5,
               "rises as the root of the heads' width falls"),
    ] + proxy_rows() + proxy_scores(8 * value_of(shape, "max_doc_len"), size)


def gpt2_shape(full: Any, size: ProxySize) -> tuple[Config, list[Scaled]]:
    """-> (the recipe at the proxy's depth, the proxy's sizes). A layer per 64 channels, as on the dial, but
    at least four, so that each kind of layer occurs; --depth overrides that. Windows and value embeddings
    follow the depth."""
    depth = size.depth or max(4, size.width // CHANNELS_PER_LAYER)
    T = max(64, 2048 * size.width // REFERENCE_WIDTH // 16 * 16)
    rows = [
        Scaled("depth", depth, "64 channels a layer, as on the dial, but four layers at least"),
        *proxy_shape(full, size),
        Scaled("train_seq_len", T, f"2048 at a width of {REFERENCE_WIDTH}, in proportion to the width")]
    return replace(full, **full.size_of_depth(depth)), rows


def gpt2_rates(full: Any, size: ProxySize) -> list[Scaled]:
    """Rates of the dial's reference model, for embeddings and lm_head scaled with the width; weight decay;
    fp8 and CORE off. The dial's batch factor is left out: the batch shrinks only because the run does."""
    reference = type(full)()
    rates = proxy_rates(reference, size.width, REFERENCE_WIDTH, ["embed_lr", "head_lr"])
    decay = full.weight_decay * (full.matrix_lr / reference.matrix_lr) ** 2 / PROXY_STEPS
    return rates + [
        Scaled("scalar_lr", reference.scalar_lr, "that of the dial's reference model"),
        Scaled("weight_decay", round(decay, 4), "shrinks as much over the whole run"),
        Scaled("fp8", "off", "fp8 gains seconds, not loss per token"),
        Scaled("packing", "rows", "a small text has too few documents to pack rows from"),
        Scaled("shuffle", True, "so that a step has rows of several documents"),
        Scaled("core", False, "CORE needs a larger model")]


def gpt2_proxy(full: GPT2, size: ProxySize) -> list[Scaled]:
    """The depth dial with another width."""
    sized, rows = gpt2_shape(full, size)
    rows += proxy_length(sized, rows, total_steps(full), full.target_param_data_ratio)
    return rows + gpt2_rates(full, size) + proxy_scores(value_of(rows, "train_seq_len"), size)


def gpt2_plus_proxy(full: GPT2Plus, size: ProxySize) -> list[Scaled]:
    """The depth dial with another width."""
    sized, rows = gpt2_shape(full, size)
    head_dim = size.width // value_of(rows, "num_heads")
    rows += proxy_length(sized, rows, total_steps(full), full.target_param_data_ratio)
    return rows + gpt2_rates(full, size) + [
        Scaled("lr_warmup_steps", round(PROXY_STEPS * full.lr_warmup_steps), "the same part of the run"),
        Scaled("attn_scale", full.attn_scale * (HEAD_DIM / head_dim) ** 0.5,
               "rises as the root of the heads' width falls"),
    ] + proxy_scores(value_of(rows, "train_seq_len"), size)


# {preset: its rule, (recipe, size) -> rows}
PROXIES: dict[str, Callable[[Any, ProxySize], list[Scaled]]] = dict(
    golf=golf_proxy, golf_plus=golf_plus_proxy, speedrun=speedrun_proxy, speedrun_plus=speedrun_plus_proxy,
    gpt2=gpt2_proxy, gpt2_plus=gpt2_plus_proxy)


# ---------- the command line
def print_lines(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


def proxy_flags(rows: list[Scaled]) -> list[str]:
    flags = []
    for row in rows:
        text = row.value if isinstance(row.value, str) else show(row.value)
        flags.append(f"--{row.name.replace('_', '-')}={text}")
    return flags


def expand_proxy(text: str, words: Sequence[str], env: Mapping[str, str],
                 log: Log = print_lines) -> list[str]:
    """The words and the flags that --proxy=TEXT stands for, which the log shows with their rules. Raises
    Refused."""
    # 1. what was given
    preset, given = typed(env, words)
    require(preset in PROXIES, f"{preset} has no proxy; these have: {', '.join(PROXIES)}")
    path = given.get("data_path", PROXY_DATA)
    recipe = preset_config(preset)
    full: Any = recipe
    if "window_schedule" in given and hasattr(full, "window_block"):  # in the recipe's tokens
        full = preset_config(preset, {"window_schedule": given.pop("window_schedule")})
    known = {field.name for field in fields(full)}
    on_gpu = torch.cuda.is_available() and given.get("device") != "cpu"
    vocab_size, val_tokens = proxy_text(path, full)
    vocab_size = given.get("vocab_size") or vocab_size
    most = full.model_dim - 16
    text = text or str(WIDTH)
    require(text.isdecimal() and WIDTH <= int(text) <= most and int(text) % 16 == 0,
            f"proxy={text}: a width in steps of 16, from {WIDTH} to {most}")
    # 2. its flags
    size = ProxySize(int(text), vocab_size, val_tokens, given.get("depth", 0), on_gpu)
    rows = PROXIES[preset](full, size)
    rows.append(Scaled("data_path", path, "the embedded corpus, unless another text is given"))
    rows = [row for row in rows if row.name in known and row.name not in given]
    log(f"proxy: {preset} at width {size.width} instead of {full.model_dim}")
    log(*lines_of(rows, recipe))
    return [*words, *proxy_flags(rows)]


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Prints the rules, then trains the proxy by train_gpt's main() -> its exit code."""
    words = read_words([word for word in argv if not word.startswith(TRAINER)], env)
    try:
        flags = expand_proxy(words.proxy or "", words.constants, env)
        if words.dry_run:
            cfg = load_config(env, flags)
            print_lines(f"limits: at most {total_steps(cfg)} steps ({planned_tokens(cfg)} tokens)")
            return 0
    except Refused as error:
        print(f"train_gpt: {error}", file=sys.stderr)
        return 2
    return train_gpt.main(flags, env)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
