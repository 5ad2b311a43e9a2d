"""What helps, by what trains and what its data come from: a table of rules and frameworks."""

from __future__ import annotations

import re

import pytest

from deep500_timing._views.findings import RULES
from deep500_timing._views.findings._remedies import REMEDIES, remedy_of

KINDS = {
    "keras": [(data, "keras") for data in ("", "generator", "PyDataset", "tf.data", "arrays", "grain")],
    "tensorflow": [("tensorflow",)],
    "jax": [("jax",)],
}
TORCH = (
    r"DataLoader|num_workers|persistent_workers|pin_memory|non_blocking|\.item|\.detach|\.cpu\(|torch|fused|CUDA graph"
)
TENSORFLOW = r"tf\.|dataset\.|PyDataset|shuffle buffer|jit_compile"
OF_OTHERS = {"keras": TORCH, "tensorflow": TORCH, "jax": f"{TORCH}|{TENSORFLOW}"}
NAMES = ["EPOCH (start)", "compile", "optimizer", *(rule.name for rule in RULES.values())]


class Kinds:
    """The part of the evidence that the table is asked with."""

    def __init__(self, kinds):
        self.kinds = kinds


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("framework", KINDS)
def test_no_remedy_of_another_framework(name, framework):
    """Whatever a rule finds, what helps is something that the program could do."""
    usual = RULES[name].remedy if name in RULES else ""
    for kinds in KINDS[framework]:
        assert not re.search(OF_OTHERS[framework], remedy_of(Kinds(kinds), name, usual)), kinds


def test_each_entry_is_asked_for():
    """A rule or region that is no more has no entry, and each kind is one that can be."""
    assert REMEDIES.keys() <= {*NAMES}
    known = {"torch", *(kind for of in KINDS.values() for kinds in of for kind in kinds)}
    assert {kind for of in REMEDIES.values() for kinds in of for kind in kinds.split()} <= known


def test_a_slow_map_is_not_told_to_prefetch():
    """Measured: prefetching saves nothing of a slow map, and parallel calls half of it."""
    assert "num_parallel_calls" in remedy_of(Kinds(("tf.data", "keras")), "waits-for-data", "")
