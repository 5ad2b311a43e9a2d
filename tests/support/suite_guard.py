"""State that a test must restore: the state of the process and of the frameworks that it has imported.

A test that changes one of :data:`STATES` and does not restore it fails, and so does a file whose fixtures do. The state
is restored for the tests that follow. That of a framework is read where it has been imported before the test. Pytest
itself restores the filters of warnings.
"""

from __future__ import annotations

import _signal
import gc
import logging
import os
import signal
import sys
import threading
import tracemalloc
import types
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

GRACE_S = 30.0
"""A thread that was told to end gets this long."""

SERVICES = ("tqdm_monitor", "MlflowAsync", "MLflowAsync", "wandb", "AsyncioThread", "deep500-timing JAX")
"""Threads that live as long as the process, by the start of their names. A device's pool keeps JAX's clock."""

LIBRARIES = {
    "_distutils_hack",
    "absl",
    "benchmarks",
    "hypothesis",
    "importlib_metadata",
    "jax",
    "jaxlib",
    "keras",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "sentence_transformers",
    "six",
    "tensorflow",
    "torch",
    "transformers",
    "wandb",
}
"""What these install when they are first imported or used, and for good, is no test's doing."""

OF_IMPORTS = (
    b"CRC32C_",
    b"ENABLE_RUNTIME_",
    b"HDF5_",
    b"KMP_",
    b"MLFLOW_TRACKING_URI",
    b"PYTORCH_NVML_BASED_CUDA_CHECK",
    b"TF2_",
    b"TF_CPP_MIN_LOG_LEVEL",
    b"TPU_",
    b"WANDB_SERVICE",
)
"""Variables that TensorFlow, Lightning, MLflow, W&B and their imports set, by the start of their names."""

OWNERS = tuple(
    """
builtins gc os signal threading threading:Thread time
torch torch:Tensor torch.autograd torch.cuda torch.distributed torch.distributed.distributed_c10d
torch.nn.modules.module:Module torch.nn.parallel.distributed:DistributedDataParallel torch.optim.optimizer:Optimizer
torch.utils.data._utils.worker torch.utils.data.dataloader torch.utils.data.dataloader:DataLoader
torch.utils.data.dataloader:_BaseDataLoaderIter torch.utils.data.dataloader:_MultiProcessingDataLoaderIter
torch.utils.data.dataloader:_SingleProcessDataLoaderIter torch.distributed.pipelining.stage torch.utils.checkpoint
accelerate.accelerator:Accelerator lightning.pytorch.trainer.trainer:Trainer transformers.trainer:Trainer
pytorch_lightning.trainer.trainer:Trainer deepspeed.comm.comm
keras.src.callbacks.callback_list:CallbackList keras.src.models.model:Model keras.src.trainers.trainer:Trainer
tf_keras.src.callbacks:CallbackList tf_keras.src.engine.training:Model
tensorflow.python.eager.backprop:GradientTape tensorflow.python.data.ops.dataset_ops:DatasetV2 jax
""".split()  # noqa: SIM905
)
"""The modules and classes with patched attributes, by us or by a test: ``module`` or ``module:class``."""

LOGGERS = ("", "absl", "deep500_timing", "DeepSpeed", "mlflow", "tensorflow", "torch", "transformers", "wandb")

_frozen = 0
"""How often a test froze the collector's objects since they were last unfrozen; to count them takes milliseconds."""
freeze, _unfreeze = gc.freeze, gc.unfreeze


def _freeze() -> None:
    global _frozen
    _frozen += 1
    freeze()


def unfreeze() -> None:
    """Unfreeze the collector's objects, as ``gc.unfreeze``."""
    global _frozen
    _frozen = 0
    _unfreeze()


gc.freeze, gc.unfreeze = _freeze, unfreeze


_said: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads that a test was told of, which cannot be ended from outside."""


_kept: list[object] = []
"""Modes of PyTorch, which end with the object that stands for them."""


class State(NamedTuple):
    """Something that a test may change for its own time."""

    read: Callable[[], Any]
    put_back: Callable[[Any], object]
    module: str = "sys"
    """Read only where this module is imported."""


def _is_of_library(value: Any) -> bool:
    """Whether a function, or an object by its class, was made by code of one of :data:`LIBRARIES`."""
    # `functools.wraps` copies `__module__`: a function's globals are those of its own file.
    module = getattr(value, "__globals__", {}).get("__name__") or (
        value.__module__ if isinstance(value, type) else type(value).__module__
    )
    return module.partition(".")[0] in LIBRARIES


def _finders() -> list[Any]:
    # The adapter for PyTorch waits for its compiler from its import on.
    waits = ("deep500_timing_torch._compile", "deep500_timing_torch_plain._compile")
    return [
        one
        for one in sys.meta_path
        if not _is_of_library(one) and getattr(getattr(one, "call", None), "__module__", "") not in waits
    ]


def _threads() -> set[threading.Thread]:
    # A fit of Keras that was broken off leaves its executor to the callbacks that hold it.
    services = (*SERVICES, "ThreadPoolExecutor") if "keras" in sys.modules else SERVICES
    alive = {one for one in threading.enumerate() if one.is_alive() and not one.name.startswith(services)}
    return alive.difference(_said)


def _collector() -> dict[str, Any]:
    return {
        "enabled": gc.isenabled(),
        "thresholds": gc.get_threshold(),
        "debug": gc.get_debug(),
        "frozen": _frozen,
        "callbacks": [one for one in gc.callbacks if not _is_of_library(one)],
    }


def _set_collector(state: dict[str, Any]) -> None:
    (gc.enable if state["enabled"] else gc.disable)()
    gc.set_threshold(*state["thresholds"])
    gc.set_debug(state["debug"])
    if _frozen > state["frozen"]:
        unfreeze()
    gc.callbacks[:] = [one for one in gc.callbacks if one in state["callbacks"] or _is_of_library(one)]


def _signals() -> dict[int, Any]:
    # `signal.getsignal` makes an enumeration of each. That of SIGALRM is the timeout's, another for each test. Numbers
    # from 32 on are real-time signals, which no test handles.
    handlers = {number: _signal.getsignal(number) for number in range(1, 32) if number != signal.SIGALRM}
    return {number: signal.SIG_DFL if _is_of_library(one) else one for number, one in handlers.items()}


def _set_signals(state: dict[int, Any]) -> None:
    for number, handler in state.items():
        if handler is not None and _signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _environment() -> dict[bytes, bytes]:
    variables = os.environ._data.copy()  # type: ignore[attr-defined]  # Four hundred times as fast as a decoded copy.
    variables.pop(b"PYTEST_CURRENT_TEST", None)
    return {name: value for name, value in variables.items() if not name.startswith(OF_IMPORTS)}


def _set_environment(state: dict[bytes, bytes]) -> None:
    for name in _environment().keys() - state.keys():
        del os.environb[name]
    os.environb.update(state)


def _tracing() -> dict[str, Any]:
    # Coverage's own tracer is another object each time that it is asked for.
    return {
        name: read() if read() is None else type(read()).__name__
        for name, read in (
            ("sys.settrace", sys.gettrace),
            ("sys.setprofile", sys.getprofile),
            ("threading.settrace", threading.gettrace),
            ("threading.setprofile", threading.getprofile),
        )
    }


def _set_tracing(state: dict[str, Any]) -> None:
    for name, value in state.items():
        if value is None:
            getattr(sys if name.startswith("sys") else threading, name.partition(".")[2])(None)


def _is_of_pytest(handler: logging.Handler) -> bool:
    # It adds its own to the root and to each logger that does not propagate, again for each phase of a test.
    return type(handler).__module__ == "_pytest.logging"


def _loggers() -> dict[str, Any]:
    known = logging.root.manager.loggerDict
    found = {name: known.get(name) if name else logging.root for name in LOGGERS}
    return {
        name or "root": (
            one.level,
            one.disabled,
            one.propagate,
            [handler for handler in one.handlers if not _is_of_pytest(handler)],
            one.filters.copy(),
        )
        for name, one in found.items()
        if isinstance(one, logging.Logger)
    }


def _set_loggers(state: dict[str, Any]) -> None:
    for name, values in state.items():
        one = logging.getLogger("" if name == "root" else name)
        one.setLevel(values[0])
        one.disabled, one.propagate, handlers, one.filters[:] = values[1:]
        one.handlers[:] = [*handlers, *filter(_is_of_pytest, one.handlers)]


def _attributes() -> dict[str, Any]:
    found = {}
    for owner in OWNERS:
        module, _, name = owner.partition(":")
        where: Any = sys.modules.get(module)
        if where is not None and not getattr(where.__spec__, "_initializing", False):
            found[owner] = vars(getattr(where, name) if name else where).copy()
    return found


def _set_attributes(state: dict[str, Any]) -> None:
    for owner, before in state.items():
        module, _, name = owner.partition(":")
        where = getattr(sys.modules[module], name) if name else sys.modules[module]
        for attribute in _changed(before, vars(where)):
            if attribute in before:
                setattr(where, attribute, before[attribute])
            else:
                delattr(where, attribute)


def _changed(before: dict[Any, Any], after: dict[Any, Any]) -> list[Any]:
    missing = object()
    return [
        name
        for name in {**before, **after}
        if before.get(name, missing) is not (value := after.get(name, missing))
        and (callable(value) or callable(before.get(name)))
        # PyTorch's C++ adds functions to `torch.cuda` when it finds a device.
        and not (name not in before and (name.startswith("__") or isinstance(value, types.BuiltinFunctionType)))
        and not _is_of_library(value)
    ]


def _torch() -> dict[str, Any]:
    torch: Any = sys.modules["torch"]
    hooks: Any = vars(sys.modules["torch.nn.modules.module"])
    optimizers: Any = vars(sys.modules["torch.optim.optimizer"])
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "precision": torch.get_float32_matmul_precision(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "process group": bool(torch.distributed.is_available() and torch.distributed.is_initialized()),
        "hooks": {
            name: list(found.values())
            for owner in (hooks, optimizers)
            for name, found in owner.items()
            if name.startswith("_global_") and isinstance(found, dict) and found
        },
    }


def _set_torch(state: dict[str, Any]) -> None:
    torch: Any = sys.modules["torch"]
    if torch.is_inference_mode_enabled() != state["inference mode"]:
        _kept.append(torch._C._InferenceMode(state["inference mode"]))
    if torch._C._len_torch_function_stack() > state["modes"][0]:
        torch.set_default_device(None)
    for kept, length in zip(("function", "dispatch"), state["modes"], strict=True):
        while getattr(torch._C, f"_len_torch_{kept}_stack")() > length:
            getattr(torch._C, f"_pop_torch_{kept}_stack")()
    torch.set_grad_enabled(state["grad mode"])
    torch.autograd.set_detect_anomaly(state["anomaly mode"])
    torch.set_default_dtype(state["default dtype"])
    torch.set_num_threads(state["threads"])
    torch.set_deterministic_debug_mode(state["deterministic"])
    torch.set_float32_matmul_precision(state["precision"])
    torch.set_autocast_enabled("cpu", state["autocast"])
    if torch.distributed.is_available() and torch.distributed.is_initialized() and not state["process group"]:
        torch.distributed.destroy_process_group()
    for module in ("torch.nn.modules.module", "torch.optim.optimizer"):
        for name, found in vars(sys.modules[module]).items():
            if name.startswith("_global_") and isinstance(found, dict):
                for key in [key for key, hook in found.items() if hook not in state["hooks"].get(name, ())]:
                    del found[key]


def _tensorflow() -> dict[str, Any]:
    config: Any = sys.modules["tensorflow"].config  # type: ignore[attr-defined]
    return {
        "functions run eagerly": config.functions_run_eagerly(),
        "jit": config.optimizer.get_jit(),
        "soft placement": config.get_soft_device_placement(),
    }


def _set_tensorflow(state: dict[str, Any]) -> None:
    config: Any = sys.modules["tensorflow"].config  # type: ignore[attr-defined]
    config.run_functions_eagerly(state["functions run eagerly"])
    config.optimizer.set_jit(state["jit"])
    config.set_soft_device_placement(state["soft placement"])


def _keras() -> dict[str, Any]:
    keras: Any = sys.modules["keras"]
    kept: Any = sys.modules["keras.src.backend.common.global_state"]
    # A layer makes the default policy when it is first asked for.
    policy = kept.get_global_attribute("dtype_policy")
    return {
        "float type": keras.config.floatx(),
        "policy": keras.config.floatx() if policy is None else policy.name,
        "epsilon": keras.config.epsilon(),
        "image format": keras.config.image_data_format(),
        "distribution": kept.get_global_attribute("distribution"),
        "interactive logging": keras.config.is_interactive_logging_enabled(),
        "traceback filtering": keras.config.is_traceback_filtering_enabled(),
    }


def _set_keras(state: dict[str, Any]) -> None:
    config: Any = sys.modules["keras"].config  # type: ignore[attr-defined]
    config.set_floatx(state["float type"])
    config.set_dtype_policy(state["policy"])
    config.set_epsilon(state["epsilon"])
    config.set_image_data_format(state["image format"])
    sys.modules["keras"].distribution.set_distribution(state["distribution"])  # type: ignore[attr-defined]
    (config.enable_interactive_logging if state["interactive logging"] else config.disable_interactive_logging)()
    (config.enable_traceback_filtering if state["traceback filtering"] else config.disable_traceback_filtering)()


def _jax() -> dict[str, Any]:
    config: Any = sys.modules["jax"].config  # type: ignore[attr-defined]
    listeners: Any = sys.modules["jax._src.monitoring"]
    return {
        "64 bits": config.jax_enable_x64,
        "jit disabled": config.jax_disable_jit,
        "events": list(listeners.get_event_listeners()),
        "durations": list(listeners.get_event_duration_listeners()),
    }


def _set_jax(state: dict[str, Any]) -> None:
    config: Any = sys.modules["jax"].config  # type: ignore[attr-defined]
    listeners: Any = sys.modules["jax._src.monitoring"]
    config.update("jax_enable_x64", state["64 bits"])
    config.update("jax_disable_jit", state["jit disabled"])
    listeners._event_listeners[:] = state["events"]
    listeners._event_duration_secs_listeners[:] = state["durations"]


STATES = {
    "threads": State(_threads, lambda state: _said.update(_threads() - state)),
    "the collector": State(_collector, _set_collector),
    "tracemalloc": State(tracemalloc.is_tracing, lambda traced: None if traced else tracemalloc.stop()),
    "signal handlers": State(_signals, _set_signals),
    "the environment": State(_environment, _set_environment),
    "the working folder": State(os.getcwd, os.chdir),
    "sys.path": State(
        lambda: [one for one in sys.path if not one.endswith("setuptools/_vendor")],
        lambda state: sys.path.__setitem__(slice(None), state),
    ),
    "sys.meta_path": State(
        _finders, lambda state: [sys.meta_path.remove(one) for one in _finders() if one not in state]
    ),
    "tracing": State(_tracing, _set_tracing),
    "sys.excepthook": State(
        lambda: sys.__excepthook__ if _is_of_library(sys.excepthook) else sys.excepthook,
        lambda state: setattr(sys, "excepthook", state),
    ),
    "the switch interval": State(sys.getswitchinterval, sys.setswitchinterval),
    "the recursion limit": State(sys.getrecursionlimit, sys.setrecursionlimit),
    "loggers": State(_loggers, _set_loggers),
    "attributes": State(_attributes, _set_attributes),
    "PyTorch": State(_torch, _set_torch, "torch"),
    "TensorFlow": State(_tensorflow, _set_tensorflow, "tensorflow"),
    "Keras": State(_keras, _set_keras, "keras"),
    "JAX": State(_jax, _set_jax, "jax"),
}


def _is_imported(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def read() -> dict[str, Any]:
    """What stands now of each state that can be read."""
    return {name: state.read() for name, state in STATES.items() if _is_imported(state.module)}


def left(before: dict[str, Any]) -> list[str]:
    """The changes since, each as a line of text; put back as it was."""
    if _threads() - before["threads"]:
        gc.collect()  # An executor's end with it, and one that was not shut down may lie in a circle.
    for thread in _threads() - before["threads"]:
        thread.join(GRACE_S)  # It may be ending.
    said = []
    for name, was in before.items():
        now = STATES[name].read()
        if name == "threads":
            now |= was  # One of an earlier test may end meanwhile.
        if name == "the collector":
            now["frozen"] = max(now["frozen"], was["frozen"])  # A test may unfreeze objects of an earlier one.
        if now == was:
            continue
        differences = _differences(name, was, now)
        if differences:
            said += differences
            STATES[name].put_back(was)
    return said


def _differences(name: str, was: Any, now: Any) -> list[str]:
    if name == "attributes":
        return [
            f"{owner}.{one}: {was[owner].get(one)!r} -> {now[owner].get(one)!r}"
            for owner in was
            for one in _changed(was[owner], now[owner])
        ]
    if name == "threads":
        return [f"the thread {thread.name!r}" for thread in now - was]
    if isinstance(was, dict):
        named = [one for one in {**was, **now} if was.get(one) != now.get(one)]
        if name == "loggers":  # One that was made meanwhile had no state.
            named = [one for one in named if one in was]
        return [f"{name}, {one}: {was.get(one)!r} -> {now.get(one)!r}" for one in named]
    if isinstance(was, list):
        gone, new = [one for one in was if one not in now], [one for one in now if one not in was]
        return [f"{name}: {gone or was!r} -> {new or now!r}"]
    return [f"{name}: {was!r} -> {now!r}"]


def _guarded(whose: str) -> Generator[None, None, None]:
    before = read()
    yield
    found = left(before)
    assert not found, "\n".join([f"{whose} left this behind, as it was -> as it is:", *found])


@pytest.fixture(autouse=True, scope="module")
def _file_leaves_nothing_behind() -> Generator[None, None, None]:
    yield from _guarded("the fixtures of this file")


@pytest.fixture(autouse=True)
def _leave_nothing_behind(_file_leaves_nothing_behind: None) -> Generator[None, None, None]:
    yield from _guarded("the test")
