"""A client takes nothing for done that its boundary has not said is done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from onceward.boundary import AsyncBoundaryClient, BoundaryClient, Envelope, Fact, envelope_for, fact_of
from onceward.boundary.client import transport
from onceward.boundary.errors import BoundaryError, Unavailable
from onceward.boundary.v1 import boundary_pb as pb
from onceward.errors import ConfigurationError
from tests.support.boundary.raw_server import MODES, Client, Server, to_the_end, with_length
from tests.support.wait import until, until_async

FACT = fact_of("batch:B1", "completed", 1)
EMPTY = [with_length(b""), to_the_end(b"")]
ONE = with_length(bytes(pb.AppendFactResponse(offset=1).to_binary()))


def message(number: int = 1) -> tuple[Envelope, Fact]:
    return envelope_for(f"m{number}", from_zone="a", to_zone="b"), FACT


@pytest.fixture(params=MODES.values(), ids=MODES)
def client_for(request: pytest.FixtureRequest) -> Client:
    made: Client = request.param
    return made


@pytest.mark.req("BC-16")
@pytest.mark.parametrize("answer", EMPTY)
def test_an_append_without_an_offset_is_not_durable(client_for: Client, answer: bytes) -> None:
    with Server([answer, answer]) as server, client_for(server.url) as client:
        with pytest.raises(Unavailable) as raised:
            client.append(*message())
        assert raised.value.retryable
        [outcome] = client.append_all([message()])
        assert isinstance(outcome, Unavailable)


@pytest.mark.req("BC-16")
def test_an_append_is_repeated_until_it_has_an_offset(client_for: Client) -> None:
    with Server([EMPTY[0], ONE]) as server, client_for(server.url) as client:
        assert client.append_until_durable(*message()).offset == 1
        assert server.requests[0].partition(b"\r\n\r\n")[2] == server.requests[1].partition(b"\r\n\r\n")[2]


PAGE = b"<html>Please try again later.</html>"
JSON = b'{"message": "An unexpected error occurred"}'


def page(status: int, kind: str, body: bytes) -> bytes:
    """What a proxy answers in the place of a boundary."""
    return b"HTTP/1.1 %d \r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        kind.encode(),
        len(body),
        body,
    )


@pytest.fixture(params=["plain", "library"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How a client calls: itself, or by the library, as with TLS."""
    if request.param == "library":
        monkeypatch.setattr(transport, "may_call_plainly", lambda url: False)


@pytest.mark.req("BC-16")
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (500, "text/html", PAGE),
        (500, "text/html", b""),
        (500, "application/json", JSON),
        (502, "text/html", PAGE),
        (503, "text/html", b""),
        (504, "text/html", PAGE),
        (520, "text/html", PAGE),
    ],
)
def test_what_a_proxy_says_while_the_boundary_is_down_is_worth_another_try(
    client_for: Client, status: int, kind: str, body: bytes
) -> None:
    def calls(client: Any) -> list[Callable[[], Any]]:
        return [
            lambda: client.append(*message()),
            lambda: client.fetch("c"),
            lambda: client.confirm("c", 7),
            lambda: client.put("b", "k", b"x"),
            lambda: client.get("b", "k"),
        ]

    with Server([page(status, kind, body)] * 6) as server, client_for(server.url) as client:
        for call in calls(client):
            with pytest.raises(Unavailable, match=server.url) as raised:
                call()
            assert (raised.value.code, raised.value.retryable) == ("unavailable", True)
        [outcome] = client.append_all([message()])
        assert isinstance(outcome, Unavailable)


@pytest.mark.req("BC-16")
@pytest.mark.usefixtures("way")
def test_an_append_goes_on_after_the_page_of_a_proxy(client_for: Client) -> None:
    answers = [page(status, "text/html", PAGE) for status in (500, 502)]
    with Server([*answers, ONE]) as server, client_for(server.url) as client:
        assert client.append_until_durable(*message()).offset == 1


@pytest.mark.req("BC-18")
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (page(400, "text/html", PAGE), "internal"),
        (page(403, "text/html", PAGE), "permission_denied"),
        (page(404, "text/html", PAGE), "unimplemented"),
        (page(405, "text/html", PAGE), "unknown"),
        (page(500, "application/json", b'{"code": "internal"}'), "internal"),
    ],
)
def test_what_another_try_would_not_change_is_not_retried(
    client_for: Client, answer: bytes, code: str
) -> None:
    with Server([answer]) as server, client_for(server.url) as client:
        with pytest.raises(BoundaryError) as raised:
            client.append_until_durable(*message())
        assert (raised.value.code, raised.value.retryable) == (code, False)


@pytest.mark.req("BC-53")
def test_an_outcome_without_an_offset_is_not_durable(client_for: Client) -> None:
    outcomes = [pb.AppendOutcome(offset=1), pb.AppendOutcome()]
    answer = with_length(bytes(pb.AppendFactsResponse(outcomes=outcomes).to_binary()))
    with Server([answer]) as server, client_for(server.url) as client:
        first, second = client.append_all([message(1), message(2)])
        assert first.offset == 1
        assert isinstance(second, Unavailable)


@pytest.mark.req("BC-03")
@pytest.mark.parametrize("answered", [0, 6])
def test_a_cursor_that_has_not_advanced_is_not_confirmed(client_for: Client, answered: int) -> None:
    answer = with_length(bytes(pb.ConfirmReceiptResponse(cursor_advanced_to=answered).to_binary()))
    with Server([answer]) as server, client_for(server.url) as client:
        with pytest.raises(Unavailable, match=f"confirm 7, and its cursor is at {answered}") as raised:
            client.confirm("c", 7)
        assert raised.value.retryable


@pytest.mark.req("BC-60")
def test_a_fetch_that_does_not_confirm_is_not_taken_for_one_that_does(client_for: Client) -> None:
    fetched = with_length(bytes(pb.FetchFactsResponse(cursor_advanced_to=6).to_binary()))
    confirmed = with_length(bytes(pb.ConfirmReceiptResponse(cursor_advanced_to=6).to_binary()))
    with (
        Server([fetched, confirmed]) as server,
        client_for(server.url) as client,
        pytest.raises(Unavailable, match="confirm 7, and its cursor is at 6"),
    ):
        client.fetch("c", confirm=7)


@pytest.mark.req("BC-17")
def test_an_object_without_a_digest_is_not_stored(client_for: Client) -> None:
    with Server(EMPTY[:1]) as server, client_for(server.url) as client, pytest.raises(Unavailable):
        client.put("b", "k", b"bytes")


HELD = 20
"""Bytes of an answer that come at once. The rest comes when others wait for this call, which then go together."""


@pytest.mark.req("BC-54")
def test_tasks_that_append_together_get_an_error_if_their_outcomes_are_too_few() -> None:
    async def main() -> None:
        async with AsyncBoundaryClient(server.url) as client:
            first = asyncio.create_task(client.append(*message(0)))
            await until_async(lambda: server.requests)
            others = [asyncio.create_task(client.append(*message(each))) for each in (1, 2)]
            await asyncio.sleep(0)
            server.connections[0].sendall(ONE[HELD:])
            assert (await first).offset == 1
            for other in others:
                with pytest.raises(Unavailable, match="answered 0 outcomes for 2 facts"):
                    await other

    with Server([ONE[:HELD], with_length(b"")]) as server:
        asyncio.run(main())


@pytest.mark.req("BC-54")
def test_threads_that_append_together_get_an_error_if_their_outcomes_are_too_few() -> None:
    found: list[bool] = []

    def append(number: int) -> None:
        with pytest.raises(Unavailable, match="answered 0 outcomes for 2 facts"):
            client.append(*message(number))
        found.append(True)

    with Server([ONE[:HELD], with_length(b"")]) as server, BoundaryClient(server.url) as client:
        first = threading.Thread(target=client.append, args=message(0))
        first.start()
        until(lambda: server.requests)
        others = [threading.Thread(target=append, args=(each,)) for each in (1, 2)]
        for each in others:
            each.start()
        loads: Any = client._calls._loads
        until(lambda: len(loads._line.waiting) == 2)
        server.connections[0].sendall(ONE[HELD:])
        for each in (first, *others):
            each.join()
        assert found == [True, True]


@pytest.mark.req("BC-18")
@pytest.mark.parametrize("host", ["a" * 300, ".", "a..b", "\0", "a\x1b[31m"])
@pytest.mark.parametrize("kind", [BoundaryClient, AsyncBoundaryClient])
def test_a_host_that_cannot_be_one_is_refused(kind: Client, host: str) -> None:
    with pytest.raises(ConfigurationError, match="the URL of a boundary must be"):
        kind(f"http://{host}:1")
