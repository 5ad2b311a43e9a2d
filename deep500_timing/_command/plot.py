"""``deep500-timing plot``: the charts of the page as pictures."""

from __future__ import annotations

from deep500_timing._command._app import click


@click.command()
@click.argument("folder")
@click.argument("to", required=False)
@click.option("--format", "kind", type=click.Choice(["png", "svg"]), default="png", show_default=True)
@click.option("--only", multiple=True, metavar="SECTION", help="Draw this section only; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print the written files as JSON.")
def command(folder: str, to: str | None, kind: str, only: tuple[str, ...], as_json: bool) -> None:
    """Draw the charts of the report as pictures into the folder TO (default: FOLDER-plots)."""
    from deep500_timing._command._choices import default_path, progress_of
    from deep500_timing._command._output import say_written
    from deep500_timing._summary.text import fit_encoding
    from deep500_timing.report import write_plots
    from deep500_timing.runs import Run

    target = to or default_path(folder, "-plots")
    with Run.open(folder) as run, progress_of("plot") as on_progress:
        paths = write_plots(run, target, format=kind, only=only or None, on_progress=on_progress)  # type: ignore[arg-type]
    if not paths:
        raise click.ClickException(f"Drawing {fit_encoding(folder, 'ascii')!r}: the run has nothing to draw yet.")
    say_written(paths, as_json=as_json)
