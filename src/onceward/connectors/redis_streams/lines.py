"""The lines of a stream: `onceward.connectors.lines` says what they are, and `line_scripts` how Redis keeps them.

Reads ahead of what is delivered, since the key of an entry is in its body, and tells `TAKE` the keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from onceward._redis.connections import RedisCommand
from onceward.connectors.codec import DecodeError, decode
from onceward.connectors.lines import LONGEST, MOST_AT_ONCE, KeyOf, LineBehind
from onceward.connectors.redis_streams import line_scripts
from onceward.connectors.redis_streams.entries import as_str, body_of
from onceward.transaction import Transaction

Lining = Generator[Sequence[RedisCommand], list[Any], Any]
"""An `Exchange`."""
WAITING = "waiting"
"""The consumer that has what stands in line behind others."""
PAGE = 500
"""Entries that are looked at together when lines are fixed."""
BUSY_SHARE = 4
"""While the last fetch was full, at most one in this many of a batch is a recovered entry."""
AHEAD, LEAST_AHEAD = 2, 32
"""How many times as many entries as a fetch wants are read at first, and how many at least; then four times as many,
and so on."""
NO_LINE = ""
"""Of an entry without a key, which waits for nobody."""


class _Seen(NamedTuple):
    """An entry that is not delivered yet."""

    id: str
    line: str
    place: str
    """The id, so ids sort as texts."""
    content: Transaction | Any
    """Its fields if it cannot be read."""


class _Ahead(NamedTuple):
    """What was read, and perhaps not delivered yet."""

    after: bytes
    seen: dict[bytes, _Seen]
    """All entries after that one, up to the last of these."""


NOWHERE = _Ahead(b"0-0", {})
"""Before the first fetch, which tells where the group is."""


class StreamLines:
    """The part of a `StreamQueue` that keeps lines."""

    stream: str
    group: str
    _slack: bool
    _recover_at: float
    _line_keys: tuple[str, ...]
    _evaluate: Callable[..., Lining]
    _terms: Callable[[int], tuple[Any, ...]]
    _look_again_later: Callable[[], None]
    _tell_buried: Callable[[Sequence[Any]], None]

    _key_of: KeyOf | None = None
    _hold_dead = False
    _ahead = NOWHERE

    def keep_order(self, key_of: KeyOf, *, hold_dead: bool) -> None:
        self._key_of, self._hold_dead = key_of, hold_dead

    @property
    def in_lines(self) -> bool:
        return self._key_of is not None

    def _take_in_lines(self, count: int) -> Lining:
        """Take first entries of their lines: those that are due, those that were let go, and new ones."""
        recover = count if self._slack else 0
        if not recover and time.monotonic() >= self._recover_at:
            recover = max(count // BUSY_SHARE, 1)
        rows = yield from self._line_up(count, recover)
        if not rows and not recover:
            rows = yield from self._line_up(count, count)
        self._slack = len(rows) < count
        return rows

    def _line_up(self, count: int, recover: int) -> Lining:
        rows: list[tuple[Any, int, Any, int]] = []
        until, ahead, is_fixed, is_end = time.monotonic() + LONGEST, max(AHEAD * count, LEAST_AHEAD), 0, False
        knows_where = self._ahead is not NOWHERE
        while True:
            if len(self._ahead.seen) < count - len(rows) and knows_where and not is_end:
                is_end = yield from self._read_on(ahead)
            after, seen = self._ahead
            passed = list(islice(seen.values(), MOST_AT_ONCE))  # Lua has room for 8,000 values at once
            known = (
                [each.id for each in passed],
                [each.line for each in passed],
                [each.place for each in passed],
            )
            arguments = (recover, is_fixed, after, msgspec.msgpack.encode(known))
            reply = yield from self._evaluate(
                line_scripts.TAKE, (*self._terms(count - len(rows)), *arguments)
            )
            if reply is None:  # there is a new group
                return rows
            served, buried, alone, fresh, last, differs = reply
            self._tell_buried(buried)
            rows += [tuple(row) for row in served]
            rows += [(entry, 1, seen[entry].content, 0) for entry in fresh]
            if differs:
                yield from self._fix()
                if rows:
                    return rows
                recover, is_fixed = max(recover, 0), 1
                continue
            if recover > 0:
                self._look_again_later()
            is_rest = self._pass(last)
            if alone or len(rows) >= count:
                return rows
            if (
                len(self._ahead.seen) == len(seen) > 0 or not is_rest
            ):  # some of these were removed, or all is new
                self._ahead, is_end = _Ahead(last, {}), False
            elif (not self._ahead.seen and is_end) or (rows and time.monotonic() >= until):
                return rows
            recover, ahead, knows_where = -1, min(4 * ahead, MOST_AT_ONCE), True

    def _read_on(self, count: int) -> Lining:
        """Read entries after those that were read. Return whether these are the last ones."""
        after, seen = self._ahead
        begin = next(reversed(seen), after)
        [found] = yield [("XRANGE", self.stream, b"(" + begin, "+", "COUNT", count)]
        if isinstance(found, Exception):
            raise found
        following = {entry: self._look_at(entry, fields) for entry, fields in found}
        self._ahead = _Ahead(after, {**seen, **following})
        return len(found) < count

    def _pass(self, last: bytes) -> bool:
        """Forget what was read, up to the last entry that is delivered. Return whether the rest is still what follows:
        a new group begins before it."""
        at = place_of(as_str(last))
        is_rest = at >= place_of(as_str(self._ahead.after))
        seen = self._ahead.seen.items() if is_rest else ()
        self._ahead = _Ahead(last, {entry: each for entry, each in seen if each.place > at})
        return is_rest

    def _look_at(self, entry: bytes, fields: Sequence[Any]) -> _Seen:
        assert self._key_of is not None
        name = as_str(entry)
        try:
            transaction = decode(body_of(fields or ()) or b"")
        except DecodeError:
            return _Seen(name, NO_LINE, place_of(name), fields)
        return _Seen(name, line_of(self._key_of(transaction)), place_of(name), transaction)

    def _fix(self) -> Lining:
        """Others have acknowledged entries, or taken some without order: make lines match what is pending."""
        for hash_ in self._line_keys[1:3]:
            cursor: Any = 0
            while True:
                [reply] = yield [("HSCAN", hash_, cursor, "COUNT", PAGE)]
                if isinstance(reply, Exception):
                    raise reply
                cursor, flat = reply
                for begin in range(0, len(flat), 2 * PAGE):
                    entries = flat[begin : begin + 2 * PAGE : 2]
                    yield from self._evaluate(line_scripts.PASS, (self.group, *entries))
                if int(cursor) == 0:
                    break
        begin_at: bytes | str = "-"
        while True:
            [pending] = yield [("XPENDING", self.stream, self.group, begin_at, "+", PAGE)]
            if isinstance(pending, Exception):
                raise pending
            if not pending:
                return
            begin_at = b"(" + pending[-1][0]
            entries = [each[0] for each in pending]
            [lines] = yield [("HMGET", self._line_keys[1], *entries)]
            strays = [entry for entry, line in zip(entries, lines, strict=True) if line is None]
            if strays:
                found = yield [("XRANGE", self.stream, entry, entry) for entry in strays]
                seen = [
                    (as_str(entry), self._look_at(entry, each[0][1]).line if each else NO_LINE)
                    for entry, each in zip(strays, found, strict=True)
                ]
                packed = msgspec.msgpack.encode(seen)
                yield from self._evaluate(line_scripts.LINE_UP, (self.group, packed))

    def lines_behind(self, keys: Sequence[str], limit: int) -> Lining:
        """What waits behind the first entries of these keys."""
        if self._key_of is None:
            return {}
        packed = msgspec.msgpack.encode([line_of(key) for key in keys])
        found = yield from self._evaluate(line_scripts.BEHIND, (limit, packed))
        return {
            key: LineBehind(waiting, tuple(_id_in(fields) for fields in entries))
            for key, (waiting, entries) in zip(keys, found or (), strict=False)
        }


def line_of(key: str | None) -> str:
    """The name of a line, of which no other is the beginning."""
    if key is None:
        return NO_LINE
    return f"{len(key) if key.isascii() else len(key.encode())}:{key}:"


def place_of(name: str) -> str:
    """As `place` in the scripts."""
    milliseconds, _, number = name.partition("-")
    return f"{milliseconds:0>20}-{number:0>20}"


def _id_in(fields: Sequence[Any]) -> str:
    try:
        return decode(body_of(fields) or b"").id
    except DecodeError:
        return "(unreadable)"
