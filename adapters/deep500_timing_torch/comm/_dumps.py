"""Dumps of PyTorch's flight recorder: the operation that a job hangs in, the rank that did not join, the late rank.

PyTorch's watchdog writes one file per rank when an operation times out (``TORCH_FR_DUMP_TEMP_FILE`` is the beginning of
its path). ``torch._C._distributed_c10d._dump_fr_trace()`` returns the same bytes, for gloo as well.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deep500_timing.adapters import format_bytes
from deep500_timing_torch.comm._device import COALESCED
from deep500_timing_torch.comm._ops import OPS
from deep500_timing_torch.comm._straggler import Comparison, compare, straggler_lines

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike

_RANK = re.compile(r"(\d+)(\.(json|pkl|pickle|bin))?$")
_NAMES = {"_all_gather_base": "all_gather_into_tensor", "_reduce_scatter_base": "reduce_scatter_tensor"}
"""Operations that the recorder calls by another name."""
_ITEM_BYTES = {"Double": 8, "Long": 8, "ComplexFloat": 8, "ComplexDouble": 16, "Float": 4, "Int": 4, "ComplexHalf": 4}
_ITEM_BYTES |= {"Half": 2, "BFloat16": 2, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1}

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Hang:
    """An operation that has not finished, or that a rank did not join."""

    op: str
    """The operation, with its size and its number in the group."""
    group: str
    joined: tuple[int, ...]
    unfinished: tuple[int, ...]
    """Those of them where it has neither finished nor failed."""
    missing: dict[int, str]
    """For each rank of the group that has not called it, the last thing that it did."""
    unknown: tuple[int, ...]
    """Ranks of the group without a dump, or with one that is too short to tell."""

    def __str__(self) -> str:
        text = f"{self.op} of group {self.group}: called by {_ranks(self.joined)}"
        text += f", not by {_ranks(self.missing)}" if self.missing else ""
        text += f", unfinished on {_ranks(self.unfinished)}." if self.unfinished else ", where it has ended."
        lines = [text, *(f"  Rank {rank} {did}." for rank, did in self.missing.items())]
        if self.unknown:
            lines.append(f"  It is unknown whether {_ranks(self.unknown)} called it: no dump tells.")
        elif not self.missing and len(self.joined) > 1:
            lines.append("  Every rank of the group has called it.")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class FlightSummary:
    """The dumps of all ranks, compared. As text, it is a report."""

    ranks: tuple[int, ...]
    hangs: list[Hang]
    """Of each group the first operation that a rank did not join, else the first unfinished one."""
    mismatches: list[str]
    """For each group, its first operation that is not the same one on every rank."""
    comparison: Comparison
    """How long the ranks waited for each other in the operations that all have joined."""
    by_arrival: bool
    """Whether the waits are differences between the times of the calls, since not all operations have a duration."""

    def __str__(self) -> str:
        lines = [f"Flight recorder of {_ranks(self.ranks)}"]
        lines += map(str, self.hangs)
        lines += self.mismatches
        if not (self.hangs or self.mismatches):
            lines.append("Every operation has been called by each rank of its group, and has finished.")
        found = self.comparison
        if found.rows:
            lines += straggler_lines(found.rows, found.lateness)
            if self.by_arrival:
                lines.append("Waits are from the times of the calls; on several hosts, their clocks must agree.")
        return "\n".join(lines)


def read_flight_recorder(folder: str | PathLike[str]) -> FlightSummary:
    """Read a folder of flight recorder dumps: which rank did not join which operation, and which rank is late.

    Args:
        folder: Holds one file per rank, as PyTorch writes it: a pickle or JSON. Its name ends with the rank.

    Raises:
        FileNotFoundError: The folder has no dump.
        ValueError: A file is no dump. A pickle may hold plain data only.
    """
    dumps = {
        int(found[1]): _read(path) for path in sorted(Path(folder).iterdir()) if (found := _RANK.search(path.name))
    }
    if not dumps:
        raise FileNotFoundError(
            f"Reading flight recorder dumps in {str(folder)!r}: no file's name ends with a rank, such as trace_0. "
            "Set TORCH_FR_DUMP_TEMP_FILE=FOLDER/trace_ and TORCH_FR_BUFFER_SIZE=2000 for the job."
        )
    groups = _groups_of(dumps)
    entries = {rank: dump["entries"] for rank, dump in dumps.items()}
    hangs = [hang for group in groups if (hang := group.hang(entries)) is not None]
    hangs += [
        Hang(_text_of(entry), entry["group"].description, (rank,), (rank,), {}, ())
        for rank, called in entries.items()
        for entry in called
        if entry.get("is_p2p") and not _is_done(entry)
    ]
    hangs.sort(key=lambda hang: not hang.missing)
    mismatches = [text for group in groups if (text := group.mismatch()) is not None]
    return FlightSummary(tuple(dumps), hangs, mismatches, *_compared(groups))


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds {module}.{name}, and a dump is plain data")


def _read(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    try:
        found = json.loads(data) if data[:1] == b"{" else _Plain(io.BytesIO(data)).load()
        found["entries"] = [dict(entry) for entry in found["entries"]]
    except Exception as error:
        raise ValueError(f"Reading the flight recorder dump {str(path)!r}: {error}. Remove the file.") from error
    return dict(found)


class _Group:
    """One process group: its collectives by number and rank."""

    def __init__(self, name: str, description: str, ranks: str) -> None:
        self.name = name
        self.description = name if description in ("", "undefined") else description
        self.members: list[int] = json.loads(ranks) if ranks else []
        self.calls: dict[int, dict[int, Entry]] = defaultdict(dict)
        # NCCL launches the operations of a coalescing block at its end, behind their own events.
        self.blocks: set[tuple[int, int]] = set()

    @property
    def callers(self) -> list[int]:
        return sorted({rank for calls in self.calls.values() for rank in calls})

    def _newest(self, rank: int, entries: list[Entry] | None) -> int | None:
        # The number of the rank's newest operation in the group; None if it is unknown.
        if entries is None:
            return None
        own = (number for number, calls in self.calls.items() if rank in calls)
        # The ring has room for so many entries, and the first ones may have been overwritten.
        return max(own, default=None if entries and entries[0].get("record_id") != 0 else 0)

    def hang(self, entries: dict[int, list[Entry]]) -> Hang | None:
        newest = {rank: self._newest(rank, entries.get(rank)) for rank in self.members}
        unknown = tuple(rank for rank, last in newest.items() if last is None)
        found = None
        for number, calls in sorted(self.calls.items()):
            first = next(iter(calls.values()))
            unfinished = tuple(rank for rank, entry in calls.items() if not _is_done(entry))
            missing = [rank for rank, last in newest.items() if last is not None and last < number]
            # A broadcast may have finished on a rank before the others call it; an all-reduce has failed then.
            op = OPS.get(_name_of(first))
            if unfinished or (missing and op is not None and op.synchronizes):
                did = {rank: _did(entries[rank]) for rank in missing}
                hang = Hang(_text_of(first), self.description, tuple(calls), unfinished, did, unknown)
                found = found or hang
                if missing:  # Where those ranks are says why earlier ones are unfinished.
                    return hang
        return found

    def mismatch(self) -> str | None:
        for _, calls in sorted(self.calls.items()):
            ranks: dict[str, list[int]] = defaultdict(list)
            for rank, entry in calls.items():
                ranks[_text_of(entry, sized=_name_of(entry) == "all_reduce")].append(rank)
            if len(ranks) > 1:
                several = ", ".join(f"{call} on {_ranks(callers)}" for call, callers in ranks.items())
                return f"The ranks of group {self.description} call different operations: {several}."
        return None


def _groups_of(dumps: dict[int, dict[str, Any]]) -> list[_Group]:
    # Different groups may share a name, so their ranks are part of the key.
    groups: dict[tuple[str, str], _Group] = {}
    for rank, dump in dumps.items():
        for entry in dump["entries"]:
            name, description = entry["process_group"]
            # gloo leaves the configuration empty.
            ranks = str(dump.get("pg_config", {}).get(name, {}).get("ranks", ""))
            group = entry["group"] = groups.setdefault((name, ranks), _Group(name, description, ranks))
            if _name_of(entry) == COALESCED:
                group.blocks.add((rank, entry["op_id"]))
            if not entry.get("is_p2p"):
                group.calls[entry["collective_seq_id"]][rank] = entry
    for group in groups.values():
        group.members = group.members or (list(dumps) if group.description == "default_pg" else group.callers)
    return list(groups.values())


def _compared(groups: list[_Group]) -> tuple[Comparison, bool]:
    called = [entry for group in groups for calls in group.calls.values() for entry in calls.values()]
    by_arrival = not any(entry.get("duration_ms") for entry in called)
    reports: dict[int, dict[str, list[tuple[int, str, int, int]]]] = defaultdict(dict)
    members = {}
    for group in groups:
        callers = group.callers
        ranks = [rank for rank in group.members if rank in callers]
        members[name := f"{group.name} {group.description} {ranks}"] = ranks
        for number, calls in sorted(group.calls.items()):
            in_block = any((rank, call["op_id"]) in group.blocks for rank, call in calls.items())
            if in_block or len(calls) < len(ranks) or not all(map(_is_done, calls.values())):
                continue
            if by_arrival:
                latest_ns = max(call["time_created_ns"] for call in calls.values())
                times = {rank: latest_ns - call["time_created_ns"] for rank, call in calls.items()}
            elif all(call.get("duration_ms") for call in calls.values()):
                times = {rank: round(call["duration_ms"] * 1e6) for rank, call in calls.items()}
            else:
                continue
            for rank, time_ns in times.items():
                row = (number, _name_of(calls[rank]), _bytes_of(calls[rank]) or 0, time_ns)
                reports[rank].setdefault(name, []).append(row)
    found = compare(reports, members, {name for name, op in OPS.items() if op.synchronizes})
    if by_arrival:
        found.rows = [replace(row, transfer_s=None) for row in found.rows]
    return found, by_arrival


def _did(entries: list[Entry]) -> str:
    if not entries:
        return "has called no operation"
    for entry in entries:
        if not _is_done(entry):
            return f"is in {_text_of(entry)} of group {entry['group'].description}"
    last = entries[-1]
    return f"has ended {_text_of(last)} of group {last['group'].description}, and called none since"


def _is_done(entry: Entry) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _name_of(entry: Entry) -> str:
    name: str = entry["profiling_name"]
    name = name if name == COALESCED else name.partition(":")[2] or name
    return _NAMES.get(name, name)


def _text_of(entry: Entry, *, sized: bool = True) -> str:
    size = _bytes_of(entry) if sized else None
    number = "" if entry.get("is_p2p") else f" {entry['collective_seq_id']}"
    return f"{_name_of(entry)}{number}" + (f" ({format_bytes(size)})" if size else "")


def _bytes_of(entry: Entry) -> int | None:
    # The whole message, as nccl-tests counts it: the larger one of a share and all shares.
    sizes = []
    for side in ("input", "output"):
        items = [_ITEM_BYTES.get(name) or ("Float8" in name) for name in entry.get(f"{side}_dtypes", ())]
        if not all(items):
            return None
        shapes = entry.get(f"{side}_sizes", ())
        sizes.append(sum(math.prod(shape) * item for shape, item in zip(shapes, items, strict=False)))
    return max(sizes) or None


def _ranks(ranks: Iterable[int]) -> str:
    # Ranges, since a job may have thousands.
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    several = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'' if len(spans) == 1 and spans[0][0] == spans[0][1] else 's'} {several}"
