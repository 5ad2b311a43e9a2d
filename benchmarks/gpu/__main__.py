"""``python -m benchmarks.gpu``: run every section and write ``benchmarks/GPU.md``; `make gpu-session`.

Each section runs in a process of its own with a time limit, so that a crash, a hang or a missing package costs that
section only: its line says why, and what it had started is ended with it. All together have a limit as well; what does
not fit it any more is not begun, and the page is written all the same. Nothing is asserted here; the tests marked
``gpu`` are a section. Where no section that needs a GPU could run, nothing is written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu import _sections

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "GPU.md"
MARK = "deep500-timing-gpu-section:"
LIMIT_S = 470.0
"""Of all sections together: eight minutes, less the time to start and to write."""


def main() -> int:
    """Run what was asked for; return 0 whatever it showed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"some of {', '.join(_sections.ALL)}; all if none is named")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--page", type=Path, default=PAGE, help="where to write")
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, help="of all sections together (default: %(default)g)"
    )
    asked = parser.parse_args()
    if asked.inside:
        return _inside(asked.inside)
    unknown = set(asked.sections) - set(_sections.ALL)
    if unknown:
        parser.error(f"no section is called {', '.join(sorted(unknown))}")
    found = {}
    end = time.monotonic() + asked.limit_s
    for name in asked.sections or _sections.ALL:
        began = time.monotonic()
        if began < end:
            found[name] = run(name, min(_sections.ALL[name].limit_s, end - began))
        else:
            found[name] = {"failed": f"not started: the session has used its {asked.limit_s:g} s"}
        what = found[name].get("skipped") or found[name].get("failed") or f"{len(found[name]['rows'])} row(s)"
        print(f"{name:<12} {time.monotonic() - began:5.0f} s  {what}", flush=True)
        # After each section, so that a session that is cut off has a page.
        if _is_worth_a_page(found):
            asked.page.write_text(page(found), encoding="utf-8")
    if _is_worth_a_page(found):
        print(f"written: {asked.page}")
    else:
        print("no section that needs a GPU could run here, so nothing is written")
    return 0


def _is_worth_a_page(found: dict[str, dict[str, object]]) -> bool:
    return any("rows" in result and not _sections.ALL[name].anywhere for name, result in found.items())


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
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", "--inside", name],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'adapters'}", **_environment(name)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done within {limit_s:.3g} s"}
    finally:
        _end(process)
    for line in output.splitlines():
        if line.startswith(MARK):
            result: dict[str, object] = json.loads(line[len(MARK) :])
            if process.returncode:
                result["note"] = f"its process ended with {process.returncode}"
            return result
    last = (errors.strip().splitlines() or ["it said nothing"])[-1]
    return {"failed": f"ended with {process.returncode}: {last}"}


def _end(process: subprocess.Popen[str]) -> None:
    # With what it has started, which would go on using the GPU, and whose output would be waited for.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with process:
        pass


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
