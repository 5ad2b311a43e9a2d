"""Finds the block that a model repeats, commonly called its layers."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


def repeated_blocks(model: nn.Module) -> list[str]:
    """The names of the modules that a model repeats: the largest group of one class.

    A group is in one list of the model, or in several lists of the same kind, as of an encoder and a decoder. Of groups
    within one another the outermost is taken: the layers of a transformer, not the projections within each. Modules
    that are attributes count only if no list repeats any. Largest means most parameters in all, then most members.

    Returns:
        Their names, in order; empty if no module with modules within it is repeated.
    """
    in_lists: dict[tuple[int, type[nn.Module]], list[str]] = defaultdict(list)
    as_attributes: dict[tuple[str, type[nn.Module]], list[str]] = defaultdict(list)
    for container, name, module in _children(model, ""):
        if any(True for _ in module.children()):  # Leaves of one class have nothing in common but the class.
            if name.rpartition(".")[2].isdecimal():
                in_lists[name.count("."), type(module)].append(name)
            else:
                as_attributes[container, type(module)].append(name)
    repeated = [names for names in in_lists.values() if len(names) > 1]
    repeated = repeated or [names for names in as_attributes.values() if len(names) > 1]
    outermost = [
        names
        for names in repeated
        if not any(
            other is not names and all(any(name.startswith(f"{one}.") for one in other) for name in names)
            for other in repeated
        )
    ]
    sizes = dict(model.named_modules())

    def size(names: list[str]) -> tuple[int, int]:
        return sum(parameter.numel() for name in names for parameter in sizes[name].parameters()), len(names)

    return max(outermost, key=size, default=[])


def _children(module: nn.Module, prefix: str) -> Iterator[tuple[str, str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        yield prefix, path, child
        yield from _children(child, path)
