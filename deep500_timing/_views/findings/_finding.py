"""One finding and one rule, as plain data, and how sentences word numbers and names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deep500_timing._summary.text import safe_name, shorten, times
from deep500_timing._views.findings._remedies import remedy_of

if TYPE_CHECKING:
    from deep500_timing._views.findings._evidence import Evidence


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
    gain_s: float | None = None
    """An upper bound of the time that a remedy can save; None if unknown. Gains of several findings overlap."""
    gain_share: float | None = None
    """The same as a share of the training loop; of what is told as a share of the run, as a share of that."""
    is_first: bool = False
    """Whether it comes before all others at any cost: lost data make the rest doubtful."""
    anchor: str = ""
    """The section of the page that shows it: ``"tree"``, ``"over-the-run"``, ``"steps"``, ``"ranks"``, ``"memory"``,
    ``"communication"``, ``"devices"``, ``"stragglers"``, ``"goodput"``, ``"not-measured"``."""
    region: tuple[str, ...] = ()
    """The place in the tree that it is about, if it is about one."""
    steps: tuple[int, ...] = ()
    """The steps that it is about, if it is about some; the slowest first, at most twenty."""
    rank: int | None = None
    """The rank that it is about, if it is about one."""
    cause: str = ""
    """The region that explains it, if one does."""
    place: str = ""
    """The line of the program with most of its time, as ``"train.py:41"``, if one has. A line is named once."""
    kind: str = ""
    """Which of its rule's facts it is, where a rule has several: :data:`PAUSES`, :data:`START`, :data:`WAITED`,
    :data:`UNEVEN`; of the start and the end of a run, the name of that part."""

    def is_half_of(self, other: Finding) -> bool:
        """Whether it costs at least half of what another one does."""
        return (self.cost_s or 0.0) >= 0.5 * (other.cost_s or 0.0)

    @property
    def text(self) -> str:
        """The finding in one line, without the help."""
        said = ": ".join(filter(None, (", ".join(filter(None, (self.fact, self.where))), self.why)))
        return said if said.endswith("…") else f"{said}."

    @property
    def help(self) -> str:
        """The next command or the usual remedy, and the gain at most; may be empty."""
        gain = "" if self.gain_share is None else f"saves at most {percent(self.gain_share)}"
        return "; ".join(part for part in (gain, self.command or self.remedy) if part)


MOST_STEPS = 20
"""Most steps of a finding."""
UNEXPLAINED_S = 1.0
"""The least cost of a few unexplained intervals for a finding: in a trial, a busy machine has as many."""
PAUSES, START, WAITED, UNEVEN = "pauses", "start", "waited", "uneven"
"""Kinds of findings: pauses between two steps, the first steps of a run, time in which the thread waited for a
processor, and a region that a few long intervals make costly."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: its threshold, its needs, and its judgement. ``docs/findings.md`` has the same table in words."""

    name: str
    judge: Callable[[Rule, Evidence], Iterator[Finding]]
    share: float
    """The threshold, mostly as a share of the step or of the run."""
    least: int
    """Fewest steps, or fewest samples, for it to speak."""
    anchor: str
    """See :attr:`Finding.anchor`."""
    remedy: str = ""
    """See :attr:`Finding.remedy`."""
    needs: str = "steps"
    """``"steps"``: so many steps. ``"run"``: a run, and the judge counts. ``""``: the judge decides."""
    on_cpu: bool = False
    """Whether it finds time of the CPU: a remedy saves no more than the time in which the device is idle."""
    of_run: bool = False
    """Whether its facts and gains are shares of the run, and not of the training loop."""
    yields_to: Mapping[str, Yields] = field(default_factory=dict)
    """Rules that tell the same seconds better, by name. Each has a condition: given a finding of this rule and one of
    that rule, it says whether this one is left out."""

    def found(self, evidence: Evidence, fact: str, **more: Any) -> Finding:
        """A finding of this rule."""
        usual = {"anchor": self.anchor, "rank": evidence.rank, "remedy": remedy_of(evidence, self.name, self.remedy)}
        return Finding(self.name, fact, **(usual | more))


Yields = Callable[[Finding, Finding], bool]
"""A condition of :attr:`Rule.yields_to`."""


def of_one_region(own: Finding, other: Finding) -> bool:
    """Whether both are about one place in the tree."""
    return own.region == other.region


def named(text: str) -> str:
    """A region's name, shortened and safe to print."""
    return shorten(safe_name(text), 32)


def percent(share: float) -> str:
    """As ``"37 %"``, or ``"3.7 %"`` below ten."""
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"


_TIMES_AS_LONG = 5.0
"""The factor from which on a sentence says it, and no percentage."""


def longer(factor: float) -> str:
    """As ``"37 % longer"``, or ``"774 × as long"``: several hundred percent are hard to picture."""
    return f"{percent(factor - 1)} longer" if factor < _TIMES_AS_LONG else f"{factor:.3g} × as long"


def took(seconds: float | None) -> str:
    """A time in a sentence."""
    return times([seconds or 0.0])[0]


def listed(numbers: Sequence[int], most: int = 3) -> str:
    """``"1, 2, 3 and 4 more"``."""
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more


def joined(names: list[str]) -> str:
    """``"a"``, ``"a and b"``, ``"a, b and c"``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else ""
