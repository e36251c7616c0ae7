"""Bad input to the trainer itself: one clear sentence and exit 2 before training; what breaks later: one
sentence and exit 1. What ./run.sh finds besides, by a look at all of the data: tests/test_preflight.py."""
import errno
import io
import json
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

import helpers
import train_gpt
from helpers import (
    DATA, LATER, MANIFEST, MODEL, TOY, TRAIN, VAL, cut, edit_manifest, other_tokenizer, patch, rewrite_tokens,
    toy_config, toy_of, write_shard)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def artifact(tiny_data):
    """Bytes of an artifact of TOY's shape with random weights."""
    model = toy_config(tiny_data, vocab_size=512).make_model()
    helpers.init_parameters(model, 0)
    return zlib.compress(train_gpt.pack_artifact(model))


# -------------------------------------------------------------------------------- ways to damage data


def token_512(path):
    """A token outside the vocabulary."""
    patch(path, 1024 + 2 * 777, b"\x00\x02")


# What is done to the data (s: the smaller tokenizer), what the sentence holds, constants. tests/test_fuzz.py
# damages the same files at random places.
BAD_DATA = {
    "no folder": (lambda s: shutil.rmtree(DATA), ["data/datasets/toy", "./run.sh data"]),
    "no embedded corpus": (None, ["./run.sh data"], dict(DATA_PATH="data/datasets/embedded")),
    "empty folder": (lambda s: (shutil.rmtree(DATA), DATA.mkdir()), ["no shards", "toy"]),
    "wrong magic": (lambda s: patch(VAL, 0, b"GGUF"), [f"{VAL.name} is damaged"]),
    "truncated train shard": (lambda s: cut(TRAIN, 30_001), [f"{TRAIN.name} is damaged"]),
    "truncated val shard": (lambda s: cut(VAL, 5_000), [f"{VAL.name} is damaged"]),
    "empty train shard": (lambda s: cut(TRAIN, 0), [f"{TRAIN.name} is damaged"]),
    "shard with a tail": (lambda s: TRAIN.write_bytes(TRAIN.read_bytes() + b"\0\0"), [TRAIN.name]),
    "header says more": (lambda s: patch(TRAIN, 8, (999_999).to_bytes(4, "little")), [TRAIN.name]),
    "shard is a folder": (lambda s: (TRAIN.unlink(), TRAIN.mkdir()), [TRAIN.name, "IsADirectoryError"]),
    "train shard of zeros": (lambda s: patch(TRAIN, 1024 + 40_000, bytes(48_000)),
                             [f"more than half of shard {TRAIN.name} is one token"]),
    "token id in val": (lambda s: token_512(VAL), ["val holds token 512, but vocab_size is 512"]),
    "token id in val, no manifest": (lambda s: (MANIFEST.unlink(), token_512(VAL)), ["val", "token 512"],
                                     dict(TOKENIZER_PATH=str(MODEL))),
    "token ids in train": (lambda s: patch(LATER, 1024 + 20_000, b"\xff\xff" * 500),
                           [LATER.name, "token 65535", "vocab_size is 512"]),
    "tokenizer of another size": (other_tokenizer, ["toy", "400"]),
    "TOKENIZER_PATH of another size": (lambda s: Path("other.model").write_bytes(s), ["512", "400"],
                                       dict(TOKENIZER_PATH="other.model")),
    "smaller tokenizer, no manifest": (lambda s: (MANIFEST.unlink(), MODEL.write_bytes(s)), ["val", "400"],
                                       dict(TOKENIZER_PATH=str(MODEL))),
    "tokenizer cut, no manifest": (lambda s: (MANIFEST.unlink(), cut(MODEL, 3000)), ["tokenizer of toy"],
                                   dict(TOKENIZER_PATH=str(MODEL))),
    "TOKENIZER_PATH missing": (None, ["the tokenizer of toy is damaged or missing", "nowhere.model"],
                               dict(TOKENIZER_PATH="nowhere.model")),
    "no tokenizer, no VOCAB_SIZE": (lambda s: MANIFEST.unlink(),
                                    ["toy does not say how many tokens there are", "VOCAB_SIZE"]),
    "VOCAB_SIZE of another tokenizer": (None, ["vocab_size=300", "512"], dict(VOCAB_SIZE="300")),
    "no val split": (lambda s: VAL.unlink(), ["no shards", "toy"]),
    "no train split": (lambda s: [path.unlink() for path in DATA.glob("*_train_*")], ["no shards", "toy"]),
    "val_tokens beyond the split": (None, ["val_tokens=99999", "toy"], dict(VAL_TOKENS="99999")),
    "val of one token": (lambda s: rewrite_tokens(VAL, [1]), ["toy has 1 val tokens"], dict(VAL_TOKENS="0")),
    "train shorter than a sequence": (lambda s: ([path.unlink() for path in DATA.glob("*_train_*")],
                                                 write_shard(TRAIN, np.arange(64))), ["train tokens", "64"]),
    "no documents": (None, ["no token 65535 begins a document"],
                     dict(PRESET="gpt2", DEPTH="0", TARGET_PARAM_DATA_RATIO="0", CORE="0", BOS_ID="65535")),
    "manifest cut": (lambda s: cut(MANIFEST, 300), ["manifest.json"]),
    "a file without a path": (lambda s: edit_manifest(files=[{"split": "val"}]), ["manifest.json"]),
    "a manifest of another kind": (lambda s: MANIFEST.write_text("[1]"), ["manifest.json"])}
BAD_SETTINGS = [  # a flag or {constant: text}, what the sentence holds; more in tests/test_config.py
    ("--matrx-lr=0.1", ["--matrx-lr"]), ("golf", ["golf"]), ("--seed", ["--seed"]),
    (dict(MATRIX_LR="nan"), ["matrix_lr=nan"]), (dict(NUM_HEADS="5"), ["num_heads=5", "model_dim=32"]),
    (dict(DEVICE="cuda"), ["no GPU 0 here"]), (dict(PRESET="speedrun", MAX_DOC_LEN="-5"), ["max_doc_len=-5"]),
    *((dict(DATA_PATH=path), ["./run.sh data"]) for path in ("", "/", "data/datasets", "x" * 300, "a\nb")),
    *((dict(TOKENIZER_PATH=path), ["tokenizer"]) for path in ("x" * 300, "a\nb", "data/tokenizers")),
    *((dict(EVAL_FROM=path), [path[-8:].replace("\n", " ")]) for path in (
        "nowhere.ptz", "data", str(VAL), "x" * 300, "a\nb")),
    *((dict(RESUME=path), ["resume="]) for path in ("..", "/", "../data", "a\nb", "nowhere"))]


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
    assert (taken / "train.log").read_text() == "kept\n"
    shutil.rmtree("logs")
    Path("logs").write_text("a file")
    refused(capsys, {"RUN_ID": "x"}, [], ["logs/x cannot be written"])
    Path("logs").unlink()
    Path("logs").symlink_to("/nonexistent/scratch")
    refused(capsys, {"RUN_ID": "x"}, [], ["logs/x cannot be written", "is logs a link to nowhere?"])


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


DAMAGED = "model.ptz is damaged or not from this trainer"
BAD_ARTIFACTS = {       # {what is wrong: (how it is made, what the sentence says)}
    "empty": (lambda a: b"", DAMAGED),
    "truncated": (lambda a: a[:-100], DAMAGED),
    "another zlib stream": (lambda a: zlib.compress(b"hello" * 1000), DAMAGED),
    "a flipped bit of a torch file": (lambda a: zlib.decompress(a).replace(b"\x80", b"\x81", 1), DAMAGED),
    "code in the pickle": (lambda a: packed({"shape": Evil(), "tensors": {}}), DAMAGED),
    "no shape": (lambda a: packed({"tensors": payload_of(a)["tensors"]}), "model.ptz holds no model"),
    "a list": (lambda a: packed([1, 2, 3]), "model.ptz holds no model"),
    "no such preset": (with_value("shape", "preset", "x"), "preset='x' is none of tiny, "),
    "a constant more": (with_value("shape", "gone_since", 1), "tiny here has no gone_since"),
    "another width": (with_value("shape", "model_dim", 64), "of shape (512, 64)"),
    "more layers": (with_value("shape", "num_layers", 3), "has no blocks.2."),
    "a tensor less": (with_value("tensors", "blocks.1.query", None),
                      "has no blocks.1.query of shape (32, 32)"),
    "a tensor more": (with_value("tensors", "blocks.1.extra", torch.zeros(3)), "unknown tensors"),
    "a tensor that would be broadcast": (with_value("tensors", "blocks.1.query", torch.zeros(1, 32)),
                                         "has no blocks.1.query of shape (32, 32)")}


@pytest.mark.parametrize("case", BAD_ARTIFACTS)
def test_bad_artifacts(case, artifact, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make, sentence = BAD_ARTIFACTS[case]
    Path("model.ptz").write_bytes(make(artifact))
    refused(capsys, {"EVAL_FROM": "model.ptz"}, [], [sentence])


def test_a_mistake_in_a_recipe_is_not_called_a_damaged_file(artifact, tmp_path, monkeypatch, capsys):
    """Who writes a recipe gets the traceback of the mistake."""
    def make_model(cfg, *kernels):
        raise AttributeError("no attribute of this name")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_gpt.Tiny, "make_model", make_model)
    Path("model.ptz").write_bytes(artifact)
    assert train_gpt.main(["--eval-from=model.ptz"], {"DEVICE": "cpu"}) == 1
    err = capsys.readouterr().err
    assert "in make_model" in err and err.endswith("train_gpt: AttributeError: no attribute of this name\n")


@pytest.mark.parametrize("name, number", [("blocks.1.query", torch.nan), ("blocks.0.qk_gain", torch.inf)])
def test_weights_that_are_not_finite_have_no_score(name, number, workplace, artifact, capsys):
    payload = payload_of(artifact)
    payload["tensors"][name] = torch.full_like(payload["tensors"][name], number)
    Path("model.ptz").write_bytes(packed(payload))
    assert train_gpt.main(["--eval-from=model.ptz", "--run-id=scored"], of_no_shape()) == 1
    assert capsys.readouterr().err.endswith("val_loss is not finite: lower the learning rates\n")
    assert not Path("logs/scored/result.json").exists()


def of_no_shape():
    """TOY without the constants that a model file has."""
    shape = [f.name.upper() for f in train_gpt.fields(train_gpt.Tiny) if f.metadata["model"]]
    return {name: text for name, text in TOY.items() if name not in [*shape, "TRAIN_BATCH_TOKENS"]}


def test_a_good_artifact_is_scored_and_not_contradicted(workplace, artifact, smaller, capsys):
    """What the cases above damage is whole to begin with. What is typed counts, also where it is what the
    preset has."""
    Path("model.ptz").write_bytes(artifact)
    refused(capsys, {"EVAL_FROM": "model.ptz", "NUM_LAYERS": "3"}, [], ["the model has num_layers=2"])
    default = train_gpt.show(train_gpt.Tiny.model_dim)
    assert default != "32"
    refused(capsys, {"EVAL_FROM": "model.ptz", "MODEL_DIM": default}, [], ["the model has model_dim=32"])
    refused(capsys, {"EVAL_FROM": "model.ptz", "PRESET": "golf"}, [], ["the model has preset=tiny"])
    assert train_gpt.main(["--eval-from=model.ptz", "--run-id=scored"], of_no_shape()) == 0
    assert "final_int8_zlib_roundtrip_exact val_loss" in capsys.readouterr().out
    assert json.loads(Path("logs/scored/result.json").read_text())["stop_reason"] == "eval_from"
    MANIFEST.unlink()
    Path("other.model").write_bytes(smaller)
    env = {"EVAL_FROM": "model.ptz", "TOKENIZER_PATH": "other.model"}
    refused(capsys, env, [], ["vocab_size=512", "400"])


# -------------------------------------------------------------------------------- as a command
def test_ranks_that_do_not_divide_a_step(go):
    done = go(TOY, ranks=3)
    assert done.codes == [2, 2, 2] and not done.folder.exists()
    assert {*done.err.splitlines()} == {"train_gpt: 3 ranks do not divide the 16 sequences of a step"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dry_run_checks_and_writes_nothing(ranks, go):
    done = go(TOY | dict(DRY_RUN="1"), ranks=ranks)
    assert done.codes == ranks * [0] and not done.folder.exists()
    assert done.out.splitlines()[-1] == "dry run: constants, data and ranks fit together"
    done = go(TOY | dict(DRY_RUN="1", VAL_TOKENS="99999999"), ranks=ranks)
    assert done.codes == ranks * [2] and "val_tokens=99999999" in done.err


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


@pytest.mark.parametrize("value, only_once", [(torch.inf, False), (torch.nan, True)])
def test_a_loss_that_is_not_finite_ends_the_run(value, only_once, workplace, monkeypatch, capsys):
    """Of step 13, logged at 20: the run ends there, 80 steps early, even if the losses after it are fine."""
    steps = []      # two of the warmup first
    train_step = train_gpt.train_step

    def breaking(*args):
        steps.append(0)
        return train_step(*args) * (value if len(steps) == 15 or len(steps) > 15 and not only_once else 1)

    monkeypatch.setattr(train_gpt, "train_step", breaking)
    log = failed(capsys, {"ITERATIONS": "100"}, ["not finite", "step 20"])
    assert "step:10/100" in log and "step:30/100" not in log and len(steps) == 22


@pytest.mark.parametrize("settings, place", [
    ({"PRESET": "golf"}, TRAIN.name), ({"COUNT_ORDERS": "2"}, "a train shard")])
def test_a_token_beyond_the_vocabulary_that_a_run_comes_to(settings, place, workplace, capsys):
    """One of 44,001, which the look at each shard missed: in a batch, or when tiny counts n-grams."""
    token_512(TRAIN)
    log = failed(capsys, settings, [place, "token 512", "vocab_size is 512"])
    assert "step:1/" not in log


# -------------------------------------------------------------------------------- data that have changed
SHORT = TOY | dict(ITERATIONS="4", SAVE_EVERY="2", RUN_ID="first")


def call(capsys, settings, *argv):
    """main() -> its exit code and what it says."""
    capsys.readouterr()
    code = train_gpt.main([*argv], settings)
    train_gpt.catch_signals()       # those of training hold the run, and that its locked log
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out + err


@pytest.fixture(scope="module")
def first_run(tiny_data, tmp_path_factory):
    """A folder with a run of the toy dataset, as if it had been killed after its last checkpoint."""
    home = tmp_path_factory.mktemp("first")
    shutil.copytree(tiny_data / "data", home / "data")
    with pytest.MonkeyPatch.context() as context:
        context.chdir(home)
        assert train_gpt.main([], SHORT) == 0
    train_gpt.catch_signals()
    (home / "logs/first/result.json").unlink()
    return home


@pytest.fixture
def stopped(first_run, tmp_path, monkeypatch):
    """A copy of it, as the current folder."""
    monkeypatch.chdir(shutil.copytree(first_run, tmp_path, dirs_exist_ok=True))


def resumed(capsys, **settings):
    return call(capsys, settings | dict(RESUME="first"))


def other_val():
    rewrite_tokens(VAL, np.roll(train_gpt.open_shard(VAL), 64))


def other_train():
    """As many tokens, in another order."""
    rewrite_tokens(TRAIN, np.roll(train_gpt.open_shard(TRAIN), 64))


OTHER_DATA = {  # how the dataset is prepared again under its name, what the sentence names
    "other text": (lambda s: edit_manifest(text_fingerprint="another"), "text"),
    "another tokenizer of the same size": (other_tokenizer, "val tokens or tokenizer"),
    "fewer shards": (lambda s: LATER.unlink(), "number of train tokens, train tokens"),
    "other train": (lambda s: other_train(), "train tokens"),
    "other val": (lambda s: other_val(), "val tokens or tokenizer")}


@pytest.mark.parametrize("case", OTHER_DATA)
def test_a_resumed_run_refuses_other_data(case, other_512, stopped, capsys):
    change, names = OTHER_DATA[case]
    change(other_512)
    log = Path("logs/first/train.log").read_bytes()
    code, said = resumed(capsys)
    assert code == 2 and f"resume=first was trained on toy, from which toy differs in its {names}: " in said
    assert "OTHER_DATA=1" in said.splitlines()[-1]
    assert Path("logs/first/train.log").read_bytes() == log
    code, said = resumed(capsys, OTHER_DATA="1")
    assert code == 0 and "resume: from step 4 " in said


def test_a_resumed_run_takes_the_same_data_by_any_name(stopped, capsys):
    shutil.move("data/datasets/toy", "data/datasets/moved")
    code, said = resumed(capsys, DATA_PATH="data/datasets/moved")
    assert code == 0 and "trained on" not in said


@pytest.fixture
def scored(stopped):
    """A run of the toy dataset -> settings that score it."""
    names = ("COMPILE", "DEVICE", "DTYPE", "DATA_FINGERPRINT", "DATA_PATH")
    return {name: SHORT[name] for name in names} | dict(VAL_TOKENS="2048")


FILES = ["final_model.int8.ptz", "final_model.pt", "checkpoint.pt"]


@pytest.mark.parametrize("file", FILES)
def test_a_model_is_scored_on_its_own_dataset(file, scored, other_512, capsys):
    """With another tokenizer or val text it is refused; train text that differs does not matter."""
    env = scored | dict(EVAL_FROM=f"logs/first/{file}")
    other_train()
    assert call(capsys, env, "--run-id=own")[0] == 0
    Path("other.model").write_bytes(other_512)
    code, said = call(capsys, env | dict(TOKENIZER_PATH="other.model"))
    other = f"{file} was trained on toy, from which toy differs in its val tokens or tokenizer: "
    assert code == 2 and other in said
    other_val()
    code, said = call(capsys, env)
    assert code == 2 and "set DATA_PATH (and TOKENIZER_PATH) to what it was trained on, or " in said
    assert call(capsys, env | dict(OTHER_DATA="1"))[0] == 0


def test_models_that_do_not_say_what_they_were_trained_on(scored, capsys):
    """As those written before this was kept."""
    payload = torch.load("logs/first/final_model.pt", weights_only=True)
    del payload["data"]
    torch.save(payload, "old.pt")
    other_val()
    assert call(capsys, scored | dict(EVAL_FROM="old.pt"))[0] == 0
    assert train_gpt.load_model("old.pt")[0].trained_on is None


# -------------------------------------------------------------------------------- a folder that is in use


def test_a_running_trainer_holds_its_folder(workplace, capsys, monkeypatch):
    """Until its end: a first run, and a resumed one."""
    tried = []

    def train_step(*args):
        log = Path("logs/second/train.log")
        if log.exists():
            with pytest.raises(train_gpt.Refused, match="still going"):
                train_gpt.Log(lead=True).open(log, "")
        tried.append(log.exists())
        return step(*args)

    step = train_gpt.train_step
    monkeypatch.setattr(train_gpt, "train_step", train_step)
    assert call(capsys, SHORT | dict(RUN_ID="second"))[0] == 0 and tried == [True] * 6   # two of the warmup
    Path("logs/second/result.json").unlink()
    assert call(capsys, dict(RESUME="second"))[0] == 0 and tried == [True] * 8
    train_gpt.Log(lead=True).open(Path("logs/second/train.log"), "")


def test_a_file_system_without_locks(stopped, capsys, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(train_gpt.fcntl, "flock", flock)
    assert resumed(capsys)[0] == 0


def test_the_end_of_a_slurm_job_saves_a_checkpoint(go):
    """USR1 is what Slurm can send before a job's time is up. Other signals: test_faults.py."""
    done = go(TOY, fault="usr1@step:3")
    assert done.code == 1 and done.met and done.err.endswith(f"train_gpt: RESUME={done.run_id}\n")
    assert (done.folder / "checkpoint.pt").exists()
