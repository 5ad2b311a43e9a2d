"""``deep500-timing timeline``: a run as a timeline file."""

from __future__ import annotations

from deep500_timing._command._app import click


@click.command()
@click.argument("folder")
@click.argument("file", required=False)
@click.option("--steps", metavar="FIRST[:LAST]", help="These steps only; without it the whole run.")
@click.option("--ranks", metavar="RANKS", help="These ranks only, such as 0,3 or 0-7.")
@click.option("--format", "kind", type=click.Choice(["perfetto", "chrome"]), help="By the file's name if not given.")
@click.option("--profile", multiple=True, metavar="TRACE", help="A trace of torch.profiler to add.")
@click.option("--json", "as_json", is_flag=True, help="Print the written files as plain data.")
def command(
    folder: str,
    file: str | None,
    steps: str | None,
    ranks: str | None,
    kind: str | None,
    profile: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write a run as a timeline for https://ui.perfetto.dev: threads, devices, steps, launches, memory.

    FILE is FOLDER.pftrace if not given; with the ending .json it has Chrome's trace format.
    """
    from deep500_timing._command._choices import default_path, numbers_of, progress_of, steps_of
    from deep500_timing._command._output import say_written
    from deep500_timing._views.timeline.write import write_timeline
    from deep500_timing.runs import Run

    wanted_steps, wanted_ranks = steps_of(steps), numbers_of(ranks, "--ranks")
    path = file or default_path(folder, ".json" if kind == "chrome" else ".pftrace")
    with Run.open(folder) as run, progress_of("timeline") as on_progress:
        write_timeline(
            run,
            path,
            format=kind,  # type: ignore[arg-type]
            steps=wanted_steps,
            ranks=wanted_ranks,
            profiles=profile,
            on_progress=on_progress,
        )
    say_written([path], as_json=as_json)
