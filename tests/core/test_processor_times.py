"""What the kernel says of a thread's time: on each Python, compiled or plain, the numbers of ``getrusage``."""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path
from struct import iter_unpack

import pytest

from deep500_timing._recording.intervals import ProcessorTimes

pytestmark = pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="the kernel does not tell a thread's time on a processor"
)
WORK_S, TICK_S = 0.3, 0.02
"""Processor time of the work; and how far the kernel's counters are behind, which it updates at its ticks."""


def works():
    """A loop that ends by the time on a processor, whatever else runs."""
    end = time.thread_time() + WORK_S
    while time.thread_time() < end:
        sum(range(1000))


def waits():
    """For another thread, which works."""
    thread = threading.Thread(target=works)
    thread.start()
    thread.join()


def alternates():
    """Both, by turns."""
    for _ in range(3):
        waits()
        works()


@pytest.mark.parametrize(("act", "ran_s"), [(works, WORK_S), (waits, 0.0), (alternates, 3 * WORK_S)])
def test_the_parts_are_those_of_getrusage(act, ran_s):
    """The time on a processor within 2 % and a tick; with the time waited for one it is no more than the wall clock."""
    times = ProcessorTimes(threading.get_ident())
    used = resource.getrusage(resource.RUSAGE_THREAD)
    times.read(10_000_000)
    times.read(13_999_999)  # too close
    act()
    times.read(14_000_000)
    now = resource.getrusage(resource.RUSAGE_THREAD)
    times.stop()
    (began, ran, waited, _), (ended, ran_then, waited_then, _) = iter_unpack("4q", times.rows.since(0)[0])
    took_s, ran_s_found = (ended - began) / 1e9, (ran_then - ran) / 1e9
    used_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    assert pytest.approx(used_s, rel=0.02, abs=TICK_S) == ran_s_found
    assert ran_s_found >= ran_s - TICK_S
    assert 0 <= (waited_then - waited) / 1e9 <= took_s - ran_s_found + TICK_S
