"""A digest of a consumer's code: its modules, and all source that they import and that is not an installed package.

Evidence is bound to it. The hash covers the syntax tree, so comments and layout do not count, while docstrings and
everything else do. Installed packages are only named; `distributions` identifies them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from onceward.inbox.evidence.distributions import distributions_of, is_standard
from onceward.inbox.evidence.modules import (
    canonical_name,
    imports_of,
    source_of,
    spec_of,
    study,
)

if TYPE_CHECKING:
    from onceward.inbox.contract import Contract

OURS = "onceward"


class Code(msgspec.Struct, frozen=True):
    """A set of modules and their digest."""

    roots: tuple[str, ...]
    """The modules whose imports lead to the others."""
    digest: str
    sources: Mapping[str, str] = {}
    """The hash of each module that the digest covers, by name."""
    packages: tuple[str, ...] = ()
    """The installed distributions that these modules import."""

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.sources)


def code_of(thing: Any, contract: Contract | None = None, also: Collection[str] = ()) -> Code:
    """Return the code of a consumer's class or a handler, including its middleware, the factories of its services, and
    the upcasters and the model of its contract."""
    return code_from(roots_of(thing, contract), also)


def code_from(roots: tuple[str, ...], also: Collection[str] = ()) -> Code:
    """Return the current code, starting from these modules.

    `also` are modules to hash wherever they are: what was source where a consumer was verified may be installed here.
    """
    sources, packages = _Closure(roots, also).collect()
    hashes = {name: study(sources[name]).digest for name in sorted(sources)}
    digest = hashlib.sha256("".join(f"{name}\0{each}\n" for name, each in hashes.items()).encode())
    return Code(roots, digest.hexdigest(), hashes, tuple(sorted(packages)))


def roots_of(thing: Any, contract: Contract | None = None) -> tuple[str, ...]:
    own = _plain(thing)
    parts: list[Any] = list(own.__mro__) if isinstance(own, type) else [own]
    parts += [part for each in getattr(own, "middleware", ()) for part in type(each).__mro__]
    parts += map(_plain, getattr(own, "factories", ()))
    if contract is not None:
        parts += [*map(_plain, contract.upcasters.values()), contract.model]
    names = {module_of(part) for part in parts if part is not None}
    closure = _Closure((module_of(own),))
    return tuple(sorted(name for name in names if closure.is_own(name)))


def module_of(thing: Any) -> str:
    """Return the module that defines a class or function, by the name under which it is imported."""
    return canonical_name(_plain(thing).__module__)


def _plain(thing: Any) -> Any:
    """Return the definition inside a bound method, a partial or a callable object."""
    if isinstance(thing, functools.partial):
        return _plain(thing.func)
    thing = getattr(thing, "__func__", thing)
    return thing if hasattr(thing, "__qualname__") else type(thing)


# ── the user's own modules ──────────────────────────────────────────────────────────────────────────────


class _Closure:
    """The roots, and all modules of the user's own that they import."""

    def __init__(self, roots: tuple[str, ...], also: Collection[str] = ()) -> None:
        self._roots = roots
        self._also = also
        self._homes = {_package(root) for root in roots}
        self._home_packages = {each for root in roots for each in _installed_by(root)}

    def collect(self) -> tuple[dict[str, bytes], set[str]]:
        """Return the sources by module name, and the distributions that they import."""
        sources: dict[str, bytes] = {}
        packages: set[str] = set()
        seen: set[str] = set()
        todo = [*self._roots]
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            if not self.is_own(name):
                packages |= _installed_by(name)
                continue
            spec = spec_of(name)
            source = None if spec is None else source_of(spec)
            if spec is not None and source is not None:
                if not study(source).is_blank:
                    sources[name] = source
                todo += imports_of(name, spec, source, self.is_own)
                todo += [name.rpartition(".")[0]] if "." in name else []  # the package, which runs first
        return sources, packages

    def is_own(self, name: str) -> bool:
        """Whether a module counts with its source, not with the version of a package."""
        package = _package(name)
        if package in self._homes or name in self._also:
            return True
        spec = spec_of(package)
        if spec is None or package == OURS or is_standard(spec):
            return False
        packages = _installed_by(name)
        return not packages or not packages.isdisjoint(self._home_packages)


def _package(module: str) -> str:
    return module.partition(".")[0]


def _installed_by(module: str) -> set[str]:
    """The distributions that a module comes from. Does not import it."""
    spec = spec_of(_package(module))
    if spec is None or _package(module) == OURS or is_standard(spec):
        return set()
    if spec.origin is None:  # a namespace, which several distributions may share
        spec = spec_of(module) or spec
    return set(distributions_of(module, spec))
