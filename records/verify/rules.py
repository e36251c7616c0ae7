"""All rules that `record check` asks of a record folder, one after the other."""
import argparse
from collections.abc import Callable, Sequence

from records.judge.runs import Refused, demand
from records.verify import checks, evidence, leak_probe, replay
from records.verify.checks import DAMAGE, Broken, LeftOut, Rule
from records.verify.folders import Folder

CHECKS = [*checks.CHECKS, *evidence.CHECKS, *replay.CHECKS]


def check(folder: Folder, options: argparse.Namespace, say: Callable,
          rules: Sequence[Rule] = CHECKS) -> list[str]:
    """Says a line for each rule that fails or was left out, and one for all that hold; with options.verbose a
    line for each. Returns the names of those that fail."""
    demand(folder.ours, f"{folder.path} names no rules_version, as records of other projects: `record audit` "
           "judges those by their own files")
    if not options.no_exec:
        say("this runs the folder's own train_gpt.py, a stranger's code, in a process of its own "
            f"(limit {options.seconds:.0f} s); --no-exec leaves that out")
    names = {word: [] for word in ("pass", "FAIL", "----")}
    for rule in rules:
        word, text = outcome(rule, folder, options)
        if text is None:            # the track has no such rule
            continue
        names[word].append(rule.name)
        if getattr(options, "verbose", False) or word in ("FAIL", "----"):
            say(f"  {word:4}  {rule.name:26}  {text}")
    say(f"  pass  {len(names['pass'])} rules hold: {', '.join(names['pass'])}")
    return names["FAIL"]


def outcome(rule: Rule, folder: Folder, options: argparse.Namespace) -> tuple[str, str | None]:
    """("pass", "FAIL" or "----", what holds or why not; None: the track has no such rule)"""
    try:
        return "pass", rule.function(folder, options)
    except LeftOut as why:
        return "----", f"LEFT OUT: {why}" if str(why) else "LEFT OUT by --no-exec"
    except (Broken, Refused) as error:
        return "FAIL", str(error)
    except leak_probe.ProbeFailed as error:
        return "FAIL", f"train_gpt.py: {error}"
    except (OSError, SyntaxError, *DAMAGE) as error:
        return "FAIL", f"what is there is damaged: {type(error).__name__} {str(error)[:120]}"
