"""Real ranks for the tests of pipelines: gloo processes that are started together and cannot outlive their test."""

from __future__ import annotations

from pathlib import Path

import pytest
from suite_ranks import Job

WORKERS = Path(__file__).parent / "workers"


@pytest.fixture(scope="session")
def ranks(forks, tmp_path_factory):
    """Start a worker script as so many ranks."""
    started: list[Job] = []

    def start(script: str, count: int, *arguments: str) -> Job:
        folder = tmp_path_factory.mktemp(f"{Path(script).stem}-{count}")
        started.append(Job(folder, forks.start, [str(WORKERS / script), str(folder), *arguments], count))
        return started[-1]

    yield start
    for job in started:
        job.kill()
