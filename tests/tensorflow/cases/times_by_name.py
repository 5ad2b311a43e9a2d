"""Cases of times that must be what their names say, on each backend of Keras 3; ``test_keras.py`` runs them."""

from __future__ import annotations

import itertools
import warnings

import keras
import numpy as np
import pytest
import suite_guard
from clocks import (
    TICK_S,
    Moments,
    Takes,
    ThreadClock,
    TickingClock,
    assert_adds_up,
    hooks_of_epochs,
    parts_between,
    total,
)
from every_backend import FIRST, batches, counts, make_model, trained_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from own_steps import OwnStep, traced

import deep500_timing_tensorflow as timer
from deep500_timing.testing import ManualClock
from deep500_timing_tensorflow import TimeType


class TakesTime(keras.Sequential):
    """A step, of training or of an evaluation, that lets a clock move on; and so do the results of the metrics."""

    STEP_S, METRICS_S, EVALUATED_S = 70.0, 11.0, 29.0

    def compute_loss(self, *args, **kwargs):
        """The loss of Keras."""
        clock_of[id(self)].advance(self.STEP_S)
        return super().compute_loss(*args, **kwargs)

    def get_metrics_result(self):
        """The results of Keras, which it asks for in a step and at the end of an epoch."""
        clock_of[id(self)].advance(self.METRICS_S)
        return super().get_metrics_result()

    def evaluate(self, *args, **kwargs):
        """The evaluation of Keras, and its use."""
        found = super().evaluate(*args, **kwargs)
        clock_of[id(self)].advance(self.EVALUATED_S)
        return found


clock_of = {}  # Keras tracks attributes on a model.


def model_that_takes_time(clock):
    """A model that runs as Python, so that each of its steps moves the clock."""
    model = make_model(model_class=TakesTime, run_eagerly=True)
    clock_of[id(model)] = clock
    return model


HOUR_S = 3600.0


@pytest.mark.parametrize("place", ["in front", "behind"])
@pytest.mark.parametrize("hook", ["on_train_batch_begin", "on_train_batch_end", "on_epoch_begin"])
def test_what_other_callbacks_do_is_in_callbacks(data, backend, hook, place):
    """The hour of another callback is in CALLBACKS and in nothing else, wherever the timer stands in the list."""
    clock = ManualClock()
    tmr = timer.Timer(clock=clock)
    model = model_that_takes_time(clock)
    callbacks = [timer.TimerCallback(tmr), Takes(hook, clock, HOUR_S)]
    model.fit(*data, batch_size=20, callbacks=callbacks if place == "behind" else callbacks[::-1], verbose=0)
    hours = 1 if hook == "on_epoch_begin" else 2
    assert pytest.approx(hours * HOUR_S) == total(tmr, "CALLBACKS")
    steps_s = 2 * (TakesTime.STEP_S + TakesTime.METRICS_S)
    assert pytest.approx(steps_s) == total(tmr, "BATCH")
    assert pytest.approx(hours * HOUR_S + steps_s + total(tmr, "EPOCH (end)")) == total(tmr, "EPOCH")
    assert 0 == total(tmr, "EPOCH (start)")
    assert total(tmr, "IO") < HOUR_S if backend == "tensorflow" else total(tmr, "IO") == 0  # There tf.data tells.
    spans = [tuple(span) for span in tmr.intervals("BATCH")]
    for began, ended in tmr.intervals("CALLBACKS"):
        assert not any(began < end and start < ended for start, end in spans)


def test_epoch_adds_up_by_independent_clocks(data, backend):
    """An epoch is the sum of its named parts, and each is that of clocks that know nothing of the timer."""
    clock = ManualClock()
    tmr = timer.Timer(clock=clock)

    class Slow(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def on_epoch_begin(self):
            clock.advance(13)

        def __getitem__(self, index):
            if backend != "tensorflow":  # There it is a thread of tf.data that asks, at any time.
                clock.advance(17)
            return data[0][:8], data[1][:8]

    first, last = Moments(clock), Moments(clock)
    callbacks = [first, timer.TimerCallback(tmr), Takes("on_train_batch_end", clock, 19), last]
    callbacks[2].on_test_begin = lambda logs=None: clock.advance(23)
    model_that_takes_time(clock).fit(Slow(), epochs=2, validation_data=data, callbacks=callbacks, verbose=0)
    true = parts_between(first, last)
    waits = 4 * 17 if backend != "tensorflow" else 0
    if backend == "torch":  # Keras fetches a batch before it calls the hooks of the batch.
        assert pytest.approx(waits) == total(tmr, "IO")
        true["EPOCH (start)"] -= 2 * 17
        assert pytest.approx(2 * 17) == true.pop("rest")
        true["IO"] = waits
    else:
        assert 0 == true.pop("rest")
    for name, seconds in true.items():
        assert seconds > 0
        assert pytest.approx(seconds) == (hooks_of_epochs(tmr) if name == "CALLBACKS" else total(tmr, name)), name
    assert pytest.approx(true.pop("EPOCH")) == sum(true.values())
    assert pytest.approx(2 * 13) == true["EPOCH (start)"]
    assert pytest.approx(4 * 19) == true["CALLBACKS"]
    assert pytest.approx(4 * 19 + 2 * 23) == total(tmr, "CALLBACKS")


def test_parts_of_an_epoch_do_not_overlap(data):
    """No part of an epoch begins before the one before it has ended, though the clock moves whenever it is read."""
    tmr = timer.Timer(clock=TickingClock())
    make_model().fit(*data, batch_size=20, epochs=2, callbacks=[timer.TimerCallback(tmr)], verbose=0)
    names = ("EPOCH (start)", "CALLBACKS", "BATCH", "EPOCH (end)")
    parts = sorted((*span, name) for name in names for span in tmr.intervals(name).tolist())
    for (_, ended_ns, before), (began_ns, _, after) in itertools.pairwise(parts):
        assert ended_ns <= began_ns, (before, after)


@pytest.mark.usefixtures("no_collector")
def test_little_of_an_epoch_has_no_name(data, backend):
    """What Keras does between two hooks is a small part of an epoch, by the processor time of its thread."""
    clock = ThreadClock()
    tmr = timer.Timer(clock=clock)
    first, last = Moments(clock), Moments(clock)
    callbacks = [first, timer.TimerCallback(tmr), last]
    make_model().fit(*data, batch_size=20, epochs=2, validation_data=data, callbacks=callbacks, verbose=0)
    assert_adds_up(tmr, first, last, batches=4, backend=backend)


def test_wait_for_data_is_io(data, backend):
    """A slow source's time is IO, at each batch, and nothing else is."""
    if backend == "tensorflow":
        pytest.skip("the graph waits, see on_tensorflow.py")
    clock = ManualClock()
    tmr = timer.Timer(clock=clock)

    taken = []

    def slow():
        for number in range(6):
            clock.advance(HOUR_S)
            taken.append(number)
            yield data[0][:8], data[1][:8]

    class Looks(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.taken_before = len(taken)  # Keras looks at one, and builds the model with one.

    looks = Looks()
    callbacks = [timer.TimerCallback(tmr), looks]
    model_that_takes_time(clock).fit(slow(), steps_per_epoch=4, callbacks=callbacks, verbose=0)
    waits = 4 - looks.taken_before
    assert pytest.approx([0.0] * looks.taken_before + [HOUR_S] * waits) == tmr.get_time("IO")
    steps_s = 4 * (TakesTime.STEP_S + TakesTime.METRICS_S)
    assert pytest.approx(steps_s + (waits * HOUR_S if backend == "jax" else 0)) == total(tmr, "BATCH")


def test_where_the_wait_for_data_lies(data, backend):
    """A batch holds the wait for its data; on torch, where hooks come between the two, the wait lies before it."""
    tmr = timer.Timer()
    make_model(run_eagerly=True).fit(*data, batch_size=8, callbacks=[timer.TimerCallback(tmr)], verbose=0)
    waits, executions = tmr.intervals("IO").tolist(), tmr.intervals("BATCH").tolist()
    assert 5 == len(waits) == len(executions)
    for (asked_ns, there_ns), (began_ns, ended_ns) in zip(waits, executions, strict=True):
        if backend == "torch":
            assert asked_ns < there_ns < began_ns
        else:
            assert began_ns <= asked_ns < there_ns < ended_ns


@pytest.mark.parametrize("size", [37, 40])
def test_traces_of_an_own_step(data, backend, size):
    """Executions of a step without ``compute_loss`` that trace are in compile too, whenever they come."""
    traces = []

    class Counts(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.before = traced(self.model)

        def on_train_batch_end(self, batch, logs=None):
            traces.append(traced(self.model) != self.before)

    tmr = timer.Timer()
    model = make_model(model_class=OwnStep)
    callbacks = [timer.TimerCallback(tmr), Counts()]
    model.fit(data[0][:size], data[1][:size], batch_size=8, epochs=2, callbacks=callbacks, verbose=0)
    expected = 0 if backend == "torch" else sum(traces)
    assert (expected, 10) == (counts(tmr).get(FIRST, 0), counts(tmr)["BATCH"])


def test_first_batch_of_a_warm_model_is_a_batch(data, backend):
    """A new callback does not make a model new: a batch without tracing or compiling is in BATCH."""
    model = make_model()
    model.fit(*data, batch_size=8, verbose=0)
    tmr = timer.Timer()
    model.fit(*data, batch_size=8, callbacks=[timer.TimerCallback(tmr)], verbose=0)
    assert 5 == counts(tmr)["BATCH"]
    assert FIRST not in counts(tmr)


@pytest.mark.parametrize("several", [1, 2])
def test_evaluation_in_a_fit_with_the_same_callback(data, backend, several):
    """``evaluate`` and ``predict`` inside a fit, with its callback, are TEST and PREDICT, and the fit goes on."""
    if backend == "torch" and several > 1:
        pytest.skip("Keras has one step per execution on torch")
    tmr = timer.Timer()
    callback = timer.TimerCallback(tmr, io=True)

    class Evaluates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.evaluate(*data, callbacks=[callback], verbose=0)
            self.model.predict(data[0], callbacks=[callback], verbose=0)

    model = make_model(steps_per_execution=several)
    model.fit(*data, batch_size=8, epochs=2, validation_data=data, callbacks=[callback, Evaluates()], verbose=0)
    found = counts(tmr)
    assert (1, 2, 2, 2, 2) == tuple(found[key] for key in ("FIT", "EPOCH", "VALIDATION", "TEST", "PREDICT"))
    assert 10 == callback.batches
    assert (10 if several == 1 else 6) == batches(tmr)
    assert not any(region.failed for region in tmr.snapshot())


@pytest.mark.parametrize("same", ["callback", "timer", "neither"])
def test_fit_in_a_fit(data, same):
    """A fit inside a fit has all its times, on the same callback, the same timer or others, and so has the outer."""
    tmr, other = timer.Timer(), timer.Timer()
    callback = timer.TimerCallback(tmr)
    inner = {"callback": callback, "timer": timer.TimerCallback(tmr), "neither": timer.TimerCallback(other)}[same]

    class Fits(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            trained_model().fit(*data, batch_size=20, callbacks=[inner], verbose=0)

    make_model().fit(*data, batch_size=8, epochs=2, callbacks=[Fits(), callback], verbose=0)
    found = counts(tmr)
    more = 0 if same == "neither" else 1
    assert (1 + 2 * more, 2 + 2 * more, 10 + 4 * more) == (found["FIT"], found["EPOCH"], found["IO"])
    assert 10 + 4 * more == batches(tmr)
    assert not any(region.failed for region in tmr.snapshot())


@pytest.mark.parametrize("io", ["auto", False, True])
@pytest.mark.parametrize("length", ["known", "unknown"])
def test_batches_are_counted_from_the_data(data, backend, length, io):
    """A step that calls no optimizer of the model does not change how many batches there were."""
    if backend == "torch":
        pytest.skip("Keras has one step per execution on torch")

    def generate():
        for start in range(0, 40, 8):
            yield data[0][start : start + 8], data[1][start : start + 8]

    callback = timer.TimerCallback(timer.Timer(), io=io)
    model = make_model(steps_per_execution=4)
    fitting = {"x": data[0], "y": data[1], "batch_size": 8} if length == "known" else {"x": generate()}
    if backend == "tensorflow" and io == "auto":
        with pytest.warns(timer.TimingWarning, match="steps_per_execution=4"):
            model.fit(**fitting, callbacks=[callback], verbose=0)
    else:
        model.fit(**fitting, callbacks=[callback], verbose=0)
    assert (5, 5, 40) == (callback.batches, callback.throughput.epoch_steps, callback.throughput.epoch_samples)
    assert 2 == batches(callback.timer)


def test_rates_are_those_of_the_steady_state(data, backend):
    """The steady rate has nothing of traces, callbacks or the start of an epoch; the epoch's rate has all of it."""
    clock = TickingClock()
    tmr = timer.Timer(clock=clock)
    callback = timer.TimerCallback(tmr)
    callbacks = [callback, Takes("on_epoch_begin", clock, HOUR_S)]
    make_model().fit(*data, batch_size=8, callbacks=callbacks, verbose=0)
    found = callback.throughput
    steady = total(tmr, "BATCH") - total(tmr, FIRST) + (total(tmr, "IO") if backend == "torch" else 0)
    assert pytest.approx(found.seconds, abs=50 * TICK_S) == steady  # A region's two readings are not the fit's.
    assert found.steps == counts(tmr)["BATCH"] - counts(tmr).get(FIRST, 0)
    assert (5, 40) == (found.epoch_steps, found.epoch_samples)
    assert HOUR_S < found.epoch_seconds <= total(tmr, "EPOCH")
    assert found.epoch_steps_per_s < found.steps_per_s


def test_epoch_lasts_until_it_is_asked_about_or_broken_off(data):
    """A request inside an epoch returns its time so far, and after an exception its whole time."""
    clock = TickingClock()
    callback = timer.TimerCallback(timer.Timer(clock=clock))
    asked = []

    class Asks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            asked.append(callback.throughput.epoch_seconds)
            clock.advance(HOUR_S)
            if batch == 2:
                raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        make_model().fit(*data, batch_size=8, callbacks=[callback, Asks()], verbose=0)
    callback.set_model(make_model())
    clock.advance(HOUR_S)
    asked.append(callback.throughput.epoch_seconds)
    assert [0, 1, 2, 3] == [int(seconds // HOUR_S) for seconds in asked]
    assert callback.throughput.epoch_steps_per_s == pytest.approx(1 / HOUR_S, rel=1e-2)


def test_intervals_of_several_steps_are_moments_that_were(data, backend):
    """With several steps per execution BATCH has one interval for each, and none lies in another."""
    if backend == "torch":
        pytest.skip("Keras has one step per execution on torch")
    tmr = timer.Timer(clock=TickingClock())
    callback = timer.TimerCallback(tmr, io=False, log_prefix="t/")
    model = make_model(steps_per_execution=3)
    model.fit(*data, batch_size=8, verbose=0)
    made = model.fit(*data, batch_size=8, callbacks=[callback], verbose=0)
    assert (2, 5) == (counts(tmr)["BATCH"], callback.batches)
    assert pytest.approx(total(tmr, "BATCH") / 5, abs=2 * TICK_S) == made.history["t/BATCH"][0]
    edges = np.asarray(tmr.intervals(TimeType.BATCH)).ravel()
    assert (np.diff(edges) > 0).all()


# --- any fit ----------------------------------------------------------------------------------------------------------

ROWS, SIZE = 12, 4
X, Y = np.ones((ROWS, 4), "float32"), np.ones((ROWS, 1), "float32")
_models = {}


class Breaks(keras.callbacks.Callback):
    """Raises in one hook, that many times after the first."""

    def __init__(self, hook, error, after):
        super().__init__()
        times = iter(range(1000))

        def raises(*args, **kwargs):
            if next(times) == after:
                raise error("broken")

        if hook is not None:
            setattr(self, hook, raises)


class Parts(keras.utils.PyDataset):
    """The data batch by batch."""

    def __len__(self):
        """How many batches."""
        return ROWS // SIZE

    def __getitem__(self, index):
        """One of them."""
        return X[:SIZE], Y[:SIZE]


def _built(kind, several):
    keras.utils.set_random_seed(7)
    inputs = keras.Input((4,))
    if kind == "noisy":
        noisy = keras.layers.BatchNormalization()(keras.layers.Dropout(0.5)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(noisy))
    elif kind == "recurrent":
        model = keras.Model(inputs, keras.layers.GRU(1)(keras.layers.Reshape((2, 2))(inputs)))
    else:
        model = (OwnStep if kind == "own step" else keras.Sequential)([inputs, keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=several, run_eagerly=kind == "eager")
    return model


def _source(kind):
    if kind == "arrays":
        return {"x": X, "y": Y, "batch_size": SIZE}
    if kind == "smaller last batch":
        return {"x": X[:-1], "y": Y[:-1], "batch_size": SIZE}
    if kind == "PyDataset":
        return {"x": Parts()}
    if kind == "generator that ends":
        return {"x": ((X[:SIZE], Y[:SIZE]) for _ in range(ROWS // SIZE))}
    return {"x": ((X[:SIZE], Y[:SIZE]) for _ in range(100)), "steps_per_epoch": ROWS // SIZE}


@pytest.mark.usefixtures("collects_its_own")
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["dense", "own step", "noisy", "recurrent", "eager"]),
    several=st.sampled_from([1, 2, 3]),
    source=st.sampled_from(["arrays", "smaller last batch", "PyDataset", "generator that ends", "endless generator"]),
    order=st.permutations(["timer", "breaks", "history", "another timer"]),
    asked=st.fixed_dictionaries({"io": st.sampled_from(["auto", True, False]), "phases": st.booleans()}),
    hook=st.sampled_from([None, "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_epoch_end"]),
    error=st.sampled_from([RuntimeError, KeyboardInterrupt]),
    after=st.integers(0, 4),
)
def test_any_fit(backend, kind, several, source, order, asked, hook, error, after):
    """For any fits, in any order and with any error: nothing stays behind, and the next fit adds up."""
    suite_guard.freeze()  # What earlier examples made is none of this one's.
    several = 1 if backend == "torch" else several
    model = _models.get((kind, several)) or _models.setdefault((kind, several), _built(kind, several))
    tmr, another = timer.Timer(), timer.Timer()
    given = {
        "timer": timer.TimerCallback(tmr, **asked),
        "breaks": Breaks(hook, error, after),
        "history": keras.callbacks.History(),
        "another timer": timer.TimerCallback(another),
    }
    callback = given["timer"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That IO or phases are left out, that the data ended: said elsewhere.
        try:
            model.fit(**_source(source), epochs=2, verbose=0, callbacks=[given[name] for name in order])
        except error:
            assert hook is not None
        timer.TimerCallback(timer.Timer()).set_model(model)
        for found in (tmr, another):
            assert [] == [region.name for region in found.snapshot() if region.running]
            found.reset()
        before = callback.batches
        model.fit(**_source(source), epochs=1, verbose=0, callbacks=[callback])
    # Of data without end Keras takes whole executions.
    trained = 4 if several == 2 and source == "endless generator" else 3
    assert trained == callback.batches - before == callback.throughput.epoch_steps
    assert not any(type(value).__module__.startswith("deep500_timing") for value in vars(model).values())
    assert {} == counts(another)
    names = counts(tmr)
    assert -(-trained // several) == batches(tmr)
    assert not any(region.failed for region in tmr.snapshot() if region.name not in ("FORWARD", "BACKWARD"))
    parts = [name for name in names if name in ("EPOCH (start)", "BATCH", "EPOCH (end)")]
    inside = total(tmr, *parts, *(["IO"] if backend == "torch" else []))
    assert inside + hooks_of_epochs(tmr) <= total(tmr, "EPOCH")
    assert total(tmr, "FORWARD", "BACKWARD") <= total(tmr, "BATCH")
