"""A sweep over message sizes for each collective, in the manner and with the columns of nccl-tests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as plain

from deep500_timing_torch.comm import _timed
from deep500_timing_torch.comm._log import LOG
from deep500_timing_torch.comm._ops import OPS, bandwidths
from deep500_timing_torch.comm._report import summary
from deep500_timing_torch.comm._settings import SETTINGS, configure
from deep500_timing_torch.comm._timed import original_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}
"""Element types by the names that nccl-tests has for them."""
REDOPS = {
    "sum": plain.ReduceOp.SUM,
    "max": plain.ReduceOp.MAX,
    "min": plain.ReduceOp.MIN,
}
_ROOT = 0


@dataclass(frozen=True, slots=True)
class World:
    """Where the sweep runs."""

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype
    redop: str

    def _values(self, shares: int, rank: int) -> list[int]:
        # Small enough for a sum over the ranks to be exact in any type, up to 32 of them or, with ones, 256.
        below = 7 if self.size <= 32 else 2
        return [(rank + 2 * share + share // below) % below for share in range(shares)]

    def _spread(self, values: list[int], count: int) -> torch.Tensor:
        return torch.tensor(values, dtype=self.dtype, device=self.device).repeat_interleave(count)

    def filled(self, shares: int, count: int, rank: int) -> torch.Tensor:
        """The input of a rank: ``count`` elements for each share, which differ by rank and share."""
        return self._spread(self._values(shares, rank), count)

    def reduced(self, shares: int, count: int) -> torch.Tensor:
        """The result of reducing every rank's input."""
        every = zip(*(self._values(shares, rank) for rank in range(self.size)), strict=True)
        reductions: dict[str, Callable[[tuple[int, ...]], Any]] = {"sum": sum, "max": max, "min": min}
        return self._spread([reductions[self.redop](values) for values in every], count)


@dataclass(frozen=True, slots=True)
class Case:
    """One collective at one size: what to run, and what comes out of it."""

    run: Callable[[], Any]
    result: torch.Tensor
    """The tensor that the collective writes."""
    start: Callable[[], object]
    """Puts the inputs into place."""
    expected: torch.Tensor | None
    """The expected result on this rank, None where it is undefined."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One collective."""

    operation: str
    """Its name in the log."""
    make: Callable[[World, int], Case]
    """Builds the case for so many elements per share."""
    shared: bool
    """Whether the message is made of a share for each rank."""
    reduces: bool = False
    rooted: bool = False


def _in_place(operation: str, *, rooted: bool = False) -> Callable[[World, int], Case]:
    def make(world: World, count: int) -> Case:
        data = world.filled(1, count, world.rank)
        options: dict[str, Any] = {"op": REDOPS[world.redop]} if operation != "broadcast" else {}
        if operation == "broadcast":
            options["src"] = _ROOT
        elif rooted:
            options["dst"] = _ROOT
        expected: torch.Tensor | None = world.reduced(1, count)
        if operation == "broadcast":
            expected = world.filled(1, count, _ROOT)
        elif rooted and world.rank != _ROOT:
            expected = None
        function = _timed.OPERATIONS[operation]
        return Case(
            lambda: function(data, **options),
            data,
            lambda: _put(data, world.filled(1, count, world.rank)),
            expected,
        )

    return make


def _put(data: torch.Tensor, values: torch.Tensor) -> None:
    data.copy_(values)


def _all_gather(world: World, count: int) -> Case:
    mine = world.filled(1, count, world.rank)
    out = torch.empty(count * world.size, dtype=world.dtype, device=world.device)
    expected = torch.cat([world.filled(1, count, rank) for rank in range(world.size)])
    return Case(lambda: _timed.OPERATIONS["all_gather_single"](out, mine), out, out.zero_, expected)


def _reduce_scatter(world: World, count: int) -> Case:
    mine = world.filled(world.size, count, world.rank)
    out = torch.empty(count, dtype=world.dtype, device=world.device)
    expected = world.reduced(world.size, count)[world.rank * count : (world.rank + 1) * count]
    redop = REDOPS[world.redop]
    return Case(lambda: _timed.OPERATIONS["reduce_scatter_single"](out, mine, op=redop), out, out.zero_, expected)


def _all_to_all(world: World, count: int) -> Case:
    mine = world.filled(world.size, count, world.rank)
    out = torch.empty_like(mine)
    share = slice(world.rank * count, (world.rank + 1) * count)
    expected = torch.cat([world.filled(world.size, count, rank)[share] for rank in range(world.size)])
    return Case(lambda: _timed.OPERATIONS["all_to_all_single"](out, mine), out, out.zero_, expected)


def _gather(world: World, count: int) -> Case:
    mine = world.filled(1, count, world.rank)
    out = torch.empty(count * world.size, dtype=world.dtype, device=world.device)
    parts = list(out.chunk(world.size)) if world.rank == _ROOT else None
    expected = torch.cat([world.filled(1, count, rank) for rank in range(world.size)])
    at_root = expected if world.rank == _ROOT else None
    return Case(lambda: _timed.OPERATIONS["gather"](mine, parts, dst=_ROOT), out, out.zero_, at_root)


def _scatter(world: World, count: int) -> Case:
    whole = world.filled(world.size, count, _ROOT)
    parts = list(whole.chunk(world.size)) if world.rank == _ROOT else None
    out = torch.empty(count, dtype=world.dtype, device=world.device)
    expected = whole[world.rank * count : (world.rank + 1) * count]
    return Case(lambda: _timed.OPERATIONS["scatter"](out, parts, src=_ROOT), out, out.zero_, expected)


def _sendrecv(world: World, count: int) -> Case:
    mine = world.filled(1, count, world.rank)
    out = torch.empty_like(mine)
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size

    def run() -> None:
        if world.size == 1:
            out.copy_(mine)
            return
        send = _timed.P2POp(plain.isend, mine, right)
        receive = _timed.P2POp(plain.irecv, out, left)
        for work in _timed.OPERATIONS["batch_isend_irecv"]([send, receive]):
            work.wait()

    return Case(run, out, out.zero_, world.filled(1, count, left))


COLLECTIVES = {
    "all_reduce": Kind("all_reduce", _in_place("all_reduce"), shared=False, reduces=True),
    "all_gather": Kind("all_gather_into_tensor", _all_gather, shared=True),
    "reduce_scatter": Kind("reduce_scatter_tensor", _reduce_scatter, shared=True, reduces=True),
    "all_to_all": Kind("all_to_all_single", _all_to_all, shared=True),
    "broadcast": Kind("broadcast", _in_place("broadcast"), shared=False, rooted=True),
    "reduce": Kind("reduce", _in_place("reduce", rooted=True), shared=False, reduces=True, rooted=True),
    "gather": Kind("gather", _gather, shared=True, rooted=True),
    "scatter": Kind("scatter", _scatter, shared=True, rooted=True),
    "sendrecv": Kind("batch_isend_irecv", _sendrecv, shared=False),
}
"""What can be swept, by the names of nccl-tests."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the sweep."""

    collective: str
    nbytes: int
    """Size of the message as nccl-tests counts it."""
    count: int
    """Elements: of one share where the message is made of shares."""
    dtype: str
    redop: str
    root: int
    time_us: float
    """Mean over the ranks of each one's trimmed mean, in µs."""
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    wrong: int | None
    """Wrong elements over all ranks; None if they were not checked."""

    def __str__(self) -> str:
        wrong = "N/A" if self.wrong is None else str(self.wrong)
        return (
            f"{self.nbytes:>12} {self.count:>12} {self.dtype:>9} {self.redop:>6} {self.root:>6} "
            f"{self.time_us:>10.2f} {self.algbw_gb_per_s:>9.3f} {self.busbw_gb_per_s:>9.3f} {wrong:>7}"
        )


HEADER = (
    f"#{'size':>11} {'count':>12} {'type':>9} {'redop':>6} {'root':>6} {'time':>10} {'algbw':>9} {'busbw':>9} "
    f"{'#wrong':>7}\n"
    f"#{'(B)':>11} {'(elements)':>12} {'':>9} {'':>6} {'':>6} {'(us)':>10} {'(GB/s)':>9} {'(GB/s)':>9} {'':>7}"
)


def parse_size(text: str) -> int:
    """Bytes from ``8``, ``1K``, ``64M``, ``2G`` (powers of 1024), as nccl-tests reads them."""
    found = re.fullmatch(r"(\d+)([KMG]?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{text!r} is no size: write 8, 1K, 64M or 2G (powers of 1024).")
    return int(found[1]) << 10 * " KMG".index(found[2].upper() or " ")


def sizes(begin: int, end: int, factor: int) -> Iterator[int]:
    """From ``begin`` to at most ``end`` bytes, each ``factor`` times the one before."""
    while begin <= end:
        yield begin
        begin *= factor


def sweep(
    world: World, collective: str, nbytes: list[int], *, dtype: str, warmup: int, iterations: int, check: bool
) -> Iterator[Line]:
    """Run one collective at each size, on every rank at once.

    Sizes are rounded down to whole elements, and to as many for each rank; those with none are left out.
    """
    kind = COLLECTIVES[collective]
    shares = world.size if kind.shared else 1
    for size in nbytes:
        count = size // world.dtype.itemsize // shares
        if count:
            yield _measure(world, collective, kind, count, dtype, warmup, iterations, check)


def _measure(
    world: World, name: str, kind: Kind, count: int, dtype: str, warmup: int, iterations: int, check: bool
) -> Line:
    shares = world.size if kind.shared else 1
    nbytes = count * shares * world.dtype.itemsize
    case = kind.make(world, count)
    enabled = SETTINGS.enabled
    configure(enabled=False)
    wrong = 0
    if check:
        case.start()
        case.run()
        if case.expected is not None:
            wrong = int((case.result != case.expected).sum().item())
    # Zeros stay zero however often they are summed.
    case.result.zero_()
    for _ in range(warmup):
        case.run()
    LOG.reset()
    configure(enabled=True)
    for _ in range(iterations):
        case.run()
    configure(enabled=enabled)
    found = summary(wait=True).find(kind.operation)
    mean_s = (found.mean_s or 0.0) if found is not None else 0.0
    # The two numbers that concern all ranks; double holds both exactly enough.
    totals = torch.tensor([mean_s, float(wrong)], dtype=torch.float64, device=world.device)
    original_of(plain.all_reduce)(totals)
    time_s = totals[0].item() / world.size
    algbw, busbw = bandwidths(nbytes, world.size, time_s, OPS[kind.operation].factor)
    return Line(
        collective=name,
        nbytes=nbytes,
        count=count,
        dtype=dtype,
        redop=world.redop if kind.reduces else "none",
        root=_ROOT if kind.rooted else -1,
        time_us=time_s * 1e6,
        algbw_gb_per_s=algbw or 0.0,
        busbw_gb_per_s=busbw or 0.0,
        wrong=round(totals[1].item()) if check else None,
    )
