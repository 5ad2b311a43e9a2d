"""The page about these timers shows what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_form

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "deepspeed.md"
TEXT = PAGE.read_text(encoding="utf-8").partition("## Named timers")[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


def test_it_has_blocks():
    """The pattern that finds the blocks finds them."""
    assert len(BLOCKS) == 2


@pytest.mark.parametrize(("block", "words"), [(0, "time (ms) | fwd: "), (1, "MFU ")])
def test_a_block_runs(block, words, tmp_path):
    """Each block runs as it stands, and prints the shown output."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS[block]], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert (0, "") == (done.returncode, done.stderr)
    assert words in done.stdout
