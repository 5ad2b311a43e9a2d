"""``autolog``: nothing is changed, the end is reported, and a program may end in any way."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest
import suite_ranks
from suite_autolog import TRAIN, regions_of
from suite_ranks import Job

pytest.importorskip("torch", reason="times PyTorch")
pytestmark = pytest.mark.slow

BEGIN = "import deep500_timing as t, json, sys\nlog = t.autolog({run!r}, quiet={quiet})\n"


def printed(forks, tmp_path, program, *, status=0, quiet=True):
    """A program's output under autolog, and its run's folder."""
    tmp_path.mkdir(exist_ok=True)
    run = tmp_path / "run"
    output = tmp_path / "output"
    text = BEGIN.format(run=str(run), quiet=quiet) + program
    started = forks.start(["-c", text], suite_ranks.environment(), output)
    found = started.wait(300)
    said = output.read_text(errors="replace")
    assert status == found, said
    return said, run


def test_close_undoes_everything(forks, tmp_path):
    """After ``close`` each function and hook of PyTorch is the one that was there, and SIGTERM has its own effect."""
    program = """
import torch
from torch.utils.data import dataloader
from torch.optim import optimizer as o
from torch.nn.modules import module as m
def state():
    owners = (torch, torch.autograd, torch.nn.Module, torch.Tensor, torch.nn.Linear, torch.nn.Sequential,
              dataloader.DataLoader, dataloader._BaseDataLoaderIter, torch.distributed, torch._dynamo.callback)
    return [{k: id(v) for k, v in vars(owner).items()} for owner in owners], [
        len(h) for h in (o._global_optimizer_pre_hooks, o._global_optimizer_post_hooks,
        m._global_parameter_registration_hooks, m._global_module_registration_hooks,
        torch._dynamo.callback.callback_handler.start_callbacks)], len(sys.meta_path)
log.close()
import torch._dynamo
"""
    program += TRAIN + "before = state()\nlog = t.autolog(log.folder + 'x', quiet=True)\n"
    program += "during = state()\nsteps(); net.eval(); log.close()\nafter = state()\n"
    program += "print(before == after, before == during, log.timer().get_time_stats('BATCH').count)\n"
    program += "print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
    said, _ = printed(forks, tmp_path, program)
    assert "True False 10\nTrue\n" == said


def test_it_keeps_types_and_random_state(forks, tmp_path):
    """An iterator has its type; a model pickles, scripts and deep-copies as ever."""
    program = TRAIN + (
        "import copy, io, pickle\n"
        "print(type(iter(loader)).__name__, type(net).__name__, torch.rand(1).item() == torch.rand(1).item())\n"
        "steps(); pickle.loads(pickle.dumps(net)); copy.deepcopy(net); torch.jit.script(net)(torch.randn(1, 16))\n"
        "torch.jit.trace(net, torch.randn(1, 16)); torch.fx.symbolic_trace(net)(torch.randn(1, 16)); print('ok')"
    )
    said, _ = printed(forks, tmp_path, program)
    assert said.startswith("_SingleProcessDataLoaderIter Sequential False\n")
    assert said.endswith("ok\n")


def test_collections_of_the_report_are_not_recorded(forks, tmp_path):
    """The run ends with the training: the report's imports would add seconds to a short run."""
    program = (
        TRAIN
        + """
import gc, io
class Stream(io.StringIO):
    def write(self, text):
        callbacks.append(len(gc.callbacks))
        return super().write(text)
steps()
callbacks, stderr, sys.stderr = [len(gc.callbacks)], sys.stderr, Stream()
log.close()
sys.stderr = stderr
print(callbacks[0] - callbacks[-1])
"""
    )
    assert "1\n" == printed(forks, tmp_path, program, quiet=False)[0]


FAULTS = {
    "data": "class D(torch.utils.data.Dataset):\n  def __len__(self): return 3\n"
    "  def __getitem__(self, i): return 1 // 0\n"
    "for x in DataLoader(D()): pass",
    "forward": "steps(); net(torch.randn(3, 5))",
    "backward": "steps(); torch.zeros(3, requires_grad=True).backward()",
    "step": "steps(); optimizer.step(lambda: 1 / 0)",
    "save": "steps(); torch.save(net, '/nowhere/x.pt')",
    "loss": "steps(); steps(1 / 0)",
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_traceback_has_no_frame_of_ours(what, forks, tmp_path):
    """An error inside a timed call shows the frames that it shows without the timing."""
    plain, timed = tmp_path / "plain", tmp_path / "timed"
    program = TRAIN + FAULTS[what]
    begin = "import deep500_timing as t\n" + BEGIN.splitlines()[1].format(run=str(tmp_path / "run"), quiet=True)
    tracebacks = []
    for text, output in (("\n\n" + program, plain), (begin + "\n" + program, timed)):
        started = forks.start(["-c", text], suite_ranks.environment(), output)
        assert 1 == started.wait(300)
        tracebacks.append(output.read_text())
    assert "Traceback" in tracebacks[0]
    assert tracebacks[0] == tracebacks[1]


def test_regions_by_hand_are_kept_and_not_doubled(forks, tmp_path):
    """The user's own timer joins the run; its code is timed by it alone."""
    program = TRAIN + (
        "mine = t.Timer()\n"
        "for x, y in mine.iterate(loader, 'IO'):\n"
        "    with mine.region('FORWARD'):\n        loss = torch.nn.functional.cross_entropy(net(x), y)\n"
        "    with mine.region('augment'):\n        pass\n"
        "    loss.backward(); optimizer.step()\n"
        "log.close()\nprint(sorted(log.taken))\n"
    )
    said, run = printed(forks, tmp_path, program)
    assert "['FORWARD', 'IO', 'augment']\n" == said
    found = regions_of(run)
    assert (10, 10) == (found["FORWARD"], found["augment"])
    assert 10 <= found["IO"] <= 11
    assert 9 == found["BACKWARD"]  # the first step's was recorded before the timer was seen


def test_a_second_log_of_a_process(forks, tmp_path):
    """After ``close``, another ``autolog`` times what comes, and nothing of what came before."""
    program = TRAIN + "steps(); log.close()\nlog = t.autolog(log.folder + '2', quiet=True)\nsteps(2); log.close()\n"
    _, run = printed(forks, tmp_path, program)
    found = [regions_of(folder) for folder in (run, tmp_path / "run2")]
    assert [(10, 10), (20, 20)] == [(of["BATCH"], of["BACKWARD"]) for of in found]


def test_a_training_that_is_over_takes_no_regions(forks, tmp_path):
    """A timer of an earlier training keeps none of its regions from the next one, which is not timed by hand."""
    program = TRAIN + (
        "log.close()\nmine = t.Timer()\n"
        "for name in ('BATCH', 'FORWARD', 'IO'):\n    with mine.region(name): pass\n"
        "import deep500_timing_torch\n"
        "log = deep500_timing_torch.autolog(log.folder + '2', quiet=True)\nsteps(); log.close()"
    )
    printed(forks, tmp_path, program)
    assert 10 == regions_of(tmp_path / "run2")["BATCH"] == regions_of(tmp_path / "run2")["FORWARD"]


def test_one_loader_within_another(forks, tmp_path):
    """The wait is the outer loader's, once; the program goes on."""
    program = TRAIN + (
        "class Nested(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self):\n        return iter(inner)\n"
        "inner, loader = loader, DataLoader(Nested(), batch_size=None)\nsteps()\nprint('ok')\nlog.close()"
    )
    said, run = printed(forks, tmp_path, program)
    assert "ok\n" == said
    found = regions_of(run)
    assert (10, 10) == (found["IO"], found["BATCH"])


def test_data_that_a_thread_fetches(forks, tmp_path):
    """The thread that steps the optimizer trains, though another one was the first to fetch."""
    program = TRAIN + (
        "import queue, threading\nahead = queue.Queue(1)\n"
        "def fetch():\n    for batch in loader: ahead.put(batch)\n    ahead.put(None)\n"
        "threading.Thread(target=fetch).start()\n"
        "for x, y in iter(ahead.get, None): net(x).sum().backward(); optimizer.step()\nlog.close()"
    )
    _, run = printed(forks, tmp_path, program)
    found = regions_of(run)
    assert [10] * 4 == [found[name] for name in ("IO", "FORWARD", "optimizer", "BATCH")]


def test_a_flush_within_a_batch(forks, tmp_path):
    """A line written before the next step has ended is of that step, not of the one before."""
    program = TRAIN + (
        "x = torch.ones(2, 16)\n"
        "for _ in range(3):\n"
        "    with torch.no_grad(): net(x)\n"
        "    log.run and log.run.flush()\n"
        "    net(x).sum().backward(); optimizer.step()\nlog.close()"
    )
    _, run = printed(forks, tmp_path, program)
    from deep500_timing.runs import Run

    with Run.open(run) as opened:
        rows = opened.sql("select region, step from intervals order by start_ns").rows()
    assert [0, 1, 2] == [row["step"] for row in rows if row["region"] == "FORWARD (no grad)"]
    assert [0, 1, 2] == [row["step"] for row in rows if row["region"] == "BACKWARD"]


def test_a_pickled_tensor_is_no_checkpoint(forks, tmp_path):
    """`pickle` has each tensor saved by `torch.save`; neither is a checkpoint, nor ends it a BATCH."""
    program = TRAIN + "import pickle\nsteps(); pickle.dumps(net.state_dict()); steps(); log.close()"
    _, run = printed(forks, tmp_path, program)
    assert "CHECKPOINT" not in regions_of(run)


def test_a_forked_child_that_trains(forks, tmp_path):
    """Its run holds its own steps, and none of the parent's that waited when it was forked."""
    program = TRAIN + (
        "steps(3)\npid = os.fork()\nif pid:\n    os.waitpid(pid, 0)\nelse:\n    steps(2)\n    log.close()\n"
        "    names = log.timer().get_time_stats\n"
        "    print(names('BACKWARD').count, names('BATCH').count)\n    sys.stdout.flush()\n    os._exit(0)\nlog.close()"
    )
    said, run = printed(forks, tmp_path, program)
    assert "20 20\n" == said
    assert {20, 30} == {regions_of(folder)["BACKWARD"] for folder in (run, run / "2")}


def test_a_quiet_end_without_close(forks, tmp_path):
    """The last BATCH is in the run."""
    _, run = printed(forks, tmp_path, TRAIN + "steps(2)\n")
    assert 20 == regions_of(run)["BATCH"]


def test_a_program_that_does_not_train(forks, tmp_path):
    """It writes nothing; the end says the facts and the remedy."""
    said, run = printed(
        forks, tmp_path, TRAIN + "with torch.no_grad(): net.eval()(torch.randn(3, 16))\nlog.close()", quiet=False
    )
    assert "nothing was timed: this process has made no training step" in said
    assert not run.exists()


def test_compilation_is_a_region(forks, tmp_path):
    """Each compilation is timed, with its frame and the reason of its repetition; there are as many as without."""
    program = TRAIN + (
        "import torch._dynamo\nfrom torch._dynamo.utils import counters\n"
        "fast = torch.compile(net, backend='eager')\n"
        "for n in (4, 4, 8, 8):\n"
        "    fast(torch.randn(n, 16)).sum().backward(); optimizer.step()\n"
        "print(dict(counters['stats']), sum(counters['graph_break'].values()), fast(torch.ones(2, 16)).sum().item())\n"
    )
    said, run = printed(forks, tmp_path, program + "log.close()", quiet=False)
    bare = tmp_path / "bare"
    started = forks.start(["-c", "import sys\n" + program], suite_ranks.environment(), bare)
    assert 0 == started.wait(300), bare.read_text()
    assert bare.read_text() in said
    found = regions_of(run)
    assert 2 == found["compile"]
    assert 5 == found["FORWARD"]
    from deep500_timing.runs import Run

    with Run.open(run) as opened:
        reasons = [row["reason"] for row in opened.table("compilations").arrow().to_pylist()]
    assert 2 == len(reasons)
    assert 1 == sum("size" in (reason or "") for reason in reasons)


@pytest.mark.parametrize(
    "compiled",
    [
        "net(torch.ones(2, 16)).sum().backward()\nstep = torch.compile(lambda: optimizer.step(), backend='eager')\n"
        "step(); step()\n",
        "class Model(torch.nn.Module):\n    def __init__(self): super().__init__(); self.part = net\n"
        "    def forward(self, x): return self.part(x)\n"
        "fast = torch.compile(Model(), backend='eager')\n"
        "for _ in range(2): fast(torch.ones(2, 16)).sum().backward(); optimizer.step()\n",
    ],
    ids=["a step of an optimizer", "a model before its first call"],
)
def test_what_is_compiled(compiled, forks, tmp_path):
    """The compiler sees neither hooks nor frames of ours: graphs and breaks are those of the plain program."""
    program = TRAIN + (
        f"import torch._dynamo\nfrom torch._dynamo.utils import counters\n{compiled}"
        "print(dict(counters['stats']), list(counters['graph_break'].values()), net[0].weight.sum().item())\n"
    )
    said, _ = printed(forks, tmp_path, program + "log.close()")
    bare = tmp_path / "bare"
    started = forks.start(["-c", "import sys\n" + program], suite_ranks.environment(), bare)
    assert 0 == started.wait(300), bare.read_text()
    assert "unique_graphs" in said
    assert bare.read_text().splitlines()[-1] == said.splitlines()[-1]


def test_layers(forks, tmp_path):
    """With ``layers=True`` each layer of the model is timed, at the end and in the run; the result is the same."""
    program = TRAIN + "steps(2); print(net[0].weight.sum().item())\nlog.close()\n"
    program += "print(any('_compiled_call_impl' in vars(m) for m in net.modules()))"
    plain, _ = printed(forks, tmp_path, program)
    said, run = printed(forks, tmp_path / "layers", "log.close(); log = t.autolog(log.folder, layers=True)\n" + program)
    weight, restored = plain.splitlines()
    assert f"{weight}\n" in said
    assert ["False", "False"] == [restored, said.splitlines()[-1]]
    assert re.search(r"  Layers of Sequential, time per step on the CPU, 20 training steps\n", said)
    assert re.search(r"  ├─ 0: Linear .* 20", said)
    assert "autograd.grad" not in regions_of(run)
    from deep500_timing.runs import Run
    from deep500_timing_torch.layers import read_layers

    with Run.open(run) as opened:
        assert ["Sequential", "0", "1", "2"] == [layer.path for layer in read_layers(opened).layers]


def test_the_end_says_what_the_workers_do(forks, tmp_path):
    """The report of one process is that of its run, which has ended: it has the cause of the wait for data."""
    program = TRAIN + (
        "import time\nfrom torch.utils.data import Dataset\n"
        "class Slow(Dataset):\n    def __len__(self): return 160\n"
        "    def __getitem__(self, i):\n        time.sleep(0.02)\n        return torch.rand(16), torch.tensor(i % 4)\n"
        "loader = DataLoader(Slow(), 4, num_workers=2)\nsteps()\n"
        # As where the kernel does not say who waited for a processor: a busy machine would be the cause of all.
        "from deep500_timing._views.findings import Evidence\nEvidence.thread_times = None\n"
        # The cause has room after any facts.
        "from deep500_timing._views import table\ntable._LINES = 9\n"
    )
    said, _ = printed(forks, tmp_path, program, quiet=False)
    assert re.search(r"1 rank on 1 host .* complete\n", said), said
    assert re.search(r": fetch takes .* ms a sample", " ".join(said.split())), said


def test_a_run_that_could_not_be_written(forks, tmp_path):
    """The table is there, from memory; no command is named that has nothing to read."""
    (tmp_path / "run").touch()
    said, _ = printed(forks, tmp_path, TRAIN + "steps(); log.close()", quiet=False)
    assert "BATCH" in said
    assert "File exists" in said
    assert "Reading the run failed" not in said
    assert "deep500-timing show" not in said


def test_the_end_without_a_run(forks, tmp_path):
    """Where the run's folder cannot be made, the times in memory are printed."""
    (tmp_path / "run").write_text("a file")
    said, _ = printed(forks, tmp_path, TRAIN + "steps()\n", quiet=False)
    assert re.search(r"BATCH .* 10 ", said), said


class TestEnds:
    """However a program ends, it ends as without the timing, and its run can be read."""

    @pytest.mark.parametrize(
        ("ending", "status"),
        [
            ("sys.exit(3)", 3),
            ("1 / 0", 1),
            ("os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(60)", -signal.SIGTERM),
            # PyTorch imports `tabulate` at the end if it is there, and Python then forgets Ctrl-C, with and without us.
            ("sys.modules['tabulate'] = None; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
            ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(42)); os.kill(os.getpid(), signal.SIGTERM)", 42),
        ],
    )
    def test_an_end(self, ending, status, forks, tmp_path):
        """The exit status is the program's; the log is whole."""
        _, run = printed(forks, tmp_path, TRAIN + "steps(2)\n" + ending, status=status)
        assert 20 == regions_of(run)["BACKWARD"]

    def test_an_end_at_once(self, forks, tmp_path):
        """``os._exit`` and a kill lose the records since the last flush, and no more."""
        program = TRAIN + "steps(); log.run.flush(); steps(); os._exit(5)"
        _, run = printed(forks, tmp_path, program, status=5)
        assert 10 == regions_of(run)["BACKWARD"]


def test_the_command(forks, tmp_path, monkeypatch):
    """One command in front of a script: the same output and status, a table, the folder, and what opens it."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN + "steps(2); print(net[0].weight.sum().item(), torch.rand(1).item(), sys.argv)")
    environment = suite_ranks.environment()
    monkeypatch.chdir(tmp_path)
    command = ["train.py", "--epochs", "2"]
    plain = forks.start(command, environment, tmp_path / "plain")
    timed = subprocess.run(
        [sys.executable, "-m", "deep500_timing", "run", *command], env=environment, capture_output=True, text=True
    )
    assert (plain.wait(300), (tmp_path / "plain").read_text()) == (timed.returncode, timed.stdout)
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("train-")
    assert f"deep500-timing report runs/{run.name}" in timed.stderr
    assert "2 epochs, 20 steps" in timed.stderr
    assert 20 == regions_of(run)["BACKWARD"]


DDP = """
import torch.distributed as dist
dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(net)
steps(2)
open(sys.argv[-1] + f"/{dist.get_rank()}.json", "w").write("{}")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("faulty", [False, True])
def test_ranks(faulty, forks, tmp_path):
    """Each rank writes a log, and rank 0 prints once; so it is when a rank crashes."""
    program = BEGIN.format(run=str(tmp_path / "run"), quiet=False) + TRAIN + DDP
    if faulty:
        program += "if os.environ['RANK'] == '1': raise ValueError('rank 1')\n"
    job = Job(tmp_path, forks.start, ["-c", program, str(tmp_path)], 2)
    try:
        if faulty:
            statuses = job.wait()
            assert 1 == statuses[1]
        else:
            job.results()
    finally:
        job.kill()
    assert 20 <= regions_of(tmp_path / "run")["BACKWARD"] <= 40
    assert "2 ranks on 1 host" in job.text(0) or faulty
    assert "deep500-timing report" not in job.text(1)


def test_spawned_ranks_of_a_script(tmp_path):
    """A script that starts its ranks by ``multiprocessing``: they are found, and their parent says nothing."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os\n"
        + TRAIN.replace("net =", "def main(rank):\n  global net, optimizer, loader\n  net =")
        .replace("\noptimizer =", "\n  optimizer =")
        .replace("\nloader =", "\n  loader =")
        .replace("\ndef steps", "\n  steps()\ndef steps")
        + "if __name__ == '__main__':\n    torch.multiprocessing.spawn(main, nprocs=1)\n"
    )
    done = suite_ranks.command(tmp_path, "run", "--run", "run", "train.py", timeout_s=300)
    assert 0 == done.returncode, done.stderr
    assert 1 == done.stderr.count("deep500-timing report"), done.stderr
    assert "nothing was timed" not in done.stderr
    assert 10 == regions_of(tmp_path / "run")["BACKWARD"]
