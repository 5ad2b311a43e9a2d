"""``python -m benchmarks.gpu``: run every section and write ``benchmarks/GPU.md``; `make gpu-session`.

Each section runs in a process of its own with a time limit, so that a crash, a hang or a missing package costs that
section only: its line says why. Nothing is asserted here; the tests marked ``gpu`` are a section. Where no section that
needs a GPU could run, nothing is written.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu import _sections

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "GPU.md"
MARK = "deep500-timing-gpu-section:"


def main() -> int:
    """Run what was asked for; return 0 whatever it showed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"some of {', '.join(_sections.ALL)}; all if none is named")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--page", type=Path, default=PAGE, help="where to write")
    asked = parser.parse_args()
    if asked.inside:
        return _inside(asked.inside)
    unknown = set(asked.sections) - set(_sections.ALL)
    if unknown:
        parser.error(f"no section is called {', '.join(sorted(unknown))}")
    found = {}
    for name in asked.sections or _sections.ALL:
        began = time.monotonic()
        found[name] = run(name, _sections.ALL[name].limit_s)
        what = found[name].get("skipped") or found[name].get("failed") or f"{len(found[name]['rows'])} row(s)"
        print(f"{name:<12} {time.monotonic() - began:5.0f} s  {what}", flush=True)
    if any("rows" in result and not _sections.ALL[name].anywhere for name, result in found.items()):
        asked.page.write_text(page(found), encoding="utf-8")
        print(f"written: {asked.page}")
    else:
        print("no section that needs a GPU could run here, so nothing is written")
    return 0


def _inside(name: str) -> int:
    try:
        columns, rows = _sections.ALL[name].measure()
        result: dict[str, object] = {"columns": columns, "rows": rows}
    except _sections.UnavailableError as reason:
        result = {"skipped": str(reason)}
    print(MARK + json.dumps(result))
    sys.stdout.flush()
    return 0


def run(name: str, limit_s: float) -> dict[str, object]:
    """The result of one section: its columns and rows, or why there are none."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu", "--inside", name],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'adapters'}", **_environment(name)},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done within {limit_s:g} s"}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            result: dict[str, object] = json.loads(line[len(MARK) :])
            if done.returncode:
                result["note"] = f"its process ended with {done.returncode}"
            return result
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return {"failed": f"ended with {done.returncode}: {last}"}


def _environment(name: str) -> dict[str, str]:
    return {"DEEP500_TIMING_PURE": "1"} if name in _sections.ALL and _sections.ALL[name].plain else {}


def page(found: dict[str, dict[str, object]]) -> str:
    """What was found, as a page of tables."""
    lines = [
        "# On a GPU",
        "",
        "Measured by `make gpu-session` on one machine; each table stands alone. Times in µs unless said otherwise.",
    ]
    for name, result in found.items():
        lines += ["", f"## {_sections.ALL[name].title}", ""]
        if "rows" not in result:
            lines.append(f"Not measured: {result.get('skipped') or result.get('failed')}")
            continue
        columns: list[str] = result["columns"]  # type: ignore[assignment]
        rows: list[list[object]] = result["rows"]  # type: ignore[assignment]
        lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(map(_text, row)) + " |" for row in rows]
        if "note" in result:
            lines += ["", str(result["note"])]
    return "\n".join(lines) + "\n"


def _text(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
