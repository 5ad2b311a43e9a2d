"""``python -m benchmarks.gpu``: run the sections and write ``benchmarks/GPU.md``; `make gpu-session`.

The sections of a group share a process. Each section has a time limit, and so has the session. A crash, a hang or a
missing package costs one section; the rest of the group runs in a new process. Each row is written to the page at
once, so an interrupted session has a page too. Nothing is asserted here; the tests marked ``gpu`` are a section.
Without a GPU the page is not written.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu import _device, _sections

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "GPU.md"
SITE = ROOT / "build" / "gpu-site"
"""The compiled packages for the Python of the machine, from ``make gpu-site``."""
MARK = "deep500-timing-gpu-section:"
LIMIT_S = 470.0
"""Of all sections together: eight minutes, less the time to start and to write."""
START_S = 150.0
"""Limit of the start of a process. The first import of PyTorch reads gigabytes from a cold disk."""


def main() -> int:
    """Run the sections; return 0 in any case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"some of {', '.join(_sections.ALL)}; all if none is named")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help="small sizes, for a rehearsal without a GPU")
    parser.add_argument("--page", type=Path, default=PAGE, help="where to write")
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, help="of all sections together (default: %(default)g)"
    )
    asked = parser.parse_args()
    names = asked.sections or list(_sections.ALL)
    unknown = set(names) - set(_sections.ALL)
    if unknown:
        parser.error(f"no section is called {', '.join(sorted(unknown))}")
    if asked.small:
        os.environ[_device.SMALL] = "1"
    if asked.inside:
        return _inside(names)
    session = Session(asked.page, asked.limit_s)
    for _, group in itertools.groupby(names, key=lambda name: _sections.ALL[name].process):
        session.run(list(group))
    print(f"written: {asked.page}" if session.write() else "no section that needs a GPU could run: nothing is written")
    return 0


class Session:
    """The results so far, by section: columns, rows, and the reason for missing rows."""

    def __init__(self, page_path: Path, limit_s: float) -> None:
        """Start the clock."""
        self.found: dict[str, dict[str, Any]] = {}
        self._page = page_path
        self._limit_s = limit_s
        self._end = time.monotonic() + limit_s

    def run(self, names: list[str]) -> None:
        """Run sections in one process, and the rest in a new one after a crash or a hang."""
        while names:
            if time.monotonic() >= self._end:
                for name in names:
                    self._over(name, time.monotonic(), failed=f"not started: the session has used {self._limit_s:g} s")
                return
            names = names[self._run_process(names) :]

    def _run_process(self, names: list[str]) -> int:
        """Run one process; return the number of sections that ended."""
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu", "--inside", *names],
                cwd=ROOT,
                env={**os.environ, **_environment(names[0])},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
            lines: queue.Queue[str | None] = queue.Queue()
            threading.Thread(target=_read, args=(process, lines), daemon=True).start()
            try:
                return self._follow(process, lines, names, errors)
            finally:
                _end(process)

    def _follow(self, process: Any, lines: queue.Queue[str | None], names: list[str], errors: Any) -> int:
        began, limit_s = time.monotonic(), START_S
        for over, name in enumerate(names):
            found = self.found.setdefault(name, {})
            while True:
                now = time.monotonic()
                wait_s = min(began + limit_s, self._end) - now
                try:
                    line = lines.get(timeout=max(wait_s, 0.0))
                except queue.Empty:
                    self._over(name, began, failed=f"stopped after {time.monotonic() - began:.0f} s")
                    return over + 1
                if line is None:
                    process.wait()
                    errors.seek(0)
                    last = (errors.read().strip().splitlines() or ["it said nothing"])[-1]
                    self._over(name, began, failed=f"ended with {process.returncode}: {last}")
                    return over + 1
                message = json.loads(line)
                if message.pop("begin", False):
                    began, limit_s = time.monotonic(), _sections.ALL[name].limit_s
                elif message.pop("over", False):
                    self._over(name, began, **message)
                    break
                else:
                    found.setdefault("rows", [])
                    if "columns" in message:
                        found["columns"] = message["columns"]
                    else:
                        found["rows"].append(message["row"])
                        self.write()
            began, limit_s = time.monotonic(), START_S
        return len(names)

    def _over(self, name: str, began: float, **result: str) -> None:
        found = self.found.setdefault(name, {})
        found |= result
        what = found.get("skipped") or found.get("failed") or f"{len(found.get('rows', ()))} row(s)"
        print(f"{name:<14} {time.monotonic() - began:5.0f} s  {what}", flush=True)
        self.write()

    def write(self) -> bool:
        """Write the page, if a section that needs a GPU has a row."""
        worth = any(found.get("rows") and not _sections.ALL[name].anywhere for name, found in self.found.items())
        if worth:
            self._page.write_text(page(self.found), encoding="utf-8")
        return worth


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(MARK):
            lines.put(line[len(MARK) :])
    lines.put(None)


def _end(process: subprocess.Popen[str]) -> None:
    # With its own child processes: they would go on using the GPU, and keep the pipe of the output open.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with process:
        pass


def _environment(name: str) -> dict[str, str]:
    """The compiled packages first, if they are for this Python; then the tree."""
    paths = [ROOT, ROOT / "adapters"]
    if any(SITE.glob(f"deep500_timing/*.{sys.implementation.cache_tag}-*")):
        paths.insert(0, SITE)
    # The tree is the working folder, which Python would put before them.
    found = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONSAFEPATH": "1"}
    return {**found, "DEEP500_TIMING_PURE": "1"} if _sections.ALL[name].process == "plain" else found


def _inside(names: Iterable[str]) -> int:
    def say(**message: object) -> None:
        print(MARK + json.dumps(message), flush=True)

    for name in names:
        say(begin=True)
        try:
            rows = iter(_sections.ALL[name].measure())
            say(columns=next(rows))
            for row in rows:
                say(row=row)
            say(over=True)
        except _sections.UnavailableError as reason:
            say(over=True, skipped=str(reason))
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            say(over=True, failed=f"{type(error).__name__}: {text[0]}")
    sys.stdout.flush()
    # Without the exit handlers of a device that a section has broken.
    os._exit(0)


def page(found: dict[str, dict[str, Any]]) -> str:
    """The results as a page of tables."""
    lines = [
        "# On a GPU",
        "",
        "Measured by `make gpu-session` on one machine; each table stands alone. Times in µs unless said otherwise.",
    ]
    for name, result in found.items():
        lines += ["", f"## {_sections.ALL[name].title}", ""]
        reason = result.get("skipped") or result.get("failed")
        rows = result.get("rows")
        if rows:
            columns = result["columns"]
            lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
            lines += ["| " + " | ".join(map(_text, row)) + " |" for row in rows]
            if reason:
                lines += ["", f"Not complete: {reason}"]
        else:
            lines.append(f"Not measured: {reason}")
    return "\n".join(lines) + "\n"


def _text(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
