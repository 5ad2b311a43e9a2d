"""Times the trainers that are built on PyTorch, by one line each.

::

    from deep500_timing_torch.trainers.huggingface import TimerCallback     # Trainer(callbacks=[TimerCallback()])
    from deep500_timing_torch.trainers.lightning import TimerCallback       # Trainer(callbacks=[TimerCallback()])
    from deep500_timing_torch.trainers.accelerate import instrument         # instrument(accelerator, tmr)

Each module imports its framework, so import only the one that you need. ``docs/trainers.md`` names the regions.
"""

from __future__ import annotations
