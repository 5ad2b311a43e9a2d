"""The adapter's public face, in processes that have imported nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

import deep500_timing
import deep500_timing_tensorflow as timer

HEAVY = {"tensorflow", "keras", "tf_keras", "cupy", "torch", "jax", "numpy"}


def _python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    ).stdout.strip()


@pytest.mark.slow  # It imports TensorFlow into pytest's own process.
def test_all_is_sorted_and_every_name_is_there():
    """``__all__`` is sorted, and each of its names can be imported."""
    assert sorted(timer.__all__) == timer.__all__
    assert [] == [name for name in timer.__all__ if not hasattr(timer, name)]


def test_face_has_all_of_the_core():
    """A user who goes from the core to the adapter changes the import line alone."""
    assert set() == set(deep500_timing.__all__) - set(timer.__all__)
    assert {"CupyEventClock", "TimerCallback", "timed_step"} == set(timer.__all__) - set(deep500_timing.__all__)


def test_names_are_listed_before_they_are_imported():
    """``dir`` lists the lazy imports."""
    assert set() == set(timer.__all__) - set(dir(timer))


def test_unknown_name_is_an_attribute_error():
    """A misspelt name is reported as Python reports it."""
    with pytest.raises(AttributeError, match="no attribute 'TimerCalback'"):
        _ = timer.TimerCalback


def test_importing_it_imports_no_framework():
    """Neither TensorFlow nor Keras nor CuPy is imported with the package."""
    code = f"import sys, deep500_timing_tensorflow; print(sorted({HEAVY!r} & set(sys.modules)))"
    assert "[]" == _python(code)


def test_the_probe_of_imports_can_fail():
    """The probe above does see a framework that is imported."""
    assert "['numpy']" == _python(f"import sys, numpy; print(sorted({HEAVY!r} & set(sys.modules)))")


def test_missing_keras_is_named_when_the_callback_is_asked_for():
    """Without Keras the timers work, and the callback says what to install."""
    code = (
        "import sys; sys.modules['keras'] = sys.modules['tf_keras'] = None\n"
        "class Finder:\n"
        "    def find_spec(self, name, *more):\n"
        "        if name.partition('.')[0] in ('keras', 'tf_keras'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name.partition('.')[0])\n"
        "del sys.modules['keras'], sys.modules['tf_keras']; sys.meta_path.insert(0, Finder())\n"
        "import deep500_timing_tensorflow as timer\n"
        "timer.Timer()\n"
        "try:\n    timer.TimerCallback\n"
        "except timer.MissingPackageError as error:\n    print(error)\n"
    )
    assert "TimerCallback requires Keras; pip install 'deep500-timing[tensorflow]'" == _python(code)


def test_broken_keras_is_not_called_missing():
    """A Keras that fails to import is reported as it fails, not as not installed."""
    code = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *more):\n"
        "        if name.partition('.')[0] == 'keras':\n"
        "            raise ImportError('libcudart.so.12: cannot open', name='_pywrap')\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import deep500_timing_tensorflow as timer\n"
        "try:\n    timer.TimerCallback\n"
        "except ImportError as error:\n    print(type(error).__name__, error)\n"
    )
    assert "ImportError libcudart.so.12: cannot open" == _python(code)
