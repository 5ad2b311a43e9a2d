"""What more than one module needs is written down in one of them: a change finds one file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("deep500_timing", "adapters") for path in (ROOT / folder).rglob("*.py"))


def _strings_in_code(path: Path) -> list[str]:
    # The string constants of a file that are no docstrings.
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]


def _files_that_say(text: str) -> list[str]:
    return [
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if any(text in constant for constant in _strings_in_code(path))
    ]


@pytest.mark.parametrize(
    ("text", "home"),
    [
        ("pip install 'deep500-timing[", "deep500_timing/_ground/require.py"),
        ("allocated on", "deep500_timing/_ground/memory_usage.py"),
    ],
    ids=["missing package", "memory in a table"],
)
def test_a_text_is_written_in_one_file(text, home):
    """A sentence or a name that several modules show stands in the one that owns it."""
    assert [home] == _files_that_say(text)


def test_the_probe_can_fail():
    """The probe of the test above finds a text in every file that has it."""
    assert 1 < len(_files_that_say("deep500_timing"))
