"""``deep500-timing run`` in front of a program changes nothing about how it starts, runs and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import suite_coverage

pytestmark = pytest.mark.one_form  # nothing here depends on the form of the hot path
PROBES = Path(__file__).parent / "probes"
FACTS = (PROBES / "facts.py").read_text()
RUN = ("-m", "deep500_timing", "run")
FORMS = ("script", "module", "package", "code", "folder", "zip", "input")

BEHAVIOURS = {
    "an exception": "def inner():\n    raise ValueError('boom')\ndef outer():\n    inner()\nouter()",
    "an exception with a cause": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e",
    "a syntax error": "x = (\n",
    "exit 3": "import sys; sys.exit(3)",
    "exit with a text": "raise SystemExit('no data at /nowhere')",
    "exit with nothing": "print('done'); raise SystemExit",
    "_exit 5": "import os; os._exit(5)",
    "SIGTERM": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "SIGTERM that is handled": (
        "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\n"
        "os.kill(os.getpid(), signal.SIGTERM)"
    ),
    "Ctrl-C": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "Ctrl-C that is handled": (
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    print('saved')"
    ),
    "an excepthook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0], a[2].tb_lineno)\nraise OSError",
    "what an exception leaves": (
        "import atexit, sys\n"
        "atexit.register(lambda: print(sys.last_value, sys.last_traceback.tb_frame.f_code.co_name, sys.excepthook))\n"
        "raise OSError('x')"
    ),
    "a thread's exception": "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join()",
    "a warning": "import warnings; warnings.warn('careful')",
    "a docstring": "'''What it does.'''\nprint(__doc__)",
    "future": "from __future__ import annotations\nx: undefined = 1\nprint(__annotations__)",
    "annotations": "x: int = 1\nprint(__annotations__)",
    "atexit": "import atexit\natexit.register(print, 'bye')\nprint('hello')",
    "the end of the module": "class D:\n    def __del__(self): print('gone')\nd = D()",
    "pickle": (
        "import dataclasses, pickle\n@dataclasses.dataclass\nclass Config:\n    lr: float = 0.1\n"
        "assert pickle.loads(pickle.dumps(Config())) == Config(); print('ok')"
    ),
    "spawn": (
        "import multiprocessing as mp\nclass Sample:\n    def __init__(self, n): self.n = n\n"
        "def work(n, q): q.put(Sample(n * 2))\n"
        "if __name__ == '__main__':\n    c = mp.get_context('spawn'); q = c.Queue()\n"
        "    p = c.Process(target=work, args=(21, q))\n"
        "    p.start(); s = q.get(timeout=300); p.join(); print(s.n, p.exitcode, type(s) is Sample)"
    ),
    "forkserver": (
        "import multiprocessing as mp\ndef f(x): return x * x\n"
        "if __name__ == '__main__':\n    with mp.get_context('forkserver').Pool(2) as p: print(p.map(f, [1, 2, 3]))"
    ),
}


def ends(command, folder, text=None, **environment):
    """Exit status, standard output and standard error of a program."""
    variables = {**os.environ, **suite_coverage.of_a_child(), "PYTHONWARNINGS": "default", **environment}
    variables.pop("COVERAGE_PROCESS_START", None)
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=variables, input=text, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout, done.stderr


def form_of(form, folder, text):
    """The arguments that start a program in this form, and its standard input."""
    if form == "code":
        return ["-c", text], None
    if form == "input":
        return ["-"], text
    if form == "module":
        (folder / "probe_module.py").write_text(text)
        return ["-m", "probe_module"], None
    where = folder / ("train.py" if form == "script" else "probe_package/__main__.py")
    where.parent.mkdir(exist_ok=True)
    where.write_text(text)
    if form == "package":
        return ["-m", "probe_package"], None
    if form == "zip":
        with zipfile.ZipFile(folder / "probe.zip", "w") as file:
            file.write(where, "__main__.py")
        return ["probe.zip"], None
    return ["train.py" if form == "script" else "probe_package"], None


@pytest.mark.parametrize("form", FORMS)
def test_a_program_sees_no_difference(form, tmp_path):
    """Name, file, loader, spec, arguments, paths, hooks, signals, parent and threads are Python's own.

    The environment has what children need: a folder on PYTHONPATH, and the settings.
    """
    command, text = form_of(form, tmp_path, FACTS)
    command += [str(os.getpid()), "--epochs", "3"]
    plain = ends(command, tmp_path, text)
    assert 0 == plain[0]
    launched = ends([*RUN, "--quiet", *command], tmp_path, text)
    facts, seen = json.loads(plain[1]), json.loads(launched[1])
    added = {
        name: value for name, value in map(tuple, seen.pop("environment")) if [name, value] not in facts["environment"]
    }
    kept = [pair for pair in facts.pop("environment") if pair[0] not in added]
    assert facts == seen
    assert {"PYTHONPATH", "PYTHON_DEEP500_TIMING"} == added.keys()
    assert os.environ.get("PYTHONPATH", "") == added["PYTHONPATH"].partition("startup")[2].strip(os.pathsep)
    assert "PYTHONPATH" not in dict(kept)
    assert plain[::2] == launched[::2]


@pytest.mark.parametrize("what", BEHAVIOURS)
def test_a_script_behaves_the_same(what, tmp_path):
    """Exit status, output and traceback are the same to the letter."""
    command, _ = form_of("script", tmp_path, BEHAVIOURS[what])
    assert ends(command, tmp_path) == ends([*RUN, "--quiet", *command], tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_a_traceback_has_no_frame_of_ours(form, tmp_path):
    """In each form the traceback is the one that Python itself prints."""
    command, text = form_of(form, tmp_path, BEHAVIOURS["an exception"])
    plain = ends(command, tmp_path, text)
    assert "boom" in plain[2]
    assert plain == ends([*RUN, "--quiet", *command], tmp_path, text)


@pytest.mark.parametrize("command", [["absent.py"], ["-m", "absent_module"], ["-m", "json.absent"], ["empty"]])
def test_a_program_that_is_not_there(command, tmp_path):
    """The message and the exit status are Python's."""
    (tmp_path / "empty").mkdir()
    assert ends(command, tmp_path) == ends([*RUN, "--quiet", *command], tmp_path)


def test_a_safe_path(tmp_path):
    """``PYTHONSAFEPATH`` is honoured."""
    command, _ = form_of("script", tmp_path, "import sys; print(sys.path)")
    plain = ends(command, tmp_path, PYTHONSAFEPATH="1")
    assert plain == ends([*RUN, "--quiet", *command], tmp_path, PYTHONSAFEPATH="1")


@pytest.mark.parametrize("what", ["an exception", "a syntax error", "exit 3"])
def test_the_installed_command(what, tmp_path):
    """The console script behaves as ``python -m``. Freed memory, which is filled here, is not used again."""
    command, _ = form_of("script", tmp_path, BEHAVIOURS[what])
    console = Path(sys.executable).with_name("deep500-timing")
    if not console.exists():
        pytest.skip("the package's command is not installed beside this Python")
    done = subprocess.run(
        [console, "run", "--quiet", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONMALLOC": "debug"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ends(command, tmp_path) == (done.returncode, done.stdout, done.stderr)


class TestBeforeACommand:
    """``deep500-timing run -- COMMAND``."""

    def test_it_becomes_the_command(self, tmp_path):
        """The process, the arguments and the exit status are the command's."""
        program = "import os, sys; print(os.getppid(), sys.argv); sys.exit(7)"
        command = [sys.executable, "-c", program, "--run", "x"]
        status, out, _ = ends([*RUN, "--", *command], tmp_path)
        assert (7, f"{os.getpid()} ['-c', '--run', 'x']\n") == (status, out)

    def test_a_command_without_the_dashes(self, tmp_path):
        """A word that is no file but a command is run as one."""
        assert (0, "hello\n", "") == ends([*RUN, "echo", "hello"], tmp_path)

    @pytest.mark.parametrize("words", [["./train.sh"], ["train.sh"], ["/bin/sh", "train.sh"], [sys.executable, "a.py"]])
    def test_a_file_that_is_no_python(self, words, tmp_path):
        """A shell script, be it executable or not, and a program by its path are executed."""
        (tmp_path / "train.sh").write_text("#!/usr/bin/env sh\nexec python a.py 7 $1\n")
        (tmp_path / "train.sh").chmod(0o755 if words[0] == "./train.sh" else 0o644)
        (tmp_path / "a.py").write_text("import sys; print(sys.argv); sys.exit(5)")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        assert 5 == ends([*RUN, "--quiet", *words, "x"], tmp_path, PATH=path)[0]

    def test_a_command_that_is_not_there(self, tmp_path):
        """It ends as a shell does."""
        status, _, error = ends([*RUN, "--", "absent-command"], tmp_path)
        assert 127 == status
        assert "absent-command: No such file" in error

    def test_children_see_the_sitecustomize_of_the_user(self, tmp_path):
        """It is imported as ever, and the folder of ours is on no child's path."""
        (tmp_path / "user").mkdir()
        (tmp_path / "user" / "sitecustomize.py").write_text("print('user')")
        program = "import sys; print(sys.modules['sitecustomize'].__file__, [p for p in sys.path if 'startup' in p])"
        command = [sys.executable, "-c", program]
        path = str(tmp_path / "user")
        plain = ends(command[1:], tmp_path, PYTHONPATH=path)
        status, out, error = ends([*RUN, "--", *command], tmp_path, PYTHONPATH=path)
        assert plain == (status, out.removeprefix("user\n"), error)  # the launcher's own, which is Python as well
        assert plain[1].startswith("user")

    @pytest.mark.parametrize("flags", ["-I", "-E", "-P", "-s", "-Es", "-IP"])
    def test_what_isolates_a_child_means_the_same(self, flags, tmp_path):
        """Its paths and flags are Python's own, and no file of the folder is imported."""
        (tmp_path / "sitecustomize.py").write_text("print('of the folder')")
        command = [flags, "-c", "import sys; print(sys.path, sys.flags, 'sitecustomize' in sys.modules)"]
        plain = ends(command, tmp_path)
        assert plain[:2] == ends([*RUN, "--", sys.executable, *command], tmp_path)[:2]

    @pytest.mark.parametrize(
        "wrapper", ["env -i", "env -u PYTHONPATH", "env PYTHONPATH=", "setsid", "setpriv --reuid 65534 --clear-groups"]
    )
    def test_a_child_of_another_environment_or_user_is_unchanged(self, wrapper, tmp_path):
        """Its modules come from where they come without us."""
        if wrapper.startswith("setpriv") and os.geteuid() != 0:
            pytest.skip("only root can become another user")
        child = [*wrapper.split(), sys.executable, "-c", "import sys; print(sys.path, sys.flags)"]
        starter = ["-c", "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"]
        assert ends([*starter, *child], tmp_path)[:2] == ends([*RUN, "--", *child], tmp_path)[:2]

    @pytest.mark.parametrize("words", [["-c"], ["--", sys.executable, "-c"], ["--run", "there", "-c"]])
    def test_nothing_is_sent(self, words, tmp_path):
        """Neither by the launcher nor by the program's process: Python says each use of the network."""
        (tmp_path / "sitecustomize.py").write_text(
            "import sys\nused = ('socket.connect', 'socket.bind', 'socket.sendto', 'socket.getaddrinfo')\n"
            "def hear(event, _):\n    if event in used:\n        print('network:', event, file=sys.stderr)\n"
            "sys.addaudithook(hear)\n"
        )
        code = "import deep500_timing as d\nt = d.Timer(run='own')\nfor _ in range(30):\n    with t.region('BATCH'): 1"
        status, _, error = ends([*RUN, *words, code], tmp_path, PYTHONPATH=str(tmp_path))
        assert (0, False) == (status, "network" in error), error

    @pytest.mark.parametrize("user", ["", "raise ImportError('broken')", "1 / 0"])
    def test_a_sitecustomize_that_is_absent_or_fails(self, user, tmp_path):
        """Python says the same of it as without us."""
        path = tmp_path / "user"
        path.mkdir()
        if user:
            (path / "sitecustomize.py").write_text(user)
        command = ["-c", "import sys; print('sitecustomize' in sys.modules, sys.flags.no_site)"]
        plain = ends(command, tmp_path, PYTHONPATH=str(path))
        launched = ends([*RUN, "--", sys.executable, *command], tmp_path, PYTHONPATH=str(path))
        assert plain[:2] == launched[:2]
        assert plain[2].splitlines()[-1:] == launched[2].splitlines()[-1:]


class TestOptions:
    """What stands before the program."""

    def test_help(self, tmp_path):
        """``--help`` is the command's before the program, and the program's after it."""
        status, out, _ = ends([*RUN, "--help"], tmp_path)
        assert 0 == status
        assert "deep500-timing run -- torchrun" in out
        command, _ = form_of("script", tmp_path, "import sys; print(sys.argv)")
        assert "['train.py', '--help', '--quiet']\n" == ends([*RUN, *command, "--help", "--quiet"], tmp_path)[1]

    @pytest.mark.parametrize(
        "arguments", ["", "--run", "--nope x.py", "--layers=2 x.py", "-m", "-c", "--", "--quiet", "-x", "a.ipynb"]
    )
    def test_wrong_use(self, arguments, tmp_path):
        """It ends with 2, and the error is the last word; a notebook's says how to time it."""
        (tmp_path / "a.ipynb").write_text('{"cells": []}')
        status, _, error = ends([*RUN, *arguments.split()], tmp_path)
        assert 2 == status
        assert error.splitlines()[-1].startswith("Error: ")
        assert ("deep500-timing run jupyter nbconvert" in error) == arguments.endswith(".ipynb")

    def test_a_program_that_trains_nothing(self, tmp_path):
        """The end says why nothing was timed, and what to do; ``--quiet`` does not; nothing is written."""
        command, _ = form_of("script", tmp_path, "pass")
        status, out, error = ends([*RUN, *command], tmp_path)
        assert (0, "") == (status, out)
        assert "nothing was timed: this process imported neither PyTorch" in error
        assert "and no program that it started wrote a run here" in error
        assert ["train.py"] == [path.name for path in tmp_path.iterdir()]

    @pytest.mark.parametrize(
        ("text", "how"),
        [
            ("import absent", "by ModuleNotFoundError"),
            ("import argparse; argparse.ArgumentParser().parse_args(['--nope'])", "with exit status 2"),
            ("raise SystemExit('no data')", "with exit status 1"),
        ],
    )
    def test_a_program_that_fails_before_it_trains(self, tmp_path, text, how):
        """It needs a correction of its own, and no advice on timing."""
        _, _, error = ends([*RUN, "-c", text], tmp_path)
        assert error.endswith(f"nothing was timed: the program ended {how} before its first step.\n")

    def test_a_folder_with_a_run_is_no_time_of_this_program(self, tmp_path):
        """It is said of a program that adds nothing to the run that is there."""
        (tmp_path / "rank-00000.d5log").write_bytes(b"of an earlier program")
        _, _, error = ends([*RUN, "--run", str(tmp_path), "-c", "pass"], tmp_path)
        assert "nothing was timed" in error

    def test_a_script_that_is_not_there(self, tmp_path):
        """Python's own line says so; a program that never began imported nothing, which needs no remedy."""
        status, out, error = ends([*RUN, "absent.py"], tmp_path)
        assert (2, "") == (status, out)
        assert "can't open file" in error
        assert "nothing was timed" not in error


def test_a_signal_from_outside_reaches_the_script(tmp_path):
    """There is no process between: the script's own handler decides how it ends."""
    text = (
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\nprint('ready', flush=True)\n"
        "signal.pause()"
    )
    command, _ = form_of("script", tmp_path, text)
    with subprocess.Popen([sys.executable, *RUN, "--quiet", *command], cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert b"ready\n" == process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert 42 == process.wait(300)
