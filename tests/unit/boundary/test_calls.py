"""The limits of calls, with a clock of their own: what a message may take, in time and in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from connectrpc.errors import ConnectError
from hypothesis import given, settings
from hypothesis import strategies as st

from onceward.boundary.metrics import BoundaryMetrics
from onceward.boundary.server import calls as calls_module
from onceward.boundary.server.calls import FREE, LEAST, LimitedCalls
from onceward.boundary.server.limits import Limits

Events = Iterator[tuple[float, bytes, bool]]
"""How long each part takes to arrive, the part, and whether there are more."""


def framed(*sizes: int) -> bytes:
    return b"".join(b"\0" + size.to_bytes(4) + b"x" * size for size in sizes)


def call(
    events: Iterable[tuple[float, bytes, bool]],
    limits: Limits,
    kind: bytes = b"application/proto",
    look: Callable[[LimitedCalls], object] = lambda calls: None,
    length: int | None = None,
) -> LimitedCalls:
    """Read a call's body. The clock moves only while parts arrive."""
    found = iter(events)

    async def receive() -> dict[str, Any]:
        nonlocal now
        seconds, body, more = next(found)
        now += seconds
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return {"type": "http.request", "body": body, "more_body": more}

    async def read(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            look(calls)

    async def main() -> LimitedCalls:
        asyncio.get_running_loop().time = lambda: now  # type: ignore[method-assign]
        headers = [(b"content-type", kind)]
        headers += [] if length is None else [(b"content-length", b"%d" % length)]
        await calls({"path": "/x", "headers": headers}, receive, None)  # type: ignore[arg-type]
        return calls

    now = 100.0
    calls = LimitedCalls(read, limits, BoundaryMetrics())
    return asyncio.run(main())


@pytest.mark.req("BC-29")
def test_each_message_of_a_stream_has_its_own_deadline() -> None:
    parts = [(6.0, framed(LEAST), True)] * 5 + [(1.0, b"", False)]
    call(parts, Limits(body=10), b"application/grpc")


@pytest.mark.req("BC-29")
@pytest.mark.parametrize("kind", [b"application/grpc", b"application/connect+proto", b"application/json"])
def test_the_parts_of_one_message_share_a_deadline(kind: bytes) -> None:
    message = framed(3000)
    parts = [(6.0, message[:1000], True), (6.0, message[1000:2000], True), (6.0, message[2000:], False)]
    with pytest.raises(ConnectError, match="a message did not arrive within 10 s"):
        call(parts, Limits(body=10), kind)


@pytest.mark.req("BC-61")
def test_who_waits_for_the_end_of_a_caller_looks_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Envoy answers each look at once, with an empty end of the message, for as long as the caller is there."""
    looks = 0

    async def receive() -> dict[str, Any]:
        nonlocal looks
        looks += 1
        return {"type": "http.disconnect"} if looks > 4 else end

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        assert await receive() == end
        began = asyncio.get_running_loop().time()
        assert await receive() == {"type": "http.disconnect"}
        took.append(asyncio.get_running_loop().time() - began)

    end = {"type": "http.request", "body": b"", "more_body": False}
    took: list[float] = []
    monkeypatch.setattr(calls_module, "LOOK_EVERY", 0.05)
    calls = LimitedCalls(wait, Limits(), BoundaryMetrics())
    asyncio.run(calls({"path": "/x", "headers": []}, receive, None))  # type: ignore[arg-type]
    assert looks == 5
    assert took[0] >= 0.19


@pytest.mark.req("BC-29")
def test_only_the_message_that_is_arriving_takes_memory() -> None:
    seen: list[int] = []
    message = framed(3 * FREE)
    parts = [
        (0, message, True),
        (0, message[: 2 * FREE], True),
        (0, message[2 * FREE :], True),
        (0, b"", False),
    ]
    calls = call(
        parts, Limits(body_memory=2 * FREE), b"application/grpc", lambda calls: seen.append(calls.held)
    )
    assert seen == [2 * FREE, FREE - 5, 2 * FREE]
    assert calls.held == 0


@pytest.mark.req("BC-29")
def test_what_is_beyond_the_memory_is_refused_and_its_memory_is_free() -> None:
    seen: list[LimitedCalls] = []
    with pytest.raises(ConnectError, match="body_memory allows 100000"):
        call([(0, b"x" * FREE, True)] * 9, Limits(body_memory=100_000), look=seen.append)
    assert seen[0].held == 0


def test_a_body_of_known_length_ends_with_its_last_byte() -> None:
    """Envoy reports the end by itself, later."""
    parts = iter([(0.0, b"xx", True), (0.0, b"x", True), (0.0, b"", False)])
    call(parts, Limits(), length=3)
    assert list(parts) == [(0.0, b"", False)]


@given(
    sizes=st.lists(st.integers(0, 60), max_size=6), cuts=st.lists(st.integers(1, 40), min_size=1, max_size=5)
)
@settings(max_examples=50)
def test_messages_are_found_however_they_are_cut(sizes: list[int], cuts: list[int]) -> None:
    whole, parts, at = framed(*sizes), [], 0
    while at < len(whole):
        cut = cuts[len(parts) % len(cuts)]
        parts.append((0.0, whole[at : at + cut], True))
        at += cut
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onceward.boundary.server.calls.FREE", 16)
        largest = max([0, *(size - 16 for size in sizes)])
        call([*parts, (0.0, b"", False)], Limits(body_memory=largest), b"application/grpc")
