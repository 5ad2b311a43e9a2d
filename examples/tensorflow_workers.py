"""TensorFlow on several workers: a run in which each has its log, and a report of all of them from it.

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
    workers = []
    for index in range(WORKERS):
        task = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        environment = {**os.environ, "TF_CONFIG": task}
        workers.append(subprocess.Popen([sys.executable, __file__], env=environment))
    status = max(worker.wait() for worker in workers)
    if status:
        sys.exit(status)
    report()


def work() -> None:
    """Train as one worker."""
    import tensorflow as tf

    import deep500_timing_tensorflow as timer

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

    print(f"loss {loss:.3f}")


def report() -> None:
    """Say how long the workers trained, from the folder that they all wrote into."""
    from deep500_timing.runs import Run

    with Run.open("runs/workers") as run:
        rows = [row for row in run.regions(by_rank=True).rows() if row["region"] == "train"]
    medians = ", ".join(f"{row['median_ns'] / 1e6:.2f} ms" for row in rows)
    print(f"train of {len(rows)} workers, the median of each: {medians}")


if __name__ == "__main__":
    if "TF_CONFIG" in os.environ:
        work()
    else:
        start()
