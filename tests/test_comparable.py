"""Which scores records/ compares: those of the same tokens of the same text, scored alike."""
import json

import pytest

from helpers import ROOT
from records.judge import logs, scores

VAL = "a" * 64
TOKENIZER = "b" * 64
# What a log of ours tells of its data and its scores
FACTS = dict(split=50_834, val_bytes=120_019, text="f" * 64, val=VAL, tokenizer=TOKENIZER, tokens="full",
             context=256, stride=256, length=256, artifact=1, loss=4.7, bpb=1.2, name="val_loss", extra="")


def log_text(seed, **changed):
    """A log as the trainer writes it; a fact that is None is not told."""
    told = FACTS | changed
    loss = told["loss"] + seed / 1000
    bpb = f" val_bpb:{told['bpb'] + seed / 1000:.8f}" if told["bpb"] else ""
    lines = ["torch 2.13.0 numpy", "hardware: 1 ranks x 2 threads of X",
             f"data: toy train tokens:99 in 1 shards, val tokens:{told['split']}",
             f"data: val_bytes:{told['val_bytes']}", f"data: text fingerprint {told['text']}",
             f"sha256 train_gpt.py:{'c' * 64}", f"sha256 config:{'d' * 64}"]
    if told["val"]:
        lines += [f"sha256 toy_val_000000.bin:{told['val']}", f"sha256 toy.model:{told['tokenizer']}"]
    lines += [f"eval settings: eval_tokens:{told['tokens']} eval_context:{told['context']} "
              f"eval_stride:{told['stride']} eval_window:128", "config preset=tiny", f"config seed={seed}",
              f"config train_seq_len={told['length']}", f"config score_artifact={told['artifact']}"]
    lines += [f"step:{step}/100 train_loss:{9 - step / 25 + seed / 1000:.4f} train_time:{step * 100}ms "
              f"step_avg:100.00ms tok/s:2000" for step in (10, 50, 100)]
    lines += [f"step:100/100 {told['name']}:{loss:.4f} train_time:10000ms step_avg:100.00ms",
              f"final_model_exact {told['name']}:{loss - 0.001:.8f}{bpb}"]
    if told["artifact"]:
        lines.append(f"final_int8_zlib_roundtrip_exact {told['name']}:{loss:.8f}{bpb}")
    return "\n".join([*lines, told["extra"], ""])


def write_side(folder, seeds=(1, 2, 3), **changed):
    for seed in seeds:
        path = folder / f"{folder.name}_seed{seed}" / "train.log"
        path.parent.mkdir(parents=True)
        path.write_text(log_text(seed, **changed))
    return folder


PART = dict(bpb=None, name="val_loss_partial")
# What differs, how the second side differs from the first, what the sentence says
APART = {
    "tokens scored": (
        PART | dict(tokens=2560), PART | dict(tokens=20_000), "val tokens scored: 2,560 (a_seed1, "),
    "part against all": ({"bpb": None}, PART | dict(tokens=2560), "val tokens scored: 50,833 (a_seed1, "),
    "val split": ({}, dict(val="e" * 64), "val split: aaaaaaaa (a_seed1, "),
    "loss by another tokenizer": (
        {"bpb": None}, dict(tokenizer="e" * 64, bpb=None), "tokenizer: bbbbbbbb (a_seed1, "),
    "text, by logs without digests": (
        dict(val=None), dict(val=None, text="e" * 64), "text: ffffffff (a_seed1, "),
    "bytes": ({}, dict(val_bytes=120_020), "val bytes: 120,019 (a_seed1, "),
    "bytes of another tokenizer's text": (
        {}, dict(tokenizer="e" * 64, val="e" * 64, val_bytes=9), "val bytes: 120,019 (a_seed1, "),
    "overlapping rows": ({}, dict(stride=64), "eval_context/eval_stride: 256/256 (a_seed1, "),
    "longer rows": ({}, dict(context=512, stride=512), "eval_context/eval_stride: 256/256 (a_seed1, "),
    "weights": ({}, dict(artifact=0), "scored weights: artifact (a_seed1, "),
    "kind": ({}, dict(extra="quantized_ttt val_loss:2.0 val_bpb:1.0"), "kind of score: plain (a_seed1, "),
}


@pytest.mark.parametrize("a, b, words", APART.values(), ids=APART)
def test_no_verdict_on_other_tokens(tool, tmp_path, a, b, words):
    """Equal models, one side scored otherwise: the commands that would average or test them refuse."""
    write_side(tmp_path / "a", **a)
    write_side(tmp_path / "b", (4, 5, 6), **b)
    for command in (("compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "x.png"),
                    ("stats", tmp_path / "a", tmp_path / "b")):
        code, out, err = tool(*command)
        assert code == 2 and words in err and err.count("\n") == 1, (command, out, err)
        assert "verdict:" not in out and "mean" not in out and "Welch" not in out
    out = tool("plot", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "y.png")[1]
    told = "warning: these losses are not of the same tokens, scored alike: " in out and words in out
    assert told or "bytes" in words


ALIKE = {
    "nothing": ({}, ""),
    "another text to train on": (dict(text="e" * 64), "warning: not the same text to train on: ffffffff ("),
    "bits per byte by another tokenizer": (
        dict(tokenizer="e" * 64, val="e" * 64, split=40_000), "warning: not the same tokenizer: bbbbbbbb ("),
    "longer rows that were trained on": (
        dict(context=512, stride=512, length=512), "not the same eval_context/eval_stride: 256/256 ("),
    "logs that do not tell": (dict(val=None, text=None), "the logs of b_seed4, b_seed5, b_seed6 do not"),
    "as many tokens as there are": (dict(tokens=50_834), ""),
}


@pytest.mark.parametrize("b, words", ALIKE.values(), ids=ALIKE)
def test_what_compares_is_compared(tool, tmp_path, b, words):
    write_side(tmp_path / "a")
    write_side(tmp_path / "b", (4, 5, 6), **b, loss=4.0, bpb=1.0)
    code, out, _ = tool("compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "x.png")
    assert code == 0 and "verdict: better" in out and words in out
    assert words or "warning" not in out


def test_training_losses_of_other_texts_are_not_tested(tool, tmp_path):
    write_side(tmp_path / "a")
    write_side(tmp_path / "b", (4, 5, 6))
    command = ("compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "x.png")
    assert "at equal time (10 s): train_loss" in tool(*command)[1]
    for path in (tmp_path / "b").glob("*/train.log"):
        path.write_text(path.read_text().replace("f" * 64, "e" * 64))
    code, out, _ = tool(*command)
    assert code == 0 and "verdict:" in out and "at equal" not in out


def test_a_loss_of_a_part_of_val_says_what_it_is(tool, tmp_path):
    """Its own name, a line about it, and no test against a target, which is one of other tokens."""
    write_side(tmp_path / "a", **PART | dict(tokens=2560))
    write_side(tmp_path / "b", (4, 5, 6), **PART | dict(tokens=2560, loss=4.0))
    line = "val_loss_partial: the loss on the first 2,560 of 50,834 val tokens, which is not how many the "
    code, out, _ = tool("stats", tmp_path / "a", "--target", 4.8)
    assert code == 0 and out.count(line) == 1 and "val_loss_partial: n=3 mean" in out
    assert "against 4.8: no test" in out and "p=" not in out and "p<" not in out
    out = tool("compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "x.png")[1]
    assert out.count(line) == 1 and "A: val_loss_partial n=3" in out and "verdict: better" in out
    write_side(tmp_path / "c", bpb=None)
    out = tool("stats", tmp_path / "c", "--target", 4.8)[1]
    assert "partial" not in out and "p<1e-4" in out


def test_events_tell_the_same_as_the_text(tmp_path):
    """Of a run of ours with and without events.jsonl."""
    write_side(tmp_path / "a", (1,), **PART | dict(tokens=2560))
    log, = tmp_path.glob("a/*/train.log")
    by_text = logs.read_log(log)
    start = dict(kind="start", torch="2.13.0", hardware="1 ranks x 2 threads of X", config=by_text.config,
                 overrides={"val_tokens": ["0", "2560"]},
                 eval=dict(eval_tokens=2560, eval_context=256, eval_stride=256),
                 data=dict(name="toy", fingerprint="f" * 64, val_tokens=50_834, val_bytes=120_019,
                           sha256={"toy_val_000000.bin": VAL, "toy.model": TOKENIZER}))
    score = dict(kind="score", tag="final_int8_zlib_roundtrip", val_loss=4.701, val_bpb=None)
    (log.parent / "events.jsonl").write_text("\n".join([json.dumps(start), json.dumps(score), ""]))
    by_events, = logs.read_runs(log)
    assert scores.facts_of(by_events, "val_loss") == scores.facts_of(by_text, "val_loss")
    assert by_events.partial and by_text.partial and scores.rows_of(by_events) == scores.rows_of(by_text)


# ------------------------------------------------------------ commands that train
def test_runs_in_turn_stop_at_the_first_of_other_tokens(tool, tmp_path, monkeypatch):
    """Not after hours of training: with the first run of the second setting."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "all").write_text(log_text(1337, bpb=None))
    (tmp_path / "part").write_text(log_text(1337, **PART | dict(tokens=512)))
    commands = [f"mkdir -p logs/$RUN_ID && cp {name} logs/$RUN_ID/train.log" for name in ("all", "part")]
    code, out, err = tool("compare", "--run", *commands, "-n", 3)
    assert code == 2 and "val tokens scored: " in err and "verdict" not in out
    assert len([*(tmp_path / "logs").iterdir()]) == 2


# ------------------------------------------------------------ pictures
def test_the_record_of_another_text_is_not_drawn(tmp_path):
    """In grey, beside runs whose losses do not compare with it."""
    from records.show import curves
    home = ROOT / "records/track_tiny"
    mine = logs.load_runs([home / "2026-11-21_Baseline"])
    assert [*curves.record_to_beat(mine)] == [f"record {max(home.iterdir()).name.partition('_')[2]}"]
    for run in mine:
        run.eval["eval_tokens"] = "4096"
    assert curves.record_to_beat(mine) == {}
