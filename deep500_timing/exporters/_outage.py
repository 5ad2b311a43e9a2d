"""Whether a service answers, when it is asked again if not, and what is to be said of it."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import TYPE_CHECKING

from deep500_timing.exporters._trouble import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
HURRIED_PAUSE_S = 0.2
"""The longest pause while the program waits to end."""
BUSY_PAUSE_S = 0.5

# Not the module's functions, whose state belongs to the user's run.
_random = random.Random()


class Outage:
    """What one service did with the calls of its :class:`BackgroundCaller`, which holds its lock meanwhile.

    Attributes:
        failures: Calls in a row that it did not answer; 0 while it answers.
        failures_in_all: The same of the whole run.
        retry_at: When it may be called again, on the caller's clock in s; 0 for at once.
        hurried: Whether the program waits to end, so that no pause may be long.
    """

    def __init__(self, service: str, capacity: int, clock: Callable[[], float]) -> None:
        """Nothing is known of the service yet.

        Args:
            service: What it is called in messages.
            capacity: Reports that may wait for it.
            clock: Seconds that never run backwards.
        """
        self._service = service
        self._capacity = capacity
        self._clock = clock
        self.failures = 0
        self.failures_in_all = 0
        self.retry_at = 0.0
        self.hurried = False
        self._unreported = 0
        self._lost: Counter[str] = Counter()
        self._news: deque[tuple[str, str]] = deque(maxlen=16)

    def note_busy(self) -> None:
        """It answered that reports must wait their turn."""
        self.retry_at = self._clock() + BUSY_PAUSE_S

    def note_failure(self, error: Exception) -> None:
        """It did not answer: leave it alone for a pause, twice as long each time."""
        self.failures += 1
        self.failures_in_all += 1
        longest_s = HURRIED_PAUSE_S if self.hurried else LONGEST_PAUSE_S
        pause_s = min(FIRST_PAUSE_S * 2 ** min(self.failures - 1, 20), longest_s)
        # Spread, so that a thousand ranks do not ask at once.
        self.retry_at = self._clock() + pause_s * _random.uniform(0.75, 1.0)
        self.say(
            "down",
            f"{self._service} does not answer ({reason_of(error)}); reports of times wait in a queue, "
            f"{self._capacity} at most, and are tried again in the background",
        )

    def note_answer(self) -> None:
        """It answered; if it had not before, say what was lost meanwhile."""
        if not self.failures:
            return
        self.failures = 0
        self.retry_at = 0.0
        if self._unreported:
            self.say(
                f"back {self.failures_in_all}",
                f"{self._service} takes reports again; {self._unreported} report(s) of times were lost in between",
            )
            self._unreported = 0

    def note_loss(self, name: str, *, reported: bool) -> None:
        """A report was lost.

        Args:
            name: Of the exporter whose report it was.
            reported: Whether an error tells of it, so that the news need not.
        """
        self._lost[name] += 1
        if not reported:
            self._unreported += 1

    def take_losses(self) -> list[str]:
        """A sentence for each exporter that has lost reports; each is handed out once."""
        lost, self._lost = self._lost, Counter()
        return [
            f"{self._service} has not taken {count} report(s) of times of {name} in all; they are lost."
            for name, count in lost.items()
        ]

    def say(self, kind: str, sentence: str) -> None:
        """Keep a sentence for the next export."""
        self._news.append((kind, sentence))

    def take_news(self) -> list[tuple[str, str]]:
        """What happened since: pairs of a kind of trouble and a sentence; each is handed out once."""
        news = []
        while self._news:
            news.append(self._news.popleft())
        return news
