"""``autolog`` in unchanged programs of JAX, and of Keras on JAX: each step is a BATCH, and the results are the same."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import suite_ranks

pytest.importorskip("jax", reason="times JAX")
pytestmark = pytest.mark.slow

BEGIN = """
import sys
if len(sys.argv) > 1:
    import deep500_timing
    log = deep500_timing.autolog(sys.argv[1], quiet=True)
import jax, jax.numpy as jnp, numpy as np
r = np.random.RandomState(0)
data = r.randn(12, 8, 4).astype("float32")
def loss_of(w, x):
    return ((x @ w["w"] + w["b"]) ** 2).mean()
w = {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}
"""
END = """
if len(sys.argv) > 1:
    log.close()
    found = {r.name: r.stats.count for r in log.timer().snapshot() if r.stats}
    for name in ("BATCH", *NAMES):
        print(name, found.get(name))
    for name in ABSENT:
        assert name not in found, found
"""
LOADER = "import torch\nloader = torch.utils.data.DataLoader(torch.from_numpy(data), batch_size=None)\n"
BY_HAND = "w = jax.tree.map(lambda a, g: a - 0.1 * g, w, gradient(w, x))\n"
STEP = "jax.jit(lambda w, x: jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss_of)(w, x)))"
# Of each program: its needs, its text, the counts of regions, and the regions that it must not have.
SCORE = "score = jax.jit(loss_of)\n"
PROGRAMS = {
    "what is traced outside of jit": (
        (),
        f"step = {STEP}\n{SCORE}for x in data:\n    w = step(w, x); jax.vmap(score, (None, 0))(w, data[:2])\n"
        "w, _ = jax.lax.scan(lambda w, x: (step(w, x), 0), w, jnp.asarray(data))\n",
        {"BATCH": 12},
        ("jit(loss_of)",),
    ),
    "an evaluation of each epoch": (
        ("torch",),
        f"{LOADER}step, total = {STEP}, jnp.zeros(())\nscore = jax.jit(lambda total, w, x: total + loss_of(w, x))\n"
        "for _ in range(3):\n    for x in loader: w = step(w, x.numpy())\n"
        "    for x in loader: total = score(total, w, x.numpy())\n",
        {"BATCH": 36, "VALIDATION": 3, "EPOCH": 3},
        (),
    ),
    "an evaluation of two batches in each fourth step": (
        ("torch",),
        f"{LOADER}step, others = {STEP}, iter(loader)\n{SCORE}for k, x in enumerate(loader):\n"
        "    w = step(w, x.numpy())\n    if k % 4 == 3:\n        for _ in range(2): score(w, next(others).numpy())\n",
        {"BATCH": 12, "VALIDATION": 3},
        (),
    ),
    "waits for results, in place of what it was given": (
        (),
        "if len(sys.argv) > 1: sys.modules['deep500_timing_jax._autolog']._SHORT_NS = 0\n"
        f"step = {STEP}\nfor x in data:\n"
        "    w = step(w, x); jax.block_until_ready(w); w['b'].block_until_ready(); jax.device_get(w['b'])\n",
        {"BATCH": 12, "wait for device": 36},
        (),
    ),
    "a gradient by hand": (
        (),
        "step = jax.jit(lambda w, x: {'w': w['w'] - 0.1 * x.T @ (x @ w['w']), 'b': w['b']}, donate_argnums=0)\n"
        "for x in data: w = step(w, x)\n",
        {"BATCH": 12},
        (),
    ),
    "one training after the other": (
        (),
        f"for _ in range(3):\n    w, step = dict(w), {STEP}\n    for x in data: w = step(w, x)\n",
        {"BATCH": 36},
        (),
    ),
    "one training after the other, donated": (
        (),
        "for k in range(2):\n"
        "    step = jax.jit(lambda w, x: {'w': w['w'] - 0.1 * x.T @ (x @ w['w']), 'b': w['b'] + k}, donate_argnums=0)\n"
        "    w = jax.tree.map(jnp.copy, w)\n"
        "    for x in data: w = step(w, x)\n",
        {"BATCH": 24},
        (),
    ),
    "the update outside of jit after one inside": (
        ("optax",),
        f"import optax; step, optimizer = {STEP}, optax.sgd(0.1)\n"
        "for x in data: w = step(w, x)\n"
        "slopes, state = jax.jit(jax.grad(loss_of)), optimizer.init(w)\n"
        "for x in data:\n"
        "    move, state = optimizer.update(slopes(w, x), state)\n"
        "    w = optax.apply_updates(w, move)\n",
        {"BATCH": 24},
        (),
    ),
    "two models in turn, the second one later": (
        (),
        f"v, one, two = dict(w), {STEP}, {STEP}\n"
        "for x in data: w = one(w, x)\n"
        "for x in data: w, v = one(w, x), two(v, x)\n",
        {"BATCH": 25},  # Where the second begins, it may be the next training.
        (),
    ),
    "an evaluation that returns its state": (
        (),
        f"step, evaluate = {STEP}, jax.jit(lambda w, x: (w, loss_of(w, x)))\n"
        "for x in data: w, loss = evaluate(w, x)\n"
        "for _ in range(2):\n"
        "    for x in data: w = step(w, x)\n"
        "    for x in data: w, loss = evaluate(w, x)\n",
        {"BATCH": 24},
        (),
    ),
    "an environment before the first gradient": (
        (),
        "move, place = jax.jit(lambda place: place + 1), jnp.zeros(3)\n"
        "for _ in range(30): place = move(place)\n"
        f"for x in data: gradient = lambda w, x: jax.grad(loss_of)(w, x); {BY_HAND}",
        {"BATCH": 12},
        (),
    ),
    "the update outside of jit": (
        ("optax",),
        "import optax\nopt = optax.adam(0.1); s = opt.init(w)\n"
        "gradient = jax.jit(jax.value_and_grad(loss_of))\n"
        "for x in data:\n    l, g = gradient(w, x); u, s = opt.update(g, s); w = optax.apply_updates(w, u)\n",
        {"BATCH": 12, "optimizer (not jitted)": 12},
        (),
    ),
    "an update by hand outside of jit": (
        (),
        f"gradient = jax.jit(jax.grad(loss_of))\nfor x in data: {BY_HAND}",
        {"BATCH": 12},
        ("optimizer (not jitted)",),
    ),
    "an update by hand, a loader of PyTorch and an evaluation": (
        ("torch",),
        f"{LOADER}gradient, evaluate = jax.jit(jax.grad(loss_of)), jax.jit(loss_of)\n"
        "for _ in range(3):\n"
        f"    for x in map(np.asarray, loader): {BY_HAND}"
        "    for x in loader: evaluate(w, x.numpy())\n",
        {"BATCH": 36, "EPOCH": 3, "IO": 72},
        ("prepare batch", "other code", "between steps"),
    ),
    "two updates by hand, an evaluation among the steps": (
        ("torch",),
        f"{LOADER}slope, other = jax.jit(jax.grad(loss_of)), jax.jit(jax.grad(lambda w, x: loss_of(w, 2 * x)))\n"
        "gradient = lambda w, x: jax.tree.map(jnp.add, slope(w, x), other(w, x))\n"
        "for _ in range(2):\n"
        "    for i, x in enumerate(map(np.asarray, loader)):\n"
        f"        {BY_HAND}"
        "        if i % 4 == 3:\n"
        "            for x in loader: loss_of(w, x.numpy())\n",
        {"BATCH": 24, "EPOCH": 2},
        ("prepare batch", "other code"),
    ),
    "gradients accumulated by hand, and the update by hand": (
        (),
        "slope = jax.jit(jax.grad(loss_of))\n"
        "def gradient(w, x): return jax.tree.map(jnp.add, *(slope(w, half) for half in (x[:4], x[4:])))\n"
        f"for x in data: {BY_HAND}",
        {"BATCH": 12},
        (),
    ),
    "gradients accumulated by hand without jit, a loader of PyTorch": (
        ("torch",),
        f"{LOADER}held = None\n"
        "for _ in range(3):\n"
        "    for i, x in enumerate(loader):\n"
        "        g = jax.grad(loss_of)(w, x.numpy()); held = g if held is None else jax.tree.map(jnp.add, held, g)\n"
        "        if i % 3 == 2: w, held = jax.tree.map(lambda a, g: a - 0.1 * g, w, held), None\n",
        {"BATCH": 13},  # That the first two belong together is seen at the second.
        ("other code",),
    ),
    "the whole of the data in each gradient": (
        (),
        "slope, x = jax.jit(lambda x, w: jax.grad(loss_of)(w, x)), data.reshape(-1, 4)\n"
        "for _ in data: w = jax.tree.map(lambda a, g: a - 0.1 * g, w, slope(x, w))\n",
        {"BATCH": 12},
        (),
    ),
    "other networks later, their steps in turn": (
        (),
        "for k in range(2):\n"
        f"    steps, ws = [{STEP.replace('w, x:', 'w, x, k=k:')} for _ in range(4)], [w] * 4\n"
        "    for x in data: ws = [step(w, x) for step, w in zip(steps, ws)]\n",
        {"BATCH": 23},  # The first of the others may be more networks of the round before.
        (),
    ),
    "the update in a function of its own": (
        ("optax",),
        "import optax\nopt = optax.adam(0.1); s = opt.init(w)\n"
        "vg = jax.value_and_grad(loss_of)\n"
        "@jax.jit\ndef gradient(w, x): return vg(w, x)[1]\n"
        "@jax.jit\ndef update(w, s, g):\n    u, s = opt.update(g, s); return optax.apply_updates(w, u), s\n"
        "for x in data: w, s = update(w, s, gradient(w, x))\n",
        {"BATCH": 12},
        ("optimizer (not jitted)",),
    ),
    "without jit": (
        ("optax",),
        "import optax\nopt = optax.sgd(0.1); s = opt.init(w)\n"
        "for x in data:\n"
        "    l, g = jax.value_and_grad(lambda w: loss_of(w, x))(w)\n"
        "    u, s = opt.update(g, s); w = optax.apply_updates(w, u)\n",
        {"BATCH": 12, "gradient (not jitted)": 12, "optimizer (not jitted)": 12},
        (),
    ),
    "a loader of PyTorch beside an evaluation": (
        ("torch",),
        f"{LOADER}step, evaluate = {STEP}, jax.jit(loss_of)\n"
        "for _ in range(2):\n"
        "    for x in loader: w = step(w, x.numpy())\n"
        "    for x in loader: evaluate(w, x.numpy())\n",
        {"BATCH": 24, "EPOCH": 2},
        ("prepare batch", "other code"),
    ),
    "flax nnx": (
        ("flax",),
        "from flax import nnx\nimport optax\n"
        "class Net(nnx.Module):\n    def __init__(self, rngs): self.a = nnx.Linear(4, 2, rngs=rngs)\n"
        "    def __call__(self, x): return self.a(x)\n"
        "net = Net(nnx.Rngs(0)); opt = nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param)\n"
        "loss_fn = lambda net, x: (net(x) ** 2).mean()\n"
        "@nnx.jit\ndef step(net, opt, x): opt.update(net, nnx.value_and_grad(loss_fn)(net, x)[1])\n"
        "@nnx.jit\ndef evaluate(net, x): return loss_fn(net, x)\n"
        "for _ in range(2):\n    for x in data: step(net, opt, x)\n    for x in data: evaluate(net, x)\n"
        "w = nnx.state(net)\n",
        {"BATCH": 24},
        (),
    ),
    "equinox": (
        ("equinox", "optax"),
        "import equinox as eqx, optax\n"
        "w = eqx.nn.Linear(4, 2, key=jax.random.PRNGKey(0)); opt = optax.adam(0.1); s = opt.init(w)\n"
        "loss_fn = lambda m, x: (jax.vmap(m)(x) ** 2).mean()\n"
        "@eqx.filter_jit\ndef step(m, s, x):\n    l, g = eqx.filter_value_and_grad(loss_fn)(m, x)\n"
        "    u, s = opt.update(g, s, m); return eqx.apply_updates(m, u), s\n"
        "@eqx.filter_jit\ndef evaluate(m, x): return loss_fn(m, x)\n"
        "for x in data: w, s = step(w, s, x); evaluate(w, x)\n",
        {"BATCH": 12},
        (),
    ),
}
KERAS = """
import os; os.environ["KERAS_BACKEND"] = "jax"
sys.modules["tensorflow"] = None  # Keras would import it to seed it.
import keras, keras_tuner, tempfile
keras.utils.set_random_seed(0)
def build(tune=None):
    units = tune.Choice("units", [4, 8]) if tune else 8
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model
x, y = data.reshape(-1, 4), data.reshape(-1, 4).sum(1)
folder, c, model = tempfile.mkdtemp(), keras.callbacks, build()
model.fit(x, y, batch_size=8, epochs=3, validation_split=0.25, verbose=0, callbacks=[c.EarlyStopping(patience=9),
    c.ModelCheckpoint(folder + "/a.keras"), c.ReduceLROnPlateau(), c.CSVLogger(folder + "/log"), c.TerminateOnNaN(),
    c.LearningRateScheduler(lambda e: 0.01 / (e + 1)), c.BackupAndRestore(folder + "/b")])
tuner = keras_tuner.GridSearch(build, "loss", max_trials=2, directory=folder)
tuner.search(x, y, batch_size=8, epochs=2, verbose=0)
w = model.get_weights(), [t.score for t in tuner.oracle.get_best_trials(2)]
del sys.modules["tensorflow"]
"""
PROGRAMS["the callbacks of Keras, and its tuner"] = (
    ("keras", "keras_tuner"),
    KERAS,
    {"FIT": 3, "EPOCH": 3 + 2 * 2, "BATCH": 3 * 9 + 2 * 2 * 12, "VALIDATION": 3},
    (),
)
PROGRAMS["an optimizer of Keras beside TensorFlow"] = (
    ("keras", "tensorflow"),
    'import os; os.environ["KERAS_BACKEND"] = "jax"; import tensorflow, keras\n'
    "optimizer = keras.optimizers.SGD(0.1); kernel = keras.Variable(np.ones((4, 2), 'float32'))\n"
    "optimizer.build([kernel]); state, w = [v.value for v in optimizer.variables], [kernel.value]\n"
    "loss_of = lambda w, x: ((x @ w[0]) ** 2).mean()\n"
    "@jax.jit\ndef step(w, state, x): return optimizer.stateless_apply(state, jax.grad(loss_of)(w, x), w)\n"
    "for x in (*data, *data[:, :5]): w, state = step(w, state, x)\n",
    {"BATCH": 24},
    ("optimizer",),
)
PROGRAMS["an update by hand without jit, tf.data"] = (
    ("tensorflow",),
    "import tensorflow as tf\ngradient = lambda w, x: jax.grad(loss_of)(w, x)\n"
    "for _ in range(3):\n"
    f"    for x in tf.data.Dataset.from_tensor_slices(data).as_numpy_iterator(): {BY_HAND}",
    {"BATCH": 36},
    ("prepare batch", "other code"),
)


ALL = """
import contextlib, io, json, sys
_, texts, file = sys.argv
del sys.argv[1:]
found = {}
for what, text in json.load(open(texts)).items():
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(text, {"__name__": "__main__"})
    found[what] = said.getvalue()
json.dump(found, open(file, "w"))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The variables with which JAX keeps what it has compiled of the programs: each runs plain and timed."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def run(text, folder, start=suite_ranks.interpreter, arguments=(), **variables):
    """A program's output, errors included."""
    output = folder / "output"
    environment = suite_ranks.environment(JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3", **variables)
    program = start(["-c", text, *arguments], environment, output)
    try:
        assert 0 == program.wait(300), output.read_text()[-3000:]
    finally:
        program.kill()
    said = output.read_text()
    assert "TimingWarning" not in said
    return said


def program_of(what):
    """Its text, which prints its weights."""
    _, text, counts, absent = PROGRAMS[what]
    printing = "print([np.asarray(leaf).tolist() for leaf in jax.tree.leaves(w)])\n"
    return f"{BEGIN}{text}{printing}NAMES, ABSENT = {tuple(counts)}, {absent}\n{END}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory, compiled):
    """The outputs of the programs without a timer, from one process."""
    folder = tmp_path_factory.mktemp("plain")
    texts = {what: program_of(what) for what, (needed, *_) in PROGRAMS.items() if all(map(find_spec, needed))}
    (folder / "texts").write_text(json.dumps(texts))
    run(ALL, folder, arguments=(str(folder / "texts"), str(folder / "found")), **compiled)
    return json.loads((folder / "found").read_text())


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_program(what, plain, compiled, forks, tmp_path):
    """The steps are counted as the program takes them, and the weights are the same to the bit."""
    needed, _, counts, _ = PROGRAMS[what]
    for name in needed:
        pytest.importorskip(name, reason="is what the program is written in")
    start = forks.start_tensorflow if "tensorflow" in needed else forks.start_jax
    if "keras" in needed:  # It chooses its backend when it is imported, and these find nothing imported.
        start = suite_ranks.interpreter
    said = run(program_of(what), tmp_path, start, [str(tmp_path / "run")], **compiled)

    assert plain[what] in said
    lines = said.splitlines()
    for name, count in counts.items():
        assert f"{name} {count}" in lines


TYPES = """
import copy, inspect, pickle, sys, traceback
import jax, jax.numpy as jnp
def made():
    @jax.jit
    def step(w, x):
        "Its text."
        return w - 0.1 * x
    @jax.jit
    def bad(w):
        raise ValueError("user's own")
    class Trainer:
        scale = jax.jit(lambda self, w: 2 * w, static_argnums=0)
    one = jnp.ones(2)
    found = [type(step).__name__, type(step).__module__, isinstance(step, jax.stages.Wrapped), isinstance(step, KIND),
             step.__wrapped__.__name__, step.__name__, step.__doc__, str(inspect.signature(step)), str(step)[:22]]
    step(one, one)
    found += [type(step)._cache_size(step), step._cache_size(), step.lower(one, one).as_text(), len({step, step})]
    step.clear_cache()
    found += [step._cache_size(), [n for n in dir(KIND) if callable(getattr(KIND, n)) and not hasattr(type(step), n)]]
    found += [str(jax.make_jaxpr(step)(one, one)), jax.eval_shape(step, one, one).shape, jax.vmap(step)(one, one).shape]
    found += [float(jax.grad(lambda w: step(w, 1.0))(2.0)), Trainer().scale(one).tolist(), jax.jit(step)(one, one)[0]]
    gone = jnp.ones(())
    gone.delete()
    for call in (lambda: bad(one), lambda: step(one), lambda: pickle.dumps(step), lambda: copy.deepcopy(step),
                 lambda: jax.block_until_ready(gone), lambda: gone.block_until_ready(), lambda: float(gone)):
        try:
            found.append(type(call()).__name__)
        except Exception as error:
            found += [type(error).__name__, str(error)]
            found += [(line.name, line.lineno) for line in traceback.extract_tb(error.__traceback__)]
    return found
KIND = type(jax.jit(lambda x: x))
plain = made()
import deep500_timing
log = deep500_timing.autolog(sys.argv[1], quiet=True)
timed = made()
log.close()
for one, other in zip(plain, timed, strict=True):
    print(one == other, one, other)
"""


def test_what_a_replaced_function_answers(tmp_path):
    """It answers as the original: its type, its attributes and methods, its program, its errors and their lines."""
    printed = run(TYPES, tmp_path, arguments=[str(tmp_path / "run")])

    assert not [line for line in printed.splitlines() if line.startswith("False")]
    assert printed.count("True ") >= 20
