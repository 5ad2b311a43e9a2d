"""Timing for code that imports ``torch.distributed`` itself: at PyTorch's dispatcher, or by patching its functions."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from deep500_timing.adapters import Replaced, warn_once
from deep500_timing_torch.comm import _build, _timed
from deep500_timing_torch.comm._log import LOG
from deep500_timing_torch.comm._operation import dispatched
from deep500_timing_torch.comm._ops import BY_OPERATOR, OPS
from deep500_timing_torch.comm._settings import SETTINGS
from deep500_timing_torch.comm._timed import original_of, timed_operation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType, TracebackType

    F = TypeVar("F", bound=Callable[..., Any])

_lock = threading.RLock()
_patched = Replaced()
_building: list[Any] = []


def instrument(*, kernel: bool | None = None) -> Instrument:
    """Time the communication of code that cannot change its import, from now on.

    ::

        timing = comm.instrument()        # until timing.undo(), or the end of the program

        with comm.instrument():           # until the end of the block
            trainer.fit()

        @comm.instrument()                # in each call of a function
        def train(): ...

    The compiled kernel sees every operation that PyTorch hands to a process group, those of DDP's reducer, FSDP,
    DTensor and compiled code included. Waits in ``Work.wait`` and ``wait_tensor`` are exposed time. The machine's C++
    compiler builds it once for each PyTorch, in half a minute: by ``python -m deep500_timing_torch.comm build``, or in
    the background by the first program that asks for it, which goes on with the patched functions. Settings:
    ``DEEP500_TIMING_COMM_KERNEL=off`` for none, ``DEEP500_TIMING_CACHE`` for its folder.

    Without the kernel, timed functions are put into ``torch.distributed``. They do not see operations that C++ issues
    (for DDP's there is :func:`instrument_ddp`), names bound before, and methods of a ``ProcessGroup``; the summary says
    how many were not seen. Neither sees libraries that call NCCL or MPI themselves.

    Args:
        kernel: True for the kernel, built now if need be; False for the patched functions; None for the kernel if it
            has been built.

    Returns:
        An object that ends it: by ``undo()``, as a context manager, or as a decorator. Dropped, it stays in force.
        Several may be in force; the last one to be undone takes everything out.

    Raises:
        RuntimeError: ``kernel=True``, and there is none, or the patched functions are in force already.
    """
    return Instrument(kernel)


class Instrument:
    """What :func:`instrument` returns; in force from the beginning."""

    def __init__(self, kernel: bool | None) -> None:
        self._kernel = kernel
        self._in_force = False
        self._begin()

    @property
    def kernel(self) -> bool:
        """Whether the compiled kernel does the timing now, rather than patched functions."""
        return self._in_force and SETTINGS.kernel is not None

    def undo(self) -> None:
        """Take it out of force; nothing if that has been done."""
        with _lock:
            if not self._in_force:
                return
            self._in_force = False
            SETTINGS.instruments -= 1
            if SETTINGS.instruments == 0:
                _take_out()

    close = undo

    def __enter__(self) -> Instrument:
        self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.undo()

    def __call__(self, function: F) -> F:
        """Decorate a function: in force in each of its calls, and not merely because it was decorated."""
        self.undo()
        kernel = self._kernel

        @functools.wraps(function)
        def instrumented(*args: Any, **kwargs: Any) -> Any:
            with Instrument(kernel):
                return function(*args, **kwargs)

        return instrumented  # type: ignore[return-value]

    def __repr__(self) -> str:
        if not self._in_force:
            return "<Instrument, undone>"
        return f"<Instrument, in force by {'the compiled kernel' if self.kernel else 'patched functions'}>"

    def _begin(self) -> None:
        with _lock:
            if self._in_force:
                return
            if SETTINGS.instruments == 0:
                _put_in(self._kernel)
            elif self._kernel and SETTINGS.kernel is None:
                raise RuntimeError(
                    "comm.instrument(kernel=True) inside one by patched functions: undo that one first, or leave "
                    f"kernel= out. The kernel is not at work because {SETTINGS.why_no_kernel}."
                )
            SETTINGS.instruments += 1
            self._in_force = True


def _put_in(kernel: bool | None) -> None:
    found = _load_kernel(kernel)
    LOG.watch()
    try:
        if found is not None:
            # The kernel sees the messages of a batch, and only the function tells that they are one.
            _patch_all(["batch_isend_irecv"])
            rules = [(operator, size, share, OPS[name]) for operator, (name, size, share) in BY_OPERATOR.items()]
            found.install(dispatched, rules)
            SETTINGS.kernel = found
            SETTINGS.changed()
        else:
            _patch_all(OPS)
    except BaseException:
        _take_out()
        raise


def _take_out() -> None:
    if SETTINGS.kernel is not None:
        SETTINGS.kernel.uninstall()
        SETTINGS.kernel = None
        SETTINGS.changed()
    for owner, name in _patched.undo():
        warn_once(
            f"Leaving comm.instrument(): {owner.__name__}.{name} was patched by other code inside the block and "
            "stays as it is; it may go on timing. Leave blocks in the reverse order of entering them."
        )
    LOG.unwatch()


def _load_kernel(kernel: bool | None) -> ModuleType | None:
    SETTINGS.why_no_kernel = None
    if kernel:
        try:
            return _build.build()
        except _build.KernelUnavailableError as error:
            raise RuntimeError(f"comm.instrument(kernel=True): there is no kernel: {error}.") from error
    if kernel is False:
        SETTINGS.why_no_kernel = "instrument(kernel=False) was asked for"
        return None
    # After a failure the program goes on with the patched functions.
    try:
        try:
            return _build.load()
        except _build.KernelNotBuiltError as error:
            SETTINGS.why_no_kernel = str(error)
            process = _build.start_build(quiet=True)  # for the next run
            if process is not None:
                # Python warns of a child that is still running when its handle goes.
                _building.append(process)
    except _build.KernelUnavailableError as error:
        SETTINGS.why_no_kernel = str(error)
    except Exception as error:
        SETTINGS.why_no_kernel = f"it cannot be loaded: {type(error).__name__}: {error}"
    return None


def _patch_all(names: Iterable[str]) -> None:
    for name in names:
        for module in (dist,) if name in ("isend", "irecv") else (dist, c10d):
            now = vars(module).get(name)
            ours = _timed.OPERATIONS.get(name)
            if now is None or ours is None or original_of(now) is not now:
                continue
            if original_of(ours) is not now:
                # Another library has patched it since: time the present function.
                ours = timed_operation(name, now)
            _patched.put(module, name, ours)
    # Its arguments are compared with the originals of isend and irecv, also by code that runs outside the block.
    _patched.put(c10d.P2POp, "__new__", _timed.new_p2p_op)
    _patched.put(c10d.P2POp, "__init__", _timed.init_p2p_op)
