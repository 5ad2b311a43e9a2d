"""The command line of ``deep500-timing run``. It imports nothing that the program would import later."""

from __future__ import annotations

import atexit
import os
import sys
import time

from deep500_timing._launch import files_of, folder_of, nothing_timed
from deep500_timing._launch.program import UsageError, run
from deep500_timing._launch.startup.sitecustomize import FOLDER, SETTINGS, Trigger, pass_on

USAGE = """\
Usage: deep500-timing run [OPTIONS] FILE [ARGUMENTS]
       deep500-timing run [OPTIONS] -m MODULE [ARGUMENTS]
       deep500-timing run [OPTIONS] -c CODE [ARGUMENTS]
       deep500-timing run [OPTIONS] -- COMMAND [ARGUMENTS]

Time a training program without editing it. FILE is a script, a folder or zip
file with a __main__.py, or - for the standard input. COMMAND is a shell script
or a launcher: `deep500-timing run -- torchrun --nproc-per-node 8 train.py`.

These options stand before the program:
  --run FOLDER  Write the run there; else to runs/NAME-TIME.
  --append      Add to a finished run in that FOLDER; else FOLDER-2 is made.
  --layers      Time each layer of PyTorch models too.
  --steps N     End the program after N steps, with exit status 0.
  --trace-slow-steps K
                Keep traces of torch.profiler for K slow steps, 1 to 9.
  --quiet       Print no table at the end.
  -h, --help    Show this message.
"""


def main(arguments: list[str]) -> int:
    """Run the program that the arguments name, and take its exit status.

    Where the program sets none, the status is 0, 2 for wrong arguments, or 127 for an absent command.
    """
    from deep500_timing._base.settings import check_settings, setting

    try:
        options, rest = _options(arguments)
        if rest is None:
            sys.stdout.write(USAGE)
            return 0
        if not rest:
            raise UsageError("Nothing to run is named.")
        try:
            check_settings()
        except ValueError as error:
            raise UsageError(str(error)) from None
        options.folder = options.folder or setting("run")
        options.steps = options.steps or str(setting("steps"))
        if options.append:
            os.environ["DEEP500_TIMING_APPEND"] = "1"
        command = _command_of(rest)
        if command is not None:
            if not _is_script_of_this_python(command):
                return _execute(options, command)
            rest = command[1:]
        if setting("enabled"):
            _prepare(options, rest)
        run(rest)
    except UsageError as error:
        atexit.unregister(_say_if_idle)
        usage = USAGE.partition("\n\n")[0]
        sys.stderr.write(f"{usage}\nTry 'deep500-timing run --help' for help.\n\nError: {error}\n")
        return 2
    return 0


class _Options:
    folder: str | None = None
    quiet = layers = append = False
    slow_steps = "0"
    steps = ""

    def __init__(self) -> None:
        self.launch = f"{os.getpid()}-{time.time_ns()}"

    def settings(self, folder: str, *, launched: bool) -> str:
        # Read by autolog.start_launched. JSON would cost its import.
        flags = f"{self.quiet:d}{launched:d}{self.layers:d}{self.folder is not None:d}{self.slow_steps}{self.steps}"
        return f"{flags}:{self.launch}::{folder}"


_FLAGS = ("--quiet", "--layers", "--append")
_WITH_VALUE = {
    "--run": ("folder", "folder"),
    "--trace-slow-steps": ("slow_steps", "number from 1 to 9"),
    "--steps": ("steps", "number from 1 on"),
}


def _options(arguments: list[str]) -> tuple[_Options, list[str] | None]:
    # None in place of the rest asks for help. The first word that is no option of ours begins the program.
    options, rest = _Options(), list(arguments)
    while rest and rest[0].startswith("--") and rest[0] != "--":
        option, equals, value = rest.pop(0).partition("=")
        if option == "--help":
            return options, None
        if option in _FLAGS and not equals:
            setattr(options, option[2:], True)
            continue
        if option in _FLAGS:
            raise UsageError(f"{option} takes no value.")
        if option not in _WITH_VALUE:
            raise UsageError(f"{option!r} is no option of `deep500-timing run`; the program's own stand after it.")
        name, required = _WITH_VALUE[option]
        value = value or (rest.pop(0) if rest else "")
        is_number = value.isdecimal() and int(value) > 0
        if not {"folder": value, "slow_steps": value in [*"123456789"], "steps": is_number}[name]:
            raise UsageError(f"{option} requires a {required}.")
        setattr(options, name, value)
    return options, None if rest[:1] == ["-h"] else rest


def _command_of(words: list[str]) -> list[str] | None:
    # What is to be executed; None for what Python runs.
    first = words[0]
    if first == "--":
        return words[1:]
    if first.startswith("-") or os.path.isdir(first) or first.endswith((".py", ".pyw", ".pyc")):
        return None
    if not os.path.isfile(first):
        from shutil import which  # it imports a dozen modules

        return words if which(first) is not None else None
    try:
        with open(first, "rb") as file:
            start = file.read(256)
    except OSError:
        return None
    line = start.removeprefix(b"#!").partition(b"\n")[0].strip()
    if start.startswith(b"#!") and line and b"python" not in line:
        return [*os.fsdecode(line).split(None, 1), *words]  # as the system does
    is_binary = b"\0" in start and not start.startswith(b"PK") and os.access(first, os.X_OK)
    return [os.path.join(os.curdir, first), *words[1:]] if is_binary else None


def _is_script_of_this_python(command: list[str]) -> bool:
    # It runs in this process: of one that Python itself runs, `raise SystemExit(3)` is seen nowhere.
    from shutil import which

    own = sys.executable
    if len(command) < 2 or not os.path.isfile(command[1]) or (named := which(command[0])) is None:
        return False
    return os.path.dirname(os.path.abspath(named)) == os.path.dirname(own) and os.path.samefile(named, own)


def _search_path() -> str:
    return os.pathsep.join(path for path in (FOLDER, os.environ.get("PYTHONPATH")) if path)


def _prepare(options: _Options, rest: list[str]) -> None:
    named = rest[1] if rest[0] == "-m" and len(rest) > 1 else {"-c": "code", "-": "stdin"}.get(rest[0], rest[0])
    folder = folder_of(options.folder, named)
    trigger = Trigger(options.settings(folder, launched=False))
    sys.meta_path.insert(0, trigger)
    if not options.quiet and (rest[0].startswith("-") or os.path.exists(rest[0])):
        atexit.register(_say_if_idle, trigger, folder, files_of(folder), os.getpid())
    # Children may be ranks. Many are given a copy of `os.environ`, so it stands there.
    os.environ["PYTHONPATH"] = _search_path()
    pass_on(options.settings(folder, launched=True))


def _say_if_idle(trigger: object, folder: str, before: set[str], pid: int) -> None:
    if trigger in sys.meta_path and os.getpid() == pid and files_of(folder) == before and sys.stderr is not None:
        sys.stderr.write(nothing_timed("this process imported neither PyTorch, TensorFlow, Keras nor JAX"))


def _execute(options: _Options, command: list[str]) -> int:
    if not command:
        raise UsageError("After -- stands the command to run.")
    program = next((word for word in command if word.endswith((".py", ".sh"))), command[0])
    settings = options.settings(folder_of(options.folder, program), launched=True)
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, {**os.environ, "PYTHONPATH": _search_path(), SETTINGS: settings})
    except OSError as error:
        sys.stderr.write(f"deep500-timing run: {command[0]}: {error.strerror}\n")
    return 127
