"""Find the connector of a URL by its scheme, among the built-in ones and those of installed packages.

A package adds a scheme with an entry point whose name is the scheme:

    [project.entry-points."onceward.connectors"]
    spool = "onceward_spool:SCHEME"

Connectors are imported lazily, and installed packages are not searched for a built-in scheme.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from onceward.connectors.scheme import Scheme
from onceward.errors import ConfigurationError
from onceward.telemetry.logger import OwnLogger

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_log = OwnLogger(logging.getLogger(__name__))

GROUP = "onceward.connectors"
"""The entry-point group of connectors."""
BUILT_IN = {
    "sqlite": "onceward.connectors.sqlite.scheme",
    "redis": "onceward.connectors.redis_streams.scheme",
    "rediss": "onceward.connectors.redis_streams.scheme",
    "postgresql": "onceward.connectors.postgresql.scheme",
    "postgres": "onceward.connectors.postgresql.scheme",
    "nats": "onceward.connectors.jetstream.scheme",
    "tls": "onceward.connectors.jetstream.scheme",
    "boundary+http": "onceward.connectors.boundary.scheme",
    "boundary+https": "onceward.connectors.boundary.scheme",
    "memory": "onceward.connectors.memory.scheme",
}
"""Modules with a SCHEME, by scheme name."""

_installed: dict[str, Scheme] = {}
"""Loaded schemes of other packages."""


def find_scheme(name: str) -> Scheme | None:
    """Return the scheme of this name, or None.

    Raises `ConfigurationError` if the package that offers it cannot be loaded, or if several packages offer it.
    """
    if name in BUILT_IN:
        scheme: Scheme = import_module(BUILT_IN[name]).SCHEME
        return scheme
    if name not in _installed:
        offers = [offer for offer in _offers() if offer.name == name]
        if not offers:
            return None
        if len(offers) > 1:
            packages = ", ".join(sorted(_package(offer) for offer in offers))
            raise ConfigurationError(
                f"several installed packages offer {name}://: {packages}; uninstall all but one of them"
            )
        _installed[name] = _load(offers[0])
    return _installed[name]


def scheme_names() -> list[str]:
    """Return all known schemes, built-in ones first. Loads nothing."""
    return list(dict.fromkeys([*BUILT_IN, *sorted(offer.name for offer in _offers())]))


def _offers() -> list[EntryPoint]:
    from importlib.metadata import entry_points

    found = list(entry_points(group=GROUP))
    for offer in found:
        if offer.name in BUILT_IN:
            _log.warning(
                "package %s offers %s://, which is built in; its connector is not used",
                _package(offer), offer.name,
            )  # fmt: skip
    return [offer for offer in found if offer.name not in BUILT_IN]


def _package(offer: EntryPoint) -> str:
    return offer.value if offer.dist is None else f"{offer.dist.name} {offer.dist.version}"


def _load(offer: EntryPoint) -> Scheme:
    origin = f"{offer.name}:// is offered by package {_package(offer)}"
    try:
        found = offer.load()
    except Exception as error:
        raise ConfigurationError(
            f"{origin}, which cannot be loaded: {type(error).__name__}: {error}; update or uninstall it"
        ) from error
    if not isinstance(found, Scheme):
        raise ConfigurationError(
            f"{origin}, where {offer.value} is a {type(found).__name__} and not a Scheme; update or uninstall it"
        )
    if offer.name not in found.names:
        raise ConfigurationError(
            f"{origin}, where {offer.value} is the scheme of {', '.join(found.names)}; the entry point must have one "
            "of these names"
        )
    return found
