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
from onceward.cli.exit import MISUSED, fail

if TYPE_CHECKING:
    from onceward.deadletters import DeadLetter, DeadLetters, Filter

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
FILTER = "Which letters"
"""The heading of the filter options in the help."""


def seconds(text: str) -> float:
    """Parse `90s`, `15m`, `2h`, `3d`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a duration; write 90s, 15m, 2h or 3d")
    return float(found[1]) * UNITS[found[2]]


def _option(*names: str, metavar: str, **more: Any) -> Any:
    return typer.Option(*names, metavar=metavar, rich_help_panel=FILTER, **more)


Consumer = Annotated[str | None, _option("--consumer", metavar="NAME", help="Consumer name.")]
EventType = Annotated[str | None, _option("--type", metavar="TYPE", help="Event type.")]
Category = Annotated[
    str | None,
    _option("--category", metavar="NAME", **one_of("infrastructure", "contract", "business", "poison")),
]
Status = Annotated[
    str | None,
    _option("--status", metavar="NAME", **one_of("open", "redriven", "resolved", "discarded")),
]
OlderThan = Annotated[
    float | None,
    _option(
        "--older-than", metavar="SPAN", parser=seconds, help="Dead for at least this long: 90s, 15m, 2h, 3d."
    ),
]
YoungerThan = Annotated[
    float | None,
    _option("--younger-than", metavar="SPAN", parser=seconds, help="Dead for at most this long."),
]
Text = Annotated[str | None, _option("--text", metavar="TEXT", help="Text contained in the error.")]
Ids = Annotated[list[int] | None, _option("--id", metavar="ID", help="Number of the letter; repeatable.")]
MessageId = Annotated[str | None, _option("--message-id", metavar="ID", help="Id of the message.")]
Aggregate = Annotated[str | None, _option("--aggregate", metavar="ID", help="Id of the aggregate.")]

Operator = Annotated[
    str | None,
    typer.Option(metavar="NAME", show_default="your user name", help="Your name, for the audit log."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Limit = Annotated[int, typer.Option(min=1, metavar="N", help="Maximum number.")]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Why, such as a ticket; kept in the audit log.")]


FILTERS = {
    "consumer": Consumer,
    "event_type": EventType,
    "category": Category,
    "status": Status,
    "older_than": OlderThan,
    "younger_than": YoungerThan,
    "text": Text,
    "ids": Ids,
    "message_id": MessageId,
    "aggregate": Aggregate,
}
"""The options of a filter, by the parameters of `wanted_of`."""

Wanted = Callable[..., Any]
"""Builds the filter from the options. Call it inside `open_letters`, which reports a wrong option in one line."""


def add_filter_options(*, status: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a filter in place of its parameter `wanted`."""
    options = {name: option for name, option in FILTERS.items() if status or name != "status"}

    def give(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            chosen = dict.fromkeys(FILTERS) | {name: given.pop(name) for name in options}
            command(wanted=lambda **more: wanted_of(**(chosen | more)), **given)

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


def wanted_of(
    consumer: str | None,
    event_type: str | None,
    category: str | None,
    status: str | None,
    older_than: float | None,
    younger_than: float | None,
    text: str | None,
    ids: list[int] | None,
    message_id: str | None,
    aggregate: str | None,
) -> Filter:
    from onceward.deadletters import Filter

    return Filter(
        consumer=consumer,
        event_type=event_type,
        category=category,  # type: ignore[arg-type]
        status=status,  # type: ignore[arg-type]
        older_than=older_than,
        younger_than=younger_than,
        text=text,
        ids=tuple(ids or ()),
        message_id=message_id,
        aggregate_id=aggregate,
    )


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


def as_plain(letter: DeadLetter) -> dict[str, Any]:
    """A letter as JSON-compatible data."""
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(letter)
    return plain


def age(moment: datetime) -> str:
    passed = max((datetime.now(UTC) - moment).total_seconds(), 0.0)
    for unit in ("d", "h", "m"):
        if passed >= UNITS[unit]:
            return f"{passed / UNITS[unit]:.0f}{unit}"
    return f"{passed:.0f}s"


def shorten(text: str, length: int = 70) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def strip_category(error: str, message_id: str) -> str:
    """The exception and its text without the category and id that the engine puts before them."""
    before, is_there, rest = error.partition(f" [{message_id}]: ")
    return rest if is_there and before.isupper() else error
