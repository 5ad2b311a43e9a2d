"""Tools' view of the public classes and functions, in both forms: signatures, docstrings, names to complete."""

from __future__ import annotations

import importlib
import inspect
import json

import pytest

import deep500_timing

LIST = """
import importlib, inspect, json, sys

MODULES = ["deep500_timing", "deep500_timing.devices", "deep500_timing.exporters", "deep500_timing.testing",
           "deep500_timing.memory", "deep500_timing.wallclock", "deep500_timing.throughput", "deep500_timing.flops"]

def told(function):
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError) as error:
        return repr(error)
    # How `self` may be given is the form's own business.
    return [[parameter.name, "" if parameter.name == "self" else str(parameter.kind), repr(parameter.default),
             str(parameter.annotation)] for parameter in found.parameters.values()]

listed = {}
for module_name in MODULES:
    module = importlib.import_module(module_name)
    for name in module.__all__:
        thing = getattr(module, name)
        if not callable(thing) or (inspect.isclass(thing) and issubclass(thing, BaseException)):
            continue
        listed[f"{module_name}.{name}"] = [told(thing), bool(inspect.getdoc(thing))]
        for part in dir(thing) if inspect.isclass(thing) else ():
            if not part.startswith("_") and callable(getattr(thing, part)):
                method = getattr(thing, part)
                listed[f"{module_name}.{name}.{part}"] = [told(method), bool(inspect.getdoc(method))]
json.dump({"compiled": importlib.import_module("deep500_timing").compiled, "listed": listed}, sys.stdout)
"""
OFTEN_CALLED = {
    *(f"Timer.{name}" for name in ("discard", "cancel", "end", "fail", "iterate", "now_ns", "record")),
    *(f"Timer.{name}" for name in ("region", "reset", "start", "timed")),
    *(f"{kind}.{name}" for kind in ("Region", "DeviceRegion") for name in ("start", "end")),
}
"""Compiled, these and the event pool's are the interpreter's own methods: it calls them faster; they hold no types."""


def without_types(told):
    """A signature's names, kinds and defaults."""
    return [parameter[:3] for parameter in told] if isinstance(told, list) else told


@pytest.fixture(scope="module")
def both():
    """What each form tells."""
    import os
    import subprocess
    import sys

    found = []
    for plain in ("", "1"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", LIST],
            env={**os.environ, "DEEP500_TIMING_PURE": plain},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(json.loads(done.stdout)["listed"])
    return found


def test_everything_has_a_signature_and_a_docstring(both):
    """``inspect.signature`` and ``help`` answer for every public class, function and method."""
    for listed in both:
        assert 150 < len(listed)
        assert [] == [name for name, (told, _) in listed.items() if not isinstance(told, list)]
        assert [] == [name for name, (_, documented) in listed.items() if not documented]


def test_both_forms_tell_the_same(both):
    """Names, kinds and defaults of all arguments are those of the source, compiled or not."""
    compiled, plain = ({name: without_types(told) for name, (told, _) in listed.items()} for listed in both)
    assert plain == compiled


def test_both_forms_show_the_types(both):
    """Annotations are shown in the compiled form as in the plain one, but for the calls of a training loop."""
    compiled, plain = both
    missing = {name for name, (told, _) in plain.items() if told != compiled[name][0]}
    classes = {"Timer", "CPUGPUTimer", "Region"}  # A class's own signature is text, which holds no annotations.
    assert set() == {
        name
        for name in missing
        if not any(name.endswith(f".{part}") for part in classes)
        and ".".join(name.replace("CPUGPUTimer", "Timer").replace("MemoryTimer", "Timer").split(".")[-2:])
        not in OFTEN_CALLED
        and not name.startswith("deep500_timing.devices.")
    }


@pytest.mark.parametrize("name", ["Region", "DeviceRegion"])
def test_a_handle_shows_what_is_meant_to_be_used(name):
    """The two kinds of handles have one surface, and none of it can be assigned to."""
    tmr = deep500_timing.Timer()
    handle = tmr.region("a", gpu=name == "DeviceRegion")
    assert name == type(handle).__name__
    assert ["end", "is_open", "key", "name", "start"] == [part for part in dir(handle) if not part.startswith("_")]
    for part in ("is_open", "key", "name", "start_ns", "intervals"):
        with pytest.raises(AttributeError):
            setattr(handle, part, None)
    assert ("a", "a", False) == (handle.key, handle.name, handle.is_open)
    with handle:
        assert handle.is_open


def test_a_handle_is_made_by_a_timer_only():
    """One that belongs to no timer is an error where it is made, and not a crash where it is used."""
    with pytest.raises((TypeError, AttributeError)):
        deep500_timing.Region.__new__(deep500_timing.Region).start()
    with pytest.raises((TypeError, AttributeError)):
        deep500_timing.Region("a", "a", None, None)


def test_a_module_of_the_public_face_completes_its_names():
    """``dir`` of the package lists its exports, imported yet or not."""
    package = importlib.import_module("deep500_timing")
    assert set(package.__all__) <= set(dir(package))
    assert all(inspect.getdoc(package.Timer) for _ in (0,))
