"""Builds the kernel once for each PyTorch, interpreter and source, into a cache that a killed build cannot spoil.

``torch.utils.cpp_extension`` compiles in its own process and folder, since other processes wait for its lock without
end if a build was killed. A rename puts the finished library in its place, its length and digest next to it. They are
checked before it is loaded: loading a truncated library ends the process. The lock here is the operating system's,
which takes it back when its owner dies; it only keeps two builds from doing the same work.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "_deep500_comm_kernel"
SOURCE = Path(__file__).with_name("kernel.cpp")
SWITCH, CACHE = "DEEP500_TIMING_COMM_KERNEL", "DEEP500_TIMING_CACHE"
_FLAG = "-O2"
_DIGEST, _FAILURE = "digest.txt", "failed.txt"
_BUILD = "`python -m deep500_timing_torch.comm build`"
_REBUILD = f"delete its folder, then {_BUILD}"
_loaded: dict[Path, ModuleType] = {}


class KernelUnavailableError(Exception):
    """There is no kernel; the text says why and what to do."""


class KernelNotBuiltError(KernelUnavailableError):
    """There is no kernel yet; no build of it was tried, or none has ended."""


def library_path() -> Path:
    """Where the library of this PyTorch, interpreter and source is, or would be."""
    import torch

    from deep500_timing.adapters import cache_folder

    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    parts = (torch.__version__, str(torch.version.git_version), suffix, _FLAG, SOURCE.read_text())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return Path(cache_folder()) / "comm-kernel" / f"torch-{torch.__version__}-{digest}" / f"{NAME}{suffix}"


def load() -> ModuleType:
    """The kernel, if it has been built and is switched on."""
    from deep500_timing.adapters import setting

    try:
        if not setting("comm_kernel"):
            raise KernelUnavailableError(f"it is switched off by {SWITCH}, or by comm-kernel in pyproject.toml")
        library = library_path()
    except ValueError as error:
        raise KernelUnavailableError(str(error)) from error
    except OSError as error:  # No home folder, or no source.
        raise KernelUnavailableError(f"there is no folder for it: {error}; set {CACHE} to a folder") from error
    if library not in _loaded:
        if not library.exists():
            note = library.with_name(_FAILURE)
            if note.exists():
                raise KernelUnavailableError(f"its build failed ({note}); mend what that says, then {_BUILD}")
            raise KernelNotBuiltError(f"it has not been built; {_BUILD} does, once")
        _check(library)
        _loaded[library] = _import(library)
    return _loaded[library]


def state() -> tuple[str, str]:
    """The kernel's name, and whether it is there: a row of ``deep500-timing doctor``."""
    try:
        load()
    except KernelUnavailableError as error:
        return "comm kernel", str(error)
    return "comm kernel", f"built: {library_path()}"


def _digest_of(content: bytes) -> str:
    return f"{len(content)} {hashlib.sha256(content).hexdigest()}"


def _check(library: Path) -> None:
    from deep500_timing.adapters import is_private

    # A user who can write there, or to a folder around it that this program makes, can run code in this process.
    for path in (library, library.parents[1]):
        if not is_private(str(path)):
            raise KernelUnavailableError(
                f"{path} or its folder belongs to another user or can be written by others; set {CACHE} to a folder of "
                "your own"
            )
    try:
        expected = library.with_name(_DIGEST).read_text()
        digest = _digest_of(library.read_bytes())
    except OSError as error:
        raise KernelUnavailableError(f"{library} cannot be checked: {error}; {_REBUILD}") from error
    if digest != expected:
        raise KernelUnavailableError(
            f"{library} is damaged: its length and digest are {digest[:16]}…, built were {expected[:16]}…; {_REBUILD}"
        )


def _import(library: Path) -> ModuleType:
    import torch.distributed  # noqa: F401 (brings the libraries that the kernel is linked with)

    spec: Any = importlib.util.spec_from_file_location(NAME, library)
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise KernelUnavailableError(f"{library} cannot be loaded: {error}; {_REBUILD}") from error
    return module


def why_not_buildable() -> str | None:
    """Why this machine cannot build it, None if it can."""
    from torch.utils import cpp_extension

    compiler = str(cpp_extension.get_cxx_compiler())  # type: ignore[no-untyped-call, unused-ignore]
    if shutil.which(compiler.split()[0]) is None:
        return f"there is no C++ compiler {compiler!r}; install one, or set CXX to another"
    if not cpp_extension.is_ninja_available():
        return "there is no ninja; pip install ninja"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "the headers of this Python are missing (Python.h); install them (python3-dev)"
    return None


def build(*, limit_s: float = 300.0) -> ModuleType:
    """The kernel, built now if it has not been, which takes half a minute."""
    from deep500_timing.adapters import setting

    until = time.monotonic() + limit_s
    while setting("comm_kernel") and not library_path().exists():
        running = start_build()
        if running is None:  # Another process builds it.
            if time.monotonic() > until:
                raise KernelUnavailableError(f"another process has been building it for {limit_s:g} s")
            time.sleep(0.1)
            continue
        try:
            failed = running.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired as error:
            # The compiler is a child of the build's.
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            raise KernelUnavailableError(f"its build was not done within {limit_s:g} s") from error
        if failed:
            note = library_path().with_name(_FAILURE)
            lines = note.read_text().strip().splitlines() if note.exists() else ["it ended without a word"]
            raise KernelUnavailableError(f"its build failed: {' / '.join(lines[-6:])[-1500:]}")
    return load()


def start_build() -> subprocess.Popen[bytes] | None:
    """Start the build in a separate process, which outlives this one; None if another process builds it."""
    lacks = why_not_buildable()
    if lacks is not None:
        raise KernelUnavailableError(lacks)
    library = library_path()
    folder = library.parent
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise KernelUnavailableError(f"{folder} cannot be written: {error}; set {CACHE} to a folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return None
        # The lock goes with the open file to the child, and ends with it, however it ends.
        return subprocess.Popen(
            [sys.executable, "-P", __file__, str(library)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[lock.fileno()],
            start_new_session=True,
            cwd=folder,
        )


def _compile(library: Path) -> None:
    # In the build's own process, which holds the lock and may remove what killed builds have left. It runs elsewhere,
    # where no pyproject.toml holds settings.
    from torch.utils import cpp_extension

    os.nice(10)
    note = library.with_name(_FAILURE)
    for leftover in library.parent.glob("tmp*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=library.parent, ignore_cleanup_errors=True) as scratch:
        try:
            module: Any = cpp_extension.load(
                NAME, [str(SOURCE)], extra_cflags=[_FLAG], build_directory=scratch, with_cuda=False
            )
            content = Path(str(module.__file__)).read_bytes()
            _put(Path(scratch, "digest"), library.with_name(_DIGEST), _digest_of(content).encode(), 0o600)
            _put(Path(scratch, "finished"), library, content, 0o700)
            note.unlink(missing_ok=True)
        except Exception as error:
            note.write_text(str(error))
            raise


def _put(scratch: Path, place: Path, content: bytes, mode: int) -> None:
    # Without fsync a rename may outlive the content if the power fails.
    with scratch.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    scratch.chmod(mode)
    scratch.replace(place)


if __name__ == "__main__":
    _compile(Path(sys.argv[1]))
