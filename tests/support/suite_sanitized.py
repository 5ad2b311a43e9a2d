"""Compiles the core with AddressSanitizer and checked bounds into ``build/asan``; see ``make asan``.

The compiled package stands before the installed package on ``PYTHONPATH``. The interpreter itself is not built so:
the sanitizer's library is loaded before it, and it allocates each object alone (``PYTHONMALLOC``), so that the
blocks of intervals have red zones.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from sysconfig import get_config_var

TREE = Path(__file__).parents[2]
PLACE = TREE / "build" / "asan"


def main() -> None:
    """Compile."""
    spec = importlib.util.spec_from_file_location("hatch_build", TREE / "hatch_build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    build.DIRECTIVES |= {"boundscheck": True, "initializedcheck": True}
    os.environ["CFLAGS"] = "-fsanitize=address -fno-omit-frame-pointer -Werror=maybe-uninitialized"
    os.environ["LDFLAGS"] = "-fsanitize=address"
    shutil.rmtree(PLACE, ignore_errors=True)
    package = TREE / "deep500_timing"
    scratch = PLACE / "scratch"
    scratch.mkdir(parents=True)
    compiled = build._compile([package], build.sources_in([package]), scratch)
    others = shutil.ignore_patterns("__pycache__", f"*{get_config_var('EXT_SUFFIX')}")
    shutil.copytree(package, PLACE / "deep500_timing", ignore=others)
    for path in compiled:
        shutil.copy2(path, PLACE / path.relative_to(scratch / "lib"))
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
