"""The contract of a transport, as a suite that each rank runs at the same time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from deep500_timing._distributed.exchange import pauses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing._distributed.transport import Transport

_PATIENCE_S = 30.0


def check_transport(transport: Transport) -> None:
    """Every rank of the transport calls it at the same time, as processes or as threads with a transport each.

    Args:
        transport: One that nothing was sent over yet.

    Raises:
        AssertionError: It does not do what :class:`Transport` says.
    """
    rank, world_size = transport.rank, transport.world_size
    everyone = range(world_size)
    assert 0 <= rank < world_size, f"rank {rank} of {world_size}"

    # A message that was not sent is not there, and is not waited for.
    begun = time.monotonic()
    assert transport.take("contract/nothing", rank, everyone) == {}
    assert time.monotonic() - begun < _PATIENCE_S / 2, "take waited for a message that no rank has sent"

    # Every byte, and more of them than a packet holds, from each to the next one.
    message = bytes(range(256)) * 1024 + str(rank).encode()
    following, before = (rank + 1) % world_size, (rank - 1) % world_size
    transport.send("contract/ring", following, message)
    found = _take(transport, "contract/ring", [before])
    assert found == {before: bytes(range(256)) * 1024 + str(before).encode()}, "a message is not as it was sent"
    assert transport.take("contract/ring", rank, everyone) == {}, "a message was given twice"

    # Topics and receivers are kept apart, and only those senders are heard that were asked for.
    for topic in ("contract/a", "contract/a/b"):
        transport.send(topic, 0, f"{topic} {rank}".encode())
    if rank == 0:
        for topic in ("contract/a/b", "contract/a"):
            last = _take(transport, topic, [world_size - 1])
            assert last == {world_size - 1: f"{topic} {world_size - 1}".encode()}, f"{topic}: {last}"
            rest = list(everyone)[:-1]
            assert _take(transport, topic, rest) == {one: f"{topic} {one}".encode() for one in rest}, topic
    else:
        assert transport.take("contract/a", rank, everyone) == {}, "a message for rank 0 was given to another"

    # A message that was withdrawn may arrive or not; neither that nor withdrawing nothing is an error.
    transport.send("contract/gone", rank, b"taken back")
    transport.withdraw("contract/gone", rank)
    transport.withdraw("contract/never", rank)


def _take(transport: Transport, topic: str, senders: Sequence[int]) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for pause_s in pauses(time.monotonic() + _PATIENCE_S):
        left = [sender for sender in senders if sender not in found]
        found |= transport.take(topic, transport.rank, left)
        if len(found) == len(senders):
            break
        time.sleep(pause_s)
    return found
