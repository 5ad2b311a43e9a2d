"""A model as a row of layers, cut into stages, of which each rank builds its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from deep500_timing_torch.pipeline import PipelineError
from deep500_timing_torch.pipeline.engines import NAMES, SINGLE, check_stages, normal_name, rank_of_stage


class LayerSpec:
    """A layer by its class and arguments, so that a rank builds its own layers only.

    Args:
        typename: The class, a ``torch.nn.Module``.
        *module_args: For its constructor.
        **module_kwargs: For its constructor.

    Raises:
        PipelineError: It is no such class.
    """

    def __init__(self, typename: Any, *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise PipelineError(f"LayerSpec({typename!r}): it takes a class derived from torch.nn.Module.")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self) -> nn.Module:
        layer: nn.Module = self.typename(*self.module_args, **self.module_kwargs)
        return layer

    def __repr__(self) -> str:
        parts = [repr(one) for one in self.module_args]
        parts += [f"{name}={value!r}" for name, value in self.module_kwargs.items()]
        return f"{self.typename.__name__}({', '.join(parts)})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares weights with all others of the same key, such as an embedding and the head over it.

    Args:
        key: What ties them.
        typename: The class.
        *module_args: For its constructor.
        forward_fn: Called as ``forward_fn(layer, inputs)`` instead of ``layer(inputs)``.
        tied_weight_attr: Which of its parameters are shared; names with dots reach into it.
        **module_kwargs: For its constructor.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


class StageModule(nn.Module):
    """The layers of one stage, called one after the other."""

    def __init__(self, layers: Sequence[tuple[int, Any, Any]], interval: int = 0) -> None:
        super().__init__()
        self._calls: list[Callable[[Any], Any]] = []
        self.checkpoint_interval = interval
        for number, layer, forward_fn in layers:
            if isinstance(layer, nn.Module):
                self.add_module(str(number), layer)
            self._calls.append(layer if forward_fn is None else partial(forward_fn, layer))

    def forward(self, *inputs: Any) -> Any:
        """Several inputs are handed to the first layer as a tuple, as it would get them from the layer before it."""
        inputs = tuple(_not_a_leaf(one) for one in inputs)
        value: Any = inputs[0] if len(inputs) == 1 else inputs
        interval = self.checkpoint_interval
        if not (interval and torch.is_grad_enabled()):
            return _run(self._calls, value)
        for first in range(0, len(self._calls), interval):
            value = checkpoint(_run, self._calls[first : first + interval], value, use_reentrant=False)
        return value


def _not_a_leaf(value: Any) -> Any:
    # A received activation is a leaf, which a first layer that works in place may not change. DeepSpeed clones it too.
    if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad and torch.is_grad_enabled():
        return value.clone()
    return value


def _run(calls: Sequence[Callable[[Any], Any]], value: Any) -> Any:
    for call in calls:
        value = call(value)
    return value


class PipelineModule(nn.Module):
    """A model for :func:`initialize`: layers in a row, cut into stages.

    It is made on every rank, after ``torch.distributed`` is initialised, and builds the layers of this rank's stages.
    The output of each layer is the input of the next. Parameters have the names that they have in
    ``nn.Sequential(*layers)``, so that its state fits and does not depend on the cuts.

    Args:
        layers: Modules, functions, :class:`LayerSpec` or :class:`TiedLayerSpec`; or an ``nn.Sequential``.
        num_stages: Ranks of one pipeline. The world size is a multiple of it; the rest are replicas. Ranks of one
            replica lie apart by the number of replicas, as in DeepSpeed.
        topology: Not supported: pass ``num_stages``.
        loss_fn: Called as ``loss_fn(outputs, labels)``; None if the last layer gives the loss.
        seed_layers: Whether to seed before each layer is built, by ``base_seed`` and its number.
        seed_fn: What seeds; ``torch.manual_seed`` if None.
        base_seed: See ``seed_layers``.
        partition_method: ``"parameters"``, ``"uniform"``, ``"type:regex"``, or the time of each
            layer as numbers; rank 0's count.
        activation_checkpoint_interval: How many layers are computed again together in the backward pass; 0 for none.
        schedule: Which schedule it is for; it decides where stages lie.
        stages_per_rank: How many stages each rank has; None for 1, or 2 where the schedule interleaves.
        device: Where to build the layers; the accelerator's current device if None, the CPU without one.

    Raises:
        PipelineError: The world is no multiple of the stages, or a stage would have no layer.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: Any = "parameters",
        activation_checkpoint_interval: int = 0,
        *,
        schedule: str = "1F1B",
        stages_per_rank: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise PipelineError("PipelineModule(...): initialise torch.distributed first (init_process_group).")
        self._specs = list(layers)
        world = dist.get_world_size()
        if topology is not None:
            raise PipelineError("PipelineModule(topology=...): Leave topology out and pass num_stages.")
        self.num_stages = ranks = world if num_stages is None else int(num_stages)
        if ranks < 1 or world % ranks:
            raise PipelineError(
                f"PipelineModule(num_stages={num_stages}): the {world} ranks are no multiple of it. Start a multiple "
                "of num_stages ranks."
            )
        self.schedule = normal_name(schedule)
        self.stages_per_rank = (1 if self.schedule in SINGLE else 2) if stages_per_rank is None else stages_per_rank
        check_stages(self.schedule, self.stages_per_rank)
        self.total_stages = ranks * self.stages_per_rank
        self.loss_fn = loss_fn
        self.replicas = world // ranks
        self.pipe_rank, self.replica = divmod(dist.get_rank(), self.replicas)
        self.device = _default_device() if device is None else torch.device(device)
        self._seed = None if not seed_layers else (seed_fn or torch.manual_seed, base_seed)
        self._built_by_key: dict[str, nn.Module] = {}
        self.bounds = self._cut(partition_method)
        self.tied_keys: dict[str, list[int]] = {}
        for number, spec in enumerate(self._specs):
            if isinstance(spec, TiedLayerSpec):
                self.tied_keys.setdefault(spec.key, []).append(number)
        self.stage_numbers = [
            stage for stage in range(self.total_stages) if rank_of_stage(self.schedule, stage, ranks) == self.pipe_rank
        ]
        # A plain list: the modules of this one are the layers, under their numbers.
        self.stages: list[StageModule] = []
        for stage in self.stage_numbers:
            own = [(number, *self._layer(number)) for number in range(*self.bounds[stage])]
            for number, layer, _ in own:
                if isinstance(layer, nn.Module):
                    self.add_module(str(number), layer)
            self.stages.append(StageModule(own, activation_checkpoint_interval).to(self.device))

    def forward(self, *inputs: Any) -> Any:
        """Only where one rank has all the stages.

        Raises:
            PipelineError: It has not.
        """
        if len(self.stages) != self.total_stages:
            raise PipelineError("A PipelineModule is called by its engine alone: use train_batch() and eval_batch().")
        value: Any = inputs
        for stage in self.stages:
            value = stage(*value) if isinstance(value, tuple) else stage(value)
        return value

    def stage_owner(self, layer: int) -> int:
        """The stage that has a layer.

        Raises:
            PipelineError: There is no such layer.
        """
        for stage, (first, end) in enumerate(self.bounds):
            if first <= layer < end:
                return stage
        raise PipelineError(f"There is no layer {layer}: the model has {len(self._specs)}, from 0.")

    def tied_ranks(self) -> dict[str, list[int]]:
        """The ranks of the pipeline that share weights, by key, where there are several; the same on every rank."""
        found = {}
        for key, numbers in self.tied_keys.items():
            ranks = {rank_of_stage(self.schedule, self.stage_owner(one), self.num_stages) for one in numbers}
            if len(ranks) > 1:
                found[key] = sorted(ranks)
        return found

    def tied_weights(self) -> dict[str, list[nn.Parameter]]:
        """The shared parameters that this rank has, by key."""
        return {
            key: [attrgetter(name)(self._built_by_key[key]) for name in self._specs[numbers[0]].tied_weight_attr]
            for key, numbers in self.tied_keys.items()
            if key in self._built_by_key
        }

    def _cut(self, method: Any) -> list[tuple[int, int]]:
        if not isinstance(method, str):
            shared = [list(method)]
            dist.broadcast_object_list(shared, src=0)  # Each rank has measured for itself; there is one cut.
            method = shared[0]
        names = [one.typename.__name__ if isinstance(one, LayerSpec) else type(one).__name__ for one in self._specs]
        return partition(method, self.total_stages, names, self._parameters_of_layers)

    def _parameters_of_layers(self) -> list[int]:
        counts = []
        for spec in self._specs:
            if isinstance(spec, LayerSpec):
                with torch.device("meta"), torch.random.fork_rng():
                    layer: Any = spec.build()
            else:
                layer = spec
            parameters = layer.parameters() if isinstance(layer, nn.Module) else ()
            counts.append(sum(one.numel() for one in parameters if one.requires_grad))
        return counts

    def _layer(self, number: int) -> tuple[Any, Any]:
        spec = self._specs[number]
        if self._seed is not None:
            seed, base = self._seed
            seed(base + number)
        if isinstance(spec, TiedLayerSpec):
            if spec.key not in self._built_by_key:
                self._built_by_key[spec.key] = spec.build()
            return self._built_by_key[spec.key], spec.forward_fn
        layer = spec.build() if isinstance(spec, LayerSpec) else spec
        if not callable(layer):
            raise PipelineError(f"Layer {number} is {layer!r}: give a module, a function or a LayerSpec.")
        return layer, None

    def __repr__(self) -> str:
        return (
            f"<PipelineModule: {len(self._specs)} layers in {self.total_stages} stages on {self.num_stages} ranks for "
            f"{NAMES[self.schedule]}, {self.replicas} replicas>"
        )


def _default_device() -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else torch.device(found.type, torch.accelerator.current_device_index())


def partition(
    method: Any, stages: int, names: Sequence[str], parameters: Callable[[], Sequence[int]]
) -> list[tuple[int, int]]:
    """The first layer of each stage, and the one after its last.

    ``"type:regex"`` puts equally many layers with a class that the expression finds into each stage. ``names`` are the
    layers' classes; ``parameters`` gives the number of parameters of each layer.
    """
    count = len(names)
    if count < stages:
        raise PipelineError(
            f"Partitioning {count} layers into {stages} stages: a stage would have no layer. Use at most {count} "
            "stages, or split the layers."
        )
    if not isinstance(method, str):
        weights = [float(one) for one in method]
        if len(weights) != count or any(not one >= 0 for one in weights):
            raise PipelineError(
                f"Partitioning by measured time: {len(weights)} times for {count} layers. Give one for each, in "
                "order, none below 0."
            )
        return balance(weights, stages)
    kind = method.lower()
    if kind == "uniform":
        least, more = divmod(count, stages)
        starts = [stage * least + min(stage, more) for stage in range(stages + 1)]
        return list(pairwise(starts))
    if kind == "parameters":
        return balance(parameters(), stages)
    if kind.startswith("type:"):
        pattern = re.compile(method[len("type:") :], re.IGNORECASE)
        found = [1 if pattern.search(name) else 0 for name in names]
        if sum(found) < stages:
            raise PipelineError(
                f"Partitioning by {method!r}: {sum(found)} layers of {count} are found, too few for {stages} stages; "
                f"the classes are {sorted(set(names))}."
            )
        return balance(found, stages)
    raise PipelineError(
        f"partition_method={method!r}: it is 'uniform', 'parameters', 'type:regex', or the measured time of each layer."
    )


def balance(weights: Sequence[float], parts: int) -> list[tuple[int, int]]:
    """Cut a sequence into parts that are not empty, so that the heaviest is as light as can be.

    Ties are broken by the sum of squares, so that the other parts are even too.
    """
    count = len(weights)
    sums = [0.0, *accumulate(float(one) for one in weights)]
    best: list[list[tuple[float, float, int]]] = [[(sums[end], sums[end] ** 2, 0) for end in range(count + 1)]]
    for part in range(1, parts):
        row = [(float("inf"), float("inf"), 0)] * (count + 1)
        for end in range(part + 1, count + 1):
            row[end] = min(
                (max(best[-1][cut][0], sums[end] - sums[cut]), best[-1][cut][1] + (sums[end] - sums[cut]) ** 2, cut)
                for cut in range(part, end)
            )
        best.append(row)
    cuts = [count]
    for part in reversed(range(1, parts)):
        cuts.insert(0, best[part][cuts[0]][2])
    return list(pairwise([0, *cuts]))
