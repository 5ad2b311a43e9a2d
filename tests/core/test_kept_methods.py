"""What a ``with`` statement binds is made once per region in the compiled form, and behaves as if it were not."""

from __future__ import annotations

import gc
import weakref

import pytest

import deep500_timing
from deep500_timing import Region, Timer


def test_the_methods_of_the_type_take_a_region():
    """Asked of the type, the methods are unbound ones, as of any class."""
    tmr = Timer()
    region = tmr.region("work")
    assert region is Region.__enter__(region)
    assert Region.__exit__(region, None, None, None) is None
    assert 1 == len(tmr.get_time("work"))


def test_the_bound_methods_are_of_their_region():
    """Each region's methods open and close that region and no other."""
    tmr = Timer()
    first, second = tmr.region("first"), tmr.region("second")
    enter, leave = first.__enter__, first.__exit__
    with second:
        enter()
        leave(None, None, None)
    assert [1, 1] == [len(tmr.get_time(key)) for key in ("first", "second")]


@pytest.mark.skipif(not deep500_timing.compiled, reason="plain Python binds methods as it always does")
def test_they_are_made_once():
    """The same bound method each time, which is what makes a with statement cheap."""
    region = Timer().region("work")
    assert region.__enter__ is region.__enter__
    assert region.__exit__ is region.__exit__


@pytest.mark.skipif(not deep500_timing.compiled, reason="plain Python binds methods as it always does")
def test_they_bind_regions_only():
    """What is no region is refused instead of being taken for one."""
    with pytest.raises(TypeError):
        vars(Region)["__enter__"].__get__(object(), object)
    for name in ("__enter__", "__exit__"):
        foreign = type("Foreign", (), {"method": vars(Region)[name]})()
        with pytest.raises(TypeError):
            foreign.method()


@pytest.mark.parametrize("arguments", [(), (None,), (None, None), (None, None, None, None)])
def test_they_take_three_arguments(arguments):
    """An exit takes what ended the block, and nothing else."""
    region = Timer().region("work")
    with region, pytest.raises(TypeError):
        region.__exit__(*arguments)
    assert not region.is_open


def test_they_keep_no_timer_alive():
    """A timer that was used in with statements goes when nobody holds it any more."""
    tmr = Timer()
    with tmr.region("work"):
        pass
    gone = weakref.ref(tmr)
    del tmr
    gc.collect()
    assert gone() is None
