"""golf.py: each protocol scores every token once, by what its row has shown; test-time training looks only
back; the leak probe finds protocols that peek."""
import json
import math
import re
import shutil
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

import golf
import leak_probe
import train_gpt
from helpers import ROOT, SCRIPT, TOY, fake_team, run_cli, toy_config
from test_eval import randomised

pytestmark = pytest.mark.usefixtures("one_thread")
T, V, BOS = 16, 64, 1
PROTOCOLS = {
    "sliding": dict(eval_sliding=4), "documents": dict(eval_documents=5),
    "ttt": dict(eval_ttt=40, eval_ttt_lr=0.5)}


@pytest.fixture(scope="module")
def cfg(tiny_data):
    return toy_config(tiny_data, vocab_size=V, train_seq_len=T, train_batch_tokens=4 * T, bos_id=BOS,
                      val_tokens=0)


@pytest.fixture(scope="module")
def stream():
    """Documents of 1 to 40 tokens; the first one has lost its beginning."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(2, V, 260).astype(np.uint16)
    tokens[[7, 8, 20, 60, 61, 95, 130, 150, 190, 207, 240]] = BOS
    return tokens


def nats_of(cfg, model, tokens, name, module=golf):
    return module.target_nats(train_gpt, model, cfg, tokens, BOS, name, fake_team())


@torch.no_grad()
def one_by_one(cfg, model, tokens, rows):
    """Nats of each row's targets, one forward for each, from what precedes it in the row alone."""
    nats = np.zeros(len(tokens))
    for row in rows:
        for i in range(row.first, row.last + 1):
            seen = torch.from_numpy(tokens[row.low:i].astype(np.int64))[None]
            model.set_context(seen.size(1), train_gpt.eval_window(cfg))
            assert nats[i] == 0, "scored twice"
            nats[i] = -train_gpt.log_probs(model, seen)[0, -1, int(tokens[i])].item()
    return nats


# -------------------------------------------------------------------------------- rows
@pytest.mark.parametrize("settings", [
    dict(eval_sliding=4), dict(eval_sliding=1), dict(eval_sliding=16), dict(eval_sliding=7, eval_context=40)])
def test_rows_of_the_sliding_protocol(cfg, stream, settings):
    """Every target once, with at least context - stride tokens before it unless the text begins there."""
    cfg = replace(cfg, **settings)
    context, targets = cfg.eval_context or T, []
    for row in golf.rows_of(cfg, "sliding", stream, BOS):
        targets += range(row.first, row.last + 1)
        assert row.last - row.low <= context
        assert row.low == 0 or row.first - row.low >= context - cfg.eval_sliding + 1
    assert targets == list(range(1, len(stream)))


@pytest.mark.parametrize("stride", [1, 5, 16])
def test_rows_of_documents_begin_where_documents_do(cfg, stream, stride):
    targets, begins = [], [0, *np.flatnonzero(stream == BOS)]
    for row in golf.rows_of(replace(cfg, eval_documents=stride), "documents", stream, BOS):
        targets += range(row.first, row.last + 1)
        own = max(begin for begin in begins if begin < row.first)  # where the context's document begins
        assert row.low >= own and row.last - row.low <= T
        assert row.low == own or row.first - row.low >= T - stride + 1
        assert not (stream[row.low + 1:row.last] == BOS).any()  # only the last target may begin another one
    assert targets == list(range(1, len(stream)))


@pytest.mark.parametrize("settings", [
    dict(eval_documents=5), dict(eval_documents=16), dict(eval_documents=5, eval_context=24),
    dict(eval_sliding=4)])
def test_a_rows_beginning_does_not_depend_on_later_text(cfg, stream, settings):
    """Wherever the next document begins: what is in view of a token was decided by what precedes it."""
    cfg, rng = replace(cfg, **settings), np.random.default_rng(0)
    name = golf.names(cfg)[0]

    def views(tokens):
        rows = golf.rows_of(cfg, name, tokens, BOS)
        return {i: row.low for row in rows for i in range(row.first, row.last + 1)}

    before = views(stream)
    for place in range(2, len(stream)):
        other = stream.copy()
        other[place:] = np.where(rng.random(len(stream) - place) < 0.1, BOS, 5)
        other[place] = BOS
        after = views(other)
        assert all(after[i] == before[i] for i in range(1, place))


@pytest.mark.parametrize("name", ["sliding", "documents"])
@pytest.mark.parametrize("windows", [{}, dict(window_pattern="SL", window_schedule=(8,), eval_window=11)])
def test_nats_are_those_of_single_forwards(cfg, stream, name, windows):
    cfg = replace(cfg, **PROTOCOLS[name], **windows)
    model = randomised(cfg)
    want = one_by_one(cfg, model, stream, golf.rows_of(cfg, name, stream, BOS))
    assert np.allclose(nats_of(cfg, model, stream, name), want, rtol=1e-5, atol=1e-6)
    assert (want[1:] > 0).all() and want[0] == 0


def test_sliding_is_evaluate_with_a_stride(cfg, stream, tiny_data):
    """On a text that rows fill: two ways to the same score."""
    data = train_gpt.open_data(toy_config(tiny_data))
    data = data._replace(val=stream[:16 + 4 * 30 + 1], val_bytes=100, bos=BOS)
    cfg = replace(cfg, eval_sliding=4)
    model = randomised(cfg)
    score = train_gpt.evaluate(model, replace(cfg, eval_stride=4), data, fake_team())
    found = golf.further_scores(train_gpt, model, cfg, data, fake_team(), lambda line: None)
    assert found["val_loss_sliding"] == pytest.approx(score.val_loss, rel=1e-6)
    assert found["val_bpb_sliding"] == pytest.approx(score.val_bpb, rel=1e-6)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_ranks_share_the_rows(cfg, stream, name):
    """Two ranks' nats fill each other's gaps; ranks that do not talk cannot train, so without a step."""
    cfg = replace(cfg, **PROTOCOLS[name] | (dict(eval_ttt=10**6) if name == "ttt" else {}))
    model = randomised(cfg)
    whole = nats_of(cfg, model, stream, name)
    parts = [golf.target_nats(train_gpt, model, cfg, stream, BOS, name, fake_team(rank, 2))
             for rank in (0, 1)]
    assert np.allclose(sum(parts), whole, rtol=1e-6) and not (parts[0] * parts[1]).any()
    assert all((part > 0).sum() > 50 for part in parts)


# -------------------------------------------------------------------------------- test-time training
def test_ttt_trains_on_what_it_scored_and_on_nothing_else(cfg, stream, monkeypatch):
    cfg, scored, trained = replace(cfg, **PROTOCOLS["ttt"]), [0], []

    def score(t, model, cfg, tokens, rows, team, nats):
        assert rows[0].first == scored[-1] + 1
        scored.append(rows[-1].last)

    def train(t, model, optimizer, cfg, tokens, team):
        assert (len(tokens) - 1) % T == 0 and len(tokens) > T
        trained.extend(tokens if not trained else tokens[1:])
        assert np.array_equal(trained, stream[:len(trained)])  # in order, nothing left out
        assert len(trained) <= scored[-1] + 1 < len(trained) + T  # less than a row behind
        assert scored[-1] - scored[-2] >= cfg.eval_ttt

    monkeypatch.setattr(golf, "score_rows", score)
    monkeypatch.setattr(golf, "train_on", train)
    nats_of(cfg, randomised(cfg), stream, "ttt")
    assert scored[-1] == len(stream) - 1 and len(trained) > 150


def test_ttt_is_the_trainers_own_step(cfg, stream):
    """The second chunk's nats are those of weights after one step on the first; the model itself stays."""
    cfg = replace(cfg, eval_ttt=64, eval_ttt_lr=0.3)
    model = randomised(cfg)
    kept = {name: p.clone() for name, p in model.state_dict().items()}
    nats = nats_of(cfg, model, stream, "ttt")
    assert all(torch.equal(p, kept[name]) for name, p in model.state_dict().items())
    rows = golf.rows_of(cfg, "ttt", stream, BOS)
    assert [row.last for row in rows[:4]] == [16, 32, 48, 64]
    assert np.allclose(nats[:65], one_by_one(cfg, model, stream, rows[:4])[:65], rtol=1e-5)
    optimizer = train_gpt.Optimizer(model, cfg)
    batch = torch.from_numpy(np.stack([stream[i:i + T + 1] for i in range(0, 64, T)]).astype(np.int64))
    model.set_context(T, 0)
    train_gpt.train_step(model, optimizer, (batch[:, :-1], batch[:, 1:]), 4, 0.3, cfg.muon_momentum)
    want = one_by_one(cfg, model, stream, rows[4:8])
    assert np.allclose(nats[65:129], want[65:129], rtol=1e-4)
    untrained = one_by_one(cfg, randomised(cfg), stream, rows[4:8])
    assert not np.allclose(nats[65:129], untrained[65:129], rtol=1e-3)


def test_ttt_learns_a_text_that_repeats(cfg):
    """The same 62 tokens again and again: what was scored teaches what comes."""
    cfg = replace(cfg, eval_ttt=80, eval_ttt_lr=0.3)
    stream = np.tile(np.random.default_rng(0).permutation(np.arange(2, V)).astype(np.uint16), 20)
    nats, still = (nats_of(replace(cfg, eval_ttt_lr=lr), randomised(cfg), stream, "ttt")
                   for lr in (0.3, 0.0))
    assert nats[-300:].mean() < 0.6 * still[-300:].mean() and np.array_equal(nats[:65], still[:65])


def test_ttt_uses_the_rows_of_documents_or_sliding(cfg, stream):
    both = dict(eval_ttt=40, eval_documents=5, eval_sliding=4)
    rows = {name: golf.rows_of(replace(cfg, **both), name, stream, BOS) for name in PROTOCOLS}
    assert rows["ttt"] == rows["documents"] != rows["sliding"]
    assert golf.rows_of(replace(cfg, eval_ttt=40, eval_sliding=4), "ttt", stream, BOS) == rows["sliding"]
    assert golf.names(replace(cfg, **both)) == [*PROTOCOLS] and golf.names(cfg) == []


def test_ttt_over_ranks_is_that_of_one(tmp_path, tiny_data):
    """torchrun with two ranks: the same scores, by rows and by steps that they share."""
    (tmp_path / "data").symlink_to(tiny_data / "data")
    env = TOY | dict(ITERATIONS="2", EVAL_TTT="500", EVAL_SLIDING="32", EVAL_DOCUMENTS="32",
                     SAMPLE_TOKENS="0", VAL_TOKENS="3000")
    found = []
    for ranks in (0, 2):
        done = run_cli(tmp_path, ranks=ranks, env=env | {"RUN_ID": f"r{ranks}"})
        assert done.code == 0, done.err
        found.append(json.loads((tmp_path / f"logs/r{ranks}/result.json").read_text()))
    for name in PROTOCOLS:
        one, two = (result[f"val_loss_partial_{name}"] for result in found)
        assert one == pytest.approx(two, rel=2e-4) and found[0][f"val_bpb_{name}"] is None  # a part of val
    assert len({found[0][f"val_loss_partial_{name}"] for name in PROTOCOLS}) == 3


# -------------------------------------------------------------------------------- the leak probe
ENV = {"VOCAB_SIZE": str(V), "DEVICE": "cpu", "COMPILE": "0", "DTYPE": "float32", "MODEL_DIM": "32",
       "TRAIN_SEQ_LEN": str(T), "TRAIN_BATCH_TOKENS": str(T), "BIGRAM_ROWS": "64", "BOS_ID": str(BOS)}
STREAM_ENV = {name: {key.upper(): str(value) for key, value in settings.items()}
              for name, settings in PROTOCOLS.items()}
PEEKS = {  # protocol, what is replaced in golf.py, by what
    "trains before it scores": (
        "ttt", r"            score_rows\(t, own",
        "            if row.last - scored > cfg.train_seq_len:\n"
        "                train_on(t, own, optimizer, cfg, tokens[scored:row.last + 1], team)\n"
        "            score_rows(t, own"),
    "trains beyond what it scored": ("ttt", r"tokens\[trained:trained \+ full \+ 1\]",
                                     "tokens[trained:trained + full + 1 + 2 * cfg.train_seq_len]"),
    "two passes, the second one counts": (
        "ttt", r"    return nats\n\n\ndef protocol",
        "    score_rows(t, own, cfg, tokens, rows, team, nats)\n    return nats\n\n\ndef protocol"),
    "trains the model that it was given": ("ttt", r"own = t.GPT\(.*\n +own.load_state_dict.*", "own = model"),
    "rows that the whole text decides": (
        "sliding", r"    return \[row for start",
        "    stride -= int(tokens.astype(int).sum() % 3)\n    return [row for start"),
    "rows that begin where the document's end lets them": (
        "documents", r"max\(start, first \+ share - 1 - context\)",
        "max(start, min(end, first + share - 1) - context)"),
    "fewer nats after the first rows": (
        "sliding", r"    return nats\n    own",
        "    nats[3 * cfg.train_seq_len:] -= 1e-3\n    return nats\n    own"),
    "fewer nats once it has trained": (
        "ttt", r"    return nats\n\n\ndef protocol",
        "    nats[cfg.eval_ttt + 1:] *= 0.99\n    return nats\n\n\ndef protocol"),
    "half of the nats": (
        "sliding", r"    return nats\n    own", "    return nats / 2\n    own"),
    "the text's mean": (
        "documents", r"    return nats\n    own", "    nats[1:] += tokens.mean()\n    return nats\n    own"),
}


def judge(script, name, seed=0):
    return leak_probe.judge(script, None, ENV | STREAM_ENV[name], seconds=240, seed=seed, protocols=[name])


def test_our_protocols_pass_the_probe():
    env = ENV | {key: value for some in STREAM_ENV.values() for key, value in some.items()}
    told = leak_probe.judge(SCRIPT, None, env, seconds=240, protocols=[*PROTOCOLS], bos=BOS).split("; ")
    for name, text in zip(PROTOCOLS, told[1:], strict=True):
        said = rf"{name}: 10 changes .* of 117: .* is \d.*, all probabilities .* sum to (\d.\d+)"
        assert abs(float(re.fullmatch(said, text)[1]) - 1) < 2e-6


def peeking(peek):
    """Its protocol, and the source of a golf.py that peeks."""
    name, old, new = PEEKS[peek]
    source, n = re.subn(old, new, (ROOT / "golf.py").read_text())
    assert n == 1
    return name, source


def probe(cfg, name, module, seed=0):
    """In this process, by two models of the same weights."""
    cfg = replace(cfg, **PROTOCOLS[name])

    def worker():
        model = randomised(cfg)
        return lambda tokens, row, name, bos, step: nats_of(
            leak_probe.shortened(cfg, row, step), model, tokens.astype(np.uint16), name, module)

    @torch.no_grad()
    def ask(tokens):
        model = randomised(cfg)
        model.set_context(tokens.shape[1], train_gpt.eval_window(cfg))
        return train_gpt.log_probs(model, torch.from_numpy(tokens)).numpy()

    rng = np.random.default_rng(seed)
    return leak_probe.probe_stream(worker(), worker(), ask, name, BOS, T, V, [], rng)


@pytest.mark.parametrize("seed", range(5))
def test_no_seed_of_the_probe_accuses_us(cfg, seed):
    for name in PROTOCOLS:
        assert probe(cfg, name, golf, seed).startswith(f"{name}: 10 changes")


@pytest.mark.parametrize("peek", PEEKS)
def test_a_protocol_that_peeks_is_caught(cfg, peek):
    name, source = peeking(peek)
    module = ModuleType("golf")
    exec(compile(source, "golf.py", "exec"), vars(module))
    said = f"a leak: {name}: tokens from"
    if "nats" in peek:      # of no later text
        said = f"{name}: the nats of the first row"
        if peek.startswith("fewer"):
            said = f"{name}: the probabilities of all tokens that may follow the same ones sum to"
    with pytest.raises(leak_probe.ProbeFailed, match=f"^{said}"):
        probe(cfg, name, module)


def test_a_script_that_peeks_is_caught(tmp_path):
    """In the workers that `check` starts."""
    name, source = peeking("trains before it scores")
    (tmp_path / "golf.py").write_text(source)
    shutil.copy(SCRIPT, tmp_path)
    with pytest.raises(leak_probe.ProbeFailed, match="^a leak: ttt: tokens from"):
        judge(tmp_path / "train_gpt.py", name)


# -------------------------------------------------------------------------------- in a run
def test_a_run_says_its_named_scores(tmp_path, tiny_data):
    """Beside the plain score, which stays what it was; an evaluation of the artifact says the same again."""
    (tmp_path / "data").symlink_to(tiny_data / "data")
    env = TOY | dict(ITERATIONS="3", VAL_TOKENS="0", SAMPLE_TOKENS="0")
    more = dict(EVAL_SLIDING="16", EVAL_DOCUMENTS="32", EVAL_TTT="2048")
    results = {}
    for run_id, settings in (("plain", {}), ("all", more), ("again", more | {
            "EVAL_FROM": "logs/all/final_model.int8.ptz"})):
        done = run_cli(tmp_path, env=env | settings | {"RUN_ID": run_id})
        assert done.code == 0, done.err
        results[run_id] = json.loads((tmp_path / f"logs/{run_id}/result.json").read_text())
        for name in PROTOCOLS if settings else ():
            line = rf"^final_{name} val_loss_{name}:(\S+) val_bpb_{name}:(\S+) eval_time:\d+ms \(rows of .*"
            ((loss, bpb),) = re.findall(line, done.out, re.M)
            result = results[run_id]
            assert float(loss) == pytest.approx(result[f"val_loss_{name}"], abs=1e-8)
            assert float(bpb) == pytest.approx(result[f"val_bpb_{name}"], abs=1e-8)
            assert float(bpb) / float(loss) == pytest.approx(result["val_bpb"] / result["val_loss"], rel=1e-6)
            assert "golf.py" in result["companions"] and (tmp_path / f"logs/{run_id}/golf.py").exists()
    assert results["plain"]["val_loss"] == results["all"]["val_loss"] == results["again"]["val_loss"]
    assert not any(key.startswith("val_loss_") for key in results["plain"])
    for name in PROTOCOLS:
        first, again = (results[run_id][f"val_loss_{name}"] for run_id in ("all", "again"))
        assert math.isclose(first, again, rel_tol=1e-6)
    assert results["all"]["val_loss_sliding"] < results["all"]["val_loss"]


def test_all_code_that_is_used_counts_for_the_limit(tmp_path, tiny_data):
    (tmp_path / "data").symlink_to(tiny_data / "data")
    for name in ("train_gpt.py", "golf.py"):
        shutil.copy(ROOT / name, tmp_path)
    env = TOY | dict(ITERATIONS="1", SAMPLE_TOKENS="0", EVAL_SLIDING="32", RUN_ID="a",
                     ARTIFACT_BYTES_LIMIT="1000")
    done = run_cli(tmp_path, env=env, script=tmp_path / "train_gpt.py")
    assert done.code == 0, done.err
    beside, ((over,),) = len((ROOT / "golf.py").read_bytes()), [re.findall(r"OVER by (\d+)", done.out)]
    result = json.loads((tmp_path / "logs/a/result.json").read_text())
    assert int(over) == result["bytes_total"] + beside - 1000 and result["artifact_within_limit"] is False
    assert f"Code beside it: {beside} bytes" in done.out.splitlines()


def test_a_copy_without_golf_says_so_and_runs(tmp_path, tiny_data):
    (tmp_path / "data").symlink_to(tiny_data / "data")
    shutil.copy(SCRIPT, tmp_path)
    env = TOY | dict(ITERATIONS="1", SAMPLE_TOKENS="0", EVAL_SLIDING="32", RUN_ID="a")
    done = run_cli(tmp_path, env=env, script=tmp_path / "train_gpt.py")
    assert done.code == 0 and "not beside this: faults, golf, kernels, plan" in done.out
    assert "val_loss_sliding" not in json.loads((tmp_path / "logs/a/result.json").read_text())


def test_strides_beyond_the_row_are_the_row(cfg, stream):
    """So that TRAIN_SEQ_LEN can be lowered alone on a preset that has them."""
    for name in ("sliding", "documents"):
        long, row = (replace(cfg, **{f"eval_{name}": stride}) for stride in (1000, T))
        assert golf.rows_of(long, name, stream, BOS) == golf.rows_of(row, name, stream, BOS)
        assert "score 16 targets each" in golf.protocol(long, name)
