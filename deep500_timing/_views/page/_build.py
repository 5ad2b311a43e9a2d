"""Builds every section; one that fails is left out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from deep500_timing._base import plugins
from deep500_timing._base.warn import warn_once
from deep500_timing._views.page._communication import communication
from deep500_timing._views.page._context import Context
from deep500_timing._views.page._goodput import goodput
from deep500_timing._views.page._not_measured import not_measured
from deep500_timing._views.page._over import over
from deep500_timing._views.page._ranks import ranks_over_run, stragglers
from deep500_timing._views.page._samples import samples
from deep500_timing._views.page._section import GROUP, TABLE_GROUP, Content, Section
from deep500_timing._views.page._spread import spread
from deep500_timing._views.page._typical import typical
from deep500_timing._views.page._where import where
from deep500_timing._views.page._workers import workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from deep500_timing.runs import Run


class _BuiltIn(NamedTuple):
    name: str
    title: str
    place: int
    missing: str
    build: Callable[[Context], Content | None]


_NO_STEP, _ONE_RANK = "No step was timed as BATCH.", "There is one rank."
_BUILT_IN = (
    _BuiltIn("tree", "Where a step goes", 30, "No region was timed.", where),
    _BuiltIn("goodput", "Goodput: where the wall clock of the job went", 35, "", goodput),
    _BuiltIn("over-the-run", "Over the run", 40, _NO_STEP, over),
    _BuiltIn("steps", "A typical step and the slowest", 50, _NO_STEP, typical),
    _BuiltIn("distributions", "How long each region takes", 60, "No region has 10 intervals.", spread),
    _BuiltIn("workers", "Workers of the data loader", 63, "", workers),
    _BuiltIn("stragglers", "Who is late, and why", 65, _ONE_RANK, stragglers),
    _BuiltIn("ranks", "Ranks", 70, "The ranks meet in no step.", ranks_over_run),
    _BuiltIn("memory", "Memory, throughput, devices", 80, "No memory, throughput or device was sampled.", samples),
    _BuiltIn("communication", "Communication", 90, "No collective was recorded.", communication),
    _BuiltIn("not-measured", "Missing data and environment", 110, "", not_measured),
)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*\Z")


@dataclass(frozen=True)
class Built:
    name: str
    title: str
    content: Content


def build(
    run: Run, more: Iterable[Section] = (), on_progress: Callable[[int, int], None] = lambda done, of: None
) -> tuple[Context, list[Built]]:
    """Build the sections in the order of their places."""
    context = Context(run)
    sections = sorted(_sections(run, more), key=lambda section: (section.place, section.name))
    built = []
    for done, section in enumerate(sections):
        on_progress(done, len(sections))
        try:
            content = section.build(context)
        except Exception as error:
            # A section that fails costs itself, not the page.
            said = f"{type(error).__name__}: {error}"
            warn_once(f"The section {section.name!r} of the report failed: {said}. It is left out.")
            context.missing.append((section.title, f"It failed: {said}"))
            continue
        if content is None:
            context.missing += [(section.title, section.missing)] if section.missing else []
        else:
            built.append(Built(section.name, section.title, content))
    on_progress(len(sections), len(sections))
    return context, built


def _sections(run: Run, more: Iterable[Section]) -> list[Section]:
    found: dict[str, Any] = {section.name: section for section in _BUILT_IN}
    registered = [*plugins.loadable(GROUP), *plugins.loadable(TABLE_GROUP, only=run.tables)]
    for section in [*(section for _, section in registered), *more]:
        try:
            made: Any = section() if isinstance(section, type) else section
            name, _, _, _ = str(made.name), str(made.title), int(made.place), made.build
        except Exception as error:
            warn_once(f"{section!r} is not a section of a report: {type(error).__name__}: {error}. It is left out.")
            continue
        if not _NAME.match(name) or name in found:
            why = "there is one of that name" if name in found else "a name has letters, digits and hyphens"
            warn_once(f"The section {name!r} of the report is left out: {why}.")
            continue
        found[name] = made
    return list(found.values())
