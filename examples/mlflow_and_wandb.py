"""Log mean times to MLflow and to Weights & Biases while training, into a folder, without a server or an account.

Run it with::

    python examples/mlflow_and_wandb.py --output /tmp/tracked
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np

import deep500_timing as timer


def main() -> None:
    """Time a made-up training loop and log after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo-output/tracked"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)

    os.environ.setdefault("WANDB_MODE", "offline")
    import mlflow
    import wandb

    mlflow.set_tracking_uri(f"sqlite:///{(arguments.output / 'mlflow.db').absolute()}")
    mlflow.set_experiment("deep500-timing examples")

    tmr = timer.Timer()
    matrix = np.random.default_rng(0).normal(size=(200, 200))
    with mlflow.start_run() as run, wandb.init(project="deep500-timing", dir=arguments.output):
        for epoch in range(3):
            with tmr.region(timer.TimeType.EPOCH):
                for _ in range(50):
                    with tmr.region(timer.TimeType.BATCH):
                        matrix = np.tanh(matrix @ matrix)
            # One call each; the step is the run's own, and more than the mean is there for the asking.
            tmr.log_mlflow_all("train", step=epoch, stats=("mean", "p95"))
            tmr.log_wb_all("train", step=epoch)
        logged = mlflow.get_run(run.info.run_id).data.metrics
    for name, value in sorted(logged.items()):
        print(f"{name} = {value:.6f}")


if __name__ == "__main__":
    main()
