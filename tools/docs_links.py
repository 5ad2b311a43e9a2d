"""Build hook of the documentation site: pages that show files from outside ``docs/``, and links between them.

A page that consists of ``<!-- include PATH -->`` shows that file. A relative link leads to the page of its target, or
becomes the target's plain name where the site has no such page.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHOWN = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "adapters/README.md": "adapters.md",
    "benchmarks/RESULTS.md": "cost.md",
    "benchmarks/ACCURACY.md": "accuracy.md",
    "benchmarks/FINDINGS.md": "findings-table.md",
}
"""Files outside ``docs/`` and their pages."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Include a file, and rewrite the links of a page."""
    here = posixpath.dirname(page.file.src_uri)
    source = f"docs/{page.file.src_uri}"
    included = re.fullmatch(r"<!-- include (\S+) -->\s*", markdown)
    if included is not None:
        source = included[1]
        markdown = (ROOT / source).read_text(encoding="utf-8")

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
