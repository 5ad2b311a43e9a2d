"""Two revisions or two versions of a package, side by side."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deep500_timing.compare._ab import CommandFailedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def _run(command: Sequence[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandFailedError(f"{what}: {(done.stderr or done.stdout).strip()[-1000:]}")
    return done.stdout.strip()


@contextmanager
def revision(rev: str, folder: str, here: str | None = None) -> Iterator[tuple[str, dict[str, str]]]:
    """A git worktree of a revision of the repository around the working directory, removed at the end.

    Folders of the repository that Python imports from, as of an editable installation, are replaced by those of the
    worktree.
    """
    here = os.path.realpath(here or os.getcwd())
    top = os.path.realpath(_run(["git", "-C", here, "rev-parse", "--show-toplevel"], f"--rev {rev}"))
    folder = os.path.abspath(folder)
    _run(["git", "-C", top, "worktree", "add", "--detach", "--quiet", folder, rev], f"--rev {rev}")
    try:
        packages = {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")}
        inside = [
            os.path.relpath(os.path.realpath(path), top)
            for path in sys.path
            if path and _is_below(path, top) and not any(_is_below(path, one) for one in packages)
        ]
        paths = [folder, *(os.path.normpath(os.path.join(folder, path)) for path in inside)]
        yield (
            os.path.normpath(os.path.join(folder, os.path.relpath(here, top))),
            {"PYTHONPATH": _joined(*dict.fromkeys(paths))},
        )
    finally:
        subprocess.run(["git", "-C", top, "worktree", "remove", "--force", folder], capture_output=True, check=False)


def _is_below(path: str, folder: str) -> bool:
    path, folder = os.path.realpath(path), os.path.realpath(folder)
    return path == folder or path.startswith(folder + os.sep)


def _joined(*paths: str) -> str:
    return os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def environment_with(requirement: str, folder: str) -> dict[str, str]:
    """Install a package at a version, in front of those of this environment.

    A virtual environment over the present one takes the package and its missing requirements. The
    command's own Python, or launcher, finds it by ``PYTHONPATH``.
    """
    folder = os.path.abspath(folder)
    _run([sys.executable, "-m", "venv", "--without-pip", folder], f"--with {requirement}")
    python = os.path.join(folder, "Scripts" if os.name == "nt" else "bin", "python")
    packages = _run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], f"--with {requirement}")
    with open(os.path.join(packages, "below.pth"), "w", encoding="utf-8") as file:
        file.write(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    what = f"--with {requirement}: it cannot be installed"
    # pip sees the packages of the environment below and leaves them alone; uv installs every dependency again.
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0:
        _run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", requirement], what)
    elif shutil.which("uv"):
        _run(["uv", "pip", "install", "--quiet", "--python", python, requirement], what)
    else:
        raise CommandFailedError(f"{what}: neither pip nor uv is here. `python -m ensurepip` installs pip.")
    return {"PYTHONPATH": _joined(packages)}
