"""Builds the extension module of the test device, once per source, torch and interpreter.

``python tests/torch_device/_build.py`` builds it ahead of the tests (a minute at most; they build it
themselves otherwise, within the time limit of the first test that needs it).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

NAME = "_deep500_testdev"
SOURCE = Path(__file__).parent / "device.cpp"
BUILD_ROOT = Path(__file__).parents[2] / "build" / "torch_device"
CFLAGS = ("-O2",)


class UnavailableError(Exception):
    """The test device cannot exist here: no torch, compiler, ninja, Python.h, POSIX; the text says which."""


def load_extension() -> ModuleType:
    """Import the extension module, after building it when no earlier run has.

    Raises:
        UnavailableError: A tool that the build needs is absent.
        RuntimeError: The compiler rejected the source.
    """
    if os.name != "posix":
        raise UnavailableError("the test device needs a POSIX system")
    library = _library_path()
    if library.exists():
        return _import_library(library)
    _require_tools()
    with _locked(library.parent):
        if not library.exists():
            return _build(library)
    return _import_library(library)


def _library_path() -> Path:
    import torch

    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    parts = (torch.__version__, str(torch.version.git_version), suffix, " ".join(CFLAGS), SOURCE.read_bytes())
    digest = hashlib.sha256(b"\0".join(part if isinstance(part, bytes) else part.encode() for part in parts))
    return BUILD_ROOT / f"{torch.__version__}-{digest.hexdigest()[:16]}" / f"{NAME}{suffix}"


def _require_tools() -> None:
    from torch.utils import cpp_extension

    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler.split()[0]) is None:
        raise UnavailableError(
            f"the test device needs a C++ compiler; there is no {compiler!r} (set CXX to choose another)"
        )
    if not cpp_extension.is_ninja_available():
        raise UnavailableError("the test device needs ninja; pip install ninja")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise UnavailableError("the test device needs the headers of this Python (Python.h)")


def _build(library: Path) -> ModuleType:
    """Compile in its own folder; a rename publishes the finished file, so no one sees half of it."""
    from torch.utils import cpp_extension

    for leftover in library.parent.glob("tmp*"):  # of a build that was killed: this process holds the lock
        shutil.rmtree(leftover, ignore_errors=True)
    scratch = tempfile.mkdtemp(prefix="tmp", dir=library.parent)
    try:
        module: ModuleType = cpp_extension.load(
            NAME, [str(SOURCE)], extra_cflags=list(CFLAGS), build_directory=scratch, with_cuda=False
        )
        unpublished = Path(scratch, "finished")
        shutil.copy2(str(module.__file__), unpublished)
        unpublished.replace(library)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return module


def _import_library(library: Path) -> ModuleType:
    import torch  # noqa: F401  # brings the libraries that the extension is linked with

    loader = importlib.machinery.ExtensionFileLoader(NAME, str(library))
    spec = importlib.util.spec_from_file_location(NAME, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock that the system takes back when its owner dies, unlike the lock file of cpp_extension."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    (BUILD_ROOT / ".gitignore").write_text("*\n")
    with (folder / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        load_extension()
    except UnavailableError as error:
        sys.exit(str(error))
    print(_library_path())
