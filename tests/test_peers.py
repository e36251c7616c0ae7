"""tools/dev/peers.py: compressors alone and primed, what trains beside tiny, the table."""
import json
import lzma
import re

import pyppmd
import pytest
import sentencepiece as spm

import fork_server
import train_gpt
from helpers import library_documents, run_cli, tokens_of, train_tokenizer, write_dataset
from tools.dev import peers

MEGABYTES = 2
ORDER = 5
TOY = dict(DEVICE="cpu", DTYPE="float32", COMPILE="0", WARMUP_STEPS="0", NUM_LAYERS="2", MODEL_DIM="32",
           TRAIN_SEQ_LEN="64", TRAIN_BATCH_TOKENS="256", ITERATIONS="2", MAX_WALLCLOCK_SECONDS="0",
           COUNT_BITS="12", COUNT_ORDERS="2", COUNT_WORDS="3", COPY_ORDERS="1,3", BIGRAM_ROWS="1024",
           VALUE_EMBED_LAYERS="0,1")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder to run in, with data/datasets/small: (folder, train documents, val documents)."""
    root = tmp_path_factory.mktemp("peers")
    documents = list(library_documents(90_000))
    model = train_tokenizer(documents)
    sp = spm.SentencePieceProcessor(model_proto=model)
    val = documents[:5]
    train = documents[5:]
    write_dataset(root, "small", model, [tokens_of(sp, train[:20]), tokens_of(sp, train[20:])],
                  tokens_of(sp, val), sum(len(text.encode()) for text in val))
    return root, [text.encode() for text in train], [text.encode() for text in val]


@pytest.fixture
def table(small, monkeypatch, capsys):
    """Words -> (exit code, rows of the table {peer: cells}, stderr), in this process and at toy size."""
    monkeypatch.chdir(small[0])
    monkeypatch.setattr(peers, "PPMD_MEGABYTES", MEGABYTES)
    monkeypatch.setattr(peers, "PPMD_ORDER", ORDER)
    monkeypatch.setattr(peers.sys, "executable", fork_server.start())
    for name, peer in peers.PEERS.items():
        monkeypatch.setitem(peers.PEERS, name, peer._replace(settings=peer.settings | TOY))

    def call(*words):
        code = peers.main(["--text", "small", *words])
        out, err = capsys.readouterr()
        rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| ")]
        return code, {cells[0]: cells for cells in rows}, err

    return call


def alone(primer, document):
    """What a document adds to the primer in a new PPMd encoder."""
    sizes = []
    for content in (primer, primer + document):
        encoder = pyppmd.Ppmd7Encoder(ORDER, MEGABYTES * 10**6)
        sizes.append(len(encoder.encode(content) + encoder.flush()))
    return sizes[1] - sizes[0]


def test_compressors(small, table):
    """Their numbers; PPMd's documents do not see one another."""
    _, train, val = small
    code, rows, _ = table("--only=xz,xz-primed,ppmd")
    size = sum(map(len, val))
    chain = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
    xz, before, both = [len(lzma.compress(b"".join(content), filters=chain))
                        for content in (val, train, train + val)]
    assert xz == len(lzma.compress(b"".join(val), preset=9 | lzma.PRESET_EXTREME))
    ppmd = sum([alone(b"".join(train), document) for document in val])
    assert code == 0 and {name: row[1] for name, row in rows.items() if name != "peer"} == {
        "xz": f"{8 * xz / size:.4f}", "xz-primed": f"{8 * (both - before) / size:.4f}",
        "ppmd": f"{8 * ppmd / size:.4f}"}


def test_all_that_train(small, table):
    """Each by its recipe, with equal settings, and two seeds."""
    names = [name for name, peer in peers.PEERS.items() if peer.preset]
    code, rows, _ = table("--only", ",".join(names))
    assert code == 0 and [*rows] == ["peer", *names]
    results = [json.loads(path.read_text()) for path in (small[0] / "logs").glob("peer_*/result.json")]
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


def test_the_command(small):
    """As run.sh calls it."""
    words = ["--peers", "--only", "xz", "--text", "data/datasets/small"]
    done = run_cli(small[0], *words, module="tools.dev.bench")
    assert done.code == 0 and "\n| xz | " in done.out, done.err
