"""Candidates for the next token: n-gram counts of the training text, copies from the row; files, clock."""
import itertools
import re
import zlib
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch

import train_gpt
from helpers import TOY
from test_model import make_context, make_model, randomised, small, some_tokens
from train_gpt import CLASSES, NgramCounts, Optimizer, TinyModel, copies, log_probs, ngram_keys

pytestmark = pytest.mark.usefixtures("one_thread")
BOS = 1
CFG = small("tiny", vocab_size=12, count_orders=(1, 2, 4), count_bits=20, copy_orders=(1, 3), bos_id=BOS)
COUNTED = dict(COUNT_ORDERS="2,3", COUNT_BITS="18", COPY_ORDERS="1,2")


def some_text(length=4000, seed=0):
    """Documents of a few tokens that come again and again, each beginning with BOS."""
    rng = np.random.default_rng(seed)
    text = rng.choice(np.arange(2, 12), length, p=np.arange(10, 0, -1) / 55).astype(np.uint16)
    text[0] = text[rng.random(length) < 0.03] = BOS
    return text


def lengths(rows, documents=False):
    """Tokens of its document up to each of rows (B, T); of the row without documents."""
    place = torch.arange(rows.size(1))
    begins = [[max([0, *(t for t in range(end + 1) if documents and row[t] == BOS)])
               for end in place.tolist()] for row in rows.tolist()]
    return place + 1 - torch.tensor(begins)


def counted(cfg, text):
    counts = NgramCounts(cfg)
    counts.count(text)
    return counts


# ------------------------------------------------------------ the definition, by dictionaries
def documents_after(text, n):
    """{n-gram: {token: documents in which it comes next}}"""
    found, document = defaultdict(lambda: defaultdict(set)), np.cumsum(text == BOS)
    for end in range(n, len(text)):
        found[tuple(text[end - n:end].tolist())][int(text[end])].add(int(document[end - 1]))
    return found


def expected_count(after, own, target):
    """(token, class) for the documents that each token comes next in, or None. own: the document at hand,
    where the target comes next; -1: other text."""
    counts = Counter({token: len(documents) for token, documents in after.items()})
    ranked = sorted(counts, key=lambda token: (counts[token], token))[:-3:-1]
    left = {token: counts[token] - (own >= 0 and token == target) for token in ranked}
    token = max(left, key=lambda token: (left[token], token))
    count, total = left[token], sum(counts.values()) - (own >= 0)
    share = count / total if total else 0
    sure = 4 * sum(count > least for least in (1, 3, 15)) + sum(share >= part for part in (0.4, 0.7, 0.999))
    return (token, sure) if count else None


def expected_copy(row, begin, t, n):
    """(token, class) by the n-gram that ends at t of a row, since `begin`; or None."""
    gram = row[t + 1 - n:t + 1]
    ends = [end for end in range(begin + n - 1, t) if row[end + 1 - n:end + 1] == gram]
    if not ends or t + 1 - n < begin:
        return None
    return row[ends[-1] + 1], 0 if len(ends) < 2 else 1 + (row[ends[-1] + 1] == row[ends[-2] + 1])


def keys_of(tokens, length, orders):
    return {n: (key, length >= n) for n, key in ngram_keys(tokens, orders)}


def found_by(source, tokens, length, orders, targets=None):
    """What NgramCounts or copies finds for the first row of tokens: [[(token, class) or None]] per source."""
    keys = keys_of(tokens, length, orders)
    found = copies(tokens, keys, length, orders) if source is copies else source(keys, targets)
    there, token, sure = found
    return [[(int(a), int(b)) if yes else None for yes, a, b in zip(*(x[i][0] for x in (there, token, sure)))]
            for i in range(len(there))]


@pytest.mark.parametrize("training", [True, False])
def test_counts_are_those_of_documents(training):
    text = some_text()
    other = text if training else some_text(seed=1)
    row, targets = (torch.from_numpy(part.astype(np.int64))[None] for part in (other[:-1], other[1:]))
    found = found_by(counted(CFG, text), row, lengths(row), CFG.count_orders, targets if training else None)
    assert any(None in order for order in found) and all(order.count(None) < len(order) for order in found)
    document = np.cumsum(other == BOS)
    for n, order in zip(CFG.count_orders, found):
        after = documents_after(text, n)
        for t in range(n - 1, len(other) - 1):
            gram, own = tuple(other[t + 1 - n:t + 1].tolist()), int(document[t]) if training else -1
            wanted = expected_count(after[gram], own, int(other[t + 1])) if gram in after else None
            assert order[t] == wanted, (n, t)
        assert order[:n - 1] == [None] * (n - 1)


def test_a_document_of_its_own_says_nothing():
    """In training; what only the document at hand has is no candidate there, and is one elsewhere."""
    text = np.array([1, 5, 6, 7, 5, 5, 4, 1, 8, 9, 8], np.uint16)
    counts = counted(replace(CFG, count_orders=(2,)), text)
    row = torch.from_numpy(text.astype(np.int64))[None]
    assert {*found_by(counts, row[:, :-1], lengths(row)[:, :-1], (2,), row[:, 1:])[0]} == {None}
    assert found_by(counts, row[:, 1:3], torch.tensor([[1, 2]]), (2,))[0][1] == (7, 3)


def test_counts_of_short_and_extreme_texts():
    """No n-gram fits in; all tokens alike; tokens above 32,767; more documents than 16 bits hold."""
    cfg = replace(CFG, vocab_size=65_536, count_orders=(1, 2, 4))
    after_pair = torch.tensor([[BOS, 40_000]]), torch.tensor([[1, 2]])
    for length in range(6):
        tables = counted(cfg, np.arange(length).astype(np.uint16)).tables
        assert [(table != 0).sum().item() for table in tables] == [max(0, length - n) for n in (1, 2, 4)]
    assert (counted(cfg, np.full(1000, BOS, np.uint16)).tables != 0).sum(1).tolist() == [1, 1, 1]
    text = np.tile(np.array([BOS, 40_000, 65_535], np.uint16), 70_000)
    assert found_by(counted(cfg, text), *after_pair, (1, 2, 4))[1][1] == (65_535, 15)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_counts_do_not_depend_on_the_threads(threads):
    text = some_text(20_011)
    alone = counted(CFG, text).tables
    torch.set_num_threads(threads)
    together = counted(CFG, text).tables
    torch.set_num_threads(1)
    assert torch.equal(alone, together)


def test_a_second_text_replaces_the_first():
    counts, (one, two) = NgramCounts(CFG), (some_text(seed=seed) for seed in (3, 4))
    counts.count(one)
    before = counts.stored()["counts.text"].clone()
    counts.count(two)
    assert torch.equal(counts.tables, counted(CFG, two).tables)
    assert zlib.decompress(before.numpy()) == one.tobytes()
    assert zlib.decompress(counts.stored()["counts.text"].numpy()) == two.tobytes()


@pytest.mark.parametrize("documents", [True, False])
def test_copies_are_what_the_row_had(documents):
    rows = torch.from_numpy(some_text(1200).astype(np.int64)).view(4, 300)
    seen, length = Counter(), lengths(rows, documents)
    for i, row in enumerate(rows.tolist()):
        found, = found_by(copies, rows[i:i + 1], length[i:i + 1], (1, 2, 5))
        begin = 0
        for t, token in enumerate(row):
            begin = t if documents and token == BOS else begin
            wanted = None
            for place, n in enumerate((1, 2, 5)):  # the longest comes last
                copy = expected_copy(row, begin, t, n)
                wanted = (copy[0], CLASSES * place + copy[1]) if copy else wanted
            assert found[t] == wanted, (i, t)
            seen[found[t] and found[t][1]] += 1
    assert documents or min(seen[c] for c in (None, 0, 1, 2, 16, 17, 18, 32)) > 2


def test_the_rows_of_a_batch_do_not_see_one_another():
    rows = torch.from_numpy(some_text(1200).astype(np.int64)).view(4, 300)
    keys = keys_of(rows, lengths(rows), (1, 3))
    together = copies(rows, keys, lengths(rows), (1, 3))
    for i in range(4):
        own = {n: [x[i:i + 1] for x in pair] for n, pair in keys.items()}
        alone = copies(rows[i:i + 1], own, lengths(rows)[i:i + 1], (1, 3))
        assert all(torch.equal(a[:, i:i + 1], b) for a, b in zip(together, alone))


def test_keys_tell_ngrams_apart():
    """All 1,000,000 triples of 100 tokens have keys of their own, spread evenly."""
    triples = torch.cartesian_prod(*[torch.arange(100)] * 3)
    (_, keys), = ngram_keys(triples, (3,))
    assert len(keys[:, 2].unique()) == 1e6
    assert 0.58 < len((keys[:, 2] % 1_000_000).unique()) / 1e6 < 0.68      # 1 - 1/e of as many boxes


def test_a_full_table_says_nothing_wrong():
    """Of n-grams that share an entry one is kept; it says what a large table says, up to the check."""
    text = some_text(20_000)
    row = torch.from_numpy(some_text(3000, seed=2).astype(np.int64))[None]
    tables = (counted(replace(CFG, count_bits=bits), text) for bits in (20, 10))
    large, small = (found_by(table, row, lengths(row), CFG.count_orders)[2] for table in tables)
    wrong = sum(b is not None and a != b for a, b in zip(large, small))
    kept = sum(a is not None and a == b for a, b in zip(large, small))
    assert wrong < 0.01 * len(large) and 300 < kept < 0.8 * sum(a is not None for a in large)


# ------------------------------------------------------------ in the model
def test_rows_and_their_embedding():
    """Each order of counts is a source, the longest of the copies another one: vocab_size rows of one table
    and CLASSES for each order of the other; the last row: no candidate."""
    model, tokens = randomised(CFG), some_tokens(CFG, 2, 24)
    model.counts.count(some_text())
    rows, = model.candidates(tokens)
    keys = keys_of(tokens, lengths(tokens), CFG.count_orders + CFG.copy_orders)
    found = [model.counts(keys),
             copies(tokens, keys, lengths(tokens), CFG.copy_orders)]
    sources = [[x[i] for x in source] for source in found for i in range(len(source[0]))]
    assert rows.shape == (2, 24, 2, 4) and model.classes == 2 * CLASSES
    total, kinds = torch.zeros(2, 24, CFG.model_dim), Counter()
    for (i, (there, token, sure)), b, t in itertools.product(enumerate(sources), range(2), range(24)):
        a, c = 4 * CFG.vocab_size, 4 * model.classes
        if there[b, t]:
            a, c = i * CFG.vocab_size + int(token[b, t]), i * model.classes + int(sure[b, t])
        assert rows[b, t, :, i].tolist() == [a, c]
        total[b, t] += model.candidate_embed[a] * model.class_scale[c] + model.class_embed[c]
        kinds[c // 16] += 1
    assert len(kinds) > 4
    context = make_context(model, 24)
    whole = model.embed[tokens] + model.bigram_embed[train_gpt.bigram_ids(tokens, CFG.bigram_rows)] + total
    got = model.embedded(tokens, [rows], torch.float32)
    assert torch.allclose(got, train_gpt.rms_norm(whole), atol=1e-5)
    assert torch.equal(model.hidden(tokens, context), model.hidden(tokens, context, rows))


def test_no_candidate_depends_on_what_comes():
    model, tokens = randomised(CFG), some_tokens(CFG, 1, 24)
    model.counts.count(some_text())
    whole = log_probs(model, tokens)
    for t in (1, 5, 23):
        assert torch.allclose(log_probs(model, tokens[:, :t]), whole[:, :t], atol=1e-4)


def test_without_orders_nothing_is_there():
    model = make_model(replace(CFG, count_orders=(0,), copy_orders=(0,)))
    assert model.candidates(some_tokens(CFG, 1, 8)) == [] and not model.counts.stored()
    assert not {"candidate_embed", "class_embed", "class_scale"} & {*dict(model.named_parameters())}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_is_the_same(backend):
    """As GPUs score: candidates are found within the compiled graph."""
    cfg = small("tiny", num_layers=2, count_orders=(2,), copy_orders=(1, 2), window_schedule=(8,))
    model, tokens = randomised(cfg), some_tokens(cfg, 2, 24) % 7
    model.counts.count(some_text() % 7)
    context = make_context(model, 24)
    compiled = torch.compile(TinyModel.hidden, fullgraph=True, backend=backend)(model, tokens, context)
    assert torch.allclose(compiled, model.hidden(tokens, context), atol=1e-4)


def test_a_step_trains_on_them():
    model = randomised(CFG)
    model.counts.count(some_text())
    optimizer, before = Optimizer(model, CFG), model.candidate_embed.clone()
    tokens = torch.from_numpy(some_text()[:97].astype(np.int64))
    batch = tokens[:-1].view(4, 24), tokens[1:].view(4, 24)
    rows, = model.candidates(*batch)
    context = make_context(model, 24)
    train_gpt.train_step(model, optimizer, (*batch, rows), 2, context, 1, 0.7, 0.9)
    touched = (model.candidate_embed - before).abs().sum(1) > 1e-6
    assert touched.nonzero()[:, 0].tolist() == rows[:, :, 0].unique().tolist()


# ------------------------------------------------------------ runs
def test_a_run_counts_on_the_clock_and_its_files_know(train, monkeypatch):
    """The artifact, scored again, has the score of the run; damaged text is refused."""
    done, plain = train(TOY, **COUNTED), train(TOY, COUNT_ORDERS="0", COPY_ORDERS="0")
    assert done.code == plain.code == 0
    assert done.result["trained"]["val_loss"] != plain.result["trained"]["val_loss"]
    seconds = float(re.search(r"n-grams of \d+ tokens counted in (\S+) s", done.log)[1])
    assert float(re.search(r"^step:1/.* train_time:(\d+)ms", done.log, re.M)[1]) >= 1e3 * seconds - 50
    path = done.folder / "final_model.int8.ptz"
    again = train(TOY, EVAL_FROM=str(path), **COUNTED)
    assert again.code == 0 and again.result["artifact"] == done.result["artifact"]
    model, cfg = train_gpt.load_model(done.folder / "final_model.pt")
    assert cfg.count_orders == (2, 3) and len(model.counts.text) > 10_000
    model.counts.text = np.full(100, 60_000, np.uint16)
    path.write_bytes(train_gpt.pack_artifact(model))
    with pytest.raises(train_gpt.Refused, match="counted text"):
        train_gpt.load_model(path)


def test_a_file_whose_counted_text_is_damaged_is_refused(tmp_path):
    model, path = randomised(CFG), tmp_path / "model.pt"
    model.counts.count(some_text())
    whole = train_gpt.stored(model)
    raw = bytes(whole["counts.text"].numpy())
    damaged = {"cut off": raw[:-9], "bytes after it": raw + b"more", "an odd byte": zlib.compress(b"123"),
               "not compressed": some_text().tobytes(), "empty": b"", "whole": raw}
    for case, part in damaged.items():
        text = torch.frombuffer(bytearray(part) or bytearray(1), dtype=torch.uint8)[:len(part)]
        torch.save(train_gpt.to_payload(CFG, whole | {"counts.text": text}), path)
        if case == "whole":
            assert train_gpt.load_model(path)[0].counts.text.tolist() == some_text().tolist()
        else:
            with pytest.raises(train_gpt.Refused, match="damaged or no model"):
                train_gpt.load_model(path)
    floats = torch.frombuffer(bytearray(raw[:len(raw) // 4 * 4]), dtype=torch.float32)
    without = {name: w for name, w in whole.items() if name != "counts.text"}
    for tensors in (without, without | {"counts.text": floats}):
        torch.save(train_gpt.to_payload(CFG, tensors), path)
        with pytest.raises(train_gpt.Refused, match="damaged or no model"):
            train_gpt.load_model(path)
