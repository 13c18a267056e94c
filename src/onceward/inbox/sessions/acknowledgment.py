"""One commit: an event leaves its queue in the transaction of its handler, if the queue is in the same database.

A connector can do this if it has the methods of `JoiningConnector`. Its fence holds for the whole transaction: if the
lease was lost, nothing of it stays.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from onceward._text import driver_message
from onceward.db.transaction import DbTransaction
from onceward.inbox.errors import LeaseLostError
from onceward.inbox.stores.types import Key
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.inbox.ports import InboxPorts

_log = OwnLogger(logging.getLogger("onceward.inbox"))


class JoiningConnector(Protocol):
    """A connector whose queue may be in the database of the inbox. None of these waits for anything but that database.

    In asyncio they are called where SQLAlchemy runs plain code: they must not need the event loop.
    """

    def joins(self, transaction: DbTransaction) -> bool:
        """Whether its queue is in the database of this transaction, and this role can remove messages from it. Called
        after the first fetch that brought something. If not, and it could be, the connector logs why."""
        ...

    def holds(self, delivered: Transaction, /) -> bool:
        """Whether this connector has delivered it, and it is not settled."""
        ...

    def settle_in(self, transaction: DbTransaction, delivered: Transaction, /) -> bool:
        """Remove a delivery as done, inside the transaction. Return False, having changed nothing, if its lease was
        lost: a newer delivery owns the message."""
        ...

    def settled(self, delivered: Transaction, /) -> None:
        """Called after the commit: the delivery needs no other settlement."""
        ...


class GroupingConnector(JoiningConnector, Protocol):
    """One that removes many deliveries about as fast as one: those of a commit together, just before it."""

    def settle_all_in(
        self, transaction: DbTransaction, delivered: Sequence[Transaction], /
    ) -> Sequence[Transaction]:
        """As `settle_in`, of all. Return those whose lease was still ours."""
        ...


class Departure:
    """The end of one delivery, inside the transaction that does its event."""

    __slots__ = ("_connector", "_delivered", "_removed", "waits")

    def __init__(self, connector: JoiningConnector, delivered: Transaction) -> None:
        self._connector = connector
        self._delivered = delivered
        self._removed = False
        self.waits = False
        """Whether it is for `take_off_together`, not for the end of its own event."""

    def wait(self) -> None:
        """Leave together with others, if the connector can do that."""
        self.waits = hasattr(self._connector, "settle_all_in")

    def remove(self, transaction: DbTransaction) -> bool:
        """Return False if its lease was lost."""
        self._removed = self._connector.settle_in(transaction, self._delivered)
        return self._removed

    def take_off(self, transaction: DbTransaction, key: Key, fenced: bool = True) -> None:
        """Take the event off its queue. If its lease was lost, nothing of this transaction may stay, unless it is of a
        duplicate, which wrote nothing."""
        if not self.remove(transaction) and fenced:
            raise _lost(key)

    def committed(self) -> None:
        if self._removed:
            self._connector.settled(self._delivered)


def take_off_together(transaction: DbTransaction, leaving: Sequence[tuple[Departure, Key, bool]]) -> None:
    """Take events off their queue that wait for this, with `take_off`'s key and fence of each."""
    waiting = [each for each in leaving if each[0].waits]
    if not waiting:
        return
    if len(waiting) == 1:
        departure, key, fenced = waiting[0]
        departure.take_off(transaction, key, fenced)
        return
    connector: Any = waiting[0][0]._connector
    removed = {
        id(each)
        for each in connector.settle_all_in(transaction, [departure._delivered for departure, *_ in waiting])
    }
    for departure, key, fenced in waiting:
        departure._removed = id(departure._delivered) in removed
        if fenced and not departure._removed:
            raise _lost(key)


def _lost(key: Key) -> LeaseLostError:
    return LeaseLostError(
        f"the lease of event {key.tracking_id} was lost, and its queue may have delivered it again; this attempt "
        "commits nothing"
    )


class JointSource:
    """What the inbox knows about the source of its events: whether it is in the same database."""

    def __init__(self, connector: Any) -> None:
        self._connector: JoiningConnector | None = connector if hasattr(connector, "settle_in") else None
        self._joins: bool | None = None
        self._has_complained = False

    async def find_out(self, ports: InboxPorts) -> None:
        if self._connector is None or self._joins is not None:
            return
        try:
            self._joins = await ports.transact(self._connector.joins)
        except Exception as error:  # noqa: BLE001  it is settled on its own then, and the next fetch asks again
            if not self._has_complained:
                _log.warning(
                    "cannot tell whether the queue is in the inbox's database: %s", driver_message(error)
                )
            self._has_complained = True

    def departure_of(self, delivered: Transaction) -> Departure | None:
        """None if the delivery is not from a queue in this database."""
        if self._joins and self._connector is not None and self._connector.holds(delivered):
            return Departure(self._connector, delivered)
        return None
