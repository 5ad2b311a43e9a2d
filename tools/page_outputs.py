"""Run the commands that pages show, and write their outputs into the pages.

    python tools/page_outputs.py PAGE...

In a page, a Python block with the first line ``# NAME.py`` is that file, a link to a script is that script, and a
``sh`` block followed by a ``text`` block is a command and its output. Each page runs in a folder of its own, on a
terminal of 80 columns. An output keeps the number of lines that the page has for it, and ends with ``...`` if it was
cut; or it begins later, as the findings do, and ends at an empty line. Commands of ``pip`` are not run. The output
of a run that other programs disturbed is not taken: the old one stays, and the exit status is 1.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COLUMNS = 80
DISTURBED = re.compile(r"disturbed|machine is busy|waited\s+for a\s+processor")


def printed(command: str, folder: Path, columns: int = COLUMNS) -> str:
    """The output of a shell command on a terminal, standard error included, without colours and progress bars."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = {"PATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 200, columns, 0, 0))
    environment |= settings
    running = subprocess.Popen(
        command, shell=True, cwd=folder, env=environment, stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    parts = []
    with contextlib.suppress(OSError):  # A terminal that no process has open gives EIO.
        while part := os.read(ours, 65536):
            parts.append(part)
    running.wait()
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(parts).decode(errors="replace")).replace("\r\n", "\n")
    lines = [[line for line in text.split("\r") if line][-1:] for text in text.split("\n")]
    return "\n".join(line[0] if line else "" for line in lines).strip("\n") + "\n"


def shown(output: str, before: str) -> str:
    """The part of an output for a page: from the line that is indented, or has the first word, as in the last one."""
    found, kept = [line.rstrip() for line in output.splitlines()], before.splitlines()
    begins = "  " if before.startswith("  ") else before.split(" ")[0]
    first = next((at for at, line in enumerate(found) if line.startswith(begins)), 0)
    found, is_cut = found[first:], kept[-1:] == ["..."]
    if first and not is_cut:
        return "\n".join(found[: found.index("")] if "" in found else found) + "\n"
    lines = len(kept) - is_cut
    return "\n".join([*found[:lines], *(["..."] if len(found) > lines else [])]) + "\n"


def write_outputs(path: Path) -> list[str]:
    """Run a page's commands and replace their outputs; returns the commands that were disturbed."""
    page = path.read_text(encoding="utf-8")
    parts, end, output, missed = [], 0, None, []
    with tempfile.TemporaryDirectory() as scratch:
        for script in re.findall(r"\]\((\S+\.py)\)", page):
            shutil.copy(path.parent / script, scratch)
        for found in BLOCK.finditer(page):
            language, text = found[1], found[2]
            parts.append(page[end : found.start()])
            end = found.end()
            if language == "python" and (name := re.match(r"# (\w+\.py)\n", text)):
                Path(scratch, name[1]).write_text(text, encoding="utf-8")
            if language == "text" and output is not None:
                text = shown(output, text)
            output = None
            if language == "sh" and not text.startswith("pip "):
                output = printed(text, Path(scratch))
                print(f"{path.name}: {text.strip()}\n{output}")
                if DISTURBED.search(output):
                    output = None
                    missed.append(f"{path.name}: the machine was busy, so the old output stays of: {text.strip()}")
            parts.append(f"```{language}\n{text}```")
    path.write_text("".join([*parts, page[end:]]), encoding="utf-8")
    return missed


if __name__ == "__main__":
    sys.exit("\n".join(missed for name in sys.argv[1:] for missed in write_outputs(Path(name))) or 0)
