"""What others may do to an exporter: silent clients, other hosts' names, planted links, names that are formulas."""

from __future__ import annotations

import csv
import http.client
import os
import socket
import threading

import pytest

from deep500_timing.exporters import CsvExporter, JsonLinesExporter, PrometheusExporter
from deep500_timing.exporters import _prometheus as endpoint


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


def test_silent_clients_take_a_bounded_number_of_threads(exporter):
    """Connections beyond the limit are closed at once, and each has a time-out."""
    clients = [socket.create_connection(("127.0.0.1", exporter.port)) for _ in range(endpoint._CONNECTIONS + 4)]
    for client in clients[endpoint._CONNECTIONS :]:
        client.settimeout(60)
        assert b"" == client.recv(1)  # closed by the endpoint
    assert 0 < endpoint._Handler.timeout < 60
    for client in clients:
        client.close()


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+1+1", "-1", "@SUM(A1)", "\t=1"])
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


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_no_link_is_followed_in_a_folder_of_others(tmr, tmp_path, mode):
    """A file of the user that a planted link names stays as it is."""
    victim, shared = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("mine")
    shared.mkdir()
    if mode == 0o775:
        if os.geteuid() != 0:
            pytest.skip("only root can give files away")
        os.chown(shared, -1, 65534)
    shared.chmod(mode)
    (shared / "times.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match=r"symbolic link|Too many levels"):
        JsonLinesExporter(shared / "times.jsonl")
    assert "mine" == victim.read_text()
    assert ["times.jsonl"] == [path.name for path in shared.iterdir()]


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
    tmr.export(PrometheusExporter(folder=shared))
    assert "mine" == victim.read_text()
    assert "BATCH" in (shared / "deep500_timing.prom").read_text()
