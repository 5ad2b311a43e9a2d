"""Checkpoints by ``torch.distributed.checkpoint``: by parameter names, independent of the cuts."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from deep500_timing_torch.pipeline import PipelineError


def save(engine: Any, path: Path, client_state: Mapping[str, Any]) -> None:
    """Write the parameters, the optimizer's state, this rank's random state, and plain data."""
    module, optimizer, rank = engine.module, engine.optimizer, dist.get_rank()
    found: dict[str, Any] = {f"model.{name}": tensor for name, tensor in module.state_dict().items()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        for key, value in ({} if optimizer is None else optimizer.state.get(parameter, {})).items():
            found[f"optimizer.{name}.{key}"] = value
    found[f"random.{rank}.cpu"] = torch.get_rng_state()
    if module.device.type == "cuda":
        found[f"random.{rank}.cuda"] = torch.cuda.get_rng_state(module.device)
    if rank == 0:
        # As a tensor, since the library takes dicts apart by their keys.
        buffer = io.BytesIO()
        torch.save(_plain_state(engine, client_state), buffer)
        found["engine"] = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    state_dict_saver.save(found, checkpoint_id=str(path), process_group=engine.grid.control)
    if rank == 0:
        (path.parent / "latest").write_text(path.name, encoding="utf-8")
    dist.barrier(group=engine.grid.control)


def _plain_state(engine: Any, client_state: Mapping[str, Any]) -> dict[str, Any]:
    groups = () if engine.optimizer is None else engine.optimizer.param_groups
    scheduler = None
    if engine.lr_scheduler is not None:
        scheduler = dict(engine.lr_scheduler.state_dict())
        scheduler.pop("lr_lambdas", None)  # Functions are not data; a new schedule has them.
    return {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "micro_batches": engine.micro_batches,
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
        "scheduler": scheduler,
        "taken": getattr(engine.training_dataloader, "taken", None),
        "client": dict(client_state),
    }


def load(engine: Any, path: Path) -> dict[str, Any]:
    """Read what :func:`save` wrote, by any cut of the model, and give back the ``client_state``."""
    module, optimizer = engine.module, engine.optimizer
    try:
        stored = filesystem.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    except Exception as error:
        raise PipelineError(f"Loading the checkpoint {path}: there is none, or it is not whole ({error}).") from error
    model = module.state_dict()
    wanted: dict[str, Any] = {f"model.{name}": tensor for name, tensor in model.items()}
    missing = sorted(set(wanted) - set(stored))
    if missing:
        raise PipelineError(
            f"Loading the checkpoint {path}: it lacks {missing[:4]}. It is of a model with other layers."
        )
    states: dict[Any, dict[str, str]] = {}
    for name, parameter in () if optimizer is None else module.named_parameters(remove_duplicate=False):
        prefix = f"optimizer.{name}."
        for key, about in stored.items():
            if key.startswith(prefix) and "." not in key[len(prefix) :]:
                wanted[key] = _room_for(about, parameter)
                states.setdefault(parameter, {})[key[len(prefix) :]] = key
    random = [name for name in stored if name.startswith(f"random.{dist.get_rank()}.")]
    for name in (*random, "engine"):
        wanted[name] = _room_for(stored[name])
    state_dict_loader.load(wanted, checkpoint_id=str(path), process_group=engine.grid.control)
    module.load_state_dict(model)
    for parameter, keys in states.items():
        assert optimizer is not None
        optimizer.state[parameter] = {name: wanted[key] for name, key in keys.items()}
    for name in random:
        if name.endswith("cpu"):
            torch.set_rng_state(wanted[name])
        elif module.device.type == "cuda":
            torch.cuda.set_rng_state(wanted[name], module.device)
    state = torch.load(io.BytesIO(wanted["engine"].numpy().tobytes()), weights_only=True)
    engine.global_steps, engine.global_samples = state["global_steps"], state["global_samples"]
    engine.micro_batches = state["micro_batches"]
    for group, kept in zip(optimizer.param_groups if optimizer else (), state["groups"], strict=False):
        group.update(kept)
    scheduler = engine.lr_scheduler
    if scheduler is not None and state["scheduler"] is not None:
        if hasattr(scheduler, "lr_lambdas"):
            state["scheduler"]["lr_lambdas"] = [None] * len(scheduler.lr_lambdas)
        scheduler.load_state_dict(state["scheduler"])
    if state["taken"] is not None and hasattr(engine.training_dataloader, "go_to"):
        engine.training_dataloader.go_to(state["taken"])
    client: dict[str, Any] = state["client"]
    return client


def _room_for(about: Any, parameter: Any = None) -> Any:
    if not isinstance(about, TensorStorageMetadata):
        return None
    # Steps are counted on the host, also for parameters on a device.
    device = "cpu" if parameter is None or len(about.size) == 0 else parameter.device
    return torch.empty(about.size, dtype=about.properties.dtype, device=device)
