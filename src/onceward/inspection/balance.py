"""Conservation of messages: what was appended is applied, a duplicate, pending, dead, or dropped for a reason.

    appended = applied + duplicate + pending + dead + dropped

`fates` follows each message by its id, where the source lists them; `totals` compares numbers, where it does not. What
cannot be determined is unknown, never assumed.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from onceward._text import quantity
from onceward.connectors.reports import ServerUnreachable, SourceCounts

HOLDS = "holds"
FAILS = "does not hold"
UNKNOWN = "unknown"


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """The balance of one consumer. A number is None if it could not be determined."""

    appended: int | None
    applied: int | None = None
    """Events whose handler ran and committed. None without a contract: nothing records it."""
    duplicate: int | None = None
    """Copies of messages that are counted elsewhere."""
    done: int = 0
    """Acknowledged; whether they were applied or copies is not recorded."""
    pending: int | None = None
    dead: int | None = None
    dropped: Mapping[str, int] = {}
    """By reason."""
    gone: int = 0
    """They ended, and their records are gone, too."""
    missing: tuple[str, ...] = ()
    """The ids of messages that are missing, as far as they are known."""
    problems: tuple[str, ...] = ()
    """Why it does not hold."""
    unknown: tuple[str, ...] = ()
    """Why nobody can tell whether it holds."""
    notes: Mapping[str, str] = {}
    """Why a number is unknown, or not what it seems, by the name of the number."""
    words: Mapping[str, str] = {}
    """What a number is called, where that is not its name."""

    @property
    def verdict(self) -> str:
        return FAILS if self.problems else UNKNOWN if self.unknown else HOLDS

    @property
    def holds(self) -> bool:
        """Whether it certainly holds."""
        return self.verdict == HOLDS


def shortfall(source: SourceCounts) -> int | None:
    """How many messages the source has counted, but neither has nor has seen end. None if it does not know."""
    parts = (source.done, source.pending, source.dead)
    if source.appended is None or None in parts:
        return None
    found = sum(part or 0 for part in parts) + (source.moved or 0) + sum(source.dropped.values())
    return source.appended - found


def check_source(source: SourceCounts) -> list[str]:
    """Check the source's own numbers."""
    missing, appended = shortfall(source) or 0, source.appended or 0
    if missing > 0:
        return [
            f"{say(missing)} missing: {appended:,} were appended, but only {appended - missing:,} are accounted for; "
            "they were removed without being done"
        ]
    if missing < 0:
        return [
            f"{say(-missing)} present but not counted as appended: {appended - missing:,} were found, {appended:,} "
            "appended"
        ]
    return []


def without_database(source: SourceCounts) -> Balance:
    """The balance of a source alone: what became of the messages that ended is unknown."""
    notes = dict(source.notes)
    unknown = [*source.unknown]
    dead = source.dead
    if source.moved:
        dead = None if dead is None else dead + source.moved
        notes["dead"] = f"{source.moved:,} of them in a database: name it to see what happened to them"
    ended = (source.done or 0) + (source.moved or 0)
    if ended:
        unknown.append(
            f"{say(ended)} acknowledged; whether they were applied is in a database: name it with --database and "
            "--consumer"
        )
    return Balance(
        appended=source.appended,
        done=source.done or 0,
        pending=source.pending,
        dead=dead,
        dropped=source.dropped,
        problems=tuple(check_source(source)),
        unknown=(*why_appended_is_unknown(source.appended, notes), *unknown),
        notes=notes,
    )


def unreachable(error: ServerUnreachable) -> Balance:
    """The balance while a server is down: nothing is known, and nothing is accused."""
    return Balance(appended=None, unknown=(str(error),))


def why_appended_is_unknown(appended: int | None, notes: Mapping[str, str]) -> list[str]:
    if appended is not None:
        return []
    return [f"how many were appended is unknown: {notes.get('appended', 'the source does not count')}"]


def explain_surplus(count: int, source: SourceCounts) -> str:
    """Say why more records than messages leave it open whether the source has lost any."""
    if source.appended == 0:
        return (
            "the source is empty, but this consumer has had messages: it was emptied or lost (a Redis without "
            "persistence, a file that was removed), or they came from another source"
        )
    return (
        f"the database has {count:,} more {'record' if count == 1 else 'records'} of this consumer than messages of "
        "this source have ended: something else feeds or fed it, too, or the source has lost messages, or forgotten "
        "which of them ended (its consumer or group was created again)"
    )


def nothing_consumed(records: int) -> str:
    """Say that all messages wait. Records are of an earlier life of the source, or of another one."""
    if not records:
        return "nothing has been consumed yet"
    return (
        f"nothing has been consumed yet, says the source; the database has {quantity(records, 'record')} of this "
        "consumer"
    )


def put(dropped: dict[str, int], reason: str, count: int) -> None:
    if count:
        dropped[reason] = dropped.get(reason, 0) + count


def say(count: int, name: str = "message") -> str:
    return f"{count:,} {name} is" if count == 1 else f"{count:,} {name}s are"


def some(ids: tuple[str, ...]) -> str:
    """Name the first ids."""
    return ", ".join(ids[:5]) + (", …" if len(ids) > 5 else "")
