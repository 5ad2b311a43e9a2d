"""Layer by layer: time, memory and operations of a model, forward and backward.

::

    from deep500_timing_torch.layers import LayerTimer

    with LayerTimer(model, depth=2) as layers:
        for batch in loader:
            train_step(model, batch)
    print(layers.table())
"""

from deep500_timing_torch.layers._in_run import LayersSection, read_layers
from deep500_timing_torch.layers._layer_timer import LayerTimer
from deep500_timing_torch.layers._memory import Growth, LayerMemory
from deep500_timing_torch.layers._plots import MemorySample, RangeTime
from deep500_timing_torch.layers._profiler import ProfilerWrapper
from deep500_timing_torch.layers._select import Layer
from deep500_timing_torch.layers._times import LayerTimes, ModelTimes

__all__ = [
    "Growth",
    "Layer",
    "LayerMemory",
    "LayerTimer",
    "LayerTimes",
    "LayersSection",
    "MemorySample",
    "ModelTimes",
    "ProfilerWrapper",
    "RangeTime",
    "read_layers",
]
