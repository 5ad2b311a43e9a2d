"""The training loops of a process: which thread trains, how many steps there were, and who records which region."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from deep500_timing._recording.recorder import Region
from deep500_timing.loop._events import BATCH, BETWEEN, EPOCH_START, GRAD, IO, NAMES
from deep500_timing.loop._loop import Loop, ThreadLoops

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing.timer import Timer

_START_SHOWN_NS = 1_000_000
"""The start of the log is a region from this length on."""
_MORE = ("CHECKPOINT", "compile")
_NO_REGION = SimpleNamespace(is_open=False, start=bool, end=bool)
"""Stands for a region that another records."""


class Loops(ThreadLoops):
    """State that all loops share. One thread has BATCHes: the first that steps an optimizer, while it lives.

    Args:
        timer: Records the regions.
        log: The :class:`~deep500_timing.Autolog` of the process: learns of steps, and knows who else records regions.
            None where there is none.
    """

    def __init__(self, timer: Timer, log: Any = None) -> None:
        super().__init__()
        self.timer = timer
        self.log = log
        # What a framework's adapter sets, before there are events.
        self.is_engine: Callable[[], bool] = lambda: False
        """Whether the calling thread belongs to the framework, and runs parts of a backward pass."""
        self.state_of: Callable[[Any, bool], tuple[Callable[[], object], object] | None] = lambda model, surely: None
        """Tells whether an optimizer that calls no hooks has stepped: gives, for a model after a backward pass, a
        function and its result now, which a step changes and, if it is to be sure, nothing else does. None if there
        are no gradients."""
        self.on_device = False
        """Whether a model's parameters are on an accelerator, and so regions are timed there too."""
        self.main: Loop | None = None
        """The loop that has BATCHes; None before the first step."""
        self._earlier_steps = 0
        self.skipped = 0
        """Steps that a gradient scaler left out."""
        self.when_stepped: list[Callable[[int], None]] = []
        """Each is called with the number of each of the first steps, of one in a hundred, and of the one after that."""
        self.when_uncalled: Callable[[], object] = lambda: None
        """Called at the first step, if no call of a model was seen before."""
        self.regions: dict[str, Any] = {}
        self.handles: list[Any] = []
        """The regions of the events."""
        self.off: frozenset[str] = frozenset()
        self._refresh()
        if log is not None:
            log.when_changed(self._refresh)
            log.before_report(self.finish)
            log.after_fork(self.forget)

    @classmethod
    def of(cls, log: Any, make: Callable[[], Timer]) -> Loops:
        """The loops of a process, which the plug-ins of all frameworks feed; ``make`` makes its timer."""
        if log.loops is None:
            log.loops = cls(log.timer(make), log)
        loops: Loops = log.loops
        return loops

    # --- regions -----------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        self.leave(self.off if self.log is None else self.log.taken | self.log.claimed)

    def leave(self, names: frozenset[str]) -> None:
        """Leave the regions of these names to others, and record all others."""
        if BATCH in names and BATCH not in self.off and self.main is not None and self.main is self.here():
            self.main.finish()  # what came before is of no trainer
        was_off, self.off = self.off, names
        if BATCH in was_off and BATCH not in self.off and self.main is not None:
            self.main.reset()  # a trainer has ended: what came before is its own
        if BATCH in self.off:  # another divides it
            self.off |= {*BETWEEN, EPOCH_START}
        on_device = set(NAMES) - {NAMES[IO], NAMES[GRAD]} if self.on_device else ()
        self.regions = {
            name: _NO_REGION if name in self.off else self.timer.region(name, gpu=name in on_device)
            # Of two regions that begin and end at once, the one that was known first is outside: BATCH.
            for name in (BATCH, *NAMES, *_MORE)
        }
        self.handles[:] = [self.regions[name] for name in NAMES]  # the loops hold the list
        self.version += 1

    def is_plain(self, name: str) -> bool:
        """Whether a region is recorded here, and by the host's clock alone."""
        return name not in self.off and (name not in self.regions or isinstance(self.regions[name], Region))

    def time_on_device(self) -> None:
        """Time models, backward passes and optimizers on the accelerator too, from now on."""
        if not self.on_device:
            self.on_device = True
            self._refresh()

    def record(self, name: str, start_ns: int, end_ns: int) -> None:
        """Keep a region that lies in the past, unless another records it."""
        if end_ns > start_ns > 0 and name not in self.off:
            self.timer.record(name, start_ns, end_ns)

    # --- steps -------------------------------------------------------------------------------------------------------

    def train(self, loop: Loop) -> None:
        """An optimizer steps in a loop: if no other thread trains, that one has the BATCHes from now on."""
        main = self.main
        if main is not loop and loop.may_train():
            if main is not None:
                main.finish()
                main.trains = False
                self._earlier_steps += main.rounds
            self.main, loop.trains = loop, True

    @property
    def has_batches(self) -> bool:
        """Whether the steps of the program are counted here, and not by a trainer's plug-in."""
        return self.log is None or BATCH not in self.log.claimed

    @property
    def steps(self) -> int:
        """How many steps have ended."""
        return self._earlier_steps + (0 if self.main is None else self.main.rounds)

    def tell_of_steps(self) -> None:
        """Tell the log that a step has ended: of each of the first ones, and then from time to time."""
        if self.log is not None:
            begun_ns, has_begun = self.timer.now_ns(), self.log.begun
            self.log.begin(look=True)
            if not has_begun and (now := self.timer.now_ns()) - begun_ns >= _START_SHOWN_NS:
                self.record("deep500-timing (start)", begun_ns, now)
        for tell in tuple(self.when_stepped):
            tell(self.steps)

    @property
    def number(self) -> int:
        """The program's number of the step that comes, or is under way."""
        return (self.first_step or 0) + self.steps

    def note(self, text: str) -> None:
        """Keep a sentence for the report."""
        if self.log is not None:
            self.log.note(text)

    def pending_ns(self) -> int:
        """The end of a BATCH that is kept with the next step, in ns; 0 for none. On any thread."""
        return 0 if self.main is None or BATCH in self.off else self.main.pending_ns

    def forget(self) -> None:
        """Drop the parent's loops, as this process was forked."""
        self._earlier_steps = self.skipped = 0
        loop = self.here()
        loop.reset()
        loop.rounds = 0
        self.main = loop if self.main is not None else None

    def finish(self) -> None:
        """The program ends: record the last BATCH, EPOCH and evaluation."""
        (self.main or self.here()).finish()
        if self.skipped:
            self.note(
                f"optimizer: the gradient scaler skipped {self.skipped} of {self.steps} steps, as gradients were "
                "infinite or NaN."
            )
