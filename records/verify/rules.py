"""All rules that `record check` asks of a record folder, one after the other."""
import argparse
from collections.abc import Callable, Sequence

from records.judge.logs import Refused, demand
from records.verify import checks, evidence, leak_probe, replay
from records.verify.checks import DAMAGE, LeftOut, Rule
from records.verify.folders import Folder

CHECKS = [*checks.CHECKS, *evidence.CHECKS, *replay.CHECKS]


def check(folder: Folder, options: argparse.Namespace, say: Callable,
          rules: Sequence[Rule] = CHECKS) -> list[str]:
    """Says a line for each rule that fails, was left out or has numbers to show, and one for all others.
    Returns the names of those that fail."""
    demand(folder.ours, f"{folder.path} names no rules_version, as records of other projects: `record audit` "
           "judges those by their own files")
    if not options.no_exec:
        say("this runs the folder's own train_gpt.py, a stranger's code, in a process of its own "
            f"(limit {options.seconds:.0f} s); --no-exec leaves that out")
    failed = []
    holding = []
    for rule in rules:
        word, text = outcome(rule, folder, options)
        if text:
            say(f"  {word:4}  {rule.name:26}  {text}")
        if word == "FAIL":
            failed.append(rule.name)
        elif word == "pass":
            holding.append(rule.name)
    say(f"  pass  {len(holding)} rules hold: {', '.join(holding)}")
    return failed


def outcome(rule: Rule, folder: Folder, options: argparse.Namespace) -> tuple[str, str | None]:
    """("pass", "FAIL" or "----", the line that it is worth, or nothing)"""
    if rule.runs_code and options.no_exec:
        return "----", "LEFT OUT by --no-exec"
    try:
        return "pass", rule.function(folder, options)
    except LeftOut as why:
        return "----", str(why) and f"LEFT OUT: {why}"
    except (Refused, leak_probe.ProbeFailed) as error:
        return "FAIL", str(error)
    except (OSError, SyntaxError, *DAMAGE) as error:
        return "FAIL", f"what is there is damaged: {type(error).__name__} {str(error)[:120]}"
