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


def test_a_module_that_is_being_imported(tmp_path, monkeypatch):
    """What it imports asks for it, as TensorFlow's plug-in for a Keras that imports TensorFlow: called at the end."""
    (tmp_path / "begun.py").write_text("import asks\nvalue = 1\n")
    (tmp_path / "asks.py").write_text(
        "import begun\nfrom deep500_timing.adapters import after_import\nseen = []\n"
        "after_import('begun', lambda: seen.append(begun.value))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    after_import("begun", lambda: None)
    importlib.import_module("begun")
    assert sys.modules["asks"].seen == [1]
    for name in "begun", "asks":
        monkeypatch.delitem(sys.modules, name)
