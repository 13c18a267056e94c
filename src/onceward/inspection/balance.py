"""Conservation of messages: what was appended is applied, a duplicate, pending, dead, or dropped for a reason.

    appended = applied + duplicate + pending + dead + dropped

Numbers in, verdict out; who counts is in `counting`. A number that nobody can know is None, with the reason why, and
what remains of the equation is checked.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from onceward.connectors.reports import SourceCounts


class LetterCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters of this consumer from this source, in the database."""

    open: int = 0
    redriven: int = 0
    """Waiting to be tried again."""
    resolved: int = 0
    """Tried again, and done."""
    discarded: int = 0
    deaths: int = 0
    """Of messages in the source; a copy that died makes no second letter."""
    elsewhere: int = 0
    """Deaths of messages of this consumer that came from another source, or the same by another name."""
    beyond: int = 0
    """Letters from this source, of messages that it does not have any more. Only where it was looked by ids."""
    purged: bool = False
    """Some letters have been removed since, and nobody knows whose."""

    @property
    def count(self) -> int:
        return self.open + self.redriven + self.resolved + self.discarded


class RecordCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Of the inbox, about this consumer."""

    applied: int = 0
    superseded: int = 0
    """Dropped: a later event of the same thing had been applied already."""
    duplicate: int | None = None
    """None: it was not looked for the messages by their ids."""
    beyond: int = 0
    """Records of messages that the source does not have, or not any more. Only where it was looked by ids."""
    unknown: tuple[str, ...] = ()
    """Messages that were acknowledged, and are neither in the inbox nor dead."""
    purged_before: str | None = None
    """The first day that is kept; of earlier ones there may have been more."""


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """The account of one consumer."""

    appended: int | None
    applied: int | None
    duplicate: int | None
    """None: among the applied, if anywhere."""
    pending: int | None
    dead: int | None
    dropped: Mapping[str, int]
    gone: int
    problems: tuple[str, ...]
    """Why it does not hold."""
    untold: Mapping[str, str]
    """What cannot be told, and why."""

    @property
    def holds(self) -> bool:
        return not self.problems


def strike(source: SourceCounts, letters: LetterCounts | None, records: RecordCounts | None) -> Balance:
    """`letters` is None without a database, `records` without a contract."""
    problems = list(_missing_in(source))
    source = _doubted(source, letters, records)
    untold = dict(source.untold)
    dead, pending, dropped = source.dead, source.pending, dict(source.dropped)
    handled = source.done
    if letters is not None:
        problems += _missing_letters(source, letters, untold)
        transit = max(letters.deaths - (source.moved or 0), 0) if source.moved is not None else 0
        dead = _sum(dead, letters.open, -min(transit, dead or 0))
        pending = _sum(pending, letters.redriven)
        _put(dropped, "discarded by an operator", letters.discarded)
        if letters.beyond:
            untold["dead"] = (
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
        untold["dead"] = f"{source.moved:,} of them in a database: name it to be told what became of them"
    if records is None:
        if handled:
            lacking = "its database" if letters is None else "a contract"
            untold["duplicate"] = f"without {lacking} nobody knows which of the applied were copies"
        return _balance(
            source, handled, None if handled else handled, pending, dead, dropped, problems, untold
        )
    _put(dropped, "superseded by a later event", records.superseded)
    if records.unknown:
        some = ", ".join(records.unknown[:5]) + (", …" if len(records.unknown) > 5 else "")
        problems.append(
            f"{_messages(len(records.unknown))} acknowledged, but neither applied nor dead: {some}"
        )
    if records.beyond:
        untold["applied"] = _said_of_beyond(records.beyond, source.gone)
    applied, duplicate, pending = _split(source, records, handled, pending, problems, untold)
    return _balance(source, applied, duplicate, pending, dead, dropped, problems, untold)


def _doubted(
    source: SourceCounts, letters: LetterCounts | None, records: RecordCounts | None
) -> SourceCounts:
    """A source that is empty, while the database knows of messages, may have lost them; or it never had them, as after
    a move from one kind of source to another. Nobody can tell, so that it is no problem, and no peace either."""
    dead = 0 if letters is None else letters.count + letters.beyond
    known = 0 if records is None else records.applied + records.superseded + records.beyond
    if source.appended != 0 or not dead + known:
        return source
    why = (
        "the source is empty, and this consumer has had messages: it was emptied or lost (a Redis without persistence, "
        "a file that was removed), or they came from another source"
    )
    return msgspec.structs.replace(source, appended=None, untold={**source.untold, "appended": why})


def _said_of_beyond(count: int, gone: int) -> str:
    if count <= gone:
        return f"the inbox has {count:,} records more of this consumer, as it seems of those that are gone"
    return (
        f"the inbox has {count:,} records more of this consumer, of messages that this source does not have: trimmed, "
        "lost with Redis, or of another source"
    )


def _split(
    source: SourceCounts,
    records: RecordCounts,
    handled: int | None,
    pending: int | None,
    problems: list[str],
    untold: dict[str, str],
) -> tuple[int | None, int | None, int | None]:
    """What was handled, into applied and duplicates."""
    if records.duplicate is not None or handled is None:
        return records.applied, records.duplicate, pending
    known = records.applied + records.superseded
    if records.purged_before is not None and known < handled:
        untold["duplicate"] = (
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
            untold["duplicate"] = "found by counting: a message that was acknowledged by hand looks the same"
        return records.applied, handled - known, pending
    if known < handled:
        problems.append(
            f"{_messages(handled - known)} confirmed, but neither applied nor dead: skipped by hand, or confirmed by "
            "something without the inbox"
        )
        return records.applied, 0, pending
    ahead, begun = known - handled, (pending or 0) - source.untouched
    if pending is not None and ahead <= begun:  # committed, and the source does not know it yet
        if ahead:
            untold["pending"] = f"{ahead:,} more are applied, and not acknowledged yet"
        return records.applied, 0, pending - ahead
    untold["applied"] = (
        f"the inbox has {ahead - begun:,} records more than this source had messages: something else feeds "
        "this consumer, too, or did, or the source was lost and is a new one"
    )
    return handled - records.superseded, 0, pending


def _missing_in(source: SourceCounts) -> list[str]:
    """The source's own books."""
    parts = (source.done, source.pending, source.dead)
    if source.appended is None or None in parts:
        return []
    found = (
        sum(part or 0 for part in parts) + (source.moved or 0) + sum(source.dropped.values()) + source.gone
    )
    missing = source.appended - found
    if missing > 0:
        return [
            f"{_messages(missing)} missing: {source.appended:,} were appended, and {found:,} are accounted for; "
            "somebody has removed them without their being done"
        ]
    if missing < 0:
        return [
            f"{_messages(-missing)} there that nobody appended: {found:,} were found, {source.appended:,} appended"
        ]
    return []


def _missing_letters(source: SourceCounts, letters: LetterCounts, untold: dict[str, str]) -> list[str]:
    missing = (source.moved or 0) - letters.deaths
    if missing <= 0:
        return []
    if letters.purged or missing <= letters.elsewhere:
        untold["dead"] = (
            f"{missing:,} more were moved to the database, and are purged or under another source there"
        )
        return []
    return [
        f"{_messages(missing, 'dead letter')} missing: {source.moved:,} were moved to the database, which has "
        f"{letters.deaths:,}"
    ]


def _balance(
    source: SourceCounts,
    applied: int | None,
    duplicate: int | None,
    pending: int | None,
    dead: int | None,
    dropped: Mapping[str, int],
    problems: list[str],
    untold: dict[str, str],
) -> Balance:
    if not applied and source.appended and source.pending == source.appended:
        untold.setdefault("applied", "nothing has been consumed yet")
    return Balance(
        appended=source.appended,
        applied=applied,
        duplicate=duplicate,
        pending=pending,
        dead=dead,
        dropped=dropped,
        gone=source.gone,
        problems=tuple(problems),
        untold=untold,
    )


def _sum(first: int | None, *more: int) -> int | None:
    return None if first is None else first + sum(more)


def _put(dropped: dict[str, int], reason: str, count: int) -> None:
    if count:
        dropped[reason] = dropped.get(reason, 0) + count


def _messages(count: int, name: str = "message") -> str:
    return f"{count:,} {name} is" if count == 1 else f"{count:,} {name}s are"
