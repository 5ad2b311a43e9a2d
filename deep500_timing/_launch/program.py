"""Runs a script, a module, code, a folder, a zip file or the standard input as Python itself would.

It runs in this process, in a new ``__main__``. ``multiprocessing``, which remembers ``__main__``, must not be imported
before.
"""

from __future__ import annotations

import builtins
import os
import sys
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any


_console = sys.modules["__main__"]  # Kept: the interpreter deletes `__file__` in it as it ends, be it freed or not.


class UsageError(Exception):
    """The command line is wrong. The text gives the correction."""


def run(arguments: list[str]) -> None:
    """Run the program that the arguments name; returns or raises as the program does.

    The arguments are ``[FILE, ...]``, ``["-m", MODULE, ...]``, ``["-c", CODE, ...]`` or ``["-", ...]``; FILE may be a
    folder or a zip file with a ``__main__.py``. If they name nothing, it raises ``UsageError``.
    """
    execute = _prepare(arguments)
    sys.orig_argv = [*sys.orig_argv[:1], *arguments]
    try:
        execute()
    except SystemExit as error:
        from deep500_timing.runs import _current

        _current.exit_code = error.code
        raise
    except BaseException as error:
        # Python prints the traceback and sets the exit status as ever. Only the frames of the launcher are left out.
        inner = error.__traceback__
        while inner is not None and inner.tb_frame.f_globals.get("__name__", "") == __name__:
            inner = inner.tb_next
        sys.excepthook = _without_launcher(sys.excepthook, inner)
        raise


def _without_launcher(hook: Callable[..., Any], inner: TracebackType | None) -> Callable[..., Any]:
    def show(kind: type[BaseException], error: BaseException, _traceback: TracebackType | None) -> None:
        sys.excepthook = hook
        sys.last_traceback = error.__traceback__ = inner
        hook(kind, error, inner)

    return show


def _prepare(arguments: list[str]) -> Callable[[], object]:
    first = arguments[0] if arguments else ""
    if first in ("-m", "-c") and len(arguments) < 2:
        raise UsageError(f"{first} requires {'a module' if first == '-m' else 'code'}.")
    if first == "-m":
        _become(["-m", *arguments[2:]], os.getcwd())
        _new_main()
        return lambda: _run_module(arguments[1], True)
    if first == "-c":
        _become(["-c", *arguments[2:]], "")
        return lambda: _run_code(arguments[1], "<string>", _new_main())
    if first == "-":
        _become(arguments, "")
        return lambda: _run_code(sys.stdin.buffer.read(), "<stdin>", _new_main("<stdin>"))
    if not first or first.startswith("-"):
        raise UsageError(f"{first!r} is no option." if first else "Nothing to run is named.")
    if first.endswith(".ipynb") and os.path.isfile(first):
        raise UsageError(f"{first} is a notebook: deep500-timing run jupyter nbconvert --to notebook --execute {first}")
    if os.path.isdir(first) or _is_zip(first):
        _become(arguments, _absolute(first), always=True)
        _new_main()
        return lambda: _run_module("__main__", False)
    try:
        with open(first, "rb") as file:
            source = file.read()
    except OSError as error:
        # In the words, and with the exit status, of Python.
        what = f"{sys.executable}: can't open file {os.path.abspath(first)!r}"
        sys.stderr.write(f"{what}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    _become(arguments, os.path.dirname(os.path.realpath(first)))
    return lambda: _run_file(source, _absolute(first))


def _become(argv: list[str], path: str, *, always: bool = False) -> None:
    sys.argv = argv
    if not sys.flags.safe_path:
        sys.path[0] = path
    elif always:
        sys.path.insert(0, path)


def _absolute(path: str) -> str:
    # As Python makes `__file__`: it takes one "./" off, and normalises nothing.
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path.removeprefix("./"))


def _is_zip(path: str) -> bool:
    # As Python asks: by its import hooks, of which zipimport is one.
    if not os.path.isfile(path) or path.endswith((".py", ".pyw")):
        return False
    from pkgutil import get_importer

    return get_importer(path) is not None


def _new_main(file: str | None = None) -> ModuleType:
    from importlib.machinery import BuiltinImporter

    main = ModuleType("__main__")
    main.__dict__.update(__loader__=BuiltinImporter, __builtins__=builtins)
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    if file is not None:
        main.__file__ = file
        if sys.version_info < (3, 15):
            main.__dict__.update(__cached__=None)
    sys.modules["__main__"] = main
    if "multiprocessing" in sys.modules:  # it binds the name when it is imported, not when it is used
        sys.modules["__mp_main__"] = main
    return main


def _run_module(name: str, alter_argv: bool) -> None:
    import runpy

    # What Python itself calls for -m, for a folder and for a zip file.
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def _run_code(code: str | bytes, file: str, main: ModuleType) -> None:
    compiled = compile(code, file, "exec", dont_inherit=True)
    if file == "<string>" and sys.version_info >= (3, 13):  # as Python does, for the lines of tracebacks
        import linecache

        key = compiled if hasattr(linecache, "_code_key") else file  # the second up to 3.13.0
        getattr(linecache, "_register_code", lambda *_: None)(key, f"{code}\n", file)
    exec(compiled, main.__dict__)


def _run_file(source: bytes, file: str) -> None:
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader

    main = _new_main(file)
    if file.endswith(".pyc"):
        main.__loader__ = SourcelessFileLoader("__main__", file)
        exec(main.__loader__.get_code("__main__"), main.__dict__)  # type: ignore[union-attr,arg-type,unused-ignore]
        return
    main.__loader__ = SourceFileLoader("__main__", file)
    _run_code(source, file, main)
