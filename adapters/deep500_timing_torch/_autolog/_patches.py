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
from torch.compiler import is_dynamo_compiling
from torch.utils.data import dataloader

from deep500_timing.adapters import after_import, warn_once
from deep500_timing_torch._autolog._steps import EVENTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing_torch._autolog._steps import Steps

_CHECKPOINTS = (
    ("safetensors.torch", "safetensors.torch", ("save_file", "save_model")),
    ("transformers.modeling_utils", "transformers.modeling_utils.PreTrainedModel", ("save_pretrained",)),
    ("peft.peft_model", "peft.peft_model.PeftModel", ("save_pretrained",)),
    ("torch.distributed.checkpoint", "torch.distributed.checkpoint", ("save", "async_save")),
    ("torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict_saver", ("save", "async_save")),
)
"""What writes a checkpoint: the module to wait for, the owner, and its functions."""
_ABSENT = object()
IO, BACKWARD, GRAD = (EVENTS[name] for name in ("IO", "BACKWARD", "autograd.grad"))


class Patches:
    """Tells the steps what happens, until it is undone."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._undo: list[Callable[[], object]] = []
        self._epoch: Any = None
        self._epoch_ns = self._epoch_steps = 0
        self._comm: Any = None
        before, after = _hooks(steps)
        self._undo.append(optim.register_optimizer_step_pre_hook(before).remove)
        self._undo.append(optim.register_optimizer_step_post_hook(after).remove)
        self.put(dataloader._BaseDataLoaderIter, "__next__", self._next)
        self.put(dataloader.DataLoader, "__iter__", self._iter)
        self.put(torch.autograd, "backward", self._backward)
        self.put(torch.autograd, "grad", self._grad)
        self.put(torch.nn.Module, "eval", self._eval)
        self.put(torch, "save", self._save)
        if torch.backends.cuda.is_built() or torch.backends.mps.is_built():  # type: ignore[no-untyped-call]
            for name in ("to", "cuda"):
                self.put(torch.Tensor, name, self._to)
        for module, place, names in _CHECKPOINTS:
            self._undo.append(after_import(module, functools.partial(self._put_saves, place, names)))
        if torch.distributed.is_available():
            owner: Any
            for owner in (torch.distributed, torch.distributed.distributed_c10d):
                self.put(owner, "init_process_group", self._join)

    def put(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put what ``make`` makes of a function in its place, until :meth:`undo`."""
        before = vars(owner).get(name, _ABSENT)
        original = getattr(owner, name)
        ours = functools.wraps(original)(make(original))
        ours._torchdynamo_inline = original  # type: ignore[attr-defined]
        setattr(owner, name, ours)

        def undo() -> None:
            if vars(owner).get(name) is not ours:
                return  # patched by another meanwhile; ours stays below it, and does nothing once the log is closed
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undo.append(undo)

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()
        if self._comm is not None:
            self._comm.undo()

    # --- data --------------------------------------------------------------------------------------------------------

    def _iter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        steps = self._steps

        def iterate(loader: Any) -> Any:
            begun_ns = perf_counter_ns()
            try:
                iterator = original(loader)
            except BaseException as error:
                hide(error)
                raise
            if steps.is_here() and not steps.evaluates:
                steps.record("EPOCH (start)", begun_ns, perf_counter_ns())
                self._epoch, self._epoch_ns, self._epoch_steps = iterator, begun_ns, steps.steps
            return iterator

        return iterate

    def _next(self, original: Callable[..., Any]) -> Callable[..., Any]:
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
                    self._end_of_data(iterator, state > 0)
                else:
                    steps.fail(IO, state)
                raise
            end(IO, state)
            return data

        return fetch

    def _end_of_data(self, iterator: Any, here: bool) -> None:
        steps = self._steps
        steps.end_of_data(here)
        if here and iterator is self._epoch:
            if steps.steps > self._epoch_steps:
                steps.record("EPOCH", self._epoch_ns, perf_counter_ns())
            self._epoch = None

    def _to(self, original: Callable[..., Any]) -> Callable[..., Any]:
        steps = self._steps

        def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            begun_ns = perf_counter_ns()
            try:
                moved = original(tensor, *args, **kwargs)
            except BaseException as error:
                hide(error)
                raise
            if not steps.depth and moved is not tensor and steps.is_here() and moved.device != tensor.device:
                steps.copied(begun_ns)
            return moved

        return to

    # --- backward and optimizers -------------------------------------------------------------------------------------

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
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
                steps.fail(BACKWARD, state)
                raise
            end(BACKWARD, state)
            return result

        return backward

    def _grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        steps = self._steps

        def grad(*args: Any, **kwargs: Any) -> Any:
            state = steps.begin(GRAD)
            if state < 0:
                return original(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                hide(error)
                steps.fail(GRAD, state)
                raise
            steps.end(GRAD, state)
            return result

        return grad

    # --- evaluation, checkpoints, ranks ------------------------------------------------------------------------------

    def _eval(self, original: Callable[..., Any]) -> Callable[..., Any]:
        module: Any = torch.nn.Module
        steps, train = self._steps, module.train

        def timed_train(model: Any, mode: bool = True) -> Any:
            if mode:
                module.train = train
                steps.end_evaluation()
            return train(model, mode)

        def evaluate(model: Any) -> Any:
            if steps.is_here():
                steps.begin_evaluation()
                if steps.evaluates and module.train is train:  # not in place for longer: it is called for each module
                    module.train = functools.wraps(train)(timed_train)
            return original(model)

        def put_back() -> None:
            if getattr(module.train, "__wrapped__", None) is train:
                module.train = train

        self._undo.append(put_back)
        return evaluate

    def _save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        steps = self._steps

        def save(*args: Any, **kwargs: Any) -> Any:
            region = steps.regions["CHECKPOINT"]
            if region.is_open:
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
            if isinstance(result, Future):
                result.add_done_callback(lambda _: self._saved(begun_ns))
            return result

        return save

    def _saved(self, begun_ns: int) -> None:
        # An asynchronous checkpoint: the region is the part that the loop waited for.
        run = self._steps.log.run
        if run is not None:
            run.event("checkpoint", "written in the background", seconds=(perf_counter_ns() - begun_ns) / 1e9)

    def _put_saves(self, owner: str, names: tuple[str, ...]) -> None:
        module, _, inside = owner.rpartition(".")
        found: Any = sys.modules.get(owner)
        if found is None:
            found = getattr(sys.modules.get(module), inside, None)
        for name in names:
            if hasattr(found, name):
                self.put(found, name, self._save)

    def _join(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                hide(error)
                raise
            self.join()
            return result

        return init_process_group

    def join(self) -> None:
        """Time the communication of this rank from now on."""
        if self._comm is not None:
            return
        try:
            from deep500_timing_torch import comm
            from deep500_timing_torch.comm._kernel import _build

            # The kernel where it has been built. It is not built here: that would be one more process.
            self._comm = comm.instrument(kernel=None if _build.library_path().exists() else False)
        except Exception as error:
            warn_once(f"Timing the communication failed: {type(error).__name__}: {error}. The rest is timed.")
        self._steps.log.begin()


def _hooks(steps: Steps) -> tuple[Callable[..., None], Callable[..., None]]:
    begin, end = steps.begin_step, steps.end_step

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_dynamo_compiling():
            begin(optimizer)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_dynamo_compiling():
            end(optimizer)

    return before, after


def hide(error: BaseException) -> None:
    """Take the frame that has caught an error off its traceback; a bare ``raise`` does not add it again."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
