"""The state of messages, as their deliveries change it: which is the newest, and how each ended.

JetStream accepts an acknowledgment of any delivery of a message. So a delivery whose lease may have expired records its
outcome here first, on the condition that no newer one has been served.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from onceward._nats.connection import NatsConnection, token
from onceward.connectors.jetstream import places
from onceward.connectors.jetstream.letters import JetStreamLetters
from onceward.connectors.jetstream.line import PulledMessage
from onceward.connectors.jetstream.records import (
    MOST_ERROR,
    JetStreamRecords,
    MessageState,
    add_line,
    encode,
    read_state,
)
from onceward.connectors.lease_rules import BurialReason
from onceward.transaction import Transaction

ACK, NAK, TERM, PROGRESS = b"+ACK", b"-NAK", b"+TERM", b"+WPI"

OLD = 86400.0
"""Seconds after which nobody gives back what a dead process held."""

Change = Callable[[MessageState], MessageState]
Holding = tuple[str, int, int]
"""A delivery that an owner has: its reply subject, the sequence of its message, and its number."""


class HeldMessage(msgspec.Struct):
    """A delivery as it was served."""

    at: PulledMessage
    number: int
    """Of this delivery; at least JetStream's, which may forget some when its server is killed."""
    revision: int
    """Of the state when it was served; 0 if there was none."""
    generation: int = 0
    """Of the connection when it was served."""


class Candidate(msgspec.Struct):
    """A delivery that may be served, and what was known of its message before."""

    at: PulledMessage
    state: MessageState
    revision: int
    transaction: Transaction | None = None

    @property
    def held(self) -> HeldMessage:
        return HeldMessage(self.at, max(self.at.number, self.state.number + 1), self.revision)

    @property
    def before(self) -> int:
        """Deliveries before this one that count."""
        return max(self.held.number - 1 - self.state.returned, 0)

    @property
    def lost(self) -> int:
        return max(self.before - self.state.failures, 0)


class DeliveryLedger:
    def __init__(self, link: NatsConnection, records: JetStreamRecords) -> None:
        self._link = link
        self._records = records
        self.letters = JetStreamLetters(link, records)

    async def look_up(self, at: PulledMessage, *, is_new: bool) -> Candidate:
        if is_new:
            return Candidate(at, MessageState(), 0)
        return Candidate(at, *await self.read(at.seq))

    async def read(self, seq: int) -> tuple[MessageState, int]:
        """Return the state of a message and its revision, which is 0 if there is none."""
        found = await self._link.last(self._records.stream, self._records.state(seq))
        return (MessageState(), 0) if found is None else (read_state(found.data), found.seq)

    async def mark(self, candidate: Candidate) -> HeldMessage | None:
        """Record that this is now the newest delivery of its message, unless it is the first."""
        held = candidate.held
        if held.number == 1:
            return held
        state = msgspec.structs.replace(candidate.state, number=held.number)
        subject = self._records.state(held.at.seq)
        revision = await self._link.put(subject, encode(state), last=held.revision)
        if revision is None:  # another delivery has recorded its outcome meanwhile: this one comes back
            await self._link.tell([(held.at.reply, NAK)])
            return None
        held.revision = revision
        return held

    async def record(self, held: HeldMessage, change: Change, *, is_certain: bool = True) -> bool:
        """Change the state of a message. Return False if a newer delivery owns it, or has ended it; `is_certain` says
        that there can be none."""
        subject, revision = self._records.state(held.at.seq), held.revision
        state = MessageState()
        if held.number > 1:
            state, revision = await self.read(held.at.seq)
        while True:
            if state.number > held.number:
                return False
            if state.ended == held.number:
                break  # recorded by an earlier call that was not answered
            changed = msgspec.structs.replace(change(state), number=held.number, ended=held.number)
            if await self._link.put(subject, encode(changed), last=revision) is not None:
                break
            state, revision = await self.read(held.at.seq)
        return is_certain or await self._floor() < held.at.seq

    async def bury(
        self,
        held: HeldMessage,
        deliveries: int,
        reason: BurialReason,
        error: str,
        line: str = "",
        *,
        is_certain: bool = True,
        is_known: bool = True,
    ) -> bool:
        """Make it a dead letter, durably, before JetStream forgets it. Return False if a newer delivery owns it."""

        def change(state: MessageState) -> MessageState:
            failed = fail(state, line) if line else state
            return msgspec.structs.replace(
                failed, reason=str(reason), error=error[:MOST_ERROR], died_at=time.time()
            )

        if not await self.record(held, change, is_certain=is_certain):
            return False
        state, _ = await self.read(held.at.seq)
        await self.finish_burial(held.at, state, deliveries, is_known=is_known)
        return True

    async def finish_burial(
        self, at: PulledMessage, state: MessageState, deliveries: int, *, is_known: bool = True
    ) -> None:
        """Once its state says that it is dead, any connector that gets the message does the rest. `is_known` says
        whether JetStream knows of the delivery."""
        await self.letters.keep(at, state, deliveries)
        if is_known:
            await self._link.tell([(at.reply, TERM)])

    async def _floor(self) -> int:
        """All messages up to this one have ended."""
        found = await places.find_consumer(self._link, self._records.source, self._records.consumer)
        return 0 if found is None else found.ack_floor.stream_seq

    async def tidy(self) -> None:
        """Remove states of messages up to the floor, which ended, and of a consumer that was deleted; and what nobody
        has given back for long. The state of a message that ended above the floor stays: it fences older deliveries."""
        floor = await self._floor()
        for subject in await self._link.subjects(self._records.stream, f"{self._records.prefix}state.>"):
            begun, seq = subject.split(".")[-2:]
            if begun != self._records.begun or int(seq) <= floor:
                await self._link.purge(self._records.stream, filter=subject)
        for subject in await self._link.subjects(self._records.stream, self._records.holdings("*", "*")):
            found = await self._link.last(self._records.stream, subject)
            if found and found.time and time.time() - found.time.timestamp() > OLD:
                await self._link.purge(self._records.stream, filter=subject)

    # ── owners ──────────────────────────────────────────────────────────────────────────────────────────

    async def hold(self, owner: str, connector: str, holdings: Sequence[Holding]) -> None:
        """Note what a connector of this owner holds, in place of what it held before."""
        await self._link.publish(self._records.holdings(token(owner), connector), encode(holdings))

    async def forget_holdings(self, owner: str, connector: str) -> None:
        """Once its connector is closed, nobody has to give them back in its name."""
        if self._records.begun:
            await self._link.purge(
                self._records.stream, filter=self._records.holdings(token(owner), connector)
            )

    async def release(self, owner: str) -> int:
        """Have JetStream deliver again what this owner holds, except what it has failed or given back."""
        released = 0
        for subject in await self._link.subjects(
            self._records.stream, self._records.holdings(token(owner), "*")
        ):
            found = await self._link.last(self._records.stream, subject)
            held = [] if found is None else msgspec.json.decode(found.data, type=list[Holding])
            states = await asyncio.gather(*(self.read(seq) for _, seq, _ in held))
            over = [
                (reply, NAK)
                for (reply, _, number), (state, _) in zip(held, states, strict=True)
                if state.ended < number and state.number <= number
            ]
            if over:
                await self._link.tell(over)
            released += len(over)
            await self._link.purge(self._records.stream, filter=subject)
        return released


def give_back(state: MessageState) -> MessageState:
    return msgspec.structs.replace(state, returned=state.returned + 1)


def fail(state: MessageState, line: str) -> MessageState:
    return msgspec.structs.replace(state, failures=state.failures + 1, history=add_line(state.history, line))


def finish(state: MessageState) -> MessageState:
    return msgspec.structs.replace(state, done=True)
