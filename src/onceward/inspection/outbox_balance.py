"""Conservation of messages across an outbox, for each of its targets.

    committed = published + waiting + dead + canceled + removed after their retention
    published = at the sink

The outbox is read before the sink, so what is published meanwhile is not taken for missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from onceward._secrets import mask_url
from onceward._text import quantity
from onceward.connectors.reports import ServerUnreachable
from onceward.connectors.urls import Address
from onceward.errors import ConfigurationError
from onceward.inspection.arrivals import SinkArrivals, arrivals_at
from onceward.inspection.balance import Balance, put, say, some, unreachable
from onceward.inspection.outbox_rows import SETTLED, WAITING, OutboxLedger, TargetRows, read_outbox
from onceward.inspection.probes import open_database
from onceward.outbox.targets import shown

WORDS = {"appended": "committed", "applied": "published", "pending": "waiting"}
"""What the numbers of a balance are called here."""
NOT_COUNTED = (
    "the database was last migrated by an older version, which did not count what leaves the outbox; run `onceward "
    "inbox migrate`"
)


class TargetAccount(NamedTuple):
    """The balance of one target, and where its messages go."""

    balance: Balance
    sink: str


def balance_outbox(database: str | None, address_of: Callable[[str], Address]) -> dict[str, TargetAccount]:
    """The balances of all targets that ever had a message, by what a report calls them."""
    if database is None:
        return {}
    try:
        with open_database(database) as connection:
            ledger = OutboxLedger({}, {}) if connection is None else read_outbox(connection)
    except ServerUnreachable as error:
        unknown = msgspec.structs.replace(unreachable(error), words=WORDS)
        return {"outbox": TargetAccount(unknown, mask_url(database))}
    found: dict[str, TargetAccount] = {}
    for target in sorted(ledger.targets):
        sink: Address | str
        try:
            sink = address_of(target)
        except ConfigurationError as error:
            sink = str(error)
        name = shown(target).removeprefix("consumer:").removeprefix("producer:")
        found[f"outbox → {name}"] = TargetAccount(strike_outbox(ledger, target, sink), str(sink))
    return found


def strike_outbox(ledger: OutboxLedger, target: str, sink: Address | str) -> Balance:
    """Compare the outbox with the sink of a target; a text says why it has none."""
    balance = _TargetBalance(ledger, ledger.targets[target])
    balance.count()
    if isinstance(sink, str):
        balance.unknown.append(sink)
        return balance.strike()
    try:
        arrivals = arrivals_at(sink)
    except ServerUnreachable as error:
        balance.unknown.append(str(error))
    else:
        balance.compare(arrivals)
    return balance.strike()


class _TargetBalance:
    def __init__(self, ledger: OutboxLedger, rows: TargetRows) -> None:
        self._ledger = ledger
        self._rows = rows
        self.published = rows.states["published"]
        self.waiting = sum(rows.states[state] for state in WAITING)
        self.dead = rows.states["dead"]
        self.canceled = rows.tally["canceled"]
        self.discarded = 0
        self.gone = sum(rows.tally[f"removed {state}"] for state in SETTLED)
        self.lost = 0
        """Removed while they waited."""
        self.missing: tuple[str, ...] = ()
        self.problems: list[str] = []
        self.unknown: list[str] = []
        self.notes: dict[str, str] = {}

    def count(self) -> None:
        """Check the outbox by itself."""
        if not self._ledger.is_counted:
            self.unknown.append(NOT_COUNTED)
        self._follow_letters()
        tally = self._rows.tally
        self.lost = sum(tally[f"removed {state}"] for state in WAITING) - self.canceled
        if self.lost > 0:
            self.problems.append(
                f"{say(self.lost)} missing: removed from the outbox before they were published, and not canceled"
            )
        had, has = tally["published"], self._rows.states["published"] + tally["removed published"]
        if had > has:
            self.problems.append(
                f"relays have published {had:,}, but the outbox has had only {has:,} that are published: it was "
                "restored from an older backup, or rows were changed or removed by hand; what waited then may be lost"
            )
        elif had < has and self._ledger.is_counted:
            self.problems.append(
                f"{say(has - had)} marked as published, but no relay has published them: rows were changed or restored "
                "by hand"
            )
        if self.gone:
            self.notes["gone"] = (
                "they were published, and removed from the outbox: after its retention, or by hand"
            )

    def _follow_letters(self) -> None:
        lost = []
        for id in self._rows.moved:
            status = self._ledger.letters.get(id)
            self.dead += status == "open"
            self.waiting += status == "redriven"
            self.published += status == "resolved"
            self.discarded += status == "discarded"
            if status is None:
                lost.append(id)
        if lost:
            self.gone += len(lost)
            self.unknown.append(
                f"{say(len(lost), 'dead letter')} not in the database: purged, or lost: {some(tuple(lost))}"
            )

    def compare(self, sink: SinkArrivals) -> None:
        """Look for what was published at the sink."""
        published = self._rows.tally["published"]
        if sink.missing:
            self.problems.append(f"{say(sink.missing)} missing at the sink: removed there without being done")
        if sink.listed is None:
            self._compare_numbers(sink, published)
            return
        absent = [id for id in self._rows.published if id not in sink.listed]
        if len(absent) > sink.forgotten:
            self.missing = tuple(self._rows.published[id] for id in absent)
            self.problems.append(
                f"{say(len(absent))} published, but not at the sink"
                + (f", which no longer lists {sink.forgotten:,}" if sink.forgotten else "")
                + f": {some(self.missing)}"
            )
        elif absent and sink.unknown:
            self.unknown.append(f"{say(len(absent))} no longer at the sink: {'; '.join(sink.unknown)}")
        elif sink.total is not None and sink.total < published:
            self.problems.append(_too_few(sink.total, published))
        copies = sum(sink.listed[id] - 1 for id in self._rows.published if id in sink.listed)
        if copies:
            self.notes["applied"] = (
                f"the sink has {quantity(copies, 'copy', 'copies')} with the same ids: a relay died, or lost its "
                "lease, before it had recorded that it sent them"
            )

    def _compare_numbers(self, sink: SinkArrivals, published: int) -> None:
        if sink.total is None or sink.unknown:
            why = "; ".join(sink.unknown) or "it does not count"
            self.unknown.append(f"it is unknown what arrived at the sink: {why}")
        elif sink.total < published:
            self.problems.append(_too_few(sink.total, published))
        elif sink.total > published + self._rows.held:
            self.unknown.append(
                f"the sink has had {sink.total:,} messages, and does not list them: something else sends there, too, "
                f"or the {published:,} that were published are not all among them"
            )

    def strike(self) -> Balance:
        dropped: dict[str, int] = {}
        put(dropped, "canceled", self.canceled)
        put(dropped, "discarded by an operator", self.discarded)
        lost = max(self.lost, 0)
        parts = (self.published, self.waiting, self.dead, self.canceled, self.discarded, self.gone, lost)
        return Balance(
            appended=sum(parts),
            applied=self.published,
            duplicate=0,
            pending=self.waiting,
            dead=self.dead,
            dropped=dropped,
            gone=self.gone,
            missing=self.missing,
            problems=tuple(self.problems),
            unknown=tuple(self.unknown),
            notes=self.notes,
            words=WORDS,
        )


def _too_few(total: int, published: int) -> str:
    return f"the sink has had only {total:,} messages, but {published:,} were published to it"
