"""Models of the preset tiny with nothing but torch, as `./run.sh record export RUN` wrote them:
model = load("logs/RUN/export"); model(tokens) -> log-probabilities of the next token, tokens int64 (B, T)."""
import json
from pathlib import Path
import torch
import torch.nn.functional as F

def read_safetensors(path):
    """{name: tensor}: 8 bytes with the size of a JSON header, the header, the numbers."""
    raw = bytearray(path.read_bytes())
    start, kinds = 8 + int.from_bytes(raw[:8], "little"), {"F32": torch.float32, "I16": torch.int16}
    numbers = torch.frombuffer(raw, dtype=torch.uint8, offset=start)
    def tensor(dtype, shape, data_offsets):
        return numbers[slice(*data_offsets)].clone().view(kinds[dtype]).view(shape)
    header = json.loads(raw[8:start])
    return {name: tensor(**about) for name, about in header.items() if name != "__metadata__"}

def load(folder):
    cfg, weights = json.loads(Path(folder, "config.json").read_text()), Path(folder, "model.safetensors")
    left_out = "max_doc_len attn_scale attn_gate_dim value_gate_dim value_lambdas smear_dim"
    assert not any(cfg[name] for name in f"{left_out} rope_end rope_yarn skip_sigmoid backout_layer".split())
    assert cfg["rope_base"] and cfg["rope_fraction"] == 1 and cfg["skip_layers"] == [0]
    assert "0" not in cfg["window_pattern"]
    w = read_safetensors(weights)
    tables = count(cfg, w["counts.text"]) if any(cfg["count_orders"]) else []
    return lambda tokens: log_probs(cfg, w, tables, tokens)

# ---------- candidates for the next token; with COUNT_ORDERS=0 COPY_ORDERS=0 a model has none
def ngram_keys(tokens, orders):
    """Yields (n, hashes of 36 bits of the n tokens up to each place) for each n of orders."""
    key = torch.zeros_like(tokens)
    for n in range(1, max(orders) + 1):
        key = (key + tokens.roll(n - 1, -1)) * -0x61C8864680B583EB
        if n in orders:
            yield n, key >> 28 & 0xFFFFFFFFF

def count(cfg, text):
    """Of the training text, int16 (n,), a table per order: where the n-gram's hash says, how many documents
    have the next token that most have, that token, how many have any, the lowest 8 bits of the hash."""
    tokens, tables = text.long() & 0xFFFF, []
    document = (tokens == cfg["bos_id"]).cumsum(0) * 0x9E3779B1 >> 8 & 0xFFF
    for n, key in ngram_keys(tokens, cfg["count_orders"]):
        seen = (key[n - 1:-1] << 28 | tokens[n:] << 12 | document[n - 1:-1]).unique()
        pairs, counts = (seen >> 12).unique_consecutive(return_counts=True)
        keys, which = (pairs >> 16).unique_consecutive(return_inverse=True)
        counts, zero = counts.clamp(max=255), torch.zeros_like(keys)
        best = zero.scatter_reduce(0, which, counts << 16 | pairs & 0xFFFF, "amax")
        total, keys = zero.index_add(0, which, counts).clamp(max=255), keys & 0xFFFFFFFFF
        place = keys >> 36 - cfg["count_bits"]
        last = F.pad(place[1:] != place[:-1], (0, 1), value=True)  # of those that share an entry
        tables.append(torch.zeros(1 << cfg["count_bits"], dtype=torch.long))
        tables[-1][place[last]] = (best << 16 | total << 8 | keys & 0xFF)[last]
    return tables

def candidates(cfg, w, tables, tokens):
    """What they add to the embedding of tokens (B, T)."""
    place, classes, sources = torch.arange(tokens.size(1)), 16 * len(cfg["copy_orders"]), []
    for (n, key), table in zip(ngram_keys(tokens, cfg["count_orders"]), tables):
        entry = table[key >> 36 - cfg["count_bits"]]
        number, share = entry >> 32, (entry >> 32) / (entry >> 8 & 0xFF)
        sure = sum(4 * (number > n) for n in (1, 3, 15)) + sum(share >= part for part in (0.4, 0.7, 0.999))
        there = (entry & 0xFF == key & 0xFF) & (number > 0) & (place >= n - 1)
        sources.append([(there, entry >> 16 & 0xFFFF, sure)])
    sources += [[]] if any(cfg["copy_orders"]) else []
    for i, (n, key) in enumerate(ngram_keys(tokens, cfg["copy_orders"])):
        key, order = torch.where(place >= n - 1, key, ~place).sort(dim=1, stable=True)
        again = F.pad(key[:, 1:] == key[:, :-1], (1, 0))
        last, before = (tokens.roll(-1, 1).gather(1, order.roll(times, 1)) for times in (1, 2))
        sure = 16 * i + torch.where(again & again.roll(1, 1), 1 + (last == before), 0)
        sources[-1].append([torch.empty_like(x).scatter_(1, order, x) for x in (again, last, sure)])
    added = 0
    for i, found in enumerate(sources):
        a, c = (torch.full_like(tokens, len(w[name]) - 1) for name in ("candidate_embed", "class_embed"))
        for there, token, sure in found:  # the longest n-gram comes last
            a = torch.where(there, i * cfg["vocab_size"] + token, a)
            c = torch.where(there, i * classes + sure, c)
        added = added + w["candidate_embed"][a] * w["class_scale"][c][..., None] + w["class_embed"][c]
    return added

# ---------- the model
def norm(x):
    return F.rms_norm(x, (x.size(-1),), eps=2**-23)

def rotate(a, b, cos, sin):
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)

@torch.no_grad()
def log_probs(cfg, w, tables, tokens):
    N, T, D = cfg["num_layers"], tokens.size(1), cfg["model_dim"] // cfg["num_heads"]
    windows = cfg["eval_window"] or cfg["window_schedule"][-1], cfg["window_schedule"][-1]
    half = min(n or cfg["train_seq_len"] for n in windows) // 2 // cfg["window_block"]
    window, place = {"L": windows[0] or T, "S": max(1, half) * cfg["window_block"]}, torch.arange(T)
    angles = place[:, None] * cfg["rope_base"] ** -(torch.arange(D // 2) / (D // 2))
    cos, sin, back = angles.cos(), angles.sin(), place[:, None] - place  # query - key
    x = F.embedding(tokens, w["embed"])
    if cfg["bigram_rows"]:
        rows = cfg["bigram_rows"] - 1
        seen = F.pad(tokens[:, 1:], (1, 0), value=rows).int()
        pairs = (36313 * seen[:, 1:] ^ 27191 * seen[:, :-1]) % rows
        x = x + F.embedding(F.pad(pairs, (1, 0), value=rows), w["bigram_embed"])
    x = x + candidates(cfg, w, tables, tokens)
    x0, outputs = (x := norm(x)), []
    skips = [(N // 2 - 1 - i, N // 2 + i) for i in range(N // 2)] if cfg["unet_skips"] else []
    for i in range(N):
        b = {name.split(".", 2)[2]: t for name, t in w.items() if name.startswith(f"blocks.{i}.")}
        kind, table = (cfg[name][i % len(cfg[name])] for name in ("window_pattern", "value_embed_layers"))
        x = x + sum(w["skip_weights"][row] * outputs[a] for row, (a, to) in enumerate(skips) if to == i)
        x = b["resid_lambda"] * x + b["x0_lambda"] * x0 if cfg["residual_mix"] else x
        scales, h = b.get("layer_scale", (1, 1)), norm(x)
        if kind != "-":  # which has no attention
            v = h @ b["value"].T + (F.embedding(tokens, w[f"value_embeds.{table - 1}"]) if table else 0)
            q, k = h @ b["query"].T, h @ b["key"].T
            q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in (q, k, v))
            q, k = (rotate(*norm(y).chunk(2, -1), cos, sin) for y in (q, k))
            if cfg["key_offset"] and kind == "L":  # half of each key head comes from the token before
                now, ahead = k.unflatten(-1, (2, -1)).tensor_split(2, -1)
                ahead = torch.cat((ahead[:, :, :1], ahead[:, :, :-1]), 2)
                k = torch.cat((now, ahead), -1).flatten(-2)
            q, seen = q * b.get("qk_gain", torch.ones(q.size(1)))[:, None, None], back <= window[kind]
            y = F.scaled_dot_product_attention(q, k, v, (back >= 0) & seen, enable_gqa=True)
            x = x + scales[0] * (y.transpose(1, 2).flatten(2) @ b["attn_proj"].T)
        outputs.append(x := x + scales[1] * (F.relu(norm(x) @ b["fc"].T).square() @ b["mlp_proj"].T))
    logits, cap = norm(x) @ w["embed" if cfg["tie_embeddings"] else "head"].T, cfg["logit_softcap"]
    return F.log_softmax(cap * torch.tanh(logits / cap) if cap else logits, -1)
