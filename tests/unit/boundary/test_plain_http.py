"""Calls over plain HTTP: how answers are read, when a connection is used again, and what is left to the library."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import takewhile
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward.boundary import AsyncBoundaryClient, BoundaryClient
from onceward.boundary.client import plain_http
from onceward.boundary.client.http_answer import Answer, BadAnswer
from onceward.boundary.client.plain_http import may_call_plainly
from onceward.boundary.errors import BoundaryError, Unavailable
from onceward.boundary.v1 import boundary_pb as pb
from tests.support.wait import until

CONFIRMED = bytes(pb.ConfirmReceiptResponse(cursor_advanced_to=7).to_binary())
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/proto\r\n"
WITH_LENGTH = HEAD + b"content-length: %d\r\n\r\n" % len(CONFIRMED) + CONFIRMED
IN_CHUNKS = HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n\x08\r\n1;name=value\r\n\x07\r\n0\r\n\r\n"
WITH_TRAILERS = IN_CHUNKS[:-2] + b"after: all\r\n\r\n"
TO_THE_END = HEAD + b"\r\n" + CONFIRMED
WITH_MORE_BEFORE = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + WITH_LENGTH


@given(
    whole=st.sampled_from([WITH_LENGTH, IN_CHUNKS, WITH_TRAILERS, WITH_MORE_BEFORE]),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
)
def test_an_answer_is_read_however_it_is_cut(whole: bytes, cuts: list[int]) -> None:
    answer, at, turn = Answer(), 0, 0
    while at < len(whole):
        cut = cuts[turn % len(cuts)]
        ended = answer.take(whole[at : at + cut])
        at, turn = at + cut, turn + 1
        assert ended == (at >= len(whole))
    assert (answer.status, bytes(answer.body)) == (200, CONFIRMED)
    assert ("content-type", "application/proto") in answer.headers
    assert answer.keeps_open == (whole is not WITH_TRAILERS)


@pytest.mark.parametrize(
    "given",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"x" * 70_000,
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nxyz\r\n",
    ],
)
def test_what_is_not_http_is_refused(given: bytes) -> None:
    with pytest.raises(BadAnswer, match="invalid HTTP"):
        Answer().take(given)


class Server:
    """Answers each request with the next of these bytes; None closes the connection."""

    def __init__(self, answers: Iterable[bytes | None]) -> None:
        self._answers = iter(answers)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.requests: list[bytes] = []
        self.connections: list[socket.socket] = []
        self.ended = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for each in self.connections:
            each.close()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                plug, _ = self._listening.accept()
                self.connections.append(plug)
                threading.Thread(target=self._answer, args=(plug,), daemon=True).start()

    def _answer(self, plug: socket.socket) -> None:
        with suppress(OSError), plug.makefile("rb") as file:
            while head := b"".join(takewhile(lambda line: line.strip(), file)):
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + file.read(length))
                answer = next(self._answers)
                if answer is not None:
                    plug.sendall(answer)
                if answer in (None, TO_THE_END, HEAD):
                    plug.shutdown(socket.SHUT_RDWR)
                    break
        self.ended += 1


Client = Callable[..., Any]
"""Makes a client of this mode, whose calls block."""


class Blocked:
    """An asyncio client whose calls block, in an event loop that runs only for them."""

    def __init__(self, url: str, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._port: Any
        self._client = self._runner.run(self._make(url, options))
        self._port = self._client._port

    async def _make(self, url: str, options: dict[str, Any]) -> AsyncBoundaryClient:
        return AsyncBoundaryClient(url, **options)

    def confirm(self, name: str, offset: int) -> int:
        return self._runner.run(self._client.confirm(name, offset))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


@pytest.fixture(params=[BoundaryClient, Blocked], ids=["threads", "asyncio"])
def client_for(request: pytest.FixtureRequest) -> Client:
    made: Client = request.param
    return made


def test_a_connection_is_used_again_unless_its_answer_ends_with_it(client_for: Client) -> None:
    closing = WITH_LENGTH.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)
    answers = (WITH_LENGTH, IN_CHUNKS, closing, TO_THE_END, WITH_LENGTH + b"more", WITH_LENGTH)
    found = []
    with Server(answers) as server, client_for(server.url) as client:
        for _ in answers:
            assert client.confirm("c", 7) == 7
            found.append(len(server.connections))
    assert found == [1, 1, 1, 2, 3, 4]
    assert server.requests[0].startswith(
        b"POST /onceward.boundary.v1.BoundaryService/ConfirmReceipt HTTP/1.1\r\n"
    )


def test_a_connection_that_the_server_closed_while_nothing_ran_is_not_used(
    client_for: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_http, "LOOKED_AT", 0.0)
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


@pytest.mark.parametrize("answer", [None, HEAD, b"SSH-2.0\r\n\r\n"])
def test_an_answer_that_is_cut_short_or_is_not_http_is_worth_another_try(
    client_for: Client, answer: bytes | None
) -> None:
    with Server([answer]) as server, client_for(server.url) as client:
        with pytest.raises(BoundaryError, match="it closed the connection") as raised:
            client.confirm("c", 7)
        assert raised.value.retryable


def test_nobody_listens(client_for: Client) -> None:
    with Server([]) as server:
        url = server.url
    with (
        client_for(url) as client,
        pytest.raises(Unavailable, match="cannot be reached: Connection refused; "),
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
