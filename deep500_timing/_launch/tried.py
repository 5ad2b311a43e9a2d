"""A remedy that ``deep500-timing try`` tests: one parameter of a call that the program makes is set to another value.

The run has an event for each line of the program with such a call, and one without a line where the parameter is set
whatever the program calls. Nothing is written into the program's files.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
from functools import partial, reduce, wraps
from typing import TYPE_CHECKING, Any

from deep500_timing._base.patches import Replaced, after_import
from deep500_timing._base.settings import TRIED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LOADER = ("torch.utils.data.dataloader", "DataLoader.__init__")
_DDP = ("torch.nn.parallel.distributed", "DistributedDataParallel.__init__")
_OF_CALLS = {
    **dict.fromkeys(("num_workers", "persistent_workers", "prefetch_factor", "pin_memory"), _LOADER),
    **dict.fromkeys(("bucket_cap_mb", "gradient_as_bucket_view", "static_graph"), _DDP),
    **dict.fromkeys(("steps_per_execution", "jit_compile"), ("keras", "Model.compile")),
    "num_parallel_calls": ("tensorflow", "data.Dataset.map"),
}
"""Arguments of calls: the module whose import makes the call, and its name in there."""
_OF_TORCH = ("num_threads", "float32_matmul_precision", "cudnn.benchmark")
PARAMETERS = (*_OF_CALLS, *_OF_TORCH, "gc.freeze")
"""What can be set."""
_VALUES = {"True": True, "tf.data.AUTOTUNE": -1}
_OF_WORKERS = ("persistent_workers", "prefetch_factor", "timeout", "multiprocessing_context")
"""Arguments that a loader without workers does not take."""


class Tried:
    """Sets the parameter in this process, until it is undone.

    Args:
        log: The log of the process.
        text: ``PARAMETER=VALUE``, as ``num_workers=4``.
    """

    def __init__(self, log: Any, text: str) -> None:
        self._log = log
        self._replaced = Replaced()
        self._places: dict[str, str] = {}
        self.name, _, value = text.partition("=")
        self.value: Any = int(value) if value.isdecimal() else _VALUES.get(value, value)
        self._forget: Callable[[], object] = bool
        if self.name in _OF_CALLS:
            module, call = _OF_CALLS[self.name]
            self._forget = after_import(module, partial(self._watch, module, call))
        else:
            self._places[""] = ""
        if self.name in _OF_TORCH:
            self._forget = after_import("torch", self._switch)
        elif self.name == "gc.freeze":
            log.begin = partial(self._freeze_and_begin, log.begin)
        log.before_report(self._tell)

    def undo(self) -> None:
        self._forget()
        self._replaced.undo()

    def _tell(self) -> None:
        if self._log.run is not None:
            for place, before in self._places.items():
                self._log.run.event(TRIED, place, before=before)

    def _called(self, before: object) -> None:
        # Who calls: the innermost frame that is neither ours nor a library's.
        frame: Any = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if not file.startswith((_OURS, "<frozen")) and f"{os.sep}site-packages{os.sep}" not in file:
                self._places.setdefault(f"{os.path.relpath(file)}:{frame.f_lineno}", repr(before))
                return
            frame = frame.f_back
        self._places[""] = ""

    def _watch(self, module: str, call: str) -> None:
        *path, name = call.split(".")
        owner: Any = reduce(getattr, path, sys.modules[module])
        original = getattr(owner, name)
        signature = inspect.signature(original)

        @wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError:  # the original says why
                return original(*args, **kwargs)
            self._set(given.arguments, signature.parameters)
            return original(*given.args, **given.kwargs)

        self._replaced.put(owner, name, ours)

    def _set(self, values: dict[str, Any], known: Mapping[str, inspect.Parameter]) -> None:
        # Change the arguments of a call, unless they have the value already, or have no use for it.
        before = values.get(self.name, known[self.name].default) if self.name in known else self.value
        if before == self.value or (self.name in _OF_WORKERS and not values.get("num_workers")):
            return
        if self.name == "num_workers":
            from torch.utils.data import IterableDataset

            if isinstance(values["dataset"], IterableDataset):
                return  # More workers would read it several times.
            for name in _OF_WORKERS if not self.value else ():
                values.pop(name, None)
            values["persistent_workers"] = self.value > 0
        self._called(before)
        values[self.name] = self.value

    def _switch(self) -> None:
        torch: Any = sys.modules["torch"]
        if self.name == "cudnn.benchmark":
            torch.backends.cudnn.benchmark = self.value
            ours = property(lambda _: self.value, lambda _, given: self._called(given))
            self._replaced.put(type(torch.backends.cudnn), "benchmark", ours)
            return
        name = f"set_{self.name}"
        original = getattr(torch, name)
        original(self.value)

        @wraps(original)
        def ignored(*given: Any, **named: Any) -> None:
            self._called(next(iter((*given, *named.values())), None))

        self._replaced.put(torch, name, ignored)

    def _freeze_and_begin(self, begin: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        # Once the first step has been made: a training keeps the objects that exist then.
        self._log.begin = begin
        gc.collect()
        gc.freeze()
        begin(*args, **kwargs)
