"""The noise floor of a machine: how much pairs of runs of one program differ, as ``ab --same`` has measured it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deep500_timing._base.settings import setting
from deep500_timing.compare._runs import STEP, RunTimes, log_ratios
from deep500_timing.compare._statistics import Spread, mean_and_spread

if TYPE_CHECKING:
    from collections.abc import Sequence

_MACHINE_FACTS = ("cpu", "cpus", "devices")


@dataclass(frozen=True)
class Floor:
    """The variance of the pairs of one program on one machine."""

    machine: str
    """The processor, the number of processors and the devices. A host's name may change, as in hosted CI."""
    program: str
    spreads: dict[str, Spread]
    """For the step (empty path) and each region."""

    @property
    def spread(self) -> Spread | None:
        """Of the step."""
        return self.spreads.get(STEP)

    def spread_of(self, path: str) -> Spread | None:
        """Of a region, or of the step under the empty path."""
        return self.spreads.get(path)


def machine_of(run: RunTimes) -> str:
    """The hardware that a noise floor is valid for."""
    return " | ".join(f"{fact} {run.facts.get(fact, 'none')}" for fact in _MACHINE_FACTS)


def floor_of(pairs: Sequence[tuple[RunTimes, RunTimes]]) -> Floor:
    """The noise floor of pairs of runs without a difference.

    Args:
        pairs: At least three.
    """
    first = pairs[0][0]
    paths = set(first.times).intersection(*(run.times for pair in pairs for run in pair))
    spreads = {path: mean_and_spread(log_ratios(pairs, path))[1] for path in sorted(paths)}
    return Floor(machine_of(first), first.program, spreads)


def floor_file(path: str | None = None) -> str:
    """The file of noise floors: as given, as the environment says, or in the user's folder for state."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return path or setting("noise_floor") or os.path.join(state, "deep500-timing", "noise-floor.json")


def store_floor(floor: Floor, path: str | None = None) -> str:
    """Write a floor into the file, in place of that of the same machine and program.

    Returns:
        The file's path.
    """
    from deep500_timing._base.files import whole_file

    file = floor_file(path)
    kept = [row for row in _rows(file) if (row["machine"], row["program"]) != (floor.machine, floor.program)]
    spreads = {name: [spread.variance, spread.df] for name, spread in floor.spreads.items()}
    kept.append({"machine": floor.machine, "program": floor.program, "spreads": spreads})
    os.makedirs(os.path.dirname(os.path.abspath(file)), exist_ok=True)
    with whole_file(file) as out:
        out.write(json.dumps(kept, indent=1).encode())
    return file


def find_floor(run: RunTimes, path: str | None = None) -> Floor | None:
    """The floor of the machine and the program of a run of side A; None if ``ab --same`` has measured none."""
    for row in _rows(floor_file(path)):
        if (row["machine"], row["program"]) == (machine_of(run), run.program):
            spreads = {name: Spread(float(v), int(df)) for name, (v, df) in row["spreads"].items()}
            return Floor(row["machine"], row["program"], spreads)
    return None


def _rows(file: str) -> list[dict]:  # type: ignore[type-arg]
    try:
        with open(file, encoding="utf-8") as text:
            rows = json.load(text)
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ValueError(f"{file}: the noise floors cannot be read: {error}. Delete the file.") from None
    return list(rows)
