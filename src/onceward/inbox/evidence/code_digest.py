"""A digest of a consumer's code: its modules and those of the user's own that they import, and nothing else.

Evidence is bound to it. The hash covers the syntax tree, so comments and layout do not count, while docstrings and
everything else do. The standard library and installed packages are not included: they have their own versions.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from onceward.inbox.contract import Contract

SCRIPT = "__main__"
_INSTALLED = tuple(
    Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


class Code(msgspec.Struct, frozen=True):
    """A set of modules and their digest."""

    roots: tuple[str, ...]
    """The modules whose imports lead to the others."""
    modules: tuple[str, ...]
    """The names of all modules that the digest covers."""
    digest: str


def code_of(thing: Any, contract: Contract | None = None) -> Code:
    """Return the code of a consumer's class or a handler, including the upcasters and the model of its contract."""
    return code_from(roots_of(thing, contract))


def code_from(roots: tuple[str, ...]) -> Code:
    """Return the current code, starting from these modules."""
    sources = _closure(roots)
    digest = hashlib.sha256()
    for name in sorted(sources):
        digest.update(f"{name}\0{_hash_of(sources[name])}\n".encode())
    return Code(roots, tuple(sorted(sources)), digest.hexdigest())


def roots_of(thing: Any, contract: Contract | None = None) -> tuple[str, ...]:
    own = _plain(thing)
    parts: list[Any] = list(own.__mro__) if isinstance(own, type) else [own]
    if contract is not None:
        parts += [*map(_plain, contract.upcasters.values()), contract.model]
    home = _home(module_of(own))
    names = {module_of(part) for part in parts if part is not None}
    return tuple(sorted(name for name in names if _is_own(name, home)))


def module_of(thing: Any) -> str:
    """Return the module that defines a class or function, by the name under which it is imported."""
    return _canonical(_plain(thing).__module__)


def _plain(thing: Any) -> Any:
    """Return the definition inside a bound method, a partial or a callable object."""
    if isinstance(thing, functools.partial):
        return _plain(thing.func)
    thing = getattr(thing, "__func__", thing)
    return thing if hasattr(thing, "__qualname__") else type(thing)


# ── the user's own modules ──────────────────────────────────────────────────────────────────────────────


class _Home(msgspec.Struct, frozen=True):
    """Where the user's own modules are."""

    package: str
    folder: Path | None
    """Of top-level modules; the other modules in it are also the user's own."""


def _home(module: str) -> _Home:
    package = module.partition(".")[0]
    spec = _spec(package)
    loose = spec is not None and spec.submodule_search_locations is None and spec.origin is not None
    folder = Path(spec.origin).resolve().parent if loose and spec and spec.origin else None
    return _Home(package, None if folder is None or _is_installed(folder) else folder)


def _is_own(module: str, home: _Home) -> bool:
    package = module.partition(".")[0]
    if package == home.package:
        return True
    spec = _spec(package)
    if spec is None or home.folder is None:
        return False
    places = [
        Path(place).resolve() for place in (spec.origin, *(spec.submodule_search_locations or ())) if place
    ]
    return any(place.is_relative_to(home.folder) and not _is_installed(place) for place in places)


def _is_installed(place: Path) -> bool:
    return any(place.is_relative_to(installed) for installed in _INSTALLED)


# ── imports ─────────────────────────────────────────────────────────────────────────────────────────────


def _closure(roots: tuple[str, ...]) -> dict[str, bytes]:
    """Return the sources, by module name, of the roots and all of the user's own modules they import."""
    sources: dict[str, bytes] = {}
    homes = [_home(root) for root in roots]
    todo = list(roots)
    while todo:
        name = todo.pop()
        if name in sources:
            continue
        spec = _spec(name)
        source = None if spec is None else _source(spec)
        if spec is None or source is None:
            continue
        sources[name] = source
        todo += [found for found in _imports(name, spec, source) if any(_is_own(found, h) for h in homes)]
    return sources


def _imports(name: str, spec: ModuleSpec, source: bytes) -> Iterator[str]:
    tree = _tree(source)
    if tree is None:
        return
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if _spec(inner) is not None else base


def _spec(name: str) -> ModuleSpec | None:
    module = sys.modules.get(name)
    if module is None and name == _canonical(SCRIPT):
        module = sys.modules.get(SCRIPT)
    if module is not None:
        return getattr(module, "__spec__", None) or _spec_of_script(name, module)
    try:
        return find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None


def _spec_of_script(name: str, module: ModuleType) -> ModuleSpec | None:
    file = getattr(module, "__file__", None)
    return None if file is None else ModuleSpec(name, None, origin=file)


def _canonical(name: str) -> str:
    """Return the import name of a module: a script runs as `__main__` but is verified under its import name."""
    if name != SCRIPT:
        return name
    script = sys.modules.get(SCRIPT)
    spec = getattr(script, "__spec__", None)
    if spec is not None:
        return str(spec.name).removesuffix(f".{SCRIPT}")
    file = getattr(script, "__file__", None)
    return Path(file).stem if file else SCRIPT


def _source(spec: ModuleSpec) -> bytes | None:
    get_source: Callable[[str], str | None] | None = getattr(spec.loader, "get_source", None)
    try:
        text = get_source(spec.name) if get_source is not None else None
        if text is not None:
            return text.encode()
        return Path(spec.origin).read_bytes() if spec.origin else None  # a compiled module has no source
    except (OSError, ImportError, UnicodeError):
        return None


# ── the hash of one module ──────────────────────────────────────────────────────────────────────────────


def _hash_of(source: bytes) -> str:
    tree = _tree(source)
    return hashlib.sha256(source if tree is None else b"".join(_serialize(tree))).hexdigest()


def _tree(source: bytes) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


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
