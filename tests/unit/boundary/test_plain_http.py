"""Calls over plain HTTP: how answers are read, when a connection is used again, and what is left to the library."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import weakref
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward.boundary import AsyncBoundaryClient, BoundaryClient
from onceward.boundary.client.http_answer import BadAnswer, HttpAnswer
from onceward.boundary.client.plain_http import may_call_plainly
from onceward.boundary.errors import BoundaryError, Unavailable
from tests.support.boundary.raw_server import (
    CONFIRMED,
    HEAD,
    MODES,
    Client,
    Closing,
    Server,
    to_the_end,
    with_length,
)
from tests.support.wait import until, until_async

WITH_LENGTH = with_length(CONFIRMED)
IN_CHUNKS = HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n\x08\r\n1;name=value\r\n\x07\r\n0\r\n\r\n"
WITH_TRAILERS = IN_CHUNKS[:-2] + b"after: all\r\n\r\n"
WITH_MORE_BEFORE = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + WITH_LENGTH


@given(
    whole=st.sampled_from([WITH_LENGTH, IN_CHUNKS, WITH_TRAILERS, WITH_MORE_BEFORE]),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
)
def test_an_answer_is_read_however_it_is_cut(whole: bytes, cuts: list[int]) -> None:
    answer, at, turn = HttpAnswer(), 0, 0
    while at < len(whole):
        cut = cuts[turn % len(cuts)]
        ended = answer.take(whole[at : at + cut])
        at, turn = at + cut, turn + 1
        assert ended == (at >= len(whole))
    assert (answer.status, answer.body) == (200, CONFIRMED)
    assert ("content-type", "application/proto") in answer.headers
    assert "after" not in dict(answer.headers)
    assert answer.keeps_open


@pytest.mark.parametrize(
    "given",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"x" * 70_000,
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"content-length: 0\r\ncontent-length: 2\r\n\r\n",
        HEAD + b"content-length: " + b"9" * 5000 + b"\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n\x08XX0\r\n\r\n",
        b"HTTP/1.1 102 Processing\r\n\r\n" * 3000,
        HEAD + b"transfer-encoding: chunked\r\n\r\nxyz\r\n",
    ],
)
def test_what_is_not_http_is_refused(given: bytes) -> None:
    with pytest.raises(BadAnswer, match="invalid HTTP"):
        HttpAnswer().take(given)


@pytest.fixture(params=MODES.values(), ids=MODES)
def client_for(request: pytest.FixtureRequest) -> Client:
    made: Client = request.param
    return made


def test_a_connection_is_used_again_unless_its_answer_ends_with_it(client_for: Client) -> None:
    closing = WITH_LENGTH.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)
    two = WITH_LENGTH + WITH_LENGTH
    answers = (WITH_LENGTH, IN_CHUNKS, WITH_TRAILERS, closing, WITH_LENGTH + b"more", two, WITH_LENGTH)
    found = []
    with Server(answers) as server, client_for(server.url) as client:
        for _ in answers:
            assert client.confirm("c", 7) == 7
            found.append(len(server.connections))
    assert found == [1, 1, 1, 1, 2, 3, 4]
    assert server.requests[0].startswith(
        b"POST /onceward.boundary.v1.BoundaryService/ConfirmReceipt HTTP/1.1\r\n"
    )


def test_a_connection_that_the_server_closed_while_nothing_ran_is_not_used(
    client_for: Client,
) -> None:
    with Server([WITH_LENGTH, WITH_LENGTH, WITH_LENGTH]) as server, client_for(server.url) as client:
        client.confirm("c", 7)
        client.confirm("c", 7)
        assert len(server.connections) == 1
        server.connections[0].shutdown(socket.SHUT_RDWR)
        until(lambda: server.ended == 1)
        assert client.confirm("c", 7) == 7
        assert len(server.connections) == 2


def test_a_call_that_is_given_up_closes_its_connection(client_for: Client) -> None:
    with Server([b"", WITH_LENGTH]) as server, client_for(server.url, timeout=0.2) as client:
        with pytest.raises(Unavailable, match="no answer in time"):
            client.confirm("c", 7)
        until(lambda: server.ended == 1)
        assert client.confirm("c", 7) == 7


@pytest.mark.filterwarnings("error")
def test_a_client_outlives_its_event_loops_and_leaves_nothing_open() -> None:
    with Server([WITH_LENGTH] * 4) as server:
        client = AsyncBoundaryClient(server.url)
        for _ in range(2):
            assert asyncio.run(client.confirm("c", 7)) == 7
            gc.collect()
        assert len(server.connections) == 2
        del client
        gc.collect()
        until(lambda: server.ended == 2)


def test_a_canceled_call_closes_its_connection_and_the_next_one_has_its_own() -> None:
    async def main() -> None:
        async with AsyncBoundaryClient(server.url) as client:
            call = asyncio.create_task(client.confirm("c", 7))
            await until_async(lambda: server.requests)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await client.confirm("c", 7) == 7
            await until_async(lambda: server.ended == 1)

    with Server([b"", WITH_LENGTH]) as server:
        asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (None, "it closed the connection"),
        (Closing(HEAD), "it closed the connection"),
        (to_the_end(CONFIRMED), "it closed the connection"),
        (b"SSH-2.0\r\n\r\n", "its answer is not HTTP"),
        (b"-ERR unknown command\r\n", "its answer is not HTTP"),
    ],
)
def test_an_answer_that_is_cut_short_or_is_not_http_is_worth_another_try(
    client_for: Client, answer: bytes | None, what: str
) -> None:
    with Server([answer]) as server, client_for(server.url) as client:
        with pytest.raises(BoundaryError, match=what) as raised:
            client.confirm("c", 7)
        assert raised.value.retryable


def test_an_error_without_a_length_says_what_it_is(client_for: Client) -> None:
    answer = Closing(b'HTTP/1.0 400 Bad\r\ncontent-type: application/json\r\n\r\n{"code":"out_of_range"}')
    with Server([answer]) as server, client_for(server.url) as client:
        with pytest.raises(BoundaryError) as raised:
            client.confirm("c", 7)
        assert raised.value.code == "out_of_range"


def test_an_answer_is_not_held_by_its_parser() -> None:
    """A page may have 32 MiB: it must not wait for the garbage collector."""
    answer = HttpAnswer()
    assert answer.take(WITH_LENGTH)
    gone = weakref.ref(answer)
    gc.disable()
    try:
        del answer
        assert gone() is None
    finally:
        gc.enable()


def test_nobody_listens(client_for: Client) -> None:
    with Server([]) as server:
        url = server.url
    with (
        client_for(url) as client,
        pytest.raises(Unavailable, match="cannot be reached: tcp connect error: Connection refused; "),
    ):
        client.confirm("c", 7)


def test_a_forked_child_does_not_use_the_connections_of_its_parent() -> None:
    with Server([WITH_LENGTH, WITH_LENGTH, WITH_LENGTH]) as server, BoundaryClient(server.url) as client:
        client.confirm("c", 7)
        child = os.fork()
        if not child:
            with suppress(BaseException):
                transport: Any = client._port._plain
                os._exit(0 if transport._reusable() is None else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        client.confirm("c", 7)
        assert len(server.connections) == 1


@pytest.mark.parametrize(
    ("url", "proxies", "plainly"),
    [
        ("http://127.0.0.1:7171", {}, True),
        ("http://boundary/below", {}, True),
        ("https://boundary", {}, False),
        ("http://someone:secret@boundary", {}, False),
        ("http://bücher", {}, False),
        ("http://boundary", {"http_proxy": "http://proxy:3128"}, False),
        ("http://boundary", {"all_proxy": "http://proxy:3128"}, False),
        ("http://boundary", {"https_proxy": "http://proxy:3128"}, True),
        ("http://boundary", {"http_proxy": "http://proxy:3128", "no_proxy": "boundary"}, True),
    ],
)
def test_what_only_the_library_can_do_is_left_to_it(
    url: str, proxies: dict[str, str], plainly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in proxies.items():
        monkeypatch.setenv(name, value)
    assert may_call_plainly(url) is plainly
