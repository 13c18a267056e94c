"""A stream of a simulated Redis, behind a wire: the real connector and its scripts, on a model of the server.

Requests of a process may overtake each other. One may arrive after its sender has given up on it, or is dead. The
server may restart, with all its data, or without the last second, as with `appendfsync everysec`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import redis.exceptions

from onceward.connectors.batches import AsyncCoalescer, BlockingCoalescer
from onceward.connectors.lease_rules import LeaseRules
from onceward.connectors.redis_streams import AsyncRedisStreamsConnector, RedisStreamsConnector, scripts
from onceward.connectors.redis_streams.base import StreamConnector
from tests.simulation.brokers.redis import Id, ModelRedis, Pending, Stream, entries_of, show
from tests.simulation.loop import START, Process
from tests.simulation.sources.source import RestartingSource, Watcher
from tests.simulation.threads import block
from tests.simulation.wire import Wire, WireLost

STREAM, GROUP = "orders", "onceward"
DEAD = f"{{{STREAM}}}:{GROUP}:dead"
PATIENCE = 5.0
"""Seconds after which a client gives up on a reply."""


class SimulatedRedisWire:
    """As `AsyncRedisWire`."""

    server = "redis"

    def __init__(self, source: RedisSource, process: Process) -> None:
        self._source = source
        self._process = process

    async def exchange(
        self, commands: Sequence[Any], block_ms: int | None = None, arrivals: Any = None
    ) -> list[Any]:
        source, wire = self._source, self._source.wire
        what = _name(commands[0])
        try:
            if wire.random.random() < source.late:
                await self._send_late(commands, what)
            await wire.send(self._process, source.name, what)
            replies = await source.serve(self._process, commands, block_ms)
            await wire.receive(self._process, source.name, what)
        except WireLost as lost:
            raise redis.exceptions.ConnectionError(str(lost)) from None
        return replies

    async def _send_late(self, commands: Sequence[Any], what: str) -> None:
        """It arrives, but too late for an answer."""
        source, wire, process = self._source, self._source.wire, self._process
        delay = wire.random.choice((PATIENCE + 0.1, 12.0, 33.0))
        wire.history.note(process, "%s: %s arrives in %g s", source.name, what, delay)
        wire.loop.call_later(delay, source.serve_late, process, commands, what, context=source.root.context)
        await asyncio.sleep(PATIENCE)
        raise redis.exceptions.TimeoutError(f"no reply to {what} in {PATIENCE:g} s")

    async def close(self) -> None:
        return


class SimulatedStream(AsyncRedisStreamsConnector):
    extend_from_thread = None  # type: ignore[assignment]  # there are no threads

    def __init__(self, source: RedisSource, process: Process, rules: LeaseRules) -> None:
        begin(self, SimulatedRedisWire(source, process), source, process, rules)
        self._out = AsyncCoalescer(lambda entries: self._perform(self._queue.append(entries)))


class BlockingWire(SimulatedRedisWire):
    """As `BlockingRedisWire`, in a simulated thread."""

    async def exchange(
        self, commands: Sequence[Any], block_ms: int | None = None, arrivals: Any = None
    ) -> list[Any]:
        return block(super().exchange(commands, block_ms, arrivals))


class BlockingStream(RedisStreamsConnector):
    def __init__(self, source: RedisSource, process: Process, rules: LeaseRules) -> None:
        begin(self, BlockingWire(source, process), source, process, rules)
        self._out = BlockingCoalescer(lambda entries: self._perform(self._queue.append(entries)))


def begin(
    connector: StreamConnector, wire: Any, source: RedisSource, process: Process, rules: LeaseRules
) -> None:
    settings: Any = {"lease": rules.lease, "max_deliveries": rules.max_deliveries}
    StreamConnector.__init__(connector, wire, STREAM, GROUP, clock=process.loop.time, **settings)
    connector._queue.owner = process.name
    connector._queue.consumer = f"{process.name}-{source.next_number():012}"


class RedisSource(RestartingSource):
    name = "redis"

    def __init__(self, wire: Wire, watcher: Watcher, rules: LeaseRules, root: Process) -> None:
        super().__init__(wire, watcher, rules, root)
        self._waiting: dict[asyncio.Future[None], str] = {}
        self._lost: set[str] = set()
        self._number = 0
        self.model = ModelRedis(lambda: START + wire.loop.time())
        self.model.changed = self._changed
        self.sync()

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def open(self, process: Process) -> SimulatedStream:
        return SimulatedStream(self, process, self._rules)

    def open_blocking(self, process: Process) -> BlockingStream:
        return BlockingStream(self, process, self._rules)

    # ── the server ──────────────────────────────────────────────────────────────────────────────────────

    async def serve(self, process: Process, commands: Sequence[Any], block_ms: int | None) -> list[Any]:
        self._check_up()
        if block_ms is None:
            return self._execute(process, commands)
        *_, key, after = commands[-1]
        if not self.model.has_after(key, after):
            waiting = asyncio.get_running_loop().create_future()
            self._waiting[waiting] = after
            try:
                async with asyncio.timeout(block_ms / 1000):
                    await waiting
            except TimeoutError:
                return [None] * len(commands)
            finally:
                self._waiting.pop(waiting, None)
        return self._execute(process, commands)

    def serve_late(self, process: Process, commands: Sequence[Any], what: str) -> None:
        if not self.is_down:
            self.wire.history.note(process, "%s: %s arrives only now", self.name, what)
            self._execute(process, commands)

    def _execute(self, process: Process, commands: Sequence[Any]) -> list[Any]:
        replies = [self.model.execute(each, process) for each in commands]
        for waiting, after in self._waiting.items():
            if not waiting.done() and self.model.has_after(STREAM, after):
                waiting.set_result(None)
        return replies

    def _check_up(self) -> None:
        if self.is_down:
            raise redis.exceptions.ConnectionError("connection refused: redis is down")

    def sync(self) -> None:
        self._synced = self.model.snapshot(), dict(self._watcher.ends), dict(self._watcher.holders)

    def crash(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(redis.exceptions.ConnectionError("Connection closed by server."))

    def come_back(self) -> None:
        if not self._forgets:
            self.model.restart(self.model.snapshot())
            return
        before = self._bodies()
        keys, ends, holders = self._synced
        self.model.restart(keys)
        self._watcher.ends = dict(ends)
        self._watcher.holders = dict(holders)
        gone = {id_ for entry, id_ in before.items() if entry not in self._bodies()}
        self._lost |= gone
        self.wire.history.note(self.name, "has lost %s", sorted(gone))

    # ── what is seen ────────────────────────────────────────────────────────────────────────────────────

    def _changed(self, process: Process, id_: Id, before: Pending | None, after: Pending | None) -> None:
        watcher, key = self._watcher, show(id_)
        if before is None:
            assert after is not None
            watcher.delivered(process, key, (after.consumer, after.deliveries))
            return
        if after is None:
            self._ended(process, id_)
        elif after.deliveries > before.deliveries:
            idle = self.model.now() - before.since
            is_delayed = before.consumer == scripts.DELAYED
            if is_delayed and idle < scripts.AGES:
                watcher.accuse(f"{process} claims message {key}, delayed by {scripts.AGES - idle:g} ms more")
            elif idle < self._rules.lease * 1000:
                watcher.accuse(f"{process} claims message {key}, whose lease began {idle:g} ms ago")
            watcher.delivered(process, key, (after.consumer, after.deliveries))
        elif after.consumer == scripts.DELAYED:
            how = "returned" if after.deliveries < before.deliveries else "delayed"
            watcher.ended(process, key, self._token(process, key), how, None)
        elif watcher.holders.get(key, (None, None))[1] is not process:
            watcher.accuse(f"{process} extends message {key}, which is no longer its own")

    def _ended(self, process: Process, id_: Id) -> None:
        key = show(id_)
        if key in {fields["entry"] for fields in self._letters()}:
            self._watcher.ended(process, key, self._token(process, key), "buried", None)
            return
        token = self._token(process, key)
        if self.model.script == scripts.ACKNOWLEDGE:
            # A delivery that is certain to be the newest is acknowledged without a look. If the request was on its way
            # for too long, or Redis forgot the delivery, it is not the newest; its message is done all the same.
            self._watcher.holders[key] = token, process
        self._watcher.ended(process, key, token, "done", self._bodies()[key])

    def _token(self, process: Process, key: str) -> Any:
        """The delivery that this process has, if it has the newest one."""
        token, holder = self._watcher.holders.get(key, (None, None))
        return token if holder is process else "another one"

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────

    def _stream(self) -> Stream:
        found: Stream = self.model.keys.get(STREAM) or Stream()
        return found

    def _bodies(self) -> dict[str, str]:
        """The ids of messages, by their entries."""
        return {show(id_): fields["id"] for id_, fields in entries_of(self._stream())}

    def _letters(self) -> list[dict[str, str]]:
        return [fields for _, fields in entries_of(self.model.keys.get(DEAD) or Stream())]

    def left(self) -> list[Any]:
        stream = self._stream()
        group = stream.groups.get(GROUP)
        if group is None:
            return list(stream.entries)
        return [id_ for id_ in stream.entries if id_ > group.last or id_ in group.pending]

    def totals(self) -> tuple[int, int, int]:
        done = sum(how == "done" for how in self._watcher.ends.values())
        return len(self._stream().entries), done, len(self._letters())

    def buried(self) -> Counter[str]:
        return Counter(fields["id"] for fields in self._letters())

    def lost(self) -> set[str]:
        return self._lost


def _name(command: Sequence[Any]) -> str:
    """Name a command, or the script that it runs."""
    if command[0] not in ("EVAL", "EVALSHA"):
        return str(command[0])
    return _SCRIPTS.get(command[1], "a script")


def _hash(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


_SCRIPTS = {
    key: name
    for name, script in vars(scripts).items()
    if name[0].isupper() and isinstance(script, str)
    for key in (script, _hash(script))
}
