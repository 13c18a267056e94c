"""What cannot be sent to a boundary at all is an error of the caller, not a boundary that cannot be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from connectrpc.code import Code
from connectrpc.errors import ConnectError

from onceward.boundary import AsyncBoundaryClient, BoundaryClient, Envelope, Fact, wire
from onceward.boundary.client.errors import failure
from onceward.boundary.errors import BoundaryError, InvalidArgument
from onceward.boundary.v1 import boundary_pb as pb

NOWHERE = "http://127.0.0.1:9"
LONE = "\ud800"
LARGE = 2**63


def message(**fields: Any) -> tuple[Envelope, Fact]:
    given = {"message_id": "m", "from_zone": "a", "to_zone": "b", "produced_at_unix_ms": 1} | fields
    return Envelope(**given), Fact(subject="a:b", predicate="done", object_json=LONE)


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an offset beyond 64 bits": (lambda client: client.confirm("c", LARGE), "offset"),
    "an offset below 64 bits": (lambda client: client.confirm("c", -LARGE - 1), "offset"),
    "an offset that is text": (lambda client: client.confirm("c", "1"), "offset"),
    "a name": (lambda client: client.confirm(LONE, 1), "consumer_name"),
    "a name to fetch for": (lambda client: client.fetch(LONE), "consumer_name"),
    "a size": (lambda client: client.fetch("c", max_bytes=LARGE), "max_bytes"),
    "a wait": (lambda client: client.fetch("c", wait=float("nan")), "wait"),
    "a name to remove": (lambda client: client.remove_consumer(LONE), "consumer_name"),
    "a key": (lambda client: client.put("b", LONE, b""), "key"),
    "a media type": (lambda client: client.put("b", "k", b"", LONE), "media_type"),
    "a text instead of bytes": (lambda client: client.put("b", "k", "text"), "blob"),
    "a key of a large object": (lambda client: client.put("b", LONE, bytes(2_000_000)), "key"),
    "a key of a stream": (lambda client: client.put_stream("b", LONE, [b"x"]), "key"),
    "a key to get": (lambda client: client.get("b", LONE), "key"),
    "an id": (lambda client: client.append(*message(message_id=LONE)), "envelope.message_id"),
    "a time": (
        lambda client: client.append(*message(produced_at_unix_ms=LARGE)),
        "envelope.produced_at_unix_ms",
    ),
    "a label": (lambda client: client.append_all([message(labels={"a": 1})]), "envelope.labels"),
    "an object": (lambda client: client.append(*message()), "fact.object_json"),
}


@pytest.mark.req("BC-18")
@pytest.mark.parametrize(("call", "field"), CALLS.values(), ids=CALLS.keys())
def test_a_value_that_cannot_be_sent_is_named_and_nothing_is_called(
    call: Callable[[Any], Any], field: str
) -> None:
    async def ask() -> None:
        async with AsyncBoundaryClient(NOWHERE) as client:
            await call(client)

    with BoundaryClient(NOWHERE) as client:
        for ask_one in (partial(call, client), lambda: asyncio.run(ask())):
            with pytest.raises(InvalidArgument) as raised:
                ask_one()
            assert raised.value.field == field
            assert not raised.value.retryable


@pytest.mark.req("BC-18")
def test_an_answer_that_cannot_be_read_is_not_an_error_of_the_caller() -> None:
    late = ConnectError(Code.INVALID_ARGUMENT, "protocol error")
    late.__cause__ = ValueError("invalid varint")
    raised = failure(late, NOWHERE)
    assert type(raised) is BoundaryError
    assert str(raised) == f"{NOWHERE} sent an answer that cannot be read: invalid varint"
    with pytest.raises(BoundaryError, match="the fact at offset 7 is damaged"):
        wire.from_pb(pb.StoredFact(offset=7))
