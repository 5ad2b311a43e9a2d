"""Times the layers of a model, each call of each, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from deep500_timing.adapters import warn_once
from deep500_timing_torch._timer import CPUGPUTimer
from deep500_timing_torch.flop_counter import device_peak_flops
from deep500_timing_torch.layers._calls import TimedModule, attach, beneath, detach
from deep500_timing_torch.layers._in_run import write_layers
from deep500_timing_torch.layers._memory import MemoryLog
from deep500_timing_torch.layers._passes import Passes
from deep500_timing_torch.layers._select import Layer, Match, select
from deep500_timing_torch.layers._table import render
from deep500_timing_torch.layers._times import BACKWARD, FORWARD, ModelTimes, add_times, describe
from deep500_timing_torch.memory import TorchMemory

if TYPE_CHECKING:
    from torch import nn

    from deep500_timing import Timer
    from deep500_timing.memory import MemoryReader


class LayerTimer:
    """Times chosen layers of a model, from :meth:`attach` (or the ``with`` block's begin) to :meth:`detach`.

    ::

        with LayerTimer(model, depth=2) as layers:
            for batch in loader:
                train_step(model, batch)
        print(layers.table())

    Each layer has up to four regions in the timer: ``"GPT.blocks.0 forward"``, ``"GPT.blocks.0 backward"``,
    ``"GPT.blocks.0 recomputed forward"`` (activation checkpointing, inside a backward pass) and ``"GPT.blocks.0
    evaluation forward"`` (the model is not training). They begin with the model's class; a second model of that class
    in the same timer is ``GPT (2)``. Every exporter and report of the timer has them.

    The training does not change: the order of operations, random numbers and gradients stay the same. A model that was
    compiled by ``torch.compile`` is timed as a whole, from outside; its layers are not visible, and a warning says so.

    Args:
        model: The model, or any part of one.
        timer: Where the times go; a new :class:`deep500_timing_torch.CPUGPUTimer` if None.
        depth: How many levels below the model to go; None for all.
        match: Which modules: a name (``fnmatch`` patterns), a compiled regular expression, a class, or a list of
            these; None for all within ``depth``.
        gpu: Whether to time on the device as well; None for yes if a parameter or buffer of the model is on one.
        memory: Whether to read the device's memory as layers begin and end, with their times: it costs tens of
            microseconds each time. Or what reads it. A CPU has none to read: the host's is not passed off as it.
        peak_flops_per_s: The dense peak of the device in FLOP/s, for each layer's share of it; None for the data
            sheet's, if that is known and the parameters have 16 bits. Otherwise the precision is not known
            (``autocast``, TF32), and a CPU's is not known: then there is no share.

    Raises:
        TypeError: ``model`` is no module, ``timer`` no timer, or ``match`` holds something else than is named above.
        ValueError: ``depth`` is negative, or no module matches.
    """

    def __init__(
        self,
        model: nn.Module,
        timer: Timer | None = None,
        *,
        depth: int | None = None,
        match: Match | None = None,
        gpu: bool | None = None,
        memory: bool | MemoryReader = False,
        peak_flops_per_s: float | None = None,
    ) -> None:
        reader = TorchMemory() if memory is True else memory
        layers = select(model, depth=depth, match=match)
        timer = CPUGPUTimer() if timer is None else timer
        if not hasattr(timer, "region"):
            raise TypeError(
                f"LayerTimer(model, {timer!r}): the second argument is the timer that keeps the times, such as "
                "CPUGPUTimer(). Pass other settings by keyword: depth=, match=, gpu=."
            )
        name = _model_name(model, timer)
        for layer in layers:
            layer.model = name
        self.layers = tuple(layers)
        """The timed layers, in the order in which the model names its modules; the model itself first."""
        self.timer: Any = timer
        tensors = (*model.parameters(), *model.buffers())
        self.gpu = any(one.device.type not in {"cpu", "meta"} for one in tensors) if gpu is None else gpu
        """Whether they are taken on the device as well."""
        self.faults = 0
        """Hooks that failed; their times are missing."""
        self._model = model
        self._memory = MemoryLog(reader, layers) if reader else None
        self._passes = Passes(model, timer, gpu=self.gpu, fault=self._fault, memory=self._memory)
        self._timed: list[TimedModule] = []
        self._flops: dict[str, int] | None = None
        self._peak = _peak_of(model, peak_flops_per_s)
        self._written = 0
        modules = ((layer.path, layer.module) for layer in layers)
        compiled = [path for path, module in modules if hasattr(module, "_orig_mod") or beneath(module) is not None]
        if compiled:
            warn_once(
                f"Timing layers: {', '.join(compiled[:3])} is compiled by torch.compile, so it is timed from outside "
                "and its layers are not visible. Time the layers of the model before it is compiled.",
                key="layers of a compiled model",
            )

    @property
    def attached(self) -> bool:
        return bool(self._timed)

    @property
    def untimed(self) -> int:
        """Backward passes that were left out: another thread or another call of the layer ended them."""
        return self._passes.untimed

    def attach(self) -> Self:
        """Begin to time the layers.

        Raises:
            RuntimeError: It is attached already.
        """
        if self.attached:
            raise RuntimeError(
                f"Attaching a layer timer to {type(self._model).__name__}: it is attached already. Call detach() first."
            )
        self._timed = attach(self._passes, self.layers)
        self._write()
        return self

    def detach(self) -> None:
        """Restore the model. Graphs that were made meanwhile are not timed any more."""
        if self.attached:
            detach(self._passes, self._timed)
            self._timed = []
            self._write()

    def _write(self) -> None:
        # Into the run: the layers as soon as they are timed, and at the end with their operations and memory.
        log = getattr(self.timer, "run", None)
        if log is None:
            return
        try:
            found = describe(self.layers, self._flops, self._memory)
            write_layers(log, found, version=self._written, peak_flops_per_s=self._peak)
            self._written += 1
        except Exception as error:
            warn_once(f"Writing the layers into the run failed; training goes on: {type(error).__name__}: {error}")

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        state = "attached" if self.attached else "detached"
        return f"<LayerTimer of {self.layers[0].path}: {len(self.layers)} layers, {state}; table() shows the times>"

    def times(self) -> ModelTimes:
        """The times of all layers so far, waiting for the device's."""
        self._passes.record_recomputed()
        self.timer.complete_all()
        stats = {(region.name, region.device): region.stats for region in self.timer.snapshot()}
        found = describe(self.layers, self._flops, self._memory)
        return ModelTimes(
            tuple(add_times(found, stats, self.timer.intervals)),
            growth=None if self._memory is None else self._memory.growth(),
            out_of_memory=self._passes.out_of_memory,
            faults=self.faults,
            untimed=self.untimed,
            peak_flops_per_s=self._peak,
        )

    def count_flops(self, step: Callable[..., object], *args: Any, **kwargs: Any) -> int:
        """Run a step once, untimed, and count the operations of each layer in it.

        Matrix products, convolutions and attention are counted, forward and backward, by
        ``torch.utils.flop_counter``; element-wise operations are not.

        Args:
            step: Forward and backward of one step. It really runs.
            *args: For the step.
            **kwargs: For the step.

        Returns:
            The operations of the whole step.
        """
        clock = _Operations()
        timer = CPUGPUTimer("cpu", clock=clock)
        passes = Passes(self._model, timer, gpu=False, fault=self._fault)
        was_attached = self.attached
        self.detach()
        timed = attach(passes, self.layers)
        try:
            with clock.counter:
                step(*args, **kwargs)
        finally:
            detach(passes, timed)
            if was_attached:
                self.attach()
        self._flops = {
            layer.path: sum(
                int(np.diff(timer.intervals(f"{layer.region} {purpose}")).sum()) for purpose in (FORWARD, BACKWARD)
            )
            for layer in self.layers
        }
        return int(clock.counter.get_total_flops())

    def table(self, *, fold: bool = True, width: int | None = None) -> str:
        """The times as a table: a tree of the layers, per training step, the slowest marked.

        Args:
            fold: Whether blocks of one build that follow one another are one line, with the slowest named.
            width: Columns to fit into, by shortening names in the middle; None for as wide as need be.
        """
        return render(self.times(), fold=fold, width=width)

    def _fault(self, doing: str, layer: Layer | None, error: Exception) -> None:
        self.faults += 1
        where = "a layer" if layer is None else f"layer {layer.path!r}"
        warn_once(
            f"Timing the {doing} of {where} failed; training goes on, its time is missing: "
            f"{type(error).__name__}: {error}",
            key=f"layer hook {doing}",
        )


_names: WeakKeyDictionary[Any, dict[str, ref[nn.Module]]] = WeakKeyDictionary()


def _model_name(model: nn.Module, timer: Any) -> str:
    # One name for one model in each timer, also after it is gone: its times are still there.
    names = _names.setdefault(timer, {})
    kind = type(model).__name__
    for number in itertools.count(1):
        name = kind if number == 1 else f"{kind} ({number})"
        known = names.get(name)
        if known is None:
            names[name] = ref(model)
            return name
        if known() is model:
            return name
    raise AssertionError("unreachable")


def _peak_of(model: nn.Module, given: float | None) -> float | None:
    first = next((one for one in model.parameters() if one.device.type == "cuda"), None)
    if given is None and (first is None or first.dtype not in {torch.float16, torch.bfloat16}):
        return None
    device, dtype = ("cpu", "float32") if first is None else (first.device, first.dtype)
    peak = device_peak_flops(device, dtype, given=given)
    return None if peak is None else peak.flops_per_s


class _Operations:
    """A clock that counts operations instead of nanoseconds: a region is as long as the operations in it.

    ``FlopCounterMode`` counts by module too, but puts the backward passes of layers side by side (the three
    projections of attention) on top of one another. So only its total is read.
    """

    def __init__(self) -> None:
        self.counter = FlopCounterMode(display=False)

    def now_ns(self) -> int:
        return 1 + int(self.counter.get_total_flops())
