"""Build the stand-ins for CUDA's libraries: ``build_fakes.py FOLDER``, with the Python that has CUDA's headers."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# Driver functions that answer something; every other one of `cuda.h` succeeds and does nothing.
ANSWERS = """
#include <string.h>
int fake_contexts(void) __attribute__((weak));
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0; *active = fake_contexts ? (fake_contexts() >> device) & 1 : 1; return 0; }
int cuCtxGetCurrent(void** context) { *context = (void*)8; return 0; }
int cuGetErrorString(int error, const char** text) { *text = "fake"; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDeviceGet(int* device, int index) { *device = index; return 0; }
"""


def main(out: Path) -> None:
    """Build the runtime, NCCL and cuBLAS as one library to preload, and the driver's library."""
    packages = Path(sysconfig.get_path("purelib"))
    includes = [packages / "nvidia/cu13/include", packages / "triton/backends/nvidia/include"]
    out.mkdir(parents=True, exist_ok=True)
    flags = [flag for folder in includes for flag in ("-I", str(folder))]
    source = Path(__file__).with_name("fakecuda.cpp")
    compiler = shutil.which("g++") or shutil.which("c++") or sys.exit("the rehearsal needs a C++ compiler (g++)")
    subprocess.run(
        [
            compiler,
            *["-O2", "-w", "-shared", "-fPIC", "-std=c++17"],
            *flags,
            str(source),
            "-o",
            str(out / "libfakecuda.so"),
        ],
        check=True,
    )
    declared: set[str] = set()
    for folder in includes:
        declared.update(re.findall(r"CUDAAPI +(cu\w+) *\(", (folder / "cuda.h").read_text()))
    rest = sorted(declared - set(re.findall(r"^int (cu\w+)\(", ANSWERS, re.MULTILINE)))
    driver = out / "libcuda.c"
    driver.write_text(ANSWERS + "".join(f"int {name}() {{ return 0; }}\n" for name in rest))
    compiler = shutil.which("gcc") or shutil.which("cc") or sys.exit("the rehearsal needs a C compiler (gcc)")
    subprocess.run([compiler, "-shared", "-fPIC", "-w", str(driver), "-o", str(out / "libcuda.so.1")], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
