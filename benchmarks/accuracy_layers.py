"""How true the times of ``LayerTimer`` are, on seven models: against the clock, and against ``torch.profiler``.

``make accuracy`` takes the rows from here; ``python benchmarks/accuracy_layers.py`` prints them.

Two questions for each model. Do the leaves and the rest that is between them add up to the clock around the
model's call and around ``backward()``? And is each block's time that of ``torch.profiler``, forward by a
``record_function`` of its own within the same call, backward by the autograd nodes that the block's forward made?
"""

from __future__ import annotations

import bisect
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function

from deep500_timing_torch.layers import LayerTimer

ROUNDS, STEPS = 8, 5
WARM_UP = 3
PROFILED = 5
MARK = "block "


@dataclass
class Case:
    """A model, a batch for it, and which of its modules are its blocks."""

    name: str
    model: nn.Module
    inputs: tuple[Any, ...]
    blocks: str
    """A pattern of names."""
    output: Callable[[Any], torch.Tensor] = lambda out: out
    """The tensor in what the model returns."""

    def loss(self) -> torch.Tensor:
        """A forward pass."""
        return self.output(self.model(*self.inputs)).square().mean()


class Attention(nn.Module):
    """Self-attention of several heads."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """A mixture of experts: each token goes to one, so who is called, and with how much, is for the data to say."""

    def __init__(self, width: int, count: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(_mlp(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Route, compute, gather."""
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            if mine.any():
                mixed[mine] = expert(x[mine]) * weights[mine].unsqueeze(-1)
        return mixed


class Block(nn.Module):
    """Attention and a network, a residual connection around each."""

    def __init__(self, width: int, heads: int, *, causal: bool, experts: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.mlp = Experts(width) if experts else _mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend and mix."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    """GPT-like."""

    def __init__(self, width: int = 192, depth: int = 6, *, experts: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(Block(width, 6, causal=True, experts=experts) for _ in range(depth))
        self.head = nn.Linear(width, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of each next token."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Vision(nn.Module):
    """ViT-like."""

    def __init__(self, width: int = 192, depth: int = 6) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.ModuleList(Block(width, 6, causal=False) for _ in range(depth))
        self.head = nn.Linear(width, 100)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The logits of each image."""
        x = self.embed(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Residual(nn.Module):
    """A block of a ResNet, its activations in place."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.past = nn.Conv2d(before, after, 1, stride) if stride > 1 else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve, and add what came in."""
        return self.relu(self.body(x) + self.past(x))


class Recurrent(nn.Module):
    """Layers of an LSTM."""

    def __init__(self, width: int = 128, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits at each place."""
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


def cases() -> Iterator[Case]:
    """The models, with random weights."""
    torch.manual_seed(0)
    tokens, images = torch.randint(1000, (4, 128)), torch.randn(4, 3, 128, 128)
    yield Case("GPT-like", Language(), (tokens,), r"blocks\.\d+")
    yield Case("ViT-like", Vision(), (images,), r"blocks\.\d+")
    sizes = ((32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2))
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)
    residual = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), *(Residual(*size) for size in sizes), *ends)
    yield Case("ResNet", residual, (images,), "[1-4]")
    yield Case("mixture of experts", Language(depth=4, experts=True), (tokens,), r"blocks\.\d+")
    yield Case("LSTM", Recurrent(), (torch.randn(16, 64, 128),), r"layers\.\d+")
    try:
        import transformers
    except ImportError:
        return
    gpt2 = transformers.GPT2Config(n_embd=192, n_layer=4, n_head=6, vocab_size=1000, n_positions=128)
    yield Case("transformers' GPT-2", transformers.GPT2LMHeadModel(gpt2), (tokens,), r"transformer\.h\.\d+", _logits)
    vit = transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=4, num_attention_heads=6, intermediate_size=768, image_size=128
    )
    classify = transformers.ViTForImageClassification(vit)
    yield Case("transformers' ViT", classify, (images,), r"vit\.layers\.\d+", _logits)


def rows() -> Iterator[dict[str, Any]]:
    """The rows of each model: its leaves against the clock, and its blocks against the profiler."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for case in cases():
            for _ in range(WARM_UP):
                case.loss().backward()
            yield from against_the_clock(case)
            yield from against_the_profiler(case)
    finally:
        torch.set_num_threads(threads)


def against_the_clock(case: Case) -> Iterator[dict[str, Any]]:
    """The leaves' total and the rest between them, next to the clock around the whole."""
    true: dict[str, list[float]] = defaultdict(list)
    measured: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        with LayerTimer(case.model) as layers:
            clock = [_step(case) for _ in range(STEPS)]
        found = layers.times()
        inner = {layer.parent for layer in found.layers}
        for purpose, seconds in zip(("forward", "backward"), zip(*clock, strict=True), strict=True):
            true[purpose].append(sum(seconds) / STEPS)
            leaves = (layer.total_s(purpose) or 0 for place, layer in enumerate(found.layers) if place not in inner)
            rest = (layer.self_s.get(purpose, 0) for place, layer in enumerate(found.layers) if place in inner)
            measured[purpose].append((sum(leaves) + sum(rest)) / STEPS)
    for purpose in true:
        yield _row(f"layers of {case.name}, {purpose}: leaves and rest, by the clock", true[purpose], measured[purpose])


def against_the_profiler(case: Case) -> Iterator[dict[str, Any]]:
    """Each block's times, next to the profiler's times in the same calls."""
    chosen = re.compile(case.blocks)
    blocks = {name: module for name, module in case.model.named_modules() if chosen.fullmatch(name)}
    for name, block in blocks.items():
        block.forward = _marked(MARK + name, block.forward)
    try:
        with LayerTimer(case.model, match=chosen) as layers, profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(PROFILED):
                case.loss().backward()
    finally:
        for block in blocks.values():
            del block.forward
    seen = _seen(profiler.events())
    for purpose in ("forward", "backward"):
        true: list[float] = []
        measured: list[float] = []
        for name in blocks:
            intervals = layers.timer.intervals(f"{name} {purpose}")
            measured += ((intervals[:, 1] - intervals[:, 0]) / 1e9).tolist()
            true += seen[name, purpose]
        yield _row(f"blocks of {case.name}, {purpose}: by torch.profiler", true, measured)


def _step(case: Case) -> tuple[float, float]:
    began = time.perf_counter()
    out = case.model(*case.inputs)
    forward_s = time.perf_counter() - began
    logits = case.output(out)
    reached: list[float] = []
    logits.register_hook(lambda _: reached.append(time.perf_counter()))  # What comes before it is the loss's.
    logits.square().mean().backward()
    return forward_s, time.perf_counter() - reached[0]


def _marked(name: str, forward: Any) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return forward(*args, **kwargs)

    return wrapped


def _seen(events: Any) -> dict[tuple[str, str], list[float]]:
    # The nodes that a block's forward made have the numbers of its operations; its backward pass lasts from the first
    # of them to the last.
    calls = [event for event in events if event.name.startswith(MARK)]
    numbered = sorted((e.time_range.start, e.sequence_nr) for e in events if e.sequence_nr >= 0 and not _is_node(e))
    nodes = defaultdict(list)
    for event in events:
        if _is_node(event):
            nodes[event.sequence_nr].append(event.time_range)
    seen: dict[tuple[str, str], list[float]] = defaultdict(list)
    for call in sorted(calls, key=lambda event: event.time_range.start):
        name, within = call.name.removeprefix(MARK), call.time_range
        seen[name, "forward"].append(within.elapsed_us() / 1e6)
        first, last = (bisect.bisect(numbered, (edge, -1)) for edge in (within.start, within.end))
        ranges = [part for number in {number for _, number in numbered[first:last]} for part in nodes[number]]
        lasted = max(part.end for part in ranges) - min(part.start for part in ranges)
        seen[name, "backward"].append(lasted / 1e6)
    return seen


def _is_node(event: Any) -> bool:
    return bool(event.name.startswith("autograd::engine::evaluate_function"))


def _logits(out: Any) -> torch.Tensor:
    return out.logits


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def _row(case: str, true: list[float], measured: list[float]) -> dict[str, Any]:
    errors = sorted(100 * (mine / other - 1) for mine, other in zip(measured, true, strict=True))
    low, high = np.percentile(errors, (5, 95))
    return {
        "case": case,
        "true_s": statistics.median(true),
        "measured_s": statistics.median(measured),
        "error_percent": statistics.median(errors),
        "spread": f"{low:+.3f} … {high:+.3f}",
    }


if __name__ == "__main__":
    for row in rows():
        print(f"{row['case']:<75} {row['true_s'] * 1e3:8.3f} ms {row['error_percent']:+8.3f} %  [{row['spread']}]")
