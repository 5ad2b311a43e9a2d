"""Training loops as others write them: under ``autolog`` their steps and phases are those that the program counts."""

from __future__ import annotations

import pytest
from suite_autolog import TRAIN, regions_of

pytest.importorskip("torch", reason="times PyTorch")
pytestmark = pytest.mark.slow

BEGIN = "import deep500_timing as t, json, sys\nlog = t.autolog({run!r}, quiet=True)\n"
WRAPPER = """
class Task(torch.nn.Module):
    def __init__(self, net): super().__init__(); self.net = net
    def forward(self, x, y): return torch.nn.functional.cross_entropy(self.net(x), y)
class Net(torch.nn.Module):
    def __init__(self): super().__init__(); self.body = net
    def forward(self, x): return self.body(x)
"""
PAIR = """
class Student(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__(); self.one, self.two = torch.nn.Linear(16, width), torch.nn.Linear(width, 4)
    def forward(self, x): return self.two(self.one(x).relu())
class Teacher(Student): pass
class Pair(torch.nn.Module):
    def __init__(self): super().__init__(); self.student, self.teacher = Student(), Teacher(999)
    def forward(self, x, y):
        with torch.no_grad(): said = self.teacher(x)
        out = self.student(x)
        return torch.nn.functional.cross_entropy(out, y) + (out - said).square().mean()
pair = Pair(); optimizer = torch.optim.SGD(pair.student.parameters(), 0.1)
"""
GROUPS = """
groups = [{"params": [p]} for p in net.parameters()]
optimizer = torch.optim.AdamW(groups, 1e-3)
def by_group():
    of_all = optimizer.param_groups
    for group in of_all:
        optimizer.param_groups = [group]
        optimizer.step()
    optimizer.param_groups = of_all
"""
LOOP = """
for x, y in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(net(x), y)
    {}
"""
TEN = dict.fromkeys(("BATCH", "FORWARD", "BACKWARD", "optimizer", "IO"), 10)
PROGRAMS = {
    "lazy modules": (
        "S, L = torch.nn.Sequential, torch.nn.LazyLinear; net = S(S(L(8)), L(4))\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n" + LOOP.format("loss.backward(); optimizer.step()"),
        TEN,
    ),
    "a part that may not be asked": (
        "part = torch.nn.Sequential(net); net = torch.nn.Sequential(part); part.parameters = net.parameters = None\n"
        + LOOP.format("loss.backward(); optimizer.step()"),
        TEN,
    ),
    # A step ends where the program comes round again.
    "groups of parameters": (GROUPS + LOOP.format("loss.backward(); by_group()"), {**TEN, "optimizer": 40}),
    "functional": (
        "from torch.func import functional_call, grad\np = {k: v.detach() for k, v in net.named_parameters()}\n"
        "f = grad(lambda p, x, y: torch.nn.functional.cross_entropy(functional_call(net, p, (x,)), y))\n"
        "for _ in range(3):\n  for x, y in loader:\n    g = f(p, x, y); p = {k: p[k] - 1e-3 * g[k] for k in p}",
        {"BATCH": 30, "autograd.grad": 30},
    ),
    "by hand, after an optimizer": (
        "steps()\n"
        + LOOP.format("loss.backward()\n    with torch.no_grad(): [p.sub_(0.1 * p.grad) for p in net.parameters()]"),
        {"BATCH": 20, "FORWARD": 20, "BACKWARD": 20},
    ),
    "by hand in the data, after an optimizer": (
        "steps()\n"
        + LOOP.format("loss.backward()\n    for p in net.parameters(): p.data -= 0.1 * p.grad; p.grad = None"),
        {"BATCH": 20},
    ),
    "a scaler skips": (
        "scaler = torch.amp.GradScaler('cpu', init_scale=8.0)\n"
        "for n, (x, y) in enumerate(loader):\n  optimizer.zero_grad()\n"
        "  scaler.scale(net(x).sum() * (float('inf') if n % 3 == 1 else 1)).backward()\n"
        "  scaler.step(optimizer); scaler.update()",
        {**TEN, "optimizer": 7},
    ),
    # Backward passes that no one asks `torch.autograd` for.
    "the engine": (
        "engine = torch.autograd.Variable._execution_engine\n"
        + LOOP.format("engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)")
        + "    optimizer.step()",
        TEN,
    ),
    # Evaluations.
    "eval is replaced": (
        "class Net(torch.nn.Sequential):\n  def eval(self): return self.train(False)\nnet = Net(*net)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for _ in range(2):\n  net.train(); steps(); net.eval()\n  with torch.no_grad(): [net(x) for x, y in loader]",
        {"BATCH": 20, "VALIDATION": 2, "FORWARD (no grad)": 20, "EPOCH": 2},
    ),
    "a test pass in inference mode": (
        "steps(2)\nwith torch.inference_mode():\n  for x, y in loader: net(x)",
        {"BATCH": 20, "VALIDATION": 1, "FORWARD": 20},
    ),
    # Models that arrive in other ways.
    "unpickled": ("import pickle\n" + WRAPPER + "net = Net()\nnet = pickle.loads(pickle.dumps(net))\n", None),
    "loaded": (
        "import io\nfile = io.BytesIO(); torch.save(net, file); file.seek(0)\nlog.close()\n"
        "log = t.autolog(log.folder, quiet=True)\nnet = torch.load(file, weights_only=False)\n",
        None,
    ),
    "an unpickled transform": (
        "import pickle\nclass Scale(torch.nn.Module):\n  def forward(self, x): return 2 * x\n"
        "scale = pickle.loads(pickle.dumps(Scale()))\ndata = loader.dataset\n"
        "class Data(torch.utils.data.Dataset):\n  def __len__(self): return len(data)\n"
        "  def __getitem__(self, n): x, y = data[n]; return scale(x), y\n"
        "loader = DataLoader(Data(), 32)\nsteps()",
        TEN,
    ),
    "forward itself": (
        "class Layer(torch.nn.Linear):\n  def forward(self, x): return x @ self.weight.T\n"
        "net = Layer(16, 4)\noptimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for x, y in loader: net.forward(x).sum().backward(); optimizer.step()",
        {"BATCH": 10, "FORWARD": 9},
    ),
    "the inner model": (
        WRAPPER + "inner = Net(); task = Task(inner)\n"
        "for x, y in loader: task(x, y).backward(); optimizer.step()\n"
        "with torch.no_grad(): [inner(x) for x, y in loader]",
        {"BATCH": 10, "FORWARD": 10, "FORWARD (no grad)": 10, "VALIDATION": 1},
    ),
    "an average of the model": (
        WRAPPER + "inner = Net(); task = Task(inner); mean = torch.optim.swa_utils.AveragedModel(inner)\n"
        "for x, y in loader: task(x, y).backward(); optimizer.step(); mean.update_parameters(inner)\n"
        "with torch.no_grad(): [mean.module(x) for x, y in loader]",
        {"BATCH": 10, "FORWARD": 10, "FORWARD (no grad)": 10},
    ),
    **{
        f"the model beside {copy}": (
            WRAPPER + f"inner = Net(); task = Task(inner); task.copy = {made}\n"
            "for x, y in loader: task(x, y).backward(); optimizer.step()\n"
            "with torch.no_grad(): [inner(x) for x, y in loader]",
            {"BATCH": 10, "FORWARD": 10, "FORWARD (no grad)": 10, "VALIDATION": 1},
        )
        for copy, made in (
            ("an average within the task", "torch.optim.swa_utils.AveragedModel(inner)"),
            ("a frozen copy within the task", "__import__('copy').deepcopy(inner).requires_grad_(False)"),
        )
    },
    **{
        f"the smaller of two models, {call}": (
            PAIR + f"for x, y in loader: pair(x, y).backward(); optimizer.step()\n{call}",
            {"BATCH": 10, "FORWARD": 10, "FORWARD (no grad)": 10, "VALIDATION": 1},
        )
        for call in (
            "with torch.no_grad(): [pair.student(x) for x, y in loader]",
            "pair.eval()\nwith torch.no_grad(): [pair.student(x) for x, y in loader]",
            "with torch.no_grad(): [pair.teacher(x) for x, y in loader]",
        )
    },
    # Loaders.
    "an iterator of its own": (
        "from torch.utils.data.dataloader import _SingleProcessDataLoaderIter\n"
        "class Own(DataLoader):\n  def __iter__(self): return _SingleProcessDataLoaderIter(self)\n"
        "loader = Own(loader.dataset, 32)\nsteps(2)",
        {"BATCH": 20, "EPOCH": 2, "EPOCH (start)": 2},
    ),
    # Threads.
    "an actor": (
        "import threading\nstop = threading.Event()\nactor = torch.nn.Linear(4, 4)\n"
        "def act():\n  with torch.no_grad():\n    while not stop.wait(1e-3): actor(torch.ones(1, 4))\n"
        "thread = threading.Thread(target=act); thread.start(); steps(3); stop.set(); thread.join()",
        {"BATCH": 30, "FORWARD": 30, "BACKWARD": 30, "optimizer": 30, "IO": 30},
    ),
    "a training of each thread, in turn": (
        "from threading import Thread\nfor _ in range(3):\n  one = Thread(target=steps); one.start(); one.join()",
        {"BATCH": 30, "FORWARD": 30, "EPOCH": 3},
    ),
}


def found_in(forks, tmp_path, program):
    """A program's output under autolog, and the regions of its run by name."""
    text = BEGIN.format(run=str(tmp_path / "run")) + TRAIN + program
    said = forks.printed(text + "\nlog.close()\n", tmp_path / "output")
    return said, regions_of(tmp_path / "run")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_loop_of_others(name, forks, tmp_path):
    """Its regions are as many as the program has steps, calls and passes."""
    program, expected = PROGRAMS[name]
    if expected is None:
        program, expected = program + "optimizer = torch.optim.SGD(net.parameters(), 0.1)\nsteps()", TEN
    _, found = found_in(forks, tmp_path, program)
    assert expected == {region: found.get(region, 0) for region in expected}


def test_skipped_steps_are_said(forks, tmp_path):
    """With their number, at the end."""
    program, _ = PROGRAMS["a scaler skips"]
    said, _ = found_in(forks, tmp_path, program + "\nprint(*log._notes)\nlog.close()\nprint(*log._notes)")
    assert "skipped 3 of 10 steps" in said


@pytest.mark.parametrize("layers", [False, True])
def test_nothing_is_kept_alive(layers, forks, tmp_path):
    """Neither models nor classes, which may hold anything, of trials in one process."""
    program = """
import gc, weakref
log.close(); log = t.autolog(log.folder, quiet=True, layers={layers})
refs = []
def trial():
    table = [0] * 100
    class Net(torch.nn.Module):
        def __init__(self): super().__init__(); self.net = torch.nn.Linear(16, 4)
        def forward(self, x): return self.net(x) + len(table)
    net = Net(); refs.append((weakref.ref(net), weakref.ref(Net)))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in loader: net(x).sum().backward(); optimizer.step()
for _ in range(5): trial()
gc.collect()
print(*(sum(one() is not None for one in of) for of in zip(*refs)))
"""
    said, found = found_in(forks, tmp_path, program.replace("{layers}", str(layers)))
    assert said.splitlines()[0] == "0 0"
    assert 50 == found["BATCH"]


def test_a_whole_step_that_is_compiled(forks, tmp_path):
    """It has the graphs and breaks of the plain program, and its rounds are the steps."""
    program = TRAIN + (
        "import torch._dynamo\nfrom torch._dynamo.utils import counters\n"
        "@torch.compile(backend='eager')\ndef step(x, y):\n  optimizer.zero_grad()\n"
        "  loss = torch.nn.functional.cross_entropy(net(x), y); loss.backward(); optimizer.step()\n  return loss\n"
        "for _ in range(3):\n  for x, y in loader: loss = step(x, y)\n"
        "print(dict(counters['stats']), sum(counters['graph_break'].values()), loss.item())\n"
    )
    plain = forks.printed("import sys\n" + program, tmp_path / "plain")
    timed = forks.printed(BEGIN.format(run=str(tmp_path / "run")) + program + "log.close()\n", tmp_path / "timed")
    assert plain.splitlines()[-1] == timed.splitlines()[-1]
    assert 30 == regions_of(tmp_path / "run")["BATCH"]
