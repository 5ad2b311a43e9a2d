"""Rules for causes outside the program: the machine, its limits, and its other users.

The training thread's wall clock is its time on a processor, its time of waiting for one, and its time blocked. What it
waited for a processor is no region's and no line's: these rules have it, and the others yield.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deep500_timing._distributed.verdict import BusyHost, Stragglers
from deep500_timing._views.findings._finding import WAITED, Finding, Rule, Yields, percent
from deep500_timing.runs._processor import ThreadTimes, machine_of

if TYPE_CHECKING:
    from deep500_timing._views.findings._evidence import Evidence, StepSeries

LEAST = 0.10
"""The share of the time in which the thread waits for a processor, or is stopped, from which on a run is disturbed."""
_STEAL, _LIMIT = 0.05, 0.05
_EXCESS = 0.25
"""Threads over the processors, as a share of these, from which on the process is in its own way."""
_MOST_OF_IT, _OWN_WAIT = 0.5, 0.4
_FAULTS, _SWAPPED, _READ_BYTES = 20.0, 50.0, 1e6
"""A second: major faults and swapped pages of a process that waits for memory, and bytes of one that reads."""
_LOW_CLOCK = 0.7
_READINGS_S = 0.05
"""Some readings of the thread's times: of a step that is as long, its own waits are known."""


def cause_of_waiting(evidence: Evidence) -> str:
    """The name of the rule that tells why the thread waited for a processor; empty if it hardly did."""
    whole, machine = evidence.processor, evidence.machine
    if whole is None or whole.waited < LEAST or machine is None:
        return ""
    rates, cores = machine.rates, machine.cores or 1
    if rates.get("throttled", 0.0) >= _LIMIT:
        return "cpu-limit"
    if rates.get("steal_cores", 0.0) >= _STEAL * (machine.of_machine or cores):
        return "steal"
    excess, has_all = (machine.wanted or 0.0) - cores, cores == machine.of_machine
    is_quiet = machine.others is not None and machine.others < LEAST * cores
    # Where the process may use some of the processors only, the neighbours may be on the others. Without any, it is its
    # own threads that wait for each other, be it in bursts.
    waits = machine.sum_of("process_waiting", "workers_waiting") or 0.0
    least = max(_EXCESS * cores, (machine.others or 0.0) if has_all else 0.0)
    if max(excess, waits * is_quiet) >= least:
        return "too-many-threads"
    # As many threads as processors, and a worker, wait a little for one another.
    return "" if is_quiet or (not has_all and excess >= _MOST_OF_IT * whole.waited * cores) else "cpu-contention"


def disturbance(evidence: Evidence) -> str:
    """For a heading: that the times of a run are not the program's alone; empty if it was not disturbed."""
    whole = evidence.processor if cause_of_waiting(evidence) else None
    return "" if whole is None else f"disturbed: {percent(whole.waited)} of the time without a processor"


def waiting(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """The thread waits for a processor, for the reason that has the rule's name."""
    whole, machine = evidence.processor, evidence.machine
    if whole is None or machine is None or cause_of_waiting(evidence) != rule.name:
        return
    rates, cores, remedy = machine.rates, machine.cores or 1, rule.remedy
    where = f"for {percent(whole.waited)} of the time the training thread waited for a processor"
    if rule.name == "cpu-limit":
        # What the kernel counts as throttled is summed over the processors: no share of the time.
        limit = f" of {rates['limit_cores']:.3g} cores" if "limit_cores" in rates else ""
        fact, where = f"The container's CPU limit{limit} stops this run: {where}", ""
    elif rule.name == "steal":
        fact = f"The host gives {rates['steal_cores']:.1f} of {machine.of_machine or cores} cores to other guests"
    elif rule.name == "too-many-threads":
        workers = machine.sum_of("workers_cores", "workers_waiting") or 0.0
        of_workers = f", {workers:.1f} of them for loader workers" if workers >= _EXCESS else ""
        of_all = f" of {machine.of_machine}" if cores < (machine.of_machine or cores) else ""
        wants = f"this run wants {machine.wanted:.1f} cores{of_workers}, and has {cores}{of_all}"
        in_bursts = f"at times this run wants more than its {cores} cores{of_all}"
        fact = f"Too many threads: {wants if (machine.wanted or 0.0) >= (1 + _EXCESS) * cores else in_bursts}"
        threads = next((text for name, text in _THREADS.items() if evidence.has(name)), "OMP_NUM_THREADS={}")
        remedy = ", ".join(filter(None, (of_all and _UNBIND, threads.format(cores), of_workers and "fewer workers")))
    else:
        fact, where = "; ".join(filter(None, (f"The machine is busy: {where}", machine.neighbours()))), ""
    cost_s = whole.waited * evidence.loop_of(evidence.whole_s)[0]  # it is not read all the time
    yield rule.found(evidence, fact, where=where, cost_s=cost_s, remedy=remedy)


def one_core(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """The process is bound to one of several processors, and the training thread needs all of it."""
    whole, machine = evidence.processor, evidence.machine
    if whole is None or machine is None or machine.cores != 1 or (machine.of_machine or 1) < 2:
        return
    if whole.ran_s >= rule.share * whole.wall_s and not cause_of_waiting(evidence):
        busy = percent(min(whole.ran_s / whole.wall_s, 1.0))
        fact = f"This run may use 1 of {machine.of_machine} cores, and its training thread computes {busy} of the time"
        yield rule.found(evidence, fact)


def swapping(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """The thread is blocked while the kernel brings pages of memory back from the disk."""
    whole, rates = evidence.processor, evidence.machine.rates if evidence.machine is not None else {}
    if whole is None or whole.blocked < rule.share or "major_faults" not in rates:
        return
    faults = rates["major_faults"]
    if faults >= _FAULTS or rates.get("swapped_pages", 0.0) >= _SWAPPED:
        stalled = min(rates.get("pressure_memory", 1.0) or rates.get("pressure_io", 1.0), whole.blocked)
        fact = f"The process waits for its memory to come from the disk: {faults:.0f} major faults a second"
        yield rule.found(evidence, fact, cost_s=stalled * whole.wall_s)


def disk_wait(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """The thread is blocked while the process reads what the page cache does not have."""
    whole, rates = evidence.processor, evidence.machine.rates if evidence.machine is not None else {}
    stalled = rates.get("pressure_io", rates.get("iowait_cores", 0.0))
    if whole is None or min(whole.blocked, stalled) < rule.share or rates.get("read_bytes", 0.0) < _READ_BYTES:
        return
    fact = f"For {percent(min(stalled, 1.0))} of the time something waited for the disk"
    where = f"this run reads {rates['read_bytes'] / 1e6:.3g} MB a second that are in no cache"
    yield rule.found(evidence, fact, where=where, cost_s=min(whole.blocked, stalled) * whole.wall_s)


def low_clock(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """The processors run below their clock although the thread computes."""
    whole, machine = evidence.processor, evidence.machine
    share = None if machine is None else machine.rates.get("clock_share")
    if whole is not None and share is not None and share < _LOW_CLOCK and whole.ran_s >= _MOST_OF_IT * whole.wall_s:
        yield rule.found(evidence, f"The processors run at {percent(share)} of their highest clock")


def is_waiting(
    evidence: Evidence, steps: StepSeries, slow: NDArray[np.intp], usual: NDArray[np.intp], *, at_random: bool = False
) -> bool:
    """Whether most of what some steps take longer than the usual ones is waiting for a processor.

    Of steps shorter than the time between two readings only the sum of their waits is known. Where nothing but chance
    makes steps slow (``at_random``), that sum is theirs.
    """
    if evidence.thread_times is None:
        return False
    ends_s = steps.starts_s + steps.durations_s
    _, waited = evidence.thread_times.between(steps.sessions, steps.starts_s, ends_s)
    # Of the first step the beginning may be unknown.
    slow, usual = (places[~np.isnan(waited[places])] for places in (slow, usual))
    if not len(slow) or not len(usual):
        return False
    excess_s = steps.durations_s[slow].sum() - len(slow) * np.median(steps.durations_s[usual])
    more_s = waited[slow].sum() - len(slow) * np.median(waited[usual])
    if at_random and np.median(steps.durations_s[slow]) < _READINGS_S:
        more_s = max(more_s, np.nansum(waited))
    return bool(more_s >= _OWN_WAIT * excess_s > 0)  # it spins while its helpers wait


def why_late(evidence: Evidence, found: Stragglers) -> BusyHost | None:
    """The latest rank's host, if its thread waits for a processor more than those of the other ranks; None if not."""
    run, steps, rank = evidence.run, evidence.steps, found.ranks[0]
    if run is None or steps is None:
        return None
    of_ranks = {one: ThreadTimes(run, one, evidence.thread, evidence.session) for one in evidence.ranks}
    waits = {one: times.whole.waited for one, times in of_ranks.items() if times}
    others = [waited for one, waited in waits.items() if one != rank]
    if rank not in waits or not others:
        return None
    more_s = (waits[rank] - float(np.median(others))) * float(np.median(steps.durations_s))
    if more_s < _MOST_OF_IT * found.lateness_s:
        return None
    machine = machine_of(run, rank, of_ranks[rank].longest[1:], evidence.session)
    return BusyHost(waits[rank], machine.others, machine.neighbours())


_THREADS = {
    "torch": "torch.set_num_threads({})",
    "tensorflow": "TF_NUM_INTRAOP_THREADS={}",
    "jax": "XLA_FLAGS=--xla_cpu_multi_thread_eigen=false",
}
"""By framework; TensorFlow and JAX have no threads of OpenMP."""
_UNBIND = "more cores (taskset, --cpus-per-task, --bind-to)"
_REMEDIES = {
    "cpu-limit": "raise the container's CPU limit, or use fewer threads",
    "steal": "another host, or dedicated processors",
    "too-many-threads": "",
    "cpu-contention": "run it on a quiet machine; its times are not the program's",
}
RULES = (
    *(Rule(name, waiting, LEAST, 10, "machine", remedy, "run") for name, remedy in _REMEDIES.items()),
    Rule("one-core", one_core, 0.8, 10, "machine", _UNBIND, needs="run"),
    Rule("swapping", swapping, 0.10, 10, "machine", "more memory, or less of it in use", "run", of_run=True),
    Rule("disk-wait", disk_wait, 0.10, 10, "machine", "copy the data to a local disk or to memory", "run", of_run=True),
    Rule("low-clock", low_clock, _LOW_CLOCK, 10, "machine", "cooling, power limit, governor", needs="run"),
)
TO_MACHINE: dict[str, Yields] = dict.fromkeys(_REMEDIES, lambda own, _: own.kind == WAITED)
"""For ``yields_to`` of a rule that marks its findings :data:`WAITED`."""
