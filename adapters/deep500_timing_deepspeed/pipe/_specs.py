"""Layers that are described now and built on the rank that has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from deep500_timing_torch.pipeline._errors import PipelineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["LayerSpec", "TiedLayerSpec"]


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
        """The layer."""
        layer: nn.Module = self.typename(*self.module_args, **self.module_kwargs)
        return layer

    def __repr__(self) -> str:
        """As one would write it."""
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
