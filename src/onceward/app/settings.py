"""An app's settings and where each came from: environment, files, code, default; the first that has one wins.

ONCEWARD_DATABASE=sqlite:///shop.db                 environment; ONCEWARD_CONSUMERS__CHARGE__SOURCE=… for one consumer,
                                                    ONCEWARD_PRODUCERS__PLACE__SINK=… for one producer
                                                    .env, then files of these names in ONCEWARD_SECRETS_DIR
database = "sqlite:///shop.db"                      onceward.toml, or [tool.onceward] in pyproject.toml
Onceward("shop", database="sqlite:///shop.db")      keyword; arguments of a decorator are code, too
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, ValidationError

from onceward.app.layers import layers
from onceward.errors import ConfigurationError
from onceward.task.mixins.policies import OptionalCount, Policy, Seconds, none_from_text
from onceward.task.settings import EngineSettings

ENVS = ("development", "dev", "local", "test", "ci", "staging", "production", "prod")
"""A fixed list, because a misspelled `production` would skip the evidence check."""

T = TypeVar("T")
OptionalText = Annotated[str | None, BeforeValidator(none_from_text)]


class ConsumerSettings(Policy):
    """What a deployment may change about one consumer."""

    source: OptionalText = Field(default=None, description="Source URL that replaces the one in the code.")
    policy: dict[str, Any] | None = Field(default=None, description="Policy fields to change.")
    commit: Literal["group", "each"] | None = Field(
        default=None, description="Whether events that wait together share a commit, or each has its own."
    )


class ProducerSettings(Policy):
    """What a deployment may change about one producer."""

    sink: OptionalText = Field(default=None, description="Sink URL that replaces the one in the code.")


def _lines(given: Any) -> Any:
    """A file may have a list of keys."""
    return "\n".join(map(str, given)) if isinstance(given, list) else given


def _words(given: Any) -> Any:
    """A variable has them in one line."""
    return [each.strip() for each in given.split(",") if each.strip()] if isinstance(given, str) else given


def _check_env(name: str) -> str:
    if name.strip().lower() not in ENVS:
        raise ValueError(f"must be one of {', '.join(ENVS)}, not {name!r}")
    return name


class AppSettings(Policy):
    database: OptionalText = Field(
        default=None,
        description="Database of inbox and dead letters: sqlite:///shop.db or postgresql://user@host/name.",
    )
    env: Annotated[str, AfterValidator(_check_env)] = Field(
        default="development", description="`production` requires evidence; see onceward verify."
    )
    evidence: OptionalText = Field(
        default=None,
        description="Evidence from CI: the path of a file of `onceward verify --out`, or its JSON.",
    )
    evidence_keys: Annotated[OptionalText, BeforeValidator(_lines)] = Field(
        default=None,
        description="Public keys that may have signed the evidence: PEM, paths of PEM files, or ed25519:BASE64.",
    )
    evidence_unsigned: bool = Field(
        default=False, description="Accept evidence without a signature, because the image is trusted."
    )
    pool_size: OptionalCount = Field(
        default=None,
        description="Connections to the database per process, at most; as many as the concurrency needs if not set.",
    )
    database_connect_timeout: Seconds = Field(
        default=10.0, description="Seconds to connect to PostgreSQL; connect_timeout in the URL wins."
    )
    database_silence_timeout: Seconds = Field(
        default=20.0, description="Seconds after which a connection to a PostgreSQL that is gone breaks."
    )
    database_answers_within: Seconds = Field(
        default=2.0,
        description="Seconds that a call to PostgreSQL may take before a worker tries another connection; without an "
        "answer there either, it is not ready.",
    )
    relay: bool = Field(
        default=True,
        description="Whether `onceward run` relays the outbox; if not, `onceward relay` has to.",
    )
    outbox_retention: Seconds = Field(
        default=86400.0, description="Seconds that the outbox keeps a message after it was published."
    )
    processes: PositiveInt = Field(default=1, description="Worker processes.")
    concurrency: OptionalCount = Field(
        default=None, description="Transactions in flight per consumer and process."
    )
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    health: OptionalText = Field(
        default=None, description="HOST:PORT of /livez, /readyz, /progress, /metrics."
    )
    console: OptionalText = Field(
        default=None, description="HOST:PORT of the console, which has the pages of `health`, too."
    )
    console_users: OptionalText = Field(
        default=None, description="File of the console's users; needed on any address but this machine's."
    )
    console_redact: Annotated[list[str], BeforeValidator(_words)] = Field(
        default_factory=list,
        description="Names or paths of payload fields that the console hides, such as email or customer.*",
    )
    console_trace_url: OptionalText = Field(
        default=None, description="Link to a trace, with {trace_id} in it, for the console."
    )
    sample_every: Seconds = Field(
        default=15.0,
        description="Seconds between two looks at what waits in the sources and the database, for /metrics.",
    )
    grace: Seconds = Field(default=30.0, description="Seconds for work in flight to finish when stopping.")
    stalled_after: Seconds = Field(
        default=300.0,
        description="Seconds without progress after which a worker with work in flight is unhealthy.",
    )
    engine: EngineSettings = Field(
        default_factory=EngineSettings, description="Settings of the engine: stuck threads, I/O guard, spans."
    )
    consumers: dict[str, ConsumerSettings] = Field(default_factory=dict)
    producers: dict[str, ProducerSettings] = Field(default_factory=dict)


TABLES: Mapping[str, type[Policy]] = {
    "engine": EngineSettings,
    "consumers": ConsumerSettings,
    "producers": ProducerSettings,
}
"""Settings that are tables of settings."""


class Resolved:
    """Settings and the origin of each value by its dotted name."""

    def __init__(self, settings: AppSettings, origins: Mapping[str, str]) -> None:
        self.settings = settings
        self.origins = origins

    def with_these(self, given: Mapping[str, Any], origin: str) -> Resolved:
        """Return a copy in which `given` wins over all other values."""
        origins = {**self.origins, **dict.fromkeys(given, origin)}
        try:
            return Resolved(AppSettings.model_validate({**self.settings.model_dump(), **given}), origins)
        except ValidationError as error:
            raise ConfigurationError(_describe(error, origins)) from None

    def of_consumer(self, name: str) -> ConsumerSettings:
        """The settings of one consumer."""
        return _of(self.settings.consumers, name) or ConsumerSettings()

    def of_producer(self, name: str) -> ProducerSettings:
        """The settings of one producer."""
        return _of(self.settings.producers, name) or ProducerSettings()

    def origin_of(self, consumer: str) -> str:
        """Where settings change the policy of a consumer; empty if nowhere."""
        tables = {f"consumers.{name}.policy" for name in (consumer, in_variables(consumer))}
        found = [
            origin
            for path, origin in self.origins.items()
            if any(path == table or path.startswith(f"{table}.") for table in tables)
        ]
        return ", ".join(dict.fromkeys(found))

    def check_names(self, table: Literal["consumers", "producers"], names: Iterable[str]) -> None:
        """Raise ConfigurationError for settings of unknown names: a mistyped one would silently change nothing."""
        names = list(names)
        known = {*names, *map(in_variables, names)}
        for path, origin in self.origins.items():
            first, _, rest = path.partition(".")
            name = rest.partition(".")[0]
            if first == table and name not in known:
                kind = table.removesuffix("s")
                raise ConfigurationError(
                    f"{origin}: no {kind} is named {name!r}; known: {', '.join(names) or 'none'}"
                )

    def rows(self) -> list[tuple[str, Any, str]]:
        """Name, value and origin of every setting, in field order."""
        return list(_rows(self.settings.model_dump(), self.origins))


def in_variables(name: str) -> str:
    """A function's name as it appears in a variable's name, in lower case."""
    return name.lower().replace("-", "_")


def _of(table: Mapping[str, T], name: str) -> T | None:
    """Look up a name, also as variables spell it: without capitals and hyphens."""
    return table.get(name) or table.get(in_variables(name))


def resolve(
    keywords: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Resolved:
    """Read the settings of all origins. `keywords` that are None count as not given."""
    directory = directory or Path.cwd()
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers(keywords, os.environ if environ is None else environ, directory):
        values = _spell_as_in(tree, layer.values) if layer.of_variable else layer.values
        _merge(tree, values, layer.origin, origins)
    try:
        return Resolved(AppSettings.model_validate(tree), origins)
    except ValidationError as error:
        raise ConfigurationError(_describe(error, origins)) from None


def _merge(
    tree: dict[str, Any], layer: Mapping[str, Any], origin: str, origins: dict[str, str], at: str = ""
) -> None:
    for name, value in layer.items():
        path = f"{at}{name}"
        is_table = isinstance(value, Mapping)
        if name in tree and isinstance(tree[name], dict) is not is_table:
            raise ConfigurationError(
                f"{origin}: {path} is {'a table' if is_table else 'a value'} here but not elsewhere; use one form"
            )
        if is_table:
            _merge(tree.setdefault(name, {}), value, origin, origins, f"{path}.")
        else:
            tree[name] = value
            origins[path] = origin


def _spell_as_in(tree: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Name functions as weaker layers do, so a variable wins over what a file says of `sendMail` or `send-mail`."""
    spelled = dict(layer)
    for table in ("consumers", "producers"):
        given, known = layer.get(table), tree.get(table)
        if isinstance(given, Mapping) and isinstance(known, Mapping):
            names = {in_variables(name): name for name in known} | {name: name for name in known}
            spelled[table] = {names.get(name, name): value for name, value in given.items()}
    return spelled


def _describe(error: ValidationError, origins: Mapping[str, str]) -> str:
    """The problems without the values, which may be URLs with passwords."""
    problems = []
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        path = ".".join(str(part) for part in problem["loc"])
        origin = next((origins[at] for at in origins if at == path or at.startswith(f"{path}.")), "settings")
        known = TABLES.get(str(problem["loc"][0]), AppSettings)
        what = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            what = f"no such setting; the settings are {', '.join(known.model_fields)}"
        problems.append(f"{origin}: {path}: {what}")
    return "; ".join(problems)


def _rows(tree: Mapping[str, Any], origins: Mapping[str, str], at: str = "") -> Any:
    for name, value in tree.items():
        path = f"{at}{name}"
        if isinstance(value, dict) and value:
            yield from _rows(value, origins, f"{path}.")
        else:
            yield path, value, origins.get(path, "default")
