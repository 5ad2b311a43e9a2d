"""Prints the oldest versions that ``pyproject.toml`` admits of what the package and its extras depend on.

``make test-oldest`` installs these. PyTorch and CuPy are left out: the oldest PyTorch that is admitted is published
with its CUDA libraries only, gigabytes of them, CuPy needs a GPU, and the oldest mpi4py the headers of an MPI.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

LEFT_OUT = {"torch", "cupy-cuda12x", "mpi4py"}
# The same modules without the GPU libraries.
INSTEAD = {"tensorflow": "tensorflow-cpu"}


def oldest(project: dict) -> list[str]:
    """``name==version`` for each dependency; of one that several extras ask for, the newest of their lower bounds."""
    asked = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    lowest: dict[str, str] = {}
    for requirement in asked:
        found = re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement)
        if found is None:
            raise ValueError(f"{requirement!r} names no oldest version; write it as name>=version")
        name, version = found.groups()
        lowest[name] = max(lowest.get(name, "0"), version, key=lambda text: [int(part) for part in text.split(".")])
    return [f"{INSTEAD.get(name, name)}=={version}" for name, version in lowest.items() if name not in LEFT_OUT]


if __name__ == "__main__":
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    print(*oldest(tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]), sep="\n")
