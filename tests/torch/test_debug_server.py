"""The page of times in PyTorch's debug server."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest

from deep500_timing import Timer

pytestmark = pytest.mark.slow

frontend = pytest.importorskip("torch.distributed.debug._frontend")
pytest.importorskip("duckdb")
pytest.importorskip("jinja2")
debug = pytest.importorskip("deep500_timing_torch.debug")


@pytest.fixture
def ask(tmp_path):
    """Ask PyTorch's own server, which has the page alone, about a run that is being written."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    timer = Timer(run=tmp_path / "run")
    for _ in range(5):
        with timer.region("BATCH"), timer.region("FORWARD"):
            pass
    assert timer.run is not None
    timer.run.flush()
    server = frontend.FrontendServer(port, handlers=[debug.TimingHandler(tmp_path / "run")])

    def ask(path):
        with urllib.request.urlopen(f"http://localhost:{port}{path}", timeout=300) as answer:
            return answer.read().decode()

    yield ask
    server._server.shutdown()
    timer.run.close()


def test_the_page_shows_the_run_as_it_is(ask):
    """The table of the run so far, of the rank that is asked for, behind a link of the server."""
    page = ask("/timing?rank=0")

    assert "FORWARD" in page
    assert 'href="/timing"' in page


def test_dumps_have_the_table(tmp_path):
    """What cannot be read is said in place of it."""
    handler = debug.TimingHandler(tmp_path / "none")

    assert "timing" == handler.dump_filename()
    assert "none" in handler.dump()
