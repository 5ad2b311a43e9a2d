"""The benchmark command, on one process and under torchrun."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from deep500_timing_torch.comm import _bench

pytestmark = pytest.mark.slow

LINE = re.compile(r" +(\d+) +(\d+) +(\w+) +(\w+) +(-?\d+) +([\d.]+) +([\d.]+) +([\d.]+) +(\d+)")


@given(st.integers(0, 10**6))
def test_sizes_are_read_as_nccl_tests_reads_them(number):
    """Powers of 1024, in either case, with or without a B."""
    assert number == _bench.parse_size(str(number))
    assert number << 10 == _bench.parse_size(f"{number}K") == _bench.parse_size(f"{number}kb")
    assert number << 20 == _bench.parse_size(f"{number}M")
    assert number << 30 == _bench.parse_size(f"{number}G")


@pytest.mark.parametrize("text", ["", "K", "1T", "-1", "1.5M"])
def test_other_sizes_are_refused(text):
    """What is no size is refused by name."""
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        _bench.parse_size(text)


def test_command_refuses_wrong_sizes():
    """The command line says which option is wrong."""
    from deep500_timing_torch.comm.__main__ import main

    result = CliRunner().invoke(main, ["bench", "-b", "much"])
    assert 2 == result.exit_code
    assert "Invalid value for '-b'" in result.output


@pytest.mark.parametrize("ranks", [1, 2, 3, 40])
@pytest.mark.parametrize("redop", ["sum", "max", "min"])
def test_expected_values(ranks, redop):
    """What a reduction should give is the reduction of what the ranks contribute."""
    import torch

    worlds = [_bench.World(rank, ranks, torch.device("cpu"), torch.float32, redop) for rank in range(ranks)]
    every = torch.stack([world.filled(3, 2, world.rank) for world in worlds])
    expected = {"sum": every.sum(0), "max": every.amax(0), "min": every.amin(0)}[redop]
    assert torch.equal(expected, worlds[0].reduced(3, 2))


def test_bench_under_torchrun(free_port):
    """Every collective at each size, with nccl-tests' columns, nothing wrong, and busbw by the formula."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--nnodes=1"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port}", "-m", "deep500_timing_torch.comm", "bench"]
    command += ["-b", "1K", "-e", "64K", "-f", "8", "-n", "5", "-w", "1", "-d", "int32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert 0 == done.returncode, done.stderr
    found: dict[str, list] = {}
    for line in done.stdout.splitlines():
        if line.startswith("# ") and line[2:] in _bench.COLLECTIVES:
            lines = found.setdefault(line[2:], [])
        elif (columns := LINE.fullmatch(line)) is not None:
            lines.append(columns.groups())
    assert set(_bench.COLLECTIVES) == set(found)
    for name, lines in found.items():
        assert ["1024", "8192", "65536"] == [line[0] for line in lines]
        kind = _bench.COLLECTIVES[name]
        for size, count, dtype, redop, root, time_us, algbw, busbw, wrong in lines:
            assert int(size) == 4 * int(count) * (2 if kind.shared else 1)
            assert ("int32", "sum" if kind.reduces else "none") == (dtype, redop)
            assert ("0" if kind.rooted else "-1") == root
            assert float(time_us) > 0
            assert pytest.approx(int(size) / float(time_us) / 1e3, abs=2e-3) == float(algbw)
            assert pytest.approx(float(algbw) * (0.5 if kind.shared else 1.0), abs=2e-3) == float(busbw)
            assert "0" == wrong
    assert "# Out of bounds values: 0 OK" in done.stdout


def test_wrong_results_are_counted(monkeypatch):
    """Elements that come out wrong are counted for their size, and end the command with status 1."""
    from deep500_timing_torch.comm import _timed
    from deep500_timing_torch.comm.__main__ import main

    def broken(tensor, op=None, group=None, async_op=False):
        tensor[:3] = 77

    monkeypatch.setitem(_timed.OPERATIONS, "all_reduce", broken)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    result = CliRunner().invoke(
        main, ["bench", "--backend", "gloo", "-c", "all_reduce", "-b", "1K", "-e", "1K", "-n", "1"]
    )
    assert 1 == result.exit_code, result.output
    assert " 3\n" in result.output
    assert "# Out of bounds values: 3 FAILED" in result.output


def test_cost_beside_the_alternatives(forks, monkeypatch, tmp_path):
    """The benchmark of the project measures every contender that is there, in a process of its own."""
    monkeypatch.chdir(Path(__file__).parents[2])
    program = "import runpy, sys; sys.argv[1:] = '--quick', '--json'; "
    program += "runpy.run_module('benchmarks.bench_comm', run_name='__main__')"
    printed = forks.printed(program, tmp_path / "bench.log")
    found = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    expected = {"plain", "off", "on", "patched", "least"}
    if "kernel" not in found["missing"]:
        expected |= {"kernel"}
    if "deepspeed" not in found["missing"]:
        expected |= {"deepspeed off", "deepspeed on"}
    assert expected == set(found["ns"])
    for times in found["ns"].values():
        assert {"all_reduce", "all_reduce_async", "broadcast", "barrier"} == set(times)
        assert all(ns > 0 for ns in times.values())
