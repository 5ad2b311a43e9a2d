"""Clocks that the machine's load does not reach, and callbacks that read a clock and know nothing of the timer."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

import numpy as np
import pytest

from deep500_timing.testing import ManualClock

# Keras 3, or Keras 2 where it is tested.
keras: Any = importlib.import_module(os.environ.get("KERAS_MODULE", "keras"))

TICK_S = 1e-6


def made_data():
    """Forty samples of four numbers and their sum."""
    x = np.random.default_rng(0).random((40, 4)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


class TickingClock(ManualClock):
    """Moves by a tick whenever it is read, so that nothing takes no time, and anything as long as it is read."""

    def now_ns(self):
        """The next tick."""
        self.advance(TICK_S)
        return super().now_ns()


class ThreadClock:
    """The processor time of the calling thread, which stands still while others have the processor."""

    def now_ns(self):
        """In nanoseconds."""
        return time.thread_time_ns()


class Takes(keras.callbacks.Callback):
    """Lets a clock move on in one of its hooks."""

    def __init__(self, hook, clock, seconds):
        super().__init__()
        setattr(self, hook, lambda *args, **kwargs: clock.advance(seconds))


class Moments(keras.callbacks.Callback):
    """When Keras calls, by a clock; one stands first in the list, one last."""

    def __init__(self, clock):
        super().__init__()
        self.moments = []
        self._clock = clock
        for hook in ("epoch_begin", "train_batch_begin", "train_batch_end", "test_begin", "test_end", "epoch_end"):
            setattr(self, f"on_{hook}", lambda *args, hook=hook, **kwargs: self._note(hook))

    def _note(self, hook):
        self.moments.append((hook, self._clock.now_ns() / 1e9))


def total(tmr, *names):
    """The seconds in all intervals of some regions."""
    return sum(sum(tmr.get_time(name)) for name in names)


def hooks_of_epochs(tmr):
    """The seconds of CALLBACKS that are a part of an epoch: neither those of the fit, nor those of a validation."""

    def lies_in(hook, name):
        return any(start <= hook[0] and hook[1] <= end for start, end in tmr.intervals(name).tolist())

    hooks = tmr.intervals("CALLBACKS").tolist()
    own = [hook for hook in hooks if lies_in(hook, "EPOCH") and not lies_in(hook, "VALIDATION")]
    return sum(end - start for start, end in own) / 1e9


def parts_between(first, last):
    """The moments of two such callbacks, in front of all others and behind them, make of a fit's epochs, in s."""
    parts = dict.fromkeys(("EPOCH", "BATCH", "CALLBACKS", "VALIDATION", "EPOCH (start)", "EPOCH (end)", "rest"), 0.0)
    before_hook, before_s, epoch_began_s = "", 0.0, 0.0
    between = {
        ("epoch_begin", "train_batch_begin"): "EPOCH (start)",
        ("train_batch_begin", "train_batch_end"): "BATCH",
        ("train_batch_end", "test_begin"): "EPOCH (end)",
        ("train_batch_end", "epoch_end"): "EPOCH (end)",
        ("test_begin", "test_end"): "VALIDATION",
        ("test_end", "epoch_end"): "VALIDATION",
    }
    for (hook, entered_s), (_, left_s) in zip(first.moments, last.moments, strict=True):
        if hook == "epoch_begin":
            epoch_began_s = entered_s
        else:
            parts[between.get((before_hook, hook), "rest")] += entered_s - before_s
        if hook == "epoch_end":
            parts["EPOCH"] += entered_s - epoch_began_s
        else:
            parts["VALIDATION" if hook in ("test_begin", "test_end") else "CALLBACKS"] += left_s - entered_s
        before_hook, before_s = hook, left_s
    return parts


def assert_adds_up(tmr, first, last, batches, backend):
    """Each part of an epoch is that of clocks that know nothing of the timer, and less than 2 % has no name."""
    true = parts_between(first, last)
    slack_s = 0.02 * true["EPOCH"] + 0.0005 * batches  # What Keras's loop takes, however small the model.
    parts = ["EPOCH (start)", "BATCH", "VALIDATION", "EPOCH (end)", *(["IO"] if backend == "torch" else [])]
    assert 0 <= total(tmr, "EPOCH") - total(tmr, *parts) - hooks_of_epochs(tmr) < slack_s
    for name in ("EPOCH", "BATCH", "VALIDATION", "EPOCH (end)"):
        assert pytest.approx(true[name], abs=slack_s) == total(tmr, name), name
    assert pytest.approx(true["CALLBACKS"], abs=slack_s) == hooks_of_epochs(tmr)
    start_s = total(tmr, "EPOCH (start)", *(["IO"] if backend == "torch" else []))
    assert pytest.approx(true["EPOCH (start)"] + true["rest"], abs=slack_s) == start_s
