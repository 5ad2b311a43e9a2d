"""The rows of a W&B run, which are the user's: where a report of ours can go without ending or moving one."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from deep500_timing.exporters import _exit
from deep500_timing.exporters._background import BackgroundCaller
from deep500_timing.exporters._trouble import BusyError

if TYPE_CHECKING:
    from collections.abc import Mapping

UNITS = {"deep500_timing": {"unit": "times in seconds, keys that end in _bytes in bytes"}}
"""What a run's config gets with the first report. W&B's metrics have no unit."""

# A run is told once which axis its times have, and has one place for them, however many exporters there are.
_rows: WeakKeyDictionary[Any, Rows] = WeakKeyDictionary()


def rows_of(run: Any) -> Rows:
    """What places reports in the rows of a run."""
    rows = _rows.get(run)
    if rows is None:
        rows = _rows.setdefault(run, Rows(run))
    return rows


class Rows:
    """Places reports in the rows of one W&B run.

    W&B writes a row when ``log`` begins the next one, and takes nothing for a row that is past: ending a row of the
    user's, or moving W&B's step, would lose what the user logs with ``step=``. So a report joins the row that is being
    filled, by ``log(..., commit=False)``. A row holds one value of a key: where a report of the same keys is in it
    already, the next one waits until the user has begun another, or the run is finished, when nobody logs any more.
    """

    def __init__(self, run: Any) -> None:
        """Nothing of ours is in the run yet.

        Args:
            run: A W&B run.
        """
        name = getattr(run, "name", None) or getattr(run, "id", None)
        self.caller = BackgroundCaller(f"W&B run {name}" if name else "the W&B run", self._deliver)
        self._told_units = False
        self._axes: set[str] = set()
        self._step: int | None = None
        self._keys: set[str] = set()
        self._finishing = False
        self._be_told_of_the_end(run)

    def _be_told_of_the_end(self, run: Any) -> None:
        # What W&B's own parts are told of the end by. Where it is missing, what still waits then is lost and counted.
        hooks = getattr(run, "_teardown_hooks", None)
        if isinstance(hooks, list):
            from wandb.sdk.wandb_run import TeardownHook, TeardownStage

            hooks.append(TeardownHook(self._finish, TeardownStage.EARLY))

    def _finish(self) -> None:
        self._finishing = True
        self.caller.wait_until_empty(self.caller.hurry())

    def _deliver(self, _: Any, reports: list[tuple[Any, Mapping[str, Any], Mapping[str, str], bool]]) -> None:
        for run, data, axes, own_row in reports:
            self._set_units(run)
            self._set_axes(run, axes)
            self._place(run, data, own_row)

    def _place(self, run: Any, data: Mapping[str, Any], own_row: bool) -> None:
        step = None if own_row else _step_of(run)
        if step is None:
            run.log(data)
            return
        if step != self._step:
            self._step, self._keys = step, set()
        if not self._keys.isdisjoint(data):
            if not (self._finishing or _exit.has_begun()):
                raise BusyError("the row that is being filled has these times already")
            run.log({}, commit=True)
            self._keys = set()
        run.log(data, commit=False)
        self._keys |= data.keys()
        # Whether the row is this one or the next, if the user has logged meanwhile, is not known: it is in either.
        self._step = _step_of(run)

    def _set_units(self, run: Any) -> None:
        if self._told_units:
            return
        self._told_units = True
        # A key of the user's by that name stays as it is, and no report is lost for the sake of a description.
        with suppress(Exception):
            run.config.setdefaults(UNITS)

    def _set_axes(self, run: Any, axes: Mapping[str, str]) -> None:
        for keys, axis in axes.items():
            if keys in self._axes:
                continue
            if axis not in self._axes:
                run.define_metric(axis, hidden=True)
                self._axes.add(axis)
            run.define_metric(keys, step_metric=axis)
            self._axes.add(keys)


def _step_of(run: Any) -> int | None:
    # None where rows have no order of one writer: a run that several processes write, and one that is switched off.
    if getattr(run, "disabled", False) or getattr(getattr(run, "settings", None), "mode", None) == "shared":
        return None
    return int(run.step)
