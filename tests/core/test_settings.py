"""Settings of the environment and of ``pyproject.toml``: right, wrong and misspelt."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import deep500_timing
from deep500_timing import Timer
from deep500_timing._base import settings
from deep500_timing._base.settings import PREFIX, SETTINGS, cache_folder, check_settings, setting
from deep500_timing._base.warn import forget_warnings
from deep500_timing.exceptions import TimingWarning

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
RIGHT = {
    "enabled": ("off", False),
    "run": ("runs/first", "runs/first"),
    "append": ("yes", True),
    "exporters": ("terminal, jsonl=a.jsonl", (("terminal", ""), ("jsonl", "a.jsonl"))),
    "export_every_s": ("2.5", 2.5),
    "ranks": ("0,8-10", frozenset({0, 8, 9, 10})),
    "adopt": ("no", False),
    "stacks": ("on", 50.0),
    "steps": ("50", 50),
    "findings": ("-drift", "-drift"),
    "comm_kernel": ("no", False),
    "cache": ("/cache", "/cache"),
    "private": ("1", True),
    "exception_text": ("on", True),
    "noise_floor": ("floor.json", "floor.json"),
    "submit_unix_s": ("1800000000", 1.8e9),
    "pure": ("1", "1"),
    "build": ("auto", "auto"),
}
WRONG = {
    "run": (__file__, "a folder"),
    "findings": ("drift", "names of rules, each after a -"),
    "cache": (__file__, "a folder"),
    "noise_floor": (str(Path(__file__).parent), "a file"),
    "build": ("fast", "auto, pure, compiled"),
    "enabled": ("maybe", "1, true, on, yes, 0, false, off, no"),
    "append": ("perhaps", "1, true, on, yes, 0, false, off, no"),
    "exporters": ("terminall", "a list of name or name=destination, with the names .*csv"),
    "export_every_s": ("0", "a number over 0"),
    "ranks": ("first", "all, or numbers such as 0,8-15"),
    "stacks": ("-5", "0 to 1000, on, off"),
    "steps": ("-1", "a whole number"),
    "adopt": ("perhaps", "1, true, on, yes, 0, false, off, no"),
    "private": ("perhaps", "1, true, on, yes, 0, false, off, no"),
    "exception_text": ("perhaps", "1, true, on, yes, 0, false, off, no"),
    "comm_kernel": ("perhaps", "1, true, on, yes, 0, false, off, no"),
    "submit_unix_s": ("yesterday", "a number"),
}


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch, tmp_path):
    """No setting, no pyproject.toml, no warning so far."""
    for name in os.environ:
        if name.startswith(PREFIX) and name != "DEEP500_TIMING_PURE":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    settings._table.cache_clear()
    monkeypatch.setattr(settings, "_seen", (None, {}))
    forget_warnings()
    yield
    settings._table.cache_clear()


def test_every_setting_is_tested_and_documented():
    """The tables of this file and the page hold each variable; ``pure`` may have any value."""
    assert set(SETTINGS) == set(RIGHT) == set(WRONG) | {"pure"}
    rows = re.findall(r"^\| `(DEEP500_TIMING_\w+)` \| (`[\w-]+`|-) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    expected = [
        (PREFIX + key.upper(), f"`{key.replace('_', '-')}`" if one.in_table else "-") for key, one in SETTINGS.items()
    ]
    assert sorted(expected) == sorted(rows)


@pytest.mark.parametrize("key", RIGHT)
def test_a_right_value_is_taken(monkeypatch, key):
    """From the environment."""
    monkeypatch.setenv(PREFIX + key.upper(), RIGHT[key][0])

    assert RIGHT[key][1] == setting(key)


def test_a_cache_without_a_home_is_no_folder_of_the_working_directory(monkeypatch, tmp_path):
    """As in a container whose user has none: it is an error, unless the setting names a folder."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "~")  # what expanduser gives where nothing tells
    with pytest.raises(FileNotFoundError, match="no home folder"):
        cache_folder()

    monkeypatch.setenv("DEEP500_TIMING_CACHE", str(tmp_path))
    assert str(tmp_path) == cache_folder()


@pytest.mark.parametrize("key", WRONG)
def test_a_wrong_value_is_an_error_when_a_timer_is_made(monkeypatch, key):
    """The error names the variable, the value and the accepted values."""
    value, accepted = WRONG[key]
    monkeypatch.setenv(PREFIX + key.upper(), value)
    with pytest.raises(
        ValueError, match=rf"^{PREFIX}{key.upper()}='{re.escape(value)}' is wrong: give {accepted}.*\.$"
    ):
        Timer()


@pytest.mark.parametrize("key", SETTINGS)
def test_a_misspelt_name_is_a_warning_with_the_nearest(monkeypatch, key):
    """One warning; the program goes on."""
    name = PREFIX + key.upper()
    misspelt = name[:-2] + name[-1] + name[-2] if name[-1] != name[-2] else name + "X"
    monkeypatch.setenv(misspelt, "1")
    with pytest.warns(
        TimingWarning, match=rf"^{misspelt} is no setting, and is ignored. Did you mean {name}\?"
    ) as said:
        Timer()
        Timer()

    assert 1 == len(said)


@pytest.mark.parametrize("key", [key for key, one in SETTINGS.items() if one.in_table])
def test_the_table_of_a_project(monkeypatch, tmp_path, key):
    """The nearest pyproject.toml counts, from the folders above as well; the environment comes before it."""
    value, parsed = RIGHT[key]
    (tmp_path / "below").mkdir()
    (tmp_path / "pyproject.toml").write_text(f'[tool.deep500-timing]\n{key.replace("_", "-")} = "{value}"\n')
    monkeypatch.chdir(tmp_path / "below")
    assert parsed == setting(key)

    if key in WRONG:
        monkeypatch.setenv(PREFIX + key.upper(), WRONG[key][0])
        with pytest.raises(ValueError, match="is wrong"):
            setting(key)


def test_values_of_toml(tmp_path):
    """Lists, numbers and truth values mean what their texts mean."""
    text = "[tool.deep500-timing]\nenabled = false\nranks = [0, 3]\nstacks = 10\nexporters = ['csv=a', 'text=b']\n"
    (tmp_path / "pyproject.toml").write_text(text)

    assert (False, frozenset({0, 3}), 10.0) == (setting("enabled"), setting("ranks"), setting("stacks"))
    assert (("csv", "a"), ("text", "b")) == setting("exporters")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stacs = 1", r"stacs in \[tool.deep500-timing\] is no setting, and is ignored. Did you mean stacks\?"),
        ("pure = 1", r"pure in \[tool.deep500-timing\] is no setting"),
        ("= 1", r"Reading settings from '.*pyproject.toml' failed: .*They are not used"),
    ],
)
def test_a_fault_of_the_table_is_a_warning(tmp_path, text, said):
    """An unknown key, and a file that is not TOML."""
    (tmp_path / "pyproject.toml").write_text(f"[tool.deep500-timing]\n{text}\n")
    with pytest.warns(TimingWarning, match=said):
        check_settings()


def test_a_wrong_value_of_the_table_names_the_key(tmp_path):
    """The error says where the value stands."""
    (tmp_path / "pyproject.toml").write_text("[tool.deep500-timing]\nranks = 'odd'\n")
    with pytest.raises(ValueError, match=r"^ranks in \[tool.deep500-timing\]='odd' is wrong: give all, or numbers"):
        Timer()


def test_what_has_changed_since_the_last_timer_is_checked(monkeypatch):
    """A value that turns wrong, is corrected and turns wrong again; then a name that no one knows."""
    Timer()
    monkeypatch.setenv(PREFIX + "RANKS", "odd")
    for _ in range(2):
        with pytest.raises(ValueError, match="RANKS='odd' is wrong"):
            Timer()
    monkeypatch.setenv(PREFIX + "RANKS", "1")
    Timer()
    monkeypatch.setenv(PREFIX + "RANKS", "odd")
    with pytest.raises(ValueError, match="RANKS='odd' is wrong"):
        Timer()
    monkeypatch.delenv(PREFIX + "RANKS")
    monkeypatch.setenv(PREFIX + "RANK", "1")
    with pytest.warns(TimingWarning, match="RANK is no setting"):
        Timer()


def test_nothing_is_checked_again_while_nothing_changes(monkeypatch):
    """A second timer reads no setting; a deleted variable counts as a change."""
    read = []
    monkeypatch.setenv(PREFIX + "FINDINGS", "-drift")
    monkeypatch.setattr(settings, "setting", lambda key: read.append(key))
    Timer()
    read.clear()
    Timer()
    assert [] == read
    monkeypatch.delenv(PREFIX + "FINDINGS")
    Timer()
    assert set(SETTINGS) == set(read)


def test_enabled_0_stops_every_timer(monkeypatch):
    """For any settings of the program; the run is not made either."""
    monkeypatch.setenv("DEEP500_TIMING_ENABLED", "0")
    timer = Timer(enabled=True)
    timer.record("BATCH", 0, 1)
    log = deep500_timing.autolog()

    assert (False, 0, True) == (timer.enabled, len(timer.snapshot().regions), log.closed)
    assert log is not deep500_timing.autolog()


def test_a_wrong_value_ends_the_command_before_the_program(tmp_path):
    """``deep500-timing run`` says so with status 2, and the program has not begun."""
    command = [sys.executable, "-m", "deep500_timing", "run", "-c", "print('trained')"]
    environment = {**os.environ, "DEEP500_TIMING_RANKS": "odd"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False
    )

    assert (2, "") == (done.returncode, done.stdout)
    assert "Error: DEEP500_TIMING_RANKS='odd' is wrong: give all, or numbers such as 0,8-15." in done.stderr


def others_own(folder):
    """The file is of another user."""
    os.chown(folder / "pyproject.toml", 65534, 65534)


def others_own_the_folder(folder):
    """They can replace the file."""
    os.chown(folder, 65534, 65534)


def others_may_write(folder):
    """Everybody can change the folder."""
    folder.chmod(0o777)


@pytest.mark.parametrize("prepare", [others_own, others_own_the_folder, others_may_write])
def test_a_table_of_another_user_does_not_count(tmp_path, monkeypatch, prepare):
    """It could send the run elsewhere, or switch the timing off."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    (tmp_path / "pyproject.toml").write_text('[tool.deep500-timing]\nenabled = "0"\n')
    prepare(tmp_path)
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    settings._table.cache_clear()
    with pytest.warns(TimingWarning, match="another user owns it"):
        assert settings.setting("enabled")


@pytest.mark.parametrize("border", ["git", "home"])
def test_the_search_ends_at_the_project(tmp_path, monkeypatch, border):
    """A folder above the first .git, or above the home, is not of the project."""
    (tmp_path / "pyproject.toml").write_text('[tool.deep500-timing]\nenabled = "0"\n')
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    if border == "git":
        (project / ".git").mkdir()
    else:
        monkeypatch.setenv("HOME", str(project))
    monkeypatch.chdir(project / "src")
    settings._table.cache_clear()
    assert settings.setting("enabled")


def test_a_table_that_changes_where_things_go_is_named(tmp_path, monkeypatch, capsys):
    """One line says so."""
    (tmp_path / "pyproject.toml").write_text('[tool.deep500-timing]\nrun = "elsewhere"\n')
    monkeypatch.chdir(tmp_path)
    settings._table.cache_clear()
    assert "elsewhere" == settings.setting("run")
    assert f"settings from {str(tmp_path / 'pyproject.toml')!r}" in capsys.readouterr().err
