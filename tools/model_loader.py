"""How model.py reads what ./run.sh record export wrote, with torch alone. tools/model_script.py copies these
functions, beside definitions of train_gpt.py, which some of them ask for (ngram_keys)."""
import json
from pathlib import Path

import torch
import torch.nn.functional as F

from train_gpt import CHECK_BITS, DOCUMENT_BITS, KEY_BITS, TOKEN_BITS, low_bits, ngram_keys

DTYPES = {"F32": torch.float32, "I16": torch.int16}


def read_safetensors(path):
    """{name: tensor} of a file: 8 bytes with the length of a JSON header, the header, the numbers."""
    raw = bytearray(Path(path).read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    numbers = torch.frombuffer(raw, dtype=torch.uint8)[start:]
    tensors = {}
    for name, about in header.items():
        if name != "__metadata__":
            low, high = about["data_offsets"]
            tensors[name] = numbers[low:high].clone().view(DTYPES[about["dtype"]]).view(about["shape"])
    return tensors


def fill(model, tensors):
    """The weights of {name: tensor} become the model's."""
    for name, p in model.named_parameters():
        if tensors[name].shape != p.shape:
            raise ValueError(f"{name} is {tuple(tensors[name].shape)}, the model's {tuple(p.shape)}")
        p.data = tensors[name]


def fill_counts(counts, text):
    """Counts the training text, int16 (n,), as NgramCounts.count() does with several threads."""
    cfg = counts.cfg
    counts.shift = KEY_BITS - cfg.count_bits
    counts.room = 3 * len(text) + 8
    counts.tables = torch.zeros(len(counts.tables), 1 << cfg.count_bits, dtype=torch.int32)
    counts.lists = torch.zeros(len(counts.tables), counts.room, dtype=torch.int32)
    tokens = text.long() & low_bits(TOKEN_BITS)
    documents = (tokens == cfg.bos_id).cumsum(0) * 0x9E3779B1 >> 8 & low_bits(DOCUMENT_BITS)
    low = (tokens[1:] << DOCUMENT_BITS) + documents[:-1]
    for table, lists, (n, key) in zip(counts.tables, counts.lists, ngram_keys(tokens, counts.orders)):
        # 1. each n-gram with the token after it and the document, once
        seen = ((key[n - 1:-1] << TOKEN_BITS + DOCUMENT_BITS) + low[n - 1:]).unique()
        # 2. how many documents have an n-gram and a token after it
        pairs, having = (seen >> DOCUMENT_BITS).unique_consecutive(return_counts=True)
        ranked = having << TOKEN_BITS | pairs & low_bits(TOKEN_BITS)
        keys, ngram, sizes = (pairs >> TOKEN_BITS).unique_consecutive(return_inverse=True, return_counts=True)
        # 3. the list of each n-gram: the two tokens that most documents have come first
        nothing = torch.zeros_like(keys)
        best = nothing.scatter_reduce(0, ngram, ranked, "amax")
        second = nothing.scatter_reduce(0, ngram, ranked.where(ranked != best[ngram], 0), "amax")
        group = torch.where(ranked == best[ngram], 0, torch.where(ranked == second[ngram], 1, 2))
        ranked = ranked[(3 * ngram + group).argsort(stable=True)]
        starts = 4 + sizes.cumsum(0) - sizes + 2 * torch.arange(len(keys))
        lists[starts] = (sizes << CHECK_BITS | keys & low_bits(CHECK_BITS)).int()
        lists[starts + 1] = nothing.index_add(0, ngram, having).int()
        lists[torch.arange(len(pairs)) + 6 + 2 * ngram] = ranked.int()
        # 4. of n-grams in the same place the last one stays
        place = (keys & low_bits(KEY_BITS)) >> counts.shift
        last = F.pad(place[1:] != place[:-1], (0, 1), value=True)
        table[place[last]] = starts[last].int()
        counts.most_next = max(counts.most_next, int(sizes.max()))
    counts.lists = counts.lists.flatten()
