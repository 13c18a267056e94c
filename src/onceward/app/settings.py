"""An app's settings, and where each came from: keyword, environment, file, default; the first that has one wins.

Onceward("shop", database="sqlite:///shop.db")      keyword
ONCEWARD_DATABASE=sqlite:///shop.db                 environment; ONCEWARD_CONSUMERS__CHARGE__SOURCE=… for one consumer
database = "sqlite:///shop.db"                      onceward.toml, or [tool.onceward] in pyproject.toml
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, ValidationError

from onceward.task.exceptions import ConfigurationError
from onceward.task.mixins.policies import Policy, Seconds

PREFIX = "ONCEWARD_"
FOREIGN = ("ONCEWARD_TEST_", "ONCEWARD_BOUNDARY_")
"""Variables of other parts."""


class ConsumerSettings(Policy):
    """What a deployment may change of one consumer."""

    source: str | None = Field(default=None, description="Another source than the code names, by URL.")
    policy: dict[str, Any] | None = Field(default=None, description="Fields of its policy.")


class AppSettings(Policy):
    database: str | None = Field(default=None, description="Of inbox and dead letters, as an SQLAlchemy URL.")
    env: str = Field(
        default="development", description="`production` asks for evidence: see onceward verify."
    )
    processes: PositiveInt = Field(default=1, description="Worker processes.")
    concurrency: PositiveInt | None = Field(
        default=None, description="Transactions in flight, for each consumer of each process."
    )
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    health: str | None = Field(default=None, description="HOST:PORT of /livez, /readyz, /progress, /metrics.")
    grace: Seconds = Field(default=30.0, description="Seconds that work in flight has to end when stopping.")
    stalled_after: Seconds = Field(
        default=300.0,
        description="Seconds without progress after which a worker that holds work is unhealthy.",
    )
    consumers: dict[str, ConsumerSettings] = Field(default_factory=dict)


class Resolved:
    """Settings, and the origin of each value by its dotted name."""

    def __init__(self, settings: AppSettings, origins: Mapping[str, str]) -> None:
        self.settings = settings
        self.origins = origins

    def rows(self) -> list[tuple[str, Any, str]]:
        """Name, value and origin of everything, in the order of the fields."""
        return list(_rows(self.settings.model_dump(), self.origins))


def resolve(
    keywords: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Resolved:
    """`keywords` that are None count as not given."""
    directory = directory or Path.cwd()
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in _layers(keywords, os.environ if environ is None else environ, directory):
        _merge(tree, layer, origin, origins)
    try:
        return Resolved(AppSettings.model_validate(tree), origins)
    except ValidationError as error:
        raise ConfigurationError(_told(error, origins)) from None


def _layers(
    keywords: Mapping[str, Any], environ: Mapping[str, str], directory: Path
) -> list[tuple[str, dict[str, Any]]]:
    """From the weakest to the strongest."""
    layers = [(str(file.name), tree) for file, tree in _files(directory)]
    for name, text in environ.items():
        if name.startswith(PREFIX) and not name.startswith(FOREIGN):
            layers.append((name, _nested(name.removeprefix(PREFIX).lower().split("__"), text)))
    given = {name: value for name, value in keywords.items() if value is not None}
    return [*layers, ("keyword", given)]


def _files(directory: Path) -> list[tuple[Path, dict[str, Any]]]:
    found = []
    for name, path in (("pyproject.toml", ("tool", "onceward")), ("onceward.toml", ())):
        file = directory / name
        if not file.is_file():
            continue
        try:
            tree: Any = tomllib.loads(file.read_text("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{file} is not valid TOML: {error}") from None
        for part in path:
            tree = tree.get(part, {})
        found.append((file, tree))
    return found


def _nested(path: list[str], text: str) -> dict[str, Any]:
    tree: Any = text
    for part in reversed(path):
        tree = {part: tree}
    return dict(tree)


def _merge(
    tree: dict[str, Any], layer: Mapping[str, Any], origin: str, origins: dict[str, str], at: str = ""
) -> None:
    for name, value in layer.items():
        path = f"{at}{name}"
        if isinstance(value, Mapping):
            node = tree.setdefault(name, {})
            if not isinstance(node, dict):
                raise ConfigurationError(f"{origin}: {path} is a table here and a value elsewhere")
            _merge(node, value, origin, origins, f"{path}.")
        else:
            tree[name] = value
            origins[path] = origin


def _told(error: ValidationError, origins: Mapping[str, str]) -> str:
    problems = []
    for problem in error.errors(include_url=False, include_context=False):
        path = ".".join(str(part) for part in problem["loc"])
        origin = next((origins[at] for at in origins if at == path or at.startswith(f"{path}.")), "settings")
        problems.append(f"{origin}: {path}: {problem['msg']}")
    return "; ".join(problems)


def _rows(tree: Mapping[str, Any], origins: Mapping[str, str], at: str = "") -> Any:
    for name, value in tree.items():
        path = f"{at}{name}"
        if isinstance(value, dict) and value:
            yield from _rows(value, origins, f"{path}.")
        else:
            yield path, value, origins.get(path, "default")
