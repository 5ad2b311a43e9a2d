"""The table of steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing.runs._engine import where

if TYPE_CHECKING:
    from deep500_timing.runs._engine import Relation

COLUMNS = {
    "rank": "int32",
    "session": "int32",
    "step": "int64",
    "start_ns": "int64",
    "unix_ns": "int64",
    "dur_ns": "int64",
    "batches": "int64",
}
# A step is its BATCHes. For ranks and sessions without any BATCH it lasts from its mark to the next one.
_STEPS = """
with batches as (
    select rank, session, step, min(start_ns) as start_ns, min(unix_ns) as unix_ns,
        max(start_ns + dur_ns) - min(start_ns) as dur_ns, cast(count(*) as bigint) as batches
    from intervals{where} and region = 'BATCH' and device = 'CPU' and step is not null
    group by rank, session, step),
marked as (
    select rank, session, step, time_ns as start_ns, unix_ns,
        lead(time_ns) over (partition by rank, session order by time_ns, step) - time_ns as dur_ns,
        cast(0 as bigint) as batches
    from marks{where})
select * from batches
union all
select m.* from marked m left join (select distinct rank, session from batches) b
    on m.rank = b.rank and m.session = b.session where b.rank is null
order by rank, session, start_ns, step"""


def steps_of(run: Any, rank: int | None, session: int | None) -> Relation:
    """The steps by rank, session and start."""
    condition = where(rank=rank, session=session) or " where true"
    found: Relation = run.sql(_STEPS.format(where=condition))
    return found
