"""How true the times of ``TimerCallback`` are: models whose layers, and data whose generator, sleep for known times.

``make accuracy`` takes the rows from here; ``python benchmarks/accuracy_keras.py`` prints them. Each backend runs in a
separate process, as Keras chooses one when it is imported.

The truth is read off the clock by the work itself. A layer's forward and backward sleep as long as they did. The
wait for a batch lasts from the moment that Keras calls a callback that stands by, or inside an execution of several
steps from the end of the backward sleep before it, to the moment that the generator hands it over. An eager step spends
milliseconds of its own in each pass, so there the model's ``train_step`` reads the clock between its lines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORWARD_S, BACKWARD_S, DATA_S = 0.040, 0.060, 0.150
BATCHES = 20
BACKENDS = ("tensorflow", "tf_keras", "torch", "jax")


@dataclass
class Truth:
    """The work's times, on the system's clock."""

    scale: float = 1.0
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    backward_ended: list[float] = field(default_factory=list)
    data_ready: list[float] = field(default_factory=list)
    asked_for: list[float] = field(default_factory=list)
    data_s: float = DATA_S

    def forward(self) -> None:
        """Sleep as the forward pass."""
        began = time.perf_counter()
        time.sleep(FORWARD_S * self.scale)
        self.forward_s.append(time.perf_counter() - began)

    def backward(self) -> None:
        """Sleep as the backward pass."""
        began = time.perf_counter()
        time.sleep(BACKWARD_S * self.scale)
        self.backward_s.append(time.perf_counter() - began)
        self.backward_ended.append(time.time())

    def batches(self, count: int) -> Iterator[Any]:
        """Data of four numbers that sleeps before each batch."""
        import numpy as np

        random = np.random.default_rng(0)
        for _ in range(count):
            time.sleep(self.data_s * self.scale)
            x = random.random((8, 4)).astype("float32")
            self.data_ready.append(time.time())
            yield x, x.sum(axis=1, keepdims=True)


def compare(
    case: str, tmr: Any, truth: Truth, *, batches: int, replicas: int = 1, passes: bool = True
) -> list[dict[str, Any]]:
    """One row for each region, over those of the batches that are of the steady state; they come last."""
    import numpy as np

    from deep500_timing import TimeType

    def row(key: TimeType, true: Any) -> dict[str, Any]:
        measured = np.asarray(tmr.get_time(key))
        # The waits of first executions count as IO.
        steady = len(tmr.get_time(TimeType.FORWARD if passes else TimeType.BATCH))
        count = min(len(measured), len(true), steady - (key is TimeType.IO))
        measured, true = measured[-count:], np.asarray(true)[-count:]
        # Nothing is said of waits for present data.
        measured, true = measured[true > 0.01], true[true > 0.01]
        return row_of(f"{case}: {key.name}", true, measured)

    def of_batches(values: list[float], pick: Any = np.mean) -> Any:
        return pick(np.asarray(values).reshape(-1, replicas), axis=1)

    rows = []
    if truth.data_ready and tmr.get_time(TimeType.IO):
        # An iterator may have been looked at before the fit, and is asked once more at its end.
        ready = np.asarray(truth.data_ready)[-batches:]
        asked = truth.asked_for or [0.0, *of_batches(truth.backward_ended, np.max)[:-1]]
        rows.append(row(TimeType.IO, (ready - np.asarray(asked)[:batches])[1:]))
    if passes:
        rows.append(row(TimeType.FORWARD, of_batches(truth.forward_s)))
        rows.append(row(TimeType.BACKWARD, of_batches(truth.backward_s)))
    return rows


def row_of(case: str, true: Any, measured: Any) -> dict[str, Any]:
    """One row of as many times as there are true ones; else it fails."""
    import numpy as np

    errors = 100 * (np.asarray(measured) / np.asarray(true) - 1)
    low, high = np.percentile(errors, (5, 95))
    return {
        "case": case,
        "true_s": float(np.median(true)),
        "measured_s": float(np.median(measured)),
        "error_percent": float(np.median(errors)),
        "spread": f"{low:+.3f} … {high:+.3f}",
    }


# --- TensorFlow -----------------------------------------------------------------------------------------------------


def sleeping_operation(tf: Any, truth: Truth) -> Any:
    """An identity that sleeps, forwards and backwards."""

    def sleeping(work: Any, x: Any) -> Any:
        def operation(value: Any) -> Any:
            work()
            return value

        return tf.ensure_shape(tf.py_function(operation, [x], x.dtype), x.shape)

    @tf.custom_gradient
    def identity(x: Any) -> Any:
        return sleeping(truth.forward, x), lambda gradient: sleeping(truth.backward, gradient)

    return identity


def tensorflow_model(keras: Any, truth: Truth, *, own_step: bool = False, **compiling: Any) -> Any:
    """Two dense layers and one that sleeps between them."""
    import tensorflow as tf

    class Sleeping(keras.layers.Layer):
        def call(self, x: Any, training: bool | None = None) -> Any:
            return sleeping_operation(tf, truth)(x) if training else x

    class OwnStep(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            began = time.perf_counter()
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            there = time.perf_counter()
            gradients = tape.gradient(loss, self.trainable_variables)
            if self.run_eagerly:
                truth.forward_s[-1], truth.backward_s[-1] = there - began, time.perf_counter() - there
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    inputs = keras.Input((4,))
    hidden = Sleeping()(keras.layers.Dense(8)(inputs))
    model = (OwnStep if own_step else keras.Model)(inputs, keras.layers.Dense(1, dtype="float32")(hidden))
    model.compile("adam", "mse", **compiling)
    return model


def bystander(keras: Any, truth: Truth) -> Any:
    """A callback that notes when Keras is about to ask for the next batch."""

    class Bystander(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            truth.asked_for.append(time.time())

    return Bystander()


def dataset(truth: Truth, count: int, *, known: bool) -> Any:
    """The data as TensorFlow's, of known length or not."""
    import tensorflow as tf

    spec = (tf.TensorSpec((8, 4)), tf.TensorSpec((8, 1)))
    made = tf.data.Dataset.from_generator(lambda: truth.batches(count), output_signature=spec)
    return made.apply(tf.data.experimental.assert_cardinality(count)) if known else made


def tensorflow_rows(keras: Any, prefix: str, cases: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Fits of every kind."""
    import numpy as np
    import tensorflow as tf

    import deep500_timing_tensorflow as timer

    rows = []
    for case, options in cases.items():
        eager = options.get("run_eagerly", False)
        truth = Truth(data_s=0.4 if eager or "mirrored" in options else DATA_S)
        several = options.get("steps_per_execution", 1) > 1
        compiling = {key: value for key, value in options.items() if key in ("run_eagerly", "steps_per_execution")}
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]) if "mirrored" in options else None
        if "policy" in options:
            keras.mixed_precision.set_global_policy(options["policy"])
        with strategy.scope() if strategy else tf.device("CPU:0"):
            model = tensorflow_model(keras, truth, own_step=eager or "own_step" in options, **compiling)
        keras.mixed_precision.set_global_policy("float32")
        tmr = timer.Timer()
        callback = timer.TimerCallback(tmr, io=not several, phases=True)
        x = np.ones((8, 4), "float32")
        model.fit(
            dataset(truth, BATCHES, known=options.get("known", True)),
            callbacks=[callback] if several else [callback, bystander(keras, truth)],
            validation_data=(x, x.sum(axis=1, keepdims=True)) if "validation" in options else None,
            verbose=0,
        )
        rows += compare(f"{prefix}, {case}", tmr, truth, batches=callback.batches, replicas=2 if strategy else 1)
    return rows


def other_work_rows(keras: Any) -> list[dict[str, Any]]:
    """What lies next to the batches: another callback, an evaluation in a fit, and a step that is traced again."""
    import numpy as np

    import deep500_timing_tensorflow as timer

    tmr = timer.Timer()
    slept: list[float] = []
    tested: list[float] = []
    executed: list[tuple[bool, float]] = []
    callback = timer.TimerCallback(tmr)

    class OwnStep(keras.Model):
        traced = 0

        def train_step(self, data: Any) -> Any:
            type(self).traced += 1
            time.sleep(DATA_S)  # As a large model does when it is traced.
            return super().train_step(data)

    class Sleeper(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            began = time.perf_counter()
            time.sleep(FORWARD_S)
            slept.append(time.perf_counter() - began)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.evaluate(x, y, batch_size=8, verbose=0, callbacks=[callback, TestClock()])

    class TestClock(keras.callbacks.Callback):
        def on_test_begin(self, logs: Any = None) -> None:
            self.began = time.perf_counter()

        def on_test_end(self, logs: Any = None) -> None:
            tested.append(time.perf_counter() - self.began)

    class Before(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.before, self.began = OwnStep.traced, time.perf_counter()

    class After(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            executed.append((OwnStep.traced > before.before, time.perf_counter() - before.began))

    before = Before()
    x = np.ones((8 * BATCHES - 3, 4), "float32")
    y = x.sum(axis=1, keepdims=True)
    inputs = keras.Input((4,))
    model = OwnStep(inputs, keras.layers.Dense(1)(inputs))
    model.compile("adam", "mse")
    for _ in range(4):  # Compiled again between two of them, it is traced again.
        callbacks = [After(), callback, Sleeper(), before]
        model.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks)
        model.compile("adam", "mse")
    # Among the hooks of all callbacks the sleeping ones: not the short ones, and not the one that holds the evaluation.
    ends = tmr.intervals("TEST")[:, 1]
    hooks = [(end - begin) / 1e9 for begin, end in tmr.intervals("CALLBACKS") if not any((begin < ends) & (ends < end))]
    traced = "own train_step, traced, and again when compiled anew: compile"
    pairs = {
        "another callback's sleep: CALLBACKS": (slept, [took for took in hooks if took > FORWARD_S / 2]),
        "evaluate in a fit: TEST": (tested, tmr.get_time("TEST")),
        traced: ([took for new, took in executed if new], tmr.get_time("compile")),
    }
    return [row_of(f"Keras on TensorFlow, {case}", *compared) for case, compared in pairs.items()]


def own_loop_rows() -> list[dict[str, Any]]:
    """One's own loop around ``timed_step``."""
    import tensorflow as tf

    import deep500_timing_tensorflow as timer

    truth, tmr = Truth(), timer.Timer()
    variable = tf.Variable(tf.ones((4, 1)))

    @tf.function
    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((sleeping_operation(tf, truth)(x @ variable) - y) ** 2)
        variable.assign_sub(0.01 * tape.gradient(loss, variable))
        return loss

    step = timer.timed_step(train_step, tmr)
    for x, y in tmr.iterate(dataset(truth, BATCHES, known=True)):
        step(x, y)
    return compare("TensorFlow, own loop with timed_step", tmr, truth, batches=BATCHES)


def stall_rows(keras: Any) -> list[dict[str, Any]]:
    """Steps far below 50 ms, with waits read several at once, and a stall now and then among them."""
    import numpy as np
    import tensorflow as tf

    import deep500_timing_tensorflow as timer

    every = 100
    slept: list[float] = []

    def stall(number: Any) -> Any:
        began = time.perf_counter()
        time.sleep(BACKWARD_S)
        slept.append(time.perf_counter() - began)
        return number

    def batch(number: Any) -> Any:
        def stalls() -> Any:
            return tf.ensure_shape(tf.numpy_function(stall, [number], tf.int64), ())

        number = tf.cond(tf.equal(number % every, every - 1), stalls, lambda: number)
        return tf.cast(tf.fill((8, 4), number % 2), tf.float32), tf.ones((8, 1))

    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    options = tf.data.Options()
    options.autotune.enabled = options.experimental_optimization.inject_prefetch = False  # Nothing runs ahead.
    batches = tf.data.Dataset.range(BATCHES * every).map(batch).with_options(options)
    tmr = timer.Timer()
    model.fit(batches, callbacks=[timer.TimerCallback(tmr)], verbose=0)
    waits = [took for took in tmr.get_time("IO") if took > BACKWARD_S / 2]
    return [row_of("Keras on TensorFlow, a stall among short steps: IO", slept, np.asarray(waits))]


def rows_on_tensorflow() -> list[dict[str, Any]]:
    """Keras 3 on TensorFlow."""
    import keras
    import tensorflow as tf

    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two)
    cases: dict[str, dict[str, Any]] = {
        "graph": {},
        "eager": {"run_eagerly": True},
        "steps_per_execution=4": {"steps_per_execution": 4},
        "unknown length": {"known": False},
        "validation": {"validation": True},
        "own train_step": {"own_step": True},
        "mixed precision": {"policy": "mixed_bfloat16"},
        "MirroredStrategy, two CPUs": {"mirrored": True},
    }
    return (
        tensorflow_rows(keras, "Keras on TensorFlow", cases)
        + other_work_rows(keras)
        + stall_rows(keras)
        + own_loop_rows()
    )


def rows_on_tf_keras() -> list[dict[str, Any]]:
    """Keras 2 on TensorFlow."""
    import tf_keras

    cases: dict[str, dict[str, Any]] = {"graph": {}, "steps_per_execution=4": {"steps_per_execution": 4}}
    return tensorflow_rows(tf_keras, "tf_keras", cases)


# --- the other backends ---------------------------------------------------------------------------------------------


def rows_on_torch() -> list[dict[str, Any]]:
    """Keras 3 on PyTorch."""
    import keras
    import torch

    import deep500_timing_tensorflow as timer

    # Keras itself takes milliseconds for each pass.
    truth = Truth(scale=3.0)

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Any) -> Any:
            truth.forward()
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            truth.backward()
            return gradient

    class Sleeping(keras.layers.Layer):
        def call(self, x: Any, training: bool | None = None) -> Any:
            return Identity.apply(x) if training else x

    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(1)(Sleeping()(keras.layers.Dense(8)(inputs))))
    model.compile("adam", "mse")
    tmr = timer.Timer()
    callback = timer.TimerCallback(tmr, phases=True)
    model.fit(truth.batches(BATCHES), steps_per_epoch=BATCHES - 2, callbacks=[callback], verbose=0)
    return compare("Keras on PyTorch", tmr, truth, batches=callback.batches)


def rows_on_jax() -> list[dict[str, Any]]:
    """Keras 3 on JAX: the wait for data."""
    import keras

    import deep500_timing_tensorflow as timer

    truth, tmr = Truth(), timer.Timer()
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("adam", "mse")
    callback = timer.TimerCallback(tmr)
    callbacks = [callback, bystander(keras, truth)]
    model.fit(truth.batches(BATCHES), steps_per_epoch=BATCHES - 2, callbacks=callbacks, verbose=0)
    return compare("Keras on JAX", tmr, truth, batches=callback.batches, passes=False)


def rows() -> list[dict[str, Any]]:
    """Every row, each backend in its own process."""
    found = []
    for backend in BACKENDS:
        keras_backend = "tensorflow" if backend == "tf_keras" else backend
        environment = {**os.environ, "KERAS_BACKEND": keras_backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", str(Path(__file__)), backend],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            raise RuntimeError(f"Measuring Keras on {backend} failed:\n{ran.stderr}")
        found += json.loads(ran.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure one backend, given its name; without one, all, and print."""
    if len(sys.argv) > 1:
        print(json.dumps(globals()[f"rows_on_{sys.argv[1]}"]()))
        return
    for row in rows():
        print(
            f"{row['case']:<60} {row['true_s'] * 1e3:10.3f} ms {row['measured_s'] * 1e3:10.3f} ms "
            f"{row['error_percent']:+8.3f} %  [{row['spread']}]"
        )


if __name__ == "__main__":
    main()
