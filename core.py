"""CORE (DCLM, arXiv:2406.11794): in-context learning tasks, each centred on chance, and their mean.

train_gpt.py asks for it with CORE=1 and hands in the model and what scores rows of tokens. It stands in a
file of its own because only the gpt2 game scores by it, while golf pays for each byte of train_gpt.py. What
counts as an example's prompt, what of it is scored and which option wins is said at each function.

A bundle is a folder of core.yaml (the tasks), eval_meta_data.csv (their accuracy by chance, percent) and
eval_data/ (a .jsonl file per task); `./run.sh data core` gets the published one of 22 tasks.
"""
import csv
import json
import math
import os.path
import random
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import torch
import yaml

ALL_TASKS = 22
ORDER_SEED, SHOTS_SEED = 1337, 1234     # of the examples' order; of example i's shots, plus i
PROGRESS_SECONDS = 10
SHARED_TOKENS = 48                      # options that begin with so many equal tokens share the work on them
BASELINES = "eval_meta_data.csv"

# shots: examples in front of a question; base: percent that are right by chance
Task = namedtuple("Task", "label kind shots base items")
# texts: each option after its question; gold: the right one; question: of language modelling, else None
Item = namedtuple("Item", "texts gold question")

# What train_gpt.py hands in. batches: rows -> (row of each target, target, its nats, whether it was the
# likeliest) of a batch each; window: of its long layers; longest: tokens of a prompt; total: sums a list of
# numbers over the ranks of team
Scorer = namedtuple("Scorer", "model batches log_probs window encode bos longest team total log")

KINDS = {   # (line of a task's file, delimiter) -> texts
    "multiple_choice": lambda row, gap: [row["query"] + gap + choice for choice in row["choices"]],
    "schema": lambda row, gap: [context + gap + row["continuation"] for context in row["context_options"]],
    "language_modeling": lambda row, gap: [row["context"].strip() + gap + row["continuation"]],
}


def read_item(kind, line, gap):
    """A line of a task's file -> Item. Raises KeyError, TypeError, ValueError."""
    row = json.loads(line)
    texts = KINDS[kind](row, gap)
    if kind == "language_modeling":
        return Item(texts, 0, row["context"].strip() + gap)
    return Item(texts, range(len(texts)).index(row["gold"]), None)


def read_tasks(folder, most=0):
    """(The tasks of a bundle, examples shuffled and cut to the first `most`, 0: all; "") or (None, why not):
    one sentence that names the file, and the line where there is one."""
    folder, tasks, place = Path(folder), [], BASELINES
    if not folder.is_dir():
        return None, f"there are no CORE tasks at {folder.name!r}: get them with `./run.sh data core`"
    try:
        with open(folder / BASELINES, encoding="utf-8") as file:
            bases = {row["Eval Task"]: row["Random baseline"] for row in csv.DictReader(file)}
        place = "core.yaml"
        for about in yaml.safe_load((folder / place).read_text("utf-8"))["icl_tasks"]:
            place = "core.yaml"
            label, kind, uri, (shots, *_) = (
                about[key] for key in ("label", "icl_task_type", "dataset_uri", "num_fewshot"))
            if kind not in KINDS:
                raise ValueError(f"unknown icl_task_type {kind!r}")
            if type(shots) is not int or shots < 0:
                raise ValueError(f"num_fewshot of {label} is {shots!r}")
            place = f"{BASELINES}, {label},"
            base, items = float(bases[label]), []
            if not 0 <= base < 100:
                raise ValueError(f"Random baseline {base}")
            place = uri
            with open(folder / "eval_data" / uri, encoding="utf-8") as file:
                for n, line in enumerate(file, 1):
                    place = f"{uri} line {n}"
                    if line.strip():
                        items.append(read_item(kind, line, about.get("continuation_delimiter", " ")))
            random.Random(ORDER_SEED).shuffle(items)
            items, place = items[:most or None], label
            if len(items) <= shots:
                raise ValueError(f"{len(items)} examples are too few for {shots} shots")
            tasks.append(Task(label, kind, shots, base, items))
        if not tasks:
            raise ValueError("no tasks")
    except Exception as error:  # each has its own
        what = str(error).replace(str(folder.absolute()), "").splitlines()[:1]
        return None, f"CORE bundle: {place} is damaged or missing ({type(error).__name__}: {''.join(what)})"
    return tasks, ""


def rows_of(task, i, encode, bos, longest):
    """Example i of a task -> ([(ids, first)] per option, of which ids[first:] is scored, and whether its
    question has other tokens alone than before its continuation).

    The prompt is the shots, drawn from all other examples, and the question, a blank line between them, BOS
    in front. Scored is from the first token in which the options differ; of a schema the longest common end;
    in language modelling what comes after the question's tokens, or after those of them that are the same.
    Of a prompt of more than `longest` tokens the last ones are kept.
    """
    draw = random.Random(SHOTS_SEED + i).sample(range(len(task.items) - 1), task.shots)
    shots = [task.items[j + (j >= i)] for j in draw]
    lead = "".join(shot.texts[shot.gold] + "\n\n" for shot in shots)
    texts, _, question = task.items[i]
    alone = [] if question is None else [(lead + question).strip()]
    rows = [[bos, *ids] for ids in encode([lead + text for text in texts] + alone)]
    if task.kind == "schema":
        common = len(os.path.commonprefix([row[::-1] for row in rows]))
        firsts = [len(row) - common for row in rows]
    else:
        firsts = [len(os.path.commonprefix(rows))] * len(rows)
    differs = bool(alone) and firsts[0] < len(rows.pop())
    cuts = [max(0, len(row) - longest) for row in rows]
    return [(tuple(row[cut:]), max(1, first - cut)) for row, first, cut in zip(rows, firsts, cuts)], differs


@torch.no_grad()
def score_together(rows, scorer):
    """Rows [(ids, first)] of one example, equal up to the least first -> (nats, whether the likeliest) of
    each row's targets. What is equal goes through the model once; its keys and values serve all rows."""
    model, shared = scorer.model, min(first for _, first in rows) - 1
    device, dtype, cache = model.embed.device, model.dtype, {}
    model.dtype = torch.float32 if device.type == "cpu" else dtype
    model.set_context(shared, scorer.window, cache=cache)
    model.hidden(torch.tensor([rows[0][0][:shared]], device=device))
    # where the model begins again: see GPT.set_context; without attention nothing is kept
    T, again = max(len(ids) for ids, _ in rows), max(0, shared - 3) if cache else 0
    ids, wanted = np.zeros((len(rows), T), np.int64), np.zeros((len(rows), T), bool)
    for i, (row, first) in enumerate(rows):
        ids[i, :len(row)], wanted[i, first:len(row)] = row, True
    tokens, places = torch.from_numpy(ids).to(device), torch.from_numpy(wanted).to(device)
    model.set_context(T - 1, scorer.window, places[:, again + 1:], cache)
    scores, targets = scorer.log_probs(model, tokens[:, :-1]), tokens[places]
    model.dtype, model.wanted, model.cache = dtype, ..., None
    nats = -scores.gather(-1, targets[:, None])[:, 0].double()
    ends = wanted.sum(1).cumsum()[:-1]
    hits = scores.argmax(-1) == targets
    return zip(np.split(nats.cpu().numpy(), ends), np.split(hits.cpu().numpy(), ends))


def pick_options(task, scorer):
    """({example of this rank: pick}, how many questions have other tokens alone).

    A pick is the option of the lowest mean loss, of equal ones the first, or -1 where no option has a token
    to score; in language modelling 0 if every token is the likeliest at its place, else -1.
    """
    mine = range(scorer.team.rank, len(task.items), scorer.team.world_size)
    table, options, together, differing = {}, [], [], 0
    for i in mine:
        rows, differs = rows_of(task, i, scorer.encode, scorer.bos, scorer.longest)
        # equal rows are scored once, so that they tie; those without a target not at all: place -1
        rows = [row if row[1] < len(row[0]) else None for row in rows]
        places = [table.setdefault(row, len(table)) if row else -1 for row in rows]
        options.append(places)
        differing += differs
        firsts = [row[1] for row in rows if row]
        alike = len(firsts) > 1 and len(os.path.commonprefix([row[0] for row in rows if row])) >= min(firsts)
        if alike and min(firsts) > SHARED_TOKENS:
            together.append(sorted({*places} - {-1}))
    rows, apart = [*table], {*range(len(table))} - {n for group in together for n in group}
    nats, right = np.full(len(rows) + 1, math.inf), np.zeros(len(rows) + 1, bool)
    start, told, done = time.perf_counter(), 0.0, 0

    # Long prompts fill a batch by themselves: what options share counts for more than wider batches
    def scores():
        """(row, nats, hits) of every row, as they come."""
        for group in together:
            yield from zip(group, *zip(*score_together([rows[n] for n in group], scorer)))
        order = sorted(apart)
        for which, _, losses, hits in scorer.batches([rows[n] for n in order]):
            for n in np.unique(which):
                yield order[n], losses[which == n], hits[which == n]

    for row, losses, hits in scores():
        nats[row], right[row], done = losses.mean(), hits.all(), done + 1
        if (seconds := time.perf_counter() - start) > told + PROGRESS_SECONDS:
            told = seconds
            scorer.log(f"core: {task.label} {done}/{len(rows)} eta:{seconds * (len(rows) / done - 1):.0f}s")
    wins = right if task.kind == "language_modeling" else np.isfinite(nats)
    best = [int(nats[places].argmin()) for places in options]
    picks = [pick if wins[places[pick]] else -1 for pick, places in zip(best, options)]
    return dict(zip(mine, picks)), differing


def core_metric(tasks, scorer):
    """{core: mean centred accuracy, None for fewer than all tasks, which have core_partial; core_tasks:
    {label: accuracy, centered, n, retokenized, seconds}}."""
    began, results = time.perf_counter(), {}
    for number, task in enumerate(tasks, 1):
        start, n, chance = time.perf_counter(), len(task.items), task.base / 100
        picks, differing = pick_options(task, scorer)
        right = sum(task.items[i].gold == pick for i, pick in picks.items())
        right, differing = scorer.total([right, differing])
        now = time.perf_counter()
        accuracy = right / n
        results[task.label] = row = dict(
            accuracy=accuracy, centered=(accuracy - chance) / (1 - chance), n=n, retokenized=int(differing),
            seconds=round(now - start, 2))
        left = (now - began) * (sum(len(t.items) for t in tasks) / sum(r["n"] for r in results.values()) - 1)
        scorer.log(f"core: {task.label:<32} accuracy:{accuracy:.4f} centered:{row['centered']:.4f} n:{n} "
                   f"retokenized:{row['retokenized']} seconds:{row['seconds']} task {number}/{len(tasks)} "
                   f"eta:{left:.0f}s")
    core = sum(row["centered"] for row in results.values()) / len(results)
    name = "core" if len(results) == ALL_TASKS else "core_partial"
    scorer.log(f"{name}_metric:{core:.6f} tasks:{len(results)} seconds:{time.perf_counter() - began:.1f}")
    return {"core": None, name: core, "core_tasks": results}


def open_tasks(t, cfg):
    """Of the bundle that cfg means. t: the trainer's module. Raises its Refused."""
    tasks, problem = read_tasks(cfg.core_bundle, cfg.core_metric_max_per_task)
    t.demand(not problem, problem)
    return tasks


def core_of_run(t, model, cfg, data, team, log):
    """core_metric of a run's model, all ranks together. Raises t's Refused."""
    return core_metric(open_tasks(t, cfg), Scorer(
        model, lambda rows: t.scored(model, cfg, rows, team), t.log_probs, t.eval_window(cfg),
        data.tokenizer.encode, data.bos, 10 * cfg.train_seq_len, team,
        lambda numbers: t.all_reduce(t.torch.tensor(numbers)).tolist(), log))
