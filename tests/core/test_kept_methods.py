"""The compiled form's own ways into its methods behave as if they were not there.

The object of a ``with`` statement is made once per region, and the methods of a timer that are called most take one key
without the usual treatment of arguments.
"""

from __future__ import annotations

import gc
import weakref

import pytest

import deep500_timing
from deep500_timing import Region, Timer
from deep500_timing.exceptions import RegionMismatchError, RegionNotOpenError, RegionOpenError
from deep500_timing.testing import ManualClock, ManualDeviceClock


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
    """Another object is refused as a region."""
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
    """A timer that was used in with statements goes when no one holds it any more."""
    tmr = Timer()
    with tmr.region("work"):
        pass
    gone = weakref.ref(tmr)
    del tmr
    gc.collect()
    assert gone() is None


_FORMS = {
    "positional": lambda tmr, key: (tmr.start(key), tmr.end(key)),
    "by keyword": lambda tmr, key: (tmr.start(key=key), tmr.end(key=key)),
    "with gpu": lambda tmr, key: (tmr.start(key, False), tmr.end(key, gpu=False)),
    "unpacked": lambda tmr, key: (tmr.start(*[key]), tmr.end(*[key])),
    "of the type": lambda tmr, key: (Timer.start(tmr, key), Timer.end(tmr, key)),
    "handle": lambda tmr, key: (tmr.region(key).start(), tmr.region(key).end()),
    "handle's, of the type": lambda tmr, key: (Region.start(tmr.region(key)), Region.end(tmr.region(key=key))),
}


@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("own_clock", [False, True])
def test_each_way_to_call_keeps_the_same(form, own_clock):
    """The short way into a method, which one key alone takes, and the longer one record alike, warm and at first."""
    tmr = Timer(clock=ManualClock() if own_clock else None)
    for _ in range(3):
        _FORMS[form](tmr, "work")
    assert 3 == len(tmr.get_time("work"))
    tmr.enabled = False
    _FORMS[form](tmr, "work")
    assert 3 == len(tmr.get_time("work"))


@pytest.mark.parametrize("name", ["start", "end", "region"])
def test_they_take_a_key(name):
    """Without a key, with too many arguments, with an unknown one or of something else than a timer, an error."""
    method = getattr(Timer(), name)
    for arguments, named in (((), {}), (("a", False, 1), {}), (("a",), {"unknown": 1})):
        with pytest.raises(TypeError):
            method(*arguments, **named)
    with pytest.raises((TypeError, AttributeError)):
        getattr(Timer, name)(object(), "a")


def test_the_short_way_still_finds_misuse(in_thread):
    """The short way leaves hard cases to the longer one: misuse, another thread's region, a device's."""
    tmr = Timer(ManualDeviceClock())
    handle = tmr.region("work")

    def use_elsewhere():
        handle.start()
        handle.end()
        tmr.start("work")
        tmr.end("work")

    for _ in range(2):
        tmr.start("work")
        with pytest.raises(RegionOpenError):
            tmr.start("work")
        with pytest.raises(RegionOpenError):
            tmr.region("work").start()
        tmr.end("work")
        with pytest.raises(RegionNotOpenError):
            tmr.end("work")
        with pytest.raises(RegionNotOpenError):
            tmr.region("work").end()
        tmr.start("work", gpu=True)
        with pytest.raises(RegionMismatchError):
            tmr.end("work")
        tmr.end("work", gpu=True)
        in_thread(use_elsewhere)
    assert 8 == len(tmr.get_time("work"))
    assert 2 == len(tmr.get_time("work", gpu=True))
