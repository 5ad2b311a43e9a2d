"""The features of an engine besides its schedules, on two real ranks: see ``workers/features.py``."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def job(ranks):
    """Two ranks that have made every check."""
    started = ranks("features.py", 2)
    started.found = started.results()
    return started


@pytest.fixture
def both(job):
    """What each of two ranks found."""
    return job.found


def test_tied_weights_train_as_one(both):
    """An embedding that is the head as well, on the first and the last stage, clipped over both."""
    for found in both:
        assert 1e-6 > found["tied"]["loss"]
        assert 1e-6 > found["tied"]["parameters"]


@pytest.mark.parametrize("variant", ["checkpointing", "autocast", "parameters", "type"])
def test_variants_train_as_the_model_does_that_is_not_cut(both, variant):
    """Activations computed again, autocast to bfloat16, and other cuts."""
    for found in both:
        assert 1e-6 > found["variants"][variant]["loss"]
        assert 1e-6 > found["variants"][variant]["parameters"]


def test_layers_are_cut_by_measured_time(both):
    """The slow layer becomes one stage, alike on every rank."""
    for found in both:
        assert [[0, 5], [5, 6]] == found["measured"]


def test_a_loaded_checkpoint_goes_on_to_the_last_bit(both):
    """With dropout, Adam, a learning-rate schedule, and the engine's own loader in the middle of a pass."""
    for found in both:
        resumed = found["resumed"]
        assert resumed["losses"] == resumed["again"]
        assert resumed["same"]
        assert {"note": "here"} == resumed["client"]
        assert 6 == resumed["steps"]
        assert resumed["lr"][0] == resumed["lr"][1]


def test_a_checkpoint_fits_another_cut(both):
    """Its names are those of the layers, whichever stage they are in."""
    for found in both:
        assert 3 == found["resumed"]["recut"]
        assert 0 < found["resumed"]["recut_loss"] < 1


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("ends early", "DataEndedError: The data of rank 0 ended after 3 of the 4 micro-batches"),
        ("ends early on rank 1", "DataEndedError: The data of rank 1 ended after 1 of the 4 micro-batches"),
        ("uneven", "PipelineError: Rank 0 has micro-batches of different shapes"),
        ("does not divide", "ValueError: set_train_batch_size(18): the batch does not divide"),
        ("fewer than stages", "1 micro-batches are fewer than its 2 stages"),
        ("no pair", "PipelineError: Rank 0 failed to load its data"),
        ("no data", "PipelineError: Rank 0 failed to load its data"),
        ("reduce", "it is 'avg' or None"),
        ("no layer", "a stage would have no layer"),
        ("no multiple", "the 2 ranks are no multiple of it"),
        ("1F1B at start", "1 micro-batches are fewer than its 2 stages"),
        ("zero key", "Config keys ['zero_optimization'] are unknown to this engine"),
        ("unknown key", "Config keys ['gradient_acumulation'] are unknown to this engine"),
        ("sizes", "The batch does not divide: train_batch_size 30"),
        ("plain module", "it is a Linear, not a PipelineModule"),
        ("no config", "0 configs are given; pass one"),
        ("mpu", "initialize(mpu=...): this engine has pipeline and data parallelism only"),
        ("topology", "Leave topology out and pass num_stages"),
        *((name, "Only train_batch() and eval_batch() are accessible") for name in ("forward", "backward", "step")),
        ("__call__", "Only train_batch() and eval_batch() are accessible"),
        ("zb checkpointing", "Take 1F1B, or no checkpointing"),
    ],
)
def test_bad_input_is_an_error_on_every_rank(both, what, text):
    """The same one, in both words and class, so that none waits for another."""
    for found in both:
        assert text in found["refusals"][what]


def test_a_stage_may_begin_in_place(both):
    """Its input is received, and changing it loses nothing: the losses are those of a layer that copies."""
    for found in both:
        assert found["in_place"]["copy"] == found["in_place"]["in place"]


def test_an_engine_without_an_optimizer_loads_and_saves(both):
    """It evaluates as the engine does that trained the model."""
    for found in both:
        trained, loaded = found["evaluating"]["losses"]
        assert trained == loaded
        assert found["evaluating"]["saved"]


def test_an_engine_goes_on_after_bad_input(both):
    """Nothing was begun, so nothing is broken; other shapes of micro-batches are no bad input."""
    for found in both:
        assert found["refusals"]["goes on"]
        assert found["refusals"]["ends early is a StopIteration"]
        assert [True, False, True] == found["refusals"]["warm"]
    assert both[0]["refusals"]["outputs"] is None
    assert [[4, 3]] * 4 == both[1]["refusals"]["outputs"]


@pytest.mark.parametrize("part", ["record", "now_ns", "run"])
def test_timing_that_fails_costs_a_warning_and_no_training(both, part):
    """If any part of a timer raises, losses and gradients are the same, and missing times are counted."""
    for found in both:
        faulty = found["faulty"]
        assert faulty["plain"] == faulty[part]["values"]
        assert faulty[part]["faults"] > 0
        assert [] == faulty[part]["left"]


def test_a_schedule_of_one_s_own_is_timed_and_left_as_it_was(both):
    """Every pass of every batch, and after it no trace on the schedule, its stage or PyTorch's module."""
    for found in both:
        own = found["own_schedule"]
        assert [] == own["left"]
        assert [True, True] == own["module"]
        assert 12 == own["forwards"]
        assert 2 == own["batches"]
        assert [True, False, False] == own["warm"]
        assert 0 == own["faults"]
        assert {"F", "B", "setup"} <= set(own["kinds"])
    assert {"send activation", "receive gradient", "wait for gradient"} <= set(both[0]["own_schedule"]["kinds"])
    assert {"send gradient", "receive activation", "wait for activation"} <= set(both[1]["own_schedule"]["kinds"])


def test_every_action_is_in_the_run(job):
    """The table ``pipeline`` of the run's folder has both ranks, each stage and each micro-batch."""
    pytest.importorskip("duckdb")
    from deep500_timing.runs import Run

    with Run.open(job.found[0]["own_schedule"]["run"]) as run:
        rows = run.sql(
            "select pipe_rank, stage, kind, count(*), count(distinct microbatch) from pipeline "
            "where kind in ('F', 'B') group by all order by all"
        ).rows()
    assert [(0, 0, "B", 12, 4), (0, 0, "F", 12, 4), (1, 1, "B", 12, 4), (1, 1, "F", 12, 4)] == [
        tuple(row.values()) for row in rows
    ]


def test_a_transformer_learns_real_digits(both):
    """Its loss falls over 36 batches; times go by DeepSpeed's names as well, with the rate and the memory."""
    for found in both:
        digits = found["digits"]
        assert 2 < digits["first"]
        assert digits["last"] < 0.8 * digits["first"]
        assert 36 == digits["named"]
        assert digits["fwd"] > 0
        assert digits["rate"] > 0
        assert digits["memory"]["parameters_bytes"] > 0
        assert digits["memory"]["optimizer_bytes"] > digits["memory"]["parameters_bytes"]
        assert digits["memory"]["peak_device_bytes"] is None
