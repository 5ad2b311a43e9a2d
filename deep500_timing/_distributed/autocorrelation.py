"""Over how many neighbouring steps a value is correlated."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

_WINDOW = 5.0
"""Sokal's window: autocorrelations are summed up to this many times the autocorrelation time."""


def correlated_steps(series: NDArray[np.float64]) -> float:
    """The larger of two estimates, since a short series looks less correlated than it is."""
    return max(autocorrelation_time(series), _first_order(series))


def autocorrelation_time(series: Any) -> float:
    """By what factor correlation between neighbours increases the variance of a mean.

    Sokal's estimate (Monte Carlo Methods in Statistical Mechanics, 1989), pooled over the series.

    Args:
        series: Of shape (time, series).

    Returns:
        Half a standard error above the estimate, at least 1; the length of the series if that is too short to tell.
    """
    length = len(series)
    centred = series - series.mean(axis=0)
    size = 1 << (2 * length - 1).bit_length()
    spectrum = np.zeros(size // 2 + 1)
    for first in range(0, series.shape[1], 64):
        spectrum += (np.abs(np.fft.rfft(centred[:, first : first + 64], size, axis=0)) ** 2).sum(axis=1)
    covariance = np.fft.irfft(spectrum, size)[:length]
    if covariance[0] <= 1e-24 * length * max(float(np.abs(series).max(initial=0.0)) ** 2, 1e-300):
        return 1.0  # each rank is always at the same place
    sums = 2 * np.cumsum(covariance / covariance[0]) - 1
    beyond = np.flatnonzero(np.arange(length) >= _WINDOW * sums)
    lag = int(beyond[0]) if beyond.size else length - 1
    # The mean that was taken off takes a part of each autocorrelation with it.
    kept = 1 - (2 * lag + 1) / length
    if kept <= 0:
        return float(length)
    estimate = max(float(sums[lag]) / kept, 1.0)
    error = math.sqrt(2 * (2 * lag + 1) / (length * max(series.shape[1] - 1, 1)))
    return min(estimate * (1 + error / 2), float(length))


def _first_order(series: NDArray[np.float64]) -> float:
    # From the first autocorrelation. Its bias in short series is known (Kendall, Biometrika 41, 1954).
    length = len(series)
    centred = series - series.mean(axis=0)
    squares = float((centred * centred).sum())
    if squares <= 0 or length < 3:
        return 1.0
    first = float((centred[1:] * centred[:-1]).sum()) / squares
    first += (1 + 3 * first) / length
    return min(max((1 + first) / max(1 - first, 1 / length), 1.0), float(length))
