"""CORE: cases worked by hand, and many examples against one forward for each option. Also writes bundles.
What a run says of a bundle: test_gpt2.py."""

import csv
import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train_gpt
from helpers import fake_team, toy_config
from test_model import randomised
from train_gpt import Refused, log_probs, pick_options, prompt_rows, read_tasks

pytestmark = pytest.mark.usefixtures("one_thread")
LABELS = """hellaswag_zeroshot jeopardy bigbench_qa_wikidata arc_easy arc_challenge copa commonsense_qa piqa
openbook_qa lambada_openai hellaswag winograd winogrande bigbench_dyck_languages agi_eval_lsat_ar
bigbench_cs_algorithms bigbench_operators bigbench_repeat_copy_logic squad coqa boolq
bigbench_language_identification""".split()
COLUMNS = ["Eval Task", "Task Category", "Task Type", "#shots", "#datapoints", "Random baseline",
           "Centered Metric?", "Description"]


def write_bundle(folder, tasks):
    """core.yaml, eval_meta_data.csv and eval_data/ of tasks: dicts of label, kind, items and, if not the
    default, shots, base, delimiter (None: not written). A blank line ends each file."""
    folder = Path(folder)
    lines = ["# A small bundle in the layout of the published one.", "icl_tasks:"]
    rows = [COLUMNS, ["not_in_core", "none", "question answering", 3, 1000, "", "", "Has no baseline."]]
    for task in tasks:
        path = folder / "eval_data" / "some_category" / f"{task['label']}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in task["items"])
        path.write_bytes(f"{text}\n".encode())
        about = dict(dataset_uri=f"some_category/{path.name}", num_fewshot=f"[{task.get('shots', 0)}]",
                     icl_task_type=task["kind"], has_categories="true")
        if task.get("delimiter") is not None:
            about["continuation_delimiter"] = json.dumps(task["delimiter"])
        lines += [f"- label: {task['label']}", *(f"  {name}: {value}" for name, value in about.items())]
        rows.append([task["label"], "some category", task["kind"].replace("_", " "), task.get("shots", 0),
                     len(task["items"]), task.get("base", 0), "", 'Of "quotes", commas\nand two lines.'])
    (folder / "core.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with open(folder / "eval_meta_data.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder


def quiet(*lines, **options):
    """A log that nobody reads."""


# -------------------------------------------------------------------------------- cases worked by hand
class Pieces:
    """A tokenizer of a few pieces, longest match first: ids from 2 in the order they are given."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def encode(self, text):
        if isinstance(text, list):
            return [self.encode(one) for one in text]
        ids = []
        while text:
            piece = max((p for p in self.pieces if text.startswith(p)), key=len)
            ids.append(2 + self.pieces.index(piece))
            text = text[len(piece):]
        return ids


class Told:
    """A model whose next token depends on the last one alone: {(token, next): probability}, the rest goes to
    token 0. Remembers the rows that it was asked for."""

    def __init__(self, probabilities, train_seq_len=8, size=12):
        base = dict(vocab_size=size, model_dim=4, num_heads=1)
        self.cfg = replace(train_gpt.GPT2(), **base, train_seq_len=train_seq_len)
        self.embed = torch.zeros(1)
        self.asked = []
        self.table = torch.full((size, size), 1e-9)
        for (token, after), p in probabilities.items():
            self.table[token, after] = p
        self.table[:, 0] += 1 - self.table.sum(1)

    def context(self, T, device, dtype=None, stage=None):
        return None

    def hidden(self, tokens, context):
        """The tokens themselves: all that its logits need."""
        self.asked += tokens.tolist()
        return tokens

    def logits(self, x):
        return self.table[x].log()


Q = 2
A = 3
B = 4
SPACE = 5
LETTERS = Pieces("Q", "a", "b", " ")


def single(kind, delimiter=" ", **item):
    """A task of one example."""
    return dict(label="one", kind=kind, shots=0, base=0, delimiter=delimiter, items=[item])


def choice(query, *choices):
    return single("multiple_choice", query=query, choices=list(choices), gold=0)


def ours(task):
    """The same task as train_gpt has it, its items in the same order."""
    kind = task["kind"]
    gap = task["delimiter"]
    items = [train_gpt.read_item(kind, json.dumps(item), gap) for item in task["items"]]
    return train_gpt.Task(task["label"], kind, task["shots"], task["base"], items)


def check_by_hand(model, task, pick, spans, sp=LETTERS):
    """The trainer scores these spans, [(tokens, start)], and gives this pick."""
    longest = 10 * model.cfg.train_seq_len
    rows = prompt_rows(ours(task), 0, sp.encode, 1, longest)
    assert rows == [(tuple(tokens), max(1, start)) for tokens, start in spans]
    assert pick_options(model, model.cfg, ours(task), sp.encode, 1, fake_team()) == {0: pick}


@pytest.mark.parametrize("b_after_b, pick", [(0.25, 1), (0.2, 0)])
def test_the_lowest_mean_is_picked(b_after_b, pick):
    """The sum would take "a" both times. After BOS."""
    model = Told({(SPACE, A): 0.3, (SPACE, B): 0.4, (B, B): b_after_b})
    spans = [([1, Q, SPACE, A], 3), ([1, Q, SPACE, B, B], 3)]
    check_by_hand(model, choice("Q", "a", "bb"), pick, spans)


@pytest.mark.parametrize("choices, start, pick", [
    (["b", "a", "b"], 3, 0), (["a", "b", "b"], 3, 1), (["a", "a b"], 4, 1), (["a b", "a"], 4, 0),
    (["a", "a"], 4, -1), (["a"], 4, -1), (["a a", "a b", "a b"], 5, 1), (["", "b"], 3, 1)])
def test_ties_and_empty_spans(choices, start, pick):
    """b beats a; of equals the first; "a" before "a b" leaves nothing to score, and nothing never wins."""
    model = Told({(SPACE, A): 0.3, (SPACE, B): 0.4, (A, SPACE): 0.01})
    spans = [([1, Q, SPACE, *LETTERS.encode(text)], start) for text in choices]
    check_by_hand(model, choice("Q", *choices), pick, spans)


@pytest.mark.parametrize("contexts, end, spans, pick", [
    (["Qa", "Qb"], " a", [([1, Q, A, SPACE, A], 3), ([1, Q, B, SPACE, A], 3)], 1),
    (["a", "Qa"], " a", [([1, A, SPACE, A], 1), ([1, Q, A, SPACE, A], 2)], 0),  # the common end goes further
    (["Q", "Q"], " a", [([1, Q, SPACE, A], 0), ([1, Q, SPACE, A], 0)], 0),
    (["Qa", "Qaa"], " a", [([1, Q, A, SPACE, A], 2), ([1, Q, A, A, SPACE, A], 3)], 0),
    (["a", "b"], "", [([1, A], 2), ([1, B], 2)], -1)])
def test_schema(contexts, end, spans, pick):
    """What is scored is the common end; the option whose context makes it likeliest wins."""
    model = Told({(A, SPACE): 0.2, (B, SPACE): 0.5, (SPACE, A): 0.3, (1, A): 0.9, (Q, A): 0.5, (A, A): 0.1})
    task = single("schema", "", context_options=contexts, continuation=end, gold=0)
    check_by_hand(model, task, pick, spans)


@pytest.mark.parametrize("a_after_a, pick", [(0.6, 0), (0.4, -1)])
def test_language_modeling(a_after_a, pick):
    """Every token of the continuation is the likeliest, or the example is wrong."""
    model = Told({(Q, SPACE): 0.6, (SPACE, A): 0.7, (A, A): a_after_a})
    task = single("language_modeling", context=" Q \n", continuation="aa")
    check_by_hand(model, task, pick, [([1, Q, SPACE, A, A], 2)])  # the delimiter is stripped off the question


def test_a_question_with_other_tokens_alone():
    """"Q." and "a" make "Q" and ".a": scored from the first token that differs."""
    sp = Pieces("Q", "a", ".", ".a")
    dot = 4
    dot_a = 5
    task = single("language_modeling", ".", context="Q", continuation="aa")
    spans = [([1, Q, dot_a, A], 2)]
    check_by_hand(Told({(Q, dot_a): 0.9, (dot_a, A): 0.9}), task, 0, spans, sp)
    check_by_hand(Told({(Q, dot): 0.9, (dot_a, A): 0.9}), task, -1, spans, sp)
    nothing = single("language_modeling", ".", context="Q", continuation="")
    check_by_hand(Told({(Q, dot): 0.9}), nothing, -1, [([1, Q, dot], 3)], sp)  # nothing to get right


def test_long_prompts_lose_their_beginning():
    """10 * train_seq_len tokens stay; a span that begins before them begins at their second token."""
    model = Told({(A, A): 0.5, (SPACE, A): 0.5, (SPACE, B): 0.5, (B, B): 0.25, (B, A): 0.125}, 1)
    spans = [([Q] * 8 + [SPACE, A], 9), ([B] * 9 + [A], 1)]
    check_by_hand(model, choice("Q" * 9, "a", "b" * 30 + "a"), 0, spans)


def test_order_and_shots(tmp_path):
    """Random(1337).shuffle makes b a d c e of five examples; Random(1234 + i).sample over the others draws
    two shots for each: 41, 43, 43, 14, 01."""
    tasks = [
        dict(label="one", kind="multiple_choice", shots=2, delimiter="\n= ", base=0, items=[
            dict(query=f"Q{c}", choices=[c, c.upper()], gold=i % 2) for i, c in enumerate("abcde")]),
        dict(label="two", kind="language_modeling", shots=2, delimiter="\n= ", base=0, items=[
            dict(context=f" {c}? \n", continuation=f"{c}!") for c in "abcde"]),
        dict(label="three", kind="schema", shots=2, delimiter=" ", base=0, items=[
            dict(context_options=[f"{c}1", f"{c}2"], continuation="z", gold=int(c < "c")) for c in "abcde"])]
    write_bundle(tmp_path, tasks)
    found = {}
    asked = []

    def encode(texts):
        asked.append(texts)
        return [[1] for _ in texts]

    for task in read_tasks(tmp_path):
        for i in range(5):
            prompt_rows(task, i, encode, 1, 99)
            found[task.label, i] = asked[-1]  # the question alone comes last
    assert [task.items[0].texts[0] for task in read_tasks(tmp_path, 3)] == ["Qb\n= b", "b?\n= b!", "b1 z"]
    assert found["one", 0] == [f"Qe\n= e\n\nQa\n= a\n\nQb\n= {c}" for c in "bB"]
    assert found["one", 3] == [f"Qa\n= a\n\nQe\n= e\n\nQc\n= {c}" for c in "cC"]
    assert found["two", 1] == ["e?\n= e!\n\nc?\n= c!\n\na?\n= a!", "e?\n= e!\n\nc?\n= c!\n\na?\n="]
    assert found["three", 4] == [f"b2 z\n\na2 z\n\ne{k} z" for k in (1, 2)]


def test_centered_accuracy_by_hand(tmp_path):
    """Half right of two choices is nothing, all right is 1, all wrong of four is -1/3."""
    items = [dict(query="Q", choices=["a", "b"], gold=i) for i in (0, 1)]
    tasks = [dict(label="half", kind="multiple_choice", items=items, base=50),
             dict(label="all", kind="multiple_choice", items=items[1:], base=50),
             dict(label="none", kind="multiple_choice", items=[items[0] | {"choices": [*"abab"]}], base=25),
             dict(label="words", kind="language_modeling", items=[dict(context="Q", continuation="b")] * 4)]
    write_bundle(tmp_path, tasks)
    model = Told({(Q, SPACE): 0.9, (SPACE, A): 0.3, (SPACE, B): 0.6})
    cfg = replace(model.cfg, core_bundle=str(tmp_path))
    lines = []
    data = SimpleNamespace(tokenizer=LETTERS, bos=1)
    found = train_gpt.core_metric(model, cfg, data, fake_team(), lines.append)
    assert [line.split()[-1] for line in lines[1:-1]][-1] == "4/4" and len(lines) == 6
    tasks = found["core_tasks"].values()
    assert [task["accuracy"] for task in tasks] == [0.5, 1, 0, 1]
    assert [task["centered"] for task in tasks] == pytest.approx([0, 1, -1 / 3, 1])
    assert [task["n"] for task in tasks] == [2, 1, 1, 4]
    assert found["core"] is None and found["core_partial"] == pytest.approx(5 / 12)


# -------------------------------------------------------------------------------- many examples, the metric
WORDS = """name list None True False path self args value string error file import class def return if else
for in not with open parser option default type index count""".split() + [
    "naïve café", "日本語のテキスト", "line\u2028separator", "para\u2029graph", "next\u0085line", "e\u0301 é",
    "🙂 and \U0001f469\u200d\U0001f467", "tab\tand\vmore", "\u00a0no-break\u00a0", "unit \x1f separator", ""]


def small_tasks(labels, size=6):
    """Two choices, two contexts or one word each, in turn; some with shots, some with a high baseline."""
    rng = random.Random(8)
    tasks = []
    for k, label in enumerate(labels):
        pairs = [(" ".join(rng.choices(WORDS, k=4)), rng.sample(WORDS, 2), i % 2)
                 for i in range(size + k % 3)]
        kind = ("multiple_choice", "schema", "language_modeling")[k % 3]
        items = {"multiple_choice": [dict(query=q, choices=two, gold=gold) for q, two, gold in pairs],
                 "schema": [dict(context_options=two, continuation=q, gold=gold) for q, two, gold in pairs],
                 "language_modeling": [dict(context=q, continuation=two[0]) for q, two, _ in pairs]}[kind]
        tasks.append(dict(label=label, kind=kind, items=items, shots=k % 4, base=(62, 40.3, 0)[k % 3]))
    return tasks


@pytest.fixture(scope="module")
def toy(tiny_data):
    """gpt2 at toy size. CORE has no business with train and val."""
    cfg = toy_config(tiny_data, "gpt2", vocab_size=512, bos_id=1, depth=0, target_param_data_ratio=0.0)
    data = train_gpt.open_data(cfg, quiet)._replace(val=None, train=None)
    return SimpleNamespace(cfg=cfg, data=data, sp=data.tokenizer, bos=data.bos)


def plain_pick(model, task, rows):
    """The option with the lowest mean loss, the first of equals, or -1; language modelling: 0 where every
    token is the argmax, else -1. One forward for each row."""
    losses = []
    for tokens, first in rows:
        if first == len(tokens):
            losses.append(math.inf)
            continue
        scores = log_probs(model, torch.tensor([tokens]))[0, first - 1:-1]
        targets = torch.tensor(tokens[first:])
        if task.kind == "language_modeling":
            return 0 if torch.equal(scores.argmax(-1), targets) else -1
        losses.append(-scores.gather(-1, targets[:, None]).double().mean().item())
    return losses.index(min(losses)) if min(losses) < math.inf else -1


def test_picks_of_many_examples(toy, tmp_path):
    """Of two ranks, in batches: as one forward for each row has them. The model has learnt every other
    continuation of language modelling, so that some are right and some wrong."""
    tasks = read_tasks(write_bundle(tmp_path, small_tasks(LABELS[:6], 20)))
    model = Told({}, size=512)
    cfg = replace(model.cfg, val_batch_size=400)
    longest = 10 * cfg.train_seq_len
    model.table = torch.rand(512, 512, generator=torch.Generator().manual_seed(7))
    for task in tasks:
        rows = [prompt_rows(task, i, toy.sp.encode, toy.bos, longest) for i in range(len(task.items))]
        for (tokens, first), in rows[::2] if task.kind == "language_modeling" else ():
            model.table[list(tokens[first - 1:-1]), list(tokens[first:])] = 9.0
        picks = {}
        for rank in range(2):
            picks |= pick_options(model, cfg, task, toy.sp.encode, toy.bos, fake_team(rank, 2))
        assert picks == {i: plain_pick(model, task, its) for i, its in enumerate(rows)}, task.label
        assert {*picks.values()} >= ({-1, 0} if task.kind == "language_modeling" else {0, 1})
    assert max(len(tokens) for its in rows for tokens, _ in its) == longest


@pytest.mark.parametrize("labels, most", [(LABELS, 0), (LABELS[3:7], 5)])
def test_core_metric_is_a_mean_over_tasks(toy, tmp_path, labels, most):
    """All 22 tasks make core; fewer make core_partial, and core is None."""
    write_bundle(tmp_path, small_tasks(labels))
    cfg = replace(toy.cfg, core_bundle=str(tmp_path), core_metric_max_per_task=most)
    found = train_gpt.core_metric(randomised(cfg), cfg, toy.data, fake_team(), quiet)
    assert [*found["core_tasks"]] == labels and len(set(LABELS)) == 22
    centered = [task["centered"] for task in found["core_tasks"].values()]
    assert min(centered) < max(centered) and (found["core"] is None) == (labels != LABELS)
    name = "core_partial" if found["core"] is None else "core"
    assert found[name] == pytest.approx(sum(centered) / len(centered))
    assert {task["n"] for task in found["core_tasks"].values()} == ({5} if most else {6, 7, 8})


# -------------------------------------------------------------------------------- bad bundles
def edit(path, old, new):
    text = Path(path).read_text(encoding="utf-8")
    assert old in text
    Path(path).write_text(text.replace(old, new), encoding="utf-8")


def edit_line(name, number, change):
    """Another line `number`, from 1, of a task's file: bytes, or what change makes of the item."""
    path = Path("eval_data/some_category", name + ".jsonl")
    lines = path.read_bytes().split(b"\n")
    item = None if isinstance(change, bytes) else change(json.loads(lines[number - 1]))
    lines[number - 1] = json.dumps(item).encode() if item else change
    path.write_bytes(b"\n".join(lines))


def less(key):
    return lambda item: {name: value for name, value in item.items() if name != key}


def gold(value):
    return lambda item: item | {"gold": value}


def in_encoding(encoding):
    """Every file of the bundle in another encoding, with its mark."""
    for path in (Path("core.yaml"), Path(TABLE), *Path("eval_data").rglob("*.jsonl")):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            text = text.replace("\n", "\r\n", 1)
        path.write_bytes(text.encode(encoding))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "utf-16-le", "utf-32-be"])
def test_tasks_in_other_encodings(encoding, copy):
    """The same tasks, by what the first bytes of each file say, whatever their line ends."""
    plain = read_tasks(".")
    in_encoding(encoding)
    assert read_tasks(".") == plain


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_json_with_a_mark(encoding, tiny_data, tmp_path):
    """A manifest and GPT-2's vocabulary."""
    shutil.copytree(tiny_data / "data", tmp_path / "data")
    cfg = toy_config(tmp_path)
    manifest = Path(cfg.data_path, "manifest.json")
    manifest.write_text(manifest.read_text("utf-8"), encoding=encoding)
    assert len(train_gpt.open_data(cfg, quiet).train) == 3
    vocabulary = tmp_path / "vocabulary.json"
    vocabulary.write_text('{"a": 1, "b": 0}', encoding=encoding)
    assert train_gpt.gpt2_texts(str(vocabulary)) == [b"b", b"a"]


def test_fewer_examples_than_shots(copy):
    """Where CORE_METRIC_MAX_PER_TASK leaves too few, it is named, with what is enough; the file is whole."""
    for most in (1, 2, 3):
        with pytest.raises(Refused, match=f"core_metric_max_per_task={most}: jeopardy shows 3 "):
            read_tasks(".", most)
    assert {len(task.items) for task in read_tasks(".", 4)} == {4}


COPA = "eval_data/some_category/copa.jsonl"
TABLE = "eval_meta_data.csv"
BAD_BUNDLES = {  # what happens to a good one: words of the sentence
    "no core.yaml": (lambda: Path("core.yaml").unlink(), ["core.yaml"]),
    "no tasks": (lambda: Path("core.yaml").write_text("icl_tasks: []\n"), ["core.yaml"]),
    "core.yaml of another kind": (lambda: Path("core.yaml").write_text("%PDF-1.4 \x00\n- x"), ["core.yaml"]),
    "no csv": (lambda: Path(TABLE).unlink(), [TABLE]),
    "no task file": (lambda: Path(COPA).unlink(), ["copa.jsonl"]),
    "no examples": (lambda: Path(COPA).write_text("\n"), ["copa"]),
    "line cut": (lambda: edit_line("copa", 3, b'{"query": "a", "choices": ["b'), ["copa.jsonl", "line 3"]),
    "line no object": (lambda: edit_line("copa", 2, b"[1, 2]"), ["copa.jsonl", "line 2"]),
    "line no UTF-8": (lambda: edit_line("jeopardy", 2, b'{"context": "\xff"}'), ["jeopardy.jsonl"]),
    "no choices": (lambda: edit_line("copa", 4, less("choices")), ["copa.jsonl", "line 4"]),
    "no gold": (lambda: edit_line("winograd", 1, less("gold")), ["winograd.jsonl", "line 1"]),
    "gold too large": (lambda: edit_line("copa", 5, gold(2)), ["copa.jsonl", "line 5"]),
    "gold negative": (lambda: edit_line("copa", 2, gold(-1)), ["copa.jsonl", "line 2"]),
    "gold of text": (lambda: edit_line("copa", 1, gold("0")), ["copa.jsonl", "line 1"]),
    "unknown type": (lambda: edit("core.yaml", "icl_task_type: schema", "icl_task_type: essay"), ["essay"]),
    "shots below 0": (lambda: edit("core.yaml", "num_fewshot: [", "num_fewshot: [-"), ["core.yaml"]),
    "baseline of 100": (lambda: edit(TABLE, ",50,", ",100,"), [TABLE, "copa"]),
    "no baseline": (lambda: edit(TABLE, "winograd,", "winogradsky,"), [TABLE, "winograd"]),
    "empty baseline": (lambda: edit(TABLE, ",50,", ",,"), [TABLE, "copa"])}


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A good bundle of three tasks as the current folder."""
    labels = {"copa": "multiple_choice", "winograd": "schema", "jeopardy": "language_modeling"}
    tasks = [task | {"kind": labels[task["label"]], "base": 50, "shots": 3 * (task["label"] == "jeopardy")}
             for task in small_tasks(labels)]
    write_bundle(tmp_path / "bundle", tasks)
    monkeypatch.chdir(tmp_path / "bundle")


@pytest.mark.parametrize("name", BAD_BUNDLES)
def test_bad_bundle(copy, name):
    """One sentence with the file, and the line where there is one, and no folder of this machine."""
    damage, words = BAD_BUNDLES[name]
    read_tasks(".")
    damage()
    with pytest.raises(Refused) as caught:
        read_tasks(Path("."))
    sentence = str(caught.value)
    assert len(sentence.splitlines()) == 1 and all(word in sentence for word in words), sentence
    assert str(Path.cwd().parent) not in sentence
