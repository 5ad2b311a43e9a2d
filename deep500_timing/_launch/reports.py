"""The reports of a program that was not edited, to the exporters that the settings name."""

from __future__ import annotations

import threading

from deep500_timing._base.names import BATCH
from deep500_timing._base.warn import warn_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from deep500_timing.timer import Timer


class Reports:
    """The exporters of one process, and the thread that reports to them. Their faults cost a warning each."""

    def __init__(self, timer: Timer, chosen: tuple[tuple[str, str], ...], every_s: float) -> None:
        self._timer = timer
        self._ended = threading.Event()
        self.exporters = [one for name, given in chosen if (one := _made(name, given)) is not None]
        if self.exporters:
            threading.Thread(target=self._work, args=(every_s,), name="deep500-timing reports", daemon=True).start()

    def note_destinations(self) -> None:
        """Remember the runs of trackers that are active on this thread."""
        for exporter in self.exporters:
            getattr(exporter, "note_destination", bool)()

    def _work(self, every_s: float) -> None:
        while not self._ended.wait(every_s):
            self._report()

    def _report(self) -> None:
        try:
            steps = self._timer.snapshot().get(BATCH)
            count = steps.stats.count if steps is not None and steps.stats is not None else 0
            self._timer.export(*self.exporters, step=count)
        except Exception as error:
            warn_once(f"Reporting to exporters failed: {type(error).__name__}: {error}. The program goes on.")

    def close(self) -> None:
        """Report a last time, and close the exporters."""
        if not self.exporters:
            return
        self._ended.set()
        self._report()
        for exporter in self.exporters:
            try:
                exporter.close()
            except Exception as error:
                warn_once(f"Closing {type(exporter).__name__} failed: {type(error).__name__}: {error}.")


def _made(name: str, given: str) -> Any:
    from deep500_timing import exporters

    try:
        kind = exporters.get(name)
        if name == "prometheus":
            return kind(port=int(given or 9400)) if given.isdecimal() or not given else kind(folder=given)
        return kind(given) if given else kind()
    except Exception as error:
        warn_once(f"Making the exporter {name!r} failed: {type(error).__name__}: {error}. It gets no reports.")
        return None
