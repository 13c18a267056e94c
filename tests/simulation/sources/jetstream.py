"""The queue in JetStream: the real connector and its connection, on a model of the server.

The server may restart: with all that it knew, or without the deliveries and acknowledgments of the last second.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Mapping
from math import inf
from typing import Any

from onceward.connectors.codec import decode
from onceward.connectors.jetstream import AsyncJetStreamConnector
from onceward.connectors.jetstream.queue import CERTAIN
from onceward.connectors.jetstream.records import MessageState, read_state
from onceward.connectors.lease_rules import LeaseRules
from tests.simulation.brokers.jetstream import Answer, Durable, ModelJetStream
from tests.simulation.loop import START, Process
from tests.simulation.sources.nats import SimulatedNats
from tests.simulation.sources.source import RestartingSource, Watcher
from tests.simulation.wire import Wire

STREAM, CONSUMER = "ORDERS", "onceward"
RECORDS = f"{STREAM}-onceward-{CONSUMER}"
URL = "nats://simulated"


class SimulatedJetStream(AsyncJetStreamConnector):
    extend_from_thread = None  # type: ignore[assignment]  # there are no threads


class JetStreamSource(RestartingSource):
    name = "nats"

    def __init__(self, wire: Wire, watcher: Watcher, rules: LeaseRules, root: Process) -> None:
        super().__init__(wire, watcher, rules, root)
        self._clients: list[SimulatedNats] = []
        self.model = ModelJetStream(lambda: START + wire.loop.time())
        self.model.served = self._served
        self.model.acknowledged = self._acknowledged
        self.model.stored = self._stored
        self._timer: asyncio.TimerHandle | None = None
        self._synced: Durable | None = None
        """The consumer as it was on disk a second ago."""
        self._states: dict[int, MessageState] = {}
        """The newest record of each message, also if it was removed since."""
        self._forgotten: set[int] = set()
        """Messages of which the server has forgotten a delivery."""
        self._sent = 0.0
        """When the request was sent that is being served."""

    def open(self, process: Process) -> SimulatedJetStream:
        settings: Any = {"lease": self._rules.lease, "max_deliveries": self._rules.max_deliveries}
        return SimulatedJetStream(URL, STREAM, CONSUMER, clock=process.loop.time, **settings)

    # ── the server ──────────────────────────────────────────────────────────────────────────────────────

    def serve(
        self,
        client: SimulatedNats,
        sent: float,
        subject: str,
        data: bytes,
        headers: Mapping[str, str],
        answer: Answer,
    ) -> None:
        if self.is_down:
            return
        self._sent = sent
        self.model.execute(client, subject, data, headers, answer)
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self.model.due() - START
        if due < inf:
            self._timer = self.wire.loop.call_at(due + 1e-6, self._advance, context=self.root.context)

    def _advance(self) -> None:
        if not self.is_down:
            self.model.advance()
            self._schedule()

    def join(self, client: SimulatedNats) -> None:
        self._clients.append(client)

    def leave(self, client: SimulatedNats) -> None:
        self.model.leave(client)
        if client in self._clients:
            self._clients.remove(client)

    def sync(self) -> None:
        stream = self.model.streams.get(STREAM)
        self._synced = copy.deepcopy(stream.consumers.get(CONSUMER)) if stream else None

    def crash(self) -> None:
        for client in list(self._clients):
            client.lose_connection()

    def come_back(self) -> None:
        streams = self.model.snapshot()
        if self._forgets and self._synced is not None:
            consumers = streams[STREAM].consumers
            self._forget(self._synced, consumers[CONSUMER])
            consumers[CONSUMER] = self._synced
        self.model.restart(streams)
        self._schedule()

    def _forget(self, before: Durable, now: Durable) -> None:
        """Deliveries, extensions and acknowledgments since then did not happen. Records stay."""
        changed = {seq for seq, until in now.pending.items() if before.pending.get(seq) != until}
        ended = {seq for seq in self._watcher.ends if seq > before.last or seq in before.pending}
        self._forgotten |= changed | ended
        for seq in ended:
            state = self._states.get(seq, MessageState())
            if not (state.done or state.reason):
                del self._watcher.ends[seq]

    # ── what is seen ────────────────────────────────────────────────────────────────────────────────────

    def _served(self, client: SimulatedNats, stream: str, seq: int, number: int) -> None:
        if (
            number == 1 and seq not in self._states
        ):  # later ones are served once they are marked as the newest
            self._watcher.delivered(client.process, seq, 1)

    def _stored(self, client: SimulatedNats, subject: str, data: bytes) -> None:
        process, watcher = client.process, self._watcher
        if not subject.startswith(f"onceward.{STREAM}."):
            return
        seq = int(subject.rpartition(".")[2])
        if ".dead." in subject and watcher.ends.get(seq) != "buried":
            watcher.accuse(
                f"{process} makes a dead letter of message {seq}, which is {watcher.ends.get(seq)}"
            )
        if ".state." not in subject or seq in watcher.ends:  # what is over, a record does not change
            return
        before, after = self._states.get(seq, MessageState()), read_state(data)
        self._states[seq] = after
        if after.number > before.number and (after.number > 1 or seq in self._forgotten):
            watcher.delivered(process, seq, after.number)
        if after.ended > before.ended:
            self._ended(process, seq, after.number, _outcome(before, after))

    def _acknowledged(self, client: SimulatedNats, stream: str, seq: int, word: bytes) -> None:
        process, watcher = client.process, self._watcher
        if word == b"+TERM" and watcher.ends.get(seq) != "buried":
            watcher.accuse(f"{process} terminates message {seq}, which is not recorded as dead")
        if word != b"+ACK" or seq in watcher.ends:
            return
        token, holder = watcher.holders.get(seq, (None, None))
        was_late = self.wire.loop.time() - self._sent > self._rules.lease * (1 - CERTAIN)
        if holder is not process and (was_late or seq in self._forgotten):
            # A delivery that is certain to be the newest is acknowledged without a record. If that took too long, or
            # the server forgot the delivery, it is not the newest; its message is done all the same.
            watcher.holders[seq] = token, process
        elif holder is not process:
            token = "another one"
        self._ended(process, seq, token, "done")

    def _ended(self, process: Process, seq: int, token: Any, how: str) -> None:
        watcher = self._watcher
        if seq in self._forgotten:
            watcher.holders[seq] = token, process
        watcher.ended(process, seq, token, how, self._ids()[seq])

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────

    def _ids(self) -> dict[int, str]:
        """The ids of messages, by their sequence."""
        stream = self.model.streams.get(STREAM)
        return {} if stream is None else {seq: decode(each.data).id for seq, each in stream.messages.items()}

    def _letters(self) -> list[int]:
        stream = self.model.streams.get(RECORDS)
        subjects = [each.subject for each in stream.messages.values()] if stream else []
        return [int(each.rpartition(".")[2]) for each in subjects if ".dead." in each]

    def left(self) -> list[Any]:
        stream = self.model.streams.get(STREAM)
        if stream is None:
            return []
        consumer = stream.consumers.get(CONSUMER) or Durable({}, 0.0)
        return [seq for seq in stream.messages if seq > consumer.last or seq in consumer.pending]

    def totals(self) -> tuple[int, int, int]:
        done = sum(how == "done" for how in self._watcher.ends.values())
        return len(self._ids()), done, len(self._letters())

    def buried(self) -> Counter[str]:
        ids = self._ids()
        return Counter(ids[seq] for seq in self._letters())


def _outcome(before: MessageState, after: MessageState) -> str:
    if after.done:
        return "done"
    if after.reason:
        return "buried"
    return "returned" if after.returned > before.returned else "delayed"
