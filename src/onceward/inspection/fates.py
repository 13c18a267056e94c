"""Follow each message of a source by its id: to its record in the inbox, or to its dead letter.

Messages that ended so long ago that the source no longer lists them are compared by their number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from onceward._text import quantity
from onceward.connectors.reports import Messages, Seen, SourceCounts
from onceward.inspection.balance import (
    Balance,
    check_source,
    explain_surplus,
    nothing_consumed,
    put,
    say,
    shortfall,
    some,
    why_appended_is_unknown,
)

FATES = {"open": "dead", "redriven": "pending", "discarded": "discarded"}
"""What a message is whose letter has this status. A resolved one is done like any other."""


class Letter(NamedTuple):
    """A dead letter of this consumer."""

    digest: bytes
    status: str
    is_from_here: bool


class InboxRecords(msgspec.Struct, frozen=True, kw_only=True):
    """The inbox's records of a consumer with a contract."""

    outcomes: Mapping[str, str]
    """Of the messages that the source lists, by id: done or superseded."""
    before: int
    """How many records there were before the source was read."""
    after: int
    """How many there are now."""
    superseded: int = 0
    """How many of these are of superseded events."""
    others: Mapping[str, str] = {}
    """Those of its messages that another one has recorded, with its name: any other one if this consumer has no records
    at all, otherwise one that the app no longer has."""
    floor: int | None = None
    """The first day that is kept; records of earlier days may have been purged."""


class ConsumerLedger(msgspec.Struct, frozen=True, kw_only=True):
    """What the database has of one consumer."""

    consumer: str = ""
    letters: tuple[Letter, ...] = ()
    purged_before: float | None = None
    """Letters of messages appended before this may have been purged; None if none has been."""
    records: InboxRecords | None = None
    """None without a contract."""


def strike_by_id(source: SourceCounts, messages: Messages, ledger: ConsumerLedger) -> Balance:
    fates = _Fates(messages, ledger)
    fates.follow()
    fates.attribute_forgotten(source)
    problems = (*fates.check_source(source), *fates.problems())
    counts, records = fates.counts, ledger.records
    dropped = dict(source.dropped)
    put(dropped, "discarded by an operator", counts["discarded"])
    put(dropped, "superseded by a later event", counts["superseded"])
    appended, notes = source.appended, dict(source.notes)
    if fates.surplus and appended == 0:
        appended = None
    if counts["gone"]:
        notes["gone"] = fates.why_gone
    if records is None and counts["done"]:
        notes["done"] = "without a contract nothing records which of them were copies"
    if appended and source.pending == appended:
        notes.setdefault("applied", nothing_consumed(0 if records is None else records.after))
    return Balance(
        appended=appended,
        applied=None if records is None else counts["done"],
        duplicate=counts["duplicate"],
        done=counts["done"] if records is None else 0,
        pending=None if source.pending is None else source.pending + counts["pending"],
        dead=None if source.dead is None else source.dead + counts["dead"],
        dropped=dropped,
        gone=counts["gone"],
        missing=(*fates.missing, *fates.lost),
        problems=problems,
        unknown=(
            *why_appended_is_unknown(source.appended, notes),
            *source.unknown,
            *fates.unknown,
        ),
        notes=notes,
    )


class _Group:
    """Messages with one id that ended."""

    def __init__(self) -> None:
        self.done: list[Seen] = []
        self.moved: list[Seen] = []


class _Fates:
    def __init__(self, messages: Messages, ledger: ConsumerLedger) -> None:
        self._messages = messages
        self._ledger = ledger
        self._status_of = {letter.digest: letter.status for letter in ledger.letters}
        self.counts: Counter[str] = Counter()
        """`done` is applied, if there is a contract."""
        self.missing: list[str] = []
        self.lost: list[str] = []
        """Ids of dead letters that are missing."""
        self.doubtful: list[str] = []
        """Ids of dead letters that are missing, where the inbox has done an event with the same id."""
        self.unknown: list[str] = []
        self.surplus = 0
        self.why_gone = "their records were purged, as the contract says"

    def follow(self) -> None:
        """Find out what became of each message that is listed as ended."""
        groups: dict[str, _Group] = {}
        for each in self._messages.done:
            groups.setdefault(each.tracking_id, _Group()).done.append(each)
        for each in self._messages.moved:
            groups.setdefault(each.tracking_id, _Group()).moved.append(each)
        for tracking_id, group in groups.items():
            if not self._messages.is_complete:
                self._guess_moved(tracking_id, group)
            self._follow_group(tracking_id, group)
        if self.doubtful:
            self.unknown.append(
                f"{say(len(self.doubtful), 'dead letter')} not in the database; the inbox has done their events, by "
                "another copy, or has done something else with the same id, and the letter is lost: "
                f"{some(tuple(self.doubtful))}"
            )
        self._find_earlier_names()
        first = list(groups)[: len(self.missing)]
        if self.missing and not self._messages.is_complete and first == self.missing:
            self.unknown.append(
                f"the first {'message is' if len(first) == 1 else say(len(first))} neither applied nor dead: the group "
                f"may have been set to start after {'it, or it is' if len(first) == 1 else 'them, or they are'} lost: "
                f"{some(tuple(first))}"
            )
            self.counts["gone"] += len(first)
            self.why_gone = "it is unknown whether they were ever delivered"
            self.missing = []

    def _find_earlier_names(self) -> None:
        """A consumer may have had another name."""
        records = self._ledger.records
        others = {} if records is None else records.others
        found = [each for each in self.missing if each in others]
        if not found:
            return
        names = ", ".join(sorted({others[each] for each in found}))
        verb = "has" if len(found) == 1 else "have"
        now = "which the app no longer has" if records and records.after else "and {} has none at all"
        self.unknown.append(
            f"{quantity(len(found), 'message')} {verb} a record of consumer {names}, "
            f"{now.format(self._ledger.consumer)}: it was renamed, or its records are lost: {some(tuple(found))}"
        )
        self.counts["gone"] += len(found)
        self.why_gone = "another consumer has their records"
        self.missing = [each for each in self.missing if each not in others]

    def _follow_group(self, tracking_id: str, group: _Group) -> None:
        records = self._ledger.records
        outcome = None if records is None else records.outcomes.get(tracking_id)
        ended, copies = len(group.done), 0
        followed: set[bytes] = set()
        for each in group.moved:
            status = self._status_of.get(each.digest)
            if each.digest in followed:
                copies += 1
            elif status is not None and status != "resolved":
                self.counts[FATES[status]] += 1
            elif status is not None or self._may_be_purged(each):
                ended += 1  # a purge removes only letters that are settled
            elif outcome is not None:
                ended += 1
                self.doubtful.append(tracking_id)
            else:
                self.lost.append(tracking_id)
            followed.add(each.digest)
        if outcome is not None and copies and not ended:
            ended, copies = (
                1,
                copies - 1,
            )  # its edited letter was applied, and is open again because of a copy
        self.counts["duplicate"] += copies
        if not ended:
            return
        if records is None:
            self.counts["done"] += ended
            return
        self.counts["duplicate"] += ended - 1
        if outcome is not None:
            self.counts[outcome] += 1
        elif self._is_settled_letter_gone(group) or self._is_before_floor(group):
            self.counts["gone"] += 1
        else:
            self.missing.append(tracking_id)

    def _guess_moved(self, tracking_id: str, group: _Group) -> None:
        """Find those that became dead letters, if the source does not know which."""
        records = self._ledger.records
        has_record = records is not None and tracking_id in records.outcomes
        done: list[Seen] = []
        for each in group.done:
            status = self._status_of.get(each.digest)
            is_known = any(each.digest == other.digest for other in group.moved)
            is_letter = status is not None and not (has_record and (is_known or status == "resolved"))
            (group.moved if is_letter else done).append(each)
        if has_record and not done and len(group.moved) > 1:
            done.append(group.moved.pop())
        group.done = done

    def _may_be_purged(self, moved: Seen) -> bool:
        before = self._ledger.purged_before
        return before is not None and moved.at < before

    def _is_settled_letter_gone(self, group: _Group) -> bool:
        """Whether all that is left of it is that it was moved: its letter was discarded, and purged."""
        return not group.done and all(each.digest not in self._status_of for each in group.moved)

    def _is_before_floor(self, group: _Group) -> bool:
        floor = None if self._ledger.records is None else self._ledger.records.floor
        return floor is not None and (*group.done, *group.moved)[0].day < floor

    def attribute_forgotten(self, source: SourceCounts) -> None:
        """Compare the number of messages that ended and are not listed with what is left in the database."""
        forgotten, records = self._messages.forgotten, self._ledger.records
        listed = {each.digest for messages in self._messages[:3] for each in messages}
        left = Counter(
            FATES[letter.status]
            for letter in self._ledger.letters
            if letter.is_from_here and letter.status in FATES and letter.digest not in listed
        )
        if records is None:
            if left.total() > forgotten.total:
                self._note_surplus(left.total() - forgotten.total, source)
                self.counts["done"] += forgotten.total
            elif not self._messages.is_complete and left.total() < forgotten.total:
                self.counts += left
                self._note_uncounted(forgotten.total - left.total())
            else:
                self.counts += left
                self.counts["done"] += forgotten.total - left.total()
            return
        needed, either, purged = forgotten.undated, 0, 0
        for (first, last), ids in forgotten.by_days.items():
            if records.floor is None or first >= records.floor:
                needed += ids
            elif last < records.floor:
                purged += ids
            else:
                either += ids
        matched = len(records.outcomes)
        fewest, most = (max(number - matched, 0) + left.total() for number in (records.before, records.after))
        if fewest > needed + either + purged:
            self._note_surplus(fewest - needed - either - purged, source)
        elif most < needed and not self._messages.is_complete:
            self._note_uncounted(needed - most)
            self.counts["gone"] += forgotten.total - needed + most
            return
        elif most < needed:
            have = "has" if most == 1 else "have"
            why = (
                f"but only {most:,} of them {have} a record: the others were copies, or their records were purged or "
                "lost"
            )
            if needed == 1:
                why = "but has no record: it was a copy, or its record was purged or lost"
            self.unknown.append(f"{say(needed)} done and no longer in the source, {why}")
        else:
            found = max(min(most, needed + either), needed)
            superseded = records.superseded - Counter(records.outcomes.values())["superseded"]
            superseded = min(max(superseded, 0), max(found - left.total(), 0))
            self.counts += left
            self.counts["superseded"] += superseded
            self.counts["done"] += max(found - left.total() - superseded, 0)
            self.counts["duplicate"] += forgotten.copies
            self.counts["gone"] += needed + either + purged - found
            return
        self.counts["gone"] += forgotten.total
        self.why_gone = "they ended, and are no longer in the source"

    def _note_surplus(self, count: int, source: SourceCounts) -> None:
        self.surplus = count
        self.unknown.append(explain_surplus(count, source))

    def _note_uncounted(self, count: int) -> None:
        self.counts["gone"] += count
        self.why_gone = (
            "they are no longer in the source, which did not count whether this consumer has had them"
        )
        self.unknown.append(
            f"{say(count)} no longer in the source, and nothing shows what became of {'it' if count == 1 else 'them'}: "
            f"{'it was' if count == 1 else 'they were'} consumed, or removed before that"
        )

    def check_source(self, source: SourceCounts) -> list[str]:
        """Check the source's own numbers. A message that somebody removed while it was processed may be applied."""
        removed = shortfall(source) or 0
        if not 0 < removed <= self.surplus:
            return check_source(source)
        self.unknown.append(
            f"{say(removed)} no longer in the source without having been acknowledged; the inbox may have their records"
        )
        return []

    def problems(self) -> list[str]:
        found = []
        if self.missing:
            ids = some(tuple(self.missing))
            found.append(f"{say(len(self.missing))} acknowledged, but neither applied nor dead: {ids}")
        if self.lost:
            ids = some(tuple(self.lost))
            found.append(
                f"{say(len(self.lost), 'dead letter')} missing: moved to the database, which does not have "
                f"{'it' if len(self.lost) == 1 else 'them'}: {ids}"
            )
        return found
