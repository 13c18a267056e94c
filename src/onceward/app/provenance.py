"""Where each value of a consumer or producer came from: a variable, a file or the code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from onceward.app.policies import default_loop

if TYPE_CHECKING:
    from onceward.app.app import Consumer, Onceward, Producer
    from onceward.task.mixins.policies import Policy

CODE = "code"
"""The origin of values that neither a variable nor a file sets."""
DEFAULT = "default"
"""The origin of values that every app sets, unless something else says otherwise."""
CONCURRENCY = "policy.loop.concurrency.value"
"""The field that an app's setting `concurrency` sets for every consumer."""


def consumer_rows(app: Onceward, consumer: Consumer) -> list[dict[str, Any]]:
    place = f"consumers.{consumer.name}"
    source = setting_row(f"{place}.source", str(consumer.source), _source_origin(app, consumer.name))
    defaults = dict(_leaves(default_loop(asynchronous=consumer.asynchronous), f"{place}.policy.loop"))
    rows = _policy_rows(app, place, consumer.policy)
    for row in rows:
        if row["origin"] == CODE and defaults.get(row["name"]) == row["value"]:
            row["origin"] = DEFAULT
    return [source, *rows]


def producer_rows(app: Onceward, producer: Producer) -> list[dict[str, Any]]:
    place = f"producers.{producer.name}"
    sink = setting_row(f"{place}.sink", str(producer.sink), _sink_origin(app, producer))
    return [sink, *_policy_rows(app, place, producer.policy)]


def setting_row(name: str, value: Any, origin: str) -> dict[str, Any]:
    """A setting with its value, unless that is a secret, and its origin."""
    from onceward._secrets import MASK, mask_url, names_secret

    if isinstance(value, str):
        value = MASK if names_secret(name.rpartition(".")[2]) else mask_url(value)
    return {"name": name, "value": value, "origin": origin}


def _policy_rows(app: Onceward, place: str, policy: Policy) -> list[dict[str, Any]]:
    """Only fields that were set; the others have their defaults."""
    fields = _leaves(policy.model_dump(exclude_unset=True), f"{place}.policy")
    return [setting_row(path, value, _origin(app, path)) for path, value in fields]


def _leaves(tree: dict[str, Any], at: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{at}.{name}")
        else:
            yield f"{at}.{name}", value


def _origin(app: Onceward, path: str) -> str:
    """Where a value of a function came from. It may be part of a table that was set as a whole."""
    from onceward.app.settings import in_variables

    origins = app.resolved.origins
    table, name, field = path.split(".", 2)
    parts = field.split(".")
    for length in range(len(parts), 0, -1):
        for known in (name, in_variables(name)):
            given = ".".join([table, known, *parts[:length]])
            if given in origins:
                return origins[given]
    return origins.get("concurrency", CODE) if (table, field) == ("consumers", CONCURRENCY) else CODE


def _source_origin(app: Onceward, consumer: str) -> str:
    """An empty variable is not where the value came from."""
    changed = app.resolved.of_consumer(consumer).source is not None
    return _origin(app, f"consumers.{consumer}.source") if changed else CODE


def _sink_origin(app: Onceward, producer: Producer) -> str:
    if app.resolved.of_producer(producer.name).sink is not None:
        return _origin(app, f"producers.{producer.name}.sink")
    return CODE if producer.follows is None else _source_origin(app, producer.follows.name)
