"""What sees the events: functions in place of PyTorch's own, and PyTorch's hooks. Each is undone.

A function in place of another calls it, keeps its name, and leaves no frame in a traceback. ``torch.compile`` reads the
original.
"""

from __future__ import annotations

import functools
import sys
from concurrent.futures import Future
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
import torch.optim.optimizer as optim
from torch.utils.data import dataloader

from deep500_timing import TimeType
from deep500_timing.adapters import Replaced, after_import, warn_once
from deep500_timing_torch._autolog._steps import EVENTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing_torch._autolog._steps import Steps

    Function = Callable[..., Any]

_DCP = "torch.distributed.checkpoint"
_COMPILER = "torch._dynamo.trace_rules"
_SAVE_PARTS = (_DCP, "torch.storage")
_CHECKPOINTS = (
    ("safetensors.torch", "", ("save_file", "save_model")),
    ("transformers.modeling_utils", "PreTrainedModel", ("save_pretrained",)),
    ("peft.peft_model", "PeftModel", ("save_pretrained",)),
    (_DCP, "", ("save", "async_save")),
    (f"{_DCP}.state_dict_saver", "", ("save", "async_save")),
)
"""The functions that write a checkpoint: their module, their class if they have one, and their names."""
IO, BACKWARD, GRAD = (EVENTS[name] for name in (TimeType.IO.name, TimeType.BACKWARD.name, "autograd.grad"))


class Patches:
    """Tells the steps what happens, until it is undone."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._replaced = Replaced()
        self._while_evaluating = Replaced()
        self._undo: list[Callable[[], object]] = []
        self._epoch: Any = None
        self._epoch_ns = self._epoch_steps = 0
        self._comm: Any = None
        for register, tell in (
            (optim.register_optimizer_step_pre_hook, steps.begin_step),
            (optim.register_optimizer_step_post_hook, steps.end_step),
        ):
            self._undo.append(register(_hook(tell)).remove)
        self.put(dataloader._BaseDataLoaderIter, "__next__", self._next)
        self.put_after(dataloader.DataLoader, "__iter__", self._iterated)
        self.put(torch.autograd, "backward", self._backward)
        self.put(torch.autograd, "grad", self._grad)
        self.put(torch.nn.Module, "eval", self._eval)
        self.put(torch, "save", self._save)
        if torch.backends.cuda.is_built() or torch.backends.mps.is_built():  # type: ignore[no-untyped-call]
            for name in ("to", "cuda"):
                self.put_after(torch.Tensor, name, self._moved)
        for module, owner, names in _CHECKPOINTS:
            self._undo.append(after_import(module, functools.partial(self._put_saves, module, owner, names)))
        self._undo.append(after_import(_COMPILER, _hide_from_compiler))
        if torch.distributed.is_available():
            for place in (torch.distributed, torch.distributed.distributed_c10d):
                self.put_after(place, "init_process_group", self._joined)

    def put(self, owner: Any, name: str, make: Callable[[Function], Function], where: Replaced | None = None) -> None:
        """Put what ``make`` makes of a function in its place, until :meth:`undo`."""
        original = getattr(owner, name)
        ours = functools.wraps(original)(make(original))
        ours._torchdynamo_inline = original  # type: ignore[attr-defined]
        # Where another has replaced it since, ours stays below that, and does nothing once the log is closed.
        (self._replaced if where is None else where).put(owner, name, ours)

    def put_after(self, owner: Any, name: str, after: Function) -> None:
        """Have ``after(result, start_ns, *arguments)`` called after each call of a function, until :meth:`undo`."""
        self.put(owner, name, functools.partial(followed, after=after))

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._while_evaluating.undo()
        self._replaced.undo()
        if self._comm is not None:
            self._comm.undo()

    # --- data --------------------------------------------------------------------------------------------------------

    def _iterated(self, iterator: Any, begun_ns: int, _loader: Any) -> None:
        steps = self._steps
        if steps.is_here() and not steps.evaluates:
            steps.record("EPOCH (start)", begun_ns, perf_counter_ns())
            self._epoch, self._epoch_ns, self._epoch_steps = iterator, begun_ns, steps.steps

    def _next(self, original: Function) -> Function:
        steps, begin, end = self._steps, self._steps.begin, self._steps.end

        def fetch(iterator: Any) -> Any:
            state = begin(IO)
            if state < 0:
                return original(iterator)
            try:
                data = original(iterator)
            except BaseException as error:
                hide(error)
                if isinstance(error, StopIteration):
                    self._end_of_data(iterator, state)
                else:
                    steps.fail(state)
                raise
            end(state)
            return data

        return fetch

    def _end_of_data(self, iterator: Any, state: int) -> None:
        steps = self._steps
        if steps.end_of_data(state) and iterator is self._epoch:
            if steps.steps > self._epoch_steps:
                steps.record("EPOCH", self._epoch_ns, perf_counter_ns())
            self._epoch = None

    def _moved(self, moved: Any, begun_ns: int, tensor: Any, *_: Any) -> None:
        steps = self._steps
        if not steps.depth and moved is not tensor and steps.is_here() and moved.device != tensor.device:
            steps.copied(begun_ns)

    # --- backward ----------------------------------------------------------------------------------------------------

    def _backward(self, original: Function) -> Function:
        steps, begin, end = self._steps, self._steps.begin, self._steps.end

        def backward(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: Any = None,
            create_graph: Any = False,
            grad_variables: Any = None,
            inputs: Any = None,
        ) -> Any:
            # The arguments by their names: passing on `*args, **kwargs` costs more than all else here.
            state = begin(BACKWARD)
            if state < 0:
                return original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            try:
                result = original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            except BaseException as error:
                hide(error)
                steps.fail(state)
                raise
            end(state)
            return result

        return backward

    def _grad(self, original: Function) -> Function:
        steps = self._steps

        def grad(*args: Any, **kwargs: Any) -> Any:
            state = steps.begin(GRAD)
            if state < 0:
                return original(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                hide(error)
                steps.fail(state)
                raise
            steps.end(state)
            return result

        return grad

    # --- evaluation, checkpoints, ranks ------------------------------------------------------------------------------

    def _eval(self, original: Function) -> Function:
        steps = self._steps

        def evaluate(model: Any) -> Any:
            if steps.is_here():
                steps.begin_evaluation()
                # `train` is called for each module, so it is replaced during an evaluation alone.
                if steps.evaluates and not self._while_evaluating:
                    self.put(torch.nn.Module, "train", self._train, self._while_evaluating)
            return original(model)

        return evaluate

    def _train(self, original: Function) -> Function:
        def train(model: Any, mode: bool = True) -> Any:
            if mode:
                self._while_evaluating.undo()
                self._steps.end_evaluation()
            return original(model, mode)

        return train

    def _save(self, original: Function) -> Function:
        steps = self._steps

        def save(*args: Any, **kwargs: Any) -> Any:
            region = steps.regions["CHECKPOINT"]
            # A checkpoint of torch.distributed calls `torch.save` for its parts, on threads of its own too. So does
            # `pickle` for each tensor.
            if region.is_open or sys._getframe(1).f_globals.get("__name__", "").startswith(_SAVE_PARTS):
                return original(*args, **kwargs)
            if steps.is_here() and not steps.evaluates:
                steps.pause()
            begun_ns = perf_counter_ns()
            region.start()
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                hide(error)
                if region.is_open:
                    steps.timer.fail("CHECKPOINT")
                raise
            region.end()
            run = steps.log.run
            if run is not None:
                run.mark("checkpoint_saved", dur_s=(perf_counter_ns() - begun_ns) / 1e9)
            written = getattr(result, "upload_completion", result)
            if isinstance(written, Future):
                written.add_done_callback(lambda _: self._saved(begun_ns))
            return result

        return save

    def _saved(self, begun_ns: int) -> None:
        # An asynchronous checkpoint: the region is the part that the loop waited for.
        run = self._steps.log.run
        if run is not None:
            run.event("checkpoint", "written in the background", seconds=(perf_counter_ns() - begun_ns) / 1e9)

    def _put_saves(self, module: str, owner: str, names: tuple[str, ...]) -> None:
        found: Any = getattr(sys.modules[module], owner, None) if owner else sys.modules[module]
        for name in names:
            if hasattr(found, name):
                self.put(found, name, self._save)

    def _joined(self, *_: Any) -> None:
        # This process is a rank: time its communication from now on.
        if self._comm is not None:
            return
        try:
            from deep500_timing_torch import comm
            from deep500_timing_torch.comm import _build

            # The kernel where it has been built. It is not built here: that would be one more process.
            self._comm = comm.instrument(kernel=None if _build.library_path().exists() else False)
        except Exception as error:
            warn_once(f"Timing the communication failed: {type(error).__name__}: {error}. The rest is timed.")
        self._steps.log.begin()


def _hook(tell: Function) -> Function:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        tell(optimizer)

    hook._torchdynamo_inline = _no_hook  # type: ignore[attr-defined]
    return hook


def _no_hook(optimizer: Any, args: Any, kwargs: Any) -> None:
    pass


def _hide_from_compiler() -> None:
    # A model that is compiled before its first call is called through frames of ours.
    for name in ("_roots", "_steps"):
        sys.modules[_COMPILER].add(f"{__package__}.{name}")


def followed(original: Function, after: Function) -> Function:
    """A function that calls the original, and then ``after(result, start_ns, *arguments)``."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        begun_ns = perf_counter_ns()
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            hide(error)
            raise
        after(result, begun_ns, *args)
        return result

    return call


def hide(error: BaseException) -> None:
    """Take the frame that has caught an error off its traceback; a bare ``raise`` does not add it again."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
