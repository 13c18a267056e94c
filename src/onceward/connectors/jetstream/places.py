"""The stream, its consumer, and the stream of records beside it: found and checked, or created."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from onceward._nats.answers import Answer, StreamState
from onceward._nats.connection import NO_CLUSTER, NO_JETSTREAM, NO_STREAM, NatsConnection
from onceward.connectors.jetstream.line import NANOSECONDS
from onceward.connectors.jetstream.records import JetStreamRecords
from onceward.errors import ConfigurationError
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.connectors.jetstream"))

NO_CONSUMER = 10014
OVERLAP = 10065
"""Another stream has the subject."""
NOT_SHARED = (10099, 10100)
"""A work queue has one consumer for each subject."""
EXISTS = (10013, 10058, 10148)
"""Created at the same moment by another process."""


class StreamSettings(msgspec.Struct, frozen=True):
    """The part of a stream's configuration that a queue depends on."""

    subjects: list[str] = []
    storage: str = "file"
    retention: str = "limits"
    num_replicas: int = 1
    allow_atomic: bool = False
    allow_direct: bool = False
    no_ack: bool = False
    max_age: int = 0
    max_msgs: int = -1
    max_bytes: int = -1
    max_msgs_per_subject: int = -1
    discard: str = "old"

    @property
    def subject(self) -> str | None:
        """Where to publish, if there is only one possibility."""
        literal = len(self.subjects) == 1 and not {"*", ">"} & set(self.subjects[0].split("."))
        return self.subjects[0] if literal else None


class StreamFound(Answer, frozen=True):
    config: StreamSettings = StreamSettings()
    state: StreamState | None = None


class JetStreamConsumerSettings(msgspec.Struct, frozen=True):
    """The part of a consumer's configuration that a queue depends on."""

    ack_policy: str = ""
    ack_wait: int = 0
    max_deliver: int = -1
    max_ack_pending: int = -1
    deliver_subject: str = ""
    deliver_policy: str = "all"
    filter_subject: str = ""
    filter_subjects: list[str] = []
    headers_only: bool = False
    mem_storage: bool = False
    backoff: list[int] = []


class ConsumerPosition(msgspec.Struct, frozen=True):
    stream_seq: int = 0


class ConsumerFound(Answer, frozen=True):
    created: str = ""
    config: JetStreamConsumerSettings = JetStreamConsumerSettings()
    delivered: ConsumerPosition = ConsumerPosition()
    ack_floor: ConsumerPosition = ConsumerPosition()
    num_ack_pending: int = 0
    num_pending: int = 0


class StreamNames(Answer, frozen=True):
    streams: list[str] | None = None


async def find_stream(link: NatsConnection, stream: str) -> StreamFound | None:
    found = await link.ask(f"STREAM.INFO.{stream}", {}, StreamFound, NO_STREAM, *NO_JETSTREAM)
    if found.problem in NO_JETSTREAM:
        raise ConfigurationError(
            "this NATS has no JetStream; start it with --jetstream, or enable it for this account"
        )
    return None if found.problem else found


async def find_consumer(link: NatsConnection, stream: str, consumer: str) -> ConsumerFound | None:
    found = await link.ask(f"CONSUMER.INFO.{stream}.{consumer}", {}, ConsumerFound, NO_CONSUMER, NO_STREAM)
    return None if found.problem else found


async def open_stream(link: NatsConnection, stream: str, subject: str | None) -> StreamSettings:
    """Return the configuration of the stream; create it if it does not exist: in files, with every message kept."""
    found = await find_stream(link, stream)
    if found is None:
        subject = subject or stream
        await _create(link, stream, {"subjects": [subject], "allow_atomic": True, "allow_direct": True})
        _log.info("created the JetStream stream %s with the subject %s", stream, subject)
        found = await find_stream(link, stream)
        assert found is not None
    if found.config.no_ack:
        raise ConfigurationError(
            f"stream {stream} does not confirm what is published to it (no_ack), so messages could be lost unnoticed; "
            "use another stream"
        )
    return found.config


async def find_subject(link: NatsConnection, stream: str, settings: StreamSettings, given: str | None) -> str:
    """Return where to publish: a subject that this stream takes, and no other."""
    subject = given or settings.subject
    if subject is None:
        raise ConfigurationError(
            f"stream {stream} takes the subjects {', '.join(settings.subjects) or 'of another stream'}; name the one "
            "to publish to: add ?subject=… to the URL"
        )
    names = (await link.ask("STREAM.NAMES", {"subject": subject}, StreamNames)).streams
    if names != [stream]:
        has = ", ".join(names or ()) or "no stream"
        raise ConfigurationError(f"the subject {subject} is taken by {has}, not by {stream}; check ?subject=")
    return subject


async def open_consumer(link: NatsConnection, stream: str, consumer: str, lease: float) -> ConsumerFound:
    """Return the durable consumer; create it if it does not exist, from the first message on."""
    found = await find_consumer(link, stream, consumer)
    if found is None:
        config = {
            "durable_name": consumer,
            "ack_policy": "explicit",
            "ack_wait": int(lease * NANOSECONDS),
            "max_deliver": -1,  # this connector decides, and keeps a dead letter
            "max_ack_pending": -1,  # failed messages that wait for their delay must not hold up others
        }
        request = {"stream_name": stream, "config": config, "action": "create"}
        answer = await link.ask(
            f"CONSUMER.CREATE.{stream}.{consumer}", request, ConsumerFound, *EXISTS, *NOT_SHARED
        )
        if answer.problem in NOT_SHARED:
            raise ConfigurationError(
                f"stream {stream} is a work queue, which has one consumer, and not the consumer {consumer}; set "
                "?consumer= to the name of that one, or use a stream with another retention"
            )
        if not answer.problem:
            _log.info("created the consumer %s of the JetStream stream %s", consumer, stream)
            return answer
        found = await find_consumer(link, stream, consumer)
        assert found is not None
    problem = problem_of(found.config, lease)
    if problem is not None:
        raise ConfigurationError(
            f"the consumer {consumer} of stream {stream} cannot be used: {problem}; or set ?consumer= to a new name, "
            "which gets every message of the stream"
        )
    return found


def problem_of(config: JetStreamConsumerSettings, lease: float) -> str | None:
    """What is wrong with a consumer that was not created here, and what to do."""
    if config.deliver_subject:
        return "it is a push consumer; a queue needs a pull consumer"
    if config.ack_policy != "explicit":
        return f"its ack policy is {config.ack_policy}; a queue needs explicit, to acknowledge each message alone"
    if config.max_deliver != -1:
        return (
            f"its max_deliver is {config.max_deliver}, after which JetStream drops a message; set it to -1, and "
            "max_deliveries in the URL, which makes a dead letter"
        )
    if config.backoff:
        return "it has a backoff, which changes the lease with every delivery; remove it"
    if config.headers_only:
        return "it delivers no bodies (headers_only); remove this setting"
    wait = config.ack_wait / NANOSECONDS
    if abs(wait - lease) > 0.001:
        return f"its ack wait is {wait:g} s, but the lease is {lease:g} s; add ?lease={wait:g}, or change its ack wait"
    return None


async def open_records(
    link: NatsConnection, records: JetStreamRecords, replicas: int, consumer_is_new: bool
) -> None:
    """Create the stream of records if it does not exist, with as many replicas as the stream itself."""
    found = await find_stream(link, records.stream)
    if found is None:
        if not consumer_is_new:
            _log.warning(
                "the stream %s has disappeared: someone deleted it. Created again. The dead letters in it are lost, "
                "and so is how often messages have failed",
                records.stream,
            )
        await _create(
            link,
            records.stream,
            {
                "subjects": [f"{records.prefix}>"],
                "num_replicas": replicas,
                "max_msgs_per_subject": 1,
                "allow_direct": True,
            },
        )
        found = await find_stream(link, records.stream)
        assert found is not None
    if found.config.subjects != [f"{records.prefix}>"] or found.config.max_msgs_per_subject != 1:
        raise ConfigurationError(
            f"the JetStream stream {records.stream} exists, but was not created by onceward; choose another consumer"
        )


async def _create(link: NatsConnection, stream: str, config: dict[str, Any]) -> None:
    whole = {"name": stream, "storage": "file", "num_replicas": 1, "discard": "new", **config}
    answer = await link.ask(f"STREAM.CREATE.{stream}", whole, StreamFound, OVERLAP, NO_CLUSTER, *EXISTS)
    if answer.problem == OVERLAP:
        raise ConfigurationError(
            f"cannot create the stream {stream}: another one has the subject {config['subjects'][0]}; check the name "
            "of the stream, or add ?subject=… with a subject of its own"
        )
    if answer.problem == NO_CLUSTER:
        raise ConfigurationError(
            f"cannot create the stream {stream}: {config['num_replicas']} replicas need a cluster"
        )
