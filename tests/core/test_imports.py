"""What ``import deep500_timing`` brings in and offers: nothing slow or optional, and exactly the names it says."""

from __future__ import annotations

import inspect

import pytest

import deep500_timing

# Packages that a user may have, and modules that are slow to import though it is in the standard library.
ABSENT = [
    "numpy",
    "torch",
    "tensorflow",
    "keras",
    "tf_keras",
    "jax",
    "cupy",
    "mlflow",
    "wandb",
    "rich",
    "psutil",
    "deep500_timing_torch",
    "deep500_timing_tensorflow",
    "deep500_timing_deepspeed",
    "deep500_timing_jax",
    "typing",
    "dataclasses",
    "inspect",
    "json",
    "contextlib",
    "statistics",
    "socket",
    "asyncio",
    "importlib.metadata",
]

PROBE = """
import sys
before = set(sys.modules)
{program}
loaded = set(sys.modules) - before
print(" ".join(sorted(name for name in {names!r} if name in loaded)))
"""


@pytest.fixture
def loaded(python):
    """Which of the names a program imports, in an interpreter that has none of them."""

    def run(program, names=ABSENT, **variables):
        return python(PROBE.format(program=program, names=names), PYTHONSAFEPATH="1", **variables).split()

    return run


@pytest.fixture
def absent(python):
    """The names that a bare interpreter does not load alone (a site customisation may load some)."""
    bare = python(f"import sys; print(' '.join(set(sys.modules) & set({ABSENT!r})))").split()
    return [name for name in ABSENT if name not in bare]


def test_the_package_imports_nothing_that_is_slow_or_optional(loaded, absent):
    """Importing the package loads no framework, no tracker, no numpy and none of the slow standard modules."""
    if deep500_timing.compiled:
        assert [] == loaded("import deep500_timing", absent)
    else:
        # Which file to run instead of a compiled one is worked out with more of the standard library.
        assert [] == [name for name in loaded("import deep500_timing", absent) if name not in {"typing", "contextlib"}]


def test_timing_imports_none_of_it_either(loaded, absent):
    """Recording regions imports no third party's package."""
    program = """
import deep500_timing
tmr = deep500_timing.CPUGPUTimer()
with tmr.region("a", gpu=True):
    pass
tmr.start("b")
tmr.end("b")
"""
    third_parties = absent[: absent.index("typing")] if "typing" in absent else absent
    assert [] == loaded(program, third_parties)


def test_making_a_timer_imports_none_of_what_is_slow(loaded, absent):
    """Neither do a run's folder and a list of exporters that are empty: every program pays for its first timer."""
    program = "import deep500_timing; deep500_timing.Timer()"
    settings = {"DEEP500_TIMING_EXPORTERS": "", "DEEP500_TIMING_RUN": "", "DEEP500_TIMING_STACKS": "off"}
    found = set(loaded(program, absent)) | set(loaded(program, absent, **settings))
    assert set() == found - {"contextlib"} - (set() if deep500_timing.compiled else {"typing"})


@pytest.mark.parametrize("name", ["numpy", "dataclasses", "json"])
def test_the_probe_can_fail(loaded, absent, name):
    """The probe does see an import."""
    assert name in absent
    assert name in loaded(f"import deep500_timing, {name}")


def test_statistics_need_numpy_only(loaded, absent):
    """What brings numpy in is asking for statistics."""
    program = "import deep500_timing; deep500_timing.Timer().get_time('a')"
    found = loaded(program, absent)
    assert "numpy" in found
    assert set(found).isdisjoint({"torch", "tensorflow", "keras", "jax", "cupy", "mlflow", "wandb", "rich"})


def test_a_table_needs_nothing_of_servers(loaded):
    """The exporters to servers do not make the first table of a program wait."""
    program = "import deep500_timing, io; deep500_timing.Timer().print_all_time_stats(io.StringIO())"
    assert [] == loaded(program, ["email", "http.client", "ssl"])


def test_all_is_sorted_and_exact():
    """``__all__`` is sorted, each name is there, and nothing public is missing from it."""
    assert sorted(deep500_timing.__all__) == deep500_timing.__all__
    assert len(set(deep500_timing.__all__)) == len(deep500_timing.__all__)
    for name in deep500_timing.__all__:
        assert getattr(deep500_timing, name) is not None
    modules = {name for name, value in vars(deep500_timing).items() if type(value).__name__ == "module"}
    public = {name for name in vars(deep500_timing) if not name.startswith("_")} - modules
    of_ipython = {"load_ipython_extension", "unload_ipython_extension"}  # called by IPython alone
    assert set(deep500_timing.__all__) == public - {"annotations", "TYPE_CHECKING"} - of_ipython


LAZY = ["", ".adapters", ".devices", ".exporters", ".runs", ".wallclock", "_deepspeed", "_jax", "_tensorflow"]


@pytest.mark.parametrize("name", LAZY)
def test_no_lazy_name_is_missing_from_all(name):
    """A name that a package can import later is public: users who import it are promised that it stays."""
    package = pytest.importorskip(f"deep500_timing{name}", exc_type=ImportError)
    homes = inspect.getclosurevars(package.__getattr__).nonlocals["homes"]
    assert set() == {*homes} - {*package.__all__}


def test_a_star_import(python):
    """``from deep500_timing import *`` brings exactly the public names, and each is the object of its module."""
    program = """
before = set(globals()) | {"before"}
from deep500_timing import *
import deep500_timing
print(sorted(set(globals()) - before - {"deep500_timing"}) == deep500_timing.__all__)
from deep500_timing._summary.stats import TimeStats as own
print(own is TimeStats is deep500_timing.TimeStats)
"""
    assert "True\nTrue\n" == python(program)


def test_dir_shows_what_is_public(python):
    """``dir`` lists the public names, also the ones that are imported when they are asked for."""
    assert set(deep500_timing.__all__) <= set(dir(deep500_timing))
    assert set() == {name for name in dir(deep500_timing) if not name.startswith("__")} - set(deep500_timing.__all__)
    assert "True\n" == python("import deep500_timing as d; print('TimeStats' in dir(d) and 'TimeStats' not in vars(d))")


def test_an_unknown_name():
    """A name that is not there is an ordinary error."""
    with pytest.raises(AttributeError, match="module 'deep500_timing' has no attribute 'Tmer'"):
        deep500_timing.Tmer  # noqa: B018


@pytest.mark.parametrize("name", deep500_timing.__all__)
def test_each_public_name_has_a_home(name):
    """It is imported when it is first asked for, and is the same object each time."""
    assert getattr(deep500_timing, name) is deep500_timing.__getattr__(name)


@pytest.mark.parametrize("pure", ["", "1"])
def test_the_plain_form_can_be_asked_for(python, pure):
    """``DEEP500_TIMING_PURE`` loads the plain form; the public face is the same."""
    program = "import deep500_timing as d; print(d.compiled, d.Timer.__module__, d.Region.__module__, *d.__all__)"
    compiled, *rest = python(program, DEEP500_TIMING_PURE=pure).split()
    assert ["deep500_timing.timer", "deep500_timing._recording.recorder", *deep500_timing.__all__] == rest
    if pure:
        assert "False" == compiled
