"""One finding, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact about a run that is worth a look."""

    rule: str
    """The rule's name, as in ``docs/findings.md``: ``"waits-for-data"``."""
    fact: str
    """What is the case, with its number: a clause without a full stop. Names in it are safe to show on a terminal;
    a page still has to escape them."""
    where: str = ""
    """On which ranks, in which region, in which steps; empty if the fact says it."""
    why: str = ""
    """The cause, if it is known, else empty."""
    command: str = ""
    """What to type next, else empty; complete, with the run's path."""
    cost_s: float | None = None
    """The time that it cost, by which findings are sorted; None where it has no cost of its own."""
    is_first: bool = False
    """Whether it comes before all others, whatever it cost: what was lost makes the rest doubtful."""
    anchor: str = ""
    """Which chart of the page shows it: ``"tree"``, ``"over-the-run"``, ``"steps"``, ``"ranks"``, ``"memory"``,
    ``"communication"``, ``"devices"``, ``"not-measured"``."""
    region: tuple[str, ...] = ()
    """The place in the tree that it is about, if it is about one."""
    steps: tuple[int, ...] = ()
    """The steps that it is about, if it is about some; the slowest first, no more than twenty."""
    rank: int | None = None
    """The rank that it is about, if it is about one."""

    @property
    def text(self) -> str:
        """The finding in one line, without the command."""
        parts = [self.fact, self.where]
        said = ", ".join(part for part in parts if part)
        return f"{said}: {self.why}." if self.why else f"{said}."
