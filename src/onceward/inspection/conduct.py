"""What a consumer does when a message fails, and what holds it now, for `onceward explain`."""

from __future__ import annotations

from onceward.app.app import Consumer, Onceward
from onceward.connectors.lease_rules import LeaseRules
from onceward.connectors.patience import add_up
from onceward.connectors.reports import ServerUnreachable
from onceward.durations import format_seconds
from onceward.failures.board import Board, hold_of
from onceward.inspection.probes import open_database


def conduct_of(app: Onceward, consumer: Consumer) -> list[tuple[str, str]]:
    """Topics and what there is to say about each, in the order of a message's fate."""
    book = consumer.failures
    lines = [("buried", _burial(consumer.source.rules))]
    if consumer.contract is not None and consumer.contract.tolerates is not None:
        lines.append(("tolerates", f"failures for {format_seconds(consumer.contract.tolerates)}"))
    lines += [("failures", line) for line in book.lines()]
    if book.depends_on:
        lines.append(("depends on", ", ".join(book.depends_on)))
    if consumer.limit is not None:
        lines.append(("limit", str(consumer.limit)))
    if consumer.order is not None:
        lines.append(("order", consumer.order.words))
    held = _hold(app, consumer)
    return lines if held is None else [*lines, ("held", held)]


def _burial(rules: LeaseRules | None) -> str:
    if rules is None:
        return "when its source says so: it does not tell its rules"
    if rules.on_failure == "dead_letter":
        return "at its first failure (on_failure=dead_letter)"
    return f"a message that keeps failing, after at least {add_up(rules.shortest_delays())}"


def _hold(app: Onceward, consumer: Consumer) -> str | None:
    """What holds it by the records of the database; None if nothing does, or they cannot be read."""
    if app.settings.database is None:
        return None
    from sqlalchemy import inspect

    from onceward.failures.records import read_state
    from onceward.storage.database import Sql

    board = Board()
    try:
        with open_database(app.settings.database) as connection:
            if connection is None or not inspect(connection).has_table("onceward_pauses"):
                return None
            board.note(read_state(connection, Sql(connection.dialect.name)), 0.0)
    except ServerUnreachable:
        return None  # the verdict says that it is
    return hold_of(board, app.name, consumer.identity, consumer.failures.depends_on).why
