"""The table is read at once: a tree, repeated blocks folded, the slowest marked, operations where they were counted."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from deep500_timing_torch.layers import LayerTimer  # noqa: E402


class Model(nn.Module):
    """Four blocks of two layers, of which the third has a slow one, and a head."""

    def __init__(self, work):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(work(1, 2), work(30 if i == 2 else 3, 4)) for i in range(4))
        self.head = work(1, 1)

    def forward(self, value):
        """One block behind the other."""
        for block in self.blocks:
            value = block(value)
        return self.head(value)


@pytest.fixture
def layers(work, tmr, value):
    """The model's layers after two steps and one evaluation."""
    model = Model(work)
    timed = LayerTimer(model, tmr)
    with timed:
        for _ in range(2):
            model(value).sum().backward()
        with torch.no_grad():
            model.eval()(value)
    return timed


def test_repeated_blocks_are_one_line_with_the_slowest(layers):
    """Blocks of one build are folded, with the sum of their times and the name of the slowest."""
    lines = {line.lstrip("│├└─ ").split("  ")[0]: line.lstrip("│├└─ ") for line in layers.table().splitlines()}
    folded = lines["4 × Sequential (blocks.0 … 3)"]
    assert ["43.00 ms", "24.00 ms", "10.75 ms", "97 % ◀", "8", "blocks.2 37.00 ms"] == _cells(folded)
    assert ["39.00 ms", "16.00 ms", "9.750 ms", "80 % ◀", "8", "blocks.2.1 34.00 ms"] == _cells(lines["1: Work"])


def test_a_share_that_rounds_to_nothing_is_not_nothing(work, tmr, value):
    """A layer of a thousandth of the step takes less than one per cent, as the timer's own table says."""
    model = nn.Sequential(work(1, 0), work(999, 0))
    timed = LayerTimer(model, tmr)
    with timed:
        model(value).sum().backward()
    lines = [line for line in timed.table().splitlines() if ": Work" in line]
    shares = [cell for line in lines for cell in _cells(line) if "%" in cell]
    assert ["<1 %", "100 % ◀"] == shares


def test_a_part_that_no_block_calls_has_no_slowest(work, tmr, value):
    """Such as the projection of ``nn.MultiheadAttention``, with weights that are used without its ``forward``."""
    blocks = [nn.Sequential(work(1, 2)) for _ in range(3)]
    for block in blocks:
        block[0].inner = nn.Identity()
    layers = LayerTimer(nn.Sequential(*blocks), tmr)
    with layers:
        layers.layers[0].module(value).sum().backward()
    line = next(line.rstrip() for line in layers.table().splitlines() if "inner: Identity" in line)
    assert line.endswith("0")
    assert "<LayerTimer of Sequential: 10 layers, detached; table() shows the times>" == repr(layers)


def test_unfolded_every_layer_has_its_line(layers):
    """Without folding each block has its own line."""
    text = layers.table(fold=False)
    assert 4 == text.count(": Sequential")
    assert "blocks.2: Sequential" in text


def test_names_are_shortened_in_the_middle_to_fit(layers):
    """On a narrow terminal the numbers stay and names lose their middle."""
    wide, narrow = layers.table(), layers.table(width=80)
    assert max(map(len, wide.splitlines()[2:])) > 80 >= max(map(len, narrow.splitlines()[2:]))
    assert "…" in narrow


def test_a_model_that_was_never_called_has_dashes(tmr):
    """An untimed layer is unknown, not zero."""
    text = LayerTimer(nn.Sequential(nn.Linear(1, 1)), tmr).table()
    assert "Layers of Sequential, time per step on the CPU, no training step" in text
    assert "0 s" not in text


def test_operations_are_each_layer_s_own_though_side_by_side(tmr):
    """Three projections of one input have the operations of three equal matrix products forward and six backward."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, value):
            return torch.nn.functional.scaled_dot_product_attention(self.q(value), self.k(value), self.v(value))

    model = nn.Sequential(nn.Linear(8, 8), Attention())
    layers = LayerTimer(model, tmr)
    batch = torch.ones(2, 4, 8)

    def step():
        model(batch).sum().backward()

    total = layers.count_flops(step)
    with layers:
        step()
    flops = {layer.path: layer.flops for layer in layers.times().layers}
    product = 2 * (2 * 4) * 8 * 8
    assert {"1.q": 3 * product, "1.k": 3 * product, "1.v": 3 * product} == {
        path: flops[path] for path in ("1.q", "1.k", "1.v")
    }
    assert total == flops["Sequential"] == flops["0"] + flops["1"]
    assert 2 * product == flops["0"]  # its input needs no gradient
    assert "GFLOP/s" in layers.table()


def _cells(line):
    return [cell.strip() for cell in line.split("  ") if cell.strip()][1:]
