"""Classify errors of a tracking server: an outage, which passes, or a refusal of this report."""

from __future__ import annotations

import errno
import http.client
import re
from typing import Any

# Errors of the operating system that no waiting cures.
_LASTING = frozenset(
    getattr(errno, name)
    for name in (
        *("EACCES", "EBADF", "EEXIST", "EINVAL", "EISDIR", "ELOOP", "EMLINK", "ENAMETOOLONG", "ENOENT", "ENOTDIR"),
        *("EPERM", "EROFS", "EXDEV"),
    )
    if hasattr(errno, name)
)
_PASSWORD = re.compile(r"//[^/@\s]*@")


class UnavailableError(OSError):
    """A server answered that it cannot serve now.

    Args:
        message: Its answer.
        status: The HTTP status.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def is_outage(error: Exception) -> bool:
    """Whether the server is away: no connection, no answer in time, or a status of 408, 425, 429 or 5xx."""
    # MLflow's errors, those of a database included, carry a status.
    ask = getattr(error, "get_http_status_code", None)
    status = getattr(error, "status", ask() if callable(ask) else None)
    if isinstance(status, int):
        return status >= 500 or status in {408, 425, 429}
    if isinstance(error, ValueError):
        return False  # `requests` raises OSErrors that are ValueErrors for malformed addresses.
    if isinstance(error, OSError):
        return error.errno not in _LASTING
    return isinstance(error, http.client.HTTPException)


def reason_of(error: Exception) -> str:
    """An error in a few words, without passwords."""
    return without_passwords(f"{type(error).__name__}: {error}")[:200].rstrip(". ")


def without_passwords(text: Any) -> str:
    """The text without user names and passwords in addresses."""
    return _PASSWORD.sub("//", str(text))
