"""``--steps N``: the program ends where it would begin the step after the last one."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn


class Cut(SystemExit):
    """Ends a program after its last step, with the exit status 0: ``finally`` clauses and ``atexit`` do their work."""


class StepLimit:
    """The steps of a process, which all its training loops count together, and the last one of them."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, steps: int, when_cut: Callable[[], object] = lambda: None) -> None:
        """Begin to count; 0 is no limit. ``when_cut`` is called before the program ends."""
        self.steps = steps
        self.done = 0
        self.is_cut = False
        """Whether the program was told to end."""
        self._when_cut = when_cut

    @property
    def is_over(self) -> bool:
        """Whether the last step has been made, and the program has not been told to end."""
        return 0 < self.steps <= self.done and not self.is_cut

    def end_program(self) -> NoReturn:
        """Raise :class:`Cut`, once: what catches it is not stopped again."""
        self.is_cut = True
        self._when_cut()
        raise Cut(0)


limit = StepLimit()
"""Of this process."""
