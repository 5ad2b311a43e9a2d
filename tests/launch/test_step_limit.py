"""``--steps N``: a program ends before its step N + 1, with the exit status 0, and its ``finally`` clauses have run."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest
import suite_ranks
from suite_autolog import regions_of

pytest.importorskip("torch", reason="most of the programs train with PyTorch")
pytest.importorskip("duckdb", reason="reads a run")
from deep500_timing.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.one_form]

STEPS = 13
TORCH = """
import os, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0); torch.set_num_threads(1)
rows = TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
loss_of = lambda x, y: nn.functional.cross_entropy(net(x), y)
"""
PLAIN = (
    TORCH
    + """
for epoch in range(50):
    net.train()
    for x, y in DataLoader(rows, 8):
        optimizer.zero_grad(); loss_of(x, y).backward(); optimizer.step(); did(1)
    net.eval()
    with torch.no_grad():
        for x, y in DataLoader(rows, 32): net(x)
open("model.pt", "w").close()
"""
)
ROWS = TORCH + (
    'rows = [{"x": torch.randn(8), "labels": torch.tensor(n % 2)} for n in range(64)]\n'
    "class Net(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__(); self.net = nn.Linear(8, 2)\n"
    "    def forward(self, x, labels):\n"
    '        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}\n'
)
KERAS = """
import numpy as np, keras
class Count(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None): did(1)
model = keras.Sequential([keras.layers.Dense(4)])
model.compile("adam", "mse")
model.fit(np.ones((64, 8)), np.ones((64, 4)), batch_size=8, epochs=50, verbose=0, validation_split=0.25,
    callbacks=[Count(), keras.callbacks.ModelCheckpoint("at-{epoch}.keras")])
model.save("model.keras")
"""
# An iterator that is left open waits for its thread, which is in Python, as the interpreter ends.
KERAS_DATA = (
    KERAS.split("model.fit")[0]
    + "import time, tensorflow as tf\n"
    + "def slow(x):\n    time.sleep(0.01)\n    return x\n"
    + "data = tf.data.Dataset.from_tensors((np.ones((8, 8)), np.ones((8, 4)))).repeat()\n"
    + "called = lambda x, y: (tf.ensure_shape(tf.numpy_function(slow, [x], x.dtype), x.shape), y)\n"
    + "model.fit(data.map(called), epochs=50, steps_per_epoch=8, verbose=0, callbacks=[Count()])\n"
)
JAX = """
import jax, jax.numpy as jnp, numpy as np
data = np.ones((500, 8, 4), "float32")
loss_of = lambda w, x: ((x @ w) ** 2).mean()
w = jnp.ones((4, 2))
"""
# Each program calls `did(1)` behind each step.
OF_TORCH = {
    "plain": PLAIN,
    "no data": TORCH + "x, y = rows[:8]\n"
    "for _ in range(500): optimizer.zero_grad(); loss_of(x, y).backward(); optimizer.step(); did(1)\n",
    "accumulation": TORCH + "for epoch in range(50):\n"
    "    for at, (x, y) in enumerate(DataLoader(rows, 4)):\n"
    "        loss_of(x, y).backward()\n"
    "        if at % 4 == 3: optimizer.step(); optimizer.zero_grad(); did(1)\n",
    "GAN": TORCH + "other = nn.Linear(8, 8); second = torch.optim.Adam(other.parameters())\n"
    "for epoch in range(50):\n"
    "    for x, y in DataLoader(rows, 8):\n"
    "        optimizer.zero_grad(); loss_of(other(x).detach(), y).backward(); optimizer.step()\n"
    "        second.zero_grad(); loss_of(other(x), 1 - y).backward(); second.step(); did(1)\n",
    "steps in the backward pass": TORCH + "for one in net.parameters():\n"
    "    one.own = torch.optim.SGD([one], 0.1)\n"
    "    one.register_post_accumulate_grad_hook(lambda one: [one.own.step(), one.own.zero_grad()][0])\n"
    "x, y = rows[:8]\n"
    "for _ in range(500): loss_of(x, y).backward(); did(1)\n",
    "an optimizer of its own": TORCH + "def step():\n"
    "    with torch.no_grad():\n"
    "        for one in net.parameters(): one -= 0.1 * one.grad; one.grad = None\n"
    "x, y = rows[:8]\n"
    "for _ in range(500): loss_of(x, y).backward(); step(); did(1)\n",
}
# Of each program: its needs, its environment, and its text.
PROGRAMS = {
    **{name: ((), {}, text) for name, text in OF_TORCH.items()},
    "transformers": (
        ("transformers",),
        {},
        ROWS + "from transformers import Trainer, TrainingArguments, TrainerCallback\n"
        "class Count(TrainerCallback):\n"
        "    def on_step_end(self, *_, **__): did(1)\n"
        'given = TrainingArguments("out", num_train_epochs=50, gradient_accumulation_steps=2, report_to=[],\n'
        '    use_cpu=True, disable_tqdm=True, save_strategy="epoch", remove_unused_columns=False,\n'
        "    per_device_train_batch_size=4)\n"
        "trainer = Trainer(Net(), given, train_dataset=rows, callbacks=[Count()]); trainer.train()\n"
        'trainer.save_model("model")\n',
    ),
    "lightning": (
        ("lightning",),
        {},
        ROWS + "from lightning.pytorch import LightningModule, Trainer\n"
        "from lightning.pytorch.plugins.environments import LightningEnvironment\n"
        "class Module(LightningModule):\n"
        "    def __init__(self): super().__init__(); self.net = Net()\n"
        '    def training_step(self, batch, index): return self.net(**batch)["loss"]\n'
        "    def on_train_batch_end(self, *_): did(1)\n"
        "    def configure_optimizers(self): return torch.optim.Adam(self.parameters())\n"
        'trainer = Trainer(max_epochs=50, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,\n'
        '    enable_model_summary=False, plugins=LightningEnvironment(), default_root_dir="out")\n'
        'trainer.fit(Module(), DataLoader(rows, 8)); trainer.save_checkpoint("model")\n',
    ),
    "accelerate": (
        ("accelerate",),
        {},
        ROWS + "from accelerate import Accelerator\n"
        "accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2); net = Net()\n"
        "net, optimizer, loader = accelerator.prepare(net, torch.optim.Adam(net.parameters()), DataLoader(rows, 8))\n"
        "for epoch in range(50):\n"
        "    for batch in loader:\n"
        "        with accelerator.accumulate(net):\n"
        '            accelerator.backward(net(**batch)["loss"]); optimizer.step(); optimizer.zero_grad()\n'
        "            did(accelerator.sync_gradients)\n",
    ),
    "keras on tensorflow": (("keras", "tensorflow"), suite_ranks.ON_TENSORFLOW, KERAS),
    "keras on jax": (("keras", "jax"), {"KERAS_BACKEND": "jax"}, KERAS),
    "keras on torch": (("keras",), {"KERAS_BACKEND": "torch"}, KERAS),
    "GradientTape": (
        ("tensorflow", "keras"),
        suite_ranks.ON_TENSORFLOW,
        "import tensorflow as tf, keras\n"
        "model = keras.Sequential([keras.layers.Dense(4)]); adam = keras.optimizers.Adam()\n"
        "for _ in range(50):\n"
        "    for x in tf.data.Dataset.from_tensor_slices(tf.ones((64, 8))).batch(8):\n"
        "        with tf.GradientTape() as tape: loss = tf.reduce_mean(model(x) ** 2)\n"
        "        slopes = tape.gradient(loss, model.trainable_variables)\n"
        "        adam.apply_gradients(zip(slopes, model.trainable_variables)); did(1)\n",
    ),
    "jax, jitted whole": (
        ("jax",),
        {},
        JAX + "step = jax.jit(lambda w, x: w - 0.1 * jax.grad(loss_of)(w, x))\nfor x in data: w = step(w, x); did(1)\n",
    ),
    "jax, a gradient and an update": (
        ("jax",),
        {},
        JAX + "slope = jax.jit(jax.grad(loss_of)); update = jax.jit(lambda w, g: w - 0.1 * g)\n"
        "for x in data: w = update(w, slope(w, x)); did(1)\n",
    ),
    "jax, a gradient that is not jitted": (
        ("jax",),
        {},
        JAX + "for x in data: w = w - 0.1 * jax.grad(loss_of)(w, x); did(1)\n",
    ),
    "deepspeed": (
        ("deepspeed",),
        {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"},
        # Else it compiles an operator for inference, which takes minutes.
        TORCH + 'import sys, deepspeed; sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None\n'
        'deepspeed.init_distributed("gloo")\n'
        "net, optimizer, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config={\n"
        '    "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2,\n'
        '    "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})\n'
        "for epoch in range(50):\n"
        "    for x, y in DataLoader(rows, 8):\n"
        "        is_last = net.is_gradient_accumulation_boundary()\n"
        "        net.backward(nn.functional.cross_entropy(net(x), y)); net.step(); did(is_last)\n",
    ),
}
QUICK = ("plain", "GAN", "no data", "accumulation")
COUNTED = """
count = 0
def did(one):
    global count
    count += bool(one)
try:
    exec(compile(open(PROGRAM).read(), PROGRAM, "exec"))
    print("WENT ON")
finally:
    print(f"FINALLY {count}\\n", end="", flush=True)  # in one write: torchrun gives its ranks `python -u`, and one pipe
"""


def run(folder, text, steps=STEPS, before=(), forks=None, **environment):
    """How a program ends that counts its steps itself; of forks one that trains with PyTorch."""
    (folder / "inner.py").write_text(text)
    (folder / "train.py").write_text(f"PROGRAM = {str(folder / 'inner.py')!r}\n" + COUNTED)
    words = ("--run", "run", f"--steps={steps}", *before, "train.py")
    if forks is not None:
        return forks.run(folder, *words, **environment)
    return suite_ranks.command(folder, "run", *words, timeout_s=300, **environment)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.matrix) for name in PROGRAMS]
)
def test_a_program_ends_before_the_step_after_the_last(name, forks, tmp_path):
    """It has made exactly so many steps, has not failed, and writes nothing that would be its result."""
    needs, environment, text = PROGRAMS[name]
    for need in needs:
        if importlib.util.find_spec(need) is None:
            pytest.skip(f"trains with {need}")
    if name == "deepspeed":
        environment = {**environment, "MASTER_PORT": str(suite_ranks.free_port())}
    done = run(tmp_path, text, forks=forks if name in OF_TORCH else None, **environment)
    said = done.stdout + (done.stderr or "")
    assert 0 == done.returncode, said
    assert [f"FINALLY {STEPS}"] == re.findall("FINALLY.*|WENT ON", said), said
    assert f"the program was ended after {STEPS} steps" in said
    assert not [*tmp_path.glob("model*")]
    assert not re.search("[0-9] failed", said), said
    with Run.open(tmp_path / "run") as opened:
        assert {"cut by --steps"} == {log["end"] for log in opened.table("logs").rows()}
        assert 0 == opened.goodput().failures
    assert STEPS == regions_of(tmp_path / "run")["BATCH"]


def test_a_program_that_has_fewer_steps_is_not_cut(forks, tmp_path):
    """It ends by itself, and nothing is said."""
    done = run(tmp_path, PLAIN.replace("range(50)", "range(1)"), steps=9, forks=forks)
    assert ["WENT ON", "FINALLY 8"] == re.findall("FINALLY.*|WENT ON", done.stdout)
    assert "was ended" not in done.stdout


def test_a_program_that_catches_the_end(forks, tmp_path):
    """It goes on, is not stopped again, and that is said."""
    caught = (
        "import sys, threading, deep500_timing._launch.autolog as autolog\n"
        "autolog._SWALLOWED_S = 0.001\n"
        "said = threading.Event(); write = sys.stderr.write\n"
        "class Err:\n"
        "    def __getattr__(self, name): return getattr(sys.__stderr__, name)\n"
        "    def write(self, text):\n"
        "        write(text)\n"
        "        if 'it still runs' in text: said.set()\n"
        "sys.stderr = Err()\n" + TORCH + "x, y = rows[:8]\n"
        "for _ in range(30):\n"
        "    try:\n"
        "        optimizer.zero_grad(); loss_of(x, y).backward(); optimizer.step(); did(1)\n"
        "    except BaseException: pass\n"
        "said.wait()\n"
    )
    done = run(tmp_path, caught, forks=forks)
    assert 0 == done.returncode, done.stdout
    assert ["WENT ON", "FINALLY 29"] == re.findall("FINALLY.*|WENT ON", done.stdout)
    assert 1 == done.stdout.count("it still runs")


@pytest.mark.matrix
def test_data_that_calls_python_while_the_program_ends(tmp_path):
    """The interpreter ends, although TensorFlow's thread is in Python: without a report too, whose work took long."""
    for needed in ("keras", "tensorflow"):
        pytest.importorskip(needed)
    done = run(tmp_path, KERAS_DATA, before=("--quiet",), **suite_ranks.ON_TENSORFLOW)
    assert (0, f"FINALLY {STEPS}\n") == (done.returncode, done.stdout)


@pytest.mark.matrix
def test_the_ranks_of_a_job_end_at_the_same_step(tmp_path):
    """Two of them under torchrun: each ends by itself, and so does the launcher, which restarts none."""
    text = (
        TORCH + "import torch.distributed as dist; dist.init_process_group('gloo')\n"
        "net = nn.parallel.DistributedDataParallel(net)\n"
        "try:\n"
        "    for epoch in range(50):\n"
        "        for x, y in DataLoader(rows, 8):\n"
        "            optimizer.zero_grad(); loss_of(x, y).backward(); optimizer.step(); did(1)\n"
        "finally:\n"
        "    import gc; del net; gc.collect(); dist.destroy_process_group()\n"  # else PyTorch aborts now and then
    )
    port = str(suite_ranks.free_port())
    launcher = ("--", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port)
    done = run(tmp_path, text, before=launcher)
    assert 0 == done.returncode, done.stderr
    assert [f"FINALLY {STEPS}"] * 2 == re.findall("FINALLY [0-9]+|WENT ON", done.stdout), done.stderr
    with Run.open(tmp_path / "run") as opened:
        logs = opened.table("logs").rows()
        assert [(0, "cut by --steps"), (1, "cut by --steps")] == sorted((log["rank"], log["end"]) for log in logs)


def test_steps_by_the_environment(tmp_path):
    """``DEEP500_TIMING_STEPS`` is the default of ``--steps``; a wrong number is named before the program starts."""
    (tmp_path / "train.py").write_text("def did(_): pass\n" + PLAIN)
    for given, status, said in (("5", 0, "after 5 steps"), ("five", 2, "DEEP500_TIMING_STEPS='five' is wrong")):
        done = suite_ranks.command(tmp_path, "run", "--run", "run", "train.py", DEEP500_TIMING_STEPS=given)
        assert status == done.returncode
        assert said in done.stderr


@pytest.mark.parametrize("given", ["0", "-1", "many", ""])
def test_steps_that_are_no_number(given, tmp_path):
    """They are refused in one line."""
    done = run(tmp_path, PLAIN, steps=given)
    assert 2 == done.returncode
    assert "--steps requires a number from 1 on." in done.stderr
