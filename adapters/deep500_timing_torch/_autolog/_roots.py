"""Finds the models of a program: the modules that it calls itself, and times their calls as FORWARD, or their layers.

The class of each module that gets a parameter or a part is watched until a module is called from outside of every
other. From then on the class of that one stays watched and those of its parts do not, before they are called. So a
module inside a model costs nothing, and ``torch.compile``, which reads the inside, finds PyTorch's own.
"""

from __future__ import annotations

import functools
import gc
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as modules
from torch.nn.modules.loss import _Loss

from deep500_timing.adapters import Replaced, warn_once
from deep500_timing_torch._autolog._patches import hide

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing_torch._autolog._steps import Steps
    from deep500_timing_torch.layers import LayerTimer


class Roots:
    """Watches classes of modules, until it is undone."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.when_found: Callable[[Any], object] = lambda model: None
        """Called with each model before its first call."""
        self._known: set[type] = set()
        """The classes of models."""
        self._watched: dict[type, Replaced] = {}
        """The classes that are watched."""
        self._dropped: set[type] = set()
        self._hooks = [
            modules.register_module_parameter_registration_hook(self._registered),
            modules.register_module_module_registration_hook(self._registered),
        ]
        # Models that are there already; a program that is launched has none.
        for kind in {type(one) for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)}:
            self._watch(kind)

    def undo(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for kind in list(self._watched):
            self._unwatch(kind)

    def _registered(self, module: Any, name: str, part: Any) -> None:
        kind = type(module)
        if kind not in self._watched and kind not in self._dropped:
            self._watch(kind)

    def _watch(self, kind: Any) -> None:
        if kind is torch.nn.Module or issubclass(kind, (torch.jit.ScriptModule, _Loss)):
            return  # a criterion is part of the loss
        if not self._watched:  # the program makes a model, so it may train
            self._steps.log.prepare()
        self._watched[kind] = Replaced()
        own, found = vars(kind).get("__call__"), False
        steps = self._steps
        begin, end, fail = steps.begin_call, steps.end_call, steps.fail
        module_class: Any = torch.nn.Module
        inherits = next(base for base in kind.__mro__[1:] if "__call__" in vars(base)) is module_class

        @functools.wraps(own or module_class.__call__)
        def called(module: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal found
            if own is not None:
                call = own
            elif inherits and type(module) is kind:
                call = module_class.__call__
            else:
                call = super(kind, type(module)).__call__  # type: ignore[misc]
            if not found and not steps.in_forward and not steps.in_backward:
                found = True
                self._found(kind, module)
            state = begin(module)
            if state < 0:
                return call(module, *args, **kwargs)
            try:
                result = call(module, *args, **kwargs)
            except BaseException as error:
                hide(error)
                fail(state)
                raise
            end(module, state)
            return result

        called._torchdynamo_inline = own or torch.nn.Module.__call__  # type: ignore[attr-defined]
        self._watched[kind].put(kind, "__call__", called)

    def _unwatch(self, kind: Any) -> None:
        self._watched.pop(kind, Replaced()).undo()

    def _found(self, kind: type, model: Any) -> None:
        # A program may call parts of a model by themselves, as a module with a method for the loss does.
        self._known.add(kind)
        for part in {type(one) for one in model.modules()} - self._known:
            self._unwatch(part)
            self._dropped.add(part)
        self._steps.find_device(model.parameters())
        self.when_found(model)


class Layers:
    """Attaches a layer timer to each model, until it is undone: ``deep500-timing run --layers``."""

    def __init__(self, steps: Steps) -> None:
        from deep500_timing_torch.layers._private import check

        self._steps = steps
        self._timers: list[LayerTimer] = []
        steps.log.before_report(self._report)
        with suppress(RuntimeError):  # which attaching raises too
            check()  # now: it runs a backward pass, which is timed later

    def add(self, model: Any) -> None:
        try:
            from deep500_timing_torch.layers import LayerTimer

            self._timers.append(LayerTimer(model, self._steps.timer).attach())
        except Exception as error:
            warn_once(
                f"Timing the layers of {type(model).__name__} failed: {type(error).__name__}: {error}. The program "
                "goes on without their times."
            )

    def undo(self) -> None:
        for timer in self._timers:
            timer.detach()

    def feed(self) -> None:
        """Write the layers once there is a log, which begins after the first call of a model."""
        for layers in self._timers:
            if not layers._written:
                layers._write()

    def _report(self) -> None:
        self.undo()
        width = shutil.get_terminal_size((120, 24)).columns
        for timer in self._timers:
            self._steps.log.note("\n".join(("", *(f"  {line}" for line in timer.table(width=width).splitlines()), "")))
