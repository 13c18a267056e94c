"""The calls that are made most are answered as the library would answer them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from onceward.boundary import envelope_for, fact_of
from onceward.boundary.boundary import Boundary
from onceward.boundary.server import asgi
from onceward.boundary.server.asgi import Application, HotCalls
from onceward.boundary.stores.sqlite import SqliteBoundaryStore
from onceward.boundary.v1 import boundary_pb as pb
from onceward.boundary.wire import append_request, append_requests

pytestmark = pytest.mark.req("BC-62")


def appended(id_: str, value: object, zone: str = "a") -> bytes:
    return append_request(envelope_for(id_, from_zone=zone, to_zone="b"), fact_of("order:1", "placed", value))


def fetched(**fields: Any) -> bytes:
    return bytes(pb.FetchFactsRequest(**{"consumer_name": "c", "limit": 9} | fields).to_binary())


REQUESTS = [
    ("AppendFact", appended("m1", 1), {}),
    ("AppendFact", appended("m1", 1), {}),
    ("AppendFact", appended("m1", 2), {}),
    ("AppendFact", appended("", 2), {}),
    ("AppendFact", b"", {}),
    ("AppendFact", b"\0\0", {}),
    ("AppendFact", appended("m2", 2), {b"connect-timeout-ms": b"30000"}),
    ("AppendFact", appended("m2", 2), {b"connect-timeout-ms": b"soon"}),
    ("AppendFact", appended("m2", 2), {b"connect-timeout-ms": b"12345678901"}),
    ("AppendFact", appended("m2", 2), {b"connect-protocol-version": b"2"}),
    ("AppendFact", appended("m2", 2), {b"content-encoding": b"gzip"}),
    ("AppendFact", appended("m2", 2), {b"content-encoding": b"none such"}),
    ("AppendFact", appended("m2", 2), {b"content-type": b"text/plain"}),
    ("AppendFacts", append_requests([appended("m3", 3), appended("m1", 3), b"", appended("m1", 1)]), {}),
    ("ConfirmReceipt", bytes(pb.ConfirmReceiptRequest(consumer_name="c", offset=1).to_binary()), {}),
    ("FetchFacts", fetched(), {}),
    ("FetchFacts", fetched(), {b"accept-encoding": b"gzip"}),
    ("FetchFacts", fetched(confirm=1), {}),
    ("FetchFacts", fetched(confirm=9), {}),
    ("FetchFacts", fetched(limit=0), {}),
    ("FetchFacts", fetched(wait_ms=20_000, wait_after=9), {b"connect-timeout-ms": b"50"}),
    ("ConfirmReceipt", bytes(pb.ConfirmReceiptRequest(consumer_name="c", offset=2).to_binary()), {}),
]


class Caller:
    def __init__(self, application: Application) -> None:
        self._application = application

    async def ask(self, name: str, body: bytes, more: dict[bytes, bytes], leaves: float = 100.0) -> Any:
        headers = {b"content-type": b"application/proto"} | more
        events = [
            {"type": "http.request", "body": body[:5], "more_body": True},
            {"type": "http.request", "body": body[5:], "more_body": False},
        ]
        sent: list[Any] = []

        async def receive() -> Any:
            if events:
                return events.pop(0)
            await asyncio.sleep(leaves)
            return {"type": "http.disconnect"}

        async def send(event: Any) -> None:
            sent.append(event)

        path = f"/onceward.boundary.v1.BoundaryService/{name}"
        scope = {
            "type": "http",
            "path": path,
            "method": "POST",
            "root_path": "",
            "headers": [*headers.items()],
        }
        await self._application(scope, receive, send)
        start, end = sent
        kept = sorted(each for each in start["headers"] if each[0] != b"content-length")
        return start["status"], kept, _without_time(name, start, end["body"])


def _without_time(name: str, start: Any, body: bytes) -> Any:
    if name != "FetchFacts" or (b"content-encoding", b"identity") not in start["headers"]:
        return len(body) if (b"content-encoding", b"gzip") in start["headers"] else body
    page = pb.FetchFactsResponse.from_binary(body)
    return [(each.offset, each.envelope, each.fact) for each in page.facts], page.cursor_advanced_to


def test_every_answer_is_that_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answers(directory: Path) -> list[Any]:
        store = SqliteBoundaryStore(directory)
        try:
            caller = Caller(Application(Boundary(store)))
            return [await caller.ask(*each) for each in REQUESTS]
        finally:
            await store.close()

    monkeypatch.setattr("onceward.boundary.stores.sqlite._now", lambda: 1_700_000_000_000)
    here = asyncio.run(answers(tmp_path / "here"))
    monkeypatch.setattr(HotCalls, "find", lambda *_: None)
    there = asyncio.run(answers(tmp_path / "there"))
    assert [each[0] for each in here[:6]] == [200, 200, 409, 400, 400, 400]
    for request, one, other in zip(REQUESTS, here, there, strict=True):
        assert one == other, request


def test_a_call_ends_with_its_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> Any:
        store = SqliteBoundaryStore(tmp_path)
        try:
            caller = Caller(Application(Boundary(store)))
            await caller.ask("FetchFacts", fetched(), {})
            async with asyncio.timeout(10.0):
                return await caller.ask("FetchFacts", fetched(wait_ms=20_000), {}, leaves=0.05)
        finally:
            await store.close()

    monkeypatch.setattr(asgi, "LOOK_AFTER", 0.01)
    status, _, body = asyncio.run(main())
    assert status == 499
    assert b"Client disconnected" in body
