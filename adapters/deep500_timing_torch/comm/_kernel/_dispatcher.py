"""The compiled kernel in PyTorch's dispatcher, and the functions that it calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing_torch.comm import _log
from deep500_timing_torch.comm._backward import watch_backward
from deep500_timing_torch.comm._log import LOG, fault
from deep500_timing_torch.comm._operation import PendingOp, begin, future_of
from deep500_timing_torch.comm._ops import BY_OPERATOR, Op
from deep500_timing_torch.comm._settings import SETTINGS

if TYPE_CHECKING:
    from types import ModuleType


class Kernel:
    """The kernel at work, one for the process."""

    def __init__(self, module: ModuleType) -> None:
        """Use a kernel that was loaded; nothing happens before :meth:`start`."""
        self._module = module
        self._operations: list[Op] = [BY_OPERATOR[name] for name in module.rules()]

    def start(self) -> None:
        """Put the kernel into the dispatcher."""
        self._module.install(self._begin, issued)
        SETTINGS.kernel = self
        SETTINGS.changed()

    def stop(self) -> None:
        """Take it out again."""
        self._module.uninstall()
        SETTINGS.kernel = None
        SETTINGS.changed()

    def configure(self) -> None:
        """Tell the kernel which operations to time."""
        self._module.configure(SETTINGS.enabled, [SETTINGS.wants(op.name) for op in self._operations])

    def mute(self, by: int) -> None:
        """Count what this thread issues as part of another operation (1), or no more (-1)."""
        self._module.mute(by)

    def _begin(self, number: int, nbytes: int, process_group: Any, tensor: Any) -> PendingOp | None:
        op = self._operations[number]
        try:
            group = LOG.group_of(process_group) or LOG.unregistered_group(process_group)
            label = f"{op.name} | {_log.caller()}" if SETTINGS.debug else op.name
            record = group.record(op, label, None if nbytes < 0 or op.factor is None else nbytes)
            return begin(record, process_group, tensor)
        except Exception as error:
            fault(op.name, error)
            return None


def issued(op: PendingOp, work: Any, blocking: bool, plain: bool) -> bool:
    """The kernel has seen an operation return a handle."""
    try:
        if blocking and plain:
            op.blocks()
        else:
            op.issued(1, None if op.on_device else future_of(work, op.record))
            watch_backward(op)
    except Exception as error:
        fault(op.record.label, error)
    return plain
