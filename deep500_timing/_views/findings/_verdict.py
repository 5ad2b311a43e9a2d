"""The sentence above the table where no rule speaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing._base.names import BATCH, IO
from deep500_timing._views.findings import _thresholds as at_least
from deep500_timing._views.findings._account import account_of
from deep500_timing._views.findings._evidence import Evidence, joined, name_of, percent
from deep500_timing._views.findings._steps import warm_up_of

if TYPE_CHECKING:
    from deep500_timing._summary.tree import Node

CALM = "Nothing stands out"
"""The beginning of a verdict that covers 70 % of the time."""
_MOST = 4
_EVEN = 0.5
"""Steps are even if their 95th percentile is at most this much over the median."""


def verdict(evidence: Evidence) -> str:
    """The sentence for a run without findings. :data:`CALM` needs regions that cover 70 % of the time.

    Args:
        evidence: Of a run, or of a tree.
    """
    tree, step = evidence.tree, evidence.step_node
    longest = step.count if step is not None else max((node.count for node in tree.walk()), default=0)
    if evidence.run is None and longest < at_least.LEAST_STEPS:
        return ""  # A table of a few intervals needs no excuse.
    if not tree.roots:
        return "Nothing is recorded yet."
    if step is None or not step.total_s:
        if sum(node.count for node in tree.named(BATCH)):
            return ""
        return f"Rules about steps need regions named {BATCH}. {_of_regions(evidence)}".rstrip()
    if step.count < at_least.LEAST_STEPS:
        return f"No rule speaks: of {step.count} step{'s' if step.count > 1 else ''}, where most need 20."
    account = account_of(evidence)
    parts, covered = _parts_of(step)
    training = (
        f"training is {percent(account.training_s / account.whole_s)} of {evidence.whole}" if account.whole_s else ""
    )
    spread, is_even = _spread_of(step)
    named_s = account.covered_s - step.total_s + covered * step.total_s
    is_calm = covered >= at_least.CALM_SHARE and named_s >= at_least.CALM_SHARE * account.whole_s and is_even
    start = warm_up_of(evidence)
    whole = account.text(start.cost_s or 0.0 if start is not None else 0.0)
    if account.training_s < 0.9 * account.whole_s and whole:
        training = f"of {evidence.whole}, {whole}"
    said = "; ".join(part for part in (training, parts, spread) if part)
    return f"{CALM if is_calm else 'No rule speaks'}: {said}."


def _parts_of(step: Node) -> tuple[str, float]:
    inside = [child for child in step.children if child.share is not None and not child.is_rest]
    work = [child for child in inside if child.name != IO]
    if not work:
        waits = f", but for {percent(inside[0].share or 0.0)} of {IO}" if inside else ""
        return f"{BATCH} is not divided into regions{waits}", 0.0
    covered = min(sum(child.share or 0.0 for child in inside), 1.0)
    chosen: list[Node] = []
    for child in inside:
        chosen.append(child)
        share = sum(node.share or 0.0 for node in chosen)
        if share >= at_least.CALM_SHARE or len(chosen) == _MOST:
            break
    if share < at_least.CALM_SHARE:
        largest = f"the largest {name_of(inside[0].name)} with {percent(inside[0].share or 0.0)}"
        return f"{len(inside)} regions cover {percent(covered)} of {BATCH}, {largest}", covered
    verb = "is" if len(chosen) == 1 else "are"
    return f"{percent(share)} of {BATCH} {verb} {joined([name_of(node.name) for node in chosen])}", covered


def _spread_of(step: Node) -> tuple[str, bool]:
    if not step.median_s or step.p95_s is None:
        return "", True
    over = step.p95_s / step.median_s - 1
    if over < 0.005:
        return "", True
    if over <= _EVEN:
        return f"95 % of the steps are within {percent(over)} of the median", True
    return f"one step in 20 takes {over + 1:.1f} × the median or more", False


def _of_regions(evidence: Evidence) -> str:
    text = account_of(evidence).text()
    return f"Of {evidence.whole}: {text}." if text else ""
