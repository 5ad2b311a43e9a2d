"""Every public name of the engine that this one was asked for after, or what does its work here."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("torch")

from deep500_timing_deepspeed import pipe
from deep500_timing_deepspeed.pipe import PipelineEngine, PipelineModule
from deep500_timing_deepspeed.pipe._config import read_config
from deep500_timing_torch import pipeline
from deep500_timing_torch.pipeline import Kind
from deep500_timing_torch.pipeline._actions import PipelineError

SAME = [
    "train_batch",
    "eval_batch",
    "set_train_batch_size",
    "set_dataloader",
    "set_dataiterator",
    "set_batch_fn",
    "is_gradient_accumulation_boundary",
    "is_first_stage",
    "is_last_stage",
    "log_for_device",
    "tput_log",
    "reset_activation_shape",
    "get_pipeline_parallel_rank",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "save_checkpoint",
    "load_checkpoint",
]
"""Methods of DeepSpeed's engine that are methods here."""
ACTIONS = {
    "_exec_load_micro_batch": Kind.LOAD,
    "_exec_forward_pass": Kind.FORWARD,
    "_exec_backward_pass": Kind.BACKWARD,
    "_exec_send_activations": Kind.SEND_ACTIVATION,
    "_exec_send_grads": Kind.SEND_GRADIENT,
    "_exec_recv_activations": Kind.WAIT_ACTIVATION,
    "_exec_recv_grads": Kind.WAIT_GRADIENT,
    "_exec_reduce_grads": Kind.REDUCE,
    "_exec_reduce_tied_grads": Kind.REDUCE,
    "_exec_optimizer_step": Kind.STEP,
}
"""Instructions of DeepSpeed's schedules; PyTorch's schedules do them here, and each is a kind of action."""


@pytest.mark.parametrize("name", SAME)
def test_a_method_of_that_name_is_there(name):
    """With a docstring."""
    assert inspect.getdoc(getattr(PipelineEngine, name))


def test_calls_take_the_same_arguments():
    """So that a script's calls are valid as they are."""
    assert ["self", "data_iter"] == list(inspect.signature(PipelineEngine.train_batch).parameters)
    evaluate = inspect.signature(PipelineEngine.eval_batch).parameters
    assert [
        "self",
        "data_iter",
        "return_logits",
        "compute_loss",
        "reduce_output",
        "bcast_loss",
        "num_micro_batches",
    ] == list(evaluate)
    assert (False, True, "avg") == tuple(
        evaluate[name].default for name in ("return_logits", "compute_loss", "reduce_output")
    )
    asked = "layers num_stages topology loss_fn seed_layers seed_fn base_seed partition_method"
    given = list(inspect.signature(PipelineModule).parameters)
    assert [*asked.split(), "activation_checkpoint_interval"] == given[:9]
    made = "args model optimizer model_parameters training_data lr_scheduler distributed_port mpu dist_init_required "
    made += "collate_fn config mesh_param config_params"
    assert made.split() == list(inspect.signature(pipe.initialize).parameters)[:13]


@pytest.mark.parametrize("instruction", ACTIONS)
def test_an_instruction_is_a_kind_of_action(instruction):
    """And DeepSpeed's own instructions are recorded as the same kinds."""
    from deep500_timing_deepspeed.pipe._instrument import _KINDS

    assert ACTIONS[instruction] in set(_KINDS.values())


def test_timers_of_deepspeed_s_names_are_there():
    """DeepSpeed's engine has these for passes, messages, reduction, step and batch."""
    assert {
        "batch_input",
        "train_batch",
        "pipe_send_output",
        "pipe_send_grad",
        "pipe_recv_input",
        "pipe_recv_grad",
        "fwd_microstep",
        "bwd_microstep",
        "bwd_inner_microstep",
        "bwd_allreduce_microstep",
        "step_microstep",
        "fwd",
        "bwd",
        "bwd_inner",
        "bwd_allreduce",
        "step",
    } == set(pipe.DEEPSPEED_NAMES)


def test_public_names_are_sorted_and_there():
    """Each name of ``__all__`` exists."""
    assert sorted(pipeline.__all__, key=lambda name: (not name.isupper(), name)) == list(pipeline.__all__)
    assert [] == [name for name in pipeline.__all__ if not hasattr(pipeline, name)]


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, (64, 4, 8)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, (64, 8, 4)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, (24, 4, 3)),
        ({"train_micro_batch_size_per_gpu": 4}, (8, 4, 1)),
        ({"train_batch_size": 64}, (64, 32, 1)),
    ],
)
def test_sizes_that_are_left_out_follow(config, sizes):
    """Two of the three give the third, for two replicas."""
    found = read_config(config, replicas=2)
    assert sizes == (found.train_batch_size, found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps)


def test_a_config_is_read_from_a_file(tmp_path):
    """As DeepSpeed's users write it; a disabled feature is accepted."""
    path = tmp_path / "config.json"
    path.write_text('{"train_batch_size": 8, "fp16": {"enabled": false}, "zero_optimization": {"stage": 0}}')
    assert 8 == read_config(path, replicas=1).train_batch_size


@pytest.mark.parametrize(
    "harmless",
    [{"prescale_gradients": False}, {"memory_breakdown": False}, {"curriculum_learning": {"enabled": False}}],
)
def test_a_key_that_changes_nothing_is_taken(harmless):
    """It switches a thing off."""
    assert 8 == read_config({"train_batch_size": 8, **harmless}, replicas=1).train_batch_size


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"train_batch_size": 8, "grandient_accumulation_steps": 1}, "Is 'gradient_accumulation_steps' meant?"),
        ({"train_batch_size": 8, "prescale_gradients": True}, "['prescale_gradients'] are unknown"),
        ({"train_batch_size": 8, "communication_data_type": "fp16"}, "are unknown"),
        ({}, "neither train_batch_size nor"),
        ({"train_batch_size": 0}, "a whole number from 1"),
        ({"train_batch_size": True}, "a whole number from 1"),
        ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 4}, "does not divide"),
        ({"train_batch_size": 8, "bf16": {"enabled": True}}, 'use "torch_autocast"'),
        ({"train_batch_size": 8, "fp16": {"enabled": True}}, "losses are not scaled"),
        ({"train_batch_size": 8, "torch_autocast": {"enabled": True, "dtype": "float16"}}, "only bfloat16"),
        ({"train_batch_size": 8, "gradient_clipping": -1}, "a number from 0"),
        ({"train_batch_size": 8, "optimizer": "Adam"}, '"params"'),
        ({"train_batch_size": 8, "pipeline": {"stages": 4}}, "arguments of PipelineModule"),
        ({"train_batch_size": 8, "pipeline": {"x": 4}}, "unknown to this engine"),
        ({"train_batch_size": 8, "zero_optimisation": {"stage": 1}}, "['zero_optimisation'] are unknown"),
    ],
)
def test_a_key_without_a_meaning_is_an_error(config, text):
    """It says what to do instead."""
    with pytest.raises(PipelineError) as raised:
        read_config(config, replicas=1)
    assert text in str(raised.value)


def test_optimizers_and_schedules_go_by_deepspeed_s_names():
    """Adam decays as AdamW there; rates of a warm-up are absolute, not multiples of the optimizer's."""
    import torch

    from deep500_timing_deepspeed.pipe._config import make_optimizer, make_scheduler

    weight = [torch.nn.Parameter(torch.ones(1))]
    assert isinstance(make_optimizer({"type": "Adam", "params": {"lr": 0.1}}, weight), torch.optim.AdamW)
    plain = make_optimizer({"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": False}}, weight)
    assert (torch.optim.Adam, 0.1) == (type(plain), plain.param_groups[0]["lr"])
    sgd = make_optimizer({"type": "SGD", "params": {"lr": 0.1}}, weight)
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.4, "warmup_num_steps": 4, "warmup_type": "linear"}
    schedule = make_scheduler({"type": "WarmupDecayLR", "params": {**params, "total_num_steps": 8}}, sgd)
    rates = []
    for _ in range(9):
        rates.append(sgd.param_groups[0]["lr"])
        sgd.step()
        schedule.step()
    assert pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.3, 0.2, 0.1, 0.0]) == rates
    for kind, make in (("optimizer", lambda: make_optimizer({"type": "OneBitAdam"}, weight)),
                       ("scheduler", lambda: make_scheduler({"type": "OneCycle"}, sgd))):  # fmt: skip
        with pytest.raises(PipelineError) as raised:
            make()
        assert f"{kind.title()} " in str(raised.value)
