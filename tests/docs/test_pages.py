"""What the pages beside the README say holds: links and anchors, Python blocks, commands with their options."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from importlib import import_module
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / folder / "README.md" for folder in ("adapters", "tests")] + sorted((ROOT / "benchmarks").glob("*.md"))
TEXTS = {path: path.read_text(encoding="utf-8") for path in PAGES}
BLOCKS = [
    pytest.param(block, id=f"{path.relative_to(ROOT).as_posix()}:{number}")
    for path, text in TEXTS.items()
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))
]
WHOLE = ("ranks.md", "layers.md")
"""Pages whose blocks are whole programs; those of other pages have tests of their own, or leave something out."""


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    heads = re.findall(
        r"^#+ +(.+?)\s*$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """Every link to a file finds it, and every anchor its heading."""
    broken = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", TEXTS[page]):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(link)
    assert [] == broken


@pytest.mark.parametrize("block", BLOCKS)
def test_names_of_ours_are_there(block: str) -> None:
    """A Python block is Python, and what it imports of this package can be imported."""
    for node in ast.walk(ast.parse(block)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("deep500_timing"):
            continue
        if "torch" in node.module and importlib.util.find_spec("torch") is None:
            pytest.skip("needs torch")
        module = import_module(node.module)
        assert [] == [name.name for name in node.names if not hasattr(module, name.name)]


@pytest.mark.timeout(120)
def test_whole_blocks_run(forks, tmp_path: Path, monkeypatch) -> None:
    """Blocks that are whole programs run as they stand, one after the other in one process."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    blocks = [
        block
        for path, text in TEXTS.items()
        if path.name in WHOLE
        for block in re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    ]
    assert len(blocks) >= 2
    program = f"for block in {blocks!r}:\n    exec(compile(block, '<page>', 'exec'), {{'__name__': '__main__'}})\n"
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "output"
    done = forks.start(["-c", program], {**os.environ}, output)
    try:
        assert done.wait(110) == 0, output.read_text()[-4000:]
    finally:
        done.kill()


def test_commands_are_there() -> None:
    """Each subcommand that a page shows exists, and has the options that are shown with it."""
    pytest.importorskip("click")
    from deep500_timing._command._app import app

    shown = [
        (path.name, name, re.findall(r"(?<=\s)--[a-z-]+", rest))
        for path, text in TEXTS.items()
        for name, rest in re.findall(r"deep500-timing ([a-z]+)\b(?![ a-z]*:)([^\n`#|]*)", _code(text))
    ]
    assert len(shown) > 10
    wrong = []
    for page, name, options in shown:
        command = app.get_command(None, name)
        known = {option for parameter in command.params for option in parameter.opts} if command else set()
        if name in ("run", "ab"):  # The options of the user's program follow.
            known |= {"--run", "--quiet", *options}
        if command is None or not {*options} <= known | {"--help"}:
            wrong.append((page, name, options))
    assert [] == wrong


def _code(text: str) -> str:
    # Blocks and what stands between backticks; prose may have "deep500-timing" before any word.
    blocks = re.findall(r"^```(?:sh|text)?\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"^ {4}(deep500-timing .*)$", text, flags=re.MULTILINE)
    return "\n".join([*blocks, *re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)])
