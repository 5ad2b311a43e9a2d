"""Why a summary is empty or incomplete, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from deep500_timing_torch.comm._instrument import IN_FORCE
from deep500_timing_torch.comm._log import LOG
from deep500_timing_torch.comm._settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deep500_timing_torch.comm._summary import SummaryData


def hints(found: SummaryData) -> Iterator[str]:
    """Reasons why a summary is empty or incomplete, each with its remedy."""
    if not SETTINGS.enabled:
        yield "Timing is switched off: comm.configure(enabled=True) switches it on."
    elif not SETTINGS.prof_all:
        only = ", ".join(sorted(SETTINGS.prof_ops)) or "nothing"
        yield f"Only {only} is timed, by configure(prof_all=False): comm.configure(prof_all=True) times everything."
    elif found.unseen:
        yield from _unseen()
    elif not found.ops:
        yield from _nothing()
    elif IN_FORCE.objects and SETTINGS.kernel is None:
        yield f"Timed by patched functions; the compiled kernel is not at work because {IN_FORCE.why_no_kernel}."


def _unseen() -> Iterator[str]:
    if SETTINGS.kernel is not None:
        yield (
            "The compiled kernel sees all that PyTorch hands to a process group; these were issued through a backend "
            "object itself, or by a thread that was within an operation of comm.timed_op."
        )
        return
    yield (
        "Patched functions do not see what is issued from C++ (DDP's reducer, functional and compiled collectives, "
        "DTensor), names that were imported before, and methods of a ProcessGroup."
    )
    if IN_FORCE.objects:
        yield f"The compiled kernel sees them; it is not at work because {IN_FORCE.why_no_kernel}."
    else:
        yield "comm.instrument() sees them, with its compiled kernel; DDP's buckets also comm.instrument_ddp(model)."


def _nothing() -> Iterator[str]:
    if not dist.is_initialized() and not LOG.has_groups:
        yield "There is no process group yet: nothing can have been communicated."
    elif IN_FORCE.objects == 0:
        yield (
            "Only calls by way of deep500_timing_torch.comm are timed: call comm.instrument() before the training to "
            "time code that calls torch.distributed itself."
        )
    else:
        yield "comm.instrument() is in force, and no process group has issued an operation since."
