"""``deep500-timing history``: which of the last runs made it slower."""

from __future__ import annotations

import os

from deep500_timing._command._app import click


@click.command()
@click.argument("folder", metavar="FOLDER")
@click.option("--region", default="", metavar="PATH", help="Look at this region instead of the step.")
@click.option("--json", "as_json", is_flag=True, help="Print plain data instead.")
def history(folder: str, region: str, as_json: bool) -> None:
    """Say which of the runs in FOLDER changed the time of a step.

    Runs that cannot be compared, such as those of a few steps, are left out and counted.
    """
    from datetime import UTC, datetime

    from deep500_timing._command._output import busy, print_json, say
    from deep500_timing._summary.text import format_time, lines_of, safe_name
    from deep500_timing.compare._runs import NotComparableError, read_side
    from deep500_timing.compare._statistics import history
    from deep500_timing.compare._text import percent

    runs, left_out = [], 0
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"The history {folder!r}: there is no such folder.")
    with busy("Reading the runs"):
        for name in sorted(os.listdir(folder)):
            path = os.path.join(folder, name)
            try:
                runs += read_side(path) if os.path.isdir(path) or name.endswith(".json") else []
            except (NotComparableError, FileNotFoundError):
                left_out += 1
        levels, unit = history(runs, path=region)
    if as_json:
        print_json(
            [
                {"first_run": one.first.runs[0].name, "last_run": one.last.runs[-1].name, "points": one.points}
                | {"unit": unit, "seconds": one.seconds, "change": one.change, "p": one.p, "region": one.region}
                for one in levels
            ]
        )
        return
    rows = [("from run", "began (UTC)", f"{unit}s", "step", "change", "p", "most in")]
    for one in levels:
        run = one.first.runs[0]
        began = "" if run.start_unix_s is None else f"{datetime.fromtimestamp(run.start_unix_s, UTC):%Y-%m-%d %H:%M}"
        p = "" if one.p is None else f"{one.p:.3f}"
        row = (safe_name(run.name), began, str(one.points), format_time(one.seconds), percent(one.change), p)
        rows.append((*row, safe_name(one.region or "")))
    slower = [one for one in levels if (one.change or 0) > 0]
    if slower:
        text = f"{safe_name(slower[-1].first.runs[0].name)} made it slower: {percent(slower[-1].change)}."
        text += f" Most of it is in {safe_name(slower[-1].region)}." if slower[-1].region else ""
    else:
        text = "No run made it slower."
    note = f"Method: E-divisive with a permutation test at 5 %; a point is a {unit}."
    note += f" Left out: {left_out} without enough steps." if left_out else ""
    lines = "\n".join([text, "", *lines_of(rows, left=2), "", note])
    say(lines)
