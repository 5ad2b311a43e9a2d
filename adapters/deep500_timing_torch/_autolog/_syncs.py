"""The lines of the program that make the CPU wait for the GPU: the table ``sync_lines`` of the run.

PyTorch warns of each operation that waits while its debug mode of synchronization says so. The mode is on in a few
steps: 6 to 10, and one in a hundred. The program's own mode, warning filters and display of warnings stay.
"""

from __future__ import annotations

import linecache
import re
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path
from sys import _getframe
from types import CodeType
from typing import TYPE_CHECKING, Any, cast

import torch

from deep500_timing.adapters import warn_once

if TYPE_CHECKING:
    from deep500_timing.loop import Loops

TABLE = "sync_lines"
_WAITS, _NOTICE = "called a synchronizing CUDA operation", "Synchronization debug mode is a prototype"
_FILTER: Any = ("always", re.compile(f"{_WAITS}|{_NOTICE}"), UserWarning, None, 0)
_FIRST, _EVERY = range(5, 10), 100
_OWN = frozenset({"torch", "deep500_timing", "deep500_timing_torch", "warnings", "_py_warnings", "contextlib"})
"""Packages of which no line is named, but the line that called them."""
_EXPRESSION = 80


class Syncs:
    """Counts waits by line, until it is undone."""

    def __init__(self, loops: Loops) -> None:
        self._loops = loops
        self._counts: Counter[tuple[CodeType, int]] = Counter()
        self._sampled: list[tuple[int, Counter[tuple[CodeType, int]]]] = []
        self._filters: list[Any] | None = None
        """The list that holds the filter while the mode is on."""
        self._hook, self._shown = self._show, warnings.showwarning
        loops.when_stepped.append(self._stepped)

    def undo(self) -> None:
        self._stop()
        self._disarm()

    def _stop(self) -> None:
        with suppress(ValueError):
            self._loops.when_stepped.remove(self._stepped)

    def _stepped(self, step: int) -> None:
        # On the thread that trains, after the optimizer's step of that number.
        try:
            self._disarm()
            if self._loops.on_device and (step in _FIRST or step % _EVERY == 0):
                self._arm()
        except Exception as error:
            self._stop()
            warn_once(f"The lines that wait for the GPU are not counted: {type(error).__name__}: {error}.")

    def _arm(self) -> None:
        cuda: Any = torch.cuda
        if not cuda.is_initialized() or cuda.get_sync_debug_mode():
            return
        # Into the list itself: each function of `warnings` would have warnings shown again that are shown once.
        self._filters = cast("list[Any]", warnings.filters)
        self._filters.insert(0, _FILTER)
        self._shown, warnings.showwarning = warnings.showwarning, self._hook
        torch.cuda.set_sync_debug_mode("warn")

    def _disarm(self) -> None:
        filters, self._filters = self._filters, None
        if filters is None:
            return
        if torch.cuda.get_sync_debug_mode() == 1:
            torch.cuda.set_sync_debug_mode("default")
        if warnings.showwarning is self._hook:
            warnings.showwarning = self._shown
        for one in (filters, cast("list[Any]", warnings.filters)):  # a copy, inside `warnings.catch_warnings`
            with suppress(ValueError):
                one.remove(_FILTER)
        self._sampled.append((self._loops.timer.now_ns(), self._counts))
        self._counts = Counter()

    def _show(self, message: Any, category: Any, filename: str, lineno: int, *more: Any, **named: Any) -> None:
        text = str(message)
        if self._filters is None or not text.startswith((_WAITS, _NOTICE)):
            self._shown(message, category, filename, lineno, *more, **named)
            return
        loop, checkpoint = self._loops.here(), self._loops.regions["CHECKPOINT"]
        if text.startswith(_NOTICE) or loop is not self._loops.main or loop.evaluates or checkpoint.is_open:
            return
        frame: Any = _getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OWN:
            frame = frame.f_back
        if frame is not None:
            self._counts[frame.f_code, frame.f_lineno] += 1

    def feed(self) -> None:
        """Write the counts, on the log's thread, which may read source files."""
        run = self._loops.log.run
        if run is None or not self._sampled:
            return
        run.declare(TABLE, time="time", function="name", line="name", expression="name", count="int")
        sampled, self._sampled = self._sampled, []
        for time_ns, counts in sampled:
            run.add(TABLE, (time_ns, "", "", "", 0))  # one for each sampled step
            for (code, number), count in counts.items():
                file = Path(*Path(code.co_filename).parts[-2:])
                text = linecache.getline(code.co_filename, number).strip()[:_EXPRESSION]
                run.add(TABLE, (time_ns, code.co_name, f"{file}:{number}", text, count))
