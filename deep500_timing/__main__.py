"""The command: the findings and times of a run on a terminal.

::

    deep500-timing show runs/digits
    deep500-timing why runs/digits 90
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command and end the process with its exit code."""
    if sys.argv[1:2] == ["run"]:  # it needs no package, and the program shall find none imported
        from deep500_timing._launch.command import main as launch

        sys.exit(launch(sys.argv[2:]))
    from deep500_timing._base.require import is_installed, missing_package

    if not is_installed("click"):
        sys.exit(f"Error: {missing_package('click', extra='runs', caller='The command deep500-timing')}")
    try:
        from deep500_timing._command._app import main as run
    except KeyboardInterrupt:
        sys.exit(130)

    is_module = sys.argv[0].endswith("__main__.py")
    sys.exit(run(prog_name="python -m deep500_timing" if is_module else "deep500-timing"))


if __name__ == "__main__":
    main()
