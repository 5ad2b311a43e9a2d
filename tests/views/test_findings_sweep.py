"""Findings over the size of their fault: each rule speaks from its threshold on, however large the fault becomes."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from made_runs import MadeMachine, cores, made_on_device, made_rank

from deep500_timing import Timer
from deep500_timing._command._app import main
from deep500_timing._views.findings import RULES, evidence_of, find, verdict
from deep500_timing._views.findings._series import period_of, shift_of
from deep500_timing._views.reports import report_of_run, report_of_snapshot, tree_of_snapshot
from deep500_timing.runs import Run
from deep500_timing.testing import ManualClock

MS = 1e-3
STEPS, EPOCHS = 240, 3
PARTS = {"IO": 0.1, "FORWARD": 3.0, "BACKWARD": 5.9, "optimizer": 1.0}
STEP_MS = sum(PARTS.values())
SIZES = (0.04, 0.12, 0.17, 0.25, 0.36, 0.6)


def of(share, whole=1.0):
    """What must be added to a whole so that it is this share of the sum."""
    return whole * share / (1 - share)


class Loop:
    """A loop of 3 epochs of 80 steps of 10 ms. A subclass plants one fault; times are in ms."""

    ranks, in_epochs = 1, True
    usual_ms = 0.0
    """What a step has of the cause without the fault: the finding may count that too."""

    def __init__(self, share):
        self.share = share
        self.each = of(share, STEP_MS)
        self.all = of(share, STEP_MS * STEPS)

    def saved_s(self, whole_s, calm_s):
        """What the run would save without the cause, of its time with the fault and without."""
        return whole_s - calm_s

    def _in_step(self, step, rank):
        """A part's extra time, by its name; ``""`` is time in no region of the step."""
        return {}

    def _after_step(self, made, step, rank):
        """What lies between two steps."""

    def _after_epoch(self, made, epoch, rank):
        """What lies at the end of an epoch, in it."""

    def _after_all(self, made, epoch):
        """What lies between two epochs."""

    def _transfer(self, step):
        """A collective operation's time."""
        return 0.1

    def __call__(self, folder):
        """Write the run."""
        dice = random.Random(1)
        more = [[self._in_step(step, rank) for rank in range(self.ranks)] for step in range(STEPS)]
        noise = [
            [{name: dice.lognormvariate(0, 0.02) for name in PARTS} for _ in range(self.ranks)] for _ in range(STEPS)
        ]
        for rank in range(self.ranks):
            with made_rank(folder, rank) as made:
                self.tmr = made.tmr
                for step in range(STEPS):
                    if step % (STEPS // EPOCHS) == 0 and self.in_epochs:
                        epoch = made.tmr.region("EPOCH")
                        epoch.__enter__()
                    with made.region("BATCH"):
                        extra = dict(more[step][rank])
                        for name, took in PARTS.items():
                            made.spend(name, (took * noise[step][rank][name] + extra.pop(name, 0)) * MS)
                        rest = extra.pop("", 0)
                        for name, took in extra.items():
                            made.spend(name, took * MS)
                        made.wait(rest * MS)
                        if self.ranks > 1:
                            own = [
                                sum(PARTS[name] * noise[step][r][name] for name in PARTS) + sum(more[step][r].values())
                                for r in range(self.ranks)
                            ]
                            self._meet(made, step, max(own) - own[rank])
                    self._after_step(made, step, rank)
                    if step % (STEPS // EPOCHS) == STEPS // EPOCHS - 1:
                        self._after_epoch(made, step // (STEPS // EPOCHS), rank)
                        if self.in_epochs:
                            epoch.__exit__(None, None, None)
                        self._after_all(made, step // (STEPS // EPOCHS))

    def _meet(self, made, step, wait):
        """Wait for the last rank, and exchange."""
        start = made.clock.now_ns()
        made.spend("COMM", (wait + self._transfer(step)) * MS)
        made.log.collective("all_reduce", start, made.clock.now_ns(), sequence=step, nbytes=1 << 20)


class Unnamed(Loop):
    """Part of each step lies in no region."""

    def _in_step(self, step, rank):
        return {"": self.each}


class Dominant(Loop):
    """Gradient clipping takes part of each step."""

    def _in_step(self, step, rank):
        return {"clip": self.each}


class Collected(Loop):
    """Garbage is collected in each step."""

    def _in_step(self, step, rank):
        return {"GC": self.each}


class SlowData(Loop):
    """Each step waits for data."""

    usual_ms = PARTS["IO"]

    def _in_step(self, step, rank):
        return {"IO": self.each}


class EpochStarts(SlowData):
    """The first step of each epoch waits for data."""

    def _in_step(self, step, rank):
        return {"IO": self.all / EPOCHS} if step % (STEPS // EPOCHS) == 0 else {}


class Validation(Loop):
    """Each epoch ends with a validation."""

    def _after_epoch(self, made, epoch, rank):
        if self.share:
            made.spend("VALIDATION", self.all / EPOCHS * MS)


class EpochEnds(Loop):
    """Each epoch ends with a region that is no validation."""

    def _after_epoch(self, made, epoch, rank):
        if self.share:
            made.spend("EPOCH (end)", self.all / EPOCHS * MS)


class Checkpoint(Loop):
    """A checkpoint every 40 steps, in a region."""

    def _after_step(self, made, step, rank):
        if step % 40 == 39 and self.share:
            made.spend("checkpoint", self.all / 6 * MS)


class Restarted(Loop):
    """A second start of the same length that computes a share of the first one's steps again."""

    def saved_s(self, whole_s, calm_s):
        """What is computed again."""
        return min(round(2 * self.share * STEPS), STEPS) * STEP_MS * MS

    def __call__(self, folder):
        """Write both starts."""
        for first in (0, STEPS - round(2 * self.share * STEPS)):
            with made_rank(folder, 0) as made:
                for step in range(first, first + STEPS):
                    made.tmr.step(step)
                    with made.region("BATCH"):
                        for name, took in PARTS.items():
                            made.spend(name, took * MS)


class Pauses(Loop):
    """A pause every 40 steps, in no region."""

    def _after_step(self, made, step, rank):
        if step % 40 == 39:
            made.wait(self.all / 6 * MS)


class PauseEach(Loop):
    """A pause after each step, in no region."""

    def _after_step(self, made, step, rank):
        made.wait(self.each * MS)


class OutsideAll(Loop):
    """Time between the epochs, in no region at all."""

    def _after_all(self, made, epoch):
        if epoch < EPOCHS - 1:
            made.wait(self.all / (EPOCHS - 1) * MS)


class NoEpochs(PauseEach):
    """Pauses between the steps, with no region around them."""

    in_epochs = False


class Recompiled(Loop):
    """A function is compiled again in twelve steps."""

    slow = range(10, STEPS, 20)

    def _in_step(self, step, rank):
        return {"FORWARD": self.all / len(self.slow)} if step in self.slow else {}

    def _after_step(self, made, step, rank):
        if step == 0:
            made.log.declare(
                "compilations", unix_us="int", dur_us="int", compile_id="name", frame="name", reason="name"
            )
        if step in self.slow and self.share:
            took_us = int(self.all / len(self.slow) * 1000)
            made.log.add("compilations", (step, took_us, f"0/{step}", "f (train.py:3)", "size of x"))


class RecompiledAtFirst(Recompiled):
    """A function is compiled again in each of the first 75 steps, until it has met every shape."""

    slow = range(1, 75)


class Eager(Loop):
    """A model of Keras runs each operation from Python: all of each step is its cost, whatever the size."""

    def _after_step(self, made, step, rank):
        if step == 0:
            made.log.declare("fits", unix_us="int", backend="name", data="name", eager="int")
            made.log.add("fits", (0, "tensorflow", "arrays", int(self.share > 0)))


class BetweenSteps(Loop):
    """Logging takes part of each step, in a row that `deep500-timing run` adds."""

    def _in_step(self, step, rank):
        return {"between steps": self.each}


class Shift(Loop):
    """From step 120 on FORWARD takes longer: the size is the share of the later steps."""

    def _in_step(self, step, rank):
        return {"FORWARD": self.each} if step >= 120 else {}


class Stretch(Loop):
    """Steps 100 to 139 take longer, and then as before."""

    def _in_step(self, step, rank):
        return {"BACKWARD": self.each} if 100 <= step < 140 else {}


class Growing(Loop):
    """A list grows: the rest of each step does, to this share of the last one."""

    def _in_step(self, step, rank):
        return {"FORWARD": self.each * step / STEPS}


class Spikes(Loop):
    """Every 27th step pauses, in no region of it."""

    def _in_step(self, step, rank):
        return {"": self.all / 8} if step % 27 == 26 else {}


class Start(Loop):
    """The first two steps compile."""

    def _in_step(self, step, rank):
        return {"FORWARD": self.all / 2} if step < 2 else {}


class Exchange(Loop):
    """Two ranks exchange gradients for part of each step."""

    ranks, usual_ms = 2, 0.1

    def _transfer(self, step):
        return 0.1 + self.each


class Late(Loop):
    """Rank 1 computes longer, and rank 0 waits for it."""

    ranks = 2

    def _in_step(self, step, rank):
        return {"BACKWARD": self.each} if rank == 1 else {}


class ByTurns(Loop):
    """In each step another of four ranks comes late."""

    ranks = 4

    def saved_s(self, whole_s, calm_s):
        """What the work takes less if each rank does a quarter of it."""
        return (whole_s - calm_s) * (1 - 1 / self.ranks)

    def _in_step(self, step, rank):
        return {"FORWARD": self.each} if random.Random(step).randrange(4) == rank else {}


class Growth(Loop):
    """Memory grows by this share of its last value."""

    def _after_step(self, made, step, rank):
        made.log.sample(
            "process.rss_bytes", 2e9 + of(self.share, 2e9) * step / STEPS + random.Random(step).gauss(0, 1e6)
        )


class Throttled(Loop):
    """The driver names a reason for lower clocks in this share of the samples."""

    def _after_step(self, made, step, rank):
        made.log.sample("gpu0.throttled_hw_thermal", float(step < self.share * STEPS))


class Lost(Loop):
    """So many intervals fail."""

    def _after_step(self, made, step, rank):
        if step < self.share * STEPS:
            with pytest.raises(OSError, match="disk"), made.region("save"):
                raise OSError("disk")


class Waiting(Loop):
    """Of each step the thread waits so long for a processor: the neighbours have them."""

    part, processors = "waited_s", (2, 2)

    def __call__(self, folder):
        """Write the run of that machine."""
        with cores(*self.processors):
            super().__call__(folder)

    def _in_step(self, step, rank):
        return {"BACKWARD": self.each}

    def _after_step(self, made, step, rank):
        if step == 0:
            self.machine = MadeMachine(made, **self.rates_of(self.share))
        else:
            self.machine.read(**{self.part: self.each * MS})

    def rates_of(self, share):
        """The columns of the table of the machine."""
        return {"busy_cores": 2, "process_cores": 0.4, "process_waiting": 0.5, "workers_cores": 0, "workers_waiting": 0}


class Crowded(Waiting):
    """The run's own threads want more processors than there are."""

    def rates_of(self, share):
        """Six threads on two processors."""
        return super().rates_of(share) | {"process_cores": 1.9, "process_waiting": 4.0}


class Bound(Waiting):
    """The process is bound to one of two processors, and computes for this share of the time."""

    part, processors = "blocked_s", (1, 2)

    def _in_step(self, step, rank):
        return {}

    def _after_step(self, made, step, rank):
        self.each = (1 - self.share) * STEP_MS
        super()._after_step(made, step, rank)


class Limited(Waiting):
    """The container's limit stops the process for this share."""

    def rates_of(self, share):
        """Throttled for this share."""
        return super().rates_of(share) | {"throttled": share, "limit_cores": 1.5}


class Stolen(Waiting):
    """The host gives this share of the processors to others."""

    def rates_of(self, share):
        """Stolen by this share of two."""
        return super().rates_of(share) | {"steal_cores": 2 * share}


class Paging(Waiting):
    """The thread is blocked for this share while its memory comes from the disk."""

    part = "blocked_s"

    def rates_of(self, share):
        """Major faults with the share."""
        return super().rates_of(share) | {"major_faults": 1000 * share, "pressure_memory": share}


class Reading(Paging):
    """The thread is blocked for this share while data come from the disk."""

    def rates_of(self, share):
        """Reads with the share."""
        return super().rates_of(share) | {"pressure_io": share, "read_bytes": 1e8 * share}


class Slowed(Waiting):
    """The clock is this share below its highest."""

    def _in_step(self, step, rank):
        return {}

    def _after_step(self, made, step, rank):
        self.each = 0.0
        super()._after_step(made, step, rank)

    def rates_of(self, share):
        """A clock."""
        return super().rates_of(share) | {"clock_share": 1 - share}


class Device:
    """Steps with times on a device: what each part takes on the CPU and there, in ms, by the size of the fault."""

    def __init__(self, parts):
        self.parts = parts

    def __call__(self, share):
        """The run's writer."""
        return lambda folder: made_on_device(folder, 60, self.parts(share))


def idle(share):
    """The CPU takes longer than the device."""
    return {"FORWARD": (40, 40 * (1 - share)), "BACKWARD": (60, 60 * (1 - share))}


def copying(share):
    """A copy takes part of the step."""
    copy = {"copy": (of(share, 100), of(share, 100))} if share else {}
    return {**copy, "FORWARD": (20, 40), "BACKWARD": (30, 60)}


def synchronizing(share):
    """The CPU waits for the device in one region, and runs ahead in the other."""
    waits = {"loss": (of(share, 10), of(share, 10))} if share else {}
    return {"FORWARD": (10, 50), **waits}


SWEEPS = {
    "unnamed": (Unnamed, 0.2),
    "unnamed, between the steps": (PauseEach, 0.2),
    "dominant-region": (Dominant, 0.4),
    "dominant-region, between two events": (BetweenSteps, 0.2),
    "dominant-region, collections": (Collected, 0.1),
    "waits-for-data": (SlowData, 0.1),
    "waits-for-data, at each epoch": (EpochStarts, 0.15),
    "outside-steps, validation": (Validation, 0.2),
    "outside-steps, checkpoint": (Checkpoint, 0.1),
    "outside-steps, pauses": (Pauses, 0.05),
    "outside-steps, no region": (NoEpochs, 0.2),
    "between-epochs": (OutsideAll, 0.05),
    "outside-steps, at each epoch's end": (EpochEnds, 0.1),
    "recompilation": (Recompiled, 0.02),
    "recompilation, each step at first": (RecompiledAtFirst, 0.02),
    "runs-eagerly": (Eager, 0.0),
    "level-shift": (Shift, 0.15),
    "level-shift, for a while": (Stretch, 0.15),
    "drift": (Growing, 0.05),
    "spikes": (Spikes, 0.05),
    "warm-up": (Start, 0.1),
    "exposed-communication": (Exchange, 0.1),
    "late-rank": (Late, 0.03),
    "waits-for-ranks": (ByTurns, 0.3),
    "memory-grows": (Growth, 0.1),
    "throttled": (Throttled, 0.05),
    "lost": (Lost, 0.01),
    "goodput": (Restarted, 0.1),
    "launch-bound": (Device(idle), 0.2),
    "copies": (Device(copying), 0.1),
    "cpu-waits-for-gpu": (Device(synchronizing), 0.1),
    "cpu-contention": (Waiting, 0.1),
    "too-many-threads": (Crowded, 0.1),
    "one-core": (Bound, 0.78),
    "cpu-limit": (Limited, 0.1),
    "steal": (Stolen, 0.1),
    "swapping": (Paging, 0.1),
    "disk-wait": (Reading, 0.1),
    "low-clock": (Slowed, 0.3),
}
"""For each fault its loop, and the size from which on it must be found; nothing is found of a fault of size 0."""
ALONE = {
    "memory-grows",
    "throttled",
    "lost",
    "launch-bound",
    "copies",
    "cpu-waits-for-gpu",
    "recompilation",
    "runs-eagerly",
    "low-clock",
    "one-core",
}
"""Faults with a cost that differs from their size."""
UNBOUNDED = {"memory-grows", "throttled", "lost", "runs-eagerly", "low-clock", "one-core"}
"""What they cost is unknown."""

IN_TREE = (Unnamed, Dominant, Collected, SlowData, EpochStarts, Validation, Checkpoint, PauseEach, Start)
"""The faults that a table without a run shows."""


def test_every_rule_has_a_sweep():
    """No rule is tested at one point alone."""
    assert set(RULES) == {name.partition(",")[0] for name in SWEEPS}


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEPS)
def test_a_fault_is_found_from_its_threshold_on(tmp_path, connection, name):
    """Silent without the fault, spoken from the threshold to 95 %, and among the first two where it costs most.

    Of the tree, the table of one process says the same as the run.
    """
    kind, threshold = SWEEPS[name]
    rule = name.partition(",")[0]
    wrong, calm_s = [], 0.0
    # Without it, around the threshold, and near all of the time.
    below = [size for size in SIZES if size < 0.8 * threshold][-1:]
    above = [size for size in SIZES if size >= 1.2 * threshold][:1]
    for share in (0, *below, *above, 0.95):
        folder = tmp_path / f"{share}"
        loop = kind(share)
        loop(folder)
        with Run.open(folder, engine=connection) as run:
            evidence = evidence_of(run)
            found = find(evidence)
            calm = verdict(evidence).text
        rules = [finding.rule for finding in found]
        said = [finding.text for finding in found] or [calm]
        if share == 0:
            right = rule not in rules if name in ALONE else not found
        elif share >= 1.2 * threshold:
            right = rule in (rules if name in ALONE else rules[:2])
        else:
            right = share >= 0.8 * threshold or rule not in rules
        if share == 0:
            calm_s = evidence.whole_s
        elif isinstance(loop, Loop) and rule not in UNBOUNDED:
            right = right and are_bounds(loop, found, rule, evidence.whole_s, calm_s)
        if not right or any("nan" in text or "inf" in text for text in said):
            wrong.append((share, said))
        if kind in IN_TREE:
            report = report_of_snapshot(loop.tmr.snapshot(places=True))
            of_run = set(rules) - {"spikes", "level-shift", "drift", "between-epochs"}
            of_table = {finding.rule for finding in report.findings}
            if kind is EpochStarts:
                of_table.discard("warm-up")  # that the first step waits for data as well, only a run tells
            assert of_table == of_run or (kind is Start and not of_table)
            # Where no rule speaks, a run is said to know more.
            assert report.findings or "only a run tells" in report.verdict
    assert [] == wrong


def are_bounds(loop, found, rule, whole_s, calm_s):
    """Whether what is said to be saved at most is no less than the cause saves, and no more than it costs, to 2 %."""
    saved_s = loop.saved_s(whole_s, calm_s)
    cost_s = max(saved_s, whole_s - calm_s) + loop.usual_ms * MS * STEPS
    gains = [one.gain_s for one in found if one.gain_s is not None]
    own = [one.gain_s for one in found if one.rule == rule]
    return all(gain_s <= 1.02 * cost_s for gain_s in gains) and (not own or max(own) >= 0.98 * saved_s)


class LateHost(Late):
    """Rank 1 is late because it waits for a processor."""

    def _after_step(self, made, step, rank):
        if step == 0:
            self.machine = MadeMachine(made, busy_cores=1.8, process_cores=0.5, workers_cores=0.0)
        else:
            self.machine.read(self.each * MS if rank == 1 else 0.0)


@pytest.mark.parametrize("kind", [Late, LateHost])
def test_a_rank_is_late_because_of_its_host(tmp_path, connection, kind, capsys):
    """Where its lateness is waiting for a processor, its host is named, and no region."""
    with cores(2):
        kind(0.3)(tmp_path)
    with Run.open(tmp_path, engine=connection) as run:
        [said] = [finding.text for finding in find(run) if finding.rule == "late-rank"]
    assert 0 == main(["stragglers", str(tmp_path)])
    told = capsys.readouterr().out
    assert ("Rank 1 is late because of its host: its thread waited" in told) == (kind is LateHost)
    cause = "its thread waited for a processor for 30 % of the time; other processes use 1.3 of 2 cores."
    assert said.endswith(cause) == (kind is LateHost)
    assert ("BACKWARD" in said) == ("its BACKWARD" in told) == (kind is Late)
    assert 0 == main(["stragglers", str(tmp_path), "--json"])
    host = json.loads(capsys.readouterr().out)["busy_host"]
    if kind is Late:
        assert host is None
    else:
        assert "other processes use 1.3 of 2 cores" == host["neighbours_use"]
        assert (pytest.approx(0.3, abs=0.01), pytest.approx(1.3)) == (host["waited"], host["neighbours_cores"])


@pytest.mark.parametrize("before_s", [0.0, 3.0, 30.0])
def test_waiting_before_the_first_step_is_bounded_by_the_run(tmp_path, connection, before_s):
    """The thread waits for 40 % of the time, and no more can be saved, however much of it is start-up."""
    with cores(2), made_rank(tmp_path, started_s=0.0) as made:
        machine = MadeMachine(made, busy_cores=2, process_cores=0.5, workers_cores=0, workers_waiting=0)
        for step in range(41):
            if step:
                with made.region("BATCH"):
                    made.spend("FORWARD", 10 * MS)
            else:
                made.spend("read", before_s)
            machine.read(waited_s=0.4 * (made.clock.now_ns() - machine.last_ns) / 1e9)
    with Run.open(tmp_path, engine=connection) as run:
        [one] = [one for one in find(run) if one.rule == "cpu-contention"]
    assert one.gain_share == pytest.approx(0.4, abs=0.01)


@pytest.mark.parametrize(("before_s", "unread"), [(0.1, 0), (3.0, 0), (300.0, 0), (3.0, 20)])
def test_waiting_that_is_read_for_a_part_of_the_run_is_bounded_by_its_share(tmp_path, connection, before_s, unread):
    """Neither the start-up nor the last steps are read: the bound is what the sentence says, of the training loop."""
    with cores(2), made_rank(tmp_path) as made:
        made.spend("read", before_s)
        machine = MadeMachine(made, busy_cores=2, process_cores=0.5, workers_cores=0, workers_waiting=0)
        for step in range(40):
            with made.region("BATCH"):
                made.spend("FORWARD", 10 * MS)
            if step < 40 - unread:
                machine.read(waited_s=4 * MS)
    with Run.open(tmp_path, engine=connection) as run:
        [one] = [one for one in find(run) if one.rule == "cpu-contention"]
    assert one.gain_share == pytest.approx(0.4, abs=0.01)


@pytest.mark.parametrize(("most", "told"), [(0.08, set()), (0.15, {"drift"})])
def test_a_little_waiting_that_grows_is_no_drift(tmp_path, connection, most, told):
    """What would be no disturbance in each step is none either where it comes by and by."""
    with cores(2), made_rank(tmp_path) as made:
        machine = MadeMachine(made)
        for step in range(120):
            waits_s = most * step / 1200
            with made.region("BATCH"):
                made.spend("FORWARD", 100 * MS + waits_s)
            machine.read(waits_s)
    with Run.open(tmp_path, engine=connection) as run:
        assert told == {finding.rule for finding in find(run)}


def test_recompiled_first_steps_are_not_blamed_on_the_machine(tmp_path, connection):
    """The recompilations explain why the first 75 steps are slow; no second finding guesses at the machine's load."""
    RecompiledAtFirst(0.7)(tmp_path)
    with Run.open(tmp_path, engine=connection) as run:
        found = find(run)
    assert found[0].rule == "recompilation"
    assert not [finding.text for finding in found if "what else ran" in finding.text]


def test_a_gain_is_no_more_than_the_idle_device(tmp_path, connection):
    """Less work of the CPU saves nothing while the device is busy; alone it saves at most its time."""
    parts = {"FORWARD": (10, 60), "BACKWARD": (12, 70), "IO": (30, 0)}
    Device(lambda _: parts)(0)(tmp_path / "device")
    SlowData(0.5)(tmp_path / "cpu")
    with Run.open(tmp_path / "device", engine=connection) as run:
        [on_device] = [finding for finding in find(run) if finding.rule == "waits-for-data"]
        idle_s = evidence_of(run).idle_s
    with Run.open(tmp_path / "cpu", engine=connection) as run:
        [on_cpu] = [finding for finding in find(run) if finding.rule == "waits-for-data"]
    assert idle_s is not None
    assert on_device.gain_s == pytest.approx(idle_s)
    assert on_device.cost_s is not None
    assert on_device.cost_s > idle_s
    assert on_cpu.gain_s == pytest.approx(on_cpu.cost_s)
    assert on_cpu.help.startswith("saves at most 50 %; more workers")


@pytest.mark.parametrize("share", [0, *SIZES, 0.95])
def test_a_step_without_regions_is_never_calm(share):
    """An undivided step is not praised: BATCH alone, or with IO alone as in Keras."""
    for wait in (False, True):
        clock = ManualClock()
        tmr = Timer(clock=clock)
        for _ in range(40):
            with tmr.region("BATCH"):
                if wait:
                    with tmr.region("IO"):
                        clock.advance(0.0001)
                clock.advance(0.01)
            clock.advance(of(share, 0.01))
        tree = tree_of_snapshot(tmr.snapshot(places=True))
        assert [] == find(tree)
        said = verdict(evidence_of(tree)).text
        assert said.startswith("No finding: training is 100 % of the timed time; BATCH is not divided into regions")


def test_without_batch_the_shares_are_said():
    """One's own loop without BATCH learns where its time went, and which name the rules need."""
    clock = ManualClock()
    tmr = Timer(clock=clock)
    for _ in range(50):
        for name, took in (("env", 6), ("act", 3), ("learn", 1)):
            with tmr.region(name):
                clock.advance(took * MS)
    said = verdict(evidence_of(tree_of_snapshot(tmr.snapshot(places=True)))).text
    of = "Of the timed time: env 60 %, act 30 %, learn 10 %."
    assert said == f"No finding: most need steps, in regions named BATCH. {of}"


def test_steady_waits_do_not_grow(tmp_path, connection):
    """Random waits, long ones at random, and waits that shrink are no growth; waits that grow are."""

    class Waits(Loop):
        def __init__(self, wait, seed):
            super().__init__(0)
            self.wait, self.seed = wait, seed

        def _in_step(self, step, rank):
            return {"IO": self.wait(random.Random(self.seed + step), step)}

    def said(name, wait):
        grow = []
        for seed in range(4):
            Waits(wait, 1000 * seed)(tmp_path / f"{name}{seed}")
            with Run.open(tmp_path / f"{name}{seed}", engine=connection) as run:
                texts = {finding.rule: finding.text for finding in find(run)}
            assert "waits-for-data" in texts
            grow.append("IO goes from" in texts.get("drift", ""))
        return grow

    assert [False] * 4 == said("exponential", lambda dice, step: dice.expovariate(0.1))
    assert [False] * 4 == said("stalls", lambda dice, step: 250 if dice.random() < 0.04 else 1)
    shrinking = [False] * 4
    assert shrinking == said("shrinking", lambda dice, step: 250 if step % 80 == 0 else (6, 4, 3)[step // 80])
    assert [True] * 4 == said("growing", lambda dice, step: 2 + 10 * step / STEPS + dice.expovariate(1))


def test_a_rule_that_fails_is_left_out(tmp_path, connection, monkeypatch):
    """One line says so; the table and the other findings are there."""

    def fail(rule, evidence):
        raise IndexError("index 0 is out of bounds")

    monkeypatch.setitem(RULES, "late-rank", replace(RULES["late-rank"], judge=fail))
    SlowData(0.5)(tmp_path / "run")
    with (
        Run.open(tmp_path / "run", engine=connection) as run,
        pytest.warns(UserWarning, match="The rule 'late-rank' of the findings failed"),
    ):
        report = report_of_run(run)
    assert ["waits-for-data"] == [finding.rule for finding in report.findings]
    assert ("left out", "the rule late-rank: IndexError: index 0 is out of bounds") in report.notes


def _first(loop, folder, connection):
    loop(folder)
    with Run.open(folder, engine=connection) as run:
        return [finding.text for finding in find(run)], str(run.why())


class OfRankThree(Loop):
    """Four ranks that meet in each step; the fault is on rank 3."""

    ranks = 4

    def __init__(self, in_step):
        super().__init__(0)
        self.of_three = in_step

    def _in_step(self, step, rank):
        return self.of_three(step) if rank == 3 else {}


def test_spikes_of_another_rank_are_its_own(tmp_path, connection):
    """The others wait in COMM for rank 3: its IO is the cause, not their wait."""
    (text, *_), why = _first(OfRankThree(lambda step: {"IO": 100} if step % 50 == 40 else {}), tmp_path, connection)
    assert text.startswith("IO is 15 % of BATCH on rank 3: 4 of 240 steps, every 50 steps, wait 100 ms for data")
    assert "on rank 3: IO took 100" in why


def test_the_growth_of_another_rank_is_its_own(tmp_path, connection):
    """BACKWARD of rank 3 grows, and so does the wait of the others."""
    texts, _ = _first(OfRankThree(lambda step: {"BACKWARD": step / 40}), tmp_path, connection)
    (drift,) = [text for text in texts if text.startswith("Steps become")]
    assert "BACKWARD on rank 3 goes from " in drift


class Saves(OfRankThree):
    """Rank 3 pauses before every 50th step, in a region or in none, and the others wait for it in COMM."""

    name = ""

    def __call__(self, folder):
        """Write the run."""
        for rank in range(4):
            with made_rank(folder, rank) as made:
                for step in range(STEPS):
                    if step % 50 == 40 and rank == 3 and self.name:
                        made.spend(self.name, 2.0)
                    elif step % 50 == 40 and rank == 3:
                        made.wait(2.0)
                    with made.region("BATCH"):
                        made.spend("FORWARD", 0.01)
                        self._meet(made, step, 2000 if step % 50 == 40 and rank != 3 else 0)


@pytest.mark.parametrize(("name", "said"), [("", "the time between the steps"), ("checkpoint", "checkpoint")])
def test_a_pause_of_one_rank_before_its_step(tmp_path, connection, name, said):
    """Why looks at what lies between the steps, on every rank."""
    loop = Saves(lambda step: {})
    loop.name = name
    texts, why = _first(loop, tmp_path, connection)
    assert texts[0].endswith(f"every 50 steps: mostly in {said} on rank 3.")
    assert f"on rank 3: {said} took 2.000 s" in why
    assert "every 50 steps" in why


def test_a_wait_is_no_transfer(tmp_path, connection):
    """Of the waits for a late rank nothing is said as communication, and its rate is that of the transfer."""
    texts, _ = _first(Late(0.15), tmp_path / "late", connection)
    assert texts[0].startswith("Rank 1 is late at ")
    assert "Communication" not in " ".join(texts)

    class Both(Late):
        def _transfer(self, step):
            return 4.0

    texts, _ = _first(Both(0.3), tmp_path / "both", connection)
    (said,) = [text for text in texts if text.startswith("Communication")]
    assert said.endswith("4.00 ms a step, 240 times all_reduce of 1.00 MiB on average, 250.00 MiB/s.")


def test_work_that_waits_inside_is_no_imbalance(tmp_path, connection):
    """Rank 0 waits for rank 1 inside its BACKWARD: its own time there is the same, and it is not named."""
    for rank in range(2):
        with made_rank(tmp_path / "run", rank) as made:
            dice = random.Random(3)
            for step in range(100):
                late = 8 * dice.lognormvariate(0, 0.1)
                with made.region("BATCH"):
                    made.spend("IO", (1 + late * (rank == 1)) * MS)
                    with made.region("BACKWARD"):
                        made.wait(10 * MS)
                        start = made.clock.now_ns()
                        made.wait((0.1 + late * (rank == 0)) * MS)
                        made.log.collective("all_reduce", start, made.clock.now_ns(), sequence=step)
    with Run.open(tmp_path / "run", engine=connection) as run:
        found = find(run)
    assert [1] * len(found) == [finding.rank for finding in found]
    assert {"late-rank", "waits-for-data"} == {finding.rule for finding in found}
    waits = next(finding for finding in found if finding.rule == "waits-for-data")
    assert "of BATCH on rank 1: the loop waits for data" in waits.text


def test_pauses_are_no_warm_up(tmp_path, connection):
    """Where pauses go on all through the run, the first of them do not make a start."""

    class Collections(Loop):
        def _in_step(self, step, rank):
            return {"": 65 if step % (4 if step < 80 else 40) == 3 else 0}

    texts, _ = _first(Collections(0), tmp_path, connection)
    assert "warm-up" not in " ".join(texts)
    assert "mostly in the rest of BATCH" in " ".join(texts)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([26, 53, 80, 107], "every 27 steps"),
        ([10, 49, 99, 149, 199, 230], "4 of them every 50 steps"),
        ([79, 80, 81], "one after the other"),
        ([3, 7, 30], ""),
        ([176, 177, 181, 186, 190], ""),
        ([5, 10], ""),
    ],
)
def test_a_period_is_found_among_others(numbers, said):
    """Most steps must lie on it, and most of its places must be slow."""
    assert said == period_of(numbers, numbers[-1])


def test_many_slow_steps_are_no_start(tmp_path, connection):
    """A slow first half is named as one: another process may have been the cause."""

    class Busy(Loop):
        def _in_step(self, step, rank):
            return {"BACKWARD": 20} if step < 100 else {}

    Busy(0)(tmp_path / "run")
    with Run.open(tmp_path / "run", engine=connection) as run:
        [found] = find(run)
    assert found.text == "Steps take 200 % longer until step 99, 30.0 ms instead of 10.0 ms."


def test_a_shift_ends_where_it_ends():
    """The stretch of higher values to the step; a slope, noise and a slow start are no shift."""
    dice = np.random.default_rng(0)
    values = np.where((np.arange(400) >= 123) & (np.arange(400) < 222), 1.3, 1.0) * np.exp(0.02 * dice.normal(size=400))
    found, until_the_end = shift_of(values), shift_of(values[:200])
    assert found is not None
    assert until_the_end is not None
    assert (123, 222, 200) == (found.first, found.end, until_the_end.end)
    assert shift_of(np.linspace(1, 2, 400)) is None
    assert shift_of(np.exp(0.1 * dice.normal(size=400))) is None
    assert shift_of(np.where(np.arange(400) < 60, 2.0, 1.0)) is None


def test_pauses_at_the_end_of_an_epoch_count(tmp_path, connection):
    """Every second pause lies between two epochs: the period is that of all."""
    texts, _ = _first(Pauses(0.3), tmp_path, connection)
    assert "6 pauses between the steps take 30 % of the run" in texts[0]
    assert texts[0].endswith("after steps 39, 79, 119 and 3 more, every 40 steps.")
