"""The built-in adapters are made of the parts of a third party's adapter: the public names of the core."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = sorted((ROOT / "deep500_timing").rglob("*.py"))
ADAPTERS = {path.relative_to(ROOT / "adapters").as_posix(): path for path in sorted((ROOT / "adapters").rglob("*.py"))}
TAKEN = {
    # The callee of a decorated function, which a compiler is to read differently.
    "deep500_timing_torch/_compile.py": {"Timer._find"},
    # Compiled with the core: an operation's times are kept in C.
    "deep500_timing_torch/comm/_log.py": {"deep500_timing._recording.intervals.Intervals"},
    # Load the plain form of these modules where the core is plain.
    "deep500_timing_torch/comm/__init__.py": {"deep500_timing._base.plain.load_plain"},
}
"""What each file takes beyond that, and may. A longer list means that the core lacks a public name."""


OF_OTHERS = {"_replace", "_values", "_version"}
"""Names of the standard library and of PyTorch that classes of the core have as well."""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_OTHERS


def _own_attributes(trees: list[ast.Module]) -> set[str]:
    # Names that classes define, and that are set on themselves.
    found = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
    return found


def private_names_in(tree: ast.Module, of_core: set[str], of_adapters: set[str]) -> set[str]:
    """The private modules and names of the core that a module imports, and the private attributes that it asks for."""
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr in of_core:
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls") and (node.attr not in of_adapters or owner in ("timer", "Timer")):
                found.add(f"{owner}.{node.attr}")
        for name in names:
            package, *parts = name.split(".")
            if package == "deep500_timing" and any(map(_is_private, parts)):
                found.add(name)
    return found


TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in ADAPTERS.items()}
OF_ADAPTERS = _own_attributes(list(TREES.values()))
OF_CORE = _own_attributes([ast.parse(path.read_text(encoding="utf-8")) for path in CORE])


def test_adapters_take_public_names_alone():
    """Any other need of an adapter is one that every adapter may have: it gets a public name."""
    found = {name: private_names_in(tree, OF_CORE, OF_ADAPTERS) for name, tree in TREES.items()}
    assert {name: taken for name, taken in found.items() if taken} == TAKEN


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("from deep500_timing._base.warn import warn_once", "deep500_timing._base.warn.warn_once"),
        ("    from deep500_timing.runs._log import RunLog as log", "deep500_timing.runs._log.RunLog"),
        ("from deep500_timing._summary import text", "deep500_timing._summary.text"),
        ("import deep500_timing._summary.text", "deep500_timing._summary.text"),
        ("from deep500_timing.runs import _log", "deep500_timing.runs._log"),
        ("timer._find('x')", "timer._find"),
        ("self.timer._memory_at_ends", "self.timer._memory_at_ends"),
    ],
)
def test_the_probe_sees_what_is_private(line, expected):
    """A name of the core that is not public is found however it is taken."""
    tree = ast.parse("def function():\n    " + line.strip())
    assert {expected} == private_names_in(tree, OF_CORE, OF_ADAPTERS)


def test_the_probe_passes_what_is_public():
    """Public names, an adapter's own private ones and dunders are no one's concern."""
    tree = ast.parse(
        "from deep500_timing.adapters import warn_once\nfrom deep500_timing_torch._timer import CPUGPUTimer\n"
        "self._find\nmodule.__name__\n"
    )
    assert set() == private_names_in(tree, OF_CORE, OF_ADAPTERS)
