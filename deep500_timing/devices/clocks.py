"""Device clocks by name: those of every distribution that registers some under ``deep500_timing.clocks``.

::

    from deep500_timing import Timer
    from deep500_timing.devices import clocks

    tmr = Timer(device_clock=clocks.get("cupy")())

``all()`` names every clock that is registered, ``available()`` the usable ones, and ``get(name)`` returns one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deep500_timing._base.plugins import load, names
from deep500_timing._base.warn import warn_once
from deep500_timing.exceptions import MissingPackageError

__all__ = ["all", "available", "get"]

GROUP = "deep500_timing.clocks"
"""The entry point group under which a distribution registers its device clocks."""


def all() -> tuple[str, ...]:  # noqa: A001 (read as `clocks.all()`)
    """The names of every registered device clock, sorted; none is imported."""
    return names(GROUP)


def available() -> tuple[str, ...]:
    """The names of the device clocks that have a device here, sorted.

    To know it the frameworks are imported and asked, which may start their drivers: do not call it before a fork.
    Clocks without their framework (the import raises ``MissingPackageError``) and clocks with a reason from
    ``why_unavailable()`` are left out, as are, with one warning each, clocks that fail otherwise.
    """
    return tuple(name for name in all() if _has_device(name))


def get(name: str) -> Any:
    """The class of device clocks of that name, to be called with its own arguments.

    Raises:
        LookupError: No clock of that name is registered.
        Exception: What importing it raises.
    """
    return load(GROUP, name)


def _has_device(name: str) -> bool:
    try:
        why_unavailable: Callable[[], str | None] | None = getattr(get(name), "why_unavailable", None)
        return why_unavailable is None or why_unavailable() is None
    except MissingPackageError:
        return False
    except Exception as error:
        warn_once(
            f"Asking the device clock {name!r} whether it has a device failed, so it is left out: "
            f"{type(error).__name__}: {error}"
        )
        return False
