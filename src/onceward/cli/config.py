"""`onceward config`: every setting and where its value came from."""

from __future__ import annotations

from typing import Annotated, Any

from onceward.cli.exit import AsJson, argument, refuse_mistakes
from onceward.cli.output import print_json, print_table

CONFIG_EXAMPLES = """
Examples:

- `onceward config` to show the environment and the files here

- `onceward config shop:app` to include the app's code and its consumers

- `onceward config shop:app --json | jq '.[] | select(.origin != "default")'` to list what was set
"""

OF_FUNCTIONS = ("consumers", "producers")


def config(
    app: Annotated[
        str | None,
        argument("MODULE:APP", "The app, as in shop:app.", show_default="only environment and files"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show every setting and where its value came from.

    Settings come from these places; an earlier one wins over a later one: options of `onceward run` (not shown here),
    ONCEWARD_… variables, .env, files in ONCEWARD_SECRETS_DIR, onceward.toml, [tool.onceward] in pyproject.toml, and
    the code. A keyword of Onceward(…) has the origin `keyword`, an argument of a decorator the origin `code`. For
    policies, only the fields that were set are shown. Passwords are hidden.

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
    from onceward.app.provenance import consumer_rows, producer_rows, setting_row
    from onceward.app.settings import resolve

    if app is None:
        return [
            setting_row(*each) for each in resolve({}).rows() if _is_general(each[0]) or each[2] != "default"
        ]
    from onceward.app.lookup import load_app

    loaded = load_app(app)
    loaded.check()
    rows = [setting_row(*each) for each in loaded.resolved.rows() if _is_general(each[0])]
    for consumer in loaded.consumers.values():
        rows += consumer_rows(loaded, consumer)
    for producer in loaded.producers.values():
        rows += producer_rows(loaded, producer)
    return rows


def _is_general(name: str) -> bool:
    """Whether it concerns the whole app. Settings of one function are listed with its code."""
    return name.partition(".")[0] not in OF_FUNCTIONS
