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
from onceward.connectors.lines import KEPT_BODY, LONGEST, MOST_AT_ONCE, KeyOf, LineBehind
from onceward.connectors.redis_streams import line_scripts
from onceward.connectors.redis_streams.entries import as_str, body_of
from onceward.connectors.redis_streams.first_deliveries import decode_new
from onceward.transaction import Transaction

Lining = Generator[Sequence[RedisCommand], list[Any], Any]
"""An `Exchange`."""
WAITING = "waiting"
"""The consumer that holds the entries that wait in line behind others."""
PAGE = 500
"""Entries that are looked at together when lines are fixed."""
BUSY_SHARE = 4
"""While the last fetch was full, at most one in this many of a batch is a recovered entry."""
AHEAD, LEAST_AHEAD = 2, 32
"""How many times as many entries as a fetch wants are read at first, and how many at least; then four times as many,
and so on."""
REACH, FORGETTING = 1.5, 0.75
"""How many times as many entries as the last fetches needed are passed to the script at first, and which part of that
is still passed after one that needed none."""
ZEROS = 41
"""Characters of an id with zeros."""
NO_LINE = ""
"""Of an entry without a key, which waits for nobody."""


_Row = tuple[Any, int, Any, int]
"""A delivery, as in `protocol`."""


class _Seen(NamedTuple):
    """An entry that is not delivered yet."""

    id: str
    line: str
    zeros: str
    """The id with zeros, so ids sort as texts."""
    place: str
    """Its line and both of its ids, for the scripts."""
    content: Transaction | Any
    """Its fields if it cannot be read."""
    is_short: bool


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
    _settle: Callable[[Sequence[Sequence[Any]]], Lining]

    _key_of: KeyOf | None = None
    _hold_dead = False
    _ahead = NOWHERE
    _reach = MOST_AT_ONCE
    _kept: dict[bytes, Transaction]
    """Entries that this process has lined up behind others, until it gets them."""

    def keep_order(self, key_of: KeyOf, *, hold_dead: bool) -> None:
        self._key_of, self._hold_dead, self._kept = key_of, hold_dead, {}

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
        return rows, ()

    def _line_up(self, count: int, recover: int) -> Lining:
        rows: list[_Row] = []
        until, ahead, is_fixed, is_end = time.monotonic() + LONGEST, max(AHEAD * count, LEAST_AHEAD), 0, False
        reach, needed = min(self._reach, ahead), 0
        knows_where = self._ahead is not NOWHERE
        while True:
            if len(self._ahead.seen) < count - len(rows) and knows_where and not is_end:
                is_end = yield from self._read_on(ahead)
            after, seen = self._ahead
            passed = list(islice(seen.values(), reach))
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
                self._kept.clear()
                return rows
            served, buried, alone, fresh, last, differs = reply
            self._tell_buried(buried)
            rows += yield from self._find_bodies(served)
            rows += [(entry, 1, seen[entry].content, 0) for entry in fresh]
            if differs:
                yield from self._fix()
                if rows:
                    return rows
                recover, is_fixed = max(recover, 0), 1
                continue
            if recover > 0:
                self._look_again_later()
            is_rest = self._pass(last, fresh)
            needed += len(seen) - len(self._ahead.seen)
            if alone or len(rows) >= count:
                self._reach = max(int(REACH * needed), int(FORGETTING * self._reach), LEAST_AHEAD)
                return rows
            if (
                len(self._ahead.seen) == len(seen) > 0 or not is_rest
            ):  # some of these were removed, or all is new
                self._ahead, is_end = _Ahead(last, {}), False
                self._kept.clear()
            elif (not self._ahead.seen and is_end) or (rows and time.monotonic() >= until):
                return rows
            recover, ahead, knows_where = -1, min(4 * ahead, MOST_AT_ONCE), True
            reach = min(4 * reach, MOST_AT_ONCE)  # Lua has room for 8,000 values at once

    def _read_on(self, count: int) -> Lining:
        """Read entries after those that were read. Return whether these are the last ones."""
        after, seen = self._ahead
        begin = next(reversed(seen), after)
        [found] = yield [("XRANGE", self.stream, b"(" + begin, "+", "COUNT", count)]
        if isinstance(found, Exception):
            raise found
        self._ahead = _Ahead(after, {**seen, **self._look_at_all(found)})
        return len(found) < count

    def _find_bodies(self, served: Sequence[Any]) -> Lining:
        """The rows of these. The next of a line is only its id: its body is here if this process has lined it up,
        otherwise in the stream."""
        bodies: dict[bytes, Any] = {}
        strangers: list[bytes] = []
        for each in served:
            if type(each) is bytes:
                content = self._kept.pop(each, None)
                if content is None:
                    strangers.append(each)
                else:
                    bodies[each] = content
        if strangers:
            found = yield [("XRANGE", self.stream, entry, entry) for entry in strangers]
            for entry, reply in zip(strangers, found, strict=True):
                if isinstance(reply, Exception):
                    raise reply
                if reply:
                    bodies[entry] = reply[0][1]
            trimmed = [(as_str(entry), 1, "return", 0) for entry in strangers if entry not in bodies]
            if trimmed:  # since the script has run
                yield from self._settle(trimmed)
        return [
            (each, 1, bodies[each], 0) if type(each) is bytes else tuple(each)
            for each in served
            if type(each) is not bytes or each in bodies
        ]

    def _pass(self, last: bytes, fresh: Sequence[bytes]) -> bool:
        """Forget what was read, up to the last entry that is delivered, and keep those that wait now. Return whether
        the rest is still what follows: a new group begins before it."""
        at = with_zeros(as_str(last))
        after, seen = self._ahead
        is_rest = at >= with_zeros(as_str(after))
        rest = dict(seen) if is_rest else {}
        delivered = set(fresh)
        for entry, each in seen.items() if is_rest else ():
            if each.zeros > at:
                break
            del rest[entry]
            if entry not in delivered and each.is_short:
                if len(self._kept) >= MOST_AT_ONCE:
                    self._kept.clear()
                self._kept[entry] = each.content
        self._ahead = _Ahead(last, rest)
        return is_rest

    def _look_at_all(self, found: Sequence[tuple[bytes, Any]]) -> dict[bytes, _Seen]:
        """`_look_at` each, with few calls for each if all of them are as usual."""
        assert self._key_of is not None
        transactions = decode_new(found)
        if transactions is None:
            return {entry: self._look_at(entry, fields) for entry, fields in found}
        seen: dict[bytes, _Seen] = {}
        for (entry, fields), transaction, key in zip(
            found, transactions, map(self._key_of, transactions), strict=True
        ):
            name = entry.decode()
            milliseconds, _, number = name.partition("-")
            zeros = f"{milliseconds.zfill(20)}-{number.zfill(20)}"
            line = f"{len(key)}:{key}:" if key is not None and key.isascii() else line_of(key)
            is_short = len(fields[3]) <= KEPT_BODY
            seen[entry] = _Seen(name, line, zeros, line + zeros + name, transaction, is_short)
        return seen

    def _look_at(self, entry: bytes, fields: Sequence[Any]) -> _Seen:
        assert self._key_of is not None
        name = as_str(entry)
        body = body_of(fields or ()) or b""
        zeros = with_zeros(name)
        try:
            transaction = decode(body)
        except DecodeError:
            return _Seen(name, NO_LINE, zeros, zeros + name, fields, False)
        line = line_of(self._key_of(transaction))
        return _Seen(name, line, zeros, line + zeros + name, transaction, len(body) <= KEPT_BODY)

    def _fix(self) -> Lining:
        """Others have acknowledged entries, or taken some without order: make lines match what is pending."""
        cursor: Any = b"0"
        while True:
            [reply] = yield [("ZSCAN", self._line_keys[0], cursor, "COUNT", PAGE)]
            if isinstance(reply, Exception):
                raise reply
            cursor, flat = reply
            for begin in range(0, len(flat), 2 * PAGE):
                places = flat[begin : begin + 2 * PAGE : 2]
                named = [each for place in places for each in (_entry_in(place), place)]
                yield from self._evaluate(line_scripts.PASS, (self.group, *named))
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
            found = yield [("XRANGE", self.stream, entry, entry) for entry in entries]
            seen = [
                self._look_at(entry, each[0][1] if each else ())
                for entry, each in zip(entries, found, strict=True)
            ]
            packed = msgspec.msgpack.encode([(each.id, each.line, each.place) for each in seen])
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


def _entry_in(place: bytes) -> bytes:
    """The id that follows the line and the id with zeros; a line ends with a colon."""
    return place.rpartition(b":")[2][ZEROS:]


def with_zeros(name: str) -> str:
    """As in the scripts."""
    milliseconds, _, number = name.partition("-")
    return f"{milliseconds.zfill(20)}-{number.zfill(20)}"


def _id_in(fields: Sequence[Any]) -> str:
    try:
        return decode(body_of(fields) or b"").id
    except DecodeError:
        return "(unreadable)"
