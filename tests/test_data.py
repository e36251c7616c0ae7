"""Shards, the loader's stream of tokens, and the bytes that val_bpb divides by."""

import json
import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece as spm
import torch

import helpers
import train_gpt
from helpers import fake_team, tokens_of, toy_config, train_tokenizer, write_dataset, write_shard
from train_gpt import Loader, Refused, decoded_bytes, open_data, open_shard, table_bytes

T, WORLDS = 8, (1, 2, 3, 4, 6)


# -------------------------------------------------------------------------------- shards
def test_a_shard_is_a_memory_map_of_its_tokens(tmp_path):
    tokens = np.array([1, 0, 65535, 258, 20240 & 0xffff])
    write_shard(tmp_path / "x.bin", tokens)
    shard = open_shard(tmp_path / "x.bin", 5)
    assert isinstance(shard, np.memmap) and shard.dtype == np.uint16 and shard.tolist() == tokens.tolist()
    with pytest.raises(Refused, match="x.bin has 5 tokens, its manifest says 4"):
        open_shard(tmp_path / "x.bin", 4)


def test_tokens_up_to_the_vocabulary_are_legal():
    train_gpt.check_tokens(np.array([0, 511, 7], "<u2"), 512, "x")
    with pytest.raises(Refused, match="x holds token 512, but vocab_size is 512"):
        train_gpt.check_tokens(np.array([0, 511, 512], "<u2"), 512, "x")


def test_the_toy_dataset(tiny_data):
    data = open_data(toy_config(tiny_data))
    assert data.name == "toy" and data.vocab_size == 512 and data.bos == 1 and data.fingerprint == "toy"
    assert [len(shard) for shard in data.train.values()] == [110_001, 90_001, 99_998]
    assert 15_000 < len(data.val) < 25_000 and data.val[0] == 1
    text = "".join(line + "\n" for line in data.lines)
    assert "train tokens:300000" in text and f"val tokens:{len(data.val)}" in text and "toy" in text
    assert str(tiny_data) not in text


def test_several_val_shards_are_one_split(tmp_path):
    parts = np.split(np.arange(300) % 200, [100, 150])
    for i, part in enumerate(parts):
        write_shard(tmp_path / f"a_val_{i:06d}.bin", part)
    write_shard(tmp_path / "a_train_000001.bin", np.arange(200))
    data = open_data(toy_config(".", data_path=str(tmp_path), vocab_size=200, val_tokens=0))
    assert np.array_equal(data.val, np.concatenate(parts))


def test_order_with_and_without_a_manifest(tmp_path):
    """The manifest's order and choice; without one, every shard by name."""
    folder = tmp_path / "some"
    files = [write_shard(folder / f"a_train_{i:06d}.bin", np.full(100, i)) for i in range(5)]
    val = write_shard(folder / "a_val_000000.bin", np.arange(100)) | {"split": "val"}
    write_shard(folder / "unrelated.bin", np.arange(100))
    cfg = toy_config(".", data_path=f"{folder}/", vocab_size=200, val_tokens=0)
    assert [int(shard[0]) for shard in open_data(cfg).train.values()] == [0, 1, 2, 3, 4]
    assert open_data(cfg).name == "some"
    for order in ([3, 0, 4], [4, 3, 2, 1, 0], [2]):
        some = [files[i] | {"split": "train"} for i in order]
        (folder / "manifest.json").write_text(json.dumps({"files": [*some[:1], val, *some[1:]]}))
        data = open_data(cfg)
        assert [int(shard[0]) for shard in data.train.values()] == order
        stream = Loader(cfg, data, fake_team()).read(0, 100 * len(order))
        assert stream.tolist() == np.repeat(order, 100).tolist()


def test_an_unopened_manifest_key_does_not_matter(tmp_path):
    """Manifests of later issues may say more."""
    folder = tmp_path / "some"
    entries = [write_shard(folder / f"a_{s}_000000.bin", np.arange(100)) | {"split": s, "new": 1}
               for s in ("train", "val", "test")]
    (folder / "manifest.json").write_text(json.dumps({"files": entries, "version": 9, "more": [None]}))
    data = open_data(toy_config(".", data_path=str(folder), vocab_size=200, val_tokens=0))
    assert list(data.train) == ["a_train_000000.bin"] and len(data.val) == 100


# -------------------------------------------------------------------------------- the loader
SIZES = (101, 7, 50, 1, 64)


def stream_data(sizes=SIZES, vocab_size=60_000):
    """Data whose train tokens are 0, 1, 2, ... through all shards: a token is its place in the stream."""
    shards = np.split(np.arange(sum(sizes), dtype="<u2"), np.cumsum(sizes)[:-1])
    return SimpleNamespace(train={f"s{i}": shard for i, shard in enumerate(shards)}, vocab_size=vocab_size)


def loader_of(rank=0, world_size=1, data=None, shuffle=False):
    cfg = SimpleNamespace(train_seq_len=T, shuffle=shuffle)
    return Loader(cfg, data or stream_data(), fake_team(rank, world_size))


def expected(start, count, total=sum(SIZES)):
    return torch.arange(start, start + count) % total


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_stream_is_the_shards_in_order_for_any_world_size(world_size):
    """Across boundaries, shards shorter than a row, and the wrap-around; targets are one token further on."""
    loaders, position = [loader_of(rank, world_size) for rank in range(world_size)], 0
    for batch_tokens in [12 * T] * 9 + [24 * T, 12 * T, 36 * T, 24 * T, 12 * T]:
        batches = [loader.next(batch_tokens) for loader in loaders]
        for tokens, targets in batches:
            assert tokens.shape == targets.shape == (batch_tokens // T // world_size, T)
            assert tokens.dtype == targets.dtype == torch.int64
        tokens, targets = (torch.cat(parts).flatten() for parts in zip(*batches))
        assert torch.equal(tokens, expected(position, batch_tokens))
        assert torch.equal(targets, expected(position + 1, batch_tokens))
        position += batch_tokens
        assert all(loader.position == position for loader in loaders)
    assert position > 4 * sum(SIZES)


def test_read_at_every_place():
    loader, total = loader_of(), sum(SIZES)
    for start in [*range(2 * total), 10**12 * total + 5]:
        for count in (1, 2, 60, total, 3 * total + 1):
            assert np.array_equal(loader.read(start, count), (start + np.arange(count)) % total)
    assert loader.read(0, 3).dtype == np.int64


def test_one_short_shard_is_enough():
    loader = loader_of(data=stream_data((T + 1,)))
    for step in range(20):
        tokens, targets = loader.next(3 * T)
        assert torch.equal(tokens.flatten(), expected(3 * T * step, 3 * T, T + 1))
        assert torch.equal(targets.flatten(), expected(3 * T * step + 1, 3 * T, T + 1))


def test_position_is_the_whole_state():
    """A fresh loader put where another one is goes on with the same batches."""
    first = loader_of()
    for _ in range(7):
        first.next(4 * T)
    second = loader_of()
    second.position = first.position
    for batch_tokens in (4 * T, 4 * T, 8 * T, T, 4 * T):
        assert all(torch.equal(a, b) for a, b in zip(first.next(batch_tokens), second.next(batch_tokens)))


def test_reading_ahead_never_returns_what_is_stale():
    """Random batch sizes and jumps of position, with a batch read ahead each time."""
    rng, loader = random.Random(0), loader_of()
    for _ in range(300):
        if rng.random() < 0.3:
            loader.position = rng.choice([0, 5, 101, 158, 223, loader.position + 1, rng.randrange(10_000)])
        position, batch_tokens = loader.position, rng.choice([T, 2 * T, 5 * T, 40 * T])
        tokens, targets = loader.next(batch_tokens)
        assert torch.equal(tokens.flatten(), expected(position, batch_tokens))
        assert torch.equal(targets.flatten(), expected(position + 1, batch_tokens))


def test_batches_do_not_share_memory_with_the_shards():
    data = stream_data()
    loader = loader_of(data=data)
    tokens, _ = loader.next(T)
    tokens.zero_()
    assert loader.read(0, T).tolist() == list(range(T))


def test_the_next_step_is_read_meanwhile():
    """next returns while a thread reads on, and the read-ahead is what the step after takes."""
    loader, reads = loader_of(), []
    read = loader.read

    def noting(start, count):
        reads.append((start, count, threading.current_thread()))
        return read(start, count)
    loader.read = noting
    for _ in range(5):
        loader.next(2 * T)
    deadline = time.monotonic() + 10
    while len(reads) < 12 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert [(start, count) for start, count, _ in reads] == [(T * i, T + 1) for i in range(12)]
    assert all(thread is not threading.main_thread() for *_, thread in reads)


def test_a_bad_shard_is_refused_at_its_first_use_and_not_before():
    data = stream_data((100, 100, 100), vocab_size=200)         # the third shard holds 200 and more
    loader = loader_of(data=data)
    for step in range(6):                                       # 6 * 32 + 1 <= 200
        assert torch.equal(loader.next(4 * T)[0].flatten(), expected(4 * T * step, 4 * T))
    time.sleep(0.05)                                            # the error waits in the read-ahead
    position = loader.position
    for _ in range(3):
        with pytest.raises(Refused, match="shard s2 holds token 299, but vocab_size is 200"):
            loader.next(4 * T)
        assert loader.position == position


def test_a_bad_last_target_counts_as_use():
    loader = loader_of(data=stream_data((4 * T, 100), vocab_size=4 * T))
    with pytest.raises(Refused, match="shard s1"):
        loader.next(4 * T)
    loader = loader_of(data=stream_data((4 * T + 1, 100), vocab_size=4 * T + 1))
    loader.next(4 * T)


def test_a_rank_checks_what_it_reads():
    """The bad shard is met by the rank whose share lies in it."""
    data = stream_data((100, 100), vocab_size=100)
    loader_of(0, 2, data).next(16 * T)                          # tokens 0 to 64
    with pytest.raises(Refused, match="shard s1"):
        loader_of(1, 2, data).next(16 * T)                      # tokens 64 to 128


def test_each_shard_is_checked_once(monkeypatch):
    names, check, loader = [], train_gpt.check_tokens, loader_of()

    def spy(tokens, *args):     # a loader of another test may still be reading ahead
        if any(tokens is shard for shard in loader.shards):
            names.append(args[1])
        check(tokens, *args)
    monkeypatch.setattr(train_gpt, "check_tokens", spy)
    for _ in range(40):
        loader.next(4 * T)
    assert sorted(names) == [f"shard s{i}" for i in range(len(SIZES))]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shuffled_sequences_are_each_read_once_an_epoch(world_size):
    """The same sequences for any world size, each whole one before the first comes again."""
    loaders = [loader_of(rank, world_size, shuffle=True) for rank in range(world_size)]
    count, starts = sum(SIZES) // T, []
    while len(starts) < count + 12:
        batches = [loader.next(6 * T) for loader in loaders]
        tokens, targets = (torch.cat(parts) for parts in zip(*batches))
        assert torch.equal(tokens[:, 1:], targets[:, :-1]) and tokens.shape == (6, T)
        starts += tokens[:, 0].tolist()
    assert all(start % T == 0 for start in starts)
    assert sorted(starts[:count]) == [i * T for i in range(count)]
    assert starts[count:] == starts[:len(starts) - count]
    gaps = [abs(a - b) for a, b in zip(starts, starts[1:])]
    assert min(gaps) > T


# -------------------------------------------------------------------------------- bytes behind tokens
ODD = ["  two  spaces\n\n", "\tif x:\n\t\treturn  1\r\n", "naïve café — 日本語 \U0001F600 e\u0301", " lead",
       "trail ", "", "\u00a0nbsp\u3000wide", "        deep\n            deeper\n" * 3, "x" * 300, " ",
       "ﬁ ﬂ Ⅳ ①", "a", "<s> </s> <unk> <0x41>"]
FOREIGN = dict(byte_fallback=False, normalization_rule_name="nmt_nfkc", add_dummy_prefix=True,
               remove_extra_whitespaces=True, allow_whitespace_only_pieces=False)
FEW = dict(vocab_size=340, character_coverage=0.98)
TOKENIZERS = {     # name: (options, whether decode(encode(text)) is the text)
    "whitespace-only pieces": (dict(), True),
    "dummy prefix": (dict(add_dummy_prefix=True), True),
    "no whitespace-only pieces": (dict(allow_whitespace_only_pieces=False), True),
    "mostly byte fallback": (FEW, True),
    "dummy prefix and byte fallback": (FEW | dict(add_dummy_prefix=True), True),
    "SentencePiece defaults": (FOREIGN, False),
    "unigram defaults": (FOREIGN | dict(model_type="unigram", vocab_size=300), False)}


@pytest.fixture(scope="module", params=TOKENIZERS)
def text_case(request):
    """A tokenizer, whether it is lossless, its model's bytes, and val documents with their tokens."""
    options, lossless = TOKENIZERS[request.param]
    documents = list(helpers.library_documents(60_000))
    few = "byte fallback" in request.param      # trained on capitals, it writes all other letters as bytes
    model = train_tokenizer([text.upper() for text in documents] if few else documents, **options)
    sp = spm.SentencePieceProcessor(model_proto=model)
    texts = documents[:6] + ODD
    return SimpleNamespace(name=request.param, sp=sp, lossless=lossless, model=model, texts=texts,
                           tokens=tokens_of(sp, texts).astype("<u2"))


def reference_bytes(sp, tokens, bos):
    """Slow and plain: every document decoded by itself, its UTF-8 bytes counted."""
    total, document = 0, []
    for token in [*tokens.tolist(), bos]:
        if token == bos:
            total += len(sp.decode(document).encode("utf-8"))
            document = []
        else:
            document.append(token)
    return total


def test_decoded_bytes_are_the_reference(text_case):
    case = text_case
    wanted = reference_bytes(case.sp, case.tokens, 1)
    assert decoded_bytes(case.sp, case.tokens, 1) == wanted
    text_bytes = sum(len(text.encode()) for text in case.texts)
    assert (wanted == text_bytes) == case.lossless, "what the parameter says of the tokenizer is true"


def test_table_bytes_are_the_reference_for_lossless_tokenizers(text_case):
    case = text_case
    wanted = reference_bytes(case.sp, case.tokens, 1)
    if case.lossless:
        assert table_bytes(case.sp, case.tokens, 1) == wanted
        for text in case.texts:         # each document by itself, so that errors cannot cancel
            tokens = tokens_of(case.sp, [text]).astype("<u2")
            size = len(text.encode())
            assert table_bytes(case.sp, tokens, 1) == decoded_bytes(case.sp, tokens, 1) == size, text
    else:
        assert abs(table_bytes(case.sp, case.tokens, 1) / wanted - 1) < 0.05


def test_more_documents_than_a_batch_of_decoding(text_case):
    case = text_case
    tokens = np.tile(tokens_of(case.sp, ["one", "", " two\n"]), 3000).astype("<u2")
    assert decoded_bytes(case.sp, tokens, 1) == reference_bytes(case.sp, tokens, 1)


def dataset(tmp_path, case, manifest=True, **changes):
    """A folder of the case's val tokens and some train tokens."""
    folder = write_dataset(tmp_path, "words", case.model, [case.tokens], case.tokens,
                           sum(len(text.encode()) for text in case.texts), case.lossless)
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    if not manifest:
        path.unlink()
    return toy_config(".", data_path=str(folder), val_tokens=0)


def test_bytes_of_a_dataset_with_a_manifest(text_case, tmp_path):
    """They are the manifest's; the log has the table's figure too, whether it agrees or not."""
    case = text_case
    data = open_data(dataset(tmp_path, case))
    text_bytes = sum(len(text.encode()) for text in case.texts)
    assert data.val_bytes == text_bytes
    line, = [line for line in data.lines if "val_bytes" in line]
    assert f"val_bytes:{text_bytes}" in line and str(table_bytes(case.sp, case.tokens, 1)) in line


def test_bytes_of_foreign_shards(text_case, tmp_path):
    """Without a manifest they come from decoding the val tokens, and both figures are logged."""
    case = text_case
    cfg = dataset(tmp_path, case, manifest=False)
    data = open_data(train_gpt.replace(cfg, tokenizer_path=str(tmp_path / "data/tokenizers/words.model")))
    wanted = reference_bytes(case.sp, case.tokens, 1)
    assert data.val_bytes == wanted and data.vocab_size == case.sp.vocab_size()
    line, = [line for line in data.lines if "val_bytes" in line]
    assert f"val_bytes:{wanted}" in line and "decoded" in line
    assert str(table_bytes(case.sp, case.tokens, 1)) in line


def test_no_tokenizer_no_bytes(text_case, tmp_path):
    cfg = dataset(tmp_path, text_case, manifest=False)
    data = open_data(train_gpt.replace(cfg, vocab_size=text_case.sp.vocab_size()))
    assert data.val_bytes is None and data.tokenizer is None
    assert any("tokenizer" in line and "val_bpb is null" in line for line in data.lines)


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_lossless_manifest_with_wrong_bytes_is_refused(wrong, text_case, tmp_path):
    case = text_case
    bytes_stated = sum(len(text.encode()) for text in case.texts) + wrong
    cfg = dataset(tmp_path, case, val_bytes=bytes_stated)
    if case.lossless:
        with pytest.raises(Refused, match=f"{bytes_stated}.*{bytes_stated - wrong}"):
            open_data(cfg)
    else:
        assert open_data(cfg).val_bytes == bytes_stated


def test_a_manifest_without_val_bytes_counts_them(text_case, tmp_path):
    cfg = dataset(tmp_path, text_case, val_bytes=None)
    assert open_data(cfg).val_bytes == reference_bytes(text_case.sp, text_case.tokens, 1)


def test_table_bytes_of_single_tokens(tiny_data):
    """Control tokens count nothing, byte tokens one byte, pieces their UTF-8 with a space for U+2581."""
    sp = spm.SentencePieceProcessor(model_file=str(tiny_data / "data/tokenizers/toy.model"))
    for i in range(sp.vocab_size()):
        tokens = np.array([1, i], "<u2")
        wanted = 0 if sp.is_control(i) else 1 if sp.is_byte(i) else len(sp.decode([i]).encode())
        assert table_bytes(sp, tokens, 1) == wanted, sp.id_to_piece(i)
