"""``for batch in timer.steps(loader)``: each batch is a BATCH, and the wait for it an IO inside that."""

from __future__ import annotations

import itertools
import threading

import pytest

from deep500_timing import Timer, TimingWarning
from deep500_timing._recording import decorators
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


@pytest.mark.parametrize(
    "shorter",
    [
        lambda steps: zip(steps, range(3), strict=False),
        lambda steps: zip(range(3), steps, strict=False),
        lambda steps: (pair for pair in map(lambda *pair: pair, steps, range(3))),
        lambda steps: itertools.takewhile(lambda one: one[0] < 3, enumerate(steps)),
    ],
    ids=["zip", "zip that asks it last", "map through a generator", "takewhile"],
)
def test_a_last_batch_whose_body_did_not_run_is_none(tmr, clock, shorter):
    """Nothing was timed in it, unlike in the one before; a loader's own regions are none of the body's."""
    with tmr.region("EPOCH"):
        for _ in shorter(tmr.steps(tmr.iterate(Loader(clock, 9), "decoding"))):
            with tmr.region("FORWARD"):
                clock.advance(10)
    assert ([11.0] * 3, (3, 0, 0, 0)) == (tmr.get_time("BATCH"), counts(tmr, "BATCH"))
    for _ in itertools.islice(tmr.steps(Loader(clock, 9)), 3):  # nothing is timed in any body
        clock.advance(10)
    assert (6, 0, 0, 0) == counts(tmr, "BATCH")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "through",
    [
        lambda iterable: iterable,
        lambda iterable: (item for item in iterable),
        lambda iterable: [one for one in [iter(iterable)] if next(one) == 0].pop(),
    ],
)
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


def on_another_thread(iterator):
    """The rest of it."""
    thread = threading.Thread(target=list, args=(iterator,))
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("loop", "batches", "dropped"),
    [
        pytest.param(lambda steps: [list(steps(2)) for _ in steps(3)], 3, 0, id="inside another"),
        pytest.param(lambda steps: [(next(one), list(steps(3))) for one in [iter(steps(3))]], 0, 1, id="one of two"),
        pytest.param(lambda steps: [0 for _ in itertools.islice(steps(9), 3)], 3, 0, id="the first ones"),
        pytest.param(lambda steps: sum(0 for _ in itertools.islice(steps(9), 3)), 3, 0, id="a generator in a call"),
        pytest.param(lambda steps: list(map(id, itertools.islice(steps(9), 3))), 2, 1, id="a call: ended or failed"),
        pytest.param(lambda steps: list(zip(steps(3), steps(3), strict=True)), 3, 0, id="two at once"),
        pytest.param(lambda steps: [next(one) for one in [iter(steps(9))] for _ in range(4)], 3, 1, id="dropped"),
        pytest.param(lambda steps: [(next(one), one.close()) for one in [iter(steps(9))]], 0, 1, id="closed"),
        pytest.param(lambda steps: [[next(one[0]), next(one[0]), list(map(id, itertools.islice(one.pop(), 3)))]
                                    for one in [[iter(steps(9))]]], 4, 1, id="some, and then in a call"),
        pytest.param(lambda steps: [on_another_thread(one) for one in [iter(steps(5))] if not next(one)], 5, 0,
                     id="on another thread"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::deep500_timing.TimingWarning")
def test_however_it_is_iterated_nothing_is_raised_and_nothing_has_failed(tmr, clock, loop, batches, dropped):
    """A BATCH that has ended has its time; one whose end is not known is counted as discarded."""
    loop(lambda items: tmr.steps(Loader(clock, items)))
    assert (batches, 0, dropped, 0) == counts(tmr, "BATCH")


def test_the_place_of_a_for_is_looked_up_once(tmr, clock, monkeypatch):
    """It takes a third of the time of an item."""
    asked = []
    monkeypatch.setattr(decorators, "_place_of_loop", lambda: asked.append(1) or (1, 2, True))
    list(tmr.steps(Loader(clock, 9)))
    assert 1 == len(asked)


def test_on_the_device_it_may_go_on_elsewhere(clock):
    """The BATCH that changes threads has no end on the device, so it is counted as discarded."""
    tmr = Timer(ManualDeviceClock(), clock=clock)
    iterator = iter(tmr.steps(Loader(clock), gpu=True))
    next(iterator)
    on_another_thread(iterator)
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
