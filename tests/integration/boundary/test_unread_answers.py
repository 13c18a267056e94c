"""Callers who do not read what they asked for do not use up a server's memory."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from onceward.boundary import BoundaryClient, envelope_for, fact_of
from onceward.boundary.errors import Backpressure
from onceward.boundary.v1 import boundary_pb as pb
from tests.integration.boundary.test_limits import DEADLINE, MB, SERVICE, answer_of, head, memory
from tests.support.boundary.server import Served, served
from tests.support.wait import until

pytestmark = pytest.mark.req("BC-63")

FACTS, READERS = 10, 16
WHOLE = 32 * 1024 * 1024


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("unread")
    (home / "boundary.toml").write_text('[limits]\nbody_memory = "12MB"\n')
    with served(home / "data", "--config", str(home / "boundary.toml")) as server:
        with BoundaryClient(server.url) as client:
            for number in range(FACTS):
                envelope = envelope_for(f"m{number}", from_zone="a", to_zone="b")
                client.append(envelope, fact_of("tank:1", "measured", "x" * (MB - 1000)))
        yield server
        assert "Exception" not in server.log


def ask(server: Served, method: str, request: bytes) -> socket.socket:
    """Ask, and read nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.socket()
    sock.settimeout(DEADLINE)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((host, int(port)))
    sock.sendall(head(method, len(request)) + request)
    return sock


def fetched() -> bytes:
    return bytes(pb.FetchFactsRequest(consumer_name="c", limit=1000, max_bytes=WHOLE).to_binary())


def read(sock: socket.socket) -> bytes:
    with sock.makefile("rb") as file:
        assert file.readline().startswith(b"HTTP/1.1 200")
        length = 0
        while (line := file.readline().lower()).strip():
            if line.startswith(b"content-length: "):
                length = int(line.split()[1])
        return file.read(length)


def test_pages_that_nobody_reads_hold_little_and_others_get_smaller_ones(server: Served) -> None:
    with BoundaryClient(server.url) as client, ExitStack() as stack:
        before = memory(server)
        readers = [stack.enter_context(closing(ask(server, "FetchFacts", fetched()))) for _ in range(READERS)]
        until(lambda: 1 <= len(client.fetch("c", 1000, WHOLE).facts) < FACTS)
        assert memory(server) < before + READERS * FACTS * MB // 2
        pages = [pb.FetchFactsResponse.from_binary(read(each)) for each in readers]
        assert all(
            [each.offset for each in page.facts] == list(range(1, len(page.facts) + 1)) for page in pages
        )
        assert sum(len(page.facts) == FACTS for page in pages) <= 2
        until(lambda: len(client.fetch("c", 1000, WHOLE).facts) == FACTS)


def test_an_object_in_one_message_is_refused_while_there_is_no_room(server: Served) -> None:
    with BoundaryClient(server.url) as client:
        client.put("b", "k", b"x" * 3 * MB)
        named = bytes(pb.GetObjectRequest(bucket="b", key="k").to_binary())
        with ExitStack() as stack:
            for _ in range(READERS):
                stack.enter_context(closing(ask(server, "FetchFacts", fetched())))
            until(lambda: _get(server, named)[0] == 429)
            error = json.loads(_get(server, named)[1])
            assert (error["code"], Backpressure.retryable) == ("resource_exhausted", True)
            assert "use GetObjectStream" in error["message"]
            assert client.get("b", "k")[0] == b"x" * 3 * MB
        until(lambda: _get(server, named)[0] == 200)


def _get(server: Served, named: bytes) -> tuple[int, bytes]:
    url, headers = f"{server.url}{SERVICE}/GetObject", {"content-type": "application/proto"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, named, headers), timeout=DEADLINE) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.req("BC-25")
def test_a_refused_name_does_not_fill_the_log(server: Served) -> None:
    before = len(server.log)
    for method, request in (
        ("FetchFacts", pb.FetchFactsRequest(consumer_name="x" * MB, limit=1)),
        ("ConfirmReceipt", pb.ConfirmReceiptRequest(consumer_name="x" * MB, offset=1)),
        ("AppendFact", pb.AppendFactRequest(envelope=pb.Envelope(message_id="x" * MB), fact=pb.Fact())),
    ):
        with closing(ask(server, method, bytes(request.to_binary()))) as sock:
            assert answer_of(sock)[0] == 400
    assert len(server.log) < before + 10_000
