"""The plug-in of ``deep500-timing run`` for plain JAX: calls of jitted functions, training steps, and compilations.

What ``jax.jit`` makes is stood in for by an object of a class that has all that the original's type has. A function
that asks for a gradient while it is traced trains; where none does, one that is given what it returned does.
"""

from __future__ import annotations

import functools
import sys
import threading
from contextlib import contextmanager, suppress
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

from deep500_timing.adapters import Replaced, after_import, warn_once
from deep500_timing.loop import GRAD, NO_GRAD, STEP, Loops, limit
from deep500_timing_jax._compilations import Compilations
from deep500_timing_jax._timer import WAIT, CPUGPUTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deep500_timing import Autolog

GRADIENT, OPTIMIZER = "gradient (not jitted)", "optimizer (not jitted)"
_ALONE = 10
"""Steps of one function alone from which on another that steps is the next training, and no other part of a round."""
_SHORT_NS = 20_000
_LOOKED_AT = 8
"""Calls after which a function that has not fed back its output is taken to be no training step."""
_SURE = 1000
"""So many calls that were given what they returned are steps in a program that asks for no gradient, or all at its end:
before the first gradient, an evaluation or an environment may be called so."""


def _bare(function: Callable[..., Any]) -> Callable[..., Any]:
    # No frame of this module is for a traceback.
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_globals is globals():
                trace = trace.tb_next
            error.__traceback__ = trace
            raise

    return call


class _Local(threading.local):
    inside = False
    """Whether a call is being timed: those inside it are parts of it."""
    gradient = False
    """Whether a gradient has been asked for in it."""

    def __init__(self) -> None:
        self.awaits: dict[int, int] = {}
        """The functions that have returned a gradient since the last update, by identity, and when they have."""
        self.asked: tuple[int, list[Any]] = 0, []
        """The function of the last gradient, and its parameters as weak references, while no update is seen."""


class _Steps:
    # The state that all functions of a process share. A step ends with the call that trains, or with the update that
    # follows a gradient.
    def __init__(self, log: Autolog) -> None:
        self.log = log
        log.before_report(self.close)  # before the loops' own end
        self.loops = Loops.of(log, CPUGPUTimer)
        self.loops.before_wait = self.complete
        self.timer = self.loops.timer
        self.local = _Local()
        self.training: WeakSet[Any] = WeakSet()
        """The Python functions that ask for a gradient."""
        self.is_eager = _eager_check()
        """Tells whether nothing is being traced on this thread."""
        self.done = self._updated = False
        self._accumulates = False
        """Whether gradients of the same parameters have followed each other."""
        self._updates_inside = False
        """Whether a function that asks for a gradient is given what it returned: others that ask do not train."""
        self._last = self._times = self.last_ns = 0
        """What stepped last, by identity, how often without another, and until when."""
        self.asks = False
        """Whether the program has asked for a gradient, in a function or outside of all of them."""
        self._held: list[tuple[int, int, int]] = []
        """Begin, end and identity of what steps if it never does."""
        self._is_sure = limit.steps > 0
        self._follows: dict[int, int] = {}
        """What has stepped, and in whose place: its own, or that of the training before."""

    def _step(self, ident: int, start_ns: int, end_ns: int) -> None:
        if ident != self._last:
            if ident not in self._follows and self._times >= _ALONE:
                self._follows[ident] = self._follows[self._last]
            elif ident in self._follows:
                self._follows[self._last] = self._last  # they step in turn
            self._last, self._times = ident, 0
        self._times += 1
        self.last_ns = end_ns
        self.loops.here().add_unnamed(STEP, self._follows.setdefault(ident, ident), start_ns, end_ns)

    def trained(self, function: Any, start_ns: int, end_ns: int, asked: tuple[Any, Any] | None = None) -> None:
        """A call that trains is over: a step, or, with arguments and result, the gradient that an update follows."""
        ident, awaits = id(function), self.local.awaits
        if not (self.asks or self._is_sure):
            self._held.append((start_ns, end_ns, ident))
            if len(self._held) >= _SURE:
                self._settle()
        elif asked is None:
            if ident in awaits:
                self._complete()
            awaits.clear()
            self._step(ident, start_ns, end_ns)
        else:
            awaits[ident] = end_ns
            self.local.asked = ident, [] if self._updated else _parameters(*asked)
            self.loops.here().add_unnamed(GRAD, ident, start_ns, end_ns)

    def begin(self, function: Any, args: Any) -> None:
        """Before a call: other parameters show that what the function awaits is over, ``--steps`` the program."""
        ident, known = self.local.asked
        if ident == id(function) and known and all(a() is b for a, b in zip(known, _arrays(args[:1]), strict=False)):
            self._accumulates = True
        elif id(function) in self.local.awaits:
            self.complete()
        if limit.steps:
            self.loops.here().end_at_limit(self._follows.get(id(function), id(function)))

    def complete(self, now: int = 0) -> None:
        """The program comes round again, waits for data from ``now`` on, or ends: its updates are not seen."""
        if not (self._updated or (now and self._accumulates)):
            self._complete(now)

    def close(self) -> None:
        """The program ends."""
        self.complete()
        self._settle()

    def _settle(self) -> None:
        self._is_sure = True
        for start_ns, end_ns, ident in [] if self.asks else sorted(self._held):
            self._step(ident, start_ns, end_ns)
        self._held.clear()

    def _complete(self, now: int = 0) -> None:
        # What was taken for gradients were steps.
        for ident, ended_ns in self.local.awaits.items():
            self._step(ident, ended_ns, now or ended_ns)
        self.local.awaits.clear()

    def updated(self, start_ns: int = 0, end_ns: int = 0) -> None:
        """The update that follows a gradient is over: by a jitted function, else outside of all of them until now."""
        if not self.local.awaits:
            # Of a training whose gradient was taken for another's evaluation.
            self._updates_inside = self._updates_inside and end_ns > 0
            return
        self._updated = True
        ident, ended_ns = self.local.awaits.popitem()
        self.local.awaits.clear()
        if not end_ns:
            start_ns, end_ns = ended_ns, self.timer.now_ns()
            self.loops.record(OPTIMIZER, start_ns, end_ns)
        self._step(ident, start_ns, end_ns)

    def trains(self, function: _Timed) -> bool:
        """Whether a function's calls are steps, as far as is known."""
        if function._asks in self.training:
            self._updates_inside |= function._is_fed_back
            return function._is_fed_back or not self._updates_inside
        return function._is_fed_back and not self.asks

    def gradient(self, original: Callable[..., Any], fun: Any, *_: Any, **__: Any) -> Callable[..., Any]:
        """The gradient of a function, which a program may ask for outside of all jitted functions."""
        key = getattr(fun, "__code__", fun)  # A lambda in a loop is another each time.

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.done or self.local.inside or not self.is_eager():
                self.local.gradient = True
                return original(*args, **kwargs)
            self.begin(key, args)
            start_ns, end_ns, result = self.take(GRADIENT, original, args, kwargs)
            with _harmless():
                self.asks = True
                self.trained(key, start_ns, end_ns, (args, result))
            return result

        return call

    def waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What waits for an array to be computed: a region unless it is short, as where the array was ready."""

        @_bare
        @functools.wraps(original, ("__module__", "__name__", "__doc__"))  # jaxlib's methods have no `__qualname__`
        def wait(*args: Any, **kwargs: Any) -> Any:
            if self.done or self.local.inside or not self.is_eager():
                return original(*args, **kwargs)
            return self.take(WAIT, original, args, kwargs, _SHORT_NS)[2]

        return wait

    def take(self, name: str, function: Any, args: Any, kwargs: Any, least_ns: int = 0) -> tuple[int, int, Any]:
        """Call a function as a region, if it lasts so long; return its begin, its end and its result."""
        local, timer = self.local, self.timer
        local.inside, local.gradient = True, False
        start_ns = timer.now_ns()
        try:
            result = function(*args, **kwargs)
        finally:
            local.inside = False
        end_ns = timer.now_ns()
        if end_ns - start_ns >= least_ns:
            timer.record(name, start_ns, end_ns)
        return start_ns, end_ns, result


class _Timed:
    """A function with timed outermost calls, in place of one that JAX made. All else is as that function has it."""

    def __init__(self, function: Any, steps: _Steps) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._steps = steps
        self._region = f"jit({getattr(function, '__name__', 'unnamed')})"
        inner = self.__wrapped__ = getattr(function, "__wrapped__", function)
        self._asks = getattr(inner, "__func__", inner)
        self._calls = 0
        self._untold: list[tuple[int, int]] = []
        """The first calls, for as long as they are not taken for training."""
        self._is_fed_back = False
        self._results: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._function.__reduce_ex__(protocol)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else MethodType(self, owner)

    @_bare
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        steps, local = self._steps, self._steps.local
        if steps.done:
            return self._function(*args, **kwargs)
        if local.inside or not steps.is_eager():
            before, local.gradient = local.gradient, False
            result = self._function(*args, **kwargs)
            self._note_gradient(local.gradient)
            local.gradient = before or self._asks in steps.training
            return result
        steps.begin(self, args)
        start_ns, end_ns, result = steps.take(self._region, self._function, args, kwargs)
        with _harmless():
            self._called(args, kwargs, result, start_ns, end_ns)
        return result

    def _called(self, args: Any, kwargs: Any, result: Any, start_ns: int, end_ns: int) -> None:
        steps = self._steps
        self._note_gradient(steps.local.gradient)
        if not self._is_fed_back and self._calls < _LOOKED_AT:
            # A training step takes the parameters that it returned.
            returned = {id(leaf) for one in self._results if (leaf := one()) is not None}
            self._is_fed_back = bool(returned) and any(id(leaf) in returned for leaf in _arrays((args, kwargs)))
            self._results = [] if self._is_fed_back else [ref(leaf) for leaf in _arrays(result)]
        self._calls += 1
        if not steps.trains(self):
            if self._is_fed_back and steps.local.awaits:
                steps.updated(start_ns, end_ns)
            elif steps.asks and self._asks not in steps.training:
                if not (loop := steps.loops.here()).depth:
                    loop.add_unnamed(NO_GRAD, id(self), start_ns, end_ns)
            elif self._calls <= _LOOKED_AT:
                self._untold.append((start_ns, end_ns))
            return
        while self._untold:  # as is known now, or parts of rounds that are over
            if (held := self._untold.pop(0))[1] > steps.last_ns:
                steps.trained(self, *held)
        is_whole = self._is_fed_back or self._asks not in steps.training
        steps.trained(self, start_ns, end_ns, None if is_whole else (args, result))

    def _note_gradient(self, was_asked: bool) -> None:
        if was_asked:
            self._steps.asks = True
            self._steps.training.add(self._asks)


def _arrays(tree: Any) -> list[Any]:
    import jax

    return [leaf for leaf in jax.tree_util.tree_leaves(tree) if isinstance(leaf, jax.Array)]


def _parameters(args: Any, result: Any) -> list[Any]:
    # What was given first, if the result has the gradient by it: weak references.
    arrays, shapes = _arrays(args[:1]), {array.shape for array in _arrays(result)}
    return [ref(array) for array in arrays] if all(array.shape in shapes for array in arrays) else []


@functools.cache
def _kind_of(kind: Any) -> type[_Timed]:
    """The class that stands in for a type of JAX's: its methods are those of the type, of the function itself."""

    def method(name: str) -> Callable[..., Any]:
        return lambda self, /, *args, **kwargs: getattr(kind, name)(self._function, *args, **kwargs)

    own = {*vars(_Timed), "__new__", "__init__", "__getattribute__", "__setattr__", "__delattr__", "__class__"}
    methods = {name: method(name) for name, value in vars(kind).items() if callable(value) and name not in own}
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_Timed,), {**methods, **names, "__class__": property(lambda _: kind)})


@contextmanager
def _harmless() -> Iterator[None]:
    # An error of timing costs times, not the program.
    try:
        yield
    except Exception as error:
        warn_once(f"Timing a step of JAX failed: {type(error).__name__}: {error}. The program goes on without it.")


def _eager_check() -> Any:
    with suppress(ImportError):
        from jax._src.core import trace_state_clean

        return trace_state_clean
    return lambda: True


def install(log: Autolog) -> Callable[[], None]:
    """Time the functions that ``jax.jit`` and ``jax.pmap`` make from now on, gradients, and compilations."""
    import jax

    with suppress(ImportError):
        from jax._src import source_info_util, traceback_util

        # JAX leaves the files of libraries out of tracebacks and of the places in a program that it compiles.
        source_info_util.register_exclusion(__file__)
        traceback_util.register_exclusion(__file__)
    steps = _Steps(log)
    compilations = Compilations(steps.timer)
    compilations.start()
    replaced = Replaced()

    def followed(owner: Any, name: str, then: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            with _harmless():
                return then(result, *args, **kwargs) or result
            return result

        replaced.put(owner, name, call)

    def timed(made: Any, *_: Any, **__: Any) -> Any:
        with _harmless():
            log.prepare()
            if hasattr(made, "lower"):
                return _kind_of(made.__class__)(made, steps)
            return lambda function: timed(made(function))  # Without a function, `jit` returns a decorator.
        return made

    kinds: dict[str, Any] = {"jit": timed, "pmap": timed, "grad": steps.gradient, "value_and_grad": steps.gradient}
    for name in kinds.keys() & vars(jax).keys():
        followed(jax, name, kinds[name])

    def updated(*_: Any, **__: Any) -> None:
        if not (steps.done or steps.local.inside) and steps.is_eager():
            steps.updated()

    with suppress(ImportError, AttributeError):
        from jax._src.array import ArrayImpl as Array

        for owner, name in ((jax, "block_until_ready"), (Array, "block_until_ready"), (Array, "item")):
            replaced.put(owner, name, steps.waiting(getattr(owner, name)))
        # `float`, `print`, `jax.device_get` and most others read it. NumPy reads the memory of a CPU's array itself.
        replaced.put(Array, "_value", property(steps.waiting(vars(Array)["_value"].fget)))
    followed(jax, "vjp", lambda *_, **__: setattr(steps.local, "gradient", True))
    forget_optax = after_import("optax", lambda: followed(sys.modules["optax"], "apply_updates", updated))

    def undo() -> None:
        steps.done = True
        compilations.stop()
        forget_optax()
        replaced.undo()

    return undo
