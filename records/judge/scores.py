"""Which scores compare: those of the same tokens of the same text, scored in the same way.

Every command that tests, ranks or averages scores asks here first. differences() finds in what runs differ,
demand_comparable() refuses them and says it. What a log does not tell, as those of other projects, counts
as equal, and a warning names the log.
"""
from collections.abc import Callable, Iterable
from typing import Any

from records.judge.logs import Run, demand, name_of, score_kind

# Names of what is compared. Where tokenizers differ, val_bpb still compares by the text alone
TEXT = ("text", "val bytes", "kind of score", "scored weights")
TOKENS = ("val tokens scored", "val tokens", "val split", "tokenizer", *TEXT)


def known(text: str | None) -> str | None:
    """A fact of a log; None where the log or its manifest does not have it."""
    return None if text in (None, "", "None") else text


def number(text: str | None) -> int | None:
    """The same for a number, which may have commas."""
    digits = (text or "").replace(",", "")
    return int(digits) if digits.isdecimal() else None


def inputs_of(run: Run) -> tuple[str | None, str | None]:
    """(digest of the val shards, digest of the tokenizer) of a run of ours."""
    names = [name for name in run.digests
             if name not in ("train_gpt.py", "config") and not name.startswith("final_model")]
    shards = [run.digests[name] for name in names if name.endswith(".bin")]
    tokenizers = [run.digests[name] for name in names if not name.endswith(".bin")]
    return " ".join(shards) or None, tokenizers[-1] if tokenizers else None


def targets_of(run: Run) -> int | None:
    """How many val tokens a run of ours was scored on: each token of the split but the first, or fewer."""
    asked = run.eval.get("eval_tokens")
    split = number(run.facts.get("val_tokens"))
    if asked == "full":
        return split and split - 1
    wanted = number(asked)
    return min(wanted, split - 1) if wanted and split else wanted


def rows_of(run: Run) -> tuple[str, str] | None:
    """(tokens per row, targets per row) of a run of ours."""
    context = known(run.eval.get("eval_context"))
    stride = known(run.eval.get("eval_stride"))
    return (context, stride) if context and stride else None


def as_trained(run: Run) -> bool:
    """Are the rows that score a run as long as those it trained on, without overlap?"""
    length = run.config.get("train_seq_len")
    return rows_of(run) == (length, length)


def facts_of(run: Run, metric: str) -> dict[str, Any]:
    """{name: what a run's score is of}; None: its log does not tell."""
    if metric == "core":
        return {"CORE examples per task": run.config.get("core_metric_max_per_task")}
    val, tokenizer = inputs_of(run)
    final = run.counted(metric)
    split = number(run.facts.get("val_tokens"))
    if metric == "val_bpb" and not run.eval:
        split = None        # another project's log, which names no tokenizer: bytes of text compare
    weights = None
    if final and run.config:
        weights = "trained" if final[0].startswith("final_model") else "artifact"
    return {"val tokens scored": targets_of(run), "val tokens": split, "val split": val,
            "tokenizer": tokenizer, "text": known(run.facts.get("fingerprint")),
            "val bytes": number(run.facts.get("val_bytes")) if metric == "val_bpb" or not val else None,
            "kind of score": score_kind(final[0]) if final else "plain", "scored weights": weights}


def listed(runs: Iterable[Run]) -> str:
    """The names of runs, each once, three at most."""
    names = [*dict.fromkeys([name_of(run) for run in runs])]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def shown(value: Any) -> str:
    """A fact as people read it: digests by their first eight digits."""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, tuple):
        return "/".join(value)
    return " ".join([word[:8] if len(word) == 64 else word for word in value.split()])


def by_value(runs: list[Run], values: list[Any]) -> dict[Any, list[Run]]:
    """{value: the runs that have it}, without those whose value is not known."""
    found: dict[Any, list[Run]] = {}
    for run, value in zip(runs, values):
        if value is not None:
            found.setdefault(value, []).append(run)
    return found


def told_apart(name: str, found: dict[Any, list[Run]]) -> str:
    """`val tokens scored: 2,560 (one, two), 20,000 (three)`"""
    return f"{name}: " + ", ".join([f"{shown(value)} ({listed(runs)})" for value, runs in found.items()])


def differences(runs: list[Run], metric: str) -> list[str]:
    """In what the runs' scores are of something else, a phrase each; [] if they compare."""
    if metric == "time":
        return []
    facts = [facts_of(run, metric) for run in runs]
    names = [*facts[0]]
    if metric in ("val_bpb", "val_loss"):
        one_tokenizer = len({fact["tokenizer"] for fact in facts}) == 1
        names = [*TOKENS] if one_tokenizer or metric == "val_loss" else [*TEXT]
        if all(name in names and fact[name] for fact in facts for name in ("val split", "tokenizer")):
            names.remove("text")        # which is that of train, too
    found = []
    for name in names:
        values = by_value(runs, [fact[name] for fact in facts])
        if len(values) > 1:
            found.append(told_apart(name, values))
    rows = by_value(runs, [rows_of(run) for run in runs]) if metric != "core" else {}
    if len(rows) > 1 and not all(as_trained(run) for of_value in rows.values() for run in of_value):
        found.append(told_apart("eval_context/eval_stride", rows))
    return found


def warnings_of(runs: list[Run], metric: str) -> list[str]:
    """What differs between runs that compare, a sentence each, and which logs tell too little."""
    found = []
    for name in ("torch", "hardware"):
        told = sorted({str(run.facts.get(name)) for run in runs})
        if len(told) > 1:
            found.append(f"not the same {name}: {', '.join(told)}")
    if metric not in ("val_loss", "val_bpb"):
        return found
    facts = [facts_of(run, metric) for run in runs]
    for name, what in (("text", "text to train on"), ("tokenizer", "tokenizer")):
        values = by_value(runs, [fact[name] for fact in facts])
        if len(values) > 1:
            found.append(f"not the same {told_apart(what, values)}")
    rows = by_value(runs, [rows_of(run) for run in runs])
    if len(rows) > 1:
        found.append(f"not the same {told_apart('eval_context/eval_stride', rows)}; each is that of training")
    silent = [run for run, fact in zip(runs, facts) if fact["val split"] == fact["text"] is None]
    if 0 < len(silent) < len(runs):
        found.append(f"the logs of {listed(silent)} do not tell which text they were scored on")
    return found


def demand_comparable(runs: list[Run], metric: str, say: Callable = lambda *lines: None) -> None:
    """Refuses runs whose scores are not of the same tokens of the same text, scored alike. say() hears what
    else differs, and what val_loss_partial is."""
    found = "; ".join(differences(runs, metric))
    demand(not found, "no verdict, since these runs were not all scored on the same tokens in the same way: "
           f"{found}; EVAL_FROM=FILE scores the model of a run again")
    for line in warnings_of(runs, metric):
        say(f"warning: {line}")
    if metric == "val_loss" and any(run.partial for run in runs):
        say(partial_line(runs))


def name_of_metric(runs: list[Run], metric: str) -> str:
    """val_loss_partial for the val_loss of fewer tokens than the preset scores."""
    return "val_loss_partial" if metric == "val_loss" and any(run.partial for run in runs) else metric


def part_of_val(run: Run) -> str:
    """`all 429,103 val tokens`, or the first of them; "" where the log does not tell."""
    targets = targets_of(run)
    split = number(run.facts.get("val_tokens"))
    if not targets or not split:
        return ""
    if targets == split - 1:
        return f"all {targets:,} val tokens"
    return f"the first {targets:,} of {split:,} val tokens"


def partial_line(runs: list[Run]) -> str:
    """What val_loss_partial is, for people."""
    part = part_of_val(next(run for run in runs if run.partial)) or "a part of val"
    return (f"val_loss_partial: the loss on {part}, which is not how many the preset scores: compare it only "
            "with the loss on the same tokens, not with records or targets")


def comparable_curves(runs: list[Run]) -> list[str]:
    """Of val and train those splits whose losses compare between all runs."""
    found = []
    if not differences(runs, "val_loss"):
        found.append("val")
    facts = [facts_of(run, "val_loss") for run in runs]
    if all(len(by_value(runs, [fact[name] for fact in facts])) < 2 for name in ("text", "tokenizer")):
        found.append("train")
    return found
