"""The remedies that ``deep500-timing try`` can set from outside the program, by the findings of a run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from deep500_timing._base.names import BATCH
from deep500_timing._views.findings._data import making_s, rows_of_workers, waiting_node
from deep500_timing._views.findings._remedies import GC

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing._views.findings._evidence import Evidence
    from deep500_timing._views.findings._finding import Finding

_SHORT_S = 5e-3
"""A step of Keras that is shorter may be mostly the calls around it."""
_TOO_MANY = 1.25
"""Cores that the run wants for each that it has, from which on fewer threads are tried."""
_COLLECTED = 0.03
"""The share of the steps that collections take in them, without the longest, from which on they are to be avoided."""
_EXECUTIONS = 8
"""Batches in one execution of Keras that are tried."""
_IDLE = 0.25
"""The share of their time for which workers have nothing to do, from which on more room for batches is tried."""
_BOUND = 0.2
"""The share of the steps for which a device may be idle at most where its own work is tried to be made shorter."""


@dataclass(frozen=True)
class Try:
    """A parameter of a call that the program makes, and the value to try."""

    parameter: str
    """``"num_workers"``; :data:`deep500_timing._launch.tried.PARAMETERS` lists them."""
    value: int | bool | str
    call: str
    """The call that has it: ``"DataLoader"``."""
    changes: str = ""
    """Its other effects than speed; empty for none. One that changes results is tried on request only."""
    changes_results: bool = False

    @property
    def text(self) -> str:
        return self.call if self.parameter == "gc.freeze" else f"{self.parameter}={self.value}"


_WORK = ("fetch", "collate", "put")
_FREEZE = Try("gc.freeze", True, "gc.freeze()")
_AUGMENTATION = "random numbers that a data set draws come from the workers"
_KEEP = Try("persistent_workers", True, "DataLoader")
_ROOM = Try("prefetch_factor", 8, "DataLoader", "more batches wait in memory")
_PIN = Try("pin_memory", True, "DataLoader")
_MAP = Try("num_parallel_calls", "tf.data.AUTOTUNE", "Dataset.map", "random numbers in it come in another order")
_DDP = [
    Try("gradient_as_bucket_view", True, "DistributedDataParallel"),
    Try("bucket_cap_mb", 100, "DistributedDataParallel", "gradients are summed in another order"),
    Try("static_graph", True, "DistributedDataParallel", "each step must use the same parameters"),
]
_DEVICE = [
    Try("cudnn.benchmark", True, "torch.backends", "convolutions may be rounded otherwise"),
    Try("float32_matmul_precision", "high", "torch.set_float32_matmul_precision", "matrix products use TF32", True),
]


def tries_of(finding: Finding, evidence: Evidence) -> list[Try]:
    """What may help against a finding, the most likely first."""
    rule = finding.rule
    if rule == "waits-for-data" and evidence.kinds[:1] in (("tf.data",), ("tensorflow",)):
        return [_MAP]  # A prefetch at the end is tf.data's own default.
    if rule in ("waits-for-data", "between-epochs"):
        return _of_loader(finding, evidence)
    if rule in ("too-many-threads", "cpu-contention", "cpu-limit"):
        return _of_threads(evidence, _TOO_MANY if rule != "too-many-threads" else 0.0)
    if rule == "copies" and _has_device(evidence):
        return [_PIN]
    if rule == "exposed-communication" and evidence.has("torch"):
        return _DDP
    if GC in (finding.cause, *finding.region[-1:]):
        return [_FREEZE] if finding.region and BATCH not in finding.region else _of_collections(evidence)
    return _of_keras(evidence) if rule == "launch-bound" else []


def _has_device(evidence: Evidence) -> bool:
    return evidence.has("torch") and bool(evidence.about.devices)


def _cores(evidence: Evidence) -> int:
    """The processors that a rank may keep busy: of its job, within a container's limit, shared with the ranks there."""
    machine = evidence.machine
    if machine is None or not machine.cores:
        return 0
    beside = math.ceil(len(evidence.about.ranks) / max(len(evidence.about.hosts), 1))
    # Ranks that are bound to processors of their own do not share them.
    shared = (machine.of_machine or machine.cores) // max(beside, 1)
    return max(int(min(machine.cores, shared, machine.rates.get("limit_cores", math.inf))), 1)


def _of_threads(evidence: Evidence, least: float) -> list[Try]:
    # With other programs on the machine too: threads of this one that wait for each other make it worse.
    machine, cores = evidence.machine, _cores(evidence)
    if machine is None or not cores or not evidence.has("torch") or (machine.wanted or 0.0) < least * cores:
        return []
    return [Try("num_threads", cores, "torch.set_num_threads", "sums may be rounded otherwise")]


def _of_collections(evidence: Evidence) -> list[Try]:
    step, inside = evidence.step_node, [node for node in evidence.tree.named(GC) if BATCH in node.path]
    recurs_s = sum(node.total_s or 0.0 for node in inside) - max((node.max_s or 0.0 for node in inside), default=0.0)
    return [_FREEZE] if step is not None and recurs_s >= _COLLECTED * (step.total_s or math.inf) else []


def _of_device(evidence: Evidence) -> list[Try]:
    """What makes a device's own work shorter, where a step is that."""
    step, idle_s = evidence.step_node, evidence.idle_s
    is_bound = step is not None and idle_s is not None and idle_s <= _BOUND * (step.total_s or 0.0)
    return _DEVICE if is_bound and _has_device(evidence) else []


def _of_keras(evidence: Evidence) -> list[Try]:
    """What shortens a training of tiny steps."""
    step = evidence.step_node
    if evidence.fit is None or step is None or (step.median_s or 1.0) >= _SHORT_S:
        return []
    several = Try("steps_per_execution", _EXECUTIONS, "compile", f"callbacks see each {_EXECUTIONS}th batch")
    compiled = Try("jit_compile", True, "compile", "results are rounded otherwise", changes_results=True)
    return [several] if evidence.fit["backend"] == "torch" or evidence.fit["eager"] else [several, compiled]


def _of_loader(finding: Finding, evidence: Evidence) -> list[Try]:
    rows, io, step = rows_of_workers(evidence), waiting_node(evidence), evidence.step_node
    if not rows:
        return []
    there, waits = sum(row["worker"] >= 0 for row in rows), finding.rule == "waits-for-data"
    kept = [_KEEP] if there else []
    if io is None or step is None or not io.total_s or not step.total_s:
        return kept
    work_s = max(step.total_s - (io.total_s if BATCH in io.path[:-1] else 0.0), 1e-9)
    if making_s(rows) < io.total_s / io.count:
        return [Try("num_workers", 0, "DataLoader", _AUGMENTATION), *kept]
    worked_us, idle_us = (sum(float(row[part]) for row in rows for part in parts) for parts in (_WORK, ("idle",)))
    loading_s = worked_us / 1e6 if there else io.total_s
    count = min(math.ceil(loading_s / work_s), _cores(evidence) or int(rows[0]["cpus"]) or 1)
    more = [Try("num_workers", count, "DataLoader", _AUGMENTATION)] if count > there else []
    # A few long waits that do not begin an epoch, for workers that could make enough.
    is_uneven = waits and finding.steps and not finding.why and idle_us >= _IDLE * (idle_us + worked_us)
    room = [_ROOM] if there and is_uneven else []
    return [*more, *kept, *room, *([_PIN] if waits and _has_device(evidence) else [])]


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
    return list(dict.fromkeys([*found, *_of_collections(evidence), *_of_device(evidence), *_of_keras(evidence)]))
