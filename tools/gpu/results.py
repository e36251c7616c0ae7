"""What the reports in docs/gpu_results/ show: the table of docs/first_gpu.md between its two marks, and
seen_on_gpu.tsv.

    python -m tools.gpu.results                 makes them anew
    python -m tools.gpu.results FILE NAME       adds a report first, the JSON file of `./run.sh gpu-report`

A rehearsal (--toy) and a file that is no report are refused. If other programs ran on the card, so that its
times count for nothing, set "side_by_side": true in the report.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tools.gpu import seen_on_gpu
from tools.gpu.agenda import GOALS, PRESETS, WITH_ARTIFACT
from tools.run import cards

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "gpu_results"
PAGE = ROOT / "docs" / "first_gpu.md"
BEGIN = "<!-- made by tools/gpu/results.py -->\n"
END = "<!-- end of what it made -->\n"
KEYS = ("toy", "begun", "commit", "complete", "machine", "verdicts")  # of a report, what is shown
# What it may have besides. given: constants that the command set; shown: {preset: [goal]} by its log alone
MORE: dict[str, Any] = dict(side_by_side=False, operators={}, given={}, shown={})


class NoReport(Exception):
    """Why a file is not shown, in a sentence."""


def read(path: Path) -> dict[str, Any]:
    """A report. Raises NoReport."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        found = {key: whole[key] for key in KEYS}
        found |= {key: whole.get(key, value) for key, value in MORE.items()} | dict(name=path.name)
        verdicts = found["verdicts"]
        machine = found["machine"]
    except (ValueError, KeyError, TypeError) as error:
        raise NoReport(f"{path.name} is no report of gpu-report ({type(error).__name__})") from None
    if found["toy"]:
        raise NoReport(f"{path.name} is a rehearsal on a CPU (--toy)")
    if not machine.get("gpu") or not verdicts:
        raise NoReport(f"{path.name} saw no GPU")
    if not any([row["preset"] for row in verdicts]):
        raise NoReport(f"{path.name} measured no preset")
    return found


def reports(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Those in a folder, the oldest first. Raises NoReport."""
    return sorted([read(path) for path in folder.glob("*.json")], key=lambda found: found["begun"])


# ---------- what a card has shown
class Shown(NamedTuple):
    """That a preset did something on a card. given: constants that were not the preset's."""

    preset: str
    goal: str
    card: str
    torch: str
    date: str
    given: str

    def cell(self) -> str:
        words = f"{self.card}, {self.torch}, {self.date}"
        return f"{words} ({self.given})" if self.given else words


def goals_of(row: dict[str, Any], beside: bool) -> list[str]:
    """What a verdict shows of its preset. beside: others ran on the card, so its times count for nothing."""
    figures = row["figures"]
    if not beside and "p50" in figures:
        return ["loop timed"]
    if not beside and "ms" in figures:
        return ["kernels timed"]
    if row["verdict"] != "ok":
        return []
    if row["part"] == "train":
        scores = figures["scores"]
        found = ["trains", "writes"]
        found += ["validates"] if "trained" in scores else []
        return found + (["reads back"] if "artifact" in scores else [])
    return dict(score=["scores apart"], resume=["resumes"]).get(row["part"], [])


def shown(found: list[dict[str, Any]]) -> list[Shown]:
    """All that these reports show, the oldest first."""
    rows = []
    for report in found:
        machine = report["machine"]
        card = (cards.card_of(machine["gpu"]) or machine["gpu"]).upper()
        given = " ".join([f"{name}={value}" for name, value in report["given"].items()])
        pairs = [(preset, goal) for preset, goals in report["shown"].items() for goal in goals]
        for row in report["verdicts"]:
            pairs += [(row["preset"], goal) for goal in goals_of(row, report["side_by_side"])]
        for preset, goal in dict.fromkeys(pairs):
            torch = machine["torch"].split("+")[0]
            rows.append(Shown(preset, goal, card, torch, report["begun"][:10], given))
    return rows


def matrix(rows: list[Shown]) -> str:
    """Presets by goals; the newest counts, and one of the preset's own constants before others."""
    lines = ["| | " + " | ".join(GOALS) + " |", "|---" * (len(GOALS) + 1) + "|"]
    for preset in PRESETS:
        cells = [preset]
        for goal in GOALS:
            its = [row for row in rows if (row.preset, row.goal) == (preset, goal)]
            own = [row for row in its if not row.given]
            none = "-" if goal == "reads back" and preset not in WITH_ARTIFACT else ""
            cells.append([*its, *own][-1].cell() if its else none)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page(text: str, folder: Path = FOLDER) -> str:
    """The page with its table made anew. Raises NoReport."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + matrix(shown(reports(folder))) + END + after


# ---------- the command
def main(argv: list[str], folder: Path = FOLDER, table: Path = seen_on_gpu.TABLE, file: Path = PAGE) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", nargs="*", metavar="FILE NAME")
    words = parser.parse_args(argv).report
    try:
        if words:
            report, name = words
            read(Path(report))
            shutil.copy(report, folder / f"{name}.json")
        found = [read(path) for path in sorted(folder.glob("*.json"))]
    except (NoReport, OSError, ValueError) as error:
        print(f"results: {error}", file=sys.stderr)
        return 2
    seen_on_gpu.write([row for report in found for row in seen_on_gpu.rows_of(report)], table)
    file.write_text(page(file.read_text(encoding="utf-8"), folder), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
