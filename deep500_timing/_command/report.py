"""``deep500-timing report``: a run on one page."""

from __future__ import annotations

from deep500_timing._command._app import click

_NO_PAGES = (".json", ".pdf", ".pftrace", ".png", ".svg")


@click.command()
@click.argument("folder")
@click.argument("file", required=False)
@click.option("-o", "--output", metavar="FILE", help="The same as FILE.")
@click.option("--json", "as_json", is_flag=True, help="Print the written files as JSON.")
def command(folder: str, file: str | None, output: str | None, as_json: bool) -> None:
    """Write a run as one HTML page that works offline (default: FOLDER.html)."""
    from deep500_timing._command._choices import default_path, progress_of
    from deep500_timing._command._output import say_written
    from deep500_timing.report import write_report
    from deep500_timing.runs import Run

    if file is not None and output is not None:
        raise click.UsageError("The file is named twice: give it as FILE or by -o.")
    path = output or file or default_path(folder, ".html")
    if path.lower().endswith(_NO_PAGES):
        remedy = "deep500-timing plot writes pictures" if path.lower().endswith((".png", ".svg")) else "name it .html"
        raise click.UsageError(f"The report is an HTML page, and {path!r} does not end in .html: {remedy}.")
    with Run.open(folder) as run, progress_of("report") as on_progress:
        write_report(run, path, on_progress=on_progress)
    say_written([path], as_json=as_json)
