"""Build hook: compile the hot path with Cython, or say why not and package plain Python.

A module of ``deep500_timing`` or of an adapter that has a ``.pxd`` beside it is compiled from the same ``.py`` that
runs as plain Python. The compiled form is an optimisation only: without a compiler, or without Cython, the build
warns, and the package behaves the same, slower. ``DEEP500_TIMING_BUILD`` in the environment says otherwise:

* ``auto`` (or unset): compile if possible, else warn.
* ``pure``: compile nothing; a wheel is then tagged ``py3-none-any``.
* ``compiled``: a failure to compile ends the build.
"""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from sysconfig import get_config_var
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGES = ("deep500_timing", "adapters/deep500_timing_torch")
"""Folders that may have modules to compile."""
MODE_VARIABLE = "DEEP500_TIMING_BUILD"
MODES = ("auto", "pure", "compiled")

DIRECTIVES: dict[str, Any] = {
    "language_level": 3,
    # The modules index C arrays whose bounds they keep themselves.
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
    # The .pxd has the C types; the annotations in the .py are for type checkers: `int` there is any integer.
    "annotation_typing": False,
    # Methods become the interpreter's own method descriptors, which it calls faster than Cython's function
    # objects (19 against 23 ns); the embedded signature keeps `help()` and `inspect.signature` working.
    "binding": False,
    "embedsignature": True,
    "embedsignature.format": "clinic",
    # A class that is meant to be copied or pickled says how. Cython's own way takes a tenth of the compiled code.
    "auto_pickle": False,
}


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled modules to a wheel, or puts them beside their sources for an editable install."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel's files are collected.

        Args:
            version: ``"standard"`` or ``"editable"``.
            build_data: What hatchling is about to build; gets the compiled files and the wheel's tag.

        Raises:
            ValueError: ``DEEP500_TIMING_BUILD`` holds an unknown value.
            RuntimeError: The modules could not be compiled and ``DEEP500_TIMING_BUILD=compiled``.
        """
        mode = os.environ.get(MODE_VARIABLE) or "auto"
        if mode not in MODES:
            raise ValueError(f"{MODE_VARIABLE}={mode!r} is not known; use one of {', '.join(MODES)}")

        packages = [Path(self.root, package) for package in PACKAGES]
        sources = sources_in(packages)
        if version == "editable":
            # An older compiled module would shadow its source, also where that is no longer compiled.
            _remove_compiled(packages)
        if mode == "pure" or not sources:
            return

        # The folder outlives this method, because the wheel's files are collected after it. An object that
        # cleans up after itself serves better than `finalize`, which hatchling leaves out after a failure.
        self._scratch = tempfile.TemporaryDirectory(prefix="deep500-timing-build-")
        self._lib = Path(self._scratch.name, "lib")
        try:
            compiled = _compile(packages, sources, Path(self._scratch.name))
        except (Exception, SystemExit) as error:
            # What a missing or broken compiler raises in setuptools, distutils and Cython has no common base.
            if mode == "compiled":
                raise RuntimeError(
                    f"{MODE_VARIABLE}=compiled: compiling {_names(sources)} failed: {_describe(error)}; "
                    f"install a C compiler and the headers of Python, or build with {MODE_VARIABLE}=auto"
                ) from error
            self._warn(
                f"could not compile {_names(sources)}: {_describe(error)}. "
                "The package works the same, slower; a C compiler and the headers of Python make it fast."
            )
            return

        if version == "editable":
            for path in compiled:
                # Replaced, not overwritten: a process that has the old one loaded goes on with it.
                module = path.relative_to(self._lib)
                (parent,) = (package.parent for package in packages if package.name == module.parts[0])
                place = parent / module
                fresh = place.with_name(f".{place.name}.new")
                shutil.copy2(path, fresh)
                fresh.replace(place)
        else:
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            build_data["force_include"].update({str(path): path.relative_to(self._lib).as_posix() for path in compiled})

    def _warn(self, message: str) -> None:
        print(f"deep500-timing: warning: {message}", file=sys.stderr, flush=True)


def sources_in(packages: list[Path]) -> list[Path]:
    """The modules of some packages that are compiled: those with a ``.pxd`` beside them."""
    return [path.with_suffix(".py") for package in packages for path in sorted(package.rglob("*.pxd"))]


def _compile(packages: list[Path], sources: list[Path], scratch: Path) -> list[Path]:
    """Compile modules in a copy of their packages, so that no generated C file is left in the tree.

    Args:
        packages: Folders of the packages, and of those whose types they use.
        sources: The modules to compile, each with its ``.pxd`` beside it.
        scratch: Empty folder to work in.

    Returns:
        The compiled modules, in ``scratch``.
    """
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    modules = []
    for package in packages:
        for path in package.rglob("*.p[yx]*"):
            if path.suffix in {".py", ".pxd"}:
                module = path.relative_to(package.parent)
                copy = scratch / module
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copy)
                if path in sources:
                    copy.write_text(_with_signatures(path.read_text("utf-8")), "utf-8")
                    modules.append(module)
    optimise = [] if os.name == "nt" else ["-O2", "-g0", "-fno-plt"]
    extensions = [
        Extension(
            ".".join(module.with_suffix("").parts),
            # Relative, because tracebacks name the file as it was named to Cython.
            [module.as_posix()],
            extra_compile_args=optimise,
        )
        for module in modules
    ]
    # The build frontend reads its own protocol from the standard output.
    with contextlib.chdir(scratch), contextlib.redirect_stdout(sys.stderr):
        distribution = Distribution(
            {
                "name": packages[0].name,
                "ext_modules": cythonize(extensions, compiler_directives=DIRECTIVES, quiet=True),
                "script_name": "hatch_build.py",
            }
        )
        command = distribution.get_command_obj("build_ext")
        command.build_lib = str(scratch / "lib")
        command.build_temp = str(scratch / "temp")
        command.parallel = True
        distribution.run_command("build_ext")
    return [Path(path) for path in command.get_outputs()]


def _with_signatures(source: str) -> str:
    """Put each class's signature before its docstring, where ``help()`` and ``inspect.signature`` find it.

    Cython does so for methods; of a class written in C the interpreter knows no other.
    """
    lines = source.splitlines(keepends=True)
    for kind in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        initialisers = [
            node for node in ast.walk(kind) if isinstance(node, ast.FunctionDef) and node.name == "__init__"
        ]
        text = kind.body[0]
        if not initialisers or not isinstance(text, ast.Expr) or not ast.get_docstring(kind):
            continue
        arguments = initialisers[0].args
        del arguments.args[0]
        everything = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
        for argument in everything:
            if argument is not None:
                argument.annotation = None
        line = lines[text.lineno - 1]
        # On the same line, so that tracebacks keep their numbers.
        signature = f"{kind.name}({ast.unparse(arguments)})\\n--\\n\\n"
        lines[text.lineno - 1] = line.replace('"""', f'"""{signature}', 1)
    return "".join(lines)


def _remove_compiled(packages: list[Path]) -> None:
    """Delete the modules that an earlier build for the running interpreter left in the packages."""
    for package in packages:
        for path in package.rglob(f"*{get_config_var('EXT_SUFFIX')}"):
            path.unlink()


def _names(sources: list[Path]) -> str:
    starts = [f"{os.sep}{Path(package).name}{os.sep}" for package in PACKAGES]
    return ", ".join(
        next(str(source)[str(source).rindex(start) + 1 :] for start in starts if start in str(source))
        for source in sources
    )


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
