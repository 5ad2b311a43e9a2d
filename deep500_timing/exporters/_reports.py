"""Reports on their way to a service, and what became of those of each exporter."""

from __future__ import annotations

import contextvars
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

CAPACITY_IN_NUMBERS = 100_000
"""Numbers that may wait in one queue, which bounds the memory that they take."""


class Account:
    """What became of the reports of one exporter, in this process."""

    __slots__ = ("__weakref__", "delivered", "errors", "lost", "name", "pending")

    def __init__(self, name: str) -> None:
        """No report yet.

        Args:
            name: What the exporter is called in messages.
        """
        self.name = name
        self.delivered = 0
        """Reports that the service has taken."""
        self.pending = 0
        """Reports on their way."""
        self.lost = 0
        """Reports that were refused or dropped, or had not arrived when the program ended."""
        self.errors: deque[Exception] = deque(maxlen=4)
        """Why reports were refused that nobody waited for, the latest few."""

    def take_errors(self) -> list[Exception]:
        """Why reports were refused that nobody waited for; each is handed out once."""
        errors = []
        while self.errors:
            errors.append(self.errors.popleft())
        return errors


class Report:
    """One report, and how it is to be sent."""

    __slots__ = (
        "account",
        "alone",
        "context",
        "error",
        "exit_s",
        "failures",
        "group",
        "insists",
        "payload",
        "settled",
        "size",
    )

    def __init__(
        self, payload: Any, account: Account, group: Hashable, size: int, exit_s: float, insists: bool
    ) -> None:
        self.payload = payload
        self.account = account
        self.group = group
        self.size = size
        self.exit_s = exit_s
        self.insists = insists
        self.context = contextvars.copy_context()
        self.alone = False
        self.failures = 0
        self.settled = False
        self.error: Exception | None = None


class ReportQueue:
    """Reports that wait, oldest first, of a bounded number and size."""

    def __init__(self, capacity: int) -> None:
        """Begin empty.

        Args:
            capacity: How many reports may wait.
        """
        self._capacity = capacity
        self._waiting: deque[Report] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Report]:
        return iter(self._waiting)

    def append(self, report: Report) -> None:
        """Add one at the end."""
        self._waiting.append(report)

    def make_room(self, size: int) -> list[Report]:
        """Take out the oldest, until one more report of a size fits."""
        removed: list[Report] = []
        numbers = size + sum(report.size for report in self._waiting)
        while self._waiting and (len(self._waiting) >= self._capacity or numbers > CAPACITY_IN_NUMBERS):
            removed.append(self._waiting.popleft())
            numbers -= removed[-1].size
        return removed

    def take(self, most_numbers: int) -> list[Report]:
        """Take out the oldest, and others of its group that fit a call with it, in their order."""
        first = self._waiting.popleft()
        if first.alone:
            return [first]
        taken, rest, size = [first], deque[Report](), first.size
        for report in self._waiting:
            if report.group == first.group and not report.alone and size + report.size <= most_numbers:
                taken.append(report)
                size += report.size
            else:
                rest.append(report)
        self._waiting = rest
        return taken

    def put_back(self, reports: list[Report]) -> None:
        """Place reports before all others again."""
        self._waiting.extendleft(reversed(reports))

    def forget_settled(self) -> None:
        """Take out those of which it is known what became of them."""
        self._waiting = deque(report for report in self._waiting if not report.settled)

    def clear(self) -> None:
        """Take out all."""
        self._waiting.clear()
