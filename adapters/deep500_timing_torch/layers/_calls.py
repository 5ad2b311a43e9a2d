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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.jit import _recursive

from deep500_timing.adapters import Watch
from deep500_timing_torch.layers._passes import Passes, find_nodes
from deep500_timing_torch.layers._private import (
    REPLICATE,
    SLOT,
    StopRecomputation,
    check,
    current_graph_task,
    sequence_nr,
)
from deep500_timing_torch.layers._select import Call, Layer, is_keras
from deep500_timing_torch.layers._times import EVALUATION, FORWARD, RECOMPUTED

_Tensor = torch.Tensor
_is_grad_enabled = torch.is_grad_enabled


def attach(passes: Passes, layers: Sequence[Layer]) -> list[TimedModule]:
    """Stand before the module of each layer."""
    check()
    of_thread = _Thread()
    attached = [TimedModule(passes, layer, of_thread) for layer in layers]
    for layer, timed in zip(layers, attached, strict=True):
        layer.handles = {}
        layer.module.__dict__[SLOT] = timed
    passes.attached = True
    _replicas.__enter__()
    return attached


def detach(passes: Passes, attached: list[TimedModule]) -> None:
    passes.attached = False
    _replicas.__exit__()
    for timed in attached:
        timed.attached = False
        attributes = timed.module.__dict__
        # Another timer that was attached later may stand before this one, and outlive it.
        inner = attributes.get(SLOT)
        while isinstance(inner, TimedModule) and not inner.attached:
            inner = inner.before
        if inner is None:
            attributes.pop(SLOT, None)
        else:
            attributes[SLOT] = inner


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
        "_of_thread",
        "_passes",
        "attached",
        "before",
        "is_root",
        "module",
    )

    def __init__(self, passes: Passes, layer: Layer, of_thread: _Thread) -> None:
        self.module = layer.module
        self.before: Any = layer.module.__dict__.get(SLOT)
        """What stood there before; None for the module's own call."""
        self.attached = True
        self.is_root = layer.module is passes.root
        self._call_module: Callable[..., Any] = self.before or layer.module._call_impl
        self._is_symbolic = _symbolic_of_keras() if is_keras(passes.root) else None
        """Says whether the model is being called for the shapes alone, which is no step; None if it never is."""
        self._layer = layer
        self._passes = passes
        self._of_thread = of_thread

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
                elif (self._passes.root if of_root else self.module).training:
                    purpose = FORWARD
                else:
                    purpose = EVALUATION
                if parent is None and self._passes.opened and purpose is not RECOMPUTED:
                    self._passes.fail_of(of_thread.ident)
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
                    start_ns = self._passes.now_ns()
                else:
                    region = layer.handles.get(purpose)
                    if region is None:
                        region = self._passes.region_of(layer, purpose)
                    if region.is_open and call.is_repeated():
                        region = None  # A module that calls itself has one time, the outer call's.
                    else:
                        if self._passes.memory is not None:
                            self._passes.memory.begin(call, forward=True)
                        call.region = region
                        region.start()
            except Exception as error:
                self._passes.fault("start", layer, error)
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
                if self._passes.memory is not None:
                    self._passes.memory.end(call, forward=True, training=inputs is not None)
            elif start_ns:
                self._passes.recomputed.append((layer, start_ns, self._passes.now_ns()))
            elif parent is not None and call.children:
                parent.children = [*(parent.children or ()), *call.children]
            if inputs is not None and (region is not None or start_ns):
                self._passes.mark(call, output)
        except Exception as error:
            self._passes.fault("end", layer, error)
        return output

    def _raised(self, call: Call | None, start_ns: int, raised: BaseException) -> None:
        passes = self._passes
        try:
            if isinstance(raised, torch.OutOfMemoryError) and passes.out_of_memory is None:
                passes.out_of_memory = self._layer.path
            # A checkpoint stops its recomputation by an exception, as soon as it has the tensors that it needs.
            if start_ns and isinstance(raised, StopRecomputation):
                passes.recomputed.append((self._layer, start_ns, passes.now_ns()))
            elif call is not None and call.region is not None:
                region, call.region = call.region, None
                region.__exit__(RuntimeError, None, None)
        except Exception as error:
            passes.fault("end", self._layer, error)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model is not timed, whichever way it is made."""
        return type(None), ()


def beneath(module: nn.Module) -> Any:
    """What is called in place of a module's own call, below the timing of layers; None if nothing is."""
    inner = module.__dict__.get(SLOT)
    while isinstance(inner, TimedModule):
        inner = inner.before
    return inner


def _untimed(make: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    def make_untimed(module: nn.Module) -> Any:
        replica = make(module)
        if SLOT in replica.__dict__:
            replica.__dict__[SLOT] = beneath(replica)
        return replica

    return make_untimed


def _unseen(read: Callable[..., Any]) -> Callable[..., Any]:
    def read_unseen(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        timed = module.__dict__.pop(SLOT, None)
        try:
            return read(module, *args, **kwargs)
        finally:
            if timed is not None:
                module.__dict__[SLOT] = timed

    return read_unseen


# nn.DataParallel copies a module's attributes, this one included, into replicas that have other parameters: they
# would call the original. While any layer is timed, the function that makes replicas leaves the attribute out.
# TorchScript reads the types of all attributes, and knows none of this one: it does not see it.
_replicas = Watch(lambda: [(nn.Module, REPLICATE, _untimed), (_recursive, "infer_concrete_type_builder", _unseen)])
