"""What an error of a service means: that it is away, that it refuses this report, or that the report must wait."""

from __future__ import annotations

import errno
import http.client
import re
from typing import Any

# What the operating system says of the report's own name or place, which no waiting mends.
_LASTING = frozenset(
    getattr(errno, name)
    for name in (
        *("EACCES", "EBADF", "EEXIST", "EINVAL", "EISDIR", "ELOOP", "EMLINK", "ENAMETOOLONG", "ENOENT", "ENOTDIR"),
        *("EPERM", "EROFS", "EXDEV"),
    )
    if hasattr(errno, name)
)
_PASSWORD = re.compile(r"//[^/@\s]*@")


class BusyError(Exception):
    """The service is well, and a report must wait until something else has happened there."""


class UnavailableError(OSError):
    """A service answered that it cannot serve now."""

    def __init__(self, message: str, status: int) -> None:
        """Keep what was answered.

        Args:
            message: The answer, for people.
            status: The HTTP status.
        """
        super().__init__(message)
        self.status = status


def status_of(error: Exception) -> int | None:
    """The HTTP status that an error stands for, if it stands for one."""
    response_status = getattr(getattr(error, "response", None), "status_code", None)
    for status in (getattr(error, "status", None), response_status):
        if isinstance(status, int):
            return status
    # As MLflow's errors say it, those of a database included.
    ask = getattr(error, "get_http_status_code", None)
    status = ask() if callable(ask) else None
    return status if isinstance(status, int) else None


def is_outage(error: Exception, *, answered: bool = False) -> bool:
    """Whether an error says that the service is away for a while, and nothing of the report.

    No connection, no answer in time, a status of 408, 425, 429 or 5xx. Everything else is about the report.

    Args:
        error: What a call raised.
        answered: Count only what the service itself answered, and what a report of its own could be the cause of:
            500 and the like, but not that it is overloaded.
    """
    status = status_of(error)
    if status is not None:
        if answered:
            return status >= 500 and status not in {502, 503, 504}
        return status >= 500 or status in {408, 425, 429}
    if answered:
        return False
    if isinstance(error, ValueError):
        return False  # An address that is none is an OSError too, for the package requests.
    if isinstance(error, OSError):
        return error.errno not in _LASTING
    return isinstance(error, http.client.HTTPException)


def reason_of(error: Exception) -> str:
    """An error in a few words, without passwords."""
    return without_passwords(f"{type(error).__name__}: {error}")[:200].rstrip(". ")


def without_passwords(text: Any) -> str:
    """A text whose addresses have lost their user and password."""
    return _PASSWORD.sub("//", str(text))
