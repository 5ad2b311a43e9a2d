"""The command: what a run says, on a terminal.

::

    deep500-timing show runs/digits
    deep500-timing why runs/digits 90
"""

from __future__ import annotations

import sys

from deep500_timing._ground.require import require

TYPE_CHECKING = False
if TYPE_CHECKING:
    import click
else:
    click = require("click", extra="runs", caller="The command deep500-timing")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Read the runs that timers have written."""


@main.command()
@click.argument("folder")
@click.option("--rank", type=int, help="Show the times of this rank; the lowest if not given.")
@click.option("--session", type=int, help="Of this start of the run only; all if not given.")
def show(folder: str, rank: int | None, session: int | None) -> None:
    """Show where the time of a run went."""
    from deep500_timing._views.run_text import overview
    from deep500_timing.runs import Run

    with _said(), Run.open(folder) as run:
        click.echo(overview(run, rank=rank, session=session), nl=False)


@main.command()
@click.argument("folder")
@click.argument("step", type=int)
@click.option("--session", type=int, help="Of this start of the run; the last that has the step if not given.")
def why(folder: str, step: int, session: int | None) -> None:
    """Say why a step took as long as it did, beside its neighbours."""
    from deep500_timing.runs import Run

    with _said(), Run.open(folder) as run:
        click.echo(str(run.why(step, session=session)))


class _said:  # noqa: N801 (reads as the word that it is)
    """Says an error that the user can mend in one line, without a traceback."""

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Turn it into click's own."""
        if isinstance(error, (OSError, LookupError, ValueError, ImportError)):
            text = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
            raise click.ClickException(str(text)) from error


if __name__ == "__main__":
    sys.exit(main(prog_name="python -m deep500_timing"))
