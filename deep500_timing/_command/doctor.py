"""``deep500-timing doctor`` and ``bench``: what this machine has, and what timing costs on it."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
import timeit
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from deep500_timing._command._app import click
from deep500_timing._command._output import busy, print_json
from deep500_timing._summary.text import fit_encoding, format_time, lines_of, safe_name

_DISTRIBUTION = "deep500-timing"
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+).*?;.*extra == ['\"]([^'\"]+)['\"]")
_ENVIRONMENT = "DEEP500_TIMING_"
_PARTS = "deep500_timing.doctor"
"""Entry points, by the package that each needs: a function that names a part of an adapter and says if it is there."""
_ROUNDS = 7
_CALLS = 2_000


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
def doctor(as_json: bool) -> None:
    """List installed packages, clocks and devices, and the commands that install the rest.

    Looks for devices, so it may take seconds where a framework is installed. Changes nothing.
    """
    with busy("Looking for devices"):
        found = examine()
    if as_json:
        print_json(found)
        return
    for line in _lines(found):
        click.echo(line)


def examine() -> dict[str, Any]:
    from deep500_timing import exporters
    from deep500_timing._base.plugins import loadable, names
    from deep500_timing._distributed.launchers import discover_launch
    from deep500_timing._recording.recorder import COMPILED
    from deep500_timing.devices import clocks

    launch = discover_launch()
    usable = set(exporters.available())
    return {
        "versions": {
            _DISTRIBUTION: _version(_DISTRIBUTION),
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "compiled": bool(COMPILED),
        "clock": _clock(),
        "devices": {"known": list(clocks.all()), "usable": list(clocks.available())},
        "exporters": [{"name": name, "usable": name in usable, "does": _does(name)} for name in exporters.all()],
        "parts": dict(state() for _, state in loadable(_PARTS, {*filter(find_spec, names(_PARTS))})),
        "extras": _extras(),
        "launcher": {"name": launch.launcher, "rank": launch.rank, "world_size": launch.world_size},
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_ENVIRONMENT)},
    }


def _clock() -> dict[str, Any]:
    info = time.get_clock_info("perf_counter")
    steps = []
    for _ in range(200):
        first = now = time.perf_counter_ns()
        while now == first:
            now = time.perf_counter_ns()
        steps.append(now - first)
    return {
        "name": "perf_counter_ns",
        "implementation": info.implementation,
        "resolution_ns": info.resolution * 1e9,
        "smallest_step_ns": min(steps),
        "is_monotonic": info.monotonic,
    }


def _does(name: str) -> str:
    from deep500_timing import exporters

    try:
        text = exporters.get(name).__doc__ or ""
    except Exception as error:  # A third-party plug-in may raise anything.
        return f"cannot be imported: {type(error).__name__}: {error}"
    return " ".join(text.partition("\n\n")[0].split())


def _extras() -> dict[str, dict[str, str | None]]:
    extras: dict[str, dict[str, str | None]] = {}
    try:
        required = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        required = []
    for requirement in required:
        match = _REQUIREMENT.match(requirement)
        if match is not None:
            package, extra = match.groups()
            extras.setdefault(extra, {})[package] = _version(package) or _version_of_other(package)
    return extras


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _version_of_other(package: str) -> str | None:
    # tensorflow-cpu and tensorflow-rocm provide the package `tensorflow`.
    for other in metadata.packages_distributions().get(package.replace("-", "_"), []):
        version = _version(other)
        if version is not None:
            return f"{version} ({other})"
    return None


def _lines(found: dict[str, Any]) -> list[str]:
    from deep500_timing._base.require import remedy

    versions, clock = found["versions"], found["clock"]
    compiled = "compiled" if found["compiled"] else "plain Python: a C compiler makes it six times as fast"
    lines = [
        f"{_DISTRIBUTION} {versions[_DISTRIBUTION] or 'not installed'}, Python {versions['python']}",
        f"{versions['platform']}",
        "",
    ]
    usable = found["devices"]["usable"]
    known = ", ".join(name for name in found["devices"]["known"] if name not in usable)
    here = ", ".join(usable) or "none: gpu=True gives CPU times"
    launcher = found["launcher"]
    rows = [
        ("hot path", compiled),
        (
            "host clock",
            f"{clock['name']} ({clock['implementation']}), steps of {format_time(clock['smallest_step_ns'] / 1e9)}",
        ),
        ("devices", here + (f"; no device for: {known}" if known else "")),
        (
            "process",
            "a single process"
            if launcher["name"] == "none"
            else f"rank {launcher['rank']} of {launcher['world_size']}, by {launcher['name']}",
        ),
    ]
    rows += [*found["parts"].items(), *found["environment"].items()]
    lines += lines_of(rows)
    lines += ["", "reports"]
    lines += [
        f"  {line}"
        for line in lines_of(
            [(item["name"], "ready" if item["usable"] else "not ready", item["does"]) for item in found["exporters"]],
            left=3,
        )
    ]
    lines += ["", "extras"]
    rows = []
    for extra, packages in sorted(found["extras"].items()):
        missing = [name for name, version in packages.items() if version is None]
        there = ", ".join(f"{name} {version}" for name, version in packages.items() if version is not None)
        rows.append((extra, f"missing: {', '.join(missing)}: {remedy(extra)}" if missing else there))
    lines += [f"  {line}" for line in lines_of(rows)] if rows else ["  unknown: the package is not installed"]
    encoding = getattr(sys.stdout, "encoding", None)
    return [fit_encoding(safe_name(line), encoding) for line in lines]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
def bench(as_json: bool) -> None:
    """Measure the cost of timing an empty region, compared with two reads of the clock.

    Takes about a second. Each figure is the minimum of several rounds, since other processes use the machine too.
    """
    from deep500_timing._recording.recorder import COMPILED

    costs = _costs_ns()
    if as_json:
        print_json({"compiled": COMPILED, "ns": costs})
        return
    base = costs["two clock reads"]
    rows = [("what", "cost", "clock pairs")]
    rows += [(name, f"{cost:.0f} ns", f"{cost / base:.2f} ×") for name, cost in costs.items()]
    form = "compiled" if COMPILED else "plain Python"
    click.echo(f"The hot path is {form}.\n")
    for line in lines_of(rows, left=1):
        click.echo(line)


def _costs_ns() -> dict[str, float]:
    from deep500_timing.timer import Timer

    # Bounded, so that the memory of the measurement itself does not grow.
    kept, bounded, off = Timer(), Timer(keep_last=1000), Timer(enabled=False)
    pair = 'start("region"); end("region")'
    measured = {
        "two clock reads": ("now(); now()", {"now": time.perf_counter_ns}),
        "start and end": (pair, {"start": kept.start, "end": kept.end}),
        "with, the region kept": ("with region: pass", {"region": kept.region("with")}),
        "start and end, keep_last=1000": (pair, {"start": bounded.start, "end": bounded.end}),
        "start and end, gpu=True without a device": (
            'start("region", gpu=True); end("region", gpu=True)',
            {"start": kept.start, "end": kept.end},
        ),
        "start and end, enabled=False": (pair, {"start": off.start, "end": off.end}),
    }
    # Other processes make a round longer, never shorter.
    return {
        name: 1e9 * min(timeit.repeat(code, repeat=_ROUNDS, number=_CALLS, globals=names)) / _CALLS
        for name, (code, names) in measured.items()
    }
