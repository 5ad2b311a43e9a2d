"""Times in Weights & Biases."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

from deep500_timing._base.at_exit import do_after_reports
from deep500_timing._base.fork import after_fork
from deep500_timing._base.warn import warn_once
from deep500_timing.exceptions import ExportError
from deep500_timing.exporters._delivery import CAPACITY, BackgroundExporter
from deep500_timing.exporters._trackers import TrackerExporter, distinct, tracker_name

if TYPE_CHECKING:
    from deep500_timing._summary.snapshot import Snapshot

STEP_METRIC = "timing/step"
"""The x-axis of times, below the exporter's prefix. W&B's own step belongs to the user."""
UNITS = {"deep500_timing": {"unit": "times in seconds, keys that end in _bytes in bytes"}}
"""Added to a run's config with the first report: W&B's metrics have no unit."""

_ALONE = 32
"""Reports that wait before a run in which no one else has logged is taken for one of reports alone."""

_rows: WeakKeyDictionary[Any, Rows] = WeakKeyDictionary()


@after_fork
def _after_fork_in_child() -> None:
    for rows in list(_rows.values()):
        rows.reset()  # What waited there is the parent's.


class WandbExporter(BackgroundExporter, TrackerExporter):
    """Log each snapshot to a W&B run, CPU and GPU together.

    Keys are ``prefix/CPU/BATCH`` for the mean, in seconds, and ``prefix/CPU/BATCH/p95`` and so on for other statistics.
    Their x-axis is the metric ``prefix/timing/step``: the step that ``export`` is given, or the next number.
    The run's config gets a key ``deep500_timing`` with the unit, unless it has one.

    Rows that you log are neither lost nor moved, with or without ``step=``: a report joins the row that W&B is filling
    and does not end it. A row holds one value per key. If two reports with the same keys come between two of your rows,
    the second waits for your next row, or for the end of the run; its values are in the run's summary at once. At most
    256 wait. Where nothing else has logged by the time that 32 wait, each report ends the row of the one before: so all
    arrive while the program runs. If you log later, and less often than that, give each timer its own prefix, report
    less often, or set ``own_rows`` if you never pass ``step`` to ``wandb.log``.

    The exporter starts no run; without one it warns once. ``export`` does not wait: W&B is given each report by the
    exporter's own thread, so a report joins the row that is being filled a moment later. ``flush`` waits for it.
    The end of the run waits up to 5 s for reports that are under way.
    """

    package = "wandb"

    def __init__(self, prefix: str = "", *, run: Any = None, own_rows: bool = False, **settings: Any) -> None:
        """Choose what to log and where.

        Args:
            prefix: Put before the keys, with one slash between.
            run: A W&B run; None is the run that is active at each export.
            own_rows: Write each report at once as a separate row. That ends the row that W&B is filling and advances
                its step: only where nothing else is logged, or never with ``step=``.
            **settings: ``stats``, ``whole_run``, ``by_rank`` and ``strict``, as of every tracker's exporter.
        """
        super().__init__(prefix, **settings)
        if "*" in self._prefix:
            raise ValueError(f"WandbExporter was given prefix={prefix!r}; '*' is W&B's wildcard, leave it out.")
        self._run = run
        self._own_rows = own_rows
        self.waiting = 0
        """Delivered reports that wait for your next row."""

    def _where(self) -> str:
        return str(id(self._run)) if self._run is not None else ""

    def _service(self) -> str:
        return "W&B"

    def _active_run(self) -> Any:
        return self._run if self._run is not None else self._library.run

    def _destination(self, step: int | None) -> tuple[Any, int | None]:
        run = self._active_run()
        if run is None:
            raise ExportError("no W&B run is active; call wandb.init() first, or pass run=")
        rows_of(run).exporters.add(self)  # From now on the end of the run waits for this report.
        return run, step

    def _send(self, snapshot: Snapshot, destination: tuple[Any, int | None], timeout_s: float | None) -> None:
        run, step = destination
        metrics = self._metrics(snapshot)
        if not metrics:
            return
        axis = self._prefix + STEP_METRIC
        data: dict[str, Any] = dict(distinct(metrics, tracker_name))
        where = getattr(run, "id", None)
        if where not in self._numbers and getattr(run, "resumed", False):
            self._numbers[where] = int(run.summary.get(axis, -1))
        data[axis] = self._number(where, step)
        axes = {f"{self._prefix}{device}/*": axis for device in dict.fromkeys(region.device for region in snapshot)}
        rows_of(run).add(Row(data, axes, self, self._own_rows))

    def _flush(self) -> None:
        super()._flush()
        run = self._active_run()
        if run is not None:
            rows_of(run).write()

    def _lose(self) -> None:
        """Count a report as lost that W&B had been given."""
        self.waiting -= 1
        self.delivered -= 1
        self.lost += 1


class Row(NamedTuple):
    """A report: its values, and the x-axis of each glob of keys."""

    data: Mapping[str, Any]
    axes: Mapping[str, str]
    exporter: WandbExporter
    is_own_row: bool


def rows_of(run: Any) -> Rows:
    rows = _rows.get(run)
    if rows is None:
        rows = _rows.setdefault(run, Rows(run))
    return rows


class Rows:
    """Put reports into the rows of one W&B run.

    W&B writes a row when ``log`` begins the next one and ignores values for a past row. Ending a row of the user's, or
    advancing W&B's step, would lose the user's rows with ``step=``. So a report joins the row that is being filled,
    by ``log(..., commit=False)``. A report whose keys are in that row already waits for the next row, or for the end
    of the run.
    """

    def __init__(self, run: Any) -> None:
        name = getattr(run, "name", None) or getattr(run, "id", None)
        self._name = f"W&B run {name}" if name else "the W&B run"
        self._run = ref(run)
        self.exporters: WeakSet[WandbExporter] = WeakSet()
        self.reset()
        self._has_units = False
        self._axes: set[str] = set()
        self._step: int | None = None
        self._keys: set[str] = set()
        self._is_finishing = self._ends_rows = False
        self._is_alone = True
        """Whether no one else has logged, as far as was seen."""
        # Rows have no order in a run that several processes write, or that is disabled. W&B copies the settings.
        mode = getattr(getattr(run, "settings", None), "mode", None)
        self._has_order = not getattr(run, "disabled", False) and mode != "shared"
        # W&B's own parts learn of the end of a run by these hooks.
        hooks = getattr(run, "_teardown_hooks", None)
        if isinstance(hooks, list):
            from wandb.sdk.wandb_run import TeardownHook, TeardownStage

            hooks.append(TeardownHook(self._finish, TeardownStage.EARLY))
        do_after_reports(self._finish)

    def reset(self) -> None:
        # Reentrant: a signal handler may flush during a flush.
        self._lock = threading.RLock()
        self._waiting: deque[Row] = deque()

    def add(self, row: Row) -> None:
        """Write a report, or let it wait for its turn; raises what W&B raises."""
        with self._lock:
            run = self._run()
            if run is None:
                return
            self.write()
            if self._waiting or not self._place(run, row):
                if len(self._waiting) >= CAPACITY:
                    self._waiting.popleft().exporter._lose()
                    warn_once(f"{CAPACITY} reports wait for rows of {self._name}; the oldest are lost.")
                row.exporter.waiting += 1
                self._waiting.append(row)
            if self._is_alone and not row.is_own_row:
                with suppress(Exception):  # It is in a row too.
                    run.summary.update(row.data)

    def write(self) -> None:
        """Write the reports that wait, until one must wait on."""
        with self._lock:
            run = self._run()
            while self._waiting and run is not None:
                row = self._waiting[0]
                try:
                    if not self._place(run, row):
                        break
                    row.exporter.waiting -= 1
                except Exception as refusal:
                    row.exporter._lose()
                    row.exporter._say_once("exporting", refusal)
                self._waiting.popleft()

    def _finish(self) -> None:
        self._is_finishing = True
        for exporter in list(self.exporters):
            exporter._wait_until_empty(exporter._exit_timeout_s)
        self.write()

    def _place(self, run: Any, row: Row) -> bool:
        """Write one report; return False if it must wait for the user's next row."""
        if not self._has_units:
            self._has_units = True
            with suppress(Exception):  # A description must not cost a report.
                run.config.setdefaults(UNITS)
        for keys, axis in row.axes.items():
            if axis not in self._axes:
                run.define_metric(axis, hidden=True)
            if keys not in self._axes:
                run.define_metric(keys, step_metric=axis)
            self._axes |= {keys, axis}
        step = None if row.is_own_row or not self._has_order else int(run.step)
        if step is None:
            run.log(row.data)
            return True
        if step != self._step:
            self._is_alone &= step == getattr(run, "starting_step", 0) if self._step is None else False
            self._step, self._keys = step, set()
        following = None
        if not self._keys.isdisjoint(row.data):
            self._ends_rows |= self._is_alone and len(self._waiting) >= _ALONE
            if not (self._is_finishing or (self._is_alone and self._ends_rows)):
                return False
            if self._is_finishing:
                run.log({}, commit=True)
            else:
                # By its number: a row that the user begins at this moment is not ended.
                following = step + 1
            self._keys = set()
        run.log(row.data, step=following, commit=False)
        self._keys |= row.data.keys()
        # The user may have logged on another thread meanwhile: the report is in that row or in the next.
        self._step = int(run.step)
        return True
