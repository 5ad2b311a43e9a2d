"""``deep500-timing doctor``: what this machine has."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from _thread import get_ident
from importlib.util import find_spec
from typing import Any

import click

from deep500_timing._command._output import as_json_option, busy, print_json
from deep500_timing._summary.text import GAP, fit_encoding, pad, safe_name, wrap

_DISTRIBUTION = "deep500-timing"
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+).*?;.*extra == ['\"]([^'\"]+)['\"]")
_ENVIRONMENT = "DEEP500_TIMING_"
_LEFT = 14
"""The columns of names; a longer name, as of a variable, moves its text."""
_GIVES = {
    "comet": "reports to Comet",
    "comm": "measured starts of collectives on each rank",
    "compare": "`ab`, `compare` and `history`",
    "cupy": "GPU times beside TensorFlow",
    "deepspeed": "DeepSpeed's timers, logger and engine",
    "jax": "times of JAX programs",
    "memory": "memory of the process",
    "mlflow": "reports to MLflow",
    "opentelemetry": "reports by OTLP",
    "prometheus": "an endpoint for Prometheus",
    "report": "`show`, `report` and `ab` in full",
    "runs": "reading runs",
    "spark": "runs as Spark tables",
    "system": "use and power of NVIDIA GPUs in a run",
    "tensorboard": "reports to TensorBoard",
    "tensorflow": "times of Keras and TensorFlow programs",
    "torch": "times of PyTorch programs",
    "trackio": "reports to Trackio",
    "wandb": "reports to W&B",
}
_PARTS = "deep500_timing.doctor"
"""Entry points, by the package that each needs: a function that names a part of an adapter and says if it is there."""
_OFF = {"with the GIL": f": a line may get up to {1e3 * sys.getswitchinterval():.0f} ms of what ran before it"}


@click.command()
@as_json_option
def doctor(as_json: bool) -> None:
    """List installed and missing packages.

    Lists clocks and devices too, and the commands that install what is missing. Looks for devices, so it may take
    seconds where a framework is installed. Changes nothing.
    """
    with busy("Looking for devices"):
        found = examine()
    if as_json:
        print_json(found)
        return
    encoding = getattr(sys.stdout, "encoding", None)
    for line in _lines(found):
        click.echo(fit_encoding(safe_name(line), encoding))


def examine() -> dict[str, Any]:
    from deep500_timing import exporters
    from deep500_timing._base.plugins import loadable, names
    from deep500_timing._base.stack import StackWatch
    from deep500_timing._distributed.launchers import discover_launch
    from deep500_timing._recording.recorder import COMPILED
    from deep500_timing.devices import clocks

    launch = discover_launch()
    usable = set(exporters.available())
    clock = time.get_clock_info("perf_counter")
    return {
        "versions": {
            _DISTRIBUTION: _version(_DISTRIBUTION),
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "compiled": bool(COMPILED),
        "stacks": "with the GIL" if StackWatch(1.0, get_ident()).takes_gil else "without the GIL",
        "clock": {"implementation": clock.implementation, "resolution_ns": clock.resolution * 1e9},
        "devices": {"known": list(clocks.all()), "usable": list(clocks.available())},
        "exporters": [{"name": name, "usable": name in usable} for name in exporters.all()],
        "parts": dict(state() for _, state in loadable(_PARTS, {*filter(find_spec, names(_PARTS))})),
        "extras": _extras(),
        "launcher": {"name": launch.launcher, "rank": launch.rank, "world_size": launch.world_size},
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_ENVIRONMENT)},
    }


def _extras() -> dict[str, dict[str, str | None]]:
    """The packages of each extra with their versions; None for one that is missing."""
    from importlib import metadata  # Every command imports this module.

    extras: dict[str, dict[str, str | None]] = {}
    required = [] if _version(_DISTRIBUTION) is None else metadata.requires(_DISTRIBUTION) or []
    for match in filter(None, map(_REQUIREMENT.match, required)):
        package, extra = match.groups()
        version = _version(package)
        # tensorflow-cpu and tensorflow-rocm provide the package `tensorflow`.
        others = [] if version else metadata.packages_distributions().get(package.replace("-", "_"), [])
        found = version or next((f"{_version(other)} ({other})" for other in others), None)
        extras.setdefault(extra, {})[package] = found
    return extras


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _lines(found: dict[str, Any]) -> list[str]:
    from deep500_timing._base.require import remedy

    versions, clock, devices, launcher = (found[name] for name in ("versions", "clock", "devices", "launcher"))
    unusable = ", ".join(name for name in devices["known"] if name not in devices["usable"])
    usable = ", ".join(devices["usable"]) or "none: gpu=True gives CPU times"
    process = "a single process"
    if launcher["name"] != "none":
        process = f"rank {launcher['rank']} of {launcher['world_size']}, by {launcher['name']}"
    packages = {name: version for extra in found["extras"].values() for name, version in extra.items()}
    there = [f"{name} {version}" for name, version in sorted(packages.items()) if version]
    here = [
        ("hot path", "compiled" if found["compiled"] else "plain Python: a C compiler makes it ten times as fast"),
        ("stacks", f"read {found['stacks']}" + _OFF.get(found["stacks"], "")),
        ("host clock", f"perf_counter_ns ({clock['implementation']}), resolution {clock['resolution_ns']:.3g} ns"),
        ("devices", usable + (f"; none found by {unusable}" if unusable else "")),
        ("process", process),
        *found["parts"].items(),
        *found["environment"].items(),
        ("packages", ", ".join(there) or "none that an adapter or an exporter requires"),
        ("exporters", ", ".join(item["name"] for item in found["exporters"] if item["usable"])),
    ]
    missing = [
        (extra, f"{_GIVES.get(extra, 'its adapter')}: {remedy(extra)}")
        for extra, needed in sorted(found["extras"].items())
        if None in needed.values()
    ]
    return [
        f"{_DISTRIBUTION} {versions[_DISTRIBUTION] or 'not installed'}, Python {versions['python']}",
        versions["platform"],
        "",
        *_facts(here),
        *(["", "What a missing package would give:", *_facts(missing)] if missing else []),
    ]


def _facts(facts: list[tuple[str, str]]) -> list[str]:
    """A line for each fact, broken between words at 80 columns."""
    left = min(max((len(name) for name, _ in facts), default=0), _LEFT)
    lines = (f"{pad(name, left)}{GAP}{wrap(text, 80 - left - len(GAP), left + len(GAP))}" for name, text in facts)
    return [part for line in lines for part in line.split("\n")]
