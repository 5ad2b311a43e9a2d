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
from weakref import WeakSet, ref

import torch
from torch.nn.modules import module as modules
from torch.nn.modules.loss import _Loss
from torch.nn.parameter import is_lazy

from deep500_timing.adapters import Replaced, warn_once
from deep500_timing_torch._autolog._engine import hide
from deep500_timing_torch._autolog._patches import followed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deep500_timing.loop import Loops
    from deep500_timing_torch.layers import LayerTimer


class Roots:
    """Watches classes of modules, until it is undone. It keeps none of them alive."""

    def __init__(self, loops: Loops) -> None:
        self._loops = loops
        self.when_found: Callable[[Any], object] = lambda model: None
        """Called with each model before its first call."""
        self._known: WeakSet[type] = WeakSet()
        """The classes of models."""
        self._watched: WeakSet[type] = WeakSet()
        """The classes that are watched."""
        self._dropped: WeakSet[type] = WeakSet()
        self._hooks = [
            modules.register_module_parameter_registration_hook(self._registered),
            modules.register_module_module_registration_hook(self._registered),
        ]
        loops.when_uncalled = self._watch_forward
        unpickled = followed(torch.nn.Module.__setstate__, lambda _result, _ns, module, *_: self._unpickled(module))
        self._replaced = Replaced()
        self._replaced.put(torch.nn.Module, "__setstate__", unpickled)
        if not getattr(torch.__spec__, "_initializing", False):  # while it is, there are no models; 50 ms
            for kind in {type(one) for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)}:
                self._watch(kind)

    def undo(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._replaced.undo()
        for kind in list(self._watched):
            self._unwatch(kind)

    def _registered(self, module: Any, *_: Any) -> None:
        kind = type(module)
        if kind not in self._watched and kind not in self._dropped:
            self._watch(kind)

    def _unpickled(self, module: Any) -> None:
        if module._parameters or module._modules:  # else it registers nothing where it is made either: a transform
            self._registered(module)

    def _watch(self, kind: Any) -> None:
        if kind is torch.nn.Module or issubclass(kind, (torch.jit.ScriptModule, _Loss)):
            return  # a criterion is part of the loss
        if not self._watched and self._loops.log is not None:  # the program makes a model, so it may train
            self._loops.log.prepare()
        self._watched.add(kind)
        self._time(kind, "__call__")

    def _watch_forward(self) -> None:
        # The program trains, and has called no model: it calls `forward` itself.
        for kind in list(self._watched):
            if "forward" in vars(kind):
                self._time(kind, "forward")

    def _time(self, kind: Any, name: str) -> None:
        own, found = vars(kind).get(name), False
        begin, end, here = self._loops.begin_call, self._loops.end_call, self._loops.here
        module_class: Any = torch.nn.Module
        inherits = next(base for base in kind.__mro__[1:] if name in vars(base)) is module_class

        @functools.wraps(own or module_class.__call__)
        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal found
            module = args[0]
            if own is not None:
                call = own
            elif inherits and type(module) is kind:
                call = module_class.__call__
            else:
                call = super(kind, type(module)).__call__  # type: ignore[misc]
            if not found and not (here().in_forward or here().in_backward):
                found = True
                self._found(kind, module)
            state = begin(module)
            try:
                result = call(*args, **kwargs) if kwargs else call(*args)  # neither is copied
            except BaseException as error:
                hide(error)
                here().fail(state)
                raise
            end(module, state)
            return result

        called._torchdynamo_inline = own or torch.nn.Module.__call__  # type: ignore[attr-defined]
        called._deep500_timing_own = own  # type: ignore[attr-defined]
        setattr(kind, name, called)

    def _unwatch(self, kind: Any) -> None:
        self._watched.discard(kind)
        for name in ("__call__", "forward"):
            ours = vars(kind).get(name)
            if hasattr(ours, "_deep500_timing_own"):  # else another has replaced it since: ours stays below that
                if ours._deep500_timing_own is None:
                    delattr(kind, name)
                else:
                    setattr(kind, name, ours._deep500_timing_own)

    def _found(self, kind: type, model: Any) -> None:
        # A program may call parts of a model by themselves, as a module with a method for the loss does.
        self._known.add(kind)
        with suppress(Exception):  # a part that may not be asked; those of which nothing is known stay timed
            if any(one.device.type not in ("cpu", "meta") for one in model.parameters()):  # asks no driver
                self._loops.time_on_device()
            kept = {type(one) for one in _inner_models(model)}
            for part in {type(one) for one in model.modules()} - set(self._known) - kept:
                self._unwatch(part)
                self._dropped.add(part)
        self.when_found(model)


def _inner_models(model: Any) -> Iterator[Any]:
    # The models inside a wrapper, which a program may call directly: to evaluate one, or to train it further.
    def size(module: Any) -> int:
        return sum(one.numel() for one in module.parameters() if not is_lazy(one))

    while True:
        parts = [one for one in model.children() if next(one.children(), None) is not None]
        parts.sort(key=size, reverse=True)
        if not parts or 2 * size(parts[0]) < size(model):  # half of it, beside an average of the weights or a student
            return
        for one in parts[:4]:  # more are layers
            # A container of PyTorch's own is a model where it is all that is wrapped.
            if not type(one).__module__.startswith("torch.nn.modules") or size(one) == size(model):
                yield one
        model = parts[0]


def of_torch(loops: Loops) -> Loops:
    """Have the loops ask PyTorch what only it knows; returns them."""
    loops.is_grad_enabled = torch.is_grad_enabled
    loops.is_engine = lambda: torch._C._current_graph_task_id() != -1
    loops.state_of = _state_of
    return loops


def _state_of(model: Any, surely: bool) -> tuple[Callable[[], object], object] | None:
    """For a model after a backward pass a function whose result changes as an optimizer steps, and its result now.

    A parameter changes then, or loses its gradient, as where only gradients are asked for. None without gradients.
    """
    with suppress(Exception):  # of parameters that may not be asked nothing is known
        trained = (one for one in model.parameters() if one.grad is not None)
        parameter = min(trained, key=torch.Tensor.numel, default=None) if surely else next(trained, None)
        if parameter is not None:
            state = functools.partial(_state, ref(parameter), surely)
            return state, state()
    return None


def _state(found: ref[torch.Tensor], surely: bool) -> object:
    parameter = found()
    if parameter is None:
        return None
    grad, values = None if surely else parameter.grad, None
    # An update of `parameter.data` leaves the version as it is. Values of a device would be waited for.
    if surely and parameter.device.type == "cpu" and parameter.numel() <= 1000:
        values = parameter.tolist()
    return parameter._version, values, grad is not None and (id(grad), grad._version)


class Layers:
    """Attaches a layer timer to each model, until it is undone: ``deep500-timing run --layers``."""

    def __init__(self, loops: Loops) -> None:
        from deep500_timing_torch.layers._private import check

        self._loops = loops
        self._timers: list[ref[LayerTimer]] = []
        """The hooks of a model keep its timer alive, and nothing else keeps either."""
        loops.log.before_report(self._report)
        with suppress(RuntimeError):  # which attaching raises too
            check()  # now: it runs a backward pass, which is timed later

    def add(self, model: Any) -> None:
        try:
            from deep500_timing_torch.layers import LayerTimer

            self._timers.append(ref(LayerTimer(model, self._loops.timer).attach()))
        except Exception as error:
            warn_once(
                f"Timing the layers of {type(model).__name__} failed: {type(error).__name__}: {error}. The program "
                "goes on without their times."
            )

    def undo(self) -> None:
        for timer in self._alive():
            timer.detach()

    def feed(self) -> None:
        """Write the layers once there is a log, which begins after the first call of a model."""
        for layers in self._alive():
            if not layers._written:
                layers._write()

    def _alive(self) -> list[LayerTimer]:
        return [timer for one in self._timers if (timer := one()) is not None]

    def _report(self) -> None:
        timers = self._alive()
        self.undo()
        width = shutil.get_terminal_size((120, 24)).columns
        for timer in timers:
            self._loops.log.note("\n".join(("", *(f"  {line}" for line in timer.table(width=width).splitlines()), "")))
        if len(timers) < len(self._timers):
            self._loops.log.note(
                f"layers: the program has dropped {len(self._timers) - len(timers)} of {len(self._timers)} models. The "
                "run has the times of their layers."
            )
