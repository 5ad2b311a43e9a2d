"""The backward pass of a layer: from the autograd node that made its output to the one that made its input.

A hook on a module's backward pass (``register_full_backward_hook``) costs 50 µs a module, raises with in-place modules
and never fires for outputs in a dict. A prehook of an autograd node has none of these faults: the engine calls it as
it reaches the node. A layer's backward pass begins as the engine reaches the node of one of its outputs, and ends as
it reaches the node of one of its inputs: nodes run in the reverse order of their making, so the first of these nodes
to be reached comes after all of the layer's own.

Layers that lie one behind the other share nodes, so there is one prehook a node and not two a layer. Two things end a
layer's pass before its input's node is reached, or without one: layers side by side have the same input, whose node
waits for all of them, so one ends where a layer begins that was called before it; and where the model's input needs no
gradient, the first layers end with the pass.
"""

from __future__ import annotations

from _thread import get_ident
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing_torch.layers._call import Call
    from deep500_timing_torch.layers._memory import MemoryLog
    from deep500_timing_torch.layers._select import Layer

_KEY = "deep500_timing"
_current_graph_task = torch._C._current_graph_task_id
_Tensor = torch.Tensor
_AccumulateGrad: Any = vars(torch._C)["_functions"].AccumulateGrad
_functions_overridden = torch._C._len_torch_function_stack
_carriers = [torch.empty(0, device="cpu")]


class _NodeMarks:
    """Which calls' backward passes begin and end at one node; the prehook of that node."""

    __slots__ = ("begin", "end", "owner")

    def __init__(self, owner: BackwardMarks, begin: tuple[Call, ...]) -> None:
        self.owner = owner
        self.begin = begin
        """Outer layers first."""
        self.end: tuple[Call, ...] = ()
        """Inner layers first."""

    def ends(self, call: Call) -> None:
        """The node made an input of this call."""
        self.end = (*self.end, call)

    def __call__(self, _gradients: object) -> None:
        """The engine has reached the node."""
        owner = self.owner
        if not owner.attached:
            return
        # Written without helpers, as for the forward pass.
        try:
            thread = get_ident()
            opened = owner.opened
            for call in self.end:
                region = call.region
                if region is not None:
                    if call.thread == thread and owner.memory is None and opened[-1] is call:
                        call.region = None
                        del opened[-1]
                        region.end()
                    else:
                        owner.close(call)
            if not self.begin:
                return
            task = _current_graph_task()
            if task not in owner.tasks:
                owner.expect_end_of(task)
            for call in self.begin:
                if call.region is None:
                    call.task = task
                    call.thread = thread
                    if opened:
                        order = call.order
                        for other in opened:
                            if other.order > order:
                                owner.close_beside(call)
                                break
                    region = call.layer.backward
                    if region is None:
                        region = owner.region_of(call.layer)
                    if region.is_open and not owner.end_failed(region):
                        owner.untimed += 1
                        continue
                    if owner.memory is not None:
                        owner.memory.begin(call, forward=False)
                    call.region = region
                    opened.append(call)
                    region.start()
        except Exception as error:
            owner.fault("backward pass", (self.begin or self.end)[0].layer, error)


class _LeafMarks(_NodeMarks):
    """The marks of a node that takes a leaf's gradient: it outlives a step's graph, as under DDP, and keeps no call."""

    __slots__ = ("_calls",)

    def __init__(self, owner: BackwardMarks) -> None:
        super().__init__(owner, ())
        self._calls: list[ref[Call]] = []

    def ends(self, call: Call) -> None:
        """The leaf is an input of this call."""
        self._calls = [*(one for one in self._calls if one() is not None), ref(call)]

    def __call__(self, gradients: object) -> None:
        """The engine has reached the node."""
        self.end = tuple(call for one in self._calls if (call := one()) is not None)
        super().__call__(gradients)
        self.end = ()


class BackwardMarks:
    """Opens and closes the regions of layers as the autograd engine passes them."""

    def __init__(
        self,
        region_of: Callable[[Layer], Any],
        fault: Callable[[str, Layer, Exception], None],
        task_ended: Callable[[], None],
    ) -> None:
        """Start with no pass under way.

        Args:
            region_of: Makes the region of a layer's backward pass.
            fault: Is told of a prehook that failed.
            task_ended: Is called when the engine has ended one of its tasks.
        """
        self.region_of = region_of
        self.task_ended = task_ended
        self.fault = fault
        self.attached = True
        self.untimed = 0
        """Backward passes of layers that were left out: they ended on another thread than they began on, or another
        call of the same layer was in its backward pass."""
        self.memory: MemoryLog | None = None
        """What reads the memory, if it is read."""
        self.opened: list[Call] = []
        """Calls whose backward pass is under way."""
        self._last: tuple[Any, _NodeMarks] | None = None
        """The node that was marked last, and its marks, while the model that it is part of is being called."""
        self.tasks: set[int] = set()
        """The engine's tasks that are under way, as far as layers were met in them."""

    def mark(self, call: Call, inputs: list[Any], output: Any) -> None:
        """Note where the backward pass of a call that has returned will begin and end.

        Args:
            call: The call.
            inputs: The autograd nodes that made its inputs.
            output: What it returned.
        """
        last, self._last = self._last, None
        if isinstance(output, _Tensor) and (node := output.grad_fn) is not None:
            # What is handed through unchanged is no work of the layer's.
            if node in inputs:
                return
            if last is not None and last[0] is node:  # The last layer within this one returned it.
                marks = last[1]
                marks.begin = (call, *marks.begin)
            else:
                metadata: Any = node.metadata
                found: Any = metadata.get(_KEY) if metadata else None
                if found is None or found.owner is not self:
                    metadata[_KEY] = marks = _NodeMarks(self, (call,))
                    _hook(node, marks)
                else:
                    marks = found
                    marks.begin = (call, *marks.begin)
            if call.parent is not None:
                self._last = node, marks
        else:
            nodes: list[Any] = []
            find_nodes(output, nodes, leaves=False)
            nodes = [node for node in nodes if node not in inputs]
            if not nodes:
                return
            for node in nodes:
                marks = self._marks_of(node)
                marks.begin = (call, *marks.begin)
        for node in inputs:
            # Mostly it is the node that was marked last: asking a node for its marks takes longer than to compare.
            if last is not None and last[0] is node:
                marks = last[1]
                marks.end = (*marks.end, call)
            else:
                self._marks_of(node).ends(call)

    def _marks_of(self, node: Any) -> _NodeMarks:
        metadata: dict[str, Any] = node.metadata
        marks: _NodeMarks | None = metadata.get(_KEY)
        if marks is None or marks.owner is not self:
            if isinstance(node, _AccumulateGrad):
                marks = metadata[_KEY] = _LeafMarks(self)
                node.register_prehook(marks)
            else:
                marks = metadata[_KEY] = _NodeMarks(self, ())
                _hook(node, marks)
        return marks

    def forget_last(self) -> None:
        """A model raised: nothing of its graph is kept, which may be what the device's memory is full of."""
        self._last = None

    def expect_end_of(self, task: int) -> None:
        """A layer was met in a task of the engine's for the first time."""
        self.tasks.add(task)
        Variable._execution_engine.queue_callback(lambda: self._task_ended(task))

    def close_beside(self, call: Call) -> None:
        """End what was called after a call whose backward pass begins, and not within it."""
        for other in self.opened[::-1]:  # Inner layers first.
            if call.order < other.order and call.thread == other.thread and not other.is_within(call):
                self.close(other)

    def close(self, call: Call) -> None:
        """End the backward pass of a call."""
        region = call.region
        call.region = None
        self.opened.remove(call)
        if call.thread == get_ident():
            region.end()
            if self.memory is not None:
                self.memory.end(call, forward=False)
        else:
            self.untimed += 1  # A region belongs to the thread that began it; on this one it is not open.

    def fail_of(self, caller: int) -> None:
        """End what a backward pass left open that raised: its thread calls a model anew, and the engine said nothing.

        Args:
            caller: The thread.
        """
        for call in self.opened[::-1]:
            if call.caller == caller:
                self.opened.remove(call)
                self.tasks.discard(call.task)
                region, call.region = call.region, None
                if call.thread == get_ident():
                    region.__exit__(RuntimeError, None, None)

    def end_failed(self, region: Any) -> bool:
        """End a region that a pass left open which raised, on this thread of the engine's; False if it is under way."""
        if any(other.region is region for other in self.opened):
            return False
        region.__exit__(RuntimeError, None, None)
        return True

    def _task_ended(self, task: int) -> None:
        # A reentrant checkpoint runs a task of its own within that of the whole pass.
        self.tasks.discard(task)
        for call in self.opened[::-1]:  # Inner layers first, so that they lie within their own.
            if call.task == task:
                try:
                    self.close(call)
                except Exception as error:
                    self.fault("backward pass", call.layer, error)
        self.task_ended()


def _hook(node: Any, marks: _NodeMarks) -> None:
    # What Node.register_prehook takes over 1 µs for, a tensor's hooks do in 0.2: they belong to the node that made the
    # tensor, which takes all of them over at once, as a dict. So it takes them from a tensor of ours, and the user's is
    # not touched. One thread at a time has that; any other, and code that overrides what setting an attribute of a
    # tensor does, goes the long way.
    try:
        carrier = _carriers.pop()
    except IndexError:
        node.register_prehook(marks)
        return
    try:
        if _functions_overridden():
            node.register_prehook(marks)
        else:
            carrier._backward_hooks = {0: marks}
            node._register_hook_dict(carrier)
    finally:
        _carriers.append(carrier)


def find_nodes(value: Any, nodes: list[Any], *, leaves: bool = True) -> None:
    """Append the autograd nodes that made the tensors in ``value``, which may hold them in containers.

    Args:
        value: A tensor, or a container.
        nodes: Is appended to; each node is there once.
        leaves: Whether those count that take a leaf's gradient: no layer made a leaf.
    """
    if isinstance(value, _Tensor):
        if value.requires_grad:
            node = value.grad_fn
            if node is None:
                if not leaves:
                    return
                node = get_gradient_edge(value).node
            if node not in nodes:
                nodes.append(node)
    elif isinstance(value, (list, tuple)):
        for one in value:
            find_nodes(one, nodes, leaves=leaves)
    elif isinstance(value, dict):
        for one in value.values():
            find_nodes(one, nodes, leaves=leaves)
    elif hasattr(type(value), "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            find_nodes(getattr(value, name), nodes, leaves=leaves)
