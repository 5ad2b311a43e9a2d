"""What others may do to an exporter: silent clients, other hosts' names, planted links, names that are formulas."""

from __future__ import annotations

import csv
import http.client
import os
import socket
import threading
from contextlib import suppress

import pytest
from planted import OPEN_TO_OTHERS, planted_link

from deep500_timing.exporters import CsvExporter, JsonLinesExporter, PrometheusExporter
from deep500_timing.exporters import _prometheus as endpoint
from deep500_timing.runs import Run, RunLog


@pytest.fixture
def exporter(tmr):
    """An endpoint with one report."""
    pytest.importorskip("prometheus_client")
    with tmr.region("a"):
        pass
    found = PrometheusExporter(port=0)
    tmr.export(found)
    yield found
    found.close()


def status_of(exporter, host):
    """The status of a request with a Host header."""
    client = http.client.HTTPConnection("127.0.0.1", exporter.port, timeout=60)
    client.request("GET", "/metrics", headers={"Host": host})
    answer = client.getresponse()
    client.close()
    return answer.status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9400", 200),
        ("localhost", 200),
        ("[::1]:9400", 200),
        ("attacker.example", 403),
        ("localhost.attacker.example:9400", 403),
        ("127.0.0.1.attacker.example", 403),
    ],
)
def test_only_local_names_are_answered(exporter, host, status):
    """A page in a browser that points its own name at this machine gets nothing."""
    assert status == status_of(exporter, host)


@pytest.mark.parametrize("begun", [b"", b"GET /met", b"GET /metrics HTTP/1.1\r\nHost: loc"])
def test_silent_clients_take_a_bounded_number_of_threads(exporter, begun):
    """Connections beyond the limit are closed at once, and each has a time-out, whatever it has sent."""
    clients = []
    for _ in range(endpoint._CONNECTIONS + 4):
        clients.append(socket.create_connection(("127.0.0.1", exporter.port)))
        with suppress(OSError):  # It is closed already.
            clients[-1].sendall(begun)
    for client in clients[endpoint._CONNECTIONS :]:
        client.settimeout(60)
        with suppress(ConnectionResetError):  # It had not read all.
            assert b"" == client.recv(1)  # closed by the endpoint
    assert 0 < endpoint._Handler.timeout < 60
    for client in clients:
        client.close()


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+1+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "-1+1|x"])
def test_a_name_is_no_formula(tmr, tmp_path, name):
    """A spreadsheet shows it as a text."""
    with tmr.region(name):
        pass
    exporter = CsvExporter(tmp_path / "times.csv")
    tmr.export(exporter)
    exporter.close()
    with (tmp_path / "times.csv").open(newline="", encoding="utf-8") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert f"'{name}" in cells
    assert name not in cells


@pytest.mark.parametrize("mode", OPEN_TO_OTHERS)
@pytest.mark.parametrize("kind", [CsvExporter, JsonLinesExporter])
def test_no_link_is_followed_in_a_folder_of_others(tmr, tmp_path, mode, kind):
    """A file of the user that a planted link names stays as it is."""
    victim, link = planted_link(tmp_path, mode, "times")
    with pytest.raises(OSError, match=r"symbolic link|Too many levels"):
        kind(link)
    assert "mine" == victim.read_text()
    assert ["times"] == [path.name for path in link.parent.iterdir()]


@pytest.mark.parametrize("name", ["rank-00000.d5log", "world", "compacted"])
def test_no_log_follows_a_planted_link(tmr, tmp_path, name):
    """Neither does what else a run writes."""
    victim, link = planted_link(tmp_path, 0o1777, name)
    with RunLog(link.parent, tmr, rank=0, flush_s=None), tmr.region("a"):
        pass
    (log,) = [path for path in link.parent.rglob("*.d5log") if not path.is_symlink()]
    with Run.open(log.parent) as run:
        assert [{"n": 1}] == run.sql("select count(*) as n from intervals where region = 'a'").rows()
    assert "mine" == victim.read_text()


def test_the_text_file_has_no_name_that_can_be_guessed(tmr, tmp_path):
    """Before it is renamed; and a link in its place is replaced."""
    victim, shared = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("mine")
    shared.mkdir()
    shared.chmod(0o1777)
    for name in (f"deep500_timing.prom.{os.getpid()}.{threading.get_ident()}", "deep500_timing.prom"):
        (shared / name).symlink_to(victim)
    with tmr.region("BATCH"):
        pass
    tmr.export(PrometheusExporter(folder=shared, strict=True))
    assert "mine" == victim.read_text()
    assert "BATCH" in (shared / "deep500_timing.prom").read_text()
