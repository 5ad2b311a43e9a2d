"""Lines on a terminal, in colour if rich is installed, or as plain text on any other stream."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

from deep500_timing._summary.text import fit_encoding
from deep500_timing._views.table import plain

if TYPE_CHECKING:
    from deep500_timing._views.table import Line


def width_for(stream: Any) -> int | None:
    """The columns of a terminal; None on any other stream, where lines have no limit."""
    return width_of_terminal(stream) if is_terminal(stream) else None


def put(stream: Any, lines: list[Line]) -> None:
    """Write lines that were drawn with :func:`width_for` of the stream."""
    if is_terminal(stream):
        try:
            import rich.console  # noqa: F401
        except ImportError:
            pass
        else:
            _put_rich(stream, lines, width_of_terminal(stream))
            return
    stream.write(fit_encoding(plain(lines), getattr(stream, "encoding", None)))
    if (flush := getattr(stream, "flush", None)) is not None:
        flush()


def is_terminal(stream: Any) -> bool:
    """Whether a stream says that it is a terminal."""
    isatty = getattr(stream, "isatty", None)
    return isatty is not None and bool(isatty())


def width_of_terminal(stream: Any) -> int:
    """The columns of a terminal; 80 if unknown."""
    if not os.environ.get("COLUMNS"):
        try:
            columns = os.get_terminal_size(stream.fileno()).columns
        except (AttributeError, OSError, ValueError):
            columns = 0
        if columns > 0:
            return columns
    return shutil.get_terminal_size().columns


def _put_rich(stream: Any, lines: list[Line], width: int) -> None:
    from rich.console import Console

    Console(file=stream, width=width, highlight=False).print(
        rich_text(lines, getattr(stream, "encoding", None)), end="", soft_wrap=True
    )


def rich_text(lines: list[Line], encoding: str | None) -> Any:
    """Lines as rich's text, without its markup: a region's name may look like markup."""
    from rich.text import Text

    text = Text()
    for line in lines:
        for span in line:
            text.append(fit_encoding(span.text, encoding), span.style)
        text.append("\n")
    return text
