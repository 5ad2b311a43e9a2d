"""The engine of ``autograd`` in place of PyTorch's: each backward pass goes through it, wherever it starts."""

from __future__ import annotations

from typing import Any

import torch

from deep500_timing.loop import BACKWARD, GRAD, Loops


def timed_engine(loops: Loops) -> Any:
    """An engine that tells when a pass begins and ends.

    ``torch.autograd.backward`` and ``grad`` call it, and schedules of pipelines without these. It has PyTorch's own
    class as its base.
    """
    engine: Any = type(torch.autograd.Variable._execution_engine)
    begin, end, here, original = loops.begin, loops.end, loops.here, engine.run_backward

    class Engine(engine):  # type: ignore[misc]
        def run_backward(
            self,
            tensors: Any,
            grad_tensors: Any,
            keep_graph: bool,
            create_graph: bool,
            inputs: Any = (),
            allow_unreachable: bool = False,
            accumulate_grad: bool = False,
        ) -> Any:
            # The arguments by their names: passing on `*args, **kwargs` costs more than all else here.
            state = begin(BACKWARD if accumulate_grad else GRAD)
            try:
                result = original(
                    self, tensors, grad_tensors, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad
                )
            except BaseException as error:
                hide(error)
                here().fail(state)
                raise
            end(state)
            return result

    return Engine()


def hide(error: BaseException) -> None:
    """Take the frame that has caught an error off its traceback; a bare ``raise`` does not add it again."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
