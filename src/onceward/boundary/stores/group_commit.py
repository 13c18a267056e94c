"""Group commit: calls that arrive while a commit is running all share the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from onceward.boundary.errors import BoundaryError, Unavailable

Thing = TypeVar("Thing")
Outcome = TypeVar("Outcome")

MOST_AT_ONCE = 1000
"""Later callers must not wait forever."""
MOST_BYTES_AT_ONCE = 8 * 1024 * 1024


class Load(NamedTuple, Generic[Thing, Outcome]):
    """What one caller submits; never split."""

    things: Sequence[Thing]
    done: asyncio.Future[Sequence[Outcome]]


class Grouped(Generic[Thing, Outcome]):
    """Passes what is submitted to `commit`, group by group. `commit` returns one outcome for each thing."""

    def __init__(
        self,
        commit: Callable[[Sequence[Thing]], Awaitable[Sequence[Outcome]]],
        bytes_of: Callable[[Thing], int] = lambda _: 0,
    ) -> None:
        self._commit = commit
        self._bytes_of = bytes_of
        self._waiting: asyncio.Queue[Load[Thing, Outcome] | None] = asyncio.Queue()
        self._closed = False
        self._writer = asyncio.create_task(self._write(), name="onceward-boundary-writer")

    async def submit(self, thing: Thing) -> Outcome:
        [outcome] = await self.submit_all([thing])
        return outcome

    async def close(self) -> None:
        """Answer pending callers, then stop. Idempotent."""
        if not self._closed:
            self._closed = True
            self._waiting.put_nowait(None)
        await self._writer

    async def submit_all(self, things: Sequence[Thing]) -> Sequence[Outcome]:
        """Submit these for one commit; `split` many."""
        if self._closed:
            raise Unavailable("this boundary is closing")
        load = Load(things, asyncio.get_running_loop().create_future())
        self._waiting.put_nowait(load)
        # A canceled caller does not undo what is being written.
        return await asyncio.shield(load.done)

    def split(self, things: Sequence[Thing]) -> Iterator[list[Thing]]:
        portion: list[Thing] = []
        size = 0
        for thing in things:
            portion.append(thing)
            size += self._bytes_of(thing)
            if len(portion) >= MOST_AT_ONCE or size >= MOST_BYTES_AT_ONCE:
                yield portion
                portion, size = [], 0
        if portion:
            yield portion

    async def _write(self) -> None:
        while group := await self._next_group():
            try:
                outcomes = iter(await self._commit([thing for load in group for thing in load.things]))
            except Exception as error:  # noqa: BLE001  the writer must continue, and callers must get an answer
                failure = (
                    error
                    if isinstance(error, BoundaryError)
                    else Unavailable(f"nothing was written: {error!r}")
                )
                for load in group:
                    if not load.done.done():
                        load.done.set_exception(failure)
                        load.done.exception()  # marks it as seen, in case the caller was canceled
            else:
                for load in group:
                    mine = [next(outcomes) for _ in load.things]
                    if not load.done.done():
                        load.done.set_result(mine)

    async def _next_group(self) -> list[Load[Thing, Outcome]]:
        """Return all pending loads, up to the limits; none at the end."""
        group: list[Load[Thing, Outcome]] = []
        count = size = 0
        while not group or (count < MOST_AT_ONCE and size < MOST_BYTES_AT_ONCE and not self._waiting.empty()):
            load = await self._waiting.get()
            if load is None:
                self._waiting.put_nowait(None)  # end after this group
                break
            group.append(load)
            count += len(load.things)
            size += sum(map(self._bytes_of, load.things))
        return group
