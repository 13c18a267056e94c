"""The relay: a source whose deliveries are batches of messages, and whose handler sends them.

    committed ──claim──► in flight ──dispatch──► at the sink ──► published
                             │                        │ a crash in between: sent again, with the same id
                             └─ lease expires ─► claimed again

A delivery to the engine is a claim: messages of one target, which go to its sink in one call. At most one claim of each
target is in flight in a process, so a sink that hangs holds up only its own messages. A message that its sink refuses
waits longer after every failure, then becomes a dead letter; if the sink cannot be reached, all its messages wait, and
no failure is counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple, Protocol

import msgspec
from sqlalchemy import Engine

from onceward._process.readiness import Doorbell
from onceward._time import wall
from onceward.backoff import Backoff
from onceward.connectors.base import Closing, ConnectorClosedError
from onceward.connectors.codec import DecodeError, PayloadError, decode, encode_with
from onceward.connectors.lease_rules import BurialReason, DeadMessage, describe_failure, read_dead_message
from onceward.connectors.urls import Address
from onceward.db import LockTimeoutError
from onceward.errors import ConfigurationError
from onceward.outbox.claims import Ending, OutboxClaim, OutboxRows, Row, SendFailure
from onceward.outbox.news import news_of
from onceward.outbox.outages import Away, SinkOutages
from onceward.outbox.sinks import Sinks, is_outage
from onceward.outbox.targets import shown
from onceward.task.exceptions import ExceptionCategory, Postponed, TransactionException, failure_category
from onceward.task.lifecycle import text_of
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Settlement, Transaction, Verdict

_log = OwnLogger(logging.getLogger("onceward.outbox"))

LEASE = 30.0
LONGEST_WAIT, LONGEST_DEAF_WAIT = 5.0, 1.0
"""Seconds until it looks by itself: if every commit wakes it, and if not."""
SHORTEST_WAIT = 0.005
PURGE_EVERY = 60.0
PURGED = 1000
SWEEP_EVERY = 30.0
TARGET, KEY = "onceward_target", "onceward_key"
"""Metadata of a dead letter: where it was to go. It is removed when the letter is redriven."""
KILLER = "its relays died while it was in flight"


class RelayRules(NamedTuple):
    """When a message is tried again, and when it is given up."""

    backoff: Backoff = Backoff(1.0, cap=300.0, jitter=0.5)
    most_failures: int = 20
    """With the backoff, more than an hour."""
    most_lost: int = 20
    """A message whose relays died so often is not there by chance: it must kill them."""


DEFAULT_RULES = RelayRules()


class MessageCounts(NamedTuple):
    """How many messages of a delivery ended in each way, for the counts of a run."""

    done: int
    failed: int
    returned: int


class DueMessages(Protocol):
    """Writes the messages of schedules into the outbox."""

    @property
    def is_making(self) -> bool:
        """Whether messages are made that are not written yet."""

    @property
    def is_calling(self) -> bool:
        """Whether code that makes them is running."""

    def publish(self, *, draining: bool) -> float:
        """Write those that are due. Return the seconds until the next ones are. With `draining`, there are no more
        than those that were due at the first call."""


class Relay(Closing):
    """The source of the relay, and its handler: `publish`."""

    def __init__(
        self,
        engine: Engine,
        address_of: Callable[[str], Address],
        *,
        lease: float = LEASE,
        retention: float = 86400.0,
        rules: RelayRules = DEFAULT_RULES,
        timetable: DueMessages | None = None,
        door: Doorbell | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.lease = lease
        self.owner: str | None = None
        self.draining = False
        """Whether its run ends when nothing waits."""
        self._rows = OutboxRows(engine)
        self._sinks = Sinks(address_of)
        self._news = news_of(engine)
        self._door = Doorbell() if door is None else door
        """Rung when a claim has ended: there may be more for its target."""
        self._look_at = 0.0
        self._retention = retention
        self._rules = rules
        self._timetable = timetable
        self._on_close = on_close
        self._lock = threading.Lock()
        self._claims: dict[str, OutboxClaim] = {}
        """In flight, by the id of their delivery."""
        self._endings: dict[str, Ending] = {}
        """Of claims that are sent but not recorded yet."""
        self._recording: set[str] = set()
        """Deliveries whose outcome is being recorded, perhaps while another thread extends leases."""
        self._outcomes: dict[str, MessageCounts] = {}
        self._outages = SinkOutages()
        self._may_be_dead = True
        self._purge_at = 0.0
        self._sweep_at = 0.0
        self._closed = False

    @property
    def is_making(self) -> bool:
        """Whether messages of schedules are on their way to the outbox."""
        return self._timetable is not None and self._timetable.is_making

    @property
    def is_calling(self) -> bool:
        """Whether their producers have not returned yet."""
        return self._timetable is not None and self._timetable.is_calling

    def undelivered(self) -> list[tuple[str, int, str]]:
        """Targets that cannot be reached, how many messages wait for each of them, and why."""
        away = self._outages.all()
        counts = self._rows.waiting() if away else {}
        return [(shown(each), counts[each], away[each].why) for each in away if each in counts]

    def away(self) -> dict[str, Away]:
        """Targets that cannot be reached, whose messages wait."""
        return {shown(target): each for target, each in self._outages.all().items()}

    # ── the source ──────────────────────────────────────────────────────────────────────────────────────

    def fetch_transactions(self, batch_size: int, /, **_: Any) -> Sequence[Transaction]:
        """Claim messages of at most `batch_size` targets."""
        self._check_open()
        self._door.clear()
        claims, wait = self._claim(batch_size)
        self._look_at = time.monotonic() + wait
        self._news.looked(bool(claims))
        if not claims:
            self._housekeep()
        return [self._deliver(each) for each in claims]

    def await_transactions(self, seconds: float, /) -> bool:
        """See `onceward.connectors.base`."""
        self._check_open()
        if self._news.begin():
            return True
        most = LONGEST_WAIT if self._news.hears else LONGEST_DEAF_WAIT
        left = max(min(self._look_at - time.monotonic(), most), SHORTEST_WAIT)
        return self._news.wait(min(left, seconds), self._door.fd()) or left <= seconds

    def _claim(self, size: int) -> tuple[list[OutboxClaim], float]:
        """Return claims, and how long to wait if there are none."""
        with self._lock:
            busy = {each.target for each in self._claims.values()}
        waiting = self._outages.pauses()
        without = busy | waiting.keys()
        try:
            slot = inf if self._timetable is None else self._timetable.publish(draining=self.draining)
            outlook = self._rows.look()
            wait = max(min([outlook.wait, slot, *waiting.values()]), SHORTEST_WAIT)
            if not outlook.is_due and not outlook.targets - without:
                return [], wait
            claims = self._rows.claim(
                size,
                without=without,
                promote=outlook.is_due,
                lease=self.lease,
                owner=self.owner,
                targets=outlook.targets,
            )
        except LockTimeoutError:  # a handler's transaction is long; that is no outage
            if self.draining:  # it must not look as if nothing waited
                raise
            return [], LONGEST_DEAF_WAIT
        return claims, wait

    def _deliver(self, claim: OutboxClaim) -> Transaction:
        delivery = Transaction(id=f"outbox-{claim.token:x}", payload=len(claim.rows))
        with self._lock:
            self._claims[delivery.id] = claim
        return delivery

    def settle_transactions(self, settlements: Sequence[Settlement], /) -> None:
        """Give back claims that were not sent. What was sent is recorded, unless that was done."""
        self._check_open()
        for settlement in settlements:
            delivery = settlement.transaction.id
            claim = self._claims.get(delivery)
            if claim is not None:
                ending = self._endings.get(delivery)
                begun = ending is not None or settlement.verdict is not Verdict.RETURNED
                self._record(delivery, claim, ending or Ending(returned=list(claim.rows)), uncount=not begun)

    def extend_transactions(self, transactions: Sequence[Transaction], /) -> None:
        """Keep these claims for another lease."""
        self._check_open()
        with self._lock:
            claims = {each.id: self._claims[each.id] for each in transactions if each.id in self._claims}
        lost = {each.token for each in self._rows.extend(list(claims.values()), self.lease)} if claims else ()
        for delivery, claim in claims.items():
            with self._lock:
                ended = delivery in self._recording or delivery not in self._claims
            if claim.token in lost and not ended:
                _log.warning(
                    "messages for %s: lease expired, too late to extend it; another relay may send them, too",
                    shown(claim.target),
                )

    def outcome_of(self, transaction: Transaction) -> MessageCounts | None:
        """How the messages of a settled delivery ended; None for one that is a single message."""
        return self._outcomes.pop(transaction.id, None)

    def release_owner(self, owner: str) -> int:
        """End the leases of a dead relay now. Return how many messages it held."""
        return self._rows.release(owner)

    def close(self) -> None:
        """Close the sinks. Unsettled claims come back when their leases expire."""
        if not self._closed:
            self._closed = True
            self._news.close()
            self._sinks.close()
            self._on_close()

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectorClosedError("this relay is closed; create a new one to continue")

    # ── the handler ─────────────────────────────────────────────────────────────────────────────────────

    def publish(self, transaction: Transaction) -> None:
        """Send the messages of a delivery, or a redriven dead letter."""
        claim = self._claims.get(transaction.id)
        if claim is None:
            self._publish_letter(transaction)
            return
        ending = self._endings.get(transaction.id)
        if ending is None:  # otherwise it was sent by an earlier attempt that could not record it
            ending = self._endings[transaction.id] = self._send(claim)
        self._record(transaction.id, claim, ending)

    def _publish_letter(self, letter: Transaction) -> None:
        target = letter.metadata.get(TARGET)
        if not isinstance(target, str):
            raise TransactionException(
                "it does not say where it was to go", category=ExceptionCategory.BUSINESS
            )
        kept = {name: value for name, value in letter.metadata.items() if name not in (TARGET, KEY)}
        message = msgspec.structs.replace(letter, metadata=kept)
        try:
            self._sinks.dispatch(target, [message])
        except Exception as error:
            if not is_outage(error):
                raise
            self._sinks.drop(target)
            raise Postponed(f"{shown(target)} cannot be reached: {text_of(error)}", delay=5.0) from error

    def _send(self, claim: OutboxClaim) -> Ending:
        """Send the messages in order, and say how each ended."""
        ending = Ending()
        ready: list[tuple[Row, Transaction]] = []
        for row in claim.rows:
            if row.lost >= self._rules.most_lost:
                ending.failed.append(_failure(row, TransactionException(KILLER), None))
                continue
            try:
                ready.append((row, decode(row.body)))
            except DecodeError as error:
                ending.failed.append(_failure(row, error, None))
        if not ready:
            return ending
        try:
            self._sinks.dispatch(claim.target, [message for _, message in ready])
        except Exception as error:  # noqa: BLE001  any error of a sink is how its messages ended
            # A sink may take one message, but be configured to take no batch.
            if len(ready) > 1 and (not is_outage(error) or isinstance(error, ConfigurationError)):
                self._send_each(claim.target, ready, ending)
            elif is_outage(error):
                self._pause(claim.target, error)
                ending.returned += [row for row, _ in ready]
            else:
                ending.failed.append(self._fail(ready[0][0], error))
        else:
            ending.published += [row for row, _ in ready]
            self._outages.end(claim.target)
        return ending

    def _send_each(self, target: str, ready: list[tuple[Row, Transaction]], ending: Ending) -> None:
        """One of them cannot be sent: send the others, but none that comes after it in its key."""
        stuck: set[str | None] = set()
        away = False
        for row, message in ready:
            if away or (row.key is not None and row.key in stuck):
                ending.returned.append(row)
                continue
            try:
                self._sinks.dispatch(target, [message])
            except Exception as error:  # noqa: BLE001
                if is_outage(error):
                    self._pause(target, error)
                    away = True
                    ending.returned.append(row)
                else:
                    ending.failed.append(self._fail(row, error))
                    stuck.add(row.key)
            else:
                ending.published.append(row)
        if not away:
            self._outages.end(target)

    def _fail(self, row: Row, error: Exception) -> SendFailure:
        rules = self._rules
        hopeless = isinstance(error, PayloadError) or failure_category(error) is ExceptionCategory.BUSINESS
        over = hopeless or row.failures + 1 >= rules.most_failures
        return _failure(row, error, None if over else rules.backoff.delay(row.failures))

    def _pause(self, target: str, error: Exception) -> None:
        self._sinks.drop(target)
        self._outages.begin(target, error)

    def _record(self, delivery: str, claim: OutboxClaim, ending: Ending, *, uncount: bool = False) -> None:
        with self._lock:
            self._recording.add(delivery)
        try:
            lost = self._rows.end(claim, ending, uncount=uncount)
        except BaseException:
            with self._lock:
                self._recording.discard(delivery)
            raise
        if lost:
            _log.warning(
                "%d messages for %s: lease expired before their outcome was recorded; another relay has them",
                lost, shown(claim.target),
            )  # fmt: skip
        for failed in ending.failed:
            what = (
                "it is now a dead letter" if failed.delay is None else f"next in {round(failed.delay, 3):g} s"
            )
            _log.warning(
                "message %s could not be sent to %s (failure %d); %s: %s",
                failed.row.message_id, shown(claim.target), failed.row.failures + 1, what, failed.error,
            )  # fmt: skip
            self._may_be_dead |= failed.delay is None
        with self._lock:
            self._claims.pop(delivery, None)
            self._recording.discard(delivery)
            self._endings.pop(delivery, None)
            self._outcomes[delivery] = MessageCounts(
                len(ending.published), len(ending.failed), len(ending.returned)
            )
        self._door.ring()

    # ── dead letters ────────────────────────────────────────────────────────────────────────────────────

    def dead_letters(self, limit: int = 100) -> list[DeadMessage]:
        """Return messages that are given up. They stay until `forget_dead`."""
        if not self._may_be_dead:
            return []
        found = self._rows.dead(limit)
        self._may_be_dead = bool(found)
        return [_dead(row) for row in found]

    def forget_dead(self, keys: Sequence[Any]) -> None:
        """Forget them, once another store has them."""
        self._rows.forget_dead([int(key) for key in keys])

    # ── from time to time ───────────────────────────────────────────────────────────────────────────────

    def _housekeep(self) -> None:
        now = time.monotonic()
        try:
            if now >= self._purge_at:
                full = self._rows.purge(self._retention, PURGED) == PURGED
                self._purge_at = now if full else now + PURGE_EVERY
            if now >= self._sweep_at:
                self._rows.unblock_stranded()
                self._sweep_at = _after(SWEEP_EVERY, now)
        except LockTimeoutError:
            return  # another time


def _after(pause: float, began: float) -> float:
    """When to do again what takes long if many messages wait: in a hundredth of the time, at most."""
    now = time.monotonic()
    return now + max(pause, 100 * (now - began))


def _failure(row: Row, error: Exception, delay: float | None) -> SendFailure:
    wrapped = (
        error
        if isinstance(error, TransactionException)
        else TransactionException(
            text_of(error), category=failure_category(error) or ExceptionCategory.SYSTEM
        )
    )
    _, text, line = describe_failure(wrapped, row.attempts, wall())
    return SendFailure(row, text or "", line, delay)


def _dead(row: Mapping[str, Any]) -> DeadMessage:
    """Build the letter. Its metadata says where it was to go, for its redrive."""
    body = bytes(row["body"])
    reason = BurialReason.MAX_DELIVERIES
    try:
        message = decode(body)
    except DecodeError:
        reason = BurialReason.UNDECODABLE
    else:
        way = {TARGET: row["target"], **({} if row["key"] is None else {KEY: row["key"]})}
        body = encode_with({}, msgspec.structs.replace(message, metadata={**message.metadata, **way}))
    return read_dead_message(
        row["seq"], row["message_id"], body, reason, None, row["error"], row["attempts"] - row["lost"],
        row["created_at"], row["ended_at"], row["history"],
    )  # fmt: skip
