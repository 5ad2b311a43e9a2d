"""Links of the pages that lead out of ``docs/``: to the page that shows the file, or to its plain name."""

from __future__ import annotations

import re
from typing import Any

SHOWN = {
    "../adapters/README.md": "adapters.md",
    "../benchmarks/RESULTS.md": "cost.md",
    "../benchmarks/ACCURACY.md": "accuracy.md",
    "../README.md": "index.md",
}
"""Files outside ``docs/`` that a page of the site includes."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of one page."""
    depth = page.file.src_uri.count("/")

    def rewrite(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        outside = "../" * depth + "../"
        if not target.startswith(outside):
            return match[0]
        shown = SHOWN.get("../" + target.removeprefix(outside))
        return f"[{text}]({'../' * depth}{shown}{anchor})" if shown else f"`{target.removeprefix(outside)}`"

    return re.sub(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)", rewrite, markdown)
