"""The suite's C compiler in front of the system's: what comes out is what the system's would have made."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time

import pytest
import suite_cc

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs a shell")

COMPILER = """#!/bin/sh
case "$*" in
*--version*) cat "{folder}/version" ;;
*-E*) cat "$1" ;;
*broken*) echo "no C" >&2; exit 3 ;;
*) echo "$*" >> "{folder}/asked"; for last; do :; done; {{ echo "object of"; cat "$1"; }} > "$last" ;;
esac
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that notes what it was asked to make."""
    monkeypatch.setenv(suite_cc.FOLDER, str(tmp_path / "kept"))
    (tmp_path / "version").write_text("1")
    (tmp_path / "asked").write_text("")
    (tmp_path / "a.c").write_text("text\n")
    path = tmp_path / "cc"
    path.write_text(COMPILER.format(folder=tmp_path))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def compiled(compiler, folder, *flags, source="a.c"):
    """What a source becomes, and how often the compiler has been asked so far."""
    target = folder / "a.o"
    target.unlink(missing_ok=True)
    assert 0 == suite_cc.compile_once([compiler, str(folder / source), *flags, "-c", "-o", str(target)])
    return target.read_text(), len((folder / "asked").read_text().splitlines())


def test_the_same_is_compiled_once(compiler, tmp_path):
    """The second time the object is the first one's, and the compiler is not asked; so in another environment."""
    for folder in ("-I/one/include", "-I/one/include", "-I/another/include"):
        assert ("object of\ntext\n", 1) == compiled(compiler, tmp_path, folder)


@pytest.mark.parametrize("changed", ["text", "flag", "version"])
def test_what_is_not_the_same_is_compiled(compiler, tmp_path, changed):
    """Another text, other flags and another compiler make another object."""
    compiled(compiler, tmp_path)
    if changed in ("text", "version"):
        (tmp_path / {"text": "a.c", "version": "version"}[changed]).write_text("other\n")
    expected = "object of\nother\n" if changed == "text" else "object of\ntext\n"
    flags = ["-O0"] if changed == "flag" else []
    assert (expected, 2) == compiled(compiler, tmp_path, *flags)


def test_a_failure_is_the_compilers_and_is_not_kept(compiler, tmp_path, capfd):
    """The exit status and the words are the compiler's; nothing is handed out the next time."""
    asked = [compiler, str(tmp_path / "a.c"), "-broken", "-c", "-o", str(tmp_path / "a.o")]
    assert [3, 3] == [suite_cc.compile_once(asked) for _ in range(2)]
    assert "no C\nno C\n" == capfd.readouterr().err
    assert not (tmp_path / "a.o").exists()


def test_what_nobody_asks_for_goes(compiler, tmp_path):
    """An object that was of no use for two weeks is removed when another one comes."""
    compiled(compiler, tmp_path)
    (old,) = (tmp_path / "kept").iterdir()
    os.utime(old, times=(time.time() - suite_cc._KEEP_S - 60,) * 2)
    compiled(compiler, tmp_path, "-O0")
    assert old not in [*(tmp_path / "kept").iterdir()]


def test_it_stands_before_the_compiler_of_a_python(compiler, tmp_path):
    """What it prints for ``CC`` is a command; linking goes through to the compiler, and no compiler is an error."""
    script = [sys.executable, suite_cc.__file__]
    environment = {**os.environ, "CC": compiler}
    command = subprocess.run(script, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    linked = f"{command} {tmp_path}/a.c -shared -o {tmp_path}/a.so"
    subprocess.run(["sh", "-c", linked], env=environment, check=True)
    assert "object of\ntext\n" == (tmp_path / "a.so").read_text()
    absent = subprocess.run(["sh", "-c", f"{command}-absent -c a.c -o a.o"], env=environment, capture_output=True)
    assert (1, True) == (absent.returncode, b"cc-absent" in absent.stderr)
