"""Which tests run in which lane of the Makefile, in one place: folders and files; a mark on a test adds to these."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

TESTS = Path(__file__).parents[1]

# Run in both forms, compiled and plain.
BOTH_FORMS = (
    "core",
    "named_timers",
    "runs/test_log.py",
    "torch",
    "torch_comm/test_one_rank.py",
    "torch_comm/test_short_way.py",
)

# But these of them do not depend on the form.
ONE_FORM = (
    "core/test_adapters_readme.py",
    "core/test_flops.py",
    "named_timers/test_named_timers_page.py",
    "torch/test_exchange_between_ranks.py",
    "torch/test_megatron_ranks.py",
    "torch/test_original_script.py",
    "torch/test_torch_device.py",
)

# Not in `make test-quick`: each of their tests starts a server, ranks, a fit or a build, or takes more than 2 s.
SLOW = (
    "benchmarks/test_gpu_session.py",
    "benchmarks/test_healthy_runs.py",
    "docs",
    "examples",
    "exporters/test_mlflow.py",
    "exporters/test_mlflow_moods.py",
    "exporters/test_wandb.py",
    "packaging",
    "page/test_page_in_browser.py",
    "peers/test_deepspeed_engine.py",
    "peers/test_examples_beside_originals.py",
    "peers/test_originals.py",
    "ranks/test_gather.py",
    "runs/test_commands_as_new_user.py",
    "suite/test_forks.py",
    "suite/test_processes_and_caches.py",
    "tensorflow/test_examples_of_keras.py",
    "tensorflow/test_keras.py",
    "tensorflow/test_keras_graphs.py",
    "torch/test_exchange_between_ranks.py",
    "torch/test_megatron_ranks.py",
    "torch/test_original_script.py",
    "torch_comm/test_all_ops.py",
    "torch_comm/test_bench.py",
    "torch_comm/test_gather_without_some.py",
    "torch_comm/test_killed_rank.py",
    "torch_comm/test_late_in_ddp.py",
    "torch_comm/test_scenarios.py",
    "torch_comm/test_seen.py",
    "torch_layers/test_layers_of_keras.py",
    "torch_layers/test_wrapped_models.py",
    "torch_pipeline/test_deepspeed_pipeline.py",
    "torch_pipeline/test_engine_features.py",
    "torch_pipeline/test_engine_on_ranks.py",
    "torch_pipeline/test_pipeline_pictures.py",
)

# Begun first, in this order, so that no worker ends with one of them alone; then the other files with slow tests.
LONGEST = (
    "tensorflow/test_keras.py",
    "tensorflow/test_keras_graphs.py",
    "examples/test_examples.py",
    "packaging/test_wheel.py",
    "peers/test_deepspeed_engine.py",
    "peers/test_examples_beside_originals.py",
    "runs/test_frameworks.py",
    "tensorflow/test_examples_of_keras.py",
)


@functools.cache
def _lanes_of(path: Path) -> tuple[bool, bool, int]:
    """Of a file of tests: is it slow, does it run in both forms, and which of the longest is it."""
    if not path.is_relative_to(TESTS):
        return False, False, len(LONGEST)
    part = path.relative_to(TESTS)

    def is_one_of(parts: tuple[str, ...]) -> bool:
        return any(part.is_relative_to(one) for one in parts)

    name = part.as_posix()
    longest = LONGEST.index(name) if name in LONGEST else len(LONGEST)
    return is_one_of(SLOW), is_one_of(BOTH_FORMS) and not is_one_of(ONE_FORM), longest


def turn(item: pytest.Item) -> int:
    """When the file of a test is to be begun; the lowest number first."""
    *_, longest = _lanes_of(item.path)
    return longest + (longest == len(LONGEST) and item.get_closest_marker("slow") is None)


def mark(item: pytest.Item) -> None:
    """Give a test the marks of its file."""
    is_slow, has_both_forms, _ = _lanes_of(item.path)
    if is_slow or "forks" in getattr(item, "fixturenames", ()):
        item.add_marker("slow")
    if has_both_forms and item.get_closest_marker("one_form") is None:
        item.add_marker("both_forms")
