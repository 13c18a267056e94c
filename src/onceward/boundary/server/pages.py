"""Pages for operators: /metrics, /stats, /details, /livez and /readyz. They answer soon, even if the store does not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

import msgspec

from onceward.boundary.boundary import Boundary
from onceward.boundary.errors import Unavailable
from onceward.boundary.links.manager import Links
from onceward.boundary.server.details import details_of, first_artifacts
from onceward.boundary.store import Bounds, Cursor, StoreDurability

ANSWER_WAIT = 1.0
"""Seconds that the store may take."""

T = TypeVar("T")
Page = tuple[int, bytes, bytes]
"""Status, content type, body."""

TEXT, JSON = b"text/plain; charset=utf-8", b"application/json"
METRICS = b"text/plain; version=0.0.4; charset=utf-8"


class StoreState(NamedTuple):
    bounds: Bounds
    cursors: list[Cursor]
    lags: list[float]
    """Seconds since the first unconfirmed fact of each cursor was appended."""
    fill_percent: float


class BoundaryPages:
    def __init__(self, boundary: Boundary, links: Links | None = None) -> None:
        self._boundary = boundary
        self._links = links
        self._asked: dict[str, asyncio.Task[Any]] = {}

    async def answer(self, path: str) -> Page:
        return await PAGES[path](self)

    async def metrics(self) -> Page:
        metrics = self._boundary.metrics
        try:
            state = await self._ask("metrics", self._read_state)
        except Exception:  # noqa: BLE001  reported by a gauge; the counters are needed most while the store is away
            metrics.forget_store()
        else:
            metrics.store_up.set(1)
            metrics.frontier.set(state.bounds.last)
            metrics.fill.set(state.fill_percent)
            metrics.forget_cursors()
            for cursor, lag in zip(state.cursors, state.lags, strict=True):
                metrics.backlog.labels(cursor.name).set(_backlog(cursor, state.bounds))
                metrics.consumer_lag.labels(cursor.name).set(lag)
        return 200, METRICS, metrics.text()

    async def stats(self) -> Page:
        try:
            bounds, cursors, lags, fill = await self._ask("metrics", self._read_state)
        except Exception as error:  # noqa: BLE001  any error is the answer
            answer = {"code": Unavailable.code, "message": f"the store cannot be read: {error}"}
            return 503, JSON, msgspec.json.encode(answer)
        consumers = [
            {
                "name": cursor.name,
                "offset": cursor.offset,
                "backlog": _backlog(cursor, bounds),
                "lag_seconds": lag,
                "confirmed_at_unix_ms": cursor.confirmed_at_unix_ms,
            }
            for cursor, lag in zip(cursors, lags, strict=True)
        ]
        stats = {
            "first": bounds.first,
            "last": bounds.last,
            "fill_percent": fill,
            "consumers": consumers,
            "durability": await self._durability(),
        }
        return 200, JSON, msgspec.json.encode(stats)

    async def details(self) -> Page:
        store, links = self._boundary.store, self._links
        size, usage, artifacts = await asyncio.gather(
            self._ask_or_none("size", store.size),
            self._ask_or_none("usage", store.objects.usage),
            self._ask_or_none("artifacts", lambda: first_artifacts(self._boundary)),
        )
        zone, states = ("", []) if links is None else (links.zone, links.states())
        found = details_of(self._boundary, zone, states, size, usage, artifacts)
        return 200, JSON, msgspec.json.encode(found)

    async def livez(self) -> Page:
        return 200, TEXT, b"alive\n"

    async def readyz(self) -> Page:
        try:
            await self._ask("readyz", self._boundary.store.bounds)
        except Exception as error:  # noqa: BLE001  any error is the answer
            return 503, TEXT, f"not ready: {error}\n".encode()
        return 200, TEXT, b"ready\n"

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────

    async def _ask(self, name: str, question: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Ask the store, or wait for the answer to the same question if it was asked before: a store that hangs gets
        one call of each page, however often the page is read. The call is not canceled, which may hang as well."""
        asked = self._asked.get(name)
        if asked is None or asked.done():
            asked = self._asked[name] = asyncio.create_task(question())
            asked.add_done_callback(_mark_as_seen)
        done, _ = await asyncio.wait({asked}, timeout=ANSWER_WAIT)
        if not done:
            raise Unavailable(f"the store has not answered within {ANSWER_WAIT:g} s")
        answer: T = asked.result()
        return answer

    async def _ask_or_none(self, name: str, question: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        try:
            return await self._ask(name, question)
        except Exception:  # noqa: BLE001  then it is unknown
            return None

    async def _durability(self) -> StoreDurability:
        try:
            return await self._ask("durability", self._boundary.store.durability)
        except Exception as error:  # noqa: BLE001  then it is unknown
            return StoreDurability(None, f"not checked how durable the store of the boundary is: {error}")

    async def _read_cursors(self) -> tuple[Bounds, list[Cursor]]:
        return await self._boundary.store.bounds(), await self._boundary.store.cursors()

    async def _read_state(self) -> StoreState:
        bounds, cursors = await self._read_cursors()
        offsets = list({cursor.offset for cursor in cursors if cursor.offset < bounds.last})
        times = await self._boundary.store.times_after(offsets)
        now = self._boundary.clock.now()  # facts that are appended now get this time
        lags = {
            offset: max(now - at / 1000, 0.0)
            for offset, at in zip(offsets, times, strict=True)
            if at is not None
        }
        return StoreState(
            bounds,
            cursors,
            [lags.get(cursor.offset, 0.0) for cursor in cursors],
            await self._boundary.fill.percent(),
        )


PAGES: dict[str, Callable[[BoundaryPages], Awaitable[Page]]] = {
    "/metrics": BoundaryPages.metrics,
    "/stats": BoundaryPages.stats,
    "/details": BoundaryPages.details,
    "/livez": BoundaryPages.livez,
    "/readyz": BoundaryPages.readyz,
}
OPEN_PAGES = ("/livez", "/readyz")


def _backlog(cursor: Cursor, bounds: Bounds) -> int:
    return max(bounds.last - max(cursor.offset, bounds.first - 1), 0)


def _mark_as_seen(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
