"""Which rank this process is: what torch.distributed says if it is initialised, else the launcher.

This module never imports torch; it asks it if the user's program has imported it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from deep500_timing._distributed.launchers import discover_launch

if TYPE_CHECKING:
    from collections.abc import Iterable


def distributed() -> Any:
    """``torch.distributed`` if it is imported and initialised, else None."""
    module = sys.modules.get("torch.distributed")
    try:
        if module is not None and module.is_available() and module.is_initialized():
            return module
    except Exception:
        return None
    return None


def rank_and_world() -> tuple[int, int]:
    """The rank of this process and the number of processes; (0, 1) where nothing tells."""
    dist = distributed()
    if dist is not None:
        return int(dist.get_rank()), int(dist.get_world_size())
    found = discover_launch()
    return found.rank, found.world_size


def known_rank_and_world() -> tuple[int, int] | tuple[None, None]:
    """The rank of this process and the number of processes; None for both where nothing tells. Never raises."""
    try:
        dist = distributed()
        if dist is not None:
            return int(dist.get_rank()), int(dist.get_world_size())
        found = discover_launch()
    except Exception:
        return None, None
    return (None, None) if found.launcher == "none" else (found.rank, found.world_size)


def wait_for_ranks(group: Any = None) -> None:
    """Wait for every process of the group; nothing to wait for where torch.distributed is not initialised."""
    dist = distributed()
    if dist is not None:
        dist.barrier(group=group)


def wants(ranks: Iterable[int] | None) -> bool:
    """Whether this process is among ``ranks``; None means rank 0, and -1 among them every rank."""
    chosen = list(ranks or [0])
    return -1 in chosen or rank_and_world()[0] in chosen
