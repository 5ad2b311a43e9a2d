"""Starts the timing in a Python process below ``deep500-timing run``, when it imports a framework.

Python imports ``sitecustomize`` at its start. This one takes its folder off ``sys.path``, waits for a framework, and
imports the ``sitecustomize`` of the user or of the system in its own place. A process that imports no framework, or
that runs another Python without deep500-timing, is not changed. It is silent on Pythons from 3.6 on.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

SETTINGS = "PYTHON_DEEP500_TIMING"
"""The environment variable that holds the settings, see :func:`settings_of`. DeepSpeed's launcher hands variables on to
other nodes whose names begin with PYTHON."""
FRAMEWORKS = frozenset(
    ("torch", "tensorflow", "keras", "tf_keras", "jax", "transformers", "accelerate", "lightning", "pytorch_lightning")
)
"""The modules that start the timing when they are imported."""
FOLDER = os.path.dirname(os.path.abspath(__file__))


class Trigger:
    """An entry of ``sys.meta_path`` that starts the timing just before the first framework is imported."""

    def __init__(self, settings: str) -> None:
        self.settings = settings

    def find_spec(self, name: str, path: object = None, target: "ModuleType | None" = None) -> "ModuleSpec | None":
        """Find a framework by the other finders, and nothing else."""
        if name not in FRAMEWORKS or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        try:
            from deep500_timing._launch.autolog import start_launched
        except ImportError:  # another Python than that of the launcher
            return None
        start_launched(settings_of(self.settings), hide_from_children)
        from importlib.util import find_spec

        return find_spec(name)


def settings_of(text: str) -> "tuple[str, str, str, str]":
    """Five flags and the most steps; the `run` that began it; the process below that which starts this; the folder."""
    flags, launch, starter, folder = text.split(":", 3)
    return flags, launch, starter, folder


def pass_on(settings: str) -> None:
    """Put this process into the environment, as the one that starts what it starts."""
    flags, launch, _, folder = settings_of(settings)
    os.environ[SETTINGS] = ":".join((flags, launch, str(os.getpid()), folder))


def hide_from_children() -> None:
    """Take the folder and the settings out of the environment: what this process starts runs as without us."""
    before = os.environ.pop("PYTHONPATH", "")
    kept = [path for path in before.split(os.pathsep) if path and os.path.abspath(path) != FOLDER]
    os.environ.pop(SETTINGS, None)
    if kept:
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)


def _start() -> None:
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != FOLDER]
    settings = os.environ.get(SETTINGS)
    if settings is not None:
        sys.meta_path.insert(0, Trigger(settings))
        if "RANK" not in os.environ:  # Processes below a rank are of its world.
            pass_on(settings)
    # Without another sitecustomize this raises what Python expects where there is none, and ignores.
    ours = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except BaseException:
        sys.modules["sitecustomize"] = ours  # the import of this module takes it out again
        raise


if __name__ == "sitecustomize":
    _start()
