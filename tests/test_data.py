"""Shards, the loader's stream of tokens, and the bytes that val_bpb divides by."""

import json
import queue
import random
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece as spm
import torch

import train_gpt
from helpers import (fake_team, library_documents, shard_file, tokens_of, toy_config, train_tokenizer,
                     write_dataset, write_shard)
from train_gpt import RECIPES, Data, Loader, Refused, decoded_bytes, open_data, open_shard

T = 8


# -------------------------------------------------------------------------------- shards
@pytest.mark.parametrize("lie", [dict(magic=1), dict(version=2), dict(count=4), dict(count=6), dict(count=0)])
def test_a_shard_that_is_none(tmp_path, lie):
    """Of another format, cut short, or with something behind it."""
    write_shard(tmp_path / "x.bin", range(5), **lie)
    with pytest.raises(Refused, match="x.bin is damaged: ./run.sh data"):
        open_shard(tmp_path / "x.bin")


def tokens_of_shards(data):
    """Those of each train shard."""
    return [open_shard(shard.path) for shard in data.train]


def test_shards_are_in_the_order_of_their_names(tmp_path):
    """Whatever the manifest lists; it says how many documents each row group of a shard holds."""
    folder = tmp_path / "some"
    val_parts = np.split(np.arange(300) % 200, [100, 150])
    files = [write_shard(folder / f"a_train_{i:06d}.bin", np.arange(100) + i) for i in (2, 0, 1)]
    for i, part in enumerate(val_parts):
        write_shard(folder / f"a_val_{i:06d}.bin", part)
    write_shard(folder / "unrelated.bin", np.arange(100))
    cfg = toy_config(".", data_path=f"{folder}/", vocab_size=200, val_tokens=0)
    for groups in (None, [3, 4]):
        if groups:
            entries = [files[0] | {"split": "train", "row_groups": groups, "new": 1}, {"path": "missing.bin"}]
            (folder / "manifest.json").write_text(json.dumps({"files": entries, "more": [None]}))
        data = open_data(cfg)
        assert isinstance(open_shard(data.train[0].path), np.memmap)
        assert [shard.groups for shard in data.train] == [None, None, groups]
        assert np.array_equal(data.val, np.concatenate(val_parts)) and data.about["name"] == "some"
        stream = Loader(cfg, data, fake_team()).read(0, 300)
        assert stream.tolist() == [n + i for i in range(3) for n in range(100)]


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


BESIDE = {      # what desktops and archives leave beside shards, and is it tokens?
    "._a_train_000000.bin": False, "._a_val_000000.bin": False, ".DS_Store": False, "Thumbs.db": False,
    "desktop.ini": False, "a_train_000000.bin:Zone.Identifier": False, "__MACOSX/._a_train_000000.bin": False,
    "a_val_000000 (1).bin": True, "a_train_000000 - Copy.bin": True, "a_train_000000.bin.part": True}


@pytest.mark.parametrize("name", BESIDE)
def test_files_of_desktops_beside_shards(tmp_path, name):
    """The shards are those of the pattern; a copy does not count twice."""
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
    assert [shard.size for shard in data.train] == [300, 90] and len(data.val) == 70


# -------------------------------------------------------------------------------- the loader
BOS = 60_000
SIZES = (101, 7, 50, 1, 64)
DOCUMENTS = (3, 1, 9, 2, 2, 40, 5, 8, 1, 1, 30, 4, 17, 6, 1, 90, 3)


def stream_data(sizes=SIZES, vocab_size=65_536, starts=()):
    """Data whose train tokens are 0, 1, 2, ... through all shards, but BOS at the starts of documents."""
    tokens = np.arange(sum(sizes))
    tokens[list(starts)] = BOS
    shards = np.split(tokens.astype("<u2"), np.cumsum(sizes)[:-1])
    train = [shard_file(shard) for shard in shards]
    return Data(train, None, None, vocab_size, BOS, None, {"name": "some"})


def documents_data(before=0, lengths=DOCUMENTS, sizes=(60, 1, 70, 30)):
    """Documents of these lengths, and some tokens before the first."""
    starts = before + np.cumsum([0, *lengths[:-1]])
    return stream_data((*sizes, before + sum(lengths) - sum(sizes)), starts=starts)


PACKS = dict(rows="tiny", spans="golf", documents="speedrun", best_fit="gpt2", shards="golf_plus")


def config_of(packing="rows", **settings):
    """A recipe that packs so, with short rows of one length and any number of epochs."""
    small = dict(train_seq_len=T, train_batch_tokens=T)
    if packing != "spans":
        small |= dict(packing=packing, shuffle=False, seq_schedule=(1,), max_epochs=0)
    if packing == "best_fit":
        small["core"] = False
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


@pytest.mark.parametrize("settings, ranks, sizes", [
    (dict(packing="documents", max_doc_len=12, bos_id=BOS), 2, None),
    (dict(packing="best_fit", bos_id=BOS), 1, None),
    (dict(packing="shards"), 2, (4 * T + 9, 6 * T + 3, 5 * T + 1, 3 * T + 8))])
def test_a_new_loader_goes_on_from_a_position(settings, ranks, sizes):
    """With rows that are full; test_golden.py holds the rows themselves."""
    data = stream_data(sizes) if sizes else documents_data(sizes=(90, 70))
    for rank in range(ranks):
        loader = loader_of(data, rank, ranks, **settings)
        steps = [loader.next(2 * ranks * T) for _ in range(2)]
        position = loader.position
        steps += [loader.next(2 * ranks * T) for _ in range(3)]
        other = loader_of(data, rank, ranks, **settings)
        other.position = position
        for step in steps[2:]:
            got = other.next(2 * ranks * T)
            assert all(torch.equal(a, b) for a, b in zip(got, step)) and got[0].shape == (2, T)


def test_best_fit_refuses_ranks_without_a_group():
    """A rank whose share of every shard is empty would look for a document without end."""
    whole = documents_data(sizes=(90, 70))
    grouped = [shard._replace(groups=sizes) for shard, sizes in zip(whole.train, ([2, 100], [100]))]
    data = whole._replace(train=grouped)
    for rank in range(2):
        assert loader_of(data, rank, 2, packing="best_fit", bos_id=BOS).next(2 * T)[0].shape == (1, T)
    for rank in range(3):
        with pytest.raises(train_gpt.Refused, match="no shard has more than 2: "):
            loader_of(data, rank, 3, packing="best_fit", bos_id=BOS)


def test_a_single_row_has_the_strides_of_a_new_tensor():
    """Others than those of the warmup would compile the step again, on the clock."""
    assert {x.stride() for n in (1, 3) for x in loader_of(train_batch_tokens=n * T).next(n * T)} == {(T, 1)}


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
def test_a_token_beyond_the_vocabulary_is_refused_when_it_is_read(packing):
    """Whichever rank reads it; the largest token that fits is fine."""
    shards = (100, 100, 97)
    for vocab_size in (296, 297):
        loaders = [loader_of(stream_data(shards, vocab_size=vocab_size), rank, 2, packing=packing)
                   for rank in range(2)]
        refused = []
        for _ in range(10):
            for loader in loaders:
                try:
                    loader.next(4 * T)
                except Refused as error:
                    refused.append(str(error))
        paths = [loader.shards[2].path.name for loader in loaders]
        said = {f"shard {path} holds token 296, but vocab_size is 296" for path in paths}
        assert refused == [] if vocab_size == 297 else {*refused} and {*refused} <= said


def test_a_look_at_each_shard(tmp_path):
    """2048 of its tokens, spread evenly: one beyond the vocabulary, or one token that is more than half of
    them, is refused before training. Val is looked through."""
    tokens = np.arange(4000) % 100
    cfg = toy_config(".", data_path=str(tmp_path), vocab_size=100, val_tokens=0, train_seq_len=32)

    def opened(val=tokens, train=tokens):
        write_shard(tmp_path / "a_val_000000.bin", val)
        write_shard(tmp_path / "a_train_000000.bin", train)
        return open_data(cfg).about["sampled"]

    digest = opened()
    assert digest == opened() != opened(train=tokens[::-1])
    beyond = tokens.copy()
    beyond[1] = 100
    with pytest.raises(Refused, match="val holds token 100, but vocab_size is 100"):
        opened(val=beyond)
    beyond[::50] = 100
    with pytest.raises(Refused, match="shard a_train_000000.bin holds token 100, but vocab_size is 100"):
        opened(train=beyond)
    zeros = tokens.copy()
    zeros[1000:3100] = 0
    with pytest.raises(Refused, match="more than half of shard a_train_000000.bin is one token"):
        opened(train=zeros)


def test_too_few_documents_for_a_row():
    other_bos = documents_data()._replace(bos=59_999)           # which no document begins with
    for data in documents_data(900, (3, 2, 2), (1, 1)), documents_data(0, (5, 1, 1), (3, 3)), other_bos:
        with pytest.raises(Refused, match="do not fill a row|documents fill|begins a document"):
            loader_of(data, packing="documents", max_doc_len=5).next(T)


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
    first = {}
    for bos in (0, 50_256):
        given = replace(cfg, bos_id=bos)
        first[bos] = int(Loader(given, open_data(given, print), fake_team()).next(16)[0][0, 0])
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
    assert decoded_bytes(sp, tokens, 1) == 200 * 9
    known = tokens_of(sp, ["\ufffd", "a\ufffdb", text]).astype("<u2")     # which is a character of its own
    assert decoded_bytes(sp, known, 1) == 3 + 5 + 9


def test_val_bytes_of_a_dataset(case, tmp_path):
    """The manifest's, else those of the decoded tokens, unless the tokenizer does not know some of the text.
    Without a tokenizer there are no bytes."""
    folder = write_dataset(tmp_path, "words", case.model, [case.tokens], case.tokens, case.text_bytes,
                           case.lossless)
    cfg = toy_config(".", data_path=str(folder), val_tokens=0)
    with_tokenizer = replace(cfg, tokenizer_path=str(tmp_path / "data/tokenizers/words.model"))
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    unknown = case.sp.unk_id() in case.tokens       # nobody knows how many bytes they stand for
    for given, stated in ((cfg, dict(val_bytes=case.text_bytes)), (cfg, dict(val_bytes=None)),
                          (with_tokenizer, None)):
        path.unlink()
        if stated:
            path.write_text(json.dumps(manifest | stated))
        lines = []
        of_manifest = stated and stated["val_bytes"]
        if unknown and not of_manifest:
            with pytest.raises(Refused, match="val of words has text unknown to its tokenizer"):
                open_data(given, print)
        else:
            data = open_data(given, lambda *said, lines=lines: lines.extend(said))
            wanted = of_manifest or case.decoded
            assert data.val_bytes == wanted and data.vocab_size == case.sp.vocab_size()
            assert [line for line in lines if f"val_bytes:{wanted}" in line]
    data = open_data(replace(cfg, vocab_size=case.sp.vocab_size()), print)
    assert data.val_bytes is data.tokenizer is None
