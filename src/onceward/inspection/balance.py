"""Conservation of messages: what was appended is applied, a duplicate, pending, dead, or dropped for a reason.

    appended = applied + duplicate + pending + dead + dropped

Numbers in, verdict out; `counts` does the counting. Numbers that cannot be determined are None, with the reason; the
rest of the equation is checked.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from onceward.connectors.reports import SourceCounts


class LetterCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters of this consumer from this source, in the database."""

    open: int = 0
    redriven: int = 0
    """Waiting to be delivered again, or in flight."""
    resolved: int = 0
    """Delivered again, and done."""
    discarded: int = 0
    deaths: int = 0
    """Deaths of messages of this source; a copy that died does not make a second letter."""
    elsewhere: int = 0
    """Deaths of messages of this consumer that came from another source, or the same one under another name."""
    beyond: int = 0
    """Letters from this source whose messages it no longer has. Only if messages were looked up by id."""
    purged: bool = False
    """Some letters were removed since; whose is unknown."""

    @property
    def count(self) -> int:
        return self.open + self.redriven + self.resolved + self.discarded


class RecordCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The inbox's records of this consumer."""

    applied: int = 0
    superseded: int = 0
    """Dropped: a later event of the same aggregate had already been applied."""
    duplicate: int | None = None
    """None if messages were not looked up by id."""
    beyond: int = 0
    """Records of messages that the source does not have, or no longer has. Only if messages were looked up by id."""
    unknown: tuple[str, ...] = ()
    """Messages that were acknowledged, but are neither in the inbox nor dead."""
    purged_before: str | None = None
    """The first day that is kept; there may have been more records of earlier days."""


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """The balance of one consumer. A number is None if it could not be determined."""

    appended: int | None
    applied: int | None
    duplicate: int | None
    """None if unknown; then any duplicates are among the applied."""
    pending: int | None
    dead: int | None
    dropped: Mapping[str, int]
    gone: int
    problems: tuple[str, ...]
    """Why it does not hold."""
    notes: Mapping[str, str]
    """Why a number is unknown, or not what it seems, by the name of the number."""

    @property
    def holds(self) -> bool:
        return not self.problems


def strike(source: SourceCounts, letters: LetterCounts | None, records: RecordCounts | None) -> Balance:
    """Strike the balance. `letters` is None without a database, `records` without a contract."""
    problems = list(_check_source(source))
    source = _mark_ambiguous(source, letters, records)
    notes = dict(source.notes)
    dead, pending, dropped = source.dead, source.pending, dict(source.dropped)
    handled = source.done
    if letters is not None:
        problems += _check_letters(source, letters, notes)
        transit = max(letters.deaths - (source.moved or 0), 0) if source.moved is not None else 0
        dead = _sum(dead, letters.open, -min(transit, dead or 0))
        pending = _sum(pending, letters.redriven)
        _put(dropped, "discarded by an operator", letters.discarded)
        if letters.beyond:
            notes["dead"] = (
                f"the database has {letters.beyond:,} more, of messages that are no longer in this source"
            )
        if source.moved is None:
            handled = _sum(handled, letters.resolved - letters.count)
        else:
            handled = _sum(
                handled, letters.resolved, max(min(letters.deaths, source.moved) - letters.count, 0)
            )
    elif source.moved:
        dead = _sum(dead, source.moved)
        notes["dead"] = f"{source.moved:,} of them in a database: name it to see what happened to them"
    applied = handled
    duplicate: int | None = None if handled else handled
    if records is not None:
        _put(dropped, "superseded by a later event", records.superseded)
        if records.unknown:
            some = ", ".join(records.unknown[:5]) + (", …" if len(records.unknown) > 5 else "")
            problems.append(
                f"{_messages(len(records.unknown))} acknowledged, but neither applied nor dead: {some}"
            )
        if records.beyond:
            notes["applied"] = _explain_beyond(records.beyond, source.gone)
        applied, duplicate, pending = _split(source, records, handled, pending, problems, notes)
    elif handled:
        lacking = "its database" if letters is None else "a contract"
        notes["duplicate"] = f"without {lacking} it is unknown which of the applied were copies"
    if not applied and source.appended and source.pending == source.appended:
        notes.setdefault("applied", "nothing has been consumed yet")
    return Balance(
        appended=source.appended,
        applied=applied,
        duplicate=duplicate,
        pending=pending,
        dead=dead,
        dropped=dropped,
        gone=source.gone,
        problems=tuple(problems),
        notes=notes,
    )


def _mark_ambiguous(
    source: SourceCounts, letters: LetterCounts | None, records: RecordCounts | None
) -> SourceCounts:
    """Make `appended` unknown if the source is empty but the database has messages: the source may have lost them, or
    never had them, as after a move to another kind of source. This is ambiguous: report it, but do not fail."""
    dead = 0 if letters is None else letters.count + letters.beyond
    known = 0 if records is None else records.applied + records.superseded + records.beyond
    if source.appended != 0 or not dead + known:
        return source
    why = (
        "the source is empty, but this consumer has had messages: it was emptied or lost (a Redis without persistence, "
        "a file that was removed), or they came from another source"
    )
    return msgspec.structs.replace(source, appended=None, notes={**source.notes, "appended": why})


def _explain_beyond(count: int, gone: int) -> str:
    if count <= gone:
        return f"the inbox has {count:,} more records of this consumer, apparently of those that are gone"
    return (
        f"the inbox has {count:,} more records of this consumer, of messages that this source does not have: trimmed, "
        "lost with Redis, or from another source"
    )


def _split(
    source: SourceCounts,
    records: RecordCounts,
    handled: int | None,
    pending: int | None,
    problems: list[str],
    notes: dict[str, str],
) -> tuple[int | None, int | None, int | None]:
    """Split what was handled into applied and duplicates. Return these, and what is pending."""
    if records.duplicate is not None or handled is None:
        return records.applied, records.duplicate, pending
    known = records.applied + records.superseded
    if records.purged_before is not None and known < handled:
        notes["duplicate"] = (
            f"records of events before {records.purged_before} were purged; applied and duplicate are counted together"
        )
        return handled - records.superseded, None, pending
    if not known and source.done and source.has_copies:
        problems.append(
            f"{_messages(source.done)} acknowledged, but neither applied nor dead: the inbox has no record of this "
            "consumer; it ran without its contract, or with another database"
        )
        return 0, handled - source.done, pending
    if known <= handled and source.has_copies:
        if known < handled:
            notes["duplicate"] = (
                "inferred from counts: a message that was acknowledged by hand looks the same"
            )
        return records.applied, handled - known, pending
    if known < handled:
        problems.append(
            f"{_messages(handled - known)} confirmed, but neither applied nor dead: skipped by hand, or confirmed by "
            "something that does not use the inbox"
        )
        return records.applied, 0, pending
    ahead, begun = known - handled, (pending or 0) - source.untouched
    if pending is not None and ahead <= begun:  # committed, but the source does not know it yet
        if ahead:
            notes["pending"] = f"{ahead:,} more are applied, but not acknowledged yet"
        return records.applied, 0, pending - ahead
    notes["applied"] = (
        f"the inbox has {ahead - begun:,} more records than this source had messages: something else feeds or fed "
        "this consumer, too, or the source was lost and this is a new one"
    )
    return handled - records.superseded, 0, pending


def _check_source(source: SourceCounts) -> list[str]:
    """Check the source's own numbers."""
    parts = (source.done, source.pending, source.dead)
    if source.appended is None or None in parts:
        return []
    found = (
        sum(part or 0 for part in parts) + (source.moved or 0) + sum(source.dropped.values()) + source.gone
    )
    missing = source.appended - found
    if missing > 0:
        return [
            f"{_messages(missing)} missing: {source.appended:,} were appended, but only {found:,} are accounted for; "
            "they were removed without being done"
        ]
    if missing < 0:
        return [
            f"{_messages(-missing)} present but not counted as appended: {found:,} were found, {source.appended:,} "
            "appended"
        ]
    return []


def _check_letters(source: SourceCounts, letters: LetterCounts, notes: dict[str, str]) -> list[str]:
    missing = (source.moved or 0) - letters.deaths
    if missing <= 0:
        return []
    if letters.purged or missing <= letters.elsewhere:
        notes["dead"] = (
            f"{missing:,} more were moved to the database, where they were purged or are under another source"
        )
        return []
    return [
        f"{_messages(missing, 'dead letter')} missing: {source.moved:,} were moved to the database, but it has only "
        f"{letters.deaths:,}"
    ]


def _sum(first: int | None, *more: int) -> int | None:
    return None if first is None else first + sum(more)


def _put(dropped: dict[str, int], reason: str, count: int) -> None:
    if count:
        dropped[reason] = dropped.get(reason, 0) + count


def _messages(count: int, name: str = "message") -> str:
    return f"{count:,} {name} is" if count == 1 else f"{count:,} {name}s are"
