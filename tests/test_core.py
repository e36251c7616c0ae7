"""CORE against the slow reference of core_reference.py, and that reference against cases worked by hand.

CORE_TEST_ALL=1 takes all examples of the real tasks (8 minutes), CORE_TEST_BUNDLE another folder of them.
"""

import json
import math
import os
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import core
import train_gpt
from core_reference import (LABELS, crop, example_spans, leads, mean_losses, pick_of, prompts, read_bundle,
                            reference_core, reference_picks, shuffled, write_bundle)
from helpers import ROOT, TOY, fake_team, run_cli, toy_config
from train_gpt import GPT, init_parameters

REAL = Path(os.environ.get("CORE_TEST_BUNDLE") or ROOT.parent / "shared" / "core_bundle")
REAL_MOST = 0 if os.environ.get("CORE_TEST_ALL") == "1" else 25
NOISE = 1e-5  # nats per token by which two ways of computing the same loss in fp32 may differ

pytestmark = pytest.mark.usefixtures("one_thread")


def quiet(*lines, **options):
    """A log that nobody reads."""


def drop(item, key):
    return {name: value for name, value in item.items() if name != key}


# -------------------------------------------------------------------------------- the reference, by hand
class Pieces:
    """A tokenizer of a few pieces, longest match first: ids from 2 in the order they are given."""

    def __init__(self, *pieces):
        self.pieces, self.texts = pieces, []

    def encode(self, text):
        self.texts.append(text)
        ids = []
        while text:
            piece = max((p for p in self.pieces if text.startswith(p)), key=len)
            ids.append(2 + self.pieces.index(piece))
            text = text[len(piece):]
        return ids


class Told:
    """A model whose next token depends on the last one alone: {(token, next): probability}, the rest goes
    to token 0. Asks for set_context of the right length and window before every forward."""

    def __init__(self, probabilities, size=12):
        self.table = torch.full((size, size), 1e-9)
        for (token, after), p in probabilities.items():
            self.table[token, after] = p
        self.table[:, 0] += 1 - self.table.sum(1)
        self.context, self.asked = None, []

    def set_context(self, T, window):
        self.context = T, window

    def logits(self, tokens):
        assert tokens.dtype == torch.int64 and self.context == (tokens.size(1), 7)
        self.asked.append(tokens[0].tolist())
        return self.table[tokens].log()


def settings(train_seq_len=8):
    return SimpleNamespace(train_seq_len=train_seq_len, eval_window=7, window_schedule=(3,))


def single(kind, item, **other):
    """A task of one example -> (task, its items)."""
    return dict(label="one", kind=kind, shots=0, base=0, delimiter=" ", items=[item]) | other, [item]


Q, A, B, SPACE = 2, 3, 4, 5
LETTERS = Pieces("Q", "a", "b", " ")


@pytest.mark.parametrize("b_after_b, pick", [(0.25, 1), (0.2, 0)])
def test_reference_takes_the_lowest_mean(b_after_b, pick):
    """The sum would take "a" both times."""
    model = Told({(SPACE, A): 0.3, (SPACE, B): 0.4, (B, B): b_after_b})
    task, items = single("multiple_choice", dict(query="Q", choices=["a", "bb"], gold=0))
    want = [-math.log(0.3), -(math.log(0.4) + math.log(b_after_b)) / 2]
    assert mean_losses(model, settings(), LETTERS, 1, task, items, 0) == pytest.approx(want, rel=1e-6)
    assert pick_of(model, settings(), LETTERS, 1, task, items, 0) == pick
    assert model.asked[:2] == [[1, Q, SPACE, A], [1, Q, SPACE, B, B]]  # one option at a time, after BOS


@pytest.mark.parametrize("choices, starts, pick", [
    (["b", "a", "b"], 3, 0), (["a", "b", "b"], 3, 1), (["a", "a b"], 4, 1), (["a b", "a"], 4, 0),
    (["a", "a"], 4, -1), (["a"], 4, -1), (["a a", "a b", "a b"], 5, 1), (["", "b"], 3, 1)])
def test_reference_ties_and_empty_spans(choices, starts, pick):
    """b beats a; of equals the first; "a" before "a b" leaves nothing to score, and nothing never wins."""
    model = Told({(SPACE, A): 0.3, (SPACE, B): 0.4, (A, SPACE): 0.01})
    task, items = single("multiple_choice", dict(query="Q", choices=choices, gold=0))
    found, lost = example_spans(LETTERS, 1, task, items, 0)
    assert {start for _, start in found} == {starts} and lost == 0
    assert [tokens[:3] for tokens, _ in found] == [[1, Q, SPACE]] * len(choices)
    assert pick_of(model, settings(), LETTERS, 1, task, items, 0) == pick
    assert reference_picks(model, settings(), LETTERS, 1, task) == ([pick], 0)


@pytest.mark.parametrize("contexts, continuation, found, pick", [
    (["Qa", "Qb"], "a", [([1, Q, A, SPACE, A], 3), ([1, Q, B, SPACE, A], 3)], 1),
    (["a", "Qa"], "a", [([1, A, SPACE, A], 1), ([1, Q, A, SPACE, A], 2)], 0),  # the suffix may go further
    (["Q", "Q"], "a", [([1, Q, SPACE, A], 0), ([1, Q, SPACE, A], 0)], 0),
    (["Qa", "Qaa"], "a", [([1, Q, A, SPACE, A], 2), ([1, Q, A, A, SPACE, A], 3)], 0)])
def test_reference_of_schema(contexts, continuation, found, pick):
    """What is scored is the common end; the option whose context makes it likeliest wins."""
    model = Told({(A, SPACE): 0.2, (B, SPACE): 0.5, (SPACE, A): 0.3, (1, A): 0.9, (Q, A): 0.5, (A, A): 0.1})
    task, items = single("schema", dict(context_options=contexts, continuation=continuation, gold=0))
    assert example_spans(LETTERS, 1, task, items, 0) == (found, 0)
    assert pick_of(model, settings(), LETTERS, 1, task, items, 0) == pick


def test_reference_schema_without_a_common_end():
    task, items = single("schema", dict(context_options=["a", "b"], continuation="", gold=0), delimiter="")
    assert pick_of(Told({}), settings(), LETTERS, 1, task, items, 0) == -1


@pytest.mark.parametrize("a_after_a, pick", [(0.6, 0), (0.4, -1)])
def test_reference_of_language_modeling(a_after_a, pick):
    """Every token of the continuation is the argmax, or the example is wrong."""
    model = Told({(Q, SPACE): 0.6, (SPACE, A): 0.7, (A, A): a_after_a})
    task, items = single("language_modeling", dict(context=" Q \n", continuation="aa"))
    found = example_spans(LETTERS, 1, task, items, 0)
    assert found == ([([1, Q, SPACE, A, A], 2)], 0)  # the space is the delimiter, stripped off the prompt
    assert pick_of(model, settings(), LETTERS, 1, task, items, 0) == pick
    lead = leads(model, settings(), LETTERS, 1, task, items, 0)
    want = [math.log(0.6 / 0.4), math.log(0.7 / 0.3), math.log(a_after_a / (1 - a_after_a))]
    assert lead == pytest.approx(want, rel=1e-5)


def test_reference_where_the_prompt_is_retokenized():
    """"Q." and "a" make "Q" and ".a": scored from the first token that differs, and counted."""
    sp, dot, dot_a = Pieces("Q", "a", ".", ".a"), 4, 5
    task, items = single("language_modeling", dict(context="Q", continuation="aa"), delimiter=".")
    assert example_spans(sp, 1, task, items, 0) == ([([1, Q, dot_a, A], 2)], 1)
    good = Told({(Q, dot_a): 0.9, (dot_a, A): 0.9})
    assert reference_picks(good, settings(), sp, 1, task) == ([0], 1)
    assert reference_picks(Told({(Q, dot): 0.9, (dot_a, A): 0.9}), settings(), sp, 1, task) == ([-1], 1)
    nothing, items = single("language_modeling", dict(context="Q", continuation=""), delimiter=".")
    assert example_spans(sp, 1, nothing, items, 0) == ([([1, Q, dot], 3)], 0)
    assert reference_picks(good, settings(), sp, 1, nothing) == ([-1], 0)  # nothing to get right


def test_reference_crops_from_the_left():
    """10 * train_seq_len tokens stay; a span that begins before them begins at their second token."""
    assert crop([*range(10)], 7, 10) == ([*range(10)], 7)
    assert crop([*range(11)], 7, 10) == ([*range(1, 11)], 6)
    assert crop([*range(12)], 3, 10) == ([*range(2, 12)], 1)
    assert crop([*range(30)], 3, 10) == ([*range(20, 30)], 1)
    assert crop([1, 2], 0, 10) == ([1, 2], 1)
    model = Told({(A, A): 0.5, (SPACE, A): 0.5, (SPACE, B): 0.5, (B, B): 0.25, (B, A): 0.125})
    task, items = single("multiple_choice", dict(query="Q" * 9, choices=["a", "b" * 30 + "a"], gold=0))
    want = [-math.log(0.5), -(8 * math.log(0.25) + math.log(0.125)) / 9]
    assert mean_losses(model, settings(1), LETTERS, 1, task, items, 0) == pytest.approx(want, rel=1e-6)
    assert model.asked == [[Q] * 8 + [SPACE, A], [B] * 9 + [A]]


FIVE = list("abcde")  # random.Random(1337) makes b a d c e of it


def test_reference_shuffle_and_shots():
    """Random(1234 + i).sample over the others: for five examples and two shots 41, 43, 43, 14, 01."""
    assert shuffled(FIVE, 0) == list("badce") and shuffled(FIVE, 3) == list("bad") and FIVE == list("abcde")
    items = shuffled([dict(query=f"Q{c}", choices=[c, c.upper()], gold=i % 2) for i, c in enumerate(FIVE)], 0)
    task = dict(kind="multiple_choice", shots=2, delimiter="\n= ", items=items)
    assert prompts(task, items, 0) == [f"Qe\n= e\n\nQa\n= a\n\nQb\n= {c}" for c in "bB"]
    assert prompts(task, items, 3) == [f"Qa\n= a\n\nQe\n= e\n\nQc\n= {c}" for c in "cC"]
    assert prompts(task | {"shots": 0}, items, 3) == ["Qc\n= c", "Qc\n= C"]
    items = [dict(context=f" {c}? \n", continuation=f"{c}!") for c in "badce"]
    task = dict(kind="language_modeling", shots=2, delimiter="\n= ", items=items)
    assert prompts(task, items, 1) == ["e?\n= e!\n\nc?\n= c!\n\na?\n=", "e?\n= e!\n\nc?\n= c!\n\na?\n= a!"]
    items = [dict(context_options=[f"{c}1", f"{c}2"], continuation="z", gold=c < "c") for c in "badce"]
    task = dict(kind="schema", shots=2, delimiter=" ", items=items)
    assert prompts(task, items, 4) == [f"b2 z\n\na2 z\n\ne{k} z" for k in (1, 2)]


def test_reference_core(tmp_path):
    """Half right of two choices is nothing, all right is 1, all wrong of four is -1/3."""
    items = [dict(query="Q", choices=["a", "b"], gold=i) for i in (0, 1)]
    tasks = [dict(label="half", kind="multiple_choice", items=items, base=50),
             dict(label="all", kind="multiple_choice", items=items[1:], base=50),
             dict(label="none", kind="multiple_choice", items=[items[0] | {"choices": [*"abab"]}], base=25),
             dict(label="words", kind="language_modeling", items=[dict(context="Q", continuation="b")] * 4)]
    model = Told({(Q, SPACE): 0.9, (SPACE, A): 0.3, (SPACE, B): 0.6})
    core, mean, found = reference_core(model, settings(), LETTERS, 1, write_bundle(tmp_path, tasks))
    assert {label: one["accuracy"] for label, one in found.items()} == dict(half=0.5, all=1, none=0, words=1)
    assert found["half"]["centered"] == 0 and found["none"]["centered"] == pytest.approx(-1 / 3)
    assert core is None and mean == pytest.approx((0 + 1 - 1 / 3 + 1) / 4)
    assert [one["n"] for one in found.values()] == [2, 1, 1, 4] and len(set(LABELS)) == 22


# -------------------------------------------------------------------------------- a bundle of hard cases
WORDS = """name list None True False path self args value string error file import class def return if else
for in not with open parser option default type index count""".split()
STRANGE = ["naïve café", "日本語のテキスト", "line\u2028separator", "para\u2029graph", "next\u0085line",
           "🙂 and \U0001f469\u200d\U0001f467", "tab\tand\vmore", "e\u0301 é", "\u00a0no-break\u00a0",
           "under▁score", "\u3000ideographic", "unit \x1f separator"]


def hard_tasks():
    """All three types with what goes wrong: equal, nested and empty options, ties, prompts around and far
    beyond 640 tokens, delimiters that break lines or merge, text that tokenises anew, Unicode."""
    rng = random.Random(5)

    def some(least, most):
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))

    def choice(query, *choices):
        return dict(query=query, choices=list(choices), gold=rng.randrange(len(choices)))

    def schema(continuation, *contexts):
        gold = rng.randrange(len(contexts))
        return dict(context_options=list(contexts), continuation=continuation, gold=gold)

    def words(context, continuation):
        return dict(context=context, continuation=continuation)

    a, b = some(1, 2), some(3, 4)
    choices = [
        choice(some(3, 8), a, b, a, b), choice(some(3, 8), b, a, a), choice(some(3, 8), b, b, b, a),
        choice(some(3, 8), "the list", "the list of"), choice(some(3, 8), "the list of", "the list", "none"),
        choice(some(3, 8), "x", "x y", "x y z"), choice(some(3, 8), "same", "same"), choice("", "a", "b"),
        choice(some(3, 8), "only one"), choice(some(3, 8), "", "something", ""), choice(some(3, 8), "", ""),
        choice("ret", "urn", "turned", "urns"), choice(some(2, 3) + " ", " led by blanks", "  two of them"),
        choice("no\nbreak\n", "line\nbreak", "line\n\nbreak", "line break"),
        *(choice(some(2, 5) + " " + text, text, text + " " + a, a) for text in STRANGE[:6]),
        *(choice(some(3, 8), *(some(1, 6) for _ in range(rng.randint(2, 5)))) for _ in range(10))]
    long = [
        *(choice("self " * n + some(1, 1), some(1, 3), some(1, 3), some(1, 3)) for n in range(633, 641)),
        *(choice(some(1, 3), some(900, 1100), some(1100, 1300), some(20, 30)) for _ in range(4)),
        *(choice(some(700, 900), some(1, 4), some(1, 4), some(1, 4)) for _ in range(4))]
    schemas = [
        schema("ends the same", "the list", "the path", "the name"), schema("twice", "one", "one"),
        schema("is longer", "short", "short but longer"), schema("", "a", "b"), schema("", "same", "same"),
        schema("urn", "ret", "not a ret"), schema("and more", "", "something"), schema("x", "only one"),
        schema(some(800, 900), "name", "value"), schema("end", some(800, 900), some(600, 700)),
        *(schema(some(2, 4) + text, text + "1", text + "22") for text in STRANGE[6:]),
        *(schema(some(1, 4), *(some(2, 6) for _ in range(2))) for _ in range(10))]
    continued = [
        words(some(3, 8) + "  \n", "name"), words("  " + some(3, 8), " led by a blank"), words("", "some"),
        words(some(3, 8), ""), words(some(3, 8), "name\n"), words(some(800, 900), some(1, 2)),
        words(some(3, 8), some(800, 900)), *(words(some(2, 4) + text, text) for text in STRANGE[:4]),
        *(words(some(3, 10), rng.choice(WORDS)) for _ in range(25))]
    merged = [words(some(2, 5), end) for end in ("turn", "place", "ad", " ", "", "\n", "quest", "é", "sult")]
    kinds = "multiple_choice", "schema", "language_modeling"
    return [
        dict(label="choices", kind=kinds[0], items=choices, base=25, blank_lines=1),
        dict(label="choices_shots", kind=kinds[0], items=choices, base=25, shots=3, delimiter="\nAnswer: "),
        dict(label="choices_glued", kind=kinds[0], items=choices[:12], base=25, delimiter=""),
        dict(label="choices_long", kind=kinds[0], items=long, base=100 / 3, blank_lines=2),
        dict(label="schemas", kind=kinds[1], items=schemas, base=50),
        dict(label="schemas_shots", kind=kinds[1], items=schemas, base=50, shots=2, delimiter="\n"),
        dict(label="schemas_glued", kind=kinds[1], items=schemas[:6], base=50, delimiter=""),
        dict(label="words", kind=kinds[2], items=continued),
        dict(label="words_shots", kind=kinds[2], items=continued, shots=4, delimiter="\nAnswer: "),
        dict(label="words_merged", kind=kinds[2], items=merged, shots=1, delimiter="\nre"),
        dict(label="words_colon", kind=kinds[2], items=merged, delimiter=":"),
    ]


@pytest.fixture(scope="module")
def toy(tiny_data):
    cfg = toy_config(tiny_data, vocab_size=512, bos_id=1)
    data = train_gpt.open_data(cfg, quiet)
    return SimpleNamespace(cfg=cfg, data=data, sp=data.tokenizer, bos=data.bos)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("bundle"), hard_tasks())


MODELS = {
    "defaults": {},
    "windows": dict(num_layers=3, window_pattern="SSL", window_schedule=(8,)),
    "stages": dict(window_pattern="SL", window_schedule=(4, 24), eval_window=13, rope_yarn=True,
                   max_doc_len=16),
    "short context": dict(train_seq_len=16, train_batch_tokens=64, num_kv_heads=1, attn_gate_dim=4,
                          smear_dim=3),
    "shorter context": dict(train_seq_len=2, train_batch_tokens=64),  # of 20 tokens, most prompts lose some
    "no lookback": dict(key_offset=False, bigram_rows=0, tie_embeddings=True, unet_skips=False,
                        rope_base=0.0),
}


def random_model(cfg, seed):
    """First values, and noise on every parameter."""
    model, generator = GPT(cfg), torch.Generator().manual_seed(seed)
    init_parameters(model, seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator)
    return model


def taught_model(cfg, seed, toy, tasks, most=0, steps=20):
    """A random model that has learnt the continuations of every other example of language modelling, from
    the last 80 tokens of prompts, so that it gets some right and some wrong."""
    model, batch = random_model(cfg, seed), []
    for task in tasks:
        items = shuffled(task["items"], most)
        for i in range(0, len(items) if task["kind"] == "language_modeling" else 0, 2):
            ((tokens, start),) = example_spans(toy.sp, toy.bos, task, items, i)[0]
            batch.append(crop(tokens, start, min(80, 10 * cfg.train_seq_len)))
    if not batch:
        return model
    T = max(len(tokens) for tokens, _ in batch)
    inputs, targets = torch.zeros(len(batch), T, dtype=torch.int64), torch.full((len(batch), T), -100)
    for row, (tokens, start) in enumerate(batch):
        inputs[row, :len(tokens)] = torch.tensor(tokens)
        targets[row, start - 1:len(tokens) - 1] = inputs[row, start:len(tokens)]
    model.set_context(T, train_gpt.eval_window(cfg))
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        torch.nn.functional.cross_entropy(model.logits(inputs).flatten(0, 1), targets.flatten()).backward()
        adam.step()
        adam.zero_grad()
    return model


def core_data(toy):
    return toy.data._replace(val=None, train=None)  # CORE has no business with either


def read_tasks(folder, most=0):
    tasks, problem = core.read_tasks(folder, most)
    assert not problem, problem
    return tasks


def core_picks(model, cfg, data, team, task):
    return core.pick_options(task, core.Scorer(
        model, lambda rows: train_gpt.scored(model, cfg, rows, team), train_gpt.log_probs,
        train_gpt.eval_window(cfg), data.tokenizer.encode, data.bos, 10 * cfg.train_seq_len, team,
        total=None, log=quiet))


def assert_same_picks(toy, model, cfg, mine, task, most=0):
    """core_picks of 1, 2 and 3 ranks against the reference. Returns the picks."""
    want, retokenized = reference_picks(model, cfg, toy.sp, toy.bos, task, most)
    items = shuffled(task["items"], most)
    for world_size in (1, 2, 3):
        parts = [core_picks(model, cfg, core_data(toy), fake_team(rank, world_size), mine)
                 for rank in range(world_size)]
        got = {i: int(pick) for picks, _ in parts for i, pick in picks.items()}
        assert sum(len(picks) for picks, _ in parts) == len(got), "an example is scored twice"
        assert sorted(got) == list(range(len(want))), "examples are missing"
        if world_size < len(want):
            assert all(len(picks) <= len(want) - world_size + 1 for picks, _ in parts), "a rank is idle"
        assert sum(count for _, count in parts) == retokenized, task["label"]
        for i, pick in enumerate(want):
            if got[i] != pick and not within_noise(toy, model, cfg, task, items, i, got[i], pick):
                texts = [text[-200:] for text in prompts(task, items, i)]
                pytest.fail(f"{task['label']} {i} of {world_size} ranks: {got[i]}, not {pick}: {texts}")
    return want


def within_noise(toy, model, cfg, task, items, i, got, want):
    """Whether rounding alone can explain another pick. Never between options of the same tokens."""
    if task["kind"] == "language_modeling":
        return any(abs(lead) < NOISE for lead in leads(model, cfg, toy.sp, toy.bos, task, items, i))
    losses = mean_losses(model, cfg, toy.sp, toy.bos, task, items, i)
    if -1 in (got, want) or None in (losses[got], losses[want]):
        return False
    found, _ = example_spans(toy.sp, toy.bos, task, items, i)
    return found[got] != found[want] and abs(losses[got] - losses[want]) < NOISE


def test_the_small_bundle_holds_its_hard_cases(toy, bundle):
    """By the reference: empty and overlong spans, retokenised prompts, and raw separators inside lines."""
    tasks = {task["label"]: task for task in read_bundle(bundle)}
    assert [task | {"items": 0} for task in tasks.values()] == [
        dict(shots=0, base=0, delimiter=" ") | drop(task, "blank_lines") | {"items": 0}
        for task in hard_tasks()]
    assert all(tasks[task["label"]]["items"] == task["items"] for task in hard_tasks())
    raw = (bundle / "eval_data/some_category/choices.jsonl").read_bytes()
    assert all(text.encode() in raw for text in ("\u2028", "\u2029", "\u0085")) and raw.endswith(b"}\n\n")
    facts = Counter()
    for label, task in tasks.items():
        for i in range(len(task["items"])):
            found, lost = example_spans(toy.sp, toy.bos, task, task["items"], i)
            lengths = {len(tokens) - start for tokens, start in found}
            facts[label, "empty"] += 0 in lengths
            facts[label, "all empty"] += lengths == {0}
            facts[label, "retokenized"] += lost
            facts[label, "overlong"] += any(len(tokens) > 640 for tokens, _ in found)
            facts[label, "span cut"] += any(len(tokens) - 640 > start for tokens, start in found)
            facts[label, "at the limit"] += any(len(tokens) in (640, 641) for tokens, _ in found)
            facts[label, "no start"] += any(start == 0 for _, start in found)
    for case in [("choices", "empty"), ("choices", "all empty"), ("choices_long", "overlong"),
                 ("choices_long", "span cut"), ("choices_long", "at the limit"), ("schemas", "no start"),
                 ("schemas", "overlong"), ("words", "overlong"), ("words", "span cut"),
                 ("words_colon", "empty"), ("words_merged", "retokenized")]:
        assert facts[case] > 0, case
    assert facts["words_merged", "retokenized"] < len(tasks["words_merged"]["items"])


@pytest.mark.parametrize("published", [False, True])
def test_core_tasks_reads_the_bundle(tmp_path, published):
    """In the layout of both core.yaml files; shuffled, then cut."""
    write_bundle(tmp_path, hard_tasks(), published)
    want = read_bundle(tmp_path)
    assert [task["delimiter"] for task in want][:3] == [" ", "\nAnswer: ", ""]
    for most in (0, 5, 10_000):
        for mine, task in zip(read_tasks(tmp_path, most), want, strict=True):
            items = shuffled(task["items"], most)
            assert (mine.label, mine.kind, mine.shots) == (task["label"], task["kind"], task["shots"])
            assert mine.base == pytest.approx(task["base"])
            for one, item in zip(mine.items, items, strict=True):
                gold, gap = item.get("gold", 0), task["delimiter"]
                if task["kind"] == "language_modeling":
                    question = item["context"].strip() + gap
                    assert one == ([question + item["continuation"]], 0, question)
                elif task["kind"] == "schema":
                    end = gap + item["continuation"]
                    assert one == ([context + end for context in item["context_options"]], gold, None)
                else:
                    assert one == ([item["query"] + gap + choice for choice in item["choices"]], gold, None)
            assert len(mine.items) == len(items)


@pytest.mark.parametrize("name", MODELS)
def test_picks_equal_the_reference(toy, bundle, name):
    """Every example of the small bundle; each task has options picked and not, words right and wrong."""
    cfg = replace(toy.cfg, **MODELS[name])
    tasks = read_bundle(bundle)
    model, picked = taught_model(cfg, 3, toy, tasks), {}
    for mine, task in zip(read_tasks(bundle), tasks, strict=True):
        picked[task["label"]] = set(assert_same_picks(toy, model, cfg, mine, task))
    assert {-1, 0, 1, 2} <= picked["choices"] and {0, 1, 2} <= picked["choices_long"]
    assert {0, 1} <= picked["schemas"] and -1 in picked["schemas_glued"]
    assert all(picked[label] == {0, -1} for label in ("words", "words_shots"))


def test_picks_of_equal_losses(toy, bundle):
    """A zero head finds all tokens alike: the first option with a span wins, no word is right. The model is
    left as it was."""
    model = GPT(toy.cfg)
    init_parameters(model, 0)
    assert not model.head.any()
    before = [p.detach().clone() for p in model.parameters()]
    for mine, task in zip(read_tasks(bundle, 12), read_bundle(bundle), strict=True):
        picks = assert_same_picks(toy, model, toy.cfg, mine, task, 12)
        items = shuffled(task["items"], 12)
        for i, pick in enumerate(picks):
            found, _ = example_spans(toy.sp, toy.bos, task, items, i)
            spans = [j for j, (tokens, start) in enumerate(found) if start < len(tokens)]
            assert pick == (spans[0] if spans and task["kind"] != "language_modeling" else -1)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())


def test_picks_depend_on_what_is_asked(toy, bundle):
    """The reference itself: another model, another cut or other shots give other picks."""
    task = {task["label"]: task for task in read_bundle(bundle)}["choices_shots"]
    models = [random_model(toy.cfg, seed) for seed in (0, 1)]
    picks = [reference_picks(model, toy.cfg, toy.sp, toy.bos, task)[0] for model in models]
    fewer = reference_picks(models[0], toy.cfg, toy.sp, toy.bos, task | {"shots": 2})[0]
    cut = reference_picks(models[0], toy.cfg, toy.sp, toy.bos, task, 20)[0]
    assert picks[0] != picks[1] and picks[0] != fewer and picks[0][:20] != cut and len(cut) == 20


@pytest.mark.skipif(not REAL.is_dir(), reason="no shared/core_bundle beside the repository")
@pytest.mark.parametrize("label", """jeopardy arc_easy copa openbook_qa lambada_openai winograd winogrande
    bigbench_operators""".split())
def test_picks_on_real_tasks(toy, label):
    """Examples of the published tasks, 25 of each; CORE_TEST_ALL=1: all of them."""
    cfg = replace(toy.cfg, num_layers=3, window_pattern="SSL", window_schedule=(48,))
    (task,) = [task for task in read_bundle(REAL) if task["label"] == label]
    (mine,) = [mine for mine in read_tasks(REAL, REAL_MOST) if mine.label == label]
    model = taught_model(cfg, 4, toy, [task], 25)
    picks = assert_same_picks(toy, model, cfg, mine, task, REAL_MOST)
    assert len(picks) == (min(len(task["items"]), REAL_MOST) or len(task["items"]))
    assert len(set(picks)) > 1 and (-1 in picks) == (task["kind"] == "language_modeling")


# -------------------------------------------------------------------------------- the metric
def small_tasks(labels, size=6):
    """Two choices, two contexts or one word each, in turn; some with shots, some with a high baseline."""
    rng, tasks = random.Random(8), []
    for k, label in enumerate(labels):
        pairs = [(" ".join(rng.choices(WORDS, k=4)), rng.sample(WORDS, 2), i % 2)
                 for i in range(size + k % 3)]
        kind = ("multiple_choice", "schema", "language_modeling")[k % 3]
        items = {"multiple_choice": [dict(query=q, choices=two, gold=gold) for q, two, gold in pairs],
                 "schema": [dict(context_options=two, continuation=q, gold=gold) for q, two, gold in pairs],
                 "language_modeling": [dict(context=q, continuation=two[0]) for q, two, _ in pairs]}[kind]
        tasks.append(dict(label=label, kind=kind, items=items, shots=k % 4, base=(62, 40.3, 0)[k % 3]))
    return tasks


def core_config(cfg, folder, most=0):
    return replace(cfg, core_bundle=str(folder), core_metric_max_per_task=most)


@pytest.mark.parametrize("labels, most", [(LABELS, 0), (LABELS[1:], 0), (LABELS[:1], 0), (LABELS[3:7], 5)])
def test_core_metric_equals_reference(toy, tmp_path, labels, most):
    """All 22 tasks make core; fewer make core_partial, and core is None."""
    tasks = small_tasks(labels)
    cfg = core_config(toy.cfg, write_bundle(tmp_path, tasks), most)
    lines = []
    model = taught_model(cfg, 6, toy, read_bundle(tmp_path), most)
    found = train_gpt.core_metric(model, cfg, core_data(toy), fake_team(), lambda *some: lines.extend(some))
    core, mean, want = reference_core(model, cfg, toy.sp, toy.bos, tmp_path, most)
    assert list(found["core_tasks"]) == labels
    for label, one in want.items():
        mine = found["core_tasks"][label]
        assert mine["n"] == one["n"] and mine["seconds"] >= 0
        assert mine["accuracy"] == pytest.approx(one["accuracy"], abs=1e-9)
        assert mine["centered"] == pytest.approx(one["centered"], abs=1e-9)
        assert any(label in line for line in lines)
    if labels == LABELS:
        assert found["core"] == pytest.approx(core) and found.get("core_partial") is None
        centered = [one["centered"] for one in want.values()]
        assert min(centered) < 0 < max(centered)
    else:
        assert core is None and found["core"] is None and found["core_partial"] == pytest.approx(mean)


def test_centred_accuracy(toy, tmp_path):
    """Two equal options and one with an empty span: the first is picked, so that gold alone decides."""
    golds = {"quarter": [0, 1, 1, 2], "most": [0, 0, 0, 1], "all": [0, 0, 0, 0], "none": [1, 2, 1, 2]}
    tasks = [dict(label=label, kind="multiple_choice", base=50, items=[
        dict(query="def", choices=["name a", "name a", "name"], gold=gold) for gold in some])
        for label, some in golds.items()]
    cfg = core_config(toy.cfg, write_bundle(tmp_path, tasks))
    found = train_gpt.core_metric(random_model(cfg, 1), cfg, core_data(toy), fake_team(), quiet)
    got = {label: (one["accuracy"], one["centered"]) for label, one in found["core_tasks"].items()}
    assert got == {"quarter": (0.25, -0.5), "most": (0.75, 0.5), "all": (1, 1), "none": (0, -1)}
    assert found["core_partial"] == pytest.approx(0)


def test_random_weights_score_the_baseline(toy, tmp_path):
    """Gold is drawn: whatever a model picks is right by chance, within four standard errors."""
    rng, n = random.Random(2), 600
    tasks = []
    for ways, label in ((2, "two"), (4, "four"), (5, "five")):
        tasks.append(dict(label=label, kind="multiple_choice", base=100 / ways, shots=ways % 4, items=[
            dict(query=rng.choice(WORDS), choices=rng.sample(WORDS, ways), gold=rng.randrange(ways))
            for _ in range(n)]))
    tasks.append(dict(label="contexts", kind="schema", base=50, items=[
        dict(context_options=rng.sample(WORDS, 2), continuation=" ".join(rng.choices(WORDS, k=2)),
             gold=rng.randrange(2)) for _ in range(n)]))
    tasks.append(dict(label="word", kind="language_modeling", base=0, items=[
        dict(context=" ".join(rng.choices(WORDS, k=2)), continuation=rng.choice(WORDS)) for _ in range(n)]))
    cfg = core_config(toy.cfg, write_bundle(tmp_path, tasks))
    found = train_gpt.core_metric(random_model(cfg, 9), cfg, core_data(toy), fake_team(), quiet)["core_tasks"]
    for task in tasks[:-1]:
        p = task["base"] / 100
        assert abs(found[task["label"]]["accuracy"] - p) < 4 * math.sqrt(p * (1 - p) / n), task["label"]
        assert abs(found[task["label"]]["centered"]) < 4 * math.sqrt(p / (1 - p) / n)
    assert found["word"]["accuracy"] < 0.05 and found["word"]["n"] == n


# -------------------------------------------------------------------------------- bad bundles
def edit(path, old, new):
    text = Path(path).read_text(encoding="utf-8")
    assert old in text
    Path(path).write_text(text.replace(old, new), encoding="utf-8")


def set_line(name, number, line):
    """Another line `number`, from 1, of a task's file; a function gets the old item."""
    path = Path("eval_data/some_category", name + ".jsonl")
    lines = path.read_bytes().split(b"\n")
    line = line(json.loads(lines[number - 1])) if callable(line) else line
    lines[number - 1] = line if isinstance(line, bytes) else json.dumps(line).encode()
    path.write_bytes(b"\n".join(lines))


def cut_lines(name, count):
    path = Path("eval_data/some_category", name + ".jsonl")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:count]))


TABLE = "eval_meta_data.csv"
BAD_BUNDLES = {
    "no core.yaml": (lambda: Path("core.yaml").unlink(), ["core.yaml"]),
    "core.yaml without tasks": (lambda: Path("core.yaml").write_text("icl_tasks:\n"), ["core.yaml"]),
    "core.yaml of another kind": (lambda: Path("core.yaml").write_text("%PDF-1.4 \x00\n- x"), ["core.yaml"]),
    "no csv": (lambda: Path(TABLE).unlink(), [TABLE]),
    "no task file": (lambda: Path("eval_data/some_category/copa.jsonl").unlink(), ["copa.jsonl"]),
    "no eval_data": (lambda: shutil.rmtree("eval_data"), [".jsonl"]),
    "line cut": (lambda: set_line("copa", 3, b'{"query": "a", "choices": ["b'), ["copa.jsonl", "line 3"]),
    "line no object": (lambda: set_line("copa", 2, [1, 2]), ["copa.jsonl", "line 2"]),
    "line without its key": (lambda: set_line("copa", 4, lambda item: drop(item, "choices")),
                             ["copa.jsonl", "line 4"]),
    "line without gold": (lambda: set_line("winograd", 1, lambda item: drop(item, "gold")),
                          ["winograd.jsonl", "line 1"]),
    "line without continuation": (lambda: set_line("jeopardy", 5, lambda item: drop(item, "continuation")),
                                  ["jeopardy.jsonl", "line 5"]),
    "line no UTF-8": (lambda: set_line("jeopardy", 2, b'{"context": "\xff\xfe", "continuation": "a"}'),
                      ["jeopardy.jsonl"]),
    "unknown type": (lambda: edit("core.yaml", "icl_task_type: schema", "icl_task_type: essay"),
                     ["core.yaml", "essay"]),
    "too few examples": (lambda: cut_lines("jeopardy", 3), ["jeopardy"]),
    "no examples": (lambda: cut_lines("copa", 0), ["copa"]),
    "gold too large": (lambda: set_line("copa", 5, lambda item: item | {"gold": 2}),
                       ["copa.jsonl", "line 5"]),
    "gold negative": (lambda: set_line("winograd", 2, lambda item: item | {"gold": -1}),
                      ["winograd.jsonl", "line 2"]),
    "gold of text": (lambda: set_line("copa", 1, lambda item: item | {"gold": "0"}),
                     ["copa.jsonl", "line 1"]),
    "no tasks": (lambda: Path("core.yaml").write_text("icl_tasks: []\n"), ["core.yaml"]),
    "shots below 0": (lambda: edit("core.yaml", "num_fewshot: [", "num_fewshot: [-"), ["core.yaml"]),
    "baseline of 100": (lambda: edit(TABLE, ",50,", ",100,"), [TABLE, "copa"]),
    "no baseline": (lambda: edit(TABLE, "winograd,", "winogradsky,"), [TABLE, "winograd"]),
    "empty baseline": (lambda: edit(TABLE, ",50,", ",,"), [TABLE, "copa"]),
}


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A good bundle of three tasks as the current folder."""
    kinds = dict(copa="multiple_choice", winograd="schema", jeopardy="language_modeling")
    tasks = [task | {"kind": kinds[task["label"]], "base": 50, "shots": 3 * (task["label"] == "jeopardy")}
             for task in small_tasks(list(kinds))]
    write_bundle(tmp_path / "bundle", tasks)
    monkeypatch.chdir(tmp_path / "bundle")
    return tmp_path


def check_sentence(text, words):
    assert len(text.strip().splitlines()) == 1 and all(word in text for word in words), text
    assert str(Path.cwd().parent) not in text


@pytest.mark.parametrize("name", BAD_BUNDLES)
def test_bad_bundle(copy, name):
    damage, words = BAD_BUNDLES[name]
    read_tasks(".")
    damage()
    tasks, problem = core.read_tasks(Path("."))
    assert tasks is None
    check_sentence(problem, words)


def test_too_few_examples_after_the_cut(copy):
    """Three shots and the question: four examples do, three do not."""
    assert [len(task.items) for task in read_tasks(".", 4)] == [4, 4, 4]
    tasks, problem = core.read_tasks(".", 3)
    assert tasks is None and "jeopardy" in problem


@pytest.fixture(scope="module")
def artifact(toy):
    return train_gpt.pack_artifact(random_model(toy.cfg, 12))


def command(tiny_data, **settings):
    base = {key: TOY[key] for key in ("DATA_FINGERPRINT", "DEVICE", "COMPILE", "DTYPE", "VAL_TOKENS")}
    return base | dict(DATA_PATH=str(tiny_data / TOY["DATA_PATH"]), SAMPLE_TOKENS="0", CORE="1",
                       CORE_BUNDLE=".", EVAL_FROM="model.ptz", RUN_ID="core") | settings


@pytest.mark.parametrize("name", BAD_BUNDLES)
def test_bad_bundle_exits_2(copy, tiny_data, artifact, capsys, name):
    """Before there is a run folder, in one sentence."""
    damage, words = BAD_BUNDLES[name]
    damage()
    Path("model.ptz").write_bytes(artifact)
    code = train_gpt.main([], command(tiny_data))
    out, err = capsys.readouterr()
    assert code == 2 and "Traceback" not in out + err and not Path("logs").exists()
    check_sentence(err, words)


def test_settings_of_core_exit_2(copy, tiny_data, artifact, capsys):
    Path("model.ptz").write_bytes(artifact)
    for settings, words in [({"CORE_BUNDLE": "nowhere"}, ["nowhere"]),
                            ({"CORE_METRIC_MAX_PER_TASK": "3"}, ["jeopardy"]),
                            ({"CORE_METRIC_MAX_PER_TASK": "-2"}, ["core_metric_max_per_task=-2"])]:
        assert train_gpt.main([], command(tiny_data, **settings)) == 2
        check_sentence(capsys.readouterr().err, words)
    assert not Path("logs").exists()


# -------------------------------------------------------------------------------- through the command line
def result_of(run_id):
    return json.loads(Path("logs", run_id, "result.json").read_text())


@pytest.mark.slow
def test_core_of_an_artifact(copy, toy, tiny_data, artifact):
    """EVAL_FROM with CORE=1, alone and on two ranks: what the reference finds, in result.json and the log."""
    Path("model.ptz").write_bytes(artifact)
    model, cfg = train_gpt.load_model("model.ptz", "cpu")
    _, mean, want = reference_core(model, cfg, toy.sp, toy.bos, ".", 5)
    for ranks in (0, 2):
        env = command(tiny_data, RUN_ID=f"core{ranks}", CORE_METRIC_MAX_PER_TASK="5")
        done = run_cli(Path.cwd(), ranks=ranks, env=env)
        assert done.code == 0, done.err
        result = result_of(f"core{ranks}")
        assert result["core"] is None and result["core_partial"] == pytest.approx(mean, abs=1e-9)
        for label, one in want.items():
            assert {key: result["core_tasks"][label][key] for key in one} == pytest.approx(one)
            assert label in done.out
        assert str(Path.cwd()) not in json.dumps(result)
    env = command(tiny_data, RUN_ID="without", CORE="0", CORE_BUNDLE="nowhere")
    assert train_gpt.main([], env) == 0 and result_of("without")["core"] is None  # off: nobody looks for it


def test_core_of_all_tasks(tmp_path, monkeypatch, toy, tiny_data, artifact, capsys):
    """22 tasks: result.json has core, and no core_partial."""
    write_bundle(tmp_path / "all", small_tasks(LABELS))
    monkeypatch.chdir(tmp_path / "all")
    Path("model.ptz").write_bytes(artifact)
    model, cfg = train_gpt.load_model("model.ptz", "cpu")
    core, _, _ = reference_core(model, cfg, toy.sp, toy.bos, ".")
    assert train_gpt.main([], command(tiny_data)) == 0, capsys.readouterr()
    result = result_of("core")
    assert result["core"] == pytest.approx(core, abs=1e-9) and result.get("core_partial") is None
    assert list(result["core_tasks"]) == LABELS and f"core_metric:{core:.6f}" in capsys.readouterr().out
