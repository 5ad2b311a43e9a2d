"""What other distributions add, found through entry points. The built-in parts are found in the same way."""

from __future__ import annotations

from collections.abc import Container, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from deep500_timing._base.warn import warn_once


def names(group: str) -> tuple[str, ...]:
    """The names registered under a group, sorted. Nothing is imported."""
    return tuple(sorted(registered(group)))


def load(group: str, name: str) -> Any:
    found = registered(group)
    if name not in found:
        known = ", ".join(map(repr, sorted(found))) or "none, as deep500-timing is not installed"
        raise LookupError(f"Looking up {name!r} among {group}: no distribution registers it. Registered are: {known}.")
    try:
        return found[name].load()
    except SystemExit as error:
        raise ImportError(f"Importing {name!r} of {group} would end the program: {error!r}.") from error


def loadable(group: str, only: Container[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Each name with its plug-in, in order. One that cannot be imported costs a warning and is left out."""
    for name, point in sorted(registered(group).items()):
        if only is not None and name not in only:
            continue
        try:
            yield name, point.load()
        except (Exception, SystemExit) as error:
            warn_once(
                f"Loading {name!r} ({point.value}, from {_origin(point)}) among {group} failed: "
                f"{type(error).__name__}: {error}. It is left out; update or uninstall that distribution."
            )


def registered(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name. Nothing is imported."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        taken = found.get(point.name)
        if taken is None or taken.value == point.value:
            found[point.name] = point
            continue
        # The first one wins, except that the built-in names are always this distribution's.
        used, other = (point, taken) if _is_built_in(point) and not _is_built_in(taken) else (taken, point)
        found[point.name] = used
        warn_once(
            f"Both {_origin(used)} and {_origin(other)} register {point.name!r} among {group}; "
            f"the one of {_origin(used)} is used. Uninstall the other, or let it use another name."
        )
    return found


def _is_built_in(point: EntryPoint) -> bool:
    return point.dist is not None and point.dist.name == "deep500-timing"


def _origin(point: EntryPoint) -> str:
    # Entry points that are made by hand belong to no distribution.
    return "an unknown distribution" if point.dist is None else str(point.dist.name)
