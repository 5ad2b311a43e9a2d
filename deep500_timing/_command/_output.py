"""What subcommands print: plain data as JSON, and a word to whoever waits."""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from deep500_timing._command._app import click

if TYPE_CHECKING:
    from collections.abc import Iterator

_PATIENCE_S = 1.0


def print_json(data: Any) -> None:
    """Print plain data as JSON, in ASCII: nothing in a name can steer a terminal."""
    click.echo(json.dumps(data, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Say on the terminal what takes longer than a second, and take it back at the end."""
    stream: Any = sys.stderr
    if stream is None or not stream.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    said: list[str] = []
    lock = threading.Lock()
    over = False

    def say() -> None:
        with lock:
            if not over:
                said.append(what)
                stream.write(f"{what} …")
                stream.flush()

    timer = threading.Timer(_PATIENCE_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            over = True
            if said:
                stream.write("\r\x1b[K")
                stream.flush()
