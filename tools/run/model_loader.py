"""How model.py reads what ./run.sh record export wrote, with torch alone. model_script.py copies these
functions, beside definitions of train_gpt.py, which some of them ask for (low_bits)."""
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from train_gpt import CHECK_BITS, DOCUMENT_BITS, KEY_BITS, TOKEN_BITS, NgramCounts, low_bits

DTYPES = {"F32": torch.float32, "I16": torch.int16, "U8": torch.uint8}


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
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


def fill(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """The weights of {name: tensor} become the model's."""
    for name, p in model.named_parameters():
        if tensors[name].shape != p.shape:
            raise ValueError(f"{name} is {tuple(tensors[name].shape)}, the model's {tuple(p.shape)}")
        p.data = tensors[name]


def fill_counts(counts: NgramCounts, text: torch.Tensor, starts: torch.Tensor) -> None:
    """Counts the training text, int16 (n,), as NgramCounts.count() does with several threads. starts, uint8
    (V,): whether each token begins a word."""
    cfg = counts.cfg
    counts.shift = KEY_BITS - cfg.count_bits
    counts.starts = starts.bool()
    counts.tables = torch.zeros(len(counts.tables), 1 << cfg.count_bits, dtype=torch.int32)
    made = [torch.zeros(4, dtype=torch.int32)]
    tokens = text.long() & low_bits(TOKEN_BITS)
    documents = (tokens == cfg.bos_id).cumsum(0) * 0x9E3779B1 >> 8 & low_bits(DOCUMENT_BITS)
    for i, packed in enumerate(counts.occurrences(tokens, documents)):
        # 1. each context with the token after it and the document, once
        seen = packed.unique()
        if not len(seen):
            continue
        # 2. how many documents have a context and a token after it
        pairs, having = (seen >> DOCUMENT_BITS).unique_consecutive(return_counts=True)
        ranked = having << TOKEN_BITS | pairs & low_bits(TOKEN_BITS)
        keys = pairs >> TOKEN_BITS
        keys, number, sizes = keys.unique_consecutive(return_inverse=True, return_counts=True)
        # 3. the list of each context: the two tokens that most documents have come first
        nothing = torch.zeros_like(keys)
        best = nothing.scatter_reduce(0, number, ranked, "amax")
        second = nothing.scatter_reduce(0, number, ranked.where(ranked != best[number], 0), "amax")
        group = torch.where(ranked == best[number], 0, torch.where(ranked == second[number], 1, 2))
        ranked = ranked[(3 * number + group).argsort(stable=True)]
        several = (sizes > 1).long()
        lengths = sizes + 1 + several
        begins = lengths.cumsum(0) - lengths
        lists = torch.zeros(int(lengths.sum()), dtype=torch.int32)
        lists[begins] = (sizes << CHECK_BITS | keys & low_bits(CHECK_BITS)).int()
        lists[begins + 1] = nothing.index_add(0, number, having).int()
        before = (1 + several).cumsum(0)[number]  # entries of lists that are no next tokens
        lists[torch.arange(len(pairs)) + before] = ranked.int()
        # 4. of contexts in the same place the last one stays
        place = (keys & low_bits(KEY_BITS)) >> counts.shift
        last = F.pad(place[1:] != place[:-1], (0, 1), value=True)
        counts.tables[i, place[last]] = 4 + begins[last].int()
        counts.bases[i] = sum(map(len, made)) - 4  # a table counts from 4 before its lists
        made.append(lists)
        counts.most_next = max(counts.most_next, int(sizes.max()))
    counts.lists = torch.cat([*made, made[0]])
