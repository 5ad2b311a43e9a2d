"""Merges the messages of thousands of ranks, hundreds at a time, by numpy."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.time_type import TimeType
from deep500_timing._distributed.gathered import OF_EACH_RANK, Gathered, GatheredRegion, over_ranks
from deep500_timing._distributed.packed import bin_error, decode, open_message, spread_to_finest
from deep500_timing._recording.intervals import BIN_COUNT
from deep500_timing._summary.distribution import Distribution
from deep500_timing._summary.histogram import pack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from deep500_timing._distributed.packed import Decoded, Opened

MAGIC = b"D5PM"
"""What a message of several ranks begins with."""
VERSION = 1
_TOGETHER = 256
"""Messages that are read at a time: their bins fit into a processor's cache."""
_ORDER = {member.name: position for position, member in enumerate(TimeType)}
_LOW = (1 << 32) - 1
_EACH = ("count", *OF_EACH_RANK)

Key = tuple[str, str]


@dataclass(slots=True)
class _Region:
    """What all ranks together have of one region."""

    count: int = 0
    total_ns: int = 0
    min_ns: int = 0
    max_ns: int = 0
    m2_ns2: float = 0.0
    skipped: int = 0
    level: int = 0
    counters: dict[str, int] = field(default_factory=dict)

    def add(self, count: int, total_ns: int, min_ns: int, max_ns: int, m2_ns2: float) -> None:
        """Chan, Golub, LeVeque (1979): the moments of both."""
        if count == 0:
            return
        if self.count == 0:
            self.min_ns, self.max_ns = min_ns, max_ns
        else:
            delta = total_ns / count - self.total_ns / self.count
            self.m2_ns2 += delta * delta * self.count * count / (self.count + count)
        self.count += count
        self.total_ns += total_ns
        self.min_ns, self.max_ns = min(self.min_ns, min_ns), max(self.max_ns, max_ns)
        self.m2_ns2 += m2_ns2

    def add_counters(self, skipped: int, counters: Mapping[str, int]) -> None:
        """Add what is not in the statistics."""
        self.skipped += skipped
        for name, count in counters.items():
            if count:
                self.counters[name] = self.counters.get(name, 0) + count


class Merger:
    """Takes in the messages of ranks, in any order, and gives what they say together.

    One process may take in some thousands; of more, several take in a part each, and one of them what they have made
    of it (:meth:`to_bytes`, :meth:`add_part`). What comes out is the same but for the rounding of the variance.
    """

    def __init__(self) -> None:
        """Know nobody yet."""
        self._places: dict[Key, int] = {}
        self._regions: list[_Region] = []
        self._bins = np.zeros((0, BIN_COUNT), dtype=np.int64)
        self._ranks: list[int] = []
        self._hosts: list[str] = []
        self._times_s: list[float] = []
        # For each of _EACH: rank, region, value.
        self._cells: list[tuple[NDArray[np.int64], NDArray[np.int64], dict[str, NDArray[np.float64]]]] = []
        self.unreadable: dict[int, str] = {}

    @property
    def ranks(self) -> list[int]:
        """The ranks that have been taken in."""
        return self._ranks

    def add(self, messages: Mapping[int, bytes]) -> None:
        """Take in the messages of ranks, by rank. One that cannot be read is noted with its reason.

        It is the caller who says whose a message is: the sender may not know its rank.
        """
        waiting: dict[tuple[bytes, int], list[tuple[int, Opened]]] = {}
        for rank, message in messages.items():
            try:
                if message[:4] == MAGIC:
                    self.add_part(message)
                    continue
                opened = open_message(message)
            except ValueError as error:
                self.unreadable[rank] = str(error)
                continue
            alike = waiting.setdefault((opened.dictionary, opened.regions), [])
            alike.append((rank, opened))
            if len(alike) == _TOGETHER:
                self._add(alike)
                alike.clear()
        for alike in waiting.values():
            self._add(alike)

    def _add(self, alike: list[tuple[int, Opened]]) -> None:
        if not alike:
            return
        try:
            decoded = decode([one for _, one in alike])
            described = json.loads(alike[0][1].dictionary)
            keys = list(zip(described["names"], described["devices"], strict=True))
            counters = described["counters"]
            if len(keys) != alike[0][1].regions or len(counters) != alike[0][1].counters:
                raise ValueError("Reading a packed snapshot: its dictionary is of other regions.")
        except (ValueError, KeyError) as error:
            if len(alike) > 1:
                # One of them spoils it for the others.
                for one in alike:
                    self._add([one])
            else:
                self.unreadable[alike[0][0]] = str(error)
            return
        ranks = np.array([rank for rank, _ in alike], dtype=np.int64)
        self._ranks += ranks.tolist()
        self._hosts += [one.host for _, one in alike]
        self._times_s += [one.unix_time_s for _, one in alike]
        places = np.array([self._place_of(key) for key in keys], dtype=np.int64)
        self._add_bins(decoded, places)
        self._add_records(decoded.records, places, counters)
        self._add_cells(decoded.records, places, ranks)

    def _place_of(self, key: Key) -> int:
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self._regions)
            self._regions.append(_Region())
            if len(self._bins) <= place:
                more = np.zeros((max(len(self._bins), 8), BIN_COUNT), dtype=np.int64)
                self._bins = np.concatenate((self._bins, more))
        return place

    def _add_bins(self, decoded: Decoded, places: NDArray[np.int64]) -> None:
        levels = decoded.records["level"].astype(np.int64).ravel()
        bins, used = decoded.bins, decoded.used
        if levels.any():
            bins = spread_to_finest(bins, np.repeat(levels, used))
        cells = bins + np.repeat(np.tile(places * BIN_COUNT, len(decoded.records)), used)
        size = len(self._regions) * BIN_COUNT
        # As doubles, which bincount adds; exact below 2**53.
        if int(decoded.counts.max(initial=0)) < 1 << 40:
            added = np.bincount(cells, weights=decoded.counts, minlength=size).astype(np.int64)
        else:
            added = np.zeros(size, dtype=np.int64)
            np.add.at(added, cells, decoded.counts)
        self._bins[: len(self._regions)] += added.reshape(-1, BIN_COUNT)

    def _add_records(self, records: NDArray[Any], places: NDArray[np.int64], counters: list[str]) -> None:
        count, total = records["count"], records["total_ns"]
        has = count > 0
        mean = np.divide(total, count, out=np.zeros(count.shape), where=has)
        # In two halves: the sum over ranks may exceed 64 bits.
        totals = [
            (int(high) << 32) + int(low) for high, low in zip((total >> 32).sum(0), (total & _LOW).sum(0), strict=True)
        ]
        counts = count.sum(0).tolist()
        lows = np.where(has, records["min_ns"], np.iinfo(np.int64).max).min(0).tolist()
        highs = records["max_ns"].max(0).tolist()
        common = np.array([all_ / n if n else 0.0 for all_, n in zip(totals, counts, strict=True)])
        m2 = records["m2_ns2"].astype(np.float64).sum(0) + (count * (mean - common) ** 2).sum(0)
        levels = np.where(has, records["level"], 0).max(0).tolist()
        skipped = records["skipped"].sum(0, dtype=np.int64).tolist()
        more = {
            name: records[f"counter_{place}"].sum(0, dtype=np.int64).tolist() for place, name in enumerate(counters)
        }
        for i, place in enumerate(places.tolist()):
            region = self._regions[place]
            region.add(counts[i], totals[i], lows[i], highs[i], float(m2[i]))
            region.add_counters(skipped[i], {name: column[i] for name, column in more.items()})
            region.level = max(region.level, levels[i])

    def _add_cells(self, records: NDArray[Any], places: NDArray[np.int64], ranks: NDArray[np.int64]) -> None:
        has = records["count"] > 0
        row, column = np.nonzero(has)
        count = records["count"][has].astype(np.float64)
        values = {
            "count": count,
            "mean": records["total_ns"][has] / count / 1e9,
            "median": records["median_ns"][has] / 1e9,
            "p95": records["p95_ns"][has] / 1e9,
        }
        self._cells.append((ranks[row], places[column], values))

    # --- parts ------------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """All that was taken in, as a message of its own; what is known of each rank as 32-bit floats."""
        keys = list(self._places)
        head = {
            "keys": keys,
            "regions": [
                [r.count, r.total_ns, r.min_ns, r.max_ns, r.m2_ns2, r.skipped, r.level, r.counters]
                for r in self._regions
            ],
            "hosts": self._hosts,
            "unreadable": self.unreadable,
        }
        place, bin_ = np.nonzero(self._bins[: len(keys)])
        rank, region, values = self._columns()
        arrays: list[NDArray[Any]] = [
            np.array(self._ranks, dtype="<i8"),
            np.array(self._times_s, dtype="<f8"),
            place.astype("<i4"),
            bin_.astype("<i4"),
            self._bins[place, bin_].astype("<i8"),
            rank.astype("<i4"),
            region.astype("<i4"),
            *(values[name].astype("<f4") for name in _EACH),
        ]
        head["lengths"] = [len(array) for array in arrays]
        text = json.dumps(head, separators=(",", ":")).encode()
        planes = (
            array.view(np.uint8).reshape(len(array), array.itemsize).T.tobytes() if len(array) else b""
            for array in arrays
        )
        body = len(text).to_bytes(4, "little") + text + b"".join(planes)
        return MAGIC + bytes((VERSION,)) + zlib.compress(body, 3)

    def add_part(self, part: bytes) -> None:
        """Take in what another has made of several ranks.

        Raises:
            ValueError: It is no such message, or of a later version, or damaged.
        """
        if part[:5] != MAGIC + bytes((VERSION,)):
            raise ValueError(f"Reading several ranks: it begins with {bytes(part[:5])!r}.")
        kinds = ("<i8", "<f8", "<i4", "<i4", "<i8", "<i4", "<i4", *["<f4"] * len(_EACH))
        try:
            body = zlib.decompress(memoryview(part)[5:])
            at = 4 + int.from_bytes(body[:4], "little")
            head = json.loads(body[4:at])
            arrays = []
            for kind, length in zip(kinds, head["lengths"], strict=True):
                size = np.dtype(kind).itemsize
                planes = np.frombuffer(body, np.uint8, size * length, at).reshape(size, length)
                arrays.append(np.ascontiguousarray(planes.T).view(kind).reshape(length))
                at += size * length
        except (zlib.error, ValueError, KeyError) as error:
            raise ValueError(f"Reading several ranks: it is damaged: {error}.") from error
        ranks, times, place, bin_, counts, rank, region = arrays[:7]
        places = np.array([self._place_of((name, device)) for name, device in head["keys"]], dtype=np.int64)
        self._ranks += ranks.tolist()
        self._times_s += times.tolist()
        self._hosts += head["hosts"]
        self.unreadable |= {int(key): why for key, why in head["unreadable"].items()}
        if len(places):
            np.add.at(self._bins, (places[place], bin_), counts)
            values = {name: array.astype(np.float64) for name, array in zip(_EACH, arrays[7:], strict=True)}
            self._cells.append((rank.astype(np.int64), places[region], values))
        for where, row in zip(places.tolist(), head["regions"], strict=True):
            own = self._regions[where]
            own.add(*row[:5])
            own.add_counters(row[5], row[7])
            own.level = max(own.level, row[6])

    def _columns(self) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[str, NDArray[np.float64]]]:
        nothing = np.zeros(0, dtype=np.int64)
        rank = np.concatenate([nothing, *(cell[0] for cell in self._cells)])
        region = np.concatenate([nothing, *(cell[1] for cell in self._cells)])
        values = {
            name: np.concatenate([nothing.astype(np.float64), *(cell[2][name] for cell in self._cells)])
            for name in _EACH
        }
        return rank, region, values

    # --- what comes out ---------------------------------------------------------------------------------------------

    def gathered(self, asked: Sequence[int], *, fault: str | None = None, step: int | None = None) -> Gathered:
        """What the ranks say together.

        Args:
            asked: Which there are; those that were not taken in are missing unless there is a fault.
            fault: What kept the others from being asked.
            step: To be passed on.
        """
        ranks = np.array(sorted(self._ranks), dtype=np.int64)
        order = np.argsort(np.array(self._ranks, dtype=np.int64), kind="stable")
        keys = [key for key in self._places if self._regions[self._places[key]].count]
        keys.sort(key=lambda key: (_ORDER.get(key[0], len(_ORDER)), *key))
        column_of = np.full(max(len(self._regions), 1), -1, dtype=np.int64)
        column_of[[self._places[key] for key in keys]] = np.arange(len(keys))
        rank, region, cells = self._columns()
        row, column = np.searchsorted(ranks, rank), column_of[region] if len(region) else region
        values = {}
        for name in _EACH:
            values[name] = np.full((len(ranks), len(keys)), np.nan)
            values[name][row, column] = cells[name]
        regions = []
        for place, key in enumerate(keys):
            columns = {name: over_ranks(values[name][:, place], ranks) for name in OF_EACH_RANK}
            regions.append(self._region(key, {name: one for name, one in columns.items() if one is not None}))
        there = set(self._ranks)
        latest = max(self._times_s, default=0.0)
        return Gathered(
            world_size=len(asked),
            ranks=tuple(ranks.tolist()),
            missing=() if fault else tuple(rank for rank in asked if rank not in there),
            fault=fault,
            regions=tuple(regions),
            hosts=tuple(self._hosts[int(place)] for place in order),
            unix_time_s=latest,
            spread_s=latest - min(self._times_s, default=0.0),
            unreadable=dict(sorted(self.unreadable.items())),
            step=step,
            values=values,
        )

    def _region(self, key: Key, over: dict[str, Any]) -> GatheredRegion:
        from dataclasses import replace

        place = self._places[key]
        own = self._regions[place]
        counts = self._bins[place]
        used = np.flatnonzero(counts)
        bins = pack(used.tolist(), counts[used].tolist())
        distribution = Distribution(own.count, own.total_ns, own.min_ns, own.max_ns, own.m2_ns2, bins)
        stats = distribution.stats(skipped=own.skipped)
        assert stats is not None
        return GatheredRegion(
            name=key[0],
            device=key[1],
            ranks=over["mean"].ranks,
            stats=replace(stats, quantile_error=bin_error(own.level)),
            distribution=distribution,
            over_ranks=over,
            counters=dict(own.counters),
        )
