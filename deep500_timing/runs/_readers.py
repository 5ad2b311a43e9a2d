"""Locks that keep Parquet files from being deleted while a reader uses them."""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from deep500_timing._base.lock import lock

if TYPE_CHECKING:
    from collections.abc import Iterator

_PREFIX = ".reading-"
_LOCK = ".lock"


class Reading:
    """The parts that a reader uses, listed in a locked file until the reader closes or dies."""

    def __init__(self) -> None:
        """List no parts yet."""
        self._target: str | None = None
        self._file = -1
        self._end: weakref.finalize | None = None  # type: ignore[type-arg]

    def say(self, target: str, parts: list[str]) -> None:
        """List the parts in a folder that are in use from now on. Call it inside :func:`alone`."""
        if target != self._target:
            self.close()
            self._file, path = tempfile.mkstemp(prefix=_PREFIX, dir=target)
            self._target = target
            self._end = weakref.finalize(self, _end, self._file, path, os.getpid())
            os.chmod(path, 0o644)  # Other users who may remove parts must be able to read it.
            lock(self._file)
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        os.write(self._file, json.dumps(parts).encode())

    def close(self) -> None:
        """Release the parts."""
        if self._end is not None:
            self._end()
        self._target = None


def _end(file: int, path: str, pid: int) -> None:
    os.close(file)
    if os.getpid() == pid:  # Not after a fork.
        with suppress(OSError):
            os.unlink(path)


@contextmanager
def alone(target: str) -> Iterator[None]:
    """Exclude other processes that list or remove parts."""
    file = os.open(os.path.join(target, _LOCK), os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        lock(file)
        yield
    finally:
        os.close(file)


def parts_in_use(target: str) -> set[str]:
    """The parts in use. Lists of dead readers are removed. Call it inside :func:`alone`."""
    found: set[str] = set()
    with os.scandir(target) as entries:
        paths = [entry.path for entry in entries if entry.name.startswith(_PREFIX)]
    for path in paths:
        with suppress(OSError, ValueError), open(path, "rb") as file:
            if lock(file.fileno(), 0.0):
                os.unlink(path)
            else:
                file.seek(0)
                found.update(json.load(file))
    return found
