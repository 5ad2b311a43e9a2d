"""Models in DDP and FSDP2, on two real ranks: each layer has its times, and the weights are the same to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from suite_ranks import Job

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("PyTorch has no distributed package here", allow_module_level=True)

WORKER = Path(__file__).parent / "workers" / "wrapped.py"
STEPS = 3


@pytest.fixture(scope="module")
def results(forks, tmp_path_factory):
    """What both ranks saw, of one start."""
    folder = tmp_path_factory.mktemp("wrapped")
    return Job(folder, forks.start, [str(WORKER), str(folder)], 2).results(100)


@pytest.mark.parametrize("how", ["ddp", "ddp, the model within", "fsdp"])
def test_training_is_the_same_to_the_bit(results, how):
    """Timed or not, both ranks end with the same weights."""
    weights = [run[0] for rank in results for run in rank[how]]
    assert all(weights[0] == other for other in weights[1:])


@pytest.mark.parametrize(
    ("how", "root", "inner"),
    [
        ("ddp", "DistributedDataParallel", "module."),
        ("ddp, the model within", "Sequential", ""),
        ("fsdp", "FSDPSequential", ""),
    ],
)
def test_each_layer_has_each_pass_of_each_step(results, how, root, inner):
    """Forward and backward of every layer are there once a step, none is open and no timing failed."""
    for rank in results:
        counts = dict(rank[how][1][1])
        assert (0, 0) == (counts.pop("faults and untimed"), counts.pop("not ended"))
        layers = [root, *(f"{inner}{name}" for name in ("0", "1", "1.0", "1.1", "2"))]
        layers += ["module"] if how == "ddp" else []
        regions = [root, *(f"{root}.{layer}" for layer in layers[1:])]
        expected = {f"{layer} {purpose}": STEPS for layer in regions for purpose in ("forward", "backward")}
        assert expected == counts
