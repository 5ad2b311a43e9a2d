"""Times of Python's garbage collector, as intervals of a region ``GC``."""

from __future__ import annotations

import gc
from _thread import get_ident
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

LEAST_NS = 1_000_000
"""Shorter collections are not recorded: they happen thousands of times a second and explain no slow step."""
_QUEUE = 10_000


class CollectorTimes:
    """Measures each collection by ``gc.callbacks``, on the thread that collects."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._start_ns = 0
        self._new: deque[tuple[int, int, int]] = deque(maxlen=_QUEUE)
        gc.callbacks.append(self._measure)

    def _measure(self, phase: str, _info: dict[str, Any]) -> None:
        # The interpreter collects on one thread at a time.
        if phase == "start":
            self._start_ns = self._now()
            return
        end_ns = self._now()
        if end_ns - self._start_ns >= LEAST_NS:
            self._new.append((get_ident(), self._start_ns, end_ns))

    def take(self, cut_ns: int | None) -> dict[int, NDArray[np.int64]]:
        """Start and end in ns of the collections that ended by a time, by thread. Each is given once."""
        found: dict[int, list[tuple[int, int]]] = {}
        while self._new and (cut_ns is None or self._new[0][2] <= cut_ns):
            ident, start_ns, end_ns = self._new.popleft()
            found.setdefault(ident, []).append((start_ns, end_ns))
        return {ident: np.array(pairs, dtype=np.int64) for ident, pairs in found.items()}

    def close(self) -> None:
        """Stop measuring."""
        if self._measure in gc.callbacks:
            gc.callbacks.remove(self._measure)
