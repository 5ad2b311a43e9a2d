"""The kept data of operations: the queue, the records that sizes share, long runs, and groups that are made again."""

from __future__ import annotations

import gc
from collections import Counter

import numpy as np
import pytest
import torch.distributed as plain

from deep500_timing._summary.stats import TRIM
from deep500_timing_torch.comm import _log
from deep500_timing_torch.comm._ops import OPS
from deep500_timing_torch.comm._report import _times_of


class Backend:
    """A process group of two that counts its operations."""

    def __init__(self, name="0", issued=0):
        self.group_name = name
        self.issued = issued

    def size(self):
        """Of two ranks."""
        return 2

    def rank(self):
        """The first."""
        return 0

    def _get_sequence_number_for_group(self):
        return self.issued


@pytest.fixture
def log(monkeypatch):
    """An empty log, in which every group has the ranks 0 and 1."""
    monkeypatch.setattr(plain.distributed_c10d, "get_process_group_ranks", lambda group: [0, 1])
    return _log.CommLog()


@pytest.fixture
def group(log):
    """A group that the log knows."""
    backend = Backend()
    group = log.group_of(backend)
    yield group
    assert group.reference() is backend


def _record(group, nbytes=8):
    return group.record(OPS["all_reduce"], "all_reduce", nbytes)


class TestTimes:
    def test_of_more_than_are_kept(self, log, group):
        """Of 10 000 times, most of them folded, mean and bandwidth are those without the tails, within 1 %."""
        durations = (np.random.default_rng(0).lognormal(15, 1.5, 10_000)).astype(int)
        for ns in durations.tolist():
            log.put(_record(group, 1_000_000), _log.DONE, 0, ns)
        log.drain(wait=True)
        cut = round(len(durations) * TRIM)
        mean_s = np.sort(durations)[cut:-cut].mean() / 1e9
        assert abs(durations.mean() / 1e9 / mean_s - 1) > 0.2  # what tells the one mean from the other
        (record,) = log.records()
        found = _times_of([record], Counter())
        assert 10_000 == found.count
        assert pytest.approx(mean_s, rel=0.01) == found.mean_s
        assert pytest.approx(1e-3 / mean_s, rel=0.01) == found.algbw_gb_per_s

    def test_issue_and_exposed_time_of_several_calls(self, log, group):
        """The time of issue is the mean of all calls, the exposed time their sum."""
        record = _record(group)
        for kind, start_ns, end_ns in (
            (_log.ISSUE, 0, 1_000),
            (_log.EXPOSED, 10, 30),
            (_log.ISSUE, 5_000, 8_000),
            (_log.EXPOSED, 100, 160),
        ):
            log.put(record, kind, start_ns, end_ns)
        log.drain(wait=True)
        found = _times_of([record], Counter())
        assert (pytest.approx(2e-6), pytest.approx(80e-9)) == (found.issue_s, found.exposed_s)

    def test_one_record_of_several_on_a_device(self, log, group):
        """A line that stands for two groups tells of the device if either was there."""
        host, device = _record(group), _record(log.group_of(None))
        assert "CPU" == _times_of([host, device], Counter()).device
        device.on_device = True
        assert "GPU" == _times_of([host, device], Counter()).device


class TestSizes:
    @pytest.mark.parametrize(
        ("sizes", "shared"),
        [
            (256, {}),
            (300, {1024: (44, (1256 + 1299) / 2)}),
            (3000, {1024: (792, (1256 + 2047) / 2), 2048: (1952, (2048 + 3999) / 2)}),
        ],
    )
    def test_beyond_256_share_one_record_for_a_power_of_two(self, group, sizes, shared):
        """The first 256 sizes have their own records; the others share few, each with the mean of its sizes."""
        for nbytes in range(1000, 1000 + sizes):
            _record(group, nbytes)
        assert _log.MAX_SIZES + len(shared) == len(group.records)
        together = [record for record in group.records.values() if record.size_is_mean]
        assert shared == {record.nbytes: (record.calls, record.message_bytes) for record in together}
        assert shared == {
            record.nbytes: (record.calls, _times_of([record], Counter()).message_bytes) for record in together
        }


class TestQueue:
    def test_it_never_holds_more_than_a_batch(self, log, group):
        """It is emptied by the thread that fills a batch, a batch at a time."""
        record, lengths = _record(group), []
        for i in range(3 * _log.BATCH):
            log.put(record, _log.DONE, i, i + 1)
            lengths.append(len(log.inbox))
        assert 3 * [*range(1, _log.BATCH), 0] == lengths

    def test_a_thread_that_is_not_the_one_to_empty_it_goes_on(self, log, group):
        """While another thread is at it, new messages stay in the queue and the other's lock is left alone."""
        record = _record(group)
        with log._draining:
            for i in range(_log.BATCH + 1):
                log.put(record, _log.DONE, i, i + 1)
            assert log._draining.locked()
            assert (_log.BATCH + 1, 0) == (len(log.inbox), record.latency.count)
        log.put(record, _log.DONE, 0, 1)
        assert (0, _log.BATCH + 2) == (len(log.inbox), record.latency.count)

    def test_what_is_queued_is_forgotten_by_a_reset(self, log, group):
        """A time from before a reset appears nowhere after it, neither in a record nor among those to be compared."""
        log.put(_record(group), _log.DONE, 0, 1, 1)
        log.reset()
        assert ([], []) == (list(log.records()), list(group.ring))


class TestGroupsMadeAnew:
    def _put(self, log, backend, seq):
        group = log.group_of(backend)
        log.put(_record(group), _log.DONE, 0, 1, seq)
        log.drain(wait=True)
        return group

    def _to_compare(self, log):
        return sorted((group.name, [seq for seq, *_ in group.ring]) for group in log.groups() if group.ring)

    def test_under_an_old_name(self, log):
        """Its numbers begin again: operations of the old one are not compared with its own, nor are others' lost."""
        first, other = Backend("0"), Backend("1")
        self._put(log, first, 1)
        self._put(log, other, 5)
        second = Backend("0")  # the first is still there, so that it has another address
        self._put(log, second, 2)
        assert [("0", [2]), ("1", [5])] == self._to_compare(log)
        assert 3 == sum(record.latency.count for record in log.records())

    def test_at_an_old_address(self, log):
        """A group at the address of one that is gone is not taken for it; the times of both are kept."""
        first = Backend("0")
        old = self._put(log, first, 1)
        second = Backend("2")
        log.known_groups[id(second)] = log.known_groups.pop(id(first))
        del first
        gc.collect()
        new = self._put(log, second, 1)
        assert new is not old
        assert ("2", 1, 1) == (new.name, len(old.ring), len(new.ring))
        third = Backend("2")
        log.known_groups[id(third)] = log.known_groups.pop(id(second))
        self._put(log, third, 7)
        assert [("0", [1]), ("2", [7])] == self._to_compare(log)
        assert 3 == sum(record.latency.count for record in log.records())
