"""Count each consumer's messages: in its source, its inbox and among dead letters. Changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from onceward._secrets import mask_url
from onceward.connectors.reports import ServerUnreachable
from onceward.connectors.urls import Address
from onceward.errors import ConfigurationError
from onceward.inspection.balance import Balance, unreachable, without_database
from onceward.inspection.counts_database import DatabaseCounts, has_tables
from onceward.inspection.fates import strike_by_id
from onceward.inspection.probes import open_database
from onceward.inspection.totals import LetterCounts, strike_totals

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from onceward.app.app import Onceward
    from onceward.app.consumer import Consumer


class Account(NamedTuple):
    """One consumer, and where its messages are."""

    source: Address
    consumer: str
    """Its name in the inbox and among dead letters."""
    database: str | None
    contract: bool = False
    """Whether its code has one; a registered consumer has one, too."""
    may_be_new: bool = False
    """Whether source and database may not exist yet. They may for an app; if an operator names them, a missing one is
    mistyped."""
    siblings: frozenset[str] | None = None
    """All consumers that the app has now, by their names in the inbox. None: unknown."""


def account_of(app: Onceward, consumer: Consumer, database: str | None = None) -> Account:
    """The account of a consumer of an app, in its own database or in another one."""
    from onceward.app.build import consumer_id

    return Account(
        consumer.source,
        consumer_id(consumer),
        database or app.settings.database,
        contract=consumer.contract is not None,
        may_be_new=True,
        siblings=frozenset(map(consumer_id, app.consumers.values())),
    )


def balance_of(account: Account) -> Balance:
    """The balance of one consumer; unknown while its source or database is down.

    Raises `ServerUnreachable` only if an operator named them, so they may be mistyped.
    """
    try:
        return _strike(account)
    except ServerUnreachable as error:
        if not account.may_be_new:
            raise
        return unreachable(error)


def _strike(account: Account) -> Balance:
    """Count the source first, so messages that are done meanwhile are seen as done, not as missing.

    Only the number of records is read before that, in case the source lists its messages.
    """
    recorded = _count_records(account)
    counted = account.source.counts()
    if counted.missing is not None and not account.may_be_new:
        raise ConfigurationError(counted.missing)
    if account.database is None:
        return (
            strike_totals(counted, LetterCounts(), None) if account.may_be_new else without_database(counted)
        )
    with open_database(account.database) as connection:
        is_new = connection is None or not has_tables(connection)
        if is_new and not account.may_be_new:
            raise ConfigurationError(_explain_empty_database(account.database, connection))
        counts = DatabaseCounts(
            None if is_new else connection,
            account.consumer,
            contract=account.contract,
            siblings=account.siblings,
        )
        if (counted.done or counted.moved) and not account.may_be_new and not counts.is_known:
            why = _explain_unknown_consumer(account.consumer, counts.registered)
            counted = msgspec.structs.replace(counted, unknown=(*counted.unknown, why))
        if counted.messages is None:
            return strike_totals(counted, counts.letters(account.source.origin), counts.records())
        ledger = counts.ledger(counted.messages, account.source.origin, recorded)
        return strike_by_id(counted, counted.messages, ledger)


def _count_records(account: Account) -> int:
    """Count the records of this consumer that the inbox has now."""
    if account.database is None:
        return 0
    with open_database(account.database) as connection:
        if connection is None or not has_tables(connection):
            return 0
        return DatabaseCounts(connection, account.consumer, contract=account.contract).recorded


def _explain_empty_database(database: str, connection: Connection | None) -> str:
    what = "does not exist" if connection is None else "has no tables of an inbox"
    return (
        f"database {mask_url(database)} {what}; check the URL, or create it with `onceward inbox migrate --database "
        "URL`"
    )


def _explain_unknown_consumer(consumer: str, others: list[str]) -> str:
    return (
        f"the database has nothing of consumer {consumer!r} (registered: {', '.join(others) or 'none'}); if it has a "
        "contract, check --consumer"
    )
