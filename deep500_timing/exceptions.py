"""The errors and the warning of this package. Each error is also the built-in error of its kind."""

from __future__ import annotations

__all__ = [
    "DeviceUnavailableError",
    "ExportError",
    "InvalidKeyError",
    "MissingPackageError",
    "NoTimesError",
    "RegionError",
    "RegionMismatchError",
    "RegionNotOpenError",
    "RegionOpenError",
    "TimingError",
    "TimingWarning",
]


class TimingError(Exception):
    """Base of every error that this package raises on purpose."""


class RegionError(TimingError, RuntimeError):
    """A region is used in a way that it cannot be used."""


class RegionOpenError(RegionError):
    """A region is started while the same thread has it open."""


class RegionNotOpenError(RegionError):
    """A region is ended that the same thread does not have open."""


class RegionMismatchError(RegionError):
    """A region is ended with another ``gpu`` argument than it was started with."""


class InvalidKeyError(TimingError, TypeError):
    """A region key is neither a ``TimeType`` nor a non-empty string."""


class NoTimesError(TimingError, LookupError):
    """Statistics are asked of a region for which no time is recorded."""


class DeviceUnavailableError(TimingError, RuntimeError):
    """A device is asked for by name that cannot be timed here."""


class MissingPackageError(TimingError, ImportError):
    """The call needs a package that is not installed."""


class ExportError(TimingError, RuntimeError):
    """A destination did not take a report, and the exporter was asked to be strict about it."""


class TimingWarning(UserWarning):
    """A fault in timing that costs the report a line and leaves the run alone."""
