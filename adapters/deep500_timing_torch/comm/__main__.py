"""``python -m deep500_timing_torch.comm build`` builds the kernel."""

from __future__ import annotations

from deep500_timing.adapters import require
from deep500_timing_torch.comm import _build

TYPE_CHECKING = False
if TYPE_CHECKING:
    import click
else:
    click = require("click", extra="comm", caller="python -m deep500_timing_torch.comm")


@click.group()
def main() -> None:
    """Communication of the current launch."""


@main.command()
@click.option("--limit", type=float, default=300.0, show_default=True, help="Seconds that it may take.")
def build(limit: float) -> None:
    """Build the compiled kernel, by which comm.instrument() sees every operation. Once for each PyTorch."""
    try:
        _build.build(limit_s=limit)
    except _build.KernelUnavailableError as error:
        raise click.ClickException(f"There is no kernel: {error}.") from error
    click.echo(f"The kernel is in {_build.library_path()}")


if __name__ == "__main__":
    main(prog_name="python -m deep500_timing_torch.comm")
