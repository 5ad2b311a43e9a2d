"""Times in Comet and in Trackio, whose own threads send them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing.exceptions import ExportError
from deep500_timing.exporters._metrics import TrackerExporter, distinct, utf8_name

if TYPE_CHECKING:
    from deep500_timing._summary.snapshot import Snapshot


class CometExporter(TrackerExporter):
    """Log each snapshot to a Comet experiment, online or offline.

    Names are ``prefix/CPU/BATCH`` for the mean, in seconds, and ``prefix/CPU/BATCH/p95`` and so on for other
    statistics. They have the step that ``export`` is given, or Comet's current one. Comet's own thread sends them.

    The exporter starts no experiment; without one it warns once.
    """

    package = "comet_ml"
    extra = "comet"

    def __init__(self, prefix: str = "", *, experiment: Any = None, **settings: Any) -> None:
        """Choose what to log and where.

        Args:
            prefix: Put before the names, with one slash between.
            experiment: A Comet experiment; None is the running one.
            **settings: ``stats``, ``whole_run``, ``by_rank`` and ``strict``, as of every tracker's exporter.
        """
        super().__init__(prefix, **settings)
        self._experiment = experiment

    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        experiment = self._experiment or self._library.get_running_experiment()
        if experiment is None:
            raise ExportError("no Comet experiment is running; call comet_ml.start() first, or pass experiment=")
        metrics = self._metrics(snapshot)
        if metrics:
            experiment.log_metrics(distinct(metrics, utf8_name), step=step)


class TrackioExporter(TrackerExporter):
    """Log each snapshot to a Trackio run, as a row.

    Keys are ``prefix/CPU/BATCH`` for the mean, in seconds, and ``prefix/CPU/BATCH/p95`` and so on for other statistics.
    A row has the step that ``export`` is given, or the next number. Trackio's own thread writes or sends it.

    The exporter starts no run; without one it warns once.
    """

    package = "trackio"

    def __init__(self, prefix: str = "", *, run: Any = None, **settings: Any) -> None:
        """Choose what to log and where.

        Args:
            prefix: Put before the keys, with one slash between.
            run: What ``trackio.init`` returned; None is the run of the exporting thread.
            **settings: ``stats``, ``whole_run``, ``by_rank`` and ``strict``, as of every tracker's exporter.
        """
        super().__init__(prefix, **settings)
        self._run = run
        self._noted: Any = None

    def note_destination(self) -> None:
        self._noted = self._active()

    def _active(self) -> Any:
        return self._run or self._library.context_vars.current_run.get() or self._noted

    def _export(self, snapshot: Snapshot, step: int | None) -> None:
        run = self._active()
        if run is None:
            raise ExportError("no Trackio run is active; call trackio.init() first, or pass run=")
        metrics = self._metrics(snapshot)
        if metrics:
            run.log(distinct(metrics, utf8_name), step=self._number(id(run), step))
