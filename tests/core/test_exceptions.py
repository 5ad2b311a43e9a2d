"""The tree of errors, and warnings that are said once."""

from __future__ import annotations

import inspect
import warnings

import pytest

import deep500_timing
from deep500_timing import TimingError, TimingWarning, exceptions
from deep500_timing._base.warn import forget_warnings, warn_once

TREE = {
    "RegionError": (RuntimeError, "TimingError"),
    "RegionOpenError": (RuntimeError, "RegionError"),
    "RegionNotOpenError": (RuntimeError, "RegionError"),
    "RegionMismatchError": (RuntimeError, "RegionError"),
    "InvalidKeyError": (TypeError, "TimingError"),
    "NoTimesError": (LookupError, "TimingError"),
    "DeviceUnavailableError": (RuntimeError, "TimingError"),
    "MissingPackageError": (ImportError, "TimingError"),
    "ExportError": (RuntimeError, "TimingError"),
}


@pytest.mark.parametrize("name", TREE)
def test_each_error_is_what_python_would_call_it(name):
    """Each error can be caught as the package's and as the ordinary one."""
    ordinary, parent = TREE[name]
    error = getattr(exceptions, name)
    assert issubclass(error, ordinary)
    assert getattr(exceptions, parent) in error.__bases__
    assert issubclass(error, TimingError)


def test_the_tree_is_complete_and_public():
    """Every error is in the tree and in the package's face."""
    found = {name for name, value in vars(exceptions).items() if inspect.isclass(value)}
    assert {*TREE, "TimingError", "TimingWarning"} == found == set(exceptions.__all__)
    assert sorted(exceptions.__all__) == exceptions.__all__
    assert found <= set(deep500_timing.__all__)
    for name in found:
        assert getattr(deep500_timing, name) is getattr(exceptions, name)


def test_the_warning_is_a_users():
    """It is shown by default, and is no error."""
    assert issubclass(TimingWarning, UserWarning)
    assert not issubclass(TimingWarning, TimingError)


class TestWarnOnce:
    def test_once_for_each_message(self):
        """The same message is said once, another one as well."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for text in ("a", "b", "a", "b"):
                warn_once(text)
        assert [("a", TimingWarning), ("b", TimingWarning)] == [(str(w.message), w.category) for w in caught]

    def test_once_for_each_subject(self):
        """Messages about the same thing are said once, however they differ."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for i in range(5):
                warn_once(f"failed at {i}", key="failing")
        assert ["failed at 0"] == [str(w.message) for w in caught]

    def test_forgotten(self):
        """After ``forget_warnings`` it is said again."""
        for _ in range(2):
            with pytest.warns(TimingWarning, match="again"):
                warn_once("again")
            forget_warnings()

    def test_it_points_at_who_called(self):
        """The warning shows the line of the caller's caller, which caused it."""

        def library():
            warn_once("here")

        with pytest.warns(TimingWarning) as caught:
            library()
        assert __file__ == caught[0].filename
