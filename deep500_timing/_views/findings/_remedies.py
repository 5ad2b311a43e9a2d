"""What usually helps, by what trains and what its data come from: no sentence advises another framework's remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deep500_timing._views.findings._evidence import Evidence

_PARALLEL = "map(num_parallel_calls=tf.data.AUTOTUNE); cache() what comes again"
_SHAPES = "pad inputs to few shapes"
_LARGER = "larger batches"
_FIRST = "leave the first steps out of comparisons"
_OF_GRAPHS = "keras tensorflow jax"
REMEDIES: dict[str, dict[str, str]] = {
    "waits-for-data": {
        "generator": "a PyDataset with workers= and use_multiprocessing=; or tf.data with map(num_parallel_calls=)",
        "PyDataset": "workers= and use_multiprocessing= of the PyDataset",
        "tf.data tensorflow": _PARALLEL,
        "keras": "prefetch; load in parallel",
        "arrays": _LARGER,
        "jax": "make the next batch on another thread while a step runs",
    },
    "EPOCH (start)": {
        "tf.data tensorflow": "fill a smaller shuffle buffer; dataset.cache()",
        "keras jax": "fewer and longer epochs",
    },
    "unnamed": {"keras": f"{_LARGER}; Keras on JAX or TensorFlow compiles its step"},
    "memory-grows": {"torch": "keep numbers, not tensors: loss.item(), .detach()"},
    "recompilation": {_OF_GRAPHS: _SHAPES},
    "warm-up": {"keras tensorflow": _FIRST, "jax": f"jax_compilation_cache_dir; {_FIRST}"},
    "compile": {"keras tensorflow": _SHAPES, "jax": f"jax_compilation_cache_dir; {_SHAPES}"},
    "optimizer": {_OF_GRAPHS: _LARGER},
    "launch-bound": {
        "keras": f"{_LARGER}; compile(jit_compile=True, steps_per_execution=)",
        "tensorflow": f"{_LARGER}; tf.function(jit_compile=True)",
        "jax": f"{_LARGER}; more of the step in one jitted function",
    },
    "cpu-waits-for-gpu": {_OF_GRAPHS: "look for .numpy(), float() and print of results"},
    "copies": {
        "keras tensorflow": "tf.data.experimental.prefetch_to_device",
        "jax": "jax.device_put of the next batch while a step runs",
    },
}
"""By a rule or a region, and then by :attr:`Evidence.kinds`. Others are the rule's own."""

GC = "GC"
"""The region of garbage collections."""


def of_collections(lines: str) -> tuple[str, str]:
    """What helps against garbage collections that begin in these lines, and the lines if they ask for them."""
    if "collect(" in lines:
        return "call gc.collect() less often", lines
    return "gc.freeze() after the first step, or gc.disable() and a collection between epochs", ""


def remedy_of(evidence: Evidence, name: str, usual: str) -> str:
    """The remedy for a rule's finding, or for a region."""
    known = {kind: text for kinds, text in REMEDIES.get(name, {}).items() for kind in kinds.split()}
    return next((known[kind] for kind in evidence.kinds if kind in known), usual)
