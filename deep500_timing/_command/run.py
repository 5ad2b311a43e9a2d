"""The subcommand ``run``, for the list of commands: ``deep500_timing.__main__`` runs it without this package."""

from __future__ import annotations

from typing import Any

from deep500_timing._command._app import click


@click.command(
    add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> Any:
    """Time a training program without editing it."""
    from deep500_timing._launch.command import main

    return main(list(arguments))
