"""Hold the lines of each folder against tools/sizes.txt; ``--write`` writes today's, rounded up to hundreds."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("sizes.txt")
KINDS = {".py", ".pxd", ".cpp", ".mk", ""}


def lines_of(name: str) -> int:
    """Lines of a file, or of all sources in a folder; not in a hidden one, such as Hypothesis leaves."""
    paths = [path for path in (ROOT / name, *(ROOT / name).rglob("*")) if "/." not in str(path.relative_to(ROOT))]
    files = [path for path in paths if path.is_file() and path.suffix in KINDS]
    return sum(path.read_bytes().count(b"\n") for path in files)


if __name__ == "__main__":
    said, *rows = TABLE.read_text(encoding="utf-8").splitlines()
    budget = {name: int(number) for name, number in (row.split() for row in rows)}
    now = {name: lines_of(name) for name in budget}
    if "--write" in sys.argv:
        rows = [f"{name} {-(-number // 100) * 100}" for name, number in now.items()]
        TABLE.write_text("\n".join([said, *rows, ""]), encoding="utf-8")
        sys.exit()
    over = [f"{name}: {now[name]} lines, {number} allowed" for name, number in budget.items() if now[name] > number]
    sys.exit("\n".join([*over, "Shorten it: the numbers in tools/sizes.txt only fall."]) if over else 0)
