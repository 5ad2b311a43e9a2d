"""The command: its subcommands, and errors that the user can fix in one line."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from difflib import get_close_matches
from typing import Any

import click

from deep500_timing._command import compare, doctor, runs
from deep500_timing._summary.text import fit_encoding, safe_name

WRONG_DATA = 1
"""Exit code: the run is missing or cannot be read."""
WRONG_USE = 2
"""Exit code: the command does not know the arguments (click's own)."""
INTERRUPTED = 130
"""Exit code: Ctrl-C."""

_OF_THE_MACHINE = ("IOException", "OutOfMemoryException")
"""Errors of DuckDB for a limit of the machine: descriptors, memory, disk."""

COMMANDS: dict[str, click.Command] = {
    "run": runs.run,
    "show": runs.show,
    "top": runs.top,
    "why": runs.why,
    "compare": compare.compare,
    "ab": compare.ab,
    "history": compare.history,
    "report": runs.report,
    "stragglers": runs.stragglers,
    "goodput": runs.goodput,
    "timeline": runs.timeline,
    "plot": runs.plot,
    "doctor": doctor.doctor,
}
"""The subcommands in the order in which they are listed."""

EPILOG = (
    "Exit codes: 0 done; 1 the run is missing, cannot be read, or lacks the requested data; 2 wrong arguments; 130 "
    "stopped by Ctrl-C."
)


class Commands(click.Group):
    """A group that lists its commands in their order, and suggests names similar to an unknown one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            near = get_close_matches(args[0], self.commands, n=1)
            is_folder = os.path.isdir(args[0])
            hint = f"deep500-timing show {args[0]}" if is_folder else f"deep500-timing {near[0]}" if near else ""
            remedy = f"Did you mean '{hint}'?" if hint else "deep500-timing --help lists the commands."
            raise click.UsageError(f"There is no command {fit_encoding(args[0], 'ascii')!r}. {remedy}", ctx=ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.version_option(None, "--version", package_name="deep500-timing", prog_name="deep500-timing")
def app() -> None:
    """Time training programs and read their runs: where the time went, and the first thing to look at."""


def main(arguments: list[str] | None = None, *, prog_name: str = "deep500-timing") -> int:
    """Run the command and return its exit code. Errors that the user can fix have no traceback."""
    if sys.stdout is None:  # closed by the caller, as by `>&-`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    stdout = sys.stdout
    try:
        result = app.main(args=arguments, prog_name=prog_name, standalone_mode=False)
    except click.exceptions.Exit as end:
        return int(end.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return WRONG_USE if isinstance(error, click.UsageError) else WRONG_DATA
    except SystemExit as end:
        # Click and rich exit so when the reader of a pipe, such as head, has closed it. Click replaces stdout then.
        if sys.stdout is stdout and not isinstance(end.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except (OSError, LookupError, ValueError, ImportError) as error:
        click.echo(f"Error: {_in_one_line(error)}", err=True)
        return WRONG_DATA
    except Exception as error:
        if isinstance(error, MemoryError) or type(error).__name__ in _OF_THE_MACHINE:
            click.echo(f"Error: {type(error).__name__}: {_in_one_line(error)}", err=True)
            return WRONG_DATA
        descriptor, path = tempfile.mkstemp(".txt", "deep500-timing-error-")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(traceback.format_exc())
        what = safe_name(f"{type(error).__name__}: {_in_one_line(error)}")
        click.echo(f"Error: {what}. This is a fault of deep500-timing. Please report it with {path}.", err=True)
        return WRONG_DATA
    return result if isinstance(result, int) else 0


def _in_one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    text = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
    return " ".join(text.split()) or type(error).__name__
