"""What n-grams add to the embedding in models of the preset tiny, for load_model.py: a hashed embedding of
each pair of tokens, and candidates for the next token, which the training text or the row itself has had."""
import torch
import torch.nn.functional as F

def ngram_keys(tokens, orders):
    """Yields (n, hashes of 36 bits of the n tokens up to each place) for each n of orders."""
    key = torch.zeros_like(tokens)
    for n in range(1, max(orders) + 1):
        key = (key + tokens.roll(n - 1, -1)) * -0x61C8864680B583EB
        if n in orders:
            yield n, key >> 28 & 0xFFFFFFFFF

def count(cfg, w):
    """Of the training text, int16 (n,), a table per order: where the n-gram's hash says, how many documents
    have the next token that most have, that token, how many have any, the lowest 8 bits of the hash."""
    if not any(cfg["count_orders"]):
        return []
    tokens, tables = w["counts.text"].long() & 0xFFFF, []
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

def ngram_embedding(cfg, w, tables, tokens):
    """What the tokens before add to the embedding of tokens (B, T)."""
    last = cfg["bigram_rows"] - 1  # of the first token of a row
    seen = F.pad(tokens[:, 1:], (1, 0), value=last).int()
    pairs = (36313 * seen[:, 1:] ^ 27191 * seen[:, :-1]) % last
    return w["bigram_embed"][F.pad(pairs, (1, 0), value=last)] + candidates(cfg, w, tables, tokens)

def candidates(cfg, w, tables, tokens):
    """Of each order what the text has most often after the last n tokens, then what the row itself had."""
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
