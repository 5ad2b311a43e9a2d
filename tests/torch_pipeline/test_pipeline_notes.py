"""The notes of hooks between the actions of a rank, and their meaning."""

from __future__ import annotations

import types

import pytest

pytest.importorskip("torch")

from torch.distributed.pipelining import schedules

from deep500_timing import Timer
from deep500_timing.testing import ManualClock
from deep500_timing_torch.pipeline import Kind, PipelineError
from deep500_timing_torch.pipeline._hooks import time_issues, time_schedule, time_waits
from deep500_timing_torch.pipeline._recorder import Recorder, events_of


class Stage:
    """A stage in the middle with free passes and messages."""

    stage_index, is_first, is_last, has_backward = 1, False, False, True

    def forward_one_chunk(self, chunk_id):
        """Compute nothing."""
        return chunk_id

    def backward_one_chunk(self, chunk_id, full_backward=True):
        """Compute nothing."""
        return chunk_id

    def _ops(self, chunk_id):
        return [type("Op", (), {})()]

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _ops


class Schedule:
    """A schedule of one stage that runs one micro-batch."""

    def __init__(self, issue, wait):
        self._stage = Stage()
        self.issue, self.wait = issue, wait

    def _compute_loss(self, *_):
        raise AssertionError("only the last stage has a loss")

    def _step_microbatches(self):
        stage = self._stage
        self.wait(self.issue(stage.get_fwd_recv_ops(0)))
        stage.forward_one_chunk(0)
        self.wait(self.issue(stage.get_fwd_send_ops(0) + stage.get_bwd_recv_ops(0)))
        stage.backward_one_chunk(0, full_backward=False)
        self.wait(self.issue(stage.get_bwd_send_ops(0)))
        self.wait(self.issue([]))


class Work:
    """The handle of a message that has arrived."""

    def wait(self):
        """At once."""


def issued(ops):
    """One handle for each message."""
    return [Work() for _ in ops]


def together(ops):
    """One handle for all."""
    return [Work()]


def waited(works):
    """As PyTorch does."""
    for work in works:
        work.wait()


@pytest.fixture
def run():
    """Time a schedule with these functions for messages; gives the recorder."""

    def of(issue=issued, wait=waited, **settings):
        recorder = Recorder(Timer(**settings), None, 0)
        schedule = Schedule(time_issues(issue), time_waits(wait, wait is waited))
        undo = time_schedule(schedule, recorder)
        schedule._step_microbatches()
        undo()
        assert not recorder.active
        return recorder

    return of


@pytest.mark.parametrize(
    ("issue", "sent"),
    [pytest.param(issued, [Kind.WAIT_SENT], id="each alone"), pytest.param(together, [], id="put together")],
)
def test_every_action_is_there_in_its_order(run, issue, sent):
    """A wait for messages that the backend combined counts for the incoming one."""
    recorder = run(issue)
    expected = [
        Kind.RECEIVE_ACTIVATION,
        Kind.WAIT_ACTIVATION,
        Kind.FORWARD,
        Kind.SEND_ACTIVATION,
        Kind.RECEIVE_GRADIENT,
        *sent,
        Kind.WAIT_GRADIENT,
        Kind.BACKWARD_INPUT,
        Kind.SEND_GRADIENT,
        Kind.WAIT_SENT,
    ]
    (batch,) = recorder.batches
    assert expected == [action.kind for action in batch.actions]
    assert {0} == {action.microbatch for action in batch.actions}
    regions = {region.name for region in recorder.timer.snapshot()}
    assert {"stage 1 forward", "stage 1 backward input", "pipeline wait for gradient"} <= regions


def test_who_has_replaced_the_wait_is_called(run):
    """With all that is waited for, and it is one wait."""
    seen = []
    recorder = run(wait=lambda works: seen.append(len(works)))
    assert [1, 2, 1, 0] == seen
    waits = [action.kind for action in recorder.batches[0].actions if action.kind.value.startswith("wait")]
    assert [Kind.WAIT_ACTIVATION, Kind.WAIT_GRADIENT, Kind.WAIT_SENT] == waits


def test_what_does_nothing_in_a_batch_without_training_is_left_out(run, monkeypatch):
    """A schedule calls the backward pass of its stages all the same."""
    monkeypatch.setattr(Stage, "has_backward", False)
    recorder = run()
    kinds = {action.kind for action in recorder.batches[0].actions}
    assert Kind.FORWARD in kinds
    assert not {Kind.BACKWARD, Kind.BACKWARD_INPUT} & kinds
    assert "stage 1 backward input" not in {region.name for region in recorder.timer.snapshot()}


def test_a_forward_pass_reaches_to_the_end_of_its_loss():
    """A loss extends the forward pass before it; a loss without a time changes nothing."""
    forward, loss, other = (Kind.FORWARD, 1), (None, 1), (Kind.FORWARD, 0)
    first = [(forward, 0, 10, 20, -1), (other, 1, 21, 25, -1), (loss, -1, 41, 45, -1)]
    second = [(forward, 1, 50, 60, -1), (loss, -1, -1, 65, -1)]
    assert [
        (Kind.FORWARD, 1, 0, 10, 45, -1),
        (Kind.FORWARD, 0, 1, 21, 25, -1),
        (Kind.FORWARD, 1, 1, 50, 60, -1),
    ] == events_of([*first, *second])


def test_a_clock_that_fails_leaves_out_what_it_did_not_time(run):
    """Counted, with a warning, and the batch goes on."""

    class Broken(ManualClock):
        reads = 0

        def now_ns(self):
            self.reads += 1
            if self.reads == 6:  # The end of the forward pass.
                raise OSError("gone")
            return super().now_ns()

    with pytest.warns(UserWarning, match="reading the clock failed"):
        recorder = run(clock=Broken())
    assert 1 == recorder.faults
    kinds = [action.kind for action in recorder.batches[0].actions]
    assert Kind.FORWARD not in kinds
    assert Kind.BACKWARD_INPUT in kinds


def test_a_torch_without_a_private_name_is_refused(monkeypatch):
    """Before anything is replaced, with the name and the version that was tested."""
    schedule = types.SimpleNamespace(_stages=[], _step_microbatches=None, _compute_loss=None, _has_backward=True)
    monkeypatch.delattr(schedules, "_wait_batch_p2p")
    with pytest.raises(PipelineError, match=r"lacks _wait_batch_p2p.*tested with torch 2\.13"):
        time_schedule(schedule, Recorder(Timer(), None, 0))
    assert {"_stages", "_step_microbatches", "_compute_loss", "_has_backward"} == set(vars(schedule))
