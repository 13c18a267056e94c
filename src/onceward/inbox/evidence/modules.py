"""Find a module's source and what it imports, without running it."""

from __future__ import annotations

import ast
import hashlib
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from onceward.inbox.evidence.imports import ImportedNames, imports_in

SCRIPT = "__main__"
_PARSING = threading.Lock()
"""`ast.parse` of Python 3.11 and 3.12 fails in several threads at once: it counts its depth for all of them."""


def spec_of(name: str) -> ModuleSpec | None:
    module = sys.modules.get(name)
    if module is None and name == canonical_name(SCRIPT):
        module = sys.modules.get(SCRIPT)
    if module is not None:
        return getattr(module, "__spec__", None) or _spec_of_script(name, module)
    try:
        return find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None


def _spec_of_script(name: str, module: ModuleType) -> ModuleSpec | None:
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    spec = ModuleSpec(name, None, origin=file)
    spec.has_location = True
    return spec


def canonical_name(name: str) -> str:
    """Return the import name of a module: a script runs as `__main__` but is verified under its import name."""
    if name != SCRIPT:
        return name
    script = sys.modules.get(SCRIPT)
    spec = getattr(script, "__spec__", None)
    if spec is not None:
        return str(spec.name).removesuffix(f".{SCRIPT}")
    file = getattr(script, "__file__", None)
    return Path(file).stem if file else SCRIPT


def source_of(spec: ModuleSpec) -> bytes | None:
    get_source: Callable[[str], str | None] | None = getattr(spec.loader, "get_source", None)
    try:
        text = get_source(spec.name) if get_source is not None else None
        if text is not None:
            return text.encode()
        return Path(spec.origin).read_bytes() if spec.origin else None  # a compiled module has no source
    except (OSError, ImportError, UnicodeError):
        return None


def syntax_tree(source: bytes) -> ast.Module | None:
    try:
        with _PARSING:
            return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


class Study(msgspec.Struct, frozen=True):
    """What follows from the source of a module alone."""

    digest: str
    is_blank: bool
    """Whether it does nothing, as most `__init__.py`."""
    imports: tuple[ImportedNames, ...]
    """At any depth of its functions."""


_studies: dict[bytes, Study] = {}
"""By the hash of the source. Every consumer of a process asks about the same modules."""


def study(source: bytes) -> Study:
    key = hashlib.sha256(source).digest()
    found = _studies.get(key)
    if found is None:
        found = _studies[key] = _study(source)
    return found


def _study(source: bytes) -> Study:
    tree = syntax_tree(source)
    if tree is None:
        return Study(hashlib.sha256(source).hexdigest(), False, ())
    blank = all(isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) for each in tree.body)
    return Study(hashlib.sha256(b"".join(_serialize(tree))).hexdigest(), blank, tuple(imports_in(tree)))


def imports_of(name: str, spec: ModuleSpec, source: bytes, is_own: Callable[[str], bool]) -> Iterator[str]:
    """Yield the modules that a module imports.

    Only for the user's own, where `is_own` holds, does it look which of `from package import name` are modules: that
    imports the package.
    """
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    for each in study(source).imports:
        base = each.base
        if each.level:
            above = package.split(".")[: len(package.split(".")) - each.level + 1]
            base = ".".join([*above, base] if base else above)
        inner = [f"{base}.{own}" for own in each.names] if each.names and is_own(base) else [base]
        yield from (one if one == base or spec_of(one) is not None else base for one in inner)


def _serialize(node: Any) -> Iterator[bytes]:
    """Yield a syntax tree as bytes. Skips empty fields: newer Pythons have more of them for the same code."""
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}".encode()
        for field, value in ast.iter_fields(node):
            if value not in (None, []) and field not in ("ctx", "kind", "type_comment"):
                yield f" {field}=".encode()
                yield from _serialize(value)
        yield b")"
    elif isinstance(node, list):
        yield b"["
        for each in node:
            yield from _serialize(each)
            yield b","
        yield b"]"
    else:
        yield f"{type(node).__name__}:{node!r}".encode()
