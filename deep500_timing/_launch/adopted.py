"""Annotations that a program already has become regions, without an edit.

``torch.profiler.record_function``, NVTX ranges, the timers of Megatron, DeepSpeed and torchtnt, the profilers of
Lightning, JAX and TensorFlow: each says a name, a begin and an end. A library's words about itself are left out. No
synchronization is added, and where a library synchronizes before it reads its clock, so is its region read.
"""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager, nullcontext, suppress
from functools import partial, wraps
from threading import local
from time import perf_counter_ns

from deep500_timing._base.patches import Replaced, after_import

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


MOST = 50
"""Names that are kept: a name with a number in it would be a region for each step."""
_PLUMBING = (
    "contextlib", "torch.utils._contextlib", "torch.autograd.profiler", "torch.cuda.nvtx", "jax._src.profiler",
    "tensorflow.python.profiler.trace", __name__,
)  # fmt: skip
"""Modules between an annotation and the code that says it."""
_LIBRARIES = (
    "torch.", "deepspeed.", "lightning.", "pytorch_lightning.", "transformers.", "accelerate.", "torchtnt.", "jax.",
    "tensorflow.", "keras.", "tf_keras.", "deep500_timing",
)  # fmt: skip
"""How the names of modules begin whose annotations are of the library's inside."""


class Adopted:
    """The annotations of one program.

    Args:
        log: Where they are recorded.
    """

    def __init__(self, log: Any) -> None:
        self._log = log
        self._keep: Callable[[str, int, int], object] | None = None
        self._names: dict[str, str | None] = {}
        self._replaced = Replaced()
        self._open = local()
        self._is_late = True  # of modules that have been imported
        self._requests = [after_import(name, partial(self._install, name)) for name in _SOURCES]
        self._is_late = False

    def undo(self) -> None:
        """Leave the libraries as they were."""
        for take_back in self._requests:
            take_back()
        self._replaced.undo()

    def _install(self, module: str) -> None:
        try:
            _SOURCES[module](self, sys.modules[module])
        except Exception as error:  # another version of the library
            self._log.note(
                f"The annotations of {module} are no regions: {type(error).__name__}: {error}. "
                "DEEP500_TIMING_ADOPT=0 switches this off."
            )

    # --- what the sources call ----------------------------------------------------------------------------------------

    def add(self, name: str, start_ns: int, end_ns: int) -> None:
        """Keep an annotation that has ended."""
        try:
            region = self._names[name]
        except KeyError:
            region = self._names[name] = self._named(name)
        if region is not None and self._keep is not None:
            self._keep(region, start_ns, end_ns)

    def _named(self, name: str) -> str | None:
        if len(self._names) >= MOST:
            self._log.note(f"The program annotates more than {MOST} names; the first {MOST} are regions.")
            return None
        timer = self._log.timer()
        self._keep = timer._keep
        # A name of ours would be counted twice.
        return f"{name} (annotated)" if any(region.name == name for region in timer._regions()) else name

    def pairs(self, owner: Any, begin: str, end: str, name_of: Callable[..., str], key: Any = None) -> None:
        """Take what lies between two methods of one object: from the first one's return to the second one's.

        Args:
            owner: Their class, or the module of two functions, such as a push and its pop.
            begin: The first one.
            end: The second one.
            name_of: Called with the arguments of the first one, after it.
            key: What both are of, where it is not their first argument.
        """
        enter, leave, state, add = getattr(owner, begin), getattr(owner, end), self._open, self.add

        @wraps(enter)
        def entered(*args: Any, **kwargs: Any) -> Any:
            result = enter(*args, **kwargs)
            name = name_of(*args, **kwargs)
            if name or key is not None:  # of a push, the pop is to be known
                vars(state).setdefault("pairs", []).append((key or args[0], name, perf_counter_ns()))
            return result

        @wraps(leave)
        def left(*args: Any, **kwargs: Any) -> Any:
            result = leave(*args, **kwargs)
            opened: Any = getattr(state, "pairs", ())
            of = key or args[0]
            place = next((place for place in reversed(range(len(opened))) if opened[place][0] is of), None)
            if place is not None:
                _, name, start_ns = opened.pop(place)
                if name:
                    add(name, start_ns, perf_counter_ns())
            return result

        self._replaced.put(owner, begin, entered)
        self._replaced.put(owner, end, left)

    def named(self, owner: Any) -> None:
        """Take the context managers of a class whose first argument is the name; the inside costs a look at it."""
        make, pairs, kinds = owner.__init__, self.pairs, dict[type, type]()
        inside: set[str] = set()  # at most 1000: PyTorch has three in each step

        @wraps(make)
        def made(self: Any, name: str, *args: Any, **kwargs: Any) -> None:
            # Half the price where there is the name alone, as PyTorch says it.
            make(self, name, *args, **kwargs) if args or kwargs else make(self, name)
            if name not in inside:
                if region := _said_by_program(name):
                    adopt(self, region)
                elif len(inside) < 1000:
                    inside.add(name)

        def adopt(one: Any, region: str) -> None:
            kind = type(one)
            with suppress(TypeError):  # one of the program's that cannot be derived from
                if kind not in kinds:
                    kinds[kind] = type(kind.__name__, (kind,), {"__module__": kind.__module__})
                    pairs(kinds[kind], "__enter__", "__exit__", lambda one: one._deep500_timing_name)
                one.__class__ = kinds[kind]
                one._deep500_timing_name = region

        self._replaced.put(owner, "__init__", made)
        # What the program holds already, such as a decorated function. PyTorch keeps none of its own.
        for one in gc.get_objects() if self._is_late else ():
            if owner in type(one).__mro__ and hasattr(one, "name"):
                adopt(one, str(one.name))

    def managers(self, owner: Any, method: str) -> None:
        """Take the time within the context managers that a method gives, whose first argument is the name."""
        give, add = getattr(owner, method), self.add

        @wraps(give)
        def given(self: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
            manager = give(self, name, *args, **kwargs)
            return _around(manager, said, add) if (said := _said_by_program(name)) else manager

        self._replaced.put(owner, method, given)


@contextmanager
def _around(manager: Any, name: str, add: Callable[[str, int, int], None]) -> Iterator[Any]:
    with manager as result:
        start_ns = perf_counter_ns()
        try:
            yield result
        finally:
            add(name, start_ns, perf_counter_ns())


def _said_by_program(name: object) -> str:
    """The name of an annotation; empty if a library says it of its inside."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in _PLUMBING:
        frame = frame.f_back
    is_inside = frame is not None and str(frame.f_globals.get("__name__")).startswith(_LIBRARIES)
    return "" if is_inside else str(name)


def _first(*args: Any, **kwargs: Any) -> str:
    return _said_by_program(next(iter((*args, *kwargs.values())), ""))


def _nvtx(adopted: Adopted, module: Any) -> None:
    adopted.pairs(module, "push_range", "pop_range", _first, module)
    annotate = module.annotate
    decorate = annotate.__call__
    adopted.pairs(annotate, "__enter__", "__exit__", lambda annotation: annotation.init_args[0] or "")

    @wraps(decorate)
    def decorated(self: Any, function: Any) -> Any:
        name = str(self.init_args[0] or function.__name__)
        return _around(nullcontext(), name, adopted.add)(decorate(self, function))

    adopted._replaced.put(annotate, "__call__", decorated)


_SOURCES: dict[str, Callable[[Adopted, Any], None]] = {
    "torch.autograd.profiler": lambda adopted, module: adopted.named(module.record_function),
    "torch.cuda.nvtx": lambda adopted, module: adopted.pairs(module, "range_push", "range_pop", _first, module),
    "nvtx": _nvtx,
    "megatron.core.timers": lambda adopted, module: adopted.pairs(module.Timer, "start", "stop", lambda one: one.name),
    "deepspeed.utils.timer": lambda adopted, module: adopted.pairs(
        module.SynchronizedWallClockTimer.Timer, "start", "stop", lambda timer: timer.name_
    ),
    **dict.fromkeys(
        ("lightning.pytorch.profilers.profiler", "pytorch_lightning.profilers.profiler"),
        lambda adopted, module: adopted.managers(module.Profiler, "profile"),
    ),
    "torchtnt.utils.timer": lambda adopted, module: adopted.managers(module.Timer, "time"),
    "jax.profiler": lambda adopted, module: adopted.named(module.TraceAnnotation),
    "tensorflow.python.profiler.trace": lambda adopted, module: adopted.named(module.Trace),
}
"""What adopts the annotations of each module, once that is imported."""
