"""The forward pass: the layer that is being called, its caller, and the purpose.

A module that has the attribute ``_compiled_call_impl`` is called through it; that is how ``Module.compile`` works. A
layer's timing stands there. So it surrounds everything that the module does, an FSDP unit's all-gather and other hooks
included, it sees every exception, and it costs a tenth of PyTorch's forward hooks, which take 1.6 µs before a hook has
done anything. PyTorch leaves that attribute out of pickles and copies.

The code that runs for every call of every layer has no helpers: calling a Python function costs as much as opening and
closing a region.
"""

from __future__ import annotations

import threading
from _thread import get_ident
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from deep500_timing.adapters import Watch
from deep500_timing_torch.layers._backward import BackwardMarks, find_nodes
from deep500_timing_torch.layers._private import (
    REPLICATE,
    SLOT,
    StopRecomputation,
    check,
    current_graph_task,
    sequence_nr,
)
from deep500_timing_torch.layers._select import is_keras
from deep500_timing_torch.layers._times import EVALUATION, FORWARD, RECOMPUTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing.memory import MemoryUsage
    from deep500_timing_torch.layers._memory import MemoryLog
    from deep500_timing_torch.layers._select import Layer

_Tensor = torch.Tensor
_is_grad_enabled = torch.is_grad_enabled


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """One call of a layer that is under way, or whose backward pass may still come."""

    layer: Layer
    parent: Call | None
    """The call that made it, while that is under way."""
    of_root: bool
    """Whether the model itself was called, and not a part of it."""
    caller: int
    """The thread that made it, which numbers its nodes."""
    children: list[Call] | None = None
    """The timed calls directly within it that have a backward pass, until it has returned."""
    region: Any = None
    """Its open region, of the forward pass and later of the backward pass; None while neither runs, and for a
    module that calls itself."""
    # These are set only in the pass that needs them, as a call of every layer makes one of these.
    memory: MemoryUsage | None = field(init=False)
    """The memory in use as the pass that is under way began, if it is read."""
    begin: int = field(init=False)
    end: int = field(init=False)
    """The number of the first node made after it."""
    inputs: dict[Any, None] = field(init=False)
    """The autograd nodes of its inputs, until its caller has returned."""
    outputs: list[int] = field(init=False)
    """The numbers of the nodes of its outputs."""
    thread: int = field(init=False)
    """The thread that began its backward pass."""
    task: int = field(init=False)
    """The engine's task that its backward pass is part of."""

    def is_repeated(self) -> bool:
        """Whether the same layer is under way further out: the module calls itself."""
        call = self.parent
        while call is not None:
            if call.layer is self.layer:
                return True
            call = call.parent
        return False


class Calls:
    """The state that the timed layers of one model share."""

    def __init__(
        self,
        root: nn.Module,
        timer: Any,
        *,
        gpu: bool,
        fault: Callable[[str, Layer | None, Exception], None],
        memory: MemoryLog | None = None,
    ) -> None:
        self.root = root
        self.now_ns: Callable[[], int] = timer.now_ns
        self.fault = fault
        self.memory = memory
        self.recomputed: list[tuple[Layer, int, int]] = []
        """Recomputations that have ended, to be recorded when the timer records again: during a recomputation it
        records nothing, so that no region is timed twice."""
        self.marks = BackwardMarks(self)
        self.out_of_memory: str | None = None
        """The innermost layer in which the device ran out of memory."""
        self.of_thread = _Thread()
        self.is_symbolic = _symbolic_of_keras() if is_keras(root) else None
        """Says whether the model is being called for the shapes alone, which is no step; None if it never is."""
        self._timer = timer
        self._gpu = gpu
        self._timed: list[TimedModule] = []

    @property
    def attached(self) -> bool:
        return bool(self._timed)

    def attach(self, layers: tuple[Layer, ...]) -> None:
        """Stand before each layer's module."""
        check()
        for layer in layers:
            timed = TimedModule(self, layer)
            layer.handles = {}
            layer.module.__dict__[SLOT] = timed
            self._timed.append(timed)
        self.marks.attached = True
        _replicas.__enter__()

    def detach(self) -> None:
        """Leave the modules as they were."""
        if not self._timed:
            return
        self.marks.attached = False
        _replicas.__exit__()
        for timed in self._timed:
            timed.attached = False
            attributes = timed.module.__dict__
            # Another timer that was attached later may stand before this one, and outlive it.
            inner = attributes.get(SLOT)
            while isinstance(inner, TimedModule) and not inner.attached:
                inner = inner.before
                if inner is None:
                    del attributes[SLOT]
                else:
                    attributes[SLOT] = inner
        self._timed = []

    def region_of(self, layer: Layer, purpose: str) -> Any:
        region = layer.handles[purpose] = self._timer.region(f"{layer.region} {purpose}", gpu=self._gpu)
        return region

    def record_recomputed(self) -> None:
        recomputed, self.recomputed = self.recomputed, []
        for layer, start_ns, end_ns in recomputed:
            try:
                self._timer.record(f"{layer.region} {RECOMPUTED}", start_ns, end_ns)
            except Exception as error:
                self.fault("recomputation", layer, error)


def _symbolic_of_keras() -> Callable[[], bool] | None:
    # Keras calls a model on the "meta" device before its first step, and keeps that in a global state.
    try:
        from keras.src.backend.common.global_state import get_global_attribute
    except ImportError:
        return None
    return lambda: get_global_attribute("torch_device") == "meta"


class _Thread(threading.local):
    call: Call | None = None
    """The innermost call that is under way."""

    def __init__(self) -> None:
        self.ident = get_ident()


class TimedModule:
    """Stands before a module's own call and times it."""

    __slots__ = (
        "_call_module",
        "_is_symbolic",
        "_layer",
        "_marks",
        "_of_thread",
        "_shared",
        "attached",
        "before",
        "is_root",
        "module",
    )

    def __init__(self, shared: Calls, layer: Layer) -> None:
        self.module = layer.module
        self.before: Any = layer.module.__dict__.get(SLOT)
        """What stood there before; None for the module's own call."""
        self.attached = True
        self.is_root = layer.module is shared.root
        self._call_module: Callable[..., Any] = self.before or layer.module._call_impl
        self._is_symbolic = shared.is_symbolic
        self._layer = layer
        self._shared = shared
        self._marks = shared.marks
        self._of_thread = shared.of_thread

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if not self.attached or is_dynamo_compiling() or (self._is_symbolic is not None and self._is_symbolic()):
            return self._call_module(*args, **kwargs)
        layer = self._layer
        of_thread = self._of_thread
        parent = of_thread.call
        call: Any = None
        region = inputs = None
        start_ns = 0
        try:
            try:
                of_root = self.is_root if parent is None else parent.of_root
                of_thread.call = call = Call(layer, parent, of_root, of_thread.ident)
                if current_graph_task() != -1:
                    purpose = RECOMPUTED
                elif (self._shared.root if of_root else self.module).training:
                    purpose = FORWARD
                else:
                    purpose = EVALUATION
                if parent is None and self._marks.opened and purpose is not RECOMPUTED:
                    self._marks.fail_of(of_thread.ident)
                if purpose is not EVALUATION and _is_grad_enabled():
                    inputs = call.inputs = {}
                    for value in args:
                        if isinstance(value, _Tensor):
                            if (node := value.grad_fn) is not None:
                                inputs[node] = None
                        else:
                            find_nodes(value, inputs)
                    if kwargs:
                        find_nodes(kwargs, inputs)
                    call.begin = sequence_nr()  # After the inputs: asking a view for its node may make one.
                if purpose is RECOMPUTED:
                    start_ns = self._shared.now_ns()
                else:
                    region = layer.handles.get(purpose)
                    if region is None:
                        region = self._shared.region_of(layer, purpose)
                    if region.is_open and call.is_repeated():
                        region = None  # A module that calls itself has one time, the outer call's.
                    else:
                        if self._shared.memory is not None:
                            self._shared.memory.begin(call, forward=True)
                        call.region = region
                        region.start()
            except Exception as error:
                self._shared.fault("start", layer, error)
            output = self._call_module(*args, **kwargs)
        except BaseException as raised:
            of_thread.call = parent
            if call is not None:
                call.parent, call.children, call.inputs = None, None, {}  # Memory may have run out: keep no graph.
            self._raised(call, start_ns, raised)
            raise
        of_thread.call = parent
        try:
            if inputs is not None:
                call.end = sequence_nr()
            if region is not None:
                call.region = None
                region.end()
                if self._shared.memory is not None:
                    self._shared.memory.end(call, forward=True, training=inputs is not None)
            elif start_ns:
                self._shared.recomputed.append((layer, start_ns, self._shared.now_ns()))
            elif parent is not None and call.children:
                parent.children = [*(parent.children or ()), *call.children]
            if inputs is not None and (region is not None or start_ns):
                self._marks.mark(call, output)
        except Exception as error:
            self._shared.fault("end", layer, error)
        return output

    def _raised(self, call: Call | None, start_ns: int, raised: BaseException) -> None:
        shared = self._shared
        try:
            if isinstance(raised, torch.OutOfMemoryError) and shared.out_of_memory is None:
                shared.out_of_memory = self._layer.path
            # A checkpoint stops its recomputation by an exception, as soon as it has the tensors that it needs.
            if start_ns and isinstance(raised, StopRecomputation):
                shared.recomputed.append((self._layer, start_ns, shared.now_ns()))
            elif call is not None and call.region is not None:
                region, call.region = call.region, None
                region.__exit__(RuntimeError, None, None)
        except Exception as error:
            shared.fault("end", self._layer, error)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model is not timed, whichever way it is made."""
        return _nothing, ()


def _nothing() -> None:
    return None


def _untimed(make: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    def make_untimed(module: nn.Module) -> Any:
        replica = make(module)
        inner = replica.__dict__.get(SLOT)
        while isinstance(inner, TimedModule):
            inner = inner.before
            replica.__dict__[SLOT] = inner
        return replica

    return make_untimed


# nn.DataParallel copies a module's attributes, this one included, into replicas that have other parameters: they
# would call the original. While any layer is timed, the function that makes replicas leaves the attribute out.
_replicas = Watch(lambda: [(nn.Module, REPLICATE, _untimed)])
