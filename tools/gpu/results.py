"""Writes docs/gpu_results.md from the reports in docs/gpu_results/: python tools/gpu/results.py

    python tools/gpu/results.py --add FILE --name NAME      copies a report there first
    python tools/gpu/results.py --seen FILE ...             what ran in them goes into seen_on_gpu.tsv

Each is the JSON file of `./run.sh gpu-report`. A rehearsal (--toy) and a file that is no report are refused.
With --add: --commit for a report that does not know its own, --environment FILE for one without its machine,
from what `gpu-report --only environment` printed there, --side-by-side if other programs ran on the card, so
that its times count for nothing, --remark for what a reader should know.
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
if __name__ == "__main__":  # our modules are those of this checkout, whatever else the path holds
    sys.path[:] = [str(ROOT), *[folder for folder in sys.path if folder != str(HERE)]]
from tools.gpu import seen_on_gpu  # noqa: E402

FOLDER = ROOT / "docs" / "gpu_results"
HEAD = """# GPU results

What `./run.sh gpu-report` has found on GPUs, made by `python tools/gpu/results.py` from the files in
`docs/gpu_results/`. To add yours, put its `gpu_report.json` there under a name of its own, or paste it into
the form "GPU report" of a new issue. How to read a report: [first_gpu.md](first_gpu.md).

"""
NONE = "None yet.\n"


KEYS = ("toy", "begun", "commit", "complete", "machine", "verdicts")  # of a report, what is shown
MORE = dict(side_by_side=False, remark="", operators={})  # what it may have besides


class NoReport(Exception):
    """Why a file is not shown, in a sentence."""


def read(path: Path) -> dict[str, Any]:
    """A report. Raises NoReport."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        found = {key: whole[key] for key in KEYS}
        found |= {key: whole.get(key, value) for key, value in MORE.items()}
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


def stage_times(verdicts: list[dict[str, Any]], preset: str) -> str:
    """`16,384: 36.1 (31.2)` for each stage: tokens of a rank's step, ms of the step on one GPU, and with an
    eighth of the optimizer."""
    eighths = {}
    for row in verdicts:
        if row["preset"] == preset and "with_an_eighth" in row["figures"]:
            eighths[row["figures"]["tokens"]] = row["figures"]["with_an_eighth"]
    found = []
    for row in verdicts:
        figures = row["figures"]
        if row["preset"] == preset and "p50" in figures:
            text = f"{figures['tokens']:,}: {figures['p50']:.1f}"
            if figures["tokens"] in eighths:
                text += f" ({eighths[figures['tokens']]:.1f})"
            elif "rank_of_eight" in figures:  # until November 2026
                text += f" ({figures['rank_of_eight']:.1f} estimated)"
            found.append(text)
    return ", ".join(found) or "not run"


def worst_error(verdicts: list[dict[str, Any]], preset: str) -> str:
    """The largest part of what was allowed that some result was off from fp32."""
    parts = [0.0]
    for row in verdicts:
        most = row["figures"].get("most")
        if row["preset"] == preset and row["part"] == "numbers" and most:
            errors = [value for name, value in row["figures"].items() if name != "most"]
            parts.append(max([error if math.isfinite(error) else math.inf for error in errors]) / most)
    if len(parts) == 1:
        return "not run"
    return f"{max(parts):.0%} of what is allowed" if max(parts) < math.inf else "not finite"


def table(reports: dict[str, dict[str, Any]]) -> str:
    """Rows of all reports and presets, newest first."""
    lines = [
        "| date, commit | machine | preset | ms a step on one GPU (with an eighth of the optimizer) "
        "| off from fp32 | "
        "faults | slow | to set | remarks |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in sorted(reports.items(), key=lambda item: item[1]["begun"], reverse=True):
        machine = found["machine"]
        verdicts = found["verdicts"]
        for preset in dict.fromkeys([row["preset"] for row in verdicts if row["preset"]]):
            own = [row for row in verdicts if row["preset"] in ("", preset)]
            faults = [row["text"] for row in own if row["verdict"] == "FAULT"]
            slow = [row["text"] for row in own if row["verdict"] == "SLOW"]
            changes = [row["figures"]["change"] for row in own if row["verdict"] == "set"]
            whole = "" if found["complete"] else ", ended early"
            beside = found["side_by_side"]
            cells = [
                f"{found['begun'][:10]}, {found['commit']} ({name}{whole})",
                f"{machine['gpu']}, driver {machine['driver']}, torch {machine['torch']}",
                preset,
                "not timed: others ran beside it" if beside else stage_times(verdicts, preset),
                worst_error(verdicts, preset),
                "; ".join(faults) or "none",
                "not timed" if beside else "; ".join(slow) or "none",
                "; ".join(dict.fromkeys(changes)) or "nothing",
                found["remark"],
            ]
            lines.append("| " + " | ".join([cell.replace("|", "/") for cell in cells]) + " |")
    return "\n".join(lines) + "\n"


def page(folder: Path) -> str:
    """The page of the reports in a folder. Raises NoReport."""
    reports = {path.stem: read(path) for path in sorted(folder.glob("*.json"))}
    return HEAD + (table(reports) if reports else NONE)


def machine_in(path: Path) -> dict[str, str]:
    """The machine in what gpu-report printed of it. Raises NoReport."""
    line = r"^ok +(.+), driver (\S+), torch (\S+), cuDNN (\S+), Triton (\S+)$"
    found = re.search(line, path.read_text(encoding="utf-8"), re.M)
    if not found:
        raise NoReport(f"{path.name} has no line about a GPU")
    return dict(zip(("gpu", "driver", "torch", "cudnn", "triton"), found.groups()))


def add(args: argparse.Namespace, folder: Path) -> None:
    """Copies a report to the folder, with what it lacks. Raises NoReport."""
    report = json.loads(args.add.read_text(encoding="utf-8"))
    if args.environment:
        report["machine"] = machine_in(args.environment)
    report["commit"] = report["commit"] or args.commit
    report["side_by_side"] = args.side_by_side
    report["remark"] = args.remark
    target = folder / f"{args.name}.json"
    target.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    try:
        read(target)
    except NoReport:
        target.unlink()
        raise


def main(argv: list[str], folder: Path = FOLDER, table: Path = seen_on_gpu.TABLE) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--add", type=Path, metavar="FILE")
    parser.add_argument("--seen", type=Path, nargs="+", metavar="FILE", default=[])
    parser.add_argument("--name", default="")
    parser.add_argument("--commit", default="")
    parser.add_argument("--environment", type=Path, metavar="FILE")
    parser.add_argument("--side-by-side", action="store_true")
    parser.add_argument("--remark", default="")
    args = parser.parse_args(argv)
    if bool(args.add) != bool(args.name):
        parser.error("--add and --name belong together")
    try:
        if args.add:
            add(args, folder)
        rows = [row for path in args.seen for row in seen_on_gpu.rows_of(read(path), path.name)]
        text = page(folder)
    except NoReport as error:
        print(f"gpu_results: {error}", file=sys.stderr)
        return 2
    if rows:
        seen_on_gpu.write([*seen_on_gpu.load(table), *rows], table)
    folder.with_suffix(".md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
