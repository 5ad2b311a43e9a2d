"""A training loop written for DeepSpeed's named timers: only the import is another.

    python examples/deepspeed_timers.py            # with timing
    python examples/deepspeed_timers.py --no-timing

Before, the import read ``from deepspeed.utils.timer import ...``, with the same names. What changes with it: the means
are in milliseconds as all other times, events come from a pool, and there is a throughput as soon as a step was timed.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import torch

from deep500_timing_deepspeed.wallclock import (
    BACKWARD_GLOBAL_TIMER,
    BACKWARD_MICRO_TIMER,
    FORWARD_GLOBAL_TIMER,
    FORWARD_MICRO_TIMER,
    STEP_GLOBAL_TIMER,
    NoopTimer,
    SynchronizedWallClockTimer,
    ThroughputTimer,
)

MICRO_BATCH, ACCUMULATION, STEPS = 32, 2, 6
GLOBAL_TIMERS = [FORWARD_GLOBAL_TIMER, BACKWARD_GLOBAL_TIMER, STEP_GLOBAL_TIMER]
MICRO_TIMERS = [FORWARD_MICRO_TIMER, BACKWARD_MICRO_TIMER]

parser = argparse.ArgumentParser()
parser.add_argument("--no-timing", action="store_true")
timing = not parser.parse_args().no_timing

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = torch.nn.CrossEntropyLoss()

timers = SynchronizedWallClockTimer() if timing else NoopTimer()
throughput = ThroughputTimer(
    SimpleNamespace(enabled=timing, synchronized=True),
    batch_size=MICRO_BATCH * ACCUMULATION,
    start_step=2,
    steps_per_output=2,
    logging_fn=print,
)

for step in range(STEPS):
    for micro_step in range(ACCUMULATION):
        inputs = torch.randn(MICRO_BATCH, 64, device=device)
        labels = torch.randint(0, 10, (MICRO_BATCH,), device=device)
        throughput.start()

        timers(FORWARD_GLOBAL_TIMER).start()
        timers(FORWARD_MICRO_TIMER).start()
        loss = criterion(model(inputs), labels) / ACCUMULATION
        timers(FORWARD_MICRO_TIMER).stop()
        timers(FORWARD_GLOBAL_TIMER).stop()

        timers(BACKWARD_GLOBAL_TIMER).start()
        timers(BACKWARD_MICRO_TIMER).start()
        loss.backward()
        timers(BACKWARD_MICRO_TIMER).stop()
        timers(BACKWARD_GLOBAL_TIMER).stop()

        boundary = micro_step == ACCUMULATION - 1
        if boundary:
            timers(STEP_GLOBAL_TIMER).start()
            optimizer.step()
            optimizer.zero_grad()
            timers(STEP_GLOBAL_TIMER).stop()
        throughput.stop(global_step=boundary, report_speed=True)
        timers.log(MICRO_TIMERS)
    forward_ms = timers(FORWARD_GLOBAL_TIMER).elapsed(reset=False)
    if step < STEPS - 1:
        timers.log(GLOBAL_TIMERS, memory_breakdown=True, ranks=[0])
        print(f"step {step}: forward took {forward_ms:.3f} ms")

if timing:
    print("means:", {name: round(float(value), 3) for name, value in timers.get_mean(GLOBAL_TIMERS).items()})
    print(f"{throughput.avg_samples_per_sec():.0f} samples/s")
