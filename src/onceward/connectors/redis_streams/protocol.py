"""The logic of the connector, shared by threads and asyncio: generators that yield commands and receive replies.

An entry has the fields `id` (the transaction's, for people) and `body` (see `connectors.codec`). Next to the stream
are a hash with the failures of entries in flight, and a stream of dead letters.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import cache
from math import inf
from typing import Any

import msgspec

from onceward._redis.connections import RedisCommand
from onceward.connectors.codec import DecodeError, current_trace_context, decode, encode_with
from onceward.connectors.lease_rules import (
    BurialReason,
    Bury,
    LeaseRules,
    describe_failure,
)
from onceward.connectors.leased_deliveries import LeasedDeliveries, LeasedDelivery, Leasing, decide
from onceward.connectors.redis_streams import scripts
from onceward.connectors.redis_streams.entries import as_str, body_of, dead_message, to_dict
from onceward.connectors.redis_streams.first_deliveries import CERTAIN, DONE, FirstDeliveries
from onceward.connectors.redis_streams.line_scripts import NEXT_TURN, in_lines
from onceward.connectors.redis_streams.lines import WAITING, StreamLines
from onceward.errors import ConfigurationError
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Settlement, Transaction, Verdict

_log = OwnLogger(logging.getLogger("onceward.connectors.redis_streams.core"))

RECOVER_INTERVAL = 1.0
"""Seconds between searches for entries of dead consumers while new ones keep coming."""
BUSY_SHARE = 4
"""While new entries keep coming, at most one in this many of a batch is a recovered one."""
EXAMINED = 1_000
"""Pending entries that `next_due` looks at."""
COUNTED = 10_000
"""Beyond this many, `counts` stops counting."""

Entry = tuple[str, bytes]
Row = tuple[Any, int, Any, int]
"""A delivery: the entry's id, its number, the fields, and how many before it were never settled."""

_known: set[tuple[str, str, str]] = set()
"""Groups that existed, by server, stream and group. The process remembers them, not the connector: after an outage
there is a new connector, and a Redis that came back without its data must not look like a first start."""


Exchange = Generator[Sequence[RedisCommand], list[Any], Any]
"""Yields commands to send together, and receives a list of their replies, in which an error stands for its command."""


class StreamQueue(StreamLines, FirstDeliveries, Leasing):
    """One stream, one group, one consumer: all behavior except sending."""

    def __init__(
        self,
        server: str,
        stream: str,
        group: str,
        rules: LeaseRules,
        maxlen: int | None,
        clock: Callable[[], float],
    ) -> None:
        """`server` only distinguishes this Redis from others; nothing connects to it."""
        for name, value in (("stream", stream), ("group", group)):
            if not isinstance(value, str) or not value:
                raise ConfigurationError(f"{name} must be a non-empty string, not {value!r}")
        if maxlen is not None and maxlen < 1:
            raise ConfigurationError(f"maxlen must be 1 or more, or None, not {maxlen!r}")
        self.rules = rules
        self.server = server
        self.stream = stream
        self.group = group
        self.consumer = ""
        """Its name in the group; unique, and beginning with its owner's."""
        self.owner = f"{socket.gethostname()}-{os.getpid()}"
        self.history = _beside(stream, f"{group}:history")
        self.dead = _beside(stream, f"{group}:dead")
        self.moved = _beside(stream, f"{group}:moved")
        self.tally = _beside(stream, "tally")
        self._keys = (5, stream, self.history, self.dead, self.tally, self.moved)
        self._maxlen = maxlen
        self._deliveries = LeasedDeliveries()
        self._settling: set[bytes] = set()
        """Entries whose outcome is being recorded, perhaps while a thread extends leases."""
        self._lease_ms = max(int(rules.lease * 1000), 1)
        self._group_known = False
        self._slack = True
        """The last fetch was not full: there is time to recover entries of dead consumers."""
        self._recover_at = 0.0
        self._clock = clock
        self._line_keys = tuple(
            _beside(stream, f"{group}:{name}") for name in ("lines", "places", "holders", "next")
        )

    @property
    def owner(self) -> str:
        return self._owner

    @owner.setter
    def owner(self, name: str) -> None:
        self._owner = name
        self.consumer = f"{name}-{uuid.uuid4().hex[:12]}"

    def release_owner(self, owner: str) -> Exchange:
        """Make all entries of an owner's consumers available now, as if their leases had expired. Return how many."""
        released = yield from self._evaluate(scripts.RELEASE, (self.group, owner))
        return released or 0

    # ── fetching ────────────────────────────────────────────────────────────────────────────────────────

    def fetch(self, batch_size: int) -> Exchange:
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, not {batch_size}")
        if not self._group_known:
            yield from self._make_group()
        while True:
            asked = self._clock()
            take = self._take_in_lines if self.in_lines else self._take
            rows, fresh = yield from take(batch_size if self.rules.suspect_after else 1)
            if fresh and not rows and (first := self._deliver_new(fresh, asked)) is not None:
                return first
            rows += [(entry, 1, fields, 0) for entry, fields in fresh]
            transactions = self._deliver_decoded(rows, asked) or (yield from self._deliver(rows, asked))
            if transactions or not rows:
                return transactions

    def _take(self, count: int) -> Exchange:
        """Take entries of dead consumers first, if there is time for them, then new ones. Returns both."""
        rows: list[Row] = []
        fresh: Sequence[Any] = ()
        alone = False
        recover = self._slack or time.monotonic() >= self._recover_at
        if recover:
            rows, alone = yield from self._recover(count if self._slack else max(count // BUSY_SHARE, 1))
        room = count - len(rows)
        if room and not alone:
            fresh = yield from self._read(room)
            self._slack = len(fresh) < room
        if not rows and not fresh and not recover:
            rows, _ = yield from self._recover(count)
        return rows, fresh

    def next_due(self) -> Exchange:
        """Return the last entry that was delivered, and the seconds until a lease or delay is over (or `inf`)."""
        script = NEXT_TURN if self.in_lines else scripts.NEXT_DUE
        reply = yield from self._evaluate(script, (self.group, self._lease_ms, EXAMINED))
        after, due = reply or ("", 0)
        return as_str(after), inf if due < 0 else due / 1000

    def note_arrival(self) -> None:
        """Let the next fetch read new entries before it looks for others."""
        self._slack = False
        self._recover_at = time.monotonic() + RECOVER_INTERVAL

    def _make_group(self) -> Exchange:
        is_new = yield from self._run_script(scripts.MAKE_GROUP, (self.group,))
        if isinstance(is_new, Exception):
            raise is_new
        group = (self.server, self.stream, self.group)
        if is_new and group in _known:
            _log.warning(
                "stream %s with group %s has disappeared: Redis restarted without its data (to keep it, set "
                "appendonly yes), or the stream or group was deleted. Created again. Messages that waited in the "
                "stream are lost; if only the group was deleted, every entry of the stream is delivered again",
                self.stream,
                self.group,
            )
        _known.add(group)
        self._group_known = True

    def _make_group_again(self, error: Exception) -> Exchange:
        """Create the group if the error says that it is missing; raise any other error."""
        if "NOGROUP" not in str(error):
            raise error
        yield from self._make_group()

    def _recover(self, count: int) -> Exchange:
        reply = yield from self._evaluate(scripts.CLAIM, self._terms(count))
        served, buried, alone = reply or ((), (), 0)
        self._look_again_later()
        self._tell_buried(buried)
        return [tuple(row) for row in served], bool(alone)

    def _terms(self, count: int) -> tuple[Any, ...]:
        """The arguments of `scripts.SERVE`."""
        return (
            self.group, self.consumer, self._lease_ms, count, self.rules.suspect_after, self.rules.max_deliveries,
            self.rules.most_lost, int(self.rules.counts_lost),
        )  # fmt: skip

    def _look_again_later(self) -> None:
        self._recover_at = time.monotonic() + min(RECOVER_INTERVAL, self.rules.lease / 4)

    def _tell_buried(self, buried: Sequence[Any]) -> None:
        for entry, reason, name in buried:
            _log.error(
                "entry %s (transaction %s) is now a dead letter: %s",
                as_str(entry),
                as_str(name),
                as_str(reason),
            )

    def _read(self, count: int) -> Exchange:
        whose = ("GROUP", self.group, self.consumer)
        command = ("XREADGROUP", *whose, "COUNT", count, "STREAMS", self.stream, ">")
        [reply] = yield [command]
        if isinstance(reply, Exception):
            yield from self._make_group_again(reply)
            [reply] = yield [command]
            if isinstance(reply, Exception):
                raise reply
        return reply[0][1] if reply else []

    def _deliver(self, rows: list[Row], asked: float) -> Exchange:
        transactions: list[Transaction] = []
        bad: list[Any] = []
        record = self._deliveries.record
        for entry, deliveries, fields, lost in rows:
            body = None
            try:
                if isinstance(fields, Transaction):  # its key was needed before
                    transaction = fields
                else:
                    body = body_of(fields or ())
                    transaction = decode(body or b"")
            except DecodeError as error:
                text = "it has no field `body`" if body is None else str(error)
                _log.error("entry %s is now a dead letter: %s", as_str(entry), text)
                bad.append((as_str(entry), deliveries, "bury", BurialReason.UNDECODABLE, text, ""))
                continue
            record(transaction, (entry, deliveries), deliveries, asked, lost)
            transactions.append(transaction)
        if bad:
            yield from self._settle(bad)
        return transactions

    # ── dispatching ─────────────────────────────────────────────────────────────────────────────────────

    def entries(self, transactions: Sequence[Transaction]) -> list[Entry]:
        """Encode these as entries."""
        trace_context = current_trace_context()
        return [(transaction.id, encode_with(trace_context, transaction)) for transaction in transactions]

    def append(self, entries: Sequence[Entry]) -> Exchange:
        """Append them, all or none, in one round trip."""
        limit = "" if self._maxlen is None else self._maxlen
        if len(entries) == 1:
            yield from self._evaluate(scripts.ADD, (limit, *entries[0]))
            return
        packed = msgspec.msgpack.encode([(name, _as_text_of_bytes(body)) for name, body in entries])
        yield from self._evaluate(scripts.ADD, (limit, packed))

    # ── settling ────────────────────────────────────────────────────────────────────────────────────────

    def settle(self, settlements: Sequence[Settlement]) -> Exchange:
        done = self._surely_done(settlements, self._clock())
        if done is None:
            yield from self._settle_each(settlements)
            return
        self._settling.update(done)
        try:
            if done:
                yield from self._acknowledge(done)
            for delivery in done.values():
                delivery.settled = True
        finally:
            self._settling.difference_update(done)

    def _acknowledge(self, entries: Iterable[bytes]) -> Exchange:
        reply = yield from self._run_script(scripts.ACKNOWLEDGE, (self.group, *entries))
        if isinstance(reply, Exception):
            raise reply

    def _settle_each(self, settlements: Sequence[Settlement]) -> Exchange:
        ending: dict[bytes, tuple[Settlement, LeasedDelivery]] = {}
        verdicts: list[Sequence[Any]] = []
        certain: list[bytes] = []
        sure_since = self._clock() - self.rules.lease * CERTAIN
        delivery_of = self._deliveries.of
        for settlement in settlements:
            delivery = delivery_of(settlement.transaction)
            entry, deliveries = delivery.held
            if delivery.settled or entry in ending:
                continue
            ending[entry] = settlement, delivery
            if settlement.verdict is not DONE:
                verdicts.append(self._verdict(settlement, delivery))
            elif deliveries == 1 and delivery.since > sure_since:
                # Its lease cannot have expired: no other consumer can own it, and it has no history to clear.
                certain.append(entry)
            else:
                verdicts.append((as_str(entry), deliveries, "done"))
        self._settling.update(ending)
        try:
            if certain:
                yield from self._acknowledge(certain)
            lost, trimmed = (yield from self._settle(verdicts)) if verdicts else ((), ())
            for _, delivery in ending.values():
                delivery.settled = True
        finally:
            self._settling.difference_update(ending)
        for entry in lost:
            settlement, _ = ending[entry]
            _log.warning(
                "transaction %s: lease expired before outcome `%s` was recorded; a newer delivery owns the message",
                settlement.transaction.id,
                settlement.verdict,
            )
        for entry, (settlement, delivery) in ending.items():
            if settlement.verdict is Verdict.FAILED and entry not in lost and entry not in trimmed:
                _log.info("transaction %s: %s", settlement.transaction.id, delivery.next)

    def _verdict(self, settlement: Settlement, delivery: LeasedDelivery) -> Sequence[Any]:
        held = as_str(delivery.held[0]), delivery.deliveries
        if settlement.verdict == Verdict.RETURNED:
            self._slack = True  # it can be fetched at once, at its old place
            return (*held, "return", int(settlement.delay * 1000))
        _, text, line = describe_failure(settlement.error, delivery.deliveries, time.time())
        line = line.rstrip()
        decision = decide(self.rules, settlement, delivery)
        if isinstance(decision, Bury):
            return (*held, "bury", decision.reason, text or "", line)
        return (*held, "delay", int(decision.delay * 1000), "", line)

    def hasten(self, transactions: Sequence[Transaction]) -> Exchange:
        """Make entries available now that were given back for later."""
        found = [each for each in map(self._deliveries.get, map(id, transactions)) if each and each.settled]
        self._slack = True
        entries = [each.held[0] for each in found]
        yield from self._evaluate(scripts.HASTEN, (self.group, *entries))

    def extend(self, transactions: Sequence[Transaction]) -> Exchange:
        found = [(self._deliveries.of(transaction), transaction) for transaction in transactions]
        running = {
            delivery.held[0]: (delivery, transaction)
            for delivery, transaction in found
            if not delivery.settled
        }
        verdicts = [
            (as_str(entry), delivery.deliveries, "extend") for entry, (delivery, _) in running.items()
        ]
        asked = self._clock()
        lost, _ = (yield from self._settle(verdicts)) if verdicts else ((), ())
        for delivery, _ in running.values():
            delivery.since = asked
        for entry in lost:
            running[entry][0].since = 0.0
            if entry in self._settling or running[entry][0].settled:
                continue  # it is no longer ours because its outcome was recorded meanwhile
            _log.warning("transaction %s: lease expired, too late to extend it", running[entry][1].id)

    def _settle(self, verdicts: Sequence[Sequence[Any]]) -> Exchange:
        """Return the entries that were no longer held, and those that are dead letters because they were trimmed."""
        packed = msgspec.msgpack.encode(verdicts)
        reply = yield from self._evaluate(scripts.SETTLE, (self.group, self.consumer, packed))
        lost, buried = reply or ([entry.encode() for entry, *_ in verdicts], ())
        self._tell_buried(buried)
        return lost, [entry for entry, *_ in buried]

    # ── inspecting ──────────────────────────────────────────────────────────────────────────────────────

    def counts(self) -> Exchange:
        yield from self._make_group()  # it may have been deleted
        groups, pending, dead = yield (
            [
                ("XINFO", "GROUPS", self.stream),
                ("XPENDING", self.stream, self.group, "-", "+", COUNTED),
                ("XLEN", self.dead),
            ]
        )
        for reply in (groups, pending, dead):
            if isinstance(reply, Exception):
                raise reply
        ours = next(group for group in map(to_dict, groups) if as_str(group["name"]) == self.group)
        after = f"({as_str(ours['last-delivered-id'])}"
        [fresh] = yield [("XRANGE", self.stream, after, "+", "COUNT", COUNTED)]
        holders = [as_str(consumer) for _, consumer, idle, _ in pending if not self._is_free(consumer, idle)]
        delayed = holders.count(scripts.DELAYED) + holders.count(WAITING)
        return {
            "ready": len(fresh) + len(pending) - len(holders),
            "leased": len(holders) - delayed,
            "delayed": delayed,
            "dead": dead,
        }

    def _is_free(self, consumer: bytes, idle: int) -> bool:
        name = as_str(consumer)
        return name != WAITING and idle >= (scripts.AGES if name == scripts.DELAYED else self._lease_ms)

    def dead_letters(self, limit: int) -> Exchange:
        [reply] = yield [("XRANGE", self.dead, "-", "+", "COUNT", limit)]
        if isinstance(reply, Exception):
            raise reply
        return [dead_message(entry, to_dict(fields)) for entry, fields in reply]

    def forget_dead(self, keys: Sequence[str]) -> Exchange:
        yield from self._remove_dead(keys, is_moved=1)

    def acknowledge_dead(self, keys: Sequence[str]) -> Exchange:
        """Its entry was acknowledged when it died, so nothing else is left of it."""
        yield from self._remove_dead(keys, is_moved=0)

    def _remove_dead(self, keys: Sequence[str], is_moved: int) -> Exchange:
        if keys:
            reply = yield from self._run_script(scripts.FORGET_DEAD, (self.group, is_moved, *keys))
            if isinstance(reply, Exception):
                raise reply

    def _evaluate(self, script: str, arguments: Sequence[Any]) -> Exchange:
        """Return the script's reply, or None if it could not run because the stream or group had been deleted."""
        reply = yield from self._run_script(script, arguments)
        if isinstance(reply, Exception):
            yield from self._make_group_again(reply)
            return None
        return reply

    def _run_script(self, script: str, arguments: Sequence[Any]) -> Exchange:
        """Return the script's reply, or its error."""
        keys: tuple[Any, ...] = self._keys
        if self.in_lines and script != scripts.ADD:
            script = in_lines(script, self._hold_dead)
            keys = (keys[0] + len(self._line_keys), *keys[1:], *self._line_keys)
        [reply] = yield [("EVALSHA", _sha(script), *keys, *arguments)]
        if isinstance(reply, Exception) and "NOSCRIPT" in f"{type(reply).__name__} {reply}".upper():
            [reply] = yield [("EVAL", script, *keys, *arguments)]
        return reply


def _beside(stream: str, name: str) -> str:
    """Name a key that a cluster keeps in the slot of the stream: by the part in braces, or all of the name."""
    begin = stream.find("{")
    has_tag = begin >= 0 and stream.find("}", begin) > begin + 1
    return f"{stream}:{name}" if has_tag else f"{{{stream}}}:{name}"


@cache
def _sha(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


def _as_text_of_bytes(body: bytes) -> msgspec.Raw:
    """Encode bytes the only way that Redis's own MessagePack can read them: as an old-style string of 32-bit length."""
    return msgspec.Raw(b"\xdb" + len(body).to_bytes(4, "big") + body)
