"""``initialize``, as DeepSpeed's users call it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing_deepspeed.pipe._config import make_optimizer, make_scheduler, read_config
from deep500_timing_deepspeed.pipe._data import RepeatingLoader
from deep500_timing_deepspeed.pipe._engine import PipelineEngine
from deep500_timing_deepspeed.pipe._module import PipelineModule
from deep500_timing_torch import CPUGPUTimer
from deep500_timing_torch.pipeline import PipelineError

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable, Iterable, Mapping
    from os import PathLike

    from deep500_timing import Timer


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: Mapping[str, Any] | str | PathLike[str] | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | str | PathLike[str] | None = None,
    *,
    timer: Timer | None = None,
    timeout_s: float = 60.0,
    keep: int = 64,
) -> tuple[PipelineEngine, Any, Any, Any]:
    """Make an engine, on every rank of the job. The arguments before ``timer`` are DeepSpeed's.

    Args:
        args: The script's arguments; ``args.deepspeed_config`` is the config if ``config`` is None.
        model: The model.
        optimizer: One over ``model.parameters()``, or a function that makes one of them; the config's if None.
        model_parameters: For the optimizer of the config; all that are trained if None.
        training_data: A data set, for ``train_batch()`` without an iterator. It is repeated in order.
        lr_scheduler: One over the optimizer, or a function that makes one of it; the config's if None.
        distributed_port: Not used: the model exists, so ``torch.distributed`` is initialized.
        mpu: Not supported.
        dist_init_required: Not used, as ``distributed_port``.
        collate_fn: As for ``DataLoader``.
        config: A dict, or the path of a JSON file, with DeepSpeed's keys; see ``PipelineConfig``.
        mesh_param: Not supported.
        config_params: An older name of ``config``.
        timer: Where the times go; a new :class:`deep500_timing_torch.CPUGPUTimer` if None.
        timeout_s: Seconds without an answer of another rank after which a batch fails. More than the longest time that
            a rank may let the others wait, such as for writing a checkpoint.
        keep: How many batches to keep action by action.

    Returns:
        The engine, the optimizer, the loader of ``training_data`` and the schedule of the learning rate; None for each
        that there is not.

    Raises:
        PipelineError: The model is no pipeline, or the config has a key without a meaning here, or its sizes do not go
            together.
        ValueError: The schedule cannot have so many micro-batches.
    """
    if not isinstance(model, PipelineModule):
        raise PipelineError(
            f"initialize(model=...): it is a {type(model).__name__}, not a PipelineModule. Wrap its layers: "
            "PipelineModule(layers=[...], num_stages=..., loss_fn=...)."
        )
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise PipelineError(f"initialize({name}=...): this engine has pipeline and data parallelism only.")
    given = [one for one in (config, config_params, getattr(args, "deepspeed_config", None)) if one is not None]
    if len(given) != 1:
        raise PipelineError(
            f"initialize(): {len(given)} configs are given; pass one, as config= or as args.deepspeed_config."
        )
    settings = read_config(given[0], model.replicas)
    if settings.activation_checkpoint_interval is not None:
        for stage in model.stages:
            stage.checkpoint_interval = settings.activation_checkpoint_interval
    if any(stage.checkpoint_interval for stage in model.stages) and "zero" in model.schedule:
        raise PipelineError(
            "Activation checkpointing with a zero-bubble schedule: the gradients of inputs and of weights are computed "
            "apart, and activations would be computed again for each. Take 1F1B, or no checkpointing."
        )
    parameters = list(model_parameters) if model_parameters is not None else None
    if parameters is None:
        parameters = [one for one in model.parameters() if one.requires_grad]
    if optimizer is None and settings.optimizer is not None:
        optimizer = make_optimizer(settings.optimizer, parameters)
    elif optimizer is not None and not hasattr(optimizer, "param_groups"):
        optimizer = optimizer(parameters)
    if lr_scheduler is None and settings.scheduler is not None:
        if optimizer is None:
            raise PipelineError("The config has a scheduler but no optimizer for it.")
        lr_scheduler = make_scheduler(settings.scheduler, optimizer)
    elif lr_scheduler is not None and not hasattr(lr_scheduler, "step"):
        lr_scheduler = lr_scheduler(optimizer)
    loader = None
    if training_data is not None:
        loader = RepeatingLoader(
            training_data,
            settings.train_micro_batch_size_per_gpu,
            model.replicas,
            model.replica,
            drop_last=settings.dataloader_drop_last,
            collate_fn=collate_fn,
        )
    engine = PipelineEngine(
        model,
        settings,
        optimizer,
        lr_scheduler,
        loader,
        CPUGPUTimer() if timer is None else timer,
        timeout_s=timeout_s,
        keep=keep,
    )
    return engine, optimizer, loader, lr_scheduler


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add DeepSpeed's ``--deepspeed`` and ``--deepspeed_config`` to a script's arguments."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="accepted and not used")
    group.add_argument("--deepspeed_config", help="path of the JSON config")
    return parser
