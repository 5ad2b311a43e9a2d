"""Programs that are forked off a server: they differ in nothing that a test of ranks looks at from an interpreter's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import suite_forks
import suite_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not suite_forks.AVAILABLE, reason="a process cannot be forked and watched here"),
]

# A program's description of itself.
SELF = """
import atexit, json, os, pickle, sys
class Own: pass
def kind(): return type(pickle.loads(pickle.dumps(Own()))) is Own
atexit.register(print, "at exit")
print(json.dumps({
    "name": __name__, "file": globals().get("__file__"), "path": sys.path[0], "arguments": sys.argv,
    "environment": os.environ["OWN"], "searched": sys.path[1:], "absent": "ABSENT" in os.environ, "folder": os.getcwd(),
    "input": sys.stdin.read(), "pickles": kind(), "main": sys.modules["__main__"].__dict__ is globals(),
}), flush=True)
"""


@pytest.fixture(scope="module")
def server():
    """One that has imported little."""
    server = suite_forks.Server(["json"], {"ABSENT": "in a program"})
    yield server
    server.close()


@pytest.mark.parametrize("is_text", [True, False], ids=["text", "script"])
def test_a_fork_is_as_an_interpreter_of_its_own(server, tmp_path, monkeypatch, is_text):
    """Its name, arguments, environment, folder, input and search path are the same, and it ends as one does."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "program.py"
    script.write_text(SELF, encoding="utf-8")
    command = [*(["-c", SELF] if is_text else [str(script)]), "one", "two words"]
    environment = {**os.environ, "OWN": "value", "PYTHONPATH": os.pathsep.join(["its", "own"])}
    said = []
    for name, start in (("fork", server.start), ("interpreter", suite_ranks.interpreter)):
        output = tmp_path / name
        assert 0 == start(command, environment, output).wait(300), output.read_text()
        first, last = output.read_text().splitlines()
        assert "at exit" == last
        said.append(json.loads(first))
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("program", "status", "text"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise ValueError('as intended')", 1, "ValueError: as intended"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os; os._exit(7)", 7, ""),
    ],
    ids=["exit", "error", "signal", "at once"],
)
def test_how_it_ends_is_told(server, tmp_path, program, status, text):
    """Exit statuses, errors with their text and deaths by a signal, as ``subprocess`` gives them."""
    output = tmp_path / "output"
    fork = server.start(["-c", program], {**os.environ}, output)
    assert status == fork.wait(300) == fork.returncode == fork.poll()
    assert text in output.read_text()


def test_forks_run_beside_each_other(server, tmp_path):
    """One that waits keeps no other from its end; it can be stopped, and killed while it stands still."""
    waiting = server.start(["-c", "import threading; threading.Event().wait()"], {**os.environ}, tmp_path / "waits")
    other = server.start(["-c", "print('done')"], {**os.environ}, tmp_path / "ends")
    assert 0 == other.wait(300)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.01)
    waiting.send_signal(signal.SIGSTOP)
    assert waiting.poll() is None
    waiting.kill()
    assert -signal.SIGKILL == waiting.wait(300)
    waiting.kill()  # The dead are left alone: their number may be another's.


def test_forks_end_with_their_server(tmp_path):
    """Nothing that was forked is left when the server is closed."""
    server = suite_forks.Server([])
    fork = server.start(["-c", "import threading; threading.Event().wait()"], {**os.environ}, tmp_path / "output")
    server.close()
    with pytest.raises(ProcessLookupError):
        os.kill(fork.pid, 0)


@pytest.mark.parametrize("module", ["deep500_timing", "it_has_a_thread"])
def test_what_would_not_be_the_same_is_refused(tmp_path, module):
    """A server that has our own package imported, or a second thread, serves no one."""
    thread = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "it_has_a_thread.py").write_text(thread, encoding="utf-8")
    server = suite_forks.Server([module], {"PYTHONPATH": str(tmp_path)})
    with pytest.raises(RuntimeError, match="the server of forks has ended with status 1"):
        server.start(["-c", ""], {**os.environ}, tmp_path / "output")
    server.close()


# Rank 1's bad ends, and the ranks' statuses after each.
@pytest.mark.parametrize(
    ("instead", "statuses"),
    [("sys.exit(5)", [None, 5]), ("threading.Event().wait()", [0, None])],
    ids=["fails", "hangs"],
)
def test_a_job_that_does_not_end_well(forks_of_json, tmp_path, instead, statuses):
    """A rank that fails ends the others' wait for it, and one that hangs is killed in time; both are said."""
    waits = "threading.Event().wait()" if statuses[0] is None else "pass"
    program = f"import os, sys, threading\nif os.environ['RANK'] == '1': {instead}\n{waits}"
    job = suite_ranks.Job(tmp_path, forks_of_json, ["-c", program], 2)
    if statuses[0] == 0:  # The longest wait begins when nothing but the rank that hangs is left.
        job.processes[0].wait(300)
    assert statuses == job.wait(300 if statuses[0] is None else 0.1)
    assert all(one.poll() is not None for one in job.processes)


@pytest.fixture
def forks_of_json(server):
    """Start a program as a rank, of which nothing but Python is asked."""
    return server.start


def test_interpreters_where_nothing_can_be_forked(tmp_path, monkeypatch):
    """The same job runs as their own processes."""
    monkeypatch.setattr(suite_forks, "AVAILABLE", False)
    forks = suite_ranks.Forks()
    program = (
        "import json, os, pathlib, sys; rank = os.environ['RANK']; "
        "pathlib.Path(sys.argv[1], rank + '.json').write_text(json.dumps([rank, os.environ['WORLD_SIZE']]))"
    )
    job = suite_ranks.Job(tmp_path, forks.start, ["-c", program, str(tmp_path)], 2)
    assert [["0", "2"], ["1", "2"]] == job.results(300)
    assert isinstance(job.processes[0], subprocess.Popen)
    assert sys.executable == job.processes[0].args[0]
    forks.close()
