"""A text for several modules is in one of them: a change finds one file."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("deep500_timing", "adapters") for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def _said_in_code(path: Path) -> tuple[list[str], set[str]]:
    # The string constants of a file that are no docstrings; and its names: fields, attributes, keywords,
    # variables, and strings that are a name and nothing else.
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    strings = [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]
    fields = ((field, value) for node in nodes for field, value in ast.iter_fields(node))
    return strings, {*strings, *(str(value) for field, value in fields if field in ("attr", "id", "arg", "name"))}


def _files_that_say(text: str) -> list[str]:
    return [
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if any(text in constant for constant in _said_in_code(path)[0])
    ]


def _files_that_name(name: str) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in SOURCES if name in _said_in_code(path)[1]]


@pytest.mark.parametrize(
    ("text", "home"),
    [
        ("pip install 'deep500-timing[", "deep500_timing/_base/require.py"),
        ("allocated on", "deep500_timing/_base/memory_usage.py"),
        ("KiB", "deep500_timing/_summary/text.py"),
        ("n/a", "deep500_timing/_summary/text.py"),
        ("µs", "deep500_timing/_summary/text.py"),
    ],
    ids=["missing package", "memory in a table", "size", "DeepSpeed's size", "time"],
)
def test_a_text_is_written_in_one_file(text, home):
    """A sentence or a name that several modules show stands in the one that owns it."""
    assert [home] == _files_that_say(text)


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("p90", "deep500_timing/_summary/stats.py"),
        ("p99", "deep500_timing/_summary/stats.py"),
        ("max_device_reserved_bytes", "deep500_timing/_base/memory_usage.py"),
        ("PMI_RANK", "deep500_timing/_distributed/launchers.py"),
        ("SLURM_PROCID", "deep500_timing/_distributed/launchers.py"),
    ],
)
def test_a_name_is_known_to_one_file(name, home):
    """A percentile, an amount of memory, a launcher: what computes, writes or shows them goes by the one list."""
    assert [home] == _files_that_name(name)


def test_the_probe_can_fail():
    """The probe of the test above finds a text in every file that has it."""
    assert 1 < len(_files_that_say("deep500_timing"))
    assert 1 < len(_files_that_name("p95"))
