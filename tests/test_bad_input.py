"""Bad input: one clear sentence and exit 2 before training; what breaks later: one sentence and exit 1."""

import hashlib
import io
import json
import os
import random
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import sentencepiece as spm
import torch

import helpers
import train_gpt
from helpers import TOY, run_cli, toy_config, write_shard
from train_gpt import Refused

DATA, MODEL = Path("data/datasets/toy"), Path("data/tokenizers/toy.model")
VAL, TRAIN = DATA / "toy_val_000000.bin", DATA / "toy_train_000000.bin"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def workplace(tiny_data, tmp_path, monkeypatch):
    """A copy of tiny_data that a test may damage, as the current folder."""
    shutil.copytree(tiny_data / "data", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def artifact(tiny_data):
    """Bytes of an artifact of TOY's shape with random weights."""
    torch.manual_seed(0)
    model = train_gpt.GPT(toy_config(tiny_data, vocab_size=512))
    train_gpt.init_parameters(model, 0)
    return train_gpt.pack_artifact(model)


def edit_manifest(**changes):
    """Lay changes over manifest.json; a function gets the old value; None removes the key."""
    path = DATA / "manifest.json"
    manifest = json.loads(path.read_text())
    for key, value in changes.items():
        manifest[key] = value(manifest[key]) if callable(value) else value
        if manifest[key] is None:
            del manifest[key]
    path.write_text(json.dumps(manifest))


def no_manifest():
    (DATA / "manifest.json").unlink()


def patch(path, place, content):
    raw = bytearray(Path(path).read_bytes())
    raw[place:place + len(content)] = content
    Path(path).write_bytes(raw)


def cut(path, size):
    Path(path).write_bytes(Path(path).read_bytes()[:size])


def one_more_token(split):
    """Its shard gets a token outside the vocabulary, and the manifest no say in it."""
    patch(VAL if split == "val" else TRAIN, 1024 + 2 * 777, b"\x00\x02")


def rewrite_tokens(path, tokens):
    """Another shard at path, and a manifest that agrees."""
    entry = write_shard(path, tokens)
    edit_manifest(files=lambda files: [f | entry if f["path"] == entry["path"] else f for f in files])


def other_tokenizer(vocab_size, **changes):
    MODEL.write_bytes(model := helpers.train_tokenizer(helpers.library_documents(60_000), vocab_size))
    edit_manifest(tokenizer=lambda about: about | {"sha256": hashlib.sha256(model).hexdigest()} | changes)


def set_tokenizer(**changes):
    edit_manifest(tokenizer=lambda about: about | changes)


def set_file(place, **changes):
    edit_manifest(files=lambda files: [f | changes if i == place else f for i, f in enumerate(files)])


def use_run(name):
    Path("logs", name).mkdir(parents=True)
    Path("logs", name, "train.log").write_text("kept\n")


MANIFEST = DATA / "manifest.json"
BAD_DATA = {
    "missing data dir": (lambda: shutil.rmtree(DATA), ["data/datasets/toy", "./run.sh data --text"]),
    "missing embedded corpus": (lambda: None, ["data/datasets/embedded", "./run.sh data"],
                                {"DATA_PATH": "data/datasets/embedded"}),
    "missing sp1024": (lambda: None, ["./run.sh data sp1024"],
                       {"DATA_PATH": "data/datasets/fineweb10B_sp1024"}),
    "data dir is a file": (lambda: None, ["train_gpt_is_no_folder"], {"DATA_PATH": "train_gpt_is_no_folder"}),
    "empty data dir": (lambda: (shutil.rmtree(DATA), DATA.mkdir()), ["toy", "train"]),
    "wrong magic": (lambda: patch(VAL, 0, b"GGUF"), [VAL.name, "damaged"]),
    "wrong version": (lambda: patch(TRAIN, 4, b"\x02"), [TRAIN.name, "20240520, 2"]),
    "big-endian header": (lambda: patch(TRAIN, 0, (20240520).to_bytes(4, "big")), [TRAIN.name]),
    "truncated train shard": (lambda: cut(TRAIN, 150_001), [TRAIN.name, "truncated"]),
    "truncated val shard": (lambda: cut(VAL, 5_000), [VAL.name, "truncated"]),
    "shard cut inside its header": (lambda: cut(TRAIN, 700), [TRAIN.name]),
    "shard of 5 bytes": (lambda: cut(TRAIN, 5), [TRAIN.name]),
    "empty shard": (lambda: cut(TRAIN, 0), [TRAIN.name]),
    "shard with a tail": (lambda: TRAIN.write_bytes(TRAIN.read_bytes() + b"\0\0"), [TRAIN.name]),
    "header says more": (lambda: patch(TRAIN, 8, (999_999).to_bytes(4, "little")), [TRAIN.name, "999999"]),
    "header says less": (lambda: patch(VAL, 8, (17).to_bytes(4, "little")), [VAL.name, " 17]"]),
    "header says nothing": (lambda: write_shard(VAL, []), [VAL.name]),
    "header says minus": (lambda: patch(VAL, 8, b"\xff\xff\xff\xff"), [VAL.name, "-1"]),
    "shard is a folder": (lambda: (TRAIN.unlink(), TRAIN.mkdir()), [TRAIN.name]),
    "shard is missing": (TRAIN.unlink, [TRAIN.name]),
    "token id in val": (lambda: one_more_token("val"), ["val", "not the file that manifest.json means"]),
    "token id in val, no manifest": (lambda: (no_manifest(), one_more_token("val")), ["val", "token 512"],
                                     {"TOKENIZER_PATH": str(MODEL)}),
    "token id in train": (lambda: one_more_token("train"), [TRAIN.name, "token 512", "vocab_size is 512"]),
    "tokenizer of another size": (lambda: other_tokenizer(400), ["toy", "400"]),
    "TOKENIZER_PATH of another size": (lambda: Path("other.model").write_bytes(helpers.train_tokenizer(
        helpers.library_documents(60_000), 400)), ["other.model"], {"TOKENIZER_PATH": "other.model"}),
    "smaller tokenizer, no manifest": (lambda: (no_manifest(), Path("other.model").write_bytes(
        helpers.train_tokenizer(helpers.library_documents(60_000), 400))), ["val", "400"],
        {"TOKENIZER_PATH": "other.model"}),
    "another tokenizer of that size": (lambda: MODEL.write_bytes(helpers.train_tokenizer(
        helpers.library_documents(60_000), 512)), ["toy.model"]),
    "tokenizer sha256": (lambda: set_tokenizer(sha256="0" * 64), ["toy.model"]),
    "tokenizer missing": (MODEL.unlink, ["toy.model"]),
    "tokenizer garbage": (lambda: MODEL.write_bytes(b"no tokenizer" * 99), ["toy.model"]),
    "tokenizer cut": (lambda: cut(MODEL, 3000), ["toy.model"]),
    "TOKENIZER_PATH missing": (lambda: None, ["nowhere.model"], {"TOKENIZER_PATH": "nowhere.model"}),
    "TOKENIZER_PATH a folder": (lambda: None, ["datasets"], {"TOKENIZER_PATH": "data/datasets"}),
    "no tokenizer, no VOCAB_SIZE": (no_manifest, ["tokenizer", "VOCAB_SIZE"]),
    "VOCAB_SIZE of another tokenizer": (lambda: None, ["vocab_size=300", "512"], {"VOCAB_SIZE": "300"}),
    "no val split": (lambda: edit_manifest(files=lambda files: files[1:]), ["toy", "val"]),
    "no val split, no manifest": (lambda: (no_manifest(), VAL.unlink()), ["toy", "val"]),
    "no train split": (lambda: edit_manifest(files=lambda files: files[:1]), ["toy", "train"]),
    "val shorter than a sequence": (lambda: rewrite_tokens(VAL, np.arange(64)), ["val", "toy", "64"]),
    "val shorter than a row": (lambda: None, ["val", "toy", "30001"], {"EVAL_CONTEXT": "30000"}),
    "val_tokens beyond the split": (lambda: None, ["val", "toy", "99999"], {"VAL_TOKENS": "99999"}),
    "train shorter than a sequence": (lambda: (rewrite_tokens(TRAIN, np.arange(64)), edit_manifest(
        files=lambda files: files[:2])), ["train", "64"]),
    "manifest cut": (lambda: cut(MANIFEST, 300), ["manifest.json", "damaged"]),
    "manifest empty": (lambda: cut(MANIFEST, 0), ["manifest.json", "damaged"]),
    "manifest no UTF-8": (lambda: patch(MANIFEST, 20, b"\xff\xfe"), ["manifest.json", "damaged"]),
    "manifest a list": (lambda: MANIFEST.write_text("[1, 2]"), ["manifest.json", "damaged"]),
    "manifest null": (lambda: MANIFEST.write_text("null"), ["manifest.json", "damaged"]),
    "manifest a folder": (lambda: (MANIFEST.unlink(), MANIFEST.mkdir()), ["manifest.json", "damaged"]),
    "manifest without files": (lambda: edit_manifest(files=None), ["manifest.json", "damaged"]),
    "manifest with files of a number": (lambda: edit_manifest(files=7), ["manifest.json", "damaged"]),
    "manifest with a file without split": (lambda: edit_manifest(files=[{"path": "x"}]), ["manifest.json"]),
    "manifest with a path of a number": (lambda: set_file(1, path=7), ["manifest.json", "damaged"]),
    "manifest with a tokenizer of text": (lambda: edit_manifest(tokenizer="toy.model"), ["manifest.json"]),
    "manifest with a vocab_size of text": (lambda: set_tokenizer(vocab_size="many"), ["manifest.json"]),
    "another vocab_size of text": (lambda: set_tokenizer(vocab_size="many"), ["manifest.json", "toy"],
                                   {"VOCAB_SIZE": "512"}),
    "manifest with other token counts": (lambda: set_file(1, tokens=110_000), [TRAIN.name, "110000"]),
    "manifest with counts of text": (lambda: set_file(1, tokens="x"), [TRAIN.name, "x"]),
    "manifest with a file outside": (lambda: set_file(1, path="../../../outside.bin"), ["outside.bin"]),
    "manifest with an absolute file": (lambda: set_file(1, path="/nowhere/outside.bin"), ["outside.bin"]),
    "no documents": (lambda: None, ["do not fill a row"], {"MAX_DOC_LEN": "64", "BOS_ID": "65535"}),
    "one shard of three": (lambda: edit_manifest(files=lambda files: files[:2]),
                           ["197248 of 307200 train tokens are missing; max_epochs is 1"],
                           {"MAX_EPOCHS": "1", "ITERATIONS": "300"}),
    "val_bytes too small": (lambda: edit_manifest(val_bytes=lambda n: n - 1), ["val", "toy", "bytes"]),
    "val_bytes zero": (lambda: edit_manifest(val_bytes=0), ["toy", " 0"]),
    "val tokens changed": (lambda: patch(VAL, 1024 + 2 * 500, b"\x03\x00" * 40),
                           ["val", "not the file that manifest.json means"]),
}
BAD_SETTINGS = {
    "batch that no sequence fits in": ({"TRAIN_BATCH_TOKENS": "32"},
                                       ["train_batch_tokens=32", "train_seq_len=64"]),
    "batch of no whole sequences": ({"TRAIN_BATCH_TOKENS": "1000"}, ["train_batch_tokens=1000"]),
    "heads do not divide the width": ({"NUM_HEADS": "5"}, ["num_heads=5", "model_dim=32"]),
    "kv heads do not divide heads": ({"NUM_HEADS": "4", "NUM_KV_HEADS": "3"},
                                     ["num_kv_heads=3", "num_heads=4"]),
    "kv heads exceed heads": ({"NUM_KV_HEADS": "4"}, ["num_kv_heads=4", "num_heads=2"]),
    "MATRIX_LR=nan": ({"MATRIX_LR": "nan"}, ["matrix_lr=nan"]),
    "MATRIX_LR=inf": ({"MATRIX_LR": "inf"}, ["matrix_lr=inf"]),
    "ITERATIONS=-5": ({"ITERATIONS": "-5"}, ["iterations=-5"]),
    "ITERATIONS=1e5": ({"ITERATIONS": "1e5"}, ["iterations='1e5'"]),
    "unknown preset": ({"PRESET": "gulf"}, ["preset='gulf'", "golf"]),
    "TIE_EMBEDDINGS=yes please": ({"TIE_EMBEDDINGS": "yes please"}, ["tie_embeddings='yes please'"]),
    "two aliases disagree": ({"TOTAL_BATCH_SIZE": "2048"}, ["train_batch_tokens", "1024", "2048"]),
    "run_id with a slash": ({"RUN_ID": "a/b"}, ["run_id='a/b'"]),
    "run_id with a backslash": ({"RUN_ID": "a\\b"}, ["run_id="]),
    "run_id of two dots": ({"RUN_ID": ".."}, ["run_id='..'"]),
    "run_id of a dot": ({"RUN_ID": "."}, ["run_id='.'"]),
    "run_id of a path": ({"RUN_ID": "/tmp"}, ["run_id="]),
    "run_id with a line end": ({"RUN_ID": "a\n"}, ["run_id="]),
    "run_id of a space": ({"RUN_ID": " "}, ["run_id="]),
    "ranks that do not divide the batch": ({"RANK": "0", "WORLD_SIZE": "3"}, ["3 ranks", "16 sequences"]),
    "windows of no whole blocks": ({"WINDOW_SCHEDULE": "16,40", "WINDOW_BLOCK": "16"},
                                   ["window_block=16", "window_schedule=(16, 40)"]),
    "eval_window of no whole blocks": ({"WINDOW_SCHEDULE": "16", "WINDOW_BLOCK": "16", "EVAL_WINDOW": "24"},
                                       ["window_block=16", "eval_window=24"]),
    "stages of different numbers": ({"BATCH_SCHEDULE": "1,2,3", "WINDOW_SCHEDULE": "16,32"},
                                    ["batch_schedule=(1, 2, 3)", "window_schedule=(16, 32)"]),
    "more switches than factors": ({"LR_SCHEDULE": "1,1.5", "LR_SWITCHES": "0,0.2,0.6"},
                                   ["lr_schedule=(1.0, 1.5)", "lr_switches=(0.0, 0.2, 0.6)"]),
    "switches that go back": ({"LR_SCHEDULE": "1,1.5,2", "LR_SWITCHES": "0,0.6,0.2"},
                              ["lr_switches=(0.0, 0.6, 0.2)"]),
    "a skip to where it is from": ({"SKIP_LAYERS": "1,1"}, ["skip_layers=(1, 1)"]),
    "a skip to nowhere": ({"SKIP_LAYERS": "0,1,1"}, ["skip_layers=(0, 1, 1)"]),
    "layers of no kind": ({"WINDOW_PATTERN": "SSX"}, ["window_pattern='SSX'"]),
    "more tokens than the epochs have": ({"MAX_EPOCHS": "2", "BATCH_SCHEDULE": "1,3", "ITERATIONS": "400"},
                                         ["219264 of 819200 train tokens are missing; max_epochs is 2"]),
    "no such GPU": ({"DEVICE": "cuda", "LOCAL_WORLD_SIZE": "65"}, ["GPU"]),
    "EVAL_FROM missing": ({"EVAL_FROM": "nowhere.ptz"}, ["nowhere.ptz"]),
    "EVAL_FROM a folder": ({"EVAL_FROM": "data"}, ["data", "damaged or no model"]),
    "EVAL_FROM a shard": ({"EVAL_FROM": str(VAL)}, [VAL.name, "damaged or no model"]),
}
BAD_FLAGS = {
    "typo in a flag": (["--matrx-lr=0.1"], ["--matrx-lr", "did you mean --matrix-lr?"]),
    "unknown flag": (["--zzzzzz=1"], ["--zzzzzz", "--help"]),
    "flag without a value": (["--seed"], ["--seed needs a value"]),
    "stray word": (["golf"], ["golf"]),
}


def refused(capsys, env, argv, words, code=2):
    """Runs main and holds it to the contract of a refusal. Returns the sentence."""
    had = {str(p) for p in Path("logs").glob("*")} if Path("logs").is_dir() else set()
    assert train_gpt.main(argv, TOY | {"ITERATIONS": "1"} | env) == code
    out, err = capsys.readouterr()
    check_sentence(out, err, words)
    new = {str(p) for p in Path("logs").glob("*")} - had if Path("logs").is_dir() else set()
    for folder in new:
        assert Path(folder, "train.log").read_text().splitlines()[-1] in err
        assert not Path(folder, "result.json").exists()
    assert code == 1 or not new, "nothing is left behind by what is refused before training"
    return err


def check_sentence(out, err, words):
    *others, last = err.splitlines()
    assert last.startswith("train_gpt: ") and all(word in last for word in words), err
    assert "Traceback" not in err + out and "step:1/" not in out
    assert str(Path.cwd()) not in err + out
    assert not [line for line in others if line.startswith("train_gpt: ")]


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data(case, workplace, capsys):
    damage, words, *env = BAD_DATA[case]
    damage()
    refused(capsys, env[0] if env else {}, [], words)


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings(case, tiny_data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(tiny_data / "data")
    env, words = BAD_SETTINGS[case]
    refused(capsys, env, [], words)


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags(case, tiny_data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv, words = BAD_FLAGS[case]
    refused(capsys, {}, argv, words)


# -------------------------------------------------------------------------------- run folders
def test_a_run_id_is_used_once(workplace, capsys):
    use_run("taken")
    refused(capsys, {"RUN_ID": "taken"}, [], ["run_id='taken'", "cannot be written"])
    assert [p.name for p in Path("logs/taken").iterdir()] == ["train.log"]
    assert Path("logs/taken/train.log").read_text() == "kept\n"
    refused(capsys, {}, ["--model-tag=taken"], ["run_id='taken'", "cannot be written"])


def test_logs_that_cannot_be_written(workplace, capsys):
    Path("logs").write_text("a file")
    refused(capsys, {"RUN_ID": "x"}, [], ["logs/x", "cannot be written"])
    assert Path("logs").read_text() == "a file"


def test_a_run_id_too_long_for_a_folder(workplace, capsys):
    refused(capsys, {"RUN_ID": "x" * 300}, [], ["logs/xxx", "cannot be written"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_logs_without_permission(workplace, capsys):
    Path("logs").mkdir(mode=0o500)
    refused(capsys, {"RUN_ID": "x"}, [], ["logs/x", "Permission denied"])


# -------------------------------------------------------------------------------- EVAL_FROM
def payload_of(artifact):
    return torch.load(io.BytesIO(zlib.decompress(artifact)), weights_only=True)


def packed(payload):
    torch.save(payload, buffer := io.BytesIO())
    return zlib.compress(buffer.getvalue(), 1)


def with_shape(artifact, **changes):
    payload = payload_of(artifact)
    payload["shape"] |= changes
    return packed(payload)


def with_tensor(artifact, name, value):
    """The artifact with another tensor under that name; None: without it."""
    payload = payload_of(artifact)
    payload["tensors"][name] = value
    if value is None:
        del payload["tensors"][name]
    return packed(payload)


class Evil:
    """Pickles to a call of os.system."""
    def __reduce__(self):
        return os.system, ("touch executed",)


BAD_ARTIFACTS = {
    "garbage": lambda a: b"\x93garbage" * 500,
    "empty": lambda a: b"",
    "truncated": lambda a: a[:-100],
    "half": lambda a: a[:len(a) // 2],
    "a flipped bit": lambda a: a[:5000] + bytes([a[5000] ^ 4]) + a[5001:],
    "another zlib stream": lambda a: zlib.compress(b"hello" * 1000),
    "truncated torch file": lambda a: zlib.decompress(a)[:-200],
    "code in the pickle": lambda a: packed({"shape": Evil(), "tensors": {}}),
    "no shape": lambda a: packed({"tensors": payload_of(a)["tensors"]}),
    "half a shape": lambda a: packed(payload_of(a) | {"shape": {"num_layers": 2}}),
    "a list": lambda a: packed([1, 2, 3]),
    "another shape": lambda a: with_shape(a, model_dim=64),
    "more layers": lambda a: with_shape(a, num_layers=3),
    "fewer layers": lambda a: with_shape(a, num_layers=1),
    "heads that do not divide": lambda a: with_shape(a, num_heads=5),
    "layers of text": lambda a: with_shape(a, num_layers="2"),
    "endless layers": lambda a: with_shape(a, num_layers=10**9),
    "a tensor less": lambda a: with_tensor(a, "blocks.1.query", None),
    "a tensor more": lambda a: with_tensor(a, "blocks.1.extra", torch.zeros(3)),
    "a tensor of another shape": lambda a: with_tensor(a, "blocks.1.query", torch.zeros(32, 16)),
    "a tensor of text": lambda a: with_tensor(a, "blocks.1.query", "weights"),
    "nan weights": lambda a: with_tensor(a, "blocks.1.query", torch.full((32, 32), torch.nan)),
    "inf weights": lambda a: with_tensor(a, "blocks.0.qk_gain", torch.tensor([1.0, torch.inf])),
}


@pytest.mark.parametrize("case", BAD_ARTIFACTS)
def test_bad_artifacts(case, workplace, artifact, capsys):
    Path("model.ptz").write_bytes(BAD_ARTIFACTS[case](artifact))
    refused(capsys, {"EVAL_FROM": "model.ptz"}, [], ["model.ptz", "damaged or no model of this trainer"])
    assert not Path("executed").exists()


def test_a_good_artifact_is_scored(workplace, artifact, capsys):
    """What the cases above damage is whole to begin with."""
    Path("model.ptz").write_bytes(artifact)
    env = {k: v for k, v in TOY.items() if k not in ("NUM_LAYERS", "MODEL_DIM", "NUM_HEADS", "TRAIN_SEQ_LEN")}
    assert train_gpt.main(["--eval-from=model.ptz", "--run-id=scored"], env) == 0
    assert "final_int8_zlib_roundtrip_exact val_loss" in capsys.readouterr().out
    assert json.loads(Path("logs/scored/result.json").read_text())["stop_reason"] == "eval_from"


def test_eval_from_with_a_shape_that_contradicts_it(workplace, artifact, capsys):
    Path("model.ptz").write_bytes(artifact)
    refused(capsys, {"EVAL_FROM": "model.ptz", "NUM_LAYERS": "3"}, [], ["num_layers=3", "2"])


def test_eval_from_with_data_of_another_vocabulary(workplace, artifact, capsys):
    no_manifest()
    Path("model.ptz").write_bytes(artifact)
    Path("other.model").write_bytes(helpers.train_tokenizer(helpers.library_documents(60_000), 400))
    env = {"EVAL_FROM": "model.ptz", "TOKENIZER_PATH": "other.model"}
    refused(capsys, env, [], ["vocab_size=512", "400"])


# -------------------------------------------------------------------------------- as a command
COMMANDS = {
    "missing data": (["--data-path=data/datasets/nowhere"], {}, ["val shards at 'data/datasets/nowhere'"]),
    "truncated shard": ([], {}, [TRAIN.name, "truncated"]),
    "typo in a flag": (["--matrx-lr=0.1"], {}, ["did you mean --matrix-lr?"]),
    "MATRIX_LR=nan": ([], {"MATRIX_LR": "nan"}, ["matrix_lr=nan"]),
    "run_id with a slash": (["--run-id=../x"], {}, ["run_id='../x'"]),
    "EVAL_FROM missing": ([], {"EVAL_FROM": "nowhere.ptz"}, ["nowhere.ptz"]),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_refusals_of_the_command(case, workplace):
    if case == "truncated shard":
        cut(TRAIN, 150_001)
    argv, env, words = COMMANDS[case]
    done = run_cli(workplace, *argv, env=TOY | env)
    assert done.code == 2, done.err
    check_sentence(done.out, done.err, words)
    assert len(done.err.splitlines()) == 1 and not Path("logs").exists()


def test_refusal_under_torchrun(workplace):
    """The exit code and trailer are torchrun's; our sentence comes once, from rank 0, without a traceback."""
    done = run_cli(workplace, "--val-tokens=99999999", ranks=2, env=TOY)
    ours = [line for line in done.err.splitlines() if "train_gpt: " in line]
    assert done.code != 0 and len(ours) == 1 and "99999999" in ours[0]
    assert "train_gpt.py\", line" not in done.err and not Path("logs").exists()


# -------------------------------------------------------------------------------- after the start
def failed(capsys, env, words):
    """Runs main and holds it to the contract of a failure. Returns train.log."""
    assert train_gpt.main([], TOY | {"RUN_ID": "failed"} | env) == 1
    out, err = capsys.readouterr()
    log = Path("logs/failed/train.log").read_text()
    assert err.startswith("train_gpt: ") and err.count("\n") == 1 and "Traceback" not in err + out
    assert err == f"train_gpt: {log.splitlines()[-1]}\n" and all(word in err for word in words)
    assert not Path("logs/failed/result.json").exists()
    return log


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run(value, workplace, monkeypatch, capsys):
    """Broken from step 13 on, logged at 20: the run ends there, 80 steps early."""
    calls, lm_loss = [], train_gpt.lm_loss
    def breaking(*args):
        calls.append(0)
        loss = lm_loss(*args)
        return loss * value if len(calls) > 13 else loss       # one call is the rehearsal's
    monkeypatch.setattr(train_gpt, "lm_loss", breaking)
    log = failed(capsys, {"ITERATIONS": "100"}, ["train_loss", "not finite", "step 20"])
    assert "step:10/100" in log and "step:30/100" not in log and len(calls) <= 22


def test_one_bad_step_is_not_overlooked(workplace, monkeypatch, capsys):
    """A loss that was not finite at a step nobody looked at."""
    calls, lm_loss = [], train_gpt.lm_loss
    def breaking(*args):
        calls.append(0)
        loss = lm_loss(*args)
        return loss.detach() * torch.nan + 0 * loss.nan_to_num() if len(calls) == 14 else loss
    monkeypatch.setattr(train_gpt, "lm_loss", breaking)
    failed(capsys, {"ITERATIONS": "100"}, ["not finite", "step 20"])


def test_a_run_that_diverges(workplace, capsys):
    """The largest learning rates that Config takes, and no softcap to hold the logits."""
    env = {name: "10" for name in ("MATRIX_LR", "EMBED_LR", "HEAD_LR", "SCALAR_LR")}
    env |= {"RUN_ID": "wild", "LOGIT_SOFTCAP": "0", "ITERATIONS": "15"}
    assert train_gpt.main([], TOY | env) in (0, 1)
    assert "Traceback" not in capsys.readouterr().err
    assert Path("logs/wild/train.log").exists()


def test_a_bad_later_shard_ends_the_run(workplace, capsys):
    """Train shards are checked before their first use: this one comes in after 4 steps."""
    first, = [f for f in json.loads(MANIFEST.read_text())["files"] if f["path"] == TRAIN.name]
    rewrite_tokens(TRAIN, np.fromfile(TRAIN, "<u2", offset=1024)[:4200])
    patch(DATA / "toy_train_000001.bin", 1024 + 2 * 50_000, b"\xff\xff")
    log = failed(capsys, {"SHUFFLE": "0"}, ["toy_train_000001.bin", "65535", "512"])
    assert first["tokens"] > 4200 and "step:4/20" in log and "step:5/20" not in log


# -------------------------------------------------------------------------------- mutations by the hundred
JUNK = [None, -1, 0, 1, 2**40, 1.5, 1e300, True, "", "x", "../x", "toy_val_000000.bin", [], [1], {}, {"a": 1},
        ".", "/", "val", "train", "0" * 64, -2**70]


def spots(tree, path=()):
    """Every place in a JSON tree."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield path + (key,)
        yield from spots(child, path + (key,))


def mutate(rng, tree, junk):
    *way, last = rng.choice(list(spots(tree)))
    at = tree
    for key in way:
        at = at[key]
    if rng.random() < 0.25:
        del at[last]
    else:
        at[last] = rng.choice(junk)
    return tree


def scramble(rng, raw):
    """raw with a few bytes changed, cut off or added."""
    kind, raw = rng.randrange(4), bytearray(raw)
    if kind == 0:
        return bytes(raw[:rng.randrange(len(raw))])
    if kind == 1:
        return bytes(raw) + rng.randbytes(rng.randrange(1, 9))
    for _ in range(rng.randrange(1, 6)):
        raw[rng.randrange(len(raw) if kind == 2 else min(64, len(raw)))] = rng.randrange(256)
    return bytes(raw)


def test_fuzzed_shards(tmp_path):
    rng, path = random.Random(1), tmp_path / "x.bin"
    write_shard(path, np.arange(100))
    whole, opened = path.read_bytes(), 0
    for _ in range(60):
        path.write_bytes(raw := scramble(rng, whole))
        try:
            tokens = train_gpt.open_shard(path)
            train_gpt.check_tokens(tokens, 100, "x")
        except Refused as refusal:
            assert "\n" not in str(refusal) and "x" in str(refusal)
            continue
        opened += 1
        assert len(tokens) == 100 and tokens.max() < 100 and raw[:12] == whole[:12] and len(raw) == len(whole)
    assert opened < 40


@pytest.mark.parametrize("lossless", [True, False])
def test_fuzzed_manifests(lossless, workplace):
    """Bytes and values of the file changed at random; the shards are small, so that it is fast."""
    rng, opened = random.Random(2), 0
    sp = spm.SentencePieceProcessor(model_file=str(MODEL))
    text = list(helpers.library_documents(9000))
    train, val = helpers.tokens_of(sp, text[2:]), helpers.tokens_of(sp, text[:2])
    folder = helpers.write_dataset(".", "small", MODEL.read_bytes(), np.split(train, [400]), val,
                                   sum(len(t.encode()) for t in text[:2]), lossless)
    whole = (folder / "manifest.json").read_text()
    cfg = toy_config(".", data_path=str(folder), val_tokens=0)
    for i in range(60):
        if i % 4:
            tree = mutate(rng, json.loads(whole), JUNK)
            content = json.dumps(tree).encode()
        else:
            content = scramble(rng, whole.encode())
        (folder / "manifest.json").write_bytes(content)
        try:
            data = train_gpt.open_data(cfg)
        except Refused as refusal:
            assert "\n" not in str(refusal)
            continue
        opened += 1
        assert data.train and 1 <= data.vocab_size <= 65536
        assert max(int(shard.max()) for shard in [*data.train.values(), data.val]) < data.vocab_size
        assert data.val_bytes is None or type(data.val_bytes) is int and data.val_bytes > 0, content
    assert 5 < opened < 50


def test_fuzzed_artifacts(artifact, tmp_path):
    rng, opened, path = random.Random(3), 0, tmp_path / "model.ptz"
    tokens = torch.arange(8)[None]
    for i in range(40):
        if i % 2:
            payload = payload_of(artifact)
            payload["shape"] = mutate(rng, payload["shape"], [*JUNK, 3, 4, (0,), (1, 2), 1e-3, 64])
            raw = packed(payload)
        else:
            raw = scramble(rng, artifact if i % 4 else zlib.decompress(artifact))
        path.write_bytes(raw)
        try:
            model, cfg = train_gpt.load_model(path)
        except Refused as refusal:
            assert "\n" not in str(refusal) and "model.ptz" in str(refusal)
            continue
        opened += 1
        train_gpt.check_config(cfg)
        model.set_context(8, 0)
        with torch.no_grad():
            assert train_gpt.log_probs(model, tokens).exp().sum(-1).allclose(torch.ones(1, 8))
    assert opened < 25
