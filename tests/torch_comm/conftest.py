"""Real ranks for the tests of communication: gloo processes as under torchrun, or started one by one to be killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from suite_ranks import Job, free_port, jobs_of

WORKERS = Path(__file__).parent / "workers"
SWITCH = "DEEP500_TIMING_COMM_KERNEL"


@pytest.fixture(autouse=True, scope="package")
def _builds_on_request():
    """No test starts a build by surprise; those of the kernel ask for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "off")
        yield


@pytest.fixture(scope="session")
def torchrun(forks, tmp_path_factory):
    """Run a worker script on so many ranks, as torchrun would; gives what each rank has left as JSON."""

    def run(script: str, ranks: int, timeout_s: float = 300, **variables: str) -> list[dict]:
        folder = tmp_path_factory.mktemp(f"{Path(script).stem}-{ranks}")
        command = [str(WORKERS / script), str(folder)]
        return Job(folder, forks.start, command, ranks, agent=True, **variables).results(timeout_s)

    return run


@pytest.fixture(scope="session")
def jobs(forks, tmp_path_factory):
    """Start a worker script as so many ranks, each its own process that may be killed."""
    with jobs_of(WORKERS, forks, tmp_path_factory) as start:
        yield start


@pytest.fixture(name="free_port")
def _free_port() -> int:
    """A port that no one listens on."""
    return free_port()


@pytest.fixture(scope="module")
def world():
    """A gloo world of one, for the tests of a file."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def clean():
    """Nothing recorded, configured, said or in force, before and after."""
    from deep500_timing._base.warn import forget_warnings
    from deep500_timing_torch import comm
    from deep500_timing_torch.comm._settings import SETTINGS

    forget_warnings()
    comm.reset_log()
    yield
    comm.configure(enabled=True, prof_all=True, prof_ops=[], verbose=False, debug=False, timer=None)
    comm.reset_log()
    assert 0 == SETTINGS.instruments
    assert SETTINGS.kernel is None


@pytest.fixture(scope="session")
def kernel() -> str:
    """The kernel's library, built once for the tree; the test is skipped where nothing can build it."""
    pytest.importorskip("torch")
    from deep500_timing_torch.comm import _build

    lacks = _build.why_not_buildable()
    if lacks is not None:
        pytest.skip(f"the compiled kernel cannot be built: {lacks}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "on")
        _build.build(limit_s=240)
        return str(_build.library_path())
