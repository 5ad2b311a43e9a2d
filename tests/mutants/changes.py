"""The changes that are tried on a module: each is one place in one function, as a tree to compile.

Left alone is what no test should have to notice: texts (messages, ``__repr__``), annotations, default arguments,
decorators, branches that only the compiled form or a type checker takes, and what runs at import.
"""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_NEGATED = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_AT_THE_BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_INSTEAD = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}
_TWINS = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
_UNTESTED_FUNCTIONS = {"__repr__", "__str__"}


# From the root of a tree to a node: fields, and places in lists.
Path = tuple[tuple[str, "int | None"], ...]


@dataclass(frozen=True)
class Change:
    """One change: where it is, what it does, and which node of the module's tree it replaces by which.

    ``lines`` are those of the statement up to the place: a test that passes through one of them may notice.
    """

    function: str
    line: int
    lines: range
    source: str
    text: str
    path: Path
    node: ast.AST

    @property
    def name(self) -> tuple[str, str, str]:
        """What stays the same when lines are added above: function, source line and what is done to it."""
        return self.function, self.source, self.text

    def applied(self, tree: ast.Module) -> ast.Module:
        """A copy of the module's tree with this change."""
        changed = copy.deepcopy(tree)
        holder: ast.AST = changed
        for field, index in self.path[:-1]:
            holder = getattr(holder, field) if index is None else getattr(holder, field)[index]
        field, index = self.path[-1]
        if index is None:
            setattr(holder, field, self.node)
        else:
            getattr(holder, field)[index] = self.node
        return ast.fix_missing_locations(changed)


def changes_of(source: str) -> list[Change]:
    """Every change to the functions of a module, in the order of its lines."""
    tree = ast.parse(source)
    lines = source.splitlines()
    found = [
        Change(function, node.lineno, range(first, node.end_lineno + 1), lines[node.lineno - 1].strip(), text, way, new)
        for function, first, path, node in _places(tree)
        for text, way, new in _changes_at(node, path)
    ]
    return sorted(found, key=lambda change: change.line)


def _places(tree: ast.Module) -> Iterator[tuple[str, int, Path, ast.AST]]:
    """Each node inside of a function: the function's name, the first line of the statement, the way from the root."""

    def visit(node: ast.AST, names: tuple[str, ...], inside: bool, first: int, path: Path) -> Iterator:
        if isinstance(node, ast.stmt):
            first = node.lineno
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
            if name in _UNTESTED_FUNCTIONS:
                return
            names, inside, fields = (*names, name), True, ["body"]
        elif isinstance(node, ast.ClassDef):
            names, inside, fields = (*names, node.name), False, ["body"]
        else:
            fields = _fields_to_change(node)
            if inside and hasattr(node, "lineno"):
                yield ".".join(names), first, path, node
        for field in fields:
            value = getattr(node, field, None)
            if isinstance(value, list):
                for index, child in enumerate(value):
                    if isinstance(child, ast.AST):
                        yield from visit(child, names, inside, first, (*path, (field, index)))
            elif isinstance(value, ast.AST):
                yield from visit(value, names, inside, first, (*path, (field, None)))

    yield from visit(tree, (), False, 0, ())


def _fields_to_change(node: ast.AST) -> list[str]:
    fields = list(node._fields)
    if isinstance(node, ast.AnnAssign):
        return ["value"]
    if isinstance(node, ast.JoinedStr):
        return []
    if isinstance(node, ast.Raise):  # What is said is compared where it matters.
        return []
    if _only_says(node):
        return []
    if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "cython.compiled"}:
        return ["orelse"]
    if isinstance(node, ast.If) and ast.unparse(node.test) == "not cython.compiled":
        return ["body"]
    return fields


def _only_says(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _last_name(node.func).startswith(("warn", "cast"))


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _changes_at(node: ast.AST, path: Path) -> Iterator[tuple[str, Path, ast.AST]]:
    kind = type(node).__name__.lower()
    make = globals().get(f"_of_{kind}")
    if make is not None:
        for changed in make(node):
            yield f"{_text(node)}  →  {_text(changed)}", path, _placed(changed, node)
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not _steers_the_form(node.test):
        for value in (True, False) if not isinstance(node, ast.While) else (False,):
            constant = _placed(ast.Constant(value), node.test)
            yield f"if {_text(node.test)}  →  if {value}", (*path, ("test", None)), constant
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        for number, loop in enumerate(node.generators):
            for index, test in enumerate(loop.ifs):
                way = (*path, ("generators", number), ("ifs", index))
                yield f"for … if {_text(test)}  →  for …", way, _placed(ast.Constant(True), test)
    if _may_be_removed(node):
        yield f"{_text(node)}  →  removed", path, _placed(ast.Pass(), node)


def _steers_the_form(test: ast.AST) -> bool:
    return "cython.compiled" in ast.unparse(test) or ast.unparse(test) == "TYPE_CHECKING"


def _placed(node: ast.AST, like: ast.AST) -> ast.AST:
    return ast.copy_location(node, like) if hasattr(like, "lineno") else node


def _text(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def _may_be_removed(node: ast.AST) -> bool:
    """Statements without which the function still runs: calls, what is kept in an object, ways out."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call) and not _only_says(node.value)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Delete | ast.Raise | ast.Continue | ast.Break)


# --- What is tried on each kind of node ----------------------------------------------------------------------------


def _of_compare(node: ast.Compare) -> Iterator[ast.AST]:
    for table in (_NEGATED, _AT_THE_BOUNDARY):
        for index, operator in enumerate(node.ops):
            if type(operator) in table:
                ops = [*node.ops[:index], table[type(operator)](), *node.ops[index + 1 :]]
                yield ast.Compare(node.left, ops, node.comparators)


def _of_boolop(node: ast.BoolOp) -> Iterator[ast.AST]:
    yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    for index in range(len(node.values)):
        rest = [*node.values[:index], *node.values[index + 1 :]]
        yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)


def _of_unaryop(node: ast.UnaryOp) -> Iterator[ast.AST]:
    if isinstance(node.op, ast.Not | ast.USub):
        yield node.operand


def _of_binop(node: ast.BinOp) -> Iterator[ast.AST]:
    of_types = isinstance(node.op, ast.BitOr) and isinstance(node.right, ast.Constant) and node.right.value is None
    if type(node.op) in _INSTEAD and not of_types and not _is_text(node.left) and not _is_text(node.right):
        yield ast.BinOp(node.left, _INSTEAD[type(node.op)](), node.right)


def _of_augassign(node: ast.AugAssign) -> Iterator[ast.AST]:
    if type(node.op) in _INSTEAD and not _is_text(node.value):
        yield ast.AugAssign(node.target, _INSTEAD[type(node.op)](), node.value)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _of_constant(node: ast.Constant) -> Iterator[ast.AST]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
        if node.value > 1:
            yield ast.Constant(node.value - 1)
    elif isinstance(node.value, float):
        yield ast.Constant(2 * node.value or 1.0)


def _of_return(node: ast.Return) -> Iterator[ast.AST]:
    if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
        yield ast.Return(ast.Constant(None))


def _of_call(node: ast.Call) -> Iterator[ast.AST]:
    if _only_says(node):
        return
    if (name := _last_name(node.func)) in _TWINS:
        twin = copy.deepcopy(node.func)
        setattr(twin, "attr" if isinstance(twin, ast.Attribute) else "id", _TWINS[name])
        yield ast.Call(twin, node.args, node.keywords)
    for index, keyword in enumerate(node.keywords):
        if not _is_text(keyword.value):
            yield ast.Call(node.func, node.args, [*node.keywords[:index], *node.keywords[index + 1 :]])
    # Of two numbers the smaller is the smaller, whichever is named first.
    in_any_order = ast.unparse(node.func).rpartition(".")[2] in ("min", "max", "minimum", "maximum")
    for index in range(0 if in_any_order else len(node.args) - 1):
        pair = node.args[index : index + 2]
        if ast.dump(pair[0]) == ast.dump(pair[1]):
            continue
        if not any(isinstance(argument, ast.Starred) or _is_text(argument) for argument in pair):
            yield ast.Call(node.func, [*node.args[:index], *reversed(pair), *node.args[index + 2 :]], node.keywords)
