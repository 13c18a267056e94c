"""What the connector does, once for threads and asyncio: generators that yield commands and get replies.

An entry has the fields `id` (the transaction's, for people) and `body` (see `connectors.codec`). Beside the stream
there are a hash with the failures of entries in hand, and a stream of dead letters.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from onceward.connectors.codec import DecodeError, decode, encode_all
from onceward.connectors.handouts import Handout, Handouts
from onceward.connectors.redis_streams import lua
from onceward.connectors.rules import BurialReason, Bury, DeadLetter, LeaseRules
from onceward.settlement import Settlement, Verdict
from onceward.task.exceptions import ConfigurationError, ExceptionCategory
from onceward.transaction import Transaction

_log = logging.getLogger(__name__)

RECOVER_INTERVAL = 1.0
"""Seconds between two looks for entries of dead consumers while new ones keep coming."""
CERTAIN = 0.9
"""The part of a lease in which a delivery is certainly still ours, by our own clock."""
BUSY_SHARE = 4
"""While new entries keep coming, recovered ones are at most one in so many of a batch."""
COUNTED = 10_000
"""Beyond this many, `counts` stops counting."""

DONE = Verdict.DONE
Command = tuple[Any, ...]
Entry = tuple[str, bytes]


Exchange = Generator[Sequence[Command], list[Any], Any]
"""Yields commands to be sent together, and gets their replies as a list, with errors of single commands in it."""


class StreamQueue:
    """One stream, one group, one consumer: all behaviour except the sending."""

    def __init__(
        self, stream: str, group: str, rules: LeaseRules, maxlen: int | None, clock: Callable[[], float]
    ) -> None:
        for name, value in (("stream", stream), ("group", group)):
            if not isinstance(value, str) or not value:
                raise ConfigurationError(f"{name} must be a non-empty string, not {value!r}")
        if maxlen is not None and maxlen < 1:
            raise ConfigurationError(f"maxlen must be 1 or more, or None, not {maxlen!r}")
        self.rules = rules
        self.stream = stream
        self.group = group
        self.consumer = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        # The braces put all three into one slot of a cluster.
        self.history = f"{{{stream}}}:{group}:history"
        self.dead = f"{{{stream}}}:{group}:dead"
        self._parked = "returned"
        self._maxlen = maxlen
        self._handouts = Handouts()
        self._lease_ms = max(int(rules.lease * 1000), 1)
        self._group_known = False
        self._slack = True
        """The last fetch was not full: there is time to look after entries of dead consumers."""
        self._recover_at = 0.0
        self._clock = clock

    # ── fetching ────────────────────────────────────────────────────────────────────────────────────────

    def fetch(self, batch_size: int) -> Exchange:
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, not {batch_size}")
        if not self._group_known:
            yield from self._make_group()
        while True:
            asked = self._clock()
            rows = yield from self._take(batch_size if self.rules.suspect_after else 1)
            transactions = yield from self._hand_out(rows, asked)
            if transactions or not rows:
                return transactions

    def _take(self, count: int) -> Exchange:
        """Entries of dead consumers first, as far as there is time for them, then new ones."""
        rows: list[tuple[Any, int, Any]] = []
        alone = False
        look = self._slack or time.monotonic() >= self._recover_at
        if look:
            rows, alone = yield from self._recover(count if self._slack else max(count // BUSY_SHARE, 1))
        room = count - len(rows)
        if room and not alone:
            fresh = yield from self._read(room)
            self._slack = len(fresh) < room
            rows += [(entry, 1, fields) for entry, fields in fresh]
        if not rows and not look:
            rows, _ = yield from self._recover(count)
        return rows

    def _make_group(self) -> Exchange:
        [reply] = yield [("XGROUP", "CREATE", self.stream, self.group, "0", "MKSTREAM")]
        if isinstance(reply, Exception) and not str(reply).startswith("BUSYGROUP"):
            raise reply
        self._group_known = True

    def _recover(self, count: int) -> Exchange:
        arguments = (
            self.group, self.consumer, self._lease_ms, count, self.rules.suspect_after, self.rules.max_deliveries,
        )  # fmt: skip
        served, buried, alone = yield from self._evaluate(lua.CLAIM, arguments)
        self._recover_at = time.monotonic() + min(RECOVER_INTERVAL, self.rules.lease / 4)
        for entry, reason, name in buried:
            _log.error(
                "entry %s (transaction %s) is now a dead letter: %s", _text(entry), _text(name), _text(reason)
            )
        return [tuple(row) for row in served], bool(alone)

    def _read(self, count: int) -> Exchange:
        command = (
            "XREADGROUP",
            "GROUP",
            self.group,
            self.consumer,
            "COUNT",
            count,
            "STREAMS",
            self.stream,
            ">",
        )
        [reply] = yield [command]
        if isinstance(reply, Exception):
            if not str(reply).startswith("NOGROUP"):
                raise reply
            _log.warning("stream %s or its group %s was deleted; made again", self.stream, self.group)
            yield from self._make_group()
            [reply] = yield [command]
            if isinstance(reply, Exception):
                raise reply
        return reply[0][1] if reply else []

    def _hand_out(self, rows: list[tuple[Any, int, Any]], asked: float) -> Exchange:
        transactions: list[Transaction] = []
        bad: list[Any] = []
        for key, deliveries, fields in rows:
            entry = key.decode()
            body = _body(fields or ())
            try:
                transaction = decode(body or b"")
            except DecodeError as error:
                text = "it has no field `body`" if body is None else str(error)
                _log.error("entry %s is now a dead letter: %s", entry, text)
                bad.append((entry, deliveries, "bury", BurialReason.UNDECODABLE, text, ""))
                continue
            self._handouts.record(transaction, (entry, deliveries), deliveries, asked)
            transactions.append(transaction)
        if bad:
            yield from self._settle(bad)
        return transactions

    # ── dispatching ─────────────────────────────────────────────────────────────────────────────────────

    def entries(self, transactions: Sequence[Transaction]) -> list[Entry]:
        """What to append for these."""
        bodies = encode_all(transactions)
        return [(transaction.id, body) for transaction, body in zip(transactions, bodies, strict=True)]

    def append(self, entries: Sequence[Entry]) -> Exchange:
        """Append them, all or none, in one round trip."""
        limit = "" if self._maxlen is None else self._maxlen
        packed = msgspec.msgpack.encode([(name, _as_text_of_bytes(body)) for name, body in entries])
        yield from self._evaluate(lua.ADD, (limit, packed))

    # ── settling ────────────────────────────────────────────────────────────────────────────────────────

    def settle(self, settlements: Sequence[Settlement]) -> Exchange:
        ending: dict[str, tuple[Settlement, Handout]] = {}
        verdicts: list[Sequence[Any]] = []
        certain: list[str] = []
        sure_since = self._clock() - self.rules.lease * CERTAIN
        for settlement in settlements:
            handout = self._handouts.of(settlement.transaction)
            entry, deliveries = handout.held
            if handout.settled or entry in ending:
                continue
            ending[entry] = settlement, handout
            if settlement.verdict is not DONE:
                verdicts.append(self._verdict(settlement, handout))
            elif deliveries == 1 and handout.since > sure_since:
                # Its lease cannot have run out: nobody else can have it, and it has no history to clear.
                certain.append(entry)
            else:
                verdicts.append((entry, deliveries, "done"))
        if certain:
            [reply] = yield [("XACK", self.stream, self.group, *certain)]
            if isinstance(reply, Exception):
                raise reply
        lost = (yield from self._settle(verdicts)) if verdicts else []
        for _, handout in ending.values():
            handout.settled = True
        for entry in lost:
            settlement, _ = ending[entry]
            _log.warning(
                "transaction %s: lease lost before its outcome (%s) was known; another delivery has the say",
                settlement.transaction.id,
                settlement.verdict,
            )

    def _verdict(self, settlement: Settlement, handout: Handout) -> Sequence[Any]:
        held = handout.held
        if settlement.verdict == Verdict.RETURNED:
            self._slack = True  # it is there to be fetched at once, at its old place
            return (*held, "return")
        error = settlement.error
        category = None if error is None else error.category
        text = "" if error is None else str(error).encode("utf-8", "backslashreplace").decode("utf-8")
        line = json.dumps(
            {
                "delivery": handout.deliveries,
                "category": category,
                "error": text,
                "at": datetime.now(UTC).isoformat(),
            }
        )
        decision = self.rules.after_failure(category, handout.deliveries)
        if isinstance(decision, Bury):
            return (*held, "bury", decision.reason, text, line)
        return (*held, "delay", int(decision.delay * 1000), "", line)

    def extend(self, transactions: Sequence[Transaction]) -> Exchange:
        handouts = [(self._handouts.of(transaction), transaction) for transaction in transactions]
        running = {
            handout.held[0]: (handout, transaction)
            for handout, transaction in handouts
            if not handout.settled
        }
        verdicts = [(*handout.held, "extend") for handout, _ in running.values()]
        asked = self._clock()
        lost = (yield from self._settle(verdicts)) if verdicts else []
        for handout, _ in running.values():
            handout.since = asked
        for entry in lost:
            running[entry][0].since = 0.0
            _log.warning("transaction %s: lease lost, too late to extend it", running[entry][1].id)

    def _settle(self, verdicts: Sequence[Sequence[Any]]) -> Exchange:
        packed = msgspec.msgpack.encode(verdicts)
        arguments = (self.group, self.consumer, self._parked, self._lease_ms, packed)
        lost: list[bytes] = yield from self._evaluate(lua.SETTLE, arguments)
        return [entry.decode() for entry in lost]

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────

    def counts(self) -> Exchange:
        if not self._group_known:
            yield from self._make_group()
        groups, over, pending, dead = yield (
            [
                ("XINFO GROUPS", self.stream),
                ("XPENDING", self.stream, self.group, "IDLE", self._lease_ms, "-", "+", COUNTED),
                ("XPENDING", self.stream, self.group, "-", "+", COUNTED),
                ("XLEN", self.dead),
            ]
        )
        for reply in (groups, over, pending, dead):
            if isinstance(reply, Exception):
                raise reply
        last = next(each["last-delivered-id"] for each in groups if _text(each["name"]) == self.group)
        [fresh] = yield [("XRANGE", self.stream, f"({_text(last)}", "+", "COUNT", COUNTED)]
        available = {entry for entry, *_ in over}
        holders = [_text(consumer) for entry, consumer, *_ in pending if entry not in available]
        delayed = holders.count(self._parked)
        return {
            "ready": len(fresh) + len(available),
            "leased": len(holders) - delayed,
            "delayed": delayed,
            "dead": dead,
        }

    def dead_letters(self, limit: int) -> Exchange:
        [reply] = yield [("XRANGE", self.dead, "-", "+", "COUNT", limit)]
        if isinstance(reply, Exception):
            raise reply
        return [_dead_letter(fields) for _, fields in reply]

    def _evaluate(self, script: str, arguments: Sequence[Any]) -> Exchange:
        keys = (3, self.stream, self.history, self.dead)
        [reply] = yield [("EVALSHA", _sha(script), *keys, *arguments)]
        if isinstance(reply, Exception) and "NOSCRIPT" in f"{type(reply).__name__} {reply}".upper():
            [reply] = yield [("EVAL", script, *keys, *arguments)]
        if isinstance(reply, Exception):
            if str(reply).startswith("NOGROUP") or "No such key" in str(reply):
                self._group_known = False
            raise reply
        return reply


def _sha(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


def _as_text_of_bytes(body: bytes) -> msgspec.Raw:
    """Bytes in the only dress that Redis's own MessagePack knows for them: an old-style string of 32-bit length."""
    return msgspec.Raw(b"\xdb" + len(body).to_bytes(4, "big") + body)


def _body(fields: Sequence[Any]) -> Any:
    """The field `body` of a flat list of names and values, where it usually stands; None if it is not there."""
    if len(fields) == 4 and fields[2] == b"body":
        return fields[3]
    return dict(zip(fields[::2], fields[1::2], strict=True)).get(b"body")


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _dead_letter(fields: dict[bytes, bytes]) -> DeadLetter:
    named = {_text(key): value for key, value in fields.items()}
    try:
        transaction = decode(named["body"])
    except DecodeError:
        transaction = None
    category = _text(named["category"])
    return DeadLetter(
        transaction_id=transaction.id if transaction else _text(named["id"]) or None,
        transaction=transaction,
        reason=BurialReason(_text(named["reason"])),
        category=ExceptionCategory(category) if category else None,
        error=_text(named["error"]) or None,
        deliveries=int(named["deliveries"]),
        enqueued_at=_moment(named["enqueued_at"]),
        died_at=_moment(named["died_at"]),
    )


def _moment(milliseconds: bytes) -> datetime:
    return datetime.fromtimestamp(int(milliseconds) / 1000, UTC)
