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


_MISSING = "ModuleNotFoundError(f'No module named {name!r}', name=name.partition('.')[0])"
_SAID = "MissingPackageError TimerCallback requires Keras; pip install 'deep500-timing[tensorflow]'"
_BROKEN = "ImportError('libcudart.so.12: cannot open', name='_pywrap')"


@pytest.mark.parametrize(
    ("raised", "said"), [(_MISSING, _SAID), (_BROKEN, "ImportError libcudart.so.12: cannot open")], ids=["no", "broken"]
)
def test_keras_that_is_missing_or_broken(raised, said):
    """The timers work, and the callback says what to install, or what is broken as Python says it."""
    code = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *more):\n"
        "        if name.partition('.')[0] in ('keras', 'tf_keras'):\n"
        f"            raise {raised}\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import deep500_timing_tensorflow as timer\n"
        "timer.Timer()\n"
        "try:\n    timer.TimerCallback\n"
        "except ImportError as error:\n    print(type(error).__name__, error)\n"
    )
    assert said == _python(code)
