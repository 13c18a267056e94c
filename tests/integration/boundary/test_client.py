"""Boundary clients: every call once, the boundary's own errors, and ids that every retry repeats."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from onceward.boundary import (
    AsyncBoundaryClient,
    BoundaryClient,
    BoundaryError,
    Envelope,
    envelope_for,
    fact_of,
    message_id_for,
)
from onceward.boundary.client.calls import INLINE
from onceward.boundary.errors import (
    Backpressure,
    ConflictingDuplicate,
    InvalidArgument,
    NotFound,
    ObjectConflict,
    OffsetOutOfRange,
    Unavailable,
)
from onceward.boundary.v1 import boundary_pb as pb
from onceward.errors import ConfigurationError
from tests.support.boundary.consumer_world import NAME, BoundaryWorld
from tests.support.boundary.server import boundary_server
from tests.support.wait import until_async

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)

CLIENTS = [BoundaryClient, AsyncBoundaryClient]
FACT = fact_of("batch:B1", "completed", {"number": 1})


@pytest.fixture
def world(sqlite: Database, tmp_path: Path) -> Iterator[BoundaryWorld]:
    with BoundaryWorld(sqlite, tmp_path) as made:
        yield made


def envelope(message_id: str = "message-1") -> Envelope:
    return envelope_for(message_id, from_zone="a", to_zone="b")


# ── creating one ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:7700",
        "localhost:7700",
        "",
        "http://",
        "http://:7700",
        "ftp://127.0.0.1",
        "http://127.0.0.1:port",
        "http://127.0.0.1:70000",
        "http://127.0.0.1:0",
        "http://a b:7700",
        "http://127.0.0.1:7700?x=1",
        "http://127.0.0.1:7700#x",
        "http://[::1:7700",
        None,
        7700,
    ],
)
def test_a_url_that_is_not_a_boundarys_is_refused_at_once(kind: Any, url: Any) -> None:
    with pytest.raises(ConfigurationError, match="http://HOST:PORT"):
        kind(url)


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
@pytest.mark.parametrize("name", ["timeout", "transfer_timeout"])
def test_a_time_limit_that_is_none_is_refused_at_once(kind: Any, name: str, seconds: float) -> None:
    with pytest.raises(ConfigurationError, match=name):
        kind("http://127.0.0.1:7700", **{name: seconds})


def test_a_slash_at_the_end_of_the_url_does_no_harm(world: BoundaryWorld) -> None:
    assert world.new_client(world.server.url + "/").append(envelope(), FACT).offset == 1
    assert world.new_client(timeout=None, transfer_timeout=None).append(envelope("two"), FACT).offset == 2


def test_both_clients_have_the_same_methods_with_the_same_parameters() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        members = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(each).parameters) for name, each in members if name[0] != "_"}

    assert methods(BoundaryClient) == methods(AsyncBoundaryClient)


# ── every call once ─────────────────────────────────────────────────────────────────────────────────────


class Rude:
    """A server that answers no request: it hangs up, or sends nothing."""

    def __init__(self, *, hangs_up: bool) -> None:
        self.requests = 0
        self._hangs_up = hangs_up
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._open.append(connection)
            if connection.recv(4096):
                self.requests += 1
            if self._hangs_up:
                connection.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in self._open:
            connection.close()


@contextmanager
def rude(*, hangs_up: bool) -> Iterator[Rude]:
    made = Rude(hangs_up=hangs_up)
    try:
        yield made
    finally:
        made.close()


CALLS: dict[str, Any] = {
    "append": lambda client: client.append(envelope(), FACT),
    "fetch": lambda client: client.fetch(NAME),
    "confirm": lambda client: client.confirm(NAME, 1),
    "put": lambda client: client.put("bucket", "key", b"blob"),
    "put_stream": lambda client: client.put_stream("bucket", "key", [b"blob"]),
    "get": lambda client: client.get("bucket", "key"),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_a_call_is_sent_once_whatever_becomes_of_it(world: BoundaryWorld, name: str) -> None:
    with rude(hangs_up=True) as server:
        client = world.new_client(server.url)
        with pytest.raises(Unavailable, match=server.url) as caught:
            CALLS[name](client)
        assert caught.value.retryable
        assert server.requests == 1
    assert world.waits == []


@pytest.mark.parametrize("name", ["fetch", "put_stream", "get"])
def test_a_boundary_that_says_nothing_is_unavailable_after_the_time_limit(
    world: BoundaryWorld, name: str
) -> None:
    with rude(hangs_up=False) as server:
        client = world.new_client(server.url, timeout=0.2, transfer_timeout=0.2)
        with pytest.raises(Unavailable):
            CALLS[name](client)
        assert server.requests == 1


def test_something_that_is_not_a_boundary_is_reported_by_its_url(world: BoundaryWorld) -> None:
    with pytest.raises(BoundaryError, match=f"{world.server.url}/elsewhere") as caught:
        world.new_client(world.server.url + "/elsewhere").fetch(NAME)
    assert not caught.value.retryable


@pytest.mark.parametrize("name", ["fetch", "get"])
@pytest.mark.without("threads")
def test_a_call_that_is_cancelled_is_cancelled_and_no_error_of_the_boundarys(
    world: BoundaryWorld, name: str
) -> None:
    with rude(hangs_up=False) as server:

        async def cancel() -> None:
            task = asyncio.create_task(CALLS[name](world.new_client(server.url).thing))
            await until_async(lambda: server.requests)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert task.cancelled()

        world.database.run(cancel())


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────


def test_errors_are_those_that_the_boundary_raised_with_all_they_say(world: BoundaryWorld) -> None:
    client = world.client
    client.append(envelope(), FACT)
    with pytest.raises(ConflictingDuplicate) as conflict:
        client.append(envelope(), fact_of("batch:B1", "completed", {"number": 2}))
    assert (conflict.value.original_offset, conflict.value.retryable) == (1, False)
    with pytest.raises(InvalidArgument) as invalid:
        client.append(envelope(), fact_of("no subject", "completed", {}))
    assert invalid.value.field == "fact.subject"
    client.fetch(NAME)
    with pytest.raises(OffsetOutOfRange):
        client.confirm(NAME, 2)
    with pytest.raises(NotFound):
        client.get("bucket", "key")
    client.put("bucket", "key", b"one")
    with pytest.raises(ObjectConflict):
        client.put("bucket", "key", b"other")
    world.server.failing["append"].append(Backpressure("full"))
    with pytest.raises(Backpressure, match="full") as full:
        client.append(envelope("message-2"), FACT)
    assert full.value.retryable
    for error in (conflict, invalid, full):
        again = pickle.loads(pickle.dumps(error.value))
        assert (type(again), str(again)) == (type(error.value), str(error.value))


# ── appending until it is durable ───────────────────────────────────────────────────────────────────────


def test_append_until_durable_sends_the_same_id_and_content_again_while_that_may_help(
    world: BoundaryWorld,
) -> None:
    world.server.failing["append"] = [Unavailable("away"), Backpressure("full")]
    world.server.losing["append"] = [Unavailable("cut")]
    given = envelope()
    made = world.client.append_until_durable(given, FACT)
    assert (made.offset, made.duplicate) == (1, True), "the third was durable, but its answer was lost"
    assert world.server.calls == [("append", given, FACT)] * 4
    assert world.waits == pytest.approx([0.1, 0.2, 0.4])
    assert len(world.admin.fetch(NAME).facts) == 1


def test_append_until_durable_gives_up_after_ten_calls_with_the_last_error(world: BoundaryWorld) -> None:
    world.server.failing["append"] = [Unavailable(f"away {number}") for number in range(1, 20)]
    with pytest.raises(Unavailable, match="away 10"):
        world.client.append_until_durable(envelope(), FACT)
    assert world.server.count("append") == 10
    assert len(world.waits) == 9


def test_append_until_durable_does_not_repeat_what_will_not_help(world: BoundaryWorld) -> None:
    world.client.append(envelope(), FACT)
    with pytest.raises(ConflictingDuplicate):
        world.client.append_until_durable(envelope(), fact_of("batch:B1", "completed", {"number": 2}))
    assert world.waits == []


# ── objects ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [0, 1, INLINE, INLINE + 1, 3 * INLINE])
def test_an_object_of_any_size_comes_back_as_it_was(world: BoundaryWorld, size: int) -> None:
    blob = os.urandom(size)
    put = world.client.put("bucket", "key", blob, "text/plain")
    got, ref = world.client.get("bucket", "key")
    assert got == blob
    assert ref == put
    assert (ref.size, ref.media_type) == (size, "text/plain")


def test_a_file_and_a_stream_go_up_in_pieces(world: BoundaryWorld, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(INLINE + 5))
    put = world.client.put_file("bucket", "file", str(path))
    streamed = world.client.put_stream(
        "bucket", "stream", iter([path.read_bytes()[:7], path.read_bytes()[7:]])
    )
    assert put.digest == streamed.digest
    assert world.client.get("bucket", "stream")[0] == path.read_bytes()
    if world.asynchronous:

        async def pieces() -> Any:
            yield path.read_bytes()

        assert world.client.put_stream("bucket", "async", pieces()).digest == put.digest


def test_data_that_fails_on_its_way_is_raised_as_it_is_and_nothing_is_kept(world: BoundaryWorld) -> None:
    broken = OSError("the tape is torn")

    def pieces() -> Iterator[bytes]:
        yield b"a" * 1000
        raise broken

    with pytest.raises(OSError, match="torn") as caught:
        world.client.put_stream("bucket", "key", pieces())
    assert caught.value is broken
    with pytest.raises(NotFound):
        world.client.get("bucket", "key")


def test_a_writer_that_fails_ends_the_download_with_its_own_error(world: BoundaryWorld) -> None:
    world.client.put("bucket", "key", os.urandom(3 * INLINE))
    pieces: list[bytes] = []

    def write(piece: bytes) -> None:
        pieces.append(piece)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        world.client.get_stream("bucket", "key", write)
    assert len(pieces) == 1
    assert world.client.fetch(NAME).facts == ()


# ── what a producer creates ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("parts", "id_"),
    [
        (
            ("batch", "B1042", "step_completed", 7),
            "1b9ad84a4b44ce8abb6bd867dfa4c04f2e92e1aaaf64cd94cffe6bca246ad98e",
        ),
        (
            ("tank", "Süd/1", "measured", "2024-05-01T12:00"),
            "4ef4fc2bb74332674b1ffbbd06a851f620e2d1c40da68d3e4a96658bc35e5517",
        ),
        (("a",), "0eb5b8d6f81bc677da8a08567cc4fa9a06a57e9ec8da85ed73a7f62727996002"),
    ],
)
def test_message_ids_are_the_same_for_ever(parts: tuple[Any, ...], id_: str) -> None:
    assert message_id_for(*parts) == id_


def test_other_parts_make_another_id_however_they_are_joined() -> None:
    different = [
        ("ab", "c"), ("a", "bc"), ("abc",), ("a", "b", "c"), ("a,b", "c"), ("a", "b,c"), ('a","b', "c"),
        ("a", 1), ("a", "1"), ("a", 11), ("a1", 1), ("a", -1), ("a", 2**70),
    ]  # fmt: skip
    assert len({message_id_for(*parts) for parts in different}) == len(different)


@pytest.mark.parametrize("parts", [(), ("",), ("a", ""), ("a", None), ("a", 1.5), ("a", True), ("a", b"b")])
def test_parts_that_make_no_id_are_refused(parts: tuple[Any, ...]) -> None:
    with pytest.raises((ValueError, TypeError), match="message id"):
        message_id_for(*parts)


def test_an_envelope_has_the_time_of_now_unless_one_is_given() -> None:
    assert envelope().produced_at_unix_ms > 1_700_000_000_000
    assert envelope_for("m", from_zone="a", to_zone="b", produced_at_unix_ms=5).produced_at_unix_ms == 5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"at": object()}, {1, 2}])
def test_what_is_not_json_is_no_fact(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"fact\.object_json"):
        fact_of("batch:B1", "completed", value)


def test_a_retry_made_anew_is_the_same_fact(world: BoundaryWorld) -> None:
    """A producer that crashed and restarts has only the event itself."""
    offsets = set()
    for moment in (1, 2):
        id_ = message_id_for("batch", "B1", "completed")
        made = envelope_for(id_, from_zone="a", to_zone="b", produced_at_unix_ms=moment)
        offsets.add(world.client.append(made, FACT).offset)
    assert offsets == {1}


def test_a_cancellation_that_the_library_forgets_is_kept() -> None:
    class Forgetful:
        """As when the answer arrives at the moment of the cancellation."""

        async def fetch_facts(self, request: Any, **_: Any) -> Any:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
            return pb.FetchFactsResponse()

        async def close(self) -> None: ...

    async def main() -> None:
        async with AsyncBoundaryClient("http://127.0.0.1:1") as client:
            client._calls.port._rpc = Forgetful()  # type: ignore[attr-defined]
            call = asyncio.create_task(client.fetch("c"))
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(main())


def test_a_process_that_asks_and_ends_at_once_ends_well(tmp_path: Path) -> None:
    script = Path(__file__).with_name("exits.py")
    with boundary_server(tmp_path) as url:
        command = [sys.executable, str(script), url, "15"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert ended.stdout.split() == ["0"] * 15
