"""``deep500-timing compact``: the logs of a run as Parquet."""

from __future__ import annotations

import os

from deep500_timing._command._app import click


@click.command()
@click.argument("folder", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
def command(folder: str, as_json: bool) -> None:
    """Convert a run's logs to Parquet (done automatically on first read).

    The logs stay. Only logs that have grown are read again.
    """
    from deep500_timing._command._output import busy, print_json
    from deep500_timing._summary.text import format_bytes
    from deep500_timing.runs import Run
    from deep500_timing.runs._compact import find_logs

    with busy("Reading the logs"), Run.open(folder) as run:
        logs = [log for found in run.folders for log in find_logs(found)]
        files = sorted({path for paths in run.tables.values() for path in paths})
        rows = run.sql("select count(*) as n from intervals").rows()[0]["n"]
    before, after = sum(log.size for log in logs), sum(os.path.getsize(path) for path in files)
    if as_json:
        print_json({"logs": len(logs), "log_bytes": before, "files": files, "bytes": after, "intervals": rows})
        return
    where = os.path.dirname(files[0]) if files else folder
    click.echo(
        f"{len(logs)} {'log' if len(logs) == 1 else 'logs'} of {format_bytes(before)}, {rows} intervals: "
        f"{len(files)} files of Parquet, {format_bytes(after)}, in {where}"
    )
