"""``python -m benchmarks``: measure, and write the report, the picture and the numbers."""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import _machine, _pairs, _whole
from benchmarks._contenders import CLOCK, Field, assemble, load_torch_device
from benchmarks._plainform import load_plain
from benchmarks._reach import FORMS, GOALS
from benchmarks._summary import Spread, ratio

HERE = Path(__file__).parent
_ALL = "warm cold reads bytes tail device imports statistics memory pytorch keras comm pipeline layers"
SECTIONS = tuple(_ALL.split())  # in the order in which they are measured


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    warm_rounds: int
    cold_rounds: int
    cold_pairs: int
    read_rounds: int
    byte_pairs: int
    tail_pairs: int
    import_rounds: int
    heavy_import_rounds: int
    statistics_of: int
    statistics_rounds: int
    long_run: int
    long_run_plain: int
    pytorch_steps: int
    pytorch_rounds: int
    process_rounds: int
    keras_steps: int
    keras_rounds: int


EFFORTS = {
    "full": Effort(
        400, 15, 9, 30, 100_000, 1_000_000, 40, 3, 1_000_000, 7, 100_000_000, 20_000_000, 40, 600, 7, 200, 50
    ),
    "quick": Effort(40, 3, 5, 5, 10_000, 100_000, 8, 1, 1_000_000, 2, 10_000_000, 1_000_000, 40, 40, 1, 50, 10),
    "smoke": Effort(2, 1, 2, 1, 1_000, 1_000, 1, 1, 5_000, 1, 100_000, 100_000, 3, 2, 0, 3, 2),
}


class Bench:
    """One run: the results so far, and a bar that shows how far it is."""

    def __init__(self, effort: str, sections: Iterable[str], only: str, console: Console) -> None:
        """Import the contenders.

        Raises:
            click.ClickException: No contender is left to measure.
        """
        self.effort = EFFORTS[effort]
        self.sections = set(sections)
        self.console = console
        self.machine = _machine.describe()
        pattern = re.compile(only)
        # A peer must be there, and importing the frameworks takes ten seconds.
        self.field = assemble(
            wanted=lambda label: label == CLOCK or pattern.search(label) is not None,
            frameworks=not only or any(pattern.search(name) for name in _OF_FRAMEWORKS),
        )
        # The frameworks' objects stay; without this, each collection would go through all of it.
        gc.collect()
        gc.freeze()
        self.results: dict[str, Any] = {
            "effort": effort,
            "machine": self.machine,
            "versions": self.field.versions,
            "missing": self.field.missing,
            "rounds": {
                "warm": self.effort.warm_rounds,
                "cold": self.effort.cold_rounds,
                "cold_pairs": self.effort.cold_pairs,
            },
            "contenders": {
                contender.label: {
                    "group": contender.group,
                    "name": contender.name,
                    "statement": contender.statement if contender.over == "range(n)" else f"for _ in {contender.over}",
                    "chart": contender.chart,
                }
                for contender in self.field.contenders
            },
            "peer_ratios": {},
        }

    def run(self) -> dict[str, Any]:
        """Measure every section, each a line with a bar; one that fails is named as missing."""
        columns = (TextColumn("{task.description:<42}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        # Drawn again by each step, not by its own thread, which would take the processor from the measured code.
        with Progress(*columns, TimeElapsedColumn(), console=self.console, auto_refresh=False) as progress:
            for section in SECTIONS:
                if section not in self.sections:
                    continue
                title, steps = self._plan(section)
                bar = progress.add_task(title, total=steps)

                def step(bar: Any = bar) -> None:
                    progress.advance(bar)
                    progress.refresh()

                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        getattr(self, f"_{section}")(self.field, step)
                except Exception as error:
                    self.results["missing"][title] = f"{type(error).__name__}: {error}".splitlines()[0]
                progress.update(bar, completed=steps)
        gc.unfreeze()
        self.machine["load after"] = _machine.load()
        return self.results

    def _plan(self, section: str) -> tuple[str, int]:
        effort, contenders = self.effort, len(self.field.contenders)
        return {
            "warm": ("A pair, warm", effort.warm_rounds),
            "cold": ("A pair, cold", effort.cold_rounds),
            "reads": ("What an empty region reads", effort.read_rounds),
            "bytes": ("Bytes kept", contenders),
            "tail": ("The slowest pairs", 20),
            "device": ("Calls to the device", 2),
            "imports": ("Importing", effort.import_rounds + 1),
            "statistics": ("Statistics", effort.statistics_rounds),
            "memory": ("Memory of a run without end", 198),
            "pytorch": ("PyTorch loop", effort.pytorch_rounds + effort.process_rounds),
            "keras": ("Keras fit", 4 * effort.keras_rounds),
            "comm": ("Communication", 1),
            "pipeline": ("Pipelines", 1),
            "layers": ("Layers", 1),
        }[section]

    def _put(self, kind: str, values: dict[str, Any]) -> None:
        for label, value in values.items():
            self.results["contenders"][label][kind] = value.as_json() if isinstance(value, Spread) else value

    # --- one method per section ---------------------------------------------------------------------------------------

    def _warm(self, field: Field, step: Callable[[], None]) -> None:
        rounds = _pairs.warm(field.contenders, self.effort.warm_rounds, step)
        self._put("warm_ns", {label: Spread.of(values) for label, values in rounds.ns.items()})
        self._put("warm_ratio", {label: ratio(values, rounds.clock_ns[label]) for label, values in rounds.ns.items()})
        ours = [
            c for c in field.contenders if c.group in ("compiled", "plain") and c.name in ("start/end", "with region")
        ]
        for peer in field.contenders:
            if peer.group in ("limit", "peer") and ours:
                self.results["peer_ratios"][peer.label] = {
                    own.label: ratio(rounds.ns[peer.label], rounds.ns[own.label]).as_json() for own in ours
                }

    def _cold(self, field: Field, step: Callable[[], None]) -> None:
        rounds, how = _pairs.cold(field.contenders, self.effort.cold_rounds, self.effort.cold_pairs, step)
        self.results["cold_how"] = how
        self._put("cold_ns", {label: Spread.of(values) for label, values in rounds.ns.items()})
        self._put("cold_ratio", {label: ratio(values, rounds.ns[CLOCK]) for label, values in rounds.ns.items()})

    def _reads(self, field: Field, step: Callable[[], None]) -> None:
        self._put("reads_ns", _pairs.readings(field.contenders, self.effort.read_rounds, step))

    def _bytes(self, field: Field, step: Callable[[], None]) -> None:
        self._put("bytes_kept", _pairs.bytes_kept(field.contenders, self.effort.byte_pairs, step))
        self.results["block_sizes"] = {
            form: _pairs.block_sizes(package.Timer(), package.TimeType.BATCH) for form, package in self._forms().items()
        }

    def _tail(self, field: Field, step: Callable[[], None]) -> None:
        self._put("tail_ns", _pairs.tail(field.contenders, self.effort.tail_pairs, step))

    def _device(self, field: Field, step: Callable[[], None]) -> None:
        device = load_torch_device()
        self.results["device_calls"] = {}
        for form, load in (("compiled", importlib.import_module), ("plain", load_plain)):
            package = load("deep500_timing_torch")
            self.results["device_calls"][form] = _pairs.device_calls(package, device)
            step()

    def _imports(self, field: Field, step: Callable[[], None]) -> None:
        rounds = (self.effort.import_rounds, self.effort.heavy_import_rounds)
        self.results["imports"] = _whole.import_times(*rounds, step)

    def _statistics(self, field: Field, step: Callable[[], None]) -> None:
        count, rounds = self.effort.statistics_of, self.effort.statistics_rounds
        self.results["statistics"] = _whole.statistics_of(self._forms(), count, rounds, step)

    def _memory(self, field: Field, step: Callable[[], None]) -> None:
        regions = {"compiled": self.effort.long_run, "plain": self.effort.long_run_plain}
        self.results["memory"] = {
            form: _whole.memory_of_long_run(package, regions[form], step) for form, package in self._forms().items()
        }

    def _pytorch(self, field: Field, step: Callable[[], None]) -> None:
        from benchmarks._neighbour import in_processes
        from benchmarks._training import pytorch_loop

        steps, rounds = self.effort.pytorch_steps, self.effort.pytorch_rounds
        self.results["pytorch"] = pytorch_loop(self._forms(), steps, rounds, step) | {"measured": _machine.now()}
        if self.effort.process_rounds:
            found = in_processes(3000, self.effort.process_rounds, step)
            self.results["processes"] = found
            self.results["missing"].update(found["missing"])

    def _keras(self, field: Field, step: Callable[[], None]) -> None:
        from benchmarks._keras_fits import keras_fits

        found = keras_fits(self.effort.keras_steps, self.effort.keras_rounds, step)
        self.results["keras"] = found | {"measured": _machine.now()}

    def _comm(self, field: Field, step: Callable[[], None]) -> None:
        # Needs its own ranks, so it brings its measurement and its lines for the report.
        comm = importlib.import_module("benchmarks.bench_comm")
        self.results["comm"] = comm.report_lines(quick=self.results["effort"] != "full")

    def _pipeline(self, field: Field, step: Callable[[], None]) -> None:
        pipeline = importlib.import_module("benchmarks.bench_pipeline")
        self.results["pipeline"] = pipeline.report_lines(quick=self.results["effort"] != "full")

    def _layers(self, field: Field, step: Callable[[], None]) -> None:
        # PyTorch's profiler leaves a process slower than it was.
        layers = importlib.import_module("benchmarks.bench_layers")
        self.results["layers"] = layers.report_lines(quick=self.results["effort"] != "full")

    def _forms(self) -> dict[str, ModuleType]:
        forms = {"plain": load_plain()}
        package = importlib.import_module("deep500_timing")
        return {"compiled": package, **forms} if package.compiled else forms


_OF_FRAMEWORKS = (
    "gpu=True on the torch test device",
    "torch.Event",
    "DeepSpeed",
    "torchtnt",
    "Lightning",
    "torch.profiler.record_function",
)


def summary(results: dict[str, Any]) -> str:
    """One line for the terminal: how many goals are reached."""
    reached = measured = 0
    for goal in GOALS:
        for form, target in zip(FORMS, goal.targets, strict=True):
            found = goal.measure(results, form)
            if found is not None:
                measured += 1
                reached += goal.reached(found[0], target)
    return f"{reached} of {measured} measured goals reached"


def _write(results: dict[str, Any], folder: Path) -> list[Path]:
    from benchmarks._report import report

    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "RESULTS.md", folder / "results.json"]
    try:
        from benchmarks._picture import draw

        draw(results, folder / "results.png")
        written.append(folder / "results.png")
    except Exception as error:
        results["missing"]["the picture"] = f"{type(error).__name__}: {error}".splitlines()[0]
    written[1].write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    written[0].write_text(report(results), encoding="utf-8")
    return written


@click.command()
@click.option("--quick", is_flag=True, help="The same in less than two minutes; short for --effort quick.")
@click.option("--effort", type=click.Choice(list(EFFORTS)), default="full", help="How long to measure.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for RESULTS.md, results.png and results.json. Without it the full run writes beside this file, the "
    "others into a new temporary folder.",
)
@click.option("--only", default="", help="Measure contenders whose label matches this regular expression.")
@click.option(
    "--section", "sections", type=click.Choice(SECTIONS), multiple=True, help="Measure this section; repeatable."
)
def main(quick: bool, effort: str, output: Path | None, only: str, sections: tuple[str, ...]) -> None:
    """Measure what timing costs, next to the alternatives, and write the report."""
    console = Console()
    if quick:
        effort = "quick"
    if output is None:
        partial = effort != "full" or bool(only) or bool(sections)
        output = Path(tempfile.mkdtemp(prefix="deep500-timing-bench-")) if partial else HERE
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    console.print(f"Load of the machine: {_machine.load()}. Whatever else runs on it shows in the spread.")
    with console.status("Importing the contenders"):
        bench = Bench(effort, sections or SECTIONS, only, console)
    results = bench.run()
    for path in _write(results, output):
        console.print(f"wrote {path}", soft_wrap=True)
    for name, why in sorted(results["missing"].items()):
        console.print(f"[yellow]not measured[/]: {name}: {why}", soft_wrap=True)
    console.print(summary(results))


if __name__ == "__main__":
    sys.exit(main())
