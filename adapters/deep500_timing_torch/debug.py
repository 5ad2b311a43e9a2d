"""A page of PyTorch's debug server (``torch.distributed.debug``, experimental, torch 2.13) with the times of all ranks.

::

    from torch.distributed.debug import start_debug_server
    from torch.distributed.debug._debug_handlers import default_handlers
    from deep500_timing_torch.debug import TimingHandler

    start_debug_server(handlers=[*default_handlers(), TimingHandler("runs/first")])   # on every rank

The server's page at ``/timing`` then shows what ``deep500-timing show runs/first`` prints now, findings first.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

try:
    from torch.distributed.debug._frontend import DebugHandler, NavLink, Response, Route
except ImportError as error:
    raise ImportError(
        f"deep500_timing_torch.debug requires the debug server of torch 2.13 or later: {error}"
    ) from error

if TYPE_CHECKING:
    from os import PathLike

    from torch.distributed.debug._frontend import HTTPRequestHandler

__all__ = ["TimingHandler"]

_PATH = "/timing"
_PATIENCE_S = 60.0


class TimingHandler(DebugHandler):
    """Shows a run that is being written: findings of all ranks, and the table of one, ``/timing?rank=3``.

    Another process reads the run from its folder, so a rank that hangs delays nothing.
    """

    def __init__(self, run: str | PathLike[str]) -> None:
        self._run = str(Path(run).resolve())

    def routes(self) -> list[Route]:
        """The page."""
        return [Route(_PATH, self._page)]

    def nav_links(self) -> list[NavLink]:
        """The link to it."""
        return [NavLink(_PATH, "Times")]

    def dump(self) -> str:
        """The text of the page, for the server's periodic dumps."""
        return self._show("")[1]

    def dump_filename(self) -> str:
        """The name of the dumps."""
        return "timing"

    def _page(self, request: HTTPRequestHandler) -> bytes:
        rank = parse_qs(request.get_raw_query()).get("rank", [""])[0]
        fault, text = self._show(rank if rank.isdecimal() else "")
        page: bytes = request.frontend.render_template(
            "raw_resp.html", title="Times", addrs=[self._run], resps=[Response(500 if fault else 200, text)]
        )
        return page

    def _show(self, rank: str) -> tuple[bool, str]:
        command = [sys.executable, "-m", "deep500_timing", "show", self._run, *(["--rank", rank] if rank else [])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
        except subprocess.TimeoutExpired:
            return True, f"Reading {self._run} took more than {_PATIENCE_S:g} s."
        return done.returncode != 0, done.stdout or done.stderr
