"""Layers that are described now and built on the rank that has them, and which of them make a stage."""

from __future__ import annotations

import re
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from torch import nn

from deep500_timing_torch.pipeline._actions import PipelineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
        forward_fn: Called as ``forward_fn(layer, inputs)`` in the place of ``layer(inputs)``.
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


def partition(
    method: Any, stages: int, names: Sequence[str], parameters: Callable[[], Sequence[int]]
) -> list[tuple[int, int]]:
    """The first layer of each stage, and the one after its last.

    Args:
        method: ``"uniform"``, ``"parameters"``, ``"type:regex"`` (equally many layers with a class that the expression
            finds), or the time of each layer in any unit, in the order of the layers.
        stages: How many.
        names: The layers' classes.
        parameters: Gives the number of parameters of each layer; called if it is needed.

    Raises:
        PipelineError: The method is unknown, or a stage would have no layer.
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
        ends = list(accumulate(least + (stage < more) for stage in range(stages)))
        return list(zip([0, *ends[:-1]], ends, strict=True))
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
    bounds: list[tuple[int, int]] = []
    end = count
    for part in reversed(range(parts)):
        cut = best[part][end][2] if part else 0
        bounds.insert(0, (cut, end))
        end = cut
    return bounds
