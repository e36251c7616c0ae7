"""Bad input: one clear sentence and exit 2 before training; what breaks later: one sentence and exit 1."""
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import signal
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

import helpers
import train_gpt
from helpers import TOY, run_cli, toy_config, toy_of, write_shard

DATA = Path("data/datasets/toy")
MODEL = Path("data/tokenizers/toy.model")
MANIFEST = DATA / "manifest.json"
VAL, TRAIN, LATER = (DATA / f"toy_{name}.bin" for name in ("val_000000", "train_000000", "train_000001"))

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def workplace(tiny_data, tmp_path, monkeypatch):
    """A copy of tiny_data that a test may damage, as the current folder."""
    shutil.copytree(tiny_data / "data", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def artifact(tiny_data):
    """Bytes of an artifact of TOY's shape with random weights."""
    model = toy_config(tiny_data, vocab_size=512).make_model(train_gpt.Kernels())
    helpers.init_parameters(model, 0)
    return train_gpt.pack_artifact(model)


@pytest.fixture(scope="module")
def smaller():
    """A tokenizer of 400 pieces."""
    return helpers.train_tokenizer(helpers.library_documents(60_000), 400)


# -------------------------------------------------------------------------------- ways to damage data
def edit_manifest(**changes):
    """Lay changes over manifest.json; a function gets the old value."""
    manifest = json.loads(MANIFEST.read_text())
    for key, value in changes.items():
        manifest[key] = value(manifest[key]) if callable(value) else value
    MANIFEST.write_text(json.dumps(manifest))


def set_tokenizer(**changes):
    edit_manifest(tokenizer=lambda about: about | changes)


def set_file(place, **changes):
    edit_manifest(files=lambda files: [f | changes if i == place else f for i, f in enumerate(files)])


def keep_files(part):
    edit_manifest(files=lambda files: files[part])


def patch(path, place, content):
    raw = bytearray(path.read_bytes())
    raw[place:place + len(content)] = content
    path.write_bytes(raw)


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def token_512(path):
    """A token outside the vocabulary."""
    patch(path, 1024 + 2 * 777, b"\x00\x02")


def rewrite_tokens(path, tokens):
    """Another shard at path, and a manifest that agrees."""
    entry = write_shard(path, tokens)
    edit_manifest(files=lambda files: [f | entry if f["path"] == entry["path"] else f for f in files])


def other_tokenizer(model):
    MODEL.write_bytes(model)
    set_tokenizer(sha256=hashlib.sha256(model).hexdigest())


# What is done to the data (s: the smaller tokenizer), what the sentence holds, constants. tests/test_fuzz.py
# damages the same files at random places.
BAD_DATA = {
    "no folder": (lambda s: shutil.rmtree(DATA), ["data/datasets/toy", "./run.sh data --text"]),
    "no embedded corpus": (None, ["./run.sh data"], dict(DATA_PATH="data/datasets/embedded")),
    "no sp1024": (None, ["./run.sh data sp1024"], dict(DATA_PATH="data/datasets/fineweb10B_sp1024")),
    "empty folder": (lambda s: (shutil.rmtree(DATA), DATA.mkdir()), ["toy", "train"]),
    "wrong magic": (lambda s: patch(VAL, 0, b"GGUF"), [VAL.name]),
    "truncated train shard": (lambda s: cut(TRAIN, 30_001), [TRAIN.name, "14488.5 tokens", "manifest 44001"]),
    "truncated val shard": (lambda s: cut(VAL, 5_000), [VAL.name, "1988.0 tokens", "manifest 10745"]),
    "shard with a tail": (lambda s: TRAIN.write_bytes(TRAIN.read_bytes() + b"\0\0"), [TRAIN.name]),
    "header says more": (lambda s: patch(TRAIN, 8, (999_999).to_bytes(4, "little")), [TRAIN.name, "999999"]),
    "shard is a folder": (lambda s: (TRAIN.unlink(), TRAIN.mkdir()), [TRAIN.name]),
    "token id in val": (lambda s: token_512(VAL), [VAL.name]),
    "token id in val, no manifest": (lambda s: (MANIFEST.unlink(), token_512(VAL)), ["val", "token 512"],
                                     dict(TOKENIZER_PATH=str(MODEL))),
    "token id in train": (lambda s: token_512(TRAIN), [TRAIN.name, "token 512", "vocab_size is 512"]),
    "val tokens changed": (lambda s: patch(VAL, 1024 + 2 * 500, b"\x03\x00" * 40), [VAL.name]),
    "tokenizer of another size": (other_tokenizer, ["toy", "400"]),
    "TOKENIZER_PATH of another size": (lambda s: Path("other.model").write_bytes(s), ["other.model"],
                                       dict(TOKENIZER_PATH="other.model")),
    "smaller tokenizer, no manifest": (lambda s: (MANIFEST.unlink(), MODEL.write_bytes(s)), ["val", "400"],
                                       dict(TOKENIZER_PATH=str(MODEL))),
    "tokenizer sha256": (lambda s: set_tokenizer(sha256="0" * 64), ["toy.model"]),
    "tokenizer cut, no manifest": (lambda s: (MANIFEST.unlink(), cut(MODEL, 3000)), ["toy"],
                                   dict(TOKENIZER_PATH=str(MODEL))),
    "TOKENIZER_PATH missing": (None, ["nowhere.model"], dict(TOKENIZER_PATH="nowhere.model")),
    "no tokenizer, no VOCAB_SIZE": (lambda s: MANIFEST.unlink(), ["tokenizer", "VOCAB_SIZE"]),
    "VOCAB_SIZE of another tokenizer": (None, ["vocab_size=300", "512"], dict(VOCAB_SIZE="300")),
    "val is a train shard, too": (lambda s: edit_manifest(
        files=lambda files: [*files, files[0] | {"split": "train"}]), [VAL.name, "train and a val shard"]),
    "val copied to a train shard": (lambda s: (shutil.copy(VAL, LATER), edit_manifest(files=lambda files: [
        files[0] | {"path": LATER.name, "split": "train"} if file["path"] == LATER.name else file
        for file in files])), [LATER.name, "documents sampled", "are in val"]),
    "val in a train shard": (lambda s: rewrite_tokens(LATER, np.concatenate([
        np.fromfile(TRAIN, "<u2", offset=1024)[:30_000], np.fromfile(VAL, "<u2", offset=1024)])),
        [LATER.name, "documents sampled", "are in val"]),
    "no val split": (lambda s: keep_files(slice(1, None)), ["toy", "val"]),
    "no train split": (lambda s: keep_files(slice(1)), ["toy", "train"]),
    "val shorter than a sequence": (lambda s: rewrite_tokens(VAL, np.arange(64)), ["val", "toy", "64"]),
    "val shorter than a row": (None, ["val", "toy", "30001"], dict(EVAL_CONTEXT="30000", VAL_TOKENS="0")),
    "val_tokens beyond the split": (None, ["val", "toy", "100000"], dict(VAL_TOKENS="99999")),
    "train shorter than a sequence": (lambda s: (rewrite_tokens(TRAIN, np.arange(64)), keep_files(slice(2))),
                                      ["train", "64"]),
    "no documents": (None, ["no token 65535 begins a document"],
                     dict(PRESET="gpt2", DEPTH="0", TARGET_PARAM_DATA_RATIO="0", BOS_ID="65535")),
    "one shard of three": (lambda s: keep_files(slice(2)),
                           ["307200 train tokens are needed", "max_epochs=1 of 44001"],
                           dict(MAX_EPOCHS="1", ITERATIONS="300")),
    "more tokens than the epochs have": (None, ["819200 train tokens are needed", "max_epochs=2 of 120000"],
                                         dict(MAX_EPOCHS="2", BATCH_SCHEDULE="1,3", ITERATIONS="400")),
    "manifest cut": (lambda s: cut(MANIFEST, 300), ["manifest.json"]),
    "a file without split": (lambda s: edit_manifest(files=[{"path": "x"}]), ["manifest.json"]),
    "a tokenizer of text": (lambda s: edit_manifest(tokenizer="toy.model"), ["manifest.json"]),
    "other token counts": (lambda s: set_file(1, tokens=44_000), [TRAIN.name, "44000"]),
    "a file outside": (lambda s: set_file(1, path="../../../outside.bin"), ["outside.bin"]),
    "val_bytes too small": (lambda s: edit_manifest(val_bytes=lambda n: n - 1), ["val", "toy", "bytes"]),
    "val_bytes zero": (lambda s: edit_manifest(val_bytes=0), ["toy", " 0"])}
BAD_SETTINGS = [  # a flag or {constant: text}, what the sentence holds; more in tests/test_config.py
    ("--matrx-lr=0.1", ["--matrx-lr", "--matrix-lr?"]), ("golf", ["golf"]), ("--seed", ["--seed"]),
    (dict(MATRIX_LR="nan"), ["matrix_lr=nan"]), (dict(NUM_HEADS="5"), ["num_heads=5", "model_dim=32"]),
    (dict(RANK="0", WORLD_SIZE="3"), ["3 ranks", "16 sequences"]),
    (dict(DEVICE="cuda", LOCAL_WORLD_SIZE="65"), ["65", "GPU"]),
    (dict(CORE="1"), ["core=1", "gpt2"]), (dict(MAX_DOC_LEN="-5"), ["max_doc_len=-5"]),
    *((dict(DATA_PATH=path), ["./run.sh data"]) for path in ("", "/", "data/datasets", "x" * 300, "a\nb")),
    *((dict(TOKENIZER_PATH=path), ["tokenizer"]) for path in ("x" * 300, "a\nb", "data/tokenizers")),
    *((dict(EVAL_FROM=path), [path[-8:].replace("\n", " ")]) for path in (
        "nowhere.ptz", "data", str(VAL), "x" * 300, "a\nb")),
    *((dict(RESUME=path), ["resume="]) for path in ("..", "/", "../data", "a\nb")),
    *((dict(RESUME=path), ["there is no logs"]) for path in ("nowhere", "x" * 300))]


def refused(capsys, env, argv, words):
    """Runs main and holds it to the contract of a refusal: exit 2, one line with the words, no traceback, no
    step, no path of this machine, nothing left behind."""
    had = sorted(Path(".").rglob("*"))
    toy = toy_of(env["PRESET"]) if "PRESET" in env else TOY
    assert train_gpt.main(argv, toy | {"ITERATIONS": "1"} | env) == 2
    out, err = capsys.readouterr()
    assert err.startswith("train_gpt: ") and err.count("\n") == 1 and all(word in err for word in words), err
    assert "Traceback" not in out and "step:1/" not in out and str(Path.cwd()) not in err + out
    assert sorted(Path(".").rglob("*")) == had


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data(case, workplace, smaller, capsys):
    damage, words, *env = BAD_DATA[case]
    if damage:
        damage(smaller)
    refused(capsys, env[0] if env else {}, [], words)


@pytest.mark.parametrize("given, words", BAD_SETTINGS)
def test_bad_settings(given, words, tiny_data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(tiny_data / "data")
    refused(capsys, *(({}, [given]) if isinstance(given, str) else (given, [])), words)


def test_a_run_folder_is_used_once(workplace, capsys):
    taken = Path("logs/taken")
    taken.mkdir(parents=True)
    (taken / "train.log").write_text("kept\n")
    refused(capsys, {"RUN_ID": "taken"}, [], ["run_id='taken'"])
    refused(capsys, {}, ["--model-tag=taken"], ["run_id='taken'"])
    assert (taken / "train.log").read_text() == "kept\n"
    refused(capsys, {"RUN_ID": "x" * 300}, [], ["logs/xxx"])
    shutil.rmtree("logs")
    Path("logs").write_text("a file")
    refused(capsys, {"RUN_ID": "x"}, [], ["logs/x"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_logs_without_permission(workplace, capsys):
    Path("logs").mkdir(mode=0o500)
    refused(capsys, {"RUN_ID": "x"}, [], ["logs/x", "Permission denied"])


# -------------------------------------------------------------------------------- EVAL_FROM
def payload_of(raw):
    """What torch.load finds in the bytes of an artifact, final_model.pt or checkpoint.pt."""
    return torch.load(io.BytesIO(raw if raw[:2] == b"PK" else zlib.decompress(raw)), weights_only=True)


def packed(payload, squeeze=True):
    torch.save(payload, buffer := io.BytesIO())
    return zlib.compress(buffer.getvalue(), 1) if squeeze else buffer.getvalue()


def with_value(part, name, value):
    """artifact -> the same with another value in its shape or tensors; None: without it."""
    def change(artifact):
        payload = payload_of(artifact)
        values = payload[part] | {name: value}
        payload[part] = {name: value for name, value in values.items() if value is not None}
        return packed(payload)
    return change


class Evil:
    """Pickles to a call of os.system."""
    def __reduce__(self):
        return os.system, ("touch executed",)


BAD_ARTIFACTS = {
    "empty": lambda a: b"",
    "truncated": lambda a: a[:-100],
    "another zlib stream": lambda a: zlib.compress(b"hello" * 1000),
    "a flipped bit of a torch file": lambda a: zlib.decompress(a).replace(b"\x80", b"\x81", 1),
    "code in the pickle": lambda a: packed({"shape": Evil(), "tensors": {}}),
    "no shape": lambda a: packed({"tensors": payload_of(a)["tensors"]}),
    "a list": lambda a: packed([1, 2, 3]),
    "a constant less": with_value("shape", "num_heads", None),
    "another width": with_value("shape", "model_dim", 64),
    "more layers": with_value("shape", "num_layers", 3),
    "a Boolean of text": with_value("shape", "key_offset", "0"),
    "endless layers": with_value("shape", "num_layers", 10**9),
    "a tensor less": with_value("tensors", "blocks.1.query", None),
    "a tensor more": with_value("tensors", "blocks.1.extra", torch.zeros(3)),
    "a tensor that would be broadcast": with_value("tensors", "blocks.1.query", torch.zeros(1, 32)),
    "nan weights": with_value("tensors", "blocks.1.query", torch.full((32, 32), torch.nan)),
    "inf weights": with_value("tensors", "blocks.0.qk_gain", torch.tensor([1.0, torch.inf]))}


@pytest.mark.parametrize("case", BAD_ARTIFACTS)
def test_bad_artifacts(case, artifact, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("model.ptz").write_bytes(BAD_ARTIFACTS[case](artifact))
    refused(capsys, {"EVAL_FROM": "model.ptz"}, [], ["model.ptz is damaged or not from"])


def test_a_good_artifact_is_scored_and_not_contradicted(workplace, artifact, smaller, capsys):
    """What the cases above damage is whole to begin with."""
    Path("model.ptz").write_bytes(artifact)
    refused(capsys, {"EVAL_FROM": "model.ptz", "NUM_LAYERS": "3"}, [], ["num_layers=", "2"])
    shape = ("NUM_LAYERS", "MODEL_DIM", "NUM_HEADS", "TRAIN_SEQ_LEN", "TRAIN_BATCH_TOKENS",
             "COUNT_BITS")
    env = {name: text for name, text in TOY.items() if name not in shape}
    assert train_gpt.main(["--eval-from=model.ptz", "--run-id=scored"], env) == 0
    assert "final_int8_zlib_roundtrip_exact val_loss" in capsys.readouterr().out
    assert json.loads(Path("logs/scored/result.json").read_text())["stop_reason"] == "eval_from"
    MANIFEST.unlink()
    Path("other.model").write_bytes(smaller)
    env = {"EVAL_FROM": "model.ptz", "TOKENIZER_PATH": "other.model"}
    refused(capsys, env, [], ["vocab_size=512", "400"])


# -------------------------------------------------------------------------------- as a command
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_refusal_of_the_command(ranks, tiny_data, tmp_path):
    """Under torchrun the exit code is torchrun's; our sentence comes once, from rank 0."""
    (tmp_path / "data").symlink_to(tiny_data / "data")
    done = run_cli(tmp_path, "--val-tokens=99999999", ranks=ranks, env=TOY)
    ours = [line for line in done.err.splitlines() if "train_gpt: " in line]
    assert done.code != 0 and len(ours) == 1 and "100000000" in ours[0] and not (tmp_path / "logs").exists()
    assert "train_gpt.py\", line" not in done.err
    assert ranks or done.code == 2 and len(done.err.splitlines()) == 1


# -------------------------------------------------------------------------------- after the start
def failed(capsys, env, words):
    """Runs main and holds it to the contract of a failure. Returns train.log."""
    toy = toy_of(env["PRESET"]) if "PRESET" in env else TOY
    assert train_gpt.main([], toy | {"RUN_ID": "failed"} | env) == 1
    out, err = capsys.readouterr()
    log = Path("logs/failed/train.log").read_text()
    assert err == f"train_gpt: {log.splitlines()[-1]}\n" and all(word in err for word in words)
    assert "Traceback" not in out and not Path("logs/failed/result.json").exists()
    return log


@pytest.mark.parametrize("value, only_once", [(torch.nan, False), (torch.inf, False), (torch.nan, True)])
def test_a_loss_that_is_not_finite_ends_the_run(value, only_once, workplace, monkeypatch, capsys):
    """Of step 13, logged at 20: the run ends there, 80 steps early, even if the losses after it are fine."""
    steps = []
    train_step = train_gpt.train_step

    def breaking(*args):
        steps.append(0)
        return train_step(*args) * (value if len(steps) == 13 or len(steps) > 13 and not only_once else 1)

    monkeypatch.setattr(train_gpt, "train_step", breaking)
    log = failed(capsys, {"ITERATIONS": "100"}, ["not finite", "step 20"])
    assert "step:10/100" in log and "step:30/100" not in log and len(steps) == 20


def test_a_run_that_diverges(workplace, capsys):
    """The largest learning rate, with a decay that multiplies weights instead."""
    settings = dict(PRESET="golf_plus", LOOP_LAYERS="0", PACKING="rows", MATRIX_LR="10", WEIGHT_DECAY="1e6")
    failed(capsys, settings, ["lower the learning rates"])


def test_a_bad_later_shard_is_refused_before_training(workplace, capsys):
    """One token of it, which the run would not have come to."""
    patch(LATER, 1024 + 2 * 30_000, b"\xff\xff")
    refused(capsys, {"SHUFFLE": "0"}, [], [LATER.name, "65535", "512"])


# -------------------------------------------------------------------------------- data that have changed
SHORT = TOY | dict(ITERATIONS="4", SAVE_EVERY="2", RUN_ID="first")


def call(capsys, settings, *argv):
    """main() -> its exit code and what it says."""
    capsys.readouterr()
    code = train_gpt.main([*argv], settings)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out + err


@pytest.fixture
def stopped(workplace, capsys):
    """A run of the toy dataset with checkpoints, as if it had been killed after its last one."""
    assert call(capsys, SHORT)[0] == 0
    Path("logs/first/result.json").unlink()
    return workplace


def resumed(capsys, **settings):
    return call(capsys, settings | dict(RESUME="first"))


def other_val(s=None):
    rewrite_tokens(VAL, np.roll(train_gpt.open_shard(VAL), 64))


OTHER_DATA = {  # how the dataset is prepared again under its name, what the sentence names
    "other text": (lambda s: edit_manifest(text_fingerprint="another"), ["text"]),
    "other text and val": (lambda s: (edit_manifest(text_fingerprint="another"), other_val()),
                           ["text", "validation text"]),
    "another tokenizer of the same size": (other_tokenizer, ["tokenizer"]),
    "fewer shards": (lambda s: keep_files(slice(0, 3)), ["number of train tokens"]),
    "other val": (other_val, ["validation text"])}


@pytest.fixture(scope="module")
def other_512():
    """A tokenizer of 512 pieces that the toy dataset does not have. Its bytes of val are other ones."""
    return helpers.train_tokenizer([text.upper() for text in helpers.library_documents(60_000)], 512)


@pytest.mark.parametrize("case", OTHER_DATA)
def test_a_resumed_run_refuses_other_data(case, other_512, stopped, capsys):
    change, words = OTHER_DATA[case]
    set_tokenizer(lossless=False)
    change(other_512)
    log = Path("logs/first/train.log").read_bytes()
    code, said = resumed(capsys)
    assert code == 2 and f"resume=first was trained on toy; toy here has another {words[0]}" in said
    assert all(word in said for word in words) and "OTHER_DATA=1" in said.splitlines()[-1]
    assert Path("logs/first/train.log").read_bytes() == log
    code, said = resumed(capsys, OTHER_DATA="1")
    assert code == 0 and "warning: resume=first was trained on toy" in said


def test_a_resumed_run_takes_the_same_data_by_any_name(stopped, capsys):
    shutil.move("data/datasets/toy", "data/datasets/moved")
    code, said = resumed(capsys, DATA_PATH="data/datasets/moved")
    assert code == 0 and "trained on" not in said


@pytest.fixture
def scored(workplace, other_512, capsys):
    """A run of the dataset `mine`, beside an `embedded` with another tokenizer of the same size -> settings
    that score it."""
    shutil.copytree(DATA, "data/datasets/mine")
    shutil.copytree(DATA, "data/datasets/embedded")
    path = Path("data/datasets/embedded/manifest.json")
    manifest = json.loads(path.read_text())
    manifest["tokenizer"] |= dict(path="embedded.model", sha256=hashlib.sha256(other_512).hexdigest(),
                                  lossless=False)
    path.write_text(json.dumps(manifest))
    path.with_name("embedded.model").write_bytes(other_512)
    assert call(capsys, SHORT | dict(DATA_PATH="data/datasets/mine"))[0] == 0
    names = ("COMPILE", "DEVICE", "DTYPE", "DATA_FINGERPRINT", "VAL_TOKENS", "SAMPLE_TOKENS")
    return {name: SHORT[name] for name in names} | dict(VAL_TOKENS="2048")


FILES = ["final_model.int8.ptz", "final_model.pt", "checkpoint.pt"]


@pytest.mark.parametrize("file", FILES)
def test_a_model_is_scored_on_its_own_dataset(file, scored, capsys):
    """It is found by its name; with another tokenizer the model is refused, also for samples alone."""
    env = scored | dict(EVAL_FROM=f"logs/first/{file}")
    code, said = call(capsys, env, "--run-id=own")
    assert code == 0 and "data: data/datasets/mine, which the model was trained on" in said
    given = call(capsys, env | dict(DATA_PATH="data/datasets/mine"), "--run-id=given")[1]
    scores = [json.loads(Path(f"logs/{run_id}/result.json").read_text())["val_loss"]
              for run_id in ("own", "given")]
    assert scores[0] == scores[1] and "which the model" not in given
    for more in ([], ["--sample=def "]):
        code, said = call(capsys, env | dict(DATA_PATH="data/datasets/embedded"), *more)
        assert code == 2 and "embedded here has another tokenizer: set DATA_PATH" in said
    code, said = call(capsys, env | dict(DATA_PATH="data/datasets/embedded", OTHER_DATA="1"))
    assert code == 0 and "warning: eval_from=" in said
    shutil.rmtree("data/datasets/mine")
    code, said = call(capsys, env)
    assert code == 2 and "was trained on mine; embedded here has another tokenizer" in said


def test_a_model_with_the_tokenizer_of_another(scored, capsys):
    """... that TOKENIZER_PATH names, or with another val text: both are refused."""
    env = scored | dict(EVAL_FROM=f"logs/first/{FILES[0]}", DATA_PATH="data/datasets/mine")
    path = Path("data/datasets/mine/manifest.json")
    manifest = json.loads(path.read_text())
    manifest["tokenizer"] = dict(vocab_size=512, bos_id=1)
    path.write_text(json.dumps(manifest))
    code, said = call(capsys, env | dict(TOKENIZER_PATH="data/datasets/embedded/embedded.model"))
    assert code == 2 and "mine here has another tokenizer: set DATA_PATH (and TOKENIZER_PATH)" in said
    assert call(capsys, env | dict(TOKENIZER_PATH=str(MODEL)))[0] == 0
    entry = write_shard(path.with_name(VAL.name), np.roll(train_gpt.open_shard(VAL), 64))
    manifest["files"] = [f | entry if f["path"] == VAL.name else f for f in manifest["files"]]
    path.write_text(json.dumps(manifest))
    code, said = call(capsys, env | dict(TOKENIZER_PATH=str(MODEL)))
    assert code == 2 and "mine here has another validation text" in said


def test_models_that_do_not_say_what_they_were_trained_on(scored, capsys):
    """As those written before this was kept."""
    payload = torch.load("logs/first/final_model.pt", weights_only=True)
    del payload["data"]
    torch.save(payload, "old.pt")
    code, said = call(capsys, scored | dict(EVAL_FROM="old.pt", DATA_PATH="data/datasets/mine"))
    assert code == 0 and "eval_from=old.pt is older than the digests of data" in said
    assert train_gpt.load_model("old.pt")[0].trained_on is None


# -------------------------------------------------------------------------------- a folder that is in use
@pytest.fixture
def busy(stopped):
    """The run's folder as a process has it that still trains; close it to end that."""
    place = os.open("logs/first", os.O_RDONLY)
    fcntl.flock(place, fcntl.LOCK_EX)
    yield lambda: os.close(place)


def hold(folder):
    """As a second trainer would."""
    saver = train_gpt.Saver()
    try:
        saver.hold(Path(folder))
    finally:
        saver.release()


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.mark.parametrize("argv", [[], ["--dry-run"], ["--save-every=1"]])
def test_a_run_that_still_trains_is_not_resumed(argv, busy, capsys):
    before = contents("logs/first")
    code, said = call(capsys, dict(RESUME="first"), *argv)
    assert code == 2 and said == (
        "train_gpt: logs/first belongs to a run that is still going: stop that or wait for its end\n")
    assert contents("logs/first") == before
    busy()
    assert resumed(capsys)[0] == 0


def test_a_process_that_dies_leaves_its_folder(stopped, capsys):
    """However it dies: here by kill -9."""
    child = os.fork()
    if child == 0:
        train_gpt.Saver().hold(Path("logs/first"))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert resumed(capsys)[0] == 0


def test_a_running_trainer_holds_its_folder(stopped, capsys, monkeypatch):
    """Until its end: a first run, and a resumed one."""
    tried = []

    def train_step(*args):
        with pytest.raises(train_gpt.Refused, match="still going"):
            hold(f"logs/{run_id}")
        tried.append(run_id)
        return step(*args)

    step = train_gpt.train_step
    monkeypatch.setattr(train_gpt, "train_step", train_step)
    run_id = "second"
    assert call(capsys, SHORT | dict(RUN_ID=run_id))[0] == 0 and len(tried) == 4
    Path("logs/second/result.json").unlink()
    Path("logs/second/checkpoint.pt").unlink()      # that of step 2 stays
    assert call(capsys, dict(RESUME=run_id))[0] == 0 and len(tried) == 6
    hold(f"logs/{run_id}")


def test_a_file_system_without_locks(stopped, capsys, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(train_gpt.fcntl, "flock", flock)
    assert resumed(capsys)[0] == 0


@pytest.mark.parametrize("sent", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_training_saves_a_checkpoint(sent, workplace, capsys, monkeypatch):
    """USR1 is what Slurm can send before a job's time is up."""
    steps = []
    step = train_gpt.train_step

    def train_step(*args):
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), sent)
        return step(*args)

    monkeypatch.setattr(train_gpt, "train_step", train_step)
    code, said = call(capsys, TOY | dict(ITERATIONS="5", RUN_ID="first"))
    assert code == 1 and said.endswith("train_gpt: RESUME=first\n")
    code, said = resumed(capsys)
    assert code == 0 and "resume: from step 3 " in said
