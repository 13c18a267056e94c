"""What the commands about dead letters share: the filter's options, opening the store, confirmation."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onceward.cli.completion import one_of
from onceward.cli.database import open_engine
from onceward.cli.exit import MISUSED, fail, flag, option

if TYPE_CHECKING:
    from onceward.deadletters import DeadLetters, Filter

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
FILTER = "Which letters"
"""The heading of the filter options in the help."""


def seconds(text: str) -> float:
    """Parse `90s`, `15m`, `2h`, `3d`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a duration; write 90s, 15m, 2h or 3d")
    return float(found[1]) * UNITS[found[2]]


def _option(kind: Any, name: str, metavar: str, **more: Any) -> Any:
    return Annotated[kind | None, typer.Option(name, metavar=metavar, rich_help_panel=FILTER, **more)]


Operator = Annotated[
    str | None, option("NAME", "Your name, for the audit log.", show_default="your user name")
]
Yes = Annotated[bool, flag("Do not ask for confirmation.", "--yes", "-y")]
Limit = Annotated[int, option("N", "Maximum number.", min=1)]
Reason = Annotated[str, option("TEXT", "Why, such as a ticket; kept in the audit log.")]


FILTERS: dict[str, Any] = {
    "consumer": _option(str, "--consumer", "NAME", help="Consumer name."),
    "event_type": _option(str, "--type", "TYPE", help="Event type."),
    "category": _option(
        str, "--category", "NAME", **one_of("infrastructure", "contract", "business", "in_doubt", "poison")
    ),
    "status": _option(str, "--status", "NAME", **one_of("open", "redriven", "resolved", "discarded")),
    "older_than": _option(
        float, "--older-than", "SPAN", parser=seconds, help="Dead for at least this long: 90s, 15m, 2h, 3d."
    ),
    "younger_than": _option(
        float, "--younger-than", "SPAN", parser=seconds, help="Dead for at most this long."
    ),
    "text": _option(str, "--text", "TEXT", help="Text contained in the error."),
    "ids": _option(list[int], "--id", "ID", help="Number of the letter; repeatable."),
    "message_id": _option(str, "--message-id", "ID", help="Id of the message."),
    "aggregate_id": _option(str, "--aggregate", "ID", help="Id of the aggregate."),
}
"""The options of a filter, by the fields of `Filter`."""

Wanted = Callable[..., Any]
"""Builds the filter from the options. Call it inside `open_letters`, which reports a wrong option in one line."""


def add_filter_options(*, status: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a filter in place of its parameter `wanted`."""
    options = {name: option for name, option in FILTERS.items() if status or name != "status"}

    def give(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            chosen = dict.fromkeys(FILTERS) | {name: given.pop(name) for name in options}
            command(wanted=lambda **more: _filter(**(chosen | more)), **given)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            if parameter.name == "wanted":
                parameters += [
                    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
                    for name, option in options.items()
                ]
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return give


def _filter(ids: list[int] | None, **given: Any) -> Filter:
    from onceward.deadletters import Filter

    return Filter(ids=tuple(ids or ()), **given)


@contextmanager
def open_letters(url: str, as_json: bool) -> Iterator[DeadLetters]:
    """Open the dead letters of a database. Any problem ends the command with one line that says what to do."""
    from onceward.deadletters import DeadLetters

    with open_engine(url, as_json) as engine:
        yield DeadLetters(engine)


def who(operator: str | None) -> str:
    import getpass

    return getpass.getuser() if operator is None else operator


def confirm(question: str, yes: bool, as_json: bool) -> None:
    """Ask for confirmation, unless `yes`. Exits if the answer is no or there is no terminal to ask on."""
    if yes:
        return
    if as_json or not sys.stdin.isatty():
        fail(f"{question} There is no terminal to ask on; confirm with --yes", as_json, MISUSED)
    if not typer.confirm(question):
        fail("Nothing was done.", as_json)


def age(moment: datetime) -> str:
    passed = max((datetime.now(UTC) - moment).total_seconds(), 0.0)
    for unit in ("d", "h", "m"):
        if passed >= UNITS[unit]:
            return f"{passed / UNITS[unit]:.0f}{unit}"
    return f"{passed:.0f}s"


def shorten(text: str, length: int = 70) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"
