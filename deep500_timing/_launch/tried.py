"""A remedy that ``deep500-timing try`` tests: one parameter of a call that the program makes is set to another value.

The run has an event for each line of the program with such a call. Nothing is written into the program's files.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
from functools import wraps
from typing import TYPE_CHECKING, Any

from deep500_timing._base.patches import Replaced, after_import
from deep500_timing._base.settings import TRIED

if TYPE_CHECKING:
    from collections.abc import Callable

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OF_LOADER, _OF_COMPILE = ("num_workers", "persistent_workers", "pin_memory"), ("steps_per_execution", "jit_compile")
_OF_WORKERS = ("prefetch_factor", "timeout", "multiprocessing_context")
"""Arguments that a loader without workers does not take."""
PARAMETERS = (*_OF_LOADER, *_OF_COMPILE, "num_threads", "gc.freeze")
"""What can be set."""


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
        self.value: Any = int(value) if value.isdecimal() else value == "True"
        put: dict[str, tuple[str, Callable[[], None]]] = {
            **dict.fromkeys(_OF_LOADER, ("torch.utils.data.dataloader", self._loaders)),
            **dict.fromkeys(_OF_COMPILE, ("keras", self._models)),
            "num_threads": ("torch", self._threads),
        }
        self._forget: Callable[[], object] = bool
        if self.name in put:
            self._forget = after_import(*put[self.name])
        elif self.name == "gc.freeze":
            log.begin = self._freezing(log.begin)
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
        frame: Any = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if not file.startswith((_OURS, "<frozen")) and f"{os.sep}site-packages{os.sep}" not in file:
                self._places.setdefault(f"{os.path.relpath(file)}:{frame.f_lineno}", repr(before))
                return
            frame = frame.f_back

    def _loaders(self) -> None:
        module: Any = sys.modules["torch.utils.data.dataloader"]
        original = module.DataLoader.__init__
        signature = inspect.signature(original)

        @wraps(original)
        def init(loader: Any, *args: Any, **kwargs: Any) -> None:
            try:
                given = signature.bind(loader, *args, **kwargs)
            except TypeError:  # the original says why
                given = None
            # More workers would read an iterable data set several times.
            if given is None or isinstance(given.arguments["dataset"], module.IterableDataset):
                original(loader, *args, **kwargs)
                return
            values = given.arguments
            before = values.get(self.name, signature.parameters[self.name].default)
            workers = self.value if self.name == "num_workers" else values.get("num_workers", 0)
            if before != self.value and (workers or self.name in ("pin_memory", "num_workers")):
                self._called(before)
                values[self.name] = self.value
                if self.name == "num_workers":
                    values["persistent_workers"] = self.value > 0
                    for name in _OF_WORKERS if not self.value else ():
                        values.pop(name, None)
            original(*given.args, **given.kwargs)

        self._replaced.put(module.DataLoader, "__init__", init)

    def _threads(self) -> None:
        torch: Any = sys.modules["torch"]
        torch.set_num_threads(self.value)

        @wraps(torch.set_num_threads)
        def set_num_threads(count: int) -> None:
            self._called(count)

        self._replaced.put(torch, "set_num_threads", set_num_threads)

    def _models(self) -> None:
        model: Any = sys.modules["keras"].Model
        original = model.compile

        @wraps(original)
        def compile(model: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A001 - Keras's name
            self._called(kwargs.get(self.name))
            return original(model, *args, **kwargs | {self.name: self.value})

        self._replaced.put(model, "compile", compile)

    def _freezing(self, begin: Callable[..., None]) -> Callable[..., None]:
        # Once the first step has been made: a training keeps the objects that exist then.
        def frozen(*args: Any, **kwargs: Any) -> None:
            self._log.begin = begin
            gc.collect()
            gc.freeze()
            begin(*args, **kwargs)

        return frozen
