"""Compare the numbers of source, inbox and dead letters, for a source that does not list its messages."""

from __future__ import annotations

import msgspec

from onceward.connectors.reports import SourceCounts
from onceward.inspection.balance import (
    Balance,
    check_source,
    explain_surplus,
    nothing_consumed,
    put,
    say,
    why_appended_is_unknown,
)


class LetterCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters of this consumer from this source, in the database."""

    open: int = 0
    redriven: int = 0
    """Waiting to be delivered again, or in flight."""
    resolved: int = 0
    """Delivered again, and done."""
    discarded: int = 0
    deaths: int = 0
    """A copy that died does not make a second letter."""

    @property
    def count(self) -> int:
        return self.open + self.redriven + self.resolved + self.discarded


class RecordCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The inbox's records of this consumer."""

    applied: int = 0
    superseded: int = 0
    """Dropped: a later event of the same aggregate had already been applied."""
    is_purged: bool = False
    """Whether there may have been more."""


def strike_totals(source: SourceCounts, letters: LetterCounts, records: RecordCounts | None) -> Balance:
    totals = _Totals(source, letters)
    if records is not None:
        totals.compare(records)
    elif totals.handled:
        totals.notes["done"] = "without a contract nothing records which of them were copies"
    appended, pending = source.appended, totals.pending
    if totals.is_surplus and appended == 0:
        appended = None
    if appended and source.pending == appended:
        totals.notes.setdefault("applied", nothing_consumed(0 if records is None else records.applied))
    return Balance(
        appended=appended,
        applied=None if records is None or totals.handled is None else totals.applied,
        duplicate=None if totals.handled is None else totals.duplicate,
        done=(totals.handled or 0) if records is None else totals.unassigned,
        pending=pending,
        dead=totals.dead,
        dropped=totals.dropped,
        problems=(*check_source(source), *totals.problems),
        unknown=(*why_appended_is_unknown(source.appended, source.notes), *source.unknown, *totals.unknown),
        notes=totals.notes,
    )


class _Totals:
    def __init__(self, source: SourceCounts, letters: LetterCounts) -> None:
        self._source = source
        self.notes = dict(source.notes)
        self.problems: list[str] = []
        self.unknown: list[str] = []
        self.dropped = dict(source.dropped)
        put(self.dropped, "discarded by an operator", letters.discarded)
        moved = source.moved
        in_transit = 0 if moved is None else max(letters.deaths - moved, 0)
        self.dead = _sum(source.dead, letters.open, -min(in_transit, source.dead or 0))
        self.pending = _sum(source.pending, letters.redriven)
        self.applied = self.duplicate = self.unassigned = 0
        self.is_surplus = False
        self._account_for_letters(letters)
        if moved is None:
            self.handled = _sum(source.done, letters.resolved - letters.count)
        else:
            self.handled = _sum(source.done, letters.resolved)
            self.duplicate = max(moved - letters.count, 0)
            if moved > max(letters.deaths, letters.count):
                self.unknown.append(
                    f"{say(moved, 'dead letter')} in the database by the source's count, but it has only "
                    f"{letters.count:,}: the others were copies, or were purged or lost"
                )

    def _account_for_letters(self, letters: LetterCounts) -> None:
        """Compare the letters with the messages that ended as such, or, if the source does not count those, at all."""
        source = self._source
        ended = source.done if source.moved is None else source.moved
        uncounted = 0 if ended is None else letters.count - ended - (source.dead or 0)
        if uncounted <= 0:
            return
        if self.pending is not None and uncounted <= (source.pending or 0) - source.untouched:
            self.pending -= uncounted  # stored, but the source does not know it yet
            return
        self.unknown.append(
            f"the database has {uncounted:,} more {'dead letter' if uncounted == 1 else 'dead letters'} of this "
            "consumer than the source has counted: the source was restored, or its consumer was deleted, and their "
            "messages may come again"
        )

    def compare(self, records: RecordCounts) -> None:
        """Split what was handled into applied and duplicates."""
        source, handled = self._source, self.handled
        put(self.dropped, "superseded by a later event", records.superseded)
        self.applied = records.applied
        if handled is None:
            return
        known = records.applied + records.superseded
        ahead, begun = known - handled, (self.pending or 0) - source.untouched
        if ahead > 0:
            self._explain_more(records, ahead, begun)
        elif ahead < 0 and records.is_purged:
            self.unassigned = -ahead
            self.unknown.append(
                f"{say(-ahead)} acknowledged and without a record: copies, or their records were purged or lost"
            )
        elif ahead < 0 and source.has_copies and known:
            self.unassigned = -ahead
            self.unknown.append(
                f"{say(-ahead)} acknowledged and without a record: copies, or lost; this source does not list its "
                "messages"
            )
        elif 0 < -ahead <= source.undelivered:
            self.unassigned = -ahead
            self.unknown.append(
                f"{say(-ahead)} acknowledged and without a record: they expired before this consumer got them or was "
                "registered, or their records are lost"
            )
        elif ahead < 0:
            self.problems.append(
                f"{say(-ahead)} acknowledged, but neither applied nor dead: skipped by hand, acknowledged by something "
                "that does not use the inbox, or their records are lost"
            )

    def _explain_more(self, records: RecordCounts, ahead: int, begun: int) -> None:
        if self.pending is not None and ahead <= begun:  # committed, but the source does not know it yet
            self.notes["pending"] = f"{ahead:,} more are applied, but not acknowledged yet"
            self.pending -= ahead
            return
        self.is_surplus = True
        self.unknown.append(explain_surplus(ahead, self._source))
        self.applied = max((self.handled or 0) - records.superseded, 0)


def _sum(first: int | None, *more: int) -> int | None:
    return None if first is None else first + sum(more)
