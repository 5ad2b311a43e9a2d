"""Checkpoints by ``torch.distributed.checkpoint``: by parameter names, independent of the cuts."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from deep500_timing_torch.pipeline._actions import PipelineError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from deep500_timing_deepspeed.pipe._module import PipelineModule


def save(path: Path, module: PipelineModule, optimizer: Any, state: Mapping[str, Any], group: Any) -> None:
    """Write the parameters, the optimizer's state, this rank's random state, and plain data."""
    found: dict[str, Any] = {f"model.{name}": tensor for name, tensor in module.state_dict().items()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        for key, value in ({} if optimizer is None else optimizer.state.get(parameter, {})).items():
            found[f"optimizer.{name}.{key}"] = value
    found[f"random.{dist.get_rank()}.cpu"] = torch.get_rng_state()
    if module.device.type == "cuda":
        found[f"random.{dist.get_rank()}.cuda"] = torch.cuda.get_rng_state(module.device)
    if dist.get_rank() == 0:
        found["engine"] = _packed(dict(state))
    state_dict_saver.save(found, checkpoint_id=str(path), process_group=group)


def load(path: Path, module: PipelineModule, optimizer: Any, group: Any) -> dict[str, Any]:
    """Read what :func:`save` wrote, by any cut of the model, and give back the plain data."""
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
    states: dict[Any, dict[str, Any]] = {}
    for name, parameter in () if optimizer is None else module.named_parameters(remove_duplicate=False):
        prefix = f"optimizer.{name}."
        for key, about in stored.items():
            if key.startswith(prefix) and "." not in key[len(prefix) :]:
                wanted[key] = states.setdefault(parameter, {})[key[len(prefix) :]] = _room_for(about, parameter)
    random = {name: _room_for(stored[name]) for name in stored if name.startswith(f"random.{dist.get_rank()}.")}
    wanted |= random
    wanted["engine"] = _room_for(stored["engine"])
    state_dict_loader.load(wanted, checkpoint_id=str(path), process_group=group)
    module.load_state_dict(model)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if optimizer is not None and parameter in states:
            kept = states[parameter]
            optimizer.state[parameter] = {key: wanted[f"optimizer.{name}.{key}"] for key in kept}
    for name in random:
        if name.endswith("cpu"):
            torch.set_rng_state(wanted[name])
        elif module.device.type == "cuda":
            torch.cuda.set_rng_state(wanted[name], module.device)
    found: dict[str, Any] = torch.load(io.BytesIO(wanted["engine"].numpy().tobytes()), weights_only=True)
    return found


def _packed(state: dict[str, Any]) -> torch.Tensor:
    # As a tensor, since the library takes dicts apart by their keys.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _room_for(about: Any, parameter: Any = None) -> Any:
    if not isinstance(about, TensorStorageMetadata):
        return None
    # Steps are counted on the host, also for parameters on a device.
    device = "cpu" if parameter is None or len(about.size) == 0 else parameter.device
    return torch.empty(about.size, dtype=about.properties.dtype, device=device)


def plain(state: Mapping[str, Any]) -> dict[str, Any]:
    # The functions of a schedule are not data; a new schedule has them.
    return {key: value for key, value in state.items() if key != "lr_lambdas"}
