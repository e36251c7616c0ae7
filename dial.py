"""The gpt2 game's one dial: what follows from depth by nanochat's rules (github.com/karpathy/nanochat).

train_gpt.py asks for it where depth is given. It stands in a file of its own because only that game turns a
dial, while golf pays for each byte of train_gpt.py. Any constant that is derived here can be given instead.
"""
import math
from dataclasses import replace

# What the preset's learning rates and weight decay are stated for
REFERENCE_DEPTH, REFERENCE_WIDTH, REFERENCE_BATCH = 12, 768, 2 ** 19     # layers, channels, tokens per step
CHANNELS_PER_LAYER, HEAD_DIM = 64, 128
BATCH_POWER = 0.383
HORIZONS = ("iterations", "target_param_data_ratio", "target_flops")


def size(depth, train_seq_len):
    """64 channels per layer, rounded up to whole heads of 128. Each fourth layer and the last see all of the
    sequence, the others half of it; every other layer, the last among them, has value embeddings."""
    heads, layers = math.ceil(depth * CHANNELS_PER_LAYER / HEAD_DIM), range(1, depth + 1)
    return dict(num_layers=depth, num_heads=heads, model_dim=HEAD_DIM * heads,
                window_schedule=(train_seq_len,),
                window_pattern="".join("L" if n % 4 == 0 or n == depth else "S" for n in layers),
                value_embed_layers=tuple(0 if (depth - n) % 2 else (n + 1) // 2 for n in layers))


def turn(cfg, given, horizon_weights, flops_per_token):
    """(cfg with all that follows from cfg.depth but for what was given, a dict of constants; or None, why).

    horizon_weights(cfg) counts the weights of matrices and head, flops_per_token(cfg) the training FLOPs.
    """
    # 0. One of the three horizons: a given one replaces the preset's.
    horizons = [name for name in HORIZONS if given.get(name)]
    if horizons:
        cfg = replace(cfg, **{name: 0.0 for name in HORIZONS[1:] if name not in horizons})
    # 1. Size, and that of the reference.
    reference = replace(cfg, **size(REFERENCE_DEPTH, cfg.train_seq_len))
    cfg = replace(cfg, **size(cfg.depth, cfg.train_seq_len) | given)
    weights = horizon_weights(cfg)
    growth = weights / horizon_weights(reference)
    # 2. Tokens: so many per weight (Chinchilla, arXiv:2203.15556, fitted 20 per parameter), so that tokens
    #    grow as the weights do. Batch: a power of the tokens (arXiv:2505.13738), to the nearest power of 2.
    batch = cfg.train_batch_tokens
    if not batch:
        batch = 2 ** round(math.log2(REFERENCE_BATCH * growth ** BATCH_POWER))
    # 3. Steps, where one of the two other horizons is set: to the end of its FLOPs, or of its tokens.
    derived = {}
    if tokens := cfg.target_flops / flops_per_token(cfg) or cfg.target_param_data_ratio * weights:
        derived["iterations"] = max(1, int(tokens / batch))
    if len(horizons) > 1 and (horizons[0] != "iterations" or derived["iterations"] != cfg.iterations):
        return None, f"{' and '.join(horizons)} are two horizons: give one"     # but for what a log repeats
    # 4. Learning rates: with the root of the batch (arXiv:2205.10287); Adam's also with the inverse root of
    #    the width, between standard and muP (arXiv:2203.03466), which has the inverse.
    rate = (batch / REFERENCE_BATCH) ** 0.5
    adam = rate * (cfg.model_dim / REFERENCE_WIDTH) ** -0.5
    # 5. Weight decay: the weights remember the same part of all tokens (arXiv:2405.13698); so less in longer
    #    runs, more with larger batches.
    factors = dict(matrix_lr=rate, embed_lr=adam, head_lr=adam, scalar_lr=adam, weight_decay=rate / growth)
    derived |= {name: getattr(cfg, name) * factor for name, factor in factors.items()}
    return replace(cfg, **derived | given | {"train_batch_tokens": batch}), ""
