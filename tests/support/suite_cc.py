"""A C compiler that compiles nothing twice: what it once made of a text is kept in ``build/caches/cc``.

The hot path is compiled for the tree's environment, for each Python's wheel and for the tests of packaging, most of it
from the same text by the same compiler: thirty seconds of the processor each time. Run without arguments this prints
what ``CC`` is to be for a build by the Python that runs it; the build itself, all but the compiler, is the user's::

    CC="$(python tests/support/suite_cc.py)" python -m build

An object is found again by the compiler's version, its options, and the text with all that it includes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

KEPT = Path(__file__).parents[2] / "build" / "caches" / "cc"
FOLDER = "DEEP500_TIMING_TEST_CC"
"""The variable that names another folder."""
# As long as an object that nobody asks for stays.
_KEEP_S = 14 * 24 * 3600.0


def command() -> str:
    """``CC`` for a build by this Python: this compiler in front of the one that Python would take."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    return f"{shlex.join([sys.executable, '-I', '-S', str(Path(__file__).resolve())])} {compiler}"


def compile_once(asked: list[str]) -> int:
    """Do what a compiler is asked to do, or hand out what it made of the same before.

    Returns:
        Its exit status.
    """
    if "-c" not in asked or "-o" not in asked:
        return subprocess.call(asked)
    at = asked.index("-o")
    target = asked[at + 1]
    arguments = asked[:at] + asked[at + 2 :]
    text = subprocess.run(
        [*(part for part in arguments if part != "-c"), "-E"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if text.returncode:
        return subprocess.call(asked)
    version = subprocess.run([asked[0], "--version"], stdout=subprocess.PIPE, check=True).stdout
    # Where included files lie is in the text, if it matters: each environment has a folder of its own for them.
    options = [os.fsencode(part) for part in arguments if not part.startswith("-I")]
    name = hashlib.sha256(b"\0".join([version, *options, text.stdout])).hexdigest()
    folder = Path(os.environ.get(FOLDER) or KEPT)
    kept = folder / name
    try:
        shutil.copyfile(kept, target)
    except FileNotFoundError:
        if status := subprocess.call(asked):
            return status
        folder.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: another build may look for it meanwhile.
        fresh = folder / f"{name}.{os.getpid()}"
        shutil.copyfile(target, fresh)
        fresh.replace(kept)
        _forget_old(folder)
    else:
        os.utime(kept)
    return 0


def _forget_old(folder: Path) -> None:
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # Another build was quicker.
            if path.stat().st_mtime < time.time() - _KEEP_S:
                path.unlink()


if __name__ == "__main__":
    if not sys.argv[1:]:
        print(command())
    else:
        try:
            sys.exit(compile_once(sys.argv[1:]))
        except OSError as error:
            sys.exit(f"{sys.argv[1]}: {error}")
