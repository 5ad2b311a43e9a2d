"""What sees the events: functions in place of PyTorch's own, and PyTorch's hooks. Each is undone.

A function in place of another calls it, keeps its name, and leaves no frame in a traceback. ``torch.compile`` reads the
original.
"""

from __future__ import annotations

import functools
import sys
import threading
from concurrent.futures import Future
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.optim.optimizer as optim
from torch.utils.data import dataloader

from deep500_timing.adapters import Replaced, after_import, warn_once
from deep500_timing.loop import INSIDE, IO, Loop, Loops
from deep500_timing_torch._autolog._engine import hide, timed_engine

if TYPE_CHECKING:
    from collections.abc import Callable

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


class Patches:
    """Tells the loops what happens, until it is undone."""

    def __init__(self, loops: Loops) -> None:
        self._loops = loops
        self._replaced = Replaced()
        self._undo: list[Callable[[], object]] = []
        self._comm: Any = None
        for register, tell in (
            (optim.register_optimizer_step_pre_hook, loops.begin_step),
            (optim.register_optimizer_step_post_hook, loops.end_step),
        ):
            self._undo.append(register(_hook(tell)).remove)
        self.put(dataloader._BaseDataLoaderIter, "__next__", self._next)
        self.put_after(
            dataloader.DataLoader, "__iter__", lambda made, begun_ns, _: loops.here().begin_data(id(made), begun_ns)
        )
        self.put_after(dataloader._BaseDataLoaderIter, "__init__", self._made)
        self._replaced.put(torch.autograd.Variable, "_execution_engine", timed_engine(loops))
        self.put(torch.nn.Module, "train", self._train)
        self.put(torch.amp.GradScaler, "step", self._scaled_step)
        self.put(torch, "save", self._save)
        self._captures: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """By captured graph: the state of its capture, then whether it steps an optimizer."""
        self.put_after(torch.cuda.CUDAGraph, "capture_begin", self._capture_began)
        self.put(torch.cuda.CUDAGraph, "capture_end", self._captured)
        self.put(torch.cuda.CUDAGraph, "replay", self._replay)
        if torch.backends.cuda.is_built() or torch.backends.mps.is_built():  # type: ignore[no-untyped-call]
            for name in ("to", "cuda"):
                self.put_after(torch.Tensor, name, self._moved)
        for module, owner, names in _CHECKPOINTS:
            self._undo.append(after_import(module, functools.partial(self._put_saves, module, owner, names)))
        self._undo.append(after_import(_COMPILER, _hide_from_compiler))
        if loops.log is not None and torch.distributed.is_available():
            for place in (torch.distributed, torch.distributed.distributed_c10d):
                self.put_after(place, "init_process_group", self._joined)

    def put(self, owner: Any, name: str, make: Callable[[Function], Function]) -> None:
        """Put what ``make`` makes of a function in its place, until :meth:`undo`."""
        original = getattr(owner, name)
        ours = functools.wraps(original)(make(original))
        ours._torchdynamo_inline = original  # type: ignore[attr-defined]
        # Where another has replaced it since, ours stays below that, and does nothing once the log is closed.
        self._replaced.put(owner, name, ours)

    def put_after(self, owner: Any, name: str, after: Function) -> None:
        """Have ``after(result, start_ns, *arguments)`` called after each call of a function, until :meth:`undo`."""
        self.put(owner, name, functools.partial(followed, after=after, now_ns=self._loops.timer.now_ns))

    @property
    def sees_buckets(self) -> bool:
        """Whether the kernel times each operation, those of DDP included."""
        return self._comm is not None and self._comm.kernel

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._replaced.undo()
        if self._comm is not None:
            self._comm.undo()

    # --- data --------------------------------------------------------------------------------------------------------

    def _made(self, _result: None, begun_ns: int, iterator: Any, loader: Any, *_: Any) -> None:
        # A class with another `__iter__`, as torchdata's StatefulDataLoader, makes its iterators there.
        if type(loader).__iter__ is not dataloader.DataLoader.__iter__:
            self._loops.here().begin_data(id(iterator), begun_ns)

    def _next(self, original: Function) -> Function:
        begin, end, here = self._loops.begin, self._loops.end, self._loops.here

        def fetch(iterator: Any) -> Any:
            state = begin(IO)
            try:
                data = original(iterator)
            except BaseException as error:
                hide(error)
                if isinstance(error, StopIteration):
                    here().end_of_data(state, id(iterator))
                else:
                    here().fail(state)
                raise
            end(state)
            return data

        return fetch

    def _moved(self, moved: Any, begun_ns: int, tensor: Any, *_: Any) -> None:
        if moved is not tensor:
            loop = self._loops.here()
            if not loop.depth and moved.device != tensor.device:
                loop.copied(begun_ns)

    # --- steps, evaluation, checkpoints, ranks -----------------------------------------------------------------------

    def _scaled_step(self, original: Function) -> Function:
        loops = self._loops

        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            loop = loops.here()
            before = loop.stepped
            result = original(scaler, optimizer, *args, **kwargs)
            if loop.stepped == before and scaler.is_enabled():
                loop.skip_step(optimizer)
            return result

        return step

    def _capture_began(self, _result: None, _begun_ns: int, graph: Any, *_: Any) -> None:
        self._captures[graph] = self._loops.here().begin_capture()

    def _captured(self, original: Function) -> Function:
        def capture_end(graph: Any) -> None:
            if graph in self._captures:
                self._captures[graph] = self._loops.here().end_capture(self._captures[graph])
            original(graph)

        return capture_end

    def _replay(self, original: Function) -> Function:
        def replay(graph: Any) -> Any:
            loop = self._loops.here()
            state = loop.begin_replay(graph) if self._captures.get(graph) else INSIDE
            if state == INSIDE:
                return original(graph)
            try:
                original(graph)
            except BaseException as error:
                hide(error)
                loop.fail(state)
                raise
            return loop.end_replay(graph)

        return replay

    def _train(self, original: Function) -> Function:
        # `eval` calls it, and so does a class that replaces `eval`. It calls itself for each module inside.
        switching = threading.local()

        def train(model: Any, mode: bool = True) -> Any:
            if getattr(switching, "is_on", False):
                return original(model, mode)
            loop = self._loops.here()
            if mode:
                loop.end_evaluation()
            else:
                loop.begin_evaluation()
            switching.is_on = True
            try:
                return original(model, mode)
            finally:
                switching.is_on = False

        return train

    def _save(self, original: Function) -> Function:
        loops = self._loops

        def save(*args: Any, **kwargs: Any) -> Any:
            region = loops.regions["CHECKPOINT"]
            # A checkpoint of torch.distributed calls `torch.save` for its parts, on threads of its own too. So does
            # `pickle` for each tensor.
            if region.is_open or sys._getframe(1).f_globals.get("__name__", "").startswith(_SAVE_PARTS):
                return original(*args, **kwargs)
            loops.here().pause()
            begun_ns = perf_counter_ns()
            region.start()
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                hide(error)
                if region.is_open:
                    loops.timer.fail("CHECKPOINT")
                raise
            region.end()
            run = loops.timer.run
            if run is not None:
                run.mark("checkpoint_saved", dur_s=(perf_counter_ns() - begun_ns) / 1e9)
            written = getattr(result, "upload_completion", result)
            if isinstance(written, Future):
                written.add_done_callback(lambda _: self._saved(begun_ns))
            return result

        return save

    def _saved(self, begun_ns: int) -> None:
        # An asynchronous checkpoint: the region is the part that the loop waited for.
        run = self._loops.timer.run
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
        self._loops.log.begin()


def _hook(tell: Callable[[object], None]) -> Function:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        tell(optimizer)

    hook._torchdynamo_inline = lambda optimizer, args, kwargs: None  # type: ignore[attr-defined]
    return hook


def _hide_from_compiler() -> None:
    # A model that is compiled before its first call is called through frames of ours.
    for module in (timed_engine.__module__, f"{__package__}._roots", Loop.__module__, Loops.__module__):
        sys.modules[_COMPILER].add(module)


def followed(original: Function, after: Function, now_ns: Callable[[], int] = perf_counter_ns) -> Function:
    """A function that calls the original, and then ``after(result, start_ns, *arguments)``, by the timer's clock."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        begun_ns = now_ns()
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            hide(error)
            raise
        after(result, begun_ns, *args)
        return result

    return call
