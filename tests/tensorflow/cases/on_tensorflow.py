"""Cases of Keras 3 on TensorFlow alone: graphs, strategies, stamps; ``test_keras_graphs.py`` runs them."""

from __future__ import annotations

import gc
import itertools
import math
import sys
import threading
import time
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from clocks import made_data
from hypothesis import given
from hypothesis import strategies as st

import deep500_timing_tensorflow as timer
from deep500_timing.testing import ManualClock
from deep500_timing_tensorflow import TimeType, _data
from deep500_timing_tensorflow._callback import Sentinel
from deep500_timing_tensorflow._data import TimedDataset, WaitSums
from deep500_timing_tensorflow._phases import StampedPhases, StampRing, Stamps, StepStamps, record_phases
from deep500_timing_tensorflow._regions import Execution, Regions

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)

FIRST = "compile"
PASSES = ("FORWARD", "BACKWARD")


def make_model(model_class=keras.Model, **compiling):
    """A model of two layers, the same each time; by SGD, which is traced in a fraction of Adam's time."""
    keras.utils.set_random_seed(7)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(8, activation="relu")(inputs)
    model = model_class(inputs, keras.layers.Dense(1)(hidden))
    model.compile(**{"optimizer": "sgd", "loss": "mse", **compiling})
    return model


def counts(tmr):
    """How often each region was timed, and that none is left open."""
    snapshot = tmr.snapshot()
    assert [] == [region.name for region in snapshot if region.running]
    return {region.name: region.stats.count for region in snapshot if region.stats is not None}


def failed(tmr):
    """The names of the regions that were broken off."""
    return {region.name for region in tmr.snapshot() if region.failed}


def weights_after(model, data, callbacks, batch_size=8, **fitting):
    """The weights after a fit of the data as TensorFlow's: of arrays Keras makes a graph for each fit."""
    batches = tf.data.Dataset.from_tensor_slices(data).batch(batch_size)
    model.fit(batches, **{"epochs": 3, "verbose": 0, "shuffle": False, **fitting}, callbacks=callbacks)
    return model.get_weights()


def assert_passes(tmr, batches):
    """Each batch has its passes, the ones that traced kept apart."""
    found = counts(tmr)
    for key in (*PASSES, "BATCH"):
        assert batches == found[key]


class OwnEverything(keras.Model):
    """A train step that goes by neither ``compute_loss`` nor the optimizer."""

    def train_step(self, data):
        """Train on one batch."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        for variable, gradient in zip(
            self.trainable_variables, tape.gradient(loss, self.trainable_variables), strict=True
        ):
            variable.assign_sub(0.01 * gradient)
        return {"loss": loss}


class TwoGradients(keras.Model):
    """A train step with two gradients, of which neither is the backward pass."""

    def train_step(self, data):
        """Train on one batch."""
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class TwoTargets(keras.Model):
    """A train step with a gradient of two targets, and a seed for one."""

    def train_step(self, data):
        """Train on one batch."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            size = tf.add_n([tf.reduce_sum(v**2) for v in self.trainable_variables])
        gradients = tape.gradient([loss, size], self.trainable_variables, output_gradients=[tf.constant(2.0), None])
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class GradientPenalty(keras.Model):
    """A train step with a gradient in its loss, and which so takes the gradient of one."""

    def train_step(self, data):
        """Train on one batch."""
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                predicted = self(x)
            slope = inner.gradient(predicted, x)
            loss = tf.reduce_mean((predicted - y) ** 2) + tf.reduce_mean(slope**2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize("model_class", [TwoGradients, OwnEverything])
@pytest.mark.parametrize("length", ["known", "unknown"])
def test_batches_are_counted_whatever_the_optimizer_does(data, model_class, length):
    """Steps that call the optimizer twice, or never, are as many as the batches that the data handed out."""

    def generate():
        for start in range(0, 40, 8):
            yield data[0][start : start + 8], data[1][start : start + 8]

    callback = timer.TimerCallback(timer.Timer())
    model = make_model(model_class, steps_per_execution=4)
    given = {"x": generate()} if length == "unknown" else {"x": data[0], "y": data[1], "batch_size": 8}
    with pytest.warns(timer.TimingWarning, match="steps_per_execution=4"):
        model.fit(**given, callbacks=[callback], verbose=0)
    assert (5, 5, 40) == (callback.batches, callback.throughput.epoch_steps, callback.throughput.epoch_samples)


@pytest.mark.parametrize("model_class", [TwoGradients, GradientPenalty])
def test_step_whose_backward_pass_cannot_be_told(data, model_class):
    """Two gradients in a step, one after or inside the other: the same weights, no passes, one message."""
    without = weights_after(make_model(model_class), data, [])
    tmr = timer.Timer()
    with pytest.warns(timer.TimingWarning, match="exactly one gradient") as said:
        stamped = weights_after(make_model(model_class), data, [timer.TimerCallback(tmr, phases=True)])
    assert 1 == len([warning for warning in said if warning.category is timer.TimingWarning])
    for expected, actual in zip(without, stamped, strict=True):
        np.testing.assert_array_equal(expected, actual)
    found = counts(tmr)
    assert 15 == found["BATCH"]
    assert "FORWARD" not in found


def test_model_that_was_traced_before_has_no_passes(data):
    """Phases trace nothing again: a graph without stamps has none, and the message says what to do."""
    model = make_model()
    weights_after(model, data, [])
    tmr = timer.Timer()
    with pytest.warns(timer.TimingWarning, match="traced before without phases"):
        weights_after(model, data, [timer.TimerCallback(tmr, phases=True)])
    assert {"BATCH": 15, "FORWARD": 0} == {key: counts(tmr).get(key, 0) for key in ("BATCH", "FORWARD")}


def test_ring_grows_with_the_executions(data):
    """A model that is compiled again with long executions loses no batch."""
    model, tmr = make_model(), timer.Timer()
    callback = timer.TimerCallback(tmr, io=False, phases=True)
    weights_after(model, data, [callback], epochs=1)
    model.compile("sgd", "mse", steps_per_execution=1500)  # The ring has 1024 rows.
    tmr.reset()
    many = tf.data.Dataset.from_tensors((data[0][:1], data[1][:1])).repeat(3000)
    model.fit(many, epochs=1, callbacks=[callback], verbose=0)
    found = counts(tmr)
    assert (3000, set()) == (found["FORWARD"], failed(tmr))


def test_sizes_that_xla_compiles_for(data):
    """XLA compiles for each size of a batch without a trace; those executions are in compile too."""
    tmr = timer.Timer()
    model, callback = make_model(jit_compile=True), timer.TimerCallback(tmr, io=False)
    weights_after(model, data, [callback], batch_size=16, epochs=2)
    assert (2, 6) == (counts(tmr)[FIRST], counts(tmr)["BATCH"])
    weights_after(model, data, [callback], batch_size=20, epochs=2)
    assert (3, 10) == (counts(tmr)[FIRST], counts(tmr)["BATCH"])


def fitted_on_two_replicas(data, callbacks):
    """How often a step is traced in a fit, and after the next without callbacks; and the weights."""
    calls = [0]

    class Counted(keras.Model):
        def train_step(self, given):
            calls[0] += 1
            return super().train_step(given)

    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = make_model(Counted)
    numbers = []
    for fit_callbacks in (callbacks, []):
        model.fit(*data, batch_size=8, epochs=2, callbacks=fit_callbacks, shuffle=False, verbose=0)
        numbers.append(calls[0])
    return numbers, [weight.tolist() for weight in model.get_weights()]


def test_two_replicas():
    """Under MirroredStrategy a batch counts once, with the passes of one replica, all its samples, and no other trace.

    The next fit is traced as often as without the callbacks too, and the weights are the same.
    """
    data = tuple(array[:37] for array in made_data())  # Of five batches of eight the last has three samples less.
    with_phases, default = (timer.TimerCallback(timer.Timer(), phases=phases) for phases in (True, False))
    found = fitted_on_two_replicas(data, [with_phases, default])
    assert found[0][0] > 0
    assert fitted_on_two_replicas(data, []) == found
    for callback in (with_phases, default):
        regions = counts(callback.timer)
        assert 10 == regions["BATCH"] == regions["IO"]
        assert 37 == callback.throughput.samples
    assert_passes(with_phases.timer, batches=10)


@pytest.mark.parametrize("hook", ["on_train_batch_begin", "on_train_batch_end", "on_epoch_end"])
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_phases_of_a_fit_in_a_hook_of_the_same_models_fit(data, eager, hook):
    """One graph serves a fit and one in its hooks, and each batch of both has its own passes."""
    outer, inner = timer.TimerCallback(timer.Timer(), phases=True), timer.TimerCallback(timer.Timer(), phases=True)

    class Fits(keras.callbacks.Callback):
        left = 2

        def fits(self, *args, **kwargs):
            if self.left:
                self.left -= 1
                self.model.fit(*data, batch_size=20, callbacks=[inner], verbose=0)

    fits = Fits()
    setattr(fits, hook, fits.fits)
    make_model(run_eagerly=eager).fit(*data, batch_size=8, epochs=2, callbacks=[fits, outer], verbose=0)
    for callback, expected in ((outer, 10), (inner, 4)):
        found = counts(callback.timer)
        for key in (*PASSES, "BATCH"):
            assert expected == found[key]
        assert (expected, set()) == (callback.batches, failed(callback.timer))
        inside = sum(callback.timer.get_time("FORWARD")) + sum(callback.timer.get_time("BACKWARD"))
        assert inside <= sum(callback.timer.get_time("BATCH"))


@pytest.mark.parametrize("phases", [False, True])
def test_dataset_of_unknown_length(data, phases):
    """The batch that is not there leaves neither an interval nor stamps."""

    def generate():
        for start in range(0, 40, 8):
            yield data[0][start : start + 8], data[1][start : start + 8]

    spec = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1)))
    dataset = tf.data.Dataset.from_generator(generate, output_signature=spec)
    tmr = timer.Timer()
    callback = timer.TimerCallback(tmr, phases=phases)
    make_model().fit(dataset, epochs=3, callbacks=[callback], verbose=0)
    found = counts(tmr)
    assert 15 == found["BATCH"] == found["IO"]
    if phases:
        assert_passes(tmr, batches=15)


def test_wait_for_data_is_io(data):
    """A slow source's time is IO, at each batch, and lies inside the batch."""
    slept = []

    def sleeps(number):
        began = time.perf_counter()
        time.sleep(0.05)
        slept.append(time.perf_counter() - began)
        return number

    def slow(number):
        number = tf.ensure_shape(tf.py_function(sleeps, [number], tf.int64), ())
        return tf.cast(tf.fill((8, 4), number), tf.float32), tf.cast(tf.fill((8, 1), number), tf.float32)

    tmr = timer.Timer()
    options = tf.data.Options()
    options.autotune.enabled = options.experimental_optimization.inject_prefetch = False  # Nothing runs ahead.
    dataset = tf.data.Dataset.range(4).map(slow).with_options(options)
    make_model().fit(dataset, callbacks=[timer.TimerCallback(tmr)], verbose=0)
    waits, executions = tmr.get_time("IO"), tmr.get_time("BATCH")
    assert 4 == len(waits)
    for slept_s, wait_s, execution_s in zip(slept[-4:], waits, executions, strict=True):
        assert slept_s - 1e-3 < wait_s < execution_s + 1e-3


@pytest.fixture
def _read_when_asked(monkeypatch):
    """The sums are read after the first execution, and then when someone asks or an epoch ends."""
    monkeypatch.setattr(_data, "_FIRST_ONES", 0)
    for name in ("READ_AFTER_NS", "READ_EACH_NS", "WAITS_NS"):
        monkeypatch.setattr(_data, name, math.inf)


def seen_by(callback):
    """The sums of the fit that is running in this callback's list."""
    frame = sys._getframe()
    while frame.f_code.co_name != "fit":
        frame = frame.f_back
    sentinels = (found for found in frame.f_locals["callbacks"].callbacks if isinstance(found, Sentinel))
    return [next(one for one in sentinels if one.fit.options is callback._options).fit._batches._sums.fetched()]


@pytest.mark.usefixtures("_read_when_asked")
def test_one_reading_for_many_short_steps_loses_nothing(data, monkeypatch):
    """Unread sums are read with a later batch: batches, samples and waits are all there."""
    sums, asked, readings = [], [], []
    fetched = WaitSums.fetched
    monkeypatch.setattr(WaitSums, "fetched", lambda sums: readings.append(sums) or fetched(sums))

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                asked.append(callback.throughput.epoch_samples)

        def on_epoch_end(self, epoch, logs=None):
            sums.extend(seen_by(callback))

    tmr = timer.Timer()
    callback = timer.TimerCallback(tmr)
    model, data = make_model(), (data[0][:37], data[1][:37])
    model.fit(*data, batch_size=8, verbose=0)
    model.fit(*data, batch_size=8, epochs=2, callbacks=[callback, Looks()], verbose=0)
    assert [4 * 8] * 2 == asked  # Who asks meanwhile is told of all that was.
    assert 10 == counts(tmr)["IO"]  # Groups of 1, 3, 1, 4 and 1 batches.
    # At the begin, of the first batch, then for each who asked and for each end of an epoch.
    assert 6 == len(readings) - len(sums)
    assert pytest.approx(sums[-1].wait_us / 1e6) == sum(tmr.get_time("IO"))
    assert (10, 5, 37) == (callback.batches, callback.throughput.epoch_steps, callback.throughput.epoch_samples)
    assert 37 == callback.throughput.samples


def test_trace_in_a_hook_is_none_of_a_batch_on_a_clock_that_stands_still(data):
    """Whether there was time to trace is asked of the system's clock: a timer may be given any other."""

    class TrainsOnLess(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                others = tf.data.Dataset.from_tensors(tuple(array[:3] for array in data))
                self.model.train_function(iter(others))

    tmr, model = timer.Timer(clock=ManualClock()), make_model()
    model.fit(*data, batch_size=8, verbose=0)
    model.fit(*data, batch_size=8, callbacks=[timer.TimerCallback(tmr), TrainsOnLess()], verbose=0)
    assert 5 == counts(tmr)["BATCH"]
    assert FIRST not in counts(tmr)


@pytest.mark.usefixtures("collects_its_own", "_read_when_asked")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=["exception", "Ctrl-C"])
def test_waits_before_an_exception_are_recorded(data, error):
    """Every wait before an exception is recorded at the next use, and no frame or reference of ours is left."""
    sums, iterators = [], []

    class Breaks(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 4:
                sums.extend(seen_by(callback))
                frame = sys._getframe()
                while frame.f_code.co_name != "fit":
                    frame = frame.f_back
                iterators.append(weakref.ref(frame.f_locals["epoch_iterator"]))
                raise error("bad sample")

    tmr, also = timer.Timer(), timer.TimerCallback(timer.Timer())
    callback = timer.TimerCallback(tmr)
    model = make_model()
    model.fit(*data, batch_size=8, verbose=0)
    with pytest.raises(error) as raised:
        model.fit(*data, batch_size=8, callbacks=[callback, also, Breaks()], verbose=0)
    assert not any("deep500_timing" in str(entry.path) for entry in raised.traceback)
    del raised
    gc.collect()  # Keras's own frame refers to itself after an exception.
    assert iterators[0]() is None
    callback.set_model(model)
    waited_s = sums[0].wait_us / 1e6
    assert 0 < waited_s
    for told in (callback, also):
        waits = told.timer.get_time("IO")
        assert (4, pytest.approx(waited_s)) == (len(waits), sum(waits))
        assert (4, 4 * 8) == (told.throughput.epoch_steps, told.throughput.epoch_samples)
    model.fit(*data, batch_size=8, callbacks=[callback], verbose=0)
    assert (9, 9) == (callback.batches, counts(tmr)["IO"])


@pytest.mark.usefixtures("collects_its_own")
@pytest.mark.parametrize("phases", [False, True])
def test_model_of_an_aborted_fit_goes_when_its_user_lets_go_of_it(data, phases):
    """The regions wait for the next use of a callback, and keep no model in memory meanwhile."""

    class Breaks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise ValueError("bad sample")

    tmr, model = timer.Timer(), make_model()
    alive = weakref.ref(model)
    with pytest.raises(ValueError, match="bad sample") as raised:
        model.fit(*data, batch_size=8, callbacks=[timer.TimerCallback(tmr, phases=phases), Breaks()], verbose=0)
    del model, raised
    gc.collect()  # Keras's own frame refers to itself after an exception.
    assert alive() is None
    assert 1 == tmr.snapshot().get("FIT").running
    timer.TimerCallback(timer.Timer()).set_model(make_model())
    assert 1 == tmr.snapshot().get("FIT").failed


@pytest.mark.usefixtures("_read_when_asked")
def test_data_that_raises_costs_no_samples():
    """tf.data counts the wait for what was not handed out, and no bytes: nothing is taken off those trained on."""

    def generate():
        for _ in range(3):
            yield data[0][:8], data[1][:8]
        raise OSError("disk")

    data, callback = made_data(), timer.TimerCallback(timer.Timer())
    with pytest.raises(tf.errors.UnknownError, match="disk"):
        make_model().fit(generate(), steps_per_epoch=5, callbacks=[callback], verbose=0)
    callback.set_model(make_model())
    assert (3, 3 * 8) == (callback.throughput.epoch_steps, callback.throughput.epoch_samples)


@pytest.mark.parametrize("kind", ["sparse", "ragged", "dense"])
def test_samples_of_composite_data_are_unknown(data, kind):
    """The rows of a sparse or ragged batch are not those of its components: samples are None, batches are counted."""
    x, y = data
    given = {
        "sparse": lambda: tf.sparse.from_dense(np.where(x > 0.5, x, 0)),
        "ragged": lambda: tf.RaggedTensor.from_tensor(x),
        "dense": lambda: x,
    }[kind]()

    class Dense(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(1)

        def call(self, x):
            if isinstance(x, tf.SparseTensor):
                x = tf.sparse.to_dense(x)
            elif isinstance(x, tf.RaggedTensor):
                x = x.to_tensor(shape=(None, 4))
            return self.out(tf.reshape(x, (-1, 4)))

    model, callback = Dense(), timer.TimerCallback(timer.Timer())
    model.compile("sgd", "mse")
    batches = tf.data.Dataset.from_tensor_slices((given, y)).batch(8)
    model.fit(batches, callbacks=[callback], verbose=0)
    found = callback.throughput
    assert (5, 40 if kind == "dense" else None) == (found.epoch_steps, found.epoch_samples)
    assert kind == "dense" or found.samples_per_s is None


def test_waits_inside_an_execution_are_not_guessed(data):
    """The waits inside a compiled loop are not timed, and the message says what helps."""
    tmr = timer.Timer()
    with pytest.warns(timer.TimingWarning, match="steps_per_execution=2 .* io=True takes the whole"):
        weights_after(make_model(steps_per_execution=2), data, [timer.TimerCallback(tmr)])
    assert "IO" not in counts(tmr)


def test_xla_is_refused_with_its_remedy(data):
    """A step that XLA compiles is timed as a whole, and the message says how to have its passes."""
    tmr = timer.Timer()
    with pytest.warns(timer.TimingWarning, match="jit_compile=False"):
        weights_after(make_model(jit_compile=True), data, [timer.TimerCallback(tmr, phases=True)])
    found = counts(tmr)
    assert 15 == found["BATCH"]
    assert "FORWARD" not in found


def test_train_function_and_tape_are_the_same_afterwards(data):
    """The function that Keras made is back, never traced, and ``tf.GradientTape`` is as it was."""
    before = tf.GradientTape.gradient
    model = make_model()
    model.make_train_function()
    function = model.train_function
    weights_after(model, data, [timer.TimerCallback(timer.Timer(), phases=True)])
    assert model.train_function is function
    assert before is tf.GradientTape.gradient
    assert not {"train_step", "compute_loss"} & set(vars(model))


def test_step_is_traced_anew_after_compile(data):
    """A model that is compiled again is another training, and its first execution is kept apart again."""
    tmr = timer.Timer()
    model, callback = make_model(), timer.TimerCallback(tmr, phases=True)
    weights_after(model, data, [callback])
    model.compile("sgd", "mae")
    weights_after(model, data, [callback])
    assert 2 == counts(tmr)[FIRST]
    assert_passes(tmr, batches=30)


def test_two_callbacks_with_phases_in_one_fit(data):
    """Both timers get every stamp."""
    timers = [timer.Timer(), timer.Timer()]
    weights_after(make_model(), data, [timer.TimerCallback(tmr, phases=True) for tmr in timers])
    for tmr in timers:
        assert_passes(tmr, batches=15)


@pytest.mark.usefixtures("collects_its_own")
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_stamps_are_not_kept(data, eager):
    """No stamp is kept beyond its epoch, and of the executions the newest alone."""
    alive = []

    class Counts(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            found = [type(found) for found in gc.get_objects()]
            alive.append((found.count(Stamps), found.count(Execution) <= 2))

    model = make_model(run_eagerly=eager)
    with_phases, without = timer.TimerCallback(timer.Timer(), phases=True), timer.TimerCallback(timer.Timer())
    for callbacks in ([with_phases, Counts(), without], [without, Counts(), with_phases], [without, Counts()]):
        weights_after(model, data, callbacks, epochs=2)
    assert [(0, True)] * 6 == alive
    assert 20 == counts(with_phases.timer)["FORWARD"]
    assert "FORWARD" not in counts(without.timer)


def test_fits_in_two_threads(data):
    """Two models that train at once have each their own passes."""
    timers = [timer.Timer(), timer.Timer()]
    models = [make_model(), make_model()]
    threads = [
        threading.Thread(target=weights_after, args=(model, data, [timer.TimerCallback(tmr, phases=True)]))
        for model, tmr in zip(models, timers, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tmr in timers:
        assert_passes(tmr, batches=15)


def test_callbacks_of_keras_read_the_means_from_the_logs(data, tmp_path):
    """CSVLogger writes the means that the prefix put into the logs."""
    callbacks = [
        timer.TimerCallback(timer.Timer(), phases=True, log_prefix="time/"),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
    ]
    weights_after(make_model(), data, callbacks)
    header = (tmp_path / "log.csv").read_text().splitlines()[0].split(",")
    assert {"time/BATCH", "time/FORWARD", "time/BACKWARD", "time/IO", "time/EPOCH"} <= set(header)


def test_data_of_every_kind_passes_the_first_anchor():
    """Strings, ragged and sparse tensors pass as they are; variables and other objects are not touched."""
    variable, ragged = tf.Variable(1.0), tf.ragged.constant([[1, 2], [3]])
    sparse = tf.sparse.from_dense([[0, 5]])

    @tf.function
    def step(words):
        given = {"words": words, "ragged": ragged, "sparse": sparse, "variable": variable, "none": None, "text": "x"}
        passed = StepStamps(tf).data(given)
        assert passed["variable"] is variable
        assert (passed["none"], passed["text"]) == (None, "x")
        return passed["words"], passed["ragged"].to_tensor(), tf.sparse.to_dense(passed["sparse"])

    words, dense, full = step(tf.constant(["a", "b"]))
    assert [b"a", b"b"] == words.numpy().tolist()
    assert [[1, 2], [3, 0]] == dense.numpy().tolist()
    assert [[0, 5]] == full.numpy().tolist()


# --- the ring and the matching of stamps ----------------------------------------------------------------------------


class _Row:
    """Stamps of a graph, given as numbers."""

    def __init__(self, *stamps):
        self._stamps = stamps

    def row(self):
        return tf.constant(self._stamps, tf.float64)


def test_ring_gives_each_row_once_and_counts_those_it_loses():
    """Read rows are not read again; more rows than the ring holds cost the oldest."""
    ring = StampRing(tf, rows=4)
    for number in range(3):
        ring.put(_Row(number, 1, 2))
    rows, lost = ring.read()
    assert ([0, 1, 2], 0) == ([row.data_s for row in rows], lost)
    for number in range(3, 9):
        ring.put(_Row(number, 1, 2))
    rows, lost = ring.read()
    assert ([5, 6, 7, 8], 2) == ([row.data_s for row in rows], lost)
    assert ([], 0) == ring.read()


class _Sink(Regions):
    """The regions of a fit on a clock that stands still."""

    def __init__(self):
        super().__init__(timer.Timer(clock=ManualClock()))


NOW_NS = 1_700_000_000_000_000_000


def _execution(took_ns, steps=1, jump_ns=0):
    made = Execution()
    made.began_ns, made.took_ns, made.steps, made.steady = 5_000, took_ns, steps, True
    made.began_unix_ns = NOW_NS + jump_ns
    made.ended_unix_ns = made.began_unix_ns + took_ns
    return made


def _stamps(*offsets_ns):
    return Stamps(*((NOW_NS + offset) / 1e9 for offset in offsets_ns))


class _Model:
    """A model that trains one batch an execution."""


def _settled(stamps, executions, lost=0):
    """Read stamps that a graph left; gives the timer and the number of batches whose phases failed."""
    sink = _Sink()
    phases = StampedPhases(_Model(), sink)
    phases.ring.drain = lambda: lost
    phases.stamps.extend(stamps)
    for execution in executions:
        phases.executed(execution)
    phases.settle()
    phases.leave()
    return sink.timer, sink.timer.snapshot().get(TimeType.FORWARD).failed


@pytest.mark.parametrize("jump_s", [0, -10, 10])
def test_a_clock_that_is_set_between_two_executions_costs_no_phases(jump_s):
    """Stamps and executions are read from the same clock, and come in the same order."""
    stamps, executions = [], []
    for number in range(20):
        since_ns = number * 11_000_000 + (jump_s * 1_000_000_000 if number >= 5 else 0)
        stamps.append(_stamps(since_ns + 1_000_000, since_ns + 4_000_000, since_ns + 8_000_000))
        executions.append(_execution(10_000_000, jump_ns=since_ns))
    tmr, missing = _settled(stamps, executions)
    assert (20, 0) == (len(tmr.get_time(TimeType.FORWARD)), missing)


def test_lost_stamps_are_counted():
    """Of executions with rows that the ring has lost each batch has failed, and the others are there."""
    stamps = [_stamps(21_000_000, 24_000_000, 28_000_000)]
    executions = [_execution(10_000_000, steps=3), _execution(10_000_000, jump_ns=20_000_000)]
    tmr, missing = _settled(stamps, executions, lost=3)
    assert (1, 3) == (len(tmr.get_time(TimeType.FORWARD)), missing)


def test_stamps_of_somebody_elses_step_are_not_the_executions():
    """A step that another callback runs between two executions is in neither."""
    own, others = (0, 2_000_000, 3_000_000), (5_000_000, 9_000_000, 9_500_000)
    next_ones = (11_000_000, 12_000_000, 13_000_000)
    executions = [_execution(4_000_000), _execution(4_000_000, jump_ns=10_000_000)]
    tmr, missing = _settled([_stamps(*moments) for moments in (own, others, next_ones)], executions)
    assert pytest.approx([0.002, 0.001], abs=1e-6) == tmr.get_time(TimeType.FORWARD)
    assert 0 == missing


def test_stamps_become_intervals_on_the_timers_clock():
    """The lengths are those between the stamps, to the microsecond that the stamps have."""
    sink = _Sink()
    record_phases(sink, _execution(10_000_000), [_stamps(1_000_000, 4_000_000, 9_000_000)])
    assert pytest.approx([0.003], abs=1e-6) == sink.timer.get_time(TimeType.FORWARD)
    assert pytest.approx([0.005], abs=1e-6) == sink.timer.get_time(TimeType.BACKWARD)
    assert pytest.approx(5_000 + 1_000_000, abs=1_000) == sink.timer.intervals(TimeType.FORWARD)[0, 0]


@pytest.mark.parametrize(
    "offsets_ns",
    [(4_000_000, 1_000_000, 9_000_000), (0, 1_000_000, 20_000_000), (-9_000_000, 0, 1)],
    ids=["backwards", "longer than the batch", "before the batch"],
)
def test_stamps_that_contradict_the_batch_are_counted(offsets_ns):
    """A phase that cannot be is not reported: it is counted as failed."""
    sink = _Sink()
    record_phases(sink, _execution(10_000_000), [_stamps(*offsets_ns)])
    for key in (TimeType.FORWARD, TimeType.BACKWARD):
        assert [] == sink.timer.get_time(key)
        assert 1 == sink.timer.snapshot().get(key).failed


@given(st.lists(st.integers(0, 3_000), min_size=3, max_size=24), st.integers(0, 999))
def test_matched_phases_lie_in_their_execution_and_side_by_side(gaps_us, before_ns):
    """Stamps are whole microseconds, read as seconds since 1970: no phase begins before its batch or the last phase."""
    sink = _Sink()
    # A stamp is cut to the microsecond, and the two clocks of the host are read one after the other.
    edges_ns = NOW_NS + 1_000 * np.cumsum([0, *gaps_us])
    batches = [
        Stamps(*(int(edge) / 1e9 for edge in edges_ns[start : start + 3])) for start in range(0, len(edges_ns) - 2, 2)
    ]
    took_ns = int(edges_ns[-1]) - NOW_NS
    record_phases(sink, _execution(took_ns, steps=len(batches), jump_ns=before_ns), batches)
    spans = sorted(
        tuple(span) for key in (TimeType.FORWARD, TimeType.BACKWARD) for span in sink.timer.intervals(key).tolist()
    )
    assert 2 * len(batches) == len(spans)
    assert 5_000 <= spans[0][0]
    assert spans[-1][1] <= 5_000 + took_ns
    for (_, ended_ns), (began_ns, _) in itertools.pairwise(spans):
        assert ended_ns <= began_ns


# --- one's own loop --------------------------------------------------------------------------------------------


def _own_step(variable):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ variable - y) ** 2)
        variable.assign_sub(0.1 * tape.gradient(loss, variable))
        return loss

    return step


@pytest.mark.parametrize("compiled", [True, False])
def test_timed_step(data, compiled):
    """One's own step does the same, and its batches have their passes."""
    results = []
    tmr = timer.Timer()
    for timed in (False, True):
        variable = tf.Variable(tf.ones((4, 1)))
        step = _own_step(variable)
        step = tf.function(step) if compiled else step
        step = timer.timed_step(step, tmr) if timed else step
        for start in range(0, 40, 8):
            step(tf.constant(data[0][start : start + 8]), y=tf.constant(data[1][start : start + 8]))
        results.append(variable.numpy())
    np.testing.assert_array_equal(*results)
    found = counts(tmr)
    assert 5 == found["BATCH"] == found["FORWARD"]
    assert (1 if compiled else 0) == found.get(FIRST, 0)
    assert found["BATCH"] == found["FORWARD"] == found["BACKWARD"]


def test_timed_step_that_raises_is_counted_as_failed():
    """The step's error passes through, and the next call is timed."""
    tmr = timer.Timer()
    step = timer.timed_step(_own_step(tf.Variable(tf.ones((4, 1)))), tmr)
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.ones((2, 3)), tf.ones((2, 1)))
    step(tf.ones((2, 4)), tf.ones((2, 1)))
    assert 1 == tmr.snapshot().get("BATCH").failed
    assert 1 == counts(tmr)["BATCH"]


def test_timed_step_inside_a_tf_function_is_refused():
    """Timed when it is traced, a step would have no times: the error says which way round to wrap."""
    step = timer.timed_step(_own_step(tf.Variable(tf.ones((4, 1)))), timer.Timer())
    with pytest.raises(timer.TimingError, match=r"Pass the\s+tf\.function to timed_step"):
        tf.function(step)(tf.ones((2, 4)), tf.ones((2, 1)))


def test_timed_step_under_xla_times_the_batch():
    """XLA takes no stamps: BATCH is timed, and the message says how to have the passes."""
    tmr = timer.Timer()
    with pytest.warns(timer.TimingWarning, match="jit_compile=False"):
        step = timer.timed_step(tf.function(lambda x: x + 1, jit_compile=True), tmr)
    assert 2 == step(tf.constant(1)).numpy()
    assert {"BATCH": 1} == counts(tmr)


@pytest.mark.parametrize(
    ("args", "kwargs", "says"), [((None, timer.Timer()), {}, "pass a function"), ((len, None), {}, "pass the timer")]
)
def test_wrong_arguments_of_timed_step(args, kwargs, says):
    """Arguments that cannot be meant are an error where they are written."""
    with pytest.raises(TypeError, match=says):
        timer.timed_step(*args, **kwargs)


@pytest.fixture
def op_determinism():
    """Every operation of this process is deterministic, for this case alone."""
    tf.config.experimental.enable_op_determinism()
    yield
    # TensorFlow can switch it off, but does not offer that to users.
    from tensorflow.python.framework import config

    config.disable_op_determinism()


@pytest.mark.usefixtures("op_determinism")
def test_op_determinism_is_refused_with_its_remedy(data):
    """Determinism forbids reading the clock in a graph, and the message says what helps."""
    tmr = timer.Timer()
    with pytest.warns(timer.TimingWarning, match="enable_op_determinism"):
        weights_after(make_model(), data, [timer.TimerCallback(tmr, phases=True)])
    assert "FORWARD" not in counts(tmr)
    assert 15 == counts(tmr)["BATCH"]


def test_a_data_set_found_dead_in_a_trace_adds_nothing_to_the_graph():
    """The sums of a data set that the collector frees while the user's model is traced are let go of later."""
    operations = []

    @tf.function
    def traced(value):
        dataset = TimedDataset(tf.data.Dataset.range(3))
        dataset.itself = dataset
        del dataset
        before = len(tf.compat.v1.get_default_graph().get_operations())
        gc.collect()
        operations.append(len(tf.compat.v1.get_default_graph().get_operations()) - before)
        return value

    traced(tf.constant(1.0))
    assert [0] == operations
    assert 0 < len(_data._unused)
    dataset = TimedDataset(tf.data.Dataset.range(3))
    assert 0 == len(_data._unused)
    assert [0, 1, 2] == [int(number) for number in dataset]


@pytest.mark.usefixtures("no_collector")
def test_iterators_are_held_by_keras_alone(data):
    """No reference of ours keeps what fetches the data: it goes where and when it goes without the callback."""
    references, iterators = [], []

    class Looks(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            frame = sys._getframe()
            while frame.f_code.co_name != "fit":
                frame = frame.f_back
            iterator = frame.f_locals["epoch_iterator"]._current_iterator
            references.append(sys.getrefcount(iterator))
            iterators.append(weakref.ref(iterator))

    for mode in (None, {}, {"io": False}, {"phases": True}):
        callbacks = [] if mode is None else [timer.TimerCallback(timer.Timer(), **mode)]
        make_model().fit(*data, batch_size=8, callbacks=[*callbacks, Looks()], verbose=0)
        assert iterators[-1]() is None
    assert references[:1] * 4 == references


def test_what_parts_of_the_pipeline_add_up_is_not_read():
    """Buffers, threads and the like have sums as well, which would cost each batch more than its wait does."""
    timed = TimedDataset(tf.data.Dataset.range(9).map(lambda n: n + 1, num_parallel_calls=2).batch(3).prefetch(2))
    assert 3 == len(list(timed))
    summary = tf.compat.v1.Summary.FromString(timed.sums._read().numpy())
    assert ["bytes/0", "wait/0"] == sorted(value.tag for value in summary.value)
    assert (3, 9 * 8) == (timed.sums.fetched().batches, timed.sums.fetched().size)


@pytest.fixture
def sums_of_bytes(monkeypatch):
    """The calls for sums of bytes: TensorFlow logs an error of its own at each."""
    made, original = [], tf.raw_ops.BytesProducedStatsDataset
    monkeypatch.setattr(tf.raw_ops, "BytesProducedStatsDataset", lambda **given: made.append(1) or original(**given))
    return made


@pytest.mark.parametrize(
    ("rows", "steps", "epochs", "samples"),
    [(40, None, 1, 40), (37, None, 2, 37), (37, 3, 1, 24), (37, 3, 2, 13), (5, None, 1, 5)],
)
def test_rows_of_arrays_are_known_without_a_sum_of_bytes(rows, steps, epochs, samples, data, sums_of_bytes):
    """The rows of the newest epoch, with a batch that is smaller, and where an epoch ends within the arrays."""
    x, y = (part[:rows] for part in data)
    callback = timer.TimerCallback(timer.Timer())
    make_model().fit(x, y, batch_size=8, steps_per_epoch=steps, epochs=epochs, callbacks=[callback], verbose=0)
    assert samples == callback.throughput.epoch_samples
    assert [] == sums_of_bytes


@pytest.mark.parametrize(("whole", "counts", "samples"), [(True, True, 32), (False, True, 37), (False, False, None)])
def test_bytes_are_added_up_where_rows_are_not_known_and_are_asked_for(whole, counts, samples, data, sums_of_bytes):
    """Batches of one known size, of a size that may change, and of such a size where nobody asks."""
    given = tf.data.Dataset.from_tensor_slices(tuple(part[:37] for part in data)).batch(8, drop_remainder=whole)
    callback = timer.TimerCallback(timer.Timer())
    callback._options.counts_samples = counts
    make_model().fit(given, callbacks=[callback], verbose=0)
    assert samples == callback.throughput.epoch_samples
    assert (not whole and counts) == bool(sums_of_bytes)
    assert 5 - whole == callback.timer.snapshot().get("IO").stats.count


def test_sums_go_on_when_tensorflow_forgets_what_it_keeps():
    """A seed empties TensorFlow's caches: an iterator adds up as before, and so does one that is made afterwards."""
    timed = TimedDataset(tf.data.Dataset.range(9).batch(3))
    begun = iter(timed)
    next(begun)
    keras.utils.set_random_seed(7)
    assert 2 == len(list(begun))
    assert (3, 9 * 8) == (timed.sums.fetched().batches, timed.sums.fetched().size)
    assert 3 == len(list(timed))
    assert (6, 2 * 9 * 8) == (timed.sums.fetched().batches, timed.sums.fetched().size)


def test_a_pipeline_is_optimized_below_the_sums():
    """What tf.data makes of the parts of a pipeline is as without sums: it takes one part for a map and a batch."""
    timed = TimedDataset(tf.data.Dataset.range(9).map(lambda n: n + 1, num_parallel_calls=2).batch(3))
    assert 3 == len(list(timed))
    of_parts = tf.raw_ops.StatsAggregatorHandle(shared_name="deep500_timing_unread")
    summary = timed.sums._parse(tf.raw_ops.StatsAggregatorSummary(iterator=of_parts).numpy())
    assert "MapAndBatchDataset::thread_utilization" in {value.tag for value in summary.value}
