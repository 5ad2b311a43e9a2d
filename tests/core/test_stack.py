"""Stacks that are read while their thread waits, computes, or is torn from under the reader."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import struct
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from deep500_timing._base import stack
from deep500_timing._base.stack import StackWatch, read_stack

MAIN = threading.main_thread().ident


def without_gil(period_s=1e-4):
    """A watch over the main thread that needs no GIL; skips the test where there is none."""
    watch = StackWatch(period_s, MAIN)
    if watch.takes_gil:
        pytest.skip("stacks are read with the GIL here")
    return watch


def names(of):
    """What a stack is compared by."""
    return None if of is None else [(code.co_qualname, code.co_filename, code.co_firstlineno, at) for code, at in of]


class Held:
    """A thread that samples the main thread while that is held at :meth:`here`."""

    def __init__(self, watch):
        self.entered, self.left, self.samples, self.told = threading.Event(), threading.Lock(), [], None
        self.left.acquire()
        self.watch = watch
        self.thread = threading.Thread(target=self.work)
        self.thread.start()

    def work(self):
        """On the thread."""
        self.entered.wait()
        try:
            while len(self.samples) < 3:
                self.samples += [names(of) for _, of, _ in self.watch.watch(1.0)]
            self.told = names(read_stack(MAIN))
        finally:
            self.left.release()

    def here(self):
        """Wait here until it is sampled."""
        self.entered.set()
        self.left.acquire()

    def end(self):
        """What was sampled, which must be what the interpreter says."""
        self.thread.join()
        at = next(place for place, (name, *_) in enumerate(self.told) if name == "Held.here")
        # It reached the lock after `entered` was set: the first samples may show the way there.
        assert self.samples[-1][-(len(self.told) - at - 1) :] == self.told[at + 1 :]
        return [name for name, *_ in self.told[at + 1 :]]


def below(depth, held):
    """Recursion."""
    return below(depth - 1, held) if depth else held.here()


def numbers(held):
    """A generator in a generator."""
    yield from (held.here() for _ in range(1))


def by_class(held):
    """A class in a function."""

    class Caller:
        def __init__(self):
            [held.here() for _ in range(1)]

    return Caller()


@pytest.mark.parametrize("takes_gil", [False, True])
@pytest.mark.parametrize(
    ("hold", "inner"),
    [
        (lambda held: held.here(), "<lambda>"),
        (lambda held: below(3, held), "below"),
        (lambda held: below(400, held), "below"),
        (lambda held: list(numbers(held)), "numbers.<locals>.<genexpr>"),
        (lambda held: sorted([0], key=lambda _: held.here()), "<lambda>.<locals>.<lambda>"),
        (lambda held: by_class(held), "by_class.<locals>.Caller.__init__"),
        (lambda held: exec("held.here()", {"held": held}), "<module>"),
    ],
)
def test_a_thread_that_is_held(hold, inner, takes_gil, monkeypatch):
    """Its frames, with the instructions that they are at, as the interpreter tells them."""
    if takes_gil:
        monkeypatch.setattr(StackWatch, "_agrees", lambda _: False)
        watch = StackWatch(1e-4, MAIN)
        assert watch.takes_gil
    else:
        watch = without_gil()
    held = Held(watch)
    hold(held)
    assert inner in held.end()[:2]  # a comprehension has a frame of its own up to 3.11


def samples_while(work, count, watch):
    """The stacks of the main thread while it repeats something, and how many could not be read."""
    found = []

    def other():
        while len(found) < count:
            found.extend(names(of) for _, of, _ in watch.watch(0.1))

    thread = threading.Thread(target=other)
    thread.start()
    while thread.is_alive():
        work()
    return [of for of in found if of], sum(not of for of in found)


def hold_gil():
    """Some ms in C."""
    return pow(7, 50_000, 10**9000 + 1)


def test_a_call_that_keeps_the_gil_is_seen():
    """A sample does not wait until the call is over."""
    read, _ = samples_while(hold_gil, 100, without_gil())
    assert any(of[0][0] == "hold_gil" for of in read)


def g():
    """Called by f."""
    return 1


def f():
    """Calls g."""
    return g()


def n():
    """Called by k."""
    return 2


def k():
    """Calls n."""
    return n()


CALLERS = {"g": ("f",), "n": ("k",), "f": ("quick",), "k": ("quick",), "quick": ("samples_while",)}


def quick():
    """Calls f and k."""
    for _ in range(1000):
        f()
        k()


def test_what_changes_while_it_is_read_is_not_believed():
    """Functions of some ten ns follow each other in the same place: of 100 stacks, one has a call that nobody makes."""
    read, broken = samples_while(quick, 2000, without_gil(1e-6))
    pairs = Counter(
        pair for of in read for pair in zip((one[0] for one in of), (one[0] for one in of[1:]), strict=False)
    )
    wrong = sum(often for (one, two), often in pairs.items() if one in CALLERS and two not in CALLERS[one])
    assert wrong <= len(read) / 100
    assert broken < len(read)


def blocks_behind(block):
    """The places of pointers in some bytes, each with what it leads to."""
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        for at in range(0, len(block), 8):
            with contextlib.suppress(OSError, OverflowError):
                yield at, os.pread(memory.fileno(), 256, struct.unpack_from("P", block, at)[0])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_memory_without_sense_is_no_stack(depth):
    """Whatever stands in the thread's state, or in a frame behind it: nothing faults, and no code is made up."""
    watch = without_gil(1e-9)
    here = {code.co_filename for code, _ in watch.watch(1.0)[-1][1]}
    if depth:  # there, frames that have returned are in sight
        here |= {getattr(module, "__file__", "") for module in sys.modules.values()}
    room, at_state = watch._room, 64 * 8 * stack._WORDS  # behind the samples
    (state,) = struct.unpack_from("P", room, at_state)
    text, odd = "a text", bytes(range(256)) * 64
    buffers = [ctypes.create_string_buffer(odd, len(odd)), ctypes.create_string_buffer(8192)]
    bogus = [0, 1, 8, 1 << 46, (1 << 63) - 8, (1 << 64) - 8, id(text), id(here), *map(ctypes.addressof, buffers)]

    def files_at(place):
        watch._room = room[:at_state] + struct.pack("P", place) + room[at_state + 8 :]
        return {code.co_filename for _, of, _ in watch.watch(1e-6 if depth else 1.0) for code, _ in of or ()}

    assert not any(map(files_at, bogus))
    chains = [(ctypes.string_at(state, 1024), [])]
    for width in (256, 24)[:depth]:
        chains = [
            (inner, [*chain, (block, at)]) for block, chain in chains for at, inner in blocks_behind(block[:width])
        ]
    for block, chain in chains:
        for at in range(0, 80 if depth else 256, 8):
            for place in bogus:
                bent = block[:at] + struct.pack("P", place) + block[at + 8 :]
                copies = [ctypes.create_string_buffer(bent, len(bent))]
                for before, to in reversed(chain):
                    copies.append(ctypes.create_string_buffer(before, len(before)))
                    struct.pack_into("P", copies[-1], to, ctypes.addressof(copies[-2]))
                assert files_at(ctypes.addressof(copies[-1])) <= here


def test_a_code_object_that_went_is_not_touched():
    """What stands in its place now names nothing: the frames around it are told, or none."""
    watch = without_gil(1e-9)
    text, source = "a text", "samples = watch.watch(1.0)\nframes = bytes(watch._room[: 8 * size])"
    names = {"watch": watch, "size": stack._WORDS}
    exec(compile(source, "one.py", "exec"), names)
    [(time_ns, true, times)], frames = names["samples"], names["frames"]
    assert true[0][0].co_filename == "one.py"
    assert [*true[0][0].co_positions()] == [*compile(source, "one.py", "exec").co_positions()]
    assert watch._sample_in(frames, 0) == (time_ns, true, times)
    for place in (0, 8, 1 << 46, id(text), id(names), id(test_a_code_object_that_went_is_not_touched.__code__)):
        for at, left in ((4, len(true) - 1), (4 + 3 * (len(true) - 1), 0)):
            watch._codes.clear()
            other = frames[: 8 * at] + struct.pack("Q", place) + frames[8 * at + 8 :]
            assert len(watch._sample_in(other, 0)[1] or ()) == left


def test_a_thread_that_is_not_there_is_read_with_the_gil():
    """Its stack is None."""
    watch = StackWatch(1e-9, 1)
    assert watch.takes_gil
    assert [of for _, of, _ in watch.watch(1.0)] == [None]


def test_a_reading_that_differs_from_what_python_tells_is_given_up(monkeypatch):
    """Frames may lie elsewhere than the headers said: the GIL is taken then."""
    monkeypatch.setattr(stack, "_described", lambda _: object())
    assert StackWatch(0.02, MAIN).takes_gil


def test_a_watch_is_woken():
    """A watch that was told to end waits no more, in either way."""
    for watch in (StackWatch(3600.0, MAIN), StackWatch(3600.0, 1)):
        watch.wake()
        watch.wake()
        assert watch.woken
        assert watch.watch(3600.0) == []


def test_a_sample_keeps_nothing_of_the_program_alive():
    """Neither a local variable nor a code object."""
    held, code = object(), compile("f(held)", "one.py", "exec")
    counts = sys.getrefcount(held), sys.getrefcount(code)
    watch = StackWatch(1e-9, MAIN)
    for _ in range(3):
        exec(code, {"f": lambda _: watch.watch(1.0), "held": held})
    gc.collect()  # a thread that samples itself with the GIL sees the frame that does so
    assert (sys.getrefcount(held), sys.getrefcount(code)) == counts


COLLECTED = """
import gc, sys, threading
from deep500_timing._base.stack import read_stack
deep, go, is_deep = {depth}, threading.Event(), threading.Event()
def recurse(left):
    if left:
        return recurse(left - 1)
    is_deep.set()
    go.wait()
thread = threading.Thread(target=recurse, args=(deep,), daemon=True)
thread.start()
is_deep.wait()
def let_it_go_on(phase, info):
    go.is_set() or (go.set(), thread.join())
gc.callbacks.append(let_it_go_on)
gc.set_threshold({threshold})
print(len(read_stack(thread.ident)) > deep, gc.isenabled())
"""


@pytest.mark.parametrize(("depth", "threshold"), [(20, 1), (150, 1), (150, 60)])
def test_a_collection_meanwhile_is_put_off(depth, threshold):
    """Up to 3.11 it may start as a frame is looked at, and let the thread go on, whose frames are then no more."""
    program = COLLECTED.format(depth=depth, threshold=threshold)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (0, "True True\n") == (done.returncode, done.stdout), done.stderr
