"""Which modules of a model are timed, under which names, a call of one, and the block that a model repeats."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from deep500_timing.memory import MemoryUsage

Match = str | re.Pattern[str] | type[nn.Module] | Sequence[str | re.Pattern[str] | type[nn.Module]]


class Layer:
    """One module that is timed."""

    __slots__ = ("depth", "handles", "model", "module", "names")

    def __init__(self, module: nn.Module, name: str, model: str) -> None:
        self.module = module
        self.model = model
        """The name of the model, which is in the names of its regions."""
        self.names = [name]
        """Its places in the model, as ``named_modules`` names them; several if the module is shared."""
        self.depth = name.count(".") + 1 if name else 0
        """How deep it lies at its first place; the model itself is 0."""
        self.handles: dict[str, Any] = {}
        """The regions that were used since it was attached, by purpose."""

    @property
    def kind(self) -> str:
        """The name of its class, which a lazy module changes in its first call."""
        return type(self.module).__name__

    @property
    def parameters(self) -> int:
        """Elements of its parameters, without uninitialized ones and those of the modules within it."""
        return _elements(self.module.parameters(recurse=False))

    @property
    def path(self) -> str:
        """Its first place; the name of the model for the model itself."""
        return self.names[0] or self.model

    @property
    def region(self) -> str:
        """The begin of the names of its regions, which no layer of another model in the same timer has."""
        return f"{self.model}.{self.names[0]}" if self.names[0] else self.model

    def __repr__(self) -> str:
        return f"<layer {self.path!r}: {self.kind}>"


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """One call of a layer that is under way, or whose backward pass may still come."""

    layer: Layer
    parent: Call | None
    """The call that made it, while that is under way."""
    of_root: bool
    """Whether the model itself was called, and not a part of it."""
    caller: int
    """The thread that made it, which numbers its nodes."""
    children: list[Call] | None = None
    """The timed calls directly within it that have a backward pass, until it has returned."""
    region: Any = None
    """Its open region, of the forward pass and later of the backward pass; None while neither runs, and for a
    module that calls itself."""
    # These are set only in the pass that needs them, as a call of every layer makes one of these.
    memory: MemoryUsage | None = field(init=False)
    """The memory in use as the pass that is under way began, if it is read."""
    begin: int = field(init=False)
    end: int = field(init=False)
    """The number of the first node made after it."""
    inputs: dict[Any, None] = field(init=False)
    """The autograd nodes of its inputs, until its caller has returned."""
    outputs: list[int] = field(init=False)
    """The numbers of the nodes of its outputs."""
    thread: int = field(init=False)
    """The thread that began its backward pass."""
    task: int = field(init=False)
    """The engine's task that its backward pass is part of."""

    def is_repeated(self) -> bool:
        """Whether the same layer is under way further out: the module calls itself."""
        call = self.parent
        while call is not None:
            if call.layer is self.layer:
                return True
            call = call.parent
        return False


def select(model: nn.Module, *, depth: int | None, match: Match | None) -> list[Layer]:
    """The layers to time, in the order in which the model names them. The model itself is always the first."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"Timing the layers of {model!r}: it is a {type(model).__name__}, not a torch.nn.Module. Pass the model."
        )
    if depth is not None and depth < 0:
        raise ValueError(f"Timing layers with depth={depth}: it counts levels below the model; pass 0 or more.")
    wanted = None if match is None else _as_list(match)
    by_module: dict[int, Layer] = {}
    in_model = _named_in_keras(model, "") if is_keras(model) else model.named_modules(remove_duplicate=False)
    for name, module in in_model:
        # A container is never called.
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
            continue
        if name and depth is not None and name.count(".") + 1 > depth:
            continue
        if name and wanted is not None and not any(_matches(name, module, one) for one in wanted):
            continue
        known = by_module.get(id(module))
        if known is None:
            by_module[id(module)] = Layer(module, name, type(model).__name__)
        else:
            known.names.append(name)
    if wanted is not None and len(by_module) == 1:
        examples = ", ".join(name for name, _ in list(model.named_modules())[1:5]) or "none, it has no modules within"
        raise ValueError(
            f"Timing the layers of {type(model).__name__} with match={match!r}: no module matches. "
            f"Its modules are {examples}, and so on; see model.named_modules()."
        )
    return list(by_module.values())


def is_keras(model: nn.Module) -> bool:
    """Whether it is a model or layer of Keras, on its PyTorch backend."""
    return any(kind.__module__.startswith("keras.") for kind in type(model).__mro__)


def _named_in_keras(model: nn.Module, name: str) -> Iterable[tuple[str, nn.Module]]:
    # Keras keeps its layers in other lists. A Sequential's Functional is never called.
    yield name, model
    inner: Any = getattr(model, "layers", None) or getattr(model, "_layers", ())
    for layer in inner:
        if isinstance(layer, nn.Module):
            yield from _named_in_keras(layer, f"{name}.{layer.name}" if name else str(layer.name))


def _as_list(match: Match) -> list[str | re.Pattern[str] | type[nn.Module]]:
    several: Iterable[object] = match if isinstance(match, (list, tuple, set, frozenset)) else (match,)
    checked: list[str | re.Pattern[str] | type[nn.Module]] = []
    for one in several:
        if isinstance(one, (str, re.Pattern)) or (isinstance(one, type) and issubclass(one, nn.Module)):
            checked.append(one)
        else:
            raise TypeError(
                f"Timing layers with match={one!r}: pass a name such as 'blocks.*', a compiled regular expression, "
                "a module class, or a list of these."
            )
    return checked


def _matches(name: str, module: nn.Module, wanted: str | re.Pattern[str] | type[nn.Module]) -> bool:
    if isinstance(wanted, str):
        return fnmatchcase(name, wanted)
    if isinstance(wanted, re.Pattern):
        return wanted.fullmatch(name) is not None
    return isinstance(module, wanted)


def _elements(parameters: Any) -> int:
    return sum(one.numel() for one in parameters if not is_lazy(one))


def repeated_blocks(model: nn.Module) -> list[str]:
    """The names of the modules that a model repeats: the largest group of one class.

    A group is in one list of the model, or in several lists of the same kind, as of an encoder and a decoder. Of groups
    within one another the outermost is taken: the layers of a transformer, not the projections within each. Modules
    that are attributes count only if no list repeats any. Largest means most parameters in all, then most members.
    """
    modules = dict(model.named_modules())
    in_lists: dict[tuple[int, type[nn.Module]], list[str]] = defaultdict(list)
    as_attributes: dict[tuple[str, type[nn.Module]], list[str]] = defaultdict(list)
    for name, module in modules.items():
        container, _, own_name = name.rpartition(".")
        # Leaves of one class have nothing in common but the class.
        if name and next(module.children(), None) is not None:
            if own_name.isdecimal():
                in_lists[name.count("."), type(module)].append(name)
            else:
                as_attributes[container, type(module)].append(name)
    repeated = [names for names in in_lists.values() if len(names) > 1]
    repeated = repeated or [names for names in as_attributes.values() if len(names) > 1]

    def lies_within(names: list[str], others: list[str]) -> bool:
        return all(name.startswith(tuple(f"{other}." for other in others)) for name in names)

    def size(names: list[str]) -> tuple[int, int]:
        return _elements(one for name in names for one in modules[name].parameters()), len(names)

    outermost = [names for names in repeated if not any(lies_within(names, others) for others in repeated)]
    return max(outermost, key=size, default=[])
