"""Shards, the loader's stream of tokens, and the bytes that val_bpb divides by."""

import json
import os
import queue
import random
import re
import resource
import threading
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece as spm
import torch

import download
import train_gpt
from helpers import (fake_team, library_documents, shard_file, tokens_of, toy_config, train_tokenizer,
                     write_dataset, write_shard)
from train_gpt import RECIPES, Data, Loader, Missing, Refused, decoded_bytes, open_data, open_shard

T = 8


# -------------------------------------------------------------------------------- shards
def test_a_shard_is_a_memory_map_of_its_tokens(tmp_path):
    tokens = [1, 0, 65535, 258, 20240]
    write_shard(tmp_path / "x.bin", tokens)
    shard = open_shard(tmp_path / "x.bin", 5)
    assert isinstance(shard, np.memmap) and shard.dtype == np.uint16 and shard.tolist() == tokens
    with pytest.raises(Refused, match="x.bin"):
        open_shard(tmp_path / "x.bin", 4)        # the manifest says another number


def tokens_of_shards(data):
    """Those of each train shard."""
    return [open_shard(shard.path) for shard in data.train.values()]


def test_the_toy_dataset(tiny_data):
    data = open_data(toy_config(tiny_data), (lines := []).append)
    assert data.about["name"] == data.about["fingerprint"] == "toy"
    assert data.vocab_size == 512 and data.bos == 1
    assert [shard.size for shard in data.train.values()] == [44_001, 36_001, 39_998]
    assert 10_000 < len(data.val) < 15_000 and data.val[0] == 1
    text = "\n".join(lines)
    assert "train tokens:120000" in text and f"val tokens:{len(data.val)}" in text
    assert "toy" in text and str(tiny_data) not in text


def test_order_with_and_without_a_manifest(tmp_path):
    """The manifest's order and choice, whatever else it says; without one, every shard by name."""
    folder = tmp_path / "some"
    val_parts = np.split(np.arange(300) % 200, [100, 150])
    files = [write_shard(folder / f"a_train_{i:06d}.bin", np.full(100, i)) for i in range(5)]
    val = [write_shard(folder / f"a_val_{i:06d}.bin", part) for i, part in enumerate(val_parts)]
    write_shard(folder / "unrelated.bin", np.arange(100))
    cfg = toy_config(".", data_path=f"{folder}/", vocab_size=200, val_tokens=0)
    for order in (None, [3, 0, 4], [4, 3, 2, 1, 0], [2]):
        if order:
            train = [files[i] | {"split": "train", "new": 1} for i in order]
            entries = [*train[:1], *(entry | {"split": "val"} for entry in val), *train[1:]]
            entries.append(files[0] | {"split": "test"})
            (folder / "manifest.json").write_text(json.dumps({"files": entries, "more": [None]}))
        data = open_data(cfg, print)
        order = order or [0, 1, 2, 3, 4]
        assert [int(tokens[0]) for tokens in tokens_of_shards(data)] == order
        assert np.array_equal(data.val, np.concatenate(val_parts)) and data.about["name"] == "some"
        stream = Loader(cfg, data, fake_team()).read(0, 100 * len(order))
        assert stream.tolist() == np.repeat(order, 100).tolist()


def test_shards_that_are_replaced_meanwhile(tmp_path):
    """A run that has begun reads the text that it checked."""
    for name, first in [("a_val_000000.bin", 0), ("a_train_000000.bin", 10), ("a_train_000001.bin", 150)]:
        write_shard(tmp_path / name, np.arange(first, first + 100))
    cfg = toy_config(".", "tiny", data_path=str(tmp_path), vocab_size=256, val_tokens=0, train_seq_len=7,
                     train_batch_tokens=7, shuffle=False, eval_context=0)
    loader = Loader(cfg, open_data(cfg, print), fake_team())
    for path in tmp_path.glob("a_train_*"):
        path.unlink()
    assert loader.read(0, 200).tolist() == [*range(10, 110), *range(150, 250)]


@pytest.fixture
def few_files():
    """Of this process; 40 more than are open now."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 40, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("packing", ["rows", "documents"])
def test_more_shards_than_files_that_may_be_open(tmp_path, few_files, monkeypatch, packing):
    """And a row that spans many of them."""
    monkeypatch.setattr(Loader, "MOST_FILES", 10)
    tokens = np.arange(1200) % 256
    tokens[::8] = 300
    files = [write_shard(tmp_path / f"a_{'val' if i == 0 else 'train'}_{i:06d}.bin", part)
             for i, part in enumerate(np.split(tokens, 150))]
    assert len(files) == 150
    preset = dict(rows="tiny", documents="speedrun")[packing]
    cfg = toy_config(".", preset, data_path=str(tmp_path), vocab_size=301, bos_id=300, val_tokens=0,
                     train_seq_len=7, train_batch_tokens=7, packing=packing, shuffle=False, eval_context=0)
    loader = Loader(cfg, open_data(cfg, print), fake_team())
    loader.check()
    for i in range(0, 140, 3):
        assert loader.read(8 * i, 40).tolist() == tokens[8 * i + 8:8 * i + 48].tolist()
    found, _ = loader.next(7)
    assert found.shape == (1, 7) and loader.file.cache_info().currsize == 10


BESIDE = {      # what desktops and archives leave beside shards, and is it tokens?
    "._a_train_000000.bin": False, "._a_val_000000.bin": False, ".DS_Store": False, "Thumbs.db": False,
    "desktop.ini": False, "a_train_000000.bin:Zone.Identifier": False, "__MACOSX/._a_train_000000.bin": False,
    "a_val_000000 (1).bin": True, "a_train_000000 - Copy.bin": True, "a_train_000000.bin.part": True}


@pytest.mark.parametrize("name", BESIDE)
def test_files_of_desktops_beside_shards(tmp_path, name):
    """Without a manifest the shards are those of its pattern; a copy does not count twice."""
    for shard, size in (("train_000000", 300), ("train_000001", 90), ("val_000000", 70)):
        write_shard(tmp_path / f"a_{shard}.bin", np.arange(size) % 256)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    if BESIDE[name]:
        write_shard(tmp_path / name, np.arange(200))
    else:
        (tmp_path / name).write_bytes(b"\0\5\x16\7" + bytes(100))
    cfg = toy_config(".", data_path=str(tmp_path), vocab_size=256, val_tokens=0, train_seq_len=32,
                     train_batch_tokens=32, eval_context=0)
    data = open_data(cfg, print)
    assert [shard.size for shard in data.train.values()] == [300, 90] and len(data.val) == 70


# -------------------------------------------------------------------------------- the loader
BOS = 60_000
SIZES = (101, 7, 50, 1, 64)
DOCUMENTS = (3, 1, 9, 2, 2, 40, 5, 8, 1, 1, 30, 4, 17, 6, 1, 90, 3)


def stream_data(sizes=SIZES, vocab_size=65_536, starts=()):
    """Data whose train tokens are 0, 1, 2, ... through all shards, but BOS at the starts of documents."""
    tokens = np.arange(sum(sizes))
    tokens[list(starts)] = BOS
    shards = np.split(tokens.astype("<u2"), np.cumsum(sizes)[:-1])
    train = {f"s{i}": shard_file(shard) for i, shard in enumerate(shards)}
    return Data(train, None, None, vocab_size, BOS, None, {"name": "some"})


def documents_data(before=0, lengths=DOCUMENTS, sizes=(60, 1, 70, 30)):
    """Documents of these lengths, and some tokens before the first."""
    starts = before + np.cumsum([0, *lengths[:-1]])
    return stream_data((*sizes, before + sum(lengths) - sum(sizes)), starts=starts)


PACKS = dict(rows="tiny", spans="golf", documents="speedrun", best_fit="gpt2", shards="golf_plus")


def config_of(packing="rows", **settings):
    """A recipe that packs so, with short rows of one length and any number of epochs."""
    small = dict(packing=packing, train_seq_len=T, train_batch_tokens=T, shuffle=False, seq_schedule=(1,),
                 max_epochs=0)
    return RECIPES[PACKS[packing]](**small | settings)


def loader_of(data=None, rank=0, world_size=1, log=print, **settings):
    return Loader(config_of(**settings), data or stream_data(), fake_team(rank, world_size), log)


def cut_rows(data):
    """Slow and plain: the stream cut every T tokens."""
    stream = np.concatenate(tokens_of_shards(data)).tolist()
    return [stream[i:i + T + 1] for i in range(0, len(stream) - T, T)]


def test_rows_of_a_shard_stay_in_it_and_begin_at_any_offset():
    sizes = (T + 1, T + 3, 2 * T + 1, T)       # the last one holds no row
    rows = loader_of(stream_data(sizes), packing="shards").packer.make_rows(T)
    starts = {piece[0] for _ in range(2000) for piece in next(rows)}
    edges = np.cumsum([0, *sizes])
    assert starts == {0, *range(edges[1], edges[1] + 3), *range(edges[2], edges[2] + T + 1)}
    rows = loader_of(stream_data((T + 1, T + 1)), packing="shards").packer.make_rows(T)
    epochs = [{next(rows)[0][0], next(rows)[0][0]} for _ in range(50)]
    assert epochs == [{0, T + 1}] * 50, "a row of each shard in each epoch"


def test_as_many_shards_as_ranks_are_enough():
    loader_of(stream_data((T + 1, T + 1)), world_size=2, packing="shards", train_batch_tokens=2 * T)
    with pytest.raises(Refused, match="packing=shards deals 2 shards to 2 ranks"):
        loader_of(stream_data((T + 1, T)), world_size=2, packing="shards", train_batch_tokens=2 * T)


@pytest.mark.parametrize("shared, documents, refused", [(8, 8, False), (9, 180, True), (9, 181, False)])
def test_val_documents_in_train_are_found_without_hashes(shared, documents, refused):
    """At least nine, and at least a twentieth of those looked at."""
    def texts(numbers):
        rows = [[BOS, *[2 + number % 90, 2 + number // 90] * 32][:train_gpt.BEGINNING] for number in numbers]
        return np.array(rows, np.uint16).reshape(-1)

    train = {"shard": shard_file(texts(range(documents)))}
    val = texts([*range(shared), *range(1000, 1100)])
    if not refused:
        return train_gpt.refuse_val_in_train(train, val, BOS, "x")
    with pytest.raises(Refused, match=f"{shared} of {documents} documents sampled from train shard shard"):
        train_gpt.refuse_val_in_train(train, val, BOS, "x")


def document_steps(data, longest, world_size, n):
    """Slow and plain, endlessly: the n rows of each step. Documents, cut to the longest and at their shard's
    end, follow each other until a row is full; the rest of the last one is dropped, and the next row begins
    with the document after it. world_size rows that a shard cannot fill are dropped with its rest."""
    shards = []
    for tokens in tokens_of_shards(data):
        documents = []
        for token in tokens.tolist():
            if token == BOS:
                documents.append([])
            if documents:
                documents[-1].append(token)
        shards.append([document[:longest or None] for document in documents])
    step = []
    while True:
        for documents in shards:
            unit = []
            row = []
            for document in documents:
                row = row + document
                if len(row) > T:
                    unit = [*unit, row[:T + 1]]
                    row = []
                if len(unit) == world_size:
                    step = step + unit
                    unit = []
                if len(step) == n:
                    yield step
                    step = []


STREAMS = {"shards": stream_data, "one row": lambda: stream_data((T + 1,)),
           "two rows": lambda: stream_data((2 * T + 1,)), "tiny shards": lambda: stream_data((1,) * 30)}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("which", STREAMS)
def test_batches_are_the_same_rows_for_any_world_size(which, shuffle):
    """Every row once an epoch, in one order, across the ends of shards and epochs. position, in rows, is the
    whole state: it may jump, and what was read ahead is then not used."""
    data = STREAMS[which]()
    rows = cut_rows(data)
    settings = dict(shuffle=shuffle)
    single = loader_of(data, **settings)
    rng = random.Random(0)
    ordered = [rows[int(i)] for i in single.packer.order]
    assert single.rows == len(rows) > 0 and sorted(ordered) == sorted(rows)
    assert ordered == rows or shuffle and sum(a != b for a, b in zip(ordered, rows)) > len(rows) / 2 - 1
    for world_size in (1, 2, 6):
        loaders = [loader_of(data, rank, world_size, **settings) for rank in range(world_size)]
        for _ in range(15):
            position = loaders[0].position
            n = world_size * rng.choice([1, 2, 7])
            if rng.random() < 0.3:
                position = rng.choice([0, 1, len(rows) - 1, 10**12 * len(rows), rng.randrange(10_000)])
            for loader in loaders:
                loader.position = position
            batches = [loader.next(n * T) for loader in loaders]
            assert all(part.shape == (n // world_size, T) and part.dtype == torch.int64
                       for batch in batches for part in batch)
            wanted = torch.tensor([ordered[place % len(rows)] for place in range(position, position + n)])
            tokens, targets = map(torch.cat, zip(*batches))
            assert torch.equal(tokens, wanted[:, :-1]) and torch.equal(targets, wanted[:, 1:])
            assert {loader.position for loader in loaders} == {position + n}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("before, longest", [(0, 1), (5, 2), (0, 7), (5, T), (0, T + 1), (5, 12), (0, 1000)])
def test_documents_fill_rows(before, longest, world_size):
    """In order, through shards and epochs; from any position that a step ended at, a new loader goes on."""
    data = documents_data(before, sizes=(90, 70))
    n = 2 * world_size
    settings = dict(packing="documents", max_doc_len=longest, bos_id=BOS)
    steps = document_steps(data, longest, world_size, n)
    try:
        loaders = [loader_of(data, rank, world_size, **settings) for rank in range(world_size)]
        for turn in range(6):
            if turn == 3:
                position = loaders[0].position
                loaders = [loader_of(data, rank, world_size, **settings) for rank in range(world_size)]
                for loader in loaders:
                    loader.position = position
            got = [torch.cat([x, y[:, -1:]], 1) for x, y in (loader.next(n * T) for loader in loaders)]
            assert torch.cat(got).tolist() == next(steps)
    except Refused:     # no shard has documents for so many rows
        counts = [len([*fill_alone(tokens, longest)]) for tokens in tokens_of_shards(data)]
        assert longest < 3 and max(counts) < world_size


def fill_alone(shard, longest):
    """The rows that a shard's documents fill."""
    row = []
    for start in np.flatnonzero(shard == BOS):
        after = np.flatnonzero(shard[start + 1:] == BOS)
        row += [1] * min(longest, int(after[0]) + 1 if len(after) else len(shard) - start)
        if len(row) > T:
            yield row
            row = []


def test_spans_of_a_step_are_the_same_for_any_world_size():
    """An eighth of a step reads one token more than it trains on; the next one begins after it, endlessly."""
    wanted = None
    for world_size in (1, 2, 4, 8):
        loaders = [loader_of(None, rank, world_size, packing="spans") for rank in range(world_size)]
        found = []
        for _ in range(3):
            got = [torch.cat([x, y[:, -1:]], 1) for x, y in (loader.next(16 * T) for loader in loaders)]
            found.append(torch.cat(got).tolist())
            assert {loader.position for loader in loaders} == {len(found) * 8 * (2 * T + 1)}
        wanted = wanted or found
        assert found == wanted
    total = sum(SIZES)
    starts = [row[0] for step in found for row in step]
    assert starts == [(i // 2 * (2 * T + 1) + i % 2 * T) % total for i in range(48)]


def test_best_fit_goes_on_from_a_position():
    """A new loader at the position of another one packs the same rows; each row is full."""
    data = documents_data(sizes=(90, 70))
    settings = dict(packing="best_fit", bos_id=BOS)
    loader = loader_of(data, **settings)
    steps = [loader.next(4 * T) for _ in range(5)]
    other = loader_of(data, **settings)
    other.position = 8
    for step in steps[2:]:
        got = other.next(4 * T)
        assert all(torch.equal(a, b) for a, b in zip(got, step)) and got[0].shape == (4, T)
    assert loader.position == 20


def test_best_fit_refuses_ranks_without_a_group():
    """A rank whose share of every shard is empty would look for a document without end."""
    whole = documents_data(sizes=(90, 70))
    grouped = {name: replace(whole.train[name], groups=sizes)
               for name, sizes in zip(whole.train, ([2, 100], [100]))}
    data = whole._replace(train=grouped)
    for rank in range(2):
        assert loader_of(data, rank, 2, packing="best_fit", bos_id=BOS).next(2 * T)[0].shape == (1, T)
    for rank in range(3):
        with pytest.raises(train_gpt.Refused, match="no shard has more than 2: "):
            loader_of(data, rank, 3, packing="best_fit", bos_id=BOS)


def test_shards_deals_whole_shards_to_ranks():
    """Each rank's rows are of its own shards, cut from one place of each, every row once an epoch, not in
    order; a new loader at the position of another one goes on alike."""
    sizes = (4 * T + 9, 6 * T + 3, 5 * T + 1, 3 * T + 8)
    low = 0
    seen = []
    own = []                # first and last token of each shard
    for size in sizes:
        own = [*own, (low, low + size - 1)]
        low = low + size
    for rank in range(2):
        settings = dict(rank=rank, world_size=2, packing="shards")
        loader = loader_of(stream_data(sizes), **settings)
        steps = [loader.next(4 * T) for _ in range(4)]          # two rows of this rank each
        rows = [row[0].item() for tokens, _ in steps for row in tokens]
        for tokens, targets in steps:
            assert torch.equal(targets, tokens + 1) and tokens.shape == (2, T)
        homes = [next(i for i, (first, last) in enumerate(own) if first <= row <= last) for row in rows]
        assert {*homes} == {rank, rank + 2} and rows != sorted(rows) and len({*rows}) == 8
        for shard in {*homes}:
            phases = {(row - own[shard][0]) % T for row, home in zip(rows, homes) if home == shard}
            assert len(phases) == 1
        other = loader_of(stream_data(sizes), **settings)
        other.position = 8
        assert all(torch.equal(a, b) for a, b in zip(other.next(4 * T), steps[2]))
        seen += rows
    assert len({*seen}) == 16


def test_rows_grow_with_the_stage():
    """seq_multiple makes a row longer; the tokens of a step stay what was asked for."""
    data = documents_data(sizes=(90, 70))
    loader = loader_of(data, packing="documents", max_doc_len=40, bos_id=BOS)
    shapes = [loader.next(4 * T, multiple)[0].shape for multiple in (1, 2, 4)]
    assert shapes == [(4, T), (2, 2 * T), (1, 4 * T)]


def test_shuffled_rows_do_not_follow_each_other():
    loader = loader_of(shuffle=True)
    gaps = [abs(int(a) - int(b)) * T for a, b in zip(loader.packer.order, loader.packer.order[1:])]
    assert sum(gaps) / len(gaps) > loader.rows * T / 5


def test_a_single_row_has_the_strides_of_a_new_tensor():
    """Others than those of the rehearsal would compile the step again, on the clock."""
    assert {x.stride() for n in (1, 3) for x in loader_of(train_batch_tokens=n * T).next(n * T)} == {(T, 1)}


def test_read_at_every_place():
    loader = loader_of()
    total = sum(SIZES)
    for start in range(total):
        for count in (1, 2, 60, total):
            count = min(count, total - start)
            assert np.array_equal(loader.read(start, count), start + np.arange(count))
    assert loader.read(0, 3).dtype == np.int64
    loader.next(T)[0].zero_()                    # batches share no memory with the shards
    assert loader.read(0, T).tolist() == list(range(T))


@pytest.mark.parametrize("rank, world_size", [(0, 1), (1, 2)])
def test_the_next_step_is_read_meanwhile(rank, world_size):
    """next returns while a thread reads on, and the read-ahead is what the step after takes."""
    loader = loader_of(stream_data((400,)), rank, world_size)
    reads = queue.Queue()
    read = loader.read

    def noting(start, count):
        reads.put((start, count, threading.current_thread()))
        return read(start, count)
    loader.read = noting
    for _ in range(5):
        loader.next(2 * world_size * T)
    found = [reads.get(timeout=300) for _ in range(12)]
    rows = [2 * (step * world_size + rank) + i for step in range(6) for i in range(2)]
    assert [(start, count) for start, count, _ in found] == [(T * row, T + 1) for row in rows]
    assert all(thread is not threading.main_thread() for *_, thread in found)


@pytest.mark.parametrize("packing", ["rows", "spans"])
def test_a_bad_shard_is_refused_before_the_clock(packing):
    """... whichever rank or step would read it; the largest token that fits is fine."""
    bad = "shard s2 holds token 299"
    for vocab_size, wanted in ((200, bad), (299, bad), (300, "")):
        loader = loader_of(stream_data((100, 100, 100), vocab_size=vocab_size), 1, 2, packing=packing)
        with pytest.raises(Refused, match=wanted) if wanted else nullcontext():
            loader.check()


def test_every_token_of_every_shard_is_checked(monkeypatch):
    seen = Counter()
    check = train_gpt.check_tokens
    vocab_size = 65_000

    def spy(tokens, *args):
        seen[args[1]] += len(tokens)
        check(tokens, *args)
    loader = loader_of(stream_data(vocab_size=vocab_size))
    monkeypatch.setattr(train_gpt, "check_tokens", spy)
    loader.check()
    assert seen == {f"shard s{i}": size for i, size in enumerate(SIZES)}


@pytest.mark.parametrize("epochs, cap, short", [
    (0, 0, False), (3, 0, False), (2, 0, True), (1, 0, True), (1, 60, False)])
def test_a_schedule_that_runs_out_of_tokens(epochs, cap, short):
    """Said before training; a run that ends by the clock may read fewer."""
    settings = dict(iterations=24, extension_iterations=7, batch_schedule=(2, 2), max_epochs=epochs,
                    max_wallclock_seconds=cap)
    if short:
        with pytest.raises(Missing, match=f"496 train tokens are needed, max_epochs={epochs} of 223 allowed"):
            loader_of(**settings)
    else:
        assert loader_of(**settings).rows == 27


def test_too_few_documents_for_a_row():
    other_bos = documents_data()._replace(bos=59_999)           # which no document begins with
    for data in documents_data(900, (3, 2, 2), (1, 1)), documents_data(0, (5, 1, 1), (3, 3)), other_bos:
        with pytest.raises(Refused, match="do not fill a row|documents fill|begins a document"):
            loader_of(data, packing="documents", max_doc_len=5).next(T)


def test_rows_with_more_documents_than_flash_attention_has_room_for(monkeypatch):
    """Refused before training: their attention would be wrong without a word. The most that a row holds is
    what plan() makes, whatever row it is."""
    settings = dict(packing="documents", max_doc_len=5, bos_id=BOS)
    data = documents_data()
    rows, _ = loader_of(data, **settings).packer.plan(0, 10, T)
    most = max(map(len, rows))
    cfg = config_of(**settings)
    monkeypatch.setattr(train_gpt, "flash_slots", lambda tokens: most if tokens == T else 0)
    train_gpt.check_slots(cfg, loader_of(data, **settings).packer)
    monkeypatch.setattr(train_gpt, "flash_slots", lambda tokens: most - 1)
    train_gpt.check_slots(config_of(), loader_of(data).packer)  # whose attention knows no documents
    words = f"may hold {most} documents, .* room for {most - 1}: take sdpa_backend=auto"
    with pytest.raises(Refused, match=words):
        train_gpt.check_slots(cfg, loader_of(data, **settings).packer)


# -------------------------------------------------------------------------------- foreign shards
@pytest.fixture
def gpt2_like(tmp_path):
    """(config, manifest's files) of shards under their published names, documents of 40 tokens."""
    tokens = np.arange(400) % 300
    tokens[::40] = 50_256
    names = [f"fineweb_{name}.bin" for name in ("val_000000", "train_000001", "train_000002")]
    for name in names:
        write_shard(tmp_path / name, tokens)
    cfg = toy_config(".", data_path=str(tmp_path), vocab_size=50_304, val_tokens=0, train_seq_len=16)
    return cfg, [{"path": name, "split": name.split("_")[1]} for name in names]


def test_what_begins_a_document(gpt2_like, tmp_path):
    """Without a manifest GPT-2's token, else the manifest's; a constant before either."""
    cfg, files = gpt2_like
    cfg = config_of("documents", max_doc_len=30, data_path=cfg.data_path, train_seq_len=16,
                    train_batch_tokens=16, val_tokens=0, eval_context=0)
    about = {"vocab_size": 50_257, "bos_id": 7}
    data = open_data(cfg, print)
    assert (data.vocab_size, data.bos) == (50_304, 50_256) and data.tokenizer is data.val_bytes is None
    assert Loader(cfg, data, fake_team()).packer.index.lengths.tolist() == [30] * 20
    (tmp_path / "manifest.json").write_text(json.dumps({"files": files, "tokenizer": about}))
    data = open_data(cfg, print)
    first = {bos: int(Loader(replace(cfg, bos_id=bos), data, fake_team()).next(16)[0][0, 0])
             for bos in (0, 50_256)}
    assert data.bos == 7 and first == {0: 7, 50_256: 50_256}


@pytest.mark.parametrize("wanted, good", [(0, True), (50_257, True), (50_304, True), (50_320, True),
                                          (50_321, False), (50_256, False)])
def test_a_vocabulary_may_be_padded(wanted, good, gpt2_like, tmp_path):
    """By at most 63: 50,257 tokens in a model of 50,304, as in the speedrun."""
    cfg, files = gpt2_like
    (tmp_path / "manifest.json").write_text(json.dumps({"files": files, "tokenizer": {"vocab_size": 50_257}}))
    cfg = replace(cfg, vocab_size=wanted)
    if good:
        assert open_data(cfg, print).vocab_size == (wanted or 50_257)
    else:
        with pytest.raises(Refused, match=f"vocab_size={wanted}.* 50257"):
            open_data(cfg, print)


# -------------------------------------------------------------------------------- bytes behind tokens
ODD = ["  two  spaces\n\n", "\tif x:\n\t\treturn  1\r\n", "naïve café — 日本語 \U0001F600 e\u0301", " lead",
       "trail ", "", "\u00a0nbsp\u3000wide", "        deep\n            deeper\n" * 3, "x" * 300, " ",
       "ﬁ ﬂ Ⅳ ①", "a", "<s> </s> <unk> <0x41>"]
NORMALIZED = dict(normalization_rule_name="nmt_nfkc_cf", add_dummy_prefix=True, remove_extra_whitespaces=True)
FOREIGN = dict(byte_fallback=False, normalization_rule_name="nmt_nfkc", add_dummy_prefix=True,
               remove_extra_whitespaces=True, allow_whitespace_only_pieces=False)
TOKENIZERS = {     # name: (options, whether decode(encode(text)) is the text)
    "whitespace-only pieces": (dict(), True),
    "no whitespace-only pieces": (dict(allow_whitespace_only_pieces=False), True),
    "mostly byte fallback": (dict(vocab_size=340, character_coverage=0.98), True),
    "pieces of other people": (dict(user_defined_symbols="<|x|>,  ,\u00a0nbsp"), True),
    "normalized, with bytes": (NORMALIZED, False),
    "SentencePiece defaults": (FOREIGN, False),
    "unigram defaults": (FOREIGN | dict(model_type="unigram", vocab_size=300), False)}


@pytest.fixture(scope="module", params=TOKENIZERS)
def case(request):
    """A tokenizer, whether it is lossless, its model's bytes, val documents, their tokens and both sizes."""
    options, lossless = TOKENIZERS[request.param]
    documents = list(library_documents(60_000))
    few = "byte fallback" in request.param      # trained on capitals, it writes all other letters as bytes
    model = train_tokenizer([text.upper() for text in documents] if few else documents, **options)
    sp = spm.SentencePieceProcessor(model_proto=model)
    texts = documents[:6] + ODD
    decoded = sum(len(sp.decode(sp.encode(text)).encode()) for text in texts)
    return SimpleNamespace(sp=sp, lossless=lossless, model=model, texts=texts, decoded=decoded,
                           tokens=tokens_of(sp, texts).astype("<u2"),
                           text_bytes=sum(len(text.encode()) for text in texts))


def test_decoded_bytes(case):
    """Document by document; those of the text if the tokenizer is lossless."""
    assert decoded_bytes(case.sp, case.tokens, 1) == case.decoded
    assert (case.decoded == case.text_bytes) == case.lossless
    for text in case.texts if case.lossless else ():
        tokens = tokens_of(case.sp, [text]).astype("<u2")
        assert decoded_bytes(case.sp, tokens, 1) == len(text.encode()), text


def test_bytes_of_pieces_that_are_no_whole_characters():
    """200 documents of three characters, each in byte pieces."""
    sp = spm.SentencePieceProcessor(model_proto=train_tokenizer(["hello world of text\n" * 3] * 50, 280))
    text = "é€\U0001F600"
    tokens = tokens_of(sp, [text] * 200).astype("<u2")
    assert len(tokens) == 200 * 10
    assert decoded_bytes(sp, tokens, 1) == download.decoded_bytes(sp, tokens, 1) == 200 * 9
    known = tokens_of(sp, ["\ufffd", "a\ufffdb", text]).astype("<u2")     # which is a character of its own
    assert decoded_bytes(sp, known, 1) == download.decoded_bytes(sp, known, 1) == 3 + 5 + 9


def test_val_bytes_of_a_dataset(case, tmp_path):
    """The manifest's, else those of the decoded tokens. A manifest whose tokenizer is lossless must agree
    with its tokens. Without a tokenizer there are no bytes."""
    folder = write_dataset(tmp_path, "words", case.model, [case.tokens], case.tokens, case.text_bytes,
                           case.lossless)
    cfg = toy_config(".", data_path=str(folder), val_tokens=0)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())

    def opened(cfg):
        data = open_data(cfg, (lines := []).append)
        lines = [line for line in lines if "val_bytes:" in line]
        return data, [int(number) for line in lines for number in re.findall(r"\d+", line)]
    right = case.text_bytes
    unknown = case.sp.unk_id() in case.tokens       # nobody knows how many bytes they stand for
    for stated in right, None, right - 1, right + 1:
        wanted = case.decoded if stated is None else stated
        path.write_text(json.dumps(manifest | {"val_bytes": stated}))
        if case.lossless and wanted != right:
            with pytest.raises(Refused, match=f"{stated}.*{right}"):
                opened(cfg)
        elif stated is None and unknown:
            with pytest.raises(Refused, match="words: val has unknown text"):
                opened(cfg)
        else:
            data, numbers = opened(cfg)
            assert data.val_bytes == wanted and numbers == [wanted]
    path.unlink()
    with_tokenizer = replace(cfg, tokenizer_path=str(tmp_path / "data/tokenizers/words.model"))
    if unknown:
        with pytest.raises(Refused, match="words: val has unknown text"):
            opened(with_tokenizer)
    else:
        data, numbers = opened(with_tokenizer)
        assert data.val_bytes == case.decoded and numbers == [case.decoded]
        assert data.vocab_size == case.sp.vocab_size()
    data, _ = opened(replace(cfg, vocab_size=case.sp.vocab_size()))
    assert data.val_bytes is data.tokenizer is None
