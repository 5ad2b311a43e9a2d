"""How a data loader's worker processes spend their time, in shared memory; and the threads that make a process's data.

It imports no framework: a spawned worker imports it before it does anything else.
"""

from __future__ import annotations

from time import perf_counter_ns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

START, IDLE, FETCH, COLLATE, PUT, ENDED = range(6)
WORKER_PARTS = ("start", "idle", "fetch", "collate", "put")
"""The parts of a worker's time: its start until it asks for a task, the wait for a task, reading samples, making a
batch of them, and putting that into the queue."""
_BATCHES, _SAMPLES, _PART, _SINCE, _WIDTH = 5, 6, 7, 8, 9
"""The other numbers of a worker: its batches and samples, its current part, and since when it is in that."""

makers: set[int] = set()
"""The threads of this process that run the program's Python to make data at this moment, which its loop may wait for.
Their stacks are sampled with that of the main thread."""


class WorkerTimes:
    """The times of the workers of one iterator, from now on. It is inherited or pickled by a process that starts."""

    def __init__(self, workers: int) -> None:
        from multiprocessing.sharedctypes import RawArray

        self._numbers = RawArray("q", workers * _WIDTH)
        now = perf_counter_ns()
        for worker in range(workers):
            self._numbers[worker * _WIDTH + _SINCE] = now

    def read(self, worker: int, *, runs: bool = True) -> list[int]:
        """The parts of a worker so far, in ns, then its batches and samples. In the main process.

        With ``runs`` it is alive: the part that it is in still takes time.
        """
        first = worker * _WIDTH
        for _ in range(3):  # it may change while it is read
            row = self._numbers[first : first + _WIDTH]
            if row[_SINCE] == self._numbers[first + _SINCE]:
                break
        if runs and row[_PART] < ENDED:
            row[row[_PART]] += max(perf_counter_ns() - row[_SINCE], 0)
        return list(row[:_PART])

    def timed(self, loop: Callable[..., object], arguments: dict[str, Any]) -> None:
        """Run the loop of a worker, with its times taken. In the worker.

        Of its arguments ``index_queue.get`` gives tasks, and ``collate_fn`` makes a batch of samples.
        """
        queue, collate, is_batched = (arguments[name] for name in ("index_queue", "collate_fn", "auto_collation"))
        numbers = memoryview(self._numbers).cast("B").cast("q")[arguments["worker_id"] * _WIDTH :]
        get = queue.get
        part, since = numbers[_PART], numbers[_SINCE]

        def switch(to: int) -> None:
            nonlocal part, since
            now = perf_counter_ns()
            numbers[part] += now - since
            numbers[_PART] = part = to
            numbers[_SINCE] = since = now

        def timed_get(*args: Any, **kwargs: Any) -> Any:
            switch(IDLE)
            task = get(*args, **kwargs)
            switch(FETCH)
            return task

        def timed_collate(samples: Any) -> Any:
            switch(COLLATE)
            try:
                batch = collate(samples)
            except BaseException as error:
                if error.__traceback__ is not None:
                    error.__traceback__ = error.__traceback__.tb_next
                raise
            numbers[_BATCHES] += 1
            numbers[_SAMPLES] += len(samples) if is_batched and isinstance(samples, (list, tuple)) else 1
            switch(PUT)
            return batch

        queue.get = timed_get
        try:
            loop(**{**arguments, "collate_fn": timed_collate})
        finally:
            switch(ENDED)


class TimedLoop:
    """The loop of a worker, ``name`` in ``module``, with its times taken: for a spawned process to run."""

    def __init__(self, module: str, name: str, times: WorkerTimes) -> None:
        self._loop = module, name
        self._times = times

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run it. Where it has other arguments than expected, it runs without its times."""
        from importlib import import_module
        from inspect import signature, unwrap

        module, name = self._loop
        loop = unwrap(getattr(import_module(module), name))
        given = signature(loop).bind(*args, **kwargs).arguments
        if {"index_queue", "collate_fn", "auto_collation", "worker_id"} <= given.keys():
            self._times.timed(loop, given)
        else:
            loop(*args, **kwargs)
