"""tools/dev/peers.py: compressors alone and primed, trials on train documents, the table, resumed runs."""
import json
import lzma
import re
from pathlib import Path

import pyppmd
import pytest
import sentencepiece as spm

import fork_server
import train_gpt
from helpers import library_documents, run_cli, tokens_of, train_tokenizer, write_dataset
from tools.dev import peers

MEGABYTES = 2
TOY = ["DEVICE=cpu", "DTYPE=float32", "COMPILE=0", "WARMUP_STEPS=0", "NUM_LAYERS=2", "MODEL_DIM=32",
       "TRAIN_SEQ_LEN=64", "TRAIN_BATCH_TOKENS=256", "ITERATIONS=2",
       "MAX_WALLCLOCK_SECONDS=0", "COUNT_BITS=12", "COUNT_ORDERS=2", "COUNT_WORDS=3", "COPY_ORDERS=1,3",
       "BIGRAM_ROWS=1024", "VALUE_EMBED_LAYERS=0,1"]


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


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    monkeypatch.setattr(peers, "PPMD_MEGABYTES", MEGABYTES)


@pytest.fixture
def bench(small, tmp_path, monkeypatch, capsys):
    """Words -> (exit code, rows of the table {peer: cells}, stdout, stderr), in this process."""
    monkeypatch.chdir(small[0])
    orders = ({"ORDER": "3"}, {"ORDER": "5"})
    monkeypatch.setitem(peers.PEERS, "ppmd", peers.PEERS["ppmd"]._replace(tries=orders))
    monkeypatch.setattr(peers.sys, "executable", fork_server.start())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def call(*words):
        code = peers.main(["--text", "small", f"--json={tmp_path}/rows.json", *words])
        out, err = capsys.readouterr()
        rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| ")]
        return code, {cells[0]: cells for cells in rows}, out, err

    return call


@pytest.fixture
def text(small, tmp_path):
    return peers.Text(small[0] / "data/datasets/small", tmp_path)


def alone(order, primer, document):
    """What a document adds to the primer in a new encoder; the code is decoded."""
    sizes = []
    for content in (primer, primer + document):
        encoder = pyppmd.Ppmd7Encoder(order, MEGABYTES * 10**6)
        code = encoder.encode(content) + encoder.flush()
        sizes.append(len(code))
    decoder = pyppmd.Ppmd7Decoder(order, MEGABYTES * 10**6)
    assert decoder.decode(code, len(content)) == content
    return sizes[1] - sizes[0]


def test_the_text(small, text):
    """Documents come back as they were; trials train on other documents than they are scored on."""
    _, train, val = small
    assert text.train == train and text.val == val
    trial = text.trial
    held = trial.val
    assert held and sorted(trial.train + held) == sorted(train)
    assert trial.data.val_bytes == sum(map(len, held)) <= sum(map(len, train)) // 10
    assert trial.key != text.key


def test_documents_do_not_see_one_another(small):
    """In whatever company and order, each takes as much as alone after the primer."""
    _, train, val = small
    primer = b"".join(train)
    sizes = peers.ppmd_sizes(5, primer, [*val, val[0], *val[::-1]])
    assert sizes[:5] == [alone(5, primer, document) for document in val]
    assert sizes[5:] == [sizes[0], *sizes[4::-1]]
    assert sizes[0] < peers.ppmd_sizes(5, b"", val[:1])[0]


def test_compressors(small, bench):
    """Their numbers, the order that trials chose; what is not there has a row that says so."""
    _, train, val = small
    code, rows, out, _ = bench("--only", "xz,xz-primed", "--only=ppmd,zpaq", "--tune")
    assert code == 0 and out.startswith("command: ./run.sh bench --peers --text small ")
    assert re.search(r"^machine: 1 ranks x \d+ threads of .*, torch ", out, re.M)
    size = sum(map(len, val))
    chain = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
    xz, before, both = [len(lzma.compress(b"".join(content), filters=chain))
                        for content in (val, train, train + val)]
    assert xz == len(lzma.compress(b"".join(val), preset=9 | lzma.PRESET_EXTREME))
    assert rows["xz"][1] == f"{8 * xz / size:.4f}"
    assert rows["xz-primed"][1] == f"{8 * (both - before) / size:.4f}"
    tried = dict(re.findall(r"trial of ppmd, seed 1337, ORDER=(\d+): (\S+),", out))
    order = min(tried, key=lambda order: float(tried[order]))
    assert [*tried] == ["3", "5"] and f"ORDER={order}" in rows["ppmd"][3]
    sizes = peers.ppmd_sizes(int(order), b"".join(train), val)
    assert rows["ppmd"][1] == f"{8 * sum(sizes) / size:.4f}"
    assert rows["zpaq"][1] == "not installed" or float(rows["zpaq"][1]) > 0


def test_zpaq(small, bench, monkeypatch, tmp_path):
    """By a program of that name that stores what it is given."""
    program = tmp_path / "zpaq"
    program.write_text('#!/bin/sh\n[ "$1 $4 $5 $6" = "add -method 511 -threads" ] && cp "$3" "$2"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert bench("--only=zpaq")[1]["zpaq"][1] == "8.0000"
    program.write_text("#!/bin/sh\necho it is full\nexit 3\n")
    (tmp_path / "rows.json").unlink()
    assert bench("--only=zpaq")[1]["zpaq"][1] == "zpaq failed: it is full"


def test_all_that_train(small, bench, tmp_path):
    """Each by its recipe, with equal settings; then nothing is trained again, but for another seed."""
    names = [name for name, peer in peers.PEERS.items() if peer.preset]
    code, rows, out, _ = bench("--only", ",".join(names), *TOY)
    assert code == 0 and [*rows] == ["peer", *names] and "exit code" not in out, out
    kept = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["key"]["peer"] for row in kept] == names
    for row in kept:
        result = json.loads((small[0] / "logs" / row["run_id"] / "result.json").read_text())
        assert rows[row["key"]["peer"]][1] == f"{result['val_bpb']:.4f}" and result["steps"] == 2
        assert result["config"]["train_batch_tokens"] == "256"
    _, again, _, _ = bench("--only", ",".join(names), *TOY)
    assert again == rows and len(list((small[0] / "logs").glob("peer_*"))) == len(names)
    _, both, _, _ = bench("--only=plain", "--seeds=2", *TOY)
    assert re.fullmatch(r"\d\.\d{4} ± \d\.\d{4} \(2\)", both["plain"][1])
    assert len(list((small[0] / "logs").glob("peer_*"))) == len(names) + 1


def test_plain_is_plain():
    """Nothing of tiny's techniques has a parameter that differs from a plain block's and learns."""
    cfg = train_gpt.load_config(dict(PRESET="tiny", VOCAB_SIZE="512", **peers.PLAIN))
    table = cfg.parameter_table()
    rates = {train_gpt.kind_of(name): table[train_gpt.kind_of(name)].lr
             for name, _ in cfg.make_model().named_parameters()}
    assert {kind for kind, rate in rates.items() if rate} == {
        "embed", "head", "query", "key", "value", "attn_proj", "fc", "mlp_proj"}
    assert {kind for kind, rate in rates.items() if not rate} == {
        "qk_gain", "resid_lambda", "x0_lambda", "layer_scale"}


@pytest.fixture
def no_training(monkeypatch):
    """Runs are a formula of their settings -> the settings of each."""
    seen = []

    def train(name, settings):
        seen.append((name, settings))
        bpb = 2 + abs(float(settings["MATRIX_LR"]) - 0.009) + int(settings["SEED"]) % 10 / 1e3
        return dict(val_bpb=bpb, train_time_ms=1000, steps=100, run_id=name)

    monkeypatch.setattr(peers, "train", train)
    return seen


def test_trials(small, bench, no_training):
    """--tune takes the best on held-out train documents; then each seed is trained on the text itself."""
    _, rows, out, _ = bench("--only=plain,golf", "--seeds=2", "--tune")
    assert re.findall(r"trial of plain, seed 1337, MATRIX_LR=(\S+)", out) == ["0.015", "0.0075", "0.03"]
    assert "MATRIX_LR=0.0075" in rows["plain"][3] and rows["plain"][1] == "2.0090 ± 0.0007 (2)"
    texts = [Path(settings["DATA_PATH"]).name for name, settings in no_training if name == "plain"]
    assert texts == ["small_trial"] * 3 + ["small"] * 2
    # the run before golf's tells how many steps it will have: ten times as many, also in trials
    pace = [settings for name, settings in no_training if name == "golf_pace"]
    golf = [settings for name, settings in no_training if name == "golf"]
    assert len(pace) == len(golf) == 5 and {run["MAX_WALLCLOCK_SECONDS"] for run in pace} == {"12"}
    assert {run["WARMDOWN_ITERS"] for run in golf} == {"357"}
    assert "shuffled" in golf[-1]["DATA_PATH"]


def test_a_run_that_fails(bench):
    """Has a row that says why, and the others go on."""
    code, rows, _, _ = bench("--only=plain,xz", *TOY, "NUM_HEADS=3")
    assert code == 0 and float(rows["xz"][1]) > 0
    assert rows["plain"][1].startswith("exit code 2: train_gpt: model_dim=32 must be a multiple")


def test_refused(bench):
    for words, sentence in [
            (["--only=xz,bzip2"], "bzip2 is none of xz, xz-primed, ppmd, zpaq, plain, golf, gpt2, memory-0, "
             "tiny"),
            (["MATRIX_RL=1"], "MATRIX_RL is no constant"), (["SEED=3"], "SEED is set for each peer"),
            (["tiny"], "tiny is no NAME=value"), (["--seeds=0"], "--seeds 0: at least 1"),
            (["--text=nowhere"], "no shards at 'nowhere'")]:
        code, rows, _, err = bench(*words)
        assert code == 2 and not rows and err.startswith(f"bench --peers: {sentence}"), err


def test_the_command(small, tmp_path):
    """As run.sh calls it."""
    words = ["--peers", "--only", "xz", "--text", "data/datasets/small", f"--json={tmp_path}/rows.json"]
    done = run_cli(small[0], *words, module="tools.dev.bench")
    assert done.code == 0 and "\n| xz | " in done.out, done.err
    assert "--tune" in run_cli(small[0], "--peers", "--help", module="tools.dev.bench").out
