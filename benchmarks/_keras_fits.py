"""What timing adds to ``fit`` of Keras: to each of its steps, and to the time until its first batch is over."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from time import perf_counter
from typing import Any

from benchmarks._pairs import Step
from benchmarks._training import AGAIN, WITHOUT, in_turns, overheads

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
# One thread each: on a small machine the waiting of threads for each other is noise larger than the measured effect.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")

OURS = "TimerCallback"
TINY, LONGER = (64, 1), (1280, 3)
"""Units and layers of a model with a step of about a millisecond, and of one with a step of about ten."""

Callbacks = Callable[[], list[Any]]


def keras_fits(steps: int, rounds: int, step: Step) -> dict[str, Any]:
    """``fit`` for one epoch, with no callback, with one that does nothing, and with ours.

    Args:
        steps: Batches of the epoch, of a tiny model; a tenth of them of one with longer steps.
        rounds: How often each is fitted.
        step: Called after each round; there are four times as many in all.
    """
    import keras

    import deep500_timing_tensorflow as timer

    gc.collect()
    gc.freeze()  # As in `Bench`, which was made before Keras and TensorFlow were imported.

    class Nothing(keras.callbacks.Callback):
        """Asks for the end of each batch, which makes Keras wait for it, and does nothing with it."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            """Do nothing."""

    plain: dict[str, Callbacks] = {WITHOUT: list, AGAIN: list}
    ours: dict[str, Callbacks] = {OURS: lambda: [timer.TimerCallback(timer.Timer())]}
    hooks: dict[str, Callbacks] = {f"{OURS}(io=False)": lambda: [timer.TimerCallback(timer.Timer(), io=False)]}
    phases: dict[str, Callbacks] = {f"{OURS}(phases=True)": lambda: [timer.TimerCallback(timer.Timer(), phases=True)]}
    nothing: dict[str, Callbacks] = {"a callback that does nothing": lambda: [Nothing()]}

    alike = {**plain, **nothing, **hooks, **ours}
    warm = _fits({**alike, **phases}, _tiny_models(alike, phases), steps, 2 * rounds, step)
    longer = _fits({**plain, **ours}, dict.fromkeys(alike, _model(*LONGER)), max(2, steps // 10), rounds, step)
    new = _fits({**plain, **ours, **phases}, {}, 4, rounds, step)
    return {
        "steps": steps,
        "backend": keras.backend.backend(),
        "keras": keras.__version__,
        "runs": _part(warm, 1, 1e3 / (steps - 1)),
        "longer": _part(longer, 1, 1e3 / (max(2, steps // 10) - 1)),
        "first_batch": {"new": _part(new, 0), "warm": _part(warm, 0)},
    }


def _part(said: dict[str, list[tuple[float, float]]], place: int, scale: float = 1.0) -> dict[str, Any]:
    found = overheads({name: [pair[place] for pair in pairs] for name, pairs in said.items()})
    if scale != 1.0:
        for run in found.values():
            took = run["ms"]
            run["us"] = {key: value if key == "rounds" else scale * value for key, value in took.items()}
    return found


def _tiny_models(alike: dict[str, Callbacks], phases: dict[str, Callbacks]) -> dict[str, Any]:
    # One model for all that leave it as it is: steps of two models that are the same differ by one or two percent,
    # for as long as they are there. Stamps for phases stay in the graph of theirs.
    return {**dict.fromkeys(alike, _model()), **dict.fromkeys(phases, _model())}


def _fits(
    callbacks: dict[str, Callbacks], models: dict[str, Any], steps: int, rounds: int, step: Step
) -> dict[str, list[tuple[float, float]]]:
    # Seconds from the call of `fit` to the end of its first batch, and from there to the end of its last. Without
    # a model each fit gets a new one.
    inputs, targets = _data(32 * steps)

    def fit(name: str) -> tuple[float, float]:
        model = models.get(name) or _model()
        began = perf_counter()
        hooks = _batch_ends()(callbacks[name](), add_history=True, model=model, epochs=1, steps=steps)
        model.fit(inputs, targets, batch_size=32, verbose=0, shuffle=False, callbacks=hooks)
        return hooks.first - began, hooks.last - hooks.first

    return in_turns({name: functools.partial(fit, name) for name in callbacks}, rounds, step)


@functools.cache
def _batch_ends() -> type[Any]:
    import keras

    class BatchEnds(keras.callbacks.CallbackList):
        """Notes when the last hook of the first and of the last batch came to its end.

        The time after that is left out: TensorFlow takes down its data, whose tuning thread sleeps for 10, 20, 40 ms
        and so on. It is woken up before the flag is set that it is to end, so that now and then it sleeps on, and
        ``fit`` returns up to hundreds of milliseconds late, with a callback and without.
        """

        first = last = 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            """Call the hooks, ours among them, and read the clock."""
            super().on_train_batch_end(batch, logs)
            self.last = perf_counter()
            self.first = self.first or self.last

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            """Reading at the end of an epoch is a cost of its batches."""
            super().on_epoch_end(epoch, logs)
            self.last = perf_counter()

    return BatchEnds


def _data(samples: int) -> tuple[Any, Any]:
    import numpy as np

    random = np.random.default_rng(0)
    return random.standard_normal((samples, 64)).astype("float32"), random.integers(0, 10, samples)


def _model(units: int = TINY[0], layers: int = TINY[1]) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(units, activation="relu") for _ in range(layers)]
    model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
