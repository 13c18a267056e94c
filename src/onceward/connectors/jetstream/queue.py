"""The logic of the connector: what happens in the event loop of NATS, for threads and asyncio alike.

JetStream delivers, counts deliveries and measures leases. What it does not know is in `records`: how deliveries ended,
and which is the newest. A late outcome is fenced there: JetStream itself accepts an acknowledgment of any delivery.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from typing import Any
from uuid import uuid4

from onceward._nats.connection import NatsUnavailable
from onceward.connectors.base import ConnectorClosedError
from onceward.connectors.codec import DecodeError, PayloadError, decode
from onceward.connectors.jetstream import places
from onceward.connectors.jetstream.home import NOT_READ, QueueHome, try_soon
from onceward.connectors.jetstream.ledger import (
    ACK,
    NAK,
    PROGRESS,
    Candidate,
    DeliveryLedger,
    HeldMessage,
    Holding,
    fail,
    finish,
    give_back,
)
from onceward.connectors.jetstream.line import ENDS, HARMLESS, NANOSECONDS, Pull, PulledMessage, QueueLine
from onceward.connectors.jetstream.records import JetStreamRecords, begin_of, encode, shorten
from onceward.connectors.lease_rules import BurialReason, Bury, DeadMessage, LeaseRules, describe_failure
from onceward.connectors.leased_deliveries import LeasedDeliveries, LeasedDelivery, Leasing, decide
from onceward.errors import ConfigurationError
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Settlement, Transaction, Verdict

_log = OwnLogger(logging.getLogger("onceward.connectors.jetstream"))

CERTAIN = 0.9
"""The fraction of a lease in which a delivery is certainly still ours, by our own clock."""
MOST_AT_ONCE = 1000
"""Messages in one batch: JetStream's limit."""
MOMENT = 0.1
"""Seconds that a fetch waits for a first message: JetStream confirms a message a moment before its consumers see it."""
MOST_PULLED = 1 << 20
MOST_HELD = 5000
"""Deliveries that come back at once when their owner is dead; if it has more, those come back by their leases."""
HEADERS_ROOM = 1024
"""Bytes of a message reserved for headers."""

_known: dict[tuple[str, str, str], str] = {}
"""When consumers were created, by server, stream and name. The process remembers it, not the connector: after an outage
there is a new connector, and a NATS that came back without its data must not look like a first start."""


class JetStreamQueue(Leasing):
    """One stream and one consumer. Its coroutines run in the event loop of NATS."""

    def __init__(
        self,
        url: str,
        stream: str,
        consumer: str,
        subject: str | None,
        rules: LeaseRules,
        options: dict[str, Any],
        clock: Callable[[], float],
    ) -> None:
        self.rules = rules
        self.stream = stream
        self.consumer = consumer
        self.owner: str | None = None
        self._name = uuid4().hex
        """Distinguishes it from other connectors of its owner."""
        self._url = url
        self._subject = subject
        self._options = options
        self._clock = clock
        self._records = JetStreamRecords(stream, consumer)
        self._deliveries = LeasedDeliveries()
        self._held: dict[int, Holding] = {}
        """Deliveries that were not settled, by the sequence of their message, if there is an owner."""
        self._caution = MOST_PULLED
        """How many messages to ask for at most: few while there are suspects, because others must be given back."""
        self._newest = 0
        """The highest sequence that was delivered here."""
        self._size = 1
        """What the last fetch asked for."""
        self._ready: list[Transaction] = []
        """What a wait has taken for the next fetch."""
        self._closed = False
        self._home: QueueHome | None = None

    # ── fetching ────────────────────────────────────────────────────────────────────────────────────────

    async def fetch(self, size: int, pull: Pull) -> Sequence[Transaction]:
        self._size = size
        if not all(self._is_certain(self._deliveries.of(each)) for each in self._ready):
            await self.return_ready()  # nothing has extended their leases since the wait
        if self._ready:
            taken, self._ready = self._ready[:size], self._ready[size:]
            return taken
        return await self._fetch(size, MOMENT, pull)

    async def wait_for_messages(self, seconds: float, pull: Pull) -> bool:
        """JetStream has no way to wait for a message without taking it: keep what comes for the next fetch, which
        follows at once."""
        if not self._ready:
            self._ready = await self._fetch(self._size, min(seconds, self.rules.lease / 10), pull)
        if pull.is_ended:
            await self.return_ready()
        return bool(self._ready)

    async def return_ready(self) -> None:
        """Give back what no fetch has asked for."""
        ready, self._ready = self._ready, []
        await self.settle([Settlement(each, Verdict.RETURNED) for each in ready])

    async def _fetch(self, size: int, wait: float, pull: Pull) -> list[Transaction]:
        home = await self._open(consumes=True)
        while True:
            asked = self._clock()
            count = min(size, self._caution) if self.rules.suspect_after else 1
            found = await home.link.pull(self.stream, self.consumer, count, wait, pull)
            if not found:
                self._check_status(home, pull)
                return []
            served = await self._serve(home, found, asked)
            if served or pull.is_ended:
                return served

    def _check_status(self, home: QueueHome, pull: Pull) -> None:
        if not pull.status or (
            pull.status in ENDS and (pull.status != "409" or pull.description in HARMLESS)
        ):
            return
        if pull.status == "503" or "Deleted" in pull.description:
            home.consumes = False  # the next call finds out what has become of it
            raise NatsUnavailable(
                f"nobody answers for the consumer {self.consumer} of stream {self.stream}: it was deleted, or NATS is "
                "starting; try again"
            )
        raise NatsUnavailable(
            f"JetStream refuses to deliver from {self.stream}: {pull.description or pull.status}; try again"
        )

    async def _serve(
        self, home: QueueHome, found: Sequence[PulledMessage], asked: float
    ) -> list[Transaction]:
        """Return what is to be processed. Bury what cannot be, and give back what must wait for a suspect's end."""
        looks = [home.ledger.look_up(each, is_new=self._is_new(each)) for each in found]
        candidates = await asyncio.gather(*looks)
        serving: list[Candidate] = []
        later: list[Candidate] = []
        alone = False
        for each in candidates:
            if each.state.done:
                await home.link.tell([(each.at.reply, ACK)])
            elif each.state.reason:
                await home.ledger.finish_burial(each.at, each.state, each.before)
            elif alone:
                later.append(each)
            elif await self._is_dead(home, each):
                continue
            elif each.lost >= self.rules.suspect_after and serving:
                later.append(each)
                alone = True
            else:
                serving.append(each)
                alone = bool(self.rules.suspect_after) and each.lost >= self.rules.suspect_after
        self._caution = 1 if later else min(self._caution * 2, MOST_PULLED)
        if later:
            await asyncio.gather(*(home.ledger.record(each.held, give_back) for each in later))
            await home.link.tell([(each.at.reply, NAK) for each in later])
        marked = await asyncio.gather(*(home.ledger.mark(each) for each in serving))
        transactions = []
        for each, held in zip(serving, marked, strict=True):
            if held is not None and each.transaction is not None:
                held.generation = home.link.generation
                self._deliveries.record(
                    each.transaction, (held, held.number), each.before + 1, asked, each.lost
                )
                transactions.append(each.transaction)
                if self.owner is not None:
                    self._held[each.at.seq] = each.at.reply, each.at.seq, held.number
        if self.owner is not None and transactions:
            while len(self._held) > MOST_HELD:
                del self._held[next(iter(self._held))]
            await home.ledger.hold(self.owner, self._name, list(self._held.values()))
        return transactions

    def _is_new(self, message: PulledMessage) -> bool:
        """Whether nothing can be known of it: first deliveries come in order, unless JetStream has forgotten them."""
        is_new = message.number == 1 and message.seq > self._newest
        self._newest = max(self._newest, message.seq)
        return is_new

    async def release_owner(self, owner: str) -> int:
        home = await self._open(consumes=True)
        return await home.ledger.release(owner)

    async def _is_dead(self, home: QueueHome, each: Candidate) -> bool:
        """Decode it, and bury it if it cannot be, or was delivered too often."""
        try:
            each.transaction = decode(each.at.body)
        except DecodeError as error:
            text = str(error)
            _log.error("message %d of %s is now a dead letter: %s", each.at.seq, self.stream, text)
            await home.ledger.bury(each.held, each.before + 1, BurialReason.UNDECODABLE, text)
            return True
        if not self.rules.is_exhausted(each.before, each.lost):
            return False
        _log.warning(
            "transaction %s is now a dead letter: it reached max_deliveries, and its last delivery was never settled",
            each.transaction.id,
        )
        await home.ledger.bury(each.held, each.before, BurialReason.MAX_DELIVERIES, "")
        return True

    # ── dispatching ─────────────────────────────────────────────────────────────────────────────────────

    async def dispatch(self, bodies: Sequence[bytes]) -> None:
        home = await self._open(consumes=False)
        largest = max(map(len, bodies), default=0)
        if largest + HEADERS_ROOM > home.link.largest_message:
            raise PayloadError(
                f"a transaction of {largest:,} bytes cannot be sent: this NATS takes {home.link.largest_message:,}; "
                "raise max_payload in its configuration, or send a reference instead of the data"
            )
        if len(bodies) > MOST_AT_ONCE:
            raise PayloadError(
                f"{len(bodies):,} transactions cannot be sent at once: JetStream takes {MOST_AT_ONCE:,} all or none; "
                "send fewer at a time"
            )
        if len(bodies) > 1 and not home.settings.allow_atomic:
            raise ConfigurationError(
                f"stream {self.stream} takes no atomic batches, so {len(bodies)} transactions cannot be sent all or "
                "none; set allow_atomic in its configuration, or send one at a time"
            )
        subject = await home.publishes_to(self.stream, self._subject)
        if len(bodies) == 1:
            await home.link.publish(subject, bodies[0])
        elif bodies:
            async with home.sending:  # JetStream takes only a few batches at a time
                await home.link.put_all([(subject, body, {}) for body in bodies], {})

    # ── settling ────────────────────────────────────────────────────────────────────────────────────────

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        ending: dict[int, tuple[Settlement, LeasedDelivery]] = {}
        for settlement in settlements:
            delivery = self._deliveries.of(settlement.transaction)
            if not delivery.settled:
                ending.setdefault(delivery.identity, (settlement, delivery))
        if not ending:
            return
        home = await self._open(consumes=False)
        forgotten = await self._find_forgotten(home, [delivery for _, delivery in ending.values()])
        done: list[tuple[Settlement, LeasedDelivery]] = []
        others: list[tuple[Settlement, LeasedDelivery]] = []
        for each in ending.values():
            is_plain = each[0].verdict is Verdict.DONE and self._is_certain(each[1])
            (done if is_plain and each[1].identity not in forgotten else others).append(each)
        if done:
            await self._acknowledge(home, [delivery for _, delivery in done])
        answers = await asyncio.gather(
            *(self._end(home, *each, is_known=each[1].identity not in forgotten) for each in others)
        )
        if any(answers):
            await home.link.tell([each for each in answers if each is not None])
        for _, delivery in others:
            delivery.settled = True
        for _, delivery in ending.values():
            held: HeldMessage = delivery.held[0]
            if self._held.get(held.at.seq) == (held.at.reply, held.at.seq, held.number):
                del self._held[held.at.seq]

    async def _find_forgotten(self, home: QueueHome, deliveries: Sequence[LeasedDelivery]) -> set[int]:
        """Find deliveries that JetStream does not know of, because its server was killed before it wrote them down.

        It does not answer for them, and delivers the messages again. If a connector here gets them, it finds their
        outcome.
        """
        if all(each.held[0].generation == home.link.generation for each in deliveries):
            return set()
        found = await places.find_consumer(home.link, self.stream, self.consumer)
        last = 0 if found is None else found.delivered.stream_seq
        return {each.identity for each in deliveries if each.held[0].at.seq > last}

    async def _acknowledge(self, home: QueueHome, deliveries: Sequence[LeasedDelivery]) -> None:
        """Acknowledge deliveries whose leases cannot have expired, so no other consumer can own their messages."""
        held: list[HeldMessage] = [each.held[0] for each in deliveries]
        await home.link.tell([(each.at.reply, ACK) for each in held])
        for delivery in deliveries:
            delivery.settled = True
        home.tidy_after(sum(each.revision > 0 for each in held))

    async def _end(
        self, home: QueueHome, settlement: Settlement, delivery: LeasedDelivery, *, is_known: bool
    ) -> tuple[str, bytes] | None:
        """Record the outcome, if this is still the newest delivery. Return what to tell JetStream then, and where."""
        held: HeldMessage = delivery.held[0]
        verdict, name, answer = settlement.verdict, settlement.transaction.id, b""
        certain = self._is_certain(delivery)
        record = partial(home.ledger.record, held, is_certain=certain)
        if verdict is Verdict.DONE:
            is_ours, answer = await record(finish), ACK
        elif verdict is Verdict.RETURNED:
            is_ours, answer = await record(give_back), _nak(settlement.delay)
        else:
            _, text, line = describe_failure(settlement.error, delivery.deliveries, time.time())
            line = shorten(line)
            decision = decide(self.rules, settlement, delivery)
            if isinstance(decision, Bury):
                bury, reason = home.ledger.bury, decision.reason
                is_ours = await bury(
                    held, delivery.deliveries, reason, text or "", line, is_certain=certain, is_known=is_known
                )
            else:
                is_ours = await record(lambda state: fail(state, line))
                answer = _nak(decision.delay)
            if is_ours:
                _log.info("transaction %s: %s", name, delivery.next)
        if not is_ours:
            _log.warning(
                "transaction %s: lease expired before outcome `%s` was recorded; a newer delivery owns the message",
                name,
                verdict,
            )
        elif answer and is_known and (verdict is Verdict.DONE or self._is_certain(delivery)):
            return held.at.reply, answer
        # If its lease may be over, JetStream delivers it now: an answer could end the lease of that delivery.
        return None

    async def extend(self, transactions: Sequence[Transaction]) -> None:
        running: dict[int, tuple[LeasedDelivery, Transaction]] = {}
        for transaction in transactions:
            delivery = self._deliveries.of(transaction)
            if not delivery.settled:
                running[delivery.identity] = delivery, transaction
        if not running:
            return
        home = await self._open(consumes=False)
        asked = self._clock()
        certain = {each: self._is_certain(delivery) for each, (delivery, _) in running.items()}
        for each, (delivery, transaction) in list(running.items()):
            if not certain[each]:
                state, _ = await home.ledger.read(delivery.held[0].at.seq)
                if state.number > delivery.held[1]:
                    del running[each]
                    if not delivery.settled:
                        _log.warning("transaction %s: lease expired, too late to extend it", transaction.id)
        if running:
            await home.link.tell([(delivery.held[0].at.reply, PROGRESS) for delivery, _ in running.values()])
        for each, (delivery, _) in running.items():
            if certain[each]:
                delivery.since = asked

    def _is_certain(self, delivery: LeasedDelivery) -> bool:
        return delivery.since > self._clock() - self.rules.lease * CERTAIN

    # ── inspecting ──────────────────────────────────────────────────────────────────────────────────────

    async def counts(self) -> dict[str, int]:
        home = await self._open(consumes=True)
        found = await places.find_consumer(home.link, self.stream, self.consumer)
        if found is None:
            raise NatsUnavailable(
                f"the consumer {self.consumer} of stream {self.stream} was deleted; try again"
            )
        dead = await home.link.subjects(self._records.stream, self._records.letter(">"))
        return {"ready": found.num_pending, "leased": found.num_ack_pending, "dead": len(dead)}

    async def dead_letters(self, limit: int) -> list[DeadMessage]:
        home = await self._open(consumes=True)
        return await home.ledger.letters.first(limit)

    async def forget_dead(self, keys: Sequence[str]) -> None:
        home = await self._open(consumes=True)
        await home.ledger.letters.forget(keys)

    async def acknowledge_dead(self, keys: Sequence[str]) -> None:
        home = await self._open(consumes=True)
        await home.ledger.letters.acknowledge(keys)

    # ── the connection ──────────────────────────────────────────────────────────────────────────────────

    async def _open(self, *, consumes: bool) -> QueueHome:
        """Connect, unless this process has; with `consumes`, find or create the consumer, too."""
        self.check_open()
        if self._home is None or self._home.pid != os.getpid():  # a connection does not survive a fork
            self._home = QueueHome()
        home = self._home
        async with home.opening:
            if not home.is_connected:
                # Its tasks outlive this call, and must not keep what its context refers to.
                connecting = QueueLine.connect(self._url, **self._options)
                home.link = await asyncio.create_task(connecting, context=Context())
                home.ledger = DeliveryLedger(home.link, self._records)
                home.is_connected = True
            home.follow()
            if home.settings is NOT_READ or (consumes and not home.consumes):
                home.settings = await places.open_stream(home.link, self.stream, self._subject)
            if consumes and not home.consumes:
                await self._open_consumer(home)
        if self._closed:
            await self.close()
            self.check_open()
        return home

    async def _open_consumer(self, home: QueueHome) -> None:
        found = await places.open_consumer(home.link, self.stream, self.consumer, self.rules.lease)
        known, begun = (self._url, self.stream, self.consumer), begin_of(found.created)
        if _known.get(known, begun) != begun:
            _log.warning(
                "the consumer %s of stream %s has disappeared: NATS restarted without its data, or it was deleted. "
                "Created again. If the stream is the same, every message of it is delivered again",
                self.consumer,
                self.stream,
            )
        is_new = known not in _known or _known[known] != begun
        _known[known] = self._records.begun = begun
        await places.open_records(home.link, self._records, home.settings.num_replicas, is_new)
        home.consumes = True
        home.tidy()

    def check_open(self) -> None:
        if self._closed:
            raise ConnectorClosedError(
                f"the connector to {self.stream} is closed; create a new one to continue"
            )

    async def close(self) -> None:
        if self._ready:
            await try_soon(self.return_ready())
        self._closed = True
        home, self._home = self._home, None
        if home is not None and home.pid == os.getpid():
            if home.tidying is not None:
                home.tidying.cancel()
                await asyncio.wait({home.tidying})
            if home.is_connected:
                if self.owner is not None and not self._held:
                    await try_soon(home.ledger.forget_holdings(self.owner, self._name))
                await home.link.close()


def _nak(delay: float) -> bytes:
    return NAK if delay <= 0 else NAK + b" " + encode({"delay": int(delay * NANOSECONDS)})
