"""Pipeline parallel training on ``torch.distributed.pipelining``, each micro-batch timed and the bubble measured."""

from deep500_timing_torch.pipeline._account import account, together
from deep500_timing_torch.pipeline._actions import COMPUTE, Action, Kind, Order, Slot
from deep500_timing_torch.pipeline._bubble import Bubble, RankBubble, StageLoad
from deep500_timing_torch.pipeline._ideal import ideal_bubble
from deep500_timing_torch.pipeline._orders import order_of
from deep500_timing_torch.pipeline._simulate import order_that_ran, simulate

__all__ = [
    "COMPUTE",
    "Action",
    "Bubble",
    "Kind",
    "Order",
    "RankBubble",
    "Slot",
    "StageLoad",
    "account",
    "ideal_bubble",
    "order_of",
    "order_that_ran",
    "simulate",
    "together",
]
