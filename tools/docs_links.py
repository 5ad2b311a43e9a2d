"""Hooks of the documentation site: its version, pages that show files from outside ``docs/``, links, docstrings.

A page shows the file of a line ``<!-- include PATH -->`` in its place, below the page's own title if it has one. A
relative link leads to the page of its target, or becomes the target's plain name where the site has no such page. In
docstrings roles become code, and arguments that are explained together get a row each.
"""

from __future__ import annotations

import posixpath
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import griffe

ROLE = re.compile(r":[a-z]+:`(?:~(?:[\w.]*\.)?)?([^`]+)`")
TOGETHER = re.compile(r"^( +)(\w+(?:, \w+)+):((?: .*|)(?:\n\1 +.*)*)", re.MULTILINE)
CODE_OR_HEADING = re.compile(r"^(```.*?^```$)|^#+ ", re.MULTILINE | re.DOTALL)
ROOT = Path(__file__).resolve().parents[1]
SHOWN = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "adapters/README.md": "adapters.md",
    "benchmarks/RESULTS.md": "cost.md",
    "benchmarks/ACCURACY.md": "cost.md",
    "benchmarks/FINDINGS.md": "findings.md",
}
"""Files outside ``docs/`` and their pages."""


def on_config(config: Any) -> None:
    """Name the version beneath each page."""
    config.copyright = f"deep500-timing {metadata.version('deep500-timing')}"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Include files, and rewrite the links of a page."""
    here = posixpath.dirname(page.file.src_uri)
    own, *rest = re.split(r"^<!-- include (\S+) -->\n?", markdown, flags=re.MULTILINE)
    text = _linked(own, f"docs/{page.file.src_uri}", here)
    for source, between in zip(rest[::2], rest[1::2], strict=True):
        included = _linked((ROOT / source).read_text(encoding="utf-8"), source, here)
        text += CODE_OR_HEADING.sub(lambda found: found[1] or f"#{found[0]}", included) if own.strip() else included
        text += _linked(between, f"docs/{page.file.src_uri}", here)
    return text


def _linked(markdown: str, source: str, here: str) -> str:
    def rewrite(match: re.Match[str]) -> str:
        mark, text, link, anchor = match.groups()
        if re.match(r"[a-z]+:", link) or not link:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        shown = SHOWN.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if shown is None:
            return text if mark else f"`{target}`" if text == link else f"{text} (`{target}`)"
        return f"{mark}[{text}]({posixpath.relpath(shown, here or '.')}{anchor or ''})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)", rewrite, markdown)


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of a package when it has been read."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite those of all members."""
        found: list[griffe.Object] = [pkg]
        for one in found:
            found += [member for member in one.members.values() if isinstance(member, griffe.Object)]
            if one.docstring is not None:
                one.docstring.value = TOGETHER.sub(_apart, ROLE.sub(r"`\1`", one.docstring.value))


def _apart(match: re.Match[str]) -> str:
    indent, names, text = match.groups()
    return "\n".join(f"{indent}{name}:{text}" for name in names.split(", "))
