"""Lines of a leasing queue: messages of one key wait in line in order of arrival, and only the first of each
line is delivered.

The key is in the body, which the queue does not read when a message is appended. So a fetch lines up what has arrived
since the last one, oldest first, inside its own transaction, and then takes from the heads of the lines:

    arrived ──line_up──► first of its line ──fetch──► leased ──done──► gone: the next one is first
                    └──► behind others: parked, where no fetch passes it

A message keeps its place while it is leased, delayed after a failure, or, if dead ones hold their line, a dead letter
of the queue. One that was sent for later lines up when its time has come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from onceward.connectors.codec import DecodeError, decode
from onceward.transaction import Transaction

KeyOf = Callable[[Transaction], str | None]
"""The key of a transaction; None if it has none, and waits for nobody."""
MOST_AT_ONCE = 2000
"""Messages that are lined up at once, at most. A fetch begins with twice its size, and doubles that: what is lined up
early may have to be parked, and what comes later may find its line empty."""
KEPT_BODY = 2000
"""Bytes. Up to `MOST_AT_ONCE` messages that wait are kept decoded, if their bodies are no longer than this."""
LONGEST = 0.3
"""Seconds that one transaction lines up messages. The next one goes on."""


class LineBehind(NamedTuple):
    """What waits behind the first message of a line."""

    waiting: int
    ids: tuple[str, ...]
    """The first of them."""


class LineStore(Protocol):
    """What a `LeaseStore` needs in addition. Every method is called inside a `transaction`."""

    def begin_lines(self, hold_dead: bool) -> None:
        """From now on, deliver only heads of lines. With `hold_dead`, a dead letter is first until it is forgotten."""
        ...

    def advance_lines(self) -> None:
        """Let those come first whose predecessors are gone. One fetch at a time does this, and what follows."""
        ...

    def newcomers(self, now: float, limit: int) -> Sequence[Any]:
        """Return messages that are in no line, oldest first, as `LeaseStore.available` does."""
        ...

    def line_up(self, newcomers: Sequence[tuple[int, str | None]], now: float) -> Sequence[bool]:
        """Put these at the ends of the lines of their keys. One without a key is a line of its own. Return which of
        them can be delivered."""
        ...

    def behind(self, key: str, limit: int) -> tuple[int, Sequence[bytes]]:
        """Count what waits in a line for others, and return the first bodies."""
        ...


class Lines:
    """Lines up the messages of a store."""

    def __init__(self, store: Any, key_of: KeyOf, *, hold_dead: bool) -> None:
        self._store = store
        self._key_of = key_of
        self._hold_dead = hold_dead
        self._begun = False
        self._decoded: dict[bytes, Transaction] = {}
        """What was decoded for its key, by its body, until it is delivered."""
        self.has_more = False
        """Whether there was no time to line up all newcomers."""

    def form(self, now: float, size: int) -> Sequence[Any]:
        """Line up newcomers until `size` messages can be delivered, or all have a place. Return those that can be."""
        store: LineStore = self._store
        if not self._begun:
            store.begin_lines(self._hold_dead)
            self._begun = True
        store.advance_lines()
        until = time.monotonic() + LONGEST
        limit = 2 * size
        rows: list[Any] = list(self._store.available(now, size))
        while True:
            self.has_more = time.monotonic() >= until
            if len(rows) >= size or self.has_more:
                return rows[:size]
            newcomers = store.newcomers(now, min(limit, MOST_AT_ONCE))
            if not newcomers:
                return rows
            ready = store.line_up([(row[0], self._key_in(row[-1])) for row in newcomers], now)
            rows += [row for row, is_ready in zip(newcomers, ready, strict=True) if is_ready]
            limit *= 2

    def decode(self, body: bytes) -> Transaction:
        """As `codec.decode`, which is not needed again for a message that has just lined up."""
        return self._decoded.pop(body, None) or decode(body)

    def behind(self, keys: Sequence[str], limit: int) -> dict[str, LineBehind]:
        """What waits in these lines."""
        found = {}
        for key in keys if self._begun else ():
            waiting, bodies = self._store.behind(key, limit)
            found[key] = LineBehind(waiting, tuple(_id_in(body) for body in bodies))
        return found

    def _key_in(self, body: bytes) -> str | None:
        try:
            transaction = decode(body)
        except DecodeError:
            return None  # it is buried when its turn comes
        if len(body) <= KEPT_BODY:
            if len(self._decoded) >= MOST_AT_ONCE:
                self._decoded.clear()
            self._decoded[body] = transaction
        return self._key_of(transaction)


def _id_in(body: bytes) -> str:
    try:
        return decode(body).id
    except DecodeError:
        return "(unreadable)"


def are_first(newcomers: Sequence[tuple[int, str | None]], taken: set[str]) -> list[bool]:
    """Which of these are the first of their lines, if those of the `taken` keys have others before them."""
    first: list[bool] = []
    for _, key in newcomers:
        first.append(key is None or key not in taken)
        if key is not None:
            taken.add(key)
    return first
