"""Stamps inside a TensorFlow graph that its optimizer cannot move.

A ``tf.timestamp`` has no inputs, so nothing but an order between operations holds it in place, and Grappler changes
such orders: it splits an ``IdentityN`` that joins a stamp to the values which are to wait for it. Here the values are
packed into an ``Optional``, which Grappler does not look into; the stamp is taken after that, packed together with it,
and later operations use the unpacked values. Nothing is copied, and values are passed on unchanged, so the
results of the step are the same to the last bit.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from deep500_timing.adapters import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOT_PASSED = float("nan")

_local = threading.local()


class StepStamps:
    """The stamps of one step: of one trace, or in eager mode of one execution."""

    def __init__(self, tf: Any) -> None:
        self._tf = tf
        self._eager = bool(tf.executing_eagerly())
        self.data_s: Any = NOT_PASSED
        self.loss_s: Any = NOT_PASSED
        self.gradients_s: Any = NOT_PASSED
        self.gradient_calls = 0

    def data(self, batch: Any) -> Any:
        """Stamp the moment at which the batch is there."""
        if self._eager:
            self.data_s = time.time()
            return batch
        tf = self._tf
        leaves = tf.nest.flatten(batch)
        # Variables, iterators and other arguments of a step are not data.
        places = [
            place
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)) and not isinstance(leaf, tf.Variable)
        ]
        found = [leaves[place] for place in places]
        parts, self.data_s = self._stamp(tf.nest.flatten(found, expand_composites=True))
        for place, leaf in zip(places, tf.nest.pack_sequence_as(found, parts, expand_composites=True), strict=True):
            leaves[place] = leaf
        return tf.nest.pack_sequence_as(batch, leaves)

    def gradient(
        self, original: Callable[..., Any], tape: Any, target: Any, sources: Any, output_gradients: Any, more: Any
    ) -> Any:
        """Compute the gradients, and stamp the moments before and after."""
        self.gradient_calls += 1
        if self._eager:
            self.loss_s = time.time()
            found = original(tape, target, sources, output_gradients, **more)
            self.gradients_s = time.time()
            return found
        tf = self._tf
        targets = tf.nest.flatten(target)
        given = output_gradients is not None
        seeds = tf.nest.flatten(output_gradients) if given else [tf.ones_like(part) for part in targets]
        # The backward pass starts from the seeds, so it starts after the stamp. Only tensors are replaced: a None
        # among the seeds differs from a one.
        hung = [place for place, seed in enumerate(seeds) if isinstance(seed, tf.Tensor)]
        passed, self.loss_s = self._stamp(targets, also=[seeds[place] for place in hung])
        for place, seed in zip(hung, passed[len(targets) :], strict=True):
            seeds[place] = seed
        with tf.control_dependencies([self.loss_s]):
            found = original(
                tape, target, sources, tf.nest.pack_sequence_as(output_gradients if given else target, seeds), **more
            )
        parts = tf.nest.flatten(found, expand_composites=True)  # Sparse gradients as well.
        places = [place for place, part in enumerate(parts) if part is not None]
        passed, self.gradients_s = self._stamp([parts[place] for place in places])
        for place, part in zip(places, passed, strict=True):
            parts[place] = part
        return tf.nest.pack_sequence_as(found, parts, expand_composites=True)

    def _stamp(self, values: list[Any], also: list[Any] | None = None) -> tuple[list[Any], Any]:
        # Returns values and `also`, passed on, and the moment at which all values were there.
        tf = self._tf
        if not values:
            return list(also or []), tf.timestamp()
        taken: list[Any] = []

        # Without a custom gradient the packing would stop the gradients of an outer tape.
        def pass_on(*parts: Any) -> Any:
            there = _pack(tf, parts[: len(values)])
            with tf.control_dependencies([there]):
                stamp = tf.timestamp()
            there, rest, stamp = _unpack(
                tf, _pack(tf, [there, _pack(tf, parts[len(values) :] or [stamp]), stamp]), [there, there, stamp]
            )
            taken.append(stamp)
            passed = _unpack(tf, there, parts[: len(values)])
            if also:
                passed = [*passed, *_unpack(tf, rest, parts[len(values) :])]
            return passed, lambda *gradients: gradients

        return list(tf.custom_gradient(pass_on)(*values, *(also or []))), taken[0]

    def row(self) -> Any:
        """The three stamps."""
        if self.gradient_calls != 1:
            # Which of several gradients is the backward pass cannot be told.
            self.loss_s = self.gradients_s = NOT_PASSED
        stamps = self.data_s, self.loss_s, self.gradients_s
        if self._eager:
            return stamps
        tf = self._tf
        return tf.stack([tf.cast(stamp, tf.float64) for stamp in stamps])


def _pack(tf: Any, parts: Any) -> Any:
    return tf.raw_ops.OptionalFromValue(components=list(parts))


def _unpack(tf: Any, packed: Any, like: Any) -> list[Any]:
    parts = tf.raw_ops.OptionalGetValue(
        optional=packed, output_types=[part.dtype for part in like], output_shapes=[part.shape for part in like]
    )
    return list(parts)


@contextlib.contextmanager
def stamping(stamps: StepStamps) -> Iterator[None]:
    """Let the gradients that this thread asks a tape for be stamped."""
    outer = getattr(_local, "stamps", None)
    _local.stamps = stamps
    try:
        yield
    finally:
        _local.stamps = outer


def _stamped_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    def gradient(tape: Any, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **more: Any) -> Any:
        stamps: StepStamps | None = getattr(_local, "stamps", None)
        if stamps is None or args or getattr(_local, "inside", False):
            return original(tape, target, sources, output_gradients, *args, **more)
        _local.inside = True
        try:
            return stamps.gradient(original, tape, target, sources, output_gradients, more)
        finally:
            _local.inside = False

    return gradient


WATCHED_TAPES = Watch(lambda: [(sys.modules["tensorflow"].GradientTape, "gradient", _stamped_gradient)])
"""While it is entered, ``tf.GradientTape.gradient`` stamps on threads that are stamping."""
