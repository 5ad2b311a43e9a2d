"""ProfilerWrapper writes its files on a CPU, without a process group, and with any end in its block."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vl_convert", reason="the pictures of a profile")
from torch import nn  # noqa: E402

from deep500_timing_torch.layers import ProfilerWrapper  # noqa: E402
from deep500_timing_torch.layers._plots import ATTENTION_NAMES  # noqa: E402
from deep500_timing_torch.layers._select import repeated_blocks  # noqa: E402

pytestmark = pytest.mark.slow


class Block(nn.Module):
    """Attention and a small network, under names that say neither."""

    def __init__(self, width=16):
        super().__init__()
        self.first, self.second = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, value):
        """Attend, then mix."""
        q, k, v = self.first(value).chunk(3, -1)
        return value + self.second(nn.functional.scaled_dot_product_attention(q, k, v))


class Model(nn.Module):
    """Three blocks under an embedding that has two layers inside."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.trunk = nn.ModuleList(Block() for _ in range(3))

    def forward(self, value):
        """The stem, then the blocks."""
        value = self.stem(value)
        for block in self.trunk:
            value = block(value)
        return value


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """A profile of two steps, with all its files."""
    folder = tmp_path_factory.mktemp("profile") / "made"
    model = Model()
    with ProfilerWrapper(model=model, log_dir=folder) as profiler:
        for _ in range(2):
            result = profiler.record_function("step", lambda: model(torch.ones(2, 8, 16)).sum().backward() or "done")
    return profiler, folder, result


def test_every_file_is_there_with_the_rank_in_its_name(profiled):
    """The trace, two pictures, the memory and the tables lie in one folder, which was made."""
    _, folder, result = profiled
    assert ("done", ["Model_rank_0.log", "Model_rank_0_cuda_time_plot.png", "Model_rank_0_memory_usage.txt"]) == (
        result,
        sorted(path.name for path in folder.iterdir() if "line_chart" not in path.name and "trace" not in path.name),
    )
    png = (folder / "Model_rank_0_memory_usage_line_chart.png").read_bytes()
    assert b"\x89PNG" == png[:4]


def test_the_trace_is_one_that_viewers_read(profiled):
    """The Chrome trace holds the blocks and the step by their names."""
    _, folder, _ = profiled
    events = json.loads((folder / "Model_rank_0_trace.json").read_text())["traceEvents"]
    assert {"step", "trunk.0", "trunk.1", "trunk.2"} <= {event.get("name") for event in events}


def test_each_call_of_each_block_is_a_range_with_its_attention(profiled):
    """Two steps give two calls of each block, each with attention within its time, and the step holds them."""
    profiler, _, _ = profiled
    calls = [one for one in profiler.ranges if one.name.startswith("trunk")]
    assert ["trunk.0", "trunk.1", "trunk.2"] * 2 == [one.name for one in calls]
    assert all(0 < one.attention_us < one.time_us for one in calls)
    steps = [one for one in profiler.ranges if one.name == "step"]
    assert [True, True] == [one.holds_others for one in steps]
    for place, step in enumerate(steps):
        assert sum(one.time_us for one in calls[3 * place : 3 * place + 3]) < step.time_us


def test_the_tables_and_the_memory_name_the_blocks(profiled):
    """The log has a line for each range; the memory has the host's next to dashes where there is no device."""
    _, folder, _ = profiled
    log = (folder / "Model_rank_0.log").read_text()
    assert "trunk.2" in log
    assert "aten::" in log
    memory = (folder / "Model_rank_0_memory_usage.txt").read_text().splitlines()
    assert ["after", "allocated", "reserved", "host", "RSS"] == memory[0].split()
    assert ["trunk.0", "–", "–"] == memory[1].split()[:3]
    assert 1 + 2 * 4 == len(memory)


def test_an_exception_goes_on_and_the_files_are_written(tmp_path):
    """The times before an exception is written, and the hooks are off the model."""
    model = Model()
    with pytest.raises(ZeroDivisionError), ProfilerWrapper(model=model, log_dir=tmp_path, name="broken"):
        model(torch.ones(2, 8, 16))
        raise ZeroDivisionError
    assert (tmp_path / "broken_rank_0.log").exists()
    assert (tmp_path / "broken_rank_0_trace.json").exists()
    assert 0 == sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_out_of_memory_is_reported_with_the_layer(tmp_path):
    """The files are written when the device runs out of memory, and name the innermost layer; the error goes on."""
    model = Model()
    model.trunk[1].second.forward = _run_out
    with (
        pytest.raises(torch.OutOfMemoryError),
        ProfilerWrapper(model=model, log_dir=tmp_path, name="full", profile_memory=False) as profiler,
    ):
        model(torch.ones(2, 8, 16))
    said = "The device ran out of memory in trunk.1.second."
    assert "trunk.1.second" == profiler.out_of_memory
    assert said in (tmp_path / "full_rank_0.log").read_text()
    assert said in (tmp_path / "full_rank_0_memory_usage.txt").read_text()
    assert (tmp_path / "full_rank_0_trace.json").exists()


def test_out_of_memory_outside_of_layers_names_none(tmp_path):
    """What runs out of memory in the optimizer, say, is not put on a layer."""
    with (
        pytest.raises(torch.OutOfMemoryError),
        ProfilerWrapper(model=Model(), log_dir=tmp_path, name="full") as profiler,
    ):
        _run_out(None)
    assert profiler.out_of_memory is None
    assert "out of memory outside of any layer's forward pass" in (tmp_path / "full_rank_0.log").read_text()


def _run_out(_value):
    raise torch.OutOfMemoryError("no memory is left")


def test_a_second_profile_overwrites_nothing(tmp_path):
    """The files of a second profile in one folder have numbers."""
    for _ in range(2):
        with ProfilerWrapper(log_dir=tmp_path, is_st=True, enable_record_cuda_mm=False) as profiler:
            profiler.record_function("only", torch.ones, 3)
    assert {
        "opensora_rank_0.log",
        "opensora_rank_0_2.log",
        "opensora_rank_0_trace.json",
        "opensora_rank_0_trace_2.json",
    } <= {path.name for path in tmp_path.iterdir()}


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path):
    """A profile with a file as its folder ends with one warning for each kind of file, not with an error."""
    (tmp_path / "taken").write_text("")
    with (
        pytest.warns(Warning, match="Profiling: writing the trace failed, the rest goes on: "),
        ProfilerWrapper(log_dir=tmp_path / "taken") as profiler,
    ):
        assert 3 == profiler.record_function("sum", lambda: 1 + 2)
    assert [] == profiler.files


def test_the_block_that_a_model_repeats_is_found():
    """The outermost group of one class is the block, though it repeats smaller ones within."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))

    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.ModuleDict({"layers": nn.ModuleList([Twice(), Twice()])}))
    assert ["1.layers.0", "1.layers.1"] == repeated_blocks(model)
    assert [] == repeated_blocks(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    lazy = [nn.Sequential(nn.LazyLinear(1)) for _ in range(2)]
    assert ["0", "1"] == repeated_blocks(nn.Sequential(*lazy))


def test_lists_of_blocks_come_before_attributes():
    """An encoder and a decoder of one class repeat their layers, not themselves."""

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = Stack(), Stack()

    assert ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"] == repeated_blocks(Both())


def test_attention_that_is_not_found_is_unknown(tmp_path):
    """A model with attention made of plain products has a dash, not 0 s."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))
    with ProfilerWrapper(model=model, log_dir=tmp_path) as profiler:
        model(torch.ones(2, 4))
    assert {None} == {one.attention_us for one in profiler.ranges}
    (log,) = tmp_path.glob("*.log")
    line = next(line for line in log.read_text().splitlines() if line.startswith("0 "))
    assert ["–", "–", "–"] == line.split()[-3:]


def test_a_model_that_repeats_nothing_is_one_block(tmp_path):
    """It goes by its class, as a model does in the table of its layers."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with ProfilerWrapper(model=model, log_dir=tmp_path) as profiler:
        model(torch.ones(2, 4))
    assert ["Sequential"] == [one.name for one in profiler.ranges]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::_scaled_dot_product_flash_attention_for_cpu", True),
        ("aten::_flash_attention_forward", True),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", True),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_fmha", True),
        ("flash_attn::_flash_attn_forward", True),
        ("aten::softmax", False),
        ("attention_block", False),
    ],
)
def test_attention_is_known_by_its_operators(name, expected):
    """Operators and kernels of every implementation are attention; a module's name is not."""
    assert expected == bool(ATTENTION_NAMES.search(name))
