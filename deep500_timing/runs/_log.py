"""The log of a rank: a thread that appends finished intervals to a file."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from _thread import get_ident
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from typing import TYPE_CHECKING, Any

from deep500_timing._base.at_exit import do_last, do_not_do_last, is_terminated
from deep500_timing._base.fork import after_fork
from deep500_timing._base.settings import setting
from deep500_timing._base.warn import warn_once
from deep500_timing._base.workers import makers
from deep500_timing._summary.snapshot import take_anchor
from deep500_timing.runs import _current
from deep500_timing.runs._collector import Collector, StepCounter
from deep500_timing.runs._current import feeders, logs
from deep500_timing.runs._format import CUT, END, FIRST_OWN, HEADER, NO_STEP, TABLES, TYPES, Column, Encoder, Table
from deep500_timing.runs._header import Place, describe, find_place
from deep500_timing.runs._machine import MachineReader, main_thread_times, usable_cores
from deep500_timing.runs._system import CollectorTimes, ResidentMemory
from deep500_timing.runs._writer import Writer

if TYPE_CHECKING:
    from deep500_timing._base.stack import Stack, StackWatch
    from deep500_timing._recording.intervals import Intervals
    from deep500_timing._recording.recorder import Recorder, Region

FLUSH_S = 1.0
ROTATE_BYTES = 64 << 20
_FLUSH_ROWS = 1 << 15
"""Intervals after which a flush is early: a sixteenth of the room of a bounded timer for its log."""
_LOOK_S = 0.2
"""Time between two looks at the number of intervals, short enough for 2 x 10^6 a second."""
_TEXTS, _TEXTS_OF_MANY = 32, 4
"""Sampled stacks whose texts are made at once; and the same in each period of the sampler where there are more, as
after a long import: all at once would hold the interpreter's lock for a tenth of a second, and slow 20 steps down."""
_LOCK_S = 15.0
"""How long a flush waits for another thread's, in which the garbage collector may end workers of a data loader: PyTorch
waits 5 s for each."""
_MEMORY_S = 1.0
_MACHINE_S = 1.0


class RunLog:
    """Writes the intervals of timers into a run's folder, from a background thread.

    The training thread never waits, takes no lock and does no I/O: the log's thread reads finished intervals from the
    timers' stores. A fault, such as a full disk, causes one warning and an event in the log.

    Args:
        folder: The run's folder, created if it does not exist. Every rank writes separate files there. Where another
            training has begun to write, this one's folder is inside: ``2``, ``3`` and so on.
        *timers: The timers. Their earlier intervals are included. :meth:`attach` adds more; all share one host clock.
        rank: The rank of this process; from ``torch.distributed`` or the launcher if None.
        attributes: Plain data about the run, stored in the header.
        flush_s: Seconds between flushes, and the most that a kill loses. None starts no thread: call :meth:`flush`.
        rotate_bytes: Size at which the next file begins.
        keep_bytes: Limit of this rank's files on disk for one session. Above it, the oldest file is removed. None keeps
            everything.
        system_s: Seconds between samples of processor, memory, disk, network and GPUs; None takes none. Needs psutil;
            GPUs need nvidia-ml-py. The resident memory of the process is sampled once a second in any case.
        gc: Record garbage collections of 1 ms and longer as the region ``GC``.
        stacks_s: Seconds between samples of the main thread's Python stack, which say what the time in no region goes
            to; 0.02 is usual. None takes none. Without the GIL no samples are taken.
        whole_process: Whether the run lasts from the start of the process to the end of the log, and not from its
            first interval to its last.

    Raises:
        ValueError: The timers have different clocks, or a size or time is not above 0.
        MissingPackageError: ``system_s`` is given and psutil is not installed.
    """

    _writer_type = Writer

    def __init__(
        self,
        folder: str | PathLike[str],
        *timers: Recorder,
        rank: int | None = None,
        attributes: Mapping[str, Any] | None = None,
        flush_s: float | None = FLUSH_S,
        rotate_bytes: int = ROTATE_BYTES,
        keep_bytes: int | None = None,
        system_s: float | None = None,
        gc: bool = True,
        stacks_s: float | None = None,
        whole_process: bool = False,
    ) -> None:
        given = {"flush_s": flush_s, "rotate_bytes": rotate_bytes, "keep_bytes": keep_bytes}
        given |= {"system_s": system_s, "stacks_s": stacks_s}
        for name, value in given.items():
            if value is not None and not value > 0:
                raise ValueError(f"RunLog({name}={value!r}): it must be above 0.")
        self.folder = os.path.abspath(os.fspath(folder))
        self._rank = rank
        self._place: Place | None = None
        self._attributes = dict(attributes or {})
        self._whole_process = whole_process
        self._system: Any = ResidentMemory(_MEMORY_S)
        if system_s is not None:
            from deep500_timing.runs._system import SystemSampler

            self._system = SystemSampler(system_s)
        self._machine = MachineReader(_MACHINE_S)
        self._collector = Collector()
        self._writer = self._writer_type(self.folder, rotate_bytes, keep_bytes)
        self._steps: StepCounter | None = None
        self._clock: Any = None
        self._now: Any = time.perf_counter_ns
        self._flushing = threading.Lock()
        self._flusher = 0
        self._ended = False
        self._closer = 0
        self.closing = False
        """Set before feeders are called for the last time."""
        self._pending_ns = 0
        self.closed = False
        self.written = threading.Event()
        """Set when a closed log has written its end."""
        self._collect_gc = gc
        self._stacks: StackWatch | None = None
        self._sampled: deque[tuple[int, Stack | None]] = deque()
        self.add_settings(stacks_s)
        for timer in timers:
            self.attach(timer)
        self._wake = threading.Event()
        self._flush_s = flush_s
        self._thread: threading.Thread | None = None
        if flush_s is not None:
            self._thread = threading.Thread(target=self._work, name="deep500-timing run log", daemon=True)
            self._thread.start()
        _open.append(self)
        if len(_open) == 1:
            atexit.register(_close_all)
            do_last(_close_all)

    # --- for any thread ----------------------------------------------------------------------------------------------

    def add_settings(self, stacks_s: float | None = None, *, whole_process: bool = False) -> None:
        """Begin to do more than the log was made for; a timer of the program may have made it."""
        self._whole_process |= whole_process
        if stacks_s is not None and self._stacks is None:
            from deep500_timing._base.stack import StackWatch, is_possible, read_stack
            from deep500_timing.runs._stacks import StackTexts

            self._texts, self._read_stack = StackTexts(), read_stack
            self._stacks = StackWatch(stacks_s, threading.main_thread().ident or 0) if is_possible() else None
            if self._stacks is not None and self._clock is not None:
                self._stacks.follow(self._now)
            self.declare("maker_stacks", time_ns="time", stack="name")

    def attach(self, timer: Recorder) -> None:
        """Add a timer.

        Raises:
            ValueError: Its host clock differs from that of the other timers.
        """
        timers = self._collector.timers
        if any(one is timer for one in timers):
            return
        if not timers:
            self._clock, self._now = timer._clock, timer.now_ns
            if self._stacks is not None and self._clock is not None:
                self._stacks.follow(self._now)
            if self._collect_gc:
                self._collector.gc_times = CollectorTimes(self._now)
        elif timer._clock is not self._clock:
            raise ValueError(
                f"Attaching a timer to the run {self.folder!r}: its clock is {timer._clock!r}, the other timers have "
                f"{self._clock!r}. Use a separate folder for each clock."
            )
        timers.append(timer)
        timer._attach_log()
        timer._run = self

    @property
    def clock(self) -> Any:
        """The host clock of the timers; None for the system's."""
        return self._clock

    def step(self, number: int, time_ns: int | None = None) -> None:
        """Mark the start of a training step: now, or at a time of the timers' clock."""
        self._collector.put("marks", (self._now() if time_ns is None else time_ns, int(number)))

    def sample(self, metric: str, value: float, *, region: str = "", time_ns: int | None = None) -> None:
        """Record a sample of a metric.

        Args:
            metric: Its name with the unit, such as ``"memory.host_rss_bytes"``.
            value: The value; NaN if it is unknown.
            region: The region at the end of which it was read.
            time_ns: Its time on the timers' clock; now if None.
        """
        self.add("samples", (self._now() if time_ns is None else time_ns, metric, float(value), region))

    def collective(
        self, op: str, start_ns: int, end_ns: int, *, group: str = "", sequence: int | None = None, nbytes: int = -1
    ) -> None:
        """Record a collective operation. Its number in the group identifies it on all ranks."""
        self.add("collectives", (start_ns, end_ns - start_ns, op, group, -1 if sequence is None else sequence, nbytes))

    def add_stacks(self, samples: list[tuple[int, Stack | None]]) -> None:
        """Add stacks of the main thread, with their times on the timers' clock. The log's thread makes their texts."""
        if self._stacks is not None:
            self._sampled.extend(samples)

    def event(self, what: str, text: str = "", *, time_ns: int | None = None, **more: Any) -> None:
        """Record an event, such as a fault or a restart.

        Args:
            what: The kind of event.
            text: What happened.
            time_ns: Its time on the timers' clock; now if None.
            **more: Plain data about it.
        """
        time_ns = int(self._now()) if time_ns is None else int(time_ns)
        self._collector.event({"time_ns": time_ns, "what": what, "text": text, **more})

    def mark(self, what: str, *, step: int | None = None, dur_s: float | None = None) -> None:
        """Record a milestone, such as a saved checkpoint, in the table ``milestones``.

        Goodput reads ``"checkpoint_saved"`` and ``"checkpoint_restored"`` with their step.

        Args:
            what: The kind of milestone.
            step: The training step that it belongs to.
            dur_s: How long it took until now, in seconds.
        """
        number = NO_STEP if step is None else int(step)
        self.add("milestones", (self._now(), what, number, -1 if dur_s is None else round(dur_s * 1e9)))

    def declare(self, table: str, **columns: str) -> None:
        """Declare a table: columns by name, each ``int``, ``time``, ``float`` or ``name``.

        Raises:
            ValueError: A type is unknown, or the table exists with other columns.
        """
        wanted = tuple(Column(name, kind) for name, kind in columns.items())
        if not table.isidentifier() or not wanted or not {column.type for column in wanted} <= set(TYPES):
            raise ValueError(
                f"Declaring the table {table!r} with {columns}: a table has an identifier for its name, and columns of "
                f"the types {', '.join(TYPES)}."
            )
        tables = self._writer.tables
        known = tables.setdefault(table, Table(FIRST_OWN + len(tables) - len(TABLES), wanted)).columns
        if known != wanted:
            raise ValueError(f"Declaring the table {table!r}: it is there with the columns {known}.")

    def add(self, table: str, *rows: tuple[Any, ...]) -> None:
        """Add rows to a table: tuples in the order of its columns, names as texts. Never waits.

        Raises:
            ValueError: No such table is declared.
        """
        if table not in self._collector.rows:
            if table not in self._writer.tables:
                raise ValueError(f"Adding rows to the table {table!r} of a run: declare it first.")
            self._collector.rows.setdefault(table, deque())
        for row in rows:
            self._collector.put(table, row)

    def retire(self, timer: Recorder, region: Region, device: str, store: Intervals) -> None:
        """Read the rest of a store before its timer replaces it."""
        if any(one is timer for one in self._collector.timers):
            self._collector.retire(timer, region, device, store)

    # --- flushing --------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write all finished intervals. Any thread may call it; a closed log ignores it."""
        self._flush(final=False)

    def close(self, *, reason: str = "closed", wait: bool = True) -> None:
        """Write the rest and close the file. The timers continue without a log.

        Args:
            reason: The reason, for the reader.
            wait: Wait for pending device times.
        """
        if self.closed:
            # Another thread, or the code that this signal handler interrupts, writes the rest.
            if not wait and self._closer != get_ident():
                self.written.wait(_LOCK_S)
            return
        self._closer = get_ident()
        self.closing = True
        self._ask_feeders()  # They need an open log.
        self.closed = True
        self._wake.set()
        if self._stacks is not None:
            self._stacks.wake()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_LOCK_S)
        for timer in self._collector.timers:
            timer._device.collect(wait=wait)
        self._let_go()
        self._flush(final=True, reason=reason)
        self.written.set()
        with suppress(ValueError):
            _open.remove(self)
        if not _open:
            _expect_no_end()

    def end_with_process(self, reason: str | None = None, error: BaseException | None = None) -> None:
        """Close the log because the process ends, with the exception, the signal or the exit status that ends it.

        Args:
            reason: Another reason, if the process goes on.
            error: The exception that ends it, where Python does not tell: in a child of ``multiprocessing``.
        """
        if reason is None:
            reason = "exit"
            error = error or getattr(sys, "last_value", None)  # set by an exception that ends the program
            code = error.code if isinstance(error, SystemExit) else _current.exit_code
            if is_terminated():
                reason = "SIGTERM"
                self.event("signal", reason)
            elif error is not None and not isinstance(error, SystemExit):
                reason = type(error).__name__
                self.event("exception", f"{reason}: {error}"[:2000] if setting("exception_text") else reason)
            elif code:
                reason = f"exit status {code if isinstance(code, int) else 1}"
            elif _current.is_cut:
                reason = CUT
        self.close(reason=reason, wait=False)

    def abandon(self) -> None:
        """Leave the file to the parent process after a fork."""
        self.closed = self._ended = True
        self._let_go()
        self._collector.timers = []
        self._writer.close()
        self.written.set()

    def _let_go(self) -> None:
        if self._collector.gc_times is not None:
            self._collector.gc_times.close()
        for timer in self._collector.timers:
            if timer._run is self:
                timer._run = None
                timer._detach_log()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(reason="closed" if kind is None else kind.__name__)

    def _work(self) -> None:
        assert self._flush_s is not None
        self._machine.due()  # Rates begin here.
        pause = min(self._flush_s, _LOOK_S)
        waited = 0.0
        while not self._rest(pause):
            waited += pause
            # By size as well as by time, because a bounded timer has limited room for its log.
            if waited >= self._flush_s or self._collector.ended >= _FLUSH_ROWS:
                self._flush(final=False)
                waited = 0.0

    def _rest(self, pause_s: float) -> bool:
        """Wait, and sample stacks meanwhile; returns whether the log was closed."""
        stacks = self._stacks
        if stacks is None:
            return self._wake.wait(pause_s)
        until = time.monotonic() + pause_s
        while (left_s := until - time.monotonic()) > 0 and stacks is self._stacks and not self._wake.is_set():
            is_often = makers or len(self._sampled) > _TEXTS
            self._sample_stacks(stacks, min(left_s, stacks.period_s) if is_often else left_s)
        return self._wake.is_set()

    def _sample_stacks(self, watch: StackWatch, seconds: float) -> None:
        try:
            for time_ns, stack, times in watch.watch(seconds):
                times = times or (main_thread_times() if self._clock is None else None)
                if times is not None:
                    self.add("processor", (time_ns, 0, *times))
                self.add_stacks([(time_ns, stack)])
            for ident in tuple(makers):
                self.add("maker_stacks", (self._now(), self._texts.text_of(self._read_stack(ident))))
            self._add_texts(_TEXTS_OF_MANY if len(self._sampled) > _TEXTS else _TEXTS)
        except Exception as error:
            self._stacks = None
            warn_once(f"Sampling the stack failed and is not tried again: {type(error).__name__}: {error}.")

    def _add_texts(self, most: int) -> None:
        with suppress(IndexError):  # there are no more, as another thread may flush meanwhile
            for _ in range(most):
                time_ns, stack = self._sampled.popleft()
                self.add("stacks", (time_ns, self._texts.text_of(stack)))

    def _flush(self, *, final: bool, reason: str = "") -> None:
        if self._ended:
            return
        # A signal handler may interrupt a flush on this thread. Waiting for that flush would never end.
        if self._flusher == get_ident() or not self._flushing.acquire(timeout=_LOCK_S):
            if final:
                self._warn_of_loss("another flush is under way and does not end")
            return
        self._flusher = get_ident()
        try:
            if not self._ended:  # Otherwise it ended while this flush waited, which would begin another file.
                self._ended = final
                self._flush_now(final, reason)
        except Exception as error:
            warn_once(
                f"Writing the run to {self.folder} failed and is tried again: {type(error).__name__}: {error}. The "
                "training goes on.",
                key=f"run log {self.folder} {type(error).__name__}",
            )
        finally:
            self._flusher = 0
            self._flushing.release()

    def _flush_now(self, final: bool, reason: str) -> None:
        collector, writer = self._collector, self._writer
        if not final:
            self._ask_feeders()
        if final or threading.current_thread() is not self._thread:
            self._add_texts(len(self._sampled))
        if self._steps is None:
            if not collector.has_anything():
                return
            place = self.find_place()
            self._steps = StepCounter(writer.begin(place.rank, place.world))
            self.folder = writer.folder
        file = writer.prepare()
        if file is None:
            # The timers and queues keep everything until writing works.
            if final:
                self._warn_of_loss()
            return
        for fault in writer.take_faults():
            self.event("fault", fault)
        cut_ns = int(self._now())
        self.add("samples", *((cut_ns, metric, value, "") for metric, value in self._system.due(cut_ns)))
        # Of another clock than the system's, such as a test's, a row would be about another time.
        if self._clock is None and (row := self._machine.due(at_once=final)) is not None:
            self.add("machine", (cut_ns, *row.values()))
        self._steps.pending_ns = self._pending_ns
        collector.collect(cut_ns, self._steps, final=final)
        try:
            data = self._frames(file.encoder, final, reason)
        except BaseException:
            # The records are kept for the next flush. Some names may wrongly count as written.
            file.restart()
            raise
        collector.done()
        is_written = writer.write(data)
        if final:
            if not is_written:
                self._warn_of_loss()
            writer.close()
            return
        for name in writer.rotate_if_full(self._counts()):
            self.event("removed", f"{name}, to keep within keep_bytes")

    def find_place(self) -> Place:
        """The rank and the world of this process, as they were told when this was first called."""
        if self._place is None:
            self._place = find_place(self._rank)
        return self._place

    def _ask_feeders(self) -> None:
        self._pending_ns = 0
        for feeder in feeders:
            try:
                ended = feeder()
                self._pending_ns = max(self._pending_ns, ended if isinstance(ended, int) else 0)
            except Exception as error:
                warn_once(f"Calling the feeder {feeder} of the run failed: {error}.", key=f"feeder {feeder}")

    def _frames(self, encoder: Encoder, final: bool, reason: str) -> bytes:
        collector, steps = self._collector, self._steps
        assert steps is not None
        frames: list[bytes] = []
        if not encoder.sequence:
            header = describe(
                self.find_place(),
                session=self._writer.session,
                segment=self._writer.segment,
                anchor=take_anchor(self._now),
                clock="perf_counter_ns" if self._clock is None else repr(self._clock),
                attributes=self._attributes,
                whole_process=self._whole_process,
            )
            header["machine"] |= {"usable_cpus": usable_cores(), "not_told": [*self._machine.missing]}
            if self._stacks is not None and self._stacks.takes_gil:
                header["machine"]["not_told"].append("stacks")
            frames.append(encoder.document(HEADER, header))
        frames += collector.frames(encoder, is_last=final)
        # Last, so that its presence shows a complete flush.
        anchor, counts = take_anchor(self._now), self._counts()
        flush = anchor.host_ns, anchor.unix_ns, anchor.width_ns, *counts.values(), steps.batches
        frames += encoder.tuples("flushes", [flush])
        if final:
            frames.append(encoder.document(END, {"reason": reason, **counts}))
        return b"".join(frames)

    def _counts(self) -> dict[str, int]:
        collector = self._collector
        return {"written": collector.written + collector.waiting, "dropped": collector.dropped}

    def _warn_of_loss(self, why: str | None = None) -> None:
        why = why or "; ".join(self._writer.take_faults()[-1:])
        warn_once(
            f"The end of the run could not be written to {self.folder}: {why}. "
            "Intervals since the last flush are only in the timers.",
            key=f"run log lost {self.folder}",
        )


_open: list[RunLog] = []
"""Logs to close when the process ends: at exit, after an exception, by SIGINT and by SIGTERM."""


def _close_all() -> None:
    for log in _open.copy():
        log.end_with_process()


def _expect_no_end() -> None:
    atexit.unregister(_close_all)
    do_not_do_last(_close_all)


@after_fork
def _after_fork() -> None:
    # The files and the thread belong to the parent. A child must not end them.
    for log in _open.copy():
        log.abandon()
    _open.clear()
    _expect_no_end()


def attach(timer: Recorder, run: RunLog | str | PathLike[str], **settings: Any) -> RunLog:
    """Make a timer write to a run: to this process's log in that folder, or to a new one.

    Args:
        timer: The timer.
        run: A folder or a log.
        **settings: Of :class:`RunLog`; a log that is there takes ``stacks_s`` and ``whole_process``.

    Raises:
        ValueError: The log's timers have another host clock.
    """
    if isinstance(run, RunLog):
        run.attach(timer)
        logs.setdefault((run.folder, id(run.clock)), run)
        return run
    key = (os.path.abspath(os.fspath(run)), id(timer._clock))
    log: RunLog | None = logs.get(key)
    if log is None or log.closed:
        log = logs[key] = RunLog(run, timer, **settings)
    else:
        log.attach(timer)
        log.add_settings(**settings)
    return log
