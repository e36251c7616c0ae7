"""Models of the preset tiny with nothing but torch, as `./run.sh record export RUN` wrote them:
model = load("../logs/RUN/export"), in docs/; model(tokens int64 (B, T)) -> log-probabilities of the next"""
import json
from pathlib import Path
import torch
import torch.nn.functional as F
from load_candidates import count, ngram_embedding  # beside this file

def read_safetensors(path):
    """{name: tensor}: 8 bytes with the size of a JSON header, the header, the numbers."""
    raw, kinds = bytearray(path.read_bytes()), {"F32": torch.float32, "I16": torch.int16}
    start = 8 + int.from_bytes(raw[:8], "little")
    numbers, header = torch.frombuffer(raw, dtype=torch.uint8, offset=start), json.loads(raw[8:start])
    def tensor(dtype, shape, data_offsets):
        return numbers[slice(*data_offsets)].clone().view(kinds[dtype]).view(shape)
    return {name: tensor(**about) for name, about in header.items() if name != "__metadata__"}

def load(folder):
    cfg = json.loads(Path(folder, "config.json").read_text())
    w = read_safetensors(Path(folder, "model.safetensors"))
    assert not cfg["unlike_tiny"], f"this loader lacks {cfg['unlike_tiny']}"
    tables = count(cfg, w)
    return lambda tokens: log_probs(cfg, w, tables, tokens)

def norm(x):
    return F.rms_norm(x, (x.size(-1),), eps=2**-23)

def rotate(x, angles):
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() + b * angles.sin(), b * angles.cos() - a * angles.sin()), -1)

def attention(b, x, value_embed, angles, mask):
    q, k, v = x @ b["query"].T, x @ b["key"].T, x @ b["value"].T + value_embed
    q, k, v = (y.unflatten(-1, (-1, 2 * angles.size(1))).transpose(1, 2) for y in (q, k, v))
    q, k = (rotate(norm(y), angles) for y in (q, k))
    now, ahead = k.unflatten(-1, (2, -1)).tensor_split(2, -1)  # half of each key: of the token before
    k = torch.cat((now, torch.cat((ahead[:, :, :1], ahead[:, :, :-1]), 2)), -1).flatten(-2)
    y = F.scaled_dot_product_attention(q * b["qk_gain"][:, None, None], k, v, mask, enable_gqa=True)
    return y.transpose(1, 2).flatten(2) @ b["attn_proj"].T

def log_probs(cfg, w, tables, tokens):
    N, half = cfg["num_layers"], cfg["model_dim"] // cfg["num_heads"] // 2
    place = torch.arange(tokens.size(1))
    angles = place[:, None] * cfg["rope_base"] ** -(torch.arange(half) / half)
    back = place[:, None] - place  # from a key to its query
    mask = (back >= 0) & (back <= (cfg["scoring_window"] or len(place)))
    x = x0 = norm(w["embed"][tokens] + ngram_embedding(cfg, w, tables, tokens))
    outputs = []
    for i in range(N):
        b = {name.split(".", 2)[2]: t for name, t in w.items() if name.startswith(f"blocks.{i}.")}
        row = i - N // 2
        if row in range(N // 2):  # a skip connection from a layer of the first half, innermost first
            x = x + w["skip_weights"][row] * outputs[N // 2 - 1 - row]
        x = b["resid_lambda"] * x + b["x0_lambda"] * x0
        if "query" in b:
            x = x + b["layer_scale"][0] * attention(b, norm(x), w["value_embeds.0"][tokens], angles, mask)
        x = x + b["layer_scale"][1] * (F.relu(norm(x) @ b["fc"].T).square() @ b["mlp_proj"].T)
        outputs.append(x)
    logits, cap = norm(x) @ w["head"].T, cfg["logit_softcap"]
    return F.log_softmax(cap * torch.tanh(logits / cap), -1)
