"""Regions inside functions that ``torch.compile`` compiles: nothing, at no cost to those outside.

What stands between two regions in a compiled function has no time of its own: the compiler fuses it with the rest and
moves it about. And a compiler that meets a clock gives up on the graph there. So while PyTorch's compiler (Dynamo)
reads a function, the timer's methods read as the ones below, which do nothing; in all other code they are what they
are, without a check at run time.

Dynamo offers two ways to say so. For a method in C, as in the compiled form, ``torch.compiler.substitute_in_graph``,
which only exists once Dynamo is imported: that takes a second, so it is not imported for the purpose, but watched for.
For a method in Python, as in the plain form, an attribute on the function.

What this does not reach: `with handle:` where the handle was made outside of the compiled function (Dynamo enters only
what it has seen made), and, in the compiled form, `handle.start()` of one made with `gpu=True`. There the graph breaks,
or the function runs uncompiled, and the region is timed as ever. So is a `with` block that the user's own code breaks
the graph in; between `start` and `end` both halves compile.
"""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

from deep500_timing import Region, Timer, TimeType
from deep500_timing.adapters import after_import, warn_once
from deep500_timing.timer import DeviceRegion
from deep500_timing_torch._timer import CPUGPUTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    T = TypeVar("T")


class Untimed:
    """What ``timer.region(key)`` is in a compiled function."""

    # So that `timed` calls its function without timing it.
    is_open = True

    def __init__(self, key: TimeType | str) -> None:
        self.key = key

    @property
    def name(self) -> str:
        """The key's name."""
        return self.key if isinstance(self.key, str) else self.key.name

    def start(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Untimed:
        """Do nothing."""
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Do nothing."""


# The signatures are those of the originals to the letter: Dynamo checks the defaults of the one against the other.
# A fresh `Untimed` each time, since Dynamo enters only those context managers that it has seen made.


def _start(self: Timer, key: TimeType | str, gpu: bool = False) -> None:
    pass


def _end(self: Timer, key: TimeType | str, gpu: bool = False) -> None:
    pass


def _region(self: Timer, key: TimeType | str, gpu: bool = False) -> Untimed:
    return Untimed(key)


def _timed(self: Timer, key: TimeType | str, gpu: bool = False) -> Callable[[T], T]:
    return _unchanged


def _iterate(self: Timer, iterable: Iterable[T], key: TimeType | str = "IO", gpu: bool = False) -> Iterable[T]:
    return iterable


def _find(self: Timer, key: TimeType | str) -> Untimed:
    return Untimed(key)


def _discard(self: Timer, key: TimeType | str) -> bool:
    return False


def _fail(self: Timer, key: TimeType | str) -> bool:
    return False


def _record(self: Timer, key: TimeType | str, start_ns: int, end_ns: int) -> None:
    pass


def _of_handle(self: object) -> None:
    pass


def _unchanged(function: T) -> T:
    return function


_SUBSTITUTES: Sequence[tuple[Any, Callable[..., object]]] = (
    (Timer.start, _start),
    (Timer.end, _end),
    (Timer.region, _region),
    (Timer.timed, _timed),
    (Timer.iterate, _iterate),
    # The adapter's class has methods of its own in the compiled form, see `call_directly`.
    (CPUGPUTimer.start, _start),
    (CPUGPUTimer.end, _end),
    (CPUGPUTimer.region, _region),
    (Timer._find, _find),
    (Timer.discard, _discard),
    (Timer.fail, _fail),
    (Timer.cancel, _discard),
    (Timer.record, _record),
    (Region.start, _of_handle),
    (Region.end, _of_handle),
    (DeviceRegion.start, _of_handle),
    (DeviceRegion.end, _of_handle),
)


def prepare() -> None:
    """See to it that compiled functions pass over regions, whenever Dynamo is or was imported."""
    for original, substitute in _SUBSTITUTES:
        if isinstance(original, FunctionType):
            original._torchdynamo_inline = substitute  # type: ignore[attr-defined]
    after_import("torch._dynamo", _substitute)


def _substitute() -> None:
    from types import MethodDescriptorType

    import torch

    try:
        for original, substitute in _SUBSTITUTES:
            if isinstance(original, MethodDescriptorType):
                torch.compiler.substitute_in_graph(original, skip_signature_check=True)(substitute)
    except Exception as error:
        warn_once(
            f"Preparing PyTorch {torch.__version__} for regions in compiled functions failed; a region there will "
            f"break the graph, and all others are timed as ever: {error}"
        )
