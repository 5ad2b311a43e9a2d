"""What libraries build and keep for the tests lies in the tree, and a run that was killed does not spoil the next one.

PyTorch guards the build of an extension by a file: a process that is killed during the build leaves it, and the next
needs the extension waits for it for ever. Each run holds the folder by a lock that the system takes back when the run
ends, so that a run which is alone knows such a file to be of the dead, and removes it.
"""

from __future__ import annotations

import contextlib
import os
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# Where libraries build, keep and configure themselves, else in the user's own folders.
FOLDERS = {
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
    "KERAS_HOME": "keras",
    "MPLCONFIGDIR": "matplotlib",
    "DEEP500_TIMING_CACHE": "deep500-timing",
    "WANDB_CACHE_DIR": "wandb/cache",
    "WANDB_CONFIG_DIR": "wandb/config",
    "WANDB_DATA_DIR": "wandb/data",
}


def use(root: Path) -> IO[str] | None:
    """Send libraries to folders below ``root`` and clear the locks of dead processes; keep the result."""
    root.mkdir(parents=True, exist_ok=True)
    for variable, folder in FOLDERS.items():
        os.environ[variable] = str(root / folder)
        (root / folder).mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Not a POSIX system.
        return None
    held = (root / "in-use").open("w", encoding="utf-8")
    with contextlib.suppress(BlockingIOError):  # Another run is on.
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for left in (root / FOLDERS["TORCH_EXTENSIONS_DIR"]).glob("*/*/lock"):
            left.unlink(missing_ok=True)
    fcntl.flock(held, fcntl.LOCK_SH)
    return held
