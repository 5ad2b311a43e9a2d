"""What timing costs a call of a layer, next to what PyTorch offers: `python -m benchmarks.bench_layers`.

A chain of small layers, so that the measured part is the Python around them: as it is, timed by ``LayerTimer``, timed
and detached again, timed by PyTorch's own hooks on modules (``register_full_backward_hook``, two clock readings a
pass), under ``torch.profiler`` with a range for each layer, and with an empty ``Node.register_prehook`` at each layer's
output and nothing timed, which is PyTorch's own share in timing a backward pass by its nodes. All in one process and in
turns; each is compared with the plain chain that ran just before it, so that a machine that grows slower meanwhile does
not show.
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import sys
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from benchmarks._process import lines_of

LAYERS = 50
_PASSES = {
    "forward": "forward, without gradients",
    "training": "forward, training",
    "backward": "backward",
    "gradients": "what gradients add: marks in the forward pass, and backward",
}
_LABELS = {
    "layers": "`LayerTimer`",
    "detached": "`LayerTimer`, detached",
    "full backward hooks": "full backward hooks, two clock readings each pass",
    "torch.profiler": "`torch.profiler`, a range for each layer",
    "empty prehooks": "PyTorch's own share: one empty `register_prehook` at each layer's node, nothing timed",
}


def _chain() -> Any:
    import torch
    from torch import nn

    class Small(nn.Module):
        def forward(self, value: Any) -> Any:
            return value * 1.01

    torch.set_num_threads(1)
    return nn.Sequential(*[Small() for _ in range(LAYERS)])


@contextlib.contextmanager
def _layer_timer(model: Any) -> Any:
    from deep500_timing_torch import CPUGPUTimer
    from deep500_timing_torch.layers import LayerTimer

    with LayerTimer(model, CPUGPUTimer("cpu")):
        yield


@contextlib.contextmanager
def _detached(model: Any) -> Any:
    with _layer_timer(model):
        _run(model, gradients=True)
    yield


@contextlib.contextmanager
def _full_hooks(model: Any) -> Any:
    times: list[int] = []

    def mark(*_arguments: object) -> None:
        times.append(perf_counter_ns())

    hooks = []
    for layer in model:
        hooks.append(layer.register_forward_pre_hook(mark))
        hooks.append(layer.register_forward_hook(mark))
        hooks.append(layer.register_full_backward_pre_hook(mark))
        hooks.append(layer.register_full_backward_hook(mark))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _profiler(model: Any) -> Any:
    from torch.profiler import ProfilerActivity, profile, record_function

    ranges: list[Any] = []

    def begin(*_arguments: object) -> None:
        ranges.append(record_function("layer"))
        ranges[-1].__enter__()

    def end(*_arguments: object) -> None:
        ranges.pop().__exit__(None, None, None)

    hooks = []
    for layer in model:
        hooks.append(layer.register_forward_pre_hook(begin))
        hooks.append(layer.register_forward_hook(end))
    try:
        with profile(activities=[ProfilerActivity.CPU]):
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _empty_prehooks(model: Any) -> Any:
    small = type(model[0])
    plain = small.forward

    def nothing(_gradients: object) -> None:
        pass

    def forward(self: Any, value: Any) -> Any:
        value = value * 1.01
        if (node := value.grad_fn) is not None:
            node.register_prehook(nothing)
        return value

    small.forward = forward
    try:
        yield
    finally:
        small.forward = plain


def _run(model: Any, *, gradients: bool) -> tuple[int, int]:
    import torch

    value = torch.ones(4, requires_grad=gradients)
    value = value * 1 if gradients else value
    with torch.set_grad_enabled(gradients):
        began = perf_counter_ns()
        out = model(value)
        forward = perf_counter_ns() - began
    if not gradients:
        return forward, 0
    gradient = torch.ones(4)
    began = perf_counter_ns()
    out.backward(gradient)
    return forward, perf_counter_ns() - began


def measure(*, rounds: int = 60, passes: int = 5) -> dict[str, Any]:
    """Nanoseconds that each contender adds to one call of one layer.

    Args:
        rounds: How often each takes its turn.
        passes: Forward and backward passes in a turn; its time is their median.

    Returns:
        ``plain_ns``: the bare layer's time, by pass; ``added_ns``: by contender and pass the quartiles of what it
        adds; ``rounds``, ``layers``.
    """
    model = _chain()
    contenders: dict[str, Callable[[Any], Any]] = {
        "layers": _layer_timer,
        "detached": _detached,
        "full backward hooks": _full_hooks,
        "torch.profiler": _profiler,
        "empty prehooks": _empty_prehooks,
    }
    plain: dict[str, list[float]] = {name: [] for name in _PASSES}
    added: dict[str, dict[str, list[float]]] = {name: {one: [] for one in _PASSES} for name in contenders}
    gc.collect()
    gc.freeze()
    for number in range(rounds + 1):
        for name, contender in contenders.items():
            bare = _turn(model, passes)
            with contender(model):
                timed = _turn(model, passes)
            if number:  # The first round is warm-up.
                for one in _PASSES:
                    plain[one].append(bare[one])
                    added[name][one].append(timed[one] - bare[one])
    gc.unfreeze()
    return {
        "plain_ns": {one: statistics.median(found) for one, found in plain.items()},
        "added_ns": {
            name: {one: statistics.quantiles(values, n=4) for one, values in found.items()}
            for name, found in added.items()
        },
        "rounds": rounds,
        "layers": LAYERS,
    }


def _turn(model: Any, passes: int) -> dict[str, float]:
    forward, training, backward = [], [], []
    for _ in range(passes):
        forward.append(_run(model, gradients=False)[0])
        one, other = _run(model, gradients=True)
        training.append(one)
        backward.append(other)
    found = {
        "forward": statistics.median(forward) / LAYERS,
        "training": statistics.median(training) / LAYERS,
        "backward": statistics.median(backward) / LAYERS,
    }
    found["gradients"] = found["training"] - found["forward"] + found["backward"]
    return found


def report_lines(*, quick: bool = False) -> list[str]:
    """The measurement as lines of Markdown, made in its own process.

    Args:
        quick: Fewer rounds.
    """
    return lines_of("benchmarks.bench_layers", as_lines, quick=quick, timeout_s=300, OMP_NUM_THREADS="1")


def as_lines(found: dict[str, Any]) -> list[str]:
    """What :func:`measure` found, as a table in Markdown."""
    plain = found["plain_ns"]
    lines = [
        f"What timing adds to one call of one layer, in µs: a chain of {found['layers']} layers of one multiplication, "
        f"each contender beside the plain chain that ran before it, median of {found['rounds']} turns (half of them "
        "lie within the brackets). The last column is what a gradient costs more, wherever it is spent. Timing a "
        "backward pass is marking the nodes where it begins and ends, in the forward pass, and being called there; the "
        "last line is what PyTorch's public way of that takes with nothing timed.",
        "",
        "| | " + " | ".join(_PASSES.values()) + " |",
        "|---|" + "---:|" * len(_PASSES),
        "| the bare layer, in all | " + " | ".join(f"{plain[one] / 1e3:.2f}" for one in _PASSES) + " |",
    ]
    for name, label in _LABELS.items():
        cells = (
            f"{middle / 1e3:+.2f} [{low / 1e3:+.2f}, {high / 1e3:+.2f}]"
            for low, middle, high in (found["added_ns"][name][one] for one in _PASSES)
        )
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def main() -> None:
    """Measure here, and print the table, or with ``--json`` the numbers."""
    found = measure(rounds=8 if "--quick" in sys.argv else 60)
    print(json.dumps(found) if "--json" in sys.argv else "\n".join(as_lines(found)))


if __name__ == "__main__":
    main()
