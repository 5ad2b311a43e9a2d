"""The handles that callers of asynchronous operations get: each times its first wait and passes everything else on."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist


class TimedWork(dist.Work):
    """The handle of an asynchronous operation, which times its ``wait`` and passes everything else on."""

    __slots__ = ("_op", "_work")
    _work: dist.Work
    _op: Any
    """The ``PendingOp`` of the module ``_operation``, which imports this one; None after the first wait."""

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait as the original does; how long that takes is the operation's exposed time."""
        if self._op is None:
            return self._work.wait(*args, **kwargs)
        result = self._op.timed_wait(self._work.wait, args, kwargs)
        self._op = None
        return result

    def __repr__(self) -> str:
        return f"<TimedWork for {self._work!r}>"


def timed_work(work: dist.Work, op: Any) -> TimedWork:
    """A handle that replaces an operation's own."""
    handle = TimedWork()  # An `__init__` in Python would take as long as the rest.
    handle._work = work
    handle._op = op
    return handle


def _delegate(name: str) -> Any:
    @functools.wraps(getattr(dist.Work, name))
    def method(self: TimedWork, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._work, name)(*args, **kwargs)

    return method


# Python finds the methods of Work on the class before it asks `__getattr__`, so each needs one here. The list differs
# between versions of PyTorch.
for _name in dir(dist.Work):
    if not _name.startswith("__") and _name not in vars(TimedWork) and _name not in ("_pybind11_conduit_v1_", "unbox"):
        setattr(TimedWork, _name, _delegate(_name))


class TimedFuture(torch.futures.Future):  # type: ignore[type-arg]
    """The future of an operation on the CPU that returns one instead of a handle; it times its ``wait``."""

    def __init__(self, future: Any, op: Any) -> None:
        super().__init__()
        self._future = future
        self._op: Any = op
        future.add_done_callback(self._hand_on)

    def _hand_on(self, future: Any) -> None:
        try:
            value = future.value()
        except Exception as error:
            self.set_exception(error)
        else:
            self.set_result(value)

    def wait(self) -> Any:
        """Wait as the original does; how long that takes is the operation's exposed time."""
        if self._op is None:
            return super().wait()
        result = self._op.timed_wait(super().wait, (), {})
        self._op = None
        return result
