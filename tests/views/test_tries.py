"""Which finding leads to which remedies that can be tried: none without evidence, and those of a GPU only with one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deep500_timing._launch.tried import PARAMETERS
from deep500_timing._views.findings import Finding
from deep500_timing._views.findings._tries import to_try, tries_of
from deep500_timing.runs._processor import Machine

GPU = ("NVIDIA H100",)
DDP = ["gradient_as_bucket_view", "bucket_cap_mb", "static_graph"]


def node(*path, total_s, max_s=0.0):
    """A place in the tree."""
    return SimpleNamespace(path=path, parent=path[:-1], total_s=total_s, max_s=max_s, median_s=total_s / 80, count=80)


def evidence(*, kinds=("torch",), devices=(), ranks=1, machine=(8, 8, {}), workers=(), waits_s=4.0, idle_s=None, gc=()):
    """What rules have read of 80 steps of 100 ms, a part of which waits for data."""
    found = {"BATCH": [node("BATCH", total_s=8.0)], "IO": [node("BATCH", "IO", total_s=waits_s)], "GC": gc}
    names = ("worker", "fetch", "collate", "put", "idle", "batches")
    rows = [dict(zip(names, row, strict=True)) | {"cpus": machine[0]} for row in workers]
    known = {"kinds": kinds, "machine": Machine(*machine), "idle_s": idle_s, "fit": None, "rank": 0, "only": ""}
    return SimpleNamespace(
        has=lambda *packages: bool({*kinds} & {*packages}),
        about=SimpleNamespace(devices=devices, ranks=tuple(range(ranks)), hosts=("here",)),
        rows=lambda *_: rows,
        step_node=found["BATCH"][0],
        tree=SimpleNamespace(named=lambda name: found.get(name, [])),
        **known,
    )


@pytest.mark.parametrize(
    ("rule", "known", "parameters"),
    [
        ("copies", {"devices": GPU}, ["pin_memory"]),
        ("copies", {}, []),
        ("copies", {"devices": GPU, "kinds": ("tf.data", "keras")}, []),
        ("waits-for-data", {"kinds": ("tf.data", "keras")}, ["num_parallel_calls"]),
        ("waits-for-data", {"kinds": ("tensorflow",)}, ["num_parallel_calls"]),
        ("waits-for-data", {"kinds": ("generator", "keras")}, []),
        ("exposed-communication", {}, DDP),
        ("exposed-communication", {"kinds": ("jax",)}, []),
        ("late-rank", {"devices": GPU}, []),
    ],
)
def test_a_finding_and_its_remedies(rule, known, parameters):
    """Each can be set."""
    found = [one.parameter for one in tries_of(Finding(rule, "It is so"), evidence(**known))]
    assert parameters == found
    assert {*found} <= {*PARAMETERS}


BUSY, AHEAD = (0, 3e6, 0, 0, 1e5, 80), (0, 2e6, 0, 0, 5e6, 80)


@pytest.mark.parametrize(
    ("workers", "finding", "known", "tried"),
    [
        ([(-1, 0, 0, 0, 0, 0)], {}, {"waits_s": 6.0}, ["num_workers=3"]),
        ([(-1, 0, 0, 0, 0, 0)], {}, {"waits_s": 6.0, "machine": (2, 8, {})}, ["num_workers=2"]),
        ([(-1, 0, 0, 0, 0, 0)], {}, {"waits_s": 6.0, "machine": (8, 8, {}), "ranks": 4}, ["num_workers=2"]),
        ([(-1, 0, 0, 0, 0, 0)], {}, {"waits_s": 6.0, "machine": (2, 8, {}), "ranks": 4}, ["num_workers=2"]),
        ([(-1, 0, 0, 0, 0, 0)], {}, {"waits_s": 6.0, "machine": (8, 8, {"limit_cores": 1.5})}, ["num_workers=1"]),
        ([AHEAD], {"steps": (9, 19)}, {"waits_s": 1.0}, ["persistent_workers=True", "prefetch_factor=8"]),
        ([AHEAD], {"steps": (9, 19), "why": "as when workers start"}, {"waits_s": 1.0}, ["persistent_workers=True"]),
        ([AHEAD], {}, {"waits_s": 1.0}, ["persistent_workers=True"]),
        ([BUSY], {"steps": (9, 19)}, {"waits_s": 1.0}, ["persistent_workers=True"]),
        ([AHEAD], {}, {"waits_s": 1.0, "devices": GPU}, ["persistent_workers=True", "pin_memory=True"]),
    ],
)
def test_a_loader(workers, finding, known, tried):
    """Workers up to the cores of the job, its limit and its ranks; more room where workers could make enough."""
    found = tries_of(Finding("waits-for-data", "It waits", **finding), evidence(workers=workers, **known))
    assert tried == [one.text for one in found]


@pytest.mark.parametrize(
    ("idle_s", "devices", "parameters"),
    [(0.4, GPU, ["cudnn.benchmark", "float32_matmul_precision"]), (4.0, GPU, []), (None, GPU, []), (0.4, (), [])],
)
def test_a_device(idle_s, devices, parameters):
    """Its own work is tried where it is the step."""
    assert parameters == [one.parameter for one in to_try([], evidence(devices=devices, idle_s=idle_s))]


@pytest.mark.parametrize(("ranks", "limit", "threads"), [(1, {}, 8), (4, {}, 2), (1, {"limit_cores": 3.5}, 3)])
def test_threads(ranks, limit, threads):
    """As many as the rank has cores, where the run wants more."""
    wanted = dict.fromkeys(("process_cores", "process_waiting", "workers_cores", "workers_waiting"), 3.0)
    found = tries_of(Finding("too-many-threads", "It is so"), evidence(ranks=ranks, machine=(8, 8, wanted | limit)))
    assert [("num_threads", threads)] == [(one.parameter, one.value) for one in found]


COLLECTED = [(("BATCH", "FORWARD"), 0.1, ["gc.freeze"]), (("BATCH", "IO"), 0.45, []), (("start-up",), 0.1, [])]


@pytest.mark.parametrize(("path", "max_s", "parameters"), COLLECTED)
@pytest.mark.parametrize("findings", [[], [Finding("spikes", "2 steps are long", cause="GC")]])
def test_collections(path, max_s, parameters, findings):
    """Those in the steps are tried to be avoided; an import's are over by then, and one alone may not come again."""
    known = evidence(gc=[node(*path, "GC", total_s=0.5, max_s=max_s), node("GC", total_s=5.0, max_s=5.0)])
    assert parameters == [one.parameter for one in to_try(findings, known)]
