"""./run.sh sample: which model is meant, by which script and tokenizer it is read, how samples are drawn,
where they end; what tools.run.show makes of a run that has ended."""
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece as spm
import torch

import train_gpt
from helpers import ROOT, SCRIPT, TOY, on_terminal, train_tokenizer
from tools.run import sample, show
from records.judge.runs import Refused
from tools.run.sample import Opened, Settings, Text

RUN = TOY | dict(RUN_ID="first", SAVE_EVERY="10", VAL_TOKENS="2048")
FILES = ["final_model.int8.ptz", "final_model.pt", "checkpoint.pt"]
RECORD = ROOT / "records/track_tiny/2026-11-21_Baseline"


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


def scripted(*sentences, V=300):
    """An Opened whose model continues a prompt [i] with the tokens of the i-th sentence, again and again."""
    def log_probs(tokens):
        scores = torch.full((*tokens.shape, V), -1e3)
        for i in range(len(tokens)):
            sentence = sentences[int(tokens[i, 0])]
            for t in range(tokens.size(1)):
                scores[i, t, sentence[t % len(sentence)]] = 0.0
        return scores

    return Opened(log_probs, SimpleNamespace(vocab_size=V), train_gpt, "cpu")


@pytest.fixture(scope="module")
def text():
    """A tokenizer of 300 tokens, bytes among them."""
    model = train_tokenizer(["Tor ka mi lo ra ven"] * 9, 300, hard_vocab_limit=False)
    processor = spm.SentencePieceProcessor(model_proto=model)
    return Text(processor, 1, {1, 2}, None)


# ---------------------------------------------------------------- which model
@pytest.mark.parametrize("word", [
    "first", "logs/first/", "logs/first/checkpoint.pt"])
def test_a_run_by_its_name_its_folder_and_its_files(word, run, call):
    """What the model says is in the run's samples.txt, too. A run counts before a folder of its name."""
    Path("first").mkdir(exist_ok=True)
    code, said, err = call(word, "def main(", "class", "--tokens=12", "--temperature=0")
    assert code == 0, err
    assert [prompt for prompt, _ in said.values()] == ["def main(", "class"]
    written = (run / "samples.txt").read_text()
    assert all(f"sample {i}: {prompt}»{words}\n" in written for i, (prompt, words) in said.items())
    file = word.rpartition("/")[2] if word.endswith("t") and "." in word else FILES[0]
    assert written.startswith(f"logs/first/{file if '.' in word else FILES[0]} --tokens=12 --temperature=0 ")


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
    (["fist", "x"], "no run, record or model file is called 'fist': did you mean first?"),
    (["2026-11-21_Basline"], "did you mean 2026-11-21_Baseline"),
    (["zzzzzz"], "'zzzzzz': here are first, "),
    ([], "which run?"),
    (["first", "--tokens=0"], "--tokens=0"),
    (["first", "--tokens=many"], "--tokens"),
    (["first", "--temperature=-1"], "--temperature=-1"),
    (["first", "--temperature=nan"], "--temperature=nan"),
    (["first", "--top-k=-1"], "--top-k=-1"),
    (["first", "--seed=-1"], "--seed=-1"),
    (["first", "--sample=x"], "--sample=x"),
    (["first", "--tokenizer=nowhere"], "--tokenizer=nowhere"),
    (["first", "--tokenizer=logs/first/train.log"], "train.log is no SentencePiece model"),
    (["first", "\udce9t\udce9"], "is not UTF-8"),
    (["logs/first/train.log"], "logs/first/train.log cannot be opened"),
    (["logs"], "logs holds no model")])
def test_what_a_user_can_cause_is_a_sentence(words, sentence, run, call):
    code, said, err = call(*words)
    assert code == 2 and sentence in err and err.startswith("sample: ") and not said
    assert not (run / "samples.txt").exists()


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


def test_an_old_record_is_read_by_its_own_script(run, call, tmp_path):
    """The first record's model must be told its context, which this trainer's no longer know. Its folder
    stays as it is."""
    (tmp_path / "toy.model").write_bytes((tmp_path / "data/tokenizers/toy.model").read_bytes())
    before = {path.name for path in RECORD.iterdir()}
    for word in (RECORD.name, RECORD):
        code, said, err = call(word, "def f(x):", "--tokens=5", "--tokenizer=toy.model")
        assert code == 0 and said[1][0] == "def f(x):", err
    assert {path.name for path in RECORD.iterdir()} == before
    code, _, err = call(ROOT / "records/track_tiny/2026-11-23_Candidates", "def ")
    assert code == 2 and "2026-11-23_Candidates holds no model" in err


# ---------------------------------------------------------------- by which tokenizer
def test_the_tokenizer_is_that_of_the_run(run, call, tmp_path):
    """Not whatever lies at its place now; the environment or --tokenizer says where it has gone."""
    tokenizer = tmp_path / "data/tokenizers/toy.model"
    own = tokenizer.read_bytes()
    other = train_tokenizer(["other words to begin with"] * 9, 300, hard_vocab_limit=False)
    tokenizer.write_bytes(other)
    code, _, err = call("first", "def ")
    assert code == 2 and "toy.model is not the tokenizer that it was trained with; --tokenizer=PATH" in err
    (tmp_path / "mine.model").write_bytes(own)
    assert call("first", "def ", "--tokens=4", "--tokenizer=mine.model")[0] == 0
    tokenizer.unlink()
    code, _, err = call("first", "def ")
    assert code == 2 and "the tokenizer of its dataset toy is not here" in err
    too_many = train_tokenizer(SCRIPT.read_text().splitlines()[:4000], 600)
    (tmp_path / "large.model").write_bytes(too_many)
    code, _, err = call("first", "def ", "--tokenizer=large.model")
    assert code == 2 and "large.model has 600 tokens" in err and "512" in err


def test_data_that_lie_elsewhere(run, call, tmp_path, monkeypatch):
    shutil.move(tmp_path / "data", tmp_path / "moved")
    assert call("first", "def ")[0] == 2
    monkeypatch.setenv("DATA_PATH", "moved/datasets/toy")
    code, said, err = call("first", "--tokens=4")
    assert code == 0 and len(said) == 3, err
    monkeypatch.delenv("DATA_PATH")
    monkeypatch.setenv("TOKENIZER_PATH", "moved/tokenizers/toy.model")
    assert call("first", "def ", "--tokens=4")[0] == 0
    code, _, err = call("first", "--tokens=4")
    assert code == 2 and 'no val documents here to begin with: give a "prompt"' in err


def test_a_dataset_behind_a_link(run, call, tmp_path):
    """Its tokenizer is beside the link, not beside what that points at."""
    shutil.move(tmp_path / "data/datasets/toy", tmp_path / "large_disk")
    (tmp_path / "data/datasets/toy").symlink_to(tmp_path / "large_disk")
    assert call("first", "def ", "--tokens=4")[0] == 0


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
        (found,) = sample.generate(opened, [prompt], Settings(count, temperature, top_k, seed), set())
        return found.said

    assert said(opened.cfg.train_seq_len, 0) == ids[len(prompt):]
    assert said(20, 1, 1) == said(20, 0) == said(20, 1e-3)
    assert said(20, 1, seed=1) == said(20, 1, seed=1) != said(20, 1, seed=2)
    with torch.no_grad():
        best = {*opened.log_probs(torch.tensor([prompt]))[0, -1].topk(3)[1].tolist()}
    assert {said(1, 50.0, 3, seed)[0] for seed in range(60)} == best
    assert len({said(1, 50.0, 0, seed)[0] for seed in range(30)}) > 20


@pytest.mark.parametrize("most", [1 << 26, 1])
def test_a_sample_is_the_same_in_company(most, run, monkeypatch):
    """Whatever the other prompts, also where memory holds few rows at a time."""
    monkeypatch.setattr(sample, "MAX_SCORES", most)
    opened = sample.open_model(run / FILES[0], "cpu")
    prompts = [[1, 40, 50], [1], [1, *range(20, 60)]]
    together = sample.generate(opened, prompts, Settings(8, 0), {1})
    assert [one.prompt for one in together] == prompts
    for prompt, one in zip(prompts, together):
        assert sample.generate(opened, [prompt], Settings(8, 0), {1}) == [one]
    drawn = sample.generate(opened, [prompts[0]] * 2, Settings(8, 5.0), {1})
    assert drawn[0] != drawn[1], "the same prompt twice gives two samples"


@pytest.mark.parametrize("end", [1, 2])
def test_a_sample_ends_with_its_document(end, text):
    """At BOS or EOS, while other samples go on; the text of the next document is no part of it."""
    words = text.tokenizer.encode("Tor ka")
    opened = scripted([*words, end, *words], [*words, *words])
    short, long = sample.generate(opened, [[0], [1]], Settings(20, 0), text.ends)
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
    (tmp_path / "x_val_000000.bin").write_bytes(bytes(1024) + ids[1:4].tobytes())     # no document begins
    assert sample.val_prompts(text._replace(folder=tmp_path)) == [[10, 200, 200]]


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


def test_tokens_beyond_the_tokenizer_are_skipped(text):
    """They pad the vocabulary; an untrained model may draw them."""
    words = text.tokenizer.encode("Tor")
    padded = sample.Sample([1], [words[0], 5000, *words[1:], 299 + 1], True)
    assert sample.sample_line(3, padded, text) == "sample 3: »Tor"


def test_what_is_cut_short_ends_with_a_whole_line(text):
    ids = text.tokenizer.encode("ka\nmi\nlo")
    assert sample.sample_line(1, sample.Sample([1], ids, False), text) == "sample 1: »ka\nmi"
    assert sample.sample_line(1, sample.Sample([1], ids, True), text) == "sample 1: »ka\nmi\nlo"


# ---------------------------------------------------------------- the programs
def program(module, *words, cwd, **env):
    clean = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    return subprocess.run([sys.executable, "-m", module, *words], cwd=cwd, capture_output=True, timeout=300,
                          env=clean | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1") | env)


def test_a_prompt_is_utf8_whatever_the_locale(run, tmp_path):
    done = program("tools.run.sample", "first", "é😀", "--tokens=2", cwd=tmp_path, LC_ALL="C", PYTHONUTF8="0",
                   PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0, done.stderr
    assert "sample 1: é😀»".encode() in (run / "samples.txt").read_bytes()
    assert rb"sample 1: \xe9\U0001f600\xbb" in done.stdout


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
    size = show.size_text((run / "final_model.int8.ptz").stat().st_size)
    assert ("\nin logs/first/: train.log, result.json, samples.txt, loss.png, train_gpt.py, "
            f"final_model.int8.ptz ({size})\n") in out
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
    def stop(model):
        raise KeyboardInterrupt

    monkeypatch.setattr(show, "sample_lines", stop)
    code, out, err = shown("logs/first", capsys)
    assert (code, err) == (0, "") and out.startswith("samples: none (interrupted)\n")
    assert "loss.png" in out and "\nnext: " in out
    monkeypatch.setattr(sample, "sample_lines", lambda *_: stop(0))
    assert sample.main(["first"]) == 130


def test_what_memory_does_not_hold_is_a_sentence(run, capsys, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(sample, "sample_lines", full)
    capsys.readouterr()
    assert sample.main(["first"]) == 1
    assert capsys.readouterr().err == "sample: OutOfMemoryError: CUDA out of memory. Tried to allocate\n"


def test_only_a_run_that_has_ended_is_shown(run, capsys):
    (run / "result.json").unlink()
    for folder in ("logs/first", "logs/nowhere"):
        code, out, err = shown(folder, capsys)
        assert (code, out) == (2, "") and err.startswith(f"show: {folder} is no run that has ended")


def test_the_screen_fits_a_terminal(run, tmp_path):
    """The first rows of each sample, none longer than the terminal; samples.txt has the rest."""
    program = ("import sys; sys.path.insert(0, sys.argv[1]); from tools.run import show; "
               "show.sample_lines = lambda model: ['sample 1: def »f(x):' + 9 * '\\n    return x', "
               "'sample 2: ' + 200 * 'long ']; show.draw_run = lambda *_: None; "
               "sys.exit(show.main(['logs/first']))")
    code, lines, _ = on_terminal([sys.executable, "-c", program, str(ROOT)], tmp_path, columns=100)
    screen = lines[lines.index("sample 1: def »f(x):"):]
    assert code == 0 and screen.count("    return x") == 4 and max(map(len, screen)) <= 100
    second = screen.index(next(line for line in screen if line.startswith("sample 2: ")))
    assert [line.startswith("  long") for line in screen[second + 1:second + 6]] == [True] * 4 + [False]
    assert screen[-2].startswith("next: ") and len(screen) <= 25
    assert (run / "samples.txt").read_text().count("    return x") == 9


RESULT = dict(
    preset="tiny", val_loss=2.0077, val_bpb=1.21635559, core=None, steps=1033, tokens=4231168,
    train_time_ms=119969, tok_per_s=35269, hardware="2 ranks x 1 threads of EPYC",
    overrides={"matrix_lr": ["0.03", "0.02"]})


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


def test_the_screen_of_a_run(tmp_path):
    (tmp_path / "final_model.int8.ptz").write_bytes(bytes(2_500_000))
    _, *lines = show.end_lines(tmp_path, RESULT)
    assert lines[0] == ("val_bpb 1.2164, val_loss 2.0077 after 1,033 steps, 4,231,168 tokens, 120.0 s "
                        "(35,269 tok/s)")
    assert lines[1:3] == [f"  {show.distance(RESULT, other)}" for other in show.target_of(RESULT)["compare"]]
    assert lines[3:] == [
        f"in {tmp_path}/: train.log, result.json, train_gpt.py, final_model.int8.ptz (2.5 MB)",
        "next: better, or luck? ./run.sh record compare trains both several times: docs/first_change.md"]
    *_, last = show.end_lines(tmp_path, RESULT | dict(overrides={"seed": ["1337", "7"]}))
    assert last == "next: change a number, say ./run.sh MATRIX_LR=0.02, and compare: docs/first_change.md"


def test_the_screen_of_a_proxy(tmp_path, monkeypatch):
    """What the score is of, the run nearest to it, and what to try next."""
    def folder_of(name, loss, data="x", **config):
        config = dict(model_dim="48", matrix_lr="0.02", head_lr="0.1", val_tokens="512") | config
        start = dict(kind="start", preset="speedrun", config=config, torch="2", hardware="a CPU",
                     data=dict(fingerprint=data, val_tokens=1001), overrides=dict(val_tokens=["0", "512"]))
        result = RESULT | start | dict(val_loss=None, val_bpb=None, val_loss_partial=loss)
        folder = tmp_path / name
        folder.mkdir()
        (folder / "final_model.pt").write_bytes(bytes(9))
        (folder / "result.json").write_text(json.dumps(result))
        (folder / "events.jsonl").write_text(json.dumps(start) + "\n" + json.dumps(dict(
            kind="score", tag="final_model", val_loss=loss, val_bpb=None)) + "\n")
        return folder, result

    monkeypatch.setenv("PROXY", "1")
    first = folder_of("first", 3.4)
    said = [*show.end_lines(*first)]
    assert said[2] == "  no run to compare with yet: the recipe without changes is its own baseline"
    assert said[3].startswith("val_loss_partial: the loss on ") and "not with records or targets" in said[3]
    assert 'record try "what it is" NAME=value --preset speedrun --proxy 48 ' in said[-1]
    folder_of("other_text", 3.0, data="y", matrix_lr="0.03")
    folder_of("far", 3.1, matrix_lr="0.04", head_lr="0.2")
    assert show.baseline_line(*folder_of("mine", 3.35, matrix_lr="0.03")) == (
        "0.0500 ahead of logs/first (matrix_lr 0.02)")
    assert show.baseline_line(*folder_of("again", 3.41)) == "0.0100 behind logs/first (another seed)"


def test_the_screen_of_a_scored_file(tmp_path, capsys):
    """EVAL_FROM has its score and folder, no samples, no picture, no training to speak of."""
    scored = RESULT | dict(steps=0, tokens=0, train_time_ms=0, config={"eval_from": "logs/b/final_model.pt"})
    (tmp_path / "result.json").write_text(json.dumps(scored))
    code, out, err = shown(tmp_path, capsys)
    assert (code, err) == (0, "")
    assert out.splitlines() == ["", "val_bpb 1.2164, val_loss 2.0077 of logs/b/final_model.pt",
                                f"in {tmp_path}/: train.log, result.json"]
