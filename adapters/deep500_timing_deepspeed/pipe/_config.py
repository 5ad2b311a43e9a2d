"""DeepSpeed's config: its settings, its optimizers and learning-rate schedules. A key without a meaning is an error."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from deep500_timing_torch.pipeline import PipelineError

_FORMATS = {"amp", "bf16", "fp16"}


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """The settings of an engine, by DeepSpeed's names.

    Attributes:
        train_batch_size: Samples of a batch, over all replicas.
        train_micro_batch_size_per_gpu: Samples of a micro-batch.
        gradient_accumulation_steps: Micro-batches of a batch, for each replica.
        optimizer: ``{"type": ..., "params": {...}}``, or None.
        scheduler: The same.
        gradient_clipping: The most that the norm of all gradients may be; 0 for no bound.
        steps_per_print: Batches between lines of throughput; None for none.
        wall_clock_breakdown: Whether the times of passes and messages are printed with them.
        autocast: The type that autocast computes in, None for none.
        dataloader_drop_last: Whether the engine's own loader leaves out a last batch that is not full.
        activation_checkpoint_interval: Layers that are computed again together; None to leave the model as it is.
    """

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int
    optimizer: Mapping[str, Any] | None = None
    scheduler: Mapping[str, Any] | None = None
    gradient_clipping: float = 0.0
    steps_per_print: int | None = None
    wall_clock_breakdown: bool = False
    autocast: str | None = None
    dataloader_drop_last: bool = True
    activation_checkpoint_interval: int | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)


def read_config(config: Mapping[str, Any] | str | PathLike[str], replicas: int) -> PipelineConfig:
    given: Any = config
    raw: dict[str, Any] = (
        dict(given) if isinstance(given, dict) else json.loads(Path(given).read_text(encoding="utf-8"))
    )
    left = {key: value for key, value in raw.items() if key not in _FORMATS or not _is_off(value)}
    for key in _FORMATS & left.keys():
        raise PipelineError(
            f"Config key {key!r}: losses are not scaled, and master weights are not kept. For autocast use "
            '"torch_autocast": {"enabled": true, "dtype": "bfloat16"}.'
        )
    left.pop("seed", None)  # Nothing draws by it: the engine's own loader does not shuffle.
    inner = {name: dict(left.pop(name, None) or {}) for name in ("pipeline", "torch_autocast")}
    dtype = inner["torch_autocast"].pop("dtype", "bfloat16")
    enabled = inner["torch_autocast"].pop("enabled", False)
    if enabled and dtype != "bfloat16":
        raise PipelineError(f"torch_autocast with dtype {dtype!r}: only bfloat16, since losses are not scaled.")
    found = PipelineConfig(
        *_sizes([_take(left, name, _WHOLE) for name in _SIZES], replicas),
        optimizer=_take(left, "optimizer", _TYPED),
        scheduler=_take(left, "scheduler", _TYPED),
        gradient_clipping=float(_take(left, "gradient_clipping", _NUMBER) or 0.0),
        steps_per_print=_take(left, "steps_per_print", _WHOLE),
        wall_clock_breakdown=bool(left.pop("wall_clock_breakdown", False)),
        autocast=dtype if enabled else None,
        dataloader_drop_last=bool(left.pop("dataloader_drop_last", True)),
        activation_checkpoint_interval=_take(inner["pipeline"], "activation_checkpoint_interval", _COUNT),
        raw=raw,
    )
    for name, more in inner.items():
        if more:
            raise PipelineError(
                f"Config key {name!r} has {more}, which is unknown to this engine; stages and seeds of layers are "
                "arguments of PipelineModule."
            )
    left = {key: value for key, value in left.items() if not _is_off(value)}
    if left:
        known = (
            "train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps, optimizer, scheduler, "
            "gradient_clipping, steps_per_print, wall_clock_breakdown, torch_autocast, dataloader_drop_last, "
            "pipeline, seed"
        )
        close = sorted({one for key in left for one in get_close_matches(key, known.split(", "), 1, 0.8)})
        meant = f" Is {' or '.join(map(repr, close))} meant?" if close else ""
        raise PipelineError(f"Config keys {sorted(left)} are unknown to this engine.{meant} It knows {known}.")
    return found


def _is_off(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("enabled") is False or value.get("stage") == 0
    return value in (False, None)


def _take(given: dict[str, Any], name: str, kind: tuple[Callable[[Any], bool], str]) -> Any:
    fits, what = kind
    value = given.pop(name, None)
    if value is not None and (isinstance(value, bool) or not fits(value)):
        raise PipelineError(f"Config key {name!r} is {value!r}: it is {what}.")
    return value


_WHOLE = (lambda value: isinstance(value, int) and value >= 1), "a whole number from 1"
_COUNT = (lambda value: isinstance(value, int) and value >= 0), "a whole number from 0"
_NUMBER = (lambda value: isinstance(value, (int, float)) and value >= 0), "a number from 0"
_TYPED = (
    lambda value: isinstance(value, dict) and "type" in value and not set(value) - {"type", "params"},
    '{"type": ..., "params": {...}}',
)
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _sizes(given: list[int | None], replicas: int) -> tuple[int, int, int]:
    batch, micro, steps = given
    if micro is None and batch is not None:
        steps = steps or 1
        micro = batch // (steps * replicas)
    elif steps is None and batch is not None and micro is not None:
        steps = batch // (micro * replicas)
    if micro is None:
        raise PipelineError(
            "The config gives neither train_batch_size nor train_micro_batch_size_per_gpu: it needs one, and "
            "gradient_accumulation_steps with it."
        )
    steps = steps or 1
    if batch is None:
        batch = micro * steps * replicas
    if batch != micro * steps * replicas or 0 in (batch, micro, steps):
        raise PipelineError(
            f"The batch does not divide: train_batch_size {batch} is not train_micro_batch_size_per_gpu {micro} times "
            f"gradient_accumulation_steps {steps} times {replicas} replicas."
        )
    return batch, micro, steps


def make_optimizer(config: Mapping[str, Any], parameters: Any) -> torch.optim.Optimizer:
    """An optimizer of ``torch.optim``.

    ``Adam`` decays weights as AdamW does, as DeepSpeed's does, unless its params say ``adam_w_mode: false``.
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
    """A schedule of the learning rate: DeepSpeed's WarmupLR and WarmupDecayLR, or one of PyTorch's."""
    name, params = config["type"], dict(config.get("params") or {})
    try:
        if name in ("WarmupLR", "WarmupDecayLR"):
            return _warm_up(optimizer, name, **params)
        kind = getattr(torch.optim.lr_scheduler, name, None)
        if kind is None:
            raise PipelineError(
                f"Scheduler {name!r}: neither DeepSpeed's WarmupLR or WarmupDecayLR nor one of "
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

    # LambdaLR multiplies with each group's own rate; DeepSpeed's schedules set it.
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = 1.0
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate, last_epoch=last_batch_iteration)
