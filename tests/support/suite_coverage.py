"""Coverage of processes that tests start: of ranks and fits, where most of the adapters runs."""

from __future__ import annotations

import base64
import json
import sys


def of_a_child() -> dict[str, str]:
    """The environment of a Python that a test starts, for it to be measured as this process is.

    Nothing where this process is not measured. Not every child is: a process's list of imports would differ.
    """
    if "coverage" not in sys.modules:
        return {}
    from coverage import Coverage

    measured = Coverage.current()
    if measured is None:
        return {}
    settings = json.loads(base64.b64decode(measured.config.serialize()))
    settings["parallel"] = True  # Each process writes its own file; pytest-cov combines them.
    return {"COVERAGE_PROCESS_CONFIG": base64.b64encode(json.dumps(settings).encode()).decode()}
