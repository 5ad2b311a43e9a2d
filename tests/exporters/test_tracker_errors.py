"""Outages and refusals are distinguished."""

from __future__ import annotations

import errno
import http.client

import pytest

from deep500_timing.exporters._delivery import UnavailableError, is_outage, reason_of


class MlflowsError(Exception):
    """As MLflow raises for a status, that of a database included."""

    def __init__(self, status):
        super().__init__(status)
        self._status = status

    def get_http_status_code(self):
        """Return the status."""
        return self._status


class InvalidAddressError(ValueError, OSError):
    """As requests raises it for an address that is none."""


OUTAGES = [
    ConnectionRefusedError("refused"),
    TimeoutError("timed out"),
    OSError("connection pool"),
    OSError(errno.ENOSPC, "no space"),
    http.client.BadStatusLine("x"),
    *(MlflowsError(status) for status in (408, 425, 429, 500, 502, 503, 504, 599)),
    UnavailableError("busy", 503),
]
REFUSALS = [
    ValueError("out of range"),
    TypeError("no"),
    RuntimeError("no"),
    InvalidAddressError("not an address"),
    NotADirectoryError(errno.ENOTDIR, "a file lies there"),
    PermissionError(errno.EACCES, "no"),
    *(MlflowsError(status) for status in (400, 401, 403, 404, 409, 413, 422)),
]


@pytest.mark.parametrize("error", OUTAGES, ids=repr)
def test_outages(error):
    """No connection, no answer in time and a service's own error: the report is kept."""
    assert is_outage(error)


@pytest.mark.parametrize("error", REFUSALS, ids=repr)
def test_refusals(error):
    """A refusal of a report, or a program's own error, costs the report."""
    assert not is_outage(error)


def test_a_status_that_is_none_is_not_taken_for_one():
    """Any other content under those names is left alone."""
    error = OSError("x")
    error.status = "gone"

    assert is_outage(error)


def test_a_reason_is_short_and_has_no_password():
    """A shown error names no user and ends somewhere."""
    assert "ValueError: no http://host/path" == reason_of(ValueError("no http://user:secret@host/path. "))
    assert 200 >= len(reason_of(ValueError("x" * 1000)))
