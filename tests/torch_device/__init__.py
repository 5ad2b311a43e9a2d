"""A test device: real ``torch.Event``, ``torch.Stream`` and ``torch.accelerator`` against a virtual clock.

It needs no hardware. It is a backend of PyTorch (PrivateUse1, named ``testdev``, two devices) in one C++
file, built on first use into ``build/torch_device`` and found there afterwards. `load` registers it and
returns the module ``torch.testdev``, with controls that move the clock and whose counters say what the code under
test did to the device.

    dev = torch_device.load()
    start, end = torch.Event(enable_timing=True), torch.Event(enable_timing=True)
    start.record(); dev.launch(5_000_000); end.record()
    assert not end.query()              # the clock stands still until it is moved
    dev.advance(5_000_000)
    assert start.elapsed_time(end) == 5.0
    assert dev.counters().synchronizes == 0

Each stream is a queue in order: work starts at the end of the queue, or now. A recorded event bears the
time at which its stream gets there and is done once the clock has reached it. Waiting moves the clock to that
time, and counts. Tensors cannot live on the device.

In tests
    Loading is for the whole process and for good: from then on ``torch.accelerator`` names this device,
    before any CUDA device too. Therefore

    * tests that use it take the fixture below, carry the marker ``torch_device``, and assume nothing about
      order;
    * tests of a machine *without* an accelerator run their code in a subprocess (which loads nothing), or,
      when a device that is not available will do, call ``dev.set_available(False)``;
    * tests of a real GPU (marker ``gpu``) run in a their own process: ``pytest -m gpu``, not mixed with
      these.

    This folder is loaded by its path and must not be reached by putting ``tests/`` on ``sys.path``:
    ``tests/torch`` would answer to ``import torch`` where torch is not installed. A conftest needs only

        @pytest.fixture
        def dev():
            path = Path(__file__).parent / "torch_device" / "__init__.py"   # from tests/conftest.py
            if "torch_device" not in sys.modules:
                spec = importlib.util.spec_from_file_location("torch_device", path)
                sys.modules["torch_device"] = module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
            dev = sys.modules["torch_device"].load_or_skip()
            dev.reset()
            yield dev
            dev.reset()
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

from ._build import UnavailableError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["DEVICE_TYPE", "UnavailableError", "load", "load_or_skip", "reset"]

DEVICE_TYPE = "testdev"


def load() -> ModuleType:
    """Build (once), register (once) and return the device's module, which is also ``torch.testdev``.

    Raises:
        UnavailableError: Something it needs is absent here; the text says what.
        RuntimeError: The source does not compile, or this process has another PrivateUse1 backend already.
    """
    loaded: ModuleType | None = getattr(sys.modules.get("torch"), DEVICE_TYPE, None)
    if loaded is not None:  # also when this package was imported twice under different names
        return loaded
    if importlib.util.find_spec("torch") is None:
        raise UnavailableError("the test device needs torch; pip install 'deep500-timing[torch]'")

    import torch

    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", DEVICE_TYPE):
        raise RuntimeError(f"loaded the test device beside {name!r}; torch has room for one backend in a process")
    # Its import brings the extension, which registers itself with torch's C++ side.
    module = importlib.import_module(f"{__name__}.testdev")
    torch.utils.rename_privateuse1_backend(DEVICE_TYPE)
    torch._register_device_module(DEVICE_TYPE, module)
    return module


def load_or_skip() -> ModuleType:
    """Like `load`, for tests: where the device cannot exist, skip and give the reason."""
    import pytest

    try:
        return load()
    except UnavailableError as error:
        pytest.skip(str(error))


def reset() -> None:
    """Bring the loaded device back to the state after loading; see ``testdev.reset``."""
    load().reset()
