"""One finding, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact about a run that is worth a look."""

    rule: str
    """The rule's name, as in ``docs/findings.md``: ``"waits-for-data"``."""
    fact: str
    """The fact with its number: a clause without a full stop. Names in it are safe on a terminal; a page still has to
    escape them."""
    where: str = ""
    """The ranks, the region or the steps; empty if the fact says it."""
    why: str = ""
    """The cause, if it is known, else empty."""
    command: str = ""
    """What to type next, else empty; complete, with the run's path."""
    remedy: str = ""
    """What usually helps, in a few words; ``docs/findings.md`` says more."""
    cost_s: float | None = None
    """The time that it cost, by which findings are sorted; None if unknown."""
    is_first: bool = False
    """Whether it comes before all others at any cost: lost data make the rest doubtful."""
    anchor: str = ""
    """The section of the page that shows it: ``"tree"``, ``"over-the-run"``, ``"steps"``, ``"ranks"``, ``"memory"``,
    ``"communication"``, ``"devices"``, ``"stragglers"``, ``"not-measured"``."""
    region: tuple[str, ...] = ()
    """The place in the tree that it is about, if it is about one."""
    steps: tuple[int, ...] = ()
    """The steps that it is about, if it is about some; the slowest first, at most twenty."""
    rank: int | None = None
    """The rank that it is about, if it is about one."""
    cause: str = ""
    """The region that explains it, if one does."""

    @property
    def text(self) -> str:
        """The finding in one line, without the command."""
        parts = [self.fact, self.where]
        said = ", ".join(part for part in parts if part)
        return f"{said}: {self.why}." if self.why else f"{said}."
