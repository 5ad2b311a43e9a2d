"""Optimizers and learning-rate schedules by the names that DeepSpeed's config has for them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from deep500_timing_torch.pipeline._errors import PipelineError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["make_optimizer", "make_scheduler"]


def make_optimizer(config: Mapping[str, Any], parameters: Any) -> torch.optim.Optimizer:
    """An optimizer of ``torch.optim``.

    ``Adam`` decays weights as AdamW does, as DeepSpeed's does, unless its params say ``adam_w_mode: false``.

    Raises:
        PipelineError: There is none of the name, or it does not take the params.
    """
    name, params = config["type"], dict(config.get("params") or {})
    if name.lower() == "adam":
        name = "AdamW" if params.pop("adam_w_mode", True) else "Adam"
        params.pop("torch_adam", None)
        params.setdefault("weight_decay", 0.0)  # AdamW's own default is another.
    classes = {one.lower(): one for one in dir(torch.optim) if isinstance(getattr(torch.optim, one), type)}
    kind = getattr(torch.optim, classes.get(name.lower(), ""), None)
    if kind is None or not issubclass(kind, torch.optim.Optimizer):
        raise PipelineError(
            f"Optimizer {name!r}: torch.optim has none of this name. Pass initialize(optimizer=...) one of your own."
        )
    try:
        made: torch.optim.Optimizer = kind(parameters, **params)
    except (TypeError, ValueError) as error:
        raise PipelineError(f"Optimizer {name!r} with {params}: {error}.") from error
    return made


def make_scheduler(config: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    """A schedule of the learning rate: DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR, or one of PyTorch's.

    Raises:
        PipelineError: There is none of the name, or it does not take the params.
    """
    name, params = config["type"], dict(config.get("params") or {})
    try:
        if name in ("WarmupLR", "WarmupDecayLR"):
            return _warm_up(optimizer, name, **params)
        if name == "WarmupCosineLR":
            return _warm_up_cosine(optimizer, **params)
        kind = getattr(torch.optim.lr_scheduler, name, None)
        if kind is None:
            raise PipelineError(
                f"Scheduler {name!r}: neither DeepSpeed's WarmupLR, WarmupDecayLR, WarmupCosineLR nor one of "
                "torch.optim.lr_scheduler. Pass initialize(lr_scheduler=...) one of your own."
            )
        return kind(optimizer, **params)
    except (TypeError, ValueError) as error:
        raise PipelineError(f"Scheduler {name!r} with {params}: {error}.") from error


def _warm_up(
    optimizer: torch.optim.Optimizer,
    name: str,
    *,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    total_num_steps: int | None = None,
    last_batch_iteration: int = -1,
) -> Any:
    if (total_num_steps is None) != (name == "WarmupLR"):
        raise TypeError("total_num_steps belongs to WarmupDecayLR")
    if warmup_type not in ("log", "linear"):
        raise ValueError(f"warmup_type is 'log' or 'linear', not {warmup_type!r}")
    steps = max(2, warmup_num_steps)

    def rate(step: int) -> float:
        if step < steps:
            grown = math.log(step + 1) / math.log(steps) if warmup_type == "log" else step / steps
            return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * grown
        if total_num_steps is None:
            return warmup_max_lr
        return warmup_max_lr * max(0.0, (total_num_steps - step) / max(1.0, total_num_steps - steps))

    return _by_rate(optimizer, rate, last_batch_iteration)


def _warm_up_cosine(
    optimizer: torch.optim.Optimizer,
    *,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
) -> Any:
    steps = max(2, warmup_num_steps)

    def ratio(step: int) -> float:
        if step < steps:
            grown = math.log(step + 1) / math.log(steps) if warmup_type == "log" else step / steps
            return warmup_min_ratio + (1 - warmup_min_ratio) * grown
        passed = (step - steps + 1) / max(1, total_num_steps - steps)
        return max(0.0, cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * passed)) / 2)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, ratio, last_epoch=last_batch_iteration)


def _by_rate(optimizer: torch.optim.Optimizer, rate: Any, last: int) -> Any:
    # LambdaLR multiplies with each group's own rate; DeepSpeed's schedules set it.
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = 1.0
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate, last_epoch=last)
