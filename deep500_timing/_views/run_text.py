"""A run at one glance, as plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing._summary.text import UNKNOWN, format_time, pad, safe_name, width_of

if TYPE_CHECKING:
    from deep500_timing.runs import Run

_GAP = "  "
_FEW = 20
"""A 95th percentile of fewer is a dash."""


def overview(run: Run, *, rank: int | None = None, session: int | None = None) -> str:
    """What a run is, and the tree of its regions on one rank.

    Args:
        run: The run.
        rank: Whose times to show; the lowest rank's if None.
        session: Of which start of the run; all if None.

    Raises:
        LookupError: The run has no such rank.
    """
    logs = run.table("logs").rows()
    ranks = sorted({log["rank"] for log in logs})
    shown: int = ranks[0] if rank is None else rank
    if shown not in ranks:
        raise LookupError(f"Showing rank {rank}: the run has ranks {_ranges(ranks)}.")
    steps = run.sql("select count(distinct step) as n from intervals where region = 'BATCH'").rows()[0]["n"]
    regions = run.regions(rank=shown, session=session).rows()
    lines = [" · ".join(_title(run, logs, ranks, steps)), ""]
    lines += _tree(regions)
    lines += ["", *_notes(logs, ranks, shown)]
    return "\n".join(lines) + "\n"


def _title(run: Run, logs: list[dict[str, Any]], ranks: list[int], steps: int) -> list[str]:
    name = run.folders[0].rstrip("/").rsplit("/", 1)[-1]
    hosts = {log["host"] for log in logs if log["host"]}
    parts = [safe_name(name), f"{_count(len(ranks), 'rank')} on {_count(len(hosts) or 1, 'host')}"]
    if steps:
        parts.append(_count(steps, "step"))
    times = [(log["first_unix_ns"], log["last_unix_ns"]) for log in logs if log["first_unix_ns"] is not None]
    if times:
        parts.append(format_time((max(last for _, last in times) - min(first for first, _ in times)) / 1e9))
    sessions = {log["session"] for log in logs}
    if len(sessions) > 1:
        parts.append(f"{len(sessions)} sessions")
    parts.append("complete" if all(log["end"] for log in logs) else "not ended: killed, or running")
    return parts


def _tree(regions: list[dict[str, Any]]) -> list[str]:
    on_host = [row for row in regions if row["device"] == "CPU"]
    on_device = {row["path"]: row for row in regions if row["device"] != "CPU"}
    headers = ["region", "total", "share", "count", "median", "p95"]
    if on_device:
        headers += ["GPU total", "share"]
    table = [headers]
    for label, row in _lines(on_host, None, ""):
        cells = [label, _time(row["total_ns"]), _share(row["share"]), str(row["count"]) if row["count"] else ""]
        few = (row["count"] or 0) < _FEW
        cells += ["" if row["count"] is None else _time(row["median_ns"])]
        cells += ["" if row["count"] is None else UNKNOWN if few else _time(row["p95_ns"])]
        if on_device:
            other = on_device.get(row["path"])
            cells += ["", ""] if other is None else [_time(other["total_ns"]), _share(other["share"])]
        table.append(cells)
    if len(table) == 1:
        return ["Nothing is recorded yet."]
    widths = [max(width_of(row[column]) for row in table) for column in range(len(headers))]
    return [
        _GAP.join(
            pad(cell, width, right=place > 0) for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def _lines(rows: list[dict[str, Any]], parent: str | None, indent: str) -> list[tuple[str, dict[str, Any]]]:
    children = [row for row in rows if row["parent"] == parent]
    above = next((row for row in rows if row["path"] == parent), None)
    rest = _rest_of(above)
    lines = []
    for place, row in enumerate([*children, *rest]):
        is_last = place == len(children) + len(rest) - 1
        branch = "" if parent is None else "└─ " if is_last else "├─ "
        lines.append(
            (indent + branch + safe_name(row["region"]) + (" (overlaps)" if row.get("overlap_ns") else ""), row)
        )
        if row["path"] is not None:
            deeper = "" if parent is None else "   " if is_last else "│  "
            lines += _lines(rows, row["path"], indent + deeper)
    return lines


def _rest_of(row: dict[str, Any] | None) -> list[dict[str, Any]]:
    if row is None or not row["rest_ns"] or not row["total_ns"]:
        return []
    share = row["rest_ns"] / row["total_ns"]
    return [{"region": "the rest", "path": None, "total_ns": row["rest_ns"], "share": share, "count": None}]


def _notes(logs: list[dict[str, Any]], ranks: list[int], rank: int) -> list[str]:
    lost = []
    for name, column in (
        ("dropped", "dropped"),
        ("bytes damaged", "damaged_bytes"),
        ("frames missing", "missing_frames"),
    ):
        number = sum(log[column] or 0 for log in logs)
        if number:
            lost.append(f"{number} {name}")
    kept = "Nothing dropped, nothing damaged." if not lost else f"Lost: {', '.join(lost)}."
    more = (
        f" The run has ranks {_ranges(ranks)}: --rank {next(r for r in ranks if r != rank)}." if len(ranks) > 1 else ""
    )
    return [f"Times of rank {rank}. {kept}{more}"]


def _ranges(ranks: list[int]) -> str:
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:10]))
    return f"{shown} and {len(ranks) - 10} more" if len(ranks) > 10 else shown


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _time(nanoseconds: float | None) -> str:
    return UNKNOWN if nanoseconds is None else format_time(nanoseconds / 1e9)


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}".replace("%", " %")
