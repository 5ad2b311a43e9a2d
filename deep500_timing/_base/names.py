"""Names that several parts of the package share: region keys, and where a time was measured."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

EPOCH = "EPOCH"
BATCH = "BATCH"
FORWARD = "FORWARD"
BACKWARD = "BACKWARD"
COMM = "COMM"
IO = "IO"

CPU = "CPU"
GPU = "GPU"


@lru_cache(1 << 12)  # Each report has the names of the one before.
def outside_name(name: str) -> str:
    """A name as every tracker and logger takes it: ``"EPOCH (start)"`` is ``"EPOCH_start"``.

    Letters and digits of any script, ``_``, ``.``, ``/`` and ``-`` remain. All else is one ``_``, and none at the end
    of a part. Two names may become one.
    """
    import re  # Every first timer would pay for it.

    parts = ((part, re.sub(r"[^\w./-]+", "_", part)) for part in name.split("/"))
    return "/".join(part if taken == part else taken.rstrip("_") or "_" for part, taken in parts)


class TimeType(Enum):
    """The kind of a timed region, in the terms of a training loop.

    A region key is one of these or a string that names a region of the user's own. A string that is the name of a
    member (``"BATCH"``) is that member.
    """

    EPOCH = "EPOCH"
    """One complete pass over a data set."""
    BATCH = "BATCH"
    """One mini-batch."""
    FORWARD = "FORWARD"
    """Forward propagation of one mini-batch."""
    BACKWARD = "BACKWARD"
    """Backward propagation of one mini-batch."""
    COMM = "COMM"
    """Communication during one mini-batch."""
    IO = "IO"
    """The wait for the data of one mini-batch."""
    OTHER = "OTHER"
    """Anything else."""

    # Members are singletons, so identity is equality; Enum's own hash is a Python function and costs four times
    # as much as the look-up that it serves.
    __hash__ = object.__hash__


# On Python 3.11 a member is found through a descriptor written in Python (70 ns); as a plain class attribute it is
# found like any other, as it is from 3.12 on.
for _member in TimeType:
    type.__setattr__(TimeType, _member.name, _member)
del _member
