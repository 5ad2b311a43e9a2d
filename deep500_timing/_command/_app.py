"""The command: loads subcommands and reports errors in one line."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from deep500_timing._base.require import require
from deep500_timing._summary.text import fit_encoding

TYPE_CHECKING = False
if TYPE_CHECKING:
    import click
else:
    click = require("click", extra="runs", caller="The command deep500-timing")

__all__ = ["app", "click", "main", "said"]

WRONG_DATA = 1
"""Exit code: the run is missing or cannot be read."""
WRONG_USE = 2
"""Exit code: the command does not know the arguments (click's own)."""
INTERRUPTED = 130
"""Exit code: Ctrl-C."""

COMMANDS = {
    "run": ("runs", "Time a training program without editing it."),
    "show": ("runs", "Show where the time of a run went."),
    "top": ("runs", "Show a run while it is being written."),
    "why": ("runs", "Say why a step was slow."),
    "compare": ("compare", "Say whether runs are slower than others, and in which region."),
    "ab": ("compare", "Run two commands in turn and say whether one is slower."),
    "history": ("compare", "Say which of the last runs made it slower."),
    "report": ("runs", "Write a run as one HTML page that works offline."),
    "stragglers": ("runs", "Say which rank the others wait for, and why."),
    "goodput": ("runs", "Account for the wall clock of the job, restarts included."),
    "timeline": ("runs", "Write a run as a timeline, for Perfetto."),
    "plot": ("runs", "Draw the charts of the report as pictures."),
    "compact": ("runs", "Convert a run's logs to Parquet."),
    "doctor": ("doctor", "List installed and missing packages."),
    "bench": ("doctor", "Measure the cost of timing on this machine."),
}
"""The module and the help of each subcommand, a function of its name, in the order in which they are listed."""

EPILOG = (
    "Exit codes: 0 done; 1 the run is missing, cannot be read, or lacks the requested data; 2 wrong arguments; 130 "
    "stopped by Ctrl-C."
)


class Commands(click.Group):
    """A group that imports a subcommand when it is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        return getattr(import_module(f"deep500_timing._command.{COMMANDS[cmd_name][0]}"), cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Suggest names similar to an unknown one."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=1)
            is_folder = os.path.isdir(args[0])
            hint = f"deep500-timing show {args[0]}" if is_folder else f"deep500-timing {near[0]}" if near else ""
            remedy = f"Did you mean '{hint}'?" if hint else "deep500-timing --help lists the commands."
            raise click.UsageError(f"There is no command {fit_encoding(args[0], 'ascii')!r}. {remedy}", ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.version_option(None, "--version", package_name="deep500-timing", prog_name="deep500-timing")
def app() -> None:
    """Time training programs and read their runs: where the time went, and the first thing to look at."""


def main(arguments: list[str] | None = None, *, prog_name: str = "deep500-timing") -> int:
    """Run the command and return its exit code. Errors that the user can fix have no traceback."""
    stdout = sys.stdout
    try:
        result = app.main(args=arguments, prog_name=prog_name, standalone_mode=False)
    except click.exceptions.Exit as end:
        return int(end.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.UsageError as error:
        error.show()
        return WRONG_USE
    except click.ClickException as error:
        error.show()
        return WRONG_DATA
    except SystemExit as end:
        # Click and rich exit so when the reader of a pipe, such as head, has closed it. Click replaces stdout then.
        if sys.stdout is stdout and not isinstance(end.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except (OSError, LookupError, ValueError, ImportError) as error:
        click.echo(f"Error: {said(error)}", err=True)
        return WRONG_DATA
    return result if isinstance(result, int) else 0


def said(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    text = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
    return " ".join(text.split()) or type(error).__name__
