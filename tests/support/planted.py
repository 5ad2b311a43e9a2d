"""What another user may plant where he can write."""

from __future__ import annotations

import os

import pytest

OPEN_TO_OTHERS = [0o777, 0o1777, 0o775, 0o755]
"""Modes of a folder that others can write to: the third is of another group, the last of another user."""


def planted_link(folder, mode, name):
    """A file of this user's, and a link of that name to it in a folder of this mode."""
    victim, shared = folder / "victim", folder / "shared"
    victim.write_text("mine")
    shared.mkdir()
    if mode & 0o002 == 0:
        if os.geteuid() != 0:
            pytest.skip("only root can give files away")
        os.chown(shared, 65534 if mode == 0o755 else -1, 65534)
    shared.chmod(mode)
    (shared / name).symlink_to(victim)
    return victim, shared / name
