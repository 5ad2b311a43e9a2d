"""TensorFlow on several workers: one report of all of them, and a run in which each has its log.

Two processes on this machine train a small model by MultiWorkerMirroredStrategy, as ``TF_CONFIG`` tells them. Run it
with::

    python examples/tensorflow_workers.py

which starts both; on a cluster each worker is started with its own ``TF_CONFIG``. Afterwards
``deep500-timing show runs/workers`` shows the run.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

WORKERS = 2
STEPS = 20


def start() -> None:
    """Start a process for each worker, and wait for them."""
    with socket.socket() as one, socket.socket() as other:
        ports = []
        for probe in (one, other):
            probe.bind(("localhost", 0))
            ports.append(probe.getsockname()[1])
    cluster = {"worker": [f"localhost:{port}" for port in ports]}
    # TensorFlow has no store for others to use; a folder of this job, which all workers see, connects the reports.
    messages = str(Path(f"runs/messages-{os.getpid()}").resolve())
    workers = []
    for index in range(WORKERS):
        task = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        environment = {**os.environ, "TF_CONFIG": task, "DEEP500_TIMING_GATHER": messages}
        workers.append(subprocess.Popen([sys.executable, __file__], env=environment))
    sys.exit(max(worker.wait() for worker in workers))


def work() -> None:
    """Train as one worker."""
    import tensorflow as tf

    import deep500_timing_tensorflow as timer
    from deep500_timing.ranks import gather

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = tf.Variable(tf.zeros((64, 1)))

    @tf.function
    def train(features, target):
        def of_replica(features, target):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((features @ weights - target) ** 2)
            return tape.gradient(loss, weights), loss

        gradients, losses = strategy.run(of_replica, args=(features, target))
        gradient = strategy.reduce(tf.distribute.ReduceOp.MEAN, gradients, axis=None)
        weights.assign_sub(0.1 * gradient)
        return strategy.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=None)

    tmr = timer.CPUGPUTimer(skip_first=2, run="runs/workers")  # the rank is the worker's, from TF_CONFIG
    random = tf.random.Generator.from_seed(1)
    truth = tf.ones((64, 1))
    loss = None
    for step in range(STEPS):
        tmr.step(step)
        with tmr.region(timer.TimeType.BATCH):
            with tmr.region(timer.TimeType.IO):
                features = random.normal((256, 64))
                target = features @ truth
            with tmr.region("train"):
                loss = float(train(features, target))

    report = gather(tmr.snapshot(), deadline_s=60)
    if report is not None:
        of = report.get("train")
        print(f"loss {loss:.3f}; train of {len(report.ranks)} workers: median {of.stats.median * 1e3:.2f} ms, ", end="")
        print(f"by worker {of.over_ranks['median'].min * 1e3:.2f} to {of.over_ranks['median'].max * 1e3:.2f} ms")


if __name__ == "__main__":
    if "TF_CONFIG" in os.environ:
        work()
    else:
        start()
