"""Configuration, messages, payloads and errors of the queue: everything that needs no Redis."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import json
import pickle
from typing import Any

import pytest
import redis
import redis.asyncio

from onceward._sync import run_blocking
from onceward.errors import ConfigurationError, OncewardError
from onceward.queue import (
    AsyncQueueConsumer,
    AsyncRedisStreamsQueue,
    QueueConfig,
    QueueConsumer,
    QueueError,
    QueueMessage,
    QueuePayloadError,
    RedisStreamsQueue,
    UndecodableEntryError,
    messages,
)

GIVEN: dict[str, Any] = {"stream_key": "orders", "consumer_group": "billing", "consumer_name": "one"}


def test_the_defaults_are_five_seconds_a_minute_and_own_messages_too() -> None:
    config = QueueConfig("orders", "billing", "one")
    assert (config.block_ms, config.claim_idle_ms, config.claim_skip_own_messages) == (5000, 60000, False)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("stream_key", "", "stream_key must not be empty"),
        ("consumer_group", "  ", "consumer_group must not be empty"),
        ("consumer_name", None, "consumer_name must be a string, not NoneType"),
        ("stream_key", b"orders", "stream_key must be a string, not bytes"),
        ("stream_key", "\ud800", "stream_key must be valid text"),
        ("block_ms", 0, "Redis would block forever"),
        ("block_ms", 0.0, "Redis would block forever"),
        ("block_ms", -1, "block_ms must be at least 1, not -1"),
        ("block_ms", 2.5, "block_ms must be a whole number, not 2.5"),
        ("block_ms", True, "block_ms must be a whole number, not True"),
        ("block_ms", None, "block_ms must be a whole number, not None"),
        ("claim_idle_ms", -5, "claim_idle_ms must be at least 0"),
        ("claim_idle_ms", "60000", "claim_idle_ms must be a whole number"),
        ("claim_skip_own_messages", 1, "claim_skip_own_messages must be True or False"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_with_its_reason(
    field: str, value: Any, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        QueueConfig(**GIVEN | {field: value})
    assert isinstance(caught.value, ValueError)


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        QueueConfig(**GIVEN).block_ms = 1  # type: ignore[misc]


@pytest.mark.parametrize("call", ["next", "claim_stale", "count", "wait_ms"])
@pytest.mark.parametrize("value", [-1, 2.5, "1", True])
def test_arguments_of_calls_are_refused_by_the_same_rules(call: str, value: Any) -> None:
    consumer = QueueConsumer(redis.Redis(), QueueConfig(**GIVEN))
    calls = {
        "next": lambda: consumer.next(value),
        "claim_stale": lambda: consumer.claim_stale(min_idle_ms=value),
        "count": lambda: consumer.claim_stale(count=value),
        "wait_ms": lambda: consumer.run_claim_stale(
            handler=lambda *_: None,
            engine=None,
            wait_ms=value,  # type: ignore[arg-type]
        ),
    }
    with pytest.raises(ConfigurationError):
        calls[call]()


def test_next_with_block_zero_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="forever"):
        QueueConsumer(redis.Redis(), QueueConfig(**GIVEN)).next(0)


def test_a_client_of_the_wrong_kind_is_refused_by_name() -> None:
    config = QueueConfig(**GIVEN)
    with pytest.raises(ConfigurationError, match=r"needs a redis\.Redis client"):
        QueueConsumer(redis.asyncio.Redis(), config)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"needs a redis\.asyncio\.Redis client"):
        AsyncRedisStreamsQueue(redis.Redis(), config)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="not str"):
        RedisStreamsQueue("redis://localhost", config)  # type: ignore[arg-type]


def test_a_message_is_frozen_and_hashable_whatever_its_payload() -> None:
    message = QueueMessage("orders", "billing", "1-0", {"total": 5})
    with pytest.raises(dataclasses.FrozenInstanceError):
        message.id = "2-0"  # type: ignore[misc]
    again = QueueMessage("orders", "billing", "1-0", {"total": 5}, deliveries=2)
    assert {message, again} == {message}
    assert message.deliveries is None
    assert message != QueueMessage("orders", "shipping", "1-0", {"total": 5})


@pytest.mark.parametrize(
    "payload", [{}, {"a": [1, 2.5, None, True]}, [], "text", "", 0, -1.5, None, False, "ü €\x00", 2**80, "😀"]
)
def test_any_json_value_comes_back_equal(payload: Any) -> None:
    found = messages.Entries("orders", "billing")
    found.add(b"1-0", [b"data", messages.encode(payload)], 1)
    assert [message.payload for message in found.messages] == [payload]


@pytest.mark.parametrize(
    "payload",
    [
        float("nan"),
        {"a": [float("inf")]},
        {1: "a"},
        (1, 2),
        {"a": {1, 2}},
        object(),
        b"bytes",
        "\ud800",
    ],
)
def test_what_would_not_come_back_equal_is_refused(payload: Any) -> None:
    with pytest.raises(QueuePayloadError, match="cannot be sent as JSON"):
        messages.encode(payload)


def test_a_payload_that_contains_itself_is_refused() -> None:
    payload: list[Any] = []
    payload.append(payload)
    with pytest.raises(QueuePayloadError):
        messages.encode(payload)


@pytest.mark.parametrize(
    "fields",
    [
        [b"data", b"{"],
        [b"data", b"NaN"],
        [b"data", b'{"a": Infinity}'],
        [b"data", b"\xff"],
        [b"data", '"ü"'.encode("utf-16")],
        [b"data", b""],
        [b"data", b"[" * 100_000],
        [b"other", b"1"],
        [b"other", b"data"],
    ],
)
def test_what_is_not_json_in_utf_8_is_an_error_with_stream_id_and_raw_fields(fields: list[bytes]) -> None:
    found = messages.Entries("orders", "billing")
    found.add(b"1-0", fields, 3)
    found.add(b"2-0", [b"data", b"{}"], 1)
    assert [message.id for message in found.messages] == ["2-0"]
    error = found.error()
    assert "'orders'" in str(error)
    assert "1-0" in str(error)
    [entry] = error.entries
    assert (entry.id, entry.deliveries, entry.payload) == ("1-0", 3, {fields[0]: fields[1]})
    assert error.cause is not None


def test_fields_beside_data_are_left_unread() -> None:
    found = messages.Entries("orders", "billing")
    found.add(b"1-0", [b"trace", b"data", b"data", b"[1]", b"more", b"\xff"], 1)
    assert [message.payload for message in found.messages] == [[1]]


def test_the_wire_format_is_compact_json_that_any_program_reads() -> None:
    body = messages.encode({"name": "ü", "list": [1, 2]})
    assert body == '{"name":"ü","list":[1,2]}'.encode()
    assert json.loads(body) == {"name": "ü", "list": [1, 2]}


def test_queue_errors_keep_their_cause_when_pickled_and_copied() -> None:
    error = QueueError("reading failed")
    error.__cause__ = redis.ConnectionError("gone")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert isinstance(again, QueueError)
        assert isinstance(again, OncewardError)
        assert isinstance(again.cause, redis.ConnectionError)
    bad = UndecodableEntryError.of((QueueMessage("s", "g", "1-0", {}),), (ValueError("no"),))
    assert pickle.loads(pickle.dumps(bad)).entries == bad.entries


def test_what_blocks_with_threads_must_not_suspend() -> None:
    async def suspends() -> None:
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="a coroutine waits for an event loop"):
        run_blocking(suspends())


@pytest.mark.req("QC-19")
@pytest.mark.parametrize(
    ("sync", "asynchronous"),
    [(QueueConsumer, AsyncQueueConsumer), (RedisStreamsQueue, AsyncRedisStreamsQueue)],
)
def test_sync_and_async_have_the_same_methods_with_the_same_parameters(
    sync: type, asynchronous: type
) -> None:
    def methods(cls: type) -> dict[str, list[tuple[str, Any]]]:
        return {
            name: [(each.name, each.default) for each in inspect.signature(member).parameters.values()]
            for name, member in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_")
        }

    assert methods(sync) == methods(asynchronous)
    assert {"close", "backlog_stats", "claim_stale", "ack"} <= set(methods(sync))
