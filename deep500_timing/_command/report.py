"""``deep500-timing report``: a run on one page."""

from __future__ import annotations

from deep500_timing._command._app import click


@click.command()
@click.argument("folder")
@click.argument("file", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as plain data.")
def command(folder: str, file: str | None, as_json: bool) -> None:
    """Write a run as one HTML page that works offline; FILE is FOLDER.html if not given."""
    from deep500_timing._command._choices import beside, progress_of
    from deep500_timing._command._output import say_written
    from deep500_timing.report import write_report
    from deep500_timing.runs import Run

    path = file or beside(folder, ".html")
    with Run.open(folder) as run, progress_of("report") as on_progress:
        write_report(run, path, on_progress=on_progress)
    say_written([path], as_json=as_json)
