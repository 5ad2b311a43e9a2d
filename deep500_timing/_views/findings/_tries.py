"""The remedies that ``deep500-timing try`` can set from outside the program, by the findings of a run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from deep500_timing._base.names import BATCH
from deep500_timing._views.findings._data import making_s, rows_of_workers, waiting_node

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing._views.findings._evidence import Evidence
    from deep500_timing._views.findings._finding import Finding

_SHORT_S = 5e-3
"""A step of Keras that is shorter may be mostly the calls around it."""
_TOO_MANY = 1.25
"""Cores that the run wants for each that it has, from which on fewer threads are tried."""
_COLLECTED = 0.03
"""The share of the steps that garbage collections take, from which on they are tried to be avoided."""
GC = "GC"
_EXECUTIONS = 8
"""Batches in one execution of Keras that are tried."""


@dataclass(frozen=True)
class Try:
    """A parameter of a call that the program makes, and the value to try."""

    parameter: str
    """``"num_workers"``; :data:`deep500_timing._launch.tried.PARAMETERS` lists them."""
    value: int | bool
    call: str
    """The call that has it: ``"DataLoader"``."""
    changes: str = ""
    """Its other effects than speed; empty for none. One that changes results is tried on request only."""
    changes_results: bool = False

    @property
    def text(self) -> str:
        return self.call if self.parameter == "gc.freeze" else f"{self.parameter}={self.value}"


_FREEZE = Try("gc.freeze", True, "gc.freeze()")
_AUGMENTATION = "random numbers that a data set draws come from the workers"


def tries_of(finding: Finding, evidence: Evidence) -> list[Try]:
    """What may help against a finding, the most likely first."""
    rule = finding.rule
    if rule in ("waits-for-data", "between-epochs"):
        return _of_loader(evidence)
    if rule in ("too-many-threads", "cpu-contention"):
        return _of_threads(evidence)
    if rule == "copies" and "torch" in evidence.kinds:
        return [Try("pin_memory", True, "DataLoader")]
    if GC in (finding.cause, *finding.region[-1:]):
        return [_FREEZE]
    return _of_keras(evidence) if rule == "launch-bound" else []


def _of_threads(evidence: Evidence) -> list[Try]:
    # With other programs on the machine too: threads of this one that wait for each other make it worse.
    machine = evidence.machine
    if machine is None or not machine.cores or not evidence.has("torch"):
        return []
    cores = int(machine.cores)
    too_many = (machine.wanted or 0.0) >= _TOO_MANY * cores
    return [Try("num_threads", cores, "torch.set_num_threads", "sums may be rounded otherwise")] if too_many else []


def _of_collections(evidence: Evidence) -> list[Try]:
    step = evidence.step_node
    collected_s = sum(node.total_s or 0.0 for node in evidence.tree.named(GC))
    return [_FREEZE] if step is not None and collected_s >= _COLLECTED * (step.total_s or math.inf) else []


def _of_keras(evidence: Evidence) -> list[Try]:
    """What shortens a training of tiny steps."""
    step = evidence.step_node
    if evidence.fit is None or step is None or (step.median_s or 1.0) >= _SHORT_S:
        return []
    several = Try("steps_per_execution", _EXECUTIONS, "compile", f"callbacks see each {_EXECUTIONS}th batch")
    compiled = Try("jit_compile", True, "compile", "results are rounded otherwise", changes_results=True)
    return [several] if evidence.fit["backend"] == "torch" or evidence.fit["eager"] else [several, compiled]


def _of_loader(evidence: Evidence) -> list[Try]:
    rows, io, step = rows_of_workers(evidence), waiting_node(evidence), evidence.step_node
    if not rows:
        return []
    cores, there = max(int(rows[0]["cpus"]), 1), sum(row["worker"] >= 0 for row in rows)
    kept = [Try("persistent_workers", True, "DataLoader")] if there else []
    if io is None or step is None or not io.total_s or not step.total_s:
        return kept
    work_s = max(step.total_s - (io.total_s if BATCH in io.path[:-1] else 0.0), 1e-9)
    if making_s(rows) < io.total_s / io.count:
        return [Try("num_workers", 0, "DataLoader", _AUGMENTATION), *kept]
    worked_us = sum(float(row[part]) for row in rows for part in ("fetch", "collate", "put"))
    loading_s = worked_us / 1e6 if there else io.total_s
    count = min(math.ceil(loading_s / work_s), cores)
    more = [Try("num_workers", count, "DataLoader", _AUGMENTATION)] if count > there else []
    return [*more, *kept]


def data_of(finding: Finding, evidence: Evidence) -> dict[str, Any]:
    """A finding as JSON has it: its own fields, and the fixed keys for programs."""
    tries = tries_of(finding, evidence)
    first = tries[0] if tries else None
    places = evidence.places_in(finding.region, finding.steps or None) if finding.region else []
    line = next((place for place in places if ":" in place.file), None)
    file, _, number = line.file.rpartition(":") if line is not None else ("", "", "")
    remedy = {
        "what": finding.remedy,
        "parameter": None if first is None else first.parameter,
        "value": None if first is None else first.value,
        "can_try": first is not None,
    }
    where = {"file": file, "line": int(number), "function": line.name} if line is not None else None
    said = {name: value for name, value in asdict(finding).items() if name not in ("where", "cause", "remedy")}
    verify = "deep500-timing ab --steps 100 --rev HEAD -- COMMAND" if not tries else "deep500-timing try -- COMMAND"
    return said | {
        "on": finding.where,
        "where": where,
        "cause": finding.why or finding.cause,
        "remedy": remedy,
        "bound": finding.gain_share,
        "verify": verify,
    }


def to_try(findings: Sequence[Finding], evidence: Evidence) -> list[Try]:
    """The remedies to try in a run, each once: those of its findings first, then those that need no finding."""
    found = [one for finding in findings for one in tries_of(finding, evidence)]
    return list(dict.fromkeys([*found, *_of_collections(evidence), *_of_keras(evidence)]))
