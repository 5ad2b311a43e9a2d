"""Who imports whom: rooms stand above their imports, and no arrow runs back up or in a circle.

Every import counts: at the top of a module, inside a function, those that only a type checker sees, and names that are
given to functions that import.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {one.name: one for one in (ROOT / "deep500_timing", *(ROOT / "adapters").glob("deep500_timing_*"))}
ROOMS = (
    {"exceptions", "_base"},
    {"_recording"},
    {"devices", "_distributed.launchers"},
    {"_summary"},
    {"runs", "flops", "_distributed", "ranks"},
    {"_views", "report", "compare"},
    {"exporters"},
    {"timer"},
    {"memory", "testing", "devices._contract", "loop"},
    {"_named"},
    {"throughput"},
    {"wallclock", "ranklog"},
    {"__init__", "_launch", "_command", "__main__", "adapters"},
)
"""The rooms of the core from the ground up. A module imports from its own room and from lower floors. A module that
stands elsewhere than its folder is named in full: the suite for device clocks runs a timer over the clock."""


def _floor(module: str) -> int:
    inside = module.partition(".")[2] or "__init__"
    for name in (inside, inside.partition(".")[0]):
        for floor, rooms in enumerate(ROOMS):
            if name in rooms:
                return floor
    raise AssertionError(f"{module} stands in no room; give it its floor in ROOMS")


def _modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def arrows_of(module: str, source: str, modules=MODULES) -> set[str]:
    """The modules of the project that a module names in an import, wherever the import stands."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                # Another name is a name in the package, which the package's own imports account for.
                below = f"{node.module}.{alias.name}"
                found.add(below if below in modules else node.module)
        elif isinstance(node, ast.Call) and node.args and isinstance(name := node.args[0], ast.Constant):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if called in ("import_module", "__import__", "after_import", "load_plain") and name.value in modules:
                found.add(name.value)
    return found - {module}


GRAPH = {module: arrows_of(module, path.read_text(encoding="utf-8")) for module, path in MODULES.items()}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The modules that reach each other, two or more together."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            for module in graph[ahead.pop()] - seen:
                seen.add(module)
                ahead.append(module)
        return seen

    reach = {module: reached(module) for module in graph}
    groups = {
        frozenset({module, *(other for other in reach[module] if module in reach[other])})
        for module in graph
        if module in reach[module]
    }
    return sorted(sorted(group) for group in groups)


def test_there_is_no_circle():
    """No module imports itself by way of others, in the core or in an adapter."""
    assert [] == circles(GRAPH)


@pytest.mark.parametrize("module", sorted(module for module in MODULES if module.startswith("deep500_timing.")))
def test_no_arrow_climbs(module):
    """A module of the core imports nothing from a higher floor, and nothing from the adapters."""
    floor = _floor(module)
    others = {other for other in GRAPH[module] if not other.startswith(f"{module}.")}  # A package shows its own parts.
    climbing = {other for other in others if not other.startswith("deep500_timing.") or _floor(other) > floor}
    assert set() == climbing


def test_adapters_do_not_know_of_each_other():
    """An adapter imports from the core and from itself; DeepSpeed's names stand on the adapter for PyTorch."""
    below = {"deep500_timing_deepspeed": {"deep500_timing_torch"}}
    for module, others in GRAPH.items():
        package = module.partition(".")[0]
        allowed = {package, "deep500_timing", *below.get(package, ())}
        assert {other for other in others if other.partition(".")[0] not in allowed} == set()


def test_an_adapter_uses_no_private_module_of_another():
    """What DeepSpeed's names stand on, the adapter for PyTorch shows in public modules."""
    for module, others in GRAPH.items():
        package = module.partition(".")[0]
        adapters = {other for other in others if other.startswith("deep500_timing_") and "._" in other}
        assert {other for other in adapters if other.partition(".")[0] != package} == set(), module


def test_the_probe_sees_every_kind_of_import():
    """Imports for types and those inside functions are arrows as well, and a circle through them is found."""
    modules = dict.fromkeys(["p", "p.a", "p.b", "p.c", "p.d", "p.e"])
    sources = {
        "p": "from p.a import x",
        "p.a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.b import y",
        "p.b": "def f():\n    from p import c",
        "p.c": "import importlib, p.a\nimportlib.import_module('p')",
        "p.d": "from importlib import import_module\nf = lambda: import_module('p.a')",
        "p.e": "__import__('p.b')\nprint('p.c')",
    }
    graph = {module: arrows_of(module, source, modules) for module, source in sources.items()}
    to = {"p": {"p.a"}, "p.a": {"p.b"}, "p.b": {"p.c"}, "p.c": {"p", "p.a"}, "p.d": {"p.a"}, "p.e": {"p.b"}}
    assert to == graph
    assert [["p", "p.a", "p.b", "p.c"]] == circles(graph)
    assert _floor("deep500_timing.timer") > _floor("deep500_timing._recording.recorder")
