"""`onceward config`: every setting, and where its value came from."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from onceward.cli.database import MISUSED, AsJson, fail
from onceward.cli.printing import print_json, print_table

CONFIG_EXAMPLES = """
Examples:

- `onceward config` what the environment and the files here say

- `onceward config shop:app` with what the app's code says, and its consumers

- `onceward config shop:app --json | jq '.[] | select(.origin != "default")'` what was set
"""


def config(
    app: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE:APP", show_default="only environment and files", help="The app, as in shop:app."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show every setting, and where its value came from.

    A keyword of Onceward(…) wins over an ONCEWARD_… variable, that over onceward.toml, that over [tool.onceward] in
    pyproject.toml. Passwords are not shown.

    Exit code: 0; 2 if a setting is wrong.
    """
    from onceward.task.exceptions import ConfigurationError

    try:
        rows = _rows(app)
    except ConfigurationError as error:
        fail(str(error), as_json, MISUSED)
    if as_json:
        print_json(rows)
    else:
        shown = [{**row, "value": _text(row["value"])} for row in rows]
        print_table(shown, {"name": "setting", "value": "value", "origin": "from"}, "")


def _rows(app: str | None) -> list[dict[str, Any]]:
    from onceward.app.settings import resolve

    if app is None:
        return [_row(*each) for each in resolve({}).rows()]
    from onceward.app.loading import load_app

    loaded = load_app(app)
    loaded.check()
    rows = [_row(*each) for each in loaded.resolved.rows() if each[1] != {}]  # of tables, what is in them
    known = {row["name"] for row in rows}
    ends = {f"consumers.{name}.source": each.source for name, each in loaded.consumers.items()}
    ends |= {f"producers.{name}.sink": each.sink for name, each in loaded.producers.items()}
    return rows + [_row(name, str(url), "code") for name, url in ends.items() if name not in known]


def _row(name: str, value: Any, origin: str) -> dict[str, Any]:
    from onceward.app.sources import shown_url

    return {"name": name, "value": shown_url(value) if isinstance(value, str) else value, "origin": origin}


def _text(value: Any) -> str:
    return "-" if value is None else str(value)
