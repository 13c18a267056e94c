"""What a module imports, by its syntax tree: with statements, and with calls that name the module in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from importlib.util import resolve_name

import msgspec

_FOR_TYPES = re.compile(r"(\w+\.)?TYPE_CHECKING")
_OWN_PACKAGE = ("__package__", "__name__", "__spec__.parent")
"""How code names its own package in a call. In an `__init__.py`, `__name__` is the package."""


class ImportedNames(msgspec.Struct, frozen=True):
    """A module that code imports, or `from base import names`; `level` counts the dots before the base."""

    base: str
    names: tuple[str, ...] = ()
    level: int = 0


def imports_in(tree: ast.Module) -> Iterator[ImportedNames]:
    nodes = list(_executed(tree))
    known_as = _importers(nodes)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (ImportedNames(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield ImportedNames(node.module or "", tuple(alias.name for alias in node.names), node.level)
        elif isinstance(node, ast.Call):
            yield from _imported_by_call(node, known_as)


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree without what only type checkers read."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, ast.If) and _FOR_TYPES.fullmatch(ast.unparse(node.test)):
            todo += node.orelse
        else:
            todo += ast.iter_child_nodes(node)


def _importers(nodes: list[ast.AST]) -> dict[str, str]:
    """The functions that import, by their names in this module: it may call them something else."""
    found = {"import_module": "import_module", "__import__": "__import__"}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module in ("importlib", "builtins"):
            found |= {each.asname: each.name for each in node.names if each.asname and each.name in found}
    return found


def _imported_by_call(call: ast.Call, known_as: Mapping[str, str]) -> Iterator[ImportedNames]:
    """The module in `import_module("shop.rules")`. A name that is computed cannot be known."""
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    name = _text(_argument(call, 0, "name"))
    if called not in known_as or name is None:
        return
    if known_as[called] == "import_module":
        yield from _imported_by_name(name, _argument(call, 1, "package"))
        return
    listed, level = _argument(call, 3, "fromlist"), _argument(call, 4, "level")
    names = [_text(each) for each in listed.elts] if isinstance(listed, ast.List | ast.Tuple) else []
    dots = level.value if isinstance(level, ast.Constant) else 0
    if isinstance(dots, int):
        yield ImportedNames(name, tuple(each for each in names if each is not None), dots)


def _imported_by_name(name: str, package: ast.expr | None) -> Iterator[ImportedNames]:
    own = name.lstrip(".")
    if own == name:
        yield ImportedNames(name)
    elif package is None or ast.unparse(package) in _OWN_PACKAGE:
        yield ImportedNames(own, level=len(name) - len(own))
    elif (anchor := _text(package)) is not None:
        try:
            yield ImportedNames(resolve_name(name, anchor))
        except ImportError:  # above the top: the call fails, too
            return


def _argument(call: ast.Call, place: int, name: str) -> ast.expr | None:
    if any(isinstance(each, ast.Starred) for each in call.args[: place + 1]):
        return None
    given = {each.arg: each.value for each in call.keywords}
    return call.args[place] if place < len(call.args) else given.get(name)


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
