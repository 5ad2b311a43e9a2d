"""The command shows a run and says why a step was slow; an error is in one line."""

from __future__ import annotations

from unittest import mock

import pytest

from deep500_timing import Timer, TimeType
from deep500_timing._command._app import main
from deep500_timing.runs import Run, RunLog
from deep500_timing.testing import ManualClock


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two ranks, 30 steps each, one of them slow."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    # Versions are of the process's imports, of any earlier tests.
    with (
        mock.patch("deep500_timing._summary.snapshot.time.time_ns", return_value=1_700_000_000_000_000_000),
        mock.patch("deep500_timing.runs._header._versions", return_value={}),
    ):
        _train(folder)
    return folder


def _train(folder):
    for rank in range(2):
        clock = ManualClock()
        tmr = Timer(clock=clock)
        with RunLog(folder, tmr, rank=rank, flush_s=None), tmr.region(TimeType.EPOCH):
            for step in range(30):
                with tmr.region(TimeType.BATCH):
                    with tmr.region(TimeType.FORWARD):
                        clock.advance_ns(10**6 * (90 if step == 7 else 30))
                    with tmr.region("a\nb"):
                        clock.advance_ns(10**6)
                    clock.advance_ns(500_000)


@pytest.fixture
def call(capsys):
    """Run the command: its exit code, and its output."""

    def run(*arguments):
        code = main(list(map(str, arguments)))
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def test_show(call, folder):
    """The run in one line, the tree with shares and rests, and their rank."""
    code, text = call("show", folder)
    help_and_page = f"Help: deep500-timing help reading. Page: deep500-timing report {folder}"
    expected = f"""\
digits · 2 ranks on 1 host · 1 epoch, 30 steps · 1.00 s · CPU only · complete

  Nothing stands out: training is 100 % of the run; 96 % of BATCH is FORWARD.

region            total  share  count   median      p95  ranks min / median / max  over the run
EPOCH           1.00 s              1                       1.00 / 1.00 / 1.00 s
└─ BATCH        1.00 s   100 %     30  31.6 ms  31.6 ms     1.00 / 1.00 / 1.00 s   ▃▃▃█▃▃▃▃▃▃▃▃▃▃▃
   ├─ FORWARD   0.96 s    96 %     30  30.0 ms  30.0 ms        960 / 960 / 960 ms  ▃▃▃█▃▃▃▃▃▃▃▃▃▃▃
   ├─ a\\nb      30.0 ms    3 %     30   1.0 ms   1.0 ms     30.0 / 30.0 / 30.0 ms  ▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃
   └─ the rest  15.0 ms    1 %

Times of rank 0, on the CPU. No interval failed or was dropped. Rank 1: --rank 1. {help_and_page}
"""
    assert (0, expected) == (code, text)


def test_why(call, folder):
    """A step next to its neighbours."""
    code, text = call("why", folder, 7)
    assert code == 0
    assert text.splitlines() == [
        "Step 7 took 91.50 ms; its neighbours take 31.50 ms (median of 29).",
        "  + 60.00 ms  FORWARD on rank 0",
        "  FORWARD took 90.00 ms (30.00 ms as a rule)",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "nowhere"), "Opening the run 'nowhere': it is no folder."),
        (("show", "{}", "--rank", "9"), "Showing rank 9: the run has ranks 0, 1."),
        (("why", "{}", "999"), "the run has no such step; it has steps from 0 to 29"),
    ],
)
def test_what_cannot_be_shown(call, folder, arguments, said):
    """An error is one line and no traceback."""
    code, text = call(*(argument.format(folder) for argument in arguments))
    assert code == 1
    assert text.startswith("Error: ")
    assert said in text
    assert 1 == len(text.splitlines())


def test_why_without_a_step_takes_the_slowest(call, folder):
    """The first step, which pays for the start, is left out."""
    code, text = call("why", folder)
    assert 0 == code
    assert text.startswith("Step 7 took ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-o", "{}/page.pdf"), "does not end in .html: name it .html."),
        (("{}/page.png",), "deep500-timing plot writes pictures."),
        (("{}/a.html", "-o", "{}/b.html"), "The file is named twice"),
    ],
)
def test_a_report_is_a_page(call, folder, tmp_path, arguments, said):
    """A name that is no page's is refused, and so are two names."""
    code, text = call("report", folder, *(argument.format(tmp_path) for argument in arguments))
    assert 2 == code
    assert said in text
    assert not list(tmp_path.iterdir())


def test_a_report_goes_where_it_is_told(call, folder, tmp_path):
    """The usual option names the file."""
    pytest.importorskip("vl_convert")
    assert (0, f"{tmp_path}/page.html\n") == call("report", folder, "-o", tmp_path / "page.html")
    assert (tmp_path / "page.html").exists()


def test_the_line_of_a_running_training(tmp_path):
    """Speed over the last steps, the last step, and how old the data are."""
    from deep500_timing._views.about import about_run, live_line

    clock = ManualClock()
    tmr = Timer(clock=clock)
    with RunLog(tmp_path, tmr, rank=0, flush_s=None):
        for _ in range(40):
            with tmr.region("BATCH"):
                clock.advance(0.25)
    with Run.open(tmp_path) as run:
        about = about_run(run)
        end = about.first_unix_s + about.wall_s
        assert "4 steps/s · last step 39 · data 3.000 s old" == live_line(run, now_unix_s=end + 3)
        assert live_line(run, now_unix_s=end + 100).endswith("old; perhaps killed")
