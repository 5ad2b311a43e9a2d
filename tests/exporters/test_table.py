from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep500_timing._summary.snapshot import RegionTimes, Snapshot
from deep500_timing._summary.text import width_of
from deep500_timing._views.table import render, table_of
from deep500_timing.memory import MemoryUsage, RegionMemory

TITLE = "Times by region  node01, process 4711  2027-01-15 08:00:00 +0000"


def lines_of(snapshot, **settings):
    """The lines of the plain table below its title."""
    return render(table_of(snapshot, **settings)).splitlines()[1:]


def test_the_whole_table(tmr):
    """A table has a row for each region and device, numbers that end in one column, and units beside them."""
    expected = f"""\
{TITLE}  step 7

region  device  count     total      mean  stdev    median  95 % CI of median       min       p95       max
──────  ──────  ─────  ────────  ────────  ─────  ────────  ─────────────────  ────────  ────────  ────────
BATCH   CPU         2  2.000 s   1.000 s     0 s  1.000 s                   –  1.000 s   1.000 s   1.000 s
BATCH   GPU         2  4.000 s   2.000 s     0 s  2.000 s                   –  2.000 s   2.000 s   2.000 s
IO      CPU         1  250.0 ms  250.0 ms    0 s  250.0 ms                  –  250.0 ms  250.0 ms  250.0 ms
"""
    actual = render(table_of(tmr.snapshot(), 7))

    assert expected == actual


def test_an_empty_snapshot_says_so(machine, snapshot_of):
    """A timer that has timed nothing prints one clear line below the title."""
    assert f"{TITLE}\n\nno times  nothing has been recorded yet\n" == render(table_of(snapshot_of()))


def test_notes_name_what_the_numbers_leave_out(machine, snapshot_of, stats_of):
    """Each thing that a reader must know has a line with the regions and counts concerned."""
    snapshot = snapshot_of(
        RegionTimes("BATCH", "CPU", stats_of(1.0, skipped=3), running=1, failed=2),
        RegionTimes("BATCH", "GPU", stats_of(1.0, quantile_error=0.01), pending=4, captured=5, recomputed=7),
        RegionTimes("IO", "CPU", None, discarded=6),
        RegionTimes("warm", "CPU", None),
    )

    assert [
        "running     BATCH (CPU): open now; not included",
        "pending     4 × BATCH (GPU): ended, but not reached by the device yet; not included",
        "failed      2 × BATCH (CPU): ended by an exception, or not to be measured; not included",
        "discarded   6 × IO (CPU): forgotten while open; not included",
        "captured    5 × BATCH (GPU): in a graph being captured, where nothing can be timed; not included",
        "recomputed  7 × BATCH (GPU): run a second time, as by an activation checkpoint; not included",
        "warm-up     3 × BATCH (CPU): left out by skip_first",
        "rounded     BATCH (GPU): median, its interval and p95 are from a histogram, within ±1 %",
        "no times    warm (CPU): used, but nothing is recorded, or nothing but warm-up",
    ] == lines_of(snapshot)[-9:]


def test_threads_of_a_running_region_are_counted(machine, snapshot_of):
    """A region that several threads have open is shown with their number."""
    lines = lines_of(snapshot_of(RegionTimes("load", "CPU", None, running=3)))

    assert [
        "no times  nothing has been recorded yet",
        "running   3 × load (CPU): open now, by threads; the time so far is not included",
    ] == lines[-2:]


def test_memory_is_told_below_the_table(machine, snapshot_of, stats_of):
    """Where memory was asked for and is known, each region has a line with what was in use and the most of it."""
    known = RegionMemory(
        2,
        MemoryUsage(host_rss_bytes=3 * 2**29, device="cuda:0", device_allocated_bytes=2**20),
        max_host_rss_bytes=2**31,
        max_device_allocated_bytes=2**30 - 1,
    )
    snapshot = snapshot_of(
        RegionTimes("BATCH", "CPU", stats_of(1.0), memory=known),
        RegionTimes("IO", "CPU", stats_of(1.0), memory=RegionMemory(1, MemoryUsage())),
    )

    assert [
        "memory  BATCH at its last end: 1.50 GiB resident (at most 2.00 GiB), "
        "1.00 MiB allocated on cuda:0 (at most 1.00 GiB)"
    ] == lines_of(snapshot)[-1:]


def test_regions_without_times_have_no_row(machine, snapshot_of):
    """A region that is merely open is named below the table, not in it."""
    table = table_of(snapshot_of(("BATCH", "CPU", 1.0), RegionTimes("EPOCH", "CPU", None, running=1)))

    assert ["BATCH"] == [row[0] for row in table.rows]
    assert ("running", "EPOCH (CPU): open now; not included") in table.notes


@pytest.mark.parametrize("width", [40, 53, 60, 80])
def test_a_table_is_no_wider_than_the_terminal(snapshot_of, stats_of, width):
    """Where leaving out columns is not enough names are shortened further; total and mean stay."""
    names = ("BATCH", "model.encoder.layers.11.attention", "n" * 5000)
    table = table_of(snapshot_of(*(RegionTimes(name, "CPU", stats_of(0.123456)) for name in names)), width=width)

    assert {"total", "mean"} <= set(table.headers)
    assert table.width <= width
    assert len(names) == len({row[0] for row in table.rows})


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_a_narrow_terminal_loses_columns_by_name(machine, snapshot_of, stats_of, width):
    """What does not fit is left out from the least important column on, and named."""
    stats = stats_of(0.01234, median_ci=(0.01, 0.02), stdev=0.00123)
    table = table_of(snapshot_of(RegionTimes("FORWARD", "CPU", stats)), width=width)

    assert table.width <= width
    missing = {"count", "total", "mean", "stdev", "median", "min", "p95", "max"} - set(table.headers)
    named = dict(table.notes).get("not shown", "")
    assert all(name in named for name in missing)
    assert bool(named) == (width < 113)
    assert {"region", "device", "count", "total", "mean", "max"} <= set(table.headers)


@given(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=5, unique=True), st.floats(1e-9, 1e5))
def test_columns_line_up_whatever_the_names(stats_of, names, seconds):
    """Every row is as wide as the rule above it, up to the blanks at its end, and no name is cut."""
    regions = tuple(RegionTimes(name, "CPU", stats_of(seconds)) for name in names)
    table = table_of(Snapshot(regions, 0.0, "node01", 1))
    _, _, header, rule, *rows = render(table).rstrip("\n").split("\n")

    assert width_of(rule) == table.width == width_of(header)
    assert len(names) == len(rows)
    assert all(width_of(rule) - width_of(row) in {0, 1} for row in rows)
    assert all(row.startswith(cells[0]) for row, cells in zip(rows, table.rows, strict=True))


@pytest.mark.parametrize("width", [None, 80, 120])
def test_a_name_of_any_length_leaves_room_for_its_times(snapshot_of, width):
    """It is shortened in its middle, in rows and in notes, and costs no other region a column."""
    name = "start" + "x" * 5000 + "end"
    snapshot = snapshot_of((name, "CPU", 1.0), ("short", "CPU", 1.0), RegionTimes(name, "GPU", None, failed=1))
    alike = snapshot_of(("n" * 60, "CPU", 1.0), ("short", "CPU", 1.0), RegionTimes("n" * 60, "GPU", None, failed=1))
    table = table_of(snapshot, width=width)
    assert table.rows[0][0].startswith("startx")
    assert table.rows[0][0].endswith("xend")
    assert table.headers == table_of(alike, width=width).headers
    assert max(map(width_of, render(table, width=width).splitlines())) <= (width or 200)
