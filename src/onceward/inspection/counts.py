"""What there is of each consumer: in its source, its inbox and among dead letters. Nothing is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from onceward.connectors.urls import Address, redact_url
from onceward.errors import ConfigurationError
from onceward.inspection.balance import Balance, strike
from onceward.inspection.counts_database import Kept, has_tables
from onceward.inspection.probes import asking_database

if TYPE_CHECKING:
    from sqlalchemy import Connection


class Account(NamedTuple):
    """One consumer, and where its messages are."""

    source: Address
    consumer: str
    """What inbox and dead letters know it by."""
    database: str | None
    contract: bool = False
    """Whether its code has one; a consumer that is registered has one, too."""
    may_be_new: bool = False
    """An app says where things will be. What an operator names has to exist: otherwise the name is mistyped."""


def balance_of(account: Account) -> Balance:
    """The source is counted first: what is done meanwhile is seen as done, not as missing.

    Except for the number of records, in case the source lists its messages: see `Kept.among`.
    """
    recorded = _recorded(account)
    counted = account.source.counts()
    if counted.missing is not None and not account.may_be_new:
        raise ConfigurationError(counted.missing)
    if account.database is None:
        return strike(counted, None, None)
    with asking_database(account.database) as connection:
        is_new = connection is None or not has_tables(connection)
        if is_new and not account.may_be_new:
            raise ConfigurationError(_nothing_in(account.database, connection))
        kept = Kept(None if is_new else connection, account.consumer, contract=account.contract)
        if (counted.done or counted.moved) and not account.may_be_new and not kept.is_known:
            why = {**counted.untold, "applied": _unknown(account.consumer, kept.registered)}
            counted = msgspec.structs.replace(counted, untold=why)
        if counted.messages is None:
            return strike(counted, kept.letters(account.source.origin), kept.records())
        letters, records = kept.among(counted.messages, account.source.origin, recorded)
        return strike(counted, letters, records)


def _recorded(account: Account) -> int:
    """Records of this consumer that the inbox has now."""
    if account.database is None:
        return 0
    with asking_database(account.database) as connection:
        if connection is None or not has_tables(connection):
            return 0
        return Kept(connection, account.consumer, contract=account.contract).recorded


def _nothing_in(database: str, connection: Connection | None) -> str:
    what = "does not exist" if connection is None else "has no tables of an inbox"
    return (
        f"database {redact_url(database)} {what}; check the URL, or create it with `onceward inbox migrate --database "
        "URL`"
    )


def _unknown(consumer: str, others: list[str]) -> str:
    return (
        f"the database knows no consumer {consumer!r}, but {', '.join(others) or 'none at all'}; if it has a contract, "
        "check --consumer"
    )
