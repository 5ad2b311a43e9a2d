"""The contenders: this timer in both forms, the clock that bounds it, and the timers that people use otherwise.

A contender is a piece of source, run as it stands inside a ``for`` loop, and the names that it needs. The names are
local variables of the loop, as in a function that trains.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from time import perf_counter_ns
from types import ModuleType
from typing import Any

from benchmarks._plainform import load_plain

CLOCK = "two clock reads"
TORCH_DEVICE = Path(__file__).parents[1] / "tests" / "torch_device" / "__init__.py"


def _nothing() -> None:
    """No reset is needed."""


@dataclass
class Contender:
    """One way of timing a region.

    Attributes:
        name: Its name in the report.
        group: ``"limit"``, ``"compiled"``, ``"plain"`` or ``"peer"``.
        statement: Times one empty region.
        names: The statement's names.
        over: An expression of ``n`` to loop over instead, with nothing in the loop, where that is how it is used.
        reset: Forgets the records.
        reads: The recorded durations in ns, or None where nothing is recorded.
        plain_call: A statement whose cost is part of the work rather than of the timing, such as the decorated call.
        tail_pairs: Largest number of pairs in the measurement of the tail.
        chart: Whether the picture shows it.
    """

    name: str
    group: str
    statement: str
    names: dict[str, Any]
    over: str = "range(n)"
    reset: Callable[[], Any] = _nothing
    reads: Callable[[], list[float]] | None = None
    plain_call: str = "pass"
    tail_pairs: int = 1_000_000
    chart: bool = False

    @property
    def label(self) -> str:
        """The name, and which form it is of this timer."""
        return f"{self.name} ({self.group})" if self.group in ("compiled", "plain") else self.name


@dataclass
class Field:
    """Everything that is available, and the missing parts.

    Attributes:
        contenders: In the order of the report.
        missing: Name of a contender, and the error in the way.
        versions: Version of each peer's package.
    """

    contenders: list[Contender] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, label: str) -> Contender:
        """The contender of that label."""
        return next(contender for contender in self.contenders if contender.label == label)


def assemble(*, wanted: Callable[[str], bool] = lambda _label: True, frameworks: bool = True) -> Field:
    """Build every contender that this machine can run.

    Args:
        wanted: Which labels to keep.
        frameworks: Whether to include what needs PyTorch: False saves the seconds that importing it takes.
    """
    found = Field()
    _clock(found)
    for group, load in (("compiled", _compiled), ("plain", load_plain)):
        try:
            package = load()
        except ImportError as error:
            found.missing[f"deep500-timing, {group}"] = str(error)
            continue
        _ours(found, group, package)
        if frameworks:
            _try(found, f"gpu=True on the torch test device ({group})", _on_torch_device, group, load)
    _deep500(found)
    _try(found, "codetiming", _codetiming)
    _try(found, "OpenTelemetry", _opentelemetry)
    if frameworks:
        _try(found, "two bare torch.Event records", _bare_events)
        _try(found, "DeepSpeed", _deepspeed)
        _try(found, "torchtnt", _torchtnt)
        _try(found, "Lightning", _lightning)
        _try(found, "torch.profiler.record_function", _record_function)
    found.contenders = [contender for contender in found.contenders if wanted(contender.label)]
    return found


def _try(found: Field, name: str, build: Callable[..., None], *args: Any) -> None:
    # A peer that is absent or broken is named with its error; it must not end the run.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            build(found, *args)
    except Exception as error:
        found.missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]


def _clock(found: Field) -> None:
    found.contenders.append(Contender(CLOCK, "limit", "clock(); clock()", {"clock": perf_counter_ns}, chart=True))


# --- this timer -------------------------------------------------------------------------------------------------------


def _compiled(package: str = "deep500_timing") -> ModuleType:
    module = importlib.import_module(package)
    if not module.compiled:
        raise ImportError("the installed deep500_timing is plain Python; `make setup` compiles it")
    return module


def _durations(timer: Any, key: Any, **kwargs: Any) -> Callable[[], list[float]]:
    return lambda: [1e9 * seconds for seconds in timer.get_time(key, **kwargs)]


def _ours(found: Field, group: str, package: ModuleType) -> None:
    key = package.TimeType.BATCH

    def add(name: str, statement: str, timer: Any, *, reads: bool = True, chart: bool = False, **settings: Any) -> None:
        names = {"tmr": timer, "key": key, **settings.pop("names", {})}
        read = _durations(timer, key) if reads else None
        found.contenders.append(
            Contender(name, group, statement, names, reset=timer.reset, reads=read, chart=chart, **settings)
        )

    add("start/end", "tmr.start(key); tmr.end(key)", package.Timer(), chart=True)
    add("start/end, string key", "tmr.start(key); tmr.end(key)", package.Timer(), names={"key": "loss"}, reads=False)
    add("with region", "with tmr.region(key): pass", package.Timer(), chart=True)
    timer = package.Timer()
    add("handle start/end", "h.start(); h.end()", timer, names={"h": timer.region(key)})
    timer = package.Timer()
    add("with handle", "with h: pass", timer, names={"h": timer.region(key)})
    timer = package.Timer()
    function, undecorated = timer.timed(key)(_empty), _empty
    names = {"f": function, "g": undecorated}
    add("decorator", "f()", timer, names=names, plain_call="g()")
    timer = package.Timer()
    names = {"items": iter(timer.iterate(repeat(0), key))}
    add("iterate", "next(items)", timer, names=names, over="tmr.iterate(range(n), key)")
    disabled = package.Timer(enabled=False)
    add("start/end, disabled", "tmr.start(key); tmr.end(key)", disabled, reads=False, chart=True)
    add("with region, disabled", "with tmr.region(key): pass", disabled, reads=False)
    add("start/end, keep_last=1000", "tmr.start(key); tmr.end(key)", package.Timer(keep_last=1000))
    add("CPUGPUTimer start/end", "tmr.start(key); tmr.end(key)", package.CPUGPUTimer())
    testing = importlib.import_module(f"{package.__name__}.testing")
    timer = package.CPUGPUTimer(device_clock=testing.ManualDeviceClock())
    add("gpu=True on ManualDeviceClock", "tmr.start(key, gpu=True); tmr.end(key, gpu=True)", timer)


def _empty() -> None:
    """The decorated function."""


def load_torch_device() -> Any:
    """The test accelerator of the test suite, which needs a C++ compiler the first time.

    Raises:
        Exception: It is not there, or cannot be built.
    """
    if "torch_device" not in sys.modules:
        spec = importlib.util.spec_from_file_location("torch_device", TORCH_DEVICE)
        if spec is None or spec.loader is None or not TORCH_DEVICE.is_file():
            raise FileNotFoundError(f"{TORCH_DEVICE} is part of the source tree only")
        module = importlib.util.module_from_spec(spec)
        sys.modules["torch_device"] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules["torch_device"]
            raise
    return sys.modules["torch_device"].load()


def _on_torch_device(found: Field, group: str, load: Callable[[str], ModuleType]) -> None:
    load_torch_device()
    package = load("deep500_timing_torch")
    key = package.TimeType.BATCH
    for name, statement in (
        ("gpu=True on the torch test device", "tmr.start(key, gpu=True); tmr.end(key, gpu=True)"),
        ("region(gpu=True) on the torch test device", "with tmr.region(key, gpu=True): pass"),
    ):
        timer = package.CPUGPUTimer()
        names = {"tmr": timer, "key": key}
        read = _durations(timer, key)
        found.contenders.append(Contender(name, group, statement, names, reset=timer.reset, reads=read))


def _bare_events(found: Field) -> None:
    import torch

    load_torch_device()
    events = [torch.Event("testdev", enable_timing=True) for _ in range(2)]
    names = {"a": events[0], "b": events[1]}
    found.contenders.append(Contender("two bare torch.Event records", "limit", "a.record(); b.record()", names))
    statement = "a.record(); b.record(); a.elapsed_time(b)"
    found.contenders.append(Contender("two torch.Event records and their time", "limit", statement, names))


# --- peers ------------------------------------------------------------------------------------------------------------


def _deep500(found: Field) -> None:
    from benchmarks._deep500 import Key, ListTimer

    timer = ListTimer()
    found.contenders.append(
        Contender(
            "Deep500's design",
            "peer",
            "tmr.start(key); tmr.end(key)",
            {"tmr": timer, "key": Key.BATCH},
            reset=timer.reset,
            reads=lambda: [1e9 * seconds for seconds in timer.get_time(Key.BATCH)],
            chart=True,
        )
    )


def _codetiming(found: Field) -> None:
    import codetiming

    found.versions["codetiming"] = _version("codetiming")
    timer = codetiming.Timer(name="batch", logger=None)
    ways = (("codetiming start/stop", "tmr.start(); tmr.stop()"), ("codetiming with", "with tmr: pass"))
    for name, statement in ways:
        found.contenders.append(
            Contender(
                name,
                "peer",
                statement,
                {"tmr": timer},
                reset=codetiming.Timer.timers.clear,
                reads=lambda: [1e9 * seconds for seconds in codetiming.Timer.timers._timings["batch"]],
                chart="start" in name,
            )
        )


def _opentelemetry(found: Field) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    found.versions["opentelemetry-sdk"] = _version("opentelemetry-sdk")
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("benchmarks")
    found.contenders.append(
        Contender(
            "OpenTelemetry span",
            "peer",
            "with tracer.start_as_current_span(name): pass",
            {"tracer": tracer, "name": "batch"},
            reset=exporter.clear,
            reads=lambda: [float(span.end_time - span.start_time) for span in exporter.get_finished_spans()],
            tail_pairs=100_000,
            chart=True,
        )
    )


def _deepspeed(found: Field) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from types import SimpleNamespace

    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer

    found.versions["deepspeed"] = _version("deepspeed")
    if not get_accelerator().use_host_timers():
        raise RuntimeError(f"DeepSpeed times on {get_accelerator().device_name()!r} here rather than on the host")
    timers = SynchronizedWallClockTimer()
    for name, group, chart in (
        ("DeepSpeed named timer", timers, True),
        ("DeepSpeed NoopTimer (disabled)", NoopTimer(), False),
    ):
        names = {"timers": group, "name": "batch"}
        contender = Contender(name, "peer", "timers(name).start(); timers(name).stop()", names, chart=chart)
        if group is timers:
            contender.reset = timers("batch").reset
            contender.reads = lambda: [1e9 * seconds for seconds in timers("batch").event_timers]
        found.contenders.append(contender)
    throughput = ThroughputTimer(SimpleNamespace(enabled=True, synchronized=False), batch_size=32)
    names = {"tmr": throughput}
    statement = "tmr.start(); tmr.stop(global_step=True)"
    found.contenders.append(Contender("DeepSpeed ThroughputTimer", "peer", statement, names, chart=True))


def _torchtnt(found: Field) -> None:
    from torchtnt.utils.timer import Timer

    found.versions["torchtnt"] = _version("torchtnt")
    timer = Timer(cuda_sync=False)
    found.contenders.append(
        Contender(
            "torchtnt Timer.time",
            "peer",
            "with tmr.time(name): pass",
            {"tmr": timer, "name": "batch"},
            reset=timer.reset,
            reads=lambda: [1e9 * seconds for seconds in timer.recorded_durations["batch"]],
            chart=True,
        )
    )


def _lightning(found: Field) -> None:
    from lightning.pytorch.profilers import SimpleProfiler

    found.versions["lightning"] = _version("lightning")
    for name, statement in (
        ("Lightning SimpleProfiler start/stop", "tmr.start(name); tmr.stop(name)"),
        ("Lightning SimpleProfiler.profile", "with tmr.profile(name): pass"),
    ):
        profiler = SimpleProfiler()

        def reads(profiler: Any = profiler) -> list[float]:
            return [1e9 * seconds for seconds in profiler.recorded_durations["batch"]]

        names = {"tmr": profiler, "name": "batch"}
        reset = profiler.recorded_durations.clear
        found.contenders.append(Contender(name, "peer", statement, names, reset=reset, reads=reads, chart=True))


def _record_function(found: Field) -> None:
    import torch

    found.versions["torch"] = torch.__version__
    names = {"record_function": torch.profiler.record_function, "name": "batch"}
    statement = "with record_function(name): pass"
    label = "torch.profiler.record_function"
    found.contenders.append(Contender(label, "peer", statement, names, tail_pairs=300_000, chart=True))


def _version(distribution: str) -> str:
    from importlib.metadata import version

    return version(distribution)


def groups(contenders: list[Contender]) -> Iterator[tuple[str, list[Contender]]]:
    """The contenders by group, in the order of the report."""
    for group in ("limit", "compiled", "plain", "peer"):
        members = [contender for contender in contenders if contender.group == group]
        if members:
            yield group, members
