"""The private names of PyTorch that layer timing uses, and a check that they behave as expected."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

SLOT = "_compiled_call_impl"
"""The attribute of a module that is called in place of the module's own call."""
REPLICATE = "_replicate_for_data_parallel"
sequence_nr: Any = getattr(torch.autograd, "_get_sequence_nr", None)
"""The number of the next autograd node of the calling thread."""
current_graph_task: Any = getattr(torch._C, "_current_graph_task_id", None)
"""The engine's task that runs on the calling thread; -1 outside a backward pass."""
StopRecomputation: Any = getattr(checkpoint, "_StopRecomputationError", ())
_engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
queue_callback: Any = getattr(_engine, "queue_callback", None)
"""Has a function called when the engine's task ends that runs on the calling thread."""


@functools.cache
def check() -> None:
    """Check once that this PyTorch numbers its autograd nodes and calls modules as layer timing needs it."""
    missing = None
    try:
        missing = _difference()
    except Exception as error:
        missing = f"{type(error).__name__}: {error}"
    if missing is not None:
        raise RuntimeError(
            f"Timing layers with PyTorch {torch.__version__}: {missing}. Wrong times would be the result, so none are "
            "taken. Use a PyTorch that this version of deep500-timing was tested with, see docs/layers.md."
        )


def _difference() -> str | None:
    for name, found in (
        ("torch.autograd._get_sequence_nr", sequence_nr),
        ("torch._C._current_graph_task_id", current_graph_task),
        ("Variable._execution_engine.queue_callback", queue_callback),
        ("torch.nn.Module._replicate_for_data_parallel", getattr(nn.Module, REPLICATE, None)),
        ("torch.utils.checkpoint._StopRecomputationError", StopRecomputation),
    ):
        if not found:
            return f"it has no {name}"
    seen: list[object] = []

    class Probe(nn.Module):
        def forward(self, value: Any) -> Any:
            return value * 2

    probe = Probe()

    def call(value: Any) -> Any:
        seen.append("called")
        return probe.forward(value)

    probe.__dict__[SLOT] = call
    with torch.inference_mode(False), torch.enable_grad():
        value = torch.ones((), device="cpu", requires_grad=True)
        before = sequence_nr()
        first = probe(value)
        between = sequence_nr()
        node, last = first.grad_fn, (first + 1).grad_fn
        if seen != ["called"]:
            return f"a module is not called by its {SLOT}"
        if not before <= node._sequence_nr() < between <= last._sequence_nr() < sequence_nr():
            return "autograd nodes are not numbered in the order of their making"
        if current_graph_task() != -1:
            return "torch._C._current_graph_task_id is not -1 outside a backward pass"
        node.register_prehook(lambda gradients: seen.append("reached"))
        torch.autograd.grad(first, value)
    return None if seen == ["called", "reached"] else "the prehook of an autograd node is not called"
