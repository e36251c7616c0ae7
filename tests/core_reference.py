"""CORE once more, slowly and plainly: one example, one option, one forward at a time. Also writes bundles."""

import csv
import json
import random
from pathlib import Path

import torch
import yaml

from train_gpt import log_probs

LABELS = """hellaswag_zeroshot jeopardy bigbench_qa_wikidata arc_easy arc_challenge copa commonsense_qa piqa
openbook_qa lambada_openai hellaswag winograd winogrande bigbench_dyck_languages agi_eval_lsat_ar
bigbench_cs_algorithms bigbench_operators bigbench_repeat_copy_logic squad coqa boolq
bigbench_language_identification""".split()
COLUMNS = ["Eval Task", "Task Category", "Task Type", "#shots", "#datapoints", "Random baseline",
           "Centered Metric?", "Description"]


# -------------------------------------------------------------------------------- bundles
def write_bundle(folder, tasks):
    """core.yaml, eval_meta_data.csv and eval_data/ of tasks: dicts of label, kind, items and, if not the
    default, shots, base, delimiter (None: not written), blank_lines at the end of the file."""
    folder = Path(folder)
    lines = ["# A small bundle in the layout of the published one.", "icl_tasks:"]
    rows = [COLUMNS, ["not_in_core", "none", "question answering", 3, 1000, "", "", "Has no baseline."]]
    for task in tasks:
        path = folder / "eval_data" / "some_category" / f"{task['label']}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in task["items"])
        path.write_bytes((text + "\n" * task.get("blank_lines", 0)).encode())
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


def read_bundle(folder):
    """[dict of label, kind, shots, base, delimiter, items], the items in the order of their file."""
    folder = Path(folder)
    with open(folder / "eval_meta_data.csv", encoding="utf-8", newline="") as file:
        baselines = {row["Eval Task"]: row["Random baseline"] for row in csv.DictReader(file)}
    tasks = []
    for entry in yaml.safe_load((folder / "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]:
        lines = (folder / "eval_data" / entry["dataset_uri"]).read_bytes().decode().split("\n")
        tasks.append(dict(
            label=entry["label"], kind=entry["icl_task_type"], shots=entry["num_fewshot"][0],
            base=float(baselines[entry["label"]]), delimiter=entry.get("continuation_delimiter", " "),
            items=[json.loads(line) for line in lines if line.strip()]))
    return tasks


def shuffled(items, most):
    """In the order they are asked in, the first `most` of them; 0: all."""
    items = list(items)
    random.Random(1337).shuffle(items)
    return items[:most] if most > 0 else items


# -------------------------------------------------------------------------------- one example
def solved(task, item, choice):
    """The text of an item with one of its options filled in."""
    if task["kind"] == "multiple_choice":
        return item["query"] + task["delimiter"] + item["choices"][choice]
    if task["kind"] == "schema":
        return item["context_options"][choice] + task["delimiter"] + item["continuation"]
    return item["context"].strip() + task["delimiter"] + item["continuation"]


def prompts(task, items, i):
    """Texts of example i: one for each option; language modelling: without and with the continuation."""
    others = [j for j in range(len(items)) if j != i]
    shots = [items[j] for j in random.Random(1234 + i).sample(others, task["shots"])]
    before = "".join(solved(task, shot, shot.get("gold")) + "\n\n" for shot in shots)
    item = items[i]
    if task["kind"] == "language_modeling":
        without = before + item["context"].strip() + task["delimiter"]
        return [without.strip(), before + solved(task, item, None)]
    options = item["choices"] if task["kind"] == "multiple_choice" else item["context_options"]
    return [before + solved(task, item, choice) for choice in range(len(options))]


def common_prefix(sequences):
    """Tokens that all sequences begin with."""
    length = 0
    while all(length < len(s) and s[length] == sequences[0][length] for s in sequences):
        length += 1
    return length


def example_spans(sp, bos, task, items, i):
    """-> [(tokens, start)] per option, of which tokens[start:] is scored."""
    sequences = [[bos, *sp.encode(text)] for text in prompts(task, items, i)]
    if task["kind"] == "schema":
        length = common_prefix([tokens[::-1] for tokens in sequences])
        return [(tokens, len(tokens) - length) for tokens in sequences]
    start = common_prefix(sequences)
    if task["kind"] == "multiple_choice":
        return [(tokens, start) for tokens in sequences]
    _, with_it = sequences
    return [(with_it, start)]


def crop(tokens, start, longest):
    """The last `longest` tokens and where the span begins in them; the first token cannot be predicted."""
    cut = max(0, len(tokens) - longest)
    return tokens[cut:], max(1, start - cut)


@torch.no_grad()
def span_log_probs(model, cfg, tokens, start):
    """log-probabilities (n, V) at the n places of the span, and its n tokens, after cropping."""
    tokens, start = crop(tokens, start, 10 * cfg.train_seq_len)
    if start >= len(tokens):
        return None, []
    scores = log_probs(model, torch.tensor([tokens]))[0]
    return scores[start - 1:len(tokens) - 1], tokens[start:]


def mean_losses(model, cfg, sp, bos, task, items, i):
    """Nats per token of each option of example i, None for an empty span. Not for language modelling."""
    found = []
    for tokens, start in example_spans(sp, bos, task, items, i):
        scores, targets = span_log_probs(model, cfg, tokens, start)
        losses = [-float(scores[p, token]) for p, token in enumerate(targets)]
        found.append(sum(losses) / len(losses) if losses else None)
    return found


def pick_of(model, cfg, sp, bos, task, items, i):
    """Index of the option with the lowest mean loss, the first of equals, or -1; language modelling: 0 where
    every continuation token is the argmax, else -1."""
    if task["kind"] == "language_modeling":
        ((tokens, start),) = example_spans(sp, bos, task, items, i)
        scores, targets = span_log_probs(model, cfg, tokens, start)
        right = [int(scores[p].argmax()) == token for p, token in enumerate(targets)]
        return 0 if right and all(right) else -1
    best = float("inf")
    pick = -1
    for option, loss in enumerate(mean_losses(model, cfg, sp, bos, task, items, i)):
        if loss is not None and loss < best:
            best = loss
            pick = option
    return pick


# -------------------------------------------------------------------------------- the metric
def reference_picks(model, cfg, sp, bos, task, most=0):
    """-> pick of each example."""
    items = shuffled(task["items"], most)
    return [pick_of(model, cfg, sp, bos, task, items, i) for i in range(len(items))]


def reference_core(model, cfg, sp, bos, folder, most=0):
    """-> (CORE or None unless all of LABELS are there, mean of centered accuracies, {label: dict of accuracy,
    centered, n})."""
    found = {}
    for task in read_bundle(folder):
        items = shuffled(task["items"], most)
        picks = reference_picks(model, cfg, sp, bos, task, most)
        right = sum(pick == item.get("gold", 0) for pick, item in zip(picks, items))
        accuracy = right / len(items)
        base = task["base"] / 100
        found[task["label"]] = dict(accuracy=accuracy, centered=(accuracy - base) / (1 - base), n=len(items))
    mean = sum(one["centered"] for one in found.values()) / len(found)
    return mean if set(found) == set(LABELS) else None, mean, found
