from __future__ import annotations

from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep500_timing import Timer
from deep500_timing._summary.snapshot import RegionTimes, Snapshot
from deep500_timing._summary.text import width_of
from deep500_timing._summary.tree import build_tree, node_of
from deep500_timing._views.reports import report_of_snapshot
from deep500_timing._views.table import build_table, render
from deep500_timing.memory import MemoryUsage, RegionMemory
from deep500_timing.testing import ManualClock

TITLE = "Times by region  node01, process 4711  2027-01-15 08:00:00 +0000"


def lines_of(snapshot, **settings):
    """The lines of the plain table below its title."""
    return render(report_of_snapshot(snapshot), **settings).splitlines()[1:]


def table_of(snapshot, **settings):
    """A snapshot in columns."""
    return build_table(report_of_snapshot(snapshot), **settings)


def test_the_whole_table(tmr):
    """A table has a row for each place, the device's times next to the host's, and numbers that end in one column."""
    expected = f"""\
{TITLE}  step 7

region   total  count  GPU total
BATCH   2.00 s      2     4.00 s
IO      0.25 s      1
"""
    actual = render(report_of_snapshot(tmr.snapshot(places=True), 7))

    assert expected == actual


def test_a_snapshot_without_places_is_flat(tmr):
    """Nesting is not guessed: regions stand side by side by falling total, without shares."""
    expected = f"""\
{TITLE}

region   total  count  GPU total
BATCH   2.00 s      2     4.00 s
IO      0.25 s      1
"""
    assert expected == render(report_of_snapshot(tmr.snapshot()))


def test_an_empty_snapshot_says_so(machine, snapshot_of):
    """A timer that has timed nothing prints one clear line below the title."""
    assert f"{TITLE}\n\nno times  nothing has been recorded yet\n" == render(report_of_snapshot(snapshot_of()))


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
        "rounded     BATCH (GPU): medians and percentiles are from a histogram, within ±1 %",
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
    """Where memory was asked for and is known, each region has a line with the memory in use and its peak."""
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


def test_regions_without_times_have_no_row_of_a_flat_table(machine, snapshot_of):
    """A region that is merely open is named below the table, not in it."""
    table = table_of(snapshot_of(("BATCH", "CPU", 1.0), RegionTimes("EPOCH", "CPU", None, running=1)))

    assert ["BATCH"] == [row.name for row in table.rows]
    assert ("running", "EPOCH (CPU): open now; not included") in table.notes


@pytest.mark.parametrize(("names", "rows"), [(50, 50), (51, 51), (60, 51), (10_000, 51)])
@pytest.mark.parametrize("is_nested", [False, True])
def test_ten_thousand_names_print_fifty_lines(names, rows, is_nested):
    """On a terminal: a region named by its step or its file has one row with all others. A file has each of them."""
    clock = ManualClock()
    tmr = Timer(clock=clock, keep_last=1)
    with tmr.region("all") if is_nested else nullcontext():
        for name in map(str, range(names)):
            with tmr.region(name):
                clock.advance(0.001)
    snapshot = tmr.snapshot(places=True)
    shown, whole = (build_table(report_of_snapshot(snapshot, whole=of)).rows for of in (False, True))
    assert [rows + is_nested, names + is_nested] == [len(shown), len(whole)]
    assert (rows == names) == ("more regions" not in shown[-1].name)


@pytest.mark.parametrize("width", [40, 53, 60, 80])
def test_a_table_is_no_wider_than_the_terminal(snapshot_of, stats_of, width):
    """Where leaving out columns is not enough names are shortened; the total stays."""
    names = ("BATCH", "model.encoder.layers.11.attention", "n" * 5000)
    table = table_of(
        snapshot_of(*(RegionTimes(name, "CPU", stats_of(0.123456, count=50)) for name in names)), width=width
    )

    assert {"total", "median"} <= set(table.headers)
    assert table.width <= width
    assert len(names) == len({row.name for row in table.rows})


def _chain(stats_of, depth):
    # A chain of regions, each inside the one before, with a trend each.
    names = [f"region {level}" for level in range(depth)]
    stats = stats_of(0.0123, count=200)
    nodes = [node_of(tuple(names[: level + 1]), stats, trend=(0.0123,) * 15) for level in range(depth)]
    regions = tuple(RegionTimes(name, "CPU", stats) for name in names)
    return Snapshot(regions, 0.0, "node01", 1, tree=build_tree(nodes))


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (40, ["count", "p95", "over the run"]),
        (60, ["p95", "over the run"]),
        (72, ["over the run"]),
        (84, []),
        (200, []),
    ],
)
def test_a_narrow_terminal_loses_columns_by_name(machine, stats_of, width, left_out):
    """The course over the run goes first, then the percentile, then the count; total, share and median stay."""
    snapshot = _chain(stats_of, 5)
    table = table_of(snapshot, width=width)

    assert table.width <= width
    assert max(map(width_of, lines_of(snapshot, width=width)[1:])) <= width
    assert {"region", "total", "share", "median"} <= set(table.headers)
    assert [name for name in ("count", "p95", "over the run") if name not in table.headers] == left_out
    said = f"{', '.join(left_out)}: the terminal is {width} columns wide"
    assert (("not shown", said) in table.notes) == bool(left_out)


def test_below_sixty_columns_a_level_is_one_column(stats_of):
    """A deep tree leaves room for names."""
    snapshot = _chain(stats_of, 5)

    assert ["", " ", "  ", "   ", "    "] == [row.indent for row in table_of(snapshot, width=59).rows]
    assert "         └─ " == table_of(snapshot, width=60).rows[-1].indent


@given(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=5, unique=True), st.floats(1e-9, 1e5))
def test_columns_line_up_whatever_the_names(stats_of, names, seconds):
    """Every row ends where the heading of its last column does, up to the blanks at its end; no name is cut."""
    regions = tuple(RegionTimes(name, "CPU", stats_of(seconds)) for name in names)
    report = report_of_snapshot(Snapshot(regions, 0.0, "node01", 1))
    table = build_table(report)
    _, _, _, *rows = render(report).rstrip("\n").split("\n")

    assert len(names) == len(rows)
    total = table.widths[0] + 2 + table.widths[1] + 2 + table.widths[2]
    assert {total} == {width_of(row) for row in rows}
    assert all(row.startswith(shown.name) for row, shown in zip(rows, table.rows, strict=True))


@pytest.mark.parametrize("width", [None, 80, 120])
def test_a_name_of_any_length_leaves_room_for_its_times(snapshot_of, width):
    """It is shortened in its middle, in rows and in notes, and costs no other region a column."""
    name = "start" + "x" * 5000 + "end"
    snapshot = snapshot_of((name, "CPU", 1.0), ("short", "CPU", 1.0), RegionTimes(name, "GPU", None, failed=1))
    alike = snapshot_of(("n" * 60, "CPU", 1.0), ("short", "CPU", 1.0), RegionTimes("n" * 60, "GPU", None, failed=1))
    table = table_of(snapshot, width=width)
    assert table.rows[0].name.startswith("startx")
    assert table.rows[0].name.endswith("xend")
    assert table.headers == table_of(alike, width=width).headers
    assert max(map(width_of, lines_of(snapshot, width=width))) <= (width or 200)
