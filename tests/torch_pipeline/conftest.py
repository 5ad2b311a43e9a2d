"""Real ranks for the tests of pipelines: gloo processes that are started together and cannot outlive their test."""

from __future__ import annotations

from pathlib import Path

import pytest
from suite_ranks import jobs_of

WORKERS = Path(__file__).parent / "workers"


@pytest.fixture(scope="session")
def ranks(forks, tmp_path_factory):
    """Start a worker script as so many ranks."""
    with jobs_of(WORKERS, forks, tmp_path_factory) as start:
        yield start
