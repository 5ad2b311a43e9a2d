"""Medians, quartiles and confidence intervals of the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Spread:
    """A median and how far the rounds lie apart.

    Attributes:
        median: Of all rounds.
        low: First quartile.
        high: Third quartile.
        rounds: How many there were.
    """

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray[Any, Any]) -> Spread:
        """Summarize the values of all rounds.

        Raises:
            ValueError: There are none.
        """
        if len(values) == 0:
            raise ValueError("No round was measured; there is nothing to summarize.")
        low, median, high = np.percentile(np.asarray(values, dtype=float), (25, 50, 75))
        return cls(float(median), float(low), float(high), len(values))

    def as_json(self) -> dict[str, float]:
        """For ``results.json``."""
        return asdict(self)


@dataclass(frozen=True)
class Interval:
    """A median with its 95 % confidence interval."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray[Any, Any], *, resamples: int = 4000, seed: int = 0) -> Interval:
        """Bootstrap the median: the interval that holds it in 95 % of the samples drawn from the rounds.

        Raises:
            ValueError: There are no values.
        """
        measured = np.asarray(values, dtype=float)
        if len(measured) == 0:
            raise ValueError("No round was measured; there is nothing to summarize.")
        draws = np.random.default_rng(seed).choice(measured, size=(resamples, len(measured)))
        low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
        return cls(float(np.median(measured)), float(low), float(high), len(measured))

    def as_json(self) -> dict[str, float]:
        """For ``results.json``."""
        return asdict(self)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """The ratio within each round, and then its spread: what slows a whole round down cancels out.

    Raises:
        ValueError: The sequences differ in length, or are empty.
    """
    return Spread.of([a / b for a, b in zip(numerators, denominators, strict=True) if b > 0])
