"""A measurement in its own process, which nothing that was loaded or set before reaches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def lines_of(
    module: str, as_lines: Callable[[dict[str, Any]], list[str]], *, quick: bool, timeout_s: int, **environment: str
) -> list[str]:
    """What ``python -m module --json`` measures, as lines of Markdown, or a line that says why it did not.

    Args:
        module: What to run.
        as_lines: Makes the lines of the numbers that it prints.
        quick: Whether to run it with ``--quick``.
        timeout_s: How long it may take.
        environment: Variables for it, next to those of this process.
    """
    command = [sys.executable, "-m", module, "--json", *(["--quick"] if quick else [])]
    root = Path(__file__).parent.parent
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return [f"Not measured: {reason}", ""]
    return as_lines(json.loads(done.stdout.splitlines()[-1]))
