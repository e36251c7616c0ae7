"""Names that tell runs apart: what differs between them, not how all of them begin."""
import re
import textwrap
from collections.abc import Sequence

from records.judge.runs import Run

STAMPED = re.compile(r"\d{8}_\d{6}")        # in a name that the trainer or a tool made up
DATED = re.compile(r"20\d\d-\d\d-\d\d_")    # how the folder of a record begins
NEVER_TOLD = ("seed", "run_id")
MOST_TEXT = 70      # characters of a name


def without_date(name: str) -> str:
    """The name of a record as people say it."""
    return DATED.sub("", name) or name


def constants_of(run: Run) -> dict[str, str]:
    """The constants by which runs may be told apart."""
    constants = run.config or run.settings
    return {name: value for name, value in constants.items() if name not in NEVER_TOLD}


def differing(configs: Sequence[dict[str, str]]) -> list[str]:
    """Names of the constants that two of the configs have with other values."""
    names = sorted({name for config in configs for name in config})
    return [name for name in names if len({config[name] for config in configs if name in config}) > 1]


def constants_text(config: dict[str, str], names: Sequence[str]) -> str:
    """`matrix_lr=0.02 warmdown_frac=0.6`, of those that a config has, as many as fit a name."""
    told = [f"{name}={config[name]}" for name in names if name in config]
    return textwrap.shorten(" ".join(told), MOST_TEXT, placeholder=" …")


def telling_names(groups: dict[str, list[Run]]) -> dict[str, str]:
    """{label: its runs} -> {label: its name}: where all were made up from time stamps, the constants that
    differ, if these tell them apart."""
    configs = {label: constants_of(runs[0]) for label, runs in groups.items()}
    differ = differing([*configs.values()])
    told = {label: constants_text(configs[label], differ) for label in groups}
    if all(STAMPED.search(label) for label in groups) and len({*told.values()}) == len(told):
        return told
    return {label: without_date(label) for label in groups}
