"""``trace_slow_steps``: traces of the real ``torch.profiler``, on a clock that moves only when told."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import suite_ranks
import torch
from torch.autograd import profiler
from torch.optim import optimizer

from deep500_timing.runs import Run, RunLog
from deep500_timing.testing import ManualClock
from deep500_timing_torch import CPUGPUTimer
from deep500_timing_torch.slow_steps import trace_slow_steps

pytest.importorskip("duckdb", reason="reads a run")
pytestmark = pytest.mark.one_form


class Training:
    """Steps of 10 ms with a matrix product each; the timers' clock does not see the profiler's time."""

    def __init__(self, folder, *, optimizers=1):
        self.clock, self.folder = ManualClock(), folder
        self.timer = CPUGPUTimer(clock=self.clock)
        self.log = RunLog(folder, self.timer, flush_s=None)
        self.weights = torch.ones(200, 200, requires_grad=True)  # so that the product takes most of the time
        self.optimizers = [torch.optim.SGD([self.weights], 0.0) for _ in range(optimizers)]

    def step(self, ms=10, *, tail_ms=0):
        """Run a step of that length, and of more after the optimizer's step."""
        with self.timer.region("BATCH"):
            (self.weights @ self.weights).sum().backward()
            for one in self.optimizers:
                self.clock.advance_ns(int(ms * 1e6) // len(self.optimizers))
                one.step()
            self.weights.grad = None
            self.clock.advance_ns(int(tail_ms * 1e6))

    def run(self, steps, **slow):
        """Run steps; ``at_3=500`` names a length in ms."""
        for number in range(steps):
            self.step(slow.get(f"at_{number}", 10))
            self.log.flush()  # writes a trace: until then no step is recorded

    def traced(self):
        """The steps of which a trace was kept."""
        self.log.close()
        with Run.open(self.folder) as run:
            answers = [run.why(row["step"]) for row in run.steps().rows() if row["step"] > 19]
        return {answer.step: answer.trace for answer in answers if answer.trace is not None}


@pytest.fixture
def training(tmp_path):
    """A training with a log that is closed at the end."""
    made = []

    def make(**more):
        made.append(Training(tmp_path / "run", **more))
        return made[-1]

    yield make
    for one in made:
        one.log.close()


def hooks():
    """The tracer's hooks."""
    return len(optimizer._global_optimizer_post_hooks), profiler.profile._prepare_trace


def test_slow_steps_are_kept(training):
    """Of steps over 4 times the median a trace is kept, with the time in operators; k of them, then it ends."""
    one, before = training(), hooks()
    slow = trace_slow_steps(one.timer, 2)
    assert trace_slow_steps(one.timer, 5) is slow
    one.run(30, at_25=39)
    one.run(4, at_0=41, at_2=500, at_3=600)
    assert hooks() == before
    slow.close()
    traced = one.traced()
    assert list(traced) == [30, 32]
    trace = traced[30]
    assert trace.file == "slow_steps/rank-0-1.json"
    assert trace.length_s == 0.041
    assert "aten::mm" in {name for name, _, _ in trace.operators}
    assert 0 < trace.in_operators_s == pytest.approx(sum(self_s for _, self_s, _ in trace.operators), rel=0.9)
    said = str(trace)
    assert "aten::mm" in said
    assert "of 41.00 ms in no operator" in said


def test_no_step_is_slow_by_a_validation(training):
    """Time between two BATCHes does not count; time in a BATCH after the optimizer's step does."""
    one = training()
    with_trace = trace_slow_steps(one.timer)
    one.run(30)
    one.clock.advance_ns(3_000_000_000)
    one.run(5)
    one.step(10, tail_ms=90)
    one.run(2)
    with_trace.close()
    assert list(one.traced()) == [35]


def test_several_optimizers_make_one_step(training):
    """The step ends where an optimizer steps again."""
    one = training(optimizers=2)
    slow = trace_slow_steps(one.timer)
    one.run(25, at_22=80)
    slow.close()
    assert len(one.traced()) == 1


def test_the_programs_own_profiler_comes_first(training):
    """It starts while ours records, and no step is recorded while it is on."""
    one = training()
    slow = trace_slow_steps(one.timer)
    one.run(25)
    one.run(slow._profile is None)
    assert slow._profile is not None
    with torch.profiler.profile() as own, pytest.warns(match="another profiler is on"):
        one.run(5, at_3=500)
    assert "aten::mm" in {event.key for event in own.key_averages()}
    one.run(10, at_5=500, at_6=500)
    slow.close()
    assert len(one.traced()) == 1


def test_the_budget_limits_what_is_recorded(training, monkeypatch):
    """Starting and stopping take at most the budget, and steps at a period are met."""
    one, recorded = training(), []
    slow = trace_slow_steps(one.timer, 1000)

    class Profile(profiler.profile):
        def __enter__(self):
            one.clock.advance_ns(3_000_000)
            recorded.append(one.clock.now_ns())
            return super().__enter__()

    monkeypatch.setattr(profiler, "profile", Profile)
    one.run(20)
    begun_ns, recorded[:] = one.clock.now_ns(), []
    one.run(80, **{f"at_{number}": 100 for number in range(0, 80, 8)})
    share = 3_000_000 * len(recorded) / (one.clock.now_ns() - begun_ns)
    assert 0.01 < share <= 0.05
    slow.close()
    assert one.traced()


def test_a_fault_ends_the_tracing_alone(training, monkeypatch):
    """A profiler that fails costs one warning."""
    one = training()
    slow = trace_slow_steps(one.timer)

    def fail(*_):
        raise RuntimeError("no profiler")

    monkeypatch.setattr(profiler.profile, "_start_trace", fail)
    with pytest.warns(match=r"Tracing slow steps ended: RuntimeError: no profiler"):
        one.run(30)
    slow.close()
    assert not one.traced()


def test_what_is_wrong_is_said(training):
    """A timer without a run, and numbers out of range."""
    with pytest.raises(ValueError, match=r"CPUGPUTimer\(run=FOLDER\)"):
        trace_slow_steps(CPUGPUTimer())
    timer = training().timer
    for wrong in ({"k": 0}, {"budget": 0.0}):
        with pytest.raises(ValueError, match="k is 1 or more"):
            trace_slow_steps(timer, **wrong)


PROGRAM = """
import sys, json, os, random, torch
torch.manual_seed(0); torch.set_num_threads(1)
net = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(60):
    if step % 9 == 0:  # open over several steps
        around = torch.profiler.record_function("around"); around.__enter__()
    if step % 9 == 4:
        around.__exit__(None, None, None)
    net(torch.randn(4, 8)).sum().backward(); optimizer.step(); optimizer.zero_grad()
    if step % 5 == 0:
        for _ in range(20): torch.randn(200, 200) @ torch.randn(200, 200)
print(json.dumps([net.weight.sum().item(), torch.get_rng_state().sum().item(), "KINETO_LOG_LEVEL" in os.environ]))
"""


@pytest.mark.slow
def test_the_command_traces_and_changes_nothing(forks, tmp_path):
    """``run --trace-slow-steps`` keeps traces; weights, random state, environment and output are those without it."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    command = ["-m", "deep500_timing", "run", "--quiet", "--run", "run", "--trace-slow-steps", "2", script]
    environment = suite_ranks.environment()
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == forks.printed(PROGRAM, tmp_path / "plain")
    for path in (tmp_path / "run" / "slow_steps").glob("*"):
        assert json.loads(path.read_text())["traceEvents"]
    assert (tmp_path / "run").exists()


def test_numbers_of_the_option_are_checked(tmp_path):
    """The command says the error, before the program runs."""
    from deep500_timing._launch.command import main

    for wrong in (["--trace-slow-steps"], ["--trace-slow-steps", "0"], ["--trace-slow-steps=ten"]):
        assert main([*wrong, str(tmp_path / "none.py")]) == 2
