"""Loads the plain form of the modules that also exist compiled, for ``DEEP500_TIMING_PURE=1``.

Import prefers a compiled module to its ``.py``; this puts the ``.py`` into ``sys.modules`` first.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def load_plain(package: str, folder: Path, names: tuple[str, ...]) -> None:
    """Import modules from their sources, in the order given: an earlier one must not fetch another's compiled form."""
    for name in names:
        full_name = f"{package}.{name}".replace("/", ".")
        if full_name in sys.modules:  # The caller's file was read a second time, under another name.
            continue
        spec = spec_from_file_location(full_name, folder / f"{name}.py")
        if spec is None or spec.loader is None:  # pragma: no cover
            raise ImportError(f"{full_name} cannot be loaded from its source")
        module = module_from_spec(spec)
        sys.modules[full_name] = module
        spec.loader.exec_module(module)


load_plain(
    "deep500_timing",
    Path(__file__).parent.parent,
    ("_recording/intervals", "_recording/recorder", "devices/_queue", "devices/_pool", "timer"),
)
