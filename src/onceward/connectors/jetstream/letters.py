"""Dead letters of a stream: kept in the stream of records until they are moved elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from onceward._nats.connection import NatsConnection
from onceward.connectors.codec import DecodeError, decode
from onceward.connectors.jetstream.line import PulledMessage
from onceward.connectors.jetstream.records import (
    JetStreamRecords,
    KeptLetter,
    MessageState,
    encode,
    read_letter,
)
from onceward.connectors.lease_rules import DeadMessage, HistoryLine, read_dead_message


class JetStreamLetters:
    """Each step may be repeated, so whatever crashes in between, there is one letter."""

    def __init__(self, link: NatsConnection, records: JetStreamRecords) -> None:
        self._link = link
        self._records = records

    async def keep(self, at: PulledMessage, state: MessageState, deliveries: int) -> None:
        """Store the message as a letter, unless it is one, or was."""
        records, key = self._records, self._records.key(at.seq)
        if await self._link.last(records.stream, records.moved(key)) is not None:
            return
        letter = KeptLetter(
            reason=state.reason,
            deliveries=deliveries,
            enqueued_at=at.enqueued_at,
            died_at=state.died_at,
            transaction_id=_id_in(at.body),
            error=state.error,
            history=state.history,
        )
        await self._link.publish(
            records.body(key), at.body
        )  # without headers: it may be as large as NATS accepts
        await self._link.put_if_absent(records.stream, records.letter(key), encode(letter))

    async def first(self, limit: int) -> list[DeadMessage]:
        """Return letters, longest dead first."""
        letters: list[DeadMessage] = []
        after, subjects = 0, self._records.letter(">")
        while len(letters) < limit:
            found = await self._link.next(self._records.stream, after, subjects)
            if found is None:
                break
            after, key = found.seq, self._records.key_of(found.subject)
            body = await self._link.last(self._records.stream, self._records.body(key))
            letters.append(_dead_message(key, found.data, b"" if body is None else body.data))
        return letters

    async def forget(self, keys: Sequence[str]) -> None:
        """Remove letters that another store has. That they were here is remembered."""
        for key in keys:
            await self._link.put_if_absent(self._records.stream, self._records.moved(key), b"")
        await self.acknowledge(keys)

    async def acknowledge(self, keys: Sequence[str]) -> None:
        """Remove letters of which another copy is done. Nothing is left of them, so they count as done."""
        records = self._records
        for key in keys:
            await self._link.purge(records.stream, filter=records.letter(key))
            await self._link.purge(records.stream, filter=records.body(key))


def _dead_message(key: str, data: bytes, body: bytes) -> DeadMessage:
    try:
        letter = read_letter(data)
    except msgspec.DecodeError:  # whatever another program has written there
        letter = KeptLetter("", 0, 0.0, 0.0)
    category, error = _last_failure(letter.history)
    return read_dead_message(
        key,
        letter.transaction_id,
        body,
        letter.reason,
        category,
        letter.error or error,
        letter.deliveries,
        letter.enqueued_at,
        letter.died_at,
        letter.history,
    )


def _last_failure(history: str) -> tuple[str | None, str | None]:
    last = history.rstrip("\n").rpartition("\n")[2]
    try:
        line = msgspec.json.decode(last, type=HistoryLine)
    except msgspec.DecodeError:
        return None, None
    return line.category, line.error or None


def _id_in(body: bytes) -> str | None:
    try:
        return decode(body).id
    except DecodeError:
        return None
