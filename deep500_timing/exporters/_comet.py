"""Times in Comet."""

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
