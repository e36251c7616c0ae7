"""Names that tell runs apart: what differs between them, not how all of them begin."""
import re
import textwrap

from records.judge.logs import Run

STAMPED = re.compile(r"\d{8}_\d{6}")        # in a name that the trainer or a tool made up
DATED = re.compile(r"20\d\d-\d\d-\d\d_")    # how the folder of a record begins
NEVER_TOLD = ("seed", "run_id")
MOST_TEXT = 70      # characters of a name


def without_date(name: str) -> str:
    """The name of a record as people say it."""
    return DATED.sub("", name) or name


def telling_names(groups: dict[str, list[Run]]) -> dict[str, str]:
    """{label: its runs} -> {label: its name}: where all were made up from time stamps, the constants that
    differ, if these tell them apart."""
    configs = {label: runs[0].config or runs[0].settings for label, runs in groups.items()}
    differ = []
    for name in sorted({name for config in configs.values() for name in config} - {*NEVER_TOLD}):
        if len({config[name] for config in configs.values() if name in config}) > 1:
            differ.append(name)
    told = {}
    for label, config in configs.items():
        text = " ".join([f"{name}={config[name]}" for name in differ if name in config])
        told[label] = textwrap.shorten(text, MOST_TEXT, placeholder=" …")
    if all(STAMPED.search(label) for label in groups) and len({*told.values()} - {""}) == len(told):
        return told
    return {label: without_date(label) for label in groups}
