"""Every way of using a module that is known to break hooks gives right times and changes nothing."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import re
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from deep500_timing.testing import ManualClock  # noqa: E402
from deep500_timing_torch import CPUGPUTimer  # noqa: E402
from deep500_timing_torch.layers import LayerTimer, _private  # noqa: E402
from deep500_timing_torch.layers._passes import find_nodes  # noqa: E402
from deep500_timing_torch.layers._select import Call  # noqa: E402


class Around(nn.Module):
    """Calls its module by a function of the test's own."""

    def __init__(self, function, **inner):
        super().__init__()
        self.function = function
        for name, module in inner.items():
            self.add_module(name, module)

    def forward(self, *args, **kwargs):
        """Do the test's function."""
        return self.function(self, *args, **kwargs)


def traces_on(model):
    """How many hooks and attributes of ours the modules of a model have."""
    return sum(
        len(hooks)
        for module in model.modules()
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._forward_hooks_always_called,
            module._forward_hooks_with_kwargs,
            module._forward_pre_hooks_with_kwargs,
            [name for name, value in vars(module).items() if type(value).__module__.startswith("deep500_timing_torch")],
        )
    )


class TestOneLayerBehindTheOther:
    def test_each_pass_of_each_layer_is_exact(self, work, tmr, ms, value):
        """A chain of layers has each its own time forward and backward, and the model their sum."""
        model = nn.Sequential(work(1, 10), work(2, 20), work(3, 30))
        with LayerTimer(model, tmr):
            model(value).sum().backward()
        assert [[1], [2], [3], [6]] == [ms(f"{name} forward") for name in ("0", "1", "2", "Sequential")]
        assert [[10], [20], [30], [60]] == [ms(f"{name} backward") for name in ("0", "1", "2", "Sequential")]

    def test_what_ends_with_the_pass_lies_within_its_own(self, work):
        """Layers that end with the pass end from the inside out: the their own times add up to the model's."""

        class Ticking(ManualClock):
            def now_ns(self):
                self.advance_ns(1)
                return super().now_ns()

        clock = Ticking()
        first = nn.Sequential(nn.Sequential(work(1, 10)), work(1, 20))
        for layer in first.modules():
            layer.clock = clock
        with LayerTimer(nn.Sequential(first, nn.Flatten(0)), CPUGPUTimer("cpu", clock=clock)) as layers:
            layers._model(torch.ones(3)).sum().backward()
        times = layers.times()
        assert times.model.total_s("backward") == pytest.approx(
            sum(layer.self_s.get("backward", 0) for layer in times.layers), abs=1e-12
        )

    def test_without_an_input_that_needs_a_gradient(self, work, tmr, ms):
        """The first layer, with an input that ends no graph, ends with the pass and not where the next begins."""
        model = nn.Sequential(work(1, 10), work(2, 20))
        with LayerTimer(model, tmr):
            model(torch.ones(3)).sum().backward()
        assert ([10], [20], [30]) == (ms("0 backward"), ms("1 backward"), ms("Sequential backward"))

    def test_layers_side_by_side_share_an_input(self, work, tmr, ms, value):
        """Three projections of one input each have their own time, though its node waits for all of them."""
        model = Around(lambda m, x: m.q(x) + m.k(x) * m.v(x), q=work(1, 10), k=work(2, 20), v=work(3, 30))
        with LayerTimer(model, tmr):
            model(value * 2).sum().backward()
        assert ([10], [20], [30], [60]) == tuple(ms(f"{name} backward") for name in ("q", "k", "v", "Around"))

    def test_side_by_side_at_the_model_s_beginning(self, work, tmr, ms):
        """Two embeddings of inputs without gradients are distinguished."""
        model = Around(lambda m, x: m.token(x) + m.place(x), token=work(1, 10), place=work(2, 20))
        with LayerTimer(model, tmr):
            model(torch.ones(3)).sum().backward()
        assert ([10], [20]) == (ms("token backward"), ms("place backward"))

    def test_a_residual_connection(self, work, tmr, ms, value):
        """What goes around a layer neither lengthens nor hides it."""
        model = Around(lambda m, x: x + m.inner(x), inner=work(1, 10))
        with LayerTimer(model, tmr):
            model(value * 2).sum().backward()
        assert ([10], [10]) == (ms("inner backward"), ms("Around backward"))

    def test_what_hands_its_input_through_has_no_backward_pass(self, work, tmr, ms, value):
        """An identity shares its node with the layer before it and takes nothing from it."""
        model = nn.Sequential(work(1, 10), nn.Identity(), work(2, 20))
        with LayerTimer(model, tmr):
            model(value).sum().backward()
        assert ([10], [], [20]) == (ms("0 backward"), ms("1 backward"), ms("2 backward"))


class TestNumbering:
    """A backward pass is the nodes that the forward pass made, by autograd's own numbers."""

    def test_a_leaf_among_the_inputs_ends_nothing(self, work, tmr, ms, value):
        """A parameter of the model that a layer is given next to its input does not end the layer's pass early."""
        head = Around(lambda m, x, weight: m.slow(x) @ weight, slow=work(1, 100, weight=False))
        model = Around(lambda m, x: m.head(m.body(x), m.queries), body=work(1, 10), head=head)
        model.queries = nn.Parameter(torch.eye(3))
        with LayerTimer(model, tmr, depth=1):
            model(value).sum().backward()
        assert ([10], [100], [110]) == (ms("body backward"), ms("head backward"), ms("Around backward"))

    def test_the_caller_s_work_between_layers_side_by_side_is_its_own(self, work, tmr, ms, value):
        """Nodes that the caller makes between two layers belong to neither of them."""
        slow = work(1, 100, weight=False)

        def forward(m, x):
            x = m.stem(x)
            a = slow.forward(m.a(x))
            return a + m.b(x)

        model = Around(forward, stem=work(1, 5), a=work(1, 10), b=work(1, 20))
        with LayerTimer(model, tmr) as layers:
            model(value).sum().backward()
        assert ([5], [10], [20]) == (ms("stem backward"), ms("a backward"), ms("b backward"))
        assert pytest.approx(0.1) == layers.times().model.self_s["backward"]

    def test_an_auxiliary_loss_that_is_not_returned(self, work, tmr, ms, value):
        """A loss that a layer keeps on itself for its caller is the layer's work."""

        def expert(m, x):
            y = m.gate(x)
            m.loss = m.penalty.forward(y)
            return y

        inner = Around(expert, gate=work(1, 10))
        inner.__dict__["penalty"] = work(1, 30, weight=False)
        model = Around(lambda m, x: m.inner(x) + m.inner.loss, inner=inner)
        with LayerTimer(model, tmr):
            model(value).sum().backward()
        assert ([10], [40], [40]) == (ms("inner.gate backward"), ms("inner backward"), ms("Around backward"))

    def test_a_backward_pass_on_another_thread_that_is_overtaken_is_counted(self, work, tmr, value):
        """A pass that the main thread loses by calling the model again is counted as untimed."""
        model = nn.Sequential(work(1, 10))
        reached, go_on = threading.Event(), threading.Event()

        class Waits(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                reached.set()
                go_on.wait(300)
                return gradient

        with LayerTimer(Around(lambda m, x: m.model(Waits.apply(x)), model=model), tmr) as layers:
            layers._model(value)
            loss = layers._model(value * 2).sum()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            assert reached.wait(300)
            layers._model(value)
            go_on.set()
            thread.join()
        assert 1 == layers.untimed


class TestModels:
    """One model's times are that model's, and goes with it."""

    def test_a_detached_model_is_freed(self, work, value):
        """Model, layer timer and timer go when they are dropped, after any number of passes."""
        model = nn.Sequential(work(1, 10), work(1, 20))
        layers = LayerTimer(model).attach()
        for _ in range(2):
            model(value).sum().backward()
        layers.detach()
        alive = [weakref.ref(one) for one in (model, layers, layers.timer)]
        del model, layers
        gc.collect()
        assert [None] * 3 == [one() for one in alive]

    def test_two_models_in_one_timer_do_not_mix(self, work, tmr, value):
        """Models of one class that are timed at once have their own regions, and each table has its own times."""
        models = [nn.Sequential(work(1, 10)), nn.Sequential(work(2, 20))]
        timed = [LayerTimer(model, tmr).attach() for model in models]
        for _ in range(2):
            models[1](models[0](value)).sum().backward()
        for place, layers in enumerate(timed):
            layers.detach()
            times = layers.times()
            assert (0, 0) == (times.faults, times.untimed)
            for layer in times.layers:
                assert pytest.approx([0.001 * (place + 1)] * 2) == [
                    layer.stats["forward"].mean,
                    layer.stats["backward"].mean / 10,
                ]
        assert ["Sequential", "Sequential (2)"] == [layers.times().model.path for layers in timed]
        assert "Sequential" == LayerTimer(models[0], tmr).times().model.path

    def test_a_model_whose_forward_is_not_called_has_a_table(self, work, tmr, value):
        """Of parts that are called by themselves the table has times and shares, per call of the most frequent part."""
        model = nn.ModuleDict({"encoder": nn.Sequential(work(1, 10)), "decoder": work(2, 20)})
        wrapper = Around(lambda m, x: x, parts=model)
        with LayerTimer(wrapper, tmr) as layers:
            for _ in range(4):
                model["decoder"](model["encoder"](value)).sum().backward()
        times, table = layers.times(), layers.table()
        assert (4, pytest.approx(0.132)) == (times.steps, times.step_s)
        assert "4 training steps" in table
        assert "itself was not called" in table
        decoder = next(line for line in table.splitlines() if "decoder" in line)
        assert ["2.000 ms", "20.00 ms", "67 %"] == re.findall(r"[\d.]+ (?:ms|%)", decoder)

    def test_a_lazy_model(self):
        """Parameters that are not initialized yet are not counted, and are once they are."""
        model = nn.Sequential(nn.Flatten(), nn.LazyLinear(8))
        with LayerTimer(model) as layers:
            assert [0, 0, 0] == [layer.parameters for layer in layers.layers]
            model(torch.ones(2, 3))
        assert ("Linear", 32) == (layers.times().get("1").kind, layers.times().get("1").parameters)

    def test_many_tensors_in_one_argument_are_found_in_linear_time(self):
        """Each node of a thousand tensors is looked up once; none is compared with the others."""
        compared = []

        class Node:
            def __eq__(self, other):
                compared.append(other)
                return self is other

            __hash__ = object.__hash__

        class Made(torch.Tensor):
            grad_fn = property(lambda self: made[id(self)])

        tensors = [torch.ones(()).as_subclass(Made) for _ in range(1000)]
        made = {id(tensor): Node() for tensor in tensors}
        nodes = {}
        find_nodes({"several": [tensors, tensors]}, nodes)
        assert list(made.values()) == list(nodes)
        assert [] == compared

    def test_a_container_that_holds_itself(self, work, tmr, ms, value):
        """It is gone through once, as an argument and as a result, and each pass is timed."""

        def in_a_ring(m, x, ring):
            result = {"hidden": m.inner(ring["inputs"][0])}
            result["self"] = [result]
            return result

        model = Around(in_a_ring, inner=work(1, 10))
        for _ in range(2):
            ring = {"inputs": [value * 2]}
            ring["self"] = [ring, ring]
            with LayerTimer(model, tmr) as layers:
                model(value, ring)["hidden"].sum().backward()
            assert (0, 0) == (layers.faults, layers.untimed)
        assert ([1, 1], [10, 10]) == (ms("Around forward"), ms("Around backward"))

    def test_another_pytorch_is_refused(self, monkeypatch):
        """A PyTorch with other numbers of nodes is refused by name, and the model is untouched."""
        _private.check.cache_clear()
        monkeypatch.setattr(_private, "sequence_nr", lambda: 0)
        model = nn.Sequential(nn.Linear(1, 1))
        with pytest.raises(RuntimeError, match=r"are not numbered in the order of their making.*docs/layers\.md"):
            LayerTimer(model).attach()
        assert 0 == traces_on(model)
        _private.check.cache_clear()


class TestMarks:
    """Where a backward pass begins and ends is marked at the nodes of the graph, and nothing else is touched."""

    def test_a_parameter_that_is_an_input_gathers_no_calls(self, work, tmr, ms, value):
        """A tied weight, whose node DDP keeps from step to step, is marked by no more than the last step's calls."""
        tied = Around(lambda m, x, weight: m.inner(x * weight), inner=work(1, 10))
        model = Around(lambda m, x: m.tied(m.first(x), m.first.weight), first=work(2, 20), tied=tied)
        kept = torch.autograd.graph.get_gradient_edge(model.first.weight)
        calls = []
        gc.collect()  # the calls that earlier tests have left
        with LayerTimer(model, tmr):
            for _ in range(3):
                model(value).sum().backward()
                calls.append(sum(type(one) is Call for one in gc.get_objects()))
        assert kept.node is not None
        assert ([10, 10, 10], [20, 20, 20]) == (ms("tied backward"), ms("first backward"))
        assert calls[0] == calls[2]

    def test_a_module_that_returns_its_parameter_has_no_backward_pass(self, work, tmr, ms, value):
        """Nothing is computed to make a parameter: until the pass ends, others are at work. DDP keeps its node."""
        model = Around(lambda m, x: m.head(m.scale() * x), scale=Around(lambda m: m.weight), head=work(1, 10))
        model.scale.weight = nn.Parameter(torch.ones(()))
        kept = torch.autograd.graph.get_gradient_edge(model.scale.weight)
        before = work(1, 20)
        with LayerTimer(model, tmr):
            model(before(value)).sum().backward()
        assert kept.node is not None
        assert ([10], [], [10]) == (ms("head backward"), ms("scale backward"), ms("Around backward"))

    def test_a_model_that_raised_keeps_nothing_of_its_graph(self, tmr, value):
        """After an exception, as when memory is out, the graph's tensors is free."""

        class Saves(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.saved = Saved()
                saved.append(weakref.ref(ctx.saved))
                return x * 1

        class Saved:
            pass

        def raises(m, x):
            raise torch.OutOfMemoryError

        saved = []
        model = nn.Sequential(Around(lambda m, x: Saves.apply(x)), Around(raises))
        with LayerTimer(model, tmr):
            with pytest.raises(torch.OutOfMemoryError):
                model(value)
            gc.collect()
            assert [None] == [one() for one in saved]

    def test_overridden_functions_of_tensors_change_nothing(self, work, tmr, ms, value):
        """A mode that overrides functions of tensors gets the same times."""

        class Overrides(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                return None if getattr(function, "__name__", "") == "__set__" else function(*args, **(kwargs or {}))

        model = nn.Sequential(work(1, 10), work(2, 20))
        with LayerTimer(model, tmr), Overrides():
            model(value).sum().backward()
        assert ([10], [20], [30]) == (ms("0 backward"), ms("1 backward"), ms("Sequential backward"))

    def test_hooks_of_the_user_s_are_as_without(self, work, tmr, ms, value):
        """An output has no hook but the user's, which gets the gradient and may change it."""
        model = nn.Sequential(work(1, 10), work(2, 20))
        outputs = []
        model[0].register_forward_hook(lambda m, args, out: outputs.append(out))
        with LayerTimer(model, tmr):
            model(value)
            assert outputs[0]._backward_hooks is None
            outputs[0].register_hook(lambda gradient: gradient * 3)
            model[1](outputs[0]).sum().backward()
        assert torch.equal(torch.full((3,), 3.0), value.grad)
        assert ([10], [20]) == (ms("0 backward"), ms("1 backward"))


class TestInputsAndOutputs:
    @pytest.mark.parametrize(
        "wrap",
        [
            lambda y: {"logits": y},
            lambda y: (y, None),
            lambda y: [{"deep": (y,)}],
            lambda y: dataclasses.make_dataclass("Output", ["logits"])(y),
        ],
        ids=["dict", "tuple", "nested", "dataclass"],
    )
    def test_outputs_of_any_form(self, work, tmr, ms, value, wrap):
        """A layer without a tensor as output has a backward pass all the same."""
        found = []

        def forward(m, x):
            found.append(m.inner(x))
            return wrap(found[-1])

        model = Around(forward, inner=work(1, 10))
        with LayerTimer(model, tmr):
            model(value)
            found[0].sum().backward()
        assert ([1], [10]) == (ms("Around forward"), ms("Around backward"))

    def test_inputs_by_keyword_and_in_containers(self, work, tmr, ms, value):
        """A layer that is given its input by keyword, in a dict, ends where that input was made."""
        model = Around(lambda m, *, batch: m.b(m.a(batch["x"])), a=work(1, 10), b=work(2, 20))
        before = work(4, 40)
        with LayerTimer(model, tmr):
            model(batch={"x": before(value)}).sum().backward()
        assert ([30], [10], [20]) == (ms("Around backward"), ms("a backward"), ms("b backward"))

    def test_in_place_modules(self, work, tmr, ms, value):
        """A module that changes its input in place is timed and does not raise."""
        model = nn.Sequential(work(1, 10), nn.ReLU(inplace=True), work(2, 20))
        with LayerTimer(model, tmr):
            model(value).sum().backward()
        assert ([10], [0], [20]) == (ms("0 backward"), ms("1 backward"), ms("2 backward"))

    def test_two_outputs_of_which_one_is_used(self, work, tmr, ms, value):
        """A layer begins its backward pass with the first of its outputs that is reached."""
        model = Around(lambda m, x: (m.a(x), m.b(x)), a=work(1, 10), b=work(2, 20))
        with LayerTimer(model, tmr):
            model(value)[0].sum().backward()
        assert ([10], [], [10]) == (ms("a backward"), ms("b backward"), ms("Around backward"))


class TestPurposes:
    def test_evaluation_is_kept_apart(self, work, tmr, ms, value):
        """A model that is not training has its own times, and one under no_grad has no backward pass."""
        model = nn.Sequential(work(1, 10), work(2, 20))
        with LayerTimer(model, tmr):
            model.eval()
            with torch.no_grad():
                model(value)
            model.train()
            with torch.no_grad():
                model(value)
            model(value).sum().backward()
        assert ([1], [1, 1], [10]) == (ms("0 evaluation forward"), ms("0 forward"), ms("0 backward"))

    def test_a_frozen_layer_in_a_training_model_is_training(self, work, tmr, ms, value):
        """Frozen layers are in evaluation mode while the model trains: the model says the call's purpose."""
        model = nn.Sequential(work(1, 10), work(2, 20))
        model[0].eval()
        with LayerTimer(model, tmr):
            model(value)
        assert ([1], []) == (ms("0 forward"), ms("0 evaluation forward"))

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_recomputation_has_its_own_time(self, work, tmr, ms, value, reentrant):
        """A checkpointed layer runs once forward, once for recomputation and once backward, and nothing failed."""
        inner = nn.Sequential(work(1, 10), work(2, 20))
        model = Around(lambda m, x: checkpoint(m.inner, x, use_reentrant=reentrant), inner=inner)
        layers = LayerTimer(model, tmr)
        for _ in range(2):
            with layers:
                model(value * 1).sum().backward()
        again = ms("inner.0 recomputed forward")
        assert ([1, 1], [2, 2], [1, 1]) == (ms("inner.0 forward"), ms("inner.1 forward"), again)
        assert 0 == sum(region.failed + region.discarded + region.running for region in tmr.snapshot())
        own = {layer.path: round(layer.self_s["backward"] * 1e3, 6) for layer in layers.times().layers}
        assert {"inner.0": 20, "inner.1": 40} == {path: own[path] for path in ("inner.0", "inner.1")}

    def test_a_module_that_is_called_several_times(self, work, tmr, ms, value):
        """Each call of a module in one step is its own time, forward and backward."""
        model = Around(lambda m, x: m.cell(m.cell(m.cell(x))), cell=work(1, 10))
        with LayerTimer(model, tmr):
            model(value).sum().backward()
        assert ([1, 1, 1], [10, 10, 10]) == (ms("cell forward"), ms("cell backward"))

    def test_a_shared_module_is_one_layer_with_two_places(self, work, tmr, ms, value):
        """A module that stands at two places is listed once, and its time is taken from both of its callers."""
        shared = work(1, 10)
        model = nn.Sequential(nn.Sequential(shared, work(2, 20)), nn.Sequential(shared))
        timer = LayerTimer(model, tmr)
        with timer:
            model(value).sum().backward()
        layer = timer.times().get("0.0")
        assert ([1, 1], True) == (ms("0.0 forward"), layer.shared)
        assert ["Sequential", "0", "0.0", "0.1", "1"] == [layer.path for layer in timer.layers]
        own = {layer.path: round(layer.self_s["forward"] * 1e3, 6) for layer in timer.times().layers}
        assert {"Sequential": 0, "0": 0, "0.0": 2, "0.1": 2, "1": 0} == own

    def test_a_module_that_calls_itself(self, work, tmr, ms, value):
        """A recursion has the time of its outermost call."""

        def forward(m, x, depth=2):
            return m.work(x) if depth == 0 else m(m.work(x), depth - 1)

        model = Around(forward, work=work(1, 10))
        with LayerTimer(model, tmr):
            model(value).sum().backward()
        assert ([3], [1, 1, 1]) == (ms("Around forward"), ms("work forward"))


class TestFaults:
    def test_a_module_that_raises_is_failed_and_the_next_call_is_right(self, work, tmr, ms, value):
        """An exception ends every layer that it passes as failed, and goes on."""
        broken = [True]

        def forward(m, x):
            y = m.inner(x)
            if broken[0]:
                raise KeyError("x")
            return y

        model = nn.Sequential(Around(forward, inner=work(1, 10)))
        with LayerTimer(model, tmr):
            with pytest.raises(KeyError):
                model(value)
            broken[0] = False
            model(value).sum().backward()
        assert {"Sequential forward": 1, "Sequential.0 forward": 1, "Sequential.0.inner forward": 0} == {
            region.name: region.failed for region in tmr.snapshot() if region.name.endswith(" forward")
        }
        assert ([1], [10]) == (ms("0 forward"), ms("0 backward"))

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_a_layer_that_raises_when_it_is_recomputed(self, work, tmr, ms, value, reentrant):
        """An exception in a recomputation goes on, nothing stays open, and the next step is right."""
        calls = []

        def forward(m, x):
            calls.append(1)
            if len(calls) == 2:
                raise KeyError("the second time")
            return m.inner(x)

        inner = Around(forward, inner=work(1, 10))
        model = Around(lambda m, x: checkpoint(m.inner, x, use_reentrant=reentrant), inner=inner)
        with LayerTimer(model, tmr) as layers:
            with pytest.raises(KeyError):
                model(value * 1).sum().backward()
            model(value * 1).sum().backward()
        assert 0 == sum(region.running for region in tmr.snapshot())
        # A checkpoint that is not reentrant stops as soon as it has its tensors, here before the layer's work.
        again = [float(reentrant)]
        assert (0, [1, 1], again) == (layers.faults, ms("inner.inner forward"), ms("inner.inner recomputed forward"))
        assert (0, [10]) == (layers.untimed, ms("inner.inner backward"))

    def test_out_of_memory_names_the_innermost_layer(self, work, tmr, value):
        """The layer in which the device ran out of memory is known, and the error goes on."""

        def forward(m, x):
            raise torch.OutOfMemoryError("no memory is left")

        model = nn.Sequential(work(1, 10), nn.Sequential(Around(forward)))
        with LayerTimer(model, tmr) as layers, pytest.raises(torch.OutOfMemoryError):
            model(value)
        assert "1.0" == layers.times().out_of_memory
        assert "The device ran out of memory in 1.0." in layers.table()

    def test_a_model_called_while_an_exception_is_handled(self, work, tmr, ms, value):
        """A layer that returns nothing has not raised because its caller is handling an exception."""
        model = Around(lambda m, x: m.inner(x) and None, inner=work(1, 10))
        with LayerTimer(model, tmr):
            try:
                raise ValueError
            except ValueError:
                with torch.no_grad():
                    model(torch.ones(()))
        assert [1] == ms("Around forward")

    def test_ctrl_c_in_a_layer_ends_it(self, work, tmr, ms, value):
        """An interrupt, which torch's own hooks do not see, ends the layers that it passes; later times are right."""
        interrupted = [True]

        def forward(m, x):
            if interrupted[0]:
                raise KeyboardInterrupt
            return m.inner(x)

        model = nn.Sequential(Around(forward, inner=work(1, 10)))
        with LayerTimer(model, tmr) as layers:
            with pytest.raises(KeyboardInterrupt):
                model(value)
            assert 0 == sum(region.running for region in tmr.snapshot())
            interrupted[0] = False
            model(value).sum().backward()
            model(value).sum().backward()
        assert 0 == layers.faults
        assert ([1], [10, 10]) == (ms("0 forward")[-1:], ms("0 backward"))

    def test_bookkeeping_that_fails_costs_a_warning_and_no_training(self, work, clock, value):
        """A timer that raises at each call ends nothing, is counted, and is said once."""

        class Broken:
            def region(self, key, gpu=False):
                raise OSError("no clock")

            def now_ns(self):
                raise OSError("no clock")

        model = nn.Sequential(work(1, 10))
        layers = LayerTimer(model, Broken(), gpu=False)
        with layers, pytest.warns(Warning, match="Timing the start of layer 'Sequential' failed"):
            model(value).sum().backward()
        assert layers.faults >= 2
        assert torch.equal(torch.ones(3), value.grad)


class TestTheModelIsAsItWas:
    def test_detached_nothing_is_left(self, work, tmr, value):
        """After the block the model has the hooks, the state and the pickle that it had before."""
        model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1)))
        before = pickle.dumps(model), list(model.state_dict())
        with LayerTimer(model, tmr):
            assert traces_on(model) > 0
            model(value).sum().backward()
        model.zero_grad(set_to_none=True)
        assert (0, before) == (traces_on(model), (pickle.dumps(model), list(model.state_dict())))

    def test_a_copy_made_meanwhile_is_not_timed(self, tmr, ms, value):
        """A deep copy and a pickle of a model that is being timed work, and record nothing."""
        model = nn.Sequential(nn.Linear(3, 3))
        with LayerTimer(model, tmr):
            copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
            for one in copies:
                assert torch.equal(model[0].weight, one[0].weight)
                one(value).sum().backward()
        assert [] == ms("0 forward")

    def test_a_copy_of_a_module_with_a_pickle_of_its_own_is_not_timed(self, tmr, ms, value):
        """A module that puts all of its attributes into its pickle gets none of ours back."""

        class Own(nn.Linear):
            def __getstate__(self):
                return dict(self.__dict__)

        model = Own(3, 3)
        with LayerTimer(model, tmr):
            made = copy.deepcopy(model)
            made(value).sum().backward()
        assert (0, []) == (traces_on(made), ms("Own forward"))

    def test_a_replica_for_data_parallel_is_its_own(self, work, tmr, ms, value):
        """What ``nn.DataParallel`` makes of a timed model computes with its own parameters, untimed."""
        model = nn.Linear(3, 1, bias=False)
        make = nn.Module._replicate_for_data_parallel
        with LayerTimer(model, tmr):
            replica = model._replicate_for_data_parallel()
            replica.weight, replica.bias = torch.zeros(1, 3), None
            assert 0 == replica(value).item()
        assert ([], 0) == (ms("Linear forward"), traces_on(model))
        assert make is nn.Module._replicate_for_data_parallel

    @pytest.mark.parametrize("first", [0, 1])
    def test_two_timers_on_one_model(self, work, tmr, clock, value, first):
        """Two timers time the same model, and each may be detached first."""
        other = CPUGPUTimer("cpu", clock=clock)
        model = nn.Sequential(work(1, 10))
        timers = [LayerTimer(model, tmr).attach(), LayerTimer(model[0], other).attach()]
        model(value).sum().backward()
        timers.pop(first).detach()
        model(value).sum().backward()
        timers[0].detach()
        model(value).sum().backward()
        assert 2 - first == len(other.get_time("Work forward")) == len(other.get_time("Work backward"))
        assert 1 + first == len(tmr.get_time("Sequential.0 forward")) == len(tmr.get_time("Sequential.0 backward"))
        assert 0 == traces_on(model)

    def test_a_layer_that_is_compiled_meanwhile(self, tmr, value):
        """``Module.compile`` on a layer that is being timed wins, and stays when the timer goes."""
        model = nn.Sequential(nn.Linear(3, 3))
        with LayerTimer(model, tmr):
            model[0].compile(backend="eager")
            compiled = model[0]._compiled_call_impl
            model(value)
        assert compiled is model[0]._compiled_call_impl

    def test_a_graph_that_outlives_the_block_is_not_timed(self, work, tmr, ms, value):
        """A backward pass after detaching records nothing and is right."""
        model = nn.Sequential(work(1, 10))
        with LayerTimer(model, tmr):
            loss = model(value).sum()
        loss.backward()
        assert ([1], []) == (ms("0 forward"), ms("0 backward"))

    def test_a_graph_that_is_gone_through_twice(self, work, tmr, ms, value):
        """Each pass through a retained graph is its own time."""
        model = nn.Sequential(work(1, 10))
        with LayerTimer(model, tmr):
            loss = model(value).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        assert [10, 10] == ms("0 backward")

    def test_attaching_twice_is_an_error(self, work, tmr):
        """A second attach says that the timer is attached and what to do."""
        layers = LayerTimer(nn.Sequential(work()), tmr).attach()
        with pytest.raises(RuntimeError) as error:
            layers.attach()
        assert "Attaching a layer timer to Sequential: it is attached already. Call detach() first." == str(error.value)
        layers.detach()

    def test_training_is_the_same_to_the_bit(self):
        """Weights after ten steps with dropout are identical with and without the timer."""

        def train(timed):
            torch.manual_seed(1)
            model = nn.Sequential(
                nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.LayerNorm(16), nn.Linear(16, 1)
            )
            optimizer = torch.optim.Adam(model.parameters())
            layers = LayerTimer(model)
            if timed:
                layers.attach()
            for _ in range(10):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
            layers.detach()
            return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

        assert torch.equal(train(timed=False), train(timed=True))


class TestTransforms:
    def test_functional_calls(self, work, tmr, ms, value):
        """``torch.func`` with hooks on the model gives the gradients that it gives without."""
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        parameters = dict(model.named_parameters())

        def loss(parameters):
            return torch.func.functional_call(model, parameters, (torch.ones(2, 3),)).sum()

        expected = torch.func.grad(loss)(parameters)
        with LayerTimer(model, tmr) as layers:
            actual = torch.func.grad(loss)(parameters)
        assert all(torch.equal(expected[name], actual[name]) for name in expected)
        assert (0, 1) == (layers.faults, len(ms("0 forward")))

    def test_a_gradient_of_a_gradient(self, work, tmr, value):
        """A double backward pass through hooked layers is right."""
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        with LayerTimer(model, tmr) as layers:
            (first,) = torch.autograd.grad(model(value).sum(), value, create_graph=True)
            first.square().sum().backward()
        with_hooks = value.grad.clone()
        value.grad = None
        (first,) = torch.autograd.grad(model(value).sum(), value, create_graph=True)
        first.square().sum().backward()
        assert (True, 0) == (torch.equal(with_hooks, value.grad), layers.faults)

    def test_a_compiled_model_says_that_its_inside_is_hidden(self, tmr):
        """A compiled model is timed as a whole, and one warning says what to do."""
        model = torch.compile(nn.Sequential(nn.Linear(3, 3)), backend="eager")
        with pytest.warns(Warning, match="is compiled by torch.compile, so it is timed from outside"):
            layers = LayerTimer(model, tmr)
        with layers:
            model(torch.ones(2, 3)).sum().backward()
        recorded = {region.name for region in tmr.snapshot()}
        assert {"OptimizedModule forward", "OptimizedModule backward"} == recorded

    def test_hooked_layers_do_not_keep_a_model_from_compiling(self, tmr):
        """A model that is compiled whole while its layers are hooked has no graph break."""
        inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        with LayerTimer(inner, tmr) as layers:
            compiled = torch.compile(inner, backend="eager", fullgraph=True)
            compiled(torch.ones(2, 3)).sum().backward()
        assert 0 == layers.faults


class TestChoosing:
    def model(self):
        """Two blocks of two layers and a head."""
        block = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())  # noqa: E731
        return nn.ModuleDict({"blocks": nn.ModuleList([block(), block()]), "head": nn.Linear(2, 2)})

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"depth": 0}, []),
            ({"depth": 2}, ["blocks.0", "blocks.1", "head"]),
            ({"match": "blocks.*"}, ["blocks.0", "blocks.0.0", "blocks.0.1", "blocks.1", "blocks.1.0", "blocks.1.1"]),
            ({"match": nn.Linear}, ["blocks.0.0", "blocks.1.0", "head"]),
            ({"match": [nn.ReLU, "head"]}, ["blocks.0.1", "blocks.1.1", "head"]),
        ],
    )
    def test_by_depth_name_or_class(self, tmr, options, expected):
        """The model itself is always timed, and next to it the chosen layers."""
        root = nn.Sequential()
        root.inner = self.model()
        chosen = [layer.path for layer in LayerTimer(root, tmr, **_below(options)).layers]
        assert ["Sequential", *(f"inner.{name}" for name in expected)] == chosen

    def test_what_is_wrong_is_said(self, tmr):
        """No module, a negative depth, a match that matches nothing or is no pattern: each has its sentence."""
        model = nn.Sequential(nn.Linear(1, 1))
        for options, error, words in [
            ({"model": "resnet"}, TypeError, "Timing the layers of 'resnet': it is a str, not a torch.nn.Module."),
            (
                {"model": model, "depth": -1},
                ValueError,
                "Timing layers with depth=-1: it counts levels below the model",
            ),
            ({"model": model, "match": "nothing"}, ValueError, "no module matches. Its modules are 0, and so on"),
            ({"model": model, "match": 3}, TypeError, "Timing layers with match=3: pass a name such as 'blocks.*'"),
            ({"model": model, "timer": "cpu"}, TypeError, "LayerTimer(model, 'cpu'): the second argument is the timer"),
        ]:
            with pytest.raises(error) as raised:
                LayerTimer(**{"timer": tmr, **options})
            assert words in str(raised.value)


def _below(options):
    # The model under test lies one level down.
    if "depth" in options:
        return {"depth": options["depth"] + 1}
    match = options["match"]
    several = match if isinstance(match, list) else [match]
    return {"match": [f"inner.{one}" if isinstance(one, str) else one for one in several]}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda model, x: torch.jit.script(model),
        lambda model, x: torch.jit.trace(model, x),
        lambda model, x: nn.Sequential(torch.jit.script(model[0]), torch.jit.freeze(torch.jit.script(model[1].eval()))),
    ],
    ids=["script", "trace", "parts"],
)
def test_torchscript(make, tmr):
    """A model whose layers are timed becomes TorchScript that computes the same, and stays timed."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2), nn.ReLU())), torch.ones(2, 4)
    with LayerTimer(model, tmr) as layers:
        scripted = make(model, x)
        before = traces_on(model)
        assert torch.equal(scripted(x), model(x))
        assert traces_on(scripted) == 0
        assert before == traces_on(model) > 0
    assert layers.untimed == 0
    assert traces_on(model) == 0
