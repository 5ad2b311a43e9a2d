"""``initialize``, as DeepSpeed's users call it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing_deepspeed.pipe._config import read_config
from deep500_timing_deepspeed.pipe._data import RepeatingLoader
from deep500_timing_deepspeed.pipe._engine import PipelineEngine
from deep500_timing_deepspeed.pipe._module import PipelineModule
from deep500_timing_deepspeed.pipe._optimizers import make_optimizer, make_scheduler
from deep500_timing_torch._timer import CPUGPUTimer
from deep500_timing_torch.pipeline._errors import PipelineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from os import PathLike

    from deep500_timing import Timer

__all__ = ["initialize"]


def initialize(
    model: PipelineModule,
    config: Mapping[str, Any] | str | PathLike[str],
    *,
    model_parameters: Iterable[Any] | None = None,
    optimizer: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[[Any], Any] | None = None,
    timer: Timer | None = None,
    timeout_s: float = 60.0,
    keep: int = 64,
) -> tuple[PipelineEngine, Any, Any, Any]:
    """Make an engine, on every rank of the job.

    Args:
        model: The model.
        config: A dict, or the path of a JSON file, with DeepSpeed's keys; see ``PipelineConfig``.
        model_parameters: For the optimizer of the config; all that are trained if None.
        optimizer: One over ``model.parameters()``, or what makes one of them; the config's if None.
        training_data: A data set, for ``train_batch()`` without an iterator: gone through again and again, in order.
        lr_scheduler: One over the optimizer, or what makes one of it; the config's if None.
        collate_fn: As for ``DataLoader``.
        timer: Where the times go; a new :class:`deep500_timing_torch.CPUGPUTimer` if None.
        timeout_s: After how many seconds without an answer of another rank a batch fails. More than the longest that a
            rank may let the others wait, such as a checkpoint it writes.
        keep: How many batches to keep action by action.

    Returns:
        The engine, the optimizer, the loader of ``training_data`` and the schedule of the learning rate; None for what
        there is not.

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
    settings = read_config(config, model.replicas)
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
            seed=settings.seed,
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
