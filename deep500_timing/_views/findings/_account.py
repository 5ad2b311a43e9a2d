"""Where the time of the whole run went: training, and each region outside the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from deep500_timing._base.names import BATCH, IO
from deep500_timing._views.findings._evidence import FIRST_STEP, name_of, percent

if TYPE_CHECKING:
    from deep500_timing._summary.tree import Node
    from deep500_timing._views.findings._evidence import Evidence

_VALIDATIONS = ("valid", "eval", "test")
_LEAST_SHARE = 0.01
_OVERLAP = 1.02
_MOST = 5


class Entry(NamedTuple):
    """A region outside the steps, or time that no region there covers."""

    name: str
    total_s: float
    times: int
    nodes: tuple[Node, ...]
    """The places of the region; of time in no region the region around it, or nothing outside all."""
    is_rest: bool = False


class Account(NamedTuple):
    """The parts of a run; together they are the run, unless regions of several threads overlap."""

    whole_s: float
    training_s: float
    """The steps, and the waits for data between them."""
    entries: tuple[Entry, ...]
    """The others, by falling time."""

    @property
    def covered_s(self) -> float:
        """What regions cover."""
        return self.training_s + sum(entry.total_s for entry in self.entries if not entry.is_rest)

    def text(self, start_s: float = 0.0) -> str:
        """As ``"training 71 %, VALIDATION 18 %, start 5 %"``; parts below 1 % are left out.

        Args:
            start_s: The part of training that was warm-up.
        """
        if not self.whole_s:
            return ""
        parts = [("training", self.training_s - start_s)] if self.training_s else []
        parts += [(entry.name if entry.is_rest else name_of(entry.name), entry.total_s) for entry in self.entries]
        parts += [("start", start_s)] if start_s else []
        shown = [(name, seconds) for name, seconds in parts if seconds >= _LEAST_SHARE * self.whole_s]
        return ", ".join(f"{name} {percent(seconds / self.whole_s)}" for name, seconds in shown[:_MOST])


def account_of(evidence: Evidence) -> Account:
    """Divide a run into training and the rest."""
    tree = evidence.tree
    around: set[tuple[str, ...]] = set()
    for node in tree.walk():
        if node.name == BATCH and not any(is_validation(name) for name in node.path):
            around |= {node.path[:depth] for depth in range(len(node.path))}
    training_s = 0.0
    found: dict[tuple[str, bool], list[tuple[float, int, tuple[Node, ...]]]] = {}

    def divide(node: Node) -> None:
        nonlocal training_s
        total_s = (node.total_s or 0.0) - node.overlap_s
        if node.path in around:
            for child in node.children:
                if not child.is_rest:
                    divide(child)
            if node.rest_s is not None and node.rest_s > 0:
                found.setdefault((f"{name_of(node.name)} outside its regions", True), []).append(
                    (node.rest_s, 0, (node,))
                )
        elif node.parent in around and node.name in (BATCH, FIRST_STEP, IO):
            training_s += total_s
        else:
            found.setdefault((node.name, False), []).append((total_s, node.count, (node,)))

    for root in tree.roots:
        divide(root)
    roots_s = sum(root.total_s or 0.0 for root in tree.roots)
    whole_s = max(evidence.whole_s, roots_s if len(tree.roots) == 1 else 0.0)
    # Roots of several threads overlap, and the time outside all is unknown.
    if tree.roots and not any(root.running for root in tree.roots) and roots_s <= _OVERLAP * whole_s:
        outside_s = max(whole_s - roots_s, 0.0)
        if outside_s > 0:
            found[("no region", True)] = [(outside_s, 0, ())]
    entries = [
        Entry(
            name,
            sum(s for s, _, _ in of),
            sum(n for _, n, _ in of),
            tuple(x for _, _, nodes in of for x in nodes),
            rest,
        )
        for (name, rest), of in found.items()
    ]
    return Account(whole_s, training_s, tuple(sorted(entries, key=lambda entry: (-entry.total_s, entry.name))))


def is_validation(name: str) -> bool:
    """Whether a region's name says that it validates."""
    return any(word in name.lower() for word in _VALIDATIONS)
