"""goodput: restarts cost much of the wall clock."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from deep500_timing._summary.text import safe_name
from deep500_timing._views.findings import _thresholds as at_least
from deep500_timing._views.findings._evidence import percent, took
from deep500_timing._views.findings._finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deep500_timing._views.findings._evidence import Evidence

_RESTARTS = ("lost", "startup", "down", "queue")


def low_goodput(evidence: Evidence) -> Iterator[Finding]:
    """Lost work, starts and down time of a job that was restarted take a large part of the wall clock."""
    if evidence.run is None or evidence.session is not None or evidence.about.sessions < 2:
        return
    account = evidence.run.goodput()
    cost_s = account.seconds(*_RESTARTS)
    if account.starts < 2 or not account.wall_s or cost_s < at_least.RESTART_SHARE * account.wall_s:
        return
    parts = sorted(
        (bucket for bucket in account.buckets if bucket.name in _RESTARTS), key=lambda b: -(b.seconds or 0.0)
    )
    named = ", ".join(f"{bucket.title} {percent(bucket.share)}" for bucket in parts if bucket.share)
    yield Finding(
        "goodput",
        f"Goodput is {percent(account.goodput)} of {took(account.wall_s)} with {account.starts} starts",
        why=named,
        command=f"deep500-timing goodput {shlex.quote(safe_name(evidence.about.folder))}",
        cost_s=cost_s,
        anchor="goodput",
    )
