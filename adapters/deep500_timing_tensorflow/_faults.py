"""What is said when timing itself fails: one warning, and the fit goes on."""

from __future__ import annotations

from deep500_timing.adapters import warn_once


def warn_fault(where: str, error: Exception) -> None:
    """Say once that timing failed; the fit goes on."""
    warn_once(
        f"TimerCallback failed in {where} and goes on with what it can time; the fit is not affected: "
        f"{type(error).__name__}: {error}",
        key=f"callback {where} {type(error).__name__}",
    )
