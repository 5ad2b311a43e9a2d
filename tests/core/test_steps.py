"""``for batch in timer.steps(loader)``: each batch is a BATCH, and the wait for it an IO inside that."""

from __future__ import annotations

import itertools
import threading

import pytest

from deep500_timing import Timer, TimingWarning
from deep500_timing.testing import ManualClock, ManualDeviceClock


class Loader:
    """Takes 1 s for each item."""

    def __init__(self, clock, items=3):
        self.clock, self.items = clock, items

    def __len__(self):
        return self.items

    def __iter__(self):
        for item in range(self.items):
            self.clock.advance(1)
            yield item
        self.clock.advance(50)


def counts(tmr, key):
    """The kept, failed, discarded and running intervals."""
    times = tmr.snapshot().get(key)
    return len(tmr.get_time(key)), times.failed, times.discarded, times.running


def test_each_batch_holds_its_wait(tmr, clock):
    """BATCH lasts from the wait to the next wait; the wait for the end is no time."""
    for _ in tmr.steps(Loader(clock)):
        clock.advance(10)
    assert ([11.0] * 3, [1.0] * 3) == (tmr.get_time("BATCH"), tmr.get_time("IO"))
    assert (3, 0, 0, 0) == counts(tmr, "BATCH") == counts(tmr, "IO")


def test_it_has_the_length_of_the_loader(tmr, clock):
    """As a loader, it may be iterated again; a generator has no length."""
    loader = tmr.steps(Loader(clock))
    assert (3, [0, 1, 2], [0, 1, 2]) == (len(loader), list(loader), list(loader))
    assert not hasattr(tmr.steps(x for x in ()), "__len__")
    assert [0, 1] == list(tmr.steps(iter([0, 1])))


def test_micro_batches(tmr, clock):
    """Gradient accumulation: four items are one BATCH, and a shorter last group is one as well."""
    for _ in tmr.steps(Loader(clock, 6), micro_batches=4):
        clock.advance(10)
    assert ([44.0, 72.0], 6) == (tmr.get_time("BATCH"), len(tmr.get_time("IO")))


def test_a_full_last_group_is_followed_by_none(tmr, clock):
    """The wait for an item that does not come opens no BATCH."""
    list(tmr.steps(Loader(clock, 8), micro_batches=4))
    assert [4.0, 4.0] == tmr.get_time("BATCH")


def test_on_the_device(clock):
    """BATCH is timed on the device as well."""
    device = ManualDeviceClock()
    tmr = Timer(device, clock=clock)
    for _ in tmr.steps(Loader(clock), gpu=True):
        device.launch(2)
    device.finish()
    assert ([2.0] * 3, []) == (tmr.get_time("BATCH", gpu=True), tmr.get_time("IO", gpu=True))


def test_a_break_keeps_the_batch(tmr, clock):
    """A loop that is left by ``break`` or ``return`` has had its last batch, also through another generator."""

    def through(iterable):
        try:
            yield from iterable
        finally:
            clock.advance(0)

    def by_return(iterable):
        for _ in iterable:
            clock.advance(10)
            return 5
        return 6

    for number, _ in enumerate(tmr.steps(Loader(clock))):
        clock.advance(10)
        if number == 1:
            break
    assert ([11.0, 11.0], (2, 0, 0, 0)) == (tmr.get_time("BATCH"), counts(tmr, "BATCH"))
    for _ in through(through(tmr.steps(Loader(clock)))):
        break
    by_return(tmr.steps(Loader(clock)))
    assert (4, 0, 0, 0) == counts(tmr, "BATCH") == counts(tmr, "IO")


def parts(tmr, clock, *_):
    """What a loop's body times."""
    with tmr.region("FORWARD"):
        clock.advance(10)


def by_zip(tmr, clock):
    """With something shorter, which ends after the item has been fetched."""
    for _ in zip(tmr.steps(Loader(clock, 9)), range(3), strict=False):
        parts(tmr, clock)


def by_map(tmr, clock):
    """A function of both, in a call that goes round the loop."""
    sum(1 for _ in map(lambda *_: parts(tmr, clock), tmr.steps(Loader(clock, 9)), range(3)))


def by_progress_bar(tmr, clock):
    """Through a generator, with a loader that times its parts, and other data that takes long to end."""

    def other():
        yield from range(3)
        clock.advance(7)

    for _ in (pair for pair in zip(tmr.steps(tmr.iterate(Loader(clock, 9), "decoding")), other(), strict=False)):
        parts(tmr, clock)


def by_break(tmr, clock):
    """At the begin of a body, as a number of steps has been reached."""
    with tmr.region("EPOCH"):
        for number, _ in enumerate(tmr.steps(Loader(clock, 9))):
            if number == 3:
                break
            parts(tmr, clock)


@pytest.mark.parametrize("loop", [by_zip, by_map, by_progress_bar, by_break])
def test_a_last_batch_whose_body_did_not_run_is_none(tmr, clock, loop):
    """Nothing was timed in it, unlike in the one before."""
    loop(tmr, clock)
    assert ([11.0] * 3, (3, 0, 0, 0)) == (tmr.get_time("BATCH"), counts(tmr, "BATCH"))


def test_a_last_batch_whose_body_ran_is_one(tmr, clock):
    """Something was timed in it, or in none of the others."""
    for _ in itertools.islice(tmr.steps(Loader(clock, 9)), 3):
        parts(tmr, clock)
    for number, _ in enumerate(tmr.steps(Loader(clock, 9))):
        clock.advance(10)
        if number == 2:
            break
    for _ in itertools.islice(tmr.steps(Loader(clock, 9), micro_batches=2), 3):
        parts(tmr, clock)
    assert ([11.0] * 6 + [22.0, 11.0], (8, 0, 0, 0)) == (tmr.get_time("BATCH"), counts(tmr, "BATCH"))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("through", [lambda iterable: iterable, lambda iterable: (item for item in iterable)])
def test_an_exception_in_the_body_fails_the_batch(tmr, clock, error, through):
    """Nothing stays open, and the next loop is timed."""

    def train():
        for number in through(tmr.steps(Loader(clock))):
            clock.advance(10)
            if number == 1:
                raise error

    with pytest.raises(error):
        train()
    assert (1, 1, 0, 0) == counts(tmr, "BATCH")
    list(tmr.steps(Loader(clock)))
    assert (4, 1, 0, 0) == counts(tmr, "BATCH")


def test_what_an_exception_left_open_is_discarded_once(tmr, clock):
    """A BATCH by start and end that an interrupt cut off, and the loop in the next cell of a notebook."""
    tmr.start("BATCH")
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.warns(TimingWarning, match="it was still open"):
            list(tmr.steps(Loader(clock)))
    assert (3, 0, 1, 0) == counts(tmr, "BATCH")


def test_an_exception_in_the_loader_fails_both(tmr, clock):
    """A loader that fails has no batch."""

    class Failing(Loader):
        def __iter__(self):
            yield 0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(tmr.steps(Failing(clock)))
    assert (1, 1, 0, 0) == counts(tmr, "BATCH") == counts(tmr, "IO")


def test_a_loader_that_times_its_own_wait(tmr, clock):
    """The inner wait is part of the outer one."""
    list(tmr.steps(tmr.iterate(Loader(clock))))
    assert [1.0] * 3 == tmr.get_time("IO")


@pytest.mark.parametrize("key", ["BATCH", "IO"])
def test_inside_an_open_region_it_has_no_batch(tmr, clock, key):
    """The user's own region stays as it is, every item comes, and a warning says so."""
    with tmr.region(key), pytest.warns(TimingWarning, match="no BATCH of their own"):
        assert [0, 1, 2] == list(tmr.steps(Loader(clock)))
    assert (1, 0, 0, 0) == counts(tmr, key)
    assert (3 if key == "BATCH" else 1) == len(tmr.get_time("IO"))


def inside(tmr, clock):
    """Two items of a loop of its own in each."""
    for _ in tmr.steps(Loader(clock)):
        list(tmr.steps(Loader(clock, 2)))


def one_of_two(tmr, clock):
    """A loop that has been left alone, and another."""
    first = iter(tmr.steps(Loader(clock)))
    next(first)
    list(tmr.steps(Loader(clock)))


def some(tmr, clock):
    """The first ones of many."""
    for _ in itertools.islice(tmr.steps(Loader(clock, 9)), 3):
        clock.advance(1)


def summed(tmr, clock):
    """By a generator in a call."""
    sum(clock.advance(1) or 0 for _ in itertools.islice(tmr.steps(Loader(clock, 9)), 3))


def by_a_call(tmr, clock):
    """By a call that goes round the loop: whether it has ended or failed is not known."""
    list(map(clock.advance, itertools.islice(tmr.steps(Loader(clock, 9)), 3)))


def behind_a_bar(tmr, clock):
    """Through a generator that goes round the loop, and data that is shorter."""
    for _ in (pair for pair in zip(range(3), tmr.steps(Loader(clock, 9)), strict=False)):
        clock.advance(1)


def beside(tmr, clock):
    """As many as of something shorter."""
    for _ in zip(range(3), tmr.steps(Loader(clock, 9)), strict=False):
        clock.advance(1)


def both(tmr, clock):
    """Two at once."""
    list(zip(tmr.steps(Loader(clock)), tmr.steps(Loader(clock)), strict=True))


def by_hand(tmr, clock):
    """One by one, and dropped."""
    iterator = iter(tmr.steps(Loader(clock, 9)))
    for _ in range(4):
        next(iterator)


def closed(tmr, clock):
    """One by one, and closed."""
    iterator = iter(tmr.steps(Loader(clock, 9)))
    next(iterator)
    iterator.close()


def elsewhere(tmr, clock):
    """Begun here, and gone on on another thread."""
    iterator = iter(tmr.steps(Loader(clock, 5)))
    next(iterator)
    thread = threading.Thread(target=list, args=(iterator,))
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("loop", "batches", "dropped"),
    [(inside, 3, 0), (one_of_two, 0, 1), (some, 3, 0), (summed, 3, 0), (by_a_call, 2, 1),
     (behind_a_bar, 3, 0), (beside, 3, 0), (both, 3, 0), (by_hand, 3, 1), (closed, 0, 1),
     (elsewhere, 5, 0)],
    ids=lambda one: getattr(one, "__name__", ""),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::deep500_timing.TimingWarning")
def test_however_it_is_iterated_nothing_is_raised_and_nothing_has_failed(tmr, clock, loop, batches, dropped):
    """A BATCH that has ended has its time; one whose end is not known is counted as discarded."""
    loop(tmr, clock)
    assert (batches, 0, dropped, 0) == counts(tmr, "BATCH")


def test_on_the_device_it_may_go_on_elsewhere(clock):
    """The BATCH that changes threads has no end on the device, so it is counted as discarded."""
    tmr = Timer(ManualDeviceClock(), clock=clock)
    iterator = iter(tmr.steps(Loader(clock), gpu=True))
    next(iterator)
    thread = threading.Thread(target=list, args=(iterator,))
    thread.start()
    thread.join()
    assert (2, 0, 1, 0) == counts(tmr, "BATCH")


def test_switched_off(clock):
    """Every batch comes, and nothing is timed."""
    tmr = Timer(clock=clock, enabled=False)
    assert [0, 1, 2] == list(tmr.steps(Loader(clock)))
    assert () == tmr.snapshot().regions


@pytest.mark.parametrize("value", [0, -1, 1.0, True, None])
def test_micro_batches_must_be_a_count(value):
    """The error names the argument."""
    with pytest.raises(ValueError, match="micro_batches"):
        Timer().steps([], micro_batches=value)


def test_what_cannot_be_iterated():
    """The error says what to pass."""
    with pytest.raises(TypeError, match="pass a data loader"):
        Timer(clock=ManualClock()).steps(5)
