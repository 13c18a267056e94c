"""`onceward config`: every setting and where its value came from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from onceward.cli.exit import AsJson, argument, refuse_mistakes
from onceward.cli.output import print_json, print_table

if TYPE_CHECKING:
    from onceward.app import Onceward
    from onceward.app.app import Producer
    from onceward.task.mixins.policies import Policy

CONFIG_EXAMPLES = """
Examples:

- `onceward config` to show the environment and the files here

- `onceward config shop:app` to include the app's code and its consumers

- `onceward config shop:app --json | jq '.[] | select(.origin != "default")'` to list what was set
"""

OF_FUNCTIONS = ("consumers", "producers")
CODE = "code"
"""The origin of values that neither a variable nor a file sets."""
CONCURRENCY = "policy.loop.concurrency.value"
"""The field that an app's setting `concurrency` sets for every consumer."""


def config(
    app: Annotated[
        str | None,
        argument("MODULE:APP", "The app, as in shop:app.", show_default="only environment and files"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show every setting and where its value came from.

    An ONCEWARD_… variable wins over onceward.toml, that over [tool.onceward] in pyproject.toml, that over the code: a
    keyword of Onceward(…) has the origin `keyword`, an argument of a decorator the origin `code`. Options of
    `onceward run` win over all. Of policies only the fields that were set are shown. Passwords are hidden.

    Exit code: 0; 2 if a setting is wrong.
    """
    with refuse_mistakes(as_json):
        rows = _rows(app)
    if as_json:
        print_json(rows)
    else:
        texts = [{**row, "value": "-" if row["value"] is None else str(row["value"])} for row in rows]
        print_table(texts, {"name": "setting", "value": "value", "origin": "from"}, "")


def _rows(app: str | None) -> list[dict[str, Any]]:
    from onceward.app.settings import resolve

    if app is None:
        return [_row(*each) for each in resolve({}).rows() if _is_general(each[0]) or each[2] != "default"]
    from onceward.app.lookup import load_app

    loaded = load_app(app)
    loaded.check()
    rows = [_row(*each) for each in loaded.resolved.rows() if _is_general(each[0])]
    for consumer in loaded.consumers.values():
        place = f"consumers.{consumer.name}"
        rows.append(_row(f"{place}.source", str(consumer.source), _source_origin(loaded, consumer.name)))
        rows += _policy_rows(loaded, place, consumer.policy)
    for producer in loaded.producers.values():
        place = f"producers.{producer.name}"
        rows.append(_row(f"{place}.sink", str(producer.sink), _sink_origin(loaded, producer)))
        rows += _policy_rows(loaded, place, producer.policy)
    return rows


def _is_general(name: str) -> bool:
    """Whether it concerns the whole app. Settings of one function are listed with its code."""
    return name.partition(".")[0] not in OF_FUNCTIONS


def _policy_rows(app: Onceward, place: str, policy: Policy) -> list[dict[str, Any]]:
    """Only fields that were set; the others have their defaults."""
    fields = _leaves(policy.model_dump(exclude_unset=True), f"{place}.policy")
    return [_row(path, value, _origin(app, path)) for path, value in fields]


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
    followed = (each.name for each in app.consumers.values() if each.function == producer.follows)
    return next((_source_origin(app, name) for name in followed), CODE)


def _row(name: str, value: Any, origin: str) -> dict[str, Any]:
    from onceward._secrets import MASK, mask_url, names_secret

    if isinstance(value, str):
        value = MASK if names_secret(name.rpartition(".")[2]) else mask_url(value)
    return {"name": name, "value": value, "origin": origin}
