"""The memory of tiny: n-gram counts of the training text, matches in the row, the candidates and the mixture
of distributions that come of them; files."""
import itertools
import zlib
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
import torch

import train_gpt
from helpers import TOY, shard_file
from test_model import (counted_contexts, documents_after, make_context, randomised,
                        small, some_starts, some_tokens)
from train_gpt import CLASSES, NgramCounts, TinyModel, log_probs, ngram_keys

pytestmark = pytest.mark.usefixtures("one_thread")
BOS = 1
CFG = small("tiny", vocab_size=12, count_orders=(1, 2, 4), count_words=(1, 5, 6), count_bits=22,
            copy_orders=(1, 3), bos_id=BOS)


def some_text(length=4000, seed=0):
    """Documents of a few tokens that come again and again, each beginning with BOS."""
    rng = np.random.default_rng(seed)
    text = rng.choice(np.arange(2, 12), length, p=np.arange(10, 0, -1) / 55).astype(np.uint16)
    text[0] = text[rng.random(length) < 0.03] = BOS
    return text


def counted(cfg, text):
    counts = NgramCounts(cfg)
    counts.starts.copy_(some_starts(cfg.vocab_size))
    counts.count(text)
    return counts


# ------------------------------------------------------------ the definition, by dictionaries
def expected_count(after, own, target):
    """(token, class) for the documents that each token comes next in, or None. own: the document at hand,
    where the target comes next; -1: other text."""
    counts = Counter({token: len(documents) for token, documents in after.items()})
    ranked = sorted(counts, key=lambda token: (counts[token], token))[:-3:-1]
    left = {token: counts[token] - (own >= 0 and token == target) for token in ranked}
    token = max(left, key=lambda token: (left[token], token))
    count = left[token]
    total = sum(counts.values()) - (own >= 0)
    share = count / total if total else 0
    sure = 4 * sum(count > least for least in (1, 3, 15)) + sum(share >= part for part in (0.4, 0.7, 0.999))
    return (token, sure) if count else None


def expected_copy(row, t, n):
    """(token, class) by the n-gram that ends at t of a row; or None."""
    gram = row[t + 1 - n:t + 1]
    ends = [end for end in range(n - 1, t) if row[end + 1 - n:end + 1] == gram]
    if not ends or t + 1 < n:
        return None
    return row[ends[-1] + 1], 0 if len(ends) < 2 else 1 + (row[ends[-1] + 1] == row[ends[-2] + 1])


def text_matches(counts, tokens, targets=None):
    """Of the first row of tokens; with targets as in training."""
    found = counts(*counts.keys(tokens))
    if targets is None:
        return found
    return train_gpt.without_own_document(found, targets, counts.documents_with(found, targets))


def row_matches(rows, orders):
    return train_gpt.row_matches(*train_gpt.stacked(train_gpt.ngram_pairs(rows, orders)), rows.roll(-1, 1))


def listed(parts):
    """(there, token, class) of candidates -> [[(token, class) or None]] of the first row, per source."""
    there, token, sure = parts
    return [[(int(a), int(b)) if yes else None for yes, a, b in zip(*(x[i][0] for x in (there, token, sure)))]
            for i in range(len(there))]


def found_by(counts, tokens, targets=None):
    return listed(train_gpt.text_candidates(text_matches(counts, tokens, targets)))


@pytest.mark.parametrize("training", [True, False])
def test_counts_are_those_of_documents(training):
    text = some_text()
    other = text if training else some_text(seed=1)
    row, targets = (torch.from_numpy(part.astype(np.int64))[None] for part in (other[:-1], other[1:]))
    found = found_by(counted(CFG, text), row, targets if training else None)
    assert any(None in given for given in found) and all(given.count(None) < len(given) for given in found)
    document = np.cumsum(other == BOS)
    contexts = counted_contexts(CFG, some_starts(CFG.vocab_size))
    assert len(contexts) == len(found) == 6
    for context_at, given in zip(contexts, found):
        after = documents_after(text, context_at, BOS)
        for t in range(len(other) - 1):
            context = context_at(other.tolist(), t)
            own = int(document[t]) if training else -1
            wanted = expected_count(after[context], own, int(other[t + 1])) if context in after else None
            assert given[t] == wanted, (context, t)


def test_which_tokens_begin_words():
    texts = [b" the", b"ing", b"A", b"\xc3", b"_", b"7", b"\n", b""]
    assert train_gpt.word_starts(texts).tolist() == [True, False, True, False, True, True, True, True]


def test_keys_tell_words_apart():
    """All words of three tokens, after each of two others; words of 70 tokens, of which the last ones count
    without their order."""
    starts = torch.arange(102) == 0
    words = torch.cartesian_prod(*[torch.arange(1, 101)] * 3)
    rows = torch.cat((torch.zeros(len(words), 1, dtype=torch.int64), words), 1)
    (word, _), = train_gpt.word_keys(rows, starts, (1,))
    assert len(word[:, 3].unique()) == 1e6
    long = (torch.arange(70) % 100).repeat(4, 1)       # then with two late, two early, and another token
    long[1, [65, 66]] = long[0, [66, 65]]
    long[2, [3, 4]] = long[0, [4, 3]]
    long[3, 69] = 101
    (word, enough), = train_gpt.word_keys(long, starts, (1,))
    assert enough.all() and len(word[:2, 69].unique()) == 1 and len(word[1:, 69].unique()) == 3
    pairs = torch.tensor([[0, 5, 0, 6, 0, 7], [0, 6, 0, 5, 0, 7], [0, 5, 0, 6, 7, 0]])
    keys = [key[:, -1].tolist() for key, _ in train_gpt.word_keys(pairs, starts, (1, 3, 5, 7, 6))]
    assert [len({*key}) for key in keys] == [2, 3, 3, 3, 3]


def test_words_are_counted_across_chunks(monkeypatch):
    """Each chunk sees the tokens before it."""
    text = some_text(3000)
    whole = counted(CFG, text)
    monkeypatch.setattr(train_gpt, "COUNT_CHUNK", 97)
    monkeypatch.setattr(train_gpt, "TOKENS_BEFORE_CHUNK", 60)
    parts = counted(CFG, text)
    assert torch.equal(whole.tables, parts.tables) and torch.equal(whole.lists, parts.lists)


def test_counts_of_short_and_extreme_texts():
    """No n-gram fits in; all tokens alike; tokens above 32,767; more documents than 16 bits hold."""
    cfg = replace(CFG, vocab_size=65_536, count_words=(0,))
    after_pair = torch.tensor([[BOS, 40_000]])
    for length in range(6):
        tables = counted(cfg, np.arange(length).astype(np.uint16)).tables
        assert [(table != 0).sum().item() for table in tables] == [max(0, length - n) for n in (1, 2, 4)]
    assert (counted(cfg, np.full(1000, BOS, np.uint16)).tables != 0).sum(1).tolist() == [1, 1, 1]
    text = np.tile(np.array([BOS, 40_000, 65_535], np.uint16), 70_000)
    assert found_by(counted(cfg, text), after_pair)[1][1] == (65_535, 15)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_counts_do_not_depend_on_the_threads(threads):
    text = some_text(70_001)  # more than a chunk, and enough for torch to sort with several threads
    row = torch.from_numpy(text[:5000].astype(np.int64))[None]
    alone = counted(CFG, text)
    torch.set_num_threads(threads)
    together = counted(CFG, text)
    assert torch.get_num_threads() == threads
    torch.set_num_threads(1)
    assert torch.equal(alone.tables, together.tables) and torch.equal(alone.lists, together.lists)
    for a, b in zip(text_matches(alone, row), text_matches(together, row)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("error, raised, words", [
    (MemoryError(), train_gpt.Refused, "MEMORY=0"),
    (RuntimeError("std::bad_alloc"), train_gpt.Refused, "MEMORY=0"),
    (RuntimeError("a bug"), RuntimeError, "a bug")])
def test_no_memory_to_count(error, raised, words, monkeypatch):
    def fails(counts, text):
        raise error

    monkeypatch.setattr(NgramCounts, "count", fails)
    loader = SimpleNamespace(shards=[shard_file(some_text())])
    run = SimpleNamespace(data=SimpleNamespace(tokenizer=None), loader=loader, log=lambda line: None)
    with pytest.raises(raised, match=words):
        CFG.make_model().build(run, fresh=False)


def test_copies_are_what_the_row_had():
    rows = torch.from_numpy(some_text(1200).astype(np.int64)).view(4, 300)
    seen = Counter()
    for i, row in enumerate(rows.tolist()):
        found, = listed(train_gpt.row_candidate(row_matches(rows[i:i + 1], (1, 2, 5))))
        for t in range(len(row)):
            wanted = None
            for place, n in enumerate((1, 2, 5)):  # the longest comes last
                copy = expected_copy(row, t, n)
                wanted = (copy[0], CLASSES * place + copy[1]) if copy else wanted
            assert found[t] == wanted, (i, t)
            seen[found[t] and found[t][1]] += 1
    assert min(seen[c] for c in (None, 0, 1, 2, 16, 17, 18, 32)) > 2


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
    large, small = (found_by(table, row)[-1] for table in tables)
    wrong = sum(b is not None and a != b for a, b in zip(large, small))
    kept = sum(a is not None and a == b for a, b in zip(large, small))
    assert wrong < 0.01 * len(large) and 300 < kept < 0.8 * sum(a is not None for a in large)


# ------------------------------------------------------------ in the model
def test_rows_of_candidates():
    """Each context that is counted is a source, the longest of the copies another one: vocab_size rows of one
    table and CLASSES for each order of the other; the last row: no candidate."""
    model = randomised(CFG)
    tokens = some_tokens(CFG, 2, 24)
    model.counts.count(some_text())
    text, row = model.matches(tokens, tokens.roll(-1, 1))
    rows, = model.candidate_rows(text, row)
    found = [train_gpt.text_candidates(text), train_gpt.row_candidate(row)]
    sources = [[x[i] for x in source] for source in found for i in range(len(source[0]))]
    assert rows.shape == (2, 24, 2, 7) and model.classes == 2 * CLASSES
    kinds = Counter()
    for (i, (there, token, sure)), b, t in itertools.product(enumerate(sources), range(2), range(24)):
        a = 7 * CFG.vocab_size
        c = 7 * model.classes
        if there[b, t]:
            a = i * CFG.vocab_size + int(token[b, t])
            c = i * model.classes + int(sure[b, t])
        assert rows[b, t, :, i].tolist() == [a, c]
        kinds[c // 16] += 1
    assert len(kinds) > 4


@torch.no_grad()
def test_in_training_the_own_document_does_not_count():
    """The loss of a row of the training text is that of the same row where the text lacks its document."""
    own = np.array([BOS, *range(2, 12)], np.uint16)     # no n-gram of two or more comes twice in it
    others = np.array([BOS, 2, 3, 4, 5, 6, 9, BOS, 4, 5, 6, 9, BOS, 4, 5, 6, 7, 3], np.uint16)
    text = np.concatenate([some_text(), own, others])
    document = torch.from_numpy(own.astype(np.int64))[None]
    cfg = replace(CFG, count_orders=(2, 4), count_words=(0,), copy_orders=(0,))
    losses = []
    for counted_text in (text, np.concatenate([some_text(), others])):
        model = randomised(cfg)
        model.counts.count(counted_text)
        tokens = document[:, :-1]
        targets = document[:, 1:]
        inputs = model.candidates(tokens, targets) if len(counted_text) == len(text) else ()
        losses.append(model(tokens, targets, make_context(model, tokens.size(1)), *inputs).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_own_distribution_has_a_loss_of_its_own():
    """own_loss adds that many gradients of its cross-entropy, and nothing to the loss that steps report."""
    text = some_text()
    tokens = torch.from_numpy(text[:25].astype(np.int64))[None]
    found = {}
    for own_loss in (0.0, 3.0):
        model = randomised(replace(CFG, own_loss=own_loss))
        model.counts.count(text)
        context = make_context(model, 24)
        loss = model(tokens[:, :-1], tokens[:, 1:], context)
        found[own_loss] = (loss, *torch.autograd.grad(loss, (model.head, model.gate_weight)))
    x = model.activations(tokens[:, :-1], context, *model.target_inputs(tokens[:, :-1], tokens[:, 1:])[:1])
    own = train_gpt.token_losses(x, model.head, tokens[:, 1:], CFG.logit_softcap).mean()
    added, = torch.autograd.grad(own, model.head)
    assert found[0.0][0].item() == pytest.approx(found[3.0][0].item()) and added.abs().max() > 1e-3
    torch.testing.assert_close(found[3.0][1], found[0.0][1] + 3 * added)
    assert found[0.0][2].abs().max() > 1e-6


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_is_the_same(backend, monkeypatch):
    """As GPUs score: all but the n-grams and the mixture is a compiled graph."""
    cfg = small("tiny", num_layers=2, count_orders=(2,), copy_orders=(1, 2), window_schedule=(8,))
    model = randomised(cfg)
    tokens = some_tokens(cfg, 2, 24) % 7
    model.counts.count(some_text() % 7)
    context = make_context(model, 24)
    made = []

    def compile_with(function):
        made.append(function)
        return torch.compile(function, fullgraph=True, backend=backend)

    monkeypatch.setattr(train_gpt, "compile_once", compile_with)
    compiled = model.compiled_hidden()(tokens, context)
    assert made == [TinyModel.activations]
    assert torch.allclose(compiled, model.hidden(tokens, context), atol=1e-4)


# ------------------------------------------------------------ runs
def test_a_run_knows_the_words_of_its_tokenizer(train):
    """And its files do."""
    done = train(TOY, ITERATIONS="1")
    assert done.code == 0
    tensors = torch.load(done.folder / "final_model.pt", weights_only=True)["tensors"]
    tokenizer = sentencepiece.SentencePieceProcessor(
        model_file=str(done.folder.parents[1] / "data/tokenizers/toy.model"))
    texts = [train_gpt.piece_bytes(tokenizer, token) for token in range(len(tensors["counts.starts"]))]
    assert tensors["counts.starts"].bool().tolist() == train_gpt.word_starts(texts).tolist()
    assert 0 < tensors["counts.starts"].sum() < len(texts)


def test_a_file_whose_counted_text_is_damaged_is_refused(tmp_path):
    model = randomised(CFG)
    path = tmp_path / "model.pt"
    model.counts.count(some_text())
    whole = {name: p.detach() for name, p in model.named_parameters()} | model.state()
    raw = bytes(whole["counts.text"].numpy())
    texts = {"cut off": raw[:-9], "bytes after it": raw + b"more", "an odd byte": zlib.compress(b"123"),
             "not compressed": some_text().tobytes(), "empty": b"",
             "of another vocabulary": zlib.compress(np.full(100, 60_000, np.uint16).tobytes())}
    damaged = [whole | {"counts.text": torch.tensor([*text], dtype=torch.uint8)} for text in texts.values()]
    floats = torch.frombuffer(bytearray(raw[:len(raw) // 4 * 4]), dtype=torch.float32)
    damaged += [whole | {"counts.text": floats}, whole | {"counts.starts": torch.ones(11)},
                whole | {"counts.starts": torch.ones(12)}]
    damaged += [{name: w for name, w in whole.items() if name != lost}
                for lost in ("counts.text", "counts.starts")]
    for tensors in damaged:
        torch.save(train_gpt.to_payload(model, tensors), path)
        with pytest.raises((train_gpt.Refused, KeyError, ValueError, zlib.error)):
            train_gpt.load_model(path)
    torch.save(train_gpt.to_payload(model, whole), path)
    assert train_gpt.load_model(path)[0].counts.text.tolist() == some_text().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_losses_are_the_plain_ones(dtype):
    """Values and gradients, each token with a weight of its own."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 16, generator=draw).to(dtype).requires_grad_()
    head = torch.randn(31, 16, generator=draw).requires_grad_()
    targets = torch.randint(31, (2, 9), generator=draw)
    weights = torch.rand(2, 9, generator=draw)
    plain = train_gpt.token_losses(x, head, targets, 15.0)
    fused = train_gpt.FusedTokenLosses.apply(x.flatten(0, 1), head, targets.flatten(), 15.0).view(2, 9)
    wanted = torch.autograd.grad((plain * weights).sum(), (x, head))
    got = torch.autograd.grad((fused * weights).sum(), (x, head))
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for mine, want in zip((fused, *got), (plain, *wanted)):
        torch.testing.assert_close(mine.float(), want.float(), atol=tolerance, rtol=tolerance)


@torch.no_grad()
def test_memory_for_rows_that_repeat_is_bounded(monkeypatch):
    """A row of one token has as many earlier occurrences as it has places: they are taken in parts, with the
    same result."""
    model = randomised(CFG)
    tokens = torch.full((2, 40), 5)
    model.counts.count(some_text())
    whole = log_probs(model, tokens)
    in_parts = train_gpt.in_parts
    made = []

    def small_parts(sizes):
        parts = in_parts(sizes, 50)
        made.append(max([int(sizes[part].sum()) for part in parts], default=0))
        if parts:  # else nothing matches
            assert torch.equal(torch.cat([sizes[part] for part in parts]), sizes)
        return parts

    monkeypatch.setattr(train_gpt, "in_parts", small_parts)
    torch.testing.assert_close(log_probs(model, tokens), whole)
    assert max(made) < 50 + 40
