"""A fetch that first confirms: one call for what a consumer does between two pages."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest

from onceward.boundary import AsyncBoundaryClient, BoundaryClient, envelope_for, fact_of
from onceward.boundary.boundary import Boundary
from onceward.boundary.errors import (
    BoundaryError,
    InvalidArgument,
    NotFound,
    OffsetOutOfRange,
    PermissionDenied,
)
from onceward.boundary.server import asgi
from onceward.boundary.server.access import Guard
from onceward.boundary.server.asgi import Application
from onceward.boundary.server.rpc import BoundaryRpc
from onceward.boundary.v1 import boundary_pb as pb
from tests.support.boundary.consumer_world import NAME, Awaited, BoundaryWorld, book
from tests.support.boundary.server import Served, boundary_server
from tests.support.driven import Driven

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)
pytestmark = pytest.mark.req("BC-60")


@pytest.fixture
def world(sqlite: Database, tmp_path: Path) -> Iterator[BoundaryWorld]:
    with BoundaryWorld(sqlite, tmp_path) as made:
        yield made


@pytest.fixture(params=[BoundaryClient, AsyncBoundaryClient], ids=["threads", "asyncio"])
def client_of(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Driven]]:
    with asyncio.Runner() as runner:

        async def make(url: str) -> Any:
            return request.param(url)

        made: list[Driven] = []

        def client(url: str) -> Driven:
            made.append(Driven(runner.run(make(url)), runner.run))
            return made[-1]

        yield client
        for each in made:
            each.close()


def append(client: Any, *numbers: int) -> None:
    for number in numbers:
        envelope = envelope_for(f"m{number}", from_zone="a", to_zone="b")
        client.append(envelope, fact_of("order:1", "placed", number))


def offsets(page: Any) -> list[int]:
    return [each.offset for each in page.facts]


def test_it_confirms_and_then_answers_what_is_beyond(
    world: BoundaryWorld, client_of: Callable[[str], Driven]
) -> None:
    world.append(1, 2, 3, 4, 5)
    client = client_of(world.server.url)
    assert offsets(client.fetch("c", 2)) == [1, 2]
    world.server.calls.clear()
    assert offsets(client.fetch("c", 2, confirm=2)) == [3, 4]
    assert world.server.calls == [("confirm", "c", 2), ("fetch", "c", 2)]
    assert world.cursor("c") == 2
    assert offsets(client.fetch("c", 9, confirm=1)) == [3, 4, 5], "the cursor never goes back"
    assert offsets(client.fetch("c", confirm=5)) == []
    assert offsets(client.fetch("c", wait=0.01, confirm=5)) == []
    assert world.cursor("c") == 5


def test_it_waits_for_what_is_beyond(world: BoundaryWorld, client_of: Callable[[str], Driven]) -> None:
    world.append(1)
    client = client_of(world.server.url)
    client.fetch("c")
    assert client.fetch("c", wait=0.2, confirm=1).facts == ()
    world.append(2)
    assert offsets(client.fetch("c", wait=20.0, confirm=1)) == [2]


@pytest.mark.parametrize(
    ("name", "offset", "kind"),
    [
        ("c", 4, OffsetOutOfRange),
        ("unknown", 1, NotFound),
        ("c", -1, InvalidArgument),
        ("", 1, InvalidArgument),
    ],
)
def test_it_is_refused_exactly_as_a_confirmation_and_fetches_nothing(
    world: BoundaryWorld,
    client_of: Callable[[str], Driven],
    name: str,
    offset: int,
    kind: type[BoundaryError],
) -> None:
    world.append(1, 2, 3)
    client = client_of(world.server.url)
    client.fetch("c")
    with pytest.raises(kind) as alone:
        client.confirm(name, offset)
    world.server.calls.clear()
    with pytest.raises(kind) as together:
        client.fetch(name, confirm=offset)
    assert str(together.value) == str(alone.value)
    assert (together.value.code, together.value.field) == (alone.value.code, alone.value.field)
    assert world.server.names() == ["confirm"]
    assert world.cursor("c") == 0
    assert world.cursor("unknown") is None


def test_a_fetch_that_fails_after_its_confirmation_can_be_repeated(
    world: BoundaryWorld, client_of: Callable[[str], Driven]
) -> None:
    world.append(1, 2, 3)
    client = client_of(world.server.url)
    client.fetch("c")
    world.server.failing["fetch"].append(NotFound("the page is gone"))
    with pytest.raises(NotFound, match="the page is gone"):
        client.fetch("c", confirm=2)
    assert world.cursor("c") == 2
    assert offsets(client.fetch("c", confirm=2)) == [3]


def test_it_is_durable_before_the_answer(tmp_path: Path) -> None:
    server = Served(tmp_path / "data")
    with BoundaryClient(server.url) as client:
        append(client, 1, 2, 3)
        client.fetch("c")
        assert offsets(client.fetch("c", confirm=2)) == [3]
    server.end(signal.SIGKILL)
    server = Served(tmp_path / "data")
    with BoundaryClient(server.url) as client:
        assert offsets(client.fetch("c")) == [3]
    server.end(signal.SIGTERM)


def test_it_is_counted_as_both_and_works_in_json(world: BoundaryWorld) -> None:
    world.append(1, 2)
    world.admin.fetch("c")
    body = json.dumps({"consumerName": "c", "limit": "9", "confirm": "1"}).encode()
    path = "/onceward.boundary.v1.BoundaryService/FetchFacts"
    request = Request(world.server.url + path, body, {"content-type": "application/json"})
    with urlopen(request) as answer:
        page = json.load(answer)
    assert page["cursorAdvancedTo"] == "1"
    assert [each["offset"] for each in page["facts"]] == ["2"]
    with urlopen(world.server.url + "/metrics") as answer:
        metrics = answer.read().decode().splitlines()
    assert "onceward_boundary_confirm_requests_total 1.0" in metrics
    assert "onceward_boundary_fetch_requests_total 2.0" in metrics


# ── who may, and older boundaries ───────────────────────────────────────────────────────────────────────


class FetchesOnly(Guard):
    def check(self, what: str, request: Any = None) -> None:
        if isinstance(request, pb.ConfirmReceiptRequest):
            raise PermissionDenied("consumer", f"{what} is not for you", "consumer_name")


def test_a_peer_that_may_not_confirm_may_not_do_it_here_either(tmp_path: Path) -> None:
    def guarded(boundary: Boundary) -> Any:
        return WithoutTls(boundary, FetchesOnly(None, boundary.metrics))  # type: ignore[arg-type]

    with boundary_server(tmp_path, application=guarded) as url, BoundaryClient(url) as client:
        append(client, 1, 2)
        assert offsets(client.fetch("c")) == [1, 2]
        for call in (lambda: client.confirm("c", 1), lambda: client.fetch("c", confirm=1)):
            with pytest.raises(PermissionDenied, match="ConfirmReceipt is not for you") as refused:
                call()
            assert refused.value.field == "consumer_name"
        assert offsets(client.fetch("c")) == [1, 2]


class WithoutTls(Application):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        shown = (b"x-forwarded-client-cert", b"")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(asgi.Certificate, "of", lambda _: None)
            await super().__call__({**scope, "headers": [*scope["headers"], shown]}, receive, send)


class Older(BoundaryRpc):
    """Does not know the field."""

    async def fetch_facts(self, request: pb.FetchFactsRequest, ctx: Any) -> Any:
        known = pb.FetchFactsRequest(consumer_name=request.consumer_name, limit=request.limit)
        return await super().fetch_facts(known, ctx)


@contextmanager
def older_server(world: BoundaryWorld) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(asgi, "BoundaryRpc", Older)
        world.server.stop()
        world.server.start()
        yield


def test_an_older_boundary_is_found_out_once_and_then_asked_apart(
    world: BoundaryWorld, client_of: Callable[[str], Driven]
) -> None:
    world.append(1, 2, 3)
    with older_server(world):
        client = client_of(world.server.url)
        assert offsets(client.fetch("c", 1)) == [1]
        world.server.calls.clear()
        assert offsets(client.fetch("c", 1, confirm=1)) == [2]
        assert world.server.names() == ["fetch", "confirm", "fetch"]
        world.server.calls.clear()
        assert offsets(client.fetch("c", 1, confirm=2)) == [3]
        assert world.server.names() == ["confirm", "fetch"]


def test_a_consumer_of_an_older_boundary_applies_each_fact_once(world: BoundaryWorld) -> None:
    world.append(1, 2, 3, 4, 5)
    with older_server(world):
        world.consume(book, limit=2)
    assert world.effects() == [1, 2, 3, 4, 5]
    assert world.cursor() == 5


# ── the consumer's loop ─────────────────────────────────────────────────────────────────────────────────


def test_a_consumer_confirms_a_batch_with_the_next_fetch_and_the_last_one_alone(world: BoundaryWorld) -> None:
    world.append(1, 2, 3, 4, 5)
    asked: list[str] = []
    port = world.client.thing._port
    ask = port.ask

    def note(method: str, *more: Any) -> Any:
        asked.append(method)
        return ask(method, *more)

    port.ask = note
    world.consume(book, limit=2)
    assert asked == ["fetch_facts"] * 4
    assert world.cursor() == 5

    world.append(6)
    consumer = world.consumer()

    async def stop(fact: Any, session: Awaited) -> None:
        await book(fact, session)
        consumer.thing.stop()

    consumer.run(world.handler(stop), world.database.default)
    assert asked[4:] == ["fetch_facts", "confirm_receipt"]
    assert world.cursor() == 6


def test_a_fact_that_fails_after_a_confirmed_batch_leaves_that_batch_confirmed(world: BoundaryWorld) -> None:
    world.append(1, 2, 3)

    async def fail_at_three(fact: Any, session: Awaited) -> None:
        await book(fact, session)
        if fact.offset == 3:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        world.consume(fail_at_three, limit=2)
    assert world.server.calls.count(("confirm", NAME, 2)) == 1
    assert world.server.count("confirm") == 1
    assert world.cursor() == 2
