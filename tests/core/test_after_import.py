"""A function that is called once another module has been imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from deep500_timing.adapters import after_import


def test_looking_for_a_module_is_no_import(tmp_path, monkeypatch):
    """TensorFlow looks for Keras before it imports it; the call comes after the import, once."""
    (tmp_path / "looked_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    after_import("looked_for", lambda: seen.append(sys.modules["looked_for"].value))
    taken_back = after_import("looked_for", lambda: seen.append("taken back"))
    importlib.util.find_spec("looked_for")
    assert seen == []
    taken_back()
    importlib.import_module("looked_for")
    importlib.reload(sys.modules["looked_for"])
    monkeypatch.delitem(sys.modules, "looked_for")
    assert seen == [1]
