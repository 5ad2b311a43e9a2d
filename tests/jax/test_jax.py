"""The adapter for plain JAX."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import SkipTest

import pytest

import deep500_timing_jax as timer
from deep500_timing import Timer
from deep500_timing.devices import DeviceClockContract
from deep500_timing.exceptions import TimingWarning
from deep500_timing.runs import Run
from deep500_timing.testing import ManualClock

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

pytestmark = pytest.mark.slow


class Rig:
    """JAX on the host, and work that sleeps in a callback after the work before it."""

    exact = False

    def __init__(self):
        self.clock = timer.OutputClock()
        self._token = jnp.zeros(())

        def work(token, seconds):
            return jax.pure_callback(self._sleep, jax.ShapeDtypeStruct((), jnp.float32), token, seconds)

        self._work = jax.jit(work)
        self._work(self._token, 0.0).block_until_ready()

    def _sleep(self, token, seconds):
        time.sleep(float(seconds))
        return token

    def launch(self, seconds):
        """Dispatch work."""
        self._token = self._work(self._token, seconds)
        self.clock.watch(self._token)

    def finish(self):
        """Wait for it, and for the thread that waits for it."""
        event = self.clock.new_event(None)
        self.clock.record(event, None)
        self.clock.wait(event)

    def side_stream(self):
        """JAX shows no streams."""
        raise SkipTest("JAX shows no streams")

    def capture(self):
        """Nor graphs."""
        raise SkipTest("JAX captures no graphs")


class TestOutputClock(DeviceClockContract):
    work_seconds = 0.3  # A callback of JAX takes about a millisecond itself.

    @pytest.fixture
    def rig(self):
        """JAX on the host."""
        return Rig()


def test_the_thread_of_a_clock_ends_with_it():
    """Once nothing refers to a clock, the thread that waited for its outputs ends."""
    before = set(threading.enumerate())
    clock = timer.OutputClock()
    clock.watch(jnp.ones(3))
    clock.record(event := clock.new_event(None), None)
    clock.wait(event)
    (waiting,) = set(threading.enumerate()) - before
    del clock
    waiting.join(300)
    assert not waiting.is_alive()


def test_a_donated_output_costs_its_time_only():
    """The regions that end and begin behind a donated output are counted as failed; the next has its time."""
    tmr = timer.CPUGPUTimer(device_clock=(clock := timer.OutputClock()))
    gone = jnp.ones(3)
    gone.delete()
    with pytest.warns(TimingWarning, match="deleted|donated"):
        for output in (gone, jnp.ones(3), jnp.ones(3)):
            with tmr.region("work", gpu=True):
                clock.watch(output)
            tmr.complete_all()
    times = tmr.snapshot().get("work", "GPU")

    assert times is not None
    assert times.stats is not None
    assert (2, 1) == (times.failed, times.stats.count)


def test_watch_keeps_one_small_array():
    """Of a whole result the loss is kept, not the parameters."""
    from deep500_timing_jax._timer import smallest_of

    loss = jnp.zeros(())
    assert loss is smallest_of(({"w": jnp.ones((9, 9))}, loss, 3))
    assert smallest_of({"text": 1}) is None


class Output:
    """An output that is ready when it is waited for, one second later."""

    def __init__(self, clock, waited):
        self._clock = clock
        self._waited = waited

    def block_until_ready(self):
        """Wait."""
        self._waited.append(self)
        self._clock.advance(1.0)


def test_dispatch_and_completion_are_told_apart():
    """Every third call waits for the output of the call before it, which is no longer than three steps take."""
    clock, waited, made = ManualClock(), [], []
    tmr = Timer(clock=clock)

    def train_step():
        clock.advance(0.5)
        made.append(Output(clock, waited))
        return made[-1]

    step = timer.timed_step(train_step, tmr, every=3)
    for _ in range(9):
        step()

    assert [made[1], made[4], made[7]] == waited
    assert [0.5] * 9 == tmr.get_time("dispatch")
    assert [1.0] * 3 == tmr.get_time("wait for device")
    assert [2.5, 2.5] == tmr.get_time("3 steps", gpu=True)
    step.restart()
    for _ in range(3):
        step()
    assert 2 == len(tmr.get_time("3 steps", gpu=True))
    assert "train_step" == step.__name__


@pytest.mark.parametrize("output", [lambda result: result, lambda result: result["x"], lambda result: result.gone])
def test_no_output_ends_the_loop(output):
    """Results that are donated to the next call, and an ``output`` that fails, cost the wait and one warning."""
    tmr = Timer()
    step = timer.timed_step(jax.jit(lambda w: w * 2, donate_argnums=0), tmr, every=2, output=output)
    weights = jnp.ones(4)
    with pytest.warns(TimingWarning, match="output=") as warned:
        for _ in range(8):
            weights = step(weights)

    assert 256.0 == float(weights[0])
    assert 1 == len(warned)
    assert 8 == len(tmr.get_time("dispatch"))
    assert tmr.snapshot().get("wait for device") is None


@pytest.mark.parametrize("every", [1, -1])
def test_waiting_at_each_step_is_refused(every):
    """It would serialize dispatch and computation."""
    with pytest.raises(ValueError, match="give 2 or more, or 0 for never"):
        timer.timed_step(print, Timer(), every=every)


def test_what_is_no_timer_is_refused():
    """The error names the argument and the remedy."""
    with pytest.raises(TypeError, match=r"timed_step\(step, 4\): pass the timer .* such as CPUGPUTimer\(\), not int"):
        timer.timed_step(print, 4)
    with pytest.raises(TypeError, match=r"timed_step\(3\): pass a function"):
        timer.timed_step(3, Timer())


def test_a_disabled_timer_calls_the_function():
    """Nothing is recorded or waited for."""
    tmr = Timer(enabled=False)
    assert 3 == timer.timed_step(lambda: 3, tmr)()
    assert () == tmr.snapshot().regions


def train(wrap, steps=12):
    """Train a small model: the parameters, and what JAX says that it compiled."""
    compiled = []

    def listen(event, seconds, fun_name="", **about):
        if event.endswith("backend_compile_duration") and "train_step" in fun_name:
            compiled.append(fun_name)

    @jax.jit
    def train_step(weights, batch):
        loss, gradient = jax.value_and_grad(lambda w: ((batch @ w) ** 2).mean())(weights)
        return weights - 0.1 * gradient, loss

    jax.monitoring.register_event_duration_secs_listener(listen)
    step, weights = wrap(train_step), jnp.ones((4, 2))
    for number in range(steps):
        weights, _ = step(weights, jnp.full((3 + number // 6, 4), 0.1 * number))
    jax.monitoring.unregister_event_duration_listener(listen)
    return weights.tolist(), compiled


def test_results_and_compilations_are_the_same():
    """Timing changes neither a bit nor the number of compilations, and names the recompiled function."""
    tmr = timer.CPUGPUTimer()
    plain = train(lambda step: step)
    with timer.Compilations(tmr) as compilations:
        timed = train(lambda step: timer.timed_step(step, tmr, every=4, output=lambda result: result[1]))

    assert plain == timed
    assert 2 == len(plain[1])
    assert 2 == compilations.recompiled()["train_step"]
    assert 12 == tmr.get_time_stats("dispatch").count
    compile_ = tmr.get_time_stats("compile")
    assert 0 < compile_.total < sum(tmr.get_time("dispatch")) + 5


def test_listeners_are_taken_back():
    """After the end nothing is counted; a listener of the program's own stays."""
    others = []

    def listen(event, seconds, **about):
        others.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    tmr = Timer()
    with timer.Compilations(tmr) as compilations:
        jax.jit(lambda x: x + 1)(1.0)
    counts, heard = dict(compilations.counts), len(others)
    jax.jit(lambda x: x + 2)(1.0)
    jax.monitoring.unregister_event_duration_listener(listen)

    assert counts
    assert counts == dict(compilations.counts)
    assert heard < len(others)


def test_a_loop_of_jax_outside_of_jit_is_told(tmp_path):
    """It is compiled for each new function that it is given, which no shape changes."""
    tmr = Timer(run=tmp_path / "run")
    with timer.Compilations(tmr):
        for limit in (3, 5):
            jax.lax.while_loop(lambda x, limit=limit: x < limit, lambda x: x + 1, 0)
    tmr.run.close()
    with Run.open(tmp_path / "run") as run:
        again = run.sql("select reason from compilations where frame = 'while' and reason <> ''").rows()
    assert [{"reason": "called outside of jit"}] == again


def test_what_is_traced_inside_counts_once():
    """An inner function's tracing lies in that of the outer one; the region's times do not overlap."""
    tmr = Timer()
    inner = jax.jit(lambda x: jnp.sin(x) * 2)
    with timer.Compilations(tmr):
        jax.jit(lambda x: inner(x) + inner(x * 2))(jnp.ones(3))
    before = time.perf_counter_ns()

    assert tmr.get_time_stats("compile").total < before / 1e9
    spans = []
    clock = ManualClock(0)
    tmr = Timer(clock=clock)
    compilations = timer.Compilations(tmr)
    for name, at_s, took_s in (("jaxpr_trace", 3, 1), ("jaxpr_trace", 5, 4), ("backend_compile", 8, 2)):
        clock.advance_ns(at_s * 1_000_000_000 - clock.now_ns())
        compilations._took(f"/jax/core/compile/{name}_duration", took_s, fun_name="jit(f)")
        spans.append(name)
    assert [4.0, 2.0] == tmr.get_time("compile")
    assert {"f": 1} == dict(compilations.counts)


DEVICES = """
import json, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
import deep500_timing_jax as timer
tmr = timer.CPUGPUTimer()
mesh = Mesh(np.array(jax.devices()), ("data",))
shard_map = getattr(jax, "shard_map", None) or __import__("jax.experimental.shard_map", fromlist=["x"]).shard_map
def train_step(weights, batch):
    return weights - jax.lax.pmean(batch.mean(), "data")
sharded = jax.jit(shard_map(train_step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
mapped = jax.pmap(train_step, axis_name="data")
found = {}
for name, step, weights in (("shard_map", sharded, jnp.ones(())), ("pmap", mapped, jnp.ones(4))):
    batch = jnp.arange(8.0) if name == "shard_map" else jnp.arange(8.0).reshape(4, 2)
    step = timer.timed_step(step, tmr, every=2)
    with tmr.region(name, gpu=True):
        for _ in range(6):
            weights = step(weights, batch)
        tmr.watch(weights)
    found[name] = np.asarray(weights).ravel().tolist()
tmr.complete_all()
found["times"] = [len(tmr.get_time(name, gpu=True)) for name in ("shard_map", "pmap")]
found["batches"] = len(tmr.get_time("dispatch"))
found["devices"] = len(jax.devices())
print(json.dumps(found))
"""


def run(*arguments, cwd, **variables):
    """Run Python elsewhere, on JAX's host devices: its output, and its errors."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, env=environment, cwd=cwd, check=False
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout, done.stderr


def test_several_devices(tmp_path):
    """``pmap`` and ``shard_map`` over four virtual devices are timed as one device is."""
    printed, _ = run("-c", DEVICES, cwd=tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    found = json.loads(printed)

    assert (4, [1, 1], 12) == (found["devices"], found["times"], found["batches"])
    assert [1 - 6 * 3.5] == pytest.approx(found["shard_map"])
    assert [1 - 6 * 3.5] * 4 == pytest.approx(found["pmap"])


SCRIPT = """
from functools import partial
import jax, jax.numpy as jnp
@jax.jit
def loss_of(weights, batch):
    return ((batch @ weights) ** 2).mean()
class Trainer:
    @partial(jax.jit, static_argnums=0, donate_argnums=1)
    def train_step(self, weights, batch):
        loss, gradient = jax.value_and_grad(loss_of)(weights, batch)
        return weights - 0.1 * gradient, loss
trainer, weights = Trainer(), jnp.ones((4, 2))
for number in range(40):
    weights, loss = trainer.train_step(weights, jnp.full((3, 4), 0.01 * number))
print(weights.tolist(), float(loss), type(loss_of).__name__ != "", loss_of.lower(weights, jnp.ones((3, 4))) is not None)
"""


def test_an_unchanged_script_is_timed(tmp_path):
    """``deep500-timing run`` finds the step by its parameters, and the results are the same to the bit."""
    (tmp_path / "train.py").write_text(SCRIPT)
    with contextlib.redirect_stdout(io.StringIO()) as plain:
        exec(SCRIPT, {})
    printed, report = run("-m", "deep500_timing", "run", "--run", "timed", "train.py", cwd=tmp_path)

    assert plain.getvalue() == printed
    for name in ("BATCH", "jit(train_step)", "compile"):
        assert name in report
    (batch,) = [line for line in report.splitlines() if line.startswith("BATCH ")]
    assert "jit(loss_of)" not in report
    assert "40" in batch.split()


def test_a_program_that_is_known_to_train_as_it_ends(tmp_path):
    """Without a gradient a few steps are told from other calls at the end, where Python begins no thread pool."""
    (tmp_path / "train.py").write_text(
        "import jax\nstep, x = jax.jit(lambda x: x + 1), jax.numpy.ones(3)\nfor _ in range(30): x = step(x)\n"
    )
    _, report = run("-m", "deep500_timing", "run", "--run", "timed", "train.py", cwd=tmp_path)

    assert "30 steps" in report
    assert "Traceback" not in report


def test_every_exporter_takes_device_times(tmp_path):
    """The times of ``10 steps``, which the device alone has, reach each destination in seconds."""
    from deep500_timing.exporters import CsvExporter, JsonLinesExporter, TextExporter, read_json_lines

    clock = ManualClock()
    tmr = timer.CPUGPUTimer(clock=clock)
    step = timer.timed_step(lambda: (clock.advance(0.25), Output(clock, []))[1], tmr, every=2)
    for _ in range(6):
        step()
    made = [JsonLinesExporter(tmp_path / "times.jsonl"), CsvExporter(tmp_path / "times.csv")]
    tmr.export(*made, TextExporter(tmp_path / "times.txt"), step=6)
    for exporter in made:
        exporter.close()
    ((snapshot, number),) = read_json_lines(tmp_path / "times.jsonl")

    assert (6, [1.5, 1.5]) == (number, tmr.get_time("2 steps", gpu=True))
    assert 1.5 == snapshot.get("2 steps", "GPU").stats.mean
    assert (
        "2 steps,GPU" in (tmp_path / "times.csv").read_text() or "GPU,2 steps" in (tmp_path / "times.csv").read_text()
    )
    assert "dispatch" in (tmp_path / "times.txt").read_text()
    pytest.importorskip("prometheus_client")
    pytest.importorskip("tensorboardX")
    pytest.importorskip("opentelemetry.sdk.metrics")
    from deep500_timing.exporters import OpenTelemetryExporter, PrometheusExporter, TensorBoardExporter

    class Kept:
        def export(self, data, **_):
            from opentelemetry.sdk.metrics.export import MetricExportResult

            self.data = data
            return MetricExportResult.SUCCESS

    kept, scalars = Kept(), TensorBoardExporter(tmp_path / "tensorboard")
    prometheus = PrometheusExporter(folder=tmp_path / "prometheus")
    tmr.export(scalars, prometheus, OpenTelemetryExporter(kept, strict=True), step=6)
    scalars.close()
    prometheus.close()
    (text,) = (tmp_path / "prometheus").iterdir()
    (events,) = (tmp_path / "tensorboard").iterdir()

    assert 'deep500_timing_region_seconds_sum{device="GPU",region="2 steps"} 3.0' in text.read_text()
    assert b"GPU/2_steps" in events.read_bytes()
    assert '"training.region.name": "2 steps"' in kept.data.to_json()


def test_exporters_and_ranks_of_settings(tmp_path):
    """The settings name exporters and ranks: the whole run is reported at the end, by rank 1 and not by rank 0."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def report_of(rank):
        variables = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}
        settings = {"DEEP500_TIMING_EXPORTERS": f"jsonl=times-{rank}.jsonl", "DEEP500_TIMING_RANKS": "1"}
        return run("-m", "deep500_timing", "run", "--run", "r", "train.py", cwd=tmp_path, **variables, **settings)[1]

    with ThreadPoolExecutor() as at_once:
        reports = list(at_once.map(report_of, ("0", "1")))
    assert ["jit(train_step)" in report for report in reports] == [False, True]
    from deep500_timing.exporters import read_json_lines

    assert not (tmp_path / "times-0.jsonl").exists()
    ((snapshot, step),) = read_json_lines(tmp_path / "times-1.jsonl")
    assert snapshot.get("BATCH") is not None
    assert 40 == step


def test_names_are_complete():
    """The module has the core's names and its own, in order, and importing it imports no JAX."""
    assert sorted(timer.__all__) == timer.__all__
    assert all(hasattr(timer, name) for name in timer.__all__)
    program = "import sys, deep500_timing_jax; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert "False\n" == done.stdout
