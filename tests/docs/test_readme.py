"""What the README shows is what happens: its Python blocks run, and its links lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def imports(block: str) -> list[str]:
    """The packages that a block imports."""
    return re.findall(r"^(?:import|from) (\w+)", block, flags=re.MULTILINE)


def test_readme_has_blocks() -> None:
    """The pattern that finds the blocks finds them."""
    assert len(BLOCKS) >= 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: imports(block)[0])
def test_block_runs(block: str, tmp_path: Path) -> None:
    """A Python block of the README runs as it stands, in an empty folder."""
    for module in imports(block):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
    }
    done = subprocess.run(
        [sys.executable, "-c", block],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_links_lead_somewhere() -> None:
    """Every file that the README links to exists."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    assert [] == [link for link in links if not (ROOT / link).exists()]
