"""The cost between the passes of a micro-batch, in one process and without its messages.

Before each pass as much is read as a pass of 1 ms can read from memory, at some 10 GB/s.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

from benchmarks._cold import evictor

if TYPE_CHECKING:
    from collections.abc import Callable


READS_MIB = 12
"""The data read before each pass, in random order."""


class _Operation:
    """A message's content."""


class _Work:
    def wait(self) -> None:
        """It has arrived."""


class _Stage:
    """A stage in the middle: it sends and receives in both directions, and computes nothing."""

    stage_index, is_first, is_last, has_backward = 1, False, False, True

    def forward_one_chunk(
        self, number: int, args: Any = (), kwargs: Any = None, save_forward_output: bool = True
    ) -> int:
        return number

    def backward_one_chunk(self, number: int, loss: Any = None, last_backward: bool = False) -> int:
        return number

    def _operations(self, number: int) -> list[_Operation]:
        return [_Operation()]

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _operations


def _issue(operations: list[Any], desc: str | None = None) -> list[_Work]:
    return [_Work() for _ in operations]


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


class _Schedule:
    """The steady state of 1F1B on that stage: forward, its exchange of messages, backward, its exchange."""

    def __init__(self, issue: Callable[..., Any], wait: Callable[..., Any], evict: Callable[[], object]) -> None:
        self._stage = _Stage()
        self.issue, self.wait, self.evict = issue, wait, evict
        self.took_ns: list[int] = []

    def _step_microbatches(self, number: int) -> None:
        stage, now_ns = self._stage, time.perf_counter_ns
        self.evict()
        began_ns = now_ns()
        stage.forward_one_chunk(number, (), {}, save_forward_output=True)
        sends = stage.get_fwd_send_ops(number)
        self.wait(self.issue(sends + stage.get_bwd_recv_ops(number), desc="fwd_send_bwd_recv"))
        between_ns = now_ns() - began_ns
        self.evict()
        began_ns = now_ns()
        stage.backward_one_chunk(number, loss=None, last_backward=False)
        sends = stage.get_bwd_send_ops(number)
        self.wait(self.issue(sends + stage.get_fwd_recv_ops(number), desc="bwd_send_fwd_recv"))
        self.took_ns.append(between_ns + now_ns() - began_ns)


def measure(microbatches: int) -> dict[str, Any]:
    """Nanoseconds of each of so many micro-batches, bare and timed in turns."""
    from deep500_timing import Timer
    from deep500_timing_torch.pipeline._hooks import time_issues, time_schedule, time_waits
    from deep500_timing_torch.pipeline._recorder import Recorder

    evict, _ = evictor(READS_MIB << 20)
    bare = _Schedule(_issue, _wait, evict)
    timed = _Schedule(time_issues(_issue), time_waits(_wait, True), evict)
    undo = time_schedule(timed, Recorder(Timer(), None, 0))
    order = random.Random(0)
    for number in range(microbatches):
        for one in order.sample((bare, timed), 2):
            one._step_microbatches(number)
    undo()
    return {"bare_ns": bare.took_ns, "timed_ns": timed.took_ns}
