"""What usually helps, by what trains and what its data come from: no sentence advises another framework's remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deep500_timing._views.findings._evidence import Evidence

_PARALLEL = "map(num_parallel_calls=tf.data.AUTOTUNE); cache() what comes again"
_BUFFER = "fill a smaller shuffle buffer; dataset.cache()"
_EPOCHS = "fewer and longer epochs"
_SHAPES = "pad inputs to few shapes"
_LARGER = "larger batches"
_FIRST = "leave the first steps out of comparisons"
REMEDIES: dict[str, dict[str, str]] = {
    "waits-for-data": {
        "generator": "a PyDataset with workers= and use_multiprocessing=; or tf.data with map(num_parallel_calls=)",
        "PyDataset": "workers= and use_multiprocessing= of the PyDataset",
        "tf.data": _PARALLEL,
        "tensorflow": _PARALLEL,
        "keras": "prefetch; load in parallel",
        "arrays": _LARGER,
        "jax": "make the next batch on another thread while a step runs",
    },
    "EPOCH (start)": {
        "tf.data": _BUFFER,
        "tensorflow": _BUFFER,
        "keras": _EPOCHS,
        "jax": _EPOCHS,
    },
    "memory-grows": {"torch": "keep numbers, not tensors: loss.item(), .detach()"},
    "recompilation": {"keras": _SHAPES, "tensorflow": _SHAPES, "jax": _SHAPES},
    "warm-up": {"keras": _FIRST, "tensorflow": _FIRST, "jax": f"jax_compilation_cache_dir; {_FIRST}"},
    "compile": {"keras": _SHAPES, "tensorflow": _SHAPES, "jax": f"jax_compilation_cache_dir; {_SHAPES}"},
    "optimizer": {"keras": _LARGER, "tensorflow": _LARGER, "jax": _LARGER},
    "launch-bound": {
        "keras": f"{_LARGER}; compile(jit_compile=True, steps_per_execution=)",
        "tensorflow": f"{_LARGER}; tf.function(jit_compile=True)",
        "jax": f"{_LARGER}; more of the step in one jitted function",
    },
    "cpu-waits-for-gpu": dict.fromkeys(
        ("keras", "tensorflow", "jax"), "look for .numpy(), float() and print of results"
    ),
    "copies": {
        "keras": "tf.data.experimental.prefetch_to_device",
        "tensorflow": "tf.data.experimental.prefetch_to_device",
        "jax": "jax.device_put of the next batch while a step runs",
    },
}
"""By a rule or a region, and then by :attr:`Evidence.kinds`. Others are the rule's own."""


def remedy_of(evidence: Evidence, name: str, usual: str) -> str:
    """The remedy for a rule's finding, or for a region."""
    known = REMEDIES.get(name, {})
    return next((known[kind] for kind in evidence.kinds if kind in known), usual)
