"""Every setting that needs no edit of the program: an environment variable, and a key of ``[tool.deep500-timing]``.

The environment comes first, then the nearest ``pyproject.toml`` from the working directory upwards, then the default.
A wrong value is a ``ValueError`` where a timer is made, in ``autolog()`` and before ``deep500-timing run`` starts the
program; never later. An unknown name is a warning.
"""

from __future__ import annotations

import os
import sys
from functools import cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PREFIX = "DEEP500_TIMING_"
TABLE = "deep500-timing"
TRY = "PYTHON_DEEP500_TIMING_TRY"
"""The variable by which ``deep500-timing try`` hands a program the parameter and the value that is tested."""
TRIED = "tried"
"""The event of such a run: its text is a line of the program that sets the parameter, its value ``before``."""
JOBS = ("SLURM_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "FLUX_JOB_ID", "LSB_JOBID", "PBS_JOBID")
"""Where batch systems tell the job's number: ranks that are launched one by one share it, and not the time."""
_OFF, _ON = ("0", "false", "off", "no"), ("1", "true", "on", "yes")


def _switch(text: str) -> bool:
    if text.lower() not in _OFF + _ON:
        raise ValueError
    return text.lower() in _ON


def _per_second(text: str) -> float:
    if text.lower() in _OFF:
        return 0.0
    number = 50.0 if text.lower() in _ON[1:] else float(text)
    if not 0 <= number <= 1000:
        raise ValueError
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError
    return seconds


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError
    return int(text)


def _unless(is_wrong: Callable[[str], bool]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if is_wrong(text):
            raise ValueError
        return text

    return parse


def numbers_of(text: str) -> frozenset[int]:
    """``"0,3"`` or ``"0-7"`` or both as numbers."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or int(last or first) < int(first):
            raise ValueError
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _exporters(text: str) -> tuple[tuple[str, str], ...]:
    parts = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    if not parts:
        return ()
    # Every first timer would pay for this import: 73 modules, 25 ms.
    from deep500_timing._base.plugins import names

    known = names("deep500_timing.exporters")
    for name, _, _ in parts:
        if name not in known:
            raise ValueError(f"a list of name or name=destination, with the names {', '.join(known)}")
    return tuple((name, destination) for name, _, destination in parts)


class Setting:  # A named tuple compiles itself, for each first timer.
    """One setting."""

    def __init__(self, default: Any, parse: Any, accepted: str, meaning: str, in_table: bool = True) -> None:
        self.default, self.parse, self.accepted = default, parse, accepted
        self.meaning, self.in_table = meaning, in_table


_folder = _unless(os.path.isfile)
_SWITCH = "1, true, on, yes, 0, false, off, no"
SETTINGS = {
    "enabled": Setting("1", _switch, _SWITCH, "0 makes every timer a no-op, also with enabled=True."),
    "run": Setting(None, _folder, "a folder", "Every timer writes its intervals there; `run` and `autolog` as well."),
    "append": Setting(
        "0", _switch, _SWITCH, "1 adds to a finished run in a folder that you name, as `run --append` does."
    ),
    "exporters": Setting(
        "",
        _exporters,
        "a list of name or name=destination",
        "Where `run` and `autolog` report: `jsonl=times.jsonl,prometheus=9400`.",
    ),
    "export_every_s": Setting("60", _seconds, "a number over 0", "Seconds between two of these reports."),
    "ranks": Setting(
        "0",
        lambda text: None if text == "all" else numbers_of(text),
        "all, or numbers such as 0,8-15",
        "The ranks that print the table and report. All ranks log.",
    ),
    "stacks": Setting(
        "50",
        _per_second,
        "0 to 1000, on, off",
        "Samples per second of the main thread's stack, in `run` and `autolog`.",
    ),
    "adopt": Setting(
        "1", _switch, _SWITCH, "0: what the program annotates itself is no region in `run` and `autolog`."
    ),
    "findings": Setting(
        "",
        _unless(lambda text: any(word.strip() and not word.strip().startswith("-") for word in text.split(","))),
        "names of rules, each after a -",
        "Rules of findings to leave out: `-drift,-spikes`.",
    ),
    "steps": Setting(
        "0",
        _whole,
        "a whole number",
        "`run` and `autolog` end the program after so many steps, with the exit status 0; 0 does not.",
        in_table=False,
    ),
    "comm_kernel": Setting("1", _switch, _SWITCH, "0 times collectives without the compiled kernel."),
    "private": Setting("0", _switch, _SWITCH, "1 makes runs and results readable by their owner only: 0600, 0700."),
    "exception_text": Setting(
        "0", _switch, _SWITCH, "1 keeps the text of the exception that ends a run, not its type only."
    ),
    "cache": Setting(None, _folder, "a folder", "Where the compiled kernel and the JavaScript of pages are kept."),
    "noise_floor": Setting(None, _unless(os.path.isdir), "a file", "The noise floors of `compare`."),
    "submit_unix_s": Setting(None, float, "a number", "When the job was submitted, for goodput.", in_table=False),
    "pure": Setting("", str, "anything", "Loads the plain form of the compiled modules.", in_table=False),
    "build": Setting(
        "auto",
        _unless(lambda text: text not in ("auto", "pure", "compiled")),
        "auto, pure, compiled",
        "How `pip install` builds the package.",
        in_table=False,
    ),
}
"""Every setting by its key; the variable is the key in upper case after ``DEEP500_TIMING_``."""
_OF_PLACES = {"run", "exporters", "cache", "noise_floor", "noise-floor"}
"""Settings that change where things go: a table with one of them is named on standard error."""
_MOST_BYTES = 1 << 24
"""Bytes of a ``pyproject.toml`` that is looked into."""
_OWN = ("AUTOLOG", "MEASUREMENT", "PYTEST_CHILD", "COMPLETE", "TEST_", "REHEARSAL", "GPU_SMALL")
"""How variables begin that the project's own programs leave for each other."""


def setting(key: str) -> Any:
    """The value of a setting, such as ``comm_kernel``; docs/configuration.md lists them all.

    Raises:
        ValueError: It has a wrong value.
    """
    known = SETTINGS[key]
    variable = PREFIX + key.upper()
    text, where = os.environ.get(variable), variable
    if not text and known.in_table and key in (table := _table()):
        text, where = table[key], f"{key} in [tool.{TABLE}]"
    text = text or known.default
    if text is None:
        return None
    try:
        return known.parse(text)
    except ValueError as error:
        accepted = str(error) if key == "exporters" else known.accepted
        raise ValueError(f"{where}={text!r} is wrong: give {accepted}.") from None


_seen: tuple[Any, dict[str, Any]] = (None, {})
"""The environment and the table that were found right, and what they say."""


def cache_folder() -> str:
    """Where to keep what takes long to make again.

    Raises:
        FileNotFoundError: There is no home folder, and no setting names another.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder: str = setting("cache") or os.path.join(base, "deep500-timing")
    if folder.startswith("~"):
        raise FileNotFoundError("this user has no home folder")
    return os.path.abspath(folder)


def check_settings() -> dict[str, Any]:
    """Every setting by its key. Warns once of names that are not known. Next to free while nothing has changed.

    Raises:
        ValueError: One has a wrong value.
    """
    global _seen
    # The dictionary behind it: a copy of `os.environ` would decode every variable, for every timer.
    environment, table = getattr(os.environ, "_data", os.environ), _table()
    if (environment, table) == _seen[0]:
        return _seen[1]
    seen = (dict(environment), table), {key: setting(key) for key in SETTINGS}
    known = {PREFIX + key.upper() for key in SETTINGS}
    for name in os.environ:
        if name.startswith(PREFIX) and name not in known and not name.removeprefix(PREFIX).startswith(_OWN):
            _warn_of(name, known)
    in_table = {key for key, one in SETTINGS.items() if one.in_table}
    for name in _table():
        if name not in in_table:
            _warn_of(name, in_table, f" in [tool.{TABLE}]")
    _seen = seen
    return seen[1]


def _warn_of(name: str, known: set[str], where: str = "") -> None:
    from difflib import get_close_matches

    from deep500_timing._base.warn import warn_once

    near = get_close_matches(name, sorted(known), 1, 0.5)
    meant = f" Did you mean {near[0]}?" if near else ""
    warn_once(f"{name}{where} is no setting, and is ignored.{meant} docs/configuration.md lists them all.")


@cache
def _table() -> dict[str, str]:
    # Values as text, as the environment has them. Looked for once: the program may change its directory later.
    if (path := _nearest()) is None:
        return {}
    try:
        from deep500_timing._base.regular import is_private, read_bounded

        data = read_bounded(path, _MOST_BYTES)
        if f"tool.{TABLE}".encode() not in data:
            return {}
        import tomllib

        table = tomllib.loads(data.decode()).get("tool", {}).get(TABLE, {})
        if table and not is_private(path):
            raise PermissionError("another user owns it, or can write to it or its folder")
        if _OF_PLACES & table.keys():
            sys.stderr.write(f"deep500-timing: settings from {path!r}\n")
    except Exception as error:  # It is a file of others.
        from deep500_timing._base.warn import warn_once

        warn_once(f"Reading settings from {path!r} failed: {error}. They are not used.")
        return {}
    return {name.replace("-", "_"): _text_of(value) for name, value in table.items()}


def _nearest() -> str | None:
    # Up to the folder with the first .git, or the home: folders above them are not of the project.
    folder, home = os.getcwd(), os.path.realpath(os.path.expanduser("~"))
    while not os.path.isfile(path := os.path.join(folder, "pyproject.toml")):
        above = os.path.dirname(folder)
        if above == folder or os.path.realpath(folder) == home or os.path.exists(os.path.join(folder, ".git")):
            return None
        folder = above
    return path


def _text_of(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text_of, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
