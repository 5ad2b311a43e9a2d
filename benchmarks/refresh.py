"""Measure single sections again, into RESULTS.md and results.json: `python -m benchmarks.refresh comm`.

They say when they were measured; the other tables stay those of the run that they are from.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.__main__ import Bench
from benchmarks._report import reach_table, short_of, training_lines

TITLES = {"comm": "Communication", "pipeline": "Pipelines", "layers": "Layers"}
"""Sections with lines from ``benchmarks.bench_<name>``, and their headings."""
TRAINING = ("pytorch", "keras")
"""Tables of one section, which are measured as in a whole run."""


def put(folder: Path, name: str, lines: list[str]) -> None:
    """Replace the lines of one section in both files.

    Args:
        folder: Where ``RESULTS.md`` and ``results.json`` are.
        name: One of :data:`TITLES`.
        lines: The section in Markdown, without its heading.

    Raises:
        ValueError: ``RESULTS.md`` has no section on how it is measured, so it is not such a report.
    """
    _put_section(folder, TITLES[name], lines)
    _keep(folder, {name: lines})


def put_training(folder: Path, results: dict[str, Any]) -> None:
    """Replace the tables of training loops that were measured, and their goals; the others stay.

    Args:
        folder: Where ``RESULTS.md`` and ``results.json`` are.
        results: The results of these sections.

    Raises:
        ValueError: As by :func:`put`.
    """
    measured = {name: results[name] for name in ("pytorch", "processes", "keras") if name in results}
    found = _read(folder) | measured
    _put_section(folder, "Training", training_lines(found))
    if "## Reach\n" in (folder / "RESULTS.md").read_text(encoding="utf-8"):  # Some of its goals are of training.
        _put_section(folder, "Reach", [*reach_table(found), *short_of(found)])
    _keep(folder, measured)


def _read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return found


def _keep(folder: Path, measured: dict[str, Any]) -> None:
    text = json.dumps(_read(folder) | measured, indent=1) + "\n"
    (folder / "results.json").write_text(text, encoding="utf-8")


def _put_section(folder: Path, title: str, lines: list[str]) -> None:
    # A new section goes before the last, which says how it is measured.
    report = folder / "RESULTS.md"
    heading, last = f"## {title}\n", "## How it is measured"
    text = report.read_text(encoding="utf-8")
    if last not in text:
        raise ValueError(f"{report} has no section {last!r}: write it with `python -m benchmarks` first.")
    section = "\n".join([heading, *lines]).rstrip("\n") + "\n\n"
    if heading in text:
        text = re.sub(rf"^{heading}.*?(?=^## )", lambda _: section, text, count=1, flags=re.DOTALL | re.MULTILINE)
    else:
        text = text.replace(last, section + last, 1)
    report.write_text(text, encoding="utf-8")


def main() -> None:
    """Measure the named sections, all by default; a section that fails stays as it was, and is named."""
    known = (*TITLES, *TRAINING)
    names = sys.argv[1:] or known
    if unknown := set(names) - set(known):
        sys.exit(f"There is no section {', '.join(sorted(unknown))}: {', '.join(known)} can be measured anew.")
    failed = False
    folder = Path(__file__).parent
    if training := [name for name in names if name in TRAINING]:
        # Their contenders are made by the sections themselves.
        put_training(folder, Bench("full", training, "nothing", Console()).run())
    for name in names:
        if name in TRAINING:
            continue
        lines: list[str] = importlib.import_module(f"benchmarks.bench_{name}").report_lines()
        print("\n".join(lines))
        if lines[0].startswith("Not measured"):
            failed = True
        else:
            put(folder, name, lines)
    sys.exit(failed)


if __name__ == "__main__":
    main()
