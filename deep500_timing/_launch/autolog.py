"""Times a program that was not edited: holds the timer and the log, calls the plug-ins, reports at the end.

A plug-in times one framework. The entry points of the group ``deep500_timing.autolog`` name them, each under the
name of the module that starts it; ``docs/run-command.md`` has the contract.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from _thread import allocate_lock, start_new_thread
from functools import partial, wraps
from weakref import WeakSet

from deep500_timing._base.fork import after_fork
from deep500_timing._base.patches import Replaced, after_import
from deep500_timing._base.settings import TRY, check_settings, setting
from deep500_timing._base.warn import warn_once
from deep500_timing._distributed.launchers import distributed, known_rank_and_world
from deep500_timing._launch import files_of, folder_of, nothing_timed
from deep500_timing._launch.reports import Reports
from deep500_timing._launch.start_up import StartUp
from deep500_timing._recording.threads import all_recorders
from deep500_timing.loop._limit import limit
from deep500_timing.runs import _current

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike
    from typing import Any, NoReturn

    from deep500_timing.runs import RunLog
    from deep500_timing.timer import Timer

GROUP = "deep500_timing.autolog"
"""The group of entry points of the plug-ins."""
_MOST_RANKS = 64
"""Most ranks of a table at the end; with more, rank 0 prints its own times."""
_OTHERS_S, _POLL_S = 3.0, 0.2
"""How long it waits for the logs of the others to end."""
_SWALLOWED_S = 30.0
"""How long after its last step a program may take to end without a word."""
_RECHECK_UNTIL, _RECHECK_EVERY = 10, 100
"""At which calls of ``begin`` timers of the user's own are looked for."""


class Autolog:
    """The timing of a program that was not edited, from :func:`autolog` until :meth:`close`."""

    def __init__(self, folder: str, *, quiet: bool, layers: bool, slow_steps: int, steps: int) -> None:
        """Made by :func:`autolog`."""
        self.folder = folder
        """The run's folder. It is made when the program begins to train."""
        self.layers = layers
        """Whether each layer of a model is to be timed."""
        self.slow_steps = slow_steps
        """Of how many slow steps a trace is to be kept."""
        self.closed = False
        self.begun = False
        """Whether this process trains, and so writes a log."""
        self.taken: frozenset[str] = frozenset()
        """The names of the regions that timers of the user's own record. No plug-in records them."""
        self.claimed: frozenset[str] = frozenset()
        """The names of the regions that a trainer's plug-in records. The plug-ins of frameworks do not."""
        self.loops: Any = None
        """The loops of the process; None before a plug-in has asked for them."""
        self._listeners: list[Callable[[], object]] = []
        self._forked: list[Callable[[], object]] = []
        self._endings: list[Callable[[], object]] = []
        self._quiet = quiet
        self._launched = False
        self._hide: Callable[[], object] = bool
        self._timer: Timer | None = None
        self._begins = 0
        self._pid = os.getpid()
        self._files = files_of(folder)
        self._rank: int | None = None
        self._undo: list[Callable[[], object]] = []
        self._notes: dict[str, None] = {}
        self._reported = False
        self._reports: Reports | None = None
        self._start_up: StartUp | None = None
        self._before = {id(one): dict(_counts(one)) for one in list(all_recorders)}
        """Intervals that the timers of the process had: a training that is over has no part in this log."""
        # Read now, where a wrong value may raise.
        limit.begin(steps, self._cut)
        self._ends = allocate_lock()
        self._settings = {key: setting(key) for key in ("adopt", "stacks", "ranks", "exporters", "export_every_s")}

    # --- for plug-ins ------------------------------------------------------------------------------------------------

    def timer(self, make: Callable[[], Timer] | None = None) -> Timer:
        """The one timer of the process. The first plug-in that asks makes it.

        Args:
            make: Makes a timer, for instance one of an adapter, which finds its devices.
        """
        if self._timer is None:
            from deep500_timing.timer import Timer

            self._timer = (make or Timer)()
            _timers.add(self._timer)
        return self._timer

    @property
    def run(self) -> RunLog | None:
        """The log of this process; None before :meth:`begin`."""
        return None if self._timer is None else self._timer.run

    def prepare(self) -> None:
        """Import what :meth:`begin` needs, which takes tens of milliseconds: call it before the first step."""
        import concurrent.futures.thread  # noqa: F401 (the report's libraries may need it; at exit Python refuses it)

        import deep500_timing.runs._log  # noqa: F401

    def begin(self, look: bool = False) -> None:
        """Say that this process trains: call it at each optimizer step, and when the process joins a process group.

        The first call begins the log. Timers of the user's own join it.

        Args:
            look: Look for timers of the user's own now, and not only at some calls. For a plug-in that leaves calls
                out while :attr:`begun` is true.
        """
        self._begins += 1
        if self.closed or (not look and self.begun and self._begins > _RECHECK_UNTIL and self._begins % _RECHECK_EVERY):
            return
        from deep500_timing.runs import attach

        timer = self.timer()
        names: set[str] = set()
        others = []
        for one in list(all_recorders):
            # A timer that writes another run stays as it is, and its regions do not count here.
            may_join = one._clock is timer._clock and one._run in (None, timer.run)
            if one not in _timers and one.enabled and may_join:
                before = self._before.get(id(one), {})
                used = {name for name, count in _counts(one) if count > before.get(name, -1)}
                names |= used
                if used or id(one) not in self._before:
                    others.append(one)
        if not names <= self.taken:
            self.taken |= names
            self._change()
        if not self.begun:
            self.begun = True
            if names:
                timer.reset()  # the first step, in which they were recorded twice
            self._hide()
            self.prepare()
            stacks_s = 1 / per_second if (per_second := self._settings["stacks"]) else None
            log = attach(timer, self.folder, stacks_s=stacks_s, whole_process=self._start_up is not None)
            if self._start_up is not None:
                log.add_stacks(self._start_up.end())
                self._start_up = None
            self._report_at_end()
            self._rank = known_rank_and_world()[0]
            if self._reports_here(self._rank):
                self._reports = Reports(timer, self._settings["exporters"], self._settings["export_every_s"])
        for one in others:
            if one._run is None:
                attach(one, self.folder)
        if distributed() is not None:  # the group may be gone at the end
            self._rank = known_rank_and_world()[0]
            if self.run is not None:
                self.run.find_place()
        if self._reports is not None:
            self._reports.note_destinations()

    def claim(self, *names: str) -> None:
        """Record regions of these names in place of the plug-ins below, which record none from now on."""
        self.claimed = self.claimed.union(names)
        self._change()

    def release(self, *names: str) -> None:
        """Take :meth:`claim` back."""
        self.claimed = self.claimed.difference(names)
        self._change()

    def when_changed(self, call: Callable[[], object]) -> Callable[[], None]:
        """Have a function called after each change of :attr:`taken` and :attr:`claimed`; returns what ends that."""
        self._listeners.append(call)
        return partial(self._listeners.remove, call)

    def before_report(self, call: Callable[[], object]) -> None:
        """Have a function called before the report at the end, to close open regions."""
        self._endings.append(call)

    def after_fork(self, call: Callable[[], object]) -> None:
        """Have a function called in each forked child, to drop state of the parent."""
        self._forked.append(call)

    def _change(self) -> None:
        for call in self._listeners:
            call()

    def note(self, text: str) -> None:
        """Keep a sentence for the report, once: what could not be seen, and why."""
        self._notes[text] = None

    # --- its life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Have each plug-in install itself when its framework is imported, or now if it has been."""
        from deep500_timing._base.plugins import registered

        _live.append(self)
        self._watch_exit()
        for name, point in registered(GROUP).items():
            self._undo.append(after_import(name, partial(self._install, name, point)))
        if TRY in os.environ:
            from deep500_timing._launch.tried import Tried

            self._undo.append(Tried(self, os.environ[TRY]).undo)
        if self._settings["adopt"]:
            from deep500_timing._launch.adopted import Adopted

            self._undo.append(Adopted(self).undo)

    def _watch_exit(self) -> None:
        # Of a program that Python itself runs, the exit status is seen nowhere else.
        leave = sys.exit

        @wraps(leave)
        def watched(*status: Any) -> NoReturn:
            _current.exit_code = status[0] if status else None
            leave(*status)

        replaced = Replaced()
        replaced.put(sys, "exit", watched)
        self._undo.append(replaced.undo)

    def _install(self, name: str, point: Any) -> None:
        if self.closed:
            return
        try:
            self._undo.append(point.load()(self) or bool)
        except Exception as error:
            warn_once(
                f"Timing {name} without an edit failed: {type(error).__name__}: {error}. The program goes on without "
                f"its times. Time it by hand, or report this."
            )

    def _cut(self) -> None:
        # The program receives a signal to end.
        _current.is_cut = True
        said = f"the program was ended after {limit.steps} steps, as --steps or DEEP500_TIMING_STEPS says"
        self.note(f"{said}.")
        if self.run is not None:
            self.run.event("cut", said)
        # An iterator of tf.data in a cycle with the frames that are left waits for its thread, which waits for the GIL.
        atexit.register(gc.collect)
        self._ends.acquire()
        start_new_thread(self._say_if_it_goes_on, ())

    def _say_if_it_goes_on(self) -> None:
        if not self._ends.acquire(timeout=_SWALLOWED_S) and sys.stderr is not None:
            sys.stderr.write(
                f"deep500-timing: {_SWALLOWED_S:g} s after step {limit.steps}, where SystemExit was raised to end the "
                "program, it still runs: it caught that (`except:`, `except BaseException`), or another thread keeps "
                "it. It goes on as without a limit.\n"
            )

    def close(self) -> None:
        """Undo the instrumentation, end the log, and report."""
        if self.closed:
            return
        self._end()
        self.closed = True
        limit.begin(0)
        while self._undo:
            self._undo.pop()()
        if self in _live:
            _live.remove(self)
        log = self.run
        self._report("closed")
        if log is not None:
            log.close()

    def _end(self) -> None:
        # Open regions are closed, once, while it still belongs to the training.
        while self._endings:
            self._endings.pop(0)()

    @staticmethod
    def _is_child() -> bool:
        process = sys.modules.get("multiprocessing.process")
        return process is not None and process.parent_process() is not None

    def _report_at_end(self) -> None:
        from deep500_timing._base.at_exit import report_at_exit

        self._undo.append(report_at_exit(self._report, lambda: None))
        if self._is_child():
            # A child of multiprocessing may end without the functions of atexit.
            from multiprocessing.util import Finalize

            Finalize(None, self._end_of_child, exitpriority=0)

    def _end_of_child(self) -> None:
        if os.getpid() == self._pid:
            log, error = self.run, sys.exc_info()[1]
            self._report(error=error)
            if log is not None:
                log.end_with_process(error=error)

    def _reports_here(self, rank: int | None) -> bool:
        ranks = self._settings["ranks"]
        return ranks is None or (rank or 0) in ranks

    def _report(self, reason: str | None = None, error: BaseException | None = None) -> None:
        if self._reported or os.getpid() != self._pid:
            return
        self._reported = True
        if self._ends.locked():
            self._ends.release()
        self._end()
        if self._reports is not None:
            self._reports.close()
        self._rank = known_rank_and_world()[0] or self._rank
        stream = sys.stderr
        if self._quiet or stream is None or not self._reports_here(self._rank):
            return
        try:
            if self.begun:
                self._show(stream, reason, error)
            elif self._rank is None and files_of(self.folder) == self._files and not self._launched:
                stream.write(nothing_timed("this process has made no training step"))
        except Exception as error:
            warn_once(f"Reporting at the end failed: {type(error).__name__}: {error}. The run is in {self.folder}.")

    def _show(self, stream: Any, reason: str | None, error: BaseException | None) -> None:
        stream.write("\n")
        timer, log, world = self.timer(), self.run, known_rank_and_world()[1] or 1
        timer.complete_all()
        shown, folder = False, self.folder
        try:
            if log is not None:
                # The report is no part of the run. Its imports alone take a second.
                log.end_with_process(reason, error)
                folder = os.path.relpath(log.folder)
                folder = log.folder if folder.startswith(os.pardir) else folder
                shown = world <= _MOST_RANKS and self._show_run(stream, folder, log, world)
        except Exception as error:
            self.note(f"Reading the run failed: {type(error).__name__}: {error}. These times are from memory.")
        if not shown:
            from deep500_timing.exporters import TerminalExporter

            TerminalExporter(stream, strict=True).export(timer.snapshot(places=True))
            if world > 1:
                rank = self._rank or 0
                stream.write(f"  These are the times of rank {rank} of {world}; the run holds those of all.\n")
        for note in self._notes:
            stream.write(f"  {note}\n")
        if not shown and os.path.isdir(folder):
            stream.write(f"  deep500-timing show {folder}      deep500-timing report {folder}\n")
        stream.flush()

    def _show_run(self, stream: Any, folder: str, log: RunLog, world: int) -> bool:
        # What `show` says about the run, of all ranks. False without what reads a run.
        from importlib.util import find_spec

        # On a full disk, or where nothing could be written, the run lacks what memory has.
        if find_spec("duckdb") is None or log._writer.unwritten or not os.path.isdir(folder):
            return False
        from time import monotonic, sleep

        from deep500_timing._views.reports import report_of_run
        from deep500_timing._views.table import show
        from deep500_timing.runs import Run

        rank, until = self._rank or 0, monotonic() + _OTHERS_S
        # One process reports on itself: another may write to the same folder, without a rank.
        session = log._writer.session if world == 1 else None
        while True:
            with Run.open(folder) as run:
                logs = [log for log in run.table("logs").rows() if log["rank"] != rank]
                missing = world - 1 - len({log["rank"] for log in logs if log["end"]})
                if missing <= 0 or monotonic() > until:
                    report = report_of_run(run, rank=rank, session=session)
                    break
            sleep(_POLL_S)
        show(stream, report)
        if missing > 0:
            stream.write(f"  The logs of {missing} of {world} ranks had not ended when this was read.\n")
        return True


_live: list[Autolog] = []
_timers: WeakSet[Timer] = WeakSet()
"""The timers of all logs of this process, ended ones included: none of them is the user's own."""


@after_fork
def _after_fork() -> None:
    # A child that trains writes a log.
    for log in _live:
        log._pid, log.begun, log._begins, log._reported = os.getpid(), False, 0, False
        log._start_up = log._reports = None
        log._ends = allocate_lock()
        limit.done, limit.is_cut = 0, False
        for call in log._forked:
            call()


def autolog(
    run: str | PathLike[str] | None = None, *, quiet: bool = False, layers: bool = False, trace_slow_steps: int = 0
) -> Autolog:
    """Time the rest of the program without an edit of its loop, as ``deep500-timing run`` does.

    Args:
        run: The run's folder; ``runs/NAME-TIME``, by the name of the program, if None.
        quiet: Print no report at the end.
        layers: Time each layer of PyTorch models too.
        trace_slow_steps: Keep traces of ``torch.profiler`` for so many slow steps.

    Returns:
        What ends it, by ``close()``. While one is open, another call returns the same.

    Raises:
        ValueError: A setting has a wrong value (docs/configuration.md).
    """
    check_settings()
    if not _live:
        named = run or setting("run")
        folder = folder_of(named)
        if named is None:
            _current.unnamed.add(folder)
        log = Autolog(folder, quiet=quiet, layers=layers, slow_steps=trace_slow_steps, steps=setting("steps"))
        if not setting("enabled"):
            log.closed = True
            return log
        log.start()
    return _live[0]


def start_launched(settings: tuple[str, str, str, str], hide: Callable[[], object]) -> None:
    """Begin in a process that ``deep500-timing run`` has started.

    Args:
        settings: Flags, the launch, what started this process, and the folder, as the launcher has written them.
        hide: Takes that out of the environment of the children of a process that trains.
    """
    if _live:
        return
    try:
        check_settings()
        if not setting("enabled"):
            return
    except ValueError as error:  # The launcher has checked them; this process was given others.
        warn_once(f"{error} The program goes on without timing.")
        return
    flags, _current.launch, _current.starter, folder = settings
    quiet, launched, layers, is_named = (flag == "1" for flag in flags[:4])
    if not is_named:
        _current.unnamed.add(folder)
    log = Autolog(folder, quiet=quiet, layers=layers, slow_steps=int(flags[4]), steps=int(flags[5:] or 0))
    log._launched, log._hide = launched, hide
    # For a process that does not train. The handler of SIGTERM waits for the log: the program may look for one.
    atexit.register(log._report)
    if setting("stacks") and not log._is_child():
        log._start_up = StartUp()
    log.start()


def _counts(one: Any) -> list[tuple[str, int]]:
    # A region's name and how often it was entered; a name may come twice, of two threads.
    return [(region.name, region._intervals.count + int(region.is_open)) for region in one._regions()]
