"""Every subcommand as someone tries it who has read nothing: the error is said in one line and by exit code."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import made_rank

from deep500_timing import Timer
from deep500_timing._command import _app, doctor
from deep500_timing._command._app import COMMANDS, main
from deep500_timing._summary.text import width_of
from deep500_timing._views.reports import report_of_run
from deep500_timing._views.table import render
from deep500_timing.runs import Run, RunLog, _worlds
from deep500_timing.testing import ManualClock

pytestmark = pytest.mark.slow

HOSTILE = "\x1b]0;owned\x07\x1b[31mred\u202e\n<script>[bold]"
ESCAPE = "\x1b"
OF_A_RUN = ("show", "top")
WRITES = {"report": "{}.html", "timeline": "{}.json", "plot": "{}-plots/tree-1.png"}
"""What each command that writes is to leave next to a run."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Runs as they come: none, empty, of one interval, of hostile names, cut short."""
    base = tmp_path_factory.mktemp("as they come")
    (base / "no run").mkdir()
    (base / "empty").mkdir()
    (base / "empty" / "rank-00000.d5log").touch()
    with made_rank(base / "one") as made:
        made.spend("BATCH", 0.25)
    with made_rank(base / "hostile") as made:
        for _ in range(30):
            with made.region("BATCH", 0.001):
                made.spend(HOSTILE, 0.01)
                made.spend("漢字 größe 🚀", 0.02)
    with made_rank(base / "cut") as made:
        for _ in range(200):
            made.spend("BATCH", 0.01)
            made.log.flush()
    (log,) = (base / "cut").glob("*.d5log")
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    return base


@pytest.fixture
def call(capsys, monkeypatch):
    """Run the command: its exit code, its output and its errors."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments):
        code = main(list(map(str, arguments)))
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def killed(monkeypatch):
    """The process of each log has ended; it is the tests' own."""
    monkeypatch.setattr("deep500_timing._views.about.is_running", lambda header: False)


def test_without_arguments_it_lists_its_commands(call):
    """Each under its purpose with its task, and the exit statuses."""
    _, out, err = call()
    assert all(command.help.partition(".")[0] in out + err for command in COMMANDS.values())
    assert all(f"{purpose}:" in out + err for purpose in _app.GROUPS)
    assert "Exit status: 0 done; 1" in out + err


def test_the_page_that_a_table_names(call):
    """An installation has it too; it explains the table's last line."""
    code, out, _ = call("help", "reading")
    assert (0, "# How to read the output") == (code, out.splitlines()[0])
    assert "No interval failed or was dropped. Help:" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_helps(call, name):
    """``--help`` says a command's purpose, before anything is read."""
    code, out, _ = call(name, "--help")
    assert code == 0
    assert out.startswith("Usage: ")
    assert (0, out) == call("help", name)[:2]


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in _app.EXAMPLES.items() for line in lines])
def test_each_example_of_a_help_is_accepted(name, line, call, one, monkeypatch):
    """Its arguments are those of the command, and it names the command under which it stands."""
    (one.parent / "runs").mkdir()
    one.rename(one.parent / "runs" / "first")
    words = shlex.split(line)
    command = COMMANDS[name]
    assert name == words[0]
    assert f"  deep500-timing {line}\n" in call(name, "--help")[1]
    with command.make_context(name, words[1:]) as context:
        assert context.params


OF_THE_LAST_RUN = [
    name for name in COMMANDS if name not in ("run", "try", "ab", "bisect", "compare", "history", "doctor")
]


@pytest.mark.parametrize("name", OF_THE_LAST_RUN)
def test_without_a_folder_it_is_the_last_run(call, folders, tmp_path, monkeypatch, name):
    """The one in ``runs/`` whose logs are the newest is taken and named; an older one that was read since is not."""
    monkeypatch.chdir(tmp_path)
    for age, run in enumerate(("new", "old")):
        shutil.copytree(folders / "hostile", tmp_path / "runs" / run)
        for log in (tmp_path / "runs" / run).glob("*.d5log"):
            os.utime(log, (10**9 - age, 10**9 - age))
    code, out, err = call(name, *(["--only", "tree"] if name == "plot" else []))
    assert (0, f"{Path('runs/new')} (the last run)") == (code, err.splitlines()[0])
    assert out


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("sh", ["plain,show"]), ("show ", ["dir,"]), ("run tr", ["file,tr"]), ("ab -n 4 -- python tr", ["file,tr"])],
)
def test_a_shell_completes(capsys, monkeypatch, typed, offered):
    """Names of commands, folders of runs, and the files of a program."""
    monkeypatch.setenv("_DEEP500_TIMING_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"deep500-timing {typed}")
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split(" "))))
    with pytest.raises(SystemExit):
        main([])
    assert offered == capsys.readouterr().out.splitlines()


def test_a_step_alone_is_one_of_the_last_run(call, folders, tmp_path, monkeypatch):
    """``why 3`` is step 3 of it, unless a folder has that name."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folders / "hostile", tmp_path / "runs" / "first")
    assert call("why", "runs/first", 3)[1] == call("why", 3)[1]
    shutil.copytree(folders / "hostile", tmp_path / "3")
    assert (0, "") == call("why", 3)[::2]


@pytest.mark.parametrize("name", OF_THE_LAST_RUN)
def test_without_a_folder_and_without_a_run(call, tmp_path, monkeypatch, name):
    """The exit status is that of wrong arguments, with what writes a run."""
    monkeypatch.chdir(tmp_path)
    code, out, err = call(name)
    assert (_app.WRONG_USE, "") == (code, out)
    assert "Missing argument 'FOLDER'" in err
    assert "deep500-timing run train.py" in err


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["show", "nowhere"], _app.WRONG_DATA), (["why", "nowhere", "x"], _app.WRONG_USE), (["shwo"], _app.WRONG_USE)],
)
def test_an_error_as_json(call, tmp_path, monkeypatch, arguments, status):
    """It is the terminal's text, with the exit status, next to the line on the error stream."""
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*arguments, "--json")
    said = json.loads(out)
    assert (status, status, "deep500-timing.error/1") == (code, said["status"], said["schema"])
    assert said["error"] in err


def test_the_json_of_a_program_is_its_own(call):
    """An error of `ab` is JSON where `ab` is asked for it, not where the command behind ``--`` is."""
    code, out, err = call("ab", "--", "train.py", "--json")
    assert (_app.WRONG_USE, "") == (code, out)
    assert "Both sides are the same command" in err


@pytest.mark.parametrize(
    ("arguments", "variables", "coloured"),
    [
        ([], {}, False),
        ([], {"FORCE_COLOR": "1"}, True),
        (["--color", "always"], {"NO_COLOR": "1"}, True),
        (["--color", "never"], {"FORCE_COLOR": "1"}, False),
    ],
)
def test_colours_in_a_pipe(call, folders, monkeypatch, arguments, variables, coloured):
    """None but by FORCE_COLOR or ``--color always``."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TERM", "xterm-256color")
    _, out, _ = call(*arguments, "show", folders / "one")
    assert coloured == (ESCAPE in out)


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [("shwo", "Did you mean 'deep500-timing show'?"), ("xyz", "deep500-timing --help lists the commands.")],
)
def test_a_command_that_is_none(call, typed, remedy):
    """Near names are offered."""
    code, _, err = call(typed)
    assert _app.WRONG_USE == code
    assert remedy in err


def test_a_folder_in_the_place_of_a_command(call, folders):
    """The folder alone is answered with the right command."""
    _, _, err = call(folders / "one")
    assert "Did you mean 'deep500-timing show" in err


@pytest.mark.parametrize("name", [*OF_A_RUN, *WRITES])
@pytest.mark.parametrize(("folder", "said"), [("nowhere", "it is no folder"), ("no run", "it holds no log")])
def test_a_wrong_path(call, folders, name, folder, said):
    """One line with the error and the way to write a run; no traceback, nothing on the output."""
    code, out, err = call(name, folders / folder)
    assert (_app.WRONG_DATA, "") == (code, out)
    assert 1 == len(err.splitlines())
    assert said in err
    assert "deep500-timing run --run" in err


def test_the_folder_of_several_runs(call, folders, tmp_path):
    """Its name is answered with the runs in it, the newest first, and not that a timer could write one."""
    for age, name in enumerate(["e", "d", "c", "b", "größe 漢字"]):
        shutil.copytree(folders / "one", tmp_path / name)
        for log in (tmp_path / name).glob("*.d5log"):
            os.utime(log, (10**9 - age, 10**9 - age))
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").touch()
    code, out, err = call("why", tmp_path)
    assert (_app.WRONG_DATA, "") == (code, out)
    names = ", ".join(repr(str(tmp_path / name)) for name in "edc")
    assert f"Error: Opening the run {str(tmp_path)!r}: it holds no log (*.d5log). " in err
    assert f"Name one of the runs in it: {names} and 2 more." in err


def test_runs_side_by_side(call, folders, tmp_path):
    """``show`` lists the runs in a folder; where it holds one itself, that is shown as well."""
    for name in ("2", "other"):
        shutil.copytree(folders / "one", tmp_path / name)
    code, out, _ = call("show", tmp_path)
    assert (0, "2 runs side by side") == (code, out[:19])
    assert {str(tmp_path / name) for name in ("2", "other")} <= {line.split("  ")[0] for line in out.splitlines()}
    assert 2 == len(json.loads(call("show", tmp_path, "--json")[1])["beside"])
    shutil.copytree(folders / "one", tmp_path, dirs_exist_ok=True)
    assert call("show", tmp_path)[1].startswith("3 runs side by side")
    assert "Page: deep500-timing report" in call("show", tmp_path)[1]
    said = json.loads(call("show", tmp_path, "--json")[1])
    assert (3, tmp_path.name) == (len(said["beside"]), said["run"]["name"])
    assert "complete steps" in call("compare", tmp_path, tmp_path / "2")[2]  # it takes both; they are short


def test_a_folder_whose_name_the_locale_cannot_read(call, folders, tmp_path):
    """As Python has it where the locale is POSIX: one line with the remedy."""
    folder = tmp_path / "l\udcc3\udca4uf"
    shutil.copytree(folders / "one", folder)
    code, out, err = call("show", folder)
    assert (_app.WRONG_DATA, "") == (code, out)
    assert "not valid in this locale" in err
    assert "PYTHONUTF8=1" in err


@pytest.mark.parametrize("name", OF_A_RUN)
@pytest.mark.parametrize("folder", ["empty", "one", "cut", "hostile"])
def test_a_run_of_any_kind_is_shown(call, folders, name, folder):
    """With nothing in it, one interval, a log that ends in the middle, names that are none: no error."""
    code, out, err = call(name, folders / folder)
    assert (0, "") == (code, err)
    assert ESCAPE not in out
    assert "\u202e" not in out


@pytest.fixture
def one(folders, tmp_path, monkeypatch):
    """A copy of the run of one interval, next to which nothing lies, in the folder in which commands are called."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folders / "one", tmp_path / "größe 漢字")
    return tmp_path / "größe 漢字"


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("folder", ["one", "cut", "hostile"])
def test_a_run_of_any_kind_is_written(call, folders, tmp_path, monkeypatch, name, folder):
    """Next to the run if nothing else is asked for; its path is all that is said."""
    shutil.copytree(folders / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    code, out, err = call(name, folder, *(["--only", "tree"] if name == "plot" else []))
    assert (0, WRITES[name].format(folder) + "\n", "") == (code, out, err)
    assert (tmp_path / out.strip()).stat().st_size > 0


@pytest.mark.parametrize("name", WRITES)
def test_what_was_written_as_json(call, one, name):
    """Path and size of each file, in ASCII."""
    code, out, _ = call(name, one.name, "--json", *(["--only", "tree"] if name == "plot" else []))
    path = WRITES[name].format(one.name)
    assert (0, True) == (code, out.isascii())
    files = [{"path": path, "bytes": Path(path).stat().st_size}]
    assert {"schema": f"deep500-timing.{name}/1", "files": files} == json.loads(out)


@pytest.mark.parametrize("name", WRITES)
def test_the_folder_in_which_one_stands(call, one, monkeypatch, name):
    """``.`` is a run as well: its name is the folder's, and the output lies next to it."""
    monkeypatch.chdir(one)
    code, out, _ = call(name, ".", *(["--only", "tree"] if name == "plot" else []))
    assert (0, WRITES[name].format(one)) == (code, out.strip())
    assert call("show", ".")[1].startswith("größe 漢字 · ")


def test_an_empty_run_has_a_page_and_a_timeline_and_no_plots(call, folders, tmp_path):
    """The page says the missing parts; of plots there would be none, and no folder is made for them."""
    for name in ("report", "timeline"):
        assert 0 == call(name, folders / "empty", tmp_path / name)[0]
    code, out, err = call("plot", folders / "empty", tmp_path / "plots")
    assert (_app.WRONG_DATA, "") == (code, out)
    assert err.endswith("the run has nothing to draw yet.\n")
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize("name", ["report", "timeline"])
def test_where_nothing_can_be_written(call, one, name):
    """In one line, by the path that was asked for: a folder in the place of a file, a folder that is not there."""
    for target, said in ((one.parent, "is a folder; name a file in it"), ("no/where", "No such file or directory")):
        code, out, err = call(name, one.name, target)
        assert (_app.WRONG_DATA, "", f"Error: {target}: {said}\n") == (code, out, err)
    assert [one] == list(one.parent.iterdir())


@pytest.mark.parametrize("found", [True, False])
def test_a_report_is_opened(call, one, monkeypatch, found):
    """By its address. Where no browser is there, that is said, and the page is written."""
    asked = []
    monkeypatch.setattr("webbrowser.open", lambda address: asked.append(address) or found)
    code, out, err = call("report", one.name, "--open")
    assert [Path(f"{one}.html").as_uri()] == asked
    assert (0 if found else _app.WRONG_DATA, f"{one.name}.html\n") == (code, out)
    assert ("no browser was found. The page is written." in err) is not found


def test_steps_that_are_none_have_no_timeline(call, folders, tmp_path):
    """The steps there are are named, and no file is left."""
    code, _, err = call("timeline", folders / "hostile", tmp_path / "t.json", "--steps", "99:120")
    assert _app.WRONG_DATA == code
    assert "Error: Showing steps 99 to 120: the run has steps from 0 to 29.\n" == err
    assert [] == list(tmp_path.iterdir())


def test_an_empty_run_says_so(call, folders):
    """It is not shown as a table without rows."""
    _, out, _ = call("show", folders / "empty")
    assert "nothing is recorded yet" in out


def test_one_interval(call, folders):
    """One time has a total and nothing that would need more."""
    _, out, _ = call("show", folders / "one")
    assert "BATCH   250 ms      1" in out
    assert "median" not in out


@pytest.mark.parametrize(
    ("ends", "state"),
    [
        (("RuntimeError", "closed"), "complete"),
        ((None, "exit"), "complete"),
        (("closed", "RuntimeError"), "ended by RuntimeError"),
        (("closed", None), "not ended: killed, or running"),
        ((None, None, "closed"), "complete"),
    ],
)
def test_a_run_that_was_started_anew(call, killed, tmp_path, ends, state):
    """How its newest start ended is how it ended, on the terminal and on the page; what was before is not forgotten."""
    for end in ends:
        timer = Timer(clock=ManualClock())
        log = RunLog(tmp_path / "run", timer, rank=0, flush_s=None)
        timer.record("BATCH", 0, 1)
        log.flush()
        written = {path: path.stat().st_size for path in (tmp_path / "run").glob("*.d5log")}
        log.close(reason=end or "")
        if end is None:  # A killed run has no end.
            for path, size in written.items():
                os.truncate(path, size)
    _, out, _ = call("show", tmp_path / "run")
    title = out.splitlines()[0].split(" · ")
    assert (state, True) == (title[-1], f"{len(ends)} sessions" in title)
    call("report", tmp_path / "run", tmp_path / "r.html")
    source = (tmp_path / "r.html").read_text()
    assert state in source[source.index("<header") : source.index("</header>")]
    earlier = ", ".join(sorted({end or "killed" for end in ends[:-1]}))
    assert re.search(rf"<td>earlier starts ended</td>\s*<td>{earlier}</td>", source)


@pytest.mark.parametrize(
    ("host", "start_ns", "state"),
    [
        (socket.gethostname(), 0, "running"),
        ("elsewhere", 0, "not ended: killed, or running"),
        (socket.gethostname(), 3600 * 10**9, "not ended: killed, or running"),  # Its number is another process's today.
        (socket.gethostname(), None, "not ended: killed, or running"),
    ],
)
def test_a_run_that_is_being_written(call, monkeypatch, tmp_path, host, start_ns, state):
    """It is called running where its process runs on this host, in each view; elsewhere that is not known."""
    began_ns = _worlds.process_start_unix_ns()
    timer = Timer(clock=ManualClock())
    log = RunLog(tmp_path / "run", timer, rank=0, flush_s=None)
    timer.record("BATCH", 0, 1)
    log.flush()
    monkeypatch.setattr(_worlds.socket, "gethostname", lambda: host)
    monkeypatch.setattr(_worlds, "process_start_unix_ns", lambda pid: None if start_ns is None else began_ns + start_ns)
    for command in ("show", "top"):
        assert call(command, tmp_path / "run")[1].splitlines()[0].endswith(f" · {state}")
    assert json.loads(call("top", tmp_path / "run", "--json")[1])["run"]["running"] is (state == "running")
    log.close()


def test_two_starts_at_the_same_time(call, killed, tmp_path):
    """Neither takes the other's place: while one of them runs, or was killed, the run has not ended."""
    timers = [Timer(clock=ManualClock()) for _ in range(2)]
    logs = [RunLog(tmp_path / "run", timer, rank=0, flush_s=None) for timer in timers]
    for timer in timers:
        timer.record("BATCH", 0, 3600 * 10**9)
    logs[0].flush()
    logs[1].close()
    _, out, _ = call("show", tmp_path / "run")
    assert "not ended: killed, or running" in out
    logs[0].close()


def test_a_log_that_ends_in_the_middle_says_so(call, killed, folders):
    """The read part is shown, and that the run has not ended as it should."""
    _, out, _ = call("show", folders / "cut")
    assert "not ended: killed, or running" in out
    assert "BATCH" in out


def test_names_cannot_steer_the_terminal(call, folders):
    """Escapes, line ends and changes of direction are shown as codes, everywhere."""
    for arguments in (["show", folders / "hostile"], ["show", folders / "hostile", "--json"]):
        _, out, _ = call(*arguments)
        assert ESCAPE not in out
        assert "\x07" not in out
        assert r"\x1b]0;owned" in out or r"\u001b]0;owned" in out
    _, out, _ = call("why", folders / "hostile", 3)
    assert ESCAPE not in out


@pytest.mark.parametrize("name", ["show", "top", "doctor"])
def test_json_is_json(call, folders, name):
    """Plain data in ASCII, for any run."""
    arguments = [folders / "hostile"] if name in OF_A_RUN else []
    code, out, _ = call(name, *arguments, "--json")
    assert code == 0
    assert out.isascii()
    assert f"deep500-timing.{name}/1" == json.loads(out)["schema"]


def test_show_as_json_has_the_tree(call, folders):
    """The facts of the run, the findings, and the regions with what lies in them."""
    _, out, _ = call("show", folders / "hostile", "--json")
    shown = json.loads(out)
    assert {"schema", "run", "rank", "findings", "verdict", "regions", "notes"} == set(shown)
    (batch,) = shown["regions"]
    assert ["漢字 größe 🚀", HOSTILE, "the rest"] == [child["name"] for child in batch["children"]]
    assert 30 == batch["count"]


def test_a_finding_that_is_none_cannot_be_switched_off(call, folders):
    """The rules there are are named."""
    code, _, err = call("show", folders / "one", "--off", "nonsense")
    assert _app.WRONG_USE == code
    assert "waits-for-data" in err


@pytest.mark.parametrize("width", [40, 80, 120])
def test_lines_are_broken_where_nothing_is_lost(folders, width):
    """A heading between its parts, where each fits on a line; a command to be copied nowhere."""
    with Run.open(folders / "hostile") as run:
        report = report_of_run(run)
        lines = render(report, width=width).splitlines()
    heading = lines[: lines.index("")]
    whole = " · ".join(report.title)
    assert whole == " ".join(heading)
    assert all(line.endswith(" ·") for line in heading[:-1])
    assert all(width_of(line) <= width for line in heading)
    command = f"deep500-timing report {shlex.quote(str(folders / 'hostile'))}"
    assert [command] == [line[line.index(command) :] for line in lines if command in line]


def test_without_click_the_command_says_what_installs_it(folders):
    """In one line, without a traceback."""
    program = (
        "import runpy, sys; sys.modules['click'] = None; sys.argv = ['deep500-timing', 'show', 'x']; "
        "runpy.run_module('deep500_timing', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert 1 == done.returncode
    said = "Error: The command deep500-timing requires click; pip install 'deep500-timing[runs]'\n"
    assert ("", said) == (done.stdout, done.stderr)


def test_a_package_that_another_distribution_brings_is_not_missing(monkeypatch):
    """TensorFlow for the processor alone is TensorFlow."""
    versions = {"tensorflow-cpu": "2.21.0", "deep500-timing": "1"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: {"tensorflow": ["tensorflow-cpu"]})
    monkeypatch.setattr(
        "importlib.metadata.requires", lambda name: ["tensorflow; extra == 'tf'", "numba; extra == 'jit'"]
    )
    assert {"tf": {"tensorflow": "2.21.0 (tensorflow-cpu)"}, "jit": {"numba": None}} == doctor._extras()


def test_the_machine_in_eighty_columns(call):
    """The present parts, and those that a missing package would give, with the command; only a path is not broken."""
    code, out, _ = call("doctor")
    assert (0, []) == (code, [line for line in out.splitlines() if width_of(line) > 80 and " " in line.strip()])
    every = doctor._extras()
    assert {*every} <= doctor._GIVES.keys()
    missing = {extra for extra, needed in every.items() if None in needed.values()}
    assert missing == {one for one in every if f"pip install 'deep500-timing[{one}]'" in " ".join(out.split())}


def test_a_step_that_is_none(call, folders):
    """The steps there are are named."""
    code, _, err = call("why", folders / "hostile", 999)
    assert _app.WRONG_DATA == code
    assert "it has steps from 0 to 29" in err


def test_ctrl_c_is_no_traceback(call, folders, monkeypatch):
    """The exit code is the shell's for it."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("deep500_timing._views.reports.report_of_run", interrupted)
    code, _, err = call("show", folders / "one")
    assert _app.INTERRUPTED == code
    assert "Traceback" not in err


class Terminal:
    """A stream that says it is a terminal, in memory."""

    encoding = "utf-8"

    def __init__(self):
        """Nothing is written yet."""
        self.text = ""

    def isatty(self):
        """It is one."""
        return True

    def write(self, text):
        """Keep the text."""
        self.text += text
        return len(text)

    def flush(self):
        """Nothing is held back."""


@pytest.mark.parametrize("words", ["why hostile", "show hostile --json", "stragglers hostile", "goodput hostile"])
def test_the_message_of_a_reading_is_gone_before_the_answer(folders, monkeypatch, words):
    """An answer does not stand behind it in one line of the terminal."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.chdir(folders)
    terminal, before = Terminal(), []
    monkeypatch.setattr(sys, "stderr", terminal)
    for name in ("say", "print_json"):
        monkeypatch.setattr(f"deep500_timing._command.runs.{name}", lambda *_, **_more: before.append(terminal.text))
    assert 0 == main(words.split())
    assert [True] == [text.endswith("\r\x1b[K") for text in before]


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("kind", ["xterm-256color", "dumb"])
def test_any_width_and_any_terminal(folders, monkeypatch, width, kind):
    """No line is wider than the terminal; one that is dumb gets no escape sequence."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", kind)
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert 0 == main(["show", str(folders / "hostile"), "--off", "lost"])
    monkeypatch.undo()
    assert (ESCAPE in terminal.text) == (kind != "dumb")
    shown = re.sub(r"\x1b\[[0-9;]*m", "", terminal.text)
    assert ESCAPE not in shown
    # A command is left whole, to be copied, and so is a path.
    lines = [line for line in shown.splitlines() if "deep500-timing" not in line and "/" not in line]
    assert max(map(width_of, lines)) <= width


@pytest.mark.parametrize(("kind", "width"), [("xterm-256color", 40), ("xterm-256color", 200), ("dumb", 80)])
def test_progress_is_shown_to_those_who_wait(one, monkeypatch, capsys, kind, width):
    """No wider than the terminal; a dumb one gets none. It is of the error stream: the output is the path."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", kind)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    code = main(["timeline", one.name])
    monkeypatch.undo()
    assert (0, f"{one.name}.json") == (code, capsys.readouterr().out.strip())
    assert ("timeline" in terminal.text) == (kind != "dumb")
    shown = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", terminal.text)
    assert ESCAPE not in shown
    assert max(map(width_of, re.split(r"[\r\n]", shown))) <= width


def test_without_colour(folders, monkeypatch):
    """NO_COLOR leaves bold and dim, which are none."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert 0 == main(["show", str(folders / "hostile")])
    monkeypatch.undo()
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", terminal.text)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "file"), [("show", None), ("timeline", "t.json")])
def test_a_pipe_that_is_closed_early(folders, tmp_path, name, file):
    """``| head -1`` is no error: no traceback, and nothing on the error stream."""
    target = [str(tmp_path / file)] if file else []
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "deep500_timing", name, str(folders / "hostile"), *target],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    os.close(writer)
    assert "" == done.stderr
    assert 0 == done.returncode


@pytest.mark.slow
def test_completion_for_the_shell():
    """Click's own: the commands that begin with the typed word."""
    done = subprocess.run(
        [sys.executable, "-c", "from deep500_timing._command._app import main; main()"],
        env={
            **os.environ,
            "_DEEP500_TIMING_COMPLETE": "bash_complete",
            "COMP_WORDS": "deep500-timing sh",
            "COMP_CWORD": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ["plain,show"] == done.stdout.split()


def test_top_draws_until_the_run_has_ended(folders, monkeypatch):
    """On a terminal it draws as much as there is room for, reads new blocks, and ends with the run and all of it."""
    from deep500_timing._command import runs

    folder = folders / "live"
    terminal = Terminal()
    with made_rank(folder) as made:
        for number in range(30):
            made.spend(f"part {number}", 1.0)
        made.log.flush()

        def a_while(_):
            made.spend("BATCH", 1.0)
            made.log.close()

        monkeypatch.setattr(runs.time, "sleep", a_while)
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setenv("LINES", "12")
        assert 0 == main(["top", str(folder)])
        monkeypatch.undo()
    first, second = terminal.text.split("\x1b[H\x1b[J")[1:]
    assert re.search(r"running.*more lines; --once shows them.*Ctrl-C ends", first, re.DOTALL)
    assert not re.search("Ctrl-C ends|--once", second)
    assert "complete" in second
