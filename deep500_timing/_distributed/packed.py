"""The part of a snapshot that goes to another rank, as a few bytes.

A message is, in this order, little-endian:

- the magic ``D5PK`` and the version, one byte; all that follows is compressed by zlib;
- the head, :data:`HEAD`: which rank of how many, process, times, sizes of what follows;
- the name of the host and the dictionary, in UTF-8. The dictionary is JSON: ``names``, ``devices``, ``counters``. Ranks
  that time the same regions send the same one, so that whoever reads many parses it once;
- a record for each region (:data:`FIELDS` and a 32-bit number for each counter), transposed to planes: byte 0 of every
  region's record, then byte 1, and so on;
- the bins of all regions that are not empty, ascending in each region: first how far each lies from the one before (a
  region's first from 0), 16 bits, then its count, in as many bytes as the largest needs; both in planes as well.

Bins are those of the project's histogram, a region's merged ``2 ** level`` at a time: so many neighbours are one, which
merges exactly with finer ones. The sender chooses the levels so that the message stays within its limit, the regions
with the most bins first. Count, total and extremes are exact at any level; the sender's own median and p95 are sent
ready, from its times themselves where it kept them.
"""

from __future__ import annotations

import json
import zlib
from functools import lru_cache
from struct import Struct
from struct import error as StructError  # noqa: N812 (it is an exception)
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deep500_timing._recording.intervals import BIN_COUNT
from deep500_timing._summary.anchor import ClockAnchor
from deep500_timing._summary.histogram import HISTOGRAM_ERROR
from deep500_timing._summary.snapshot import COUNTERS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from deep500_timing._summary.snapshot import RegionTimes, Snapshot

MAGIC = b"D5PK"
VERSION = 1
LIMIT_BYTES = 2500
"""What a message of up to :data:`LIMIT_REGIONS` regions takes at most; one of more takes its share more."""
LIMIT_REGIONS = 30
COARSEST = 6
"""At this level a power of two is one bin."""
FIELDS = (
    ("count", "<i8"),
    ("total_ns", "<i8"),
    ("min_ns", "<i8"),
    ("max_ns", "<i8"),
    ("m2_ns2", "<f4"),
    ("median_ns", "<f4"),
    ("p95_ns", "<f4"),
    ("skipped", "<u4"),
    ("used", "<u2"),
    ("level", "u1"),
)
"""What is sent of each region; 32-bit floats are right to 6e-8 of their value. ``used`` is its number of bins."""
HEAD = Struct("<iiqddqqqIHHBI")
"""Rank, world size (-1: unknown), pid, Unix time, that of the earlier snapshot (NaN: none), anchor (host's clock, Unix
time, width in ns; -1: none); regions, bytes of the host's name, counters, bytes of a count, bytes of the dictionary."""
_BINS = Struct("<I")
_MOST = 0xFFFFFFFF


def bin_error(level: int) -> float:
    """The relative error of a quantile that is read from bins of a level.

    A coarse bin's times are taken to lie in the fine bin above its middle: half a coarse and half a fine bin from
    where they may be, and a power of two has 64 fine ones.
    """
    return ((1 << level) + 1) / 128 if level else HISTOGRAM_ERROR


class Sent(NamedTuple):
    """One region as it is sent: its fields and its bins."""

    fields: tuple[Any, ...]
    """As :data:`FIELDS` up to ``skipped``."""
    counters: tuple[int, ...]
    bins: NDArray[np.int64]
    counts: NDArray[np.int64]


def pack_snapshot(snapshot: Snapshot, *, limit_bytes: int | None = None) -> bytes:
    """What of a snapshot another rank merges with its own.

    Left out are memory, percentiles but the 95th, and confidence intervals.

    Args:
        snapshot: Of this rank.
        limit_bytes: How long it may get; :data:`LIMIT_BYTES`, and more in proportion above :data:`LIMIT_REGIONS`
            regions, if None. One that cannot be met is missed: bins are merged, nothing is left out.
    """
    regions = [_sent(region) for region in snapshot]
    if limit_bytes is None:
        limit_bytes = LIMIT_BYTES * max(len(regions), LIMIT_REGIONS) // LIMIT_REGIONS
    dictionary = json.dumps(
        {
            "names": [region.name for region in snapshot],
            "devices": [region.device for region in snapshot],
            "counters": list(COUNTERS),
        },
        separators=(",", ":"),
    ).encode()
    coarser = [_coarsened(region) for region in regions]
    most = max((len(levels[0][0]) for levels in coarser), default=0)
    message = _message(snapshot, dictionary, regions, coarser, most)
    if len(message) <= limit_bytes:
        return message
    # The most bins that any region may have so that all fit, by bisection.
    low, high = 1, most
    message = _message(snapshot, dictionary, regions, coarser, low)
    while high - low > max(low // 16, 1):
        middle = (low + high) // 2
        tried = _message(snapshot, dictionary, regions, coarser, middle)
        if len(tried) <= limit_bytes:
            low, message = middle, tried
        else:
            high = middle
    return message


def _sent(region: RegionTimes) -> Sent:
    counters = tuple(min(getattr(region, name), _MOST) for name in COUNTERS)
    own, stats = region.distribution, region.stats
    if own is None or stats is None or own.count == 0:
        nothing = np.zeros(0, dtype=np.int64)
        return Sent((0, 0, 0, 0, 0.0, 0.0, 0.0, 0), counters, nothing, nothing)
    bins, counts = own.used_bins()
    skipped = min(stats.skipped, _MOST)
    fields = (own.count, own.total_ns, own.min_ns, own.max_ns, own.m2_ns2, stats.median * 1e9, stats.p95 * 1e9, skipped)
    return Sent(fields, counters, bins, counts)


def _coarsened(region: Sent) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    # Bins and counts at every level.
    found = [(region.bins, region.counts)]
    for _ in range(COARSEST):
        bins, counts = found[-1]
        wider = bins >> 1
        starts = np.flatnonzero(np.diff(wider, prepend=-1))
        found.append((wider[starts], np.add.reduceat(counts, starts) if len(starts) else counts))
    return found


def _message(
    snapshot: Snapshot,
    dictionary: bytes,
    regions: list[Sent],
    coarser: list[list[tuple[NDArray[np.int64], NDArray[np.int64]]]],
    most: int,
) -> bytes:
    # The message in which no region has more bins than so many, or is at the coarsest level.
    chosen = [next((k for k, (bins, _) in enumerate(found) if len(bins) <= most), COARSEST) for found in coarser]
    records = np.zeros(len(regions), dtype=_record_type(len(COUNTERS)))
    gaps, counts = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for place, (region, level, found) in enumerate(zip(regions, chosen, coarser, strict=True)):
        bins, some = found[level]
        records[place] = (*region.fields, len(bins), level, *region.counters)
        gaps.append(np.diff(bins, prepend=0))
        counts.append(some)
    all_gaps, all_counts = np.concatenate(gaps), np.concatenate(counts)
    width = max((int(all_counts.max(initial=0)).bit_length() + 7) // 8, 1)
    host = snapshot.host.encode("utf-8", "backslashreplace")[:0xFFFF]
    anchor = snapshot.anchor
    head = HEAD.pack(
        -1 if snapshot.rank is None else snapshot.rank,
        -1 if snapshot.world_size is None else snapshot.world_size,
        snapshot.pid,
        snapshot.unix_time_s,
        float("nan") if snapshot.since_unix_time_s is None else snapshot.since_unix_time_s,
        *((-1, -1, -1) if anchor is None else (anchor.host_ns, anchor.unix_ns, anchor.width_ns)),
        len(regions),
        len(host),
        len(COUNTERS),
        width,
        len(dictionary),
    )
    body = (head, host, dictionary, _planes(records), _BINS.pack(len(all_gaps)))
    bytes_ = (_planes(all_gaps.astype("<u2")), _planes(all_counts.astype("<i8"))[: width * len(all_counts)])
    return MAGIC + bytes((VERSION,)) + zlib.compress(b"".join((*body, *bytes_)), 9)


def _planes(values: NDArray[Any]) -> bytes:
    return values.view(np.uint8).reshape(len(values), values.dtype.itemsize).T.tobytes() if len(values) else b""


@lru_cache(maxsize=8)
def _record_type(counters: int) -> np.dtype[Any]:
    return np.dtype([*FIELDS, *((f"counter_{place}", "<u4") for place in range(counters))])


class Opened(NamedTuple):
    """A message whose parts have been found, but not read."""

    rank: int | None
    world_size: int | None
    pid: int
    unix_time_s: float
    since_unix_time_s: float | None
    anchor: ClockAnchor | None
    host: str
    dictionary: bytes
    regions: int
    counters: int
    width: int
    """Bytes of a count."""
    bins: int
    records: bytes
    body: bytes
    gaps_at: int
    """Where in ``body`` the gaps begin; the counts follow."""


def open_message(message: bytes) -> Opened:
    """Find the parts of a message.

    Raises:
        ValueError: It is none, or of a later version, or damaged.
    """
    if message[:4] != MAGIC:
        raise ValueError(f"Reading a packed snapshot: it begins with {bytes(message[:4])!r}, not with {MAGIC!r}.")
    if message[4:5] != bytes((VERSION,)):
        raise ValueError(
            f"Reading a packed snapshot: it is of version {message[4:5].hex() or 'none'}, this reads {VERSION:02x}; "
            "every rank must run the same deep500-timing."
        )
    try:
        body = zlib.decompress(memoryview(message)[5:])
        head = HEAD.unpack_from(body)
        regions, host_length, counters, width, length = head[8:]
        at = HEAD.size + host_length
        host = body[HEAD.size : at].decode()
        dictionary = body[at : at + length]
        at += length
        end = at + regions * _record_type(counters).itemsize
        records = body[at:end]
        bins = _BINS.unpack_from(body, end)[0]
    except (zlib.error, ValueError, StructError) as error:
        raise ValueError(f"Reading a packed snapshot: it is damaged: {error}.") from error
    gaps_at = end + _BINS.size
    if len(body) != gaps_at + (2 + width) * bins:
        raise ValueError("Reading a packed snapshot: it is damaged: its bins are not as many as it says.")
    rank, world_size, pid, unix_time_s, since = head[:5]
    anchor = ClockAnchor(*head[5:8]) if head[7] >= 0 else None
    return Opened(
        None if rank < 0 else rank,
        None if world_size < 0 else world_size,
        pid,
        unix_time_s,
        since if since == since else None,
        anchor,
        host,
        dictionary,
        regions,
        counters,
        width,
        bins,
        records,
        body,
        gaps_at,
    )


class Decoded(NamedTuple):
    """Messages with one dictionary, read together."""

    records: NDArray[Any]
    """Shape ``(messages, regions)``, of the fields and counters."""
    used: NDArray[np.int64]
    """Shape ``(messages * regions,)``: how many of the bins below are of each record, in order."""
    bins: NDArray[np.int64]
    """Shape ``(bins,)``: which bin, at the level of its record."""
    counts: NDArray[np.int64]
    """Shape ``(bins,)``: how many times fell into it."""


def decode(messages: list[Opened]) -> Decoded:
    """Read messages that have the same dictionary, all at once.

    Raises:
        ValueError: The bins of one are not where bins can be.
    """
    regions, counters = messages[0].regions, messages[0].counters
    kind = _record_type(counters)
    planes = np.frombuffer(b"".join(one.records for one in messages), dtype=np.uint8)
    planes = planes.reshape(len(messages), kind.itemsize, regions)
    records = np.ascontiguousarray(planes.transpose(0, 2, 1)).view(kind).reshape(len(messages), regions)
    used = records["used"].astype(np.int64).ravel()
    if used.sum() != sum(one.bins for one in messages):
        raise ValueError("Reading packed snapshots: the regions' bins are not as many as there are.")
    sums = np.cumsum(_joined(messages, 0, 2))
    ends = np.cumsum(used)
    before = np.concatenate((np.zeros(1, dtype=np.int64), sums))[ends - used]
    bins = sums - np.repeat(before, used)
    # They rise within a record, so that its last is its largest.
    last = int(bins[ends[used > 0] - 1].max(initial=0))
    if last >= BIN_COUNT:
        raise ValueError(f"Reading packed snapshots: bin {last} of {BIN_COUNT}.")
    return Decoded(records, used, bins, _joined(messages, 2, max(one.width for one in messages)))


def _joined(messages: list[Opened], first: int, planes: int) -> NDArray[np.int64]:
    # A number of each bin of all messages, of so many planes from a first one on; what a message lacks is 0.
    numbers: NDArray[np.int64] | None = None
    for plane in range(planes):
        parts = []
        for one in messages:
            at = one.gaps_at + (first + plane) * one.bins
            parts.append(one.body[at : at + one.bins] if first + plane < 2 + one.width else bytes(one.bins))
        found = np.frombuffer(b"".join(parts), np.uint8)
        if numbers is None:
            numbers = found.astype(np.int64)
        elif found.any():
            numbers += found.astype(np.int64) << (8 * plane)
    return np.zeros(0, dtype=np.int64) if numbers is None else numbers


def spread_to_finest(bins: NDArray[np.int64], levels: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bin of the finest level in the middle of each coarser one."""
    return (bins << levels) + ((1 << levels) >> 1)
