"""``make docs``: hold the built reference against the sources; ``check_reference.py SITE``."""

from __future__ import annotations

import html
import re
import sys
import zlib
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[2]
ADAPTERS = ("torch", "tensorflow", "jax", "deepspeed")


def check(site: Path) -> list[str]:
    """What is wrong: a role that is shown as it is written, an argument that is none, a public name on no page."""
    wrong = []
    for page in sorted(site.glob("reference/*/index.html")):
        text = html.unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))
        wrong += [f"{page.parent.name}: {role}" for role in re.findall(r":(?:class|func|meth|attr|data|mod):\S+", text)]
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    shown = {line.split(" ", 1)[0] for line in inventory.splitlines()}
    loader = griffe.GriffeLoader(search_paths=[str(ROOT), str(ROOT / "adapters")])
    packages = [loader.load(name) for name in ("deep500_timing", *(f"deep500_timing_{name}" for name in ADAPTERS))]
    loader.resolve_aliases(external=False, implicit=True)
    for package in packages:
        wrong += [f"{name}: on no page" for name in _public(package) if name not in shown]
        wrong += _undocumented(package, shown)
    return wrong


def _public(module: griffe.Module) -> list[str]:
    # The names of a module's __all__ and of its public modules', by where they are defined.
    names = []
    for name in module.exports or ():
        member = module.members.get(str(name))
        if member is None or not isinstance(member, griffe.Alias | griffe.Object):
            continue
        try:
            target = member.final_target if isinstance(member, griffe.Alias) else member
        except griffe.AliasResolutionError:
            continue  # of a package that is not ours
        if not target.is_module and target.path.startswith("deep500_timing"):
            names.append(target.path)
    for name, member in module.members.items():
        if isinstance(member, griffe.Module) and not name.startswith("_"):
            names += _public(member)
    return sorted(set(names))


def _undocumented(module: griffe.Module, shown: set[str]) -> list[str]:
    # Arguments that a docstring explains and the signature has not.
    wrong = []
    found: list[Any] = [module]
    while found:
        one = found.pop()
        found += [member for member in one.members.values() if isinstance(member, griffe.Object)]
        if one.docstring is None or one.path not in shown or not hasattr(one, "parameters"):
            continue
        taken = one.members.get("__new__", one) if "__init__" not in one.members else one
        own = {parameter.name.lstrip("*") for parameter in taken.parameters}
        for section in one.docstring.parse("google", warnings=False):
            if section.kind is griffe.DocstringSectionKind.parameters:
                named = [name for row in section.value for name in row.name.replace("*", "").split(", ")]
                wrong += [f"{one.path}: {name} is no argument" for name in named if name not in own]
    return wrong


if __name__ == "__main__":
    sys.exit("\n".join(sorted({*check(Path(sys.argv[1]))})) or 0)
