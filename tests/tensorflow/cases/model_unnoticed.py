"""Cases of a model that must not notice that it is timed, on each backend of Keras 3; ``test_keras.py`` runs them."""

from __future__ import annotations

import functools
import gc
import importlib
import random

import keras
import pytest
from clocks import made_data
from every_backend import (
    assert_same_weights,
    assert_untouched,
    batches,
    counts,
    failed,
    fitted_without,
    make_model,
    trained_model,
)
from own_steps import OwnLoss, traced

import deep500_timing_tensorflow as timer

MODES = [{}, {"phases": True}]


@pytest.fixture(params=MODES, ids=["default", "phases"])
def mode(request, backend):
    """The callback's options."""
    if request.param.get("phases") and backend == "jax":
        pytest.skip("no phases on JAX")
    return request.param


@pytest.fixture
def callback(mode):
    """One, on its own timer."""
    return timer.TimerCallback(timer.Timer(), **mode)


def weights_of_a_replaced_loss(callbacks):
    """What two fits lead to, between which the user puts a method in the place of the model's."""
    model, data = make_model(), made_data()
    model.fit(*data, batch_size=8, callbacks=callbacks, verbose=0)
    own = model.compute_loss
    model.compute_loss = lambda *args, **kwargs: 100 * own(*args, **kwargs)
    model.compile("sgd", "mse")
    model.fit(*data, batch_size=8, callbacks=callbacks, verbose=0)
    return model.get_weights()


def test_replaced_loss_is_what_trains(callback):
    """A method that the user replaces between two fits trains, as it does without the callback."""
    assert_same_weights(fitted_without(weights_of_a_replaced_loss), weights_of_a_replaced_loss([callback]))


def traces(rows, callbacks):
    """How often the step is traced in a fit, in the next without callbacks, and in one more with them."""
    x, y = made_data()
    model = make_model(model_class=OwnLoss)
    numbers = []
    for fit_callbacks in (callbacks, [], callbacks):
        model.fit(x[:rows], y[:rows], batch_size=8, epochs=2, callbacks=fit_callbacks, verbose=0)
        numbers.append(traced(model))
    return numbers


# The last batch is as large as the others, and smaller.
TRACES = {rows: functools.partial(traces, rows) for rows in (40, 37)}


@pytest.mark.parametrize("rows", TRACES)
def test_traces_are_those_of_a_fit_without_the_callback(callback, rows):
    """Steps are traced as often with the callback as without it, in its fit and in the next without it."""
    assert fitted_without(TRACES[rows]) == TRACES[rows]([callback])


def history_of_several_outputs(callbacks):
    """The history of a fit with a smaller last batch."""
    keras.utils.set_random_seed(7)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, [keras.layers.Dense(1, name="a")(inputs), keras.layers.Dense(1, name="b")(inputs)])
    model.compile("sgd", {"a": "mse", "b": "mae"})
    x, y = (array[:37] for array in made_data())
    made = model.fit(x, {"a": y, "b": y}, batch_size=8, epochs=2, callbacks=callbacks, shuffle=False, verbose=0)
    return made.history


def test_history_of_several_outputs(callback):
    """The loss of each output is weighed as without the callback when the last batch is smaller."""
    expected = fitted_without(history_of_several_outputs)
    assert {"loss", "a_loss", "b_loss"} == set(expected)
    assert expected == history_of_several_outputs([callback])


class InHook(keras.callbacks.Callback):
    """Does something in a hook, the third time."""

    def __init__(self, hook, act):
        super().__init__()
        times = iter(range(1000))
        setattr(self, hook, lambda *args, **kwargs: act(self.model) if next(times) == 2 else None)


@pytest.mark.parametrize(
    ("hook", "error"), [("on_train_batch_begin", RuntimeError), ("on_train_batch_end", KeyboardInterrupt)]
)
def test_nothing_is_left_after_another_callback_raised(data, mode, hook, error):
    """After an exception in another hook the model is its own, and a later fit without the callback counts nothing."""

    def breaks(model):
        raise error("broken")

    tmr = timer.Timer()
    model = make_model()
    with pytest.raises(error):
        model.fit(*data, batch_size=8, callbacks=[timer.TimerCallback(tmr, **mode), InHook(hook, breaks)], verbose=0)
    assert_untouched(model)
    timer.TimerCallback(timer.Timer()).set_model(model)
    before = tmr.snapshot()
    model.fit(*data, batch_size=8, verbose=0)
    assert [(region.name, region.stats) for region in before] == [
        (region.name, region.stats) for region in tmr.snapshot()
    ]
    assert {"FIT", "EPOCH"} <= failed(tmr)


class Trains(keras.callbacks.Callback):
    """Trains on its own batch before each of the fit's."""

    def on_train_batch_begin(self, batch, logs=None):
        """Train."""
        self.model.train_on_batch(*(array[:3] for array in made_data()))


def weights_trained_by_another(callbacks, *, order="behind"):
    """The result of a fit in which another callback trains."""
    model, data = make_model(), made_data()
    callbacks = [*callbacks, Trains()] if order == "behind" else [Trains(), *callbacks]
    model.fit(*data, batch_size=8, epochs=2, callbacks=callbacks, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize("order", ["in front", "behind"])
def test_training_by_another_callback_is_not_the_fits(backend, mode, callback, order):
    """What another callback trains in its hook has no part in the fit's batches, samples, waits or passes."""
    if backend == "jax":
        pytest.skip("train_on_batch inside a fit fails on JAX, whose state the fit holds")
    trained = weights_trained_by_another([callback], order=order)
    assert_same_weights(fitted_without(weights_trained_by_another), trained)
    found = counts(callback.timer)
    assert (10, 10) == (batches(callback.timer), callback.batches)
    assert 10 == found["IO"]
    assert 40 == callback.throughput.epoch_samples
    if mode.get("phases"):
        assert 9 <= found["FORWARD"] <= 10
        assert not failed(callback.timer)


def break_off_a_fit(data, tmr):
    """A fit with phases that raises in its third batch, and with a list of callbacks left to the collector."""

    def breaks(model):
        raise RuntimeError("broken")

    callbacks = [timer.TimerCallback(tmr, phases=True), InHook("on_train_batch_begin", breaks)]
    try:
        make_model().fit(*data, batch_size=8, callbacks=callbacks, verbose=0)
    except RuntimeError as error:
        error.itself = error


class _NotedLock:
    """A lock that notes that it was taken."""

    def __init__(self, taken):
        self._taken = taken

    def __enter__(self):
        self._taken.append(self)

    def __exit__(self, *error):
        pass


WATCHED = {
    "tensorflow": ["_phases._WATCHED_STEPS", "_phases.WATCHED_TAPES"],
    "torch": ["_phases_torch._WATCHED_GRADIENTS"],
}


@pytest.mark.usefixtures("collects_its_own", "no_collector")
def test_a_fit_found_dead_takes_no_lock(data, backend, monkeypatch):
    """The collector may run while a lock is held: watched objects are released when a callback is next used."""
    if backend == "jax":
        pytest.skip("no phases on JAX")
    named = [name.split(".") for name in WATCHED[backend]]
    watched = [getattr(importlib.import_module(f"deep500_timing_tensorflow.{home}"), name) for home, name in named]
    tmr = timer.Timer()
    break_off_a_fit(data, tmr)
    taken = []
    for watch in watched:
        monkeypatch.setattr(watch, "_lock", _NotedLock(taken))
    gc.collect()
    assert [] == taken
    trained_model().fit(*data, batch_size=8, callbacks=[timer.TimerCallback(timer.Timer())], verbose=0)
    assert {"FIT", "EPOCH"} <= failed(tmr)
    assert not any(watch._users for watch in watched)


@pytest.mark.usefixtures("collects_its_own", "no_collector")
def test_a_fit_found_dead_in_another_takes_nothing_from_it(data, backend):
    """The rest of an earlier fit may be collected before a later one's step is traced, which has all its passes."""
    if backend == "jax":
        pytest.skip("no phases on JAX")
    broken, tmr = timer.Timer(), timer.Timer()
    break_off_a_fit(data, broken)
    model = make_model()
    model.make_train_function()
    train = model.train_function

    def collects(iterator):
        gc.collect()
        return train(iterator)

    model.train_function = collects
    callback = timer.TimerCallback(tmr, phases=True)
    model.fit(*data, batch_size=8, callbacks=[callback], verbose=0)
    assert {"FIT", "EPOCH"} <= failed(broken)
    found = counts(tmr)
    assert (4 if backend == "torch" else 5) == found["FORWARD"]


def test_train_function_made_anew_by_another_callback(data, mode):
    """A train function that is made again in a hook is the one that is timed from there on."""
    tmr = timer.Timer()
    callback = timer.TimerCallback(tmr, **mode)
    anew = InHook("on_train_batch_begin", lambda model: model.make_train_function(force=True))
    make_model().fit(*data, batch_size=8, epochs=2, callbacks=[callback, anew], verbose=0)
    assert 10 == batches(tmr)
    if mode.get("io", True):
        assert 10 == counts(tmr)["IO"]
    assert not failed(tmr)


def state_after(callbacks):
    """Random state, attributes and layers after a fit."""
    keras.utils.clear_session()  # Keras 3.7 draws on from its generator of before, with any seed.
    model = make_model()
    model.fit(*made_data(), batch_size=8, epochs=2, callbacks=callbacks, verbose=0)
    layers = [layer["class_name"] for layer in model.get_config()["layers"]]
    return random.random(), keras.random.uniform((1,)).__array__()[0], set(vars(model)), layers


def test_state_is_the_same(callback):
    """Random state, attributes and the saved configuration are those of a model that was not timed."""
    assert fitted_without(state_after) == state_after([callback])


def test_two_callbacks_have_each_what_they_asked_for(data, backend):
    """One with phases and one without, one with IO and one without: neither has the other's."""
    timers = [timer.Timer(), timer.Timer()]
    phases = backend != "jax"
    callbacks = [timer.TimerCallback(timers[0], phases=phases), timer.TimerCallback(timers[1], io=False)]
    model = make_model(model_class=OwnLoss)
    model.fit(*data, batch_size=8, epochs=2, callbacks=callbacks, verbose=0)
    without = make_model(model_class=OwnLoss)
    without.fit(*data, batch_size=8, epochs=2, verbose=0)
    assert traced(without) == traced(model)
    assert phases == ("FORWARD" in counts(timers[0]))
    assert 10 == counts(timers[0])["IO"]
    assert not {"IO", "FORWARD"} & set(counts(timers[1]))
