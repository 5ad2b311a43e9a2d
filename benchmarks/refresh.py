"""Measure single sections anew, into RESULTS.md and results.json: `python -m benchmarks.refresh comm`.

They say when they were measured; the other tables stay those of the run that they are from.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

TITLES = {"comm": "Communication", "pipeline": "Pipelines"}
"""Sections whose lines come from ``benchmarks.bench_<name>``, and their headings."""


def put(folder: Path, name: str, lines: list[str]) -> None:
    """Replace one section in both files; a new one goes before the last, which says how it is measured.

    Args:
        folder: Where ``RESULTS.md`` and ``results.json`` are.
        name: One of :data:`TITLES`.
        lines: The section in Markdown, without its heading.

    Raises:
        ValueError: ``RESULTS.md`` has no section on how it is measured, so it is not such a report.
    """
    report, results = folder / "RESULTS.md", folder / "results.json"
    heading, last = f"## {TITLES[name]}\n", "## How it is measured"
    text = report.read_text(encoding="utf-8")
    if last not in text:
        raise ValueError(f"{report} has no section {last!r}: write it with `python -m benchmarks` first.")
    section = "\n".join([heading, *lines]).rstrip("\n") + "\n\n"
    if heading in text:
        text = re.sub(rf"^{heading}.*?(?=^## )", lambda _: section, text, count=1, flags=re.DOTALL | re.MULTILINE)
    else:
        text = text.replace(last, section + last, 1)
    report.write_text(text, encoding="utf-8")
    found = json.loads(results.read_text(encoding="utf-8"))
    found[name] = lines
    results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure what is named, all if nothing is; what cannot be measured stays as it was, and is said."""
    names = sys.argv[1:] or list(TITLES)
    if unknown := set(names) - set(TITLES):
        sys.exit(f"There is no section {', '.join(sorted(unknown))}: {', '.join(TITLES)} can be measured anew.")
    failed = False
    for name in names:
        lines: list[str] = importlib.import_module(f"benchmarks.bench_{name}").report_lines()
        print("\n".join(lines))
        if lines[0].startswith("Not measured"):
            failed = True
        else:
            put(Path(__file__).parent, name, lines)
    sys.exit(failed)


if __name__ == "__main__":
    main()
