"""A measurement in its own process, which nothing that was loaded or set before reaches."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
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


def said_by(program: str, *arguments: object, under_traceml: bool) -> str:
    """The text that a program wrote to a file, its last argument, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="deep500-timing-") as folder:
        said = Path(folder, "said")
        given = [*map(str, arguments), str(said)]
        command = [sys.executable, program, *given]
        if under_traceml:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = str(free.getsockname()[1])
            traceml = "import sys; from traceml_ai.launcher.cli import main; sys.exit(main())"
            command = [sys.executable, "-c", traceml, "run", "--logs-dir", folder]
            command += ["--aggregator-port", port, program, "--args", *given]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        quiet: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        subprocess.run(command, check=True, timeout=300, cwd=folder, env=env, **quiet)
        return said.read_text(encoding="utf-8")
