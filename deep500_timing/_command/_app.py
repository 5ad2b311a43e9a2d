"""The command: its subcommands, and errors that the user can fix in one line."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from difflib import get_close_matches
from importlib import resources
from typing import Any

import click

from deep500_timing._command import compare, doctor, runs, trial
from deep500_timing._command._output import SCHEMA_VERSION
from deep500_timing._summary.text import fit_encoding, safe_name

WRONG_DATA = 1
"""Exit status: the run is missing, cannot be read, or lacks the requested data."""
WRONG_USE = 2
"""Exit status: the command does not know the arguments (click's own)."""
INTERRUPTED = 130
"""Exit status: Ctrl-C."""

_OF_THE_MACHINE = ("MemoryError", "IOException", "OutOfMemoryException")
"""Errors, two of them DuckDB's, for a limit of the machine: descriptors, memory, disk."""
GROUPS: dict[str, dict[str, click.Command]] = {
    "Time a program": {"run": runs.run},
    "Look at a run": {
        "show": runs.show,
        "top": runs.top,
        "why": runs.why,
        "report": runs.report,
        "timeline": runs.timeline,
        "plot": runs.plot,
    },
    "Ranks and whole jobs": {"stragglers": runs.stragglers, "goodput": runs.goodput},
    "Compare": {
        "try": trial.try_,
        "ab": compare.ab,
        "bisect": trial.bisect,
        "compare": compare.compare,
        "history": compare.history,
    },
    "This machine": {"doctor": doctor.doctor},
}
"""The subcommands as they are listed."""
COMMANDS = {name: command for commands in GROUPS.values() for name, command in commands.items()}

EXAMPLES = {
    "show": ("show", "show runs/first --all", "show runs/first --json"),
    "top": ("top", "top runs/first --rank 3"),
    "why": ("why", "why 81220", "why runs/first 81220"),
    "report": ("report --open", "report runs/first -o page.html"),
    "timeline": ("timeline", "timeline runs/first --steps 10:20 --ranks 0-3"),
    "plot": ("plot", "plot runs/first --format svg --only tree"),
    "stragglers": ("stragglers", "stragglers runs/first"),
    "goodput": ("goodput", "goodput runs/first --bucket validate=evaluation"),
    "try": ("try -- python train.py", "try --steps 200 --also-changing -- python train.py"),
    "ab": (
        "ab -- python train.py --- python train.py --compile",
        "ab --rev main --fail-on 3% -- python train.py",
        "ab --same -- python train.py",
    ),
    "bisect": ("bisect --good v1.0 -- python train.py", "bisect --good peft==0.18 --bad peft==0.20 -- python train.py"),
    "compare": ("compare runs/a runs/b", "compare --against baseline runs/b --fail-on 3%"),
    "history": ("history runs",),
    "doctor": ("doctor", "doctor --json"),
}
"""What is typed after the name of the program, by subcommand. A subcommand of a run takes the last one in runs/."""
for _name, _lines in EXAMPLES.items():
    COMMANDS[_name].epilog = "\b\nExamples:\n" + "\n".join(f"  deep500-timing {line}" for line in _lines)

EPILOG = (
    "Exit status: 0 done; 1 the run is missing, cannot be read, or lacks the requested data; 2 wrong arguments; "
    "3 done, and the answer is no (--fail-on, try, bisect); 130 stopped by Ctrl-C. "
    "`run` ends with the status of the program. `help reading` explains what a run's table says."
)


class Commands(click.Group):
    """A group that lists its commands by purpose, and suggests names similar to an unknown one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for purpose, commands in GROUPS.items():
            with formatter.section(purpose):
                formatter.write_dl([(name.ljust(width), one.get_short_help_str(80)) for name, one in commands.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            near = get_close_matches(args[0], self.commands, n=1)
            is_folder = os.path.isdir(args[0])
            hint = f"deep500-timing show {args[0]}" if is_folder else f"deep500-timing {near[0]}" if near else ""
            remedy = f"Did you mean '{hint}'?" if hint else "deep500-timing --help lists the commands."
            raise click.UsageError(f"There is no command {fit_encoding(args[0], 'ascii')!r}. {remedy}", ctx=ctx)
        return super().resolve_command(ctx, args)


def _colour(_ctx: click.Context, _option: click.Parameter, choice: str | None) -> None:
    if choice in ("always", "never"):
        os.environ.pop("NO_COLOR", None)
        os.environ.pop("FORCE_COLOR", None)
        os.environ["FORCE_COLOR" if choice == "always" else "NO_COLOR"] = "1"


@click.group(cls=Commands, commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.version_option(None, "--version", package_name="deep500-timing", prog_name="deep500-timing")
@click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    help="Colours (default: auto, on a terminal; NO_COLOR and FORCE_COLOR count).",
    expose_value=False,
    callback=_colour,
)
def app() -> None:
    """Time training programs and read their runs: where the time went, and the first thing to look at."""


def main(arguments: list[str] | None = None, *, prog_name: str = "deep500-timing") -> int:
    """Run the command and return its exit status.

    Errors that the user can fix have no traceback. With ``--json`` they are on the output as JSON as well.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["help", "reading"]:
        click.echo(resources.files("deep500_timing").joinpath("READING.md").read_text(encoding="utf-8"))
        return 0
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
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
        return _failed(
            arguments, error.format_message(), WRONG_USE if isinstance(error, click.UsageError) else WRONG_DATA
        )
    except SystemExit as end:
        # Click and rich exit so when the reader of a pipe, such as head, has closed it. Click replaces stdout then.
        if sys.stdout is stdout and not isinstance(end.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except (OSError, LookupError, ValueError, ImportError) as error:
        said = _in_one_line(error)
    except Exception as error:
        said = safe_name(f"{type(error).__name__}: {_in_one_line(error)}")
        if type(error).__name__ not in _OF_THE_MACHINE:
            descriptor, path = tempfile.mkstemp(".txt", "deep500-timing-error-")
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(traceback.format_exc())
            said += f". This is a fault of deep500-timing. Please report it with {path}."
    else:
        return result if isinstance(result, int) else 0
    click.echo(f"Error: {said}", err=True)
    return _failed(arguments, said, WRONG_DATA)


def _failed(arguments: list[str], said: str, status: int) -> int:
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments  # `ab` has a program's behind it
    if "--json" in own and own[:1] != ["run"]:
        click.echo(json.dumps({"schema": f"deep500-timing.error/{SCHEMA_VERSION}", "error": said, "status": status}))
    return status


def _in_one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    text = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
    return " ".join(text.split()) or type(error).__name__
