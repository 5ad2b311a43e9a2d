"""The thresholds of all rules, as ``docs/findings.md`` states them."""

from __future__ import annotations

MOST = 5
"""Findings that are shown."""
LEAST_STEPS = 20
"""Steps, or intervals of a region, that a typical value needs."""

WAIT_SHARE = 0.10
"""waits-for-data: IO as a share of its parent."""
WAIT_S = 1e-3
"""waits-for-data: a step."""
WAIT_GROWTH = 0.20
"""waits-for-data: growth that is named, if :data:`DRIFT_LEVEL` allows."""
IDLE_SHARE = 0.20
"""launch-bound: share of the steady BATCH in which the device has nothing timed to do."""
UNUSED_SHARE = 0.95
"""launch-bound: a device that is sampled as idle for more than that is not this run's."""
COPY_SHARE = 0.10
"""copies: share of BATCH."""
THROTTLED_SHARE = 0.05
"""throttled: share of the samples."""
FOLLOWS_SHARE = 0.10
"""cpu-waits-for-gpu: share of BATCH; how close the times are, and when the CPU runs ahead: ``_views/on_device.py``."""
SPIKES = ((4.0, 0.01), (2.5, 0.10))
"""spikes: steps over so many medians that cost so much of all steps; the second pair if the first finds none."""
SPIKE_LEAST = 3
"""spikes: steps."""
SPIKE_MANY = 0.05
"""spikes: from this share of the steps on the sentence names their total."""
SHIFT_SHARE = 0.15
"""level-shift: over the usual level."""
DRIFT_SHARE = 0.05
"""drift: growth over the run."""
DRIFT_LEVEL = 1e-4
"""drift, memory-grows: probability of a slope like this without a trend."""
DRIFT_LEAST = 60
"""drift: steps."""
WARM_UP_SHARE = 0.10
"""warm-up: the excess of the first steps, as a share of the run."""
WARM_UP_RATIO = 1.5
"""warm-up: the steady state begins with a step within so many medians, if :data:`WARM_UP_CALM` of the
:data:`WARM_UP_OF` steps from there on are."""
WARM_UP_CALM = 0.7
WARM_UP_OF = 10
UNNAMED_SHARE = 0.20
"""unnamed: the rest as a share of its parent."""
UNNAMED_OF_RUN = 0.02
"""unnamed: and as a share of the run."""
NAMED_SHARE = 0.50
"""unnamed: inside the step, a region is meant to be divided if the regions in it cover this share of its work."""
DOMINANT_SHARE = 0.40
"""dominant-region: share of BATCH."""
OUTSIDE_SHARE = 0.10
"""outside-steps: a region outside the steps, as a share of the run."""
VALIDATION_SHARE = 0.30
"""outside-steps: the same of a validation."""
RESTART_SHARE = 0.10
"""goodput: lost work, starts, down time and queueing, as a share of the wall clock of a job with two starts."""
OVERHEAD_SHARE = 0.05
"""outside-steps: the same of checkpoints, logging and compilation."""
OVERHEAD_AIM = 0.02
"""outside-steps: the share for which the period is told."""
VALIDATION_AIM = 0.10
"""outside-steps: the same of a validation."""
PERIOD_TIMES = 3
"""outside-steps: how often a region must have been for its period to be told."""
GAP_SHARE = 0.05
"""outside-steps: long pauses between steps, as a share of the run."""
NO_REGION_SHARE = 0.20
"""outside-steps: time in no region, as a share of the run."""
CALM_SHARE = 0.70
"""The share of the time that regions must cover for "Nothing stands out"."""
LATE_SHARE = 0.03
"""late-rank: lateness as a share of the step; the ranks of a run differ by about 1 % of a step by nature."""
LATE_COST = 0.025
"""late-rank: the saving without it, as a share of the step; it is small if ranks are late by turns."""
IMBALANCE_SHARE = 0.10
"""imbalance: by how much the heaviest rank is over the mean, in each half of the run."""
EXPOSED_SHARE = 0.10
"""exposed-communication: share of BATCH."""
TURNS_SHARE = 0.20
"""waits-for-ranks: share of BATCH."""
GROWTH_SHARE = 0.05
"""memory-grows: growth after warm-up."""
GROWTH_BYTES = 16 << 20
"""memory-grows: and at least so many bytes."""
SAMPLES_LEAST = 20
"""throttled, memory-grows: samples."""
STACKS_LEAST = 20
"""unnamed, dominant-region, outside-steps, spikes: sampled stacks that name the lines of the program."""
AFTER = ("after ", "loss")
"""dominant-region: how names of regions begin that ``deep500-timing run`` gives to the time between two events. They
count from :data:`UNNAMED_SHARE` on, as time in no region does."""
