"""Makes regions inside functions that ``torch.compile`` compiles do nothing.

The compiler fuses and moves the code between two regions, so its time is undefined, and a call of a clock breaks the
graph. While PyTorch's compiler (Dynamo) traces a function, it sees the functions below in place of the timer's methods.
All other code calls the timer's methods, without a check at run time.

Dynamo offers two ways. C methods, as in the compiled form, use ``torch.compiler.substitute_in_graph``, which exists
only after Dynamo is imported. That import takes a second, so it is watched for and not triggered. Python methods, as in
the plain form, use an attribute of the function.

Not covered: `with handle:` with a handle from outside the compiled function, and, in the compiled form,
`handle.start()` of a handle with `gpu=True`. There the graph breaks, or the function runs uncompiled, and the region is
timed. The same holds for a `with` block that contains a graph break; between `start` and `end` both halves compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, TypeVar

from deep500_timing import Region, Timer, TimeType
from deep500_timing.adapters import after_import, warn_once
from deep500_timing.timer import DeviceRegion
from deep500_timing_torch._timer import CPUGPUTimer

T = TypeVar("T")


class Untimed:
    """The result of ``timer.region(key)`` in a compiled function."""

    # So that `timed` calls its function without timing it.
    is_open = True

    def __init__(self, key: TimeType | str) -> None:
        self.key = key

    @property
    def name(self) -> str:
        return self.key if isinstance(self.key, str) else self.key.name

    def start(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Untimed:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Do nothing."""


# Dynamo takes the defaults for those of the originals: a substitute has the same ones, or none.
# A new `Untimed` each time: Dynamo enters only context managers that it saw created.


def _nothing(*args: Any, **settings: Any) -> bool:
    return False


def _find(self: Timer, key: TimeType | str) -> Untimed:
    return Untimed(key)


def _region(self: Timer, key: TimeType | str, gpu: bool = False) -> Untimed:
    return Untimed(key)


def _timed(self: Timer, key: TimeType | str, gpu: bool = False) -> Callable[[T], T]:
    return lambda function: function


def _iterate(self: Timer, iterable: Iterable[T], key: TimeType | str = "IO", gpu: bool = False) -> Iterable[T]:
    return iterable


_SUBSTITUTES: Mapping[Any, Callable[..., object]] = {
    **dict.fromkeys((Timer.start, Timer.end, Timer.discard, Timer.fail, Timer.cancel, Timer.record), _nothing),
    **dict.fromkeys((Region.start, Region.end, DeviceRegion.start, DeviceRegion.end), _nothing),
    Timer._find: _find,
    Timer.region: _region,
    Timer.timed: _timed,
    Timer.iterate: _iterate,
    # In the compiled form the adapter's class has its own methods, see `call_directly`.
    CPUGPUTimer.start: _nothing,
    CPUGPUTimer.end: _nothing,
    CPUGPUTimer.region: _region,
}


def prepare() -> None:
    """Make compiled functions skip regions, now or when Dynamo is imported."""
    for original, substitute in _SUBSTITUTES.items():
        if isinstance(original, FunctionType):
            original._torchdynamo_inline = substitute  # type: ignore[attr-defined]
    after_import("torch._dynamo", _substitute)


def _substitute() -> None:
    from types import MethodDescriptorType

    import torch

    try:
        for original, substitute in _SUBSTITUTES.items():
            if isinstance(original, MethodDescriptorType):
                torch.compiler.substitute_in_graph(original, skip_signature_check=True)(substitute)
    except Exception as error:
        warn_once(
            f"Preparing PyTorch {torch.__version__} for regions in compiled functions failed; a region there will "
            f"break the graph, and all others are timed: {error}"
        )
