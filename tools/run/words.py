"""The command line of ./run.sh: the launcher's own words; the rest are the trainer's constants, or wrong.
Imports nothing heavy: the launcher reads them."""
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

OFF = ("", "0", "false")
OWN = ("LOGGER", "RESTARTS", "DRY_RUN")  # variables for the launcher alone


class Words(NamedTuple):
    """A command line: the launcher's own words, and those that are the trainer's constants or wrong."""
    constants: list[str]
    script: bool  # train by a script of this recipe alone
    proxy: str | None  # its width; empty: the usual one; None: no proxy
    dry_run: bool  # print the plan only
    help: bool
    logger: str
    restarts: str
    ranks: str  # on each machine; empty: one on each GPU


def read_words(argv: Sequence[str], env: Mapping[str, str]) -> Words:
    """Tells the launcher's own words, as NAME=value or as flags, from the others."""
    own: dict[str, Any] = {"--script": "", "--help": "", "--proxy": None, "--ranks": ""}
    for name in OWN:
        own[f"--{name.lower().replace('_', '-')}"] = env.get(name, "")
    constants = []
    for word in argv:
        name, equals, text = word.partition("=")
        flag = f"--{name.lower().replace('_', '-')}" if equals and not name.startswith("-") else name
        if flag not in own:
            constants.append(word)
        elif equals:
            own[flag] = text
        else:
            own[flag] = "" if flag == "--proxy" else "1"
    on = {flag: own[flag].lower() not in OFF for flag in ("--script", "--dry-run", "--help")}
    return Words(constants, on["--script"], own["--proxy"], on["--dry-run"], on["--help"], own["--logger"],
                 own["--restarts"], own["--ranks"])
