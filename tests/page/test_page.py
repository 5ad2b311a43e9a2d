"""The page says the run's values, escapes what strangers wrote, and takes sections from others."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import re
import sys
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree as ET

import pytest

from deep500_timing import MissingPackageError, Timer, TimeType, TimingWarning
from deep500_timing._base import progress
from deep500_timing._command._app import main
from deep500_timing._views.findings import Finding
from deep500_timing._views.page._charts import _OTHERS, ALARM, GREY, REGION_COLOURS, colours_of, luminance_of, on
from deep500_timing._views.page._job import _PARTS
from deep500_timing._views.page._page import _javascript, build
from deep500_timing.ranks import find_stragglers
from deep500_timing.report import Content, Figure, Panel, write_plots, write_report
from deep500_timing.runs import Run, RunLog
from deep500_timing.testing import ManualClock

DOCS = Path(__file__).parents[2] / "docs" / "report.md"
SECTIONS = [
    "tree", "over-the-run", "steps", "distributions", "stragglers", "ranks", "memory", "communication", "not-measured"
]  # fmt: skip
HOSTILE = "</script><script>alert(1)</script>&\"'\u2028"


class Page(HTMLParser):
    """A browser's view of a page: its sections, scripts, links and text."""

    def __init__(self, path):
        super().__init__()
        self.sections, self.scripts, self.asked, self.text = [], [], [], ""
        self._in = None
        self.source = path.read_text()
        self.feed(self.source)

    def handle_starttag(self, tag, attrs):
        """Note a section, a script and each fetched address."""
        attrs = dict(attrs)
        self._in = tag
        if tag == "section":
            self.sections.append(attrs["id"])
        if tag == "script":
            self.scripts.append("")
        self.asked += [value for name, value in attrs.items() if name in ("src", "href") and (value or "")[:1] != "#"]

    def handle_endtag(self, tag):
        """Leave a script."""
        self._in = None

    def handle_data(self, data):
        """Take a text, or a piece of a script."""
        if self._in == "script":
            self.scripts[-1] += data
        else:
            self.text += data

    @property
    def charts(self):
        """The specifications."""
        return json.loads(self.scripts[0])


@pytest.fixture(scope="module")
def page(run, tmp_path_factory):
    """The page of the run."""
    path = tmp_path_factory.mktemp("page") / "digits.html"
    write_report(run, path)
    return Page(path)


@pytest.fixture(scope="module")
def sections(run):
    """Its sections as data, by name."""
    return {section.name: section.content for section in build(run)[1]}


def _run_of(folder, train, ranks=1):
    for rank in range(ranks):
        clock = ManualClock(10**9)
        tmr = Timer(clock=clock)
        # The memory of the process that runs the tests is in no expectation.
        with (
            mock.patch("deep500_timing.runs._system.ResidentMemory.due", return_value=()),
            RunLog(folder, tmr, rank=rank, flush_s=None) as log,
        ):
            log.event("began")
            train(tmr, clock)
    return Run.open(folder)


def test_one_file(page):
    """Sections in their order; nothing is fetched; three scripts, of which two run, by their hashes."""
    assert ["findings", *SECTIONS] == page.sections
    assert [] == page.asked
    assert 3 == len(page.scripts)
    assert 2 == len(re.findall("sha256-", page.source.split("<style>")[0]))
    assert "unsafe-eval" not in page.source.split("<style>")[0]
    assert len(page.source) < 1_200_000


def test_what_strangers_wrote_is_text(page):
    """A region's name that would end a script is shown as it is, and stands in the data alone."""
    assert "</script><script>alert(1…cript>&\"'\\u2028" in page.text
    boxes = page.charts[0]["data"]["values"]
    assert "</script><script>alert(1…cript>&\"'\\u2028" in {box["region"] for box in boxes}
    for chart in page.charts:
        for layer in [chart, *chart.get("layer", ())]:
            layer.pop("data", None)
            for transform in layer.get("transform", ()):
                transform.get("from", {}).pop("data", None)
        assert "alert" not in json.dumps(chart)


def test_the_tree_adds_up(sections):
    """At each place of the icicle children fill their parent, on the CPU and on the GPU."""
    for figure in sections["tree"].figures:
        boxes = figure.panels[0].spec["data"]["values"]
        assert abs(sum(box["x2"] - box["x"] for box in boxes if box["depth"] == 0) - 1) < 1e-4
        for box in boxes:
            inside = [
                b for b in boxes if b["depth"] == box["depth"] + 1 and box["x"] <= b["x"] < b["x2"] <= box["x2"] + 1e-5
            ]
            if inside:
                assert abs(sum(b["x2"] - b["x"] for b in inside) - (box["x2"] - box["x"])) < 2e-3
    cpu, gpu = sections["tree"].figures
    assert "FORWARD 60\u00a0%, IO 17\u00a0%" in cpu.alt
    assert cpu.alt.endswith(", the rest <1\u00a0%.")
    assert sections["tree"].text[0].startswith("Both ranks together, all steps.")
    assert {"BATCH": "#949494", "FORWARD": "#0072b2"} == {
        box["region"]: box["colour"] for box in gpu.panels[0].spec["data"]["values"]
    }


def test_shares_stand_in_the_table(sections):
    """The numbers of the chart are the run's, of what lies in steps."""
    rows = {row[0].strip("\u2003"): row for row in sections["tree"].figures[0].rows}
    assert ("BATCH", "", 80) == (rows["BATCH"][0], *rows["BATCH"][2:4])
    assert "EPOCH" not in rows
    assert ("960.0 ms", "100\u00a0%", 80) == sections["tree"].figures[1].rows[-1][1:4]


def test_parts_of_a_step_add_up_to_it(run, sections):
    """At each step the parts and the rest are the mean BATCH of all ranks; the slow one is marked."""
    layers = sections["over-the-run"].figures[0].panels[0].spec["layer"]
    heights = defaultdict(float)
    for bar in layers[0]["data"]["values"]:
        heights[bar["step"]] += bar["s"]
    means = run.sql("select step, avg(dur_ns) as mean from intervals where region = 'BATCH' group by step").rows()
    assert {row["step"]: pytest.approx(row["mean"] / 1e9, rel=1e-3) for row in means} == dict(heights)
    assert [("step 30", 30.5)] == [(mark["what"], mark["step"]) for mark in layers[1]["data"]["values"]]


def test_many_steps_are_drawn_together(tmp_path):
    """4 000 steps are 500 bars; the chart ends above the usual ones, and a mark at its edge has its time."""

    def train(tmr, clock):
        for step in range(4000):
            with tmr.region(TimeType.BATCH):
                clock.advance_ns({777: 90_000_000, 778: 80_000_000}.get(step, 15_000_000 if step < 45 else 10_000_000))

    with _run_of(tmp_path / "run", train) as run:
        content = {section.name: section.content for section in build(run)[1]}["over-the-run"]
    bars, marks, labels = (layer["data"]["values"] for layer in content.figures[0].panels[0].spec["layer"])
    top = content.figures[0].panels[0].spec["layer"][0]["encoding"]["y"]["scale"]["domain"][1]
    assert 500 == len(bars)
    assert 0.015 < top < 0.02
    assert [top] == [mark["s"] for mark in marks]
    assert ["90.00 ms"] == [label["label"] for label in labels]
    said = (
        "The median step takes 10.00 ms, the longest 90.00 ms. "
        "2 of 4000 took more than 4 × the median, warm-up included."
    )
    assert said == content.figures[0].alt
    assert [("step 777", "90.00 ms")] == [(mark["what"], mark["time"]) for mark in marks]
    assert 777 == next(row[4] for row in content.figures[0].rows if row[3] == "90.00 ms")


@pytest.mark.parametrize("steps", [1, 2, 12])
def test_axes_of_few_have_whole_numbers(tmp_path, steps):
    """Nothing stands between two steps, and no bar holds half an interval."""

    def train(tmr, clock):
        for step in range(steps):
            with tmr.region(TimeType.BATCH):
                clock.advance_ns(10_000_000 * (1 + step))

    with _run_of(tmp_path / "run", train) as run:
        paths = write_plots(run, tmp_path, format="svg")
    texts = {Path(path).name: re.findall(r"<text[^>]*>([^<]*)</text>", Path(path).read_text()) for path in paths}
    of_steps = [int(text) for text in texts["over-the-run-1.svg"] if text.isdecimal()]
    assert sorted(set(of_steps)) == of_steps
    assert {0, steps} <= set(of_steps)
    if steps == 12:  # fewer have no distribution
        counts = [text for text in texts["distributions-1.svg"] if re.fullmatch(r"[\d.]+[a-z]?", text)]
        assert sorted(set(counts)) == counts
        assert all(map(str.isdecimal, counts))


def test_a_typical_step_and_the_slowest(run, sections):
    """The typical one is as long as the median; the slowest is step 30; bars lie where the intervals do."""
    typical, slowest = sections["steps"].figures
    assert "Step 30, the slowest" == slowest.title
    assert "on rank 1" in slowest.alt
    lengths = run.sql(
        "select step, max(dur_ns) as n from intervals where region = 'BATCH' group by step order by n, step"
    ).rows()
    number = int(re.findall(r"\d+", typical.title)[0])
    assert lengths[(len(lengths) - 1) // 2]["n"] == next(row["n"] for row in lengths if row["step"] == number)
    bars = slowest.panels[0].spec["layer"][0]["data"]["values"]
    rows = run.intervals(steps=(30, 30)).rows()
    begin = min(row["unix_ns"] for row in rows if row["region"] == "BATCH")
    expected = sorted((row["rank"], (row["unix_ns"] - begin) / 1e9) for row in rows if row["region"] == "IO")
    drawn = sorted((bar["rank"], bar["start"]) for bar in bars if bar["region"] == "IO")
    assert [rank for rank, _ in expected] == [rank for rank, _ in drawn]
    assert pytest.approx([start for _, start in expected], abs=2e-6) == [start for _, start in drawn]
    assert ["rank 0 CPU", "rank 0 GPU", "rank 1 CPU", "rank 1 GPU"] == [
        label["label"] for label in slowest.panels[0].spec["layer"][2]["data"]["values"]
    ]


def test_distributions_hold_every_interval(run, sections):
    """The bars of a region add up to its count."""
    figure = sections["distributions"].figures[0]
    counts = {row["region"]: row["count"] for row in run.regions().rows() if row["device"] == "CPU"}
    for panel in figure.panels:
        total = sum(bar["n"] for bar in panel.spec["data"]["values"])
        assert counts[HOSTILE if panel.title.startswith("<") else panel.title] == total


@pytest.mark.parametrize("times_ns", [[7] * 10, [1000, 1001] * 6, [0, 10**9] * 5, [10**9] * 9 + [3 * 10**12]])
def test_bars_hold_every_interval(tmp_path, times_ns):
    """For any times, no interval is lost, and the bars follow one another."""

    def train(tmr, clock):
        for time_ns in times_ns:
            with tmr.region("part"):
                clock.advance_ns(time_ns)
            clock.advance_ns(1)

    with _run_of(tmp_path / "run", train) as run:
        [figure] = {section.name: section.content for section in build(run)[1]}["distributions"].figures
    bars = figure.panels[0].spec["data"]["values"]
    assert len(times_ns) == sum(bar["n"] for bar in bars)
    assert all(bar["from"] < bar["to"] for bar in bars)
    assert all(before["to"] <= after["from"] for before, after in itertools.pairwise(bars))


def test_who_is_late_is_said_as_by_the_command(tmp_path):
    """The verdict first; each rank's lateness with the bound; the late one's longer part, the cause marked."""
    own = (0.0100, 0.0102, 0.0101, 0.0400, 0.0099, 0.0101)
    rng = random.Random(3)
    steps = [[{"FORWARD": of * rng.lognormvariate(0, 0.02), "IO": 0.003} for of in own] for _ in range(90)]
    for rank in range(len(own)):
        clock = ManualClock(10**9)
        tmr = Timer(clock=clock)
        with RunLog(tmp_path / "run", tmr, rank=rank, flush_s=None) as log:
            for number, parts in enumerate(steps):
                tmr.step(number)
                with tmr.region("BATCH"):
                    for name, took in parts[rank].items():
                        with tmr.region(name):
                            clock.advance(took)
                    start = clock.now_ns()
                    clock.advance(0.001 + max(sum(of.values()) for of in parts) - sum(parts[rank].values()))
                    log.collective("all_reduce", start, clock.now_ns(), sequence=number)
    with Run.open(tmp_path / "run") as run:
        context, built = build(run)
        content = {section.name: section.content for section in built}["stragglers"]
        assert " ".join(content.text) == " ".join(str(find_stragglers(run)).split("\n"))
    late, regions = content.figures
    bars, bound = late.panels[0].spec["layer"]
    assert ["rank 3", *[f"rank {rank}" for rank in (1, 2, 5)]] == [row["name"] for row in bars["data"]["values"]][:4]
    assert [True, False] == [row["length"] > bound["data"]["values"][0]["s"] for row in bars["data"]["values"]][:2]
    assert [(3, "yes"), (1, "no")] == [(row[0], row[2]) for row in late.rows[:2]]
    assert regions.title == "What rank 3 does longer"
    most = regions.panels[0].spec["data"]["values"][0]
    assert ("FORWARD", pytest.approx(0.03, rel=0.1)) == (most["name"], most["length"])
    (finding,) = [found for found in context.findings if found.rule == "late-rank"]
    assert (3, "stragglers") == (finding.rank, finding.anchor)


def test_the_rank_that_was_late(sections):
    """Rank 1 came 80 ms after the other rank in step 30, and nowhere else as late: the numbers of the finding."""
    figure = sections["ranks"].figures[0]
    cells = figure.panels[0].spec["data"]["values"]
    latest = max(cells, key=lambda cell: cell["s"])
    assert (1, 30, pytest.approx(0.08, rel=0.02)) == (latest["rank"], latest["step"], latest["s"])
    assert figure.alt.startswith("Rank 1 came latest")


def test_many_ranks_share_rows(tmp_path):
    """Of 130 ranks three share a row, which shows the one that is furthest off."""
    slow = []

    def train(tmr, clock):
        slow.append(len(slow) == 100)
        for step in range(6):  # Two of warm-up, and a last one of unknown length.
            with tmr.region(TimeType.BATCH):
                clock.advance_ns(20_000_000 if slow[-1] else 10_000_000)
                start = clock.now_ns()
                clock.advance_ns(1_000_000 if slow[-1] else 11_000_000)
                tmr.run.collective("all_reduce", start, clock.now_ns(), sequence=step)

    with _run_of(tmp_path / "run", train, ranks=130) as run:
        content = {section.name: section.content for section in build(run)[1]}
    cells = content["ranks"].figures[0].panels[0].spec["data"]["values"]
    assert 44 * 3 == len(cells)
    assert {(33, 100)} == {(cell["row"], cell["rank"]) for cell in cells if cell["s"]}
    assert 130 == len(content["ranks"].figures[0].rows)
    assert "Of 130 ranks 8 are shown." in content["steps"].figures[0].note


def test_samples_and_collectives(sections):
    """Memory and throughput by family with units; collectives by operation, group and size."""
    memory, throughput = sections["memory"].figures
    assert ("Memory", "Throughput and MFU") == (memory.title, throughput.title)
    assert [("memory.device_allocated_bytes", 80, "953.67 MiB", "972.27 MiB", "990.87 MiB")] == memory.rows[:1]
    [(_, _, rows)] = sections["communication"].tables
    assert [("all_reduce", "data", "4.00 KiB", 80), ("broadcast", "weights", "1.00 MiB", 8)] == [
        row[:4] for row in rows
    ]
    [times] = sections["communication"].figures
    assert [("all_reduce", "160.0 ms"), ("broadcast", "2.400 ms")] == times.rows


def test_samples_that_are_no_numbers(tmp_path):
    """A loss that has become NaN is counted and named, next to a line of finite values; so is one that never was."""

    def train(tmr, clock):
        for value in (2.5, 1.5, float("nan"), float("inf")):
            tmr.run.sample("loss", value)
            tmr.run.sample("scale", float("nan"))
            clock.advance_ns(10**9)

    with _run_of(tmp_path / "run", train) as run:
        [figure] = {section.name: section.content for section in build(run)[1]}["memory"].figures
        assert [str(tmp_path / "memory-1.svg")] == write_plots(run, tmp_path, format="svg")
    assert [("loss", 2, "1.5", "2", "2.5"), ("scale", 0, "–", "–", "–")] == figure.rows
    assert [2.5, 1.5] == [point["mean"] for point in figure.panels[0].spec["data"]["values"]]
    assert 1 == len(figure.panels)
    assert "NaN or infinite, and not drawn: 2 of loss, 4 of scale." in figure.note


@pytest.mark.parametrize(
    ("length_s", "unit", "plural", "last"),
    [
        (179, "s", "seconds", 179),
        (180, "min", "minutes", 3),
        (10_799, "min", "minutes", 179.98),
        (14_400, "h", "hours", 4),
    ],
)
def test_samples_have_an_axis_in_units_of_their_span(tmp_path, length_s, unit, plural, last):
    """A day of training is not told in ten thousands of seconds."""

    def train(tmr, clock):
        tmr.run.sample("loss", 1.0)
        clock.advance_ns(length_s * 10**9)
        tmr.run.sample("loss", 0.5)

    with _run_of(tmp_path / "run", train) as run:
        [figure] = {section.name: section.content for section in build(run)[1]}["memory"].figures
    spec = figure.panels[0].spec
    assert f"datum.value + ' {unit}'" == spec["layer"][0]["encoding"]["x"]["axis"]["labelExpr"]
    assert plural in str(spec["layer"][1]["encoding"]["tooltip"])
    assert pytest.approx(last, rel=0.01) == spec["data"]["values"][-1]["t"]


def test_nothing_but_nan_is_no_picture(tmp_path):
    """It has its row in the page's table; a plot would be empty."""
    with _run_of(tmp_path / "run", lambda tmr, clock: tmr.run.sample("loss", float("nan"))) as run:
        assert [] == write_plots(run, tmp_path / "plots")
        write_report(run, tmp_path / "r.html")
    assert not (tmp_path / "plots").exists()
    assert "NaN or infinite, and not drawn: 1 of loss." in Page(tmp_path / "r.html").text


def test_what_is_left_out_is_named(tmp_path):
    """A run of one rank without anything but steps: the sections that it has no data for are said at the end."""

    def train(tmr, clock):
        for _ in range(10):
            with tmr.region(TimeType.BATCH):
                clock.advance_ns(1000)

    with _run_of(tmp_path / "run", train) as run:
        write_report(run, tmp_path / "r.html")
    page = Page(tmp_path / "r.html")
    assert ["findings", "tree", "over-the-run", "steps", "distributions", "not-measured"] == page.sections
    for said in ("There is one rank.", "No collective was recorded.", "No region has times on a device."):
        assert said in page.text


def test_a_run_that_goes_on(tmp_path):
    """A region that has not ended is grey, as wide as its ended children, and named."""

    def train(tmr, clock):
        tmr.start(TimeType.EPOCH)
        for _ in range(10):
            with tmr.region("work"):
                with tmr.region(TimeType.IO):
                    clock.advance_ns(1_000_000)
                clock.advance_ns(3_000_000)

    with _run_of(tmp_path / "run", train) as run:
        content = {section.name: section.content for section in build(run)[1]}["tree"]
    boxes = content.figures[0].panels[0].spec["data"]["values"]
    found = {box["region"]: (box["colour"], box["x"], box["x2"]) for box in boxes}
    assert {"EPOCH", "work", "the rest", "IO"} == found.keys()
    assert [("#949494", 0.0, 1.0), ("#949494", 0.25, 1.0)] == [found["EPOCH"], found["the rest"]]
    assert ("#d08400", 0.0, 0.25) == found["IO"]
    assert (0.0, 1.0) == found["work"][1:]
    assert "Grey and not ended yet: EPOCH." in content.figures[0].note


@pytest.mark.parametrize("intervals", [0, 1])
def test_a_run_of_nearly_nothing(tmp_path, intervals):
    """No interval, or one: a page all the same."""

    def train(tmr, clock):
        for _ in range(intervals):
            with tmr.region("a"):
                clock.advance_ns(1000)

    with _run_of(tmp_path / "run", train) as run:
        write_report(run, tmp_path / "r.html")
    expected = ["findings", "tree", "not-measured"] if intervals else ["findings", "not-measured"]
    page = Page(tmp_path / "r.html")
    assert expected == page.sections
    said = "No finding: most need steps, in regions named BATCH." if intervals else "Nothing is recorded yet."
    assert said in page.text


def test_a_log_that_was_cut(trained, tmp_path, monkeypatch):
    """The rest of a run is shown, and the loss is named."""
    monkeypatch.setattr("deep500_timing._views.about.is_running", lambda header: False)  # It is the tests' process.
    folder = tmp_path / "run"
    folder.mkdir()
    [log] = [path for path in trained[0].glob("*.d5log") if "00000" in path.name]
    data = bytearray(log.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    (folder / log.name).write_bytes(data[: len(data) * 3 // 4])
    with Run.open(folder) as run:
        write_report(run, tmp_path / "r.html")
    page = Page(tmp_path / "r.html")
    assert "not ended: killed, or running" in page.text
    assert re.search(r"bytes of logs damaged\s*[1-9]", page.text)


def test_findings_come_first(run, tmp_path, monkeypatch):
    """Each leads to its chart, if there is one, with what to type next; strangers' names in them are text."""
    findings = [
        Finding("waits-for-data", f"{HOSTILE} is 37 % of BATCH", command="deep500-timing show x", anchor="tree"),
        Finding("throttled", "GPU 0 was throttled", anchor="devices"),
        Finding("memory-grows", "It grows", anchor="no-such-chart"),
    ]
    monkeypatch.setattr("deep500_timing._views.page._section.find", lambda run: findings)
    write_report(run, tmp_path / "r.html")
    page = Page(tmp_path / "r.html")
    assert f"{HOSTILE} is 37 % of BATCH." in page.text
    assert "deep500-timing show x" in page.text
    listed = page.source[page.source.index('<ol class="findings">') : page.source.index("</ol>")]
    assert ["tree", "memory"] == re.findall('<a href="#([^"]*)"', listed)
    assert 3 == listed.count("<li>") == len(re.findall("<p>", listed))
    assert 3 == len(page.scripts)


# --- sections of others -----------------------------------------------------------------------------------------------


class Layers:
    """A section as another distribution would write it."""

    name, title, place, missing = "kernels", "Kernels", 100, "No kernel was recorded."

    def build(self, context):
        """One bar for each kernel."""
        rows = context.rows("select kernel, sum(dur_ns)::double / 1e9 as s from kernels group by kernel")
        spec = {
            "data": {"values": rows},
            "mark": "bar",
            "encoding": {"x": {"field": "s", "type": "quantitative"}, "y": {"field": "kernel", "type": "nominal"}},
        }
        figure = Figure(
            "By kernel", "conv1 takes all.", (Panel(spec),), ("kernel", "s"), [tuple(r.values()) for r in rows]
        )
        return Content((figure,), ("Kernels of the device.",))


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Install a distribution with a section under the entry points."""

    def install(value, code, group="deep500_timing.sections", name="theirs"):
        (tmp_path / "their_section.py").write_text(code)
        info = tmp_path / "theirs-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()

    yield install
    sys.modules.pop("their_section", None)


CODE = """
from deep500_timing.ranks import find_stragglers
from deep500_timing.report import Content

class Theirs:
    name, title, place, missing = "theirs", "Theirs & <others>", 35, "Nothing of theirs."

    def build(self, context):
        return Content(text=(f"{context.about.steps} steps <b>",)) if context.about.steps else None
"""


def test_a_section_of_an_entry_point(run, tmp_path, distribution):
    """A class that another distribution registers has its place on the page, its title and text escaped."""
    distribution("their_section:Theirs", CODE)
    write_report(run, tmp_path / "r.html")
    page = Page(tmp_path / "r.html")
    assert ["findings", "tree", "theirs", "over-the-run"] == page.sections[:4]
    assert "Theirs & <others>" in page.text
    assert "40 steps <b>" in page.text


@pytest.mark.parametrize(("table", "shown"), [("kernels", True), ("others", False)])
def test_a_section_of_a_table(run, tmp_path, distribution, table, shown):
    """It is on the page of a run that has the table; for other runs it is not even imported."""
    distribution("their_section:Theirs", CODE, group="deep500_timing.table_sections", name=table)
    write_report(run, tmp_path / "r.html")
    assert shown == ("theirs" in Page(tmp_path / "r.html").sections)
    assert shown == ("their_section" in sys.modules)


def test_a_section_that_is_handed_in(run, tmp_path):
    """It reads its own table, and its chart and numbers are drawn with the others."""
    write_report(run, tmp_path / "r.html", sections=[Layers()])
    page = Page(tmp_path / "r.html")
    assert [*SECTIONS[:-1], "kernels", "not-measured"] == page.sections[1:]
    assert [{"kernel": "conv1", "s": 0.32}] == page.charts[-1]["data"]["values"]


def test_the_section_of_the_documentation(tmp_path):
    """What ``docs/report.md`` shows works as it stands."""
    names = {}
    exec(re.findall(r"^```python\n(.*?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL)[0], names)

    def train(tmr, clock):
        for step in range(5):
            clock.advance_ns(1000)
            tmr._run.sample("loss", 1.0 / (step + 1))

    with _run_of(tmp_path / "run", train) as run:
        _, built = build(run, [names["Losses"]()])
        write_plots(run, tmp_path / "plots", sections=[names["Losses"]()], only=["losses"])
    [content] = [section.content for section in built if section.name == "losses"]
    assert "It ends at 0.2." == content.figures[0].alt
    assert 5 == len(content.figures[0].rows)
    assert ["losses-1.png"] == [path.name for path in (tmp_path / "plots").iterdir()]


class Broken(Layers):
    """A section that fails."""

    name = "broken"

    def build(self, context):
        """Fail."""
        raise RuntimeError("no such luck")


class Empty(Layers):
    """A section without data."""

    name = "empty"

    def build(self, context):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Have nothing."""


def test_a_section_that_fails_costs_itself(run, tmp_path):
    """The page stands; failed sections are named on it and warned of, one without data is named."""
    with pytest.warns(TimingWarning, match="'broken' of the report failed: RuntimeError: no such luck"):
        write_report(run, tmp_path / "r.html", sections=[Broken(), Empty()])
    page = Page(tmp_path / "r.html")
    assert ["findings", *SECTIONS] == page.sections
    assert "It failed: RuntimeError: no such luck" in page.text
    assert "No kernel was recorded." in page.text


@pytest.mark.parametrize(
    ("name", "said"), [("tree", "there is one of that name"), ('a" onclick="x', "letters, digits and hyphens")]
)
def test_a_section_with_a_name_that_will_not_do(run, name, said):
    """It is left out, with a warning."""
    section = Layers()
    section.name = name
    with pytest.warns(TimingWarning, match=said):
        _, built = build(run, [section])
    assert SECTIONS == [section.name for section in built]


# --- files and the command --------------------------------------------------------------------------------------------


def test_plots(run, tmp_path):
    """Each figure is a picture; only those of the sections that are asked for."""
    paths = write_plots(run, tmp_path / "plots", only=["tree", "distributions"])
    assert ["tree-1.png", "tree-2.png", "distributions-1.png"] == [path.rsplit("/", 1)[-1] for path in paths]
    for path in (tmp_path / "plots").iterdir():
        assert b"\x89PNG" == path.read_bytes()[:4]
    paths = write_plots(run, tmp_path / "plots", only=["ranks", "steps"], format="svg")
    text = (tmp_path / "plots" / "ranks-1.svg").read_text()
    assert paths[-1].endswith("ranks-1.svg")
    assert 3 == len(paths)
    assert text.startswith("<svg")
    assert text.count("<path") > 40


def test_a_picture_says_whose_its_colours_are(run, tmp_path):
    """The legend that the page has above its chart, in the picture; names of strangers are its text and no more."""
    (path,) = write_plots(run, tmp_path, only=["over-the-run"], format="svg")
    drawing = ET.parse(path)
    texts = [node.text for node in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert ["FORWARD", "IO", "COMM"] == [text for text in texts if text in ("FORWARD", "IO", "COMM")]
    assert [True] == ["script" in text for text in texts if text and "alert" in text]


def test_plots_that_are_not_there(run, tmp_path):
    """Existing columns are named."""
    with pytest.raises(LookupError) as error:
        write_plots(run, tmp_path, only=["layers"])
    assert error.value.args[0].startswith("Drawing 'layers': the run has charts for tree, over-the-run")
    with pytest.raises(ValueError, match="use 'png' or 'svg'"):
        write_plots(run, tmp_path, format="gif")  # pyright: ignore[reportArgumentType]


def test_the_commands(trained, tmp_path, capsys, monkeypatch):
    """They say where their files are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").symlink_to(trained[0])
    assert 0 == main(["report", "digits/"])
    assert "digits.html\n" == capsys.readouterr().out
    assert 0 == main(["plot", "digits", "--only", "tree", "--format", "svg"])
    assert ["digits-plots/tree-1.svg", "digits-plots/tree-2.svg"] == capsys.readouterr().out.split()
    assert 1 == main(["plot", "digits", "--only", "nothing"])
    assert 1 == main(["report", "nowhere"])
    assert {"digits", "digits.html", "digits-plots"} == {path.name for path in tmp_path.iterdir()}


def test_stopped_halfway(run, tmp_path, monkeypatch):
    """Ctrl-C leaves the page that was there."""

    def stop(done, of):
        if done:
            raise KeyboardInterrupt

    (tmp_path / "r.html").write_text("of yesterday")
    monkeypatch.setattr(progress, "show", stop)
    with pytest.raises(KeyboardInterrupt):
        write_report(run, tmp_path / "r.html")
    assert ["of yesterday"] == [path.read_text() for path in tmp_path.iterdir()]


def test_without_the_extra(run, tmp_path, monkeypatch):
    """The error says what to install, and leaves no file."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingPackageError) as error:
        write_report(run, tmp_path / "r.html")
    assert "Writing a report requires jinja2; pip install 'deep500-timing[report]'" == str(error.value)
    assert [] == list(tmp_path.iterdir())


def test_colours():
    """Regions that are in every run have their colours always; no other gets one of theirs that is in use."""
    colours = colours_of(["FORWARD", "mine", "IO", "yours"])
    assert ("#0072b2", "#d08400") == (colours["FORWARD"], colours["IO"])
    assert 4 == len(set(colours.values()))
    assert ("#ffffff", "#000000") == (on("#0072b2"), on("#d08400"))


@pytest.mark.parametrize("colour", sorted({GREY, ALARM, *_OTHERS, *REGION_COLOURS.values(), *_PARTS.values()}))
def test_each_colour_stands_out_from_both_papers(colour):
    """The Web's guideline for graphics asks for 3 : 1."""
    for paper in ("#ffffff", "#14171a"):
        low, high = sorted(map(luminance_of, (colour, paper)))
        assert (high + 0.05) / (low + 0.05) >= 3.0


def test_the_javascript_is_bundled_once_for_a_version(monkeypatch, tmp_path):
    """A page takes it from the cache; another version, and a cache that cannot be used, have it bundled."""
    vl_convert = pytest.importorskip("vl_convert")
    made = []
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda: made.append(1) or f"// é {len(made)}")
    monkeypatch.setenv("DEEP500_TIMING_CACHE", str(tmp_path / "new" / "cache"))
    assert ["// é 1"] * 3 == [_javascript() for _ in range(3)]
    monkeypatch.setattr(vl_convert, "__version__", "0")
    assert ["// é 2"] * 2 == [_javascript() for _ in range(2)]
    (tmp_path / "new" / "cache" / "vega-0.js").write_bytes(b"\xff")
    assert ["// é 3"] * 2 == [_javascript() for _ in range(2)]
    (tmp_path / "file").touch()
    monkeypatch.setenv("DEEP500_TIMING_CACHE", str(tmp_path / "file" / "below"))
    assert ["// é 4", "// é 5"] == [_javascript() for _ in range(2)]
