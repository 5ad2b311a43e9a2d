"""Stragglers in a run, in gathered reports, or in plain steps: one judgement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing._distributed.late import Steps, judge
from deep500_timing._distributed.verdict import Stragglers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing._distributed.gathered import Gathered
    from deep500_timing.runs import Run


def find_stragglers(source: Run | Sequence[Gathered] | Steps, *, session: int | None = None) -> Stragglers:
    """Which rank is late, or which machine, and why; or that no rank is, or that the data do not say.

    Args:
        source: A run, with or without recorded collectives; or the reports of a training that goes on, each of what
            came since the one before (``LiveReport``, in order); or steps. Steps without regions are operations of
            which nothing else is known.
        session: Of a run, which start of its ranks; the last that all have if None.
    """
    from deep500_timing._distributed.late_of_reports import NoWindowsError, windows_of
    from deep500_timing._distributed.late_of_run import NoStepsError, steps_of_run

    try:
        if isinstance(source, Steps):
            steps = source
        elif hasattr(source, "intervals"):
            run: Any = source
            steps = steps_of_run(run, session=session)
        else:
            reports: Any = source
            steps = windows_of(reports)
    except (NoStepsError, NoWindowsError) as error:
        return Stragglers("unknown", reason=str(error))
    return judge(steps)
