"""What stands where a device's ledger would, in a timer that has not looked for a device or found none."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class NoLedger:
    """Does nothing and holds nothing, as a ``DeviceLedger`` would; who derives from it says what ``begin`` means."""

    __slots__ = ()

    def end(self, region: Any, keep_last: int, skip_first: int) -> None:
        """Begun before there was no device, which cannot be."""

    def drop(self, region: Any) -> None:
        """Nothing to take back."""

    def collect(self, *, wait: bool) -> None:
        """Nothing to collect."""

    def collect_for(self, intervals: Any) -> None:
        """Nothing to collect."""

    def pending(self) -> dict[int, int]:
        """Nothing is on its way."""
        return {}
