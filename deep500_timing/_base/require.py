"""Optional packages: whether they are there, and what to say if they are not."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from deep500_timing.exceptions import MissingPackageError


def is_installed(package: str) -> bool:
    """Whether a package can be found; it is not imported."""
    if sys.modules.get(package) is not None:
        return getattr(sys.modules[package], "__file__", "") is not None
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return False
    # A folder of that name in the working directory, such as the one that W&B keeps its runs in, is no package.
    return spec is not None and spec.origin is not None


def require(package: str, *, extra: str, caller: str) -> Any:
    """Import an optional package."""
    if not is_installed(package):
        raise missing_package(package, extra=extra, caller=caller)
    return import_module(package)


def missing_package(package: str, *, extra: str, caller: str) -> MissingPackageError:
    """The error for an optional package that is not installed, with the remedy."""
    # Of a module inside a package the package is what one looks for.
    return MissingPackageError(f"{caller} requires {package.partition('.')[0]}; {remedy(extra)}", name=package)


def remedy(extra: str) -> str:
    """What installs the packages of an extra."""
    return f"pip install 'deep500-timing[{extra}]'"
