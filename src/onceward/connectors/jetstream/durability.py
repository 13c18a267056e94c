"""How durable a stream is, from its configuration and that of its servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from onceward._nats.durability import MONITORING, SYNC_ALWAYS, syncs_always
from onceward.connectors.jetstream.inspection import inspect
from onceward.connectors.jetstream.line import QueueLine
from onceward.connectors.jetstream.places import (
    JetStreamConsumerSettings,
    StreamSettings,
    find_consumer,
    find_stream,
)
from onceward.connectors.jetstream.scheme import consumer_of, stream_of
from onceward.connectors.reports import Durability, Hazard, ServerUnreachable, SourceFacts, Survives

if TYPE_CHECKING:
    from onceward.connectors.urls import Address

ENOUGH_PENDING = 10_000
"""Messages in flight or delayed, beyond which nobody would notice a limit."""


class JetStreamFacts(NamedTuple):
    """What the servers say. The defaults are those of a stream that does not exist yet."""

    syncs: bool | None = None
    stream: StreamSettings = StreamSettings()
    consumer: JetStreamConsumerSettings = JetStreamConsumerSettings()


def read_facts(address: Address) -> SourceFacts:
    async def look(link: QueueLine) -> JetStreamFacts:
        stream = await find_stream(link, stream_of(address))
        consumer = await find_consumer(link, stream_of(address), consumer_of(address)) if stream else None
        syncs = await syncs_always(link.servers, monitoring)
        return JetStreamFacts(
            syncs,
            stream.config if stream else StreamSettings(),
            consumer.config if consumer else JetStreamConsumerSettings(),
        )

    monitoring: int = address.settings.get("monitoring", MONITORING)
    try:
        found = inspect(address, look)
    except ServerUnreachable as error:
        return SourceFacts(redelivers=True, unreachable=(str(error),))
    return describe(stream_of(address), found, monitoring)


def describe(name: str, found: JetStreamFacts, monitoring: int) -> SourceFacts:
    return SourceFacts(
        durability=_durability(name, found, monitoring),
        redelivers=True,
        hazards=tuple(_hazards(name, found)),
    )


def _durability(name: str, found: JetStreamFacts, monitoring: int) -> Durability:
    replicas = found.stream.num_replicas
    copies = (
        "in the file of its server" if replicas == 1 else f"in the files of most of its {replicas} servers"
    )
    if found.stream.storage == "memory":
        return Durability(
            Survives.NOTHING if replicas == 1 else Survives.PROCESS_CRASH,
            f"the JetStream stream {name} is in memory: acknowledged messages are lost when "
            f"{'its server restarts' if replicas == 1 else 'its servers restart together'}",
            "use a stream with file storage; onceward creates one that does not exist",
        )
    if found.syncs is False:
        return Durability(
            Survives.PROCESS_CRASH,
            f"JetStream confirms a message when it is {copies}, and NATS runs without `sync_interval: always`: a "
            "machine that crashes or loses power can lose messages that were confirmed, also with replicas",
            SYNC_ALWAYS,
        )
    if found.syncs:
        return Durability(
            Survives.MACHINE_CRASH,
            f"JetStream confirms a message when it is {copies}, and NATS runs with `sync_interval: always`: it is on "
            "disk first",
        )
    return Durability(
        None,
        "not checked whether NATS has `sync_interval: always`; without it, a machine that crashes can lose messages "
        f"that were confirmed; its monitoring does not answer on port {monitoring}",
        f"{SYNC_ALWAYS}, and `http: {monitoring}`, which shows it; `?monitoring=PORT` names another port",
    )


def _hazards(name: str, found: JetStreamFacts) -> Iterator[Hazard]:
    stream, consumer = found.stream, found.consumer
    limits = {
        "max_age": stream.max_age > 0,
        "max_msgs": stream.max_msgs > 0 and stream.discard == "old",
        "max_bytes": stream.max_bytes > 0 and stream.discard == "old",
        "max_msgs_per_subject": stream.max_msgs_per_subject > 0 and stream.discard == "old",
    }
    reached = [limit for limit, is_set in limits.items() if is_set]
    if reached:
        yield Hazard(
            f"the stream {name} has {' and '.join(reached)}: messages that it removes before they are done are lost",
            "set limits that are never reached before a message is done, or discard new messages instead of old ones",
        )
    if consumer.mem_storage:
        yield Hazard(
            "the consumer is in memory: after a restart of its server, messages that were done are delivered again",
            "use a consumer with file storage",
            loses=False,
        )
    if 0 < consumer.max_ack_pending < ENOUGH_PENDING:
        yield Hazard(
            f"the consumer has max_ack_pending {consumer.max_ack_pending}: when so many messages are in flight or wait "
            "for their redelivery, JetStream delivers nothing else",
            "set its max_ack_pending to -1",
            loses=False,
        )
