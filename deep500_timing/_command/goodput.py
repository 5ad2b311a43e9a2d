"""``deep500-timing goodput``: where the wall clock of the whole job went."""

from __future__ import annotations

from dataclasses import asdict

from deep500_timing._command._app import click


@click.command()
@click.argument("folder", type=click.Path())
@click.option(
    "--bucket", "chosen", multiple=True, metavar="REGION=BUCKET", help="Count a region as evaluation, data, …"
)
@click.option("--mfu", type=click.FloatRange(0, 1), help="MFU of the steps, for MFU × goodput; else from samples.")
@click.option("--ranks", is_flag=True, help="Print the account of each rank as well.")
@click.option("--json", "as_json", is_flag=True, help="Print plain data instead.")
def command(folder: str, chosen: tuple[str, ...], mfu: float | None, ranks: bool, as_json: bool) -> None:
    """Show where the wall clock of the job went, restarts included. The parts add up to 100 %."""
    from deep500_timing._command._output import busy, print_json, say
    from deep500_timing.runs import Run
    from deep500_timing.runs._goodput import rank_lines

    buckets = {}
    for pair in chosen:
        region, _, bucket = pair.rpartition("=")
        if not region:
            raise click.BadParameter(f"{pair!r} is not REGION=BUCKET.", param_hint="--bucket")
        buckets[region] = bucket
    with busy("Reading the run"), Run.open(folder) as run:
        found = run.goodput(buckets=buckets, mfu=mfu)
    if as_json:
        rates = {"goodput": found.goodput, "ettr": found.ettr, "mfu_goodput": found.mfu_goodput}
        print_json(asdict(found) | rates)
        return
    text = "\n".join([str(found), *(["", *rank_lines(found)] if ranks else [])])
    say(text)
