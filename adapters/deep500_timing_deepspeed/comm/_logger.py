"""``CommsLogger``: DeepSpeed's face of the log and of the settings, with latencies in ms and bandwidths in Gbit/s."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from datetime import UTC, datetime
from typing import Any

from deep500_timing import trim_mean
from deep500_timing.adapters import format_bytes, rank_and_world, summarize
from deep500_timing_torch.comm import log_summary
from deep500_timing_torch.comm.names import DONE, LOG, OPS, SETTINGS, CommLog, Op, Settings, bandwidths, unknown

_GBIT_PER_GB = 8
_TRIM = 0.1


def _setting(
    name: str, store: Callable[..., Any], doc: str, load: Callable[..., Any] = lambda value: value
) -> property:
    def get(logger: CommsLogger) -> Any:
        return load(getattr(logger._settings, name))

    def put(logger: CommsLogger, value: Any) -> None:
        setattr(logger._settings, name, store(value))
        logger._settings.changed()

    return property(get, put, doc=doc)


class CommsLogger:
    """A log of operations by name and message size. A new one is off and holds only appended operations.

    ``comms_logger`` is the one of this process: its settings are those of :func:`comm.configure`, its operations
    those of :func:`comm.summary`. Of each size the latest 256 latencies are kept one by one; counts are of all.
    """

    def __init__(self) -> None:
        self._given: dict[str, dict[int, list[Any]]] = {}
        self._log, self._settings = CommLog(), Settings()
        self._settings.enabled = False

    def configure(self, comms_config: Any) -> None:
        """Apply DeepSpeed's config: ``comms_logger_enabled``, and if True the fields of ``comms_logger``."""
        self.enabled = comms_config.comms_logger_enabled
        if self.enabled:
            chosen = comms_config.comms_logger
            self.verbose, self.debug = chosen.verbose, chosen.debug
            self.prof_ops, self.prof_all = chosen.prof_ops, chosen.prof_all

    enabled: Any = _setting("enabled", bool, "Whether operations are logged.")
    prof_all: Any = _setting("prof_all", bool, "Whether all operations are logged, or only those of ``prof_ops``.")
    prof_ops: Any = _setting("prof_ops", frozenset, "The names of the operations to log unless ``prof_all``.", sorted)
    verbose: Any = _setting("verbose", bool, "Whether each operation is printed.")
    debug: Any = _setting("debug", bool, "Whether operations are separated by caller.")

    def start_profiling_comms(self) -> None:
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Log only those of ``prof_ops``."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Iterable[str]) -> None:
        """Log these operations as well."""
        self.prof_ops = [*self.prof_ops, *op_name_list]

    def stop_profiling_op(self, op_name_list: Iterable[str]) -> None:
        """Stop logging these operations."""
        self.prof_ops = [name for name in self.prof_ops if name not in set(op_name_list)]

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Log an operation that the caller timed.

        Args:
            raw_name: The operation, for the bandwidths.
            record_name: The name in the log.
            latency: Its time in ms.
            msg_size: Its message in bytes.
        """
        from torch.distributed import GroupMember

        group = self._log.group_of(GroupMember.WORLD) or self._log.alone
        op = OPS.get(raw_name) or Op(raw_name, unknown, None)
        self._log.put(group.record(op, record_name, int(msg_size)), DONE, 0, round(latency * 1e6))

    @property
    def comms_dict(self) -> dict[str, dict[int, list[Any]]]:
        """For each name and size: how many, latencies in ms, algorithm and bus bandwidths in Gbit/s."""
        found = deepcopy(self._given)
        for record in self._log.records():
            times = summarize([record.latency])
            latencies = [float(ns) / 1e6 for ns in times.kept_ns()]
            nbytes = int(record.message_bytes or 0)
            rates = [bandwidths(nbytes, record.group.size, ms / 1e3, record.op.factor) for ms in latencies]
            entry = found.setdefault(record.label, {}).setdefault(nbytes, [0, [], [], []])
            entry[0] += times.count
            entry[1] += latencies
            entry[2] += [(algbw or 0.0) * _GBIT_PER_GB for algbw, _ in rates]
            entry[3] += [(busbw or 0.0) * _GBIT_PER_GB for _, busbw in rates]
        return found

    @comms_dict.setter
    def comms_dict(self, given: dict[str, dict[int, list[Any]]]) -> None:
        # As from another run: later operations are added to it.
        self.reset_data()
        self._given = deepcopy(given)

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        return self.comms_dict

    def has_data(self) -> bool:
        return bool(self._given) or next(self._log.records(), None) is not None

    def reset_data(self) -> None:
        self._given = {}
        self._log.reset()

    def get_operation_names(self) -> list[str]:
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        return sum(int(entry[0]) for sizes in self.comms_dict.values() for entry in sizes.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """Statistics of an operation by message size, None if it was not logged."""
        sizes = self.comms_dict.get(operation_name)
        if sizes is None:
            return None
        return {
            nbytes: {
                "count": count,
                "total_latency_ms": sum(latencies),
                "avg_latency_ms": trim_mean(latencies, _TRIM),
                "tput_avg_gbps": trim_mean(algbw, _TRIM),
                "busbw_avg_gbps": trim_mean(busbw, _TRIM),
                "msg_size_bytes": nbytes,
                "msg_size_str": format_bytes(nbytes),
            }
            for nbytes, (count, latencies, algbw, busbw) in sizes.items()
        }

    def as_dict(self, stragglers: dict[str, Any] | None) -> dict[str, Any]:
        """What ``log_summary(return_dict=True)`` returns."""
        rank, world_size = rank_and_world()
        return {
            "summary": {name: self.get_operation_summary(name) for name in self.get_operation_names()},
            "straggler_analysis": stragglers,
            "metadata": {"world_size": world_size, "rank": rank, "timestamp": datetime.now(UTC).isoformat()},
        }

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Print the log, return it as a dictionary, or both.

        Args:
            print_log: Whether to print it.
            show_straggler: Whether to compare with the other ranks, which must do the same. Only for ``comms_logger``.
            return_dict: Whether to return it.
        """
        if print_log and self._log is LOG:
            found = log_summary_as(show_straggler, return_dict=True)
            return found if return_dict else None
        found = self.as_dict({} if show_straggler else None)
        if print_log:
            for name, sizes in found["summary"].items():
                for entry in sizes.values():
                    print(
                        f"{name}  {entry['msg_size_str']}  {entry['count']}  {entry['total_latency_ms']:.2f} ms  mean "
                        f"{entry['avg_latency_ms']:.2f} ms  algbw {entry['tput_avg_gbps']:.2f} Gbit/s  busbw "
                        f"{entry['busbw_avg_gbps']:.2f} Gbit/s"
                    )
        return found if return_dict else None


comms_logger = CommsLogger()
comms_logger._log, comms_logger._settings = LOG, SETTINGS


def log_summary_as(show_straggler: bool = False, return_dict: bool = False, **options: Any) -> Any:
    """See :func:`log_summary`; with ``return_dict`` what DeepSpeed's returns, in its units, instead of a summary.

    Args:
        show_straggler: As there.
        return_dict: Return ``summary``, ``straggler_analysis`` and ``metadata`` as a dictionary.
        **options: As there: ``deadline_s``, ``file``.
    """
    found = log_summary(show_straggler, **options)
    if not return_dict:
        return found
    stragglers: dict[str, Any] | None = None
    if show_straggler:
        stragglers = {}
        for row in found.stragglers or ():
            assert row.transfer_s is not None  # of operations that were timed
            skew_s = sum(row.skew_s.values()) / len(row.skew_s)
            stragglers.setdefault(row.op, {})[row.message_bytes] = {
                "count": row.count,
                "total_comm_lat_ms": row.transfer_s * 1e3,
                "total_straggler_ms": skew_s * 1e3,
                "avg_comm_lat_ms": row.transfer_s / row.count * 1e3,
                "avg_straggler_ms": skew_s / row.count * 1e3,
                "msg_size_bytes": row.message_bytes,
                "msg_size_str": format_bytes(row.message_bytes),
            }
    return comms_logger.as_dict(stragglers)
