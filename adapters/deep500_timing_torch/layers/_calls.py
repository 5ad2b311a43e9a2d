"""The forward pass: which layer is being called, by which, and on whose behalf.

A layer's region is opened by a hook before everything else that the module does, so that an FSDP unit's all-gather is
inside, and closed by one that runs after an exception as well. Names of regions tell the purpose of a call apart:
training, evaluation, and the recomputation of activations in the middle of a backward pass.

The two hooks are written without helpers where they run for every call of every layer: a call of a Python function
costs as much as opening and closing a region.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.checkpoint import _StopRecomputationError

from deep500_timing_torch.layers._backward import find_nodes
from deep500_timing_torch.layers._call import EVALUATION, FORWARD, RECOMPUTED, Call

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from torch import nn

    from deep500_timing_torch.layers._backward import BackwardMarks
    from deep500_timing_torch.layers._memory import MemoryLog
    from deep500_timing_torch.layers._select import Layer

_Tensor = torch.Tensor
_current_graph_task = torch._C._current_graph_task_id
_is_grad_enabled = torch.is_grad_enabled


class Calls:
    """What the hooks of one model share."""

    def __init__(
        self,
        root: nn.Module,
        region_of: Callable[[Layer, str], Any],
        marks: BackwardMarks,
        fault: Callable[[str, Layer, Exception], None],
        now_ns: Callable[[], int],
    ) -> None:
        """Start with no call under way.

        Args:
            root: The model, whose ``training`` says what a call is for.
            region_of: Makes a layer's region for a purpose.
            marks: Takes each call's inputs and outputs, for the backward pass.
            fault: Is told of a hook that failed.
            now_ns: The timer's clock.
        """
        self.now_ns = now_ns
        self.recomputed: list[tuple[Layer, int, int]] = []
        """Recomputations that have ended, to be recorded when the timer records again: it leaves out what a
        checkpoint repeats, so that no region is timed twice."""
        self.root = root
        self.region_of = region_of
        self.marks = marks
        self.fault = fault
        self.memory: MemoryLog | None = None
        """What reads the memory, if it is read."""
        self.out_of_memory: str | None = None
        """The innermost layer in which the device ran out of memory."""
        self.of_thread = _Thread()

    def hooks_of(self, layer: Layer) -> tuple[_Before, _After]:
        """What to call before and after a layer's module."""
        return _Before(self, layer), _After(self, layer)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: list[Call] = []


class _Before:
    """The hook before a module."""

    __slots__ = ("_layer", "_shared")

    def __init__(self, shared: Calls, layer: Layer) -> None:
        self._shared = shared
        self._layer = layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_dynamo_compiling():
            return
        layer = self._layer
        shared = self._shared
        try:
            calls = shared.of_thread.calls
            call = Call(layer, calls[-1] if calls else None)
            calls.append(call)
            if _current_graph_task() != -1:
                purpose = RECOMPUTED
            elif (shared.root if calls[0].layer.module is shared.root else module).training:
                purpose = FORWARD
            else:
                purpose = EVALUATION
            if purpose != EVALUATION and _is_grad_enabled():
                call.inputs = inputs = []
                for value in args:
                    if isinstance(value, _Tensor) and (node := value.grad_fn) is not None:
                        inputs.append(node)
                    else:
                        find_nodes(value, inputs)
                if kwargs:
                    find_nodes(kwargs, inputs)
            if purpose == RECOMPUTED:
                call.start_ns = shared.now_ns()
                return
            region = layer.handles.get(purpose)
            if region is None:
                region = shared.region_of(layer, purpose)
            if region.is_open and not _forget_interrupted(calls, module):
                return  # A module that calls itself has one time, the outer call's.
            if shared.memory is not None:
                shared.memory.begin(call, forward=True)
            call.region = region
            region.start()
        except Exception as error:
            shared.fault("start", layer, error)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model is not timed."""
        return _in_a_copy, ()


class _After:
    """The hook behind a module."""

    __slots__ = ("_layer", "_shared")

    def __init__(self, shared: Calls, layer: Layer) -> None:
        self._shared = shared
        self._layer = layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if is_dynamo_compiling():
            return
        layer = self._layer
        shared = self._shared
        try:
            calls = shared.of_thread.calls
            while calls:
                call = calls.pop()
                if call.layer is layer:
                    break
                _fail(call)  # An exception that hooks do not see, such as Ctrl-C, left it there.
            else:
                return  # Attached while the module ran.
            region = call.region
            error = call.error
            call.error = None
            if output is None and (raised := sys.exception()) is not error:
                if isinstance(raised, torch.OutOfMemoryError) and shared.out_of_memory is None:
                    shared.out_of_memory = layer.path
                # A checkpoint stops its recomputation by an exception, as soon as it has what it needs.
                if call.start_ns and isinstance(raised, _StopRecomputationError):
                    shared.recomputed.append((layer, call.start_ns, shared.now_ns()))
                    call.inputs = None
                else:
                    _fail(call)
            elif call.start_ns:
                shared.recomputed.append((layer, call.start_ns, shared.now_ns()))
                if call.inputs is not None:
                    shared.marks.mark(call, output)
            elif region is not None:
                call.region = None
                region.end()
                if shared.memory is not None:
                    shared.memory.end(call, forward=True, training=call.inputs is not None)
                if call.inputs is not None:
                    shared.marks.mark(call, output)
        except Exception as fault:
            shared.fault("end", layer, fault)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model is not timed."""
        return _in_a_copy, ()


def _forget_interrupted(calls: list[Call], module: nn.Module) -> bool:
    # An interrupt (Ctrl-C) runs no hook, so the calls that it ended are still there. The module is really under way
    # in a second call only if the interpreter is in two calls of it.
    under_way = 0
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals.get("self") is module:
            under_way += 1
        frame = frame.f_back
    if under_way > 1:
        return False
    first = next(place for place, call in enumerate(calls) if call.layer.module is module)
    interrupted = calls[first:-1]
    del calls[first:-1]
    calls[-1].parent = calls[-2] if len(calls) > 1 else None
    for call in reversed(interrupted):
        _fail(call)
    return True


_CALL = torch.nn.Module._call_impl.__code__


def _fail(call: Call) -> None:
    region = call.region
    call.region = call.inputs = call.error = None
    if region is not None:
        region.__exit__(RuntimeError, None, None)


def _in_a_copy() -> Any:
    return _ignore


def _ignore(*_arguments: object) -> None:
    """Stands for a hook in a copy of the model."""
