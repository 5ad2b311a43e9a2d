"""Whether there are GPU times to be had through CuPy, and if not, why not and what helps."""

from __future__ import annotations

from typing import Any

from deep500_timing.adapters import missing_package

NO_DRIVER_OR_TOO_OLD = 35  # cudaErrorInsufficientDriver: the runtime says it of an absent driver as well.
NO_DEVICE = 100  # cudaErrorNoDevice


def why_no_gpu_times() -> str | None:
    """Look for CuPy, a driver that is new enough, and a GPU.

    Returns:
        None if all are there; else what is missing and the remedy, as one or two sentences.

    Raises:
        ImportError: CuPy is installed and broken.
    """
    try:
        import cupy
    except ImportError as error:
        if error.name != "cupy":
            raise
        return f"{missing_package('cupy', extra='cupy', caller='Timing a GPU')}."
    runtime: Any = cupy.cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
    except Exception as error:
        return _reason(error, runtime)
    if count == 0:
        return _no_device()
    return None


def _reason(error: Exception, runtime: Any) -> str:
    status = getattr(error, "status", None)
    if status == NO_DEVICE:
        return _no_device()
    if status == NO_DRIVER_OR_TOO_OLD:
        try:
            driver = int(runtime.driverGetVersion())
        except Exception:
            driver = 0
        if driver == 0:
            return (
                "CuPy is installed and there is no NVIDIA driver on this machine. "
                "Install the driver if the machine has a GPU; in a container, start it with the GPU passed through."
            )
        needed = _version(int(runtime.runtimeGetVersion()))
        return (
            f"The NVIDIA driver is too old: it serves CUDA {_version(driver)} and the installed CuPy needs {needed}. "
            f"Update the driver, or install the CuPy of the driver's CUDA, such as cupy-cuda{driver // 1000}x."
        )
    return f"CUDA does not start: {error}. See whether nvidia-smi lists the GPU."


def _no_device() -> str:
    return (
        "CuPy and the NVIDIA driver are there and no GPU is visible. "
        "See nvidia-smi, and whether CUDA_VISIBLE_DEVICES hides it."
    )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
