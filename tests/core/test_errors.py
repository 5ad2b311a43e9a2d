"""What bad input gets: a clear error at that call that names region, thread and remedy, and harms nothing else."""

from __future__ import annotations

import asyncio
import threading
from enum import Enum

import pytest

from deep500_timing import (
    CPUGPUTimer,
    InvalidKeyError,
    NoTimesError,
    RegionMismatchError,
    RegionNotOpenError,
    RegionOpenError,
    Timer,
    TimeType,
)
from deep500_timing._recording.recorder import Region, ThreadRegions
from deep500_timing.testing import ManualClock, ManualDeviceClock

S = 1_000_000_000


class Colour(Enum):
    RED = "BATCH"


BAD_KEYS = [None, 1, 1.5, b"BATCH", (), ["a"], {"a": 1}, Colour.RED, object, TimeType]


@pytest.fixture(params=[Timer, CPUGPUTimer])
def tmr(request, clock):
    """Both timers, with another region open that must come to no harm."""
    tmr = request.param(clock=clock)
    tmr.start("bystander")
    yield tmr
    clock.advance(7)
    tmr.end("bystander")
    assert 7.0 <= tmr.get_time("bystander")[0]


def test_start_of_an_open_region(tmr, clock):
    """The error says since when and where it is open and what to do; the region stays as it was."""
    tmr.start(TimeType.BATCH)
    clock.advance(1.5)
    with pytest.raises(RegionOpenError) as caught:
        tmr.start(TimeType.BATCH)
    assert (
        "Starting region 'BATCH': it is open already on thread 'MainThread', since 1.5 s. End it first, or forget it "
        "with discard(TimeType.BATCH); `with timer.region(TimeType.BATCH)` ends it even after an exception, as does "
        "fail(TimeType.BATCH) in the except clause."
    ) == str(caught.value)
    clock.advance(1)
    tmr.end(TimeType.BATCH)
    assert [2.5] == tmr.get_time(TimeType.BATCH)


def test_two_coroutines_with_one_key(tmr):
    """Where coroutines run, the remedy names what keeps them apart; it works, and elsewhere nothing is said of it."""

    async def enter():
        with tmr.region("load"):
            await asyncio.sleep(0)

    @tmr.timed("load")
    async def timed():
        await asyncio.sleep(0)

    async def both(one):
        await asyncio.gather(one(), one())

    with pytest.raises(RegionOpenError, match=r"a key each, or decorate them with `@timer\.timed\('load'\)`\.$"):
        asyncio.run(both(enter))
    before = len(tmr.get_time("load"))
    asyncio.run(both(timed))
    assert 2 == len(tmr.get_time("load")) - before


def test_the_remedy_can_be_pasted(tmr):
    """Keys stand in the texts as they stand in a program: strings in quotes."""
    tmr.start("load")
    with pytest.raises(RegionOpenError, match=r"forget it with discard\('load'\); `with timer\.region\('load'\)`"):
        tmr.region("load").start()
    tmr.discard("load")


def test_end_of_a_region_that_is_not_open(tmr):
    """The error names region, thread and remedy."""
    with pytest.raises(RegionNotOpenError) as caught:
        tmr.end("load")
    assert (
        "Ending region 'load': it is not open on thread 'MainThread'. Call start('load') first, on the same thread, "
        "and end it once."
    ) == str(caught.value)


def test_end_twice(tmr, clock):
    """The second end is an error and keeps nothing."""
    tmr.start("a")
    clock.advance(1)
    tmr.end("a")
    for end in (lambda: tmr.end("a"), tmr.region("a").end):
        with pytest.raises(RegionNotOpenError, match="'a'"):
            end()
    assert [1.0] == tmr.get_time("a")


def test_end_of_a_region_that_another_thread_has_open(tmr, in_thread):
    """The error says on which thread it is open."""
    tmr.start("a")

    def end():
        with pytest.raises(RegionNotOpenError) as caught:
            tmr.end("a")
        return str(caught.value)

    assert (
        "Ending region 'a': it is not open on thread 'worker' (it is open on thread 'MainThread': end it there). "
        "Call start('a') first, on the same thread, and end it once."
    ) == in_thread(end, name="worker")
    tmr.end("a")


def test_a_thread_that_python_did_not_start_has_a_number(tmr):
    """A thread without a name is named by its identity."""
    import _thread

    done = threading.Event()
    texts = []

    def end():
        try:
            tmr.end("a")
        except RegionNotOpenError as error:
            texts.append((str(error), _thread.get_ident()))
        done.set()

    _thread.start_new_thread(end, ())
    done.wait()
    ((text, ident),) = texts
    assert f"it is not open on thread {ident}." in text


@pytest.mark.parametrize("key", BAD_KEYS, ids=repr)
def test_unknown_kinds_of_key(tmr, key):
    """Anything but a ``TimeType`` or a non-empty string is refused by every method that takes a key."""
    text = (
        f"Timing a region with the key {key!r}: a key is a TimeType, such as TimeType.BATCH, or a string that names a "
        f"region of your own, not {type(key).__name__}."
    )
    for call in (
        tmr.start,
        tmr.end,
        tmr.region,
        tmr.discard,
        tmr.timed,
        lambda key: tmr.iterate([], key),
        lambda key: tmr.record(key, 0, 1),
    ):
        with pytest.raises(InvalidKeyError) as caught:
            call(key)
        assert text == str(caught.value)
    reading = text.replace("Timing a region with the key", "Asking for the times of")
    for call in (tmr.get_time, tmr.get_time_stats, tmr.intervals):
        with pytest.raises(InvalidKeyError) as caught:
            call(key)
        assert reading == str(caught.value)
    assert ["bystander"] == [region.name for region in tmr.snapshot()]


def test_an_empty_name(tmr):
    """It is a string, so the text says the fault."""
    with pytest.raises(InvalidKeyError) as caught:
        tmr.start("")
    said = "Timing a region with the key '': the string is empty. Give the region a name."
    assert said == str(caught.value)


def test_a_decorator_without_its_region(tmr):
    """``@tmr.timed`` alone is an error that says how to write it."""
    with pytest.raises(InvalidKeyError) as caught:
        tmr.timed(lambda: None)
    assert str(caught.value).endswith(
        'not function. To decorate a function, call timed with its region: @timer.timed("name").'
    )


@pytest.mark.parametrize(("open_ns", "said"), [(64_846, "0.0648 ms"), (2_500_000, "0.0025 s"), (90 * S, "90 s")])
def test_how_long_a_region_has_been_open(tmr, clock, open_ns, said):
    """A moment or a minute, without an exponent."""
    tmr.start("a")
    clock.advance_ns(open_ns)
    with pytest.raises(RegionOpenError, match=f", since {said}. End it"):
        tmr.start("a")
    tmr.end("a")


@pytest.mark.parametrize("kind", [Timer, CPUGPUTimer])
@pytest.mark.parametrize("value", [-1, 1.0, "3", True])
def test_settings_that_are_no_count(kind, value):
    """``keep_last`` and ``skip_first`` must be counts, and the text says which was not."""
    with pytest.raises(ValueError) as caught:
        kind(skip_first=value)
    assert f"skip_first={value!r} must be a number of intervals, 0 or more." == str(caught.value)
    with pytest.raises(ValueError) as caught:
        kind(keep_last=value)
    assert f"keep_last={value!r} must be a number of intervals, 0 or more, or None for all." == str(caught.value)


def test_skip_first_is_not_none():
    """Only ``keep_last`` may be None."""
    with pytest.raises(ValueError, match="skip_first=None"):
        Timer(skip_first=None)


def test_record_of_an_end_before_its_start(tmr):
    """``record`` refuses to keep a negative time."""
    with pytest.raises(ValueError) as caught:
        tmr.record("a", 10, 5)
    assert "Recording 'a' from 10 to 5 ns: it ends before it begins. Swap the arguments." == str(caught.value)
    assert [] == tmr.get_time("a")


def test_record_of_the_whole_range(tmr):
    """The earliest and the latest moment of 64 bits are moments, and the longest stretch is a stretch."""
    pairs = [[-(2**63), -(2**63) + 5], [-5, 2**63 - 6], [0, 2**63 - 1]]
    for start, end in pairs:
        tmr.record("a", start, end)
    assert pairs == tmr.intervals("a").tolist()


@pytest.mark.parametrize(
    ("start", "end", "error"),
    [(0.5, 1.5, TypeError), (0, 2**63, OverflowError), (-(2**63) - 1, 0, OverflowError), ("0", "1", TypeError)],
)
def test_record_of_what_is_no_64_bit_integer(tmr, start, end, error):
    """Seconds as floats, or numbers out of range, are refused when they are given, not when they are read."""
    with pytest.raises(error):
        tmr.record("a", start, end)
    tmr.record("a", 0, S)
    assert [1.0] == tmr.get_time("a")


def test_statistics_of_a_region_without_times(tmr):
    """``get_time_stats`` says that there is nothing and what to do."""
    with pytest.raises(NoTimesError) as caught:
        tmr.get_time_stats("never")
    assert (
        "Statistics of region 'never': no time is recorded for it. Time it first, or ask get_time, which answers with "
        "an empty list."
    ) == str(caught.value)
    tmr.start("open")
    with pytest.raises(NoTimesError, match="'open'"):
        tmr.get_time_stats("open")
    tmr.discard("open")


def test_statistics_of_nothing_but_warm_up(clock):
    """The text says that there were times, and why they do not count."""
    tmr = Timer(clock=clock, skip_first=5)
    tmr.record("a", 0, S)
    tmr.record("a", 0, S)
    with pytest.raises(NoTimesError) as caught:
        tmr.get_time_stats("a")
    assert (
        "Statistics of region 'a': no time is recorded for it (2 are warm-up that skip_first leaves out). Time it "
        "first, or ask get_time, which answers with an empty list."
    ) == str(caught.value)


@pytest.mark.parametrize("with_device", [True, False])
@pytest.mark.parametrize("started_with", [True, False])
def test_another_gpu_argument_in_end(clock, started_with, with_device):
    """``gpu`` must be the same in start and end; the region stays open and can be ended rightly."""
    tmr = CPUGPUTimer(clock=clock, device_clock=ManualDeviceClock() if with_device else None)
    tmr.start("a", gpu=started_with)
    with pytest.raises(RegionMismatchError) as caught:
        tmr.end("a", gpu=not started_with)
    assert (
        f"Ending region 'a' on thread 'MainThread' with gpu={not started_with}: it was started with "
        f"gpu={started_with}, and is still open. Pass the same gpu argument to start and end."
    ) == str(caught.value)
    if started_with:
        with pytest.raises(RegionMismatchError, match="with gpu=False"):
            tmr.region("a").end()
    clock.advance(1)
    tmr.end("a", gpu=started_with)
    assert [1.0] == tmr.get_time("a")


def test_statistics_on_a_device_that_is_not_there():
    """Without a device the error of ``get_time_stats(gpu=True)`` says that the device's times are missing."""
    tmr = CPUGPUTimer()
    with tmr.region("a", gpu=True):
        pass
    assert [] == tmr.get_time("a", gpu=True)
    with pytest.raises(NoTimesError, match="region 'a' on the device: no time is recorded"):
        tmr.get_time_stats("a", gpu=True)


class TestAClockThatRaises:
    class Clock:
        """Stops on request."""

        def __init__(self):
            self.broken = False

        def now_ns(self):
            """Fail if broken."""
            if self.broken:
                raise OSError("the clock stopped")
            return 5

    @pytest.fixture(params=["timer", "region", "gpu"])
    def broken(self, request):
        """A clock, and start and end by each way."""
        clock = self.Clock()
        tmr = (
            CPUGPUTimer(clock=clock, device_clock=ManualDeviceClock()) if request.param == "gpu" else Timer(clock=clock)
        )
        if request.param == "timer":
            return clock, tmr, lambda: tmr.start("a"), lambda: tmr.end("a")
        region = tmr.region("a", gpu=True) if request.param == "gpu" else tmr.region("a")
        return clock, tmr, region.start, region.end

    def test_in_start(self, broken):
        """Nothing is open afterwards."""
        clock, tmr, start, end = broken
        clock.broken = True
        with pytest.raises(OSError, match="stopped"):
            start()
        clock.broken = False
        assert () == tmr.snapshot().regions
        start()
        end()
        assert [0.0] == tmr.get_time("a")

    def test_in_end(self, broken):
        """The region is still open and can be ended."""
        clock, tmr, start, end = broken
        start()
        clock.broken = True
        with pytest.raises(OSError, match="stopped"):
            end()
        clock.broken = False
        end()
        assert [0.0] == tmr.get_time("a")


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("clock", [None, ManualClock()])
def test_starting_what_a_block_has_open(clock, gpu):
    """Its block is live, so no exception has left it open: the start is an error however it is written."""
    tmr = Timer(ManualDeviceClock(), clock=clock)
    region = tmr.region("a", gpu)

    def enter():
        with region:
            raise AssertionError("entered once more")

    for start in (region.start, enter, lambda: tmr.start("a", gpu=gpu)):
        with region, pytest.raises(RegionOpenError):
            start()
    times = tmr.snapshot().get("a")
    assert (3, 0, 0) == (times.stats.count, times.discarded, times.failed)


@pytest.mark.parametrize("timer", [None, "timer", ManualDeviceClock()])
def test_a_region_that_no_timer_made(timer):
    """There is none: a region without a timer is refused when it is made, not when it is used."""
    with pytest.raises(TypeError):
        Region("a", "a", ThreadRegions(), timer)
