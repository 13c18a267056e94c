"""A server's configuration in TOML. Errors name the file, the table and the key."""

from __future__ import annotations

import os
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import msgspec

from onceward.boundary.client.transport import check_url
from onceward.boundary.server.access import Peer, Peers
from onceward.boundary.server.address import parse_address
from onceward.boundary.server.limits import Limits
from onceward.boundary.settings import BoundarySettings
from onceward.boundary.tls import Tls
from onceward.errors import ConfigurationError

Text = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Quota = Annotated[int, msgspec.Meta(ge=0)]

REFUSE, DROP_OLDEST = "refuse", "drop_oldest"
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Files(_Table, frozen=True, kw_only=True):
    """[tls]"""

    ca: Text
    cert: Text
    key: Text


class LinkConfig(_Table, frozen=True, kw_only=True):
    """[[links]]: where facts are pulled from. See `onceward.boundary.links.link`."""

    name: Text
    url: Text
    consumer: str = ""
    from_zones: tuple[str, ...] = ()
    to_zones: tuple[str, ...] = ()


class RetentionConfig(_Table, frozen=True, kw_only=True):
    """[retention]: how long facts of each class are kept, such as "7d" or "12h"."""

    operational: Text | None = None
    audit: Text | None = None
    documents: Text | None = None


class Buffer(_Table, frozen=True, kw_only=True):
    """[buffer]"""

    capacity: Text | None = None
    threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    when_full: str = REFUSE
    safety: bool = False


class Quotas(_Table, frozen=True, kw_only=True):
    """[quotas]: how many there may be. See `BoundarySettings` for what counts, and the defaults."""

    consumers: Quota | None = None
    labels: Quota | None = None
    objects: Quota | None = None
    object_bytes: Text | None = None

    def settings(self) -> dict[str, int]:
        size = None if self.object_bytes is None else _bytes("[quotas] object_bytes", self.object_bytes)
        found = {
            "max_consumers": self.consumers,
            "max_labels": self.labels,
            "max_objects": self.objects,
            "max_object_bytes": size,
        }
        return {name: value for name, value in found.items() if value is not None}


class LimitsConfig(_Table, frozen=True, kw_only=True):
    """[limits]: see `onceward.boundary.server.limits`."""

    connections: Count | None = None
    calls: Count | None = None
    headers: Text | None = None
    body: Text | None = None
    idle: Text | None = None
    body_memory: Text | None = None
    resets: Count | None = None
    shutdown: Text | None = None

    def read(self) -> Limits:
        found = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        for name in ("headers", "body", "idle", "shutdown"):
            if name in found:
                found[name] = _seconds(f"[limits] {name}", found[name])
        if "body_memory" in found:
            found["body_memory"] = _bytes("[limits] body_memory", found["body_memory"])
        return Limits(**found)


class Config(_Table, frozen=True, kw_only=True):
    """The whole file."""

    zone: Text | None = None
    listen: Text | None = None
    store: Text | None = None
    consumers: tuple[Text, ...] = ()
    """Names that are known from the start, before their first fetch."""
    strict_consumers: bool = False
    require_artifacts: bool = False
    tls: Files | None = None
    peers: tuple[Peer, ...] = ()
    links: tuple[LinkConfig, ...] = ()
    retention: RetentionConfig = RetentionConfig()
    buffer: Buffer = Buffer()
    quotas: Quotas = Quotas()
    limits: LimitsConfig = LimitsConfig()

    def files(self, directory: Path) -> Tls | None:
        """Return the files of [tls]. Relative paths start at `directory`, that of the configuration."""
        if self.tls is None:
            return None
        return Tls(ca=directory / self.tls.ca, cert=directory / self.tls.cert, key=directory / self.tls.key)

    def settings(self) -> BoundarySettings:
        times = msgspec.structs.asdict(self.retention)
        return BoundarySettings(
            strict_consumers=self.strict_consumers,
            require_artifacts=self.require_artifacts,
            retention={name: _seconds(f"[retention] {name}", text) for name, text in times.items() if text},
            capacity_bytes=(
                None if self.buffer.capacity is None else _bytes("[buffer] capacity", self.buffer.capacity)
            ),
            backpressure_at=self.buffer.threshold,
            drop_oldest=self.buffer.when_full == DROP_OLDEST,
            safety=self.buffer.safety,
            **self.quotas.settings(),
        )


def read_config(path: str | os.PathLike[str]) -> Config:
    """Read and check a file. Raise `ConfigurationError` for everything detectable without starting the server."""
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
        config = msgspec.convert(found, Config)
        _check(config)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{path}: {_describe(str(error), found)}") from error
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return config


def _check(config: Config) -> None:
    if config.listen is not None:
        parse_address(config.listen, "listen")
    if config.peers and config.tls is None:
        raise ConfigurationError("[[peers]] are identified by their certificates: add [tls]")
    if config.links and config.zone is None:
        raise ConfigurationError("zone is missing: a server with [[links]] must know its own zone")
    if config.buffer.when_full not in (REFUSE, DROP_OLDEST):
        raise ConfigurationError(
            f"[buffer] when_full: must be {REFUSE} or {DROP_OLDEST}, not {config.buffer.when_full!r}"
        )
    if config.buffer.safety and config.buffer.when_full == DROP_OLDEST:
        raise ConfigurationError("[buffer] when_full: drop_oldest loses facts, which safety = true forbids")
    for name, count in Counter(link.name for link in config.links).items():
        if count > 1:
            raise ConfigurationError(f"two [[links]] have the name {name!r}")
    for number, link in enumerate(config.links, 1):
        try:
            check_url(link.url)
        except ConfigurationError as error:
            raise ConfigurationError(f"[[links]] number {number} ({link.name!r}) url: {error}") from None
    Peers(config.peers)
    config.settings()
    config.limits.read()


def _seconds(key: str, text: str) -> float:
    return _parse_quantity(key, text, SECONDS, "7d, 12h, 30m or 45s")


def _bytes(key: str, text: str) -> int:
    return int(_parse_quantity(key, text, BYTES, "10GB, 500MB or 2GiB"))


def _parse_quantity(key: str, text: str, units: dict[str, int], such_as: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text)
    if found is None or found[2] not in units or not float(found[1]):
        raise ConfigurationError(f"{key}: must be a number with a unit, such as {such_as}, not {text!r}")
    return float(found[1]) * units[found[2]]


def _describe(message: str, found: dict[str, Any]) -> str:
    """Rewrite the library's message, replacing the path at its end, - at `$.tls.ca`, with the table and the key."""
    problem, _, path = message.partition(" - at `$")
    table, key = _locate(path.rstrip("`"), found)
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem):
        return f"{table or 'the file'} has no key {unknown[1]!r}; check the spelling"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
        return f"{table} must have the key {missing[1]!r}"
    return f"{table} {key}".strip() + f": {_plain(problem)}"


def _locate(path: str, found: dict[str, Any]) -> tuple[str, str]:
    """Return table and key: `.peers[0].zone` is zone of the first peer, `.tls.ca` ca of [tls], `.zone` in no table."""
    name, number, key = re.fullmatch(r"(?:\.(\w+))?(?:\[(\d+)\])?(?:\.(.*))?", path).groups("")  # type: ignore[union-attr]
    if number:
        entry = found[name][int(number)]
        called = entry.get("identity", entry.get("name")) if isinstance(entry, dict) else None
        return f"[[{name}]] number {int(number) + 1}" + (f" ({called!r})" if called else ""), key
    return (f"[{name}]", key) if key or isinstance(found.get(name), dict) else ("", name)


def _plain(problem: str) -> str:
    for theirs, ours in _WORDS.items():
        problem = problem.replace(theirs, ours)
    return problem


_WORDS = {
    "Expected": "must be",
    "got": "not",
    " | null": "",
    "`str` of length >= 1": "a nonempty string",
    "`str`": "a string",
    "`str": "`a string",
    "`int` >= 0": "an integer of 0 or more",
    "`int` >= 1": "an integer of at least 1",
    "`int`": "an integer",
    "`float` > 0.0": "a number above 0",
    "`float` <= 1.0": "a number of at most 1",
    "`float`": "a number",
    "`bool`": "true or false",
    "`array`": "a list",
    "`object`": "a table",
    "`": "",
}
