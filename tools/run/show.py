"""tools/run/show.py FOLDER: the result of a run: samples, loss.png, the last screen.

./run.sh calls it after each successful run. It reads what the run left in its folder: the artifact,
events.jsonl and result.json. If something cannot be shown, a line says why; no result depends on it.
"""
import json
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data import inputs
from records.judge.logs import Refused, demand, read_events, run_of_events
from records.judge.scores import partial_line
from records.show import board, curves
from records.verify.folders import NEWEST, RULES, track_of
from tools.run import cards, plan
from tools.run.sample import SAMPLES, Settings, find_model, keep, sample_lines
from tools.run.watch import Screen
import train_gpt
from train_gpt import brief, write_atomically

SAMPLE_LINES = 5        # of each sample on a terminal; samples.txt has them all
MOST_CHANGES = 80      # characters of the line in loss.png that names what a run changed


def goals_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What a run is compared with; [] where it changes what its track fixes, or its recipe has no track."""
    fixed = {"data_path", "data_fingerprint", "val_tokens", "eval_context", "iterations",
                  "max_wallclock_seconds"}
    track = track_of(result["preset"])
    if fixed & {*result["overrides"]} or track not in RULES[NEWEST].tracks:
        return []
    return board.goals_of(track, curves.newest_record(track))


# ------------------------------------------------------------ loss.png
def changes_of(result: dict[str, Any]) -> str:
    """The constants that a run changed, as many as fit a line; "" for none."""
    changed = [f"{name}={new}" for name, (_, new) in result["overrides"].items()
               if name not in ("run_id", "seed", "preset", "data_path", "tokenizer_path")]
    return textwrap.shorten(", ".join(changed), MOST_CHANGES, placeholder=" …")


def draw_run(folder: Path, result: dict[str, Any]) -> None:
    """Draws loss.png of a finished run: its loss and in grey the record's, as `record plot` does, and the LR
    factor."""
    events = read_events(folder)
    run = run_of_events(folder / "train.log", events)
    record = curves.record_to_beat([run])
    title = f"{result['preset']}, seed {result['seed']}: {scores_text(result)}\n{changes_of(result)}".rstrip()
    figure = curves.picture(record | {f"seed {result['seed']}": [run]}, title, "seconds", record)
    # a resumed run repeats some steps
    factors = {event["step"]: (event["seconds"], event["lr_factor"]) for event in events
               if event["kind"] == "train"}
    right = figure.axes[0].twinx()
    right.plot(*zip(*sorted(factors.values())), color="tab:green", linewidth=1)
    right.set(ylim=(0, None))
    right.set_ylabel("LR factor", color="tab:green")
    figure.savefig(folder / "loss.png", dpi=110)


# ------------------------------------------------------------ the screen
def scores_text(result: dict[str, Any]) -> str:
    """The scores that count."""
    names = [name for name in ("core", "val_bpb", "val_loss", "val_loss_partial")
             if result.get(name) is not None]
    return ", ".join(f"{name} {result[name]:.4f}" for name in names)


def distance(result: dict[str, Any], other: dict[str, Any]) -> str:
    """How far a result is from one of goals_of(), in a line. Where that has `seconds`, the goal is its value
    in fewer of them."""
    goal = f"{other['metric']} {other['value']:.10g}"
    seconds = other.get("seconds")
    what = f"{other['name']}: {f'{seconds} s to ' if seconds else ''}{goal} ({other['about']})"
    mine = result.get(other["metric"])
    if mine is None:
        return what
    gap = (mine - other["value"]) * (1 if other["better"] == "lower" else -1)       # > 0: worse
    if not seconds:
        return f"{abs(gap):.4f} {'behind' if gap > 0 else 'ahead of'} {what}"
    if gap > 0:
        return f"{gap:.4f} short of {goal}; {what}"
    late = result["train_time_ms"] / 1e3 - seconds
    return f"{abs(late):.4f} s {'behind' if late > 0 else 'ahead of'} {what}"


def work_of_run(folder: Path, result: dict[str, Any]) -> cards.Work | None:
    """What the GPUs of a run did. None if it had none, if its constants are another version's, and if it was
    resumed on other hardware, since its tokens and seconds are those of all attempts."""
    hardware = {event["hardware"] for event in read_events(folder) if event["kind"] == "start"}
    try:
        return plan.work_of(result) if len(hardware) <= 1 else None
    except (train_gpt.Refused, KeyError):
        return None


def end_lines(folder: Path, result: dict[str, Any]) -> Iterator[str]:
    """The screen after a run: score, what it compares with, the files, what to try next."""
    yield ""
    if not result["steps"]:
        yield f"{scores_text(result)} of {result['config']['eval_from']}, in {folder}/"
        return
    yield (f"{scores_text(result)} after {result['steps']:,} steps, {result['tokens']:,} tokens, "
           f"{result['train_time_ms'] / 1e3:.1f} s ({result['tok_per_s']:,} tok/s)")
    if work := work_of_run(folder, result):
        yield f"  {cards.mfu_text(work)}"
    for goal in goals_of(result):
        yield f"  {distance(result, goal)}"
    if result.get("val_loss_partial") is not None:
        yield partial_line([run_of_events(folder / "train.log", read_events(folder))])
    names = [name for name in ("train.log", "result.json", SAMPLES, "loss.png", "train_gpt.py")
             if (folder / name).exists()]
    model = next((path.name for path in sorted(folder.glob("final_model.*.ptz"))), "final_model.pt")
    yield f"in {folder}/: {', '.join(names)}, {model} ({(folder / model).stat().st_size / 1e6:.1f} MB)"
    if SAMPLES in names:
        yield f'more samples: ./run.sh sample {folder.name} "a prompt" "another one"'
    if os.environ.get("PROXY"):
        size = f"--preset {result['preset']} --proxy {result['config']['model_dim']}"
        yield (f'next: ./run.sh record try "what it is" NAME=value {size} trains the recipe with and without '
               "a change, seed by seed: docs/proxy.md")
    elif result["overrides"].keys() - {"run_id", "seed"}:
        yield "next: better, or luck? ./run.sh record compare trains both several times: docs/first_change.md"
    else:
        yield "next: change a number, say ./run.sh MATRIX_LR=0.02, and compare: docs/first_change.md"


def add_mfu(path: Path, result: dict[str, Any]) -> None:
    """Adds the MFU of a run on GPUs to its result.json, null where a peak is unknown. Raises OSError."""
    work = work_of_run(path.parent, result) if result["steps"] else None
    if work:
        result["mfu"], result["mfu_dtype"], _ = cards.mfu(work)
        write_atomically(path, lambda file: file.write(f"{json.dumps(result, indent=1)}\n".encode()))


def show_run(folder: Path, terminal: bool) -> Iterator[str]:
    """Makes samples.txt and loss.png of a finished run; yields the lines of its end. Raises Refused."""
    path = folder / "result.json"
    demand(path.is_file(), f"{folder} is no run that has ended: it has no result.json")
    result = json.loads(inputs.read_text(path))
    try:
        add_mfu(path, result)
    except OSError as error:
        yield f"{path}: without MFU ({brief(error)})"
    if result["steps"]:
        try:
            model = find_model(str(folder))
            lines = sample_lines(model)
            keep(folder, [f"{model} {Settings().flags()}", *lines], mode="w")
            for line in lines:
                yield "\n".join(line.splitlines()[:SAMPLE_LINES]) if terminal else line
        except KeyboardInterrupt:
            yield "samples: none (interrupted)"
        except Exception as error:
            why = str(error) if isinstance(error, Refused) else brief(error)
            yield f"samples: none ({why})"
        try:
            draw_run(folder, result)
        except Exception as error:
            yield f"loss.png: not drawn ({brief(error)})"
    yield from end_lines(folder, result)


def main(argv: Sequence[str]) -> int:
    """Shows the run in the folder that is named. Returns the exit code."""
    screen = Screen(sys.stdout.isatty())
    screen.tick(None, "sampling the model")
    try:
        for line in show_run(Path(*argv), screen.terminal):
            screen.show(line, sys.stdout)
    except Refused as error:
        print(f"show: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    inputs.steady_output()
    sys.exit(main(sys.argv[1:]))
