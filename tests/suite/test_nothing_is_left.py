"""A test that leaves something of the process or of a framework behind fails, and the next one finds it as it was."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import suite_guard
import suite_ranks

SUPPORT = Path(__file__).parents[1] / "support"

LEFT = {
    "the thread 'a waiter'": (
        "",
        "threading.Thread(target=threading.Event().wait, name='a waiter', daemon=True).start()",
    ),
    "enabled": ("", "gc.disable()"),
    "thresholds": ("", "gc.set_threshold(1, 2, 3)"),
    "debug": ("", "gc.set_debug(gc.DEBUG_STATS)"),
    "frozen": ("", "gc.freeze()"),
    "callbacks": ("", "gc.callbacks.append(print)"),
    "tracemalloc": ("", "tracemalloc.start()"),
    "signal handlers": ("", "signal.signal(signal.SIGUSR2, signal.SIG_IGN)"),
    "the environment": ("", "os.environ['LEFT'] = 'behind'"),
    "the working folder": ("", "os.chdir('/')"),
    "sys.path": ("", "sys.path.insert(0, '/left')"),
    "sys.meta_path": ("", "sys.meta_path.append(object())"),
    "sys.settrace": ("", "sys.settrace(lambda *_: None)"),
    "sys.setprofile": ("", "sys.setprofile(lambda *_: None)"),
    "threading.settrace": ("", "threading.settrace(lambda *_: None)"),
    "threading.setprofile": ("", "threading.setprofile(lambda *_: None)"),
    "sys.excepthook": ("", "sys.excepthook = print"),
    "the switch interval": ("", "sys.setswitchinterval(0.5)"),
    "the recursion limit": ("", "sys.setrecursionlimit(2000)"),
    "loggers": ("", "logging.getLogger().setLevel(1)"),
    "time.sleep": ("", "time.sleep = print"),
    "threading:Thread.start": ("", "threading.Thread.start = print"),
    "grad mode": ("torch", "torch.set_grad_enabled(False)"),
    "inference mode": ("torch", "suite_guard.kept = torch.inference_mode(); suite_guard.kept.__enter__()"),
    "anomaly mode": ("torch", "torch.autograd.set_detect_anomaly(True)"),
    "default dtype": ("torch", "torch.set_default_dtype(torch.float64)"),
    "PyTorch, threads": ("torch", "torch.set_num_threads(torch.get_num_threads() + 1)"),
    "deterministic": ("torch", "torch.use_deterministic_algorithms(True)"),
    "precision": ("torch", "torch.set_float32_matmul_precision('medium')"),
    "autocast": ("torch", "torch.set_autocast_enabled('cpu', True)"),
    "modes": ("torch", "torch.set_default_device('cpu')"),
    "process group": (
        "torch",
        "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)",
    ),
    "hooks": ("torch", "sys.modules['torch.optim.optimizer'].register_optimizer_step_post_hook(print)"),
    "torch.autograd.backward": ("torch", "torch.autograd.backward = print"),
    "Module.eval": ("torch", "torch.nn.Module.eval = functools.wraps(torch.nn.Module.eval)(lambda self: self)"),
    "functions run eagerly": ("tensorflow", "tensorflow.config.run_functions_eagerly(True)"),
    "jit": ("tensorflow", "tensorflow.config.optimizer.set_jit('autoclustering')"),
    "soft placement": ("tensorflow", "tensorflow.config.set_soft_device_placement(False)"),
    "float type": ("keras", "keras.config.set_floatx('float16')"),
    "policy": ("keras", "keras.config.set_dtype_policy('mixed_float16')"),
    "epsilon": ("keras", "keras.config.set_epsilon(0.5)"),
    "image format": ("keras", "keras.config.set_image_data_format('channels_first')"),
    "distribution": ("keras", "keras.distribution.set_distribution(object())"),
    "interactive logging": ("keras", "keras.config.disable_interactive_logging()"),
    "traceback filtering": ("keras", "keras.config.disable_traceback_filtering()"),
    "CallbackList.__init__": ("keras", "keras.callbacks.CallbackList.__init__ = print"),
    "64 bits": ("jax", "jax.config.update('jax_enable_x64', True)"),
    "jit disabled": ("jax", "jax.config.update('jax_disable_jit', True)"),
    "events": ("jax", "jax.monitoring.register_event_listener(print)"),
    "durations": ("jax", "jax.monitoring.register_event_duration_secs_listener(print)"),
    "jax.grad": ("jax", "jax.grad = print"),
}
"""A test's leftovers, by the guard's sentence: the framework needed, and the line that leaves it."""

TESTS = """
import functools, gc, logging, os, signal, sys, threading, time, tracemalloc
import pytest, suite_guard
{imports}
suite_guard.GRACE_S = 0.01
before = {{}}

def test_before():
    before.update(suite_guard.read())

{tests}
def test_it_is_as_it_was():
    before["threads"] = suite_guard.STATES["threads"].read()  # Nothing ends a thread from outside.
    assert suite_guard.left(before) == []
"""

FIXTURE = """
@pytest.fixture(scope="module")
def leaves():
    yield
    os.environ["LEFT"] = "behind"

def test_it(leaves):
    pass
"""


@pytest.fixture
def run(tmp_path):
    """Run tests under the suite's plug-ins; returns the run's output."""
    shutil.copytree(SUPPORT, tmp_path / "tests" / "support", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests" / "conftest.py").write_text('pytest_plugins = ["suite_guard"]\n', encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = tests/support\n", encoding="utf-8")

    def run(tests: str, *imports: str, start=suite_ranks.interpreter) -> str:
        text = TESTS.format(imports="\n".join(f"import {one}" for one in imports), tests=tests)
        (tmp_path / "tests" / "test_it.py").write_text(text, encoding="utf-8")
        environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
        for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
            environment.pop(name, None)
        options = [f"-pno:{one}" for one in ("randomly", "cacheprovider", "cov", "xdist", "timeout")]
        command = ["-c", "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))", *options, "-q", "-rA", "tests"]
        with contextlib.chdir(tmp_path):
            start(command, environment, tmp_path / "output").wait(300)
        return (tmp_path / "output").read_text()

    return run


@pytest.mark.parametrize(
    "framework",
    ["", *(pytest.param(name, marks=pytest.mark.slow) for name in ("torch", "keras", "jax"))],
    ids=lambda name: name or "process",
)
def test_what_is_left_is_said_and_put_back(run, framework, request):
    """Each state fails the test that leaves it, and that test alone, by name."""
    packages = ("tensorflow", "keras") if framework == "keras" else (framework,) if framework else ()
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    left = {said: line for said, (needs, line) in LEFT.items() if needs in (packages or ("",))}
    tests = "".join(f"def test_{number}():\n    {line}\n\n" for number, line in enumerate(left.values()))
    forks = request.getfixturevalue("forks") if framework else None  # else it would be slow
    starts = {"torch": "start", "keras": "start_tensorflow", "jax": "start_jax"}
    printed = run(tests, *packages, **({"start": getattr(forks, starts[framework])} if framework else {}))
    assert f"{len(left) + 2} passed, {len(left)} errors" in printed
    for number, said in enumerate(left):
        assert any(line.startswith("E  ") and said in line for line in printed.splitlines()), said
        assert f"ERROR tests/test_it.py::test_{number} - " in printed


def test_what_the_fixtures_of_a_file_leave(run):
    """A fixture of a file that leaves something fails the file's last test."""
    printed = run(FIXTURE)
    assert "the fixtures of this file left this behind" in printed
    assert "the environment, b'LEFT': None -> b'behind'" in printed


def test_a_filter_of_warnings_is_gone(run):
    """Pytest restores the filters after each test; the guard does not look at them."""
    printed = run("""
def test_filter():
    warnings.filterwarnings("ignore", "left behind")

def test_next():
    assert "left behind" not in str(warnings.filters)
""", "warnings")  # fmt: skip
    assert "4 passed" in printed


def test_every_state_is_left_by_a_test():
    """A state that the guard reads is among the ones that are left behind on purpose above."""
    for name, state in suite_guard.STATES.items():
        if state.module == "sys" and name not in ("threads", "attributes", "tracing", "the collector"):
            assert name in LEFT
    texts = {said for said, (needs, _) in LEFT.items() if not needs}
    assert suite_guard._collector().keys() | suite_guard._tracing().keys() <= texts
