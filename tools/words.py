"""Hold pages and folders of code against house_words.txt: ``python tools/words.py PAGE-OR-FOLDER...``."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

LINES = Path(__file__).with_name("house_words.txt").read_text(encoding="utf-8").splitlines()
RULES = [tuple(part.strip() for part in line.split("=>")) for line in LINES if line[:1] not in ("", "#", "~")]
ODD = re.compile(rf"\b({'|'.join(line[1:].strip() for line in LINES if line[:1] == '~')})\b", re.IGNORECASE)
MOST_ODD, IN_TESTS = 20, 30
"""In 10 000 words."""


def prose_of(path: Path) -> str:
    """The text of a page without its code, or the docstrings and comments of code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        fenced = r"^```.*?^```|`[^`\n]+`"
        return re.sub(fenced, lambda code: "\n" * code[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    found = [one.value for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Expr)]
    strings = [one.value for one in found if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join([*strings, *(one.string for one in tokens if one.type == tokenize.COMMENT)])


def faults_of(path: Path) -> list[str]:
    """Each word that the house does not use, and whether there are too many odd turns."""
    texts = [prose_of(one) for one in ([path] if path.is_file() else path.rglob("*.py"))]
    said = [
        f"{path}:{text.count(chr(10), 0, hit.start()) + 1}: {hit[0]!r}: {remedy}"
        for text in (texts if path.suffix == ".md" else [])
        for pattern, remedy in RULES
        for hit in re.finditer(rf"\b(?:{pattern})\b", text, flags=re.IGNORECASE)
    ]
    words, odd = (sum(len(re.findall(one, text)) for text in texts) for one in (r"[A-Za-z']+", ODD))
    if 10_000 * odd > (IN_TESTS if path.name in ("tests", "benchmarks") else MOST_ODD) * words:
        said.append(f"{path}: {odd} odd turns in {words} words: name things, instead of 'what is ...' and 'whose ...'")
    return said


if __name__ == "__main__":
    sys.exit("\n".join(fault for name in sys.argv[1:] for fault in faults_of(Path(name))) or 0)
