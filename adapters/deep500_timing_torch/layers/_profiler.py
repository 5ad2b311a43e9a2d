"""ProfilerWrapper: a profile of a model by blocks, with its trace, its pictures and its tables in one folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from deep500_timing.adapters import UNKNOWN, format_bytes, format_time, lines_of, rank_and_world, safe_name, warn_once
from deep500_timing_torch.layers._plots import MemorySample, RangeTime, plot_memory, plot_times, ranges_of
from deep500_timing_torch.layers._select import Match, repeated_blocks, select
from deep500_timing_torch.layers._times import sum_known
from deep500_timing_torch.memory import TorchMemory

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")

_SNAPSHOT_EVENTS = 100_000


class ProfilerWrapper:
    """Profiles a ``with`` block and writes the results: on a CPU, a GPU, one rank or many.

    ::

        with ProfilerWrapper(model=model, log_dir="profile") as profiler:
            for batch in batches:
                loss = profiler.record_function("step", lambda: train_step(model, batch))
                profiler.step()

    The files, in ``log_dir``, with the rank in each name: ``*_trace.json`` (opens in Perfetto and chrome://tracing),
    ``*_cuda_time_plot.png`` (each block's time, attention apart), ``*_memory_usage_line_chart.png``,
    ``*_memory_usage.txt``, ``*_rank_N.log`` (tables) and, if asked for, ``*_memory_snapshot.pickle``. A file that
    cannot be written costs a warning. An exception within the block goes on after the files have been written.

    Attention is found by its operators (flash, memory-efficient, cuDNN and plain), not by the names of modules.
    Profiling costs: 1.5 times the time of a CPU step and more, so choose a window by ``schedule``.

    Args:
        is_st: The prefix of the files: True for ``opensora``, False for ``cogvideo``, as in the tool that this stands
            for; None for ``name``.
        activities: The activities to record; None for the CPU and CUDA, if it is there.
        profile_memory: Whether the profiler follows allocations.
        record_shapes: Whether it notes the shapes of inputs.
        log_dir: The folder of all files; made if need be.
        mem_dir: The folder of the memory snapshot; None for ``log_dir``.
        enabled_record_memory_pickle: Write PyTorch's memory snapshot (CUDA alone has one).
        enabled_record_cuda_average_time: Draw the times by block.
        enable_record_cuda_mm: Read the memory after each block, and draw it.
        enable_print_summary: Write the tables.
        model: The model to split into blocks; None for the ranges of ``record_function`` only.
        match: Which of its modules are the blocks, as for :class:`LayerTimer`; None for the block that it repeats.
        schedule: A ``torch.profiler.schedule``: which steps, ended by :meth:`step`, are profiled. None for all.
        name: The prefix of the files; None for the class of the model.
    """

    def __init__(
        self,
        is_st: bool | None = None,
        activities: Iterable[ProfilerActivity] | None = None,
        profile_memory: bool = True,
        record_shapes: bool = False,
        log_dir: str | PathLike[str] = "profile",
        mem_dir: str | PathLike[str] | None = None,
        enabled_record_memory_pickle: bool = False,
        enabled_record_cuda_average_time: bool = True,
        enable_record_cuda_mm: bool = True,
        enable_print_summary: bool = True,
        *,
        model: nn.Module | None = None,
        match: Match | None = None,
        schedule: Callable[[int], torch.profiler.ProfilerAction] | None = None,
        name: str | None = None,
    ) -> None:
        self.folder = Path(log_dir)
        self.files: list[Path] = []
        self.ranges: list[RangeTime] = []
        """Each run through a range that was profiled, in order; there after the block."""
        self.memory: list[MemorySample] = []
        """Memory after each run through a range, in order."""
        self.out_of_memory: str | None = None
        """The innermost layer that ran out of device memory in its forward pass."""
        self._model = model
        self._failed = ""
        self._memory_folder = self.folder if mem_dir is None else Path(mem_dir)
        self._snapshot = enabled_record_memory_pickle
        self._plot_times = enabled_record_cuda_average_time
        self._reader = TorchMemory() if enable_record_cuda_mm else None
        self._tables = enable_print_summary
        self._blocks = [] if model is None else _blocks_of(model, match)
        self._hooks: list[Any] = []
        self._names: set[str] = {path for path, _ in self._blocks}
        self._summary = ""
        given = {True: "opensora", False: "cogvideo", None: name}[is_st]
        self._prefix = given or ("profile" if model is None else type(model).__name__)
        self._rank = rank_and_world()[0]
        cuda = torch.cuda.is_available()
        if activities is None:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._profile: Any = profile(
            activities=list(activities),
            profile_memory=profile_memory,
            record_shapes=record_shapes,
            schedule=schedule,
            on_trace_ready=self._window_ended,
        )
        if self._snapshot and not cuda:
            self._snapshot = False
            warn_once(
                "Profiling with enabled_record_memory_pickle=True: only CUDA has memory snapshots; none is written."
            )

    def __enter__(self) -> Self:
        for path, module in self._blocks:
            before, after = _range_hooks(path, self._read_memory)
            self._hooks.append(module.register_forward_pre_hook(before, prepend=True))
            self._hooks.append(module.register_forward_hook(after, always_call=True))
        if self._snapshot:
            torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_EVENTS)
        self._profile.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if isinstance(error, torch.OutOfMemoryError):
            self.out_of_memory = None if self._model is None else _innermost(self._model, error.__traceback__)
            where = "outside of any layer's forward pass" if self.out_of_memory is None else f"in {self.out_of_memory}"
            self._failed = f"The device ran out of memory {where}."
        elif isinstance(error, BaseException):
            self._failed = f"Ended by {type(error).__name__}."
        self._guarded("ending the profile", self._profile.stop)
        self._write_all()

    def step(self) -> None:
        """Say that a step has ended, for ``schedule``."""
        self._profile.step()

    def record_function(self, name: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a function as a range of that name.

        Args:
            name: The name of the range in the trace, the pictures and the tables.
            function: What to run.
            *args: For it.
            **kwargs: For it.

        Returns:
            The result of the function.
        """
        self._names.add(name)
        with torch.profiler.record_function(name):
            result = function(*args, **kwargs)
        self._read_memory(name)
        return result

    # --- called by the hooks and the profiler -------------------------------------------------------------------------

    def _read_memory(self, name: str) -> None:
        if self._reader is not None:
            self._guarded("reading the memory", partial(self._add_sample, name, self._reader))

    def _add_sample(self, name: str, reader: TorchMemory) -> None:
        usage = reader.read()
        sizes = usage.device_allocated_bytes, usage.device_reserved_bytes, usage.host_rss_bytes
        self.memory.append(MemorySample(name, *sizes))

    def _window_ended(self, done: Any) -> None:
        events = done.events()
        if events is not None:
            self.ranges += ranges_of(events, frozenset(self._names))
        self._write("writing the trace", "_trace.json", lambda path: done.export_chrome_trace(str(path)))
        on_device = any(one.device_us is not None for one in self.ranges)
        key = "self_device_time_total" if on_device else "self_cpu_time_total"
        self._summary = done.key_averages().table(sort_by=key, row_limit=40)

    # --- the files --------------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        title = f"{self._prefix}, rank {self._rank}"
        plot, chart = "_cuda_time_plot.png", "_memory_usage_line_chart.png"
        if self._plot_times and self.ranges:
            self._write("drawing the times", plot, lambda path: plot_times(path, self.ranges, f"Time: {title}"))
        if self.memory:
            self._write("drawing the memory", chart, lambda path: plot_memory(path, self.memory, f"Memory: {title}"))
        if self.memory or self.out_of_memory:
            text = self._memory_text()
            self._write("writing the memory", "_memory_usage.txt", lambda path: path.write_text(text, "utf-8"))
        if self._tables:
            self._write("writing the tables", ".log", lambda path: path.write_text(self._tables_text(), "utf-8"))
        if self._snapshot:
            memory: Any = torch.cuda.memory
            name, folder = "_memory_snapshot.pickle", self._memory_folder
            self._write("writing the memory snapshot", name, lambda path: memory._dump_snapshot(str(path)), folder)
            self._guarded("ending the memory snapshot", lambda: memory._record_memory_history(enabled=None))

    def _write(self, doing: str, suffix: str, write: Callable[[Path], object], folder: Path | None = None) -> None:
        def to_file() -> None:
            into = self.folder if folder is None else folder
            into.mkdir(parents=True, exist_ok=True)
            path = first = into / f"{self._prefix}_rank_{self._rank}{suffix}"
            # A schedule may have several windows, and a folder the files of an earlier profile: none is overwritten.
            numbers = count(2)
            while path.exists():
                path = first.with_name(f"{first.stem}_{next(numbers)}{first.suffix}")
            write(path)
            self.files.append(path)

        self._guarded(doing, to_file)

    def _guarded(self, doing: str, action: Callable[[], object]) -> None:
        # A report that fails costs itself.
        try:
            action()
        except Exception as error:
            warn_once(f"Profiling: {doing} failed, the rest goes on: {type(error).__name__}: {error}")

    def _memory_text(self) -> str:
        rows: list[tuple[str, ...]] = [("after", "allocated", "reserved", "host RSS")]
        for one in self.memory:
            sizes = one.allocated_bytes, one.reserved_bytes, one.host_bytes
            rows.append((safe_name(one.name), *map(format_bytes, sizes)))
        return "\n".join([*lines_of(rows, left=1), *([self._failed] if self._failed else [])]) + "\n"

    def _tables_text(self) -> str:
        rows: list[tuple[str, ...]] = [("range", "calls", "CPU", "device", "attention", "share")]
        for name in dict.fromkeys(one.name for one in self.ranges):
            calls = [one for one in self.ranges if one.name == name]
            sums_us = [sum_known(getattr(one, of) for one in calls) for of in ("cpu_us", "device_us", "attention_us")]
            whole_us, attention_us = sum(one.time_us for one in calls), sums_us[2]
            share = UNKNOWN if attention_us is None or not whole_us else f"{100 * attention_us / whole_us:.1f} %"
            cells = [format_time(None if sum_us is None else sum_us / 1e6) for sum_us in sums_us]
            rows.append((safe_name(name), str(len(calls)), *cells, share))
        head = [f"Ranges of {self._prefix}, rank {self._rank}", "", *([self._failed, ""] if self._failed else [])]
        return "\n".join([*head, *lines_of(rows, left=1), "", self._summary, ""])


def _blocks_of(model: nn.Module, match: Match | None) -> list[tuple[str, nn.Module]]:
    if match is not None:
        return [(layer.path, layer.module) for layer in select(model, depth=None, match=match)[1:]]
    modules = dict(model.named_modules())
    blocks = [(name, modules[name]) for name in repeated_blocks(model)]
    return blocks or [(type(model).__name__, model)]


def _innermost(model: nn.Module, traceback: TracebackType | None) -> str | None:
    # The last module that the exception came out of, by the frames of its calls.
    names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
    found = None
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code is _CALL:
            found = names.get(id(frame.f_locals.get("self")), found)
        traceback = traceback.tb_next
    return found


_CALL = torch.nn.Module._call_impl.__code__


def _range_hooks(path: str, done: Callable[[str], None]) -> tuple[Callable[..., None], Callable[..., None]]:
    ranges: list[Any] = []

    def before(_module: nn.Module, _args: object) -> None:
        opened: Any = torch.profiler.record_function(path)
        opened.__enter__()
        ranges.append(opened)

    def after(_module: nn.Module, _args: object, _output: object) -> None:
        if ranges:
            ranges.pop().__exit__(None, None, None)
            done(path)

    return before, after
