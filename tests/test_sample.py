"""./run.sh sample: which model is meant, by which script and tokenizer it is read, how samples are drawn,
where they end; what tools.run.show makes of a run that has ended."""
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece as spm
import torch

import train_gpt
from helpers import ROOT, TOY, train_tokenizer
from tools.run import sample, show
from records.judge.logs import Refused
from tools.run.sample import Opened, Settings, Text

RUN = TOY | dict(RUN_ID="first", SAVE_EVERY="10", VAL_TOKENS="2048")
FILES = ["final_model.int8.ptz", "final_model.pt", "checkpoint.pt"]


@pytest.fixture(scope="module")
def first(root):
    """The folder of a run of `tiny` at toy size, which saved checkpoints."""
    before = os.getcwd()
    os.chdir(root)
    try:
        assert train_gpt.main([], RUN) == 0
    finally:
        os.chdir(before)
    return root / "logs/first"


@pytest.fixture
def run(first, tmp_path, monkeypatch):
    """A copy of that run in a folder of its own, in which the test runs."""
    shutil.copytree(first, tmp_path / "logs/first")
    shutil.copytree(first.parent.parent / "data", tmp_path / "data")
    for name in ("DATA_PATH", "TOKENIZER_PATH", "DEVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "logs/first"


@pytest.fixture
def call(capsys):
    """words -> (exit code, {number: (prompt, continuation)}, what went to stderr) of ./run.sh sample"""
    def call(*words):
        capsys.readouterr()
        code = sample.main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert "Traceback" not in err and err.count("\n") == (code != 0)
        found = re.findall(r"^sample (\d+): (.*?)»(.*?)\n(?=sample \d+: |\Z)", out, re.M | re.S)
        return code, {int(number): (prompt, said) for number, prompt, said in found}, err

    return call


def scripted(sentence, V=300):
    """An Opened whose model continues a prompt with the tokens of a sentence, again and again."""
    def log_probs(tokens):
        wanted = torch.tensor(sentence)[torch.arange(tokens.size(1)) % len(sentence)]
        return torch.nn.functional.one_hot(wanted, V)[None].float().log_softmax(-1)

    return Opened(log_probs, SimpleNamespace(vocab_size=V), {}, "cpu")


@pytest.fixture(scope="module")
def text():
    """A tokenizer of 300 tokens, bytes among them."""
    model = train_tokenizer(["Tor ka mi lo ra ven"] * 9, 300, hard_vocab_limit=False)
    processor = spm.SentencePieceProcessor(model_proto=model)
    return Text(processor, 1, {1, 2}, None)


# ---------------------------------------------------------------- which model
@pytest.mark.parametrize("word, file", [
    ("first", FILES[0]), ("logs/first/", FILES[0]), ("logs/first/checkpoint.pt", "checkpoint.pt")])
def test_a_run_by_its_name_its_folder_and_its_files(word, file, run, call):
    """What the model says is in the run's samples.txt, too. A run counts before a folder of its name."""
    Path("first").mkdir()
    code, said, err = call(word, "def main(", "class", "--tokens=12", "--temperature=0")
    assert code == 0, err
    assert [prompt for prompt, _ in said.values()] == ["def main(", "class"]
    written = (run / "samples.txt").read_text()
    assert all(f"sample {i}: {prompt}»{words}\n" in written for i, (prompt, words) in said.items())
    assert written.startswith(f"logs/first/{file} --tokens=12 --temperature=0 ")


def test_a_run_that_still_trains_has_its_checkpoint(run, call):
    """... and no result.json yet; before its first checkpoint it has nothing to sample."""
    for name in (*FILES[:2], "result.json", "loss.png"):
        (run / name).unlink(missing_ok=True)
    code, said, err = call("first", "def ", "--tokens=3")
    assert code == 0 and said[1][0] == "def ", err
    (run / "checkpoint.pt").unlink()
    code, _, err = call("first", "def ")
    assert code == 2 and "holds no model" in err and "SAVE_EVERY_SECONDS=60" in err


def test_a_run_that_still_trains_keeps_its_gpu_to_itself(run, monkeypatch):
    devices = []

    def opened(path, device):
        devices.append(device)
        raise Refused("seen")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sample, "open_model", opened)
    for file in FILES:
        with pytest.raises(Refused, match="seen"):
            sample.sample_lines(run / file)
    assert devices == ["cuda", "cuda", "cpu"]


@pytest.mark.parametrize("words, sentence", [
    (["zzzzzz"], "'zzzzzz': here are first, "), (["first", "--tokens=0"], "--tokens is 1 or more"),
    (["first", "--temperature=nan"], "--temperature 0 or more"), (["first", "--seed=-1"], "--seed from 0"),
    (["logs/first/train.log"], "logs/first/train.log cannot be opened"), (["logs"], "logs holds no model")])
def test_what_a_user_can_cause_is_a_sentence(words, sentence, run, call):
    code, said, err = call(*words)
    assert code == 2 and sentence in err and err.startswith("sample: ") and not said
    assert not (run / "samples.txt").exists()


def test_a_prompt_that_is_not_utf8(run, call):
    code, said, err = call("first", "\udce9t\udce9")
    assert code == 1 and "utf-8" in err and not said


# ---------------------------------------------------------------- by which script
def test_a_model_is_read_by_the_script_that_wrote_it(run, call):
    """Another forward pass, the same parameters: this checkout's script would sample something else."""
    plain = call("first", "def ", "--tokens=8", "--temperature=0")[1]
    script = (run / "train_gpt.py").read_text()
    lines = script.replace("    return F.log_softmax(model.logits(model.hidden(tokens, context)), -1)",
                           "    return F.log_softmax(-model.logits(model.hidden(tokens, context)), -1)")
    assert lines != script
    (run / "other").mkdir()
    for name in ("final_model.int8.ptz", "result.json"):
        shutil.copy(run / name, run / "other")
    (run / "other/train_gpt.py").write_text(lines)
    turned = call("logs/first/other", "def ", "--tokens=8", "--temperature=0")[1]
    assert turned[1] != plain[1]
    (run / "other/train_gpt.py").unlink()      # without a script beside it: this checkout's
    assert call("logs/first/other", "def ", "--tokens=8", "--temperature=0")[1] == plain
    (run / "other").rename(run / "broken")
    (run / "broken/train_gpt.py").write_text("import no_such_module\n")
    code, _, err = call("logs/first/broken", "def ")
    assert code == 2 and "no_such_module" in err


# ---------------------------------------------------------------- by which tokenizer
def test_the_tokenizer_is_that_of_the_run(run, call, tmp_path, monkeypatch):
    """Not whatever lies at its place now; the environment says where it has gone."""
    tokenizer = tmp_path / "data/tokenizers/toy.model"
    (tmp_path / "mine.model").write_bytes(tokenizer.read_bytes())
    other = train_tokenizer(["other words to begin with"] * 9, 300, hard_vocab_limit=False)
    tokenizer.write_bytes(other)
    code, _, err = call("first", "def ")
    assert code == 2 and "of the dataset toy, is not here; TOKENIZER_PATH=PATH" in err
    monkeypatch.setenv("TOKENIZER_PATH", "mine.model")
    assert call("first", "def ", "--tokens=4")[0] == 0


def test_data_that_lie_elsewhere(run, call, tmp_path, monkeypatch):
    shutil.move(tmp_path / "data", tmp_path / "moved")
    assert call("first", "def ")[0] == 2
    monkeypatch.setenv("DATA_PATH", "moved/datasets/toy")
    code, said, err = call("first", "--tokens=4")
    assert code == 0 and len(said) == 3, err
    monkeypatch.delenv("DATA_PATH")
    monkeypatch.setenv("TOKENIZER_PATH", "moved/tokenizers/toy.model")
    code, _, err = call("first", "--tokens=4")
    assert code == 2 and 'no val documents here to begin with: give a "prompt"' in err


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_has_left_its_run_knows_its_data(file, run, call, tmp_path):
    """By what it holds of them."""
    (tmp_path / "alone").mkdir()
    shutil.copy(run / file, tmp_path / "alone")
    code, said, err = call(tmp_path / "alone" / file, "--tokens=4")
    assert code == 0 and len(said) == 3, err
    assert not (tmp_path / "alone/samples.txt").exists(), "that is no run's folder"


# ---------------------------------------------------------------- how samples are drawn
def test_greedy_samples_are_the_argmax_of_log_probs(run):
    """Also once the text is longer than a row of training; others are drawn by the seed, among the top_k."""
    opened = sample.open_model(run / FILES[1], "cpu")
    text = sample.open_text(run / FILES[1], opened)
    prompt = [1, *text.tokenizer.encode("def main(")]
    ids = [*prompt]
    with torch.no_grad():
        for _ in range(opened.cfg.train_seq_len):
            ids.append(int(opened.log_probs(torch.tensor([ids]))[0, -1].argmax()))

    def said(count, temperature, top_k=0, seed=1):
        return sample.generate(opened, prompt, Settings(count, temperature, top_k, seed), set()).said

    assert said(opened.cfg.train_seq_len, 0) == ids[len(prompt):]
    assert said(20, 1, 1) == said(20, 0) == said(20, 1e-3)
    assert said(20, 1, seed=1) == said(20, 1, seed=1) != said(20, 1, seed=2)
    with torch.no_grad():
        best = {*opened.log_probs(torch.tensor([prompt]))[0, -1].topk(3)[1].tolist()}
    assert {said(1, 50.0, 3, seed)[0] for seed in range(60)} == best
    assert len({said(1, 50.0, 0, seed)[0] for seed in range(30)}) > 20


@pytest.mark.parametrize("end", [1, 2])
def test_a_sample_ends_with_its_document(end, text):
    """At BOS or EOS; the text of the next document is no part of it."""
    words = text.tokenizer.encode("Tor ka")
    short = sample.generate(scripted([*words, end, *words]), [0], Settings(20, 0), text.ends)
    long = sample.generate(scripted([*words, *words]), [0], Settings(20, 0), text.ends)
    assert (short.said, short.ended) == (words, True)
    assert (len(long.said), long.ended) == (20, False)
    assert sample.sample_line(1, short._replace(prompt=[1]), text) == "sample 1: »Tor ka"


@pytest.mark.parametrize("documents, prompts", [
    ([3, 100, 4], [2, 24, 2]),      # with BOS: 4, 101, 5 tokens
    ([1, 1, 1, 1, 1, 1], [1, 1, 1]), ([200], [24]), ([0, 0, 60], [1, 1, 24])])
def test_default_prompts_are_of_one_document(documents, prompts, text, tmp_path):
    """At most half of it, and 24 tokens; three from all over val."""
    ids = np.concatenate([[1, *range(10, 10 + size)] for size in documents]).astype("<u2")
    (tmp_path / "x_val_000000.bin").write_bytes(bytes(1024) + ids.tobytes())
    found = sample.val_prompts(text._replace(folder=tmp_path))
    assert [len(ids) for ids in found] == prompts
    assert all(ids == [1, *range(10, 9 + len(ids))] for ids in found)


def test_default_prompts_are_from_all_over_val(text, tmp_path):
    ids = np.concatenate([[1, 10 + i, 200, 200] for i in range(90)]).astype("<u2")
    (tmp_path / "x_val_000000.bin").write_bytes(bytes(1024) + ids.tobytes())
    assert sample.val_prompts(text._replace(folder=tmp_path)) == [[1, 10], [1, 40], [1, 70]]


def test_whole_characters_only(text):
    """Of a character whose bytes were cut off nothing is shown; one that is complete stays."""
    smile = text.tokenizer.encode("é😀")
    assert all(text.tokenizer.is_byte(token) for token in smile)
    for count in range(1, len(smile) + 1):
        cut = sample.Sample([1], smile[:count], False)
        whole = bytes("é😀", "utf-8")[:count].decode(errors="ignore")
        assert sample.sample_line(1, cut, text) == f"sample 1: »{whole}"
    split = sample.Sample([1, *smile[:3]], smile[3:], True)       # a prompt of val may end anywhere
    assert sample.sample_line(1, split, text) == "sample 1: é»😀"


@pytest.mark.parametrize("words, padding, ended, shown", [
    ("Tor", [5000, 301], True, "Tor"),      # tokens that pad the vocabulary: an untrained model may draw them
    ("ka\nmi\nlo", [], False, "ka\nmi"), ("ka\nmi\nlo", [], True, "ka\nmi\nlo")])
def test_what_is_shown_of_a_sample(words, padding, ended, shown, text):
    """What was cut short ends with a whole line."""
    found = sample.Sample([1], [*padding, *text.tokenizer.encode(words), *padding], ended)
    assert sample.sample_line(3, found, text) == f"sample 3: »{shown}"


# ---------------------------------------------------------------- the programs
def shown(folder, capsys):
    capsys.readouterr()
    code = show.main([str(folder)])
    out, err = capsys.readouterr()
    return code, out, err


def test_what_is_shown_after_a_run(run, capsys):
    """Samples, which samples.txt has, too, loss.png, the screen with the files that are there."""
    (run / "samples.txt").write_text("of an earlier showing\n")
    code, out, err = shown("logs/first", capsys)
    assert (code, err) == (0, "")
    written = (run / "samples.txt").read_text()
    head, _, samples = written.partition("\n")
    assert head == "logs/first/final_model.int8.ptz --tokens=96 --temperature=0.8 --top-k=0 --seed=1337"
    assert out.startswith(samples) and len(re.findall(r"^sample [123]: ", samples, re.M)) == 3
    assert (run / "loss.png").stat().st_size > 5000
    result = json.loads((run / "result.json").read_text())
    assert f"val_loss_partial {result['val_loss_partial']:.4f} after 20 steps" in out
    assert ("\nin logs/first/: train.log, result.json, samples.txt, loss.png, train_gpt.py, "
            "final_model.int8.ptz (0.") in out
    assert '\nmore samples: ./run.sh sample first "a prompt" "another one"\n' in out


def test_what_cannot_be_shown_is_a_line(run, capsys, monkeypatch, tmp_path):
    """Neither ends with an error, and neither is listed."""
    (tmp_path / "data/tokenizers/toy.model").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (run / "loss.png").unlink(missing_ok=True)
    code, out, err = shown("logs/first", capsys)
    assert (code, err) == (0, "")
    first, second = out.splitlines()[:2]
    assert first.startswith("samples: none (no samples of ") and "tokenizer" in first
    assert second.startswith("loss.png: not drawn (")
    assert "in logs/first/: train.log, result.json, train_gpt.py, final_model.int8.ptz (" in out
    assert "more samples" not in out


def test_who_stops_the_samples_still_sees_the_rest(run, capsys, monkeypatch):
    monkeypatch.setattr(show, "sample_lines", raises(KeyboardInterrupt()))
    code, out, err = shown("logs/first", capsys)
    assert (code, err) == (0, "") and out.startswith("samples: none (interrupted)\n")
    assert "loss.png" in out and "\nnext: " in out


@pytest.mark.parametrize("error, code, said", [
    (KeyboardInterrupt(), 130, ""), (torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate"), 1,
     "sample: OutOfMemoryError: CUDA out of memory.\n")])
def test_what_stops_samples_is_no_traceback(error, code, said, run, capsys, monkeypatch):
    monkeypatch.setattr(sample, "sample_lines", raises(error))
    capsys.readouterr()
    assert (sample.main(["first"]), capsys.readouterr().err) == (code, said)


def raises(error):
    """A function that raises it."""
    def raising(*_):
        raise error

    return raising


def test_only_a_run_that_has_ended_is_shown(run, capsys):
    (run / "result.json").unlink()
    for folder in ("logs/first", "logs/nowhere"):
        code, out, err = shown(folder, capsys)
        assert (code, out) == (2, "") and err.startswith(f"show: {folder} is no run that has ended")


def test_the_screen_of_a_terminal(run, capsys, monkeypatch):
    """The first lines of each sample; samples.txt has the rest."""
    monkeypatch.setattr(show, "sample_lines", lambda model: ["sample 1: def »f(x):" + 9 * "\n    return x"])
    monkeypatch.setattr(show, "draw_run", lambda *_: None)
    lines = [*show.show_run(run, terminal=True)]
    assert lines[0].count("return x") == 4 and lines[-1].startswith("next: ")
    assert (run / "samples.txt").read_text().count("return x") == 9


RESULT = dict(
    preset="tiny", val_loss=2.0077, val_bpb=1.21635559, core=None, steps=1033, tokens=4231168,
    train_time_ms=119969, tok_per_s=35269, hardware="2 ranks x 1 threads of EPYC",
    overrides={"matrix_lr": ["0.03", "0.02"]})


def test_mfu_in_the_result(tmp_path):
    """The launcher adds it, of a run on GPUs: not on a CPU, of a scored file, or where a run was resumed on
    other GPUs."""
    golf = {name: train_gpt.show(value) for name, value in vars(train_gpt.preset_config("golf")).items()}
    ran = RESULT | dict(preset="golf", config=golf, tok_per_s=49_152 / 0.0357)
    path = tmp_path / "result.json"
    (tmp_path / "final_model.pt").write_bytes(b"")

    def shown_mfu(**changes):
        path.write_text(json.dumps(ran | changes))
        lines = [*show.show_run(tmp_path, terminal=False)]
        result = json.loads(path.read_text())
        assert any(line.startswith("  mfu:") for line in lines) == ("mfu" in result)
        return {name: result[name] for name in ("mfu", "mfu_dtype") if name in result}

    h100 = "1x NVIDIA H100 80GB HBM3"
    assert shown_mfu(hardware=h100) == dict(mfu=pytest.approx(0.457, abs=5e-4), mfu_dtype="bf16")
    assert shown_mfu(hardware="1x NVIDIA Made Up") == dict(mfu=None, mfu_dtype="bf16")
    assert shown_mfu() == shown_mfu(hardware=h100, steps=0) == {}
    starts = [dict(kind="start", hardware=name) for name in ("8x NVIDIA H100 80GB HBM3", h100)]
    (tmp_path / "events.jsonl").write_text("".join([json.dumps(start) + "\n" for start in starts]))
    assert shown_mfu(hardware=h100) == {}


def test_the_distance_to_the_record_and_to_a_plain_gpt():
    lower = dict(name="the record", metric="val_bpb", better="lower", value=1.2, about="x, 5 seeds")
    assert show.distance(RESULT, lower) == "0.0164 behind the record: val_bpb 1.2 (x, 5 seeds)"
    plain = lower | dict(name="a plain GPT", value=1.6039)
    assert show.distance(RESULT, plain) == "0.3875 ahead of a plain GPT: val_bpb 1.6039 (x, 5 seeds)"
    assert show.distance(RESULT | {"val_bpb": None}, lower) == "the record: val_bpb 1.2 (x, 5 seeds)"
    race = lower | dict(metric="val_loss", value=3.28, seconds=132.2144)
    assert show.distance(RESULT, race) == (
        "12.2454 s ahead of the record: 132.2144 s to val_loss 3.28 (x, 5 seeds)")
    assert show.distance(RESULT | {"val_loss": 3.3}, race) == (
        "0.0200 short of val_loss 3.28; the record: 132.2144 s to val_loss 3.28 (x, 5 seeds)")
    core = lower | dict(metric="core", better="higher", value=0.25, seconds=100)
    for value, words in ((0.2, "0.0500 short of core 0.25; "), (0.3, "19.9690 s behind ")):
        assert show.distance(RESULT | {"core": value}, core) == (
            f"{words}the record: 100 s to core 0.25 (x, 5 seeds)")


@pytest.mark.parametrize("name", ["data_path", "val_tokens", "max_wallclock_seconds", "iterations"])
def test_another_game_is_not_compared(name):
    assert show.goals_of(RESULT)
    assert not show.goals_of(RESULT | {"overrides": {name: ["a", "b"]}})


@pytest.mark.parametrize("proxy, overrides, following", [
    ("", dict(matrix_lr=["0.03", "0.02"]), "next: better, or luck? ./run.sh record compare trains both"),
    ("", dict(seed=["1337", "7"]), "next: change a number, say ./run.sh MATRIX_LR=0.02, and compare: docs/"),
    ("1", {}, 'next: ./run.sh record try "what it is" NAME=value --preset tiny --proxy 48 trains the ')])
def test_the_screen_of_a_run(tmp_path, monkeypatch, proxy, overrides, following):
    monkeypatch.setenv("PROXY", proxy)
    for name in ("train.log", "final_model.int8.ptz"):
        (tmp_path / name).write_bytes(bytes(2_500_000))
    result = RESULT | dict(overrides=overrides, config=dict(model_dim="48"))
    _, *lines = show.end_lines(tmp_path, result)
    assert lines[0] == ("val_bpb 1.2164, val_loss 2.0077 after 1,033 steps, 4,231,168 tokens, 120.0 s "
                        "(35,269 tok/s)")
    record, plain = lines[1:3]
    newest = max((ROOT / "records/track_tiny").iterdir()).name.partition("_")[2]
    about = rf"\({newest}, 5 seeds at [\d,]+ tok/s\)"
    assert re.fullmatch(rf"  0\.\d+ behind the record: val_bpb 0\.\d+ {about}", record)
    assert plain.startswith("  0.2057 ahead of a plain GPT: val_bpb 1.4221 (")
    assert lines[3] == f"in {tmp_path}/: train.log, final_model.int8.ptz (2.5 MB)"
    assert lines[4].startswith(following) and not lines[5:]


def test_a_partial_loss_is_explained(tmp_path):
    start = dict(kind="start", config=dict(val_tokens="512"), torch="2", hardware="a CPU",
                 data=dict(fingerprint="x", val_tokens=1001), overrides=dict(val_tokens=["0", "512"]))
    score = dict(kind="score", tag="final_model", val_loss=3.4, val_bpb=None)
    (tmp_path / "events.jsonl").write_text(json.dumps(start) + "\n" + json.dumps(score) + "\n")
    (tmp_path / "final_model.pt").write_bytes(b"")
    lines = [*show.end_lines(tmp_path, RESULT | start | dict(val_loss_partial=3.4))]
    assert lines[2].startswith("val_loss_partial: the loss on ") and "not with records" in lines[2]


def test_the_screen_of_a_scored_file(tmp_path, capsys):
    """EVAL_FROM has its score and folder, no samples, no picture, no training to speak of."""
    scored = RESULT | dict(steps=0, tokens=0, train_time_ms=0, config={"eval_from": "logs/b/final_model.pt"})
    (tmp_path / "result.json").write_text(json.dumps(scored))
    code, out, err = shown(tmp_path, capsys)
    assert (code, err) == (0, "")
    assert out == f"\nval_bpb 1.2164, val_loss 2.0077 of logs/b/final_model.pt, in {tmp_path}/\n"
