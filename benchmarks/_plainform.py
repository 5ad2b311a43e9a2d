"""Loads the plain form of the packages next to the compiled one, in the same process.

The packages are read once more from their ``.py`` files, under their own names (``deep500_timing_plain``), with
every import among them turned to these names. So the two forms share nothing and can take turns within a millisecond,
where two processes would meet different moments of a noisy machine.
"""

from __future__ import annotations

import ast
import importlib
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

SUFFIX = "_plain"
PACKAGES = ("deep500_timing", "deep500_timing_torch", "deep500_timing_tensorflow", "deep500_timing_deepspeed")


def renamed(module: str) -> str:
    """The name under which the plain form of a module is loaded; other modules keep theirs."""
    root, dot, rest = module.partition(".")
    return f"{root}{SUFFIX}{dot}{rest}" if root in PACKAGES else module


class _Rename(ast.NodeTransformer):
    """Turns the imports of a module of these packages to the plain form."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        if node.level == 0 and node.module is not None:
            node.module = renamed(node.module)
        return node

    def visit_Import(self, node: ast.Import) -> ast.Import:
        for alias in node.names:
            if renamed(alias.name) != alias.name:
                if "." in alias.name and alias.asname is None:
                    raise NotImplementedError(f"`import {alias.name}` cannot be renamed; write `from ... import ...`")
                alias.asname = alias.asname or alias.name
                alias.name = renamed(alias.name)
        return node

    def visit_Dict(self, node: ast.Dict | ast.DictComp) -> ast.Dict | ast.DictComp:
        # The tables of `lazy_names`, of names and the modules that have them.
        self.generic_visit(node)
        for home in node.values if isinstance(node, ast.Dict) else [node.value]:
            if isinstance(home, ast.Constant) and isinstance(home.value, str):
                home.value = renamed(home.value)
        return node

    visit_DictComp = visit_Dict  # noqa: N815 (the name of ast)

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if called == "import_module" and node.args:
            name = node.args[0]
            first = name.values[0] if isinstance(name, ast.JoinedStr) and name.values else name
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                first.value = renamed(first.value)
        return node


class _Loader(SourceFileLoader):
    """Compiles the source with its imports renamed, past the bytecode cache, which holds it as it is."""

    def get_code(self, fullname: str) -> CodeType:
        """The code of the module."""
        path = self.get_filename(fullname)
        tree = _Rename().visit(ast.parse(self.get_data(path), path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    """Finds the modules of the plain form in the folders of the packages themselves."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """See the base class."""
        root, *rest = fullname.split(".")
        if not root.endswith(SUFFIX) or root.removesuffix(SUFFIX) not in PACKAGES:
            return None
        package = find_spec(root.removesuffix(SUFFIX))
        if package is None or package.origin is None:
            return None
        place = Path(package.origin).parent.joinpath(*rest)
        if (place / "__init__.py").is_file():
            file, locations = place / "__init__.py", [str(place)]
        else:
            file, locations = place.with_suffix(".py"), None
        if not file.is_file():
            return None
        loader = _Loader(fullname, str(file))
        return spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=locations)


def load_plain(package: str = "deep500_timing") -> ModuleType:
    """Import the plain form of a package.

    Args:
        package: Its ordinary name.

    Raises:
        ImportError: It is not installed, or it is not the plain form that was loaded.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    module = importlib.import_module(renamed(package))
    if module.compiled:
        raise ImportError(f"{module.__name__} was to be the plain form, and is compiled")
    return module
