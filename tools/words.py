"""Find words in pages that the house does not use: ``python tools/words.py FILE...``; the list is house_words.txt."""

from __future__ import annotations

import re
import sys
from pathlib import Path

RULES = [
    tuple(part.strip() for part in line.split("=>"))
    for line in Path(__file__).with_name("house_words.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def found(text: str) -> list[tuple[int, str, str]]:
    """Line, word and remedy of each hit in a page; code is left out."""
    prose = re.sub(
        r"^```.*?^```|`[^`\n]+`", lambda code: "\n" * code[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL
    )
    hits = [
        (prose.count("\n", 0, hit.start()) + 1, hit[0], remedy)
        for pattern, remedy in RULES
        for hit in re.finditer(rf"\b(?:{pattern})\b", prose, flags=re.IGNORECASE)
    ]
    return sorted(hits)


if __name__ == "__main__":
    hits = [(path, *hit) for path in sys.argv[1:] for hit in found(Path(path).read_text(encoding="utf-8"))]
    for path, line, word, remedy in hits:
        print(f"{path}:{line}: {word!r}: {remedy}")
    sys.exit(bool(hits))
