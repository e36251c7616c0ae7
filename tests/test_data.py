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
from helpers import fake_team, shard_file, tokens_of, toy_config, train_tokenizer, write_dataset, write_shard
from train_gpt import Config, Loader, Missing, Refused, decoded_bytes, open_data, open_shard, table_bytes

T, WORLDS = 8, (1, 2, 3, 4, 6)


# -------------------------------------------------------------------------------- shards
def test_a_shard_is_a_memory_map_of_its_tokens(tmp_path):
    tokens = np.array([1, 0, 65535, 258, 20240 & 0xffff])
    write_shard(tmp_path / "x.bin", tokens)
    shard = open_shard(tmp_path / "x.bin", 5)
    assert isinstance(shard, np.memmap) and shard.dtype == np.uint16 and shard.tolist() == tokens.tolist()
    with pytest.raises(Refused, match="x.bin is .* 5.0 tokens, .* manifest 4"):
        open_shard(tmp_path / "x.bin", 4)


def test_tokens_up_to_the_vocabulary_are_legal():
    train_gpt.check_tokens(np.array([0, 511, 7], "<u2"), 512, "x")
    with pytest.raises(Refused, match="x holds token 512, but vocab_size is 512"):
        train_gpt.check_tokens(np.array([0, 511, 512], "<u2"), 512, "x")


def test_the_toy_dataset(tiny_data):
    data = open_data(toy_config(tiny_data), (lines := []).append)
    assert data.about["name"] == data.about["fingerprint"] == "toy"
    assert data.vocab_size == 512 and data.bos == 1
    assert [len(shard) for shard in data.train.values()] == [110_001, 90_001, 99_998]
    assert 15_000 < len(data.val) < 25_000 and data.val[0] == 1
    text = "\n".join(lines)
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
    assert open_data(cfg).about["name"] == "some"
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
ROWS = (sum(SIZES) - 1) // T    # of an epoch


def stream_data(sizes=SIZES, vocab_size=60_000, bos=0):
    """Data whose train tokens are 0, 1, 2, ... through all shards: a token is its place in the stream."""
    return shards_of(np.arange(sum(sizes)), sizes, vocab_size, bos)


def shards_of(tokens, sizes, vocab_size=60_000, bos=0):
    shards = np.split(np.asarray(tokens, "<u2"), np.cumsum(sizes)[:-1])
    train = {f"s{i}": shard_file(shard) for i, shard in enumerate(shards)}
    return SimpleNamespace(train=train, vocab_size=vocab_size, bos=bos, about={"name": "some"})


def loader_of(rank=0, world_size=1, data=None, shuffle=False, log=print, **settings):
    cfg = Config(train_seq_len=T, train_batch_tokens=T, shuffle=shuffle, **settings)
    return Loader(cfg, data or stream_data(), fake_team(rank, world_size), log)


def expected(place, count, rows=ROWS):
    """(tokens, targets) of count rows from that place of the endless sequence on."""
    first = (torch.arange(place, place + count) % rows * T)[:, None]
    return first + torch.arange(T), first + torch.arange(1, T + 1)


def same(batch, wanted):
    return all(torch.equal(*pair) for pair in zip(batch, wanted, strict=True))


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_stream_is_the_shards_in_order_for_any_world_size(world_size):
    """Across boundaries, shards shorter than a row, and epochs, each from the first row to the last whole
    one. Targets are one token further on; position counts rows."""
    loaders, position = [loader_of(rank, world_size) for rank in range(world_size)], 0
    assert all(loader.rows == ROWS == 27 for loader in loaders)
    for rows in [12] * 9 + [24, 12, 36, 24, 12]:
        batches = [loader.next(rows * T) for loader in loaders]
        for tokens, targets in batches:
            assert tokens.shape == targets.shape == (rows // world_size, T)
            assert tokens.dtype == targets.dtype == torch.int64
        assert same(map(torch.cat, zip(*batches)), expected(position, rows))
        position += rows
        assert all(loader.position == position for loader in loaders)
        assert all(loader.epoch == position // ROWS + 1 for loader in loaders)
    assert position > 4 * ROWS


def test_read_at_every_place():
    loader, total = loader_of(), sum(SIZES)
    for start in range(total):
        for count in (1, 2, 60, total):
            count = min(count, total - start)
            assert np.array_equal(loader.read(start, count), start + np.arange(count))
    assert loader.read(0, 3).dtype == np.int64


def test_rows_of_every_place():
    """The same ones again in each epoch, whatever is left over at the end."""
    for sizes in (SIZES, (T + 1,), (2 * T,), (2 * T + 1,), (1,) * 30):
        loader, rows = loader_of(data=stream_data(sizes)), (sum(sizes) - 1) // T
        assert loader.rows == rows
        for place in [*range(3 * rows), 10**12 * rows]:
            assert loader.row(place).tolist() == [*range(place % rows * T, place % rows * T + T + 1)]


def test_one_short_shard_is_enough():
    loader = loader_of(data=stream_data((T + 1,)))
    for step in range(20):
        assert same(loader.next(3 * T), expected(3 * step, 3, 1))


def test_position_is_the_whole_state():
    """A fresh loader put where another one is goes on with the same batches."""
    first = loader_of()
    for _ in range(7):
        first.next(4 * T)
    second = loader_of()
    second.position = first.position
    for batch_tokens in (4 * T, 4 * T, 8 * T, T, 4 * T):
        assert same(first.next(batch_tokens), second.next(batch_tokens))


def test_reading_ahead_never_returns_what_is_stale():
    """Random batch sizes and jumps of position, with a batch read ahead each time."""
    rng, loader = random.Random(0), loader_of()
    for _ in range(300):
        if rng.random() < 0.3:
            loader.position = rng.choice([0, 5, 26, 27, 223, loader.position + 1, rng.randrange(10_000)])
        position, rows = loader.position, rng.choice([1, 2, 5, 40])
        assert same(loader.next(rows * T), expected(position, rows))


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
        assert same(loader.next(4 * T), expected(4 * step, 4, 37))
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
        if tokens.tolist() in [shard.tolist() for shard in loader.shards]:
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
    count, starts = ROWS, []
    while len(starts) < count + 12:
        batches = [loader.next(6 * T) for loader in loaders]
        tokens, targets = (torch.cat(parts) for parts in zip(*batches))
        assert torch.equal(tokens[:, 1:], targets[:, :-1]) and tokens.shape == (6, T)
        starts += tokens[:, 0].tolist()
    assert all(start % T == 0 for start in starts)
    assert sorted(starts[:count]) == [i * T for i in range(count)]
    assert starts[count:] == starts[:len(starts) - count]
    gaps = [abs(a - b) for a, b in zip(starts, starts[1:])]
    assert sum(gaps) / len(gaps) > count * T / 5  # not one after the other


@pytest.mark.parametrize("epochs, cap, short", [(0, 0, 0), (3, 0, 0), (2, 0, 8 * T), (1, 0, 35 * T),
                                                (1, 60, 0)])
def test_a_schedule_that_runs_out_of_tokens(epochs, cap, short):
    """Said before training, with how many are missing; a run that ends by the clock may read fewer."""
    settings = dict(iterations=24, extension_iterations=7, batch_schedule=(2, 2), max_epochs=epochs,
                    max_wallclock_seconds=cap)
    if not short:
        assert loader_of(**settings).rows == ROWS
        return
    said = f"{short} of {62 * T} train tokens are missing; max_epochs is {epochs}"
    with pytest.raises(Missing, match=said):
        loader_of(**settings)


# -------------------------------------------------------------------------------- rows of documents
BOS = 60_000
DOCUMENTS = (3, 1, 9, 2, 2, 40, 5, 8, 1, 1, 30, 4, 17, 6, 1, 90, 3)


def documents_data(lengths=DOCUMENTS, before=0, sizes=(60, 1, 70, 30), bos=BOS):
    """Tokens that are their place in the stream, but for the bos of each document; some before the first."""
    tokens = np.arange(before + sum(lengths))
    tokens[before + np.cumsum([0, *lengths[:-1]])] = bos
    return shards_of(tokens, (*sizes, len(tokens) - sum(sizes)), 65_536, bos)


def packed_rows(data, longest):
    """Slow and plain: documents cut to the longest follow each other until a row is full; the rest of the
    last one is dropped, and the next row begins with the document after it. -> rows, tokens cut off."""
    documents, rows, row, cut = [], [], [], 0
    for token in np.concatenate([*data.train.values()]).tolist():
        if token == data.bos:
            documents.append([])
        if documents:
            documents[-1].append(token)
    for document in documents:
        row, cut = row + document[:longest], cut + len(document[longest:])
        if len(row) > T:
            rows.append(row[:T + 1])
            row = []
    return rows, cut


@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("longest", [1, 2, 7, T, T + 1, 12, 1000])
def test_rows_are_packed_documents(longest, before):
    """Each begins with a document; what the log says is read, cut and left over is all there is."""
    data, lines = documents_data(before=before), []
    loader = loader_of(data=data, max_doc_len=longest, log=lines.append)
    rows, cut = packed_rows(data, longest)
    assert loader.rows == len(rows) > 0 and all(row[0] == BOS for row in rows)
    assert [loader.row(i).tolist() for i in range(3 * len(rows))] == 3 * rows
    line, = lines
    total, kept = before + sum(DOCUMENTS), (T + 1) * len(rows)
    assert f"documents: {len(DOCUMENTS)} in {len(rows)} rows" in line and f"max_doc_len:{longest}" in line
    assert f"of {total} train tokens {kept} are read, {cut} beyond" in line
    assert f" {total - kept - cut} beyond a row" in line


@pytest.mark.parametrize("shuffle", [False, True])
def test_packed_rows_are_the_same_for_any_world_size(shuffle):
    """... and each comes once an epoch."""
    data, longest = documents_data(), 12
    rows, _ = packed_rows(data, longest)
    streams = []
    for world_size in (1, 2, 3):
        loaders = [loader_of(r, world_size, data, shuffle, max_doc_len=longest) for r in range(world_size)]
        stream = []
        while len(stream) < 30:
            tokens, targets = map(torch.cat, zip(*[loader.next(6 * T) for loader in loaders]))
            assert torch.equal(tokens[:, 1:], targets[:, :-1]) and tokens.shape == (6, T)
            stream += torch.cat((tokens, targets[:, -1:]), 1).tolist()
        streams.append(stream)
        assert sorted(stream[:len(rows)]) == sorted(rows) and loaders[0].epoch == 30 // len(rows) + 1
        assert stream[len(rows):] == stream[:-len(rows)] and shuffle == (stream[:len(rows)] != rows)
    assert streams[0] == streams[1] == streams[2]


def test_too_few_documents_for_a_row():
    for data in (documents_data((3, 2, 2), 900, (1, 1)), documents_data((50, 1, 1), 0, (9, 9), bos=65_000)):
        with pytest.raises(Refused, match=f"do not fill a row of {T}"):
            loader_of(data=data, max_doc_len=5)
    data = documents_data()
    data.bos = 59_999                                           # which no document begins with
    with pytest.raises(Refused, match="do not fill"):
        loader_of(data=data, max_doc_len=5)


def test_without_max_doc_len_there_is_nothing_to_tell():
    loader_of(log=pytest.fail)


# -------------------------------------------------------------------------------- foreign shards
@pytest.fixture
def gpt2_like(tmp_path):
    """Shards under their published names, without a manifest: documents of 40 tokens after 50256."""
    tokens = np.arange(400) % 300
    tokens[::40] = 50_256
    for name in ("val_000000", "train_000001", "train_000002"):
        write_shard(tmp_path / f"fineweb_{name}.bin", tokens)
    return toy_config(".", data_path=str(tmp_path), vocab_size=50_304, val_tokens=0, train_seq_len=16)


def test_gpt2_shards_need_no_manifest(gpt2_like):
    data = open_data(gpt2_like)
    assert (data.vocab_size, data.bos) == (50_304, 50_256) and data.tokenizer is data.val_bytes is None
    lines = []
    loader = Loader(train_gpt.replace(gpt2_like, max_doc_len=30), data, fake_team(), lines.append)
    assert loader.rows == 20 and "200 beyond max_doc_len:30" in lines[0]


def test_the_manifest_says_what_begins_a_document(gpt2_like, tmp_path):
    files = [{"path": path.name, "split": path.name.split("_")[1]} for path in sorted(tmp_path.glob("*.bin"))]
    about = {"vocab_size": 50_257, "bos_id": 7}
    (tmp_path / "manifest.json").write_text(json.dumps({"files": files, "tokenizer": about}))
    data = open_data(gpt2_like)
    assert data.bos == 7
    rows = {bos: Loader(train_gpt.replace(gpt2_like, max_doc_len=30, bos_id=bos), data, fake_team()).row(0)[0]
            for bos in (0, 50_256)}
    assert rows == {0: 7, 50_256: 50_256}   # ... unless a constant does


@pytest.mark.parametrize("wanted, good", [(0, True), (50_257, True), (50_304, True), (50_320, True),
                                          (50_321, False), (50_256, False)])
def test_a_vocabulary_may_be_padded(wanted, good, gpt2_like, tmp_path):
    """By at most 63: 50,257 tokens in a model of 50,304, as in the speedrun."""
    files = [{"path": path.name, "split": path.name.split("_")[1]} for path in sorted(tmp_path.glob("*.bin"))]
    (tmp_path / "manifest.json").write_text(json.dumps({"files": files, "tokenizer": {"vocab_size": 50_257}}))
    cfg = train_gpt.replace(gpt2_like, vocab_size=wanted)
    if good:
        assert open_data(cfg).vocab_size == (wanted or 50_257)
    else:
        with pytest.raises(Refused, match=f"vocab_size={wanted}.* 50257"):
            open_data(cfg)


# -------------------------------------------------------------------------------- bytes behind tokens
ODD = ["  two  spaces\n\n", "\tif x:\n\t\treturn  1\r\n", "naïve café — 日本語 \U0001F600 e\u0301", " lead",
       "trail ", "", "\u00a0nbsp\u3000wide", "        deep\n            deeper\n" * 3, "x" * 300, " ",
       "ﬁ ﬂ Ⅳ ①", "a", "<s> </s> <unk> <0x41>"]
FOREIGN = dict(byte_fallback=False, normalization_rule_name="nmt_nfkc", add_dummy_prefix=True,
               remove_extra_whitespaces=True, allow_whitespace_only_pieces=False)
FEW = dict(vocab_size=340, character_coverage=0.98)
TOKENIZERS = {     # name: (options, whether decode(encode(text)) is the text)
    "whitespace-only pieces": (dict(), True),
    "no whitespace-only pieces": (dict(allow_whitespace_only_pieces=False), True),
    "mostly byte fallback": (FEW, True),
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
        assert table_bytes(case.sp, case.tokens) == wanted
        for text in case.texts:         # each document by itself, so that errors cannot cancel
            tokens = tokens_of(case.sp, [text]).astype("<u2")
            size = len(text.encode())
            assert table_bytes(case.sp, tokens) == decoded_bytes(case.sp, tokens, 1) == size, text
    else:
        assert abs(table_bytes(case.sp, case.tokens) / wanted - 1) < 0.05


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
    data = open_data(dataset(tmp_path, case), (lines := []).append)
    text_bytes = sum(len(text.encode()) for text in case.texts)
    assert data.val_bytes == text_bytes
    line, = [line for line in lines if "val_bytes" in line]
    assert f"val_bytes:{text_bytes}" in line and str(table_bytes(case.sp, case.tokens)) in line


def test_bytes_of_foreign_shards(text_case, tmp_path):
    """Without a manifest they come from decoding the val tokens, and both figures are logged."""
    case = text_case
    cfg = dataset(tmp_path, case, manifest=False)
    cfg = train_gpt.replace(cfg, tokenizer_path=str(tmp_path / "data/tokenizers/words.model"))
    data = open_data(cfg, (lines := []).append)
    wanted = reference_bytes(case.sp, case.tokens, 1)
    assert data.val_bytes == wanted and data.vocab_size == case.sp.vocab_size()
    line, = [line for line in lines if "val_bytes" in line]
    assert f"val_bytes:{wanted}" in line and "decoded" in line
    assert str(table_bytes(case.sp, case.tokens)) in line


def test_no_tokenizer_no_bytes(text_case, tmp_path):
    cfg = dataset(tmp_path, text_case, manifest=False)
    data = open_data(train_gpt.replace(cfg, vocab_size=text_case.sp.vocab_size()), (lines := []).append)
    assert data.val_bytes is None and data.tokenizer is None
    assert any("tokenizer" in line and "val_bpb is null" in line for line in lines)


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
        assert table_bytes(sp, tokens) == wanted, sp.id_to_piece(i)
