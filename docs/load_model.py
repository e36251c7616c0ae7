"""Models of the preset tiny with nothing but torch, as `./run.sh record export RUN` wrote them:
model = load("logs/RUN/export"); model(tokens) -> log-probabilities of the next token, tokens int64 (B, T)."""
import json
from pathlib import Path
import torch
import torch.nn.functional as F

def read_safetensors(path):
    """{name: tensor}: 8 bytes with the size of a JSON header, the header, the numbers."""
    raw = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    floats = torch.frombuffer(raw, dtype=torch.float32, offset=start)
    return {name: floats[slice(*(at // 4 for at in entry["data_offsets"]))].view(entry["shape"])
            for name, entry in json.loads(raw[8:start]).items() if name != "__metadata__"}

def load(folder):
    cfg, weights = json.loads(Path(folder, "config.json").read_text()), Path(folder, "model.safetensors")
    left_out = "max_doc_len attn_scale attn_gate_dim value_gate_dim value_lambdas smear_dim ngram_rows"
    assert not any(cfg[name] for name in f"{left_out} rope_end rope_yarn skip_sigmoid backout_layer".split())
    assert cfg["rope_base"] and cfg["rope_fraction"] == 1 and cfg["skip_layers"] == [0]
    return lambda tokens, w=read_safetensors(weights): log_probs(cfg, w, tokens)

def norm(x):
    return F.rms_norm(x, (x.size(-1),), eps=2**-23)

def rotate(a, b, cos, sin):
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)

@torch.no_grad()
def log_probs(cfg, w, tokens):
    N, T, D = cfg["num_layers"], tokens.size(1), cfg["model_dim"] // cfg["num_heads"]
    windows = cfg["eval_window"] or cfg["window_schedule"][-1], cfg["window_schedule"][-1]
    half = min(n or cfg["train_seq_len"] for n in windows) // 2 // cfg["window_block"]
    window, place = {"L": windows[0] or T, "S": max(1, half) * cfg["window_block"]}, torch.arange(T)
    angles = place[:, None] * cfg["rope_base"] ** -(torch.arange(D // 2) / (D // 2))
    cos, sin, back = angles.cos(), angles.sin(), place[:, None] - place  # query - key
    x = F.embedding(tokens, w["embed"])
    if cfg["bigram_rows"]:
        pairs = (tokens * 0x9E3779B1 ^ tokens.roll(1, 1) * 0x85EBCA6B) % cfg["bigram_rows"]
        x = x + F.embedding(pairs, w["bigram_embed"]) * (place > 0)[:, None]
    x0, outputs = (x := norm(x)), []
    skips = [(i, N // 2 * 2 - 1 - i) for i in range(N // 2)] if cfg["unet_skips"] else []
    for i in range(N):
        b = {name.split(".", 2)[2]: t for name, t in w.items() if name.startswith(f"blocks.{i}.")}
        kind, table = (cfg[name][i % len(cfg[name])] for name in ("window_pattern", "value_embed_layers"))
        x = x + sum(w["skip_weights"][row] * outputs[a] for row, (a, to) in enumerate(skips) if to == i)
        x = b["resid_lambda"] * x + b["x0_lambda"] * x0 if cfg["residual_mix"] else x
        scales, h = b.get("layer_scale", (1, 1)), norm(x)
        v = h @ b["value"].T + (F.embedding(tokens, w[f"value_embeds.{table - 1}"]) if table else 0)
        q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in (h @ b["query"].T, h @ b["key"].T, v))
        if cfg["key_offset"] and kind == "L":  # half of each key head comes from the token before
            now, before = k.unflatten(-1, (2, -1)).tensor_split(2, -1)
            k = torch.cat((now, F.pad(before, (0, 0, 0, 0, 1, -1))), -1).flatten(-2)
        q, k = (rotate(*norm(y).chunk(2, -1), cos, sin) for y in (q, k))
        q = q * b.get("qk_gain", torch.ones(q.size(1)))[:, None, None]
        y = F.scaled_dot_product_attention(q, k, v, (back >= 0) & (back <= window[kind]), enable_gqa=True)
        x = x + scales[0] * (y.transpose(1, 2).flatten(2) @ b["attn_proj"].T)
        outputs.append(x := x + scales[1] * (F.relu(norm(x) @ b["fc"].T).square() @ b["mlp_proj"].T))
    logits, cap = norm(x) @ w["embed" if cfg["tie_embeddings"] else "head"].T, cfg["logit_softcap"]
    return F.log_softmax(cap * torch.tanh(logits / cap) if cap else logits, -1)
