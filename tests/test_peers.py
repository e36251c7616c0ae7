"""tools/dev/peers.py: compressors alone and primed, what trains beside tiny, the table."""
import json
import lzma
import re
from pathlib import Path

import numpy as np
import pyppmd
import pytest

import fork_server
import train_gpt
from helpers import library_documents, run_cli
from tools.dev import peers

MEGABYTES = 2
ORDER = 5
TOY = dict(DEVICE="cpu", DTYPE="float32", COMPILE="0", WARMUP_STEPS="0", NUM_LAYERS="2", MODEL_DIM="32",
           TRAIN_SEQ_LEN="64", TRAIN_BATCH_TOKENS="256", ITERATIONS="2", MAX_WALLCLOCK_SECONDS="0",
           COUNT_BITS="12", COUNT_ORDERS="2", COUNT_WORDS="3", COPY_ORDERS="1,3", BIGRAM_ROWS="1024",
           VALUE_EMBED_LAYERS="0,1")


@pytest.fixture
def table(tiny_data, tmp_path, monkeypatch, capsys):
    """Words -> (exit code, rows of the table {peer: cells}, stderr), in this process and at toy size."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(peers, "PPMD_MEGABYTES", MEGABYTES)
    monkeypatch.setattr(peers, "PPMD_ORDER", ORDER)
    monkeypatch.setattr(peers.sys, "executable", fork_server.start())
    for name, peer in peers.PEERS.items():
        monkeypatch.setitem(peers.PEERS, name, peer._replace(settings=peer.settings | TOY))

    def call(*words):
        code = peers.main(["--text", str(tiny_data / "data/datasets/toy"), *words])
        out, err = capsys.readouterr()
        rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| ")]
        return code, {cells[0]: cells for cells in rows}, err

    return call


def ppmd(content):
    """The bytes that a new PPMd encoder makes of it."""
    encoder = pyppmd.Ppmd7Encoder(ORDER, MEGABYTES * 10**6)
    return len(encoder.encode(content) + encoder.flush())


def xz(content):
    chain = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
    return len(lzma.compress(content, filters=chain))


def test_compressors(tiny_data, table):
    """Their numbers; PPMd's documents do not see one another."""
    texts = [text.encode() for text in library_documents(400_000)]
    val = texts[:10]    # as write_toy_data() has them; the last document of train is cut
    data = peers.open_text(tiny_data / "data/datasets/toy")
    tokens = np.concatenate([train_gpt.open_shard(shard.path) for shard in data.train])
    train = b"".join(peers.documents(data, tokens))
    assert b"".join(texts[20:]).startswith(train) and len(train) > 200_000
    code, rows, _ = table("--only=xz,xz-primed,ppmd")
    whole = b"".join(val)
    primer = ppmd(train)
    sizes = {"xz": xz(whole), "xz-primed": xz(train + whole) - xz(train),
             "ppmd": sum([ppmd(train + document) - primer for document in val])}
    assert xz(whole) == len(lzma.compress(whole, preset=9 | lzma.PRESET_EXTREME))
    assert code == 0 and {name: row[1] for name, row in rows.items() if name != "peer"} == {
        name: f"{8 * size / len(whole):.4f}" for name, size in sizes.items()}


def test_all_that_train(table):
    """Each by its recipe, with equal settings, and two seeds."""
    names = [name for name, peer in peers.PEERS.items() if peer.preset]
    code, rows, _ = table("--only", ",".join(names))
    assert code == 0 and [*rows] == ["peer", *names]
    results = [json.loads(path.read_text()) for path in Path("logs").glob("peer_*/result.json")]
    assert sorted(f"{result['val_bpb']:.4f}" for result in results) == sorted(rows[name][1] for name in names)
    assert {(result["steps"], result["config"]["train_batch_tokens"]) for result in results} == {(2, "256")}
    assert all("; 2 steps" in rows[name][3] for name in names)
    _, both, _ = table("--only=plain", "--seeds=2")
    assert re.fullmatch(r"\d\.\d{4} ± \d\.\d{4} \(2\)", both["plain"][1])


def test_plain_is_plain():
    """Nothing of tiny's techniques has a parameter that differs from a plain block's and learns."""
    cfg = train_gpt.load_config(dict(PRESET="tiny", VOCAB_SIZE="512", **peers.PLAIN))
    rows = cfg.parameter_table()
    rates = {train_gpt.kind_of(name): rows[train_gpt.kind_of(name)].lr
             for name, _ in cfg.make_model().named_parameters()}
    assert {kind for kind, rate in rates.items() if rate} == {
        "embed", "head", "query", "key", "value", "attn_proj", "fc", "mlp_proj"}
    assert {kind for kind, rate in rates.items() if not rate} == {
        "qk_gain", "resid_lambda", "x0_lambda", "layer_scale"}


def test_a_run_that_fails(table, monkeypatch):
    """Has a row that says why, and the others go on."""
    broken = peers.PEERS["plain"]._replace(settings=TOY | dict(NUM_HEADS="3"))
    monkeypatch.setitem(peers.PEERS, "plain", broken)
    code, rows, _ = table("--only=plain,xz")
    assert code == 0 and float(rows["xz"][1]) > 0
    assert rows["plain"][1].startswith("exit code 2: train_gpt: model_dim=32 must be a multiple")


@pytest.mark.parametrize("word, sentence", [
    ("--only=bzip2", "bzip2 is none of xz, xz-primed, ppmd, plain, gpt2, memory-0, tiny"),
    ("--seeds=0", "--seeds 0: at least 1"), ("--text=nowhere", "no shards at 'nowhere'")])
def test_refused(word, sentence, table):
    code, rows, err = table(word)
    assert code == 2 and not rows and err.startswith(f"bench --peers: {sentence}")


def test_the_command(tiny_data):
    """As run.sh calls it."""
    done = run_cli(tiny_data, "--peers", "--only", "xz", "--text", "toy", module="tools.dev.bench")
    assert done.code == 0 and "\n| xz | " in done.out, done.err
