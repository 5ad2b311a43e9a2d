"""The regions of one training under a trainer, and the wrappers that start and end them."""

from __future__ import annotations

import functools
from _thread import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from deep500_timing.adapters import warn_once

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing import Timer

    F = TypeVar("F", bound=Callable[..., Any])

FIT, EPOCH, EPOCH_START, BATCH, IO, COPY = "FIT", "EPOCH", "EPOCH (start)", "BATCH", "IO", "copy"
FORWARD, BACKWARD, CLIP, OPTIMIZER = "FORWARD", "BACKWARD", "clip", "optimizer"
VALIDATION, CHECKPOINT, LOGGING, SKIP = "VALIDATION", "CHECKPOINT", "logging", "skip batches"
AFTER_BATCH = "after BATCH"
_GAPS = {IO: "after IO", COPY: "after IO", FORWARD: "loss", BACKWARD: "after BACKWARD", CLIP: "after BACKWARD"}
_GAPS[OPTIMIZER] = "after optimizer"
"""The region between two regions inside a BATCH, by the first; the names are those of ``deep500-timing run``."""
CLAIMED = frozenset({FIT, EPOCH, EPOCH_START, BATCH, IO, COPY, FORWARD, "FORWARD (no grad)", BACKWARD, "autograd.grad"})
CLAIMED |= {CLIP, OPTIMIZER, VALIDATION, CHECKPOINT, "after FORWARD (no grad)", *_GAPS.values()}
"""What the plug-in of PyTorch leaves to a trainer's."""
_ON_DEVICE = frozenset({COPY, FORWARD, BACKWARD, CLIP, OPTIMIZER})
_ABSENT = object()


def guarded(method: F) -> F:
    """Make a hook harmless: an exception in it costs a warning, never the training."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            warn_once(
                f"Timing the training failed in {method.__qualname__}: {type(error).__name__}: {error}. The training "
                "goes on; its times are incomplete.",
                key=f"trainer {method.__qualname__} {type(error).__name__}",
            )
            return None

    return call  # type: ignore[return-value]


class Fit:
    """The regions of one training: which are open, and where the current BATCH began.

    Args:
        timer: Records the regions.
        on_device: Whether the model is on an accelerator, which then times its regions too.
        taken: Returns the names of regions that are recorded elsewhere, and so not here.
    """

    def __init__(self, timer: Timer, *, on_device: bool, taken: Callable[[], frozenset[str]] = frozenset) -> None:
        self.timer = timer
        self.on_device = on_device
        self.batch_ns = 0
        """When the current BATCH began; 0 outside of one."""
        self.batches = 0
        self.batches_ns = 0
        """The number and the total time of the recorded BATCHes."""
        self.open: dict[str, bool] = {}
        """The open regions in order, with whether the device times them."""
        self.paused = False
        """Whether an evaluation runs, whose data and calls are no part of the training."""
        self.closed = False
        self._taken = taken
        self._last, self._last_ns = "", 0
        """The last region inside the EPOCH, and when it ended; 0 if that is unknown."""
        self._fetches = False
        self._thread = get_ident()
        self._undo: list[Callable[[], None]] = []

    @property
    def is_here(self) -> bool:
        """Whether the calling thread trains, and no evaluation runs."""
        return not (self.paused or self.closed) and self._thread == get_ident()

    # --- regions -----------------------------------------------------------------------------------------------------

    @guarded
    def start(self, name: str) -> None:
        """Open a region, unless it is open or recorded elsewhere."""
        if name in self.open or self._thread != get_ident() or name in self._taken():
            return
        on_device = self.on_device and name in _ON_DEVICE
        if name == EPOCH:
            self._last_ns = 0
        self.begins()
        self.timer.start(name, on_device)
        self.open[name] = on_device

    @guarded
    def end(self, name: str) -> None:
        """Close a region, if it is open."""
        if name in self.open and self._thread == get_ident():
            if name == EPOCH:
                self.begins()
            self.timer.end(name, self.open.pop(name))
            self.ended(name, self.timer.now_ns())

    @guarded
    def fail(self, name: str) -> None:
        """Close a region because of an exception: it is counted as failed."""
        if self.open.pop(name, None) is not None:
            self.timer.fail(name)
            self._last_ns = 0

    @guarded
    def record(self, name: str, start_ns: int, end_ns: int) -> None:
        """Keep a region that lies in the past, unless it is recorded elsewhere."""
        if end_ns > start_ns > 0 and name not in self._taken():
            self.timer.record(name, start_ns, end_ns)

    def ended(self, name: str, now_ns: int) -> None:
        """A region ended, inside no other but EPOCH and BATCH: what follows it is a region up to the next."""
        if not self.open.keys() - {FIT, EPOCH}:
            self._last, self._last_ns = name, now_ns

    def begins(self) -> None:
        """A region begins: what lies between the last one and this is a region too, inside EPOCH."""
        if self._last_ns and EPOCH in self.open and not self.open.keys() - {FIT, EPOCH}:
            gap = _GAPS.get(self._last, "after IO") if self.batch_ns or self._fetches else AFTER_BATCH
            self.record(gap, self._last_ns, self.timer.now_ns())

    # --- steps -------------------------------------------------------------------------------------------------------

    @guarded
    def begin_fetch(self) -> None:
        """The trainer begins to fetch data, for the next BATCH if there is some."""
        self.begins()
        self._last_ns, self._fetches = 0, True

    @guarded
    def end_fetch(self) -> None:
        """It has the data."""
        self._fetches = False
        if not self._last_ns:
            self.ended(IO, self.timer.now_ns())

    @guarded
    def begin_batch(self, start_ns: int, step: int) -> None:
        """A BATCH began at that time. One that did not end with an optimizer step is no BATCH."""
        self.batch_ns = start_ns
        self.timer.step(step, time_ns=start_ns)

    @guarded
    def end_batch(self) -> None:
        """The BATCH ends now."""
        if self.batch_ns:
            self.begins()
            now = self.timer.now_ns()
            self.record(BATCH, self.batch_ns, now)
            self.batches += 1
            self.batches_ns += now - self.batch_ns
            self.batch_ns = 0
            self.ended(BATCH, now)

    @guarded
    def close(self, *, failed: bool = False) -> None:
        """The training has ended: close what is open, as failed if an exception ended it, and undo the wrappers."""
        self.closed = True
        while self._undo:
            self._undo.pop()()
        if self.batch_ns and failed and BATCH not in self._taken():
            self.timer.start(BATCH)
            self.timer.fail(BATCH)
        self.batch_ns = self._last_ns = 0
        for name in reversed(list(self.open)):
            if failed:
                self.fail(name)
            else:
                self.end(name)

    # --- wrappers ----------------------------------------------------------------------------------------------------

    def wrap(
        self,
        owner: Any,
        name: str,
        region: str = "",
        *,
        before: Callable[..., object] | None = None,
        after: Callable[..., object] | None = None,
        failed: Callable[[BaseException], object] | None = None,
    ) -> None:
        """Time the calls of a function of an object, a class or a module until :meth:`close`.

        Args:
            owner: What has the function. Nothing happens if it does not.
            name: The function's name.
            region: The region of a call.
            before: Called before the region starts, with the arguments.
            after: Called after the region ended, with the result and the arguments.
            failed: Called with the exception that ends a call.
        """
        original = getattr(owner, name, None)
        if original is None:
            return
        before_us = vars(owner).get(name, _ABSENT)
        fit = self

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not fit.is_here:
                return original(*args, **kwargs)
            if before is not None:
                before(*args, **kwargs)
            if region:
                mine = region not in fit.open
                fit.start(region)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                if error.__traceback__ is not None:  # this frame is for no traceback; a bare `raise` does not add it
                    error.__traceback__ = error.__traceback__.tb_next
                if region and mine:
                    fit.fail(region)
                if failed is not None:
                    failed(error)
                raise
            if region and mine:
                fit.end(region)
            if after is not None:
                after(result, *args, **kwargs)
            return result

        call._torchdynamo_inline = original  # type: ignore[attr-defined]
        setattr(owner, name, call)

        def undo() -> None:
            if vars(owner).get(name) is not call:
                return  # another has wrapped it since; `call` does nothing once the fit is closed
            if before_us is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before_us)

        self._undo.append(undo)
