"""How the worker processes of each ``DataLoader`` spend their time: a table of the run, written once a second.

A worker takes its times itself, around the wait for a task and the call of ``collate_fn``. Dataset, samples and
random state are not touched.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from torch.utils.data import dataloader
from torch.utils.data._utils import worker as worker_module

from deep500_timing.adapters import WORKER_PARTS, TimedLoop, WorkerTimes, warn_once
from deep500_timing_torch._autolog._engine import hide

if TYPE_CHECKING:
    from deep500_timing.loop import Loops
    from deep500_timing_torch._autolog._patches import Patches

TABLE = "loader_workers"
_MODULE, _LOOP = "torch.utils.data._utils.worker", "_worker_loop"
_COLUMNS = (
    *("time_ns", "loader", "iteration", "workers", "is_training", "cpus", "worker"),
    *(f"{part}_us" for part in WORKER_PARTS),
    *("batches", "samples"),
)
_KEPT = 64
"""Iterators that are kept before the log begins."""


class _Iterator:
    """The times of an iterator of a loader, by weak references to it."""

    def __init__(self, iterator: Any, times: WorkerTimes | None, known: tuple[int, ...]) -> None:
        self.times = times
        self.known = known
        """Its values in the first columns behind the time."""
        self.processes = list(getattr(iterator, "_workers", ()))
        queues = (getattr(iterator, name, None) for name in ("_worker_result_queue", "_data_queue"))
        self._queues = [ref(one) for one in {id(queue): queue for queue in queues if queue is not None}.values()]
        self._made = ref(iterator)

    @property
    def is_alive(self) -> bool:
        return self._made() is not None

    def rows(self) -> list[tuple[int, ...]]:
        """What each worker has done so far: its number, its times in us, its batches and samples."""
        if self.times is None:
            return [(-1, *(0,) * (len(WORKER_PARTS) + 2))]
        # Without reaping the processes: PyTorch itself looks for workers that were killed.
        ready = wait([process.sentinel for process in self.processes], 0)
        rows = []
        for worker, process in enumerate(self.processes):
            row = self.times.read(worker, runs=self.is_alive and process.sentinel not in ready)
            rows.append((worker, *(part // 1000 for part in row[:-2]), *row[-2:]))
        return rows

    def ready_batches(self) -> int | None:
        """The batches that the workers have made and the loop has not taken; None if this system does not count."""
        try:
            return sum(int(queue.qsize()) for one in self._queues if (queue := one()) is not None)
        except NotImplementedError:  # macOS
            return None


class _Loop:
    """Stands in place of PyTorch's loop of a worker, and times it for the iterator that this thread is making."""

    def __init__(self, loop: Callable[..., object]) -> None:
        self._loop = loop
        self.making = threading.local()

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        """Run it, in a forked worker."""
        times = getattr(self.making, "times", None)
        loop = self._loop if times is None else TimedLoop(_MODULE, _LOOP, times)
        return loop(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Give a spawned worker the loop with its times, or PyTorch's own by its name."""
        times = getattr(self.making, "times", None)
        return _LOOP if times is None else (TimedLoop, (_MODULE, _LOOP, times))


class Workers:
    """Writes the times of workers into the log, until it is undone."""

    def __init__(self, loops: Loops, patches: Patches) -> None:
        self._loops = loops
        self._iterators: list[_Iterator] = []
        self._loaders: WeakKeyDictionary[Any, tuple[int, count[int]]] = WeakKeyDictionary()
        self._numbers = count()
        affinity = getattr(os, "sched_getaffinity", None)  # Linux
        self._cpus = len(affinity(0)) if affinity is not None else os.cpu_count() or 0
        self._loop: Any = None
        try:
            patches.put(worker_module, _LOOP, self._timed_loop)
            patches.put(dataloader._MultiProcessingDataLoaderIter, "__init__", self._init)
            patches.put(dataloader._SingleProcessDataLoaderIter, "__init__", self._init)
        except AttributeError as error:
            warn_once(f"This PyTorch has other data loading workers, so their times are not taken: {error}.")

    def _timed_loop(self, original: Callable[..., Any]) -> Any:
        self._loop = _Loop(original)
        return self._loop

    def _init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init(iterator: Any, loader: Any) -> None:
            workers = getattr(loader, "num_workers", 0)
            times = None
            if workers and not self._loops.log.closed:
                try:
                    times = WorkerTimes(workers)
                except Exception as error:  # no shared memory
                    warn_once(f"The times of data loading workers are not taken: {type(error).__name__}: {error}.")
            self._loop.making.times = times
            try:
                original(iterator, loader)
            except BaseException as error:
                hide(error)
                raise
            finally:
                self._loop.making.times = None
            self._add(iterator, loader, workers, times)

        return init

    def _add(self, iterator: Any, loader: Any, workers: int, times: WorkerTimes | None) -> None:
        if workers and times is None:
            return
        if loader not in self._loaders:
            self._loaders[loader] = next(self._numbers), count()
        number, iterations = self._loaders[loader]
        if self._loops.log.run is None:  # the log may never begin
            self._iterators = [one for one in self._iterators if one.is_alive][-_KEPT:]
        is_training = not self._loops.here().evaluates
        self._iterators.append(_Iterator(iterator, times, (number, next(iterations), workers, is_training, self._cpus)))

    def feed(self) -> None:
        """Write the times so far, on the log's thread."""
        run = self._loops.log.run
        if run is None or not self._iterators:
            return
        run.declare(TABLE, **dict.fromkeys(_COLUMNS, "int"))
        now_ns = self._loops.timer.now_ns()
        for one in list(self._iterators):
            is_last = not one.is_alive or one.times is None
            run.add(TABLE, *((now_ns, *one.known, *row) for row in one.rows()))
            if is_last:
                self._iterators.remove(one)
            elif (ready := one.ready_batches()) is not None:
                run.sample(f"loader_{one.known[0]}.ready_batches", ready)
