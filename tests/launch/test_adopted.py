"""A program's annotations become regions, by the annotations' own libraries."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from deep500_timing import Timer
from deep500_timing._launch.adopted import MOST, Adopted

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.one_form


class Log:
    """The part of an autolog that annotations use."""

    def __init__(self):
        self.notes = []
        self._timer = Timer()

    def timer(self):
        """The one timer."""
        return self._timer

    def note(self, text):
        """Keep a sentence."""
        self.notes.append(text)

    def counts(self):
        """How often each region was recorded."""
        return dict(sum((Counter({one.name: one._intervals.count}) for one in self._timer._regions()), Counter()))


@pytest.fixture
def log():
    """A log while annotations are adopted; the libraries are as before afterwards."""
    log = Log()
    adopted = Adopted(log)
    yield log
    adopted.undo()


def nested(outer, inner):
    """One annotation within another, twice."""
    for _ in range(2):
        with outer, inner:
            pass


class TestPyTorch:
    def test_ranges_of_the_program(self, log):
        """Each is a region, also as a decorator, and one region lies within the other as they were measured."""
        from torch.profiler import record_function

        @record_function("augment")
        def augment():
            with record_function("crop"):
                pass

        augment()
        augment()
        assert {"augment": 2, "crop": 2} == log.counts()
        (outer, _), (inner, _) = (log.timer().intervals(name).tolist() for name in ("augment", "crop"))
        assert outer[0] <= inner[0] <= inner[1] <= outer[1]

    def test_what_was_made_before(self):
        """A decorated function, and a range that is entered again and again."""
        held = torch.profiler.record_function("held")
        augment = torch.profiler.record_function("augment")(lambda: None)
        log = Log()
        adopted = Adopted(log)
        for _ in range(2):
            augment()
            with held:
                pass
        adopted.undo()
        with held:
            pass
        assert {"augment": 2, "held": 2} == log.counts()

    def test_pytorchs_own_ranges(self, log):
        """Annotations of an optimizer and a data loader say nothing that has no region yet."""
        weight = torch.zeros(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight], 0.1)
        weight.sum().backward()
        optimizer.step()
        list(torch.utils.data.DataLoader([1, 2]))
        assert {} == log.counts()

    def test_an_exception_inside(self, log):
        """It passes, and the region has ended."""
        with pytest.raises(KeyError), torch.profiler.record_function("fails"):
            raise KeyError
        assert {"fails": 1} == log.counts()

    def test_one_function_on_two_threads(self, log):
        """A decorated function is one annotation, which two threads may be in at once; so may a recursion."""
        both = threading.Barrier(2, timeout=60)

        @torch.profiler.record_function("work")
        def work(depth):
            both.wait()
            if depth:
                work(depth - 1)

        threads = [threading.Thread(target=work, args=(1,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {"work": 4} == log.counts()

    def test_a_class_that_cannot_be_derived_from(self, log):
        """It is no region, and the program goes on."""

        class Annotation(torch.profiler.record_function):
            def __init_subclass__(cls, *, must_be_passed):
                pass

        with Annotation("mine"):
            pass
        assert {} == log.counts()

    def test_nvtx(self, log, monkeypatch):
        """Pushed and popped ranges, and the context manager that stands on them."""
        from torch.cuda import nvtx

        monkeypatch.setattr(nvtx, "_nvtx", type("Silent", (), {"rangePushA": len, "rangePop": int}))
        nvtx.range_push("outer")
        with nvtx.range("inner"):
            pass
        nvtx.range_pop()
        nvtx.range_pop()
        assert {"inner": 1, "outer": 1} == log.counts()

    def test_a_graph_without_a_break(self, log):
        """``torch.compile`` takes an annotated function as one graph, as it does without us."""

        def step(x):
            with torch.profiler.record_function("inside"):
                return x.sin() + 1

        assert 0 == torch._dynamo.explain(step)(torch.ones(3)).graph_break_count


class TestNames:
    def test_a_name_of_ours(self, log):
        """It keeps its own row: the two would count twice in one."""
        log.timer().region("optimizer")
        with torch.profiler.record_function("optimizer"):
            pass
        assert 1 == log.counts()["optimizer (annotated)"]

    def test_a_name_for_each_step(self, log):
        """The first names are regions; a sentence says that there were more."""
        for number in range(MOST + 3):
            with torch.profiler.record_function(f"step {number}"):
                pass
        assert MOST == len(log.counts())
        assert [f"The program annotates more than {MOST} names; the first {MOST} are regions."] == sorted(
            set(log.notes)
        )

    def test_another_version_of_a_library(self, monkeypatch):
        """A moved attribute costs a sentence, and nothing else."""
        import torch.cuda.nvtx

        monkeypatch.delattr(torch.cuda.nvtx, "range_pop")
        log = Log()
        Adopted(log).undo()
        (note,) = log.notes
        assert note.startswith("The annotations of torch.cuda.nvtx are no regions: AttributeError")

    def test_switched_off_again(self, log):
        """The libraries are as they were."""
        before = Adopted(Log())
        before.undo()
        with torch.profiler.record_function("seen"):
            pass
        assert {"seen": 1} == log.counts()


class TestOtherLibraries:
    def test_megatron(self, log, monkeypatch):
        """Its timers, with the barrier and the synchronization that they have."""
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        timers = pytest.importorskip("megatron.core.timers", reason="needs Megatron")
        timer = timers.Timer("forward-backward")
        for _ in range(2):
            timer.start()
            timer.stop()
        assert {"forward-backward": 2} == log.counts()

    def test_deepspeed(self, log):
        """The timers of its engine."""
        module = pytest.importorskip("deepspeed.utils.timer", reason="needs DeepSpeed")
        timer = module.SynchronizedWallClockTimer()("fwd")
        timer.start()
        timer.stop()
        assert {"fwd": 1} == log.counts()

    def test_lightning(self, log):
        """The user's ranges by the trainer's profiler."""
        profilers = pytest.importorskip("lightning.pytorch.profilers", reason="needs Lightning")
        with profilers.PassThroughProfiler().profile("tokenize"):
            pass
        assert {"tokenize": 1} == log.counts()

    def test_nvtx_package(self, log):
        """Its ranges, context managers and decorators."""
        nvtx = pytest.importorskip("nvtx", reason="needs nvtx")

        @nvtx.annotate()
        def decorated():
            nvtx.push_range("pushed")
            nvtx.pop_range()

        decorated()
        with nvtx.annotate("managed"):
            pass
        assert {"decorated": 1, "managed": 1, "pushed": 1} == log.counts()

    @pytest.mark.slow
    def test_jax(self, log):
        """Its trace annotations, those of a step included."""
        profiler = pytest.importorskip("jax.profiler", reason="needs JAX")
        nested(profiler.TraceAnnotation("inner"), profiler.StepTraceAnnotation("train", step_num=1))
        profiler.annotate_function(lambda: None, name="called")()
        assert {"called": 1, "inner": 2, "train": 2} == log.counts()

    @pytest.mark.slow
    def test_tensorflow(self, log):
        """Its traces."""
        pytest.importorskip("tensorflow", reason="needs TensorFlow")
        import tensorflow as tf

        with tf.profiler.experimental.Trace("Train", step_num=1):
            pass
        assert {"Train": 1} == log.counts()

    @pytest.mark.slow
    def test_what_libraries_say_of_their_inside(self, log):
        """TensorFlow annotates its tracing and each call of a function, JAX its compiling: no region."""
        pytest.importorskip("tensorflow", reason="needs TensorFlow")
        jax = pytest.importorskip("jax", reason="needs JAX")
        import tensorflow as tf

        tf.function(lambda x: x + tf.constant(1.0))(tf.constant(1.0))
        jax.jit(lambda x: x + 1.0)(1.0)
        assert {} == log.counts()
