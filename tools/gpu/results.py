"""The table of docs/first_gpu.md between its two marks: what the reports in docs/gpu_results/ show.

    python -m tools.gpu.results                 makes it anew
    python -m tools.gpu.results FILE NAME       adds a report first, the JSON file of `./run.sh gpu-report`

A rehearsal (--toy) and a file that is no report are refused. If other programs ran on the card, so that its
times count for nothing, set "side_by_side": true in the report.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tools.gpu.agenda import GOALS, PRESETS, WITH_ARTIFACT
from tools.run import cards

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "gpu_results"
PAGE = ROOT / "docs" / "first_gpu.md"
BEGIN = "<!-- made by tools/gpu/results.py -->\n"
END = "<!-- end of what it made -->\n"
# What a report may have besides. given: constants that the command set; shown: {preset: [goal]} by its log
# alone
MORE: dict[str, Any] = dict(side_by_side=False, operators={}, given={}, shown={})


def read(path: Path) -> dict[str, Any]:
    """A report. Raises ValueError."""
    try:
        found = MORE | json.loads(path.read_text(encoding="utf-8"))
        measured = [row["part"] for row in found["verdicts"] if row["preset"]]
        useful = found["begun"] and found["machine"]["gpu"] and measured and not found["toy"]
    except (ValueError, KeyError, TypeError):
        useful = False
    if not useful:
        raise ValueError(f"{path.name} is no report of gpu-report that measured a preset on a GPU")
    return found


def reports(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Those in a folder, the oldest first. Raises ValueError."""
    return sorted([read(path) for path in folder.glob("*.json")], key=lambda found: found["begun"])


# ---------- what a card has shown
def goals_of(row: dict[str, Any], beside: bool) -> list[str]:
    """What a verdict shows of its preset. beside: others ran on the card, so its times count for nothing."""
    figures = row["figures"]
    if not beside and "p50" in figures:
        return ["loop timed"]
    if not beside and "ms" in figures:
        return ["kernels timed"]
    if row["verdict"] != "ok":
        return []
    by_part = dict(score=["scores apart"], resume=["resumes"], train=["trains", "writes"])
    by_score = dict(trained="validates", artifact="reads back")
    return by_part.get(row["part"], []) + [by_score[name] for name in figures.get("scores", [])]


def shown(found: list[dict[str, Any]]) -> dict[tuple[str, str, str], str]:
    """{(preset, goal, constants that were not the preset's): card, torch, date} of what these reports show,
    the newest of which counts."""
    cells = {}
    for report in found:
        machine = report["machine"]
        card = (cards.card_of(machine["gpu"]) or machine["gpu"]).upper()
        cell = f"{card}, {machine['torch'].split('+')[0]}, {report['begun'][:10]}"
        given = " ".join([f"{name}={value}" for name, value in report["given"].items()])
        pairs = [(preset, goal) for preset, goals in report["shown"].items() for goal in goals]
        for row in report["verdicts"]:
            pairs += [(row["preset"], goal) for goal in goals_of(row, report["side_by_side"])]
        for preset, goal in pairs:
            cells[preset, goal, given] = f"{cell} ({given})" if given else cell
    return cells


def matrix(found: dict[tuple[str, str, str], str]) -> str:
    """Presets by goals; what the preset's own constants have shown counts before others."""
    lines = ["| | " + " | ".join(GOALS) + " |", "|---" * (len(GOALS) + 1) + "|"]
    for preset in PRESETS:
        cells = [preset]
        for goal in GOALS:
            none = "-" if goal == "reads back" and preset not in WITH_ARTIFACT else ""
            others = [cell for key, cell in found.items() if key[:2] == (preset, goal)]
            cells.append(found.get((preset, goal, "")) or [none, *others][-1])
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


# ---------- the command
def main(argv: list[str], folder: Path = FOLDER, page: Path = PAGE) -> int:
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
        table = matrix(shown(reports(folder)))
    except (OSError, ValueError) as error:
        print(f"results: {error}", file=sys.stderr)
        return 2
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(before + BEGIN + table + END + rest.partition(END)[2], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
