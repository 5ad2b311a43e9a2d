"""``python -m deep500_timing_torch.comm``: ``bench`` times collectives, ``flight`` reads dumps of a hang.

Under ``torchrun``, ``mpirun`` or ``srun``, ``bench`` runs on every rank; without a launcher, on one.
"""

from __future__ import annotations

try:
    import click
except ModuleNotFoundError as error:
    if error.name != "click":
        raise
    from deep500_timing.adapters import missing_package

    raise missing_package("click", extra="comm", caller="python -m deep500_timing_torch.comm") from error

import torch

from deep500_timing_torch import comm
from deep500_timing_torch.comm import _bench
from deep500_timing_torch.comm._kernel import _build


def _size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    try:
        return _bench.parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


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


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False))
def flight(folder: str) -> None:
    """Read a FOLDER of PyTorch's flight recorder dumps: where a job hangs, and the rank that the others wait for."""
    try:
        click.echo(comm.read_flight_recorder(folder))
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


@main.command()
@click.option(
    "-c",
    "--collective",
    "collectives",
    multiple=True,
    type=click.Choice(list(_bench.COLLECTIVES)),
    help="Which to run; may be given several times. All of them if none is given.",
)
@click.option(
    "-b", "--minbytes", callback=_size, metavar="SIZE", default="1K", show_default=True, help="Smallest message."
)
@click.option(
    "-e", "--maxbytes", callback=_size, metavar="SIZE", default="4M", show_default=True, help="Largest message."
)
@click.option(
    "-f", "--stepfactor", type=click.IntRange(min=2), default=4, show_default=True, help="From one size to the next."
)
@click.option("-n", "--iters", type=click.IntRange(min=1), default=20, show_default=True, help="Timed operations.")
@click.option(
    "-w", "--warmup-iters", type=click.IntRange(min=0), default=5, show_default=True, help="Operations before them."
)
@click.option(
    "-d", "--datatype", type=click.Choice(list(_bench.DTYPES)), default="float", show_default=True, help="Elements."
)
@click.option(
    "-o", "--op", "redop", type=click.Choice(list(_bench.REDOPS)), default="sum", show_default=True, help="Reduction."
)
@click.option("--check/--no-check", default=True, show_default=True, help="Count elements that come out wrong.")
@click.option("--backend", default=None, help="Backend; the one of the accelerator, gloo without one.")
@click.pass_context
def bench(
    ctx: click.Context,
    collectives: tuple[str, ...],
    minbytes: int,
    maxbytes: int,
    stepfactor: int,
    iters: int,
    warmup_iters: int,
    datatype: str,
    redop: str,
    check: bool,
    backend: str | None,
) -> None:
    """Sweep message sizes for each collective and print the columns of nccl-tests.

    Sizes are of the whole message (all shares together), times in microseconds are averages over operations and
    ranks, bandwidths are in 1e9 bytes per second. It ends with status 1 if anything came out wrong.
    """
    device = torch.device("cpu")
    if backend != "gloo" and torch.accelerator.is_available():
        torch.accelerator.set_device_index(comm.get_local_rank() % torch.accelerator.device_count())
        current = torch.accelerator.current_accelerator()
        device = torch.device("cpu" if current is None else current.type)
    ours = not comm.is_initialized()
    if ours:
        comm.init_distributed(backend)
    world = _bench.World(comm.get_rank(), comm.get_world_size(), device, _bench.DTYPES[datatype], redop)
    say = click.echo if world.rank == 0 else (lambda _: None)
    say(f"# {world.size} ranks, backend {comm.get_backend()}, device {device.type}, {iters} operations a size")
    wrong = 0
    for collective in collectives or _bench.COLLECTIVES:
        say(f"#\n# {collective}\n{_bench.HEADER}")
        lines = _bench.sweep(
            world,
            collective,
            list(_bench.sizes(max(minbytes, 1), maxbytes, stepfactor)),
            dtype=datatype,
            warmup=warmup_iters,
            iterations=iters,
            check=check,
        )
        for line in lines:
            say(str(line))
            wrong += line.wrong or 0
    say(f"#\n# Out of bounds values: {wrong} {'FAILED' if wrong else 'OK' if check else 'not checked'}")
    if ours:
        comm.destroy_process_group()
    if wrong:
        ctx.exit(1)


if __name__ == "__main__":
    main(prog_name="python -m deep500_timing_torch.comm")
