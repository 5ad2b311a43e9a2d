"""Saving an engine, and going on from there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from deep500_timing_deepspeed.pipe import _checkpoint
from deep500_timing_deepspeed.pipe._guard import Guard
from deep500_timing_torch.pipeline._errors import PipelineError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from deep500_timing_deepspeed.pipe._grid import Grid
    from deep500_timing_deepspeed.pipe._module import PipelineModule

__all__ = ["Saving"]


class Saving:
    """The part of the engine that writes and reads checkpoints."""

    module: PipelineModule
    optimizer: Any
    lr_scheduler: Any
    training_dataloader: Any
    grid: Grid
    global_steps: int
    global_samples: int
    micro_batches: int

    def save_checkpoint(
        self, save_dir: str | PathLike[str], tag: str | None = None, client_state: Mapping[str, Any] | None = None
    ) -> Path:
        """Write everything that goes on from here bit by bit. Every rank calls it.

        Args:
            save_dir: A folder that all ranks see.
            tag: Its name in there; ``global_step<n>`` if None.
            client_state: Plain data of your own, such as where a data iterator stands.

        Returns:
            The folder that was written.
        """
        path = Path(save_dir) / (tag or f"global_step{self.global_steps}")
        state = {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "micro_batches": self.micro_batches,
            "groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in (self.optimizer.param_groups if self.optimizer is not None else ())
            ],
            "scheduler": None if self.lr_scheduler is None else _plain(self.lr_scheduler.state_dict()),
            "taken": getattr(self.training_dataloader, "taken", None),
            "client": dict(client_state or {}),
        }
        with Guard(self, "Saving a checkpoint"):
            _checkpoint.save(path, self.module, self.optimizer, state, self.grid.control)
            if self.grid.global_rank == 0:
                (Path(save_dir) / "latest").write_text(path.name, encoding="utf-8")
            dist.barrier(group=self.grid.control)
        return path

    def load_checkpoint(self, load_dir: str | PathLike[str], tag: str | None = None) -> tuple[Path, dict[str, Any]]:
        """Read a checkpoint, written by this or any other cut of the model into stages. Every rank calls it.

        Random states are those of the rank that has the same number; the engine's own loader goes on where it was, an
        iterator of your own is yours to set.

        Returns:
            The folder, and the ``client_state``.

        Raises:
            PipelineError: It is not there, or of another model.
        """
        if tag is None:
            latest = Path(load_dir) / "latest"
            if not latest.exists():
                raise PipelineError(f"Loading a checkpoint: {load_dir} has no file 'latest'. Pass a tag.")
            tag = latest.read_text(encoding="utf-8").strip()
        path = Path(load_dir) / tag
        state = _checkpoint.load(path, self.module, self.optimizer, self.grid.control)
        self.global_steps, self.global_samples = state["global_steps"], state["global_samples"]
        self.micro_batches = state["micro_batches"]
        for group, kept in zip(self.optimizer.param_groups if self.optimizer else (), state["groups"], strict=False):
            group.update(kept)
        if self.lr_scheduler is not None and state["scheduler"] is not None:
            kept = state["scheduler"]
            if hasattr(self.lr_scheduler, "lr_lambdas"):
                kept["lr_lambdas"] = [None] * len(self.lr_scheduler.lr_lambdas)
            self.lr_scheduler.load_state_dict(kept)
        if state["taken"] is not None and hasattr(self.training_dataloader, "go_to"):
            self.training_dataloader.go_to(state["taken"])
        return path, state["client"]


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    # The functions of a schedule are not data; a new schedule has them.
    return {key: value for key, value in state.items() if key != "lr_lambdas"}
