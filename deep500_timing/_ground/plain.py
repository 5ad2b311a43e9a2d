"""Loads the plain form of the modules that also exist compiled, for ``DEEP500_TIMING_PURE=1``.

Import prefers a compiled module to the ``.py`` beside it; this puts the ``.py`` into ``sys.modules`` first.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent
# In the order of their imports: one that is read first must not fetch another's compiled form.
for _name in (
    "_recording/intervals",
    "_recording/recorder",
    "_recording/calls",
    "devices/_queue",
    "devices/_null",
    "timer",
    "devices/_anchors",
    "devices/_collecting",
    "devices/_pool",
    "runs/_rows",
):
    _full_name = f"deep500_timing.{_name}".replace("/", ".")
    if _full_name in sys.modules:  # This file was read a second time, under another name.
        continue
    _spec = spec_from_file_location(_full_name, _PACKAGE / f"{_name}.py")
    if _spec is None or _spec.loader is None:  # pragma: no cover
        raise ImportError(f"{_full_name} cannot be loaded from its source")
    _module = module_from_spec(_spec)
    sys.modules[_full_name] = _module
    _spec.loader.exec_module(_module)
