"""The passes of a model's layers that are under way, and where each backward pass begins and ends.

Autograd numbers its nodes in the order of their making, on each thread, and the engine runs the nodes of a graph in the
reverse order. The nodes of one call have the numbers that were given during the call, so its backward pass begins as
the engine reaches the first of them, and ends as it reaches a node with a lower number. Prehooks at chosen nodes tell
where the engine is: at the outputs of each call, and at the nodes just before each call. To find the latter, the graph
of a call is walked from its outputs as it returns; timed calls within it are stepped over.

A node that takes a leaf's gradient has no number, and runs as soon as it can, so it neither begins nor ends a pass. A
full backward hook of a module would cost 50 µs a call, fails with in-place modules, and ignores outputs in a dict.
"""

from __future__ import annotations

from _thread import get_ident
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from deep500_timing_torch.layers._private import current_graph_task, queue_callback
from deep500_timing_torch.layers._times import BACKWARD, RECOMPUTED

if TYPE_CHECKING:
    from torch import nn

    from deep500_timing_torch.layers._memory import MemoryLog
    from deep500_timing_torch.layers._select import Call, Layer

_KEY = "deep500_timing"
_LEAF = 2**64 - 1
"""The number of every node that takes a leaf's gradient."""
_Tensor = torch.Tensor
_PLAIN = frozenset((bool, int, float, str, type(None)))
"""Types of values that often stand next to tensors and hold none."""
_CONTAINERS = frozenset((list, tuple, dict))


@dataclass(slots=True, eq=False, repr=False)
class _NodeMarks:
    """The prehook of a node: the passes that begin there, and the number that ends others."""

    owner: Passes
    number: int
    caller: int
    """The thread that numbered it."""
    begin: tuple[Call, ...] = ()
    """Outer layers first."""

    def __call__(self, _gradients: object) -> None:
        """The engine has reached the node."""
        owner = self.owner
        if not owner.attached:
            return
        # Written without helpers, as for the forward pass.
        try:
            opened, number = owner.opened, self.number
            if opened and opened[-1].begin > number:
                thread = get_ident()
                for call in opened[::-1]:  # Inner layers first.
                    if call.begin > number and call.thread == thread and call.caller == self.caller:
                        owner.close(call)
            if not self.begin:
                return
            task = current_graph_task()
            if task not in owner.tasks:
                owner.tasks.add(task)
                queue_callback(partial(owner.end_task, task))
            for call in self.begin:
                if call.region is None:
                    call.task = task
                    call.thread = get_ident()
                    region = call.layer.handles.get(BACKWARD)
                    if region is None:
                        region = owner.region_of(call.layer, BACKWARD)
                    if region.is_open:
                        if any(other.region is region for other in opened):
                            owner.untimed += 1
                            continue
                        region.__exit__(RuntimeError, None, None)  # A pass that raised left it open on this thread.
                    if owner.memory is not None:
                        owner.memory.begin(call, forward=False)
                    call.region = region
                    opened.append(call)
                    region.start()
        except Exception as error:
            layer = self.begin[0].layer if self.begin else None
            owner.fault("backward pass", layer, error)


class Passes:
    """State that the timed layers of one model share.

    Args:
        root: The model.
        timer: Opens and records their regions.
        gpu: Whether the regions are timed on the device as well.
        fault: Called with what failed, the layer and the error.
        memory: Reads the device's memory as passes begin and end.
    """

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
        self.fault = fault
        self.memory = memory
        self.now_ns: Callable[[], int] = timer.now_ns
        self.attached = False
        self.untimed = 0
        """Backward passes of layers that were left out: they ended on another thread than they began on, another call
        of the same layer was in its backward pass, or the model was called again before they ended."""
        self.out_of_memory: str | None = None
        """The innermost layer in which the device ran out of memory."""
        self.opened: list[Call] = []
        """The calls whose backward pass is under way."""
        self.tasks: set[int] = set()
        """The engine's tasks that are under way and have met a layer."""
        self.recomputed: list[tuple[Layer, int, int]] = []
        """Recomputations that have ended, to be recorded when the timer records again: during a recomputation it
        records nothing, so that no region is timed twice."""
        self._timer = timer
        self._gpu = gpu

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

    # --- backward -----------------------------------------------------------------------------------------------------

    def mark(self, call: Call, output: Any) -> None:
        """Note the nodes of a call that has returned."""
        parent, call.parent = call.parent, None
        begin = call.begin
        # Few containers: the collector counts them, and runs in the midst of training.
        if isinstance(output, _Tensor):
            nodes: Any = () if (node := output.grad_fn) is None else (node,)
        else:
            find_nodes(output, nodes := {})
        outputs: list[int] = []
        for node in nodes:
            number = node._sequence_nr()
            if number >= begin:  # Otherwise it was handed through, and is no work of the layer's.
                marks = self._marks_of(node, number, call)
                marks.begin = (call, *marks.begin) if marks.begin else (call,)
                outputs.append(number)
        call.outputs = outputs
        children, call.children = call.children, None
        if outputs:
            if children:
                made = [node for node in nodes if node._sequence_nr() >= begin]
                self._mark_before(call, children, made, is_outermost=parent is None)
            elif parent is None:
                for node in call.inputs:
                    self._marks_of(node, node._sequence_nr(), call)
            children = [call]
        if parent is None:
            call.inputs = {}
        elif parent.children is None:
            parent.children = children
        elif children:
            parent.children += children

    def _mark_before(self, call: Call, children: list[Call], todo: list[Any], *, is_outermost: bool) -> None:
        # Marks the node just before each child; of the outermost call also those before itself.
        begins = [child.begin for child in children]
        reached: set[int] = set()
        numbers: set[int] = set()
        own: dict[int, Any] = {}
        while todo:
            node = todo.pop()
            number = node._sequence_nr()
            if number == _LEAF or number in numbers:
                continue
            numbers.add(number)
            place = bisect_right(begins, number) - 1
            if place >= 0 and number < children[place].end:
                child = children[place]
                if number not in child.outputs:  # Such as an auxiliary loss that is kept on the module.
                    child.outputs.append(number)
                    marks = self._marks_of(node, number, call)
                    marks.begin = (child, *marks.begin)
                if place not in reached:
                    reached.add(place)
                    todo += child.inputs
                continue
            own[number] = node
            if number >= call.begin:
                todo += [following for following, _ in node.next_functions if following is not None]
        in_order = sorted(numbers)
        for place in reached:
            before = bisect_left(in_order, begins[place]) - 1
            if before >= 0 and (node := own.get(in_order[before])) is not None:
                self._marks_of(node, in_order[before], call)
        if is_outermost:
            for number, node in own.items():
                if number < call.begin:
                    self._marks_of(node, number, call)
        for child in children:
            child.inputs = {}

    def _marks_of(self, node: Any, number: int, call: Call) -> _NodeMarks:
        metadata: dict[str, Any] = node.metadata
        marks: _NodeMarks | None = metadata.get(_KEY)
        if marks is None or marks.owner is not self:
            marks = metadata[_KEY] = _NodeMarks(self, number, call.caller)
            node.register_prehook(marks)
        return marks

    def close(self, call: Call) -> None:
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
        """End the passes that a backward pass which raised left open: its thread calls a model again."""
        for call in self.opened[::-1]:
            if call.caller == caller:
                self.opened.remove(call)
                self.tasks.discard(call.task)
                region, call.region = call.region, None
                if call.thread == get_ident():
                    region.__exit__(RuntimeError, None, None)
                else:
                    self.untimed += 1  # The pass goes on, on another thread.

    def end_task(self, task: int) -> None:
        # A reentrant checkpoint runs its own task within that of the whole pass.
        self.tasks.discard(task)
        for call in self.opened[::-1]:  # Inner layers first, so that they lie within their own.
            if call.task == task:
                try:
                    self.close(call)
                except Exception as error:
                    self.fault("backward pass", call.layer, error)
        self.record_recomputed()


def find_nodes(value: Any, nodes: dict[Any, None], seen: dict[int, Any] | None = None) -> None:
    """Add the autograd nodes that made the tensors in ``value``, which may hold them in containers."""
    parts: Any
    if isinstance(value, (list, tuple)):
        parts = value
    elif isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, _Tensor):
        parts = (value,)
    elif hasattr(type(value), "__dataclass_fields__"):
        parts = [getattr(value, name) for name in value.__dataclass_fields__]
    else:
        return
    for one in parts:
        kind = type(one)
        if kind in _PLAIN:
            continue
        if kind not in _CONTAINERS and isinstance(one, _Tensor):
            node = one.grad_fn
            if node is not None:
                nodes[node] = None
            continue
        if seen is None:
            seen = {id(value): value}
        if id(one) not in seen:
            seen[id(one)] = one
            find_nodes(one, nodes, seen)
