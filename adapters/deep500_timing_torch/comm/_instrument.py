"""Timing for code that imports ``torch.distributed`` itself: a context manager that patches it, and a DDP hook."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from deep500_timing._ground.warn import warn_once
from deep500_timing_torch.comm import _public
from deep500_timing_torch.comm._ops import OPS
from deep500_timing_torch.comm._timed import original_of, timed_op

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_ABSENT = object()
_lock = threading.Lock()
_depth = 0
_undo: list[tuple[Any, str, Any, Any]] = []


def instrument() -> Instrument:
    """Time the operations of code that cannot change its import, until the ``with`` block ends.

    ::

        with comm.instrument():
            trainer.fit()
        comm.log_summary()

    It puts timed operations into ``torch.distributed`` and ``torch.distributed.distributed_c10d``, and takes exactly
    those out again. Blocks may be nested, in which case the outermost decides. What an operation calls in turn, as
    ``all_gather_object`` calls ``all_gather``, is part of it and not counted again.

    What it cannot see:

    - names that were bound before: ``from torch.distributed import all_reduce``, or a default argument;
    - DDP's reducer, which talks to the backend from C++: :func:`instrument_ddp` sees its buckets;
    - functional collectives (``torch.distributed._functional_collectives``), and what stands on them: DTensor,
      tensor parallelism, and the collectives of a compiled graph. They are operators of PyTorch, called by its
      dispatcher; a profiler or a ``TorchDispatchMode`` sees them;
    - collectives in a ``_coalescing_manager`` block, which are issued at its end: the calls are counted, not timed;
    - ``isend`` and ``irecv`` by way of ``torch.distributed.distributed_c10d``, which compares them by identity;
      ``torch.distributed.isend`` and ``batch_isend_irecv`` are seen;
    - methods of a ``ProcessGroup``, and libraries that talk to NCCL or MPI themselves.
    """
    return Instrument()


class Instrument:
    """What :func:`instrument` returns."""

    def __enter__(self) -> Instrument:
        """Patch, unless a block around this one has done so."""
        global _depth
        with _lock:
            if _depth == 0:
                try:
                    _patch_all()
                except BaseException:
                    _undo_all()
                    raise
            _depth += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        """Undo what was patched, at the end of the outermost block."""
        global _depth
        with _lock:
            _depth -= 1
            if _depth == 0:
                _undo_all()


def _patch_all() -> None:
    for name in OPS:
        _patch(dist, name)
        if name not in ("isend", "irecv"):
            _patch(c10d, name)
    # Its arguments are compared with the originals of isend and irecv, also by code that runs outside the block.
    _set(c10d.P2POp, "__new__", _public.new_p2p_op)
    _set(c10d.P2POp, "__init__", _public.init_p2p_op)


def _patch(module: Any, name: str) -> None:
    now = vars(module).get(name, _ABSENT)
    if now is _ABSENT or original_of(now) is not now:
        return
    ours: Callable[..., Any] = getattr(_public, name)
    if original_of(ours) is not now:
        # Somebody else has patched it since we were imported: time what is there now.
        ours = timed_op(name=name)(now)
    _set(module, name, ours)


def _set(owner: Any, name: str, value: Any) -> None:
    _undo.append((owner, name, vars(owner).get(name, _ABSENT), value))
    setattr(owner, name, value)


def _undo_all() -> None:
    while _undo:
        owner, name, before, ours = _undo.pop()
        now = vars(owner).get(name, _ABSENT)
        if getattr(now, "__func__", now) is not getattr(ours, "__func__", ours):
            warn_once(
                f"Leaving comm.instrument(): {owner.__name__}.{name} was patched by somebody else inside the block and "
                "stays as it is; it may go on timing. Leave blocks in the reverse order of entering them."
            )
        elif before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
