"""What ``torch.compile`` does: a region ``compile``, and a table of compilations with the reason of each repetition.

The times are from the callbacks of ``torch._dynamo``, frames and reasons from its own metrics. Both are there once
Dynamo is imported, which is watched for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deep500_timing.adapters import after_import, warn_once

if TYPE_CHECKING:
    from deep500_timing.loop import Loops

TABLE = "compilations"


class Compilations:
    """Records compilations, until it is undone."""

    def __init__(self, loops: Loops) -> None:
        self._loops = loops
        self._seen: list[Any] = []
        self._rows: list[tuple[Any, ...]] = []
        self._undo: list[Callable[[], object]] = []
        self._undo.append(after_import("torch._dynamo", self._begin))

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _begin(self) -> None:
        try:
            from torch._dynamo.callback import callback_handler

            start = callback_handler.register_start_callback(self._start)
            end = callback_handler.register_end_callback(self._end)
            self._undo += [partial(callback_handler.remove_start_callback, start)]
            self._undo += [partial(callback_handler.remove_end_callback, end)]
        except Exception as error:
            warn_once(f"This PyTorch does not tell when torch.compile works, so there is no region compile: {error!r}.")

    def _start(self, _about: Any) -> None:
        region = self._loops.regions["compile"]
        if not region.is_open:
            region.start()

    def _end(self, _about: Any) -> None:
        region = self._loops.regions["compile"]
        if region.is_open:
            region.end()

    def feed(self) -> None:
        """Read the newest metrics, of which Dynamo keeps 64, on the log's thread."""
        utils = sys.modules.get("torch._dynamo.utils")
        if utils is None or not hasattr(utils, "get_compilation_metrics"):
            return
        metrics = utils.get_compilation_metrics()
        fresh = [one for one in metrics if not any(one is known for known in self._seen)]
        self._seen = metrics
        self._rows += map(_row, fresh)
        run = self._loops.log.run
        if run is None or not self._rows:
            return
        run.declare(TABLE, unix_us="int", dur_us="int", compile_id="name", frame="name", reason="name")
        rows, self._rows = self._rows, []
        run.add(TABLE, *rows)


def _row(one: Any) -> tuple[Any, ...]:
    start_us, end_us = one.start_time_us or 0, one.end_time_us or one.start_time_us or 0
    frame = f"{one.co_name} ({Path(one.co_filename or '').name}:{one.co_firstlineno})"
    return start_us, end_us - start_us, str(one.compile_id), frame, str(one.recompile_reason or "")[:500]
