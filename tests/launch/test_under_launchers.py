"""Before another launcher: its ranks start, run and end as without us, and rank 0 reports for all."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import suite_ranks
from suite_autolog import TRAIN, regions_of

pytest.importorskip("torch", reason="times PyTorch")
pytestmark = [pytest.mark.slow, pytest.mark.matrix]

FACTS = (Path(__file__).parent / "probes" / "facts.py").read_text()
RANK = """
import io as _io, contextlib as _contextlib
_facts = _io.StringIO()
with _contextlib.redirect_stdout(_facts):
    exec(compile(open(sys.argv[-1]).read(), "facts", "exec"))
_rank = os.environ.get("RANK", "0")
open(sys.argv[-2] + "/facts-" + _rank, "w").write(_facts.getvalue())
if "RANK" in os.environ:
    import torch.distributed as dist
    dist.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(net)
steps(2)
_sum = round(float(net.state_dict()[next(iter(net.state_dict()))].sum()), 5)
open(sys.argv[-2] + "/sum-" + _rank, "w").write(str(_sum))
if "RANK" in os.environ:
    # PyTorch aborts one process in ten that ends with a wrapped model, or without a word to gloo's threads.
    import gc
    del net
    gc.collect()
    dist.destroy_process_group()
    gc.collect()
"""
LAUNCHERS = {
    "torchrun": ("-m torch.distributed.run --nproc-per-node 2 --master-port PORT", 2),
    "accelerate": ("-m accelerate.commands.launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no", 1),
    "deepspeed": ("-m deepspeed.launcher.runner --num_gpus 1 --master_port PORT", 1),
}


def launched(launcher, folder, *, run=None, program=RANK):
    """How a launcher ends with a program: alone, or under ``deep500-timing run``."""
    words, _ = LAUNCHERS[launcher]
    folder.mkdir()
    script = folder.parent / "train.py"
    script.write_text("import sys, os\n" + TRAIN + program)
    facts = folder.parent / "facts.py"
    facts.write_text(FACTS)
    command = [sys.executable, *words.replace("PORT", str(suite_ranks.free_port())).split()]
    before = [] if run is None else [sys.executable, "-m", "deep500_timing", "run", "--run", str(run), "--"]
    environment = suite_ranks.environment(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    return subprocess.run(
        [*before, *command, str(script), "--lr", "1", str(folder), str(facts)],
        cwd=folder.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def facts_of(folder):
    """What each rank saw of its start, without what differs from one start to the next."""
    seen = {}
    for file in sorted(folder.glob("facts-*")):
        facts = json.loads(file.read_text())
        own = r"PYTHONPATH|DEEP500|PORT|RUN_ID|PID|TORCHELASTIC|_$|TMP|ERROR_FILE"
        facts["environment"] = {name: value for name, value in facts["environment"] if not re.search(own, name)}
        facts["argv"] = [word for word in facts["argv"] if word != str(folder)]
        facts.pop("orig_argv")
        facts.pop("parent")
        seen[file.name] = facts
    return seen


def sums_of(folder):
    """The ranks' results, from their files: two ranks may print into one line."""
    return {file.name: file.read_text() for file in folder.glob("sum-*")}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_as_it_is(launcher, tmp_path):
    """Each rank sees and computes the same; each writes a log, no other process does; rank 0 prints once for all."""
    pytest.importorskip(launcher.replace("torchrun", "torch"), reason="starts its launcher")
    plain = launched(launcher, tmp_path / "plain")
    timed = launched(launcher, tmp_path / "timed", run=tmp_path / "run")
    assert 0 == plain.returncode, plain.stderr
    assert 0 == timed.returncode, timed.stderr
    ranks = LAUNCHERS[launcher][1]
    found = facts_of(tmp_path / "plain")
    assert ranks == len(found)
    assert found == facts_of(tmp_path / "timed")
    assert ranks == len(sums_of(tmp_path / "plain"))
    assert sums_of(tmp_path / "plain") == sums_of(tmp_path / "timed")
    assert ranks == len(list((tmp_path / "run").glob("rank-*")))
    assert 20 * ranks == regions_of(tmp_path / "run")["BACKWARD"]
    said = timed.stdout + timed.stderr
    assert 1 == said.count("deep500-timing report")
    if ranks > 1:
        assert f"{ranks} ranks on 1 host" in said


def test_a_rank_that_crashes(tmp_path):
    """The launcher ends as without us, and both logs can be read."""
    crash = RANK + "if _rank == '1': raise ValueError('rank 1')\n"
    plain = launched("torchrun", tmp_path / "plain", program=crash)
    timed = launched("torchrun", tmp_path / "timed", run=tmp_path / "run", program=crash)
    assert plain.returncode == timed.returncode != 0
    assert "ValueError: rank 1" in timed.stderr
    assert 2 == len(list((tmp_path / "run").glob("rank-*")))
    assert 20 <= regions_of(tmp_path / "run")["BACKWARD"] <= 40
