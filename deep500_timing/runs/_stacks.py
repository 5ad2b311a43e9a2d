"""Samples of the main thread's Python stack, taken by another thread.

A sample is a text: the frames from the outermost to the innermost, one a line. A frame of the program is
``NAME<tab>FILE:LINE<tab>EXPRESSION``; one of the standard library or of an installed package is ``NAME<tab>FILE``.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from deep500_timing._summary.text import safe_name, shorten

if TYPE_CHECKING:
    from types import CodeType

_DEEPEST = 200
_MOST_TEXTS = 4096
"""Different stacks of a run. Further ones are written without their frames."""
_EXPRESSION = 48
_PACKAGES = ("site-packages", "dist-packages")
_STANDARD = os.path.dirname(os.__file__) + os.sep
_GOLDEN = 0.6180339887


class StackSampler:
    """Reads the Python stack of the main thread. The main thread does not take part."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._ident = threading.main_thread().ident or 0
        self._phase = 0.0
        self._codes: dict[int, tuple[CodeType, bool | None, str]] = {}
        self._texts: dict[tuple[int, ...], str] = {}
        self._known: set[str] = set()
        # Without the GIL, the frames of a running thread may change while they are read.
        self.is_possible = bool(getattr(sys, "_is_gil_enabled", lambda: True)())

    def nap_s(self) -> float:
        """Time until the next sample: uneven, so that no period of the program hides from the samples."""
        self._phase = (self._phase + _GOLDEN) % 1.0
        return self._period_s * (0.5 + self._phase)

    def sample(self) -> str | None:
        """The stack of the main thread now; None if the thread has ended."""
        # The frames keep their locals alive, so they are let go before anything is looked up.
        frame = sys._current_frames().get(self._ident)
        if frame is None:
            return None
        found: list[tuple[CodeType, int]] = []
        modules: dict[int, Any] = {}
        while frame is not None and len(found) < _DEEPEST:
            code = frame.f_code
            if id(code) not in self._codes:
                modules[id(code)] = frame.f_globals.get("__name__")
            found.append((code, frame.f_lasti))
            frame = frame.f_back
        del frame
        key: list[int] = []
        for code, at in found:
            known = self._codes.get(id(code)) or self._learn(code, modules.get(id(code)))
            if known[1] is not None:
                key += (id(code), at if known[1] else -1)
        text = self._texts.get(tuple(key))
        if text is None:
            text = self._text_of(key)
        return text

    def _learn(self, code: CodeType, module: Any) -> tuple[CodeType, bool | None, str]:
        # Kept alive, so that its id stays unique. None for a frame of this package.
        file = code.co_filename
        package = str(module or "").partition(".")[0]
        is_program: bool | None = not (file.startswith((_STANDARD, "<frozen")) or _in_packages(file) is not None)
        if package.startswith("deep500_timing"):
            is_program = None
        name = getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")
        known = self._codes[id(code)] = (code, is_program, f"{safe_name(name)}\t{safe_name(_short(file))}")
        return known

    def _text_of(self, key: list[int]) -> str:
        frames = []
        for ident, at in zip(key[::2], key[1::2], strict=True):
            code, is_program, label = self._codes[ident]
            frames.append(f"{label}{_line_of(code, at)}" if is_program else label)
        text = "\n".join(reversed(frames))
        if text not in self._known:
            if len(self._known) >= _MOST_TEXTS:
                return ""
            self._known.add(text)
        if len(self._texts) >= 4 * _MOST_TEXTS:
            self._texts.clear()
        self._texts[tuple(key)] = text
        return text


def _in_packages(file: str) -> str | None:
    for name in _PACKAGES:
        _, found, inside = file.rpartition(f"{os.sep}{name}{os.sep}")
        if found:
            return inside
    return None


def _short(file: str) -> str:
    inside = _in_packages(file)
    if inside is not None:
        return inside
    if file.startswith(_STANDARD):
        return file[len(_STANDARD) :]
    here = os.getcwd() + os.sep
    return file[len(here) :] if file.startswith(here) else os.sep.join(file.split(os.sep)[-2:])


def _line_of(code: CodeType, at: int) -> str:
    """The line and the expression that an instruction is of, such as ``:41<tab>os.fsync(file)``."""
    first, last, begin, end = list(code.co_positions())[at // 2]
    if first is None:
        return ":?\t"
    line = linecache.getline(code.co_filename, first).encode()
    text = line[begin or 0 : end if last == first else None].decode(errors="replace").strip()
    return f":{first}\t{shorten(safe_name(text), _EXPRESSION)}"
