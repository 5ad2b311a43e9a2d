"""Cases that hold on each backend of Keras 3; ``test_keras.py`` runs them."""

from __future__ import annotations

import copy
import functools
import pickle
import re
import threading

import keras
import numpy as np
import pytest
from clocks import Takes, TickingClock, made_data

import deep500_timing_tensorflow as timer
from deep500_timing.devices import lazy_device
from deep500_timing.testing import ManualClock, ManualDeviceClock
from deep500_timing_tensorflow import TimeType

FIRST = "compile"
HOOKS = [
    "on_train_begin",
    "on_epoch_begin",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_begin",
    "on_test_batch_begin",
    "on_test_batch_end",
    "on_test_end",
    "on_epoch_end",
    "on_train_end",
]


def make_model(model_class=keras.Sequential, **compiling):
    """A model of two layers, the same each time; by SGD, which is traced in a fraction of Adam's time."""
    keras.utils.set_random_seed(7)
    model = model_class([keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
    model.compile(**{"optimizer": "sgd", "loss": "mse", **compiling})
    return model


@functools.cache
def trained_model():
    """The model of those cases for which it need not be new: its step is traced once for all of them."""
    return make_model()


@functools.cache
def fitted_without(run):
    """The result of ``run(callbacks)`` without any: once, for all fits that are compared with it."""
    return run([])


def assert_same_weights(expected, actual):
    """To the bit."""
    for without, with_callback in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(without, with_callback)


def counts(tmr):
    """How often each region was timed on the CPU, and that none is left open."""
    snapshot = tmr.snapshot()
    assert [] == [region.name for region in snapshot if region.running]
    return {
        region.name: region.stats.count for region in snapshot if region.device == "CPU" and region.stats is not None
    }


def batches(tmr):
    """How many batches were timed, those that traced included."""
    return counts(tmr).get("BATCH", 0)


def failed(tmr):
    """The names of the regions that were broken off."""
    return {region.name for region in tmr.snapshot() if region.failed and region.device == "CPU"}


def assert_untouched(model):
    """Nothing of the callback is on the model or its optimizer."""
    assert set() == {"train_step", "compute_loss"} & set(vars(model))
    assert "apply" not in vars(model.optimizer)
    assert type(model.train_function).__module__.partition(".")[0] != "deep500_timing_tensorflow"


class Raising(keras.callbacks.Callback):
    """Raises in one hook, the first time."""

    def __init__(self, hook, error):
        super().__init__()

        def raises(*args, **kwargs):
            delattr(self, hook)
            raise error

        setattr(self, hook, raises)


def test_fit_is_timed_by_region(data, backend):
    """A fit, its epochs, its batches, its waits and its validations are counted as often as they were."""
    tmr = timer.Timer()
    model = make_model()
    model.fit(*data, batch_size=8, epochs=3, validation_data=data, callbacks=[timer.TimerCallback(tmr)], verbose=0)
    found = counts(tmr)
    assert (1, 3, 3, 15) == (found["FIT"], found["EPOCH"], found["VALIDATION"], found["IO"])
    assert 15 == batches(tmr)
    assert (0 if backend == "torch" else 1) <= found.get(FIRST, 0)
    assert "TEST" not in found
    assert set() == failed(tmr)
    assert_untouched(model)


def test_smaller_last_batch_that_traces_again(data, backend):
    """JAX compiles for each shape of batch, and those executions are in compile too; the others do not trace again."""
    tmr = timer.Timer()
    make_model().fit(*data, batch_size=16, epochs=2, callbacks=[timer.TimerCallback(tmr)], verbose=0)
    assert {"tensorflow": 1, "torch": 0, "jax": 2}[backend] == counts(tmr).get(FIRST, 0)
    assert 6 == batches(tmr)


@pytest.mark.parametrize(("error", "order"), [(ValueError("broken"), "before"), (KeyboardInterrupt(), "after")])
@pytest.mark.parametrize("hook", HOOKS)
def test_fit_broken_off_in_a_hook(fed, hook, error, order):
    """After an exception in any hook the model is as before, and the next fit with the callback is timed in full."""
    tmr = timer.Timer()
    model, callback = make_model(run_eagerly=True), timer.TimerCallback(tmr)
    raising = Raising(hook, error)
    both = [raising, callback] if order == "before" else [callback, raising]
    with pytest.raises(type(error)) as raised:
        model.fit(**fed(20, validated=True), callbacks=both, verbose=0)
    broken = failed_after_attach(callback, model, tmr)  # Though the traceback keeps the frame of the fit.
    counted, trained = counts(tmr), batches(tmr)
    del raised
    if (order, hook) not in {("before", "on_train_begin"), ("after", "on_train_end")}:
        assert "FIT" in broken
    model.fit(**fed(20, validated=True), callbacks=[callback], verbose=0)
    after = counts(tmr)
    assert 2 == batches(tmr) - trained
    for region, times in {"FIT": 1, "EPOCH": 1, "VALIDATION": 1, "IO": 2}.items():
        assert times == after[region] - counted.get(region, 0), region
    assert_untouched(model)


def failed_after_attach(callback, model, tmr):
    """The regions of an aborted fit, which are closed when the callback is next given a model."""
    callback.set_model(model)
    assert_untouched(model)
    return failed(tmr)


@pytest.mark.parametrize("phases", [False, True])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=["exception", "Ctrl-C"])
def test_fit_broken_off_inside_a_batch(fed, backend, error, phases):
    """An exception of the model's own code passes through; at the callback's next use all open regions have failed."""

    class Layer(keras.layers.Layer):
        armed = False

        def call(self, x):
            if Layer.armed:
                raise error("bad sample")
            return x

    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1), Layer()])
    model.compile("sgd", "mse", run_eagerly=True)
    tmr = timer.Timer()
    callback = timer.TimerCallback(tmr, phases=phases and backend != "jax")

    class Arm(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            Layer.armed = batch == 2

    with pytest.raises(error) as raised:
        model.fit(**fed(8), callbacks=[callback, Arm()], verbose=0)
    assert {"FIT", "EPOCH", "BATCH"} <= {region.name for region in tmr.snapshot() if region.running}
    assert {"FIT", "EPOCH", "BATCH"} <= failed_after_attach(callback, model, tmr)
    assert error is raised.type
    assert (2, 3) == (batches(tmr), counts(tmr)["IO"])  # The batch that failed was waited for.
    assert_untouched(model)
    Layer.armed = False
    model.fit(**fed(8), callbacks=[callback], verbose=0)
    assert 7 == batches(tmr)


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_evaluation_that_raises_is_not_running(data, call):
    """An evaluation or a prediction that raised has failed at the callback's next use."""
    tmr = timer.Timer()
    model, callback = make_model(), timer.TimerCallback(tmr)  # Keras leaves one without its variables on JAX.
    raising = Raising({"evaluate": "on_test_batch_end", "predict": "on_predict_batch_end"}[call], ValueError("broken"))
    given = {"evaluate": data, "predict": data[:1]}[call]
    with pytest.raises(ValueError, match="broken") as raised:
        getattr(model, call)(*given, callbacks=[callback, raising], verbose=0)
    assert {{"evaluate": "TEST", "predict": "PREDICT"}[call]} == failed_after_attach(callback, model, tmr)
    assert {} == counts(tmr)
    assert raised.tb is not None


def test_looking_at_the_times_in_a_fit_ends_nothing(fed):
    """A reader in a hook, in a fit inside a fit or on another thread finds what is open running, and it goes on."""
    running = []

    def look():
        running.append({region.name for region in tmr.snapshot() if region.running})

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
            look()

    tmr = timer.Timer()
    trained_model().fit(**fed(20), callbacks=[timer.TimerCallback(tmr), Looks()], verbose=0)
    assert [{"FIT", "EPOCH", "CALLBACKS"}] * 4 == running
    assert (1, 1, 2) == (counts(tmr)["FIT"], counts(tmr)["EPOCH"], batches(tmr))
    assert set() == failed(tmr)


def test_stop_training_is_an_ordinary_end(fed):
    """A callback that stops training leaves nothing open and nothing failed."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    tmr = timer.Timer()
    trained_model().fit(**fed(8), epochs=3, callbacks=[Stop(), timer.TimerCallback(tmr)], verbose=0)
    assert 2 == batches(tmr)
    assert set() == failed(tmr)
    assert 1 == counts(tmr)["EPOCH"]


@pytest.mark.parametrize("length", ["known", "unknown"])
def test_several_steps_per_execution(data, backend, length):
    """Each batch is counted, also in an execution that the end of the data cuts short; an execution is one interval."""
    if backend == "torch":
        pytest.skip("Keras has one step per execution on torch")

    def generate():
        for start in range(0, 40, 8):
            yield data[0][start : start + 8], data[1][start : start + 8]

    tmr = timer.Timer()
    model = make_model(steps_per_execution=2)
    callback = timer.TimerCallback(tmr, io=True)
    if length == "known":
        model.fit(*data, batch_size=8, epochs=2, callbacks=[callback], verbose=0)
    else:
        for _ in range(2):
            model.fit(generate(), callbacks=[callback], verbose=0)
    assert 10 == callback.batches
    assert 6 == batches(tmr)  # Executions: of two batches, two, and one.
    assert (6 if backend == "tensorflow" else 10) == counts(tmr)["IO"]
    assert_untouched(model)


def test_epoch_means_go_into_the_logs(data):
    """With a prefix, the epoch's means and rates are in the history next to the losses."""
    clock = TickingClock()
    tmr = timer.Timer(clock=clock)
    callbacks = [timer.TimerCallback(tmr, log_prefix="time/"), Takes("on_train_batch_end", clock, 1.0)]
    made = trained_model().fit(*data, batch_size=8, epochs=2, validation_data=data, callbacks=callbacks, verbose=0)
    for key in ("IO", "BATCH", "EPOCH", "VALIDATION", "steps_per_s", "samples_per_s"):
        assert 2 == len(made.history[f"time/{key}"])
        assert all(value > 0 for value in made.history[f"time/{key}"])
    assert all(re.fullmatch(r"[A-Za-z0-9_./-]+", name) for name in made.history)
    assert pytest.approx(tmr.get_time(TimeType.EPOCH), rel=1e-4) == made.history["time/EPOCH"]


def test_the_epoch_that_ends_has_ended_for_other_hooks(fed):
    """A hook that reports at the end of an epoch has the times of that epoch, the last one too, and not its own."""
    told = []

    class Reports(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            told.append(len(tmr.get_time(TimeType.EPOCH)))

    tmr = timer.Timer()
    trained_model().fit(**fed(8), epochs=3, callbacks=[Reports(), timer.TimerCallback(tmr)], verbose=0)
    assert [1, 2, 3] == told


@pytest.mark.parametrize("phases", [False, True])
def test_weights_are_the_same_to_the_bit(backend, phases):
    """Three epochs with the callback leave the weights that three epochs without it leave."""
    callback = timer.TimerCallback(timer.Timer(), phases=phases and backend != "jax")
    assert_same_weights(fitted_without(weights_of_adam), weights_of_adam([callback]))


def weights_of_adam(callbacks):
    """The weights and the optimizer's state after three epochs by Adam."""
    model, data = make_model(optimizer="adam"), made_data()
    model.fit(*data, batch_size=8, epochs=3, validation_data=data, callbacks=callbacks, verbose=0)
    return [*model.get_weights(), *(np.asarray(v) for v in model.optimizer.variables)]


def test_batches_are_timed_on_the_device(data):
    """With ``gpu=True`` each batch is timed on both, and what did not exist is not left on the device."""
    clock = ManualDeviceClock()
    tmr = timer.CPUGPUTimer(device_clock=clock)
    make_model().fit(*data, batch_size=8, epochs=2, callbacks=[timer.TimerCallback(tmr, gpu=True)], verbose=0)
    assert len(tmr.get_time("BATCH")) == len(tmr.get_time("BATCH", gpu=True))
    assert 10 == batches(tmr)


def test_executions_of_several_steps_are_timed_on_the_device(data, backend):
    """An execution is one interval on both, and the batches in it are counted."""
    if backend == "torch":
        pytest.skip("Keras has one step per execution on torch")
    tmr = timer.CPUGPUTimer(device_clock=ManualDeviceClock())
    callback = timer.TimerCallback(tmr, gpu=True, io=False)
    make_model(steps_per_execution=2).fit(*data, batch_size=8, epochs=2, callbacks=[callback], verbose=0)
    assert [6, 6] == [len(tmr.get_time("BATCH", gpu=gpu)) for gpu in (False, True)]
    assert 10 == callback.batches


def test_gpu_without_a_gpu_times_the_cpu(fed):
    """The contract's callback works where there is no GPU: one message, CPU times."""
    tmr = timer.CPUGPUTimer()
    with pytest.warns(timer.TimingWarning, match="No GPU times, CPU times go on"):
        trained_model().fit(**fed(8), callbacks=[timer.TimerCallback(tmr, gpu=True)], verbose=0)
    assert 5 == batches(tmr)
    assert [] == tmr.get_time(TimeType.BATCH, gpu=True)


def test_the_look_for_a_gpu_is_no_part_of_the_fit(fed):
    """It may take seconds, and would be the user's CALLBACKS."""
    clock = ManualClock()
    tmr = timer.CPUGPUTimer(device_clock=lazy_device(lambda: clock.advance(5) or "There is no driver."), clock=clock)
    with pytest.warns(timer.TimingWarning, match="There is no driver"):
        trained_model().fit(**fed(8), callbacks=[timer.TimerCallback(tmr, gpu=True)], verbose=0)
    assert [0, 0] == [tmr.get_time_stats(name).total for name in ("FIT", "CALLBACKS")]


def test_events_that_keras_does_not_order_are_not_times(fed, backend):
    """CuPy's events say nothing of what runs on torch or JAX: no GPU times, and the message says what to pass."""
    if backend == "tensorflow":
        pytest.skip("on TensorFlow they are ordered, by waiting for it")
    pytest.importorskip("cupy")
    tmr = timer.CPUGPUTimer(device_clock=timer.CupyEventClock())
    with pytest.warns(timer.TimingWarning, match=f"through {backend}, so no GPU times"):
        trained_model().fit(**fed(8), callbacks=[timer.TimerCallback(tmr, gpu=True)], verbose=0)
    assert 5 == batches(tmr)
    assert [] == [region.name for region in tmr.snapshot() if region.device == "GPU"]


def test_faulty_device_does_not_break_the_fit(fed):
    """A device that fails costs one warning and its times."""
    clock = ManualDeviceClock()
    clock.fail("record", RuntimeError("device lost"))
    tmr = timer.CPUGPUTimer(device_clock=clock)
    with pytest.warns(timer.TimingWarning, match="device lost"):
        trained_model().fit(**fed(8), callbacks=[timer.TimerCallback(tmr, gpu=True)], verbose=0)
    assert 5 == batches(tmr)


def test_fault_in_timing_does_not_break_the_fit(fed):
    """A timer that fails is said once, and the fit comes to its end."""

    class Faulty(timer.Timer):
        def record(self, key, start_ns, end_ns):
            raise RuntimeError("no room")

    with pytest.warns(timer.TimingWarning, match=r"TimerCallback failed in .* no room") as said:
        made = trained_model().fit(**fed(8), epochs=2, callbacks=[timer.TimerCallback(Faulty())], verbose=0)
    assert 1 == len([warning for warning in said if "on_train_batch_begin" in str(warning.message)])
    assert 2 == len(made.history["loss"])


@pytest.mark.parametrize(("key", "epochs", "times"), [(TimeType.EPOCH, 3, 10), (TimeType.BATCH, 2, 11)])
def test_region_that_the_user_holds_open(fed, key, epochs, times):
    """A region that is open already is no fault: the fit's are recorded inside it."""
    tmr = timer.Timer()
    with tmr.region(key):
        trained_model().fit(**fed(8), epochs=2, callbacks=[timer.TimerCallback(tmr)], verbose=0)
    assert (1, epochs, times) == (counts(tmr)["FIT"], counts(tmr)["EPOCH"], batches(tmr))


def test_disabled_timer_records_nothing(fed):
    """A timer that is switched off leaves a fit alone."""
    tmr = timer.Timer(enabled=False)
    trained_model().fit(**fed(8), callbacks=[timer.TimerCallback(tmr)], verbose=0)
    assert {} == counts(tmr)


def test_copies_share_the_timer(fed):
    """KerasTuner copies callbacks: each copy times its own fits into the one timer."""
    tmr = timer.Timer()
    original = timer.TimerCallback(tmr, log_prefix="t/")
    copied = copy.deepcopy(original)
    assert copied.timer is tmr
    for callback in (original, copied):
        made = trained_model().fit(**fed(8), callbacks=[callback], verbose=0)
        assert "t/BATCH" in made.history
    assert 10 == batches(tmr)


class Labelled(timer.TimerCallback):
    """One with arguments and attributes added."""

    def __init__(self, label, tmr):
        super().__init__(tmr, io=False)
        self.seen = [label]

    def on_epoch_end(self, epoch, logs=None):
        """One more."""
        self.seen.append(epoch)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))])
def test_subclass_is_copied_with_what_is_its_own(fed, copied):
    """A copy of a user's own kind needs none of its arguments, has its attributes, and leaves the original alone."""
    original = Labelled("mine", timer.Timer())
    trained_model().fit(**fed(20), callbacks=[original], verbose=0)
    callback = copied(original)
    trained_model().fit(**fed(20), callbacks=[callback], verbose=0)
    assert (["mine", 0], ["mine", 0, 0]) == (original.seen, callback.seen)
    assert (2, 2) == (original.batches, callback.batches)
    assert "IO" not in counts(callback.timer)


def test_pickled_callback_keeps_its_settings(fed):
    """A callback that is sent to another process times there into an empty timer."""
    callback = pickle.loads(pickle.dumps(timer.TimerCallback(timer.Timer(), log_prefix="t/")))
    assert "t/BATCH" in trained_model().fit(**fed(8), callbacks=[callback], verbose=0).history


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "says"),
    [
        (("tmr",), {}, TypeError, "pass the timer that keeps the times"),
        ((timer.Timer(),), {"io": "sometimes"}, ValueError, "pass 'auto', True or False"),
    ],
)
def test_wrong_arguments_are_refused_at_once(args, kwargs, error, says):
    """Arguments that cannot be meant are an error where they are written."""
    with pytest.raises(error, match=says):
        timer.TimerCallback(*args, **kwargs)


def test_phases(data, backend):
    """FORWARD and BACKWARD are there for each batch where the backend lets them be seen; JAX says why it does not."""
    tmr = timer.Timer()
    callback = timer.TimerCallback(tmr, phases=True)
    model = make_model()
    if backend == "jax":
        with pytest.warns(timer.TimingWarning, match="On JAX both passes are one compiled computation"):
            model.fit(*data, batch_size=8, epochs=2, callbacks=[callback], verbose=0)
        assert "FORWARD" not in counts(tmr)
    else:
        model.fit(*data, batch_size=8, epochs=2, callbacks=[callback], verbose=0)
        found = counts(tmr)
        for key in ("FORWARD", "BACKWARD"):
            if backend == "torch":  # Whether a step has passes is known after its first execution.
                assert found["BATCH"] - 1 == found[key]
            else:
                assert found["BATCH"] == found[key]
        assert not failed(tmr)
        inside = sum(tmr.get_time(TimeType.FORWARD)) + sum(tmr.get_time(TimeType.BACKWARD))
        assert inside <= sum(tmr.get_time(TimeType.BATCH))
    assert 10 == batches(tmr)
    assert_untouched(model)
